"""Text from tokens that come one by one."""

from collections.abc import Callable


class TextStream:
    """Text from tokens as they come: `add` gives what is complete, never a part of a character; `finish` the rest."""

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._start = 0  # of the tokens given last: what decodes differently at a text's beginning needs them before it
        self._given = 0

    def add(self, token_id: int) -> str:
        self._ids.append(token_id)
        text = self._rest()
        if text.endswith("\ufffd"):  # a character of several tokens, not all of them here
            return ""
        self._start, self._given = self._given, len(self._ids)
        return text

    def finish(self) -> str:
        text = self._rest()
        self._start = self._given = len(self._ids)
        return text

    def _rest(self) -> str:
        before = self._decode(self._ids[self._start : self._given])
        return self._decode(self._ids[self._start :])[len(before) :]
