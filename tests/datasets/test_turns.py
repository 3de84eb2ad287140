"""turns=as_seen: each answer is learned in the context of its turn, as in a hand-made row for that turn."""

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from reasoning import ask, think
from row_outcomes import outcomes
from torch.testing import assert_close

from tune.checkpointers import load_model
from tune.collators import collate
from tune.datasets import DataLoader, load
from tune.errors import TuneError
from tune.losses import LinearCrossEntropy
from tune.tokenizers import Tokenizer

transformers = pytest.importorskip("transformers")

TALK = [ask("the cat"), think("on the mat", "sat"), ask("and the dog"), think("under it", "ran"), ask("then"),
        think("very quick", "it was red")]  # fmt: skip
TOOLS = [ask("the cat"), think("look", "on the mat"), {"role": "tool", "content": "big"}, think("so", "it sat"),
         ask("and"), think("then", "ran")]  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(thinking_checkpoint):
    return Tokenizer(str(thinking_checkpoint))


def by_hand(thinking_checkpoint, conversations):
    """Tokens and labels of each answer after its own prompt, rendered by transformers."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(thinking_checkpoint)
    turns = []
    for messages in conversations:
        for index in (index for index, message in enumerate(messages) if message["role"] == "assistant"):
            prompt = tokenizer.apply_chat_template(messages[:index], add_generation_prompt=True, return_dict=False)
            tokens = tokenizer.apply_chat_template(messages[: index + 1], return_dict=False)
            assert tokens[: len(prompt)] == prompt
            end = len(tokens) - len(tokenizer.encode("\n"))
            turns.append((tokens, [-100] * (len(prompt) - 1) + tokens[len(prompt) : end]))
    return [(tokens, labels + [-100] * (len(tokens) - len(labels))) for tokens, labels in turns]


def read(tokenizer, messages, max_seq_len=400, **options):
    (outcome,) = outcomes(tokenizer, max_seq_len, [("row", {"messages": messages})], turns="as_seen", **options)
    return outcome


def written(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_each_answer_has_the_context_of_its_turn(thinking_checkpoint, tokenizer):
    outcome = read(tokenizer, TALK)
    samples = [(sample.tokens.tolist(), sample.labels.tolist()) for sample in outcome.samples]
    assert samples == by_hand(thinking_checkpoint, [TALK])
    assert len({sample.columns["group"] for sample in outcome.samples}) == 1
    assert outcome.remarks == []  # no reasoning is lost
    together = outcomes(tokenizer, 400, [("row", {"messages": TALK})])[0]
    assert together.remarks == ["reasoning left out by the template"]


def test_answers_that_share_a_context_are_one_sample(thinking_checkpoint, tokenizer):
    """In a loop of tool calls, reasoning stays until the next question."""
    first, second = read(tokenizer, TOOLS).samples
    turns = by_hand(thinking_checkpoint, [TOOLS])
    assert first.tokens.tolist() == turns[1][0] and second.tokens.tolist() == turns[2][0]
    length = len(turns[0][0])
    assert first.labels.tolist() == [*turns[0][1][: length - 1], *turns[1][1][length - 1 :]]
    assert np.count_nonzero(first.labels != -100) == sum(
        np.count_nonzero(np.array(turns[i][1]) != -100) for i in (0, 1)
    )


def test_template_that_omits_nothing_gives_the_whole_conversation(checkpoint):
    tokenizer = Tokenizer(str(checkpoint))
    (whole,) = outcomes(tokenizer, 400, [("row", {"messages": TALK})])[0].samples
    (sample,) = read(tokenizer, TALK).samples
    assert (sample.tokens == whole.tokens).all() and (sample.labels == whole.labels).all()


MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }} {% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)


@pytest.mark.parametrize(
    ("change", "facts"),
    [
        (("{% for m in", "{{ messages | length }}{% for m in"), ["turns=as_seen", "message 2", "'1<|im_start|>"]),
        (("in messages", "in messages[-3:]"), ["turns=as_seen", "message 4"]),
        (("'assistant' %}", "'assistant' and loop.last %}"), ["1 generation blocks for 2", "turns=as_seen"]),
    ],
)
def test_marked_template_must_render_answers_as_they_are_asked_for(checkpoint, tmp_path, change, facts):
    """Markers show which text is the assistant's, but not that the text before it is the one that the model gets."""
    (tmp_path / "template.jinja").write_text(MARKED.replace(*change))
    tokenizer = Tokenizer(str(checkpoint), chat_template=str(tmp_path / "template.jinja"))
    mistake = read(tokenizer, TALK).mistake
    assert [fact for fact in facts if fact not in mistake] == [], mistake


def test_answer_before_any_question_with_a_marked_template(checkpoint, tmp_path):
    (tmp_path / "template.jinja").write_text("{{ messages[0].role }}" + MARKED)
    tokenizer = Tokenizer(str(checkpoint), chat_template=str(tmp_path / "template.jinja"))
    outcome = read(tokenizer, [{"role": "assistant", "content": "sat"}, *TALK])
    assert outcome.mistake is None and "sat" in tokenizer.decode(outcome.samples[0].tokens.tolist())


def test_only_learned_answers_make_samples(thinking_checkpoint, tokenizer):
    masked = [*TALK[:3], {**TALK[3], "train": False}, *TALK[4:]]
    turns = by_hand(thinking_checkpoint, [TALK])
    assert [sample.tokens.tolist() for sample in read(tokenizer, masked).samples] == [turns[0][0], turns[2][0]]
    assert [sample.tokens.tolist() for sample in read(tokenizer, TALK, train_on="last").samples] == [turns[2][0]]
    assert read(tokenizer, [ask("the"), {**TALK[1], "train": False}]).dropped == "no message to learn"


