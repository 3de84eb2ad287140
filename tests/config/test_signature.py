from pathlib import Path
from typing import Any

import pytest

from tune.config.signature import signature_of
from tune.types import fits, mismatch


def test_only_types_that_yaml_can_express() -> None:
    kinds = kinds_of("torch.optim.AdamW")
    assert mismatch("x", kinds["lr"]) == "'x' is not a number from 0 to 100."
    assert mismatch([1], kinds["betas"]) == "in [1], 1 is not a number from 0 to below 1."
    assert fits([1, "a tensor"], kinds["betas"]) is False
    assert mismatch("x", kinds["fused"]) == "'x' is not true or false or null."


def kinds_of(path: str) -> dict[str, Any]:
    return {name: parameter.annotation for name, parameter in signature_of(path).parameters.items()}


MODULE = """
from __future__ import annotations
import torch.nn as nn
import os.path
from abc import ABC
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, Optional, Union
from collections.abc import Sequence
from tune import types
from tune.types import Fraction, PositiveInt as Count

Mode = Literal["a", "b"]
Either = Union[int, str]

class Odd: ...
class Bare(ABC): ...
class Head(nn.Linear): ...

@dataclass
class Base:
    size: int
    table: ClassVar[dict] = {}

@dataclass
class Child(Base):
    names: list[str] = field(default_factory=list)
    cache: int = field(init=False, default=0)
    weight: float = field(repr=False, kw_only=True)

class Made:
    def __new__(cls, x: int): return super().__new__(cls)

def build(a, b: int, /, c: Count, d: types.Fraction, e: Mode, f: Either, g: Optional[Sequence[int]] = None,
          *args: int, h: Odd | None = None, i: Odd | str = "", j: tuple[int, ...] = (), k: Annotated[int, "x"] = 1,
          l: "a description" = 1, m: dict[str, float] = {}, n: os.PathLike | str = "", class_: bool = True, **rest): ...

one, other = build, Made
again = build
"""


@pytest.fixture
def shapes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "shapes.py").write_text(MODULE)
    (folder / "reexport").mkdir()
    (folder / "reexport" / "__init__.py").write_text("from .inner import *\nfrom . import inner as alias\n")
    (folder / "reexport" / "inner.py").write_text("from shapes import build as made, Made\nfrom .load import load\n")
    (folder / "reexport" / "load.py").write_text("def load(path: str): ...\n")


@pytest.mark.usefixtures("shapes")
def test_every_kind_of_annotation() -> None:
    assert signature_of("shapes.build").accepts_any
    kinds = kinds_of("shapes.build")
    right_and_wrong: dict[str, tuple[list[object], list[object]]] = {
        "c": ([1], [0, None]),
        "d": ([0.5], [1]),
        "e": (["a"], ["c"]),
        "f": ([1, "x"], [1.5]),
        "g": ([[1], None], ["x", ["x"]]),
        "h": ([None, 1, "x"], []),
        "i": (["x"], [1]),
        "j": ([[], [1, 2]], [1, ["x"]]),
        "k": ([1], ["x"]),
        "l": ([None, 1, "x"], []),
        "m": ([{"a": 1.5}], [{"a": "x"}, 1]),
        "n": (["x"], [1]),
        "class": ([True], [1]),
    }
    assert kinds.keys() == right_and_wrong.keys()
    for name, (right, wrong) in right_and_wrong.items():
        assert all(fits(value, kinds[name]) for value in right), name
        assert not any(fits(value, kinds[name]) for value in wrong), name


@pytest.mark.usefixtures("shapes")
@pytest.mark.parametrize(
    ("path", "required"),
    [
        ("shapes.Child", {"size": True, "names": False, "weight": True}),
        ("shapes.Made", {"x": True}),
        ("shapes.Bare", {}),
        ("shapes.Head", {"in_features": True, "out_features": True, "bias": False, "device": False, "dtype": False}),
        ("shapes.again", None),
        ("reexport.made", None),
        ("reexport.inner.made", None),
        ("reexport.alias.Made", {"x": True}),
        ("reexport.load", {"path": True}),
        ("reexport.inner.load", {"path": True}),
    ],
)
def test_component_is_found_where_it_is_defined(path: str, required: dict[str, bool] | None) -> None:
    parameters = signature_of(path).parameters
    if required is None:
        assert parameters.keys() == signature_of("shapes.build").parameters.keys()
    else:
        assert {name: parameter.default is parameter.empty for name, parameter in parameters.items()} == required


def test_components_created_at_import(folder: Path) -> None:
    (folder / "dynamic.py").write_text(
        "from functools import partial\n"
        "def power(base: float, exponent: int): ...\n"
        "square, cube = partial(power, exponent=2), partial(power, exponent=3)\n"
        "class Maker:\n"
        "    @classmethod\n"
        "    def make(cls, size: 'int'): ...\n"
        "def __getattr__(name):\n"
        "    if name == 'lazy': return power\n"
        "    raise AttributeError(name)\n"
    )
    assert signature_of("dynamic.square").parameters.keys() == {"base", "exponent"}
    assert kinds_of("dynamic.Maker.make") == {"size": int}
    assert kinds_of("dynamic.lazy")["base"] is float
    assert "dynamic has no 'lasy'" in signature_of("dynamic.lasy").problem
    assert signature_of("torch.numel").accepts_any  # written in C, without a signature
    assert all("standard library" in signature_of(path).problem for path in ("math.sqrt", "builtins.dict"))


def test_errors_in_a_user_module(folder: Path) -> None:
    (folder / "broken.py").write_text("def fine(): ...\ndef broken(:\n")
    assert "broken.py:2: invalid syntax" in signature_of("broken.fine").problem
    (folder / "needy.py").write_text("import nowhere_at_all\nfrom nowhere_at_all import thing\n")
    assert "needy.thing: there is no module 'nowhere_at_all'" in signature_of("needy.thing").problem


def test_annotation_only_for_type_checkers(folder: Path) -> None:
    (folder / "checked.py").write_text("def build(a: 'NotImported', b: int = 1): ...\n")
    kinds = kinds_of("checked.build")
    assert fits("x", kinds["a"]) and not fits("x", kinds["b"])
