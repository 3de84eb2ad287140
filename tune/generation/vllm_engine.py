"""Sampling by vLLM, which is installed beside `tune`."""

import os
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from torch import nn
from torch.distributed.tensor import DTensor

from tune import rehearsal
from tune.checkpointers import hf_tensors, quantization
from tune.errors import TuneError
from tune.generation.sampler import GenerativeModel, SampledRow, Sampler
from tune.lookup import in_shell
from tune.types import Share


@dataclass(frozen=True, kw_only=True)
class VLLM(Sampler):
    """A `Sampler` that has vLLM do the work, for models and GPUs that it has:

        sampling={_component_: tune.generation.VLLM, path: ./Qwen3-8B, max_new_tokens: 4096, memory: 0.4}

    Each process has an engine with a copy of the model in `dtype`, which keeps the share `memory` of its device; `path`
    has the model's config.json and tokenizer. Before each rollout the weights are handed over, adapters merged.

    The seed of a completion is a function of seed, step, prompt and sample, but rounding is that of vLLM's kernels: the
    loss has to correct for `mismatch_kl`.

    Raises:
        TuneError: vLLM is not installed, or what is sampled would not be what the loss takes it for.
    """

    path: str
    dtype: Literal["bf16", "fp32"] = "bf16"
    memory: Share = 0.4

    def __post_init__(self) -> None:
        super().__post_init__()
        if find_spec("vllm") is None:
            raise TuneError("vLLM is not installed: pip install vllm, or leave sampling._component_ out")
        if quantization(Path(self.path)):
            raise TuneError(
                f"path: {self.path} is quantized, and so would be vLLM's copy, which takes plain weights. Make a plain "
                f"one: tune export {in_shell(self.path)} --to hf --out PLAIN"
            )
        if set_ := [name for name in ("top_k", "top_p", "min_p") if getattr(self, name) is not None]:
            raise TuneError(f"{set_[0]}: vLLM's log-probs are those of what it keeps. Leave it out, or take Sampler")

    def complete(self, model: GenerativeModel, rows: list[SampledRow]) -> None:
        """See `Sampler`."""
        if rehearsal.current():
            super().complete(model, rows)
            return
        from vllm import SamplingParams

        is_on_cpu = _device_type(model) == "cpu"
        engine = _engine(self.path, self.dtype, self.memory, self.max_len, self.max_rows, is_on_cpu)
        engine.collective_rpc("reload_weights", kwargs={"weights_iterator": hf_tensors(model)})  # in this process
        if is_on_cpu:
            engine.apply_model(_pack)
        engine.reset_prefix_cache()
        settings = [
            SamplingParams(
                temperature=self.temperature, max_tokens=self.max_new_tokens, logprobs=0, ignore_eos=True,
                stop_token_ids=[*self.stop_ids], stop=[*self.stop_strings], detokenize=bool(self.stop_strings),
                skip_special_tokens=False, seed=int(next(row.uniforms) * 2**31),
            )
            for row in rows
        ]  # fmt: skip
        asked = [{"prompt_token_ids": [*row.prompt]} for row in rows]
        outputs = engine.generate(asked, settings, use_tqdm=False) if asked else []
        for row, output in zip(rows, outputs, strict=True):
            found, completion = output.outputs[0], row.completion
            completion.tokens = [*found.token_ids]
            completion.log_probs = [found.logprobs[at][token].logprob for at, token in enumerate(found.token_ids)]
            completion.finish = "stop" if found.finish_reason == "stop" else "length"


def _device_type(model: nn.Module) -> str:
    """What it computes on: with memory.cpu_offload, weights are in host memory when a rollout starts."""
    weight = next(model.parameters())
    return weight.device_mesh.device_type if isinstance(weight, DTensor) else weight.device.type


@cache
def _engine(path: str, dtype: str, memory: float, max_len: int | None, max_rows: int, is_on_cpu: bool) -> Any:
    from vllm import LLM

    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # in this process, where the weights are
    engine = LLM(
        model=path, load_format="dummy", dtype={"bf16": "bfloat16", "fp32": "float32"}[dtype],
        distributed_executor_backend="external_launcher" if "RANK" in os.environ else "uni",
        gpu_memory_utilization=memory, max_model_len=max_len, max_num_seqs=max_rows,
        logprobs_mode="processed_logprobs",  # those at the temperature
        enforce_eager=is_on_cpu,  # compiled blocks keep packed copies of the first weights
    )  # fmt: skip
    if finalizer := getattr(engine.llm_engine.engine_core, "_finalizer", None):
        finalizer.atexit = False  # the process group has been left when it would leave it
    return engine


def _pack(model: Any) -> None:
    """On a CPU vLLM computes with packed copies; reloading leaves out experts, and a head that is the embedding."""
    for module in model.modules():
        if kernel := getattr(getattr(module, "quant_method", None), "moe_kernel", None):
            kernel.fused_experts.process_weights_after_loading(module)
        elif hasattr(module, "cpu_linear") and module.weight.numel():
            module.quant_method.process_weights_after_loading(module)
