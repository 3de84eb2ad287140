"""Tiny folders of models of images and text: config, random weights, tokenizer, chat template and processor files."""

from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import transformers
from packaging.version import Version
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForImageTextToText, PreTrainedTokenizerFast
from transformers.models.auto.image_processing_auto import get_image_processor_class_from_name
from transformers.processing_utils import ProcessorMixin

from tune.collators import IGNORE, Batch, Pictures

TEXT = "What is in this image? It is a red square and the blue cat."
CHAT = ("<|im_start|>", "<|im_end|>")
TEMPLATE = """\
{%- macro text(content) %}
{%- if content is string %}{{ content }}
{%- else %}
{%- for part in content %}{% if part.type == 'image' %}MARKER{% else %}{{ part.text }}{% endif %}{% endfor %}
{%- endif %}
{%- endmacro %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' }}
{%- if message.role == 'assistant' %}{% generation %}{{ text(message.content) }}{{ '<|im_end|>' }}{% endgeneration %}
{%- else %}{{ text(message.content) }}{{ '<|im_end|>' }}{% endif %}
{{- '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

LANGUAGE = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512,
}  # fmt: skip
LLAMA = LANGUAGE | {"model_type": "llama"}
SIGLIP = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "image_size": 56,
    "patch_size": 14,
}  # fmt: skip
CLIP = SIGLIP | {"model_type": "clip_vision_model", "projection_dim": 32}
QWEN = {"depth": 3, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "out_hidden_size": 32}
PINPOINTS = [[56, 112], [112, 56], [112, 112]]
SMALL = {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 16}  # pixels


def rope(sections: list[int], **fields: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "mrope_section": sections, "rope_theta": 1e4, **fields}}


@dataclass(frozen=True)
class Family:
    """A kind of model: classes of transformers, and the fields of its config and processor."""

    config: str
    fields: dict[str, Any]
    processor: str
    images: str  # class of the image processor, without torchvision
    image_fields: dict[str, Any]
    marker: str = "<image>"  # written by the template for a picture
    placeholder: str = ""  # the token in whose place features are put; by default the marker
    specials: tuple[str, ...] = ("<image>",)
    named_tokens: dict[str, str] = field(default_factory=dict)  # attributes of the tokenizer
    token_fields: dict[str, str] = field(default_factory=dict)  # fields of the config that are ids of these tokens
    processor_fields: dict[str, Any] = field(default_factory=dict)


IN_QWEN = {
    "marker": "<|vision_start|><|image_pad|><|vision_end|>",
    "placeholder": "<|image_pad|>",
    "specials": ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
    "token_fields": {
        "vision_start_token_id": "<|vision_start|>",
        "vision_end_token_id": "<|vision_end|>",
        "video_token_id": "<|video_pad|>",
    },
}
IN_LLAVA = {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
IN_GEMMA = {
    "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>",
}  # fmt: skip
ROWS = [f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)]

FAMILIES = {
    "llava": Family(
        "LlavaConfig",
        {"text_config": LLAMA, "vision_config": CLIP, "vision_feature_layer": -2, "image_seq_length": 16},
        "LlavaProcessor",
        "CLIPImageProcessorPil",
        {"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}},
        processor_fields=IN_LLAVA,
    ),
    "llava_next": Family(
        "LlavaNextConfig",
        {
            "text_config": LLAMA, "vision_config": CLIP, "vision_feature_layer": -2, "image_seq_length": 16,
            "image_grid_pinpoints": PINPOINTS,
        },
        "LlavaNextProcessor",
        "LlavaNextImageProcessorPil",
        {
            "size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56},
            "image_grid_pinpoints": PINPOINTS,
        },
        processor_fields=IN_LLAVA,
    ),
    "idefics3": Family(
        "Idefics3Config",
        {"text_config": LLAMA, "vision_config": SIGLIP, "scale_factor": 2, "pad_token_id": 0},
        "Idefics3Processor",
        "Idefics3ImageProcessorPil",
        {"size": {"longest_edge": 112}, "max_image_size": {"longest_edge": 56}},
        specials=("<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>", *ROWS),
        processor_fields={"image_seq_len": 4},
    ),
    "gemma3": Family(
        "Gemma3Config",
        {
            "text_config": LANGUAGE | {
                "sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"],
                "query_pre_attn_scalar": 8,
            },
            "vision_config": SIGLIP, "mm_tokens_per_image": 4,
        },
        "Gemma3Processor",
        "Gemma3ImageProcessorPil",
        {"size": {"height": 56, "width": 56}},
        marker="<start_of_image>",
        placeholder="<image_soft_token>",
        specials=tuple(IN_GEMMA.values()),
        named_tokens=IN_GEMMA,
        token_fields={"boi_token_index": "<start_of_image>", "eoi_token_index": "<end_of_image>"},
        processor_fields={"image_seq_length": 4},
    ),
    "qwen2_5_vl": Family(
        "Qwen2_5_VLConfig",
        {
            "text_config": LANGUAGE | rope([1, 1, 2]),
            "vision_config": QWEN | {"patch_size": 14, "fullatt_block_indexes": [1], "window_size": 56},
        },
        "Qwen2_5_VLProcessor",
        "Qwen2VLImageProcessorPil",
        {"size": SMALL, "patch_size": 14},
        **IN_QWEN,
    ),
    "qwen3_vl": Family(
        "Qwen3VLConfig",
        {
            "text_config": LANGUAGE | rope([2, 1, 1], mrope_interleaved=True),
            "vision_config": QWEN | {
                "patch_size": 16, "deepstack_visual_indexes": [0], "num_position_embeddings": 64,
            },
        },
        "Qwen3VLProcessor",
        "Qwen2VLImageProcessorPil",
        {"size": SMALL, "patch_size": 16},
        **IN_QWEN,
    ),
    "qwen3_5": Family(
        "Qwen3_5Config",
        {
            "text_config": LANGUAGE | {
                "head_dim": 16, "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
                "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4,
                "layer_types": ["linear_attention", "full_attention"],
                **rope([2, 1, 1], mrope_interleaved=True, partial_rotary_factor=0.5),
            },
            "vision_config": QWEN | {"patch_size": 16, "num_position_embeddings": 64},
        },
        "Qwen3VLProcessor",
        "Qwen2VLImageProcessorPil",
        {"size": SMALL, "patch_size": 16},
        **IN_QWEN,
    ),
    "internvl": Family(
        "InternVLConfig",
        {
            "text_config": LANGUAGE | {"model_type": "qwen2"},
            "vision_config": SIGLIP | {"image_size": [56, 56], "patch_size": [14, 14]}, "image_seq_length": 4,
        },
        "InternVLProcessor",
        "GotOcr2ImageProcessorPil",
        {"size": {"height": 56, "width": 56}, "crop_to_patches": True, "max_patches": 4},
        marker="<IMG_CONTEXT>",
        specials=("<img>", "</img>", "<IMG_CONTEXT>", "<video>"),
        named_tokens={
            "start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
        processor_fields={"image_seq_length": 4},
    ),
    "glm46v": Family(
        "Glm46VConfig",
        {
            "text_config": LANGUAGE | rope([1, 1, 2], partial_rotary_factor=1.0),
            "vision_config": QWEN | {"patch_size": 14, "image_size": 112},
        },
        "Glm46VProcessor",
        "Glm46VImageProcessorPil",
        {"size": {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 32}, "patch_size": 14},
        marker="<|begin_of_image|><|image|><|end_of_image|>",
        placeholder="<|image|>",
        specials=("<|begin_of_image|>", "<|end_of_image|>", "<|image|>", "<|video|>"),
        token_fields={
            "image_start_token_id": "<|begin_of_image|>", "image_end_token_id": "<|end_of_image|>",
            "video_token_id": "<|video|>",
        },
    ),
    "gemma4": Family(
        "Gemma4Config",
        {
            "text_config": LANGUAGE | {
                "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 64,
                "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "global_head_dim": 8,
            },
            "vision_config": {
                "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
                "num_key_value_heads": 4, "head_dim": 8, "patch_size": 14, "pooling_kernel_size": 2,
                "position_embedding_size": 128,
            },
            "audio_config": None,
        },
        "Gemma4Processor",
        "Gemma4ImageProcessorPil",
        {"patch_size": 14, "max_soft_tokens": 70, "pooling_kernel_size": 2},
        marker="<image_soft_token>",
        specials=(*IN_GEMMA.values(), "<audio>", "<boa>", "<eoa>", "<video>"),
        named_tokens=IN_GEMMA | {
            "audio_token": "<audio>", "boa_token": "<boa>", "eoa_token": "<eoa>", "video_token": "<video>",
        },
    ),
}  # fmt: skip


if Version(transformers.__version__) < Version("5.23"):
    del FAMILIES["gemma4"]  # its processor needs torchvision there


def tokenizer_of(family: Family) -> PreTrainedTokenizerFast:
    whole = Tokenizer(models.BPE())
    whole.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    whole.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    first = ["<pad>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(vocab_size=290, special_tokens=first, initial_alphabet=alphabet, show_progress=False)
    whole.train_from_iterator([TEXT] * 5, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=whole, pad_token="<pad>", bos_token="<s>", eos_token="</s>",
        extra_special_tokens=family.named_tokens,
    )  # fmt: skip
    tokenizer.add_special_tokens({"additional_special_tokens": [*CHAT, *family.specials]})
    return tokenizer


@cache
def processor_of(name: str) -> Any:
    """The processor of a family of `FAMILIES`, without its parts for videos and sounds, which need torchvision."""
    family = FAMILIES[name]
    kind: Any = getattr(transformers, family.processor)
    images: Any = get_image_processor_class_from_name(family.images)
    parts = {"image_processor": images(**family.image_fields), "tokenizer": tokenizer_of(family)}
    parts |= dict.fromkeys({"video_processor", "feature_extractor"} & {*kind.get_attributes()})
    with patch.object(ProcessorMixin, "check_argument_for_proper_class", lambda *_: None):
        return kind(**parts, **family.processor_fields, chat_template=TEMPLATE.replace("MARKER", family.marker))


def config_of(name: str, tokenizer: Any) -> Any:
    family = FAMILIES[name]
    config = getattr(transformers, family.config)(**family.fields)
    config.get_text_config().vocab_size = len(tokenizer) + 3
    placeholder = tokenizer.convert_tokens_to_ids(family.placeholder or family.marker)
    for field_name in ("image_token_id", "image_token_index"):
        if hasattr(config, field_name):
            setattr(config, field_name, placeholder)
    for field_name, token in family.token_fields.items():
        setattr(config, field_name, tokenizer.convert_tokens_to_ids(token))
    for part in (config, config.get_text_config()):
        part.bos_token_id, part.eos_token_id, part.pad_token_id = 1, 2, 0
    return config


def save(name: str, folder: Path) -> Path:
    """Write the folder of a family of `FAMILIES`, with random weights."""
    processor = processor_of(name)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config_of(name, processor.tokenizer), dtype=torch.float32)
    for parameter in model.parameters():  # values that start at 0 or 1 would hide mistakes
        parameter.data += 0.05 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    parts = [part for part in processor.get_attributes() if getattr(processor, part) is not None]
    with patch.object(type(processor), "get_attributes", lambda *_: parts):
        processor.save_pretrained(folder)
    return folder


def picture(seed: int, width: int = 60, height: int = 60) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


OF_TEXT = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")


def inputs_of(name: str, text: str, *seeds: int) -> dict[str, torch.Tensor]:
    """The arguments of transformers' model for a text that follows pictures of these seeds, of two sizes."""
    pictures = [picture(seed, width=60 + 40 * (seed % 2)) for seed in seeds]
    marked = FAMILIES[name].marker * len(pictures) + text
    images = [pictures] if pictures else None
    found = processor_of(name)(text=[marked], images=images, add_special_tokens=False, return_tensors="pt")
    return {**found}


