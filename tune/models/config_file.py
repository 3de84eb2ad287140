"""Read config.json, and reject fields that no reader has used."""

import copy
import re
import warnings
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, TypeVar

from tune.errors import TuneError, explained
from tune.files import ADAPTER_CONFIG, is_adapter
from tune.lookup import absent, did_you_mean_path, in_shell, is_on_the_hub
from tune.tokenizers import mapping_in

T = TypeVar("T")
# Fields that do not affect the model's computation in training.
HARMLESS = {
    "architectures", "model_type", "transformers_version", "torch_dtype", "dtype", "use_cache",
    "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "output_attentions", "output_hidden_states",
    "return_dict", "torchscript", "id2label", "label2id", "problem_type", "is_llama_config",
    "transformers.js_config", "cache_implementation", "auto_map", "task_specific_params", "chunk_size_feed_forward",
    "temperature", "top_p", "top_k", "max_length", "max_sequence_length", "unsloth_fixed", "unsloth_version",
    "quantization_config",  # weights are dequantized when read
}  # fmt: skip


def read_json(file: Path, setting: str = "path") -> dict[str, Any]:
    """The mapping in a JSON file of the folder that `setting` names. Raises TuneError if the file does not exist."""
    if not file.exists():
        folder, place = file.parent, in_shell(file.parent)
        if (folder / "config.yaml").exists() and not file.name.startswith("adapter"):
            adapter = in_shell(folder / "adapter")
            both = f"adapter.path={adapter} on its base, or merge both: tune export {place} --to hf --out FOLDER"
            ways = {"model": f"{folder}/model", "adapter": both}
            made = next((f"Use its result: {ways[each]}. " for each in ways if (folder / each).is_dir()), "")
            raise TuneError(
                f"{setting}: {folder} is a run folder. {made}To continue the run itself, repeat the command that "
                f"started it with output_dir={place}"
            )
        if (folder / ADAPTER_CONFIG).exists():
            raise _no_model(folder, setting)
        found = ", ".join(sorted(child.name for child in file.parent.glob("*"))[:8]) or "nothing"
        raise TuneError(f"{setting}: {file.parent} has no {file.name}; found {found}")
    return mapping_in(file)


def _no_model(adapter: Path, setting: str) -> TuneError:
    place = in_shell(adapter)
    return TuneError(
        f"{setting}: {adapter} is an adapter. Give the model that it was trained on, with adapter.path={place} to "
        f"continue training it; or merge both into one model: tune merge BASE {place} OUT"
    )


def is_positive(value: Any) -> bool:
    return type(value) in (int, float) and value > 0


def no_folder(path: Path, wanted: str) -> str:
    """Why `path` is no folder, what it must be, and a suggestion."""
    what = "is a file" if path.exists() else absent(path)
    near = did_you_mean_path(path, "*/")
    to_download = f". To download it from the Hugging Face hub: `tune download {path}`"
    hint = to_download if is_on_the_hub(str(path)) else near and f".{near}"
    if path.suffix == ".gguf" and path.is_file():
        hint = ". `tune convert` converts a GGUF file"
    if re.match(r"\w+:/", str(path)):  # Path has removed the other slash
        hint = ". URLs are not supported: copy the folder to a disk of each node, and give the path of the copy"
    return f"{path} {what}; it must be {wanted}{hint}"


