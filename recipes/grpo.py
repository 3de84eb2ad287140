"""GRPO: reinforcement learning from verifiable rewards, of all parameters or of LoRA adapters.

    python recipes/grpo.py model.path=./SmolLM2-135M dataset.path=./requests.jsonl reward=my_rewards.is_right
    torchrun --nproc-per-node 8 recipes/grpo.py --config my.yaml group_size=16
    tune run --nproc-per-node 8 grpo --config my.yaml adapter.rank=32

    def is_right(row, completion): return row["answer"] in completion  # my_rewards.py: a row of the data, and a text

A step samples `group_size` completions of each prompt and rewards them. The advantage A of a completion is its reward
minus the mean reward of its group. With r = p / p_sampled, the loss over the tokens of a step is

    - sum over tokens of  min(r, 2).detach() A log p  /  number of these tokens

1. A is not divided by the group's standard deviation, which would favor prompts where nearly all or nearly no
   completions are right. All tokens of the global batch have the same weight, so length is not rewarded.
2. r corrects for differences between sampler and trainer, and for older policies. losses.ClippedPolicy and losses.GSPO
   are alternatives.
3. Both sums leave out groups of equal rewards (or `dynamic_sampling` replaces them) and what `mask_truncated` masks.
4. With `kl` above 0, the loss has a KL term. Its reference is the model before the first step, or another checkpoint.

The settings are in configs/grpo.yaml. Copy this file (`tune cp grpo my.py`) and change it.
"""

from typing import Literal

import torch

from tune import checkpointers, config, datasets, distributed, evaluation, generation, losses, optimizers, peft
from tune.config import instantiate, instantiate_weighted
from tune.run import Run


def advantages(rewards, baseline: Literal["mean", "leave_one_out"]):  # the values that the setting may have
    """Compare the rewards of a prompt's completions with each other: `rewards` `[group]` -> advantages `[group]`."""
    if baseline == "leave_one_out":
        return rewards - (rewards.sum() - rewards) / (len(rewards) - 1)
    return rewards - rewards.mean()


