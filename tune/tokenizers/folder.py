"""What a checkpoint folder says about its vocabulary. Which file is read, and what the others add to it."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, processors

from tune.errors import TuneError
from tune.tokenizers import ranks, sentencepiece

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# Each of these holds a whole vocabulary.
SOURCES = ("tekken.json", "tokenizer.model", "*.tiktoken")


@dataclass(slots=True)
class Vocabulary:
    """A tokenizer, the file it was read from, and its special tokens by name (`bos_token`, ...)."""

    file: Path
    tokenizer: tokenizers.Tokenizer
    special_tokens: dict[str, str] = field(default_factory=dict)


def read_vocabulary(folder: Path) -> Vocabulary:
    """Reads tokenizer.json, or else tekken.json, tokenizer.model (sentencepiece's or Llama 3's) or Qwen's *.tiktoken.

    tokenizer_config.json, special_tokens_map.json and added_tokens.json add special tokens. Raises TuneError where
    there is no such file, or it cannot be read, or the files contradict each other.
    """
    config = read_json(folder / "tokenizer_config.json")
    named = {**read_json(folder / "special_tokens_map.json"), **config}
    given = {name: _text(named[name]) for name in SPECIAL_TOKENS if named.get(name)}
    special = [*given.values(), *map(_text, _listed(named))]
    vocabulary = _read(_source(folder), legacy=config.get("legacy") is not False)
    begins = "bos_token" in vocabulary.special_tokens
    vocabulary.special_tokens |= given
    _add_configured(vocabulary, _configured(folder, config, special))
    _mark_special(vocabulary, special)
    if vocabulary.file.name != "tokenizer.json":  # which says itself what it puts around a text
        _wrap(vocabulary, config.get("add_bos_token", begins), config.get("add_eos_token", False))
    return vocabulary


def read_json(file: Path) -> dict[str, Any]:
    """The file's object; empty if there is no such file."""
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TuneError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise TuneError(f"{file} is not valid: it holds a {type(content).__name__} where an object must be")
    return content


def _source(folder: Path) -> Path:
    if (folder / "tokenizer.json").is_file():
        return folder / "tokenizer.json"
    found = [file for name in SOURCES for file in sorted(folder.glob(name)) if file.is_file()]
    if len(found) > 1:
        raise TuneError(
            f"{folder} has several vocabularies, {', '.join(file.name for file in found)}, and no tokenizer.json that "
            "decides: remove those that are not the model's"
        )
    if not found:
        there = ", ".join(sorted(entry.name for entry in folder.iterdir())) or "nothing" if folder.is_dir() else None
        raise TuneError(
            f"no tokenizer in {folder} ({f'found: {there}' if there else 'no such folder'}): it must have a "
            f"tokenizer.json, {', '.join(SOURCES)}, as it comes with the model's files"
        )
    return found[0]


def _read(file: Path, legacy: bool) -> Vocabulary:
    data = file.read_bytes()
    try:
        if file.name == "tokenizer.json":
            return Vocabulary(file, _read_tokenizer_json(data))
        if file.name == "tekken.json":
            special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
            return Vocabulary(file, ranks.tekken(data), special)
        if file.suffix == ".tiktoken":
            return Vocabulary(file, ranks.qwen(file), {"eos_token": "<|endoftext|>"})
        if ranks.is_tiktoken(data):
            special = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}
            return Vocabulary(file, ranks.llama3(file), special)
        return Vocabulary(file, *sentencepiece.convert(data, legacy))
    except ValueError as error:
        raise TuneError(f"{file} is not a tokenizer that can be read: {error}") from error


