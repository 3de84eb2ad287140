"""Reading a checkpoint's config.json such that nothing in it that matters is overlooked."""

import json
from pathlib import Path
from typing import Any

from tune.errors import TuneError
from tune.models.rope import RopeConfig

# Fields that say nothing about the mathematics of the model in training.
HARMLESS = {
    "architectures", "model_type", "transformers_version", "torch_dtype", "dtype", "use_cache",
    "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "output_attentions", "output_hidden_states",
    "return_dict", "torchscript", "id2label", "label2id", "problem_type", "is_llama_config", "rope_interleaved",
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

    def expect(self, name: str, supported: Any) -> None:
        """Refuse any other value than the one that is implemented."""
        value = self.get(name, supported)
        if value != supported:
            raise TuneError(f"{self.path}: {name}={value!r} is not supported; supported: {supported!r}")

    def expect_all(self, name: str, supported: Any) -> None:
        """The same for a list with an entry per layer."""
        others = set(self.get(name, [])) - {supported}
        if others:
            raise TuneError(f"{self.path}: {name} has {sorted(others)}; supported: {supported!r} in every layer")

    def rope(self, head_dim: int, default_theta: float, default_positions: int) -> RopeConfig:
        """The rotary embedding, as older (`rope_theta`, `rope_scaling`) or newer (`rope_parameters`) files have it."""
        fields = dict(self.get("rope_scaling", {})) | dict(self.get("rope_parameters", {}))
        theta = self.get("rope_theta", default_theta)
        kind = fields.pop("rope_type", None) or fields.pop("type", None) or "default"
        fields.pop("type", None)
        max_positions = self.integer("max_position_embeddings", default_positions)
        if fields.pop("partial_rotary_factor", 1.0) != 1.0:
            raise TuneError(f"{self.path}: a partial_rotary_factor is not supported in this family")
        theta = fields.pop("rope_theta", theta)
        # Written as null by some exporters, and meant as the trained length.
        if kind in ("llama3", "yarn") and not fields.get("original_max_position_embeddings"):
            fields["original_max_position_embeddings"] = max_positions
        if kind in ("linear", "llama3") and "factor" not in fields:
            raise TuneError(f"{self.path}: rope scaling '{kind}' has no 'factor'")
        return RopeConfig(head_dim, max_positions, theta, kind, fields)

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
