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

Every setting is in configs/preference_finetune.yaml. Copy this file (`tune cp preference_finetune my.py`) and change
it.
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
from tune.run import Run


@config.entrypoint("preference_finetune")
def main(cfg):
    world = distributed.init(cfg.device, deterministic=cfg.deterministic, max_seq_len=cfg.max_seq_len, **cfg.parallel)
    run = Run("preference_finetune", world, cfg.output_dir, cfg.resume, settings=cfg, **cfg.logger)

    with torch.device("meta"):
        model = instantiate(cfg.model)  # shapes only: no memory yet
    weights = checkpointers.Pretrained(cfg.model.path, model)
    if cfg.quantization.weights:
        quantization.quantize_linears(model, cfg.quantization.weights, double=cfg.quantization.double)
    lora = instantiate(cfg.adapter) if cfg.adapter else None
    adapted = peft.add_adapters(model, lora) if lora else None
    loss_fn = instantiate(cfg.loss)
    losses.require_attributes(loss_fn, "needs_reference", "reward")
    is_labelled = cfg.dataset.get("kind") == "labelled"  # the loss takes good and bad answers instead of pairs
    log_probs = losses.LogProbs(cfg.memory.loss_chunk_tokens)
    execution = {  # how the model is stored and computed
        "dtype": cfg.dtype, "master_dtype": cfg.master_dtype, "compile": cfg.compile,
        "activation_checkpointing": cfg.memory.activation_checkpointing,
        "activation_offload": cfg.memory.activation_offload, "cpu_offload": cfg.memory.cpu_offload,
    }  # fmt: skip
    distributed.require_layout(model, world, cfg.dtype, cfg.master_dtype)  # fails before the data are prepared
    datasets.require_batches(cfg.global_batch_size, cfg.micro_batch_size, world.data_size)

    tokenizer = instantiate(cfg.tokenizer)
    has_own_reference = loss_fn.needs_reference and cfg.reference not in ("precomputed", "adapter_off")
    other = None
    if has_own_reference:
        other = peft.open_model(cfg.reference, setting="reference")  # its problems are reported now
        other.require_same_vocabulary(tokenizer)
    dataset, validation = instantiate_data(
        cfg.dataset, cfg.validation_dataset, tokenizer, vocab_size=model.config.vocab_size,
        max_seq_len=cfg.max_seq_len, packed=cfg.packed,
    )  # fmt: skip
    if loss_fn.needs_reference and cfg.reference != "adapter_off":
        datasets.require_kept("reference", dataset, validation)
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

    # Before the first forward, which leaves some parameters unsharded.
    groups = optimizers.parameter_groups(model, cfg.optimizer.lr, **cfg.parameter_groups)
    optimizer = instantiate(cfg.optimizer, groups)
    schedule = instantiate(cfg.schedule, optimizer, total_steps=len(data))

    if loss_fn.needs_reference and cfg.reference != "adapter_off":
        frozen = other.shard(world, cfg.dtype) if other else model.eval()
        for part in filter(None, (dataset, validation)):
            part.require_vocabulary(frozen.config.vocab_size)
            datasets.add_scores(
                part, "reference", lambda batch: losses.per_document(frozen(batch, log_probs).log_probs, batch), world,
                micro_batch_size=cfg.micro_batch_size, pad_to=pad_to, folder=run.path,
                made_of=[(other or weights).digest(), peft.digest(lora), cfg.dtype],
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
        return evaluation.means(totals, world)["kl"].clamp(min=0).to(world.device, torch.float32)

    def validate():
        def batches():
            return datasets.validation_batches(validation, world, cfg.micro_batch_size, pad_to)

        kl = mean_ratio(batch for _, batch in batches())
        totals = evaluation.validate(model, batches(), lambda batch: measure(batch, kl))
        return world.fetch(**evaluation.means(totals, world))

    if validation:
        evaluator.add(validate, every=cfg.validate_every, first=cfg.validate_first)
    checkpointer = instantiate(
        cfg.checkpointer, run.path / "checkpoints", world, model=model, optimizer=optimizer, schedule=schedule,
        data=data, tell=run.info, base=weights if lora else None, adapter=lora, tasks=evaluator.tasks,
    )  # fmt: skip
    start = checkpointer.resume(run.resume)  # cfg.resume, or "auto" after a restart by the launcher

    with run:  # closes its files, loggers and process group, however the training ends
        steps = run.steps(data, start, checkpointer, seed=cfg.seed, profiler=cfg.profiler)
        run.begin(checkpointer, evaluator)  # measurements before the first step
        for step, batch in steps:  # after Ctrl-C, ends once a checkpoint is saved
            kl = mean_ratio(micro_batch for micro_batch, _ in batch)
            totals: dict[str, torch.Tensor] = {}
            for micro_batch, is_last in batch:
                distributed.set_gradient_sync(model, is_last)
                measured = measure(micro_batch, kl)
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
        card = checkpointers.model_card("preference_finetune", cfg.model.path, dataset.name)
        where = peft.export_trained(
            model, lora, run.path, world, base=weights, tokenizer=tokenizer, card=card, merge=cfg.export.merge
        )
        run.info(f"done: {where}")


if __name__ == "__main__":
    main()
