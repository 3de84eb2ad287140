"""`tune validate` finds, in one pass and without weights, what a run refuses, and nothing where a run would work."""

from collections.abc import Callable

import pytest
from recipes.test_wrong_inputs import CASES as INPUTS

from tune import config
from tune.preflight.validate import validate
from tune.rules import Level

# What a run finds in its weights, or while it trains.
NEED_WEIGHTS = {"weights that are not finite", "learning rate that destroys the model"}


def errors(recipe: str, settings: list[str], **options) -> list[str]:
    """The errors that are found, as they are printed."""
    found = validate(*config.read(recipe, settings), **options)
    return [str(finding) for finding in found if finding.level is Level.ERROR]


@pytest.mark.parametrize(("spoil", "says"), [case for case in INPUTS if case.id not in NEED_WEIGHTS])
def test_wrong_inputs(spoil: Callable, says, inputs):
    found = errors("full_finetune", inputs.settings(*(spoil(inputs) or [])))
    assert found
    print(found)
