"""Tokenize text and render conversations, with supervised spans, by the files of a model's own tokenizer."""

from tune.tokenizers.beginnings import Beginnings
from tune.tokenizers.chat_template import ChatTemplate, Message, Span
from tune.tokenizers.encoded import Encoded
from tune.tokenizers.folder import mapping_in
from tune.tokenizers.picture_processor import PictureFile, PictureProcessor
from tune.tokenizers.ranks import LLAMA3_WORDS, QWEN_WORDS
from tune.tokenizers.supervision import PROBE, around_content, common_prefix, supervised_spans
from tune.tokenizers.tokenizer import Tokenizer, require_ours, require_unicode

# The other imported names are for the packages of `tune` only.
__all__ = [
    "ChatTemplate",
    "Message",
    "Span",
    "Tokenizer",
    "require_unicode",
    "supervised_spans",
]
