"""Text to tokens and conversations to supervised text, as the model's own tokenizer files say."""

from tune.tokenizers.chat_template import ChatTemplate, Message, Span
from tune.tokenizers.supervision import supervised_spans
from tune.tokenizers.tokenizer import Tokenizer, require_unicode
