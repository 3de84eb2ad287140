"""Stand-ins for the world, the run and the checkpointer in a rehearsal."""

import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import fsspec
import torch

from tune import rehearsal
from tune.checkpointers import (
    OF_ITSELF,
    Checkpointer,
    checkpoint_at,
    cut_short,
    require_continuable,
    require_none_later,
)
from tune.config import local_folder
from tune.datasets import GlobalBatch
from tune.distributed import Unconnected, World
from tune.errors import TuneError, explained
from tune.files import CHECKPOINT, lock
from tune.run import Run, require_scalars, run_folder, seed_generators

T = TypeVar("T")


class RehearsedWorld(Unconnected):
    """The World of a rehearsal. The other processes do not exist, and are assumed to have this process's values."""

    def sum(self, value: torch.Tensor | float) -> torch.Tensor:
        return self._fp64(value) * self.data_size

    def sum_of_parts(self, value: torch.Tensor | float) -> torch.Tensor:
        return self.sum(value)

    def fetch(self, **values: torch.Tensor | float) -> dict[str, float]:
        return {name: self._fp64(value).item() for name, value in values.items()}


class RehearsedRun(Run):
    """A `Run` with a temporary folder in place of its own. Messages become notes of the rehearsal."""

    def _open_folder(self, chosen: str, resume: str) -> None:
        self.store, self.again, self.resume = None, "", resume
        named = local_folder(chosen)
        try:
            if "://" in chosen:
                with explained(f"output_dir: {chosen} cannot be used", ValueError, ImportError):
                    fsspec.get_filesystem_class(chosen.partition("://")[0])
            _require_not_held(named)
            self.resume = run_folder.resumption(named, resume)
            if refusal := refused(named, self.resume, self.recipe):
                raise TuneError(refusal)
        except TuneError as error:
            self._rehearsal.report(error)
        self.temporary = tempfile.TemporaryDirectory(prefix="tune-rehearsal-")
        self.path = Path(self.temporary.name, "run")  # `steps` creates it, as in a run
        self._rehearsal.folders[self.path] = named

    @property
    def _rehearsal(self) -> rehearsal.Rehearsal:
        found = rehearsal.current()
        assert found is not None
        return found

    def __exit__(self, *_: object) -> None:
        self.temporary.cleanup()

    def finish(self) -> None:
        pass

    def info(self, message: str) -> None:
        self._rehearsal.note(message)

    def append(self, file: str, records: list[dict[str, Any]]) -> None:
        pass

    def record(self, step: int, values: dict[str, float]) -> None:
        require_scalars(values)

    def _begin(self, start: int) -> None:
        self.path.mkdir(exist_ok=True)

    def _steps(self, data: Iterable[tuple[int, T]], checkpointer: Any, seed: int) -> Iterator[tuple[int, T]]:
        """Return the first step, with its first micro-batches."""
        return FirstStep(self._first(data, seed))

    def _first(self, data: Iterable[tuple[int, T]], seed: int) -> Iterator[tuple[int, T]]:
        for step, item in data:
            self.step = step
            seed_generators(seed, step, self.world.data_rank)
            yield step, self._shortened(item)
            return

    def _shortened(self, item: Any) -> Any:
        """Return two micro-batches, or as many as stages need; for other items, one for each data rank."""
        if isinstance(item, GlobalBatch):
            most = max(2, self.world.num_stages * self.world.pp_virtual)
            return replace(item, micro_batches=item.micro_batches[:most])
        return item[: self.world.data_size] if isinstance(item, list) else item


class FirstStep:
    """Iterates over the steps of a rehearsal, which end early: `StepsEnded` is for a loop that calls `next`."""

    def __init__(self, steps: Iterator[Any]):
        self.steps, self.is_begun = steps, False

    def __iter__(self) -> "FirstStep":
        return self

    def __next__(self) -> Any:
        for item in self.steps:
            self.is_begun = True
            return item
        raise rehearsal.StepsEnded if self.is_begun else StopIteration


def _require_not_held(folder: Path) -> None:
    """Raise TuneError if another process is writing to the run folder."""
    if not lock.is_held_here(folder):
        lock.hold(folder)  # leaves the folder as it is
        lock.release(folder)


def refused(folder: Path, resume: str, recipe: str | None) -> str:
    """Return why a run cannot use `folder`, or \"\". Removes the files it creates for the check."""
    mark, made = folder / ".validate", [each for each in (folder, *folder.parents) if not os.path.exists(each)]
    found = run_folder.refusal(folder, resume, mark, recipe)
    with suppress(OSError):
        mark.unlink(missing_ok=True)
        for each in made:
            each.rmdir()
    return found


class RehearsedCheckpointer(Checkpointer):
    """A `Checkpointer` that reads only a checkpoint's metadata. It reports errors, and the rehearsal goes on."""

    def resume(self, resume: str | Path = "auto") -> int:
        rehearsed = rehearsal.current()
        assert rehearsed is not None
        self.updates = 1  # an error before the first update must not cause another one about missing updates
        folder = rehearsal.named(self.folder.parent)
        try:
            found = self._found(folder, resume, rehearsed)
            if found is None:
                return 0
            state = json.loads((found / "state.json").read_text(encoding="utf-8"))
            if (parts := state.keys() - OF_ITSELF) != self.small.keys():
                raise self._of_another(found, parts)
            require_none_later(state["step"], None if resume == "auto" else _newest(folder))
        except TuneError as error:
            rehearsed.report(error)
            return 0
        for name in ("data", "base", "adapter"):
            if name in self.small:
                try:
                    self.small[name].load_state_dict(state[name])
                except TuneError as error:
                    rehearsed.report(error)
        try:
            require_continuable(found, self.model, self._names_of_states())
        except TuneError as error:
            rehearsed.report(error)
        return int(state["step"])

    def _names_of_states(self) -> set[str]:
        """Return the names of the optimizer's states, by a step on parameters that have no values."""
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        names = {name for state in self.optimizer.state.values() for name in state}
        self.optimizer.zero_grad()
        self.optimizer.state.clear()
        return names

    def _found(self, folder: Path, resume: str | Path, rehearsed: rehearsal.Rehearsal) -> Path | None:
        """Return the checkpoint to continue from; with `auto`, the newest intact one."""
        if resume == "never":
            return None
        if resume != "auto":
            found = checkpoint_at(Path(resume))
            if damage := cut_short(found):
                raise TuneError(f"resume: {found} is damaged: {damage}. Use an earlier checkpoint")
            return found
        for found in sorted(folder.glob(f"checkpoints/{CHECKPOINT}"), reverse=True):
            if not (damage := cut_short(found)):
                return found
            rehearsed.note(
                f"warning: resume: {found} is damaged: {damage}. The run uses the checkpoint before it, or starts over"
            )
        return None

    def accepts(self, step: int, metrics: Mapping[str, float], rows: Sequence[int] = ()) -> bool:
        self.updates += 1
        return True

    def step(self, step: int, metrics: Mapping[str, Any] = MappingProxyType({}), now: bool | None = None) -> None:
        try:
            self.best.is_in(metrics)
        except TuneError as error:
            if rehearsed := rehearsal.current():
                rehearsed.report(error)

    def save(self, step: int, wait: bool = False) -> None:
        pass

    def wait(self) -> int:
        return 0

    def finish(self) -> None:  # no weights are loaded
        pass


def _newest(folder: Path) -> Path | None:
    return max(folder.glob(f"checkpoints/{CHECKPOINT}"), default=None)


STAND_INS = {World: RehearsedWorld, Run: RehearsedRun, Checkpointer: RehearsedCheckpointer}
