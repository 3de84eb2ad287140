"""What weights rounded in training cannot be combined with is an error of the function, whoever calls it."""

import dataclasses
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from tune import distributed, models, peft
from tune.checkpointers import load_model
from tune.errors import TuneError
from tune.quantization import compute_in_float8, quantize_linears, round_linears


class Fp32(dict[str, torch.dtype]):
    """The types of the exported weights: all fp32."""

    def __missing__(self, name: str) -> torch.dtype:
        return torch.float32


def test_dropout_of_an_adapter(checkpoint: Path) -> None:
    model = load_model(str(checkpoint))
    peft.add_adapters(model, peft.adapter(rank=4, dropout=0.1))
    with pytest.raises(TuneError, match=r"adapter\.dropout: .* Set it to 0"):
        round_linears(model, "int8", Fp32(), "fp32")


def test_a_computation_less_precise_than_the_export(checkpoint: Path) -> None:
    """As of adapters that are cast before they are merged."""
    model = load_model(str(checkpoint))
    peft.add_adapters(model, peft.adapter(rank=4, modules_to_save=["norm"]))
    with pytest.raises(TuneError, match=r"exported as float32.* Set compute\.dtype=fp32"):
        round_linears(model, "int8", Fp32(), "bf16")


def test_models_of_transformers(checkpoint: Path) -> None:
    with torch.device("meta"):
        model = models.hf(str(checkpoint))
    with pytest.raises(TuneError, match=r"model: only models of tune\.models\.build"):
        round_linears(model, "int8", Fp32(), "fp32")


def test_weights_that_are_quantized(checkpoint: Path) -> None:
    model = load_model(str(checkpoint))
    quantize_linears(model, "nf4")
    with pytest.raises(TuneError, match=r"Set model\.quantization=null"):
        round_linears(model, "int8", Fp32(), "fp32")


@pytest.mark.parametrize("has_adapter", [False, True])
def test_products_in_float8(has_adapter: bool, checkpoint: Path) -> None:
    """They would take the weights unrounded, without a word."""
    model = load_model(str(checkpoint))
    compute_in_float8(model, "rowwise", torch.device("cpu"))
    if has_adapter:
        peft.add_adapters(model, peft.adapter(rank=4))
    with pytest.raises(TuneError, match=r"Float8Linear.* model\.float8"):
        round_linears(model, "int8", Fp32(), "fp32")


class Mesh:
    """A mesh of two processes that share the rows of each block."""

    def __init__(self, axis: str = "") -> None:
        self.axis = axis

    def __getitem__(self, axis: str) -> "Mesh":
        return Mesh(axis)

    def size(self, dim: int | None = None) -> int:
        return 2 if self.axis == "tp" else 1

    def get_local_rank(self, axis: str) -> int:
        return 0


def test_shares_of_rows(checkpoint: Path) -> None:
    """A scale belongs to a whole row, which tensor parallelism cuts."""
    world = distributed.init("cpu")
    world = dataclasses.replace(world, mesh=cast(Any, Mesh()))
    with torch.device("meta"):
        model = models.build(str(checkpoint))
    round_linears(model, "int8", Fp32(), "fp32")
    with pytest.raises(TuneError, match=r"parallel\.tp: .* Set it to 1"):
        distributed.parallelize(model, world, dtype="fp32")
