"""Weights of messages and tokens, from a row to the batches of a step."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from row_outcomes import Named, outcomes

from tune.collators import IGNORE, Batch, Sample, collate, collate_inputs
from tune.datasets import DataLoader, Dataset, Mixture, load, validation_batches
from tune.datasets.block import SPLITS, Example, RowBlock, TokenizedRow
from tune.datasets.fit import Fit
from tune.errors import TuneError
from tune.generation import own_answers
from tune.tokenizers import Tokenizer

NAN = float("nan")
UNMARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TWO_BLOCKS = (
    "{% for m in messages %}{% generation %}<|im_start|>{% endgeneration %}"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% endfor %}"
)


@pytest.fixture
def tokenizer(folder):
    return Tokenizer(str(folder))


def ask(text="Hi"):
    return {"role": "user", "content": text}


def say(text="Hello!", **more):
    return {"role": "assistant", "content": text, **more}


def outcome_of(tokenizer, row, max_seq_len=400, **options):
    (outcome,) = outcomes(tokenizer, max_seq_len, [("row", row)], **options)
    return outcome


def learned(sample, tokenizer):
    """The learned text and its weight, run by run."""
    runs = []
    weights = np.ones(len(sample.tokens)) if sample.weights is None else sample.weights
    for label, weight in zip(sample.labels.tolist(), weights.tolist(), strict=True):
        if label == -100:
            runs.append(None)
        elif runs and runs[-1] and runs[-1][1] == weight:
            runs[-1] = ([*runs[-1][0], label], weight)
        else:
            runs.append(([label], weight))
    return [(tokenizer.decode(run[0]), run[1]) for run in runs if run]


def ranks(size):
    return [SimpleNamespace(data_rank=rank, data_size=size, device=torch.device("cpu")) for rank in range(size)]


@pytest.mark.parametrize("template", [None, UNMARKED])
def test_weights_of_messages(folder, template):
    if template:
        (folder / "chat_template.jinja").write_text(template)
    tokenizer = Tokenizer(str(folder))
    messages = [
        ask(),
        say("One", weight=0.5),
        ask(),
        say("Two", weight=0),
        ask(),
        say("Three"),
        ask(),
        say("4", weight=1),
    ]
    (sample,) = outcome_of(tokenizer, {"messages": messages}).samples
    expected = [("One<|im_end|>", 0.5), ("Three<|im_end|>", 1), ("4<|im_end|>", 1)]
    assert learned(sample, tokenizer) == expected
    (first, *_) = outcome_of(tokenizer, {"messages": messages}, turns="as_seen").samples
    assert learned(first, tokenizer) == expected  # they share one context
    rendered = outcomes(tokenizer, 400, [("row", {"messages": [ask(), say("One"), ask(), say("Two")]})])[0].samples[0]
    assert tokenizer.decode(sample.tokens.tolist()).startswith(tokenizer.decode(rendered.tokens.tolist()).rstrip())


def test_weights_of_1_and_0_need_no_weights_array(tokenizer):
    (sample,) = outcome_of(tokenizer, {"messages": [ask(), say(weight=1.0), ask(), say(weight=0)]}).samples
    assert sample.weights is None and learned(sample, tokenizer) == [("Hello!<|im_end|>", 1)]
    both = {"messages": [ask(), say("No", weight=0.5, train=False), ask(), say("Yes", weight=0.5, train=True)]}
    assert learned(outcome_of(tokenizer, both).samples[0], tokenizer) == [("Yes<|im_end|>", 0.5)]


def test_weight_is_a_factor_of_what_train_on_chooses(tokenizer):
    messages = [ask(), say("One", weight=1), ask(), say("Two", weight=0.5)]

    def of(train_on):
        (sample,) = outcome_of(tokenizer, {"messages": messages}, train_on=train_on).samples
        return learned(sample, tokenizer)

    assert of("assistant") == [("One<|im_end|>", 1), ("Two<|im_end|>", 0.5)]
    assert of("last") == [("Two<|im_end|>", 0.5)]
    assert [text for text, _ in of(["user"])] == ["Hi<|im_end|>", "Hi<|im_end|>"]


@pytest.mark.parametrize("name", ["loss", "training"])
def test_names_of_other_libraries_for_train(name, tokenizer):
    for no, yes in ((False, True), (0, 1)):
        messages = [ask(), say("One", **{name: no}), ask(), say("Two", **{name: yes})]
        (sample,) = outcome_of(tokenizer, {"messages": messages}).samples
        assert learned(sample, tokenizer) == [("Two<|im_end|>", 1)]


def test_other_numbers_in_a_message_are_no_weights(tokenizer):
    assert len(outcome_of(tokenizer, {"messages": [ask(), say(height=170, rain=0.5)]}).samples) == 1


@pytest.mark.parametrize(
    "row",
    [{"weight": 1}, {"weight": "1.0"}, {"weight": "12 kg"}, {"weight": None}, {"weight": NAN}, {"loss_scale": [1, 1]}],
)
def test_columns_that_are_no_weights_are_ignored(row, tokenizer):
    assert len(outcome_of(tokenizer, {"messages": [ask(), say()], **row}).samples) == 1


@pytest.mark.parametrize(
    "row", [{"weight": 0.5}, {"weight": "0.5"}, {"loss_scale": [1, 0]}, {"loss_mask": [0, 1]}, {"loss_weight": 2}]
)
def test_weight_of_a_row_is_refused_unless_it_is_named(row, tokenizer):
    (name,) = row
    row = {"messages": [ask(), say()], **row}
    with pytest.raises(TuneError, match=rf"dataset.ignore=\[{name}\]"):
        outcome_of(tokenizer, row)
    assert len(outcome_of(tokenizer, row, ignore=[name]).samples) == 1
    if isinstance(row[name], int | float):
        (sample,) = outcome_of(tokenizer, row, extra_columns=[name]).samples
        assert sample.columns[name] == row[name]


def test_weights_that_underflow_fp32_are_not_learned(tokenizer):
    (sample,) = outcome_of(tokenizer, {"messages": [ask(), say("a", weight=1e-50), ask(), say("b")]}).samples
    assert sample.weights is None and learned(sample, tokenizer) == [("b<|im_end|>", 1)]


def test_weights_of_tokens(tokenizer):
    row = {"input_ids": [5, 6, 7, 8, 9], "weights": [1, 0.5, 0, 1, 0.25], "attention_mask": [0, 1, 1, 1, 1]}
    (sample,) = outcome_of(tokenizer, row).samples
    assert sample.tokens.tolist() == [6, 7, 8, 9]
    assert sample.labels.tolist() == [-100, 8, 9, -100] and sample.weights[1:3].tolist() == [1, 0.25]
    named = {"input_ids": [5, 6, 7], "loss_scale": [1, 0.5, 0.25]}
    (sample,) = outcome_of(tokenizer, named, columns={"weights": "loss_scale"}).samples
    assert sample.labels.tolist() == [6, 7, -100] and sample.weights[:2].tolist() == [0.5, 0.25]


def test_weights_are_cut_with_their_tokens(tokenizer):
    row = {"input_ids": [*range(5, 15)], "weights": [index / 10 for index in range(1, 11)]}
    (cut,) = outcome_of(tokenizer, row, 4).samples
    assert cut.labels.tolist() == [6, 7, 8, -100] and cut.weights[:3] == pytest.approx([0.2, 0.3, 0.4])
    pieces = outcome_of(tokenizer, row, 4, too_long="split").samples
    pairs = [pair for piece in pieces for pair in zip(piece.labels.tolist(), piece.weights.tolist(), strict=True)]
    assert [pair for pair in pairs if pair[0] != -100] == [
        (label, pytest.approx((label - 4) / 10)) for label in range(6, 15)
    ]


@pytest.mark.parametrize("prefix", [[], [3], [3, 4]])
def test_weights_of_all_pieces_of_a_split_row_stay_with_their_tokens(prefix):
    """Each piece begins with the prefix, whose tokens are not learned again; a weight is that of the token's label."""
    tokens = np.array([*prefix, *range(10, 30)], np.int32)
    weights = tokens / 100
    labels = np.append(tokens[1:], IGNORE).astype(np.int32)
    sample = Sample(tokens, labels, weights=weights.astype(np.float32))
    block, fit = RowBlock.of([(1, TokenizedRow([Example(sample, SPLITS)]))]), Fit(7, prefix=prefix)
    pieces = [*fit(block, None, Named("row"))]
    assert len(pieces) > 2 and all(piece.tokens[: len(prefix)].tolist() == prefix for piece in pieces)
    found = [
        (int(token), int(label), float(weight))
        for piece in pieces
        for token, label, weight in zip(piece.tokens, piece.labels, piece.weights, strict=True)
        if label != IGNORE
    ]
    learned = zip(tokens[:-1].tolist(), tokens[1:].tolist(), weights[:-1].tolist(), strict=True)
    assert [each for each in found if each[0] >= 10] == [pytest.approx(each) for each in learned if each[0] >= 10]


