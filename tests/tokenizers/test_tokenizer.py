"""The tokenizer gives the same ids as transformers for the same folder."""

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sample_texts import TOOLS

from tune.errors import TuneError
from tune.tokenizers import Tokenizer

transformers = pytest.importorskip("transformers")

CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


def configure(folder: Path, **changes: object) -> None:
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def write_json(file: Path, content: object) -> None:
    file.write_text(json.dumps(content))


@pytest.mark.slow
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.one_of(st.text(), st.sampled_from(["<s>", "</s>", "<|im_end|>", " hello", "\n\n"]))).map("".join))
def test_encodes_like_transformers(folder, text):
    reference = transformers.AutoTokenizer.from_pretrained(folder)
    ours = Tokenizer(str(folder))
    assert ours.encode(text) == reference.encode(text, add_special_tokens=False)
    assert ours.encode(text, add_special_tokens=True) == reference.encode(text)
    assert ours.decode(ours.encode(text)) == reference.decode(reference.encode(text, add_special_tokens=False))


def test_special_token_ids(folder):
    tokenizer = Tokenizer(str(folder))
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (0, 1, None)
    assert tokenizer.vocab_size == len(transformers.AutoTokenizer.from_pretrained(folder))
    assert tokenizer.prefix_ids == [0]


def test_offsets_point_into_the_text(folder):
    text = "hello the 🦊 fox"
    (encoding,) = Tokenizer(str(folder)).encode_with_offsets([text])
    covered = sorted(
        {at for start, end in map(encoding.token_to_chars, range(len(encoding.ids))) for at in range(start, end)}
    )
    assert covered == list(range(len(text)))


def test_truncation_and_padding_of_the_file_are_disabled(folder):
    import tokenizers

    file = str(folder / "tokenizer.json")
    saved = tokenizers.Tokenizer.from_file(file)
    saved.enable_truncation(2)
    saved.enable_padding(length=64)
    saved.save(file)
    assert Tokenizer(str(folder)).decode(Tokenizer(str(folder)).encode("the quick brown fox")) == "the quick brown fox"


def test_eos_falls_back_to_the_generation_config(folder):
    configure(folder, eos_token=None)
    assert Tokenizer(str(folder)).eos_id is None
    write_json(folder / "generation_config.json", {"eos_token_id": [6, 1]})
    assert Tokenizer(str(folder)).eos_id == 6


def test_stops_at_eos_and_at_the_end_of_turn(folder):
    configure(folder, chat_template=CHATML)
    write_json(folder / "generation_config.json", {"eos_token_id": [1, 6]})
    assert Tokenizer(str(folder)).stop_ids == {1, 6, 3}  # </s>, <|eot_id|>, <|im_end|>


def test_template_file_wins_over_the_config(folder):
    configure(folder, chat_template="from the config")
    assert Tokenizer(str(folder)).chat_template == "from the config"
    (folder / "chat_template.jinja").write_text(CHATML)
    assert Tokenizer(str(folder)).chat_template == CHATML


def test_named_templates(folder):
    configure(
        folder, chat_template=[{"name": "default", "template": "chat"}, {"name": "tool_use", "template": "tools"}]
    )
    tokenizer, reference = Tokenizer(str(folder)), transformers.AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": "hello"}]
    for tools in (None, [{"type": "function", "function": {"name": "f"}}]):
        expected = reference.apply_chat_template(messages, tools=tools, tokenize=False)
        assert tokenizer.apply_chat_template(messages, tools=tools) == expected


def test_templates_in_files(folder):
    configure(folder, chat_template="from the config")
    (folder / "chat_template.jinja").write_text("chat{% for d in documents or [] %}{{ d | tojson }}{% endfor %}")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("tools {{ tools | length }}")
    tokenizer, reference = Tokenizer(str(folder)), transformers.AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": "hello"}]
    documents = [{"title": "<é>", "text": "b"}]
    for variables in ({}, {"tools": TOOLS}, {"documents": documents}):
        expected = reference.apply_chat_template(messages, tokenize=False, **variables)
        assert tokenizer.apply_chat_template(messages, **variables) == expected
    tokenizer.save(folder.parent)
    assert (folder.parent / "additional_chat_templates" / "tool_use.jinja").is_file()


def test_save_copies_the_files_byte_for_byte(folder, tmp_path):
    (folder / "chat_template.jinja").write_bytes(b"{{ messages }}\r\n")
    (folder / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "export").mkdir()
    Tokenizer(str(folder)).save(tmp_path / "export")
    names = ["chat_template.jinja", "tokenizer.json", "tokenizer_config.json"]
    assert sorted(file.name for file in (tmp_path / "export").iterdir()) == names
    assert all((tmp_path / "export" / name).read_bytes() == (folder / name).read_bytes() for name in names)


