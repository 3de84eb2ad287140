"""Wrap any causal language model of transformers for recipes: `model._component_: tune.models.hf`."""

import contextlib
import copy
import inspect
import math
import re
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partialmethod
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from tune.collators import Batch, Pictures
from tune.errors import TuneError
from tune.lookup import needs
from tune.models.config_file import ConfigFile
from tune.models.decoder import Decoder, Head, head_operands
from tune.models.names import Names, OnDisk, own_name
from tune.models.quantized import quantized
from tune.parts import ModelPart
from tune.quantization import Scaling

# If padding all documents to the longest multiplies the tokens by at most this factor, each gets its own row: plain
# causal attention has faster kernels.
MAX_PADDING = 1.25
MODEL_CLASS = "transformers.modeling_utils.PreTrainedModel"
# Names that forward() uses for its cache.
STATES = ("past_key_values", "cache_params", "state")
# A folder with one of these files has a processor, which makes pixels of pictures.
PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
# Names that configs have for the token in whose place a model puts the features of pictures.
PLACEHOLDERS = ("image_token_id", "image_token_index")
# Names that forward() has for the kinds of tokens: 1 for a placeholder of a picture.
KINDS_OF_TOKENS = ("mm_token_type_ids", "token_type_ids")


def hf(
    path: str | Path | nn.Module,
    trust_remote_code: bool = False,
    head: Literal["tokens", "score"] = "tokens",
    parts: Sequence[ModelPart] | None = None,
    *,
    quantization: Literal["nf4"] | None = None,
    double_quantization: bool = True,
    float8: Scaling | None = None,
) -> "HuggingFaceModel":
    """Wrap a causal language model of transformers, for architectures that `tune.models.build` does not have.

    `path` is a folder, or a transformers model in memory. From a folder, transformers builds the model from
    config.json, with parameters on the meta device. A model in memory shares its parameters with the result and is not
    changed; it keeps its own dropout. If it was made on the meta device, buffers that are in no checkpoint get their
    values.

    A folder of a model of images and text with the files of a processor becomes the whole model. `parts` are those
    that are trained: by default `[language, projector]`, and with adapters `[language]`. The tower, which reads the
    pictures, is frozen unless it is listed. A model in memory keeps what it trains unless `parts` is given.

    Code in the folder only runs with `trust_remote_code`. The other arguments are as in `tune.models.build`.

    Raises:
        TuneError: transformers cannot build the folder as a causal language model, or the model cannot be trained here,
            or it scores several labels, or a model of text has none of the `parts`. Also if the model in memory is not
            a transformers model, is quantized or sharded, has adapters of the library peft, or is given with
            `head="score"`.
    """
    if isinstance(path, nn.Module):
        if head == "score":
            raise TuneError("head: a model in memory keeps its own head. Give the folder of a model instead")
        model = _in_memory(path)
    else:
        model = _of_folder(str(path), trust_remote_code, head)
    if parts is not None or not isinstance(path, nn.Module):
        model.train_parts(parts)
    return quantized(model, quantization, double_quantization, float8)


def _of_folder(path: str, trust_remote_code: bool, head: Literal["tokens", "score"]) -> "HuggingFaceModel":
    file = ConfigFile(Path(path))
    if head == "score":
        file.require_one_label()
    else:
        file.require_texts()
    with needs("hf", "tune.models.hf"):
        import accelerate
        import transformers
    try:
        config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        configs = [config, *(each for each in vars(config).values() if isinstance(each, transformers.PretrainedConfig))]
        configs.append(config.get_text_config())
        for part in configs:
            vars(part).pop("quantization_config", None)  # weights are dequantized when read
        # The model's own dropout and router noise would depend on the distribution of rows over devices.
        for part in {id(part): part for part in configs}.values():
            part.use_cache = False
            for name, value in vars(part).items():
                if re.search("drop|jitter", name) and isinstance(value, float):
                    setattr(part, name, 0.0)
        # Buffers get their values, since most are in no checkpoint.
        with torch.device("cpu"), accelerate.init_empty_weights(include_buffers=False):
            options = {"dtype": torch.float32, "trust_remote_code": trust_remote_code}
            model, reason = _with_tower(config, Path(path), options)
            if model is None:
                model = transformers.AutoModelForCausalLM.from_config(config, **options)
        model.tie_weights()
        if head == "score":
            width = model.get_output_embeddings().in_features
            with torch.device("meta"):
                model.set_output_embeddings(nn.Linear(width, 1, bias=False))
    except Exception as error:  # hundreds of constructors raise different errors
        raise TuneError(
            f"{file.path}: transformers {transformers.__version__} cannot build a model: {error}"
        ) from error
    wrapped = HuggingFaceModel(model)
    wrapped.no_pictures = reason or wrapped.no_pictures
    if head == "score":
        wrapped.score_with(file.scored_pad_id)
    if model.config.model_type != config.model_type:  # the language model of a larger model
        wrapped.names.ignored += (r"^(?!.*\blanguage_model\.)(?!lm_head\.)",)
    return wrapped


