"""Texts that begin alike are rendered and tokenized once, with the samples of rendering and tokenizing each alone."""

from dataclasses import dataclass

import numpy as np
import pytest
from helpers import slow_but
from reasoning import DROPS_REASONING, ask, think
from row_outcomes import outcomes
from spans_one_by_one import require_asked, supervised_spans
from template_cases import TEMPLATES, UNUSUAL, conversations

from tune.datasets import RowReader
from tune.datasets.cut import split_between_turns, truncated
from tune.datasets.render import as_text, flagged, require_learned, turns_of
from tune.tokenizers import Encoded, Tokenizer
from tune.tokenizers.chat_template import SHIPPED, chosen_template

SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
SOURCES = {
    **TEMPLATES,
    **UNUSUAL,
    **{f"shipped {name}": chosen_template(name) for name in SHIPPED},
    "drops reasoning": DROPS_REASONING,
}


class TokenizerOneByOne(Tokenizer):
    """Renders each beginning of a conversation on its own."""

    def supervised_spans(self, messages, tools=None, beginnings=None):
        return supervised_spans(
            self._template(beginnings._tools),
            messages,
            self._special_pattern,
            beginnings._tools,
            **self._clock,
        )

    def beginnings(self, messages, tools=None):
        beginnings = super().beginnings(messages, tools)
        beginnings._in_steps = False
        return beginnings


@dataclass(frozen=True)
class ReaderOneByOne(RowReader):
    """Renders and tokenizes each text of a row on its own, also the shorter texts of a long conversation."""

    def _tokenized(self, row):
        texts = []
        for content in self._parsed(row):
            content = flagged(content, self.train_on)
            require_learned(content)
            for part in turns_of(content) if self.turns == "as_seen" else [content]:
                texts.append(as_text(part, self.tokenizer, self.train_on))
                if self.turns == "as_seen":
                    template = self.tokenizer._template(part.tools)
                    require_asked(template, part.messages, texts[-1].text, part.tools, **self.tokenizer._clock)
        return [(rendered, self._encoded(rendered.text)) for rendered in texts]

    def _encoded(self, text):
        return Encoded(self.tokenizer.encode_with_offsets([text])[0])

    def _pieces(self, rendered, encoded, whole, limit, fit):
        def again(chat):
            shorter = as_text(flagged(chat, self.train_on), self.tokenizer, self.train_on)
            return self._labelled(shorter, self._encoded(shorter.text))

        if fit.too_long == "split":
            return split_between_turns(rendered.content, limit, again)
        return [truncated(rendered.content, whole, limit, again)]


def seen(outcome):
    """Return all facts of an outcome, in a form that can be compared."""
    samples = [
        (sample.tokens.tolist(), np.asarray(sample.labels).tolist(), sample.weights, sample.columns.get("group"))
        for sample in outcome.samples
    ]
    return samples, outcome.dropped, outcome.mistake, outcome.cut, outcome.clipped, outcome.ends, outcome.remarks


@pytest.fixture
def read(byte_checkpoint, tmp_path):
    """Return a function that reads conversations in both ways."""

    def both(source, rows, limit, **options):
        folder = byte_checkpoint(tmp_path / "tokenizer", SPECIAL, source)
        quick = outcomes(Tokenizer(str(folder)), limit, rows, **options)
        slow = outcomes(TokenizerOneByOne(str(folder)), limit, rows, ReaderOneByOne, **options)
        return [list(map(seen, found)) for found in (quick, slow)]

    return both


def rows_of(number, seed):
    return [
        (f"row:{index}", {"messages": messages, "tools": tools} if tools else {"messages": messages})
        for index, (messages, tools) in enumerate(conversations(number, seed))
    ]


@pytest.mark.parametrize("name", slow_but([*SOURCES][::8], SOURCES))
def test_samples_match_the_reference(name, read):
    source = SOURCES[name]
    rows = rows_of(4, seed=2)
    for options in (
        {"turns": "as_seen", "limit": 4000},
        {"turns": "as_seen", "limit": 300},
        {"limit": 250, "too_long": "truncate"},
        {"limit": 400, "too_long": "split"},
        {"limit": 300, "train_on": "all"},
        {"limit": 300, "train_on": ["user", "assistant"], "train_on_end_of_turn": False},
        {"limit": 300, "train_on": "last"},
    ):
        quick, slow = read(source, rows, **options)
        assert quick == slow, options


@pytest.mark.slow
@pytest.mark.parametrize("too_long", ["truncate", "split"])
@pytest.mark.parametrize("name", ["chatml", "llama3", "drops reasoning", "last"])
def test_conversation_cut_at_every_limit(name, too_long, read):
    turns = [message for turn in range(5) for message in (ask(f"why {turn}?"), think("hm", f"so {turn}!"))]
    rows = [("row:1", {"messages": turns})]
    for limit in range(8, 500, 37):
        quick, slow = read(SOURCES[name], rows, limit, too_long=too_long)
        assert quick == slow, limit


def test_cut_conversation_and_later_turns_are_not_tokenized_again(byte_checkpoint, tmp_path, monkeypatch):
    tokenizer = Tokenizer(str(byte_checkpoint(tmp_path / "tokenizer", SPECIAL, TEMPLATES["chatml"])))
    turns = [message for turn in range(100) for message in (ask(f"why {turn}?"), think("", f"so {turn}!"))]
    characters = []
    encode = Tokenizer.encode_with_offsets

    def counted(self, texts):
        characters.append(sum(map(len, texts)))
        return encode(self, texts)

    monkeypatch.setattr(Tokenizer, "encode_with_offsets", counted)
    whole = len(tokenizer.apply_chat_template(turns))
    for options in ({"turns": "as_seen"}, {"max_seq_len": whole // 2}):
        characters.clear()
        rows = [("row:1", {"messages": turns})]
        (outcome,) = outcomes(tokenizer, options.pop("max_seq_len", 2 * whole), rows, **options)
        assert len(outcome.samples) == 1
        assert sum(characters) < 2.5 * whole
