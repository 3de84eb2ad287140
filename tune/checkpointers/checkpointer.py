"""Save and restore training states with torch.distributed.checkpoint (DCP), also on another number of processes."""

import base64
import contextlib
import functools
import json
import os
import shutil
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Protocol

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
from tune.distributed import World, current_world, is_ray_worker, local_shard, loss_scales, report, reshard
from tune.errors import TuneError, explained
from tune.files import CHECKPOINT, lock, written_aside
from tune.lookup import in_shell
from tune.types import PositiveInt, checked

# The checkpointer's own keys in state.json.
PARTS = {"model", "schedule", "data", "base", "adapter"}  # names of the arguments that have states
OF_ITSELF = {"step", "groups", "best", "optimizer", "updates", "stopped", "loss_scales", "unmeasured", "changed"}

STORED = ".store"  # marks a run folder that is uploaded: each node has its own folder with its processes' files


class Tag(StrEnum):
    """The only key of a dict in state.json that encodes a type that JSON lacks."""

    PAIRS = "__pairs__"
    TUPLE = "__tuple__"
    SET = "__set__"
    BYTES = "__bytes__"
    ARRAY = "__array__"
    TENSOR = "__tensor__"


def _require_own_parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise TuneError if `optimizer` updates a tensor that is not in `model`: states are saved by the model's names."""
    reshard(model)  # after a forward, FSDP's root still has its gathered parameters in place of its own
    own = {*model.parameters()}
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if parameter not in own:
                raise TuneError(
                    f"optimizer: group {index} has a parameter of shape {tuple(parameter.shape)} that is not in the "
                    "model, so its state has no name in a checkpoint. Add its module to the model, or give it its own "
                    "optimizer and save both as extra={...}"
                )


class SavePlanner(dcp.DefaultSavePlanner):
    """Save values that are not sharded from the lowest rank that has them. torch distributes such duplicates over the
    ranks, which may have different values: statistics of a BatchNorm, counters, generators."""

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        taken: set[MetadataIndex] = set()
        plans = []
        for plan in all_plans:
            items = [item for item in plan.items if item.type == WriteItemType.SHARD or item.index not in taken]
            taken |= {item.index for item in items if item.type != WriteItemType.SHARD}
            plans.append(replace(plan, items=items))
        return super().create_global_plan(plans)


class OwnRun(Protocol):
    """The part of a `tune.run.Run` that a checkpointer needs."""

    path: Path
    world: World
    higher_is_better: Mapping[str, bool | None]  # by metric of a task

    def info(self, message: str) -> None: ...
    def is_end(self, step: int) -> bool: ...


