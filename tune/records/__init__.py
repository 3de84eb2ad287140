"""Run folders as they stand: what one says of its run, and the page that shows one or several."""

from tune.records.page import write_report
from tune.records.record import (
    FILES,
    Record,
    differences,
    end,
    find,
    identity,
    json_object,
    number,
    read,
    recipe_of,
    start,
)