class ConfigFile:
    """The config.json of a checkpoint folder. `finish` rejects fields that were not read."""

    def __init__(self, folder: Path, setting: str = "path"):
        self.path, self.setting = folder / "config.json", setting
        if not folder.is_dir():
            raise TuneError(f"{setting}: {no_folder(folder, 'a folder with config.json and *.safetensors')}")
        with explained(setting):
            if is_adapter(folder) and self.path.exists():
                raise _no_model(folder, setting)
        self.fields = read_json(self.path, setting)
        self.scores = "SequenceClassification" in str(self.fields.get("architectures"))  # a reward model
        self._read, self._sections = set[str](), list[ConfigFile]()

    def require_texts(self) -> None:
        """Raise TuneError for a reward model."""
        if self.scores:
            what = f"{self.setting}: {self.path.parent} is a reward model: it scores texts and cannot generate them"
            raise TuneError(f"{what}. Train it with reward_finetune, or use it as reward.path of a RewardModel")

    def require_one_label(self) -> None:
        """Raise TuneError for a model that scores several labels."""
        labels = self.get("num_labels") or len(self.get("id2label", ("two", "by default")))
        if self.scores and labels != 1:
            raise TuneError(
                f"{self.path}: the model scores {labels} labels, but a reward is one number. Use another model"
            )

    @property
    def scored_pad_id(self) -> int | None:
        """The pad token of a reward model, which does not end texts; None for a language model."""
        return (self.mapping("text_config") or self.fields).get("pad_token_id") if self.scores else None

    def set_defaults(self, **fields: Any) -> None:
        """Set defaults of fields that are missing in the file. A field that is null stays null."""
        self.fields = fields | self.fields

    def get(self, name: str, default: Any = None) -> Any:
        """A field's value; null counts as missing."""
        self._read.add(name)
        value = self.fields.get(name)
        return default if value is None else value

    def integer(self, name: str, default: int | None = None, *, minimum: int = 1) -> int:
        what = "a positive integer" if minimum == 1 else f"an integer, at least {minimum}"
        return self._checked(name, default, lambda value: type(value) is int and value >= minimum, what)

    def number(self, name: str, default: float | None = None) -> float:
        return self._checked(name, default, is_positive, "a positive number")

    def optional(self, name: str, read: Callable[[str], T]) -> T | None:
        """The result of `read` for a field; None if the field is missing."""
        return None if self.get(name) is None else read(name)

    def flag(self, name: str, default: bool = False) -> bool:
        return self._checked(name, default, lambda value: isinstance(value, bool), "true or false")

    def entries(self, name: str, default: list[Any]) -> list[Any]:
        return self._checked(name, default, lambda value: isinstance(value, list), "a list")

    def mapping(self, name: str) -> dict[str, Any]:
        """A mapping; empty if it is missing."""
        return dict(self._checked(name, {}, lambda value: isinstance(value, dict), "a mapping"))

    def section(self, name: str) -> "ConfigFile":
        """The mapping in a field as a `ConfigFile`, which `finish` includes."""
        section = copy.copy(self)
        section.path = self.path / name  # for messages
        section.fields, section._read, section._sections = self.mapping(name), set(), []
        self._sections.append(section)
        return section

    def _checked(self, name: str, default: Any, fits: Callable[[Any], bool], what: str) -> Any:
        value = self.get(name, default)
        if value is None:
            raise TuneError(f"{self.path}: field '{name}' is missing")
        if not fits(value):
            raise TuneError(f"{self.path}: field '{name}' must be {what}; found {value!r}")
        return value

    def choice(self, name: str, options: Collection[str]) -> str:
        value = self.get(name)
        if not isinstance(value, str) or value not in options:
            raise TuneError(f"{self.path}: {name}={value!r} is not supported; supported: {', '.join(options)}")
        return value

    def expect(self, **supported: Any) -> None:
        """Raise TuneError if one of these fields does not have the given value."""
        for name, only in supported.items():
            value = self.get(name, only)
            if value != only:
                raise TuneError(f"{self.path}: {name}={value!r} is not supported; supported: {only!r}")

    def ignore(self, *names: str) -> None:
        """Accept fields that do not affect the model's computation."""
        self._read.update(names)

    def without_dropout(self, *names: str) -> None:
        """Warn that these dropouts of the original training are not applied."""
        for name in names:
            if rate := self.get(name, 0):
                warnings.warn(f"{self.path}: {name}={rate} is ignored: tune trains without this dropout", stacklevel=2)

    def finish(self) -> None:
        """Raise TuneError for fields that were not read, unless they are `HARMLESS`, null, false or empty."""
        for section in self._sections:
            section.finish()
        unread = {
            name: value
            for name, value in self.fields.items()
            if name not in self._read | HARMLESS and not name.startswith("_") and value not in (None, False, [], {})
        }
        if unread:
            listing = ", ".join(f"{name}={value!r}" for name, value in unread.items())
            kind = f" for model_type '{self.fields['model_type']}'" if "model_type" in self.fields else ""
            raise TuneError(
                f"{self.path}: not supported{kind}: {listing}. Supported: "
                f"{', '.join(sorted(self._read))}. If a field does not affect this model, remove it from the file. "
                "Otherwise, train transformers' own model with model._component_=tune.models.hf"
            )
