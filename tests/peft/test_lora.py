"""Adapters match PEFT: same values, same gradients, same files."""

import json
import shutil
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import save_checkpoint, weekly_but
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

from tune import distributed
from tune.checkpointers import load_model, writing
from tune.errors import TuneError
from tune.models import hf
from tune.peft import (
    LoRA,
    adapter,
    add_adapters,
    export_adapter,
    load_adapter,
    merge,
    open_model,
    read_adapter,
    switched_off,
)
from tune.tokenizers import Tokenizer

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

TOKENS = torch.arange(80).view(2, 40)
KINDS = {
    "all linear": LoRA(rank=4, alpha=8),
    "names on disk": LoRA(rank=4, alpha=8, target_modules=["q_proj", "v_proj"]),
    "our names": LoRA(rank=4, alpha=8, target_modules=["query", "down"]),
    "regular expression": LoRA(rank=4, alpha=8, target_modules=r".*layers\.[02]\..*(gate|o)_proj"),
    "rank-stabilized": LoRA(rank=4, alpha=8, rank_stabilized=True),
    "patterns": LoRA(
        rank=4, alpha=8, rank_pattern={"q_proj": 2, "down": 8}, alpha_pattern={"layers.1.mlp.up_proj": 32}
    ),
    "dora": LoRA(rank=4, alpha=8, dora=True),
    "pissa": LoRA(rank=4, alpha=8, init="pissa", dora=True),
    "olora": LoRA(rank=4, alpha=8, init="olora", rank_stabilized=True, rank_pattern={"q_proj": 2}),
    "norms whole": LoRA(rank=4, alpha=8, modules_to_save=["norm", "input_layernorm"]),
    "embedding whole": LoRA(rank=4, alpha=8, modules_to_save=["embed_tokens"]),
    "some tokens": LoRA(rank=4, alpha=8, trainable_tokens=[7, 3, 299]),
    "some tokens of the embedding": LoRA(rank=4, alpha=8, trainable_tokens={"embed_tokens": [7, 3, 299]}),
}
UNTIED = {
    "head": LoRA(rank=4, alpha=8, target_modules=["lm_head", "q_proj"]),
    "head with dora": LoRA(rank=4, alpha=8, target_modules=["lm_head"], dora=True),
    "embedding": LoRA(rank=4, alpha=8, target_modules=["embed_tokens"], rank_stabilized=True),
    "embedding and head": LoRA(rank=4, alpha=8, target_modules=["embed_tokens", "lm_head"]),
    "head whole": LoRA(rank=4, alpha=8, modules_to_save=["lm_head", "embed_tokens"]),
}


@pytest.fixture(params=KINDS | UNTIED)
def lora(request):
    return (KINDS | UNTIED)[request.param]


def randomized(model):
    """Randomize the adapters of a model; new ones change nothing."""
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


def exported(model, lora, folder, base):
    export_adapter(model, str(folder), world=distributed.init("cpu"), base=str(base), tokenizer=Tokenizer(str(base)))
    return folder


