"""Remove keys, tokens and credentials from settings and text.

The value decides first: its form (`hf_...`, a URL with a password), or that it is long and random. The name of the
setting decides about all others: `bot_token: sesame7x9` is a secret, `eos_token: <|im_end|>` is not.
"""

import functools
import itertools
import os
import re
from collections.abc import Callable
from typing import Any

REMOVED = "[secret removed]"  # stands in a saved file for what was removed
MASK = "***"

# Tokens with the form that their service gives them.
_FORMS = re.compile(
    r"(?<![\w-])(?:(?:hf|gh[pousr])_[A-Za-z0-9]{30,}|github_pat_\w{20,}|glpat-[\w-]{16,}|sk-[\w-]{20,}"
    r"|xox[abeoprs]-[\w-]{10,}|xapp-[\w-]{10,}|(?:AKIA|ASIA)[A-Z0-9]{16}(?!\w)|AIza[\w-]{30,}|npm_[A-Za-z0-9]{30,}"
    r"|pypi-[\w-]{30,}|dapi[0-9a-f]{30,}|nvapi-[\w-]{20,}|rpa_[A-Za-z0-9]{30,}|(?:[rsp]k)_(?:live|test)_\w{16,}"
    r"|eyJ[\w-]{8,}\.[\w-]{8,}(?:\.[\w-]*)?|\d{8,10}:[\w-]{35})"
    r"|(?<=Bearer )(?!\*\*\*|\[secret)\S+|(?<=Authorization: Basic )(?!\*\*\*|\[secret)\S+"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|$)"
)
_USER = re.compile(r"(?<=://)[^/\s?#'\"]+@")  # user:password@ in a URL
# The address of a webhook is its password.
_WEBHOOK = re.compile(
    r"(?<=://)((?:hooks\.slack\.com|(?:\w+\.)?discord(?:app)?\.com/api/webhooks|[\w.]+\.webhook\.office\.com"
    r"|api\.telegram\.org/bot|chat\.googleapis\.com/v1/spaces|hooks\.zapier\.com)[/\d]*)(?!\*\*\*|\[secret)[^/\d\s'\",;)\]}][^\s'\",;)\]}]*"
)
_ASSIGNED = re.compile(
    r"(?<![\w.-])(?P<name>[\w.-]+)(?P<is>=|['\"]?:(?!//) ?)(?P<quote>['\"]?)(?P<value>[^\s&?#'\",;()\[\]{}]+)"
)

# Words that end the name of a secret, alone or after others (`api_key`, `slackToken`).
_ALWAYS = re.compile(
    r"pass(?:word|wd|phrase|code)s?|secrets?|credentials?"
    r"|(?:api|hf|hub|huggingface|auth|oauth|access|secret|private|personal|security|session|refresh|bearer|account"
    r"|service|admin|deploy|encryption|signing|bot|webhook|github|gitlab|slack|discord|telegram|openai|anthropic"
    r"|gemini|mistral|groq|cohere|replicate|azure|aws|gcp|wandb|mlflow|neptune|comet|trackio)_?(?:tokens?|keys?)"
)
_SOMETIMES = re.compile(r"tokens?|keys?|auth(?:orization)?|webhooks?|sig|signature|pwd|pat|bearer|cookies?")
_FOLLOWS = re.compile(r"_(?:url|uri|value|header|string|text|plain|base64|b64)$")  # `webhook_url` is a webhook


def is_secret(name: str, value: Any) -> bool:
    """Return whether the whole `value` of a setting is a secret."""
    name = _FOLLOWS.sub("", _snake(name.rpartition(".")[2]))
    if value is None or isinstance(value, bool) or value in ("", REMOVED):
        return False
    if _ends_with(_ALWAYS, name):
        return not (isinstance(value, str) and (_is_marked(value) or _is_path(value)))
    if not isinstance(value, str):
        return False
    if _FORMS.fullmatch(value) or _is_random(value):
        return True
    if _ends_with(re.compile("auth|authorization"), name) and ":" in value:  # user:password
        return True
    return _ends_with(_SOMETIMES, name) and not _is_plain(value)


