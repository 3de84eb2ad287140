"""PPO: reinforcement learning with a value model, of all parameters or of LoRA adapters.

    python recipes/ppo_finetune.py model.path=./sft dataset.path=./requests.jsonl reward=my_rewards.is_right
    torchrun --nproc-per-node 8 recipes/ppo_finetune.py --config my.yaml value.path=./reward_model
    tune run --nproc-per-node 8 ppo_finetune --config my.yaml adapter.rank=32

A step samples completions of its prompts. The reward r of a token is -kl (log p - log ^p), where ^p is the frozen
reference. The last token also gets the completion's reward. With the value model V and d_t = r_t + V_t+1 - V_t, the
advantage is A_t = sum over k of lambda^k d_t+k (GAE), and V learns R = A + V. The loss is the mean over tokens of

    -min(ratio A, clip(ratio, 1 - low, 1 + high) A) + value_weight max((V - R)^2, (V near the old one - R)^2) / 2

1. Advantages are normalized to mean 0 and standard deviation 1 over the tokens of a step. A step makes `updates`
   optimizer steps on these tokens.
2. The value model is the base or a reward model, with a head of one output. It is trained in full and not exported.

The settings are in configs/ppo_finetune.yaml. Copy this file (`tune cp ppo_finetune my.py`) and change it.
"""

import torch

from tune import checkpointers, config, datasets, distributed, evaluation, generation, losses, optimizers, peft
from tune.config import instantiate, instantiate_weighted
from tune.run import Run


