"""Models of images and text compute the same loss and gradients as in transformers, whatever shares their batch."""

import copy
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers import run_processes
from torch.testing import assert_close

from tune import distributed
from tune.checkpointers import Pretrained, check_forward
from tune.collators import Pictures
from tune.errors import TuneError
from tune.losses import LinearCrossEntropy
from tune.models import build, hf

transformers = pytest.importorskip("transformers")
pytest.importorskip("PIL")

from vision import FAMILIES, LANGUAGE, LLAMA, SIGLIP, batch_of, blank_of, inputs_of, pictures_of, save  # noqa: E402

SHARDED = Path(__file__).parent / "sharded_vision.py"
ALL = ["language", "projector", "tower"]
FAST = ["llava"]
FAMILY = [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in FAMILIES]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder, made = tmp_path_factory.mktemp("vision"), {}

    def folder_of(name):
        if name not in made:
            made[name] = save(name, folder / name)
        return made[name]

    return folder_of


def load(folder, **settings):
    with torch.device("meta"):
        model = hf(str(folder), **settings)
    weights = Pretrained(str(folder), model)
    distributed.parallelize(model, distributed.init("cpu"), dtype="fp32")
    weights.load(model)
    return model


def in_transformers(folder):
    return transformers.AutoModelForImageTextToText.from_pretrained(folder).eval()


def documents_of(name):
    return [
        inputs_of(name, "What is in this image?", 1),
        inputs_of(name, "It is a red square and the blue cat. What is in this?"),
        inputs_of(name, "a cat", 2, 3),
    ]


def loss_of(theirs, documents):
    total = torch.zeros(())
    for each in documents:
        logits = theirs(**each).logits[0, :-1]
        total = total + F.cross_entropy(logits, each["input_ids"][0, 1:], reduction="sum")
    return total


@pytest.mark.parametrize("name", FAMILY)
def test_loss_and_gradients(name, folders):
    ours, theirs = load(folders(name), parts=ALL), in_transformers(folders(name))
    ours.check(blank_of(name))
    documents = documents_of(name)
    expected = loss_of(theirs, documents)
    expected.backward()
    loss = ours(batch_of(documents, pictures_of(documents)), LinearCrossEntropy())
    loss.backward()
    assert_close(loss, expected, rtol=1e-6, atol=0)
    gradients = {name: each.grad for name, each in theirs.named_parameters(remove_duplicate=False)}
    gradients["head.weight"] = theirs.get_output_embeddings().weight.grad
    assert sum(gradients[each] is not None for each in gradients if "vis" in each) > 10
    for each, parameter in ours.named_parameters():
        reference = gradients[each.removeprefix("body.")]
        if reference is None:  # computed and not used, such as layers after the one whose features are used
            assert parameter.grad is None or not parameter.grad.any()
        else:
            assert (parameter.grad - reference).norm() <= 1e-5 * reference.norm() + 1e-5, each


