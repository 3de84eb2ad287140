"""Define types with ranges, for annotations of settings and arguments, and check YAML values against types."""

import functools
import inspect
import json
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from math import inf
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

from tune.errors import TuneError

C = TypeVar("C", bound=Callable[..., Any])


class Range(NamedTuple):
    """A range of numbers; `description` completes "0 is not ..."."""

    description: str
    has: Callable[[float], bool]

    def __repr__(self) -> str:
        return self.description


PositiveInt = Annotated[int, Range("a positive integer", lambda x: x >= 1)]
NonNegativeInt = Annotated[int, Range("a non-negative integer", lambda x: x >= 0)]
PositiveFloat = Annotated[float, Range("a positive number", lambda x: 0 < x < inf)]
NonNegativeFloat = Annotated[float, Range("a non-negative number", lambda x: 0 <= x < inf)]
Fraction = Annotated[float, Range("a number from 0 to below 1", lambda x: 0 <= x < 1)]
StepsOrFraction = NonNegativeInt | Fraction
UnitInterval = Annotated[float, Range("a number from 0 to 1", lambda x: 0 <= x <= 1)]
Epochs = Annotated[float, Range("a number above 0 and up to a million", lambda x: 0 < x <= 1e6)]
# Ranges of arguments that torch's optimizers do not check. An `eps` of 0 divides by zero if a gradient is zero.
Rate = Annotated[float, Range("a number from 0 to 100", lambda x: 0 <= x <= 100)]
Ratio = Annotated[float, Range("a number above 0 and up to a million", lambda x: 0 < x <= 1e6)]
Epsilon = Annotated[float, Range("a number from 1e-30 to 1", lambda x: 1e-30 <= x <= 1)]
Decays = Annotated[
    list[Fraction],
    Range("a list of two or more numbers from 0 to below 1, such as [0.9, 0.95]", lambda x: len(x) > 1),
]
DottedPath = Annotated[str, "dotted path"]  # of an importable function or class
Share = Annotated[float, Range("a number above 0 and up to 1", lambda x: 0 < x <= 1)]

SCALARS: dict[Any, str] = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}
SCALARS |= {Path: "a path", NoneType: "null"}
LISTS = (list, tuple, Sequence, Iterable, Collection)
GROUPS = (dict, Mapping)


def checked(component: C) -> C:
    """Decorate a function or class to check its arguments against their annotations, like the values of a config.

    Omitted arguments are not checked, nor are types that YAML cannot express (tensors, optimizers). The check of a
    class is in its `__init__`; put the decorator above `@dataclass`.

    Raises:
        TuneError: on a call with an argument of the wrong type or out of range. The message begins with the argument's
            name.
    """
    if isinstance(component, type):
        component.__init__ = checked(component.__init__)  # type: ignore[misc]
        return component

    @functools.wraps(component)
    def call(*args: Any, **kwargs: Any) -> Any:
        signature = _signature(component)
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError:
            return component(*args, **kwargs)  # Python's own error names the function
        for name, value in given.items():
            parameter = signature.parameters[name]
            is_one = parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
            value = os.fspath(value) if isinstance(value, os.PathLike) else value
            problem = mismatch(value, parameter.annotation) or _no_object(value, parameter.annotation)
            if is_one and problem:
                raise TuneError(f"{name}: {problem}")
        return component(*args, **kwargs)

    return call  # type: ignore[return-value]


def _no_object(value: Any, kind: Any) -> str:
    """A sentence that says that `value`, such as the name of a folder, is not an object of a class `kind`, such as a
    model; empty if it may be one."""
    kinds = get_args(kind) if get_origin(kind) in (Union, UnionType) else [kind]
    classes = [each for each in kinds if isinstance(each, type) and each is not Any]  # which is a class since 3.11
    if not isinstance(value, str | int | float | list | dict) or is_plain(kind) or len(classes) < len(kinds):
        return ""
    if any(getattr(each, "_is_protocol", False) or isinstance(value, each) for each in classes):
        return ""
    names = " or ".join(each.__name__ for each in classes if each is not NoneType)
    return f"{show(value)} is not of the type {names}."


@functools.cache
def _signature(component: Callable[..., Any]) -> inspect.Signature:
    try:
        return inspect.signature(component, eval_str=True)
    except (NameError, SyntaxError, TypeError, AttributeError):  # an annotation that only a type checker can read
        return inspect.signature(component)


def mismatch(value: Any, kind: Any) -> str:
    """A sentence that says why `value` is not a `kind`; empty if it is."""
    if fits(value, kind):
        return ""
    if wrong := _wrong_element(value, kind):
        return f"in {show(value)}, {wrong}"
    hint = ""
    if isinstance(value, int | float) and fits("text", kind):
        hint = " Write it in quotes."
    elif isinstance(value, str | int | float) and fits([value], kind):
        hint = f" Write it as one: [{as_given(value)}]."
    return f"{show(value)} is not {describe(kind)}.{hint}"


