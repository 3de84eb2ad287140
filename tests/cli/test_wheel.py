"""The built wheel in a fresh environment contains recipes and configs."""

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
from helpers import HANGS

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tune(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the `tune` command of a fresh environment with the wheel and this environment's dependencies."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(REPOSITORY)]
    subprocess.run(build, check=True)
    venv.create(folder / "env", with_pip=False)
    scheme = {"base": str(folder / "env"), "platbase": str(folder / "env")}
    packages = Path(sysconfig.get_path("purelib", "venv", scheme))
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    (wheel,) = folder.glob("*.whl")
    python = folder / "env" / "bin" / "python"
    subprocess.run([*pip, "--python", str(python), "install", "--no-deps", str(wheel)], check=True)
    return folder / "env" / "bin" / "tune"


def run(tune: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the installed command in `folder`, isolated from this repository."""
    return subprocess.run(
        [tune, *arguments], cwd=folder, env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, timeout=HANGS
    )


def test_installed_command_is_ours() -> None:
    """Ray has a command of the same name, and the one that is installed last remains."""
    command = Path(sys.prefix) / "bin" / "tune"
    if not command.exists():
        pytest.skip("no environment with a tune command")
    assert "tune.cli" in command.read_text()


@pytest.mark.slow
def test_wheel_lists_recipes(tune: Path, tmp_path: Path) -> None:
    assert "full_finetune.yaml" in run(tune, tmp_path, "ls").stdout


def test_wheel_copies_recipes(tune: Path, tmp_path: Path) -> None:
    assert run(tune, tmp_path, "cp", "full_finetune", "mine.py").returncode == 0
    copied, original = (tmp_path / "mine.py").read_text(), (REPOSITORY / "recipes" / "full_finetune.py").read_text()
    changed = [pair for pair in zip(copied.splitlines(), original.splitlines(), strict=True) if pair[0] != pair[1]]
    assert all("mine" in ours and "full_finetune" in theirs for ours, theirs in changed)  # its own name
    assert (tmp_path / "mine.yaml").exists()


@pytest.mark.slow
def test_wheel_reports_missing_and_unknown_settings(tune: Path, tmp_path: Path) -> None:
    result = run(tune, tmp_path, "run", "full_finetune", "optimizer.lrr=1")
    assert result.returncode == 2
    assert "model.path" in result.stderr
    assert "Did you mean 'optimizer.lr'?" in result.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_copied_recipe_runs(tune: Path, tmp_path: Path) -> None:
    run(tune, tmp_path, "cp", "full_finetune", "mine.py")
    shown = run(tune, tmp_path, "run", "mine.py", "--help").stdout
    assert shown.startswith("Supervised fine-tuning of all parameters")
    assert "global_batch_size" in shown
