"""Resolve the names in a script from its syntax tree."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

SEVERAL = object()  # a name that is bound more than once, or in a way that is not followed


@dataclass(frozen=True)
class Import:
    module: str
    name: str = ""  # of the object that is imported from the module


@dataclass
class Scope:
    """The names that a function, a class or the script itself binds."""

    node: ast.AST
    outer: "Scope | None" = None
    names: dict[str, Any] = field(default_factory=dict)  # a name -> Import, ast.arg, def, value, or SEVERAL

    def bind(self, name: str, to: Any) -> None:
        self.names[name] = to if self.names.get(name, to) == to else SEVERAL

    def find(self, name: str) -> tuple[Any, "Scope"]:
        """Return what a name is bound to here (None if unbound), and the scope that binds it."""
        scope = self
        while name not in scope.names:
            if scope.outer is None:
                return None, scope
            scope = scope.outer
            while isinstance(scope.node, ast.ClassDef) and scope.outer:  # functions in a class do not see its names
                scope = scope.outer
        return scope.names[name], scope


@dataclass
class Call:
    node: ast.Call
    scope: Scope
    tests: list[ast.expr]  # conditions around the call, such as `if`


class Script(ast.NodeVisitor):
    """Collects calls in a script, assignments to attributes, and star imports."""

    def __init__(self, tree: ast.Module) -> None:
        self.scope = Scope(tree)
        self.tests: list[ast.expr] = []
        self.calls: list[Call] = []
        self.stored: list[tuple[ast.expr, Scope]] = []
        self.functions: list[ast.FunctionDef] = []
        self.stars: list[str] = []  # the last one first
        self.visit(tree)

    def _visit_scope(self, node: Any) -> None:
        if name := getattr(node, "name", None):
            self.scope.bind(name, node)
        if isinstance(node, ast.FunctionDef):
            self.functions.append(node)
        outer = self.scope
        self.scope = Scope(node, outer)
        self.generic_visit(node)
        self.scope = outer

    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = visit_Lambda = _visit_scope
    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = _visit_scope

    def _visit_branches(self, node: Any) -> None:
        """Visit `if`, `match` and `and`, whose parts may depend on their tests."""
        count = len(self.tests)
        for name, each in ast.iter_fields(node):
            for part in each if isinstance(each, list) else [each]:
                if isinstance(part, ast.AST):
                    self.visit(part)
                if name in ("test", "values"):
                    self.tests.append(part)
                elif name == "subject":
                    self.tests.append(ast.Tuple([part]))  # the subject is compared
        del self.tests[count:]

    visit_If = visit_IfExp = visit_While = visit_Match = visit_BoolOp = _visit_branches

    def visit_Call(self, node: ast.Call) -> None:
        self.calls.append(Call(node, self.scope, [*self.tests]))
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        match node:
            case ast.Assign(
                targets=[ast.Name(id=name)],
                value=ast.Call(func=ast.Attribute(value=ast.Name(id=same), attr="copy"), args=[], keywords=[]),
            ) if name == same:
                pass
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                self.scope.bind(name, value)
            case _:
                for target in node.targets:
                    self.visit(target)

    def visit_Import(self, node: ast.Import) -> None:
        for each in node.names:
            name = each.name if each.asname else each.name.partition(".")[0]
            self.scope.bind(each.asname or name, Import(name))

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for each in node.names:
            if node.level == 0 and node.module and each.name == "*":
                self.stars.insert(0, node.module)
            else:
                found = Import(node.module, each.name) if node.level == 0 and node.module else SEVERAL
                self.scope.bind(each.asname or each.name, found)

    def visit_arg(self, node: ast.arg) -> None:
        self.scope.bind(node.arg, node)

    def visit_Name(self, node: ast.Name) -> None:
        if not isinstance(node.ctx, ast.Load):
            self.scope.bind(node.id, SEVERAL)

    def _visit_target(self, node: Any) -> None:
        if not isinstance(node.ctx, ast.Load):
            self.stored.append((node, self.scope))
        self.generic_visit(node)

    visit_Attribute = visit_Subscript = _visit_target

    def _visit_other(self, node: Any) -> None:
        """Bind the names of `except ... as name` and of `match` patterns."""
        if name := getattr(node, "name", None) or getattr(node, "rest", None):
            self.scope.bind(name, SEVERAL)
        self.generic_visit(node)

    visit_ExceptHandler = visit_MatchAs = visit_MatchStar = visit_MatchMapping = _visit_other

    def _visit_outer(self, node: Any) -> None:
        for name in node.names:
            scope: Scope | None = self.scope
            while scope:
                scope.bind(name, SEVERAL)
                scope = scope.outer

    visit_Global = visit_Nonlocal = _visit_outer


def passed(call: ast.Call, arguments: ast.arguments) -> Iterator[tuple[ast.arg, ast.expr]]:
    """Yield a function's arguments with the values of a call."""
    for argument, value in zip([*arguments.posonlyargs, *arguments.args], call.args, strict=False):
        if isinstance(value, ast.Starred):
            break
        yield argument, value
    known = {each.arg: each for each in (*arguments.args, *arguments.kwonlyargs)}
    yield from ((known[each.arg], each.value) for each in call.keywords if each.arg in known)