@config.entrypoint("grpo")  # the name of its YAML; `tune cp` renames it, here and in Run
def main(cfg):
    # From cheap to expensive: the layout, names and shapes, the data, weights. Nothing is written before run.steps.
    world = distributed.init(cfg.device, **cfg.parallel)
    run = Run("grpo", world, cfg.output_dir, cfg.resume, settings=cfg, trackers=cfg.trackers)

    # On the meta device, the model has shapes and no memory. parallelize shards, casts and compiles it in place.
    with torch.device("meta"):
        model = instantiate(cfg.model)
    weights = checkpointers.Pretrained(cfg.model.path, model)

    # Without an adapter, all parameters are trained.
    lora = instantiate(cfg.adapter) if cfg.adapter else None  # settings
    if lora:
        run.info(peft.add_adapters(model, lora).table())  # in place; freezes the rest
    distributed.parallelize(model, world, **cfg.compute)

    # Prompts keep their rows, which the rewards read.
    tokenizer = instantiate(cfg.tokenizer)
    dataset = instantiate(cfg.dataset, tokenizer, max_prompt_len=cfg.max_prompt_len)
    data = datasets.PromptLoader(dataset, cfg.prompts_per_step, cfg.epochs, cfg.max_steps, cfg.seed)
    sampler = instantiate(cfg.sampling, stop_ids=tokenizer.stop_ids, decode=tokenizer.decode, seed=cfg.seed)
    rollouts = generation.Rollouts(  # samples with the model's current weights
        model,
        sampler,
        tokenizer,
        rewards=instantiate_weighted(cfg.reward),
        samples=cfg.group_size,
        max_prompt_len=cfg.max_prompt_len,
        micro_batch_size=cfg.micro_batch_size,  # of the batches for training, which rollouts.batch makes
        environment=cfg.environment,
        max_turns=cfg.max_turns,
        pad_to_longest=bool(cfg.compute.compile),
    )

    # These can fail, so they come before the weights are read.
    rollouts.check(dataset, dataset.validation)  # room for a completion; with an environment, also conversations
    run.describe_rollouts(data, rollouts)
    reference = peft.Reference(model, lora, cfg.reference, tokenizer=tokenizer) if cfg.kl else None  # opened

    weights.load(model)  # each process reads its own slices
    # Reads adapter.path, or makes an adapter that changes nothing yet. init=pissa and olora read the base's values.
    peft.load_or_initialize(model, lora, cfg.seed)
    if reference:
        reference.load(cfg.compute.dtype)  # reads its weights, or keeps the ones that were just loaded
    policy_loss = instantiate(cfg.loss)  # of log-probs, per token; GSPO also reads the documents of the batch
    log_probs = losses.LogProbs(cfg.loss_chunk_tokens, cfg.sampling.temperature)  # the model calls it with its head

    def sample_live(prompts, step):
        """Roll out, and up to `dynamic_sampling` times replace groups of equal rewards with those of other prompts."""
        groups = rollouts(prompts, step)
        for _ in range(cfg.dynamic_sampling):
            live = [group for group in groups if generation.is_live(group)]
            num_dead = world.fetch(dead=world.sum(len(groups) - len(live)))["dead"]  # of all processes
            if not num_dead:
                break
            groups = live + rollouts(data.draw(int(num_dead)), step)  # all draw the same; rollouts samples its share
        return groups

    def with_advantages(group):
        """Return the samples of a group to train on, with their advantages; none if all rewards are equal."""
        if not generation.is_live(group):
            return []  # else their tokens would count in the denominator
        rewards = torch.tensor([episode.reward for episode in group], dtype=torch.float64)  # fp32 rounds differences
        samples = []
        for episode, advantage in zip(group, advantages(rewards, cfg.baseline).tolist(), strict=True):
            if episode.finish == "stop" or not cfg.mask_truncated:  # else "length", or "room": none for another turn
                samples.append(episode.sample(advantage))
        return samples

    def measure(micro_batch):
        """Return the loss and other metrics of a micro-batch's sampled tokens, each as (sum, count)."""
        anchor = reference(micro_batch, log_probs).log_probs if reference else None  # first: it may swap the parameters
        predicted = model(micro_batch, log_probs)  # log-probs, and entropies without gradient: [tokens], like all here
        advantage, sampled_log_probs = (losses.of_tokens(name, micro_batch) for name in ("advantage", "sampled"))
        loss, clipped = policy_loss(predicted.log_probs, sampled_log_probs, advantage, micro_batch)
        measured = {"loss": loss, "entropy": predicted.entropies, "clipped_share": clipped.float()}
        measured["mismatch_kl"] = losses.kl_estimate(sampled_log_probs, predicted.log_probs.detach())  # sampler/trainer
        if anchor is not None:
            measured["kl"] = losses.kl_estimate(predicted.log_probs, anchor)
            measured["loss"] = loss + cfg.kl * measured["kl"]
        return {name: losses.sum_and_count(values) for name, values in measured.items()}

    evaluator = instantiate(cfg.evaluate, run, model, tokenizer)
    if dataset.validation:
        evaluator.add(lambda: rollouts.validate(dataset.validation))

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
        for step, prompts in run.steps(data, checkpointer, evaluator, seed=cfg.seed):
            with run.timed("rollout_seconds"):
                groups = sample_live(prompts, step)
            samples = [sample for group in groups for sample in with_advantages(group)]
            batch = rollouts.batch(samples, step, groups, cfg.seed)  # groups: the rows that errors name
            metrics = run.fetch(**rollouts.metrics(groups), **rollouts.counts(groups))  # means; counts of dead groups

            # All updates use the same samples; the last one is logged. If all groups are dead or masked, no token is
            # supervised and nothing is updated: the learning rate in the log is then from the line above.
            for _ in range(cfg.updates if batch.num_supervised else 0):
                totals: dict[str, torch.Tensor] = {}
                for micro_batch, is_last in batch:
                    distributed.set_gradient_sync(model, is_last)
                    measured = measure(micro_batch)
                    loss = measured["loss"][0] / batch.num_supervised
                    loss.backward()
                    evaluation.add(totals, measured)  # sums over micro-batches

                grad_norm = distributed.clip_grad_norm_(model.parameters(), cfg.max_grad_norm)
                metrics |= run.fetch(grad_norm=grad_norm, **world.means(totals))
                is_accepted = checkpointer.accepts(step, metrics, batch.rows)  # if finite
                if is_accepted:
                    optimizer.step()
                optimizer.zero_grad()
                if not is_accepted:
                    break  # the next update would use the same batch, or after a rollback samples of other weights
            schedule.step()  # once per step, even if all groups are dead, so that the schedule reaches its end

            metrics |= evaluator(step)  # the measurements that are due
            run.append("samples.jsonl", [episode.record(step) for group in groups for episode in group])
            run.log(step, batch, metrics)
            checkpointer.step(step, metrics)

        run.finish()  # last measurements; with keep_best, the best weights; after Ctrl-C the process exits here
        card = run.model_card(cfg.model.path)
        peft.export_trained(model, lora, run.path, base=weights, tokenizer=tokenizer, card=card, merge=cfg.export.merge)


if __name__ == "__main__":
    main()
