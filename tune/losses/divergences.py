"""Divergences between a student's and a teacher's predictions, in chunks of tokens: the losses of distillation."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from tune.errors import TuneError
from tune.losses.chunks import (
    SumOfChunks,
    VocabularyShard,
    check_ids,
    chunks_of_logits,
    cross_entropy,
    is_dtensor,
    normalize,
    operands,
    promoted,
    takes_shares,
)
from tune.losses.supervised import Labels, of_supervised, supervised_weights
from tune.types import PositiveFloat, PositiveInt, Range, UnitInterval, checked


class Teacher(NamedTuple):
    """The input `[rows, seq, dim]` and weight of a teacher's head, from `model(batch, Teacher.head)` in `no_grad`."""

    hidden: Tensor
    weight: Tensor
    softcap: float | None = None

    @classmethod
    @takes_shares
    def head(cls, hidden: Tensor, weight: Tensor, labels: Labels, *, softcap: float | None = None) -> "Teacher":
        return cls(hidden, weight, softcap)


class TopK(NamedTuple):
    """A teacher's stored predictions: the most probable `ids` `[num_supervised, k]`, and their log-probs followed by
    the log-prob of all other ids together, `[num_supervised, k + 1]`."""

    ids: Tensor
    log_probs: Tensor

    @classmethod
    def stored(cls, values: Tensor, labels: Labels) -> "TopK":
        """Read a column `[rows, seq, 2 k + 1]` of ids and log-probs, the result of `MostProbable`."""
        of_tokens = of_supervised(values, labels)
        k = of_tokens.shape[1] // 2
        return cls(of_tokens[:, :k].long(), of_tokens[:, k:])


@checked
@dataclass
class MostProbable:
    """A head that returns, for storage, the `k` most probable ids below `vocab_size` at a `temperature`, their
    log-probs, and the log-prob of all other ids together: `[num_supervised, 2 k + 1]`."""

    takes_shares = True

    k: PositiveInt
    temperature: PositiveFloat = 1.0
    chunk_tokens: PositiveInt | None = None
    vocab_size: PositiveInt | None = None

    def __post_init__(self) -> None:
        if self.k > (self.vocab_size or self.k):
            raise TuneError(f"{self.k} exceeds the {self.vocab_size} tokens of the vocabulary. Lower k")

    @torch.no_grad()
    def __call__(self, hidden: Tensor, weight: Tensor, labels: Labels, *, softcap: float | None = None) -> Tensor:
        """`hidden` `[rows, seq, dim]`, `weight` `[vocab, dim]`; `labels` define the supervised tokens."""
        if self.k > len(weight):
            raise TuneError(f"k: {self.k} exceeds the {len(weight):,} rows of the weight. Lower k")
        rows = VocabularyShard(weight, self.vocab_size)
        hidden, weight, _ = operands(hidden, weight, labels, vocab=None)
        values = torch.empty(len(hidden), 2 * self.k + 1, dtype=torch.float32, device=hidden.device)
        inputs = hidden, weight[: rows.count], self.chunk_tokens, softcap
        for chunk, logits, _ in chunks_of_logits(*inputs, self.temperature):
            log_p, p = _distribution(rows.of(logits), rows)
            most, ids = rows.topk(log_p, self.k)
            values[chunk] = torch.cat([ids, most, _log_of_sum(rows.without(ids, p), rows)], dim=1)
        return values


class Distribution(NamedTuple):
    """Predictions for a chunk of tokens over the vocabulary, or this process's rows of it: `[chunk, vocab]`.
    `Divergence.of` may overwrite all but the student's `p`."""

    log_p: Tensor
    p: Tensor


