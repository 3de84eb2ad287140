"""Models loaded through transformers match it in our forward and backward, and are exported to the same files."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers import run_processes, save_checkpoint
from safetensors.torch import load_file, save_file
from stacked_experts import NoTokenizer
from torch.distributed.tensor import DTensor
from torch.testing import assert_close

from tune import distributed
from tune.checkpointers import Pretrained, Random, export
from tune.collators import Batch
from tune.errors import TuneError
from tune.generation import Continuation, Sampler
from tune.losses import LinearCrossEntropy
from tune.models import HuggingFaceModel, build, hf
from tune.peft import LoRA, add_adapters, export_adapter, merge

transformers = pytest.importorskip("transformers")

SHAPE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
GROUPED = SHAPE | {"num_key_value_heads": 2, "head_dim": 8}
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1}
LINEAR = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8
}  # fmt: skip
# The last value: whether transformers keeps documents in a row apart, which only some architectures do.
VARIANTS = {
    "gpt_neox": ("GPTNeoXConfig", SHAPE, True),
    "gpt2: tied, learned positions": ("GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 4}, True),
    "phi: output bias": ("PhiConfig", SHAPE, True),
    "opt": ("OPTConfig", SHAPE | {"ffn_dim": 64, "word_embed_proj_dim": 32}, False),
    "bloom: alibi": ("BloomConfig", {"hidden_size": 32, "n_layer": 2, "n_head": 4}, False),
    "cohere: logits scaled": ("CohereConfig", SHAPE | {"logit_scale": 0.5}, True),
    "recurrent_gemma: logits bounded": (
        "RecurrentGemmaConfig", SHAPE | {"num_hidden_layers": 3, "lru_width": 32, "logits_soft_cap": 2.0}, False
    ),
    "gpt: no cache": ("OpenAIGPTConfig", {"n_embd": 32, "n_layer": 2, "n_head": 4}, False),
    "mamba": ("MambaConfig", {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}, False),
    "mixtral: other names, joined experts": ("MixtralConfig", GROUPED | {"num_local_experts": 4}, True),
    "glm4_moe: a buffer that is a weight": ("Glm4MoeConfig", GROUPED | EXPERTS, True),
    "qwen3_next: two kinds of blocks": ("Qwen3NextConfig", GROUPED | LINEAR | {
        "num_hidden_layers": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    }, False),
}  # fmt: skip
LENGTHS = [3, 15, 2, 20]
TOKENS = torch.randint(3, 90, (2, 20), generator=torch.Generator().manual_seed(0))
DOCUMENTS = torch.tensor([[0] * 3 + [1] * 15 + [2] * 2, [0] * 20])


def save(folder, config_class, **fields):
    torch.manual_seed(0)
    small = {"vocab_size": 90, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = getattr(transformers, config_class)(**small | fields)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():  # values that start at 0 or 1 would hide mistakes
            if tensor.is_floating_point() and not any(part in name for part in ("A_log", "dt_", "lambda", "recurrent")):
                tensor.add_(torch.randn_like(tensor) * 0.05)
    model.save_pretrained(folder)
    return folder


def load(folder):
    """Load the model as recipes do."""
    with torch.device("meta"):
        model = hf(str(folder))
    assert all(parameter.is_meta for parameter in model.parameters())
    weights = Pretrained(str(folder), model)
    distributed.parallelize(model, distributed.init("cpu"), dtype="fp32")
    weights.load(model)
    model.check()
    assert model.training
    return model


@pytest.fixture(scope="module", params=VARIANTS)
def pair(request, tmp_path_factory):
    config_class, fields, apart = VARIANTS[request.param]
    folder = save(tmp_path_factory.mktemp("model"), config_class, **fields)
    return folder, load(folder), transformers.AutoModelForCausalLM.from_pretrained(folder).eval(), apart


def test_logits_and_buffers(pair):
    _, ours, theirs, _ = pair
    with torch.no_grad():
        assert_close(ours(TOKENS), theirs(TOKENS).logits, atol=1e-6, rtol=1e-6)
    assert_close(dict(ours.body.named_buffers()), dict(theirs.named_buffers()), rtol=0, atol=0)


def test_documents_that_share_a_row_and_gradients(pair):
    _, ours, theirs, apart = pair
    alone = [theirs(document[None]).logits[0] for document in TOKENS.flatten().split(LENGTHS)]
    assert_close(ours(Batch.of(TOKENS, documents=DOCUMENTS)), torch.cat(alone).view(2, 20, -1), atol=1e-5, rtol=1e-5)
    assert ours.separates_documents == apart

    labels = TOKENS.roll(-1)
    loss = ours(Batch.of(TOKENS, labels, DOCUMENTS), LinearCrossEntropy(chunk_tokens=7))
    expected = F.cross_entropy(torch.cat(alone), labels.flatten(), reduction="sum")
    assert_close(loss, expected, rtol=1e-6, atol=0)
    loss.backward()
    expected.backward()
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters(remove_duplicate=False)}
    head = theirs.get_output_embeddings()
    gradients |= {f"head.{name}": parameter.grad for name, parameter in head.named_parameters()}
    for name, parameter in ours.named_parameters():
        reference = gradients[name.removeprefix("body.")]
        assert (parameter.grad is None) == (reference is None)
        if reference is not None:
            assert (parameter.grad - reference).norm() <= 1e-5 * reference.norm() + 1e-5, name


@pytest.mark.weekly
@pytest.mark.parametrize(
    "pair",
    [pytest.param(kind, marks=() if kind.startswith(("gpt2:", "gpt:")) else pytest.mark.weekly) for kind in VARIANTS],
    indirect=True,
)
def test_generation_matches_transformers(pair):
    """Prompts of unequal length with two samples each, three rows at a time; then a conversation of several turns."""
    _, ours, theirs, _ = pair
    prompts = [document.tolist() for document in TOKENS.flatten().split(LENGTHS)]
    settings = {"max_new_tokens": 64, "do_sample": False, "eos_token_id": None}
    expected = [theirs.generate(torch.tensor([prompt]), **settings)[0, len(prompt) :].tolist() for prompt in prompts]
    sampler = Sampler(max_new_tokens=64, temperature=0, max_rows=3)
    completions = sampler(ours, prompts, samples=2)
    assert [[sample.tokens for sample in row] for row in completions] == [[tokens] * 2 for tokens in expected]
    turns, few = Continuation(ours.eval()), Sampler(max_new_tokens=8, temperature=0)
    text = prompts[1]
    for more in (prompts[0], prompts[3]):
        answer = theirs.generate(torch.tensor([text]), **settings | {"max_new_tokens": 8})[0, len(text) :].tolist()
        assert [*turns(few, text)] == answer
        text = [*text, *answer, *more]


def test_export(pair, tmp_path):
    folder, ours, _, _ = pair
    export(ours, NoTokenizer(), tmp_path / "out", distributed.init("cpu"), source=str(folder))
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert_close(tensors, load_file(folder / "model.safetensors"), rtol=0, atol=0)
    assert (tmp_path / "out" / "config.json").read_bytes() == (folder / "config.json").read_bytes()


def test_checkpoint_of_the_base_model_without_a_head(tmp_path):
    """Like GPT-2 on the hub: names without the prefix, and obsolete buffers. The export has the same tensors."""
    folder = save(tmp_path / "model", "GPT2Config", n_embd=32, n_layer=2, n_head=4)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 8, 8).tril()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    ours = load(folder)
    with torch.no_grad():
        assert_close(ours(TOKENS), theirs(TOKENS).logits, atol=1e-6, rtol=1e-6)
    export(ours, NoTokenizer(), tmp_path / "out", distributed.init("cpu"), source=str(folder))
    assert_close(load_file(tmp_path / "out" / "model.safetensors"), tensors, rtol=0, atol=0)


def export_random_adapter(model, lora, to, base):
    """Export a random adapter and return the logits of the adapted model."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.2)
        export_adapter(model, to, world=distributed.init("cpu"), base=str(base), tokenizer=NoTokenizer())
        return model.eval()(TOKENS)


