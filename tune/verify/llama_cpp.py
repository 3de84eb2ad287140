"""Read GGUF files with llama.cpp, through its Python binding."""

import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Collection, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tune.errors import TuneError
from tune.tokenizers import Message

SERVER = Path(__file__).with_name("llama_server.py")


class LlamaCpp:
    """A GGUF file in llama.cpp, in a separate process that can be killed; `lora` adds an adapter.

    Raises:
        TuneError: the binding xllamacpp is not installed, or llama.cpp cannot load the file.
    """

    name = "llama.cpp"
    missing = None

    def __init__(self, file: Path, lora: Path | None = None, context: int = 1024, threads: int = 1):
        if find_spec("xllamacpp") is None:
            raise TuneError(f"{file}: needs llama.cpp's Python binding: pip install xllamacpp")
        command = [sys.executable, str(SERVER), str(file), str(context), str(threads), *([str(lora)] if lora else [])]
        self.file = file
        self.told = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=self.told, text=True)
        self._answer()

    def __enter__(self) -> "LlamaCpp":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        self.told.close()

    def _answer(self) -> Any:
        assert self.process.stdout
        for line in self.process.stdout:  # llama.cpp prints other lines too
            if line.startswith("answer "):
                return json.loads(line.removeprefix("answer "))
        self.told.seek(0)
        lines = [line.strip() for line in self.told if "error" in line.lower() or "failed" in line.lower()]
        raise TuneError(f"llama.cpp cannot open {self.file}: {'; '.join(lines[:3]) or 'it exited'}")

    def ask(self, **request: Any) -> Any:
        """Send a request to the server and return its answer: a completion or, with `messages`, a chat completion."""
        assert self.process.stdin
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:  # the process exited: _answer raises with its output
            pass
        answer = self._answer()
        if "error" in answer or "choices" not in answer:
            raise TuneError(f"llama.cpp, with {self.file}: {answer.get('error', answer)}")
        return answer

    def complete(self, prompt: Sequence[int] | str, count: int, **settings: Any) -> list[dict[str, Any]]:
        """Decode greedily. Returns id and log-prob (from the unmodified logits) of each token, except tokens that are
        part of a character. `ignore_eos` makes end-of-turn tokens impossible; without it, an answer ends with such a
        token."""
        settings = {"ignore_eos": True} | settings
        answer = self.ask(prompt=prompt, n_predict=count, temperature=0, n_probs=1, **settings)
        found = answer["choices"][0]["logprobs"]
        return found["content"] if found else []

    def greedy(self, prompt: Sequence[int] | str, count: int, **settings: Any) -> list[int]:
        return [token["id"] for token in self.complete(prompt, count, **settings)]

    def log_prob(self, prompt: Sequence[int], token: int) -> float | None:
        """Return the log-prob of `token` after `prompt`; None for a token that is part of a character, for which
        llama.cpp's server reports none."""
        found = self.complete(prompt, 1, logit_bias=[[token, 1e9]], ignore_eos=False)
        assert not found or found[0]["id"] == token
        if not found:
            return None
        value = found[0]["logprob"]
        return math.nan if value is None else float(value)  # JSON has no NaN: the server writes null

    def count(self, text: str) -> int:
        """Return the number of tokens of `text`, including the tokens that are put before a text."""
        return self.ask(prompt=text, n_predict=1)["usage"]["prompt_tokens"]

    # The methods of `Program`.

    def reads(self, text: str, ids: Sequence[int]) -> bool:
        """Whether it encodes `text` as `ids`, including tokens before a text: the count and the next token match."""
        if self.count(text) != len(ids):
            return False
        of_text, of_ids = self.complete(text, 1), self.complete(ids, 1)
        pairs = zip(of_text, of_ids, strict=True) if len(of_text) == len(of_ids) else [({"id": 0}, {"id": 1})]
        return all(one["id"] == other["id"] and abs(one["logprob"] - other["logprob"]) < 1e-2 for one, other in pairs)

    def decode(self, ids: Sequence[int]) -> None:
        """The server only decodes its answers."""

    def chat(self, messages: list[Message], tools: list[Any] | None = None) -> tuple[str, int | list[int]] | None:
        """Return `messages` rendered by its chat template for an answer, and the number of tokens read; None with
        `tools`, for which the server changes messages and adds a grammar."""
        if tools:
            return None
        answer = self.ask(messages=messages, max_tokens=1, verbose=True)
        return answer["__verbose"]["prompt"], answer["usage"]["prompt_tokens"]

    def stops(self, tokens: Collection[int]) -> set[int]:
        """Return those of `tokens` that end an answer. llama.cpp adds others itself, which it knows by their names."""
        return {token for token in tokens if self._stops_at(token)}

    def _stops_at(self, token: int) -> bool:
        answer = self.ask(prompt=[token], n_predict=2, temperature=0, logit_bias=[[token, 1e9]])
        return bool(answer["choices"][0]["finish_reason"] == "stop")

    def answer(self, prompt: Sequence[int], count: int) -> tuple[list[int], str]:
        """Return the most likely tokens after `prompt`, up to one that ends an answer, and their text."""
        found = self.ask(prompt=prompt, n_predict=count, temperature=0, return_tokens=True, verbose=True)
        tokens: list[int] = found["__verbose"]["tokens"]
        return tokens, found["choices"][0]["text"]

    def log_probs(self, ids: Sequence[int]) -> list[float | None]:
        """Return the log-probs of all tokens but the first. The server reports none for a prompt, so each token is
        forced in turn."""
        return [self.log_prob(ids[:at], ids[at]) for at in range(1, len(ids))]
