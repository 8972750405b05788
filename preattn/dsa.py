"""The DSA prologue (DeepSeek-V3.2, GLM-5.x): ``norm_rope_insert``, ``absorb_query``, ``query``.

In a layer's order: norm the latents and store the keys; (outside: ``q_b_proj``;) absorb ``W_UK`` into the
query, straight into the packed buffer; rotate what is left of the query into that buffer's tail and quantise
the indexer's query.

Each public function validates, allocates what it returns and calls a registered op that writes into given
tensors. On CUDA tensors the op launches Triton kernels; on CPU tensors it runs the reference, or, where
``TRITON_INTERPRET=1`` is set, the same kernels in Triton's interpreter.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from . import checks, formats, policy
from .dispatch import define_op, use_kernels
from .formats import Record
from .reference import dsa as reference
from .reference.numerics import Pairing

LATENT_DIM = 512
ROPE_DIM = 64
INDEX_DIM = 128
RECORDS = {name: formats.record(name, LATENT_DIM + ROPE_DIM) for name in ("dsa_fp8", "bf16", "fp8")}
"""The records these ops write of a KV latent and its key, by name;"""
NO_ROPE_RECORDS = {name: formats.record(name, LATENT_DIM) for name in ("bf16", "fp8")}
"""of a latent alone;"""
INDEX_RECORDS = {name: formats.record(name) for name in ("index_fp8", "index_fp8_ue8m0")}
"""and of an indexer key."""
WEIGHTS = (torch.bfloat16, torch.float32)

QueryForm = Literal["packed", "pair"]
"""What attention reads: one [T, P, 576] tensor, or the absorbed latent and the rotated dims apart."""
FORMS: tuple[QueryForm, ...] = get_args(QueryForm)
PAIRINGS: tuple[Pairing, ...] = get_args(Pairing)


class Query(NamedTuple):
    """What :func:`query` returns; None where there is none."""

    query: Tensor | None
    """Packed: [T, P, 576]. Pair: [T, H, 512]."""
    q_pe: Tensor | None
    """Pair: [T, H, 64], rotated."""
    index_query: Tensor | None
    """[T, index heads, 128] e4m3."""
    index_weights: Tensor | None
    """[T, index heads] float32, with the scales of ``index_query`` in them."""


class Latents(NamedTuple):
    """What :func:`norm_rope_insert` returns; None where it was not asked for."""

    q_latent: Tensor
    """[T, rank], normed."""
    kv_latent: Tensor | None
    """[T, 512], normed."""
    k_pe: Tensor | None
    """Shaped as it was given, rotated."""


def query(
    q_pe: Tensor,
    latent: Tensor | None,
    positions: Tensor,
    rope_table: Tensor | None,
    *,
    form: QueryForm = "packed",
    padded_heads: int | None = None,
    query_scale: Tensor | None = None,
    rope_output: Pairing = "interleaved",
    index_query: Tensor | None = None,
    index_weights: Tensor | None = None,
    index_pairing: Pairing | None = None,
    index_rope_table: Tensor | None = None,
    softmax_scale: float = 1.0,
    head_scale: float = 1.0,
    out: Tensor | None = None,
) -> Query:
    """Query half of the prologue, in one launch: main query and indexer query to what attention reads.

    Args:
        q_pe: [T, H, 64] bf16, any token and head strides that are multiples of 16 bytes (a slice of
            [T, H, 192] fits); [T, H, 0] for a layer without RoPE.
        latent: the absorbed query [T, H, 512] bf16, strided as freely (a transposed ``bmm`` fits). Where it
            is ``out[:, :H, :512]``, or None, the front of ``out`` holds it already: nothing is copied, and the
            heads past H are not touched, for their buffer holds zeros already. With ``query_scale`` it may
            be e4m3: cast already, as :func:`absorb_query` leaves it.
        positions: [T] int32 or int64, below the length of the tables.
        rope_table: [max_position, 64] float32 or bf16: 32 cosines, 32 sines. None without RoPE.
        form: ``packed`` is one [T, P, 576] (without RoPE [T, P, 512]) tensor; ``pair`` is the latent and a
            new [T, H, 64] tensor.
        padded_heads: packed only: P >= H heads of the result, those past H being +0.0. None: H.
        query_scale: one positive float32 from 2**-64 to 2**64; the main query is then e4m3 of ``value / scale``.
        rope_output: order of the rotated dims. Pairs are read interleaved in either case; Hugging Face's models
            write them half-split, with keys to match.
        index_query: [T, index heads, 128] bf16, heads and dims contiguous, or None for a layer without indexer.
        index_weights: [T, index heads] float32 or bf16, heads contiguous.
        index_pairing: ``half_split`` (DeepSeek-V3.2) or ``interleaved`` (GLM-5.x): what RoPE pairs in the first
            64 dims of ``index_query``. It does not follow from the main query's.
        index_rope_table: the indexer's table; ``rope_table`` when None.
        softmax_scale: factor of the index weights,
        head_scale: and another: ``weights * scale of the codes * softmax_scale * head_scale``, in that order.
        out: packed only: [T, P, 576] to write into, of the result's dtype, heads and dims contiguous and rows
            at multiples of 16 bytes.

    Returns:
        The result's tensors; the pair's latent is ``latent`` itself unless it has to be cast.

    Non-finite values: see ``docs/formats.md``, "NaN and Inf".

    Raises:
        TypeError: a dtype, or an argument that is not a tensor.
        ValueError: a shape, stride, alignment, device or combination that does not fit.
        RuntimeError: the launch is not compiled and the stream is under graph capture (see ``warmup``).
    """
    checks.tensor("q_pe", q_pe, (torch.bfloat16,), (None, None, None))
    tokens, heads, rope_dim = q_pe.shape
    device = q_pe.device
    if heads < 1:
        raise ValueError("q_pe: expected at least 1 head; got 0")
    _check_rotated("q_pe", q_pe, positions, rope_table, tokens, device)
    if query_scale is not None:
        checks.scale("query_scale", query_scale, device)
    _check_choice("form", form, FORMS)
    _check_choice("rope_output", rope_output, PAIRINGS)
    dtype = torch.bfloat16 if query_scale is None else torch.float8_e4m3fn
    if latent is not None:
        dtypes = (torch.bfloat16,) if query_scale is None else (torch.bfloat16, dtype)
        checks.tensor("latent", latent, dtypes, (tokens, heads, LATENT_DIM), device)
        checks.rows("latent", latent)
    index_table = _check_index_query(
        index_query, index_weights, index_pairing, index_rope_table, rope_table, tokens, device
    )

    out_pe: Tensor | None = None
    moved = latent
    if form == "packed":
        padded = _check_padded(padded_heads, heads)
        if out is None:
            if latent is None:
                raise ValueError("latent: expected a tensor, or out with the latent in its front; got None for both")
            out = q_pe.new_empty((tokens, padded, LATENT_DIM + rope_dim), dtype=dtype)
        else:
            checks.tensor("out", out, (dtype,), (tokens, padded, LATENT_DIM + rope_dim), device)
            checks.rows("out", out, inner=2)
    else:
        if padded_heads is not None or out is not None:
            name = "out" if padded_heads is None else "padded_heads"
            raise ValueError(f"{name}: expected None for the pair; got a value")
        if latent is None:
            raise ValueError("latent: expected a tensor for the pair; got None")
        out_pe = q_pe.new_empty((tokens, heads, rope_dim), dtype=dtype)
        if latent.dtype == dtype:
            moved = None
        else:
            out = q_pe.new_empty((tokens, heads, LATENT_DIM), dtype=dtype)
    index_out = weights_out = None
    if index_query is not None:
        index_out = q_pe.new_empty(index_query.shape, dtype=torch.float8_e4m3fn)
        weights_out = q_pe.new_empty(index_query.shape[:2], dtype=torch.float32)
    _query(
        q_pe,
        moved,
        positions,
        rope_table,
        index_query,
        index_weights,
        index_table,
        query_scale,
        out,
        out_pe,
        index_out,
        weights_out,
        rope_output,
        index_pairing or "half_split",
        softmax_scale,
        head_scale,
    )
    return Query(latent if out is None else out, out_pe, index_out, weights_out)


def absorb_query(
    q_nope: Tensor,
    w_uk: Tensor,
    *,
    query_scale: Tensor | None = None,
    rope_dim: int = ROPE_DIM,
    out: Tensor | None = None,
) -> Tensor:
    """Absorb ``W_UK`` into the query, straight into the front of the packed buffer that :func:`query` completes.

    bf16 is one ``torch.bmm`` whose result is the strided front of ``out``, bit-equal to the dense product. e4m3
    is one kernel that multiplies, rounds to bf16, divides by the scale and casts, so that the bf16 latent never
    reaches memory. It equals ``bmm`` and a cast up to the order in which float32 sums add: products of bf16 are
    exact, and each of fewer than ``nope`` additions, rounded or (as matrix units do) truncated, is off by at most
    2**-23 of the terms' magnitude, so that either sum lies within ``nope * 2**-23 * sum(|q| * |w|)`` of the exact one.
    A code may thus be another where rounding, to bf16 and then to e4m3, has a boundary within twice that distance.

    Args:
        q_nope: [T, H, nope] bf16, nope a multiple of 64, strides that are multiples of 16 bytes.
        w_uk: [H, nope, 512] bf16, last dim contiguous.
        query_scale: one positive float32 from 2**-64 to 2**64: write e4m3 of ``value / scale``. None: bf16.
        rope_dim: dims that a new ``out`` leaves free behind the latent.
        out: [T, P >= H, 512 or more] of the result's dtype, heads and dims contiguous and rows at multiples of
            16 bytes; only ``out[:, :H, :512]`` is written.

    Returns:
        ``out``, or a new [T, H, 512 + rope_dim] tensor.

    Raises:
        TypeError, ValueError, RuntimeError: as :func:`query`.
    """
    checks.tensor("q_nope", q_nope, (torch.bfloat16,), (None, None, None))
    tokens, heads, nope = q_nope.shape
    if heads < 1 or nope < 64 or nope % 64:
        raise ValueError(
            f"q_nope: expected at least 1 head of a positive multiple of 64 dims; got {list(q_nope.shape)}"
        )
    checks.rows("q_nope", q_nope)
    checks.tensor("w_uk", w_uk, (torch.bfloat16,), (heads, nope, LATENT_DIM), q_nope.device)
    checks.rows("w_uk", w_uk)
    if query_scale is not None:
        checks.scale("query_scale", query_scale, q_nope.device)
    dtype = torch.bfloat16 if query_scale is None else torch.float8_e4m3fn
    if out is None:
        if rope_dim not in (0, ROPE_DIM):
            raise ValueError(f"rope_dim: expected 0 or {ROPE_DIM}; got {rope_dim!r}")
        out = q_nope.new_empty((tokens, heads, LATENT_DIM + rope_dim), dtype=dtype)
    else:
        checks.tensor("out", out, (dtype,), (tokens, None, None), q_nope.device)
        if out.shape[1] < heads or out.shape[2] < LATENT_DIM or out.shape[2] % 16:
            raise ValueError(
                f"out: expected at least {heads} heads of at least {LATENT_DIM} dims (a multiple of 16); "
                f"got {list(out.shape)}"
            )
        checks.rows("out", out, inner=2)
    _absorb(q_nope, w_uk, query_scale, out)
    return out


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
            are not stored. Slots of one call are distinct. None: nothing is stored, in neither cache.
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
        top_k: [T or more, k] int32; the first T rows become -1. Only with an indexer.
        return_kv: also return the normed KV latent and the rotated key, on every row whatever its slot.
        rope_output: order of the rotated key's dims, stored and returned; see :func:`query`.
        out: [T, rank] bf16 for the normed query latent, rows at multiples of 16 bytes; it may be ``q_latent``.

    Returns:
        ``out`` or a new [T, rank] tensor; with ``return_kv`` the normed latent and the rotated key too.

    Non-finite values: see ``docs/formats.md``, "NaN and Inf".

    Raises:
        TypeError, ValueError, RuntimeError: as :func:`query`.
    """
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
    _check_rotated("k_pe", k_pe, positions, rope_table, tokens, device)
    _check_choice("rope_output", rope_output, PAIRINGS)
    _check_norm("q_weight", q_weight, rank, device)
    _check_norm("kv_weight", kv_weight, LATENT_DIM, device)
    kv_record = _record(record, k_pe.shape[-1])
    if slots is not None:
        _check_slots("slots", slots, tokens, device)
    if slots is not None or cache is not None:
        _check_cache("cache", cache, kv_record, device)
    if (kv_scale is None) == (record == "fp8"):
        expected = "a scale for fp8 records" if record == "fp8" else f"None for {record} records"
        raise ValueError(f"kv_scale: expected {expected}; got {'None' if kv_scale is None else 'a tensor'}")
    if kv_scale is not None:
        checks.scale("kv_scale", kv_scale, device)
    index_table = _check_index_key(
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
    if out is None:
        out = q_latent.new_empty((tokens, rank))
    else:
        checks.tensor("out", out, (torch.bfloat16,), (tokens, rank), device)
        checks.rows("out", out)
    kv_out = k_pe_out = None
    if return_kv:
        kv_out = kv_latent.new_empty((tokens, LATENT_DIM))
        k_pe_out = k_pe.new_empty(k_pe.shape)
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
        None if index_key is None or slots is None else slots if index_slots is None else index_slots,
        index_table,
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
    return Latents(out, kv_out, k_pe_out.unsqueeze(1) if separate and k_pe_out is not None else k_pe_out)


# -- checks -------------------------------------------------------------------------------------------------


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name}: expected one of {', '.join(choices)}; got {value!r}")


