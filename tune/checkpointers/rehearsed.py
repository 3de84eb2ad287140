"""The checkpointer of a rehearsal: a checkpoint to continue from is compared with the run, and nothing is saved."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from tune import rehearsal
from tune.checkpointers.checkpointer import OF_ITSELF, Checkpointer
from tune.checkpointers.reading import checkpoint_at, cut_short, require_continuable, require_none_later
from tune.errors import TuneError
from tune.files import CHECKPOINT


class RehearsedCheckpointer(Checkpointer):
    """A `Checkpointer` by what a checkpoint says of itself. Errors are reported, and the rehearsal goes on."""

    def resume(self, resume: str | Path = "auto") -> int:
        rehearsed = rehearsal.current()
        assert rehearsed is not None
        folder = rehearsed.folders.get(self.folder.parent, self.folder.parent)
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
        """Those that the optimizer keeps of a parameter, by a step: parameters have no values that it could change."""
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        names = {name for state in self.optimizer.state.values() for name in state}
        self.optimizer.zero_grad()
        self.optimizer.state.clear()
        return names

    def _found(self, folder: Path, resume: str | Path, rehearsed: rehearsal.Rehearsal) -> Path | None:
        """The checkpoint to continue from, the newest intact one with `auto`."""
        if resume == "never":
            return None
        if resume != "auto":
            found = checkpoint_at(Path(resume))
            if damage := cut_short(found):
                raise TuneError(f"resume: {found} is damaged: {damage}. Give the checkpoint before it")
            return found
        for found in sorted(folder.glob(f"checkpoints/{CHECKPOINT}"), reverse=True):
            if not (damage := cut_short(found)):
                return found
            rehearsed.note(
                f"warning: resume: {found} is damaged: {damage}. The run takes the one before it, or starts anew"
            )
        return None

    def accepts(self, step: int, rows: list[int], **values: float) -> bool:
        self.updates += 1
        return True

    def step(self, step: int, metrics: Mapping[str, Any] = MappingProxyType({}), now: bool = False) -> None:
        pass

    def save(self, step: int, wait: bool = False) -> None:
        pass

    def wait(self) -> int:
        return 0

    def finish(self) -> None:
        pass


def _newest(folder: Path) -> Path | None:
    return max(folder.glob(f"checkpoints/{CHECKPOINT}"), default=None)
