"""Compare GRPO with TRL: steps/s and peak memory with the same prompts, group size and lengths of completions.

    python benchmarks/trl_grpo.py --model FOLDER [--lora 16]

Both start from the model in FOLDER, in fp32, and sample completions of the same requests at temperature 1 with
different random numbers: lengths differ only by chance, and their mean is printed. The reward is the share of letters.
The loss is that of `recipes/grpo.py`, in TRL `cispo` without scaled rewards. TRL generates with transformers. Each run
is a separate process, and rounds alternate. Time is measured from the end of the first optimizer step to the end of the
last. CPU seconds of all threads are more reliable than wall time on a busy machine.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

HERE = Path(__file__).parent
DATA = HERE.parent / "examples/home_commands/train.jsonl"
ENDS: list[tuple[float, float]] = []  # ends of optimizer steps, in wall and CPU seconds


def letters(row: dict, completion: str) -> float:
    return sum(each.isalpha() for each in completion) / max(len(completion), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a model's folder")
    parser.add_argument("--data", default=str(DATA), help="JSONL of conversations; their last messages are dropped")
    parser.add_argument("--lora", type=int, default=0, help="rank of adapters in all linear layers; 0: all parameters")
    parser.add_argument("--prompts", type=int, default=4, help="prompts per step")
    parser.add_argument("--group", type=int, default=8, help="completions per prompt")
    parser.add_argument("--new", type=int, default=32, help="tokens per completion")
    parser.add_argument("--micro", type=int, default=16, help="completions per forward and backward")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", str(options.threads))
    if options.one:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        register_optimizer_step_post_hook(lambda *_: ENDS.append((time.perf_counter(), time.process_time())))
        side, folder = options.one.split("|")
        return (ours if side == "tune" else theirs)(options, Path(folder))
    found: dict[str, list[dict]] = {"tune": [], "TRL": []}
    for _ in range(options.rounds):
        for side, runs in found.items():
            with tempfile.TemporaryDirectory() as folder:
                write_prompts(options, Path(folder))
                command = [sys.executable, __file__, *sys.argv[1:], "--one", f"{side}|{folder}"]
                subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
                runs.append(json.loads((Path(folder) / "measures.json").read_text(encoding="utf-8")))
    for side, runs in found.items():
        names = "seconds", "cpu_seconds", "peak", "completion_tokens"
        seconds, cpu, peak, tokens = (median(run[name] for run in runs) for name in names)
        print(f"{side:5} {seconds:6.2f} s a step, {cpu:6.2f} CPU s  {peak:5.2f} GiB  {tokens:.1f} tokens a completion")


def write_prompts(options: argparse.Namespace, folder: Path) -> None:
    rows = [json.loads(line)["messages"][:-1] for line in Path(options.data).read_text(encoding="utf-8").splitlines()]
    used = rows[: options.steps * options.prompts]
    (folder / "prompts.jsonl").write_text(
        "".join(json.dumps({"messages": row}) + "\n" for row in used), encoding="utf-8"
    )


def ours(options: argparse.Namespace, folder: Path) -> None:
    from tune import config

    sys.path[:0] = [str(HERE), str(config.find_recipe("grpo").parent)]
    import grpo

    adapter = [f"adapter.rank={options.lora}", f"adapter.alpha={2 * options.lora}"] if options.lora else []
    grpo.main(
        config.load(
            "grpo",
            [
                f"model.path={options.model}", f"dataset.path={folder}/prompts.jsonl", f"output_dir={folder}/run",
                "reward=trl_grpo.letters", f"group_size={options.group}", f"prompts_per_step={options.prompts}",
                f"sampling.max_new_tokens={options.new}", f"micro_batch_size={options.micro}", "device=cpu",
                "compute.dtype=fp32", "optimizer.lr=1e-5", "checkpointer.every=null",
                "trackers=[{_component_: tune.loggers.Console, every: 1000}]", *adapter,
            ],
        )
    )  # fmt: skip
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    keep(folder, [line["completion_tokens"] for line in lines])


def theirs(options: argparse.Namespace, folder: Path) -> None:
    import datasets
    import torch
    import transformers
    import trl

    def reward(completions: list, **_) -> list[float]:
        return [letters({}, completion[0]["content"]) for completion in completions]

    datasets.disable_progress_bars()
    prompts = [
        json.loads(line)["messages"] for line in (folder / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    adapter = None
    if options.lora:
        import peft

        adapter = peft.LoraConfig(
            r=options.lora, lora_alpha=2 * options.lora, target_modules="all-linear", task_type="CAUSAL_LM"
        )
    trainer = trl.GRPOTrainer(
        transformers.AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32),
        reward_funcs=reward,
        args=trl.GRPOConfig(
            output_dir=str(folder / "trl"), use_cpu=True, bf16=False, max_steps=options.steps, beta=0.0,
            num_generations=options.group, max_completion_length=options.new, temperature=1.0, scale_rewards="none",
            loss_type="cispo", epsilon_high=2.0, per_device_train_batch_size=options.micro,
            gradient_accumulation_steps=options.prompts * options.group // options.micro,
            optim="adamw_torch_fused", learning_rate=1e-5, lr_scheduler_type="constant", weight_decay=0.0,
            adam_beta1=0.9, adam_beta2=0.95, adam_epsilon=1e-8, max_grad_norm=1.0, gradient_checkpointing=False,
            save_strategy="no", logging_steps=1, report_to="none", disable_tqdm=True,
        ),
        train_dataset=datasets.Dataset.from_dict({"prompt": prompts}),
        processing_class=transformers.AutoTokenizer.from_pretrained(options.model),
        peft_config=adapter,
    )  # fmt: skip
    trainer.train()
    logged = [entry["completions/mean_length"] for entry in trainer.state.log_history if "loss" in entry]
    keep(folder, logged)


def keep(folder: Path, lengths: list[float]) -> None:
    """Return the cost of a step, without the first, and the mean length of the completions."""
    seconds, cpu_seconds = ((last - first) / (len(ENDS) - 1) for first, last in zip(ENDS[0], ENDS[-1], strict=True))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    tokens = sum(lengths[1:]) / len(lengths[1:])
    found = {"seconds": seconds, "cpu_seconds": cpu_seconds, "peak": peak, "completion_tokens": tokens}
    (folder / "measures.json").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
