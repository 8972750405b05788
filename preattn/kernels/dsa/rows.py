"""What the DSA kernels do alike to a row: rotate 64 dims, divide by a scale, quantise and store; its stride in units.

A RoPE table's row is 32 cosines, then 32 sines. Strides reach the kernels in units of 16 bytes: the compiler then
knows that every row starts on one.
"""

import triton
import triton.language as tl
from torch import Tensor

from ..device import (
    INTERPRETED,
    fma,
    index_rotate,
    negate,
    poison,
    power_of_two,
    rotate,
    scale_exponent,
    to_bf16,
    to_e4m3,
    upcast,
)

LATENT_DIM = 512

# The alignment of what engines slice freely selects no variant.
UNALIGNED = ["slots", "index_slots", "positions", "query_scale", "kv_scale", "index_weights"]


@triton.jit
def quotient(x, scale, reciprocal):
    """``x / scale`` correctly rounded, given the correctly rounded ``1 / scale``; NaN where ``x`` is not finite.

    Markstein: one residual corrects a product by such a reciprocal to the quotient, as long as nothing
    overflows or underflows on the way: scales from 2**-64 to 2**64 leave no e4m3 code in doubt. The signs are
    chosen so that a zero keeps its own.
    """
    if INTERPRETED:  # its fma may round twice, which the residual of a scale of all ones would show
        return tl.div_rn(poison(x), scale)
    else:
        estimate = x * reciprocal
        return fma(fma(estimate, scale, negate(x)), negate(reciprocal), estimate)


@triton.jit
def load_rope(table, pair, mask):
    """Cosines and sines of pairs, ``table`` pointing at each row's first cosine."""
    cos = upcast(tl.load(table + pair, mask=mask, other=0.0))
    return cos, upcast(tl.load(table + 32 + pair, mask=mask, other=0.0))


@triton.jit
def split_pairs(x, ROWS: tl.constexpr):
    """[ROWS, 32] to its even and odd dims."""
    return tl.split(tl.reshape(x, (ROWS, 16, 2)))


@triton.jit
def join_pairs(even, odd, ROWS: tl.constexpr):
    """[ROWS, 16] twice to [ROWS, 32], alternating."""
    return tl.reshape(tl.join(even, odd), (ROWS, 32))


@triton.jit
def index_rope(x0, x1, table, mask, INTERLEAVED: tl.constexpr, ROWS: tl.constexpr):
    """Rotate dims 0..31 and 32..63 of indexer rows; ``table`` points at each row's cosines."""
    if INTERLEAVED:
        pair = tl.arange(0, 16)[None, :]
        even, odd = split_pairs(x0, ROWS)
        cos, sin = load_rope(table, pair, mask)
        even, odd = index_rotate(even, odd, cos, sin)
        x0 = join_pairs(even, odd, ROWS)
        even, odd = split_pairs(x1, ROWS)
        cos, sin = load_rope(table, pair + 16, mask)
        even, odd = index_rotate(even, odd, cos, sin)
        x1 = join_pairs(even, odd, ROWS)
    else:
        cos, sin = load_rope(table, tl.arange(0, 32)[None, :], mask)
        x0, x1 = index_rotate(x0, x1, cos, sin)
    return x0, x1


@triton.jit
def main_rope(x0, x1, table, mask, ROWS: tl.constexpr):
    """Rotate the interleaved pairs of dims 0..31 and 32..63: two even and two odd results of [ROWS, 16]."""
    pair = tl.arange(0, 16)[None, :]
    even0, odd0 = split_pairs(x0, ROWS)
    cos, sin = load_rope(table, pair, mask)
    even0, odd0 = rotate(even0, odd0, cos, sin)
    even1, odd1 = split_pairs(x1, ROWS)
    cos, sin = load_rope(table, pair + 16, mask)
    even1, odd1 = rotate(even1, odd1, cos, sin)
    return even0, odd0, even1, odd1


@triton.jit
def rounded(x, scale, reciprocal, live, QUANTISE: tl.constexpr, PADS: tl.constexpr):
    """bf16 of ``x``, or e4m3 of ``x / scale``; zero where a head is padding."""
    value = to_e4m3(quotient(x, scale, reciprocal)) if QUANTISE else to_bf16(x)
    return tl.where(live, value, 0) if PADS else value


@triton.jit
def store_rotated(
    target,
    even0,
    odd0,
    even1,
    odd1,
    mask,
    live,
    scale,
    reciprocal,
    QUANTISE: tl.constexpr,
    PADS: tl.constexpr,
    HALF_SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Round and store what :func:`main_rope` gives; ``target`` points at each row's first rotated dim."""
    if HALF_SPLIT:
        target = target + tl.arange(0, 16)[None, :]
        tl.store(target, rounded(even0, scale, reciprocal, live, QUANTISE, PADS), mask=mask)
        tl.store(target + 16, rounded(even1, scale, reciprocal, live, QUANTISE, PADS), mask=mask)
        tl.store(target + 32, rounded(odd0, scale, reciprocal, live, QUANTISE, PADS), mask=mask)
        tl.store(target + 48, rounded(odd1, scale, reciprocal, live, QUANTISE, PADS), mask=mask)
    else:
        target = target + tl.arange(0, 32)[None, :]
        x0, x1 = join_pairs(even0, odd0, ROWS), join_pairs(even1, odd1, ROWS)
        tl.store(target, rounded(x0, scale, reciprocal, live, QUANTISE, PADS), mask=mask)
        tl.store(target + 32, rounded(x1, scale, reciprocal, live, QUANTISE, PADS), mask=mask)


@triton.jit
def index_quantise(x0, x1, x2, x3):
    """Four quarters of indexer rows to e4m3 codes and the biased exponent of each row's scale."""
    x0, x1, x2, x3 = poison(x0), poison(x1), poison(x2), poison(x3)
    front = tl.maximum(tl.abs(x0), tl.abs(x1))  # a maximum drops NaNs
    back = tl.maximum(tl.abs(x2), tl.abs(x3))
    exponent = scale_exponent(tl.maximum(tl.max(tl.maximum(front, back), axis=1), 1e-4))
    inverse = power_of_two(254 - exponent)[:, None]
    return to_e4m3(x0 * inverse), to_e4m3(x1 * inverse), to_e4m3(x2 * inverse), to_e4m3(x3 * inverse), exponent


def units(tensor: Tensor | None, dim: int = 0) -> int:
    """A stride in units of 16 bytes."""
    return 0 if tensor is None else tensor.stride()[dim] * tensor.element_size() // 16
