"""Rollouts: completions of prompts with their rewards, and the batches that are made of them."""

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

# Sums of the same numbers in float64 differ by some 1e-16 of their terms, rewards of a float32 model by 6e-8 at least.
ROUNDING = 1e-9
SCORED = 64  # completions that a plan has models score
EXAMPLES = {"sampled": np.zeros(1, np.float32), **dict.fromkeys(("advantage", "reward"), np.zeros((), np.float32))}


@dataclass(frozen=True)
class Reward:
    """A function from a row of the data and the text of a completion to a number, which counts `weight` times."""

    name: str
    function: Callable[[dict[str, Any], str], float]
    weight: float = 1.0
    setting: str = "reward"  # that names it, for messages

    def of(self, episodes: Sequence["Episode"], tokenizer: Tokenizer, world: World) -> list[float]:
        """One number for each of the episodes. A function with the method `scores` gets all of them together. Of
        processes that read the same the first one calls it; with `is_sharded` all processes do, each for its own."""

        if rehearsal.current():
            return self._rehearsed(episodes, tokenizer, world)

        def make() -> list[float]:
            if not hasattr(self.function, "scores"):
                return [self(episode.prompt.row, episode.text) for episode in episodes]
            scores = called(f"{self.setting}: {self.name} fails", self.function.scores, episodes, tokenizer, world)
            if not isinstance(scores, Sequence) or len(scores) != len(episodes):
                found = f"{self.setting}: {self.name} gives {scores!r:.80} for {len(episodes)} completions"
                raise TuneError(f"{found}; it must give a list of as many numbers")
            return [_finite(score, f"{self.setting}: {self.name} gives {score!r}") for score in scores]

        return make() if getattr(self.function, "is_sharded", False) else world.of_peers(make)

    def _rehearsed(self, episodes: Sequence["Episode"], tokenizer: Tokenizer, world: World) -> list[float]:
        """Call a function with the first prompt, of which it is the completion too, and a reward model; a judge, which
        may not be here, is not called. The rewards of a group differ."""
        model: Any = self.function
        if planning := rehearsal.planning():
            with planning.scoring() as scores:
                if scores and getattr(model, "is_sharded", False):
                    model.scores(episodes[:SCORED], tokenizer, world)
        elif getattr(model, "is_sharded", False):
            called(f"{self.setting}: {self.name} fails", model.scores, episodes[:1], tokenizer, world)
        elif episodes and isinstance(self.function, partial):
            self(episodes[0].prompt.row, tokenizer.decode(episodes[0].prompt.tokens))
        return [float(number % 2) for number, _ in enumerate(episodes)]

    def __call__(self, row: dict[str, Any], completion: str) -> float:
        """Raises TuneError if the function raises, or gives something else than a finite number."""
        shown = repr(completion if len(completion) <= 80 else completion[:77] + "...")
        value = called(f"{self.setting}: {self.name} fails on {shown}", self.function, row, completion)
        return _finite(value, f"{self.setting}: {self.name} gives {value!r} for {shown}")


def _finite(value: Any, found: str) -> float:
    value = value.item() if getattr(value, "shape", None) == () else value  # of numpy or torch
    if not isinstance(value, Real) or not math.isfinite(value):
        raise TuneError(f"{found}; it must give a finite number")
    return float(value)


class Environment(Protocol):
    """Answers a completion: a game, a tool, a judge that asks back. There is one for each completion."""

    def start(self, row: dict[str, Any]) -> list[Message] | None:
        """The messages that stand behind those of the row, if there are any."""
        ...

    def step(self, message: Message) -> tuple[float, list[Message], bool]:
        """The reward for the assistant's `message`, the messages that answer it, and whether that was the end. Its
        `content` is what was sampled, special tokens included, but for the one that ends it; where the row has `tools`,
        its `tool_calls` are what could be read as calls."""
        ...


