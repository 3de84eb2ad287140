"""Templates and EOS chosen by a setting: the text they render, the tokens they need, the files they save."""

import json

import pytest

from tune.errors import TuneError
from tune.tokenizers import Tokenizer

transformers = pytest.importorskip("transformers")

MESSAGES = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "1?"},
    {"role": "assistant", "content": " One "},
    {"role": "user", "content": "2?"},
    {"role": "assistant", "content": "Two"},
]
# The formats that the models' makers document.
EXPECTED = {
    "chatml": (
        "<s><|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\n1?<|im_end|>\n<|im_start|>assistant\n One "
        "<|im_end|>\n<|im_start|>user\n2?<|im_end|>\n<|im_start|>assistant\n",
        "Two<|im_end|>\n",
        "<|im_end|>",
    ),
    "llama3": (
        "<s><|start_header_id|>system<|end_header_id|>\n\nBe short.<|eot_id|><|start_header_id|>user<|end_header_id|>"
        "\n\n1?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nOne<|eot_id|><|start_header_id|>user"
        "<|end_header_id|>\n\n2?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        "Two<|eot_id|>",
        "<|eot_id|>",
    ),
    "gemma": (
        "<s><start_of_turn>user\nBe short.\n\n1?<end_of_turn>\n<start_of_turn>model\nOne<end_of_turn>\n"
        "<start_of_turn>user\n2?<end_of_turn>\n<start_of_turn>model\n",
        "Two<end_of_turn>\n",
        "<end_of_turn>",
    ),
    "mistral": ("<s>[INST] Be short.\n\n1?[/INST] One</s>[INST] 2?[/INST]", " Two</s>", "</s>"),
    "plain": (
        "<s>System: Be short.\n\nUser: 1?\n\nAssistant:  One </s>\n\nUser: 2?\n\nAssistant:",
        " Two</s>\n\n",
        "</s>",
    ),
}


def add_tokens(folder, *tokens, special=True):
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Fast

    tokenizer = Fast.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(token, special=special, normalized=False) for token in tokens])
    tokenizer.save(str(folder / "tokenizer.json"))


@pytest.mark.parametrize(("name", "expected"), EXPECTED.items())
def test_shipped_templates(folder, tmp_path, name, expected):
    prompt, answer, end = expected
    add_tokens(folder, "<start_of_turn>", "<end_of_turn>")
    tokenizer = Tokenizer(str(folder), chat_template=name)
    assert tokenizer.apply_chat_template(MESSAGES[:-1], add_generation_prompt=True) == prompt
    text, spans = tokenizer.supervised_spans(MESSAGES)
    assert text == prompt + answer
    assert [text[start:end] for start, end in spans][-1] == answer.rstrip()
    assert tokenizer.stop_ids == {tokenizer.eos_id, *tokenizer.encode(end)}
    tokenizer.save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert theirs.apply_chat_template(MESSAGES, tokenize=False) == text
    assert theirs.apply_chat_template(MESSAGES, return_dict=True)["input_ids"] == tokenizer.encode(text)


@pytest.mark.parametrize("name", EXPECTED)
def test_shipped_templates_with_other_role_orders(folder, name):
    """Every content is rendered once, and answers are learned in any position."""
    add_tokens(folder, "<start_of_turn>", "<end_of_turn>")
    tokenizer = Tokenizer(str(folder), chat_template=name)
    for roles in ("au", "sau", "suua", "uaua", "usa", "uaa"):
        named = {"s": "system", "a": "assistant", "u": "user"}
        messages = [{"role": named[role], "content": f"{role}{at}!"} for at, role in enumerate(roles)]
        text, spans = tokenizer.supervised_spans(messages)
        assert [text.count(message["content"]) for message in messages] == [1] * len(messages)
        learned = [text[start:end] for start, end in spans]
        answers = [message["content"] for message in messages if message["role"] == "assistant"]
        assert len(learned) == len(answers) and all(map(str.__contains__, learned, answers))
        assert not any(f"{role}{at}!" in "".join(learned) for at, role in enumerate(roles) if role != "a")


def test_tokenizer_without_bos(folder):
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer | {"post_processor": None}))
    text = Tokenizer(str(folder), chat_template="chatml").apply_chat_template(MESSAGES[:2])
    assert text == "<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\n1?<|im_end|>\n"


