"""Remove keys, tokens and credentials from settings and text."""

import os
import re
from typing import Any

_NAME = (
    r"(?:[\w-]*[_-])?(?:api[_-]?key|(?:access|secret|private)[_-]?key|password|passwd|secret|credentials?|signature"
    r"|(?:hf|hub|auth|access|api|wandb|security|session|refresh)[_-]?token)|token|sig"
)
SECRET_NAME = re.compile(_NAME, re.IGNORECASE)
PATTERNS = (
    (re.compile(r"(?<=://)[^/\s?#'\"]+@"), ""),  # user:password@ in a URL
    (re.compile(rf"(?<![\w-])({_NAME})=[^\s&#'\",;)\]}}]+", re.IGNORECASE), r"\1=***"),  # also in a URL's query
    (re.compile(r"(?<![\w-])(?:(?:hf|gh[pousr])_[A-Za-z0-9]{30,}|sk-[\w-]{20,})|(?<=Bearer )\S+"), "***"),
)


def without_secrets(value: Any) -> Any:
    """Return a copy of settings or text, or of lists and dicts of these, that may be shown and stored.

    Values of keys named like a secret (`api_key`, `hf_token`, ...) become None. In text, user and password of URLs are
    removed. *** replaces secrets recognized by name (`token=...`), by form (`hf_...`), or as the value of an
    environment variable with such a name.
    """
    if isinstance(value, dict):
        return {key: None if SECRET_NAME.fullmatch(str(key)) else without_secrets(each) for key, each in value.items()}
    if isinstance(value, list):
        return [without_secrets(each) for each in value]
    if not isinstance(value, str):
        return value
    for pattern, instead in PATTERNS:
        value = pattern.sub(instead, value)
    for name, secret in os.environ.items() if len(value) >= 8 else ():
        if len(secret) >= 8 and secret in value and SECRET_NAME.fullmatch(name):
            value = value.replace(secret, "***")
    return value
