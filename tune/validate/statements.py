"""Run the body of a function statement by statement, and go on after failures, so one pass finds several errors."""

import ast
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import CodeType
from typing import Any

from tune.rehearsal import RehearsalEnded


class Unknown(Exception):
    """Raised where the result of a failed statement is needed."""


class Missing:
    """The missing result of a failed statement. It and its attributes are false; all other uses raise `Unknown`."""

    def __bool__(self) -> bool:
        return False

    def __getattr__(self, name: str) -> "Missing":
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __repr__(self) -> str:
        return "<missing>"

    def _needed(self, *_: Any, **__: Any) -> Any:
        raise Unknown

    __call__ = __iter__ = __len__ = __getitem__ = __contains__ = __enter__ = __next__ = _needed
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _needed
    __or__ = __ror__ = __lt__ = __le__ = __gt__ = __ge__ = __float__ = __int__ = __index__ = _needed

    def __exit__(self, *_: Any) -> None:
        pass


Missing.__name__ = repr(Missing())  # marks consequences in messages


class _Break(Exception):
    pass


class _Continue(Exception):
    pass


class _Return(Exception):
    pass


class Statements:
    """Runs statements of `file` with the names in `namespace`.

    `failed` gets each exception, and whether the statement read a missing result.
    """

    def __init__(self, file: str, namespace: dict[str, Any], failed: Callable[[Exception, bool], None]):
        self.file, self.namespace, self.failed = file, namespace, failed

    def run(self, function: ast.FunctionDef) -> None:
        """Run the body of a function, whose arguments are in the namespace."""
        with suppress(_Return, RehearsalEnded):
            self._all(function.body)

    def _all(self, statements: Sequence[ast.stmt]) -> None:
        for statement in statements:
            self._one(statement)

    def _one(self, statement: ast.stmt) -> None:
        match statement:
            case ast.With() if all(isinstance(item.context_expr, ast.Name) for item in statement.items):
                self._with(statement.items, statement.body)
            case ast.For(orelse=[]):
                self._for(statement)
            case ast.If():
                chosen = self._tried(statement, lambda: self._value(statement.test))
                if not isinstance(chosen, Missing):
                    self._all(statement.body if chosen else statement.orelse)
                else:
                    self._forget(statement)
            case ast.Break():
                raise _Break
            case ast.Continue():
                raise _Continue
            case ast.Return():
                raise _Return
            case _:
                self._tried(statement, lambda: self._execute(statement))

    def _with(self, items: Sequence[ast.withitem], body: Sequence[ast.stmt]) -> None:
        if not items:
            self._all(body)
            return
        first, *others = items
        context = self._tried(first.context_expr, lambda: self._value(first.context_expr))
        value = self._tried(first.context_expr, lambda: context.__enter__())
        if first.optional_vars:
            self._assign(first.optional_vars, value)
        try:
            self._with(others, body)
        finally:
            if not isinstance(context, Missing):
                context.__exit__(None, None, None)

    def _for(self, loop: ast.For) -> None:
        items = self._tried(loop.iter, lambda: iter(self._value(loop.iter)))
        if isinstance(items, Missing):  # run once, because the body may have its own errors
            self._forget(loop)
            items = iter([items])
        self._each(loop, items)

    def _each(self, loop: ast.For, items: Any) -> None:
        ended = object()
        with suppress(_Break):
            while (item := self._tried(loop.iter, lambda: next(items, ended))) is not ended:
                failed = isinstance(item, Missing)
                self._assign(loop.target, item)
                with suppress(_Continue):
                    self._all(loop.body)
                if failed:
                    return

    def once(self, loop: ast.For, item: Any) -> None:
        """Run the body of a loop for one item."""
        self._assign(loop.target, item)
        with suppress(_Break, _Continue, _Return):
            self._all(loop.body)

    def _assign(self, target: ast.expr, value: Any) -> None:
        self.namespace["__value__"] = value
        name = ast.copy_location(ast.Name("__value__", ast.Load()), target)
        statement = ast.copy_location(ast.Assign([target], name), target)
        if isinstance(value, Missing) and not isinstance(target, ast.Name):
            self._forget(statement)
        else:
            self._tried(statement, lambda: self._execute(statement))

    def _tried(self, node: ast.AST, call: Callable[[], Any]) -> Any:
        """Return the result of `call`. If it fails, its value and the names that `node` binds are missing."""
        try:
            return call()
        except (_Return, _Break, _Continue, RehearsalEnded):
            raise
        except Exception as error:
            read = (each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load))
            self.failed(error, any(isinstance(self.namespace.get(name), Missing) for name in read))
            return self._forget(node)

    def _forget(self, node: ast.AST) -> Missing:
        for each in ast.walk(node):
            if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store):
                self.namespace.setdefault(each.id, Missing())
        return Missing()

    def _execute(self, statement: ast.stmt) -> None:
        exec(self._code(ast.Module([statement], []), "exec"), self.namespace)

    def _value(self, expression: ast.expr) -> Any:
        return eval(self._code(ast.Expression(expression), "eval"), self.namespace)

    def _code(self, tree: ast.AST, mode: str) -> CodeType:
        tree = ast.fix_missing_locations(_Globals().visit(tree))
        code: CodeType = compile(tree, self.file, mode)  # type: ignore[call-overload]
        return code


class _Globals(ast.NodeTransformer):
    """Replaces nonlocal by global, because the function's names are in its module here."""

    def visit_Nonlocal(self, node: ast.Nonlocal) -> ast.Global:
        return ast.copy_location(ast.Global(node.names), node)
