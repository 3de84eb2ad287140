"""Device memory, disk space and attention kernels of a run."""

import re
import resource
import shutil
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tune.distributed import repeated_blocks, stored_dtype, undivided
from tune.models import Choice, Decoder, capability


def peak_memory_gib(device: torch.device) -> float:
    """Return this process's peak memory in GiB: allocated on its GPU, or resident on the host."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    status = Path("/proc/self/status")  # Linux: getrusage starts from the peak of the parent process
    if status.exists() and (found := re.search(r"VmHWM:\s+(\d+) kB", status.read_text(encoding="utf-8"))):
        return int(found[1]) / 2**20
    unit = 1 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def planned_memory(
    model: nn.Module,
    dtype: str | torch.dtype,
    master_dtype: str | torch.dtype,
    shards: int,
    tp: int = 1,
    loss_parallel: bool = True,
) -> dict[str, float]:
    """Return the GiB that each of `shards` processes holds throughout training. `model` may be on the meta device.

    Groups of `tp` processes share the layers; an embedding or head that they do not share (see `undivided`) counts in
    full. `optimizer` counts two states for each trained parameter, as in AdamW.
    """
    stored: dict[nn.Parameter, int] = {}
    whole = [*undivided(model, repeated_blocks(model), tp, loss_parallel).values()] if tp > 1 else []
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            size = parameter.numel() * stored_dtype(module, parameter, dtype, master_dtype).itemsize
            stored[parameter] = size * (tp if module in whole else 1)
    weights = sum(stored.values())
    trained = sum(size for parameter, size in stored.items() if parameter.requires_grad)
    sizes = {"weights": weights, "gradients": trained, "optimizer": 2 * trained}
    return {name: size / shards / 2**30 for name, size in sizes.items()}


def disk_note(folder: Path, model: nn.Module, master_dtype: torch.dtype, keep: int | None) -> str:
    """Return a warning if the disk of `folder` is too small for the run, else "".

    It counts `keep` checkpoints and one being written, each with two optimizer states for each trained parameter, and
    the export of these parameters.
    """
    there = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.is_dir())
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    needed = trained * master_dtype.itemsize * (3 * (keep or 1) + 4)
    if needed <= (free := shutil.disk_usage(there).free):
        return ""
    return (
        f"output_dir: {there} has {size_in_words(free)} left, and the checkpoints and the export take about "
        f"{size_in_words(needed)}: give another folder, or lower checkpointer.keep"
    )


def size_in_words(size: float) -> str:
    """Return bytes in a readable unit."""
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1000:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:,.2f} GiB"


def attention_notes(
    model: nn.Module, device: torch.device, dtype: torch.dtype, shape: tuple[int, int], longest: int, compile: bool,
    activation_checkpointing: str,
) -> list[str]:  # fmt: skip
    """Return a line for each slow path of attention on a GPU: the reason, and what to do.

    `shape` is the rows of a micro-batch and the tokens of a row; `longest` is the length of the longest document.
    """
    if device.type in ("cpu", "meta") or not isinstance(model, Decoder):
        return []
    choices = model.config.attention_paths(capability(device), dtype)
    layers: dict[Choice, list[Any]] = defaultdict(list)
    for choice, layer in zip(choices, model.config.layers, strict=True):
        if choice is not None and choice.because and choice.path in ("efficient", "math"):
            layers[choice].append(layer.attention)
    notes = []
    for (path, because), slow in layers.items():
        note = f"attention: {len(slow)} of {len(choices)} layers by {path}, because {because}"
        if scores := score_bytes(slow, dtype, shape, longest, compile, activation_checkpointing):
            note += (
                f". Scores take up to {scores / 2**30:.1f} GiB between forward and backward. Less: "
                "compute.activation_checkpointing=full, a smaller max_seq_len or micro_batch_size"
            )
        elif dtype == torch.float32:
            note += ". compute.dtype=bf16 is faster"
        notes.append(note)
    return notes


def score_bytes(
    parts: Sequence[Any],
    dtype: torch.dtype,
    shape: tuple[int, int],
    longest: int,
    compile: bool,
    activation_checkpointing: str,
) -> int:
    """Return the bytes of attention scores that backward needs for a micro-batch, for layers with these configs.

    With soft caps or sinks, each pair of a query and a visible key stores the softmax result in fp32 and bf16, and the
    soft cap's result too.
    """
    rows, row = shape
    sizes = []
    for attention in parts:
        softcap, sinks = (getattr(attention, name, None) for name in ("softcap", "sinks"))
        if softcap or sinks:
            keys = row if compile else min(longest, 2 * (attention.window or longest) - 1)
            softmax, capped = (4, 4) if dtype == torch.float32 else (6, 2)
            size = softmax + capped if softcap else softmax
            sizes.append(rows * attention.num_heads * row * keys * size)
    is_kept = activation_checkpointing == "none"
    return sum(sizes) if is_kept else max(sizes, default=0)
