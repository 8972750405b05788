"""What attention makes of a prologue's result, in plain torch: mega attention (V4, V4.1) and sparse MLA (DSA).

preattn runs no attention. These two say what a kernel that reads its results computes, so that a test can show that
attention cannot tell a padded, interleaved or packed query from the plain one. Choices, where kernels differ:

- Queries and records are decoded exactly. Scores, softmax and weighted sum are float64, and sums run as
  :func:`preattn.reference.numerics.tree_sum` does, one token at a time: a head's bits do not depend on how many heads
  or tokens there are.
- All padded heads are computed, as a kernel of a fixed head count does; the result is of the rank's own heads.
- A token's records are the keys of its list in order, slots below 0 left out; a record listed twice counts twice.
  Which records those are (window, causality, top-k) is the caller's matter.
- The sink is one more logit of a head, not scaled, with no value: it takes part in the softmax's sum alone.
- No record and no sink: the output is zero.
- Where attention rotates the query itself, it rounds the rotated dims to bf16, as the prologue's own RoPE leaves them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .. import formats, weights
from ..policy import Layout
from . import numerics

VALUE_DIM = 512
ROPE_DIM = 64


class Selection(NamedTuple):
    """The records of one cache that tokens attend to."""

    cache: Tensor
    """[num_blocks, block_size, width], as :func:`preattn.formats.cache_view` makes it."""
    record: str
    """What it holds."""
    slots: Tensor
    """[T, K] int32 or int64; below 0: none."""
    scale: Tensor | None = None
    """The per-tensor scale of an ``fp8`` record."""


def mega_attention(
    query: Tensor,
    positions: Tensor,
    rope_table: Tensor,
    selections: Sequence[Selection],
    sink: Tensor | None,
    *,
    heads: int,
    layout: Layout,
    softmax_scale: float,
    query_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """V4 / V4.1: one row is key and value; the output is what ``wo_a`` multiplies.

    The weighted sum of the 512-dim rows is rounded to float32, its last 64 dims are rotated back (the query's RoPE with
    the sine negated, interleaved pairs), and it is quantised from float32 as a ``v41_mxfp8`` record is: e4m3, one
    UE8M0 scale for 32 dims, floor and non-finite values included.

    Args:
        query: [T, P, 512] bf16, or e4m3 of ``value / query_scale``. ``chunk_interleaved``: not rotated yet, which
            happens here. ``head_major``: normed and rotated by the prologue.
        positions: [T], of the queries.
        rope_table: [max_position, 64]: 32 cosines, 32 sines.
        selections: the window's records and, where there are any, the selected compressed ones.
        sink: [H] logits, or None.
        heads: H <= P, the rank's own; a multiple of 8, whole groups.
        layout: of ``query``.
        softmax_scale: factor of the scores.
        query_scale: of an e4m3 query (the prologue's ``query_scale_inv``, inverted).

    Returns:
        [T, H / 8, 4096] e4m3 and [T, H / 8, 128] UE8M0 bytes, one for 32 consecutive codes: 32-dim chunks interleaved
        over the 8 heads of a group, element (h, d) at ``(d // 32) * 256 + h * 32 + d % 32``.

    Raises:
        ValueError: ``heads`` is not whole groups, or more than the query has.
    """
    _check_heads(query, heads)
    if heads % weights.GROUP_HEADS:
        raise ValueError(f"heads: expected a multiple of {weights.GROUP_HEADS}, whole output groups; got {heads}")
    cos, sin = numerics.rope_rows(rope_table, positions)
    if layout == "chunk_interleaved":
        query = weights.as_chunks(query).transpose(1, 2).flatten(2)
        turned = formats.to_bf16(numerics.rope(query[..., -ROPE_DIM:], cos[:, None], sin[:, None]))
        query = torch.cat([query[..., :-ROPE_DIM], turned], -1)
    rows = _attend(_values(query, query_scale), selections, sink, softmax_scale)[:, :heads].float()
    back = numerics.rope(rows[..., -ROPE_DIM:], cos[:, None], -sin[:, None])
    data = formats.encode(formats.record("v41_mxfp8"), torch.cat([rows[..., :-ROPE_DIM], back], -1))
    grouped = data.unflatten(1, (-1, weights.GROUP_HEADS))
    codes = grouped[..., :VALUE_DIM].unflatten(-1, (-1, weights.OUTPUT_CHUNK)).transpose(2, 3).flatten(2)
    scales = grouped[..., VALUE_DIM:].transpose(2, 3).flatten(2)
    return codes.contiguous().view(torch.float8_e4m3fn), scales.contiguous()


def dequantised(codes: Tensor, scales: Tensor) -> Tensor:
    """The values of :func:`mega_attention`'s output, in its order: [T, groups, 4096] float32."""
    factor = formats.from_ue8m0(scales).repeat_interleave(weights.OUTPUT_CHUNK, -1)
    return codes.float() * factor


def sparse_mla(
    query: Tensor,
    q_pe: Tensor | None,
    selection: Selection,
    *,
    heads: int,
    softmax_scale: float,
    query_scale: Tensor | None = None,
) -> Tensor:
    """DSA: softmax over the top-k latent records; keys are all of a record, values its first 512 dims.

    Args:
        query: packed [T, P, 576], or the pair's latent [T, P, 512]; bf16, or e4m3 of ``value / query_scale``.
        q_pe: the pair's rotated dims [T, P, 64]; None where ``query`` is packed.
        selection: the top-k of the latent cache.
        heads: H <= P, the rank's own.
        softmax_scale: factor of the scores.
        query_scale: of an e4m3 query.

    Returns:
        [T, H, 512] bf16, rounded to float32 before.

    Raises:
        ValueError: ``heads`` is more than the query has.
    """
    _check_heads(query, heads)
    values = _values(query, query_scale)
    if q_pe is not None:
        values = torch.cat([values, _values(q_pe, query_scale)], -1)
    return _attend(values, [selection], None, softmax_scale)[:, :heads].float().to(torch.bfloat16)


def _check_heads(query: Tensor, heads: int) -> None:
    if not 1 <= heads <= query.shape[1]:
        raise ValueError(f"heads: expected 1 to {query.shape[1]}, the heads of query; got {heads}")


def _values(query: Tensor, scale: Tensor | None) -> Tensor:
    """Exact float64 values."""
    return query.double() if scale is None else query.double() * scale.double()


def _attend(query: Tensor, selections: Sequence[Selection], sink: Tensor | None, softmax_scale: float) -> Tensor:
    """float64 [T, P, D] over the selected records -> float64 [T, P, 512]."""
    tokens, heads, dims = query.shape
    out = query.new_zeros(tokens, heads, VALUE_DIM)
    for token in range(tokens):
        keys = torch.cat([_rows(selection, token, dims) for selection in selections])
        scores = numerics.tree_sum(query[token, :, None] * keys) * softmax_scale
        if sink is not None:
            no_sink = sink.new_zeros(heads - len(sink))  # a padding head's, which nobody reads
            scores = torch.cat([scores, torch.cat([sink, no_sink]).double()[:, None]], -1)
        if scores.shape[1] == 0:
            continue
        weight = (scores - scores.amax(-1, keepdim=True)).contiguous().exp()
        weight = weight / numerics.tree_sum(weight)[:, None]
        out[token] = numerics.tree_sum(weight[:, None, : len(keys)] * keys[:, :VALUE_DIM].t())
    return out


def _rows(selection: Selection, token: int, dims: int) -> Tensor:
    """The decoded records of one token, float64 [K, dims]."""
    record = formats.record(selection.record, dims)
    slots = selection.slots[token]
    rows = formats.decode(record, formats.load(selection.cache, record, slots[slots >= 0])).double()
    return rows if selection.scale is None else rows * selection.scale.double()
