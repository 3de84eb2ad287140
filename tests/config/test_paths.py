from pathlib import Path

import pytest

import tune
from tune.config import find_config, find_recipe, list_configs, list_recipes
from tune.errors import TuneError


def test_packaged_recipes_and_configs() -> None:
    assert "full_finetune" in list_configs()
    assert find_config("full_finetune") == find_config("full_finetune.yaml")
    assert find_config("full_finetune").read_text().startswith("# Defaults of recipes/full_finetune.py")


def test_recipes_are_inside_the_package_in_a_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for file in ("_recipes/mine.py", "_recipes/_shared.py", "_configs/mine.yaml", "_configs/preset.yaml"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).touch()
    monkeypatch.setattr(tune, "__file__", str(tmp_path / "__init__.py"))
    assert (list_recipes(), list_configs()) == (["mine"], ["mine", "preset"])
    assert find_recipe("mine") == tmp_path / "_recipes" / "mine.py"
    with pytest.raises(TuneError, match=r"there is no recipe 'mien'.*one of: mine\. Did you mean 'mine'\?"):
        find_recipe("mien")


def test_user_file_takes_precedence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full_finetune.yaml").touch()
    assert find_config("full_finetune.yaml") == Path("full_finetune.yaml")
    assert find_config(str(tmp_path / "full_finetune.yaml")) == tmp_path / "full_finetune.yaml"
