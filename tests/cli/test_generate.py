"""`tune generate`: answers on standard output, in the order of the prompts, equal to those of transformers."""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pyarrow
import pytest
import torch
from helpers import HANGS, free_port, make_adapter, save_checkpoint
from pyarrow import parquet

from tune import distributed
from tune.cli import main
from tune.cli.generate import require_answers, turns, why_not
from tune.cli.model_options import NOT_APPLIED, SAMPLING, not_applied, sampling_settings
from tune.datasets import load
from tune.tokenizers import Tokenizer

transformers = pytest.importorskip("transformers")

PROMPTS = ["the cat sat", "a", "it was a very big red dog and then it ran under the mat"]
CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


def run(capsys, *arguments):
    main(["generate", *map(str, arguments)])
    shown = capsys.readouterr()
    return shown.out, shown.err


def theirs(folder, text, count):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
    tokens = model.generate(ids, max_new_tokens=count, do_sample=False, pad_token_id=0)
    return tokenizer.decode(tokens[0, ids.shape[1] :], skip_special_tokens=True)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prompts")
    (folder / "prompts.txt").write_text("\n".join([*PROMPTS, ""]))
    rows = [{"prompt": PROMPTS[0], "id": 7}, {"messages": [{"role": "user", "content": PROMPTS[1]}]}]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.mark.slow
def test_answers_match_transformers(checkpoint, files, capsys):
    expected = [theirs(checkpoint, CHAT.format(prompt), 20) for prompt in PROMPTS]
    out, err = run(capsys, checkpoint, "--prompts", files / "prompts.txt", "--max-new-tokens", 20, "--device", "cpu")
    assert out == "".join(f"{answer}\n" for answer in expected)
    assert "float32 on cpu; the most likely token, seed 0" in err and "3 of 3 prompts, " in err and "tokens/s" in err
    assert run(capsys, checkpoint, "--prompt", PROMPTS[2], "--max-new-tokens", 20)[0] == expected[2] + "\n"
    raw = run(capsys, checkpoint, "--prompt", PROMPTS[0], "--raw", "--max-new-tokens", 9)[0]
    assert raw == theirs(checkpoint, PROMPTS[0], 9) + "\n"
    system = run(capsys, checkpoint, "--prompt", "a", "--system", "very small", "--max-new-tokens", 9)[0]
    text = "<|im_start|>system\nvery small<|im_end|>\n" + CHAT.format("a")
    assert system == theirs(checkpoint, text, 9) + "\n"


@pytest.mark.slow
def test_prompts_from_standard_input(checkpoint, files, capsys, monkeypatch):
    expected = {
        name: run(capsys, checkpoint, "--prompts", files / name, "--max-new-tokens", 5)[0]
        for name in ("prompts.txt", "prompts.jsonl")
    }
    for name, answers in expected.items():
        monkeypatch.setattr(sys, "stdin", io.StringIO((files / name).read_text()))
        assert run(capsys, checkpoint, "--max-new-tokens", 5)[0] == answers


@pytest.mark.slow
def test_only_line_feeds_separate_prompts(checkpoint, tmp_path, capsys, monkeypatch):
    """A byte order mark is not part of the first prompt; line numbers match `wc -l` and editors."""
    text = "a cat\u2028and\x0ca dog\x85"
    (tmp_path / "texts.txt").write_text(f"{text}\r\nit", encoding="utf-8-sig")
    run(capsys, checkpoint, "--prompts", tmp_path / "texts.txt", "--max-new-tokens", 2, "--out", tmp_path / "a.jsonl")
    records = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().split("\n")[:-1]]
    assert [record["prompt"] for record in records] == [text, "it"]
    rows = json.dumps({"prompt": text}, ensure_ascii=False) + "\n" + '{"prompt": "it"'
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"\ufeff{rows}}}\n"))
    assert run(capsys, checkpoint, "--max-new-tokens", 2)[0] == "".join(
        f"{record['completion']}\n" for record in records
    )
    for system in ([], ["--system", "brief"]):
        monkeypatch.setattr(sys, "stdin", io.StringIO(rows))
        with pytest.raises(SystemExit):
            run(capsys, checkpoint, *system)
        assert "error: standard input:2: malformed JSON: " in capsys.readouterr().err


