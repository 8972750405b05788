"""Weight permutations of the V4 family's mega attention, done once at load.

Attention reads queries chunk-interleaved: chunk ``c`` of a token holds dims ``16c..16c+15`` of every head. The rows of
``wq_b`` are permuted so that the projection's output is in that order already:
``fused[(d // 16) * (H * 16) + h * 16 + d % 16] = standard[h * 512 + d]``. Attention's output comes in chunks of 32
dims interleaved over the 8 heads of an output group, and the columns of ``wo_a`` are permuted to match:
``fused[(c * 8 + h) * 32 + j] = standard[h * 512 + c * 32 + j]``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import checks

HEAD_DIM = 512
QUERY_CHUNK = 16
OUTPUT_CHUNK = 32
GROUP_HEADS = 8


def _interleave(rows: Tensor, heads: int, chunk: int, head_dim: int) -> Tensor:
    """[heads * head_dim, ...] from head-major to chunk-major order."""
    permuted: Tensor = rows.unflatten(0, (heads, head_dim // chunk, chunk)).transpose(0, 1).flatten(0, 2)
    return permuted.contiguous()


def _deinterleave(rows: Tensor, heads: int, chunk: int, head_dim: int) -> Tensor:
    permuted: Tensor = rows.unflatten(0, (head_dim // chunk, heads, chunk)).transpose(0, 1).flatten(0, 2)
    return permuted.contiguous()


def _heads(name: str, tensor: Tensor, head_dim: int) -> int:
    _check_dims(name, tensor, 1)
    rows = tensor.shape[0]
    if rows < head_dim or rows % head_dim:
        raise ValueError(f"{name}: expected a positive multiple of {head_dim} rows, {head_dim} a head; got {rows}")
    return rows // head_dim


def _check_dims(name: str, tensor: object, least: int) -> None:
    checks.instance(name, tensor, Tensor)
    assert isinstance(tensor, Tensor)
    if tensor.dim() < least:
        raise ValueError(f"{name}: expected at least {least} dim(s); got shape {list(tensor.shape)}")


def interleave_query_rows(weight: Tensor) -> Tensor:
    """Permute ``wq_b`` for a chunk-interleaved query: [H * 512, rank] -> the same shape; any dtype.

    A bias [H * 512], or scales of one row each (MX: [H * 512, rank / 32] UE8M0), permute in the same way.

    Raises:
        TypeError: no tensor.
        ValueError: the rows are not whole heads.
    """
    return _interleave(weight, _heads("weight", weight, HEAD_DIM), QUERY_CHUNK, HEAD_DIM)


def deinterleave_query_rows(weight: Tensor) -> Tensor:
    """The inverse of :func:`interleave_query_rows`."""
    return _deinterleave(weight, _heads("weight", weight, HEAD_DIM), QUERY_CHUNK, HEAD_DIM)


def interleave_query_scales(scales: Tensor) -> Tensor:
    """Permute the 128 x 128 block scales of ``wq_b``: [H * 4, rank / 128] -> [H * 32, rank / 128].

    A block of 128 rows comes apart into eight chunks of 16, so the result has one scale for 16 rows of the permuted
    weight.

    Raises:
        ValueError: the rows are not the four blocks of whole heads.
    """
    heads = _heads("scales", scales, HEAD_DIM // 128)
    chunks = scales.repeat_interleave(128 // QUERY_CHUNK, 0)
    return _interleave(chunks, heads, 1, HEAD_DIM // QUERY_CHUNK)


def interleave_output_columns(weight: Tensor) -> Tensor:
    """Permute ``wo_a`` of one output group for mega attention's output: [out, 8 * 512] -> the same shape; any dtype.

    Raises:
        ValueError: the columns are not the eight heads of a group.
    """
    _check_group(weight)
    return _interleave(weight.movedim(-1, 0), GROUP_HEADS, OUTPUT_CHUNK, HEAD_DIM).movedim(0, -1).contiguous()


def deinterleave_output_columns(weight: Tensor) -> Tensor:
    """The inverse of :func:`interleave_output_columns`."""
    _check_group(weight)
    return _deinterleave(weight.movedim(-1, 0), GROUP_HEADS, OUTPUT_CHUNK, HEAD_DIM).movedim(0, -1).contiguous()


def interleave_output_scales(scales: Tensor) -> Tensor:
    """Permute the 128 x 128 block scales of one group's ``wo_a``: [out / 128, 32] -> [out / 128, 128].

    The result has one scale for 32 columns of the permuted weight.

    Raises:
        ValueError: the columns are not the blocks of a group's eight heads.
    """
    _check_dims("scales", scales, 1)
    blocks = GROUP_HEADS * HEAD_DIM // 128
    if scales.shape[-1] != blocks:
        raise ValueError(f"scales: expected {blocks} columns, four blocks of each of 8 heads; got {scales.shape[-1]}")
    chunks = scales.repeat_interleave(128 // OUTPUT_CHUNK, -1).movedim(-1, 0)
    return _interleave(chunks, GROUP_HEADS, 1, HEAD_DIM // OUTPUT_CHUNK).movedim(0, -1).contiguous()


def _check_group(weight: Tensor) -> None:
    _check_dims("weight", weight, 1)
    if weight.shape[-1] != GROUP_HEADS * HEAD_DIM:
        raise ValueError(f"weight: expected {GROUP_HEADS * HEAD_DIM} columns, 8 heads of 512; got {weight.shape[-1]}")


def query_chunks(weight: Tensor) -> Tensor:
    """A permuted ``wq_b`` as the 32 matrices of a batched projection: [H * 512, rank] -> a view [32, H * 16, rank]."""
    _heads("weight", weight, HEAD_DIM)
    chunks: Tensor = weight.unflatten(0, (HEAD_DIM // QUERY_CHUNK, -1))
    return chunks


def as_chunks(query: Tensor) -> Tensor:
    """A chunk-interleaved query [T, P, 512] as attention reads it: a view [T, 32, P, 16].

    Raises:
        ValueError: heads and dims are not contiguous.
    """
    checks.instance("query", query, Tensor)
    if query.dim() != 3 or query.shape[2] != HEAD_DIM or query.stride()[1:] != (HEAD_DIM, 1):
        raise ValueError(f"query: expected [T, P, 512] with heads and dims contiguous; got strides {query.stride()}")
    tokens, heads, _ = query.shape
    chunks = HEAD_DIM // QUERY_CHUNK
    return torch.as_strided(
        query, (tokens, chunks, heads, QUERY_CHUNK), (query.stride(0), heads * QUERY_CHUNK, QUERY_CHUNK, 1)
    )


def padding_heads(query: Tensor, heads: int, *, interleaved: bool) -> Tensor:
    """What of a query [T, P, dims] is behind the first ``heads`` heads: a view [T, P - heads, dims].

    ``interleaved``: of a chunk-interleaved query; a view [T, 32, P - heads, 16].

    Raises:
        ValueError: as :func:`as_chunks`.
    """
    return as_chunks(query)[:, :, heads:] if interleaved else query[:, heads:]
