"""A run writes to its own folder: not over another recipe's run, a model or data."""

import importlib.util
import shutil

import distill
import lora_finetune
import pytest
from helpers import weekly_but
from safetensors.torch import load_file

from tune.checkpointers import add_tokens
from tune.cli import main
from tune.errors import TuneError
from tune.peft import resolve_model


def contents(folder):
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.mark.slow
def test_folder_of_another_recipe_is_refused(inputs, run_recipe, told, capsys):
    """The run once printed 'continued ... done', and distilled nothing."""
    before = contents(inputs.run)
    settings = inputs.settings(f"teacher.path={inputs.model}")
    again = [setting for setting in settings if not setting.startswith("output_dir=")]
    for place in (settings, [*again, f"output_dir={inputs.folder / 'new'}", f"resume={inputs.run}"]):
        assert run_recipe(place, distill) == 2
        message = capsys.readouterr().err
        assert "resume: " in message and "full_finetune" in message and "distill" in message
        assert "full_finetune" in told("distill", place)
    assert contents(inputs.run) == before


@pytest.mark.slow
def test_folder_of_another_recipe_is_refused_without_a_checkpoint(inputs, run_recipe, told, capsys):
    shutil.rmtree(inputs.run / "checkpoints")
    before = contents(inputs.run)
    assert run_recipe(inputs.settings(), lora_finetune) == 2
    message = capsys.readouterr().err
    assert "output_dir: " in message and "full_finetune" in message and "lora_finetune" in message
    assert "full_finetune" in told("lora_finetune", inputs.settings())
    assert contents(inputs.run) == before


@pytest.mark.slow
def test_copy_of_a_recipe_may_not_use_its_folder(inputs, told, tmp_path, capsys):
    """`tune validate` reports what the copy's run does. The copy may also be named by its settings file."""
    main(["cp", "full_finetune", str(tmp_path / "mine.py")])
    for recipe in ("mine.py", "mine.yaml"):
        message = told(str(tmp_path / recipe), inputs.settings())
        assert "full_finetune" in message and "mine" in message
    assert told(str(tmp_path / "mine.py"), inputs.settings(f"output_dir={inputs.folder / 'new'}")) == ""
    spec = importlib.util.spec_from_file_location("mine", tmp_path / "mine.py")
    mine = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mine)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr("sys.argv", ["mine.py", *inputs.settings()])
        mine.main()
    assert f"{inputs.run} is a run of the recipe full_finetune" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("change", ["notes", "folder", "edited", "index lost"])
def test_user_changes_to_the_result_are_not_lost(change, inputs, run_recipe, told, capsys):
    """A rerun once removed them silently. It is refused before training, not at the end."""
    model = inputs.run / "model"
    if change == "notes":
        (model / "notes.md").write_text("the best so far")
    elif change == "folder":
        (model / "figures").mkdir()
        (model / "figures" / "loss.png").write_bytes(b"png")
    elif change == "edited":
        (model / "README.md").write_text("a card of my own")
    else:
        (model / "written.json").unlink()
    before = contents(inputs.run)
    assert run_recipe(inputs.settings("max_steps=3")) == 2
    assert str(model) in capsys.readouterr().err
    assert str(model) in told("full_finetune", inputs.settings("max_steps=3"))
    assert contents(inputs.run) == before


@pytest.mark.slow
def test_unchanged_result_is_replaced(inputs, run_recipe):
    before = contents(inputs.run / "model")
    assert run_recipe(inputs.settings("max_steps=3")) == 0
    after = contents(inputs.run / "model")
    assert after.keys() == before.keys() and after["model.safetensors"] != before["model.safetensors"]


def test_verbs_use_the_trained_model_even_next_to_another_model(inputs, run_recipe, capsys):
    trained = load_file(inputs.run / "model" / "model.safetensors")
    for file in inputs.model.iterdir():
        shutil.copyfile(file, inputs.run / file.name)
    assert resolve_model(inputs.run).base == inputs.run / "model"
    out = inputs.folder / "out"
    main(["export", str(inputs.run), "--to", "hf", "--out", str(out)])
    exported = load_file(out / "model.safetensors")
    assert all(exported[name].equal(tensor) for name, tensor in trained.items())
    assert run_recipe(inputs.settings("max_steps=3")) == 2  # such a run does not continue
    assert "config.json" in capsys.readouterr().err
    shutil.rmtree(inputs.run / "model")
    with pytest.raises(TuneError, match="step-00000002"):
        resolve_model(inputs.run)


def test_added_tokens_do_not_overwrite_a_model(inputs):
    before = contents(inputs.model)
    with pytest.raises(TuneError, match="model"):
        add_tokens(inputs.model, inputs.model, ["<new>"])
    with pytest.raises(TuneError, match=r"config\.json"):
        add_tokens(inputs.run / "model", inputs.model, ["<new>"])
    assert contents(inputs.model) == before


NAMES = ["config.json", "adapter_config.json", "rows.JSONL", "model.safetensors"]


@pytest.mark.weekly
@pytest.mark.parametrize("name", weekly_but(NAMES[:1], NAMES))
def test_folder_with_a_model_or_data_is_refused(name, inputs, run_recipe, told, capsys):
    """`tune generate` once used the model that was there before."""
    folder = inputs.folder / "taken"
    folder.mkdir()
    (folder / name).write_text("{}")
    settings = inputs.settings(f"output_dir={folder}")
    assert run_recipe(settings) == 2
    message = capsys.readouterr().err
    assert all(part in message for part in ("output_dir: ", str(folder), name))
    assert f"output_dir: {folder}" in told("full_finetune", settings)
    assert contents(folder) == {name: b"{}"}


def test_model_folder_is_refused_as_output_dir(inputs, run_recipe, capsys):
    assert run_recipe(inputs.settings(f"output_dir={inputs.model}")) == 2
    assert "config.json" in capsys.readouterr().err


@pytest.mark.slow
def test_folder_with_notes_is_accepted(inputs, run_recipe):
    folder = inputs.folder / "notes"
    folder.mkdir()
    (folder / "notes.md").write_text("what I want to try")
    assert run_recipe(inputs.settings(f"output_dir={folder}")) == 0
    assert (folder / "notes.md").read_text() == "what I want to try" and (folder / "model").is_dir()
