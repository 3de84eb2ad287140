"""One way to open a model that a path names: its shape without memory, what is put on it, then its weights."""

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
from omegaconf import OmegaConf
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
from tune.models import ConfigFile, HuggingFaceModel, Names, build, hf, set_pad
from tune.peft.adding import add_adapters
from tune.peft.files import adapter, digest, load_adapter, read_adapter
from tune.peft.lora import LoRA
from tune.peft.merging import give_memory, load_combined, take_off
from tune.peft.named import Resolved, checkpoint_of, resolve_model, step_of
from tune.quantization import Compressor, quantised_linears, quantize_linears
from tune.tokenizers import Tokenizer

# What the settings of a run may name. They can come from another person, and a component can be any function.
COMPONENTS: dict[str, dict[str, Callable[..., Any]]] = {
    "model": {"tune.models.build": build, "tune.models.hf": hf},
    "adapter": {"tune.peft.adapter": adapter, "tune.peft.LoRA": LoRA},
    "tokenizer": {"tune.tokenizers.Tokenizer": Tokenizer},
}


@dataclass(frozen=True)
class NamedAdapter:
    """An adapter, and what loads its parameters into a model that has its layers."""

    lora: LoRA
    load: Callable[[nn.Module], None]
    digest: Callable[[], Any]
    folder: Path | None = None  # None: it is in a training state


@dataclass
class OpenedModel:
    """A model that a path names. `model` is on the meta device; one of `load`, `shard` and `on_disk` gives it weights.

    `weights` are those of its base, or of a run that trained all parameters; `folders` where the parts are. `title`
    says in words what the merged model is.
    """

    folders: Resolved
    model: Any
    weights: Pretrained | TrainedWeights
    adapters: Sequence[NamedAdapter]
    title: str
    setting: str = "model.path"
    tokenizer_settings: dict[str, Any] | None = None  # of a training state: those of its run

    @property
    def base(self) -> Pretrained | None:
        """The weights on disk that frozen tensors are read from."""
        return self.weights if isinstance(self.weights, Pretrained) else None

    def tokenizer(self, chat_template: str | None = None, **settings: Any) -> Tokenizer:
        """The tokenizer that the model was trained with, with another `chat_template` if one is given; `settings` are
        further arguments of `Tokenizer`."""
        settings = (self.tokenizer_settings or {"path": str(self.folders.tokenizer)}) | settings
        return Tokenizer(**(settings | ({"chat_template": chat_template} if chat_template else {})))

    def require_same_vocabulary(self, tokenizer: Tokenizer) -> None:
        """Raises TuneError if the model's tokenizer has other ids, or the model lacks rows for some of them."""
        require_same_vocabulary(self.setting, str(self.folders.tokenizer), self.model, tokenizer)

    def digest(self) -> dict[str, Any]:
        """What the model is, as `Pretrained.digest` says it, with its adapters."""
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
        """The model for use on one device, in evaluation. The processes of `peers` (`world.mesh["tp"]`) share its
        layers, if they are several: each has a part on its device.

        Without a `dtype` it is fp32 on a CPU, elsewhere that of the file. What several adapters change of the base adds
        up, as in PEFT: it is merged into the weights.

        Raises:
            TuneError: the model cannot be shared by so many, or several adapters are to be merged into quantised or
                shared weights.
        """
        model, device = self.model, torch.device(device)
        is_shared = peers is not None and peers.size() > 1
        if quantization or is_shared:
            self._require_one_adapter("quantised weights" if quantization else "weights that several processes share")
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
        """The model next to the one that is trained: sharded as that is, frozen and without dropout, such as a
        reference, a teacher or a reward model. Raises TuneError if it has several adapters, or the layout does not fit.
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
        for named in self.adapters:  # their files have what is trained
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(name in of_adapters)
            named.load(model)
            model.requires_grad_(False)
        check_forward(model)
        return model

    def on_disk(self, **combination: Any) -> Any:
        """The model with memory for what was trained alone; the rest stays on disk, in `base`. Several adapters become
        one, see `load_combined` for the `combination`. Raises TuneError if an adapter has values that are not finite.
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
                raise TuneError(f"{where} has values that are not finite in {name}: its training failed")
        return model

    def export(self, out: Path, what: str, compressor: Compressor | None = None, packed: bool = False) -> None:
        """Write the model that `on_disk` has opened to `out` in Hugging Face layout, adapters merged, one tensor at a
        time, with a card that says `what` it is. With `packed`, weights that are quantized stay so where no adapter
        changes them (`tune.checkpointers.export`)."""
        source, tokenizer = self.folders.base, self.exported_tokenizer()
        if tokenizer and getattr(self.model.config, "scores", False) and self.model.config.pad_id is None:
            set_pad(self.model, tokenizer.pad_id)
        export(
            self.model, tokenizer, out, init("cpu"), source=source, card=card(source, what),
            base=self.base, compressor=compressor, packed=packed,
        )  # fmt: skip

    def compressor(self, kind: str, dynamic: bool = False) -> Compressor:
        """What quantizes the linear layers in the model's blocks when it is exported. Raises TuneError if there are
        experts or no linear layers, or their widths do not fit the `kind`."""
        base = self.folders.base
        names = Names.of(self.model).in_checkpoint(plain_tensors(base) if has_weights(base) else {})
        layers = quantised_linears(self.model)
        columns = {str(names[f"{name}.weight"]): layer.in_features for name, layer in layers.items()}
        return Compressor(kind, columns, dynamic)

    def exported_tokenizer(self) -> Tokenizer | None:
        """The tokenizer to write with the merged model: of the run or of the first adapter, if that has one."""
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
        """Say once what it costs that transformers computes the model."""
        if isinstance(self.model, HuggingFaceModel) and not rehearsal.current():
            _say_once(f"note: {self.folders.base}: {self.model.cost}")

    def _share(self, peers: DeviceMesh) -> None:
        if isinstance(self.model, HuggingFaceModel):
            raise TuneError(
                f"tp: {self.folders.base} is of a family that only transformers has, whose cache is not shared"
            )
        blocks = repeated_blocks(self.model)
        share(self.model, blocks, units_of(self.model, blocks), peers)

    @torch.no_grad()
    def _add_up(self) -> None:
        """Merge what several adapters make of the weights into these; each is made of the base's weights."""
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
            raise TuneError(f"{what} take one adapter: merge the others into the base first (`tune merge`)")

    def _usual_dtype(self, device: torch.device) -> torch.dtype:
        """fp32 on a CPU, elsewhere the type of the largest tensor in the file."""
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
    """The model that `path` names, see `resolve_model`: a model folder, an adapter, a run, or a run's checkpoint, that
    after `step` or `path` itself (`RUN/checkpoints/step-N`). No weights are read.

    A family that is not native is computed by transformers (`tune.models.build`), and standard error says so when the
    model is loaded. `head` is the one that is asked for: a language model's, a reward model's, or None: as it is.

    Raises:
        TuneError: which blames `setting`, if given: a folder is none of these, or its files do not fit each other; the
            model has another head.
    """
    run, step = step_of(path, step)
    if step is None:
        return _exported(path, adapters, head, setting)
    if adapters:
        raise TuneError(f"{run}: a checkpoint takes no other adapter. Export the one after step {step} first")
    with explained(setting) if setting else nullcontext():
        return _at_step(run, step, head, setting or "model.path")


