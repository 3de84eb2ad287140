"""A function continues after a failing statement, and errors that follow from it are distinguished."""

import ast
from contextlib import suppress

import pytest

from tune.errors import TuneError
from tune.rehearsal import RehearsalEnded
from tune.validate.hooks import Hooks, Missing, Unknown
from tune.validate.rewriting import HOOKS, goes_on_after_errors


def run(body: str, **names):
    """Return `seen` after the statements and the errors, each with whether it needed something missing."""
    lines = "\n".join(f"    {line}" for line in body.strip("\n").splitlines())
    tree = ast.parse(f"def main():\n{lines}")
    errors, seen = [], []
    hooks = Hooks("mine.py", tree, lambda error, needs: errors.append((error, needs)))
    namespace = {"seen": seen, "TuneError": TuneError, "RehearsalEnded": RehearsalEnded, HOOKS: hooks, **names}
    exec(compile(ast.Module([goes_on_after_errors(tree.body[0])], []), "mine.py", "exec"), namespace)
    with suppress(RehearsalEnded):
        namespace["main"]()
    return seen, errors


def test_statements_after_a_failing_one_are_run():
    seen, ((first, _), (second, _)) = run(
        """
a = 1 / 0
seen.append("between")
b = unheard_of
seen.append("behind")
"""
    )
    assert seen == ["between", "behind"]
    assert isinstance(first, ZeroDivisionError) and isinstance(second, NameError)
    assert first.__traceback__.tb_frame.f_code.co_filename == "mine.py"


def test_statements_that_need_something_missing_are_marked():
    _, errors = run("a, b = 1 / 0\nc = a + 1\nd = c.shape\nseen.append(len(d))")
    assert [type(error) for error, _ in errors] == [ZeroDivisionError, Unknown, Unknown]
    assert [needs for _, needs in errors] == [False, True, True]


def test_missing_values_and_their_attributes_are_false():
    choice = "if a:\n    b = 1\nelse:\n    c = 1\nseen.extend([b, c])"
    seen, errors = run(f"a = 1 / 0\nseen.append(bool(a.config.size))\n{choice}")
    assert [seen[0], *map(repr, seen[1:])] == [False, *[repr(Missing())] * 2]
    assert [type(error) for error, _ in errors] == [ZeroDivisionError, Unknown]
    assert repr(Missing()) == Missing.__name__


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("for each in range(5):\n    if each == 1:\n        continue\n    seen.append(each)", [0, 2, 3, 4]),
        ("for each in range(5):\n    seen.append(each)\n    if each == 1:\n        break", [0, 1]),
        ("for each in (1, 0, 2):\n    seen.append(4 / each)", [4, 2]),
        ("for a, b in [(1, 2), 3, (4, 5)]:\n    seen.append(repr(b))", ["2", "<missing>", "5"]),
        ("seen.append(1)\nreturn\nseen.append(2)", [1]),
        ("seen.append(1)\nraise RehearsalEnded\nseen.append(2)", [1]),
        ("count = 0\ndef add():\n    nonlocal count\n    count += 1\nadd()\nadd()\nseen.append(count)", [2]),
        ("values = [1, 2]\nseen.extend([each * 2 for each in values if each in values])", [2, 4]),
        ("while len(seen) < 2:\n    seen.append(0)", [0, 0]),
        ("try:\n    1 / 0\nexcept ZeroDivisionError:\n    seen.append(1)", [1]),
        ("if 1 / 0:\n    seen.append(1)\nseen.append(2)", [2]),
        ("for each in 1 / 0:\n    seen.append(1)\nseen.append(2)", [1, 2]),
    ],
)  # fmt: skip
def test_control_flow(body, expected):
    seen, _ = run(body)
    assert seen == expected


def test_context_is_exited_after_an_error():
    class Context:
        def __enter__(self):
            entered.append("in")
            return self

        def __exit__(self, *error):
            entered.append(error)

    entered: list = []
    seen, errors = run("with context as same:\n    1 / 0\n    seen.append(same is context)", context=Context())
    assert seen == [True] and entered == ["in", (None, None, None)] and len(errors) == 1


def test_body_of_a_missing_context_is_run():
    seen, errors = run("with context:\n    seen.append(1)", context=Missing())
    assert seen == [1]
    assert all(isinstance(error, Unknown) for error, _ in errors)
