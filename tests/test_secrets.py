"""Keys, tokens, and credentials stay on the machine: settings, messages, files, and loggers omit them."""

import json
import sys
import types

import fsspec
import full_finetune
import pytest
import torch

from tune import config
from tune.checkpointers import model_card
from tune.cli import main as tune
from tune.errors import TuneError
from tune.secrets import without_secrets

TOKEN = "abcdefghij" * 4


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://me:pass%40word@host/a.jsonl", "https://host/a.jsonl"),
        ("s3://key:p@ss@bucket/a.jsonl, b", "s3://bucket/a.jsonl, b"),
        ("https://host/a?x=1&token=abc&y=2#end", "https://host/a?x=1&token=***&y=2#end"),
        ("https://host/a?X-Amz-Security-Token=a&X-Amz-Signature=b", None),
        ("https://host/a?sv=2024&sig=ab%2B", "https://host/a?sv=2024&sig=***"),
        ("'logger.wandb.api_key=abc' is no setting", "'logger.wandb.api_key=***' is no setting"),
        (f"invalid user token hf_{TOKEN}.", "invalid user token ***."),
        ("Authorization: Bearer a.b.c", "Authorization: Bearer ***"),
        ("the key is 0123456789", "the key is ***"),  # from the environment
        (["hf_token=abc", {"secret": {"a": 1}, "at": "https://a@b"}], ["hf_token=***", {"secret": None, "at": "https://b"}]),
    ],
)  # fmt: skip
def test_secrets_are_masked(text, shown, monkeypatch):
    monkeypatch.setenv("SERVICE_API_KEY", "0123456789")
    shown = "https://host/a?X-Amz-Security-Token=***&X-Amz-Signature=***" if shown is None else shown
    assert without_secrets(text) == shown


@pytest.mark.parametrize(
    "text",
    [
        "https://host/a.jsonl?page=2&take=10", "hf://datasets/org/name@main/a.jsonl", "me@host.org", "tokenizer=x",
        "chunk_tokens=512", "eos_token=<|im_end|>", "pad_token: <pad>", "hf_model_of_mine",
        "task-0123456789abcdef0123456789",
        {"chunk_tokens": 1, "eos_token": "<s>", "tokenizer": {"path": "a"}, "trainable_tokens": [1], "key": "a"},
    ],
)  # fmt: skip
def test_other_texts_are_not_masked(text):
    assert without_secrets(text) == text


def test_errors_and_model_cards_have_no_secrets():
    error = TuneError("https://me:secret@host/a.jsonl?token=secret cannot be read")
    assert str(error) == "https://host/a.jsonl?token=*** cannot be read"
    card = model_card("full_finetune", "model", "https://me:secret@host?token=secret")
    assert "on `host`" in card and "secret" not in card


@pytest.fixture
def url(chats):
    """Return the conversations at a URL with a password."""
    files = fsspec.filesystem("memory")
    files.pipe("/me:pass-word@host/chats.jsonl", chats.read_bytes())
    yield "memory://me:pass-word@host/chats.jsonl"
    files.rm("/me:pass-word@host", recursive=True)


def test_prepare_prints_no_secrets(url, checkpoint, capsys):
    for streaming in ("true", "false"):
        arguments = [f"model.path={checkpoint}", f"dataset.path={url}", f"dataset.streaming={streaming}"]
        tune(["prepare", "full_finetune", *arguments, "max_steps=1"])
        out, err = capsys.readouterr()
        assert "memory://host/chats.jsonl" in out and "pass-word" not in out + err


def sgd(parameters, lr, api_key):
    """A component with a secret setting."""
    assert api_key == "sesame"
    return torch.optim.SGD(parameters, lr)


def test_run_reveals_no_secrets(url, checkpoint, tmp_path, monkeypatch, capfd):
    calls = []  # sent to Weights & Biases: all arguments, and the command line, which it reads

    def init(**arguments):
        calls.append((arguments, list(sys.argv)))
        log, finish = (lambda *args, **kwargs: calls.append(args)), (lambda **options: calls.append((options,)))
        return types.SimpleNamespace(log=log, finish=finish)

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init, __spec__=object()))
    settings = [
        f"model.path={checkpoint}", f"dataset.path={url}", "device=cpu", "dtype=fp32", "max_seq_len=128", "max_steps=1",
        "logger.wandb.project=tests", f"output_dir={tmp_path}", "optimizer._component_=test_secrets.sgd",
        "optimizer.api_key=sesame",
    ]  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["full_finetune.py", *settings])
    full_finetune.main(config.load("full_finetune", settings))
    assert sys.argv[2] == f"dataset.path={url}"
    files = {file.name: file.read_text(errors="replace") for file in tmp_path.rglob("*") if file.is_file()}
    assert {"config.yaml", "log.txt", "data.json", "README.md"} <= files.keys()
    out, err = capfd.readouterr()
    for where, text in {**files, "wandb": repr(calls), "stdout": out, "stderr": err}.items():
        assert "pass-word" not in text and "sesame" not in text, where
    assert json.loads(files["data.json"])["source"] in out + files["log.txt"]
    assert calls[0][0]["config"]["seed"] == 0 and calls[0][1][1:2] == settings[:1]
    assert calls[-1] == ({"exit_code": 0},) and "is turned off after an error" not in files["log.txt"]
