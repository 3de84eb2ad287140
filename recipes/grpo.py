"""Reinforcement learning from verifiable rewards, of all parameters or of LoRA adapters: GRPO.

    python recipes/grpo.py model.path=./SmolLM2-135M dataset.path=./requests.jsonl reward=my_rewards.is_right
    torchrun --nproc-per-node 8 recipes/grpo.py --config my.yaml group_size=16
    tune run --nproc-per-node 8 grpo --config my.yaml adapter.rank=32

A step samples `group_size` completions of each prompt and rewards them. The advantage A of a completion is its reward
less the mean of its group. With r = p / p_sampled, the loss of a step is

    - sum over tokens of  min(r, 2).detach() A log p  /  number of these tokens

1. A is not divided by the group's standard deviation, which would favour prompts of which nearly all or nearly no
   completion is right. Tokens of all completions of the global batch weigh the same, so length is not rewarded.
2. r corrects for the difference of sampler and trainer, and for older policies. Others: losses.ClippedPolicy, GSPO.
3. Groups whose rewards are all equal carry nothing; with `dynamic_sampling` others are sampled in their place.
4. There is no KL term unless `kl` is above 0. The reference is the model before the first step, or another checkpoint.

Every setting is in configs/grpo.yaml. Copy this file (`tune cp grpo my.py`) and change it.
"""

from dataclasses import replace

import torch

from tune import (
    checkpointers,
    config,
    datasets,
    distributed,
    evaluation,
    generation,
    losses,
    optimizers,
    peft,
    quantization,
)
from tune.config import inherited, instantiate, instantiate_weighted
from tune.errors import TuneError
from tune.lookup import locate
from tune.plan import layout_of
from tune.run import Run


