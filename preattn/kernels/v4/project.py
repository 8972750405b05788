"""``wq_b`` into what attention reads: the projection writes its padded place, and the KV half rides along.

``launch_project`` is one launch with two kinds of programs. The first ``kv_programs`` store KV. The others multiply: a
tile of ROWS tokens by COLUMNS query dims, float32 sums, rounded to bf16 and stored where attention reads them:

* head-major: at its own columns; the last 64 dims of a head are rotated before the store where attention does not;
* chunk-interleaved, from permuted rows of the weight: a tile's columns lie together within one chunk;
* chunk-interleaved, from rows in checkpoint order: 16 columns at a time go to their chunk. Blocks of 128 rows share a
  scale in that order only, so this is the order of fp8 weights.

e4m3 weights have scales for blocks of SCALE_ROWS rows by SCALE_DEPTH of the rank: products are summed a block at a time
and scaled in float32, which also keeps short what matrix units sum in less than float32 on some GPUs.

A head norm needs the whole head: COLUMNS is then 512. Rows are rounded to bf16, as an unfused projection leaves them,
and normed in the registers they were summed in.

Steps of fewer than 64 tokens multiply the transposed problem: matrix instructions take 64 rows at least, and the
weight has them. Bytes: the weight once, and a token ``rank`` of activations and ``2 * 512 * H`` of query; the heads
past H are zero already and stay untouched.
"""

import triton
import triton.language as tl
from torch import Tensor

from ...formats import Record
from ...policy import LaunchConfig
from ..device import dot, fma, reciprocal_sqrt, rotate, to_bf16, tree_sum, ue8m0, upcast
from ..launch import Kernel, Launch, Tile
from .kv import SCALARS, UNALIGNED, cache_scalars, kv_tile, programs, record_constants

HEAD_DIM = 512
HEAD_MAJOR, PERMUTED, SCATTERED = 0, 1, 2
"""Where a product goes: see the module's three cases."""

GROUP = 32
"""Row tiles that share the weight's columns in the L2 before the next columns are visited."""
KV_TOKENS = 8
"""KV rows a program stores at a time."""
KV_ROWS = 64
"""KV rows a program stores, one batch after another, so that a few spare programs do it while the others multiply."""
KV_PROGRAMS = 4
"""KV programs of a small step: as many as an H200 has multiprocessors past the 128 tiles of such a projection."""

PROJECT_SCALARS = [*SCALARS, "stride_x_scale", "stride_x_group"]


