"""GRPO: reinforcement learning from verifiable rewards, of all parameters or of LoRA adapters.

    python recipes/grpo.py model.path=./SmolLM2-135M dataset.path=./requests.jsonl reward=my_rewards.is_right
    torchrun --nproc-per-node 8 recipes/grpo.py --config my.yaml group_size=16
    tune run --nproc-per-node 8 grpo --config my.yaml adapter.rank=32

A step samples `group_size` completions of each prompt and rewards them. The advantage A of a completion is its reward
minus the mean reward of its group. With r = p / p_sampled, the loss of a step is

    - sum over tokens of  min(r, 2).detach() A log p  /  number of these tokens

1. A is not divided by the group's standard deviation, which would favor prompts where nearly all or nearly no
   completions are right. All tokens of the global batch have the same weight, so length is not rewarded.
2. r corrects for differences between sampler and trainer, and for older policies. losses.ClippedPolicy and losses.GSPO
   are alternatives.
3. Groups whose rewards are all equal give no gradient. `dynamic_sampling` replaces them with groups of other prompts.
4. With `kl` above 0, the loss has a KL term. Its reference is the model before the first step, or another checkpoint.

Every setting is in configs/grpo.yaml. Copy this file (`tune cp grpo my.py`) and change it.
"""

from dataclasses import replace
from typing import Literal

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
from tune.run import Run


def advantages(rewards, baseline: Literal["mean", "leave_one_out"]):
    """Compare the rewards of a prompt's completions with each other: `rewards` `[group]` -> advantages `[group]`."""
    if baseline == "leave_one_out":
        return rewards - (rewards.sum() - rewards) / (len(rewards) - 1)
    return rewards - rewards.mean()


