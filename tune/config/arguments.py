"""Types of settings, from the arguments that a recipe passes them as:

    world = distributed.init(cfg.device, **cfg.parallel)

`device` has the type of init's first argument, and `parallel.tp` that of its argument `tp`. A recipe's own functions
count too: `def advantages(rewards, baseline: Literal["mean", "leave_one_out"])`. The recipe is read, not run.
"""

import ast
import builtins
import functools
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args, get_type_hints, is_typeddict

from tune.config.instantiate import COMPONENT
from tune.config.signature import Signature, signature, signature_of
from tune.config.text import Values
from tune.errors import TuneError
from tune.lookup import locate, quiet_torchao
from tune.types import is_plain

Typed = Iterator[tuple[str, Any]]  # pairs of a dotted key and a type
REFERENCE = re.compile(r"\$\{([\w.]+)\}")


def types_of_settings(recipe: Path, default: Values) -> dict[str, Any]:
    """The types of the settings that the file `recipe` passes on as they are, by their dotted keys.

    `default` are the recipe's own settings. A setting that is passed on twice has the first type that is known. What
    cannot be read, as it is computed or imported in vain, has none.
    """
    try:
        tree = ast.parse(recipe.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError, OSError):
        return {}  # reported where the recipe is run
    script = _Script(default, functools.cache(signature_of))
    script.read(tree)
    found: dict[str, Any] = {}
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        for key, kind in script.settings_of(call):
            found.setdefault(key, kind)
    for key, kind in script.referred(default):
        found.setdefault(key, kind)
    return found


