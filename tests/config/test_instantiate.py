import re
import sys
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from tune.config import instantiate
from tune.config.instantiate import instantiate_weighted
from tune.errors import TuneError


def test_component_gets_positional_and_named_arguments(folder: Path) -> None:
    node = OmegaConf.create(
        {"base": 2, "part": {"_component_": "parts.Rising", "lr": "${base}", "layers": [1, 2]}}
    ).part
    part = instantiate(node, ["weights"], growth=0.25)
    assert (part.parameters, part.lr, part.growth) == (["weights"], 2, 0.25)
    assert type(part.layers) is list
    assert "_component_" in node


def test_plain_dict_is_accepted(folder: Path) -> None:
    assert instantiate({"_component_": "parts.anything", "a": {"b": 1}}) == {"a": {"b": 1}}


def test_key_that_is_a_python_keyword(folder: Path) -> None:
    assert instantiate({"_component_": "parts.Writer", "folder": "x", "async": True}).async_ is True


@pytest.mark.parametrize(
    ("node", "message"),
    [
        ({"lr": 1}, "a component needs the key _component_"),
        ({"_component_": "parts.Stedy"}, "parts has no 'Stedy'. Did you mean 'Steady'?"),
        ({"_component_": "nowhere_at_all.x"}, "there is no module 'nowhere_at_all'."),
        ({"_component_": "parts.__name__"}, "'parts.__name__' is not a function or class."),
        (
            {"_component_": "parts.Steady"},
            "invalid arguments for parts.Steady: missing a required argument: 'parameters'",
        ),
        ({"_component_": "parts.Writer", "folder": "x", "name": 1}, "got an unexpected keyword argument 'name'"),
    ],
)
def test_invalid_component_is_reported(folder: Path, node: dict[str, object], message: str) -> None:
    with pytest.raises(TuneError) as caught:
        instantiate(node)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "path",
    [
        "os.system", "builtins.print", "subprocess.check_call", "pathlib.Path.touch", "shutil.rmtree", "random.random",
        "tune.cli.chat.os.system", "tune.cli.chat.subprocess.run", "parts.os.system", "parts.system", "antigravity.x",
        "torch.os.popen", "torch.numel",
    ],
)  # fmt: skip
def test_what_is_no_component_is_not_called(path: str, folder: Path, tmp_path: Path) -> None:
    with (folder / "parts.py").open("a") as parts:
        parts.write("import os\nfrom os import system\n")
    mark = tmp_path / "mark"
    with pytest.raises(TuneError, match=re.escape(path)):
        instantiate({"_component_": path}, f"touch {mark}")
    with pytest.raises(TuneError):
        instantiate_weighted({"_component_": path})
    assert not mark.exists() and "antigravity" not in sys.modules


def test_own_components_of_all_kinds(folder: Path) -> None:
    """Functions, classes, methods and callables, which the standard library helped to make."""
    (folder / "own.py").write_text(
        "import collections, contextlib, dataclasses, enum, functools, typing\n"
        "def plain(x=1): return [x]\n"
        "half = functools.partial(plain, x=0.5)\n"
        "cached = functools.cache(plain)\n"
        "Pair = collections.namedtuple('Pair', 'x', defaults=[1])\n"
        "@dataclasses.dataclass\n"
        "class Data:\n    x: int = 1\n    @classmethod\n    def make(cls): return cls()\n"
        "    def __call__(self): return [self.x]\n"
        "instance = Data()\n"
        "@contextlib.contextmanager\n"
        "def context(): yield\n"
        "class Kind(enum.Enum):\n    A = 1\n    @staticmethod\n    def first(): return Kind.A\n"
    )
    for name in ("plain", "half", "cached", "Pair", "Data", "Data.make", "instance", "context", "Kind.first"):
        assert instantiate({"_component_": f"own.{name}"}) is not None


def test_missing_argument_names_the_key_of_the_component(folder: Path) -> None:
    cfg = OmegaConf.create({"optimizer": {"_component_": "parts.Steady"}})
    with pytest.raises(TuneError, match=r"^optimizer: invalid arguments for parts\.Steady: missing"):
        instantiate(cfg.optimizer)


def test_argument_that_the_recipe_also_passes(folder: Path) -> None:
    with pytest.raises(TuneError, match=r"^folder: the recipe passes this argument to parts\.Writer"):
        instantiate({"_component_": "parts.Writer", "folder": "x"}, folder="y")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"_component_": "torch.optim.SGD", "nesterov": True}, "Nesterov momentum requires a momentum"),
        ({"_component_": "torch.optim.LBFGS"}, "LBFGS doesn't support per-parameter options"),
    ],
)
def test_values_that_torch_rejects_are_user_errors(arguments: dict[str, object], message: str) -> None:
    groups = [{"params": [torch.zeros(1)]}, {"params": [torch.ones(1)]}]
    with pytest.raises(TuneError, match=f"{arguments['_component_']} refuses these arguments: {message}"):
        instantiate(arguments, groups)


def test_errors_inside_a_component_propagate(folder: Path) -> None:
    (folder / "failing.py").write_text(
        "def fail():\n    raise TypeError('mine')\ndef lack():\n    import nowhere_at_all\n"
    )
    with pytest.raises(TypeError, match="mine"):
        instantiate({"_component_": "failing.fail"})
    with pytest.raises(ModuleNotFoundError):
        instantiate({"_component_": "failing.lack"})


def test_errors_of_a_component_name_its_key() -> None:
    cfg = OmegaConf.create({"part": {"_component_": "tune.config.find_config", "name": "zzz"}})
    with pytest.raises(TuneError, match=r"^part: .*zzz"):
        instantiate(cfg.part)
    for key in ("value", "reference"):  # an invalid argument: the error names its own key, whatever the model is for
        cfg = OmegaConf.create({key: {"_component_": "tune.models.build", "path": "zzz"}})
        with pytest.raises(TuneError, match=f"^{key}.path: zzz does not exist"):
            instantiate(cfg[key])


def test_null_is_not_a_function():
    assert instantiate_weighted(None) == []


def test_unknown_argument_of_a_reward(folder: Path) -> None:
    with pytest.raises(
        TuneError, match=r"^reward: invalid arguments for Writer: got an unexpected keyword argument 'x'$"
    ):
        instantiate_weighted({"_component_": "parts.Writer", "folder": "y", "x": 1})
