"""Convert vocabularies of ranked byte strings (tiktoken files, Mistral's tekken.json) to a `tokenizers.Tokenizer`."""

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from tune.lookup import needs

Piece = TypeVar("Piece", str, bytes)

# Llama 3 and Qwen split text into words in the same way, except for digits.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
LLAMA3_TOKENS, LLAMA3_WORDS = 128_000, _WORDS.format(digits=r"\p{N}{1,3}")
QWEN_TOKENS, QWEN_WORDS = 151_643, _WORDS.format(digits=r"\p{N}")
TEKKEN_VERSIONS = ("v1", "v2", "v3", "v7", "v11", "v13", "v15")
_LINE = re.compile(rb"[A-Za-z0-9+/]+=* \d+\s")


def is_tiktoken(data: bytes) -> bool:
    """Whether a `tokenizer.model` has lines of a base64 token and its rank; sentencepiece files have the same name."""
    return _LINE.match(data) is not None


def llama3(file: Path) -> tokenizers.Tokenizer:
    """Read Llama 3's `tokenizer.model`, with special tokens of 3.1 and later. Raises ValueError for another file."""
    names = {0: "begin_of_text", 1: "end_of_text", 4: "finetune_right_pad_id", 5: "step_id", 6: "start_header_id"}
    names |= {7: "end_header_id", 8: "eom_id", 9: "eot_id", 10: "python_tag", 11: "image"}
    reserved = (f"reserved_special_token_{index}" for index in range(256))
    special = [f"<|{names.get(index) or next(reserved)}|>" for index in range(256)]
    return _convert(_tiktoken(file, LLAMA3_TOKENS, "Llama 3's"), LLAMA3_WORDS, special, first_special=LLAMA3_TOKENS)


def qwen(file: Path) -> tokenizers.Tokenizer:
    """Read Qwen's `qwen.tiktoken`. Raises ValueError for another file."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{index}|>" for index in range(205))]
    tokenizer = _convert(_tiktoken(file, QWEN_TOKENS, "Qwen's"), QWEN_WORDS, special, first_special=QWEN_TOKENS)
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def tekken(data: bytes) -> tokenizers.Tokenizer:
    """Read Mistral's `tekken.json`; special tokens come first. Raises ValueError for another file or version."""
    content = json.loads(data)
    try:
        config, vocabulary = content["config"], content["vocab"]
        version, count = config["version"], config["default_num_special_tokens"]
        if version not in TEKKEN_VERSIONS:
            raise ValueError(f"it has version {version!r}; supported: {', '.join(TEKKEN_VERSIONS)}")
        if content.get("special_tokens") is None and version not in ("v1", "v2", "v3", "v7"):
            raise ValueError(f"it lists no special_tokens, which version {version} must have")
        named = {token["rank"]: token["token_str"] for token in content.get("special_tokens") or []}
        named = named or dict(enumerate(_TEKKEN_SPECIAL))
        special = [named.get(index, f"<SPECIAL_{index}>") for index in range(count)]
        used = vocabulary[: config["default_vocab_size"] - count]
        ranks = {base64.b64decode(token["token_bytes"]): count + token["rank"] for token in used}
        return _convert(ranks, config["pattern"], special, first_special=0)
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(f"it has unexpected content ({type(error).__name__}: {error})") from error


_TEKKEN_SPECIAL = [
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]"),
    *("[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
]


def merges(ranks: Mapping[Piece, float]) -> list[tuple[Piece, Piece]]:
    """All pairs of pieces that form a piece, lowest rank first.

    tiktoken and sentencepiece merge the neighbors that form the piece of the lowest rank; `tokenizers` needs the pairs.
    """
    pairs: list[tuple[Piece, Piece]] = []
    for piece in sorted(ranks, key=ranks.__getitem__):
        halves = ((piece[:at], piece[at:]) for at in range(1, len(piece)))
        known = [pair for pair in halves if pair[0] in ranks and pair[1] in ranks]
        pairs += sorted(known, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
    return pairs


def _tiktoken(file: Path, size: int, whose: str) -> dict[bytes, int]:
    with needs("tiktoken", str(file)):
        from tiktoken.load import load_tiktoken_bpe
    # The library caches each file by its path; without the hash it would read an outdated copy of a changed file.
    ranks = load_tiktoken_bpe(str(file), hashlib.sha256(file.read_bytes()).hexdigest())
    if sorted(ranks.values()) != list(range(size)):
        raise ValueError(
            f"it ranks {len(ranks):,} tokens, but {whose} ranks {size:,}. Put the model's tokenizer.json next to it"
        )
    return ranks


def _convert(ranks: dict[bytes, int], words: str, special: list[str], first_special: int) -> tokenizers.Tokenizer:
    characters = _byte_characters()

    def text(piece: bytes) -> str:
        return "".join(map(characters.__getitem__, piece))

    ids = {text(piece): rank for piece, rank in ranks.items()}
    ids |= {token: first_special + index for index, token in enumerate(special)}
    pairs = [(text(left), text(right)) for left, right in merges(ranks)]
    tokenizer = tokenizers.Tokenizer(models.BPE(ids, pairs, ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(words), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    return tokenizer


def _byte_characters() -> list[str]:
    """The character of each byte in a byte-level vocabulary: itself if printable, else a character from 256 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
