"""Read published quantized checkpoints as plain checkpoints.

A weight is `(codes - zeros) * scales`. `plain_tensors` finds these tensors by name and replaces them by a
`PackedTensor`, which has the name and shape of the weight and dequantizes the slices that are read. Code that loads,
shards, quantizes or exports weights needs no changes. `METHODS` defines how each `quant_method` stores a weight.
"""

import math
import re
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn.functional import embedding

from tune.checkpointers.disk import DiskTensor, disk_tensors
from tune.errors import TuneError, explained
from tune.models import read_json
from tune.quantization import FP4

FIELD = "quantization_config"
AT_A_TIME = 2**23  # weights dequantized at a time: intermediate results need ten times the bytes of a weight
MALFORMED = (LookupError, TypeError, AttributeError, ValueError, ArithmeticError)
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
# Formats of compressed-tensors -> whether a word holds several codes.
WORDS = {
    "pack-quantized": True, "nvfp4-pack-quantized": True, "mxfp4-pack-quantized": True,
    "int-quantized": False, "float-quantized": False, "naive-quantized": False, "mxfp8-quantized": False,
}  # fmt: skip
EXCLUDED = ("modules_to_not_convert", "ignored_layers", "ignore")  # settings that list modules that are not quantized
# Scales of activations and caches, which training does not use.
OF_ACTIVATIONS = re.compile(r"(^|[._])(input|output|activation|[qkv])_(global_)?(scale|zero_point)(_ub)?$")
# The numbers in a byte: two 4-bit numbers `[256, 2]`, low bits first, as integers or E2M1; or a power of two given by
# its exponent (OCP Microscaling, 2023).
NIBBLES = torch.tensor([[byte & 15, byte >> 4] for byte in range(256)], dtype=torch.int8, device="cpu")
PAIRS = torch.cat([FP4, -FP4])[NIBBLES.long()]
POWERS = torch.tensor([2.0 ** (byte - 127) for byte in range(256)], device="cpu")


def _as_stored(elements: Tensor) -> Tensor:
    return elements


