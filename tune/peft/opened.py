"""Open the model at a path: its architecture on the meta device, quantization and adapters, then its weights."""

import functools
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tune import rehearsal
from tune.checkpointers import (
    Pretrained,
    TrainedWeights,
    card,
    check_forward,
    export,
    exported_types,
    has_weights,
    open_checkpoint,
    plain_tensors,
    require_same_vocabulary,
)
from tune.distributed import (
    Dtype,
    World,
    allocate,
    as_dtype,
    init,
    parallelize,
    repeated_blocks,
    share,
    units_of,
)
from tune.errors import TuneError, explained
from tune.lookup import local_path
from tune.models import ConfigFile, HuggingFaceModel, Names, build, hf, set_pad
from tune.peft.adding import add_adapters
from tune.peft.files import (
    adapter,
    digest,
    load_adapter,
    read_adapter,
    trained_modules,
    warn_of_another_base,
    warn_of_changed_base,
)
from tune.peft.lora import LoRA
from tune.peft.merging import give_memory, load_combined, require_combinable, take_off
from tune.peft.named import Resolved, checkpoint_of, resolve_model, step_of
from tune.quantization import Compressor, quantize_linears, quantized_linears
from tune.run_settings import read_settings
from tune.terminal import visible
from tune.tokenizers import Tokenizer

# The components that a run's settings may name. Settings may come from others, and a component can be any function.
COMPONENTS: dict[str, dict[str, Callable[..., Any]]] = {
    "model": {"tune.models.build": build, "tune.models.hf": hf},
    "adapter": {"tune.peft.adapter": adapter, "tune.peft.LoRA": LoRA},
    "tokenizer": {"tune.tokenizers.Tokenizer": Tokenizer},
}


@dataclass(frozen=True)
class NamedAdapter:
    """An adapter, and a function that loads its parameters into a model with its layers."""

    lora: LoRA
    load: Callable[[nn.Module], None]
    digest: Callable[[], Any]
    folder: Path | None = None  # None: in a training state


