"""Compare preference tuning and reward models with TRL: equal losses for 20 steps, and the speed of DPO with adapters.

    python benchmarks/trl_preferences.py --model FOLDER            # losses, of a tiny random Llama with its tokenizer
    python benchmarks/trl_preferences.py --model FOLDER --speed    # tokens/s and peak memory of the model itself

Both use the same weights, rows, order, fp32 and AdamW, without dropout and packing. Where TRL computes something else
(`OURS_IN_TRL`), TRL is changed, so that the rest must be equal; `--as-is` leaves TRL unchanged.
"""

import argparse
import contextlib
import importlib
import io
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
ROWS = 4  # per optimizer step
PAD = "<|endoftext|>"  # for reward models: transformers gives the pad row no gradient, but the end token needs one
LOSSES = {  # tune's settings, TRL's trainer and its settings
    "DPO": ([], "DPO", {"beta": 0.1}),
    "IPO": (["loss.beta=0.1"], "DPO", {"beta": 0.1, "loss_type": ["ipo"]}),
    "SimPO": (["loss.beta=2.0", "loss.gamma=0.5"], "CPO",
              {"beta": 2.0, "simpo_gamma": 0.5, "loss_type": "simpo", "cpo_alpha": 0.0}),
    "CPO": ([], "CPO", {"beta": 0.1}),
    "ORPO": ([], "ORPO", {"beta": 0.1}),
    "KTO": (["dataset.kind=labelled"], "KTO", {"beta": 0.1}),
    "reward": (["loss.center=0.01"], "Reward", {"center_rewards_coefficient": 0.01, "pad_token": PAD}),
}  # fmt: skip
OURS_IN_TRL = {
    "CPO": "NLL is the mean over an answer's tokens; TRL's is that over the tokens of a micro-batch: one of a row",
    "ORPO": "NLL is that of the answer; TRL's is that of prompt and answer",
    "KTO": "a mismatched answer is that of the next row; TRL's is that of the row before in the micro-batch",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a model's folder")
    parser.add_argument("--losses", nargs="+", choices=LOSSES, default=list(LOSSES))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--as-is", action="store_true", help="keep TRL's choices that differ from tune's")
    parser.add_argument("--speed", action="store_true", help="DPO with adapters of rank 16, one process per run")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each (with --speed)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", str(options.threads))
    if options.one:
        return run_one(options)
    if options.speed:
        return speed(options)
    with tempfile.TemporaryDirectory() as folder:
        kinds = ("LlamaForCausalLM", "LlamaForSequenceClassification")
        policy, scorer = (tiny(options.model, Path(folder) / kind, kind) for kind in kinds)
        for name in options.losses:
            run = Path(folder) / name
            run.mkdir()
            small = scorer if name == "reward" else policy
            rows = write_rows(small, run, options.steps, labelled=name == "KTO")
            with contextlib.redirect_stdout(io.StringIO()):
                mine = ours(name, small, run, options.steps)
                trls = theirs(name, small, run, rows, options.steps, options.as_is)
            curves = mine, trls
            assert [len(each) for each in curves] == [options.steps] * 2
            worst = max(abs(a - b) / abs(b) for a, b in zip(*curves, strict=True))
            first, last = ([f"{curve[at]:.6f}" for curve in curves] for at in (0, -1))
            print(
                f"{name:6} first {' '.join(first)}  last {' '.join(last)}  difference at most {worst:.1e}", flush=True
            )


def tiny(model: str, folder: Path, kind: str) -> str:
    """Write a random Llama with the vocabulary and tokenizer of `model`."""
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    if kind == "LlamaForSequenceClassification":
        tokenizer.pad_token = PAD
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    shape = transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.05, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id, num_labels=1,
    )  # fmt: skip
    getattr(transformers, kind)(shape).save_pretrained(folder)
    return str(folder)


