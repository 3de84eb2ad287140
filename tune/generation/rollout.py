"""Rollouts: completions of prompts with rewards, and batches made of them."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from numbers import Real
from operator import methodcaller
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from tune import rehearsal
from tune.collators import IGNORE, Sample, collate
from tune.datasets import GlobalBatch, Prompt, called, checked_messages
from tune.distributed import World
from tune.errors import TuneError
from tune.generation.sampler import Completion, Sampler
from tune.generation.turns import answered, assistant_message, text_behind
from tune.tokenizers import Message, Tokenizer
from tune.types import PositiveInt

# float64 sums of the same numbers differ by about 1e-16 of their terms; rewards of a float32 model by at least 6e-8.
ROUNDING = 1e-9
SCORED = 64  # completions that reward models score in a plan
EXAMPLES = {"sampled": np.zeros(1, np.float32), **dict.fromkeys(("advantage", "reward"), np.zeros((), np.float32))}


@dataclass(frozen=True)
class Reward:
    """A reward function (row of the data, text of a completion) -> number, and its `weight`."""

    name: str
    function: Callable[[dict[str, Any], str], float]
    weight: float = 1.0
    setting: str = "reward"  # the setting that names it, for errors

    def of(self, episodes: Sequence["Episode"], tokenizer: Tokenizer, world: World) -> list[float]:
        """Return one number per episode. A function with the method `scores` gets all episodes at once. Among processes
        that read the same data only the first calls it; with `is_sharded` all processes call it for their own
        episodes."""

        if rehearsal.current():
            return self._rehearsed(episodes, tokenizer, world)

        def make() -> list[float]:
            if not hasattr(self.function, "scores"):
                return [self(episode.prompt.row, episode.text) for episode in episodes]
            scores = called(f"{self.setting}: {self.name} fails", self.function.scores, episodes, tokenizer, world)
            if not isinstance(scores, Sequence) or len(scores) != len(episodes):
                found = f"{self.setting}: {self.name} returned {scores!r:.80} for {len(episodes)} completions"
                raise TuneError(f"{found}; it must return a list with one number per completion")
            return [_finite(score, f"{self.setting}: {self.name} returned {score!r:.80}") for score in scores]

        return make() if getattr(self.function, "is_sharded", False) else world.of_peers(make)

    def _rehearsed(self, episodes: Sequence["Episode"], tokenizer: Tokenizer, world: World) -> list[float]:
        """Call reward models and plain functions for a check, the latter with the first prompt also as the completion.
        A judge, which may not be reachable, is not called. Returns rewards that differ within a group."""
        model: Any = self.function
        if planning := rehearsal.planning():
            with planning.scoring() as scores:
                if scores and getattr(model, "is_sharded", False):
                    model.scores(episodes[:SCORED], tokenizer, world)
        elif getattr(model, "is_sharded", False):
            called(f"{self.setting}: {self.name} fails", model.scores, episodes[:1], tokenizer, world)
        elif episodes and isinstance(self.function, partial):
            try:
                self(episodes[0].prompt.row, tokenizer.decode(episodes[0].prompt.tokens))
            except TuneError as error:
                raise TuneError(f"{error} (the text of the first prompt stands in for a completion)") from error
        return [float(number % 2) for number, _ in enumerate(episodes)]

    def __call__(self, row: dict[str, Any], completion: str) -> float:
        """Return the reward. Raises TuneError if the function raises or returns anything but a finite number."""
        shown = repr(completion if len(completion) <= 80 else completion[:77] + "...")
        value = called(f"{self.setting}: {self.name} fails on {shown}", self.function, row, completion)
        return _finite(value, f"{self.setting}: {self.name} returned {value!r:.80} for {shown}")


def _finite(value: Any, found: str) -> float:
    value = value.item() if getattr(value, "shape", None) == () else value  # numpy or torch scalars
    try:
        number = float(value) if isinstance(value, Real) else math.nan
    except OverflowError:  # of an integer
        number = math.inf
    if not math.isfinite(number):
        raise TuneError(f"{found}; it must return a finite number")
    return number


class Environment(Protocol):
    """Answers completions: a game, a tool, a judge that asks questions. Each episode has its own."""

    def start(self, row: dict[str, Any]) -> list[Message] | None:
        """Return messages to append to the row's messages, if any."""
        ...

    def step(self, message: Message) -> tuple[float, list[Message], bool]:
        """Return the reward for the assistant's `message`, the messages that reply to it, and whether the episode is
        over. `content` is the sampled text with special tokens, except for the one that ends it. If the row has
        `tools`, `tool_calls` are the calls that could be parsed."""
        ...


