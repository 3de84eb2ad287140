# mypy: ignore-errors
"""The programs of `tune.peft.adapter_kernels`. Imported only if Triton is installed."""

import triton
import triton.language as tl


@triton.jit
def _keeps(keys, features, threshold):
    """`tune.peft.dropout.mix(keys ^ features) >= threshold`. Shifts of unsigned integers need no mask."""
    bits = (keys[:, None] ^ features[None, :]).to(tl.uint32, bitcast=True)
    bits = (bits ^ (bits >> 16)) * tl.full((), 0x7FEB352D, tl.uint32)
    bits = (bits ^ (bits >> 15)) * tl.full((), 0x846CA68B, tl.uint32)
    return (bits ^ (bits >> 16)).to(tl.int32, bitcast=True) >= threshold


@triton.jit
def masked(
    input, keys, features, output, rows, width, threshold, scale, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """output = input * keeps * scale, all `[rows, width]`."""
    row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    key = tl.load(keys + row, mask=row < rows, other=0)
    feature = tl.load(features + column, mask=column < width, other=0)
    at = row[:, None] * width + column[None, :]
    inside = (row < rows)[:, None] & (column < width)[None, :]
    value = tl.load(input + at, mask=inside, other=0).to(tl.float32)
    kept = tl.where(_keeps(key, feature, threshold), value * scale, 0.0)
    tl.store(output + at, kept.to(output.dtype.element_ty), mask=inside)


@triton.jit
def add_masked_product(
    total, narrow, matrix, keys, features, rows, width, rank, stride, threshold, scale,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    """total += (narrow @ matrix) * keeps * scale: `[rows, width]`, `[rows, rank]`, `[rank, width]`. Rows of `narrow`
    are `stride` apart."""
    row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    product = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, rank, RANK):
        inner = start + tl.arange(0, RANK)
        left_inside = (row < rows)[:, None] & (inner < rank)[None, :]
        right_inside = (inner < rank)[:, None] & (column < width)[None, :]
        left = tl.load(narrow + row[:, None] * stride + inner[None, :], mask=left_inside, other=0)
        right = tl.load(matrix + inner[:, None] * width + column[None, :], mask=right_inside, other=0)
        product = tl.dot(left, right, product, input_precision="ieee")
    key = tl.load(keys + row, mask=row < rows, other=0)
    feature = tl.load(features + column, mask=column < width, other=0)
    at = row[:, None] * width + column[None, :]
    inside = (row < rows)[:, None] & (column < width)[None, :]
    added = tl.where(_keeps(key, feature, threshold), product * scale, 0.0)
    value = tl.load(total + at, mask=inside, other=0).to(tl.float32) + added
    tl.store(total + at, value.to(total.dtype.element_ty), mask=inside)


@triton.jit
def scaled_gradient(
    gradient, output, factors, scaled, sums, rows, width, share, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """scaled = gradient * factors, `[rows, width]`; sums, `[programs, width]`, of gradient * output over the `share`
    rows of each program."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    factor = tl.load(factors + column, mask=column < width, other=0)
    first = tl.program_id(1) * share
    total = tl.zeros((COLUMNS,), tl.float32)
    for start in range(0, share, ROWS):
        row = (first + start).to(tl.int64) + tl.arange(0, ROWS)
        at = row[:, None] * width + column[None, :]
        inside = (row < rows)[:, None] & (column < width)[None, :]
        slope = tl.load(gradient + at, mask=inside, other=0).to(tl.float32)
        value = tl.load(output + at, mask=inside, other=0).to(tl.float32)
        total += tl.sum(slope * value, axis=0)
        tl.store(scaled + at, (slope * factor[None, :]).to(scaled.dtype.element_ty), mask=inside)
    tl.store(sums + tl.program_id(1) * width + column, total, mask=column < width)


@triton.jit
def squared_norms(
    weight, left, right, squares, columns, rank, scaling, COLUMNS: tl.constexpr, RANK: tl.constexpr
):  # fmt: skip
    """squares = |w|^2 + scaling * sum(left * right) for a row of each: `[columns]`, `[rank]`, `[rank]`."""
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros((COLUMNS,), tl.float32)
    for start in range(0, columns, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        value = tl.load(weight + row * columns + column, mask=column < columns, other=0).to(tl.float32)
        total += value * value
    inner = tl.arange(0, RANK)
    first = tl.load(left + row * rank + inner, mask=inner < rank, other=0).to(tl.float32)
    second = tl.load(right + row * rank + inner, mask=inner < rank, other=0).to(tl.float32)
    tl.store(squares + row, tl.sum(total) + scaling * tl.sum(first * second))
