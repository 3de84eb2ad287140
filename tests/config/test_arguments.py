"""A setting has the type of the argument that a recipe passes it as."""

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


def test_each_way_to_pass_a_setting_on(types: dict[str, Any]) -> None:
    wrong = {
        "device": "gpu",  # positional
        "parallel.tp": 0,  # of a group that is spread
        "parallel.size": "many",
        "depth": 0,  # of a dict that is spread
        "options.project": 7,  # of a group with types of its own
        "options.steps": 0,
        "name": 2024,  # a method of what a function returns
        "share": 1.0,
        "size": 0,  # a method of a class; in a conditional expression
        "least": 0,
        "kind": "c",  # a function of the recipe itself
        "weight": 1.0,  # of a component, by what instantiates it
        "chunk": 0,  # that a component's argument refers to
    }
    assert {key: bool(mismatch(value, types[key])) for key, value in wrong.items()} == dict.fromkeys(wrong, True)
    assert not {"untyped", "lost", "many", "other", "never"} & types.keys()


def test_what_cannot_be_read_has_no_types(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def main(cfg:\n")
    assert config.types_of_settings(tmp_path / "mine.py", {}) == {}
    assert config.types_of_settings(tmp_path / "not_there.py", {}) == {}


# Settings that a recipe does not pass on as they are: conditions, and numbers that it computes with itself.
OWN = {
    "from_scratch", "mask_truncated", "dynamic_sampling", "updates", "kl", "value_clip", "value_weight",
    "adapter", "export.merge", "parameter_groups.lr_ratios.^value",
}  # fmt: skip


@pytest.mark.parametrize("recipe", slow_but(["full_finetune"], config.list_recipes()))
def test_the_settings_of_recipes_have_types(recipe: str) -> None:
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


def test_a_renamed_setting_keeps_its_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    cli.main(["cp", "full_finetune", "mine.py"])
    for name in ("mine.py", "mine.yaml"):
        text = Path(name).read_text()
        for key in ("max_steps", "max_seq_len", "parallel"):
            text = text.replace(f"cfg.{key}", f"cfg.my_{key}").replace(f"\n{key}:", f"\nmy_{key}:")
        Path(name).write_text(text)
    given = ["model.path=m", "dataset.path=d", "my_max_steps=soon", "my_max_seq_len=0", "my_parallel.tp=0"]
    problems = config.read("mine.yaml", given, recipe=Path("mine.py"))[1]
    assert [problem.partition(":")[0] for problem in problems] == ["my_max_seq_len", "my_max_steps", "my_parallel.tp"]
