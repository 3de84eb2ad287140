"""Load and export weights; save and restore training states."""

from tune.checkpointers.best import Best, more_is_better, unknown_direction
from tune.checkpointers.checkpointer import OF_ITSELF, STORED, Checkpointer
from tune.checkpointers.disk import (
    DIGESTS,
    DiskTensor,
    found_damage,
    has_weights,
    headers,
    load_torch_file,
    metadata_of,
    model_digest,
    require_floats,
    sampled_digest,
    shape_differences,
)
from tune.checkpointers.finite import require_finite
from tune.checkpointers.packed import num_packed, plain_tensors, quantization
from tune.checkpointers.reading import (
    TrainedWeights,
    checkpoint_at,
    cut_short,
    require_continuable,
    require_none_later,
)
from tune.checkpointers.weights import (
    Pretrained,
    Random,
    check_forward,
    full_tensors,
    hf_tensors,
    load_model,
    load_shard,
    open_checkpoint,
    require_same_vocabulary,
)
from tune.checkpointers.writing import (
    HUB_ID,
    add_tokens,
    card,
    export,
    exported_types,
    model_card,
    name_of,
    require_finite_on_all,
    save_tensors,
    sound,
    with_progress,
    write_tensors,
)

# Other names are internal to `tune`.
__all__ = [
    "Checkpointer",
    "Pretrained",
    "Random",
    "TrainedWeights",
    "add_tokens",
    "card",
    "check_forward",
    "checkpoint_at",
    "export",
    "exported_types",
    "hf_tensors",
    "load_model",
    "model_card",
    "open_checkpoint",
    "require_finite",
    "require_same_vocabulary",
]
