"""The data and the reward of examples/reinforcement."""

import importlib.util
import json
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "reinforcement"


def module(name):
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ('{"room": "hall", "device": "lamp", "action": "on"}', 1.0),
        ('{"room": "hall", "device": "lamp", "action": "off"}', 0.2 + 0.8 * 2 / 3),
        ('{"room": "hall", "device": "lamp", "action": "on", "value": 3}', 0.2 + 0.8 * 3 / 4),
        ('{"room": "hall"}', 0.2 + 0.8 / 3),
        ('{"error": "no"}', 0.2),
        ('{"room": "hall", "colour": "red"}', 0.0),
        ("{}", 0.0),
        ("[1]", 0.0),
        ("on", 0.0),
    ],
)
def test_fraction_right(completion, reward):
    answer = {"role": "assistant", "content": '{"room": "hall", "device": "lamp", "action": "on"}'}
    assert module("rewards").fraction_right({"messages": [answer]}, completion) == pytest.approx(reward)


def test_reinforcement_data(tmp_path, monkeypatch):
    """Requests come from the training file, in the held-out shares of kinds; nine of ten mixed-up answers are wrong."""
    monkeypatch.chdir(FOLDER.parents[1])
    reinforce = module("reinforce")
    requests, mixed_up = ([json.loads(line) for line in file.open()] for file in reinforce.write_data(tmp_path))
    train, held_out = (
        [json.loads(line) for line in (reinforce.HOME / f"{name}.jsonl").open()] for name in ("train", "validation")
    )
    assert (len(requests), len(mixed_up)) == (960, 700)
    right = {row["messages"][-2]["content"]: row["messages"][-1]["content"] for row in train}
    for row in (*requests, *mixed_up):
        assert row["messages"][-2]["content"] in right
    assert all(right[row["messages"][-2]["content"]] == row["messages"][-1]["content"] for row in requests)
    same = sum(right[row["messages"][-2]["content"]] == row["messages"][-1]["content"] for row in mixed_up)
    assert 0.05 < same / 700 < 0.2
    for kind in {*map(reinforce.kind, held_out)}:
        shares = [sum(reinforce.kind(row) == kind for row in rows) / len(rows) for rows in (requests, held_out)]
        assert shares[0] == pytest.approx(shares[1], abs=0.06)
    again = reinforce.write_data(tmp_path)
    assert [json.loads(line) for line in again[0].open()] == requests
