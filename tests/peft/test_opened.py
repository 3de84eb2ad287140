"""open_model opens folders, adapters, runs and checkpoints: on a device, sharded or on disk."""

import shutil
from pathlib import Path

import full_finetune
import lora_finetune
import pytest
import torch
from helpers import make_adapter, run_processes, save_checkpoint
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

from tune import config, distributed
from tune.checkpointers import DiskTensor, load_model
from tune.cli import main
from tune.errors import TuneError
from tune.peft import adapted_modules, merge, open_model

TOKENS = torch.arange(5, 85).view(2, 40)
SHARDED = Path(__file__).with_name("sharded_opened.py")


@pytest.fixture(scope="module")
def adapter(checkpoint, tmp_path_factory):
    """An adapter with all kinds of parameters: low-rank matrices, whole modules, token rows."""
    settings = {"modules_to_save": ["norm"], "trainable_tokens": [7, 9]}
    return make_adapter(checkpoint, tmp_path_factory.mktemp("adapter") / "adapter", 1, **settings)


@pytest.fixture(scope="module")
def merged(checkpoint, adapter, tmp_path_factory):
    folder = tmp_path_factory.mktemp("merged") / "model"
    merge(checkpoint, adapter, folder)
    return folder


@pytest.fixture(scope="module")
def runs(checkpoint, chats, tmp_path_factory):
    """Runs of three steps each, with all checkpoints."""
    folder = tmp_path_factory.mktemp("runs")
    common = [
        f"model.path={checkpoint}", f"dataset.path={chats}", "max_seq_len=128", "device=cpu", "compute.dtype=fp32",
        "max_steps=3", "checkpointer.every=1", "checkpointer.keep=9", "optimizer.lr=1e-2", "global_batch_size=4",
    ]  # fmt: skip
    for name, recipe, more in (("full", full_finetune, []), ("lora", lora_finetune, ["adapter.rank=4"])):
        settings = [*common, *more, f"output_dir={folder / name}"]
        recipe.main(config.load(recipe.__name__, settings))
    return folder


@pytest.mark.slow
def test_opening_a_model_reads_no_weights(checkpoint, adapter, runs, monkeypatch):
    monkeypatch.setattr(DiskTensor, "read", lambda *_: pytest.fail("weights were read"))
    for opened in (open_model(checkpoint), open_model(adapter), open_model(runs / "full", step=2)):
        assert all(parameter.is_meta for parameter in opened.model.parameters())


@pytest.mark.slow
@torch.no_grad()
def test_adapter_on_a_device_sharded_and_on_disk(checkpoint, adapter, merged, tmp_path):
    expected = load_model(merged)(TOKENS)
    assert (expected - load_model(checkpoint)(TOKENS)).abs().max() > 1e-3
    assert_close(open_model(adapter).load()(TOKENS), expected, atol=1e-5, rtol=1e-5)
    assert_close(open_model(checkpoint, [adapter]).load()(TOKENS), expected, atol=1e-5, rtol=1e-5)
    frozen = open_model(adapter).shard(distributed.init("cpu"))
    assert_close(frozen(TOKENS), expected, atol=1e-5, rtol=1e-5)
    assert not frozen.training and not any(parameter.requires_grad for parameter in frozen.parameters())
    opened = open_model(adapter)
    model = opened.on_disk()
    assert {name for name, parameter in model.named_parameters() if not parameter.is_meta} == {
        name for name, parameter in model.named_parameters() if parameter.requires_grad
    }
    opened.export(tmp_path / "out", "merged")
    assert_close(load_model(tmp_path / "out").state_dict(), load_model(merged).state_dict(), atol=0, rtol=0)


def test_default_type_is_that_of_the_largest_tensor_except_on_a_cpu(checkpoint, tmp_path):
    """Checkpoints may have norms in fp32."""
    folder = Path(shutil.copytree(checkpoint, tmp_path / "mixed"))
    tensors = load_file(folder / "model.safetensors")
    mixed = {name: tensor if "norm" in name else tensor.bfloat16() for name, tensor in tensors.items()}
    save_file(mixed, folder / "model.safetensors", {"format": "pt"})
    for device, dtype in (("meta", torch.bfloat16), ("cpu", torch.float32)):
        assert {parameter.dtype for parameter in open_model(folder).load(device).parameters()} == {dtype}


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp_shard=2", "tp=2"])
def test_adapter_in_two_processes(layout, adapter, merged):
    assert "2 processes agree" in run_processes(SHARDED, 2, layout, str(adapter), str(merged))