def test_new_adapter_changes_nothing(checkpoint, lora):
    model = load_model(str(checkpoint))
    before = model(TOKENS)
    add_adapters(model, lora)
    assert_close(model(TOKENS), before, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("is_training", [True, False])
def test_switched_off_restores_the_training_mode(is_training, checkpoint):
    model = load_model(str(checkpoint)).train(is_training)
    add_adapters(model, LoRA(rank=4))
    with switched_off(model):
        assert not model.training
    assert {module.training for module in model.modules()} == {is_training}


@pytest.mark.parametrize("pattern", ["proj", "q_proj", "self_attn.q_proj", r".*1.*q_proj", "1.self_attn.q_proj"])
def test_rank_patterns_match_the_same_layers_as_in_peft(pattern):
    lora = LoRA(rank=4, alpha=8, rank_pattern={pattern: 2}, alpha_pattern={pattern: 3})
    for name in ("model.layers.0.self_attn.q_proj", "model.layers.11.self_attn.q_proj", "model.layers.1.mlp.up_proj"):
        is_meant = peft.utils.other.get_pattern_key([pattern], name) == pattern
        assert lora.at(name) == ((2, 3) if is_meant else (4, 8))


def test_initial_values_match_peft_and_dropout_is_saved(checkpoint, tmp_path):
    base = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    modules = ["q_proj", "down_proj", "embed_tokens"]
    settings = peft.LoraConfig(r=16, target_modules=modules)
    theirs = {name.replace(".default", ""): p for name, p in peft.get_peft_model(base, settings).named_parameters()}
    model, lora = load_model(str(checkpoint)), LoRA(rank=16, dropout=0.25, target_modules=modules)
    add_adapters(model, lora)
    first, second = (block.attention.query.lora_a for block in model.blocks[:2])
    assert not torch.equal(first, second)
    exported(model, lora, tmp_path, checkpoint)
    for name, tensor in load_file(tmp_path / "adapter_model.safetensors").items():
        start = theirs[name].detach()
        assert_close(tensor.std(), start.std(), rtol=0.1, atol=0)
        if "embedding" not in name:  # it is normally distributed, so its maximum is random
            assert_close(tensor.abs().max(), start.abs().max(), rtol=0.05, atol=0)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["lora_dropout"] == 0.25
    assert read_adapter(str(tmp_path)).dropout == 0.25


@pytest.mark.parametrize("folder", weekly_but(["checkpoint"], ["checkpoint", "tied_checkpoint", "biased_checkpoint"]))
def test_peft_loads_our_adapter_with_the_same_results(folder, lora, tmp_path, request):
    if folder == "tied_checkpoint" and lora in UNTIED.values():
        pytest.skip("a tied head is refused (test_adapters_of_a_tied_head_are_refused)")
    folder = request.getfixturevalue(folder)
    ours = load_model(str(folder))
    base_logits = ours(TOKENS)
    add_adapters(ours, lora)
    logits = randomized(ours)(TOKENS)
    exported(ours, lora, tmp_path / "adapter", folder)

    base = transformers.AutoModelForCausalLM.from_pretrained(folder)
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapter", is_trainable=True)
    assert_close(theirs(TOKENS).logits, logits, atol=1e-5, rtol=1e-5)
    assert (logits - base_logits).abs().max() > 0.01

    if lora.init != "default":
        return  # then half of what PEFT loads was frozen in our model
    logits.square().mean().backward()
    theirs(TOKENS).logits.square().mean().backward()
    gradients = {name: p.grad for name, p in theirs.named_parameters() if p.requires_grad}
    ours_gradients = [p.grad.norm() for p in ours.parameters() if p.requires_grad]
    assert len(gradients) == len(ours_gradients)
    expected = sorted(gradient.norm() for gradient in gradients.values())
    assert_close(torch.stack(sorted(ours_gradients)), torch.stack(expected), atol=1e-7, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("folder", "settings"),
    [
        ("checkpoint", {"rank_pattern": {"up_proj": 2}}),
        ("checkpoint", {"use_dora": True}),
        ("checkpoint", {"init_lora_weights": "gaussian"}),
        ("checkpoint", {"r": 40}),  # more than the width of the keys
        ("checkpoint", {"target_modules": ["embed_tokens", "lm_head", "q_proj"]}),
        ("checkpoint", {"modules_to_save": ["lm_head", "embed_tokens"]}),
        ("checkpoint", {"trainable_token_indices": {"embed_tokens": [5, 9], "lm_head": [5, 9]}}),
        ("tied_checkpoint", {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}),
        ("checkpoint", {"trainable_token_indices": [5, 9]}),  # only of the embedding
        ("checkpoint", {"trainable_token_indices": {"embed_tokens": [5, 9]}}),
        ("checkpoint", {"trainable_token_indices": {"lm_head": [5, 9]}}),
        ("checkpoint", {"trainable_token_indices": {"model.embed_tokens": [5, 9, 11], "lm_head": [9, 7]}}),
        ("tied_checkpoint", {"trainable_token_indices": [5, 9]}),
        ("tied_checkpoint", {"trainable_token_indices": {"embed_tokens": [5, 9]}}),
        ("tied_checkpoint", {"trainable_token_indices": {"embed_tokens": [5, 9], "lm_head": [5, 9]}}),
    ],
)
def test_adapter_written_by_peft_gives_the_same_results(folder, settings, tmp_path, request):
    folder = request.getfixturevalue(folder)
    base = transformers.AutoModelForCausalLM.from_pretrained(folder)
    config = peft.LoraConfig(**{"r": 4, "lora_alpha": 6, "target_modules": ["k_proj", "up_proj"], **settings})
    theirs = randomized(peft.get_peft_model(base, config))
    theirs.save_pretrained(tmp_path / "adapter")
    expected = theirs(TOKENS).logits
    ours = load_model(str(folder))
    add_adapters(ours, read_adapter(str(tmp_path / "adapter")))
    load_adapter(ours, str(tmp_path / "adapter"))
    assert_close(ours(TOKENS), expected, atol=1e-5, rtol=1e-5)
    merge(folder, tmp_path / "adapter", tmp_path / "merged")
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert_close(merged(TOKENS).logits, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_merged_weight_is_rounded_once(checkpoint, tmp_path):
    """The base is in bf16; weight, product and sum are computed in fp32."""
    base = transformers.AutoModelForCausalLM.from_pretrained(checkpoint).bfloat16()
    base.save_pretrained(tmp_path / "base")
    config = peft.LoraConfig(r=4, lora_alpha=6, init_lora_weights=False, target_modules="all-linear")
    adapted = peft.get_peft_model(base.float(), config)
    adapted.save_pretrained(tmp_path / "adapter")
    merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged")
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    for name, exact in adapted.merge_and_unload().state_dict().items():
        assert merged[name].dtype == torch.bfloat16
        assert ((merged[name].float() - exact).abs() <= 2**-8 * exact.abs() + 1e-7).all(), name


def test_embedding_trained_separately_from_its_tied_head_is_refused(tied_checkpoint, tmp_path):
    """PEFT trains it separately by default and leaves the head unchanged."""
    base = transformers.AutoModelForCausalLM.from_pretrained(tied_checkpoint)
    config = peft.LoraConfig(r=4, target_modules=["k_proj"], modules_to_save=["embed_tokens"])
    peft.get_peft_model(base, config).save_pretrained(tmp_path / "adapter")
    ours = load_model(str(tied_checkpoint))
    add_adapters(ours, read_adapter(str(tmp_path / "adapter")))
    with pytest.raises(TuneError, match="separately from the output head"):
        load_adapter(ours, str(tmp_path / "adapter"))
    with pytest.raises(TuneError, match="separately from the output head"):
        merge(tied_checkpoint, tmp_path / "adapter", tmp_path / "merged")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa' subtracted the adapter's start"),
        ({"init_lora_weights": "olora"}, "path_initial_model_for_weight_conversion"),
        ({"alora_invocation_tokens": [5, 6]}, r"alora_invocation_tokens=\[5, 6\] is not supported"),
    ],
)
def test_adapters_with_other_formulas_are_refused(checkpoint, settings, message, tmp_path):
    """They are refused although their tensors would fit."""
    base = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    config = peft.LoraConfig(r=4, target_modules=["k_proj"], task_type="CAUSAL_LM", **settings)
    peft.get_peft_model(base, config).save_pretrained(tmp_path / "adapter")
    with pytest.raises(TuneError, match=message):
        read_adapter(str(tmp_path / "adapter"))
    with pytest.raises(TuneError, match=message):
        merge(checkpoint, tmp_path / "adapter", tmp_path / "merged")


