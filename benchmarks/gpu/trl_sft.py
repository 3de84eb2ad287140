"""Fine-tune with TRL's SFTTrainer on packed rows, for comparison. Prints JSON.

    python benchmarks/gpu/trl_sft.py MODEL CHATS --rank 16 --rows 4 --micro-batch 2 [--liger]

LoRA (PEFT) covers all linear layers except the head, on bf16 weights. Without --rank all parameters are trained, with
fp32 master weights. Attention uses SDPA.
"""

import argparse
import json
import tempfile
import time

import torch
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoTokenizer, TrainerCallback
from trl import SFTConfig, SFTTrainer

UNTIMED = 2  # steps at the start
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class Clock(TrainerCallback):
    def __init__(self, device: str):
        self.device, self.ends = device, []

    def on_step_end(self, *args, **kwargs):
        if self.device == "cuda":
            torch.cuda.synchronize()
        self.ends.append(time.time())


def main() -> None:
    begin = time.time()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("chats")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--rows", type=int, default=4, help="rows per optimizer step")
    parser.add_argument("--micro-batch", type=int, default=2)
    parser.add_argument("--max-length", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--liger", action="store_true", help="with Liger's kernels")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    lora = options.rank > 0
    with tempfile.TemporaryDirectory() as folder:
        settings = SFTConfig(
            output_dir=folder,
            max_steps=options.steps,
            per_device_train_batch_size=options.micro_batch,
            gradient_accumulation_steps=options.rows // options.micro_batch,
            max_length=options.max_length,
            packing=True,
            learning_rate=2e-4,
            lr_scheduler_type="constant",
            warmup_steps=0,
            bf16=options.device == "cuda",
            use_cpu=options.device == "cpu",
            gradient_checkpointing=False,
            use_liger_kernel=options.liger,
            model_init_kwargs={"dtype": "bfloat16" if lora else "float32", "attn_implementation": "sdpa"},
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            seed=0,
        )
        clock = Clock(options.device)
        trainer = SFTTrainer(
            model=options.model,
            args=settings,
            train_dataset=load_dataset("json", data_files=options.chats, split="train", cache_dir=folder),
            processing_class=AutoTokenizer.from_pretrained(options.model),
            peft_config=LoraConfig(
                r=options.rank, lora_alpha=2 * options.rank, target_modules=PROJECTIONS, task_type="CAUSAL_LM"
            )
            if lora
            else None,
            callbacks=[clock],
        )
        trainer.train()
    tokens = [entry["num_tokens"] for entry in trainer.state.log_history if "loss" in entry]
    seconds = clock.ends[-1] - clock.ends[UNTIMED]
    peak = torch.cuda.max_memory_allocated() / 2**30 if options.device == "cuda" else None
    print(
        json.dumps(
            {
                "tokens_per_second": (tokens[-1] - tokens[UNTIMED]) / seconds,
                "step_seconds": seconds / (len(clock.ends) - 1 - UNTIMED),
                "peak_gib": peak,
                "start": clock.ends[0] - begin,
            }
        )
    )


if __name__ == "__main__":
    main()