@dataclass
class Episode:
    """The tokens sampled after a prompt, with the environment's tokens in between, which have no log-prob. `index`
    counts the episodes of a run. `rewards` are by name, `reward` is their weighted sum, and `magnitude` the sum of the
    absolute terms. `finish` is the last completion's, or "room" if there was no room for another completion."""

    prompt: Prompt
    index: int = 0
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float | None] = field(default_factory=list)
    text: str = ""
    finish: str = "length"
    rewards: dict[str, float] = field(default_factory=dict)
    reward: float = 0.0
    magnitude: float = 0.0

    def add_reward(self, name: str, value: float, weight: float = 1.0) -> None:
        self.rewards[name] = self.rewards.get(name, 0.0) + value
        self.reward += weight * value
        self.magnitude += abs(weight * value)

    def add(self, completion: Completion) -> None:
        self.text = f"{self.text}\n{completion.text}" if self.log_probs else completion.text
        self.tokens += completion.tokens
        self.log_probs += completion.log_probs
        self.finish = completion.finish

    def sample(self, advantage: float = 0.0) -> Sample:
        """Return prompt and episode as a sample in which the sampled tokens are supervised. Its columns are the
        `advantage`, the `reward`, and per token the log-probs `sampled`."""
        first = len(self.prompt.tokens) - 1
        tokens = np.array([*self.prompt.tokens, *self.tokens[:-1]], dtype=np.int32)
        labels, sampled = np.full(len(tokens), IGNORE, dtype=np.int32), np.zeros(len(tokens), dtype=np.float32)
        for at, (token, log_prob) in enumerate(zip(self.tokens, self.log_probs, strict=True), first):
            if log_prob is not None:
                labels[at], sampled[at] = token, log_prob
        of_document = {"advantage": np.float32(advantage), "reward": np.float32(self.reward)}
        return Sample(tokens, labels, self.index, {**of_document, "sampled": sampled})

    def record(self, step: int) -> dict[str, Any]:
        """Return a line for samples.jsonl."""
        return {
            "step": step, "prompt": self.prompt.index, "sample": self.index, "reward": self.reward, **self.rewards,
            "finish": self.finish, "text": self.text, "tokens": self.tokens, "row": self.prompt.row,
        }  # fmt: skip


def is_live(group: Sequence[Episode]) -> bool:
    """Whether the rewards differ by more than rounding. If not, the group has no gradient."""
    rewards = [episode.reward for episode in group]
    return max(rewards) - min(rewards) > _rounding(group)


def _rounding(group: Sequence[Episode]) -> float:
    """Return the largest rounding difference between two totals with the same terms in another order."""
    return ROUNDING * max(episode.magnitude for episode in group)


def counts(groups: Sequence[Sequence[Episode]], environment: Any = None) -> dict[str, int]:
    """Count dead groups (equal rewards), split by whether their reward is above 0. With an `environment`, also count
    conversations that ended without room."""
    dead = [group for group in groups if not is_live(group)]
    right = sum(group[0].reward > _rounding(group) for group in dead)
    found = {"dead_groups": len(dead), "all_right_groups": right, "all_wrong_groups": len(dead) - right}
    return found | ({"without_room": sum(each.finish == "room" for each in chain(*groups))} if environment else {})


def statistics(
    groups: Sequence[Sequence[Episode]], rewards: Sequence[Reward], environment: Any = None
) -> dict[str, torch.Tensor]:
    """Return metrics of this process's episodes by name, as (sum, count) `[2]`."""
    episodes = [episode for group in groups for episode in group]
    names = [*(each.name for each in rewards), *(["environment"] if environment else [])]
    values: dict[str, list[float]] = {
        "reward": [episode.reward for episode in episodes],
        **{f"reward/{name}": [episode.rewards[name] for episode in episodes] for name in names},
        "truncated_share": [episode.finish != "stop" for episode in episodes],
        "completion_tokens": [len(episode.tokens) for episode in episodes],
    }
    return {name: torch.tensor([sum(each), len(each)], dtype=torch.float64) for name, each in values.items()}


def check_prompts(model: nn.Module, sampler: Sampler, prompts: Sequence[Prompt], environment: Any = None) -> None:
    """Raise TuneError if a prompt leaves no room for a completion, or if there is an environment and a prompt is not a
    conversation."""
    sampler.check(model, [each.tokens for each in prompts], [each.index for each in prompts])
    if environment and any(each.messages is None for each in prompts):
        raise TuneError("environment: prompts must be conversations: rows with messages or instruction")


