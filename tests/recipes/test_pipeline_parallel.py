"""The loss curve is the same when processes are stages with some of the blocks (pipeline parallelism)."""

import functools
import itertools
import json

import pipeline_finetune
import pytest
import torch
from helpers import run_processes, save_checkpoint
from models.test_families import SMALL, VARIANTS
from recipes.test_tensor_parallel import LORA, NF4, RUN_VARIANTS, assert_one_curve, common, wide  # noqa: F401
from safetensors.torch import load_file

from tune import config

LAYOUTS = {
    "pp": ["parallel.pp=4", "micro_batch_size=1"],
    "gpipe x FSDP": ["parallel.pp=2", "parallel.pp_schedule=gpipe", "micro_batch_size=2"],
    "pp x FSDP": ["parallel.pp=2", "micro_batch_size=1"],
    "pp x HSDP": ["parallel.pp=2", "parallel.dp_replicate=2", "micro_batch_size=1"],
    "reduced once": ["parallel.pp=2", "parallel.reduce_every_micro_batch=false", "micro_batch_size=2"],
    "pp x tp": ["parallel.pp=2", "parallel.tp=2", "micro_batch_size=2"],
    "pp x cp": ["parallel.pp=2", "parallel.cp=2", "micro_batch_size=2"],
    "pp x ep": ["parallel.pp=2", "parallel.ep=2", "micro_batch_size=1"],
    "pp x ZeRO 0": ["parallel.pp=2", "parallel.zero_stage=0", "micro_batch_size=1"],
}  # fmt: skip
# Comparisons with the recipes without stages, on one process.
assert_curve_of_all = functools.partial(assert_one_curve, "pipeline_finetune", alone="full_finetune")
assert_curve_of_adapters = functools.partial(assert_one_curve, "pipeline_finetune", alone="lora_finetune")
FAMILIES = {"qwen3": ["pp"], "gemma3_text-scaled": ["pp x FSDP"], "qwen3_moe": ["pp", "pp x ep"]}


@pytest.mark.slow
def test_two_stages(checkpoint, tied_checkpoint, common, tmp_path):  # noqa: F811
    variants = {
        "packed": [f"model.path={checkpoint}", "loss.accuracy=true", "evaluate.every=2"],
        "tied": [f"model.path={tied_checkpoint}", "packed=false"],
    }
    alike = [{"prompt": f"the cat and the dog went {number % 3} ", "completion": f"{number}"} for number in range(24)]
    (tmp_path / "alike.jsonl").write_text("\n".join(map(json.dumps, alike)))
    # Rows with a common prefix, which is computed once.
    variants["alike"] = [f"model.path={tied_checkpoint}", f"dataset.path={tmp_path / 'alike.jsonl'}", "packed=false"]
    layouts = {"pp": ["parallel.pp=2", "micro_batch_size=1"], "pp of several": ["parallel.pp=2", "micro_batch_size=4"]}
    names = {"packed": ["pp"], "tied": ["pp"], "alike": ["pp of several"]}
    assert_curve_of_all(common, variants, layouts, 2, tmp_path, names)
    for name, (layout,) in names.items():
        files = (tmp_path / run / "model" / "model.safetensors" for run in (f"{name}, {layout}", f"alone/{name}"))
        torch.testing.assert_close(*map(load_file, files), rtol=1e-3, atol=2e-5)


@pytest.mark.weekly
def test_all_parameters(common, tmp_path):  # noqa: F811
    pytest.importorskip("transformers")
    plain = save_checkpoint(tmp_path / "llama", num_hidden_layers=5)
    tied = save_checkpoint(tmp_path / "tied", num_hidden_layers=4, tie_word_embeddings=True)
    variants = {
        "packed": [f"model.path={plain}"],
        "tied": [f"model.path={tied}", "packed=false"],
        "little memory": [f"model.path={tied}", "compute.activation_checkpointing=full", "compute.cpu_offload=true"],
    }
    names = {name: ["pp x FSDP"] for name in variants}
    names |= {
        "packed": [layout for layout in LAYOUTS if layout != "pp x ep"],
        "tied": ["pp x FSDP", "reduced once", "pp x ZeRO 0"],
    }
    for name, layouts in FAMILIES.items():
        kind, changes = VARIANTS[name]
        save_checkpoint(
            tmp_path / name, kind, **SMALL | changes | {"vocab_size": 300, "num_hidden_layers": 4, "layer_types": None}
        )
        router = ["model.router_loss=0.1"] if "moe" in name else []
        variants[name], names[name] = [f"model.path={tmp_path / name}", *router], layouts
    assert_curve_of_all(common, variants, LAYOUTS, 4, tmp_path / "runs", names)


