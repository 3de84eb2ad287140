"""What the statements of a function read, bind and depend on."""

import ast
import builtins
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
SCOPES = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
BRANCHES = ast.If | ast.While | ast.For | ast.Match
JUMPS = ast.Return | ast.Continue | ast.Break | ast.Raise
BUILTINS = set(vars(builtins))
# Methods that put their arguments into their object.
CHANGING = {"append", "appendleft", "extend", "insert", "add", "update", "setdefault"}


def parsed_file(file: str) -> ast.Module | None:
    """Return the syntax tree of a Python file, or None if it cannot be read."""
    try:
        return ast.parse(Path(file).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, UnicodeError):
        return None


def function_at(tree: ast.Module, line: int) -> Any:
    """Return the innermost function with a line, or the module."""
    functions = (node for node in ast.walk(tree) if isinstance(node, FUNCTIONS))
    around = [node for node in functions if node.lineno <= line <= (node.end_lineno or 0)]
    return max(around, key=lambda node: node.lineno, default=tree)


def parameters(function: Any) -> set[str]:
    """Return the names of a function's parameters; none for a module."""
    if not isinstance(function, FUNCTIONS):
        return set()
    return {node.arg for node in ast.walk(function.args) if isinstance(node, ast.arg)}


def expressions(statement: ast.AST) -> Iterator[ast.AST]:
    """Yield the expressions of a statement itself, without those of statements within it."""
    for child in ast.iter_child_nodes(statement):
        if not isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
            yield child


def lines(statement: ast.stmt) -> range:
    """Return the lines of a statement; of a compound one, the lines of its head."""
    last = statement.lineno
    for expression in expressions(statement):
        last = max(last, getattr(expression, "end_lineno", None) or 0)
    return range(statement.lineno, last + 1)


def read_names(statement: ast.stmt) -> set[str]:
    """Return the names that a statement itself reads, without builtins."""
    names = set()
    for expression in expressions(statement):
        for node in ast.walk(expression):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                names.add(node.id)
    if isinstance(statement, ast.AugAssign) and isinstance(statement.target, ast.Name):
        names.add(statement.target.id)
    return names - BUILTINS


