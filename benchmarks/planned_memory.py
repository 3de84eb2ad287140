"""Compare `tune plan`'s memory with torch's `FSDPMemTracker`, which tracks the whole model through `parallelize`,
forward, loss and backward on fake tensors, for any size and number of processes.

    python benchmarks/planned_memory.py [NAME ...]

Parameters are in fp32, computation in bf16, kernels as on an H100. Memory includes weights, gradients and activations,
but no optimizer states.
"""

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from tune import config, distributed, quantization
from tune.checkpointers import exported_types
from tune.collators import Batch
from tune.devices import DEVICES
from tune.distributed import pipeline as pipeline_parallel
from tune.plan import GIB
from tune.plan.planning import Job
from tune.plan.recording import meshes_of
from tune.plan.trace import Recorder, kernels

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
# (model, processes, rows, tokens of a row, activation checkpointing, other settings, without `parallel.`). With stages,
# the one with the most memory is measured, with one more micro-batch than it holds at a time; with a zero_stage, two.
CASES: list[tuple] = [
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
    ("Llama-3.1-8B", 8, 1, 4096, "none", {"tp": 2}),
    ("Llama-3.1-8B", 8, 1, 32768, "full", {"cp": 8}),
    ("Llama-3.1-8B", 16, 1, 8192, "selective", {"cp": 4, "tp": 2}),
    ("Llama-3.1-8B", 8, 1, 2048, "full", {"pp": 2}),
    ("Llama-3.1-70B", 64, 1, 4096, "full", {"pp": 4}),
    ("Llama-3.1-70B", 64, 1, 2048, "none", {"pp": 8, "tp": 4}),
    ("Llama-3.1-405B", 512, 1, 8192, "full", {"pp": 8, "tp": 8}),
    ("Qwen3-30B-A3B", 64, 1, 1024, "full", {"ep": 8}),
    ("Qwen3-30B-A3B", 32, 1, 4096, "none", {"ep": 32}),
    ("Qwen3-30B-A3B", 64, 1, 4096, "full", {"ep": 8, "cp": 2, "pp": 2}),
]


def first_shard(tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[slice, ...]]:
    """Replace `tune.distributed.local_shard`, which would read a mesh and so a fake tensor."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local, tuple(slice(0, size) for size in local.shape)


def tracked(cfg: Any, processes: int, rows: int, checkpointing: Any, more: dict[str, Any], stage: int = 0) -> float:
    """Return the tracker's bytes of a process at the peak of its forwards and backwards."""
    rank = stage * (processes // more.get("pp", 1))
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=processes)
    axes = {name: size for name, size in more.items() if "." not in name and name != "rounded"}
    world = distributed.init("cpu", **axes, max_seq_len=cfg.max_seq_len, reduce_every_micro_batch=True)
    with torch.device("meta"):
        model = config.instantiate({name: value for name, value in cfg.model.items() if name != "float8"})
    if scaling := cfg.model.get("float8"):  # not emulated, as on the device that is planned
        quantization.compute_in_float8(model, scaling, torch.device("cuda"))
    if "rounded" in more:
        types = exported_types(model, cfg.model.path, "bf16")
        quantization.round_linears(model, more["rounded"], types, cfg.compute.dtype)
    loss_fn = config.instantiate(cfg.loss)
    ones = np.ones((1, rows * cfg.max_seq_len), dtype=np.int64)
    batch = Batch.of(ones, labels=ones, documents=np.arange(rows).repeat(cfg.max_seq_len)[None])
    distributed.parallelize(model, world, activation_checkpointing=checkpointing)
    pipeline, times = distributed.Pipeline(model, world), cfg.global_batch_size // world.data_size // rows
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        kernels(DEVICES["h100"], Recorder(DEVICES["h100"], "bf16", False), checkpointing),
        mock.patch.object(pipeline_parallel, "local_shard", first_shard),
    ):
        model.to_empty(device="cpu")
        tracker: Any = FSDPMemTracker(model) if {*more} <= {"tp", "cp"} else Counter(model)
        with tracker:
            for turn in pipeline.turns([batch] * times):
                loss = model(turn, loss_fn)
                for due, is_last in pipeline.due(loss):
                    distributed.set_gradient_sync(model, is_last)
                    due.backward()
                loss = due = None
    dist.destroy_process_group()
    if isinstance(tracker, Counter):
        return tracker.peak
    (found,) = tracker.get_tracker_snapshot("peak").values()
    return found["Total"]


