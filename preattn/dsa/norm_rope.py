"""``norm_rope_insert``: norms, RoPE of the keys, and what the caches store of them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import checks, formats, policy
from ..dispatch import define_op, use_kernels
from ..formats import Record
from ..reference import dsa as reference
from ..reference.numerics import Pairing
from .arguments import (
    INDEX_DIM,
    LATENT_DIM,
    PAIRINGS,
    ROPE_DIM,
    WEIGHTS,
    check_index_rope,
    check_rotated,
)

RECORDS = {name: formats.record(name, LATENT_DIM + ROPE_DIM) for name in ("dsa_fp8", "bf16", "fp8")}
"""The records these ops write of a KV latent and its key, by name."""
NO_ROPE_RECORDS = {name: formats.record(name, LATENT_DIM) for name in ("bf16", "fp8")}
"""The records they write of a latent alone, for models without RoPE."""
INDEX_RECORDS = {name: formats.record(name) for name in ("index_fp8", "index_fp8_ue8m0")}
"""The records they write of an indexer key."""


class Latents(NamedTuple):
    """What :func:`norm_rope_insert` returns; None where it was not asked for."""

    q_latent: Tensor
    """[T, rank], normed."""
    kv_latent: Tensor | None
    """[T, 512], normed."""
    k_pe: Tensor | None
    """Shaped as it was given, rotated."""


def norm_rope_insert(
    q_latent: Tensor,
    kv_latent: Tensor,
    k_pe: Tensor,
    cache: Tensor | None,
    slots: Tensor | None,
    positions: Tensor,
    rope_table: Tensor | None,
    *,
    record: str,
    q_weight: Tensor,
    kv_weight: Tensor,
    q_eps: float = 1e-6,
    kv_eps: float = 1e-6,
    kv_scale: Tensor | None = None,
    index_key: Tensor | None = None,
    index_weight: Tensor | None = None,
    index_bias: Tensor | None = None,
    index_eps: float = 1e-6,
    index_cache: Tensor | None = None,
    index_record: str = "index_fp8",
    index_slots: Tensor | None = None,
    index_pairing: Pairing | None = None,
    index_rope_table: Tensor | None = None,
    top_k: Tensor | None = None,
    return_kv: bool = False,
    rope_output: Pairing = "interleaved",
    out: Tensor | None = None,
    kv_out: Tensor | None = None,
    k_pe_out: Tensor | None = None,
) -> Latents:
    """First half of the prologue, in one launch: norms, RoPE of the keys, and what the caches store of them.

    The query latent is normed on every row, whatever its slot. All inputs may be columns of one wider row.

    Args:
        q_latent: [T, rank] bf16, rows at multiples of 16 bytes.
        kv_latent: [T, 512] bf16, likewise.
        k_pe: [T, 64] or [T, 1, 64] bf16, likewise; [T, 0] for a layer without RoPE (its ``bf16`` and ``fp8``
            records have 512 dims; ``dsa_fp8`` needs the 64).
        cache: [num_blocks, block_size, width] as :func:`preattn.formats.cache_view` makes it. The page stride
            is ``cache.stride(0)``. None where ``slots`` is None.
        slots: [S <= T] int32 or int64, ``block * block_size + offset``. Rows past S and slots outside the cache
            are not stored. Slots of one call are distinct (else see ``docs/debugging.md``). None: nothing is stored,
            in neither cache.
        positions: [T] int32 or int64, below the length of the tables.
        rope_table: [max_position, 64] float32 or bf16: 32 cosines, 32 sines. None without RoPE.
        record: ``dsa_fp8``, ``bf16`` or ``fp8``.
        q_weight: [rank] bf16 or float32, weight of the query latent's RMSNorm.
        kv_weight: [512] bf16 or float32, weight of the KV latent's.
        q_eps: epsilon of the former,
        kv_eps: and of the latter.
        kv_scale: one positive float32 from 2**-64 to 2**64, for the ``fp8`` record: codes of ``value / kv_scale``.
        index_key: [T, 128] bf16, likewise strided, or None for a layer without indexer.
        index_weight: [128] bf16 or float32, weight of its LayerNorm.
        index_bias: [128] bf16 or float32, bias of its LayerNorm.
        index_eps: epsilon of its LayerNorm.
        index_cache: paged cache of ``index_record``, of any block size.
        index_record: ``index_fp8`` or ``index_fp8_ue8m0``.
        index_slots: slots in ``index_cache``; ``slots`` when None.
        index_pairing: ``half_split`` (DeepSeek-V3.2) or ``interleaved`` (GLM-5.x).
        index_rope_table: the indexer's table; ``rope_table`` when None.
        top_k: [T or more, k] int32, rows at multiples of 16 bytes; the first T rows become -1. Only with an indexer.
        return_kv: also return the normed KV latent and the rotated key, on every row whatever its slot.
        rope_output: order of the rotated key's dims, stored and returned; see :func:`query`.
        out: [T, rank] bf16 for the normed query latent, rows at multiples of 16 bytes; it may be ``q_latent``.
        kv_out: [T, 512] bf16 for the normed KV latent, rows at multiples of 16 bytes; returned then.
        k_pe_out: shaped as ``k_pe``, for the rotated key, likewise. Both or neither.

    Returns:
        ``out`` or a new [T, rank] tensor; with ``return_kv`` or ``kv_out`` the normed latent and the rotated key too.

    Non-finite values: see ``docs/formats.md``, "NaN and Inf".

    Raises:
        TypeError, ValueError, RuntimeError: as :func:`query`.
    """
    _check(
        q_latent,
        kv_latent,
        k_pe,
        cache,
        slots,
        positions,
        rope_table,
        record,
        q_weight,
        kv_weight,
        q_eps,
        kv_eps,
        kv_scale,
        index_key,
        index_weight,
        index_bias,
        index_eps,
        index_cache,
        index_record,
        index_slots,
        index_pairing,
        index_rope_table,
        top_k,
        return_kv,
        rope_output,
        out,
        kv_out,
        k_pe_out,
    )
    if out is None:
        out = q_latent.new_empty(q_latent.shape)
    if return_kv and kv_out is None:
        kv_out, k_pe_out = kv_latent.new_empty(kv_latent.shape), k_pe.new_empty(k_pe.shape)
    if index_key is None:
        index_slots = index_rope_table = None
    else:
        index_slots = None if slots is None else slots if index_slots is None else index_slots
        index_rope_table = rope_table if index_rope_table is None else index_rope_table
    _norm_rope_insert(
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
        out,
        kv_out,
        k_pe_out,
        record,
        index_record,
        q_eps,
        kv_eps,
        index_eps,
        rope_output,
        index_pairing or "half_split",
    )
    return Latents(out, kv_out, k_pe_out)


# -- checks -------------------------------------------------------------------------------------------------


@checks.remembered
def _check(
    q_latent: Tensor,
    kv_latent: Tensor,
    k_pe: Tensor,
    cache: Tensor | None,
    slots: Tensor | None,
    positions: Tensor,
    rope_table: Tensor | None,
    record: str,
    q_weight: Tensor,
    kv_weight: Tensor,
    q_eps: float,
    kv_eps: float,
    kv_scale: Tensor | None,
    index_key: Tensor | None,
    index_weight: Tensor | None,
    index_bias: Tensor | None,
    index_eps: float,
    index_cache: Tensor | None,
    index_record: str,
    index_slots: Tensor | None,
    index_pairing: Pairing | None,
    index_rope_table: Tensor | None,
    top_k: Tensor | None,
    return_kv: bool,
    rope_output: Pairing,
    out: Tensor | None,
    kv_out: Tensor | None,
    k_pe_out: Tensor | None,
) -> None:
    checks.tensor("q_latent", q_latent, (torch.bfloat16,), (None, None))
    tokens, rank = q_latent.shape
    device = q_latent.device
    checks.rows("q_latent", q_latent)
    if rank < 8 or rank % 8:
        raise ValueError(f"q_latent: expected a rank that is a positive multiple of 8; got {rank}")
    checks.tensor("kv_latent", kv_latent, (torch.bfloat16,), (tokens, LATENT_DIM), device)
    checks.rows("kv_latent", kv_latent)
    separate = isinstance(k_pe, Tensor) and k_pe.dim() == 3
    checks.tensor("k_pe", k_pe, (torch.bfloat16,), (tokens, 1, None) if separate else (tokens, None), device)
    if separate:
        k_pe = k_pe.squeeze(1)
    check_rotated("k_pe", k_pe, positions, rope_table, tokens, device)
    checks.word("rope_output", rope_output, PAIRINGS)
    checks.word("index_record", index_record, INDEX_RECORDS)
    for name, eps in (("q_eps", q_eps), ("kv_eps", kv_eps), ("index_eps", index_eps)):
        checks.number(name, eps, least=0)
    checks.flag("return_kv", return_kv)
    if index_key is None and index_slots is not None:
        raise ValueError(f"index_slots: expected None without index_key; got a {type(index_slots).__name__}")
    _check_norm("q_weight", q_weight, rank, device)
    _check_norm("kv_weight", kv_weight, LATENT_DIM, device)
    kv_record = _record(record, k_pe.shape[-1])
    if slots is not None:
        checks.slots("slots", slots, tokens, device)
    if slots is not None or cache is not None:
        _check_cache("cache", cache, kv_record, device)
    checks.kv_scale(kv_scale, record, device)
    _check_index_key(
        index_key,
        index_weight,
        index_bias,
        index_cache,
        index_record,
        slots if index_slots is None else index_slots,
        index_pairing,
        index_rope_table,
        rope_table,
        top_k,
        tokens,
        device,
    )
    if out is not None:
        checks.tensor("out", out, (torch.bfloat16,), (tokens, rank), device)
        checks.rows("out", out)
    if (kv_out is None) != (k_pe_out is None):
        missing, given = ("kv_out", "k_pe_out") if kv_out is None else ("k_pe_out", "kv_out")
        raise ValueError(f"{missing}: expected a tensor with {given}; got None")
    if kv_out is not None and k_pe_out is not None:
        checks.tensor("kv_out", kv_out, (torch.bfloat16,), (tokens, LATENT_DIM), device)
        checks.rows("kv_out", kv_out)
        shape = (tokens, 1, k_pe.shape[-1]) if separate else tuple(k_pe.shape)
        checks.tensor("k_pe_out", k_pe_out, (torch.bfloat16,), shape, device)
        checks.rows("k_pe_out", k_pe_out.squeeze(1) if separate else k_pe_out)


def _check_norm(name: str, weight: object, dims: int, device: torch.device) -> None:
    checks.tensor(name, weight, WEIGHTS, (dims,), device)
    assert isinstance(weight, Tensor)
    checks.contiguous(name, weight)


def _check_cache(name: str, cache: object, record: Record, device: torch.device) -> None:
    checks.tensor(name, cache, formats.CACHE_DTYPES, (None, None, None), device)
    assert isinstance(cache, Tensor)
    formats.check_cache(name, cache, record)


def _check_index_key(
    index_key: object,
    weight: object,
    bias: object,
    cache: object,
    record: object,
    slots: object,
    pairing: object,
    index_rope_table: Tensor | None,
    rope_table: Tensor | None,
    top_k: object,
    tokens: int,
    device: torch.device,
) -> None:
    """Check the indexer's half."""
    if index_key is None:
        for name, value in (
            ("index_weight", weight),
            ("index_bias", bias),
            ("index_cache", cache),
            ("index_pairing", pairing),
            ("index_rope_table", index_rope_table),
            ("top_k", top_k),
        ):
            if value is not None:
                raise ValueError(f"{name}: expected None without index_key; got a {type(value).__name__}")
        return
    checks.tensor("index_key", index_key, (torch.bfloat16,), (tokens, INDEX_DIM), device)
    assert isinstance(index_key, Tensor)
    checks.rows("index_key", index_key)
    _check_norm("index_weight", weight, INDEX_DIM, device)
    _check_norm("index_bias", bias, INDEX_DIM, device)
    if slots is not None:
        checks.slots("index_slots", slots, tokens, device)
    if slots is not None or cache is not None:
        _check_cache("index_cache", cache, INDEX_RECORDS[str(record)], device)
    if top_k is not None:
        checks.tensor("top_k", top_k, (torch.int32,), (None, None), device)
        assert isinstance(top_k, Tensor)
        if top_k.shape[0] < tokens or top_k.shape[1] < 1:
            raise ValueError(f"top_k: expected at least {tokens} rows of at least 1; got {list(top_k.shape)}")
        checks.rows("top_k", top_k)
    check_index_rope(pairing, index_rope_table, rope_table, device)


