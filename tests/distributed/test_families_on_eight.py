"""Families in layouts of three axes, on eight processes: losses and norms of gradients are those of one process."""

import json
from pathlib import Path

import pytest
from helpers import run_processes
from models.test_families import SMALL, VARIANTS

MEASURE = Path(__file__).with_name("measure_layouts.py")
MIXED = {
    "dp x tp x cp": {"tp": 2, "cp": 2},
    "dp x tp x pp": {"tp": 2, "pp": 2},
    "dp_replicate x cp x pp": {"dp_replicate": 2, "cp": 2, "pp": 2},
    "ep x cp x pp": {"ep": 2, "cp": 2, "pp": 2},
    "ep x dp x tp": {"ep": 2, "tp": 2},
}
DENSE = ["llama", "qwen3-windows", "gemma3_text", "phi3", "qwen3_5_text"]
WITH_EXPERTS = ["qwen3_moe", "gpt_oss", "deepseek_v3"]


@pytest.mark.slow
def test_eight_families_on_eight_processes(tmp_path):
    """Losses and norms of gradients of three steps are those of one process; what cannot be is refused."""
    transformers = pytest.importorskip("transformers")
    families = DENSE + WITH_EXPERTS
    for family in families:
        config_class, changes = VARIANTS[family]
        getattr(transformers, config_class)(**SMALL | changes).save_pretrained(tmp_path / family)
    layouts = [
        (family, how)
        for number, family in enumerate(families)
        for at, how in enumerate(MIXED)
        if (family in WITH_EXPERTS if "ep" in how.split() else (number + at) % 2 or family == "qwen3_5_text")
    ]
    folders = json.dumps({family: str(tmp_path / family) for family in families})
    alone = json.loads(run_processes(MEASURE, 1, folders, json.dumps([[each, {}] for each in families]), "3"))
    one = {family: each["measured"] for family, each in zip(families, alone, strict=True)}
    named = json.dumps([[family, MIXED[how]] for family, how in layouts])
    apart, refused = {}, {}
    for (family, how), found in zip(layouts, json.loads(run_processes(MEASURE, 8, folders, named, "3")), strict=True):
        if "refused" in found:
            refused[family, how] = found["refused"]
        else:
            differences = [abs(a - b) / b for a, b in zip(found["measured"], one[family], strict=True)]
            apart[family, how] = max(differences)
    print(*(f"{family} | {how} | {most:.1e}" for (family, how), most in apart.items()), sep="\n")  # shown by -s
    assert max(apart.values()) < 1e-5
    assert refused.keys() == {(family, how) for family, how in layouts if family == "qwen3_5_text" and "cp" in how}
    assert all("DeltaNet (blocks.0.attention) computes one token after the other" in text for text in refused.values())
