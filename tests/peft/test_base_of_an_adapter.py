"""An exported adapter carries a digest of its base, and another base is reported wherever both are at hand."""

import hashlib
import json
import shutil
import warnings
from pathlib import Path

import lora_finetune
import pytest
import torch
from helpers import make_adapter
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

from tune import config, distributed
from tune.checkpointers import Pretrained, load_model
from tune.files import contents
from tune.models import build
from tune.peft import add_adapters, load_adapter, merge, open_model, read_adapter

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

TOKENS = torch.arange(5, 85).view(2, 40)


def digest_of(folder):
    with torch.device("meta"):
        model = build(str(folder))
    return Pretrained(str(folder), model).digest()["xxh3"]


@pytest.fixture(scope="module")
def adapters(checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    return [make_adapter(checkpoint, folder / str(seed), seed) for seed in (1, 2)]


def same(base):
    """A copy of the base, of which only the note of its writer differs."""
    reconfigure(base, transformers_version="0.0.1")


def other_weights(base):
    tensors = load_file(base / "model.safetensors")
    tensors["model.norm.weight"] *= 1.5
    save_file(tensors, base / "model.safetensors", {"format": "pt"})


def other_config(base):
    reconfigure(base, rms_norm_eps=0.1)


def reconfigure(base, **fields):
    file = base / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def on_a_device(base, adapters, out):
    open_model(base, adapters[:1]).load()


def several_on_a_device(base, adapters, out):
    open_model(base, adapters).load()


def sharded(base, adapters, out):
    open_model(base, adapters[:1]).shard(distributed.init("cpu"))


def merged(base, adapters, out):
    merge(base, adapters[0], out)


def several_merged(base, adapters, out):
    merge(base, adapters, out, method="linear")


def in_own_loop(base, adapters, out):
    model = load_model(str(base))
    add_adapters(model, lora := read_adapter(str(adapters[0])))
    load_adapter(model, lora.path)


def settings(base, out, chats, *more):
    return config.load(
        "lora_finetune",
        [f"model.path={base}", f"dataset.path={chats}", f"output_dir={out}", "max_seq_len=128", "device=cpu",
         "compute.dtype=fp32", "max_steps=1", "global_batch_size=2", "checkpointer.every=1", *more],
    )  # fmt: skip


WAYS = [on_a_device, several_on_a_device, sharded, merged, several_merged, in_own_loop]


def warned(call, *arguments):
    """The messages of warnings that name an adapter's base."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        call(*arguments)
    return [str(each.message) for each in found if "xxh3" in str(each.message)]


@pytest.mark.slow
@pytest.mark.parametrize("change", [same, other_weights, other_config])
def test_another_base_is_reported_in_every_way_to_use_an_adapter(change, checkpoint, adapters, tmp_path):
    base = Path(shutil.copytree(checkpoint, tmp_path / "base"))
    change(base)
    digests = digest_of(checkpoint), digest_of(base)
    assert (digests[0] == digests[1]) == (change is same)
    for way in WAYS:
        messages = warned(way, base, adapters, tmp_path / way.__name__)
        assert bool(messages) == (change is not same), way
        for message in messages:
            assert all(fact in message for fact in (*digests, str(base)))
        assert not messages or str(adapters[0]) in messages[0]


@pytest.mark.slow
def test_continued_run_and_checkpoint_of_a_run(checkpoint, adapters, chats, tmp_path):
    base = Path(shutil.copytree(checkpoint, tmp_path / "base"))
    path = f"adapter.path={adapters[0]}"
    assert not warned(lora_finetune.main, settings(base, tmp_path / "run", chats, path))
    assert not warned(lambda: open_model(tmp_path / "run", step=1).load())
    other_weights(base)
    assert str(adapters[0]) in warned(lora_finetune.main, settings(base, tmp_path / "again", chats, path))[0]
    (message,) = warned(lambda: open_model(tmp_path / "run", step=1).load())
    assert "step-00000001" in message and digest_of(checkpoint) in message and digest_of(base) in message
    assert len(warned(lambda: open_model(tmp_path / "run").load())) == 1
    assert not warned(lambda: open_model(tmp_path / "again").load())  # continued on the changed base


def test_digest_stands_where_others_ignore_it(checkpoint, adapters):
    with safe_open(adapters[0] / "adapter_model.safetensors", framework="pt") as tensors:
        assert tensors.metadata() == {"format": "pt", "base_xxh3": digest_of(checkpoint)}
    base = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        theirs = peft.PeftModel.from_pretrained(base, adapters[0]).eval()
    logits = open_model(adapters[0]).load()(TOKENS)
    assert_close(theirs(TOKENS).logits, logits, atol=1e-5, rtol=1e-5)


def test_adapters_without_a_digest_are_used_without_a_word(checkpoint, adapters, tmp_path):
    """Those of PEFT, and those whose base had no folder."""
    base = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    peft.PeftModel.from_pretrained(base, adapters[0]).save_pretrained(tmp_path / "adapter")
    other = Path(shutil.copytree(checkpoint, tmp_path / "base"))
    other_weights(other)
    for way in WAYS[:1]:
        assert not warned(way, other, [tmp_path / "adapter"], tmp_path / "out")


@pytest.mark.slow
def test_hash_of_a_large_base_is_remembered(checkpoint, adapters, tmp_path, monkeypatch):
    """A base of 100 GB is read once, not for each load."""
    base = Path(shutil.copytree(checkpoint, tmp_path / "base"))
    monkeypatch.setattr(contents, "LARGE", 1)
    monkeypatch.setattr(contents.time, "time", lambda: base.stat().st_ctime + 60)
    read, real = [], hashlib.file_digest

    def counted(stream, kind):
        read.append(Path(stream.name).name)
        return real(stream, kind)

    monkeypatch.setattr(contents.hashlib, "file_digest", counted)
    for _ in range(3):
        open_model(base, adapters[:1]).load()
    assert read == ["model.safetensors"]
