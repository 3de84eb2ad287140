"""A sentencepiece `tokenizer.model` as a `tokenizers.Tokenizer` that gives the same ids."""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from tune.tokenizers.ranks import merges

BPE = 2
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5
SPACE = "▁"


@dataclass(frozen=True, slots=True)
class SentencePiece:
    """A `tokenizer.model`: its pieces in the order of their ids, and what sentencepiece_model.proto says of them."""

    pieces: list[str]
    scores: list[float]
    kinds: list[int]
    special_ids: dict[str, int]  # of unk_token, bos_token, eos_token, pad_token, as far as there are such
    byte_fallback: bool
    add_dummy_prefix: bool

    @classmethod
    def parse(cls, data: bytes) -> "SentencePiece":
        """Raises ValueError if `data` is no such file, or of a kind that cannot be converted exactly."""
        pieces = []
        trainer: dict[int, Any] = {}
        normalizer: dict[int, Any] = {}
        for number, value in _fields(data):
            if number == 1:
                pieces.append(dict(_fields(value)))
            elif number == 2:
                trainer = dict(_fields(value))
            elif number == 3:
                normalizer = dict(_fields(value))
        kinds = [piece.get(3, NORMAL) for piece in pieces]
        if UNKNOWN not in kinds or any(1 not in piece for piece in pieces):
            raise ValueError("it holds no complete vocabulary")
        if trainer.get(3) != BPE or UNUSED in kinds or normalizer.get(2) or normalizer.get(4, 1):
            raise ValueError(
                "it is not a BPE model that keeps texts as they are (a unigram model, unused pieces, Unicode "
                "normalisation or whitespace removal), and only such are read exactly: put a tokenizer.json beside it"
            )
        ids = {"unk_token": kinds.index(UNKNOWN), "bos_token": trainer.get(41, 1), "eos_token": trainer.get(42, 2)}
        ids["pad_token"] = trainer.get(43, len(pieces))
        return cls(
            pieces=[piece[1].decode() for piece in pieces],
            scores=[struct.unpack("<f", piece.get(2, bytes(4)))[0] for piece in pieces],
            kinds=kinds,
            special_ids={name: index for name, index in ids.items() if index < len(pieces)},  # -1 stands as 2^64 - 1
            byte_fallback=bool(trainer.get(35, 0)),
            add_dummy_prefix=bool(normalizer.get(3, 1)),
        )

    def convert(self, legacy: bool) -> tokenizers.Tokenizer:
        """The dummy prefix is put before every text between special tokens (`legacy`), or before a text's beginning.

        A vocabulary with user-defined symbols has only the latter: sentencepiece puts no prefix between them.
        """
        ranks = {
            piece: -score
            for piece, score, kind in zip(self.pieces, self.scores, self.kinds, strict=True)
            if kind == NORMAL
        }
        tokenizer = tokenizers.Tokenizer(
            models.BPE(
                {piece: index for index, piece in enumerate(self.pieces)},
                merges(ranks),
                unk_token=self.pieces[self.special_ids["unk_token"]],
                fuse_unk=True,
                byte_fallback=self.byte_fallback,
            )
        )
        everywhere = self.add_dummy_prefix and legacy and USER_DEFINED not in self.kinds
        spaces = normalizers.Replace(" ", SPACE)
        tokenizer.normalizer = normalizers.Sequence([spaces, normalizers.Prepend(SPACE)]) if everywhere else spaces
        if self.add_dummy_prefix and not everywhere:
            # The first puts a space before a text that begins with one too, as the normalizer left none; the second
            # writes it as the piece.
            once = pre_tokenizers.Metaspace(" ", prepend_scheme="first", split=False)
            tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
                [once, pre_tokenizers.Metaspace(SPACE, prepend_scheme="never", split=False)]
            )
        strip = [decoders.Strip(" ", left=1)] if self.add_dummy_prefix else []
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
        )
        tokenizer.add_tokens(
            [
                AddedToken(piece, special=kind != USER_DEFINED, normalized=kind == USER_DEFINED)
                for piece, kind in zip(self.pieces, self.kinds, strict=True)
                if kind in (UNKNOWN, CONTROL, USER_DEFINED)
            ]
        )
        return tokenizer


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Number and value of each field of a protocol buffer: an int, or bytes. Raises ValueError if it is none."""
    at = 0
    value: int | bytes
    try:
        while at < len(data):
            key, at = _varint(data, at)
            kind = key & 7
            if kind == 0:
                value, at = _varint(data, at)
            elif kind in _SIZES or kind == 2:
                length, at = _varint(data, at) if kind == 2 else (_SIZES[kind], at)
                value, at = data[at : at + length], at + length
            else:
                raise ValueError("it is not a protocol buffer")
            if at > len(data):
                raise ValueError("it ends in the middle")
            yield key >> 3, value
    except IndexError:
        raise ValueError("it ends in the middle") from None


_SIZES = {1: 8, 5: 4}


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while data[at] >= 128:
        value |= (data[at] & 127) << shift
        shift += 7
        at += 1
    return value | data[at] << shift, at + 1
