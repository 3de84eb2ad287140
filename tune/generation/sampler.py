"""Batched sampling from a decoder: finished completions leave the batch, and waiting prompts join it."""

import math
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tune import rehearsal
from tune.collators import Batch
from tune.distributed import World, cumsum, current_world, inference, without_fsdp_hooks
from tune.errors import TuneError
from tune.generation.decoding import Decoding, packed
from tune.losses import VocabularyShard, normalize
from tune.models import Decoder, HuggingFaceModel, hf, is_transformers_model
from tune.quantization import whole_weights
from tune.tokenizers import Tokenizer
from tune.types import NonNegativeFloat, NonNegativeInt, PositiveInt, Share, UnitInterval, checked

PREFILL_TOKENS = 8192  # tokens of prompts that are prefilled together
PIECE = 512  # ids whose probabilities are summed together
GenerativeModel = Decoder | HuggingFaceModel


@dataclass
class Completion:
    """The tokens sampled after a prompt, including the end token.

    `log_probs` are the log-probs of `tokens` under the whole distribution at the sampler's temperature, as a trainer
    computes them. `finish` is "stop" after a stop id or stop string, "length" after `max_new_tokens`. `answer` sets
    `text`.
    """

    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    finish: Literal["stop", "length"] = "length"
    text: str = ""


@dataclass
class SampledRow:
    """A completion in progress, and the random numbers for its tokens."""

    prompt: tuple[int, ...]
    completion: Completion
    uniforms: Iterator[float]


