"""Build the model that a checkpoint's config.json describes."""

import pickle
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from tune.errors import TuneError
from tune.files import weight_files
from tune.models.config_file import ConfigFile
from tune.models.decoder import Decoder, DecoderConfig
from tune.models.families import family, supported
from tune.models.hf import HuggingFaceModel, hf
from tune.models.names import Names, own_name
from tune.models.quantized import quantized
from tune.parts import ModelPart
from tune.quantization import Scaling
from tune.tokenizers import Tokenizer, mapping_in
from tune.types import NonNegativeFloat

ROWS = 2**12  # rows of head and embedding compared at a time
UNREADABLE = (SafetensorError, TuneError, OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError)


def build(
    path: str,
    router_loss: NonNegativeFloat | None = None,
    head: Literal["tokens", "score"] = "tokens",
    parts: Sequence[ModelPart] | None = None,
    *,
    quantization: Literal["nf4"] | None = None,
    double_quantization: bool = True,
    float8: Scaling | None = None,
) -> Decoder | HuggingFaceModel:
    """Build the model that `path`/config.json describes.

    Native families (`tune.models.families`) become a `Decoder`, all others transformers' own model (`hf`). Under
    `torch.device("meta")`, the model takes no memory.

    `router_loss` is the weight of the experts' load-balancing loss (see `RoutingStats`). None takes
    `router_aux_loss_coef` from the file if its `output_router_logits` is true, else 0. With `head="score"`, one output
    replaces the vocabulary: a reward model (transformers' `...ForSequenceClassification` with one label).

    `parts` of a model of images and text are trained, or get adapters: see `tune.models.hf`.

    `quantization` stores the frozen weights of the blocks in 4 bits, and with `double_quantization` their scales in 8
    (see `tune.quantization.quantize_linears`). `float8` computes the matrix products of the blocks in 8 bits (see
    `tune.quantization.compute_in_float8`).

    Raises:
        TuneError: the folder does not exist; config.json is unreadable or has an unsupported architecture or field;
            `router_loss` is set for a model without experts; or the model scores several labels. If the family is not
            native: transformers is not installed or cannot build it, or `router_loss` is set.
    """
    model = _build(path, router_loss, head, parts)
    return quantized(model, quantization, double_quantization, float8)


def _build(
    path: str, router_loss: float | None, head: Literal["tokens", "score"], parts: Sequence[ModelPart] | None
) -> Decoder | HuggingFaceModel:
    file = ConfigFile(Path(path))
    model_type = file.get("model_type", "(none)")
    if isinstance(model_type, str) and "model_type" in file.fields and model_type not in supported():
        return _of_transformers(path, model_type, router_loss, head, parts)
    if others := {*(parts or ())} - {"language"}:
        raise TuneError(
            f"model.parts: {min(others)}: tune.models.build trains only the text of {model_type}. For its other parts, "
            "set model._component_=tune.models.hf"
        )
    architecture = family(str(model_type))
    config = architecture.read_config(file)
    if head == "score":
        config = _with_scores(config, file)
    else:
        file.require_texts()
    file.finish()
    if router_loss is not None:
        config = replace(config, router_loss=router_loss)
    lm_head, embedding = (str(architecture.disk_name(f"{name}.weight", 0)) for name in ("head", "embedding"))
    if config.tied_head and _has_own_head(file.path.parent, lm_head, embedding):
        warnings.warn(
            f"{file.path} ties {lm_head} to {embedding}, but the checkpoint has both with different values, so they "
            "stay two weights, as in transformers. Set tie_word_embeddings to false for other libraries",
            stacklevel=2,
        )
        config = replace(config, tied_head=False)
    model = Decoder(config)
    if config.router_loss and model.routing is None:
        raise TuneError(f"router_loss: {path} has no experts to balance. Remove router_loss")
    tensors = [*model.named_parameters(), *model.named_buffers()]
    model.names = Names(
        {name: architecture.disk_name(name, len(tensor)) for name, tensor in tensors},
        copies={lm_head: "embedding.weight"} if config.tied_head else {},
        ignored=tuple(pattern.replace("{num_layers}", str(len(config.layers))) for pattern in architecture.ignored),
    )
    if config.scores:
        model.names.on_disk["head.weight"] = "score.weight"
        model.names.replaced["head.weight"] = re.escape(own_name(lm_head)) + "$"
    return model


