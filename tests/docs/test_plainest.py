"""docs/plainest.md shows recipes/plain.py as it is."""

from docs_reader import ROOT


def test_page_shows_the_recipe() -> None:
    page = (ROOT / "docs" / "plainest.md").read_text(encoding="utf-8")
    recipe = (ROOT / "recipes" / "plain.py").read_text(encoding="utf-8")
    assert f"```python\n{recipe}```\n" in page
