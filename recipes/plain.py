"""Supervised fine-tuning in one screen, for reading: no settings, no run folder, no resume.

    python recipes/plain.py ./SmolLM2-135M-Instruct ./chats.jsonl ./trained
    torchrun --nproc-per-node 8 recipes/plain.py ./SmolLM2-135M-Instruct ./chats.jsonl ./trained

Losses and weights equal those of recipes/full_finetune.py with the settings below, on any number of devices.
"""

import sys

import torch

from tune import checkpointers, datasets, distributed, losses, optimizers
from tune.models import build
from tune.tokenizers import Tokenizer


def main(path, rows, out):
    # One process, or those that torchrun has started.
    world = distributed.init("cuda" if torch.cuda.is_available() else "cpu")

    # Data: rows of chats or texts, tokenized once and kept. Their order is a function of the seed.
    tokenizer = Tokenizer(path)
    dataset = datasets.load(tokenizer, rows, max_seq_len=1024)
    data = datasets.DataLoader(dataset, world, global_batch_size=16, micro_batch_size=2, epochs=1)

    # Model: its shapes first, then sharded by FSDP2, then each process reads its own slices of the weights.
    with torch.device("meta"):
        model = build(path)
    weights = checkpointers.Pretrained(path, model)
    distributed.parallelize(model, world, dtype="fp32" if world.device.type == "cpu" else "bf16")
    weights.load(model)

    loss_fn = losses.LinearCrossEntropy()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = optimizers.cosine(optimizer, len(data), warmup=0.03)

    for step, batch in data:
        total_loss = torch.zeros((), device=world.device)
        for micro_batch, is_last in batch:  # this process's rows, on its device
            distributed.set_gradient_sync(model, is_last)
            # A sum over this process's supervised tokens, divided by their number on all processes.
            loss = model(micro_batch, loss_fn) / batch.num_supervised
            loss.backward()
            total_loss += loss.detach()
        grad_norm = distributed.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        metrics = world.fetch(loss=world.sum(total_loss), grad_norm=grad_norm)
        if world.is_main:
            print(f"step {step}/{len(data)} | loss {metrics['loss']:.4f} | grad_norm {metrics['grad_norm']:.3f}")

    checkpointers.export(model, tokenizer, out, world, source=path)
    world.finish()


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    main(*sys.argv[1:])
