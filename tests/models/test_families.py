"""Every family matches transformers for the same checkpoint folder."""

import copy
import json
import warnings
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from helpers import save_checkpoint, slow_but
from safetensors.torch import load_file, save_file
from torch._subclasses import FakeTensorMode
from torch.testing import assert_close

from tune import distributed
from tune.checkpointers import Random, export, load_model
from tune.collators import Batch
from tune.errors import TuneError
from tune.generation import Sampler
from tune.losses import LinearCrossEntropy
from tune.models import build

transformers = pytest.importorskip("transformers")

# Use the delta rule token by token: in chunks, transformers loses up to 3% of a decay's gradient.
qwen3_5 = transformers.models.qwen3_5.modeling_qwen3_5
qwen3_5.torch_chunk_gated_delta_rule = qwen3_5.torch_recurrent_gated_delta_rule

SMALL = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
    "eos_token_id": 1,
    "pad_token_id": None,  # its embedding would get no gradient in transformers
}
WINDOW = 16
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 1.1, 1.3, 1.6, 2.0, 2.5],
    "long_factor": [1.0, 2.0, 3.0, 5.0, 9.0, 16.0], "partial_rotary_factor": 0.75,
}  # fmt: skip
TWO_ROPES = {"full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 500.0}}
TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
MIXED = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
CORRECTED = {
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "first_k_dense_replace": 1,
}  # fmt: skip
LATENT = CORRECTED | {
    "n_group": 4, "topk_group": 2, "qk_nope_head_dim": 24, "qk_rope_head_dim": 8, "v_head_dim": 20, "kv_lora_rank": 32,
    "q_lora_rank": 28, "num_key_value_heads": 4,
}  # fmt: skip
DELTA = {
    "head_dim": 24, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 12, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "initializer_range": 0.05,  # at 0.1, transformers differs by 2e-5 from its own result in fp64
}  # fmt: skip
VARIANTS = {
    "llama": ("LlamaConfig", {}),
    "llama-tied": ("LlamaConfig", TIED),
    "llama-biases": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "llama-multi-head": ("LlamaConfig", {"num_key_value_heads": 4}),
    "llama-multi-query": ("LlamaConfig", {"num_key_value_heads": 1}),
    "llama-head-dim": ("LlamaConfig", {"head_dim": 24}),
    "llama-gelu": ("LlamaConfig", {"hidden_act": "gelu"}),
    "llama-theta": ("LlamaConfig", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e5}}),
    "llama-linear": ("LlamaConfig", {"rope_parameters": LINEAR}),
    "llama-dynamic": ("LlamaConfig", {"rope_parameters": LINEAR | {"rope_type": "dynamic"}}),
    "llama-3.1": ("LlamaConfig", {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 32}}),
    "llama-yarn": ("LlamaConfig", {"rope_parameters": YARN}),
    "llama-yarn-mscale": ("LlamaConfig", {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.7}}),
    "mistral": ("MistralConfig", {"sliding_window": None}),
    "mistral-window": ("MistralConfig", {"sliding_window": WINDOW, "head_dim": 24}),
    "qwen2": ("Qwen2Config", {}),
    "qwen2-windows": ("Qwen2Config", TIED | {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}),
    "qwen3": ("Qwen3Config", {"head_dim": 32}),
    "qwen3-tied": ("Qwen3Config", TIED | {"head_dim": 24, "attention_bias": True}),
    "qwen3-windows": ("Qwen3Config", {"head_dim": 16, "use_sliding_window": True} | MIXED),
    "gemma": ("GemmaConfig", {"head_dim": 32, "num_key_value_heads": 1}),
    "gemma2": ("Gemma2Config", {"head_dim": 32, "sliding_window": WINDOW, "query_pre_attn_scalar": 24}),
    "gemma2-no-caps": (
        "Gemma2Config",
        {"head_dim": 16, "attn_logit_softcapping": None, "final_logit_softcapping": None, "layer_types": None} | UNTIED,
    ),
    "gemma3_text": ("Gemma3TextConfig", {"head_dim": 24, "query_pre_attn_scalar": 24} | MIXED),
    "gemma3_text-scaled": (
        "Gemma3TextConfig",
        {"head_dim": 32, "rope_parameters": TWO_ROPES | {"full_attention": LINEAR}, "final_logit_softcapping": 8.0}
        | MIXED,
    ),
    "phi3": ("Phi3Config", {"sliding_window": WINDOW}),
    "phi3-longrope": (
        "Phi3Config",
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": 60} | TIED,
    ),
    "olmo2": ("Olmo2Config", {}),
    "olmo2-multi-head": ("Olmo2Config", {"num_key_value_heads": 4, "attention_bias": True}),
    "olmo3": ("Olmo3Config", MIXED),
    "olmo3-yarn": ("Olmo3Config", {"rope_parameters": TWO_ROPES} | MIXED),
    "granite": (
        "GraniteConfig",
        {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.1, "logits_scaling": 3.0},
    ),
    "smollm3": ("SmolLM3Config", {"no_rope_layer_interval": 2}),
    "smollm3-windows": (
        "SmolLM3Config",
        {"no_rope_layers": [0, 1, 0], "use_sliding_window": True, "sliding_window": WINDOW} | UNTIED,
    ),
    "starcoder2": ("Starcoder2Config", {}),
    "starcoder2-window": ("Starcoder2Config", {"sliding_window": WINDOW, "use_bias": False} | UNTIED),
    "glm4": ("Glm4Config", {"head_dim": 16}),
    "glm": ("GlmConfig", {"head_dim": 16}),
    "cohere": ("CohereConfig", {"attention_bias": True}),
    "cohere2": ("Cohere2Config", MIXED),
    "cohere2-biases": ("Cohere2Config", UNTIED | {"attention_bias": True, "sliding_window": WINDOW}),
    "ministral3": ("Ministral3Config", {"head_dim": 16, "rope_parameters": YARN | {"llama_4_scaling_beta": 0.1}}),
    "seed_oss": ("SeedOssConfig", {"head_dim": 24, "attention_dropout": 0.0, "residual_dropout": 0.0}),
    "exaone4": ("Exaone4Config", MIXED),
    "exaone4-full": ("Exaone4Config", TIED | {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
    "arcee": ("ArceeConfig", {"mlp_bias": True}),
    "ernie4_5": ("Ernie4_5Config", {"head_dim": 24, "use_bias": True}),
    "granitemoehybrid": (
        "GraniteMoeHybridConfig",
        {
            "layer_types": ["full_attention"] * 3, "num_local_experts": 0, "shared_intermediate_size": 96,
            "position_embedding_type": "rope", "embedding_multiplier": 12.0, "residual_multiplier": 0.22,
            "attention_multiplier": 0.1, "logits_scaling": 3.0,
        },
    ),
    "qwen3_5_text": ("Qwen3_5TextConfig", DELTA),
    "qwen3_5_text-tied": (
        "Qwen3_5TextConfig",
        DELTA | TIED | {"layer_types": ["linear_attention"] * 2 + ["full_attention"], "linear_num_value_heads": 2}
        | {"head_dim": 16, "attention_bias": True, "linear_conv_kernel_dim": 2},
    ),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4}),
    "mixtral-window": ("MixtralConfig", {"num_local_experts": 4, "sliding_window": WINDOW, "num_experts_per_tok": 3}),
    "qwen2_moe": ("Qwen2MoeConfig", EXPERTS | {"shared_expert_intermediate_size": 32, "mlp_only_layers": [1]}),
    "qwen2_moe-windows": (
        "Qwen2MoeConfig",
        EXPERTS
        | {"shared_expert_intermediate_size": 20, "decoder_sparse_step": 2, "qkv_bias": False, "norm_topk_prob": True}
        | {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
    ),
    "qwen3_moe": ("Qwen3MoeConfig", EXPERTS | {"head_dim": 24, "norm_topk_prob": True}),
    "qwen3_moe-window": (
        "Qwen3MoeConfig",
        EXPERTS | {"decoder_sparse_step": 2, "use_sliding_window": True, "sliding_window": WINDOW},
    ),
    "olmoe": ("OlmoeConfig", {"num_experts": 6, "num_experts_per_tok": 3}),
    "olmoe-normalized": ("OlmoeConfig", {"num_experts": 9, "norm_topk_prob": True, "num_key_value_heads": 4}),
    "gpt_oss": ("GptOssConfig", {"num_local_experts": 4, "head_dim": 24, "sliding_window": WINDOW}),
    "gpt_oss-no-biases": (
        "GptOssConfig",
        {"num_local_experts": 4, "attention_bias": False, "swiglu_limit": 0.5, "rope_parameters": YARN},
    ),
    "glm4_moe": ("Glm4MoeConfig", CORRECTED | {"use_qk_norm": True, "attention_bias": True}),
    "glm4_moe-groups": ("Glm4MoeConfig", CORRECTED | {"n_group": 4, "topk_group": 2, "head_dim": 24}),
    "granitemoe": (
        "GraniteMoeConfig",
        {"num_local_experts": 6, "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 3.0}
        | {"attention_multiplier": 0.1, "tie_word_embeddings": True},
    ),
    "minimax_m2": ("MiniMaxM2Config", {"num_local_experts": 6, "num_experts_per_tok": 3, "head_dim": 24}),
    "minimax_m2-partial": (
        "MiniMaxM2Config",
        {"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 32, "rotary_dim": 16},
    ),
    "deepseek_v3": ("DeepseekV3Config", LATENT),
    "deepseek_v3-yarn": (
        "DeepseekV3Config",
        LATENT | {"q_lora_rank": None, "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.8}},
    ),
    "deepseek_v3-plain": (
        "DeepseekV3Config",
        LATENT
        | {"n_group": 1, "topk_group": 1, "norm_topk_prob": False, "rope_interleave": False}
        | {"attention_bias": True, "n_shared_experts": 2},
    ),
}  # fmt: skip


# One of each kind of attention, feed-forward and position; the others repeat them.
QUICK = (
    "llama", "qwen3", "gemma2", "gemma3_text", "gpt_oss", "deepseek_v3", "phi3", "qwen3_5_text", "mixtral", "olmo2",
    "cohere2", "granitemoehybrid",
)  # fmt: skip


@pytest.fixture(scope="module", params=slow_but(QUICK, VARIANTS))
def pair(request, tmp_path_factory):
    """A tiny random transformers model, and our model loaded from its folder."""
    config_class, changes = VARIANTS[request.param]
    config = getattr(transformers, config_class)(**SMALL | changes)
    for name in {"rms_norm_eps", "layer_norm_eps", "norm_epsilon"} & vars(config).keys():
        setattr(config, name, 1e-3)  # large enough to matter
    return make_pair(config, tmp_path_factory.mktemp(request.param))


def make_pair(config, folder, auto=transformers.AutoModelForCausalLM):
    torch.manual_seed(0)
    theirs = auto.from_config(config, attn_implementation="eager").eval()
    for tensor in theirs.state_dict().values():  # biases and norms start at 0 and 1, which would hide mistakes
        if tensor.std() == 0:
            tensor += torch.randn_like(tensor) * 0.3
    theirs.save_pretrained(folder)
    theirs.saved_in = folder
    return theirs, load_model(str(folder))


def random_tokens(rows, length):
    return torch.randint(SMALL["vocab_size"], (rows, length), generator=torch.Generator().manual_seed(1))


def as_on_disk(theirs, tensors, folder):
    """`tensors` in place of the parameters of `theirs`, as transformers would write them."""
    holder = copy.deepcopy(theirs)
    for parameter, tensor in zip(holder.parameters(), tensors, strict=True):
        parameter.data = tensor
    holder.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def parts_on_disk(ours, name, tensor):
    """The tensors on disk of our parameter `name`: one, or one per expert."""
    names = ours.names.on_disk[name]
    return [(names, tensor)] if isinstance(names, str) else zip(names, tensor, strict=True)


def test_logits_loss_and_gradients(pair, tmp_path):
    theirs, ours = pair
    tokens = random_tokens(2, 201)
    tokens, labels = tokens[:, :-1], tokens[:, 1:]
    expected = theirs(tokens).logits
    assert_close(ours(tokens), expected, atol=1e-5, rtol=1e-5)

    expected_loss = F.cross_entropy(expected.flatten(0, 1), labels.flatten(), reduction="sum")
    loss = ours(Batch.of(tokens, labels), LinearCrossEntropy(chunk_tokens=150))
    assert_close(loss, expected_loss, atol=0, rtol=1e-6)
    expected_loss.backward()
    loss.backward()
    references = as_on_disk(theirs, [parameter.grad for parameter in theirs.parameters()], tmp_path)
    for name, parameter in ours.named_parameters():
        for on_disk, gradient in parts_on_disk(ours, name, parameter.grad):
            assert (gradient - references[on_disk]).norm() <= 1e-4 * references[on_disk].norm(), on_disk


@pytest.mark.weekly
def test_bf16_is_as_close_to_fp32_as_in_transformers(pair):
    theirs, ours = pair
    folder, tokens = theirs.saved_in, random_tokens(2, 100)
    low = type(theirs).from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="eager").eval()
    with torch.no_grad():
        exact, expected, rounded = (
            ours(tokens),
            low(tokens).logits,
            load_model(str(folder), dtype=torch.bfloat16)(tokens),
        )
    # The median token, because a router may choose other experts for a few tokens.
    error, reference = ((logits - exact).norm(dim=-1).median() for logits in (rounded, expected))
    assert error <= 1.2 * reference


def test_attention_has_a_fast_kernel_on_gpus(pair):
    paths = pair[1].config.attention_paths((8, 0), torch.bfloat16)
    assert {choice.path for choice in paths if choice is not None} <= {"flash", "flex"}


def test_documents_in_a_row_do_not_see_each_other(pair):
    theirs, ours = pair
    lengths = [5, 40, 1, 70, 19]
    tokens = random_tokens(1, sum(lengths))
    documents = torch.tensor([[i for i, length in enumerate(lengths) for _ in range(length)]])
    alone = torch.cat([theirs(document).logits for document in tokens.split(lengths, dim=1)], dim=1)
    assert_close(ours(Batch.of(tokens, documents=documents)), alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("most", [4, pytest.param(32, marks=pytest.mark.weekly)])  # beyond a window of 16
def test_greedy_decoding(pair, most):
    theirs, ours = pair
    prompts = [random_tokens(1, length)[0].tolist() for length in (3, 27, 17, 1, 9)]
    count = min(most, (ours.max_generated or 91) - 27)  # one variant can generate no more
    outputs = Sampler(max_new_tokens=count, temperature=0, max_rows=4)(ours, prompts)
    for prompt, (completion,) in zip(prompts, outputs, strict=True):
        expected = theirs.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False, eos_token_id=None)
        assert completion.tokens == expected[0, len(prompt) :].tolist()


@pytest.mark.parametrize("family", ["gemma", "gemma2", "gemma3_text"])
def test_gemma_rounds_like_transformers_in_bf16(family, tmp_path):
    """Gemma was trained with an embedding multiplier rounded to bf16, which changes sqrt(40), and with fp32 norms."""
    config_class, changes = VARIANTS[family]
    config = getattr(transformers, config_class)(**SMALL | changes | {"hidden_size": 40})
    make_pair(config, tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    ours, seen = load_model(str(tmp_path), dtype=torch.bfloat16), []
    norm = ours.blocks[0].attention_norm
    norm.register_forward_hook(lambda module, inputs, output: seen.append((inputs[0], output)))
    tokens = random_tokens(2, 100)
    with torch.no_grad():
        ours(tokens)
        embedded = theirs(tokens, output_hidden_states=True).hidden_states[0]
        normed = theirs.model.layers[0].input_layernorm(embedded)
    for tensor, expected in zip(seen[0], (embedded, normed), strict=True):
        assert (tensor != expected).float().mean() < 0.01


def check_export(ours, source, folder):
    tokenizer = SimpleNamespace(save=lambda folder: None)
    export(ours, tokenizer, folder, distributed.init("cpu"), source=str(source))
    saved, exported = load_file(source / "model.safetensors"), load_file(folder / "model.safetensors")
    assert saved.keys() == exported.keys()
    assert all(torch.equal(saved[name], exported[name]) for name in saved)


def test_export_reproduces_the_source(pair, tmp_path):
    theirs, ours = pair
    check_export(ours, theirs.saved_in, tmp_path / "model")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", attn_implementation="eager").eval()
    tokens = random_tokens(1, 50)
    assert_close(
        again(tokens).logits, theirs(tokens).logits, atol=1e-5, rtol=1e-5
    )  # mapped weights have other alignments


def test_initial_weights_match_transformers(pair, tmp_path):
    theirs, _ = pair
    with torch.device("meta"):
        ours = build(str(theirs.saved_in))
    Random(seed=0).load(ours.to_empty(device="cpu"))
    fresh = type(theirs)(theirs.config)
    references = as_on_disk(fresh, fresh.parameters(), tmp_path)
    for name, tensor in ours.state_dict().items():
        for on_disk, part in parts_on_disk(ours, name, tensor):
            reference = references[on_disk]
            if reference.std() == 0:
                assert torch.equal(part, reference), on_disk
            elif part.numel() > 1000:
                assert_close(part.std(), reference.std(), rtol=0.1, atol=0)


VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
GEMMA3 = {
    "text_config": SMALL | {"head_dim": 16} | MIXED, "mm_tokens_per_image": 4, "image_token_index": 127,
    "vision_config": VISION | {"model_type": "siglip_vision_model", "image_size": 28, "patch_size": 14},
}  # fmt: skip
MISTRAL3 = {
    "text_config": SMALL | {"model_type": "ministral3", "head_dim": 16} | VARIANTS["ministral3"][1],
    "vision_config": VISION | {"model_type": "pixtral", "image_size": 28, "patch_size": 14, "head_dim": 16},
    "image_token_index": 127, "tie_word_embeddings": False,
}  # fmt: skip
QWEN3_5 = {
    "text_config": SMALL | DELTA, "image_token_id": 127, "tie_word_embeddings": True,
    "vision_config": {"hidden_size": 32, "intermediate_size": 48, "depth": 1, "num_heads": 2, "out_hidden_size": 64},
}  # fmt: skip


COMPOSITE = pytest.mark.parametrize(
    ("config_class", "fields"), [("Gemma3Config", GEMMA3), ("Mistral3Config", MISTRAL3), ("Qwen3_5Config", QWEN3_5)]
)


@pytest.mark.slow
@COMPOSITE
def test_vision_weights_are_kept(config_class, fields, tmp_path):
    theirs, ours = make_pair(
        getattr(transformers, config_class)(**fields), tmp_path / "source", transformers.AutoModelForImageTextToText
    )
    tokens = random_tokens(2, 80) % 127
    assert_close(ours(tokens), theirs(tokens).logits, atol=1e-5, rtol=1e-5)
    check_export(ours, tmp_path / "source", tmp_path / "model")
    again = type(theirs).from_pretrained(tmp_path / "model", attn_implementation="eager").eval()
    assert_close(
        again(tokens).logits, theirs(tokens).logits, atol=1e-5, rtol=1e-5
    )  # mapped weights have other alignments


def write_config(folder, outer, inner):
    """Set the field of config.json and of its text_config; None removes it."""
    config = json.loads((folder / "config.json").read_text())
    for section, value in ((config, outer), (config["text_config"], inner)):
        section.pop("tie_word_embeddings", None)
        if value is not None:
            section["tie_word_embeddings"] = value
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.slow
@COMPOSITE
@pytest.mark.parametrize("lm_head", ["with", "without"])
@pytest.mark.filterwarnings("ignore:.*stay two weights")
def test_heads_are_tied_as_in_transformers(config_class, fields, lm_head, tmp_path):
    auto = transformers.AutoModelForImageTextToText
    config = getattr(transformers, config_class)(**fields | UNTIED)
    auto.from_config(config).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    if lm_head == "without":
        head = next(name for name in tensors if name.endswith("lm_head.weight"))
        save_file({name: tensor for name, tensor in tensors.items() if name != head}, tmp_path / "model.safetensors")
    tokens = random_tokens(1, 20) % 127
    for outer in (True, False, None):
        for inner in (True, False):
            write_config(tmp_path, outer, inner)
            theirs, loading = auto.from_pretrained(tmp_path, output_loading_info=True)
            if loading["missing_keys"]:
                with pytest.raises(TuneError, match=r"missing: .*lm_head\.weight"):
                    load_model(tmp_path)
                continue
            ours = load_model(tmp_path)
            is_tied = theirs.lm_head.weight is theirs.get_input_embeddings().weight
            assert ours.config.tied_head == is_tied, (outer, inner)
            with torch.no_grad():
                assert_close(ours(tokens), theirs.eval()(tokens).logits, atol=1e-5, rtol=1e-5)


def test_a_head_that_differs_from_a_tied_embedding_is_kept(tmp_path):
    """As in transformers, which writes such files: config.json is wrong about them."""
    config = transformers.LlamaConfig(**SMALL | UNTIED)
    theirs, _ = make_pair(config, tmp_path / "source")
    fields = json.loads((tmp_path / "source" / "config.json").read_text())
    (tmp_path / "source" / "config.json").write_text(json.dumps(fields | TIED))
    tokens = random_tokens(1, 50)
    with pytest.warns(UserWarning, match="tie_word_embeddings"):
        ours = load_model(tmp_path / "source")
    assert_close(ours(tokens), theirs(tokens).logits, atol=1e-5, rtol=1e-5)
    check_export(ours, tmp_path / "source", tmp_path / "model")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    assert_close(again(tokens).logits, theirs(tokens).logits, atol=1e-5, rtol=1e-5)
    tensors = load_file(tmp_path / "source" / "model.safetensors")
    same = tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    save_file(same, tmp_path / "source" / "model.safetensors")
    assert load_model(tmp_path / "source").config.tied_head


@pytest.mark.parametrize("files", ["model.safetensors-0000{}-of-00002.safetensors", "any{}.safetensors", "{}.bin"])
@pytest.mark.parametrize("is_own", [True, False])
def test_a_head_of_its_own_is_found_in_the_files_of_the_index(files, is_own, tmp_path):
    save_checkpoint(tmp_path / "m", tie_word_embeddings=False)
    folder = tmp_path / "m"
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    if not is_own:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    names = sorted(tensors)
    weight_map = {name: files.format(1 + (number > 5)) for number, name in enumerate(names)}
    for file in {*weight_map.values()}:
        part = {name: tensors[name] for name in names if weight_map[name] == file}
        save = torch.save if file.endswith(".bin") else save_file
        save(part, folder / file)
    whole = "pytorch_model.bin" if files.endswith(".bin") else "model.safetensors"
    (folder / f"{whole}.index.json").write_text(json.dumps({"weight_map": weight_map}))
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | TIED))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        model = load_model(folder)
    assert model.config.tied_head != is_own and bool(found) == is_own
    assert torch.equal(model.head_module.weight, tensors["lm_head.weight"])
    with torch.device("meta"), FakeTensorMode():
        assert build(str(folder)).config.tied_head != is_own
