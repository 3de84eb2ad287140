"""What many tests use: a tiny checkpoint folder as users have them, and processes that form a group."""

import contextlib
import os
import random
import socket
import subprocess
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# After so many seconds a process that a test has started hangs; before, the machine may just be busy.
HANGS = 600
WORDS = [
    "the",
    "a",
    "cat",
    "dog",
    "sat",
    "ran",
    "on",
    "under",
    "mat",
    "rug",
    "and",
    "then",
    "it",
    "was",
    "very",
    "big",
    "small",
    "red",
    "blue",
    "green",
    "quick",
    "slow",
]


def save_checkpoint(folder: Path, config_class: str = "LlamaConfig", **changes) -> Path:
    """A random model of transformers' with weights of usual size, and a byte-level BPE tokenizer with ChatML."""
    import transformers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator([" ".join(WORDS)] * 20, trainer)
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|im_end|>", bos_token="<|endoftext|>"
    )
    fast.chat_template = CHATML
    fast.save_pretrained(folder)
    shape = {
        "vocab_size": len(fast),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.05,
        "eos_token_id": fast.eos_token_id,
        "bos_token_id": fast.bos_token_id,
    }
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(**shape | changes)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):  # these start at zero, which hides mistakes
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder)
    return folder


def make_adapter(base: Path, folder: Path, seed: int, **settings) -> Path:
    """A random adapter in PEFT's layout, with settings of `LoRA`."""
    from tune import distributed
    from tune.checkpointers import load_model
    from tune.peft import LoRA, add_adapters, export_adapter
    from tune.tokenizers import Tokenizer as Ours

    model, lora = load_model(str(base)), LoRA(rank=4, alpha=8, **settings)
    add_adapters(model, lora)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
    export_adapter(model, lora, folder, distributed.init("cpu"), base=str(base), tokenizer=Ours(str(base)))
    return folder


def free_port() -> int:
    """Below those that the system gives to connections: one of these may be taken before it is used."""
    for port in random.SystemRandom().sample(range(10_000, 32_000), 100):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")


def run_processes(script: Path, count: int, *arguments: str) -> str:
    """Run `script` in `count` processes that find each other as under torchrun; returns rank 0's output."""
    processes, port = [], free_port()
    for rank in range(count):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
        env = os.environ | {name: str(value) for name, value in place.items()} | {"MASTER_ADDR": "127.0.0.1"}
        command = [sys.executable, str(script), *arguments]
        processes.append(
            subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
    try:
        outputs = []
        for process in processes:
            outputs.append(process.communicate(timeout=HANGS)[0])
            if process.returncode:  # the others may wait for it
                break
    finally:
        for process in processes:
            process.kill()
    failed = [output for process, output in zip(processes, outputs, strict=False) if process.returncode]
    assert not failed, "\n".join(output[-3000:] for output in failed)
    return outputs[0]
