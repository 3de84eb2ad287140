"""What clusters do to runs, done to a small one: does it continue, how soon, and is its curve the same to the bit?

    python examples/cluster/drills.py                                     # every drill once by torchrun and Ray
    python examples/cluster/drills.py --launchers ray --drills worker driver --times 10

Two processes on this machine train a model of 100,000 parameters; a checkpoint is saved every 5 steps. Each line of
the table is one drill: the steps that were trained again, the seconds from the harm to the next new step, whether the
losses of all steps are those of a run that nobody disturbed, and whether processes of the run were left over. Exits
with 1 if one is not as wanted.

    worker      SIGKILL of a worker; the launcher starts the processes again (--max-restarts)
    driver      SIGKILL of what `tune run` started: torchrun's agent, or Ray's driver; then the same command again
    sigterm     SIGTERM to it: a checkpoint is saved at once; then the same command again
    truncated   SIGKILL of it, then the newest checkpoint is cut short: the one before is taken
    hanging     SIGSTOP of a worker: it is named; killed by hand, the launcher starts the processes again
"""

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DRILLS = ("worker", "driver", "sigterm", "truncated", "hanging")
OPTIONS = {"torchrun": ["--nproc-per-node", "2"], "ray": ["--launcher", "ray", "--nproc-per-node", "2"]}
EVERY, STEPS = 5, 40


def make_inputs(folder: Path) -> list[str]:
    spec = importlib.util.spec_from_file_location("kill_and_resume", ROOT / "benchmarks" / "kill_and_resume.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    settings: list[str] = module.make_inputs(folder)
    constant = "schedule._component_=tune.optimizers.constant"
    return [*settings, constant, f"max_steps={STEPS}", f"checkpointer.every={EVERY}", "parallel.timeout=1"]


class Launch:
    """A `tune run` in a session of its own."""

    def __init__(self, launcher: str, settings: list[str], folder: Path):
        self.launcher, self.folder, self.log = launcher, folder, folder.with_suffix(".txt")
        command = [sys.executable, "-m", "tune.cli", "run", *OPTIONS[launcher], "--max-restarts", "1", *settings]
        with self.log.open("a") as output:
            self.process = subprocess.Popen(
                [*command, f"output_dir={folder}"], stdout=output, stderr=output, start_new_session=True
            )

    def wait_for(self, step: int) -> None:
        while step not in losses(self.folder):
            assert self.process.poll() is None, f"ended with {self.process.returncode}:\n{self.log.read_text()[-2000:]}"
            time.sleep(0.05)

    def worker(self) -> int:
        """The last of the processes that run the recipe."""
        return max(processes(self.folder, "ray::RayTrainWorker" if self.launcher == "ray" else "full_finetune.py"))


def losses(folder: Path) -> dict[int, float]:
    if not (folder / "metrics.jsonl").exists():
        return {}
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    return {each["step"]: each["loss"] for each in (json.loads(line) for line in lines if line.endswith("\n"))}


def processes(folder: Path, kind: str = "") -> list[int]:
    """Those of the run in `folder`, which they have in their command; Ray's workers have not, so all of them."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes().decode(errors="replace")
            is_its = str(folder) in command or "ray::RayTrainWorker" in command
        except OSError:
            continue
        if is_its and kind in command:
            found.append(int(process.name))
    return found


def drill(name: str, launcher: str, settings: list[str], folder: Path, expected: dict[int, float]) -> bool:
    launch = Launch(launcher, settings, folder)
    launch.wait_for(EVERY * 2 + 3)
    began, victim = time.monotonic(), launch.process.pid
    if name in ("worker", "hanging"):
        worker = launch.worker()
        os.kill(worker, signal.SIGKILL if name == "worker" else signal.SIGSTOP)
        while name == "hanging" and "says nothing" not in launch.log.read_text():
            time.sleep(0.2)
        named = time.monotonic() - began
        if name == "hanging":
            os.kill(worker, signal.SIGKILL)
    else:
        os.kill(victim, signal.SIGTERM if name == "sigterm" else signal.SIGKILL)
        launch.process.wait()
        while processes(folder, "ray::RayTrainWorker" if launcher == "ray" else "full_finetune.py"):
            assert time.monotonic() - began < 60, "processes are left over"
            time.sleep(0.1)
        if name == "truncated":
            file = next(max((folder / "checkpoints").glob("step-*")).glob("*.distcp"))
            file.write_bytes(file.read_bytes()[:100])
    reached = max(losses(folder))
    if name not in ("worker", "hanging"):
        launch = Launch(launcher, settings, folder)
    launch.wait_for(reached + 1)
    seconds = time.monotonic() - began
    code = launch.process.wait()
    text = (folder / "log.txt").read_text()
    after = max(int(line.split()[-1]) for line in text.splitlines() if line.startswith("continued after step"))
    same, left = losses(folder) == expected, processes(folder)
    limit = EVERY * (2 + (name == "truncated"))  # one interval, and what was being saved
    good = same and not left and code == 0 and reached - after <= limit and (name != "sigterm" or reached == after)
    note = f", named after {named:.0f} s" if name == "hanging" else ", the one before taken" * ("is damaged" in text)
    print(
        f"| {name} | {launcher} | {reached - after} | {seconds:.0f} | {'bitwise' if same else 'DIFFERS'} | "
        f"{len(left) or 'none'} | {'as wanted' if good else 'WRONG'}{note} |",
        flush=True,
    )
    return good


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launchers", nargs="+", choices=OPTIONS, default=[*OPTIONS])
    parser.add_argument("--drills", nargs="+", choices=DRILLS, default=[*DRILLS])
    parser.add_argument("--times", type=int, default=1)
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        settings = make_inputs(folder)
        undisturbed = Launch(options.launchers[0], settings, folder / "undisturbed")
        assert undisturbed.process.wait() == 0, undisturbed.log.read_text()[-3000:]
        expected = losses(folder / "undisturbed")
        print("| drill | launcher | steps again | seconds | curve | left over | |\n|" + "---|" * 7, flush=True)
        results = [
            drill(each, launcher, settings, folder / f"{launcher}-{each}-{time_}", expected)
            for time_ in range(options.times)
            for launcher in options.launchers
            for each in options.drills
        ]
    sys.exit(not all(results))


if __name__ == "__main__":
    main()
