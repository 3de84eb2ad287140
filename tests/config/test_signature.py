import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest

from tune.config.signature import Signature, signature_of
from tune.errors import TuneError
from tune.types import Fraction, PositiveInt


def test_types_are_those_that_yaml_can_express() -> None:
    parameters = signature_of("torch.optim.AdamW").parameters
    assert parameters["lr"].kind is float
    assert parameters["betas"].kind == tuple[float, float]
    assert parameters["fused"].kind == bool | None


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
    for name in ("shapes", "reexport", "reexport.inner", "reexport.load"):
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.mark.usefixtures("shapes")
def test_every_kind_of_annotation() -> None:
    signature = signature_of("shapes.build")
    assert signature.accepts_any
    assert {name: parameter.kind for name, parameter in signature.parameters.items()} == {
        "c": PositiveInt,
        "d": Fraction,
        "e": Literal["a", "b"],
        "f": int | str,
        "g": list[int] | None,
        "h": Any,
        "i": str,
        "j": tuple[int, ...],
        "k": Annotated[int, "x"],
        "l": Any,
        "m": dict[str, float],
        "n": str,
        "class": bool,
    }


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
def test_a_component_is_found_where_it_is_defined(path: str, required: dict[str, bool] | None) -> None:
    parameters = signature_of(path).parameters
    if required is None:
        assert parameters.keys() == signature_of("shapes.build").parameters.keys()
    else:
        assert {name: parameter.required for name, parameter in parameters.items()} == required


def test_components_that_are_made_when_their_module_is_imported(folder: Path) -> None:
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
    assert signature_of("dynamic.Maker.make").parameters["size"].kind is int
    assert signature_of("dynamic.lazy").parameters["base"].kind is float
    with pytest.raises(TuneError, match="dynamic has no 'lasy'"):
        signature_of("dynamic.lasy")
    assert signature_of("math.sqrt") == Signature()
    assert signature_of("builtins.dict").accepts_any


def test_mistakes_in_a_users_module(folder: Path) -> None:
    (folder / "broken.py").write_text("def fine(): ...\ndef broken(:\n")
    with pytest.raises(TuneError, match=r"broken\.py:2: invalid syntax"):
        signature_of("broken.fine")
    (folder / "needy.py").write_text("import nowhere_at_all\nfrom nowhere_at_all import thing\n")
    with pytest.raises(TuneError, match=r"needy\.thing: there is no module 'nowhere_at_all'"):
        signature_of("needy.thing")


def test_an_annotation_that_only_a_type_checker_can_read(folder: Path) -> None:
    (folder / "checked.py").write_text("def build(a: 'NotImported', b: int = 1): ...\n")
    kinds = {name: parameter.kind for name, parameter in signature_of("checked.build").parameters.items()}
    assert kinds == {"a": Any, "b": int}
