"""Types of settings, derived from the arguments that a recipe passes them to:

    world = distributed.init(cfg.device, **cfg.parallel)

`device` has the type of init's first argument, and `parallel.tp` the type of its argument `tp`. A recipe's own
functions also count: `def advantages(rewards, baseline: Literal["mean", "leave_one_out"])`. The recipe is parsed, not
run.
"""

import ast
import builtins
import functools
import importlib
import inspect
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from operator import or_
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, ForwardRef, NewType, TypeVar, get_args, get_type_hints, is_typeddict

from tune.config.instantiate import COMPONENT, instantiate
from tune.config.script import Call, Import, Scope, Script, passed
from tune.config.signature import Signature, optional, signature, signature_of
from tune.config.text import Values
from tune.errors import TuneError
from tune.lookup import locate, quiet_torchao
from tune.types import Range, fits, is_plain

Typed = Iterator[tuple[str, Any]]  # pairs of a dotted key and a type
REFERENCE = re.compile(r"\$\{([\w.]+)\}")


def types_of_settings(recipe: Path, default: Values, values: Values | None = None) -> dict[str, Any]:
    """Return the types of the settings that the file `recipe` passes on unchanged, by dotted keys.

    `default` are the recipe's own settings; `values` are a run's settings, which may name other components. A setting
    that is passed on twice has the first known type, but a type with a range takes precedence. If all calls are under
    an `if`, the setting may have any of their types. Settings that are computed or changed, or whose function cannot be
    imported, have no type.
    """
    try:
        script = Script(ast.parse(recipe.read_bytes()))
    except (SyntaxError, ValueError, OSError, RecursionError, MemoryError):
        return {}  # reported where the recipe is run
    reader = _Reader(default, values or default, script)
    changed = [reader.key(*each) for each in script.stored]
    found: dict[str, Any] = {}
    sometimes: dict[str, list[Any]] = {}
    for call in script.calls:
        for key, kind in reader.settings_of(call):
            if call.tests:
                sometimes.setdefault(key, []).append(kind)
            elif key not in found or (hasattr(kind, "__metadata__") and not hasattr(found[key], "__metadata__")):
                found[key] = kind
    for key, kinds in sometimes.items():
        found.setdefault(key, functools.reduce(or_, kinds))
    for key, kind in reader.referred(reader.values):
        found.setdefault(key, kind)
    for each in filter(None, changed):
        found = {key: kind for key, kind in found.items() if not f"{key}.".startswith(f"{each}.")}
    return found


def groups_of(recipe: Path, default: Values) -> dict[str, tuple[str, dict[str, inspect.Parameter]]]:
    """Return, for each group that the file `recipe` passes as `**cfg.group`, the function's path and its arguments by
    name, without those that the call gives itself."""
    script = Script(ast.parse(recipe.read_bytes()))
    reader = _Reader(default, default, script)
    found = {}
    for call in script.calls:
        groups = [each.value for each in call.node.keywords if each.arg is None]
        for _, key, _ in (passed_on for group in groups for passed_on in reader._passed("**", group, call)):
            function = reader._object(call.node.func, call.scope)
            known = signature(function) if isinstance(_get(default, key), dict) and callable(function) else Signature()
            given = {each.arg for each in call.node.keywords}
            given |= {each.name for each in known.positional[: len(call.node.args)]}
            arguments = {name: each for name, each in known.parameters.items() if name not in given}
            if arguments:
                found[key] = (f"{function.__module__}.{function.__qualname__}", arguments)
    return found


# The type of a setting that is off, for calls under `if cfg.key:`.
OFF = Annotated[Any, Range("off (false, 0 or null)", lambda value: not value)]


@dataclass
class _Arguments:
    """The types of a function's arguments, None where unknown."""

    positional: list[Any] = field(default_factory=list)
    named: dict[str, Any] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)  # names of the positional ones