@config.entrypoint("grpo")
def main(cfg):
    world = distributed.init(cfg.device, **layout_of(cfg.parallel, cfg))
    run = Run("grpo", world, cfg.output_dir, cfg.resume, settings=cfg, **cfg.logger)

    with torch.device("meta"):
        model = instantiate(cfg.model)  # its shape only: no memory yet
    weights = checkpointers.Pretrained(cfg.model.path, model)
    if cfg.quantization.weights:
        quantization.quantize_linears(model, double=cfg.quantization.double)
    lora = instantiate(cfg.adapter) if cfg.adapter else None
    adapted = peft.add_adapters(model, lora) if lora else None
    rewards = [generation.Reward(*each) for each in instantiate_weighted(cfg.reward)]
    loss_fn = instantiate(cfg.loss)
    log_probs = losses.LogProbs(cfg.memory.loss_chunk_tokens, cfg.sampling.temperature)
    distributed.require_layout(model, world, cfg.dtype, cfg.master_dtype)  # before the data are prepared

    tokenizer = instantiate(cfg.tokenizer)
    is_start = cfg.reference in (None, "adapter_off")  # the reference is the model before the first step
    has_own_reference = cfg.kl and not (is_start and lora)
    reference_path = cfg.model.path if is_start else cfg.reference
    if has_own_reference:
        checkpointers.require_frozen("reference", reference_path, tokenizer)  # what is wrong with it is told now
    sampler = instantiate(cfg.sampling, stop_ids=tokenizer.stop_ids, decode=tokenizer.decode, seed=cfg.seed)
    dataset = instantiate(cfg.dataset, tokenizer, max_prompt_len=cfg.max_prompt_len)
    environment = locate(cfg.environment) if cfg.environment else None
    held_out, reading = cfg.validation_dataset, inherited(cfg.validation_dataset, cfg.dataset)
    validation = []
    if held_out.path:
        validation = instantiate(held_out, tokenizer, max_prompt_len=cfg.max_prompt_len, **reading).prompts
    generation.check_prompts(model, sampler, [*dataset.prompts, *validation], environment)
    data = datasets.PromptLoader(dataset, cfg.prompts_per_step, cfg.epochs, max_steps=cfg.max_steps, seed=cfg.seed)
    longest = cfg.max_prompt_len + sampler.max_new_tokens
    pad_to = longest if cfg.compile and not environment else None  # batches of one shape
    evaluator = instantiate(cfg.evaluate, run, model, tokenizer, world)
    run.describe_prompts(
        model, data, sampler, longest=longest, samples=cfg.group_size, micro_batch_size=cfg.micro_batch_size,
        dtype=cfg.dtype, master_dtype=cfg.master_dtype, compile=cfg.compile,
        activation_checkpointing=cfg.memory.activation_checkpointing,
        merged=cfg.model.path if cfg.export.merge else None, keep=cfg.checkpointer.get("keep"),
    )  # fmt: skip
    if adapted:
        run.info(adapted.table())

    distributed.parallelize(
        model, world, dtype=cfg.dtype, master_dtype=cfg.master_dtype, compile=cfg.compile,
        activation_checkpointing=cfg.memory.activation_checkpointing,
        activation_offload=cfg.memory.activation_offload, cpu_offload=cfg.memory.cpu_offload,
    )  # fmt: skip
    weights.load(model)
    peft.start(model, lora, cfg.seed)
    checkpointers.check(model)
    frozen = checkpointers.load_frozen(reference_path, world, cfg.dtype)[0] if has_own_reference else model
    before_training = peft.Reference(model, None if has_own_reference else lora)

    def reference(batch):
        """Log-probs of the supervised tokens under the frozen reference."""
        with torch.no_grad(), before_training.restored():
            return frozen(batch, log_probs).log_probs

    def sample(prompts, step, sampler=sampler, samples=cfg.group_size):
        return generation.rollout(
            model, sampler, tokenizer, prompts, rewards, world, samples=samples, step=step,
            environment=environment, max_turns=cfg.max_turns,
        )  # fmt: skip

    def sample_live(prompts, step):
        """With dynamic sampling, other groups in the place of those whose rewards are all equal."""
        groups = sample(prompts, step)
        for _ in range(cfg.dynamic_sampling):
            live = [group for group in groups if generation.is_live(group)]
            dead = world.fetch(groups=world.sum(len(groups) - len(live)))["groups"]
            if not dead:
                break
            groups = live + sample(data.draw(int(dead)), step)
        return groups

    def with_advantages(group):
        """The samples of a group that are trained on."""
        values = torch.tensor([episode.reward for episode in group], dtype=torch.float64)
        others = (values.sum() - values) / (len(group) - 1)
        baseline = others if cfg.baseline == "leave_one_out" else values.mean()
        pairs = zip(group, (values - baseline).tolist(), strict=True)
        kept = [pair for pair in pairs if not (cfg.mask_truncated and pair[0].finish != "stop")]
        return [episode.sample(advantage) for episode, advantage in kept] if generation.is_live(group) else []

    def measure(batch):
        """The loss of a micro-batch's tokens, and metrics: sums, and of how many they are."""
        anchor = reference(batch) if cfg.kl else None
        found = model(batch, log_probs)
        advantages, sampled = losses.of_tokens("advantage", batch), losses.of_tokens("sampled", batch)
        loss, clipped = loss_fn(found.log_probs, sampled, advantages, batch)
        measured = {"entropy": found.entropies, "clipped_share": clipped.float()}
        measured["mismatch_kl"] = losses.kl_estimate(sampled, found.log_probs.detach())
        if anchor is not None:
            measured["kl"] = losses.kl_estimate(found.log_probs, anchor)
            loss = loss + cfg.kl * measured["kl"]
        return {name: losses.sum_and_count(values) for name, values in {"loss": loss, **measured}.items()}

    def validate():
        groups = sample(validation, 0, replace(sampler, temperature=0), 1)
        means = evaluation.means(generation.statistics(groups, rewards, environment), world)
        return world.fetch(**{f"validation_{name}": value for name, value in means.items()})

    if validation:
        evaluator.add(validate, every=cfg.validate_every, first=cfg.validate_first)
    groups = optimizers.parameter_groups(model, cfg.optimizer.lr, **cfg.parameter_groups)
    optimizer = instantiate(cfg.optimizer, groups)
    schedule = instantiate(cfg.schedule, optimizer, total_steps=len(data))
    checkpointer = instantiate(
        cfg.checkpointer, run.path / "checkpoints", world, model=model, optimizer=optimizer, schedule=schedule,
        data=data, tell=run.info, base=weights if lora else None, adapter=lora, tasks=evaluator.tasks,
    )  # fmt: skip
    start = checkpointer.resume(run.resume)  # cfg.resume, as all ranks see it

    with run:  # closes its files and loggers, however the training ends
        steps = run.steps(data, start, checkpointer, seed=cfg.seed, profiler=cfg.profiler)
        if start == 0:
            evaluator(0)
        for step, prompts in steps:  # until Ctrl-C: then a checkpoint is saved
            with run.timed("rollout_seconds"):
                rollout = sample_live(prompts, step)
            samples = [each for group in rollout for each in with_advantages(group)]
            batch = generation.global_batch(
                samples, cfg.micro_batch_size, world, seed=cfg.seed, step=step, pad_to=pad_to,
                rows=[group[0].prompt.index for group in rollout],
            )  # fmt: skip
            metrics = world.fetch(
                **{name: world.sum(count) for name, count in generation.counts(rollout, environment).items()},
                **evaluation.means(generation.statistics(rollout, rewards, environment), world),
            )
            for _ in range(cfg.updates if batch.num_supervised else 0):  # nothing to learn from dead groups
                totals: dict[str, torch.Tensor] = {}
                for micro_batch, is_last in batch:
                    distributed.set_gradient_sync(model, is_last)
                    measured = measure(micro_batch)
                    loss = measured["loss"][0] / batch.num_supervised
                    loss.backward()
                    evaluation.add(totals, measured)
                grad_norm = distributed.clip_grad_norm_(model.parameters(), cfg.max_grad_norm)
                found = evaluation.routing(model, world) | evaluation.means(totals, world)
                metrics |= world.fetch(grad_norm=grad_norm, **found)
                if checkpointer.accepts(step, batch.rows, loss=metrics["loss"], grad_norm=metrics["grad_norm"]):
                    optimizer.step()
                optimizer.zero_grad()
                if checkpointer.refused:
                    break  # the next update would be of the same, and after a rollback of other weights' completions
            metrics |= optimizers.learning_rates(optimizer)
            schedule.step()  # after each step, also one of dead groups: the rate ends where it should

            metrics |= evaluator(step)
            run.append("samples.jsonl", [episode.record(step) for group in rollout for episode in group])
            run.log(step, batch, metrics)
            checkpointer.step(step, metrics, now=run.is_end(step))

        if not checkpointer.updates:
            left_out = " or with mask_truncated all that differ were cut" if cfg.mask_truncated else ""
            raise TuneError(
                f"reward: no completion of {len(data)} steps could be learned from: the rewards of a group were equal"
                f"{left_out}. The model has not changed and is not exported. Use other prompts or a finer reward"
            )
        # What is measured at the end; then with keep_best, the model gets the weights of the best checkpoint.
        run.finish(checkpointer, evaluator)
        card = checkpointers.model_card("grpo", cfg.model.path, dataset.name)
        where = peft.export_trained(
            model, lora, run.path, world, base=weights, tokenizer=tokenizer, card=card, merge=cfg.export.merge
        )
        run.info(f"done: {where}")


if __name__ == "__main__":
    main()
