"""Compile ahead of serving: every variant that a deployment can meet, so that no request waits for one.

Warm-up makes the calls of a deployment on one-token tensors, with launches held back, and compiles what they
would have launched: the same code asks for the same variants. Token counts, strides and pointers select
nothing, so one call of each kind is enough.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from . import formats, v4
from .dispatch import INTERPRETED, hold
from .geometry import Geometry
from .policy import Form, Layout

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
    table_dtype: torch.dtype = torch.float32,
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
        dtype, index_dtype, table_dtype: of activations, of slots and positions, of the RoPE table.
        device: where it will run.
        progress: called with (done, total) after each variant.

    Returns:
        How many variants were compiled; 0 where all were there already.

    Raises:
        ValueError: a combination that the ops refuse.
    """
    device = torch.device(device)
    if device.type == "cpu" and not INTERPRETED:
        return 0  # the reference compiles nothing
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    with hold() as launches:
        for call in _v4_calls(
            geometry, record, block_size, layout, padded_heads, dtype, index_dtype, table_dtype, device
        ):
            call()
    compiled = 0
    for done, launch in enumerate(launches, 1):
        compiled += launch.prepare(device)
        if progress is not None:
            progress(done, len(launches))
    return compiled


def _v4_calls(
    geometry: Geometry,
    record_name: str | None,
    block_size: int,
    layout: Layout | None,
    padded_heads: int | None,
    dtype: torch.dtype,
    index_dtype: torch.dtype,
    table_dtype: torch.dtype,
    device: torch.device,
) -> Iterator[Callable[[], object]]:
    name = record_name or geometry.records.window[0]
    record = formats.record(name, 512)
    padded = geometry.padded_heads if padded_heads is None else padded_heads
    layout = layout or ("head_major" if geometry.query_norm else "chunk_interleaved")
    rotates = layout == "head_major"
    pool = torch.empty(record.page_bytes(block_size) + 16, dtype=torch.uint8, device=device)
    one = torch.zeros(1, dtype=index_dtype, device=device)
    scale = torch.ones(1, device=device)
    step: dict[str, Any] = {
        "kv": torch.zeros(1, 512, dtype=dtype, device=device),
        "cache": formats.cache_view(pool, record, block_size=block_size, num_blocks=1),
        "slots": one,
        "positions": one,
        "rope_table": torch.zeros(1, 64, dtype=table_dtype, device=device),
        "record": name,
        "kv_scale": scale if name == "fp8" else None,
    }
    query = torch.zeros(1, geometry.heads, 512, dtype=dtype, device=device)
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
        buffer = torch.zeros(1, padded, 512, dtype=dtype, device=device)
        in_place = {**arguments, "query": buffer[:, : geometry.heads], "out": buffer}
        yield partial(v4.query_kv_insert, **in_place)
    if name == "fp8":
        yield partial(v4.query_kv_insert, **arguments, query_scale_inv=scale)
    yield partial(v4.pad_query, query, padded, layout=layout)
    for weight_dtype in (dtype, torch.float32):
        weight = torch.zeros(512, dtype=weight_dtype, device=device)
        yield partial(v4.kv_insert, **step, norm_weight=weight)
