"""A layout that does not fit the model is refused before the data are read, in every recipe."""

import json
from pathlib import Path

import full_finetune
import pytest
from helpers import run_processes

TRIED = """
import importlib
import json
import sys

from tune import config
from tune.errors import TuneError

for recipe, settings in json.loads(sys.argv[1]):
    sys.path.insert(0, str(config.find_recipe(recipe).parent))
    try:
        importlib.import_module(recipe).main(config.load(recipe, settings))
    except TuneError as error:
        print(error)
"""
WRONG = [
    ("full_finetune", "parallel.ep=2"),
    ("pipeline_finetune", "adapter.rank=4", "model._component_=tune.models.hf", "parallel.pp=2"),
    ("preference_finetune", "parallel.ep=2"),
]


@pytest.mark.weekly
def test_refused_before_the_data_are_read(checkpoint, told_to, tmp_path):
    pytest.importorskip("transformers")
    (tmp_path / "tried.py").write_text(TRIED)
    common = f"model.path={checkpoint}", "dataset.path=nowhere.jsonl", "device=cpu", f"output_dir={tmp_path / 'run'}"
    runs = json.dumps([(recipe, [*common, *settings]) for recipe, *settings in WRONG])
    errors = [line for line in run_processes(tmp_path / "tried.py", 2, runs).splitlines() if "parallel." in line]
    assert [line.split(":")[0] for line in errors] == ["parallel.ep", "parallel.pp", "parallel.ep"]
    lines = [[recipe, *common, *settings] for recipe, *settings in WRONG]
    for text, line in zip(told_to(2, *lines), errors, strict=True):
        assert line in text.splitlines()


def test_every_recipe_checks_the_layout_before_the_data():
    recipes = [path.read_text() for path in Path(full_finetune.__file__).parent.glob("*.py")]
    recipes = [text for text in recipes if "cfg" in text and "backward" in text]
    placed = [
        (text.rindex("distributed.parallelize("), text.index("instantiate(cfg.dataset"), text.index("weights.load("))
        for text in recipes
    ]
    assert len(placed) == 8 and all(list(places) == sorted(places) for places in placed)
