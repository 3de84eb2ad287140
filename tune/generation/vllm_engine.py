"""Sampling by vLLM, which is installed beside `tune`."""

import os
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any, Literal

from tune.checkpointers import hf_tensors
from tune.errors import TuneError
from tune.generation.sampler import GenerativeModel, SampledRow, Sampler
from tune.types import PositiveInt, Share


@dataclass(frozen=True, kw_only=True)
class VLLM(Sampler):
    """A `Sampler` that has vLLM do the work, for models and GPUs that it has:

        sampling={_component_: tune.generation.VLLM, path: ./Qwen3-8B, max_new_tokens: 4096, memory: 0.4}

    Each process has an engine of its own, which takes the share `memory` of its device for the whole run and holds a
    second copy of the model, in `dtype`; `path` is a folder with the model's config.json and tokenizer. Before each
    rollout the weights are handed over, adapters merged. At most `max_rows` completions are computed at a time, and
    `max_len` tokens are the most of a prompt and its completion (null: as many as the model takes).

    The seed of a completion is a function of seed, step, prompt and sample, but rounding is that of vLLM's kernels: the
    loss has to correct for `mismatch_kl`.

    Raises:
        TuneError: vLLM is not installed, or what is sampled would not be what the loss takes it for.
    """

    path: str
    dtype: Literal["bf16", "fp32"] = "bf16"
    memory: Share = 0.4
    max_len: PositiveInt | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if find_spec("vllm") is None:
            raise TuneError("vLLM is not installed: pip install vllm, or leave sampling._component_ out")
        if set_ := [name for name in ("top_k", "top_p", "min_p") if getattr(self, name) is not None]:
            raise TuneError(f"{set_[0]}: vLLM's log-probs are those of what it keeps. Leave it out, or take Sampler")

    def complete(self, model: GenerativeModel, rows: list[SampledRow]) -> None:
        """See `Sampler`."""
        from vllm import SamplingParams

        engine = _engine(self.path, self.dtype, self.memory, self.max_len, self.max_rows)
        engine.apply_model(lambda theirs: len(theirs.load_weights(hf_tensors(model))))  # in this process
        engine.reset_prefix_cache()
        settings = [
            SamplingParams(
                temperature=self.temperature, max_tokens=self.max_new_tokens, logprobs=0, ignore_eos=True,
                stop_token_ids=[*self.stop_ids], stop=[*self.stop_strings], detokenize=bool(self.stop_strings),
                seed=int(next(row.uniforms) * 2**31),
            )
            for row in rows
        ]  # fmt: skip
        asked = [{"prompt_token_ids": [*row.prompt]} for row in rows]
        outputs = engine.generate(asked, settings, use_tqdm=False) if asked else []
        for row, output in zip(rows, outputs, strict=True):
            found, completion = output.outputs[0], row.completion
            completion.tokens = [*found.token_ids]
            completion.log_probs = [
                each[token].logprob for token, each in zip(found.token_ids, found.logprobs, strict=True)
            ]
            completion.finish = "stop" if found.finish_reason == "stop" else "length"


@cache
def _engine(path: str, dtype: str, memory: float, max_len: int | None, max_rows: int) -> Any:
    from vllm import LLM

    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # in this process, where the weights are
    return LLM(
        model=path, load_format="dummy", dtype={"bf16": "bfloat16", "fp32": "float32"}[dtype],
        distributed_executor_backend="external_launcher" if "RANK" in os.environ else "uni",
        gpu_memory_utilization=memory, max_model_len=max_len, max_num_seqs=max_rows,
        logprobs_mode="processed_logprobs",  # those at the temperature
    )  # fmt: skip