@pytest.mark.slow
def test_adapter_of_a_checkpoint_without_a_head_is_merged(tmp_path):
    folder = save(tmp_path / "model", "BloomConfig", hidden_size=32, n_layer=2, n_head=4)
    tensors = load_file(folder / "model.safetensors")
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    model, lora = load(folder), LoRA(rank=4)
    add_adapters(model, lora)
    expected = export_random_adapter(model, lora, tmp_path / "adapter", folder)
    merge(
        folder, tmp_path / "adapter", folder / "merged"
    )  # inside the base folder, which must not be copied into itself
    with torch.no_grad():
        assert_close(load(folder / "merged")(TOKENS), expected, atol=1e-4, rtol=1e-4)


QWEN3_5_MOE = {
    "text_config": GROUPED | LINEAR | {
        "vocab_size": 90, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16, "layer_types": ["linear_attention", "full_attention"],
    },
    "vision_config": {"hidden_size": 32, "intermediate_size": 48, "depth": 1, "num_heads": 2, "out_hidden_size": 32},
}  # fmt: skip
LLAMA4 = {
    "text_config": GROUPED | {
        "vocab_size": 90, "intermediate_size_mlp": 64, "num_local_experts": 2, "num_experts_per_tok": 1,
        "pad_token_id": 0,
    },
    "vision_config": SHAPE | {
        "num_hidden_layers": 1, "image_size": 28, "patch_size": 14, "vision_output_dim": 32,
        "projector_input_dim": 32, "projector_output_dim": 32,
    },
}  # fmt: skip