@dataclass(frozen=True)
class Grid:
    """Numbers for a weight `[..., rows, columns]`: one per block of `block` rows and columns.

    An element of `tensor` holds `per` numbers that are neighbors along the weight's dimension `packed`; `decode` turns
    `[..., n]` elements into `[..., n * per]` numbers. With `transposed`, columns come before rows on disk. With an
    `index`, the block of a column is the one that the index names, else blocks are neighboring columns.
    """

    tensor: DiskTensor
    block: tuple[int, int] = (1, 1)
    decode: Callable[[Tensor], Tensor] = _as_stored
    per: int = 1
    packed: int = -1
    transposed: bool = False
    index: DiskTensor | None = None

    def stored(self, spans: Sequence[slice]) -> list[slice]:
        """Return the slices on disk of the blocks `spans` (rows, columns)."""
        stored = [*spans]
        stored[self.packed] = slice(spans[self.packed].start // self.per, -(-spans[self.packed].stop // self.per))
        return stored[::-1] if self.transposed else stored

    def blocks(self, where: Sequence[slice]) -> list[slice]:
        """Return the blocks that contain the rows and columns `where`."""
        return [slice(part.start // size, -(-part.stop // size)) for part, size in zip(where, self.block, strict=True)]

    def read(self, where: Sequence[slice]) -> Tensor:
        """Read the number of each weight in `where`; a dimension with a single number for all weights has size 1."""
        if math.prod(self.tensor.shape) == 1:
            return self.decode(self.tensor.read()).view(1, 1)
        *lead, rows, columns = where
        if self.index is not None:
            groups = self.tensor.shape[0]
            numbers = replace(self, block=(1, 1), index=None).read((*lead, rows, slice(0, groups)))
            of_columns = self.index.read((columns,)).long()
            if of_columns.numel() and not 0 <= int(of_columns.min()) <= int(of_columns.max()) < groups:
                raise TuneError(
                    f"{self.index.file}: {self.index.name} names groups {int(of_columns.min())} to "
                    f"{int(of_columns.max())}, but there are {groups}. Download the file again"
                )
            return numbers[..., of_columns]
        spans = self.blocks((rows, columns))
        elements = self.tensor.read((*lead, *self.stored(spans)))
        is_last = (self.packed == -1) != self.transposed
        numbers = self.decode(elements if is_last else elements.mT)
        numbers = numbers[..., spans[self.packed].start % self.per :][..., : _length(spans[self.packed])]
        numbers = numbers if is_last else numbers.mT
        dimensions = (-1, -2) if self.transposed else (-2, -1)  # the order on disk, which all grids of a weight share
        for dimension, part, size, span in zip(dimensions, (rows, columns), self.block, spans, strict=True):
            if size > 1 and _length(span) > 1:
                numbers = numbers.repeat_interleave(size, dimension)
                numbers = numbers.narrow(dimension, part.start % size, _length(part))
        return numbers.mT if self.transposed else numbers

    def require_shape(self, weight: str, shape: Sequence[int]) -> None:
        """Raise TuneError if the grid does not match a weight of this `shape`."""
        *lead, rows, columns = shape
        needed = [*lead, *(part.stop for part in self.stored(self.blocks((slice(0, rows), slice(0, columns)))))]
        found = self.tensor.shape
        if math.prod(found) != 1 and found[: len(needed)] != needed:
            raise TuneError(
                f"{self.tensor.file}: {self.tensor.name} has shape {found}, but {weight} {[*shape]} needs {needed}: "
                f"{FIELD} in config.json has other blocks, or the file is damaged. Download both again"
            )


@dataclass(frozen=True)
class PackedTensor(DiskTensor):
    """A weight that is quantized on disk. It is read in `dtype`; `parts` are all of its tensors."""

    codes: Grid
    scales: Grid
    zeros: Grid | None
    parts: tuple[DiskTensor, ...]

    @property
    def files(self) -> set[Path]:
        return {part.file for part in self.parts}

    @property
    def is_uneven(self) -> bool:
        """Whether the last of several blocks of scales is smaller than the others."""
        sizes = zip(self.shape[-2:], self.scales.block, strict=True)
        return any(size > block and size % block for size, block in sizes)

    def read(self, where: tuple[slice, ...] = ()) -> Tensor:
        """Read and dequantize only the slice `where`. Memory holds the slice and `AT_A_TIME` codes."""
        whole = (slice(None),) * (len(self.shape) - len(where))
        parts = [slice(*part.indices(size)[:2]) for part, size in zip((*where, *whole), self.shape, strict=True)]
        sizes = [_length(part) for part in parts]
        weight = torch.empty(sizes, dtype=self.dtype)
        step = max(1, AT_A_TIME // max(1, math.prod(sizes[1:])))
        for start in range(0, sizes[0], step):
            first = parts[0].start + start
            part = [slice(first, min(first + step, parts[0].stop)), *parts[1:]]
            scales = self.scales.read(part)
            values = self.codes.read(part).to(scales.dtype)
            for numbers, grid in ((scales, self.scales), (values, self.codes)):
                if not numbers.isfinite().all():
                    raise TuneError(
                        f"{grid.tensor.file}: {grid.tensor.name} has values that are NaN or infinite, and so has the "
                        f"weight {self.name}. Download the file again, or use another checkpoint"
                    )
            if self.zeros is not None:
                values = values - self.zeros.read(part).to(scales.dtype)
            weight[start : start + step] = values * scales
        return weight


Parts = Mapping[str, DiskTensor]
Grids = tuple[list[int], Grid, Grid, Grid | None]  # the shape of a weight; codes, scales, zeros


@dataclass(frozen=True)
class Method:
    """How a `quant_method` stores a weight. The names of a weight's parts are its name plus a suffix. `read` builds the
    grids from the parts by suffix and the method's settings."""

    codes: tuple[str, ...]
    scales: tuple[str, ...]
    read: Callable[[str, Parts, dict[str, Any]], Grids]
    others: tuple[str, ...] = ()
    weight: str = ""  # appended to the stem to get the weight's name
    excluded: str = "modules_to_not_convert"  # the setting that lists modules that are not quantized

    def parts(self, stem: str, tensors: Parts) -> Parts:
        """Return the tensors of one weight by suffix."""
        suffixes = (*self.codes, *self.scales, *self.others)
        return {suffix: tensors[stem + suffix] for suffix in suffixes if stem + suffix in tensors}


def plain_tensors(folder: Path) -> dict[str, DiskTensor]:
    """Like `disk_tensors`, with a `PackedTensor` for each quantized weight.

    Raises:
        TuneError: as `disk_tensors`; or the quantization is not supported.
    """
    settings, tensors = quantization(folder), disk_tensors(folder)
    if not settings:
        if coded := next((each for each in tensors.values() if _is_float8(each)), None):
            raise TuneError(
                f"{coded.file}: {coded.name} is quantized ({coded.dtype}), but config.json has no {FIELD}, so its "
                "scales are unknown. Download config.json again"
            )
        return tensors
    method, dtype = METHODS[settings["quant_method"]], plain_dtype(read_json(folder / "config.json"))
    owners, packed = dict[str, str](), dict[str, PackedTensor]()
    for name in tensors:
        suffix = next((each for each in method.scales if name.endswith(each)), None)
        stem = name.removesuffix(suffix) if suffix else ""
        parts = method.parts(stem, tensors) if suffix else {}
        if not parts.keys() & {*method.codes}:
            continue
        weight = stem + method.weight
        with explained(f"{folder / 'config.json'}: cannot interpret {FIELD}", *MALFORMED):
            shape, codes, scales, zeros = method.read(weight, parts, settings)
            for grid in filter(None, (codes, scales, zeros)):
                grid.require_shape(weight, shape)
        if not (scales.tensor.dtype.is_floating_point or scales.tensor.dtype == torch.uint8):
            raise refused(scales.tensor.file, f"with scales of {scales.tensor.dtype} in {weight}")
        packed[weight] = PackedTensor(
            weight, codes.tensor.file, shape, dtype, codes, scales, zeros, tuple(parts.values())
        )
        owners |= {part.name: weight for part in parts.values()}
    unused = [name for name in tensors if name not in owners and OF_ACTIVATIONS.search(name)]
    if unused:
        warnings.warn(
            f"{folder}: ignoring {len(unused)} scales of activations, such as {unused[0]}: training does not quantize "
            "activations",
            stacklevel=1,  # one place, so that it is printed once
        )
    known = {*owners, *unused}
    left = {name: tensor for name, tensor in tensors.items() if name not in known}
    for tensor in left.values():
        if _is_float8(tensor) or tensor.name.endswith(tuple(filter(None, method.codes))):
            raise TuneError(
                f"{tensor.file}: {tensor.name} is quantized ({tensor.dtype}) but has no scales. Download all files of "
                "the checkpoint again"
            )
    return packed | left


def _is_float8(tensor: DiskTensor) -> bool:
    return tensor.dtype.itemsize == 1 and tensor.dtype.is_floating_point


def quantization(folder: Path) -> dict[str, Any]:
    """Return `quantization_config` of a checkpoint; empty if it is not quantized. Raises TuneError if the method is not
    supported."""
    file = folder / "config.json"
    fields = read_json(file) if file.exists() else {}
    settings = fields.get(FIELD) or (fields.get("text_config") or {}).get(FIELD) or {}
    if not isinstance(settings, dict):
        raise TuneError(f"{file}: {FIELD} must be a mapping; found {settings!r}. Download the file again")
    method = settings.get("quant_method")
    if settings and method not in [*METHODS]:
        raise refused(file, f"by {method or 'an unnamed method'}")
    return dict(settings)


def refused(where: Path | str, how: str) -> TuneError:
    """Return the error for weights with an unsupported quantization."""
    return TuneError(
        f"{where}: the weights are quantized {how}, which is not supported. Supported: {', '.join(METHODS)}. Use the "
        "checkpoint in bf16, fp16 or fp32, or create it with transformers: from_pretrained with the quantization "
        "config of this kind and dequantize=True (or model.dequantize()), then save_pretrained"
    )


def plain_dtype(fields: Mapping[str, Any]) -> torch.dtype:
    """Return the dtype of dequantized weights: the one that config.json names, or bf16."""
    for section in (fields, fields.get("text_config") or {}):
        named = section.get("dtype") or section.get("torch_dtype")
        if (dtype := getattr(torch, str(named).removeprefix("torch."), None)) in FLOATS:
            return dtype
    return torch.bfloat16


def plain_config(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json of the plain checkpoint."""
    plain = {name: value for name, value in fields.items() if name != FIELD}
    if isinstance(text := plain.get("text_config"), dict):
        plain["text_config"] = {name: value for name, value in text.items() if name != FIELD}
    if not any("dtype" in section or "torch_dtype" in section for section in (plain, plain.get("text_config") or {})):
        plain["dtype"] = str(plain_dtype(fields)).removeprefix("torch.")
    return plain


def num_packed(folder: Path) -> int:
    """Return the number of quantized weights in a checkpoint folder."""
    return sum(isinstance(tensor, PackedTensor) for tensor in plain_tensors(folder).values())


def stays_packed(
    folder: Path, tensors: Mapping[str, DiskTensor], changed: Collection[str]
) -> tuple[set[str], set[str]]:
    """Split the quantized weights among `tensors` of `folder` into those that stay quantized and those to write plain,
    if training `changed` some. Libraries fuse the weights of a part of a block (attention, an MLP, all experts), so a
    whole part is plain if one of its quantized weights has changed.

    Weights in FP8 whose size is not a multiple of their blocks are plain too, with a warning: transformers derives the
    blocks from the shapes, so it refuses such weights or reads other values.
    """
    packed = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, PackedTensor)}
    uneven = {name for name, tensor in packed.items() if tensor.is_uneven}
    if quantization(folder)["quant_method"] != "fp8":
        uneven = set()
    if named := sorted(uneven.difference(changed)):
        warnings.warn(
            f"{folder}: the blocks {list(packed[named[0]].scales.block)} of {FIELD} do not divide {len(named)} weights "
            f"such as {named[0]} {packed[named[0]].shape}, which transformers cannot read. Their parts of a block are "
            "written plain",
            stacklevel=2,
        )
    parts = {_part(name) for name in packed.keys() & uneven.union(changed)}
    plain = {name for name in packed if _part(name) in parts}
    return packed.keys() - plain, plain


def stored_as_packed(folder: Path, tensors: Mapping[str, DiskTensor], plain: Collection[str]) -> dict[str, DiskTensor]:
    """Return the tensors on disk in `folder` of quantized weights among `tensors` and of their activations, except for
    weights that become `plain`."""
    codes = {part.name for tensor in tensors.values() if isinstance(tensor, PackedTensor) for part in tensor.parts}
    parts = {_part(name) for name in plain}
    return {
        name: tensor
        for name, tensor in disk_tensors(folder).items()
        if (name in codes or name not in tensors) and _part(name) not in parts
    }


def packed_config(fields: Mapping[str, Any], plain: Collection[str]) -> dict[str, Any]:
    """Return config.json with these `fields` for a checkpoint whose weights `plain` are no longer quantized."""
    if FIELD not in fields:
        return {**fields, "text_config": packed_config(fields["text_config"], plain)}
    settings = fields[FIELD]
    key = next((each for each in EXCLUDED if settings.get(each)), METHODS[settings["quant_method"]].excluded)
    modules = {name.removesuffix(".weight") for name in plain}
    modules |= {_part(name) for name in plain if ".experts." in name}  # transformers has one module for all experts
    return {**fields, FIELD: settings | {key: [*(settings.get(key) or ()), *sorted(modules)]}}


def _part(name: str) -> str:
    """Return the name of the part of a block that contains the tensor `name`."""
    before, experts, _ = name.partition(".experts.")
    return f"{before}.experts" if experts else name.rpartition(".")[0].rpartition(".")[0]


def _fp8(weight: str, parts: Parts, settings: dict[str, Any]) -> Grids:
    """FP8 with fp32 scales: per block of 128 by 128 (DeepSeek-V3), per row, or one for all weights."""
    codes, scales = parts[""], next(parts[suffix] for suffix in METHODS["fp8"].scales if suffix in parts)
    if codes.dtype not in (torch.float8_e4m3fn, torch.float8_e5m2):
        raise refused(codes.file, f"as {codes.dtype} in {weight}")
    *_, rows, columns = codes.shape
    *_, across, along = 1, 1, *scales.shape
    block = settings.get("weight_block_size") or (rows // across, columns // along)
    if not settings.get("weight_block_size") and (rows % across or columns % along):
        raise TuneError(
            f"{codes.file}: {weight} {codes.shape} has scales {scales.shape}, which do not divide it evenly, and "
            f"{FIELD} in config.json has no weight_block_size. Set it to the blocks of the weights, usually [128, 128]"
        )
    if len(block) != 2 or not all(isinstance(size, int) and size > 0 for size in block):
        raise ValueError(f"weight_block_size {block!r} is not two positive integers, of rows and of columns")
    return codes.shape, Grid(codes), Grid(scales, tuple(block), _factors), None


def _mxfp4(weight: str, parts: Parts, settings: dict[str, Any]) -> Grids:
    """MXFP4 of gpt-oss: experts `[experts, in, out]`, stored as `[experts, out, in / 32, 16 bytes]`."""
    codes, scales = parts["_blocks"], parts["_scales"]
    if scales.dtype != torch.uint8:
        raise refused(scales.file, f"with scales of {scales.dtype} in {weight}")
    experts, outputs, groups, width = codes.shape
    grid = Grid(codes, (1, 1), lambda pairs: _fp4(pairs.flatten(-2)), 2 * width, -2, transposed=True)
    return [experts, 2 * width * groups, outputs], grid, Grid(scales, (2 * width, 1), _factors, transposed=True), None


def _modelopt(weight: str, parts: Parts, settings: dict[str, Any]) -> Grids:
    """NVIDIA Model Optimizer: FP8 with one scale, and NVFP4."""
    codes, scales, factor = parts[""], parts["_scale"], parts.get("_scale_2")
    if factor is None:
        return _fp8(weight, parts, {})
    if codes.dtype != torch.uint8 or scales.dtype != torch.float8_e4m3fn:
        raise refused(codes.file, f"by {settings.get('quant_algo')} of modelopt in {weight}")
    shape = [*codes.shape[:-1], 2 * codes.shape[-1]]
    scale = Grid(scales, (1, 16), lambda each: each.float() * factor.read())
    return shape, Grid(codes, (1, 1), _fp4, 2), scale, None


def _compressed(weight: str, parts: Parts, settings: dict[str, Any]) -> Grids:
    """Formats of the library compressed-tensors, which multiplies in the dtype of the scales."""
    group = _group(weight, settings)
    how, form = group["weights"], group.get("format") or settings["format"]
    codes, scales = parts.get("_packed") or parts[""], parts["_scale"]
    _require_no_transform(codes.file, settings)
    bits, size = how.get("num_bits", 8), how.get("group_size") or 0
    is_packed = "_packed" in parts
    is_ordered = how.get("actorder") in ("group", True) or "_g_idx" in parts
    if is_packed != WORDS.get(form, not is_packed) or is_ordered or bits not in (4, 8) or codes.dtype in FLOATS:
        raise refused(codes.file, f"as {form} of compressed-tensors, in {bits} bits, in {weight}")
    per, decode = (2, _fp4) if codes.dtype == torch.uint8 else (32 // bits, _integers(bits, center=1 << bits - 1))
    if not is_packed:
        per, decode = 1, _as_stored
    *lead, rows, columns = codes.shape
    columns *= per
    if "_shape" in parts:  # the last word may be padded
        columns = scales.shape[-1] * size if size > 0 else _columns(parts["_shape"])
    strategies = {
        "tensor": (rows, columns), "channel": (1, columns), "group": (1, size), "tensor_group": (1, size),
        "block": tuple(how.get("block_structure") or ()),
    }  # fmt: skip
    block = strategies[how.get("strategy") or ("group" if size > 0 else "channel")]
    factor, zeros = parts.get("_global_scale"), parts.get("_zero_point")
    scale = _factors if scales.dtype.itemsize == 1 else _as_stored
    if factor is not None:
        scale = lambda each: each.float() / factor.read()  # noqa: E731
    offsets = None
    if zeros is not None:
        offsets = Grid(zeros, block, decode, per, -2) if zeros.dtype == torch.int32 else Grid(zeros, block)
    return [*lead, rows, columns], Grid(codes, (1, 1), decode, per), Grid(scales, block, scale), offsets


def _require_no_transform(file: Path, settings: dict[str, Any]) -> None:
    """Raise TuneError if the weights are rotated, or sparse: they are then not the weights of a plain checkpoint."""
    if transforms := (settings.get("transform_config") or {}).get("config_groups"):
        raise refused(file, f"by compressed-tensors with transform_config ({', '.join(transforms)})")
    sparsity = (settings.get("sparsity_config") or {}).get("format")
    if sparsity not in (None, "dense"):
        raise refused(file, f"by compressed-tensors with sparsity_config.format {sparsity}")


def _group(weight: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the group of `config_groups` for the module of `weight`: by a name or pattern in its targets, else by the
    kind of module."""
    module, groups = weight.rpartition(".")[0], [*settings["config_groups"].values()]
    named = [
        group
        for group in groups
        for target in group["targets"]
        if target == module or (target.startswith("re:") and re.match(target[3:], module))
    ]
    kinds = [group for group in groups if "Linear" in group["targets"]]
    return [*named, *kinds, *groups][0]


def _awq(weight: str, parts: Parts, settings: dict[str, Any]) -> Grids:
    """4-bit AWQ: `[in, out / 8]`, in AWQ's order within a word; scales and zeros per group of inputs."""
    codes, scales, zeros = parts[".qweight"], parts[".scales"], parts.get(".qzeros")
    if settings.get("bits", 4) != 4 or settings.get("version", "gemm").lower() != "gemm" or zeros is None:
        raise refused(codes.file, _how(f"AWQ, {settings.get('version')}", settings.get("bits"), zeros, weight))
    inputs, outputs = codes.shape[0], scales.shape[1]
    size = settings.get("group_size", 128)
    block = (1, size if size > 0 else inputs)
    decode = _integers(4, order=[0, 4, 1, 5, 2, 6, 3, 7])
    return (
        [outputs, inputs],
        Grid(codes, (1, 1), decode, 8, -2, transposed=True),
        Grid(scales, block, transposed=True),
        Grid(zeros, block, decode, 8, -2, transposed=True),
    )


def _gptq(weight: str, parts: Parts, settings: dict[str, Any]) -> Grids:
    """GPTQ: `[in * bits / 32, out]`; scales and zeros per group of inputs. `g_idx` has the group of each input; without
    it, groups are neighboring inputs."""
    codes, scales, zeros, index = parts[".qweight"], parts[".scales"], parts.get(".qzeros"), parts.get(".g_idx")
    bits, size, ordered = settings.get("bits"), settings["group_size"], settings.get("desc_act")
    if bits not in (4, 8) or (ordered and index is None) or zeros is None:
        without = "" if index else ", without g_idx"
        raise refused(codes.file, _how(f"GPTQ, desc_act={ordered}{without}", bits, zeros, weight))
    overrides = [pattern for pattern in settings.get("dynamic") or {} if not pattern.startswith("-:")]
    if overrides:
        raise refused(codes.file, f"by GPTQ with other settings for some modules (dynamic: {', '.join(overrides)})")
    per, decode = 32 // bits, _integers(bits)
    inputs, outputs = codes.shape[0] * per, codes.shape[1]
    block = (1, size if size > 0 else inputs)
    # Except in version 2, zeros are stored minus one.
    one = 0 if settings.get("checkpoint_format") == "gptq_v2" else sum(1 << shift for shift in range(0, 32, bits))
    return (
        [outputs, inputs],
        Grid(codes, (1, 1), decode, per, transposed=True),
        Grid(scales, block, transposed=True, index=index),
        Grid(zeros, block, lambda words: decode(words + one), per, -2, transposed=True, index=index),
    )


def _how(method: str, bits: int | None, zeros: DiskTensor | None, weight: str) -> str:
    return f"by {method}, in {bits} bits, with{'' if zeros else 'out'} zeros in {weight}"


def _columns(shape: DiskTensor) -> int:
    with safe_open(shape.file, framework="numpy") as tensors:  # numpy: FakeTensorMode would fake torch tensors
        return int(tensors.get_tensor(shape.name)[-1])


def _length(part: slice) -> int:
    return part.stop - part.start


def _factors(scales: Tensor) -> Tensor:
    """Decode scales to fp32."""
    return POWERS[scales.int()] if scales.dtype == torch.uint8 else scales.float()


def _fp4(pairs: Tensor) -> Tensor:
    return embedding(pairs.int(), PAIRS).flatten(-2)


def _integers(bits: int, center: int = 0, order: Sequence[int] = ()) -> Callable[[Tensor], Tensor]:
    """Return a decoder of 32-bit words to numbers minus `center`, low bits first; 4-bit numbers may have an `order`."""

    def decode(words: Tensor) -> Tensor:
        in_bytes = words.clone(memory_format=torch.contiguous_format).view(torch.uint8)
        numbers = in_bytes.short() if bits == 8 else embedding(in_bytes.int(), NIBBLES).flatten(-2)
        return (numbers.unflatten(-1, (-1, 8))[..., order].flatten(-2) if order else numbers) - center

    return decode


METHODS = {
    "fp8": Method(("",), ("_scale_inv", "_scale"), _fp8),
    "fbgemm_fp8": Method(("",), ("_scale",), _fp8),
    "mxfp4": Method(("_blocks",), ("_scales",), _mxfp4),
    "compressed-tensors": Method(
        ("_packed", ""),
        ("_scale",),
        _compressed,
        others=("_global_scale", "_zero_point", "_shape", "_g_idx"),
        excluded="ignore",
    ),
    "modelopt": Method(("",), ("_scale",), _modelopt, others=("_scale_2",), excluded="ignore"),
    "gptq": Method((".qweight",), (".scales",), _gptq, others=(".qzeros", ".g_idx"), weight=".weight"),
    "awq": Method((".qweight",), (".scales",), _awq, others=(".qzeros",), weight=".weight"),
}
