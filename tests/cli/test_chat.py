"""`tune chat`, driven through a real terminal."""

import io
import json
import os
import pty
import re
import select
import signal
import sys
import time
from pathlib import Path

import pytest
from helpers import HANGS, make_adapter, save_checkpoint
from rich.console import Console

from tune import distributed
from tune.checkpointers import load_model
from tune.cli.chat import Dialogue, Speaker
from tune.generation import Continuation, Sampler
from tune.terminal import visible
from tune.tokenizers import Tokenizer

CUT = "(cut after 12 tokens, the limit of --max-new-tokens or the model)"


class Terminal:
    """A process in a terminal: its input and its output."""

    def __init__(self, *arguments, **variables):
        self.process, self.screen = pty.fork()
        if not self.process:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background jobs ignore it
            environment = os.environ | {"TERM": "dumb", "COLUMNS": "100000"} | variables
            os.execve(sys.executable, [sys.executable, "-m", "tune.cli", *map(str, arguments)], environment)
        self.seen, self.bytes = "", b""

    def type(self, text):
        os.write(self.screen, text.encode())

    def wait_for(self, pattern, again=""):
        """Return the output up to the end of the pattern that no earlier call returned.

        `again` is typed after every two seconds without output.
        """
        deadline = time.monotonic() + HANGS
        while not (match := re.search(pattern, self.seen)):
            left = max(0, deadline - time.monotonic())
            ready, _, _ = select.select([self.screen], [], [], min(2, left) if again else left)
            if not ready and again and left:
                self.type(again)
                continue
            try:
                self.bytes += os.read(self.screen, 65536) if ready else b""
            except OSError:  # the process has ended
                ready = []
            assert ready, f"{pattern!r} is not in {self.seen[-2000:]!r}"
            self.seen = self.bytes.decode(errors="replace").replace("\r\n", "\n")
        shown, self.seen = self.seen[: match.end()], self.seen[match.end() :]
        self.bytes = self.seen.encode()
        return shown

    def ask(self, text):
        """Type a line and return the output up to the next prompt."""
        self.type(f"{text}\n")
        self.wait_for(re.escape(text) + "\n")
        return self.wait_for(r"(?m)^> ").removesuffix("> ").removesuffix("\n")

    def end(self):
        os.kill(self.process, signal.SIGKILL)
        os.waitpid(self.process, 0)
        os.close(self.screen)


@pytest.fixture
def terminal():
    opened = []

    def start(*arguments, **variables):
        opened.append(Terminal("chat", *arguments, **variables))
        opened[0].wait_for(r"(?m)^> ")
        return opened[0]

    yield start
    for chat in opened:
        chat.end()


def answer(folder, messages, count, **settings):
    """Return the sampler's answer to the whole conversation."""
    model, tokenizer = load_model(str(folder)), Tokenizer(str(folder))
    prompt = tokenizer.encode(tokenizer.apply_chat_template(messages, add_generation_prompt=True))
    step = settings.pop("step", 1)
    sampler = Sampler(max_new_tokens=count, stop_ids=tokenizer.stop_ids, **{"temperature": 0} | settings)
    return tokenizer.decode(sampler(model, [prompt], step=step)[0][0].tokens, skip_special_tokens=True)


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def words(text):
    """Remove control characters, which terminals change. A character that streaming has split is \ufffd."""
    return re.sub(r"[\x00-\x1f\x7f]", "", text).removesuffix(CUT)


