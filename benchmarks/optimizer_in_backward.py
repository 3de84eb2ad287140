"""Measure peak memory and time of full fine-tuning with updates after the backward and inside it, on CPU processes.

    python benchmarks/optimizer_in_backward.py
    python benchmarks/optimizer_in_backward.py --processes 2 --layers 4

The latter is a copy of full_finetune, changed as in docs/changes.md. fp32 weights and AdamW take 12 bytes per
parameter, gradients 4 more. The weights are random.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

from kill_and_resume import MODEL, Launch, make_inputs

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from update_in_backward import in_backward

from tune import config

SIZE = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16}
PARAMETERS_A_LAYER = 4 * 1024**2 + 3 * 1024 * 4096
ROWS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=4)
    options = parser.parse_args()

    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"  # glibc returns freed memory at once: resident means in use
    gradients = 4 * options.layers * PARAMETERS_A_LAYER / 2**30
    print(f"{options.layers} layers: gradients of {gradients:.2f} GiB in all processes together")
    print(f"{'processes':<12}{'updates':<14}{'peak GiB a process':>20}{'seconds a step':>16}  losses")
    with tempfile.TemporaryDirectory() as folder:
        recipe, *settings = make_inputs(Path(folder))
        after = Path(folder, "after")
        after.mkdir()
        shutil.copyfile(config.find_recipe(recipe), after / "mine.py")
        shutil.copyfile(config.find_config(recipe), after / "mine.yaml")
        ways = {
            "after": [random(after / "mine.py"), *settings, "max_grad_norm=null"],
            "in backward": [random(Path(in_backward(recipe, Path(folder)))), *settings],
        }
        shape = MODEL | SIZE | {"num_hidden_layers": options.layers}
        (Path(folder) / "model" / "config.json").write_text(json.dumps(shape), encoding="utf-8")
        (Path(folder) / "model" / "model.safetensors").unlink()  # from another size
        for processes in options.processes:
            for name, command in ways.items():
                run = Path(folder) / f"{processes}-{name}"
                found = measure(run, command, processes, options.steps)
                print(
                    f"{processes:<12}{name:<14}{found[-1]['peak_memory_gib']:>20.2f}"
                    f"{min(step['step_seconds'] for step in found):>16.2f}  "
                    + " ".join(f"{step['loss']:.6f}" for step in found),
                    flush=True,
                )


def random(script: Path) -> str:
    """Change a copied recipe to random initial weights, as in docs/changes.md. Return its path."""
    text = script.read_text(encoding="utf-8")
    read = "checkpointers.Pretrained(cfg.model.path, model)"
    assert text.count(read) == 1
    script.write_text(text.replace(read, "checkpointers.Random(cfg.seed)"), encoding="utf-8")
    return str(script)


def measure(run: Path, command: list[str], processes: int, steps: int) -> list[dict]:
    """Return the metrics of each step."""
    launch = Launch(
        [
            *command, f"output_dir={run}", f"max_steps={steps}", "checkpointer.every=null",
            f"global_batch_size={ROWS}", f"micro_batch_size={ROWS // processes}", "optimizer.lr=1e-4",
            "compute.activation_checkpointing=full",
        ],
        processes,
    )  # fmt: skip
    launch.wait()
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


if __name__ == "__main__":
    main()
