"""Tokenize a text that begins like another one, without tokenizing the common beginning again.

Special tokens are found in a text before anything else is done with it. The text between two of them is tokenized on
its own. So a text can be cut before a special token, and the tokens of the two parts are the tokens of the text.
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from typing import NamedTuple, cast

import numpy as np
import tokenizers


class _Part(NamedTuple):
    encoding: tokenizers.Encoding
    first_token: int
    first_character: int


class Encoded:
    """The tokens of a text, with the characters of each. The text was tokenized in one or more parts."""

    def __init__(
        self, encoding: tokenizers.Encoding, before: "Encoded | None" = None, tokens: int = 0, cut: int = 0
    ) -> None:
        """The first `tokens` tokens `before`, and those of `encoding`, whose text begins at the character `cut`."""
        self.ids: np.ndarray = np.array(encoding.ids, dtype=np.int32)
        self._parts = [_Part(encoding, tokens, cut)]
        # Labels need the characters of only a few tokens; all `offsets` take as long as rendering the text.
        self.token_to_chars = cast(Callable[[int], tuple[int, int]], encoding.token_to_chars)
        if before is not None:
            self.ids = np.concatenate([before.ids[:tokens], self.ids])
            self._parts = [part for part in before._parts if part.first_token < tokens] + self._parts
            self.token_to_chars = self._token_to_chars

    def __len__(self) -> int:
        return len(self.ids)

    def _token_to_chars(self, token: int) -> tuple[int, int]:
        part = self._parts[bisect_right(self._parts, token, key=lambda part: part.first_token) - 1]
        start, end = cast(tuple[int, int], part.encoding.token_to_chars(token - part.first_token))
        return start + part.first_character, end + part.first_character

    def char_to_token(self, character: int) -> int | None:
        """The token of a character; None if there is none."""
        part = next(part for part in reversed(self._parts) if part.first_character <= character)
        token = part.encoding.char_to_token(character - part.first_character)
        return None if token is None else token + part.first_token


class Borders:
    """The special tokens of a tokenizer before which a text can be cut."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        added = tokenizer.get_added_tokens_decoder()
        # Other tokens depend on the text before them, or are found only after it has been normalized.
        self._contents = {
            index: token.content
            for index, token in added.items()
            if not (token.normalized or token.lstrip or token.single_word)
        }
        longest_first = sorted(self._contents.values(), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        # A special token that begins before the cut must not extend into the part that differs.
        self._margin = max((len(token.content) for token in added.values()), default=0) + 1

    def cut(self, text: str, before: str) -> int:
        """The last place in the common beginning of two texts where both can be cut; 0 if there is none."""
        common = _common_length(text, before)
        last, window = common - self._margin, 1000
        while last > 0:
            start = max(0, last - window)
            places = [match.start() for match in self._pattern.finditer(text, start, common)]
            places = places[: bisect_right(places, last)]
            if places or start == 0:
                return places[-1] if places else 0
            window *= 8
        return 0

    def joined(self, before: Encoded, text: str, cut: int, rest: tokenizers.Encoding) -> Encoded | None:
        """The tokens of `text`: those `before` up to a cut, and those of the rest. None if no special token is at the
        cut."""
        token = before.char_to_token(cut)
        if token is None or before.token_to_chars(token)[0] != cut:
            return None
        content = self._contents.get(int(before.ids[token]))
        if content is None or not text.startswith(content, cut):
            return None
        return Encoded(rest, before, token, cut)


def _common_length(first: str, second: str) -> int:
    """The length of the common beginning of two texts."""
    if second.startswith(first):
        return len(first)
    lengths = range(min(len(first), len(second)) + 1)
    return bisect_left(lengths, True, key=lambda length: first[:length] != second[:length]) - 1
