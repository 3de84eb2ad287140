import hashlib
import json
import re
import shutil
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from tune.errors import TuneError
from tune.tokenizers.chat_template import ChatTemplate, Message, Span
from tune.tokenizers.supervision import end_of_turn, supervised_spans

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)


@dataclass(frozen=True, slots=True)
class Encoding:
    """Token ids, and for each the characters `[start, end)` of the text it stands for."""

    ids: list[int]
    offsets: list[tuple[int, int]]


class Tokenizer:
    """The tokenizer and chat template of a checkpoint folder, giving the ids and texts that transformers gives.

    `bos_id`, `eos_id` and `pad_id` are None where the folder names no such token. Special tokens written out in a
    text are encoded as those tokens. Raises TuneError for a folder without a readable `tokenizer.json`.
    """

    def __init__(self, path: str) -> None:
        self.path = Path(path).expanduser()
        self._tokenizer = _read_tokenizer(self.path)
        config = _read_json(self.path / "tokenizer_config.json")
        named = {**_read_json(self.path / "special_tokens_map.json"), **config}
        self.special_tokens = {name: _token_text(named[name]) for name in SPECIAL_TOKENS if named.get(name)}
        self._generation_eos = self._configured_eos()
        if "eos_token" not in self.special_tokens and self._generation_eos:
            eos_token = self._tokenizer.id_to_token(self._generation_eos[0])
            self.special_tokens |= {"eos_token": eos_token} if eos_token else {}
        self.bos_id, self.eos_id, self.pad_id = (self._id_of(name) for name in ("bos_token", "eos_token", "pad_token"))
        self._templates = self._read_templates(config.get("chat_template"))

    def __getstate__(self) -> dict[str, Any]:
        """Without what Jinja compiled, which cannot be sent to another process."""
        return {name: value for name, value in vars(self).items() if name != "_compiled"}

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included."""
        return self._tokenizer.get_vocab_size()

    @cached_property
    def fingerprint(self) -> str:
        """A hash of all that decides its ids and the text of conversations."""
        contents = [tokenizers.__version__, self._tokenizer.to_str(), self.special_tokens, self._templates]
        return hashlib.blake2b(json.dumps(contents, sort_keys=True).encode(), digest_size=16).hexdigest()

    @cached_property
    def stop_ids(self) -> set[int]:
        """Tokens that end a generated answer: EOS, generation_config.json's, and the chat template's end-of-turn."""
        ids = set(self._generation_eos)
        if self.eos_id is not None:
            ids.add(self.eos_id)
        token = end_of_turn(self._template(None), self._special_pattern) if self.chat_template else None
        return ids | set(self.encode(token)) if token else ids

    @cached_property
    def prefix_ids(self) -> list[int]:
        """What the tokenizer puts before a plain text: the BOS token, or nothing."""
        bare, full = self.encode("a"), self.encode("a", add_special_tokens=True)
        return next(full[:at] for at in range(len(full)) if full[at : at + len(bare)] == bare)

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_with_offsets(self, texts: list[str]) -> list[Encoding]:
        """A batch of texts on all cores, without the special tokens that `prefix_ids` names."""
        batch = self._tokenizer.encode_batch(texts, add_special_tokens=False)
        return [Encoding(encoding.ids, encoding.offsets) for encoding in batch]

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    @property
    def chat_template(self) -> str | None:
        return self._templates.get("default")

    def apply_chat_template(
        self, messages: list[Message], add_generation_prompt: bool = False, tools: list | None = None, **variables: Any
    ) -> str:
        """The conversation as text. `variables` are the template's own, such as `enable_thinking=False`."""
        return self._template(tools).render(messages, add_generation_prompt, tools, **variables)

    def supervised_spans(
        self, messages: list[Message], tools: list | None = None, **variables: Any
    ) -> tuple[str, list[Span]]:
        """The conversation as text and the character spans to learn from; see `tune.tokenizers.supervised_spans`."""
        return supervised_spans(self._template(tools), messages, self._special_pattern, tools, **variables)

    def save(self, folder: str | Path) -> None:
        """Copy the tokenizer's files, byte for byte."""
        for name in FILES:
            if (self.path / name).is_file():
                shutil.copyfile(self.path / name, Path(folder) / name)

    @cached_property
    def _special_pattern(self) -> re.Pattern[str]:
        added = self._tokenizer.get_added_tokens_decoder().values()
        special = sorted((token.content for token in added if token.special), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, special)) or "(?!)")

    def require_chat_template(self) -> None:
        """Raises TuneError if there is none."""
        if self.chat_template is None:
            raise TuneError(
                f"the tokenizer in {self.path} has no chat template, and conversations need one: put the template of "
                "the model's chat version there as chat_template.jinja, or use a dataset of prompt and completion"
            )

    def _template(self, tools: list | None) -> ChatTemplate:
        self.require_chat_template()
        return self._compiled["tool_use" if tools is not None and "tool_use" in self._templates else "default"]

    @cached_property
    def _compiled(self) -> dict[str, ChatTemplate]:
        origin = f"the chat template in {self.path}"
        return {name: ChatTemplate(text, self.special_tokens, origin) for name, text in self._templates.items()}

    def _read_templates(self, configured: str | list[dict[str, str]] | None) -> dict[str, str]:
        file = self.path / "chat_template.jinja"
        if file.is_file():
            return {"default": file.read_text(encoding="utf-8")}
        if isinstance(configured, list):
            return {template["name"]: template["template"] for template in configured}
        return {"default": configured} if configured else {}

    def _configured_eos(self) -> list[int]:
        for name in ("generation_config.json", "config.json"):
            ids = _read_json(self.path / name).get("eos_token_id")
            if ids is not None:
                return ids if isinstance(ids, list) else [ids]
        return []

    def _id_of(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        if token is None:
            return None
        token_id = self._tokenizer.token_to_id(token)
        if token_id is None:
            raise TuneError(
                f"{self.path}: tokenizer_config.json names {token!r} as {name}, but tokenizer.json has no such token: "
                "take both files from the same checkpoint"
            )
        return token_id


def _read_tokenizer(path: Path) -> tokenizers.Tokenizer:
    file = path / "tokenizer.json"
    if not file.is_file():
        found = ", ".join(sorted(entry.name for entry in path.iterdir())) if path.is_dir() else ""
        raise TuneError(
            f"no tokenizer.json in {path} ({'found: ' + (found or 'nothing') if path.is_dir() else 'no such folder'}). "
            "It comes with the model's files; for a model that has only tokenizer.model, "
            "transformers' AutoTokenizer.from_pretrained(...).save_pretrained(...) writes it"
        )
    try:
        tokenizer = tokenizers.Tokenizer.from_str(file.read_text(encoding="utf-8"))
    except Exception as error:  # the library raises nothing narrower
        raise TuneError(f"{file} is not a tokenizer that the tokenizers library reads: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TuneError(f"{file} is not valid JSON: {error}") from error


def _token_text(token: str | dict[str, Any]) -> str:
    return token if isinstance(token, str) else token["content"]