@dataclass
class Episode:
    """What was sampled after a prompt: its tokens, with those of an environment's messages between, which have no
    log-prob. `index` counts the episodes of a run. `rewards` are by name, `reward` is their weighted sum, and
    `magnitude` the sum of the absolute values of its terms; `finish` is that of the last completion, or "room" where
    the conversation left none for another one."""

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
        """The prompt with the episode, whose sampled tokens are learned. Its columns are the `advantage`, the `reward`,
        and by token the log-probs of what was `sampled`."""
        first = len(self.prompt.tokens) - 1
        tokens = np.array([*self.prompt.tokens, *self.tokens[:-1]], dtype=np.int32)
        labels, sampled = np.full(len(tokens), IGNORE, dtype=np.int32), np.zeros(len(tokens), dtype=np.float32)
        for at, (token, log_prob) in enumerate(zip(self.tokens, self.log_probs, strict=True), first):
            if log_prob is not None:
                labels[at], sampled[at] = token, log_prob
        of_document = {"advantage": np.float32(advantage), "reward": np.float32(self.reward)}
        return Sample(tokens, labels, self.index, {**of_document, "sampled": sampled})

    def record(self, step: int) -> dict[str, Any]:
        """For samples.jsonl."""
        return {
            "step": step, "prompt": self.prompt.index, "sample": self.index, "reward": self.reward, **self.rewards,
            "finish": self.finish, "text": self.text, "tokens": self.tokens, "row": self.prompt.row,
        }  # fmt: skip


def is_live(group: Sequence[Episode]) -> bool:
    """Whether the rewards differ by more than rounding: otherwise nothing is learned from them."""
    rewards = [episode.reward for episode in group]
    return max(rewards) - min(rewards) > _rounding(group)


def _rounding(group: Sequence[Episode]) -> float:
    """The largest difference of two totals that are equal but for the order and the size of their terms."""
    return ROUNDING * max(episode.magnitude for episode in group)


def counts(groups: Sequence[Sequence[Episode]], environment: Any = None) -> dict[str, int]:
    """How many groups teach nothing, and of them those whose reward is above 0, or not; with an `environment`, how many
    conversations ended for want of room."""
    dead = [group for group in groups if not is_live(group)]
    right = sum(group[0].reward > _rounding(group) for group in dead)
    found = {"dead_groups": len(dead), "all_right_groups": right, "all_wrong_groups": len(dead) - right}
    return found | ({"without_room": sum(each.finish == "room" for each in chain(*groups))} if environment else {})


def statistics(
    groups: Sequence[Sequence[Episode]], rewards: Sequence[Reward], environment: Any = None
) -> dict[str, torch.Tensor]:
    """Metrics of this process's episodes: by name a sum, and of how many it is, `[2]`."""
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
    """Raises TuneError if a prompt leaves no room for a completion, or is no conversation, as an environment's are."""
    sampler.check(model, [each.tokens for each in prompts], range(len(prompts)))
    if environment and any(each.messages is None for each in prompts):
        raise TuneError("environment: its prompts must be conversations: messages, or instruction")


def rollout(
    model: nn.Module, sampler: Sampler, tokenizer: Tokenizer, prompts: Sequence[Prompt], rewards: Sequence[Reward],
    world: World, *, samples: PositiveInt, step: int, environment: Callable[[], Environment] | None = None,
    max_turns: PositiveInt = 1,
) -> list[list[Episode]]:  # fmt: skip
    """`samples` episodes of each of this process's share of `prompts`, with their rewards. All processes call it.

    With an `environment`, an episode goes on for up to `max_turns` completions, and what it gives is a reward too.
    """
    mine = prompts[world.data_rank :: world.data_size]
    groups = [[Episode(prompt, prompt.position * samples + at) for at in range(samples)] for prompt in mine]

    def sample(prompts: Sequence[Sequence[int]], **given: Any) -> list[list[Completion]]:
        """Processes that read the same have the completions of the first: an engine may give others to each."""
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
    """For a plan, completions that an environment does not answer and does not end, as long as there is room."""
    room = sampler.room(model)
    for number, episode in enumerate(episodes):
        episode.rewards["environment"] = 0.0
        episode.add_reward("environment", float(number % 2))  # those of a group differ
    for _ in range(max_turns):
        if any(len(episode.prompt.tokens) + len(episode.tokens) > room for episode in episodes):
            return
        prompts = [[*episode.prompt.tokens, *episode.tokens] for episode in episodes]
        for episode, completion in zip(episodes, chain(*sample(prompts, step=step)), strict=True):
            episode.add(completion)


