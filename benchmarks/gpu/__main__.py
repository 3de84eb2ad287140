"""Check that this GPU computes correctly, and measure its speed: one page of results to paste into an issue.

    make gpu                                # one GPU, 8 minutes or less
    make gpu ONLY="attention lora-8b"       # some parts
    make gpu LONG=1                         # and all layouts on 2 to 8 GPUs
    make gpu DEVICE=cpu                     # the same on tiny models, to test the benchmark itself
    python benchmarks/gpu --list

Correctness comes first: fp32 curves against the CPU's, bf16, a resumed run, and attention, NF4 and the sampler against
their definitions. Then speed: recipes from the command line, sampling, and TRL (with Liger) if it is installed. Models
have random weights in the shapes of Llama-3.2-1B, Llama-3.1-8B and Qwen3-30B-A3B with 4 layers; nothing is downloaded.
A failing part shows its last lines, and the others continue. Exits with 1 if a check or a part fails.
"""

import argparse
import datetime
import math
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench import ROOT, Bench, Check, Failed, Result, Skipped
from layouts import LAYOUTS
from page import in_words, page
from parts import CORRECTNESS, SPEED, Part

ROOM = 45e9  # bytes for the checkpoints and runs of all parts
PARTS = CORRECTNESS | SPEED | LAYOUTS
SECONDS, SECONDS_LONG = 480, 1800


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", nargs="+", choices=PARTS, metavar="PART", help="default: all")
    parser.add_argument(
        "--limit", type=float, metavar="SECONDS", help=f"total time (default {SECONDS}, with --long {SECONDS_LONG})"
    )
    parser.add_argument("--out", type=Path, default=Path("gpu_results.md"), help="the page (default gpu_results.md)")
    parser.add_argument(
        "--folder", type=Path, help="for inputs and runs (default: /dev/shm if it has room, else the temporary folder)"
    )
    parser.add_argument("--long", action="store_true", help="also all layouts on 2 to 8 devices, 30 minutes in total")
    parser.add_argument("--list", action="store_true", help="print the names of the parts")
    options = parser.parse_args()
    if options.list:
        return print("\n".join(PARTS))
    begin, limit = time.monotonic(), options.limit or (SECONDS_LONG if options.long else SECONDS)
    names = options.only or CORRECTNESS | SPEED | (LAYOUTS if options.long else {})
    with tempfile.TemporaryDirectory(dir=options.folder or roomy_folder(), prefix="tune-gpu-") as folder:
        bench = Bench(Path(folder), options.device, begin + limit)
        (machine,) = bench.script("machine.py", options.device, limit=60)
        bench.memory, bench.devices = machine["memory"], machine["devices"]
        results, notes = run_all(bench, {name: PARTS[name] for name in names}, machine["versions"])
    facts = {
        "device": machine["device"],
        "host": machine["host"],
        "versions": ", ".join(f"{name} {version}" for name, version in machine["versions"].items()),
        "tune": commit(),
        "command": f"`python benchmarks/gpu {shlex.join(sys.argv[1:])}`".replace(" `", "`"),
        "measured": f"{datetime.date.today()}, in {time.monotonic() - begin:.0f} seconds",
    }
    text = page(f"`make gpu`: {machine['device'].partition(',')[0]}", facts, results, notes)
    options.out.write_text(text, encoding="utf-8")
    print(f"\n{text}\nThis page is in {options.out}")
    wrong = any(isinstance(result, Check) and not result.passed for result in results)
    sys.exit(wrong or any(not note.startswith("skipped") for note in notes.values()))


def run_all(bench: Bench, parts: dict[str, Part], versions: dict[str, str]) -> tuple[list[Result], dict[str, str]]:
    """Return the results of all parts, and notes on parts without results. Checks share the device while the
    checkpoints of the other parts are written."""
    of_checks = {name: part for name, part in parts.items() if name in CORRECTNESS}
    of_speed = {name: part for name, part in parts.items() if name not in CORRECTNESS}
    found: dict[str, list[Result]] = {}
    notes: dict[str, str] = {}

    def run(name: str) -> None:
        part, begin = parts[name], time.monotonic()
        try:
            if missing := [package for package in part.packages if package not in versions]:
                raise Skipped(f"{', '.join(missing)} is not installed")
            bench.require_memory(part.memory)
            for result in part.measure(bench, name):
                found.setdefault(name, []).append(result)
            outcome = "\n    ".join(["", *map(in_words, found[name])])
        except Skipped as why:
            outcome = notes[name] = f"skipped: {why}"
        except Failed as failure:
            outcome = notes[name] = str(failure)
        except Exception as error:  # continue with the other parts
            outcome = notes[name] = f"{type(error).__name__}: {error}"
        print(f"{name} ({time.monotonic() - begin:.0f} s): {outcome}", flush=True)

    bench.threads = 2
    with ThreadPoolExecutor(1) as writer, ThreadPoolExecutor(max(1, (os.cpu_count() or 2) // 2)) as pool:
        try:
            write_inputs(bench, {"tiny"} | shapes_of(of_checks))
            writing = writer.submit(write_inputs, bench, shapes_of(of_speed))
            list(pool.map(run, of_checks))
            writing.result()
        except BaseException:  # e.g. Ctrl-C, which other processes do not get
            bench.deadline = -math.inf
            raise
    bench.threads = None
    for name in of_speed:
        run(name)
    return [result for name in parts for result in found.get(name, [])], notes


def shapes_of(parts: dict[str, Part]) -> set[str]:
    return {shape for part in parts.values() for shape in part.shapes}


def write_inputs(bench: Bench, shapes: set[str]) -> None:
    """Write the missing checkpoints, each in a separate process. If one fails, only the parts that need it fail."""
    for shape in sorted({bench.model(shape).name for shape in shapes}):
        if not (bench.folder / shape).exists():
            try:
                bench.script("inputs.py", bench.folder, shape, "--device", bench.device, limit=120)
            except (Failed, Skipped) as why:
                print(f"the checkpoint of {shape} was not written: {why}", flush=True)


def roomy_folder() -> str:
    memory = Path("/dev/shm")
    return str(memory) if memory.is_dir() and shutil.disk_usage(memory).free > ROOM else tempfile.gettempdir()


def commit() -> str:
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    found = subprocess.run(git, capture_output=True, text=True)
    return found.stdout.strip() if found.returncode == 0 else "not in a git repository"


if __name__ == "__main__":
    main()
