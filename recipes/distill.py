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

The settings are in configs/distill.yaml. Copy this file (`tune cp distill my.py`) and change it.
"""

import gc

import torch

from tune import checkpointers, config, datasets, distributed, losses, optimizers, peft
from tune.config import instantiate
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
            cfg.teacher.top_k, cfg.loss.temperature, cfg.loss.chunk_tokens, tokenizer.vocab_size
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


@config.entrypoint("distill")  # the name of its YAML; `tune cp` renames it, here and in Run
def main(cfg):
    # From cheap to expensive: the layout, names and shapes, the data, weights. Nothing is written before run.steps.
    world = distributed.init(cfg.device, **cfg.parallel)
    run = Run("distill", world, cfg.output_dir, cfg.resume, settings=cfg, trackers=cfg.trackers)

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
    opened = peft.open_model(cfg.teacher.path, setting="teacher.path")  # its problems are reported now
    tokenizer.require_same_ids(opened.tokenizer(), "teacher.path")
    sampler = Sampler(max_new_tokens=cfg.on_policy.max_new_tokens, stop_ids=tokenizer.stop_ids, seed=cfg.seed)
    if cfg.on_policy.share:
        with explained("on_policy"):  # fails if no prompt has room for an answer
            sampler.check(model, [[0]], ["of a token"])
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

    if cfg.teacher.top_k:
        store_predictions(cfg, world, tokenizer, dataset, dataset.validation)
        gc.collect()  # frees the teacher, whose wrappers and shards form reference cycles
    else:
        teacher, _ = load_teacher(cfg, world, dataset, dataset.validation)

    weights.load(model)  # each process reads its own slices
    # Reads adapter.path, or makes an adapter that changes nothing yet. init=pissa and olora read the base's values.
    peft.load_or_initialize(model, lora, cfg.seed)

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
            if cfg.on_policy.share:
                batch = own_answers(
                    batch,
                    model,
                    sampler,
                    world,
                    step=step,
                    share=cfg.on_policy.share,
                    vocab_size=tokenizer.vocab_size,
                    pad_to=data.pad_to,
                )
            total_loss = torch.zeros((), device=world.device)
            for micro_batch, is_last in batch:
                distributed.set_gradient_sync(model, is_last)  # processes exchange gradients when they must
                # The model calls loss_fn, which sums over the supervised tokens of this process. Gradients are summed
                # over processes, so divide by the supervised tokens of all of them. There may be none: an answer of the
                # student is empty if its first id only pads the head.
                loss = model(micro_batch, loss_fn) / max(1, batch.num_supervised)
                loss.backward()
                total_loss += loss.detach()

            grad_norm = distributed.clip_grad_norm_(model.parameters(), cfg.max_grad_norm)
            metrics = run.fetch(loss=world.sum(total_loss), grad_norm=grad_norm)  # waits for the device, once a step
            if checkpointer.accepts(step, metrics, batch.rows):  # else a value is not finite: see checkpointer.on_nan
                optimizer.step()
            schedule.step()
            optimizer.zero_grad()

            metrics |= evaluator(step)  # the measurements that are due
            run.log(step, batch, metrics | {"without_room": batch.num_without_room})
            checkpointer.step(step, metrics)

        run.finish()  # last measurements; with keep_best, the best weights; after Ctrl-C the process exits here
        card = run.model_card(cfg.model.path)
        peft.export_trained(model, lora, run.path, base=weights, tokenizer=tokenizer, card=card, merge=cfg.export.merge)


if __name__ == "__main__":
    main()
