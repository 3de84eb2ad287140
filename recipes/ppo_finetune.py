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

Every setting is in configs/ppo_finetune.yaml. Copy this file (`tune cp ppo_finetune my.py`) and change it.
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
from tune.run import Run


@config.entrypoint("ppo_finetune")
def main(cfg):
    world = distributed.init(cfg.device, deterministic=cfg.deterministic, **cfg.parallel)
    run = Run("ppo_finetune", world, cfg.output_dir, cfg.resume, settings=cfg, **cfg.logger)

    with torch.device("meta"):
        model = instantiate(cfg.model)  # shapes only: no memory yet
        critic = instantiate(cfg.value)
    weights = checkpointers.Pretrained(cfg.model.path, model)
    critic_weights = checkpointers.Pretrained(cfg.value.path, critic, cfg.seed, "value.path")
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
    is_start = cfg.reference in (None, "adapter_off")  # the reference is the model before the first step
    has_own_reference = cfg.kl and not (is_start and lora)
    if has_own_reference:
        # Its problems are reported now.
        other = peft.open_model(cfg.model.path if is_start else cfg.reference, setting="reference")
        other.require_same_vocabulary(tokenizer)
    checkpointers.require_same_vocabulary("value.path", cfg.value.path, critic, tokenizer)
    sampler = instantiate(cfg.sampling, stop_ids=tokenizer.stop_ids, decode=tokenizer.decode, seed=cfg.seed)
    dataset = instantiate(cfg.dataset, tokenizer, max_prompt_len=cfg.max_prompt_len)
    held_out, reading = cfg.validation_dataset, inherited(cfg.validation_dataset, cfg.dataset)
    validation = []
    if held_out.path:
        validation = instantiate(held_out, tokenizer, max_prompt_len=cfg.max_prompt_len, **reading).prompts
    generation.check_prompts(model, sampler, [*dataset.prompts, *validation])
    data = datasets.PromptLoader(dataset, cfg.prompts_per_step, cfg.epochs, max_steps=cfg.max_steps, seed=cfg.seed)
    longest = cfg.max_prompt_len + sampler.max_new_tokens
    pad_to = longest if cfg.compile else None  # one shape, for compiled blocks
    evaluator = instantiate(cfg.evaluate, run, model, tokenizer, world)
    run.describe_prompts(
        model, data, sampler, longest=longest, samples=cfg.samples_per_prompt, micro_batch_size=cfg.micro_batch_size,
        merged=cfg.model.path if cfg.export.merge else None, keep=cfg.checkpointer.get("keep"), **execution,
    )  # fmt: skip
    if adapted:
        run.info(adapted.table())

    distributed.parallelize(model, world, **execution)
    weights.load(model)
    peft.start(model, lora, cfg.seed)
    checkpointers.check_forward(model)
    distributed.parallelize(critic, world, **execution)
    critic_weights.load(critic)
    if critic_weights.new:
        torch.nn.init.zeros_(critic.head.weight)  # random values would add noise to the first advantages
    both = torch.nn.ModuleDict({"policy": model, "value": critic})
    frozen = other.shard(world, cfg.dtype) if has_own_reference else model
    before_training = peft.Reference(model, None if has_own_reference else lora)

    def reference(batch):
        """Return the log-probs of the supervised tokens under the frozen reference."""
        with torch.no_grad(), before_training.restored():
            return frozen(batch, head).log_probs

    def roll_out(prompts, step, sampler=sampler, samples=cfg.samples_per_prompt):
        """Return this rank's share of the `prompts`: for each, a group of episodes (completions with rewards)."""
        return generation.rollout(model, sampler, tokenizer, prompts, rewards, world, samples=samples, step=step)

    @torch.no_grad()
    def judged(batch):
        """Return a micro-batch's values before the step and the advantages from them, `[tokens]` each."""
        values = critic(batch, losses.token_values)
        ratio = losses.of_tokens("sampled", batch) - reference(batch) if cfg.kl else torch.zeros_like(values)
        return values, losses.gae(-cfg.kl * ratio, values, batch, cfg.gae_lambda, batch.columns["reward"])

    def measure(batch, judgement, mean, deviation):
        """Return the loss and other metrics of a micro-batch's sampled tokens, each as (sum, count)."""
        old, advantages = judgement  # [tokens], like all tensors below
        policy, values = model(batch, head), critic(batch, losses.token_values)
        sampled, returns = losses.of_tokens("sampled", batch), advantages + old
        loss, clipped = policy_loss(policy.log_probs, sampled, (advantages - mean) / deviation, batch)
        near = old + (values - old).clamp(-cfg.value_clip, cfg.value_clip)
        value_loss = torch.maximum((values - returns).square(), (near - returns).square()) / 2
        measured = {
            "loss": loss + cfg.value_weight * value_loss, "policy_loss": loss, "value_loss": value_loss,
            "value": values, "return": returns, "entropy": policy.entropies, "clipped_share": clipped.float(),
            "mismatch_kl": losses.kl_estimate(sampled, policy.log_probs.detach()),
        }  # fmt: skip
        return {name: losses.sum_and_count(values) for name, values in measured.items()}

    def validate():
        groups = roll_out(validation, 0, replace(sampler, temperature=0), 1)  # greedy: the step does not matter
        means = evaluation.means(generation.statistics(groups, rewards), world)
        return world.fetch(**{f"validation_{name}": value for name, value in means.items()})

    if validation:
        evaluator.add(validate, every=cfg.validate_every, first=cfg.validate_first)
    groups = optimizers.parameter_groups(both, cfg.optimizer.lr, **cfg.parameter_groups)
    optimizer = instantiate(cfg.optimizer, groups)
    schedule = instantiate(cfg.schedule, optimizer, total_steps=len(data))
    checkpointer = instantiate(
        cfg.checkpointer, run.path / "checkpoints", world, model=both, optimizer=optimizer, schedule=schedule,
        data=data, tell=run.info, base=weights if lora else None, adapter=lora, tasks=evaluator.tasks,
    )  # fmt: skip
    start = checkpointer.resume(run.resume)  # cfg.resume, or "auto" after a restart by the launcher

    with run:  # closes its files, loggers and process group, however the training ends
        steps = run.steps(data, start, checkpointer, seed=cfg.seed, profiler=cfg.profiler)
        run.begin(checkpointer, evaluator)  # measurements before the first step
        for step, prompts in steps:  # after Ctrl-C, ends once a checkpoint is saved
            with run.timed("rollout_seconds"):
                rollout = roll_out(prompts, step)
            samples = [episode.sample() for group in rollout for episode in group]
            batch = generation.global_batch(
                samples, cfg.micro_batch_size, world, seed=cfg.seed, step=step, pad_to=pad_to,
                rows=[group[0].prompt.index for group in rollout],
            )  # fmt: skip
            metrics = world.fetch(**evaluation.means(generation.statistics(rollout, rewards), world))
            both.eval()
            judgements = [judged(micro_batch) for micro_batch, _ in batch]
            both.train()
            advantages = torch.cat([advantage for _, advantage in judgements])
            advantages = advantages.cpu().double()  # squares of large values cancel
            moments = {"mean": losses.sum_and_count(advantages), "square": losses.sum_and_count(advantages.square())}
            mean, square = world.fetch(**evaluation.means(moments, world)).values()
            deviation = max(1e-12, square - mean**2) ** 0.5
            for _ in range(cfg.updates):
                totals: dict[str, torch.Tensor] = {}
                for (micro_batch, is_last), judgement in zip(batch, judgements, strict=True):
                    for module in both.values():
                        distributed.set_gradient_sync(module, is_last)
                    measured = measure(micro_batch, judgement, mean, deviation)
                    loss = measured["loss"][0] / batch.num_supervised
                    loss.backward()
                    evaluation.add(totals, measured)
                grad_norm = distributed.clip_grad_norm_(both.parameters(), cfg.max_grad_norm)
                metrics |= world.fetch(
                    grad_norm=grad_norm, **evaluation.routing(model, world), **evaluation.means(totals, world)
                )
                finite = {"loss": metrics["loss"], "grad_norm": metrics["grad_norm"]}
                if checkpointer.accepts(step, batch.rows, **finite):
                    optimizer.step()
                optimizer.zero_grad()
                if checkpointer.refused:
                    break  # the next update would use the same batch, or after a rollback samples of other weights
            metrics |= optimizers.learning_rates(optimizer)
            schedule.step()

            metrics |= evaluator(step)
            run.append("samples.jsonl", [episode.record(step) for group in rollout for episode in group])
            run.log(step, batch, metrics)
            checkpointer.step(step, metrics, now=run.is_end(step))

        # Run the final evaluation. With keep_best, then load the weights of the best checkpoint.
        run.finish(checkpointer, evaluator)
        card = checkpointers.model_card("ppo_finetune", cfg.model.path, dataset.name)
        where = peft.export_trained(
            model, lora, run.path, world, base=weights, tokenizer=tokenizer, card=card, merge=cfg.export.merge
        )
        run.info(f"done: {where}")


if __name__ == "__main__":
    main()
