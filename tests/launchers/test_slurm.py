"""The batch script, with fake versions of SLURM's programs."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tune.errors import TuneError
from tune.launchers.slurm import _seconds, launch

# In place of a recipe: saves a checkpoint on SIGTERM, as recipes do.
RECIPE = """\
import signal, sys, time
from pathlib import Path

folder = Path(sys.argv[1].removeprefix("output_dir="))
def save(*_):
    if sys.argv[2] == "saves":
        (folder / "checkpoints" / "step-00000007").mkdir(parents=True)
    sys.exit(130)
signal.signal(signal.SIGTERM, save)
print("begun", flush=True)
if sys.argv[2] != "ends":
    time.sleep(600)
"""


def script(tmp_path: Path, capsys: pytest.CaptureFixture[str], *options: str, settings: tuple[str, ...] = ()) -> str:
    (tmp_path / "recipe.py").write_text(RECIPE)
    launch([*options, "--dry-run"], tmp_path / "recipe.py", settings, tmp_path / "a run")
    return capsys.readouterr().out


def program(folder: Path, name: str, text: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/bash\n{text}\n")
    (folder / name).chmod(0o755)


def test_batch_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = script(
        tmp_path, capsys, "--nodes", "4", "--gpus-per-node", "8", "--time", "24:00:00", "--partition=gpu",
        "--exclusive", settings=("prompt=it's two",),
    )  # fmt: skip
    directives = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")]
    assert directives == [
        "--job-name=tune-recipe", f"--output='{tmp_path}/a run/slurm.txt'", "--open-mode=append", "--nodes=4",
        "--ntasks-per-node=8", "--gpus-per-node=8", "--time=24:00:00", "--signal=B:USR1@600", "--requeue",
        "--partition=gpu", "--exclusive",
    ]  # fmt: skip
    file = tmp_path / "slurm.sh"
    file.write_text(text)
    subprocess.run(["bash", "-n", str(file)], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", str(file)], check=True)
    assert not (tmp_path / "a run").exists()


@pytest.mark.parametrize(("does", "requeued"), [("saves", True), ("nothing", False), ("ends", False)])
def test_job_is_requeued_after_its_time_limit(
    does: str, requeued: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A job is requeued if it was signaled that its time is over and has saved a checkpoint since its start."""
    folder = tmp_path / "a run"
    text = script(tmp_path, capsys, "--time=90", settings=(f"output_dir={folder}", does))
    bin = tmp_path / "bin"
    program(bin, "srun", 'while [[ $1 == --* ]]; do shift; done; exec "$@"')
    program(bin, "scontrol", f'[ "$1" = -o ] || echo "$@" > {tmp_path}/asked')
    (tmp_path / "slurm.sh").write_text(text)
    environment = os.environ | {"PATH": f"{bin}:{os.environ['PATH']}", "SLURM_JOB_ID": "12"}
    with subprocess.Popen(
        ["bash", str(tmp_path / "slurm.sh")], env=environment, stdout=subprocess.PIPE, text=True
    ) as job:
        assert job.stdout is not None and job.stdout.readline() == "begun\n"
        if does != "ends":
            job.send_signal(signal.SIGUSR1)
        output = job.stdout.read()
    assert job.returncode == (0 if does == "ends" else 130)
    assert (tmp_path / "asked").exists() == requeued
    if requeued:
        assert (tmp_path / "asked").read_text() == "requeue 12\n"
        assert "time limit reached after step-00000007" in output


@pytest.mark.parametrize(
    ("shown", "requeued"),
    [
        ("JobId=12 JobState=RUNNING EligibleTime=None PreemptTime=2026-01-01T12:00:00 Comment=", True),
        ("JobId=12 JobState=CANCELLED EligibleTime=None PreemptTime=2026-01-01T12:00:00 Comment=", False),
        ("JobId=12 JobState=RUNNING EligibleTime=None PreemptTime=None Comment=", False),
    ],
    ids=["preempted", "cancelled", "failed"],
)
def test_preempted_job_that_ends_in_its_grace_time(
    shown: str, requeued: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """SLURM counts a preempted job that ends itself as failed: its script requeues it unless it was canceled."""
    folder = tmp_path / "a run"
    text = script(tmp_path, capsys, settings=(f"output_dir={folder}", "saves"))
    bin = tmp_path / "bin"
    program(bin, "srun", 'while [[ $1 == --* ]]; do shift; done; exec "$@"')
    program(bin, "scontrol", f'[ "$1 $2 $3 $4" = "-o show job 12" ] && echo "{shown}" || echo "$@" > {tmp_path}/asked')
    environment = os.environ | {"PATH": f"{bin}:{os.environ['PATH']}", "SLURM_JOB_ID": "12"}
    with subprocess.Popen(["bash", "-c", text], env=environment, stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None and job.stdout.readline() == "begun\n"
        job.send_signal(signal.SIGTERM)
        job.stdout.read()
    assert job.returncode == 130
    assert (folder / "checkpoints" / "step-00000007").exists()
    assert (tmp_path / "asked").exists() == requeued
    if requeued:
        assert (tmp_path / "asked").read_text() == "requeue 12\n"


def test_job_is_submitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    program(tmp_path / "bin", "sbatch", f'cp "$1" {tmp_path}/given; echo Submitted batch job 12')
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    launch(["--nproc-per-node=2"], tmp_path / "recipe.py", ["x=1"], tmp_path / "run")
    assert capsys.readouterr().out.startswith("Submitted batch job 12: ")
    assert (tmp_path / "given").read_text() == (tmp_path / "run" / "slurm.sh").read_text()
    assert f"{sys.executable} \\\n  {tmp_path}/recipe.py \\\n  x=1" in (tmp_path / "given").read_text()

    program(tmp_path / "bin", "sbatch", "echo 'sbatch: error: invalid partition specified: gpu' >&2; exit 1")
    with pytest.raises(TuneError, match="--launcher slurm: invalid partition specified: gpu"):
        launch([], tmp_path / "recipe.py", ["x=1"], tmp_path / "run")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(TuneError, match=r"sbatch is not installed here\. --dry-run prints the script"):
        launch([], tmp_path / "recipe.py", ["x=1"], tmp_path / "run")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--nodes", "0"], "'0' is not a number of at least 1"),
        (["--gpus-per-node=two"], "'two' is not a number of at least 1"),
        (["--time", "soon"], "'soon' is not a time limit such as 90, 24:00:00 or 2-12"),
        (["--partition", "gpu"], "'gpu' is not an option"),
    ],
)
def test_invalid_options_are_rejected(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises((TuneError, SystemExit)) as error:
        launch([*options, "--dry-run"], tmp_path / "recipe.py", [], tmp_path)
    assert message in f"{error.value} {capsys.readouterr().err}"


def test_time_limits() -> None:
    """The formats in sbatch's manual."""
    limits = {"90": 5400, "90:30": 5430, "24:00:00": 86400, "2-12": 216_000, "2-12:30": 217_800, "2-12:30:01": 217_801}
    assert {limit: _seconds(limit) for limit in limits} == limits
