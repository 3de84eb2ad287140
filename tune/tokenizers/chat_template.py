"""Render Jinja chat templates like transformers' `apply_chat_template`, and list the library's own templates."""

import json
import re
import secrets
from collections.abc import Mapping
from contextlib import suppress
from datetime import date, datetime, time
from decimal import Decimal
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError
from jinja2.utils import Namespace

from tune.errors import TuneError, explained
from tune.lookup import did_you_mean, local_path
from tune.tokenizers.steps import StepwiseText, length, render_in_steps, with_steps

Message = dict[str, Any]
"""A message with `role`, `content` and more, in the form of OpenAI and Hugging Face."""
Span = tuple[int, int]
"""A span of characters [start, end)."""

# These marks enclose the text of a `{% generation %}` block until they are removed. They are random in every process,
# so that no text in a dataset can contain them.
_OPEN, _CLOSE = (f"\ufdd0{secrets.token_hex(8)}{bracket}\ufdd1" for bracket in "[]")
TEXT = f"text{secrets.token_hex(8)}"  # is in no template
_MARK = re.compile(f"({re.escape(_OPEN)}|{re.escape(_CLOSE)})")

_FOLDER = Path(__file__).parent / "templates"
_MARKER = re.compile(r"<\|[^|<>\s]+\|>|<\w+_of_turn>")
# The library's templates, and the tokens that they need. They write no BOS, since the tokenizer decides whether a text
# begins with it. All but Mistral's and the plain one are the templates of the families they are named after.
SHIPPED = {file.stem: {*_MARKER.findall(file.read_text(encoding="utf-8"))} for file in sorted(_FOLDER.glob("*.jinja"))}


class ChatTemplate:
    """A compiled, sandboxed chat template. `variables` are defined in every rendering: `bos_token`, `eos_token`, ..."""

    def __init__(self, source: str, variables: dict[str, Any] | None = None, origin: str = "the chat template") -> None:
        self.source = source
        self.variables = variables or {}
        self.origin = origin
        self.marks_generation = re.search(r"\{%-?\s*generation\s*-?%\}", source) is not None
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise TuneError(f"{origin} is not a valid Jinja template: line {error.lineno}: {error.message}") from error

    def render(self, messages: list[Message], add_generation_prompt: bool = False, **variables: Any) -> str:
        """The conversation as the text that the model sees. Raises TuneError if the template rejects it."""
        return self.render_with_spans(messages, add_generation_prompt, **variables)[0]

    def render_with_spans(
        self,
        messages: list[Message],
        add_generation_prompt: bool = False,
        tools: list | None = None,
        documents: list | None = None,
        **variables: Any,
    ) -> tuple[str, list[Span]]:
        """The text, and the character spans of the template's `{% generation %}` blocks."""
        calls = any(message.get("tool_calls") and not message.get("content") for message in messages)
        hint = ' (a message has tool calls and no text: try "content": "", or a template that supports tool calls)'
        # A template is a program and can raise any error.
        with (
            explained(f"{self.origin} fails on the conversation", Exception),
            explained(f"{self.origin} refuses the conversation{hint if calls else ''}", jinja2.TemplateError),
        ):
            marked = self._template.render(
                **{**self.variables, **variables},
                messages=self._plain_messages(messages),
                add_generation_prompt=add_generation_prompt,
                tools=_plain(tools, "tools"),
                documents=_plain(documents, "documents"),
            )
        return self.without_marks(marked)

    def render_in_steps(
        self,
        messages: list[Message],
        add_generation_prompt: bool = False,
        tools: list | None = None,
        documents: list | None = None,
        **variables: Any,
    ) -> StepwiseText | None:
        """The text of all beginnings of a conversation, with the marks of `{% generation %}` blocks: for
        `without_marks`. None if the template does not write one message after another, or fails."""
        if self._in_steps is None:
            return None
        try:
            plain = self._plain_messages(messages)
            given = {"tools": _plain(tools, "tools"), "documents": _plain(documents, "documents")}
        except TuneError:  # an ordinary rendering raises it again
            return None
        context = {**self.variables, **variables, **given, "add_generation_prompt": add_generation_prompt}
        return render_in_steps(self._in_steps, plain, context)

    def _plain_messages(self, messages: list[Message]) -> list[Message]:
        plain = [_plain_message(message, f"messages[{at}]") for at, message in enumerate(messages)]
        return [_in_parts(message) for message in plain] if self._needs_parts else plain

    @cached_property
    def _needs_parts(self) -> bool:
        """Whether the template writes only parts of a content, and leaves out a content that is a text."""
        if "image" not in self.source:
            return False
        found = []
        for content in (TEXT, [{"type": "text", "text": TEXT}]):
            with suppress(Exception):  # a template is a program; this one may need another kind of conversation
                values = {"messages": [{"role": "user", "content": content}], "add_generation_prompt": False}
                found.append(TEXT in self._template.render(**self.variables, **values))
        return found == [False, True]

    @cached_property
    def _in_steps(self) -> jinja2.Template | None:
        environment = _environment()
        environment.filters["length"] = environment.filters["count"] = length
        syntax = with_steps(environment.parse(self.source))
        return environment.from_string(syntax) if syntax else None

    def without_marks(self, marked: str) -> tuple[str, list[Span]]:
        """A rendered text without the marks of `{% generation %}` blocks, and the spans of the blocks."""
        if not self.marks_generation:
            return marked, []
        text, spans, start = "", [], 0
        for piece in _MARK.split(marked):
            if piece == _OPEN:
                start = len(text)
            elif piece == _CLOSE:
                spans.append((start, len(text)))
            else:
                text += piece
        return text, spans


