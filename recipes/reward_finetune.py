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

The settings are in configs/reward_finetune.yaml. Copy this file (`tune cp reward_finetune my.py`) and change it.
"""

import torch

from tune import checkpointers, config, datasets, distributed, evaluation, losses, optimizers, peft
from tune.config import instantiate
from tune.models import prepare_scores
from tune.run import Run


@config.entrypoint("reward_finetune")  # the name of its YAML; `tune cp` renames it, here and in Run
def main(cfg):
    # From cheap to expensive: the layout, names and shapes, the data, weights. Nothing is written before run.steps.
    world = distributed.init(cfg.device, **cfg.parallel)
    run = Run("reward_finetune", world, cfg.output_dir, cfg.resume, settings=cfg, trackers=cfg.trackers)

    # On the meta device, the model has shapes and no memory. parallelize shards, casts and compiles it in place.
    with torch.device("meta"):
        model = instantiate(cfg.model)
    weights = checkpointers.Pretrained(cfg.model.path, model, seed=cfg.seed)

    # Without an adapter, all parameters are trained. The head always is.
    lora = instantiate(cfg.adapter) if cfg.adapter else None  # settings
    if lora:
        run.info(peft.add_adapters(model, lora).table())  # in place; freezes the rest
    distributed.parallelize(model, world, **cfg.compute)

    # The rows are tokenized, or streamed. The loader iterates over optimizer steps.
    tokenizer = instantiate(cfg.tokenizer)
    prepare_scores(model, tokenizer)
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

    def measure(batch):
        """Return the loss and other metrics of a micro-batch, each as (sum, count)."""
        first, others = batch.pairs
        scores = losses.score(model, batch)
        loss = loss_fn(scores[first], scores[others], batch.columns["margin"][first])
        return {"loss": losses.sum_and_count(loss), **losses.of_rewards(scores[first], scores[others])}

    def validate():
        return world.fetch(**world.means(evaluation.validate(model, data.validation_batches(), measure)))

    evaluator = instantiate(cfg.evaluate, run, model, tokenizer, data)
    if dataset.validation:
        evaluator.add(validate)

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
            totals: dict[str, torch.Tensor] = {}
            for micro_batch, is_last in batch:
                distributed.set_gradient_sync(model, is_last)
                measured = measure(micro_batch)
                loss = measured["loss"][0] / batch.num_pairs
                loss.backward()
                evaluation.add(totals, measured)  # sums over micro-batches

            grad_norm = distributed.clip_grad_norm_(model.parameters(), cfg.max_grad_norm)
            metrics = run.fetch(grad_norm=grad_norm, **world.means(totals))  # waits for the device, once a step
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
