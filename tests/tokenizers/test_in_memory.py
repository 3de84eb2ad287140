"""Transformers tokenizers in memory."""

import pickle

import pytest
from helpers import CHATML

from tune.errors import TuneError
from tune.tokenizers import Tokenizer

CHAT = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat <mat>"}]


@pytest.fixture
def theirs(checkpoint):
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(checkpoint)


def test_tokenizer_in_memory_matches_its_folder(theirs, checkpoint):
    ours, folder = Tokenizer.of(theirs), Tokenizer(str(checkpoint))
    assert (ours.vocabulary, ours.chat_template) == (folder.vocabulary, folder.chat_template)
    assert (ours.bos_id, ours.eos_id, ours.pad_id) == (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id)
    text = "the cat sat <|im_end|> under a mat, été"
    assert ours.encode(text) == folder.encode(text) == theirs(text, add_special_tokens=False)["input_ids"]


def test_changes_in_memory_are_kept(theirs, tmp_path):
    theirs.add_tokens(["<mat>"])
    theirs.chat_template = "new:" + CHATML
    ours = Tokenizer.of(theirs)
    expected = theirs.apply_chat_template(CHAT, tokenize=False)
    assert ours.apply_chat_template(CHAT) == expected and expected.startswith("new:")
    assert ours.encode(expected) == theirs(expected, add_special_tokens=False)["input_ids"]
    assert theirs.convert_tokens_to_ids("<mat>") in ours.encode(expected)
    ours.save(tmp_path)
    assert Tokenizer(tmp_path).fingerprint == ours.fingerprint
    sent = pickle.loads(pickle.dumps(ours))
    assert sent.encode(expected) == ours.encode(expected)


def test_other_objects_are_refused(theirs, checkpoint):
    with pytest.raises(TuneError, match=r"Tokenizer\(path\)"):
        Tokenizer.of(str(checkpoint))
    with pytest.raises(TuneError, match=r"Tokenizer\.of"):
        Tokenizer(theirs)