def _exported(
    path: str | Path, adapters: Sequence[str | Path], head: Literal["tokens", "score"] | None, setting: str
) -> OpenedModel:
    folders = resolve_model(path, adapters, setting)
    loras = [read_adapter(str(each)) for each in folders.adapters]
    has_scores = any("score" in lora.modules_to_save for lora in loras)
    if head == "tokens" and has_scores:
        raise _writes_none(setting, path)
    scores = has_scores or ConfigFile(folders.base, setting or "model.path").scores
    model, weights = open_checkpoint(folders.base, head or ("score" if scores else "tokens"), setting or "model.path")
    if head == "score" and not has_scores:
        weights.require_complete()
    named = [
        NamedAdapter(lora, functools.partial(load_adapter, path=str(folder)), functools.partial(digest, lora), folder)
        for lora, folder in zip(loras, folders.adapters, strict=True)
    ]
    return OpenedModel(folders, model, weights, named, folders.title, setting or "model.path")


def _at_step(run: Path, step: int, head: Literal["tokens", "score"] | None, setting: str) -> OpenedModel:
    """The model of a run at a checkpoint, by the settings of the run."""
    checkpoint, file = checkpoint_of(run, step)
    settings: Any = OmegaConf.to_container(OmegaConf.load(file), resolve=True)
    if _component(settings, "model", file)[1].get("trust_remote_code"):
        raise TuneError(f"{file}: model.trust_remote_code would run code. Export the result, without --step")
    with torch.device("meta"):
        model = _made(settings, "model", file)
    if head == "tokens" and getattr(model.config, "scores", False):
        raise _writes_none("", run)
    base = Path(settings["model"]["path"])
    state = TrainedWeights(checkpoint, "policy" if settings.get("value") else "")  # PPO has a value model too
    title = f"`{base.name}` after step {step} of the run `{run.name}`"
    _, tokenizer = _component(settings, "tokenizer", file)
    folders = Resolved(base, (), Path(tokenizer["path"]))
    if not settings.get("adapter"):
        return OpenedModel(folders, model, state, [], title, setting, tokenizer)
    lora = _made(settings, "adapter", file)
    if lora.init != "default":
        raise TuneError(
            f"{file}: adapter.init={lora.init} is relative to values that a checkpoint does not hold. Export the "
            "result of the run, without --step"
        )
    weights = Pretrained(str(base), model)
    adapters = [NamedAdapter(lora, state.load_trained, state.digest)]
    return OpenedModel(folders, model, weights, adapters, title, setting, tokenizer)


def _made(settings: dict[str, Any], key: str, file: Path) -> Any:
    make, arguments = _component(settings, key, file)
    with explained(f"{file}: {key}"), explained("its arguments do not fit", TypeError):
        return make(**arguments)


def _component(settings: dict[str, Any], key: str, file: Path) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The component that a run's settings name, and its arguments. Raises TuneError if it is none of `COMPONENTS`."""
    values = dict(settings.get(key) or {})
    name, known = values.pop("_component_", None), COMPONENTS[key]
    if name not in known:
        raise TuneError(
            f"{file}: {key}._component_ is {name}; --step takes {' or '.join(known)}, as others could be any code. "
            "Export the result of the run, without --step"
        )
    return known[name], values


@functools.cache
def _say_once(text: str) -> None:
    """On standard error, by one of all processes."""
    rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", 0))
    if rank == 0:
        print(text, file=sys.stderr, flush=True)


def _writes_none(setting: str, path: str | Path) -> TuneError:
    where = f"{setting}: {path}" if setting else path
    return TuneError(f"{where} is a reward model: it scores texts and writes none")


def _require_same_ids(base: Path, tokenizer: Tokenizer) -> None:
    theirs, ours = tokenizer.vocabulary, Tokenizer(str(base)).vocabulary
    if changed := sorted(token for token, index in theirs.items() if ours.get(token) != index):
        listing = ", ".join(f"{token!r} ({theirs[token]}, in the base {ours.get(token)})" for token in changed[:3])
        raise TuneError(f"the adapter was trained with another vocabulary than {base} has: {listing}; give its base")
