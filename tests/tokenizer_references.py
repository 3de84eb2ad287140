"""Reference libraries for tokenizers and templates."""

import base64
import json
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

Reference = tuple[Callable[[str], list[int]], Callable[[list[int]], str]]


def sentencepiece_reference(file: Path) -> Reference:
    import sentencepiece

    processor = sentencepiece.SentencePieceProcessor(model_file=str(file))
    return processor.encode, processor.decode


def tiktoken_reference(file: Path, words: str, normalize: str | None = None) -> Reference:
    ranks = {base64.b64decode(token): int(rank) for token, rank in map(bytes.split, file.read_bytes().splitlines())}
    return _tiktoken(ranks, words, normalize)


def tekken_reference(file: Path) -> Reference:
    content = json.loads(file.read_text())
    config = content["config"]
    first = config["default_num_special_tokens"]
    vocabulary = content["vocab"][: config["default_vocab_size"] - first]
    ranks = {base64.b64decode(token["token_bytes"]): token["rank"] for token in vocabulary}
    encode, decode = _tiktoken(ranks, config["pattern"])
    return lambda text: [first + token for token in encode(text)], lambda ids: decode([token - first for token in ids])


def _tiktoken(ranks: dict[bytes, int], words: str, normalize: Any = None) -> Reference:
    import tiktoken

    encoding = tiktoken.Encoding("test", pat_str=words, mergeable_ranks=ranks, special_tokens={})

    def encode(text: str) -> list[int]:
        return encoding.encode(unicodedata.normalize(normalize, text) if normalize else text, disallowed_special=())

    return encode, encoding.decode


def transformers_rendering(source: str, variables: dict[str, str]) -> Callable[..., str]:
    """Return `apply_chat_template` of a tokenizer with this template and these special tokens."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({token: index for index, token in enumerate(variables.values())}))
    reference = PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=source, **variables)

    def render(messages: list[dict], **arguments: Any) -> str:
        return reference.apply_chat_template(messages, tokenize=False, **arguments)

    return render
