import sys
from pathlib import Path

import pytest

PARTS = '''
"""A user's components."""

from dataclasses import dataclass
from typing import Literal

from tune.types import Fraction, PositiveInt


class Steady:
    def __init__(self, parameters, lr: float = 0.1, name: str = "steady"):
        self.parameters, self.lr, self.name = parameters, lr, name


class Rising(Steady):
    def __init__(self, parameters, lr: float, growth: Fraction = 0.5, layers: list[int] | None = None):
        super().__init__(parameters, lr)
        self.growth, self.layers = growth, layers


@dataclass
class Writer:
    folder: str
    every: PositiveInt = 1
    async_: bool = False
    mode: Literal["fast", "safe"] = "fast"


def anything(**settings):
    return settings
'''

DEFAULT = """
name: ???
epochs: 1
threshold: 0.5
tags: [a, b]
note: null
part:
  _component_: parts.Steady
  lr: 0.1
  name: ${name}
writer:
  _component_: parts.Writer
  every: 10
  async: true
compute:
  chunk_tokens: 1024
  cpu_offload: false
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Prepare the current folder: `default.yaml`, and its components in `parts.py`."""
    (tmp_path / "parts.py").write_text(PARTS)
    (tmp_path / "default.yaml").write_text(DEFAULT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    return tmp_path