def pictures_of(documents: list[dict[str, torch.Tensor]]) -> Pictures:
    """The pictures of documents, as in a batch: joined along the first dimension, padded with zeros along others."""
    shown = [each for each in documents if "pixel_values" in each]
    values = {}
    for name in shown[0].keys() - {*OF_TEXT}:
        largest = [max(sizes) for sizes in zip(*(each[name].shape[1:] for each in shown), strict=True)]
        values[name] = torch.cat([_padded(each[name], largest) for each in shown])
    return Pictures(values, len(shown))


def _padded(values: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    padded = values.new_zeros(len(values), *sizes)
    padded[tuple(slice(size) for size in values.shape)] = values
    return padded


def blank_of(name: str) -> Pictures:
    """The pictures of a batch without any."""
    return replace(pictures_of([inputs_of(name, "", 9)]), count=0)


def batch_of(documents: list[dict[str, torch.Tensor]], pictures: Pictures) -> Batch:
    """A row of documents, in which every next token is learned."""
    tokens = [each["input_ids"][0] for each in documents]
    labels = [torch.cat([each[1:], each.new_tensor([IGNORE])]) for each in tokens]
    ids = torch.arange(len(tokens)).repeat_interleave(torch.tensor([len(each) for each in tokens]))
    batch = Batch.of(torch.cat(tokens)[None], torch.cat(labels)[None], ids[None])
    return replace(batch, pictures=pictures)
