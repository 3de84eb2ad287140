"""`tune validate` finds, in one pass and without weights, what a run refuses, and nothing where a run would work."""

import json
from collections.abc import Callable

import pytest
from recipes.test_wrong_inputs import CASES as INPUTS

from tune.cli import main

# What a run finds in its weights, or while it trains.
NEED_WEIGHTS = {"weights that are not finite", "learning rate that destroys the model"}
RESUME = {each.id for each in INPUTS if each.id.startswith("resume")}


@pytest.fixture
def told(capsys):
    """The findings of a level, as one text, and the exit code."""

    def told(recipe: str, settings: list[str], level: str = "error") -> str:
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main(["validate", recipe, *settings, "--json"])
        found = json.loads(capsys.readouterr().out)
        assert end.value.code == (found["error"] > 0)
        return "\n".join(f"{each['place']}: {each['message']}" for each in found["findings"] if each["level"] == level)

    return told


@pytest.mark.parametrize(("spoil", "says"), [case for case in INPUTS if case.id not in NEED_WEIGHTS | RESUME])
def test_wrong_inputs(spoil: Callable, says, inputs, contents, told):
    settings = inputs.settings(*(spoil(inputs) or []))
    before = contents(inputs.folder)
    found = told("full_finetune", settings)
    assert [part for part in says if part not in found and "problems" not in part] == []
    assert contents(inputs.folder) == before