def rollout(
    model: nn.Module, sampler: Sampler, tokenizer: Tokenizer, prompts: Sequence[Prompt], rewards: Sequence[Reward],
    world: World, *, samples: PositiveInt, step: int, environment: Callable[[], Environment] | None = None,
    max_turns: PositiveInt = 1,
) -> list[list[Episode]]:  # fmt: skip
    """Sample `samples` episodes for each of this process's share of `prompts`, with rewards. All processes must call
    this.

    With an `environment`, an episode has up to `max_turns` completions, and the environment also returns rewards.
    """
    mine = prompts[world.data_rank :: world.data_size]
    groups = [[Episode(prompt, prompt.position * samples + at) for at in range(samples)] for prompt in mine]

    def sample(prompts: Sequence[Sequence[int]], **given: Any) -> list[list[Completion]]:
        """Use the first process's completions on all processes that read the same: an engine may differ on each."""
        found = sampler(model, prompts, **given)
        for completion in chain(*found):
            completion.text = tokenizer.decode(completion.tokens, skip_special_tokens=True)
        return world.of_peers(lambda: found)

    if environment is None:
        positions = [prompt.position for prompt in mine]
        completions = sample([prompt.tokens for prompt in mine], samples=samples, step=step, indices=positions)
        for episode, completion in zip(chain(*groups), chain(*completions), strict=True):
            episode.add(completion)
    elif rehearsal.planning():
        _talk_on(model, sampler, [*chain(*groups)], sample, step, max_turns)
    else:
        conversations = [_Conversation(episode, tokenizer, sampler.room(model)) for episode in chain(*groups)]
        _converse(conversations, sample, world, step, environment, max_turns)
    episodes = [*chain(*groups)]
    for reward in rewards:
        for episode, value in zip(episodes, reward.of(episodes, tokenizer, world), strict=True):
            episode.add_reward(reward.name, value, reward.weight)
    return groups


def _talk_on(
    model: nn.Module, sampler: Sampler, episodes: list[Episode], sample: Callable[..., list[list[Completion]]],
    step: int, max_turns: int,
) -> None:  # fmt: skip
    """Sample completions for a plan, without an environment's answers, as long as there is room."""
    room = sampler.room(model)
    for number, episode in enumerate(episodes):
        episode.rewards["environment"] = 0.0
        episode.add_reward("environment", float(number % 2))  # rewards must differ within a group
    for _ in range(max_turns):
        if any(len(episode.prompt.tokens) + len(episode.tokens) > room for episode in episodes):
            return
        prompts = [[*episode.prompt.tokens, *episode.tokens] for episode in episodes]
        for episode, completion in zip(episodes, chain(*sample(prompts, step=step)), strict=True):
            episode.add(completion)


class _Conversation:
    """An episode with an environment, of at most `room` tokens.

    Sampled ids are never tokenized again: the template's text after an answer is appended. Among processes that read
    the same data, only the first one has the environment and calls `start` and `answer`.
    """

    def __init__(self, episode: Episode, tokenizer: Tokenizer, room: float):
        self.episode, self.tokenizer, self.room = episode, tokenizer, room
        self.messages = list(episode.prompt.messages or [])
        self.tools = episode.prompt.tools
        self.environment: Environment

    def start(self, make: Callable[[], Environment]) -> list[Message]:
        """Create the environment; returns its messages that follow the row's."""
        self.environment = called("environment: cannot be created", make)
        messages = called("environment: start fails", methodcaller("start", self.episode.prompt.row), self.environment)
        is_none = messages is None or messages == []
        return [] if is_none else checked_messages(messages, "environment: the result of start")

    def begin(self, messages: list[Message]) -> bool:
        """Add the environment's first `messages` to the prompt; returns whether there is room for a completion."""
        episode = self.episode
        episode.rewards["environment"] = 0.0
        if messages:
            self.messages += messages
            text = self.tokenizer.apply_chat_template(self.messages, add_generation_prompt=True, tools=self.tools)
            tokens = self.tokenizer.encode(text)
            episode.prompt = replace(episode.prompt, tokens=tokens, messages=list(self.messages))
            if len(tokens) > self.room:
                episode.finish = "room"
        return episode.finish != "room"

    def answer(self, completion: Completion, stops: list[str], is_last: bool) -> tuple[float, list[int] | None]:
        """Return the environment's reward for a completion, and the tokens that continue the episode, or None if it is
        over. `stops` are the texts of the tokens that end a turn; nothing follows the last completion."""
        tokenizer = self.tokenizer
        is_stop = completion.tokens[-1] in tokenizer.stop_ids  # otherwise a stop string: the template ends the turn
        text = tokenizer.decode(completion.tokens[:-1] if is_stop else completion.tokens)
        message = assistant_message(text, self.tools, len(self.messages))
        result = called(f"environment: step fails on {text!r}", self.environment.step, message)
        if not isinstance(result, tuple) or len(result) != 3:
            raise TuneError(f"environment: step returned {result!r}; it must return (reward, messages, done)")
        value, messages, done = result
        reward = _finite(value, f"environment: step returned the reward {value!r}")
        if done or completion.finish == "length" or is_last:
            return reward, None
        turn = answered(message, checked_messages(messages, "environment: the messages of step"))
        render = partial(tokenizer.apply_chat_template, tools=self.tools)
        end = tokenizer.decode(completion.tokens[-1:]) if is_stop else None
        suffix = tokenizer.encode(text_behind(render, self.messages, turn, stops, end))
        self.messages += turn
        return reward, suffix

    def go_on(self, completion: Completion, reward: float, suffix: list[int] | None) -> bool:
        """Add a completion, its reward and the tokens after it; returns whether another completion follows."""
        episode = self.episode
        episode.add(completion)
        episode.add_reward("environment", reward)
        if suffix is None:
            return False
        if len(episode.prompt.tokens) + len(episode.tokens) + len(suffix) > self.room:
            episode.finish = "room"
            return False
        episode.tokens += suffix
        episode.log_probs += [None] * len(suffix)
        return True