def _record(name: str, rope_dim: int) -> Record:
    checks.word("record", name, RECORDS)
    if rope_dim:
        return RECORDS[name]
    if name not in NO_ROPE_RECORDS:
        raise ValueError(f"record: expected {' or '.join(NO_ROPE_RECORDS)} for a k_pe without dims; got {name!r}")
    return NO_ROPE_RECORDS[name]


# -- registered op ------------------------------------------------------------------------------------------


def _norm_rope_insert_impl(
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
    out: Tensor,
    kv_out: Tensor | None,
    k_pe_out: Tensor | None,
    record: str,
    index_record: str,
    q_eps: float,
    kv_eps: float,
    index_eps: float,
    rope_output: Pairing,
    index_pairing: Pairing,
) -> None:
    checks.all_aligned(
        (
            ("q_latent", q_latent),
            ("kv_latent", kv_latent),
            ("k_pe", k_pe),
            ("cache", cache),
            ("rope_table", rope_table),
            ("q_weight", q_weight),
            ("kv_weight", kv_weight),
            ("index_key", index_key),
            ("index_weight", index_weight),
            ("index_bias", index_bias),
            ("index_cache", index_cache),
            ("index_rope_table", index_rope_table),
            ("top_k", top_k),
            ("out", out),
            ("kv_out", kv_out),
            ("k_pe_out", k_pe_out),
        )
    )
    if out.data_ptr() != q_latent.data_ptr() or out.stride() != q_latent.stride():
        checks.disjoint("out", out, "q_latent", q_latent)
    for name, written, read, source in (
        ("kv_out", kv_out, "kv_latent", kv_latent),
        ("k_pe_out", k_pe_out, "k_pe", k_pe),
    ):
        if written is not None:
            checks.disjoint(name, written, read, source)
    on_kernels = use_kernels(q_latent)
    if k_pe.dim() == 3 and not on_kernels:  # the kernel walks rows either way, and a view of them costs host time
        k_pe = k_pe.squeeze(1)
        k_pe_out = None if k_pe_out is None else k_pe_out.squeeze(1)
    arguments = (
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
        out,
        kv_out,
        k_pe_out,
    )
    options: dict[str, Any] = {
        "record": _record(record, k_pe.shape[-1]),
        "index_record": INDEX_RECORDS[index_record],
        "q_eps": q_eps,
        "kv_eps": kv_eps,
        "index_eps": index_eps,
        "rope_output": rope_output,
        "index_pairing": index_pairing,
    }
    if not on_kernels:
        reference.norm_rope_insert(*arguments, **options)
        return
    from ..kernels import dsa as kernels

    config = policy.launch_config(q_latent.device.index, "dsa_norm_rope", q_latent.shape[0])
    kernels.launch_norm_rope(*arguments, **options, config=config).run(q_latent.device)


_norm_rope_insert = define_op(
    "dsa_norm_rope_insert(Tensor q_latent, Tensor kv_latent, Tensor k_pe, Tensor(a!)? cache, Tensor? slots, "
    "Tensor positions, Tensor? rope_table, Tensor q_weight, Tensor kv_weight, Tensor? kv_scale, Tensor? index_key, "
    "Tensor? index_weight, Tensor? index_bias, Tensor(b!)? index_cache, Tensor? index_slots, "
    "Tensor? index_rope_table, Tensor(c!)? top_k, Tensor(d!) out, Tensor(e!)? kv_out, Tensor(f!)? k_pe_out, "
    "str record, str index_record, float q_eps, float kv_eps, float index_eps, str rope_output, "
    "str index_pairing) -> ()",
    _norm_rope_insert_impl,
)
