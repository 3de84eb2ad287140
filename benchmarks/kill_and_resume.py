"""Kill a run at random instants, continue it with the same command, and compare the loss curves.

    python benchmarks/kill_and_resume.py                            # 20 kills each: 1 process, 2, and changing
    python benchmarks/kill_and_resume.py --kills 3 --processes 2 1  # each restart has the next number of processes
    python benchmarks/kill_and_resume.py --recipe lora_finetune --settings adapter.dropout=0.1
    python benchmarks/kill_and_resume.py --kills 5 --processes 4 2 --layouts parallel.cp=2 parallel.tp=2

SIGKILL ends all processes at one instant, drawn from the duration of a run after its imports. A checkpoint is written
after every step, so many kills hit a save. Exits with 1 if a curve differs or a checkpoint is incomplete.
"""

import argparse
import itertools
import json
import os
import pickle
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tune import checkpointers, config
from tune.models import build

STEPS = 20
MODEL = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}
PROCESSES = ([1], [2], [2, 1])
OF_ROWS = ["max_seq_len=64", "global_batch_size=4"]
OF_PROMPTS = [
    "reward=benchmarks.kill_and_resume.share_of_upper_case", "prompts_per_step=4", "sampling.max_new_tokens=8",
    "tokenizer.chat_template=plain",
]  # fmt: skip
# Additional settings by recipe; {} is the folder.
RECIPES = {
    "distill": [*OF_ROWS, "teacher.path={}/teacher"],
    "grpo": [*OF_PROMPTS, "group_size=4"],
    "ppo_finetune": [*OF_PROMPTS, "updates=2", "micro_batch_size=2"],
}


