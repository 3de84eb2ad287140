"""Weights as the compressed-tensors library stores them, for vLLM and transformers: int8, int4 and FP8.

`quantize` and `dequantize` are the pair of all of these: symmetric, a scale for each row, or for each group in a row.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tune.errors import TuneError

GROUPS = (128, 64, 32)  # weights with a scale of their own in int4; the first that divides all rows
HALF_RANGE = {"int8": 127.5, "int4": 7.5, "fp8": 448.0}  # of codes: the largest weight is this many scales
REFUSED = {
    "nf4": "bitsandbytes makes it of a plain model while loading (load_in_4bit): there is nothing to write",
    "mxfp4": "not written: for llama.cpp its own llama-quantize makes it",
}


def quantize(weight: Tensor, kind: str, group: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Codes `[rows, columns]` (int8, or float8_e4m3fn) and scales `[rows, columns / group]`, in `dtype`."""
    half, blocks = HALF_RANGE[kind], weight.float().unflatten(1, (-1, group))
    scales = (blocks.abs().amax(dim=2) / half).clamp(min=torch.finfo(torch.float16).tiny).to(dtype)
    ratios = blocks / scales.float()[..., None]
    if kind == "fp8":
        return ratios.clamp(-half, half).flatten(1).to(torch.float8_e4m3fn), scales
    return ratios.round().clamp(-half - 0.5, half - 0.5).flatten(1).to(torch.int8), scales


def dequantize(codes: Tensor, scales: Tensor) -> Tensor:
    """The weight `[rows, columns]`, in the type of the scales."""
    blocks = codes.to(scales.dtype).unflatten(1, (scales.shape[1], -1))
    return (blocks * scales[..., None]).flatten(1)


def group_size(kind: str, columns: Mapping[str, int]) -> int | None:
    """How many weights share a scale, for layers of so many `columns`; None: those of a row. Raises TuneError."""
    if kind != "int4":
        return None
    for group in GROUPS:
        if not (others := [name for name in columns if columns[name] % group]):
            return group
    raise TuneError(f"int4: rows of {columns[others[0]]} weights ({others[0]}) are no groups of {GROUPS}: take int8")


@dataclass(frozen=True)
class Compressor:
    """Quantises the linear layers whose weights have these `names` on disk. With `dynamic` their inputs are quantised
    too, to the kind's 8 bits, when the model runs: each token has a scale."""

    kind: str
    names: dict[str, int]  # and their columns
    dynamic: bool = False

    def __post_init__(self) -> None:
        if reason := REFUSED.get(self.kind):
            raise TuneError(f"{self.kind}: {reason}")
        if self.dynamic and self.kind == "int4":
            raise TuneError("--dynamic: int4 weights go with inputs as they are: take int8 or fp8, or leave it out")
        group_size(self.kind, self.names)

    @property
    def group(self) -> int | None:
        """None: a scale for each row."""
        return group_size(self.kind, self.names)

    def tensors(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """What is stored for the tensor `name`."""
        if name not in self.names:
            yield name, tensor
            return
        codes, scales = quantize(tensor, self.kind, self.group or tensor.shape[1], tensor.dtype)
        if self.kind == "fp8" or self.dynamic:
            yield name, codes
        else:
            yield f"{name}_packed", _packed(codes, bits=int(self.kind[3:]))
            yield f"{name}_shape", torch.tensor(tensor.shape)
        yield f"{name}_scale", scales

    def config(self) -> dict[str, Any]:
        """`quantization_config` of config.json."""
        is_float = self.kind == "fp8"
        weights = {
            "num_bits": 4 if self.kind == "int4" else 8, "type": "float" if is_float else "int", "symmetric": True,
            "strategy": "group" if self.group else "channel", "group_size": self.group, "dynamic": False,
        }  # fmt: skip
        form = "float-quantized" if is_float else "int-quantized" if self.dynamic else "pack-quantized"
        inputs = weights | {"strategy": "token", "dynamic": True} if self.dynamic else None
        group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
        return {
            "quant_method": "compressed-tensors", "quantization_status": "compressed", "format": form,
            "config_groups": {"group_0": group | {"format": form}}, "ignore": ["lm_head"], "kv_cache_scheme": None,
        }  # fmt: skip


def _packed(codes: Tensor, bits: int) -> Tensor:
    """Codes, lowest first, in words of 32 bits `[rows, columns * bits / 32]`; the last is filled with zeros."""
    each = 32 // bits
    padded = torch.nn.functional.pad(codes.long() + (1 << (bits - 1)), (0, -codes.shape[1] % each))
    words = (padded.unflatten(1, (-1, each)) << (torch.arange(each) * bits)).sum(dim=2)
    return torch.where(words >= 2**31, words - 2**32, words).int()
