"""DSA query: main query and indexer query to what attention reads.

``launch_query`` is one launch with two kinds of programs:

* the first ``index_programs`` take tiles of (token, indexer head) rows of 128: RoPE on the first 64 dims, e4m3
  with a power-of-two scale, the scale folded into the head's weight;
* the others take tiles of (token, head) rows: RoPE of 64 dims into the tail of the packed row (or a tensor of
  their own) and, where the latent is not in its place already, its copy or e4m3 cast into the front.

Bytes a token: packed bf16 ``2 * 2 * 64 * H``, where the latent has to move ``2 * 512 * (H + P)`` more; e4m3
``(2 * H + P) * 576``; indexer ``(2 + 1) * 128 + 2 * 4`` a head; RoPE table 64 values, position 8.
"""

import triton
import triton.language as tl
from torch import Tensor

from ...policy import LaunchConfig
from ...reference.numerics import Pairing
from ..device import power_of_two, upcast
from ..launch import Kernel, Launch
from .rows import (
    LATENT_DIM,
    UNALIGNED,
    index_quantise,
    index_rope,
    main_rope,
    rounded,
    store_rotated,
    units,
)

# No scalar selects a variant by its value.
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
    x0 = upcast(tl.load(source, mask=mask))
    x1 = upcast(tl.load(source + 32, mask=mask))
    x2 = upcast(tl.load(source + 64, mask=mask))
    x3 = upcast(tl.load(source + 96, mask=mask))
    weight = upcast(tl.load(index_weights + token * stride_weights + head, mask=valid))
    x0, x1 = index_rope(x0, x1, table, mask, INTERLEAVED, ROWS)
    c0, c1, c2, c3, exponent = index_quantise(x0, x1, x2, x3)
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
        x0 = upcast(tl.load(source, mask=copied, other=0.0))
        x1 = upcast(tl.load(source + 32, mask=copied, other=0.0))

    if LATENT:
        dim = tl.arange(0, 512)[None, :]
        CAST: tl.constexpr = QUANTISE and latent.dtype.element_ty == tl.bfloat16  # else bits move unchanged
        LATENT_UNIT: tl.constexpr = UNIT if QUANTISE and not CAST else 8
        if QUANTISE and not CAST:
            latent = latent.to(tl.pointer_type(tl.uint8))
        source = latent + (token * (stride_latent * LATENT_UNIT) + head * (stride_latent_head * LATENT_UNIT))[:, None]
        value = tl.load(source + dim, mask=copied, other=0)
        if CAST:
            value = rounded(upcast(value), scale, reciprocal, copied, True, PADS)
        target = out + (token * (stride_out * UNIT) + head * WIDTH)[:, None]
        tl.store(target + dim, value, mask=written)

    if ROPE:
        even0, odd0, even1, odd1 = main_rope(x0, x1, table, written, ROWS)
        target = out_pe + (token * (stride_out_pe * UNIT) + head * PE_WIDTH + PE_OFFSET)[:, None]
        store_rotated(
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


query = Kernel(_dsa_query_kernel)


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
            units(q_pe),
            units(q_pe, 1),
            units(latent),
            units(latent, 1),
            units(out),
            units(tail),
            units(index_query),
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
