"""The loss curve is the same for all numbers of processes, meshes, micro-batches and memory settings."""

import json
from pathlib import Path

import pytest
from edited_recipes import run_edited
from helpers import curve_steps, run_processes

pytestmark = pytest.mark.slow

RUN_VARIANTS = Path(__file__).with_name("run_variants.py")


def layouts(processes):
    """Return layouts in which 1, 2 or 4 micro-batch rows, FSDP or HSDP, and packing occur in all pairs."""
    variants = {}
    for packed in (False, True):
        for micro in (1, 2, 4):
            replicas = 1 + (packed == (micro == 2)) if processes > 1 else 1
            variants[f"micro {micro}, replicas {replicas}, packed {packed}"] = [
                f"micro_batch_size={micro}", f"parallel.dp_replicate={replicas}", f"packed={packed}"
            ]  # fmt: skip
    return variants


WAYS = {  # each computes the same result in another way
    "qwen3, tied": ["model.path={tied}"],
    "full recomputation": ["compute.activation_checkpointing=full"],
    "selective recomputation": ["compute.activation_checkpointing=selective"],
    "parameters on the host": ["compute.cpu_offload=true"],
    "gradients reduced once": ["parallel.reduce_every_micro_batch=false"],
    "small loss chunks": ["loss.chunk_tokens=5"],
    "not fused": ["optimizer.fused=false"],
    "from random weights": ["edit=random"],
    "rounded weights": ["edit=int8"],
    "float8": ["model.float8=rowwise_with_gw_hp"],
}
ROUNDED = {"rounded weights", "float8"}


def curves(folder, common, variants, count):
    run_processes(RUN_VARIANTS, count, "full_finetune", str(folder), json.dumps(common), json.dumps(variants))
    return {name: losses(folder / name) for name in variants}


def losses(run):
    """Return the loss of each step, and the final validation loss."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    return [*(line["loss"] for line in lines), lines[-1]["validation_loss"]]


@pytest.fixture(scope="module")
def common(checkpoint, chats):
    return [
        f"model.path={checkpoint}", f"dataset.path={chats}", f"dataset.validation={{path: {chats}, take: 16}}",
        "max_seq_len=128", "global_batch_size=16", "micro_batch_size=2", "compute.dtype=fp32",
        "device=cpu", "optimizer.lr=1e-3", f"max_steps={curve_steps()}", "epochs=6", "checkpointer.every=null",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def alone(common, tied_checkpoint, tmp_path_factory):
    """Curves of one process, run in this one."""
    folder = tmp_path_factory.mktemp("alone")
    variants = layouts(1) | ways(tied_checkpoint)
    for name, overrides in variants.items():
        run_edited("full_finetune", [*common, *overrides, f"output_dir={folder / name}"])
    return {name: losses(folder / name) for name in variants}


def ways(tied_checkpoint):
    return {name: [override.format(tied=tied_checkpoint) for override in overrides] for name, overrides in WAYS.items()}


def assert_same_curve(curve, reference, within=1e-5):
    assert len(curve) == len(reference) == curve_steps() + 1
    assert curve == pytest.approx(reference, rel=within)


def test_one_process(alone):
    for packed in (False, True):
        reference = alone[f"micro 1, replicas 1, packed {packed}"]
        assert reference[-1] < reference[0] - 0.05
        for micro in (2, 4):
            assert_same_curve(alone[f"micro {micro}, replicas 1, packed {packed}"], reference)
    reference = alone["micro 1, replicas 1, packed False"]
    for name in WAYS.keys() - {"qwen3, tied", "from random weights", *ROUNDED}:
        assert_same_curve(alone[name], reference)


@pytest.mark.parametrize("count", [2, 4])
def test_many_processes(count, alone, common, tied_checkpoint, tmp_path):
    variants = layouts(count) | (ways(tied_checkpoint) if count == 2 else {})
    for name, curve in curves(tmp_path, common, variants, count).items():
        packed = "packed True" in name
        reference = alone[name] if name in WAYS else alone[f"micro 1, replicas 1, packed {packed}"]
        # A value halfway between two codes may be rounded either way.
        assert_same_curve(curve, reference, within=1e-3 if name in ROUNDED else 1e-5)
