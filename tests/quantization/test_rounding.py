"""Quantization-aware training uses the exported weights, bit by bit as compressed-tensors reads them."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from edited_recipes import run_edited, with_edits
from helpers import save_checkpoint, slow_but, weekly_but
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.testing import assert_close
from update_in_backward import in_backward

from tune import quantization
from tune.checkpointers import exported_types, load_model
from tune.cli import main
from tune.errors import TuneError
from tune.models.names import Names
from tune.quantization import Rounding
from tune.quantization.compressed import dequantize, quantize


@pytest.fixture(scope="module")
def in_bf16(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = Path(shutil.copytree(checkpoint, tmp_path_factory.mktemp("bf16") / "model"))
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors")
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | {"dtype": "bfloat16"}))
    return folder


def decompressed(folder: Path) -> dict[str, Tensor]:
    """The quantized weights of a folder as compressed-tensors reads them."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    fields = json.loads((folder / "config.json").read_text())["quantization_config"]
    args = QuantizationArgs(**fields["config_groups"]["group_0"]["weights"])
    library: Any = BaseCompressor.get_value_from_registry(fields["format"])
    parts: dict[str, dict[str, Tensor]] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        owner, _, kind = name.rpartition(".")
        parts.setdefault(owner, {})[kind] = tensor
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    return {
        f"{owner}.weight": library.decompress(tensors, scheme)["weight"]
        for owner, tensors in parts.items()
        if "weight_scale" in tensors
    }


WAYS = {
    "full_finetune": {
        "int4": [],
        "int8": ["micro_batch_size=4"],  # updates in the backward
        "fp8": ["compute.dtype=bf16", "edit=bf16"],
    },
    "lora_finetune": {
        "int4": ["adapter.target_modules=[q_proj,down_proj]"],
        "mxfp4": ["adapter.target_modules=[q_proj,down_proj]"],
        "int8": ["adapter.dora=true"],
        "fp8": ["compute.dtype=bf16"],
    },
}


