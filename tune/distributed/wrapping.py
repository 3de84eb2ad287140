"""The order of all that encloses the forward of a module: the only place in `tune` that replaces a forward.

Parallelism, recomputation, offload, compilation and timing each put a wrapper around the forwards of some modules with
`wrap`. The order of the wrappers is that of `Wrap`, not that of the calls.

Wrappers are not hooks of torch, as hooks run in the order of their registration, and FSDP and users register their
own. All hooks run outside of all wrappers: FSDP gathers before them, and a user's hook sees what `module(...)` gets and
returns.
"""

import enum
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any, TypeAlias

from torch import nn

Forward: TypeAlias = Callable[..., Any]


class Wrap(enum.IntEnum):
    """What may be around a forward, outermost first. docs/architecture.md says which setting puts it there, and why it
    is where it is."""

    TOKENS = enum.auto()  # of the model: `cp` takes the process's part of the batch
    TIMING = enum.auto()  # of a block: the seconds that this process computes
    OFFLOAD = enum.auto()  # of a block: what backward needs goes to the host
    COMPILE = enum.auto()  # of a block: one graph, with the recomputation in it
    CHECKPOINT = enum.auto()  # of a block: activations are computed again in backward
    SHARES = enum.auto()  # of what FSDP gathers at a time, and of experts: parameters are the process's shares
    COMPILE_INSIDE = enum.auto()  # of a block: in place of COMPILE, where that would enclose what is no part of a graph
    PLAN = enum.auto()  # of a block: a plan of `tp` frees what the block's layers have shared
    HEAD = enum.auto()  # of the model: `tp` gives a loss shares of the output weight
    EXCHANGE = enum.auto()  # of what is in a block, and of the embedding: hidden states go to and come from peers


class Wrapped:
    """The forward `own` of a module inside of its wrappers, as the module's attribute `wrapped`. A deep copy of the
    module has its own, which encloses the forward of the copy."""

    def __init__(self, own: Forward, wrappers: Mapping[Wrap, Callable[[Forward], Forward]]):
        self.own, self.wrappers = own, dict(wrappers)
        if Wrap.SHARES in wrappers and Wrap.COMPILE in wrappers:  # shares are other functions for each block
            self.wrappers[Wrap.COMPILE_INSIDE] = self.wrappers.pop(Wrap.COMPILE)
        self.outermost = own
        for kind in reversed(self.order):
            self.outermost = self.wrappers[kind](self.outermost)

    @property
    def order(self) -> list[Wrap]:
        """What is around the forward, outermost first."""
        return sorted(self.wrappers)

    def __reduce__(self) -> tuple[Any, ...]:
        return Wrapped, (self.own, self.wrappers)


def wrap(module: nn.Module, kind: Wrap, wrapper: Callable[[Forward], Forward]) -> None:
    """Put `wrapper`, which makes a forward of the one inside of it, around the forward of `module`, in the place of
    its kind. It replaces another one of this kind.

    To be copied with the module, a wrapper has the modules that it uses as arguments of a `functools.partial` or as
    attributes, not in a closure. It is called again whenever another one is added.
    """
    now = _wrapped(module)
    own, others = (module.forward, {}) if now is None else (now.own, now.wrappers)
    record: Any = Wrapped(own, {**others, kind: wrapper})
    module.wrapped = record
    module.forward = MethodType(_run_wrapped, module)


def _run_wrapped(module: Any, *args: Any, **kwargs: Any) -> Any:
    """The forward of a wrapped module: its method, as `deepcopy` binds it to the copy, and as the compiler, which would
    compile each block anew for another callable, takes it for that of all blocks."""
    return module.wrapped.outermost(*args, **kwargs)


def _wrapped(module: nn.Module) -> Wrapped | None:
    return vars(module).get("wrapped")


def wrapper_of(module: nn.Module, kind: Wrap) -> Any:
    """The wrapper of this kind around the forward of `module`; None if there is none."""
    record = _wrapped(module)
    return None if record is None else record.wrappers.get(kind)


def wrappers_of(module: nn.Module) -> list[Wrap]:
    """The kinds of what is around the forward of `module`, outermost first."""
    record = _wrapped(module)
    return [] if record is None else record.order
