from pathlib import Path

import pytest
from omegaconf import OmegaConf

from tune.config import load, save, saved
from tune.errors import TuneError
from tune.secrets import REMOVED


def failure(*arguments: str, default: str = "default.yaml") -> str:
    with pytest.raises(TuneError) as caught:
        load(default, arguments)
    return str(caught.value)


def test_default_config(folder: Path) -> None:
    cfg = load("default.yaml", ["name=run"])
    assert cfg.epochs == 1
    assert cfg.part == {"_component_": "parts.Steady", "lr": 0.1, "name": "run"}


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("part.lr=1e-5", "part.lr", 1e-5),
        ("name=key=value", "name", "key=value"),
        ("name='\"12\"'", "name", '"12"'),
        ("tags=[1, x]", "tags", [1, "x"]),
        ("tags=[]", "tags", []),
        ("note={deep: {down: 1}}", "note", {"deep": {"down": 1}}),
        ("note=null", "note", None),
        ("part.name=${name}-part", "part.name", "run-part"),
        ("threshold=2", "threshold", 2),
    ],
)
def test_override_on_the_command_line(folder: Path, override: str, key: str, value: object) -> None:
    assert OmegaConf.select(load("default.yaml", ["name=run", override]), key) == value


@pytest.mark.parametrize("arguments", [["part.lr", "=", "0.5"], ["part.lr=", "0.5"], ["part.lr", "=0.5"]], ids=" ".join)
def test_blanks_around_the_equals_sign_are_one_problem(folder: Path, arguments: list[str]) -> None:
    (problem,) = failure("name=run", *arguments).splitlines()[1:]
    assert problem.strip().startswith("part.lr: ") and problem.endswith("part.lr=0.5")


def test_empty_value_does_not_take_the_next_argument(folder: Path) -> None:
    (problem,) = failure("name=", "part.lr=0.5").splitlines()[1:]
    assert problem.strip().startswith("part.name: null")


def test_overrides_beat_files_and_later_files_beat_earlier_ones(folder: Path) -> None:
    (folder / "one.yaml").write_text("name: one\nepochs: 1\ncompute: {chunk_tokens: 1}\n")
    (folder / "two.yaml").write_text("name: two\nepochs: 2\n")
    cfg = load("default.yaml", ["epochs=3", "--config", "one.yaml", "--config=two.yaml"])
    assert (cfg.name, cfg.epochs, cfg.compute.chunk_tokens, cfg.compute.cpu_offload) == ("two", 3, 1, False)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("foo", "'foo': is not key=value."),
        ("=1", "'=1': is not key=value."),
        ("--lr=1", "--lr: is not an option. A recipe has --config, --debug, --help."),
        ("--lr=1", "Write settings without dashes: lr=1"),
        ("--config", "argument --config: expected one argument. The options are --config FILE_OR_NAME, --debug and"),
        ("name=[1", "name: '[1' is not YAML"),
        ("name=${", "name: '${' has a ${ that names no other setting"),
    ],
)
def test_malformed_argument_is_rejected(folder: Path, argument: str, message: str) -> None:
    assert message in failure("name=run", argument)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["reward=my.Judge", "reward.path=x"],
            "reward: is given as 'my.Judge' and by its keys (path)",
        ),
        (["reward.path=x", "reward=my.Judge"], "a component with keys as reward._component_."),
        (["reward=[a.b]", "reward.weight=2"], "reward: is given as ['a.b'] and by its keys (weight)"),
        (["loss=tune.losses.IPO", "loss.beta=1"], "loss: is given as 'tune.losses.IPO' and by its keys (beta)"),
    ],
)
def test_value_and_keys_of_one_setting_conflict(arguments: list[str], message: str) -> None:
    """Neither replaces the other silently."""
    for order in (arguments, [*arguments, "seed=3"]):
        assert message in failure("model.path=m", "dataset.path=d", *order, default="grpo")
    together = ["reward._component_=my.Judge", "reward.path=x", "adapter=null", "adapter.rank=4"]
    assert load("grpo", ["model.path=m", "dataset.path=d", *together]).reward.path == "x"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: [1\n", "mine.yaml:3: this is not YAML: "),
        ("name: x\nname: y\n", "mine.yaml:2: this is not YAML: found duplicate key name"),
        ("- a\n- b\n", "mine.yaml: must have `key: value` lines at its top level, not a list."),
        ("12", "mine.yaml: cannot be read: Invalid loaded object type: int."),
        ("just words", "just words: is not a setting. --help lists all of them. (mine.yaml)"),
        ("# nothing yet\n", "mine.yaml: is empty."),
        ("", "mine.yaml: is empty."),
        ("name: ${", "mine.yaml: cannot be read: "),
        ("name: \x00", "mine.yaml: cannot be read: unacceptable character"),
    ],
)
def test_invalid_file_is_rejected(folder: Path, text: str, message: str) -> None:
    (folder / "mine.yaml").write_text(text)
    assert message in failure("--config", "mine.yaml")