@dataclass
class OpenedModel:
    """An opened model. `model` is on the meta device until one of `load`, `shard` and `on_disk` gives it weights.

    `weights` belong to its base, or to a run that trained all parameters. `folders` has the locations of its parts.
    `title` describes the merged model.
    """

    folders: Resolved
    model: Any
    weights: Pretrained | TrainedWeights
    adapters: Sequence[NamedAdapter]
    title: str
    setting: str = "model.path"
    tokenizer_settings: dict[str, Any] | None = None  # of the run, for a training state

    @property
    def base(self) -> Pretrained | None:
        """The weights on disk that frozen tensors are read from."""
        return self.weights if isinstance(self.weights, Pretrained) else None

    def tokenizer(self, chat_template: str | None = None, **settings: Any) -> Tokenizer:
        """The tokenizer that the model was trained with, or with another `chat_template`; `settings` are further
        arguments of `Tokenizer`."""
        settings = (self.tokenizer_settings or {"path": str(self.folders.tokenizer)}) | settings
        return Tokenizer(**(settings | ({"chat_template": chat_template} if chat_template else {})))

    def require_same_vocabulary(self, tokenizer: Tokenizer) -> None:
        """Raise TuneError if the model's tokenizer has different ids, or if the model has no rows for some ids."""
        require_same_vocabulary(self.setting, str(self.folders.tokenizer), self.model, tokenizer)

    def digest(self) -> dict[str, Any]:
        """A digest of the model, like `Pretrained.digest`, including its adapters."""
        adapters = [named.digest() for named in self.adapters]
        return self.weights.digest() | ({"adapters": adapters} if adapters else {})

    def load(
        self,
        device: str | torch.device = "cpu",
        dtype: Dtype | None = None,
        *,
        quantization: Literal["nf4"] | None = None,
        peers: DeviceMesh | None = None,
    ) -> Any:
        """Load the model for use on one device, in evaluation mode.

        If `peers` (`world.mesh["tp"]`) has several processes, they share the layers: each has a part on its device.

        The default `dtype` is fp32 on a CPU, elsewhere the dtype in the file. Several adapters are merged into the
        weights: their changes add up, as in PEFT.

        Raises:
            TuneError: the model cannot be divided among `peers`, or several adapters would have to be merged into
                quantized or shared weights.
        """
        model, device = self.model, torch.device(device)
        is_shared = peers is not None and peers.size() > 1
        if quantization or is_shared:
            self._require_one_adapter("quantized weights" if quantization else "weights shared by several processes")
        if rehearsal.current():
            raise rehearsal.RehearsalEnded
        self._tell_cost()
        chosen = as_dtype(dtype) if dtype else self._usual_dtype(device)
        for parameter in model.parameters():
            parameter.data = parameter.data.to(chosen)
        if quantization:
            quantize_linears(model, double=True)
        if len(self.adapters) == 1:
            add_adapters(model, self.adapters[0].lora)
        if peers is not None and is_shared:
            self._share(peers)
        allocate(model, device, device)
        self.weights.load(model)
        if len(self.adapters) == 1:
            self.adapters[0].load(model)
        else:
            self._add_up()
        check_forward(model)
        return (model if is_shared else model.to(device)).eval()

    def shard(
        self, world: World | None = None, dtype: Dtype = "fp32", quantization: Literal["nf4"] | None = None
    ) -> Any:
        """Load the model next to a trained one: sharded in the same way, frozen, without dropout.

        For a reference, a teacher or a reward model. Raises TuneError if it has several adapters, or if the layout does
        not fit.
        """
        model = self.model
        self._require_one_adapter("sharded weights")
        self._tell_cost()
        if quantization:
            quantize_linears(model, double=True)
        for named in self.adapters:
            add_adapters(model, named.lora)
        of_adapters = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        parallelize(model.requires_grad_(False).eval(), world, dtype=dtype)
        self.weights.load(model)
        for named in self.adapters:  # adapter files have the trained parameters
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(name in of_adapters)
            named.load(model)
            model.requires_grad_(False)
        check_forward(model)
        return model

    def on_disk(self, **combination: Any) -> Any:
        """Load only the trained parameters; the rest stays on disk, in `base`.

        Several adapters are combined into one; see `load_combined` for `combination`. Raises TuneError if an adapter
        has non-finite values.
        """
        model = self.model
        self._tell_cost()
        if not self.adapters:
            if self.base is None:
                allocate(model, torch.device("cpu"), torch.device("cpu"))
                self.weights.load(model)
            return model.requires_grad_(False)
        first, *more = self.adapters
        add_adapters(model, first.lora)
        give_memory(model)
        if more:
            load_combined(model, [named.folder for named in self.adapters if named.folder], **combination)
        else:
            first.load(model)
        for name, parameter in model.named_parameters():
            if not parameter.is_meta and not parameter.isfinite().all():
                where = first.folder or self.title
                raise TuneError(f"{where} has non-finite values in {name}: its training failed")
        return model

    def export(self, out: Path, what: str, compressor: Compressor | None = None, packed: bool = False) -> None:
        """Write the model from `on_disk` to `out` in Hugging Face layout, adapters merged, one tensor at a time.

        `what` is the description on its card. With `packed`, quantized weights that no adapter changes stay quantized
        (`tune.checkpointers.export`).
        """
        source, tokenizer = self.folders.base, self.exported_tokenizer()
        if tokenizer and getattr(self.model.config, "scores", False) and self.model.config.pad_id is None:
            set_pad(self.model, tokenizer.pad_id)
        export(
            self.model, tokenizer, out, init("cpu"), source=source, card=card(source, what),
            base=self.base, compressor=compressor, packed=packed,
        )  # fmt: skip

    def compressor(self, kind: str, dynamic: bool = False) -> Compressor:
        """The compressor that quantizes the linear layers in the model's blocks during export.

        Raises TuneError if the model has experts or no linear layers, or if a width does not fit the `kind`.
        """
        base = self.folders.base
        names = Names.of(self.model).in_checkpoint(plain_tensors(base) if has_weights(base) else {})
        layers = quantized_linears(self.model)
        columns = {str(names[f"{name}.weight"]): layer.in_features for name, layer in layers.items()}
        return Compressor(kind, columns, dynamic)

    def exported_tokenizer(self) -> Tokenizer | None:
        """The tokenizer to write with the merged model: the run's, or the first adapter's, if it has one."""
        if self.tokenizer_settings:
            return self.tokenizer()
        folder = next((named.folder for named in self.adapters), None)
        if folder is None or not (folder / "tokenizer.json").exists():  # tune and TRL save it
            return None
        tokenizer, base = Tokenizer(str(folder)), self.folders.base
        if (base / "tokenizer.json").exists():
            _require_same_ids(base, tokenizer)
        return tokenizer

    def _tell_cost(self) -> None:
        """Print once what it costs that transformers computes the model."""
        if isinstance(self.model, HuggingFaceModel) and not rehearsal.current():
            _say_once(f"note: {self.folders.base}: {self.model.cost}")

    def _share(self, peers: DeviceMesh) -> None:
        if isinstance(self.model, HuggingFaceModel):
            raise TuneError(f"tp: {self.folders.base} is loaded through transformers, whose cache cannot be shared")
        blocks = repeated_blocks(self.model)
        share(self.model, blocks, units_of(self.model, blocks), peers)

    @torch.no_grad()
    def _add_up(self) -> None:
        """Merge several adapters into the weights; each change is computed from the base's weights."""
        changes: dict[str, Tensor] = {}
        for named in self.adapters:
            add_adapters(self.model, named.lora)
            named.load(self.model)
            take_off(self.model, changes)
        for name, change in changes.items():
            weight = self.model.get_submodule(name).weight
            weight.copy_(weight.float() + change)

    def _require_one_adapter(self, what: str) -> None:
        if len(self.adapters) > 1:
            raise TuneError(f"{what} support only one adapter. Merge the others into the base first (`tune merge`)")

    def _usual_dtype(self, device: torch.device) -> torch.dtype:
        """fp32 on a CPU, elsewhere the dtype of the largest tensor in the file."""
        if device.type == "cpu":
            return torch.float32
        types, sizes = exported_types(self.model, str(self.folders.base)), dict(self.model.named_parameters())
        return types[max(types.keys() & sizes.keys(), key=lambda name: sizes[name].numel())]


