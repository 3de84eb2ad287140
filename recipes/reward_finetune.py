"""Reward models: learn to score answers from better and worse ones, with all parameters or LoRA adapters.

    python recipes/reward_finetune.py model.path=./SmolLM2-135M-Instruct dataset.path=./pairs.jsonl
    torchrun --nproc-per-node 8 recipes/reward_finetune.py --config my.yaml loss.center=0.01
    tune run --nproc-per-node 8 reward_finetune --config my.yaml adapter.rank=32

A head with one output replaces the vocabulary head. The score r of an answer is the head's weight times the hidden
state at the end of the conversation. The loss of a better and a worse answer to the same prompt, optionally with a
margin in the row, is (Ouyang et al. 2022)

    -log sigmoid(r_better - r_worse - margin) + center (r_better + r_worse)^2

1. The loss is averaged over the pairs of the global batch. Each worse answer to a prompt makes one pair.
2. The head of a language model starts from random weights; the head of a reward model keeps its weights. It is trained
   in full, also with an adapter.
3. Answers are scored at their end, so rows that are too long are dropped, not cut.
4. transformers loads the model with AutoModelForSequenceClassification, which takes the last token that is not the pad
   token as the end. Where answers end with the pad token, the model gets another pad token.

Every setting is in configs/reward_finetune.yaml. Copy this file (`tune cp reward_finetune my.py`) and change it.
"""

import torch

from tune import checkpointers, config, datasets, distributed, evaluation, losses, optimizers, peft, quantization
from tune.config import instantiate, instantiate_data
from tune.models import prepare_scores
from tune.run import Run


@config.entrypoint("reward_finetune")
def main(cfg):
    world = distributed.init(cfg.device, deterministic=cfg.deterministic, max_seq_len=cfg.max_seq_len, **cfg.parallel)
    run = Run("reward_finetune", world, cfg.output_dir, cfg.resume, settings=cfg, **cfg.logger)

    with torch.device("meta"):
        model = instantiate(cfg.model)  # shapes only: no memory yet
    weights = checkpointers.Pretrained(cfg.model.path, model, seed=cfg.seed)
    if cfg.quantization.weights:
        quantization.quantize_linears(model, cfg.quantization.weights, double=cfg.quantization.double)
    lora = instantiate(cfg.adapter) if cfg.adapter else None
    adapted = peft.add_adapters(model, lora) if lora else None  # the head is trained in full
    loss_fn = instantiate(cfg.loss)
    execution = {  # how the model is stored and computed
        "dtype": cfg.dtype, "master_dtype": cfg.master_dtype, "compile": cfg.compile,
        "activation_checkpointing": cfg.memory.activation_checkpointing,
        "activation_offload": cfg.memory.activation_offload, "cpu_offload": cfg.memory.cpu_offload,
    }  # fmt: skip
    distributed.require_layout(model, world, cfg.dtype, cfg.master_dtype)  # fails before the data are prepared
    datasets.require_batches(cfg.global_batch_size, cfg.micro_batch_size, world.data_size)

    tokenizer = instantiate(cfg.tokenizer)
    prepare_scores(model, tokenizer)
    dataset, validation = instantiate_data(
        cfg.dataset, cfg.validation_dataset, tokenizer, vocab_size=model.config.vocab_size,
        max_seq_len=cfg.max_seq_len, packed=cfg.packed,
    )  # fmt: skip
    pad_to = cfg.max_seq_len if cfg.packed and cfg.compile else None  # one shape, for compiled blocks
    data = datasets.DataLoader(
        dataset, world, cfg.global_batch_size, cfg.micro_batch_size, epochs=cfg.epochs, max_steps=cfg.max_steps,
        seed=cfg.seed, pad_to=pad_to,
    )  # fmt: skip
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

    def measure(batch):
        """Return the loss and other metrics of a micro-batch, each as (sum, count)."""
        first, others = batch.pairs
        scores = losses.score(model, batch)
        loss = loss_fn(scores[first], scores[others], batch.columns["margin"][first])
        return {"loss": losses.sum_and_count(loss), **losses.of_rewards(scores[first], scores[others])}

    def validate():
        batches = datasets.validation_batches(validation, world, cfg.micro_batch_size, pad_to)
        return world.fetch(**evaluation.means(evaluation.validate(model, batches, measure), world))

    evaluator = evaluation.Evaluator(run, model, tokenizer, world)
    if validation:
        evaluator.add(validate, every=cfg.validate_every, first=cfg.validate_first)
    groups = optimizers.parameter_groups(model, cfg.optimizer.lr, **cfg.parameter_groups)
    optimizer = instantiate(cfg.optimizer, groups)
    schedule = instantiate(cfg.schedule, optimizer, total_steps=len(data))
    checkpointer = instantiate(
        cfg.checkpointer, run.path / "checkpoints", world, model=model, optimizer=optimizer, schedule=schedule,
        data=data, tell=run.info, base=weights if lora else None, adapter=lora,
    )  # fmt: skip
    start = checkpointer.resume(run.resume)  # cfg.resume, or "auto" after a restart by the launcher

    with run:  # closes its files, loggers and process group, however the training ends
        steps = run.steps(data, start, checkpointer, seed=cfg.seed, profiler=cfg.profiler)
        run.begin(checkpointer, evaluator)  # measurements before the first step
        for step, batch in steps:  # after Ctrl-C, ends once a checkpoint is saved
            totals: dict[str, torch.Tensor] = {}
            for micro_batch, is_last in batch:
                distributed.set_gradient_sync(model, is_last)
                measured = measure(micro_batch)
                loss = measured["loss"][0] / batch.num_pairs
                loss.backward()
                evaluation.add(totals, measured)

            grad_norm = distributed.clip_grad_norm_(model.parameters(), cfg.max_grad_norm)
            metrics = world.fetch(  # the only wait for the device in a step
                grad_norm=grad_norm,  # already over all ranks
                **evaluation.routing(model, world),
                **evaluation.means(totals, world),
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
        card = checkpointers.model_card("reward_finetune", cfg.model.path, dataset.name)
        where = peft.export_trained(
            model, lora, run.path, world, base=weights, tokenizer=tokenizer, card=card, merge=cfg.export.merge
        )
        run.info(f"done: {where}")


if __name__ == "__main__":
    main()