ALL_WAYS = [(recipe, kind) for recipe in WAYS for kind in WAYS[recipe]]


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "kind"), slow_but(ALL_WAYS[::4], ALL_WAYS))
def test_exported_weights_equal_those_seen_in_training(
    recipe: str, kind: str, checkpoint: Path, in_bf16: Path, chats: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    pytest.importorskip("compressed_tensors")
    seen: dict[int, Tensor] = {}
    models: list[Any] = []
    rounded, round_linears = Rounding.__call__, quantization.round_linears

    def recorded(rounding: Rounding, weight: Tensor) -> Tensor:
        seen[id(rounding)] = rounded(rounding, weight)
        return seen[id(rounding)]

    monkeypatch.setattr(Rounding, "__call__", recorded)
    monkeypatch.setattr(
        quantization, "round_linears", lambda model, *others: models.append(model) or round_linears(model, *others)
    )
    base = in_bf16 if "compute.dtype=bf16" in WAYS[recipe][kind] else checkpoint
    settings = [
        f"model.path={base}", f"dataset.path={chats}", f"dataset.validation={chats}", f"edit={kind}",
        f"output_dir={tmp_path / 'run'}", "max_seq_len=128", "device=cpu", "compute.dtype=fp32", "global_batch_size=4",
        "max_steps=2", "optimizer.lr=1e-2", "schedule.warmup=0", *WAYS[recipe][kind],
    ]  # fmt: skip
    script = in_backward(recipe, tmp_path) if (recipe, kind) == ("full_finetune", "int8") else recipe
    run_edited(script, settings)  # the run ends with a validation
    main(["quantize", str(tmp_path / "run"), "--to", kind, "--out", str(tmp_path / "out")])
    shipped, before = decompressed(tmp_path / "out"), load_file(base / "model.safetensors")
    names = Names.of(models[0])
    layers = {name: layer for name, layer in models[0].named_modules() if getattr(layer, "rounding", None) is not None}
    assert {f"{names.module(name)}.weight" for name in layers} == shipped.keys() and len(layers) == 21
    for name, layer in layers.items():
        on_disk, trained = f"{names.module(name)}.weight", seen[id(layer.rounding)]
        assert torch.equal(trained.to(shipped[on_disk].dtype), shipped[on_disk]), name
        assert not torch.equal(trained, before[on_disk].float())


def test_product_and_gradient() -> None:
    weight = torch.randn(48, 128, requires_grad=True)
    layer = torch.nn.Linear(128, 48)
    layer.weight = torch.nn.Parameter(weight.detach())
    model: Any = torch.nn.Module()
    model.blocks = torch.nn.ModuleList([layer])
    quantization.round_linears(model, "int4", {"blocks.0.weight": torch.float32}, "fp32")
    input = torch.randn(5, 128, requires_grad=True)
    output = layer(input)
    rounded = dequantize(*quantize(weight.detach(), "int4", 128))
    assert_close(output, input @ rounded.T + layer.bias)
    output.square().sum().backward()
    assert_close(layer.weight.grad, (2 * output.detach()).T @ input)
    assert_close(input.grad, 2 * output.detach() @ rounded)


@pytest.mark.weekly
def test_compiled_rounding_gives_the_same_bits() -> None:
    """Inductor would omit the rounding of scales to bf16 if it compiled the steps itself."""
    rounding = Rounding("int4", 32, torch.bfloat16)
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    compiled = torch.compile(lambda weight: rounding(weight * 2) + 1, fullgraph=True)
    assert torch.equal(compiled(weight), rounding(weight * 2) + 1)


ROWS = ["model.float8=rowwise"]
WRONG = {
    "unknown kind": ("full_finetune", ["edit=int3"], "kind: 'int3' is not one of"),
    "nf4": ("lora_finetune", ["edit=int4", "model.quantization=nf4"], "model.quantization=null"),
    "dropout": ("lora_finetune", ["edit=int4", "adapter.dropout=0.1"], "adapter.dropout: blocks.0"),
    "transformers": (
        "full_finetune", ["edit=int8", "model._component_=tune.models.hf"],
        "model: only models of tune.models.build",
    ),
    "cast twice": (
        "lora_finetune",
        ["edit=int8", "adapter.modules_to_save=[input_layernorm]", "compute.dtype=bf16", "model.path=BF16"],
        "adapter.modules_to_save: FSDP",
    ),
    "fp32 in bf16": ("full_finetune", ["edit=int8", "compute.dtype=bf16"], "exported as float32"),
    "odd rows": ("full_finetune", ["edit=int4", "model.path=ODD"], "do not divide into groups of"),
    "experts": ("full_finetune", ["edit=int4", "model.path=EXPERTS"], "only dense models can be quantized"),
    "float8": ("full_finetune", ["model.float8=mx"], "model.float8: 'mx' is not one of"),
    "float8, rounded": ("full_finetune", [*ROWS, "edit=int8"], "Set model.float8=null"),
    "float8, nf4": ("lora_finetune", [*ROWS, "model.quantization=nf4"], "model.quantization: it cannot be"),
    "float8, tensor parallel": ("full_finetune", [*ROWS, "parallel.tp=2"], "parallel.tp: it cannot be"),
    "float8, odd rows": ("full_finetune", [*ROWS, "model.path=ODD"], "must be multiples of 16"),
    "float8, experts": ("full_finetune", [*ROWS, "model.path=EXPERTS"], "models with experts"),
}  # fmt: skip


@pytest.mark.weekly(but_one=True)
@pytest.mark.parametrize("wrong", weekly_but([*WRONG][::5], WRONG))
def test_invalid_inputs_are_refused(
    wrong: str, checkpoint: Path, in_bf16: Path, chats: Path, tmp_path: Path, told: Any
) -> None:
    recipe, settings, message = WRONG[wrong]
    settings = [setting.replace("BF16", str(in_bf16)) for setting in settings]
    places = {"ODD": {"intermediate_size": 100}, "EXPERTS": {"config_class": "MixtralConfig", "num_local_experts": 4}}
    for name, changes in places.items():
        if f"model.path={name}" in settings:
            folder = save_checkpoint(tmp_path / name, **changes)
            settings = [setting.replace(name, str(folder)) for setting in settings]
    common = [f"model.path={checkpoint}", f"dataset.path={chats}", f"output_dir={tmp_path / 'run'}", "device=cpu"]
    settings = [*common, "compute.dtype=fp32", *settings]
    assert message in told(*with_edits(recipe, settings))
    with pytest.raises(TuneError, match=message):
        run_edited(recipe, settings)


def test_exported_types_match_the_files(checkpoint: Path, in_bf16: Path) -> None:
    model = load_model(str(in_bf16))
    assert set(exported_types(model, str(in_bf16)).values()) == {torch.bfloat16}
    assert set(exported_types(model, str(checkpoint)).values()) == {torch.float32}
    assert set(exported_types(model, str(checkpoint), "bf16").values()) == {torch.bfloat16}


@pytest.mark.slow
def test_rows_cut_by_tensor_parallelism_are_refused(checkpoint: Path, chats: Path, told_to: Any) -> None:
    settings = [f"model.path={checkpoint}", f"dataset.path={chats}", "device=cpu", "compute.dtype=fp32", "edit=int8"]
    recipe, settings = with_edits("full_finetune", [*settings, "parallel.tp=2"])
    (told,) = told_to(2, [recipe, *settings])
    assert "parallel.tp: it cuts rows" in told
