"""The same fine-tuning in several libraries. benchmarks/finetune.py runs each in a separate process:

    python benchmarks/finetune_variants.py VARIANT JOB.json

All start from the same fp32 weights, use the same rows in the same order, supervise the same tokens, and use AdamW
(fused) at a constant learning rate with gradients clipped to 1. With `lora_rank` they train LoRA adapters in all linear
layers except the head, the other libraries with PEFT; B starts at zero, A at random numbers of each library. Each
batches, pads and attends in its own way. No activation checkpointing. tune reads and tokenizes the data itself; the
others get its tokenized rows.
"""

import contextlib
import json
import resource
import runpy
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

RECIPES = Path(__file__).parents[1] / "recipes"
BETAS, EPS, MAX_GRAD_NORM = (0.9, 0.95), 1e-8, 1.0


@dataclass
class Job:
    """One run. `started`: the start of its process, in seconds of `time.time()`."""

    folder: str
    model: str
    data: str
    packed: bool
    rows_per_step: int
    micro_batch: int
    max_seq_len: int
    steps: int
    learning_rate: float
    threads: int
    lora_rank: int = 0  # 0: all parameters are trained
    started: float = 0.0

    @property
    def rows_file(self) -> Path:
        return Path(self.folder).parent / "rows.json"

    def rows(self) -> list[list[dict]]:
        """Return the rows of all steps in order; a row is a list of documents with `tokens` and unshifted `labels`."""
        return [row for step in json.loads(self.rows_file.read_text(encoding="utf-8"))["steps"] for row in step]


def prepare(job: Job) -> None:
    """Write the rows of each step in the recipe's order."""
    from tune.datasets import DataLoader, load
    from tune.tokenizers import Tokenizer

    dataset = load(Tokenizer(job.model), job.data, max_seq_len=job.max_seq_len, packed=job.packed)
    data = DataLoader(dataset, None, job.rows_per_step, job.micro_batch, max_steps=job.steps)
    batches = [batch for _, batch in data]
    if len(dataset) < job.steps * job.rows_per_step:
        kind = "packed rows" if job.packed else "rows"
        sys.exit(
            f"{job.data} has {len(dataset)} {kind}; {job.steps} steps of {job.rows_per_step} need more: lower --steps"
        )

    def document(sample) -> dict[str, list[int]]:
        # transformers puts a label at its own token; tune puts it one earlier, where it is predicted.
        labels = [-100, *sample.labels[:-1].tolist()]
        return {"tokens": sample.tokens.tolist(), "labels": labels}

    rows = {
        "steps": [[[document(sample) for sample in dataset.row(row)] for row in batch.rows] for batch in batches],
        "tokens": [batch.num_tokens for batch in batches],
        "supervised_tokens": [batch.num_supervised for batch in batches],
    }
    job.rows_file.write_text(json.dumps(rows), encoding="utf-8")


def tune(job: Job) -> list[float]:
    recipe = str(RECIPES / ("lora_finetune.py" if job.lora_rank else "full_finetune.py"))
    adapter = [f"adapter.rank={job.lora_rank}", f"adapter.alpha={2 * job.lora_rank}"] if job.lora_rank else []
    sys.argv = [
        recipe, *adapter, f"model.path={job.model}", f"dataset.path={job.data}", f"output_dir={job.folder}/run",
        "device=cpu", "compute.dtype=fp32", f"max_seq_len={job.max_seq_len}",
        f"packed={job.packed}", f"max_steps={job.steps}", f"global_batch_size={job.rows_per_step}",
        f"micro_batch_size={job.micro_batch}",
        f"optimizer.lr={job.learning_rate}", f"optimizer.betas={list(BETAS)}", f"optimizer.eps={EPS}",
        "schedule.warmup=0", "schedule.min_ratio=1", f"max_grad_norm={MAX_GRAD_NORM}", "checkpointer.every=null",
    ]  # fmt: skip
    runpy.run_path(recipe, run_name="__main__")
    return [json.loads(line)["loss"] for line in open(f"{job.folder}/run/metrics.jsonl", encoding="utf-8")]