def test_missing_tokens_are_reported(folder):
    with pytest.raises(TuneError) as error:
        Tokenizer(str(folder), chat_template="gemma")
    assert "tokenizer.chat_template=gemma" in str(error.value)
    assert "no token '<start_of_turn>', '<end_of_turn>'" in str(error.value)
    assert "chatml, llama3, mistral, plain, whose tokens it has" in str(error.value)
    assert f"tune add-tokens {folder} OUT '<start_of_turn>' '<end_of_turn>'" in str(error.value)
    with pytest.raises(TuneError, match=r"tokenizer.eos_token=<eos>: the tokenizer in .* has no token '<eos>'"):
        Tokenizer(str(folder), eos_token="<eos>")
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>"}))
    with pytest.raises(TuneError, match=r"chat_template=plain uses eos_token, .* Set tokenizer.eos_token"):
        Tokenizer(str(folder), chat_template="plain")
    assert Tokenizer(str(folder), chat_template="plain", eos_token="</s>").eos_id == 1


def test_missing_template_error_names_the_setting(folder):
    tokenizer = Tokenizer(str(folder))
    with pytest.raises(TuneError, match=r"tokenizer.chat_template to chatml, llama3, mistral, plain \(whose tokens"):
        tokenizer.require_chat_template()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (None, r"mine.jinja is neither a readable file \(.*No such file.*\) nor one of chatml, gemma, llama3"),
        ("{% for m in messages %}", r"tokenizer.chat_template=.*mine.jinja is not a valid Jinja template: line 1"),
        ("{% for m in messages %}<|turn|>{{ m.content }}{% endfor %}", r"mine.jinja: .* has no token '<\|turn\|>'"),
    ],
)
def test_template_files_are_checked(folder, tmp_path, source, message):
    if source:
        (tmp_path / "mine.jinja").write_text(source)
    with pytest.raises(TuneError, match=message):
        Tokenizer(str(folder), chat_template=str(tmp_path / "mine.jinja"))
    with pytest.raises(TuneError, match=r"Did you mean 'chatml'\?"):
        Tokenizer(str(folder), chat_template="chatlm")


def test_template_file_replaces_all_templates_of_the_folder(folder, tmp_path):
    (folder / "additional_chat_templates").mkdir()
    for name in ("chat_template", "additional_chat_templates/tool_use"):
        (folder / f"{name}.jinja").write_text("the base's")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": "the base's"}))
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": "</s>"}))
    (tmp_path / "mine.jinja").write_text("mine {{ eos_token }}")
    tokenizer = Tokenizer(str(folder), chat_template=str(tmp_path / "mine.jinja"), eos_token="<|im_end|>")
    assert tokenizer.apply_chat_template([], tools=[{}]) == "mine <|im_end|>"
    (tmp_path / "saved").mkdir()
    tokenizer.save(tmp_path / "saved")
    saved, theirs = (
        Tokenizer(str(tmp_path / "saved")),
        transformers.AutoTokenizer.from_pretrained(tmp_path / "saved"),
    )
    assert saved.chat_template == theirs.chat_template == "mine {{ eos_token }}"
    assert saved.special_tokens["eos_token"] == theirs.eos_token == "<|im_end|>"
    assert "the base's" not in "".join(file.read_text() for file in (tmp_path / "saved").rglob("*") if file.is_file())
    assert tokenizer.fingerprint != Tokenizer(str(folder)).fingerprint  # data is prepared again


@pytest.mark.parametrize("kind", ["word", "added"])
def test_end_of_turn_becomes_a_special_token(folder, tmp_path, kind):
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["added_tokens"] = [
        token | {"special": False} if token["content"] == "<|im_end|>" else token
        for token in tokenizer["added_tokens"]
        if kind == "added" or token["content"] != "<|im_end|>"
    ]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    ours = Tokenizer(str(folder), chat_template="chatml")
    end = ours.vocabulary["<|im_end|>"]
    assert end in ours.stop_ids and ours.encode("a<|im_end|>")[-1] == end
    ours.save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert theirs("a<|im_end|>")["input_ids"][-1] == end
    assert theirs.decode([end], skip_special_tokens=True) == ""


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"eos_token_id": 1}, {"eos_token_id": [1, 3]}),
        ({"eos_token_id": [5, 3]}, {"eos_token_id": [5, 3, 1]}),
        ({"eos_token_id": [1, 3]}, {"eos_token_id": [1, 3]}),
        ({"eos_token_id": None}, {"eos_token_id": [1, 3]}),
        ({}, {"eos_token_id": [1, 3]}),
        ({"text_config": {"eos_token_id": 1}}, {"text_config": {"eos_token_id": [1, 3]}}),
    ],
)
def test_stop_ids_are_added_to_the_models_configs(folder, tmp_path, config, expected):
    for name in ("config.json", "generation_config.json"):
        (tmp_path / name).write_text(json.dumps(config))
    Tokenizer(str(folder), chat_template="chatml").save(tmp_path)
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / name).read_text()) == expected
