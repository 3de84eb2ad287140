"""Settings that are slow or need much memory on the run's device."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn


def hardware_notes(
    model: nn.Module,
    device: torch.device,
    dtype: str,
    shape: tuple[int, int],
    longest: int,
    compile: bool,
    activation_checkpointing: str,
) -> Iterator[str]:
    """What will be slow or take much memory. `shape` is rows of a micro-batch and tokens of a row; `longest` is the
    length of the longest document in tokens."""
    if device.type == "cpu" and dtype == "bf16":
        yield "dtype=bf16 is slow on most CPUs: dtype=fp32 is usually several times faster, and exact"
    major, minor = torch.cuda.get_device_capability(device) if device.type == "cuda" else (8, 0)
    if dtype == "bf16" and (major, minor) < (8, 0):
        yield (
            f"this GPU (compute capability {major}.{minor}) has no units for bf16 and no flash kernels, which need "
            "8.0: dtype=bf16 is slow here, try dtype=fp32; attention is that of SDPA"
        )
    if device.type != "cpu" and (size := score_bytes(model, dtype, shape, longest, compile, activation_checkpointing)):
        yield (
            f"attention of this model has soft caps or sinks, for which there is no kernel: its scores take up to "
            f"{size / 2**30:.1f} GiB between forward and backward. Less: "
            "memory.activation_checkpointing=full, a smaller max_seq_len or micro_batch_size"
        )


def score_bytes(
    model: nn.Module, dtype: str, shape: tuple[int, int], longest: int, compile: bool, activation_checkpointing: str
) -> int:
    """Bytes of the attention scores that backward needs of a micro-batch, where no kernel computes attention.

    For each pair of a query and a key that it may see: the result of softmax in fp32 and in bf16, of a soft cap too.
    """
    rows, row = shape
    sizes = []
    for layer in getattr(getattr(model, "config", None), "layers", ()):
        attention: Any = layer.attention
        softcap, sinks = (getattr(attention, name, None) for name in ("softcap", "sinks"))
        if softcap or sinks:
            keys = row if compile else min(longest, 2 * (attention.window or longest) - 1)
            each = (4 if dtype == "fp32" else 6) + (0 if not softcap else 4 if dtype == "fp32" else 2)
            sizes.append(rows * attention.num_heads * row * keys * each)
    is_kept = activation_checkpointing == "none"
    return sum(sizes) if is_kept else max(sizes, default=0)
