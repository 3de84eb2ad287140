"""Loading and exporting preserves every tensor, name, dtype, and the config; transformers reads the result."""

import functools
import io
import itertools
import json
import re
import shutil
import sys
import time
import weakref
from importlib import import_module
from pathlib import Path

import pytest
import torch
from helpers import HANGS, make_adapter, save_checkpoint
from rich.console import Console
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from stacked_experts import NoTokenizer
from torch.testing import assert_close

from tune import distributed
from tune.checkpointers import export, load_model, model_card
from tune.checkpointers.writing import save_tensors, write_tensors
from tune.cli import main
from tune.errors import TuneError
from tune.peft import LoRA, add_adapters, export_adapter, load_adapter, read_adapter
from tune.tokenizers import Tokenizer

export_module = import_module("tune.checkpointers.writing")
transformers = pytest.importorskip("transformers")


def tensors_of(folder):
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def exported(source, out, change=lambda model: None, **options):
    model = load_model(str(source))
    with torch.no_grad():
        change(model)
    export(model, Tokenizer(str(source)), str(out), distributed.init("cpu"), source=str(source), **options)
    return tensors_of(out)


def mixed_types(tensors):
    return {name: tensor.bfloat16() if "proj" in name else tensor for name, tensor in tensors.items()}


def copied_head(tensors):
    return tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}


def rotary_buffers(tensors):
    return tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.arange(8.0)}


SOURCES = {
    "as it is": ({}, dict),
    "half precision": ({}, lambda tensors: {name: tensor.half() for name, tensor in tensors.items()}),
    "mixed types": ({"attention_bias": True}, mixed_types),
    "tied": ({"tie_word_embeddings": True}, dict),
    "tied with a copied head": ({"tie_word_embeddings": True}, copied_head),
    "old rotary buffers": ({}, rotary_buffers),
}


@pytest.fixture(params=SOURCES)
def source(request, tmp_path):
    changes, change = SOURCES[request.param]
    folder = save_checkpoint(tmp_path / "source", num_hidden_layers=2, **changes)
    save_file(change(load_file(folder / "model.safetensors")), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_export_preserves_the_source(source, tmp_path):
    assert_close(exported(source, tmp_path / "out"), tensors_of(source), rtol=0, atol=0)
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()
    tokens = torch.arange(30)[None]
    ours, theirs = load_model(str(source)), transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        assert_close(theirs.float()(tokens).logits, ours(tokens), atol=1e-5, rtol=1e-5)


def test_export_writes_the_trained_weights(source, tmp_path):
    def change(model):
        for parameter in model.parameters():
            parameter.mul_(2)

    before, after = tensors_of(source), exported(source, tmp_path / "out", change)
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor if "inv_freq" in name else tensor * 2), name


def test_tensor_is_freed_before_the_next_one_is_gathered(checkpoint, tmp_path, monkeypatch):
    weights, made = import_module("tune.checkpointers.weights"), []
    gather = weights._full_tensor

    def watched(*arguments):
        assert not [name for name, tensor in made if tensor() is not None]
        tensor = gather(*arguments).clone()
        made.append((arguments[1], weakref.ref(tensor)))
        return tensor

    monkeypatch.setattr(weights, "_full_tensor", watched)
    exported(checkpoint, tmp_path / "out")
    assert len(made) == len(tensors_of(checkpoint))


@pytest.mark.slow
def test_export_replaces_only_earlier_exports(checkpoint, tmp_path):
    """Regression: a user's notes and folders were deleted silently."""
    out = tmp_path / "out"
    first = exported(checkpoint, out)
    exported(checkpoint, out, lambda model: model.norm.weight.fill_(3.0))
    again = tensors_of(out)
    assert again.keys() == first.keys() and again["model.norm.weight"].eq(3).all()
    for name in ("notes.md", "figures/loss.png", ".hidden", "deep/er/empty/"):
        other = out / name
        other.parent.mkdir(parents=True, exist_ok=True)
        other.mkdir() if name.endswith("/") else other.write_text("mine")
        with pytest.raises(TuneError, match=name.rstrip("/")):
            exported(checkpoint, out)
        assert other.exists() and tensors_of(out).keys() == first.keys()
        shutil.rmtree(out / name.partition("/")[0]) if "/" in name else other.unlink()
    exported(checkpoint, out)
    for folder in (tmp_path / "base", tmp_path / "file"):  # not written by an export
        shutil.copytree(checkpoint, folder) if folder.name == "base" else folder.write_text("mine")
        with pytest.raises(TuneError, match=folder.name):
            exported(checkpoint, folder)
    assert tensors_of(tmp_path / "base").keys() == first.keys() and (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("changes", [{"num_hidden_layers": 2}, {"num_hidden_layers": 4}, {"intermediate_size": 96}])
def test_source_with_other_shapes_is_rejected(changes, checkpoint, tmp_path):
    """Regression: its blocks were mixed in, and its config.json had another number of blocks."""
    other = save_checkpoint(tmp_path / "other", **changes)
    model, out = load_model(str(checkpoint)), tmp_path / "out"
    with pytest.raises(TuneError, match=str(other)):
        export(model, Tokenizer(str(checkpoint)), out, distributed.init("cpu"), source=str(other))
    assert not out.exists()


def test_export_in_another_dtype(source, tmp_path):
    tensors = exported(source, tmp_path / "out", dtype="bf16")
    assert {tensor.dtype for name, tensor in tensors.items() if "inv_freq" not in name} == {torch.bfloat16}
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (source, tmp_path / "out"))
    assert after == before | {"dtype": "bfloat16"}
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").dtype == torch.bfloat16