@checked
@dataclass(frozen=True, kw_only=True)
class Sampler:
    """Sample completions of prompts from a model.

        sampler = Sampler(max_new_tokens=64, stop_ids=tokenizer.stop_ids)
        (completions,) = sampler(model, [tokenizer.encode("Once upon a time")], samples=4)
        for completion in completions:
            print(tokenizer.decode(completion.tokens), sum(completion.log_probs), completion.finish)

    The model is one of `tune.models.build` or `tune.models.hf`, or a causal language model of transformers. It may be
    sharded, adapted and quantized: its weights are gathered once for all prompts. Dropout is off, and blocks run
    uncompiled; on a GPU a step is captured as a CUDA graph (`Decoding`). 4-bit weights are dequantized once if they fit
    into half of a GPU's free memory; otherwise for each token, which takes about twice the time. At most `max_rows`
    completions are computed at a time, each with a cache for the longest prompt and `max_new_tokens`. Prompt and
    completion have at most `max_len` tokens together (None: the model's limit).

    A completion ends with one of `stop_ids`, or with the token that completes one of `stop_strings` in the text from
    `decode`. For `temperature`, `top_k`, `top_p` and `min_p` see `choose`. The random number of a token is a function
    of seed, step, prompt, sample and position, so samples do not depend on `max_rows`, on the order of prompts or on
    which process has them.
    """

    max_new_tokens: PositiveInt
    temperature: NonNegativeFloat = 1.0
    top_k: PositiveInt | None = None
    top_p: Share | None = None
    min_p: UnitInterval | None = None
    stop_ids: Collection[int] = ()
    stop_strings: Collection[str] = ()
    decode: Callable[[list[int]], str] | None = None
    seed: NonNegativeInt = 0
    max_rows: PositiveInt = 64
    max_len: PositiveInt | None = None

    def __post_init__(self) -> None:
        if "" in self.stop_strings:
            raise TuneError(f"stop_strings: must not be empty strings; found {list(self.stop_strings)}")
        if self.stop_strings and self.decode is None:
            raise TuneError("stop_strings: also pass decode=tokenizer.decode")

    def __call__(
        self, model: nn.Module, prompts: Sequence[Sequence[int]], *,
        samples: int = 1, step: int = 0, indices: Sequence[int] | None = None,
    ) -> list[list[Completion]]:  # fmt: skip
        """Return `samples` completions for each of `prompts`, which are token ids.

        `indices` are the numbers of the prompts if these are a share of a larger list (default: from 0). All processes
        over which the model is sharded must call this at the same time, with different prompts or none.

        Raises:
            TuneError: the model has no cache or produces NaN; a prompt or stop id does not fit the model; `prompts` are
                not lists of ids, or `indices` have another length.
        """
        if any(isinstance(prompt, int | str) for prompt in prompts):
            raise TuneError("prompts: pass a list of token ids per prompt; for a single prompt [[1, 2, 3]]")
        if indices is not None and len(indices) != len(prompts):
            raise TuneError(f"indices: found {len(indices)} for {len(prompts)} prompts. Pass one per prompt")
        indices = range(len(prompts)) if indices is None else indices
        rows = [
            SampledRow(tuple(map(int, prompt)), Completion(), uniforms(self.seed, step, index, sample))
            for prompt, index in zip(prompts, indices, strict=True)
            for sample in range(samples)
        ]
        self.complete(self.check(model, prompts, indices), rows)
        return [[row.completion for row in rows[at * samples :][:samples]] for at in range(len(prompts))]

    def complete(self, model: GenerativeModel, rows: list[SampledRow]) -> None:
        """Sample completions for `rows`, which may be empty."""
        if planning := rehearsal.planning():
            planning.take_sampling(self, model, [row.prompt for row in rows])
            for row in rows:
                count, end = self.max_new_tokens, [*self.stop_ids][:1] or [0]
                row.completion.tokens, row.completion.log_probs = [*[0] * (count - 1), *end], [-1.0] * count
                row.completion.finish = "stop"
            return
        with inference(model), without_fsdp_hooks(model), whole_weights(model):
            if rows and rehearsal.current():
                _rehearse(self, model, rows)
            elif rows:
                _Rollout(self, model, deque(rows)).run()

    def stops(self, tokens: list[int]) -> bool:
        """Whether a completion ends with the last of its `tokens`."""
        if tokens[-1] in self.stop_ids or self.decode is None or not self.stop_strings:
            return tokens[-1] in self.stop_ids
        # A token has at least one byte, which bounds the number of tokens. Decoders may drop a leading blank.
        text = self.decode(tokens[-max(len(each.encode()) for each in self.stop_strings) - 4 :])
        return any(each in text for each in self.stop_strings)

    def extend(self, completions: Sequence[Completion], draws: Sequence[float], logits: Tensor) -> None:
        """Sample a token for each of `completions` from `logits` `[completions, vocab]` with its number in `draws`."""
        ids, log_probs = self.choose(logits, torch.tensor(draws, dtype=torch.float64))
        self.add(completions, packed(ids, log_probs)[:, :, None].cpu())

    def choose(self, logits: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        """Call the function `choose` with this sampler's settings."""
        return choose(logits, uniforms, self.temperature, self.top_k, self.top_p, self.min_p)

    def add(self, completions: Sequence[Completion], chosen: Tensor) -> None:
        """Add to each of `completions` its tokens in `chosen` `[2, completions, tokens]` (`packed`, on the host), up to
        its end."""
        rows = zip(completions, chosen[0].tolist(), chosen[1].view(torch.float32).tolist(), strict=True)
        for completion, tokens, log_probs in rows:
            for token, log_prob in zip(tokens, log_probs, strict=True):
                if math.isnan(log_prob):
                    raise TuneError(
                        f"the logits after {len(completion.tokens)} new tokens are NaN or infinite, so weights or "
                        "activations are too. Use an earlier checkpoint, or dtype fp32"
                    )
                completion.tokens.append(token)
                completion.log_probs.append(log_prob)
                completion.finish = "stop" if self.stops(completion.tokens) else "length"
                if self.is_complete(completion):
                    break

    def is_complete(self, completion: Completion) -> bool:
        return completion.finish == "stop" or len(completion.tokens) == self.max_new_tokens

    def room(self, model: Any) -> float:
        """Return the length of the longest prompt that can be completed."""
        return min(model.max_generated or math.inf, self.max_len or math.inf) - self.max_new_tokens

    def check(self, model: nn.Module, prompts: Sequence[Sequence[int]], names: Sequence[object]) -> GenerativeModel:
        """Return the model, wrapped if it is one of transformers. Raises TuneError with the prompt's name if this model
        cannot complete a prompt."""
        if is_transformers_model(model):
            model = hf(model)
            model.check()
        if not isinstance(model, GenerativeModel):
            raise TuneError(
                f"{type(model).__name__} cannot generate, since it has no cache: use a model of tune.models.build or "
                "tune.models.hf"
            )
        count, room = model.config.vocab_size, self.room(model)
        named = [(f"prompt {name}", prompt) for name, prompt in zip(names, prompts, strict=True)]
        for name, ids in [("stop_ids", self.stop_ids), *named]:
            if unknown := [each for each in ids if not 0 <= each < count]:
                raise TuneError(f"{unknown[0]} in {name} is not one of the {count} tokens of the model")
        for name, prompt in named:
            if not len(prompt):
                raise TuneError(f"{name} is empty. Begin it with a token, e.g. BOS")
            if len(prompt) > room and not rehearsal.planning():  # a plan's prompts have the maximal length
                longest = room + self.max_new_tokens
                what, advice = "the model's limit", f"Lower one by {len(prompt) - room}"
                if longest == self.max_len:
                    what, advice = "max_len", f"{advice}, or raise max_len"
                raise TuneError(
                    f"{name} has {len(prompt)} tokens and max_new_tokens is {self.max_new_tokens}, together more than "
                    f"{what} ({longest}). {advice}"
                )
        return model


def _rehearse(sampler: Sampler, model: GenerativeModel, rows: list[SampledRow]) -> None:
    """Sample two tokens after the first two prompts, then give all rows made-up completions of a few tokens. The first
    row has ended."""
    first = [replace(row, completion=Completion()) for row in rows[:2]]
    _Rollout(replace(sampler, max_new_tokens=min(2, sampler.max_new_tokens)), model, deque(first)).run()
    length = min(8, sampler.max_new_tokens)
    for number, row in enumerate(rows):
        row.completion.tokens = [*row.prompt, *([0] * length)][:length]
        row.completion.log_probs = [-1.0] * length
        row.completion.finish = "stop" if number == 0 else "length"


def answer(
    model: nn.Module,
    sampler: Sampler,
    tokenizer: Tokenizer,
    prompts: Mapping[int, Sequence[int]],
    world: World | None = None,
    samples: int = 1,
) -> dict[int, list[Completion]]:
    """Sample `samples` completions, with texts, for each of `prompts` (number -> token ids). All processes must call
    this with the same prompts; each samples a share, and all get all completions."""
    world = current_world(world)
    mine = [*prompts] if rehearsal.current() else [*prompts][world.data_rank :: world.data_size]
    found = sampler(model, [prompts[index] for index in mine], samples=samples, indices=mine)
    for completion in chain(*found):
        completion.text = tokenizer.decode(completion.tokens, skip_special_tokens=True)
    return dict(chain(*world.all_gather([*zip(mine, found, strict=True)])))


class _Rollout:
    """Complete the waiting rows. The cache has one spare row, for a prompt with samples that still wait."""

    def __init__(self, settings: "Sampler", model: GenerativeModel, waiting: deque[SampledRow]):
        self.settings, self.model, self.waiting = settings, model, waiting
        self.device = next(model.parameters()).device
        self.rows: dict[int, SampledRow] = {}  # by row of the cache
        self.spare = min(settings.max_rows, len(waiting))
        self.spare_prompt: dict[tuple[int, ...], Tensor] = {}  # the prompt in the spare row, and its logits
        capacity = max(len(row.prompt) for row in waiting) + settings.max_new_tokens
        self.cache = model.new_cache(self.spare + 1, capacity)
        self.decoding = Decoding(model, self.cache, self.spare, capacity, settings.choose)

    def run(self) -> None:
        while self.waiting or self.rows:
            while self.waiting and len(self.rows) < self.spare:
                self._join()
            self._close_up()
            if self.rows:
                self._advance([self.rows[slot] for slot in range(len(self.rows))])

    def _join(self) -> None:
        """Move waiting rows into free slots. Prompts are prefilled packed; their other samples copy the cache."""
        after = dict(self.spare_prompt)  # logits after each prompt
        source = dict.fromkeys(after, self.spare)
        copies, joined, tokens = list[tuple[int, int]](), list[int](), 0
        free = [slot for slot in range(self.spare) if slot not in self.rows]
        for slot in free[: len(self.waiting)]:
            prompt = self.waiting[0].prompt
            if prompt in source:
                copies.append((source[prompt], slot))
            elif joined and tokens + len(prompt) > PREFILL_TOKENS:
                break
            else:
                source[prompt] = slot
                tokens += len(prompt)
            self.rows[slot] = self.waiting.popleft()
            joined.append(slot)
        if new := [prompt for prompt in source if prompt not in after]:
            after |= zip(new, self._prefill(new, [source[prompt] for prompt in new]), strict=True)
        following = self.waiting[0].prompt if self.waiting else ()
        if source.get(following, self.spare) != self.spare:
            copies.append((source[following], self.spare))
            self.spare_prompt = {following: after[following]}
        self.cache.copy(copies)
        self._take(joined, torch.stack([after[self.rows[slot].prompt] for slot in joined]))

    def _prefill(self, prompts: list[tuple[int, ...]], slots: list[int]) -> Tensor:
        """Return the logits after each prompt, `[prompts, vocab]`."""
        documents = np.repeat(np.arange(len(prompts)), [len(prompt) for prompt in prompts])
        batch = Batch.of(np.concatenate(prompts)[None], documents=documents[None])
        self.cache.start(slots, batch, self.device)
        return self.model(batch.to(self.device), cache=self.cache)[:, 0]

    def _advance(self, rows: list[SampledRow]) -> None:
        """Sample one or more tokens for each row, and drop rows that end."""
        left = max(self.settings.max_new_tokens - len(row.completion.tokens) for row in rows)
        steps = min(self.decoding.steps, left)
        chosen = self.decoding(
            [row.completion.tokens[-1] for row in rows],
            [len(row.prompt) + len(row.completion.tokens) - 1 for row in rows],
            [[*islice(row.uniforms, steps)] for row in rows],
        )
        self.settings.add([row.completion for row in rows], chosen)
        self._let_go()

    def _take(self, slots: Sequence[int], logits: Tensor) -> None:
        """Choose a token for the rows in `slots` from `logits` `[slots, vocab]`, and drop rows that end."""
        rows = [self.rows[slot] for slot in slots]
        self.settings.extend([row.completion for row in rows], [next(row.uniforms) for row in rows], logits)
        self._let_go()

    def _let_go(self) -> None:
        self.rows = {slot: row for slot, row in self.rows.items() if not self.settings.is_complete(row.completion)}

    def _close_up(self) -> None:
        """Move the last rows to free slots, so that rows are contiguous at the start of the cache."""
        free = [slot for slot in range(len(self.rows)) if slot not in self.rows]
        moved = [slot for slot in self.rows if slot >= len(self.rows)]
        self.cache.copy(list(zip(moved, free, strict=True)))
        for slot, target in zip(moved, free, strict=True):
            self.rows[target] = self.rows.pop(slot)


def choose(
    logits: Tensor,
    uniforms: Tensor,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose an id for each row of `logits` `[rows, vocab]`. Returns ids and log-probs in fp32, both `[rows]`.

    The result is the first id at which the cumulative probability exceeds `uniforms` `[rows]`, which are in [0, 1);
    with temperature 0, the most likely id. `top_k` keeps the k most likely ids, `top_p` (Holtzman et al., 2020) the
    smallest set with this probability, `min_p` (Nguyen et al., 2024) ids with at least this share of the highest
    probability. They apply in this order, as in transformers. Log-probs ignore all three, and are at temperature 1 if
    the temperature is 0.

    Processes that share the vocabulary (`logits` are a DTensor) find the same ids together; only `top_p` makes them
    exchange all probabilities.
    """
    ids_of, last = VocabularyShard(logits, dim=1), logits.shape[1] - 1
    own = logits.to_local() if isinstance(logits, DTensor) else logits
    scaled = own.float() if temperature in (0, 1) else own.float() / temperature
    log_probs = _log_softmax(scaled, ids_of)
    if temperature == 0:
        ids = ids_of.argmax(log_probs).clamp(max=last)  # NaN also yields an id, whose log-prob is NaN
    else:
        kept = _kept(log_probs, top_k, top_p, min_p, ids_of).exp()
        # In fp64, so that the order of additions on a device does not matter. MPS has no fp64.
        dtype = torch.float32 if kept.device.type == "mps" else torch.float64
        # Find the piece that reaches the probability, then the id in it: summing many short pieces is faster than a
        # few long rows.
        pieces = F.pad(kept, (0, -kept.shape[1] % PIECE)).unflatten(1, (-1, PIECE))
        of_pieces = cumsum(pieces.sum(dim=-1, dtype=dtype), -1)
        sums = F.pad(cumsum(ids_of.whole(of_pieces[:, -1:]), -1), (1, 0))  # before each process's ids; the total
        reached = uniforms[:, None].to(dtype).to(kept.device) * sums[:, -1:] - sums[:, ids_of.rank, None]
        piece = torch.searchsorted(of_pieces, reached, right=True).clamp(max=pieces.shape[1] - 1)
        before = F.pad(of_pieces, (1, 0)).gather(1, piece)
        within = cumsum(pieces.gather(1, piece[..., None].expand(-1, -1, PIECE))[:, 0], -1, dtype)
        # Each process counts its own ids before the chosen one.
        count = piece * PIECE + torch.searchsorted(before + within, reached, right=True)
        ids = ids_of.reduce(count.clamp(max=kept.shape[1])).clamp(max=last)
    return ids[:, 0], ids_of.at(ids, log_probs)[:, 0]


def _log_softmax(logits: Tensor, ids_of: VocabularyShard) -> Tensor:
    if ids_of.group is None:
        return logits.log_softmax(dim=-1)
    shifted = logits.clone()
    _, _, normalizer = normalize(shifted, rows=ids_of)
    return shifted - normalizer.log()


def _kept(
    log_probs: Tensor, top_k: int | None, top_p: float | None, min_p: float | None, ids_of: VocabularyShard
) -> Tensor:
    """Return `log_probs` `[rows, vocab]` with -inf for ids that are filtered out."""
    if top_k is not None:
        smallest = ids_of.topk(log_probs, top_k)[0][:, -1:]
        log_probs = log_probs.masked_fill(log_probs < smallest, -math.inf)
    if top_p is not None and top_p < 1:
        probs = _log_softmax(log_probs, ids_of).exp()
        ordered = ids_of.whole(probs).sort(dim=-1, descending=True).values
        before = cumsum(ordered, -1) - ordered
        smallest = ordered.masked_fill(before >= top_p, math.inf).amin(dim=-1, keepdim=True)
        log_probs = log_probs.masked_fill(probs < smallest, -math.inf)
    if min_p:
        smallest = ids_of.reduce(log_probs.amax(dim=-1, keepdim=True), dist.ReduceOp.MAX) + math.log(min_p)
        log_probs = log_probs.masked_fill(log_probs < smallest, -math.inf)
    return log_probs


def uniforms(*keys: int) -> Iterator[float]:
    """Yield random numbers in [0, 1) without end, as a function of the non-negative `keys`."""
    bits = np.random.Philox(np.random.SeedSequence(keys))
    while True:
        yield (int(bits.random_raw()) >> 11) * 2.0**-53
