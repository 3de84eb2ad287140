"""Families with experts compute what transformers computes, from the same checkpoint folder."""

import copy

import pytest
import torch
from safetensors.torch import load_file
from test_families import SMALL, UNTIED, WINDOW, YARN, random_tokens
from test_families import test_cached_greedy_decoding as test_cached_greedy_decoding
from test_families import test_documents_in_a_row_do_not_see_each_other as test_documents_in_a_row_do_not_see_each_other
from torch.testing import assert_close

from tune.checkpointers import load_model

transformers = pytest.importorskip("transformers")

EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LATENT = {
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "first_k_dense_replace": 1, "n_group": 4,
    "topk_group": 2, "qk_nope_head_dim": 24, "qk_rope_head_dim": 8, "v_head_dim": 20, "kv_lora_rank": 32,
    "q_lora_rank": 28, "num_key_value_heads": 4,
}  # fmt: skip
VARIANTS = {
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
    "deepseek_v3": ("DeepseekV3Config", LATENT),
    "deepseek_v3-yarn": (
        "DeepseekV3Config",
        LATENT | {"q_lora_rank": None, "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.8}},
    ),
    "deepseek_v3-plain": (
        "DeepseekV3Config",
        LATENT | {"n_group": 1, "topk_group": 1, "norm_topk_prob": False, "rope_interleave": False}
        | {"attention_bias": True, "n_shared_experts": 2},
    ),
}  # fmt: skip


@pytest.fixture(scope="module", params=VARIANTS)
def pair(request, tmp_path_factory):
    """A tiny random model of transformers', and ours from the folder it was saved in."""
    config_class, changes = VARIANTS[request.param]
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(**SMALL | UNTIED | changes)
    theirs = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for name, tensor in [*theirs.named_parameters(), *theirs.named_buffers()]:  # starting at 0 or 1 would hide mistakes
        if name.endswith("bias") or (tensor.ndim == 1 and isinstance(tensor, torch.nn.Parameter)):
            torch.nn.init.normal_(tensor, mean=float("norm" in name), std=0.3)
    folder = tmp_path_factory.mktemp(request.param)
    theirs.save_pretrained(folder)
    return theirs, load_model(str(folder))


def on_disk(model):
    """The gradients of `model`, named as a checkpoint names the parameters: each of ours, and each expert's."""
    gradients = {}
    for name, parameter in model.named_parameters():
        names = model.disk_names[name]
        gradients |= (
            {names: parameter.grad} if isinstance(names, str) else dict(zip(names, parameter.grad, strict=True))
        )
    return gradients


def test_logits_and_gradients(pair, tmp_path):
    theirs, ours = pair
    tokens = random_tokens(2, 200)
    expected, logits = theirs(tokens).logits, ours(tokens)
    assert_close(logits, expected, atol=1e-5, rtol=1e-5)

    expected.square().mean().backward()
    logits.square().mean().backward()
    holder = copy.deepcopy(theirs)  # of gradients in place of weights, to have transformers name them as on disk
    for copied, parameter in zip(holder.parameters(), theirs.parameters(), strict=True):
        copied.data = parameter.grad
    holder.save_pretrained(tmp_path)
    references, gradients = load_file(tmp_path / "model.safetensors"), on_disk(ours)
    assert gradients.keys() == {name for name in references if not name.endswith("e_score_correction_bias")}
    for name, gradient in gradients.items():
        assert (gradient - references[name]).norm() <= 1e-4 * references[name].norm() + 1e-7, name
