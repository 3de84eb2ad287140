"""The loss curve is the same for every ZeRO stage (0 to 3), which FSDP's processes shard between and within steps."""

import pytest
from recipes.test_tensor_parallel import (
    LORA,
    NF4,
    assert_curve_in_backward,
    assert_one_curve,
    common,  # noqa: F401
    wide,  # noqa: F401
)

from tune import distributed
from tune.errors import TuneError

STAGES = {f"ZeRO {stage}": [f"parallel.zero_stage={stage}", "micro_batch_size=1"] for stage in range(4)}
# ZeRO 1 is ZeRO 2 with one reduction per step, which is the default of pipelines; ZeRO 0 only replicates.
COMBINED = {
    f"{name}, ZeRO {stage}": [f"parallel.zero_stage={stage}", f"parallel.{name}=2", f"micro_batch_size={rows}"]
    for name, rows, stages in (("cp", 2, (0, 2)), ("tp", 2, (0, 1)), ("dp_replicate", 1, (1,)))
    for stage in stages
}


@pytest.mark.slow
def test_two_processes(checkpoint, common, tmp_path):  # noqa: F811
    variants = {"all": [f"model.path={checkpoint}", "evaluate.every=2"]}
    assert_one_curve(
        "full_finetune", common, variants, {name: STAGES[name] for name in ("ZeRO 0", "ZeRO 1")}, 2, tmp_path
    )


@pytest.mark.weekly
def test_invalid_stages_are_refused(told, checkpoint, chats):
    settings = [f"model.path={checkpoint}", f"dataset.path={chats}"]
    for value in ("5", "-1", "two", "true", "2.5", "[1]"):
        assert "is not one of 0, 1, 2, 3 or null" in told("full_finetune", [*settings, f"parallel.zero_stage={value}"])
    with pytest.raises(TuneError, match=r"parallel\.zero_stage: .* parallel\.pp=2.* Set it to 2 or less, or null"):
        distributed.init("cpu", pp=2, zero_stage=3)


@pytest.mark.weekly
def test_all_parameters(checkpoint, tied_checkpoint, common, tmp_path):  # noqa: F811
    variants = {
        "tied": [f"model.path={tied_checkpoint}", "packed=false", "evaluate.every=2"],
        "little memory": [
            f"model.path={checkpoint}", "compute.activation_checkpointing=full", "compute.cpu_offload=true"
        ],
        "reduced once": [f"model.path={checkpoint}", "parallel.reduce_every_micro_batch=false"],
    }  # fmt: skip
    names = {
        "tied": [*STAGES, *COMBINED],
        "little memory": ["ZeRO 0", "ZeRO 2"],
        "reduced once": ["ZeRO 0", "ZeRO 3"],
    }
    assert_one_curve("full_finetune", common, variants, STAGES | COMBINED, 4, tmp_path, names)


@pytest.mark.slow
def test_in_backward(checkpoint, common, tmp_path):  # noqa: F811
    whole = {name: [*STAGES[name][:-1], "micro_batch_size=2"] for name in ("ZeRO 0", "ZeRO 2")}
    assert_curve_in_backward(common, {"all": [f"model.path={checkpoint}"]}, whole, 4, tmp_path)


@pytest.mark.weekly
def test_adapters(wide, common, tmp_path):  # noqa: F811
    variants = {"LoRA": LORA, "QLoRA": [*LORA, *NF4], "DoRA": ["adapter.rank=4", "adapter.dora=true"]}
    common = [*common, f"model.path={wide}", "evaluate.every=2"]
    names = {"LoRA": [*STAGES], "QLoRA": ["ZeRO 0"], "DoRA": ["ZeRO 2"]}
    assert_one_curve("lora_finetune", common, variants, STAGES, 4, tmp_path, names)