def chosen_template(name: str) -> str:
    """The source of a template of the library, or of a file. Raises TuneError if there is neither."""
    file = _FOLDER / f"{name}.jinja" if name in SHIPPED else local_path(name)
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TuneError(
            f"tokenizer.chat_template={name} is neither a readable file ({error}) nor one of {', '.join(SHIPPED)}."
            f"{did_you_mean(name, SHIPPED)}"
        ) from error


def markers(template: ChatTemplate) -> list[str]:
    """Strings that look like special tokens in a short conversation rendered by the template."""
    try:
        text = template.render([{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}])
    except TuneError:  # the template needs another kind of conversation
        return []
    return list(dict.fromkeys(_MARKER.findall(text)))


def _in_parts(message: Message) -> Message:
    """The message with its text as a part."""
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def _plain_message(message: Message, place: str) -> Message:
    """The message without None values, which templates print, and with reasoning under all names templates read."""
    plain = {key: _plain(value, f"{place}.{key}") for key, value in message.items() if value is not None}
    reasoning = next((plain[key] for key in ("reasoning_content", "thinking", "reasoning") if key in plain), None)
    return plain if reasoning is None else {"thinking": reasoning, **plain, "reasoning_content": reasoning}


def _plain(value: Any, place: str) -> Any:
    """Reduce a value to lists and dicts of strings, numbers and booleans, as JSON would hold it.

    Dates and times become ISO texts, and decimals numbers. Raises TuneError for other types.
    """
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {_plain(key, place): _plain(item, f"{place}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [_plain(item, f"{place}[{index}]") for index, item in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, Decimal) and value.is_finite():
        return int(value) if value == value.to_integral_value() else float(value)
    for kind in (str, int, float):  # enumerations, and the scalars of NumPy that are floats
        if isinstance(value, kind):
            return kind(value)
    raise TuneError(f"{place} is of the type {type(value).__name__}, which JSON does not have: convert it to a text")


class _Generation(Extension):
    """`{% generation %} ... {% endgeneration %}`: render the body between the marks."""

    tags = {"generation"}  # noqa: RUF012  (jinja's own interface)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Macro) -> str:
        return _OPEN + caller() + _CLOSE


_OF_DICT = frozenset(dir(dict))
# The methods of a text that the sandbox returns as they are.
_OF_TEXT = frozenset(name for name in dir(str) if not name.startswith("_")) - {"format", "format_map"}


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, with a short way for what templates read most: `message.role` and `content.strip`."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        if type(obj) is dict and attribute not in _OF_DICT:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if type(obj) is str and attribute in _OF_TEXT:
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)


def _environment() -> _Environment:
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    # Jinja's own filter escapes HTML characters and sorts keys; chat templates expect this one.
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    environment.globals["dict"] = _Dict()
    environment.globals["namespace"] = _Namespace
    return environment


class _Dict:
    """`dict` for templates, since the class itself gives access to other classes."""

    def __call__(self, *arguments: Any, **items: Any) -> dict:
        return dict(*arguments, **items)

    def fromkeys(self, *arguments: Any) -> dict:
        return dict.fromkeys(*arguments)


class _Namespace(Namespace):
    """Jinja's namespace without attributes that begin with an underscore, which give access to Python's internals."""

    def __init__(self, *arguments: Any, **attributes: Any) -> None:
        super().__init__(*arguments, **attributes)
        for name in dict(*arguments, **attributes):
            _check_name(name)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot have an attribute {name!r}: rename it")


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
