"""Rewrite the functions of a recipe for a rehearsal: scopes, jumps, closures and line numbers stay Python's.

`goes_on_after_errors` gives each statement a `try` of its own, so that one pass finds several errors. `with_bodies`
makes the body of each loop a function, which a plan calls for other items.
"""

import ast
import copy
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tune.validate.syntax import SCOPES, bound_names, nodes_of_scope, rebound_names

HOOKS = "__rehearsal__"  # the name in the recipe's module of the object that the rewritten function calls
MOST_BLOCKS = 12  # Python nests 20 blocks, and a statement needs up to 4 more


def goes_on_after_errors(function: ast.FunctionDef) -> ast.FunctionDef:
    """Return a function that reports errors to `HOOKS` and goes on with the next statement.

    The names that a failed statement binds become missing. Inner functions stay as they are: an error in one belongs to
    the statement that calls it.
    """
    new = copy.copy(function)
    new.body = _Guard().block(copy.deepcopy(function.body), Around())
    return ast.fix_missing_locations(new)


@dataclass(frozen=True)
class Around:
    """What stands around a statement.

    - `caught`: the types of errors that the user's own `except` catches, as texts.
    - `catches_all`: whether the user catches everything.
    - `contexts`: the numbers of the `with` statements.
    - `loop`: the kind of the innermost loop.
    - `blocks`: how deeply it is nested.
    """

    caught: tuple[str, ...] = ()
    catches_all: bool = False
    contexts: tuple[int, ...] = ()
    loop: str = ""
    blocks: int = 0

    def deeper(self, blocks: int, loop: str = "") -> "Around":
        return replace(self, blocks=self.blocks + blocks, loop=loop or self.loop)

    def within(self, context: int) -> "Around":
        return replace(self.deeper(2), contexts=(*self.contexts, context))

    def catching(self, handlers: Sequence[ast.ExceptHandler]) -> "Around":
        types = [ast.unparse(handler.type) for handler in handlers if handler.type]
        catches_all = self.catches_all or len(types) < len(handlers)
        return replace(self.deeper(3), caught=(*types, *self.caught), catches_all=catches_all)


class _Guard:
    """See `goes_on_after_errors`."""

    def __init__(self) -> None:
        self.count = 0  # of loops and contexts

    def block(self, statements: Sequence[ast.stmt], around: Around) -> list[ast.stmt]:
        new = list[ast.stmt]()
        for statement in statements:
            new += self._statement(statement, around)
        return new

    def _statement(self, node: ast.stmt, around: Around) -> list[ast.stmt]:
        # The user's own handler wins, and too many blocks do not compile.
        if around.catches_all:
            return [node]
        if around.blocks > MOST_BLOCKS:
            return [_tried([node], node, around)]
        deeper = around.deeper(1)
        match node:
            # These cannot fail.
            case ast.Pass() | ast.Break() | ast.Continue() | ast.Global() | ast.Nonlocal() | ast.Return(value=None):
                return [node]
            case ast.Expr(value=ast.Constant()) | ast.AnnAssign(value=None):
                return [node]
            case ast.Return():
                return [_tried([node], node, around, *parsed(f"return {HOOKS}.missing", node))]
            case ast.If():
                node.test = _known(node.test)
                node.body, node.orelse = self.block(node.body, deeper), self.block(node.orelse, deeper)
            case ast.While():
                self._limit(node)
                node.body = self.block(node.body, around.deeper(2, loop="while"))
                node.orelse = self.block(node.orelse, deeper)
            case ast.For():
                return self._for(node, around)
            case ast.With():
                return self._with(node, around)
            case ast.Match():
                for case in node.cases:
                    case.body = self.block(case.body, deeper)
            case ast.Try():
                node.body = self.block(node.body, around.catching(node.handlers))
                others = around.deeper(3)
                for handler in node.handlers:
                    handler.body = self.block(handler.body, others)
                node.orelse, node.finalbody = self.block(node.orelse, others), self.block(node.finalbody, others)
        return [_tried([node], node, around)]

    def _number(self) -> int:
        self.count += 1
        return self.count

    def _limit(self, node: ast.While) -> None:
        """Let a loop end after some time."""
        (goes_on,) = parsed(f"{HOOKS}.goes_on({self._number()})", node.test)
        test = ast.BoolOp(ast.And(), [goes_on.value, _known(node.test)])
        node.test = ast.copy_location(test, node.test)

    def _for(self, node: ast.For, around: Around) -> list[ast.stmt]:
        """Return `for TARGET in ITEMS: BODY` as

        try: HOOKS.iterables[1] = ITEMS
        except ...: HOOKS.iterables[1] = HOOKS.missing
        for TARGET in HOOKS.iterate(1): BODY
        """
        number = self._number()
        head = _evaluated(f"iterables[{number}]", node.iter, node, around)
        node.iter = parsed(f"{HOOKS}.iterate({number})", node.iter)[0].value
        deeper = around.deeper(2, loop="for")

        # An item that cannot be unpacked is an error of its own.
        unpacked = list[ast.stmt]()
        if not isinstance(node.target, ast.Name):
            (item,) = parsed(f"{HOOKS}.items[{number}] = {HOOKS}.items[{number}]", node.target)
            assigned = ast.copy_location(ast.Assign([node.target], item.value), node)
            unpacked, node.target = [_tried([assigned], node.target, deeper)], item.targets[0]

        node.body = [*unpacked, *self.block(node.body, deeper)]
        node.orelse = self.block(node.orelse, around.deeper(1))
        return [head, _tried([node], node, around)]

    def _with(self, node: ast.With, around: Around) -> list[ast.stmt]:
        """Return `with CONTEXT as NAME: BODY` as

        try: HOOKS.contexts[1] = CONTEXT
        except ...: HOOKS.contexts[1] = HOOKS.missing
        with HOOKS.entered(1) as NAME: BODY
        """
        item, *others = node.items
        number = self._number()
        head = _evaluated(f"contexts[{number}]", item.context_expr, node, around)
        entered = parsed(f"{HOOKS}.entered({number})", item.context_expr)[0].value
        inner = node.body
        if others:
            inner = [ast.copy_location(ast.With(others, node.body), node)]
        new = ast.With([ast.withitem(entered, item.optional_vars)], self.block(inner, around.within(number)))
        return [head, _tried([ast.copy_location(new, node)], node, around)]


