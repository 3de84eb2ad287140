"""`tune push` to a local hub."""

import base64
import json
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from helpers import make_adapter, run_verbs

from tune.files.atomic import INDEX

TOKEN = "hf_" + "x" * 34


class Hub(BaseHTTPRequestHandler):
    """The few responses of the Hugging Face Hub that an upload of small files requests."""

    made: list[dict[str, Any]]
    uploaded: dict[str, bytes]
    tokens: set[str | None]

    def do_GET(self) -> None:
        self.answer(404, {})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.tokens.add(self.headers["Authorization"])
        match self.path.partition("?")[0].strip("/").split("/"):
            case ["api", "repos", "create"]:
                asked = json.loads(body)
                if asked.get("organization") == "stranger":
                    return self.answer(403, {"error": "You don't have the rights"})
                self.made.append(asked)
                url = f"http://{self.headers['Host']}/someone/mine"
                return self.answer(200, {"url": url, "id": "someone/mine"})
            case ["api", "validate-yaml"]:
                return self.answer(200, {"errors": [], "warnings": []})
            case ["api", "models", "someone", "mine", "preupload", _]:
                files = [
                    {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False, "oid": None}
                    for file in json.loads(body)["files"]
                ]
                return self.answer(200, {"files": files})
            case ["api", "models", "someone", "mine", "commit", _]:
                for line in map(json.loads, body.splitlines()):
                    if line["key"] == "file":
                        self.uploaded[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
                return self.answer(
                    200,
                    {
                        "success": True,
                        "commitOid": "0" * 40,
                        "commitUrl": f"http://{self.headers['Host']}/someone/mine/commit/0",
                    },
                )
        return self.answer(404, {"error": self.path})

    def answer(self, status: int, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[str]:
    Hub.made, Hub.uploaded, Hub.tokens = [], {}, set()
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def run(checkpoint: Path, tmp_path: Path) -> Path:
    """Create a run folder with an adapter."""
    folder = make_adapter(checkpoint, tmp_path / "run" / "adapter", seed=1)
    (tmp_path / "run" / "config.yaml").write_text("seed: 0\n")
    (folder / "README.md").write_text("---\nbase_model: someone/base\n---\n\nMine.\n")
    (folder / ".hidden").write_text("not for others")
    return folder.parent


def push(hub: str, *arguments: object, **changes: str) -> subprocess.CompletedProcess[str]:
    environment = {"HF_ENDPOINT": hub, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": TOKEN}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (environment | {"HF_HOME": f"{arguments[0]}.home"} | changes).items():
            patch.setenv(name, value)
        (done,) = run_verbs(["push", *map(str, arguments)])
    return done


@pytest.mark.slow
def test_push_uploads_the_adapter_of_a_run(hub: str, run: Path) -> None:
    result = push(hub, run, "someone/mine", "--private")
    assert result.returncode == 0, result.stderr
    kept = {".hidden", INDEX}
    files = {file.name: file.read_bytes() for file in (run / "adapter").iterdir() if file.name not in kept}
    assert Hub.uploaded == files and {"README.md", "adapter_model.safetensors", "tokenizer.json"} <= files.keys()
    assert Hub.made[0]["name"] == "mine" and "private" in (Hub.made[0].get("visibility"), *Hub.made[0])
    assert Hub.tokens == {f"Bearer {TOKEN}"}
    assert f"uploaded to {hub}/someone/mine" in result.stdout and "Hub id" in result.stdout
    assert TOKEN not in result.stdout + result.stderr


@pytest.mark.slow
def test_token_from_a_file(hub: str, run: Path, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(f"{TOKEN[::-1]}\n")
    assert push(hub, run / "adapter", "someone/mine", "--token-file", tmp_path / "token").returncode == 0
    assert Hub.tokens == {f"Bearer {TOKEN[::-1]}"} and "private" not in Hub.made[0].values()


WRONG = {
    "nothing there": (["absent", "someone/mine"], {}, "absent"),
    "no card": (["BARE", "someone/mine"], {}, "has no model card. Write"),
    "no name": (["RUN", "a/b/c"], {"HF_TOKEN": ""}, "'a/b/c' is not a repository name"),
    "not logged in": (["RUN", "someone/mine"], {"HF_TOKEN": ""}, "you are not logged in to the Hub"),
    "no such token": (["RUN", "someone/mine", "--token-file", "absent"], {}, "--token-file absent cannot be read"),
    "another's": (["RUN", "stranger/mine"], {}, "this login may not write to stranger/mine"),
    "no network": (["RUN", "someone/mine"], {"HF_ENDPOINT": "http://127.0.0.1:9"}, "Check the network"),
    "offline": (["RUN", "someone/mine"], {"HF_HUB_OFFLINE": "1"}, "Check the network"),
}


@pytest.mark.slow
@pytest.mark.parametrize("wrong", WRONG)
def test_invalid_inputs_are_rejected(wrong: str, hub: str, run: Path) -> None:
    arguments, changes, message = WRONG[wrong]
    if "BARE" in arguments:
        (run / "adapter" / "README.md").write_text("\n")
    result = push(hub, *(run if argument in ("RUN", "BARE") else argument for argument in arguments), **changes)
    assert result.returncode == 2 and message in result.stderr
    assert TOKEN not in result.stdout + result.stderr and "Traceback" not in result.stderr
    assert not Hub.uploaded
