"""Wrap the forward of a module. This is the only place in `tune` that replaces a forward.

Parallelism, recomputation, offload, compilation and timing each wrap the forwards of some modules with `wrap`. `Wrap`
defines the nesting order; the order of the calls does not matter.

torch's hooks would not do: they run in the order of registration, and FSDP and users register their own. All hooks run
outside all wrappers: FSDP gathers first, and a user's hook sees the inputs and outputs of `module(...)`.
"""

import enum
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any, TypeAlias

from torch import nn

Forward: TypeAlias = Callable[..., Any]


class Wrap(enum.IntEnum):
    """Kinds of wrappers, outermost first. docs/architecture.md lists the setting and the reason for each position."""

    TOKENS = enum.auto()  # model: `cp` selects the process's part of the batch
    TIMING = enum.auto()  # block: measures the seconds that this process computes
    OFFLOAD = enum.auto()  # block: moves tensors saved for backward to the host
    COMPILE = enum.auto()  # block: compiles one graph, including the recomputation
    CHECKPOINT = enum.auto()  # block: recomputes activations in backward
    SHARES = enum.auto()  # FSDP units and experts: replaces parameters by the process's shares
    COMPILE_INSIDE = enum.auto()  # block: replaces COMPILE if a wrapper around it cannot be in a graph
    PLAN = enum.auto()  # block: a plan of `tp` frees the copies that the block's layers share
    HEAD = enum.auto()  # model: `tp` passes shares of the output weight to the loss
    EXCHANGE = enum.auto()  # parts of a block and the embedding: exchanges hidden states with peers


class Wrapped:
    """The forward `own` of a module and its wrappers, stored as the module's attribute `wrapped`. A deep copy of the
    module gets its own `Wrapped`, around the forward of the copy."""

    def __init__(self, own: Forward, wrappers: Mapping[Wrap, Callable[[Forward], Forward]]):
        self.own, self.wrappers = own, dict(wrappers)
        if Wrap.SHARES in wrappers and Wrap.COMPILE in wrappers:  # the functions of SHARES differ by block
            self.wrappers[Wrap.COMPILE_INSIDE] = self.wrappers.pop(Wrap.COMPILE)
        self.outermost = own
        for kind in reversed(self.order):
            self.outermost = self.wrappers[kind](self.outermost)

    @property
    def order(self) -> list[Wrap]:
        """The kinds of the wrappers, outermost first."""
        return sorted(self.wrappers)

    def __reduce__(self) -> tuple[Any, ...]:
        return Wrapped, (self.own, self.wrappers)


def wrap(module: nn.Module, kind: Wrap, wrapper: Callable[[Forward], Forward]) -> None:
    """Wrap the forward of `module` with `wrapper` at the position of `kind`, replacing any other wrapper of this kind.
    `wrapper` takes the inner forward and returns the outer one.

    To be copied with the module, a wrapper keeps the modules that it uses in a `functools.partial` or in attributes,
    not in a closure. It is called again whenever another wrapper is added.
    """
    now = _wrapped(module)
    own, others = (module.forward, {}) if now is None else (now.own, now.wrappers)
    record: Any = Wrapped(own, {**others, kind: wrapper})
    module.wrapped = record
    module.forward = MethodType(_run_wrapped, module)


def _run_wrapped(module: Any, *args: Any, **kwargs: Any) -> Any:
    """Run the forward of a wrapped module. This is a method so that `deepcopy` binds it to the copy and the compiler
    sees the same code for all blocks; other callables would be compiled once per block."""
    return module.wrapped.outermost(*args, **kwargs)


def _wrapped(module: nn.Module) -> Wrapped | None:
    return vars(module).get("wrapped")


def wrapper_of(module: nn.Module, kind: Wrap) -> Any:
    """Return the wrapper of this kind around the forward of `module`, or None."""
    record = _wrapped(module)
    return None if record is None else record.wrappers.get(kind)


def wrappers_of(module: nn.Module) -> list[Wrap]:
    """Return the kinds of the wrappers around the forward of `module`, outermost first."""
    record = _wrapped(module)
    return [] if record is None else record.order
