"""A model of images and text says which of its modules read tokens; all others are not part of the language model."""

import pytest
import torch
from torch import nn

from tune.distributed import repeated_blocks, units_of
from tune.models import build, hf
from tune.parts import language_of, part_of, tower_blocks
from tune.peft import LoRA, add_adapters, untrained_tokens
from tune.quantization import NF4Linear, block_linears
from tune.run import flops_per_token

transformers = pytest.importorskip("transformers")
pytest.importorskip("PIL")

from vision import FAMILIES, config_of, save, tokenizer_of  # noqa: E402

# The modules of transformers that are not the language model: the projector, then the tower.
OTHERS = {
    "llava": (["model.multi_modal_projector"], ["model.vision_tower"]),
    "llava_next": (["model.multi_modal_projector", "model.image_newline"], ["model.vision_tower"]),
    "idefics3": (["model.connector"], ["model.vision_model"]),
    "gemma3": (["model.multi_modal_projector"], ["model.vision_tower"]),
    "qwen2_5_vl": (["model.visual.merger"], ["model.visual"]),
    "qwen3_vl": (["model.visual.merger", "model.visual.deepstack_merger_list"], ["model.visual"]),
    "qwen3_5": (["model.visual.merger"], ["model.visual"]),
    "internvl": (["model.multi_modal_projector"], ["model.vision_tower"]),
    "glm46v": (["model.visual.merger"], ["model.visual"]),
    "gemma4": (["model.embed_vision"], ["model.vision_tower"]),
}


def made(name, **vision):
    config = config_of(name, tokenizer_of(FAMILIES[name]))
    for field, value in vision.items():
        setattr(config.vision_config, field, value)
    with torch.device("meta"):
        return hf(transformers.AutoModelForImageTextToText.from_config(config))


def expected_part(name, family):
    projector, tower = OTHERS[family]
    name = name.removeprefix("body.")
    if name.startswith(tuple(projector)):
        return "projector"
    return "tower" if name.startswith(tuple(tower)) else "language"


@pytest.mark.parametrize("family", FAMILIES)
def test_parts_of_a_model_of_images_and_text(family):
    model = made(family)
    names = [name for name, _ in model.named_parameters()]
    assert {name: part_of(model, name) for name in names} == {name: expected_part(name, family) for name in names}
    assert {part_of(model, name) for name in names} == {"language", "projector", "tower"}
    assert model.embedding in [*language_of(model).modules()]
    language = [name for name in block_linears(model) if name.endswith("_proj")]
    assert language and all("language_model" in name or "text_model" in name for name in block_linears(model))
    assert set(block_linears(model, ["language", "projector", "tower"])) > set(language)


def test_a_model_of_text_is_all_language(checkpoint):
    with torch.device("meta"):
        text = transformers.AutoModelForCausalLM.from_config(transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4))
        models = [build(str(checkpoint)), hf(text), nn.Linear(2, 2)]
    models[-1].tower, models[-1].parts, models[-1].language = "high", ["a"], "en"  # somebody's own names
    for model in models:
        assert language_of(model) is model and not tower_blocks(model)
        assert {part_of(model, name) for name, _ in model.named_modules()} == {"language"}


@pytest.mark.parametrize(
    ("family", "depth", "width"),
    [("qwen2_5_vl", "depth", "intermediate_size"), ("llava", "num_hidden_layers", "intermediate_size")],
)
def test_blocks_are_those_of_the_language_model_if_the_tower_is_larger(family, depth, width):
    model = made(family, **{depth: 5, width: 512})
    layers = language_of(model).layers
    assert repeated_blocks(model) == [*layers] and len(layers) == 2
    assert len(tower_blocks(model)) == 5
    units = units_of(model, repeated_blocks(model))
    assert units == [*layers, *tower_blocks(model), model.embedding, model]


def test_tables_of_positions_are_not_tables_of_tokens(tmp_path):
    """The tower of GLM-4.6V reads the weight of its table without calling it, and it has fewer rows than tokens."""
    save("glm46v", tmp_path)
    model = made("glm46v")
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    assert len(tables) == 2 and model.embedding in tables
    assert [unit for unit in units_of(model, repeated_blocks(model)) if unit in tables] == [model.embedding]
    add_adapters(model, LoRA())
    assert untrained_tokens(model, tmp_path, [3, model.config.vocab_size - 1]) == []


@pytest.mark.parametrize("family", ["llava", "qwen3_vl"])
def test_only_the_language_model_is_quantized(family):
    config = config_of(family, tokenizer_of(FAMILIES[family]))
    config.text_config.hidden_size, config.text_config.intermediate_size, config.text_config.head_dim = 64, 128, 16
    if hasattr(config.vision_config, "out_hidden_size"):
        config.vision_config.out_hidden_size = 64
    config.text_config.rope_parameters["mrope_section"] = [4, 2, 2]
    with torch.device("meta"):
        model = hf(transformers.AutoModelForImageTextToText.from_config(config), quantization="nf4")
    quantized = [name for name, module in model.named_modules() if isinstance(module, NF4Linear)]
    assert len(quantized) == 14 and all(".language_model.layers." in name for name in quantized)


@pytest.mark.parametrize("family", ["llava", "gemma3", "idefics3"])
def test_flops_per_token_are_of_the_language_model(family):
    model = made(family)
    with torch.device("meta"):
        of_text = hf(transformers.AutoModelForCausalLM.from_config(model.config))
    assert flops_per_token(model, 100) == flops_per_token(of_text, 100) > 0
