"""Copied recipes, changed and run as users do."""

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
from pathlib import Path

import torch
from docs_reader import BLOCK, FILE, ROOT, Reader, change
from helpers import run_processes
from safetensors.torch import load_file

from tune import cli

TINY = [
    "device=cpu", "compute.dtype=fp32", "compute.master_dtype=fp32", "max_seq_len=128", "global_batch_size=8",
    "micro_batch_size=2", "max_steps=4", "optimizer.lr=1e-3", "checkpointer.every=2", "checkpointer.keep=null",
]  # fmt: skip
SAMPLED = [
    "device=cpu", "compute.dtype=fp32", "compute.master_dtype=fp32", "max_prompt_len=64", "prompts_per_step=4",
    "group_size=4", "sampling.max_new_tokens=6", "max_steps=4", "epochs=9", "optimizer.lr=1e-3", "checkpointer.every=2",
    "checkpointer.keep=null",
]  # fmt: skip


def sections(page: Path) -> dict[str, str]:
    """Return the second-level sections of a page by title."""
    return dict(part.split("\n", 1) for part in page.read_text(encoding="utf-8").split("\n## ")[1:])


CHANGES = sections(ROOT / "docs" / "changes.md")
EXTENDING = sections(ROOT / "docs" / "extending.md")
EDITS = sections(Path(__file__).with_name("hacks") / "edits.md")


class Copied(Reader):
    """A folder with a tiny model, data, and `mine.py`, a copied recipe."""

    def copy(self, recipe: str, edit: str) -> None:
        """Copy a recipe and apply the changes of `edit`: files, settings lines, and diffs. Nothing is run."""
        with self.at_work():
            cli.main(["cp", recipe, "mine.py", "--force"])
        for language, block in BLOCK.findall(edit):
            if language == "diff":
                change(re.sub(r"^\+\+\+ \w+\.py$", "+++ mine.py", block, flags=re.MULTILINE), self.folder)
            elif language and (named := FILE.match(block)):
                (self.folder / named[1]).write_text(block, encoding="utf-8")
            for line in block.splitlines() if not language else ():
                if line.startswith("echo "):
                    self.echo(shlex.split(line), re.sub(r">> \w+\.yaml$", ">> mine.yaml", line))

    def validate(self, *settings: str) -> int:
        """Return the exit status of `tune validate mine.py`."""
        with self.at_work():
            return exit_status("validate", "mine.py", *settings)

    def train(self, output_dir: str, *settings: str, processes: int = 1) -> list[dict[str, float]]:
        """Run the copy and return the metrics of each step."""
        with contextlib.chdir(self.folder):
            path = os.pathsep.join(filter(None, [str(self.folder), os.environ.get("PYTHONPATH")]))
            before, os.environ["PYTHONPATH"] = os.environ.get("PYTHONPATH"), path
            try:
                self.said = run_processes(Path("mine.py"), processes, *settings, f"output_dir={output_dir}")
            finally:
                del os.environ["PYTHONPATH"]
                os.environ |= {} if before is None else {"PYTHONPATH": before}
        lines = (self.folder / output_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines]

    def exported(self, output_dir: str) -> dict[str, torch.Tensor]:
        """Return the weights or the adapter that a run exported."""
        (file,) = [*(self.folder / output_dir).glob("*/*model.safetensors"), *(self.folder / output_dir).glob("*.pt")]
        return torch.load(file) if file.suffix == ".pt" else load_file(file)

    def remove(self, name: str) -> None:
        shutil.rmtree(self.folder / name)

    def save_tower(self) -> None:
        """Save the weights for edit 11 in a separate file."""
        with self.at_work():
            from tower import Tower

            torch.manual_seed(0)
            torch.save(Tower(vocab_size=300, width=32, depth=2).state_dict(), "tower.pt")


def exit_status(*arguments: str) -> int:
    """Return the exit status of a `tune` command run in this process."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        cli.main([*arguments])
    except SystemExit as end:
        return int(end.code or 0)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return 0


def lines_of(edit: str) -> int:
    """Return the number of lines that a reader writes: lines added or changed by diffs, module lines, and settings."""
    count = 0
    for language, block in BLOCK.findall(edit):
        if language == "diff":
            count += len(re.findall(r"^\+(?!\+\+ ).*\S", block, flags=re.MULTILINE))
        elif language and FILE.match(block):
            count += sum(bool(line.strip()) for line in block.splitlines()[1:])
        elif not language:
            count += len(re.findall(r"^echo ", block, flags=re.MULTILINE))
    return count


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    """Assert that both are bitwise equal."""
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
