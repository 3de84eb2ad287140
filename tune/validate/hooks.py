"""What a rewritten recipe calls while it is rehearsed, see `tune.validate.rewriting`."""

import ast
import contextlib
import dis
import sys
import time
import types
from collections.abc import Callable
from typing import Any

from tune.rehearsal import MadeUp, StepsEnded
from tune.validate.syntax import Statements, function_at, read_names

# The longest time of a loop: of the processor, since other programs share it, and of the clock, since a loop may wait.
SECONDS, CLOCK_SECONDS = 60.0, 600.0
# Packages whose contexts, apart from `contextlib.suppress` and `ExitStack`, let errors of their body through.
TRANSPARENT = {
    *("tune", "torch", "builtins", "io", "_io", "contextlib", "threading", "_thread"),
    *("tempfile", "warnings"),
}
CATCHING = {"CHECK_EXC_MATCH", "CHECK_EG_MATCH", "WITH_EXCEPT_START"}  # bytecode of `except` and `with`


class Unfinished(Exception):
    """A loop takes too long to rehearse it to its end."""

    def __init__(self) -> None:
        super().__init__("this loop was not checked to its end, since that takes too long")


class Unknown(BaseException):
    """Raised where the result of a failed statement is needed. `except Exception` does not catch it."""


class Missing:
    """The missing result of a failed statement. It and its attributes are false; all other uses raise `Unknown`."""

    def __bool__(self) -> bool:
        return False

    def __getattr__(self, name: str) -> "Missing":
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        pass

    def __repr__(self) -> str:
        return "<missing>"

    def __format__(self, _: str) -> str:
        return repr(self)

    @classmethod
    def __torch_function__(cls, *_: Any) -> Any:
        raise Unknown


def _raise_unknown(*_: Any, **__: Any) -> Any:
    raise Unknown


