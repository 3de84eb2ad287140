"""A setting takes its type from the argument that the recipe passes it as."""

import sys
from pathlib import Path
from typing import Any

import pytest
from helpers import slow_but

from tune import cli, config
from tune.config.check import walk
from tune.config.instantiate import COMPONENT
from tune.types import fits, mismatch

LIBRARY = """
from typing import Any, Literal, TypedDict
from tune.types import Fraction, PositiveInt


class Options(TypedDict):
    project: str | None
    steps: PositiveInt


class World:
    @classmethod
    def of(cls, size: PositiveInt): ...

    def share(self, name: str, by: Fraction = 0.5): ...


def init(device: Literal["cpu", "cuda"], tp: PositiveInt = 1, size: int | None = None, **others: Any) -> World: ...


def build(options: Options | None = None, depth: PositiveInt = 1): ...


class Loss:
    def __init__(self, weight: Fraction = 0.5, chunk: PositiveInt | None = None): ...
"""
SCRIPT = """
import library
import library as lib
from library import World, build
from tune import config
from tune.config import instantiate


def clip(loss, low: "float", kind: lib.Literal["a", "b"] = "a"):
    return loss


@config.entrypoint("mine")
def main(settings):
    world = library.init(settings.device, **settings.parallel)
    how = {"depth": settings.depth, "options": settings.options, "loss": settings.never}
    build(**how)
    world.share(settings.name, settings.share)
    World.of(settings.size if settings.share else settings.least)
    loss = instantiate(settings.loss, weight=settings.weight)
    clip(loss, settings.low, kind=settings.kind)
    clip(settings.low + 1, cfg.other)
    print(*settings.many, settings.untyped, missing.thing(settings.lost))
"""
SETTINGS = """
device: cpu
parallel: {tp: 1, size: null}
depth: 1
options: {project: null, steps: 3}
name: run
share: 0.5
size: 1
least: 1
kind: a
low: 0.1
weight: 0.5
chunk: null
untyped: 1
lost: 1
loss:
  _component_: library.Loss
  chunk: ${chunk}
"""


@pytest.fixture
def types(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "library.py").write_text(LIBRARY)
    (tmp_path / "mine.py").write_text(SCRIPT)
    (tmp_path / "mine.yaml").write_text(SETTINGS)
    return config.types_of_settings(tmp_path / "mine.py", config.read_file(tmp_path / "mine.yaml"))


def test_settings_passed_in_every_way_are_checked(types: dict[str, Any]) -> None:
    wrong = {
        "device": "gpu",  # positional
        "parallel.tp": 0,  # from a group expanded with **
        "parallel.size": "many",
        "depth": 0,  # from a dict expanded with **
        "options.project": 7,  # from a group with its own types
        "options.steps": 0,
        "name": 2024,  # a method of a function's return value
        "share": 1.0,
        "size": 0,  # a method of a class; in a conditional expression
        "least": 0,
        "kind": "c",  # a function of the recipe itself
        "weight": 1.0,  # an argument of a component, through instantiate
        "chunk": 0,  # referenced by a component's argument
    }
    assert {key: bool(mismatch(value, types[key])) for key, value in wrong.items()} == dict.fromkeys(wrong, True)
    assert not {"untyped", "lost", "many", "other", "never"} & types.keys()


