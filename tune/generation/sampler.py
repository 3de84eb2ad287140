"""Batched sampling from a decoder: completions that end leave the batch, and prompts that wait join it."""

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

PREFILL_TOKENS = 8192  # prompts are read together up to so many tokens
PIECE = 512  # ids whose probabilities are added up together
GenerativeModel = Decoder | HuggingFaceModel


@dataclass
class Completion:
    """What was sampled after a prompt, its end included.

    `log_probs` are those of `tokens` under the whole distribution at the sampler's temperature: what a trainer computes
    at that temperature. `finish` is "stop" after a stop id or stop string, "length" after `max_new_tokens`. `text` is
    what `answer` decodes.
    """

    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    finish: Literal["stop", "length"] = "length"
    text: str = ""


@dataclass
class SampledRow:
    """A completion in the making, and the random numbers of its tokens."""

    prompt: tuple[int, ...]
    completion: Completion
    uniforms: Iterator[float]


@checked
@dataclass(frozen=True, kw_only=True)
class Sampler:
    """Samples completions of prompts from a model.

        sampler = Sampler(max_new_tokens=64, stop_ids=tokenizer.stop_ids)
        (completions,) = sampler(model, [tokenizer.encode("Once upon a time")], samples=4)
        for completion in completions:
            print(tokenizer.decode(completion.tokens), sum(completion.log_probs), completion.finish)

    The model is one of `tune.models.build` or `tune.models.hf`, or a causal language model of transformers. It may be
    sharded, adapted and quantised: its weights are gathered once for all prompts. Dropout is off, and blocks run
    uncompiled; on a GPU a step is captured as a CUDA graph (`Decoding`). Weights in 4 bits are dequantised once, if
    they fit into half of a GPU's free memory; else anew for each token, which takes about twice the time. At most
    `max_rows` completions are computed at a time, each with a cache for the longest prompt and `max_new_tokens`;
    together they are at most `max_len` (None: what the model takes).

    A completion ends with one of `stop_ids`, or with the token that completes one of `stop_strings` in the text that
    `decode` makes of ids. `temperature`, `top_k`, `top_p` and `min_p` are those of `choose`. The random number of a
    token is a function of seed, step, prompt, sample and position: what is sampled does not depend on `max_rows`, on
    the order of prompts or on which process has them.
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
            raise TuneError(f"stop_strings: none may be empty; found {list(self.stop_strings)}")
        if self.stop_strings and self.decode is None:
            raise TuneError("stop_strings: they need decode=tokenizer.decode")

    def __call__(
        self, model: nn.Module, prompts: Sequence[Sequence[int]], *,
        samples: int = 1, step: int = 0, indices: Sequence[int] | None = None,
    ) -> list[list[Completion]]:  # fmt: skip
        """`samples` completions of each of `prompts`, which are token ids.

        `indices` are the numbers of the prompts, where these are a share of all (by default from 0). All processes over
        which the model is sharded call it at the same time; they may have different prompts, or none.

        Raises:
            TuneError: the model has no cache, a prompt or a stop id does not fit it, or it gives NaN; `prompts` are not
                lists of ids, or `indices` are not as many.
        """
        if any(isinstance(prompt, int | str) for prompt in prompts):
            raise TuneError("prompts: give a list of token ids for each prompt; for a single one [[1, 2, 3]]")
        if indices is not None and len(indices) != len(prompts):
            raise TuneError(f"indices: found {len(indices)} for {len(prompts)} prompts. Give one for each")
        indices = range(len(prompts)) if indices is None else indices
        rows = [
            SampledRow(tuple(map(int, prompt)), Completion(), uniforms(self.seed, step, index, sample))
            for prompt, index in zip(prompts, indices, strict=True)
            for sample in range(samples)
        ]
        self.complete(self.check(model, prompts, indices), rows)
        return [[row.completion for row in rows[at * samples :][:samples]] for at in range(len(prompts))]

    def complete(self, model: GenerativeModel, rows: list[SampledRow]) -> None:
        """Sample what completes the `rows`, of which there may be none."""
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
        # A token is a byte at the least: so many may hold a string. Decoders may drop a blank before the first.
        text = self.decode(tokens[-max(len(each.encode()) for each in self.stop_strings) - 4 :])
        return any(each in text for each in self.stop_strings)

    def extend(self, completions: Sequence[Completion], draws: Sequence[float], logits: Tensor) -> None:
        """Add to each of `completions` a token from its `logits` `[completions, vocab]`, by its number of `draws`."""
        ids, log_probs = self.choose(logits, torch.tensor(draws, dtype=torch.float64))
        self.add(completions, packed(ids, log_probs)[:, :, None].cpu())

    def choose(self, logits: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        """As the function `choose`, by the settings."""
        return choose(logits, uniforms, self.temperature, self.top_k, self.top_p, self.min_p)

    def add(self, completions: Sequence[Completion], chosen: Tensor) -> None:
        """Add to each of `completions` its tokens of `chosen` `[2, completions, tokens]`, which is `packed` and on the
        host, up to its end."""
        rows = zip(completions, chosen[0].tolist(), chosen[1].view(torch.float32).tolist(), strict=True)
        for completion, tokens, log_probs in rows:
            for token, log_prob in zip(tokens, log_probs, strict=True):
                if math.isnan(log_prob):
                    raise TuneError(
                        f"the logits after {len(completion.tokens)} new tokens are NaN or infinite, as weights "
                        "or activations are. Go back to an earlier checkpoint, or use dtype=fp32"
                    )
                completion.tokens.append(token)
                completion.log_probs.append(log_prob)
                completion.finish = "stop" if self.stops(completion.tokens) else "length"
                if self.is_complete(completion):
                    break

    def is_complete(self, completion: Completion) -> bool:
        return completion.finish == "stop" or len(completion.tokens) == self.max_new_tokens

    def room(self, model: Any) -> float:
        """The tokens of the longest prompt that can be completed."""
        return min(model.max_generated or math.inf, self.max_len or math.inf) - self.max_new_tokens

    def check(self, model: nn.Module, prompts: Sequence[Sequence[int]], names: Sequence[object]) -> GenerativeModel:
        """Raises TuneError, with its number or other name, if a prompt cannot be completed by this model so."""
        if is_transformers_model(model):
            model = hf(model)
            model.check()
        if not isinstance(model, GenerativeModel):
            raise TuneError(
                f"a {type(model).__name__} has no cache: take a model of tune.models.build or tune.models.hf"
            )
        count, room = model.config.vocab_size, self.room(model)
        named = {f"prompt {name}": prompt for name, prompt in zip(names, prompts, strict=True)}
        for name, ids in {"stop_ids": self.stop_ids, **named}.items():
            if unknown := [each for each in ids if not 0 <= each < count]:
                raise TuneError(f"{unknown[0]} in {name} is not one of the {count} tokens of the model")
        for name, prompt in named.items():
            if not len(prompt):
                raise TuneError(f"{name} is empty. Begin it with a token, BOS for example")
            if len(prompt) > room and not rehearsal.planning():  # of a plan they are as long as the settings allow
                longest = room + self.max_new_tokens
                what = "of max_len" if longest == self.max_len else "up to which the model can generate"
                raise TuneError(
                    f"{name} has {len(prompt)} tokens and max_new_tokens is {self.max_new_tokens}, together "
                    f"more than the {longest} {what}. Lower one by {len(prompt) - room}"
                )
        return model


def _rehearse(sampler: Sampler, model: GenerativeModel, rows: list[SampledRow]) -> None:
    """Sample two tokens after the first prompts; all rows then have completions of a few tokens, the first of them
    ended."""
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
    """`samples` completions of each of `prompts`, token ids by their numbers, with their texts. All processes call it
    with the same prompts, sample a share of them and have all."""
    world = current_world(world)
    mine = [*prompts] if rehearsal.current() else [*prompts][world.data_rank :: world.data_size]
    found = sampler(model, [prompts[index] for index in mine], samples=samples, indices=mine)
    for completion in chain(*found):
        completion.text = tokenizer.decode(completion.tokens, skip_special_tokens=True)
    return dict(chain(*world.all_gather([*zip(mine, found, strict=True)])))


class _Rollout:
    """Completes the rows that wait. The cache has one row more, for a prompt some of whose samples still wait."""

    def __init__(self, settings: "Sampler", model: GenerativeModel, waiting: deque[SampledRow]):
        self.settings, self.model, self.waiting = settings, model, waiting
        self.device = next(model.parameters()).device
        self.rows: dict[int, SampledRow] = {}  # by their row of the cache
        self.spare = min(settings.max_rows, len(waiting))
        self.spare_prompt: dict[tuple[int, ...], Tensor] = {}  # what the spare row has, and the logits after it
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
        """Rows that wait take what is free. Prompts are read packed; their other samples get copies of the cache."""
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
        """The logits after each prompt, `[prompts, vocab]`."""
        documents = np.repeat(np.arange(len(prompts)), [len(prompt) for prompt in prompts])
        batch = Batch.of(np.concatenate(prompts)[None], documents=documents[None])
        self.cache.start(slots, batch, self.device)
        return self.model(batch.to(self.device), cache=self.cache)[:, 0]

    def _advance(self, rows: list[SampledRow]) -> None:
        """More tokens for each row, at least one. Rows that end leave."""
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
        """Choose a token for the rows in `slots` from `logits` `[slots, vocab]`. Rows that end leave."""
        rows = [self.rows[slot] for slot in slots]
        self.settings.extend([row.completion for row in rows], [next(row.uniforms) for row in rows], logits)
        self._let_go()

    def _let_go(self) -> None:
        self.rows = {slot: row for slot, row in self.rows.items() if not self.settings.is_complete(row.completion)}

    def _close_up(self) -> None:
        """The last rows move to what is free, so that all are the first of the cache."""
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
    """An id for each row of `logits` `[rows, vocab]`, and its log-prob in fp32: both `[rows]`. Processes that share the
    vocabulary (`logits` are a DTensor) find the same together; only for `top_p` they exchange all probabilities.

    It is the first id at which the cumulative probability exceeds `uniforms` `[rows]`, which are in [0, 1); with
    temperature 0 the most likely. `top_k` keeps the k most likely ids, `top_p` (Holtzman et al., 2020) the fewest that
    have this probability, `min_p` (Nguyen et al., 2024) those at least so likely in proportion to the most likely: in
    this order, as in transformers. Log-probs are those without these three; with temperature 0, those at temperature 1.
    """
    ids_of, last = VocabularyShard(logits, dim=1), logits.shape[1] - 1
    own = logits.to_local() if isinstance(logits, DTensor) else logits
    scaled = own.float() if temperature in (0, 1) else own.float() / temperature
    log_probs = _log_softmax(scaled, ids_of)
    if temperature == 0:
        ids = ids_of.argmax(log_probs).clamp(max=last)  # of NaN, too, it is an id, whose log-prob is NaN
    else:
        kept = _kept(log_probs, top_k, top_p, min_p, ids_of).exp()
        # In fp64, so that the order in which a device adds does not decide. MPS has no fp64.
        dtype = torch.float32 if kept.device.type == "mps" else torch.float64
        # First the piece in which the probability is reached, then the id in it: a device adds up many short pieces
        # faster than a few long rows.
        pieces = F.pad(kept, (0, -kept.shape[1] % PIECE)).unflatten(1, (-1, PIECE))
        of_pieces = cumsum(pieces.sum(dim=-1, dtype=dtype), -1)
        sums = F.pad(cumsum(ids_of.whole(of_pieces[:, -1:]), -1), (1, 0))  # before each process's ids; of all
        reached = uniforms[:, None].to(dtype).to(kept.device) * sums[:, -1:] - sums[:, ids_of.rank, None]
        piece = torch.searchsorted(of_pieces, reached, right=True).clamp(max=pieces.shape[1] - 1)
        before = F.pad(of_pieces, (1, 0)).gather(1, piece)
        within = cumsum(pieces.gather(1, piece[..., None].expand(-1, -1, PIECE))[:, 0], -1, dtype)
        # Of the ids before the one that is reached, each process counts its own.
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
    """`log_probs` `[rows, vocab]`, with -inf for what is not among the top."""
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
    """Random numbers in [0, 1), without end: a function of the non-negative `keys` alone."""
    bits = np.random.Philox(np.random.SeedSequence(keys))
    while True:
        yield (int(bits.random_raw()) >> 11) * 2.0**-53
