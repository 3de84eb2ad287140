"""Supervised fine-tuning of LoRA adapters, on one device or many.

    python recipes/lora_finetune.py model.path=./SmolLM2-135M dataset.path=./chats.jsonl adapter.rank=32
    torchrun --nproc-per-node 8 recipes/lora_finetune.py --config my.yaml global_batch_size=128
    tune run --nproc-per-node 8 lora_finetune --config my.yaml global_batch_size=128

The settings are in configs/lora_finetune.yaml. Copy this file (`tune cp lora_finetune my.py`) and change it.
"""

import torch

from tune import checkpointers, config, datasets, distributed, optimizers, peft
from tune.config import instantiate
from tune.run import Run


@config.entrypoint("lora_finetune")  # the name of its YAML; `tune cp` renames it, here and in Run
def main(cfg):
    # From cheap to expensive: the layout, names and shapes, the data, weights. Nothing is written before run.steps.
    world = distributed.init(cfg.device, **cfg.parallel)
    run = Run("lora_finetune", world, cfg.output_dir, cfg.resume, settings=cfg, trackers=cfg.trackers)

    # On the meta device, the model has shapes and no memory. parallelize shards, casts and compiles it in place.
    with torch.device("meta"):
        model = instantiate(cfg.model)
    weights = checkpointers.Pretrained(cfg.model.path, model)

    # The settings of the adapters. They are added before parallelize, which shards them too.
    lora = instantiate(cfg.adapter)
    adapted = peft.add_adapters(model, lora)  # in place; freezes the rest
    run.info(adapted.table())
    distributed.parallelize(model, world, **cfg.compute)

    # The rows are tokenized, or streamed. The loader iterates over optimizer steps.
    tokenizer = instantiate(cfg.tokenizer)
    dataset = instantiate(cfg.dataset, tokenizer, max_seq_len=cfg.max_seq_len, packed=cfg.packed)
    data = datasets.DataLoader(
        dataset,
        global_batch_size=cfg.global_batch_size,
        micro_batch_size=cfg.micro_batch_size,
        epochs=cfg.epochs,
        max_steps=cfg.max_steps,
        seed=cfg.seed,
        pad_packed=bool(cfg.compute.compile),  # compiled blocks want one shape
    )
    weights.load(model)  # each process reads its own slices
    # Reads adapter.path, or makes an adapter that changes nothing yet. init=pissa and olora read the base's values.
    peft.load_or_initialize(model, lora, cfg.seed)
    loss_fn = instantiate(cfg.loss)
    evaluator = instantiate(cfg.evaluate, run, model, tokenizer, data, loss_fn)

    optimizer = instantiate(cfg.optimizer, optimizers.parameter_groups(model, cfg.optimizer.lr, **cfg.parameter_groups))
    schedule = instantiate(cfg.schedule, optimizer, total_steps=len(data))
    # Frozen weights are not saved: resuming refuses another base, or other settings of the adapter.
    checkpointer = instantiate(
        cfg.checkpointer,
        run,
        model=model,
        optimizer=optimizer,
        schedule=schedule,
        data=data,
        base=weights,
        adapter=lora,
    )

    with run:  # closes its files and the process group, however the training ends
        # Resumes after the last checkpoint, seeds each step, and ends early at Ctrl-C or by checkpointer.patience.
        for step, batch in run.steps(data, checkpointer, evaluator, seed=cfg.seed):
            total_loss = torch.zeros((), device=world.device)
            for micro_batch, is_last in batch:  # this process's share of the rows, on its device
                distributed.set_gradient_sync(model, is_last)  # processes exchange gradients when they must
                # The model calls loss_fn, which sums over the supervised tokens of this process. Gradients are summed
                # over processes, so divide by the supervised tokens of all of them.
                loss = model(micro_batch, loss_fn) / batch.num_supervised
                loss.backward()
                total_loss += loss.detach()

            grad_norm = distributed.clip_grad_norm_(model.parameters(), cfg.max_grad_norm)
            metrics = run.fetch(loss=world.sum(total_loss), grad_norm=grad_norm)  # waits for the device, once a step
            if checkpointer.accepts(step, metrics, batch.rows):  # else a value is not finite: see checkpointer.on_nan
                optimizer.step()
            schedule.step()
            optimizer.zero_grad()

            metrics |= evaluator(step)  # the measurements that are due
            run.log(step, batch, metrics)
            checkpointer.step(step, metrics)

        run.finish()  # last measurements; with keep_best, the best weights; after Ctrl-C the process exits here
        card = run.model_card(cfg.model.path)
        peft.export_trained(model, lora, run.path, base=weights, tokenizer=tokenizer, card=card, merge=cfg.export.merge)


if __name__ == "__main__":
    main()