def test_unreadable_recipe_has_no_types(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def main(cfg:\n")
    assert config.types_of_settings(tmp_path / "mine.py", {}) == {}
    assert config.types_of_settings(tmp_path / "not_there.py", {}) == {}


# Settings that a recipe does not pass on unchanged: conditions, and numbers that it computes with.
OWN = {
    "from_scratch", "mask_truncated", "dynamic_sampling", "updates", "kl", "value_clip", "value_weight",
    "adapter", "export.merge", "parameter_groups.lr_ratios.^value",
}  # fmt: skip


@pytest.mark.parametrize("recipe", slow_but(["full_finetune"], config.list_recipes_with_settings()))
def test_settings_of_recipes_have_types(recipe: str) -> None:
    values = config.read_file(config.find_config(recipe))
    types = config.types_of_settings(config.find_recipe(recipe), values)
    settings = dict(walk(values))
    groups = [key for key, value in settings.items() if isinstance(value, dict)]
    plain = {
        key for key in settings
        if key not in groups and COMPONENT not in (settings.get(key.rpartition(".")[0]) or {})
        and not key.endswith(COMPONENT)
    }  # fmt: skip
    assert plain - types.keys() <= OWN
    assert all(fits(settings[key], types[key]) for key in plain & types.keys() if settings[key] not in (None, "???"))


def test_renamed_setting_keeps_its_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    cli.main(["cp", "full_finetune", "mine.py"])
    for name in ("mine.py", "mine.yaml"):
        text = Path(name).read_text()
        for key in ("max_steps", "max_seq_len", "parallel"):
            text = text.replace(f"cfg.{key}", f"cfg.my_{key}").replace(f"\n{key}:", f"\nmy_{key}:")
        Path(name).write_text(text)
    arguments = ["model.path=m", "dataset.path=d", "my_max_steps=soon", "my_max_seq_len=0", "my_parallel.tp=0"]
    problems = config.read("mine.yaml", arguments, recipe=Path("mine.py"))[1]
    assert [problem.partition(":")[0] for problem in problems] == ["my_max_seq_len", "my_max_steps", "my_parallel.tp"]


PARTS = """
import sys
from typing import Annotated, Literal, Optional, TypedDict, TypeVar
from tune.types import PositiveInt

T = TypeVar("T")
calls = []


class Options(TypedDict):
    thing: "Missing"


class One:
    @staticmethod
    def fixed(size: PositiveInt, name: str = ""): ...

    def take(self, size: PositiveInt): ...

    class Inner:
        def __init__(self, size: PositiveInt, name: str): ...


class Two:
    def take(self, size: str): ...


class Other:
    def __init__(self, weight: str, chunk: str = ""): ...


class Loss:
    def __init__(self, weight: PositiveInt, chunk: PositiveInt = 1): ...


def positive(size: PositiveInt): ...
def named(model, *, size: PositiveInt): ...
def only(size: str, /, other: PositiveInt = 1): ...
def many(first, *rest, size: PositiveInt = 1): ...
def usual(size: int = None): ...
def generic(size: T | int): ...
def odd(size: Annotated[int, {}]): ...
def group(options: Options): ...
def describe(component, weight: PositiveInt = 1): ...
def __getattr__(name):
    calls.append(name)
    raise RuntimeError(name)
"""
HEAD = "from tune import config\nfrom tune.config import instantiate\nimport parts\nfrom parts import *\n"


def problems_of(tmp_path: Path, script: str, arguments: list[str], settings: str = "size: 1\nother: 1\n") -> list[str]:
    """Return the problems of a run whose `main(cfg)` ends with `script`; any preamble before it ends with ---."""
    before, _, body = script.rpartition("---\n")
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    (tmp_path / "own.py").write_text(f'{HEAD}{before}\n\n@config.entrypoint("own")\ndef main(cfg):\n{lines}')
    (tmp_path / "own.yaml").write_text(settings)
    return config.read(str(tmp_path / "own.yaml"), arguments, recipe=tmp_path / "own.py")[1]


@pytest.fixture
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "parts", raising=False)
    (tmp_path / "parts.py").write_text(PARTS)
    return tmp_path


@pytest.mark.parametrize(
    "script",
    [
        "def f(name: str, /, size: int = 1): ...\n---\nf(cfg.size)",
        "def f(first, *rest, size: int = 1): ...\n---\nf(1, cfg.size)",
        "parts.only(cfg.size)",
        "parts.many(1, cfg.size)",
        "def f(size: None | Size): ...\nSize = str\n---\nf(cfg.size)",
        "Size = str\ndef f(size: Size | int): ...\n---\nf(cfg.size)",
        "import torch\ndef f(size: torch.Tensor | None): ...\n---\nf(cfg.size)",
        "def f(size: 'Missing | int'): ...\n---\nf(cfg.size)",
        "def f(size: [int]): ...\n---\nf(cfg.size)",
        "parts.generic(cfg.size)",
        "parts.odd(size=cfg.lost)",
        "def twice(function): return lambda *a: function(1, *a)\n@twice\ndef f(a: int, b: str): ...\n---\nf(cfg.size)",
        "class A:\n    def positive(self, size: int): ...\ndef g(size): ...\n---\ng(cfg.size)",
        "from parts import describe as g\nclass A:\n    def g(self, other: int, size: int = 1): ...\n---\ng(cfg.size)",
        "def positive(size: str): ...\n---\npositive(cfg.size)",
        "positive = lambda size: size\npositive(cfg.size)",
        "one = parts.One()\none.fixed('', cfg.size)",
        "one = parts.One()\none.Inner(1, cfg.size)",
        "thing = parts.One()\nthing = parts.Two()\nthing.take(cfg.size)",
        "def g():\n    thing = parts.One()\n---\nthing = parts.Two()\nthing.take(cfg.size)",
        "def g(cfg):\n    parts.positive(cfg.size)\n---\ng(cfg.model)",
        "each = [parts.positive(cfg.size) for cfg in cfg.models]",
        "cfg = cfg.model\npositive(cfg.size)",
        "cfg.size = len(cfg.size)\npositive(cfg.size)",
        "cfg['size'] = len(cfg.size)\npositive(cfg.size)",
        "positive(1 if cfg.size == 'text' else cfg.size)",
        "if cfg.size != 'text':\n    parts.positive(cfg.size)",
        "cfg.size != 'text' and parts.positive(cfg.size)",
        "match cfg.size:\n    case 'text': pass\n    case _: parts.positive(cfg.size)",
        "if cfg.other:\n    parts.positive(cfg.size)\nelse:\n    parts.only(cfg.size)",
        "parts.lazy.function(cfg.size)",
        "import broken\nbroken.function(cfg.size)",
        "from .parts import positive\npositive(cfg.size)",
        "parts.group(**cfg.lost)\nparts.group(cfg.lost)",
    ],
)  # fmt: skip
def test_valid_values_are_accepted(parts: Path, script: str) -> None:
    (parts / "broken.py").write_text("import sys\nsys.exit(3)")
    assert problems_of(parts, script, ["size=text"], "size: null\nother: 1\nlost: null\nmodel: {size: 1}\n") == []


@pytest.mark.parametrize(
    "script",
    [
        "positive(cfg['size'])",
        "positive(cfg.size)",
        "size = cfg.size\npositive(size)",
        "cfg = cfg.copy()\npositive(cfg.size)",
        "def train(settings):\n    positive(settings.size)\n---\ntrain(cfg)",
        "def f(size: 'int'): ...\n---\nf(cfg.size)",
        "def f(size: int = None): ...\n---\nf(cfg.size)",
        "one = parts.One()\none.fixed(cfg.size)",
        "parts.named(1, size=cfg.size)",
        "if cfg.other:\n    positive(cfg.size)",
    ],
)
def test_invalid_values_are_rejected(parts: Path, script: str) -> None:
    problems = problems_of(parts, script, ["size=text"], "size: null\nother: 1\n")
    assert [problem.partition(":")[0] for problem in problems] == ["size"]


def test_setting_may_be_off(parts: Path) -> None:
    script = "if cfg.size:\n    positive(cfg.size)"
    assert problems_of(parts, script, [], "size: false\n") == []
    assert problems_of(parts, script, ["size=3"], "size: false\n") == []
    assert problems_of(parts, script, ["size=-3"], "size: false\n")
    assert problems_of(parts, "positive(cfg.size)", [], "size: false\n")
    assert problems_of(parts, "parts.usual(cfg.size)", ["size=null"]) == []


def test_types_come_from_the_components_of_the_run(parts: Path) -> None:
    settings = "weight: 1\nchunk: 1\nloss: {_component_: parts.Loss, chunk: '${chunk}'}\n"
    script = "loss = instantiate(cfg.loss, weight=cfg.weight)"
    assert len(problems_of(parts, script, ["weight=text", "chunk=text"], settings)) == 2
    arguments = ["loss._component_=parts.Other", "weight=text", "chunk=text"]
    assert problems_of(parts, script, arguments, settings.replace(": 1", ": null")) == []
    assert problems_of(parts, "parts.describe(cfg.loss, cfg.weight)", ["weight=0"], settings)


def test_modules_without_settings_are_not_imported(parts: Path) -> None:
    (parts / "noisy.py").write_text("raise SystemExit('imported')")
    (parts / "own_parts.py").write_text("open('imported', 'a').write('x'); 1 / 0")
    script = "import noisy, own_parts\nnoisy.run(cfg.other + 1)\nown_parts.run(1)"
    assert problems_of(parts, script, []) == []
    assert "noisy" not in sys.modules and not Path("imported").exists()
