"""Losses. Each returns a sum over supervised tokens; the caller divides by the count of the whole optimizer step."""

from tune.losses.linear_cross_entropy import LinearCrossEntropy

__all__ = ["LinearCrossEntropy"]
