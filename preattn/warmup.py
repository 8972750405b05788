"""Compile ahead of serving: every variant that a deployment can meet, so that no request waits for one.

Warm-up makes the calls of a deployment with launches held back, and compiles what they would have launched: the
same code asks for the same variants. Strides and pointers select nothing and token counts only between two
launch configurations, so one call of each kind for a small and for a large step is enough. Inputs repeat
one row; outputs are allocated and dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, get_args

import torch

from . import checks, dsa, formats, v4
from .dispatch import hold, interpreting
from .dsa.arguments import PAIRINGS, WEIGHTS
from .geometry import Geometry
from .policy import LAYOUTS, STEP_SIZES, Form, Layout, WeightKind
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
    positions_dtype: torch.dtype | None = None,
    table_dtype: torch.dtype | None = None,
    norm_dtype: torch.dtype = torch.bfloat16,
    index_norm_dtype: torch.dtype = torch.float32,
    index_record: str = "index_fp8",
    index_block_size: int | None = None,
    index_weights_dtype: torch.dtype = torch.float32,
    rope_output: Pairing = "interleaved",
    weight: WeightKind | None = None,
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
        index_dtype: of slots; of positions too where ``positions_dtype`` is None.
        positions_dtype: of positions.
        table_dtype: of the RoPE table; what engines hand over when None (V4: float32, DSA: bf16).
        norm_dtype: of the norm weights (DSA latents; V4's KV norm is compiled for float32 too).
        index_norm_dtype: DSA: of the indexer's LayerNorm weight and bias.
        index_record: DSA: record of the indexer's cache, with ``index_block_size`` tokens a page (``block_size`` when
            None).
        index_weights_dtype: DSA: of the indexer's head weights.
        rope_output: DSA: order of rotated dims (see :func:`preattn.dsa.query`).
        weight: V4: what ``wq_b`` is made of, where it is projected into a workspace; None: it is not.
        device: where it will run.
        progress: called with (done, total) after each variant.

    Returns:
        How many variants were compiled; 0 where all were there already.

    Raises:
        TypeError: an argument of another type, or a dtype that no op takes.
        ValueError: an unknown word, a combination that the ops refuse, or no record for a geometry that names none.
    """
    checks.instance("geometry", geometry, Geometry)
    v4_family = geometry.family == "v4"
    for name, count, least in (
        ("block_size", block_size, 1),
        ("index_block_size", index_block_size, 1),
        ("padded_heads", padded_heads, geometry.heads),
    ):
        if count is not None:
            checks.integer(name, count, least=least)
    norms = (*v4.ACTIVATIONS, torch.float32) if v4_family else WEIGHTS
    for name, given, choices in (
        ("dtype", dtype, v4.ACTIVATIONS if v4_family else (torch.bfloat16,)),
        ("index_dtype", index_dtype, checks.INDEX_DTYPES),
        ("positions_dtype", positions_dtype or index_dtype, checks.INDEX_DTYPES),
        ("table_dtype", table_dtype or torch.float32, checks.TABLE_DTYPES),
        ("norm_dtype", norm_dtype, norms),
        ("index_norm_dtype", index_norm_dtype, WEIGHTS),
        ("index_weights_dtype", index_weights_dtype, WEIGHTS),
    ):
        checks.dtype(name, given, choices)
    records: tuple[str, ...] = tuple(
        v4.RECORDS if v4_family else dsa.RECORDS if geometry.rope.dim else dsa.NO_ROPE_RECORDS
    )
    for name, word, words in (
        ("record", record, records),
        ("layout", layout, LAYOUTS),
        ("index_record", index_record, tuple(dsa.INDEX_RECORDS)),
        ("rope_output", rope_output, PAIRINGS),
        ("weight", weight, get_args(WeightKind)),
    ):
        if word is not None:
            checks.word(name, word, words)
    if progress is not None and not callable(progress):
        raise TypeError(f"progress: expected a function or None; got {type(progress).__name__}")
    device = checks.device("device", device)
    if device.type == "cpu" and not interpreting():
        return 0  # the reference compiles nothing
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    names = geometry.records.window if v4_family else geometry.records.latent
    if record is None and not names:
        raise ValueError(f"record: expected a name, since the geometry of {geometry.name} names none; got None")
    deployment = _Deployment(
        geometry=geometry,
        record=record or names[0],
        block_size=block_size,
        layout=layout or ("head_major" if geometry.query_norm else "chunk_interleaved"),
        padded_heads=geometry.padded_heads if padded_heads is None else padded_heads,
        dtype=dtype,
        slots_dtype=index_dtype,
        positions_dtype=positions_dtype or index_dtype,
        table_dtype=table_dtype or (torch.float32 if v4_family else torch.bfloat16),
        norm_dtype=norm_dtype,
        index_norm_dtype=index_norm_dtype,
        index_record=index_record,
        index_block_size=index_block_size or block_size,
        index_weights_dtype=index_weights_dtype,
        rope_output=rope_output,
        weight=weight,
        device=device,
    )
    with hold() as launches:
        for tokens in STEP_SIZES:
            for call in _v4_calls(deployment, tokens) if v4_family else _dsa_calls(deployment, tokens):
                call()
    compiled = 0
    for done, launch in enumerate(launches, 1):
        compiled += launch.prepare(device)
        if progress is not None:
            progress(done, len(launches))
    return compiled


