"""Quantize weights in formats that vLLM and transformers load.

int8, int4, FP8 and MXFP4 are stored like the library compressed-tensors does, NF4 like bitsandbytes. `quantize` and
`dequantize` are for all kinds but NF4: symmetric, with a scale for each row or for each group in a row.
"""

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tune.errors import TuneError
from tune.quantization import nf4

HEADS = ("lm_head", "score")  # heads of language and reward models, which are not quantized
GROUPS = {"int4": (128, 64, 32), "mxfp4": (32,), "nf4": (nf4.BLOCK,)}  # weights per scale: the first size that fits
HALF_RANGE = {"int8": 127.5, "int4": 7.5, "fp8": 448.0}  # the largest weight of a group, in scales
FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], device="cpu")
"""The magnitudes of E2M1, by code."""
HALVES = (FP4[1:] + FP4[:-1]) / 2  # ties round to the neighbor with an even code, as in IEEE
HALVES[::2] = torch.nextafter(HALVES, FP4[1:])[::2]


def quantize(weight: Tensor, kind: str, group: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Codes `[rows, columns]` and scales `[rows, columns / group]` in `dtype`.

    Codes are int8 or float8_e4m3fn; for MXFP4 they are the numbers. MXFP4's scales are powers of two (OCP Microscaling,
    2023), rounded like in compressed-tensors.
    """
    blocks = weight.float().unflatten(1, (-1, group))
    largest = blocks.abs().amax(dim=2)
    if kind == "mxfp4":
        mantissa, exponent = torch.frexp(largest)
        scales = torch.ldexp(torch.ones_like(largest), (exponent - 3 + (mantissa >= 0.875)).clamp(min=-126))
        ratios = blocks / scales[..., None]
        numbers = FP4.to(ratios.device)[torch.bucketize(ratios.abs(), HALVES.to(ratios.device), right=True)]
        return numbers.copysign(ratios).flatten(1), scales.to(dtype)
    half = HALF_RANGE[kind]
    scales = (largest / half).clamp(min=torch.finfo(torch.float16).tiny).to(dtype)
    ratios = blocks / scales.float()[..., None]
    if kind == "fp8":
        return ratios.clamp(-half, half).flatten(1).to(torch.float8_e4m3fn), scales
    return ratios.round().clamp(-half - 0.5, half - 0.5).flatten(1).to(torch.int8), scales


def dequantize(codes: Tensor, scales: Tensor) -> Tensor:
    """The weight `[rows, columns]`, in the dtype of the scales."""
    blocks = codes.to(scales.dtype).unflatten(1, (scales.shape[1], -1))
    return (blocks * scales[..., None]).flatten(1)


def group_size(kind: str, columns: Mapping[str, int]) -> int | None:
    """The number of weights that share a scale, for layers with these numbers of `columns`; None: a whole row.

    Raises TuneError if no group size divides the columns of all layers.
    """
    for group in GROUPS.get(kind, ()):
        if not (others := [name for name in columns if columns[name] % group]):
            return group
    if kind not in GROUPS:
        return None
    groups = " or ".join(map(str, GROUPS[kind]))
    raise TuneError(
        f"{kind}: rows of {columns[others[0]]} weights ({others[0]}) do not divide into groups of {groups}. Use int8"
    )


@dataclass(frozen=True)
class Compressor:
    """Quantizes the linear layers whose weights have these `names` on disk.

    With `dynamic`, their inputs are also quantized to 8 bits when the model runs, with a scale per token.
    """

    kind: str
    names: dict[str, int]  # name -> columns
    dynamic: bool = False

    def __post_init__(self) -> None:
        if self.dynamic and self.kind in GROUPS:
            raise TuneError(f"--dynamic: {self.kind} weights do not support quantized inputs. Use int8 or fp8")
        group_size(self.kind, self.names)

    @property
    def group(self) -> int | None:
        """The number of weights that share a scale; None: a whole row."""
        return group_size(self.kind, self.names)

    def tensors(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the names and tensors that are stored for the tensor `name`."""
        if name not in self.names:
            yield name, tensor
            return
        if self.kind == "nf4":
            packed, absmax, _ = nf4.quantize(tensor)
            about = {
                "quant_type": "nf4", "blocksize": nf4.BLOCK, "dtype": str(tensor.dtype).removeprefix("torch."),
                "shape": [*tensor.shape],
            }  # fmt: skip
            yield name, packed.view(-1, 1)
            yield f"{name}.absmax", absmax.view(torch.float32).flatten()
            yield f"{name}.quant_map", torch.tensor(nf4.LEVELS)
            state = torch.tensor([*json.dumps(about).encode()], dtype=torch.uint8)
            yield f"{name}.quant_state.bitsandbytes__nf4", state
            return
        codes, scales = quantize(tensor, self.kind, self.group or tensor.shape[1], tensor.dtype)
        if self.kind == "mxfp4":
            found = torch.bucketize(codes.abs(), FP4) + 8 * codes.signbit()
            yield f"{name}_packed", (found[:, 0::2] + 16 * found[:, 1::2]).to(torch.uint8)
            scales = (torch.frexp(scales.float())[1] + 126).to(torch.uint8)
        elif self.kind == "fp8" or self.dynamic:
            yield name, codes
        else:
            yield f"{name}_packed", _packed(codes, bits=int(self.kind[3:]))
            yield f"{name}_shape", torch.tensor(tensor.shape)
        yield f"{name}_scale", scales

    def config(self, dtype: str, plain: Collection[str] = ()) -> dict[str, Any]:
        """The `quantization_config` in config.json of a model whose other weights are in `dtype`. Readers quantize
        every linear layer that it does not name, so it names the `plain` modules, such as those of an image tower."""
        excluded = [*HEADS, *sorted({*plain} - {*HEADS})]
        if self.kind == "nf4":
            return {
                "quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4",
                "bnb_4bit_compute_dtype": dtype, "llm_int8_skip_modules": excluded,
            }  # fmt: skip
        is_float = self.kind in ("fp8", "mxfp4")
        weights = {
            "num_bits": 4 if self.group else 8, "type": "float" if is_float else "int", "symmetric": True,
            "strategy": "group" if self.group else "channel", "group_size": self.group, "dynamic": False,
        }  # fmt: skip
        if is_float:
            form = "float-quantized"
        else:
            form = "int-quantized" if self.dynamic else "pack-quantized"
        if self.kind == "mxfp4":
            form, weights = "mxfp4-pack-quantized", weights | {"scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}
        inputs = weights | {"strategy": "token", "dynamic": True} if self.dynamic else None
        group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
        return {
            "quant_method": "compressed-tensors", "quantization_status": "compressed", "format": form,
            "config_groups": {"group_0": group | {"format": form}}, "ignore": excluded, "kv_cache_scheme": None,
        }  # fmt: skip


def _packed(codes: Tensor, bits: int) -> Tensor:
    """Pack codes into 32-bit words `[rows, columns * bits / 32]`, lowest bits first; the last word is zero-padded."""
    each = 32 // bits
    padded = torch.nn.functional.pad(codes.long() + (1 << (bits - 1)), (0, -codes.shape[1] % each))
    words = (padded.unflatten(1, (-1, each)) << (torch.arange(each) * bits)).sum(dim=2)
    return torch.where(words >= 2**31, words - 2**32, words).int()
