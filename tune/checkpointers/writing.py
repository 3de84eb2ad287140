"""Write models in Hugging Face layout, also existing ones with added tokens."""

import itertools
import json
import re
import shutil
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from tune import rehearsal
from tune.checkpointers.disk import SAFETENSORS_DTYPES, DiskTensor, has_weights
from tune.checkpointers.packed import (
    PackedTensor,
    packed_config,
    plain_config,
    plain_tensors,
    quantization,
    stays_packed,
    stored_as_packed,
)
from tune.checkpointers.weights import Pretrained, changed_tensors, hf_tensors, open_checkpoint
from tune.distributed import Dtype, StoredDtype, World, as_dtype, current_world
from tune.errors import TuneError
from tune.files import CHECKPOINT, exported, require_inside, require_replaceable
from tune.lookup import absent, in_shell
from tune.models import ConfigFile, Names, as_reward_model, disk_names, read_json, require_no_peft
from tune.quantization import Compressor
from tune.secrets import without_secrets
from tune.tokenizers import Tokenizer

T = TypeVar("T")
SHARD_BYTES = 5 * 10**9
KINDS = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}
HEADER_BYTES, ENTRY_BYTES = 2**18, 200  # room for about 1,000 tensors; bytes of an entry
CONFIGS = ("config.json", "generation_config.json", "preprocessor_config.json", "processor_config.json")
OF_QUANTIZATION = ("hf_quant_config.json", "quant_config.json", "quantize_config.json")  # also read by vLLM
HUB_ID = Path(".cache", "huggingface", "hub_id")  # in a folder that was downloaded


