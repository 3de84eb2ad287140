"""Rollouts: episodes of a model for each prompt, their means and counts, and greedy answers for a validation."""

import pytest
from generation.test_rollout import Guess

from tune import distributed
from tune.checkpointers import load_model
from tune.datasets import load_prompts
from tune.errors import TuneError
from tune.generation import Rollouts, Sampler, rollout
from tune.generation.rollout import Reward
from tune.tokenizers import Tokenizer


def length(row, completion):
    return len(completion)


def count_of_a(row, completion):
    return completion.count("a")


REWARDS = [("length", length, 0.5), ("a", count_of_a, 2.0)]


def rollouts_of(model, sampler, tokenizer, rewards=REWARDS, **options):
    """Rollouts of three samples for each prompt."""
    return Rollouts(model, sampler, tokenizer, rewards, samples=3, max_prompt_len=64, **options)


@pytest.fixture
def tokenizer(checkpoint):
    return Tokenizer(str(checkpoint))


@pytest.fixture
def sampler(tokenizer):
    return Sampler(max_new_tokens=6, temperature=1.0, stop_ids=tokenizer.stop_ids, decode=tokenizer.decode, seed=3)


@pytest.fixture
def prompts(tokenizer, tmp_path):
    (tmp_path / "prompts.jsonl").write_text("".join(f'{{"instruction": "Say {word}."}}\n' for word in ("cat", "mat")))
    return load_prompts(tokenizer, str(tmp_path / "prompts.jsonl"), max_prompt_len=64)


def test_episodes_rewards_and_their_means(checkpoint, tokenizer, sampler, prompts):
    model = load_model(str(checkpoint))
    rollouts = rollouts_of(model, sampler, tokenizer)
    rollouts.check(prompts, None)
    groups = rollouts(prompts, 2)
    assert [len(group) for group in groups] == [3, 3]
    expected = rollout(
        model, sampler, tokenizer, prompts, [Reward(*each) for each in REWARDS], distributed.init("cpu"),
        samples=3, step=2,
    )  # fmt: skip
    episodes = [episode for group in groups for episode in group]
    assert [each.record(2) for each in episodes] == [each.record(2) for group in expected for each in group]
    metrics = distributed.init("cpu").fetch(**rollouts.metrics(groups))
    texts = [each.record(2)["text"] for each in episodes]
    of_length, of_a = (sum(function({}, text) for text in texts) / len(texts) for function in (length, count_of_a))
    assert metrics["reward/length"] == pytest.approx(of_length) and metrics["reward/a"] == pytest.approx(of_a)
    assert metrics["reward"] == pytest.approx(0.5 * of_length + 2 * of_a)


def test_groups_of_equal_rewards_are_counted(checkpoint, tokenizer, sampler, prompts):
    constant = rollouts_of(load_model(str(checkpoint)), sampler, tokenizer, [("same", lambda row, text: 1.0, 1.0)])
    counted = constant.counts(constant(prompts, 1))
    assert int(counted["dead_groups"]) == 2


def test_validation_is_greedy(checkpoint, tokenizer, sampler, prompts):
    """It is the same in each step, and the same as from a sampler without a temperature."""
    model = load_model(str(checkpoint))
    rollouts = rollouts_of(model, sampler, tokenizer)
    first, again = rollouts.validate(prompts), rollouts.validate(prompts)
    greedy = Sampler(max_new_tokens=6, temperature=0, stop_ids=tokenizer.stop_ids, decode=tokenizer.decode, seed=9)
    answers = rollouts(prompts, 5, 1, greedy)
    of_a = sum(count_of_a({}, group[0].record(5)["text"]) for group in answers) / 2
    assert first == again and first["validation_reward/a"] == pytest.approx(of_a)
    assert all(name.startswith("validation_") for name in first)


def test_environment_is_a_dotted_path(checkpoint, tokenizer, sampler, prompts):
    game = f"{Guess.__module__}.Guess"
    rollouts = rollouts_of(load_model(str(checkpoint)), sampler, tokenizer, [], environment=game, max_turns=2)
    assert rollouts.environment is Guess or rollouts.environment.__name__ == "Guess"
    with pytest.raises(TuneError, match=r"^environment: .*Gues"):
        rollouts_of(load_model(str(checkpoint)), sampler, tokenizer, [], environment=f"{Guess.__module__}.Gues")


def test_prompt_without_room_is_refused(checkpoint, tokenizer, prompts):
    sampler = Sampler(max_new_tokens=600, stop_ids=tokenizer.stop_ids, decode=tokenizer.decode)
    with pytest.raises(TuneError, match="512"):
        rollouts_of(load_model(str(checkpoint)), sampler, tokenizer).check(None, prompts)


def test_batch_has_the_samples_of_all_groups(checkpoint, tokenizer, sampler, prompts):
    model = load_model(str(checkpoint))
    rollouts = rollouts_of(model, sampler, tokenizer, micro_batch_size=4)
    groups = rollouts(prompts, 1)
    samples = [episode.sample(1.0) for group in groups for episode in group]
    batch = rollouts.batch(samples, 1, groups, seed=0)
    assert batch.rows == [prompt.index for prompt in prompts]
    assert batch.num_supervised == sum(len(episode.record(1)["tokens"]) for group in groups for episode in group)
    assert [part.num_supervised for part in batch.micro_batches] and len(batch.micro_batches) == 2
