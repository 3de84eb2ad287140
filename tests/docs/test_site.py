"""The site of `make docs` builds without warnings and reports broken links."""

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import HANGS

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def hooks():
    """Return docs/site_hooks.py as a module."""
    spec = importlib.util.spec_from_file_location("site_hooks", ROOT / "docs" / "site_hooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_public_names_and_modules_have_docstrings(hooks):
    assert list(hooks.undocumented()) == []


def test_missing_docstrings_are_detected(hooks, tmp_path):
    def source(kind: str) -> str:
        return f"class {kind}Known:\n    '.'\n\nclass {kind}Bare: ...\n\ndef {kind.lower()}_bare(): ...\n\n"

    here = tmp_path.name
    (tmp_path / "thing.py").write_text(source("There") + "LIMIT = 1\nKNOWN = 2\n'.'\n")
    names = f"from pathlib import Path\nfrom {here}.thing import KNOWN, LIMIT, ThereBare, ThereKnown, there_bare\n"
    (tmp_path / "__init__.py").write_text(f"'A package.'\n{names}{source('Here')}def _private(): ...\n")
    undocumented = {"thing", "HereBare", "here_bare", "ThereBare", "there_bare", "LIMIT"}
    assert set(hooks.undocumented(tmp_path)) == {f"{here}.{name}" for name in undocumented}


def build(out: Path, config: Path) -> subprocess.CompletedProcess[str]:
    """Build the site like `make docs`. (With --quiet, mkdocs would not count warnings, and --strict would pass.)"""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out), "-f", str(config)]
    return subprocess.run(command, capture_output=True, text=True, timeout=HANGS)


@pytest.mark.slow
def test_site_builds_without_warnings(tmp_path):
    pytest.importorskip("mkdocs", reason="the site is built by `make docs`, which installs mkdocs")
    built = build(tmp_path / "site", ROOT / "mkdocs.yml")
    assert built.returncode == 0, built.stderr
    readme = (tmp_path / "site" / "repository" / "index.html").read_text()
    assert 'href="../families/"' in readme  # a repository link becomes a site link
    assert "supervised tokens" in (tmp_path / "site" / "reference" / "tune.losses" / "index.html").read_text()


@pytest.mark.slow
def test_broken_links_are_errors(tmp_path):
    pytest.importorskip("mkdocs", reason="the site is built by `make docs`, which installs mkdocs")
    for entry in ROOT.iterdir():
        (tmp_path / entry.name).symlink_to(entry)
    (tmp_path / "docs").unlink()
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    index = tmp_path / "docs" / "index.md"
    links = ["missing.md", "data.md#missing", "../tune/missing.py"]
    index.write_text(index.read_text() + "".join(f"\n[broken]({link})\n" for link in links))
    built = build(tmp_path / "site", tmp_path / "mkdocs.yml")
    assert built.returncode == 1
    assert [link for link in links if f"'{link}'" in built.stderr] == links


def test_changelog_follows_keep_a_changelog():
    first, *released = re.findall(r"^## (.+)", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert first == "[Unreleased]"
    assert all(re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d", version) for version in released)
    kinds = set(re.findall(r"^### (.+)", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE))
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