def test_folder_without_a_tokenizer_is_reported(tmp_path):
    with pytest.raises(TuneError, match=r"no tokenizer in .*found: nothing"):
        Tokenizer(str(tmp_path))
    with pytest.raises(TuneError, match="does not exist"):
        Tokenizer(str(tmp_path / "absent"))


def test_special_tokens_can_be_encoded_as_text(folder):
    tokenizer = Tokenizer(str(folder))
    reference = transformers.AutoTokenizer.from_pretrained(folder)
    text = "hello<|im_end|> </s>"
    ids = tokenizer.encode(text, parse_special_tokens=False)
    assert ids == reference.encode(text, add_special_tokens=False, split_special_tokens=True)
    assert not {1, 3} & set(ids)
    assert tokenizer.decode(ids) == text
    assert {1, 3} < set(tokenizer.encode(text))


def test_stream_gives_whole_characters(folder):
    tokenizer = Tokenizer(str(folder))
    text = "fox 🦊 e\u0301 你好 <|im_end|>\n 👩‍👩‍👧‍👦"
    stream = tokenizer.stream()
    pieces = [stream.add(token) for token in tokenizer.encode(text)]
    assert "".join(pieces) == text
    assert "\ufffd" not in "".join(pieces)
    assert pieces.count("") > 10
    assert stream.finish() == ""
    stream = tokenizer.stream(skip_special_tokens=True)
    assert [stream.add(token) for token in [*tokenizer.encode("🦊")[:2], 3]] == ["", "", ""]
    assert stream.finish() == "\ufffd"


def test_added_tokens_are_written_into_a_copy_of_tokenizer_json(folder, tmp_path):
    before = json.loads((folder / "tokenizer.json").read_text())
    before["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    write_json(folder / "tokenizer.json", before)
    decoder = {
        str(token["id"]): {name: token[name] for name in token if name != "id"} for token in before["added_tokens"]
    }
    configure(folder, added_tokens_decoder=decoder)
    tokenizer = Tokenizer(str(folder))
    size = tokenizer.vocab_size
    assert tokenizer.add_tokens(["<new>", "<s>"]) == [size, 0]
    (tmp_path / "export").mkdir()
    tokenizer.save(tmp_path / "export")
    after = json.loads((tmp_path / "export" / "tokenizer.json").read_text())
    new = {"id": size, "content": "<new>", "special": True, "normalized": False}
    new |= dict.fromkeys(("lstrip", "rstrip", "single_word"), False)
    assert after == {**before, "added_tokens": [*before["added_tokens"], new]}
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "export").convert_tokens_to_ids("<new>") == size


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_malformed_file_is_reported(folder, name):
    (folder / name).write_text("{")
    with pytest.raises(TuneError, match=f"{name} is not"):
        Tokenizer(str(folder))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"chat_template": 5}, "must be a text, or a list of named texts"),
        ({"chat_template": [{"name": "default"}]}, "must be a text, or a list of named texts.*'template'"),
        ({"chat_template": ["a"]}, "must be a text, or a list of named texts"),
        (
            {"added_tokens_decoder": {"a": {"content": "b"}}},
            "added_tokens_decoder in .* cannot be read",
        ),
        ({"added_tokens_decoder": {"3": {}}}, "added_tokens_decoder in .*'content'"),
        ({"added_tokens_decoder": []}, "added_tokens_decoder in "),
        ({"eos_token": 5}, "has the special token 5, which is not a string"),
        ({"additional_special_tokens": [{"a": 1}]}, "has the special token .* which is not a string"),
    ],
)
def test_malformed_configuration_is_reported(folder, changes, message):
    configure(folder, **changes)
    with pytest.raises(TuneError, match=message):
        Tokenizer(str(folder))


def test_template_that_is_not_utf8_is_reported(folder):
    (folder / "chat_template.jinja").write_bytes(b"\xff\xfe{{")
    with pytest.raises(TuneError, match=r"the chat template in .* UnicodeDecodeError"):
        Tokenizer(str(folder))


def test_special_token_missing_from_the_vocabulary_is_reported(folder):
    configure(folder, pad_token="<pad>")
    with pytest.raises(TuneError, match=r"pad_token '<pad>', but tokenizer\.json has no such token"):
        Tokenizer(str(folder))


def test_conversation_without_a_template_is_refused(folder):
    with pytest.raises(TuneError, match=r"no chat template.*chat_template\.jinja"):
        Tokenizer(str(folder)).apply_chat_template([{"role": "user", "content": "hello"}])
