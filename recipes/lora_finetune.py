"""Supervised fine-tuning of LoRA adapters, on one device or many.

    python recipes/lora_finetune.py model.path=./SmolLM2-135M dataset.path=./chats.jsonl adapter.rank=32
    torchrun --nproc-per-node 8 recipes/lora_finetune.py --config my.yaml global_batch_size=128
    tune run --nproc-per-node 8 lora_finetune --config my.yaml global_batch_size=128

Every setting is in configs/lora_finetune.yaml. Copy this file (`tune cp lora_finetune my.py`) and change it.
"""

import torch

from tune import checkpointers, config, datasets, distributed, evaluation, optimizers, peft, quantization
from tune.config import instantiate, instantiate_data
from tune.run import Run


@config.entrypoint("lora_finetune")
def main(cfg):
    world = distributed.init(cfg.device, deterministic=cfg.deterministic, **cfg.parallel)
    run = Run("lora_finetune", world, cfg.output_dir, cfg.resume, settings=cfg, **cfg.logger)

    with torch.device("meta"):
        model = instantiate(cfg.model)  # shapes only: no memory yet
    weights = checkpointers.Pretrained(cfg.model.path, model)
    if cfg.quantization.weights:
        quantization.quantize_linears(model, cfg.quantization.weights, double=cfg.quantization.double)
    if cfg.quantization.float8:
        quantization.compute_in_float8(model, cfg.quantization.float8, world.device)
    lora = instantiate(cfg.adapter)
    adapted = peft.add_adapters(model, lora)
    if cfg.quantization.qat:
        types = checkpointers.exported_types(model, cfg.model.path)
        quantization.round_linears(model, cfg.quantization.qat, types, cfg.dtype)
    execution = {  # how the model is stored and computed
        "dtype": cfg.dtype, "master_dtype": cfg.master_dtype, "compile": cfg.compile,
        "activation_checkpointing": cfg.memory.activation_checkpointing,
        "activation_offload": cfg.memory.activation_offload, "cpu_offload": cfg.memory.cpu_offload,
    }  # fmt: skip
    distributed.require_layout(model, world, cfg.dtype, cfg.master_dtype)  # fails before the data are prepared
    datasets.require_batches(cfg.global_batch_size, cfg.micro_batch_size, world.data_size)

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
    run.info(adapted.table())

    distributed.parallelize(model, world, **execution)
    weights.load(model)
    if cfg.adapter.path:
        peft.load_adapter(model, cfg.adapter.path)
    else:
        peft.initialize(model, cfg.seed)
    checkpointers.check_forward(model)

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
        data=data, tell=run.info, base=weights, adapter=lora, tasks=evaluator.tasks,
    )  # fmt: skip
    start = checkpointer.resume(run.resume)  # cfg.resume, or "auto" after a restart by the launcher

    with run:  # closes its files, loggers and process group, however the training ends
        steps = run.steps(data, start, checkpointer, seed=cfg.seed, profiler=cfg.profiler)
        run.begin(checkpointer, evaluator)  # measurements before the first step
        for step, batch in steps:  # after Ctrl-C, ends once a checkpoint is saved
            total_loss = torch.zeros((), device=world.device)
            for micro_batch, is_last in batch:  # this rank's share, on its device
                distributed.set_gradient_sync(model, is_last)
                # The model calls loss_fn with its hidden states and head weight; loss_fn sums over supervised tokens.
                # Gradients are summed over ranks, so divide by the supervised tokens of the step on all ranks.
                loss = model(micro_batch, loss_fn) / max(1, batch.num_supervised)
                loss.backward()
                total_loss += loss.detach()

            grad_norm = distributed.clip_grad_norm_(model.parameters(), cfg.max_grad_norm)
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
        card = checkpointers.model_card("lora_finetune", cfg.model.path, dataset.name)
        peft.export_adapter(
            model, run.path / "adapter", world=world, base=cfg.model.path, tokenizer=tokenizer, card=card
        )
        run.info(f"done: the adapter is in {run.path / 'adapter'}")
        if cfg.export.merge:
            checkpointers.export(
                model, tokenizer, run.path / "model", world, source=cfg.model.path, card=card, base=weights
            )
            run.info(f"the merged model is in {run.path / 'model'}")


if __name__ == "__main__":
    main()
