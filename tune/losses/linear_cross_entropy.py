"""Fused output projection and cross-entropy, by chunks of tokens."""

from typing import Any

import torch
from torch import Tensor

from tune.collators import Batch
from tune.types import PositiveInt

SMALL_CHUNK = 512  # tokens
LOGITS = 2**27  # half a GiB in fp32


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
        hidden = hidden.flatten(0, 1).index_select(0, batch.supervised)
        labels = batch.labels.flatten().index_select(0, batch.supervised)
        chunk_tokens = self.chunk_tokens or default_chunk_tokens(weight)
        if self.accuracy and self.counts is None:
            self.counts = labels.new_zeros(2)
        return _LinearCrossEntropy.apply(hidden, weight, labels, chunk_tokens, softcap, self.counts)


def default_chunk_tokens(weight: Tensor) -> int:
    """The number of tokens in a chunk for `weight` `[vocab, dim]`, on its device."""
    return SMALL_CHUNK if weight.device.type == "cpu" else max(SMALL_CHUNK, LOGITS // weight.shape[0])


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
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        # Summed in fp32: in bf16 the contributions of later chunks would be rounded away.
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for start in range(0, len(hidden), chunk_tokens):
            chunk = slice(start, start + chunk_tokens)
            rows, targets = hidden[chunk], labels[chunk][:, None]
            # In place from here on: this matrix takes most of the memory.
            logits = (rows @ weight.T).float()
            if counts is not None:
                counts[0] += (logits.argmax(dim=1, keepdim=True) == targets).sum()
                counts[1] += len(targets)
            if softcap is not None:
                bounded = logits.div_(softcap).tanh_()
                slope = 1 - bounded.square()
                logits = bounded.mul_(softcap)
            logits -= logits.amax(dim=1, keepdim=True)
            target_logits = logits.gather(1, targets)
            exponentials = logits.exp_()
            normalizer = exponentials.sum(dim=1, keepdim=True)
            loss += (normalizer.log() - target_logits).sum()
            if grad_hidden is None and grad_weight is None:
                continue
            probabilities = exponentials.div_(normalizer)
            probabilities.scatter_add_(1, targets, probabilities.new_full(targets.shape, -1.0))
            if softcap is not None:
                probabilities *= slope
            grad_logits = probabilities.to(weight.dtype)
            if grad_hidden is not None:
                torch.mm(grad_logits, weight, out=grad_hidden[chunk])
            if grad_weight is not None:
                if grad_logits.dtype == torch.float32:
                    grad_weight.addmm_(grad_logits.T, rows)
                else:
                    grad_weight += grad_logits.T @ rows
        ctx.save_for_backward(grad_hidden, grad_weight)
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
