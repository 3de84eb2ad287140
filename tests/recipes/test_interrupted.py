"""Runs ended from outside, by a person, a scheduler or a full disk: the run reports it, and nothing is lost."""

import errno
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from edited_recipes import edited
from helpers import HANGS

from tune import checkpointers, config
from tune.checkpointers import checkpointer
from tune.run import Run

LIMITS = {"file": resource.RLIMIT_FSIZE, "memory": resource.RLIMIT_AS}
CONSTANT = "schedule._component_=tune.optimizers.constant"  # does not depend on the length of the run

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="sends signals and sets limits as on Linux")


def limited(settings, recipe="full_finetune", **limits):
    """Run a recipe in a process with limits, in bytes, on its files or memory."""

    def limit():
        for name, size in limits.items():
            resource.setrlimit(LIMITS[name], (size, size))

    command = [sys.executable, str(config.find_recipe(recipe)), *settings]
    return subprocess.run(command, preexec_fn=limit, capture_output=True, text=True, timeout=HANGS)


def explained(done):
    """Return the only error message of a failed process; progress lines may precede it on a busy machine."""
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert f"\n{done.stderr}".count("\nerror: ") == 1, done.stderr
    return done.stderr[done.stderr.index("error: ") :]


@pytest.fixture
def short(inputs, run_recipe):
    """The folder of a one-step run, and settings that continue it to three steps."""
    settings = inputs.settings(CONSTANT, f"output_dir={inputs.folder / 'short'}")
    assert run_recipe([*settings, "max_steps=1"]) == 0
    return inputs.folder / "short", [*settings, "max_steps=3"]


@pytest.mark.parametrize("saving", ["async", "sync"])
@pytest.mark.weekly(but_one=True)
def test_disk_full_while_saving(saving, short, run_recipe, contents):
    run, settings = short
    before = contents(run / "checkpoints")
    settings.append(f"checkpointer.async={saving == 'async'}")
    message = explained(limited([*settings, "checkpointer.on_error=stop"], file=100_000))
    assert "the checkpoint of step 2 could not be written" in message
    assert "No space left on device" in message and "Free" in message
    assert f"the same command with output_dir={run} continues after step 1" in message
    assert contents(run / "checkpoints") == before
    done = limited(settings, file=100_000)
    assert [f"the checkpoint of step {step} could not be written" in done.stdout for step in (2, 3)] == [True, True]
    assert "the model could not be written" in explained(done)
    assert contents(run / "checkpoints") == before
    assert run_recipe(settings) == 0
    assert [line.split(",")[0] for line in (run / "metrics.jsonl").read_text().splitlines()] == [
        f'{{"step": {step}' for step in (1, 2, 3)
    ]


@pytest.mark.weekly
def test_disk_full_while_writing_the_model(short, contents):
    run, settings = short
    before = contents(run / "model")
    done = limited([*settings, "max_steps=1"], file=50_000)
    message = explained(done)
    assert f"the model could not be written to {run}: " in message
    assert f"run the same command with output_dir={run} to continue" in message
    assert contents(run / "model") == before
    assert not list(run.glob(".model*"))
    assert f"the report could not be written: {run / 'report.html'} cannot be written: File too large." in done.stdout


@pytest.mark.slow
def test_disk_full_while_logging(short, run_recipe):
    """Training continues. The exit status and the message report that the run has not written everything."""
    run, settings = short
    (run / "log.txt").unlink()
    (run / "log.txt").symlink_to("/dev/full")
    done = limited(settings)
    message = explained(done)
    assert "lines of log.txt (No space left on device)" in message and "continues after step 3" in message
    assert done.stdout.count("lines of log.txt (No space left on device)") == 1
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 3 and (run / "model" / "config.json").exists()
    assert json.loads((run / "run.json").read_text())["state"] == "failed"


