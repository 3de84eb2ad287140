"""Sample with vLLM, which is installed separately."""

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
    """A `Sampler` that runs vLLM, for the models and GPUs that vLLM supports:

        sampling={_component_: tune.generation.VLLM, path: ./Qwen3-8B, max_new_tokens: 4096, memory: 0.4}

    Each process has an engine with a copy of the model in `dtype`, which uses the share `memory` of its device. `path`
    has the model's config.json and tokenizer. Before each rollout the engine receives the weights, with adapters
    merged.

    The seed of a completion is a function of seed, step, prompt and sample. Rounding follows vLLM's kernels, so the
    loss must correct for `mismatch_kl`.

    Raises:
        TuneError: vLLM is not installed, or settings would bias the log-probs that the loss uses.
    """

    path: str
    dtype: Literal["bf16", "fp32"] = "bf16"
    memory: Share = 0.4

    def __post_init__(self) -> None:
        super().__post_init__()
        if find_spec("vllm") is None:
            raise TuneError("vLLM is not installed: pip install vllm, or remove sampling._component_")
        if quantization(Path(self.path)):
            raise TuneError(
                f"path: {self.path} is quantized, but vLLM's copy must take plain weights. Create a plain checkpoint: "
                f"tune export {in_shell(self.path)} --to hf --out PLAIN"
            )
        if set_ := [name for name in ("top_k", "top_p", "min_p") if getattr(self, name) is not None]:
            raise TuneError(f"{set_[0]}: vLLM computes log-probs after this filter. Remove it, or use Sampler")

    def complete(self, model: GenerativeModel, rows: list[SampledRow]) -> None:
        """See `Sampler`."""
        if rehearsal.current():
            super().complete(model, rows)
            return
        from vllm import SamplingParams

        is_on_cpu = _device_type(model) == "cpu"
        engine = _engine(self.path, self.dtype, self.memory, self.max_len, self.max_rows, is_on_cpu)
        engine.collective_rpc("reload_weights", kwargs={"weights_iterator": hf_tensors(model)})  # not over the network
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
    """Return the device type that `model` computes on; with compute.cpu_offload its weights are on the host."""
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
        logprobs_mode="processed_logprobs",  # log-probs at the temperature
        enforce_eager=is_on_cpu,  # compiled blocks would keep packed copies of the initial weights
    )  # fmt: skip
    if finalizer := getattr(engine.llm_engine.engine_core, "_finalizer", None):
        finalizer.atexit = False  # it would leave the process group, which is already destroyed at exit
    return engine


def _pack(model: Any) -> None:
    """Update vLLM's packed copies of weights on a CPU; its reload skips experts and tied heads."""
    for module in model.modules():
        if kernel := getattr(getattr(module, "quant_method", None), "moe_kernel", None):
            kernel.fused_experts.process_weights_after_loading(module)
        elif hasattr(module, "cpu_linear") and module.weight.numel():
            module.quant_method.process_weights_after_loading(module)
