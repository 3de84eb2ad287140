"""NF4 (Dettmers et al., QLoRA, 2023): 4-bit codes of normal quantiles, one scale for every block of 64 weights.

Codes are the same as in torchao and bitsandbytes. A block lies within a row of the weight. A shard of rows is therefore
quantized like the whole weight, and FSDP shards codes and scales as plain tensors. (torchao's NF4Tensor needs multiples
of 16,384 elements and uses the mean of a shard's scales, so that a sharded weight differs from the whole.)
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tune import fused
from tune.distributed import full_tensor, local_shard
from tune.errors import TuneError
from tune.parts import part_of

BLOCK = 64
BLOCKS = 64  # blocks per program of the kernel
LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
# The two levels of each byte, `[256, 2]`.
PAIRS = torch.tensor([[LEVELS[byte >> 4], LEVELS[byte & 15]] for byte in range(256)], device="cpu")
LOADED = 2**24  # weights quantized at a time: intermediate results take ten times the bytes of a weight
CPU_CODES = 2**16  # codes dequantized at a time on a CPU, so that intermediate results fit into its cache


class NF4Weight(nn.Module):
    """A frozen `[rows, columns]` weight: `codes`, two per byte, and `scales`, one per block.

    `double` quantizes the scales to 8 bits, with their mean and range per row in `ranges`: 0.52 instead of 0.56 bytes a
    weight. All tensors are bytes, which FSDP's mixed precision does not cast.
    """

    pairs: Tensor
    block: ClassVar = BLOCK
    keeps = False  # keep the dequantized weight in `whole` from its first use on
    whole: Tensor | None = None

    def __init__(self, rows: int, columns: int, double: bool, device: torch.device):
        super().__init__()
        self.codes = _frozen(torch.empty(rows, columns // 2, dtype=torch.uint8, device=device))
        scale_bytes = columns // BLOCK * (1 if double else 4)
        self.scales = _frozen(torch.empty(rows, scale_bytes, dtype=torch.uint8, device=device))
        self.ranges = _frozen(torch.empty(rows, 8, dtype=torch.uint8, device=device)) if double else None
        self.register_buffer("pairs", PAIRS, persistent=False)  # shared by all weights

    @property
    def shape(self) -> torch.Size:
        """The shape of the weight on this process."""
        rows, pairs = self.codes.shape
        return torch.Size((rows, 2 * pairs))

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The dequantized weight `[rows, columns]` in `dtype`."""
        return dequantize(self.codes, self.scales, self.ranges, dtype, self.pairs)

    def full(self) -> Tensor:
        """The whole weight in fp32, gathered from all processes. A collective: all processes must call it."""
        ranges = None if self.ranges is None else full_tensor(self.ranges)
        return dequantize(full_tensor(self.codes), full_tensor(self.scales), ranges, torch.float32, self.pairs)

    def tensors(self, dtype: torch.dtype) -> tuple[Any, ...]:
        """The dequantized weight alone if it is kept (`whole_weights`), else the tensors it is computed from."""
        if self.keeps and self.whole is None:
            self.whole = self.dequantize(dtype)
        return (self.codes, self.scales, self.ranges, self.pairs) if self.whole is None else (self.whole,)

    def linear(self, input: Tensor, bias: Tensor | None) -> Tensor:
        """`input @ weight.T + bias`. The dequantized weight only exists during the call, and again in backward, unless
        it is kept."""
        tensors = self.tensors(input.dtype)
        if len(tensors) == 1:
            return F.linear(input, *tensors, bias)
        output = _Linear.apply(input, *tensors)
        return output if bias is None else output + bias

    def local_rows(self) -> slice:
        """The rows of the weight in this process's shard."""
        return local_shard(self.codes)[1][0]

    def load(self, weight: Tensor) -> None:
        """Quantize `weight`, the `local_rows`, on this module's device."""
        shards = [local_shard(stored) for stored in (self.codes, self.scales, self.ranges) if stored is not None]
        step = max(1, LOADED // max(1, weight.shape[1]))
        for start in range(0, len(weight), step):
            rows = slice(start, start + step)
            parts = quantize(weight[rows].to(shards[0][0].device), double=self.ranges is not None)
            for (shard, (_, columns)), part in zip(shards, parts, strict=False):
                assert part is not None
                shard[rows].copy_(part[:, columns])


def quantize(weight: Tensor, double: bool = False) -> tuple[Tensor, Tensor, Tensor | None]:
    """Codes, scales and, with `double`, ranges of a `[rows, columns]` weight, as bytes."""
    blocks = weight.float().unflatten(1, (-1, BLOCK))
    scales = blocks.abs().amax(dim=2)
    levels = torch.tensor(LEVELS, device=weight.device)
    boundaries = (levels[1:] + levels[:-1]) / 2
    codes = torch.bucketize(blocks / scales.clamp(min=1e-30)[..., None], boundaries, out_int32=True)
    codes = codes.flatten(1).to(torch.uint8)
    packed = codes[:, 0::2] << 4 | codes[:, 1::2]
    if not double:
        return packed, scales.view(torch.uint8), None
    mean = scales.mean(dim=1, keepdim=True)
    reach = (scales - mean).abs().amax(dim=1, keepdim=True)
    small = ((scales - mean) / reach.clamp(min=1e-30) * 127).round().to(torch.int8)
    return packed, small.view(torch.uint8), torch.cat([mean, reach], dim=1).view(torch.uint8)


def dequantize(
    codes: Tensor, scales: Tensor, ranges: Tensor | None, dtype: torch.dtype, pairs: Tensor = PAIRS
) -> Tensor:
    """The weight `[rows, columns]`, computed by one kernel on a GPU (`tune.fused`), on a CPU in chunks of rows.

    `pairs` is `PAIRS`, which the caller may already have on the device of the codes.
    """
    pairs = pairs.to(codes.device)
    if torch.compiler.is_compiling():
        return _values(codes, scales, ranges, pairs, dtype)
    if fused.fits(codes, dtype):
        return _by_kernel(codes, scales, ranges, dtype, pairs)
    is_in_chunks = codes.device.type == "cpu" and not hasattr(codes, "fake_mode")
    step = max(1, CPU_CODES // codes.shape[1]) if is_in_chunks else len(codes)
    weight = torch.empty(len(codes), 2 * codes.shape[1], dtype=dtype, device=codes.device)
    for start in range(0, len(codes), step):
        rows = slice(start, start + step)
        weight[rows] = _values(codes[rows], scales[rows], None if ranges is None else ranges[rows], pairs, dtype)
    return weight


def _values(codes: Tensor, scales: Tensor, ranges: Tensor | None, pairs: Tensor, dtype: torch.dtype) -> Tensor:
    if ranges is None:
        scales = scales.view(torch.float32)
    else:
        mean, reach = ranges.view(torch.float32).split(1, dim=1)
        scales = scales.view(torch.int8).float() / 127 * reach + mean
    blocks = F.embedding(codes.int(), pairs).view(*scales.shape, BLOCK)
    return (blocks * scales[..., None]).flatten(1).to(dtype)


def _by_kernel(codes: Tensor, scales: Tensor, ranges: Tensor | None, dtype: torch.dtype, pairs: Tensor) -> Tensor:
    codes, scales = codes.contiguous(), scales.contiguous()
    weight = torch.empty(len(codes), 2 * codes.shape[1], dtype=dtype, device=codes.device)
    is_double = ranges is not None
    scales = scales.view(torch.int8 if is_double else torch.float32)
    ranges = ranges.contiguous().view(torch.float32) if ranges is not None else scales  # not read if not double
    grid, sizes = (-(-scales.numel() // BLOCKS),), (scales.numel(), scales.shape[1], is_double, BLOCKS)
    # Without fused multiply-add, a product is rounded before the addition, as on other devices.
    tensors = codes, scales, ranges, pairs, weight
    fused.launch("tune.quantization.nf4_programs", "dequantize", grid, *tensors, *sizes, enable_fp_fusion=False)
    return weight


@contextmanager
def whole_weights(model: nn.Module) -> Iterator[None]:
    """A context for forwards without gradients: NF4 weights of `model` on a GPU are dequantized once, at first use.

    It has no effect if the dequantized weights need more than half of the free memory.
    """
    weights = [module for module in model.modules() if isinstance(module, NF4Weight) and module.codes.is_cuda]
    needed = sum(2 * weight.codes.numel() * 2 for weight in weights)  # in 16 bits
    if weights and needed <= torch.cuda.mem_get_info(weights[0].codes.device)[0] / 2:
        for weight in weights:
            weight.keeps = True
    try:
        yield
    finally:
        for weight in weights:
            weight.keeps, weight.whole = False, None


def quantize_linears(model: nn.Module, kind: Literal["nf4"] = "nf4", *, double: bool = True) -> int:
    """Replace the weights of the linear layers in the blocks of `model` with `NF4Weight`, in place.

    Weights are quantized on their device, one at a time. Weights on the meta device stay there, to be loaded from a
    checkpoint. Embeddings, norms and head are not changed. Returns the number of quantized weights.

    Raises:
        TuneError: there is no such layer; or a layer is already quantized, adapted or sharded, computes differently
            from `nn.Linear`, or has a width that is not a multiple of 64. The model is then unchanged.
    """
    linears = block_linears(model)
    if not linears:
        raise TuneError("quantization: the model has no linear layers in its blocks")
    for name, linear in linears.items():
        _require_quantizable(name, linear)
    call_all_layers(model)
    for linear in linears.values():
        weight = linear.weight.detach()
        quantized = NF4Weight(linear.out_features, linear.in_features, double, weight.device)
        if not weight.is_meta:
            quantized.load(weight)
        del linear.weight
        linear.weight = quantized  # type: ignore[assignment]
        linear.__class__ = NF4Linear
    return sum(linear.out_features * linear.in_features for linear in linears.values())


def block_linears(model: nn.Module, parts: Collection[str] = ("language",)) -> dict[str, nn.Linear]:
    """The linear layers inside the modules of `model`, by name, without the head, which is a child of `model` itself,
    and without `uncalled_linears`. Of a model of images and text, only those of its `parts`."""
    uncalled = uncalled_linears(model)
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and "." in name and module not in uncalled and part_of(model, name) in parts
    }


def uncalled_linears(model: nn.Module) -> set[nn.Module]:
    """The output projection of every `nn.MultiheadAttention`, whose forward uses its weight without calling it."""
    return {module.out_proj for module in model.modules() if isinstance(module, nn.MultiheadAttention)}


def call_all_layers(model: nn.Module) -> None:
    """Make every `nn.TransformerEncoderLayer` call its linear layers. In evaluation, torch's fast path would otherwise
    use their plain weights, without adapters."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0  # only read to choose the fast path


def _require_quantizable(name: str, linear: nn.Linear) -> None:
    """Raise TuneError if the weight of `linear`, the layer `name`, cannot be quantized."""
    if type(linear).forward is not nn.Linear.forward:
        raise TuneError(
            f"quantization: {name} is a {type(linear).__name__}, not a plain nn.Linear. Quantize a model only once, "
            "and before adding adapters"
        )
    if isinstance(linear.weight, DTensor):
        raise TuneError(f"quantization: {name} is already sharded. Quantize the model before sharding it")
    if linear.in_features % BLOCK:
        raise TuneError(f"quantization: {name} has {linear.in_features} columns, which is not a multiple of {BLOCK}")


def count_parameters(model: nn.Module) -> int:
    """The number of parameters of `model`. A quantized weight counts its numbers, not the bytes that store them."""
    of_bytes = {
        parameter for module in model.modules() if isinstance(module, NF4Weight) for parameter in module.parameters()
    }
    weights = sum(2 * module.codes.numel() for module in model.modules() if isinstance(module, NF4Weight))
    return weights + sum(parameter.numel() for parameter in model.parameters() if parameter not in of_bytes)


class NF4Linear(nn.Linear):
    """A linear layer with a quantized weight."""

    weight: NF4Weight  # type: ignore[assignment]

    def forward(self, input: Tensor) -> Tensor:
        return self.weight.linear(input, self.bias)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, codes: Tensor, scales: Tensor, ranges: Tensor | None, pairs: Tensor) -> Tensor:
        ctx.save_for_backward(codes, scales, ranges, pairs)
        return input @ dequantize(codes, scales, ranges, input.dtype, pairs).T

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None, None, None]:
        codes, scales, ranges, pairs = ctx.saved_tensors
        return grad_output @ dequantize(codes, scales, ranges, grad_output.dtype, pairs), None, None, None, None


def _frozen(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)