WRONG = {
    "a text": ({"messages": [ask(), say(weight="0.5")]}, "messages[1].weight"),
    "true": ({"messages": [ask(), say(weight=True)]}, "messages[1].weight"),
    "negative": ({"messages": [ask(), say(weight=-0.1)]}, "messages[1].weight"),
    "above 1": ({"messages": [ask(), say(weight=1.5)]}, "messages[1].weight"),
    "not a number": ({"messages": [ask(), say(weight=float("nan"))]}, "messages[1].weight"),
    "a list": ({"messages": [ask(), say(weight=[1])]}, "messages[1].weight"),
    "of a question": ({"messages": [{**ask(), "weight": 0.5}, say()]}, "messages[0].weight"),
    "of a question, 1": ({"messages": [{**ask(), "weight": 1}, say()]}, "messages[0].weight"),
    "of ShareGPT's question": ({"conversations": [{"from": "human", "value": "a", "weight": 0.5},
                                                  {"from": "gpt", "value": "b"}]}, "conversations[0].weight"),
    "train despite 0": ({"messages": [ask(), say(weight=0, train=True)]}, "messages[1].weight"),
    "two numbers": ({"messages": [ask(), say(weight=0.5, train=0.7)]}, "messages[1].weight"),
    "train and loss": ({"messages": [ask(), say(train=True, loss=False)]}, "messages[1]: loss"),
    "misspelled": ({"messages": [ask(), say(weigth=0.5)]}, "messages[1].weigth"),
    "another name": ({"messages": [ask(), say(loss_scale=0.5)]}, "messages[1].loss_scale"),
    "a part of an answer": ({"messages": [ask(), say(train_detail=[{"train": False}])]}, "messages[1].train_detail"),
    "a number in loss": ({"messages": [ask(), say(loss=0.5)]}, "messages[1].loss"),
    "train, a number": ({"messages": [ask(), say(train=2)]}, "messages[1].train"),
    "of tokens, too few": ({"input_ids": [5, 6], "weights": [1]}, "weights has 1 entries for 2"),
    "of tokens, a number": ({"input_ids": [5, 6], "weights": 0.5}, "weights is 0.5"),
    "of tokens, negative": ({"input_ids": [5, 6], "weights": [1, -1]}, "weights[1] is -1"),
    "of tokens, none": ({"input_ids": [5, 6], "weights": [1, None]}, "weights[1]"),
    "of tokens, infinite": ({"input_ids": [5, 6], "weights": [float("inf"), 1]}, "weights[0]"),
}  # fmt: skip


