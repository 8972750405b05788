"""The KV half: latent rows rotated in their last 64 dims, quantised, and stored at their slots.

``kv_tile`` runs in the KV programs of every V4 launch; ``launch_kv`` launches them alone. Bytes a token: 1024 of
latent, 256 of RoPE table, 16 of slot and position, and the record.
"""

import triton
import triton.language as tl
from torch import Tensor

from ...formats import Record
from ...policy import LaunchConfig
from ..device import (
    finite_abs,
    power_of_two,
    quiet,
    reciprocal_sqrt,
    rotate,
    scale_exponent,
    to_bf16,
    to_e4m3,
    tree_sum,
    upcast,
)
from ..launch import Kernel, Launch

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
def kv_tile(
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
        tl.store(at + dim, quiet(to_bf16(x)), mask=head_stored)
        tl.store(at + 448 + dim64, to_bf16(tail), mask=stored)


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
    kv_tile(
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


kv_only = Kernel(_kv_kernel)


def record_constants(record: Record, block_size: int) -> tuple[int, ...]:
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


def programs(items: int, tile: int) -> int:
    return -(-items // tile)


def cache_scalars(kv: Tensor, cache: Tensor) -> tuple[int, int, int]:
    """stride_kv, stride_block, capacity."""
    blocks, block_size, _ = cache.shape
    stride_block = cache.stride()[0] * cache.element_size() // 16
    return kv.stride()[0] // 8, stride_block, blocks * block_size


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
        programs(stored, config.tokens) if cache.numel() else 0,
        (kv, cache, slots, positions, rope_table, norm_weight, kv_scale),
        (stored, *cache_scalars(kv, cache), norm_eps),
        (*record_constants(record, cache.shape[1]), norm_weight is not None, config.tokens),
        config.num_warps,
    )
