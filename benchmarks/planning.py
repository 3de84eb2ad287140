"""`tune plan` against runs on this machine: peak memory (resident set) and seconds of a step, predicted and measured.

    python benchmarks/planning.py memory WORK --model FOLDER
    python benchmarks/planning.py time WORK

Each configuration is a run of its own; WORK keeps the runs, and what is there is not run again. The
machine is calibrated on the first one. `time` needs a machine that does nothing else.
malloc is told to give freed memory back, which as a rule it keeps: what it keeps is not predicted.
"""

import json
import os
import random
import re
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
WORDS = [f"word{number}" for number in range(22)]
STEPS = 4

# name: (model, processes, recipe, settings)
FULL, LORA, QLORA = "full_finetune", "lora_finetune", "lora_finetune --config qlora"
MEMORY = {
    "full, 256": ("given", 1, FULL, "max_seq_len=256"),
    "full, 512": ("given", 1, FULL, "max_seq_len=512"),
    "full, 512, selective": ("given", 1, FULL, "max_seq_len=512 memory.activation_checkpointing=selective"),
    "full, 1024, full": ("given", 1, FULL, "max_seq_len=1024 memory.activation_checkpointing=full"),
    "full, 4 x 256": ("given", 1, FULL, "max_seq_len=256 micro_batch_size=4 global_batch_size=4"),
    "full, 2 x 2 x 256": ("given", 1, FULL, "max_seq_len=256 micro_batch_size=2 global_batch_size=4"),
    "full, 256, bf16 states": ("given", 1, FULL, "max_seq_len=256 dtype=bf16 master_dtype=bf16"),
    "lora, 512": ("given", 1, LORA, "max_seq_len=512"),
    "lora, 1024, full": ("given", 1, LORA, "max_seq_len=1024 memory.activation_checkpointing=full"),
    "lora, 1024, selective": ("given", 1, LORA, "max_seq_len=1024 memory.activation_checkpointing=selective"),
    "qlora, 512": ("given", 1, QLORA, "max_seq_len=512"),
    "qlora, 2 x 512": ("given", 1, QLORA, "max_seq_len=512 micro_batch_size=2 global_batch_size=2"),
    "full, 256, 2 processes": ("given", 2, FULL, "max_seq_len=256 global_batch_size=2"),
    "full, 512, full, 2 processes": (
        "given", 2, FULL, "max_seq_len=512 global_batch_size=2 memory.activation_checkpointing=full"),
    "full, 256, tp 2": ("given", 2, FULL, "max_seq_len=256 parallel.tp=2"),
    "lora, 512, 2 processes": ("given", 2, LORA, "max_seq_len=512 global_batch_size=2"),
    "wide qwen3, full, 512": ("Qwen3Config", 1, FULL, "max_seq_len=512"),
    "wide qwen3, lora, 2048": ("Qwen3Config", 1, LORA, "max_seq_len=2048"),
    "mixtral, full, 512": ("MixtralConfig", 1, FULL, "max_seq_len=512"),
    "mixtral, lora, 2 x 512": ("MixtralConfig", 1, LORA, "max_seq_len=512 micro_batch_size=2 global_batch_size=2"),
}  # fmt: skip
SMALL = "LlamaConfig"
TIME = {
    "full, 2 x 512": (SMALL, 1, FULL, "max_seq_len=512 micro_batch_size=2 global_batch_size=2"),
    "full, 512": (SMALL, 1, FULL, "max_seq_len=512"),
    "full, 4 x 256": (SMALL, 1, FULL, "max_seq_len=256 micro_batch_size=4 global_batch_size=4"),
    "full, 1024, full": (SMALL, 1, FULL, "max_seq_len=1024 memory.activation_checkpointing=full"),
    "full, 2 of 512": (SMALL, 1, FULL, "max_seq_len=512 global_batch_size=2"),
    "lora, 1024": (SMALL, 1, LORA, "max_seq_len=1024"),
    "lora, 1024, selective": (SMALL, 1, LORA, "max_seq_len=1024 memory.activation_checkpointing=selective"),
    "qlora, 512": (SMALL, 1, QLORA, "max_seq_len=512"),
    "full, 2048": (SMALL, 1, FULL, "max_seq_len=2048"),
}
SHAPES = {
    "Qwen3Config": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 6, "num_attention_heads": 16,
                    "num_key_value_heads": 8, "head_dim": 64, "tie_word_embeddings": False, "vocab_size": 32768},
    "MixtralConfig": {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 8,
                      "num_key_value_heads": 4, "num_local_experts": 8, "vocab_size": 16384},
    "LlamaConfig": {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6, "num_attention_heads": 4,
                    "num_key_value_heads": 2, "vocab_size": 4096},
}  # fmt: skip


