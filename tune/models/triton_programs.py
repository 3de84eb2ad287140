# mypy: disable-error-code="no-untyped-def, import-not-found"
"""The programs of `tune.models.kernels`. Imported only where Triton is installed."""

import triton
import triton.language as tl


@triton.jit
def rotation(
    query, key, query_output, key_output, cos, sin, heads, kv_heads, query_groups,
    HALF: tl.constexpr, HEADS: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """One token and HEADS of its heads: of its queries, or from program `query_groups` on of its keys."""
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    half = tl.arange(0, HALF)
    turn = token * 2 * HALF + half
    cos_first, cos_second = tl.load(cos + turn).to(tl.float32), tl.load(cos + turn + HALF).to(tl.float32)
    sin_first, sin_second = tl.load(sin + turn).to(tl.float32), tl.load(sin + turn + HALF).to(tl.float32)
    if group < query_groups:
        source, target, count = query, query_output, heads
    else:
        source, target, count = key, key_output, kv_heads
        group -= query_groups
    head = group * HEADS + tl.arange(0, HEADS)
    at = (token * count + head)[:, None] * 2 * HALF + half[None, :]
    mask = (head < count)[:, None]
    kind = source.dtype.element_ty
    first = tl.load(source + at, mask=mask).to(tl.float32)
    second = tl.load(source + at + HALF, mask=mask).to(tl.float32)
    # Each product is rounded, as when it is written to memory.
    if BACK:
        new_first = (first * cos_first).to(kind).to(tl.float32) + (second * sin_second).to(kind).to(tl.float32)
        new_second = (second * cos_second).to(kind).to(tl.float32) - (first * sin_first).to(kind).to(tl.float32)
    else:
        new_first = (first * cos_first).to(kind).to(tl.float32) - (second * sin_first).to(kind).to(tl.float32)
        new_second = (second * cos_second).to(kind).to(tl.float32) + (first * sin_second).to(kind).to(tl.float32)
    tl.store(target + at, new_first.to(kind), mask=mask)
    tl.store(target + at + HALF, new_second.to(kind), mask=mask)


@triton.jit
def silu_product(gate, up, output, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    kind = gate.dtype.element_ty
    g = tl.load(gate + at, mask=mask).to(tl.float32)
    u = tl.load(up + at, mask=mask).to(tl.float32)
    activated = (g / (1 + tl.exp(-g))).to(kind).to(tl.float32)
    tl.store(output + at, (activated * u).to(kind), mask=mask)


@triton.jit
def silu_product_gradient(gradient, gate, up, of_gate, of_up, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    kind = gate.dtype.element_ty
    d = tl.load(gradient + at, mask=mask).to(tl.float32)
    g = tl.load(gate + at, mask=mask).to(tl.float32)
    u = tl.load(up + at, mask=mask).to(tl.float32)
    sigmoid = 1 / (1 + tl.exp(-g))
    activated = (g * sigmoid).to(kind).to(tl.float32)
    tl.store(of_up + at, (d * activated).to(kind), mask=mask)
    through = (d * u).to(kind).to(tl.float32)
    tl.store(of_gate + at, (through * sigmoid * (1 + g * (1 - sigmoid))).to(kind), mask=mask)
