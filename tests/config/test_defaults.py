"""The value of a setting in a recipe's YAML is the default of the argument that the recipe passes it as. So a copy that
deletes the setting, or a loop of your own, computes the same."""

import ast
import importlib
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
from omegaconf import OmegaConf

from tune import config
from tune.lookup import locate

# Settings that a method chooses, where the component's default is another library's or that of another method.
CHOSEN = {
    "optimizer.lr", "optimizer.betas", "optimizer.weight_decay", "optimizer.fused",  # torch's defaults
    "schedule.warmup", "schedule.min_ratio", "loss.high", "max_turns", "generation.temperature",
    "dataset.kind", "dataset.too_long", "model.head", "value.head",
    "max_seq_len",  # of tune.distributed.init: without it, the cost of attention is left out
}  # fmt: skip
MISSING = inspect.Parameter.empty


def passed_on(recipe: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield the key of each setting that a recipe passes to a function, its value, and the default of the function's
    argument."""
    file = config.find_recipe(recipe)
    module = importlib.import_module(recipe)
    settings: Any = OmegaConf.to_container(OmegaConf.load(config.find_config(recipe)))
    for call in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        function = called(call, module) if isinstance(call, ast.Call) else None
        if function is None:
            continue
        names = [*inspect.signature(function).parameters]
        places = [ast.keyword(name, value) for name, value in zip(names, call.args, strict=False)]
        for keyword in [*places, *call.keywords]:
            key = ast.unparse(keyword.value).removeprefix("cfg.")
            value = at(settings, key) if ast.unparse(keyword.value).startswith("cfg.") else MISSING
            named = value if keyword.arg is None and isinstance(value, dict) else {keyword.arg: value}
            for name, each in named.items():
                yield f"{key}.{name}" if keyword.arg is None else key, each, default_of(function, name)
    yield from of_components(settings)


def called(call: ast.Call, module: Any) -> Any:
    """Return the function of a call if it is known where the module is imported, else None."""
    try:
        function = eval(ast.unparse(call.func), vars(module))
        inspect.signature(function)
    except (NameError, AttributeError, TypeError, ValueError):
        return None
    return function


def at(settings: Any, key: str) -> Any:
    for name in key.split("."):
        if not isinstance(settings, dict) or name not in settings:
            return MISSING
        settings = settings[name]
    return settings


def of_components(settings: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    for name, value in settings.items():
        if name != "_component_" and "_component_" in settings:
            yield f"{prefix}{name}", value, default_of(locate(settings["_component_"]), name)
        if isinstance(value, dict):
            yield from of_components(value, f"{prefix}{name}.")


def default_of(function: Any, name: str | None) -> Any:
    parameter = inspect.signature(function).parameters.get(name or "")
    return parameter.default if parameter else MISSING


@pytest.mark.slow
def test_values_of_the_yaml_are_the_defaults_of_the_functions() -> None:
    compared: dict[str, set[str]] = {}
    for recipe in config.list_recipes_with_settings():
        for key, value, default in passed_on(recipe) if recipe in config.list_configs() else ():
            is_reference = isinstance(value, str) and ("${" in value or value == "???")
            if MISSING in (value, default) or isinstance(value, dict) or is_reference:
                continue
            is_empty = not value and not default and not isinstance(value, bool | int | float)
            if value != default and not is_empty and key not in CHOSEN:
                compared.setdefault(key, set()).add(f"{recipe}: {value!r}, {default!r}")
            else:
                compared.setdefault(key, set())
    assert len(compared) > 60
    assert {key: found for key, found in compared.items() if found} == {}


@pytest.mark.parametrize(
    "key", ["compute.activation_offload", "model.quantization", "parallel.zero_stage", "global_batch_size"]
)
def test_groups_and_single_settings_are_compared(key: str) -> None:
    assert key in {name for name, _, default in passed_on("lora_finetune") if default is not MISSING}
