import json
import shutil
from pathlib import Path

import pytest
import torch
from helpers import run_processes, save_checkpoint
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

from tune.checkpointers import Pretrained, Random, load_model, open_checkpoint
from tune.errors import TuneError
from tune.models import build


def on_meta(folder):
    with torch.device("meta"):
        return build(str(folder))


@pytest.fixture
def broken(checkpoint, tmp_path):
    """Return a copy of the checkpoint to damage."""
    return Path(shutil.copytree(checkpoint, tmp_path / "broken"))


def rewrite(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_all_mismatched_names_are_reported_at_once(broken):
    def change(tensors):
        del tensors["model.norm.weight"]
        tensors["model.extra.weight"] = torch.zeros(3)
        tensors["lm_head.weight"] = torch.zeros(7, 64)

    rewrite(broken, change)
    with pytest.raises(TuneError) as error:
        Pretrained(str(broken), on_meta(broken))
    assert "missing: model.norm.weight [64]" in str(error.value)
    assert "not known: model.extra.weight [3]" in str(error.value)
    assert "lm_head.weight has shape [7, 64], config.json says [300, 64]" in str(error.value)


def test_copy_of_a_tied_head_and_old_rotary_buffers_are_allowed(tied_checkpoint, tmp_path):
    folder = Path(shutil.copytree(tied_checkpoint, tmp_path / "copy"))
    rewrite(folder, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))
    assert_close(load_model(str(folder)).embedding.weight, load_model(str(tied_checkpoint)).embedding.weight)


def test_untied_model_without_a_head_is_rejected(broken):
    rewrite(broken, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(TuneError, match=r"missing: lm_head\.weight"):
        Pretrained(str(broken), on_meta(broken))


def test_sharded_half_precision_files(checkpoint, tmp_path):
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    tokens = torch.arange(40)[None]
    with torch.no_grad():
        assert_close(load_model(str(tmp_path))(tokens), model.float()(tokens).logits, atol=1e-5, rtol=1e-5)


def test_missing_file_named_in_the_index(broken):
    (broken / "model.safetensors").rename(broken / "model-00002-of-00002.safetensors")
    (broken / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}})
    )
    with pytest.raises(TuneError, match=r"names files that do not exist: model-00001-of-00002\.safetensors"):
        Pretrained(str(broken), on_meta(broken))


def test_damaged_file_is_reported(broken):
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(TuneError, match=r"model\.safetensors is damaged"):
        Pretrained(str(broken), on_meta(broken))


def test_random_weights_depend_only_on_the_seed(checkpoint):
    first, second, other = (on_meta(checkpoint).to_empty(device="cpu") for _ in range(3))
    for model, seed in ((first, 1), (second, 1), (other, 2)):
        Random(seed).load(model)
    for name, parameter in first.named_parameters():
        assert torch.equal(parameter, second.get_parameter(name))
        if parameter.ndim == 2:
            assert not torch.equal(parameter, other.get_parameter(name))
            assert abs(parameter.std().item() / 0.05 - 1) < 0.05  # initializer_range of the checkpoint
        else:
            assert (parameter == 1).all()
    assert not torch.equal(first.blocks[0].mlp.gate.weight, first.blocks[0].mlp.up.weight)
    assert not torch.equal(first.blocks[0].mlp.gate.weight, first.blocks[1].mlp.gate.weight)


def test_other_weights_of_the_same_shapes_count_as_another_base(checkpoint, broken):
    state = Pretrained(str(checkpoint), on_meta(checkpoint)).state_dict()
    Pretrained(str(broken), on_meta(broken)).load_state_dict(state)  # a copy is the same
    rewrite(broken, lambda tensors: tensors["model.embed_tokens.weight"].mul_(2))
    with pytest.raises(TuneError, match=f"on {checkpoint} with .*; {broken} with "):
        Pretrained(str(broken), on_meta(broken)).load_state_dict(state)


@pytest.mark.slow
def test_quantized_model_never_exists_in_full_precision(tmp_path):
    """Well below the 470 MB of fp32: 1.5 times the loaded size, plus one block of 59 MB."""
    save_checkpoint(tmp_path, hidden_size=1024, intermediate_size=4096, num_hidden_layers=8, num_attention_heads=16)
    script = Path(__file__).with_name("measure_loading.py")
    grown, held = map(float, run_processes(script, 1, str(tmp_path), "nf4").split()[-2:])
    assert held < 470 / 4 * 0.6
    assert grown < 1.5 * held + 59 + 160  # plus torch's startup memory, which differs by machine


@pytest.mark.slow
def test_rank_loads_only_its_own_part(tmp_path):
    """Well below the 470 MB of the whole model: its own half and a buffer."""
    save_checkpoint(tmp_path, hidden_size=1024, intermediate_size=4096, num_hidden_layers=8, num_attention_heads=16)
    grown, held = map(
        float, run_processes(Path(__file__).with_name("measure_loading.py"), 2, str(tmp_path)).split()[-2:]
    )
    assert held > 200
    assert grown < held + 160


@pytest.mark.slow
def test_digest_changes_with_one_row_or_the_config(checkpoint, broken):
    _, whole = open_checkpoint(broken)
    before = whole.digest()
    assert open_checkpoint(checkpoint)[1].digest() == before
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"rope_theta": 123456.0}))
    assert whole.digest() != before
    (broken / "config.json").write_text(json.dumps(config))
    assert whole.digest() == before
    seen = set()
    for row in range(0, 300, 7):

        def change(tensors, row=row):
            tensors["model.embed_tokens.weight"][row % len(tensors["model.embed_tokens.weight"]), 0] += row + 1

        rewrite(broken, change)
        seen.add(whole.digest()["xxh3"])
    assert len(seen) == len(range(0, 300, 7))


def test_git_lfs_pointer_in_place_of_weights(broken):
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{64 * 'a'}\nsize 1234\n"
    (broken / "model.safetensors").write_text(pointer)
    with pytest.raises(TuneError, match=r"model\.safetensors is a git-lfs pointer.*git -C .* lfs pull"):
        open_checkpoint(broken)


def test_index_cannot_name_files_outside_the_folder(checkpoint, broken):
    names = [tensor for tensor in load_file(checkpoint / "model.safetensors")]
    (broken / "model.safetensors").rename(broken.parent / "outside.safetensors")
    index = {"weight_map": dict.fromkeys(names, "../outside.safetensors")}
    (broken / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(TuneError, match=r"\.\./outside\.safetensors"):
        open_checkpoint(broken)
