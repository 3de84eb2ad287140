"""Rollouts with a scripted sampler: environments with several turns, and the learned tokens."""

import ast
import math
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import run_processes

from tune import distributed
from tune.datasets import Prompt, PromptLoader, Prompts
from tune.errors import TuneError
from tune.generation import Completion, Episode, Reward, counts, global_batch, is_live, rollout, statistics
from tune.tokenizers import Tokenizer

QUESTION = [{"role": "user", "content": "the cat"}]


@pytest.fixture
def tokenizer(checkpoint):
    return Tokenizer(str(checkpoint))


@pytest.fixture
def world():
    return distributed.init("cpu")


@pytest.fixture
def prompt(tokenizer):
    text = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True)
    return Prompt(3, tokenizer.encode(text), {"secret": "mat"}, QUESTION, position=5)


class Scripted:
    """A sampler with scripted completions, one per turn."""

    def __init__(self, *completions):
        self.completions, self.prompts, self.keys, self.longest = list(completions), [], [], math.inf

    def room(self, model):
        return self.longest

    def __call__(self, model, prompts, *, samples=1, step=0, indices=None):
        if not prompts:
            return []
        self.prompts.append(prompts)
        self.keys.append((step, list(indices)))
        tokens, finish = self.completions.pop(0)
        return [[Completion(list(tokens), [-0.5] * len(tokens), finish)] for _ in prompts]


class Guess:
    """Repeats wrong guesses until the guess is the secret."""

    def start(self, row):
        self.secret, self.turns = row["secret"], 0

    def step(self, message):
        self.turns += 1
        is_right = self.secret in message["content"]
        return float(is_right) / self.turns, [{"role": "user", "content": f"not {message['content']}"}], is_right


def converse(tokenizer, world, prompt, sampler, samples=1, environment=Guess, **options):
    (group,) = rollout(
        None, sampler, tokenizer, [prompt], [], world, samples=samples, step=2, environment=environment, **options
    )
    return group


@pytest.mark.slow
def test_tensor_parallel_ranks_use_the_rewards_of_the_first(checkpoint):
    """Random or failing rewards would otherwise give different advantages and models."""
    output = run_processes(Path(__file__).with_name("rewards_of_peers.py"), 2, str(checkpoint))
    *_, rewards, turns, failure = output.splitlines()
    assert len({reward for reward, *_ in ast.literal_eval(rewards)}) == 3
    assert all(rewards["environment"] > 0 for _, rewards, _ in ast.literal_eval(turns))
    assert failure.endswith("ValueError: process 0 (rewards_of_peers.py:31)")


def test_turns_of_an_environment(tokenizer, world, prompt):
    """The text follows the template; sampled ids are kept although the tokenizer would give others."""
    end = tokenizer.encode("<|im_end|>")
    letters = [token for letter in "dog" for token in tokenizer.encode(letter)]
    assert tokenizer.decode(letters) == "dog" and letters != tokenizer.encode("dog")
    sampler = Scripted((letters + end, "stop"), (tokenizer.encode("the mat") + end, "stop"))
    first, second = converse(tokenizer, world, prompt, sampler, samples=2, max_turns=4)
    assert first.tokens == second.tokens and (first.index, second.index) == (10, 11)
    turns = [{"role": "assistant", "content": "dog"}, {"role": "user", "content": "not dog"}]
    last = {"role": "assistant", "content": "the mat"}
    written = tokenizer.apply_chat_template([*QUESTION, *turns, last])
    assert tokenizer.decode([*prompt.tokens, *first.tokens]) == written.removesuffix("\n")
    assert first.tokens[: len(letters) + 1] == letters + end
    assert sampler.prompts[1][0] == [*prompt.tokens, *first.tokens[: -len(tokenizer.encode("the mat")) - 1]]
    assert sampler.keys == [(2 * 4, [10, 11]), (2 * 4 + 1, [10, 11])]
    assert (first.reward, first.rewards, first.finish) == (0.5, {"environment": 0.5}, "stop")
    assert first.text == "dog\nthe mat"

    sample = first.sample(0.25)
    (batch,) = global_batch([sample], 4, world, seed=0, step=1).micro_batches
    learned = [token for token in sample.labels.tolist() if token != -100]
    assert learned == letters + end + tokenizer.encode("the mat") + end  # and no token of the environment
    assert batch.num_supervised == len(learned) == sum(sample.columns["sampled"] == -0.5)
    at = [position for position, token in enumerate(sample.labels) if token != -100]
    follows = [*prompt.tokens, *first.tokens]
    assert [follows[position + 1] for position in at] == learned