class Counter(Recorder):
    """Count the bytes of all live storages, also if FSDP resizes one. Used for several forwards in a row and for
    parameters that FSDP shards over several meshes, which torch's tracker does not support."""

    def __init__(self, model: torch.nn.Module):
        super().__init__(DEVICES["h100"], "bf16", False)
        for parameter in model.parameters():
            own = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            self.live += own.nbytes
            self.ignore(own)
        self.peak, self.sizes = self.live, {}

    def __enter__(self) -> Any:
        self.resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            self.live += size - storage.nbytes()
            self.sizes[storage._cdata] = size
            self.peak = max(self.peak, self.live)
            return self.resize(storage, size)

        torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self.resize  # type: ignore[method-assign]
        super().__exit__(*error)

    def _free(self, key: int, size: int) -> Any:
        def free(_: Any) -> None:
            self.live -= self.sizes.pop(key, size)
            del self.storages[key]

        return free

    def _cost(self, *_: Any) -> None:
        pass


def with_rounding(recipe: Path, kind: str, folder: Path) -> Path:
    """Copy a recipe that rounds its weights in training, as in docs/changes.md."""
    read = "    weights = checkpointers.Pretrained(cfg.model.path, model)\n"
    types = 'checkpointers.exported_types(model, cfg.model.path, "bf16")'
    text = recipe.read_text(encoding="utf-8")
    assert text.count(read) == 1
    text = text.replace(read, f"{read}    quantization.round_linears(model, {kind!r}, {types}, cfg.compute.dtype)\n")
    script = folder / "rounded.py"
    script.write_text(f"from tune import quantization\n{text}", encoding="utf-8")
    return script


def compare(
    folder: str, processes: int, rows: int, length: int, checkpointing: Any, more: dict[str, Any] | None = None
) -> tuple[float, float, str]:
    """Return the peak bytes as tracked and as planned, and the moment of the planned peak."""
    more = more or {}
    stages = more.get("pp", 1)
    data = processes // (more.get("cp", 1) * more.get("tp", 1) * stages)
    micro_batches = 2 if "zero_stage" in more else stages + (stages > 1)
    sizes = [f"max_seq_len={length}", f"global_batch_size={rows * data * micro_batches}", f"micro_batch_size={rows}"]
    given = {name: value for name, value in more.items() if name != "rounded"}
    sizes += [f"{name if '.' in name else f'parallel.{name}'}={value}" for name, value in given.items()]
    recipe = "pipeline_finetune" if stages > 1 else "full_finetune"
    cfg = config.load(recipe, [
        f"model.path={folder}", "dataset.path=none", f"compute.activation_checkpointing={checkpointing}", *sizes
    ])  # fmt: skip
    script = config.find_recipe(recipe)
    if "rounded" in more:
        script = with_rounding(script, more["rounded"], Path(folder))
    job = Job(cfg, DEVICES["h100"], processes, script)
    plan = job.plan(job.layout())
    planned = plan.peak - plan.memory["optimizer"] - plan.memory["reserve"]
    if dist.is_initialized():  # that of the plan
        meshes_of.cache_clear()
        dist.destroy_process_group()
    found = [tracked(cfg, processes, rows, checkpointing, more, stage) for stage in sorted({0, stages - 1})]
    return max(found), planned, plan.moment


def main() -> None:
    errors = []
    for name, *case in CASES:
        if sys.argv[1:] and name not in sys.argv[1:]:
            continue
        started = time.process_time()
        with tempfile.TemporaryDirectory() as folder:
            described = {"tie_word_embeddings": False, "dtype": "bfloat16"} | MODELS[name]
            Path(folder, "config.json").write_text(json.dumps(described), encoding="utf-8")
            found, planned, moment = compare(folder, *case)
        errors.append(abs(planned / found - 1))
        processes, rows, length, checkpointing, *axes = case
        layout = "".join(f", {axis}={size}" for each in axes for axis, size in each.items())
        print(
            f"| {name}, {processes}, {rows} x {length:,}, {checkpointing}{layout} | {found / GIB:.2f} | "
            f"{planned / GIB:.2f} | {planned / found - 1:+.1%} | {moment}",
            f"({time.process_time() - started:.0f} s of CPU)",
            flush=True,
        )
    print(f"median error {statistics.median(errors):.1%}, worst {max(errors):.1%}")


if __name__ == "__main__":
    main()