def test_adapter_trained_on_another_embedding_is_refused(checkpoint, tmp_path):
    base = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    base.get_input_embeddings().weight.data[3] += 1
    config = peft.LoraConfig(r=4, target_modules=["embed_tokens"])
    peft.get_peft_model(base, config).save_pretrained(tmp_path)
    ours = load_model(str(checkpoint))
    add_adapters(ours, read_adapter(str(tmp_path)))
    with pytest.raises(TuneError, match=r"embed_tokens.base_layer.weight differs from model.path"):
        load_adapter(ours, str(tmp_path))


def test_adapter_of_another_embedding_is_not_merged(checkpoint, tmp_path):
    """PEFT saves the embedding with an adapter of it. `merge` reads the base from disk, also in another dtype."""
    for name, change in {"same": 0, "other": 1}.items():
        base = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
        base.get_input_embeddings().weight.data[3] += change
        config = peft.LoraConfig(r=4, target_modules=["embed_tokens"])
        peft.get_peft_model(base, config).save_pretrained(tmp_path / name)
    merge(checkpoint, tmp_path / "same", tmp_path / "merged")
    with pytest.raises(TuneError, match=r"embed_tokens.base_layer.weight differs from model.path"):
        merge(checkpoint, tmp_path / "other", tmp_path / "wrong")
    assert not (tmp_path / "wrong").exists()