def _evaluated(kept: str, expression: ast.expr, at: ast.stmt, around: Around) -> ast.stmt:
    """Return a statement that keeps the value of an expression in `HOOKS`; a missing one if it fails."""
    (assigned,) = parsed(f"{HOOKS}.{kept} = 0", at)
    assigned.value = expression
    (missing,) = parsed(f"{HOOKS}.{kept} = {HOOKS}.missing", at)
    return _tried([assigned], expression, around, missing)


def _tried(body: list[ast.stmt], at: ast.AST, around: Around, *then: ast.stmt) -> ast.stmt:
    """Return `body` in a `try` that reports an error, makes the names that `body` binds missing, and does `then`.

    An error that a statement of the user around it may catch is raised to it.
    """
    handlers = [f"except {types}: raise" for types in around.caught]
    if around.loop == "while":
        handlers.append(f"except {HOOKS}.steps_ended: break")
    if around.loop:
        handlers.append(f"except {HOOKS}.made_up:\n        {HOOKS}.failed()\n        break")
    lines = [f"except {HOOKS}.errors:"]
    if around.contexts:
        lines.append(f"if {HOOKS}.may_catch({', '.join(map(str, around.contexts))}): raise")
    lines.append(f"{HOOKS}.failed()")
    for statement in body:
        lines += [f"{name} = {HOOKS}.missing" for name in sorted(bound_names(statement))]
    handlers.append("\n        ".join(lines))

    # `break` is read only in a loop.
    (loop,) = parsed("\n    ".join(["while True:", "try: pass", *handlers]), at)
    tried: ast.Try = loop.body[0]
    tried.handlers[-1].body += then
    tried.body = body
    return tried


def _known(test: ast.expr) -> ast.expr:
    """Return a condition that raises `Unknown` where it would be false because a part of it is missing."""
    match test:
        case ast.UnaryOp(op=ast.Not()):
            test.operand = _known(test.operand)
        case ast.BoolOp():
            test.values = [_known(part) for part in test.values]
        case ast.Compare():
            test.left, test.comparators = _known(test.left), [_known(part) for part in test.comparators]
        case ast.Name() | ast.Attribute() | ast.NamedExpr() | ast.Call():
            known: ast.Call = parsed(f"{HOOKS}.known(0)", test)[0].value
            known.args = [test]
            return known
    return test


def with_bodies(function: ast.FunctionDef) -> ast.FunctionDef:
    """Return a function whose loops `for TARGET in ITEMS: BODY` are

    def __body_1__(__item__):
        nonlocal ...
        TARGET = __item__
        BODY
    for TARGET in HOOKS.loop(ITEMS, __body_1__): BODY
    """
    new = copy.deepcopy(function)
    _Bodies().rewrite(new, _global_names(new))
    return ast.fix_missing_locations(new)