@dataclass
class _Script:
    """What the names in a recipe stand for."""

    default: Values
    component: Callable[[str], Signature]
    settings: str = "cfg"  # the argument of the function with @config.entrypoint
    imports: dict[str, tuple[str, str]] = field(default_factory=dict)  # name -> module, and what of it
    functions: dict[str, ast.FunctionDef] = field(default_factory=dict)
    groups: dict[str, ast.Dict] = field(default_factory=dict)  # variable -> {"dtype": cfg.dtype, ...}
    made: dict[str, ast.Call] = field(default_factory=dict)  # variable -> the call that it has the result of

    def read(self, tree: ast.Module) -> None:
        for node in ast.walk(tree):
            match node:
                case ast.Import(names=names):
                    for each in names:
                        name = each.name if each.asname else each.name.partition(".")[0]
                        self.imports[each.asname or name] = (name, "")
                case ast.ImportFrom(module=str(module), names=names, level=0):
                    self.imports |= {each.asname or each.name: (module, each.name) for each in names}
                case ast.FunctionDef(name=name, args=ast.arguments(args=arguments), decorator_list=decorators):
                    self.functions[name] = node
                    if arguments and any("entrypoint" in ast.unparse(each) for each in decorators):
                        self.settings = arguments[0].arg
                case ast.Assign(targets=[ast.Name(id=name)], value=ast.Dict() as value):
                    self.groups[name] = value
                case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call() as value):
                    self.made.setdefault(name, value)

    def settings_of(self, call: ast.Call) -> Typed:
        """The settings among the arguments of a call."""
        kinds = self._kinds(call.func)
        # `instantiate(cfg.schedule, total_steps=...)` passes on what it does not know itself.
        of_component = self._component(call.args[0]) if call.args else None
        kinds |= {name: kind for name, kind in _kinds_of(of_component).items() if name not in kinds}
        for name, value in zip(kinds, call.args, strict=False):
            if isinstance(value, ast.Starred):
                break
            yield from self._argument(name, value, kinds)
        for each in call.keywords:
            yield from self._argument(each.arg, each.value, kinds)

    def referred(self, group: Values) -> Typed:
        """The settings that arguments of components are taken from, as `${key}`."""
        kinds = _kinds_of(self.component(group[COMPONENT])) if isinstance(group.get(COMPONENT), str) else {}
        for name, value in group.items():
            if isinstance(value, dict):
                yield from self.referred(value)
            elif (key := REFERENCE.fullmatch(str(value))) and kinds.get(name) is not None:
                yield key[1], kinds[name]

    def _argument(self, name: str | None, value: ast.expr, kinds: dict[str, Any]) -> Typed:
        """The settings in the argument `name`; None stands for `**value`."""
        key = self._key(value)
        match value:
            case ast.IfExp(body=one, orelse=other):
                yield from self._argument(name, one, kinds)
                yield from self._argument(name, other, kinds)
            case ast.Name(id=variable) if name is None and variable in self.groups:
                group = self.groups[variable]
                for part, each in zip(group.keys, group.values, strict=True):
                    if isinstance(part, ast.Constant):
                        yield from self._argument(str(part.value), each, kinds)
            case _ if key and name is None:
                for argument, kind in kinds.items():
                    yield from _parts(f"{key}.{argument}", kind)
            case _ if key and name is not None:
                yield from _parts(key, kinds.get(name))

    def _key(self, node: ast.expr) -> str:
        """The dotted key of `cfg.model.path`, "" for anything else."""
        head, _, key = ast.unparse(node).partition(".")
        return key if head == self.settings and all(map(str.isidentifier, key.split("."))) else ""

    def _kinds(self, function: ast.expr) -> dict[str, Any]:
        """The types of a function's arguments, None of those whose type is not known."""
        if isinstance(function, ast.Name) and function.id in self.functions:
            arguments = self.functions[function.id].args
            return {each.arg: self._evaluated(each.annotation) for each in arguments.args + arguments.kwonlyargs}
        if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
            kind = self._class_of(function.value.id)
            if method := getattr(kind, function.attr, None):
                kinds = _kinds_of(signature(method))
                is_bound = inspect.ismethod(method)  # of the class
                return kinds if is_bound else {name: kinds[name] for name in list(kinds)[1:]}
        found = self._object(function)
        return _kinds_of(signature(found)) if callable(found) else {}

    def _class_of(self, variable: str) -> type[Any] | None:
        """The class of what a variable holds, where a call of it, or of a function that returns one, made that."""
        if (call := self.made.get(variable)) is None:
            return None
        path = self._path(call.args[0]) if call.args else ""
        made = _located(path) if path else self._object(call.func)
        made = made if inspect.isclass(made) else getattr(made, "__annotations__", {}).get("return")
        return made if inspect.isclass(made) else None

    def _component(self, node: ast.expr) -> Signature | None:
        return self.component(path) if (path := self._path(node)) else None

    def _path(self, node: ast.expr) -> str:
        """The dotted path of the component that a group of settings names by default."""
        group: Any = self.default
        for name in self._key(node).split("."):
            group = group.get(name) if isinstance(group, dict) else None
        path = group.get(COMPONENT) if isinstance(group, dict) else None
        return path if isinstance(path, str) else ""

    def _object(self, node: ast.expr) -> Any:
        """What an imported name stands for, None if that is not known."""
        if isinstance(node, ast.Attribute):
            return getattr(self._object(node.value), node.attr, None)
        if not isinstance(node, ast.Name):
            return None
        if node.id not in self.imports:
            return getattr(builtins, node.id, None)
        module, name = self.imports[node.id]
        with suppress(Exception), quiet_torchao():  # reported where the recipe is run
            found = importlib.import_module(module)
            if not name or hasattr(found, name):
                return getattr(found, name) if name else found
            return importlib.import_module(f"{module}.{name}")
        return None

    def _evaluated(self, annotation: ast.expr | None) -> Any:
        if annotation is None:
            return None
        names = {each.id: self._object(each) for each in ast.walk(annotation) if isinstance(each, ast.Name)}
        with suppress(Exception):  # it needs what is not imported
            return eval(compile(ast.Expression(annotation), "annotation", "eval"), names)
        return None


def _located(path: str) -> Any:
    with suppress(TuneError):  # reported where the component is checked
        return locate(path)
    return None


def _kinds_of(found: Signature | None) -> dict[str, Any]:
    """The types of arguments, None of those without one that YAML has values for."""
    parameters = found.parameters.items() if found else ()
    return {name: each.annotation if _is_typed(each.annotation) else None for name, each in parameters}


def _is_typed(annotation: Any) -> bool:
    is_group = any(is_typeddict(each) for each in (annotation, *get_args(annotation)))
    return annotation is not inspect.Parameter.empty and (is_group or is_plain(annotation))


def _parts(key: str, kind: Any) -> Typed:
    """A setting with its type, or those of a group that has a type of its own."""
    groups = [each for each in (kind, *get_args(kind)) if is_typeddict(each)]
    if groups:
        yield from ((f"{key}.{name}", each) for name, each in get_type_hints(groups[0], include_extras=True).items())
    elif kind is not None:
        yield key, kind
