"""A mixture of streams draws its sources by weight, and continues where it stopped."""

import itertools
import json
from collections import Counter
from itertools import islice

import numpy as np
import pytest

from tune.datasets import DataLoader, StreamMixture, mix, validation_batches
from tune.datasets.mix import BLOCK
from tune.datasets.rows import RowReader
from tune.datasets.stream import Position
from tune.errors import TuneError
from tune.tokenizers import Tokenizer

ROWS = {"chats": 300, "code": 200, "books": 90}  # of each source
LONG = {"chats": 0, "code": 18, "books": 0}  # characters that are added to each row


@pytest.fixture
def tokenizer(folder):
    return Tokenizer(str(folder))


@pytest.fixture
def mixed(tokenizer, tmp_path, monkeypatch):
    """Mix sources with one text a row; those that are `streamed` have windows of 64 rows."""
    monkeypatch.setenv("TUNE_CACHE", str(tmp_path / "cache"))
    for name, rows in ROWS.items():
        texts = [f"{name} {row:03}{'x' * LONG[name]}" for row in range(rows)]
        lines = [json.dumps({"text": text, "number": row}) for row, text in enumerate(texts)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))

    def mixed(weights, streamed=("chats", "code"), of_each=None, **options):
        sources = {}
        for name, weight in weights.items():
            sources[name] = {"path": str(tmp_path / f"{name}.jsonl"), "weight": weight, "workers": 1}
            if name in streamed:
                sources[name] |= {"streaming": True, "shuffle_buffer": 64}
            sources[name] |= of_each or {}
        return mix(tokenizer, sources, **{"max_seq_len": 64, **options})

    return mixed


def contents(batch):
    """The (token, label, sample number) of all tokens of a batch's documents."""
    found = []
    for part in batch.micro_batches:
        samples = part.documents.samples[part.documents.ids]
        found += zip(
            part.tokens.flatten().tolist(), part.labels.flatten().tolist(), samples.flatten().tolist(), strict=True
        )
    return sorted(triple for triple in found if triple[0] or triple[1] != -100)


def drawn_texts(data, tokenizer, number):
    """The texts of the first `number` training rows, each a list of documents."""
    rows, _ = next(data.draw(0, number, Position()))
    texts = [[tokenizer.decode(document.tokens.tolist()) for document in row] for row in rows.documents]
    return [[text.removeprefix("<s>").removesuffix("</s>") for text in row] for row in texts]


def by_source(texts):
    return Counter(text.split()[0] for row in texts for text in row)


@pytest.mark.slow
def test_rows_are_drawn_by_weight(mixed, tokenizer):
    weights = {"chats": 5, "code": 2, "books": 1}
    data = mixed(weights, streamed=tuple(weights))
    assert isinstance(data, StreamMixture)
    texts = drawn_texts(data, tokenizer, 3 * BLOCK)
    for block in range(3):
        counts = by_source(texts[block * BLOCK : (block + 1) * BLOCK])
        assert all(abs(counts[name] - BLOCK * weight / 8) < 1 for name, weight in weights.items())
    # Each pass over a source draws each of its rows once, in another order.
    for name, size in ROWS.items():
        of_source = [text for row in texts for text in row if text.startswith(name)]
        passes = [of_source[start : start + size] for start in range(0, len(of_source) - size + 1, size)]
        assert passes and all(len({*texts_of_pass}) == size for texts_of_pass in passes)
        assert len({tuple(texts_of_pass) for texts_of_pass in passes}) == len(passes)
    drawn = {name: of["rows"] for name, of in data.seen.as_dict()["run"].items()}
    assert drawn == by_source(texts)


@pytest.mark.parametrize("seed", [0, 7])
def test_sources_of_rows_are_the_same_wherever_drawing_starts(mixed, seed):
    data = mixed({"chats": 1, "code": 2})
    whole = data.sources_of_rows(seed, 0, 5000)
    for start, stop in ((0, 1), (999, 1001), (1000, 2000), (1234, 4321)):
        assert data.sources_of_rows(seed, start, stop).tolist() == whole[start:stop].tolist()
    halves = whole.reshape(-1, 250).mean(axis=1)  # also a part of a block has about its share
    assert abs(halves - 2 / 3).max() < 0.12
    assert (data.sources_of_rows(seed + 1, 0, 5000) != whole).any()


@pytest.mark.slow
def test_tokens_are_drawn_by_weight(mixed, tokenizer):
    data = mixed({"chats": 1, "code": 1}, weigh_by="tokens")
    rows, _ = next(data.draw(0, 2 * BLOCK, Position()))
    tokens = Counter()
    for (document,) in rows.documents:
        tokens[len(document.tokens)] += len(document.tokens)
    shares = np.array([*tokens.values()]) / tokens.total()
    assert abs(shares - 0.5).max() < 0.002  # all rows of a source have the same length


@pytest.mark.slow
def test_packed_rows_are_drawn_by_the_rows_in_them(mixed, tokenizer):
    data = mixed({"chats": 1, "code": 1}, packed=True)
    counts = by_source(drawn_texts(data, tokenizer, 2 * BLOCK))
    assert abs(counts["chats"] / counts.total() - 0.5) < 0.02  # the last row of a window is not full


