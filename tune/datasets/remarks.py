"""What is no mistake in a conversation, but seldom meant."""

import json

from tune.datasets.formats import Chat, is_empty_answer
from tune.tokenizers import Tokenizer


def remarks(chat: Chat, text: str, tokenizer: Tokenizer) -> list[str]:
    """Of a conversation and its rendering: the roles that the template leaves out, special tokens that messages
    spell out, which the model then reads as these tokens, and answers without content."""
    found = [
        f"{message['role']} left out by the template"
        for message in chat.messages
        if message["role"] != "assistant" and not _is_in(message["content"], text)
    ]
    for message in chat.messages:
        spelled = tokenizer.special_tokens_in(message.get("content") or "")
        found += [f"{token} spelled in {message['role']} text" for token in spelled]
    if any(is_empty_answer(message) and not message["train"] for message in chat.messages):
        found.append("empty answer, not learned")
    return list(dict.fromkeys(found))


def _is_in(content: str, text: str) -> bool:
    """Whether it is there, or its longest line, also as JSON has it: templates trim, and quote what tools say."""
    if content.strip() in text:
        return True
    line = max(map(str.strip, content.splitlines()), key=len, default="")
    return line in text or json.dumps(line, ensure_ascii=False)[1:-1] in text
