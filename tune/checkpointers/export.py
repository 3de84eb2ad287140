"""What the user came for: the trained model in Hugging Face layout."""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from tune.checkpointers.disk import disk_tensors, has_weights
from tune.checkpointers.hf_tensors import hf_tensors
from tune.checkpointers.weights import Pretrained
from tune.distributed import World
from tune.errors import TuneError
from tune.secrets import without_secrets

SHARD_BYTES = 5 * 10**9
CONFIGS = ("config.json", "generation_config.json", "preprocessor_config.json", "processor_config.json")
HUB_ID = Path(".cache", "huggingface", "hub_id")  # in a folder that was downloaded
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class SavesItself(Protocol):
    def save(self, folder: Path) -> None: ...


def export(
    model: nn.Module,
    tokenizer: SavesItself,
    folder: str | Path,
    world: World,
    *,
    source: str,
    dtype: Literal["bf16", "fp32"] | None = None,
    card: str = "",
    base: Pretrained | None = None,
) -> None:
    """Write to `folder` what the checkpoint `source` is with the tensors of `model`: the same names, types and config.

    Adapters are merged, into the original weights if their `base` is given. What `model` does without is copied.
    `dtype` is for all its tensors; without it each keeps the type it has in the source (or, where that has no weights,
    the one its config declares). All processes take part: tensors are gathered one by one, and rank 0 never holds more
    than a file of 5 GB and one tensor. The folder appears when it is complete.
    """
    origin, folder = Path(source), Path(folder)
    fields: dict[str, Any] = json.loads(file.read_text()) if (file := origin / "config.json").exists() else {}
    there = disk_tensors(origin) if has_weights(origin) else {}
    declared = getattr(torch, fields.get("dtype") or fields.get("torch_dtype") or "float32")
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    if world.is_main:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
    files = TensorFiles(unfinished)

    def write(name: str, tensor: Tensor) -> None:
        if tensor.is_floating_point():
            target = DTYPES[dtype] if dtype else there[name].dtype if name in there else declared
            tensor = tensor.to(target)
        files.add(name, tensor.to("cpu"))

    for name, tensor in hf_tensors(model, there, base):
        if world.is_main:
            write(name, tensor)
    if world.is_main:
        for name in sorted(there.keys() - files.written):
            files.add(name, there[name].read())
        files.close()
        if dtype and fields:
            fields["torch_dtype" if "torch_dtype" in fields else "dtype"] = str(DTYPES[dtype]).removeprefix("torch.")
            (unfinished / "config.json").write_text(json.dumps(fields, indent=2) + "\n")
        for file in [*map(origin.joinpath, CONFIGS), *origin.glob("*.py")]:
            if file.exists() and not (unfinished / file.name).exists():
                shutil.copyfile(file, unfinished / file.name)
        (unfinished / "README.md").write_text(card)
        tokenizer.save(unfinished)
        shutil.rmtree(folder, ignore_errors=True)
        unfinished.rename(folder)
    world.barrier()


class TensorFiles:
    """Writes tensors, in the order they are added, to safetensors files of at most 5 GB as Hugging Face names them."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.held: dict[str, Tensor] = {}
        self.files: list[list[str]] = []
        self.bytes, self.held_bytes = 0, 0
        self.written: set[str] = set()

    def add(self, name: str, tensor: Tensor) -> None:
        if self.held and self.held_bytes + tensor.nbytes > SHARD_BYTES:
            self._flush()
        # Cloned where it is a part of something larger: that must not stay, and safetensors refuses shared memory.
        whole = tensor.untyped_storage().nbytes() == tensor.nbytes
        self.held[name] = tensor.contiguous() if whole else tensor.clone(memory_format=torch.contiguous_format)
        self.held_bytes += tensor.nbytes
        self.bytes += tensor.nbytes
        self.written.add(name)

    def close(self) -> None:
        """Write what is left, and the index if there are several files."""
        self._flush()
        count = len(self.files)
        if count == 1:
            self._file(1).rename(self.folder / "model.safetensors")
            return
        weight_map: dict[str, str] = {}
        for number, names in enumerate(self.files, 1):
            file = self._file(number).rename(self.folder / f"model-{number:05d}-of-{count:05d}.safetensors")
            weight_map |= dict.fromkeys(names, file.name)
        index = {"metadata": {"total_size": self.bytes}, "weight_map": dict(sorted(weight_map.items()))}
        (self.folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")

    def _file(self, number: int) -> Path:
        return self.folder / f"model-{number:05d}.safetensors"

    def _flush(self) -> None:
        self.files.append(list(self.held))
        try:
            save_file(self.held, self._file(len(self.files)), metadata={"format": "pt"})
        except SafetensorError as error:
            shutil.rmtree(self.folder)
            raise TuneError(
                f"the trained model could not be written: {error}. Checkpoints are as they were: make room and "
                f"run the same command with output_dir={self.folder.parent}, which continues after the last one"
            ) from error
        self.held, self.held_bytes = {}, 0


@contextmanager
def rewritten(source: Path, target: Path, change: Callable[[str, Tensor], Tensor]) -> Iterator[Path]:
    """Make `target` the checkpoint `source` with `change` of each tensor, given its name on disk, and with whatever is
    written meanwhile into the folder that is yielded. It appears, or is replaced, at the end, when it is complete."""
    unfinished = target.with_name(f".{target.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    copy_without_weights(source, unfinished)
    files = TensorFiles(unfinished)
    for name, tensor in disk_tensors(source).items():
        files.add(name, change(name, tensor.read()))
    files.close()
    yield unfinished
    shutil.rmtree(target, ignore_errors=True)
    unfinished.rename(target)


def copy_without_weights(source: Path, folder: Path) -> None:
    """Copy what a checkpoint has beside its weights; what is in `folder` already stays as it is."""
    for file in source.iterdir():
        weights = file.suffix in (".safetensors", ".bin", ".gguf", ".pt", ".pth") or file.name.endswith(".index.json")
        if file.is_file() and not weights and not (folder / file.name).exists():
            shutil.copyfile(file, folder / file.name)
        elif file.name == "additional_chat_templates":  # other folders are something else: other formats, runs
            shutil.copytree(file, folder / file.name)


def hub_id(folder: Path) -> str | None:
    """The name on the Hugging Face hub of what `tune download` or the cache of huggingface_hub has in `folder`."""
    if (folder / HUB_ID).is_file():
        return (folder / HUB_ID).read_text().strip()
    repository = re.fullmatch("models--(.*)", folder.resolve().parent.parent.name)  # of models--org--name/snapshots/sha
    return repository[1].replace("--", "/") if repository else None


def model_card(recipe: str, model_path: str, dataset_path: str) -> str:
    """README.md of an exported model: where it comes from, by its name on the Hugging Face hub where that is known."""
    model = hub_id(Path(model_path)) or Path(model_path).name
    dataset = without_secrets(dataset_path)
    if Path(dataset).exists() or not re.fullmatch(r"[\w.-]+/[\w.-]+", dataset):  # else its name on the hub
        dataset = Path(dataset.partition("?")[0]).name
    return (
        f"---\nbase_model: {model}\ntags: [tune]\n---\n\n"
        f"Fine-tuned from `{model}` on `{dataset}` with the recipe `{recipe}` of tune.\n"
        "All settings are in config.yaml, all metrics in metrics.jsonl of the run folder.\n"
    )
