"""The types that annotations stand for, read from source."""

import ast
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, Union

from tune import types
from tune.config.source import Definition, Dynamic, Function, Module, follow


class NotYaml:
    """A class of which YAML has no values: counts for nothing in a union, accepts anything alone."""


KINDS: dict[str, Any] = {each.__name__: each for each in (int, float, bool, str, list, dict, tuple, Path)}
KINDS |= {"List": list, "Sequence": list, "Iterable": list, "Tuple": tuple, "Dict": dict, "Mapping": dict}
KINDS |= {"PathLike": NotYaml, "Tensor": NotYaml}  # known by name, to spare parsing all of torch


def interpret(annotation: Any, module: Module | None) -> Any:
    """The type an annotation (source, or a type already) stands for; Any where YAML cannot express it."""
    kind = _interpret(annotation, module)
    return Any if kind is NotYaml else kind


def _interpret(annotation: Any, module: Module | None) -> Any:
    match annotation:
        case ast.Constant(value=None):
            return type(None)
        case str(text) | ast.Constant(value=str(text)):
            with suppress(SyntaxError):  # a string that describes instead
                return _interpret(ast.parse(text, mode="eval").body, module)
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _union([left, right], module)
        case ast.Subscript(value=value, slice=content):
            elements = content.elts if isinstance(content, ast.Tuple) else [content]
            return _subscript(_last_name(value), elements, module)
        case ast.Name() | ast.Attribute():
            name = _last_name(annotation)
            return KINDS[name] if name in KINDS else _named(annotation, module)
        case ast.AST() | None:
            return Any
        case _:
            return annotation
    return Any


def _subscript(name: str, elements: list[ast.expr], module: Module | None) -> Any:
    if name == "Literal":
        constants = tuple(each.value for each in elements if isinstance(each, ast.Constant))
        return Literal[constants] if len(constants) == len(elements) else Any
    if name in ("Union", "Optional"):
        return _union([*elements, ast.Constant(None)] if name == "Optional" else elements, module)
    if name == "Annotated":
        return _interpret(elements[0], module)
    container = KINDS.get(name)
    if container in (list, dict, tuple):
        ellipsis = [each for each in elements if isinstance(each, ast.Constant) and each.value is ...]
        kinds = [... if each in ellipsis else interpret(each, module) for each in elements]
        return container[tuple(kinds)]
    return Any


def _union(nodes: list[ast.expr], module: Module | None) -> Any:
    kinds = [kind for kind in (_interpret(each, module) for each in nodes) if kind is not NotYaml]
    if not kinds or kinds == [type(None)] or Any in kinds:
        return Any
    return Union[tuple(kinds)]  # noqa: UP007 - built from a list


def _named(node: ast.expr, module: Module | None) -> Any:
    """The type behind a name of a module: one with a range, an alias, or a class."""
    if module is None:
        return Any
    try:
        found = follow(node, module)
    except Dynamic:
        return Any
    if not isinstance(found, Definition) or isinstance(found.node, Function):
        return Any
    if found.module.name == types.__name__:
        return getattr(types, found.name)
    return NotYaml if isinstance(found.node, ast.ClassDef) else _interpret(found.node, found.module)


def _last_name(node: ast.expr) -> str:
    return ast.unparse(node).rpartition(".")[2]
