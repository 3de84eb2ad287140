"""`tune plan`'s memory against torch's `FSDPMemTracker`, which follows the whole model, of any size and on any number
of processes, through `parallelize`, forward, loss and backward on fake tensors.

    python benchmarks/planned_memory.py [NAME ...]

Parameters in fp32, computation in bf16, kernels of an H100; weights, gradients and activations, without the states of
the optimizer.
"""

import json
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.testing._internal.distributed.fake_pg import FakeStore

from tune import config, distributed
from tune.collators import Batch
from tune.preflight.devices import DEVICES
from tune.preflight.memory import GIB, Layout
from tune.preflight.planning import Job
from tune.preflight.trace import _kernels

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "rms_norm_eps": 1e-5,
    "hidden_act": "silu", "rope_theta": 500000.0, "max_position_embeddings": 131072, "num_key_value_heads": 8,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "Llama-3.1-8B": LLAMA
    | {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    "Llama-3.1-70B": LLAMA
    | {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
    "Llama-3.1-405B": LLAMA
    | {"hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126, "num_attention_heads": 128},
    "Qwen3-30B-A3B": {
        "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 151936, "hidden_size": 2048,
        "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 48, "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
        "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "max_position_embeddings": 40960,
        "decoder_sparse_step": 1, "mlp_only_layers": [], "router_aux_loss_coef": 0.001,
    },
}  # fmt: skip
# (model, processes, rows, tokens of a row, activation checkpointing)
CASES = [
    ("Llama-3.1-8B", 8, 1, 4096, "none"),
    ("Llama-3.1-8B", 8, 1, 4096, "selective"),
    ("Llama-3.1-8B", 8, 2, 8192, "full"),
    ("Llama-3.1-8B", 64, 1, 2048, "full"),
    ("Llama-3.1-70B", 64, 1, 2048, "full"),
    ("Llama-3.1-70B", 128, 1, 4096, "selective"),
    ("Llama-3.1-405B", 256, 1, 4096, "full"),
    ("Llama-3.1-405B", 512, 1, 8192, "full"),
    ("Qwen3-30B-A3B", 64, 1, 1024, "full"),
    ("Qwen3-30B-A3B", 32, 1, 4096, "none"),
]


def tracked(cfg: Any, processes: int, rows: int, checkpointing: Any) -> float:
    """Bytes of a process at the peak of a forward and a backward, as the tracker counts them."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=processes)
    world = distributed.init("cpu")
    with torch.device("meta"):
        model = config.instantiate(cfg.model)
    loss_fn = config.instantiate(cfg.loss)
    ones = np.ones((1, rows * cfg.max_seq_len), dtype=np.int64)
    batch = Batch.of(ones, labels=ones, documents=np.arange(rows).repeat(cfg.max_seq_len)[None])
    distributed.parallelize(model, replace(world, device=torch.device("meta")), activation_checkpointing=checkpointing)
    with FakeTensorMode(allow_non_fake_inputs=True), _kernels(DEVICES["h100"]):
        model.to_empty(device="cpu")
        tracker = FSDPMemTracker(model)
        with tracker:
            model(batch, loss_fn).backward()
    (found,) = tracker.get_tracker_snapshot("peak").values()
    dist.destroy_process_group()
    return found["Total"]


def compare(folder: str, processes: int, rows: int, length: int, checkpointing: Any) -> tuple[float, float, str]:
    """Bytes at the peak as tracked and as planned, and the moment of the latter."""
    sizes = [f"max_seq_len={length}", f"global_batch_size={rows * processes}", f"micro_batch_size={rows}"]
    cfg = config.load("full_finetune", [f"model.path={folder}", "dataset.path=none", *sizes])
    job = Job(cfg, DEVICES["h100"])  # which also says how many tokens the loss takes at a time
    plan = job.plan(Layout(1, processes, 1, rows, checkpointing))
    planned = plan.peak - plan.memory["optimizer"] - plan.memory["reserve"]
    return tracked(cfg, processes, rows, checkpointing), planned, plan.moment


def main() -> None:
    errors = []
    for name, *case in CASES:
        if sys.argv[1:] and name not in sys.argv[1:]:
            continue
        started = time.process_time()
        with tempfile.TemporaryDirectory() as folder:
            described = {"tie_word_embeddings": False, "dtype": "bfloat16"} | MODELS[name]
            Path(folder, "config.json").write_text(json.dumps(described))
            found, planned, moment = compare(folder, *case)
        errors.append(abs(planned / found - 1))
        processes, rows, length, checkpointing = case
        print(
            f"| {name}, {processes}, {rows} x {length:,}, {checkpointing} | {found / GIB:.2f} | {planned / GIB:.2f} | "
            f"{planned / found - 1:+.1%} | {moment}, {time.process_time() - started:.0f} s of CPU",
            flush=True,
        )
    print(f"median error {statistics.median(errors):.1%}, worst {max(errors):.1%}")


if __name__ == "__main__":
    main()
