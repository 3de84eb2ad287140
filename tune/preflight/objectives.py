"""What each recipe computes of full rows, in its own lines: of the model that it trains, and of frozen ones."""

import copy
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from omegaconf import DictConfig
from torch import Tensor

from tune import losses, quantization
from tune.collators import Batch
from tune.config import instantiate
from tune.distributed import DTYPES
from tune.errors import TuneError
from tune.models import balance_loss, build, hf
from tune.models.config_file import ConfigFile
from tune.models.families import supported
from tune.preflight.trace import Subject, shorten


def subjects(cfg: DictConfig, model: Any) -> list[Subject]:
    """The trained `model` with its loss, then frozen ones. Raises TuneError: the recipe is not planned."""
    samples = "max_prompt_len" in cfg or (cfg.get("on_policy") or {}).get("share")
    if samples or not cfg.get("loss", {}).get("_component_"):
        raise TuneError(
            "plan: how long the answers of grpo, ppo_finetune and on_policy.share become, only a run says; planned are "
            "full_finetune, lora_finetune, preference_finetune, reward_finetune and distill"
        )
    loss_fn, chunk = instantiate(cfg.loss), cfg.memory.get("loss_chunk_tokens")
    kind, log_probs = getattr(loss_fn, "rows", None), losses.LogProbs(chunk)
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
        *shorten(model), lambda model, batch: loss(model, batch) + balance_loss(model),
        cfg.dtype, cfg.master_dtype, cfg.compile, cfg.parallel.get("plan"), cfg.parallel.get("loss_parallel", True),
    )  # fmt: skip
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
    ours = ConfigFile(Path(given["path"]), setting).get("model_type") in supported()
    with torch.device("meta"):
        model: Any = build(given["path"]) if ours else hf(given["path"])
    if given.get("quantization"):
        quantization.quantize_linears(model, double=True)
    return Subject(*shorten(model.requires_grad_(False).eval()), lambda model, batch: model(batch, head), dtype, dtype)


def full_rows(cfg: DictConfig, rows: int) -> Batch:
    """Rows of `max_seq_len` tokens, all supervised; where answers are compared, each has two that share none. Labelled
    answers and mismatched ones are as long each, unless they are packed."""
    kind, k = getattr(instantiate(cfg.loss), "rows", None), cfg.get("teacher", {}).get("top_k")
    answers = 2 if kind else 1
    length = cfg.max_seq_len // (1 if kind == "labelled" and not cfg.packed else answers)
    documents = np.arange(answers * rows).repeat(length)[None]
    number, zeros = np.arange(answers * rows) % answers, np.zeros(answers * rows)
    columns: dict[str, Any] = {"answer": number, "label": 1 - number, "reference": zeros, "margin": zeros}
    if k:
        columns["teacher"] = np.zeros((*documents.shape, 2 * k + 1), dtype=np.float32)
    return Batch.of(np.ones_like(documents), np.ones_like(documents), documents, columns=columns)