def test_export_in_shards(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[export.__module__], "SHARD_BYTES", 100_000)
    assert_close(exported(checkpoint, tmp_path / "out"), tensors_of(checkpoint), rtol=0, atol=0)
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    count = len(files)
    assert count > 3 and files[0].name == f"model-00001-of-{count:05d}.safetensors"
    assert all(sum(tensor.nbytes for tensor in load_file(file).values()) <= 100_000 for file in files)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors_of(checkpoint).values())
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert_close(theirs.state_dict(), transformers.AutoModelForCausalLM.from_pretrained(checkpoint).state_dict())


def test_source_without_weights_uses_the_configured_dtype(checkpoint, tmp_path):
    """As in training from random weights: config.json declares the dtype."""
    (tmp_path / "config.json").write_text(
        json.dumps(json.loads((checkpoint / "config.json").read_text()) | {"dtype": "bfloat16"})
    )
    export(load_model(str(checkpoint)), NoTokenizer(), tmp_path / "out", distributed.init("cpu"), source=str(tmp_path))
    expected = {name: tensor.bfloat16() for name, tensor in tensors_of(checkpoint).items()}
    assert_close(tensors_of(tmp_path / "out"), expected, rtol=0, atol=0)


@pytest.mark.parametrize(("folder", "advice"), [("run/model", "with output_dir={}/run"), ("out", "again")])
def test_full_disk_error_says_how_to_continue(tmp_path, monkeypatch, folder, advice):
    """Only a run with checkpoints can be resumed: `tune convert` and `tune merge` have no output_dir."""

    def full(*arguments, **keywords):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export_module.TensorFile, "add", full)
    (tmp_path / "run" / "checkpoints" / "step-00000001").mkdir(parents=True)
    with pytest.raises(TuneError) as error:
        write_tensors(tmp_path / folder, [("a", torch.zeros(1))])
    assert f"run the same command {advice.format(tmp_path)}" in str(error.value)
    assert ("output_dir" in str(error.value)) == (folder == "run/model")


def test_model_card_uses_hub_names_where_possible(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "chats.jsonl").touch()  # otherwise it could be a name on the hub
    cached = tmp_path / "models--org--a-model" / "snapshots" / "0123"
    cached.mkdir(parents=True)
    (tmp_path / "mine").mkdir()
    assert "Fine-tuned from `org/a-model` on `org/chats` with" in model_card("r", str(cached), "org/chats")
    assert "Fine-tuned from `mine` on `chats.jsonl` with" in model_card("r", str(tmp_path / "mine"), "data/chats.jsonl")