def export(
    model: Any,
    tokenizer: Tokenizer | None,
    folder: str | Path,
    world: World | None = None,
    *,
    source: str | Path,
    dtype: Dtype | None = None,
    card: str = "",
    base: Pretrained | None = None,
    compressor: Compressor | None = None,
    packed: bool = False,
) -> None:
    """Write `model` to `folder` with the names, dtypes and config of the checkpoint `source`.

    Adapters are merged, into the original weights if `base` is given. Tensors that only the source has are copied, and
    so are its tokenizer files if there is no `tokenizer`. Each tensor has `dtype`, or its dtype in the source (the
    dtype in config.json if the source has no weights). A model with scores is written as transformers'
    `...ForSequenceClassification`. A `compressor` quantizes weights. The folder appears when it is complete.

    All processes must call this: tensors are gathered one by one, and rank 0 holds at most one tensor.

    Quantized weights of `source` are written plain. With `packed` and `base`, frozen weights stay quantized unless
    their part of a block also has changed weights, or blocks that transformers cannot read (`stays_packed`). If none
    stays quantized, the whole checkpoint is plain.

    Raises:
        TuneError: the folder is `source` itself or holds files that an export did not write; `source` has another size
            than `model`, lacks tensors of it, or is not quantized although `packed`; the model has adapters of the
            library peft; a weight is not finite. Existing files in the folder stay.
    """
    require_no_peft(model)
    world = current_world(world)
    origin, folder = Path(source), Path(folder)
    scores = getattr(getattr(model, "config", None), "scores", False)
    if isinstance(tokenizer, str | Path):
        raise TuneError(f"tokenizer: {tokenizer} is not a Tokenizer. Open it: Tokenizer({str(tokenizer)!r})")
    if not origin.is_dir():
        raise TuneError(f"source: {origin} {absent(origin)}. Name the checkpoint folder that the model was loaded from")
    fields, there, type_of = _described(origin, dtype)
    kept, plain = set[str](), set[str]()
    if packed:
        if not quantization(origin):
            raise TuneError(f"{origin} is not quantized, so no weight can stay quantized: leave out that option")
        on_disk = Names.of(model).in_checkpoint(there)
        changed = set().union(*world.from_all_ranks(changed_tensors(model) if base else on_disk.keys()))
        kept, plain = stays_packed(origin, there, {each for name in changed for each in disk_names(on_disk[name])})
        if kept:
            fields = packed_config(read_json(origin / "config.json"), plain)
    gathered = hf_tensors(model, there, base, without=kept)
    if folder.resolve() == origin.resolve():
        raise TuneError(f"{folder} is the source model and would be overwritten. Choose another folder")
    world.of_main(lambda: require_replaceable(folder))
    _require_same_tensors(Names.of(model), there, origin)
    if rehearsed := rehearsal.current():
        rehearsed.exported.add(folder)
        return
    misfits: list[str] = []  # descriptions of tensors that have another shape in `source`
    broken: list[str] = []  # names of tensors that are not finite; all processes must see all tensors first
    damaged: list[str] = []  # files and names of tensors in `source` that are not finite
    plain_modules: list[str] = []  # modules on disk whose matrices the `compressor` leaves as they are

    def tensors() -> Iterator[tuple[str, Tensor]]:
        others = {name: tensor for name, tensor in there.items() if not Names.of(model).is_replaced(name)}
        for name, tensor in gathered:
            before = others.pop(name, None)
            if before is not None and before.shape != list(tensor.shape):
                misfits.append(f"{name} has shape {list(tensor.shape)} in the model, {before.shape} in the source")
            if tensor.is_floating_point():
                tensor = tensor.to(type_of(name))
                if not is_finite(tensor):
                    broken.append(name)
                    damaged.extend(_not_finite(before))
            if compressor and name in compressor.names:
                yield from compressor.tensors(name, tensor.to("cpu"))
            else:
                plain_modules.extend(_module_of_matrix(name, tensor.ndim))
                yield name, tensor.to("cpu")
            del tensor  # free it before the next one is gathered; all consumers do the same
        if kept:
            others = {name: others[name] for name in others.keys() - kept} | stored_as_packed(origin, there, plain)
        for name in sorted(others):
            plain_modules.extend(_module_of_matrix(name, len(others[name].shape)))
            yield name, others[name].read()

    if world.is_main:
        with exported(folder) as unfinished:
            write_tensors(unfinished, tensors(), None if compressor else len(there) or None)
            _require_undamaged(world, damaged, folder)
            require_finite_on_all(world, "model", broken, folder)
            _require_fitting(world, misfits, origin)
            if scores:
                fields = as_reward_model(fields, model.config.pad_id)
            excluded = _module_names(plain_modules, fields) if compressor else []
            fields = _without_missing_code(_with_types(fields, dtype, compressor, excluded), origin)
            if fields and fields != read_json(origin / "config.json"):
                (unfinished / "config.json").write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
            for file in [*map(origin.joinpath, CONFIGS), *origin.glob("*.py")]:
                if file.exists() and not (unfinished / file.name).exists():
                    shutil.copyfile(require_inside(file), unfinished / file.name)
            (unfinished / "README.md").write_text(card, encoding="utf-8")
            if tokenizer is None:
                copy_without_weights(origin, unfinished)
            else:
                tokenizer.save(unfinished)
    else:
        deque(gathered, maxlen=0)  # each tensor is gathered by all processes
        _require_undamaged(world, damaged, folder)
        require_finite_on_all(world, "model", broken, folder)
        _require_fitting(world, misfits, origin)
    world.barrier()


def _module_of_matrix(name: str, dimensions: int) -> list[str]:
    """Return the module on disk of the tensor `name` if it is a matrix: a linear layer or an embedding."""
    return [name.removesuffix(".weight")] if dimensions == 2 and name.endswith(".weight") else []


def _module_names(on_disk: Sequence[str], fields: dict[str, Any]) -> list[str]:
    """Return the names of modules with these names `on_disk`. Older checkpoints of models that also read images lack
    the prefix `model.` of transformers' modules; vLLM knows the modules by the names on disk."""
    others = [name for name in on_disk if not name.startswith("model.")] if "text_config" in fields else []
    return [*on_disk, *(f"model.{name}" for name in others)]


