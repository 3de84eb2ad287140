"""The loss curve is the same when processes share the heads and widths of each block (tensor parallelism)."""

import json
import re
from pathlib import Path

import pytest
import torch
from edited_recipes import run_edited
from helpers import curve_steps, figures_of, run_processes, save_checkpoint
from models.test_families import SMALL, VARIANTS
from safetensors.torch import load_file
from update_in_backward import in_backward

RUN_VARIANTS = Path(__file__).with_name("run_variants.py")
LORA = ["adapter.rank=4", "adapter.dropout=0.2", "adapter.target_modules=all-linear"]
HEAD = ["adapter.rank=4", "adapter.target_modules=[q_proj,lm_head,embed_tokens]"]
NF4 = ["model.quantization=nf4"]
FULL = ["compute.activation_checkpointing=full"]
ADAFACTOR = ["optimizer._component_=tune.optimizers.Adafactor", "optimizer.eps=[null,1e-3]"]
WHOLE_HEAD = ["parallel.loss_parallel=false"]


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A Llama whose rows can be split into NF4 blocks."""
    return save_checkpoint(tmp_path_factory.mktemp("wide"), hidden_size=128, intermediate_size=256, num_hidden_layers=2)


@pytest.fixture(scope="module")
def common(chats):
    """Settings that reveal an untrained norm in exports: the rate moves it beyond their tolerance.

    With this `eps`, rounding stays within the tolerance.
    """
    return [
        f"dataset.path={chats}", f"dataset.validation={{path: {chats}, take: 16}}", "max_seq_len=128",
        "global_batch_size=8", "micro_batch_size=8", "compute.dtype=fp32", "device=cpu", "optimizer.lr=1e-3",
        "optimizer.eps=1e-6", f"max_steps={curve_steps()}", "epochs=6", "checkpointer.every=null", "packed=true",
    ]  # fmt: skip


def assert_one_curve(recipe, common, variants, layouts, count, folder, names=None, alone=None, of_alone=()):
    """Compare each of `variants` in each of `layouts`, or in its layouts in `names`, on `count` processes and on one.

    One process runs the recipe `alone`, if given, with the additional settings `of_alone`.
    """
    pairs = [(name, layout) for name in variants for layout in (names[name] if names else layouts)]
    for name, overrides in variants.items():
        run_edited(alone or recipe, [*common, *overrides, *of_alone, f"output_dir={folder / 'alone' / name}"])
    shared = {f"{name}, {layout}": [*variants[name], *layouts[layout]] for name, layout in pairs}
    run_processes(RUN_VARIANTS, count, recipe, str(folder), json.dumps(common), json.dumps(shared))
    expected = {name: figures_of(folder / "alone" / name) for name in variants}
    for name, layout in pairs:
        found = figures_of(folder / f"{name}, {layout}")
        assert found == pytest.approx(expected[name], rel=1e-5, abs=1e-6), (name, layout)  # general_kl begins at 0


def assert_curve_in_backward(common, variants, layouts, count, folder, names=None):
    """Compare updates in the backward pass with one process that updates after it; all parameters train."""
    changed = in_backward("full_finetune", folder / "changed")
    others = {"alone": "full_finetune", "of_alone": ["max_grad_norm=null"]}
    assert_one_curve(changed, common, variants, layouts, count, folder, names, **others)


LAYOUTS = {
    "tp x FSDP": ["parallel.tp=2", "micro_batch_size=4"],
    "tp x HSDP": ["parallel.tp=2", "parallel.dp_replicate=2", "micro_batch_size=4"],
    "tp": ["parallel.tp=4"],
}


@pytest.mark.weekly
def test_two_processes_share_each_block(wide, chats, common, tmp_path, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")  # two nodes
    # More blocks than Dynamo's recompile limit, and a number of rows that two processes cannot share.
    deep = save_checkpoint(tmp_path / "deep", hidden_size=32, num_hidden_layers=10, vocab_size=301)
    general = [f"evaluate.general={chats}", "loss.accuracy=true"]
    variants = {"all": [f"model.path={wide}", *general], "deep": [f"model.path={deep}"]}
    compiled = ["parallel.tp=2", "micro_batch_size=8", "compute.compile=true", *FULL]
    shared = ["parallel.tp=2", "micro_batch_size=2"]
    layouts = {"tp": shared, "whole head": [*shared, *WHOLE_HEAD], "compiled": compiled}
    names = {"all": ["tp", "whole head"], "deep": ["compiled"]}
    assert_one_curve("full_finetune", common, variants, layouts, 2, tmp_path, names)
    merged, alone = (load_file(tmp_path / run / "model" / "model.safetensors") for run in ("all, tp", "alone/all"))
    log, deep_log = ((tmp_path / run / "log.txt").read_text() for run in ("all, tp", "deep, compiled"))
    assert "mesh: tp 2; consecutive processes share the last axis\n" in log
    assert re.search(r"\nsent by each process per step of [\d,]+ tokens, MiB: tp [\d.]+\n", log)
    assert "warning: tp 2 spans nodes of 1 processes, whose links are slow. Set it to 1\n" in log
    assert "does not divide" not in log + (tmp_path / "all, whole head" / "log.txt").read_text()
    assert "warning: tp=2 does not divide the rows of embedding, head: " in deep_log
    torch.testing.assert_close(merged, alone, rtol=1e-3, atol=2e-5)


@pytest.mark.slow
def test_all_parameters(checkpoint, tied_checkpoint, wide, common, tmp_path):
    variants = {
        "packed": [f"model.path={checkpoint}"],
        "plain": [f"model.path={checkpoint}", "packed=false"],
        "whole head": [f"model.path={checkpoint}", *WHOLE_HEAD],
        "whole tied head": [f"model.path={tied_checkpoint}", *WHOLE_HEAD],
        "from random weights": [f"model.path={checkpoint}", "edit=random"],
        "recomputed": [f"model.path={checkpoint}", "compute.activation_checkpointing=selective"],
        "on the host": [f"model.path={checkpoint}", "compute.cpu_offload=true"],
        "Adafactor": [f"model.path={checkpoint}", *ADAFACTOR],
    }
    names = {
        "packed": [*LAYOUTS],
        "plain": ["tp x HSDP"],
        "whole head": ["tp"],
        "whole tied head": ["tp x FSDP"],
        "from random weights": ["tp x HSDP"],
        "recomputed": ["tp"],
        "on the host": ["tp x HSDP"],
        "Adafactor": ["tp x FSDP"],
    }
    assert_one_curve("full_finetune", common, variants, LAYOUTS, 4, tmp_path, names)


@pytest.mark.slow
def test_in_backward(checkpoint, common, tmp_path):
    assert_curve_in_backward(
        common, {"all": [f"model.path={checkpoint}"]}, LAYOUTS, 4, tmp_path, {"all": ["tp x FSDP"]}
    )


@pytest.mark.weekly
def test_compiled(checkpoint, common, tmp_path):
    variants = {"all": [f"model.path={checkpoint}"], "recomputed": [f"model.path={checkpoint}", *FULL]}
    layouts = {
        "all blocks": [*LAYOUTS["tp x FSDP"], "compute.compile=true"],
        "one block": [*LAYOUTS["tp x FSDP"], "compute.compile=['*.1']"],
    }
    names = {"all": ["all blocks", "one block"], "recomputed": ["one block"]}
    assert_one_curve("full_finetune", common, variants, layouts, 4, tmp_path, names)


@pytest.mark.slow
def test_families(common, checkpoint, tmp_path):
    """Families that four processes shard unlike two; tests/distributed/test_families_in_layouts.py has every family."""
    pytest.importorskip("transformers")
    names = {"llama-multi-query": ["tp"], "gpt_oss": ["tp"], "qwen3_moe": ["tp x FSDP"], "qwen3_5_text": ["tp x FSDP"]}
    variants = {}
    for name in names:
        kind, changes = VARIANTS[name]
        save_checkpoint(tmp_path / name, kind, **SMALL | changes | {"vocab_size": 300})
        variants[name] = [f"model.path={tmp_path / name}"]
    assert_one_curve("full_finetune", common, variants, LAYOUTS, 4, tmp_path / "runs", names)


@pytest.mark.weekly
def test_adapters(wide, common, tmp_path):
    common = [*common, f"model.path={wide}"]
    variants = {
        "LoRA": LORA,
        "DoRA": [*LORA, "adapter.dora=true"],
        "PiSSA": ["adapter.rank=4", "adapter.init=pissa"],
        "NF4": [*LORA, *NF4],
        "NF4 with DoRA": [*LORA, *NF4, "adapter.dora=true"],
        "head and embedding": HEAD,
        "whole head and embedding": [*HEAD, *WHOLE_HEAD],
        "tokens": ["adapter.trainable_tokens=[2,30,7]", "adapter.modules_to_save=[norm]"],
    }
    names = {name: ["tp x HSDP"] for name in variants} | {"LoRA": ["tp x FSDP", "tp x HSDP"]}
    assert_one_curve("lora_finetune", common, variants, LAYOUTS, 4, tmp_path, names)
