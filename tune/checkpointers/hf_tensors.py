"""The tensors of a model in training as Hugging Face has them: what is exported, merged, or handed to a sampler."""

from collections.abc import Callable, Collection, Iterator

from torch import Tensor, nn

from tune.checkpointers.weights import Pretrained
from tune.distributed import full_tensor
from tune.models.names import Names, disk_parts
from tune.quantization import NF4Weight


def hf_tensors(
    model: nn.Module, found: Collection[str] = (), base: Pretrained | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Name on disk and full tensor, one after the other, of a model that may be sharded, adapted and quantised.

    All processes must iterate: each tensor is gathered when it is asked for. Adapters are merged in, in fp32. What is
    frozen is read from `base`, where the original weights are, if it is given; otherwise it is as the model holds it.
    Names are those that a checkpoint with the tensors `found` has, tensors that it holds twice included.
    """
    names = Names.of(model)
    for name, on_disk in names.in_checkpoint(found).items():
        owner, _, kind = name.rpartition(".")
        module = model.get_submodule(owner)
        tensor = getattr(module, kind)
        if base is not None and not getattr(tensor, "requires_grad", False):
            full = base.read(name)
        else:
            full = tensor.full() if isinstance(tensor, NF4Weight) else full_tensor(tensor.detach())
        merged: Callable[[Tensor], Tensor] | None = getattr(module, "merged", None)  # of an adapted module
        if kind == "weight" and merged is not None:
            full = merged(full)
        yield from disk_parts(on_disk, full)
        yield from (
            (copy, full.clone()) for copy, original in names.copies.items() if original == name and copy in found
        )
