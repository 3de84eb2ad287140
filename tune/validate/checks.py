"""All that can be known of a run before its weights are read: every check that the run makes itself, and the rules.

Each check is the function that the recipe calls; one that fails is a finding, and those that need what it would have
made are left out.
"""

import errno
import inspect
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, cast
from unittest import mock

import fsspec
import torch
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException
from packaging.requirements import Requirement
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from tune import checkpointers, datasets, distributed, evaluation, optimizers, peft
from tune.checkpointers import (
    Best,
    cut_short,
    open_checkpoint,
    require_continuable,
    require_none_later,
    require_same_vocabulary,
)
from tune.config import inherited, instantiate, instantiate_data, instantiate_weighted, local_folder
from tune.datasets import beyond_positions, open_source, parts_of, require_batches, warnings_about
from tune.devices import DEVICES
from tune.distributed import World, device_type
from tune.errors import TuneError, explained
from tune.files import CHECKPOINT
from tune.generation import Reward, Sampler, check_prompts
from tune.loggers import require_installed
from tune.lookup import locate, needs
from tune.losses import MostProbable
from tune.models import prepare_scores
from tune.plan import Job, alter
from tune.rules import Facts, Finding, Level, judge
from tune.run import disk_note, run_folder
from tune.tokenizers import Tokenizer

PLACE = re.compile(r"([\w./\[\]-]+(?::\d+)?): (.+)", re.DOTALL)
LIMITED = "the first {:,} rows were read; `--all` reads all of them"
LOADED = ("tune.datasets.load", "tune.datasets.load_prompts", "tune.datasets.ray")
NONE = torch.device("meta")  # shapes alone


