"""Settings that are right alone and wrong together."""

import functools
import inspect
import os
from collections.abc import Iterable, Iterator

from omegaconf import DictConfig, OmegaConf

from tune.lookup import did_you_mean, locate
from tune.types import show

# Unsupported components of torch and torchao, and what to use instead.
UNSUPPORTED = {
    "torch.optim.Muon": "takes matrices only. Use tune.optimizers.Muon: torch's, with AdamW for all other parameters.",
    "torch.optim.Adafactor": "does not take sharded parameters. Use tune.optimizers.Adafactor: torch's, which does.",
    "torchao.optim.CPUOffloadOptimizer": "keeps no states by parameter: its runs could not be continued. "
    "memory.cpu_offload=true keeps the states of any optimizer in host memory.",
    "torch.nn.CrossEntropyLoss": "takes logits, which never exist as a whole. Use tune.losses.LinearCrossEntropy: the "
    "same of hidden states and the head's weight.",
}


def conflicts(cfg: DictConfig, keys: Iterable[str]) -> Iterator[tuple[str, str]]:
    """The key of each setting that others forbid, and what is wrong with it; `keys` are those of all settings."""
    value = functools.partial(OmegaConf.select, cfg, throw_on_resolution_failure=False)
    for key in ("optimizer._component_", "loss._component_"):
        if (component := value(key)) in UNSUPPORTED:
            yield key, f"{component} {UNSUPPORTED[component]}"
    rate, decay = value("optimizer.lr"), value("optimizer.weight_decay")
    if isinstance(rate, int | float) and isinstance(decay, int | float) and rate * decay > 1:
        problem = f"optimizer.lr={rate} times {decay} is more than 1: a step would take off more than a whole weight"
        yield "optimizer.weight_decay", f"{problem}. Lower one of them."
    if value("dtype") == "fp16" and "optimizer" in cfg:
        yield "dtype", "fp16 overflows at 65,504, and nothing here scales the loss. Take bf16 or fp32."
    is_selective = value("memory.activation_checkpointing") == "selective"
    if value("memory.activation_offload") and is_selective and value("compile") is not True:
        problem = "what activation_checkpointing=selective keeps is offloaded only from compiled blocks."
        yield "memory.activation_offload", f"{problem} Set that to full or none, or compile=true."
    if value("from_scratch") and value("model._component_") == "tune.models.hf":
        save = "save some with transformers (AutoModelForCausalLM.from_config(config).save_pretrained(folder))"
        yield "from_scratch", f"tune.models.hf trains weights that exist: {save} and train that folder."
    if value("parallel.pp_schedule") == "zero_bubble" and (value("parallel.pp") or 1) > 1:
        for key, is_wrong in (("compile", value("compile")), ("memory.activation_checkpointing", is_selective)):
            if is_wrong:
                yield key, "parallel.pp_schedule=zero_bubble has two backwards, and what this makes one: leave one out."
    if value("quantization.weights") and "adapter" in cfg and not cfg.adapter:
        yield "quantization.weights", "quantised weights are frozen, and nothing else is trained: give adapter.rank=16."
    if value("quantization.qat"):
        whole = value("adapter.modules_to_save") and value("dtype") != value("master_dtype")
        for key, is_wrong, problem in (
            ("adapter.dropout", value("adapter.dropout"), "leaves no weight that could be rounded. Set it to 0"),
            ("adapter.modules_to_save", whole, "casts adapters before merging. Set dtype and master_dtype alike"),
            ("parallel.tp", (value("parallel.tp") or 1) > 1, "cuts the rows that share a scale. Set it to 1"),
            ("model", value("model._component_") == "tune.models.hf", "is none to quantise. Use tune.models.build"),
        ):
            if is_wrong:
                yield key, f"with quantization.qat it {problem}, or leave quantization.qat out."
    if value("quantization.float8"):
        for key in ("quantization.qat", "quantization.weights", "parallel.tp"):
            if value(key) not in (None, 1):
                yield key, "it does not go with quantization.float8: leave one of them out."
    if (stages := value("parallel.pp") or 1) > 1:
        recomputes = value("adapter.dropout") and is_selective and value("compile")
        for key, is_wrong, problem in (
            ("evaluate.tasks", value("evaluate.tasks"), "needs all blocks in one process: evaluate the exported model"),
            ("evaluate.prompts", value("evaluate.prompts"), "needs all blocks in one process: generate afterwards"),
            ("adapter.dropout", recomputes, "is drawn anew where compiled blocks recompute a part: set compile=false"),
        ):
            if is_wrong:
                yield key, f"with parallel.pp={stages} it {problem}, or set parallel.pp=1."
    if value("value.head", default="score") != "score":
        yield "value.head", "it has an output for each token, and a value is one: set value.head=score."
    if value("teacher.top_k") and value("on_policy.share"):
        yield "teacher.top_k", "answers that the student samples are not there before. Set on_policy.share=0."
    reference = value("reference")
    known = ["adapter_off"] if "kl" in cfg else ["precomputed", "adapter_off"]
    if reference not in (None, *known, value("model.path")) and not os.path.isdir(reference):
        hint = did_you_mean(reference, known)
        yield "reference", f"{reference} is neither {' nor '.join(known)} nor the folder of a model.{hint}"
    loss = value("loss._component_")
    if reference not in (None, "precomputed") and loss and not getattr(locate(loss), "needs_reference", True):
        yield "reference", f"{loss} compares with none. Leave it out, or take tune.losses.DPO."
    if reference == "adapter_off":
        trained = [f"adapter.{each}" for each in ("path", "modules_to_save", "trainable_tokens")]
        others = " and ".join(filter(value, trained))
        if not value("adapter") or others:
            problem = f"with {others} it is not the model before the first step" if others else "there is none"
            instead = "null" if "kl" in cfg else "precomputed"
            yield "reference", f"the adapter cannot be switched off: {problem}. Use reference={instead}."
    if "reward" in cfg and not value("reward") and not value("environment"):
        instead = "a function, or an environment, which rewards too" if "environment" in cfg else "a function"
        yield "reward", f"{show(value('reward'))} rewards nothing. Name {instead}."
    if path := value("environment"):
        if lacking := {"start", "step"} - {*dir(locate(path))}:
            yield "environment", f"{path} has no {' and no '.join(sorted(lacking))}: it must be a class with both."
        else:
            try:
                inspect.signature(locate(path)).bind()
            except TypeError as error:
                yield "environment", f"{path} is called without arguments: {error}. Give it a default."
    if value("validation_dataset") and value("validation_dataset.path", default=True):
        for key in keys:
            if key.endswith(".validation_fraction") and value(key):
                problem = "the rows it holds out would be used nowhere, as validation_dataset is what is validated on."
                yield key, f"{problem} Set it to 0, or leave the validation dataset out."
    loaders = [f"tune.datasets.{name}" for name in ("load", "load_prompts", "ray")]
    is_loaded = value("dataset._component_") in loaders and not value("dataset.validation_fraction")
    best = str(value("checkpointer.keep_best") or "")
    if value("checkpointer.patience") and not best:
        yield "checkpointer.patience", "it counts values of a metric: name it, checkpointer.keep_best=validation_loss."
    if best and not best.startswith("validation_") and not ("/" in best and value("evaluate.tasks")):
        yield "checkpointer.keep_best", f"{best} is that of a few rows. Take validation_loss, or another of validation."
    if value("evaluate.every") and not value("evaluate.prompts") and not value("evaluate.tasks"):
        yield "evaluate.every", "there is nothing to evaluate on. Give evaluate.prompts or .tasks, or leave it out."
    for key in ("validate_every", "validate_first", *["checkpointer.keep_best"] * best.startswith("validation_")):
        if value(key) and is_loaded and value("validation_dataset.path", default=True) is None:
            choices = "validation_dataset.path" + ("" if "reward" in cfg else " or dataset.validation_fraction")
            yield key, f"there is nothing to validate on. Give {choices}, or leave it out."
