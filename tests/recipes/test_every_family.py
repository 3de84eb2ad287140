"""The unchanged recipes train every family: on two processes as on one, and closely in bf16."""

import json
from pathlib import Path

import pytest
from helpers import curve_steps, run_processes, save_checkpoint
from models.test_families import VARIANTS
from recipes.run_variants import run_variants

RUN_VARIANTS = Path(__file__).with_name("run_variants.py")
FAMILIES = {name.partition("-")[0]: variant for name, variant in reversed(VARIANTS.items())}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A model per family, in the family's first variant."""
    folder = tmp_path_factory.mktemp("families")
    shared = {"pad_token_id": None}
    return {
        family: save_checkpoint(folder / family, config_class, **shared | changes)
        for family, (config_class, changes) in FAMILIES.items()
    }


@pytest.mark.weekly
@pytest.mark.parametrize(("recipe", "settings"), [("full_finetune", []), ("lora_finetune", ["adapter.rank=1"])])
def test_every_family(recipe, settings, checkpoints, chats, tmp_path):
    common = [
        *settings,
        f"dataset.path={chats}", "dataset.take=16", "max_seq_len=128", "global_batch_size=16", "micro_batch_size=8",
        "device=cpu", f"epochs={curve_steps()}", "optimizer.lr=1e-3", "schedule.warmup=0", "checkpointer.every=null",
        "schedule._component_=tune.optimizers.constant",
    ]  # fmt: skip
    families = [*checkpoints] if recipe == "full_finetune" else [*checkpoints][::4]
    variants = {family: [f"model.path={checkpoints[family]}"] for family in families}
    run_variants(recipe, tmp_path / "1", [*common, "compute.dtype=fp32"], variants)
    if recipe == "full_finetune":  # CPUs are several times slower in bf16
        run_variants(recipe, tmp_path / "bf16", [*common, "compute.dtype=bf16", "epochs=2"], variants)
    exact = json.dumps([*common, "compute.dtype=fp32"])
    run_processes(RUN_VARIANTS, 2, recipe, str(tmp_path / "2"), exact, json.dumps(variants))
    for family in variants:
        curve = losses(tmp_path / "1" / family)
        assert len(curve) == curve_steps() and curve[-1] < curve[0]
        assert losses(tmp_path / "2" / family) == pytest.approx(curve, rel=1e-5), family
        if recipe == "full_finetune":
            assert losses(tmp_path / "bf16" / family) == pytest.approx(curve[:2], rel=0.02), family


def losses(run):
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]
