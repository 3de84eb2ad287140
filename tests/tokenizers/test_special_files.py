"""Special tokens and their flags in any of a folder's files: ids, special ids and texts match transformers."""

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from tune.errors import TuneError
from tune.tokenizers import Tokenizer

transformers = pytest.importorskip("transformers")

TOKEN = "<x>"
FLAGS = ("special", "normalized", "lstrip", "rstrip", "single_word")
TEXTS = ["a<x>b", "a <x> b", "A <X> b", "a  <x>  b <x>", "<x>a <x>", "a<x><y> <x>", "<y> <z> a<z>b", " <w>a <x>\nb"]


def described(flags: dict[str, bool], content: str = TOKEN) -> dict[str, Any]:
    return {"content": content, "special": False, "normalized": False, "lstrip": False, "rstrip": False} | {
        "single_word": False,
        **flags,
    }


def write_vocabulary(folder: Path, *added: dict[str, Any]) -> None:
    """A vocabulary of letters, signs and <x> (id 1), in lower case; `added` are its added tokens."""
    signs = ["[UNK]", TOKEN, *"abxyzw<> \n", "</s>"]
    vocabulary = {sign: index for index, sign in enumerate(signs)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[], unk_token="[UNK]"))
    tokenizer.normalizer = tokenizers.normalizers.Lowercase()
    tokenizer.decoder = tokenizers.decoders.Fuse()
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = [{"id": vocabulary[token["content"]], **token} for token in added]
    (folder / "tokenizer.json").write_text(json.dumps(content))


def write(folder: Path, files: dict[str, Any]) -> None:
    for name, content in files.items():
        if name == "tokenizer_config":
            content = {"tokenizer_class": "PreTrainedTokenizerFast"} | content
        (folder / f"{name}.json").write_text(json.dumps(content))


def require_same(folder: Path) -> None:
    theirs, ours = transformers.AutoTokenizer.from_pretrained(folder), Tokenizer(folder)
    assert ours.vocabulary == theirs.get_vocab()
    assert ours.definition["added_tokens"] == json.loads(theirs.backend_tokenizer.to_str())["added_tokens"]
    named = {"bos_id": theirs.bos_token_id, "eos_id": theirs.eos_token_id, "pad_id": theirs.pad_token_id}
    assert {name: getattr(ours, name) for name in named} == named
    for text in TEXTS:
        ids = theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text) == ids, text
        assert [encoding.ids for encoding in ours.encode_with_offsets([text])] == [ids], text
        for skip in (False, True):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip), text


# Each way in which a folder's other files can describe <x>, given its flags there.
PLACES = {
    "none": lambda flags: {},
    "decoder": lambda flags: {"tokenizer_config": {"added_tokens_decoder": {"1": described(flags)}}},
    "decoder, named": lambda flags: {
        "tokenizer_config": {"pad_token": TOKEN, "added_tokens_decoder": {"1": described(flags)}}
    },
    "decoder, extra": lambda flags: {
        "tokenizer_config": {"extra_special_tokens": [TOKEN], "added_tokens_decoder": {"1": described(flags)}}
    },
    "name": lambda flags: {"tokenizer_config": {"unk_token": {"__type": "AddedToken", **described(flags)}}},
    "map": lambda flags: {"tokenizer_config": {}, "special_tokens_map": {"unk_token": described(flags)}},
    "added_tokens": lambda flags: {"tokenizer_config": {}, "added_tokens": {TOKEN: 1}},
}


@pytest.mark.weekly
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("added", [None, *itertools.product((False, True), repeat=5)])
def test_flags_of_two_files(tmp_path: Path, place: str, added: tuple[bool, ...] | None) -> None:
    """For each set of flags in tokenizer.json (or no added token there): other flags in another file."""
    there = () if added is None else (described(dict(zip(FLAGS, added, strict=True))),)
    for elsewhere in [{}, *({flag: True} for flag in FLAGS), dict.fromkeys(FLAGS, True)]:
        write_vocabulary(tmp_path, *there)
        write(tmp_path, PLACES[place](elsewhere))
        require_same(tmp_path)


NEW, OTHER = "<y>", "<z>"
MISSING = {
    "extra": {"tokenizer_config": {"extra_special_tokens": [NEW, OTHER]}},
    "extra, described": {
        "tokenizer_config": {"extra_special_tokens": [{"__type": "AddedToken", **described({}, NEW)}]}
    },
    "extra by name": {"tokenizer_config": {"extra_special_tokens": {"image_token": OTHER, "boi_token": NEW}}},
    "additional": {"tokenizer_config": {"additional_special_tokens": [NEW, TOKEN]}},
    "extra before additional": {
        "tokenizer_config": {"additional_special_tokens": [NEW], "extra_special_tokens": [OTHER]}
    },
    "a name of its own": {"tokenizer_config": {"image_token": NEW, "bos_token": TOKEN}},
    "names that are stored apart": {"tokenizer_config": {"model_specific_special_tokens": {"image_token": NEW}}},
    "mask": {"tokenizer_config": {"mask_token": NEW}},
    "map": {"tokenizer_config": {}, "special_tokens_map": {"additional_special_tokens": [NEW, OTHER]}},
    "map and config": {
        "tokenizer_config": {"extra_special_tokens": [NEW]},
        "special_tokens_map": {"extra_special_tokens": [OTHER, NEW], "image_token": "<w>"},
    },
    "map by name": {"tokenizer_config": {}, "special_tokens_map": {"extra_special_tokens": {"image_token": OTHER}}},
    "map, additional twice": {
        "tokenizer_config": {"additional_special_tokens": [NEW]},
        "special_tokens_map": {"additional_special_tokens": [OTHER]},
    },
    "map against config": {"tokenizer_config": {"pad_token": TOKEN}, "special_tokens_map": {"pad_token": "</s>"}},
    "map takes away": {"tokenizer_config": {"pad_token": TOKEN}, "special_tokens_map": {"pad_token": None}},
    "map next to decoder": {
        "tokenizer_config": {"pad_token": TOKEN, "added_tokens_decoder": {}},
        "special_tokens_map": {"pad_token": "</s>", "eos_token": "</s>"},
    },
    "map without config": {"special_tokens_map": {"eos_token": "</s>", "pad_token": described({}, "</s>")}},
    "decoder adds": {
        "tokenizer_config": {
            "extra_special_tokens": [OTHER],
            "added_tokens_decoder": {"14": described({}, NEW), "13": described({"rstrip": True}, "<w>")},
        }
    },
    "added_tokens adds": {"tokenizer_config": {"pad_token": NEW}, "added_tokens": {"<w>": 13, NEW: 14}},
    "added_tokens next to decoder": {
        "tokenizer_config": {"added_tokens_decoder": {"1": described({"special": True})}},
        "added_tokens": {"<w>": 13},
    },
}