def bare(job: Job) -> list[float]:
    """Train transformers' model in a plain loop, one row at a time, without padding."""
    import torch

    rows = job.rows()
    model = pretrained(job.model)
    if job.lora_rank:
        import peft

        model = peft.get_peft_model(model, lora_config(job))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=job.learning_rate, betas=BETAS, eps=EPS, weight_decay=0.0, fused=True)
    losses = []
    for step in range(job.steps):
        batch = [flat(row) for row in rows[step * job.rows_per_step :][: job.rows_per_step]]
        supervised = sum(label != -100 for row in batch for label in row["labels"])
        losses.append(0.0)
        for row in batch:
            inputs = {name: torch.tensor([row[name]]) for name in ("input_ids", "labels", "position_ids")}
            loss = model(**inputs, num_items_in_batch=supervised, use_cache=False).loss
            loss.backward()
            losses[-1] += loss.item()
        torch.nn.utils.clip_grad_norm_(trained, MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def trl(job: Job, padding_free: bool = False) -> list[float]:
    import datasets
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    datasets.disable_progress_bars()
    columns = ("input_ids", "labels", "seq_lengths")
    rows = datasets.Dataset.from_list([{name: row[name] for name in columns} for row in map(flat, job.rows())])
    settings = SFTConfig(
        output_dir=job.folder, use_cpu=True, bf16=False, max_steps=job.steps,
        per_device_train_batch_size=job.micro_batch, gradient_accumulation_steps=job.rows_per_step // job.micro_batch,
        packing=job.packed, padding_free=padding_free, max_length=None,
        dataset_kwargs={"skip_prepare_dataset": True}, train_sampling_strategy="sequential",
        optim="adamw_torch_fused", learning_rate=job.learning_rate, lr_scheduler_type="constant", weight_decay=0.0,
        adam_beta1=BETAS[0], adam_beta2=BETAS[1], adam_epsilon=EPS, max_grad_norm=MAX_GRAD_NORM,
        gradient_checkpointing=False, save_strategy="no", logging_steps=1, report_to="none", disable_tqdm=True,
    )  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(job.model)
    adapter = lora_config(job) if job.lora_rank else None
    trainer = SFTTrainer(
        pretrained(job.model), settings, train_dataset=rows, processing_class=tokenizer, peft_config=adapter
    )
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def trl_padding_free(job: Job) -> list[float]:
    """Train with TRL, with the rows of a micro-batch joined into one instead of padded to the longest."""
    return trl(job, padding_free=True)


def torchtune(job: Job) -> list[float]:
    """Train with torchtune's full_finetune_single_device; only Llama models with a tied head and plain RoPE."""
    if job.lora_rank:
        sys.exit("torchtune: only full fine-tuning is compared")
    import torchtune as library
    import yaml

    shape = json.loads(Path(job.model, "config.json").read_text(encoding="utf-8"))
    rope = shape.get("rope_parameters") or {"rope_theta": shape.get("rope_theta"), **(shape.get("rope_scaling") or {})}
    plain_rope = rope.get("rope_type", "default") == "default"
    if shape["model_type"] != "llama" or not shape["tie_word_embeddings"] or not plain_rope:
        sys.exit("torchtune: this script only supports Llama models with a tied head and plain RoPE")
    recipe = Path(library.__file__).parents[1] / "recipes/full_finetune_single_device.py"
    settings = {
        "model": {
            "_component_": "torchtune.models.llama3_2._component_builders.llama3_2",
            "vocab_size": shape["vocab_size"],
            "num_layers": shape["num_hidden_layers"],
            "num_heads": shape["num_attention_heads"],
            "num_kv_heads": shape["num_key_value_heads"],
            "embed_dim": shape["hidden_size"],
            "intermediate_dim": shape["intermediate_size"],
            "max_seq_len": job.max_seq_len,
            "rope_base": int(rope["rope_theta"]),
            "norm_eps": shape["rms_norm_eps"],
            "scale_factor": 1,  # 1 turns off Llama 3's scaling
        },
        "checkpointer": {
            "_component_": "torchtune.training.FullModelHFCheckpointer",
            "checkpoint_dir": job.model,
            "checkpoint_files": ["model.safetensors"],
            "output_dir": job.folder,
            "model_type": "LLAMA3_2",
        },
        "tokenizer": {"_component_": "finetune_variants.PadOnly"},
        "dataset": {"_component_": "finetune_variants.torchtune_rows", "job": asdict(job), "packed": job.packed},
        "optimizer": {
            "_component_": "torch.optim.AdamW",
            "lr": job.learning_rate,
            "betas": list(BETAS),
            "eps": EPS,
            "weight_decay": 0.0,
            "fused": True,
        },
        "loss": {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"},
        "metric_logger": {
            "_component_": "torchtune.training.metric_logging.DiskLogger",
            "log_dir": job.folder,
            "filename": "torchtune.log",
        },
        "output_dir": job.folder,
        "batch_size": job.micro_batch,
        "gradient_accumulation_steps": job.rows_per_step // job.micro_batch,
        "clip_grad_norm": MAX_GRAD_NORM,
        "max_steps_per_epoch": job.steps,
        "epochs": 1,
        "seed": 0,
        "shuffle": False,
        "device": "cpu",
        "dtype": "fp32",
        "compile": False,
        "optimizer_in_bwd": False,
        "enable_activation_checkpointing": False,
        "enable_activation_offloading": False,
        "resume_from_checkpoint": False,
    }
    config = Path(job.folder, "torchtune.yaml")
    config.write_text(yaml.safe_dump(settings), encoding="utf-8")
    sys.argv = [str(recipe), "--config", str(config)]
    with contextlib.suppress(SystemExit):  # the recipe ends with it
        runpy.run_path(str(recipe), run_name="__main__")
    log = Path(job.folder, "torchtune.log").read_text(encoding="utf-8").splitlines()
    return [float(line.split("loss:")[1].split()[0]) for line in log if line.startswith("Step ")]


class PadOnly:
    """The minimal tokenizer that torchtune needs for tokenized data."""

    pad_id = 0


def torchtune_rows(tokenizer: PadOnly, job: dict, packed: bool) -> list[dict]:
    rows = [flat(row) for row in Job(**job).rows()]
    if not packed:
        return [{"tokens": row["input_ids"], "labels": row["labels"]} for row in rows]
    return [padded(row, job["max_seq_len"]) for row in rows]


def padded(row: dict[str, list[int]], length: int) -> dict:
    """Build a packed row like torchtune's PackedDataset: the padding is a document."""
    import torch

    missing = length - len(row["input_ids"])
    return {
        "tokens": torch.tensor(row["input_ids"] + [PadOnly.pad_id] * missing),
        "labels": torch.tensor(row["labels"] + [-100] * missing),
        "input_pos": torch.tensor(row["position_ids"] + list(range(missing))),
        "seq_lens": torch.tensor(row["seq_lengths"] + ([missing] if missing else [])),
    }


def flat(row: list[dict]) -> dict[str, list[int]]:
    """Concatenate the documents of a row."""
    lengths = [len(document["tokens"]) for document in row]
    return {
        "input_ids": [token for document in row for token in document["tokens"]],
        "labels": [label for document in row for label in document["labels"]],
        "position_ids": [position for length in lengths for position in range(length)],
        "seq_lengths": lengths,
    }


def pretrained(folder: str):
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").train()


def lora_config(job: Job):
    from peft import LoraConfig

    return LoraConfig(r=job.lora_rank, lora_alpha=2 * job.lora_rank, target_modules="all-linear", task_type="CAUSAL_LM")


VARIANTS = {"tune": tune, "trl": trl, "trl_padding_free": trl_padding_free, "bare": bare, "torchtune": torchtune}


def measure(variant: str, job: Job) -> None:
    """Train, and write `result.json`: the end of each optimizer step, the peak memory until then, and its loss."""
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    torch.set_num_threads(job.threads)
    ends, peaks = [], []

    def after_step(*_) -> None:
        ends.append(time.time() - job.started)
        unit = 1 if sys.platform == "darwin" else 2**10
        peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30)

    register_optimizer_step_post_hook(after_step)
    losses = VARIANTS[variant](job)
    result = {"ends": ends, "peak_gib": peaks[-1], "losses": losses}
    Path(job.folder, "result.json").write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    name, path = sys.argv[1:]
    job = Job(**json.loads(Path(path).read_text(encoding="utf-8")))
    if name == "prepare":
        prepare(job)
    else:
        measure(name, job)