SEVERAL_STAGES = {
    "pp": ["parallel.pp=4"],
    "pp x FSDP": ["parallel.pp=2", "parallel.pp_virtual=4"],
    "pp x ZeRO 1": ["parallel.pp=2", "parallel.zero_stage=1"],
    "pp x ZeRO 0": ["parallel.pp=2", "parallel.zero_stage=0"],
    "pp x tp": ["parallel.pp=2", "parallel.tp=2"],
    "pp x cp": ["parallel.pp=2", "parallel.cp=2"],
    "pp x ep": ["parallel.pp=2", "parallel.ep=2"],
}


@pytest.mark.weekly
@pytest.mark.parametrize("schedule", ["interleaved", "zero_bubble"])
def test_several_stages_per_process(schedule, common, tmp_path):  # noqa: F811
    common = [*common, "micro_batch_size=1"]
    layouts = {name: [*layout, f"parallel.pp_schedule={schedule}"] for name, layout in SEVERAL_STAGES.items()}
    kind, changes = VARIANTS["qwen3_moe"]
    deep = {"vocab_size": 300, "num_hidden_layers": 8, "layer_types": None}
    save_checkpoint(tmp_path / "experts", kind, **SMALL | changes | deep)
    save_checkpoint(tmp_path / "tied", num_hidden_layers=8, hidden_size=32, tie_word_embeddings=True)
    variants = {
        "tied": [f"model.path={tmp_path / 'tied'}", "evaluate.every=2", "packed=false"],
        "experts": [f"model.path={tmp_path / 'experts'}", "model.router_loss=0.1"],
        "recomputed": [f"model.path={tmp_path / 'tied'}", "compute.activation_checkpointing=full"],
    }
    names = {"tied": ["pp", "pp x FSDP", "pp x tp"], "experts": ["pp x ep"], "recomputed": ["pp"]}
    if schedule == "zero_bubble":  # splits the backward pass in two
        names["tied"] = [*SEVERAL_STAGES][:-1]
    assert_curve_of_all(common, variants, layouts, 4, tmp_path / "runs", names)
    saved = (tmp_path / "runs" / run / "model" / "model.safetensors" for run in ("tied, pp", "alone/tied"))
    torch.testing.assert_close(*map(load_file, saved), rtol=1e-3, atol=2e-5)
    variants = {"LoRA": [f"model.path={tmp_path / 'tied'}", *LORA]}
    assert_curve_of_adapters(common, variants, layouts, 4, tmp_path / "adapted", {"LoRA": ["pp x FSDP"]})


