"""Full fine-tuning side by side: tune, TRL, torchtune, and a bare loop over transformers' model.

    python benchmarks/finetune.py --model FOLDER [--data chats.jsonl] [--rows-per-step 4 --micro-batch 4 --max-seq-len 512]

The same weights, rows, order, supervised tokens, precision (fp32) and optimizer for all (finetune_variants.py), on CPU. Each
run is a process of its own, rounds alternate, and medians are reported. Wants a quiet machine.

torchtune's last release (0.6.1) does not import with a current torchao. An older one beside it will do:

    pip install --no-deps --target TORCHTUNE torchtune==0.6.1 torchao==0.9.0 sentencepiece tiktoken blobfile pycryptodomex lxml
    python benchmarks/finetune.py --model FOLDER --torchtune-path TORCHTUNE
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median

from finetune_variants import VARIANTS, Job

HERE = Path(__file__).parent
DATA = HERE.parent / "examples/home_commands/train.jsonl"


def main():
    options = parse()
    libraries = ", ".join(f"{name} {installed(name)}" for name in ("torch", "transformers", "trl", "torchtune"))
    print(f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; {libraries}")
    for packed in [layout == "packed" for layout in options.layouts]:
        with tempfile.TemporaryDirectory() as folder:
            compare(options, packed, Path(folder))


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a chat model's folder")
    parser.add_argument("--data", default=str(DATA), help="conversations (default: those of examples/home_commands)")
    parser.add_argument("--rows-per-step", type=int, default=4, help="global batch (default 4)")
    parser.add_argument("--micro-batch", type=int, default=4, help="rows in a forward; bare has always 1 (default 4)")
    parser.add_argument("--max-seq-len", type=int, default=512)
    parser.add_argument("--steps", type=int, default=6, help="optimizer steps of a run; the first is not timed (default 6)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each variant (default 3)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--learning-rate", type=float, default=2e-5)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--layouts", nargs="+", choices=("unpacked", "packed"), default=("unpacked", "packed"))
    parser.add_argument("--torchtune-path", help="a folder with torchtune and a torchao that it works with")
    options = parser.parse_args()
    if options.rows_per_step % options.micro_batch:
        parser.error("--rows-per-step must be a multiple of --micro-batch")
    if options.steps < 2:
        parser.error("--steps must be at least 2: the first is not timed")
    return options


def compare(options, packed, folder):
    job = Job(
        folder=str(folder / "prepare"), model=options.model, data=options.data, packed=packed,
        rows_per_step=options.rows_per_step, micro_batch=options.micro_batch, max_seq_len=options.max_seq_len,
        steps=options.steps, learning_rate=options.learning_rate, threads=options.threads,
    )  # fmt: skip
    prepared = run("prepare", job)
    if prepared.returncode:
        sys.exit(prepared.stderr)
    rows = json.loads(job.rows_file.read_text())
    variants = [name for name in options.variants if not (packed and name == "trl_padding_free")]  # there it is trl itself
    results, reasons = {name: [] for name in variants}, {}
    for turn in range(options.rounds):
        for name in variants:
            if name in reasons:
                continue
            job = replace(job, folder=str(folder / name))
            finished = run(name, job, options.torchtune_path if name == "torchtune" else None)
            if finished.returncode:
                reasons[name] = finished.stderr.strip().splitlines()[-1]
            else:
                results[name].append(json.loads((folder / name / "result.json").read_text()))
            print(f"{'packed' if packed else 'unpacked'}, round {turn + 1}: {name} {reasons.get(name, 'done')}", file=sys.stderr)
    report(options, packed, rows, {name: runs for name, runs in results.items() if name not in reasons}, reasons)


def run(name, job, extra_path=None):
    """Run a variant in a new process and an empty folder."""
    subprocess.run(["rm", "-rf", job.folder], check=True)
    Path(job.folder).mkdir(parents=True)
    path = Path(job.folder, "job.json")
    path.write_text(json.dumps(asdict(replace(job, started=time.time()))))
    places = [str(HERE), *([extra_path] if extra_path else []), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"OMP_NUM_THREADS": str(job.threads), "PYTHONPATH": os.pathsep.join(filter(None, places))}
    command = [sys.executable, str(HERE / "finetune_variants.py"), name, str(path)]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def report(options, packed, rows, results, reasons):
    later_tokens, later_supervised = sum(rows["tokens"][1:]), sum(rows["supervised_tokens"][1:])
    steady = {name: median(run["ends"][-1] - run["ends"][0] for run in runs) for name, runs in results.items()}
    print(
        f"\n{'packed' if packed else 'unpacked'}: {options.rows_per_step} rows of at most {options.max_seq_len} tokens a step, "
        f"{options.micro_batch} in a forward; {options.steps} steps with {sum(rows['tokens'])} tokens, "
        f"{sum(rows['supervised_tokens'])} supervised; fp32, {options.threads} threads, median of {options.rounds}"
    )
    header = ("tokens/s", "supervised/s", "to TRL", "to bare", "first step", "peak GiB", "losses of the first steps")
    print(f"{'':17}{header[0]:>9}{header[1]:>14}{header[2]:>8}{header[3]:>9}{header[4]:>12}{header[5]:>10}  {header[6]}")
    for name, runs in results.items():
        ratios = [f"{steady[base] / steady[name]:.2f}x" if base in steady else "-" for base in ("trl", "bare")]
        first_step = median(run["ends"][0] for run in runs)
        peak = median(run["peak_gib"] for run in runs)
        losses = "  ".join(f"{loss:.6f}" for loss in runs[0]["losses"][:3])
        print(
            f"{name:17}{later_tokens / steady[name]:9.1f}{later_supervised / steady[name]:14.1f}{ratios[0]:>8}{ratios[1]:>9}"
            f"{first_step:10.1f} s{peak:10.2f}  {losses}"
        )
    for name, reason in reasons.items():
        print(f"{name:17}not run: {reason}")
    firsts = [runs[0]["losses"][0] for runs in results.values()]
    print(f"first losses differ by at most {max(firsts) - min(firsts):.1e}" if firsts else "")


def installed(name):
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


if __name__ == "__main__":
    main()