def _has_own_head(folder: Path, lm_head: str, embedding: str) -> bool:
    """Return whether the weight files in `folder` have a head with other values than the embedding. Files that cannot
    be read are reported where weights are loaded."""
    # The model may be built on the meta device or of fake tensors.
    with torch.device("cpu"), unset_fake_temporarily(), suppress(*UNREADABLE):
        places = {own_name(name): (file, name) for file in _weight_files(folder) for name in _names(file)}
        both = [places[own_name(name)] for name in (lm_head, embedding) if own_name(name) in places]
        return len(both) == 2 and _differ(*map(_pieces, both))
    return False


def _weight_files(folder: Path) -> list[Path]:
    files = weight_files(folder)
    if files and files[0].suffix == ".json":
        weight_map = mapping_in(files[0]).get("weight_map")
        return sorted({folder / str(name) for name in weight_map.values()}) if isinstance(weight_map, dict) else []
    return files


def _names(file: Path) -> list[str]:
    if file.suffix == ".safetensors":
        with safe_open(file, framework="pt") as tensors:
            return [*tensors.keys()]
    content = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    return [*content] if isinstance(content, dict) else []


def _pieces(place: tuple[Path, str]) -> Iterator[Tensor]:
    """Yield the rows of a matrix in a weight file, some at a time, as bytes."""
    file, name = place
    if file.suffix == ".safetensors":
        rows: Any = safe_open(file, framework="pt").get_slice(name)
        count = rows.get_shape()[0]
    else:
        rows = torch.load(file, map_location="cpu", weights_only=True, mmap=True)[name]
        count = len(rows)
    for start in range(0, count, ROWS):
        yield rows[start : start + ROWS].contiguous().view(torch.uint8)


def _differ(one: Iterator[Tensor], other: Iterator[Tensor]) -> bool:
    pairs = zip_longest(one, other)
    return any(ours is None or theirs is None or not torch.equal(ours, theirs) for ours, theirs in pairs)


def _of_transformers(
    path: str,
    model_type: str,
    router_loss: float | None,
    head: Literal["tokens", "score"],
    parts: Sequence[ModelPart] | None,
) -> HuggingFaceModel:
    known = f"model_type '{model_type}' is not native. Native families: {', '.join(supported())}"
    if router_loss is not None:
        raise TuneError(f"router_loss: {known}. Models loaded through transformers do not support router_loss")
    try:
        return hf(path, head=head, parts=parts)
    except TuneError as error:
        raise TuneError(f"{error}. {known}") from error


def _with_scores(config: DecoderConfig, file: ConfigFile) -> DecoderConfig:
    file.require_one_label()
    return replace(config, scores=True, pad_id=file.scored_pad_id, tied_head=False, logit_scale=1.0, logit_softcap=None)


def prepare_scores(model: Any, tokenizer: Tokenizer) -> None:
    """Make a reward model built from a language model skip a pad token that does not end texts
    (`Tokenizer.choose_pad`). Raises TuneError for a model without a scoring head."""
    if not getattr(model.config, "scores", False):
        raise TuneError("model: no scoring head. Set model._component_=tune.models.build and model.head=score")
    if model.config.pad_id is None:
        set_pad(model, tokenizer.choose_pad())


def set_pad(model: Any, pad_id: int | None) -> None:
    """Make a reward model skip this token; see `tune.losses.LastTokenScores`."""
    if isinstance(model, HuggingFaceModel):
        model.config.pad_id = pad_id
    else:
        model.config = replace(model.config, pad_id=pad_id)


def as_reward_model(fields: dict[str, Any], pad_id: int | None) -> dict[str, Any]:
    """The config.json for transformers' `AutoModelForSequenceClassification`, from that of the original model."""
    is_text = str(fields.get("model_type")).endswith("_text")
    kind = "TextForSequenceClassification" if is_text else "ForSequenceClassification"
    names = [re.sub(r"(Text)?For[A-Z]\w+$", kind, name) for name in fields.get("architectures") or []]
    text = fields.get("text_config", fields)
    text["pad_token_id"] = text.get("pad_token_id") if pad_id is None else pad_id
    return fields | {"architectures": names, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
