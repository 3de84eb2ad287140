"""The tensors of a model in Hugging Face format, for export, merging and samplers."""

from collections.abc import Callable, Collection, Iterator

from torch import Tensor, nn

from tune.checkpointers.weights import Pretrained
from tune.distributed import full_tensor
from tune.models.names import Names, disk_parts
from tune.quantization import NF4Weight


def hf_tensors(
    model: nn.Module, found: Collection[str] = (), base: Pretrained | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Name on disk and full tensor, one by one, of a model that may be sharded, adapted and quantised.

    All processes must iterate, since each tensor is gathered when it is its turn. Adapters are merged in fp32. Frozen
    tensors are read from `base`, the original weights, if it is given. Names are those of a checkpoint with the tensors
    `found`, including tensors that it has twice.
    """
    names = Names.of(model)
    on_disk = names.in_checkpoint(found)
    for name, full in full_tensors(model, base):
        yield from disk_parts(on_disk[name], full)
        yield from (
            (copy, full.clone()) for copy, original in names.copies.items() if original == name and copy in found
        )


def full_tensors(model: nn.Module, base: Pretrained | None = None) -> Iterator[tuple[str, Tensor]]:
    """As `hf_tensors`, by our names."""
    for name in Names.of(model).on_disk:
        owner, _, kind = name.rpartition(".")
        module = model.get_submodule(owner)
        tensor = getattr(module, kind)
        if base is not None and not getattr(tensor, "requires_grad", False):
            full = base.read(name)
        else:
            full = tensor.full() if isinstance(tensor, NF4Weight) else full_tensor(tensor.detach())
        merged: Callable[[Tensor], Tensor] | None = getattr(module, "merged", None)  # of an adapted module
        yield name, merged(full) if kind == "weight" and merged is not None else full
