"""examples/notebook.ipynb runs with a tiny model in place of its download."""

import os
import re
import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "examples" / "notebook.ipynb"


def test_notebook_has_no_outputs() -> None:
    nbformat = pytest.importorskip("nbformat")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    assert all(not cell.outputs and cell.execution_count is None for cell in notebook.cells if cell.cell_type == "code")


@pytest.mark.weekly
def test_notebook_runs(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    (tmp_path / ".demo").mkdir()
    (tmp_path / ".demo" / "smollm2-135m").symlink_to(checkpoint)
    monkeypatch.setenv("PATH", os.path.dirname(sys.executable), prepend=os.pathsep)
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    (settings,) = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ())]
    settings.source = re.sub(r"^(\w+) = \d+", r"\1 = 2", settings.source, flags=re.MULTILINE)
    nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": tmp_path / "examples"}}).execute()
    outputs = {cell.id: cell.outputs for cell in notebook.cells if cell.cell_type == "code"}
    assert len((tmp_path / ".demo" / "notebook" / "metrics.jsonl").read_text().splitlines()) == 2
    assert "0 of 2" in outputs["picture"][-1].data["image/svg+xml"]
    assert outputs["ask"]
