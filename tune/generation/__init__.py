"""Sampling from a model."""

from tune.generation.generate import generate

__all__ = ["generate"]
