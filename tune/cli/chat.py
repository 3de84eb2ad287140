"""Chat with a model in the terminal. MODEL is a model folder, an adapter folder or a run. Ctrl-C stops an answer;
Ctrl-D ends the chat.

tune chat runs/mine --compare ./SmolLM2-135M
"""

import json
import os
import signal
import socket
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from tempfile import TemporaryFile
from typing import Any

from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tune import distributed
from tune.cli.model_options import MAX_NEW_TOKENS, add_arguments, opened
from tune.errors import TuneError
from tune.generation import Continuation, Sampler
from tune.lookup import did_you_mean, local_path
from tune.peft import open_model
from tune.terminal import visible
from tune.tokenizers import Message, Tokenizer

PATIENCE = 7 * 24 * 60.0  # minutes that processes wait while the user thinks
NARROW = 60  # columns; in narrower terminals two models answer in turn

COMMANDS = {
    "/system": "TEXT: set the system message and start over",
    "/reset": "start over",
    "/retry": "another answer to your last message",
    "/save": "FILE: append the conversation as a row to train on",
    "/help": "list the commands",
    "/exit": "end the chat, like Ctrl-D",
}


def main(parser: ArgumentParser, arguments: list[str]) -> None:
    parser.epilog = "In the chat:\n" + "\n".join(f"  {name:<8} {what}" for name, what in COMMANDS.items())
    add_arguments(parser)
    parser.add_argument("--compare", metavar="BASE", help="a second model that also answers")
    options = parser.parse_args(arguments)
    with others(options.tp, arguments) if options.tp > 1 and "RANK" not in os.environ else nullcontext():
        talk(options)


@contextmanager
def others(count: int, arguments: list[str]) -> Iterator[None]:
    """Run `count` processes: this one has the terminal, the others follow. torchrun would end all at Ctrl-C."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": str(count)}
    quiet: dict[str, Any] = dict.fromkeys(("stdin", "stdout"), subprocess.DEVNULL)
    command = [sys.executable, "-m", "tune.cli", "chat", *arguments]
    started = []
    try:
        for rank in range(1, count):
            environment = os.environ | place | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            errors = TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115 (closed below)
            process = subprocess.Popen(command, env=environment, start_new_session=True, stderr=errors, **quiet)
            started.append((process, errors))
        os.environ.update(place | {"RANK": "0", "LOCAL_RANK": "0"})
        yield
    except RuntimeError as error:  # also if the connection to an ended process is lost
        for rank, (process, errors) in enumerate(started, 1):
            with suppress(subprocess.TimeoutExpired):
                if process.wait(timeout=1):
                    errors.seek(0)
                    told = "\n".join(errors.read().splitlines()[-5:]) or "often out of memory"
                    raise TuneError(f"process {rank} exited with code {process.returncode}: {told}") from error
        raise
    finally:
        for process, errors in started:
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=5)
            process.kill()
            errors.close()


def talk(options: Namespace) -> None:
    console = Console(highlight=False, markup=False, soft_wrap=True)

    def tell(text: str) -> None:
        console.print(visible(text), style="dim")

    world = distributed.init(options.device, tp=options.tp, timeout=PATIENCE)
    if world.data_size > 1:
        raise TuneError("tune chat starts its own processes. Use --tp N without torchrun")
    model, tokenizer, settings = opened(options, world, tell)
    models = [(options.model, model, tokenizer)]
    if options.compare:
        other = open_model(options.compare)
        second = other.load(world.device, options.dtype, peers=world.mesh["tp"])
        models.append((options.compare, second, other.tokenizer(date=None)))
    speakers = []
    for name, each, its_own in models:
        its_own.require_chat_template()
        speakers.append(Speaker(name, Continuation(each), its_own, settings | {"stop_ids": its_own.stop_ids}))
    Dialogue(world, console, tell, speakers, options.max_new_tokens, options.system).run()
    world.finish()


@dataclass
class Speaker:
    """A model and its side of the conversation."""

    name: str
    continuation: Continuation
    tokenizer: Tokenizer
    settings: dict[str, Any]
    messages: list[Message] = field(default_factory=list)


class Reply:
    """A speaker's answer to its messages, in pieces that end at character boundaries."""

    def __init__(self, speaker: Speaker, most: int, step: int, check: Callable[[], None]):
        self.check = check
        tokenizer, continuation = speaker.tokenizer, speaker.continuation
        self.speaker, self.text, self.note, self.is_complete = speaker, "", "", False
        prompt = tokenizer.encode(tokenizer.apply_chat_template(speaker.messages, add_generation_prompt=True))
        longest = continuation.model.max_generated or sys.maxsize
        if len(prompt) >= longest:
            raise TuneError(
                f"the conversation has {len(prompt)} tokens, and the model reads at most {longest}. /reset starts over"
            )
        self.count = min(most, longest - len(prompt))
        self.stream = tokenizer.stream(skip_special_tokens=True)
        self.said = list[int]()
        self.coming = continuation(Sampler(max_new_tokens=self.count, **speaker.settings), prompt, step=step)

    def __iter__(self) -> Iterator[str]:
        tokenizer = self.speaker.tokenizer
        for token in self.coming:
            self.check()
            self.said.append(token)
            piece = self.stream.add(token)
            self.text += piece
            yield piece
        yield self.rest()
        self.is_complete = True
        if len(self.said) == self.count and self.said[-1] not in tokenizer.stop_ids:
            self.note = f"(cut after {self.count:,} tokens, the limit of --max-new-tokens or the model)"

    def rest(self) -> str:
        """Return the held-back bytes of an unfinished character."""
        piece = self.stream.finish()
        self.text += piece
        return piece

    @property
    def content(self) -> str:
        return self.speaker.tokenizer.decode(self.said, skip_special_tokens=True)


