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
    """A copy of the checkpoint, to be damaged."""
    return Path(shutil.copytree(checkpoint, tmp_path / "broken"))


def rewrite(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_every_name_that_does_not_fit_is_told_at_once(broken):
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


def test_an_untied_model_without_head_is_refused(broken):
    rewrite(broken, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(TuneError, match=r"missing: lm_head\.weight"):
        Pretrained(str(broken), on_meta(broken))


def test_sharded_files_of_half_precision(checkpoint, tmp_path):
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    tokens = torch.arange(40)[None]
    with torch.no_grad():
        assert_close(load_model(str(tmp_path))(tokens), model.float()(tokens).logits, atol=1e-5, rtol=1e-5)


def test_file_named_in_the_index_that_is_not_there(broken):
    (broken / "model.safetensors").rename(broken / "model-00002-of-00002.safetensors")
    (broken / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}})
    )
    with pytest.raises(TuneError, match=r"names files that do not exist: model-00001-of-00002\.safetensors"):
        Pretrained(str(broken), on_meta(broken))


def test_damaged_file(broken):
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(TuneError, match=r"model\.safetensors is damaged"):
        Pretrained(str(broken), on_meta(broken))


def test_random_weights_depend_on_the_seed_alone(checkpoint):
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


def test_other_weights_of_the_same_shapes_are_another_base(checkpoint, broken):
    state = Pretrained(str(checkpoint), on_meta(checkpoint)).state_dict()
    Pretrained(str(broken), on_meta(broken)).load_state_dict(state)  # a copy is the same
    rewrite(broken, lambda tensors: tensors["model.embed_tokens.weight"].mul_(2))
    with pytest.raises(TuneError, match=f"on {checkpoint} with .*; {broken} with "):
        Pretrained(str(broken), on_meta(broken)).load_state_dict(state)


@pytest.mark.slow
def test_a_quantized_model_never_exists_in_full_precision(tmp_path):
    """Well below the 470 MB of fp32: 1.5 times what is held, and one block of 59 MB."""
    save_checkpoint(tmp_path, hidden_size=1024, intermediate_size=4096, num_hidden_layers=8, num_attention_heads=16)
    script = Path(__file__).with_name("measure_loading.py")
    grown, held = map(float, run_processes(script, 1, str(tmp_path), "nf4").split()[-2:])
    assert held < 470 / 4 * 0.6
    assert grown < 1.5 * held + 59 + 160  # and what torch takes for its first operations, which differs by machine


@pytest.mark.slow
def test_a_rank_loads_its_own_part_only(tmp_path):
    """Well below the 470 MB of the whole: the half it holds, and a buffer."""
    save_checkpoint(tmp_path, hidden_size=1024, intermediate_size=4096, num_hidden_layers=8, num_attention_heads=16)
    grown, held = map(
        float, run_processes(Path(__file__).with_name("measure_loading.py"), 2, str(tmp_path)).split()[-2:]
    )
    assert held > 200
    assert grown < held + 160


def test_one_changed_row_and_another_config_are_another_model(checkpoint, broken):
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


def test_a_pointer_of_git_lfs_in_place_of_weights(broken):
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{64 * 'a'}\nsize 1234\n"
    (broken / "model.safetensors").write_text(pointer)
    with pytest.raises(TuneError, match=r"model\.safetensors is a git-lfs pointer.*git -C .* lfs pull"):
        open_checkpoint(broken)


def test_an_index_names_no_files_of_other_folders(checkpoint, broken):
    names = [tensor for tensor in load_file(checkpoint / "model.safetensors")]
    (broken / "model.safetensors").rename(broken.parent / "outside.safetensors")
    index = {"weight_map": dict.fromkeys(names, "../outside.safetensors")}
    (broken / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(TuneError, match=r"\.\./outside\.safetensors"):
        open_checkpoint(broken)
