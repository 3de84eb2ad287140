"""Evaluation of a model, an adapter or a run, on lm-evaluation-harness tasks or on your own data.

    python recipes/evaluate.py model.path=./SmolLM2-135M 'tasks=[arc_easy,hellaswag]' out=results.json
    torchrun --nproc-per-node 8 recipes/evaluate.py model.path=./runs/mine 'tasks=[gsm8k]' apply_chat_template=true
    tune eval ./runs/mine --data held_out.jsonl --score my_scores:is_right

1. Tasks give the same answers and numbers as lm-evaluation-harness with its own model class.
2. A data file gives the loss, the perplexity and the fraction of tokens predicted correctly, over all learned tokens of
   the file, with the masks and templates of training.
3. With `score`, the model answers the prompts of a file, and a function (row, completion) -> number scores the answers.

Each process holds the whole model, or a part of it with `parallel.tp`, and takes a share of the requests. Every setting
is in configs/evaluate.yaml. Copy this file (`tune cp evaluate my.py`) and change it.
"""

import json
from dataclasses import replace
from pathlib import Path

import torch

from tune import config, datasets, distributed, evaluation, generation, losses, peft
from tune.config import instantiate, instantiate_weighted
from tune.files import written_aside


@config.entrypoint("evaluate")  # the name of its YAML; `tune cp` renames it
def main(cfg):
    source = cfg.dataset.copy()  # changed below
    path = source.get("path", "data")  # a component for several files has no path
    evaluation.require_work(cfg.tasks, path, cfg.score, cfg.limit, cfg.log_samples, cfg.out)
    if cfg.limit and path:
        source.take = max(1, min(int(cfg.limit), source.get("take") or int(cfg.limit)))
    if cfg.score and source._component_ == "tune.datasets.load":
        source._component_ = "tune.datasets.load_prompts"  # prompts of the same rows
    world = distributed.init(cfg.device, tp=cfg.parallel.tp)

    def tell(text):
        if world.is_main:
            print(text, flush=True)

    # Errors in tasks and data are found before weights are read.
    opened = peft.open_model(cfg.model.path, cfg.adapters, setting="model.path")
    tokenizer = opened.tokenizer(cfg.chat_template)
    model = opened.model  # shapes only: no memory yet
    longest = cfg.max_length or getattr(model, "max_positions", None) or 2048
    tasks = evaluation.Tasks(
        cfg.tasks, tokenizer, cfg.include_path, limit=cfg.limit, num_fewshot=cfg.num_fewshot,
        apply_chat_template=cfg.apply_chat_template, batch_size=cfg.batch_size, max_length=cfg.max_length,
        model=model,
    )  # fmt: skip
    scores = [generation.Reward(*each, "score") for each in instantiate_weighted(cfg.score, "score")]
    if scores:
        sampler = instantiate(
            cfg.generation, stop_ids=tokenizer.stop_ids, decode=tokenizer.decode, max_rows=cfg.batch_size or 16
        )
        sampler.check(model, [], [])
        room = longest - sampler.max_new_tokens
        questions = instantiate(source, tokenizer, max_prompt_len=room)
        tell(questions.table())
    elif path:
        data = instantiate(source, tokenizer, max_seq_len=longest)
        data.require_vocabulary(model.config.vocab_size)
        tell(data.accounting.table())
    model = opened.load(world.device, cfg.dtype, quantization=cfg.quantization, peers=world.mesh["tp"])

    def measure_loss():
        """Return the loss, perplexity and accuracy over all learned tokens of the data, and no answers."""
        batches = datasets.validation_batches(data, world, cfg.batch_size or 8)
        metrics = evaluation.evaluate(model, batches, losses.LinearCrossEntropy(accuracy=True), world)
        loss, accuracy = metrics["validation_loss"], metrics["validation_token_accuracy"]
        perplexity = torch.tensor(loss, dtype=torch.float64).exp().item()  # inf where math.exp would raise
        return {"loss": loss, "perplexity": perplexity, "token_accuracy": accuracy}, []

    def measure_answers():
        """Return the mean scores and the answers."""
        prompts = [replace(prompt, position=prompt.index) for prompt in questions]
        groups = generation.rollout(model, sampler, tokenizer, prompts, scores, world, samples=1, step=0)
        means = world.fetch(**world.means(generation.statistics(groups, scores)))
        metrics = {name.removeprefix("reward/"): value for name, value in means.items() if name != "reward"}
        shares = world.all_gather([episode.record(0) for (episode,) in groups])
        return metrics, sorted((answer for share in shares for answer in share), key=lambda answer: answer["prompt"])

    results: dict = {"results": {}}
    samples: dict = {}
    if tasks:
        results = tasks(model, world, cfg.model.path, cfg.log_samples)
        samples = results.pop("samples", {})
    if path:
        values, answers = measure_answers() if scores else measure_loss()
        if world.is_main:
            name = Path(path).stem
            results["results"][name] = {"alias": name, **{f"{metric},none": value for metric, value in values.items()}}
            samples[name] = answers

    metrics = evaluation.metrics(results, world)
    for name, value in metrics.items():
        tell(f"{name:<40} {value:.4f}")
    if cfg.out and world.is_main:
        out = Path(cfg.out)
        files = {out: json.dumps(results, indent=2, default=str, ensure_ascii=False)}
        for task, rows in samples.items() if cfg.log_samples else ():
            lines = [json.dumps(row, default=str, ensure_ascii=False) + "\n" for row in rows]
            files[out.with_name(f"{out.stem}_samples_{task}.jsonl")] = "".join(lines)
        for file, text in files.items():
            with written_aside(file) as unfinished:
                unfinished.write_text(text, encoding="utf-8")
            tell(f"wrote {file}")
    evaluation.require_numbers(metrics)
    world.finish()


if __name__ == "__main__":
    main()