@pytest.mark.parametrize("case", MISSING)
@pytest.mark.parametrize("added", [(), (described({}),), (described({"special": True}), described({}, "</s>"))])
def test_tokens_that_the_vocabulary_lacks(tmp_path: Path, case: str, added: tuple[dict, ...]) -> None:
    write_vocabulary(tmp_path, *added)
    write(tmp_path, MISSING[case])
    require_same(tmp_path)


def drawn_files(draw: random.Random) -> dict[str, Any]:
    def token(content: str) -> Any:
        flags = {flag: draw.random() < 0.4 for flag in FLAGS}
        return draw.choice([content, {"__type": "AddedToken", **described(flags, content)}])

    def some(*contents: str) -> list[Any]:
        return [token(content) for content in contents if draw.random() < 0.5]

    config: dict[str, Any] = {}
    for name in ("unk_token", "mask_token", "image_token", "sep_token"):
        if draw.random() < 0.4:
            config[name] = token(draw.choice([TOKEN, NEW, OTHER, "</s>"]))
    for name in ("eos_token", "pad_token"):
        if draw.random() < 0.4:
            config[name] = token(draw.choice([TOKEN, "</s>"]))
    for name in ("extra_special_tokens", "additional_special_tokens"):
        if draw.random() < 0.4:
            config[name] = some(TOKEN, NEW, "<w>")
    if draw.random() < 0.4:
        flags = {flag: draw.random() < 0.4 for flag in FLAGS}
        config["added_tokens_decoder"] = {"1": described(flags), "13": described({}, NEW)}
    files = {"tokenizer_config": config}
    if draw.random() < 0.5:
        files["special_tokens_map"] = {"eos_token": "</s>", "additional_special_tokens": [NEW, OTHER]}
    if draw.random() < 0.3:
        files["added_tokens"] = {NEW: 13}
    return files


@pytest.mark.parametrize("seed", range(20))
def test_drawn_folders(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    added = [described({flag: draw.random() < 0.4 for flag in FLAGS}, token) for token in (TOKEN, "</s>")]
    write_vocabulary(tmp_path, *added[: draw.randrange(3)])
    write(tmp_path, drawn_files(draw))
    require_same(tmp_path)


def test_saved_folder_reads_the_same(tmp_path: Path) -> None:
    write_vocabulary(tmp_path, described({"rstrip": True}))
    write(tmp_path, {"tokenizer_config": {"extra_special_tokens": [NEW], "pad_token": "</s>"}})
    saved = tmp_path / "saved"
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.add_tokens(["<w>"]) == [14]
    tokenizer.save(saved)
    require_same(saved)
    assert Tokenizer(saved).vocabulary == tokenizer.vocabulary


BYTE_PAIRS = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"


@pytest.mark.parametrize(
    ("of_byte_pairs", "more", "expected"),
    [(False, {}, "don't. it's?"), (True, {}, "do n't . it 's ?"), (True, {BYTE_PAIRS: True}, "don't. it's?")],
)
def test_cleaned_texts(tmp_path: Path, of_byte_pairs: bool, more: dict[str, Any], expected: str) -> None:
    """Byte pairs keep their spaces, unless the config insists."""
    vocabulary = {word: index for index, word in enumerate(["[UNK]", "do", "n't", ".", "?", "it", "'s", "it's"])}
    words = tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]")
    model = tokenizers.models.BPE(vocabulary, [], unk_token="[UNK]") if of_byte_pairs else words
    tokenizers.Tokenizer(model).save(str(tmp_path / "tokenizer.json"))
    write(tmp_path, {"tokenizer_config": {"clean_up_tokenization_spaces": True, **more}})
    theirs, ours = transformers.AutoTokenizer.from_pretrained(tmp_path), Tokenizer(tmp_path)
    assert ours.decode([1, 2, 3, 5, 6, 4]) == theirs.decode([1, 2, 3, 5, 6, 4]) == expected


def test_split_special_tokens_is_refused(tmp_path: Path) -> None:
    write_vocabulary(tmp_path, described({"special": True}))
    write(tmp_path, {"tokenizer_config": {"split_special_tokens": True}})
    with pytest.raises(TuneError, match="split_special_tokens"):
        Tokenizer(tmp_path)
