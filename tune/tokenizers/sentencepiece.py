"""Convert a sentencepiece `tokenizer.model` to a `tokenizers.Tokenizer` with the same ids."""

import re
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from tune.lookup import needs
from tune.tokenizers.ranks import merges

SPACE = "▁"
UNIGRAM, BPE, CHARACTERS = 1, 2, 4
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5


def convert(data: bytes, legacy: bool) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """The tokenizer, and its special tokens by name (`bos_token`, ...).

    The dummy prefix precedes each stretch of text between special tokens (`legacy`), or only the beginning of the text.
    Raises ValueError if `data` is not a sentencepiece model, or of a kind that cannot be converted.
    """
    model = _parse(data)
    trainer, spec = model.trainer_spec, model.normalizer_spec
    unigram = trainer.model_type == UNIGRAM
    tokenizer = tokenizers.Tokenizer(_unigram(model) if unigram else _bpe(model))
    symbols = [piece.piece for piece in model.pieces if piece.type == USER_DEFINED]
    steps = _normalizer(spec, symbols)
    if spec.add_dummy_prefix and legacy and symbols and not unigram:
        # A symbol is searched in the normalized text in the form that it has when normalized alone, without the prefix.
        alone = "|".join(map(re.escape, symbols))
        steps.append(normalizers.Replace(Regex(rf"\A(?!({alone})\z)(?=[\s\S])"), SPACE))
    elif spec.add_dummy_prefix and legacy:
        steps.append(normalizers.Prepend(SPACE))
    tokenizer.normalizer = normalizers.Sequence(steps)
    if spec.add_dummy_prefix and not legacy:
        # The first also adds a space to a text that begins with one; the normalizer has left none. The second writes
        # spaces as the piece.
        once = pre_tokenizers.Metaspace(" ", prepend_scheme="first", split=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [once, pre_tokenizers.Metaspace(SPACE, prepend_scheme="never", split=False)]
        )
    strip = decoders.Strip(" ", left=99 if spec.remove_extra_whitespaces else int(spec.add_dummy_prefix))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), strip]
    )
    tokenizer.add_tokens(
        [
            AddedToken(piece.piece, special=piece.type != USER_DEFINED, normalized=piece.type == USER_DEFINED)
            for piece in model.pieces
            if piece.type in (UNKNOWN, CONTROL) or (piece.type == USER_DEFINED and not unigram)
        ]
    )
    ids = {name: getattr(trainer, f"{name}_id") for name in ("unk", "bos", "eos", "pad")}
    present = {name: index for name, index in ids.items() if 0 <= index < len(model.pieces)}
    return tokenizer, {f"{name}_token": model.pieces[index].piece for name, index in present.items()}


def _parse(data: bytes) -> Any:
    """The `ModelProto` of sentencepiece_model.proto."""
    with needs("sentencepiece", "a sentencepiece tokenizer.model"):
        from google.protobuf.message import DecodeError
        from sentencepiece import sentencepiece_model_pb2
    model = sentencepiece_model_pb2.ModelProto()
    try:
        model.ParseFromString(data)
    except DecodeError as error:
        raise ValueError(f"it is truncated, or not a sentencepiece model: {error}") from error
    kinds = {piece.type for piece in model.pieces}
    if UNKNOWN not in kinds or not model.HasField("trainer_spec"):
        raise ValueError("it has no complete vocabulary")
    trainer, normalizer = model.trainer_spec, model.normalizer_spec
    unusual = {
        "a model of whole words": trainer.model_type not in (UNIGRAM, BPE, CHARACTERS),
        "BPE with unused pieces": trainer.model_type == BPE and UNUSED in kinds,
        "spaces after words": trainer.treat_whitespace_as_suffix,
        "unescaped spaces": not normalizer.escape_whitespaces,
        "a denormalizer": bool(model.denormalizer_spec.precompiled_charsmap),
    }
    if found := [what for what, there in unusual.items() if there]:
        raise ValueError(f"it has {' and '.join(found)}, which is not supported. Put a tokenizer.json next to it")
    return model


def _bpe(model: Any) -> models.BPE:
    normal = {piece.piece: -piece.score for piece in model.pieces if piece.type == NORMAL}
    return models.BPE(
        {piece.piece: index for index, piece in enumerate(model.pieces)},
        merges(normal) if model.trainer_spec.model_type == BPE else [],
        unk_token=model.pieces[model.trainer_spec.unk_id].piece,
        fuse_unk=True,
        byte_fallback=model.trainer_spec.byte_fallback,
    )


def _unigram(model: Any) -> models.Unigram:
    # `tokenizers` matches every piece. Pieces that sentencepiece does not match get a score that never wins.
    never = min(piece.score for piece in model.pieces) - 1e4
    looked_for = (NORMAL, USER_DEFINED)
    scores = [(piece.piece, piece.score if piece.type in looked_for else never) for piece in model.pieces]
    return models.Unigram(scores, model.trainer_spec.unk_id, model.trainer_spec.byte_fallback)


def _normalizer(spec: Any, symbols: list[str]) -> list[normalizers.Normalizer]:
    """The steps of sentencepiece's normalization, which leaves `symbols` unchanged."""
    steps: list[normalizers.Normalizer] = []
    if spec.precompiled_charsmap:
        # `tokenizers` applies the first entry that a grapheme begins with, sentencepiece the longest match at each
        # position. So composite characters are composed before and after, and the grapheme "\r\n" is replaced.
        table = normalizers.Precompiled(spec.precompiled_charsmap)
        lines = normalizers.Replace("\r\n", table.normalize_str("\r") + table.normalize_str("\n"))
        compose = [normalizers.NFC()] if "nfkc" in spec.name else []
        steps = [*compose, lines, table, *compose]
    if spec.remove_extra_whitespaces:
        steps += [normalizers.Replace(Regex(r"\A +|(?<=[^ ▁])[ ▁]+\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    normalize = normalizers.Sequence(steps).normalize_str
    changed = sorted((symbol for symbol in symbols if normalize(symbol) != symbol), key=len, reverse=True)
    stand_ins = {symbol: chr(0xF0000 + index) for index, symbol in enumerate(changed)}  # private-use characters
    steps = [normalizers.Replace(symbol, character) for symbol, character in stand_ins.items()] + steps
    steps += [normalizers.Replace(character, symbol) for symbol, character in stand_ins.items()]
    steps += [normalizers.Replace(" ", SPACE)]
    return steps