@dataclass(frozen=True)
class _Deployment:
    """The arguments of :func:`warmup`, settled."""

    geometry: Geometry
    record: str
    block_size: int
    layout: Layout
    padded_heads: int
    dtype: torch.dtype
    slots_dtype: torch.dtype
    positions_dtype: torch.dtype
    table_dtype: torch.dtype
    norm_dtype: torch.dtype
    index_norm_dtype: torch.dtype
    index_record: str
    index_block_size: int
    index_weights_dtype: torch.dtype
    rope_output: Pairing
    weight: WeightKind | None
    device: torch.device

    def zeros(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Zeros on the device."""
        return torch.zeros(*shape, dtype=dtype, device=self.device)

    def rows(self, tokens: int, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """One row of zeros that stands for every token."""
        return self.zeros(1, *shape, dtype=dtype).expand(tokens, *shape)

    def cache(self, record: formats.Record, block_size: int) -> torch.Tensor:
        """A cache of one page."""
        stride = -(-record.page_bytes(block_size) // formats.ALIGNMENT) * formats.ALIGNMENT
        pool = self.zeros(stride, dtype=torch.uint8)
        return formats.cache_view(pool, record, block_size=block_size, num_blocks=1, block_stride=stride)


def _v4_calls(d: _Deployment, tokens: int) -> Iterator[Callable[[], object]]:
    """Both forms, in place and fresh, bf16 and e4m3 queries, the copy alone, the KV half with a norm."""
    heads, padded = d.geometry.heads, d.padded_heads
    rotates = d.layout == "head_major"
    scale = torch.ones(1, device=d.device)
    step: dict[str, Any] = {
        "kv": d.rows(tokens, 512, dtype=d.dtype),
        "cache": d.cache(formats.record(d.record, 512), d.block_size),
        "slots": d.zeros(tokens, dtype=d.slots_dtype),
        "positions": d.zeros(tokens, dtype=d.positions_dtype),
        "rope_table": d.zeros(1, 64, dtype=d.table_dtype),
        "record": d.record,
        "kv_scale": scale if d.record == "fp8" else None,
    }
    query = d.rows(tokens, heads, 512, dtype=d.dtype)
    arguments = {
        **step,
        "query": query,
        "query_rope": rotates,
        "query_norm_eps": d.geometry.eps if d.geometry.query_norm else None,
        "padded_heads": padded,
        "layout": d.layout,
    }
    for form in (Form.ONE_LAUNCH, Form.TWO_LAUNCHES):
        yield partial(v4.query_kv_insert, **arguments, form=form)
    if rotates:
        buffer = d.zeros(tokens, padded, 512, dtype=d.dtype)
        in_place = {**arguments, "query": buffer[:, :heads], "out": buffer}
        yield partial(v4.query_kv_insert, **in_place)
        yield partial(v4.query_kv_insert, **arguments, query_scale_inv=scale)
    yield partial(v4.pad_query, query, padded, layout=d.layout)
    yield from _projections(d, tokens, step)
    for weight_dtype in (d.dtype, torch.float32):
        yield partial(v4.kv_insert, **step, norm_weight=d.zeros(512, dtype=weight_dtype))


def _projections(d: _Deployment, tokens: int, step: dict[str, Any]) -> Iterator[Callable[[], object]]:
    """Projections into a workspace as the plan chooses them, with every form of scales; none of an unknown rank."""
    rank, rows = d.geometry.q_rank, d.geometry.heads * 512
    if d.weight is None or not rank:
        return
    dtype = torch.bfloat16 if d.weight == "bf16" else torch.float8_e4m3fn
    scales: list[dict[str, Any]] = [{}]
    if d.weight != "bf16":
        down, kind = (rank // 128, torch.float32) if d.weight == "e4m3" else (rank // 32, torch.uint8)
        weight_scale = d.zeros(rows // 128 if d.weight == "e4m3" else rows, down, dtype=kind)
        groups = d.zeros(rank // 128, tokens, dtype=torch.float32).t()
        scales = [{"x_scale": x_scale, "weight_scale": weight_scale} for x_scale in (groups, groups[:, 0])]
    rotates = d.layout == "head_major"
    arguments = {
        **step,
        "x": d.zeros(tokens, rank, dtype=dtype),  # rows of their own: the copy engine takes no others
        "weight": d.zeros(rows, rank, dtype=dtype),
        "layout": d.layout,
        "out": d.zeros(tokens, d.padded_heads, 512, dtype=torch.bfloat16),
        "query_rope": rotates,
        "query_norm_eps": d.geometry.eps if d.geometry.query_norm else None,
    }
    alone = {name: arguments[name] for name in ("x", "weight", "layout", "out")}
    for given in scales:
        yield partial(v4.project_query_kv_insert, **arguments, **given)
        yield partial(v4.project_query, **alone, **given)


def _dsa_calls(d: _Deployment, tokens: int) -> Iterator[Callable[[], object]]:
    """Steps with and without slots, layers with and without an indexer, every form of the query."""
    heads, rope_dim, rank = d.geometry.heads, d.geometry.rope.dim, d.geometry.q_rank

    def rows(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return d.rows(tokens, *shape, dtype=dtype)

    slots, scale = d.zeros(tokens, dtype=d.slots_dtype), torch.ones(1, device=d.device)
    table = d.zeros(1, 64, dtype=d.table_dtype)
    step = {
        "positions": d.zeros(tokens, dtype=d.positions_dtype),
        "rope_table": table if rope_dim else None,
        "rope_output": d.rope_output,
    }
    indexer = d.geometry.indexer
    index_steps: list[dict[str, Any]] = [{}]
    index_queries: list[dict[str, Any]] = [{}]
    if indexer is not None and indexer.heads and indexer.dim and indexer.rope is not None:
        shared = {"index_pairing": indexer.rope.style, "index_rope_table": table}
        index_steps[:0] = [
            {
                **shared,
                "index_key": rows(indexer.dim),
                "index_weight": d.zeros(indexer.dim, dtype=d.index_norm_dtype),
                "index_bias": d.zeros(indexer.dim, dtype=d.index_norm_dtype),
                "index_record": d.index_record,
                "index_cache": d.cache(formats.record(d.index_record), d.index_block_size),
                "top_k": d.zeros(tokens, indexer.top_k or 2048, dtype=torch.int32),
            }
        ]
        index_queries[:0] = [
            {
                **shared,
                "index_query": rows(indexer.heads, indexer.dim),
                "index_weights": rows(indexer.heads, dtype=d.index_weights_dtype),
            }
        ]

    norms: dict[str, Any] = {
        **step,
        "q_latent": rows(rank),
        "kv_latent": rows(512),
        "k_pe": rows(rope_dim),
        "record": d.record,
        "q_weight": d.zeros(rank, dtype=d.norm_dtype),
        "kv_weight": d.zeros(512, dtype=d.norm_dtype),
        "kv_scale": scale if d.record == "fp8" else None,
    }
    kv_cache = d.cache(formats.record(d.record, 512 + rope_dim), d.block_size)
    for indexed in index_steps:
        for stored in ({"cache": kv_cache, "slots": slots}, {"cache": None, "slots": None}):
            caches = indexed if stored["slots"] is not None else {**indexed, "index_cache": None}
            for return_kv in (False, True):
                yield partial(dsa.norm_rope_insert, **norms, **stored, **caches, return_kv=return_kv)
    if "top_k" in index_steps[0]:  # an engine may fill its buffer by other means
        yield partial(dsa.norm_rope_insert, **norms, cache=kv_cache, slots=slots, **{**index_steps[0], "top_k": None})

    q_pe, latent = rows(heads, rope_dim), rows(heads, 512)
    for indexed in index_queries:
        main = {**step, **indexed, "q_pe": q_pe}
        for query_scale in (None, scale):
            dtype = torch.bfloat16 if query_scale is None else torch.float8_e4m3fn
            packed = d.zeros(tokens, d.padded_heads, 512 + rope_dim, dtype=dtype)
            yield partial(
                dsa.query, **main, latent=None, out=packed, padded_heads=d.padded_heads, query_scale=query_scale
            )
            yield partial(dsa.query, **main, latent=latent, padded_heads=d.padded_heads, query_scale=query_scale)
            yield partial(dsa.query, **main, latent=latent, query_scale=query_scale)
            yield partial(dsa.query, **main, latent=latent, form="pair", query_scale=query_scale)
    q_nope, w_uk = rows(heads, d.geometry.nope_dim), d.zeros(heads, d.geometry.nope_dim, 512, dtype=torch.bfloat16)
    out = d.zeros(tokens, d.padded_heads, 512 + rope_dim, dtype=torch.float8_e4m3fn)
    yield partial(dsa.absorb_query, q_nope, w_uk, query_scale=scale, out=out)
