import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tune import config
from tune.cli import main

HELP = """
import sys
before = {*sys.modules}
import tune.cli
try:
    tune.cli.main(["--help"])
finally:
    packages = {name.partition(".")[0] for name in {*sys.modules} - before}
    assert packages - sys.stdlib_module_names == {"tune"}, packages
"""


def test_help_imports_nothing_slow() -> None:
    """It imports no third-party packages, which are slow to import."""
    shown = subprocess.run([sys.executable, "-c", HELP], check=True, capture_output=True, text=True).stdout
    for verb in ("ls", "cp", "cat", "run", "preview", "prepare", "generate", "chat", "download", "convert"):
        assert f"  {verb} " in shown


VALIDATE = """
import sys
from tune.cli import main
try:
    main(["validate", *sys.argv[1:]])
except SystemExit as end:
    assert not end.code
print("unneeded:", *({"torchao", "transformers", "datasets", "pandas", "pyarrow"} & {*sys.modules}))
"""


@pytest.mark.slow
def test_validate_imports_only_what_it_needs(checkpoint: Path, chats: Path) -> None:
    """Imports take nearly all of its time. FSDP alone imports torch's compiler."""
    run = ["full_finetune", f"model.path={checkpoint}", f"dataset.path={chats}", "--world-size", "2", "--device", "cpu"]
    shown = subprocess.run([sys.executable, "-c", VALIDATE, *run], check=False, capture_output=True, text=True)
    assert shown.stdout.endswith("unneeded:\n"), shown


