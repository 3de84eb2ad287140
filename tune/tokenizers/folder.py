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
FLAGS = ("special", "normalized", "lstrip", "rstrip", "single_word")
# Each of these files contains a whole vocabulary.
SOURCES = ("tekken.json", "tokenizer.model", "*.tiktoken")

SpecialTokens = dict[str, str]
"""Special tokens by name: `bos_token`, ..."""


def read_vocabulary(folder: Path) -> tuple[Path, tokenizers.Tokenizer, SpecialTokens]:
    """The file that was read, the tokenizer, and its special tokens.

    Reads tokenizer.json, else tekken.json, tokenizer.model (sentencepiece or Llama 3) or Qwen's *.tiktoken.
    tokenizer_config.json, special_tokens_map.json and added_tokens.json add tokens and their flags. Raises TuneError if
    there is no such file, if it cannot be read, or if the files contradict each other.
    """
    config = mapping_in(folder / "tokenizer_config.json")
    if config.get("split_special_tokens"):
        raise TuneError(
            f"{folder / 'tokenizer_config.json'}: with split_special_tokens, the special tokens of a chat template are "
            "plain text, which no model can learn. Remove split_special_tokens"
        )
    if rehearsal.planning() and not _sources(folder):
        return _stand_in(folder)
    file = _source(folder)
    tokenizer, own = _read(file, legacy=config.get("legacy") is not False)
    named, unnamed, texts = _special_tokens(folder, config)
    names = own | {name: _content(token) for name, token in named.items() if name in SPECIAL_TOKENS}
    configured = _configured(folder, config, texts)
    if file.name != "tokenizer.json":
        tokenizer = _rename(tokenizer, configured)
    listed = configured
    if "added_tokens_decoder" not in config:
        listed = configured | tokenizer.get_added_tokens_decoder()
    _require_named(tokenizer, file, configured, names)
    _add(tokenizer, listed, named, unnamed)
    _require_ids(tokenizer, file, configured)
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


def _special_tokens(folder: Path, config: Mapping[str, Any]) -> tuple[dict[str, Any], list[Any], set[str]]:
    """The special tokens by name, those without a name, and the texts that are special in added_tokens.json.

    As in transformers, special_tokens_map.json overrides the config, but is not read next to `added_tokens_decoder`.
    Any setting whose name ends with `_token` (`image_token`) names a special token.
    """
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    by_name = {name: token for name, token in config.items() if _names_token(name, token)}
    by_name = {name: token for name, token in by_name.items() if name not in SPECIAL_TOKENS}
    if isinstance(extra, dict):
        by_name, extra = by_name | extra, []
    by_name = by_name or config.get("model_specific_special_tokens") or {}
    named = {name: config.get(name) for name in SPECIAL_TOKENS} | by_name

    last: list[Any] = []
    if "added_tokens_decoder" not in config:
        # A token that special_tokens_map.json describes with its flags is special.
        override = {name: _as_special(token) for name, token in mapping_in(folder / "special_tokens_map.json").items()}
        named |= {name: token for name, token in override.items() if name in named or _names_token(name, token)}
        more = override.get("extra_special_tokens") or []
        if isinstance(more, dict):
            named |= more
        else:
            extra = [*extra, *map(_as_special, more)]
        if not {"extra_special_tokens", "additional_special_tokens"} & config.keys() and not more:
            last = override.get("additional_special_tokens") or []

    standard = [named[name] for name in SPECIAL_TOKENS]
    texts = {_content(token) for token in [*standard, *extra] if isinstance(token, str | AddedToken)}
    return {name: token for name, token in named.items() if token}, [*extra, *last], texts


def _names_token(setting: str, value: Any) -> bool:
    described = isinstance(value, AddedToken) or (isinstance(value, dict) and "content" in value)
    return setting.endswith("_token") and (isinstance(value, str) or described)


def _as_special(token: Any) -> Any:
    return _added(token | {"special": True}) if isinstance(token, dict) and "content" in token else token


def _configured(folder: Path, config: Mapping[str, Any], special: set[str]) -> dict[int, AddedToken]:
    """The added tokens in the config, else in added_tokens.json, in the order of their ids."""
    if "added_tokens_decoder" not in config:
        ids = mapping_in(folder / "added_tokens.json")
        if not all(isinstance(index, int) for index in ids.values()):
            raise TuneError(f"{folder / 'added_tokens.json'} must map each token to its id, a whole number")
        listed = sorted((index, token) for token, index in ids.items())
        return {
            index: AddedToken(token, special=token in special, normalized=token not in special)
            for index, token in listed
        }
    place = f"added_tokens_decoder in {folder / 'tokenizer_config.json'}"
    with explained(f"{place} cannot be read; it must map each id to a token with content", Exception):
        entries = sorted((int(index), token) for index, token in config["added_tokens_decoder"].items())
        return {index: _added({"content": token["content"]} | token) for index, token in entries}


def _add(
    tokenizer: tokenizers.Tokenizer, listed: Mapping[int, AddedToken], named: Mapping[str, Any], unnamed: list[Any]
) -> None:
    """Add the listed tokens, then special tokens that no file adds, in transformers' order, which determines new ids.

    The flags of a listed token replace those that the tokenizer has for it. A token that has a name is special.
    """
    tokens = [listed[index] for index in sorted(listed)]
    present = {token.content for token in [*tokenizer.get_added_tokens_decoder().values(), *tokens]}
    # A token with two descriptions is added twice; the flags of the last one hold.
    others: list[Any] = []
    for token in [*named.values(), *unnamed]:
        if _content(token) not in present and token not in others:
            others.append(token)
    tokens += map(_added, others)
    contents = {_content(token) for token in named.values()}
    for token in tokens:
        token.special = token.special or token.content in contents
    tokenizer.add_tokens(tokens)


def _require_named(
    tokenizer: tokenizers.Tokenizer, file: Path, configured: Mapping[int, AddedToken], names: SpecialTokens
) -> None:
    """Raise TuneError if BOS, EOS or the pad token is missing from the vocabulary and from the configured tokens."""
    contents = {token.content for token in configured.values()}
    for name in ("bos_token", "eos_token", "pad_token"):
        if name in names and names[name] not in contents and tokenizer.token_to_id(names[name]) is None:
            raise TuneError(
                f"{file.parent}: the configuration has {name} {names[name]!r}, but {file.name} has no such token. Take "
                "both files from the same checkpoint"
            )


def _require_ids(tokenizer: tokenizers.Tokenizer, file: Path, configured: Mapping[int, AddedToken]) -> None:
    """Raise TuneError if a token does not have the configured id."""
    for index, token in configured.items():
        if (actual := tokenizer.token_to_id(token.content)) != index:
            raise TuneError(
                f"{file.parent}: the configuration gives token {token.content!r} id {index}, but with {file.name} it "
                f"has id {actual}. Take all files from the same checkpoint"
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


def _content(token: Any) -> str:
    if isinstance(token, AddedToken):
        return str(token.content)
    content = token.get("content") if isinstance(token, dict) else token
    if not isinstance(content, str):
        raise TuneError(f"the tokenizer's configuration has the special token {token!r}, which is not a string")
    return content


def _added(token: Any) -> AddedToken:
    """The token that a text, or a mapping with content and flags, describes. A bare text is a special token."""
    if isinstance(token, AddedToken):
        return token
    content = _content(token)
    if isinstance(token, str):
        return AddedToken(content, special=True)
    return AddedToken(content, **{name: token[name] for name in FLAGS if name in token})