def _converse(
    conversations: list[_Conversation], sample: Callable[..., list[list[Completion]]], world: World,
    step: int, environment: Callable[[], Environment], max_turns: int,
) -> None:  # fmt: skip
    """Alternate completions and the environments' answers until all conversations are over. All processes must call
    this."""
    beginnings = world.of_peers(lambda: [conversation.start(environment) for conversation in conversations])
    running = [talk for talk, messages in zip(conversations, beginnings, strict=True) if talk.begin(messages)]
    tokenizer = conversations[0].tokenizer if conversations else None
    stops = [tokenizer.decode([token]) for token in sorted(tokenizer.stop_ids)] if tokenizer else []
    for turn in range(max_turns):
        if not world.any(bool(running)):
            return
        episodes = [conversation.episode for conversation in running]
        completions = [*chain(*sample(
            [[*episode.prompt.tokens, *episode.tokens] for episode in episodes],
            step=step * max_turns + turn, indices=[episode.index for episode in episodes],
        ))]  # fmt: skip
        answers = partial(_answers, running, completions, stops, is_last=turn == max_turns - 1)
        results = zip(running, completions, world.of_peers(answers), strict=True)
        running = [talk for talk, completion, (reward, suffix) in results if talk.go_on(completion, reward, suffix)]


def _answers(
    conversations: list[_Conversation], completions: list[Completion], stops: list[str], *, is_last: bool
) -> list[tuple[float, list[int] | None]]:
    return [
        talk.answer(completion, stops, is_last) for talk, completion in zip(conversations, completions, strict=True)
    ]


def global_batch(
    samples: Sequence[Sample], micro_batch_size: PositiveInt, world: World, *,
    seed: int, step: int, rows: Sequence[int] = (), pad_to: int | None = None,
) -> GlobalBatch:  # fmt: skip
    """Build the batch of an optimizer step from this process's `samples`, in micro-batches of `micro_batch_size`.
    Samples of a prompt are adjacent, and the longest come first. Every process has the same number of micro-batches,
    some of which may be empty. `rows` are the dataset rows of this process, for errors. All processes must call this.
    """
    if planning := rehearsal.planning():
        micro_batch_size = planning.take_rows(len(samples), micro_batch_size)
        samples = samples[:micro_batch_size]
    prompts: dict[bytes, list[Sample]] = {}
    for sample in sorted(samples, key=lambda sample: -len(sample.tokens)):
        prompts.setdefault(sample.tokens[: (sample.labels != IGNORE).argmax() + 1].tobytes(), []).append(sample)
    ordered = [[sample] for sample in chain(*prompts.values())]
    tokens = sum(len(sample.tokens) for sample in samples)
    supervised = sum(int((sample.labels != IGNORE).sum()) for sample in samples)
    shares = world.all_gather((len(ordered), tokens, supervised, list(rows)))
    counts, all_tokens, all_supervised, all_rows = zip(*shares, strict=True)
    tokens, supervised = sum(all_tokens), sum(all_supervised)
    micro_batches = -(-max(counts) // micro_batch_size)
    ordered += [[]] * (micro_batches * micro_batch_size - len(ordered))
    return GlobalBatch(
        rows=sorted({*chain(*all_rows)}),
        micro_batches=[
            collate(ordered[at : at + micro_batch_size], pad_to, EXAMPLES).in_step(seed, step, supervised)
            for at in range(0, len(ordered), micro_batch_size)
        ],
        device=world.device, num_tokens=tokens, num_supervised=supervised, num_pairs=0,
    )  # fmt: skip
