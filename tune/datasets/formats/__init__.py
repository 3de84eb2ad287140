"""What a row of a dataset says: a conversation, a text, or tokens, and which part of it is to be learned."""

from tune.datasets.formats.columns import OtherMeaning, recognise, renamed, require_meaning
from tune.datasets.formats.content import Answers, Chat, Content, Plain, Row, Tokens, shown
from tune.datasets.formats.formats import FORMATS, Format, Kind
from tune.datasets.formats.messages import is_empty_answer

__all__ = [
    "FORMATS",
    "Answers",
    "Chat",
    "Content",
    "Format",
    "Kind",
    "OtherMeaning",
    "Plain",
    "Row",
    "Tokens",
    "is_empty_answer",
    "recognise",
    "renamed",
    "require_meaning",
    "shown",
]
