"""Checkpoint formats: we read from a folder what transformers reads."""

import itertools
import json
import pickle
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

from tune.checkpointers import load_model
from tune.checkpointers.disk import disk_tensors
from tune.errors import TuneError

transformers = pytest.importorskip("transformers")

TOKENS = torch.arange(40)[None]


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    return folder


@pytest.fixture
def tensors(checkpoint):
    return load_file(checkpoint / "model.safetensors")


def save_torch(folder, tensors, shards, **options):
    """Save pytorch_model.bin, or its shards with an index."""
    if shards == 1:
        torch.save(tensors, folder / "pytorch_model.bin", **options)
        return
    weight_map = {}
    for number in range(shards):
        file, names = f"pytorch_model-{number + 1:05d}-of-{shards:05d}.bin", sorted(tensors)[number::shards]
        torch.save({name: tensors[name] for name in names}, folder / file)
        weight_map |= dict.fromkeys(names, file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.mark.parametrize("shards", [1, 3])
def test_torch_files(checkpoint, folder, tensors, shards):
    save_torch(folder, {name: tensor.bfloat16() for name, tensor in tensors.items()}, shards)
    (folder / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        assert_close(load_model(str(folder))(TOKENS), theirs(TOKENS).logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("save", [save_torch, lambda folder, tensors, _: save_file(tensors, folder / "a.safetensors")])
def test_part_of_a_tensor_can_be_read(folder, save):
    tensors = {"matrix": torch.randn(5, 7).bfloat16(), "scalar": torch.tensor(3.0), "stack": torch.randn(2, 3, 4)}
    save(folder, tensors, 1)
    stored = disk_tensors(folder)
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in stored.items()} == {
        name: (list(tensor.shape), tensor.dtype) for name, tensor in tensors.items()
    }
    for name, tensor in tensors.items():
        assert torch.equal(stored[name].read(), tensor)
    assert torch.equal(stored["matrix"].read((slice(1, 3), slice(0, 7))), tensors["matrix"][1:3])
    assert torch.equal(stored["stack"].read((slice(1, 2),)), tensors["stack"][1:])


def save_safetensors(folder, tensors, shards):
    """Save model.safetensors, or its shards with an index."""
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map = {}
    for number in range(shards):
        file, names = f"model-{number + 1:05d}-of-{shards:05d}.safetensors", sorted(tensors)[number::shards]
        save_file({name: tensors[name] for name in names}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


SETS = {
    "model.safetensors": (save_safetensors, 1),
    "shards of safetensors": (save_safetensors, 2),
    "pytorch_model.bin": (save_torch, 1),
    "shards of torch": (save_torch, 2),
    "consolidated.safetensors": (lambda folder, tensors, _: save_file(tensors, folder / "consolidated.safetensors"), 1),
}


@pytest.mark.parametrize(("one", "other"), [*itertools.combinations(SETS, 2)])
def test_of_two_sets_of_weights_we_read_the_same_as_transformers(one, other, checkpoint, folder, tensors):
    """A warning names the other set."""
    shutil.copyfile(checkpoint / "config.json", folder / "config.json")
    for value, name in enumerate((one, other), 1):
        save, shards = SETS[name]
        save(folder, tensors | {"model.norm.weight": torch.full((64,), float(value))}, shards)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).model.norm.weight[0].item()
    with pytest.warns(UserWarning) as caught:
        ours = load_model(str(folder)).norm.weight[0].item()
    assert ours == theirs
    read = {tensor.file.name for tensor in disk_tensors(folder).values()}
    unread = {file.name for file in folder.iterdir() if file.suffix in (".safetensors", ".bin")} - read
    assert unread and any(
        str(folder) in str(warning.message) and min(unread) in str(warning.message) for warning in caught
    )


def test_safetensors_with_other_names_are_read_when_nothing_else_exists(folder):
    save_file({"shard": torch.zeros(1)}, folder / "consolidated.safetensors")
    assert list(disk_tensors(folder)) == ["shard"]


def refusal(folder):
    with pytest.raises(TuneError) as error:
        disk_tensors(folder)
    return str(error.value)


class Evil:
    def __reduce__(self):
        return print, ("this must not run",)


def test_code_in_a_torch_file_does_not_run(folder, capsys):
    torch.save({"weight": torch.zeros(2), "more": Evil()}, folder / "pytorch_model.bin")
    assert "pytorch_model.bin was not opened: " in refusal(folder)
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Evil()))
    assert "pytorch_model.bin cannot be read" in refusal(folder)
    assert "this must not run" not in capsys.readouterr().out


def test_torch_file_without_a_state_dict_is_rejected(folder):
    torch.save({"model": {"weight": torch.zeros(2)}, "epoch": 3}, folder / "pytorch_model.bin")
    assert "must hold tensors by name; found {'model': 'dict', 'epoch': 'int'}" in refusal(folder)


def test_old_torch_format_is_rejected(folder):
    save_torch(folder, {"a": torch.zeros(2)}, 1, _use_new_zipfile_serialization=False)
    message = refusal(folder)
    assert "the format of torch before 1.6" in message and "weights_only=True" in message


@pytest.mark.parametrize("share", [0, 0.01, 0.5, 0.99])
def test_truncated_torch_file_is_rejected(folder, tensors, share):
    torch.save(tensors, folder.parent / "whole.bin")
    whole = (folder.parent / "whole.bin").read_bytes()
    (folder / "pytorch_model.bin").write_bytes(whole[: int(len(whole) * share)])
    assert "pytorch_model.bin cannot be read" in refusal(folder)


@pytest.mark.parametrize("suffix", ["bin", "safetensors"])
def test_incorrect_index_is_rejected(folder, suffix):
    stem, save = ("model", save_file) if suffix == "safetensors" else ("pytorch_model", torch.save)
    for number, names in enumerate(("ab", "cd"), 1):
        save({name: torch.zeros(1) for name in names}, folder / f"{stem}-{number:05d}-of-00002.{suffix}")
    first, second = f"{stem}-00001-of-00002.{suffix}", f"{stem}-00002-of-00002.{suffix}"
    assert sorted(disk_tensors(folder)) == ["a", "b", "c", "d"]
    index = folder / f"{stem}.{suffix}.index.json"
    index.write_text(json.dumps({"weight_map": {"a": first, "b": second, "c": second, "e": second}}))
    message = refusal(folder)
    for line in (f"b: {first}, {second}", f"e: None, {second}", f"d: {second}, None"):
        assert f"\n  {line}\n" in message
    index.write_text(json.dumps({"weight_map": ["a"]}))
    assert "is not a valid index" in refusal(folder)


def test_missing_shards_are_reported(folder):
    save_file({"a": torch.zeros(1)}, folder / "model-00002-of-00003.safetensors")
    assert "has no model-00001-of-00003.safetensors, model-00003-of-00003.safetensors" in refusal(folder)


def test_tensor_in_two_files_is_rejected(folder):
    for name in ("one", "two"):
        save_file({"a": torch.zeros(1)}, folder / f"{name}.safetensors")
    assert "a is in " in refusal(folder)


def test_folder_without_weights_is_rejected(folder):
    assert "no *.safetensors or pytorch_model*.bin in" in refusal(folder)
    (folder / "consolidated.00.pth").touch()
    assert "found consolidated.00.pth: see `tune convert --help`" in refusal(folder)
