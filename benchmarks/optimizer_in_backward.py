"""Peak memory and time of full fine-tuning with optimizer_in_backward=false and true, on CPU processes.

    python benchmarks/optimizer_in_backward.py
    python benchmarks/optimizer_in_backward.py --processes 2 --layers 4

A model of random weights in fp32 and AdamW take 12 bytes a parameter, gradients 4 more.
"""

import argparse
import json
import os
import tempfile
from pathlib import Path

from kill_and_resume import MODEL, Launch, make_inputs

SIZE = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16}
PARAMETERS_A_LAYER = 4 * 1024**2 + 3 * 1024 * 4096
ROWS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=4)
    options = parser.parse_args()

    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"  # glibc gives what is freed back at once: resident is in use
    gradients = 4 * options.layers * PARAMETERS_A_LAYER / 2**30
    print(f"{options.layers} layers: gradients of {gradients:.2f} GiB in all processes together")
    print(f"{'processes':<12}{'in backward':<14}{'peak GiB a process':>20}{'seconds a step':>16}  losses")
    with tempfile.TemporaryDirectory() as folder:
        settings = make_inputs(Path(folder))
        shape = MODEL | SIZE | {"num_hidden_layers": options.layers}
        (Path(folder) / "model" / "config.json").write_text(json.dumps(shape), encoding="utf-8")
        for processes in options.processes:
            for in_backward in ("false", "true"):
                run = Path(folder) / f"{processes}-{in_backward}"
                found = measure(run, settings, processes, in_backward, options.steps)
                print(
                    f"{processes:<12}{in_backward:<14}{found[-1]['peak_memory_gib']:>20.2f}"
                    f"{min(step['step_seconds'] for step in found):>16.2f}  "
                    + " ".join(f"{step['loss']:.6f}" for step in found),
                    flush=True,
                )


def measure(run: Path, settings: list[str], processes: int, in_backward: str, steps: int) -> list[dict]:
    """The metrics of each step."""
    launch = Launch(
        [
            *settings, "from_scratch=true", f"output_dir={run}", f"max_steps={steps}", "max_grad_norm=null",
            "checkpointer.every=null", f"global_batch_size={ROWS}", f"micro_batch_size={ROWS // processes}", 
            "optimizer.lr=1e-4", f"optimizer_in_backward={in_backward}", "memory.activation_checkpointing=full",
        ],
        processes,
    )  # fmt: skip
    launch.wait()
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


if __name__ == "__main__":
    main()