def _with_types(
    fields: dict[str, Any], dtype: Dtype | None, compressor: Compressor | None, excluded: Sequence[str]
) -> dict[str, Any]:
    """Return the `fields` of a config.json with the dtypes and quantization of the tensors. The modules `excluded` are
    not quantized."""
    fields = dict(fields)
    if dtype:
        key = "torch_dtype" if "torch_dtype" in fields else "dtype"
        fields[key] = str(as_dtype(dtype)).removeprefix("torch.")
    if compressor:
        declared = fields.get("dtype") or fields.get("torch_dtype") or "float32"
        fields["quantization_config"] = compressor.config(declared, excluded)
    return fields


def _without_missing_code(fields: dict[str, Any], source: Path) -> dict[str, Any]:
    """Return the `fields` of a config.json with only those classes in `auto_map` whose code is in `source`, or in a
    repository that the entry names. For the others, transformers would ask to run code, and then not find it."""

    def is_there(reference: str | None) -> bool:
        return reference is None or "--" in reference or (source / f"{reference.rpartition('.')[0]}.py").is_file()

    if not isinstance(references := fields.get("auto_map"), dict):
        return fields
    lists = {name: each if isinstance(each, list) else [each] for name, each in references.items()}
    kept = {name: each for name, each in references.items() if all(map(is_there, lists[name]))}
    others = {name: each for name, each in fields.items() if name != "auto_map"}
    return others | ({"auto_map": kept} if kept else {})


def is_finite(tensor: Tensor) -> bool:
    """Whether all values are finite, for any floating-point dtype."""
    if tensor.itemsize == 1:  # torch has no isfinite for float8
        tensor = tensor.to(torch.float32)
    return bool(tensor.isfinite().all())


