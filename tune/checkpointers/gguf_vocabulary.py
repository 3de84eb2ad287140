"""A tokenizer in a GGUF file: its tokens, the rule by which it cuts a text into words, and its chat template."""

from typing import Any

from tune.errors import TuneError
from tune.tokenizers import Tokenizer

ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*%s|\p{{N}}%s|{REST}"
CASED = CASED.replace(r"+[\r\n]*|", r"+[\r\n/]*|")
# (The regular expression that words match, whether whole words are looked up first) -> llama.cpp's name.
WORDS = {
    (rf"{ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{REST}", True): "llama-bpe",
    (rf"{ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{REST}", False): "dbrx",
    (rf"{ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{REST}", False): "qwen2",
    (CASED % ("", "", ""), True): "tekken",
    (CASED % (f"{ENDINGS}?", f"{ENDINGS}?", "{1,3}"), False): "gpt-4o",
    ("ByteLevel", False): "gpt-2",
    ("Digits, ByteLevel", False): "smollm",
}  # fmt: skip


def add_vocabulary(writer: Any, tokenizer: Tokenizer, rows: int) -> None:
    """Add the `tokenizer` of a model whose embedding has so many `rows`. Raises TuneError if llama.cpp has none like
    it."""
    from gguf import TokenType

    definition = tokenizer.definition
    model, ids = definition["model"], tokenizer.vocabulary
    if model["type"] != "BPE":
        raise TuneError(f"GGUF: the tokenizer in {tokenizer.path} is a {model['type']}; only BPE is converted")
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    tokens = [f"[PAD{index}]" for index in range(rows)]
    types = [TokenType.UNUSED] * rows
    for token, index in ids.items():
        tokens[index], types[index] = token, TokenType.NORMAL
    for added in definition["added_tokens"]:
        types[added["id"]] = TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED
    if model.get("byte_fallback"):
        _add_sentencepiece(writer, definition, merges, tokens, types)
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(_words(definition, tokenizer))
        writer.add_token_merges(merges)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    for name in ("bos", "eos", "pad", "unk"):
        if (special := tokenizer.special_tokens.get(f"{name}_token", "")) in ids:
            getattr(writer, f"add_{name}_token_id")(ids[special])
    if ends := sorted(tokenizer.stop_ids - {tokenizer.eos_id}) if tokenizer.chat_template else []:
        writer.add_eot_token_id(ends[0])
    writer.add_add_bos_token(bool(tokenizer.prefix_ids))
    writer.add_add_eos_token(False)
    if tokenizer.chat_template:
        writer.add_chat_template(tokenizer.chat_template)


def _words(definition: dict[str, Any], tokenizer: Tokenizer) -> str:
    """llama.cpp's name of the rule, which decides with the merges what is a token."""
    outer = definition["pre_tokenizer"] or {}
    steps = outer.get("pretokenizers", [outer])
    kinds = [step.get("pattern", {}).get("Regex") or step.get("type", "none") for step in steps]
    is_split = len(steps) == 2 and steps[0]["type"] == "Split" and steps[0]["behavior"] == "Isolated"
    plain = is_split and not steps[1].get("use_regex") and not steps[0]["invert"]
    rule = kinds[0] if plain else ", ".join(kinds)
    normalizer = (definition["normalizer"] or {}).get("type")
    name = WORDS.get((rule, bool(definition["model"].get("ignore_merges"))))
    if name is None or steps[-1].get("add_prefix_space") or normalizer not in (None, "NFC"):
        raise TuneError(
            f"GGUF: the rule by which {tokenizer.path}'s tokenizer cuts texts into words is not known here: {rule}. "
            "llama.cpp's own converter may know it: `python convert_hf_to_gguf.py FOLDER`"
        )
    return name


def _add_sentencepiece(
    writer: Any, definition: dict[str, Any], merges: list[str], tokens: list[str], types: list[Any]
) -> None:
    """Of a sentencepiece model, which merges the pair first whose union has the highest score."""
    from gguf import TokenType

    ranks: dict[str, int] = {}
    for rank, pair in enumerate(merges):
        ranks.setdefault(pair.replace(" ", ""), rank)
    for index, token in enumerate(tokens):
        if len(token) == 6 and token.startswith("<0x"):
            types[index] = TokenType.BYTE
        elif token == definition["model"]["unk_token"]:
            types[index] = TokenType.UNKNOWN
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_scores([-float(ranks.get(token, len(ranks))) for token in tokens])
    outer, normalizer = definition["pre_tokenizer"] or {}, definition["normalizer"] or {}
    steps = [*outer.get("pretokenizers", [outer]), *normalizer.get("normalizers", [normalizer])]
    prepends = any(step.get("prepend") or step.get("prepend_scheme") in ("first", "always") for step in steps)
    writer.add_add_space_prefix(prepends)