@pytest.mark.slow
def test_samples_and_their_records(checkpoint, files, tmp_path, capsys):
    sampled = [checkpoint, "--prompts", files / "prompts.jsonl", "--max-new-tokens", 12, "--temperature", 0.9]
    sampled += ["--samples", 3, "--top-k", 50, "--top-p", 0.95, "--min-p", 0.001, "--out", tmp_path / "out.jsonl"]
    out, err = run(capsys, *sampled, "--seed", 4)
    assert "temperature 0.9, top_k 50, top_p 0.95, min_p 0.001, seed 4" in err
    records = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [(record["index"], record["sample"]) for record in records] == [(i, s) for i in range(2) for s in range(3)]
    assert out == "".join(record["completion"] + "\n" for record in records)
    assert records[0]["prompt"] == PROMPTS[0] and records[3]["messages"][0]["content"] == PROMPTS[1]
    assert records[0].keys() == {"index", "sample", "id", "prompt", "completion", "finish", "tokens"}
    assert len({record["completion"] for record in records}) == 6
    assert all(record["finish"] == ("length" if record["tokens"] == 12 else "stop") for record in records)
    assert run(capsys, *sampled, "--seed", 4, "--batch-size", 1)[0] == out
    assert run(capsys, *sampled, "--seed", 5)[0] != out


@pytest.mark.slow
def test_records_keep_all_fields_of_the_row(checkpoint, tmp_path, capsys):
    """Including other fields of the row, such as its id and answer."""
    row = {"instruction": "the cat", "input": "on a mat", "system": "be brief"}
    row |= {"id": 0, "answer": "sat", "tags": {"a": 1}}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row | {"tokens": 99}) + "\n")
    out = tmp_path / "new" / "out.jsonl"
    asked = [checkpoint, "--prompts", tmp_path / "rows.jsonl", "--max-new-tokens", 2, "--out"]
    run(capsys, *asked, out)
    record = json.loads(out.read_text())
    assert {name: record[name] for name in row} == row and record["tokens"] <= 2
    run(capsys, *asked, tmp_path / "out.parquet")
    assert parquet.read_table(tmp_path / "out.parquet").to_pylist() == [record]
    for file in (out, tmp_path / "out.parquet"):  # answers may overwrite answers
        require_answers(file)


def test_slow_prompts_are_answered_in_smaller_turns(monkeypatch):
    world = distributed.init("cpu")
    assert [*turns(100, 16, world)] == [range(0, 16), range(16, 80), range(80, 100)]
    monkeypatch.setattr("tune.cli.generate.QUICK", -1)
    assert [*turns(40, 16, world)] == [range(0, 16), range(16, 32), range(32, 40)]


@pytest.mark.slow
def test_adapters_and_runs_as_models(checkpoint, files, tmp_path, capsys):
    adapter = make_adapter(checkpoint, tmp_path / "run" / "adapter", 1)
    (tmp_path / "run" / "config.yaml").touch()
    ask = ["--prompt", "the dog", "--max-new-tokens", 12]
    ways = [checkpoint, "--adapter", adapter], [adapter], [tmp_path / "run"]
    out = {run(capsys, *named, *ask)[0] for named in ways}
    assert len(out) == 1 and out != {run(capsys, checkpoint, *ask)[0]}


def test_sampling_settings_from_the_checkpoint(tmp_path):
    file = {"do_sample": True, "top_p": 0.8, "temperature": 0.6, "top_k": 20, "repetition_penalty": 1.1}
    (tmp_path / "generation_config.json").write_text(json.dumps(file))
    settings, words = sampling_settings(tmp_path)
    assert settings == {"temperature": 0.6, "top_k": 20, "top_p": 0.8}
    assert words == "temperature 0.6, top_k 20, top_p 0.8"
    assert not_applied(tmp_path) == ["repetition_penalty=1.1"] and not not_applied(tmp_path, ["repetition_penalty"])
    assert sampling_settings(tmp_path, temperature=0.0, top_k=0)[0] == {"temperature": 0.0, "top_p": 0.8}
    (tmp_path / "generation_config.json").write_text(json.dumps(file | {"do_sample": False}))
    assert sampling_settings(tmp_path)[0] == {"temperature": 0.0}
    assert sampling_settings(tmp_path, temperature=1.0)[0] == {"temperature": 1.0}
    assert sampling_settings(tmp_path / "nothing")[1] == "the most likely token"


