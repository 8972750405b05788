"""The DSA prologue (DeepSeek-V3.2, GLM-5.x): what :mod:`preattn.dsa` computes, in plain torch on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import formats
from ..formats import Record
from . import numerics
from .numerics import Pairing

LATENT_DIM = 512
INDEX_ROPE_DIM = 64


def rotated(x: Tensor, positions: Tensor, rope_table: Tensor | None, output: Pairing) -> Tensor:
    """RoPE of main query or key rows, [T, ..., 64] (or [T, ..., 0]); float32, not rounded."""
    if x.shape[-1] == 0:
        return x.float()
    assert rope_table is not None
    cos, sin = numerics.rope_rows(rope_table, positions)
    between = [1] * (x.dim() - 2)
    return numerics.rope(x, cos.unflatten(0, (-1, *between)), sin.unflatten(0, (-1, *between)), output)


def index_rotated(x: Tensor, positions: Tensor, rope_table: Tensor, pairing: Pairing) -> Tensor:
    """RoPE of the first 64 of 128 indexer dims, [T, ..., 128]; float32, not rounded."""
    cos, sin = numerics.rope_rows(rope_table, positions)
    between = [1] * (x.dim() - 2)
    cos, sin = cos.unflatten(0, (-1, *between)), sin.unflatten(0, (-1, *between))
    head = numerics.index_rope(x[..., :INDEX_ROPE_DIM], cos, sin, pairing)
    return torch.cat([head, x[..., INDEX_ROPE_DIM:].float()], -1)


# -- query ------------------------------------------------------------------------------------------------


def index_query_half(
    index_query: Tensor,
    index_weights: Tensor,
    positions: Tensor,
    rope_table: Tensor,
    index_out: Tensor,
    weights_out: Tensor,
    *,
    pairing: Pairing,
    softmax_scale: float,
    head_scale: float,
) -> None:
    """The indexer's half of :func:`query`: the codes of ``index_fp8``, and its scale folded into the head weights."""
    record = formats.record("index_fp8")
    data = formats.encode(record, index_rotated(index_query, positions, rope_table, pairing))
    index_out.view(torch.uint8).copy_(data[..., : record.body_bytes])
    scale = formats.scales(record, data).squeeze(-1)
    weights_out.copy_(index_weights.float() * scale * softmax_scale * head_scale)


def query(
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
) -> None:
    """See :func:`preattn.dsa.query`. ``latent`` is what has to be moved to the front of ``out``: None, nothing.

    ``out_pe`` takes the rotated dims of the pair; None: the tail of ``out`` does.
    """
    heads = q_pe.shape[1]
    if out_pe is None:
        assert out is not None
        out_pe = out[..., LATENT_DIM:]
    _write(rotated(q_pe, positions, rope_table, rope_output), query_scale, out_pe[:, :heads])
    if latent is not None:
        assert out is not None
        _write(latent, query_scale, out[:, :heads, :LATENT_DIM])
        out[:, heads:].view(torch.uint8).zero_()
    if index_query is not None:
        assert index_weights is not None and index_rope_table is not None
        assert index_out is not None and weights_out is not None
        index_query_half(
            index_query,
            index_weights,
            positions,
            index_rope_table,
            index_out,
            weights_out,
            pairing=index_pairing,
            softmax_scale=softmax_scale,
            head_scale=head_scale,
        )


def _write(x: Tensor, scale: Tensor | None, out: Tensor) -> None:
    """Round into ``out``: e4m3 of ``x / scale``, or bf16. What has the dtype already keeps its bits."""
    if x.dtype == out.dtype:
        out.view(torch.uint8).copy_(x.view(torch.uint8))
    elif scale is not None:
        out.view(torch.uint8).copy_(formats.to_e4m3(x.float() / scale))
    else:
        out.copy_(formats.to_bf16(x))


def query_quotient(
    q_pe: Tensor,
    latent: Tensor,
    positions: Tensor,
    rope_table: Tensor | None,
    query_scale: Tensor,
    *,
    rope_output: Pairing = "interleaved",
) -> Tensor:
    """What :func:`query` rounds to e4m3, [T, H, 512 + 64]: the quotients by ``query_scale``, exact, float64."""
    x = torch.cat([latent.float(), rotated(q_pe, positions, rope_table, rope_output)], -1)
    return x.double() / query_scale.double()


def absorb_query(q_nope: Tensor, w_uk: Tensor, query_scale: Tensor, out: Tensor) -> None:
    """e4m3 of ``bf16(q_nope @ w_uk) / scale`` into the front of ``out``; see :func:`preattn.dsa.absorb_query`."""
    latent = torch.bmm(q_nope.transpose(0, 1).float(), w_uk.float()).transpose(0, 1)
    _write(formats.to_bf16(latent), query_scale, out[:, : q_nope.shape[1], :LATENT_DIM])


# -- norm, RoPE, insert -----------------------------------------------------------------------------------


def norm_rope_insert(
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
) -> None:
    """See :func:`preattn.dsa.norm_rope_insert`."""
    tokens = q_latent.shape[0]
    if kv_out is not None and k_pe_out is not None:  # every row, whatever its slot
        kv_out.copy_(formats.to_bf16(numerics.rms_norm(kv_latent, kv_eps, kv_weight)))
        k_pe_out.copy_(formats.to_bf16(rotated(k_pe, positions, rope_table, rope_output)))
    if slots is not None and cache is not None:
        assert record is not None
        rows, kept = stored_rows(slots, cache)
        kv = numerics.rms_norm(kv_latent[rows], kv_eps, kv_weight)
        values = torch.cat([kv, rotated(k_pe[rows], positions[rows], rope_table, rope_output)], -1)
        if kv_scale is not None:
            values = values / kv_scale.reshape(())
        elif record.parts[0].element == "bf16":
            values = formats.to_bf16(values)
        formats.store(cache, record, kept, formats.encode(record, values))
    if index_key is not None and index_slots is not None and index_cache is not None:
        assert index_weight is not None and index_bias is not None
        assert index_rope_table is not None and index_record is not None
        rows, kept = stored_rows(index_slots, index_cache)
        values = numerics.layer_norm(index_key[rows], index_eps, index_weight, index_bias)
        values = index_rotated(values, positions[rows], index_rope_table, index_pairing)
        formats.store(index_cache, index_record, kept, formats.encode(index_record, values))
    if top_k is not None:
        top_k[:tokens] = -1
    q_out.copy_(formats.to_bf16(numerics.rms_norm(q_latent, q_eps, q_weight)))


def stored_rows(slots: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
    """Rows that have a slot inside the cache, and those slots. A row without one may hold anything."""
    kept = (slots >= 0) & (slots < cache.shape[0] * cache.shape[1])
    return kept.nonzero().flatten(), slots[kept]
