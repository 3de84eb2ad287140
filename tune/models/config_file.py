"""Reading a checkpoint's config.json such that nothing in it that matters is overlooked."""

import json
import warnings
from pathlib import Path
from typing import Any

from tune.errors import TuneError
from tune.models.rope import RopeConfig

ROPE_FIELDS = {
    "factor", "original_max_position_embeddings", "attention_factor", "low_freq_factor", "high_freq_factor",
    "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate", "short_factor", "long_factor", "finetuned",
}  # fmt: skip

# Fields that say nothing about the mathematics of the model in training.
HARMLESS = {
    "architectures", "model_type", "transformers_version", "torch_dtype", "dtype", "use_cache",
    "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "output_attentions", "output_hidden_states",
    "return_dict", "torchscript", "id2label", "label2id", "problem_type", "is_llama_config",
    "transformers.js_config", "task_specific_params", "chunk_size_feed_forward",
}  # fmt: skip


class ConfigFile:
    """config.json of a checkpoint folder. Fields are read once; `finish` refuses those nobody read."""

    def __init__(self, folder: Path):
        self.path = folder / "config.json"
        if not folder.is_dir():
            what = "is a file" if folder.exists() else "does not exist"
            raise TuneError(f"model.path: {folder} {what}; it must be a folder with config.json and *.safetensors")
        if not self.path.exists():
            found = ", ".join(sorted(child.name for child in folder.iterdir())[:8]) or "nothing: it is empty"
            raise TuneError(f"model.path: {folder} has no config.json; found {found}")
        try:
            self.fields: dict[str, Any] = json.loads(self.path.read_text())
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise TuneError(f"{self.path} is not valid JSON: {error}") from error
        if not isinstance(self.fields, dict):
            raise TuneError(f"{self.path} must hold a mapping; found {type(self.fields).__name__}")
        self._read: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        """A field; null counts as absent."""
        self._read.add(name)
        value = self.fields.get(name)
        return default if value is None else value

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.get(name, default)
        if value is None:
            raise TuneError(f"{self.path}: field '{name}' is missing")
        if not isinstance(value, int) or value < 1:
            raise TuneError(f"{self.path}: field '{name}' must be a positive integer; found {value!r}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.get(name, default)
        if value is None:
            raise TuneError(f"{self.path}: field '{name}' is missing")
        if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
            raise TuneError(f"{self.path}: field '{name}' must be a positive number; found {value!r}")
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise TuneError(f"{self.path}: field '{name}' must be true or false; found {value!r}")
        return value

    def expect(self, name: str, supported: Any) -> None:
        """Refuse any other value than the one that is implemented."""
        value = self.get(name, supported)
        if value != supported:
            raise TuneError(f"{self.path}: {name}={value!r} is not supported; supported: {supported!r}")

    def without_dropout(self, name: str) -> None:
        """A dropout of the original training. No part of the model, and not applied here: that is said."""
        if rate := self.get(name, 0):
            warnings.warn(f"{self.path}: {name}={rate} is not applied: tune trains without it", stacklevel=2)

    def rope(
        self,
        head_dim: int,
        *,
        theta: float = 10000.0,
        positions: int = 2048,
        partial: float | None = None,
        interleaved: bool = False,
        fields: dict[str, Any] | None = None,
    ) -> RopeConfig:
        """The rotary embedding, as older (`rope_theta`, `rope_scaling`) or newer (`rope_parameters`) files have it.

        The arguments are what a file means that does not say. `partial` is the rotated share of a head, None where a
        family has no such thing; `fields` are the file's if it has several sets of them.
        """
        theta = self.number("rope_theta", theta)
        if fields is None:
            fields = dict(self.get("rope_scaling", {})) | dict(self.get("rope_parameters", {}))
        fields = {name: value for name, value in fields.items() if value is not None}
        kind = fields.pop("rope_type", None) or fields.pop("type", None) or "default"
        fields.pop("type", None)
        theta = fields.pop("rope_theta", theta)
        share = fields.pop("partial_rotary_factor", self.get("partial_rotary_factor", partial or 1.0))
        if partial is None and share != 1.0:
            raise TuneError(f"{self.path}: a partial_rotary_factor is not supported in this family")
        max_positions = self.integer("max_position_embeddings", positions)
        if original := self.get("original_max_position_embeddings"):
            fields["original_max_position_embeddings"] = original
        # Left out by some exporters, and meant as the trained length.
        if kind in ("llama3", "yarn", "longrope"):
            fields.setdefault("original_max_position_embeddings", max_positions)
        needed = {"linear": ["factor"], "llama3": ["factor", "low_freq_factor", "high_freq_factor"],
                  "longrope": ["short_factor", "long_factor"]}  # fmt: skip
        for name in needed.get(kind, []):
            if name not in fields:
                raise TuneError(f"{self.path}: rope scaling '{kind}' has no '{name}'")
        if unknown := fields.keys() - ROPE_FIELDS:
            raise TuneError(f"{self.path}: rope scaling '{kind}' has unknown fields: {', '.join(sorted(unknown))}")
        return RopeConfig(int(head_dim * share), max_positions, theta, kind, fields, interleaved)

    def finish(self) -> None:
        """Refuse fields that nobody read, unless they are known to be harmless or switched off."""
        unread = {
            name: value
            for name, value in self.fields.items()
            if name not in self._read | HARMLESS and not name.startswith("_") and value not in (None, False, [], {})
        }
        if "quantization_config" in unread:
            raise TuneError(
                f"{self.path}: the weights are quantised ({unread['quantization_config']}); fine-tune the original "
                "checkpoint, in bf16, fp16 or fp32"
            )
        if unread:
            listing = ", ".join(f"{name}={value!r}" for name, value in unread.items())
            raise TuneError(
                f"{self.path}: not supported for model_type '{self.fields.get('model_type')}': {listing}. Supported: "
                f"{', '.join(sorted(self._read))}. If a field has no effect on this model, remove it from the file."
            )
