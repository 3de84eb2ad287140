import inspect
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pytest
import torch

from tune import types
from tune.errors import TuneError
from tune.types import fits, mismatch

RANGES = {
    types.PositiveInt: lambda x: isinstance(x, int) and x > 0,
    types.NonNegativeInt: lambda x: isinstance(x, int) and x >= 0,
    types.PositiveFloat: lambda x: 0 < x < math.inf,
    types.NonNegativeFloat: lambda x: 0 <= x < math.inf,
    types.Fraction: lambda x: 0 <= x < 1,
    types.UnitInterval: lambda x: 0 <= x <= 1,
}


@pytest.mark.parametrize("kind", RANGES, ids=lambda kind: kind.__metadata__[0].description)
@pytest.mark.parametrize("number", [-math.inf, -1, -0.5, 0, 0.0, 1e-9, 0.5, 0.999, 1, 1.0, 1.5, 2, math.inf, math.nan])
def test_ranges_match_their_formulas(kind: Any, number: float) -> None:
    assert fits(number, kind) == RANGES[kind](number)
    assert not fits(str(number), kind)


@pytest.mark.parametrize(
    ("value", "kind", "expected"),
    [
        (True, int, False),
        (True, float, False),
        (1, float, True),
        (1, bool, False),
        (1.0, int, False),
        (None, str | None, True),
        (None, str, False),
        ("a", Path, True),
        (["a", 1], list[str], False),
        ([1, 2], tuple[int, ...], True),
        ([1, 2], tuple[int, int, int], False),
        ((1, 2), Collection[int], True),
        (range(2), Collection[int], True),
        ("ab", Collection[str], False),
        ({"a": 1}, Collection[str], False),
        ({"a": 1}, dict[str, int], True),
        ({"a": "b"}, dict[str, int], False),
        (1, Literal[True], False),
        (1, Literal[1, "auto"], True),
        ([1], Annotated[list[int], "any other metadata"], True),
        (object(), Any, True),
    ],
)
def test_values_that_fit_a_type(value: Any, kind: Any, expected: bool) -> None:
    assert fits(value, kind) is expected
    assert bool(mismatch(value, kind)) is not expected


@pytest.mark.parametrize(
    ("value", "kind", "sentence"),
    [
        ("x", int | None, "'x' is not an integer or null."),
        (None, list[int], "null is not a list (each an integer)."),
        (1, Literal["auto"], "1 is not auto."),
        ([1], tuple[int, str], "[1] is not a list of 2 (an integer, a string)."),
        (1, tuple[int, ...], "1 is not a list (each an integer). Write it as one: [1]."),
        ("ab", Collection[str], "'ab' is not a list (each a string). Write it as one: [ab]."),
        (1, dict[str, int], "1 is not a group of keys (each an integer)."),
        (True, str, "true is not a string. Write it in quotes."),
    ],
)
def test_messages_of_mismatches(value: Any, kind: Any, sentence: str) -> None:
    assert mismatch(value, kind) == sentence


@types.checked
@dataclass
class Settings:
    size: types.PositiveInt
    share: types.UnitInterval | None = None
    kind: Literal["one", "two"] = "one"
    names: list[str] = field(default_factory=list)


@types.checked
def scaled(values: torch.Tensor, factor: types.PositiveFloat = 1.0, *others: int, **options: int) -> Any:
    return values * factor


@types.checked
def unchanged(value: Any) -> Any:
    return value


@pytest.mark.parametrize(
    ("call", "argument", "value"),
    [
        (lambda: Settings(0), "size", "0"),
        (lambda: Settings(size=1.5), "size", "1.5"),
        (lambda: Settings(1, 2.0), "share", "2.0"),
        (lambda: Settings(1, kind="three"), "kind", "three"),
        (lambda: Settings(1, names="abc"), "names", "abc"),
        (lambda: replace(Settings(1), size=-1), "size", "-1"),
        (lambda: scaled(torch.ones(2), -0.5), "factor", "-0.5"),
        (lambda: scaled(torch.ones(2), factor=math.nan), "factor", "nan"),
        (lambda: scaled("a/folder"), "values", "Tensor"),
        (lambda: scaled([1.0]), "values", "Tensor"),
    ],
)
def test_arguments_must_match_their_annotations(call: Callable[[], Any], argument: str, value: str) -> None:
    with pytest.raises(TuneError) as error:
        call()
    assert str(error.value).startswith(f"{argument}: ") and value in str(error.value)


def test_checked_arguments_are_passed_on() -> None:
    assert Settings(np.int64(3), np.float32(0.5), names=("a",)) == Settings(3, 0.5, "one", ("a",))
    assert scaled(torch.ones(2), 3, 4, five=5).tolist() == [3, 3]
    assert fits(Path("a"), Path) and not fits(Path("a"), str)
    assert [unchanged(value) for value in ("a/folder", 1, [2.0])] == ["a/folder", 1, [2.0]]
    assert [*inspect.signature(Settings).parameters] == ["size", "share", "kind", "names"]
    assert inspect.signature(scaled).parameters["factor"].annotation == types.PositiveFloat
    with pytest.raises(TypeError, match="Settings"):
        Settings()