def test_long_turns_are_cut_dropped_or_refused(thinking_checkpoint, tokenizer):
    turns = by_hand(thinking_checkpoint, [TALK])
    fits, prompt = len(turns[1][0]), turns[2][1].index(next(label for label in turns[2][1] if label != -100)) + 1
    cut = read(tokenizer, TALK, fits, too_long="drop")
    assert [sample.tokens.tolist() for sample in cut.samples] == [turns[0][0], turns[1][0]]
    assert cut.cut == len(turns[2][0]) and cut.dropped is None
    clipped = read(tokenizer, TALK, prompt + 2)
    assert clipped.clipped and [len(sample.tokens) for sample in clipped.samples][-1] == prompt + 2
    assert read(tokenizer, TALK, 10, too_long="drop").dropped == "longer than max_seq_len"
    assert "more than max_seq_len" in read(tokenizer, TALK, fits, too_long="error").mistake


@pytest.mark.parametrize("packed", [False, True])
def test_training_rows_have_at_most_max_seq_len_tokens(packed, tokenizer, tmp_path):
    lengths = [len(sample.tokens) for sample in read(tokenizer, TALK).samples]
    assert sum(lengths) > sum(lengths[:2]) + 2
    path = written(tmp_path / "rows.jsonl", [{"messages": TALK}, {"messages": TOOLS}])
    most = sum(lengths[:2]) + 2
    data = load(tokenizer, path, max_seq_len=most, packed=packed, turns="as_seen", cache_dir=str(tmp_path), workers=1)
    assert data.accounting.samples == 5 and data.row_tokens.max() <= most
    rows = [[sample.index for sample in data.row(row)] for row in range(len(data))]
    assert [0, 1] in rows and 2 not in next(row for row in rows if 0 in row)


def test_loss_and_gradients_match_separate_turns(thinking_checkpoint, tokenizer, tmp_path):
    """They match transformers on each turn alone, with less computation."""
    talks = [TALK, TOOLS]
    path = written(tmp_path / "rows.jsonl", [{"messages": talk} for talk in talks])
    data = load(tokenizer, path, max_seq_len=400, turns="as_seen", cache_dir=str(tmp_path), workers=1)
    batch = collate([data.row(index) for index in range(len(data))])
    model = load_model(str(thinking_checkpoint))
    loss = model(batch, LinearCrossEntropy()) / batch.num_supervised
    loss.backward()

    reference, total, count = transformers.AutoModelForCausalLM.from_pretrained(thinking_checkpoint), 0.0, 0
    turns = by_hand(thinking_checkpoint, talks)
    for tokens, labels in turns:
        logits = reference(torch.tensor([tokens])).logits[0]
        total = total + F.cross_entropy(logits, torch.tensor(labels), reduction="sum")
        count += sum(label != -100 for label in labels)
    (total / count).backward()
    assert batch.num_supervised == count
    assert_close(loss, total / count, rtol=1e-5, atol=0)
    theirs = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        gradient = theirs[model.names.on_disk[name]].grad
        assert (parameter.grad - gradient).norm() <= 1e-5 * gradient.norm()
    assert batch.shared.tokens.numel() < batch.tokens.numel() < sum(len(tokens) for tokens, _ in turns)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train_on": "all"}, "train_on"),
        ({"train_on": ["assistant", "user"]}, "train_on"),
        ({"too_long": "split"}, "too_long=split"),
        ({"kind": "preferences"}, "preferences"),
        ({"extra_columns": ["group"]}, "group"),
    ],
)
def test_options_incompatible_with_as_seen_are_refused(options, message, tokenizer, tmp_path):
    path = written(tmp_path / "rows.jsonl", [{"messages": TALK}])
    with pytest.raises(TuneError, match=message):
        load(tokenizer, path, max_seq_len=400, turns="as_seen", cache_dir=str(tmp_path), **options)


def test_learned_question_is_a_mistake_of_its_row(tokenizer):
    outcome = read(tokenizer, [{**ask("the"), "train": True}, *TALK[1:]])
    assert "message 1 (user)" in outcome.mistake and "turns" in outcome.mistake


def test_texts_and_chats_can_be_mixed(tokenizer, tmp_path):
    """All samples have a group, from which the loader makes rows."""
    path = written(tmp_path / "rows.jsonl", [{"messages": TALK}])
    texts = written(tmp_path / "texts.jsonl", [{"text": "the cat sat " * 30}])
    options = {"turns": "as_seen", "cache_dir": str(tmp_path), "workers": 1, "max_seq_len": 60}
    chats, plain = load(tokenizer, path, **options), load(tokenizer, texts, **options)
    assert list(chats.columns) == list(plain.columns) == ["group"]
    assert plain.accounting.tokens > 60 and plain.row_tokens.max() <= 60


def test_stream_gives_the_same_rows(tokenizer, tmp_path):
    path = written(tmp_path / "rows.jsonl", [{"messages": talk} for talk in (TALK, TOOLS) * 2])
    options = {"turns": "as_seen", "workers": 1, "max_seq_len": 400}
    data = load(tokenizer, path, cache_dir=str(tmp_path), **options)
    stream = load(tokenizer, path, streaming=True, **options)

    class Alone:
        data_rank, data_size, device = 0, 1, torch.device("cpu")

    expected = sorted(sum(len(sample.tokens) for sample in data.row(row)) for row in range(len(data)))
    ((_, batch),) = DataLoader(stream, Alone(), 4, 4, max_steps=1)
    assert batch.num_tokens == sum(expected) and len(batch.rows) == len(data) == 4
