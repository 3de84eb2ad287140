import hashlib
import json
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from helpers import run_verbs

from tune.checkpointers import model_card
from tune.checkpointers.writing import HUB_ID
from tune.cli.download import require_its_own, wanted
from tune.errors import TuneError

FILES = {
    "config.json": b"{}",
    "model.safetensors": b"weights",
    "pytorch_model.bin": b"the same weights",
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "onnx/model.onnx": b"not for training",
    "README.md": b"a card",
}
COMMIT = "0123456789" * 4


class Hub(BaseHTTPRequestHandler):
    """The few responses of the Hugging Face Hub that a download requests."""

    fetched: list[str]

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        match self.path.partition("?")[0].strip("/").split("/"):
            case ["api", "models", "someone", "tiny", "revision", "missing"]:
                self.answer(404, {"X-Error-Code": "RevisionNotFound"})
            case ["api", "models", "someone", "tiny", *_]:
                siblings = [{"rfilename": name} for name in FILES]
                self.answer(200, {}, json.dumps({"id": "someone/tiny", "sha": COMMIT, "siblings": siblings}).encode())
            case ["api", "models", "someone", "gated", *_]:
                self.answer(403, {"X-Error-Code": "GatedRepo"})
            case ["api", "models", *_] | ["someone", "unknown", "resolve", *_]:
                self.answer(401, {"X-Error-Code": "RepoNotFound"})
            case ["someone", "tiny", "resolve", _, name]:
                if self.command == "GET":
                    self.fetched.append(name)
                etag = hashlib.sha256(FILES[name]).hexdigest()
                self.answer(200, {"X-Repo-Commit": COMMIT, "ETag": f'"{etag}"'}, FILES[name])

    def answer(self, status: int, headers: dict[str, str], body: bytes = b"") -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[str]:
    """Start a local hub and yield its address."""
    Hub.fetched = []
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def download(folder: Path, hub: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return cli(folder, hub, "download", *arguments)


def cli(folder: Path, hub: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name, value in {"HF_ENDPOINT": hub, "HF_HOME": str(folder / "home"), "HF_HUB_OFFLINE": "0"}.items():
            patch.setenv(name, value)
        (done,) = run_verbs([*arguments])
    return done


@pytest.mark.slow
def test_download_gets_what_training_needs_once(tmp_path: Path, hub: str) -> None:
    first = download(tmp_path, hub, "someone/tiny")
    assert first.returncode == 0, first.stderr
    assert first.stdout == "wrote tiny\n"
    files = {path.name: path.read_bytes() for path in (tmp_path / "tiny").iterdir() if path.is_file()}
    assert files == {name: FILES[name] for name in wanted(FILES)}
    assert sorted(Hub.fetched) == sorted(files)

    assert download(tmp_path, hub, "someone/tiny").returncode == 0
    assert len(Hub.fetched) == len(files)
    assert "\nbase_model: someone/tiny\n" in model_card("full_finetune", str(tmp_path / "tiny"), "chats.jsonl")


@pytest.mark.parametrize("held", ["another model", "notes"])
def test_folder_with_other_contents_is_rejected(held, tmp_path):
    """Regression: the files of `tune download a/llama` and `tune download b/llama` were mixed in one folder."""
    (tmp_path / "notes.md").write_text("mine")
    if held == "another model":
        (tmp_path / HUB_ID).parent.mkdir(parents=True)
        (tmp_path / HUB_ID).write_text("another/tiny")
    with pytest.raises(TuneError, match="another/tiny" if held == "another model" else str(tmp_path)):
        require_its_own(tmp_path, "someone/tiny")
    (tmp_path / HUB_ID).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / HUB_ID).write_text("someone/tiny")
    require_its_own(tmp_path, "someone/tiny")
    require_its_own(tmp_path / "new", "someone/tiny")


@pytest.mark.slow
def test_download_to_a_named_folder(tmp_path: Path, hub: str) -> None:
    assert download(tmp_path, hub, "someone/tiny", "--revision", "main", "--out", "here").stdout == "wrote here\n"
    assert (tmp_path / "here" / "model.safetensors").read_bytes() == b"weights"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "explanation"),
    [
        (["someone/tiny", "--revision", "missing"], "someone/tiny has no revision 'missing'"),
        (["someone/gated"], "someone/gated is gated"),
        (["someone/unknown"], "someone/unknown is not on the Hub, or is private"),
        (["a/b/c"], "'a/b/c' is not a valid model id"),
    ],
)
def test_hub_errors_are_explained(tmp_path: Path, hub: str, arguments: list[str], explanation: str) -> None:
    result = download(tmp_path, hub, *arguments)
    assert result.returncode == 2
    assert result.stderr.startswith("error: ")
    assert explanation in result.stderr


@pytest.mark.weekly
def test_plan_downloads_only_the_config(
    tmp_path: Path, checkpoint: Path, hub: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FILES, "config.json", (checkpoint / "config.json").read_bytes())
    settings = "--device", "h100", "max_seq_len=64", "--json"
    result = cli(tmp_path, hub, "plan", "lora_finetune", "model.path=someone/tiny", *settings)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["fits"] and Hub.fetched == ["config.json"]
    missing = cli(tmp_path, hub, "plan", "full_finetune", "model.path=someone/unknown", *settings)
    assert missing.returncode == 2 and "error: someone/unknown is not on the Hub, or is private" in missing.stderr
    offline = cli(tmp_path / "..", "http://127.0.0.1:9", "plan", "full_finetune", "model.path=someone/other", *settings)
    assert offline.returncode == 2 and "error: the request to the Hub for someone/other failed" in offline.stderr


@pytest.mark.slow
def test_missing_network_is_reported(tmp_path: Path) -> None:
    result = download(tmp_path, "http://127.0.0.1:9", "someone/tiny")
    assert result.returncode == 2
    assert "error: the request to the Hub for " in result.stderr
    assert "Traceback" not in result.stderr


def test_torch_weights_are_downloaded_only_without_safetensors() -> None:
    assert wanted(["config.json", "pytorch_model.bin", "README.md"]) == ["config.json", "pytorch_model.bin"]
    assert wanted(["config.json", "pytorch_model.bin", "model.safetensors"]) == ["config.json", "model.safetensors"]
