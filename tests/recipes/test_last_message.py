"""The last message of a run names what it wrote."""

import re

import full_finetune
import lora_finetune
import pytest


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "settings", "written"),
    [
        (full_finetune, [], ["model"]),
        (lora_finetune, ["adapter.rank=1"], ["adapter"]),
        (lora_finetune, ["adapter.rank=1", "export.merge=true"], ["adapter", "model"]),
    ],
)
def test_last_message_names_the_folders(recipe, settings, written, inputs, run_recipe):
    run = inputs.folder / "new"
    assert run_recipe(inputs.settings("max_steps=1", *settings, f"output_dir={run}"), recipe) == 0
    *_, last = (run / "log.txt").read_text().splitlines()
    assert last.startswith("done: ") and re.findall(r"the (\w+) is in (\S+?)(?:,|$)", last) == [
        (name, str(run / name)) for name in written
    ]
    for name in written:
        card = (run / name / "README.md").read_text()
        assert f"`{inputs.rows.name}`" in card and f"`{recipe.__name__}`" in card


def test_unfinished_run_has_no_last_message(inputs, run_recipe):
    inputs.make_overflow()
    run = inputs.folder / "new"
    assert run_recipe(inputs.settings(f"output_dir={run}")) == 2
    assert "done: " not in (run / "log.txt").read_text()
