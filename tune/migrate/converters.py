"""Converters of a key that need no function of their own: `"lora_r": To("adapter.rank")`.

There are three: `To` takes their value, `Choose` one of ours for each of theirs, `Differs` none, and says why.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from tune.lookup import did_you_mean
from tune.migrate.leaves import KeyNames, matches
from tune.migrate.migration import Migration, each_name

KEEP = object()  # in a `Choose`: the recipe's own setting stays as it is


class To:
    """Their value is the value of a setting: of the first of `targets` that the recipe has.

    `[]` in a target is the index in their key. `value` makes their value ours; values in `skip` change nothing there.
    """

    def __init__(
        self, *targets: str, note: str = "", value: Callable[[Any], Any] | None = None, skip: tuple[Any, ...] = ()
    ) -> None:
        self.targets, self.note, self.value, self.skip = targets, note, value, skip

    def __call__(self, run: Migration, key: str, value: Any) -> None:
        if is_one_of(value, self.skip):
            run.same("", key)
            return
        value = value if self.value is None else self.value(value)
        run.put(key, value, *(with_index(target, key) for target in self.targets), note=self.note)


class Choose:
    """Each of their values has one of ours in `choices`, for the first of the settings `targets` that the recipe has.

    A choice is our value, or `KEEP`, or a dict of several settings (`targets` is then None); or a pair of that and a
    note of how it differs. Their values are written in any case; `*` stands for any characters, as in names.
    """

    def __init__(self, targets: KeyNames | None, choices: Mapping[Any, Any], note: str = "") -> None:
        self.targets = (targets,) if isinstance(targets, str) else targets or ()
        self.choices: dict[KeyNames, Any] = {_words(word): choice for word, choice in choices.items()}
        self.note = note

    def __call__(self, run: Migration, key: str, value: Any) -> None:
        value = value[0] if isinstance(value, list) and len(value) == 1 else value
        chosen = [choice for words, choice in self.choices.items() if matches(words, str(value).lower())]
        if not chosen:
            known = [name for name in each_name(self.choices) if re.fullmatch(r"[\w.]+", name)]
            run.missing(f"there is nothing like {value}.{did_you_mean(str(value), known)}", key)
            return
        ours, note = chosen[0] if isinstance(chosen[0], tuple) else (chosen[0], self.note)
        if isinstance(ours, dict):
            for target, part in ours.items():
                run.put(key, part, with_index(target, key), note=note, gives_way=True)
        elif ours is not KEEP:
            run.put(key, ours, *(with_index(target, key) for target in self.targets), note=note)
        elif note:
            run.differs(note, key)
        else:
            run.same("", key)


class Differs:
    """The key needs no setting; `note` says how what is here differs from their value, unless it is in `unless`."""

    def __init__(self, note: str, unless: tuple[Any, ...] = ()) -> None:
        self.note, self.unless = note, unless

    def __call__(self, run: Migration, key: str, value: Any) -> None:
        if is_one_of(value, self.unless):
            run.same("", key)
        else:
            run.differs(self.note, key)


def is_one_of(value: Any, known: tuple[Any, ...]) -> bool:
    """Whether a value is, or is written like, one of `known`: `1.0` and "1" like 1."""
    word = str(value).lower()
    return any(word in (name, f"{name}.0") for name in _words(known))


def _words(word: Any) -> tuple[str, ...]:
    return tuple(str(name).lower() for name in (word if isinstance(word, tuple) else (word,)))


def with_index(target: str, key: str) -> str:
    """`data[].path` with the index that is in `key`."""
    index = re.search(r"\[\d+\]", key)
    return target.replace("[]", index[0] if index else "")
