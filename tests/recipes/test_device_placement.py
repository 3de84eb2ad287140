"""A step of every recipe, with parameters and batch off the CPU: no tensor stays on the CPU.

The device is `meta`: it has shapes and dtypes but no values, and torch refuses operations across two devices.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from edited_recipes import run_edited
from evaluation.task_files import write_tasks
from flash_on_cpu import flash_path
from helpers import save_checkpoint
from models.test_attention import SCORINGS, make
from models.test_families import VARIANTS
from update_in_backward import in_backward

from tune import checkpointers, config, distributed
from tune.distributed.world import LATEST
from tune.models.attention import attend_cached, attend_masked
from tune.run import Run

RECIPES = config.list_recipes_with_settings()
FAMILIES = {name.partition("-")[0]: variant for name, variant in reversed(VARIANTS.items())}
META = torch.device("meta")
SETTINGS = {
    "full_finetune": {
        "bf16": ["compute.dtype=bf16", "compute.master_dtype=bf16"],
        "recomputed": ["compute.activation_checkpointing=selective"],
        "packed": ["packed=true"],
        "random": ["edit=random"],
        "rounded": ["edit=int4"],
        "float8": ["model.float8=tensorwise"],
        "transformers": ["model._component_=tune.models.hf"],
        "SGD": ["optimizer._component_=torch.optim.SGD"],
        "Adafactor": ["optimizer._component_=tune.optimizers.Adafactor"],
        "Muon": ["optimizer._component_=tune.optimizers.Muon"],
        "tasks": ["evaluate.tasks=[choice,rolling,answer]", "evaluate.include_path=TASKS", "evaluate.every=1"],
    },
    "evaluate": {
        "tasks": ["tasks=[choice,rolling,answer]", "include_path=TASKS"],
        "loss": ["dataset.path=ROWS"],
        "answers": ["dataset.path=ROWS", "score=tune.evaluation.exact_match", "generation.max_new_tokens=3"],
    },
    "lora_finetune": {
        "dropout": ["adapter.dropout=0.1"],
        "dropout, recomputed": ["adapter.dropout=0.1", "compute.activation_checkpointing=full"],
        "DoRA": ["adapter.dora=true", "adapter.dropout=0.1"],
        "PiSSA": ["adapter.init=pissa"],
        "tokens": ["adapter.trainable_tokens=[2,30,7]"],
        "head and embedding": ["adapter.target_modules=[lm_head,embed_tokens]", "adapter.dropout=0.1"],
        "trained whole": ["adapter.modules_to_save=[norm,embed_tokens,lm_head]"],
        "NF4": ["model.quantization=nf4", "adapter.dropout=0.1"],
        "NF4, one scale": ["model.quantization=nf4", "model.double_quantization=false"],
        "transformers": ["model._component_=tune.models.hf", "adapter.dropout=0.1"],
        "float8, DoRA": ["model.float8=rowwise", "adapter.dora=true"],
        "rounded, DoRA": ["edit=fp8", "adapter.dora=true"],
        "NF4, DoRA": ["model.quantization=nf4", "adapter.dora=true", "adapter.dropout=0.1"],
    },
    "pipeline_finetune": {
        "one stage": [],
        "one stage, an adapter": ["adapter={_component_: tune.peft.adapter, dropout: 0.1}", "model.quantization=nf4"],
    },
    "distill": {
        "forward KL": ["teacher.path=${model.path}"],
        "mixed": ["teacher.path=${model.path}", "loss.cross_entropy=0.5", "loss.temperature=2"],
        "reverse KL": ["teacher.path=${model.path}", "loss._component_=tune.losses.ReverseKL", "packed=true"],
        "adapter, Jensen-Shannon": [
            "teacher.path=${model.path}",
            "loss._component_=tune.losses.JensenShannon",
            "adapter.dropout=0.1",
        ],
        "stored": ["teacher.path=${model.path}", "teacher.top_k=5"],
        "on policy": ["teacher.path=${model.path}", "on_policy.share=1", "on_policy.max_new_tokens=2"],
        "NF4": ["teacher.path=${model.path}", "teacher.quantization=nf4", "teacher.dtype=fp32"],
    },
    "grpo": {
        "kl": ["adapter.rank=4", "kl=0.1", "reference=adapter_off"],
        "GSPO": ["loss._component_=tune.losses.GSPO"],
    },
    "ppo_finetune": {
        "all": [],
        "adapter off": ["adapter.rank=4", "reference=adapter_off"],
    },
    "preference_finetune": {
        "DPO": [],
        "KTO": ["loss._component_=tune.losses.KTO", "dataset.kind=labelled"],
        "ORPO, packed": ["loss._component_=tune.losses.ORPO", "packed=true"],
        "adapter off": ["adapter={_component_: tune.peft.adapter, dropout: 0.1}", "reference=adapter_off"],
    },
    "reward_finetune": {
        "all parameters": [],
        "bf16, packed": ["compute.dtype=bf16", "compute.master_dtype=bf16", "packed=true"],
        "Muon": ["optimizer._component_=tune.optimizers.Muon"],
        "an adapter": ["adapter={_component_: tune.peft.adapter, dropout: 0.1}", "model.quantization=nf4"],
    },
}


class SteppedError(Exception):
    """Raised at the end of a step."""


@pytest.fixture
def step(chats, tmp_path, monkeypatch):
    """Function that runs a recipe on the meta device to the end of its first step, including validation."""
    init = distributed.init

    def stepped(*arguments, **keywords):
        raise SteppedError

    def on_meta(*_, **__):
        world = replace(init("cpu"), device=META)
        monkeypatch.setitem(LATEST, torch.distributed.group.WORLD, world)  # as `current_world` returns it
        return world

    monkeypatch.setattr(distributed, "init", on_meta)
    monkeypatch.setattr(Run, "log", stepped)
    monkeypatch.setattr(distributed.World, "finish", stepped)  # for recipes without steps
    monkeypatch.setattr(checkpointers.Checkpointer, "save", lambda *_, **__: None)  # meta tensors have no values
    monkeypatch.setattr(checkpointers.Checkpointer, "wait", lambda _: None)
    to_fp64 = distributed.World._fp64
    monkeypatch.setattr(distributed.World, "_fp64", lambda world, value: to_fp64(world, ones_if_meta(value)))
    for conversion in ("__bool__", "item", "cpu"):
        convert = getattr(torch.Tensor, conversion)
        monkeypatch.setattr(torch.Tensor, conversion, lambda tensor, convert=convert: convert(ones_if_meta(tensor)))

    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(chats.read_text().splitlines(keepends=True)[:4]))
    pair = {"instruction": "Hi?", "chosen": "Yes.", "rejected": "No, never."}
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text("".join(json.dumps({**pair, "instruction": f"Hi {number}?"}) + "\n" for number in range(4)))

    def run(recipe, folder, *settings):
        places = {"TASKS": write_tasks(tmp_path), "ROWS": rows} if recipe in ("evaluate", "full_finetune") else {}
        for name, place in places.items():
            settings = [setting.replace(f"={name}", f"={place}") for setting in settings]
        if recipe == "evaluate":
            with pytest.raises(SteppedError):
                run_edited(recipe, [f"model.path={folder}", *settings])
            return
        data = pairs if recipe in ("preference_finetune", "reward_finetune") else rows
        batches = ["max_seq_len=128", "global_batch_size=4"]
        if recipe in ("grpo", "ppo_finetune"):
            batches = ["reward=recipes.test_grpo.different", "sampling.max_new_tokens=3", "prompts_per_step=2"]
        overrides = [
            f"model.path={folder}", f"dataset.path={data}", f"dataset.validation={data}", *batches,
            "micro_batch_size=4", "compute.dtype=fp32", "evaluate.every=1", *settings,
            f"output_dir={tmp_path / 'run' / Path(recipe).stem}",
        ]  # fmt: skip
        if not any("tune.optimizers" in setting for setting in settings):
            overrides.append("optimizer.fused=false")
        with pytest.raises(SteppedError):
            run_edited(recipe, overrides)

    return run


def ones_if_meta(value):
    """Return ones on the CPU for a value that the host reads from the meta device."""
    return torch.ones_like(value, device="cpu") if isinstance(value, torch.Tensor) and value.is_meta else value


@pytest.mark.weekly
@pytest.mark.parametrize(  # one per kind of attention, experts and rotary embeddings
    "family",
    [
        *("llama", "gemma2", "gemma3_text", "cohere2", "exaone4", "ministral3", "phi3-longrope"),
        *("gpt_oss", "deepseek_v3", "minimax_m2", "granitemoehybrid", "qwen3_5_text"),
    ],
)
def test_every_family(family, step, tmp_path):
    config_class, changes = {**FAMILIES, **VARIANTS}[family]
    folder = save_checkpoint(tmp_path / "model", config_class, **{"pad_token_id": None} | changes)
    step("lora_finetune", folder, "adapter.rank=1", "adapter.dropout=0.1")
    with flash_path():
        step("full_finetune", folder)


# Each recipe with its first settings for each change, the others once a week.
SLOW = [pytest.param(recipe, next(iter(SETTINGS[recipe])), marks=pytest.mark.slow) for recipe in RECIPES]
WEEKLY = [
    pytest.param(recipe, name, marks=pytest.mark.weekly) for recipe in RECIPES for name in [*SETTINGS[recipe]][1:]
]


@pytest.mark.parametrize(("recipe", "name"), [*SLOW, *WEEKLY])
def test_settings(recipe, name, checkpoint, step):
    step(recipe, checkpoint, *SETTINGS[recipe][name])


@pytest.mark.slow
def test_in_backward(checkpoint, step, tmp_path):
    step(in_backward("full_finetune", tmp_path / "changed"), checkpoint)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_adapted_experts(family, step, tmp_path):
    config_class, changes = FAMILIES[family]
    folder = save_checkpoint(tmp_path / "model", config_class, **{"pad_token_id": None} | changes)
    step("lora_finetune", folder, "adapter.target_modules='.*experts.*'", "adapter.rank=1", "adapter.dropout=0.1")


@pytest.mark.parametrize("kind", SCORINGS)
def test_attention_of_compiled_blocks_and_generation(kind):
    """Run the attention paths that the recipes do not take here."""
    heads, documents = make()
    heads = [tensor.detach().to(META).requires_grad_() for tensor in heads]
    documents = replace(documents, ids=documents.ids.to(META))
    scoring = SCORINGS[kind]
    scoring = scoring if scoring.sinks is None else replace(scoring, sinks=scoring.sinks.to(META))
    attend_masked(*heads, documents, scoring).sum().backward()
    key, value = (tensor.transpose(1, 2) for tensor in heads[1:])
    attend_cached(heads[0][:, :1], key, value, torch.zeros(3, 1, 32, device=META), scoring)
