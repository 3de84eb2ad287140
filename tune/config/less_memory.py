"""Settings that lower the memory of a run."""

from typing import Any

from omegaconf import DictConfig, OmegaConf

HALF, MISSING = object(), object()
# For each setting, the values that need less memory than the others. The first settings cost the least.
LOWER: dict[str, tuple[Any, ...]] = {
    "micro_batch_size": (1,),
    "loss.chunk_tokens": (256,),
    "loss_chunk_tokens": (256,),
    "optimizer._component_": ("torchao.optim.AdamW8bit",),
    "compute.activation_checkpointing": ("selective", "full"),
    "compute.activation_offload": (True,),
    "model.quantization": ("nf4",),
    "teacher.quantization": ("nf4",),
    "sampling.max_rows": (HALF,),
    "sampling.max_new_tokens": (HALF,),
    "max_seq_len": (HALF,),
    "compute.cpu_offload": (True,),
    "compute.master_dtype": ("bf16",),
}


def less_memory(cfg: DictConfig, has_gpu: bool) -> list[tuple[str, Any]]:
    """Return the settings, with new values, that can lower the memory of a run, those that cost the least first.

    Settings that the recipe does not have, or that are at their lowest, are left out. So are those that move tensors to
    the host, if there is no GPU.
    """
    changes = list[tuple[str, Any]]()
    for key, values in LOWER.items():
        now = OmegaConf.select(cfg, key, default=MISSING)
        if now is MISSING or (key.endswith("_offload") and not has_gpu):
            continue
        if values == (HALF,):
            values = (now // 2,) if isinstance(now, int) and now > 1 else ()
        elif now in values:
            values = values[values.index(now) + 1 :]
        elif type(now) is int and now < values[0]:
            values = ()
        changes += [(key, value) for value in values]
    return changes
