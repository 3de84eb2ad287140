"""The lock file has the versions that tests run with, and pip finds the extras of the installed package."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PIN = re.compile(r"^([\w.-]+)==([\w.!+]+)", flags=re.MULTILINE)


def pins(file):
    text = (ROOT / file).read_text(encoding="utf-8")
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in PIN.findall(text)}


def test_lock_file_matches_the_constraints():
    tested, locked = pins("constraints.txt"), pins("requirements.lock")
    assert len(tested) > 100
    assert {name: locked.get(name) for name in tested} == tested


@pytest.mark.slow
def test_extra_is_installed_by_the_name_of_the_installed_package() -> None:
    pytest.importorskip("pip")
    options = ["--no-index", "--no-deps", "--dry-run", "--quiet", "--disable-pip-version-check"]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, "tune-recipes[trackio]"], check=True)