def test_mixture_with_rows_in_memory(mixed, tokenizer):
    data = mixed({"chats": 1, "books": 1}, streamed=("chats",))
    texts = [text for (text,) in drawn_texts(data, tokenizer, 720)]
    books = [text for text in texts if text.startswith("books")]
    assert abs(len(books) - 360) < 20
    assert len({*books[:90]}) == len({*books[90:180]}) == 90 and books[:90] != books[90:180]
    numbers = [document.index for row in next(data.draw(0, 300, Position()))[0].documents for document in row]
    assert len({*numbers}) > 230  # no book has the number of a chat; books are read more than once


CASES = [
    ({"chats": 3, "code": 1}, ("chats", "code"), {}),
    ({"chats": 3, "code": 1, "books": 2}, ("chats", "code"), {"packed": True}),
    ({"chats": 1, "books": 1}, ("books",), {"of_each": {"extra_columns": ["number"]}}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("weights", "streamed", "options"), CASES)
def test_order_is_the_same_for_any_ranks_and_interruptions(mixed, make, weights, streamed, options):
    def loader(rank=0, ranks=1):
        return DataLoader(mixed(weights, streamed, **options), make.world(rank, ranks), 12, 2, max_steps=25, seed=5)

    whole = [contents(batch) for _, batch in loader()]
    for stop, ranks, resumed_ranks in ((1, 1, 1), (9, 2, 1), (16, 1, 2), (24, 2, 3)):
        before = [loader(rank, ranks) for rank in range(ranks)]
        steps = islice(zip(*before, strict=True), stop)
        seen = [sorted(itertools.chain(*(contents(batch) for _, batch in step))) for step in steps]
        after = [loader(rank, resumed_ranks) for rank in range(resumed_ranks)]
        for resumed in after:
            resumed.load_state_dict(json.loads(json.dumps(before[-1].state_dict())))
        steps = zip(*after, strict=True)
        seen += [sorted(itertools.chain(*(contents(batch) for _, batch in step))) for step in steps]
        assert seen == whole


def test_windows_of_a_checkpoint_are_not_tokenized_again(mixed, make, monkeypatch):
    data = DataLoader(mixed({"chats": 1, "code": 1}), make.world(), 20, 20, max_steps=30)
    for step, _ in data:
        if step == 14:
            state = data.state_dict()
            break
    tokenized = []
    tokenize = RowReader.__call__
    monkeypatch.setattr(RowReader, "__call__", lambda reader, row: tokenized.append(row) or tokenize(reader, row))
    resumed = mixed({"chats": 1, "code": 1})
    position = Position.from_dict(json.loads(json.dumps(state["position"])))
    for name, part in resumed.mixed.items():
        assert position.parts[name].row > 0
        next(part.windows(position.parts[name]))
    assert not tokenized


def test_other_shares_or_sources_have_another_fingerprint(mixed):
    fingerprints = [
        mixed(weights).fingerprint
        for weights in ({"chats": 1, "code": 1}, {"chats": 2, "code": 2}, {"chats": 1, "code": 2}, {"chats": 1})
    ]
    assert fingerprints[0] == fingerprints[1] and len({*fingerprints}) == 3


def test_statistics_of_a_mixture_of_streams(mixed):
    table = mixed({"chats": 3, "code": 1}).accounting.table()
    assert "chats.jsonl, streamed: rows 1 to 64" in table
    assert "of each 1,000 rows\n  chats  750 rows, " in table and "\n  code   250 rows, " in table


def test_validation_of_streamed_sources(mixed, make, tmp_path):
    data = mixed({"chats": 3, "code": 1}, of_each={"validation": str(tmp_path / "books.jsonl")})
    names = Counter(name for names, batch in validation_batches(data.validation, make.world(), 10) for name in names)
    assert names == {"validation_loss": 18, "validation_loss/chats": 9, "validation_loss/code": 9}
    batches = [batch for _, batch in validation_batches(data, make.world(), 10)]  # of the streams themselves
    assert sum(int((batch.positions == 0).sum()) for batch in batches) >= ROWS["chats"] + ROWS["code"]


@pytest.mark.parametrize(
    ("weights", "options", "message"),
    [
        ({"chats": 1}, {"epoch_ends": 100}, r"epoch_ends=100: a mixture with streams has no epochs"),
        ({"chats": 1}, {"of_each": {"validation": {"streaming": True}}}, r"sources\.chats\.validation: cannot be str"),
        ({"chats": 1}, {"of_each": {"validation_fraction": 0.1}}, r"sources\.chats\.validation_fraction: a stream"),
    ],
)
def test_settings_that_streams_do_not_have_are_refused(mixed, weights, options, message):
    with pytest.raises(TuneError, match=message):
        mixed(weights, **options)


def test_streams_need_weights_and_steps(mixed, make, tokenizer, tmp_path):
    data = mixed({"chats": 3, "code": 1})
    with pytest.raises(TuneError, match=r"max_steps must be set: chats, code is streamed"):
        DataLoader(data, make.world(), 4, 1)
    sources = {name: {"path": str(tmp_path / f"{name}.jsonl"), "streaming": True} for name in ("chats", "code")}
    with pytest.raises(TuneError, match=r"sources\.chats has no weight: the size of a stream is not known"):
        mix(tokenizer, sources, max_seq_len=32)