def _check_table(name: str, table: object, device: torch.device) -> None:
    checks.tensor(name, table, checks.TABLE_DTYPES, (None, ROPE_DIM), device)
    assert isinstance(table, Tensor)
    checks.contiguous(name, table)


def _check_rotated(
    name: str, x: Tensor, positions: object, rope_table: object, tokens: int, device: torch.device
) -> None:
    """Check rows that are rotated (or have no dims), with positions and table."""
    if x.shape[-1] not in (0, ROPE_DIM):
        raise ValueError(f"{name}: expected last dim {ROPE_DIM}, or 0 without RoPE; got {list(x.shape)}")
    if x.shape[-1]:
        checks.rows(name, x)
    checks.tensor("positions", positions, checks.INDEX_DTYPES, (tokens,), device)
    assert isinstance(positions, Tensor)
    checks.contiguous("positions", positions)
    if rope_table is not None or x.shape[-1]:
        _check_table("rope_table", rope_table, device)


def _check_padded(padded_heads: object, heads: int) -> int:
    if padded_heads is None:
        return heads
    if not isinstance(padded_heads, int) or isinstance(padded_heads, bool):
        raise TypeError(f"padded_heads: expected an int or None; got {type(padded_heads).__name__}")
    if padded_heads < heads:
        raise ValueError(f"padded_heads: expected at least the {heads} heads of q_pe; got {padded_heads}")
    return padded_heads


