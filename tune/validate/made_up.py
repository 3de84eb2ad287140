"""The numbers that a rehearsal makes up, and the errors that may come from them."""

import ast
import functools
import sys
import time
import traceback
import types
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import tune
from tune.rehearsal import MadeUp
from tune.validate.syntax import Statements, function_at, parameters, parsed_file, read_names

# Errors that a wrong number can cause. A missing attribute or a wrong shape does not depend on numbers.
OF_NUMBERS = (IndexError, ArithmeticError, ValueError, AssertionError)
# Messages of such errors by torch and Python that are about shapes, lengths and texts.
OF_SHAPES = ("Dimension out of range", "too many indices")
OF_TEXTS = ("values to unpack", "Unknown format code", "could not convert string")
SECONDS, TIMES = 5.0, 2000  # a line may ask for numbers for longer (of processor time), or more often
LIBRARY = str(Path(tune.__file__).parent)


class NotRehearsed(Exception):
    """Wraps an error that may come from the rehearsal itself, for the reason `why`."""

    def __init__(self, error: BaseException, why: str):
        super().__init__(str(error))
        self.error, self.why = error, why


@functools.cache
def is_users(file: str) -> bool:
    """Return whether a file is the user's own: not of this library, Python or an installed package."""
    return not file.startswith((LIBRARY, sys.prefix, sys.base_prefix, "<")) and "site-packages" not in file


@dataclass
class Line:
    """A line that asked for made-up numbers: when first (processor time), and how many times."""

    first: float
    times: int = 0


class Asked(defaultdict[str, dict[int, Line]]):
    """The lines of the user's code that asked for a made-up number, by file."""

    def __init__(self) -> None:
        super().__init__(dict)

    def note(self, frame: types.FrameType | None) -> None:
        """Note all lines of the user's code on the way to `frame`.

        Raises MadeUp if the innermost one asks again and again: a loop that waits for a number.
        """
        now, is_innermost = time.process_time(), True
        while frame:
            file, number = frame.f_code.co_filename, frame.f_lineno
            frame = frame.f_back
            if not is_users(file):
                continue
            line = self[file].setdefault(number, Line(now))
            line.times += 1
            if is_innermost and now - line.first > SECONDS and line.times > TIMES:
                del self[file][number]
                raise MadeUp("this line asks again and again for a number")
            is_innermost = False


def may_be_made_up(error: BaseException, asked: Mapping[str, Collection[int]]) -> bool:
    """Return whether an error may come from a number that was made up.

    `asked` has the lines of the user's files that asked for such a number. From the statement that failed, names are
    followed to the statements that set them, and through parameters to the calling function. For a `raise` or `assert`
    of the user, so are the conditions that lead to it.
    """
    if any(text in str(error) for text in (*OF_SHAPES, *OF_TEXTS)):
        return False
    trace = [*traceback.walk_tb(error.__traceback__)]
    frames = [(frame, line) for frame, line in trace if is_users_frame(frame, asked)]
    if not frames:
        return False
    frames.reverse()
    innermost = frames[0][0]
    for frame, line in frames:
        # The statement that failed in this frame, with what leads to it.
        file = frame.f_code.co_filename
        tree = parsed_file(file)
        if tree is None:
            return False
        function = function_at(tree, line)
        statements = Statements(function)
        statement, checks, names = statements.at(line), statements.checks(line), set[str]()
        failed = checks or ([statement] if statement else [])

        # Only some errors can come from a number, and only from some parts of the statement.
        if frame is innermost and statement:
            if isinstance(error, UnboundLocalError):
                failed = statements.ways_around(unbound_names(frame, statement), statement)
            elif isinstance(error, IndexError) and not checks:
                failed, names = statements.causes_of_index(statement)
            elif not isinstance(error, OF_NUMBERS) and not (checks and trace[-1][0] is frame):
                return False

        lines, names = statements.causes(failed, names)
        if not lines.isdisjoint(asked.get(file, ())):
            return True
        if names.isdisjoint(parameters(function)):
            return False
    return False


def is_users_frame(frame: types.FrameType, asked: Mapping[str, Collection[int]]) -> bool:
    file = frame.f_code.co_filename
    return file in asked or is_users(file)


def unbound_names(frame: types.FrameType, statement: ast.stmt) -> set[str]:
    """Return the local names that a statement reads and that have no value yet."""
    code = frame.f_code
    local = {*code.co_varnames, *code.co_cellvars, *code.co_freevars}
    return {name for name in read_names(statement) & local if name not in frame.f_locals}
