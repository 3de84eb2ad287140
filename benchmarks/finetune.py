"""Compare fine-tuning with tune, TRL, torchtune, and a bare loop over transformers' model. With --lora: adapters.

    python benchmarks/finetune.py --model FOLDER [--data chats.jsonl --rows-per-step 4 --micro-batch 4 --threads 2]

All use the same weights, rows, order, supervised tokens, precision (fp32) and optimizer (finetune_variants.py), on CPU.
Each run is a separate process, rounds alternate, and medians are reported. Needs a quiet machine.

torchtune's last release (0.6.1) does not import with a current torchao. Install it with an older one:

    pip install --no-deps --target TORCHTUNE torchtune==0.6.1 torchao==0.9.0 torchdata==0.11.0 \\
        sentencepiece tiktoken blobfile pycryptodomex lxml
    python benchmarks/finetune.py --model FOLDER --torchtune-path TORCHTUNE
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from importlib.metadata import distributions
from pathlib import Path
from statistics import median

from finetune_variants import VARIANTS, Job

HERE = Path(__file__).parent
DATA = HERE.parent / "examples/home_commands/train.jsonl"


def main() -> None:
    options = parse()
    machine = f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    print(f"{machine}; {versions(options.torchtune_path)}")
    for layout in options.layouts:
        with tempfile.TemporaryDirectory() as folder:
            compare(options, layout, Path(folder))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a chat model's folder")
    parser.add_argument("--data", default=str(DATA), help="conversations (default: examples/home_commands)")
    parser.add_argument("--rows-per-step", type=int, default=4, help="global batch (default 4)")
    parser.add_argument("--micro-batch", type=int, default=4, help="rows per forward; bare always has 1 (default 4)")
    parser.add_argument("--max-seq-len", type=int, default=512)
    parser.add_argument(
        "--steps", type=int, default=6, help="optimizer steps per run; the first is not timed (default 6)"
    )
    parser.add_argument("--rounds", type=int, default=3, help="runs of each variant (default 3)")
    parser.add_argument(
        "--lora", type=int, default=0, metavar="RANK", help="train adapters of this rank (TRL with PEFT)"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--learning-rate", type=float, default=2e-5)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--layouts", nargs="+", choices=("unpacked", "packed"), default=("unpacked", "packed"))
    parser.add_argument("--torchtune-path", help="a folder with torchtune and a compatible torchao")
    options = parser.parse_args()
    if options.rows_per_step % options.micro_batch:
        parser.error("--rows-per-step must be a multiple of --micro-batch")
    if options.steps < 2:
        parser.error("--steps must be at least 2: the first is not timed")
    return options


def compare(options: argparse.Namespace, layout: str, folder: Path) -> None:
    job = Job(
        folder=str(folder / "prepare"), model=options.model, data=options.data, packed=layout == "packed",
        rows_per_step=options.rows_per_step, micro_batch=options.micro_batch, max_seq_len=options.max_seq_len,
        steps=options.steps, learning_rate=options.learning_rate, threads=options.threads, lora_rank=options.lora,
    )  # fmt: skip
    prepared = run("prepare", job)
    if prepared.returncode:
        sys.exit(prepared.stderr)
    rows = json.loads(job.rows_file.read_text(encoding="utf-8"))
    results: dict[str, list[dict]] = {name: [] for name in options.variants}
    reasons: dict[str, str] = {}
    if job.packed and results.pop("trl_padding_free", None) is not None:
        reasons["trl_padding_free"] = "packing does this already"
    for turn in range(options.rounds):
        for name in [name for name in results if name not in reasons]:
            of_variant = replace(job, folder=str(folder / name))
            finished = run(name, of_variant, options.torchtune_path if name == "torchtune" else None)
            if finished.returncode:
                outcome = reasons[name] = (finished.stderr.strip().splitlines() or [f"exit {finished.returncode}"])[-1]
            else:
                result = json.loads(Path(of_variant.folder, "result.json").read_text(encoding="utf-8"))
                results[name].append(result)
                speed = sum(rows["tokens"][1:]) / (result["ends"][-1] - result["ends"][0])
                outcome = f"{speed:.1f} tokens/s, {result['peak_gib']:.2f} GiB"
            print(f"{layout}, round {turn + 1}: {name} {outcome}", file=sys.stderr)
    print(
        f"\n{f'LoRA of rank {options.lora}' if options.lora else 'full'}, {layout}: "
        f"{options.rows_per_step} rows of at most {options.max_seq_len} tokens a step, "
        f"{options.micro_batch} in a forward; {options.steps} steps with {sum(rows['tokens'])} tokens, "
        f"{sum(rows['supervised_tokens'])} supervised; fp32, {options.threads} threads, median of {options.rounds}"
    )
    report(rows, {name: runs for name, runs in results.items() if name not in reasons})
    for name, reason in reasons.items():
        print(f"{name:17}not run: {reason}")


def run(name: str, job: Job, extra_path: str | None = None) -> subprocess.CompletedProcess:
    """Run a variant in a new process and an empty folder."""
    shutil.rmtree(job.folder, ignore_errors=True)
    Path(job.folder).mkdir(parents=True)
    path = Path(job.folder, "job.json")
    path.write_text(json.dumps(asdict(replace(job, started=time.time()))), encoding="utf-8")
    places = [str(HERE), *([extra_path] if extra_path else []), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "OMP_NUM_THREADS": str(job.threads),
        "PYTHONPATH": os.pathsep.join(filter(None, places)),
    }
    command = [sys.executable, str(HERE / "finetune_variants.py"), name, str(path)]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def report(rows: dict[str, list], results: dict[str, list[dict]]) -> None:
    """Print the results. Tokens are without padding, from all steps but the first; peaks are at the end of the last."""
    tokens, supervised = sum(rows["tokens"][1:]), sum(rows["supervised_tokens"][1:])
    seconds = {name: median(run["ends"][-1] - run["ends"][0] for run in runs) for name, runs in results.items()}
    print(
        f"{'':17}{'tokens/s':>9}{'supervised/s':>14}{'to TRL':>8}{'to bare':>9}{'first step':>12}{'peak GiB':>10}"
        "  losses of the first steps"
    )
    for name, runs in results.items():
        to_trl, to_bare = (
            f"{seconds[base] / seconds[name]:.2f}x" if base in seconds else "-" for base in ("trl", "bare")
        )
        first_step, peak = median(run["ends"][0] for run in runs), median(run["peak_gib"] for run in runs)
        losses = "  ".join(f"{loss:.6f}" for loss in runs[0]["losses"][:3])
        print(
            f"{name:17}{tokens / seconds[name]:9.1f}{supervised / seconds[name]:14.1f}{to_trl:>8}{to_bare:>9}"
            f"{first_step:10.1f} s{peak:10.2f}  {losses}"
        )
    first_losses = [runs[0]["losses"][0] for runs in results.values()]
    if len(first_losses) > 1:
        print(f"the first losses differ by at most {max(first_losses) - min(first_losses):.1e}")


def versions(torchtune_path: str | None) -> str:
    found = {package.name: package.version for package in distributions()}
    if torchtune_path:
        beside = {package.name: package.version for package in distributions(path=[torchtune_path])}
        found |= {name: beside[name] for name in ("torchtune", "torchao") if name in beside}
    names = ("torch", "transformers", "trl", "peft", "torchtune", "torchao")
    return ", ".join(f"{name} {found.get(name, 'not installed')}" for name in names)


if __name__ == "__main__":
    main()
