"""Decode the next tokens of all rows in steps of one shape, which a GPU replays as a CUDA graph."""

import gc
import warnings
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tune.models import Decoder

STEPS = 8  # tokens per row between two synchronizations with the host
# Shapes of steps that a model has run. A step must run once before capture, so that its kernels are loaded.
SHAPES: WeakKeyDictionary[nn.Module, set[tuple[int, int]]] = WeakKeyDictionary()
FEWEST_SLOTS = 512  # the smallest length of a captured step; others have twice that, four times that, ...


class Decoding:
    """Sample the next tokens of the first rows of a cache.

    The last tokens, their positions and the chosen tokens stay on the device; the host reads them once per `steps`
    tokens. On a GPU a step is captured as a CUDA graph, one per number of rows and bucket of lengths, and replayed: for
    a small model, launching the kernels takes longer than running them. On a CPU `steps` is 1, since tokens after the
    end of a row would cost time.

    `choose` returns ids and log-probs for logits `[rows, vocab]` and random numbers `[rows]`. Weights must not move in
    memory while this object is in use.
    """

    def __init__(self, model: Any, cache: Any, rows: int, capacity: int, choose: Callable[..., tuple[Tensor, Tensor]]):
        self.model, self.cache, self.rows, self.capacity, self.choose = model, cache, rows, capacity, choose
        self.device = device = next(model.parameters()).device
        self.steps = 1 if device.type == "cpu" else STEPS
        self.tokens = torch.zeros(rows, 1, dtype=torch.long, device=device)
        self.positions = torch.zeros_like(self.tokens)
        self.uniforms = torch.zeros(
            rows, self.steps, dtype=torch.float32 if device.type == "mps" else torch.float64, device=device
        )
        self.chosen = torch.zeros(2, rows, self.steps, dtype=torch.int32, device=device)
        self.step = torch.zeros(1, dtype=torch.long, device=device)  # since the last synchronization
        self.width = 0  # rows of a captured step, including ended ones
        self.graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        self.captures = device.type == "cuda" and _can_capture(model)
        self.pool = torch.cuda.graph_pool_handle() if self.captures else None

    def __call__(self, tokens: list[int], positions: list[int], uniforms: list[list[float]]) -> Tensor:
        """Sample after the last `tokens` of rows 0, 1, ..., at `positions`, one token for each of a row's `uniforms`.
        Returns `packed` ids and log-probs `[2, rows, steps]` on the host."""
        count, steps = len(tokens), len(uniforms[0])
        self.tokens[:count, 0].copy_(torch.tensor(tokens), non_blocking=True)
        self.positions[:count, 0].copy_(torch.tensor(positions), non_blocking=True)
        self.uniforms[:count, :steps].copy_(torch.tensor(uniforms, dtype=self.uniforms.dtype), non_blocking=True)
        self.step.zero_()
        rows, length = count, min(max(positions) + steps, self.capacity)
        if self.captures:
            if not self.width / 4 < count <= self.width:  # a capture takes as long as about twenty steps
                self.width = min(bucket(count), self.rows)
            rows, length = self.width, min(bucket(length, FEWEST_SLOTS), self.capacity)
        for _ in range(steps):
            self._advance(rows, length)
        return self.chosen[:, :count, :steps].cpu()

    def _advance(self, rows: int, length: int) -> None:
        """Sample one token for each of the first `rows`; afterwards no row is longer than `length`."""
        shape, run_before = (rows, length), SHAPES.setdefault(self.model, set())
        if self.captures and shape in run_before and shape not in self.graphs:
            self._capture(rows, length)
        if shape in self.graphs:
            self.graphs[shape].replay()
        else:
            self._step(rows, length)
            run_before.add(shape)

    def _step(self, rows: int, length: int) -> None:
        tokens, positions = self.tokens[:rows], self.positions[:rows]
        self.cache.extend(positions, length)
        logits = self.model(tokens, positions=positions, cache=self.cache)[:, 0]
        ids, log_probs = self.choose(logits, self.uniforms[:rows].index_select(1, self.step)[:, 0])
        self.chosen[:, :rows].index_copy_(2, self.step, packed(ids, log_probs)[..., None])
        tokens.copy_(ids[:, None])
        positions.add_(1).clamp_(max=self.capacity - 1)  # also for rows that have ended
        self.step.add_(1)

    def _capture(self, rows: int, length: int) -> None:
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        collects = gc.isenabled()
        gc.disable()  # it could free device memory during the capture
        try:
            with torch.cuda.stream(stream):
                graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
                try:
                    self._step(rows, length)
                finally:
                    graph.capture_end()
            self.graphs[rows, length] = graph
        except torch.OutOfMemoryError:
            message = "sampling: too little memory to capture a step as a CUDA graph; trying again at the next step"
            warnings.warn(message, stacklevel=2)
        except RuntimeError as error:
            self.captures = False
            warnings.warn(f"sampling: continuing without CUDA graphs: {str(error).splitlines()[0]}", stacklevel=2)
        finally:
            if collects:
                gc.enable()
            torch.cuda.current_stream(self.device).wait_stream(stream)


def _can_capture(model: nn.Module) -> bool:
    """Whether a step of `model` stays on this device and depends only on tensors."""
    return isinstance(model, Decoder) and not any(isinstance(each, DTensor) for each in model.parameters())


def packed(ids: Tensor, log_probs: Tensor) -> Tensor:
    """Stack both `[...]` into one integer tensor `[2, ...]`, for a single transfer."""
    return torch.stack([ids.int(), log_probs.view(torch.int32)])


def bucket(count: int, fewest: int = 1) -> int:
    """Return the smallest of `fewest`, 2 x `fewest`, 4 x `fewest`, ... that is at least `count`."""
    while fewest < count:
        fewest *= 2
    return fewest
