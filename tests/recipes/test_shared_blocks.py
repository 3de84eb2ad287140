"""Recipes repeat the loop so that each can be read alone; this keeps the copies equal.

The difference of two recipes is the method, and stands in docs/ as its explanation. A change made in one recipe and not
in the other makes another difference: make it in both, or, if it belongs to the method, put the new one into the page.
"""

import difflib
from pathlib import Path

import pytest

from tune import config

DOCS = Path(__file__).parents[2] / "docs"


def difference(one: str, other: str) -> str:
    """Without the lines that only name the recipe."""
    texts = [config.find_recipe(name).read_text().split('"""', 2)[2].replace(name, "NAME") for name in (one, other)]
    lines = difflib.unified_diff(*(text.splitlines() for text in texts), n=1, lineterm="")
    return "\n".join("@@" if line.startswith("@@") else line for line in lines if line[:3] not in ("---", "+++"))


@pytest.mark.parametrize(("page", "recipe"), [("lora.md", "lora_finetune"), ("layouts.md", "pipeline_finetune")])
def test_it_is_full_finetuning_but_for_the_lines_in_the_docs(page, recipe):
    shown = (DOCS / page).read_text().split("```diff\n")[1].split("\n```")[0]
    assert shown == difference("full_finetune", recipe)