@checked
@dataclass
class Divergence(ABC):
    """Sum (1 - c) T^2 D + c H over supervised tokens, or D if c = 0. D is the divergence of student and teacher, both
    at `temperature` T; H is the cross-entropy of the labels at temperature 1; c is `cross_entropy`. A Batch may have
    token weights.

    T^2 gives D gradients of the same size as H ([Hinton et al.](https://arxiv.org/abs/1503.02531)). Heads of different
    sizes, and heads compared with a `TopK`, are cut to the ids below `vocab_size` (default: the smaller size). The
    forward computes the logits of `chunk_tokens` tokens at a time, and the gradients with them; the teacher gets none.
    """

    temperature: PositiveFloat = 1.0
    cross_entropy: UnitInterval = 0.0
    chunk_tokens: PositiveInt | None = None
    vocab_size: PositiveInt | None = None

    @abstractmethod
    def of(self, student: Distribution, teacher: Distribution) -> tuple[Tensor, Tensor]:
        """Return D `[chunk, 1]`, summed over `vocab`, and p dD/dp for the student's p `[chunk, vocab]`, up to a
        multiple of p in each row."""

    def __call__(
        self, hidden: Tensor, weight: Tensor, labels: Labels, *, teacher: Teacher | TopK, softcap: float | None = None
    ) -> Tensor:
        """`hidden` `[rows, seq, dim]`, `weight` `[vocab, dim]` -> scalar. `labels`, as in `LinearCrossEntropy`, define
        the supervised tokens. A `TopK` must be at the same temperature; a `Teacher` must have hidden states for the
        same rows and tokens, of any width.

        Raises:
            TuneError: shapes do not match, or a label is not a row of `weight` (checked on a CPU).
        """
        size = len(weight)
        if isinstance(teacher, TopK) or size != len(teacher.weight):
            size = self.vocab_size or min(size, len(teacher[1]) if isinstance(teacher, Teacher) else size)
        rows = VocabularyShard(weight, size)
        teachers = None
        if isinstance(teacher, Teacher):
            is_sharded, teachers_is = (is_dtensor(each) for each in (weight, teacher.weight))
            is_alike = len(weight) == len(teacher.weight) and is_sharded == teachers_is
            theirs = rows.of_other(teacher.weight, is_alike)
            inputs = promoted(of_supervised(teacher.hidden, labels, "teacher.hidden"), theirs)
            teachers = chunks_of_logits(*inputs, self.chunk_tokens, teacher.softcap, self.temperature)
        hidden, weight, targets = operands(hidden, weight, labels, size if self.cross_entropy else None)
        if isinstance(teacher, TopK):
            if len(teacher.ids) != len(hidden):
                raise TuneError(f"teacher: has {len(teacher.ids)} tokens, but {len(hidden)} are supervised")
            check_ids("teacher.ids", teacher.ids, size)

        def of_chunk(chunk: slice, logits: Tensor) -> tuple[Tensor, Tensor]:
            target = rows.of(next(teachers)[1]) if teachers else TopK(teacher[0][chunk], teacher[1][chunk])
            return self._of_chunk(rows.of(logits), target, targets[chunk, None], rows)

        weights = supervised_weights(labels)
        return SumOfChunks.apply(hidden, weight[: rows.count], self.chunk_tokens, softcap, of_chunk, weights)

    def _of_chunk(
        self, logits: Tensor, target: Tensor | TopK, labels: Tensor, rows: VocabularyShard
    ) -> tuple[Tensor, Tensor]:
        """Return the value of each token `[chunk, 1]`, and the gradient of `logits`."""
        factor = (1 - self.cross_entropy) * self.temperature**2 if self.cross_entropy else 1.0
        if self.cross_entropy:
            of_labels, gradient = cross_entropy(logits, labels, rows=rows)  # at temperature 1
        student = _distribution(logits.div_(self.temperature), rows)
        # dD/dlogit_i = p_i (dD/dp_i - sum_j p_j dD/dp_j)
        if isinstance(target, TopK):
            values, of_divergence = self._of_buckets(student, target, rows)
        else:
            values, weighted = self.of(student, _distribution(target, rows))
            values, sums = rows.reduce(torch.stack([values, weighted.sum(dim=1, keepdim=True)]))
            of_divergence = weighted.addcmul_(student.p, sums, value=-1)
        of_divergence *= factor / self.temperature
        if not self.cross_entropy:
            return values, of_divergence
        of_divergence.add_(gradient, alpha=self.cross_entropy)
        return values * factor + of_labels * self.cross_entropy, of_divergence

    def _of_buckets(self, student: Distribution, target: TopK, rows: VocabularyShard) -> tuple[Tensor, Tensor]:
        """Return D over k + 1 buckets (k ids, and all others as one) and its gradient, which the other ids share in
        proportion to their probabilities."""
        log_p = rows.at(target.ids, student.log_p)
        others = rows.without(target.ids, student.p)
        log_p = torch.cat([log_p, _log_of_sum(others, rows)], dim=1)
        buckets = Distribution(log_p, log_p.exp())
        values, weighted = self.of(buckets, Distribution(target.log_probs.clone(), target.log_probs.exp()))
        gradient = weighted - buckets.p * weighted.sum(dim=1, keepdim=True)
        others.mul_(gradient[:, -1:] / buckets.p[:, -1:])
        return values, rows.add_at(target.ids, others, gradient[:, :-1])


class ForwardKL(Divergence):
    """KL(teacher || student): the student must cover everything that the teacher finds likely."""

    def of(self, student: Distribution, teacher: Distribution) -> tuple[Tensor, Tensor]:
        values = teacher.log_p.sub_(student.log_p).mul_(teacher.p).sum(dim=1, keepdim=True)
        return values, teacher.p.neg_()


class ReverseKL(Divergence):
    """KL(student || teacher): the student must avoid everything that the teacher finds unlikely."""

    def of(self, student: Distribution, teacher: Distribution) -> tuple[Tensor, Tensor]:
        weighted = student.log_p.sub_(teacher.log_p).mul_(student.p)
        return weighted.sum(dim=1, keepdim=True), weighted


@checked
@dataclass
class JensenShannon(Divergence):
    """b KL(teacher || M) + (1 - b) KL(student || M), where M = b teacher + (1 - b) student and b is `beta`.

    The generalized form ([GKD](https://arxiv.org/abs/2306.13649)): near b = 0 it is b times the forward KL, near b = 1
    it is 1 - b times the reverse KL.
    """

    beta: Annotated[float, Range("a number between 0 and 1", lambda x: 0 < x < 1)] = 0.5

    def of(self, student: Distribution, teacher: Distribution) -> tuple[Tensor, Tensor]:
        mixture = student.p.lerp(teacher.p, self.beta)
        tiny = torch.finfo(mixture.dtype).tiny  # where both are 0, so are the products
        log_mixture = mixture.clamp_(min=tiny).log_()
        of_teacher = teacher.log_p.sub_(log_mixture).mul_(teacher.p).sum(dim=1, keepdim=True)
        weighted = student.log_p.sub_(log_mixture).mul_(student.p).mul_(1 - self.beta)
        return self.beta * of_teacher + weighted.sum(dim=1, keepdim=True), weighted


def _distribution(logits: Tensor, rows: VocabularyShard) -> Distribution:
    _, exponentials, normalizer = normalize(logits, rows=rows)
    return Distribution(logits.sub_(normalizer.log()), exponentials.div_(normalizer))


def _log_of_sum(p: Tensor, rows: VocabularyShard) -> Tensor:
    """Return the log of the sum of `p`, `[chunk, 1]`, always finite."""
    return rows.reduce(p.sum(dim=1, keepdim=True)).clamp_(min=torch.finfo(p.dtype).tiny).log_()
