"""A peer's config as a dict of its leaves (`datasets[0].path`: value), and questions about one.

A name is a key, or a key with `*` for any characters; `[]` in a name stands for any index.
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
    """Yield each value by its dotted key; `datasets[0].path` for groups in lists. Lists of plain values are values."""
    if isinstance(values, dict) and (values or not prefix):
        for name, value in values.items():
            yield from leaves(value, f"{prefix}.{name}" if prefix else str(name))
    elif isinstance(values, list) and any(isinstance(item, dict) for item in values):
        for index, item in enumerate(values):
            yield from leaves(item, f"{prefix}[{index}]")
    else:
        yield prefix, values


def resolved(values: Leaves) -> Leaves:
    """Replace each `${key}` by its value, where the file has that key."""

    def resolve(node: Any, key: Any) -> Any:
        try:
            value = node[key]
        except OmegaConfBaseException:  # a resolver of theirs
            return OmegaConf.to_container(node)[key]  # type: ignore[index]
        if isinstance(value, DictConfig):
            return {name: resolve(value, name) for name in value}
        if isinstance(value, Container):
            return [resolve(value, index) for index in range(len(value))]  # type: ignore[arg-type]
        return value

    cfg = OmegaConf.create(values)
    return {key: resolve(cfg, key) for key in values}


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
    """`datasets[0].path` as `datasets[].path`."""
    return re.sub(r"\[\d+\]", "[]", key)


def values_of(config: Leaves, *names: str) -> list[Any]:
    return [value for key, value in config.items() if matches(names, without_index(key))]


def is_set(config: Leaves, *names: str) -> bool:
    """Whether a key with one of these names has a value that is neither empty nor off."""
    return any(value not in (*NOTHING, False, 0) for value in values_of(config, *names))


def text_of(config: Leaves, *names: str) -> str:
    """The values of the keys with these names, in lower case, one a line."""
    return "\n".join(str(value).lower() for value in values_of(config, *names) if value is not None)


def exceeds(config: Leaves, name: str, limit: float) -> bool:
    """Whether the value of this key is a number above `limit`."""
    value = config.get(name)
    return isinstance(value, int | float) and value > limit
