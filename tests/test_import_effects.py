"""Importing the library changes nothing in a process."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from helpers import slow_but

import tune
from tune.errors import TuneError

QUIET = """
import logging, os, sys, threading, warnings
before = dict(os.environ), list(warnings.filters), list(sys.path)
import tune
assert (dict(os.environ), list(warnings.filters), list(sys.path)) == before
loggers = [logging.root, *map(logging.getLogger, logging.root.manager.loggerDict), logging.getLogger("torchao")]
assert not [logger for logger in loggers if logger.filters or logger.handlers]
assert "torch" not in sys.modules and "numpy" not in sys.modules
"""

TORCHAO = """
import logging
from tune.lookup import locate
locate("torchao.optim.AdamW8bit")
assert not logging.getLogger("torchao").filters and not logging.getLogger("torch.utils._pytree").filters
"""

# Packages, and modules that importing them must not load.
FORBIDDEN = {
    "tune.tokenizers": ["torch", "transformers", "datasets"],
    "tune.collators": ["tune.distributed", "torch.distributed.fsdp", "tokenizers"],
    "tune.datasets": ["tune.distributed", "torch.distributed.fsdp", "torch.distributed.checkpoint", "transformers"],
    "tune.checkpointers": ["transformers", "peft", "torchao", "datasets"],
    "tune.evaluation": ["transformers", "lm_eval", "datasets"],
}


def run(code):
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)


def test_import_changes_nothing_in_the_process():
    run(QUIET)


@pytest.mark.slow
def test_importing_torchao_prints_nothing():
    pytest.importorskip("torchao")
    done = run(TORCHAO)
    assert "Failed to load" not in done.stderr and "is an Enum subclass" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("package", slow_but(["tune.tokenizers", "tune.collators"], FORBIDDEN))
def test_components_import_only_what_they_need(package):
    done = run(f"import sys, {package}; print([name for name in {FORBIDDEN[package]} if name in sys.modules])")
    assert done.stdout.strip() == "[]"


def test_errors_are_exported_at_the_top_level():
    assert tune.TuneError is TuneError


@pytest.mark.slow
def test_wheel_is_marked_as_typed(tmp_path):
    root = Path(tune.__file__).parents[1]
    command = ["hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run([sys.executable, "-m", *command], check=True, capture_output=True, cwd=root)
    (wheel,) = tmp_path.glob("*.whl")
    assert "tune/py.typed" in zipfile.ZipFile(wheel).namelist()
