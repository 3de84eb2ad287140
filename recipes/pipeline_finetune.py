"""Supervised fine-tuning with pipeline parallelism, of all parameters or of LoRA adapters.

    torchrun --nproc-per-node 8 recipes/pipeline_finetune.py model.path=./Llama dataset.path=./chats.jsonl parallel.pp=2
    torchrun --nproc-per-node 8 recipes/pipeline_finetune.py --config my.yaml adapter.rank=32
    tune run --nproc-per-node 8 pipeline_finetune --config my.yaml parallel.pp_schedule=interleaved

Each process on the mesh axis `pp` holds one or more stages, and each stage holds some of the model's blocks. A stage
computes the forwards of several micro-batches before the gradients of the first one arrive, so backwards run in another
order than forwards. Only this differs from the loop of full_finetune. The losses are the same.

Every setting is in configs/pipeline_finetune.yaml. Copy this file (`tune cp pipeline_finetune my.py`) and change it.
"""

import torch

from tune import checkpointers, config, datasets, distributed, evaluation, optimizers, peft, quantization
from tune.config import instantiate, instantiate_data
from tune.run import Run


@config.entrypoint("pipeline_finetune")
def main(cfg):
    world = distributed.init(cfg.device, deterministic=cfg.deterministic, max_seq_len=cfg.max_seq_len, **cfg.parallel)
    run = Run("pipeline_finetune", world, cfg.output_dir, cfg.resume, settings=cfg, **cfg.logger)

    with torch.device("meta"):
        model = instantiate(cfg.model)  # shapes only: no memory yet
    weights = checkpointers.Pretrained(cfg.model.path, model)
    if cfg.quantization.weights:
        quantization.quantize_linears(model, cfg.quantization.weights, double=cfg.quantization.double)
    lora = instantiate(cfg.adapter) if cfg.adapter else None
    adapted = peft.add_adapters(model, lora) if lora else None
    execution = {  # how the model is stored and computed
        "dtype": cfg.dtype, "master_dtype": cfg.master_dtype, "compile": cfg.compile,
        "activation_checkpointing": cfg.memory.activation_checkpointing,
        "activation_offload": cfg.memory.activation_offload, "cpu_offload": cfg.memory.cpu_offload,
    }  # fmt: skip
    distributed.require_layout(model, world, cfg.dtype, cfg.master_dtype)  # fails before the data are prepared
    datasets.require_batches(cfg.global_batch_size, cfg.micro_batch_size, world.data_size, world.num_stages)

    tokenizer = instantiate(cfg.tokenizer)
    dataset, validation = instantiate_data(
        cfg.dataset, cfg.validation_dataset, tokenizer, vocab_size=model.config.vocab_size,
        max_seq_len=cfg.max_seq_len, packed=cfg.packed,
    )  # fmt: skip
    pad_to = cfg.max_seq_len if cfg.packed and cfg.compile else None  # one shape, for compiled blocks
    data = datasets.DataLoader(
        dataset, world, cfg.global_batch_size, cfg.micro_batch_size, epochs=cfg.epochs, max_steps=cfg.max_steps,
        seed=cfg.seed, pad_to=pad_to,
    )  # fmt: skip
    evaluator = instantiate(cfg.evaluate, run, model, tokenizer, world)
    run.describe(
        model, data, tokenizer, validation, base=cfg.model.path,
        merged=cfg.model.path if cfg.export.merge else None, keep=cfg.checkpointer.get("keep"), **execution,
    )  # fmt: skip
    if adapted:
        run.info(adapted.table())

    distributed.parallelize(model, world, **execution)
    weights.load(model)
    peft.start(model, lora, cfg.seed)
    checkpointers.check_forward(model)

    pipeline = distributed.Pipeline(model, world)
    loss_fn = instantiate(cfg.loss)

    def validate():
        """The loss on the validation data."""
        batches = datasets.validation_batches(validation, world, cfg.micro_batch_size, pad_to)
        return evaluation.evaluate(model, batches, loss_fn, world)

    if validation:
        evaluator.add(validate, every=cfg.validate_every, first=cfg.validate_first)
    groups = optimizers.parameter_groups(model, cfg.optimizer.lr, **cfg.parameter_groups)
    optimizer = instantiate(cfg.optimizer, groups)
    schedule = instantiate(cfg.schedule, optimizer, total_steps=len(data))
    checkpointer = instantiate(
        cfg.checkpointer, run.path / "checkpoints", world, model=model, optimizer=optimizer, schedule=schedule,
        data=data, tell=run.info, base=weights if lora else None, adapter=lora, tasks=evaluator.tasks,
    )  # fmt: skip
    start = checkpointer.resume(run.resume)  # cfg.resume, or "auto" after a restart by the launcher

    with run:  # closes its files, loggers and process group, however the training ends
        steps = run.steps(data, start, checkpointer, seed=cfg.seed, profiler=cfg.profiler)
        run.begin(checkpointer, evaluator)  # measurements before the first step
        for step, batch in steps:  # after Ctrl-C, ends once a checkpoint is saved
            total_loss = torch.zeros((), device=world.device)
            for micro_batch in pipeline.turns(batch.micro_batches):
                micro_batch = micro_batch.to(world.device)
                # The model calls loss_fn with its hidden states and head weight; loss_fn sums over supervised tokens.
                # Gradients are summed over ranks, so divide by the supervised tokens of the step on all ranks.
                loss = model(micro_batch, loss_fn) / max(1, batch.num_supervised)
                total_loss += loss.detach()
                # With several stages, the losses due now are none, an earlier one, or all remaining ones.
                for due, is_last in pipeline.due(loss):
                    distributed.set_gradient_sync(model, is_last)
                    due.backward()

            grad_norm = distributed.clip_grad_norm_(model.parameters(), cfg.max_grad_norm, pipeline)
            metrics = world.fetch(  # the only wait for the device in a step
                loss=world.sum(total_loss),
                grad_norm=grad_norm,  # already over all ranks
                **evaluation.routing(model, world),
                **evaluation.accuracy(loss_fn, world),
            )
            metrics |= optimizers.learning_rates(optimizer)
            # If a value is not finite, on_nan decides: stop, skip this update, or go back to the last checkpoint.
            if checkpointer.accepts(step, batch.rows, loss=metrics["loss"], grad_norm=metrics["grad_norm"]):
                optimizer.step()
            schedule.step()
            optimizer.zero_grad()

            metrics |= evaluator(step)
            run.log(step, batch, metrics)
            checkpointer.step(step, metrics, now=run.is_end(step))

        # Run the final evaluation. With keep_best, then load the weights of the best checkpoint.
        run.finish(checkpointer, evaluator)
        card = checkpointers.model_card("pipeline_finetune", cfg.model.path, dataset.name)
        where = peft.export_trained(
            model, lora, run.path, world, base=weights, tokenizer=tokenizer, card=card, merge=cfg.export.merge
        )
        run.info(f"done: {where}")


if __name__ == "__main__":
    main()
