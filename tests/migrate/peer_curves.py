"""Compare the loss curves of real LLaMA-Factory or axolotl configs, trained there and, after `tune migrate`, here.

    python tests/migrate/peer_curves.py llama_factory ~/lf/bin/python CONFIGS/llama_factory FOLDER

The second argument is the Python with the peer installed. Model and rows are tiny. All rows are one batch, so their
order does not matter.
"""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import yaml

sys.path.insert(0, str(Path(__file__).parents[1]))
from helpers import WORDS, make_adapter, save_checkpoint

from tune import config
from tune.cli import main

MARKED = (  # ChatML that also trains on the line break after the end of a turn, as in LLaMA-Factory
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "<|im_end|>\n{% endgeneration %}{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
)
LLAMA_FACTORY = """
{learning_rate: 1.0e-3, num_train_epochs: 6, warmup_ratio: 0.0, bf16: false, logging_steps: 1, use_cpu: true,
dataset: rows, per_device_train_batch_size: 2, gradient_accumulation_steps: 4, save_strategy: 'no', plot_loss: false,
preprocessing_num_workers: 1, dataloader_num_workers: 0, deepspeed: null, overwrite_output_dir: null, ddp_timeout: null}
"""
AXOLOTL = """
{learning_rate: 1.0e-3, num_epochs: 6, warmup_ratio: 0.0, bf16: false, logging_steps: 1, micro_batch_size: 8,
gradient_accumulation_steps: 1, optimizer: adamw_torch, tf32: false, gradient_checkpointing: false, save_strategy: 'no',
gradient_checkpointing_kwargs: null, evals_per_epoch: null, saves_per_epoch: null, val_set_size: 0, sequence_len: 512,
sample_packing: false, attn_implementation: sdpa, lora_dropout: 0.0, load_in_8bit: null, load_in_4bit: null,
model_type: null, tokenizer_type: null, special_tokens: null, lora_mlp_kernel: false, lora_qkv_kernel: false,
lora_o_kernel: false, plugins: null, fsdp_config: null, unfrozen_parameters: null, chat_template: tokenizer_default,
resize_token_embeddings_to_32x: null}
"""
CASES = {  # a config: its changes, and settings that undo differences that migrate reports
    "llama_factory": [
        ("train_full__qwen3_full_sft", {}, []),
        ("train_full__qwen3_full_sft", {}, ["marked"]),
        ("train_full__qwen3_full_sft", {"neat_packing": True, "cutoff_len": 512}, ["marked"]),
        ("train_lora__qwen3_lora_sft_ds3", {"adapter_name_or_path": "adapter"}, ["marked"]),
        ("train_lora__qwen3_lora_dpo", {"adapter_name_or_path": "adapter"}, ["marked"]),
        ("train_lora__qwen3_lora_dpo", {"adapter_name_or_path": "adapter", "pref_loss": "simpo"}, ["marked"]),
        ("train_lora__qwen3_lora_dpo", {"finetuning_type": "full"}, ["marked"]),
    ],
    "axolotl": [
        ("qwen3.5__27b-fft", {}, []),
        ("qwen3.5__27b-fft", {"micro_batch_size": 2, "gradient_accumulation_steps": 4}, []),
        ("llama-3__instruct-lora-8b", {"lora_model_dir": "adapter"}, []),
        ("phi__phi-qlora", {"adapter": "lora", "lora_model_dir": "adapter"}, []),
    ],
}
THERE = """
import json, sys
from transformers import Trainer
logged, log = [], Trainer.log
Trainer.log = lambda self, line, *rest, **named: (logged.append(dict(line)), log(self, line, *rest, **named))[1]
peer, file, losses = sys.argv[1:]
if peer == "axolotl":
    from axolotl.cli.train import do_cli
    do_cli(config=file)
else:
    import yaml
    from llamafactory.train.tuner import run_exp
    run_exp(yaml.safe_load(open(file)))
json.dump([float(line["loss"]) for line in logged if "loss" in line], open(losses, "w"))
"""


