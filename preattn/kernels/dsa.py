"""DSA prologue: query rows and indexer query to what attention reads, latents and indexer key to stored records.

``launch_query`` is one launch with two kinds of programs:

* the first ``index_programs`` take tiles of (token, indexer head) rows of 128: RoPE on the first 64 dims, e4m3
  with a power-of-two scale, the scale folded into the head's weight;
* the others take tiles of (token, head) rows: RoPE of 64 dims into the tail of the packed row (or a tensor of
  their own) and, where the latent is not in its place already, its copy or e4m3 cast into the front.

Bytes a token: packed bf16 ``2 * 2 * 64 * H``, where the latent has to move ``2 * 512 * (H + P)`` more; e4m3
``(2 * H + P) * 576``; indexer ``(2 + 1) * 128 + 2 * 4`` a head; RoPE table 64 values, position 8.

``launch_norm_rope`` is one launch over groups of GROUP tokens: for each, one program for the indexer key,
``GROUP / TOKENS`` for the KV latent and ``GROUP / ROWS`` for the query latent and the top-k buffer. Kinds that
read and kinds that write thus run side by side. Bytes a token: ``4 * rank``, 1024 + 128 and the record, 256 and
the record, ``4 * top_k``.

``launch_absorb`` multiplies a head's query by its ``W_UK``, rounds to bf16, scales and casts to e4m3: the bf16
latent never reaches memory. Bytes a (token, head) row: ``2 * nope + 512``.
"""

import triton
import triton.language as tl
from torch import Tensor

from ..formats import Record
from ..policy import LaunchConfig
from ..reference.numerics import Pairing
from .device import (
    INTERPRETED,
    finite_abs,
    fma,
    index_rotate,
    negate,
    poison,
    power_of_two,
    reciprocal_sqrt,
    rotate,
    scale_exponent,
    to_bf16,
    to_e4m3,
    tree_sum,
)
from .launch import Kernel, Launch

# Strides reach the kernels in units of 16 bytes: the compiler then knows that every row starts on one.
# No scalar selects a variant by its value, nor does the alignment of what engines slice freely.
QUERY_SCALARS = [
    "index_programs",
    "rows",
    "index_rows",
    "stride_pe",
    "stride_pe_head",
    "stride_latent",
    "stride_latent_head",
    "stride_out",
    "stride_out_pe",
    "stride_index",
    "stride_weights",
    "softmax_scale",
    "head_scale",
]
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
ABSORB_SCALARS = ["tokens", "stride_q", "stride_q_head", "stride_w_head", "stride_w", "stride_out"]
UNALIGNED = ["slots", "index_slots", "positions", "query_scale", "kv_scale", "index_weights"]

LATENT_DIM = 512

GROUP = 16
"""Tokens of a group of ``launch_norm_rope``; its ``rows`` and ``tokens`` are at most as many."""


@triton.jit
def _quotient(x, scale, reciprocal):
    """``x / scale`` correctly rounded, given the correctly rounded ``1 / scale``; NaN where ``x`` is not finite.

    Markstein: one residual corrects a product by such a reciprocal to the quotient, as long as nothing
    overflows or underflows on the way: scales from 2**-64 to 2**64 leave no e4m3 code in doubt. The signs are
    chosen so that a zero keeps its own.
    """
    estimate = x * reciprocal
    return fma(fma(estimate, scale, negate(x)), negate(reciprocal), estimate)


