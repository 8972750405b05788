"""DSA norm, RoPE and insert: latents to normed latents, latents and keys to stored records.

``launch_norm_rope`` is one launch over groups of GROUP tokens: for each, one program for the indexer key, one for
the main key, ``GROUP / TOKENS`` for the KV latent and ``GROUP / ROWS`` for the query latent and the top-k buffer.
Kinds that read and kinds that write thus run side by side. A page of the main cache is records, one behind the
other; a page of the indexer's is all its codes, then all its scales.

Bytes a token: ``4 * rank``, 1024 + 128 and the record, 256 and the record, ``4 * top_k``.
"""

import triton
import triton.language as tl
from torch import Tensor

from ...formats import Record
from ...policy import LaunchConfig
from ...reference.numerics import Pairing
from ..device import finite_abs, power_of_two, reciprocal_sqrt, scale_exponent, to_bf16, to_e4m3, tree_sum, upcast
from ..launch import Kernel, Launch
from .rows import (
    LATENT_DIM,
    UNALIGNED,
    index_quantise,
    index_rope,
    main_rope,
    quotient,
    store_rotated,
    units,
)

# No scalar selects a variant by its value.
NORM_SCALARS = [
    "tokens",
    "stored_tokens",
    "index_tokens",
    "stride_q",
    "stride_q_out",
    "stride_kv",
    "stride_pe",
    "stride_kv_out",
    "stride_pe_out",
    "stride_block",
    "capacity",
    "stride_index",
    "stride_index_block",
    "index_capacity",
    "stride_top_k",
    "q_eps",
    "kv_eps",
    "index_eps",
]

GROUP = 16
"""Tokens of a group of ``launch_norm_rope``; its ``rows`` and ``tokens`` are at most as many."""


@triton.jit
def _page(token, in_range, slots, capacity, cache, stride_block, BLOCK_SIZE: tl.constexpr):
    """Which tokens are stored, the page of each as a byte pointer, and its offset there.

    Rows without a slot may carry any position, so tables are read for stored rows only; nothing else has to
    wait for the slots.
    """
    slot = tl.load(slots + token, mask=in_range, other=-1).to(tl.int64)
    stored = in_range & (slot >= 0) & (slot < capacity)  # in 64 bits, before anything is narrowed
    block = slot // BLOCK_SIZE
    page = cache.to(tl.pointer_type(tl.uint8)) + block * (stride_block * 16)
    return stored, page, slot - block * BLOCK_SIZE


