"""What to run for a step, and why: plans, launch configurations, bytes moved.

Nothing here touches a GPU or imports Triton. Measured values live in ``configs/<device>.json``; a device
without a file gets the defaults, and its plans say that they are not measured.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from importlib import resources
from typing import Any, Literal

from .backends import Agreement, negotiate
from .formats import Record
from .formats import record as find_record
from .geometry import Geometry

Layout = Literal["head_major", "chunk_interleaved"]
LAYOUTS: tuple[Layout, ...] = ("head_major", "chunk_interleaved")


@dataclass(frozen=True)
class LaunchConfig:
    """The shape of a launch. It changes speed and never bits: every candidate in ``tests`` gives the same bytes.

    All three are powers of two.

    Attributes:
        rows: query rows a program: (token, head) rows; for chunk-interleaved queries (token, chunk) rows of 64
            heads' width; query latents (DSA norms); tokens (DSA absorption).
        tokens: the other half's: KV tokens; (token, head) rows of the indexer (DSA query); latent dims at a
            time (DSA absorption).
        num_warps: warps a program.
    """

    rows: int = 4
    tokens: int = 4
    num_warps: int = 4


class Form(StrEnum):
    """How the query and KV halves of a V4 prologue are launched."""

    ONE_LAUNCH = "one_launch"
    TWO_LAUNCHES = "two_launches"
    KV_ONLY = "kv_only"


FORMS = tuple([form.value for form in Form])


@dataclass(frozen=True)
class Device:
    """What is known of a GPU: copy rate in GB/s (read + written) and the measured launch configurations."""

    name: str
    measured: bool = False
    copy_gbps: float | None = None
    launch: dict[str, LaunchConfig] = field(default_factory=dict)

    def config(self, path: str, tokens: int) -> LaunchConfig:
        """Launch configuration of a kernel path for a step of so many tokens; what is not measured is as on an H200."""
        keys = (f"{path}_small", path) if tokens <= SMALL_STEP else (path,)
        for known in (self.launch, device(DEFAULT_DEVICE).launch):
            for key in keys:
                if key in known:
                    return known[key]
        raise KeyError(path)


DEFAULT_DEVICE = "NVIDIA H200"
"""The device whose launch configurations serve where there are none."""

SMALL_STEP = 512
"""Tokens up to which a path's ``_small`` configuration holds: latency counts there, not bandwidth."""


def slug(name: str) -> str:
    """File name of a device: ``NVIDIA H200`` -> ``nvidia-h200``."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


@lru_cache
def device(name: str) -> Device:
    """The device's committed measurements, or defaults where there are none."""
    path = resources.files(__package__).joinpath("configs", slug(name) + ".json")
    if not path.is_file():
        return Device(name)
    data: dict[str, Any] = json.loads(path.read_text())
    launch = {kernel: LaunchConfig(**shape) for kernel, shape in data["launch"].items()}
    return Device(name, measured=True, copy_gbps=data["copy_gbps"], launch=launch)


@lru_cache
def _cuda_device(index: int | None) -> Device:
    if index is None:
        return Device("cpu")
    import torch

    return device(torch.cuda.get_device_name(index))


_assumed: ContextVar[Device | None] = ContextVar("preattn_device", default=None)


@contextmanager
def assume(device: Device) -> Iterator[None]:
    """Within this context, in this thread, launch as on ``device`` (tuning tries candidates this way)."""
    token = _assumed.set(device)
    try:
        yield
    finally:
        _assumed.reset(token)


def launch_config(index: int | None, path: str, tokens: int) -> LaunchConfig:
    """Launch configuration of a kernel path on a CUDA device index (None: the CPU), for so many tokens."""
    return (_assumed.get() or _cuda_device(index)).config(path, tokens)


def v4_query_path(*, interleaved: bool, norm: bool, in_place: bool) -> str:
    """Which kernel path a V4 query takes: the key of its launch configuration."""
    if in_place and not norm:
        return "in_place"
    if interleaved:
        return "copy"
    return "norm_rows" if norm else "rows"


def dsa_query_path(*, copies: bool, quantises: bool) -> str:
    """The same for a DSA query; ``copies``: the latent has to move to the front of the output."""
    if not copies:
        return "dsa_query"
    return "dsa_query_e4m3" if quantises else "dsa_query_copy"


