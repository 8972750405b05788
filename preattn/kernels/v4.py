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

from ..formats import Record
from ..policy import LaunchConfig
from .device import (
    finite_abs,
    power_of_two,
    reciprocal_sqrt,
    rotate,
    scale_exponent,
    to_activation,
    to_bf16,
    to_e4m3,
    tree_sum,
    upcast,
)
from .launch import Kernel, Launch

# Strides reach the kernels in units of 16 bytes: the compiler then knows that every row starts on one.
# No scalar selects a variant by its value, nor does the alignment of what engines slice freely.
SCALARS = [
    "tokens",
    "stored_tokens",
    "kv_programs",
    "stride_query",
    "stride_head",
    "stride_out",
    "stride_kv",
    "stride_block",
    "capacity",
    "norm_eps",
]
UNALIGNED = ["slots", "positions", "rope_table", "kv_scale", "query_scale_inv"]


@triton.jit
def _block_codes(x, ROWS: tl.constexpr, DIMS: tl.constexpr, SCALE_DIMS: tl.constexpr):
    """e4m3 codes [ROWS, DIMS] and UE8M0 scales [ROWS, DIMS // SCALE_DIMS] of float32 rows."""
    x = tl.reshape(x, (ROWS, DIMS // SCALE_DIMS, SCALE_DIMS))
    exponent = scale_exponent(tl.maximum(tl.max(finite_abs(x), axis=2), 1e-4))
    code = to_e4m3(tl.reshape(x * power_of_two(254 - exponent)[:, :, None], (ROWS, DIMS)))
    return code, exponent.to(tl.uint8)


@triton.jit
def _kv_tile(
    pid,
    kv,
    cache,
    slots,
    positions,
    rope_table,
    norm_weight,
    kv_scale,
    stored_tokens,
    stride_kv,
    stride_block,
    capacity,
    norm_eps,
    BLOCK_SIZE: tl.constexpr,
    QUANTISED: tl.constexpr,
    SCALE_DIMS: tl.constexpr,
    BODY_BYTES: tl.constexpr,
    TAIL_BYTES: tl.constexpr,
    SCALE_OFFSET: tl.constexpr,
    NORM: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Rotate, quantise and store TOKENS rows of 512. QUANTISED dims become e4m3, the others stay bf16.

    The 64 rotated dims are a tile of their own, loaded again from the cache lines that the row's load just
    brought: the other 448 then pass without a pairing or a table.
    """
    token = pid * TOKENS + tl.arange(0, TOKENS)
    in_range = token < stored_tokens
    slot = tl.load(slots + token, mask=in_range, other=-1).to(tl.int64)
    # Rows without a slot may carry any position, so only the table waits for the slots.
    position = tl.load(positions + token, mask=in_range, other=0).to(tl.int64)
    row = kv + (token.to(tl.int64) * (stride_kv * 8))[:, None]
    dim, dim64 = tl.arange(0, 512)[None, :], tl.arange(0, 64)[None, :]
    x = upcast(tl.load(row + dim, mask=in_range[:, None], other=0.0))
    tail = upcast(tl.load(row + 448 + dim64, mask=in_range[:, None], other=0.0))

    stored = in_range & (slot >= 0) & (slot < capacity)  # in 64 bits, before anything is narrowed
    block = slot // BLOCK_SIZE
    offset = slot - block * BLOCK_SIZE
    page = cache.to(tl.pointer_type(tl.uint8)) + block * (stride_block * 16)
    data = (page + offset * BODY_BYTES)[:, None]
    stored = stored[:, None]

    if NORM:
        inverse = reciprocal_sqrt(tl.div_rn(tree_sum(x * x, TOKENS, 512), 512.0) + norm_eps)[:, None]
        x = upcast(to_bf16((x * inverse) * upcast(tl.load(norm_weight + dim))))
        tail = upcast(to_bf16((tail * inverse) * upcast(tl.load(norm_weight + 448 + dim64))))
    at = rope_table + position[:, None] * 64 + tl.arange(0, 32)[None, :]
    cos = upcast(tl.load(at, mask=stored, other=0.0))
    sin = upcast(tl.load(at + 32, mask=stored, other=0.0))
    even, odd = tl.split(tl.reshape(tail, (TOKENS, 32, 2)))
    even, odd = rotate(even, odd, cos, sin)
    tail = tl.reshape(tl.join(even, odd), (TOKENS, 64))

    head_stored = stored & (dim < 448)
    if SCALE_DIMS > 0:  # block scales, over rows rounded to bf16
        if TAIL_BYTES > 0:
            scale = (page + (BLOCK_SIZE * BODY_BYTES) + offset * TAIL_BYTES)[:, None]
        else:
            scale = data + SCALE_OFFSET
        head_blocks: tl.constexpr = 448 // SCALE_DIMS
        index = tl.arange(0, 512 // SCALE_DIMS)[None, :]
        code, byte = _block_codes(upcast(to_bf16(x)), TOKENS, 512, SCALE_DIMS)
        tl.store(data + dim, code, mask=head_stored)
        if QUANTISED == 512:
            tl.store(scale + index, byte, mask=stored & (index < head_blocks))
            code, byte = _block_codes(upcast(to_bf16(tail)), TOKENS, 64, SCALE_DIMS)
            tl.store(data + 448 + dim64, code, mask=stored)
            tl.store(scale + head_blocks + tl.arange(0, 64 // SCALE_DIMS)[None, :], byte, mask=stored)
        else:  # the byte past the last scale is padding, and zero
            tl.store(scale + index, tl.where(index < head_blocks, byte, 0), mask=stored & (index <= head_blocks))
            tl.store((data + 448).to(tl.pointer_type(tl.bfloat16)) + dim64, to_bf16(tail), mask=stored)
    elif QUANTISED > 0:  # one scale a tensor, over unrounded rows
        scale_inv = tl.div_rn(1.0, upcast(tl.load(kv_scale)))
        tl.store(data + dim, to_e4m3(x * scale_inv), mask=head_stored)
        tl.store(data + 448 + dim64, to_e4m3(tail * scale_inv), mask=stored)
    else:
        at = data.to(tl.pointer_type(tl.bfloat16))
        tl.store(at + dim, to_bf16(x), mask=head_stored)
        tl.store(at + 448 + dim64, to_bf16(tail), mask=stored)


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
        _kv_tile(
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


@triton.jit(do_not_specialize=SCALARS, do_not_specialize_on_alignment=UNALIGNED)
def _kv_kernel(
    kv,
    cache,
    slots,
    positions,
    rope_table,
    norm_weight,
    kv_scale,
    stored_tokens: "i32",
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
    NORM: tl.constexpr,
    TOKENS: tl.constexpr,
):
    _kv_tile(
        tl.program_id(0),
        kv,
        cache,
        slots,
        positions,
        rope_table,
        norm_weight,
        kv_scale,
        stored_tokens,
        stride_kv,
        stride_block,
        capacity,
        norm_eps,
        BLOCK_SIZE,
        QUANTISED,
        SCALE_DIMS,
        BODY_BYTES,
        TAIL_BYTES,
        SCALE_OFFSET,
        NORM,
        TOKENS,
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
kv_only = Kernel(_kv_kernel)
pad = Kernel(_pad_kernel)


def _record_constants(record: Record, block_size: int) -> tuple[int, ...]:
    """BLOCK_SIZE, QUANTISED, SCALE_DIMS, BODY_BYTES, TAIL_BYTES, SCALE_OFFSET."""
    first = record.parts[0]
    quantised = first.dims if first.element == "e4m3" else 0
    scale = first.scale
    return (
        block_size,
        quantised,
        0 if scale is None else scale.block,
        record.body_bytes,
        record.tail_bytes,
        0 if scale is None else scale.offset,
    )


def _programs(items: int, tile: int) -> int:
    return -(-items // tile)


def _tile_rows(config: LaunchConfig, padded_heads: int, *, interleaved: bool) -> int:
    """Rows a program: chunk rows of more than 64 heads are as many fewer."""
    return max(1, config.rows * 64 // padded_heads) if interleaved and padded_heads > 64 else config.rows


def _cache_scalars(kv: Tensor, cache: Tensor) -> tuple[int, int, int]:
    """stride_kv, stride_block, capacity."""
    stride_block = cache.stride(0) * cache.element_size() // 16
    return kv.stride(0) // 8, stride_block, cache.shape[0] * cache.shape[1]


def launch_kv(
    kv: Tensor,
    cache: Tensor,
    slots: Tensor,
    positions: Tensor,
    rope_table: Tensor,
    *,
    record: Record,
    kv_scale: Tensor | None,
    norm_weight: Tensor | None,
    norm_eps: float,
    config: LaunchConfig,
) -> Launch:
    """The KV half alone."""
    stored = slots.shape[0]
    return Launch(
        kv_only,
        _programs(stored, config.tokens) if cache.numel() else 0,
        (kv, cache, slots, positions, rope_table, norm_weight, kv_scale),
        (stored, *_cache_scalars(kv, cache), norm_eps),
        (*_record_constants(record, cache.shape[1]), norm_weight is not None, config.tokens),
        config.num_warps,
    )


def launch_pad(query: Tensor, out: Tensor, *, interleaved: bool, config: LaunchConfig) -> Launch:
    """The padding copy alone."""
    tokens, heads, _ = query.shape
    padded = out.shape[1]
    tile_rows = _tile_rows(config, padded, interleaved=interleaved)
    return Launch(
        pad,
        _programs(tokens * (32 if interleaved else padded), tile_rows),
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
    padded, stored = out.shape[1], slots.shape[0]
    kv_programs = _programs(stored, config.tokens) if cache.numel() else 0
    rows = tokens * (32 if interleaved else heads if in_place else padded)
    tile_rows = _tile_rows(config, padded, interleaved=interleaved)
    quantise = query_scale_inv is not None
    out_unit = 16 if quantise else 8  # elements in 16 bytes
    return Launch(
        query_kv,
        kv_programs + _programs(rows, tile_rows),
        (query, out, kv, cache, slots, positions, rope_table, query_scale_inv, kv_scale),
        (
            tokens,
            stored,
            kv_programs,
            query.stride(0) // 8,
            query.stride(1) // 8,
            out.stride(0) // out_unit,
            *_cache_scalars(kv, cache),
            0.0 if norm_eps is None else norm_eps,
        ),
        (
            *_record_constants(record, cache.shape[1]),
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