def resized_by_peft(checkpoint, folder, **settings):
    """Train an adapter with two more tokens in transformers, and save it and its base; return the trained model."""
    base = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    base.resize_token_embeddings(302, mean_resizing=False)
    shutil.copytree(checkpoint, folder / "resized")
    base.save_pretrained(folder / "resized")
    base.config._name_or_path = base.name_or_path = str(checkpoint)
    theirs = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["q_proj"], **settings)).eval()
    randomized(theirs)
    theirs.save_pretrained(folder / "adapter")
    return theirs


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")
def test_modules_that_peft_saves_twice_are_merged(checkpoint, tmp_path):
    """After the vocabulary was resized, PEFT also saves the parts of its wrapper around whole modules."""
    theirs = resized_by_peft(checkpoint, tmp_path, modules_to_save=["embed_tokens", "lm_head"])
    stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert "base_model.model.lm_head.original_module.weight" in stored
    merge(tmp_path / "resized", tmp_path / "adapter", tmp_path / "merged")
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    tokens = torch.tensor([[300, 7, 301, 8]])
    with torch.no_grad():
        assert_close(merged(tokens).logits, theirs(tokens).logits, rtol=1e-5, atol=1e-5)
    with pytest.raises(TuneError, match="vocabulary of 302 tokens, and the model has 300"):
        merge(checkpoint, tmp_path / "adapter", tmp_path / "wrong")


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")
def test_matrices_of_a_resized_vocabulary_must_be_those_of_the_base(checkpoint, tmp_path):
    """PEFT saves them with an adapter of other layers. The values of the base are accepted."""
    theirs = resized_by_peft(checkpoint, tmp_path)
    other = Path(shutil.copytree(tmp_path / "resized", tmp_path / "other"))
    tensors = load_file(other / "model.safetensors")
    tensors["lm_head.weight"][301] += 1
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    for base in (checkpoint, other):
        with pytest.raises(TuneError, match=r"has base_model.model.lm_head.weight.*merge_and_unload"):
            merge(base, tmp_path / "adapter", tmp_path / "wrong")
    merge(tmp_path / "resized", tmp_path / "adapter", tmp_path / "merged")
    tokens = torch.tensor([[300, 7, 301, 8]])
    expected = theirs(tokens).logits
    assert_close(load_model(tmp_path / "merged")(tokens), expected, rtol=1e-5, atol=1e-5)
    assert_close(
        open_model(tmp_path / "resized", [tmp_path / "adapter"]).load()(tokens), expected, rtol=1e-5, atol=1e-5
    )


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")
def test_base_weight_in_the_wrapper_of_peft_is_compared(checkpoint, tmp_path):
    """It has no effect, since the trained weight replaces it, but shows which base was trained."""
    resized_by_peft(checkpoint, tmp_path, modules_to_save=["embed_tokens", "lm_head"])
    other = Path(shutil.copytree(tmp_path / "resized", tmp_path / "other"))
    tensors = load_file(other / "model.safetensors")
    tensors["lm_head.weight"][301] += 1
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    for way in (
        lambda base: merge(base, tmp_path / "adapter", tmp_path / f"merged into {base.name}"),
        lambda base: open_model(base, [tmp_path / "adapter"]).load(),
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            way(tmp_path / "resized")
        with pytest.warns(UserWarning, match=r"another lm_head\.weight"):
            way(other)


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_pissa_and_olora_start_like_peft(checkpoint, init):
    """We keep the base and subtract the start, PEFT changes the base; the gradients are equal."""
    base = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    settings = peft.LoraConfig(r=4, lora_alpha=6, target_modules=["q_proj", "down_proj"], init_lora_weights=init)
    theirs = peft.get_peft_model(base, settings)
    ours = load_model(str(checkpoint))
    add_adapters(ours, LoRA(rank=4, alpha=6, target_modules=["q_proj", "down_proj"], init=init))
    ours(TOKENS).square().mean().backward()
    theirs(TOKENS).logits.square().mean().backward()
    expected = [p.grad for p in theirs.parameters() if p.requires_grad]
    gradients = [p.grad for p in ours.parameters() if p.requires_grad]
    # Singular vectors are determined up to their signs.
    sizes, expected_sizes = ([gradient.abs() for gradient in values] for values in (gradients, expected))
    assert sizes[0].max() > 1e-4
    assert_close(sizes, expected_sizes, atol=1e-6, rtol=1e-3)


def test_settings_that_contradict_an_existing_adapter_are_refused(checkpoint, tmp_path):
    model, lora = load_model(str(checkpoint)), LoRA(rank=4)
    add_adapters(model, lora)
    folder = str(exported(model, lora, tmp_path / "adapter", checkpoint))
    assert adapter(folder).rank == adapter(folder, rank=4).rank == 4
    assert adapter(folder, dropout=0.1).dropout == 0.1
    with pytest.raises(TuneError, match=r"Remove rank=8 \(the adapter has 4\), dora=True"):
        adapter(folder, rank=8, dora=True)


def test_merged_model_gives_the_logits_of_the_adapter(checkpoint, lora, tmp_path):
    model = load_model(str(checkpoint))
    add_adapters(model, lora)
    logits = randomized(model)(TOKENS)
    exported(model, lora, tmp_path / "adapter", checkpoint)
    merge(str(checkpoint), str(tmp_path / "adapter"), str(tmp_path / "merged"))
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert_close(merged(TOKENS).logits, logits, atol=1e-5, rtol=1e-5)
    assert (tmp_path / "merged" / "tokenizer.json").exists()


def test_merging_into_another_base_is_refused(checkpoint, tmp_path):
    model, lora = load_model(str(checkpoint)), LoRA(rank=4)
    add_adapters(model, lora)
    adapter = str(exported(model, lora, tmp_path / "adapter", checkpoint))
    save_checkpoint(tmp_path / "wider", hidden_size=96)
    with pytest.raises(TuneError, match=r"down_proj.lora_B.weight has shape \[64, 4\], this model needs \[96, 4\]"):
        merge(str(tmp_path / "wider"), adapter, str(tmp_path / "out"))
    save_checkpoint(tmp_path / "shallower", num_hidden_layers=2)
    with pytest.raises(TuneError, match=r"not known: .*model\.layers\.2\."):
        merge(str(tmp_path / "shallower"), adapter, str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "lora", [LoRA(rank=16), LoRA(rank=16, rank_stabilized=True), LoRA(rank=16, init="pissa", dora=True)]
)
def test_rank_is_limited_to_the_width_of_a_layer(lora, tmp_path):
    """Such as the decay and strength projections of Qwen3.5's delta nets, with one output per value head."""
    base = save_checkpoint(tmp_path / "base", num_key_value_heads=1, head_dim=8)
    model = load_model(str(base))
    adapted = add_adapters(model, lora)
    assert "attention.key     x 3    rank 8 (the layer's width)" in adapted.table()
    assert "attention.query   x 3    rank 16\n" in adapted.table()
    key, query = (getattr(model.blocks[0].attention, kind) for kind in ("key", "query"))
    assert key.lora_a.shape == (8, 64) and key.scaling == query.scaling
    logits = randomized(model)(TOKENS)
    exported(model, lora, tmp_path / "adapter", base)
    theirs = peft.PeftModel.from_pretrained(
        transformers.AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapter"
    )
    assert_close(theirs(TOKENS).logits, logits, atol=1e-5, rtol=1e-5)
    merge(base, tmp_path / "adapter", tmp_path / "merged")
    assert_close(load_model(str(tmp_path / "merged"))(TOKENS), logits, atol=5e-5, rtol=1e-5)
    if lora.init == "default":
        again = load_model(str(base))
        add_adapters(again, read_adapter(str(tmp_path / "adapter")))
        load_adapter(again, str(tmp_path / "adapter"))
        assert_close(again(TOKENS), logits)


def test_transformers_model_can_be_adapted(checkpoint):
    base = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    before = base(TOKENS).logits
    adapted = add_adapters(base, LoRA(rank=2, target_modules=["q_proj"]))
    assert list(adapted.layers) == [f"model.layers.{i}.self_attn.q_proj" for i in range(3)]
    assert_close(base(TOKENS).logits, before)
    assert {name.rpartition(".")[2] for name, p in base.named_parameters() if p.requires_grad} == {"lora_a", "lora_b"}


def test_trainable_parameters_are_counted(checkpoint):
    adapted = add_adapters(load_model(str(checkpoint)), LoRA(rank=4, target_modules=["q_proj"]))
    assert adapted.trainable == 3 * 4 * (64 + 64)
    assert "blocks.*.attention.query  x 3    rank 4" in adapted.table()


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        (LoRA(target_modules=["q_prj"]), "'q_prj' matches no layer. Did you mean 'q_proj'?"),
        (LoRA(target_modules=r".*\.nothing"), "matches no layer"),
        (
            LoRA(target_modules="q_proj"),
            "A list has names of layers; a string is a regular expression for whole names.",
        ),
        (
            LoRA(target_modules=["input_layernorm"]),
            "To train other kinds of modules in full, use adapter.modules_to_save. Known names: down, down_proj",
        ),
        (
            LoRA(target_modules=["embed_tokens"], dora=True),
            "is an embedding, which dora=true does not support",
        ),
        (LoRA(modules_to_save=["nrm"]), "modules_to_save: 'nrm' matches no layer. Did you mean 'norm'?"),
        (LoRA(modules_to_save=["mlp"]), "'mlp' matches no layer"),
        (LoRA(modules_to_save=["q_proj"]), "query also has an adapter (target_modules); choose one"),
        (LoRA(trainable_tokens=[5, 300]), "300 is not a row of the embedding, which has 300"),
        (LoRA(trainable_tokens=[5, 5]), "listed twice"),
        (LoRA(trainable_tokens={"embed_tokns": [5]}), "'embed_tokns' matches no layer. Did you mean 'embed_tokens'?"),
        (LoRA(trainable_tokens={"lm_head": [5, 300]}), "300 is not a row of the embedding, which has 300"),
        (LoRA(trainable_tokens=[5], modules_to_save=["lm_head"]), "is already trained in another way"),
        (LoRA(rank=65), "65 is more than"),
        (LoRA(rank_pattern={"q_proj": 65}), "65 is more than"),
    ],
)
def test_unsupported_adapters_are_refused(checkpoint, lora, message):
    with pytest.raises(TuneError) as error:
        add_adapters(load_model(str(checkpoint)), lora)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        (LoRA(target_modules=["embed_tokens"]), "is both embedding and output head"),
        (LoRA(target_modules=["lm_head"]), r"Train it in full, adapter.modules_to_save=\[model.embed_tokens\]"),
        (LoRA(modules_to_save=["lm_head"]), r"lm_head is both .* adapter.modules_to_save=\[model.embed_tokens\]"),
    ],
)
def test_adapters_of_a_tied_head_are_refused(tied_checkpoint, lora, message):
    with pytest.raises(TuneError, match=message):
        add_adapters(load_model(str(tied_checkpoint)), lora)


