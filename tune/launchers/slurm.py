"""SLURM: write a batch script that runs the recipe with `srun`, and submit it."""

import re
import shlex
import shutil
import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tune.errors import TuneError
from tune.files import CHECKPOINT
from tune.launchers import count

NOTICE = 600  # seconds before the time limit for saving the last checkpoint; at most a fifth of the limit

# Only the batch shell gets USR1 before the time limit, so a job that `scancel` ends is not requeued. Neither is a start
# that saved nothing new. SLURM itself requeues a job that loses a node or is killed at the end of its GraceTime, but
# counts a preempted job that ends within that time as failed.
SCRIPT = """\
#!/bin/bash
{directives}
cd {here} || exit 1
newest() {{ find {folder}/checkpoints -maxdepth 1 -name '{names}' -printf '%f\\n' 2>/dev/null | sort | tail -n 1; }}
before=$(newest)
time_is_over=
[ -z "$SLURM_CPUS_PER_TASK" ] || export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"  # srun does not take it from sbatch
export OMP_NUM_THREADS="${{OMP_NUM_THREADS:-${{SLURM_CPUS_PER_TASK:-1}}}}"
srun --kill-on-bad-exit=1 \\
  {command} &
step=$!
told=
trap 'time_is_over=1; told=1; kill -TERM "$step"' USR1
trap 'told=1; kill -TERM "$step"' TERM
wait "$step"; code=$?
while [ -n "$told" ]; do told=; wait "$step"; code=$?; done  # a signal interrupts wait, which returns its own code
preempted() {{ scontrol -o show job "$SLURM_JOB_ID" | grep ' JobState=RUNNING ' | grep -q ' PreemptTime=[0-9]'; }}
if [ "$code" -ne 0 ] && preempted; then  # and not canceled since
  echo "preempted: the job is requeued"
  scontrol requeue "$SLURM_JOB_ID"
elif [ -n "$time_is_over" ] && [ "$code" -ne 0 ]; then
  if [ "$(newest)" != "$before" ]; then
    echo "time limit reached after $(newest): the job is requeued and continues from there"
    scontrol requeue "$SLURM_JOB_ID"
  else
    echo "time limit reached without a new checkpoint: raise --time, or lower checkpointer.every"
  fi
fi
exit "$code"
"""


def launch(options: Sequence[str], recipe: Path, settings: Sequence[str], folder: Path) -> None:
    """Write the script to the run folder and submit it; with `--dry-run`, print it."""
    chosen, others = _options(options)
    text = script(chosen, others, recipe, settings, folder)
    if chosen.dry_run:
        print(text, end="")
        return
    if not shutil.which("sbatch"):
        raise TuneError(
            "--launcher slurm: sbatch is not installed here. --dry-run prints the script to submit it elsewhere"
        )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "slurm.sh").write_text(text, encoding="utf-8")
    done = subprocess.run(["sbatch", str(folder / "slurm.sh")], capture_output=True, text=True)
    if done.returncode:
        raise TuneError(f"--launcher slurm: {done.stderr.strip().removeprefix('sbatch: error: ')}")
    print(f"{done.stdout.strip()}: {folder / 'slurm.sh'}; output goes to {folder / 'slurm.txt'}")


def script(chosen: Any, others: Sequence[str], recipe: Path, settings: Sequence[str], folder: Path) -> str:
    """Return the batch script; `others` are options for sbatch."""
    tasks, seconds = chosen.nproc_per_node or chosen.gpus_per_node or 1, _seconds(chosen.time)
    directives = {
        "job-name": f"tune-{recipe.stem}",
        "output": folder.absolute() / "slurm.txt",
        "open-mode": "append",
        "nodes": chosen.nodes,
        "ntasks-per-node": tasks,
        "gpus-per-node": chosen.gpus_per_node,
        "time": chosen.time,
        "signal": f"B:USR1@{min(NOTICE, seconds // 5)}" if seconds else None,
    }
    lines = [f"--{name}={shlex.quote(str(value))}" for name, value in directives.items() if value is not None]
    command = [sys.executable, str(recipe.absolute()), *settings]
    return SCRIPT.format(
        directives="\n".join(f"#SBATCH {line}" for line in [*lines, "--requeue", *others]),
        here=shlex.quote(str(Path.cwd())),
        folder=shlex.quote(str(folder.absolute())),
        names=CHECKPOINT,
        command=" \\\n  ".join(map(shlex.quote, command)),
    )


def _options(arguments: Sequence[str]) -> tuple[Any, list[str]]:
    parser = ArgumentParser(
        "tune run --launcher slurm", allow_abbrev=False, epilog="Other options (--option=value) are passed to sbatch."
    )
    parser.add_argument("--nodes", "--nnodes", type=count, default=1, help="default: 1")
    parser.add_argument("--gpus-per-node", type=count, help="GPUs, and so processes, per node")
    parser.add_argument("--nproc-per-node", type=count, help="processes per node, if not one per GPU")
    parser.add_argument("--time", help="limit of one start, as for sbatch: MINUTES, HH:MM:SS, DAYS-HH:MM:SS ...")
    parser.add_argument("--dry-run", action="store_true", help="print the script without submitting it")
    chosen, others = parser.parse_known_args(arguments)
    if wrong := [each for each in others if not re.fullmatch(r"--[a-z][\w-]*(=\S+)?", each)]:
        raise TuneError(f"--launcher slurm: '{wrong[0]}' is not an option. Write options for sbatch as --option=value")
    return chosen, others


def _seconds(limit: str | None) -> int:
    """Parse SLURM's MINUTES, MINUTES:SECONDS, HOURS:MINUTES:SECONDS, DAYS-HOURS, DAYS-HOURS:MINUTES[:SECONDS]."""
    if limit is None:
        return 0
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", limit)
    if not found:
        raise TuneError(f"--time: '{limit}' is not a time limit such as 90, 24:00:00 or 2-12")
    days, *parts = (int(part) for part in found.groups(default="0"))
    if found[1] is None and found[4] is None:  # minutes and seconds
        parts = [0, *parts[:2]]
    return ((days * 24 + parts[0]) * 60 + parts[1]) * 60 + parts[2]
