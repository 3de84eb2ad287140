"""sentencepiece, tiktoken and tekken files match their own libraries and are saved unchanged."""

import base64
import io
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
from sample_texts import texts
from tokenizer_references import Reference, sentencepiece_reference, tekken_reference, tiktoken_reference

from tune.errors import TuneError
from tune.tokenizers import Tokenizer
from tune.tokenizers.ranks import LLAMA3_TOKENS, LLAMA3_WORDS, QWEN_TOKENS, QWEN_WORDS

transformers = pytest.importorskip("transformers")
TEKKEN_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train_sentencepiece(file: Path, **options) -> None:
    import sentencepiece

    model = io.BytesIO()
    usual = {"model_type": "bpe", "normalization_rule_name": "identity", "remove_extra_whitespaces": False}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts(700, seed=1)),
        model_writer=model,
        minloglevel=3,
        **{**usual, "vocab_size": 1000, "byte_fallback": True, "character_coverage": 0.99, **options},
    )
    file.write_bytes(model.getvalue())


@pytest.fixture(scope="session")
def ranked() -> list[bytes]:
    """A byte-level vocabulary in the order of its merges."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        texts(700, seed=1), trainers.BpeTrainer(vocab_size=3000, initial_alphabet=alphabet, show_progress=False)
    )
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    byte_of = {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}
    vocabulary = tokenizer.get_vocab()
    return [bytes(byte_of[character] for character in token) for token in sorted(vocabulary, key=vocabulary.get)]


def write_tiktoken(file: Path, ranked: list[bytes], size: int) -> None:
    """Write the vocabulary, padded with tokens that no text can produce because nothing merges into them."""
    tokens = [*ranked, *(b"\xff%09d" % number for number in range(size - len(ranked)))]
    file.write_bytes(b"".join(b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(tokens)))


def write_tekken(file: Path, ranked: list[bytes], **changes) -> None:
    """Write a file that lists more tokens than its tokenizer uses."""
    vocabulary = [{"rank": rank, "token_bytes": base64.b64encode(token).decode()} for rank, token in enumerate(ranked)]
    config = {"pattern": TEKKEN_WORDS, "default_vocab_size": 2500, "default_num_special_tokens": 100, "version": "v3"}
    file.write_text(json.dumps({"config": config, "vocab": vocabulary, **changes}))


SYMBOLS = ["\n\n", "▁▁", "▁▁▁▁", "<tool>", "<tool>x"]
UNIGRAM = {"model_type": "unigram", "hard_vocab_limit": False}
NORMALIZING = {"normalization_rule_name": "nmt_nfkc", "remove_extra_whitespaces": True}
SENTENCEPIECE: dict[str, dict] = {
    "sentencepiece": {},
    "user-defined": {"user_defined_symbols": SYMBOLS, "add_dummy_prefix": False, "pad_id": 3},
    "user-defined, with prefix": {"user_defined_symbols": SYMBOLS},
    "no bytes": {"byte_fallback": False, "character_coverage": 1.0, "vocab_size": 2000},
    "normalizing": NORMALIZING,
    "spaces kept": {**NORMALIZING, "remove_extra_whitespaces": False},
    "case folded": {**NORMALIZING, "normalization_rule_name": "nmt_nfkc_cf"},
    "normalizing, user-defined": {**NORMALIZING, "user_defined_symbols": SYMBOLS},
    "unigram": UNIGRAM,
    "unigram, normalizing": {**UNIGRAM, **NORMALIZING},
    "unigram, no bytes": {**UNIGRAM, **NORMALIZING, "byte_fallback": False, "add_dummy_prefix": False},
    "unigram, user-defined": {**UNIGRAM, **NORMALIZING, "user_defined_symbols": SYMBOLS},
    "characters": {"model_type": "char", "normalization_rule_name": "nfkc"},
}
KINDS = [*SENTENCEPIECE, "llama3", "qwen", "tekken"]


@pytest.fixture(scope="session", params=KINDS)
def vocabulary(request, tmp_path_factory, ranked) -> tuple[Path, Reference]:
    """A folder and its reference for plain text."""
    folder = tmp_path_factory.mktemp("vocabulary")
    file = folder / {"qwen": "qwen.tiktoken", "tekken": "tekken.json"}.get(request.param, "tokenizer.model")
    if request.param == "llama3":
        write_tiktoken(file, ranked, LLAMA3_TOKENS)
        return folder, tiktoken_reference(file, LLAMA3_WORDS)
    if request.param == "qwen":
        write_tiktoken(file, ranked, QWEN_TOKENS)
        return folder, tiktoken_reference(file, QWEN_WORDS, normalize="NFC")
    if request.param == "tekken":
        write_tekken(file, ranked)
        return folder, tekken_reference(file)
    train_sentencepiece(file, **SENTENCEPIECE[request.param])
    return folder, sentencepiece_reference(file)


def processor(folder: Path):
    import sentencepiece

    return sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))


def has_no_prefix(library, text: str) -> bool:
    """Return whether only sentencepiece adds the dummy prefix: to texts that normalize to nothing or one symbol."""
    return library.normalize(text).removeprefix("▁") in ("", *SYMBOLS)


@pytest.mark.weekly
def test_2000_texts_match_the_reference(vocabulary, request):
    folder, (encode, decode) = vocabulary
    ours = Tokenizer(str(folder))
    kind = request.node.callspec.params["vocabulary"]
    library = processor(folder) if kind in SENTENCEPIECE else None
    score = (lambda ids: sum(map(library.get_score, ids))) if "unigram" in kind else None
    for text in texts(2000):
        ids = encode(text)
        if library and has_no_prefix(library, text):
            continue
        got = ours.encode(text, parse_special_tokens=False)
        # Among segmentations with the same score, sums in another precision pick a different one.
        assert got == ids or (score and score(got) == pytest.approx(score(ids), abs=1e-3)), text
        if ours.special_tokens.get("unk_token") not in map(ours.decode, [[token] for token in set(ids)]):
            assert ours.decode(ids) == decode(ids) or "▁▁" in text, text


@pytest.mark.parametrize("kind", SENTENCEPIECE)
def test_offsets_match_sentencepiece(tmp_path, kind):
    train_sentencepiece(tmp_path / "tokenizer.model", **SENTENCEPIECE[kind])
    ours, library, compared = Tokenizer(str(tmp_path)), processor(tmp_path), 0
    # Skip texts whose offsets sentencepiece shifts by one: removed control characters and merged symbols or spaces.
    for text in (text for text in texts(1000) if text[:1].isalpha() and not {*text} & {*"▁\r"}):
        expected = library.encode_as_offset_mapping(text)
        (encoding,) = ours.encode_with_offsets([text])
        # sentencepiece assigns a character to its last token only, so the other tokens have no reference.
        if encoding.ids == expected["ids"] and all(start < end for start, end in expected["offsets"][1:]):
            for place, (start, end) in enumerate(expected["offsets"][1:], 1):
                ours_start, ours_end = encoding.token_to_chars(place)  # of merged spaces, the last
                assert start <= ours_start < ours_end <= end, (text, place)
                compared += 1
    assert compared > 2000


@pytest.mark.parametrize("kind", ["sentencepiece", "user-defined", "unigram", "llama3", "tekken"])
def test_offsets_cover_the_text(kind, request, tmp_path, ranked):
    if kind in SENTENCEPIECE:
        train_sentencepiece(tmp_path / "tokenizer.model", **SENTENCEPIECE[kind])
    elif kind == "llama3":
        write_tiktoken(tmp_path / "tokenizer.model", ranked, LLAMA3_TOKENS)
    else:
        write_tekken(tmp_path / "tekken.json", ranked)
    ours = Tokenizer(str(tmp_path))
    for text in texts(300):
        (encoding,) = ours.encode_with_offsets([text])
        assert {
            at for start, end in map(encoding.token_to_chars, range(len(encoding.ids))) for at in range(start, end)
        } == set(range(len(text))), text


@pytest.mark.slow
def test_saved_tokenizer_gives_the_same_ids_in_transformers(vocabulary, tmp_path):
    folder, _ = vocabulary
    ours = Tokenizer(str(folder))
    ours.save(tmp_path)
    assert all((tmp_path / file.name).read_bytes() == file.read_bytes() for file in folder.iterdir())
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in texts(500):
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False), text
        assert ours.encode(text, add_special_tokens=True) == theirs.encode(text), text
        assert ours.decode(ours.encode(text)) == theirs.decode(ours.encode(text)), text
    assert (ours.bos_id, ours.eos_id, ours.pad_id) == (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id)


@pytest.mark.slow
def test_added_tokens_are_saved(vocabulary, tmp_path):
    ours = Tokenizer(str(vocabulary[0]))
    size = ours.vocab_size
    assert ours.add_tokens(["<|new|>", "<|newer|>", "<|new|>"]) == [size, size + 1, size]
    assert ours.add_tokens(["plain"], special=False) == [size + 2]
    assert ours.vocab_size == size + 3
    ours.save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = "A plain<|new|> and a <|newer|>one"
    ids = ours.encode(text)
    assert {size, size + 1, size + 2} < set(ids)
    assert theirs.encode(text, add_special_tokens=False) == ids == Tokenizer(str(tmp_path)).encode(text)
    assert theirs.decode(ids, skip_special_tokens=True) == ours.decode(ids, skip_special_tokens=True)
    assert "<|new|>" not in ours.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("legacy", [True, False])
def test_dummy_prefix_between_special_tokens(tmp_path, legacy):
    train_sentencepiece(tmp_path / "tokenizer.model")
    config = {"tokenizer_class": "LlamaTokenizer", "legacy": legacy}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours, theirs = Tokenizer(str(tmp_path)), transformers.AutoTokenizer.from_pretrained(tmp_path)
    prefixed, bare = (ours.encode(text)[1:] for text in ("</s>fox", "a</s>fox"))
    assert (ours.decode(prefixed), len(prefixed), prefixed == bare[1:]) == ("fox", len(prefixed), True)
    for form in ("{}</s>fox", "<s>{}", "fox<s>{}"):
        for text in map(form.format, map(str.lstrip, texts(500))):
            if not re.search("> |▁", text):  # transformers takes these for the prefix
                assert ours.encode(text) == theirs.encode(text, add_special_tokens=False), text


@pytest.mark.slow
def test_special_tokens_of_llama_3(tmp_path, ranked):
    write_tiktoken(tmp_path / "tokenizer.model", ranked, LLAMA3_TOKENS)
    tokenizer = Tokenizer(str(tmp_path))
    named = {"<|begin_of_text|>": 0, "<|finetune_right_pad_id|>": 4, "<|start_header_id|>": 6, "<|eot_id|>": 9}
    named |= {
        "<|reserved_special_token_1|>": 3,
        "<|reserved_special_token_2|>": 12,
        "<|reserved_special_token_245|>": 255,
    }
    for token, index in named.items():
        assert tokenizer.encode(f"a{token}")[1:] == [LLAMA3_TOKENS + index]
    assert tokenizer.vocab_size == 128_256
    assert tokenizer.prefix_ids == [128_000]


@pytest.mark.slow
def test_special_tokens_of_qwen(tmp_path, ranked):
    write_tiktoken(tmp_path / "qwen.tiktoken", ranked, QWEN_TOKENS)
    tokenizer = Tokenizer(str(tmp_path))
    assert tokenizer.encode("<|endoftext|><|im_start|><|extra_204|>") == [151_643, 151_644, 151_850]
    assert (tokenizer.prefix_ids, tokenizer.eos_id) == ([], 151_643)


def test_special_tokens_of_tekken(tmp_path, ranked):
    write_tekken(tmp_path / "tekken.json", ranked)
    tokenizer = Tokenizer(str(tmp_path))
    assert tokenizer.encode("<s>[INST][TOOL_CONTENT]<SPECIAL_20>") == [1, 3, 19, 20]
    assert (tokenizer.prefix_ids, tokenizer.eos_id, tokenizer.pad_id, tokenizer.vocab_size) == ([1], 2, 11, 2500)
    own = [{"rank": 0, "token_str": "<unk>"}, {"rank": 2, "token_str": "</s>"}, {"rank": 1, "token_str": "<s>"}]
    write_tekken(tmp_path / "tekken.json", ranked, special_tokens=[*own, {"rank": 3, "token_str": "<pad>"}])
    assert Tokenizer(str(tmp_path)).encode("<pad><SPECIAL_4></s>") == [3, 4, 2]


def test_config_can_name_placeholders_and_add_tokens(tmp_path):
    train_sentencepiece(tmp_path / "tokenizer.model", control_symbols=["<unused0>"])
    decoder = {"3": {"content": "<|im_end|>", "special": True}, "1000": {"content": "<|more|>", "special": True}}
    config = {"tokenizer_class": "LlamaTokenizer", "eos_token": "<|im_end|>", "added_tokens_decoder": decoder}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer(str(tmp_path))
    assert tokenizer.encode("<|im_end|><|more|>") == [3, 1000]
    assert (tokenizer.eos_id, tokenizer.vocab_size) == (3, 1001)
    assert tokenizer.encode("<unused0>") != [3]
    tokenizer.add_tokens(["<|most|>"])
    (tmp_path / "saved").mkdir()
    tokenizer.save(tmp_path / "saved")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
    text = "<|im_end|>a<|more|>b<|most|>"
    assert theirs.encode(text, add_special_tokens=False) == tokenizer.encode(text)


def test_added_tokens_json(tmp_path):
    train_sentencepiece(tmp_path / "tokenizer.model")
    (tmp_path / "added_tokens.json").write_text('{"<b>": 1001, "[PAD]": 1000}')
    (tmp_path / "special_tokens_map.json").write_text('{"pad_token": "[PAD]"}')
    tokenizer = Tokenizer(str(tmp_path))
    assert (tokenizer.pad_id, tokenizer.encode("[PAD]<b>")) == (1000, [1000, 1001])
    assert tokenizer.decode([1000, 1001], skip_special_tokens=True) == "<b>"
    tokenizer.add_tokens(["<c>"])
    (tmp_path / "saved").mkdir()
    tokenizer.save(tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "added_tokens.json").read_text()) == {
        "<b>": 1001,
        "[PAD]": 1000,
        "<c>": 1002,
    }


def test_added_tokens_json_without_ids(tmp_path):
    train_sentencepiece(tmp_path / "tokenizer.model")
    (tmp_path / "added_tokens.json").write_text('{"<b>": 1001, "secret": "1002"}')
    with pytest.raises(TuneError, match=r"added_tokens\.json must map each token to its id") as refused:
        Tokenizer(str(tmp_path))
    assert "secret" not in str(refused.value)  # the file may be a link to another one


def test_config_sets_bos_and_eos(tmp_path):
    train_sentencepiece(tmp_path / "tokenizer.model")
    for config, expected in (
        ({}, ([1], [])),
        ({"add_bos_token": False}, ([], [])),
        ({"add_eos_token": True}, ([1], [2])),
    ):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        tokenizer = Tokenizer(str(tmp_path))
        assert tokenizer.encode("a", add_special_tokens=True) == expected[0] + tokenizer.encode("a") + expected[1]


def test_tokenizer_json_has_precedence(folder, ranked):
    before = Tokenizer(str(folder)).encode("hello")
    write_tekken(folder / "tekken.json", ranked)
    train_sentencepiece(folder / "tokenizer.model")
    assert Tokenizer(str(folder)).encode("hello") == before


def cut_off(path: Path) -> None:
    train_sentencepiece(path / "tokenizer.model")
    (path / "tokenizer.model").write_bytes((path / "tokenizer.model").read_bytes()[:5000])


def two(path: Path) -> None:
    (path / "tekken.json").touch()
    (path / "tokenizer.model").touch()


def writes(name: str, content: str) -> Callable[[Path], object]:
    return lambda path: (path / name).write_text(content)


def trains(**options) -> Callable[[Path], object]:
    return lambda path: train_sentencepiece(path / "tokenizer.model", **options)


WRONG: dict[str, tuple[Callable[[Path], object], str]] = {
    "two": (two, r"several vocabularies \(tekken\.json, tokenizer\.model\) and no tokenizer\.json"),
    "none": (writes("a.txt", ""), r"no tokenizer in .*found: a\.txt.*must have one of tokenizer\.json"),
    "empty": (writes("tokenizer.model", ""), r"tokenizer\.model .*no complete vocabulary"),
    "not a model": (writes("tokenizer.model", "\x07" * 50), "not a sentencepiece model"),
    "git lfs": (
        writes("tokenizer.model", "version https://git-lfs.github.com/spec/v1\n"),
        r"tokenizer\.model is not a",
    ),
    "cut off": (cut_off, "it is truncated"),
    "whole words": (
        trains(model_type="word", hard_vocab_limit=False),
        r"has a model of whole words, .* Put a",
    ),
    "suffix": (trains(treat_whitespace_as_suffix=True), "has spaces after words"),
    "other": (writes("tokenizer.model", "YQ== 0\nYg== 1\n"), "ranks 2 tokens, but Llama 3's ranks 128,000"),
    "not base64": (writes("a.tiktoken", "YQ== 0\nYg 1\n"), r"a\.tiktoken .*Error parsing line"),
    "no rank": (writes("a.tiktoken", "YQ== 0\nYg==\n"), r"a\.tiktoken .*Error parsing line"),
    "tekken version": (
        lambda path: write_tekken(path / "tekken.json", [], config={"version": "v99", "default_num_special_tokens": 1}),
        r"tekken\.json .*version 'v99'; supported: v1, v2, v3, v7, v11",
    ),
    "tekken without": (writes("tekken.json", '{"config": {}, "vocab": []}'), "'version'"),
    "tekken list": (writes("tekken.json", "[]"), r"tekken\.json is not a readable tokenizer"),
    "tekken broken": (writes("tekken.json", "{"), r"tekken\.json is not a readable tokenizer"),
}


@pytest.mark.parametrize("case", WRONG)
def test_invalid_files_are_reported(tmp_path, case):
    make, message = WRONG[case]
    make(tmp_path)
    with pytest.raises(TuneError, match=message):
        Tokenizer(str(tmp_path))


@pytest.mark.parametrize("library", ["sentencepiece", "google.protobuf.message", "tiktoken.load"])
def test_missing_library_names_the_extra(tmp_path, monkeypatch, library, ranked):
    monkeypatch.setitem(sys.modules, library, None)
    if library == "tiktoken.load":
        write_tiktoken(tmp_path / "qwen.tiktoken", ranked, QWEN_TOKENS)
        extra = "tiktoken"
    else:
        (tmp_path / "tokenizer.model").touch()
        extra = "sentencepiece"
    with pytest.raises(TuneError, match=rf"needs the {extra} extra \(pip install 'tune-recipes\[{extra}\]'\): "):
        Tokenizer(str(tmp_path))


@pytest.mark.slow
def test_changed_tiktoken_file_is_read_again(tmp_path, ranked):
    file = tmp_path / "qwen.tiktoken"
    write_tiktoken(file, ranked, QWEN_TOKENS)
    before = Tokenizer(str(tmp_path)).encode("hello")
    write_tiktoken(file, [*ranked[:256], *reversed(ranked[256:])], QWEN_TOKENS)
    assert Tokenizer(str(tmp_path)).encode("hello") != before


def test_contradicting_ids_are_refused(folder):
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["added_tokens_decoder"] = {"1": {"content": "<|im_end|>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(TuneError, match=r"'<\|im_end\|>' id 1, but with tokenizer\.json it has id 3"):
        Tokenizer(str(folder))


def test_blank_token_cannot_be_added(folder):
    with pytest.raises(TuneError, match="' ' cannot be added"):
        Tokenizer(str(folder)).add_tokens([" "])


def test_added_tokens_take_no_id_of_a_vocabulary_with_holes(tmp_path: Path) -> None:
    vocabulary = {letter: index for index, letter in enumerate("abcdefgh") if index not in (2, 5)}
    base = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    base.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(str(tmp_path))
    assert tokenizer.add_tokens(["<x>", "<y>"]) == [8, 9]
    assert tokenizer.encode("a<x>h<y>g") == [0, 8, 7, 9, 6]

    tokenizer.save(tmp_path / "saved")
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "saved" / "tokenizer.json"))
    for same in (Tokenizer(str(tmp_path / "saved")).encode, theirs.encode):
        assert same("a<x>h<y>g") == [0, 8, 7, 9, 6]


def test_earlier_added_tokens_keep_their_ids_in_a_vocabulary_with_holes(tmp_path: Path) -> None:
    """The library gives the first added token id 6, the number of tokens, which is free here."""
    vocabulary = {letter: index for index, letter in enumerate("abcdefgh") if index not in (2, 6)}
    base = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    base.add_special_tokens(["<s>"])
    base.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(str(tmp_path))
    before = tokenizer.vocabulary
    assert before["<s>"] == 6 and tokenizer.add_tokens(["<x>", "<y>"]) == [8, 9]
    assert tokenizer.vocabulary == before | {"<x>": 8, "<y>": 9}

    tokenizer.save(tmp_path / "saved")
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "saved" / "tokenizer.json"))
    for same in (tokenizer.encode, Tokenizer(str(tmp_path / "saved")).encode, theirs.encode):
        assert same("a<x>h<s><y>f") == [0, 8, 7, 6, 9, 5]