def nodes_of_scope(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes within `node`; of inner functions and classes, only their first node."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, SCOPES | ast.Lambda):
            yield from nodes_of_scope(child)


def rebound_names(node: ast.AST) -> set[str]:
    """Return the names within `node` that `bound_names` leaves out: changed in place, declared, deleted or caught."""
    names, targets = set[str](), list[ast.expr]()
    for inner in nodes_of_scope(node):
        if isinstance(inner, ast.AugAssign | ast.AnnAssign):
            targets.append(inner.target)
        elif isinstance(inner, ast.Delete):
            targets += inner.targets
        elif isinstance(inner, ast.ExceptHandler) and inner.name:
            names.add(inner.name)
    return names | {target.id for target in targets if isinstance(target, ast.Name)}


def changed_names(statement: ast.stmt) -> set[str]:
    """Return the names of objects that a statement changes in place: `a += 1`, `a.b = 1`, `a[0] = 1`, `a.append(1)`."""
    targets: list[ast.expr] = []
    match statement:
        case ast.AugAssign():
            targets.append(statement.target)
        case ast.Assign():
            targets += statement.targets
        case ast.Expr(value=ast.Call(func=ast.Attribute(attr=method) as call)) if method in CHANGING:
            targets.append(call.value)
    names = set()
    for target in targets:
        while isinstance(target, ast.Subscript | ast.Attribute):
            target = target.value
        if isinstance(target, ast.Name):
            names.add(target.id)
    return names


def bound_names(node: ast.AST) -> set[str]:
    """Return the names of the enclosing function that `node` binds to new objects, statements within it included.

    Variables of a comprehension are its own. `a += 1` keeps the object where it fails.
    """
    finder = _BoundNames()
    finder.visit(node)
    return finder.names


class _BoundNames(ast.NodeVisitor):
    def __init__(self) -> None:
        self.names: set[str] = set()
        self.is_in_comprehension = False

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Store) and not self.is_in_comprehension:
            self.names.add(node.id)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self.names.add(node.target.id)
        self.visit(node.value)

    def _visit_comprehension(self, node: ast.AST) -> None:
        before, self.is_in_comprehension = self.is_in_comprehension, True
        self.generic_visit(node)
        self.is_in_comprehension = before

    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = _visit_comprehension

    def _visit_function(self, node: Any) -> None:
        self.names.add(node.name)
        for expression in (*node.decorator_list, *node.args.defaults, *node.args.kw_defaults):
            if expression:
                self.visit(expression)

    visit_FunctionDef = visit_AsyncFunctionDef = _visit_function

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.names.add(node.name)

    def visit_Lambda(self, node: ast.Lambda) -> None:
        pass

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.visit(node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value:
            self.generic_visit(node)

    def _visit_import(self, node: Any) -> None:
        for alias in node.names:
            self.names.add(alias.asname or alias.name.partition(".")[0])

    visit_Import = visit_ImportFrom = _visit_import

    def _visit_capture(self, node: Any) -> None:
        name = node.rest if isinstance(node, ast.MatchMapping) else node.name
        if name:
            self.names.add(name)
        self.generic_visit(node)

    visit_MatchAs = visit_MatchStar = visit_MatchMapping = _visit_capture


class Statements:
    """The statements of a function, each with the branches that decide whether it runs.

    `if finite: continue` decides whether the statements after it run.
    """

    def __init__(self, function: Any):
        self.branches: dict[ast.stmt, tuple[ast.stmt, ...]] = {}
        self._add(function.body, ())

    def _add(self, statements: Sequence[ast.stmt], branches: tuple[ast.stmt, ...]) -> None:
        for statement in statements:
            self.branches[statement] = branches
            if isinstance(statement, SCOPES):
                continue
            is_branch = isinstance(statement, BRANCHES)
            for block in _blocks(statement):
                self._add(block, (*branches, statement) if is_branch else branches)
            if isinstance(statement, ast.If) and any(isinstance(node, JUMPS) for node in nodes_of_scope(statement)):
                branches = (*branches, statement)

    def at(self, line: int) -> ast.stmt | None:
        """Return the innermost statement with a line."""
        around = [node for node in self.branches if node.lineno <= line <= (node.end_lineno or 0)]
        return min(around, key=lambda node: (node.end_lineno or 0) - node.lineno, default=None)

    def causes(self, statements: Sequence[ast.stmt], names: set[str]) -> tuple[set[int], set[str]]:
        """Return the lines of all that `statements` and the values of `names` depend on, and the names read there.

        A later statement counts too, because in a loop it may run first.
        """
        pending, seen, followed = [*statements, *self._setting(names)], set[ast.stmt](), {*names}
        while pending:
            statement = pending.pop()
            if statement in seen:
                continue
            seen.add(statement)
            new = read_names(statement) - followed
            followed |= new
            pending += self._setting(new)
        return {line for statement in seen for line in lines(statement)}, followed

    def checks(self, line: int) -> list[ast.stmt]:
        """Return the `raise` or `assert` with a line and the branches that lead to it; otherwise nothing."""
        statement = self.at(line)
        if not isinstance(statement, ast.Raise | ast.Assert):
            return []
        return [statement, *self.branches[statement]]

    def ways_around(self, names: set[str], statement: ast.stmt) -> list[ast.stmt]:
        """Return the branches by which a function reaches `statement` without having bound `names`."""
        needed = {statement, *self.branches[statement]}
        ways = list[ast.stmt]()
        for binding, branches in self.branches.items():
            if names & _bound_by_itself(binding):
                ways += [branch for branch in branches if branch not in needed]
        return ways

    def causes_of_index(self, statement: ast.stmt) -> tuple[list[ast.stmt], set[str]]:
        """Return the statements and names that an IndexError in `statement` can come from.

        With a constant index, only the length of the container counts: where it is made, and whether it is changed.
        """
        containers = set[str]()
        for expression in expressions(statement):
            for node in ast.walk(expression):
                match node:
                    case ast.Subscript(slice=ast.Constant(value=str())):  # of a dict
                        continue
                    case ast.Subscript(value=ast.Name(id=name), slice=index) if _is_constant(index):
                        containers.add(name)
                    case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="pop" | "popleft"), args=[]):
                        containers.add(name)
                    case ast.Subscript():
                        return [statement], set()
        if not containers:
            return [statement], set()

        causes = list[ast.stmt]()
        for other, branches in self.branches.items():
            if containers & _bound_by_itself(other):
                causes += [other, *branches]
            elif containers & changed_names(other):
                causes += [branch for branch in branches if branch not in self.branches[statement]]
        return causes, set()

    def _setting(self, names: set[str]) -> list[ast.stmt]:
        """Return the statements that bind or change one of `names`, with the branches that lead to them."""
        setting = list[ast.stmt]()
        for statement, branches in self.branches.items():
            if names & (_bound_by_itself(statement) | changed_names(statement)):
                setting += [statement, *branches]
        return setting


def _is_constant(index: ast.expr) -> bool:
    return not any(isinstance(node, ast.Name | ast.Call) for node in ast.walk(index))


def _blocks(statement: ast.stmt) -> Iterator[list[ast.stmt]]:
    """Yield the lists of statements within a compound statement."""
    for field in ("body", "orelse", "finalbody"):
        yield getattr(statement, field, [])
    for part in (*getattr(statement, "handlers", []), *getattr(statement, "cases", [])):
        yield part.body


def _bound_by_itself(statement: ast.stmt) -> set[str]:
    """Return the names that a statement binds, without those of statements within it."""
    if isinstance(statement, SCOPES):
        return {statement.name}
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return bound_names(statement)
    names = set[str]()
    for expression in expressions(statement):
        names |= bound_names(expression)
    return names
