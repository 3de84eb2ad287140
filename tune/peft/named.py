"""Opening what a user names on the command line: a model folder, an adapter folder, a run folder."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tune import rehearsal
from tune.checkpointers import check_forward, open_checkpoint
from tune.distributed import Dtype, allocate, as_dtype, repeated_blocks, share, units_of
from tune.errors import TuneError
from tune.files import CHECKPOINT
from tune.lookup import in_shell, local_path
from tune.models import ConfigFile, HuggingFaceModel, read_json
from tune.peft.adapters import adapted_modules
from tune.peft.adding import add_adapters
from tune.peft.files import CONFIG, load_adapter, read_adapter
from tune.quantization import quantize_linears
from tune.tokenizers import Tokenizer


@dataclass(frozen=True)
class Resolved:
    """The folders of a model: its base, the adapters on it, and the one with the tokenizer that it was trained with."""

    base: Path
    adapters: tuple[Path, ...]
    tokenizer: Path

    @property
    def title(self) -> str:
        """What the merged model is, for its card."""
        merged = (f" with the adapter `{'/'.join(each.parts[-2:])}` merged in" for each in self.adapters)
        return f"`{self.base.name}`{''.join(merged)}"


def resolve_model(path: str | Path, adapters: Sequence[str | Path] = ()) -> Resolved:
    """The folders of what `path` names: a model in Hugging Face layout, an adapter in PEFT's (its base is the one that
    its config names), or a run folder (its model/, else its adapter/); with more `adapters`, or runs that have one.

    Raises:
        TuneError: a path is none of these, or the base of an adapter is not where its config says.
    """
    folder = exported_folder(local_path(path))
    its_own = [folder] if (folder / CONFIG).exists() else []
    found = [*its_own, *map(adapter_folder, adapters)]
    base = folder
    if its_own:
        named = read_json(folder / CONFIG, "adapter").get("base_model_name_or_path") or ""
        base = local_path(named)
        if not named or not base.is_dir():
            raise TuneError(
                f"{folder} is an adapter of {named or 'a base that it does not name'}, which is no folder here. Name "
                f"the base and the adapter: BASE --adapter {in_shell(folder)} (`tune download` gets a model from the "
                "hub)"
            )
    folders = [each for each in reversed(found) if (each / "tokenizer.json").exists()]
    return Resolved(base, tuple(found), folders[0] if folders else base)


def adapter_folder(path: str | Path) -> Path:
    """The adapter that `path` is or, if it is a run, has exported. Raises TuneError if there is none."""
    given = local_path(path)
    folder = exported_folder(given, "adapter") if given.is_dir() else given
    if not (folder / CONFIG).exists():
        raise TuneError(f"{folder} is no adapter: it has no {CONFIG}. Name a folder in PEFT's layout, or a run of one")
    return folder


def exported_folder(path: Path, first: Literal["model", "adapter"] = "model") -> Path:
    """A model or an adapter folder: what the run in `path` has exported, `first` if it has both, or if that is no run,
    `path` itself."""
    second = "adapter" if first == "model" else "model"
    is_run = any((path / name).is_file() for name in ("run.json", "metrics.jsonl"))  # also one in a model's folder
    for folder in (*([] if is_run else [path]), path / first, path / second):
        if (folder / "config.json").exists() or (folder / CONFIG).exists():
            return folder
    places = path, path.parent, path.parent.parent
    run = next((each for each in places if (each / "config.yaml").exists()), path if is_run else None)
    if run and run != path and any((run / name).is_dir() for name in ("model", "adapter")):
        raise TuneError(
            f"{path} is a checkpoint to continue from. `tune export {in_shell(run)} --step N` makes a model of one"
        )
    if run:
        steps = ", ".join(each.name for each in sorted(run.glob(f"checkpoints/{CHECKPOINT}"))) or "no checkpoint either"
        raise TuneError(
            f"{path}: this run has exported nothing yet: it has neither model/ nor adapter/, but {steps}. Let it come "
            f"to its end (the command that began it, with output_dir={in_shell(run)}, continues after its last "
            f"checkpoint), or make a model of a checkpoint: `tune export {in_shell(run)} --step N --to hf --out FOLDER`"
        )
    if not path.is_dir():
        ConfigFile(path, "model.path")  # says what it could mean
    found = ", ".join(sorted(child.name for child in path.iterdir())[:8]) or "nothing"
    raise TuneError(
        f"{path} is neither a model (config.json), nor an adapter ({CONFIG}), nor a run (config.yaml); it has {found}"
    )


def open_model(
    path: str | Path,
    *,
    adapters: Sequence[str | Path] = (),
    device: str | torch.device = "cpu",
    dtype: Dtype | None = None,
    quantization: Literal["nf4"] | None = None,
    peers: DeviceMesh | None = None,
) -> tuple[Any, Tokenizer]:
    """The language model that `path` names, see `resolve_model`, ready for use on one device, and its tokenizer. The
    processes of `peers` (`world.mesh["tp"]`) share its layers, if they are several: each has a part on its device.

    The models of other families are those of transformers. Without a `dtype` it is fp32 on a CPU, elsewhere that of the
    file. What several adapters change of the base adds up, as in PEFT: it is merged into the weights.

    Raises:
        TuneError: also if the model is a reward model, does not fit its files, cannot be shared by so many, or several
            adapters are to be merged into quantised or shared weights.
    """
    found = resolve_model(path, adapters)
    loras = [read_adapter(str(each)) for each in found.adapters]
    is_shared = peers is not None and peers.size() > 1
    if (quantization or is_shared) and len(loras) > 1:
        kind = "quantised weights" if quantization else "weights that several processes share"
        raise TuneError(f"{kind} take one adapter: merge the others into the base first (`tune merge`)")
    if any("score" in lora.modules_to_save for lora in loras):
        raise TuneError(f"{path} is a reward model: it scores texts and writes none")
    model, weights = open_checkpoint(found.base)
    if rehearsal.current():
        raise rehearsal.RehearsalEnded
    on_disk = max(weights.tensors.values(), key=lambda tensor: torch.Size(tensor.shape).numel()).dtype
    chosen = as_dtype(dtype) if dtype else torch.float32 if torch.device(device).type == "cpu" else on_disk
    for parameter in model.parameters():
        parameter.data = parameter.data.to(chosen)
    if quantization:
        quantize_linears(model, double=True)
    if peers is not None and is_shared:
        if isinstance(model, HuggingFaceModel):
            raise TuneError(f"tp: {found.base} is of a family that only transformers has, whose cache is not shared")
        for lora in loras:
            add_adapters(model, lora)
        blocks = repeated_blocks(model)
        share(model, blocks, units_of(model, blocks), peers)
    allocate(model, torch.device(device), torch.device(device))
    weights.load(model)
    changes: dict[str, Tensor] | None = {} if len(loras) > 1 else None
    for folder, lora in zip(found.adapters, loras, strict=True):
        if not is_shared:
            add_adapters(model, lora)
        load_adapter(model, str(folder))
        if changes is not None:
            _take_off(model, changes)
    with torch.no_grad():
        for name, change in (changes or {}).items():
            weight = model.get_submodule(name).weight
            weight.copy_(weight.float() + change)
    check_forward(model)
    return (model if is_shared else model.to(device)).eval(), Tokenizer(str(found.tokenizer), date=None)


@torch.no_grad()
def _take_off(model: nn.Module, changes: dict[str, Tensor]) -> None:
    """Make the layers of `model` plain ones again, and add to `changes`, by layer, what its adapters made of their
    weights. Each is made of the base's weights, as in PEFT: DoRA's norms depend on them."""
    layer: Any
    for name, layer in adapted_modules(model).items():
        change = layer.merged(layer.weight).float() - layer.weight.float()
        if name in changes:  # DoRA scales the rows of all that came before it
            magnitude = getattr(layer, "magnitude", None)
            before = changes[name]
            if magnitude is not None:
                before = before * layer._ratio(magnitude, *layer.factors())[:, None]
            change = change + before
        changes[name] = change
        layer.remove()