@triton.jit
def _tail(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The last 64 of COLUMNS float32 dims: [ROWS, 64]."""
    if COLUMNS == 64:
        return x
    elif COLUMNS <= 256:
        _, right = tl.split(tl.permute(tl.reshape(x, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)))
        return _tail(right, ROWS, COLUMNS // 2)
    else:  # halving so many spills; of the added bit patterns all but one are zero, which keeps signs of zero and NaNs
        GROUPS: tl.constexpr = COLUMNS // 64
        bits = tl.reshape(x.to(tl.int32, bitcast=True), (ROWS, GROUPS, 64))
        last = (tl.arange(0, GROUPS) == GROUPS - 1)[None, :, None]
        return tl.sum(tl.where(last, bits, 0), axis=1).to(tl.float32, bitcast=True)


@triton.jit
def _product_tile(
    tile,
    x,
    weight,
    x_scale,
    weight_scale,
    out,
    positions,
    rope_table,
    tokens,
    stride_x_scale,
    stride_x_group,
    stride_out,
    norm_eps,
    RANK: tl.constexpr,
    HEADS: tl.constexpr,
    PADDED: tl.constexpr,
    TARGET: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SCALE_DEPTH: tl.constexpr,
    X_GROUPED: tl.constexpr,
    NORM: tl.constexpr,
    ROPE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    GROUP: tl.constexpr,
):
    """One tile of the product, normed and rotated as asked, stored."""
    TILES: tl.constexpr = HEADS * 512 // COLUMNS
    SWAPPED: tl.constexpr = ROWS < 64
    group = tile // (GROUP * TILES)
    within = tile - group * (GROUP * TILES)
    group_rows = tl.minimum(tl.cdiv(tokens, ROWS) - group * GROUP, GROUP)
    row_tile = group * GROUP + within % group_rows
    start = within // group_rows * COLUMNS
    token = row_tile * ROWS + tl.arange(0, ROWS)
    column = start + tl.arange(0, COLUMNS)
    in_range = token < tokens
    if ROPE:  # angles before the sums, so that nothing is waited for behind them
        last = start % 512 == 512 - COLUMNS
        rotated = tl.where(last, token, tokens) < tokens
        position = tl.load(positions + token, mask=rotated, other=0).to(tl.int64)
        angle = rope_table + position[:, None] * 64 + tl.arange(0, 32)[None, :]
        cos = upcast(tl.load(angle, mask=rotated[:, None], other=0.0))
        sin = upcast(tl.load(angle + 32, mask=rotated[:, None], other=0.0))

    total = tl.zeros((COLUMNS, ROWS) if SWAPPED else (ROWS, COLUMNS), tl.float32)
    for depth in tl.range(0, RANK, DEPTH, num_stages=STAGES):
        a = x.load([row_tile * ROWS, depth])
        b = weight.load([start, depth])
        if SCALE_DEPTH == 0:
            if SWAPPED:
                total = dot(b, a.T, total)
            else:
                total = dot(a, b.T, total)
        else:
            if SCALE_ROWS % COLUMNS == 0:
                scale = tl.load(weight_scale + start // SCALE_ROWS * (RANK // SCALE_DEPTH) + depth // SCALE_DEPTH)
            else:
                at = weight_scale + column // SCALE_ROWS * (RANK // SCALE_DEPTH) + depth // SCALE_DEPTH
                scale = tl.load(at)[:, None] if SWAPPED else tl.load(at)[None, :]
            if weight_scale.dtype.element_ty == tl.uint8:
                scale = ue8m0(scale)
            if X_GROUPED:
                at = x_scale + token.to(tl.int64) * stride_x_scale + depth // 128 * stride_x_group
                x_part = tl.load(at, mask=in_range, other=0.0)
                scale = scale * (x_part[None, :] if SWAPPED else x_part[:, None])
            if SWAPPED:
                total = fma(dot(b, a.T, tl.zeros((COLUMNS, ROWS), tl.float32)), scale, total)
            else:
                total = fma(dot(a, b.T, tl.zeros((ROWS, COLUMNS), tl.float32)), scale, total)
    if SWAPPED:
        total = total.T
    if SCALE_DEPTH > 0 and not X_GROUPED:
        total *= tl.load(x_scale + token.to(tl.int64) * stride_x_scale, mask=in_range, other=0.0)[:, None]
    value = to_bf16(total)
    if NORM:
        normed = upcast(value)
        normed *= reciprocal_sqrt(tl.div_rn(tree_sum(normed * normed, ROWS, 512), 512.0) + norm_eps)[:, None]
        value = to_bf16(normed)

    LIVE: tl.constexpr = HEADS * 16
    WIDTH: tl.constexpr = PADDED * 16
    if TARGET == 0:
        target = column
    elif TARGET == 2:
        target = column % 512 // 16 * WIDTH + column // 512 * 16 + column % 16
    elif LIVE % COLUMNS == 0:
        target = tl.multiple_of(start // LIVE * WIDTH + start % LIVE, 16) + tl.arange(0, COLUMNS)
    else:
        target = column // LIVE * WIDTH + column % LIVE
    row = out + (token.to(tl.int64) * (stride_out * 8))[:, None]
    stored = in_range[:, None]
    if ROPE:
        if last:
            tail = _tail(normed if NORM else upcast(value), ROWS, COLUMNS)
            even, odd = tl.split(tl.reshape(tail, (ROWS, 32, 2)))
            even, odd = rotate(even, odd, cos, sin)
            tail = to_bf16(tl.reshape(tl.join(even, odd), (ROWS, 64)))
            tl.store(row + (start + COLUMNS - 64) + tl.arange(0, 64)[None, :], tail, mask=stored)
        stored = stored & (column < tl.where(last, start + COLUMNS - 64, start + COLUMNS))[None, :]
    tl.store(row + target[None, :], value, mask=stored)


@triton.jit(do_not_specialize=PROJECT_SCALARS, do_not_specialize_on_alignment=[*UNALIGNED, "x_scale", "weight_scale"])
def _project_kernel(
    x,
    weight,
    x_scale,
    weight_scale,
    out,
    kv,
    cache,
    slots,
    positions,
    rope_table,
    kv_scale,
    tokens: "i32",
    stored_tokens: "i32",
    kv_programs: "i32",
    stride_x_scale: "i64",
    stride_x_group: "i64",
    stride_out: "i64",
    stride_kv: "i64",
    stride_block: "i64",
    capacity: "i64",
    norm_eps: "fp32",
    BLOCK_SIZE: tl.constexpr,
    QUANTISED: tl.constexpr,
    SCALE_DIMS: tl.constexpr,
    BODY_BYTES: tl.constexpr,
    TAIL_BYTES: tl.constexpr,
    SCALE_OFFSET: tl.constexpr,
    KV_TOKENS: tl.constexpr,
    INSERT: tl.constexpr,
    RANK: tl.constexpr,
    HEADS: tl.constexpr,
    PADDED: tl.constexpr,
    TARGET: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SCALE_DEPTH: tl.constexpr,
    X_GROUPED: tl.constexpr,
    NORM: tl.constexpr,
    ROPE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    GROUP: tl.constexpr,
):
    pid = tl.program_id(0)
    if INSERT:
        if pid < kv_programs:
            for batch in tl.range(pid, tl.cdiv(stored_tokens, KV_TOKENS), kv_programs):
                kv_tile(
                    batch,
                    kv,
                    cache,
                    slots,
                    positions,
                    rope_table,
                    kv,
                    kv_scale,
                    stored_tokens,
                    stride_kv,
                    stride_block,
                    capacity,
                    0.0,
                    BLOCK_SIZE,
                    QUANTISED,
                    SCALE_DIMS,
                    BODY_BYTES,
                    TAIL_BYTES,
                    SCALE_OFFSET,
                    False,
                    KV_TOKENS,
                )
    if pid >= kv_programs:
        _product_tile(
            pid - kv_programs,
            x,
            weight,
            x_scale,
            weight_scale,
            out,
            positions,
            rope_table,
            tokens,
            stride_x_scale,
            stride_x_group,
            stride_out,
            norm_eps,
            RANK,
            HEADS,
            PADDED,
            TARGET,
            SCALE_ROWS,
            SCALE_DEPTH,
            X_GROUPED,
            NORM,
            ROPE,
            ROWS,
            COLUMNS,
            DEPTH,
            STAGES,
            GROUP,
        )


project = Kernel(_project_kernel)


FEW_TOKENS = 128
"""Steps of one or two row tiles."""


def _columns(config: LaunchConfig, tokens: int, rows: int) -> int:
    """Query dims a tile: of few tokens, fewer than configured where a row of tiles would leave half of an H200 idle."""
    columns = config.tokens
    while tokens <= FEW_TOKENS and columns > 64 and rows // columns <= 66:
        columns //= 2
    return columns


def launch_project(
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor | None,
    weight_scale: Tensor | None,
    out: Tensor,
    kv: Tensor | None,
    cache: Tensor | None,
    slots: Tensor | None,
    positions: Tensor | None,
    rope_table: Tensor | None,
    *,
    record: Record | None,
    interleaved: bool,
    norm_eps: float | None,
    rope: bool,
    kv_scale: Tensor | None,
    config: LaunchConfig,
) -> Launch:
    """``x @ weight.T`` into ``out``, ``config.rows`` tokens by ``config.tokens`` dims a program; the KV half if any."""
    (tokens, rank), heads = x.shape, weight.shape[0] // 512
    columns = HEAD_DIM if norm_eps is not None else _columns(config, tokens, weight.shape[0])
    if weight_scale is None:
        scale_rows, scale_depth = 0, 0
    else:
        scale_rows, scale_depth = weight.shape[0] // weight_scale.shape[0], rank // weight_scale.shape[1]
    depth = scale_depth or 64
    target = HEAD_MAJOR if not interleaved else SCATTERED if scale_depth else PERMUTED
    grouped = x_scale is not None and x_scale.dim() == 2
    if record is None or kv is None or cache is None or slots is None:
        stored, kv_programs, kv_scalars, kv_constants = 0, 0, (0, 0, 0), (0, 0, 0, 0, 0, 0)
    else:
        stored = slots.shape[0]
        kv_programs = max(min(programs(stored, KV_TOKENS), KV_PROGRAMS), programs(stored, KV_ROWS))
        kv_programs = kv_programs if cache.numel() else 0
        kv_scalars, kv_constants = cache_scalars(kv, cache), record_constants(record, cache.shape[1])
    strides = (0, 0) if x_scale is None else (x_scale.stride(0), x_scale.stride(1) if grouped else 0)
    return Launch(
        project,
        kv_programs + programs(tokens, config.rows) * (weight.shape[0] // columns),
        (
            Tile(x, (config.rows, depth)),
            Tile(weight, (columns, depth)),
            x_scale,
            weight_scale,
            out,
            kv,
            cache,
            slots,
            positions,
            rope_table,
            kv_scale,
        ),
        (
            tokens,
            stored,
            kv_programs,
            *strides,
            out.stride(0) // 8,
            *kv_scalars,
            0.0 if norm_eps is None else norm_eps,
        ),
        (
            *kv_constants,
            KV_TOKENS,
            record is not None,
            rank,
            heads,
            out.shape[1],
            target,
            scale_rows,
            scale_depth,
            grouped,
            norm_eps is not None,
            rope,
            config.rows,
            columns,
            depth,
            config.num_stages,
            GROUP,
        ),
        config.num_warps,
    )
