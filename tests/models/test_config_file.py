"""What config.json says is understood or refused, never ignored."""

import json

import pytest
import torch

from tune.errors import TuneError
from tune.models import build

LLAMA = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
    "num_attention_heads": 4, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "hidden_act": "silu",
}  # fmt: skip
QWEN3 = LLAMA | {"model_type": "qwen3", "head_dim": 8}


def build_from(tmp_path, fields):
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with torch.device("meta"):
        return build(str(tmp_path))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (LLAMA | {"model_type": "mamba"}, "model_type 'mamba' is not supported; supported: .*llama.*qwen3"),
        ({"vocab_size": 3}, r"model_type '\(none\)' is not supported"),
        (LLAMA | {"hidden_act": "tanh"}, "hidden_act='tanh' is not supported; supported: silu, "),
        (LLAMA | {"hidden_size": None}, "field 'hidden_size' is missing"),
        (LLAMA | {"vocab_size": "64"}, "field 'vocab_size' must be a positive integer; found '64'"),
        (LLAMA | {"num_experts": 8}, "not supported for model_type 'llama': num_experts=8"),
        (LLAMA | {"quantization_config": {"bits": 4}}, "the weights are quantised"),
        (LLAMA | {"rope_scaling": {"rope_type": "ntk"}}, "rope type 'ntk' is not supported; supported: default"),
        (LLAMA | {"rope_scaling": {"type": "longrope", "short_factor": [1] * 4}}, "'longrope' has no 'long_factor'"),
        (LLAMA | {"rope_scaling": {"type": "linear", "factor": 2.0, "mrope": 1}}, "unknown fields: mrope"),
        (LLAMA | {"rope_scaling": {"rope_type": "linear"}}, "rope scaling 'linear' has no 'factor'"),
        (LLAMA | {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        (LLAMA | {"num_key_value_heads": 3}, "num_attention_heads=4 is not a multiple of num_key_value_heads=3"),
        (LLAMA | {"tie_word_embeddings": "yes"}, "field 'tie_word_embeddings' must be true or false; found 'yes'"),
        (LLAMA | {"rms_norm_eps": "small"}, "field 'rms_norm_eps' must be a positive number; found 'small'"),
        (LLAMA | {"rope_interleaved": True}, "not supported for model_type 'llama': rope_interleaved=True"),
        (QWEN3 | {"layer_types": ["linear_attention"]}, r"layer_types has \['linear_attention'\]"),
        (QWEN3 | {"layer_types": ["full_attention"] * 3}, "layer_types has 3 entries for num_hidden_layers=1"),
        (QWEN3 | {"use_sliding_window": True, "sliding_window": 0}, "sliding_window must be a positive integer"),
        ([1], "must hold a mapping; found list"),
    ],
)
def test_refused(tmp_path, fields, message):
    with pytest.raises(TuneError, match=message):
        build_from(tmp_path, fields)


def test_no_folder_no_file_no_json(tmp_path):
    with pytest.raises(TuneError, match="does not exist"):
        build(str(tmp_path / "nowhere"))
    (tmp_path / "notes.txt").touch()
    with pytest.raises(TuneError, match=r"has no config\.json; found notes\.txt"):
        build(str(tmp_path))
    with pytest.raises(TuneError, match="is a file"):
        build(str(tmp_path / "notes.txt"))
    (tmp_path / "config.json").write_text('{"model_type": ')
    with pytest.raises(TuneError, match="is not valid JSON"):
        build(str(tmp_path))


def test_older_and_newer_rope_fields_mean_the_same(tmp_path):
    scaling = {"type": "linear", "factor": 2.0}
    older = build_from(tmp_path, LLAMA | {"rope_theta": 5e5, "rope_scaling": scaling})
    newer = build_from(tmp_path, LLAMA | {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}})
    assert older.config == newer.config
    rope = older.config.layers[0].attention.rope
    assert rope.theta == 5e5 and rope.kind == "linear"


def test_fields_without_effect_are_no_obstacle(tmp_path):
    extra = {"_name_or_path": "x", "use_cache": True, "pretraining_tp": 2, "sliding_window": None, "is_decoder": False}
    assert build_from(tmp_path, LLAMA | extra).config == build_from(tmp_path, LLAMA).config


def test_dropout_of_the_original_training_is_said_to_be_left_out(tmp_path):
    with pytest.warns(UserWarning, match=r"attention_dropout=0\.1 is not applied"):
        build_from(tmp_path, LLAMA | {"attention_dropout": 0.1})


def test_dynamic_rope_is_refused_beyond_the_trained_length(tmp_path):
    scaling = {"rope_type": "dynamic", "factor": 2.0}
    model = build_from(tmp_path, LLAMA | {"rope_scaling": scaling}).to_empty(device="cpu")
    model(torch.zeros(1, 64, dtype=torch.long))
    with pytest.raises(TuneError, match="a document of 65 tokens is longer than the 64"):
        model(torch.zeros(1, 65, dtype=torch.long))
