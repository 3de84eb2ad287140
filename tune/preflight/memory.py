"""Memory of a process over a step, by part, from the trace of a shortened model: what is alive at each moment."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tune.preflight.devices import Device
from tune.preflight.trace import Trace, Unit

GIB = 2**30
REDUCED = 4  # bytes of a gradient while FSDP reduces it: fp32
PARTS = ("weights", "gradients", "optimizer", "activations", "head_and_loss", "communication", "reserve")


@dataclass(frozen=True)
class Layout:
    """How a step is spread, in the words of the settings; `micro_batches` are those of a process."""

    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    micro_batch_size: int = 1
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    activation_offload: bool = False
    cpu_offload: bool = False
    reduce_every_micro_batch: bool = True
    optimizer_in_backward: bool = False
    micro_batches: int = 1

    @property
    def data(self) -> int:
        """Processes that read different rows."""
        return self.dp_replicate * self.dp_shard

    @property
    def size(self) -> int:
        return self.data * self.tp


def memory(
    trace: Trace, layout: Layout, states: float, plain: bool, device: Device
) -> tuple[str, dict[str, float], float]:
    """The moment of the peak of a step after the first, the bytes by part then, and bytes in host memory. `states` are
    the optimizer's bytes for a trained parameter."""
    whole, shards = trace.whole, layout.dp_shard
    gradients = whole.master / shards if layout.micro_batches > 1 else 0.0
    held = {"weights": whole.stored / shards, "gradients": gradients, "optimizer": whole.trained * states / shards}
    host = 0.0
    if not layout.reduce_every_micro_batch and layout.micro_batches > 1 and not plain:
        held["gradients"] += whole.trained * REDUCED
    if layout.cpu_offload:
        host = held["weights"] + held["optimizer"] + whole.master / shards
        held = dict.fromkeys(held, 0.0)
    if layout.activation_offload:
        host += trace.saved
    moments = {}
    for name, *parts in _moments(trace, layout, plain):
        moments[name] = held | dict(zip(PARTS[3:6], parts, strict=False))
        moments[name]["gradients"] += parts[3]
        moments[name]["reserve"] = device.reserve * GIB + device.reserve_share * sum(moments[name].values())
    peak = max(moments, key=lambda name: sum(moments[name].values()))
    return peak, moments[peak], host


def _moments(trace: Trace, layout: Layout, plain: bool) -> Iterator[tuple[str, float, float, float, float]]:
    """Moments of a step, and what is alive beside weights, states and the gradients of earlier micro-batches: in
    activations, of head and loss, for communication, in gradients of this micro-batch."""
    shards, root = layout.dp_shard, trace.others[-1]
    beside = max((each.gathered for each in trace.others[:-1]), default=0.0)
    adds = layout.micro_batches == 1 and not layout.cpu_offload and not layout.optimizer_in_backward
    embedded, tail = trace.embed.live, trace.loss.live
    everything = embedded + (0.0 if layout.activation_offload else trace.saved)
    last_gathered = max(kind.unit.gathered for kind in trace.blocks) if shards > 1 else 0.0  # until forward ends
    of_blocks = adds * sum(kind.number * kind.unit.master for kind in trace.blocks) / shards

    def reducing(unit: Unit) -> float:  # gradients in fp32, and the result
        return 0.0 if plain else REDUCED * unit.trained * (2 if shards == 1 else 1 + 1 / shards)

    yield "embedding", trace.embed.extra, 0.0, root.gathered + 2 * beside, 0.0
    for _, unit, forward, backward in trace.blocks:
        saved = 0.0 if layout.activation_offload else forward.live
        gathered = root.gathered + unit.gathered * (2 if shards > 1 else 1)  # the next block beside this one
        one = adds * unit.master / shards
        above = max(0.0, of_blocks - one)
        yield "forward of the last block", everything - saved + forward.extra, 0.0, gathered, 0.0
        yield "backward of the last block", everything + backward.extra, tail, gathered, 0.0
        waiting = gathered + (0.0 if plain else REDUCED * unit.trained)  # until the block above is reduced
        yield "backward of the block before the last", everything - saved + backward.extra, tail, waiting, one
        waiting += max(0.0, beside - unit.gathered) if shards > 1 else 0.0  # the embedding is the next one
        yield "backward of the first block", embedded + forward.live + backward.extra, tail, waiting, above
        reduced = root.gathered + unit.gradients + reducing(unit)
        yield "reduction of the first block", embedded, tail, 0.0 if plain else reduced, above
    yield "head and loss", everything, trace.loss.extra, root.gathered + last_gathered, 0.0
    yield "backward of the embedding", embedded + trace.rest.extra, tail, root.gathered + beside, of_blocks
    last = max(trace.others, key=lambda each: each.trained)
    reduced = 0.0 if plain else root.gathered + last.gradients + reducing(last)
    yield "reduction of embedding and head", 0.0, 0.0, reduced, of_blocks
    yield "optimizer step", 0.0, 0.0, 0.0, adds * trace.whole.master / shards


def bytes_of_states(make: Callable[[Any], Any], dtype: torch.dtype = torch.float32) -> float:
    """Bytes that the optimizer that `make` gives of groups keeps for each element of a matrix, by a step."""
    matrix = nn.Parameter(torch.zeros(512, 512, dtype=dtype))
    matrix.grad = torch.zeros_like(matrix)
    optimizer = make([{"params": [matrix], "in_blocks": True}])
    with torch.compiler.set_stance("force_eager"):
        optimizer.step()

    def size(tensor: Any) -> int:  # a tensor subclass is made of others
        if hasattr(tensor, "__tensor_flatten__"):
            return sum(size(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])
        return tensor.numel() * tensor.itemsize

    return sum(size(each) for each in optimizer.state[matrix].values() if isinstance(each, Tensor)) / matrix.numel()
