import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers import HANGS
from omegaconf import OmegaConf

from tune.config.entry import entrypoint, explained_errors
from tune.distributed import Interrupt
from tune.errors import TuneError

ROOT = Path(__file__).parents[2]
RECIPE = '''
"""What this recipe does."""
import sys
from tune import config
from tune.errors import TuneError

print("imports")

@config.entrypoint("default.yaml")
def main(cfg):
    if cfg.epochs == 2:
        raise TuneError("the data is wrong\\nin line 3")
    print("trained", config.instantiate(cfg.part, []).name)

if __name__ == "__main__":
    main()
'''


@pytest.fixture
def recipe(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe with its defaults and components beside it; the current folder is another one."""
    (folder / "recipe.py").write_text(RECIPE)
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    return folder / "recipe.py"


def run(*command: object, **environment: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | environment
    return subprocess.run(
        [sys.executable, *map(str, command)], env=environment, capture_output=True, text=True, timeout=HANGS
    )


@pytest.mark.slow
def test_a_recipe_as_a_script(recipe: Path) -> None:
    done = run(recipe, "name=run")
    assert (done.returncode, done.stdout, done.stderr) == (0, "imports\ntrained run\n", "")


@pytest.mark.slow
def test_wrong_settings_are_explained_before_main_begins(recipe: Path) -> None:
    done = run(recipe, "name=run", "part.lrr=1")
    expected = "a problem in the configuration:\n  part.lrr: is not a setting. Did you mean 'part.lr'?\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "imports\n", f"error: {expected}")
    for other in ({"RANK": "1"}, {"SLURM_PROCID": "1"}):
        done = run(recipe, "name=run", "part.lrr=1", **other)
        assert (done.returncode, done.stderr) == (2, "")


@pytest.mark.slow
def test_help_is_the_docstring_and_the_settings(recipe: Path) -> None:
    done = run(recipe, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("imports\nWhat this recipe does.\n")
    assert "chunk_tokens: 1024" in done.stdout


@pytest.mark.slow
def test_a_mistake_found_while_running(recipe: Path) -> None:
    done = run(recipe, "name=run", "epochs=2")
    assert (done.returncode, done.stderr) == (2, "error: the data is wrong\nin line 3\n")
    done = run(recipe, "name=run", "epochs=2", RANK="3")
    assert (done.returncode, done.stderr) == (2, "error: [rank 3] the data is wrong\n")
    done = run(recipe, "name=run", "epochs=2", "--debug")
    assert done.returncode == 1
    assert "Traceback" in done.stderr


def test_main_with_settings_just_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    main = entrypoint("no such default")(seen.append)
    cfg = OmegaConf.create({"a": 1})
    main(cfg)
    assert seen == [cfg]


def failing(error: BaseException) -> int:
    cfg = OmegaConf.create({"micro_batch_size": 4, "loss": {"chunk_tokens": 1024}})
    with pytest.raises(SystemExit) as caught, explained_errors(cfg):
        raise error
    return int(str(caught.value.code))


def test_interrupted(capsys: pytest.CaptureFixture[str]) -> None:
    assert failing(KeyboardInterrupt()) == 130
    assert capsys.readouterr().err == "error: interrupted\n"


def test_an_error_is_one_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """With its end of line: where PYTHONUNBUFFERED is set, the lines of two processes mixed otherwise."""
    writes: list[str] = []
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(isatty=bool, write=writes.append, flush=bool))
    assert failing(TuneError("wrong")) == 2
    assert [text for text in writes if text] == ["error: wrong\n"]


@pytest.mark.parametrize("device", ["cpu", "cuda", "python"])
def test_out_of_memory_says_what_to_lower(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    if device == "cpu":
        with pytest.raises(RuntimeError) as caught:
            torch.empty(1 << 55)
        error: Exception = caught.value
    else:
        error = torch.OutOfMemoryError("CUDA out of memory.\nmore") if device == "cuda" else MemoryError()
    assert failing(error) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: out of memory: ")
    assert "micro_batch_size=1, loss.chunk_tokens=256, " in message
    assert "max_seq_len" not in message  # it is not one of the settings


def test_a_process_that_torchrun_ends_has_nothing_to_add(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """torchrun's signal may come before the connection to the process that was killed is found to be lost."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        Interrupt()
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(SystemExit) as end, explained_errors(OmegaConf.create()):
            raise RuntimeError("gloo/transport/tcp/pair.cc: Connection closed by peer")
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert end.value.code == 1 and "error" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "says", "code"),
    [
        ("gloo/transport/tcp/pair.cc: Connection closed by peer", "lost the connection to another process", 1),
        ("gloo/transport/tcp/unbound_buffer.cc: Timed out waiting 60000ms for recv", "parallel.timeout: it was", 1),
        (
            "gloo/transport: The client socket has timed out after 3000ms while trying to connect to (node, 29500).",
            "reach its MASTER_PORT: gloo/transport: The client socket",
            2,
        ),
        (
            "ImportError: /tmp/torchinductor_me/xj/a.main.so: file too short",
            "TORCHINDUCTOR_CACHE_DIR to an empty folder, or remove the file, and start again: ImportError",
            2,
        ),
    ],
)
def test_errors_of_torch_that_are_explained(
    error: str, says: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end, explained_errors(OmegaConf.create()):
        raise RuntimeError(error)
    assert end.value.code == code and says in capsys.readouterr().err


def test_other_errors_keep_their_traceback() -> None:
    with pytest.raises(RuntimeError, match="a bug"), explained_errors():
        raise RuntimeError("a bug")


@pytest.mark.slow
def test_keys_and_plain_values_are_checked_without_torch_and_its_friends() -> None:
    heavy = ("torch", "datasets", "transformers", "wandb")
    check = f"loaded = [name for name in {heavy} if name in sys.modules]; print(loaded); assert not loaded"
    done = run("-c", f"import sys, tune; {check}")
    assert done.returncode == 0, done.stderr
    read = "tune.config.read('full_finetune', ['lr=1', 'model.path=m', 'dataset.path=d'], imports=False)"
    done = run("-c", f"import sys, tune.config\nprint({read}[1])\n{check}")
    assert done.returncode == 0, done.stderr
    assert "lr: is not a setting. Did you mean 'optimizer.lr'?" in done.stdout


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["recipe.py", "--debug"])
    with pytest.raises(TuneError), explained_errors():
        raise TuneError("wrong")
