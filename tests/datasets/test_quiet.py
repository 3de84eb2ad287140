"""Rarely intended data and silent changes are counted, reported or refused."""

import json
import os

import pytest
from helpers import save_checkpoint

from tune import config
from tune.config import instantiate
from tune.datasets import load, load_prompts
from tune.errors import TuneError
from tune.tokenizers import Tokenizer


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A checkpoint whose tokenizer has merges, such as ' cat'."""
    return save_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture
def write(tmp_path):
    def write(*rows, name="rows.jsonl"):
        lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines))
        return str(tmp_path / name)

    return write


@pytest.fixture
def read(folder, write, tmp_path):
    def read(*rows, **options):
        options = {"max_seq_len": 400, "workers": 1, "cache_dir": str(tmp_path / "cache")} | options
        return load(Tokenizer(str(folder)), write(*rows), **options)

    return read


def chat(answer="yes"):
    return {"messages": [{"role": "user", "content": "a cat?"}, {"role": "assistant", "content": answer}]}


@pytest.mark.parametrize(("prompt", "shares"), [("Look: a ", True), ("Look: a", False), ("", False)])
def test_prompts_that_share_a_token_with_the_answer_are_counted(checkpoint, write, prompt, shares):
    """kin: huggingface/trl#5213. With the prompt alone, the model reads other tokens than in training."""
    tokenizer = Tokenizer(str(checkpoint))
    file = write({"prompt": prompt, "completion": "cat" if shares else " cat"})
    accounting = load(tokenizer, file, max_seq_len=100, workers=1).accounting
    assert accounting.remarks["prompt and answer share a token"] == shares
    assert accounting.supervised_tokens == (
        2 if prompt else 1
    )  # ' cat' and the end; the first token of a sample has no target


def test_kto_needs_another_prompt(read):
    """kin: huggingface/trl#1911. No answer is mismatched if all rows have one prompt."""
    rows = [{"prompt": "Write.", "completion": f" Answer {index}.", "label": index % 2 == 0} for index in range(3)]
    with pytest.raises(TuneError, match=r"rows\.jsonl.* 3 "):
        read(*rows, kind="labelled")
    assert len(read(*rows, rows[0] | {"prompt": "Another."}, kind="labelled").lengths) == 8


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_duplicate_keys_are_refused(folder, write, name):
    row = '{"messages": [{"role": "user", "content": "a", "content": "b"}, {"role": "assistant", "content": "c"}]}'
    file = write(row, row, name="rows.jsonl") if name == "rows.jsonl" else write(f"[{row}]", name=name)
    with pytest.raises(TuneError, match=rf"{name}.*'content'"):
        load(Tokenizer(str(folder)), file, max_seq_len=100, workers=1)


