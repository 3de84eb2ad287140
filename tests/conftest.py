import gc
import io
import json
import os
import random
import shutil
import sys
from collections import defaultdict
from contextlib import redirect_stdout
from pathlib import Path

import hypothesis
import pytest
import torch
from fork_server import RARELY
from helpers import WORDS, drawn_number, is_drawn, result_of, run_processes, save_checkpoint
from reasoning import DROPS_REASONING

from tune import cli

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# The same cases in each run, so that only a change to the code changes results.
# `--hypothesis-profile=default` searches for new cases.
# No deadline, because the machine may be busy.
hypothesis.settings.register_profile("tune", deadline=None, derandomize=True)
hypothesis.settings.load_profile("tune")
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


@pytest.hookimpl(tryfirst=True)  # before pytest selects by `-m`
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark a sample of the weekly tests as drawn: one in `DRAWN_OF`, and one case of those that are `but_one`."""
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        weekly = item.get_closest_marker("weekly")
        if weekly and is_drawn(item.nodeid):
            item.add_marker(pytest.mark.drawn)
        if weekly and weekly.kwargs.get("but_one"):
            cases[item.nodeid.partition("[")[0]].append(item)
    for of_function in cases.values():
        min(of_function, key=lambda item: drawn_number(item.nodeid)).add_marker(pytest.mark.drawn)


def pytest_collection_finish() -> None:
    """Leave all that is imported out of garbage collection."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*RARELY)


@pytest.fixture(autouse=True, scope="session")
def cache_of_the_session(tmp_path_factory):
    """Keep prepared datasets in a temporary folder of the session; pytest removes leftovers after three sessions."""
    folder = tmp_path_factory.mktemp("cache")
    os.environ["TUNE_CACHE"] = str(folder)
    yield
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(autouse=True)
def forget_written_modules(tmp_path_factory):
    """Forget modules that a test wrote: the next test may write another one with the same name."""
    before, folder = set(sys.modules), str(tmp_path_factory.getbasetemp())
    yield
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(folder):
            del sys.modules[name]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Path:
    """Return an untied Llama checkpoint."""
    return save_checkpoint(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def tied_checkpoint(tmp_path_factory) -> Path:
    """Return a tied Qwen3 checkpoint."""
    return save_checkpoint(tmp_path_factory.mktemp("qwen3"), "Qwen3Config", head_dim=16, tie_word_embeddings=True)


@pytest.fixture(scope="session")
def thinking_checkpoint(checkpoint, tmp_path_factory) -> Path:
    """Return the `checkpoint` with a template that drops the reasoning of earlier answers."""
    folder = tmp_path_factory.mktemp("thinking") / "llama"
    shutil.copytree(checkpoint, folder)
    (folder / "chat_template.jinja").write_text(DROPS_REASONING)
    return folder


@pytest.fixture(scope="session")
def chats(tmp_path_factory) -> Path:
    """Return 48 conversations with very different lengths and shares of supervised tokens."""
    draw = random.Random(0)

    def text(low: int, high: int) -> str:
        return " ".join(draw.choices(WORDS, k=draw.randint(low, high)))

    file = tmp_path_factory.mktemp("data") / "chats.jsonl"
    with file.open("w") as lines:
        for _ in range(48):
            user, assistant = {"role": "user", "content": text(1, 30)}, {"role": "assistant", "content": text(1, 20)}
            lines.write(json.dumps({"messages": [user, assistant]}) + "\n")
    return file


@pytest.fixture(scope="session")
def biased_checkpoint(tmp_path_factory) -> Path:
    """Return a Llama checkpoint with biases everywhere."""
    return save_checkpoint(tmp_path_factory.mktemp("biased"), attention_bias=True, mlp_bias=True)


@pytest.fixture(scope="session")
def told():
    """Return a function that gives the findings of `tune validate` at a level as one text and cleans up."""

    def told(recipe: str, settings: list[str], level: str = "error") -> str:
        with redirect_stdout(io.StringIO()) as shown, pytest.raises(SystemExit) as end:
            cli.main(["validate", recipe, *settings, "--json"])
        found = json.loads(shown.getvalue())
        assert end.value.code == (found["error"] > 0)
        return "\n".join(f"{each['place']}: {each['message']}" for each in found["findings"] if each["level"] == level)

    return told


@pytest.fixture(scope="session")
def told_to():
    """Return a function that gives the `tune validate` errors of command lines (recipe, settings) for `processes`."""

    def told_to(processes: int, *command_lines: list[str]) -> list[str]:
        script = Path(__file__).with_name("validate_command_lines.py")
        return result_of(run_processes(script, 1, str(processes), json.dumps(command_lines)))

    return told_to
