"""Read the vocabulary of a checkpoint folder, and the special tokens that its other files add."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, processors
from tokenizers.models import WordLevel

from tune import rehearsal
from tune.errors import TuneError, explained
from tune.lookup import absent
from tune.tokenizers import ranks, sentencepiece

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# Each of these files contains a whole vocabulary.
SOURCES = ("tekken.json", "tokenizer.model", "*.tiktoken")

SpecialTokens = dict[str, str]
"""Special tokens by name: `bos_token`, ..."""


def read_vocabulary(folder: Path) -> tuple[Path, tokenizers.Tokenizer, SpecialTokens]:
    """The file that was read, the tokenizer, and its special tokens.

    Reads tokenizer.json, else tekken.json, tokenizer.model (sentencepiece or Llama 3) or Qwen's *.tiktoken.
    tokenizer_config.json, special_tokens_map.json and added_tokens.json add special tokens. Raises TuneError if there
    is no such file, if it cannot be read, or if the files contradict each other.
    """
    config = mapping_in(folder / "tokenizer_config.json")
    named = {**mapping_in(folder / "special_tokens_map.json"), **config}
    given = {name: _text(named[name]) for name in SPECIAL_TOKENS if named.get(name)}
    extra = named.get("extra_special_tokens") or []  # special tokens without a name in `SPECIAL_TOKENS`
    others = [*(named.get("additional_special_tokens") or []), *(extra.values() if isinstance(extra, dict) else extra)]
    special = [*given.values(), *map(_text, others)]
    if rehearsal.planning() and not _sources(folder):
        return _stand_in(folder)
    file = _source(folder)
    tokenizer, own = _read(file, legacy=config.get("legacy") is not False)
    names = own | given
    configured = _configured(folder, config, special)
    if file.name != "tokenizer.json":
        tokenizer = _rename(tokenizer, configured)
    _add(tokenizer, file, configured, special, names)
    if file.name != "tokenizer.json":  # it defines BOS and EOS itself
        begin = names.get("bos_token") if config.get("add_bos_token", "bos_token" in own) else None
        end = names.get("eos_token") if config.get("add_eos_token") else None
        around = [(token, tokenizer.token_to_id(token)) for token in dict.fromkeys((begin, end)) if token]
        single = [token for token in (begin, "$A", end) if token]
        tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=around)
    return file, tokenizer, names


def mapping_in(file: Path) -> dict[str, Any]:
    """The content of a JSON file; empty if there is no such file. Raises TuneError if it is not a mapping."""
    if not file.is_file():
        return {}
    with explained(f"{file} is not valid JSON", ValueError):
        content = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise TuneError(f"{file} must contain a mapping; found {type(content).__name__}")
    return content


def _stand_in(folder: Path) -> tuple[Path, tokenizers.Tokenizer, SpecialTokens]:
    """A vocabulary for `tune plan`, with the size in the model's config.json."""
    fields = mapping_in(folder / "config.json")
    size = fields.get("vocab_size") or fields.get("text_config", {}).get("vocab_size", 1)
    vocabulary = {f"<{number}>": number for number in range(size)}
    return folder, tokenizers.Tokenizer(WordLevel(vocabulary, unk_token="<0>")), {"eos_token": "<0>"}


def _sources(folder: Path) -> list[Path]:
    if (folder / "tokenizer.json").is_file():
        return [folder / "tokenizer.json"]
    return [file for name in SOURCES for file in sorted(folder.glob(name)) if file.is_file()]


def _source(folder: Path) -> Path:
    found = _sources(folder)
    if len(found) > 1:
        raise TuneError(
            f"{folder} has several vocabularies ({', '.join(file.name for file in found)}) and no tokenizer.json. "
            "Remove the files that do not belong to the model"
        )
    if not found:
        there = ", ".join(sorted(entry.name for entry in folder.iterdir())) or "nothing" if folder.is_dir() else None
        raise TuneError(
            f"no tokenizer in {folder} ({f'found: {there}' if there else absent(folder)}). It must have one of "
            f"tokenizer.json, {', '.join(SOURCES)} from the model's files"
        )
    return found[0]