@pytest.mark.parametrize(("row", "message"), WRONG.values(), ids=WRONG)
def test_invalid_weights_are_mistakes_of_their_rows(row, message, tokenizer):
    outcome = outcome_of(tokenizer, row)
    assert message in outcome.mistake and outcome.mistake.startswith("row: ")


def test_learned_question_can_have_a_weight(tokenizer):
    (sample,) = outcome_of(tokenizer, {"messages": [{**ask(), "train": 0.5}, say()]}).samples
    assert learned(sample, tokenizer) == [("Hi<|im_end|>", 0.5), ("Hello!<|im_end|>", 1)]


def test_question_with_weight_0_is_accepted(tokenizer):
    (sample,) = outcome_of(tokenizer, {"messages": [{**ask(), "weight": 0}, say()]}).samples
    assert learned(sample, tokenizer) == [("Hello!<|im_end|>", 1)]


def test_weights_are_refused_where_they_have_no_meaning(tokenizer, folder):
    row = {"messages": [ask(), say(weight=0.5)]}
    assert "train_on=all" in outcome_of(tokenizer, row, train_on="all").mistake
    pair = {"chosen": [ask("a"), say(weight=0.5)], "rejected": [ask("a"), say("b")]}
    assert "preferences" in outcome_of(tokenizer, pair, kind="preferences").mistake
    labeled = {"messages": [ask(), say(weight=0.5)], "label": True}
    assert "labelled" in outcome_of(tokenizer, labeled, kind="labelled").mistake
    (folder / "chat_template.jinja").write_text(TWO_BLOCKS)
    assert "generation block" in outcome_of(Tokenizer(str(folder)), row).mistake
    with pytest.raises(TuneError, match="weights"):
        collate_inputs([Sample(np.array([1, 2]), np.array([2, -100]), weights=np.array([0.5, 1], np.float32))])