class _Reader:
    """Finds the arguments that a script passes its settings to."""

    def __init__(self, default: Values, values: Values, script: Script) -> None:
        self.default, self.values, self.script = default, values, script
        self.component = functools.cache(signature_of)
        self.imported = functools.cache(_imported)  # a failed import is not repeated
        self.whole = {  # arguments that hold all settings
            node.args.args[0] for node in script.functions if node.args.args
            and any("entrypoint" in ast.unparse(each) for each in node.decorator_list)
        }  # fmt: skip
        while found := self._passed_on() - self.whole:
            self.whole |= found

    def _passed_on(self) -> set[ast.arg]:
        """Return the arguments of the script's functions that hold all settings in each call."""
        given: dict[ast.arg, bool] = {}
        for call in self.script.calls:
            function = call.scope.find(call.node.func.id)[0] if isinstance(call.node.func, ast.Name) else None
            if isinstance(function, ast.FunctionDef):
                for argument, value in passed(call.node, function.args):
                    given[argument] = self.key(value, call.scope) == "" and given.get(argument, True)
        return {argument for argument, is_whole in given.items() if is_whole}

    def settings_of(self, call: Call) -> Typed:
        """Yield the settings among the arguments of a call."""
        node, scope = call.node, call.scope
        values = [*node.args, *(each.value for each in node.keywords)]
        if not any(True for value in values for _ in self._passed("**", value, call)):
            return  # without importing the called function
        known = self._arguments(node.func, scope)
        if node.args and getattr(self._object(node.func, scope), "__module__", "") == instantiate.__module__:
            # `instantiate(cfg.schedule, total_steps=...)` passes other arguments on to the component.
            path = self._path(node.args[0], scope)
            of_component = _arguments_of(self.component(path)) if path else _Arguments()
            known.positional += of_component.positional
            known.named = of_component.named | known.named
            known.order += of_component.order
        for name in known.order[: len(node.args)]:  # given already, so `**group` cannot give them too
            known.named.pop(name, None)
        for kind, value in zip(known.positional, node.args, strict=False):
            if isinstance(value, ast.Starred):
                break
            yield from self._typed("", value, call, {"": kind})
        for each in node.keywords:
            yield from self._typed(each.arg or "**", each.value, call, known.named)

    def referred(self, group: Values) -> Typed:
        """Yield the settings that components' arguments refer to as `${key}`."""
        component = group.get(COMPONENT)
        kinds = _arguments_of(self.component(component)).named if isinstance(component, str) else {}
        for name, value in group.items():
            if isinstance(value, dict):
                yield from self.referred(value)
            elif (key := REFERENCE.fullmatch(str(value))) and kinds.get(name) is not None:
                yield key[1], kinds[name]

    def key(self, node: ast.expr, scope: Scope, depth: int = 0) -> str | None:
        """Return the dotted key of `cfg.model.path` or `cfg["model"]["path"]`; "" for all settings, None otherwise."""
        match node:
            case ast.Name(id=name):
                bound, where = scope.find(name)
                if isinstance(bound, ast.Name | ast.Attribute | ast.Subscript) and depth < 10:
                    return self.key(bound, where, depth + 1)
                return "" if isinstance(bound, ast.arg) and bound in self.whole else None
            case (
                ast.Attribute(value=value, attr=name) | ast.Subscript(value=value, slice=ast.Constant(value=str(name)))
            ):
                group = self.key(value, scope, depth)
                return None if group is None else f"{group}.{name}".removeprefix(".")
        return None

    def _passed(self, name: str, value: ast.expr, call: Call) -> Iterator[tuple[str, str, list[ast.expr]]]:
        """Yield argument, key and tests of each setting in the argument `name` ("**" for `**value`)."""
        bound = call.scope.find(value.id)[0] if isinstance(value, ast.Name) else value
        match bound:
            case ast.IfExp(test=test, body=one, orelse=other) if bound is value:
                inner = Call(call.node, call.scope, [*call.tests, test])
                yield from self._passed(name, one, inner)
                yield from self._passed(name, other, inner)
            case ast.Dict(keys=keys, values=values) if name == "**":
                for part, each in zip(keys, values, strict=True):
                    if isinstance(part, ast.Constant):
                        yield from self._passed(str(part.value), each, call)
            case _ if key := self.key(value, call.scope):
                yield name, key, call.tests

    def _typed(self, name: str, value: ast.expr, call: Call, kinds: dict[str, Any]) -> Typed:
        for argument, key, tests in self._passed(name, value, call):
            if argument == "**":
                found = {f"{key}.{part}": kind for part, kind in kinds.items()}
            else:
                found = {key: kinds.get(argument)}
            tested = dict(sorted((each for test in tests for each in self._tested(test, call.scope)), reverse=True))
            for part, kind in found.items():
                if kind is not None and tested.get(part, True):
                    usual = _get(self.default, part)
                    is_off = part in tested and usual in (False, 0, "") and not fits(usual, kind)
                    yield from _parts(part, kind | OFF if is_off else kind)

    def _tested(self, test: ast.expr, scope: Scope) -> Iterator[tuple[str, bool]]:
        """Yield the settings in a condition, and whether the condition only tests that they are not off."""
        match test:
            case ast.BoolOp(values=values):
                for each in values:
                    yield from self._tested(each, scope)
            case ast.UnaryOp(op=ast.Not(), operand=value):
                yield from self._tested(value, scope)
            case ast.Compare(left=value, ops=[ast.Is() | ast.IsNot()], comparators=[ast.Constant(value=None)]):
                yield from self._tested(value, scope)
            case _ if key := self.key(test, scope):
                yield key, True
            case _:
                for part in ast.walk(test):
                    if isinstance(part, ast.expr) and (key := self.key(part, scope)):
                        yield key, False

    def _arguments(self, function: ast.expr, scope: Scope) -> _Arguments:
        """Return the argument types of the called function."""
        if isinstance(function, ast.Name):
            bound, where = scope.find(function.id)
            if isinstance(bound, ast.FunctionDef) and not bound.decorator_list:  # a decorator may change the arguments
                return self._of_script(bound.args, where)
        if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
            kind = self._class_of(function.value.id, scope)
            with suppress(Exception):  # a property of the class
                if method := getattr(kind, function.attr, None):
                    known = _arguments_of(signature(method))
                    if inspect.isfunction(inspect.getattr_static(kind, function.attr)):  # drop `self`
                        del known.positional[:1], known.order[:1]
                    return known
        found = self._object(function, scope)
        return _arguments_of(signature(found)) if callable(found) else _Arguments()

    def _of_script(self, arguments: ast.arguments, scope: Scope) -> _Arguments:
        places = [*arguments.posonlyargs, *arguments.args]
        usual = [*[None] * (len(places) - len(arguments.defaults)), *arguments.defaults, *arguments.kw_defaults]
        kinds = {
            each.arg: _known(optional(kind, default.value) if isinstance(default, ast.Constant) else kind)
            for each, default in zip([*places, *arguments.kwonlyargs], usual, strict=True)
            if (kind := self._evaluated(each.annotation, scope)) is not None
        }
        named = [*arguments.args, *arguments.kwonlyargs]
        return _Arguments(
            [kinds.get(each.arg) for each in places],
            {each.arg: kinds.get(each.arg) for each in named},
            [each.arg for each in places],
        )

    def _class_of(self, variable: str, scope: Scope) -> type[Any] | None:
        """Return the class of a variable's value, if a call of the class or of an annotated function made it."""
        call, scope = scope.find(variable)
        if not isinstance(call, ast.Call):
            return None
        made = self._object(call.func, scope)
        if made is instantiate:
            path = self._path(call.args[0], scope) if call.args else ""
            made = _located(path) if path else None
        if not inspect.isclass(made):
            with suppress(Exception):  # the return type is only imported for type checkers
                made = get_type_hints(made).get("return")
        return made if inspect.isclass(made) else None

    def _path(self, node: ast.expr, scope: Scope) -> str:
        """Return the dotted path of the component that a group of settings names."""
        group = _get(self.values, self.key(node, scope) or "")
        path = group.get(COMPONENT) if isinstance(group, dict) else None
        return path if isinstance(path, str) else ""

    def _object(self, node: ast.expr, scope: Scope) -> Any:
        """Return the object of an imported name, or None if unknown."""
        if isinstance(node, ast.Attribute):
            found = self._object(node.value, scope)
            return None if found is None else self._taken(found, node.attr)
        if not isinstance(node, ast.Name):
            return None
        bound, _ = scope.find(node.id)
        if isinstance(bound, Import):
            module = self.imported(bound.module)
            return self._taken(module, bound.name) if bound.name and module else module
        if bound is None:
            for module in map(self.imported, self.script.stars):
                known = vars(module) if module else {}
                if node.id in known.get("__all__", [each for each in known if each[0] != "_"]):
                    return known.get(node.id)
            return getattr(builtins, node.id, None)
        return None

    def _taken(self, found: Any, name: str) -> Any:
        """Return an attribute, or a module of a package."""
        with suppress(Exception):  # a lazy import may fail
            if hasattr(found, name) or not isinstance(found, ModuleType):
                return getattr(found, name, None)
            return self.imported(f"{found.__name__}.{name}")
        return None

    def _evaluated(self, annotation: ast.expr | None, scope: Scope) -> Any:
        if annotation is None:
            return None
        with suppress(Exception):  # it needs names that are not imported, or that the script defines
            if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
                return self._evaluated(ast.parse(annotation.value, mode="eval").body, scope)
            names = {each.id: self._object(each, scope) for each in ast.walk(annotation) if isinstance(each, ast.Name)}
            if None not in names.values():
                return eval(compile(ast.Expression(annotation), "annotation", "eval"), names)
        return None