class _Conversation:
    """An episode that an environment answers, while it has at most `room` tokens.

    Sampled ids are never tokenized again: what the template writes after an answer is appended. Of processes that read
    the same, only the first one has the environment, and calls `start` and `answer`.
    """

    def __init__(self, episode: Episode, tokenizer: Tokenizer, room: float):
        self.episode, self.tokenizer, self.room = episode, tokenizer, room
        self.messages = list(episode.prompt.messages or [])
        self.tools = episode.prompt.tools
        self.environment: Environment

    def start(self, make: Callable[[], Environment]) -> list[Message]:
        """Make the environment; returns its messages that follow those of the row."""
        self.environment = called("environment: it cannot be made", make)
        messages = called("environment: start fails", methodcaller("start", self.episode.prompt.row), self.environment)
        is_none = messages is None or messages == []
        return [] if is_none else checked_messages(messages, "environment: what start returns")

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
        """The environment's reward for a completion, and the tokens with which the episode goes on; None if it is over.
        `stops` are the texts of the tokens that end a turn; after the last completion nothing follows."""
        tokenizer = self.tokenizer
        is_stop = completion.tokens[-1] in tokenizer.stop_ids  # otherwise a stop string: the template ends the turn
        text = tokenizer.decode(completion.tokens[:-1] if is_stop else completion.tokens)
        message = assistant_message(text, self.tools, len(self.messages))
        result = called(f"environment: step fails on {text!r}", self.environment.step, message)
        if not isinstance(result, tuple) or len(result) != 3:
            raise TuneError(f"environment: step gives {result!r}; it must give (reward, messages, done)")
        value, messages, done = result
        reward = _finite(value, f"environment: step gives the reward {value!r}")
        if done or completion.finish == "length" or is_last:
            return reward, None
        turn = answered(message, checked_messages(messages, "environment: the messages of step"))
        render = partial(tokenizer.apply_chat_template, tools=self.tools)
        end = tokenizer.decode(completion.tokens[-1:]) if is_stop else None
        suffix = tokenizer.encode(text_behind(render, self.messages, turn, stops, end))
        self.messages += turn
        return reward, suffix

    def go_on(self, completion: Completion, reward: float, suffix: list[int] | None) -> bool:
        """Add a completion with its reward, and the tokens after it; returns whether another one follows."""
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
    """Completions and the environments' answers in turn, until all conversations are over. All processes call it."""
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
    """The batch of an optimizer step from this process's `samples`, in micro-batches of `micro_batch_size`, those of a
    prompt one after the other, the longest first; as many on every process, some of them empty. `rows` are this
    process's rows of the dataset that they come from, to be named in errors. All processes call it."""
    if planning := rehearsal.planning():
        micro_batch_size = planning.take_rows(len(samples), micro_batch_size)
        samples = samples[:micro_batch_size]
    prompts: dict[bytes, list[Sample]] = {}
    for sample in sorted(samples, key=lambda sample: -len(sample.tokens)):
        prompts.setdefault(sample.tokens[: (sample.labels != IGNORE).argmax() + 1].tobytes(), []).append(sample)
    ordered = [[sample] for sample in chain(*prompts.values())]
    tokens = sum(len(sample.tokens) for sample in samples)
    supervised = sum(int((sample.labels != IGNORE).sum()) for sample in samples)
    shares = world.all_gather((len(ordered), tokens, supervised, list(rows)))[
        :: world.peers.size()
    ]  # others have the same
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
