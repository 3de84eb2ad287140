"""What rules read of a run, before anything of it is built."""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

GREAT = 1e9  # no limit


@dataclass(frozen=True)
class Facts:
    """A run's settings, the machine it is for, and what the files of its model say without any weights.

    `device` is cpu, cuda or mps; `capability` that of the GPU, where it is known.
    """

    cfg: DictConfig
    device: str = "cpu"
    processes: int = 1
    capability: tuple[int, int] | None = None
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)

    def __call__(self, key: str, default: Any = None) -> Any:
        """A setting, or the default where it is null or the recipe does not have it."""
        value = OmegaConf.select(self.cfg, key, throw_on_resolution_failure=False, throw_on_missing=False)
        return default if value is None else value

    def number(self, key: str, default: float = 0.0) -> float:
        """A setting that is a number; what is none is told in its own place."""
        value = self(key)
        return value if isinstance(value, int | float) and not isinstance(value, bool) else default

    @property
    def lr(self) -> float:
        """The learning rate of all but named groups, if the optimizer is one whose steps it alone scales."""
        return self.number("optimizer.lr") if "Adam" in self("optimizer._component_", "") else 0.0

    def asks(self, key: str, *parts: str) -> bool:
        """Whether one of the parts is in a setting."""
        value = self(key, "")
        return any(part in str(value) for part in parts)

    @cached_property
    def model(self) -> dict[str, Any]:
        """config.json of the model, of its language model if it has several; empty where it cannot be read."""
        fields = self._json("model.path", "config.json")
        return {**fields, **(fields.get("text_config") or {})}

    @cached_property
    def template(self) -> str:
        """The chat template, as it is written; empty where there is none, or one of ours is chosen."""
        folder = Path(str(self("tokenizer.path", self("model.path", ""))))
        if self("tokenizer.chat_template"):
            return ""
        file = folder / "chat_template.jinja"
        try:
            text: Any = file.read_text() if file.exists() else self._json("model.path", "tokenizer_config.json")
        except (OSError, ValueError):
            return ""
        return text if isinstance(text, str) else json.dumps(text.get("chat_template") or "")

    @property
    def has_compiler(self) -> bool:
        return bool(shutil.which(self.environ.get("CXX") or "g++"))

    def _json(self, key: str, name: str) -> dict[str, Any]:
        try:
            fields = json.loads((Path(str(self(key))) / name).read_text())
        except (OSError, ValueError):  # told where it is read
            return {}
        return fields if isinstance(fields, dict) else {}