def _with_tower(config: Any, folder: Path, options: dict[str, Any]) -> tuple[Any, str]:
    """The model of images and text in a folder, or None and the reason why its pictures cannot be trained on.

    Both are empty for a model of text. Raises TuneError if there is no such model, and no model of its text either.
    """
    import transformers

    if not any((folder / name).exists() for name in PROCESSOR_FILES):
        return None, ""
    if type(config) not in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        is_remote = "auto_map" in vars(config) and "vision_config" in vars(config)
        return None, "only the code in its folder reads them" if is_remote else ""
    model = transformers.AutoModelForImageTextToText.from_config(config, **options)
    reason = _why_no_pictures(model)
    if reason and not {type(config), type(config.get_text_config())} & {*transformers.MODEL_FOR_CAUSAL_LM_MAPPING}:
        raise TuneError(f"{type(model).__name__} is not supported: {reason}. Use another model")
    return (None if reason else model), reason


def _why_no_pictures(model: Any) -> str:
    """Why features of pictures cannot be given to a transformers model; "" if they can."""
    if _encoder(model, "image") is None:
        return "it has no tower of its own for pictures"
    if "mm_encoder_outputs" not in inspect.signature(model.forward).parameters:
        return "its forward takes no features of pictures (mm_encoder_outputs), as if its layers attend to pictures"
    if not hasattr(model.base_model, "get_image_features"):
        return "it has no get_image_features, which computes the features of pictures alone"
    if not any(isinstance(getattr(model.config, name, None), int) for name in PLACEHOLDERS):
        return f"its config names no placeholder of pictures ({' or '.join(PLACEHOLDERS)})"
    return ""


def is_transformers_model(model: Any) -> bool:
    """Whether `model` is a transformers model; does not import transformers."""
    return any(f"{kind.__module__}.{kind.__name__}" == MODEL_CLASS for kind in type(model).__mro__)


def _in_memory(model: Any) -> "HuggingFaceModel":
    require_no_peft(model)
    name = type(model).__name__
    if isinstance(model, HuggingFaceModel):
        return model
    if not is_transformers_model(model):
        raise TuneError(f"model: {name} is not a transformers model. Give a transformers model or its folder")
    if getattr(model, "hf_quantizer", None) is not None:
        raise TuneError(f"model: the weights of {name} are quantized by transformers. Load the original checkpoint")
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        raise TuneError(f"model: {name} is already sharded. Wrap it with tune.models.hf first, then shard the result")
    persistent = model.state_dict().keys()
    lost = [each for each, buffer in model.named_buffers() if buffer.is_meta and each not in persistent]
    if lost:
        import accelerate

        with torch.device("cpu"), accelerate.init_empty_weights(include_buffers=False):
            buffers = dict(type(model)(model.config).named_buffers())
        for each in lost:
            owner, _, kind = each.rpartition(".")
            setattr(model.get_submodule(owner), kind, buffers[each])
    return HuggingFaceModel(model)


