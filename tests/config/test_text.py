"""A name is text, however YAML would parse it."""

from pathlib import Path
from typing import Any

import pytest
from helpers import slow_but
from omegaconf import OmegaConf

from tune import config
from tune.config.check import walk
from tune.config.instantiate import COMPONENT
from tune.config.signature import signature_of
from tune.config.text import parse, read
from tune.errors import TuneError
from tune.types import fits

NAMES = [
    "run #2", " run ", "a,b", "a=b", "12:30", "a: b", "C:", "~x", "x~", "{a", "{a}", "{a: 1}", "[a]", "[a", "007",
    "2024", "1_000", "0x10", "1e5", "1.5", "-1", "-x", "--out", "true", "no", "on", "null.", "ünï-日本", "!x", "&x",
    "*x", "@x", "%x", "`x`", "|", ">", "?", "- x", "it's", "x'", '"a" and "b"', "a\\b", "a\tb", "$x", "~",
]  # fmt: skip
NO_NAMES = ("environment", "reward", "score", "adapter.target_modules")  # names of functions and modules, or lists
GIVEN = {"model.path": "m", "dataset.path": "d", "teacher.path": "t", "reward": "len"}


def kind_of(values: dict[str, Any], types: dict[str, Any], key: str) -> Any:
    """Return the type of a setting from a recipe's YAML and its components."""
    group, _, name = key.rpartition(".")
    node = OmegaConf.select(OmegaConf.create(values), group) if group else values
    if COMPONENT in node and name != COMPONENT:
        parameter = signature_of(node[COMPONENT]).parameters.get(name)
        return parameter.annotation if parameter else Any
    return types.get(key, type(node._get_node(name)._value()) if group else type(node[name]))


def text_settings(recipe: str) -> list[str]:
    values = config.read_file(config.find_config(recipe))
    keys = [key for key, value in walk(values) if not isinstance(value, dict) and not key.endswith(COMPONENT)]
    types = config.types_of_settings(config.find_recipe(recipe), values)
    kinds = {key: kind_of(values, types, key) for key in keys}
    return [key for key, kind in kinds.items() if fits("any text", kind) and not fits(object(), kind)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe", slow_but(config.list_recipes_with_settings()[::4], config.list_recipes_with_settings())
)
def test_text_settings_take_any_name(recipe: str, tmp_path: Path) -> None:
    keys = [key for key in text_settings(recipe) if key not in NO_NAMES]
    assert {"model.path", "out" if recipe == "evaluate" else "output_dir"} <= {*keys}
    required = config.read_file(config.find_config(recipe))
    required_names = {key: text for key, text in GIVEN.items() if "???" in str(dict(walk(required)).get(key))}
    for start in range(0, len(NAMES), len(keys)):
        names = {key: NAMES[(start + place) % len(NAMES)] for place, key in enumerate(keys)}
        cfg, findings = config.read(recipe, [f"{key}={text}" for key, text in (required_names | names).items()])
        assert {key: OmegaConf.select(cfg, key) for key in keys} == names, findings
        OmegaConf.save(cfg, tmp_path / "config.yaml")  # the config of a run folder reproduces it
        again, _ = config.read(recipe, ["--config", str(tmp_path / "config.yaml")])
        assert {key: OmegaConf.select(again, key) for key in keys} == names


@pytest.mark.parametrize("written", ["2024", "007", "12:30", "1e5", "0x10", "yes", "1_000"])
def test_name_in_a_file_needs_no_quotes(folder: Path, written: str) -> None:
    (folder / "mine.yaml").write_text(f"name: run\npart: {{name: {written}}}\n")
    cfg = config.load("default.yaml", ["--config", "mine.yaml"])
    assert cfg.part.name == written
    assert config.load("default.yaml", ["name=run", f"part.name={written}"]).part.name == written


def test_names_in_lists(tmp_path: Path) -> None:
    common = ["model.path=m", "dataset.path=d"]
    (tmp_path / "mine.yaml").write_text("evaluate: {tasks: [2024, 007, 12:30, no]}\n")
    for arguments in (["evaluate.tasks=[2024, 007, 12:30, no]"], ["--config", str(tmp_path / "mine.yaml")]):
        cfg, _ = config.read("full_finetune", [*common, *arguments])
        assert cfg.evaluate.tasks == ["2024", "007", "12:30", "no"]


@pytest.mark.slow
def test_numbers_and_yaml_words_keep_their_types(folder: Path) -> None:
    for text, value in {
        "7": 7, "-7": -7, "1_000": 1000, "1e-5": 1e-5, "2.5": 2.5, "true": True, "False": False, "null": None,
        "007": "007", "12:30": "12:30", "010": "010", "x": "x", "run #2": "run #2", '"7"': "7",
    }.items():  # fmt: skip
        note = config.load("default.yaml", ["name=run", f"note={text}"]).note
        assert (note, type(note)) == (value, type(value))


def test_unterminated_list_is_rejected(folder: Path) -> None:
    for text in ("[1", "{a", "[1] #2"):
        with pytest.raises(TuneError, match="note: "):
            config.load("default.yaml", ["name=run", f"note={text}"])


def test_home_folder_is_expanded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder))
    (folder / "mine.yaml").write_text("output_dir: ~/runs/a\nmodel: {path: ~/m}\ndataset: {path: ~/d}\n")
    cfg = config.load("full_finetune", ["--config", "mine.yaml"])
    assert [cfg.output_dir, cfg.model.path, cfg.tokenizer.path] == [f"{folder}/{x}" for x in ("runs/a", "m", "m")]
    assert config.local_folder("~") == folder


def test_group_that_the_shell_split_is_joined(folder: Path) -> None:
    group = ["dataset.columns={instruction:", "question,", "output:", "answer}"]
    words = ["model.path=m", "dataset.path=d", *group, "max_steps=3"]
    cfg = config.load("full_finetune", words)
    assert (dict(cfg.dataset.columns), cfg.max_steps) == ({"instruction": "question", "output": "answer"}, 3)
    with pytest.raises(TuneError, match="question"):
        config.load("full_finetune", [*words[:4], "max_steps=3"])


def test_one_pair_of_quotes_around_a_value_is_removed(folder: Path) -> None:
    """As in YAML and on other command lines; the content is text."""
    for quoted in ("'run #2'", '"run #2"'):
        cfg = config.load("full_finetune", ["model.path=m", "dataset.path=d", f"output_dir={quoted}"])
        assert cfg.output_dir == "run #2"


@pytest.mark.parametrize("written", ["010", "0x10", "12:30", "0b11", "-017", "1:30.5"])
@pytest.mark.parametrize("form", ["{}", "[{}]", "{{n: {}}}"])
def test_numbers_of_other_kinds_are_texts_everywhere(folder: Path, written: str, form: str) -> None:
    """YAML 1.1 has octal, hexadecimal, binary and sexagesimal numbers: 010 is 8, and 12:30 is 750."""
    (folder / "mine.yaml").write_text(f"part: {{size: {form.format(written)}}}\n")
    of_file = read(folder / "mine.yaml").values
    of_line = parse(form.format(written))[0]
    assert of_file == {"part": {"size": of_line}}
    assert of_line in (written, [written], {"n": written})


def test_octal_seed_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("seed: 010\n")
    _, findings = config.read("full_finetune", ["--config", str(tmp_path / "mine.yaml"), "model.path=m"])
    assert any("seed" in str(finding) and "010" in str(finding) for finding in findings)