def _wrong_element(value: Any, kind: Any) -> str:
    """The mismatch of the first wrong element of a list or group; empty if the list or group itself is wrong."""
    origin, arguments = get_origin(kind) or kind, get_args(kind)
    if origin in (Union, UnionType):
        return next(filter(None, (_wrong_element(value, each) for each in arguments)), "")
    if origin is Annotated:
        return _wrong_element(value, arguments[0])
    if origin in LISTS and isinstance(value, list) and (origin is not tuple or arguments[1:] == (Ellipsis,)):
        return next(filter(None, (mismatch(each, kind) for kind in arguments[:1] for each in value)), "")
    if origin in GROUPS and isinstance(value, dict):
        return next(filter(None, (mismatch(each, kind) for kind in arguments[1:] for each in value.values())), "")
    return ""


def unusable(value: Any) -> str:
    """Describe the first number in `value` that is not finite or exceeds 64 bits, which no setting allows; else ""."""
    if isinstance(value, Mapping | list):
        parts = value.values() if isinstance(value, Mapping) else value
        return next(filter(None, map(unusable, parts)), "")
    if not isinstance(value, int | float) or abs(value) < 2**63:
        return ""
    return (
        f"{show(value)} is not a finite number."
        if abs(value) == inf or value != value
        else f"{show(value)} is beyond 64 bits."
    )


def fits(value: Any, kind: Any) -> bool:
    """Whether `value` is a `kind`. A type that YAML cannot express accepts any value, but is ignored in a union."""
    origin, arguments = get_origin(kind) or kind, get_args(kind)
    if origin in (Union, UnionType):
        kinds = _expressible(arguments)
        return kinds in ([], [NoneType]) or any(fits(value, each) for each in kinds)
    if origin is Annotated:
        return fits(value, arguments[0]) and all(each.has(value) for each in arguments[1:] if isinstance(each, Range))
    if origin is Literal:
        return any(type(value) is type(each) and value == each for each in arguments)
    if origin is tuple and arguments and arguments[-1] is not Ellipsis:
        return isinstance(value, list) and len(value) == len(arguments) and all(map(fits, value, arguments))
    if origin in LISTS:
        is_list = isinstance(value, Collection) and not isinstance(value, str | Mapping)  # in Python also a set
        return is_list and all(fits(each, kind) for kind in arguments[:1] for each in value)
    if origin in GROUPS:
        return isinstance(value, dict) and all(fits(each, kind) for kind in arguments[1:] for each in value.values())
    if kind in (int, float):  # in Python also numbers of NumPy
        return isinstance(value, Integral if kind is int else Real) and not isinstance(value, bool)
    return kind not in tuple(SCALARS) or isinstance(value, str | Path if kind is Path else kind)


def describe(kind: Any) -> str:
    """Describe a `kind` in words that complete "0 is not ..."."""
    origin, arguments = get_origin(kind) or kind, get_args(kind)
    if origin in (Union, UnionType):
        return " or ".join(map(describe, _expressible(arguments)))
    if origin is Annotated:
        return next((each.description for each in arguments[1:] if isinstance(each, Range)), describe(arguments[0]))
    if origin is Literal:
        return ("one of " if len(arguments) > 1 else "") + ", ".join(map(str, arguments))
    if origin is tuple and arguments and arguments[-1] is not Ellipsis:
        return f"a list of {len(arguments)} ({', '.join(map(describe, arguments))})"
    if origin in LISTS:
        return f"a list (each {describe(arguments[0])})" if _has_types(arguments) else "a list"
    if origin in GROUPS:
        return f"a group of keys (each {describe(arguments[1])})" if _has_types(arguments) else "a group of keys"
    return SCALARS.get(kind, "of the right type")


def _has_types(arguments: Sequence[Any]) -> bool:
    return bool(arguments) and arguments[-1] is not Any


def show(value: Any) -> str:
    """A value as a person would write it in YAML."""
    return json.dumps(value) if value is None or isinstance(value, bool) else repr(value)


def as_given(value: Any) -> str:
    """A value as written on the command line."""
    return value if isinstance(value, str) else show(value)


def is_plain(kind: Any) -> bool:
    """Whether YAML can express values of a type other than null. True without an annotation."""
    if kind is inspect.Parameter.empty:
        return True
    kinds = get_args(kind) if get_origin(kind) in (Union, UnionType) else [kind]
    kinds = [each for each in _expressible(kinds) if each not in (NoneType, Any)]
    return any(all(map(is_plain, get_args(each)[1:])) if get_origin(each) in GROUPS else True for each in kinds)


def _expressible(kinds: Iterable[Any]) -> list[Any]:
    """The types that YAML can express."""
    known = (Any, Union, UnionType, Annotated, Literal, *LISTS, *GROUPS, *SCALARS)
    return [kind for kind in kinds if (get_origin(kind) or kind) in known]
