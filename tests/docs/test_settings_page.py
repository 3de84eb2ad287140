"""docs/settings.md matches the output of docs/settings_page.py."""

import importlib.util
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def load_generator():
    spec = importlib.util.spec_from_file_location("settings_page", DOCS / "settings_page.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_settings_page_is_up_to_date():
    assert (DOCS / "settings.md").read_text(encoding="utf-8") == load_generator().page()


def test_setting_of_one_recipe_has_its_default_and_meaning():
    lines = load_generator().page().splitlines()
    (line,) = [line for line in lines if line.startswith("| `group_size` |")]
    assert [cell.strip() for cell in line.strip("|").split("|")][1::2] == ["`8`", "grpo"]
    assert sum(line.startswith("| `max_grad_norm` |") for line in lines) == 1