def sound(tensors: Iterable[tuple[str, Tensor]], source: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the `tensors`, weights by name of the checkpoint `source`. Raises TuneError at the first one that has an
    integer dtype or is not finite."""
    for name, tensor in tensors:
        if not tensor.is_floating_point():
            kind = str(tensor.dtype).removeprefix("torch.")
            raise TuneError(f"{source}: {name} has dtype {kind}, but weights must be floating-point")
        if not is_finite(tensor):
            raise TuneError(
                f"{source}: {name} has values that are not finite: its training failed, or the file is damaged. "
                "Use another checkpoint, or download it again"
            )
        yield name, tensor
        del tensor


def require_finite_on_all(world: World, what: str, broken: list[str], folder: Path) -> None:
    """Raise TuneError on all processes if rank 0 found `broken` tensors, which are not finite, in `what` it writes."""
    if found := world.broadcast(broken):
        raise TuneError(
            f"the {what} was not written to {folder}: {found[0]} has values that are not finite ({len(found)} in "
            "total). Training failed, or the values overflow in the exported dtype. Lower the learning rate, or "
            "export an earlier checkpoint. Existing files in the folder are unchanged"
        )


def _not_finite(tensor: DiskTensor | None) -> list[str]:
    """Return the place of the first stored part of a tensor of the source that is not finite; nothing if all are."""
    parts = tensor.parts if isinstance(tensor, PackedTensor) else filter(None, [tensor])
    stored = ((part, part.read()) for part in parts if part.dtype.is_floating_point)
    return [f"{part.name} in {part.file}" for part, values in stored if not is_finite(values)][:1]


def _require_undamaged(world: World, damaged: list[str], folder: Path) -> None:
    """Raise TuneError on all processes if rank 0 found `damaged` tensors in the source."""
    if found := world.broadcast(damaged):
        raise TuneError(
            f"the model was not written to {folder}: {found[0]} has values that are not finite ({len(found)} in "
            "total), so the checkpoint itself is damaged. Download the file again. Existing files in the folder are "
            "unchanged"
        )


def _require_same_tensors(names: Names, there: dict[str, DiskTensor], source: Path) -> None:
    """Raise TuneError if the checkpoint `source` lacks a tensor of the model, or has another number of blocks or
    experts. The latter shows in tensors of one side whose names match a common tensor except for a number."""
    if not there:
        return
    on_disk = names.in_checkpoint(there)
    ours = {name for each in on_disk.values() for name in disk_names(each)}
    theirs = {name for name in there if name in ours or not names.is_ignored(name)}
    kinds = {re.sub(r"\d+", "#", name) for name in ours & theirs}
    for alone, owner in ((ours - theirs, "the model"), (theirs - ours, f"source={source}")):
        if more := sorted(name for name in alone if re.sub(r"\d+", "#", name) in kinds):
            raise TuneError(
                f"source={source} and the model have different sizes: only {owner} has {more[0]} ({len(more)} in "
                "total). Set source to the checkpoint that the model was loaded from"
            )
    new = {name for ours_name in names.replaced for name in disk_names(on_disk[ours_name])}
    if lacking := sorted(ours - theirs - new):
        raise TuneError(
            f"source={source} does not match the model: it lacks {lacking[0]} ({len(lacking)} in total). "
            "Set source to the checkpoint that the model was loaded from"
        )


def _require_fitting(world: World, misfits: list[str], source: Path) -> None:
    """Raise TuneError on all processes if rank 0 found `misfits`, tensors with another shape in the source."""
    if found := world.broadcast(misfits):
        raise TuneError(
            f"source={source} and the model have different sizes: {found[0]} ({len(found)} in total). Set source "
            "to the checkpoint that the model was loaded from"
        )


def exported_types(model: nn.Module, source: str, dtype: StoredDtype | None = None) -> dict[str, torch.dtype]:
    """Return the dtypes in which `export` writes the tensors of `model`, by the model's names; no stacked tensors."""
    _, there, type_of = _described(Path(source), dtype)
    on_disk = Names.of(model).in_checkpoint(there)
    return {name: type_of(each) for name, each in on_disk.items() if isinstance(each, str)}


def _described(
    source: Path, dtype: str | torch.dtype | None
) -> tuple[dict[str, Any], dict[str, DiskTensor], Callable[[str], torch.dtype]]:
    """Return the config of a checkpoint, its tensors, and a function from a name on disk to the exported dtype. For a
    quantized checkpoint, config and tensors are those of the plain one."""
    fields = read_json(source / "config.json") if (source / "config.json").exists() else {}
    fields = plain_config(fields) if quantization(source) else fields
    there = plain_tensors(source) if has_weights(source) else {}
    declared = getattr(torch, fields.get("dtype") or fields.get("torch_dtype") or "float32")

    def type_of(name: str) -> torch.dtype:
        if dtype:
            return as_dtype(dtype)
        return there[name].dtype if name in there else declared

    return fields, there, type_of


def with_progress(tensors: Iterable[T], total: int | None) -> Iterator[T]:
    """Yield `tensors`, with a progress bar on a terminal. `total` is their approximate number, if known."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, transient=True, disable=not sys.stdout.isatty()) as bar:
        task = bar.add_task("tensors", total=total)
        for each in tensors:
            yield each
            del each
            bar.advance(task)


def write_tensors(folder: Path, tensors: Iterable[tuple[str, Tensor]], total: int | None = None) -> None:
    """Write `tensors` (about `total`) to safetensors files of at most 5 GB and an index, with Hugging Face's file
    names. Holds one tensor at a time. Raises TuneError if they cannot be written."""
    files: list[TensorFile] = []
    try:
        for name, tensor in with_progress(tensors, total):
            if files and not files[-1].has_room(name, tensor):
                files[-1].close()
            if not files or files[-1].file.closed:
                files += [TensorFile(folder / f"model-{len(files) + 1:05d}.safetensors")]
            files[-1].add(name, tensor)
            del tensor
        files[-1].close()
    except OSError as error:
        raise _not_written("model", folder.parent, error) from error
    if len(files) == 1:
        files[0].path.rename(folder / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for number, each in enumerate(files, 1):
        renamed = each.path.rename(folder / f"model-{number:05d}-of-{len(files):05d}.safetensors")
        weight_map |= dict.fromkeys(each.places, renamed.name)
    size = sum(file.size for file in files)
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


class TensorFile:
    """A safetensors file to which tensors are written one by one. Space is reserved for the header, which comes first;
    blanks fill the rest, as the format allows."""

    def __init__(self, path: Path):
        self.path, self.places, self.odd = path, dict[str, dict[str, Any]](), list[tuple[str, Tensor]]()
        self.size, self.room = 0, HEADER_BYTES
        self.file = path.open("wb")
        self.file.seek(8 + HEADER_BYTES)

    def has_room(self, name: str, tensor: Tensor) -> bool:
        """Whether the tensor fits; an empty file accepts any tensor."""
        fits = self.size + tensor.nbytes <= SHARD_BYTES and len(json.dumps(name)) + ENTRY_BYTES <= self.room
        return fits or self.room == HEADER_BYTES

    def add(self, name: str, tensor: Tensor) -> None:
        """Write a tensor; one that would misalign the next tensor is written last."""
        self.room -= len(json.dumps(name)) + ENTRY_BYTES
        if tensor.nbytes % 8:
            self.odd.append((name, tensor.clone()))
        else:
            self._write(name, tensor)

    def _write(self, name: str, tensor: Tensor) -> None:
        place = {"dtype": KINDS[tensor.dtype], "shape": list(tensor.shape)}
        self.places[name] = place | {"data_offsets": [self.size, self.size + tensor.nbytes]}
        tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tofile(self.file)
        self.size += tensor.nbytes

    def close(self) -> None:
        for name, tensor in sorted(self.odd, key=lambda each: -each[1].itemsize):
            self._write(name, tensor)
        header = json.dumps({"__metadata__": {"format": "pt"}} | self.places).encode()
        self.file.seek(0)
        self.file.write(HEADER_BYTES.to_bytes(8, "little") + header.ljust(HEADER_BYTES))
        self.file.close()


def add_tokens(base: str | Path, out: str | Path, tokens: Sequence[str]) -> list[int]:
    """Copy the checkpoint `base` to `out`, with `tokens` added to its tokenizer and their rows to embedding and head.

    A new row is the mean of the rows of all existing tokens. Unused rows beyond the tokenizer's tokens are used first.
    `out` appears when it is complete. Returns the ids of the tokens.

    Raises:
        TuneError: a token already exists, the model's family is not supported, or weights have an integer dtype or are
            not finite.
    """
    source = Path(base)
    if Path(out).resolve() == source.resolve():
        raise TuneError(f"{out} is the source model and would be overwritten. Choose another folder")
    tokenizer = Tokenizer(str(source))
    known = tokenizer.vocab_size
    ids = tokenizer.add_tokens(tokens)
    if there := [token for token, index in zip(tokens, ids, strict=True) if index < known]:
        raise TuneError(f"{source} already has {', '.join(map(repr, there))} in its vocabulary; leave it out")
    model, weights = open_checkpoint(source, "score" if ConfigFile(source).scores else "tokens")
    names = model.names
    tensors, rows = weights.tensors, max(model.config.vocab_size, tokenizer.vocab_size)
    layers = [model.embedding, None if names.replaced else model.head]  # a score head has no rows for tokens
    names_of = {module: name for name, module in model.named_modules()}
    ours = {
        f"{names_of[layer]}.{kind}" for layer in layers if layer is not None for kind, _ in layer.named_parameters()
    }
    resized = {on_disk for name, on_disk in names.in_checkpoint(tensors).items() if name in ours}
    resized |= {copy for copy, name in names.copies.items() if name in ours}

    with exported(Path(out)) as unfinished:
        copy_without_weights(source, unfinished)
        used = {name: tensor for name, tensor in tensors.items() if not names.is_ignored(name)}
        unused = {name: tensor for name, tensor in tensors.items() if names.is_ignored(name)}
        read = itertools.chain(
            sound(((name, tensor.read()) for name, tensor in used.items()), source),
            ((name, tensor.read()) for name, tensor in unused.items()),
        )
        resize = ((name, _with_rows(weight, rows, known, ids) if name in resized else weight) for name, weight in read)
        write_tensors(unfinished, resize, len(tensors))
        config = read_json(source / "config.json")
        config = plain_config(config) if quantization(source) else config
        for section in (config, config.get("text_config", {})):  # text_config: of models that also take images
            if "vocab_size" in section:
                section["vocab_size"] = rows
        config = _without_missing_code(config, source)
        (unfinished / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        tokenizer.save(unfinished)
    return ids


def _with_rows(weight: Tensor, rows: int, known: int, ids: list[int]) -> Tensor:
    larger = torch.cat([weight, weight.new_zeros(rows - len(weight), *weight.shape[1:])])
    larger[ids] = weight[:known].float().mean(dim=0).to(weight.dtype)
    return larger


def save_tensors(tensors: dict[str, Tensor], file: Path, what: str, **metadata: str) -> None:
    """Write a safetensors file to the unfinished folder of a model or an adapter, with `metadata` in its
    header. Raises TuneError if that fails."""
    try:
        save_file(tensors, file, metadata={"format": "pt"} | metadata)
    except SafetensorError as error:
        raise _not_written(what, file.parents[1], error) from error
    _sort_metadata(file)


def _sort_metadata(file: Path) -> None:
    """Sort the metadata in a file's header, in place: safetensors writes them in the order of a hash table, which
    differs each time, and equal exports are equal files."""
    with file.open("r+b") as opened:
        size = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        opened.seek(8)
        opened.write(json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode().ljust(size))


def _not_written(what: str, run: Path, error: Exception) -> TuneError:
    is_kept = any((run / "checkpoints").glob(CHECKPOINT))
    again = f"with output_dir={in_shell(run)} to continue after the last checkpoint" if is_kept else "again"
    return TuneError(f"the {what} could not be written to {run}: {error}. Free space and run the same command {again}")


def copy_without_weights(source: Path, folder: Path) -> None:
    """Copy all files of a checkpoint except weights; existing files in `folder` are kept."""
    for file in source.iterdir():
        weights = file.suffix in (".safetensors", ".bin", ".gguf", ".pt", ".pth") or file.name.endswith(".index.json")
        weights = weights or file.name in OF_QUANTIZATION
        if file.is_file() and not weights and not (folder / file.name).exists():
            shutil.copyfile(require_inside(file), folder / file.name)
        elif file.name == "additional_chat_templates":  # other folders hold other formats or runs
            shutil.copytree(require_inside(file), folder / file.name, symlinks=True)


def name_of(folder: Path) -> str:
    """Return the Hugging Face hub name of a `folder` that `tune download` or huggingface_hub's cache wrote; for other
    folders, the folder's name."""
    if (folder / HUB_ID).is_file():
        return (folder / HUB_ID).read_text(encoding="utf-8").strip()
    repository = re.fullmatch("models--(.*)", folder.resolve().parent.parent.name)  # models--org--name/snapshots/sha
    return repository[1].replace("--", "/") if repository else folder.name


def card(base: Path, what: str) -> str:
    """Return README.md for a model derived from `base`, described by `what`."""
    return f"---\nbase_model: {name_of(base)}\ntags: [tune]\n---\n\n{what}\n"


def model_card(recipe: str, model_path: str, dataset_path: str) -> str:
    """Return the `card` of a recipe's model, with the hub names of its base and data if known."""
    dataset = without_secrets(dataset_path)
    if Path(dataset).exists() or not re.fullmatch(r"[\w.-]+/[\w.-]+", dataset):  # else it is a hub name
        dataset = Path(dataset.partition("?")[0]).name
    what = f"Fine-tuned from `{name_of(Path(model_path))}` on `{dataset}` with the recipe `{recipe}` of tune."
    where = "All settings are in config.yaml, all metrics in metrics.jsonl of the run folder."
    return card(Path(model_path), f"{what}\n{where}")
