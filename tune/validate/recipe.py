"""A recipe's file as a module, whose main function is called with other settings and rewritten statements."""

import ast
import builtins
import dis
import sys
import traceback
import types
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig
from omegaconf.errors import ConfigAttributeError, ConfigKeyError

from tune import rehearsal
from tune.errors import TuneError
from tune.lookup import did_you_mean
from tune.validate.hooks import Hooks
from tune.validate.made_up import is_users
from tune.validate.rewriting import HOOKS, code_of, compiled, goes_on_after_errors, with_bodies


class Recipe:
    """A recipe's file as a module, and its function with `@config.entrypoint`.

    Raises:
        TuneError: the file is not Python, raises an error, or has no such function.
    """

    def __init__(self, file: Path):
        self.file = file
        self.module = sys.modules[rehearsal.MODULE] = types.ModuleType(rehearsal.MODULE)
        self.module.__file__ = str(file)
        try:
            self.tree = ast.parse(file.read_text(encoding="utf-8"), str(file))
            self.code = compile(self.tree, str(file), "exec", dont_inherit=True)
            with suppress(rehearsal.MainCalled):
                exec(self.code, vars(self.module))
        except SyntaxError as error:
            raise TuneError(f"{error.filename}:{error.lineno}: {error.msg}") from error
        except TuneError:
            raise
        except SystemExit as error:
            advice = 'Put what starts a training below `if __name__ == "__main__":`'
            raise TuneError(f"{place_of(error, file)}: the file exits while it is read. {advice}") from error
        except Exception as error:
            raise TuneError(described(error, file)) from error
        self._find_main()

    def _find_main(self) -> None:
        """Set `function`, as the file decorates it, `inner`, the function without decorators, and its syntax `main`."""
        definitions = {node.name: node for node in self.tree.body if isinstance(node, ast.FunctionDef)}
        for function in vars(self.module).values():
            inner = undecorated(function, self.file) if hasattr(function, "settings_of_recipe") else None
            if inner and inner.__name__ in definitions:
                self.function, self.inner, self.main = function, inner, definitions[inner.__name__]
                return
        raise TuneError(f"{self.file}: no function has @config.entrypoint(...). Add it to the recipe's main function")

    def call(self, cfg: DictConfig, failed: Callable[[BaseException, bool], None]) -> None:
        """Call the main function. It goes on after errors, which `failed` gets (see `Hooks`)."""
        hooks = Hooks(str(self.file), self.tree, failed)
        try:
            code = compiled(self.tree, {self.main: goes_on_after_errors(self.main)}, self.file)
        except (SyntaxError, RecursionError):  # nested more deeply than Python allows
            code = self.code
        self._replace_code([self.inner], code, hooks)
        try:
            self._call(cfg)
        except hooks.errors as error:
            failed(error, False)

    def call_with_bodies(self, cfg: DictConfig, hooks: Any) -> None:
        """Call the main function. It goes on after errors that `hooks.report` does not raise.

        `hooks.loop` gets the items of each `for` in the file and a function that runs its body for an item, and returns
        the items to iterate over.
        """
        functions: dict[ast.stmt, ast.FunctionDef] = {}
        for node in self.tree.body:
            if isinstance(node, ast.FunctionDef):
                functions[node] = with_bodies(goes_on_after_errors(node) if node is self.main else node)
        code = compiled(self.tree, functions, self.file)
        values = [value for value in vars(self.module).values() if callable(value)]
        inner = {undecorated(value, self.file) for value in values} | {self.inner}
        self._replace_code([function for function in inner if function], code, hooks)
        self._call(cfg)

    def _replace_code(self, functions: list[types.FunctionType], module: types.CodeType, hooks: Any) -> None:
        """Give functions their code in the rewritten module. Their defaults, closures and decorators stay."""
        vars(self.module)[HOOKS] = hooks
        for function in functions:
            code = code_of(module, function.__code__)
            if code and code.co_freevars == function.__code__.co_freevars:
                function.__code__ = code

    def _call(self, cfg: DictConfig) -> None:
        try:
            with suppress(rehearsal.RehearsalEnded):
                self.function(cfg.copy())
        except SystemExit as error:
            if error.code:
                raise TuneError(f"{place_of(error, self.file)}: the recipe exits: {error.code}") from error

    def missing_settings(self, cfg: DictConfig) -> Iterator[tuple[int, str]]:
        """Yield the lines of the function that read a setting which `cfg` does not have, and what is wrong there.

        A setting whose name the file also has as a string is left out: its code may ask whether it exists.
        """
        argument, text = self.main.args.args[0].arg, self.file.read_text(encoding="utf-8")
        for node in ast.walk(self.main):
            names, value = list[str](), cast(Any, node)
            while isinstance(value, ast.Attribute):
                names, value = [value.attr, *names], value.value
            if not (names and isinstance(value, ast.Name) and value.id == argument):
                continue
            group: Any = cfg
            for at, name in enumerate(names):
                if not isinstance(group, DictConfig) or hasattr(DictConfig, name):
                    break
                if name not in group:
                    key, hint = ".".join(names[: at + 1]), did_you_mean(name, map(str, group))
                    if f'"{name}"' not in text and f"'{name}'" not in text:
                        line = cast(Any, node).lineno
                        place = f"{self.file.name}:{line}"
                        yield line, f"{key}: {place} reads it, and there is no such setting.{hint}"
                    break
                group = group._get_node(name)

    def undefined_names(self) -> Iterator[tuple[int, str]]:
        """Yield the lines of functions that read a name which nothing defines, and what is wrong there.

        A rehearsal does not enter all branches, such as those of later steps.
        """
        known = {*vars(self.module), *vars(builtins)}
        codes = [self.code]
        while codes:
            code = codes.pop()
            codes += [each for each in code.co_consts if isinstance(each, types.CodeType)]
            for instruction in dis.get_instructions(code):
                name, positions = instruction.argval, instruction.positions
                if instruction.opname == "LOAD_GLOBAL" and name not in known and positions and positions.lineno:
                    hint = did_you_mean(name, {*code.co_varnames, *code.co_cellvars, *code.co_freevars, *known})
                    yield positions.lineno, f"{self.file.name}:{positions.lineno}: name '{name}' is not defined.{hint}"

    def explained(self, error: BaseException) -> TuneError:
        """Return an error of the recipe with its file and line."""
        return error if isinstance(error, TuneError) else TuneError(described(error, self.file))


