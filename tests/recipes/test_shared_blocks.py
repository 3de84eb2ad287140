"""Recipes repeat the training loop so that each can be read alone; this test keeps the copies equal.

The diff of two recipes is the method, and docs/ shows it as the explanation. A change in only one recipe changes the
diff. Make the change in both recipes, or, if it belongs to the method, update the diff on the page.
"""

import difflib
from pathlib import Path

import pytest

from tune import config

DOCS = Path(__file__).parents[2] / "docs"


def difference(one: str, other: str) -> str:
    """Return the diff of two recipes, without lines that only name the recipe."""
    texts = [config.find_recipe(name).read_text().split('"""', 2)[2].replace(name, "NAME") for name in (one, other)]
    lines = difflib.unified_diff(*(text.splitlines() for text in texts), n=1, lineterm="")
    return "\n".join("@@" if line.startswith("@@") else line for line in lines if line[:3] not in ("---", "+++"))


@pytest.mark.parametrize(("page", "recipe"), [("lora.md", "lora_finetune"), ("layouts.md", "pipeline_finetune")])
def test_recipe_differs_from_full_finetune_as_documented(page, recipe):
    shown = (DOCS / page).read_text().split("```diff\n")[1].split("\n```")[0]
    assert shown == difference("full_finetune", recipe)