def test_sampled_student_answers_cannot_have_weights():
    batch = SimpleNamespace(micro_batches=[Batch.of([[1, 2]], [[2, -100]], weights=[[0.5, 1]])])
    with pytest.raises(TuneError, match=r"on_policy\.share=0"):
        own_answers(batch, None, None, None, step=1, share=1.0, vocab_size=9)


def rows_of(count, weight):
    return [{"messages": [ask(f"q{index}"), say("a" * (index + 1), **weight(index))]} for index in range(count)]


def written(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_weights_through_the_cache(tokenizer, tmp_path):
    """Only rows of the second chunk of 64 have weights."""
    path = written(tmp_path / "rows.jsonl", rows_of(90, lambda index: {"weight": 0.25} if index == 80 else {}))
    options = {"max_seq_len": 200, "cache_dir": str(tmp_path / "cache"), "workers": 1}
    for data in (load(tokenizer, path, **options), load(tokenizer, path, **options)):
        weights = [{*learned_weights(sample)} for sample in data]
        assert weights == [{0.25} if index == 80 else {1.0} for index in range(90)]
        supervised = data.row_supervised.sum()
        assert data.row_weights.sum() == data.accounting.supervised_weight == supervised - 0.75 * (81 + 1)
    assert data.accounting.prepared is not None
    plain = load(tokenizer, written(tmp_path / "plain.jsonl", rows_of(90, lambda _: {})), **options)
    assert plain.accounting.supervised_weight is None and plain.fingerprint != data.fingerprint


def learned_weights(sample):
    return sample.weights_or_ones[np.asarray(sample.labels) != -100].tolist()


def totals(data, world, rows, micro=2, **options):
    """Return the step's supervised tokens, and the tokens and weights of this rank's micro-batches."""
    ((_, step),) = list(DataLoader(data, world, rows, micro, **options))
    of = [
        (part.num_supervised, part.num_supervised if part.weights is None else
         part.weights.flatten()[part.supervised].double().sum().item())
        for part in step.micro_batches
    ]  # fmt: skip
    return step.num_supervised, sum(count for count, _ in of), sum(weight for _, weight in of)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    "weigh", [lambda i: 0.25 if i else 1, lambda i: 1e-30, lambda i: 0.3], ids=["one", "tiny", "all"]
)
def test_weights_of_a_step_average_to_1(weigh, packed, tokenizer, tmp_path):
    """The average is over all ranks, so the loss is the weighted mean."""
    path = written(tmp_path / "rows.jsonl", rows_of(8, lambda index: {"weight": weigh(index)}))
    data = load(tokenizer, path, max_seq_len=120, packed=packed, cache_dir=str(tmp_path / "cache"), workers=1)
    rows = len(data) + len(data) % 2
    sums = [totals(data, world, rows, micro=rows // 2) for world in ranks(2)]
    (supervised, *_), _ = sums
    assert sum(count for _, count, _ in sums) == supervised
    assert sum(weight for *_, weight in sums) == pytest.approx(supervised, rel=1e-5)
    batches = [batch for _, batch in validation_batches(data, ranks(1)[0], 3)]
    weights = [batch.reweighed(1).weights for batch in batches]
    total = sum(batch.num_supervised if values is None else values.flatten()[batch.supervised].sum().item()
                for batch, values in zip(batches, weights, strict=True))  # fmt: skip
    assert total == pytest.approx(supervised, rel=1e-5)


def test_sources_with_and_without_weights(tokenizer, tmp_path):
    options = {"max_seq_len": 100, "cache_dir": str(tmp_path / "cache"), "workers": 1}
    parts = {
        name: load(tokenizer, written(tmp_path / f"{name}.jsonl", rows_of(3, weight)), **options)
        for name, weight in (("plain", lambda _: {}), ("weighed", lambda _: {"weight": 0.5}))
    }
    supervised, count, weight = totals(Mixture(parts), ranks(1)[0], 6, 1)
    assert supervised == count == pytest.approx(weight)
    ((_, step),) = list(DataLoader(Mixture(parts), ranks(1)[0], 6, 1))
    ratio = supervised / (0.75 * supervised)
    weights = torch.cat([batch.weights.flatten()[batch.supervised] for batch in step.micro_batches])
    assert {round(weight, 4) for weight in weights.tolist()} == {round(ratio, 4), round(ratio / 2, 4)}


def test_stream_with_weights_in_some_windows(tokenizer, tmp_path):
    path = written(tmp_path / "rows.jsonl", rows_of(130, lambda index: {"weight": 0.5} if index > 120 else {}))
    data = load(tokenizer, path, max_seq_len=200, streaming=True, shuffle_buffer=64, workers=1)
    steps = [step for _, step in DataLoader(data, ranks(1)[0], 130, 10, max_steps=1)]
    weights = [batch.weights.flatten()[batch.supervised] for batch in steps[0].micro_batches]
    assert torch.cat(weights).sum().item() == pytest.approx(steps[0].num_supervised, rel=1e-5)
    assert len({round(weight, 5) for weight in torch.cat(weights).tolist()}) == 2


@pytest.mark.slow
@given(st.lists(st.floats(1 / 64, 1, width=32), min_size=3, max_size=20))
def test_batch_weights_align_with_labels(values):
    length = len(values)
    sample = Sample(np.arange(length), np.append(np.arange(1, length), -100), weights=np.array(values, np.float32))
    plain = Sample(np.arange(3), np.array([1, 2, -100]))
    for pad_to in (None, 30):
        batch = collate([[sample], [plain]], pad_to)
        assert batch.weights.shape == batch.tokens.shape and batch.weights.dtype == torch.float32
        flat = batch.weights.flatten()[batch.supervised].tolist()
        assert flat == [*np.array(values[:-1], np.float32).tolist(), 1, 1]
    assert collate([[plain]]).weights is None


@pytest.mark.parametrize("wrong", [[[1.0, -1.0]], [[1.0, float("nan")]], [[float("inf"), 1.0]], [[1.0]]])
def test_invalid_batch_weights_are_refused(wrong):
    with pytest.raises(TuneError, match="weights"):
        Batch.of([[1, 2]], [[2, -100]], weights=wrong)


def test_weights_of_samples_made_in_python():
    weights = np.array([0.5, 1, 1], np.float32)
    data = Dataset.from_samples([Sample([1, 2, 3], [2, 3, -100], weights=weights), Sample([1, 2], [2, -100])], 8)
    assert data.row_weights.tolist() == [1.5, 1] and data.row_supervised.tolist() == [2, 1]
