"""Write models with adapters merged in, or with the mean weights of several checkpoints."""

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
    """Write the model `base` with `adapter` merged in to `out`, with the base's tensor names and dtypes.

    The tokenizer is the one in the adapter's folder, if any. Only the adapter and one tensor of the base are in memory
    at a time. Adapters are merged in fp32. Several adapters are combined first; see `load_combined` for `combination`.
    `out` appears, or is replaced, when it is complete. A quantized base is dequantized; with `packed`, tensors that the
    adapters do not change stay quantized.

    Raises:
        TuneError: layers or shapes of the adapter do not match the base; the base is not a model folder, or not
            quantized although `packed` is set.
    """
    adapters = [Path(each) for each in ([adapter] if isinstance(adapter, str | Path) else adapter)]
    ConfigFile(Path(base))  # neither an adapter nor a run
    opened = open_model(base, adapters, head=None)
    opened.on_disk(**combination)
    names = ", ".join(f"`{'/'.join(each.parts[-2:])}`" for each in adapters)
    what = f"adapter {names} merged" if len(adapters) == 1 else f"adapters {names} merged ({combination['method']})"
    opened.export(Path(out), f"`{name_of(Path(base))}` with the {what} in by tune.", packed=packed)


def average(run: str | Path, out: str | Path, steps: Sequence[int] | None = None) -> None:
    """Write the model with the mean weights, adapters merged, of the checkpoints of `run` after `steps` to `out`.

    Means are computed in fp32. `steps=None` averages all checkpoints.

    Raises:
        TuneError: there are fewer than two checkpoints of these steps, or one cannot be opened (`open_model`).
    """
    run = Path(run)
    steps = sorted(set(steps or steps_of(run)))
    if len(steps) < 2:
        kept = ", ".join(map(str, steps)) or "none"
        raise TuneError(
            f"{run}: averaging needs at least two checkpoints; found {kept}. To keep more, set checkpointer.keep=9"
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
