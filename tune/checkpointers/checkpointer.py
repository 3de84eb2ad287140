"""Saving and restoring training states with torch.distributed.checkpoint (DCP), also on another number of processes."""

import base64
import functools
import json
import os
import shutil
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItemType
from torch.distributed.checkpoint.state_dict import (
    _get_fqns,
    _init_optim_state,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.utils._pytree import tree_map_only

from tune import rehearsal
from tune.checkpointers.best import Best
from tune.checkpointers.disk import found_damage, gather_digests, replace_json, write_digests
from tune.checkpointers.finite import CAUSES, STOPPED, not_finite, overflows, require_finite
from tune.checkpointers.reading import (
    TRAINED,
    Planner,
    Reader,
    cause_of,
    checkpoint_at,
    elsewhere,
    require_none_later,
    require_same,
    whole_states,
)
from tune.distributed import World, current_world, is_ray_worker, loss_scales, report, reshard
from tune.errors import TuneError, explained
from tune.files import CHECKPOINT, lock, written_aside
from tune.lookup import in_shell
from tune.types import PositiveInt, checked

# In state.json, of the checkpointer itself.
OF_ITSELF = {"step", "groups", "best", "optimizer", "updates", "stopped", "loss_scales"}

STORED = ".store"  # in a run folder that is uploaded: each node has its own, with what its processes write


class Tag(StrEnum):
    """The only key of a dict in state.json that stands for what JSON does not have."""

    PAIRS = "__pairs__"
    TUPLE = "__tuple__"
    SET = "__set__"
    BYTES = "__bytes__"
    ARRAY = "__array__"
    TENSOR = "__tensor__"


def _require_own_parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raises TuneError if `optimizer` updates a tensor that is not in `model`: states are saved by its names."""
    reshard(model)  # after a forward, FSDP's root still has its gathered parameters in place of its own
    own = {*model.parameters()}
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if parameter not in own:
                raise TuneError(
                    f"optimizer: group {index} has a parameter of shape {tuple(parameter.shape)} that is not in the "
                    "model, so that its state has no name in a checkpoint. Add its module to the model, or give it an "
                    "optimizer of its own and save both as extra={...}"
                )


class SavePlanner(dcp.DefaultSavePlanner):
    """Has what is not sharded written as the lowest rank that has it; torch shares such duplicates out among the
    ranks, which may have other values: statistics of a BatchNorm, counters, generators."""

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        taken: set[MetadataIndex] = set()
        plans = []
        for plan in all_plans:
            items = [item for item in plan.items if item.type == WriteItemType.SHARD or item.index not in taken]
            taken |= {item.index for item in items if item.type != WriteItemType.SHARD}
            plans.append(replace(plan, items=items))
        return super().create_global_plan(plans)


@checked
class Checkpointer:
    """Saves and restores model, optimizer, schedule and position in the data under `folder`/step-00000500/.

    A checkpoint is written under a temporary name and renamed when all processes have written their parts: a folder of
    that name is complete. A checkpoint is saved every `every` optimizer steps, and the newest `keep` are kept. With
    `async_` the state is copied to the host and written by a thread while training goes on. If a checkpoint cannot be
    written, training ends (`on_error="stop"`), or rank 0 calls `tell` and training goes on; it is tried again
    after a tenth of `every` steps, and at the next checkpoint.

    `on_nan` says what happens to a step whose loss or gradient is not finite: training ends before the weights change
    (`stop`), or it goes on with the next batch, from the weights as they are (`skip`) or from those of the last
    checkpoint (`rollback`).

    Of the optimizer's parameter groups only values that training changed are saved, among them the learning rate, which
    our schedules compute anew; other hyperparameters come from the current config. Frozen parameters are not saved: on
    resuming, `base` checks that they come from the same weights, and `adapter` that its settings are the same.

    With `keep_best`, the name of a metric, the checkpoint with its best value is kept too: the highest or the lowest,
    as `more_is_better` has it; for a task's metric, `tasks.higher_is_better` says which. After `patience` values in a
    row that were no better, the training `is_over`.

    `extra` is state of your own, by name: averaged weights, counters, a second optimizer, a torch.Generator. Numbers,
    texts, lists, tuples, sets, bytes, arrays, and dicts with any keys of these come back as rank 0 had them. Tensors,
    also sharded ones, are loaded in place where the object has them before it is restored, as an optimizer is made to;
    an object without any gets whole ones.

    `schedule` is any scheduler of torch or transformers, made before `resume`. `world=None` is
    `tune.distributed.current_world()`.

    Raises:
        TuneError: an argument is not as annotated, or `extra` names an object without `state_dict`.
    """

    def __init__(
        self,
        folder: Path | str,
        world: World | None = None,
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        schedule: Stateful | None = None,
        data: Stateful | None = None,
        base: Stateful | None = None,
        adapter: Stateful | None = None,
        extra: Mapping[str, Stateful | torch.Generator] | None = None,
        every: PositiveInt | None = 500,
        keep: PositiveInt | None = 2,
        async_: bool = True,
        on_error: Literal["retry", "stop"] = "retry",
        on_nan: Literal["stop", "skip", "rollback"] = "stop",
        keep_best: str | None = None,
        patience: PositiveInt | None = None,
        tasks: Any = None,
        tell: Callable[[str], None] = print,
    ):
        self.__class__ = rehearsal.stand_in(type(self))
        folder, world = Path(folder), current_world(world)
        _require_own_parameters(model, optimizer)
        if not dist.is_initialized():
            world.mesh.size()  # of a process alone: its process group is made with it
        self.folder, self.world = folder, world
        self.model, self.optimizer = model, optimizer
        self.settings = [dict(group) for group in optimizer.param_groups]
        small = {"schedule": schedule, "data": data, "base": base, "adapter": adapter, **_stateful(extra or {})}
        self.small: dict[str, Stateful] = {name: part for name, part in small.items() if part is not None}
        self.every, self.keep, self.asynchronous = every, keep, async_
        self.on_error, self.on_nan, self.refused = on_error, on_nan, 0
        self.updates = 0  # those that it accepted, of all attempts at this training
        self.tell = tell if world.is_main else lambda message: None
        self.best = Best(keep_best, patience, tasks.higher_is_better if tasks else {})
        self.saved, self.reported, self.writing = 0, 0, 0
        self.resumed: dict[int, Path] = {}  # by step the checkpoints of the folder that training continues from
        is_first_here = os.environ.get("LOCAL_RANK") == "0" and (folder.parent / STORED).exists()
        if (keep_best or on_nan == "rollback") and sum(world.all_gather(is_first_here)) > 1:
            raise TuneError(
                "output_dir: checkpointer.keep_best and on_nan=rollback read checkpoints while training, of which each "
                "node has only its part with a URL. Give a folder that all nodes share, or leave both out"
            )
        self.tidies = world.is_main or is_first_here  # the one process of a folder that renames and removes in it
        self.group: Any = None if rehearsal.current() else _background_group(dist.group.WORLD, world.timeout)
        self.background = ThreadPoolExecutor(max_workers=1)
        self.pending: Future[None] | None = None
        self.told = ""  # why the last checkpoint was not written
        self.unwritten = ""  # what could not be written at last
        self.ends = False  # whether this is the last step
        self.stopped = False  # by the recipe's own decision
        self.metrics: dict[int, dict[str, float]] = {}  # of steps that are not yet reported to Ray

    def resume(self, resume: str | Path = "auto") -> int:
        """Restore the newest complete checkpoint (`auto`), the one at a path, or none (`never`); return its step.
        Raises TuneError if there is none at the path, it is of another training, or it would replace later ones; or if
        another run has begun in this folder."""
        self.world.of_main(lambda: lock.hold(self.folder.parent))  # before anything there is changed
        if self.tidies and resume == "auto":
            for unfinished in self.folder.glob(".step-*"):
                shutil.rmtree(unfinished, ignore_errors=True)
        if resume == "never":
            return 0
        if resume == "auto":
            path = self._newest_intact()
        else:  # other processes may see a shared folder a little later
            path = self.world.of_main(lambda: checkpoint_at(Path(resume)))
        if path is None:
            return 0
        if resume != "auto" and (damage := self._damage(path)):
            raise TuneError(f"resume: {path} is damaged: {damage}. Give the checkpoint before it")
        small = json.loads((path / "state.json").read_text(encoding="utf-8"))
        if (found := small.keys() - OF_ITSELF) != self.small.keys():
            raise self._of_another(path, found)
        _, extra = self._states()
        if lazy := [name for name in self.small if _has_tensors(small[name]) and name not in extra]:
            for optimizer in (self.small[name] for name in lazy):
                if isinstance(optimizer, torch.optim.Optimizer):
                    _init_optim_state(optimizer)
            _, extra = self._states()
            extra = whole_states(path, "extra", {*lazy} - extra.keys()) | extra
        for name in self.small.keys() - extra.keys() - {"schedule"}:  # they refuse a checkpoint of another training
            self.small[name].load_state_dict(_from_json(small[name]))
        require_none_later(small["step"], self.newest())
        self._restore(path, small, extra)
        if "schedule" in self.small.keys() - extra.keys():  # after the rates: some compute them anew, others go on
            self.small["schedule"].load_state_dict(_from_json(small["schedule"]))
        self.updates, self.stopped = small["updates"], small.get("stopped", False)
        for scale, state in zip(loss_scales(self.model), small.get("loss_scales", ()), strict=False):
            scale.load_state_dict(state)
        self.best.load_state_dict(small.get("best", {}))
        self.saved = self.reported = small["step"]
        self.resumed[self.saved] = path
        self._find_best(path.parent)
        return self.saved

    def _of_another(self, path: Path, found: Iterable[str]) -> TuneError:
        return TuneError(
            f"resume: {path} is of another training: it has the state of {', '.join(sorted(found))}, this one of "
            f"{', '.join(sorted(self.small))}. Give the same parts (schedule, data, extra), or another output_dir"
        )

    def _find_best(self, before: Path) -> None:
        """Look for the checkpoints with the best values: they may be in the folder `before`, from which training
        continues. Those that are nowhere are forgotten."""
        best = self.best.step
        for step in self.world.broadcast([*self.best.values]):
            if self.world.broadcast((before / f"step-{step:08d}").exists()):
                self.resumed.setdefault(step, before / f"step-{step:08d}")
        self.best.choose([step for step in self.best.values if step in self.resumed])
        if best != self.best.step:
            now = f"It is {self.best} now" if self.best.step else "It is looked for anew"
            self.tell(f"warning: the checkpoint of step {best}, with the best {self.best.metric}, is gone. {now}")
            if before == self.folder:
                self._renew_notes(self.saved)

    def _place(self, step: int) -> Path | None:
        """Where the checkpoint of a step is: in this folder, or in the one that training has continued from."""
        places = [self.folder / f"step-{step:08d}", *filter(None, [self.resumed.get(step)])]
        return self.world.broadcast(next((path for path in places if path.exists()), None))

    def _restore(self, path: Path, small: dict[str, Any], extra: dict[str, Any]) -> None:
        """The tensors of a checkpoint, and what training changed in the optimizer's groups."""
        reader = Reader(path)
        saved = reader.read_metadata().state_dict_metadata
        # Of an optimizer without states, torch makes those of all parameters by a step with gradients of zero.
        model, optimizer = get_state_dict(self.model, self.optimizer, options=TRAINED)
        tensors = {"model": model, "extra": extra}
        of_parameters: Any = optimizer["state"]
        states = {name.rpartition(".")[2] for name in flatten_state_dict({"states": of_parameters})[0]}
        require_same(path, saved, tensors, states, elsewhere(self.model))
        with_states = _with_states(saved, of_parameters)
        if not with_states and small["optimizer"] != (kind := _kind(self.optimizer)):
            raise TuneError(
                f"resume: {path} is of another optimizer: {small['optimizer']}, not {kind}. Restore it, or start anew "
                "with resume=never and another output_dir"
            )
        state = tensors | {"optimizer": {name: of_parameters[name] for name in with_states}}
        try:
            dcp.load(state, storage_reader=reader, planner=Planner())
        except CheckpointException as error:
            raise TuneError(
                f"resume: {path} cannot be read into this model and optimizer: {cause_of(error)}. Restore their "
                "settings; or, if the files are damaged, remove that folder and continue from the checkpoint before it"
            ) from error
        groups: Any = optimizer["param_groups"]
        if len(groups) != (count := len(small["groups"])):
            raise TuneError(f"resume: {path} has {count} parameter groups, not {len(groups)}. Restore parameter_groups")
        for group, settings, changed in zip(groups, self.settings, _from_json(small["groups"]), strict=True):
            group |= {name: value for name, value in settings.items() if name != "params"} | changed
            if torch.is_tensor(settings.get("lr")):  # as torchao's optimizers want it
                group["lr"] = torch.full_like(settings["lr"], changed["lr"])
        set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer, options=TRAINED)
        for group, restored in zip(self.optimizer.param_groups, groups, strict=True):
            if not group["params"]:  # of such a group, torch forgets the settings
                group |= {name: value for name, value in restored.items() if name != "params"}
        for name, parameter in self.model.named_parameters():
            if not _get_fqns(self.model, name) & with_states:  # it had no gradient yet
                self.optimizer.state.pop(parameter, None)
        for name, tensors in extra.items():
            if not _has_tensors(small[name]):
                raise TuneError(
                    f"resume: {path} has no place for the tensors of extra.{name}: an earlier version wrote it. Start "
                    "anew with resume=never and another output_dir"
                )
            self.small[name].load_state_dict(_from_json(small[name], tensors))

    def accepts(self, step: int, rows: list[int], **values: float) -> bool:
        """Whether the gradients of a step may change the weights: its `values`, the same on all processes, are finite.
        If not, `on_nan` decides: raise, or leave the step out, or first restore model and optimizer from the last
        checkpoint; step, data and schedule go on in either case. The tenth such step in a row stops the training.

        In fp16 a `grad_norm` that is not finite is expected of a loss scale that is too high: the step is left out,
        and the scale lowered, whatever `on_nan` says (see `tune.distributed.LossScale`).

        `refused` is the number of such steps in a row, `updates` that of accepted steps, also before a resume.

        Raises:
            TuneError: it stops, or there is no checkpoint to go back to; names the step and `rows` of the dataset.
        """
        scales = loss_scales(self.model)
        if not (found := not_finite(step, rows, values)):
            self.refused = 0
            self.updates += 1
            for scale in scales:
                scale.update(is_finite=True)
            return True
        self.refused += 1
        if scales and overflows(values) and min(scale.value for scale in scales) > 1:
            for scale in scales:
                scale.update(is_finite=False)
            self.tell(
                f"step {step}: a gradient is too large for fp16. The weights stay as they are "
                f"({scales[0].skipped} such steps so far), and the loss scale is lowered to {scales[0].value:g}"
            )
            return False
        goes_back = self.on_nan == "rollback"
        kept = self.wait() if goes_back else step - 1
        if self.on_nan == "stop":
            require_finite(step, rows, **values)
        if self.refused >= 10 or (goes_back and not kept):
            why = "it is the tenth such step in a row" if kept else "there is no checkpoint yet to go back to"
            raise TuneError(f"{found}: {STOPPED}, as {why}. {CAUSES}")
        if goes_back:
            reshard(self.model)
            path = self._last_intact()
            kept = self.saved
            if path is None:
                raise TuneError(f"{found}: stopped, as there is no intact checkpoint to go back to. {CAUSES}")
            rates = [group.get("lr") for group in self.optimizer.param_groups]  # the schedule does not go back
            self._restore(path, json.loads((path / "state.json").read_text(encoding="utf-8")), self._states()[1])
            for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
                if rate is not None:
                    group["lr"] = rate
        weights = f"are those after step {kept}" if goes_back else "stay as they are"  # a step may have several updates
        self.tell(f"warning: {found}. The weights {weights}; training goes on")
        return False

    def _last_intact(self) -> Path | None:
        """The newest intact checkpoint of this training."""
        newest = self._newest_intact()
        self.saved = int(newest.name.removeprefix("step-")) if newest else 0
        for step in sorted(self.resumed, reverse=True):
            if step > self.saved and (path := self._place(step)):
                if not (damage := self._damage(path)):
                    self.saved = step
                    return path
                self.tell(f"warning: {path} is damaged: {damage}. The one before it is taken")
        return newest

    def _newest_intact(self) -> Path | None:
        """The newest intact checkpoint in the folder. Newer ones are renamed: to be looked at, and not to be taken."""
        while (path := self.newest()) and (damage := self._damage(path)):
            aside = self.world.broadcast(f"damaged-{path.name}.{uuid.uuid4().hex[:8]}")
            if self.tidies:
                path.rename(self.folder / aside)
            self.tell(f"warning: {path} is damaged: {damage}. It is now {aside}, the one before it is taken")
            self.best.choose(self.best.values.keys() - {int(path.name.removeprefix("step-"))})
        return path

    def _damage(self, checkpoint: Path) -> str:
        """What of a checkpoint is not as it was written: the processes share its files, to read each once."""
        found = self.world.all_gather(found_damage(checkpoint, self.world.rank, self.world.size))
        return next(filter(None, found), "")

    def newest(self) -> Path | None:
        """The newest complete checkpoint in the folder."""
        return self.world.broadcast(max(self.folder.glob(CHECKPOINT), default=None, key=lambda path: path.name))

    def step(self, step: int, metrics: Mapping[str, Any] = MappingProxyType({}), now: bool = False) -> None:
        """Call it after each optimizer step, and what was measured then. It saves when a checkpoint is due, the best
        one, that of the step at which training `is_over`, or `now`, for which it waits. With `on_error="stop"` it
        raises TuneError if a checkpoint could not be written; earlier ones are intact."""
        if self.pending is not None and self.pending.done():
            self._collect()
        try:
            measured = self.best.is_in(metrics)
        except TuneError:
            self.save(step, wait=True)  # a name that is wrong costs no training
            raise
        if measured:
            self.best.take(step, metrics[str(self.best.metric)])
            vars(self.best).update(self.world.broadcast(vars(self.best)))  # rank 0 knows which are written
        is_best = measured and self.best.step == step
        if measured and self.best.is_over:
            self.tell(f"stopped: {self.best} was the best, and the last {self.best.patience} were no better")
        soon = self.writing + max(1, (self.every or 0) // 10)  # then it is tried again, if rank 0 knows that it failed
        is_due = self.every and (
            step % self.every == 0 or (step == soon and bool(self.world.broadcast(self.unwritten)))
        )
        self.ends = now
        if now or is_best or self.is_over() or is_due:
            self.metrics[step] = self.metrics.get(step, {}) | dict(metrics)
            self.save(step, wait=now)

    def is_over(self) -> bool:
        """Whether `keep_best` has not become better for as long as `patience` says, or the recipe has called `stop`."""
        return self.stopped or self.best.is_over

    def stop(self) -> None:
        """End the training with this step: call it before `step`, on all processes. The checkpoint of the step keeps
        it, so that the same command trains no further."""
        self.stopped = True

    def save(self, step: int, wait: bool = False) -> None:
        """Save now, and with `wait`, wait until it is written. In the checkpoint of a step that is saved already, only
        the note of the best one is renewed. All processes must call it."""
        saved = self._written()
        self._report(saved)
        self.ends = self.ends or wait
        if self.world.is_main:  # of others there is no checkpoint
            self.best.values = {each: value for each, value in self.best.values.items() if self._has(each, step)}
        if step == saved:
            self._renew_notes(step)
            self._completed(step, (self.best.value, self.best.step))
            return
        self.unwritten = ""
        self.writing, best = step, (self.best.value, self.best.step)
        complete = self.folder / f"step-{step:08d}"
        unfinished = self.folder / f".step-{step:08d}.{self.world.broadcast(uuid.uuid4().hex[:8])}"
        parts, extra = self._states()
        small = json.dumps(
            {
                "step": step, "groups": self._changed(), "best": self.best.state_dict(),
                "optimizer": _kind(self.optimizer), "updates": self.updates, "stopped": self.stopped,
                "loss_scales": [scale.state_dict() for scale in loss_scales(self.model)], **parts,
            }
        )  # fmt: skip
        tensors = {
            "model": get_model_state_dict(self.model, options=TRAINED), "optimizer": self._optimizer_states(),
            "extra": extra,
        }  # fmt: skip
        tensors = tree_map_only(Tensor, _on_host, tensors) if self.asynchronous else tensors

        def write() -> None:
            try:
                dcp.save(tensors, checkpoint_id=unfinished, planner=SavePlanner(), process_group=self.group)
                digests = gather_digests(unfinished, self.group)
                if self.world.is_main:  # from here on no process waits for another: this may fail
                    (unfinished / "state.json").write_text(small, encoding="utf-8")
                    write_digests(unfinished, digests, ".metadata", "state.json")
                if self.tidies:
                    self._take_over(best[1])
                    unfinished.rename(complete)
            except (OSError, CheckpointException) as error:
                shutil.rmtree(unfinished, ignore_errors=True)
                again = (
                    f"the same command with output_dir={in_shell(self.folder.parent)} continues after step {self.saved}"
                )
                kept = f"Earlier ones are intact: make room; {again}" if self.saved else "There is none yet: make room"
                raise TuneError(
                    f"the checkpoint of step {step} could not be written: {cause_of(error)}. {kept}."
                ) from error
            self._completed(step, best)

        if self.asynchronous:
            self.pending = self.background.submit(write)
        else:  # in this thread, whose device is that of the tensors
            self._finish_writing(write)
        if wait:
            self._written()

    def _renew_notes(self, step: int) -> None:
        """Renew in the checkpoint of a step what is decided after it was saved: which step is the best, and a stop."""
        if self.world.is_main and (self.best.metric or self.stopped):
            file = self.folder / f"step-{step:08d}" / "state.json"
            notes = {"best": self.best.state_dict(), "stopped": self.stopped}
            try:
                replace_json(file, json.loads(file.read_text(encoding="utf-8")) | notes)
            except OSError as error:  # the other processes go on
                self.unwritten = f"which step was the best, and whether the training stopped, in {file}"
                self.tell(f"warning: {file} could not be written, to note the best {self.best}: {error.strerror}")

    def wait(self) -> int:
        """Wait for the checkpoint that is being written, on all processes; return the step of the last complete one,
        or 0. Under Ray Train it is reported, unless it lies on a disk that its other nodes do not see."""
        saved = self._written()
        self._report(saved)
        return saved

    def _written(self) -> int:
        """As `wait`. A checkpoint may fail on one process alone: what it knows of it, all know from here on. Also, no
        process ends before rank 0 has renamed the folder."""
        failure = ""
        try:
            self._collect()
        except TuneError as error:
            failure = str(error)
        known = self.world.all_gather((failure, self.saved, self.unwritten, vars(self.best)))
        if failure := next((each[0] for each in known if each[0]), ""):
            raise TuneError(failure)
        _, self.saved, self.unwritten, best = known[0]
        vars(self.best).update(best)
        return self.saved

    def _report(self, saved: int) -> None:
        if saved > self.reported and is_ray_worker() and not (self.folder.parent / STORED).exists():
            report(saved, self.metrics.get(saved, {}), self.folder / f"step-{saved:08d}", self.world.is_main)
            self.reported = saved
        self.metrics = {step: metrics for step, metrics in self.metrics.items() if step > saved}

    def finish(self) -> None:
        """Wait as `wait`; with `keep_best` the model then has the weights of the best checkpoint. Call it before they
        are exported."""
        self.wait()
        if self.refused and not self.updates and (scales := loss_scales(self.model)) and scales[0].skipped:
            raise TuneError(
                "no step changed the weights: in each a gradient was too large for fp16. Nothing is exported. Train "
                f"more steps: each halves the loss scale, which is {scales[0].value:g} now. Or set dtype=bf16 or fp32"
            )
        if self.refused and not self.updates:
            raise TuneError(
                f"no step changed the weights: in each the loss or a gradient was not finite, and with on_nan="
                f"{self.on_nan} it was left out. Nothing is exported. {CAUSES}"
            )
        reshard(self.model)  # what was measured last may have gathered some
        if self.best.metric is None:
            return
        if (path := self._best_intact()) is None:
            self.tell(
                f"checkpointer.keep_best: there is no checkpoint with a {self.best.metric}: the last weights are taken"
            )
            return
        model = get_model_state_dict(self.model, options=TRAINED)
        try:
            dcp.load({"model": model}, storage_reader=Reader(path), planner=Planner())
        except CheckpointException as error:
            raise TuneError(f"{path} cannot be read into this model: {cause_of(error)}. Remove that folder") from error
        set_model_state_dict(self.model, model, options=TRAINED)
        self.tell(f"the weights are those with the best {self.best}")

    def _best_intact(self) -> Path | None:
        """The best checkpoint. If it is damaged, the next best one of those that are there."""
        while self.best.step:
            path = self._place(self.best.step)
            damage = self._damage(path) if path else ""
            if path and not damage:
                return path
            what = f"{path} is damaged: {damage}" if path else f"the checkpoint of step {self.best.step} is gone"
            self.tell(f"warning: {what}. It has the best {self.best.metric}: the next best is taken")
            self.best.choose(self.best.values.keys() - {self.best.step})
            if self.saved:
                self._renew_notes(self.saved)
        return None

    def _collect(self) -> None:
        if self.pending is not None:
            pending, self.pending = self.pending, None
            self._finish_writing(pending.result)

    def _finish_writing(self, result: Callable[[], None]) -> None:
        """Call `result`, which raises if the checkpoint could not be written: with `on_error="retry"` report it."""
        try:
            result()
        except TuneError as error:
            if self.on_error == "stop":
                raise
            self.unwritten = f"the checkpoint of step {self.writing}"
            self.best.forget(self.writing)
            if str(error) != self.told:  # at the end a step is saved before what is measured then, and after it
                again = "" if self.ends else ", and tries again at the next checkpoint at the latest"
                self.tell(f"{error} The run goes on{again}.")
            self.told = str(error)

    def _has(self, step: int, saving: int) -> bool:
        """Whether there is a checkpoint of a step, or will be when `saving` is written."""
        before = self.resumed.get(step)
        here = (self.folder / f"step-{step:08d}").exists()
        return step == saving or here or (before is not None and before.exists())

    def _take_over(self, step: int) -> None:
        """Bring the best checkpoint, if it is in the folder that training has continued from, into this one."""
        before, complete = self.resumed.get(step), self.folder / f"step-{step:08d}"
        if before and before.exists() and not complete.exists():
            with written_aside(complete, folder=True) as unfinished:
                shutil.copytree(before, unfinished, copy_function=_link, dirs_exist_ok=True)

    def _completed(self, step: int, best: tuple[float, int]) -> None:
        """The checkpoint of a step is complete: remove older ones beyond `keep`, apart from the best."""
        self.saved, self.best.kept = step, best
        if self.tidies and self.keep:
            kept = {*sorted(self.folder.glob(CHECKPOINT))[-self.keep :], self.folder / f"step-{best[1]:08d}"}
            for old in {*self.folder.glob(CHECKPOINT)} - kept:
                # It is renamed first: a folder that is only partly removed must not look complete.
                shutil.rmtree(old.rename(self.folder / f".{old.name}.removed"), ignore_errors=True)

    def _states(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The states to save as JSON, with the names of tensors in their places, and for those with any these tensors
        by name."""
        parts: dict[str, Any] = {}
        tensors: dict[str, dict[str, Tensor]] = {name: {} for name in self.small}
        for name, part in self.small.items():
            with explained(f"the state of {name} cannot be saved"):
                parts[name] = _to_json(part.state_dict(), tensors[name])
        return parts, {name: each for name, each in tensors.items() if each}

    def _changed(self) -> list[dict[str, Any]]:
        """Values of the parameter groups that training changed, and the learning rate."""
        pairs = zip(self.optimizer.param_groups, self.settings, strict=True)
        return [
            {
                name: _to_json(group[name].item() if torch.is_tensor(group[name]) else group[name])
                for name in group.keys() - {"params", "lr"}
                if group[name] != settings.get(name)
            }
            | ({"lr": float(group["lr"])} if "lr" in group else {})
            for group, settings in pairs
        ]

    def _optimizer_states(self) -> dict[str, Any]:
        """By parameter. torch would take a step to make them where there are none, and so change the training."""
        if not self.optimizer.state:
            return {}
        return get_optimizer_state_dict(self.model, self.optimizer, options=TRAINED)["state"]  # type: ignore[return-value]


@functools.cache
def _background_group(world: dist.ProcessGroup, timeout: timedelta) -> dist.ProcessGroup:
    """One group for all background threads. Training must not share it; the threads may, as one checkpoint is written
    at a time, and each group has threads of its own that stay busy."""
    return dist.new_group(backend="gloo", timeout=timeout)


def _kind(optimizer: torch.optim.Optimizer) -> str:
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def _with_states(saved: Iterable[str], names: Collection[str]) -> set[str]:
    """Those of the parameters' `names` of which a checkpoint has states of an optimizer."""
    found = set()
    for key in saved:
        if key.startswith("optimizer."):
            name = key.removeprefix("optimizer.").rpartition(".")[0]
            while name and name not in names:  # of a state that is a dict itself
                name = name.rpartition(".")[0]
            found.add(name)
    return found & {*names}


class OfGenerator:
    """A generator as a part of a checkpoint."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def state_dict(self) -> dict[str, Any]:
        return {"state": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["state"].cpu())


def _stateful(extra: Mapping[str, Any]) -> dict[str, Stateful]:
    parts: dict[str, Stateful] = {}
    for name, part in extra.items():
        if isinstance(part, torch.Generator):
            parts[name] = OfGenerator(part)
        elif hasattr(part, "state_dict") and hasattr(part, "load_state_dict"):
            parts[name] = part
        else:
            raise TuneError(
                f"extra.{name}: {type(part).__name__} has no state_dict() and load_state_dict(state), which save and "
                "restore it"
            )
    return parts


def _to_json(state: Any, tensors: dict[str, Tensor] | None = None, path: tuple[Any, ...] = ()) -> Any:
    """A state as JSON has it, with a `Tag` where it has no such thing. Tensors go into `tensors`, each under its place
    in the state. Raises TuneError for objects that would not come back as they were."""
    if state is None or isinstance(state, bool | int | float | str):
        return state
    if isinstance(state, Tensor) and tensors is not None:
        name = ".".join(map(str, path))
        while name in tensors:  # of other keys that read the same
            name += "'"
        tensors[name] = state
        return {Tag.TENSOR: name}
    if isinstance(state, Mapping):
        if all(isinstance(key, str) and key not in {*Tag} for key in state):
            return {key: _to_json(value, tensors, (*path, key)) for key, value in state.items()}
        return {Tag.PAIRS: [[_to_json(key), _to_json(value, tensors, (*path, key))] for key, value in state.items()]}
    if isinstance(state, list | tuple | set):
        values = [_to_json(value, tensors, (*path, index)) for index, value in enumerate(state)]
        return values if isinstance(state, list) else {Tag.TUPLE if isinstance(state, tuple) else Tag.SET: values}
    if isinstance(state, bytes):
        return {Tag.BYTES: base64.b64encode(state).decode()}
    if isinstance(state, np.generic):
        return state.item()
    if isinstance(state, np.ndarray) and state.dtype.kind in "biuf":
        return {Tag.ARRAY: [state.dtype.str, list(state.shape), base64.b64encode(state.tobytes()).decode()]}
    place = f"{'.'.join(map(str, path))}: " if path else ""
    raise TuneError(
        f"{place}{type(state).__name__} would not come back. Give numbers, texts, lists, tuples, sets, dicts, bytes, "
        "arrays or tensors"
    )


def _from_json(state: Any, tensors: Mapping[str, Tensor] | None = None) -> Any:
    """What `_to_json` was given, with these tensors."""
    if isinstance(state, list):
        return [_from_json(value, tensors) for value in state]
    if not isinstance(state, dict):
        return state
    only: Any = next(iter(state.items())) if len(state) == 1 else ("", None)
    tag, value = only
    match tag:
        case Tag.PAIRS:
            return {_from_json(key): _from_json(each, tensors) for key, each in value}
        case Tag.TUPLE:
            return tuple(_from_json(value, tensors))
        case Tag.SET:
            return {*_from_json(value, tensors)}
        case Tag.BYTES:
            return base64.b64decode(value)
        case Tag.ARRAY:
            dtype, shape, content = value
            return np.frombuffer(base64.b64decode(content), dtype).reshape(shape).copy()
        case Tag.TENSOR:
            return (tensors or {})[value]
    return {key: _from_json(each, tensors) for key, each in state.items()}


def _has_tensors(state: Any) -> bool:
    """Whether there are tensors in what `_to_json` gave."""
    if isinstance(state, list):
        return any(map(_has_tensors, state))
    return isinstance(state, dict) and (state.keys() == {Tag.TENSOR} or any(map(_has_tensors, state.values())))


def _link(source: str, target: str) -> None:
    """Files of a checkpoint are replaced and never changed: a second name is a copy, if one file system has both."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _on_host(tensor: Tensor) -> Tensor:
    """A copy in host memory. Sharded and quantised tensors are copied part by part (dcp.async_save cannot copy
    quantised ones)."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return tensor.detach().to("cpu", copy=True)
    names, context = tensor.__tensor_flatten__()
    parts = tree_map_only(Tensor, _on_host, {name: getattr(tensor, name) for name in names})  # a mesh stays as it is
    kind: Any = type(tensor)
    return kind.__tensor_unflatten__(parts, context, tensor.size(), tensor.stride())
