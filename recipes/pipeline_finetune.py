"""Supervised fine-tuning with pipeline parallelism, of all parameters or of LoRA adapters.

    torchrun --nproc-per-node 8 recipes/pipeline_finetune.py model.path=./Llama dataset.path=./chats.jsonl parallel.pp=2
    torchrun --nproc-per-node 8 recipes/pipeline_finetune.py --config my.yaml adapter.rank=32
    tune run --nproc-per-node 8 pipeline_finetune --config my.yaml parallel.pp_schedule=interleaved

Each process on the mesh axis `pp` holds one or more stages, and each stage holds some of the model's blocks. A stage
computes the forwards of several micro-batches before the gradients of the first one arrive, so backwards run in another
order than forwards. Only this differs from the loop of full_finetune. The losses are the same.

The settings are in configs/pipeline_finetune.yaml. Copy this file (`tune cp pipeline_finetune my.py`) and change it.
"""

import torch

from tune import checkpointers, config, datasets, distributed, optimizers, peft
from tune.config import instantiate
from tune.run import Run


@config.entrypoint("pipeline_finetune")  # the name of its YAML; `tune cp` renames it, here and in Run
def main(cfg):
    # From cheap to expensive: the layout, names and shapes, the data, weights. Nothing is written before run.steps.
    # Stages are balanced for rows of max_seq_len tokens.
    world = distributed.init(cfg.device, max_seq_len=cfg.max_seq_len, **cfg.parallel)
    run = Run("pipeline_finetune", world, cfg.output_dir, cfg.resume, settings=cfg, trackers=cfg.trackers)

    # On the meta device, the model has shapes and no memory. parallelize shards, casts and compiles it in place.
    with torch.device("meta"):
        model = instantiate(cfg.model)
    weights = checkpointers.Pretrained(cfg.model.path, model)

    # Without an adapter, all parameters are trained.
    lora = instantiate(cfg.adapter) if cfg.adapter else None  # settings
    if lora:
        run.info(peft.add_adapters(model, lora).table())  # in place; freezes the rest
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
    pipeline = distributed.Pipeline(model, world)
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
            for micro_batch in pipeline.turns(batch.micro_batches):
                micro_batch = micro_batch.to(world.device)
                # The model calls loss_fn, which sums over the supervised tokens of this process. Gradients are summed
                # over processes, so divide by the supervised tokens of all of them.
                loss = model(micro_batch, loss_fn) / batch.num_supervised
                total_loss += loss.detach()
                # With several stages, the losses due now are none, an earlier one, or all remaining ones.
                for due, is_last in pipeline.due(loss):
                    distributed.set_gradient_sync(model, is_last)
                    due.backward()

            grad_norm = distributed.clip_grad_norm_(model.parameters(), cfg.max_grad_norm, pipeline)
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
