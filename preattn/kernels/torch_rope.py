"""RoPE and a head norm in the arithmetic of PyTorch's separate operations, as Hugging Face's models spell them.

``launch_torch_rope`` rotates the last dims of strided rows into a contiguous result, the other dims copied beside them.
Every product is rounded before it is added: to the rows' dtype, or to float32, where a model computes in float32.
``launch_torch_head_norm`` scales rows by their RMSNorm, the scale rounded to the rows' dtype before it multiplies.
Bytes a row of either: ``2 * itemsize * width``; RoPE tables ``itemsize * rotated`` a token, which heads share in cache.
"""

import triton
import triton.language as tl
from torch import Tensor

from ..policy import LaunchConfig
from ..reference.numerics import Pairing
from .device import reciprocal_sqrt, to_bf16, tree_sum, upcast
from .launch import Kernel, Launch

# No scalar selects a variant by its value.
ROWS_AND_STRIDES = ["rows", "outer", "inner", "stride_batch", "stride_outer", "stride_inner"]
ROPE_SCALARS = [*ROWS_AND_STRIDES, "table_batch", "table_outer", "table_inner", "table_pair"]
NORM_SCALARS = [*ROWS_AND_STRIDES, "out_batch", "out_outer", "out_inner", "eps"]


@triton.jit
def _product(x, factor, ROUNDED: tl.constexpr):
    """``x * factor`` in float32, or rounded to bf16."""
    return upcast(to_bf16(x * factor)) if ROUNDED else x * factor


@triton.jit
def _store(target, x, mask, BF16: tl.constexpr):
    tl.store(target, to_bf16(x) if BF16 else x, mask=mask)


@triton.jit(do_not_specialize=ROPE_SCALARS, do_not_specialize_on_alignment=["cos", "sin"])
def _torch_rope_kernel(
    x,
    cos,
    sin,
    out,
    rows: "i64",
    outer: "i64",
    inner: "i64",
    stride_batch: "i64",
    stride_outer: "i64",
    stride_inner: "i64",
    table_batch: "i64",
    table_outer: "i64",
    table_inner: "i64",
    table_pair: "i64",
    WIDTH: tl.constexpr,
    ROTATED: tl.constexpr,
    READ_HALF_SPLIT: tl.constexpr,
    WRITE_HALF_SPLIT: tl.constexpr,
    ROUNDED: tl.constexpr,
    BF16: tl.constexpr,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
):
    """ROWS rows of [batch, outer, inner, WIDTH]; strides of ``x`` in units of 16 bytes, of the tables in elements."""
    HALF: tl.constexpr = ROTATED // 2
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = (row < rows)[:, None]
    i, j = row // inner % outer, row % inner
    batch = row // (inner * outer)
    source = x + ((batch * stride_batch + i * stride_outer + j * stride_inner) * UNIT)[:, None]
    target = out + (row * WIDTH)[:, None]
    dim, pair = tl.arange(0, ROTATED)[None, :], tl.arange(0, HALF)[None, :]
    table = (batch * table_batch + i * table_outer + j * table_inner)[:, None] + pair * table_pair
    c = upcast(tl.load(cos + table, mask=live, other=0.0))
    s = upcast(tl.load(sin + table, mask=live, other=0.0))
    for kept in tl.static_range(0, WIDTH - ROTATED, ROTATED):
        tl.store(target + kept + dim, tl.load(source + kept + dim, mask=live, other=0.0), mask=live)
    source, target = source + (WIDTH - ROTATED), target + (WIDTH - ROTATED)
    if READ_HALF_SPLIT:
        a = upcast(tl.load(source + pair, mask=live, other=0.0))
        b = upcast(tl.load(source + HALF + pair, mask=live, other=0.0))
    else:
        value = upcast(tl.load(source + dim, mask=live, other=0.0))
        a, b = tl.split(tl.reshape(value, (ROWS, HALF, 2)))
    first = _product(a, c, ROUNDED) - _product(b, s, ROUNDED)
    second = _product(b, c, ROUNDED) + _product(a, s, ROUNDED)
    if WRITE_HALF_SPLIT:
        _store(target + pair, first, live, BF16)
        _store(target + HALF + pair, second, live, BF16)
    else:
        _store(target + dim, tl.reshape(tl.join(first, second), (ROWS, ROTATED)), live, BF16)


torch_rope = Kernel(_torch_rope_kernel)


def launch_torch_rope(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    out: Tensor,
    token_dim: int,
    rotated: int,
    read: Pairing,
    write: Pairing,
    rounds_products: bool,
    *,
    config: LaunchConfig,
) -> Launch:
    """Rotate the last ``rotated`` dims of x, [batch, outer, inner, width], into a contiguous ``out``.

    Tables are [batch or 1, tokens, at least rotated / 2], of one set of strides; tokens are x's ``token_dim`` (1 or 2).
    """
    batch, outer, inner, width = x.shape
    unit = 16 // x.dtype.itemsize
    table_batch = cos.stride(0) if cos.shape[0] > 1 else 0
    tables = (cos.stride(1), 0) if token_dim == 1 else (0, cos.stride(1))
    bf16 = x.dtype.itemsize == 2
    half_split = (read == "half_split", write == "half_split")
    rows = batch * outer * inner
    return Launch(
        torch_rope,
        -(-rows // config.rows),
        (x, cos, sin, out),
        (rows, outer, inner, *[stride // unit for stride in x.stride()[:3]], table_batch, *tables, cos.stride(2)),
        (width, rotated, *half_split, rounds_products and bf16, bf16, unit, config.rows),
        config.num_warps,
    )


@triton.jit(do_not_specialize=NORM_SCALARS)
def _torch_head_norm_kernel(
    x,
    out,
    rows: "i64",
    outer: "i64",
    inner: "i64",
    stride_batch: "i64",
    stride_outer: "i64",
    stride_inner: "i64",
    out_batch: "i64",
    out_outer: "i64",
    out_inner: "i64",
    eps: "fp32",
    WIDTH: tl.constexpr,
    BF16: tl.constexpr,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
):
    """ROWS rows of [batch, outer, inner, WIDTH]; strides in units of 16 bytes."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = (row < rows)[:, None]
    i, j = row // inner % outer, row % inner
    batch, dim = row // (inner * outer), tl.arange(0, WIDTH)[None, :]
    source = (batch * stride_batch + i * stride_outer + j * stride_inner) * UNIT
    target = (batch * out_batch + i * out_outer + j * out_inner) * UNIT
    value = upcast(tl.load(x + source[:, None] + dim, mask=live, other=0.0))
    scale = reciprocal_sqrt(tree_sum(value * value, ROWS, WIDTH) / WIDTH + eps)
    if BF16:
        scale = upcast(to_bf16(scale))
    _store(out + target[:, None] + dim, value * scale[:, None], live, BF16)


torch_head_norm = Kernel(_torch_head_norm_kernel)


def launch_torch_head_norm(x: Tensor, out: Tensor, eps: float, *, config: LaunchConfig) -> Launch:
    """RMSNorm without a weight of every row of x, [batch, outer, inner, power of two], into ``out`` of its shape."""
    batch, outer, inner, width = x.shape
    unit = 16 // x.dtype.itemsize
    rows = batch * outer * inner
    strides = [stride // unit for stride in (*x.stride()[:3], *out.stride()[:3])]
    return Launch(
        torch_head_norm,
        -(-rows // config.rows),
        (x, out),
        (rows, outer, inner, *strides, eps),
        (width, x.dtype.itemsize == 2, unit, config.rows),
        config.num_warps,
    )