def write_rows(model: str, folder: Path, steps: int, labelled: bool = False) -> list[dict]:
    """Write requests, each with its answer (chosen) and the next request's answer after a phrase (rejected). Returns
    the rows in a run's order."""
    from tune.datasets import DataLoader, load
    from tune.tokenizers import Tokenizer

    chats = [json.loads(line)["messages"] for line in DATA.read_text(encoding="utf-8").splitlines()][: steps * ROWS + 1]
    rows = []
    for number in range(steps * ROWS):
        prompt = f"Request: {chats[number][-2]['content']}\nCommand:"
        answers = [f" {chats[number][-1]['content']}", f" Sure, I can do that: {chats[number + 1][-1]['content']}"]
        if labelled:
            rows.append({"prompt": prompt, "completion": answers[number % 3 == 0], "label": number % 3 != 0})
        else:
            rows.append({"prompt": prompt, "chosen": answers[0], "rejected": answers[1]})
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    kind = "labelled" if labelled else "preferences"
    data = load(Tokenizer(model), str(file), max_seq_len=2048, kind=kind)
    order = [row for _, batch in DataLoader(data, None, ROWS, ROWS, max_steps=steps) for row in batch.rows]
    assert len(data) == len(rows) == len(order)
    mismatched = [
        {**row, "mismatched": rows[(number + 1) % len(rows)].get("completion")} for number, row in enumerate(rows)
    ]
    return [mismatched[index] for index in order]


def ours(name: str, model: str, folder: Path, steps: int, *settings: str) -> list[float]:
    from tune import config

    recipe, loss = ("reward_finetune", "BradleyTerry") if name == "reward" else ("preference_finetune", name)
    sys.path.insert(0, str(config.find_recipe(recipe).parent))
    importlib.import_module(recipe).main(
        config.load(
            recipe,
            [
                f"model.path={model}", f"dataset.path={folder / 'rows.jsonl'}", f"output_dir={folder / 'run'}",
                f"loss._component_=tune.losses.{loss}", *LOSSES[name][0], "device=cpu", "compute.dtype=fp32",
                f"global_batch_size={ROWS}", f"micro_batch_size={ROWS}", f"max_steps={steps}", "optimizer.lr=1e-4",
                "schedule._component_=tune.optimizers.constant", "schedule.warmup=0", "checkpointer.every=null",
                "trackers=[{_component_: tune.loggers.Console, every: 1000}]", *settings,
            ],
        )
    )  # fmt: skip
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    measures(folder, sum(line["tokens"] for line in lines[1:]), sum(line["step_seconds"] for line in lines[1:]))
    return [line["loss"] for line in lines]