def measured(run):
    """Return the losses and gradient norms of each step, and the validation losses."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line[name] for line in lines for name in ("loss", "grad_norm", "validation_loss") if name in line]


@pytest.mark.weekly
def test_resume(common, told_to, tmp_path):  # noqa: F811
    """Resume bitwise on the same stages, from one schedule to the next, compiled, and without stages."""
    model = save_checkpoint(tmp_path / "tied", num_hidden_layers=4, tie_word_embeddings=True)
    stages, fsdp = ["parallel.pp=2", "micro_batch_size=1"], ["micro_batch_size=2"]
    schedules = {
        schedule: [*stages, f"parallel.pp_schedule={schedule}"] for schedule in ("gpipe", "interleaved", "zero_bubble")
    }
    ways = {"whole": stages, **schedules, "FSDP": fsdp, "stages once more": stages}
    common = [*common, f"model.path={model}", "max_steps=7", "checkpointer.every=1", "checkpointer.keep=null"]
    common.append("optimizer.lr=5e-4")  # rules warn about higher rates
    starts = {name: (before, step) for step, (before, name) in enumerate(itertools.pairwise(ways), 1)}
    ways |= {"stages": stages, "alone": fsdp, "compiled": [*schedules["interleaved"], "compute.compile=true"]}
    starts |= {"stages": ("whole", 3), "alone": ("zero_bubble", 4), "compiled": ("whole", 5)}
    resumed = {
        name: f"resume={tmp_path / before / 'checkpoints' / f'step-{step:08d}'}"
        for name, (before, step) in starts.items()
    }
    variants = {name: [*way, resumed.get(name, "resume=auto")] for name, way in ways.items() if name != "alone"}
    run_processes(RUN_VARIANTS, 2, "pipeline_finetune", str(tmp_path), json.dumps(common), json.dumps(variants))
    new = [*common, "parallel.pp=2", "micro_batch_size=1", f"output_dir={tmp_path / 'new'}"]
    assert told_to(2, *(["pipeline_finetune", *new, resume] for resume in resumed.values())) == [""] * len(resumed)
    alone = [*common, resumed["alone"], f"output_dir={tmp_path / 'alone'}"]
    pipeline_finetune.main(config.load("pipeline_finetune", alone))
    curves = {name: measured(tmp_path / name) for name in ways}
    assert curves["stages"] == curves["whole"][6:] and len(curves["whole"]) == 15
    for name, (before, step) in starts.items():
        rest = curves["whole"][2 * step :]
        assert curves[name] == pytest.approx(rest, rel=1e-5), name
        loss = curves[before][-len(rest)]
        assert curves[name][0] == pytest.approx(loss, rel=1e-6), name


@pytest.mark.weekly
def test_dropout_is_recomputed_with_the_keys_of_its_micro_batch(tied_checkpoint, common, tmp_path):  # noqa: F811
    full = "compute.activation_checkpointing=full"
    layouts = {
        "full": [full],
        "selective": ["compute.activation_checkpointing=selective"],
        "compiled": [full, "compute.compile=['*.1']"],
        "zero bubble": [full, "parallel.pp_schedule=zero_bubble"],
    }
    layouts = {name: ["parallel.pp=2", "micro_batch_size=1", *how] for name, how in layouts.items()}
    variants = {"LoRA": [f"model.path={tied_checkpoint}", *LORA, "optimizer.lr=1e-2"]}
    assert_curve_of_adapters(common, variants, layouts, 2, tmp_path)


@pytest.mark.weekly
def test_adapters(wide, common, tmp_path):  # noqa: F811
    variants = {
        "LoRA": [*LORA, "export.merge=true"],
        "NF4 with DoRA": [*LORA, *NF4, "adapter.dora=true"],
        "tokens": [
            "adapter.rank=4", "adapter.trainable_tokens=[2,30,7]", "adapter.modules_to_save=[norm]",
            "parameter_groups.lr_ratios={blocks.1: 2.0, lora_b: 4.0}",
        ],
    }  # fmt: skip
    names = {name: ["pp x FSDP"] for name in variants} | {"LoRA": ["pp x FSDP", "pp x tp"]}
    common = [*common, f"model.path={wide}"]
    assert_curve_of_adapters(common, variants, LAYOUTS, 4, tmp_path, names)
    for name in variants:
        for file in ("adapter/adapter_model.safetensors", *(["model/model.safetensors"] if name == "LoRA" else [])):
            one, other = (load_file(tmp_path / run / file) for run in (f"{name}, pp x FSDP", f"alone/{name}"))
            torch.testing.assert_close(one, other, rtol=1e-3, atol=2e-5)
        settings = [
            json.loads((tmp_path / run / "adapter/adapter_config.json").read_text())
            for run in (f"{name}, pp x FSDP", f"alone/{name}")
        ]
        assert settings[0] == settings[1]
