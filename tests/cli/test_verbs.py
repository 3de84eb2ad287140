import subprocess
import sys
import time
from pathlib import Path

import pytest

from tune import config
from tune.cli import main


def test_help_is_instant_and_imports_no_torch() -> None:
    script = "import sys, tune.cli\ntry: tune.cli.main(['--help'])\nfinally: assert 'torch' not in sys.modules"
    seconds = []
    for _ in range(3):
        start = time.monotonic()
        shown = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout
        seconds.append(time.monotonic() - start)
    assert min(seconds) < 0.5
    for verb in ("ls", "cp", "cat", "run", "preview", "prepare", "download", "convert"):
        assert f"  {verb} " in shown


def test_ls_says_what_each_recipe_and_config_is_for(capsys: pytest.CaptureFixture[str]) -> None:
    main(["ls"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Recipes:"
    assert any(line.split(maxsplit=1) == ["full_finetune", lines[1].split(maxsplit=1)[1]] for line in lines)
    described = {line.split()[0]: line.split()[1:] for line in lines if line.startswith("  ")}
    assert set(described) == {*config.list_recipes(), *(f"{name}.yaml" for name in config.list_configs())}
    assert all(described.values())


def test_cat_tells_a_recipe_from_its_config(capsys: pytest.CaptureFixture[str]) -> None:
    main(["cat", "full_finetune"])
    assert capsys.readouterr().out == config.find_recipe("full_finetune").read_text()
    main(["cat", "full_finetune.yaml"])
    assert capsys.readouterr().out == config.find_config("full_finetune").read_text()


def test_cp_copies_to_here_to_a_folder_and_to_a_new_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    main(["cp", "full_finetune"])
    main(["cp", "full_finetune", "folder"])
    main(["cp", "full_finetune.yaml", "new/mine.yaml"])
    copies = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.*"))
    assert copies == ["folder/full_finetune.py", "full_finetune.py", "new/mine.yaml"]
    assert Path("full_finetune.py").read_text() == config.find_recipe("full_finetune").read_text()


def test_cp_overwrites_only_by_force(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text("my work")
    assert fails(["cp", "full_finetune", str(mine)], capsys) == (
        f"error: {mine} exists already. Name another file, or overwrite it with --force.\n"
    )
    assert mine.read_text() == "my work"
    main(["cp", "full_finetune", str(mine), "--force"])
    assert mine.read_text() == config.find_recipe("full_finetune").read_text()


@pytest.mark.parametrize(
    ("arguments", "explanation"),
    [
        (["cat", "ful_finetune"], "Did you mean 'full_finetune'?"),
        (["cp", "full_finetune", "mine.yaml"], "full_finetune.py is copied to a .py file"),
        (["run", "full_fintune"], "Did you mean 'full_finetune'?"),
        (["run", "missing.py"], "missing.py"),
        (["run", "--nproc-per-node", "2", "full_fintune"], "name one of full_finetune"),
        (["run", "--nproc-per-node", "2", "full_finetune", "lr=1"], "Did you mean 'optimizer.lr'?"),
        (["convert", "missing.gguf", "out"], "missing.gguf: there is no such file"),
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


def test_a_verb_that_does_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert "'ls', 'cp', 'cat', 'run'" in fails(["lss"], capsys)


def fails(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What a call that must end with exit code 2 says on stderr."""
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    return capsys.readouterr().err
