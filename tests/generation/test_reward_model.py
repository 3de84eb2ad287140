"""A reward model as a reward gives the scores of transformers for the sampled ids."""

import json
import shutil

import pytest
import torch
import transformers
from helpers import save_checkpoint

from tune import distributed
from tune.datasets import Prompt
from tune.errors import TuneError
from tune.generation import Episode, Reward, RewardModel, is_live
from tune.generation.reward_model import _scored
from tune.models import Decoder
from tune.tokenizers import Tokenizer


@pytest.fixture(scope="module")
def world():
    return distributed.init("cpu")


@pytest.fixture(scope="module")
def judge(tmp_path_factory):
    folder = save_checkpoint(tmp_path_factory.mktemp("judge"))
    torch.manual_seed(3)
    config = transformers.AutoConfig.from_pretrained(folder, num_labels=1, pad_token_id=0)
    transformers.AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    return folder


def test_scores_match_transformers(judge, world, monkeypatch):
    prompts = [[5, 9, 30], [5, 9, 30], [8, 9, 32]]
    episodes = [
        Episode(Prompt(number, prompt, {}), tokens=[*[40, 50, 60][: number + 1], 2])
        for number, prompt in enumerate(prompts)
    ]
    reward, read, embed = Reward("judge", RewardModel(str(judge), micro_batch_size=2)), [], Decoder.embed
    monkeypatch.setattr(Decoder, "embed", lambda self, tokens: read.append(tokens.numel()) or embed(self, tokens))
    scores = reward.of(episodes, Tokenizer(str(judge)), world)
    assert read == [5 + 2, 7]  # the shared start [5, 9, 30, 40] of the first two is read once
    model = transformers.AutoModelForSequenceClassification.from_pretrained(judge).eval()
    with torch.no_grad():
        ids = [torch.tensor([[*episode.prompt.tokens, *episode.tokens]]) for episode in episodes]
        expected = [model(tokens).logits.item() for tokens in ids]
    assert scores == pytest.approx(expected, abs=1e-5)


HEADERS_ALONE = (  # like GLM: an answer ends where the next turn starts
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize(("template", "end"), [(None, "<|im_end|>"), (HEADERS_ALONE, "<|im_start|>")])
def test_answer_is_scored_at_the_end_of_the_conversation(template, end, judge, world, tmp_path):
    """After the sampled end of turn, a template writes a newline, or it writes neither."""
    folder = shutil.copytree(judge, tmp_path / "judge")
    (index,) = Tokenizer(str(folder)).encode(end)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [index]}))
    if template:
        (folder / "template.jinja").write_text(template)
    tokenizer = Tokenizer(str(folder), chat_template=template and str(folder / "template.jinja"))
    messages = [{"role": "user", "content": "Hi"}]
    whole = tokenizer.encode(tokenizer.apply_chat_template([*messages, {"role": "assistant", "content": "a cat"}]))
    prompt = tokenizer.encode(tokenizer.apply_chat_template(messages, add_generation_prompt=True))
    answer = tokenizer.encode(f"a cat{end}")
    assert [*prompt, *answer] == (whole[:-1] if template is None else [*whole, index])
    episode = Episode(Prompt(0, prompt, {}, messages), tokens=answer, text="a cat", finish="stop")
    (score,) = RewardModel(str(folder)).scores([episode], tokenizer, world)
    with torch.no_grad():
        model = transformers.AutoModelForSequenceClassification.from_pretrained(judge).eval()
        assert score == pytest.approx(model(torch.tensor([whole])).logits.item(), abs=1e-5)


def test_unsuitable_reward_models_are_refused(judge, checkpoint, world):
    with pytest.raises(TuneError, match="not a reward model"):
        RewardModel(str(checkpoint)).scores([], Tokenizer(str(checkpoint)), world)
    other = Tokenizer(str(judge))
    other.add_tokens(["<new>"])
    with pytest.raises(TuneError, match="different tokenizer"):
        RewardModel(str(judge)).scores([], other, world)


def test_scores_that_are_not_numbers_are_refused(judge, world):
    class Broken:
        def scores(self, episodes, tokenizer, world):
            return [float("nan")] * len(episodes)

    with pytest.raises(TuneError, match="broken returned nan"):
        Reward("broken", Broken()).of([Episode(Prompt(0, [5], {}))], Tokenizer(str(judge)), world)


def test_truncated_completion_is_scored_at_its_end(checkpoint):
    """A completion ended by a stop string keeps all its tokens and gets the end of turn."""
    tokenizer, messages = Tokenizer(str(checkpoint)), [{"role": "user", "content": "the cat"}]
    asked = tokenizer.encode(tokenizer.apply_chat_template(messages, add_generation_prompt=True))
    prompt, answer = Prompt(0, asked, {}, messages), tokenizer.encode("sat")
    assert _scored(Episode(prompt, tokens=answer, finish="length"), tokenizer) == asked + answer
    stopped = _scored(Episode(prompt, tokens=answer, finish="stop"), tokenizer)
    assert stopped == asked + answer + tokenizer.encode("<|im_end|>\n")


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_scores_do_not_depend_on_how_many_texts_other_processes_have(count, judge, world, monkeypatch):
    episodes = [Episode(Prompt(0, [5, 9, 30], {}), tokens=[40 + number, 2]) for number in range(count)]
    model, tokenizer = RewardModel(str(judge), micro_batch_size=2), Tokenizer(str(judge))
    alone = model.scores(episodes, tokenizer, world)
    forwards, embed = [], Decoder.embed
    monkeypatch.setattr(type(world), "all_gather", lambda self, batches: [batches, 4])
    monkeypatch.setattr(Decoder, "embed", lambda self, tokens: forwards.append(1) or embed(self, tokens))
    assert model.scores(episodes, tokenizer, world) == alone and len(alone) == count
    assert len(forwards) == 4  # a process with fewer texts takes part in the forwards of the others


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_group_of_equal_completions_is_dead(dtype, judge, world):
    """Wherever they stand in the batches of the reward model, next to other texts of other lengths."""
    prompt = Prompt(0, [5, 9, 30], {})
    equal = [Episode(prompt, tokens=[40, 50, 2]) for _ in range(8)]
    others = [Episode(Prompt(1, [8, 9], {}), tokens=[*range(20, 20 + length), 2]) for length in range(1, 9)]
    mixed = [episode for pair in zip(equal, others, strict=True) for episode in pair]
    reward = Reward("judge", RewardModel(str(judge), dtype=dtype, micro_batch_size=3))
    for episode, value in zip(mixed, reward.of(mixed, Tokenizer(str(judge)), world), strict=True):
        episode.add_reward("judge", value)
    assert len({episode.reward for episode in equal}) == 1 and not is_live(equal)
    assert len({episode.reward for episode in others}) == 8 and is_live(others)
