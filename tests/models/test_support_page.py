"""The table of docs/support.md matches the code."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.weekly
def test_table_matches_the_code():
    """It runs in a separate process, because it needs its own process group."""
    pytest.importorskip("transformers")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    script = [sys.executable, str(ROOT / "tests/models/support.py")]
    table = subprocess.run(script, env=environment, check=True, capture_output=True, text=True).stdout.splitlines()
    page = (ROOT / "docs/support.md").read_text(encoding="utf-8")
    assert len(table) > 30 and table == [line for line in page.splitlines() if line.startswith("|")][: len(table)]