@config.entrypoint("ppo_finetune")  # the name of its YAML; `tune cp` renames it, here and in Run
def main(cfg):
    # From cheap to expensive: the layout, names and shapes, the data, weights. Nothing is written before run.steps.
    world = distributed.init(cfg.device, **cfg.parallel)
    run = Run("ppo_finetune", world, cfg.output_dir, cfg.resume, settings=cfg, trackers=cfg.trackers)

    # On the meta device, the model has shapes and no memory. parallelize shards, casts and compiles it in place.
    with torch.device("meta"):
        model = instantiate(cfg.model)
        critic = instantiate(cfg.value)
    weights = checkpointers.Pretrained(cfg.model.path, model)
    critic_weights = checkpointers.Pretrained(cfg.value.path, critic, cfg.seed, "value.path")

    # Without an adapter, all parameters of the policy are trained; those of the value model always are.
    lora = instantiate(cfg.adapter) if cfg.adapter else None  # settings
    if lora:
        run.info(peft.add_adapters(model, lora).table())  # in place; freezes the rest
    distributed.parallelize(model, world, **cfg.compute)
    distributed.parallelize(critic, world, **cfg.compute)

    # Prompts keep their rows, which the rewards read.
    tokenizer = instantiate(cfg.tokenizer)
    dataset = instantiate(cfg.dataset, tokenizer, max_prompt_len=cfg.max_prompt_len)
    data = datasets.PromptLoader(dataset, cfg.prompts_per_step, cfg.epochs, cfg.max_steps, cfg.seed)
    sampler = instantiate(cfg.sampling, stop_ids=tokenizer.stop_ids, decode=tokenizer.decode, seed=cfg.seed)
    checkpointers.require_same_vocabulary("value.path", cfg.value.path, critic, tokenizer)
    rollouts = generation.Rollouts(  # samples with the model's current weights
        model,
        sampler,
        tokenizer,
        rewards=instantiate_weighted(cfg.reward),
        samples=cfg.samples_per_prompt,
        max_prompt_len=cfg.max_prompt_len,
        micro_batch_size=cfg.micro_batch_size,  # of the batches for training, which rollouts.batch makes
        pad_to_longest=bool(cfg.compute.compile),
    )

    # These can fail, so they come before the weights are read.
    rollouts.check(dataset, dataset.validation)  # room for a completion
    run.describe_rollouts(data, rollouts)
    reference = peft.Reference(model, lora, cfg.reference, tokenizer=tokenizer) if cfg.kl else None  # opened

    weights.load(model)  # each process reads its own slices
    # Reads adapter.path, or makes an adapter that changes nothing yet. init=pissa and olora read the base's values.
    peft.load_or_initialize(model, lora, cfg.seed)
    if reference:
        reference.load(cfg.compute.dtype)  # reads its weights, or keeps the ones that were just loaded
    critic_weights.load(critic)
    if critic_weights.new:
        torch.nn.init.zeros_(critic.head.weight)  # random values would add noise to the first advantages
    both = torch.nn.ModuleDict({"policy": model, "value": critic})
    policy_loss = instantiate(cfg.loss)  # of log-probs, per token; GSPO also reads the documents of the batch
    log_probs = losses.LogProbs(cfg.loss_chunk_tokens, cfg.sampling.temperature)  # the model calls it with its head

    @torch.no_grad()
    def judged(batch):
        """Return a micro-batch's values before the step and the advantages from them, `[tokens]` each."""
        values = critic(batch, losses.token_values)
        log_ratio = torch.zeros_like(values)
        if reference:
            log_ratio = losses.of_tokens("sampled", batch) - reference(batch, log_probs).log_probs
        return values, losses.gae(-cfg.kl * log_ratio, values, batch, cfg.gae_lambda, batch.columns["reward"])

    def measure(batch, judgement, mean, deviation):
        """Return the loss and other metrics of a micro-batch's sampled tokens, each as (sum, count)."""
        old, advantages = judgement  # [tokens], like all tensors below
        predicted, values = model(batch, log_probs), critic(batch, losses.token_values)
        sampled_log_probs, returns = losses.of_tokens("sampled", batch), advantages + old
        normalized = (advantages - mean) / deviation
        loss, clipped = policy_loss(predicted.log_probs, sampled_log_probs, normalized, batch)
        near = old + (values - old).clamp(-cfg.value_clip, cfg.value_clip)
        value_loss = torch.maximum((values - returns).square(), (near - returns).square()) / 2
        measured = {
            "loss": loss + cfg.value_weight * value_loss, "policy_loss": loss, "value_loss": value_loss,
            "value": values, "return": returns, "entropy": predicted.entropies, "clipped_share": clipped.float(),
            "mismatch_kl": losses.kl_estimate(sampled_log_probs, predicted.log_probs.detach()),  # sampler/trainer
        }  # fmt: skip
        return {name: losses.sum_and_count(values) for name, values in measured.items()}

    evaluator = instantiate(cfg.evaluate, run, model, tokenizer)
    if dataset.validation:
        evaluator.add(lambda: rollouts.validate(dataset.validation))

    optimizer = instantiate(cfg.optimizer, optimizers.parameter_groups(both, cfg.optimizer.lr, **cfg.parameter_groups))
    schedule = instantiate(cfg.schedule, optimizer, total_steps=len(data))
    # Frozen weights are not saved: resuming refuses another base, or other settings of the adapter.
    checkpointer = instantiate(
        cfg.checkpointer, run, model=both, optimizer=optimizer, schedule=schedule, data=data, base=weights, adapter=lora
    )

    with run:  # closes its files and the process group, however the training ends
        # Resumes after the last checkpoint, seeds each step, and ends early at Ctrl-C or by checkpointer.patience.
        for step, prompts in run.steps(data, checkpointer, evaluator, seed=cfg.seed):
            with run.timed("rollout_seconds"):
                groups = rollouts(prompts, step)
            samples = [episode.sample() for group in groups for episode in group]
            batch = rollouts.batch(samples, step, groups, cfg.seed)  # groups: the rows that errors name
            metrics = run.fetch(**rollouts.metrics(groups))

            both.eval()
            judgements = [judged(micro_batch) for micro_batch, _ in batch]
            both.train()
            advantages = torch.cat([advantage for _, advantage in judgements])
            advantages = advantages.cpu().double()  # squares of large values cancel
            moments = {"mean": losses.sum_and_count(advantages), "square": losses.sum_and_count(advantages.square())}
            mean, square = world.fetch(**world.means(moments)).values()
            deviation = max(1e-12, square - mean**2) ** 0.5
            for _ in range(cfg.updates):
                totals: dict[str, torch.Tensor] = {}
                for (micro_batch, is_last), judgement in zip(batch, judgements, strict=True):
                    for module in both.values():
                        distributed.set_gradient_sync(module, is_last)
                    measured = measure(micro_batch, judgement, mean, deviation)
                    loss = measured["loss"][0] / batch.num_supervised
                    loss.backward()
                    evaluation.add(totals, measured)  # sums over micro-batches

                grad_norm = distributed.clip_grad_norm_(both.parameters(), cfg.max_grad_norm)
                metrics |= run.fetch(grad_norm=grad_norm, **world.means(totals))
                is_accepted = checkpointer.accepts(step, metrics, batch.rows)  # if finite
                if is_accepted:
                    optimizer.step()
                optimizer.zero_grad()
                if not is_accepted:
                    break  # the next update would use the same batch, or after a rollback samples of other weights
            schedule.step()

            metrics |= evaluator(step)  # the measurements that are due
            run.append("samples.jsonl", [episode.record(step) for group in groups for episode in group])
            run.log(step, batch, metrics)
            checkpointer.step(step, metrics)

        run.finish()  # last measurements; with keep_best, the best weights; after Ctrl-C the process exits here
        card = run.model_card(cfg.model.path)
        peft.export_trained(model, lora, run.path, base=weights, tokenizer=tokenizer, card=card, merge=cfg.export.merge)


if __name__ == "__main__":
    main()