def _read_tokenizer_json(data: bytes) -> tokenizers.Tokenizer:
    try:
        tokenizer = tokenizers.Tokenizer.from_str(data.decode())
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(error) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _configured(folder: Path, config: Mapping[str, Any], special: Iterable[str]) -> dict[int, AddedToken]:
    """The added tokens that the config, or else added_tokens.json, gives ids to, in their order."""
    if "added_tokens_decoder" not in config:
        listed = read_json(folder / "added_tokens.json")
        return {
            index: AddedToken(token, special=token in special, normalized=token not in special)
            for token, index in sorted(listed.items(), key=lambda entry: entry[1])
        }
    flags = ("special", "normalized", "lstrip", "rstrip", "single_word")
    try:
        entries = sorted((int(index), token) for index, token in config["added_tokens_decoder"].items())
        return {
            index: AddedToken(token["content"], **{name: token[name] for name in flags if name in token})
            for index, token in entries
        }
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise TuneError(
            f"added_tokens_decoder in {folder / 'tokenizer_config.json'} must give a token with content to each id; "
            f"it cannot be read: {type(error).__name__}: {error}"
        ) from error


def _add_configured(vocabulary: Vocabulary, tokens: dict[int, AddedToken]) -> None:
    tokenizer = vocabulary.tokenizer
    if vocabulary.file.name != "tokenizer.json":
        tokenizer = vocabulary.tokenizer = _rename(tokenizer, tokens)
    present = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    tokenizer.add_tokens([token for token in tokens.values() if token.content not in present])
    for index, token in tokens.items():
        if (actual := tokenizer.token_to_id(token.content)) != index:
            raise TuneError(
                f"{vocabulary.file.parent}: its configuration gives token {token.content!r} the id {index}, but it is "
                f"{actual} after {vocabulary.file.name}: take all files from the same checkpoint"
            )


def _mark_special(vocabulary: Vocabulary, tokens: Iterable[str]) -> None:
    """Makes special tokens of those that the vocabulary has as mere words. Raises TuneError if it lacks one we need."""
    tokenizer = vocabulary.tokenizer
    for name in ("bos_token", "eos_token", "pad_token"):
        token = vocabulary.special_tokens.get(name)
        if token and tokenizer.token_to_id(token) is None:
            raise TuneError(
                f"{vocabulary.file.parent}: its configuration names {token!r} as {name}, but {vocabulary.file.name} "
                "has no such token: take both files from the same checkpoint"
            )
    present = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    words = [token for token in tokens if token not in present and tokenizer.token_to_id(token) is not None]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in words])


def _rename(tokenizer: tokenizers.Tokenizer, tokens: dict[int, AddedToken]) -> tokenizers.Tokenizer:
    """Vocabularies have placeholders for tokens that a checkpoint names in its config (`<unused7>`, `[control_8]`)."""
    names = {tokenizer.id_to_token(index): token.content for index, token in tokens.items()}
    names = {old: new for old, new in names.items() if old and old != new and tokenizer.token_to_id(new) is None}
    if not names:
        return tokenizer
    content = json.loads(tokenizer.to_str())
    content["model"]["vocab"] = {names.get(token, token): index for token, index in content["model"]["vocab"].items()}
    for token in content["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    return tokenizers.Tokenizer.from_str(json.dumps(content))


def _wrap(vocabulary: Vocabulary, begin: bool, end: bool) -> None:
    """Texts get the BOS and EOS token around them."""
    bos, eos = (vocabulary.special_tokens.get(name) for name in ("bos_token", "eos_token"))
    around = [token for token, wanted in ((bos, begin), (eos, end)) if token and wanted]
    single = [*([bos] if bos and begin else []), "$A", *([eos] if eos and end else [])]
    ids = [(token, vocabulary.tokenizer.token_to_id(token)) for token in dict.fromkeys(around)]
    vocabulary.tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=ids)


def _listed(named: Mapping[str, Any]) -> list[Any]:
    extra = named.get("extra_special_tokens") or []
    return [*(named.get("additional_special_tokens") or []), *(extra.values() if isinstance(extra, dict) else extra)]


def _text(token: Any) -> str:
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str):
        raise TuneError(f"the tokenizer's configuration has the special token {token!r}, which is no text")
    return text
