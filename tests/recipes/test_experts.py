"""Mixture-of-experts models have one curve in every layout and with every memory setting."""

import functools
import json
from pathlib import Path

import full_finetune
import pytest
from helpers import curve_steps, figures_of, run_processes, save_checkpoint, weekly_but

from tune import config

RUN_VARIANTS = Path(__file__).with_name("run_variants.py")
WAYS = {
    "unpacked": [],
    "packed": ["packed=true"],
    "packed, micro-batches of 4": ["packed=true", "micro_batch_size=4"],
    "full recomputation": ["compute.activation_checkpointing=full"],
    "selective recomputation": ["compute.activation_checkpointing=selective"],
    "parameters on the host": ["compute.cpu_offload=true"],
    "gradients reduced once": ["parallel.reduce_every_micro_batch=false"],
}
KEYS = ("loss", "grad_norm", "expert_load", "router_entropy", "router_loss")


@pytest.fixture(scope="module")
def common(chats, tmp_path_factory):
    folder = save_checkpoint(
        tmp_path_factory.mktemp("qwen3_moe"), "Qwen3MoeConfig", num_experts=6, num_experts_per_tok=2, head_dim=16,
        moe_intermediate_size=32, mlp_only_layers=[0], norm_topk_prob=True,
    )  # fmt: skip
    return [
        f"model.path={folder}", "model.router_loss=0.1", f"dataset.path={chats}", "max_seq_len=128",
        "global_batch_size=8", "micro_batch_size=2", "compute.dtype=fp32", "device=cpu", "optimizer.lr=1e-3",
        "epochs=6", f"max_steps={curve_steps()}", "checkpointer.every=null",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def alone(common, tmp_path_factory):
    """Function that returns the curves of a way in one process, run in this one."""
    folder = tmp_path_factory.mktemp("alone")

    @functools.cache
    def alone(way):
        full_finetune.main(config.load("full_finetune", [*common, *WAYS[way], f"output_dir={folder / way}"]))
        return curves(folder / way)

    return alone


def curves(run):
    figures = figures_of(run)
    assert {f"step {step}: {name}" for name in KEYS for step in range(1, curve_steps() + 1)} <= figures.keys()
    return figures


def assert_same_curves(ours, reference):
    assert ours == pytest.approx(reference, rel=1e-5)


@pytest.mark.weekly(but_one=True)
@pytest.mark.parametrize("way", weekly_but(["packed, micro-batches of 4", "selective recomputation"], [*WAYS][2:]))
def test_one_process(way, alone):
    assert_same_curves(alone(way), alone("packed" if way.startswith("packed") else "unpacked"))


@pytest.mark.slow
def test_half_precision(alone, common, tmp_path):
    full_finetune.main(config.load("full_finetune", [*common, "compute.dtype=bf16", f"output_dir={tmp_path}"]))
    rounded = curves(tmp_path)
    exact = {name: value for name, value in alone("unpacked").items() if name.endswith(KEYS)}
    assert {name: rounded[name] for name in exact} == pytest.approx(exact, rel=0.03)


@pytest.mark.slow
def test_two_processes(alone, common, tmp_path):
    shared = {"tokens shared": ["parallel.cp=2"], "heads shared": ["parallel.tp=2"]}
    variants = WAYS | shared
    run_processes(RUN_VARIANTS, 2, "full_finetune", str(tmp_path), json.dumps(common), json.dumps(variants))
    for name in variants:
        assert_same_curves(curves(tmp_path / name), alone("unpacked" if name in shared else name))