def join_experts(folder):
    """Stack the experts as in the released files of Qwen3.5 and in the memory of transformers."""
    tensors = load_file(folder / "model.safetensors")
    for layer in sorted({name.partition(".experts.")[0] for name in tensors if ".experts." in name}):
        gate, up, down = (
            [tensors.pop(f"{layer}.experts.{expert}.{kind}_proj.weight") for expert in range(4)]
            for kind in ("gate", "up", "down")
        )
        tensors[f"{layer}.experts.gate_up_proj"] = torch.cat([torch.stack(gate), torch.stack(up)], dim=1)
        tensors[f"{layer}.experts.down_proj"] = torch.stack(down)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.weekly
@pytest.mark.parametrize(
    ("config_class", "fields", "joined"),
    [
        ("Qwen3_5MoeConfig", QWEN3_5_MOE, False),
        ("Qwen3_5MoeConfig", QWEN3_5_MOE, True),
        ("Llama4Config", LLAMA4, False),
    ],
)
def test_language_model_of_a_multimodal_checkpoint(config_class, fields, joined, tmp_path):
    """Its tensors have other names in the checkpoint; the export keeps the whole checkpoint."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(**fields)
    whole, folder = transformers.AutoModelForImageTextToText.from_config(config).eval(), tmp_path / "model"
    whole.save_pretrained(folder)
    if joined:
        join_experts(folder)
    ours = load(folder)
    # Without images the whole Llama 4 of transformers 5.24 raises an AttributeError.
    theirs = whole.language_model if config_class == "Llama4Config" else whole
    with torch.no_grad():
        assert_close(ours(TOKENS), theirs(TOKENS).logits, atol=1e-6, rtol=1e-6)
    export(ours, NoTokenizer(), tmp_path / "out", distributed.init("cpu"), source=str(folder))
    assert_close(load_file(tmp_path / "out/model.safetensors"), load_file(folder / "model.safetensors"), rtol=0, atol=0)

    lora = LoRA(rank=2, target_modules=["q_proj", "v_proj"])
    add_adapters(ours, lora)
    expected = export_random_adapter(ours, lora, tmp_path / "adapter", folder)
    merge(folder, tmp_path / "adapter", tmp_path / "merged")
    base = transformers.AutoModelForCausalLM.from_pretrained(folder)
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    with torch.no_grad():
        assert_close(load(tmp_path / "merged")(TOKENS), expected, atol=1e-5, rtol=1e-5)
        assert_close(theirs(TOKENS).logits, expected, atol=1e-5, rtol=1e-5)


SHARDED = {  # with rotary angles (Gemma 3: of two bases, with a scaled embedding), with alibi, and with neither
    "gpt_neox": ("GPTNeoXConfig", SHAPE),
    "falcon": ("FalconConfig", {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "alibi": False}),
    "bloom": ("BloomConfig", {"hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "stablelm": ("StableLmConfig", SHAPE | {"num_key_value_heads": 2}),
    "gemma3_text": ("Gemma3TextConfig", GROUPED | {"num_hidden_layers": 3, "sliding_window": 8}),
    "mamba": ("MambaConfig", {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}),
}


@pytest.mark.slow
def test_sharded_models_match_whole_ones(tmp_path):
    folders = [str(save(tmp_path / name, config_class, **fields)) for name, (config_class, fields) in SHARDED.items()]
    assert "2 processes agree" in run_processes(Path(__file__).with_name("sharded_hf.py"), 2, *folders)


@pytest.mark.slow
def test_adapter_skips_fused_experts(tmp_path):
    """Mixtral's experts are fused tensors in memory, so all-linear leaves them out."""
    peft = pytest.importorskip("peft")
    folder = save(tmp_path / "model", "MixtralConfig", **GROUPED, num_local_experts=4)
    model, lora = load(folder), LoRA(rank=4)
    assert {name.rpartition(".")[2] for name in add_adapters(model, lora).layers} == {
        "q_proj", "k_proj", "v_proj", "o_proj"
    }  # fmt: skip
    expected = export_random_adapter(model, lora, tmp_path / "adapter", folder)
    base = transformers.AutoModelForCausalLM.from_pretrained(folder)
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    with torch.no_grad():
        assert_close(theirs(TOKENS).logits, expected, atol=1e-5, rtol=1e-5)