@pytest.mark.slow
def test_checkpoint_in_two_processes(runs, tmp_path):
    for kind in ("full", "lora"):
        main(["export", str(runs / kind), "--step", "2", "--to", "hf", "--out", str(tmp_path / kind)])
        checkpoint = str(runs / kind / "checkpoints" / "step-00000002")
        for layout in ("dp_shard=2", "tp=2"):
            assert "2 processes agree" in run_processes(SHARDED, 2, layout, checkpoint, str(tmp_path / kind))


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("kind", ["full", "lora"])
def test_checkpoint_of_a_run(kind, runs, tmp_path):
    run = runs / kind
    main(["export", str(run), "--step", "2", "--to", "hf", "--out", str(tmp_path / "out")])
    expected, last = load_model(tmp_path / "out")(TOKENS), open_model(run).load()(TOKENS)
    assert (expected - last).abs().max() > 1e-3
    before = sorted(run.rglob("*"))
    for opened in (lambda: open_model(run, step=2), lambda: open_model(run / "checkpoints" / "step-00000002")):
        assert_close(opened().load()(TOKENS), expected, atol=1e-5, rtol=1e-5)
        assert_close(opened().shard(distributed.init("cpu"))(TOKENS), expected, atol=1e-5, rtol=1e-5)
    assert sorted(run.rglob("*")) == before
    assert_close(open_model(run, step=3).load()(TOKENS), last, atol=1e-5, rtol=1e-5)
    model = open_model(run, step=2).load(quantization="nf4")
    assert bool(adapted_modules(model)) == (kind == "lora")
    assert 0 < (model(TOKENS) - expected).norm() / expected.norm() < 0.3
    with pytest.raises(TuneError, match="step 9; it has 1, 2, 3"):
        open_model(run, step=9)


@pytest.mark.slow
def test_damaged_checkpoint_is_not_opened(runs, tmp_path):
    run = shutil.copytree(runs / "full", tmp_path / "run")
    file = next((run / "checkpoints" / "step-00000002").glob("*.distcp"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(TuneError, match=f"damaged: {file.name}"):
        open_model(run, step=2).load()
    open_model(run, step=1).load()


def test_digests_distinguish_models(checkpoint, adapter, merged, runs):
    names = checkpoint, adapter, merged, runs / "full" / "checkpoints" / "step-00000001", runs / "lora" / "adapter"
    digests = [str(open_model(name).digest()) for name in names]
    digests.append(str(open_model(runs / "full", step=2).digest()))
    assert len(set(digests)) == len(digests)
    assert str(open_model(adapter).digest()) == digests[1]


def test_checkpoints_of_one_base_have_different_digests(runs):
    assert open_model(runs / "lora", step=1).digest() != open_model(runs / "lora", step=2).digest()


def test_errors_name_the_setting(checkpoint, adapter, runs, tmp_path):
    (tmp_path / "empty").mkdir()
    for wrong in (tmp_path / "absent", tmp_path / "empty", runs / "full" / "checkpoints" / "step-00000009"):
        with pytest.raises(TuneError, match=r"^reference: ") as error:
            open_model(wrong, setting="reference")
        assert "model.path" not in str(error.value)
    with pytest.raises(TuneError, match=r"^reward\.path: .*score\.weight"):
        open_model(checkpoint, head="score", setting="reward.path")
    plain = make_adapter(checkpoint, tmp_path / "plain", 1)
    with pytest.raises(TuneError, match="support only one adapter"):
        open_model(plain, [plain]).shard(distributed.init("cpu"))


def test_adding_tokens_to_a_reward_model_keeps_its_head(tmp_path):
    """Its head has one row, which belongs to no token."""
    transformers = pytest.importorskip("transformers")
    folder = save_checkpoint(tmp_path / "base", pad_token_id=1)
    settings = transformers.AutoConfig.from_pretrained(folder)
    settings.num_labels = 1
    transformers.AutoModelForSequenceClassification.from_config(settings).save_pretrained(folder)
    main(["add-tokens", str(folder), str(tmp_path / "out"), "<|one|>"])
    before, after = load_model(folder, head="score"), load_model(tmp_path / "out", head="score")
    assert torch.equal(before.head.weight, after.head.weight)
    assert len(after.embedding.weight) == len(before.embedding.weight) + 1