def theirs(
    name: str, model: str, folder: Path, rows: list[dict], steps: int, as_is: bool, lora: int = 0, **settings
) -> list[float]:
    import datasets
    import torch
    import transformers
    import trl
    from trl.experimental import cpo, orpo

    class AnswersORPO(orpo.ORPOTrainer):
        def concatenated_forward(self, model, batch):
            chosen, *others = super().concatenated_forward(model, batch)
            return (chosen, *others[:3], -chosen.mean(), *others[4:])

    class Clock(transformers.TrainerCallback):
        def __init__(self):
            self.ends = []

        def on_step_end(self, args, state, control, **_):
            self.ends.append(time.perf_counter())

    datasets.disable_progress_bars()
    trainers = {
        "DPO": (trl.DPOTrainer, trl.DPOConfig),
        "CPO": (cpo.CPOTrainer, cpo.CPOConfig),
        "ORPO": (orpo.ORPOTrainer if as_is else AnswersORPO, orpo.ORPOConfig),
        "KTO": (trl.KTOTrainer, trl.KTOConfig),
        "Reward": (trl.RewardTrainer, trl.RewardConfig),
    }
    _, kind, own = LOSSES[name]
    trainer_class, config_class = trainers[kind]
    micro = 1 if name in ("CPO", "ORPO") and not as_is else ROWS
    tokenizer = transformers.AutoTokenizer.from_pretrained(model, bos_token=None)
    columns = ("prompt", "completion", "label") if kind == "KTO" else ("prompt", "chosen", "rejected")
    data = [{key: row[key] for key in columns} for row in rows]
    if kind == "KTO":  # it does not add one
        data = [{**row, "completion": row["completion"] + tokenizer.eos_token} for row in data]
    adapter = None
    if lora:
        import peft

        adapter = peft.LoraConfig(r=lora, lora_alpha=2 * lora, target_modules="all-linear", task_type="CAUSAL_LM")
    clock = Clock()
    head = "SequenceClassification" if kind == "Reward" else "CausalLM"
    trainer = trainer_class(
        getattr(transformers, f"AutoModelFor{head}").from_pretrained(model, dtype=torch.float32),
        args=config_class(
            output_dir=str(folder / "trl"), use_cpu=True, bf16=False, max_steps=steps, max_length=2048,
            per_device_train_batch_size=micro, gradient_accumulation_steps=ROWS // micro,
            train_sampling_strategy="sequential", optim="adamw_torch_fused", learning_rate=1e-4,
            lr_scheduler_type="constant", weight_decay=0.0, adam_beta1=0.9, adam_beta2=0.95, adam_epsilon=1e-8,
            max_grad_norm=1.0, gradient_checkpointing=False, save_strategy="no", logging_steps=1, report_to="none",
            disable_tqdm=True, **own, **settings,
        ),
        train_dataset=datasets.Dataset.from_list(data), processing_class=tokenizer, peft_config=adapter,
        callbacks=[clock],
    )  # fmt: skip
    if kind == "KTO" and not as_is:
        answers = [tokenizer(row["mismatched"] + tokenizer.eos_token)["input_ids"] for row in rows]
        kept = trainer.train_dataset.remove_columns("KL_completion_ids")
        trainer.train_dataset = kept.add_column("KL_completion_ids", answers)
    trainer.train()
    measures(folder, None, clock.ends[-1] - clock.ends[0])
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def measures(folder: Path, tokens: int | None, seconds: float) -> None:
    """Record the cost of a run without its first step."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    (folder / "measures.json").write_text(
        json.dumps({"tokens": tokens, "seconds": seconds, "peak": peak}), encoding="utf-8"
    )


VARIANTS = {
    "tune, precomputed": ("ours", ["reference=precomputed"]),
    "TRL, precomputed": ("theirs", {"precompute_ref_log_probs": True}),
    "tune, adapter off": ("ours", ["reference=adapter_off"]),
    "TRL, adapter off": ("theirs", {}),
}


def run_one(options: argparse.Namespace) -> None:
    name, folder = options.one.split("|")
    side, settings = VARIANTS[name]
    rows = write_rows(options.model, Path(folder), options.steps)
    adapter = ["adapter.rank=16", "adapter.alpha=32"]
    if side == "ours":
        losses = ours("DPO", options.model, Path(folder), options.steps, *adapter, *settings)
    else:
        losses = theirs("DPO", options.model, Path(folder), rows, options.steps, True, lora=16, **settings)
    file = Path(folder) / "measures.json"
    file.write_text(json.dumps({**json.loads(file.read_text(encoding="utf-8")), "losses": losses}), encoding="utf-8")


def speed(options: argparse.Namespace) -> None:
    found: dict[str, list[dict]] = {name: [] for name in VARIANTS}
    for _ in range(options.rounds):
        for name, runs in found.items():
            with tempfile.TemporaryDirectory() as folder:
                command = [
                    sys.executable, __file__, "--model", options.model, "--steps", str(options.steps), "--threads",
                    str(options.threads), "--one", f"{name}|{folder}",
                ]  # fmt: skip
                subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
                runs.append(json.loads((Path(folder) / "measures.json").read_text(encoding="utf-8")))
    tokens = next(run["tokens"] for runs in found.values() for run in runs if run["tokens"])  # the same rows for all
    for name, runs in found.items():
        seconds = median(run["seconds"] for run in runs)
        print(
            f"{name:18} {tokens / seconds:8.1f} tokens/s  {median(run['peak'] for run in runs):5.2f} GiB  losses "
            f"{runs[0]['losses'][0]:.6f} to {runs[0]['losses'][-1]:.6f}"
        )


if __name__ == "__main__":
    main()
