"""A run writes into a folder of its own: not over another recipe's training, a model or data."""

import distill
import pytest


def contents(folder):
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_the_folder_of_another_recipe_is_refused(inputs, run_recipe, told, capsys):
    """It said 'continued ... done', and distilled nothing."""
    before = contents(inputs.run)
    settings = inputs.settings(f"teacher.path={inputs.model}")
    again = [each for each in settings if not each.startswith("output_dir=")]
    for place in (settings, [*again, f"output_dir={inputs.folder / 'new'}", f"resume={inputs.run}"]):
        assert run_recipe(place, distill) == 2
        message = capsys.readouterr().err
        assert "resume: " in message and "full_finetune" in message and "distill" in message
        assert "full_finetune" in told("distill", place)
    assert contents(inputs.run) == before


@pytest.mark.parametrize("name", ["config.json", "adapter_config.json", "rows.jsonl", "model.safetensors"])
def test_a_folder_with_a_model_or_data_is_refused(name, inputs, run_recipe, told, capsys):
    """`tune generate` of it took the model that was there before."""
    folder = inputs.folder / "taken"
    folder.mkdir()
    (folder / name).write_text("{}")
    settings = inputs.settings(f"output_dir={folder}")
    assert run_recipe(settings) == 2
    message = capsys.readouterr().err
    assert all(each in message for each in ("output_dir: ", str(folder), name))
    assert f"output_dir: {folder}" in told("full_finetune", settings)
    assert contents(folder) == {name: b"{}"}


def test_the_model_of_the_run_is_no_output_dir(inputs, run_recipe, capsys):
    assert run_recipe(inputs.settings(f"output_dir={inputs.model}")) == 2
    assert "config.json" in capsys.readouterr().err


def test_a_folder_with_notes_is_taken(inputs, run_recipe):
    folder = inputs.folder / "notes"
    folder.mkdir()
    (folder / "notes.md").write_text("what I want to try")
    assert run_recipe(inputs.settings(f"output_dir={folder}")) == 0
    assert (folder / "notes.md").read_text() == "what I want to try" and (folder / "model").is_dir()
