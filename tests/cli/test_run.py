import subprocess
import sys
from pathlib import Path

import pytest
from copied_recipe import exit_status
from helpers import HANGS
from torch.distributed import run as torchrun
from torch.distributed.launcher.api import LaunchConfig

from tune.cli.recipes import check, with_folder
from tune.launchers.torchrun import launch

RECIPE = '''\
"""A recipe of one's own."""

import os
import sys
import time

from tune import config
from tune.config import instantiate


@config.entrypoint("defaults.yaml")
def main(cfg):
    if cfg.fail_on is not None:
        if cfg.fail_on == os.environ["RANK"]:
            sys.exit(7)
        time.sleep(3600)  # waits for its peer, as ranks do: torchrun ends it
    print(f"{instantiate(cfg.greeting)} {os.environ.get('WORLD_SIZE')} {__name__}", flush=True)


if __name__ == "__main__":
    main()
'''
DEFAULTS = """\
fail_on: null
greeting:
  _component_: greetings.hello
  name: ???
"""
COMPONENT = """\
def hello(name: str) -> str:
    return f"hello {name}"
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """Create a copied recipe with its defaults and a component next to it."""
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "defaults.yaml").write_text(DEFAULTS)
    (folder / "greetings.py").write_text(COMPONENT)
    (folder / "recipe.py").write_text(RECIPE)
    return folder / "recipe.py"


def run(
    *arguments: str | Path, module: tuple[str, ...] = ("-m", "tune.cli", "run")
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *module, *map(str, arguments)], capture_output=True, text=True, timeout=HANGS
    )


@pytest.mark.slow
def test_recipe_runs_as_with_python(recipe: Path) -> None:
    ours = run(recipe, "greeting.name=a=b")
    theirs = run(recipe, "greeting.name=a=b", module=())
    assert ours.stdout == theirs.stdout == "hello a=b None __main__\n", ours.stderr
    assert ours.returncode == theirs.returncode == 0


@pytest.mark.slow
def test_setting_that_the_recipe_reads_and_its_yaml_lacks(recipe: Path) -> None:
    (recipe.parent / "defaults.yaml").write_text(DEFAULTS.replace("fail_on", "fial_on"))
    result = run(recipe, "greeting.name=x")
    line = RECIPE[: RECIPE.index("cfg.fail_on is")].count("\n") + 1
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert result.stderr.startswith(f"error: fail_on: recipe.py:{line} ") and "'fial_on'" in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--nproc-per-node", "2")])
def test_unknown_keys_are_reported_before_imports(recipe: Path, options: tuple[str, ...]) -> None:
    (recipe.parent / "greetings.py").write_text("import sys\nprint('imported', file=sys.stderr)\n" + COMPONENT)
    result = run(*options, recipe, "greeting.name=x", "greting=1", "greeting.nam=x")
    assert result.returncode == 2
    assert result.stderr == (
        "error: in the configuration:\n"
        "  greting: is not a setting. Did you mean 'greeting'?\n"
        "imported\n"
        "  greeting.nam: is not a setting. Did you mean 'greeting.name'?\n"
    )


@pytest.mark.slow
def test_unknown_component_arguments_are_reported_once(recipe: Path) -> None:
    result = run("--nproc-per-node", "2", recipe, "greeting.name=x", "greeting.nam=x")
    assert result.returncode == 2
    assert result.stderr.startswith("error: ")
    assert "Did you mean 'greeting.name'?" in result.stderr
    assert result.stderr.count("greeting.nam:") == 1  # not once per process


@pytest.mark.parametrize("verb", ["run", "validate", "run --nproc-per-node 2"])
def test_file_of_settings_is_no_recipe(verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (file := tmp_path / "mine.yaml").write_text("max_steps: 1\n")
    assert exit_status(*verb.split(), str(file)) == (1 if verb == "validate" else 2)
    assert f"--config {file}" in "".join(capsys.readouterr())


def test_unknown_option_of_a_verb_gets_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_status("generate", "model", "--max-new-token", "8") == 2
    assert "'--max-new-tokens'" in capsys.readouterr().err


def test_invalid_value_is_reported_once(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        check("full_finetune", ["model.path=m", "dataset.path=d", "epoch=1", "optimizer.bettas=1"])
    message = capsys.readouterr().err
    assert message.count("epoch:") == 1 and message.count("optimizer.bettas:") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "message"),
    [
        ("two", "Unsupported nproc_per_node value: two"),
        ("0", "--nproc-per-node 0 starts no process"),
    ],
)
def test_invalid_torchrun_options_are_reported(count: str, message: str, recipe: Path) -> None:
    result = run("--nproc-per-node", count, recipe, "greeting.name=x")
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1].startswith(f"error: torchrun: {message}")


@pytest.mark.slow
def test_port_0_is_rejected(recipe: Path) -> None:
    result = run("--nproc-per-node", "2", "--master-port", "0", recipe, "greeting.name=x")
    assert result.returncode == 2 and "--master-port must not be 0" in result.stderr


@pytest.mark.slow
def test_recipe_help_does_not_start_torchrun(recipe: Path) -> None:
    result = run("--nproc-per-node", "2", recipe, "--help")
    assert result.stdout.splitlines()[0] == "A recipe of one's own."
    assert result.returncode == 0


def test_recipe_runs_in_two_processes(recipe: Path) -> None:
    result = run("--nproc-per-node", "2", recipe, "greeting.name=x")
    assert result.stdout.replace("\n", "") == "hello x 2 __main__" * 2, result.stderr  # lines may mix
    assert result.returncode == 0


@pytest.mark.slow
def test_failing_process_gives_its_exit_code_without_a_traceback(recipe: Path) -> None:
    result = run("--nproc-per-node", "2", recipe, "greeting.name=x", "fail_on='1'")
    assert result.returncode == 7
    assert "Traceback" not in result.stderr


def test_processes_have_time_to_save_after_sigterm(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun kills processes that have not ended 30 s after it receives SIGTERM."""
    asked = {}
    monkeypatch.syspath_prepend(recipe.parent)
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "")  # so that changes are undone
    monkeypatch.delenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT")
    monkeypatch.setattr(torchrun, "run", lambda _: asked.update(seconds=LaunchConfig(1, 1, 1).shutdown_timeout))
    launch(["--nproc-per-node", "1"], recipe, ["greeting.name=x"], recipe.parent / "run")
    assert asked == {"seconds": 600}


@pytest.mark.slow
def test_usage_is_printed(recipe: Path) -> None:
    assert run("--help").stdout.startswith("usage: tune run [--launcher NAME] [LAUNCHER OPTIONS] RECIPE")


def test_output_folder_whose_name_is_a_number(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    settings, folder = with_folder("full_finetune", Path("mine.py"), ["output_dir=1e5"])
    assert (settings, folder) == (["output_dir=1e5"], Path("1e5"))


def test_traceback_begins_in_the_function_of_the_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "mine.py"
    recipe.write_text("def step():\n    averge.update()\n\n\ndef main():\n    step()\n\n\nmain()\n")
    assert exit_status("run", str(recipe)) == 1
    frames = [line.strip() for line in capsys.readouterr().err.splitlines() if line.startswith("  File ")]
    assert frames == [f'File "{recipe}", line 6, in main', f'File "{recipe}", line 2, in step']