@dataclass(frozen=True)
class Plan:
    """What a step will run.

    Attributes:
        form: the launches of a V4 prologue, of the query half of a DSA one.
        absorb: DSA: how ``W_UK`` is absorbed, by ``torch.bmm`` or by the kernel that casts to e4m3 as it multiplies.
        agreement: what is handed to attention, and who reads it.
        reason: why this form, in a sentence.
        tokens: tokens of the step.
        bytes: bytes each part moves, read and written, each counted once.
        expected_us: time at the device's measured copy rate, None where that is not known.
    """

    form: Form
    agreement: Agreement
    reason: str
    tokens: int
    bytes: dict[str, int]
    expected_us: float | None
    absorb: Literal["bmm", "kernel"] | None = None

    @property
    def total_bytes(self) -> int:
        """Bytes the step moves."""
        return sum(self.bytes.values())


def v4_bytes(
    tokens: int,
    heads: int,
    padded_heads: int,
    record: Record,
    *,
    in_place: bool = False,
    fp8_query: bool = False,
) -> dict[str, int]:
    """Bytes that a V4 prologue moves for ``tokens`` tokens, each counted once.

    Activations of 2 bytes, an e4m3 query of 1; float32 RoPE table; int64 slots and positions. ``in_place`` counts
    the rotated dims alone.
    """
    row = 2 * 64 if in_place else 2 * 512
    written = heads if in_place else padded_heads
    return {
        "query read": tokens * (row * heads if padded_heads else 0),
        "query written": tokens * row * written // (2 if fp8_query else 1),
        "latent read": tokens * 2 * 512,
        "record written": tokens * record.bytes,
        "RoPE table, slots, positions": tokens * (64 * 4 + 16),
    }


def dsa_query_bytes(
    tokens: int,
    heads: int,
    *,
    index_heads: int = 0,
    padded_heads: int | None = None,
    copies: bool = False,
    fp8_query: bool = False,
    rope_dim: int = 64,
    table_bytes: int = 4,
) -> dict[str, int]:
    """Bytes that :func:`preattn.dsa.query` moves for ``tokens`` tokens, each counted once.

    ``copies``: the latent has to move to the front of the output, and padding heads are zeroed.
    """
    read, written = (512 if copies else 0) + rope_dim, 1 if fp8_query else 2
    padding = (heads if padded_heads is None else padded_heads) - heads if copies else 0
    return {
        "query read": tokens * heads * 2 * read,
        "query written": tokens * written * (heads * read + padding * (512 + rope_dim)),
        "indexer query read": tokens * index_heads * 2 * 128,
        "indexer query written": tokens * index_heads * 128,
        "indexer weights": tokens * index_heads * 8,
        "RoPE table, positions": tokens * (64 * table_bytes + 8),
    }


def dsa_norm_rope_bytes(
    tokens: int,
    rank: int,
    record: Record | None,
    *,
    index_record: Record | None = None,
    top_k: int = 0,
    rope_dim: int = 64,
    return_kv: bool = False,
    table_bytes: int = 4,
) -> dict[str, int]:
    """Bytes that :func:`preattn.dsa.norm_rope_insert` moves for ``tokens`` tokens, each counted once."""
    kv = 2 * (512 + rope_dim)
    return {
        "query latent": tokens * 4 * rank,
        "KV latent, key read": tokens * kv if record or return_kv else 0,
        "record written": tokens * record.bytes if record else 0,
        "KV latent, key returned": tokens * kv if return_kv else 0,
        "indexer key read": tokens * 2 * 128 if index_record else 0,
        "indexer record written": tokens * index_record.bytes if index_record else 0,
        "top-k buffer": tokens * 4 * top_k,
        "RoPE table, slots, positions": tokens * (64 * table_bytes + 16),
    }


