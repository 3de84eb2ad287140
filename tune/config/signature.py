"""The arguments a component takes, and their types as far as YAML can express them."""

import inspect
import keyword
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from tune.lookup import locate

SCALARS = (int, float, bool, str, Path, NoneType)
CONTAINERS: dict[Any, Any] = {list: list, Sequence: list, Iterable: list, tuple: tuple, dict: dict, Mapping: dict}


@dataclass(frozen=True)
class Parameter:
    """One argument."""

    required: bool
    kind: Any


@dataclass
class Signature:
    """What may be given by name. `async_`, which stands for a Python keyword, is found as `async`."""

    parameters: dict[str, Parameter] = field(default_factory=dict)
    accepts_any: bool = False
    problem: str = ""  # why the component cannot be used


def signature_of(path: str) -> Signature:
    """The signature of the component with this dotted path, imported; raises TuneError if there is none."""
    component = locate(path)
    try:
        try:
            parameters = inspect.signature(component, eval_str=True).parameters.values()
        except (NameError, SyntaxError, TypeError, AttributeError):  # an annotation that only a type checker can read
            parameters = inspect.signature(component).parameters.values()
    except ValueError:  # written in C, without a signature
        return Signature(accepts_any=True)
    signature = Signature(accepts_any=any(each.kind is each.VAR_KEYWORD for each in parameters))
    for each in parameters:
        if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY):
            plain = each.name.removesuffix("_")
            name = plain if keyword.iskeyword(plain) else each.name
            signature.parameters[name] = Parameter(each.default is each.empty, expressible(each.annotation) or Any)
    return signature


def expressible(kind: Any) -> Any:
    """A type without the alternatives that YAML has no values of; None if nothing is left."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        kinds = [each for each in map(expressible, arguments) if each is not None]
        if kinds in ([], [NoneType]):
            return None
        return Any if Any in kinds else Union[tuple(kinds)]  # noqa: UP007 - built from a list
    if origin in CONTAINERS and arguments:
        kinds = [... if each is ... else expressible(each) or Any for each in arguments]
        return CONTAINERS[origin][tuple(kinds)]
    if origin in (Literal, Annotated) or kind is Any or kind in SCALARS:
        return kind
    return CONTAINERS.get(origin or kind)
