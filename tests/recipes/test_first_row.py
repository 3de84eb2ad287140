"""Output before training: the first row, as rendered by transformers, with marks around learned text."""

import io
import json
import sys

import pytest

from tune.loggers.sinks import Console

transformers = pytest.importorskip("transformers")


def test_first_row_is_saved_with_marks_around_learned_text(inputs):
    messages = json.loads(inputs.rows.read_text().splitlines()[0])["messages"]
    text = transformers.AutoTokenizer.from_pretrained(inputs.model).apply_chat_template(messages, tokenize=False)
    answer = messages[1]["content"] + "<|im_end|>"
    assert text.count(answer) == 1
    row = text.replace(answer, f"⟦{answer}⟧")
    assert (inputs.run / "first_row.txt").read_text(encoding="utf-8") == row
    assert row in (inputs.run / "log.txt").read_text(encoding="utf-8")


@pytest.mark.slow
def test_warning_about_rows_longer_than_the_model_supports(inputs, run_recipe, told, capsys):
    file = inputs.model / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"max_position_embeddings": 16}))
    assert run_recipe([*inputs.settings("max_steps=1"), f"output_dir={inputs.folder / 'short'}"]) == 0
    (warning,) = [line for line in capsys.readouterr().out.splitlines() if "max_position_embeddings" in line]
    assert warning.startswith("warning: the longest row has ") and "16 (max_position_embeddings" in warning
    assert "but the model supports 16 " in told("full_finetune", inputs.settings("max_steps=1"), "warning")


@pytest.mark.slow
def test_run_starts_with_warnings_about_its_data(inputs, run_recipe):
    run, rows = inputs.folder / "doubtful", inputs.rows.read_text().splitlines()
    (inputs.folder / "doubtful.jsonl").write_text("\n".join([*rows, rows[0]]))
    settings = [
        f"dataset.path={inputs.folder / 'doubtful.jsonl'}",
        f"dataset.validation={inputs.rows}",
        "max_steps=1",
    ]
    assert run_recipe([*inputs.settings(*settings), f"output_dir={run}"]) == 0
    copies, both = json.loads((run / "data.json").read_text())["warnings"]
    assert copies.startswith(f"training: 1 of {len(rows) + 1} samples") and "validation samples" in both
    log = (run / "log.txt").read_text(encoding="utf-8")
    assert f"warning: {copies}" in log and f"warning: {both}" in log
    assert json.loads((inputs.run / "data.json").read_text())["warnings"] == []


def test_characters_that_stdout_cannot_encode_do_not_end_a_run(monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    Console(every=1).message("⟦é⟧")
    assert sys.stdout.buffer.getvalue() == rb"\u27e6\xe9\u27e7" + b"\n"
