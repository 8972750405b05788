"""``query``: main query and indexer query to what attention reads."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from .. import checks, policy
from ..dispatch import define_op, use_kernels
from ..reference import dsa as reference
from ..reference.numerics import Pairing
from .arguments import (
    INDEX_DIM,
    LATENT_DIM,
    PAIRINGS,
    WEIGHTS,
    check_index_rope,
    check_rotated,
)

QueryForm = Literal["packed", "pair"]
"""What attention reads: one [T, P, 576] tensor, or the absorbed latent and the rotated dims apart."""
FORMS: tuple[QueryForm, ...] = get_args(QueryForm)


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
            be e4m3: cast already, as :func:`absorb_query` leaves it. None with the pair: its latent is not touched.
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
    padded, dtype = _check(
        q_pe,
        latent,
        positions,
        rope_table,
        form,
        padded_heads,
        query_scale,
        rope_output,
        index_query,
        index_weights,
        index_pairing,
        index_rope_table,
        softmax_scale,
        head_scale,
        out,
    )
    tokens, heads, rope_dim = q_pe.shape
    out_pe: Tensor | None = None
    moved = latent
    if form == "packed":
        if out is None:
            out = q_pe.new_empty((tokens, padded, LATENT_DIM + rope_dim), dtype=dtype)
    else:
        out_pe = q_pe.new_empty((tokens, heads, rope_dim), dtype=dtype)
        if latent is None or latent.dtype == dtype:
            moved = None
        else:
            out = q_pe.new_empty((tokens, heads, LATENT_DIM), dtype=dtype)
    index_out = weights_out = None
    if index_query is not None:
        index_out = q_pe.new_empty(index_query.shape, dtype=torch.float8_e4m3fn)
        weights_out = q_pe.new_empty(index_query.shape[:2], dtype=torch.float32)
        index_rope_table = rope_table if index_rope_table is None else index_rope_table
    _query(
        q_pe,
        moved,
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
        rope_output,
        index_pairing or "half_split",
        softmax_scale,
        head_scale,
    )
    return Query(latent if out is None else out, out_pe, index_out, weights_out)


# -- checks -------------------------------------------------------------------------------------------------


@checks.remembered
def _check(
    q_pe: Tensor,
    latent: Tensor | None,
    positions: Tensor,
    rope_table: Tensor | None,
    form: QueryForm,
    padded_heads: int | None,
    query_scale: Tensor | None,
    rope_output: Pairing,
    index_query: Tensor | None,
    index_weights: Tensor | None,
    index_pairing: Pairing | None,
    index_rope_table: Tensor | None,
    softmax_scale: float,
    head_scale: float,
    out: Tensor | None,
) -> tuple[int, torch.dtype]:
    """Heads of the packed result, and the dtype of the main query."""
    checks.tensor("q_pe", q_pe, (torch.bfloat16,), (None, None, None))
    tokens, heads, rope_dim = q_pe.shape
    device = q_pe.device
    if heads < 1:
        raise ValueError("q_pe: expected at least 1 head; got 0")
    check_rotated("q_pe", q_pe, positions, rope_table, tokens, device)
    if query_scale is not None:
        checks.scale("query_scale", query_scale, device)
    checks.word("form", form, FORMS)
    checks.word("rope_output", rope_output, PAIRINGS)
    checks.number("softmax_scale", softmax_scale)
    checks.number("head_scale", head_scale)
    dtype = torch.bfloat16 if query_scale is None else torch.float8_e4m3fn
    if latent is not None:
        dtypes = (torch.bfloat16,) if query_scale is None else (torch.bfloat16, dtype)
        checks.tensor("latent", latent, dtypes, (tokens, heads, LATENT_DIM), device)
        checks.rows("latent", latent)
    _check_index_query(index_query, index_weights, index_pairing, index_rope_table, rope_table, tokens, device)
    padded = heads
    if form == "packed":
        padded = _check_padded(padded_heads, heads)
        if out is None:
            if latent is None:
                raise ValueError("latent: expected a tensor, or out with the latent in its front; got None for both")
        else:
            checks.tensor("out", out, (dtype,), (tokens, padded, LATENT_DIM + rope_dim), device)
            checks.rows("out", out, inner=2)
            checks.apart("out", out)
    elif padded_heads is not None or out is not None:
        name = "out" if padded_heads is None else "padded_heads"
        raise ValueError(f"{name}: expected None for the pair; got a value")
    return padded, dtype


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
) -> None:
    """Check the indexer's half."""
    if index_query is None:
        given = (("index_weights", index_weights), ("index_rope_table", index_rope_table), ("index_pairing", pairing))
        for name, value in given:
            if value is not None:
                raise ValueError(f"{name}: expected None without index_query; got a {type(value).__name__}")
        return
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
    check_index_rope(pairing, index_rope_table, rope_table, device)


# -- registered op ------------------------------------------------------------------------------------------


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
    checks.all_aligned(
        (
            ("q_pe", q_pe),
            ("latent", latent),
            ("rope_table", rope_table),
            ("index_query", index_query),
            ("index_rope_table", index_rope_table),
            ("out", out),
        )
    )
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
    from ..kernels import dsa as kernels

    path = policy.dsa_query_path(copies=latent is not None, quantises=query_scale is not None)
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


_query = define_op(
    "dsa_query(Tensor q_pe, Tensor? latent, Tensor positions, Tensor? rope_table, Tensor? index_query, "
    "Tensor? index_weights, Tensor? index_rope_table, Tensor? query_scale, Tensor(a!)? out, Tensor(b!)? out_pe, "
    "Tensor(c!)? index_out, Tensor(d!)? weights_out, str rope_output, str index_pairing, float softmax_scale, "
    "float head_scale) -> ()",
    _query_impl,
)
