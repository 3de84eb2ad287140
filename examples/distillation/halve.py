"""Distill a model that knows home commands into one with half its blocks, and compare with training on labels alone.

    python examples/distillation/halve.py MODEL [--steps N]      from the top of the repository

MODEL is a chat model's folder; `make model` gets one. The teacher is MODEL after `full_finetune`; the student starts
with every second block of the teacher.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

from safetensors.torch import load_file, save_file

from tune.tokenizers import Tokenizer

HOME = "examples/home_commands"
LAYER = re.compile(r"(?<=\blayers\.)\d+")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL", type=Path)
    parser.add_argument("--steps", type=int, help="stop each training after this many optimizer steps")
    parser.add_argument("--rows", type=int, help="answer only this many of the held-out requests")
    parser.add_argument("--out", type=Path, default=Path(".demo/distillation"), help="the run folders, recreated")
    options = parser.parse_args()
    shutil.rmtree(options.out, ignore_errors=True)
    teacher, student, distilled, labelled = (options.out / name for name in ("teacher", "half", "distilled", "labels"))
    steps = [f"max_steps={options.steps}"] if options.steps else []

    def train(recipe: str, model: Path, run: Path, *settings: str) -> None:
        paths = [f"model.path={model}", f"output_dir={run}"]
        tune("run", recipe, "--config", f"{HOME}/demo.yaml", *paths, *steps, *settings)

    train("full_finetune", options.model, teacher, "optimizer.lr=1e-4")
    halve(teacher / "model", student)
    from_teacher = [f"teacher.path={teacher / 'model'}", "teacher.dtype=fp32", "optimizer.lr=5e-4"]
    train("distill", student, distilled, *from_teacher)
    train("full_finetune", student, labelled, "optimizer.lr=5e-4")
    for what, run in {"teacher": teacher, "distilled": distilled, "labels only": labelled}.items():
        data = [f"dataset.path={HOME}/validation.jsonl", "score=tune.evaluation.exact_match"]
        limit = ["--limit", str(options.rows)] if options.rows else []
        tune("eval", str(run), "--out", f"{run}.json", "--max-new-tokens", "32", *limit, *data)
        print(f"{what}: {json.loads(Path(f'{run}.json').read_text(encoding='utf-8'))['results']}")


def halve(folder: Path, out: Path) -> None:
    """Write to `out` a model with every second block of the one in `folder`, both in Hugging Face layout."""
    Tokenizer(str(folder)).save(out)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    tensors = {}
    for file in folder.glob("*.safetensors"):
        for name, tensor in load_file(file).items():
            layer = LAYER.search(name)
            if layer is None or int(layer[0]) % 2 == 0:
                tensors[LAYER.sub(lambda number: str(int(number[0]) // 2), name)] = tensor
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    config["num_hidden_layers"] = (config["num_hidden_layers"] + 1) // 2
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def tune(*command: str) -> None:
    print("$ tune", *command, flush=True)
    subprocess.run([sys.executable, "-m", "tune.cli", *command], check=True)


if __name__ == "__main__":
    main()
