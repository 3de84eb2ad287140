"""vLLM as the rollout engine, with a transformers stand-in for it: weights, samples and errors."""

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import grpo
import packed_checkpoints
import pytest
import torch
from recipes.test_grpo import requests, settings_of  # noqa: F401
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from tune import distributed, peft
from tune.checkpointers import load_model
from tune.errors import TuneError
from tune.generation import VLLM, Sampler, vllm_engine

PROMPTS = [[5, 6, 7], [9, 8]]


@pytest.fixture
def vllm(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).with_name("engines"))
    import vllm

    yield vllm
    vllm_engine._engine.cache_clear()
    del sys.modules["vllm"]


def test_engine_has_the_current_weights_with_the_adapter_merged(vllm, checkpoint):
    model = load_model(str(checkpoint))
    lora = peft.LoRA(rank=4)
    peft.add_adapters(model, lora)
    peft.load_or_initialize(model, lora, 0)
    common = {"max_new_tokens": 8, "stop_ids": [2]}
    sampler, engine = Sampler(**common, temperature=0), VLLM(**common, path=str(checkpoint), dtype="fp32")
    log_probs = []
    for _ in range(2):
        (expected, other), (mine, another) = sampler(model, PROMPTS), replace(engine, temperature=0)(model, PROMPTS)
        for ours, theirs in zip(expected + other, mine + another, strict=True):
            assert (ours.tokens, ours.finish) == (theirs.tokens, theirs.finish)
            assert ours.log_probs == pytest.approx(theirs.log_probs, abs=1e-5)
        log_probs.append(expected[0].log_probs)
        for name, parameter in model.named_parameters():
            if "lora_b" in name:
                parameter.data += 0.02
    assert log_probs[0] != pytest.approx(log_probs[1], abs=1e-3)
    (theirs,) = vllm.ENGINES  # one for all rollouts
    assert theirs.settings["logprobs_mode"] == "processed_logprobs" and theirs.settings["dtype"] == "float32"


def test_samples_do_not_depend_on_the_process(vllm, checkpoint):
    model = load_model(str(checkpoint))
    engine = VLLM(max_new_tokens=6, path=str(checkpoint), temperature=1.5)
    both = engine(model, PROMPTS, samples=3, step=2)
    assert engine(model, PROMPTS[1:], samples=3, step=2, indices=[1]) == both[1:]
    assert engine(model, PROMPTS[1:], samples=3, step=3, indices=[1]) != both[1:]
    assert len({tuple(completion.tokens) for group in both for completion in group}) == 6
    assert engine(model, []) == []
    params = vllm.ENGINES[0].sampling_params[0]
    assert len({item.seed for item in params}) == 6 and all(item.ignore_eos and item.logprobs == 0 for item in params)


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [pytest.param([], marks=pytest.mark.slow), ["adapter.rank=4"]])
def test_training_on_samples_of_vllm(vllm, adapter, run_recipe, checkpoint, requests, tmp_path):  # noqa: F811
    own = [f"output_dir={tmp_path / 'run'}", f"sampling.path={checkpoint}", "sampling._component_=tune.generation.VLLM"]
    settings = [*settings_of(checkpoint, requests), *own, *adapter, "sampling.dtype=fp32", "sampling.temperature=0.8"]
    assert run_recipe([*settings, f"dataset.validation={requests}", "evaluate.first=true"], grpo) == 0
    first, *steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert "validation_reward" in first and len(steps) == 3
    assert all(step["mismatch_kl"] < 1e-8 for step in steps)  # sampling and training use the same weights
    assert len(vllm.ENGINES) == 1


def test_offloaded_weights_are_used_on_their_device(monkeypatch):
    """With compute.cpu_offload they are in host memory when a rollout starts."""
    distributed.init("cpu")
    mesh = DeviceMesh("cpu", [0], _init_backend=False)
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(DTensor.from_local(torch.ones(2), mesh, [Shard(0)], run_check=False))
    mesh._device_type = "cuda"  # not available here
    assert vllm_engine._device_type(model) == "cuda" and model.weight.device.type == "cpu"
    assert vllm_engine._device_type(torch.nn.Linear(1, 1)) == "cpu"


def test_each_process_has_its_own_engine(vllm, checkpoint, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    VLLM(max_new_tokens=1, path=str(checkpoint))(load_model(str(checkpoint)), PROMPTS)
    assert vllm.ENGINES[0].settings["distributed_executor_backend"] == "external_launcher"


def test_without_vllm(checkpoint):
    with pytest.raises(TuneError, match="vLLM is not installed: pip install vllm"):
        VLLM(max_new_tokens=4, path=str(checkpoint))


def test_unsupported_top_p_is_refused(vllm, checkpoint):
    with pytest.raises(TuneError, match="top_p: vLLM"):
        VLLM(max_new_tokens=4, path=str(checkpoint), top_p=0.9)


def test_quantized_checkpoint_is_refused(vllm, checkpoint, tmp_path):
    folder = packed_checkpoints.fp8(shutil.copytree(checkpoint, tmp_path / "fp8"))
    with pytest.raises(TuneError, match="--to hf"):
        VLLM(max_new_tokens=6, path=str(folder))
