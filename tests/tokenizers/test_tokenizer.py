"""The tokenizer gives the ids that transformers gives for the same folder."""

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tune.errors import TuneError
from tune.tokenizers import Tokenizer

transformers = pytest.importorskip("transformers")

CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


def configure(folder: Path, **changes: object) -> None:
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def write_json(file: Path, content: object) -> None:
    file.write_text(json.dumps(content))


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.one_of(st.text(), st.sampled_from(["<s>", "</s>", "<|im_end|>", " hello", "\n\n"]))).map("".join))
def test_encodes_as_transformers_does(folder, text):
    reference = transformers.AutoTokenizer.from_pretrained(folder)
    ours = Tokenizer(str(folder))
    assert ours.encode(text) == reference.encode(text, add_special_tokens=False)
    assert ours.encode(text, add_special_tokens=True) == reference.encode(text)
    assert ours.decode(ours.encode(text)) == reference.decode(reference.encode(text, add_special_tokens=False))


def test_names_the_special_tokens(folder):
    tokenizer = Tokenizer(str(folder))
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (0, 1, None)
    assert tokenizer.vocab_size == len(transformers.AutoTokenizer.from_pretrained(folder))
    assert tokenizer.prefix_ids == [0]


def test_offsets_point_into_the_text(folder):
    text = "hello the 🦊 fox"
    (encoding,) = Tokenizer(str(folder)).encode_with_offsets([text])
    covered = sorted({at for start, end in encoding.offsets for at in range(start, end)})
    assert covered == list(range(len(text)))


def test_truncation_and_padding_in_the_file_are_off(folder):
    import tokenizers

    file = str(folder / "tokenizer.json")
    saved = tokenizers.Tokenizer.from_file(file)
    saved.enable_truncation(2)
    saved.enable_padding(length=64)
    saved.save(file)
    assert Tokenizer(str(folder)).decode(Tokenizer(str(folder)).encode("the quick brown fox")) == "the quick brown fox"


def test_eos_comes_from_the_generation_config_if_the_tokenizer_names_none(folder):
    configure(folder, eos_token=None)
    assert Tokenizer(str(folder)).eos_id is None
    write_json(folder / "generation_config.json", {"eos_token_id": [6, 1]})
    assert Tokenizer(str(folder)).eos_id == 6


def test_stops_at_eos_and_at_the_end_of_turn(folder):
    configure(folder, chat_template=CHATML)
    write_json(folder / "generation_config.json", {"eos_token_id": [1, 6]})
    assert Tokenizer(str(folder)).stop_ids == {1, 6, 3}  # </s>, <|eot_id|>, <|im_end|>


def test_the_template_file_wins_over_the_config(folder):
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


def test_save_copies_the_files_byte_for_byte(folder, tmp_path):
    (folder / "chat_template.jinja").write_bytes(b"{{ messages }}\r\n")
    (folder / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "export").mkdir()
    Tokenizer(str(folder)).save(tmp_path / "export")
    names = ["chat_template.jinja", "tokenizer.json", "tokenizer_config.json"]
    assert sorted(file.name for file in (tmp_path / "export").iterdir()) == names
    assert all((tmp_path / "export" / name).read_bytes() == (folder / name).read_bytes() for name in names)


def test_folder_without_tokenizer(tmp_path):
    (tmp_path / "tokenizer.model").touch()
    with pytest.raises(TuneError, match=r"no tokenizer\.json in .*found: tokenizer\.model"):
        Tokenizer(str(tmp_path))
    with pytest.raises(TuneError, match="no such folder"):
        Tokenizer(str(tmp_path / "absent"))


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_malformed_file(folder, name):
    (folder / name).write_text("{")
    with pytest.raises(TuneError, match=f"{name} is not"):
        Tokenizer(str(folder))


def test_special_token_that_the_vocabulary_lacks(folder):
    configure(folder, pad_token="<pad>")
    with pytest.raises(TuneError, match=r"'<pad>' as pad_token, but tokenizer\.json has no such token"):
        Tokenizer(str(folder))


def test_conversation_without_template(folder):
    with pytest.raises(TuneError, match=r"no chat template.*chat_template\.jinja"):
        Tokenizer(str(folder)).apply_chat_template([{"role": "user", "content": "hello"}])