@config.entrypoint("grpo")
def main(cfg):
    world = distributed.init(cfg.device, deterministic=cfg.deterministic, **cfg.parallel)
    run = Run("grpo", world, cfg.output_dir, cfg.resume, settings=cfg, **cfg.logger)

    with torch.device("meta"):
        model = instantiate(cfg.model)  # shapes only: no memory yet
    weights = checkpointers.Pretrained(cfg.model.path, model)
    if cfg.quantization.weights:
        quantization.quantize_linears(model, cfg.quantization.weights, double=cfg.quantization.double)
    lora = instantiate(cfg.adapter) if cfg.adapter else None
    adapted = peft.add_adapters(model, lora) if lora else None
    rewards = [generation.Reward(*each) for each in instantiate_weighted(cfg.reward)]
    policy_loss = instantiate(cfg.loss)  # of log-probs, per token
    head = losses.LogProbs(cfg.memory.loss_chunk_tokens, cfg.sampling.temperature)  # the model calls it with its head
    execution = {  # how the model is stored and computed
        "dtype": cfg.dtype, "master_dtype": cfg.master_dtype, "compile": cfg.compile,
        "activation_checkpointing": cfg.memory.activation_checkpointing,
        "activation_offload": cfg.memory.activation_offload, "cpu_offload": cfg.memory.cpu_offload,
    }  # fmt: skip
    distributed.require_layout(model, world, cfg.dtype, cfg.master_dtype)  # fails before the data are prepared

    tokenizer = instantiate(cfg.tokenizer)
    # The reference is the model before the first step, or a checkpoint. An adapter can be set back to its start; where
    # all parameters are trained, or for a checkpoint, it is a second model.
    is_start = cfg.reference in (None, "adapter_off")  # with adapter.path, adapter_off is refused in the settings
    has_own_reference = cfg.kl > 0 and not (is_start and lora)
    if has_own_reference:
        # Its problems are reported now.
        other = peft.open_model(cfg.model.path if is_start else cfg.reference, setting="reference")
        other.require_same_vocabulary(tokenizer)
    sampler = instantiate(cfg.sampling, stop_ids=tokenizer.stop_ids, decode=tokenizer.decode, seed=cfg.seed)
    dataset = instantiate(cfg.dataset, tokenizer, max_prompt_len=cfg.max_prompt_len)
    environment = locate(cfg.environment) if cfg.environment else None  # a class, with one object per episode
    held_out, reading = cfg.validation_dataset, inherited(cfg.validation_dataset, cfg.dataset)
    validation = []
    if held_out.path:
        validation = instantiate(held_out, tokenizer, max_prompt_len=cfg.max_prompt_len, **reading).prompts
    generation.check_prompts(model, sampler, [*dataset.prompts, *validation], environment)
    data = datasets.PromptLoader(dataset, cfg.prompts_per_step, cfg.epochs, max_steps=cfg.max_steps, seed=cfg.seed)
    longest = cfg.max_prompt_len + sampler.max_new_tokens
    pad_to = longest if cfg.compile and not environment else None  # one shape, for compiled blocks; turns are unbounded
    evaluator = instantiate(cfg.evaluate, run, model, tokenizer, world)
    run.describe_prompts(
        model, data, sampler, longest=longest, samples=cfg.group_size, micro_batch_size=cfg.micro_batch_size,
        merged=cfg.model.path if cfg.export.merge else None, keep=cfg.checkpointer.get("keep"), **execution,
    )  # fmt: skip
    if adapted:
        run.info(adapted.table())

    distributed.parallelize(model, world, **execution)
    weights.load(model)
    peft.start(model, lora, cfg.seed)
    checkpointers.check_forward(model)
    frozen = other.shard(world, cfg.dtype) if has_own_reference else model
    before_training = peft.Reference(model, None if has_own_reference else lora)

    def reference(batch):
        """Return the log-probs of the supervised tokens under the frozen reference."""
        with torch.no_grad(), before_training.restored():
            return frozen(batch, head).log_probs

    def roll_out(prompts, step, sampler=sampler, samples=cfg.group_size):
        """Return this rank's share of the `prompts`: for each, a group of episodes (completions with rewards)."""
        return generation.rollout(
            model, sampler, tokenizer, prompts, rewards, world, samples=samples, step=step,
            environment=environment, max_turns=cfg.max_turns,
        )  # fmt: skip

    def sample_live(prompts, step):
        """Roll out, and up to `dynamic_sampling` times replace groups of equal rewards with those of other prompts."""
        groups = roll_out(prompts, step)
        for _ in range(cfg.dynamic_sampling):
            live = [group for group in groups if generation.is_live(group)]
            dead = world.fetch(groups=world.sum(len(groups) - len(live)))["groups"]
            if not dead:
                break
            groups = live + roll_out(data.draw(int(dead)), step)  # moves the position in the data
        return groups

    def with_advantages(group):
        """Return the samples of a group to train on, with their advantages; none if all rewards are equal."""
        if not generation.is_live(group):
            return []
        rewards_of_group = torch.tensor([episode.reward for episode in group], dtype=torch.float64)
        pairs = zip(group, advantages(rewards_of_group, cfg.baseline).tolist(), strict=True)
        kept = [pair for pair in pairs if not (cfg.mask_truncated and pair[0].finish != "stop")]
        return [episode.sample(advantage) for episode, advantage in kept]

    def measure(batch):
        """Return the loss and other metrics of a micro-batch's sampled tokens, each as (sum, count)."""
        anchor = reference(batch) if cfg.kl else None
        policy = model(batch, head)  # log-probs and entropies, [tokens]
        advantage, sampled = losses.of_tokens("advantage", batch), losses.of_tokens("sampled", batch)  # [tokens]
        loss, clipped = policy_loss(policy.log_probs, sampled, advantage, batch)  # [tokens]
        measured = {"entropy": policy.entropies, "clipped_share": clipped.float()}
        measured["mismatch_kl"] = losses.kl_estimate(sampled, policy.log_probs.detach())
        if anchor is not None:
            measured["kl"] = losses.kl_estimate(policy.log_probs, anchor)
            loss = loss + cfg.kl * measured["kl"]
        return {name: losses.sum_and_count(values) for name, values in {"loss": loss, **measured}.items()}

    def validate():
        groups = roll_out(validation, 0, replace(sampler, temperature=0), 1)  # greedy: the step does not matter
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
    start = checkpointer.resume(run.resume)  # cfg.resume, or "auto" after a restart by the launcher

    with run:  # closes its files, loggers and process group, however the training ends
        steps = run.steps(data, start, checkpointer, seed=cfg.seed, profiler=cfg.profiler)
        run.begin(checkpointer, evaluator)  # measurements before the first step
        for step, prompts in steps:  # after Ctrl-C, ends once a checkpoint is saved
            with run.timed("rollout_seconds"):
                rollout = sample_live(prompts, step)
            samples = [sample for group in rollout for sample in with_advantages(group)]
            batch = generation.global_batch(
                samples, cfg.micro_batch_size, world, seed=cfg.seed, step=step, pad_to=pad_to,
                rows=[group[0].prompt.index for group in rollout],
            )  # fmt: skip
            metrics = world.fetch(
                **{name: world.sum(count) for name, count in generation.counts(rollout, environment).items()},
                **evaluation.means(generation.statistics(rollout, rewards, environment), world),
            )
            # All updates use the same samples; the last one is logged. If all groups are dead or masked, no token is
            # supervised and nothing is updated.
            for _ in range(cfg.updates if batch.num_supervised else 0):
                totals: dict[str, torch.Tensor] = {}
                for micro_batch, is_last in batch:
                    distributed.set_gradient_sync(model, is_last)
                    measured = measure(micro_batch)
                    loss_sum, _ = measured["loss"]
                    loss = loss_sum / batch.num_supervised
                    loss.backward()
                    evaluation.add(totals, measured)
                grad_norm = distributed.clip_grad_norm_(model.parameters(), cfg.max_grad_norm)
                metrics |= world.fetch(
                    grad_norm=grad_norm, **evaluation.routing(model, world), **evaluation.means(totals, world)
                )
                if checkpointer.accepts(step, batch.rows, loss=metrics["loss"], grad_norm=metrics["grad_norm"]):
                    optimizer.step()
                optimizer.zero_grad()
                if checkpointer.refused:
                    break  # the next update would use the same batch, or after a rollback samples of other weights
            metrics |= optimizers.learning_rates(optimizer)
            schedule.step()  # once per step, even if all groups are dead, so that the schedule reaches its end

            metrics |= evaluator(step)
            run.append("samples.jsonl", [episode.record(step) for group in rollout for episode in group])
            run.log(step, batch, metrics)
            checkpointer.step(step, metrics, now=run.is_end(step))

        if not checkpointer.updates:
            masked = ", or mask_truncated left out those that differed" if cfg.mask_truncated else ""
            raise TuneError(
                f"reward: nothing to learn in {len(data)} steps: all completions of a group had the same reward{masked}"
                ". The model is unchanged and not exported. Use other prompts or a finer reward"
            )
        # Run the final evaluation. With keep_best, then load the weights of the best checkpoint.
        run.finish(checkpointer, evaluator)
        card = checkpointers.model_card("grpo", cfg.model.path, dataset.name)
        where = peft.export_trained(
            model, lora, run.path, world, base=weights, tokenizer=tokenizer, card=card, merge=cfg.export.merge
        )
        run.info(f"done: {where}")


if __name__ == "__main__":
    main()
