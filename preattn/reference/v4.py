"""DeepSeek-V4 / V4.1: what :mod:`preattn.v4` computes, in plain torch on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import formats
from ..formats import Record
from . import numerics

ROPE_DIMS = 64


def pad_query(query: Tensor, out: Tensor, *, interleaved: bool) -> None:
    """Copy [T, H, 512] into [T, P, 512] with the heads past H as +0.0 (``interleaved``: in every 16-dim chunk)."""
    tokens, heads, _ = query.shape
    if interleaved:
        query, out = query.reshape(tokens, 32, heads * 16), out.view(tokens, 32, out.shape[1] * 16)
        out[..., : heads * 16], out[..., heads * 16 :] = query, 0
    else:
        out[:, :heads], out[:, heads:] = query, 0


def dequantised_weight(weight: Tensor, scale: Tensor) -> Tensor:
    """e4m3 [rows, rank] times its scales, in float64: [rows / 128, rank / 128] float32, or UE8M0 [rows, rank / 32]."""
    factors = scale.double() if scale.dtype == torch.float32 else formats.from_ue8m0(scale).double()
    across, down = weight.shape[0] // scale.shape[0], weight.shape[1] // scale.shape[1]
    return weight.double() * factors.repeat_interleave(across, 0).repeat_interleave(down, 1)


def project(
    x: Tensor, weight: Tensor, x_scale: Tensor | None, weight_scale: Tensor | None, out: Tensor, *, interleaved: bool
) -> None:
    """``x @ weight.T`` into the live heads of ``out``; e4m3 operands in float64, with one rounding to bf16."""
    heads = weight.shape[0] // 512
    if x_scale is None or weight_scale is None:
        product = torch.mm(x, weight.t())
    else:
        scale = x_scale.double() if x_scale.dim() == 2 else x_scale.double()[:, None]
        rows = x.double() * scale.repeat_interleave(x.shape[1] // scale.shape[1], 1)
        product = formats.to_bf16((rows @ dequantised_weight(weight, weight_scale).t()).float())
    if not interleaved:
        out[:, :heads] = product.unflatten(1, (heads, 512))
        return
    if weight_scale is not None:  # rows of the weight in checkpoint order
        product = product.unflatten(1, (heads, 32, 16)).transpose(1, 2).flatten(1)
    out.view(*out.shape[:1], 32, out.shape[1], 16)[:, :, :heads] = product.unflatten(1, (32, heads, 16))


def query_rows(query: Tensor, positions: Tensor, rope_table: Tensor, *, norm_eps: float | None, rope: bool) -> Tensor:
    """Head norm and RoPE of [T, H, 512], each only where asked for; float32, not rounded."""
    x = query.float() if norm_eps is None else numerics.rms_norm(query, norm_eps)
    if rope:
        cos, sin = numerics.rope_rows(rope_table, positions)
        tail = numerics.rope(x[..., -ROPE_DIMS:], cos[:, None], sin[:, None])
        x = torch.cat([x[..., :-ROPE_DIMS], tail], -1)
    return x


def query_half(
    query: Tensor,
    positions: Tensor,
    rope_table: Tensor,
    out: Tensor,
    *,
    interleaved: bool,
    norm_eps: float | None,
    rope: bool,
    query_scale_inv: Tensor | None,
    in_place: bool,
) -> None:
    """The Q half of :func:`query_kv_insert`."""
    if norm_eps is None and not rope and query_scale_inv is None and not in_place:
        pad_query(query, out, interleaved=interleaved)
        return
    x = query_rows(query, positions, rope_table, norm_eps=norm_eps, rope=rope)
    if query_scale_inv is not None:
        codes = formats.to_e4m3(x * query_scale_inv.reshape(()))
        pad_query(codes, out.view(torch.uint8), interleaved=interleaved)
        return
    rows = numerics.to_dtype(x, query.dtype)
    if norm_eps is None:  # dims that nothing touches keep their bits, NaN payloads included
        untouched = 512 - ROPE_DIMS if rope else 512
        rows[..., :untouched] = query[..., :untouched]
    if in_place:
        query.copy_(rows)
    else:
        pad_query(rows, out, interleaved=interleaved)


def kv_rows(
    kv: Tensor, positions: Tensor, rope_table: Tensor, *, norm_weight: Tensor | None, norm_eps: float
) -> Tensor:
    """KV latent rows after the optional RMSNorm and RoPE: [T, 512] float32, not rounded.

    The norm alone is rounded to bf16, as an unfused norm would leave it for RoPE.
    """
    x = kv.float()
    if norm_weight is not None:
        x = formats.to_bf16(numerics.rms_norm(x, norm_eps, norm_weight)).float()
    cos, sin = numerics.rope_rows(rope_table, positions)
    return torch.cat([x[:, :-ROPE_DIMS], numerics.rope(x[:, -ROPE_DIMS:], cos, sin)], -1)


def kv_insert(
    kv: Tensor,
    cache: Tensor,
    slots: Tensor,
    positions: Tensor,
    rope_table: Tensor,
    *,
    record: Record,
    kv_scale: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
) -> None:
    """RoPE, quantise and store the rows that have a slot; see :func:`preattn.v4.kv_insert`."""
    count = slots.shape[0]
    kept = (slots >= 0) & (slots < cache.shape[0] * cache.shape[1])
    kv, positions, slots = kv[:count][kept], positions[:count][kept], slots[kept]
    rows = kv_rows(kv, positions, rope_table, norm_weight=norm_weight, norm_eps=norm_eps)
    # Block-scaled records quantise the row as bf16; a per-tensor one skips that rounding.
    rows = formats.to_bf16(rows) if kv_scale is None else rows * (1.0 / kv_scale.reshape(()))
    formats.store(cache, record, slots, formats.encode(record, rows))


def query_kv_insert(
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
) -> None:
    """Both halves; ``out`` [T, P, 512] is written. See :func:`preattn.v4.query_kv_insert`."""
    query_half(
        query,
        positions,
        rope_table,
        out,
        interleaved=interleaved,
        norm_eps=norm_eps,
        rope=rope,
        query_scale_inv=query_scale_inv,
        in_place=in_place,
    )
    kv_insert(kv, cache, slots, positions, rope_table, record=record, kv_scale=kv_scale)
