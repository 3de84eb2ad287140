"""Find modules, and what their names stand for, by reading their source: nothing is imported."""

import ast
import importlib.util
import pkgutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import NoReturn

from tune.config.paths import did_you_mean
from tune.errors import TuneError

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Dynamic(Exception):
    """The source alone does not tell: the component must be imported."""


@dataclass(frozen=True)
class Definition:
    """A function, a class, or the expression assigned to a name of a module."""

    node: Function | ast.ClassDef | ast.expr
    module: "Module"
    name: str


@dataclass(frozen=True, eq=False)
class Module:
    """The parsed source of a module, and what its names are bound to."""

    name: str
    folders: tuple[str, ...]
    bindings: dict[str, ast.AST]
    stars: tuple[ast.ImportFrom, ...]
    dynamic: bool


def find_component(path: str) -> Module | Definition:
    """Where the component with this dotted path is defined; raises TuneError if it is nowhere, or is a module."""
    first, *names = path.split(".")
    if not names or not all(name.isidentifier() for name in (first, *names)):
        raise TuneError(f"'{path}' is not the dotted path of a function or class.")
    if (module := find_module(first)) is None:
        hint = "It comes with: pip install 'tune-recipes[torchao]'" if first == "torchao" else ""
        raise TuneError(f"there is no module '{first}'. {hint or 'Is it installed, or in the current folder?'}")
    found = _walk(module, names)
    if isinstance(found, Module):
        raise TuneError(f"'{path}' is a module, not a function or class.")
    return found


def follow(node: ast.expr, module: Module) -> Module | Definition:
    """What a name or dotted name stands for in the source of a module."""
    first, *names = ast.unparse(node).partition("[")[0].split(".")
    if first not in module.bindings:  # a builtin, or an expression
        raise Dynamic
    try:
        return _walk(module, [first, *names])
    except TuneError as error:
        raise Dynamic from error


def find_module(name: str) -> Module | None:
    """Find a module as import would, without importing its parents; None if there is none."""
    spec: ModuleSpec | None = None
    search: Sequence[str] | None = None
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        finders = [finder for finder in sys.meta_path if hasattr(finder, "find_spec")]
        found = (finder.find_spec(".".join(parts[:end]), search) for finder in finders)
        if (spec := next(filter(None, found), None)) is None:
            return None
        search = spec.submodule_search_locations or []
    assert spec is not None
    folders = tuple(spec.submodule_search_locations or ())
    if spec.origin is None:  # a folder without __init__.py
        return Module(name, folders, {}, (), dynamic=False)
    if not spec.origin.endswith(".py"):
        raise Dynamic
    return Module(name, folders, *_parse(spec.origin))


@cache
def _parse(file: str) -> tuple[dict[str, ast.AST], tuple[ast.ImportFrom, ...], bool]:
    source = Path(file).read_text(encoding="utf-8")
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        raise TuneError(f"{file}:{error.lineno}: {error.msg}.") from error
    bindings: dict[str, ast.AST] = {}
    stars = []
    for statement in _statements(tree.body):
        match statement:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                bindings[statement.name] = statement
            case ast.Import(names=names):
                bindings |= {each.asname or each.name.partition(".")[0]: statement for each in names}
            case ast.ImportFrom(names=names) if names[0].name == "*":
                stars.append(statement)
            case ast.ImportFrom(names=names):
                bindings |= {each.asname or each.name: statement for each in names}
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                bindings[name] = value
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                bindings[name] = value
            case _:
                assigned = [
                    each.id
                    for each in ast.walk(statement)
                    if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
                ]
                bindings |= {name: statement for name in assigned if name not in bindings}
    dynamic = any(text in source for text in ("def __getattr__", "globals()", "sys.modules"))
    return bindings, tuple(stars), dynamic


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a module; of alternatives (`if`, `try`) the first one last, so that it wins."""
    for statement in body:
        if isinstance(statement, ast.If | ast.Try | ast.With | ast.For):
            for handler in getattr(statement, "handlers", []):
                yield from _statements(handler.body)
            yield from _statements(getattr(statement, "orelse", []))
            yield from _statements(statement.body)
        else:
            yield statement


def _walk(start: Module, names: Sequence[str]) -> Module | Definition:
    found: Module | Definition = start
    for index, name in enumerate(names):
        if not isinstance(found, Module):
            raise Dynamic
        submodule = None if index == len(names) - 1 else find_module(f"{found.name}.{name}")
        found = submodule or _resolve(found, name)
    return found


def _resolve(module: Module, name: str, seen: frozenset[tuple[str, str]] = frozenset()) -> Module | Definition:
    """What a name of a module stands for; follows re-exports to where it is defined."""
    if (module.name, name) in seen:
        raise Dynamic
    seen |= {(module.name, name)}
    match binding := module.bindings.get(name):
        case ast.ImportFrom():
            source = _imported(binding, module)
            original = next(each.name for each in binding.names if (each.asname or each.name) == name)
            own = source.name == module.name and find_module(f"{module.name}.{original}")
            return own or _resolve(source, original, seen)
        case ast.Import():
            original = next((each.name for each in binding.names if each.asname == name), name)
            return find_module(original) or _unknown()
        case ast.Name(id=other):
            return _resolve(module, other, seen)
        case ast.Attribute():
            return follow(binding, module)
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef() | ast.expr():
            return Definition(binding, module, name)
        case ast.stmt():  # assigned in a loop, by unpacking, ...
            raise Dynamic
    for star in module.stars:
        with suppress(TuneError):
            return _resolve(_imported(star, module), name, seen)
    if submodule := find_module(f"{module.name}.{name}"):
        return submodule
    if module.dynamic:
        raise Dynamic
    known = [*module.bindings, *(each.name for each in pkgutil.iter_modules(module.folders))]
    hint = did_you_mean(name, [each for each in known if not each.startswith("_")])
    raise TuneError(f"{module.name} has no '{name}'.{hint}")


def _imported(statement: ast.ImportFrom, module: Module) -> Module:
    package = module.name if module.folders else module.name.rpartition(".")[0]
    name = importlib.util.resolve_name("." * statement.level + (statement.module or ""), package)
    return find_module(name) or _unknown()


def _unknown() -> NoReturn:
    raise Dynamic
