"""Compare distillation with TRL's GKD: equal losses for 20 steps.

    python benchmarks/trl_distillation.py --model FOLDER [--as-is]

The model in FOLDER teaches home commands to a tiny random Llama with the same tokenizer. Both use the same weights,
rows, order, fp32 and AdamW. TRL also supervises the text of the chat template after the end of an answer: this is
masked for the comparison, and kept with `--as-is`.
"""

import argparse
import contextlib
import io
import json
import sys
import tempfile
from pathlib import Path

from trl_preferences import DATA, ROWS, tiny

LOSSES = {  # tune's settings, and TRL's beta
    "forward KL": (["loss._component_=tune.losses.ForwardKL"], 0.0),
    "reverse KL": (["loss._component_=tune.losses.ReverseKL"], 1.0),
    "Jensen-Shannon, 0.5": (["loss._component_=tune.losses.JensenShannon", "loss.beta=0.5"], 0.5),
    "Jensen-Shannon, 0.1": (["loss._component_=tune.losses.JensenShannon", "loss.beta=0.1"], 0.1),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="the teacher's folder")
    parser.add_argument("--losses", nargs="+", choices=LOSSES, default=list(LOSSES))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--as-is", action="store_true", help="TRL's own labels")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        student = tiny(options.model, Path(folder) / "student")
        for name in options.losses:
            with contextlib.redirect_stdout(io.StringIO()):
                curves = ours(name, student, options, Path(folder) / name), theirs(name, student, options, folder)
            assert [len(each) for each in curves] == [options.steps] * 2
            worst = max(abs(a - b) / abs(b) for a, b in zip(*curves, strict=True))
            first, last = ([f"{curve[at]:.6f}" for curve in curves] for at in (0, -1))
            print(
                f"{name:20} first {' '.join(first)}  last {' '.join(last)}  difference at most {worst:.1e}", flush=True
            )


def ours(name: str, student: str, options: argparse.Namespace, run: Path) -> list[float]:
    from tune import config

    sys.path.insert(0, str(config.find_recipe("distill").parent))
    import distill

    distill.main(
        config.load(
            "distill",
            [
                f"model.path={student}", f"teacher.path={options.model}", f"dataset.path={DATA}", f"output_dir={run}",
                "teacher.dtype=fp32", *LOSSES[name][0], "device=cpu", "compute.dtype=fp32", f"global_batch_size={ROWS}",
                f"micro_batch_size={ROWS}", f"max_steps={options.steps}", "optimizer.lr=1e-3",
                "schedule._component_=tune.optimizers.constant", "schedule.warmup=0", "checkpointer.every=null",
                "trackers=[{_component_: tune.loggers.Console, every: 1000}]",
            ],
        )
    )  # fmt: skip
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def theirs(name: str, student: str, options: argparse.Namespace, folder: str) -> list[float]:
    import datasets
    import torch
    import transformers
    from trl.experimental.gkd import GKDConfig, GKDTrainer
    from trl.experimental.utils import DataCollatorForChatML

    from tune.datasets import DataLoader, load
    from tune.tokenizers import Tokenizer

    datasets.disable_progress_bars()
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)
    collator = DataCollatorForChatML(tokenizer=tokenizer, max_length=2048)

    def until_the_end(examples: list[dict]) -> dict:
        batch = collator(examples)
        for row in batch["labels"]:
            row[int((row == tokenizer.eos_token_id).nonzero().max()) + 1 :] = -100
        return batch

    data = load(Tokenizer(student), str(DATA), max_seq_len=2048)
    order = [row for _, batch in DataLoader(data, None, ROWS, ROWS, max_steps=options.steps) for row in batch.rows]
    chats = [json.loads(line)["messages"] for line in DATA.read_text(encoding="utf-8").splitlines()]
    assert len(data) == len(chats)  # rows are numbered as in the file
    trainer = GKDTrainer(
        transformers.AutoModelForCausalLM.from_pretrained(student, dtype=torch.float32),
        teacher_model=transformers.AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32),
        args=GKDConfig(
            output_dir=f"{folder}/trl", lmbda=0.0, beta=LOSSES[name][1], temperature=1.0, max_length=2048,
            use_cpu=True, bf16=False, max_steps=options.steps, per_device_train_batch_size=ROWS,
            train_sampling_strategy="sequential", optim="adamw_torch_fused", learning_rate=1e-3,
            lr_scheduler_type="constant", weight_decay=0.0, adam_beta1=0.9, adam_beta2=0.95, adam_epsilon=1e-8,
            max_grad_norm=1.0, gradient_checkpointing=False, save_strategy="no", logging_steps=1, report_to="none",
            disable_tqdm=True,
        ),
        data_collator=collator if options.as_is else until_the_end,
        train_dataset=datasets.Dataset.from_list([{"messages": chats[row]} for row in order]),
        processing_class=tokenizer,
    )  # fmt: skip
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    main()