def open_model(
    path: str | Path,
    adapters: Sequence[str | Path] = (),
    *,
    step: int | None = None,
    head: Literal["tokens", "score"] | None = "tokens",
    setting: str = "",
) -> OpenedModel:
    """Open a model folder, an adapter, a run (see `resolve_model`), or a checkpoint of a run. No weights are read.

    A checkpoint is given by `step`, or by `path` itself (`RUN/checkpoints/step-N`).

    A family that is not native is computed by transformers (`tune.models.build`), which is printed to standard error
    when the model is loaded. `head` is the required head: of a language model, of a reward model, or None for any.

    Raises:
        TuneError: the folder is none of these, its files do not match, or the model has another head. The message
            begins with `setting`, if given.
    """
    run, step = step_of(path, step)
    if step is None:
        return _exported(path, adapters, head, setting)
    if adapters:
        raise TuneError(f"{run}: a checkpoint cannot be combined with other adapters. First export step {step}")
    with explained(setting) if setting else nullcontext():
        return _at_step(run, step, head, setting or "model.path")


def _exported(
    path: str | Path, adapters: Sequence[str | Path], head: Literal["tokens", "score"] | None, setting: str
) -> OpenedModel:
    folders = resolve_model(path, adapters, setting)
    loras = [read_adapter(str(each)) for each in folders.adapters]
    require_combinable(loras)
    has_scores = any("score" in lora.modules_to_save for lora in loras)
    if head == "tokens" and has_scores:
        raise _writes_none(setting, path)
    scores = has_scores or ConfigFile(folders.base, setting or "model.path").scores
    kind: Literal["tokens", "score"] = head or ("score" if scores else "tokens")
    adapted = [name for folder in folders.adapters for name in trained_modules(folder)]
    model, weights = open_checkpoint(folders.base, kind, setting or "model.path", adapted)
    if head == "score" and not has_scores:
        weights.require_complete()
    named = [
        NamedAdapter(lora, functools.partial(load_adapter, path=str(folder)), functools.partial(digest, lora), folder)
        for lora, folder in zip(loras, folders.adapters, strict=True)
    ]
    return OpenedModel(folders, model, weights, named, folders.title, setting or "model.path")


