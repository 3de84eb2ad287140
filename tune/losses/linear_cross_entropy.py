"""Fused output projection and cross-entropy, in chunks of tokens."""

from torch import Tensor

from tune.losses.chunks import SumOfChunks, VocabularyShard, cross_entropy, operands
from tune.losses.supervised import Labels, supervised_weights
from tune.types import PositiveInt, checked


@checked
class LinearCrossEntropy:
    """Sum the cross-entropy of `hidden @ weight.T` over supervised tokens, in fp32. A Batch may have token weights.

    Equals `F.cross_entropy(hidden @ weight.T, labels, reduction="sum")`, but only the logits of `chunk_tokens` tokens
    exist at a time: the forward also computes the gradients of `hidden` and `weight`. Tokens labeled -100 are not
    projected. Operands of two dtypes are promoted to the wider one: bf16 hidden states and an fp32 head use fp32.
    (torch's `linear_cross_entropy` rounds the loss to bf16 with bf16 inputs; in fp32 on a CPU it is about as fast:
    benchmarks/linear_cross_entropy.py.)

    Every chunk reads the weight twice and its gradient once, which dominates if chunks are small. By default the logits
    of a chunk take half a GiB in fp32 on a GPU; on a CPU a chunk has 512 tokens.

    With `accuracy`, `counts` `[2]` accumulates the correctly predicted tokens (highest logit) and the supervised ones.
    """

    takes_shares = True  # accepts shares of the weight's rows
    of_parts = "sum"  # results for parts of a batch are summed

    def __init__(self, chunk_tokens: PositiveInt | None = None, accuracy: bool = False):
        self.chunk_tokens, self.accuracy = chunk_tokens, accuracy
        self.counts: Tensor | None = None

    def __call__(self, hidden: Tensor, weight: Tensor, labels: Labels, *, softcap: float | None = None) -> Tensor:
        """`hidden` `[rows, seq, dim]`, `weight` `[vocab, dim]` -> scalar. `softcap` bounds logits by tanh.

        `labels` is a Batch, or a tensor `[rows, seq]` that is already shifted (see `tune.collators.shift_labels`), with
        -100 for unsupervised tokens. Raises TuneError: see `operands`.
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
