"""Quantized checkpoints in published formats, made from plain ones."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

FP8 = torch.float8_e4m3fn
LINEAR = r"(_proj|kv_a_proj_with_mqa|\.w[123])\.weight$"


def rewrite(folder: Path, make: Callable[[str, Tensor], dict[str, Tensor]], matching: str, **settings: object) -> Path:
    """Replace weights with names `matching` by the tensors that `make` returns, store other weights in bf16, and record
    the `settings` in config.json."""
    tensors = load_file(folder / "model.safetensors")
    tensors |= {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items() if tensor.is_floating_point()}
    names = [name for name in tensors if re.search(matching, name)]
    assert names
    for name in names:
        tensors |= {each: tensor.contiguous() for each, tensor in make(name, tensors.pop(name).float()).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= {"dtype": "bfloat16", "quantization_config": settings}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def blocks_of(weight: Tensor, size: int) -> Tensor:
    """Return the largest magnitude of each block of `size` by `size`; the last blocks may be smaller."""
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight.abs(), (0, -columns % size, 0, -rows % size))
    return padded.unflatten(0, (-1, size)).unflatten(2, (-1, size)).amax(dim=(1, 3))


def fp8(folder: Path, size: int = 32, matching: str = LINEAR, **settings: object) -> Path:
    """Quantize like DeepSeek-V3 and MiniMax-M2: a scale for each block of `size` by `size`."""

    def make(name: str, weight: Tensor) -> dict[str, Tensor]:
        scales = blocks_of(weight, size) / 448
        spread = scales.repeat_interleave(size, 0).repeat_interleave(size, 1)[: weight.shape[0], : weight.shape[1]]
        return {name: (weight / spread).to(FP8), f"{name}_scale_inv": scales}

    about = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [size, size]} | settings
    return rewrite(folder, make, matching, **about)


def fp8_of_tensors(folder: Path, suffix: str = "_scale_inv", of_inputs: str = "activation_scale") -> Path:
    """Quantize like Ministral 3: one scale for a weight and one for its inputs."""

    def make(name: str, weight: Tensor) -> dict[str, Tensor]:
        scale = weight.abs().amax() / 448
        inputs = name.replace("weight", of_inputs)
        return {name: (weight / scale).to(FP8), f"{name}{suffix}": scale, inputs: torch.tensor(0.5)}

    return rewrite(
        folder, make, LINEAR, quant_method="fp8", activation_scheme="static", weight_block_size=None,
        modules_to_not_convert=["lm_head"],
    )  # fmt: skip


def mxfp4(folder: Path) -> Path:
    """Quantize like gpt-oss: random codes for its experts, stored as blocks and scales."""
    generator = torch.Generator().manual_seed(1)

    def make(name: str, weight: Tensor) -> dict[str, Tensor]:
        experts, inputs, outputs = weight.shape
        shape = (experts, outputs, inputs // 32, 16)
        codes = torch.randint(256, shape, generator=generator, dtype=torch.uint8)
        scales = torch.randint(118, 122, shape[:3], generator=generator, dtype=torch.uint8)
        return {f"{name}_blocks": codes, f"{name}_scales": scales}

    unquantized = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    return rewrite(folder, make, "experts.*_proj$", quant_method="mxfp4", modules_to_not_convert=unquantized)


def compressed(folder: Path, form: str, matching: str = LINEAR, **weights: object) -> Path:
    """Quantize with the compressed-tensors library in the format `form`, with the settings `weights`."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    settings = QuantizationArgs(**weights)
    scheme = QuantizationScheme(targets=["Linear"], weights=settings)
    library: type[BaseCompressor] = BaseCompressor.get_value_from_registry(form)

    def make(name: str, weight: Tensor) -> dict[str, Tensor]:
        weight = weight.bfloat16()
        if settings.strategy == "block":
            high, wide = settings.block_structure
            blocks = weight.unflatten(0, (-1, high)).unflatten(2, (-1, wide)).transpose(1, 2).flatten(2)
        elif settings.strategy == "tensor":
            blocks = weight.reshape(1, -1)
        else:
            blocks = weight.unflatten(1, (-1, settings.group_size or weight.shape[1]))
        factor = generate_gparam(weight.amin(), weight.amax()) if settings.strategy == "tensor_group" else None
        scale, zero = calculate_qparams(blocks.amin(-1), blocks.amax(-1), settings, global_scale=factor)
        state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
        made = library.compress(state | ({"weight_global_scale": factor} if factor is not None else {}), scheme)
        return {name.replace("weight", each): tensor for each, tensor in made.items() if tensor is not None}

    group = {"targets": ["Linear"], "weights": json.loads(settings.model_dump_json()), "input_activations": None}
    return rewrite(
        folder, make, matching, quant_method="compressed-tensors", format=form, quantization_status="compressed",
        config_groups={"group_0": group | {"format": form}}, ignore=["lm_head"],
    )  # fmt: skip


def awq(folder: Path, size: int = 32) -> Path:
    """Quantize like AutoAWQ: random words of 4-bit codes and zeros, scales for groups of `size` inputs."""
    generator = torch.Generator().manual_seed(1)

    def make(name: str, weight: Tensor) -> dict[str, Tensor]:
        outputs, inputs = weight.shape
        stem, limits = name.removesuffix(".weight"), (-(2**31), 2**31)
        words = torch.randint(*limits, (inputs, outputs // 8), generator=generator).int()
        zeros = torch.randint(*limits, (inputs // size, outputs // 8), generator=generator).int()
        scales = torch.rand(inputs // size, outputs, generator=generator).half() / 100
        return {f"{stem}.qweight": words, f"{stem}.qzeros": zeros, f"{stem}.scales": scales}

    return rewrite(folder, make, LINEAR, quant_method="awq", bits=4, group_size=size, zero_point=True, version="gemm")


def gptq(folder: Path, bits: int = 4, size: int = 32, **settings: object) -> Path:
    """Quantize like GPTQModel: random codes and zeros (below the maximum), scales for groups of `size` inputs."""
    generator, per = torch.Generator().manual_seed(1), 32 // bits

    def words(*shape: int) -> Tensor:
        codes = torch.randint(2**bits - 1, (*shape, per), generator=generator)
        total = (codes << torch.arange(0, 32, bits)).sum(-1)
        return torch.where(total >= 2**31, total - 2**32, total).int()

    def make(name: str, weight: Tensor) -> dict[str, Tensor]:
        outputs, inputs = weight.shape
        return {
            name.replace("weight", "qweight"): words(inputs // per, outputs),
            name.replace("weight", "qzeros"): words(inputs // size, outputs // per),
            name.replace("weight", "scales"): torch.rand(inputs // size, outputs, generator=generator).half() / 2**bits,
            name.replace("weight", "g_idx"): torch.arange(inputs, dtype=torch.int32) // size,
        }

    about = {"quant_method": "gptq", "bits": bits, "group_size": size, "desc_act": False, "sym": False} | settings
    return rewrite(folder, make, LINEAR, **about)
