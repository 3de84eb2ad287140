"""Text files are UTF-8, whatever the locale."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
from run_folders import write_run

ROOT = Path(__file__).parents[1]
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": ""}


@pytest.mark.weekly
@pytest.mark.parametrize("folder", ["tune", "recipes", "examples", "benchmarks"])
def test_every_text_file_is_opened_as_utf8(folder: str) -> None:
    """Ruff (PLW1514) only sees calls on objects that it knows to be paths."""
    calls = [
        f"{file.relative_to(ROOT)}:{call.lineno}"
        for file in sorted((ROOT / folder).rglob("*.py"))
        for call in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)
        if call.func.attr in ("read_text", "write_text")
        and not any(keyword.arg == "encoding" for keyword in call.keywords)
    ]
    assert not calls


@pytest.mark.weekly
def test_locale_without_utf8(tmp_path: Path) -> None:
    run = write_run(tmp_path, "läuft")
    with (run / "config.yaml").open("a", encoding="utf-8") as settings:
        settings.write("chat_template: räume.jinja\n")
    for arguments in (
        ["report", run], ["watch", run], ["runs", tmp_path], ["diff", run, run], ["ls"], ["cat", "grpo.yaml"],
        ["cp", "grpo", tmp_path / "mine.py"], ["run", "grpo", "--help"],
    ):  # fmt: skip
        command = [sys.executable, "-m", "tune.cli", *map(str, arguments)]
        done = subprocess.run(command, env=os.environ | ASCII, capture_output=True)
        assert done.returncode == 0, (arguments, done.stderr[-2000:])
    wrong = [sys.executable, "-m", "tune.cli", "run", "full_finetune", "model.path=m", "dataset.path=d", "output_dir=ü"]
    done = subprocess.run(wrong, env=os.environ | ASCII, capture_output=True)
    assert done.returncode == 2 and b"output_dir" in done.stderr and b"PYTHONUTF8=1" in done.stderr
    assert "räume.jinja" in (run / "report.html").read_text(encoding="utf-8")
    assert (tmp_path / "mine.yaml").read_text(encoding="utf-8").count("grpo") == 0