def test_random_weights_are_refused(tmp_path):
    model = load(save(tmp_path, "GPTNeoXConfig", **SHAPE))
    with pytest.raises(TuneError, match=r"weights: .*save_pretrained"):
        Random(0).load(model)


def test_dropout_of_the_architecture_is_disabled(tmp_path):
    """Its masks would depend on how rows are distributed over devices."""
    folder = save(tmp_path, "GPT2Config", n_embd=32, n_layer=2, n_head=4, resid_pdrop=0.5, attn_pdrop=0.5)
    model = load(folder).train()
    assert_close(model(TOKENS), model(TOKENS))
    assert json.loads((folder / "config.json").read_text())["resid_pdrop"] == 0.5


@pytest.mark.slow
def test_checking_a_sharded_model_leaves_it_sharded(tmp_path):
    """An optimizer created afterwards must get the shards, not the gathered parameters of the root."""
    folder = save(tmp_path, "GPTNeoXConfig", **SHAPE)
    with torch.device("meta"):
        model = hf(str(folder))
    weights = Pretrained(str(folder), model)
    distributed.parallelize(model, distributed.init("cpu"), dtype="bf16")
    weights.load(model)
    model.check()
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())


def test_encoder_is_refused(tmp_path):
    folder = save(tmp_path, "BertConfig", **SHAPE, tie_word_embeddings=False)
    with pytest.raises(TuneError, match="tokens attend to later tokens"):
        load(folder)


def test_unknown_changes_of_logits_are_refused(tmp_path):
    folder = save(tmp_path, "CohereConfig", **SHAPE, logit_scale=0.5)
    model = load(folder)
    model.scale = 1.0
    with pytest.raises(TuneError, match="CohereForCausalLM is not supported"):
        model.check()


def test_documents_beyond_the_trained_length_with_dynamic_rope_are_refused(tmp_path):
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    folder = save(tmp_path, "LlamaConfig", **SHAPE, max_position_embeddings=16, rope_parameters=rope)
    with pytest.raises(TuneError, match="20 exceeds 16, where this model changes its rope scaling"):
        load(folder)(Batch.of(TOKENS, documents=DOCUMENTS))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config_class", "fields"), [("GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 4}), VARIANTS["opt"][:2]]
)
def test_documents_beyond_the_learned_positions_are_refused(tmp_path, config_class, fields):
    folder = save(tmp_path, config_class, **fields, max_position_embeddings=16)
    with pytest.raises(TuneError, match="20 exceeds 16, where this model has no position embeddings"):
        load(folder)(Batch.of(TOKENS, documents=DOCUMENTS))
    load(folder)(Batch.of(TOKENS[:1, :18], documents=DOCUMENTS[:1, :18]))  # each document is shorter


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "unheard"}, "cannot build a model.*unheard"),
        ({"model_type": "t5"}, "cannot build a model.*T5Config"),
        ({"hidden_act": "unheard"}, "cannot build a model"),
        ({"num_attention_heads": 5}, "cannot build a model"),
        ({"hidden_size": "wide"}, "cannot build a model"),
        ({"auto_map": {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"}, "model_type": "own"}, "trust_remote"),
    ],
)
def test_unsupported_configs_are_refused(tmp_path, changes, message):
    folder = save(tmp_path, "GPTNeoXConfig", **SHAPE)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(TuneError, match=message) as error:
        hf(str(folder))
    assert str(file) in str(error.value)


def test_weights_of_another_model_are_refused(tmp_path):
    folder = save(tmp_path, "GPTNeoXConfig", **SHAPE)
    tensors = load_file(folder / "model.safetensors")
    tensors["gpt_neox.more"] = tensors.pop("embed_out.weight" if "embed_out.weight" in tensors else "lm_head.weight")
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(TuneError, match=r"missing: \w+\.weight \[90, 32\]\n  not known: gpt_neox\.more \[90, 32\]"):
        load(folder)


def test_other_families_go_through_transformers(tmp_path):
    folder = save_checkpoint(tmp_path / "neox", "GPTNeoXConfig", tie_word_embeddings=False)
    with torch.device("meta"):
        assert isinstance(build(str(folder)), HuggingFaceModel)
        assert build(str(folder), head="score").config.scores
        with pytest.raises(TuneError, match=r"^router_loss: .*'gpt_neox'"):
            build(str(folder), router_loss=0.1)
