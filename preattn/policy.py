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

from .formats import Record
from .formats import record as find_record
from .geometry import Geometry

Layout = Literal["head_major", "chunk_interleaved"]
LAYOUTS: tuple[Layout, ...] = ("head_major", "chunk_interleaved")


@dataclass(frozen=True)
class LaunchConfig:
    """The shape of a launch: query rows a program, tokens a KV program, warps a program.

    It changes speed and never bits: every candidate in ``tests`` gives the same bytes.
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

    def config(self, kernel: str) -> LaunchConfig:
        """Launch configuration of a kernel path (``kv``, ``copy``, ``rows``, ``norm_rows``, ``in_place``)."""
        return self.launch.get(kernel) or DEFAULT_CONFIGS.get(kernel) or LaunchConfig()


DEFAULT_CONFIGS = {
    "rows": LaunchConfig(rows=8, tokens=4, num_warps=4),
    "norm_rows": LaunchConfig(rows=8, tokens=4, num_warps=4),
    "in_place": LaunchConfig(rows=16, tokens=4, num_warps=2),
}


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


def launch_config(index: int | None, path: str) -> LaunchConfig:
    """Launch configuration of a kernel path on a CUDA device index (None: the CPU)."""
    return (_assumed.get() or _cuda_device(index)).config(path)


def query_path(*, interleaved: bool, norm: bool, in_place: bool) -> str:
    """Which kernel path a query takes: the key of its launch configuration."""
    if in_place and not norm:
        return "in_place"
    if interleaved:
        return "copy"
    return "norm_rows" if norm else "rows"


@dataclass(frozen=True)
class Plan:
    """What a step will run.

    Attributes:
        form: the launches.
        reason: why this form, in a sentence.
        tokens: tokens of the step.
        bytes: bytes each part moves, read and written, each counted once.
        expected_us: time at the device's measured copy rate, None where that is not known.
    """

    form: Form
    reason: str
    tokens: int
    bytes: dict[str, int]
    expected_us: float | None

    @property
    def total_bytes(self) -> int:
        """Bytes the step moves."""
        return sum(self.bytes.values())


def v4_bytes(tokens: int, heads: int, padded_heads: int, record: Record, *, in_place: bool = False) -> dict[str, int]:
    """Bytes that a V4 prologue moves for ``tokens`` tokens, each counted once.

    Activations of 2 bytes; float32 RoPE table; int64 slots and positions. ``in_place`` counts the rotated
    dims alone.
    """
    row = 2 * 64 if in_place else 2 * 512
    written = heads if in_place else padded_heads
    return {
        "query read": tokens * (row * heads if padded_heads else 0),
        "query written": tokens * row * written,
        "latent read": tokens * 2 * 512,
        "record written": tokens * record.bytes,
        "RoPE table, slots, positions": tokens * (64 * 4 + 16),
    }


def choose(
    geometry: Geometry,
    *,
    tokens: int,
    record: str | None = None,
    padded_heads: int | None = None,
    device_name: str = "NVIDIA H200",
    captured: bool = False,
) -> Plan:
    """Choose the launches of one V4 / V4.1 layer's prologue.

    Args:
        geometry: the layer, sharded (:meth:`~preattn.geometry.Geometry.shard`).
        tokens: tokens of the step.
        record: name of the window record; the geometry's first when None.
        padded_heads: heads that attention reads; the geometry's when None.
        device_name: as ``torch.cuda.get_device_name`` says it.
        captured: the step runs inside a CUDA graph.

    Raises:
        ValueError: the geometry is not of the V4 family, or ``tokens`` is negative.
    """
    if geometry.family != "v4":
        raise ValueError(f"geometry: expected a V4 family model; got {geometry.name} ({geometry.family})")
    if tokens < 0:
        raise ValueError(f"tokens: expected at least 0; got {tokens}")
    name = record or geometry.records.window[0]
    heads, padded = geometry.heads, geometry.padded_heads if padded_heads is None else padded_heads
    found = device(device_name)
    rotates = geometry.query_norm
    if padded == heads and not rotates:
        form, padded = Form.KV_ONLY, 0
        reason = f"attention takes {heads} heads as they are and rotates them itself: the query is left alone"
    else:
        form = Form.ONE_LAUNCH
        state = "in a graph" if captured else "eager"
        reason = f"one launch is the fastest form measured at every token count, {state} too"
        if not found.measured:
            reason = "one launch by default: this device is not measured"
    moved = v4_bytes(tokens, heads, padded, find_record(name))
    rate = found.copy_gbps
    return Plan(form, reason, tokens, moved, sum(moved.values()) / rate / 1e3 if rate else None)
