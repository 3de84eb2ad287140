"""Flatten a peer's config to a dict of leaves (`datasets[0].path`: value), and look up values in it.

A name is a key in which `*` matches any characters and `[]` any index.
"""

import functools
import re
from collections.abc import Iterator
from typing import Any

import yaml
from omegaconf import Container, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

Leaves = dict[str, Any]
KeyNames = str | tuple[str, ...]

NOTHING: tuple[Any, ...] = (None, "", [], {})


def leaves(values: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each value with its dotted key (`datasets[0].path` for groups in lists). A list of scalars is one value."""
    if isinstance(values, dict) and (values or not prefix):
        for name, value in values.items():
            yield from leaves(value, f"{prefix}.{name}" if prefix else str(name))
    elif isinstance(values, list) and any(isinstance(item, dict) for item in values):
        for index, item in enumerate(values):
            yield from leaves(item, f"{prefix}[{index}]")
    else:
        yield prefix, values


def resolved(values: Leaves) -> Leaves:
    """Replace each `${key}` by its value if the file has that key.

    Resolvers, such as `${oc.env:NAME}`, stay as written: the file may be another person's, and they read this machine.
    """

    def resolve(node: Any, key: Any) -> Any:
        try:
            value = node[key]
        except OmegaConfBaseException:  # an unknown key
            return OmegaConf.to_container(node)[key]  # type: ignore[index]
        if isinstance(value, DictConfig):
            return {name: resolve(value, name) for name in value}
        if isinstance(value, Container):
            return [resolve(value, index) for index in range(len(value))]  # type: ignore[arg-type]
        return value

    cfg = OmegaConf.create(_with_resolvers_as_text(values))
    return {key: resolve(cfg, key) for key in values}


def _with_resolvers_as_text(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_resolvers_as_text(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_with_resolvers_as_text(each) for each in value]
    return re.sub(r"\$\{(?=[\w.]+:)", r"\\${", value) if isinstance(value, str) else value


def show(value: Any) -> str:
    """Write a value as YAML on one line."""
    return yaml.safe_dump({"x": value}, default_flow_style=True, width=float("inf"), allow_unicode=True)[4:-2]


def matches(names: KeyNames, text: str) -> bool:
    """Whether `text` is one of `names`."""
    names = (names,) if isinstance(names, str) else names
    return any(name == text or ("*" in name and _pattern(name).fullmatch(text)) for name in names)


@functools.cache
def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(re.escape(name).replace(r"\*", ".*"), re.DOTALL)


def without_index(key: str) -> str:
    """Drop the index: `datasets[0].path` becomes `datasets[].path`."""
    return re.sub(r"\[\d+\]", "[]", key)


def values_of(config: Leaves, *names: str) -> list[Any]:
    return [value for key, value in config.items() if matches(names, without_index(key))]


def is_set(config: Leaves, *names: str) -> bool:
    """Whether any key with one of these names has a value that is not empty, false or 0."""
    return any(value not in (*NOTHING, False, 0) for value in values_of(config, *names))


def text_of(config: Leaves, *names: str) -> str:
    """Return the values of the keys with these names in lower case, one per line."""
    return "\n".join(str(value).lower() for value in values_of(config, *names) if value is not None)


def exceeds(config: Leaves, name: str, limit: float) -> bool:
    """Whether this key has a number greater than `limit`."""
    value = config.get(name)
    return isinstance(value, int | float) and value > limit
