"""The run of a rehearsal: it ends after one step, and nothing of it is written."""

import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import fsspec

from tune import config, rehearsal
from tune.datasets import GlobalBatch
from tune.errors import TuneError, explained
from tune.run import run_folder
from tune.run.training_run import Run, seed_generators

T = TypeVar("T")


class RehearsedRun(Run):
    """A `Run` with a temporary folder, which stands for the one that is named. Messages are notes of the rehearsal."""

    def _open_folder(self, chosen: str, resume: str) -> None:
        self.store, self.again, self.resume = None, "", resume
        named = config.local_folder(chosen)
        try:
            if "://" in chosen:
                with explained(f"output_dir: {chosen} cannot be used", ValueError, ImportError):
                    fsspec.get_filesystem_class(chosen.partition("://")[0])
            self.resume = run_folder.resumption(named, resume)
            if refusal := refused(named, self.resume, self.recipe):
                raise TuneError(refusal)
        except TuneError as error:
            self._rehearsal.report(error)
        self.temporary = tempfile.TemporaryDirectory(prefix="tune-rehearsal-")
        self.path = Path(self.temporary.name)
        self._rehearsal.folders[self.path] = named

    @property
    def _rehearsal(self) -> rehearsal.Rehearsal:
        found = rehearsal.current()
        assert found is not None
        return found

    def _apply_rules(self) -> None:
        """`tune.validate` has, for the machine that the run is for."""

    def __exit__(self, *_: object) -> None:
        self.temporary.cleanup()

    def finish(self, *_: object) -> None:
        pass

    def info(self, message: str) -> None:
        self._rehearsal.note(message)

    def append(self, *_: object) -> None:
        pass

    def record(self, *_: object) -> None:
        pass

    def steps(
        self, data: Iterable[tuple[int, T]], start: int = 0, checkpointer: Any = None, *,
        total: int | None = None, seed: int = 0, profiler: Mapping[str, Any] | None = None,
    ) -> Iterator[tuple[int, T]]:  # fmt: skip
        """The step after `start`, with its first micro-batches."""
        self._set_ends(data, start, total)
        return self._first(data, seed)

    def _first(self, data: Iterable[tuple[int, T]], seed: int) -> Iterator[tuple[int, T]]:
        for step, item in data:
            self.step = step
            seed_generators(seed, step, self.world.data_rank)
            yield step, self._shortened(item)
            return

    def _shortened(self, item: Any) -> Any:
        """With two micro-batches, or as many as stages need; of other items, one for each data rank."""
        if isinstance(item, GlobalBatch):
            most = max(2, self.world.num_stages * self.world.pp_virtual)
            return replace(item, micro_batches=item.micro_batches[:most])
        return item[: self.world.data_size] if isinstance(item, list) else item


def refused(folder: Path, resume: str, recipe: str | None) -> str:
    """Why a run cannot use `folder`, or \"\"; what is made to find out is removed."""
    mark, made = folder / ".validate", [each for each in (folder, *folder.parents) if not os.path.exists(each)]
    found = run_folder.refusal(folder, resume, mark, recipe)
    with suppress(OSError):
        mark.unlink(missing_ok=True)
        for each in made:
            each.rmdir()
    return found