def test_ls_describes_every_recipe_and_config(capsys: pytest.CaptureFixture[str]) -> None:
    main(["ls"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Recipes:"
    described = {line.split()[0]: line.split()[1:] for line in lines if line.startswith("  ")}
    assert set(described) == {*config.list_recipes(), *(f"{name}.yaml" for name in config.list_configs())}
    assert all(described.values())
    assert " ".join(described["full_finetune"]).startswith("Supervised fine-tuning of all parameters")


@pytest.mark.slow
@pytest.mark.parametrize("recipe", config.list_recipes_with_settings())
def test_ls_of_a_recipe_lists_optional_component_arguments(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["ls", recipe])
    shown = capsys.readouterr().out
    assert shown.startswith(config.find_config(recipe).read_text(encoding="utf-8"))
    listed = re.findall(r"^#   ([\w.]+)=(.*)$", shown, flags=re.MULTILINE)
    assert listed and not {"checkpointer.extra", "checkpointer.tell"} & {key for key, _ in listed}
    unwritten = [f"{key}={value}" for key, value in listed]
    before = {*config.read(recipe, [])[1]}
    assert not {note for note in config.read(recipe, unwritten)[1] if not note.startswith("checkpointer.keep")} - before


def test_ls_of_a_recipe_lists_arguments_of_the_functions_that_take_a_group(capsys: pytest.CaptureFixture[str]) -> None:
    """Without those that the recipe gives itself, or that another recipe lists."""
    main(["ls", "lora_finetune"])
    shown = capsys.readouterr().out
    keys = {key for key, _ in re.findall(r"^#   ([\w.]+)=(.*)$", shown, flags=re.MULTILINE)}
    assert keys >= {"parallel.timeout", "parallel.deterministic", "parallel.plan", "parameter_groups.decay_vectors"}
    assert keys >= {"dataset.turns", "loss.accuracy", "evaluate.limit", "model.float8"}
    assert not keys & {"parallel.pp", "parallel.device", "compute.model", "compute.world", "parameter_groups.lr"}


@pytest.mark.slow
def test_ls_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    main(["ls", "--json"])
    assert json.loads(capsys.readouterr().out)["recipes"].keys() == {*config.list_recipes()}
    main(["ls", "full_finetune", "--json"])
    settings = json.loads(capsys.readouterr().out)
    assert (settings["model.path"], settings["optimizer.lr"], settings["optimizer.amsgrad"]) == ("???", 2e-5, False)


def test_cat_distinguishes_a_recipe_from_its_config(capsys: pytest.CaptureFixture[str]) -> None:
    main(["cat", "full_finetune"])
    assert capsys.readouterr().out == config.find_recipe("full_finetune").read_text()
    main(["cat", "full_finetune.yaml"])
    assert capsys.readouterr().out == config.find_config("full_finetune").read_text()


def test_cp_to_the_current_folder_another_folder_and_a_new_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    main(["cp", "full_finetune.yaml", "new/mine.yaml"])
    main(["cp", "full_finetune"])
    main(["cp", "full_finetune", "folder"])
    copies = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.*"))
    names = ["folder/full_finetune.py", "folder/full_finetune.yaml", "full_finetune.py", "full_finetune.yaml"]
    assert copies == [*names, "new/mine.yaml"]
    assert Path("new/mine.yaml").read_text() == config.find_config("full_finetune").read_text()
    assert len(Path("full_finetune.py").read_text().splitlines()) == len(recipe_lines())


def test_cp_overwrites_only_with_force(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text("my work")
    assert fails(["cp", "full_finetune", str(mine)], capsys) == (
        f"error: {mine} already exists. Name another file, or overwrite it with --force.\n"
    )
    assert mine.read_text() == "my work"
    main(["cp", "full_finetune", str(mine), "--force"])
    assert len(mine.read_text().splitlines()) == len(recipe_lines())
    mine.unlink()
    mine.with_suffix(".yaml").write_text("my settings")
    assert "mine.yaml already exists" in fails(["cp", "full_finetune", str(mine)], capsys)
    assert not mine.exists() and mine.with_suffix(".yaml").read_text() == "my settings"


def recipe_lines() -> list[str]:
    return config.find_recipe("full_finetune").read_text().splitlines()


@pytest.mark.weekly
def test_new_setting_in_a_copied_recipe_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], checkpoint: Path, chats: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    main(["cp", "full_finetune", "mine.py"])
    assert "mine.py reads its settings from mine.yaml" in capsys.readouterr().out
    with Path("mine.yaml").open("a") as settings:
        settings.write("greeting: hello\n")
    text = Path("mine.py").read_text()
    Path("mine.py").write_text(
        text.replace("def main(cfg):\n", "def main(cfg):\n    raise SystemExit(f'{cfg.greeting}!')\n")
    )
    arguments = [f"model.path={checkpoint}", f"dataset.path={chats}"]
    for start in (
        ["mine.py"],
        ["-m", "tune.cli", "run", "mine.py"],
        ["-m", "tune.cli", "run", "--standalone", "mine.py"],
    ):
        done = subprocess.run([sys.executable, *start, *arguments, "greeting=bye"], capture_output=True, text=True)
        assert "bye!" in done.stderr, done.stderr
    assert fails(["run", "--standalone", "mine.py", *arguments, "greting=1"], capsys).endswith("'greeting'?\n")
    assert (
        "greeting: hello"
        in subprocess.run([sys.executable, "mine.py", "--help"], capture_output=True, text=True).stdout
    )
    for name in ("mine.py", "mine.yaml"):  # commands accept a recipe or its config
        main(["prepare", name, *arguments, "greeting=bye"])
        assert "48" in capsys.readouterr().out
    Path("other.yaml").write_text("greeting: from a file\n")
    with pytest.raises(SystemExit, match="from a file!"):
        main(["run", "mine.py", "--config", "other.yaml", *arguments])


@pytest.mark.parametrize(
    ("arguments", "explanation"),
    [
        (["cat", "ful_finetune"], "Did you mean 'full_finetune'?"),
        (
            ["cat", "nope"],
            "reward_finetune. The configs are distill.yaml, evaluate.yaml, ",
        ),
        (["cp", "full_finetune", "mine.yaml"], "full_finetune.py can be copied to a .py file"),
        (["run", "full_fintune"], "Did you mean 'full_finetune'?"),
        (["run", "missing.py"], "missing.py"),
        (["run", "lora"], "Did you mean 'lora_finetune'?"),
        (["run", "--nproc-per-node", "2", "full_fintune"], "Name one of distill, evaluate, full_finetune, "),
        (["run", "--nproc-per-node", "2", "full_finetune", "lr=1"], "Did you mean 'optimizer.lr'?"),
        (["convert", "missing.gguf", "out"], "missing.gguf: no such file"),
    ],
)
def test_mistakes_end_in_one_message(
    arguments: list[str],
    explanation: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    message = fails(arguments, capsys)
    assert message.startswith("error: ")
    assert explanation in message
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("verb", "meant"), [("lss", "ls"), ("train", "run"), ("check", "checkpoints")])
def test_unknown_command_is_reported(verb: str, meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    message = fails([verb], capsys)
    assert f"'{verb}'" in message and f"'{meant}'" in message


def fails(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return stderr of a call that must end with exit code 2."""
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    return capsys.readouterr().err
