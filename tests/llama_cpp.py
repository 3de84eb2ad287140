"""llama.cpp itself, through its Python binding, to read the files that are written for it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any


class LlamaCpp:
    """A GGUF file in llama.cpp, in a process of its own, which can be ended."""

    def __init__(self, file: Path, lora: Path | None = None, context: int = 1024):
        command = [sys.executable, __file__, str(file), str(context), *([str(lora)] if lora else [])]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)
        assert self.answer() == "ready"

    def __enter__(self) -> "LlamaCpp":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()

    def answer(self) -> Any:
        for line in self.process.stdout:
            if line.startswith("answer "):
                return json.loads(line.removeprefix("answer "))
        raise RuntimeError("llama.cpp did not load the file")

    def ask(self, **request: Any) -> Any:
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return self.answer()

    def complete(self, prompt: list[int] | str, count: int, **settings: Any) -> list[dict[str, Any]]:
        """Greedy: id and log-probability, from the unchanged logits, of each token. `ignore_eos` makes ends of a turn
        impossible; without it an answer is over at one, which is its last token."""
        settings = {"ignore_eos": True} | settings
        answer = self.ask(prompt=prompt, n_predict=count, temperature=0, n_probs=1, **settings)
        return answer["choices"][0]["logprobs"]["content"]

    def count(self, text: str) -> int:
        """The number of tokens of `text`."""
        return self.ask(prompt=text, n_predict=1)["usage"]["prompt_tokens"]

    def greedy(self, prompt: list[int] | str, count: int, **settings: Any) -> list[int]:
        return [token["id"] for token in self.complete(prompt, count, **settings)]

    def log_prob(self, prompt: list[int], token: int) -> float:
        """Of `token` behind `prompt`."""
        (found,) = self.complete(prompt, 1, logit_bias=[[token, 1e9]], ignore_eos=False)
        assert found["id"] == token
        return found["logprob"]

    def loss(self, tokens: list[int]) -> float:
        """The mean negative log-probability of all tokens but the first."""
        return -sum(self.log_prob(tokens[:at], tokens[at]) for at in range(1, len(tokens))) / (len(tokens) - 1)


def serve(file: str, context: str, *lora: str) -> None:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = file
    params.n_ctx, params.n_parallel, params.warmup = int(context), 1, False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.use_jinja = True
    if lora:
        params.lora_adapters = [xllamacpp.CommonAdapterLoraInfo(lora[0], 1.0)]
    server = xllamacpp.Server(params)
    print('answer "ready"', flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        handle = server.handle_chat_completions if "messages" in request else server.handle_completions
        print("answer", json.dumps(handle(request)), flush=True)


if __name__ == "__main__":
    serve(*sys.argv[1:])