def test_tensors_of_all_dtypes_and_sizes(tmp_path, monkeypatch):
    """Some tensors misalign the next one; the names alone may need more files."""
    monkeypatch.setattr(export_module, "HEADER_BYTES", 2**12)
    draw = torch.Generator().manual_seed(0)
    dtypes = [torch.uint8, torch.float32, torch.bfloat16, torch.int64, torch.float8_e4m3fn, torch.bool]
    tensors = {"a number": torch.tensor(3.0), "a part": torch.arange(10.0)[3:7]}
    for dtype, size in itertools.product(dtypes, (0, 1, 5, 8)):
        tensors[f'{dtype} {size} é"'] = torch.randint(0, 2, (size, 3), generator=draw).to(dtype).T
    write_tensors(tmp_path, tensors.items())
    files = sorted(tmp_path.glob("*.safetensors"))
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(files) > 1 and index.keys() == tensors.keys()
    for file in files:
        for name, loaded in load_file(file).items():
            assert index[name] == file.name
            assert_close(loaded.float(), tensors[name].float(), rtol=0, atol=0)
            assert loaded.dtype == tensors[name].dtype


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_is_shown_only_in_terminals(monkeypatch, tmp_path):
    def tensors():
        for number in range(2):
            deadline = time.monotonic() + HANGS
            while number and is_shown and "1/2" not in stream.getvalue() and time.monotonic() < deadline:
                time.sleep(0.05)  # a bar is drawn ten times a second
            yield f"weight {number}", torch.full((2,), float(number))

    for stream, is_shown in ((Terminal(), True), (io.StringIO(), False)):
        monkeypatch.setattr(sys, "stdout", stream)
        monkeypatch.setattr("rich.progress.get_console", functools.partial(Console, file=stream))
        write_tensors(tmp_path, tensors(), total=2)
        assert ("1/2" in stream.getvalue()) == is_shown
        assert load_file(tmp_path / "model.safetensors").keys() == {"weight 0", "weight 1"}
    assert stream.getvalue() == ""


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nonfinite_weights_do_not_replace_an_export(checkpoint, tmp_path, value):
    before = exported(checkpoint, tmp_path / "out")
    with pytest.raises(TuneError, match=r"model\.norm\.weight"):
        exported(checkpoint, tmp_path / "out", lambda model: model.norm.weight[3].fill_(value))
    assert_close(tensors_of(tmp_path / "out"), before)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_values_beyond_the_export_dtype_count_as_nonfinite(checkpoint, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(checkpoint, source)
    tensors = {name: tensor.half() for name, tensor in load_file(checkpoint / "model.safetensors").items()}
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(TuneError, match=r"model\.norm\.weight"):
        exported(source, tmp_path / "out", lambda model: model.norm.weight[3].fill_(70000.0))
    assert not (tmp_path / "out").exists()


def test_source_is_not_overwritten(checkpoint, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(checkpoint, source)
    with pytest.raises(TuneError, match=str(source)):
        exported(source, source)
    assert_close(tensors_of(source), tensors_of(checkpoint))


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.uint8, torch.bool], ids=str)
def test_integer_weights_are_rejected(checkpoint, tmp_path, dtype, capsys):
    """Without their scales they would be trained as plain integers and written back as integers."""
    source = tmp_path / "source"
    shutil.copytree(checkpoint, source)
    name = "model.layers.1.mlp.up_proj.weight"
    tensors = load_file(checkpoint / "model.safetensors")
    save_file(tensors | {name: tensors[name].to(dtype)}, source / "model.safetensors", metadata={"format": "pt"})
    parts = (name, str(dtype).removeprefix("torch."), str(source))
    with pytest.raises(TuneError) as error:
        load_model(str(source))
    assert all(part in str(error.value) for part in (*parts, "model.path", "model.safetensors"))
    for command in (
        ["add-tokens", source, tmp_path / "out", "<new>"],
        ["export", source, "--to=hf", f"--out={tmp_path / 'out'}"],
    ):
        with pytest.raises(SystemExit) as end:
            main([*map(str, command)])
        assert end.value.code == 2 and all(part in capsys.readouterr().err for part in parts[:1])
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_integer_buffers_are_kept(checkpoint, tmp_path):
    """Some old checkpoints have position buffers that the model does not use."""
    source = tmp_path / "source"
    shutil.copytree(checkpoint, source)
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.arange(8)}
    save_file(
        load_file(checkpoint / "model.safetensors") | extra, source / "model.safetensors", metadata={"format": "pt"}
    )
    assert_close(exported(source, tmp_path / "out"), tensors_of(source), rtol=0, atol=0)


@pytest.mark.parametrize("verb", ["add-tokens", "merge", "export", "quantize"])
def test_no_command_writes_nonfinite_weights(checkpoint, tmp_path, verb, capsys):
    source, out = tmp_path / "source", tmp_path / "out"
    shutil.copytree(checkpoint, source)
    tensors = load_file(checkpoint / "model.safetensors")
    tensors["model.norm.weight"][3] = torch.nan
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    command = {
        "add-tokens": [source, out, "<new>"],
        "merge": [source, make_adapter(checkpoint, tmp_path / "adapter", 0) if verb == "merge" else "", out],
        "export": [source, "--to=hf", f"--out={out}"],
        "quantize": [source, "--to=int8", f"--out={out}"],
    }[verb]
    with pytest.raises(SystemExit) as end:
        main([verb, *map(str, command)])
    assert end.value.code == 2 and "model.norm.weight" in capsys.readouterr().err
    assert not out.exists() and {path.name for path in tmp_path.iterdir()} <= {"source", "adapter"}


class Second:
    """The second of two processes; the first one has nonfinite tensors with these `names`."""

    is_main = False

    def __init__(self, names):
        self.names = names

    def broadcast(self, mine):
        return self.names

    def of_main(self, function):
        pass

    def barrier(self):
        pass


