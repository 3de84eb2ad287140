"""Reward functions for answers to home commands."""

import json
from typing import Any

KEYS = {"room", "device", "action", "value", "error"}


def fraction_right(row: dict[str, Any], completion: str) -> float:
    """Return 0 unless the completion is a JSON object with known keys, else 0.2 + 0.8 x the share of correct fields."""
    try:
        found = json.loads(completion)
    except ValueError:
        return 0.0
    if not isinstance(found, dict) or not found or not found.keys() <= KEYS:
        return 0.0
    expected = json.loads(row["messages"][-1]["content"])
    fields = found.keys() | expected.keys()
    return 0.2 + 0.8 * sum(found.get(name, ...) == expected.get(name, ...) for name in fields) / len(fields)
