"""Pictures in conversations: read their files, and make pixels and the text of their placeholders with transformers."""

import hashlib
import io
import json
from collections import OrderedDict
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from tune.errors import TuneError, explained
from tune.lookup import needs

PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
# Arguments of a processor that are not settings of its own.
OF_PARTS = ("processor_class", "image_processor", "video_processor", "feature_extractor", "tokenizer", "auto_map")
# What a processor returns for the text of a picture.
OF_TEXT = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")
PACKAGES = (("pillow", "PIL"), ("transformers", "transformers"))
REMEMBERED = 10_000  # placeholders of pictures


@dataclass(frozen=True, slots=True)
class PictureFile:
    """A picture: the path of its file, or the bytes of the file."""

    path: str = ""
    content: bytes = b""

    def read(self) -> bytes:
        """The bytes of the file. Raises TuneError if it cannot be read, or is no regular file: devices never end."""
        if self.content:
            return self.content
        with explained(f"the picture {self.path} cannot be read", OSError, ValueError):
            if not Path(self.path).is_file():
                raise OSError("it is not a file")
            return Path(self.path).read_bytes()

    def __str__(self) -> str:
        return self.path or f"{len(self.content):,} bytes of the row"


class PictureProcessor:
    """The processor of pictures in a checkpoint folder: transformers' own, with Pillow, so that pixels do not depend on
    what else is installed.

    It is opened when it is needed first. Videos and sounds are not supported.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._placeholders: OrderedDict[int, str] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "_placeholders": OrderedDict()}

    @cached_property
    def _processor(self) -> Any:
        with needs("vision", "a model of images and text"):
            import PIL  # noqa: F401
        with needs("hf", "a model of images and text"):
            import transformers
        from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES, processor_class_from_name
        from transformers.processing_utils import ProcessorMixin

        settings = self._settings("processor_config.json")
        model_type = self._settings("config.json").get("model_type", "")
        name = settings.get("processor_class") or PROCESSOR_MAPPING_NAMES.get(model_type)
        kind = processor_class_from_name(name) if name else None
        if kind is None:
            raise TuneError(
                f"{self.path}: transformers {transformers.__version__} has no processor for {name or model_type}. "
                "Train on rows without pictures, or use another model"
            )
        with explained(f"the processor of pictures in {self.path} cannot be opened", Exception):
            parts: dict[str, Any] = {
                "image_processor": transformers.AutoImageProcessor.from_pretrained(
                    self.path, backend="pil", trust_remote_code=False
                ),
                "tokenizer": transformers.AutoTokenizer.from_pretrained(self.path, trust_remote_code=False),
            }
            # They need torchvision, and are not used.
            parts |= dict.fromkeys({"video_processor", "feature_extractor"} & {*kind.get_attributes()})
            own = {name: value for name, value in settings.items() if name not in OF_PARTS}
            with patch.object(ProcessorMixin, "check_argument_for_proper_class", lambda *_: None):
                return kind(**parts, **own)

    def _settings(self, name: str) -> dict[str, Any]:
        file = self.path / name
        with explained(f"{file} is not valid JSON", ValueError):
            return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}

    @cached_property
    def marker(self) -> str:
        """What a chat template writes for a picture."""
        return self._processor.image_token

    @property
    def fingerprint(self) -> list[Any]:
        """Everything that determines the placeholders of a picture. Rows of text need none of these packages."""
        versions = [version(name) if find_spec(module) else "" for name, module in PACKAGES]
        return [*versions, *map(self._settings, PROCESSOR_FILES)]

    def __call__(self, picture: PictureFile) -> tuple[dict[str, np.ndarray], str]:
        """The model's arguments for a picture, and the text that takes the place of its marker.

        The first dimension of each argument has pictures, tiles or patches. Raises TuneError if Pillow cannot read it.
        """
        made = self._processor(
            text=[self.marker],
            images=[[self._opened(picture)]],
            return_text_replacement_offsets=True,
            add_special_tokens=False,
            return_tensors="np",
        )
        ((replaced,),) = made.pop("text_replacement_offsets")
        return {name: np.asarray(each) for name, each in made.items() if name not in OF_TEXT}, replaced["replacement"]

    def placeholder(self, picture: PictureFile) -> tuple[str, int]:
        """The text that takes the place of a picture's marker, and a digest of the picture's file."""
        digest = digest_of_file(picture.read())
        if digest not in self._placeholders:
            self._placeholders[digest] = self(picture)[1]
            if len(self._placeholders) > REMEMBERED:
                self._placeholders.popitem(last=False)
        return self._placeholders[digest], digest

    def values(self, picture: PictureFile, digest: int) -> dict[str, np.ndarray]:
        """The model's arguments for a picture. Raises TuneError if its file is not the one with this digest."""
        if digest_of_file(picture.read()) != digest:
            raise TuneError(
                f"the picture {picture} has changed since the data were prepared. Restore it, or prepare the data "
                "again: `tune cache --empty`"
            )
        return self(picture)[0]

    @cached_property
    def blank(self) -> dict[str, np.ndarray]:
        """The model's arguments for a picture of noise, for batches without any."""
        from PIL import Image

        pixels = np.random.default_rng(0).integers(0, 255, (56, 56, 3), dtype=np.uint8)
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "png")
        return self(PictureFile(content=file.getvalue()))[0]

    def _opened(self, picture: PictureFile) -> Any:
        """The picture upright, in RGB."""
        from PIL import Image, ImageOps

        with explained(f"the picture {picture} cannot be read by Pillow", Exception):
            image = Image.open(io.BytesIO(picture.read()))
            image.load()
        if image.mode.startswith("I"):
            raise TuneError(f"the picture {picture} has 16 bits a pixel, which would be clipped. Save it with 8")
        return ImageOps.exif_transpose(image).convert("RGB")


def digest_of_file(content: bytes) -> int:
    """A number that is equal for equal files."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


def has_processor(folder: Path) -> bool:
    """Whether a checkpoint folder has the files of a processor of pictures."""
    return any((folder / name).is_file() for name in PROCESSOR_FILES)