def _check_index_query(
    index_query: object,
    index_weights: object,
    pairing: object,
    index_rope_table: Tensor | None,
    rope_table: Tensor | None,
    tokens: int,
    device: torch.device,
) -> Tensor | None:
    """Check the indexer's half and give its table."""
    if index_query is None:
        for name, value in (("index_weights", index_weights), ("index_rope_table", index_rope_table)):
            if value is not None:
                raise ValueError(f"{name}: expected None without index_query; got a {type(value).__name__}")
        return None
    checks.tensor("index_query", index_query, (torch.bfloat16,), (tokens, None, INDEX_DIM), device)
    assert isinstance(index_query, Tensor)
    heads = index_query.shape[1]
    if heads < 1:
        raise ValueError("index_query: expected at least 1 head; got 0")
    checks.rows("index_query", index_query, inner=2)
    checks.tensor("index_weights", index_weights, WEIGHTS, (tokens, heads), device)
    assert isinstance(index_weights, Tensor)
    if heads > 1 and index_weights.stride(1) != 1:
        raise ValueError(f"index_weights: expected the last dim contiguous; got strides {index_weights.stride()}")
    return _check_index_rope(pairing, index_rope_table, rope_table, device)


def _check_index_rope(
    pairing: object, index_rope_table: Tensor | None, rope_table: Tensor | None, device: torch.device
) -> Tensor:
    _check_choice("index_pairing", pairing, PAIRINGS)
    table = rope_table if index_rope_table is None else index_rope_table
    if table is None:
        raise ValueError("index_rope_table: expected a tensor where rope_table is None; got None")
    if table is not rope_table:
        _check_table("index_rope_table", table, device)
    return table


