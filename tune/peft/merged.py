"""Models written with what was trained merged in: adapters, or the mean of several checkpoints."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tune.checkpointers import card, export, full_tensors, name_of
from tune.distributed import init
from tune.errors import TuneError
from tune.models import ConfigFile
from tune.peft.named import steps_of
from tune.peft.opened import open_model


def merge(
    base: str | Path, adapter: str | Path | Sequence[str | Path], out: str | Path, packed: bool = False,
    **combination: Any,
) -> None:  # fmt: skip
    """Write to `out` the model `base` with `adapter` merged in, with the names and types of the base.

    The tokenizer is that of the adapter's folder, if it has one. The adapter and one tensor of the base are in
    memory. Adapters are merged in fp32. Several become one first, see `load_combined` for the `combination`. `out`
    appears, or is replaced, when it is complete. A quantized base is dequantized; with `packed`, what the adapters do
    not change stays as it is.

    Raises:
        TuneError: layers or shapes of the adapter do not fit the base; the base is no model folder, or not quantized
            and `packed`.
    """
    adapters = [Path(each) for each in ([adapter] if isinstance(adapter, str | Path) else adapter)]
    ConfigFile(Path(base))  # neither an adapter nor a run
    opened = open_model(base, adapters, head=None)
    opened.on_disk(**combination)
    names = ", ".join(f"`{'/'.join(each.parts[-2:])}`" for each in adapters)
    what = f"adapter {names} merged" if len(adapters) == 1 else f"adapters {names} merged ({combination['method']})"
    opened.export(Path(out), f"`{name_of(Path(base))}` with the {what} in by tune.", packed=packed)


def average(run: str | Path, out: str | Path, steps: Sequence[int] | None = None) -> None:
    """Write to `out` the model whose weights, adapters merged, are the means of those of the checkpoints of `run` after
    these `steps` (None: all it has), in fp32.

    Raises:
        TuneError: there are no two checkpoints of these steps, or one cannot be opened (`open_model`).
    """
    run = Path(run)
    steps = sorted(set(steps or steps_of(run)))
    if len(steps) < 2:
        kept = ", ".join(map(str, steps)) or "none"
        raise TuneError(
            f"{run}: averaging needs at least two checkpoints; found {kept}. Keep more of them: checkpointer.keep=9"
        )
    means: dict[str, Any] = {}
    for count, step in enumerate(steps, 1):
        opened = open_model(run, step=step, head=None)
        for name, tensor in full_tensors(opened.on_disk(), opened.base):
            means.setdefault(name, tensor.float()).lerp_(tensor.float(), 1 / count)
    last = open_model(run, step=steps[-1], head=None)
    last.model.load_state_dict(means, strict=False, assign=True)
    source, what = last.folders.base, f"the mean of the steps {', '.join(map(str, steps))} of the run `{run.name}`"
    text = card(source, f"`{source.name}` fine-tuned: {what}, by tune.")
    export(last.model, last.tokenizer(), out, init("cpu"), source=source, card=text)