def compare(peer: str, python: str, source: Path, changes: dict, undo: list[str], folder: Path, shared: Path) -> str:
    folder.mkdir(parents=True)
    data = shared / ("pairs.json" if "dpo" in source.name else "rows.json")
    made = {"model_name_or_path": str(shared / "model"), "dataset_dir": str(folder), **yaml.safe_load(LLAMA_FACTORY)}
    if peer == "axolotl":
        rows = [{"path": str(shared / "chats.json"), "ds_type": "json", "type": "chat_template"}]
        made = {"base_model": str(shared / "model"), "datasets": rows, "dataset_prepared_path": str(folder / "kept")}
        made |= yaml.safe_load(AXOLOTL)
    changes = {key: str(shared / value) if value == "adapter" else value for key, value in changes.items()}
    theirs = yaml.safe_load(source.read_text()) | made | changes | {"output_dir": str(folder / "theirs")}
    file = folder / "theirs.yaml"
    file.write_text(yaml.safe_dump({key: value for key, value in theirs.items() if value is not None}))
    columns = {"prompt": "instruction", "chosen": "chosen", "rejected": "rejected"}
    info = {"file_name": str(data), **({"ranking": True, "columns": columns} if "pairs" in data.name else {})}
    (folder / "dataset_info.json").write_text(json.dumps({"rows": info}))
    environment = os.environ | {
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": "",
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [python, "-c", THERE, peer, str(file), str(folder / "losses.json")]
    with (folder / "log.txt").open("w") as log:
        subprocess.run(command, env=environment, stdout=log, stderr=log, check=True)
    expected = json.loads((folder / "losses.json").read_text())
    main(["migrate", str(file), "--out", str(folder / "ours.yaml")])
    recipe = (folder / "ours.yaml").read_text().split("tune run ")[1].split()[0]
    settings = ["--config", str(folder / "ours.yaml"), f"output_dir={folder / 'ours'}"]
    settings += [f"dataset.path={data}"] if peer == "llama_factory" else []
    settings += [f"tokenizer.chat_template={shared / 'marked.jinja'}"] if "marked" in undo else []
    runpy.run_path(str(config.find_recipe(recipe)))["main"](config.load(recipe, settings))
    losses = [json.loads(line)["loss"] for line in (folder / "ours" / "metrics.jsonl").read_text().splitlines()]
    assert len(losses) == len(expected) > 1
    worst = max(abs(ours / there - 1) for ours, there in zip(losses, expected, strict=True))
    return f"{source.stem} {changes} {undo}: {expected[0]:.4f} to {expected[-1]:.4f}, largest difference {worst:.1e}"


if __name__ == "__main__":
    peer, python, configs, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4])
    model = save_checkpoint(folder / "model", "Qwen3Config", head_dim=16)
    make_adapter(model, folder / "adapter", seed=0, target_modules="all-linear")
    (folder / "marked.jinja").write_text(MARKED)
    rows = [
        {"instruction": f"the cat {'sat ' * n}on", "input": "", "output": " ".join(WORDS[n : 3 * n + 2])}
        for n in range(8)
    ]
    pairs = [{**row, "chosen": row["output"], "rejected": "it ran"} for row in rows]
    turns = [[("user", row["instruction"]), ("assistant", row["output"])] for row in rows]
    chats = [{"messages": [{"role": role, "content": text} for role, text in turn]} for turn in turns]
    for name, made in (("rows", rows), ("pairs", pairs), ("chats", chats)):
        (folder / f"{name}.json").write_text(json.dumps(made))
    for number, (name, changes, undo) in enumerate(CASES[peer]):
        source = next(configs.glob(f"{name}.y*ml"))
        print(compare(peer, python, source, changes, undo, folder / str(number), folder), flush=True)
