"""Turn data files into tokenized, packed and counted samples, and order them for training.

A row passes through four steps, each in a file or folder of the same name:

1. `read(path)` opens a source and cuts it into pieces, which yield numbered rows
2. `parse(row)` returns the row's content: a conversation, a text, tokens, or several answers to compare
3. `render` turns a content into tokens and labels
4. `Fit` takes of many tokenized rows what fits into `max_seq_len`, and counts what becomes of each row

`RowReader` takes a row through steps 2 and 3. The cache keeps the tokenized rows of a piece as a `RowBlock` of flat
arrays; `Samples` are spans of these, a `Dataset` packs them, and a `DataLoader` draws the training rows. `load`
combines all steps. Prompts, which a model answers, follow the same steps in `prompts`.

- row: one object of a source, such as a line of a JSONL file
- sample: token ids and labels of a row, or of a piece of a row that is too long
- training row: one sample, or several packed samples; `Dataset.row`, and a row of a batch
- document: a sample in its place in a training row
- part: one of the datasets of a mixture

Where to add:

- a file type: a function in `read/readers.py`, and its suffix in `read/data_files.py`
- a conversation format: a function and its `Format` in `parse/formats.py`
- a rule about which tokens are supervised: `render.py`
- a way to handle long rows: `fit.py`, and `cut.py` for conversations
- a way to pack: `dataset.py`
- a way to mix: `mix.py`

If a step gives other samples for the same rows, raise `FORMAT_VERSION` in `kept_files.py`.
"""

from tune.collators import Sample, collate, collate_inputs
from tune.datasets.dataset import Dataset, pack
from tune.datasets.display import MARKS, first_rows, histogram, marked, parts_of
from tune.datasets.from_path import load, ray
from tune.datasets.kept_files import kept
from tune.datasets.loader import DataLoader, GlobalBatch, require_batches, validation_batches
from tune.datasets.mix import Mixture, StreamMixture, mix
from tune.datasets.parse.messages import checked_messages, conversation
from tune.datasets.prompts import Prompt, PromptLoader, Prompts, load_prompts, open_prompts, placed_rows
from tune.datasets.render import tokenize_conversation
from tune.datasets.rows import RowReader
from tune.datasets.scores import add_scores, is_stored, require_kept, scores_file
from tune.datasets.stream import Stream
from tune.datasets.user_functions import called
from tune.datasets.warnings import beyond_positions, warnings_about
from tune.files import cache_folder

# The other imported names are for the packages of `tune` only.
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
    "StreamMixture",
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
    "scores_file",
    "tokenize_conversation",
    "validation_batches",
]