def test_turn_ended_by_a_stop_string_gets_the_end_of_turn(tokenizer, world, prompt):
    """Also if the string is inside the text that ends a turn."""
    sampler = Scripted((tokenizer.encode("dog>"), "stop"), (tokenizer.encode("mat<|im_end|>"), "stop"))
    (episode,) = converse(tokenizer, world, prompt, sampler, max_turns=2)
    assert tokenizer.decode(episode.tokens).startswith("dog><|im_end|>\n<|im_start|>user\nnot dog><|im_end|>\n")


@pytest.mark.parametrize(
    ("finish", "turns", "asked", "room"),
    [("length", 8, 1, 0), ("stop", 2, 2, 99), ("stop", 1, 1, 0), ("stop", 8, 1, -1), ("stop", 8, 2, 0)],
)
def test_episode_ends(finish, turns, asked, room, tokenizer, world, prompt):
    """A truncated completion, the last turn or lack of room ends an episode with a sampled token."""
    tokens = tokenizer.encode("dog") + tokenizer.encode("<|im_end|>")
    sampler = Scripted(*[(tokens, finish)] * 3)
    answer = len(tokenizer.encode("\n<|im_start|>user\nnot dog<|im_end|>\n<|im_start|>assistant\n"))
    sampler.longest = len(prompt.tokens) + len(tokens) + answer + room
    (episode,) = converse(tokenizer, world, prompt, sampler, max_turns=turns)
    assert len(sampler.prompts) == asked and episode.log_probs[-1] is not None
    assert episode.finish == ("room" if turns == 8 and finish == "stop" else finish)
    assert statistics([[episode]], [])["truncated_share"][0] == (episode.finish != "stop")


def test_rewards_add_up_by_name_and_weight(prompt, tokenizer, world):
    """Rewards by name are unweighted, `reward` is weighted; only tokens of the completion count."""
    rewards = [Reward("long", lambda row, text: 3.0, 0.5), Reward("short", lambda row, text: -4.0, 2.0)]
    ((episode,),) = rollout(None, Scripted(([5, 6, 7], "stop")), tokenizer, [prompt], rewards, world, samples=1, step=1)
    assert episode.rewards == {"long": 3.0, "short": -4.0}
    assert (episode.reward, episode.magnitude) == (0.5 * 3 - 2 * 4, 0.5 * 3 + 2 * 4)
    episode.add_reward("long", 1.0, 0.5)
    assert episode.rewards["long"] == 4.0 and episode.reward == 0.5 * 4 - 2 * 4
    metrics = statistics([[episode, Episode(prompt, tokens=[5] * 3, rewards={"long": 1.0, "short": 0.0})]], rewards)
    assert metrics["reward/long"].tolist() == [5.0, 2] and metrics["reward"].tolist() == [-6.0, 2]
    assert metrics["completion_tokens"].tolist() == [3 + 3, 2]


class Fails(Guess):
    def step(self, message):
        raise KeyError("door")


class NotANumber(Guess):
    def step(self, message):
        return float("nan"), [], True


class OnlyANumber(Guess):
    def step(self, message):
        return 1.0


class NoAnswer(Guess):
    def step(self, message):
        return 0.0, [], False


class NoStart:
    pass


