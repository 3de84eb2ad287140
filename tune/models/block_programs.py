# mypy: disable-error-code="no-untyped-def, import-not-found"
"""The programs of `tune.models.block_kernels`. Imported only if Triton is installed."""

import triton
import triton.language as tl


@triton.jit
def rotation(
    query, key, query_output, key_output, cos, sin, heads, kv_heads, query_groups,
    HALF: tl.constexpr, HEADS: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """Rotate HEADS heads of one token: query heads, or from program `query_groups` on key heads."""
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


@triton.jit
def grouped_product(
    rows, weight, output, ends, groups, of_group, of_input, of_output,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, GROUPS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute COLUMNS outputs of ROWS rows of one group. Each program finds its rows itself, since the host does not
    know where groups end; the last programs may have no rows."""
    columns_of_rows = tl.cdiv(OUTPUTS, COLUMNS)
    block, column = tl.program_id(0) // columns_of_rows, tl.program_id(0) % columns_of_rows
    group = tl.arange(0, GROUPS)
    end = tl.load(ends + group, mask=group < groups, other=0)
    begin = tl.load(ends + group - 1, mask=(group > 0) & (group < groups), other=0)
    blocks = (end - begin + ROWS - 1) // ROWS
    blocks_up_to = tl.cumsum(blocks, 0)
    mine = tl.sum((blocks_up_to <= block).to(tl.int32), 0)
    if mine >= groups:
        return
    is_mine = group == mine
    block -= tl.sum(tl.where(is_mine, blocks_up_to - blocks, 0), 0)
    row = tl.sum(tl.where(is_mine, begin, 0), 0) + block * ROWS + tl.arange(0, ROWS)
    is_row = (row < tl.sum(tl.where(is_mine, end, 0), 0))[:, None]
    column = column * COLUMNS + tl.arange(0, COLUMNS)
    is_column = (column < OUTPUTS)[None, :]
    depth = tl.arange(0, DEPTH)
    left = rows + row.to(tl.int64)[:, None] * INPUTS + depth[None, :]
    right = weight + mine.to(tl.int64) * of_group + depth[:, None] * of_input + column[None, :] * of_output
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(0, INPUTS, DEPTH):
        is_input = start + depth < INPUTS
        a = tl.load(left + start, mask=is_row & is_input[None, :], other=0.0)
        b = tl.load(right + start * of_input, mask=is_input[:, None] & is_column, other=0.0)
        total = tl.dot(a, b, total, input_precision=PRECISION)
    at = row.to(tl.int64)[:, None] * OUTPUTS + column[None, :]
    tl.store(output + at, total.to(output.dtype.element_ty), mask=is_row & is_column)


@triton.jit
def grouped_product_weight(
    rows, gradient, output, ends,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr,
    LINES: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute LINES x COLUMNS of the gradient of one group's matrix, from all rows of the group."""
    columns_of_group = tl.cdiv(OUTPUTS, COLUMNS)
    blocks_of_group = tl.cdiv(INPUTS, LINES) * columns_of_group
    group, block = tl.program_id(0) // blocks_of_group, tl.program_id(0) % blocks_of_group
    end = tl.load(ends + group)
    begin = tl.load(ends + group - 1, mask=group > 0, other=0)
    line = block // columns_of_group * LINES + tl.arange(0, LINES)
    column = block % columns_of_group * COLUMNS + tl.arange(0, COLUMNS)
    is_line, is_column = (line < INPUTS)[:, None], (column < OUTPUTS)[None, :]
    depth = tl.arange(0, DEPTH)
    total = tl.zeros((LINES, COLUMNS), dtype=tl.float32)
    for start in range(begin, end, DEPTH):
        row = start + depth
        is_row = row < end
        at = row.to(tl.int64)
        a = tl.load(rows + at[None, :] * INPUTS + line[:, None], mask=is_row[None, :] & is_line, other=0.0)
        b = tl.load(gradient + at[:, None] * OUTPUTS + column[None, :], mask=is_row[:, None] & is_column, other=0.0)
        total = tl.dot(a, b, total, input_precision=PRECISION)
    at = (group.to(tl.int64) * INPUTS + line)[:, None] * OUTPUTS + column[None, :]
    tl.store(output + at, total.to(output.dtype.element_ty), mask=is_line & is_column)
