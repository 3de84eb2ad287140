"""What a recipe changes in a model before it shards it."""

from collections.abc import Callable
from typing import Any

import torch
from omegaconf import DictConfig

from tune import checkpointers, peft, quantization
from tune.config import instantiate
from tune.rules import Facts


def alter(cfg: DictConfig, model: Any, device: torch.device, change: Callable[[str, Callable[[], Any]], Any]) -> None:
    """Change `model`, on the meta device, as recipes do before they shard it on such a `device`: quantised weights,
    products in float8, adapters, rounding. `change` is called with the setting that asks for one, and what makes it."""
    value = Facts(cfg)
    if value("quantization.weights"):
        change("quantization", lambda: quantization.quantize_linears(model, double=cfg.quantization.double))
    if scaling := value("quantization.float8"):
        change("quantization", lambda: quantization.compute_in_float8(model, scaling, device))
    if value("adapter"):
        change("adapter", lambda: peft.add_adapters(model, instantiate(cfg.adapter)))
    if kind := value("quantization.qat"):
        change("quantization", lambda: quantization.round_linears(
            model, kind, checkpointers.exported_types(model, cfg.model.path, cfg.export.get("dtype")), cfg.dtype
        ))  # fmt: skip