class _Bodies:
    """See `with_bodies`."""

    def __init__(self) -> None:
        self.count = 0

    def rewrite(self, node: Any, global_names: set[str]) -> None:
        for field in ("body", "orelse", "finalbody", "handlers", "cases"):
            statements = getattr(node, field, None)
            if isinstance(statements, list):
                setattr(node, field, self._block(statements, global_names))

    def _block(self, statements: list[Any], global_names: set[str]) -> list[Any]:
        new = []
        for statement in statements:
            if isinstance(statement, ast.For) and _is_movable(statement):
                body = self._body(statement, global_names)
                call: ast.Call = parsed(f"{HOOKS}.loop(0, {body.name})", statement.iter)[0].value
                call.args[0], statement.iter = statement.iter, call
                new.append(body)
            if isinstance(statement, ast.FunctionDef):
                self.rewrite(statement, _global_names(statement))
            elif not isinstance(statement, SCOPES):
                self.rewrite(statement, global_names)
            new.append(statement)
        return new

    def _body(self, loop: ast.For, global_names: set[str]) -> ast.FunctionDef:
        """Return the body of a loop as a function of an item. Its names stay those of the function around it."""
        self.count += 1
        names = bound_names(ast.For(loop.target, loop.iter, loop.body, [])) | rebound_names(loop)
        scopes = list[ast.stmt]()
        if local := sorted(names - global_names):
            scopes.append(ast.Nonlocal(local))
        if shared := sorted(names & global_names):
            scopes.append(ast.Global(shared))
        function: ast.FunctionDef = parsed(f"def __body_{self.count}__(__item__): pass", loop)[0]
        (assigned,) = parsed("target = __item__", loop)
        assigned.targets = [copy.deepcopy(loop.target)]
        body = [_Jumps().visit(copy.deepcopy(statement)) for statement in loop.body]
        function.body = [*scopes, assigned, *body]
        return function


def _is_movable(loop: ast.For) -> bool:
    """Return whether the body of a loop can be a function."""
    return not any(isinstance(node, ast.Yield | ast.YieldFrom | ast.Await) for node in nodes_of_scope(loop))


def _global_names(function: ast.FunctionDef) -> set[str]:
    declarations = (node for node in nodes_of_scope(function) if isinstance(node, ast.Global))
    return {name for node in declarations for name in node.names}


class _Jumps(ast.NodeTransformer):
    """Makes the jumps of a loop's body those of a function. Jumps of inner loops and functions stay."""

    def __init__(self, is_in_loop: bool = False):
        self.is_in_loop = is_in_loop

    def _visit_jump(self, node: ast.stmt) -> ast.stmt:
        return node if self.is_in_loop else ast.copy_location(ast.Return(), node)

    visit_Break = visit_Continue = _visit_jump

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.stmt:
        """A nonlocal name has no annotation."""
        new = ast.Assign([node.target], node.value) if node.value else ast.Pass()
        return ast.copy_location(new, node)

    def _visit_loop(self, node: Any) -> Any:
        inner = _Jumps(is_in_loop=True)
        node.body = [inner.visit(statement) for statement in node.body]
        node.orelse = [self.visit(statement) for statement in node.orelse]  # jumps of the outer loop
        return node

    visit_For = visit_While = _visit_loop

    def _visit_scope(self, node: Any) -> Any:
        return node

    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = visit_Lambda = _visit_scope


def parsed(text: str, place: ast.AST) -> list[Any]:
    """Return the statements of a text, with the location of `place`."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if "lineno" in node._attributes:
            ast.copy_location(node, place)
    return tree.body


def compiled(tree: ast.Module, new: Mapping[ast.stmt, ast.stmt], file: Path) -> types.CodeType:
    """Return the code of a module in which `new` functions replace others."""
    body = [new.get(statement, statement) for statement in tree.body]
    return compile(ast.Module(body, tree.type_ignores), str(file), "exec", dont_inherit=True)


def code_of(module: types.CodeType, function: types.CodeType) -> types.CodeType | None:
    """Return the code in a compiled module of the function that stands at the same line as `function`."""
    for inner in module.co_consts:
        if not isinstance(inner, types.CodeType):
            continue
        if (inner.co_name, inner.co_firstlineno) == (function.co_name, function.co_firstlineno):
            return inner
        if found := code_of(inner, function):
            return found
    return None
