"""Log-probabilities of labels, in chunks of tokens: the inputs of preference and policy losses."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tune.losses.chunks import (
    Gradients,
    VocabularyShard,
    chunks_of_logits,
    first_derivative_only,
    normalize,
    operands,
)
from tune.losses.supervised import Labels, documents_of, require_vectors
from tune.types import PositiveFloat, PositiveInt, checked


class TokenLogProbs(NamedTuple):
    """Values per supervised token, row by row, `[tokens]`. Only `log_probs` have a gradient: a loss of `entropies`
    would change nothing."""

    log_probs: Tensor  # fp32: log-probs of the labels
    entropies: Tensor  # fp32: entropies of the predicted distributions, in nats, without gradient
    is_argmax: Tensor  # bool: no token is more probable than the label


@checked
class LogProbs:
    """A head that returns `TokenLogProbs`, from `(hidden @ weight.T / temperature).log_softmax(-1)`.

    Only the fp32 logits of `chunk_tokens` tokens and their exponentials exist at a time. The forward computes the
    gradient of `hidden`; the backward recomputes the logits for the gradient of `weight`, if it is trained. By default
    chunks are as large as in `LinearCrossEntropy`.
    """

    takes_shares = True  # accepts shares of the weight's rows
    of_parts = "tokens"  # results for parts of a batch are joined by token

    def __init__(self, chunk_tokens: PositiveInt | None = None, temperature: PositiveFloat = 1.0):
        self.chunk_tokens, self.temperature = chunk_tokens, temperature

    def __call__(
        self, hidden: Tensor, weight: Tensor, labels: Labels, *, softcap: float | None = None
    ) -> TokenLogProbs:
        """`hidden` `[rows, seq, dim]`, `weight` `[vocab, dim]`; `labels` as in `LinearCrossEntropy`. `softcap` bounds
        logits by tanh before they are divided by `temperature`."""
        options = self.chunk_tokens, softcap, self.temperature
        rows = VocabularyShard(weight)
        return TokenLogProbs(*_LogProbs.apply(*operands(hidden, weight, labels, len(weight)), rows, options))


def per_document(values: Tensor, labels: Labels) -> Tensor:
    """Sum `values` of supervised tokens `[tokens]` over each document, `[documents]`; 0 for padding.

    Documents are those of a Batch, or the rows of labels or of a mask (bool) `[rows, seq]`. Sums of log-probs from
    `LogProbs` are then the log-probs of whole rows, `[rows]`. Raises TuneError for another number of tokens.
    """
    documents, count = documents_of(labels)
    require_vectors(labels=documents, values=values)
    return values.new_zeros(count).index_add(0, documents, values)


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, rows: VocabularyShard,
        options: tuple[int | None, float | None, float],
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        gradients = Gradients(hidden, weight, of_hidden=ctx.needs_input_grad[0], of_weight=False)
        log_probs = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        entropies = torch.empty_like(log_probs)  # not a view of the same tensor, of which FSDP warns
        is_argmax = torch.empty_like(log_probs, dtype=torch.bool)
        log_normalizer = torch.empty_like(log_probs)[:, None]
        buffer = None
        for chunk, logits, slope in chunks_of_logits(hidden, weight, *options):
            targets = labels[chunk, None]
            buffer = torch.empty_like(logits) if buffer is None else buffer[: len(logits)]
            target_logits = rows.at(targets, logits)
            maximum, exponentials, normalizer = normalize(logits, out=buffer, rows=rows)
            is_argmax[chunk] = (target_logits == maximum).squeeze(1)
            log_probs[chunk] = (target_logits - maximum - normalizer.log()).squeeze(1)
            log_normalizer[chunk] = maximum + normalizer.log()
            product = rows.reduce(logits.mul_(exponentials).sum(dim=1, keepdim=True))
            entropies[chunk] = (normalizer.log() - product / normalizer).squeeze(1)
            if gradients.hidden is not None:
                gradients.add(chunk, _grad_logits(exponentials.div_(normalizer), targets, rows), slope)
        # Keep only what the weight's gradient needs.
        of_weight = (hidden, weight, labels, log_normalizer) if ctx.needs_input_grad[1] else (None,) * 4
        ctx.save_for_backward(gradients.hidden, *of_weight)
        ctx.rows, ctx.options = rows, options
        ctx.mark_non_differentiable(entropies, is_argmax)
        return log_probs, entropies, is_argmax

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        grad_hidden, hidden, weight, labels, log_normalizer = ctx.saved_tensors
        if grad_hidden is not None:
            grad_hidden = (grad_hidden * grad[:, None]).to(grad_hidden.dtype)
        if weight is None:
            return grad_hidden, None, None, None, None
        gradients = Gradients(hidden, weight, of_hidden=False, of_weight=True)
        for chunk, logits, slope in chunks_of_logits(hidden, weight, *ctx.options):
            probabilities = logits.sub_(log_normalizer[chunk]).exp_()
            grad_logits = _grad_logits(probabilities, labels[chunk, None], ctx.rows).mul_(grad[chunk, None])
            gradients.add(chunk, grad_logits, slope)
        assert gradients.weight is not None
        return grad_hidden, gradients.weight.to(weight.dtype), None, None, None


def _grad_logits(probabilities: Tensor, targets: Tensor, rows: VocabularyShard) -> Tensor:
    """Return the gradient of the target's log-prob, computed in place of `probabilities` `[chunk, vocab]`."""
    return rows.add_at(targets, probabilities.neg_(), 1.0)
