"""Training in fp16: the curve of fp32, steps whose gradients overflow, and the loss scale after a resume."""

import json

import full_finetune
import lora_finetune
import pytest
from helpers import slow_but

from tune.distributed import LossScale


def steps(run, name="loss"):
    return [json.loads(line).get(name) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def common(checkpoint, chats):
    return [
        f"model.path={checkpoint}", f"dataset.path={chats}", "max_seq_len=128", "device=cpu", "packed=true",
        "global_batch_size=4", "micro_batch_size=2", "epochs=9", "max_steps=4", "schedule.warmup=0",
        "optimizer.lr=1e-3", "schedule._component_=tune.optimizers.constant",
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("recipe", slow_but([full_finetune], [full_finetune, lora_finetune]))
def test_curve_follows_fp32(recipe, common, run_recipe, tmp_path):
    for dtype in ("fp16", "fp32"):
        assert run_recipe([*common, f"compute.dtype={dtype}", f"output_dir={tmp_path / dtype}"], recipe) == 0
    for name, within in (("loss", 1e-3), ("grad_norm", 1e-2)):
        values, expected = (steps(tmp_path / dtype, name) for dtype in ("fp16", "fp32"))
        assert values == pytest.approx(expected, rel=within) and values != expected


@pytest.mark.slow
def test_run_whose_steps_all_overflow_exports_nothing(common, run_recipe, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(LossScale, "INITIAL", 2.0**40)
    assert run_recipe([*common, "compute.dtype=fp16", f"output_dir={tmp_path / 'run'}"]) == 2
    shown = capsys.readouterr().err
    assert "no step changed the weights" in shown and f"{2**36:g}" in shown and not (tmp_path / "run/model").exists()


@pytest.mark.slow
def test_overflowing_step_is_skipped(common, run_recipe, tmp_path, monkeypatch):
    """The loss scale starts too high; a checkpoint restores it."""
    monkeypatch.setattr(LossScale, "INITIAL", 2.0**24)
    run = tmp_path / "run"
    settings = [*common, "compute.dtype=fp16", "checkpointer.every=1", "checkpointer.keep=null", "max_steps=8"]
    assert run_recipe([*settings, f"output_dir={run}"]) == 0
    log, norms = (run / "log.txt").read_text(), steps(run, "grad_norm")
    lost = [step for step, norm in enumerate(norms, 1) if norm is None]
    assert lost[0] == 1 and lost[-1] < 7 and None not in steps(run)
    assert f"({len(lost)} such steps so far). The loss scale is lowered to {2**24 >> len(lost):g}" in log
    assert steps(run)[-1] < steps(run)[0]
    again = tmp_path / "again"
    resume = f"resume={run}/checkpoints/step-{lost[-1]:08d}"
    assert run_recipe([*settings, resume, f"output_dir={again}"]) == 0
    assert steps(again) == steps(run)[lost[-1] :] and "such steps" not in (again / "log.txt").read_text()
