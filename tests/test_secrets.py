"""Keys, tokens, and credentials stay on the machine: settings, messages, files, and loggers omit them."""

import json
import random
import string
import sys
import types

import fsspec
import full_finetune
import pytest
import torch
from omegaconf import OmegaConf

from tune import config
from tune.checkpointers import model_card
from tune.cli import main as tune
from tune.errors import TuneError
from tune.secrets import REMOVED, without_secrets

TOKEN = "abcdefghij" * 4


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://me:pass%40word@host/a.jsonl", "https://host/a.jsonl"),
        ("s3://key:p@ss@bucket/a.jsonl, b", "s3://bucket/a.jsonl, b"),
        ("https://host/a?x=1&token=abc&y=2#end", "https://host/a?x=1&token=***&y=2#end"),
        ("https://host/a?X-Amz-Security-Token=a&X-Amz-Signature=b", None),
        ("https://host/a?sv=2024&sig=ab%2B", "https://host/a?sv=2024&sig=***"),
        ("'mine.api_key=abc' is no setting", "'mine.api_key=***' is no setting"),
        (f"invalid user token hf_{TOKEN}.", "invalid user token ***."),
        ("Authorization: Bearer a.b.c", "Authorization: Bearer ***"),
        ("the key is 0123456789", "the key is ***"),  # from the environment
        (["hf_token=abc", {"secret": {"a": 1}, "at": "https://a@b"}], ["hf_token=***", {"secret": "***", "at": "https://b"}]),
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


RANDOM = "q7Zt3Lx9Vb2Nk8Rw5Yc1Hm6P"
HARMLESS = {
    "token": "</think>", "key": "name_of_column", "pad_token": "<|endoftext|>", "image_token": "IMG_CONTEXT",
    "stop_token": "### Response:", "mask_token": "[MASK]", "keys": ["prompt", "answer_v2"], "auth": "basic",
    "revision": "3f1c9a0b7d5e2468ace013579bdf02468ace1357", "sha256": "0123456789abcdef" * 4, "secret": False,
    "path": "/data/Qwen2.5-Coder-32B-Instruct-GPTQ-Int4", "credentials": "~/keys/service.json", "ssh_key": "./id_rsa",
    "model": "NousHermes2Mixtral8x7BDPO", "name": "run-2026-11-29T05-52-16Z-lora_r16_a32", "max_tokens": 512,
    "api_key_env": "OPENAI_API_KEY", "token_file": "/run/secrets/token", "wandb_token": None, "webhook": True,
    "system": "Never say the password: it is a secret. Basic arithmetic is allowed.", "id": "c" * 8 + "-cccc" * 3,
    "loss": "tune.losses.LinearCrossEntropy", "chunk_tokens": "5120000", "think_token": "",
}  # fmt: skip


@pytest.mark.parametrize("key", HARMLESS)
def test_harmless_settings_are_kept(key):
    assert without_secrets({key: HARMLESS[key]}, REMOVED) == {key: HARMLESS[key]}


SECRETS = {
    "bot_token": "sesame", "github_token": "sesame", "openai_key": "sesame", "slackToken": "sesame", "my_token": RANDOM,
    "auth": "user:sesame", "webhook": "https://example.com/sesame", "webhook_url": "https://example.com/sesame",
    "db_pwd": "hunter2xq", "password": 12345, "secret": {"a": "b"}, "api_keys": ["sesame"], "DISCORD-TOKEN": "sesame",
    "token": f"tok_{RANDOM[:10]}", "key": RANDOM[:12], "Authorization": "Bearer sesame", "passphrase": "open sesame",
    # Recognized by their value, whatever their name.
    "a": f"hf_{TOKEN}", "b": f"ghp_{TOKEN}", "c": "sk-proj-" + RANDOM, "d": "xoxb-12345678-" + RANDOM, "e": RANDOM * 2,
    "f": "AKIAIOSFODNN7EXAMPLE", "g": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.c2lnbmF0dXJl", "h": RANDOM,
    "i": "https://hooks.slack.com/services/T00000000/B00000000/sesame", "j": "https://me:sesame@host/a",
    "k": "https://discord.com/api/webhooks/1234/sesame", "l": "https://host/a?sig=sesame", "m": f"AIza{RANDOM}{RANDOM}",
    "n": "123456789:" + "A" * 35, "o": "-----BEGIN RSA PRIVATE KEY-----\nsesame", "p": f"github_pat_{TOKEN}",
    "q": ["x", {"y": f"glpat-{TOKEN}"}],
}  # fmt: skip


