"""Device functions that every kernel shares: rounding, scales, RoPE, sums in a fixed order.

Kernels are compiled with ``enable_fp_fusion=False`` (see ``launch.py``): a multiply and an add are fused
only where ``fma`` is spelled out, which is what makes stored bytes equal to the reference's.

Triton's interpreter truncates where hardware rounds to nearest even, loses bits of bf16 subnormals, and its
``fma`` rounds twice before Triton 3.8. The leaf functions ``fma``, ``upcast``, ``poison``, ``to_bf16`` and
``to_e4m3`` (and ``quotient`` of the DSA kernels) therefore have a second body for it; tests hold both against
the same exhaustive tables.
"""

import os

import triton
import triton.language as tl
from triton.language.target_info import is_hip

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0") == "1")


@triton.jit
def fma(a, b, c):
    """``a * b + c``, one rounding."""
    if INTERPRETED:  # the product is exact in float64; a second rounding shows once in some 2**29 sums
        return (a.to(tl.float64) * b.to(tl.float64) + c.to(tl.float64)).to(tl.float32)
    else:
        return tl.fma(a, b, c)


@triton.jit
def upcast(x):
    """bf16, fp16, e4m3 or float32 -> float32, exactly (the interpreter loses bits of bf16 subnormals and
    reads NaN codes of e4m3 as numbers)."""
    if INTERPRETED and x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    elif INTERPRETED and x.dtype == tl.float8e4nv:
        code = x.to(tl.uint8, bitcast=True)
        return tl.where((code & 0x7F) == 0x7F, float("nan"), x.to(tl.float32))
    else:
        return x.to(tl.float32)


@triton.jit
def poison(x):
    """float32 with every infinity as NaN; finite values, signed zeros too, are themselves."""
    if INTERPRETED:
        return x * 0.0 + x  # the product is a zero or NaN: one rounding or two, the same
    else:
        return tl.fma(x, 0.0, x)


@triton.jit
def finite_abs(x):
    """|x|, NaN where x is not finite: the candidates for a block's largest magnitude (``tl.max`` skips NaNs)."""
    return tl.abs(poison(x))


@triton.jit
def to_bf16(x):
    """float32 -> bf16, nearest even; a NaN becomes 0x7FFF (the NVIDIA conversion does that by itself)."""
    if INTERPRETED:
        bits = x.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where(x != x, 0x7FFF, rounded).to(tl.int16).to(tl.bfloat16, bitcast=True)
    elif is_hip():
        bits = tl.where(x != x, 0x7FFF, x.to(tl.bfloat16).to(tl.int16, bitcast=True))
        return bits.to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(tl.bfloat16)


@triton.jit
def quiet(x):
    """bf16, each NaN as 0x7FFF: what :func:`to_bf16` stores of a value that nothing was computed with.

    A compiler takes the widening and the narrowing of a value for nothing, and would keep the payload.
    """
    bits = x.to(tl.int16, bitcast=True)
    return tl.where((bits & 0x7FFF) > 0x7F80, 0x7FFF, bits).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def to_activation(x, DTYPE: tl.constexpr):
    """float32 -> bf16 or fp16, nearest even; a NaN becomes 0x7FFF."""
    if tl.bfloat16 == DTYPE:
        return to_bf16(x)
    else:
        bits = tl.where(x != x, 0x7FFF, x.to(DTYPE).to(tl.int16, bitcast=True)).to(tl.int16)
        return bits.to(DTYPE, bitcast=True)


@triton.jit
def to_e4m3(x):
    """float32 -> e4m3 codes (uint8): nearest even, finite values saturate at 448, the rest become 0x7F."""
    x = poison(x)
    if INTERPRETED:
        value = tl.minimum(tl.maximum(tl.where(x == x, x, 0.0), -448.0), 448.0)
        magnitude = tl.abs(value)
        # Normal codes: round the float32 mantissa to three bits. Subnormal codes: multiples of 2**-9.
        bits = magnitude.to(tl.int32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960
        steps = (magnitude + 16384.0).to(tl.int32, bitcast=True) & 0xF  # an ulp of 16384 is 2**-9
        code = tl.where(magnitude < 0.015625, steps, normal) | ((value.to(tl.int32, bitcast=True) >> 24) & 0x80)
        return tl.where(x == x, code, 0x7F).to(tl.uint8)
    elif is_hip():
        value = tl.minimum(tl.maximum(tl.where(x == x, x, 0.0), -448.0), 448.0)
        return tl.where(x == x, value.to(tl.float8e4nv).to(tl.uint8, bitcast=True), 0x7F).to(tl.uint8)
    else:  # the NVIDIA conversion saturates, and turns a NaN into 0x7F
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def scale_exponent(amax):
    """Biased exponent (the UE8M0 byte) of the smallest power of two not below ``amax / 448``, exactly.

    448 is 1.75 * 2**8: the quotient's exponent is that of ``amax`` less 8, plus one where the mantissa
    exceeds 1.75. The addend carries into the exponent exactly then. ``amax`` is positive and normal.
    """
    return ((amax.to(tl.int32, bitcast=True) + 0x1FFFFF) >> 23) - 8


@triton.jit
def power_of_two(exponent):
    """2**(exponent - 127) as float32, for a biased exponent in 1..254."""
    return (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def ue8m0(code):
    """UE8M0 codes (uint8) as float32: 2**(code - 127), and NaN for 255."""
    code = code.to(tl.int32)
    bits = tl.where(code == 0, 0x400000, tl.where(code == 255, 0x7FC00000, code << 23))  # 2**-127 is subnormal
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def dot(a, b, total):
    """``total + a @ b`` in float32, of bf16 or of e4m3 operands."""
    if INTERPRETED:  # it would multiply the bits of bf16
        return tl.dot(upcast(a), upcast(b), total)
    else:
        return tl.dot(a, b, total)


@triton.jit
def tree_sum(x, ROWS: tl.constexpr, LENGTH: tl.constexpr):
    """Sum [ROWS, LENGTH] over its last dim as a binary tree over neighbours: (x0 + x1) + (x2 + x3) + ...

    Each step reduces an axis of two, so the order of additions does not depend on how the compiler lays
    the tile out over threads: the same bits in every configuration. LENGTH is a power of two.
    """
    x = tl.reshape(x, (ROWS, LENGTH))
    for level in tl.static_range(LENGTH.bit_length() - 1):
        x = tl.sum(tl.reshape(x, (ROWS, LENGTH >> (level + 1), 2)), axis=2)
    return tl.reshape(x, (ROWS,))


@triton.jit
def reciprocal_sqrt(x):
    """``1 / sqrt(x)``, both operations correctly rounded."""
    return tl.div_rn(1.0, tl.sqrt_rn(x))


@triton.jit
def negate(x):
    """-x, of zeros too: Triton before 3.9 compiles a minus sign to ``0 - x``, which turns +0 into +0."""
    return x * -1.0


@triton.jit
def rotate(even, odd, cos, sin):
    """Main query and key: the rotated pair."""
    return fma(even, cos, negate(odd * sin)), fma(even, sin, odd * cos)


@triton.jit
def index_rotate(a, b, cos, sin):
    """Indexer query and key: the rotated pair, rounded in another order than :func:`rotate`."""
    return fma(a, cos, negate(b * sin)), fma(b, cos, a * sin)