class HuggingFaceModel(nn.Module):
    """A transformers model split into `body` and output `head` (None if tied to the embedding).

    Head and loss can then be computed in chunks, where FSDP has gathered the weight. The given model is not changed:
    `body` shares all of its modules except those around the head.

    It is called like `tune.models.Decoder`.
    """

    def __init__(self, model: Any):
        super().__init__()
        name, tensors = type(model).__name__, model.state_dict(keep_vars=True)
        head = model.get_output_embeddings()
        if not isinstance(head, nn.Linear) or model.config.is_encoder_decoder:
            raise TuneError(f"model: {name} is not supported: it is not a decoder with a linear output head")
        on_disk = {each: (id(tensor), _on_disk(model, each, tensor.detach())) for each, tensor in tensors.items()}
        self.config = model.config.get_text_config()
        self.routing = None
        self.tp_plan = getattr(self.config, "base_model_tp_plan", None)
        arguments = inspect.signature(model.forward).parameters
        self.takes_positions = "position_ids" in arguments
        self.takes_use_cache = "use_cache" in arguments
        self.kinds_of_tokens = next((each for each in KINDS_OF_TOKENS if each in arguments), None)
        self.taken = frozenset(arguments)
        self.state = next((each for each in STATES if each in arguments), None)
        self.max_positions = getattr(self.config, "max_position_embeddings", None)
        self.max_generated, self.beyond = _longest(model, self.config)  # also the limit for training
        self.checks_logits = False
        self.separates_documents = False  # whether positions separate documents in a row; set by `check`
        self.scale, self.softcap = _logit_transform(self.config)
        self.scores = False  # one output, without scale and softcap

        for each, module in model.named_modules():
            stack = next(module.parameters(recurse=False), None) if "experts" in each else None
            if stack is not None and stack.ndim == 3:  # a token uses some of the experts
                module.activated_share = getattr(self.config, "num_experts_per_tok", len(stack)) / len(stack)
        head_name = next(each for each, module in model.named_modules() if module is head)
        self.head_input = _HeadInput(self)
        self.body = _with_submodule(model, head_name, self.head_input)
        self.training = model.training
        self.tied = next((f"body.{each}" for each, weight in self.body.named_parameters() if weight is head.weight), "")
        if self.tied and head.bias is not None:
            raise TuneError(f"model: {name} is not supported: it has an output bias and tied weights")
        self.head = None if self.tied else head
        self.part_of_prefix = self._parts()
        self.parts: tuple[ModelPart, ...] | None = None  # that the caller chose to train
        # Why it cannot be trained on pictures; "" if it can.
        self.no_pictures = "it reads only text" if self.tower is None else _why_no_pictures(model)
        placeholders = (getattr(model.config, name, None) for name in PLACEHOLDERS)
        self.placeholder = next((each for each in placeholders if each is not None), None)
        # Positions of tokens and pictures have three dimensions, which only the model itself computes.
        self.rotates_in_3d = hasattr(self.body.base_model, "get_rope_index")
        ours = {id(tensor): each for each, tensor in [*self.named_parameters(), *self.named_buffers()]}
        self.names = Names({}, ignored=(*(model._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq$"))
        for name, (identity, names) in on_disk.items():
            if ours[identity] not in self.names.on_disk:
                self.names.on_disk[ours[identity]] = names
                self.names.alternatives[ours[identity]] = name  # the name in memory, which transformers also loads
            elif isinstance(names, str):
                self.names.copies[names] = ours[identity]
        if self.tower is not None:  # PEFT sees the names in memory, and on disk some models have older ones
            self.names.in_peft = {each: str(name) for each, name in self.names.alternatives.items()}

    def forward(
        self,
        batch: Batch | Tensor,
        head: Head | None = None,
        *,
        positions: Tensor | None = None,
        cache: "TransformersCache | None" = None,
    ) -> Any:
        """See `tune.models.Decoder.forward`."""
        if cache is not None:
            hidden = self._go_on(batch, positions, cache)
        else:
            hidden = self._run_documents(batch) if isinstance(batch, Batch) else self._run(batch)
        if self.scale != 1 and not self.scores:
            hidden = hidden * self.scale
        hidden, weight = head_operands(self.head_module, hidden)
        bias = None if self.head is None else self.head.bias
        if bias is not None:  # the weight of one more input with value 1
            hidden = torch.cat([hidden, hidden.new_full((*hidden.shape[:-1], 1), self.scale)], dim=-1)
            weight = torch.cat([weight, bias[:, None]], dim=1)
        function: Any = head or self.logits
        return function(hidden, weight, batch, **{"softcap": self.softcap} if self.softcap and not self.scores else {})

    logits = staticmethod(Decoder.logits)

    def score_with(self, pad_id: int | None) -> None:
        """Name the head, which has one output, as in transformers' `...ForSequenceClassification`.

        It replaces the vocabulary's head, which a checkpoint may have. `config` gets the corresponding fields of
        `DecoderConfig`.
        """
        replaced = str(self.names.on_disk["head.weight"])
        self.names.on_disk["head.weight"] = "score.weight"
        del self.names.alternatives["head.weight"]
        self.names.replaced["head.weight"] = rf"{re.escape(own_name(replaced).removesuffix('.weight'))}\.(weight|bias)$"
        self.scores = self.config.scores = True
        self.config.pad_id = pad_id

    @property
    def cost(self) -> str:
        """A sentence on the cost of a model that is not native."""
        return (
            f"{self.body.config.model_type} is computed by transformers, slower than a family of tune.models.families, "
            "and without parallel.cp, pp and ep"
        )

    def new_cache(self, rows: int, capacity: int) -> "TransformersCache":
        """A cache for `rows` documents."""
        return TransformersCache(rows)

    def _run(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        cache: "TransformersCache | None" = None,
        row: int = 0,
        pictures: Pictures | None = None,
    ) -> Tensor:
        """The input of the head, `[batch, seq, hidden]`; with a `cache`, `tokens` follow the cached ones of `row`."""
        arguments: dict[str, Any] = {"use_cache": False} if self.takes_use_cache else {}
        if cache is not None:
            state = cache.states[row]
            if isinstance(state, Tensor):  # the earlier tokens, which are computed again
                tokens, positions, state = torch.cat([state, tokens], dim=1), None, None
            arguments |= {self.state: state, "use_cache": True} if self.state else {}
            if pictures is not None and self.state is None:
                raise TuneError(f"model: {type(self.body).__name__} has no cache for generation from pictures")
            positions = None if positions is None else positions + cache.deltas[row]
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        if self.takes_positions:
            arguments["position_ids"] = positions
        zero = None
        if pictures is not None:
            values, features = self._see(pictures)
            zero = self._zero(features)
            if pictures.count:
                arguments |= self._shown(tokens, values, features)
                if self.rotates_in_3d:
                    del arguments["position_ids"]
        output = self.body(input_ids=tokens, return_dict=True, **arguments)
        if cache is not None:
            cache.states[row] = output.get(self.state, tokens)
            if pictures is not None and self.rotates_in_3d:
                cache.deltas[row] = int(self.body.base_model.rope_deltas[0])
        logits, hidden = output.logits, self.head_input.take()
        if zero is not None:
            hidden = hidden + zero.to(hidden.dtype)
        if self.checks_logits and not _close(logits, self._softcapped(hidden * self.scale), tolerance=1e-2):
            raise TuneError(
                f"model: {type(self.body).__name__} is not supported: its logits are not the output of its head"
            )
        return hidden

    def _see(self, pictures: Pictures) -> tuple[dict[str, Tensor], Any]:
        """The values of pictures in the dtype of the tower, and transformers' output for their features.

        All processes compute them here, before the body, so that they gather the weights of tower and embedding in the
        same order, with and without pictures.
        """
        if self.no_pictures:
            raise self._reads_no_pictures()
        assert self.tower is not None
        function: Any = self.body.base_model.get_image_features
        dtype = next(self.tower.parameters()).dtype
        values = {name: each.to(dtype) if each.is_floating_point() else each for name, each in pictures.values.items()}
        unknown = values.keys() - inspect.signature(function).parameters.keys() - self.taken
        if unknown:
            raise TuneError(
                f"model: {type(self.body).__name__} takes no {min(unknown)}. Only pictures are supported, not videos "
                "or sounds"
            )
        return values, function(**values, return_dict=True)

    def _reads_no_pictures(self) -> TuneError:
        return TuneError(
            f"model: {type(self.body).__name__} cannot be trained on pictures: {self.no_pictures}. Use another model, "
            "or rows without pictures"
        )

    def _zero(self, features: Any) -> Tensor | None:
        """0, as a function of all that was computed for pictures and of the projector's weights, if any is trained.

        So the same gradients exist on all processes, which sum them: of outputs that the body does not use, in a batch
        without pictures, and of weights for kinds of pictures that a batch lacks.
        """
        tensors = [each for each in tree_leaves(dict(features)) if isinstance(each, Tensor)]
        for name, parameter in self.named_parameters():
            # A DTensor belongs to a unit of the tower, which is called for every picture.
            if self.part_of(name) == "projector" and not isinstance(parameter, DTensor):
                tensors.append(parameter)
        zeros = [(each * 0).sum() for each in tensors if each.requires_grad]
        return torch.stack([each.float() for each in zeros]).sum() if zeros else None

    def _shown(self, tokens: Tensor, values: dict[str, Tensor], features: Any) -> dict[str, Any]:
        """The arguments of the body for pictures with these features and other values, such as their sizes."""
        others = {name: each for name, each in values.items() if name in self.taken and not name.startswith("pixel")}
        shown: dict[str, Any] = {**others, "mm_encoder_outputs": {"image": features}}
        if self.kinds_of_tokens is not None:
            shown[self.kinds_of_tokens] = tokens.eq(self.placeholder or 0).long()
        return shown

    @property
    def embedding(self) -> nn.Embedding:
        """The embedding of tokens."""
        return self.body.get_input_embeddings()

    @property
    def head_module(self) -> nn.Module:
        """The head, or the embedding whose weight it shares."""
        return self.get_submodule(self.tied.rpartition(".")[0]) if self.head is None else self.head

    @property
    def tower(self) -> nn.Module | None:
        """The module that reads pictures; None for a model of text."""
        return _encoder(self.body, "image")

    @property
    def language(self) -> nn.Module:
        """The module that reads tokens, with the embedding and without the head: all of a model of text."""
        return self if self.tower is None else self.body.get_decoder()

    def _parts(self) -> dict[str, ModelPart]:
        """The parts by the prefix of their names. All other modules are the projector."""
        parts: list[tuple[ModelPart, nn.Module | None]] = [
            ("language", self.language),
            ("language", self.head),
            ("tower", self.tower),
            ("tower", _encoder(self.body, "audio")),
        ]
        names = {module: f"{name}." for name, module in self.named_modules()}
        return {names[module]: part for part, module in parts if module is not None}

    def train_parts(self, parts: Sequence[ModelPart] | None = None) -> None:
        """Freeze all parts but these; by default all but language and projector. For adapters, see `hf`."""
        if self.tower is None:
            if others := {*(parts or ())} - {"language"}:
                raise TuneError(f"model.parts: {min(others)}: {type(self.body).__name__} has no such part")
            return
        if parts is not None and not parts:
            raise TuneError("model.parts is empty, so nothing would be trained. Set it to null for the default")
        self.parts = None if parts is None else tuple(parts)
        trained = self.parts or ("language", "projector")
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(self.part_of(name) in trained)

    @property
    def _plain_token(self) -> int:
        """A token that is no placeholder of a picture."""
        return int(self.placeholder == 0)

    def part_of(self, name: str) -> ModelPart:
        """The part of the model to which the module or parameter `name` belongs."""
        for prefix, part in self.part_of_prefix.items():
            if name.startswith(prefix):
                # The towers of Qwen and GLM end with their projector.
                return "projector" if part == "tower" and "merger" in name.removeprefix(prefix) else part
        return "language" if self.tower is None or name == "head" else "projector"

    def _softcapped(self, logits: Tensor) -> Tensor:
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap

    def _run_documents(self, batch: Batch) -> Tensor:
        tokens, documents = batch.tokens, batch.documents
        longest = max(documents.lengths)
        if (most := self.max_generated) and longest > most:
            raise TuneError(f"max_seq_len: {longest} exceeds {most}, where this model {self.beyond}. Lower it")
        has_pictures = batch.pictures is not None and batch.pictures.count > 0
        is_padded = len(documents.lengths) * longest > MAX_PADDING * tokens.numel()
        if self.separates_documents and is_padded and not has_pictures:
            return self._run(tokens, batch.positions, pictures=batch.pictures)
        # One document per row. Tokens after its end do not affect it, since attention is causal, and are dropped later.
        offsets = torch.arange(longest, device=tokens.device)
        index = (documents.boundaries[:-1, None].long() + offsets).clamp(max=tokens.numel() - 1)
        for module in self.modules():  # adapters
            keys = getattr(module, "dropout_keys", None)
            if keys is not None and keys.shape == tokens.shape:
                module.dropout_keys = keys.flatten()[index]
        rows = tokens.flatten()[index]
        if has_pictures:  # the placeholders of the next document would ask for its pictures
            rows = rows.masked_fill(offsets >= documents.boundaries.diff()[:, None], self._plain_token)
        hidden = self._run(rows, pictures=batch.pictures)
        return hidden.flatten(0, 1)[documents.ids * longest + batch.positions]

    def _go_on(self, batch: Batch | Tensor, positions: Tensor | None, cache: "TransformersCache") -> Tensor:
        """The input of the head after the last token of each document or row, `[rows, 1, hidden]`."""
        pictures = batch.pictures if isinstance(batch, Batch) else None
        if pictures is not None and pictures.count == 0:
            pictures = None  # prompts of other processes are not waited for
        if isinstance(batch, Batch):
            lengths = batch.documents.lengths
            if pictures is not None and len(lengths) > 1:
                raise TuneError(f"batch: {len(lengths)} prompts with pictures. With a cache, give one at a time")
            texts, places = batch.tokens[0].split(lengths), batch.positions[0].split(lengths)
        else:
            assert positions is not None, "tokens that follow others have positions"
            texts, places = batch.unbind(), positions.unbind()
        new = zip(cache.rows, texts, places, strict=True)
        last = [self._run(text[None], place[None], cache, row, pictures)[:, -1:] for row, text, place in new]
        return torch.cat(last)

    @torch.no_grad()
    def check(self, pictures: Pictures | None = None) -> None:
        """Check with a few tokens that the head can be computed outside of the model, and that attention is causal.

        Also finds out whether positions separate the documents of a row. With the values of one picture, such as the
        blank one, checks the same of a text with this picture. Call it on all processes, after weights are loaded.

        Raises:
            TuneError: the logits are not the output of the head, or a token attends to later tokens.
        """
        training, device = self.training, next(self.parameters()).device
        if pictures is not None and self.no_pictures:
            raise self._reads_no_pictures()
        self.eval()
        tokens = (torch.arange(12, device=device) * 7 + 3) % self.config.vocab_size
        if self.placeholder is not None:
            tokens = tokens.masked_fill(tokens == self.placeholder, self._plain_token)
        self.checks_logits = True
        alone = self(tokens[None, 2:])
        self.checks_logits = False
        followed = self(torch.cat([tokens[None, 2:], tokens[None, :2]], dim=1))
        tolerance = 1e-3 if alone.dtype == torch.float32 else 5e-2
        if not _close(followed[:, :10], alone, tolerance):
            raise TuneError(
                f"model: in {type(self.body).__name__}, tokens attend to later tokens, so they would see the answers "
                "that they should learn. If config.json has is_decoder=false, the model is an encoder"
            )
        self.separates_documents = self.takes_positions
        together = self(Batch.of(tokens[None].cpu(), documents=[[0] * 2 + [1] * 10]).to(device))
        self.separates_documents = self.takes_positions and _close(together[:, 2:], alone, tolerance)
        if pictures is not None:
            self._check_pictures(tokens, replace(pictures, count=1), tolerance)
        for module in self.modules():
            if isinstance(module, FSDPModule):  # an optimizer must get the sharded parameters
                module.reshard()
        self.train(training)

    def _check_pictures(self, tokens: Tensor, pictures: Pictures, tolerance: float) -> None:
        """Check that later tokens do not change what is computed for a text with a picture, and that the picture does.

        Raises TuneError if later tokens do. Warns if the picture does not: a projector whose weights are zero.
        """
        counts: list[int] = []
        see = self._see

        def counted(pictures: Pictures) -> tuple[dict[str, Tensor], Any]:
            values, features = see(pictures)
            whole = features.get("pooler_output")
            whole = features.last_hidden_state if whole is None else whole
            counts.append(sum(each[..., 0].numel() for each in tree_leaves(whole)))
            return values, features

        def run(tokens: Tensor, pictures: Pictures) -> Tensor:
            batch = Batch.of(tokens[None].cpu())
            return self(replace(batch, pictures=pictures).to(tokens.device))

        with patch.object(self, "_see", counted):  # weights are only gathered inside a forward
            run(tokens, replace(pictures, count=0))
        assert self.placeholder is not None
        row = torch.cat([tokens[:6], tokens.new_full((counts[0],), self.placeholder), tokens[6:]])
        whole = run(row, pictures)
        if not _close(whole[:, :-2], run(row[:-2], pictures), tolerance):
            raise TuneError(
                f"model: in {type(self.body).__name__}, a text with a picture attends to later tokens, so it would see "
                "the answers that it should learn"
            )
        negative = {name: -each if name == "pixel_values" else each for name, each in pictures.values.items()}
        if torch.equal(whole, run(row, replace(pictures, values=negative))):
            warnings.warn(
                f"model: {type(self.body).__name__} computes the same for different pictures. The weights of its "
                "projector may be zero or missing in the checkpoint",
                stacklevel=3,
            )


class TransformersCache:
    """The cache of transformers for each document, or its tokens if the model has no cache, or an internal one.

    Each document is computed alone, since some models do not support padding, or several new tokens after a cache. It
    is used like `KeyValueCache`.
    """

    def __init__(self, rows: int):
        self.states: list[Any] = [None] * rows
        self.rows: Sequence[int] = ()
        # A picture has fewer positions than tokens in some models: the next position, less the number of tokens.
        self.deltas = [0] * rows

    def start(self, rows: list[int], batch: Batch, device: torch.device) -> None:
        self.rows = rows
        for row in rows:
            self.states[row], self.deltas[row] = None, 0

    def extend(self, positions: Tensor, length: int) -> None:
        self.rows = range(len(positions))

    def together(self, start: int) -> int:
        return 1

    def keeps_all(self, length: int) -> bool:
        return False

    def copy(self, moves: Sequence[tuple[int, int]]) -> None:
        for source, target in moves:
            self.states[target], self.deltas[target] = copy.deepcopy(self.states[source]), self.deltas[source]


class _HeadInput(nn.Module):
    """Replaces the head, and stores its input."""

    def __init__(self, owner: HuggingFaceModel) -> None:
        super().__init__()
        self.owner = [owner]  # in a list, so that it does not become a submodule
        self.hidden: Tensor | None = None

    @property
    def weight(self) -> Tensor:
        """The weight of the head, whose dtype some models read."""
        return self.owner[0].head_module.weight  # type: ignore[return-value]

    def forward(self, hidden: Tensor) -> Tensor:
        self.hidden = hidden
        return hidden

    def take(self) -> Tensor:
        hidden, self.hidden = self.hidden, None
        assert hidden is not None, "the model does not call its output head"
        return hidden


def _with_submodule(module: Any, name: str, replacement: nn.Module) -> Any:
    """A copy of `module` with `replacement` instead of its submodule `name`.

    It shares everything else: its own parameters and buffers, and the modules that do not contain `name`.
    """
    child, _, rest = name.partition(".")
    other = copy.copy(module)
    vars(other).update({key: value.copy() for key, value in vars(module).items() if key.endswith("_hooks")})
    inner = _with_submodule(module._modules[child], rest, replacement) if rest else replacement
    other._modules = module._modules | {child: inner}
    return other


def _logit_transform(config: Any) -> tuple[float, float | None]:
    """The factor and the softcap of logits, from the fields in configs of transformers."""
    scale = getattr(config, "logit_scale", None) or getattr(config, "lm_head_multiplier", None) or 1.0
    if scaling := getattr(config, "logits_scaling", None):
        scale /= scaling
    return scale, getattr(config, "final_logit_softcapping", None) or getattr(config, "logits_soft_cap", None)


def _encoder(model: Any, kind: Literal["image", "audio"]) -> nn.Module | None:
    """The module of a transformers model that reads pictures or sounds, if any."""
    encoder = model.get_encoder(kind)
    return None if encoder is model or encoder is model.base_model else encoder


def _longest(model: Any, config: Any) -> tuple[int | None, str]:
    """The maximum length of documents, if any, and a phrase on what the model does beyond it."""
    trained = getattr(config, "max_position_embeddings", None)
    readers = model if _encoder(model, "image") is None else model.get_decoder()  # a tower has other positions
    for each in readers.modules():
        is_table = isinstance(each, nn.Embedding) and each is not model.get_input_embeddings()
        if is_table and trained and trained <= each.num_embeddings <= trained + 2:  # two may be for padding
            return trained, "has no position embeddings"
    ropes = getattr(config, "rope_parameters", None) or {}
    for rope in [ropes] if "rope_type" in ropes else ropes.values():
        if rope.get("rope_type") in ("dynamic", "longrope"):
            longest = rope.get("original_max_position_embeddings") or config.max_position_embeddings
            return longest, "changes its rope scaling for the whole batch"
    return None, ""


def _close(found: Tensor, expected: Tensor, tolerance: float) -> bool:
    difference = (found.float() - expected.float()).norm()
    return found.shape == expected.shape and bool(difference <= tolerance * expected.float().norm())


def _on_disk(model: Any, name: str, whole: Tensor) -> OnDisk:
    """The names on disk of a tensor that transformers saves. Raises TuneError if `OnDisk` cannot describe them.

    transformers only shows the conversion by its result, so a small tensor of distinct values is converted and
    compared.
    """
    from transformers.core_model_loading import revert_weight_conversion

    saved: dict[str, Tensor] = revert_weight_conversion(model, {name: whole})
    first = next(iter(saved))
    if len(saved) == 1 and saved[first] is whole:
        return first
    parts, rest = divmod(len(saved), len(whole))
    if parts and not rest and whole.ndim > 1 and whole.shape[1] % parts == 0:
        small = (*whole.shape[:2], *(min(size, 4) for size in whole.shape[2:]))
        values = torch.arange(math.prod(small), device="cpu").view(small)
        with contextlib.suppress(RuntimeError, ValueError):
            found: dict[str, Tensor] = revert_weight_conversion(model, {name: values})
            names = sorted(found, key=lambda each: int(found[each].min()))
            expected = [part for member in values for part in member.chunk(parts)]
            if all(torch.equal(found[each], part) for each, part in zip(names, expected, strict=True)):
                return names if parts == 1 else [names[start : start + parts] for start in range(0, len(names), parts)]
    raise TuneError(
        f"model: the conversion of {name} in transformers' {type(model).__name__} is not supported. Use "
        "tune.models.build if it has this architecture"
    )


def require_no_peft(model: nn.Module) -> None:
    """Raise TuneError if `model` has adapters of the library peft."""
    for name, module in model.named_modules():
        if type(module).__module__.partition(".")[0] == "peft":
            where = f" ({name})" if name else ""
            raise TuneError(
                f"the model has a {type(module).__name__}{where} of the library peft, whose adapters are not supported "
                "here. Merge them first with model = model.merge_and_unload(), or use tune.peft.add_adapters"
            )


def without_bars() -> AbstractContextManager:
    """A context that turns off tqdm progress bars, for calls that have no setting for it."""
    from tqdm import tqdm

    return patch.object(tqdm, "__init__", partialmethod(tqdm.__init__, disable=True))
