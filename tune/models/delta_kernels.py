"""The gated delta rule by the kernels of flash-linear-attention, where they are installed (`fla-core`)."""

import functools
import importlib
import importlib.util
import warnings
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _disable_current_modes

RUNS: dict[Any, bool] = {}  # whether the device computes a kind of heads, as tried at its first use


def fits(key: Tensor, value: Tensor) -> bool:
    """Whether the kernels compute `value` `[batch, seq, heads, value_dim]` and `key`, in the type of `value`.

    They are tuned where they run, which may change the order of sums from run to run. A plan counts plain operations.
    Decoding token by token has no chunks to win by, and is captured in a graph, where nothing can be tuned.
    """
    if not value.is_cuda or value.dtype not in (torch.bfloat16, torch.float16) or value.shape[1] == 1:
        return False
    if torch.compiler.is_compiling() or hasattr(value, "fake_mode") or torch.are_deterministic_algorithms_enabled():
        return False
    return _is_installed() and _runs(key.shape[2:], value.shape[2:], value.dtype, value.device)


def gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, strength: Tensor, boundaries: Tensor | None,
    memory: Tensor | None, wants_memory: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """As `tune.models.delta_net.gated_delta_rule`: the outputs, and the memories after each document.

    The documents of the flattened batch begin at `boundaries`; without these, each row is one, and continues `memory`.
    """
    rule = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    inputs = [query.to(value.dtype), key.to(value.dtype), value, log_decay, strength]
    if boundaries is not None:
        inputs = [tensor.flatten(0, 1)[None] for tensor in inputs]
    # The same tensor for all layers: what the kernels compute from it, and wait for, is kept.
    output, memories = rule(
        *inputs, scale=1.0, initial_state=memory, output_final_state=wants_memory, cu_seqlens=boundaries
    )
    return output.view_as(value), memories


@functools.cache
def _is_installed() -> bool:
    return importlib.util.find_spec("fla") is not None


def _runs(key_heads: torch.Size, value_heads: torch.Size, dtype: torch.dtype, device: torch.device) -> bool:
    """Tried forward and backward: they refuse versions of Triton that compute wrong gradients on some GPUs."""
    kind = key_heads, value_heads, dtype, device, torch.is_grad_enabled()
    if kind not in RUNS:
        try:
            # Beside what encloses the layer's forward: checkpointing counts what is saved.
            with _disable_current_modes(), saved_tensors_hooks(lambda saved: saved, lambda saved: saved):
                key, value = (
                    torch.zeros(1, 128, *heads, dtype=dtype, device=device, requires_grad=True)
                    for heads in (key_heads, value_heads)
                )
                decay = torch.zeros(value.shape[:3], device=device, requires_grad=True)
                output, _ = gated_delta_rule(key, key, value, decay, decay, None, None, False)
                if output.requires_grad:
                    output.sum().backward()
            RUNS[kind] = True
        except Exception as error:  # of an import, of Triton, of the driver: all of them mean a slower path
            reason = str(error).strip().splitlines()[0][:300] if str(error) else type(error).__name__
            warnings.warn(
                f"flash-linear-attention does not run here ({reason}): gated delta nets compute by products of "
                "PyTorch, which takes more time and memory",
                stacklevel=2,
            )
            RUNS[kind] = False
    return RUNS[kind]