@checked
class Checkpointer:
    """Save and restore model, optimizer, schedule and position in the data under `folder`/step-00000500/.

    `folder` is a `tune.run.Run`, or for a loop of your own a path. With a run, the folder is its `checkpoints`, world
    and `tell` are the run's, and its last step is saved.

    A checkpoint is written under a temporary name and renamed when all processes have written their parts, so a folder
    with the final name is complete. A checkpoint is saved every `every` optimizer steps; the newest `keep` are kept.
    With `async_`, the state is copied to the host and a thread writes it while training continues. If a checkpoint
    cannot be written, training stops (`on_error="stop"`), or rank 0 calls `tell` and training continues. Saving is
    then retried after a tenth of `every` steps and at the next checkpoint.

    `on_nan` handles a step whose loss or gradient is not finite: `stop` ends training before the weights change, `skip`
    continues with the next batch and the current weights, `rollback` with the weights of the last checkpoint.

    Only values of the optimizer's parameter groups that training changed are saved. This includes the learning rate,
    which tune's schedules recompute. Other hyperparameters come from the current config.

    Parameters that are trainable when the checkpointer is made are saved, also those that the loop freezes later.
    Others are not saved: when resuming, `base` checks that they come from the same weights, and `adapter` that its
    settings match. Without frozen parameters, `base` is not compared.

    With `keep_best`, the name of a metric, the checkpoint with the best value is also kept. `higher_is_better` states
    whether that is the highest or the lowest value; it may be None for the metrics of docs/runs.md, and for a task's
    metric, for which `tasks.higher_is_better` has it. After `patience` values in a row without improvement, training
    `is_over`.

    `extra` is your own state by name: averaged weights, a tensor, a dict of counters, a second optimizer, a
    torch.Generator. Numbers, strings, lists, tuples, sets, bytes, arrays, and dicts of these with any keys are restored
    as rank 0 had them. Tensors, also sharded ones, are loaded in place if the object already has them before it is
    restored; optimizer states are created first. An object without tensors gets whole ones.

    `schedule` is any scheduler of torch or transformers, created before `resume`. `world=None` uses
    `tune.distributed.current_world()`.

    Raises:
        TuneError: an argument has the wrong type, an object in `extra` has no `state_dict`, or it is unknown which
            value of `keep_best` is best.
    """

    def __init__(
        self,
        folder: Any,
        world: World | None = None,
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        schedule: Stateful | None = None,
        data: Stateful | None = None,
        base: Stateful | None = None,
        adapter: Stateful | None = None,
        extra: Mapping[str, Any] | None = None,
        every: PositiveInt | None = 500,
        keep: PositiveInt | None = 2,
        async_: bool = True,
        on_error: Literal["retry", "stop"] = "retry",
        on_nan: Literal["stop", "skip", "rollback"] = "stop",
        keep_best: str | None = None,
        higher_is_better: bool | None = None,
        patience: PositiveInt | None = None,
        tasks: Any = None,
        tell: Callable[[str], None] = print,
    ):
        self.__class__ = rehearsal.stand_in(type(self))
        self.run: OwnRun | None = None if isinstance(folder, Path | str) else folder
        if self.run:
            folder, world, tell = self.run.path / "checkpoints", self.run.world, self.run.info
        folder, world = Path(folder), current_world(world)
        if folder.exists() and not folder.is_dir():
            raise TuneError(f"folder: {folder} is a file. Name a folder for the checkpoints")
        _require_own_parameters(model, optimizer)
        if not dist.is_initialized():
            world.mesh.size()  # creates the process group of a single process
        self.folder, self.world = folder, world
        self.model, self.optimizer = model, optimizer
        self.settings = [dict(group) for group in optimizer.param_groups]
        self.trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        self.left_out: set[str] = set()  # reported parameters that training changes and checkpoints lack
        self.frozen = self._memory_of_frozen()
        self.changed: set[str] = set()  # frozen parameters that the loop has changed
        if all(parameter.requires_grad for parameter in model.parameters()):
            base = None  # all weights are in the checkpoints
        small = {"schedule": schedule, "data": data, "base": base, "adapter": adapter}
        self.small: dict[str, Stateful] = {name: part for name, part in small.items() if part is not None}
        self.add(**extra or {})
        self.every, self.keep, self.asynchronous = every, keep, async_
        self.on_error, self.on_nan, self.refused = on_error, on_nan, 0
        self.updates = 0  # accepted steps, over all attempts at this training
        self.tell = tell if world.is_main else lambda message: None
        knows = self.run or tasks  # which values of a task's metrics are better
        of_tasks = knows.higher_is_better if knows else {}
        self.best = Best(keep_best, patience, of_tasks, higher_is_better)
        if keep_best:
            self.tell(f"checkpointer.keep_best: the {self.best.direction} {keep_best} is best")
        self.saved, self.reported, self.writing = 0, 0, 0
        self.resumed: dict[int, Path] = {}  # checkpoints by step in the folder that training continues from
        is_first_here = os.environ.get("LOCAL_RANK") == "0" and (folder.parent / STORED).exists()
        if (keep_best or on_nan == "rollback") and sum(world.from_all_ranks(is_first_here)) > 1:
            raise TuneError(
                "output_dir: checkpointer.keep_best and on_nan=rollback read checkpoints during training, but with a "
                "URL each node has only its part. Use a folder that all nodes share, or unset both"
            )
        self.tidies = world.is_main or is_first_here  # the one process per folder that renames and removes files
        self.group: Any = None if rehearsal.current() else _background_group(dist.group.WORLD, world.timeout)
        self.background = ThreadPoolExecutor(max_workers=1)
        self.pending: Future[None] | None = None
        self.told = ""  # the last reported failure
        self.unwritten = ""  # what could not be written most recently
        self.ends = False  # whether this is the last step
        self.stopped = False  # the recipe called stop()
        self.unmeasured = False  # the state is from before the measurements of its step
        self.metrics: dict[int, dict[str, float]] = {}  # of steps that are not reported to Ray yet

    def add(self, **extra: Any) -> None:
        """Also save and restore your own state, by name, as with `extra`: before `resume`.

        Raises TuneError if the checkpointer, or an earlier call, has a state of this name.
        """
        if taken := sorted(extra.keys() & (OF_ITSELF | PARTS | self.small.keys())):
            raise TuneError(
                f"extra.{taken[0]}: a checkpoint has a state of this name already. Choose another name, such as "
                f"my_{taken[0]}"
            )
        self.small |= _stateful(extra)

    def resume(self, resume: str | Path = "auto") -> int:
        """Restore the newest complete checkpoint (`auto`), the one at a path, or none (`never`). Returns its step.
        Raises TuneError if there is none at the path, it is from another training, continuing would replace later
        checkpoints, or another run is using this folder."""
        self.world.of_main(lambda: lock.hold(self.folder.parent))  # before any change in the folder
        if self.tidies and resume == "auto":
            for unfinished in self.folder.glob(".step-*"):
                shutil.rmtree(unfinished, ignore_errors=True)
        if resume == "never":
            return 0
        if resume == "auto":
            path = self._newest_intact()
        else:  # only rank 0 looks: other processes may see a shared folder a little later
            path = self.world.of_main(lambda: checkpoint_at(Path(resume)))
        if path is None:
            return 0
        if resume != "auto" and (damage := self._damage(path)):
            raise TuneError(f"resume: {path} is damaged: {damage}. Use an earlier checkpoint")
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
        for name in self.small.keys() - extra.keys() - {"schedule"}:  # these reject a checkpoint of another training
            self.small[name].load_state_dict(_from_json(small[name]))
        require_none_later(small["step"], self.newest())
        self._restore(path, small, extra)
        if "schedule" in self.small.keys() - extra.keys():  # after the learning rates, which some schedules recompute
            self.small["schedule"].load_state_dict(_from_json(small["schedule"]))
        self.updates, self.stopped = small["updates"], small.get("stopped", False)
        self.unmeasured = small.get("unmeasured", False)
        self.changed = {*small.get("changed", ())}
        for scale, state in zip(loss_scales(self.model), small.get("loss_scales", ()), strict=False):
            scale.load_state_dict(state)
        self.best.load_state_dict(small.get("best", {}))
        self.saved = self.reported = small["step"]
        self.resumed[self.saved] = path
        self._find_best(path.parent)
        return self.saved

    def _of_another(self, path: Path, found: Iterable[str]) -> TuneError:
        return TuneError(
            f"resume: {path} is from a different training: it has states of {_listed(found)}, this run of "
            f"{_listed(self.small)}. Pass the same parts (schedule, data, base, adapter, extra), or another folder"
        )

    def _find_best(self, before: Path) -> None:
        """Find the checkpoints with the best values, also in the folder `before` that training continues from. Forget
        the missing ones."""
        best = self.best.step
        for step in self.world.broadcast([*self.best.values]):
            if self.world.broadcast((before / f"step-{step:08d}").exists()):
                self.resumed.setdefault(step, before / f"step-{step:08d}")
        self.best.choose([step for step in self.best.values if step in self.resumed])
        if best != self.best.step:
            now = f"The best is now {self.best}" if self.best.step else "The search for the best starts over"
            self.tell(f"warning: the checkpoint of step {best}, with the best {self.best.metric}, is missing. {now}")
            if before == self.folder:
                self._renew_notes(self.saved)

    @contextlib.contextmanager
    def _as_made(self) -> Iterator[None]:
        """Within the block, parameters are trainable or frozen as when the checkpointer was made.

        The loop may freeze parameters for some steps, and torch ignores frozen ones.
        """
        reshard(self.model)  # a forward may have gathered parameters in place of the model's own
        changed = [
            (name, parameter)
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad != (name in self.trained)
        ]
        for name, parameter in changed:
            parameter.requires_grad_(name in self.trained)
        try:
            yield
        finally:
            for name, parameter in changed:
                parameter.requires_grad_(name not in self.trained)

    def _report_left_out(self) -> None:
        """Warn once about parameters that became trainable after the checkpointer was made: they are not saved."""
        trainable = {name for name, parameter in self.model.named_parameters() if parameter.requires_grad}
        left_out = trainable - self.trained - self.left_out
        if left_out:
            self.left_out |= left_out
            self.tell(
                f"warning: {len(left_out)} parameter(s) became trainable after the checkpointer was made, and are not "
                f"in its checkpoints: {_first(left_out)}. Make the optimizer and the checkpointer while all parameters "
                "that will be trained are trainable, and freeze some in the loop"
            )

    @torch.no_grad()
    def _memory_of_frozen(self) -> dict[str, tuple[int, int]]:
        """Return the address of this process's part of each frozen parameter, and how often torch has changed it."""
        if rehearsal.current():
            return {}
        found = {}
        for name, parameter in self.model.named_parameters():
            if name not in self.trained:
                shard, _ = local_shard(parameter)
                found[name] = shard.data_ptr(), shard._version
        return found

    @torch.no_grad()
    def _note_changed(self, extra: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Note frozen parameters that the loop has changed. Warn once about those that are not in `extra`."""
        now = self._memory_of_frozen()
        saved = {local_shard(tensor)[0].data_ptr() for tensors in extra.values() for tensor in tensors.values()}
        for name, (address, version) in self.frozen.items():
            if address and now.get(name, (0, 0))[0] == address and now[name][1] != version:  # FSDP may move it
                self.changed.add(name)
        lost = {name for name in self.changed if name in now and now[name][0] not in saved} - self.left_out
        if lost:
            self.left_out |= lost
            self.tell(
                f"warning: the loop has changed {len(lost)} frozen parameter(s), which are not in the checkpoints: "
                f"{_first(lost)}. A run that continues would start with their original values. Add them: "
                "checkpointer.add(bases={name: parameter, ...})"
            )

    def _place(self, step: int) -> Path | None:
        """Return the checkpoint of a step in this folder or in the one that training continued from, or None."""
        places = [self.folder / f"step-{step:08d}", *filter(None, [self.resumed.get(step)])]
        return self.world.broadcast(next((path for path in places if path.exists()), None))

    def _restore(self, path: Path, small: dict[str, Any], extra: dict[str, Any]) -> None:
        """Restore the tensors of a checkpoint and the values of the optimizer's groups that training changed."""
        reader = Reader(path)
        saved = reader.read_metadata().state_dict_metadata
        # torch creates missing optimizer states of all parameters by a step with zero gradients.
        with self._as_made():
            model, optimizer = get_state_dict(self.model, self.optimizer, options=TRAINED)
        tensors = {"model": model, "extra": extra}
        of_parameters: Any = optimizer["state"]
        states = {name.rpartition(".")[2] for name in flatten_state_dict({"states": of_parameters})[0]}
        require_same(path, saved, tensors, states, elsewhere(self.model))
        with_states = _with_states(saved, of_parameters)
        if not with_states and small["optimizer"] != (kind := _kind(self.optimizer)):
            raise TuneError(
                f"resume: {path} has a different optimizer: {small['optimizer']}, not {kind}. Restore that setting, or "
                "start over with resume=never and another output_dir"
            )
        state = tensors | {"optimizer": {name: of_parameters[name] for name in with_states}}
        try:
            dcp.load(state, storage_reader=reader, planner=Planner())
        except CheckpointException as error:
            raise TuneError(
                f"resume: {path} cannot be read into this model and optimizer: {cause_of(error)}. Restore their "
                "settings; or, if the files are damaged, remove that folder to continue from an earlier checkpoint"
            ) from error
        groups: Any = optimizer["param_groups"]
        if len(groups) != (count := len(small["groups"])):
            raise TuneError(f"resume: {path} has {count} parameter groups, not {len(groups)}. Restore parameter_groups")
        for group, settings, changed in zip(groups, self.settings, _from_json(small["groups"]), strict=True):
            group |= {name: value for name, value in settings.items() if name != "params"} | changed
            if torch.is_tensor(settings.get("lr")):  # torchao's optimizers need a tensor
                group["lr"] = torch.full_like(settings["lr"], changed["lr"])
        with self._as_made():
            set_state_dict(
                self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer, options=TRAINED
            )
        for group, restored in zip(self.optimizer.param_groups, groups, strict=True):
            if not group["params"]:  # torch drops the settings of an empty group
                group |= {name: value for name, value in restored.items() if name != "params"}
        for name, parameter in self.model.named_parameters():
            if not _get_fqns(self.model, name) & with_states:  # the parameter had no gradient yet
                self.optimizer.state.pop(parameter, None)
        for name, tensors in extra.items():
            if not _has_tensors(small[name]):
                raise TuneError(
                    f"resume: {path} has no tensors of extra.{name}: an earlier version of tune wrote it. Start over "
                    "with resume=never and another output_dir"
                )
            self.small[name].load_state_dict(_from_json(small[name], tensors))

    def accepts(self, step: int, metrics: Mapping[str, float], rows: Sequence[int] = ()) -> bool:
        """Whether the gradients of a step may change the weights: `loss` and `grad_norm` of its `metrics`, equal on all
        processes, are finite.

        If not, `on_nan` decides: raise, skip the step, or restore model and optimizer from the last checkpoint and skip
        the step. Step, data and schedule advance in either case. The tenth such step in a row stops training.

        In fp16, a `grad_norm` that is not finite is normal if the loss scale is too high: the step is skipped and the
        scale lowered, regardless of `on_nan` (see `tune.distributed.LossScale`).

        `refused` counts rejected steps in a row, `updates` all accepted steps, also before a resume.

        Raises:
            TuneError: training stops, or there is no checkpoint to restore; names the step and dataset `rows`.
        """
        scales = loss_scales(self.model)
        values = {name: metrics[name] for name in ("loss", "grad_norm") if name in metrics}
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
                f"step {step}: skipped; a gradient is too large for fp16 ({scales[0].skipped} such steps so far). "
                f"The loss scale is lowered to {scales[0].value:g}"
            )
            return False
        goes_back = self.on_nan == "rollback"
        kept = self.wait() if goes_back else step - 1
        if self.on_nan == "stop":
            require_finite(step, rows, **values)
        if self.refused >= 10 or (goes_back and not kept):
            why = "This is the tenth such step in a row" if kept else "There is no checkpoint to roll back to yet"
            raise TuneError(f"{found}: {STOPPED}. {why}. {CAUSES}")
        if goes_back:
            reshard(self.model)
            path = self._last_intact()
            kept = self.saved
            if path is None:
                raise TuneError(f"{found}: training stopped; there is no intact checkpoint to roll back to. {CAUSES}")
            rates = [group.get("lr") for group in self.optimizer.param_groups]  # the schedule does not roll back
            self._restore(path, json.loads((path / "state.json").read_text(encoding="utf-8")), self._states()[1])
            for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
                if rate is not None:
                    group["lr"] = rate
        # "unchanged" without a step number: a step may have several updates
        weights = f"are restored from step {kept}" if goes_back else "are unchanged"
        self.tell(f"warning: {found}. The weights {weights}; training continues")
        return False

    def _last_intact(self) -> Path | None:
        """Return the newest intact checkpoint of this training."""
        newest = self._newest_intact()
        self.saved = int(newest.name.removeprefix("step-")) if newest else 0
        for step in sorted(self.resumed, reverse=True):
            if step > self.saved and (path := self._place(step)):
                if not (damage := self._damage(path)):
                    self.saved = step
                    return path
                self.tell(f"warning: {path} is damaged: {damage}. Using an earlier one")
        return newest

    def _newest_intact(self) -> Path | None:
        """Return the newest intact checkpoint in the folder. Newer, damaged ones are renamed and kept for
        inspection."""
        while (path := self.newest()) and (damage := self._damage(path)):
            aside = self.world.broadcast(f"damaged-{path.name}.{uuid.uuid4().hex[:8]}")
            if self.tidies:
                path.rename(self.folder / aside)
            self.tell(f"warning: {path} is damaged: {damage}. Renamed to {aside}; using an earlier one")
            self.best.choose(self.best.values.keys() - {int(path.name.removeprefix("step-"))})
        return path

    def _damage(self, checkpoint: Path) -> str:
        """Describe damage to a checkpoint, or return "". The processes share its files, so each is read once."""
        found = self.world.from_all_ranks(found_damage(checkpoint, self.world.rank, self.world.size))
        return next(filter(None, found), "")

    def newest(self) -> Path | None:
        """Return the newest complete checkpoint in the folder, or None."""
        return self.world.broadcast(max(self.folder.glob(CHECKPOINT), default=None, key=lambda path: path.name))

    def step(self, step: int, metrics: Mapping[str, Any] = MappingProxyType({}), now: bool | None = None) -> None:
        """Call this after each optimizer step, with its metrics. Saves if a checkpoint is due, is the best, or is the
        last one since training `is_over`; with `now`, saves and waits. With `on_error="stop"`, raises TuneError if a
        checkpoint could not be written; earlier ones are intact.

        `now` is for the end of training, which a run knows: nothing was measured after this step, so the checkpoint is
        `unmeasured`, and a run that continues from it makes the measurements."""
        if now is None:
            now = self.run.is_end(step) if self.run else False
        if self.pending is not None and self.pending.done():
            self._collect()
        try:
            measured = self.best.is_in(metrics)
        except TuneError:
            self.save(step, wait=True)  # a wrong name must not lose training
            raise
        measured = measured and metrics[str(self.best.metric)] is not None  # None: not measured at this step
        if measured:
            self.best.take(step, metrics[str(self.best.metric)])
            vars(self.best).update(self.world.broadcast(vars(self.best)))  # rank 0 knows which checkpoints are written
        is_best = measured and self.best.step == step
        if measured and self.best.is_over:
            self.tell(f"stopped: the best is {self.best}; the last {self.best.patience} values were no better")
        soon = self.writing + max(1, (self.every or 0) // 10)  # the retry, if rank 0 knows of a failure
        is_due = self.every and (
            step % self.every == 0 or (step == soon and bool(self.world.broadcast(self.unwritten)))
        )
        self.ends = self.unmeasured = now
        if now or is_best or self.is_over() or is_due:
            self.metrics[step] = self.metrics.get(step, {}) | dict(metrics)
            self.save(step, wait=now)

    def is_over(self) -> bool:
        """Whether `keep_best` has not improved for `patience` values, or the recipe has called `stop`."""
        return self.stopped or self.best.is_over

    def stop(self) -> None:
        """End training with this step: call this before `step`, on all processes. The step's checkpoint records it, so
        the same command does not train further."""
        self.stopped = True

    def save(self, step: int, wait: bool = False) -> None:
        """Save now; with `wait`, wait until the checkpoint is written. If the step is already saved, only its note of
        the best checkpoint is updated. All processes must call this."""
        saved = self._written()
        self._report(saved)
        self.ends = self.ends or wait
        if self.world.is_main:  # drop steps without a checkpoint
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
        reshard(self.model)  # a forward may have gathered parameters in place of the model's own
        self._report_left_out()
        self._note_changed(extra)
        small = json.dumps(
            {
                "step": step, "groups": self._changed(), "best": self.best.state_dict(),
                "optimizer": _kind(self.optimizer), "updates": self.updates, "stopped": self.stopped,
                "unmeasured": self.unmeasured, "changed": sorted(self.changed),
                "loss_scales": [scale.state_dict() for scale in loss_scales(self.model)], **parts,
            }
        )  # fmt: skip
        with self._as_made():
            model = get_model_state_dict(self.model, options=TRAINED)
        tensors = {"model": model, "optimizer": self._optimizer_states(), "extra": extra}
        tensors = tree_map_only(Tensor, _on_host, tensors) if self.asynchronous else tensors

        def write() -> None:
            try:
                dcp.save(tensors, checkpoint_id=unfinished, planner=SavePlanner(), process_group=self.group)
                digests = gather_digests(unfinished, self.group)
                if self.world.is_main:  # may fail: no process waits from here on
                    (unfinished / "state.json").write_text(small, encoding="utf-8")
                    write_digests(unfinished, digests, ".metadata", "state.json")
                if self.tidies:
                    if complete.exists():
                        shutil.rmtree(unfinished, ignore_errors=True)
                        raise TuneError(
                            f"the checkpoint of step {step} could not be written: {complete} is there, from another "
                            "training. Resume it, or choose another folder."
                        )
                    self._take_over(best[1])
                    unfinished.rename(complete)
            except (OSError, CheckpointException) as error:
                shutil.rmtree(unfinished, ignore_errors=True)
                again = (
                    f"the same command with output_dir={in_shell(self.folder.parent)} continues after step {self.saved}"
                )
                kept = f"Earlier ones are intact. Free space; {again}" if self.saved else "No earlier one. Free space"
                raise TuneError(
                    f"the checkpoint of step {step} could not be written: {cause_of(error)}. {kept}."
                ) from error
            self._completed(step, best)

        if self.asynchronous:
            self.pending = self.background.submit(write)
        else:  # in this thread, which has the tensors' device set
            self._finish_writing(write)
        if wait:
            self._written()

    def _renew_notes(self, step: int) -> None:
        """Update notes in the checkpoint of a step that are decided after saving: the best step, and a stop."""
        file = self.folder / f"step-{step:08d}" / "state.json"
        is_here = not (step in self.resumed and not file.exists())  # else in the folder that training continued from
        if self.world.is_main and is_here and (self.best.metric or self.stopped):
            notes = {"best": self.best.state_dict(), "stopped": self.stopped}
            try:
                replace_json(file, json.loads(file.read_text(encoding="utf-8")) | notes)
            except OSError as error:  # the other processes continue
                self.unwritten = f"the note of the best step and of a stop in {file}"
                self.tell(f"warning: {file} could not be updated with the best {self.best}: {error.strerror}")

    def wait(self) -> int:
        """Wait on all processes for the checkpoint that is being written. Returns the step of the last complete one, or
        0. Under Ray Train the checkpoint is reported, unless it is on a disk that other nodes do not share."""
        saved = self._written()
        self._report(saved)
        return saved

    def _written(self) -> int:
        """Like `wait`, without the report. A checkpoint may fail on only one process, so its state is shared with all.
        Also, no process ends before rank 0 has renamed the folder."""
        failure = ""
        try:
            self._collect()
        except TuneError as error:
            failure = str(error)
        known = self.world.from_all_ranks((failure, self.saved, self.unwritten, vars(self.best)))
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

    def finish(self) -> int | None:
        """Wait as `wait` does; with `keep_best`, then load the weights of the best checkpoint. Call this before an
        export. Parameters that the loop froze are trainable again. Returns the step of the loaded weights, or None if
        they are the last ones, as when the loop changed frozen weights."""
        self.wait()
        if self.refused and not self.updates and (scales := loss_scales(self.model)) and scales[0].skipped:
            raise TuneError(
                "no step changed the weights: in every step a gradient was too large for fp16. Nothing is exported. "
                f"Train longer (each step halves the loss scale, now {scales[0].value:g}), or set compute.dtype to "
                "bf16 or fp32"
            )
        if self.refused and not self.updates:
            raise TuneError(
                f"no step changed the weights: in every step the loss or a gradient was not finite, and on_nan="
                f"{self.on_nan} skipped it. Nothing is exported. {CAUSES}"
            )
        reshard(self.model)  # the last evaluation may have gathered weights
        for name, parameter in self.model.named_parameters():
            if name in self.trained:  # the loop may have frozen it: an export has all trained parameters
                parameter.requires_grad_(True)
        if self.best.metric is None:
            return None
        if self.changed:
            self.tell(
                "warning: checkpointer.keep_best: the loop changed frozen weights, which belong to the last trained "
                "weights. Using the last weights"
            )
            return None
        if (path := self._best_intact()) is None:
            self.tell(f"checkpointer.keep_best: no checkpoint has a finite {self.best.metric}; using the last weights")
            return None
        with self._as_made():
            model = get_model_state_dict(self.model, options=TRAINED)
        try:
            dcp.load({"model": model}, storage_reader=Reader(path), planner=Planner())
        except CheckpointException as error:
            raise TuneError(f"{path} cannot be read into this model: {cause_of(error)}. Remove that folder") from error
        with self._as_made():
            set_model_state_dict(self.model, model, options=TRAINED)
        self.tell(f"using the weights with the best {self.best}")
        return self.best.step

    def _best_intact(self) -> Path | None:
        """Return the best checkpoint, or the next best one that exists and is intact, or None."""
        while self.best.step:
            path = self._place(self.best.step)
            damage = self._damage(path) if path else ""
            if path and not damage:
                return path
            what = f"{path} is damaged: {damage}" if path else f"the checkpoint of step {self.best.step} is missing"
            self.tell(f"warning: {what}. It had the best {self.best.metric}; using the next best")
            self.best.choose(self.best.values.keys() - {self.best.step})
            if self.saved:
                self._renew_notes(self.saved)
        return None

    def _collect(self) -> None:
        if self.pending is not None:
            pending, self.pending = self.pending, None
            self._finish_writing(pending.result)

    def _finish_writing(self, result: Callable[[], None]) -> None:
        """Call `result`, which raises if the checkpoint could not be written; with `on_error="retry"`, report that."""
        try:
            result()
        except TuneError as error:
            if self.on_error == "stop":
                raise
            self.unwritten = f"the checkpoint of step {self.writing}"
            self.best.forget(self.writing)
            if str(error) != self.told:  # the last step is saved twice: before and after its evaluation
                again = "" if self.ends else " and retries at the next checkpoint at the latest"
                self.tell(f"{error} The run continues{again}.")
            self.told = str(error)

    def _has(self, step: int, saving: int) -> bool:
        """Whether a checkpoint of a step exists, or will exist when step `saving` is written."""
        before = self.resumed.get(step)
        here = (self.folder / f"step-{step:08d}").exists()
        return step == saving or here or (before is not None and before.exists())

    def _take_over(self, step: int) -> None:
        """Copy the best checkpoint into this folder if it is in the folder that training continued from."""
        before, complete = self.resumed.get(step), self.folder / f"step-{step:08d}"
        if before and before.exists() and not complete.exists():
            with written_aside(complete, folder=True) as unfinished:
                shutil.copytree(before, unfinished, copy_function=_link, dirs_exist_ok=True)

    def _completed(self, step: int, best: tuple[float, int]) -> None:
        """Record that the checkpoint of a step is complete, and remove older ones beyond `keep`, except the best."""
        self.saved, self.best.kept = step, best
        if self.tidies and self.keep:
            kept = {*sorted(self.folder.glob(CHECKPOINT))[-self.keep :], self.folder / f"step-{best[1]:08d}"}
            for old in {*self.folder.glob(CHECKPOINT)} - kept:
                # Rename first: a partly removed folder must not look complete.
                shutil.rmtree(old.rename(self.folder / f".{old.name}.removed"), ignore_errors=True)

    def _states(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the states to save as JSON, with names in place of tensors, and the tensors by part and name."""
        parts: dict[str, Any] = {}
        tensors: dict[str, dict[str, Tensor]] = {name: {} for name in self.small}
        for name, part in self.small.items():
            with explained(f"the state of {name} cannot be saved"):
                parts[name] = _to_json(part.state_dict(), tensors[name])
        return parts, {name: each for name, each in tensors.items() if each}

    def _changed(self) -> list[dict[str, Any]]:
        """Return the values of the parameter groups that training changed, and the learning rate."""
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
        """Return the states by parameter. Without states, torch would create them by a step, which changes training."""
        if not self.optimizer.state:
            return {}
        return get_optimizer_state_dict(self.model, self.optimizer, options=TRAINED)["state"]  # type: ignore[return-value]


@functools.cache
def _background_group(world: dist.ProcessGroup, timeout: timedelta) -> dist.ProcessGroup:
    """Create one group for all background threads, separate from training. The threads can share it, since one
    checkpoint is written at a time; every group has its own busy threads."""
    return dist.new_group(backend="gloo", timeout=timeout)


def _kind(optimizer: torch.optim.Optimizer) -> str:
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def _with_states(saved: Iterable[str], names: Collection[str]) -> set[str]:
    """Return the parameters among `names` for which a checkpoint has optimizer states."""
    found = set()
    for key in saved:
        if key.startswith("optimizer."):
            name = key.removeprefix("optimizer.").rpartition(".")[0]
            while name and name not in names:  # a state may itself be a dict
                name = name.rpartition(".")[0]
            found.add(name)
    return found & {*names}


class OfGenerator:
    """A torch.Generator as a part of a checkpoint."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def state_dict(self) -> dict[str, Any]:
        return {"state": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["state"].cpu())


class OfTensor:
    """A tensor, also a sharded one, as a part of a checkpoint. It is restored in place."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def state_dict(self) -> dict[str, Any]:
        return {"tensor": self.tensor.detach()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        with torch.no_grad():
            self.tensor.copy_(state["tensor"])


class OfDict:
    """A dict as a part of a checkpoint. It is restored in place."""

    def __init__(self, values: dict[Any, Any]) -> None:
        self.values = values

    def state_dict(self) -> dict[str, Any]:
        return {"values": dict(self.values)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values.clear()
        self.values.update(state["values"])


def _first(names: Iterable[str]) -> str:
    """Return the first three names, for a message."""
    first, more = sorted(names)[:3], sorted(names)[3:]
    return ", ".join([*first, "..."] if more else first)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "nothing else"


def _stateful(extra: Mapping[str, Any]) -> dict[str, Stateful]:
    parts: dict[str, Stateful] = {}
    for name, part in extra.items():
        if isinstance(part, torch.Generator):
            parts[name] = OfGenerator(part)
        elif isinstance(part, Tensor):
            parts[name] = OfTensor(part)
        elif isinstance(part, dict):
            parts[name] = OfDict(part)
        elif hasattr(part, "state_dict") and hasattr(part, "load_state_dict"):
            parts[name] = part
        else:
            raise TuneError(
                f"extra.{name}: {type(part).__name__} needs the methods state_dict() and load_state_dict(state) to be "
                "saved and restored"
            )
    return parts


def _to_json(state: Any, tensors: dict[str, Tensor] | None = None, path: tuple[Any, ...] = ()) -> Any:
    """Convert a state to JSON, with a `Tag` for types that JSON lacks. Tensors are stored in `tensors` under their path
    in the state. Raises TuneError for objects that cannot be restored exactly."""
    if state is None or isinstance(state, bool | int | float | str):
        return state
    if isinstance(state, Tensor) and tensors is not None:
        name = ".".join(map(str, path))
        while name in tensors:  # other keys may have the same text
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
        f"{place}{type(state).__name__} cannot be saved. Use numbers, strings, lists, tuples, sets, dicts, bytes, "
        "arrays or tensors"
    )


def _from_json(state: Any, tensors: Mapping[str, Tensor] | None = None) -> Any:
    """Invert `_to_json`, with these tensors."""
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
    """Whether a result of `_to_json` refers to tensors."""
    if isinstance(state, list):
        return any(map(_has_tensors, state))
    return isinstance(state, dict) and (state.keys() == {Tag.TENSOR} or any(map(_has_tensors, state.values())))


def _link(source: str, target: str) -> None:
    """Hard-link a file, or copy it to another file system. A link is safe: checkpoint files are replaced, not
    changed."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _on_host(tensor: Tensor) -> Tensor:
    """Copy a tensor to host memory. Sharded and quantized tensors are copied part by part (dcp.async_save cannot copy
    quantized ones)."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return tensor.detach().to("cpu", copy=True)
    names, context = tensor.__tensor_flatten__()
    parts = tree_map_only(Tensor, _on_host, {name: getattr(tensor, name) for name in names})  # meshes stay as they are
    kind: Any = type(tensor)
    return kind.__tensor_unflatten__(parts, context, tensor.size(), tensor.stride())