def _at_step(run: Path, step: int, head: Literal["tokens", "score"] | None, setting: str) -> OpenedModel:
    """Open a checkpoint of a run, with the settings of the run."""
    checkpoint, file = checkpoint_of(run, step)
    settings = read_settings(file)
    if _component(settings, "model", file)[1].get("trust_remote_code"):
        raise TuneError(
            f"{file}: model.trust_remote_code would run code of the checkpoint. Export the result, without --step"
        )
    with torch.device("meta"):
        model = _made(settings, "model", file)
    if head == "tokens" and getattr(model.config, "scores", False):
        raise _writes_none("", run)
    base = Path(settings["model"]["path"])
    state = TrainedWeights(checkpoint, "policy" if settings.get("value") else "")  # PPO has a value model too
    title = f"`{base.name}` after step {step} of the run `{run.name}`"
    _, tokenizer = _component(settings, "tokenizer", file)
    template = str(tokenizer.get("chat_template") or "")
    # An export contains the template, so it could publish any file of this machine.
    if local_path(template).is_file() and not template.endswith(".jinja"):
        raise TuneError(
            f"{file}: tokenizer.chat_template is {template}; --step only reads templates from .jinja files. Rename the "
            "file, or export the result of the run, without --step"
        )
    folders = Resolved(base, (), Path(tokenizer["path"]))
    if not settings.get("adapter"):
        return OpenedModel(folders, model, state, [], title, setting, tokenizer)
    lora = _made(settings, "adapter", file)
    if lora.init != "default":
        raise TuneError(
            f"{file}: adapter.init={lora.init} depends on values that a checkpoint does not contain. Export the result "
            "of the run, without --step"
        )
    weights = Pretrained(str(base), model)

    def load(model: nn.Module) -> None:
        state.load_trained(model)  # checks the files of the state
        if not rehearsal.current():
            warn_of_another_base(checkpoint, state.digest_of_base(), base)
            warn_of_changed_base(checkpoint, state.changed_frozen(), base)

    adapters = [NamedAdapter(lora, load, state.digest)]
    return OpenedModel(folders, model, weights, adapters, title, setting, tokenizer)


def _made(settings: dict[str, Any], key: str, file: Path) -> Any:
    make, arguments = _component(settings, key, file)
    with explained(f"{file}: {key}"), explained("invalid arguments", TypeError):
        return make(**arguments)


def _component(settings: dict[str, Any], key: str, file: Path) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The component that a run's settings name, and its arguments. Raises TuneError if it is not in `COMPONENTS`."""
    values = dict(settings.get(key) or {})
    name, known = values.pop("_component_", None), COMPONENTS[key]
    if name not in known:
        raise TuneError(
            f"{file}: {key}._component_ is {name}; --step only allows {' or '.join(known)}, since other components "
            "could run any code. Export the result of the run, without --step"
        )
    return known[name], values


@functools.cache
def _say_once(text: str) -> None:
    """Print to standard error, once per process and only on rank 0."""
    rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", 0))
    if rank == 0:
        print(visible(text), file=sys.stderr, flush=True)


def _writes_none(setting: str, path: str | Path) -> TuneError:
    where = f"{setting}: {path}" if setting else path
    return TuneError(f"{where} is a reward model: it scores texts and cannot generate them")


def _require_same_ids(base: Path, tokenizer: Tokenizer) -> None:
    theirs, ours = tokenizer.vocabulary, Tokenizer(str(base)).vocabulary
    if changed := sorted(token for token, index in theirs.items() if ours.get(token) != index):
        listing = ", ".join(f"{token!r} ({theirs[token]}, in the base {ours.get(token)})" for token in changed[:3])
        raise TuneError(
            f"the adapter was trained with another vocabulary than that of {base}: {listing}. Give its base"
        )
