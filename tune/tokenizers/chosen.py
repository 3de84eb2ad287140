"""The chat template that the setting `tokenizer.chat_template` names."""

import re
from pathlib import Path

from tune.errors import TuneError
from tune.lookup import did_you_mean
from tune.tokenizers.chat_template import ChatTemplate

_FOLDER = Path(__file__).parent / "templates"
_MARKER = re.compile(r"<\|[^|<>\s]+\|>|<\w+_of_turn>")
# The templates that come with the library, and the tokens that they need. They write no BOS: the tokenizer says whether
# one stands before a text. All but Mistral's and the plain one are those of the families they are named for.
SHIPPED = {file.stem: {*_MARKER.findall(file.read_text())} for file in sorted(_FOLDER.glob("*.jinja"))}


def chosen_template(name: str) -> str:
    """The source of a template of the library, or of a file. Raises TuneError if there is no such thing."""
    file = _FOLDER / f"{name}.jinja" if name in SHIPPED else Path(name).expanduser()
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TuneError(
            f"tokenizer.chat_template={name} is neither a readable file ({error}) nor one of {', '.join(SHIPPED)}."
            f"{did_you_mean(name, SHIPPED)}"
        ) from error


def markers(template: ChatTemplate) -> list[str]:
    """What looks like special tokens in a short conversation as the template renders it."""
    try:
        text = template.render([{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}])
    except TuneError:  # a template for other conversations than this one
        return []
    return list(dict.fromkeys(_MARKER.findall(text)))