@triton.jit
def _index_key_tile(
    token,
    index_key,
    index_weight,
    index_bias,
    index_cache,
    index_slots,
    positions,
    rope_table,
    index_tokens,
    stride_index,
    stride_block,
    capacity,
    eps,
    INTERLEAVED: tl.constexpr,
    UE8M0: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """LayerNorm, RoPE, quantise and store TOKENS indexer keys of 128, in quarters as :func:`.query._index_rows`."""
    in_range = token < index_tokens
    inside = in_range[:, None]
    row = index_key + (token.to(tl.int64) * (stride_index * 8))[:, None]
    whole = upcast(tl.load(row + tl.arange(0, 128)[None, :], mask=inside, other=0.0))
    position = tl.load(positions + token, mask=in_range, other=0).to(tl.int64)
    stored, page, offset = _page(token, in_range, index_slots, capacity, index_cache, stride_block, BLOCK_SIZE)
    mask = stored[:, None]
    mean = tl.div_rn(tree_sum(whole, TOKENS, 128), 128.0)[:, None]
    whole = whole - mean
    inverse = reciprocal_sqrt(tl.div_rn(tree_sum(whole * whole, TOKENS, 128), 128.0) + eps)[:, None]

    # The same row again, from cache, in quarters: cheaper than to move values between threads.
    dim = tl.arange(0, 32)[None, :]
    x0 = upcast(tl.load(row + dim, mask=inside, other=0.0))
    x1 = upcast(tl.load(row + 32 + dim, mask=inside, other=0.0))
    x2 = upcast(tl.load(row + 64 + dim, mask=inside, other=0.0))
    x3 = upcast(tl.load(row + 96 + dim, mask=inside, other=0.0))
    x0 = _affine((x0 - mean) * inverse, index_weight + dim, index_bias + dim)
    x1 = _affine((x1 - mean) * inverse, index_weight + 32 + dim, index_bias + 32 + dim)
    x2 = _affine((x2 - mean) * inverse, index_weight + 64 + dim, index_bias + 64 + dim)
    x3 = _affine((x3 - mean) * inverse, index_weight + 96 + dim, index_bias + 96 + dim)

    x0, x1 = index_rope(x0, x1, rope_table + position[:, None] * 64, mask, INTERLEAVED, TOKENS)
    c0, c1, c2, c3, exponent = index_quantise(x0, x1, x2, x3)
    target = (page + offset * 128)[:, None] + dim
    tl.store(target, c0, mask=mask)
    tl.store(target + 32, c1, mask=mask)
    tl.store(target + 64, c2, mask=mask)
    tl.store(target + 96, c3, mask=mask)
    scale = (page + BLOCK_SIZE * 128 + offset * 4).to(tl.pointer_type(tl.int32))
    tl.store(scale, exponent * 0x01010101 if UE8M0 else exponent << 23, mask=stored)


@triton.jit
def _affine(x, weight, bias):
    return x * upcast(tl.load(weight)) + upcast(tl.load(bias))


@triton.jit
def _key_tile(
    token,
    k_pe,
    cache,
    slots,
    positions,
    rope_table,
    kv_scale,
    k_pe_out,
    tokens,
    stored_tokens,
    stride_pe,
    stride_pe_out,
    stride_block,
    capacity,
    STORE: tl.constexpr,
    RETURN: tl.constexpr,
    HALF_SPLIT: tl.constexpr,
    PE_OFFSET: tl.constexpr,
    PE_BF16: tl.constexpr,
    RECORD_BYTES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Rotate TOKENS keys of 64; store them behind their latents and return them as asked."""
    in_range = token < (tokens if RETURN else stored_tokens)  # returned on every row, whatever its slot
    mask = in_range[:, None]
    row = token.to(tl.int64)[:, None]
    at = k_pe + row * (stride_pe * 8) + tl.arange(0, 32)[None, :]
    x0 = upcast(tl.load(at, mask=mask, other=0.0))
    x1 = upcast(tl.load(at + 32, mask=mask, other=0.0))
    table = rope_table + tl.load(positions + token, mask=in_range, other=0).to(tl.int64)[:, None] * 64
    if STORE:
        stored, page, offset = _page(token, token < stored_tokens, slots, capacity, cache, stride_block, BLOCK_SIZE)
        kept = stored[:, None]
    even0, odd0, even1, odd1 = main_rope(x0, x1, table, mask if RETURN else kept, TOKENS)
    if RETURN:
        target = k_pe_out + row * (stride_pe_out * 8)
        store_rotated(target, even0, odd0, even1, odd1, mask, mask, 1.0, 1.0, False, False, HALF_SPLIT, TOKENS)
    if STORE:
        target = (page + offset * RECORD_BYTES + PE_OFFSET)[:, None]
        if PE_BF16:
            target = target.to(tl.pointer_type(tl.bfloat16))
            store_rotated(target, even0, odd0, even1, odd1, kept, kept, 1.0, 1.0, False, False, HALF_SPLIT, TOKENS)
        else:
            scale = tl.load(kv_scale)
            reciprocal = tl.div_rn(1.0, scale)
            store_rotated(
                target, even0, odd0, even1, odd1, kept, kept, scale, reciprocal, True, False, HALF_SPLIT, TOKENS
            )


@triton.jit
def _kv_tile(
    token,
    kv_latent,
    cache,
    slots,
    kv_weight,
    kv_scale,
    kv_out,
    tokens,
    stored_tokens,
    stride_kv,
    stride_kv_out,
    stride_block,
    capacity,
    eps,
    STORE: tl.constexpr,
    RETURN: tl.constexpr,
    ELEMENT_BYTES: tl.constexpr,
    SCALE_DIMS: tl.constexpr,
    SCALE_OFFSET: tl.constexpr,
    RECORD_BYTES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """RMSNorm TOKENS KV latents of 512; quantise and store them and return them as asked."""
    mask = (token < (tokens if RETURN else stored_tokens))[:, None]  # returned on every row, whatever its slot
    row = token.to(tl.int64)[:, None]
    dim = tl.arange(0, 512)[None, :]
    x = upcast(tl.load(kv_latent + row * (stride_kv * 8) + dim, mask=mask, other=0.0))
    # A tile of equal rows, not one row: it is then loaded into the layout of x.
    weight = upcast(tl.load(kv_weight + tl.zeros_like(row) + dim))
    inverse = reciprocal_sqrt(tl.div_rn(tree_sum(x * x, TOKENS, 512), 512.0) + eps)
    x = x * inverse[:, None] * weight
    if RETURN:
        tl.store(kv_out + row * (stride_kv_out * 8) + dim, to_bf16(x), mask=mask)
    if STORE:
        stored, page, offset = _page(token, token < stored_tokens, slots, capacity, cache, stride_block, BLOCK_SIZE)
        data = page + offset * RECORD_BYTES
        kept = stored[:, None]
        if SCALE_DIMS > 0:
            blocks: tl.constexpr = 512 // SCALE_DIMS
            x = tl.reshape(x, (TOKENS, blocks, SCALE_DIMS))
            # A quotient below 1e-4 counts as 1e-4, whose power of two is 2**-13; the other floor drops a NaN.
            amax = tl.maximum(tl.max(finite_abs(x), axis=2), 1e-4)
            exponent = tl.maximum(scale_exponent(amax), 114)
            code = to_e4m3(tl.reshape(x * power_of_two(254 - exponent)[:, :, None], (TOKENS, 512)))
            tl.store(data[:, None] + dim, code, mask=kept)
            at = (data + SCALE_OFFSET).to(tl.pointer_type(tl.float32))[:, None] + tl.arange(0, blocks)[None, :]
            tl.store(at, power_of_two(exponent), mask=kept)
        elif ELEMENT_BYTES == 1:
            scale = tl.load(kv_scale)
            code = to_e4m3(quotient(x, scale, tl.div_rn(1.0, scale)))
            tl.store(data[:, None] + dim, code, mask=kept)
        else:
            tl.store(data.to(tl.pointer_type(tl.bfloat16))[:, None] + dim, to_bf16(x), mask=kept)


@triton.jit
def _query_latent_tile(
    token,
    q_latent,
    q_weight,
    q_out,
    top_k,
    tokens,
    stride_q,
    stride_q_out,
    stride_top_k,
    eps,
    RANK: tl.constexpr,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
):
    """RMSNorm ROWS query latents; their rows of the top-k buffer become -1 while the latents are on their way."""
    WIDTH: tl.constexpr = triton.next_power_of_2(RANK)
    FILL: tl.constexpr = triton.next_power_of_2(TOP_K)
    valid = (token < tokens)[:, None]
    row = token.to(tl.int64)[:, None]
    dim = tl.arange(0, WIDTH)[None, :]
    inside = valid & (dim < RANK)
    x = upcast(tl.load(q_latent + row * (stride_q * 8) + dim, mask=inside, other=0.0))
    weight = upcast(tl.load(q_weight + dim, mask=dim < RANK, other=0.0))
    if TOP_K > 0:
        index = tl.arange(0, FILL)[None, :]
        at = top_k + row * (stride_top_k * 4) + index
        tl.store(at, tl.full((ROWS, FILL), -1, tl.int32), mask=valid & (index < TOP_K))
    inverse = reciprocal_sqrt(tl.div_rn(tree_sum(x * x, ROWS, WIDTH), RANK * 1.0) + eps)
    x = x * inverse[:, None] * weight
    tl.store(q_out + row * (stride_q_out * 8) + dim, to_bf16(x), mask=inside)


@triton.jit(do_not_specialize=NORM_SCALARS, do_not_specialize_on_alignment=UNALIGNED)
def _dsa_norm_rope_kernel(
    q_latent,
    kv_latent,
    k_pe,
    cache,
    slots,
    positions,
    rope_table,
    q_weight,
    kv_weight,
    kv_scale,
    index_key,
    index_weight,
    index_bias,
    index_cache,
    index_slots,
    index_rope_table,
    top_k,
    q_out,
    kv_out,
    k_pe_out,
    tokens: "i32",
    stored_tokens: "i32",
    index_tokens: "i32",
    stride_q: "i64",
    stride_q_out: "i64",
    stride_kv: "i64",
    stride_pe: "i64",
    stride_kv_out: "i64",
    stride_pe_out: "i64",
    stride_block: "i64",
    capacity: "i64",
    stride_index: "i64",
    stride_index_block: "i64",
    index_capacity: "i64",
    stride_top_k: "i64",
    q_eps: "fp32",
    kv_eps: "fp32",
    index_eps: "fp32",
    RANK: tl.constexpr,
    TOP_K: tl.constexpr,
    STORE: tl.constexpr,
    RETURN: tl.constexpr,
    ROPE: tl.constexpr,
    HALF_SPLIT: tl.constexpr,
    ELEMENT_BYTES: tl.constexpr,
    SCALE_DIMS: tl.constexpr,
    SCALE_OFFSET: tl.constexpr,
    PE_OFFSET: tl.constexpr,
    PE_BF16: tl.constexpr,
    RECORD_BYTES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    INDEX: tl.constexpr,
    INDEX_INTERLEAVED: tl.constexpr,
    INDEX_UE8M0: tl.constexpr,
    INDEX_BLOCK_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    KV: tl.constexpr = STORE or RETURN
    KEY_AT: tl.constexpr = 1 if INDEX else 0
    KV_AT: tl.constexpr = KEY_AT + (1 if KV and ROPE else 0)
    QUERY_AT: tl.constexpr = KV_AT + (GROUP // TOKENS if KV else 0)
    PROGRAMS: tl.constexpr = QUERY_AT + GROUP // ROWS
    pid = tl.program_id(0)
    first = (pid // PROGRAMS) * GROUP
    place = pid % PROGRAMS
    if place >= QUERY_AT:
        _query_latent_tile(
            first + (place - QUERY_AT) * ROWS + tl.arange(0, ROWS),
            q_latent,
            q_weight,
            q_out,
            top_k,
            tokens,
            stride_q,
            stride_q_out,
            stride_top_k,
            q_eps,
            RANK,
            TOP_K,
            ROWS,
        )
    elif place >= KV_AT:
        if KV:
            _kv_tile(
                first + (place - KV_AT) * TOKENS + tl.arange(0, TOKENS),
                kv_latent,
                cache,
                slots,
                kv_weight,
                kv_scale,
                kv_out,
                tokens,
                stored_tokens,
                stride_kv,
                stride_kv_out,
                stride_block,
                capacity,
                kv_eps,
                STORE,
                RETURN,
                ELEMENT_BYTES,
                SCALE_DIMS,
                SCALE_OFFSET,
                RECORD_BYTES,
                BLOCK_SIZE,
                TOKENS,
            )
    elif place >= KEY_AT:
        if KV and ROPE:
            _key_tile(
                first + tl.arange(0, GROUP),
                k_pe,
                cache,
                slots,
                positions,
                rope_table,
                kv_scale,
                k_pe_out,
                tokens,
                stored_tokens,
                stride_pe,
                stride_pe_out,
                stride_block,
                capacity,
                STORE,
                RETURN,
                HALF_SPLIT,
                PE_OFFSET,
                PE_BF16,
                RECORD_BYTES,
                BLOCK_SIZE,
                GROUP,
            )
    else:
        if INDEX:
            _index_key_tile(
                first + tl.arange(0, GROUP),
                index_key,
                index_weight,
                index_bias,
                index_cache,
                index_slots,
                positions,
                index_rope_table,
                index_tokens,
                stride_index,
                stride_index_block,
                index_capacity,
                index_eps,
                INDEX_INTERLEAVED,
                INDEX_UE8M0,
                INDEX_BLOCK_SIZE,
                GROUP,
            )


norm_rope = Kernel(_dsa_norm_rope_kernel)


def _record_constants(record: Record | None) -> tuple[int | bool, ...]:
    """ELEMENT_BYTES, SCALE_DIMS, SCALE_OFFSET, PE_OFFSET, PE_BF16, RECORD_BYTES."""
    if record is None:
        return (0, 0, 0, 0, False, 0)
    first, last = record.parts[0], record.parts[-1]
    element_bytes = 1 if first.element == "e4m3" else 2
    pe_offset = LATENT_DIM * element_bytes if last is first else last.offset
    scale = first.scale
    dims, offset = (0, 0) if scale is None else (scale.block, scale.offset)
    return (element_bytes, dims, offset, pe_offset, last.element == "bf16", record.bytes)


def _capacity(cache: Tensor | None) -> int:
    return 0 if cache is None else cache.shape[0] * cache.shape[1]


def launch_norm_rope(
    q_latent: Tensor,
    kv_latent: Tensor,
    k_pe: Tensor,
    cache: Tensor | None,
    slots: Tensor | None,
    positions: Tensor,
    rope_table: Tensor | None,
    q_weight: Tensor,
    kv_weight: Tensor,
    kv_scale: Tensor | None,
    index_key: Tensor | None,
    index_weight: Tensor | None,
    index_bias: Tensor | None,
    index_cache: Tensor | None,
    index_slots: Tensor | None,
    index_rope_table: Tensor | None,
    top_k: Tensor | None,
    q_out: Tensor,
    kv_out: Tensor | None,
    k_pe_out: Tensor | None,
    *,
    record: Record | None,
    index_record: Record | None,
    q_eps: float,
    kv_eps: float,
    index_eps: float,
    rope_output: Pairing,
    index_pairing: Pairing,
    config: LaunchConfig,
) -> Launch:
    """The other half: ``config.rows`` query latents and ``config.tokens`` KV latents a program."""
    tokens, rank = q_latent.shape
    rope = k_pe.shape[-1] > 0
    store = cache is not None and slots is not None and _capacity(cache) > 0
    index = index_key is not None and index_slots is not None and _capacity(index_cache) > 0
    index_tensors = (index_key, index_weight, index_bias, index_cache, index_slots, index_rope_table)
    rows, kv_tokens = min(config.rows, GROUP), min(config.tokens, GROUP)
    kv = store or kv_out is not None
    programs = index + (kv and rope) + (GROUP // kv_tokens if kv else 0) + GROUP // rows
    return Launch(
        norm_rope,
        -(-tokens // GROUP) * programs,
        (
            q_latent,
            kv_latent,
            k_pe if rope else None,
            cache if store else None,
            slots if store else None,
            positions,
            rope_table if rope else None,
            q_weight,
            kv_weight,
            kv_scale if store else None,
            *(index_tensors if index else 6 * (None,)),
            top_k,
            q_out,
            kv_out,
            k_pe_out if rope else None,
        ),
        (
            tokens,
            slots.shape[0] if slots is not None and store else 0,
            index_slots.shape[0] if index_slots is not None and index else 0,
            units(q_latent),
            units(q_out),
            units(kv_latent),
            units(k_pe),
            units(kv_out),
            units(k_pe_out),
            units(cache),
            _capacity(cache),
            units(index_key),
            units(index_cache),
            _capacity(index_cache),
            units(top_k),
            q_eps,
            kv_eps,
            index_eps,
        ),
        (
            rank,
            0 if top_k is None else top_k.shape[1],
            store,
            kv_out is not None,
            rope,
            rope_output == "half_split",
            *_record_constants(record if store else None),
            cache.shape[1] if cache is not None and store else 1,
            index,
            index_pairing == "interleaved",
            index and index_record is not None and index_record.parts[0].scale.code == "ue8m0",
            index_cache.shape[1] if index_cache is not None and index else 1,
            GROUP,
            rows,
            kv_tokens,
        ),
        config.num_warps,
    )