def _read(file: Path, legacy: bool) -> tuple[tokenizers.Tokenizer, SpecialTokens]:
    """The tokenizer in a file, with the special tokens that the file itself defines."""
    data = file.read_bytes()
    unreadable = f"{file} is not a readable tokenizer"
    if file.name == "tokenizer.json":
        with explained(unreadable, Exception):  # the library raises nothing narrower
            tokenizer = tokenizers.Tokenizer.from_str(data.decode())
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer, {}
    with explained(unreadable, ValueError):
        if file.name == "tekken.json":
            names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
            return ranks.tekken(data), names
        if file.suffix == ".tiktoken":
            return ranks.qwen(file), {"eos_token": "<|endoftext|>"}
        if ranks.is_tiktoken(data):
            return ranks.llama3(file), {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}
        return sentencepiece.convert(data, legacy)


def _configured(folder: Path, config: Mapping[str, Any], special: list[str]) -> dict[int, AddedToken]:
    """The added tokens in the config, else in added_tokens.json, in the order of their ids."""
    if "added_tokens_decoder" not in config:
        listed = sorted((index, token) for token, index in mapping_in(folder / "added_tokens.json").items())
        return {
            index: AddedToken(token, special=token in special, normalized=token not in special)
            for index, token in listed
        }
    flags = ("special", "normalized", "lstrip", "rstrip", "single_word")
    place = f"added_tokens_decoder in {folder / 'tokenizer_config.json'}"
    with explained(f"{place} cannot be read; it must map each id to a token with content", Exception):
        entries = sorted((int(index), token) for index, token in config["added_tokens_decoder"].items())
        return {
            index: AddedToken(token["content"], **{name: token[name] for name in flags if name in token})
            for index, token in entries
        }


def _add(
    tokenizer: tokenizers.Tokenizer, file: Path, configured: dict[int, AddedToken], special: list[str],
    names: SpecialTokens,
) -> None:  # fmt: skip
    """Add the configured tokens, and make ordinary tokens that are listed in `special` special.

    Raises TuneError if a token does not have the configured id, or if BOS, EOS or the pad token is missing.
    """
    present = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    tokenizer.add_tokens([token for token in configured.values() if token.content not in present])
    present |= {token.content for token in configured.values()}
    words = [token for token in special if token not in present and tokenizer.token_to_id(token) is not None]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in words])
    for index, token in configured.items():
        if (actual := tokenizer.token_to_id(token.content)) != index:
            raise TuneError(
                f"{file.parent}: the configuration gives token {token.content!r} id {index}, but with {file.name} it "
                f"has id {actual}. Take all files from the same checkpoint"
            )
    for name in ("bos_token", "eos_token", "pad_token"):
        if name in names and tokenizer.token_to_id(names[name]) is None:
            raise TuneError(
                f"{file.parent}: the configuration has {name} {names[name]!r}, but {file.name} has no such token. Take "
                "both files from the same checkpoint"
            )


def _rename(tokenizer: tokenizers.Tokenizer, tokens: dict[int, AddedToken]) -> tokenizers.Tokenizer:
    """Rename placeholders of the vocabulary (`<unused7>`, `[control_8]`) to the tokens that the config defines."""
    names = {tokenizer.id_to_token(index): token.content for index, token in tokens.items()}
    names = {old: new for old, new in names.items() if old and old != new and tokenizer.token_to_id(new) is None}
    if not names:
        return tokenizer
    content = json.loads(tokenizer.to_str())
    content["model"]["vocab"] = {names.get(token, token): index for token, index in content["model"]["vocab"].items()}
    for token in content["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    return tokenizers.Tokenizer.from_str(json.dumps(content))


def _text(token: Any) -> str:
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str):
        raise TuneError(f"the tokenizer's configuration has the special token {token!r}, which is not a string")
    return text
