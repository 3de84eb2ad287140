# mypy: disable-error-code="no-untyped-def, import-not-found"
"""Dequantize NF4 codes with one kernel, which reads codes and scales once and writes the weight once.

Results are bit-identical to `tune.quantization.nf4`. Imported only if Triton is installed.
"""

import triton
import triton.language as tl


@triton.jit
def dequantize(
    codes, scales, ranges, pairs, weight, count, in_row, IS_DOUBLE: tl.constexpr, BLOCKS: tl.constexpr
):  # fmt: skip
    """Dequantize `count` blocks, `in_row` per row. Rows are contiguous, and so are the blocks of the whole weight."""
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    is_inside = block < count
    scale = tl.load(scales + block, mask=is_inside, other=0).to(tl.float32)
    if IS_DOUBLE:
        row = block // in_row
        mean = tl.load(ranges + 2 * row, mask=is_inside, other=0)
        reach = tl.load(ranges + 2 * row + 1, mask=is_inside, other=0)
        scale = tl.div_rn(scale, 127.0) * reach + mean
    byte = block[:, None] * 32 + tl.arange(0, 32)[None, :]
    code = tl.load(codes + byte, mask=is_inside[:, None], other=0).to(tl.int32)
    # The low half of byte n < 16 is level n. The 16 rows are in one cache line, which a warp reads at once.
    high = tl.load(pairs + 2 * (code >> 4) + 1) * scale[:, None]
    low = tl.load(pairs + 2 * (code & 15) + 1) * scale[:, None]
    place = block[:, None] * 64 + tl.arange(0, 64)[None, :]
    tl.store(weight + place, tl.interleave(high, low).to(weight.dtype.element_ty), mask=is_inside[:, None])
