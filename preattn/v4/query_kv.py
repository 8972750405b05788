"""``query_kv_insert``, ``kv_insert``, ``pad_query``: what a projection wrote, and the KV latent, to what is read."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import checks, formats, policy
from ..dispatch import define_op, use_kernels
from ..formats import Record
from ..policy import Layout
from ..reference import v4 as reference

HEAD_DIM = 512
ACTIVATIONS = (torch.bfloat16, torch.float16)
RECORDS = {name: formats.record(name, HEAD_DIM) for name in ("v41_mxfp8", "v4_fp8", "bf16", "fp8")}
"""The records these ops write, by name."""


def query_kv_insert(
    query: Tensor,
    kv: Tensor,
    cache: Tensor,
    slots: Tensor,
    positions: Tensor,
    rope_table: Tensor,
    *,
    record: str,
    query_rope: bool,
    query_norm_eps: float | None = None,
    padded_heads: int | None = None,
    layout: Layout = "head_major",
    query_scale_inv: Tensor | None = None,
    kv_scale: Tensor | None = None,
    out: Tensor | None = None,
    form: str = "one_launch",
) -> Tensor:
    """Query and KV half of the prologue: ``wq_b``'s output and the KV latent to what attention reads.

    Args:
        query: [T, H, 512] bf16 or fp16. Head-major: any token and head strides that are multiples of 16
            bytes. Chunk-interleaved (``wq_b``'s rows permuted at load): heads and dims contiguous.
        kv: [T, 512] of the same dtype, rows at multiples of 16 bytes.
        cache: [num_blocks, block_size, width] as :func:`preattn.formats.cache_view` makes it; rows are
            stored at ``slots``. The page stride is ``cache.stride(0)``.
        slots: [S <= T] int32 or int64, ``block * block_size + offset``. Rows past S and slots outside the
            cache are not stored; their query is processed all the same. Slots of one call are distinct
            (else see ``docs/debugging.md``).
        positions: [T] int32 or int64, below ``len(rope_table)``.
        rope_table: [max_position, 64] float32 or bf16: 32 cosines, 32 sines.
        record: ``v41_mxfp8``, ``v4_fp8``, ``bf16`` or ``fp8``.
        query_rope: rotate the last 64 dims of each head (interleaved pairs). False where attention rotates.
        query_norm_eps: RMSNorm each head over its 512 dims without weight (V4), or None (V4.1).
        padded_heads: P >= H heads of the result, those past H being +0.0. None: H. 0: KV only.
        layout: ``head_major`` [T, P, 512], or ``chunk_interleaved``: the same storage read as
            [T, 32, P, 16]. The latter moves bits only: no norm, no RoPE, no cast.
        query_scale_inv: one float32; the result is then e4m3 of ``value * query_scale_inv``.
        kv_scale: one positive float32, for the ``fp8`` record: codes are e4m3 of ``value * (1 / kv_scale)``; a product
            that overflows float32 is not finite, and stored as such.
        out: [T, P, 512] to write into, rows at multiples of 16 bytes. Where ``query`` is ``out[:, :H]``
            (head-major) the query is processed in place and the heads past H are not touched: their buffer
            holds zeros already.
        form: :class:`~preattn.policy.Form`: ``one_launch``, or ``two_launches`` (the KV half and the query half in
            a launch each; same bits), or ``kv_only`` (as ``padded_heads=0``).

    Returns:
        ``out``, or a new [T, P, 512] tensor ([T, 0, 512] for KV only).

    Raises:
        TypeError: a dtype, or an argument that is not a tensor.
        ValueError: a shape, stride, alignment, device or combination that does not fit.
        RuntimeError: the launch is not compiled and the stream is under graph capture (see ``warmup``).
    """
    padded, dtype = _check_query_kv(
        query,
        kv,
        cache,
        slots,
        positions,
        rope_table,
        record,
        query_rope,
        query_norm_eps,
        padded_heads,
        layout,
        query_scale_inv,
        kv_scale,
        out,
        form,
    )
    if out is None:
        out = query.new_empty((query.shape[0], padded, HEAD_DIM), dtype=dtype)
    if padded == 0:
        _kv_insert(kv, cache, slots, positions, rope_table, record, kv_scale, None, 0.0)
    else:
        _query_kv_insert(
            query,
            kv,
            cache,
            slots,
            positions,
            rope_table,
            out,
            record,
            layout == "chunk_interleaved",
            query_norm_eps,
            query_rope,
            query_scale_inv,
            kv_scale,
            form == "two_launches",
        )
    return out


def kv_insert(
    kv: Tensor,
    cache: Tensor,
    slots: Tensor,
    positions: Tensor,
    rope_table: Tensor,
    *,
    record: str,
    kv_scale: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
) -> None:
    """The KV half alone: rotate, quantise and store [T, 512] latent rows.

    Args are those of :func:`query_kv_insert`, and:
        norm_weight: [512] bf16, fp16 or float32: first RMSNorm each row (float32, rounded to bf16). The
            result is that of normalising before the call, one pass over memory less.
        norm_eps: its epsilon.

    Raises:
        TypeError, ValueError, RuntimeError: as :func:`query_kv_insert`.
    """
    _check_kv_insert(kv, cache, slots, positions, rope_table, record, kv_scale, norm_weight, norm_eps)
    _kv_insert(kv, cache, slots, positions, rope_table, record, kv_scale, norm_weight, norm_eps)


def pad_query(query: Tensor, padded_heads: int, *, layout: Layout = "head_major", out: Tensor | None = None) -> Tensor:
    """Copy [T, H, 512] into [T, P, 512] with +0.0 in the heads past H; bits move unchanged.

    Any H <= P; arguments, result and errors as in :func:`query_kv_insert`. ``out`` may not overlap ``query``.
    """
    _check_pad_query(query, padded_heads, layout, out)
    if out is None:
        out = query.new_empty((query.shape[0], padded_heads, HEAD_DIM))
    _pad_query(query, out, layout == "chunk_interleaved")
    return out


# -- checks -------------------------------------------------------------------------------------------------


@checks.remembered
def _check_query_kv(
    query: Tensor,
    kv: Tensor,
    cache: Tensor,
    slots: Tensor,
    positions: Tensor,
    rope_table: Tensor,
    record: str,
    query_rope: bool,
    query_norm_eps: float | None,
    padded_heads: int | None,
    layout: Layout,
    query_scale_inv: Tensor | None,
    kv_scale: Tensor | None,
    out: Tensor | None,
    form: str,
) -> tuple[int, torch.dtype]:
    """Heads and dtype of the result."""
    checks.tensor("query", query, ACTIVATIONS, (None, None, HEAD_DIM))
    tokens, heads, _ = query.shape
    _check_kv(kv, cache, slots, positions, rope_table, record, kv_scale, tokens, query.device)
    if kv.dtype != query.dtype:
        raise TypeError(f"kv: expected the query's dtype {query.dtype}; got {kv.dtype}")
    _check_query(query, padded_heads, layout, query_scale_inv)
    checks.flag("query_rope", query_rope)
    if query_norm_eps is not None:
        checks.number("query_norm_eps", query_norm_eps, least=0)
    if layout == "chunk_interleaved" and (query_rope or query_norm_eps is not None or query_scale_inv is not None):
        raise ValueError(
            "layout: expected head_major with query_rope, query_norm_eps or query_scale_inv; got chunk_interleaved, "
            "whose attention kernel norms and rotates the query itself"
        )
    dtype = query.dtype if query_scale_inv is None else torch.float8_e4m3fn
    checks.word("form", form, policy.FORMS)
    padded = 0 if form == "kv_only" else heads if padded_heads is None else padded_heads
    if out is not None:
        _check_out(out, query, padded, dtype)
    return padded, dtype


@checks.remembered
def _check_kv_insert(
    kv: Tensor,
    cache: Tensor,
    slots: Tensor,
    positions: Tensor,
    rope_table: Tensor,
    record: str,
    kv_scale: Tensor | None,
    norm_weight: Tensor | None,
    norm_eps: float,
) -> None:
    checks.tensor("kv", kv, ACTIVATIONS, (None, HEAD_DIM))
    _check_kv(kv, cache, slots, positions, rope_table, record, kv_scale, kv.shape[0], kv.device)
    checks.number("norm_eps", norm_eps, least=0)
    if norm_weight is not None:
        checks.tensor("norm_weight", norm_weight, (*ACTIVATIONS, torch.float32), (HEAD_DIM,), kv.device)
        checks.contiguous("norm_weight", norm_weight)


@checks.remembered
def _check_pad_query(query: Tensor, padded_heads: int, layout: Layout, out: Tensor | None) -> None:
    checks.tensor("query", query, ACTIVATIONS, (None, None, HEAD_DIM))
    _check_query(query, padded_heads, layout, None)
    if padded_heads == 0:
        raise ValueError(f"padded_heads: expected at least the {query.shape[1]} heads of query; got 0")
    if out is not None:
        _check_out(out, query, padded_heads, query.dtype)


def _check_kv(
    kv: Tensor,
    cache: Tensor,
    slots: Tensor,
    positions: Tensor,
    rope_table: Tensor,
    record: str,
    kv_scale: Tensor | None,
    tokens: int,
    device: torch.device,
) -> None:
    checks.tensor("kv", kv, ACTIVATIONS, (tokens, HEAD_DIM), device)
    checks.rows("kv", kv)
    checks.slots("slots", slots, tokens, device)
    checks.positions(positions, tokens, device)
    checks.table("rope_table", rope_table, device)
    checks.tensor("cache", cache, formats.CACHE_DTYPES, (None, None, None), device)
    formats.check_cache("cache", cache, _record(record))
    checks.kv_scale(kv_scale, record, device)


def _check_query(query: Tensor, padded_heads: int | None, layout: Layout, scale_inv: Tensor | None) -> None:
    heads = query.shape[1]
    checks.word("layout", layout, policy.LAYOUTS)
    if heads < 1:
        raise ValueError("query: expected at least 1 head; got 0")
    if padded_heads is not None and (not isinstance(padded_heads, int) or isinstance(padded_heads, bool)):
        raise TypeError(f"padded_heads: expected an int or None; got {type(padded_heads).__name__}")
    if padded_heads is not None and padded_heads != 0 and padded_heads < heads:
        raise ValueError(f"padded_heads: expected 0 or at least the {heads} heads of query; got {padded_heads}")
    checks.rows("query", query, inner=2 if layout == "chunk_interleaved" else 1)
    if scale_inv is not None:
        checks.scale("query_scale_inv", scale_inv, query.device)


def _check_out(out: Tensor, query: Tensor, padded: int, dtype: torch.dtype) -> None:
    checks.tensor("out", out, (dtype,), (query.shape[0], padded, HEAD_DIM), query.device)
    checks.rows("out", out, inner=2)
    checks.apart("out", out)


def _record(name: str) -> Record:
    checks.word("record", name, RECORDS)
    return RECORDS[name]


# -- registered ops -----------------------------------------------------------------------------------------


def _kv_insert_impl(
    kv: Tensor,
    cache: Tensor,
    slots: Tensor,
    positions: Tensor,
    rope_table: Tensor,
    record: str,
    kv_scale: Tensor | None,
    norm_weight: Tensor | None,
    norm_eps: float,
) -> None:
    checks.all_aligned((("kv", kv), ("cache", cache), ("norm_weight", norm_weight)))
    checks.disjoint("cache", cache, "kv", kv)
    arguments: dict[str, Any] = {
        "record": RECORDS[record],
        "kv_scale": kv_scale,
        "norm_weight": norm_weight,
        "norm_eps": norm_eps,
    }
    if not use_kernels(kv):
        reference.kv_insert(kv, cache, slots, positions, rope_table, **arguments)
        return
    from ..kernels import v4 as kernels

    config = policy.launch_config(kv.device.index, "kv", kv.shape[0])
    kernels.launch_kv(kv, cache, slots, positions, rope_table, **arguments, config=config).run(kv.device)


def _pad_query_impl(query: Tensor, out: Tensor, interleaved: bool) -> None:
    checks.all_aligned((("query", query), ("out", out)))
    checks.disjoint("out", out, "query", query)
    if not use_kernels(query):
        reference.pad_query(query, out, interleaved=interleaved)
        return
    from ..kernels import v4 as kernels

    path = policy.v4_query_path(interleaved=interleaved, norm=False, in_place=False)
    config = policy.launch_config(query.device.index, path, query.shape[0])
    kernels.launch_pad(query, out, interleaved=interleaved, config=config).run(query.device)


def _query_kv_insert_impl(
    query: Tensor,
    kv: Tensor,
    cache: Tensor,
    slots: Tensor,
    positions: Tensor,
    rope_table: Tensor,
    out: Tensor,
    record: str,
    interleaved: bool,
    norm_eps: float | None,
    rope: bool,
    query_scale_inv: Tensor | None,
    kv_scale: Tensor | None,
    two_launches: bool,
) -> None:
    checks.all_aligned((("query", query), ("kv", kv), ("cache", cache), ("out", out)))
    checks.disjoint("out", out, "kv", kv)
    checks.disjoint("cache", cache, "out", out)
    checks.disjoint("cache", cache, "kv", kv)
    in_place = _in_place(query, out, interleaved)
    arguments: dict[str, Any] = {
        "record": RECORDS[record],
        "interleaved": interleaved,
        "norm_eps": norm_eps,
        "rope": rope,
        "query_scale_inv": query_scale_inv,
        "kv_scale": kv_scale,
        "in_place": in_place,
    }
    if not use_kernels(query):
        reference.query_kv_insert(query, kv, cache, slots, positions, rope_table, out, **arguments)
        return
    from ..kernels import v4 as kernels

    path = policy.v4_query_path(interleaved=interleaved, norm=norm_eps is not None, in_place=in_place)
    config = policy.launch_config(query.device.index, path, query.shape[0])
    if two_launches:
        _kv_insert_impl(kv, cache, slots, positions, rope_table, record, kv_scale, None, 0.0)
        slots = slots[:0]  # the same kernel, no KV programs: the query half alone
    kernels.launch_query_kv(query, kv, cache, slots, positions, rope_table, out, **arguments, config=config).run(
        query.device
    )


def _in_place(query: Tensor, out: Tensor, interleaved: bool) -> bool:
    """Whether ``query`` is the front of ``out``; any other overlap is an error."""
    if query.data_ptr() == out.data_ptr() and query.numel():
        same = query.dtype == out.dtype and not interleaved
        same = same and (query.shape[0] == 1 or query.stride(0) == out.stride(0))
        if same and (query.shape[1] == 1 or query.stride(1) == HEAD_DIM):
            return True
    checks.disjoint("out", out, "query", query)
    return False


_STEP = "Tensor slots, Tensor positions, Tensor rope_table"
_kv_insert = define_op(
    f"v4_kv_insert(Tensor kv, Tensor(a!) cache, {_STEP}, str record, Tensor? kv_scale, Tensor? norm_weight, "
    "float norm_eps) -> ()",
    _kv_insert_impl,
)
_pad_query = define_op("v4_pad_query(Tensor query, Tensor(a!) out, bool interleaved) -> ()", _pad_query_impl)
_query_kv_insert = define_op(
    f"v4_query_kv_insert(Tensor query, Tensor kv, Tensor(a!) cache, {_STEP}, Tensor(b!) out, str record, "
    "bool interleaved, float? norm_eps, bool rope, Tensor? query_scale_inv, Tensor? kv_scale, bool two_launches) -> ()",
    _query_kv_insert_impl,
)