@pytest.mark.slow
@pytest.mark.parametrize("shares", ["prompts", "layers"])
def test_two_processes(shares, checkpoint, files, tmp_path, capsys):
    """The processes share the prompts, or each layer of the model and its adapter."""
    adapter = make_adapter(checkpoint, tmp_path / "adapter", 1)
    arguments = ["generate", *(["--tp", "2"] if shares == "layers" else []), checkpoint, "--adapter", adapter]
    arguments += ["--prompts", files / "prompts.txt", "--max-new-tokens", "9", "--device", "cpu"]
    arguments += ["--samples", "2", "--temperature", "1", "--batch-size", "1", "--out", tmp_path / "two.jsonl"]
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}", "-m", "tune.cli"]
    command = [sys.executable, *torchrun, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANGS)
    assert done.returncode == 0, done.stderr[-3000:]
    whole = arguments[arguments.index(checkpoint) : -1]
    assert done.stdout == run(capsys, *whole, tmp_path / "one.jsonl")[0]
    assert (tmp_path / "two.jsonl").read_text() == (tmp_path / "one.jsonl").read_text()


def actors_in(folder):
    """Return the pids of Ray actors whose working directory is `folder`."""
    processes = [process for process in Path("/proc").glob("[0-9]*") if os.access(process / "cwd", os.R_OK)]
    return [
        int(process.name)
        for process in processes
        if b"ray::_Actor" in (process / "cmdline").read_bytes() and (process / "cwd").readlink() == folder
    ]


@pytest.mark.weekly
def test_ray_actors_survive_the_loss_of_one(checkpoint, tmp_path, capsys):
    """The rows equal those of one process."""
    asked = [{"messages": [{"role": "user", "content": f"the cat {number}"}]} for number in range(24)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked))
    arguments = [checkpoint, "--prompts", tmp_path / "rows.jsonl", "--max-new-tokens", 60, "--temperature", 1]
    arguments = [*map(str, arguments), "--samples", "2", "--batch-size", "2", "--device", "cpu"]
    launcher = ["generate", "--launcher", "ray", "--nproc-per-node", "2", "--max-restarts", "1"]
    command = [sys.executable, "-m", "tune.cli", *launcher, *arguments, "--out", str(tmp_path / "ray.parquet")]
    with (tmp_path / "out.txt").open("wb") as out, (tmp_path / "err.txt").open("wb") as err:
        process = subprocess.Popen(command, stdout=out, stderr=err, cwd=tmp_path)
    while not (tmp_path / "out.txt").stat().st_size and process.poll() is None:
        time.sleep(0.05)
    os.kill(actors_in(tmp_path)[0], signal.SIGKILL)
    assert process.wait(HANGS) == 0, (tmp_path / "err.txt").read_text()[-3000:]
    printed = (tmp_path / "out.txt").read_bytes().decode()
    assert printed == run(capsys, *arguments, "--out", tmp_path / "one.jsonl")[0]
    expected = [json.loads(line) for line in (tmp_path / "one.jsonl").read_text().splitlines()]
    assert parquet.read_table(tmp_path / "ray.parquet").to_pylist() == expected