@pytest.mark.slow
def test_disk_that_is_briefly_full(inputs, run_recipe, monkeypatch, capsys):
    log, run, (_, hard) = Run.log, inputs.folder / "new", resource.getrlimit(resource.RLIMIT_FSIZE)

    def logged(*arguments, **metrics):
        if arguments[1] == 2:
            resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
        try:
            log(*arguments, **metrics)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))

    monkeypatch.setattr(Run, "log", logged)
    settings = inputs.settings(f"output_dir={run}", "max_steps=4", "checkpointer.async=false")
    assert run_recipe(settings) == 0
    output = capsys.readouterr().out
    assert output.count("1 lines of metrics.jsonl (File too large)") == 1 and "continues after step 1" in output
    assert output.index("metrics.jsonl (File too large)") < output.index(f"{run} accepts lines again")
    assert [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()] == [1, 2, 3, 4]
    assert [line for line in output.splitlines() if line.startswith("warning: ")] == [
        line for line in (run / "log.txt").read_text().splitlines() if line.startswith("warning: ")
    ]


@pytest.mark.slow
def test_failed_last_checkpoint_sets_the_exit_status(inputs, run_recipe, monkeypatch, capsys):
    """The model is written: no training is lost."""
    save, run = checkpointer.dcp.save, inputs.folder / "new"

    def full(state, checkpoint_id, **options):
        if ".step-00000002" in str(checkpoint_id):
            raise OSError(errno.ENOSPC, "No space left on device")
        return save(state, checkpoint_id=checkpoint_id, **options)

    monkeypatch.setattr(checkpointer.dcp, "save", full)
    assert run_recipe(inputs.settings(f"output_dir={run}")) == 2
    output = capsys.readouterr()
    assert output.out.count("the checkpoint of step 2 could not be written") == 1 and "retries" not in output.out
    assert "the checkpoint of step 2" in output.err and "continues after step 1" in output.err
    assert (run / "model" / "model.safetensors").exists()


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["the last step is logged", "the model is written"])
def test_signal_after_the_last_check_for_signals(moment, inputs, run_recipe, monkeypatch, capfd):
    run = inputs.folder / "new"
    settings = inputs.settings(f"output_dir={run}")
    place, name = (checkpointers, "export") if moment == "the model is written" else (Run, "log")
    wrapped = getattr(place, name)

    def signalled(*arguments, **options):
        if name == "export" or arguments[1] == 2:
            signal.raise_signal(signal.SIGTERM)
        return wrapped(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(place, name, signalled)
        assert run_recipe(settings) == 130
    assert ("a checkpoint will be saved" in capfd.readouterr().err) == (name == "log")
    assert json.loads((run / "run.json").read_text())["state"] == "interrupted"
    assert (run / "checkpoints" / "step-00000002").exists() and not (run / "model").exists()
    assert run_recipe(settings) == 0
    assert (run / "model" / "model.safetensors").exists()


@pytest.mark.slow
def test_ctrl_c_saves_although_nobody_reads_stdout(inputs):
    """Ctrl-C ends both sides of `tune run ... | tee`, and tee ends first."""
    settings = inputs.settings(f"output_dir={inputs.folder / 'new'}", "max_steps=null", "epochs=9999")
    command = [sys.executable, str(config.find_recipe("full_finetune")), *settings, "checkpointer.every=null"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        assert any(line.startswith("step 2/") for line in run.stdout)
        run.stdout.close()
        run.send_signal(signal.SIGINT)
        errors = run.stderr.read()
    assert (run.returncode, "Traceback" in errors, "BrokenPipe" in errors) == (130, False, False), errors
    assert len([*(inputs.folder / "new" / "checkpoints").glob("step-*")]) == 1


LOCKED = (
    "import fcntl, sys; f = open(sys.argv[1], 'a'); fcntl.lockf(f, fcntl.LOCK_EX); print('held', flush=True); input()"
)


@pytest.mark.weekly
@pytest.mark.parametrize("place", ["folder", "URL"])
def test_second_start_while_a_run_writes_a_checkpoint(place, inputs, run_recipe, contents, monkeypatch):
    """It is refused before it tidies up, even after the first upload, and the first run is unaffected."""
    folder, save, other = inputs.run, checkpointer.dcp.save, []
    settings = inputs.settings("max_steps=3", "checkpointer.async=false")
    if place == "URL":
        url = f"file://{inputs.folder}/store/mine"
        monkeypatch.setenv("TUNE_LOCAL", str(inputs.folder / "local"))
        folder = config.local_folder(url)
        shutil.copytree(inputs.run, folder)
        settings.append(f"output_dir={url}")

    def state():  # without files that the first run changes meanwhile; opening its lock file would release it
        files = [folder / name for name in ("config.yaml", "metrics.jsonl", "run.json", "log.txt")]
        return contents(folder / "checkpoints"), [file.read_bytes() for file in files]

    def saved(*arguments, **options):
        save(*arguments, **options)
        while place == "URL" and not (inputs.folder / "store" / "mine" / "log.txt").exists():
            time.sleep(0.02)
        damaged = folder / "checkpoints" / "step-00000002" / "__0_0.distcp"
        whole = damaged.read_bytes()
        damaged.write_bytes(b"not what it was")
        before = state()
        command = [sys.executable, str(config.find_recipe("full_finetune")), *settings]
        other.append(subprocess.run(command, capture_output=True, text=True, timeout=HANGS))
        assert state() == before
        damaged.write_bytes(whole)

    with monkeypatch.context() as patch:
        patch.setattr(checkpointer.dcp, "save", saved)
        assert run_recipe(settings) == 0
    assert [done.returncode for done in other] == [2]
    assert f"another run is writing to {folder}" in explained(other[0])
    assert [path.name for path in sorted((folder / "checkpoints").iterdir())][-1] == "step-00000003"
    assert run_recipe([*settings, "max_steps=4"]) == 0


def test_run_that_starts_while_another_one_prepares(inputs, run_recipe, capfd, monkeypatch):
    """Both start in a new folder. The one that reaches its first step later is refused, and touches nothing."""
    folder, resume = inputs.folder / "new", checkpointers.Checkpointer.resume

    def late(checkpointer, how):
        (folder / "checkpoints" / ".step-00000001.abcdef01").mkdir(parents=True)
        command = [sys.executable, "-c", LOCKED, str(folder / ".lock")]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
            assert other.stdout.readline() == "held\n"
            try:
                return resume(checkpointer, how)
            finally:
                other.kill()

    monkeypatch.setattr(checkpointers.Checkpointer, "resume", late)
    assert run_recipe(inputs.settings(f"output_dir={folder}")) == 2
    assert f"another run is writing to {folder}" in capfd.readouterr().err
    assert [path.name for path in (folder / "checkpoints").iterdir()] == [".step-00000001.abcdef01"]


@pytest.mark.weekly
def test_out_of_memory(inputs):
    inputs.change_json("config.json", hidden_size=65536, intermediate_size=65536, head_dim=16)
    new = f"output_dir={inputs.folder / 'new'}"
    message = explained(limited(inputs.settings(new), edited("full_finetune", "random"), memory=8 << 30))
    assert message.startswith("error: out of memory: can't allocate memory: you tried to allocate 17179869184 bytes")
    assert "max_seq_len=64, " in message and "micro_batch_size" not in message  # it is 1
    assert float(re.search(r"max_seq_len=64: ([\d,.]+) GiB", message)[1].replace(",", "")) > 8  # by `tune plan`


@pytest.mark.weekly(but_one=True)
@pytest.mark.parametrize(("number", "processes"), [(signal.SIGINT, 1), (signal.SIGTERM, 2)])
def test_interrupted_runs_save_and_resume(number, processes, killing, tmp_path):
    settings = [*killing.make_inputs(tmp_path), "checkpointer.every=null"]
    reference = killing.Reference(settings, tmp_path / "reference", processes)
    settings.append(f"output_dir={tmp_path / 'run'}")
    launch = killing.Launch(settings, processes)
    launch.wait_for("step 2/")
    launch.processes[-1].send_signal(number)  # a signal to one process stops all after the same step
    assert [process.wait() for process in launch.processes] == [130] * processes
    assert f"is saved, the same command with output_dir={tmp_path / 'run'} continues after it" in launch.text()
    assert "Traceback" not in launch.text()
    interrupted = killing.losses(tmp_path / "run")
    assert 2 <= len(interrupted) < killing.STEPS
    killing.Launch(settings, processes).wait()
    assert killing.losses(tmp_path / "run") == reference.losses
    assert killing.exported(tmp_path / "run") == reference.export


@pytest.mark.slow
def test_interrupted_before_training(inputs, contents):
    command = [sys.executable, "-m", "tune.cli", "run", "full_finetune", *inputs.settings()]
    before = contents(inputs.folder)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    while "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text():  # during the imports
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=HANGS)
    assert process.returncode in (-signal.SIGINT, 130)
    assert "Traceback" not in output
    assert contents(inputs.folder) == before


SWALLOWS = """\
import time
from tune import config
from tune.run import Run

try:
    print("importing", flush=True)
    time.sleep(600)
except BaseException:
    pass

@config.entrypoint("full_finetune")
def main(cfg):
    pass

main()
"""


@pytest.mark.slow
def test_interrupt_during_an_import_that_swallows_exceptions(inputs):
    script = inputs.folder / "script.py"
    script.write_text(SWALLOWS)
    command = [sys.executable, "-m", "tune.cli", "run", str(script), *inputs.settings()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "importing\n"
        process.send_signal(signal.SIGINT)
    assert process.returncode == -signal.SIGINT


@pytest.mark.weekly
def test_lost_process_without_a_launcher(killing, tmp_path):
    launch = killing.Launch([*killing.make_inputs(tmp_path), f"output_dir={tmp_path / 'run'}"], 2)
    launch.wait_for("step 3/")
    launch.processes[0].kill()
    assert launch.processes[1].wait() == 1
    (error,) = [line for line in launch.text().splitlines() if line.startswith("error: ")]
    assert error.startswith("error: [rank 1] lost the connection to another process of this run")
    assert "Traceback" not in launch.text()


def run_two(settings, **popen):
    command = [sys.executable, "-m", "tune.cli", "run", "--nproc-per-node", "2", "full_finetune", *settings]
    return subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, text=True, **popen)


@pytest.mark.slow
def test_one_of_two_processes_is_killed(inputs, run_recipe):
    """Only torchrun reports it. The run that continues reports the changed settings."""
    run = inputs.folder / "new"
    settings = inputs.settings(f"output_dir={run}", CONSTANT, "max_steps=null", "epochs=9999")
    with run_two(settings, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as launcher:
        while not launcher.stdout.readline().startswith("step 3/"):
            assert launcher.poll() is None
        workers = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
        os.kill(int(workers[-1]), signal.SIGKILL)
        _, errors = launcher.communicate()
    assert launcher.returncode == 2
    assert "was killed by signal 9" in errors and errors.count("error: ") == 1, errors
    assert "Traceback" not in errors and "gloo" not in errors

    before = (run / "config.yaml").read_bytes()
    with (run / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": 1001}\n')
    assert run_recipe([*settings, "max_steps=999", "epochs=9999", "optimizer.lr=1e-9", "max_steps=4"]) == 0
    log = (run / "log.txt").read_text()
    (continued,) = [line for line in log.splitlines() if line.startswith("continued after step ")]
    lost = " to 1001 were trained but not saved, and will be trained again"
    assert continued.endswith(f"{lost}; changed: max_steps: null -> 4, optimizer.lr: 2e-05 -> 1e-09")
    assert (run / "config.yaml").read_bytes() == before
    assert "lr: 1.0e-09" in (run / "config-2.yaml").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("max_grad_norm=null", " at step 1"),
        ("{one_row}", "has 1 rows, too few for 2 data-parallel processes"),
    ],
)
def test_two_processes_report_an_error_once(override, message, inputs, contents):
    one_row = inputs.write_rows({"prompt": "the cat", "completion": " sat"})[0]
    settings = inputs.settings(
        f"output_dir={inputs.folder / 'new'}", "max_steps=9", *override.format(one_row=one_row).split()
    )
    if override == "max_grad_norm=null":
        inputs.make_overflow()
    before = contents(inputs.folder)
    command = [sys.executable, "-m", "tune.cli", "run", "--nproc-per-node", "2", "full_finetune", *settings]
    done = subprocess.run(
        command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=HANGS
    )
    assert message in explained(done)
    assert before.items() <= contents(inputs.folder).items()