def columns(replies: list[Reply], console: Console, height: int | None = None) -> Table:
    """Return the answers side by side, each with its last lines, `height` at most."""
    table = Table(box=box.MINIMAL, show_edge=False)
    width = (console.width - 2) // len(replies) - 3  # of the text, besides padding, a border and ^C
    cells = []
    for reply in replies:
        name = visible(reply.speaker.name)
        table.add_column(
            Text(name if len(name) <= width else f"\u2026{name[1 - width :]}"), width=width, overflow="fold"
        )
        lines = Text(visible(reply.text)).wrap(console, width, overflow="fold", no_wrap=False)
        cells.append(Text("\n").join(lines[-height:] if height else lines))
    table.add_row(*cells)
    if height is None and any(reply.note for reply in replies):
        table.add_row(*(Text(reply.note, style="dim") for reply in replies))
    return table


class Dialogue:
    """Read messages and commands until the input ends, on the first process for all processes."""

    def __init__(
        self, world: distributed.World, console: Console, tell: Any, speakers: list[Speaker],
        longest: int | None, system: str | None,
    ):  # fmt: skip
        self.world, self.is_reading, self.is_stopped = world, False, False
        self.console, self.tell, self.speakers, self.max_new_tokens = console, tell, speakers, longest
        self.system, self.answers = system, 0
        self.saved: tuple[str, list[Any]] = "", []  # file and rows
        self.begin()

    def begin(self) -> None:
        for speaker in self.speakers:
            speaker.messages = [{"role": "system", "content": self.system}] if self.system else []

    def run(self) -> None:
        if self.world.size > 1:
            signal.signal(signal.SIGINT, self.on_signal)
        if sys.stdin.isatty():
            import readline  # noqa: F401  # enables line editing

            self.tell("/help lists the commands; Ctrl-C stops an answer, Ctrl-D ends")
        while True:
            try:
                line = self.read()
                if line in (None, "/exit"):
                    return
                if line.startswith("/"):
                    self.command(*line.split(maxsplit=1))
                elif line:
                    self.ask(line)
            except KeyboardInterrupt:
                self.tell("\n(Ctrl-D or /exit ends)")
            except TuneError as error:
                self.tell(f"error: {error}")

    def read(self) -> str | None:
        """Return a line, or None at the end of the input."""
        line = None
        if self.world.is_main:
            self.is_reading = True
            with suppress(EOFError):
                line = input("> ").strip()
            self.is_reading = False
        return self.world.broadcast(line)

    def on_signal(self, *_: Any) -> None:
        """Note the signal: processes must leave an exchange together, in `check`."""
        if self.is_reading:
            raise KeyboardInterrupt
        self.is_stopped = True

    def check(self) -> None:
        if self.world.size > 1 and self.world.broadcast(self.is_stopped):
            raise KeyboardInterrupt

    def command(self, name: str, text: str = "") -> None:
        if text and name in ("/reset", "/retry", "/help"):
            raise TuneError(f"{name} takes no argument (got {text!r})")
        if name == "/system" and text:
            self.system = text
        if name in ("/system", "/reset"):
            self.begin()
            self.tell(f"a new conversation; {f'system: {self.system}' if self.system else 'no system message'}")
        elif name == "/retry":
            asked = [each["content"] for each in self.speakers[0].messages if each["role"] == "user"]
            if not asked:
                raise TuneError("/retry: there is no message yet")
            self.take_back()
            self.ask(asked[-1])
        elif name == "/save":
            self.save(text)
        elif name == "/help":
            self.tell("\n".join(f"{each:<8} {what}" for each, what in COMMANDS.items()))
        else:
            raise TuneError(f"{name} is not a command.{did_you_mean(name, COMMANDS)} /help lists the commands")

    def take_back(self) -> None:
        """Remove the user's last message and everything after it."""
        for speaker in self.speakers:
            while speaker.messages.pop()["role"] != "user":
                pass

    def ask(self, text: str) -> None:
        """Let all speakers answer; each continues from its own answers."""
        self.answers += 1
        self.is_stopped = False
        for speaker in self.speakers:
            speaker.messages.append({"role": "user", "content": text})
        try:
            most, console = self.max_new_tokens or MAX_NEW_TOKENS, self.console
            replies = [Reply(speaker, most, self.answers, self.check) for speaker in self.speakers]
            has_room = console.is_terminal and not console.is_dumb_terminal and console.width >= NARROW
            if self.world.broadcast(len(replies) > 1 and has_room):
                self.show_side_by_side(replies)
            else:
                self.show_in_turn(replies)
        except (TuneError, KeyboardInterrupt):
            self.take_back()
            raise
        for reply in replies:
            reply.speaker.messages.append({"role": "assistant", "content": reply.content})

    def show_in_turn(self, replies: list["Reply"]) -> None:
        """Print answers as they arrive; Ctrl-C cuts an answer off."""
        for reply in replies:
            if len(replies) > 1:
                self.console.print(visible(f"[{reply.speaker.name}]"), style="bold")
            try:
                for piece in reply:
                    self.console.out(visible(piece), end="", highlight=False)
                self.console.out()
            except KeyboardInterrupt:
                reply.note = "(stopped)"
                self.console.out(visible(reply.rest()), end=" ", highlight=False)
            if reply.note:
                self.tell(reply.note)

    def show_side_by_side(self, replies: list["Reply"]) -> None:
        """Show the answers in columns, token by token, with as many of the last lines as the terminal shows."""
        with (
            Live(
                get_renderable=lambda: columns(replies, self.console, self.console.height - 4),
                console=self.console, transient=True, refresh_per_second=10,
            ),
            suppress(KeyboardInterrupt),
        ):  # fmt: skip
            coming = [iter(each) for each in replies]
            while coming:
                coming = [each for each in coming if next(each, None) is not None]
        for reply in replies:
            if not reply.is_complete:
                reply.rest()
                reply.note = "(stopped)"
        self.console.print(columns(replies, self.console), soft_wrap=False)

    def save(self, name: str) -> None:
        if not name:
            raise TuneError("/save: name a file")
        if not self.world.is_main:
            return
        rows = [{"model": speaker.name, "messages": [*speaker.messages]} for speaker in self.speakers]
        if self.saved == (name, rows):
            self.tell(f"already saved to {name}")
            return
        try:
            with local_path(name).open("a+", encoding="utf-8") as file:
                file.seek(0)
                before = file.read()
                if before and not before.startswith("{"):
                    raise TuneError(f"/save {name}: the file is not JSON lines. Name another file")
                if before and not before.endswith("\n"):
                    file.write("\n")
                file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        except OSError as error:
            raise TuneError(f"/save {name}: it cannot be written: {error.strerror}") from error
        self.saved = name, rows
        self.tell(f"saved to {name}")