def test_thinking_parts_become_reasoning(folder, read):
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{% generation %}<{{ m.reasoning_content }}>{{ m.content }}{% endgeneration %}"
        "{% endfor %}"
    )
    parts = [{"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}, {"type": "text", "text": "yes"}]
    (sample,) = read(chat(parts)).samples
    assert Tokenizer(str(folder)).decode(sample.tokens.tolist()).endswith("<hm>yes")
    twice = chat(parts)
    twice["messages"][1]["reasoning"] = "hm too"
    with pytest.raises(TuneError, match=r"rows\.jsonl:1: messages\[1\].content\[0\].*reasoning"):
        read(twice)


def test_prompt_date_comes_from_the_run(folder, write, checkpoint):
    """Otherwise a reinforcement-learning run would have other data tomorrow and could not be resumed."""
    (folder / "chat_template.jinja").write_text("{{ strftime_now('%Y-%m-%d') }}{{ messages[0].content }}")
    file = write({"instruction": "Hi"})
    prompts = {
        date: load_prompts(tokenizer := Tokenizer(str(folder), **date_of), file, max_prompt_len=50)[0].tokens
        for date, date_of in {"2024-07-26": {}, "2031-01-02": {"date": "2031-01-02"}}.items()
    }
    assert {date: tokenizer.decode(tokens) for date, tokens in prompts.items()} == {
        "2024-07-26": "2024-07-26Hi", "2031-01-02": "2031-01-02Hi",
    }  # fmt: skip
    fingerprints = {Tokenizer(str(folder), date=date).fingerprint for date in ("2024-07-26", "2031-01-02")}
    assert len(fingerprints) == 2
    without = {Tokenizer(str(checkpoint), date=date).fingerprint for date in ("2024-07-26", "2031-01-02")}
    assert len(without) == 1  # its template prints no date
    with pytest.raises(TuneError, match=r"tokenizer\.date=tomorrow"):
        Tokenizer(str(folder), date="tomorrow")


def test_reused_rows_are_reported_with_their_age(read, tmp_path):
    assert "prepared" not in read(chat()).accounting.table()
    (kept,) = (tmp_path / "cache" / "datasets").iterdir()
    os.utime(kept, (kept.stat().st_atime, kept.stat().st_mtime - 3 * 3600))
    again = read(chat()).accounting
    (line,) = (line for line in again.table().splitlines() if line.strip().startswith("prepared"))
    assert "3 hours" in line and str(kept) in line
    assert again.as_dict()["prepared"] == kept.stat().st_mtime


def test_declared_dependencies_of_a_function_are_part_of_the_key(read, tmp_path, monkeypatch):
    """kin: allenai/open-instruct#1497."""
    (tmp_path / "reads_files.py").write_text(
        "import os, pathlib\n"
        "def shout(row):\n"
        "    mark = pathlib.Path(__file__).with_name('mark.txt').read_text() + os.environ['ANOTHER_MARK']\n"
        "    return {'prompt': 'a', 'completion': row['text'] + mark}\n"
        "shout.depends_on = ['mark.txt', '$ANOTHER_MARK']\n"
    )
    monkeypatch.syspath_prepend(tmp_path)

    def learned(file, variable):
        (tmp_path / "mark.txt").write_text(file)
        monkeypatch.setenv("ANOTHER_MARK", variable)
        return int(read({"text": "b"}, format="reads_files.shout").supervised[0])

    assert [learned("!", "?"), learned("!!", "?"), learned("!!", "???")] == [4, 5, 7]
    (tmp_path / "mark.txt").unlink()
    with pytest.raises(TuneError, match=r"mark\.txt"):
        read({"text": "b"}, format="reads_files.shout")


def test_run_folders_are_not_data(folder, read, tmp_path):
    data = tmp_path / "data"
    run = data / "runs" / "mine"
    run.mkdir(parents=True)
    (data / "rows.jsonl").write_text(json.dumps(chat()) + "\n")
    (data / "more" / "run").mkdir(parents=True)
    (data / "more" / "run" / "rows.jsonl").write_text(json.dumps(chat("no")) + "\n")
    for name in ("run.json", "metrics.jsonl", "samples.jsonl", "config.yaml", "model/config.json"):
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).write_text('{"starts": []}\n' if name == "run.json" else json.dumps(chat()) + "\n")
    for path in (data, data / "**" / "*.jsonl"):
        assert load(Tokenizer(str(folder)), str(path), max_seq_len=100, workers=1).accounting.rows == 2
    named = load(Tokenizer(str(folder)), str(run / "sam*.jsonl"), max_seq_len=100, workers=1)
    assert named.accounting.rows == 1  # the path names the run


def test_validation_rows_are_read_like_training_rows(checkpoint, write):
    rows = [{"talk": chat(f"yes {index}")["messages"], "weight": index} for index in range(3)]
    paths = [f"dataset.path={write(*rows)}", f"dataset.validation={write(rows[0], name='held_out.jsonl')}"]
    columns = ["dataset.columns={messages: talk}", "dataset.extra_columns=[weight]"]
    cfg = config.load("full_finetune", [f"model.path={checkpoint}", *paths, *columns])
    tokenizer = Tokenizer(str(checkpoint))
    training = instantiate(cfg.dataset, tokenizer, max_seq_len=128)
    assert list(training.columns) == list(training.validation.columns) == ["weight"]
    other = write({"words": chat()["messages"], "weight": 1}, name="held_out.jsonl")
    own = [f"dataset.validation={{path: {other}, columns: {{messages: words}}}}"]
    cfg = config.load("full_finetune", [f"model.path={checkpoint}", paths[0], *columns, *own])
    training = instantiate(cfg.dataset, tokenizer, max_seq_len=128)
    assert len(training.validation.lengths) == 1


def test_keys_of_messages_that_nothing_reads_are_counted(read, folder):
    asked = {"role": "user", "content": "a cat?", "lang": "en", "unread": None, "id": "1"}
    row = {"messages": [asked, {"role": "assistant", "content": "yes", "score": 0}]}
    remarks = read(row, row, chat()).accounting.remarks
    assert {name.rpartition(" ")[2]: count for name, count in remarks.items()} == {"lang": 2, "score": 2}
    of_words = {"messages": [asked | {"lang": None, "ca": 1, "ontent": 1}, row["messages"][1]]}  # cat, content
    assert {name.rpartition(" ")[2] for name in read(of_words).accounting.remarks} == {"ca", "ontent", "score"}
    template = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").write_text(
        "{% if messages[0].lang %}{{ messages[1].score }}{% endif %}" + template
    )
    assert not read(row, chat()).accounting.remarks
