"""DeepSeek-V4 / V4.1 prologue: query rows to what attention reads, KV latent rows to stored records.

``launch_query_kv`` is one launch with two kinds of programs. The first ``kv_programs`` store KV: a tile of
tokens, each row rotated in its last 64 dims, quantised and written to its slot. The others move the query:

* chunk-interleaved: a tile of (token, chunk) rows, ``H*16`` values copied into ``P*16``, tail zeroed;
* head-major: a tile of (token, head) rows of 512, with the optional head norm, RoPE and e4m3 cast. Where
  the query already lies in its padded buffer, only live heads are visited, and without a norm only their
  64 rotated dims.

Bytes a token: query ``2 * 512 * (H + P)`` (in place without norm: ``2 * 2 * 64 * H``), KV 1024 + 256 of
RoPE table + 16 of slot and position + the record.
"""

import triton
import triton.language as tl
from torch import Tensor

from ...formats import Record
from ...policy import LaunchConfig
from ..device import (
    reciprocal_sqrt,
    rotate,
    to_activation,
    to_e4m3,
    tree_sum,
    upcast,
)
from ..launch import Kernel, Launch
from .kv import SCALARS, UNALIGNED, cache_scalars, kv_tile, programs, record_constants


@triton.jit
def _copy_rows(
    pid, query, out, tokens, stride_query, stride_out, HEADS: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr
):
    """Chunk-interleaved: copy ROWS (token, chunk) rows and zero their tails. Bits are moved, not values."""
    LIVE: tl.constexpr = HEADS * 16
    WIDTH: tl.constexpr = PADDED * 16
    row = pid * ROWS + tl.arange(0, ROWS)
    token, chunk = (row // 32).to(tl.int64), row % 32
    valid = (token < tokens)[:, None]
    col = tl.arange(0, triton.next_power_of_2(WIDTH))[None, :]
    source = query + (token * (stride_query * 8) + chunk * LIVE)[:, None]
    value = tl.load(source + col, mask=valid & (col < LIVE), other=0.0)
    target = out + (token * (stride_out * 8) + chunk * WIDTH)[:, None]
    tl.store(target + col, value, mask=valid & (col < WIDTH))


@triton.jit
def _head_rows(
    pid,
    query,
    out,
    positions,
    rope_table,
    query_scale_inv,
    tokens,
    stride_query,
    stride_head,
    stride_out,
    norm_eps,
    HEADS: tl.constexpr,
    PADDED: tl.constexpr,
    NORM: tl.constexpr,
    ROPE: tl.constexpr,
    QUANTISE: tl.constexpr,
    IN_PLACE: tl.constexpr,
    OUT_UNIT: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Head-major: ROWS (token, head) rows of 512, normed, rotated and cast as asked; dead heads are zero.

    Where ROWS divides the heads, a tile belongs to one token and is live or dead as a whole: one position,
    one row of the table, and no arithmetic on heads that are zero anyway.
    """
    VISITED: tl.constexpr = HEADS if IN_PLACE else PADDED
    ONE_TOKEN: tl.constexpr = VISITED % ROWS == 0
    if QUANTISE:
        out = out.to(tl.pointer_type(tl.uint8))
    if ONE_TOKEN:
        tiles: tl.constexpr = VISITED // ROWS
        token = (pid // tiles).to(tl.int64)
        head = (pid % tiles) * ROWS + tl.arange(0, ROWS)
        live = head < HEADS
        source = query + token * (stride_query * 8) + (head * (stride_head * 8))[:, None]
        target = out + token * (stride_out * OUT_UNIT) + (head * 512)[:, None]
        written = (head < PADDED)[:, None]
    else:
        row = pid * ROWS + tl.arange(0, ROWS)
        token, head = (row // VISITED).to(tl.int64), row % VISITED
        live = (token < tokens) & (head < HEADS)
        source = query + (token * (stride_query * 8) + head * (stride_head * 8))[:, None]
        target = out + (token * (stride_out * OUT_UNIT) + head * 512)[:, None]
        written = (token < tokens)[:, None]
    copied = live[:, None]
    dim = tl.arange(0, 512)[None, :]

    if ONE_TOKEN and HEADS % ROWS == 0 and (pid % (VISITED // ROWS)) * ROWS >= HEADS:
        zero = tl.zeros((ROWS, 512), tl.uint8 if QUANTISE else query.dtype.element_ty)
        tl.store(target + dim, zero, mask=written)
    else:
        untouched: tl.constexpr = 448 if ROPE else 512
        if QUANTISE:
            scale_inv = upcast(tl.load(query_scale_inv))
        if NORM or QUANTISE:
            x = upcast(tl.load(source + dim, mask=copied, other=0.0))
            if NORM:
                inverse = reciprocal_sqrt(tl.div_rn(tree_sum(x * x, ROWS, 512), 512.0) + norm_eps)[:, None]
                x = x * inverse
            x = tl.where(copied, x, 0.0)
            value = to_e4m3(x * scale_inv) if QUANTISE else to_activation(x, query.dtype.element_ty)
            tl.store(target + dim, value, mask=written & (dim < untouched))
        elif not IN_PLACE:
            value = tl.load(source + dim, mask=copied & (dim < untouched), other=0.0)
            tl.store(target + dim, value, mask=written & (dim < untouched))

        if ROPE:
            dim64 = tl.arange(0, 64)[None, :]
            x = upcast(tl.load(source + 448 + dim64, mask=copied, other=0.0))
            if NORM:
                x = x * inverse
            if ONE_TOKEN:
                position = tl.load(positions + token).to(tl.int64)
                at = rope_table + position * 64 + tl.arange(0, 32)[None, :]
                cos = upcast(tl.load(at))
                sin = upcast(tl.load(at + 32))
            else:
                position = tl.load(positions + token, mask=live, other=0).to(tl.int64)
                at = rope_table + position[:, None] * 64 + tl.arange(0, 32)[None, :]
                cos = upcast(tl.load(at, mask=copied, other=0.0))
                sin = upcast(tl.load(at + 32, mask=copied, other=0.0))
            even, odd = tl.split(tl.reshape(x, (ROWS, 32, 2)))
            even, odd = rotate(even, odd, cos, sin)
            x = tl.where(copied, tl.reshape(tl.join(even, odd), (ROWS, 64)), 0.0)
            value = to_e4m3(x * scale_inv) if QUANTISE else to_activation(x, query.dtype.element_ty)
            tl.store(target + 448 + dim64, value, mask=written)


@triton.jit(do_not_specialize=SCALARS, do_not_specialize_on_alignment=UNALIGNED)
def _query_kv_kernel(
    query,
    out,
    kv,
    cache,
    slots,
    positions,
    rope_table,
    query_scale_inv,
    kv_scale,
    tokens: "i32",
    stored_tokens: "i32",
    kv_programs: "i32",
    stride_query: "i64",
    stride_head: "i64",
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
    HEADS: tl.constexpr,
    PADDED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NORM: tl.constexpr,
    ROPE: tl.constexpr,
    QUANTISE: tl.constexpr,
    IN_PLACE: tl.constexpr,
    OUT_UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    pid = tl.program_id(0)
    if pid < kv_programs:
        kv_tile(
            pid,
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
            TOKENS,
        )
    elif INTERLEAVED:
        _copy_rows(pid - kv_programs, query, out, tokens, stride_query, stride_out, HEADS, PADDED, ROWS)
    else:
        _head_rows(
            pid - kv_programs,
            query,
            out,
            positions,
            rope_table,
            query_scale_inv,
            tokens,
            stride_query,
            stride_head,
            stride_out,
            norm_eps,
            HEADS,
            PADDED,
            NORM,
            ROPE,
            QUANTISE,
            IN_PLACE,
            OUT_UNIT,
            ROWS,
        )


@triton.jit(do_not_specialize=SCALARS)
def _pad_kernel(
    query,
    out,
    tokens: "i32",
    stride_query: "i64",
    stride_head: "i64",
    stride_out: "i64",
    HEADS: tl.constexpr,
    PADDED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ROWS: tl.constexpr,
):
    pid = tl.program_id(0)
    if INTERLEAVED:
        _copy_rows(pid, query, out, tokens, stride_query, stride_out, HEADS, PADDED, ROWS)
    else:
        _head_rows(
            pid,
            query,
            out,
            query,
            query,
            query,
            tokens,
            stride_query,
            stride_head,
            stride_out,
            0.0,
            HEADS,
            PADDED,
            False,
            False,
            False,
            False,
            8,
            ROWS,
        )


query_kv = Kernel(_query_kv_kernel)
pad = Kernel(_pad_kernel)


def _tile_rows(config: LaunchConfig, padded_heads: int, *, interleaved: bool) -> int:
    """Rows a program: chunk rows of more than 64 heads are as many fewer."""
    return max(1, config.rows * 64 // padded_heads) if interleaved and padded_heads > 64 else config.rows


def launch_pad(query: Tensor, out: Tensor, *, interleaved: bool, config: LaunchConfig) -> Launch:
    """The padding copy alone."""
    tokens, heads, _ = query.shape
    padded = out.shape[1]
    tile_rows = _tile_rows(config, padded, interleaved=interleaved)
    return Launch(
        pad,
        programs(tokens * (32 if interleaved else padded), tile_rows),
        (query, out),
        (tokens, query.stride(0) // 8, query.stride(1) // 8, out.stride(0) // 8),
        (heads, padded, interleaved, tile_rows),
        config.num_warps,
    )


def launch_query_kv(
    query: Tensor,
    kv: Tensor,
    cache: Tensor,
    slots: Tensor,
    positions: Tensor,
    rope_table: Tensor,
    out: Tensor,
    *,
    record: Record,
    interleaved: bool,
    norm_eps: float | None,
    rope: bool,
    query_scale_inv: Tensor | None,
    kv_scale: Tensor | None,
    in_place: bool,
    config: LaunchConfig,
) -> Launch:
    """Both halves in one launch."""
    tokens, heads, _ = query.shape
    stride_query, stride_head, _ = query.stride()
    padded, stored = out.shape[1], slots.shape[0]
    kv_programs = programs(stored, config.tokens) if cache.numel() else 0
    rows = tokens * (32 if interleaved else heads if in_place else padded)
    tile_rows = _tile_rows(config, padded, interleaved=interleaved)
    quantise = query_scale_inv is not None
    out_unit = 16 if quantise else 8  # elements in 16 bytes
    return Launch(
        query_kv,
        kv_programs + programs(rows, tile_rows),
        (query, out, kv, cache, slots, positions, rope_table, query_scale_inv, kv_scale),
        (
            tokens,
            stored,
            kv_programs,
            stride_query // 8,
            stride_head // 8,
            out.stride()[0] // out_unit,
            *cache_scalars(kv, cache),
            0.0 if norm_eps is None else norm_eps,
        ),
        (
            *record_constants(record, cache.shape[1]),
            heads,
            padded,
            interleaved,
            norm_eps is not None,
            rope,
            quantise,
            in_place,
            out_unit,
            tile_rows,
            config.tokens,
        ),
        config.num_warps,
    )
