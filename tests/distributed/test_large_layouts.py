"""benchmarks/large_layouts.py on small models: the same code path, for more processes than exist."""

import json
from pathlib import Path

import pytest
from helpers import result_of, run_processes

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "large_layouts.py"
LLAMA = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "vocab_size": 1024,
    "num_attention_heads": 8, "num_key_value_heads": 4, "rms_norm_eps": 1e-5, "max_position_embeddings": 512,
}  # fmt: skip
DEEPSEEK = LLAMA | {
    "model_type": "deepseek_v3", "num_key_value_heads": 8, "first_k_dense_replace": 1, "moe_intermediate_size": 128,
    "n_routed_experts": 16, "num_experts_per_tok": 4, "n_shared_experts": 1, "n_group": 4, "topk_group": 2,
    "routed_scaling_factor": 2.5, "norm_topk_prob": True, "q_lora_rank": 64, "kv_lora_rank": 64,
    "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32,
}  # fmt: skip


@pytest.mark.weekly
@pytest.mark.parametrize(
    ("config", "axes", "share"),
    [
        (LLAMA, ["tp=2", "cp=2", "pp=2", "dp_replicate=2", "--rank", "33"], 2),
        (DEEPSEEK, ["ep=8", "cp=2"], 1),
    ],
)
def test_one_of_64_processes_has_a_64th(tmp_path, config, axes, share):
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = "--model", str(tmp_path), "--processes", "64", "--tokens", "256"
    sizes = result_of(run_processes(SCRIPT, 1, *options, *axes))
    assert sizes["parameters"] * 64 / sizes["whole"] == pytest.approx(share, rel=0.02)
    assert sizes["gradients"] == sizes["parameters"]
