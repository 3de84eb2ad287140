"""Rows held out of the training data are used for validation, without a second dataset."""

import json

import pytest


@pytest.mark.slow
def test_fraction_of_the_rows_is_held_out_for_validation(inputs, run_recipe):
    run = inputs.folder / "held_out"
    assert run_recipe(inputs.settings("dataset.validation_fraction=0.3", f"output_dir={run}")) == 0
    data = json.loads((run / "data.json").read_text())
    assert 0 < data["dropped"]["held out for validation"] == data["rows"] - data["kept"] < 30
    assert "validation_loss" in json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