def choose(
    geometry: Geometry,
    *,
    tokens: int,
    backend: str | None = None,
    record: str | None = None,
    device_name: str = DEFAULT_DEVICE,
    captured: bool = False,
) -> Plan:
    """Choose what a step of one layer's prologue runs.

    Args:
        geometry: the layer, sharded (:meth:`~preattn.geometry.Geometry.shard`).
        tokens: tokens of the step.
        backend: who reads the result (:mod:`preattn.backends`); the model's usual one when None.
        record: the KV record; the first that model and backend share when None.
        device_name: as ``torch.cuda.get_device_name`` says it.
        captured: the step runs inside a CUDA graph.

    Raises:
        ValueError: model, backend and record do not fit, or ``tokens`` is negative.
    """
    if tokens < 0:
        raise ValueError(f"tokens: expected at least 0; got {tokens}")
    agreed = negotiate(geometry, backend or usual_backend(geometry), record=record)
    found = device(device_name)
    absorb: Literal["bmm", "kernel"] | None = None
    if geometry.family == "v4":
        form, reason, moved = _choose_v4(geometry, agreed, tokens, found, captured)
    else:
        fp8 = agreed.query_dtype == "e4m3"
        absorb = "kernel" if fp8 and found.measured and tokens >= ABSORB_KERNEL_TOKENS else "bmm"
        form, (reason, moved) = Form.ONE_LAUNCH, _choose_dsa(geometry, agreed, tokens, absorb)
        if not found.measured:
            reason += "; this device is not measured"
    rate = found.copy_gbps
    expected = sum(moved.values()) / rate / 1e3 if rate else None
    return Plan(form, agreed, reason, tokens, moved, expected, absorb)


def usual_backend(geometry: Geometry) -> str:
    """The backend that a model's own serving code uses."""
    if geometry.family == "dsa":
        return "flashmla-sparse" if geometry.rope.dim else "flashinfer-sparse-trtllm"
    return "flashmla-v4" if geometry.query_norm else "flashmla-mega"


def _choose_v4(
    geometry: Geometry, agreed: Agreement, tokens: int, found: Device, captured: bool
) -> tuple[Form, str, dict[str, int]]:
    padded, kv_record = agreed.padded_heads, find_record(agreed.record)
    if padded == geometry.heads and not (agreed.norms or agreed.rotates):
        reason = f"attention takes {padded} heads as they are and rotates them itself: the query is left alone"
        return Form.KV_ONLY, reason, v4_bytes(tokens, geometry.heads, 0, kv_record)
    if not found.measured:
        reason = "one launch by default: this device is not measured"
    elif captured:
        reason = "in a graph, one launch is the fastest form measured at every token count"
    else:
        reason = "one launch is the fastest form measured at every token count, and costs the host a launch less"
    return Form.ONE_LAUNCH, reason, v4_bytes(tokens, geometry.heads, padded, kv_record)


ABSORB_KERNEL_TOKENS = 1024
"""Tokens from which :func:`preattn.dsa.absorb_query`'s e4m3 kernel was measured (H200, 16 to 128 heads) faster than
``torch.bmm`` and the cast of :func:`preattn.dsa.query`; below, it was not measured."""


def _choose_dsa(
    geometry: Geometry, agreed: Agreement, tokens: int, absorb: Literal["bmm", "kernel"]
) -> tuple[str, dict[str, int]]:
    rope_dim, indexer = geometry.rope.dim, geometry.indexer
    fp8 = agreed.query_dtype == "e4m3"
    index_heads = indexer.heads or 0 if indexer else 0
    if agreed.form == "pair":
        reason = f"{agreed.backend.name} reads the latent and the rotated dims apart: nothing is packed"
    elif absorb == "kernel":
        reason = "the absorb kernel casts to e4m3 as it multiplies, straight into the packed query"
    elif fp8:
        reason = "bmm, then one pass casts and packs: the absorb kernel is not measured for so few tokens"
    else:
        reason = "the absorb matmul fills the front of the packed query, RoPE its tail: nothing is concatenated"
    query = dsa_query_bytes(
        tokens,
        geometry.heads,
        index_heads=index_heads,
        padded_heads=agreed.padded_heads,
        copies=fp8 and absorb == "bmm",
        fp8_query=fp8,
        rope_dim=rope_dim,
    )
    norm = dsa_norm_rope_bytes(
        tokens,
        geometry.q_rank,
        find_record(agreed.record, 512 + rope_dim),
        index_record=find_record("index_fp8") if index_heads else None,
        top_k=(indexer.top_k or 0) if indexer else 0,
        rope_dim=rope_dim,
    )
    tables = "RoPE table, positions"
    norm["RoPE tables, slots, positions"] = norm.pop("RoPE table, slots, positions") + query.pop(tables)
    return reason, norm | query