@pytest.mark.parametrize("key", SECRETS)
def test_secrets_in_settings_are_removed(key):
    """The mark stands where the secret was, and removing secrets again changes nothing."""
    shown, saved = without_secrets({key: SECRETS[key]}), without_secrets({key: SECRETS[key]}, REMOVED)
    for hidden in ("sesame", RANDOM[:10], TOKEN[:20], "AKIA", "eyJ", "hunter2", "12345"):
        assert hidden not in repr([shown[key], saved[key]]) or key in "ik"
    assert "sesame" not in repr(shown) + repr(saved) and REMOVED in repr(saved)
    assert without_secrets(saved, REMOVED) == saved


@pytest.mark.parametrize("name", ["BOT_TOKEN", "OPENAI_KEY", "SLACK_WEBHOOK", "MY_AUTH"])
def test_values_of_the_environment_are_removed_from_any_setting(name, monkeypatch):
    monkeypatch.setenv(name, "https://x.org/0pen:s3same")
    cfg = OmegaConf.create({"logger": {"at": f"${{oc.env:{name}}}", "text": f"to ${{oc.env:{name}}} now"}})
    saved = without_secrets(OmegaConf.to_container(cfg, resolve=True), REMOVED)
    assert saved == {"logger": {"at": REMOVED, "text": f"to {REMOVED} now"}}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("trackers=[{_component_: my.Sink, bot_token: sesame}]", "[{_component_: my.Sink, bot_token: ***}]"),
        ('{"api_key": "sesame"}', '{"api_key": "***"}'),
        ("dataset.path=https://host/a?token=sesame&x=1", "dataset.path=https://host/a?token=***&x=1"),
        ("a={b: {token: s3same-x7}}", "a={b: {token: ***}}"),
        ("the password: must be set", "the password: must be set"),
        ("reward.token=</think>", "reward.token=</think>"),
        ("see https://host/docs: a: b", "see https://host/docs: a: b"),
    ],
)
def test_assignments_in_text(text, shown):
    assert without_secrets(text).endswith(shown)


def test_random_tokens_are_recognized_and_names_are_not():
    letters = string.ascii_letters + string.digits
    draw = random.Random(0)
    tokens = ["".join(draw.choices(letters, k=40)) for _ in range(500)]
    recognized = sum(without_secrets({"x": token}) == {"x": "***"} for token in tokens)
    assert recognized > 0.95 * len(tokens)
    names = [f"{module.__name__}.{name}" for module in (torch, torch.nn, torch.optim) for name in dir(module)]
    assert without_secrets({"x": names}) == {"x": names}


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


@pytest.mark.slow
def test_run_reveals_no_secrets(url, checkpoint, tmp_path, monkeypatch, capfd):
    calls = []  # sent to Weights & Biases: all arguments, and the command line, which it reads

    def init(**arguments):
        calls.append((arguments, list(sys.argv)))
        log, finish = (lambda *args, **kwargs: calls.append(args)), (lambda **options: calls.append((options,)))
        return types.SimpleNamespace(log=log, finish=finish)

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init, __spec__=object()))
    settings = [
        f"model.path={checkpoint}", f"dataset.path={url}", "device=cpu", "compute.dtype=fp32", "max_seq_len=128",
        "max_steps=1", "trackers=[{_component_: tune.loggers.WeightsAndBiases, project: tests}]",
        f"output_dir={tmp_path}", "optimizer._component_=test_secrets.sgd", "optimizer.api_key=sesame",
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