def text(folder: Path) -> Path:
    file = folder / "text.txt"
    if not file.exists():
        draw = random.Random(0)
        file.write_text("\n".join(" ".join(draw.choices(WORDS, k=200)) for _ in range(400)))
    return file


def model(kind: str, folder: Path, given: str) -> str:
    if kind == "given":
        return given
    if not (folder / kind).exists():
        sys.path.insert(0, str(ROOT / "tests"))
        from helpers import save_checkpoint

        save_checkpoint(folder / kind, kind, max_position_embeddings=8192, **SHAPES[kind])
    return str(folder / kind)


def arguments(recipe: str, path: str, settings: str) -> list[str]:
    fixed = "dtype=fp32 packed=true dataset.train_on=all device=cpu global_batch_size=1 micro_batch_size=1"
    return [*recipe.split(), f"model.path={path}", *fixed.split(), *settings.split()]


def measured(name: str, case: tuple, folder: Path, given: str) -> tuple[list[str], list[dict], Path]:
    kind, processes, recipe, settings = case
    run = folder / "runs" / re.sub(r"\W+", "-", name)
    command = arguments(recipe, model(kind, folder, given), settings)
    file = run / "metrics.jsonl"
    if not file.exists() or len(file.read_text().splitlines()) < STEPS:
        launcher = [f"--nproc-per-node={processes}", "--master-port=0"] if processes > 1 else []
        ends = [f"dataset.path={text(folder)}", f"max_steps={STEPS}", f"output_dir={run}", "checkpointer.every=null"]
        environment = os.environ | {
            "PYTHONPATH": str(ROOT),
            "TUNE_CACHE": str(folder / "cache"),
            "MALLOC_MMAP_THRESHOLD_": "65536",
        }
        run_ = [sys.executable, "-m", "tune.cli", "run", *launcher, *command, *ends]
        done = subprocess.run(run_, env=environment, capture_output=True, text=True)
        if done.returncode:
            print(name, done.stdout[-500:], done.stderr[-1500:])
    return command, [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else [], run


def tune(*arguments: str) -> str:
    run = [sys.executable, "-m", "tune.cli", *arguments]
    done = subprocess.run(run, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert not done.returncode, done.stderr[-1500:]
    return done.stdout


def main() -> None:
    if len(sys.argv) < 3 or "--help" in sys.argv:
        sys.exit(__doc__)
    kind, folder = sys.argv[1], Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    given = sys.argv[sys.argv.index("--model") + 1] if "--model" in sys.argv else ""
    cases = MEMORY if kind == "memory" else TIME
    runs = {name: measured(name, case, folder, given) for name, case in cases.items()}
    device, errors = "cpu", {"GiB": [], "s": []}
    for name, (command, metrics, run) in runs.items():
        if not metrics:
            continue
        if device == "cpu":
            device = str(run / "device.json")
            tune("plan", "--calibrate", str(run), "--device", "cpu")
        plan = json.loads(tune("plan", *command, "--world-size", str(cases[name][1]), "--device", device, "--json"))
        seconds = statistics.median(each["step_seconds"] - each["data_seconds"] for each in metrics[1:])
        pairs = {
            "GiB": (plan["memory_gib"]["total"], metrics[-1]["peak_memory_gib"]),
            "s": (plan["step_seconds"], seconds),
        }
        line = f"{name:<32}"
        for unit, (before, found) in pairs.items():
            errors[unit].append(abs(before / found - 1))
            line += f" {before:6.2f} {unit} planned, {found:6.2f} measured ({before / found - 1:+.1%});"
        print(line, plan["peak_at"], flush=True)
    for unit, found in errors.items():
        print(f"{unit}: without the first median error {statistics.median(found[1:]):.1%}, worst {max(found[1:]):.1%}")


if __name__ == "__main__":
    main()
