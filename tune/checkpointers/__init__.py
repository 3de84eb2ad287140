"""Weights in and out, and training states to continue from."""

from tune.checkpointers.checkpointer import Checkpointer
from tune.checkpointers.finite import require_finite
from tune.checkpointers.reading import checkpoint_at, read_trained
from tune.checkpointers.weights import (
    Pretrained,
    Random,
    check,
    hf_tensors,
    load_frozen,
    load_model,
    open_checkpoint,
    require_frozen,
    require_same_vocabulary,
)
from tune.checkpointers.writing import add_tokens, card, export, exported_types, model_card