@pytest.mark.slow
def test_chat_conversation(checkpoint, terminal, tmp_path):
    chat = terminal(checkpoint, "--max-new-tokens", 12, "--device", "cpu")
    first = answer(checkpoint, [user("the cat")], 12)
    shown = chat.ask("the cat")
    assert words(shown) == words(visible(first)) and shown.endswith(CUT)
    turns = [user("the cat"), assistant(first), user("a dog")]
    second = answer(checkpoint, turns, 12)
    assert words(chat.ask("a dog")) == words(visible(second))
    assert words(chat.ask("/retry")) == words(visible(second))  # the most likely tokens
    assert f"saved to {tmp_path}/saved.jsonl" in chat.ask(f"/save {tmp_path}/saved.jsonl")
    assert f"already saved to {tmp_path}/saved.jsonl" in chat.ask(f"/save {tmp_path}/saved.jsonl")
    assert "/retry takes no argument (got 'now')" in chat.ask("/retry now")
    assert "a new conversation; no system message" in chat.ask("/reset")
    assert words(chat.ask("a dog")) == words(visible(answer(checkpoint, [user("a dog")], 12)))
    assert "a new conversation; system: very red" in chat.ask("/system very red")
    system = {"role": "system", "content": "very red"}
    assert words(chat.ask("a dog")) == words(visible(answer(checkpoint, [system, user("a dog")], 12)))
    chat.ask(f"/save {tmp_path}/saved.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "saved.jsonl").read_text().splitlines()]
    assert rows[0] == {"model": str(checkpoint), "messages": [*turns, assistant(second)]}
    assert rows[1]["messages"][:2] == [system, user("a dog")] and len(rows) == 2
    assert "/retry   another answer" in chat.ask("/help")
    wrong = {
        "/rset": "/rset is not a command. Did you mean '/reset'?", "/save": "/save: name a file",
        f"/save {tmp_path}/none/x": "it cannot be written: No such file",
    }  # fmt: skip
    (tmp_path / "array.json").write_text("[{}]")
    (tmp_path / "cut.jsonl").write_text('{"messages": []}')
    wrong[f"/save {tmp_path}/array.json"] = "not JSON lines"
    chat.ask(f"/save {tmp_path}/cut.jsonl")
    assert len([json.loads(line) for line in (tmp_path / "cut.jsonl").read_text().splitlines()]) == 2
    for command, message in wrong.items():
        assert message in chat.ask(command)
    chat.ask("/reset")
    assert "/retry: there is no message yet" in chat.ask("/retry")
    chat.type("\x04")
    assert os.waitstatus_to_exitcode(os.waitpid(chat.process, os.WUNTRACED)[1]) == 0
    chat.process = os.spawnv(os.P_NOWAIT, "/bin/true", ["true"])


@pytest.mark.slow
def test_retry_samples_another_answer(checkpoint, terminal):
    chat = terminal(checkpoint, "--max-new-tokens", 12, "--temperature", 1, "--seed", 3)
    expected = ""
    for step, line in enumerate(["the cat", "/retry", "/retry"], 1):
        sampled = answer(checkpoint, [user("the cat")], 12, temperature=1.0, seed=3, step=step)
        assert words(chat.ask(line)) == words(visible(sampled))
        expected += sampled
    assert re.search("[\u0080-\ufffc]", expected)  # characters that span several tokens are shown whole


WIDE = {"TERM": "xterm", "COLUMNS": "100", "LINES": "12"}
ERASED = "\x1b[2K"  # erases a line while a growing answer is redrawn


def columns(shown):
    """Return the heading, text, and note of each column of the last output."""
    rows = re.sub(r"\x1b\[[\d;?]*\w", "", shown.rpartition(ERASED)[2]).split("\n")
    sides = zip(*(row.split("\u2502") for row in rows if "\u2502" in row), strict=True)
    return [(head.strip(), *"".join(lines).rpartition("(")[::2]) for head, *lines in sides]


def letters(text):
    """Remove whitespace, which wrapping changes, and control characters, which have no width."""
    return re.sub(r"\s", "", words(text))


@pytest.mark.slow
def test_answers_side_by_side(checkpoint, terminal, tmp_path):
    """Two columns grow together in a capable terminal."""
    adapter = make_adapter(checkpoint, tmp_path / "adapter", 1)
    chat = terminal(adapter, "--compare", checkpoint, "--max-new-tokens", 40, **WIDE)
    messages = []
    for line in ("the cat", "a dog"):
        messages.append(user(line))
        reply = answer(checkpoint, messages, 40)
        shown = chat.ask(line)
        (first, tuned, _), (second, base, cut) = columns(shown)
        for name, whole in {first: adapter, second: checkpoint}.items():
            assert str(whole).endswith(name.removeprefix("\u2026")) and len(name) > 20
        assert cut.startswith("cut after 40 tokens")
        assert letters(base) == letters(visible(reply)) != letters(tuned)
        messages.append(assistant(reply))


@pytest.mark.slow
def test_ctrl_c_keeps_both_partial_answers(terminal, tmp_path):
    """Both partial answers stay, although they are longer than the terminal is high."""
    folder = save_checkpoint(tmp_path / "endless", max_position_embeddings=200_000, eos_token_id=None)
    chat = terminal(folder, "--compare", folder, "--max-new-tokens", 150_000, **WIDE)
    chat.type("the cat\n")
    for _ in range(30):
        chat.wait_for(re.escape(ERASED) + r"[\s\S]*?\u2502")  # drawn again
    chat.type("\x03")
    (_, first, stopped), (_, second, _) = columns(chat.wait_for(r"(?m)^> "))
    ends = (text.rstrip(" \ufffd") for text in (first, second))  # a character may be cut by Ctrl-C
    shorter, longer = sorted(ends, key=len)
    assert longer.startswith(shorter) and len(letters(shorter)) > 50 and stopped.startswith("stopped)")


def test_both_models_keep_their_caches(checkpoint):
    """Each model reads only the new part of the conversation and no token twice."""
    tokenizer, models = Tokenizer(str(checkpoint)), [load_model(str(checkpoint)) for _ in range(2)]
    settings = {"temperature": 0, "stop_ids": ()}
    speakers = [Speaker("", Continuation(model), tokenizer, settings) for model in models]
    read = {model: [] for model in models}

    def count(model, inputs):
        read[model].append(getattr(inputs[0], "tokens", inputs[0]).numel())

    for model in models:
        model.register_forward_pre_hook(count)
    dialogue = Dialogue(distributed.init("cpu"), Console(file=io.StringIO()), print, speakers, 5, None)
    dialogue.ask("the cat")
    dialogue.ask("a dog")
    dialogue.ask("it ran")
    for speaker, tokens in zip(speakers, read.values(), strict=True):
        text = tokenizer.apply_chat_template(speaker.messages[:-1], add_generation_prompt=True)
        # Each answer's last token is read with the next message, where it is encoded again.
        assert sum(tokens) <= len(tokenizer.encode(text)) + 5 + 3 * 5


@pytest.mark.slow
def test_compare_base_and_tuned_models(checkpoint, terminal, tmp_path):
    adapter = make_adapter(checkpoint, tmp_path / "adapter", 1)
    chat = terminal(adapter, "--compare", checkpoint, "--max-new-tokens", 12)
    shown = chat.ask("the cat")
    tuned, base = shown.removeprefix(f"[{adapter}]").split(f"[{checkpoint}]")
    first = answer(checkpoint, [user("the cat")], 12)
    assert words(base) == words(visible(first)) != words(tuned)
    base = chat.ask("a dog").split(f"[{checkpoint}]")[1]  # each model continues from its own answers
    assert words(base) == words(visible(answer(checkpoint, [user("the cat"), assistant(first), user("a dog")], 12)))


@pytest.mark.slow
def test_two_processes_share_the_model(checkpoint, terminal):
    chat = terminal(checkpoint, "--compare", checkpoint, "--tp", 2, "--max-new-tokens", 12, "--device", "cpu", **WIDE)
    reply = answer(checkpoint, [user("the cat")], 12)
    for _, text, cut in columns(chat.ask("the cat")):
        assert letters(text) == letters(visible(reply)) and cut.startswith("cut after 12 tokens")
    chat.type("/exit\n")
    assert os.waitstatus_to_exitcode(os.waitpid(chat.process, 0)[1]) == 0
    chat.process = os.spawnv(os.P_NOWAIT, "/bin/true", ["true"])


@pytest.mark.slow
def test_lost_process_is_named(checkpoint, terminal):
    chat = terminal(checkpoint, "--tp", 2, "--max-new-tokens", 12, "--device", "cpu")
    chat.ask("the cat")
    (other,) = Path(f"/proc/{chat.process}/task/{chat.process}/children").read_text().split()
    os.kill(int(other), signal.SIGKILL)
    chat.type("a dog\n")
    chat.wait_for("error: process 1 exited with code -9: often out of memory")
    assert os.waitstatus_to_exitcode(os.waitpid(chat.process, 0)[1]) == 2
    chat.process = os.spawnv(os.P_NOWAIT, "/bin/true", ["true"])


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_answers_stream_and_ctrl_c_stops_them(processes, terminal, tmp_path):
    """An answer that would take minutes is shown as it is generated, and can be stopped."""
    folder = save_checkpoint(tmp_path / "endless", max_position_embeddings=200_000, eos_token_id=None)
    chat = terminal(folder, "--max-new-tokens", 150_000, "--tp", processes, "--device", "cpu")
    chat.type("the cat\n")
    chat.wait_for(r"the cat\n.*\S[\s\S]{40}")
    chat.type("\x03")
    chat.wait_for(r"\(stopped\)\n> ")
    assert "a new conversation" in chat.ask("/reset")
    chat.type("the dog")
    chat.wait_for("the dog")
    chat.type("\x03")
    # Python loses a signal that arrives just before it waits for a key. As a person would, the test presses it again.
    chat.wait_for(r"\(Ctrl-D or /exit ends\)\n> ", again="\x03")
    chat.type("/exit\n")
    assert os.waitstatus_to_exitcode(os.waitpid(chat.process, 0)[1]) == 0
    chat.process = os.spawnv(os.P_NOWAIT, "/bin/true", ["true"])