def _check_norm(name: str, weight: object, dims: int, device: torch.device) -> None:
    checks.tensor(name, weight, WEIGHTS, (dims,), device)
    assert isinstance(weight, Tensor)
    checks.contiguous(name, weight)


def _check_slots(name: str, slots: object, tokens: int, device: torch.device) -> None:
    checks.tensor(name, slots, checks.INDEX_DTYPES, (None,), device)
    assert isinstance(slots, Tensor)
    if slots.shape[0] > tokens:
        raise ValueError(f"{name}: expected at most {tokens} entries, one for each token; got {slots.shape[0]}")
    checks.contiguous(name, slots)


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
) -> Tensor | None:
    """Check the indexer's half and give its table."""
    if index_key is None:
        for name, value in (
            ("index_weight", weight),
            ("index_bias", bias),
            ("index_cache", cache),
            ("index_rope_table", index_rope_table),
            ("top_k", top_k),
        ):
            if value is not None:
                raise ValueError(f"{name}: expected None without index_key; got a {type(value).__name__}")
        return None
    checks.tensor("index_key", index_key, (torch.bfloat16,), (tokens, INDEX_DIM), device)
    assert isinstance(index_key, Tensor)
    checks.rows("index_key", index_key)
    _check_norm("index_weight", weight, INDEX_DIM, device)
    _check_norm("index_bias", bias, INDEX_DIM, device)
    if record not in INDEX_RECORDS:
        raise ValueError(f"index_record: expected one of {', '.join(INDEX_RECORDS)}; got {record!r}")
    if slots is not None:
        _check_slots("index_slots", slots, tokens, device)
    if slots is not None or cache is not None:
        _check_cache("index_cache", cache, INDEX_RECORDS[str(record)], device)
    if top_k is not None:
        checks.tensor("top_k", top_k, (torch.int32,), (None, None), device)
        assert isinstance(top_k, Tensor)
        if top_k.shape[0] < tokens or top_k.shape[1] < 1:
            raise ValueError(f"top_k: expected at least {tokens} rows of at least 1; got {list(top_k.shape)}")
        checks.rows("top_k", top_k)
    return _check_index_rope(pairing, index_rope_table, rope_table, device)


