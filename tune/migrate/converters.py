"""Converters for keys that need no function of their own: `"lora_r": To("adapter.rank")`.

`To` copies the peer's value, `Choose` maps each value to one of ours, and `Differs` only notes a difference.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from tune.lookup import did_you_mean
from tune.migrate.leaves import KeyNames, matches
from tune.migrate.migration import Migration, each_name

KEEP = object()  # in a `Choose`: the recipe's own setting stays as it is


class To:
    """Copy the peer's value to the first of `targets` that the recipe has.

    `[]` in a target takes the index from the peer's key. `value` converts the value. Values in `skip` mean "unset".
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
    """Map the peer's value through `choices` and set the first of `targets` that the recipe has.

    A choice is our value, `KEEP`, or a dict of several settings (`targets` is then None). A pair adds a note on how
    our value differs. The peer's values match in any case; `*` matches any characters, as in names.
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
            run.missing(f"tune has no counterpart to {value}.{did_you_mean(str(value), known)}", key)
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
    """The key needs no setting; `note` says how tune differs, unless the value is one of `unless`."""

    def __init__(self, note: str, unless: tuple[Any, ...] = ()) -> None:
        self.note, self.unless = note, unless

    def __call__(self, run: Migration, key: str, value: Any) -> None:
        if is_one_of(value, self.unless):
            run.same("", key)
        else:
            run.differs(self.note, key)


def is_one_of(value: Any, known: tuple[Any, ...]) -> bool:
    """Whether a value equals one of `known` or is another spelling of it: `1.0` and "1" match 1."""
    word = str(value).lower()
    return any(word in (name, f"{name}.0") for name in _words(known))


def _words(word: Any) -> tuple[str, ...]:
    return tuple(str(name).lower() for name in (word if isinstance(word, tuple) else (word,)))


def with_index(target: str, key: str) -> str:
    """Fill in the index of `key`: `data[].path` becomes `data[0].path`."""
    index = re.search(r"\[\d+\]", key)
    return target.replace("[]", index[0] if index else "")
