"""What each recipe computes of full rows, in its own lines: of the model that it trains, and of frozen ones."""

import copy
import functools
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from tune import losses, quantization
from tune.collators import IGNORE, Batch, Sample, collate
from tune.config import instantiate
from tune.distributed import DTYPES
from tune.errors import TuneError
from tune.generation import EXAMPLES, PREFILL_TOKENS, Sampler, choose
from tune.lookup import locate
from tune.models import ConfigFile, build
from tune.plan.trace import Subject, shorten


def subjects(cfg: DictConfig, model: Any) -> list[Subject]:
    """The trained `model` with its loss, then frozen ones. Raises TuneError: a setting is not planned."""
    samples = "group_size" in cfg
    has_engine = samples and locate(cfg.sampling._component_) is not Sampler
    if has_engine or (samples and (cfg.environment or "RewardModel" in f"{cfg.reward}")):
        raise TuneError("plan: of grpo neither environments, reward models nor other engines than ours are planned")
    loss_fn, chunk = instantiate(cfg.loss), cfg.memory.get("loss_chunk_tokens")
    kind = _kind_of_rows(cfg)
    log_probs = losses.LogProbs(chunk, cfg.sampling.temperature if samples else 1)
    top_k, frozen = cfg.get("teacher", {}).get("top_k"), list[Subject]()
    if "teacher" in cfg:
        head = losses.MostProbable(top_k, chunk_tokens=chunk) if top_k else losses.Teacher.head
        frozen.append(_frozen("teacher.path", cfg.teacher, cfg.teacher.dtype, head))
        frozen[0] = frozen[0]._replace(**{"place": "alone"} if top_k else {"place": "head", "passes": 1})

    @losses.takes_shares
    def of_tokens(hidden: Tensor, weight: Tensor, batch: Batch, **softcap: Any) -> Tensor:
        if top_k:
            target: Any = losses.TopK.stored(batch.columns["teacher"], batch)
        else:  # what the teacher gives: what it takes to compute that is traced on its own
            shape, dtype = cast(Any, frozen[0].model.config), DTYPES[cfg.teacher.dtype]
            given = hidden.new_empty(*hidden.shape[:2], shape.hidden_size, dtype=dtype)
            of_head = hidden.new_empty(1, dtype=dtype).expand(shape.vocab_size, shape.hidden_size)
            target = losses.Teacher(given, of_head, getattr(shape, "logit_softcap", None))
        return loss_fn(hidden, weight, batch, teacher=target, **softcap)

    def loss(model: Any, batch: Batch) -> Any:
        if samples:
            found = model(batch, log_probs).log_probs
            advantages, sampled = losses.of_tokens("advantage", batch), losses.of_tokens("sampled", batch)
            more = cfg.kl * losses.kl_estimate(found, sampled) if cfg.kl else 0.0
            return (loss_fn(found, sampled, advantages, batch)[0] + more).sum()
        if not kind:
            return model(batch, of_tokens if frozen else loss_fn)
        first, others = batch.pairs
        if "reference" not in cfg:
            scores = losses.score(model, batch)
            return loss_fn(scores[first], scores[others], batch.columns["margin"][first]).sum()
        policy = losses.per_document(model(batch, log_probs).log_probs, batch)
        answers = losses.AnswerLogProbs(policy, batch.columns["reference"], batch.documents.num_supervised)
        if kind == "labelled":
            return loss_fn(answers.at(first), batch.columns["label"][first] == 1, torch.zeros(())).sum()
        return loss_fn(answers.at(first), answers.at(others)).sum()

    trained = Subject(
        *shorten(model), lambda model, batch: loss(model, batch),
        cfg.dtype, cfg.master_dtype, cfg.compile, cfg.parallel.get("plan"), cfg.parallel.get("loss_parallel", True),
    )  # fmt: skip
    if samples:
        alone = trained._replace(model=copy.deepcopy(trained.model).requires_grad_(False).eval(), compiled=False)
        is_start = cfg.reference in (None, "adapter_off")
        if cfg.kl and is_start and cfg.adapter:
            frozen.append(alone._replace(call=lambda model, batch: model(batch, log_probs), place="alone", passes=1))
        elif cfg.kl:
            frozen.append(
                _frozen("reference", {"path": cfg.model.path if is_start else cfg.reference}, cfg.dtype, log_probs)
            )
            frozen[-1] = frozen[-1]._replace(place="head", passes=1)
        for call in (_prompts_read, _token_sampled):
            frozen.append(alone._replace(call=functools.partial(call, cfg), place="rollout"))
    if getattr(loss_fn, "needs_reference", False):
        off = cfg.reference == "adapter_off"
        frozen.append(trained._replace(  # labelled answers are compared with a mean, which is computed first
            model=copy.deepcopy(trained.model).requires_grad_(False), call=lambda model, batch: model(batch, log_probs),
            place="alone", passes=1 + 2 * off if kind == "labelled" else int(off),
        ))  # fmt: skip
        if not off and cfg.reference != "precomputed":
            frozen.append(_frozen("reference", {"path": cfg.reference}, cfg.dtype, log_probs)._replace(place="beside"))
    return [trained, *(each._replace(loss_parallel=trained.loss_parallel) for each in frozen)]