def test_full_disk_while_writing_an_adapter(checkpoint, tmp_path, monkeypatch):
    def full(*arguments, **keywords):
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    model, lora = load_model(str(checkpoint)), LoRA(rank=4)
    add_adapters(model, lora)
    monkeypatch.setattr(writing, "save_file", full)
    (tmp_path / "checkpoints" / "step-00000001").mkdir(parents=True)
    with pytest.raises(TuneError, match=rf"the adapter could not be written to {tmp_path}: .*No space .* output_dir="):
        exported(model, lora, tmp_path / "adapter", checkpoint)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints"]


def test_adapter_for_another_model_is_refused(checkpoint, tied_checkpoint, tmp_path):
    model, lora = load_model(str(checkpoint)), LoRA(rank=4)
    add_adapters(model, lora)
    exported(model, lora, tmp_path / "adapter", checkpoint)
    other = load_model(str(tied_checkpoint))
    add_adapters(other, LoRA(rank=2))
    both = r"it was trained on .*llama.*, not on .*qwen3"
    with pytest.raises(TuneError, match=rf"(?s)is for another model: {both}.*Use that model.*has shape"):
        load_adapter(other, str(tmp_path / "adapter"))
    same_shapes = save_checkpoint(tmp_path / "mistral", "MistralConfig")
    with pytest.raises(TuneError, match=r"(?s)is for another model: .* model_type: llama there, mistral here"):
        merge(same_shapes, tmp_path / "adapter", tmp_path / "merged")
    with pytest.raises(
        TuneError, match=r"adapter\.path: .*adapter does not fit this model: .* no layer\. Use the model"
    ):
        add_adapters(torch.nn.Sequential(torch.nn.Linear(4, 4)), read_adapter(str(tmp_path / "adapter")))
    fields = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(fields | {"bias": "all"}))
    with pytest.raises(TuneError, match="bias='all' is not supported"):
        read_adapter(str(tmp_path / "adapter"))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{", r"adapter_config\.json is not valid JSON: Expecting property name"),
        ('{"peft_type": "LORA", "r": 4}', r"adapter_config\.json has no lora_alpha and no target_modules"),
        ('{"peft_type": "LORA", "r": "4"}', r"adapter_config\.json: r: '4'"),
        ('{"peft_type": "LORA", "lora_alpha": "x"}', r"adapter_config\.json: lora_alpha: 'x'"),
        ('{"peft_type": "LORA", "target_modules": 3}', r"adapter_config\.json: target_modules: 3"),
        ('{"peft_type": "LORA", "target_modules": {"q_proj": 1}}', r"adapter_config\.json: target_modules: "),
        ('{"peft_type": "LORA", "rank_pattern": {"q((": 4}}', r"adapter_config\.json: rank_pattern: 'q\(\('"),
        ('{"peft_type": "LORA", "trainable_token_indices": ["x"]}', r"json: trainable_token_indices: .*'x'"),
        ('{"peft_type": "LORA", "target_modules": "q(("}', r"adapter_config\.json: target_modules: 'q\(\('"),
        ('{"peft_type": "LORAX"}', r"adapter_config\.json: peft_type is 'LORAX'"),
    ],
)
def test_damaged_adapter_config_is_refused(config, message, tmp_path):
    (tmp_path / "adapter_config.json").write_text(config)
    with pytest.raises(TuneError, match=message):
        read_adapter(str(tmp_path))


