import io
import json
import re
import sys
from html.parser import HTMLParser

import pytest

from tune.cli import main


@pytest.fixture
def arguments(checkpoint, tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):  # no weights
        (tmp_path / name).write_bytes((checkpoint / name).read_bytes())
    return [f"model.path={tmp_path}", "max_seq_len=128"]


@pytest.fixture
def preview(arguments, chats, capsys):
    def preview(*more, data=f"dataset.path={chats}"):
        main(["preview", "full_finetune", *arguments, data, *more])
        return capsys.readouterr().out

    return preview


@pytest.fixture
def error(arguments, chats, capsys):
    def error(*more, data=f"dataset.path={chats}"):
        with pytest.raises(SystemExit) as end:
            main(["preview", "full_finetune", *arguments, data, *more])
        assert end.value.code == 2
        return capsys.readouterr().err

    return error


@pytest.fixture
def first(chats):
    """Return the assistant's first message."""
    return json.loads(chats.read_text().splitlines()[0])["messages"][1]["content"]


def test_plain_text_outside_a_terminal(preview, first, chats):
    shown = preview("packed=true", "--rows", "2", f"dataset.validation={chats}")
    assert "\x1b" not in shown
    assert f"<|im_start|>assistant\n⟦{first}<|im_end|>⟧\n" in shown
    assert len(re.findall(r"training, row \d: \d documents?, \d+ of 128 tokens \(\d\d\.\d% full\)", shown)) == 2
    assert shown.count("copies of another sample: 0 of 48") == shown.count("packed rows") == 2
    assert shown.endswith(
        "warnings\n  48 of the 48 validation samples are also training samples: "
        "their loss does not measure generalization\n"
    )


@pytest.mark.parametrize(("options", "rows"), [([], 1000), (["--all"], 1200), (["dataset.take=1100"], 1100)])
def test_only_the_first_rows_are_read(preview, chats, tmp_path, options, rows):
    """Of a source and of the validation data."""
    file = tmp_path / "many.jsonl"
    file.write_text(chats.read_text() * 25)
    shown = preview(*options, f"dataset.validation={chats}", data=f"dataset.path={file}")
    assert f"copies of another sample: {rows - 48:,} of {rows:,}" in shown
    assert ("--all" in shown) == (rows == 1000)


def test_only_the_first_rows_of_each_source_are_read(preview, chats, tmp_path):
    file = tmp_path / "many.jsonl"
    file.write_text(chats.read_text() * 25)
    mixture = f"{{_component_: tune.datasets.mix, sources: {{a: {{path: {file}}}, b: {{path: {chats}}}}}}}"
    shown = preview(data=f"dataset={mixture}")
    assert "of another sample: 952 of 1,000" in shown and "of another sample: 0 of 48" in shown


def test_partly_weighted_tokens(preview, tmp_path):
    answer = {"role": "assistant", "content": "the cat", "weight": 0.25}
    (tmp_path / "weighed.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "a"}, answer]}) + "\n")
    shown = preview(data=f"dataset.path={tmp_path / 'weighed.jsonl'}")
    count, weight = re.search(r"(\d+) learned, total weight ([\d.]+)", shown).groups()
    assert float(weight) == round(int(count) / 4, 1) and re.search(rf"their weight +{weight}", shown)


def test_colors_in_a_terminal(preview, first, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    shown = preview("--rows", "1")
    assert "\x1b[" in shown
    assert "⟦" not in shown
    assert f"<|im_start|>assistant\n{first}<|im_end|>\n" in re.sub(r"\x1b\[[\d;]*m", "", shown)
    monkeypatch.setenv("NO_COLOR", "1")
    assert f"⟦{first}<|im_end|>⟧" in preview("--rows", "1")


def test_html_page_is_self_contained(preview, first, tmp_path):
    file = tmp_path / "pages" / "page.html"
    assert preview("--html", str(file)) == f"wrote {file}; warnings: 0\n"
    tags, text = [], []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attributes: tags.append((tag, {name for name, _ in attributes}))
    parser.handle_data = text.append
    parser.feed(file.read_text(encoding="utf-8"))
    assert f"<|im_start|>assistant\n{first}<|im_end|>\n" in "".join(text)
    assert "no warnings" in "".join(text)
    assert {tag for tag, _ in tags} == {"html", "head", "meta", "title", "style", "body", "pre", "span"}
    assert not {"src", "href"} & set.union(*(attributes for _, attributes in tags))


def test_validation_prompts_have_the_columns_of_training_prompts(arguments, tmp_path, capsys):
    for name in ("train", "held_out"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"question": f"the {name}"}))
    data = [f"dataset.path={tmp_path / 'train.jsonl'}", f"dataset.validation={tmp_path / 'held_out.jsonl'}"]
    columns = "dataset.columns={instruction: question}"
    main(["preview", "grpo", arguments[0], *data, columns, "reward=tests.rewarding"])
    assert "the held_out" in capsys.readouterr().out


@pytest.mark.slow
def test_source_must_exist(preview, error, chats):
    sources = f"dataset.sources={{big: {{path: {chats}}}, small: {{path: {chats}, take: 3}}}}"
    mix = "dataset._component_=tune.datasets.mix"
    assert "an epoch has 51 rows" in preview(mix, data=sources)
    small = preview(mix, "--source", "small", data=sources)
    assert "training/small, row 3" in small
    assert "of 3\n" in small
    assert "training/big" not in small
    assert error(mix, "--source", "smal", data=sources).endswith(
        "--source smal: there is no such part. Did you mean 'small'? The parts are training, big, small\n"
    )


@pytest.mark.slow
def test_stream_preview_shows_the_first_window(preview):
    assert "streamed: rows 1 to 48" not in preview()
    assert "was not looked at" not in preview()
    shown = preview("dataset.streaming=true", "max_steps=1")
    assert "streamed: rows 1 to 64" in shown
    assert shown.endswith("a stream: only its first rows were read\n\nno warnings\n")


def test_characters_outside_the_terminal_encoding(arguments, chats, first, monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    main(["preview", "full_finetune", *arguments, f"dataset.path={chats}"])
    sys.stdout.flush()
    assert rf"\u27e6{first}<|im_end|>\u27e7" in sys.stdout.buffer.getvalue().decode("ascii")


def test_invalid_arguments_are_rejected(error, tmp_path):
    assert "argument --rows: '0' is not a number of at least 1" in error("--rows", "0")
    assert "argument --rows: 'two' is not a number of at least 1" in error("--rows", "two")
    assert "--row: is not an option. Did you mean '--rows'? --help lists them" in error("--row", "1")
    assert "--help lists them. Write settings without dashes: lr=1" in error("--lr=1")
    assert "x.html cannot be written: [Errno" in error("--html", f"{__file__}/x.html")
    assert f"tokenizer: no tokenizer in {tmp_path / 'none'}" in error(f"model.path={tmp_path / 'none'}")


def test_usage_is_printed_without_arguments(capsys):
    with pytest.raises(SystemExit):
        main(["preview"])
    assert capsys.readouterr().err.startswith("usage: tune preview RECIPE [--config FILE_OR_NAME]")
