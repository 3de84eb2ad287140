"""Talk to a model in the terminal: MODEL is a model folder, an adapter folder or a run. Ctrl-C stops an answer, Ctrl-D
ends.

tune chat runs/mine --compare ./SmolLM2-135M
"""

import json
import sys
from argparse import ArgumentParser, Namespace
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from tune import distributed
from tune.cli.export import model_at
from tune.cli.generate import MAX_NEW_TOKENS, add_arguments, opened
from tune.errors import TuneError
from tune.generation import Continuation, Sampler
from tune.lookup import did_you_mean
from tune.peft import open_model
from tune.tokenizers import Message, Tokenizer

COMMANDS = {
    "/system": "TEXT: set the system message, and begin anew",
    "/reset": "begin anew",
    "/retry": "another answer to your last message",
    "/save": "FILE: add the conversation to it, as a row to train on",
    "/help": "this",
    "/exit": "end, as Ctrl-D",
}


def main(parser: ArgumentParser, arguments: list[str]) -> None:
    parser.epilog = "In the chat:\n" + "\n".join(f"  {name:<8} {what}" for name, what in COMMANDS.items())
    add_arguments(parser)
    parser.add_argument("--compare", metavar="BASE", help="have this model answer too")
    options = parser.parse_args(arguments)
    with model_at(options.model, options.step) as options.model, model_at(options.compare or "") as options.compare:
        talk(options)


def talk(options: Namespace) -> None:
    console = Console(highlight=False, markup=False, soft_wrap=True)
    tell = partial(console.print, style="dim")
    world = distributed.init(options.device)
    if world.size > 1:
        raise TuneError("a chat is in one process: start it without torchrun")
    model, tokenizer, settings = opened(options, world.device, tell)
    models = [(options.model, model, tokenizer)]
    if options.compare:
        models.append((options.compare, *open_model(options.compare, device=world.device, dtype=options.dtype)))
    speakers = []
    for name, each, its_own in models:
        its_own.require_chat_template()
        speakers.append(Speaker(name, Continuation(each), its_own, settings | {"stop_ids": its_own.stop_ids}))
    Dialogue(console, tell, speakers, options.max_new_tokens, options.system).run()
    world.finish()


@dataclass
class Speaker:
    """A model with its side of the conversation."""

    name: str
    continuation: Continuation
    tokenizer: Tokenizer
    settings: dict[str, Any]
    messages: list[Message] = field(default_factory=list)


class Dialogue:
    """Reads messages and commands until the end of the input."""

    def __init__(self, console: Console, tell: Any, speakers: list[Speaker], longest: int | None, system: str | None):
        self.console, self.tell, self.speakers, self.max_new_tokens = console, tell, speakers, longest
        self.system, self.answers = system, 0
        self.saved: tuple[str, list[Any]] = "", []  # where, and what
        self.begin()

    def begin(self) -> None:
        for speaker in self.speakers:
            speaker.messages = [{"role": "system", "content": self.system}] if self.system else []

    def run(self) -> None:
        if sys.stdin.isatty():
            import readline  # noqa: F401  # lines can be edited

            self.tell("/help lists the commands; Ctrl-C stops an answer, Ctrl-D ends")
        while True:
            try:
                line = input("> ").strip()
                if line == "/exit":
                    return
                if line.startswith("/"):
                    self.command(*line.split(maxsplit=1))
                elif line:
                    self.ask(line)
            except EOFError:
                return
            except KeyboardInterrupt:
                self.tell("\n(Ctrl-D or /exit ends)")
            except TuneError as error:
                self.tell(f"error: {error}")

    def command(self, name: str, text: str = "") -> None:
        if text and name in ("/reset", "/retry", "/help"):
            raise TuneError(f"{name}: it takes no text, and {text!r} is behind it")
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
            raise TuneError(f"{name} is no command.{did_you_mean(name, COMMANDS)} /help lists them")

    def take_back(self) -> None:
        """The last message of the user, and what follows it."""
        for speaker in self.speakers:
            while speaker.messages.pop()["role"] != "user":
                pass

    def ask(self, text: str) -> None:
        """All answer, one after the other; each goes on from its own answers."""
        self.answers += 1
        for speaker in self.speakers:
            speaker.messages.append({"role": "user", "content": text})
        try:
            for speaker in self.speakers:
                if len(self.speakers) > 1:
                    self.console.print(f"[{speaker.name}]", style="bold")
                speaker.messages.append({"role": "assistant", "content": self.answer(speaker)})
        except (TuneError, KeyboardInterrupt):
            self.take_back()
            raise

    def answer(self, speaker: Speaker) -> str:
        """Print an answer as it comes, and return it, or what there is of it at Ctrl-C."""
        tokenizer, said = speaker.tokenizer, list[int]()
        prompt = tokenizer.encode(tokenizer.apply_chat_template(speaker.messages, add_generation_prompt=True))
        longest = speaker.continuation.model.max_generated or sys.maxsize
        if len(prompt) >= longest:
            raise TuneError(
                f"the conversation has {len(prompt)} tokens, and the model reads {longest}: /reset begins anew"
            )
        count = min(self.max_new_tokens or MAX_NEW_TOKENS, longest - len(prompt))
        text = tokenizer.stream(skip_special_tokens=True)
        try:
            sampler = Sampler(max_new_tokens=count, **speaker.settings)
            for token in speaker.continuation(sampler, prompt, step=self.answers):
                said.append(token)
                self.console.out(text.add(token), end="", highlight=False)
            self.console.out(text.finish(), highlight=False)
            if len(said) == count and said[-1] not in tokenizer.stop_ids:
                self.tell(f"(cut after {count:,} tokens: --max-new-tokens, or what the model has room for)")
        except KeyboardInterrupt:
            self.tell(f"{text.finish()} (stopped)")
        return tokenizer.decode(said, skip_special_tokens=True)

    def save(self, name: str) -> None:
        if not name:
            raise TuneError("/save: name a file")
        rows = [{"model": speaker.name, "messages": [*speaker.messages]} for speaker in self.speakers]
        if self.saved == (name, rows):
            self.tell(f"it is in {name} already")
            return
        try:
            with Path(name).expanduser().open("a+", encoding="utf-8") as file:
                file.seek(0)
                before = file.read()
                if before and not before.startswith("{"):
                    raise TuneError(f"/save {name}: it holds no JSON lines; name another file")
                if before and not before.endswith("\n"):
                    file.write("\n")
                file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        except OSError as error:
            raise TuneError(f"/save {name}: it cannot be written: {error.strerror}") from error
        self.saved = name, rows
        self.tell(f"saved to {name}")
