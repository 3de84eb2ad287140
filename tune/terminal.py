"""Show text of others in a terminal. Text of a model, a row or a file may have sequences that control it."""

import re
from typing import Any

# Without tab and newline. A stray carriage return should be visible.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def visible(text: object) -> str:
    """Return `text` with its control characters escaped, such as `\\x1b`."""
    return _CONTROL.sub(lambda control: repr(control[0])[1:-1], str(text))


def all_visible(value: Any) -> Any:
    """Return a copy of JSON or YAML values in which all texts, also of keys, are `visible`."""
    if isinstance(value, dict):
        return {all_visible(key): all_visible(each) for key, each in value.items()}
    if isinstance(value, list):
        return [all_visible(each) for each in value]
    return visible(value) if isinstance(value, str) else value