def undecorated(function: Any, file: Path) -> types.FunctionType | None:
    """Return the function of `file` within a decorated one, which a decorator may keep only in its closure."""
    pending, seen = [function], list[types.FunctionType]()
    while pending:
        inner = pending.pop()
        if not isinstance(inner, types.FunctionType) or inner in seen:
            continue
        seen.append(inner)
        pending.append(getattr(inner, "__wrapped__", None))
        for cell in inner.__closure__ or ():
            with suppress(ValueError):  # a cell without a value yet
                pending.append(cell.cell_contents)
    own = [inner for inner in seen if _is_of_module(inner.__code__, file)]
    named = [inner for inner in own if inner.__name__ == function.__name__]
    return next(iter(named or own), None)


def _is_of_module(code: types.CodeType, file: Path) -> bool:
    """Return whether a function stands in `file` itself, not within another function."""
    return code.co_filename == str(file) and "." not in code.co_qualname


def place_of(error: BaseException, file: Path) -> str:
    """Return the innermost line of the user's code that an error comes from, as `mine.py:12`."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == str(file) or is_users(frame.filename)]
    return f"{Path(own[-1].filename).name}:{own[-1].lineno}" if own else file.name


def described(error: BaseException, file: Path) -> str:
    """Describe an error other than `TuneError`, with the line of the user's code that it comes from."""
    place = place_of(error, file)
    if isinstance(error, ConfigAttributeError | ConfigKeyError):
        near = did_you_mean(str(error.key), map(str, error.parent_node or ()))
        return f"{error.full_key}: {place} reads it, and there is no such setting{near and f'.{near}'}"
    text = str(error).splitlines()[0] if str(error) else ""
    return f"{place}: {type(error).__name__}: {text}"


def is_own(error: Exception, file: Path) -> bool:
    """Return whether the user's code itself raises the error."""
    if isinstance(error, ConfigAttributeError | ConfigKeyError):
        return True
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and (frames[-1].filename == str(file) or is_users(frames[-1].filename))
