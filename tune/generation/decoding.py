"""Decoding: the next tokens of all rows by steps of one shape, which a GPU replays as a captured graph."""

import gc
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tune.models import Decoder

STEPS = 8  # tokens of each row between two looks of the host
FEWEST_SLOTS = 256  # that a captured step attends to; others attend to twice as many, four times as many, ...


class Decoding:
    """Samples the next tokens of the first rows of a cache.

    All that changes from token to token stays on the device: the last tokens, their positions and what was chosen. The
    host looks at it once for `steps` tokens. On a GPU a step is captured as a CUDA graph, one for each number of rows
    and bucket of lengths, and replayed, as a token of a small model takes less time than the launches of its kernels.
    On a CPU `steps` is 1, since its tokens cost time even where a row has ended.

    `choose` gives ids and log-probs of logits `[rows, vocab]` and random numbers `[rows]`. While it is in use, weights
    must stay where they are.
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
        self.step = torch.zeros(1, dtype=torch.long, device=device)  # since the last look of the host
        self.width = 0  # rows of a captured step, some of which may have ended
        self.graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        self.captures = device.type == "cuda" and _can_capture(model)
        self.pool = torch.cuda.graph_pool_handle() if self.captures else None

    def __call__(self, tokens: list[int], positions: list[int], uniforms: list[list[float]]) -> Tensor:
        """What follows the last `tokens` of rows 0, 1, ..., at `positions`: `packed` ids and log-probs
        `[2, rows, steps]`, on the host, one for each of the `uniforms` of a row."""
        count, steps = len(tokens), len(uniforms[0])
        self.tokens[:count, 0].copy_(torch.tensor(tokens), non_blocking=True)
        self.positions[:count, 0].copy_(torch.tensor(positions), non_blocking=True)
        self.uniforms[:count, :steps].copy_(torch.tensor(uniforms, dtype=self.uniforms.dtype), non_blocking=True)
        self.step.zero_()
        rows, length = count, min(max(positions) + steps, self.capacity)
        if self.captures:
            if not self.width / 4 < count <= self.width:  # to capture takes as long as some twenty steps
                self.width = min(bucket(count), self.rows)
            rows, length = self.width, min(bucket(length, FEWEST_SLOTS), self.capacity)
        for _ in range(steps):
            self._advance(rows, length)
        return self.chosen[:, :count, :steps].cpu()

    def _advance(self, rows: int, length: int) -> None:
        if (graph := self.graphs.get((rows, length))) is not None:
            graph.replay()
            return
        self._step(rows, length)  # what is captured has run once: kernels are loaded, and products have their workspace
        if self.captures:
            self._capture(rows, length)

    def _step(self, rows: int, length: int) -> None:
        tokens, positions = self.tokens[:rows], self.positions[:rows]
        self.cache.extend(positions, length)
        logits = self.model(tokens, positions=positions, cache=self.cache)[:, 0]
        ids, log_probs = self.choose(logits, self.uniforms[:rows].index_select(1, self.step)[:, 0])
        self.chosen[:, :rows].index_copy_(2, self.step, packed(ids, log_probs)[..., None])
        tokens.copy_(ids[:, None])
        positions.add_(1).clamp_(max=self.capacity - 1)  # of a row that has ended, too
        self.step.add_(1)

    def _capture(self, rows: int, length: int) -> None:
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        collects = gc.isenabled()
        gc.disable()  # what it frees could be of the device
        try:
            with torch.cuda.stream(stream):
                graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
                try:
                    self._step(rows, length)
                finally:
                    graph.capture_end()
            self.graphs[rows, length] = graph
        except RuntimeError as error:
            self.captures = False
            warnings.warn(f"sampling: without CUDA graphs, as {str(error).splitlines()[0]}", stacklevel=2)
        finally:
            if collects:
                gc.enable()
            torch.cuda.current_stream(self.device).wait_stream(stream)


def _can_capture(model: nn.Module) -> bool:
    """Whether a step of `model` stays on this device, and is told by tensors alone."""
    return isinstance(model, Decoder) and not any(isinstance(each, DTensor) for each in model.parameters())


def packed(ids: Tensor, log_probs: Tensor) -> Tensor:
    """Both, `[...]`, as one tensor of integers `[2, ...]`, for one transfer."""
    return torch.stack([ids.int(), log_probs.view(torch.int32)])


def bucket(count: int, fewest: int = 1) -> int:
    """The smallest of `fewest`, twice as much, four times as much, ... that is not below `count`."""
    while fewest < count:
        fewest *= 2
    return fewest