def without_secrets(value: Any, mark: str = MASK) -> Any:
    """Return a copy of settings or text, or of lists and dicts of these, that may be shown and stored.

    `mark` replaces secrets: values recognized by `is_secret`, the same in text (`token=...`), and values of environment
    variables that are secrets. In text, user and password of URLs are removed; another mark than `MASK` stays there.
    """
    of_environment = _of_environment(tuple(os.environ.items()))

    def masked(value: Any, name: str = "") -> Any:
        if isinstance(value, dict) and not (name and value and _ends_with(_ALWAYS, _snake(name))):
            return {key: masked(each, str(key)) for key, each in value.items()}
        if isinstance(value, list):
            return [masked(each, name) for each in value]
        if is_secret(name, value):
            return mark
        return _in_text(value, mark, of_environment) if isinstance(value, str) else value

    return masked(value)


@functools.lru_cache(maxsize=1)
def _of_environment(variables: tuple[tuple[str, str], ...]) -> list[str]:
    """Return the values of environment variables that are secrets."""
    return [value for name, value in variables if len(value) >= 8 and is_secret(name, value)]


def _in_text(text: str, mark: str, secrets: list[str]) -> str:
    text = _USER.sub("" if mark == MASK else f"{mark}@", text)
    for secret in secrets:
        text = text.replace(secret, mark)
    text = _WEBHOOK.sub(lambda match: match[1] + mark, text)
    text = _FORMS.sub(mark, text)
    return _ASSIGNED.sub(_assigned(text, mark), text)


def _assigned(text: str, mark: str) -> Callable[[re.Match[str]], str]:
    """Return the replacement of an assignment in `text`, `name=value` or `name: value`."""

    def replaced(match: re.Match[str]) -> str:
        name, value = match["name"], match["value"]
        if value.startswith(MASK):
            return match[0]
        before = text[max(0, match.start() - 4) : match.start()].rstrip("'\" ")[-1:]
        last = _snake(name.rpartition(".")[2])
        is_secret_there = is_secret(name, value)
        if match["is"] == "=" and before in ("?", "&"):  # in the query of a URL
            is_secret_there |= _ends_with(_ALWAYS, last) or _ends_with(_SOMETIMES, last)
        elif match["is"] != "=" and before not in ("{", ","):  # a colon in prose: "the password: must be set"
            is_secret_there &= not _is_plain(value)
        return f"{name}{match['is']}{match['quote']}{mark}" if is_secret_there else match[0]

    return replaced


def _snake(name: str) -> str:
    """Return `slackToken`, `slack-token` and `SLACK_TOKEN` as slack_token."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|[-\s]", "_", name).lower()


def _ends_with(words: re.Pattern[str], name: str) -> bool:
    return re.search(rf"(?:^|_)(?:{words.pattern})$", name) is not None


def _is_marked(value: str) -> bool:
    """Whether the value is a special token or a tag, such as `<|im_end|>`, `</think>` or `[MASK]`."""
    return re.fullmatch(r"<[^<>]*>|\[[\w ]*\]|\{\{?.*\}?\}", value) is not None


def _is_plain(value: str) -> bool:
    """Whether a value is no secret although its name may be that of one: words, a number, a special token, a path."""
    if len(value) < 8 or _is_marked(value) or re.fullmatch(r"[\d._,eE+-]+", value):
        return True
    if not re.fullmatch(r"[\w+/=.:~@!?$%^&*-]+", value, re.ASCII):
        return True
    return _is_path(value) or ("://" not in value and _is_worded(value))


def _is_worded(text: str) -> bool:
    """Whether a text has only words and short numbers, such as `answer_v2`."""
    word = re.compile(r"[A-Z]?[a-z]{1,14}\d{0,2}|[A-Z]{1,14}\d{0,2}|\d{1,4}|")
    return all(word.fullmatch(each) for each in re.split(r"[/_.:~-]+", text))


def _is_path(value: str) -> bool:
    return value.startswith(("/", "~/", "./", "../")) and _is_worded(value)


def _is_random(value: str) -> bool:
    """Whether a text is at least 24 random letters and digits. Hexadecimal digests, of files or commits, are not."""
    if not re.fullmatch(r"[A-Za-z0-9_-]{24,}={0,2}", value) or re.fullmatch(r"[0-9a-f-]+", value):
        return False
    # Between words, lower case follows upper case, and digits stand together.
    kinds = [(each.isdigit(), each.islower()) for each in re.sub(r"[_=-]", "", value)]
    changes = sum(one != other for one, other in itertools.pairwise(kinds))
    longest = max(map(len, re.split(r"[_=-]", value)))
    return len({*kinds}) == 3 and longest >= 16 and changes >= 0.45 * len(kinds)
