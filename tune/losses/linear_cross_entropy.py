"""Fused output projection and cross-entropy, by chunks of tokens."""

from torch import Tensor

from tune.losses.chunks import SumOfChunks, VocabularyShard, cross_entropy, operands
from tune.losses.supervised import Labels, supervised_weights
from tune.types import PositiveInt, checked


@checked
class LinearCrossEntropy:
    """Sum over supervised tokens of the cross-entropy of `hidden @ weight.T`, in fp32. A Batch may weigh the tokens.

    Equals `F.cross_entropy(hidden @ weight.T, labels, reduction="sum")`, but only the logits of `chunk_tokens` tokens
    exist at a time: the gradients of `hidden` and `weight` are computed from them in the forward. Tokens labeled -100
    are not projected. Operands of two types are computed in the wider one, bf16 hidden states and an fp32 head in fp32.
    (torch's `linear_cross_entropy` rounds the loss to bf16 with bf16 inputs; in fp32 on a CPU it is about as fast:
    benchmarks/linear_cross_entropy.py.)

    Every chunk reads the weight twice and its gradient once, which dominates if chunks are small. By default the logits
    of a chunk take half a GiB in fp32 on a GPU; on a CPU a chunk has 512 tokens.

    With `accuracy`, `counts` `[2]` accumulates the correctly predicted tokens (highest logit) and all supervised ones.
    """

    takes_shares = True  # of the weight's rows
    of_parts = "sum"  # of a batch

    def __init__(self, chunk_tokens: PositiveInt | None = None, accuracy: bool = False):
        self.chunk_tokens, self.accuracy = chunk_tokens, accuracy
        self.counts: Tensor | None = None

    def __call__(self, hidden: Tensor, weight: Tensor, labels: Labels, *, softcap: float | None = None) -> Tensor:
        """`hidden` `[rows, seq, dim]`, `weight` `[vocab, dim]` -> scalar. `softcap` bounds logits by tanh.

        `labels` are `[rows, seq]`, already shifted, -100 where nothing is supervised (of others: `shift_labels` of
        `tune.collators`), or a Batch, which has them. Raises TuneError: see `operands`.
        """
        rows = VocabularyShard(weight)
        hidden, weight, ids = operands(hidden, weight, labels, len(weight))
        if self.accuracy and self.counts is None:
            self.counts = ids.new_zeros(2)

        def of_chunk(chunk: slice, logits: Tensor) -> tuple[Tensor, Tensor]:
            targets = ids[chunk, None]
            if self.counts is not None:
                self.counts[0] += (rows.argmax(logits) == targets).sum()
                self.counts[1] += len(targets)
            return cross_entropy(logits, targets, out=logits, rows=rows)

        weights = supervised_weights(labels)
        return SumOfChunks.apply(hidden, weight, self.chunk_tokens, softcap, of_chunk, weights)