@triton.jit
def _load_rope(table, pair, mask):
    """Cosines and sines of pairs, ``table`` pointing at each row's first cosine."""
    cos = tl.load(table + pair, mask=mask, other=0.0).to(tl.float32)
    return cos, tl.load(table + 32 + pair, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _split_pairs(x, ROWS: tl.constexpr):
    """[ROWS, 32] to its even and odd dims."""
    return tl.split(tl.reshape(x, (ROWS, 16, 2)))


@triton.jit
def _join_pairs(even, odd, ROWS: tl.constexpr):
    """[ROWS, 16] twice to [ROWS, 32], alternating."""
    return tl.reshape(tl.join(even, odd), (ROWS, 32))


@triton.jit
def _index_rope(x0, x1, table, mask, INTERLEAVED: tl.constexpr, ROWS: tl.constexpr):
    """Rotate dims 0..31 and 32..63 of indexer rows; ``table`` points at each row's cosines."""
    if INTERLEAVED:
        pair = tl.arange(0, 16)[None, :]
        even, odd = _split_pairs(x0, ROWS)
        cos, sin = _load_rope(table, pair, mask)
        even, odd = index_rotate(even, odd, cos, sin)
        x0 = _join_pairs(even, odd, ROWS)
        even, odd = _split_pairs(x1, ROWS)
        cos, sin = _load_rope(table, pair + 16, mask)
        even, odd = index_rotate(even, odd, cos, sin)
        x1 = _join_pairs(even, odd, ROWS)
    else:
        cos, sin = _load_rope(table, tl.arange(0, 32)[None, :], mask)
        x0, x1 = index_rotate(x0, x1, cos, sin)
    return x0, x1


@triton.jit
def _main_rope(x0, x1, table, mask, ROWS: tl.constexpr):
    """Rotate the interleaved pairs of dims 0..31 and 32..63: two even and two odd results of [ROWS, 16]."""
    pair = tl.arange(0, 16)[None, :]
    even0, odd0 = _split_pairs(x0, ROWS)
    cos, sin = _load_rope(table, pair, mask)
    even0, odd0 = rotate(even0, odd0, cos, sin)
    even1, odd1 = _split_pairs(x1, ROWS)
    cos, sin = _load_rope(table, pair + 16, mask)
    even1, odd1 = rotate(even1, odd1, cos, sin)
    return even0, odd0, even1, odd1


@triton.jit
def _rounded(x, scale, reciprocal, live, QUANTISE: tl.constexpr, PADS: tl.constexpr):
    """bf16 of ``x``, or e4m3 of ``x / scale``; zero where a head is padding."""
    value = to_e4m3(_quotient(x, scale, reciprocal)) if QUANTISE else to_bf16(x)
    return tl.where(live, value, 0) if PADS else value


@triton.jit
def _store_rotated(
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
    """Round and store what :func:`_main_rope` gives; ``target`` points at each row's first rotated dim."""
    if HALF_SPLIT:
        target = target + tl.arange(0, 16)[None, :]
        tl.store(target, _rounded(even0, scale, reciprocal, live, QUANTISE, PADS), mask=mask)
        tl.store(target + 16, _rounded(even1, scale, reciprocal, live, QUANTISE, PADS), mask=mask)
        tl.store(target + 32, _rounded(odd0, scale, reciprocal, live, QUANTISE, PADS), mask=mask)
        tl.store(target + 48, _rounded(odd1, scale, reciprocal, live, QUANTISE, PADS), mask=mask)
    else:
        target = target + tl.arange(0, 32)[None, :]
        x0, x1 = _join_pairs(even0, odd0, ROWS), _join_pairs(even1, odd1, ROWS)
        tl.store(target, _rounded(x0, scale, reciprocal, live, QUANTISE, PADS), mask=mask)
        tl.store(target + 32, _rounded(x1, scale, reciprocal, live, QUANTISE, PADS), mask=mask)


@triton.jit
def _index_quantise(x0, x1, x2, x3):
    """Four quarters of indexer rows to e4m3 codes and the biased exponent of each row's scale."""
    x0, x1, x2, x3 = poison(x0), poison(x1), poison(x2), poison(x3)
    front = tl.maximum(tl.abs(x0), tl.abs(x1))  # a maximum drops NaNs
    back = tl.maximum(tl.abs(x2), tl.abs(x3))
    exponent = scale_exponent(tl.maximum(tl.max(tl.maximum(front, back), axis=1), 1e-4))
    inverse = power_of_two(254 - exponent)[:, None]
    return to_e4m3(x0 * inverse), to_e4m3(x1 * inverse), to_e4m3(x2 * inverse), to_e4m3(x3 * inverse), exponent


# -- query ---------------------------------------------------------------------------------------------------


@triton.jit
def _index_rows(
    pid,
    index_query,
    index_weights,
    positions,
    rope_table,
    index_out,
    weights_out,
    rows,
    stride_index,
    stride_weights,
    softmax_scale,
    head_scale,
    HEADS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ROWS: tl.constexpr,
):
    """ROWS (token, indexer head) rows. Quarters of 32 dims share a layout: no value changes threads."""
    ONE_TOKEN: tl.constexpr = HEADS % ROWS == 0
    row = pid * ROWS + tl.arange(0, ROWS)
    if ONE_TOKEN:
        token = (pid // (HEADS // ROWS)).to(tl.int64)
        head = (pid % (HEADS // ROWS)) * ROWS + tl.arange(0, ROWS)
        valid = tl.full((ROWS,), True, tl.int1)
        table = rope_table + tl.load(positions + token).to(tl.int64) * 64
    else:
        token, head = (row // HEADS).to(tl.int64), row % HEADS
        valid = row < rows
        position = tl.load(positions + token, mask=valid, other=0).to(tl.int64)
        table = rope_table + position[:, None] * 64
    mask = valid[:, None]
    source = index_query + (token * (stride_index * 8) + head * 128)[:, None] + tl.arange(0, 32)[None, :]
    x0 = tl.load(source, mask=mask).to(tl.float32)
    x1 = tl.load(source + 32, mask=mask).to(tl.float32)
    x2 = tl.load(source + 64, mask=mask).to(tl.float32)
    x3 = tl.load(source + 96, mask=mask).to(tl.float32)
    weight = tl.load(index_weights + token * stride_weights + head, mask=valid).to(tl.float32)
    x0, x1 = _index_rope(x0, x1, table, mask, INTERLEAVED, ROWS)
    c0, c1, c2, c3, exponent = _index_quantise(x0, x1, x2, x3)
    target = index_out.to(tl.pointer_type(tl.uint8)) + (row.to(tl.int64) * 128)[:, None] + tl.arange(0, 32)[None, :]
    tl.store(target, c0, mask=mask)
    tl.store(target + 32, c1, mask=mask)
    tl.store(target + 64, c2, mask=mask)
    tl.store(target + 96, c3, mask=mask)
    weight = weight * power_of_two(exponent) * softmax_scale * head_scale
    tl.store(weights_out + row, weight, mask=valid)


@triton.jit
def _head_rows(
    pid,
    q_pe,
    latent,
    positions,
    rope_table,
    query_scale,
    out,
    out_pe,
    rows,
    stride_pe,
    stride_pe_head,
    stride_latent,
    stride_latent_head,
    stride_out,
    stride_out_pe,
    HEADS: tl.constexpr,
    VISITED: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    QUANTISE: tl.constexpr,
    HALF_SPLIT: tl.constexpr,
    WIDTH: tl.constexpr,
    PE_WIDTH: tl.constexpr,
    PE_OFFSET: tl.constexpr,
    ROWS: tl.constexpr,
):
    """ROWS (token, head) rows: the latent into the front, the rotated dims into the tail; dead heads are zero."""
    row = pid * ROWS + tl.arange(0, ROWS)
    if VISITED % ROWS == 0:  # one token
        token = (pid // (VISITED // ROWS)).to(tl.int64)
        head = (pid % (VISITED // ROWS)) * ROWS + tl.arange(0, ROWS)
        valid = tl.full((ROWS,), True, tl.int1)
        if ROPE:
            table = rope_table + tl.load(positions + token).to(tl.int64) * 64
    else:
        token, head = (row // VISITED).to(tl.int64), row % VISITED
        valid = row < rows
        if ROPE:
            table = rope_table + tl.load(positions + token, mask=valid, other=0).to(tl.int64)[:, None] * 64
    PADS: tl.constexpr = VISITED > HEADS
    UNIT: tl.constexpr = 16 if QUANTISE else 8  # elements in 16 bytes
    written = valid[:, None]
    copied = written & (head < HEADS)[:, None] if PADS else written
    if QUANTISE:
        if LATENT:
            out = out.to(tl.pointer_type(tl.uint8))
        if ROPE:
            out_pe = out_pe.to(tl.pointer_type(tl.uint8))
        scale = tl.load(query_scale)
        reciprocal = tl.div_rn(1.0, scale)
    else:
        scale = 1.0
        reciprocal = 1.0

    if ROPE:
        source = q_pe + (token * (stride_pe * 8) + head * (stride_pe_head * 8))[:, None] + tl.arange(0, 32)[None, :]
        x0 = tl.load(source, mask=copied, other=0.0).to(tl.float32)
        x1 = tl.load(source + 32, mask=copied, other=0.0).to(tl.float32)

    if LATENT:
        dim = tl.arange(0, 512)[None, :]
        CAST: tl.constexpr = QUANTISE and latent.dtype.element_ty == tl.bfloat16  # else bits move unchanged
        LATENT_UNIT: tl.constexpr = UNIT if QUANTISE and not CAST else 8
        if QUANTISE and not CAST:
            latent = latent.to(tl.pointer_type(tl.uint8))
        source = latent + (token * (stride_latent * LATENT_UNIT) + head * (stride_latent_head * LATENT_UNIT))[:, None]
        value = tl.load(source + dim, mask=copied, other=0)
        if CAST:
            value = _rounded(value.to(tl.float32), scale, reciprocal, copied, True, PADS)
        target = out + (token * (stride_out * UNIT) + head * WIDTH)[:, None]
        tl.store(target + dim, value, mask=written)

    if ROPE:
        even0, odd0, even1, odd1 = _main_rope(x0, x1, table, written, ROWS)
        target = out_pe + (token * (stride_out_pe * UNIT) + head * PE_WIDTH + PE_OFFSET)[:, None]
        _store_rotated(
            target,
            even0,
            odd0,
            even1,
            odd1,
            written,
            copied,
            scale,
            reciprocal,
            QUANTISE,
            PADS,
            HALF_SPLIT,
            ROWS,
        )


@triton.jit(do_not_specialize=QUERY_SCALARS, do_not_specialize_on_alignment=UNALIGNED)
def _dsa_query_kernel(
    q_pe,
    latent,
    positions,
    rope_table,
    index_query,
    index_weights,
    index_rope_table,
    query_scale,
    out,
    out_pe,
    index_out,
    weights_out,
    index_programs: "i32",
    rows: "i32",
    index_rows: "i32",
    stride_pe: "i64",
    stride_pe_head: "i64",
    stride_latent: "i64",
    stride_latent_head: "i64",
    stride_out: "i64",
    stride_out_pe: "i64",
    stride_index: "i64",
    stride_weights: "i64",
    softmax_scale: "fp32",
    head_scale: "fp32",
    HEADS: tl.constexpr,
    VISITED: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    QUANTISE: tl.constexpr,
    HALF_SPLIT: tl.constexpr,
    WIDTH: tl.constexpr,
    PE_WIDTH: tl.constexpr,
    PE_OFFSET: tl.constexpr,
    INDEX_HEADS: tl.constexpr,
    INDEX_INTERLEAVED: tl.constexpr,
    ROWS: tl.constexpr,
    INDEX_ROWS: tl.constexpr,
):
    pid = tl.program_id(0)
    if pid < index_programs:
        if INDEX_HEADS > 0:
            _index_rows(
                pid,
                index_query,
                index_weights,
                positions,
                index_rope_table,
                index_out,
                weights_out,
                index_rows,
                stride_index,
                stride_weights,
                softmax_scale,
                head_scale,
                INDEX_HEADS,
                INDEX_INTERLEAVED,
                INDEX_ROWS,
            )
    else:
        if LATENT or ROPE:
            _head_rows(
                pid - index_programs,
                q_pe,
                latent,
                positions,
                rope_table,
                query_scale,
                out,
                out_pe,
                rows,
                stride_pe,
                stride_pe_head,
                stride_latent,
                stride_latent_head,
                stride_out,
                stride_out_pe,
                HEADS,
                VISITED,
                LATENT,
                ROPE,
                QUANTISE,
                HALF_SPLIT,
                WIDTH,
                PE_WIDTH,
                PE_OFFSET,
                ROWS,
            )


# -- norm, RoPE, insert --------------------------------------------------------------------------------------


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
    """LayerNorm, RoPE, quantise and store TOKENS indexer keys of 128, in quarters as :func:`_index_rows`."""
    in_range = token < index_tokens
    inside = in_range[:, None]
    row = index_key + (token.to(tl.int64) * (stride_index * 8))[:, None]
    whole = tl.load(row + tl.arange(0, 128)[None, :], mask=inside, other=0.0).to(tl.float32)
    position = tl.load(positions + token, mask=in_range, other=0).to(tl.int64)
    stored, page, offset = _page(token, in_range, index_slots, capacity, index_cache, stride_block, BLOCK_SIZE)
    mask = stored[:, None]
    mean = tl.div_rn(tree_sum(whole, TOKENS, 128), 128.0)[:, None]
    whole = whole - mean
    inverse = reciprocal_sqrt(tl.div_rn(tree_sum(whole * whole, TOKENS, 128), 128.0) + eps)[:, None]

    # The same row again, from cache, in quarters: cheaper than to move values between threads.
    dim = tl.arange(0, 32)[None, :]
    x0 = tl.load(row + dim, mask=inside, other=0.0).to(tl.float32)
    x1 = tl.load(row + 32 + dim, mask=inside, other=0.0).to(tl.float32)
    x2 = tl.load(row + 64 + dim, mask=inside, other=0.0).to(tl.float32)
    x3 = tl.load(row + 96 + dim, mask=inside, other=0.0).to(tl.float32)
    x0 = _affine((x0 - mean) * inverse, index_weight + dim, index_bias + dim)
    x1 = _affine((x1 - mean) * inverse, index_weight + 32 + dim, index_bias + 32 + dim)
    x2 = _affine((x2 - mean) * inverse, index_weight + 64 + dim, index_bias + 64 + dim)
    x3 = _affine((x3 - mean) * inverse, index_weight + 96 + dim, index_bias + 96 + dim)

    x0, x1 = _index_rope(x0, x1, rope_table + position[:, None] * 64, mask, INTERLEAVED, TOKENS)
    c0, c1, c2, c3, exponent = _index_quantise(x0, x1, x2, x3)
    target = (page + offset * 128)[:, None] + dim
    tl.store(target, c0, mask=mask)
    tl.store(target + 32, c1, mask=mask)
    tl.store(target + 64, c2, mask=mask)
    tl.store(target + 96, c3, mask=mask)
    scale = (page + BLOCK_SIZE * 128 + offset * 4).to(tl.pointer_type(tl.int32))
    tl.store(scale, exponent * 0x01010101 if UE8M0 else exponent << 23, mask=stored)


@triton.jit
def _affine(x, weight, bias):
    return x * tl.load(weight).to(tl.float32) + tl.load(bias).to(tl.float32)


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
    x0 = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    x1 = tl.load(at + 32, mask=mask, other=0.0).to(tl.float32)
    table = rope_table + tl.load(positions + token, mask=in_range, other=0).to(tl.int64)[:, None] * 64
    if STORE:
        stored, page, offset = _page(token, token < stored_tokens, slots, capacity, cache, stride_block, BLOCK_SIZE)
        kept = stored[:, None]
    even0, odd0, even1, odd1 = _main_rope(x0, x1, table, mask if RETURN else kept, TOKENS)
    if RETURN:
        target = k_pe_out + row * (stride_pe_out * 8)
        _store_rotated(target, even0, odd0, even1, odd1, mask, mask, 1.0, 1.0, False, False, HALF_SPLIT, TOKENS)
    if STORE:
        target = (page + offset * RECORD_BYTES + PE_OFFSET)[:, None]
        if PE_BF16:
            target = target.to(tl.pointer_type(tl.bfloat16))
            _store_rotated(target, even0, odd0, even1, odd1, kept, kept, 1.0, 1.0, False, False, HALF_SPLIT, TOKENS)
        else:
            scale = tl.load(kv_scale)
            reciprocal = tl.div_rn(1.0, scale)
            _store_rotated(
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
    x = tl.load(kv_latent + row * (stride_kv * 8) + dim, mask=mask, other=0.0).to(tl.float32)
    # A tile of equal rows, not one row: it is then loaded into the layout of x.
    weight = tl.load(kv_weight + tl.zeros_like(row) + dim).to(tl.float32)
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
            code = to_e4m3(_quotient(x, scale, tl.div_rn(1.0, scale)))
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
    x = tl.load(q_latent + row * (stride_q * 8) + dim, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(q_weight + dim, mask=dim < RANK, other=0.0).to(tl.float32)
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


# -- absorb ---------------------------------------------------------------------------------------------------


@triton.jit
def _dot(a, b, total):
    """``total + a @ b`` of bf16 operands. The interpreter would multiply their bits."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total)
    else:
        return tl.dot(a, b, total)


@triton.jit(do_not_specialize=ABSORB_SCALARS, do_not_specialize_on_alignment=UNALIGNED)
def _dsa_absorb_kernel(
    q_nope,
    w_uk,
    query_scale,
    out,
    tokens: "i32",
    stride_q: "i64",
    stride_q_head: "i64",
    stride_w_head: "i64",
    stride_w: "i64",
    stride_out: "i64",
    HEADS: tl.constexpr,
    NOPE: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
):
    """ROWS tokens x 512 latent dims of one head, COLUMNS at a time: the next columns load while these are cast."""
    pid = tl.program_id(0)
    head = (pid % HEADS).to(tl.int64)
    token = pid // HEADS * ROWS + tl.arange(0, ROWS)
    live = (token < tokens)[:, None]
    token = token.to(tl.int64)[:, None]
    depth, column = tl.arange(0, DEPTH), tl.arange(0, COLUMNS)[None, :]
    a = q_nope + head * (stride_q_head * 8) + token * (stride_q * 8) + depth[None, :]
    b = w_uk + head * (stride_w_head * 8) + (depth.to(tl.int64) * (stride_w * 8))[:, None] + column
    target = out.to(tl.pointer_type(tl.uint8)) + head * WIDTH + token * (stride_out * 16) + column
    scale = tl.load(query_scale)
    reciprocal = tl.div_rn(1.0, scale)
    if NOPE == DEPTH:
        query_tile = tl.load(a, mask=live, other=0.0)
    for start in tl.range(0, 512, COLUMNS, num_stages=STAGES):
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        if NOPE == DEPTH:
            total = _dot(query_tile, tl.load(b + start), total)
        else:
            for d in tl.static_range(0, NOPE, DEPTH):
                part = tl.load(a + d, mask=live, other=0.0)
                total = _dot(part, tl.load(b + start + d * (stride_w * 8)), total)
        code = to_e4m3(_quotient(to_bf16(total).to(tl.float32), scale, reciprocal))
        tl.store(target + start, code, mask=live)


query = Kernel(_dsa_query_kernel)
norm_rope = Kernel(_dsa_norm_rope_kernel)
absorb = Kernel(_dsa_absorb_kernel)


def _units(tensor: Tensor | None, dim: int = 0) -> int:
    """A stride in units of 16 bytes."""
    return 0 if tensor is None else tensor.stride(dim) * tensor.element_size() // 16


def launch_query(
    q_pe: Tensor,
    latent: Tensor | None,
    positions: Tensor,
    rope_table: Tensor | None,
    index_query: Tensor | None,
    index_weights: Tensor | None,
    index_rope_table: Tensor | None,
    query_scale: Tensor | None,
    out: Tensor | None,
    out_pe: Tensor | None,
    index_out: Tensor | None,
    weights_out: Tensor | None,
    *,
    rope_output: Pairing,
    index_pairing: Pairing,
    softmax_scale: float,
    head_scale: float,
    config: LaunchConfig,
) -> Launch:
    """The query half: ``config.rows`` (token, head) rows and ``config.tokens`` indexer rows a program."""
    tokens, heads, rope_dim = q_pe.shape
    tail, tail_offset = (out, LATENT_DIM) if out_pe is None else (out_pe, 0)
    if latent is None:
        out = None
    visited = heads if out is None else out.shape[1]
    rows = tokens * visited if out is not None or rope_dim else 0
    index_heads = 0 if index_query is None else index_query.shape[1]
    index_programs = -(-tokens * index_heads // config.tokens)
    if not rope_dim:
        tail = None
    return Launch(
        query,
        index_programs + -(-rows // config.rows),
        (
            q_pe if rope_dim else None,
            latent,
            positions,
            rope_table if rope_dim else None,
            index_query,
            index_weights,
            index_rope_table if index_heads else None,
            query_scale,
            out,
            tail,
            index_out,
            weights_out,
        ),
        (
            index_programs,
            rows,
            tokens * index_heads,
            _units(q_pe),
            _units(q_pe, 1),
            _units(latent),
            _units(latent, 1),
            _units(out),
            _units(tail),
            _units(index_query),
            0 if index_weights is None else index_weights.stride(0),
            softmax_scale,
            head_scale,
        ),
        (
            heads,
            visited,
            latent is not None,
            rope_dim > 0,
            query_scale is not None,
            rope_output == "half_split",
            0 if out is None else out.shape[2],
            0 if tail is None else tail.shape[2],
            tail_offset,
            index_heads,
            index_pairing == "interleaved",
            config.rows,
            config.tokens,
        ),
        config.num_warps,
    )


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
            _units(q_latent),
            _units(q_out),
            _units(kv_latent),
            _units(k_pe),
            _units(kv_out),
            _units(k_pe_out),
            _units(cache),
            _capacity(cache),
            _units(index_key),
            _units(index_cache),
            _capacity(index_cache),
            _units(top_k),
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


def launch_absorb(q_nope: Tensor, w_uk: Tensor, query_scale: Tensor, out: Tensor, *, config: LaunchConfig) -> Launch:
    """e4m3 of ``bf16(q_nope @ w_uk) / query_scale`` into the front of ``out``: ``config.rows`` tokens a program."""
    tokens, heads, nope = q_nope.shape
    rows, columns = max(config.rows, 16), max(config.tokens, 16)  # the least a matrix instruction takes
    return Launch(
        absorb,
        -(-tokens // rows) * heads,
        (q_nope, w_uk, query_scale, out),
        (tokens, _units(q_nope), _units(q_nope, 1), _units(w_uk), _units(w_uk, 1), _units(out)),
        (heads, nope, out.shape[2], rows, columns, 128 if nope % 128 == 0 else 64, 3),
        config.num_warps,
    )