def _record(name: str, rope_dim: int) -> Record:
    if name not in RECORDS:
        raise ValueError(f"record: expected one of {', '.join(RECORDS)}; got {name!r}")
    if rope_dim:
        return RECORDS[name]
    if name not in NO_ROPE_RECORDS:
        raise ValueError(f"record: expected {' or '.join(NO_ROPE_RECORDS)} for a k_pe without dims; got {name!r}")
    return NO_ROPE_RECORDS[name]


# -- registered ops -----------------------------------------------------------------------------------------


def query_path(*, copies: bool, quantises: bool) -> str:
    """Which kernel path a query takes: the key of its launch configuration."""
    if not copies:
        return "dsa_query"
    return "dsa_query_e4m3" if quantises else "dsa_query_copy"


def _query_impl(
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
    rope_output: Pairing,
    index_pairing: Pairing,
    softmax_scale: float,
    head_scale: float,
) -> None:
    for name, tensor in (
        ("q_pe", q_pe),
        ("latent", latent),
        ("rope_table", rope_table),
        ("index_query", index_query),
        ("index_rope_table", index_rope_table),
        ("out", out),
    ):
        if tensor is not None:
            checks.aligned(name, tensor)
    if out is not None:
        checks.disjoint("out", out, "q_pe", q_pe)
        if latent is not None and _in_place(latent, out):
            latent = None
    arguments = (
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
    )
    options: dict[str, Any] = {
        "rope_output": rope_output,
        "index_pairing": index_pairing,
        "softmax_scale": softmax_scale,
        "head_scale": head_scale,
    }
    if not use_kernels(q_pe):
        reference.query(*arguments, **options)
        return
    from .kernels import dsa as kernels

    path = query_path(copies=latent is not None, quantises=query_scale is not None)
    config = policy.launch_config(q_pe.device.index, path, q_pe.shape[0])
    kernels.launch_query(*arguments, **options, config=config).run(q_pe.device)