def test_binary_file_is_rejected(folder: Path) -> None:
    (folder / "mine.yaml").write_bytes(b"\xff\xfe\x80model")
    assert "mine.yaml: cannot be read: 'utf-8' codec can't decode" in failure("--config", "mine.yaml")


def test_missing_file_is_rejected(folder: Path) -> None:
    assert "there is no config 'sub/mine.yaml'" in failure("--config", "sub/mine.yaml")
    assert "there is no config 'full_finetun'" in failure("--config", "full_finetun")
    assert "Did you mean 'full_finetune'?" in failure("--config", "full_finetun")
    (folder / "triage.yaml").touch()
    assert (found := failure("--config", "triag.yaml")).endswith("'triage.yaml'?") and str(folder) in found
    assert failure("--config", str(folder / "triag.yaml")).endswith(f"'{folder / 'triage.yaml'}'?")
    (folder / "runs").mkdir()
    assert "there is no config 'runs'" in failure("--config", "runs")


def test_saved_settings_reproduce_the_run(folder: Path) -> None:
    cfg = load(
        "default.yaml", ["name=run", "epochs=3", "part._component_=parts.Rising", "note=${name}", "part.growth=0.1"]
    )
    save(cfg, folder)
    assert "${" not in (folder / "config.yaml").read_text()
    assert load("default.yaml", ["--config", "config.yaml"]) == cfg


def test_secrets_are_not_saved(folder: Path) -> None:
    secrets = {"wandb": {"api_key": "k", "project": "p"}, "hf_token": "t", "list": [{"password": "p"}]}
    harmless = {"chunk_tokens": 1, "pad_token": "<pad>", "tokenizer": "x"}
    save(OmegaConf.create(secrets | harmless), folder)
    saved = OmegaConf.load(folder / "config.yaml")
    assert saved == {
        "wandb": {"api_key": REMOVED, "project": "p"},
        "hf_token": REMOVED,
        "list": [{"password": REMOVED}],
        **harmless,
    }


def test_removed_secrets_are_asked_for_again(folder: Path) -> None:
    """A setting of which a run removed a secret has no value, and a harmless one with such a name has its value."""
    note = {"bot_token": "sesame", "token": "</think>", "path": "https://me:pw@host/a"}
    cfg = load("default.yaml", ["name=run"])
    cfg.note = note
    save(cfg, folder)
    again = ["--config", str(folder / "config.yaml")]
    assert "note: note.bot_token " in failure(*again)
    given = load("default.yaml", [*again, "note={bot_token: other, token: </think>, path: a}"])
    assert given.note.bot_token == "other"
    assert saved(folder)["note.token"] == "</think>"
    cfg.note = note | {"bot_token": None}
    save(cfg, folder / "..")
    assert "note: note.path " in failure("--config", str(folder / ".." / "config.yaml"))


def test_interpolation_in_a_run_folder_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is allowed in a file of the user, and as plain text in a run folder."""
    monkeypatch.setenv("MINE", "value")
    (folder / "config.yaml").write_text("name: ${oc.env:MINE}\n")
    assert load("default.yaml", ["--config", "config.yaml"]).name == "value"
    (folder / "run.json").write_text("{}")
    message = failure("--config", "config.yaml")
    assert "config.yaml: name: '${oc.env:MINE}'" in message
    cfg = load("default.yaml", [r"name=\${oc.env:MINE} \\\${x}"])
    assert cfg.name == r"${oc.env:MINE} \${x}"
    (folder / "config.yaml").unlink()
    save(cfg, folder)
    assert saved(folder)["name"] == cfg.name
    assert load("default.yaml", ["--config", "config.yaml"]).name == cfg.name


@pytest.mark.slow
def test_defaults_of_full_finetune(tmp_path: Path) -> None:
    cfg = load(
        "full_finetune", ["model.path=model", "dataset.path=data.jsonl", "optimizer._component_=torch.optim.SGD"]
    )
    assert cfg.tokenizer.path == "model"
    assert cfg.loss.chunk_tokens is None and cfg.compute.dtype == "bf16"
    save(cfg, tmp_path)
    assert load("full_finetune", ["--config", str(tmp_path / "config.yaml")]) == cfg
