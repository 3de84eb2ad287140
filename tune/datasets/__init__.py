"""Data files to tokenised, packed and counted samples, and their order in training.

`load` goes this way: a `Source` gives rows, a `RowReader` makes samples of them, 64 rows a `Chunk`, the cache keeps
these as flat `Samples`, a `Dataset` packs them, and a `DataLoader` draws its training rows.

- row: one object of a source, such as a line of a JSONL file
- sample: token ids and labels of a row, or of a piece of one that is too long
- training row: one sample, or several that are packed; `Dataset.row`, and a row of a batch
- document: a sample in its place in a training row
- part: one of the datasets of a mixture

Where a new one goes:

- a type of file: a function in `sources/readers.py`, and its suffix in `sources/data_files.py`
- a conversation format: a function and its `Format` in `formats/formats.py`
- a rule of what is learned: `labels.py`
- a way to pack: `dataset.py`
- a way to mix: `mix.py`
"""

from tune.collators import Sample, collate, collate_inputs
from tune.datasets.dataset import Dataset, pack
from tune.datasets.display import MARKS, first_rows, histogram, marked, parts_of
from tune.datasets.formats.messages import checked_messages, conversation
from tune.datasets.from_path import load, ray
from tune.datasets.labels import tokenize_conversation
from tune.datasets.loader import DataLoader, GlobalBatch, require_batches, validation_batches
from tune.datasets.mix import Mixture, mix
from tune.datasets.prompts import Prompt, PromptLoader, Prompts, load_prompts, open_prompts, placed_rows
from tune.datasets.rows import RowReader
from tune.datasets.scores import add_scores, require_kept
from tune.datasets.sources.opening import open_source
from tune.datasets.stream import Stream
from tune.datasets.user_functions import called
from tune.datasets.warnings import beyond_positions, warnings_about
from tune.files import cache_folder

# Other names are for the packages of `tune` alone.
__all__ = [
    "DataLoader",
    "Dataset",
    "GlobalBatch",
    "Mixture",
    "Prompt",
    "PromptLoader",
    "Prompts",
    "RowReader",
    "Sample",
    "Stream",
    "add_scores",
    "collate",
    "collate_inputs",
    "load",
    "load_prompts",
    "mix",
    "pack",
    "ray",
    "require_batches",
    "require_kept",
    "tokenize_conversation",
    "validation_batches",
]
