"""Distillation: a student learns a teacher's predictions, with all parameters or with LoRA adapters.

    python recipes/distill.py model.path=./SmolLM2-135M teacher.path=./SmolLM2-1.7B dataset.path=./chats.jsonl
    torchrun --nproc-per-node 8 recipes/distill.py --config my.yaml loss._component_=tune.losses.ReverseKL
    tune run --nproc-per-node 8 distill --config my.yaml adapter.rank=32

The loss is a divergence D between the student's probabilities p and the teacher's q, both at temperature T, averaged
over the supervised tokens of the global batch. D is one of

    ForwardKL      KL(q, p) = sum q (log q - log p)
    ReverseKL      KL(p, q)
    JensenShannon  b KL(q, m) + (1 - b) KL(p, m), generalized, where m = b q + (1 - b) p

1. With a fraction c of the labels' cross-entropy H, the loss is (1 - c) T^2 D + c H.
2. The teacher sees the student's batches in the same processes. It is frozen, sharded like the student, and keeps its
   own dtype.
3. In a fraction `on_policy.share` of the documents, the student samples a new last answer before each step (GKD,
   Agarwal et al. 2024), and the teacher judges it. The reverse KL suits this.
4. With `teacher.top_k`, the teacher's most probable tokens are computed once, by `tune prepare` or before step 1, and
   stored with the data. The remaining probability mass is one extra bucket; without it the result is no divergence.
5. Both models have the same tokenizer. Heads that are padded to different sizes are cut to its ids.

Every setting is in configs/distill.yaml. Copy this file (`tune cp distill my.py`) and change it.
"""

import gc

import torch

from tune import (
    checkpointers,
    config,
    datasets,
    distributed,
    evaluation,
    losses,
    optimizers,
    peft,
    quantization,
)
from tune.config import instantiate, instantiate_data
from tune.errors import explained
from tune.generation import Sampler, own_answers
from tune.run import Run


def load_teacher(cfg, world, *parts):
    opened = peft.open_model(cfg.teacher.path, setting="teacher.path")
    for part in filter(None, parts):
        part.require_vocabulary(opened.model.config.vocab_size)
    return opened.shard(world, cfg.teacher.dtype, cfg.teacher.quantization), opened


def store_predictions(cfg, world, tokenizer, *parts):
    """Add the teacher's most probable tokens as a column of the data. `tune prepare` also calls this."""
    with explained("teacher.top_k"):
        most_probable = losses.MostProbable(
            cfg.teacher.top_k, cfg.loss.temperature, cfg.memory.loss_chunk_tokens, tokenizer.vocab_size
        )
    datasets.require_kept("teacher", *parts)
    teacher, opened = load_teacher(cfg, world, *parts)
    for part in filter(None, parts):
        datasets.add_scores(
            part, "teacher", lambda batch: teacher(batch, most_probable), world,
            micro_batch_size=cfg.micro_batch_size, pad_to=None,
            folder=datasets.cache_folder(cfg.dataset.get("cache_dir")),
            made_of=[opened.digest(), cfg.teacher.dtype, cfg.teacher.top_k, cfg.loss.temperature],
        )  # fmt: skip


@config.entrypoint("distill")
def main(cfg):
    world = distributed.init(cfg.device, deterministic=cfg.deterministic, max_seq_len=cfg.max_seq_len, **cfg.parallel)
    run = Run("distill", world, cfg.output_dir, cfg.resume, settings=cfg, **cfg.logger)

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
    datasets.require_batches(cfg.global_batch_size, cfg.micro_batch_size, world.data_size)

    tokenizer = instantiate(cfg.tokenizer)
    opened = peft.open_model(cfg.teacher.path, setting="teacher.path")  # its problems are reported now
    tokenizer.require_same_ids(opened.tokenizer(), "teacher.path")
    sampler = Sampler(max_new_tokens=cfg.on_policy.max_new_tokens, stop_ids=tokenizer.stop_ids, seed=cfg.seed)
    if cfg.on_policy.share:
        with explained("on_policy"):  # fails if no prompt has room for an answer
            sampler.check(model, [[0]], ["of a token"])
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

    if cfg.teacher.top_k:
        store_predictions(cfg, world, tokenizer, dataset, validation)
        gc.collect()  # frees the teacher, whose wrappers and shards form reference cycles
    else:
        teacher, _ = load_teacher(cfg, world, dataset, validation)
    distributed.parallelize(model, world, **execution)
    weights.load(model)
    peft.start(model, lora, cfg.seed)
    checkpointers.check_forward(model)

    divergence = instantiate(cfg.loss, vocab_size=tokenizer.vocab_size)

    @losses.takes_shares
    def loss_fn(hidden, weight, batch, **softcap):
        """Return the divergence between student and teacher on the same batch, summed over supervised tokens."""
        if cfg.teacher.top_k:
            target = losses.TopK.stored(batch.columns["teacher"], batch)
        else:
            with torch.no_grad():
                target = teacher(batch, losses.Teacher.head)
        return divergence(hidden, weight, batch, teacher=target, **softcap)

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
            if cfg.on_policy.share:
                batch = own_answers(
                    batch, model, sampler, world, step=step, share=cfg.on_policy.share,
                    vocab_size=tokenizer.vocab_size, pad_to=pad_to,
                )  # fmt: skip
            total_loss = torch.zeros((), device=world.device)
            for micro_batch, is_last in batch:
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
            )
            metrics |= optimizers.learning_rates(optimizer)
            # If a value is not finite, on_nan decides: stop, skip this update, or go back to the last checkpoint.
            if checkpointer.accepts(step, batch.rows, loss=metrics["loss"], grad_norm=metrics["grad_norm"]):
                optimizer.step()
            schedule.step()
            optimizer.zero_grad()

            metrics |= evaluator(step)
            run.log(step, batch, metrics | {"without_room": batch.num_without_room})
            checkpointer.step(step, metrics, now=run.is_end(step))

        # Run the final evaluation. With keep_best, then load the weights of the best checkpoint.
        run.finish(checkpointer, evaluator)
        card = checkpointers.model_card("distill", cfg.model.path, dataset.name)
        where = peft.export_trained(
            model, lora, run.path, world, base=weights, tokenizer=tokenizer, card=card, merge=cfg.export.merge
        )
        run.info(f"done: {where}")


if __name__ == "__main__":
    main()
