"""Fused output projection and cross-entropy, by chunks of tokens."""

from typing import Any

import torch
from torch import Tensor

from tune.collators import Batch
from tune.losses.chunks import Gradients, chunks_of_logits, default_chunk_tokens, normalize, operands
from tune.types import PositiveInt


class LinearCrossEntropy:
    """Sum over supervised tokens of the cross-entropy of `hidden @ weight.T`, in fp32.

    Equals `F.cross_entropy(hidden @ weight.T, labels, reduction="sum")`, but only the logits of `chunk_tokens` tokens
    exist at a time: the gradients of `hidden` and `weight` are computed from them in the forward. Tokens labelled -100
    are not projected. (torch's `linear_cross_entropy` rounds the loss to bf16 with bf16 inputs; in fp32 on a CPU it is
    about as fast: benchmarks/linear_cross_entropy.py.)

    Every chunk reads the weight twice and its gradient once, which dominates if chunks are small. By default the logits
    of a chunk take half a GiB in fp32 on a GPU; on a CPU a chunk has 512 tokens.

    With `accuracy`, `counts` `[2]` accumulates the correctly predicted tokens (highest logit) and all supervised ones.
    """

    def __init__(self, chunk_tokens: PositiveInt | None = None, accuracy: bool = False):
        self.chunk_tokens, self.accuracy = chunk_tokens, accuracy
        self.counts: Tensor | None = None

    def __call__(self, hidden: Tensor, weight: Tensor, batch: Batch, *, softcap: float | None = None) -> Tensor:
        """`hidden` `[rows, seq, dim]`, `weight` `[vocab, dim]` -> scalar. `softcap` bounds logits by tanh."""
        hidden, weight, labels = operands(hidden, weight, batch)
        chunk_tokens = self.chunk_tokens or default_chunk_tokens(weight)
        if self.accuracy and self.counts is None:
            self.counts = labels.new_zeros(2)
        return _LinearCrossEntropy.apply(hidden, weight, labels, chunk_tokens, softcap, self.counts)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        chunk_tokens: int,
        softcap: float | None,
        counts: Tensor | None,
    ) -> Tensor:
        loss = torch.zeros((), device=hidden.device)
        gradients = Gradients(hidden, weight, *ctx.needs_input_grad[:2])
        # All in place: a matrix of logits takes most of the memory.
        for chunk, logits, slope in chunks_of_logits(hidden, weight, chunk_tokens, softcap):
            targets = labels[chunk, None]
            if counts is not None:
                counts[0] += (logits.argmax(dim=1, keepdim=True) == targets).sum()
                counts[1] += len(targets)
            _, target_logits, exponentials, normalizer = normalize(logits, targets, out=logits)
            loss += (normalizer.log() - target_logits).sum()
            if any(ctx.needs_input_grad):
                probabilities = exponentials.div_(normalizer)
                probabilities.scatter_add_(1, targets, probabilities.new_full(targets.shape, -1.0))
                gradients.add(chunk, probabilities, slope)
        ctx.save_for_backward(gradients.hidden, gradients.weight)
        ctx.weight_dtype = weight.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        grad_hidden, grad_weight = ctx.saved_tensors
        if grad_hidden is not None:
            grad_hidden = grad_hidden * grad_loss.to(grad_hidden.dtype)
        if grad_weight is not None:
            grad_weight = grad_weight.mul_(grad_loss).to(ctx.weight_dtype)
        return grad_hidden, grad_weight, None, None, None, None