def test_nonfinite_adapter_does_not_replace_an_export(checkpoint, tmp_path):
    """All processes end, whatever their own copies hold."""
    folder = make_adapter(checkpoint, tmp_path / "adapter", 0)
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    model, lora = load_model(str(checkpoint)), LoRA(rank=4)
    add_adapters(model, lora)
    layer = model.blocks[1].attention.value
    layer.lora_b.data[2] = torch.inf
    options = {"base": str(checkpoint), "tokenizer": Tokenizer(str(checkpoint))}
    name = "model.layers.1.self_attn.v_proj.lora_B.weight"
    with pytest.raises(TuneError, match=re.escape(name)):
        export_adapter(model, folder, world=distributed.init("cpu"), **options)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
    export_adapter(model, folder, world=Second([]), **options)  # its own copy is not written
    layer.lora_b.data[2] = 0
    with pytest.raises(TuneError, match=re.escape(name)):
        export_adapter(model, folder, world=Second([name]), **options)


def test_integer_adapter_is_rejected(checkpoint, tmp_path):
    folder = make_adapter(checkpoint, tmp_path / "adapter", 0)
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    name = next(iter(tensors))
    save_file(tensors | {name: tensors[name].to(torch.int8)}, file, metadata={"format": "pt"})
    model = load_model(str(checkpoint))
    lora = read_adapter(str(folder))
    add_adapters(model, lora)
    with pytest.raises(TuneError) as error:
        load_adapter(model, str(folder))
    assert all(part in str(error.value) for part in (name, "int8", str(file)))


def test_source_of_another_architecture_is_rejected(checkpoint, tmp_path):
    """Regression: all of its tensors were copied next to the model's."""
    model = torch.nn.ModuleDict({"other": torch.nn.Linear(2, 2)})
    with pytest.raises(TuneError, match=r"lacks other\.bias \(2 in total\)"):
        export(model, None, tmp_path / "out", source=checkpoint)
    assert not (tmp_path / "out").exists()


def test_peft_model_is_rejected(checkpoint, tmp_path):
    """Regression: the untrained base was written."""
    peft = pytest.importorskip("peft")
    base = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    theirs = peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj"]))
    for model in (theirs, theirs.base_model.model):
        with pytest.raises(TuneError, match=r"merge_and_unload"):
            export(model, None, tmp_path / "out", source=checkpoint)
    assert not (tmp_path / "out").exists()
    merged = theirs.merge_and_unload()
    export(merged, None, tmp_path / "out", source=checkpoint, dtype=torch.bfloat16)
    assert {tensor.dtype for tensor in tensors_of(tmp_path / "out").values()} == {torch.bfloat16}


def test_adapted_transformers_model_is_exported_merged(checkpoint, tmp_path):
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    add_adapters(model, LoRA(rank=4))
    for parameter in model.parameters():
        parameter.data += 0.01 * parameter.requires_grad
    export(model, None, tmp_path / "out", source=checkpoint)
    written = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    tokens = torch.arange(5, 25)[None]
    assert_close(written(tokens).logits, model(tokens).logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("verb", ["export", "add-tokens"])
def test_auto_map_names_only_code_that_is_there(verb, checkpoint, tmp_path):
    """transformers reads the result, also if it may run code."""
    source = Path(shutil.copytree(checkpoint, tmp_path / "source"))
    fields = json.loads((source / "config.json").read_text())
    here = {"AutoConfig": "configuration_own.OwnConfig", "AutoModel": "owner/name--modeling_own.OwnModel"}
    gone = {"AutoModelForCausalLM": "modeling_gone.GoneModel", "AutoTokenizer": ["tokens_gone.Tokens", None]}
    (source / "configuration_own.py").write_text("from transformers import LlamaConfig as OwnConfig\n")
    options = {"export": [str(source), "--to", "hf", "--out", str(tmp_path / "out")]}
    options["add-tokens"] = [str(source), str(tmp_path / "out"), "<new>"]
    for references, expected in ((here | gone, here), (gone, None)):
        (source / "config.json").write_text(json.dumps(fields | {"auto_map": references}))
        main([verb, *options[verb]])
        assert json.loads((tmp_path / "out" / "config.json").read_text()).get("auto_map") == expected
        assert (tmp_path / "out" / "configuration_own.py").exists()
        if expected is None:
            load = transformers.AutoModelForCausalLM.from_pretrained
            assert load(tmp_path / "out", trust_remote_code=True).config.model_type == "llama"
        shutil.rmtree(tmp_path / "out")


def test_equal_tensors_are_equal_files(tmp_path):
    """safetensors writes metadata in the order of a hash table, which differs from one call to the next."""
    for number in range(8):
        metadata = {name: name for name in ("base_xxh3", "first", "second")}
        save_tensors({"weight": torch.ones(2)}, tmp_path / f"{number}.safetensors", "model", **metadata)
    assert len({file.read_bytes() for file in tmp_path.iterdir()}) == 1
    with safe_open(tmp_path / "0.safetensors", "pt") as opened:
        assert opened.metadata() == {"format": "pt"} | metadata
        assert opened.get_tensor("weight").tolist() == [1, 1]
