"""Learned tokens of a conversation match transformers if the template marks them, else hand-made labels."""
# ruff: noqa: RUF001 - DeepSeek's bars

import importlib.util
import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from row_outcomes import outcomes

from tune.tokenizers import Tokenizer

SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<start_of_turn>", "<end_of_turn>", "<|end|>"]
SPECIAL += [f"<|{name}|>" for name in ("user", "assistant", "system", "start_header_id", "end_header_id")]
SPECIAL += [f"<|{name}|>" for name in ("start_of_role", "end_of_role", "START_OF_TURN_TOKEN", "END_OF_TURN_TOKEN")]
SPECIAL += ["<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>", "<｜User｜>", "<｜Assistant｜>"]


def each_message(text, prompt=""):
    """A template that writes `text` for each message and `prompt` as the generation prompt."""
    loop = "{% for m in messages %}" + text + "{% endfor %}"
    return loop + "{% if add_generation_prompt %}" + prompt + "{% endif %}"


def by_role(user, assistant):
    return "{% if m.role == 'user' %}" + user + "{% else %}" + assistant + "{% endif %}"


TEXT_OF = "{{ m.content }}"

# For each family: a template without marks, and the texts that it writes at the start, before a question,
# between question and answer, after the answer (learned with it), and after that.
BY_HAND = {
    "chatml": (
        each_message("<|im_start|>{{ m.role }}\n" + TEXT_OF + "<|im_end|>\n", "<|im_start|>assistant\n"),
        ("", "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n", "<|im_end|>", "\n"),
    ),
    "llama 3": (
        "<s>" + each_message(
            "<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n" + TEXT_OF + "<|eot_id|>",
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        ("<s>", "<|start_header_id|>user<|end_header_id|>\n\n",
         "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n", "<|eot_id|>", ""),
    ),
    "gemma": (
        "<s>" + each_message(
            "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n" + TEXT_OF + "<end_of_turn>\n",
            "<start_of_turn>model\n",
        ),
        ("<s>", "<start_of_turn>user\n", "<end_of_turn>\n<start_of_turn>model\n", "<end_of_turn>", "\n"),
    ),
    "mistral": (
        "<s>" + each_message(by_role("[INST] " + TEXT_OF + " [/INST]", TEXT_OF + "</s>")),
        ("<s>", "[INST] ", " [/INST]", "</s>", ""),
    ),
    "phi": (
        each_message("<|{{ m.role }}|>\n" + TEXT_OF + "<|end|>\n", "<|assistant|>\n"),
        ("", "<|user|>\n", "<|end|>\n<|assistant|>\n", "<|end|>", "\n"),
    ),
    "zephyr": (
        each_message("<|{{ m.role }}|>\n" + TEXT_OF + "</s>\n", "<|assistant|>\n"),
        ("", "<|user|>\n", "</s>\n<|assistant|>\n", "</s>", "\n"),
    ),
    "deepseek": (
        "<s>" + each_message(by_role("<｜User｜>" + TEXT_OF, "<｜Assistant｜>" + TEXT_OF + "</s>"), "<｜Assistant｜>"),
        ("<s>", "<｜User｜>", "<｜Assistant｜>", "</s>", ""),
    ),
    "granite": (
        each_message("<|start_of_role|>{{ m.role }}<|end_of_role|>" + TEXT_OF + "</s>\n",
                     "<|start_of_role|>assistant<|end_of_role|>"),
        ("", "<|start_of_role|>user<|end_of_role|>", "</s>\n<|start_of_role|>assistant<|end_of_role|>", "</s>", "\n"),
    ),
    "command": (
        "<s>" + each_message(
            "<|START_OF_TURN_TOKEN|>" + by_role("<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>")
            + TEXT_OF + "<|END_OF_TURN_TOKEN|>",
            "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
        ),
        ("<s>", "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>",
         "<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>", "<|END_OF_TURN_TOKEN|>", ""),
    ),
    "vicuna": (
        each_message(by_role("USER: " + TEXT_OF + " ", "ASSISTANT:" + TEXT_OF + "</s>"), "ASSISTANT:"),
        ("", "USER: ", " ASSISTANT:", "</s>", ""),
    ),
    "llama 2": (
        each_message(by_role("<s>[INST] " + TEXT_OF + " [/INST]", " " + TEXT_OF + " </s>")),
        ("", "<s>[INST] ", " [/INST]", "</s>", ""),
    ),
}  # fmt: skip
MODES = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def chat(turns):
    roles = ("user", "assistant")
    return [{"role": role, "content": text} for turn in turns for role, text in zip(roles, turn, strict=True)]


def read(tokenizer, messages, **options):
    (outcome,) = outcomes(tokenizer, 100_000, [("row", {"messages": messages})], ignore=["<image>"], **options)
    assert outcome.mistake is None
    return outcome.samples[0]


@pytest.fixture(scope="module", params=BY_HAND)
def by_hand(request, byte_checkpoint, tmp_path_factory):
    """A tokenizer with one of the templates, and the texts that surround its questions and answers."""
    template, pieces = BY_HAND[request.param]
    folder = byte_checkpoint(tmp_path_factory.mktemp("checkpoint"), SPECIAL, template)
    return Tokenizer(str(folder)), pieces


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
ANSWER = TEXT.filter(bool)  # an empty answer is not learned


@MODES
@given(turns=st.lists(st.tuples(TEXT, ANSWER), min_size=1, max_size=4))
def test_labels_match_hand_made_ones(by_hand, turns):
    tokenizer, (start, before, between, end, after) = by_hand
    space = " " if before == "<s>[INST] " else ""  # Llama 2 puts spaces around an answer
    pieces = [(start, False)]
    for question, answer in turns:
        pieces += [(before + question + between, False), (space + answer + space + end, True), (after, False)]
    encoded = [(token, learned) for text, learned in pieces for token in tokenizer.encode(text)]
    sample = read(tokenizer, chat(turns))
    assert sample.tokens.tolist() == [token for token, _ in encoded]
    assert sample.labels.tolist() == [*(token if learned else -100 for token, learned in encoded[1:]), -100]


@MODES
@given(turns=st.lists(st.tuples(TEXT, ANSWER), min_size=2, max_size=4))
def test_mask_of_a_prefix_is_a_prefix_of_the_mask(by_hand, turns):
    tokenizer, _ = by_hand
    whole, part = read(tokenizer, chat(turns)), read(tokenizer, chat(turns[:-1]))
    length = len(part.tokens)
    assert whole.tokens[:length].tolist() == part.tokens.tolist()
    assert whole.labels[: length - 1].tolist() == part.labels[:-1].tolist()


def test_other_roles_can_be_learned_with_the_assistant(by_hand):
    tokenizer, _ = by_hand
    sample = read(tokenizer, chat([("ask", "say"), ("more", "end")]), train_on=["user"])
    learned = tokenizer.decode([label for label in sample.labels if label != -100])
    assert re.sub(r"<[^>]*>", "|", learned).replace("|", "") == "askmore"


# templates with marks: transformers is the oracle


CONVERSATIONS = {
    "one turn": chat([("Hi there", "Hello!")]),
    "two turns": chat([("1?", "One"), ("2?", "Two 🦊 é\nlines")]),
    "system": [{"role": "system", "content": "Be short."}, *chat([("1?", "One")])],
    "tool": [
        {"role": "user", "content": "W?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": {"name": "get", "arguments": {"at": "home"}}}],
        },
        {"role": "tool", "name": "get", "content": "12"},
        {"role": "assistant", "content": "It is 12."},
    ],
    "reasoning": [*chat([("1?", "One")]), {"role": "user", "content": "2?"},
                  {"role": "assistant", "content": "Two", "reasoning_content": "so"}],
}  # fmt: skip