BINARY = ["add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "divmod", "pow", "lshift"]
BINARY += ["rshift", "and", "or", "xor"]
OTHER = ["call", "iter", "next", "len", "getitem", "setitem", "delitem", "contains", "enter", "float"]
OTHER += ["int", "index", "complex", "round", "lt", "le", "gt", "ge", "neg", "pos", "abs", "invert"]
# `__eq__` and `__fspath__` are left out: checks of settings would take a missing value for another type.
for _name in (*BINARY, *(f"r{name}" for name in BINARY), *(f"i{name}" for name in BINARY), *OTHER):
    setattr(Missing, f"__{_name}__", _raise_unknown)
Missing.__name__ = repr(Missing())  # marks consequences in messages


class Hooks:
    """The object that a rewritten recipe finds under the name `HOOKS`.

    `report` gets each error, and whether it follows from an earlier one because a missing result was read on its way.
    """

    errors = (Exception, Unknown, MadeUp)
    made_up = MadeUp
    steps_ended = StepsEnded
    missing = Missing()

    def __init__(self, file: str, tree: ast.Module, report: Callable[[BaseException, bool], None]):
        self.file, self.tree, self.report = file, tree, report
        # What the head of a loop or `with` gave, by the number of the statement.
        self.iterables: dict[int, Any] = {}
        self.items: dict[int, Any] = {}
        self.contexts: dict[int, Any] = {}
        self.swallowing: set[int] = set()  # the entered contexts that may end an error of their body
        self.begun: dict[int, TimeLimit] = {}  # `while` loops

    def failed(self, error: BaseException | None = None) -> None:
        """Report `error`, by default the one that is handled now."""
        error = error or sys.exc_info()[1]
        assert error is not None
        self.report(error, self._reads_missing(error))

    def _reads_missing(self, error: BaseException) -> bool:
        """Return whether a statement of the recipe, or a condition before its `raise`, reads a missing result."""
        trace = error.__traceback__
        while trace:
            frame, line = trace.tb_frame, trace.tb_lineno
            trace = trace.tb_next
            if frame.f_code.co_filename != self.file:
                continue
            statements = Statements(function_at(self.tree, line))
            statement = statements.at(line)
            names = read_names(statement) if statement else set()
            names |= statements.causes(statements.checks(line), set())[1]
            for name in names:
                if isinstance(frame.f_locals.get(name, frame.f_globals.get(name)), Missing):
                    return True
        return False

    def known(self, value: Any) -> Any:
        """Return a part of a condition. Raises `Unknown` if it is missing: then neither branch is right."""
        if isinstance(value, Missing):
            raise Unknown
        return value

    def goes_on(self, number: int) -> bool:
        """Return whether a `while` loop may go on."""
        if not self.begun.setdefault(number, TimeLimit()).is_over:
            return True
        self.report(_raised_by_caller(Unfinished()), False)
        return False

    def iterate(self, number: int) -> "Items":
        """Return the items of a `for` loop."""
        return Items(self, self.iterables.pop(number))

    def entered(self, number: int) -> "Entered":
        """Return the context of a `with`."""
        return Entered(self, number, self.contexts.pop(number))

    def may_catch(self, *numbers: int) -> bool:
        """Return whether one of these contexts may end the error that is handled now."""
        return not isinstance(sys.exc_info()[1], Unknown) and not self.swallowing.isdisjoint(numbers)


class TimeLimit:
    """The time that a loop has, from now on."""

    def __init__(self) -> None:
        self.processor, self.clock = time.thread_time(), time.monotonic()

    @property
    def is_over(self) -> bool:
        is_long = time.thread_time() - self.processor > SECONDS
        return is_long or time.monotonic() - self.clock > CLOCK_SECONDS


class Items:
    """Iterates over the items of a loop. Where this fails, the body runs once for a missing item."""

    def __init__(self, hooks: Hooks, iterable: Any):
        self.hooks, self.iterable = hooks, iterable
        self.iterator: Any = None
        self.limit, self.has_failed = TimeLimit(), False
        self.is_limited = not isinstance(iterable, list | tuple | range)

    def __iter__(self) -> "Items":
        return self

    def __next__(self) -> Any:
        if self.has_failed:
            raise StopIteration
        try:
            if self.iterator is None:
                self.iterator = iter(self.iterable)
            if self.is_limited and self.limit.is_over:
                raise Unfinished
            return next(self.iterator)
        except StopIteration:
            raise
        except self.hooks.errors as error:
            self.has_failed = True
            self.hooks.failed(_raised_by_caller(error))
            if isinstance(error, Unfinished):
                raise StopIteration from None
            return self.hooks.missing


class Entered:
    """A context manager. Where it cannot be entered, the body runs without it."""

    def __init__(self, hooks: Hooks, number: int, manager: Any):
        self.hooks, self.number, self.manager, self.is_entered = hooks, number, manager, False

    def __enter__(self) -> Any:
        kind = type(self.manager)
        if kind is Missing:
            return self.manager
        try:
            if not (hasattr(kind, "__enter__") and hasattr(kind, "__exit__")):
                raise TypeError(f"'{kind.__name__}' object does not support the context manager protocol")
            value = kind.__enter__(self.manager)
        except self.hooks.errors as error:
            self.hooks.failed(_raised_by_caller(error))
            return self.hooks.missing
        self.is_entered = True
        if may_swallow(self.manager):
            self.hooks.swallowing.add(self.number)
        return value

    def __exit__(self, *error: Any) -> Any:
        self.hooks.swallowing.discard(self.number)
        return type(self.manager).__exit__(self.manager, *error) if self.is_entered else None


def may_swallow(manager: Any) -> bool:
    """Return whether a context manager may end an error of its body."""
    if isinstance(manager, contextlib.suppress | contextlib.ExitStack):
        return True
    # A generator with @contextmanager ends an error that it catches.
    if generator := getattr(manager, "gen", None):
        return any(step.opname in CATCHING for step in dis.get_instructions(generator.gi_code))
    if type(manager).__module__.partition(".")[0] in TRANSPARENT:
        return False
    # A class ends an error if its `__exit__` returns something true.
    leave = type(manager).__exit__
    code = getattr(leave, "__code__", None)
    if code is None:
        return True
    return leave.__module__.partition(".")[0] not in TRANSPARENT and not _returns_nothing(code)


def _returns_nothing(code: types.CodeType) -> bool:
    """Return whether a function returns only None or False."""
    constant: Any = True  # that the instruction before loads
    for step in dis.get_instructions(code):
        if step.opname == "RETURN_CONST" and step.argval:  # Python 3.12
            return False
        if step.opname == "RETURN_VALUE" and constant:
            return False
        constant = step.argval if step.opname == "LOAD_CONST" else True
    return True


def _raised_by_caller(error: BaseException) -> Any:
    """Return the error as if the line of the recipe that led here had raised it."""
    frame = sys._getframe(2)
    trace = types.TracebackType(error.__traceback__, frame, frame.f_lasti, frame.f_lineno)
    return error.with_traceback(trace)