@pytest.mark.parametrize("name", FAMILY)
def test_a_document_computes_the_same_alone_and_with_others(name, folders):
    ours, theirs = load(folders(name)), in_transformers(folders(name))
    ours.check(blank_of(name))
    documents = documents_of(name)
    with torch.no_grad():
        expected = [theirs(**each).logits[0] for each in documents]
        together = ours(batch_of(documents, pictures_of(documents)))[0]
        assert_close(together, torch.cat(expected), atol=1e-5, rtol=1e-5)
        for each, logits in zip(documents, expected, strict=True):
            pictures = pictures_of([each]) if "pixel_values" in each else blank_of(name)
            assert_close(ours(batch_of([each], pictures))[0], logits, atol=1e-5, rtol=1e-5)
        turned = ours(batch_of(documents[::-1], pictures_of(documents[::-1])))[0]
        assert_close(turned, torch.cat(expected[::-1]), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", FAMILY)
def test_without_pictures_all_that_is_trained_has_a_gradient_of_zero(name, folders):
    """All processes sum the same gradients, whichever of them has pictures."""
    ours = load(folders(name), parts=ALL)
    with_pictures, without = documents_of(name), [inputs_of(name, "It is a red square")]
    ours(batch_of(with_pictures, pictures_of(with_pictures)), LinearCrossEntropy()).backward()
    present = {each for each, parameter in ours.named_parameters() if parameter.grad is not None}
    ours.zero_grad()
    loss = ours(batch_of(without, blank_of(name)), LinearCrossEntropy())
    loss.backward()
    assert {each for each, parameter in ours.named_parameters() if parameter.grad is not None} == present
    for each, parameter in ours.named_parameters():
        if ours.part_of(each) != "language" and parameter.grad is not None:
            assert not parameter.grad.any(), each
    assert_close(loss, loss_of(in_transformers(folders(name)), without), rtol=1e-6, atol=0)


@pytest.mark.weekly
@pytest.mark.timeout(900)  # a process that waits for another fails
@pytest.mark.parametrize(("tp", "names"), [(1, [*FAMILIES]), (2, ["llava", "gemma3"])], ids=["fsdp", "tp"])
def test_pictures_on_one_process_only(tp, names, folders):
    arguments = [argument for name in names for argument in (name, str(folders(name)))]
    assert "2 processes agree" in run_processes(SHARDED, 2, str(tp), *arguments)


EXPERTS = {
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 1,
    "intermediate_size_mlp": 48,
}
CONVOLUTION = {"layer_types": ["conv", "full_attention"], "block_dim": 32, "conv_dim": 32, "block_ff_dim": 48}
PIXELS = torch.randn(1, 3, 56, 56, generator=torch.Generator().manual_seed(0))
# Their processors need more packages. Config, its fields, the arguments for a picture, the number of its placeholders.
OTHERS = {
    "llama4": (
        "Llama4Config",
        {
            "text_config": LANGUAGE | EXPERTS | {"attention_chunk_size": 64},
            "vision_config": SIGLIP | {
                "intermediate_size": 128, "vision_output_dim": 32, "projector_input_dim": 32,
                "projector_output_dim": 32, "pixel_shuffle_ratio": 0.5,
            },
        },
        {"pixel_values": PIXELS},
        4,
    ),
    "llava_onevision": (
        "LlavaOnevisionConfig",
        {
            "text_config": LANGUAGE | {"model_type": "qwen2"},
            "vision_config": SIGLIP | {"model_type": "siglip_vision_model"},
            "vision_feature_layer": -1, "image_grid_pinpoints": [[56, 112], [112, 56]],
        },
        {
            "pixel_values": torch.stack([PIXELS, -PIXELS, 2 * PIXELS], dim=1),
            "image_sizes": torch.tensor([[56, 112]]), "batch_num_images": torch.tensor([1]),
        },
        52,
    ),
    "mistral3": (
        "Mistral3Config",
        {
            "text_config": LANGUAGE | {"model_type": "mistral"},
            "vision_config": SIGLIP | {"model_type": "pixtral", "head_dim": 8, "image_size": 112},
            "vision_feature_layer": -1, "spatial_merge_size": 2,
        },
        {"pixel_values": PIXELS, "image_sizes": torch.tensor([[56, 56]])},
        4,
    ),
    "smolvlm": (
        "SmolVLMConfig",
        {"text_config": LLAMA, "vision_config": SIGLIP, "scale_factor": 2, "pad_token_id": 0},
        {"pixel_values": PIXELS[None], "pixel_attention_mask": torch.ones(1, 1, 56, 56, dtype=torch.long)},
        4,
    ),
    "lfm2_vl": (
        "Lfm2VlConfig",
        {
            "text_config": LANGUAGE | CONVOLUTION | {"model_type": "lfm2"},
            "vision_config": SIGLIP | {"model_type": "siglip2_vision_model", "num_patches": 64, "patch_size": 16},
            "projector_hidden_size": 32,
        },
        {
            "pixel_values": PIXELS.flatten()[: 16 * 3 * 16 * 16 // 2].repeat(2).view(1, 16, -1),
            "pixel_attention_mask": torch.ones(1, 16, dtype=torch.long), "spatial_shapes": torch.tensor([[4, 4]]),
        },
        4,
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_loss_and_gradients_of_random_arrays(name):
    config_class, fields, values, count = OTHERS[name]
    config = getattr(transformers, config_class)(**fields)
    config.get_text_config().vocab_size = 320
    placeholder = "image_token_id" if hasattr(config, "image_token_id") else "image_token_index"
    setattr(config, placeholder, 300)
    torch.manual_seed(0)
    theirs = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    for parameter in theirs.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    ours = hf(theirs, parts=ALL)
    ours.check(Pictures(values, 0))
    documents = []
    for text in torch.randint(5, 290, (3, 12)):
        documents.append({"input_ids": text[None]})
    for each in (documents[0], documents[2]):
        text = each["input_ids"][0]
        shown = torch.cat([text[:4], text.new_full((count,), 300), text[4:]])
        each |= {**values, "input_ids": shown[None]}
    expected = loss_of(theirs, documents)
    expected.backward()
    gradients = {each: parameter.grad for each, parameter in theirs.named_parameters()}
    theirs.zero_grad()
    loss = ours(batch_of(documents, pictures_of([documents[0], documents[2]])), LinearCrossEntropy())
    loss.backward()
    assert_close(loss, expected, rtol=1e-6, atol=0)
    for each, parameter in theirs.named_parameters():
        reference = gradients[each]
        if reference is None:
            assert parameter.grad is None or not parameter.grad.any()
        else:
            assert (parameter.grad - reference).norm() <= 1e-5 * reference.norm() + 2e-5, each


MLLAMA = {
    "text_config": {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "cross_attention_layers": [1],
    },
    "vision_config": {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_global_layers": 1,
        "attention_heads": 4, "image_size": 56, "patch_size": 14, "vision_output_dim": 64,
        "intermediate_layers_indices": [0],
    },
}  # fmt: skip
GEMMA4_UNIFIED = {"text_config": {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 300}}


@pytest.mark.parametrize(
    ("config", "fields", "why"),
    [
        ("MllamaConfig", MLLAMA, "mm_encoder_outputs"),
        ("Gemma4UnifiedConfig", GEMMA4_UNIFIED, "no tower"),
        ("LlamaConfig", LLAMA, "only text"),
    ],
)
def test_models_that_are_trained_on_text_only(config, fields, why, tmp_path):
    getattr(transformers, config)(**fields).save_pretrained(tmp_path)
    (tmp_path / "processor_config.json").write_text("{}")
    with torch.device("meta"):
        model = hf(str(tmp_path))
        with pytest.raises(TuneError, match=r"model\.parts: tower"):
            hf(str(tmp_path), parts=["language", "tower"])
    assert model.tower is None and why in model.no_pictures
    with pytest.raises(TuneError, match=why):
        model.check(blank_of("llava"))
    with pytest.raises(TuneError, match=why):
        model(batch_of([inputs_of("llava", "a cat")], blank_of("llava")))


def test_an_encoder_and_decoder_is_refused(tmp_path):
    transformers.Pix2StructConfig().save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text("{}")
    with torch.device("meta"), pytest.raises(TuneError, match="Pix2Struct"):
        hf(str(tmp_path))


@pytest.mark.parametrize("name", FAMILY)
def test_tokens_after_a_cache(name, folders):
    """The positions of tokens after a picture depend on its document, and a model keeps only those of the last one."""
    ours, theirs = load(folders(name)).eval(), in_transformers(folders(name))
    documents = [inputs_of(name, "What is in this image?", 1), inputs_of(name, "It is", 2, 3), inputs_of(name, "a cat")]
    more = torch.tensor([[70, 80, 90], [75, 85, 95], [71, 81, 91]])
    cache, logits = ours.new_cache(3, 500), []
    with torch.no_grad():
        for row, each in enumerate(documents):
            pictures = pictures_of([each]) if "pixel_values" in each else None
            batch = batch_of([each], pictures)
            cache.start([row], batch, torch.device("cpu"))
            ours(batch, cache=cache)
        lengths = torch.tensor([each["input_ids"].shape[1] for each in documents])
        for step in range(3):
            positions = (lengths + step)[:, None]
            cache.extend(positions, 500)
            logits.append(ours(more[:, step : step + 1], positions=positions, cache=cache))
        for row, each in enumerate(documents):
            added = {"input_ids": torch.cat([each["input_ids"], more[row : row + 1]], dim=1)}
            added |= {kind: F.pad(each[kind], (0, 3)) for kind in each if kind.endswith("token_type_ids")}
            added |= {"attention_mask": torch.ones_like(added["input_ids"])}
            expected = theirs(**each | added).logits[0, -3:]
            assert_close(torch.cat(logits, dim=1)[row], expected, atol=1e-5, rtol=1e-5)


def test_a_copy_and_types_of_weights(folders):
    model = load(folders("llava"), parts=ALL)
    documents = documents_of("llava")
    expected = model(batch_of(documents, pictures_of(documents)))
    assert torch.equal(copy.deepcopy(model)(batch_of(documents, pictures_of(documents))), expected)
    rounded = copy.deepcopy(model).bfloat16()(batch_of(documents, pictures_of(documents)))
    assert rounded.dtype == torch.bfloat16
    assert (rounded - expected).norm() <= 0.02 * expected.norm()


def test_videos_and_several_prompts_are_refused(folders):
    model = load(folders("llava"))
    videos = Pictures({"pixel_values_videos": torch.zeros(1, 3, 56, 56)}, 1)
    with pytest.raises(TuneError, match="pixel_values_videos"):
        model(batch_of([inputs_of("llava", "a cat")], videos))
    documents = documents_of("llava")
    with pytest.raises(TuneError, match="3 prompts"):
        model(batch_of(documents, pictures_of(documents)), cache=model.new_cache(1, 100))


def test_a_folder_without_a_processor_is_a_model_of_text(folders, tmp_path):
    for file in ("config.json", "model.safetensors"):
        shutil.copy(folders("qwen3_5") / file, tmp_path)
    with torch.device("meta"):
        assert hf(str(tmp_path)).tower is None
        whole = hf(str(folders("qwen3_5")))
    parts = {whole.part_of(name) for name, each in whole.named_parameters() if each.requires_grad}
    assert parts == {"language", "projector"}  # by default
    with pytest.raises(TuneError, match=r"model\.parts.*tune\.models\.hf"):
        build(str(folders("qwen3_5")), parts=["tower"])
    with pytest.raises(TuneError, match=r"tune\.models\.hf"):
        check_forward(build(str(folders("qwen3_5"))), blank_of("llava"))
    with pytest.raises(TuneError, match=r"model\.parts is empty"):
        hf(str(folders("qwen3_5")), parts=[])


def test_a_projector_of_zeros_is_told(folders):
    model = load(folders("gemma3"))
    model.body.model.multi_modal_projector.mm_input_projection_weight.data.zero_()
    with pytest.warns(UserWarning, match="projector"):
        model.check(blank_of("gemma3"))


def test_a_picture_that_attends_to_later_tokens_is_refused(folders, monkeypatch):
    model = load(folders("gemma3"))
    monkeypatch.setattr(model, "_shown", lambda *given: shown(*given) | {"token_type_ids": torch.ones_like(given[0])})
    shown = type(model)._shown.__get__(model)
    with pytest.raises(TuneError, match="picture attends to later tokens"):
        model.check(blank_of("gemma3"))
