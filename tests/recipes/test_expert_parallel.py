"""The loss curve is the same when each process has some of the experts (expert parallelism)."""

import json

import grpo
import pytest
import torch
from helpers import run_processes, save_checkpoint
from models.test_families import SMALL, VARIANTS
from recipes.test_grpo import assert_same_run, requests, settings_of  # noqa: F401
from recipes.test_tensor_parallel import (
    ADAFACTOR,
    LORA,
    NF4,
    RUN_VARIANTS,
    assert_curve_in_backward,
    assert_one_curve,
    common,  # noqa: F401
)
from safetensors.torch import load_file

from recipes import test_grpo

EIGHT = {"num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8}
LAYOUTS = {
    "ep": ["parallel.ep=4", "micro_batch_size=2"],
    "ep x FSDP": ["parallel.ep=2", "micro_batch_size=2"],
    "ep x cp": ["parallel.ep=2", "parallel.cp=2", "micro_batch_size=2"],
    "ep x HSDP": ["parallel.ep=2", "parallel.dp_replicate=2", "micro_batch_size=2"],
    "ep x tp": ["parallel.ep=2", "parallel.tp=2", "micro_batch_size=2"],
}
ADAPTER = [*LORA, "adapter.target_modules='.*(q_proj|experts.*)'"]


def of_family(name, folder, **others):
    pytest.importorskip("transformers")
    kind, changes = VARIANTS[name]
    counts = {field: count for field, count in EIGHT.items() if field in changes}
    shape = {"vocab_size": 300, "num_hidden_layers": 2} | others
    save_checkpoint(folder / name, kind, **SMALL | changes | counts | shape)
    return f"model.path={folder / name}"


def lines(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.weekly
def test_two_processes_share_the_experts(chats, common, tmp_path):  # noqa: F811
    (tmp_path / "prompts.txt").write_text("the cat\na big dog\nit\n")
    prompts = [f"evaluate.prompts={tmp_path / 'prompts.txt'}", "evaluate.max_new_tokens=5"]
    variants = {
        "all": [of_family("qwen3_moe", tmp_path), "model.router_loss=0.1", f"evaluate.general={chats}", *prompts]
    }
    layouts = {
        "ep": ["parallel.ep=2", "micro_batch_size=2"],
        "recomputed": ["parallel.ep=2", "micro_batch_size=1", "compute.activation_checkpointing=selective"],
        "compiled": [
            "parallel.ep=2",
            "micro_batch_size=2",
            "compute.compile=true",
            "compute.activation_checkpointing=full",
        ],
    }
    assert_one_curve("full_finetune", common, variants, layouts, 2, tmp_path)
    ours, alone = (tmp_path / run for run in ("all, ep", "alone/all"))
    torch.testing.assert_close(
        *(load_file(run / "model" / "model.safetensors") for run in (ours, alone)), rtol=1e-3, atol=2e-5
    )
    answers, expected = (lines(run / "samples.jsonl") for run in (ours, alone))
    assert len(answers) == 6 and answers == expected


@pytest.mark.weekly(but_one=True)
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_families(name, common, tmp_path):  # noqa: F811
    variants = {name: [of_family(name, tmp_path)]}
    few = ("ep x FSDP", "ep x HSDP", "ep x tp") if name == "mixtral" else ("ep x FSDP",)
    layouts = {layout: LAYOUTS[layout] for layout in few}
    assert_one_curve("full_finetune", common, variants, layouts, 4, tmp_path / "runs")


@pytest.mark.weekly
def test_training_settings(common, tmp_path):  # noqa: F811
    model = of_family("qwen3_moe", tmp_path)
    variants = {
        "plain": ["packed=false"],
        "from random weights": ["edit=random"],
        "recomputed": ["compute.activation_checkpointing=full"],
        "on the host": ["compute.cpu_offload=true"],
        "reduced once": ["parallel.reduce_every_micro_batch=false"],
        "Adafactor": ADAFACTOR,
        "Muon": ["optimizer._component_=tune.optimizers.Muon", "optimizer.lr=2e-5"],  # Muon multiplies in bf16
    }
    variants = {name: [model, "model.router_loss=0.1", *settings] for name, settings in variants.items()}
    (tmp_path / "few").mkdir()
    few = of_family("mixtral", tmp_path / "few", num_local_experts=2)
    variants["fewer experts than devices"] = [few]
    layouts = {"ep x FSDP": LAYOUTS["ep x FSDP"]}
    assert_one_curve("full_finetune", common, variants, layouts, 4, tmp_path / "runs")
    variants = {"in backward": [model, "model.router_loss=0.1"]}
    assert_curve_in_backward(common, variants, layouts, 4, tmp_path / "in backward")


@pytest.mark.weekly
def test_adapters(common, tmp_path):  # noqa: F811
    model = of_family("qwen3_moe", tmp_path, head_dim=16)
    variants = {
        "LoRA": [model, *ADAPTER],
        "LoRA on transposed experts": [of_family("gpt_oss", tmp_path), *ADAPTER],
        "NF4, DoRA": [model, *LORA, *NF4, "adapter.dora=true"],
    }
    layouts = {name: ["ep", "ep x cp", "ep x tp"] for name in variants}
    layouts["NF4, DoRA"].remove("ep x tp")  # the rows are too short to be split into NF4 blocks
    assert_one_curve("lora_finetune", common, variants, LAYOUTS, 4, tmp_path / "runs", layouts)


@pytest.mark.slow
def test_dense_teacher(common, tmp_path):  # noqa: F811
    save_checkpoint(tmp_path / "dense", **SMALL | {"vocab_size": 300})
    variants = {"dense": [of_family("qwen3_moe", tmp_path), f"teacher.path={tmp_path / 'dense'}"]}
    assert_one_curve("distill", common, variants, {"ep": ["parallel.ep=2", "micro_batch_size=4"]}, 2, tmp_path)


@pytest.mark.slow
def test_samples_are_the_same(run_recipe, requests, tmp_path):  # noqa: F811
    """Processes have different prompts, whose completions end at different times."""
    path = of_family("qwen3_moe", tmp_path).partition("=")[2]
    settings = [*settings_of(path, requests), *test_grpo.SMALL]
    assert run_recipe([*settings, f"output_dir={tmp_path / 'alone'}"], grpo) == 0
    run_processes(RUN_VARIANTS, 2, "grpo", str(tmp_path), json.dumps(settings), json.dumps({"ep": ["parallel.ep=2"]}))
    assert_same_run(tmp_path / "ep", tmp_path / "alone")