@pytest.mark.slow
def test_parquet_has_the_same_records_as_json(checkpoint, tmp_path, capsys):
    rows = [{"prompt": "the", "system": None}, {"prompt": "a", "system": "be brief"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name in ("out.jsonl", "out.parquet"):
        asked = [checkpoint, "--prompts", tmp_path / "rows.jsonl", "--max-new-tokens", 2, "--batch-size", 1]
        run(capsys, *asked, "--out", tmp_path / name)
    records = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    table = parquet.read_table(tmp_path / "out.parquet")
    assert table.column_names == ["index", "sample", "prompt", "system", "completion", "finish", "tokens"]
    assert table.to_pylist() == [{"system": None} | record for record in records]


WRONG = {
    "a run without a result": (["RUN", "--prompt", "a"], "this run has not exported anything yet"),
    "no model": (["not_there", "--prompt", "a"], "not_there does not exist"),
    "a name of the hub": (["org/name", "--prompt", "a"], "tune download org/name"),
    "no adapter": (["MODEL", "--adapter", "MODEL", "--prompt", "a"], "is not an adapter"),
    "no file": (["MODEL", "--prompts", "none.jsonl"], "--prompts: none.jsonl: there is no such file"),
    "another kind of file": (["MODEL", "--prompts", "notes.md"], "notes.md: cannot read .md files"),
    "an empty file": (["MODEL", "--prompts", "empty.txt"], "empty.txt contains no prompt"),
    "no JSON": (["MODEL", "--prompts", "broken.jsonl"], "broken.jsonl:1: malformed JSON: "),
    "no JSON for a chat": (["MODEL", "--prompts", "broken.jsonl", "--system", "b"], "broken.jsonl:1: malformed JSON: "),
    "no JSON for a text": (["MODEL", "--prompts", "broken.jsonl", "--raw"], "broken.jsonl:1: malformed JSON: "),
    "no Unicode": (["MODEL", "--prompt", "a\udce9"], "--prompt: the text holds half of a character pair"),
    "no text or chat": (["MODEL", "--prompts", "number.jsonl"], "prompt is 3; it must be a text or a list of messages"),
    "other columns": (
        ["MODEL", "--prompts", "columns.jsonl"],
        "If the prompt has another name, rename it to prompt",
    ),
    "a prompt that is null": (
        ["MODEL", "--prompts", "null.jsonl"],
        "null.jsonl:1: prompt is null or empty; it must be a",
    ),
    "a folder of prompts": (["MODEL", "--prompts", "."], "--prompts: .: this is a folder; give a file"),
    "only answers": (["MODEL", "--prompts", "answers.jsonl"], "answers.jsonl:1: messages contains only answers"),
    "raw messages": (["MODEL", "--prompts", "chats.jsonl", "--raw"], "chats.jsonl:1: raw text must be a string in the"),
    "a raw system message": (["MODEL", "--prompt", "a", "--raw", "--system", "b"], "needs a chat template"),
    "temperature": (["MODEL", "--prompt", "a", "--temperature", "-1"], "temperature: -1.0 is not a non-negative"),
    "top-p": (["MODEL", "--prompt", "a", "--temperature", "1", "--top-p", "2"], "top_p: 2.0 is not a number above 0"),
    "too many tokens": (["MODEL", "--prompt", "a", "--max-new-tokens", "600"], "limit (512)"),
    "no tokens": (["MODEL", "--prompt", "a", "--max-new-tokens", "0"], "--max-new-tokens: '0' is not a number"),
    "a prompt that is too long": (["MODEL", "--prompts", "long.txt"], "prompt of long.txt:2 has"),
    "nothing to go on from": (["MODEL", "--prompt", "", "--raw"], "prompt is empty, and the tokenizer adds no BOS"),
    "over the prompts": (["MODEL", "--prompts", "chats.jsonl", "--out", "chats.jsonl"], "would be overwritten"),
    "where to write": (["MODEL", "--prompt", "a", "--out", "notes.md/a.jsonl"], "notes.md/a.jsonl cannot be written"),
    "where to write is a folder": (["MODEL", "--prompt", "a", "--out", "RUN"], "--out RUN cannot be written: it is a"),
    "what is not written": (["MODEL", "--prompt", "a", "--out", "a.txt"], "answers are written as .jsonl or .parquet"),
    "where to write Parquet": (["MODEL", "--prompt", "a", "--out", "notes.md/a.parquet"], "notes.md/a.parquet cannot"),
    "mixed": (["MODEL", "--prompts", "mixed.jsonl", "--max-new-tokens", "2", "--out", "a.parquet"], "mixed types"),
    "launcher": (["MODEL", "--prompt", "a", "--launcher", "slurm"], "invalid choice: 'slurm'"),
    "a prompt without its option": (["MODEL", "it's", "cold"], "--prompt 'it'\"'\"'s cold'"),
    "without a launcher": (["MODEL", "--prompt", "a", "--nproc-per-node", "2"], "unrecognized arguments: --nproc"),
    "no actors": (["--launcher", "ray", "--nproc-per-node", "0", "MODEL", "--prompt", "a"], "'0' is not a number of"),
    "actors that share": (
        ["--launcher", "ray", "MODEL", "--prompt", "a", "--tp", "2"],
        "--tp: each Ray actor holds the whole model",
    ),
    "parts of a model in one process": (["MODEL", "--prompt", "a", "--tp", "2"], "--nproc-per-node"),
    "both": (["MODEL", "--prompt", "a", "--prompts", "long.txt"], "not allowed with argument --prompt"),
    "one of the most likely": (
        ["MODEL", "--prompt", "a", "--top-k", "5"],
        "--top-k: decoding is greedy",
    ),
    "the same answer twice": (
        ["MODEL", "--prompt", "a", "--samples", "2"],
        "--samples 2: greedy decoding",
    ),
    "samples": (["MODEL", "--prompt", "a", "--samples", "0"], "--samples: '0' is not a number"),
    "batch size": (["MODEL", "--prompt", "a", "--batch-size", "-1"], "--batch-size: '-1' is not a number"),
    "device": (["MODEL", "--prompt", "a", "--device", "tpu"], "device: tpu is not available"),
    "dtype": (["MODEL", "--prompt", "a", "--dtype", "int3"], "invalid choice: 'int3'"),
    "a seed": (["MODEL", "--prompt", "a", "--seed", "-2", "--temperature", "1"], "seed: -2 is not a non-negative"),
}


@pytest.mark.parametrize("name", WRONG)
def test_invalid_inputs_are_rejected(name, checkpoint, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.md").write_text("a")
    (tmp_path / "empty.txt").write_text("\n\n")
    (tmp_path / "broken.jsonl").write_text("{prompt\n")
    (tmp_path / "columns.jsonl").write_text('{"question": "a"}\n')
    (tmp_path / "number.jsonl").write_text('{"prompt": 3}\n')
    (tmp_path / "null.jsonl").write_text('{"prompt": null}\n')
    (tmp_path / "answers.jsonl").write_text('{"messages": [{"role": "assistant", "content": "a"}]}\n')
    (tmp_path / "chats.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    (tmp_path / "mixed.jsonl").write_text('{"prompt": "a"}\n{"prompt": [{"role": "user", "content": "a"}]}\n')
    (tmp_path / "long.txt").write_text("a cat\n" + "cat " * 600)
    (tmp_path / "RUN").mkdir()
    (tmp_path / "RUN" / "config.yaml").write_text("seed: 0")
    arguments, message = WRONG[name]
    with pytest.raises(SystemExit) as ended:
        main(["generate", *(str(checkpoint) if argument == "MODEL" else argument for argument in arguments)])
    shown = capsys.readouterr()
    assert ended.value.code == 2 and message in shown.err and not shown.out
    early = "to write" in name or name in ("temperature", "top-p")
    assert not early or "float32 on cpu" not in shown.err  # before the model is loaded
    assert "dataset." not in shown.err and "sampling" not in shown.err  # settings of recipes


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet", "number.jsonl", "notes"])
def test_answers_do_not_overwrite_data(name, checkpoint, tmp_path, capsys):
    file = tmp_path / name
    if file.suffix == ".parquet":
        parquet.write_table(pyarrow.table({"prompt": ["a"]}), file)
    else:
        file.write_text({"rows.jsonl": '{"prompt": "a"}\n', "number.jsonl": "3\n", "notes": "mine\n"}[name])
    before = file.read_bytes()
    with pytest.raises(SystemExit) as ended:
        main(["generate", str(checkpoint), "--prompt", "a", "--max-new-tokens", "1", "--out", str(file)])
    assert ended.value.code == 2 and str(file) in capsys.readouterr().err and file.read_bytes() == before


@pytest.mark.slow
def test_model_loaded_through_transformers(checkpoint, files, tmp_path, capsys):
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    sizes["initializer_range"] = 0.5
    config = transformers.GPTNeoXConfig(vocab_size=len(transformers.AutoTokenizer.from_pretrained(checkpoint)), **sizes)
    torch.manual_seed(3)
    transformers.GPTNeoXForCausalLM(config).save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(checkpoint / name, tmp_path)
    expected = [theirs(tmp_path, CHAT.format(prompt), 20) for prompt in PROMPTS]
    out, err = run(capsys, tmp_path, "--prompts", files / "prompts.txt", "--max-new-tokens", 20, "--batch-size", 2)
    assert out == "".join(f"{answer}\n" for answer in expected) and "3 of 3 prompts" in err
    assert len({*expected}) == 3


@pytest.mark.parametrize("name", ["too many tokens", "nothing to go on from"])
def test_invalid_inputs_keep_earlier_output(name, checkpoint, tmp_path, capsys):
    before = '{"index": 0, "sample": 0, "completion": "a"}\n'
    (tmp_path / "out.jsonl").write_text(before)
    arguments = [str(checkpoint) if argument == "MODEL" else argument for argument in WRONG[name][0]]
    with pytest.raises(SystemExit):
        main(["generate", *arguments, "--out", str(tmp_path / "out.jsonl")])
    assert WRONG[name][1] in capsys.readouterr().err
    assert (tmp_path / "out.jsonl").read_text() == before


def test_model_without_a_chat_template(checkpoint, tmp_path, capsys):
    base = tmp_path / "base"
    shutil.copytree(checkpoint, base)
    (base / "chat_template.jinja").unlink()
    assert Tokenizer(str(base)).chat_template is None
    assert run(capsys, base, "--prompt", "the", "--max-new-tokens", 9)[0] == theirs(base, "the", 9) + "\n"
    with pytest.raises(SystemExit):
        main(["generate", str(base), "--prompt", "the", "--system", "a"])
    assert "a system message needs a chat template" in capsys.readouterr().err
    for arguments in ([base], [checkpoint, "--compare", base]):
        with pytest.raises(SystemExit):
            main(["chat", *map(str, arguments)])
        assert (
            "chat_template.jinja from the model's chat version there (`tune generate --raw`" in capsys.readouterr().err
        )


def test_another_dtype(tmp_path, capsys):
    folder = save_checkpoint(tmp_path / "m")
    assert "bfloat16 on cpu" in run(capsys, folder, "--prompt", "a", "--max-new-tokens", 2, "--dtype", "bf16")[1]
    assert torch.get_default_dtype() == torch.float32


MINE = """
def length(row, answer):
    return float(len(answer))

def known(row, answer):
    return float(row.get("wanted", "") in answer)

def fails(row, answer):
    return 1 / 0
"""


def read_rows(file):
    return [json.loads(line) for line in Path(file).read_text().split("\n")[:-1]]


@pytest.fixture
def scores(tmp_path, monkeypatch):
    (tmp_path / "scores_here.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("scores_here", None)


@pytest.mark.slow
def test_scored_answers_become_training_rows(checkpoint, files, scores, capsys):
    asked = [checkpoint, "--prompts", files / "prompts.jsonl", "--max-new-tokens", 100, "--temperature", 1.5]
    asked += ["--samples", 6, "--system", "be brief", "--score", "scores_here:length"]
    run(capsys, *asked, "--out", "all.jsonl")
    records = read_rows("all.jsonl")
    assert all(record["score"] == len(record["completion"]) for record in records)
    run(capsys, *asked, "--out", "all.parquet")
    assert parquet.read_table("all.parquet").column("score").to_pylist() == [record["score"] for record in records]
    ended = [record for record in records if record["finish"] == "stop"]
    assert 2 < len(ended) < len(records)  # some are cut off, and training would teach the model to stop there
    _, err = run(capsys, *asked, "--keep", "all", "--out", "rows.jsonl")
    rows = read_rows("rows.jsonl")
    assert [row["messages"][-1] for row in rows] == [{"role": "assistant", "content": e["completion"]} for e in ended]
    assert [row["score"] for row in rows] == [record["score"] for record in ended]
    assert f"kept {len(rows)} of 12 answers; {12 - len(rows)} left out" in err
    middle = sorted(row["score"] for row in rows)[len(rows) // 2]
    run(capsys, *asked, "--keep", "all", "--min-score", middle, "--out", "rows.jsonl")  # overwrites its own rows
    kept = read_rows("rows.jsonl")
    assert kept == [row for row in rows if row["score"] >= middle]
    run(capsys, *asked, "--keep", "best", "--out", "rows.jsonl")
    best = read_rows("rows.jsonl")
    for row in best:
        assert row["score"] == max(other["score"] for other in rows if other["index"] == row["index"])
    assert [row["index"] for row in best] == sorted({row["index"] for row in rows})
    first, second = (row["messages"] for row in best)
    assert first[:2] == [{"role": "system", "content": "be brief"}, {"role": "user", "content": PROMPTS[0]}]
    assert second[1]["content"] == PROMPTS[1] and len(second) == 3
    data = load(Tokenizer(str(checkpoint)), str(scores / "rows.jsonl"), max_seq_len=512)
    assert len(data) == len(best) and not data.accounting.as_dict()["dropped"]
    for row, (sample,) in zip(best, map(data.row, range(len(data))), strict=True):
        learned = [int(label) for label in sample.labels if label != -100]
        assert Tokenizer(str(checkpoint)).decode(learned) == row["messages"][-1]["content"] + "<|im_end|>"


@pytest.mark.slow
def test_only_the_scored_answer_of_a_kept_row_is_learned(checkpoint, scores, capsys):
    talk = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat", "weight": 0.4}]
    talk.append({"role": "user", "content": "and the dog"})
    Path("talk.jsonl").write_text(json.dumps({"messages": talk}) + "\n")
    asked = [checkpoint, "--prompts", "talk.jsonl", "--max-new-tokens", 100, "--temperature", 1.5, "--samples", 6]
    run(capsys, *asked, "--keep", "all", "--out", "rows.jsonl")
    data = load(Tokenizer(str(checkpoint)), "rows.jsonl", max_seq_len=512)
    rows = read_rows("rows.jsonl")
    assert len(rows) == len(data) > 0
    for row, (sample,) in zip(rows, map(data.row, range(len(data))), strict=True):
        assert [message["content"] for message in row["messages"][:3]] == ["the cat", "sat", "and the dog"]
        learned = [int(label) for label in sample.labels if label != -100]
        assert Tokenizer(str(checkpoint)).decode(learned) == row["messages"][-1]["content"] + "<|im_end|>"
        assert sample.weights is None


def test_reasons_to_leave_out_an_answer():
    options = SimpleNamespace(min_score=1.0)
    records = [
        {"finish": finish, "completion": text, "score": score}
        for finish, text, score in (("length", "a", 2), ("stop", " ", 2), ("stop", "a", 0.5), ("stop", "a", 1.0))
    ]
    assert [bool(why_not(record, options)) for record in records] == [True, True, True, False]
    assert len({why_not(record, options) for record in records}) == 4


@pytest.mark.parametrize(
    "fields", [{"do_sample": "false"}, {"temperature": "hot"}, {"top_p": True}, {"top_p": 7}, {"eos_token_id": [[2]]}],
)  # fmt: skip
def test_invalid_generation_config_is_named(fields, tmp_path, capsys):
    folder = save_checkpoint(tmp_path / "m")
    file = folder / "generation_config.json"
    file.write_text(json.dumps({"do_sample": True, **fields}))
    with pytest.raises(SystemExit) as ended:
        main(["generate", str(folder), "--prompt", "a", "--max-new-tokens", "2", "--device", "cpu"])
    error = capsys.readouterr().err
    assert ended.value.code == 2 and str(file) in error and next(iter(fields)) in error


@pytest.mark.slow
def test_raw_continuations_are_kept_as_prompt_and_completion(checkpoint, scores, capsys):
    asked = [checkpoint, "--prompt", "the cat", "--raw", "--temperature", 2, "--samples", 20, "--seed", 3]
    run(capsys, *asked, "--keep", "all", "--out", "rows.jsonl")
    rows = read_rows("rows.jsonl")
    assert rows and all(row.keys() == {"index", "sample", "prompt", "completion"} for row in rows)
    assert {row["prompt"] for row in rows} == {"the cat"}
    assert len(load(Tokenizer(str(checkpoint)), str(scores / "rows.jsonl"), max_seq_len=600)) == len(rows)


WRONG_SCORES = {
    "no file": (["--score", "scores_here.length", "--keep", "best"], "--out rows.jsonl"),
    "Parquet": (["--score", "scores_here.length", "--keep", "best", "--out", "a.parquet"], "--out rows.jsonl"),
    "best of what": (["--keep", "best", "--out", "a.jsonl"], "needs --score"),
    "least of what": (["--keep", "all", "--min-score", "1", "--out", "a.jsonl"], "needs --score"),
    "least, and then": (["--score", "scores_here.length", "--min-score", "1", "--out", "a.jsonl"], "--keep all or"),
    "least is no number": (
        ["--score", "scores_here.length", "--keep", "all", "--min-score", "nan", "--out", "a.jsonl"],
        "--min-score nan",
    ),
    "no module": (["--score", "nothing_here.length"], "there is no module 'nothing_here'"),
    "no function": (["--score", "scores_here.lenght"], "scores_here has no 'lenght'. Did you mean 'length'?"),
    "no path": (["--score", "length"], "--score"),
    "it fails": (["--score", "scores_here.fails"], "division by zero (scores_here.py:9)"),
}


@pytest.mark.parametrize("name", WRONG_SCORES)
def test_invalid_scores_are_rejected(name, checkpoint, scores, capsys):
    arguments, message = WRONG_SCORES[name]
    with pytest.raises(SystemExit) as ended:
        main(["generate", str(checkpoint), "--prompt", "a", "--max-new-tokens", "2", *arguments])
    shown = capsys.readouterr()
    assert ended.value.code == 2 and message in shown.err
    assert "float32 on cpu" not in shown.err or name == "it fails"  # before the model is loaded


@pytest.mark.slow
def test_long_prompt_does_not_shorten_other_answers(tmp_path, capsys):
    """The long prompt leaves room for a few tokens; the other answers are the same as without it."""
    checkpoint = save_checkpoint(tmp_path / "model", max_position_embeddings=96)
    tokenizer = Tokenizer(str(checkpoint))
    words = next(words for words in range(96) if len(tokenizer.encode(CHAT.format("the " * words))) >= 90)
    room = 96 - len(tokenizer.encode(CHAT.format("the " * words)))
    texts = ["it was", "the " * words, "a very big dog"]
    for name, some in {"all": texts, "short": texts[::2]}.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in some))
        run(capsys, checkpoint, "--prompts", tmp_path / f"{name}.jsonl", "--out", tmp_path / f"{name}-out.jsonl")
    answers, short = (read_rows(tmp_path / f"{name}-out.jsonl") for name in ("all", "short"))
    assert [record["completion"] for record in answers[::2]] == [record["completion"] for record in short]
    assert max(record["tokens"] for record in short) > room >= answers[1]["tokens"] > 0


def test_ignored_keys_of_generation_config_are_named(tmp_path, capsys):
    folder = save_checkpoint(tmp_path / "m")
    file = folder / "generation_config.json"
    settings = json.loads(file.read_text()) | {
        "do_sample": True, "repetition_penalty": 1.2, "typical_p": 0.9, "min_new_tokens": 3, "num_beams": 1,
        "bad_words_ids": [], "top_k": 5,
    }  # fmt: skip
    file.write_text(json.dumps(settings))
    err = run(capsys, folder, "--prompt", "a", "--max-new-tokens", 2)[1]
    (line,) = [line for line in err.splitlines() if "repetition_penalty" in line]
    assert "repetition_penalty=1.2" in line and "typical_p=0.9" in line and "min_new_tokens=3" in line
    assert "num_beams" not in err and "bad_words_ids" not in err and "top_k=" not in line


def test_every_generation_config_key_is_applied_named_or_irrelevant():
    """Irrelevant keys concern the cache, speed, return values, or the length of the whole text."""
    nothing = {
        "max_length", "early_stopping", "use_mtp", "use_cache", "cache_implementation", "cache_config",
        "max_cache_len", "renormalize_logits", "remove_invalid_values", "num_return_sequences", "output_attentions",
        "output_hidden_states", "output_scores", "output_logits", "return_dict_in_generate", "pad_token_id",
        "bos_token_id", "decoder_start_token_id", "is_assistant", "num_assistant_tokens",
        "num_assistant_tokens_schedule", "assistant_confidence_threshold", "prompt_lookup_num_tokens",
        "max_matching_ngram_size", "assistant_early_exit", "assistant_lookbehind", "target_lookbehind",
        "assistant_ensemble_weight", "speculation_type", "compile_config", "disable_compile",
        "continuous_batching_config", "low_memory", "prefill_chunk_size", "transformers_version",
    }  # fmt: skip
    applied = {*SAMPLING, "do_sample", "eos_token_id"}
    keys = {name for name in vars(transformers.GenerationConfig()) if name[0] != "_"}
    assert keys - nothing - applied <= NOT_APPLIED.keys()
    assert not NOT_APPLIED.keys() & (nothing | applied)