def _in_place(latent: Tensor, out: Tensor) -> bool:
    """Whether ``latent`` is the front of ``out``; any other overlap is an error."""
    tokens, heads, _ = latent.shape
    if not latent.numel():
        return True
    same_rows = tokens == 1 or latent.stride(0) == out.stride(0)
    same_heads = heads == 1 or latent.stride(1) == out.stride(1)
    if latent.data_ptr() == out.data_ptr() and latent.dtype == out.dtype and same_rows and same_heads:
        return True
    checks.disjoint("out", out, "latent", latent)
    return False


def _absorb_impl(q_nope: Tensor, w_uk: Tensor, query_scale: Tensor | None, out: Tensor) -> None:
    for name, tensor in (("q_nope", q_nope), ("w_uk", w_uk), ("out", out)):
        checks.aligned(name, tensor)
    checks.disjoint("out", out, "q_nope", q_nope)
    if query_scale is None:
        front = out[:, : q_nope.shape[1], :LATENT_DIM]
        torch.bmm(q_nope.transpose(0, 1), w_uk, out=front.transpose(0, 1))
    elif not use_kernels(q_nope):
        reference.absorb_query(q_nope, w_uk, query_scale, out)
    else:
        from .kernels import dsa as kernels

        config = policy.launch_config(q_nope.device.index, "dsa_absorb", q_nope.shape[0])
        kernels.launch_absorb(q_nope, w_uk, query_scale, out, config=config).run(q_nope.device)


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
    for name, tensor in (
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
    ):
        if tensor is not None:
            checks.aligned(name, tensor)
    if out.data_ptr() != q_latent.data_ptr() or out.stride() != q_latent.stride():
        checks.disjoint("out", out, "q_latent", q_latent)
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
    if not use_kernels(q_latent):
        reference.norm_rope_insert(*arguments, **options)
        return
    from .kernels import dsa as kernels

    config = policy.launch_config(q_latent.device.index, "dsa_norm_rope", q_latent.shape[0])
    kernels.launch_norm_rope(*arguments, **options, config=config).run(q_latent.device)


_query = define_op(
    "dsa_query(Tensor q_pe, Tensor? latent, Tensor positions, Tensor? rope_table, Tensor? index_query, "
    "Tensor? index_weights, Tensor? index_rope_table, Tensor? query_scale, Tensor(a!)? out, Tensor(b!)? out_pe, "
    "Tensor(c!)? index_out, Tensor(d!)? weights_out, str rope_output, str index_pairing, float softmax_scale, "
    "float head_scale) -> ()",
    _query_impl,
)
_absorb = define_op(
    "dsa_absorb_query(Tensor q_nope, Tensor w_uk, Tensor? query_scale, Tensor(a!) out) -> ()", _absorb_impl
)
_norm_rope_insert = define_op(
    "dsa_norm_rope_insert(Tensor q_latent, Tensor kv_latent, Tensor k_pe, Tensor(a!)? cache, Tensor? slots, "
    "Tensor positions, Tensor? rope_table, Tensor q_weight, Tensor kv_weight, Tensor? kv_scale, Tensor? index_key, "
    "Tensor? index_weight, Tensor? index_bias, Tensor(b!)? index_cache, Tensor? index_slots, "
    "Tensor? index_rope_table, Tensor(c!)? top_k, Tensor(d!) out, Tensor(e!)? kv_out, Tensor(f!)? k_pe_out, "
    "str record, str index_record, float q_eps, float kv_eps, float index_eps, str rope_output, "
    "str index_pairing) -> ()",
    _norm_rope_insert_impl,
)