def _imported(module: str) -> Any:
    with suppress(Exception, SystemExit), quiet_torchao():  # reported where the recipe is run
        return importlib.import_module(module)
    return None


def _located(path: str) -> Any:
    with suppress(TuneError):  # reported where the component is checked
        return locate(path)
    return None


def _get(values: Any, key: str) -> Any:
    for name in key.split("."):
        values = values.get(name) if isinstance(values, dict) else None
    return values


def _arguments_of(found: Signature) -> _Arguments:
    named = {name: _known(each.annotation) for name, each in found.parameters.items()}
    return _Arguments(
        [_known(each.annotation) for each in found.positional], named, [each.name for each in found.positional]
    )


def _known(annotation: Any) -> Any:
    """Return a type, or None if YAML cannot express its values."""
    parts = get_args(annotation)
    with suppress(Exception):  # types that cannot be hashed or put in a union
        is_group = any(is_typeddict(each) for each in (annotation, *parts))
        is_open = any(isinstance(each, TypeVar | ForwardRef | NewType) for each in parts)
        if annotation is not inspect.Parameter.empty and not is_open and (is_group or is_plain(annotation)):
            return (annotation | None) and annotation
    return None


def _parts(key: str, kind: Any) -> Typed:
    """Yield a setting with its type, or the settings of a group with a type of its own."""
    groups = [each for each in (kind, *get_args(kind)) if is_typeddict(each)]
    if groups:
        with suppress(Exception):  # a hint may only be imported for type checkers
            hints = get_type_hints(groups[0], include_extras=True)
            yield from ((f"{key}.{name}", known) for name, each in hints.items() if (known := _known(each)) is not None)
    elif kind is not None:
        yield key, kind
