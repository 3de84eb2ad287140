"""The lock file has the versions that tests run with."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PIN = re.compile(r"^([\w.-]+)==([\w.!+]+)", flags=re.MULTILINE)


def pins(file):
    text = (ROOT / file).read_text(encoding="utf-8")
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in PIN.findall(text)}


def test_lock_file_matches_the_constraints():
    tested, locked = pins("constraints.txt"), pins("requirements.lock")
    assert len(tested) > 100
    assert {name: locked.get(name) for name in tested} == tested
