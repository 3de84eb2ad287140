"""Read run folders, and write the report page for one or several runs."""

from tune.records.page import TEMPLATES, changed, samples, seconds, uses, write_report
from tune.records.record import (
    Record,
    differences,
    end,
    find,
    identity,
    is_done,
    is_run,
    json_object,
    number,
    prepare,
    read,
    recipe_of,
    start,
)

# Other names are internal to `tune`.
__all__ = [
    "Record",
    "differences",
    "end",
    "find",
    "identity",
    "is_done",
    "is_run",
    "json_object",
    "number",
    "prepare",
    "read",
    "recipe_of",
    "start",
    "write_report",
]