def _frozen(setting: str, given: Any, dtype: str, head: Any) -> Subject:
    """As `tune.checkpointers.load_frozen` makes it, of its config.json alone."""
    ConfigFile(Path(given["path"]), setting)
    with torch.device("meta"):
        model: Any = build(given["path"])
    if given.get("quantization"):
        quantization.quantize_linears(model, double=True)
    return Subject(*shorten(model.requires_grad_(False).eval()), lambda model, batch: model(batch, head), dtype, dtype)


def as_rows(cfg: DictConfig) -> DictConfig:
    """The settings, with the length and the number of a step's rows where they sample them: all as long as they may.
    Raises TuneError: the recipe is not planned."""
    if "value" in cfg or (cfg.get("on_policy") or {}).get("share") or not cfg.get("loss", {}).get("_component_"):
        raise TuneError(
            "plan: evaluate, ppo_finetune and on_policy.share are not planned; planned are full_finetune, "
            "lora_finetune, pipeline_finetune, preference_finetune, reward_finetune, distill and grpo"
        )
    if "group_size" not in cfg:
        return cfg
    cfg = copy.deepcopy(cfg)
    OmegaConf.set_struct(cfg, False)
    cfg.max_seq_len = cfg.max_prompt_len + cfg.sampling.max_new_tokens
    cfg.global_batch_size = cfg.prompts_per_step * cfg.group_size
    return cfg


def read_together(cfg: DictConfig, rows: int) -> int:
    """How many prompts are read at one time, for so many completions."""
    return max(1, min(-(-rows // cfg.group_size), PREFILL_TOKENS // cfg.max_prompt_len))


def _prompts_read(cfg: DictConfig, model: Any, batch: Batch) -> Any:
    """Of as many completions as `batch` has rows, their first tokens: the prompts that are read together."""
    rows, length = len(batch.documents.lengths), cfg.max_prompt_len
    count = read_together(cfg, rows)
    cache = model.new_cache(rows + 1, cfg.max_seq_len)
    with unset_fake_temporarily():  # places are numbers
        prompts = Batch.of(np.ones((1, count * length), np.int64), documents=np.arange(count).repeat(length)[None])
        cache.start([*range(count)], prompts, batch.tokens.device)
    logits = model(prompts, cache=cache)[:, 0].unbind()
    cache.copy([(row % count, row) for row in range(count, rows)])
    return cache, _chosen(cfg, torch.stack([logits[row % count] for row in range(rows)]))


def _token_sampled(cfg: DictConfig, model: Any, batch: Batch) -> Any:
    """The last token of as many completions."""
    rows, device = len(batch.documents.lengths), batch.tokens.device
    cache = model.new_cache(rows + 1, cfg.max_seq_len)
    with unset_fake_temporarily():
        cache.start([0], one := Batch.of(np.ones((1, 1), np.int64)), device)
    model(one, lambda hidden, *_, **__: hidden, cache=cache)  # makes the cache
    with unset_fake_temporarily():
        positions = torch.full((rows, 1), cfg.max_seq_len - 1, device=device)
    cache.extend(positions, cfg.max_seq_len)
    logits = model(torch.ones(rows, 1, dtype=torch.int64), positions=positions, cache=cache)[:, 0]
    return cache, _chosen(cfg, logits)


def _chosen(cfg: DictConfig, logits: Tensor) -> Any:
    top_k, top_p, min_p = (cfg.sampling.get(name) for name in ("top_k", "top_p", "min_p"))
    return choose(logits, torch.zeros(len(logits)), cfg.sampling.temperature, top_k, top_p, min_p)


def _kind_of_rows(cfg: DictConfig) -> str | None:
    """What is compared of rows, if they have answers to compare."""
    return cfg.get("dataset", {}).get("kind")


def full_rows(cfg: DictConfig, rows: int) -> Batch:
    """Rows of `max_seq_len` tokens, all supervised but the prompts of what is sampled, which groups share. Where
    answers are compared, each has two that share none. Labelled answers and mismatched ones are as long each, unless
    they are packed."""
    if "group_size" in cfg:
        new = cfg.sampling.max_new_tokens
        of_sample: dict[str, Any] = {"advantage": np.float32(0), "reward": np.float32(0)}
        labels = np.repeat([IGNORE, 1], [cfg.max_prompt_len - 1, new]).astype(np.int32)
        of_sample["sampled"] = np.zeros(len(labels), dtype=np.float32)
        ids = [np.repeat([row // cfg.group_size, row], [cfg.max_prompt_len, new - 1]) for row in range(rows)]
        samples = [[Sample(each.astype(np.int32), labels, row, of_sample)] for row, each in enumerate(ids)]
        return collate(samples, cfg.max_seq_len if cfg.compile else None, EXAMPLES)
    kind, k = _kind_of_rows(cfg), cfg.get("teacher", {}).get("top_k")
    answers = 2 if kind else 1
    length = max(1, cfg.max_seq_len // (1 if kind == "labelled" and not cfg.packed else answers))
    documents = np.arange(answers * rows).repeat(length)[None]
    number, zeros = np.arange(answers * rows) % answers, np.zeros(answers * rows)
    columns: dict[str, Any] = {"answer": number, "label": 1 - number, "reference": zeros, "margin": zeros}
    if k:
        columns["teacher"] = np.zeros((*documents.shape, 2 * k + 1), dtype=np.float32)
    return Batch.of(np.ones_like(documents), np.ones_like(documents), documents, columns=columns)
