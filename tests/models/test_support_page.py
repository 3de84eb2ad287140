"""docs/support.md has the table that the code gives."""

from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "support.md"


@pytest.mark.slow
def test_the_table_is_what_the_code_supports():
    pytest.importorskip("transformers")
    from models.support import table

    assert table() == [line for line in PAGE.read_text().splitlines() if line.startswith("|")]