def test_untied_head_of_a_transformers_model_takes_an_adapter(checkpoint, tied_checkpoint):
    """The head in the body is a placeholder that shares the weight; tied heads are refused."""
    lora = LoRA(rank=4, target_modules=["lm_head", "embed_tokens"])
    with torch.device("meta"):
        assert "head  " in add_adapters(hf(str(checkpoint)), lora).table()
        with pytest.raises(TuneError, match=r"does not support dropout\. Set adapter\.dropout=0"):
            add_adapters(hf(str(checkpoint)), replace(lora, dropout=0.1))
        with pytest.raises(TuneError, match="is both embedding and output head"):
            add_adapters(hf(str(tied_checkpoint)), lora)


def test_modules_to_save_match_peft(checkpoint):
    base = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["norm"])
    theirs = peft.get_peft_model(base, config)
    wanted = sum(p.numel() for name, p in theirs.named_parameters() if p.requires_grad and "lora_" not in name)
    model = load_model(str(checkpoint))
    adapted = add_adapters(model, LoRA(rank=4, target_modules=["q_proj"], modules_to_save=["norm"]))
    assert len(adapted.whole) == 7
    assert sum(p.numel() for module in adapted.whole.values() for p in module.parameters()) == wanted == 448


def test_peft_adapters_with_excluded_modules(checkpoint, tmp_path):
    base = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    config = peft.LoraConfig(
        r=4, target_modules=["q_proj"], exclude_modules=["model.layers.1.self_attn.q_proj"], init_lora_weights=False
    )
    theirs = peft.get_peft_model(base, config).eval()
    theirs.save_pretrained(tmp_path)
    model, lora = load_model(str(checkpoint)), read_adapter(str(tmp_path))
    assert len(add_adapters(model, lora).layers) == 2
    load_adapter(model, str(tmp_path))
    assert_close(model(TOKENS), theirs(TOKENS).logits, atol=1e-5, rtol=1e-5)
