"""Arguments of a call, checked as settings are."""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, get_type_hints

from tune.errors import TuneError
from tune.types import mismatch


def require_arguments(function: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Raises TuneError for an argument, by name, that does not fit the function's annotation of it, and for a
    `tokenizer` of transformers."""
    if hasattr(given.get("tokenizer"), "save_pretrained"):
        raise TuneError(
            f"tokenizer: {type(given['tokenizer']).__name__} is transformers'. Give Tokenizer.of(tokenizer)"
        )
    for name, kind in _kinds(function).items():
        if name in given and (problem := mismatch(given[name], kind)):
            raise TuneError(f"{name}: {problem}")


@cache
def _kinds(function: Callable[..., Any]) -> dict[str, Any]:
    return get_type_hints(function, include_extras=True)