@dataclass
class Outcome:
    """The effect of several kills: the largest relative `difference` of a loss, and the number of equal `exports`."""

    name: str
    kills: int = 0
    while_saving: int = 0
    finished: int = 0
    exports: int = 0
    incomplete: int = 0
    difference: float = 0.0

    def as_wanted(self, same_layout: bool) -> bool:
        exact = self.difference == 0 and self.exports == self.finished
        return not self.incomplete and (exact if same_layout else self.difference <= 1e-5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--processes", type=int, nargs="+", help="processes of the first start, the second, ...")
    parser.add_argument("--layouts", nargs="+", default=[], metavar="key=value", help="likewise; several: k=v,k=v")
    parser.add_argument("--saving", choices=("async", "sync"), nargs="+", default=["async", "sync"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--recipe", default="full_finetune")
    parser.add_argument("--settings", nargs="+", default=[], metavar="key=value")
    options = parser.parse_args()

    print(
        f"{'processes':<12}{'saving':<8}{'kills':>6}{'in a save':>11}{'runs':>6}{'incomplete':>12}{'same export':>13}"
        "  loss"
    )
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        settings = [*make_inputs(Path(folder), options.recipe), *options.settings]
        references: dict[int, Reference] = {}
        for processes, saving in itertools.product(
            [options.processes] if options.processes else PROCESSES, options.saving
        ):
            if processes[0] not in references:
                first = [*settings, *of_layout(*options.layouts[:1])]
                references[processes[0]] = Reference(first, Path(folder) / f"reference-{processes[0]}", processes[0])
            name = f"{' -> '.join(map(str, processes)):<12}{saving:<8}"
            runs = Path(folder) / name.replace(" ", "")
            command = [*settings, f"checkpointer.async={saving == 'async'}"]
            draw = random.Random(f"{options.seed} {name}")
            starts = processes, options.layouts or [""]
            found = kill_and_resume(name, command, runs, references[processes[0]], *starts, options.kills, draw)
            same_layout = len(set(processes)) == 1 and len(set(options.layouts)) <= 1
            failed |= not found.as_wanted(same_layout)
            loss = "bitwise equal" if found.difference == 0 else f"differs by {found.difference:.1e}"
            loss += "" if found.as_wanted(same_layout) else "  WRONG"
            print(
                f"{name}{found.kills:>6}{found.while_saving:>11}{found.finished:>6}{found.incomplete:>12}"
                f"{found.exports:>10}/{found.finished:<2}  {loss}",
                flush=True,
            )
    sys.exit(failed)


def make_inputs(folder: Path, recipe: str = "full_finetune") -> list[str]:
    """Write a model of 100,000 random parameters and 40 rows; returns the recipe and settings that name them."""
    make_model(folder / "model")
    make_model(folder / "teacher", seed=1)
    is_of_pairs = recipe in ("preference_finetune", "reward_finetune")
    better = "chosen" if is_of_pairs else "completion"
    worse = {"rejected": "nothing"} if is_of_pairs else {}
    rows = ({"prompt": f"count to {n % 9}: ", better: " ".join(map(str, range(n % 9))), **worse} for n in range(1, 41))
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows if row[better]), encoding="utf-8")
    return [
        recipe, f"model.path={folder / 'model'}", f"dataset.path={folder / 'rows.jsonl'}", "device=cpu",
        "compute.dtype=fp32", "epochs=9", f"max_steps={STEPS}", "optimizer.lr=1e-2", "checkpointer.every=1",
        *(setting.format(folder) for setting in RECIPES.get(recipe, OF_ROWS)),
    ]  # fmt: skip


def make_model(folder: Path, seed: int = 0) -> None:
    """Write a folder with weights and a tokenizer whose tokens are bytes."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
    model = build(str(folder))
    checkpointers.Random(seed=seed).load(model)
    weights = {model.names.on_disk[name]: parameter.detach() for name, parameter in model.named_parameters()}
    save_file(weights, folder / "model.safetensors")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({character: index for index, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": alphabet[0], "pad_token": alphabet[1]}), encoding="utf-8"
    )


def share_of_upper_case(row: object, completion: str) -> float:
    """A reward."""
    return sum(map(str.isupper, completion)) / max(len(completion), 1)


class Reference:
    """Run without kills."""

    def __init__(self, settings: list[str], folder: Path, processes: int):
        launch = Launch([*settings, f"output_dir={folder}"], processes)
        launch.wait_for(" an epoch")
        begin = time.monotonic()
        launch.wait_for("done:")
        self.seconds = time.monotonic() - begin
        launch.wait()
        self.losses = losses(folder)
        self.export = exported(folder)


def kill_and_resume(
    name: str,
    settings: list[str],
    folder: Path,
    reference: Reference,
    processes: Sequence[int],
    layouts: Sequence[str],
    kills: int,
    draw: random.Random,
) -> Outcome:
    """Start runs, kill and continue each until it ends, until there were `kills` kills."""
    found = Outcome(name)
    while found.kills < kills:
        run = folder / f"run-{found.finished}"
        for count, layout in zip(itertools.cycle(processes), itertools.cycle(layouts), strict=False):
            left_over = set(run.glob("checkpoints/.step-*"))
            launch = Launch([*settings, *of_layout(layout), f"output_dir={run}"], count)
            if found.kills < kills:
                launch.wait_for(" an epoch")  # everything is imported, and the data is read
                if launch.kill_after(draw.uniform(0, reference.seconds)):
                    found.kills += 1
                    found.while_saving += bool(set(run.glob("checkpoints/.step-*")) - left_over)
                    found.incomplete += len(set(run.glob("checkpoints/step-*")) - set(complete_checkpoints(run)))
                    continue
            launch.wait()
            break
        found.finished += 1
        found.exports += exported(run) == reference.export
        curve = losses(run)
        assert curve.keys() == reference.losses.keys(), f"steps {list(curve)} in {run}/metrics.jsonl"
        # If all completions have the same length, grpo's loss is nearly 0, so relative differences mean nothing.
        least = max(map(abs, reference.losses.values())) / 100
        pairs = ((loss, reference.losses[step]) for step, loss in curve.items())
        differences = (abs(loss - unbroken) / max(abs(unbroken), least) for loss, unbroken in pairs)
        found.difference = max(found.difference, *differences)
    return found


def of_layout(text: str = "") -> list[str]:
    """Return the settings of a layout."""
    return text.split(",") if text else []


class Launch:
    """A recipe with settings in one or several processes, connected as under torchrun, in one process group."""

    def __init__(self, settings: list[str], processes: int):
        port = random.SystemRandom().randrange(10_000, 32_000)  # outside the range of ephemeral ports
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        self.output = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the processes
        self.processes: list[subprocess.Popen[bytes]] = []
        recipe, *settings = settings
        command = [sys.executable, str(config.find_recipe(recipe)), *settings]
        for rank in map(str, range(processes)):
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": str(processes)} if processes > 1 else {}
            env = os.environ | {"OMP_NUM_THREADS": "1"} | address | place
            group = self.processes[0].pid if self.processes else 0
            self.processes.append(
                subprocess.Popen(command, env=env, stdout=self.output, stderr=subprocess.STDOUT, process_group=group)
            )

    def wait_for(self, message: str) -> None:
        while message not in self.text() and self.is_running():
            time.sleep(0.005)

    def kill_after(self, seconds: float) -> bool:
        """Kill all processes at once; returns False if they had already ended."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self.is_running():
            time.sleep(0.001)
        if not self.is_running():
            return False
        os.killpg(self.processes[0].pid, signal.SIGKILL)
        for process in self.processes:
            process.wait()
        return True

    def wait(self) -> None:
        codes = [process.wait() for process in self.processes]
        assert not any(codes), f"exit codes {codes}:\n{self.text()}"

    def is_running(self) -> bool:
        return any(process.poll() is None for process in self.processes)

    def text(self) -> str:
        return os.pread(self.output.fileno(), 1 << 20, 0).decode(errors="replace")


def complete_checkpoints(run: Path) -> list[Path]:
    """Return complete checkpoints: with state, metadata, and each file that the metadata names."""
    return [path for path in sorted(run.glob("checkpoints/step-*")) if _is_complete(path)]


def _is_complete(path: Path) -> bool:
    if not (path / "state.json").exists() or not (path / ".metadata").exists():
        return False
    parts = pickle.loads((path / ".metadata").read_bytes()).storage_data.values()
    ends = ((path / part.relative_path, part.offset + part.length) for part in parts)
    return all(file.exists() and file.stat().st_size >= end for file, end in ends)


def losses(run: Path) -> dict[int, float]:
    """Return the loss of each step; each step must appear once."""
    entries = [
        json.loads(line)
        for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        if line.endswith("}")
    ]
    curve = {entry["step"]: entry["loss"] for entry in entries}
    assert len(curve) == len(entries), f"{run}/metrics.jsonl has a step twice"
    return curve


def exported(run: Path) -> bytes:
    (file,) = run.glob("*/*model.safetensors")  # a model or an adapter
    return file.read_bytes()


if __name__ == "__main__":
    main()
