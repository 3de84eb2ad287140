"""Real vocabularies and templates from fetch_real.py: every string and conversation matches the reference."""

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from sample_texts import conversations, texts
from tokenizer_references import sentencepiece_reference, tekken_reference, tiktoken_reference, transformers_rendering

from tune.errors import TuneError
from tune.tokenizers import ChatTemplate, Tokenizer, supervised_spans
from tune.tokenizers.ranks import LLAMA3_WORDS, QWEN_WORDS

FOLDER = Path(os.environ.get("TUNE_REAL_TOKENIZERS", "no such folder")).expanduser()
TOKENIZERS = sorted(file.parent for pattern in ("tok*", "tek*", "*.tiktoken") for file in FOLDER.glob(f"*/{pattern}"))
TEMPLATES = sorted(FOLDER.glob("templates/*.jinja"))
pytestmark = pytest.mark.skipif(not TOKENIZERS, reason="TUNE_REAL_TOKENIZERS names no folder filled by fetch_real.py")


def reference(folder: Path) -> tuple[Callable[[str], list[int]], Callable[[list[int]], str]]:
    """Return the functions that encode plain text and decode ids."""
    if (folder / "tokenizer.json").exists():
        from transformers import AutoTokenizer

        theirs = AutoTokenizer.from_pretrained(folder)
        return lambda text: theirs.encode(text, add_special_tokens=False, split_special_tokens=True), theirs.decode
    if (folder / "tekken.json").exists():
        return tekken_reference(folder / "tekken.json")
    if (folder / "qwen.tiktoken").exists():
        return tiktoken_reference(folder / "qwen.tiktoken", QWEN_WORDS, normalize="NFC")
    if folder.name.startswith("llama3"):
        return tiktoken_reference(folder / "tokenizer.model", LLAMA3_WORDS)
    return sentencepiece_reference(folder / "tokenizer.model")


@pytest.mark.parametrize("folder", dict.fromkeys(TOKENIZERS), ids=lambda folder: folder.name)
def test_encodes_and_decodes_like_the_reference(folder):
    ours = Tokenizer(str(folder))
    encode, decode = reference(folder)
    for text in texts(2000):
        ids = encode(text)
        assert ours.encode(text, parse_special_tokens=False) == ids, text
        assert ours.decode(ids) == decode(ids), text
        stream = ours.stream()
        assert "".join([*map(stream.add, ids), stream.finish()]) == ours.decode(ids), text


@pytest.mark.parametrize("folder", dict.fromkeys(TOKENIZERS), ids=lambda folder: folder.name)
def test_saved_tokenizer_gives_the_same_ids_in_transformers(folder, tmp_path):
    from transformers import AutoTokenizer

    ours = Tokenizer(str(folder))
    added = ours.add_tokens(["<|one|>", "<|two|>"])
    ours.save(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert theirs.convert_tokens_to_ids(["<|one|>", "<|two|>"]) == added
    for text in texts(2000):
        text = f"{text}<|one|>{text[:5]} <|two|>"
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False), text
    assert ours.encode("a", add_special_tokens=True) == theirs.encode("a")


@pytest.mark.parametrize("file", TEMPLATES, ids=lambda file: file.stem)
def test_renders_like_transformers(file):
    source = file.read_text(encoding="utf-8")
    variables = {"bos_token": "<s>", "eos_token": "</s>"}
    template, theirs = ChatTemplate(source, variables), transformers_rendering(source, variables)
    for conversation in conversations(200):
        try:
            expected = theirs(**conversation)
        except Exception as refusal:
            with pytest.raises(TuneError) as error:
                template.render(**conversation)
            assert str(refusal) in str(error.value)
        else:
            assert template.render(**conversation) == expected


@pytest.mark.parametrize("file", TEMPLATES, ids=lambda file: file.stem)
def test_conversations_that_start_with_an_answer(file):
    """Both answers of the rendered text are learned, followed by at most one token."""
    source, variables = file.read_text(encoding="utf-8"), {"bos_token": "<s>", "eos_token": "</s>"}
    messages = [{"role": role, "content": role.upper()} for role in ("assistant", "user", "assistant")]
    special = re.compile(r"<[|\uff5c][^|\uff5c<>\s]+[|\uff5c]>|<\w+_of_\w+>|<turn\|>|</s>")
    try:
        expected = transformers_rendering(source, variables)(messages)
    except Exception:
        pytest.skip("the template refuses them")
    if "ASSISTANT" not in expected:
        pytest.skip("the template is for content in parts")
    try:
        text, spans = supervised_spans(ChatTemplate(source, variables), messages, special)
    except TuneError as refusal:
        assert "ends the generation prompt with" in str(refusal)
        return
    assert text == expected
    learned = [text[start:end].partition("ASSISTANT") for start, end in spans if "ASSISTANT" in text[start:end]]
    assert len(learned) == 2
    assert not any("USER" in before or special.sub("", after).strip() for before, _, after in learned)


@pytest.mark.parametrize(("folder", "name", "theirs"), [("llama3", "llama3", "llama3"), ("gemma3", "gemma", "gemma3")])
def test_shipped_templates_match_the_families(folder, name, theirs):
    tokenizer = Tokenizer(str(FOLDER / folder), chat_template=name)
    source = (FOLDER / "templates" / f"{theirs}.jinja").read_text(encoding="utf-8")
    render = transformers_rendering(source, {key: tokenizer.special_tokens[key] for key in ("bos_token", "eos_token")})
    compared = 0
    for conversation in conversations(200):
        messages = [message for message in conversation["messages"] if not message.get("tool_calls")]
        try:
            expected = render(messages, add_generation_prompt=conversation["add_generation_prompt"])
        except Exception:  # the original template refuses more
            continue
        assert tokenizer.apply_chat_template(messages, conversation["add_generation_prompt"]) == expected
        compared += 1
    assert compared > 50
