"""From logits to a token."""

import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor


def choose(
    logits: Tensor,
    uniforms: Tensor,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
) -> tuple[Tensor, Tensor]:
    """An id for each row of `logits` `[rows, vocab]`, and its log-prob in fp32: both `[rows]`.

    It is the first id at which the cumulative probability exceeds `uniforms` `[rows]`, which are in [0, 1); with
    temperature 0 the most likely. `top_k` keeps the k most likely ids, `top_p` (Holtzman et al., 2020) the fewest that
    have this probability, `min_p` (Nguyen et al., 2024) those at least so likely in proportion to the most likely: in
    this order, as in transformers. Log-probs are those without these three; with temperature 0, those at temperature 1.
    """
    log_probs = (logits.float() / (temperature or 1.0)).log_softmax(dim=-1)
    if temperature == 0:
        ids = log_probs.argmax(dim=-1, keepdim=True)
    else:
        kept = _kept(log_probs, top_k, top_p, min_p).exp()
        # In fp64, so that the order in which a device adds does not decide. MPS has no fp64.
        cumulative = kept.cumsum(dim=-1, dtype=torch.float32 if kept.device.type == "mps" else torch.float64)
        reached = uniforms[:, None].to(cumulative.dtype).to(kept.device) * cumulative[:, -1:]
        ids = torch.searchsorted(cumulative, reached, right=True).clamp(max=logits.shape[-1] - 1)
    return ids[:, 0], log_probs.gather(-1, ids)[:, 0]


def _kept(log_probs: Tensor, top_k: int | None, top_p: float | None, min_p: float | None) -> Tensor:
    """`log_probs` `[rows, vocab]`, with -inf for what is not among the top."""
    if top_k is not None and top_k < log_probs.shape[-1]:
        smallest = log_probs.topk(top_k).values[:, -1:]
        log_probs = log_probs.masked_fill(log_probs < smallest, -math.inf)
    if top_p is not None and top_p < 1:
        probs = log_probs.softmax(dim=-1)
        ordered = probs.sort(dim=-1, descending=True).values
        before = ordered.cumsum(dim=-1) - ordered
        smallest = ordered.masked_fill(before >= top_p, math.inf).amin(dim=-1, keepdim=True)
        log_probs = log_probs.masked_fill(probs < smallest, -math.inf)
    if min_p:
        smallest = log_probs.amax(dim=-1, keepdim=True) + math.log(min_p)
        log_probs = log_probs.masked_fill(log_probs < smallest, -math.inf)
    return log_probs


def uniforms(*keys: int) -> Iterator[float]:
    """Random numbers in [0, 1), without end: a function of the non-negative `keys` alone."""
    bits = np.random.Philox(np.random.SeedSequence(keys))
    while True:
        yield (int(bits.random_raw()) >> 11) * 2.0**-53
