"""Compile ahead of serving: every variant that a deployment can meet, so that no request waits for one.

Warm-up makes the calls of a deployment with launches held back, and compiles what they would have launched: the
same code asks for the same variants. Strides and pointers select nothing and token counts only between two
launch configurations, so one call of each kind for a small and for a large step is enough. Inputs repeat
one row; outputs are allocated and dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from . import dsa, formats, v4
from .dispatch import hold, interpreting
from .geometry import Geometry
from .policy import SMALL_STEP, Form, Layout
from .reference.numerics import Pairing

Progress = Callable[[int, int], None]


def warmup(
    geometry: Geometry,
    record: str | None = None,
    *,
    block_size: int = 64,
    layout: Layout | None = None,
    padded_heads: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    index_dtype: torch.dtype = torch.int64,
    table_dtype: torch.dtype | None = None,
    norm_dtype: torch.dtype = torch.bfloat16,
    index_record: str = "index_fp8",
    index_block_size: int | None = None,
    index_weights_dtype: torch.dtype = torch.float32,
    rope_output: Pairing = "interleaved",
    device: torch.device | str = "cuda",
    progress: Progress | None = None,
) -> int:
    """Compile the prologue of one layer geometry, as this process will call it.

    Args:
        geometry: the layer, sharded.
        record: the KV record; the geometry's first when None.
        block_size: tokens a page.
        layout: query layout (V4 family); chunk-interleaved for models whose attention rotates, when None.
        padded_heads: heads that attention reads; the geometry's when None.
        dtype: of activations (DSA: bf16).
        index_dtype: of slots and positions.
        table_dtype: of the RoPE table; what engines hand over when None (V4: float32, DSA: bf16).
        norm_dtype: of the norm weights (DSA latents; V4's KV norm is compiled for float32 too).
        index_record: DSA: record of the indexer's cache, with ``index_block_size`` tokens a page (``block_size`` when
            None).
        index_weights_dtype: DSA: of the indexer's head weights.
        rope_output: DSA: order of rotated dims (see :func:`preattn.dsa.query`).
        device: where it will run.
        progress: called with (done, total) after each variant.

    Returns:
        How many variants were compiled; 0 where all were there already.

    Raises:
        ValueError: a combination that the ops refuse.
    """
    device = torch.device(device)
    if device.type == "cpu" and not interpreting():
        return 0  # the reference compiles nothing
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    padded = geometry.padded_heads if padded_heads is None else padded_heads
    with hold() as launches:
        for tokens in (1, SMALL_STEP + 1):
            if geometry.family == "v4":
                table = table_dtype or torch.float32
                calls = _v4_calls(
                    geometry, record, block_size, layout, padded, dtype, index_dtype, table, device, tokens
                )
            else:
                table = table_dtype or torch.bfloat16
                calls = _dsa_calls(
                    geometry,
                    record,
                    block_size,
                    padded,
                    index_dtype,
                    table,
                    norm_dtype,
                    index_record,
                    index_block_size or block_size,
                    index_weights_dtype,
                    rope_output,
                    device,
                    tokens,
                )
            for call in calls:
                call()
    compiled = 0
    for done, launch in enumerate(launches, 1):
        compiled += launch.prepare(device)
        if progress is not None:
            progress(done, len(launches))
    return compiled


def _rows(tokens: int, *shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """One row of zeros that stands for every token."""
    return torch.zeros(1, *shape, dtype=dtype, device=device).expand(tokens, *shape)


def _v4_calls(
    geometry: Geometry,
    record_name: str | None,
    block_size: int,
    layout: Layout | None,
    padded: int,
    dtype: torch.dtype,
    index_dtype: torch.dtype,
    table_dtype: torch.dtype,
    device: torch.device,
    tokens: int,
) -> Iterator[Callable[[], object]]:
    name = record_name or geometry.records.window[0]
    record = formats.record(name, 512)
    layout = layout or ("head_major" if geometry.query_norm else "chunk_interleaved")
    rotates = layout == "head_major"
    pool = torch.empty(record.page_bytes(block_size) + 16, dtype=torch.uint8, device=device)
    index = torch.zeros(tokens, dtype=index_dtype, device=device)
    scale = torch.ones(1, device=device)
    step: dict[str, Any] = {
        "kv": _rows(tokens, 512, dtype=dtype, device=device),
        "cache": formats.cache_view(pool, record, block_size=block_size, num_blocks=1),
        "slots": index,
        "positions": index,
        "rope_table": torch.zeros(1, 64, dtype=table_dtype, device=device),
        "record": name,
        "kv_scale": scale if name == "fp8" else None,
    }
    query = _rows(tokens, geometry.heads, 512, dtype=dtype, device=device)
    arguments = {
        **step,
        "query": query,
        "query_rope": rotates,
        "query_norm_eps": geometry.eps if geometry.query_norm else None,
        "padded_heads": padded,
        "layout": layout,
    }
    for form in (Form.ONE_LAUNCH, Form.TWO_LAUNCHES):
        yield partial(v4.query_kv_insert, **arguments, form=form)
    if rotates:
        buffer = torch.zeros(tokens, padded, 512, dtype=dtype, device=device)
        in_place = {**arguments, "query": buffer[:, : geometry.heads], "out": buffer}
        yield partial(v4.query_kv_insert, **in_place)
        yield partial(v4.query_kv_insert, **arguments, query_scale_inv=scale)
    yield partial(v4.pad_query, query, padded, layout=layout)
    for weight_dtype in (dtype, torch.float32):
        weight = torch.zeros(512, dtype=weight_dtype, device=device)
        yield partial(v4.kv_insert, **step, norm_weight=weight)


def _dsa_calls(
    geometry: Geometry,
    record_name: str | None,
    block_size: int,
    padded: int,
    index_dtype: torch.dtype,
    table_dtype: torch.dtype,
    norm_dtype: torch.dtype,
    index_record: str,
    index_block_size: int,
    index_weights_dtype: torch.dtype,
    rope_output: Pairing,
    device: torch.device,
    tokens: int,
) -> Iterator[Callable[[], object]]:
    """Steps with and without slots, layers with and without an indexer, every form of the query."""
    heads, rope_dim, rank = geometry.heads, geometry.rope.dim, geometry.q_rank
    name = record_name or geometry.records.latent[0]

    def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.zeros(*shape, dtype=dtype, device=device)

    def rows(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return _rows(tokens, *shape, dtype=dtype, device=device)

    def cache(record: formats.Record, page_tokens: int) -> torch.Tensor:
        stride = -(-record.page_bytes(page_tokens) // formats.ALIGNMENT) * formats.ALIGNMENT
        pool = zeros(stride, dtype=torch.uint8)
        return formats.cache_view(pool, record, block_size=page_tokens, num_blocks=1, block_stride=stride)

    index, scale = zeros(tokens, dtype=index_dtype), torch.ones(1, device=device)
    table = zeros(1, 64, dtype=table_dtype)
    step = {"positions": index, "rope_table": table if rope_dim else None, "rope_output": rope_output}
    indexer = geometry.indexer
    index_steps: list[dict[str, Any]] = [{}]
    index_queries: list[dict[str, Any]] = [{}]
    if indexer is not None and indexer.heads and indexer.dim and indexer.rope is not None:
        shared = {"index_pairing": indexer.rope.style, "index_rope_table": table}
        index_steps[:0] = [
            {
                **shared,
                "index_key": rows(indexer.dim),
                "index_weight": zeros(indexer.dim, dtype=torch.float32),
                "index_bias": zeros(indexer.dim, dtype=torch.float32),
                "index_record": index_record,
                "index_cache": cache(formats.record(index_record), index_block_size),
                "top_k": zeros(tokens, indexer.top_k or 2048, dtype=torch.int32),
            }
        ]
        index_queries[:0] = [
            {
                **shared,
                "index_query": rows(indexer.heads, indexer.dim),
                "index_weights": rows(indexer.heads, dtype=index_weights_dtype),
            }
        ]

    norms: dict[str, Any] = {
        **step,
        "q_latent": rows(rank),
        "kv_latent": rows(512),
        "k_pe": rows(rope_dim),
        "record": name,
        "q_weight": zeros(rank, dtype=norm_dtype),
        "kv_weight": zeros(512, dtype=norm_dtype),
        "kv_scale": scale if name == "fp8" else None,
    }
    kv_cache = cache(formats.record(name, 512 + rope_dim), block_size)
    for indexed in index_steps:
        for stored in ({"cache": kv_cache, "slots": index}, {"cache": None, "slots": None}):
            caches = indexed if stored["slots"] is not None else {**indexed, "index_cache": None}
            for return_kv in (False, True):
                yield partial(dsa.norm_rope_insert, **norms, **stored, **caches, return_kv=return_kv)

    q_pe, latent = rows(heads, rope_dim), rows(heads, 512)
    for indexed in index_queries:
        main = {**step, **indexed, "q_pe": q_pe}
        for query_scale in (None, scale):
            dtype = torch.bfloat16 if query_scale is None else torch.float8_e4m3fn
            packed = zeros(tokens, padded, 512 + rope_dim, dtype=dtype)
            yield partial(dsa.query, **main, latent=None, out=packed, padded_heads=padded, query_scale=query_scale)
            yield partial(dsa.query, **main, latent=latent, padded_heads=padded, query_scale=query_scale)
            yield partial(dsa.query, **main, latent=latent, query_scale=query_scale)
            yield partial(dsa.query, **main, latent=latent, form="pair", query_scale=query_scale)
    q_nope, w_uk = rows(heads, geometry.nope_dim), zeros(heads, geometry.nope_dim, 512)
    out = zeros(tokens, padded, 512 + rope_dim, dtype=torch.float8_e4m3fn)
    yield partial(dsa.absorb_query, q_nope, w_uk, query_scale=scale, out=out)
