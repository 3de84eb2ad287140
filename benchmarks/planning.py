"""Compare `tune plan` with runs on this machine: predicted and measured peak memory (resident set) and step seconds.

    python benchmarks/planning.py WORK [PATTERN ...]

Each configuration is a separate run of a model wide enough for its memory to stand out from the interpreter's. WORK
stores the runs; existing ones are not repeated. PATTERNs select configurations by name. Times need an idle machine.
malloc is set to return freed memory, which it usually keeps: the plan does not predict what malloc keeps.
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
sys.path.insert(0, str(ROOT / "tests"))
from helpers import free_port, save_checkpoint  # noqa: E402

from tune.cli.plan import without_data  # noqa: E402
from tune.config import find_recipe  # noqa: E402
from tune.devices import DEVICES  # noqa: E402
from tune.plan import Job, calibrate  # noqa: E402

WORDS = [f"word{number}" for number in range(22)]
STEPS = int(os.environ.get("STEPS", "4"))  # memory peaks in the second step; times need more steps

FULL, LORA, QLORA = "full_finetune", "lora_finetune", "lora_finetune --config qlora"
PREFERENCE, REWARD, DISTILL = "preference_finetune", "reward_finetune", "distill"
SELECTIVE, ALL = "compute.activation_checkpointing=selective", "compute.activation_checkpointing=full"
# (model, processes, recipe, rows of a micro-batch, length, other settings). The machine is calibrated on the first.
CASES = [
    ("llama", 1, FULL, 1, 1024, ""),
    ("llama", 1, FULL, 8, 256, ""),
    ("llama", 1, FULL, 2, 1024, SELECTIVE),
    ("llama", 1, FULL, 1, 4096, ALL),
    ("llama", 1, FULL, 2, 512, "global_batch_size=4"),
    ("llama", 1, FULL, 4, 250, "packed=false"),
    ("llama", 1, LORA, 1, 2048, ""),
    ("llama", 1, LORA, 8, 250, "packed=false"),
    ("llama", 1, LORA, 2, 2048, ALL),
    ("llama", 1, QLORA, 4, 512, ""),
    ("llama", 2, FULL, 1, 1024, "global_batch_size=2"),
    ("llama", 2, FULL, 2, 1024, f"global_batch_size=4 {ALL}"),
    ("llama", 2, LORA, 2, 1024, "global_batch_size=4"),
    ("llama", 2, FULL, 2, 512, "parallel.tp=2"),
    ("llama", 4, FULL, 1, 1024, "global_batch_size=4"),
    ("llama", 4, LORA, 1, 1024, f"global_batch_size=4 {ALL}"),
    ("qwen3", 1, FULL, 1, 512, ""),
    ("qwen3", 1, FULL, 4, 256, SELECTIVE),
    ("qwen3", 1, FULL, 1, 2048, ALL),
    ("qwen3", 1, LORA, 4, 512, ""),
    ("qwen3", 1, LORA, 1, 2048, SELECTIVE),
    ("qwen3", 1, QLORA, 2, 512, ""),
    ("qwen3", 1, QLORA, 1, 2048, ALL),
    ("qwen3", 2, FULL, 2, 512, "global_batch_size=4"),
    ("qwen3", 2, LORA, 1, 1024, "global_batch_size=2"),
    ("qwen3", 4, FULL, 1, 512, "global_batch_size=4"),
    ("mixtral", 1, FULL, 2, 512, ""),
    ("mixtral", 1, FULL, 1, 1024, ALL),
    ("mixtral", 1, FULL, 4, 250, "packed=false"),
    ("mixtral", 1, LORA, 2, 512, ""),
    ("mixtral", 1, LORA, 8, 256, SELECTIVE),
    ("mixtral", 1, QLORA, 2, 1024, ""),
    ("mixtral", 2, FULL, 1, 512, "global_batch_size=2"),
    ("mixtral", 2, LORA, 2, 512, "global_batch_size=4"),
    ("smollm2", 1, FULL, 1, 512, ""),
    ("smollm2", 1, FULL, 4, 512, ALL),
    ("gemma3", 1, FULL, 1, 512, ""),
    ("gemma3", 1, FULL, 2, 512, "global_batch_size=4"),
    ("gemma3", 1, LORA, 2, 512, ""),
    ("llama", 1, PREFERENCE, 2, 512, ""),
    ("llama", 1, PREFERENCE, 4, 512, "adapter.rank=8 reference=adapter_off"),
    ("llama", 1, PREFERENCE, 1, 512, "adapter.rank=8 reference={qwen3}"),
    ("llama", 1, PREFERENCE, 2, 512, "loss._component_=tune.losses.KTO dataset.kind=labelled"),
    ("llama", 1, REWARD, 2, 512, ""),
    ("llama", 1, REWARD, 4, 512, "adapter.rank=8"),
    ("llama", 1, DISTILL, 2, 512, "teacher.path={qwen3} teacher.dtype=fp32"),
    ("llama", 1, DISTILL, 4, 512, "adapter.rank=8 teacher.path={qwen3} teacher.dtype=fp32"),
    ("llama", 1, DISTILL, 1, 512, "adapter.rank=8 teacher.path={qwen3} teacher.dtype=fp32 teacher.top_k=8"),
    ("llama", 2, DISTILL, 2, 512, "global_batch_size=4 teacher.path={qwen3} teacher.dtype=fp32"),
]
SHAPES = {
    "llama": {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8,
              "num_key_value_heads": 4, "vocab_size": 8192},
    "qwen3": {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 6, "num_attention_heads": 12,
              "num_key_value_heads": 4, "head_dim": 64, "tie_word_embeddings": True, "vocab_size": 32768},
    "mixtral": {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 5, "num_attention_heads": 8,
                "num_key_value_heads": 4, "num_local_experts": 8, "vocab_size": 8192},
    "smollm2": {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 9,
                "num_key_value_heads": 3, "tie_word_embeddings": True, "vocab_size": 49152},
    "gemma3": {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 6, "num_attention_heads": 4,
               "num_key_value_heads": 1, "head_dim": 128, "tie_word_embeddings": True, "vocab_size": 98304},
}  # fmt: skip
CLASSES = {
    "llama": "LlamaConfig", "qwen3": "Qwen3Config", "mixtral": "MixtralConfig", "smollm2": "LlamaConfig",
    "gemma3": "Gemma3TextConfig",
}  # fmt: skip


def data(recipe: str, others: str, folder: Path) -> Path:
    """Write documents, or answers, that are longer than a row. A letter is a token. Documents fill rows."""
    kind = "text" if recipe not in (PREFERENCE, REWARD) else "labelled" if "KTO" in others else "pairs"
    file = folder / f"{kind}.jsonl"
    if not file.exists():
        draw = random.Random(0)
        texts = [" ".join(draw.choices(WORDS, k=400)) for _ in range(400)]
        if kind == "text":
            texts = [json.dumps({"text": " ".join(texts[at : at + 7])[: 16 * 1024 - 1]}) for at in range(0, 400, 7)]
        if kind == "pairs":
            texts = [json.dumps({"prompt": each[:9], "chosen": each, "rejected": each[::-1]}) for each in texts]
        if kind == "labelled":
            texts = [json.dumps({"prompt": t[:9], "completion": t, "label": not n % 2}) for n, t in enumerate(texts)]
        file.write_text("\n".join(texts), encoding="utf-8")
    return file


def model(kind: str, folder: Path) -> str:
    if not (folder / kind).exists():
        save_checkpoint(folder / kind, CLASSES[kind], max_position_embeddings=8192, **SHAPES[kind])
    return str(folder / kind)


def measured(case: tuple, folder: Path) -> tuple[str, list[str], list[dict], Path]:
    """Yield the name of a configuration, its command line, the metrics of its steps, and its folder."""
    kind, processes, recipe, rows, length, others = case
    name = f"{kind} {recipe.split()[-1].removesuffix('_finetune')} {rows} x {length} on {processes} {others}".strip()
    run = folder / "runs" / re.sub(r"\W+", "-", name)
    sizes = f"micro_batch_size={rows} max_seq_len={length}"
    sizes += "" if "global_batch_size" in others else f" global_batch_size={rows}"
    fixed = "compute.dtype=fp32 device=cpu" + ("" if recipe in (PREFERENCE, REWARD) else " dataset.train_on=all")
    fixed += "" if "packed" in others or recipe in (PREFERENCE, REWARD) else " packed=true"
    fixed += " dataset.too_long=truncate" if recipe == REWARD else ""
    ends = f"max_steps={STEPS} checkpointer.every=null"  # a checkpoint at the end
    others = others.format(**{each: model(each, folder) for each in SHAPES if each in others})
    command = [*recipe.split(), f"model.path={model(kind, folder)}", *f"{fixed} {sizes} {others} {ends}".split()]
    file = run / "metrics.jsonl"
    if not file.exists() or len(file.read_text(encoding="utf-8").splitlines()) < STEPS:
        launcher = [f"--nproc-per-node={processes}", f"--master-port={free_port()}"] if processes > 1 else []
        places = [f"dataset.path={data(recipe, others, folder)}", f"output_dir={run}"]
        environment = os.environ | {
            "PYTHONPATH": str(ROOT),
            "TUNE_CACHE": str(folder / "cache"),
            "MALLOC_MMAP_THRESHOLD_": "65536",
        }
        verbs = [["run", *launcher]]
        if "top_k" not in others:  # with top_k, the run itself must query the teacher
            verbs.insert(0, ["prepare"])  # tokenizing leaves memory behind, which the plan does not include
        for verb in verbs:
            run_ = [sys.executable, "-m", "tune.cli", *verb, *command, *places]
            done = subprocess.run(run_, env=environment, capture_output=True, text=True)
        if done.returncode:
            print(name, done.stdout[-500:], done.stderr[-1500:])
    return (
        name,
        command,
        [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else [],
        run,
    )


def main() -> None:
    if len(sys.argv) < 2 or "--help" in sys.argv:
        sys.exit(__doc__)
    folder, patterns = Path(sys.argv[1]), sys.argv[2:]
    folder.mkdir(parents=True, exist_ok=True)
    device, errors = None, {"GiB": [], "s": []}
    for case in CASES:
        if device and patterns and not any(pattern in " ".join(map(str, case)) for pattern in patterns):
            continue
        name, command, metrics, run = measured(case, folder)
        if not metrics:
            continue
        recipe = find_recipe(command[0])
        device = device or calibrate(run, DEVICES["cpu"], recipe)
        job = Job(without_data(command[0], command[1:]), device, case[1], recipe)
        plan = job.plan(job.layout()).as_dict()
        seconds = statistics.median(each["step_seconds"] - each["data_seconds"] for each in metrics[1:])
        pairs = {
            "GiB": (plan["memory_gib"]["total"], metrics[-1]["peak_memory_gib"]),
            "s": (plan["step_seconds"], seconds),
        }
        line = f"{name:<80}"
        for unit, (before, found) in pairs.items():
            errors[unit].append(abs(before / found - 1))
            line += f" {before:6.2f} {unit} planned, {found:6.2f} measured ({before / found - 1:+.1%});"
        print(line, plan["peak_at"], flush=True)
    for unit, found in errors.items():
        print(f"{unit}: without the first median error {statistics.median(found[1:]):.1%}, worst {max(found[1:]):.1%}")


if __name__ == "__main__":
    main()
