"""Render a conversation step by step: the text of all its beginnings from one rendering.

Most templates write one message after another, in one loop over the messages. While such a template renders a whole
conversation, it cannot know that there is a message `k` until its loop asks for it. All that it has written by then, it
also writes for `messages[:k]`, where the loop ends at this point. The text after the loop is the same for every
beginning if it depends on nothing that the messages can change.

`with_steps` checks the last condition in the template's syntax. `render_in_steps` observes the first: the template gets
the messages as a sequence that notes how much was written when a message was first asked for.
"""

import operator
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes

# Ends each pass of a template's loop over the messages. It is random, so that no text in a dataset can contain it.
_STEP = f"\ufdd4{secrets.token_hex(8)}\ufdd5"


@dataclass(frozen=True)
class StepwiseText:
    """A rendered conversation. `text[: ends[k]]` and the text after the loop are the rendering of `messages[:k]`.

    `ends[k]` is None if the template does not show it.
    """

    text: str
    ends: list[int | None]

    def beginning(self, end: int) -> str | None:
        """The rendering of the first `end` messages, or None if it is not known."""
        number = len(self.ends) - 1
        if end == number:
            return self.text
        written, loop_end = self.ends[end], self.ends[-1]
        if written is None or loop_end is None:
            return None
        return self.text[:written] + self.text[loop_end:]


def with_steps(syntax: nodes.Template) -> nodes.Template | None:
    """The template with a mark after each pass of its last loop. None if there is no such loop, or if the text after
    the loop may depend on the messages."""
    loops = [at for at, node in enumerate(syntax.body) if isinstance(node, nodes.For)]
    if not loops:
        return None
    loop, after = syntax.body[loops[-1]], syntax.body[loops[-1] + 1 :]
    assert isinstance(loop, nodes.For)
    compares_identity = any(test.name == "sameas" for test in syntax.find_all(nodes.Test))
    if loop.test is not None or loop.recursive or compares_identity:
        return None

    # A name that the template sets may hold something of the messages. Other names are the variables of the rendering.
    names = list(syntax.find_all(nodes.Name))
    changing = {name.name for name in names if name.ctx != "load"}
    changing |= {macro.name for macro in syntax.find_all(nodes.Macro)}
    changing |= {"messages", "self"}
    read = {name.name for node in after for name in [node, *node.find_all(nodes.Name)] if isinstance(name, nodes.Name)}
    if changing & read:
        return None

    loop.body.append(nodes.Output([nodes.TemplateData(_STEP)]))
    return syntax


def render_in_steps(template: jinja2.Template, messages: list[dict], variables: dict[str, Any]) -> StepwiseText | None:
    """Render a template made by `with_steps`. None if it asks more of the messages than for one after another, or
    fails."""
    progress = _Progress(len(messages))
    context = template.new_context({**variables, "messages": _Messages(messages, 0, progress)})
    pieces, written = [], 0
    try:
        for piece in template.root_render_func(context):
            if piece == _STEP:
                progress.passes += 1
                progress.after_pass = written
            else:
                pieces.append(piece)
                written += len(piece)
                progress.after_pass = None
    except Exception:  # an ordinary rendering raises it again, if it is the template's own
        return None
    if not progress.is_known:
        return None
    # A loop that was left early never asked for the messages after it.
    unasked: list[int | None] = [None] * (len(messages) + 1 - len(progress.ends))
    return StepwiseText("".join(pieces), progress.ends + unasked)


def length(value: Any) -> Any:
    """The filter `length` for templates made by `with_steps`."""
    return _Number(value) if isinstance(value, _Messages) else len(value)


class _Progress:
    """Notes how much a template had written when it first asked for a message."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.ends: list[int | None] = []
        self.passes = 0
        self.after_pass: int | None = None  # characters written, if a pass of the loop has just ended
        self.is_known = True

    def ask(self, index: int, taken: int | None = None) -> bool:
        """Whether there is a message `index`. An iterator that has given `taken` messages asks for the next.

        It is the loop that asks if a pass has just ended, and as many have ended as the iterator has given messages.
        """
        while len(self.ends) <= min(index, self.number):
            is_loop = taken == self.passes and len(self.ends) == index
            self.ends.append(self.after_pass if is_loop else None)
        return index < self.number


class _Unknown(Exception):
    """The template uses the messages in a way that cannot be observed."""


class _Messages:
    """A list of messages, from `start`, that reports what is asked of it.

    It has the operations of a list that templates use on the way through the messages. All others end the rendering.
    """

    def __init__(self, messages: list[dict], start: int, progress: _Progress) -> None:
        self._messages, self._start, self._progress = messages, start, progress

    def __iter__(self) -> Iterator[dict]:
        for taken in count():
            index = self._start + taken
            if not self._progress.ask(index, taken):
                return
            yield self._messages[index]

    def __bool__(self) -> bool:
        return self._progress.ask(self._start)

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, slice):
            start = operator.index(key.start or 0)
            if start < 0 or key.stop is not None or key.step not in (None, 1):
                self._give_up()
            return _Messages(self._messages, self._start + start, self._progress)
        index = operator.index(key)
        if index < 0:
            self._give_up()
        if not self._progress.ask(self._start + index):
            raise IndexError("list index out of range")
        return self._messages[self._start + index]

    def _give_up(self, *_: Any) -> NoReturn:
        # Jinja takes some errors for an answer.
        self._progress.is_known = False
        raise _Unknown

    __len__ = __eq__ = __repr__ = __getattr__ = _give_up


class _Number:
    """The number of messages, for templates that compare it with 0. All other uses end the rendering."""

    def __init__(self, messages: _Messages) -> None:
        self._messages = messages

    def __eq__(self, other: Any) -> bool:
        if type(other) is not int or other != 0:
            self._messages._give_up()
        return not self._messages

    def _give_up(self, *_: Any) -> NoReturn:
        self._messages._give_up()

    __lt__ = __le__ = __gt__ = __ge__ = __repr__ = __hash__ = __getattr__ = _give_up
    __bool__ = __int__ = __float__ = __index__ = _give_up
    __class__ = property(_give_up)
