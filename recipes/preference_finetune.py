"""Preference tuning, of all parameters or of LoRA adapters: DPO, IPO, SimPO, CPO, ORPO, KTO.

    python recipes/preference_finetune.py model.path=./SmolLM2-135M dataset.path=./pairs.jsonl
    torchrun --nproc-per-node 8 recipes/preference_finetune.py --config my.yaml loss._component_=tune.losses.SimPO
    tune run --nproc-per-node 8 preference_finetune --config my.yaml adapter.rank=32

The loss compares the log-probs of a chosen answer w and a rejected answer l. L is the sum over tokens, A the mean, and
O = A - log(1 - exp A) its log-odds. R and M are L and A minus the frozen reference's. s is the logistic function:

    DPO  -log s(beta (R_w - R_l))        SimPO  -log s(beta (A_w - A_l) - gamma)
    IPO  (M_w - M_l - 1 / (2 beta))^2    CPO    -log s(beta (L_w - L_l)) - nll A_w
    KTO  1 - s(+-beta (R - z))           ORPO   -A_w - beta log s(O_w - O_l)

1. The loss is averaged over the pairs of the global batch. Each rejected answer to a prompt makes one pair.
2. The reference's log-probs are stored in the run folder under a hash of weights and data. With reference=adapter_off,
   they are computed in each step with the adapter switched off.
3. KTO's answers are good (+) or bad (-). z is the mean R of mismatched answers: each prompt with the next one's answer.

The settings are in configs/preference_finetune.yaml. Copy this file (`tune cp preference_finetune my.py`) to
change it.
"""

import gc

import torch

from tune import checkpointers, config, datasets, distributed, evaluation, losses, optimizers, peft
from tune.config import instantiate
from tune.run import Run


@config.entrypoint("preference_finetune")  # the name of its YAML; `tune cp` renames it, here and in Run
def main(cfg):
    # From cheap to expensive: the layout, names and shapes, the data, weights. Nothing is written before run.steps.
    world = distributed.init(cfg.device, **cfg.parallel)
    run = Run("preference_finetune", world, cfg.output_dir, cfg.resume, settings=cfg, trackers=cfg.trackers)

    # On the meta device, the model has shapes and no memory. parallelize shards, casts and compiles it in place.
    with torch.device("meta"):
        model = instantiate(cfg.model)
    weights = checkpointers.Pretrained(cfg.model.path, model)

    # Without an adapter, all parameters are trained.
    lora = instantiate(cfg.adapter) if cfg.adapter else None  # settings
    if lora:
        run.info(peft.add_adapters(model, lora).table())  # in place; freezes the rest
    distributed.parallelize(model, world, **cfg.compute)

    loss_fn = instantiate(cfg.loss)
    losses.require_attributes(loss_fn, "needs_reference", "reward")
    is_labelled = cfg.dataset.get("kind") == "labelled"  # the loss takes good and bad answers instead of pairs
    log_probs = losses.LogProbs(cfg.loss_chunk_tokens)

    # The rows are tokenized, or streamed. The loader iterates over optimizer steps.
    tokenizer = instantiate(cfg.tokenizer)
    has_own_reference = loss_fn.needs_reference and cfg.reference not in ("precomputed", "adapter_off")
    other = None
    if has_own_reference:
        other = peft.open_model(cfg.reference, setting="reference")  # its problems are reported now
        other.require_same_vocabulary(tokenizer)
    dataset = instantiate(cfg.dataset, tokenizer, max_seq_len=cfg.max_seq_len, packed=cfg.packed)
    is_stored = loss_fn.needs_reference and cfg.reference != "adapter_off"
    if is_stored:
        datasets.require_kept("reference", dataset, dataset.validation)
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

    # Before the first forward, which leaves some parameters unsharded.
    optimizer = instantiate(cfg.optimizer, optimizers.parameter_groups(model, cfg.optimizer.lr, **cfg.parameter_groups))
    schedule = instantiate(cfg.schedule, optimizer, total_steps=len(data))

    # The reference's log-probs become a column of the data.
    if is_stored:
        frozen = other.shard(world, cfg.compute.dtype) if other else model.eval()
        for part in filter(None, (dataset, dataset.validation)):
            part.require_vocabulary(frozen.config.vocab_size)
            datasets.add_scores(
                part, "reference", lambda batch: losses.per_document(frozen(batch, log_probs).log_probs, batch), world,
                micro_batch_size=cfg.micro_batch_size, pad_to=data.pad_to, folder=run.path,
                made_of=[(other or weights).digest(), peft.digest(lora), cfg.compute.dtype],
            )  # fmt: skip
        del frozen, other
        gc.collect()  # frees a second model, whose wrappers and shards form reference cycles
        model.train()

    def score(batch):
        """Return the log-probs of a batch's answers and the entropies of their tokens."""
        reference = batch.columns.get("reference")
        if loss_fn.needs_reference and reference is None:
            with torch.no_grad(), peft.switched_off(model):
                reference = losses.per_document(model(batch, log_probs).log_probs, batch)
        tokens = model(batch, log_probs)
        policy = losses.per_document(tokens.log_probs, batch)
        return losses.AnswerLogProbs(policy, reference, batch.documents.num_supervised), tokens.entropies

    def measure(batch, kl=None):
        """Return the loss and other metrics of a micro-batch, each as (sum, count)."""
        answers, entropies = score(batch)
        if kl is None:
            chosen, rejected = map(answers.at, batch.pairs)
            loss, measured = loss_fn(chosen, rejected), losses.of_pairs(loss_fn, chosen, rejected)
        else:
            labelled, is_good = answers.at(batch.pairs[0]), batch.columns["label"][batch.pairs[0]] == 1
            measured = {"kl": losses.sum_and_count(kl[None]), **losses.of_labelled(loss_fn, labelled, is_good)}
            loss = loss_fn(labelled, is_good, kl)
        return {"loss": losses.sum_and_count(loss), "entropy": losses.sum_and_count(entropies), **measured}

    @torch.no_grad()
    def mean_ratio(batches):
        """Return KTO's constant z: the mean log-ratio of mismatched answers over all ranks, at least 0."""
        if not is_labelled:
            return None
        totals: dict[str, torch.Tensor] = {}
        model.eval()
        for batch in batches:
            evaluation.add(totals, {"kl": losses.sum_and_count(score(batch)[0].ratio[batch.pairs[1]])})
        model.train()
        return world.means(totals)["kl"].clamp(min=0).to(world.device, torch.float32)

    def validate():
        kl = mean_ratio(batch for _, batch in data.validation_batches())
        totals = evaluation.validate(model, data.validation_batches(), lambda batch: measure(batch, kl))
        return world.fetch(**world.means(totals))

    evaluator = instantiate(cfg.evaluate, run, model, tokenizer, data)
    if dataset.validation:
        evaluator.add(validate)

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
            kl = mean_ratio(micro_batch for micro_batch, _ in batch)
            totals: dict[str, torch.Tensor] = {}
            for micro_batch, is_last in batch:
                distributed.set_gradient_sync(model, is_last)
                measured = measure(micro_batch, kl)
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
