"""4 and 8 processes: the share of parameters, gradients, and states that each holds. They train like one process."""

import json
from pathlib import Path

import pytest
from helpers import result_of, run_processes

MEASURE = Path(__file__).with_name("measure_layouts.py")
LLAMA = {
    "model_type": "llama", "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "vocab_size": 32,
    "num_attention_heads": 8, "num_key_value_heads": 4, "rms_norm_eps": 1e-5, "max_position_embeddings": 512,
}  # fmt: skip
EXPERTS = LLAMA | {
    "model_type": "qwen3_moe", "num_hidden_layers": 2, "num_experts": 8, "num_experts_per_tok": 2, "head_dim": 16,
    "moe_intermediate_size": 64, "norm_topk_prob": True,
}  # fmt: skip
ALONE = [["llama", {}], ["moe", {}]]
LAYOUTS = {
    4: [["llama", {axis: 4}] for axis in ("dp_shard", "cp", "tp", "pp")] + [["moe", {"ep": 4}]],
    8: [
        ["llama", {"tp": 2, "pp": 2}],
        ["llama", {"tp": 2, "dp_replicate": 2}],
        ["moe", {"ep": 2, "pp": 2, "cp": 2}],
    ],
}


@pytest.mark.weekly
def test_layouts_of_four_and_eight_processes(tmp_path):
    models = {"llama": LLAMA, "moe": EXPERTS}
    for name, config in models.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    folders = json.dumps({name: str(tmp_path / name) for name in models})
    results = {
        count: result_of(run_processes(MEASURE, count, folders, json.dumps(layouts), "2"))
        for count, layouts in {1: ALONE, **LAYOUTS}.items()
    }
    alone = {name: result["measured"] for (name, _), result in zip(ALONE, results[1], strict=True)}
    for count, layouts in LAYOUTS.items():
        for (name, axes), result in zip(layouts, results[count], strict=True):
            assert result["measured"] == pytest.approx(alone[name], rel=1e-5), (count, name, axes)
            share = axes.get("dp_replicate", 1) / count
            assert result["shares"] == pytest.approx([share] * 3, rel=0.02), (count, name, axes)


@pytest.mark.slow
def test_zero_stages_match_the_table(tmp_path):
    """The table of docs/layouts.md."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    measured = result_of(run_processes(Path(__file__).with_name("measure_zero_stages.py"), 4, str(tmp_path)))
    rows = {  # weights, gathered weights, gradients, states
        0: (1, 0, 1, 1), 1: (1 / 4, 1, 1, 1 / 4), 2: (1 / 4, 1, 1 / 4, 1 / 4), 3: (1 / 4, 0, 1 / 4, 1 / 4)
    }  # fmt: skip
    for stage, (weights, gathered, gradients, states) in rows.items():
        for moment, shares in {"in a step": (gathered, gradients), "between steps": (0, 0)}.items():
            expected = [weights, shares[0], shares[1], states]
            sizes = [measured[stage][moment][name] for name in ("weights", "gathered", "gradients", "states")]
            assert sizes == pytest.approx(expected, abs=0.01), (stage, moment)


@pytest.mark.slow
def test_large_parameters_are_gathered_in_pieces():
    assert run_processes(Path(__file__).with_name("gather_pieces.py"), 4).split()[-2:] == ["6", "True"]
