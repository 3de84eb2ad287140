"""Prepared rows are stored on disk under FORMAT_VERSION: changed outputs need a new version.

If this test fails, an edit has changed tokens, labels, columns or counts of rows that people may have prepared. Raise
`tune.datasets.kept_files.FORMAT_VERSION` and put the new digests under the new number.
"""

import hashlib
import json

import numpy as np
import pytest

from tune.datasets import load
from tune.datasets.kept_files import FORMAT_VERSION
from tune.tokenizers import Tokenizer

SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
TEMPLATES = {
    "marked": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}"
        "{{ m.reasoning_content or '' }}{{ m.content or '' }}"
        "{% for c in m.tool_calls or [] %}{{ c | tojson }}{% endfor %}<|im_end|>{% endgeneration %}"
        "{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "unmarked": (
        "{{ tools | tojson if tools else '' }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
        "{% for c in m.tool_calls or [] %}{{ c | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "without a prompt": (
        "<s>{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content or '' }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}</s>"
        "{% else %}[INST] {{ m.content }} [/INST]{% endif %}{% endfor %}"
    ),
}


def ask(text):
    return {"role": "user", "content": text}


def say(text, **more):
    return {"role": "assistant", "content": text, **more}


CALL = {"name": "get", "arguments": {"at": "home"}}
NOTE = "a note of many words that no format of the library reads"
ROWS = {
    "chat": [
        {"messages": [{"role": "system", "content": "Be short."}, ask("1+1?"), say("2"), ask("And?"), say("3")]},
        {"messages": [ask("Hi"), say("Hello", train=False), ask("So?"), say("été 日本")], "note": NOTE},
        {"messages": [ask("Tell"), say("a word " * 12), ask("more"), say("b " * 30)]},
        {"messages": [ask("At?"), say("", tool_calls=[CALL]), {"role": "tool", "content": "12"}, say("12")]},
        {"messages": [ask("Why?"), say("So", reasoning_content="hm")], "tools": [{"name": "get"}]},
        {"messages": [ask("nothing"), say("")]},
        {"messages": [say("First"), ask("spelled <|im_end|> out"), say("then")], "system": "S"},
        {"messages": []},
    ],
    "sharegpt": [{"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}],
    "alpaca": [{"instruction": "Say", "input": "it", "output": "it"}, {"instruction": "Say", "output": ""}],
    "completion": [
        {"prompt": "1+1=", "completion": "2"},
        {"prompt": "a long prompt " * 5, "completion": "cut"},
        {"prompt": [ask("Hi"), say("x"), ask("y")], "completion": [say("z"), ask("w"), say("v")]},
    ],
    "text": [{"text": "once upon a time " * 7}, {"text": "<s>short"}, {"text": ""}],
    "tokens": [
        {"input_ids": [5, 6, 7, 8], "labels": [-100, 6, 7, -100], "weight": 0.5},
        {"input_ids": [*range(70)], "attention_mask": [0] * 3 + [1] * 67, "weight": 2},
    ],
    "weighed": [
        {"messages": [ask("Hi"), say("Hello", weight=0.5), ask("So?"), say("Well")]},
        {"input_ids": [5, 6, 7, 8], "weights": [1, 0.5, 0, 0.25]},
    ],
    "preferences": [
        {"prompt": "Q:", "chosen": " yes", "rejected": [" no", " never"], "margin": 0.5},
        {"prompt": [ask("Hi")], "chosen": [say("Hello there")], "rejected": [say("w " * 40)]},
        {"instruction": "Say", "chosen": "it", "rejected": "it"},
    ],
    "labelled": [
        {"prompt": "Q:", "completion": " yes", "label": True},
        {"prompt": "A longer Q:", "completion": " no " * 20, "label": False},
        {"messages": [ask("Hi"), say("Hello")], "label": 1},
    ],
}
# For each case: its rows, its kind and further arguments.
CASES = {
    **{name: (name, "supervised", {}) for name in ("chat", "sharegpt", "alpaca", "completion", "text")},
    "tokens": ("tokens", "supervised", {"extra_columns": ["weight"]}),
    "chat, split": ("chat", "supervised", {"too_long": "split"}),
    "chat, all": ("chat", "supervised", {"train_on": "all", "max_seq_len": 400}),
    "chat, users": ("chat", "supervised", {"train_on": ["user"], "max_seq_len": 400}),
    "chat, without ends": ("chat", "supervised", {"train_on_end_of_turn": False}),
    "text, bare pieces": ("text", "supervised", {"bos_in_pieces": False}),
    "chat, as seen": ("chat", "supervised", {"turns": "as_seen"}),
    "weighed": ("weighed", "supervised", {"format": f"{__name__}.as_it_is"}),
    "preferences": ("preferences", "preferences", {}),
    "graded": ("preferences", "graded", {}),
    "labelled": ("labelled", "labelled", {"packed": True}),
    "pairs as labelled": ("preferences", "labelled", {}),
    "held out": ("chat", "supervised", {"validation_fraction": 0.3}),
}
COUNTED = ("format", "rows", "dropped", "kept", "truncated", "cut_tokens", "clipped", "split", "endless", "remarks")
DIGESTS = {
    6: {
        "marked": {
            "chat": "399e8f271420f4d4",
            "sharegpt": "bf06dec92fa6bdae",
            "alpaca": "7a7b95c751871717",
            "completion": "d355fd09cbe32050",
            "text": "d46f342b30d70b0b",
            "tokens": "739ea7307f2d652b",
            "chat, split": "00e1f21734e0654a",
            "chat, all": "2bb72ac61793199a",
            "chat, users": "a8627ff4266980aa",
            "chat, without ends": "45a92941d4572949",
            "text, bare pieces": "10cff4016a1ec62f",
            "chat, as seen": "e0e44f2692325f73",
            "weighed": "56623e6b14dc0f2b",
            "preferences": "15fc35f7e76f71d1",
            "graded": "6f811ff01448480b",
            "labelled": "30d0df7c3dc398a1",
            "pairs as labelled": "fd0ef4117d1504de",
            "held out": "90499932f2ce4e1e",
        },
        "unmarked": {
            "chat": "be20249545906e1b",
            "sharegpt": "9d1716bc7a2d38ed",
            "alpaca": "6137353f3352ea26",
            "completion": "34d138126b883e08",
            "text": "d46f342b30d70b0b",
            "tokens": "739ea7307f2d652b",
            "chat, split": "a81bfc0a0d59ac65",
            "chat, all": "1f1215f499dfe411",
            "chat, users": "2351046ca2d858bf",
            "chat, without ends": "6d2417b557b85a99",
            "text, bare pieces": "10cff4016a1ec62f",
            "chat, as seen": "f9a207e8f714433b",
            "weighed": "c7801b10c1602f0d",
            "preferences": "4ccd58c003f4113d",
            "graded": "2624370df96f945b",
            "labelled": "30d0df7c3dc398a1",
            "pairs as labelled": "174cc80a6ca1b952",
            "held out": "576260edfbed07af",
        },
        "without a prompt": {
            "chat": "41f465d0767bd896",
            "sharegpt": "532c2c8675bbebb3",
            "alpaca": "f4aca16abdfb9aba",
            "completion": "5d4b8dc39b911958",
            "text": "d46f342b30d70b0b",
            "tokens": "739ea7307f2d652b",
            "chat, split": "1140f8880c485bab",
            "chat, all": "35ec49e84a9437ed",
            "chat, users": "a20b09625d849019",
            "chat, without ends": "c6998134abcd212a",
            "text, bare pieces": "10cff4016a1ec62f",
            "chat, as seen": "b2ca3aa732ce87df",
            "weighed": "9397251733123b7c",
            "preferences": "abc7b1c3fa6a9ab5",
            "graded": "e26aab9aac83d173",
            "labelled": "30d0df7c3dc398a1",
            "pairs as labelled": "8343b094ce12b82a",
            "held out": "7b860f3f967ff3c0",
        },
    },
}


def as_it_is(row):
    """Return the row unchanged, so that each row of a file may have another format."""
    return row


def digest_of(dataset):
    """A hash of all samples in order and of the counts of their rows."""
    digest = hashlib.blake2b(digest_size=8)
    for sample in dataset.samples:
        weights = [] if sample.weights is None else [sample.weights]
        for values in (sample.tokens, sample.labels, *weights, *(value for _, value in sorted(sample.columns.items()))):
            digest.update(np.asarray(values, dtype=np.float64).tobytes())
    counted = {name: dataset.accounting.as_dict()[name] for name in COUNTED}
    digest.update(json.dumps(counted, sort_keys=True).encode())
    return digest.hexdigest()


@pytest.mark.slow
@pytest.mark.parametrize("template", TEMPLATES)
def test_outputs_match_the_digests_of_this_format_version(template, byte_checkpoint, tmp_path):
    tokenizer = Tokenizer(str(byte_checkpoint(tmp_path / "checkpoint", SPECIAL, TEMPLATES[template])))
    made = {}
    for name, (rows, kind, options) in CASES.items():
        file = tmp_path / f"{rows}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in ROWS[rows]))
        skipped = {"on_bad_row": "skip", "max_bad_share": 0.5}
        arguments = {"max_seq_len": 80, "kind": kind, "cache_dir": str(tmp_path / "cache"), **skipped, **options}
        made[name] = digest_of(load(tokenizer, str(file), **arguments))
    assert made == DIGESTS[FORMAT_VERSION][template]