def marked_templates():
    """TRL's versions of many families' templates, which have marks."""
    trl = importlib.util.find_spec("trl")
    folder = Path(trl.origin).parent / "chat_templates" if trl and trl.origin else Path("absent")
    return [pytest.param(file, id=file.stem) for file in sorted(folder.glob("*_training.jinja"))]


@pytest.mark.parametrize("file", marked_templates())
def test_labels_match_transformers(file, byte_checkpoint, tmp_path):
    transformers = pytest.importorskip("transformers")
    template = file.read_text()
    special = {*SPECIAL, *re.findall(r"<[|｜][^|｜<>\s]+[|｜]>|</?[a-z_]+_of_[a-z]+>|<turn\|>|<\|turn>", template)}
    folder = byte_checkpoint(tmp_path / "checkpoint", sorted(special), template)
    reference = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer = Tokenizer(str(folder), date=None)  # transformers uses today's date
    compared = 0
    for messages in CONVERSATIONS.values():
        try:
            theirs = reference.apply_chat_template(messages, return_assistant_tokens_mask=True, return_dict=True)
        except Exception:  # the template does not support such conversations
            continue
        text = tokenizer.decode(theirs["input_ids"])
        if "tool_calls" in messages[1] and "get" not in text:
            continue  # refused: the template leaves the call out
        sample = read(tokenizer, messages)
        targets = zip(theirs["input_ids"][1:], theirs["assistant_masks"][1:], strict=True)
        assert sample.tokens.tolist() == theirs["input_ids"]
        assert sample.labels.tolist() == [*(token if learned else -100 for token, learned in targets), -100]
        compared += 1
    assert compared or "'text'" in template  # templates that take content only in parts
