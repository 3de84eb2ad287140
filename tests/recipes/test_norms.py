"""Gradient norms on two processes match one process: methods x layouts x ZeRO stages, with the update after
the backward pass or in it."""

import json

import pytest
from helpers import run_processes, save_checkpoint
from recipes.test_tensor_parallel import RUN_VARIANTS
from update_in_backward import in_backward

METHODS = {
    "full_finetune": {"all": []},
    "lora_finetune": {
        "adapters": ["adapter.rank=4", "adapter.target_modules='.*(q_proj|experts.*)'"],
        "DoRA": ["adapter.rank=4", "adapter.dora=true"],
    },
    "preference_finetune": {"DPO": ["adapter.rank=4", "reference=adapter_off"]},
    "reward_finetune": {"scores": []},
    "distill": {"reverse": ["loss._component_=tune.losses.ReverseKL"]},
}
AXES = {"dp": []} | {axis: [f"parallel.{axis}=2"] for axis in ("cp", "tp", "ep")}
LAYOUTS = {
    f"{axis}, ZeRO {stage}": [*settings, f"parallel.zero_stage={stage}"]
    for axis, settings in AXES.items()
    for stage in range(4)
}
ALTERNATING = [*LAYOUTS][:4:2] + [*LAYOUTS][5:8:2] + [*LAYOUTS][8:12:2] + [*LAYOUTS][13::2]  # each axis, each stage
ROWS = 4


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """A mixture-of-experts model whose experts are all used in a step."""
    return save_checkpoint(
        tmp_path_factory.mktemp("mixture"), "Qwen3MoeConfig", num_experts=4, num_experts_per_tok=2, head_dim=16,
        moe_intermediate_size=32, num_hidden_layers=2,
    )  # fmt: skip


def norms_of(run):
    return [json.loads(line)["grad_norm"] for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def assert_norms(mixture, checkpoint, chats, pairs, tmp_path):
    def assert_norms(recipe, layouts, moments):
        data = pairs if recipe in ("preference_finetune", "reward_finetune") else chats
        common = [
            f"model.path={mixture}", "model.router_loss=0.5", f"dataset.path={data}", "max_seq_len=128",
            "device=cpu", "compute.dtype=fp32", f"global_batch_size={ROWS}", "max_steps=2",
            "optimizer.lr=1e-3", "schedule.warmup=0", "checkpointer.every=null",
        ]  # fmt: skip
        common += [f"teacher.path={checkpoint}", "teacher.dtype=fp32"] * (recipe == "distill")
        alone = {name: [*settings, f"micro_batch_size={ROWS}"] for name, settings in METHODS[recipe].items()}
        shared = {
            f"{name}, {layout}": [
                *settings, *LAYOUTS[layout],
                f"micro_batch_size={ROWS if layout.startswith(('cp', 'tp')) else ROWS // 2}",
            ]
            for name, settings in METHODS[recipe].items() for layout in layouts
        }  # fmt: skip
        after = [*common, "max_grad_norm=null"]
        run_processes(RUN_VARIANTS, 1, recipe, str(tmp_path / "alone"), json.dumps(after), json.dumps(alone))
        for moment in moments:
            script, run_settings = (recipe, after) if moment == "after" else (in_backward(recipe, tmp_path), common)
            run_processes(RUN_VARIANTS, 2, script, str(tmp_path / moment), json.dumps(run_settings), json.dumps(shared))
            for run in shared:
                expected = norms_of(tmp_path / "alone" / run.partition(",")[0])
                assert norms_of(tmp_path / moment / run) == pytest.approx(expected, rel=2e-5), (recipe, run, moment)
                assert len(set(expected)) == 2 and min(expected) > 1e-3

    return assert_norms


@pytest.mark.slow
def test_norms_in_backward(assert_norms):
    assert_norms("full_finetune", ["cp, ZeRO 0", "ep, ZeRO 0"], ["in"])


@pytest.mark.weekly
@pytest.mark.parametrize("recipe", METHODS)
def test_norms(recipe, assert_norms):
    if recipe == "full_finetune":
        assert_norms(recipe, LAYOUTS, ["after", "in"])
    else:
        assert_norms(recipe, ALTERNATING, ["in"])