class Uninitialised(TorchFunctionMode):
    """Parameters on the meta device are not initialised: to do so there, torch imports its compiler, which takes as
    long as all checks."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        is_init = getattr(function, "__module__", "") == "torch.nn.init"
        if is_init and (tensor := args[0] if args else given["tensor"]).is_meta:
            return tensor
        return function(*args, **given)


@dataclass
class Told:
    """Calls checks of `cfg`, and keeps what they find. If `settings` are wrong, checks may fail in any way: such errors
    are left out."""

    cfg: DictConfig
    settings: Sequence[str]
    findings: list[Finding] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.value = Facts(self.cfg)
        for problem in self.settings:
            self.add(problem, is_cause=True)

    def add(self, text: str, place: str = "", level: Level = Level.ERROR, is_cause: bool = False) -> None:
        """Keep a message, which may begin with its place. The same error is kept once, at its first place, unless it
        `is_cause`: a problem of the setting itself. One of a setting, or of a group with a setting, that has an error
        already is left out: it follows from that."""
        if match := PLACE.fullmatch(text):
            place, text = match.groups()
        is_once = level is Level.ERROR and not is_cause
        if any(each.message == text and (is_once or each.place == place) for each in self.findings):
            return
        known = {each.place for each in self.findings if each.level is Level.ERROR}
        follows = any(f"{each}.".startswith(f"{place}.") for each in known if place)
        if level is Level.WARN or not follows or (is_cause and place not in known):
            self.findings.append(Finding(level, place, text))

    def __call__(self, place: str, check: Callable[..., Any], *given: Any, **others: Any) -> Any:
        """What `check` gives; None if it fails."""
        try:
            return check(*given, **others)
        except TuneError as error:
            self.add(str(error), place)
        except (ConfigAttributeError, ConfigKeyError) as error:  # a copied recipe may have other settings
            if not self.settings:
                what = "what needs it was not checked: the recipe has no such setting"
                self.add(what, str(error.full_key), Level.INFO)
        except Exception as error:
            if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
                self.add(f"'{error.filename}' is too long for the name of a file", place)
            elif not self.settings and not isinstance(error, OmegaConfBaseException):
                raise
        return None


def validate(
    cfg: DictConfig, settings: Sequence[str] = (), *, processes: int = 1, device: str | None = None,
    capability: tuple[int, int] | None = None, rows: int | None = 1000, strict: bool = False,
    recipe: str | None = None,
) -> list[Finding]:  # fmt: skip
    """What is wrong with a run of `processes` on a `device` (None: this machine's), sorted by place.

    `settings` are problems of `cfg` itself. Of the data the first `rows` are read, or all of them (None).
    """
    told = Told(cfg, settings)
    kind = device or told("device", lambda: device_type(cfg.device)) or "cpu"
    told.findings += judge(Facts(cfg, kind, processes, capability), strict)
    with _world(processes, kind, told) as world, Uninitialised():
        told("", _check, told, world, rows, recipe)
    return sorted(told.findings, key=lambda finding: (finding.place, finding.level != Level.ERROR))


@dataclass
class Made:
    """What a run makes of `cfg.model`, on the meta device; None where it cannot be made."""

    model: Any = None  # as the run trains it
    trained: Any = None  # and what is trained beside it
    groups: Any = None  # of both, for the optimizer
    base: checkpointers.Pretrained | None = None


@contextmanager
def _world(processes: int, kind: str, told: Told) -> Iterator[World | None]:
    """The world as the first of so many processes sees it; none is started. None if they make no mesh."""
    if kind == "mps" and processes > 1:
        told.add(f"device: mps is one device; found {processes} processes. Start one process, or set device=cpu")
    is_new = not dist.is_initialized()
    if is_new:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=processes)
    known = inspect.signature(distributed.init).parameters
    given = parallel.items() if isinstance(parallel := told.value("parallel"), DictConfig) else ()
    axes = {str(axis): size for axis, size in given if axis in known}
    if isinstance(length := told.value("max_seq_len"), int):
        axes["max_seq_len"] = length
    try:
        world = told("parallel", lambda: distributed.init("cpu", **axes))
        yield world and replace(world, device=NONE)
    finally:
        if is_new:
            dist.destroy_process_group()


def _check(told: Told, world: World | None, rows: int | None, recipe: str | None) -> None:
    cfg = told.cfg
    _require_versions(told)
    if "logger" in cfg:
        told("logger", lambda: require_installed(cfg.logger.tensorboard, cfg.logger.wandb))
    told("output_dir", _require_folder, cfg, recipe)
    if cfg.model.get("_component_") is None:  # of `evaluate`: whatever is to be evaluated
        return _evaluation(told, rows)
    model = (made := _model(told, world)).model
    tokenizer = data = None
    if "tokenizer" in cfg and (model or Path(str(told.value("model.path"))).is_dir()):  # else it is told once
        tokenizer = told("tokenizer", lambda: instantiate(cfg.tokenizer))
    rewards = _others(told, tokenizer)
    if world and model and told.value("parallel.auto"):
        told("parallel.auto", _require_planned, cfg, world.size)
    sizes_are_right = not any(each.startswith(("global_batch_size:", "micro_batch_size:")) for each in told.settings)
    if world and "global_batch_size" in cfg and sizes_are_right:
        sizes = cfg.global_batch_size, cfg.micro_batch_size, world.data_size, world.num_stages
        told("global_batch_size", require_batches, *sizes)
    if tokenizer:
        data = _data(told, tokenizer, model, world, rows, rewards)
    elif told.value("dataset._component_") in LOADED:
        told("dataset", lambda: open_source(cfg.dataset.path, cfg.dataset.get("split", "train")))
    groups = made.groups or [{"params": [torch.zeros(2, 2)], "in_blocks": True}]
    optimizer = told("optimizer", _optimizer, cfg, groups) if "optimizer" in cfg else None
    _require_continuable(told, made, data, optimizer)
    if optimizer:
        steps = (len(data) if data else cfg.get("max_steps")) or 10**9
        told("schedule", lambda: instantiate(cfg.schedule, optimizer, total_steps=steps))


def _optimizer(cfg: DictConfig, groups: list[dict[str, Any]]) -> Optimizer:
    """One for small parameters, each number of dimensions of a group once, after a step. It must take the parameters
    themselves, too. An optimizer of torch is called without what torch puts around it, which imports the compiler."""
    with mock.patch.object(Optimizer, "add_param_group", inspect.unwrap(Optimizer.add_param_group)):
        instantiate(cfg.optimizer, [dict(group) for group in groups])
        ndims = [sorted({parameter.ndim for parameter in group["params"]}) for group in groups]
        small = [[torch.zeros((2,) * ndim, requires_grad=True) for ndim in each] for each in ndims]
        optimizer = instantiate(cfg.optimizer, [g | {"params": each} for g, each in zip(groups, small, strict=True)])
    for parameter in (each for group in small for each in group):
        parameter.grad = torch.zeros_like(parameter)
    try:
        if cfg.optimizer._component_.startswith("torch.optim."):
            with torch.set_grad_enabled(optimizer.defaults.get("differentiable", False)):
                inspect.unwrap(type(optimizer).step)(optimizer)
        else:
            with torch.compiler.set_stance("force_eager"):
                optimizer.step()
    except (RuntimeError, TypeError) as error:
        raise TuneError(f"optimizer._component_: {cfg.optimizer._component_} does not work here: {error}") from error
    return optimizer


def _require_versions(told: Told) -> None:
    """Of the packages that are installed."""
    with suppress(metadata.PackageNotFoundError):
        for wanted in map(Requirement, metadata.requires("tune-recipes") or ()):
            with suppress(metadata.PackageNotFoundError):
                if (found := metadata.version(wanted.name)) not in wanted.specifier and "dev" not in str(wanted.marker):
                    told.add(f"{found} is installed; pip install '{wanted.name}{wanted.specifier}'", wanted.name)


def _require_ray() -> None:
    with needs("ray", "Ray"):
        metadata.version("ray")  # without an import, which takes long


def _require_planned(cfg: DictConfig, processes: int) -> None:
    try:
        Job(cfg, DEVICES["cpu"], processes)
    except TuneError as error:
        raise TuneError(f"parallel.auto: {error}") from error


def _require_folder(cfg: DictConfig, recipe: str | None) -> None:
    """Check the run folder as the run does, and remove what that has made."""
    folder = local_folder(url := cfg.get("output_dir") or "runs")
    if "://" in url:
        with explained(f"output_dir: {url} cannot be used", ValueError, ImportError):
            fsspec.get_filesystem_class(url.partition("://")[0])
    mark, made = folder / ".validate", [each for each in (folder, *folder.parents) if not os.path.exists(each)]
    found = run_folder.refusal(folder, cfg.get("resume", "auto"), mark, recipe)
    with suppress(OSError):
        mark.unlink(missing_ok=True)
        for each in made:
            each.rmdir()
    if found:
        raise TuneError(found)


def _model(told: Told, world: World | None) -> Made:
    cfg = told.cfg
    with NONE:
        model = told("model", lambda: instantiate(cfg.model))
    if model is None:
        return Made()
    base = None
    if not cfg.get("from_scratch"):
        base = told("model.path", lambda: checkpointers.Pretrained(cfg.model.path, model))
    alter(cfg, model, torch.device("cpu"), told)
    folder, keep = local_folder(cfg.get("output_dir") or "."), told.value("checkpointer.keep")
    merged = told.value("model.path") if told.value("export.merge") else None
    if note := told("output_dir", lambda: disk_note(folder, model, cfg.master_dtype, keep, merged)):
        told.add(note, level=Level.WARN)
    whole, critic, groups = model, None, None
    if "value" in cfg:
        with NONE:
            critic = told("value", lambda: instantiate(cfg.value))
        whole = critic and torch.nn.ModuleDict({"policy": model, "value": critic})
    for each in filter(None, (model, critic)) if world else ():
        told("parallel", lambda each=each: distributed.parallelize(
            each, cast(World, world), dtype=cfg.dtype, master_dtype=cfg.master_dtype, compile=cfg.compile,
            activation_checkpointing=cfg.memory.activation_checkpointing,
            activation_offload=cfg.memory.activation_offload, cpu_offload=cfg.memory.cpu_offload,
        ))  # fmt: skip
    if whole is not None:
        settings = cfg.get("parameter_groups", {})
        groups = told("parameter_groups", lambda: optimizers.parameter_groups(whole, cfg.optimizer.lr, **settings))
    return Made(model, whole, groups, base)


def _evaluation(told: Told, rows: int | None) -> None:
    """Check the model, the tasks and the data of an evaluation, as the recipe does before it reads weights."""
    cfg, given = told.cfg, told.cfg.copy()
    path = cfg.dataset.get("path", "data")
    with _folder_restored(cfg.out):
        told("", evaluation.require_work, cfg.tasks, path, cfg.score, cfg.limit, cfg.log_samples, cfg.out)
    rewards = _others(told, None)
    found = told("model.path", lambda: peft.resolve_model(cfg.model.path, cfg.adapters))
    opened = found and told("model.path", open_checkpoint, found.base)
    tokenizer = found and told("tokenizer", lambda: Tokenizer(str(found.tokenizer), cfg.chat_template))
    if not (opened and tokenizer):
        return
    shape = opened[0]
    told("tasks", lambda: evaluation.Tasks(
        cfg.tasks, tokenizer, cfg.include_path, limit=cfg.limit, num_fewshot=cfg.num_fewshot,
        apply_chat_template=cfg.apply_chat_template, batch_size=cfg.batch_size, max_length=cfg.max_length, model=shape,
    ))  # fmt: skip
    if given.dataset._component_ in LOADED:
        most = min(each for each in (rows, cfg.limit, given.dataset.get("take"), 10**18) if each)
        given.dataset.take = max(1, int(most))
    longest = cfg.max_length or getattr(shape, "max_positions", None) or 2048
    if path and rewards:
        if given.dataset._component_ == "tune.datasets.load":
            given.dataset._component_ = "tune.datasets.load_prompts"
        ends = {"stop_ids": tokenizer.stop_ids, "decode": tokenizer.decode}
        sampler = told("generation", lambda: instantiate(cfg.generation, **ends, max_rows=cfg.batch_size or 16))
        if sampler:
            told("generation", sampler.check, shape, [], [])
            room = longest - sampler.max_new_tokens
            told("dataset", lambda: instantiate(given.dataset, tokenizer, max_prompt_len=room))
    elif path:
        data = told("dataset", lambda: instantiate(given.dataset, tokenizer, max_seq_len=longest))
        if data is not None:
            told("dataset", data.require_vocabulary, shape.config.vocab_size)


@contextmanager
def _folder_restored(file: str | None) -> Iterator[None]:
    """Remove the folders that are made for `file`."""
    made = [each for each in Path(file).parents if not each.exists()] if file else []
    try:
        yield
    finally:
        with suppress(OSError):
            for each in made:
                each.rmdir()


def _others(told: Told, tokenizer: Tokenizer | None) -> list[Any]:
    """Check the models beside the trained one, and the rewards, which are returned."""
    cfg, rewards = told.cfg, list[Any]()
    for key in ("value.path", "teacher.path", "reference"):
        path = told.value(key)
        if path and (key != "reference" or Path(str(path)).is_dir()):
            head = {"head": told.value("value.head")} if key == "value.path" else {}
            opened = told(key, open_checkpoint, path, setting=key, **head)
            if opened and tokenizer:
                told(key, require_same_vocabulary, key, path, opened[0], tokenizer)
    if tokenizer and (most := told.value("teacher.top_k")):
        told("teacher.top_k", MostProbable, most, vocab_size=tokenizer.vocab_size)
    for key in ("reward", "score"):
        found = told(key, lambda key=key: instantiate_weighted(cfg[key], key)) if cfg.get(key) else None
        rewards += found or []
        for _, function, _ in found or ():
            if tokenizer and (path := getattr(function, "path", None)):
                told(f"{key}.path", lambda path=path: tokenizer.require_same_ids(Tokenizer(path), "reward.path"))
    return rewards


def _data(
    told: Told, tokenizer: Tokenizer, model: Any, world: World | None, rows: int | None, rewards: list[Any]
) -> Any:
    """Check the data; returns the loader of the run's steps, or None if not all rows were read."""
    cfg, given, fraction = told.cfg, told.cfg.copy(), told.value.number("dataset.validation_fraction")
    is_limited = rows and cfg.dataset.get("_component_") in LOADED and told.value("dataset.take", rows) >= rows
    for key in ("dataset", "validation_dataset"):
        if rows and OmegaConf.select(given, f"{key}._component_") in LOADED:
            given[key].take = min(given[key].get("take") or rows, rows)
            if given[key]._component_ == LOADED[2]:  # no cluster is started for so few rows
                told(f"{key}._component_", _require_ray)
                given[key] |= {"_component_": LOADED[0], "streaming": True}
    if "evaluate" in cfg and world:
        for other, nothing in (("tasks", []), ("prompts", None)):  # both are told, not the first that is wrong
            asked = cfg.evaluate | {other: nothing}
            found = told("evaluate", instantiate, asked, None, model, tokenizer, world)
            if found and found.tasks:
                told("checkpointer", Best, cfg.checkpointer.get("keep_best"), None, found.tasks.higher_is_better)
    if "max_prompt_len" in cfg:
        prompts = told("dataset", lambda: instantiate(given.dataset, tokenizer, max_prompt_len=cfg.max_prompt_len))
        ends = {"stop_ids": tokenizer.stop_ids, "decode": tokenizer.decode}
        sampler = told("sampling", lambda: instantiate(cfg.sampling, **ends, seed=cfg.seed))
        if model and sampler and prompts:
            told("sampling", check_prompts, model, sampler, prompts.prompts, told.value("environment"))
        for name, function, _ in rewards if prompts else ():
            if isinstance(function, partial):  # not a judge, which may be elsewhere
                first = prompts.prompts[0]
                told("reward", Reward(name, function), first.row, tokenizer.decode(first.tokens))
        held_out = cfg.get("validation_dataset")
        if prompts and held_out and held_out.get("path"):
            reading = {"max_prompt_len": cfg.max_prompt_len, **inherited(held_out, cfg.dataset)}
            told("validation_dataset", lambda: instantiate(given.validation_dataset, tokenizer, **reading))
        if prompts is None:
            return None
        if is_limited and len(prompts) + sum(prompts.dropped.values()) >= (rows or 0):
            told.add(LIMITED.format(rows), "dataset", Level.INFO)
            return None
        order = {"epochs": cfg.epochs, "max_steps": cfg.max_steps, "seed": cfg.seed}
        return told("prompts_per_step", lambda: datasets.PromptLoader(prompts, cfg.prompts_per_step, **order))
    loss = told("loss", lambda: locate(cfg.loss._component_))
    if model and getattr(loss, "rows", None) and not hasattr(loss, "needs_reference"):
        told("tokenizer", prepare_scores, model, tokenizer)
    if is_limited and fraction * (rows or 0) < 20:  # so few may be none by chance
        given.dataset.validation_fraction = 0.0
    size = getattr(getattr(model, "config", None), "vocab_size", None)
    found = told("dataset", data_of, given, tokenizer, size)
    if found is None:
        return None
    is_whole = not is_limited or isinstance(found[0], datasets.Stream) or found[0].accounting.rows < (rows or 0)
    if is_whole and fraction and not given.dataset.validation_fraction:
        found = told("dataset", data_of, cfg, tokenizer, size) or found
    dataset, validation = found
    if model and told.value("on_policy.share"):
        most = cfg.on_policy.max_new_tokens
        told("on_policy", lambda: Sampler(max_new_tokens=most).check(model, [[0]], ["of a token"]))
    compares = getattr(loss, "needs_reference", False)
    if (compares and told.value("reference") not in (None, "adapter_off")) or told.value("teacher.top_k"):
        for part in filter(None, found):
            told("dataset", datasets.require_kept, "reference" if compares else "teacher", part)
    for warning in warnings_about(parts_of(dataset, "training"), parts_of(validation, "validation"), tokenizer):
        told.add(warning, "dataset", Level.WARN)
    if note := beyond_positions(model, dataset.accounting.longest):
        told.add(note, "max_seq_len", Level.WARN)
    if not is_whole:
        told.add(LIMITED.format(rows), "dataset", Level.INFO)
    return None if not (is_whole and world) else told("dataset", lambda: datasets.DataLoader(
        dataset, world, cfg.global_batch_size, cfg.micro_batch_size, epochs=cfg.epochs, max_steps=cfg.max_steps,
        seed=cfg.seed,
    ))  # fmt: skip


def data_of(cfg: DictConfig, tokenizer: Tokenizer, vocab_size: int | None = None) -> tuple[Any, Any]:
    """The datasets that a recipe makes of its settings, to train and to validate on."""
    rows = {"max_seq_len": cfg.max_seq_len, "packed": cfg.packed}
    if kind := getattr(locate(cfg.loss._component_), "rows", None):  # what the loss compares
        rows["kind"] = kind
    return instantiate_data(cfg.dataset, cfg.validation_dataset, tokenizer, vocab_size=vocab_size, **rows)


def _require_continuable(told: Told, made: Made, data: Any, optimizer: Optimizer | None) -> None:
    """Check that the run can continue its checkpoint, by what that says of itself without its tensors."""
    cfg = told.cfg
    folder, resume = local_folder(cfg.get("output_dir") or "runs"), cfg.get("resume", "never")
    if (newest := told("resume", run_folder.continued, folder, resume)) is None:
        return
    is_auto = resume == "auto"
    does = "The run takes the one before it, or starts anew" if is_auto else "Give the checkpoint before it"
    for found in sorted(folder.glob(f"checkpoints/{CHECKPOINT}"), reverse=True) if is_auto else [newest]:
        if not (damage := cut_short(found)):
            break
        told.add(f"{found} is damaged: {damage}. {does}", "resume", Level.WARN if is_auto else Level.ERROR)
    else:
        return
    adapter = told("adapter", lambda: instantiate(cfg.adapter)) if told.value("adapter") else None
    state = json.loads((found / "state.json").read_text(encoding="utf-8"))
    told("resume", require_none_later, state["step"], None if is_auto else run_folder.continued(folder, "auto"))
    for name, part in {"data": data, "base": made.base, "adapter": adapter}.items():
        if part is not None and name in state:
            told("resume", lambda part=part, name=name: part.load_state_dict(state[name]))
    if made.groups and optimizer:
        states = {name for each in optimizer.state.values() for name in each}
        told("resume", require_continuable, found, made.trained, states)
