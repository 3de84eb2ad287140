"""Does a value from YAML fit a type, and how is that said to a person."""

import json
from collections.abc import Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from tune.types import Range

NAMES = {int: "an integer", float: "a number", bool: "true or false", str: "a string", Path: "a path"}
NAMES |= {NoneType: "null", list: "a list", dict: "a group of keys"}


def mismatch(value: Any, kind: Any) -> str:
    """What is wrong with `value` as a `kind`, as a sentence; empty if nothing is."""
    if fits(value, kind):
        return ""
    if isinstance(value, bool | int | float) and fits(show(value), kind):
        return f"{show(value)} is not {describe(kind)}. Quote it twice: '\"{show(value)}\"'."
    return f"{show(value)} is not {describe(kind)}."


def fits(value: Any, kind: Any) -> bool:
    """Whether `value` is a `kind`; a type that YAML cannot express, and that is not known here, fits everything."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return any(fits(value, each) for each in arguments)
    if origin is Annotated:
        ranges = [each for each in arguments[1:] if isinstance(each, Range)]
        return fits(value, arguments[0]) and all(value in each for each in ranges)
    if origin is Literal:
        return any(type(value) is type(each) and value == each for each in arguments)
    if origin in (list, Sequence):
        return isinstance(value, list) and all(fits(each, arguments[0]) for each in value)
    if origin is tuple:
        if not isinstance(value, list):
            return False
        if arguments[-1] is Ellipsis:
            return all(fits(each, arguments[0]) for each in value)
        return len(value) == len(arguments) and all(map(fits, value, arguments))
    if origin is dict:
        return isinstance(value, dict) and all(fits(each, arguments[1]) for each in value.values())
    if kind in (int, float):
        return isinstance(value, int if kind is int else int | float) and not isinstance(value, bool)
    if kind in (list, tuple, Sequence):
        return isinstance(value, list)
    if kind in NAMES:
        return isinstance(value, str if kind is Path else kind)
    return True


def describe(kind: Any) -> str:
    """A `kind` in words that read on from "0 is not ..."."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return " or ".join(describe(each) for each in arguments)
    if origin is Annotated:
        return next((each.description for each in arguments[1:] if isinstance(each, Range)), describe(arguments[0]))
    if origin is Literal:
        return ("one of " if len(arguments) > 1 else "") + ", ".join(map(str, arguments))
    if origin in (list, Sequence):
        return f"a list (each {describe(arguments[0])})"
    if origin is tuple:
        if arguments[-1] is Ellipsis:
            return f"a list (each {describe(arguments[0])})"
        return f"a list of {len(arguments)} ({', '.join(map(describe, arguments))})"
    if origin is dict:
        return f"a group of keys (each {describe(arguments[1])})"
    return NAMES.get(origin or kind, "a list" if (origin or kind) in (tuple, Sequence) else "of the right type")


def show(value: Any) -> str:
    """A value as a person would write it in YAML."""
    return json.dumps(value) if value is None or isinstance(value, bool) else repr(value)
