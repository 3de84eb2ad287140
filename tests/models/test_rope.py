"""Frequencies at published sizes; in tiny models most settings of a scaling have no effect."""

import pytest
import torch
from torch.testing import assert_close

from tune.checkpointers import load_model
from tune.models import build
from tune.models.rope import SCALINGS, Rope, RopeConfig

transformers = pytest.importorskip("transformers")
rope_utils = pytest.importorskip("transformers.modeling_rope_utils")

YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "original_max_position_embeddings": 8192}
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 4096}
KINDS = {
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 8.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 8.0},
    "llama3": LLAMA3 | {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "llama3, others": LLAMA3 | {"factor": 32.0, "low_freq_factor": 2.0, "high_freq_factor": 8.0},
    "yarn": YARN,
    "yarn, betas": YARN | {"beta_fast": 20, "beta_slow": 3},
    "yarn, not truncated": YARN | {"truncate": False, "attention_factor": 1.2},
    "yarn, scales": YARN | {"mscale": 0.9, "mscale_all_dim": 0.5},
    "yarn, below the first": YARN | {"original_max_position_embeddings": 64, "rope_theta": 1e4},
    "yarn, beyond the last": YARN | {"rope_theta": 10.0},
    "yarn, a border that is no frequency": YARN | {"rope_theta": 1e3},
    "yarn, all beyond": YARN | {"rope_theta": 10.0, "beta_fast": 0.02, "beta_slow": 0.01},
    "yarn, one border": YARN | {"beta_fast": 2, "beta_slow": 2, "truncate": False},
    "longrope": LONG | {"short_factor": [1 + i / 64 for i in range(64)], "long_factor": [1.0 + i for i in range(64)]},
}


@pytest.mark.parametrize("kind", KINDS)
def test_frequencies_and_magnitude_match_transformers(kind, tmp_path):
    config = transformers.LlamaConfig(
        hidden_size=512, num_attention_heads=4, max_position_embeddings=131072, rope_parameters=KINDS[kind]
    )
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        (rope,) = build(str(tmp_path)).ropes
    frequencies, magnitude = SCALINGS[rope.kind](rope)
    theirs = rope_utils.ROPE_INIT_FUNCTIONS[KINDS[kind]["rope_type"]]
    lengths = [4096, 4097] if rope.kind == "longrope" else [4096]
    expected = [theirs(config, "cpu", seq_len=length) for length in lengths]
    assert_close(frequencies.view(len(lengths), 64), torch.stack([values for values, _ in expected]))
    assert [magnitude] * len(lengths) == pytest.approx([scale for _, scale in expected])


def test_angles_are_exact_at_positions_beyond_bf16():
    config = RopeConfig(size=8, max_positions=8192, theta=100.0)
    positions = torch.tensor([[0, 1, 257, 4097, 8191]])
    rotation = Rope(config)(positions, None, dtype=torch.bfloat16)
    angles = positions.double()[..., None] / 100.0 ** (torch.arange(0, 8, 2) / 8)
    for rounded, exact in ((rotation.cos, angles.cos()), (rotation.sin, angles.sin())):
        assert rounded.dtype == torch.bfloat16
        assert_close(rounded[0, :, 0].double(), torch.cat([exact, exact], dim=-1)[0], atol=4e-3, rtol=4e-3)


@pytest.mark.parametrize("length", [40, 41])
def test_documents_of_the_original_length_use_the_short_factors(length, tmp_path):
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 1.1], "long_factor": [2.0, 9.0]}
    torch.manual_seed(0)
    theirs = transformers.Phi3ForCausalLM(
        transformers.Phi3Config(
            vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
            initializer_range=0.3, pad_token_id=None, original_max_position_embeddings=40,
            max_position_embeddings=160, rope_parameters=rope,
        )
    )  # fmt: skip
    theirs.save_pretrained(tmp_path)
    tokens = torch.arange(length)[None]
    assert_close(load_model(str(tmp_path))(tokens), theirs(tokens).logits, atol=1e-5, rtol=1e-5)