@pytest.mark.parametrize(
    ("environment", "facts"),
    [
        (Fails, ("step fails on 'dog'", "KeyError: 'door'")),
        (NotANumber, ("reward nan", "finite number")),
        (OnlyANumber, ("returned 1.0", "(reward, messages, done)")),
        (NoAnswer, ("the messages of step", "a list of messages")),
        (NoStart, ("start fails", "AttributeError")),
    ],
)
def test_errors_of_environments_are_reported(environment, facts, tokenizer, world, prompt):
    sampler = Scripted(*[(tokenizer.encode("dog") + tokenizer.encode("<|im_end|>"), "stop")] * 2)
    with pytest.raises(TuneError) as raised:
        converse(tokenizer, world, prompt, sampler, environment=environment, max_turns=2)
    assert all(fact in str(raised.value) for fact in ("environment: ", *facts))


def test_prompt_drawn_twice_in_a_step_gets_different_samples():
    """It is drawn again at the end of an epoch or to replace a dead group."""
    prompts = Prompts("three", [Prompt(index, [1], {}) for index in range(3)], {})
    loader = PromptLoader(prompts, 2, epochs=2)
    (_, first), (_, second) = loader
    assert [prompt.position for prompt in (*first, *second, *loader.draw(2))] == list(range(6))
    assert sorted(prompt.index for prompt in (*first, *second[:1])) == [0, 1, 2]


def test_dead_groups_are_counted_as_right_or_wrong():
    rewards = [(0.0, 0.0), (1.0, 1.0), (0.0, 1.0), (0.5, 0.5), (-1.0, -1.0)]
    groups = [[Episode(Prompt(0, [1], {}), reward=reward) for reward in group] for group in rewards]
    assert counts(groups) == {"dead_groups": 4, "all_right_groups": 2, "all_wrong_groups": 2}


def test_rewards_that_differ_only_by_rounding_are_equal():
    """kin: huggingface/trl#5588. Different terms have the same total: 0.1 + 0.2 and 0.3 + 0.0."""

    def group(*rewards: tuple[float, ...]) -> list[Episode]:
        episodes = [Episode(Prompt(0, [1], {})) for _ in rewards]
        for episode, terms in zip(episodes, rewards, strict=True):
            for name, term in zip("abc", terms, strict=False):
                episode.add_reward(name, term, weight=2.0)
        return episodes

    dead = group((0.1, 0.2), (0.3, 0.0)), group((1e6, 0.1, -1e6), (0.1, 0.0, 0.0)), group((0.1, 0.2, -0.3), (0.0,) * 3)
    assert [len({episode.reward for episode in episodes}) for episodes in dead] == [2, 2, 2]
    assert not any(map(is_live, dead))
    assert counts(dead) == {"dead_groups": 3, "all_right_groups": 2, "all_wrong_groups": 1}
    live = group((0.3,), (0.3 + 1e-7,)), group((1e6,), (1e6 + 0.1,)), group((-1e-12,), (1e-12,))
    assert all(map(is_live, live))


@pytest.mark.parametrize("number", [True, np.float32(1), np.bool_(True), np.array(1), torch.tensor(1.0)])
def test_rewards_may_be_numbers_of_other_libraries(number):
    assert Reward("ones", lambda row, completion: number)({}, "") == 1.0


async def waits(row, completion):
    return 1.0


@pytest.mark.filterwarnings("error")  # also for coroutines that are never awaited
@pytest.mark.parametrize(
    ("function", "message"),
    [
        (waits, "is async"),
        (lambda row, completion: sys.exit(3), "SystemExit: 3 (test_rollout.py:"),
        (lambda row, completion: np.ones(2), "returned array([1., 1.])"),
        (lambda row, completion: 10**400, "returned 1000000"),
    ],
)
def test_invalid_rewards_are_reported(function, message):
    with pytest.raises(TuneError, match=re.escape(message)):
        Reward("mine", function)({}, "an answer")
