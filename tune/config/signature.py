"""The arguments a component takes, read from its source without importing it (or torch)."""

import ast
import inspect
import keyword
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tune.config.annotations import interpret
from tune.config.instantiate import locate
from tune.config.source import Definition, Dynamic, Function, Module, find_component, follow


@dataclass(frozen=True)
class Parameter:
    """One argument; `annotation` is source of `module`, or the type itself."""

    required: bool
    annotation: Any
    module: Module | None = None

    def kind(self) -> Any:
        """The type, as far as YAML can express it, else Any."""
        return interpret(self.annotation, self.module)


@dataclass
class Signature:
    """What may be given by name. `async_`, which stands for a Python keyword, is found as `async`."""

    parameters: dict[str, Parameter] = field(default_factory=dict)
    accepts_any: bool = False

    def add(self, name: str, parameter: Parameter) -> None:
        plain = name.removesuffix("_")
        self.parameters[plain if keyword.iskeyword(plain) else name] = parameter


def signature_of(path: str) -> Signature:
    """The signature of the component with this dotted path; raises TuneError if there is no such component."""
    try:
        return _read(find_component(path))
    except Dynamic:
        return _inspect(locate(path))


def _read(found: Module | Definition) -> Signature:
    match found:
        case Definition(node=ast.ClassDef() as node, module=module):
            return _read_class(node, module)
        case Definition(node=ast.FunctionDef() | ast.AsyncFunctionDef() as node, module=module):
            return _read_function(node, module)
    raise Dynamic


def _read_function(node: Function, module: Module, skip: int = 0) -> Signature:
    signature = Signature(accepts_any=node.args.kwarg is not None)
    positional = [*node.args.posonlyargs, *node.args.args]
    defaults = [None] * (len(positional) - len(node.args.defaults)) + [*node.args.defaults]
    by_name = list(zip(positional, defaults, strict=True))[max(skip, len(node.args.posonlyargs)) :]
    for argument, default in [*by_name, *zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)]:
        signature.add(argument.arg, Parameter(default is None, argument.annotation, module))
    return signature


def _read_class(node: ast.ClassDef, module: Module) -> Signature:
    for statement in reversed(node.body):
        if isinstance(statement, Function) and statement.name in ("__init__", "__new__"):
            return _read_function(statement, module, skip=1)
    decorators = [ast.unparse(each) for each in node.decorator_list]
    if node.keywords or any("dataclass" not in each for each in decorators):
        raise Dynamic
    signature = Signature()
    for base in node.bases:
        if ast.unparse(base) not in ("object", "ABC", "abc.ABC"):
            signature = _read(follow(base, module))
            if signature.parameters or signature.accepts_any:
                break
    for statement in node.body if decorators else []:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            default = ast.unparse(statement.value) if statement.value else ""
            required = not default or ("field(" in default and "default" not in default)
            if "ClassVar" not in ast.unparse(statement.annotation) and "init=False" not in default:
                signature.add(statement.target.id, Parameter(required, statement.annotation, module))
    return signature


def _inspect(component: Callable[..., Any]) -> Signature:
    try:
        parameters = inspect.signature(component).parameters.values()
    except ValueError:  # written in C, without a signature
        return Signature(accepts_any=True)
    signature = Signature(accepts_any=any(each.kind is each.VAR_KEYWORD for each in parameters))
    for each in parameters:
        if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY):
            annotation = Any if each.annotation is each.empty else each.annotation
            signature.add(each.name, Parameter(each.default is each.empty, annotation))
    return signature
