"""What to run for a step, and why: plans, launch configurations, bytes moved.

Nothing here touches a GPU or imports Triton. Measured values live in ``configs/<device>.json``; a device
without a file gets the defaults, and its plans say that they are not measured.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property, lru_cache
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from . import checks, files
from .backends import Agreement, negotiate
from .formats import Record
from .formats import record as find_record
from .geometry import Geometry

Layout = Literal["head_major", "chunk_interleaved"]
LAYOUTS: tuple[Layout, ...] = ("head_major", "chunk_interleaved")


@dataclass(frozen=True)
class LaunchConfig:
    """The shape of a launch. It changes speed and never bits: every candidate in ``tests`` gives the same bytes.

    The first three are powers of two.

    Attributes:
        rows: query rows a program: (token, head) rows; for chunk-interleaved queries (token, chunk) rows of 64
            heads' width; query latents (DSA norms); tokens (DSA absorption, V4 projection).
        tokens: the other half's: KV tokens; (token, head) rows of the indexer (DSA query); output dims at a
            time (DSA absorption, V4 projection).
        num_warps: warps a program.
        num_stages: tiles in flight of a projection's loop over the rank; other kernels have no such loop.
    """

    rows: int = 4
    tokens: int = 4
    num_warps: int = 4
    num_stages: int = 3


class Form(StrEnum):
    """How the query and KV halves of a V4 prologue are launched."""

    ONE_LAUNCH = "one_launch"
    TWO_LAUNCHES = "two_launches"
    KV_ONLY = "kv_only"


FORMS = tuple([form.value for form in Form])


class Projection(StrEnum):
    """How ``wq_b`` is multiplied into what attention reads."""

    MATMUL = "matmul"
    KERNEL = "kernel"


PROJECTIONS = tuple([projection.value for projection in Projection])

WeightKind = Literal["bf16", "e4m3", "mx"]
"""Of ``wq_b``: bf16, e4m3 with float32 scales of 128 x 128, e4m3 with UE8M0 scales of 32."""
WEIGHT_KINDS: tuple[WeightKind, ...] = ("bf16", "e4m3", "mx")


@dataclass(frozen=True)
class Device:
    """What is known of a GPU: copy rate in GB/s (read + written) and the measured launch configurations."""

    name: str
    measured: bool = False
    copy_gbps: float | None = None
    launch: dict[str, LaunchConfig] = field(default_factory=dict)

    def config(self, path: str, tokens: int) -> LaunchConfig:
        """Launch configuration of a kernel path for a step of so many tokens; what is not measured is as on an H200.

        ``copy@512`` is that of ``copy`` for steps of at most 512 tokens, ``copy`` that of larger ones; the smallest
        bound that holds counts.
        """
        return self._by_size[bisect_left(STEP_BOUNDS, tokens)][path]

    @cached_property
    def _by_size(self) -> tuple[dict[str, LaunchConfig], ...]:
        """The configurations of steps up to each bound, and past the last: what counts more overwrites what less."""
        ranges = []
        for first in range(len(STEP_BOUNDS) + 1):
            configs: dict[str, LaunchConfig] = {}
            for known in (device(DEFAULT_DEVICE).launch, self.launch):
                configs |= known
                for bound in reversed(STEP_BOUNDS[first:]):
                    suffix = f"@{bound}"
                    configs |= {key.removesuffix(suffix): known[key] for key in known if key.endswith(suffix)}
            ranges.append(configs)
        return tuple(ranges)


DEFAULT_DEVICE = "NVIDIA H200"
"""The device whose launch configurations serve where there are none."""

SMALL_STEP = 512
"""Tokens up to which most paths have a configuration of their own: latency counts there, not bandwidth."""
STEP_BOUNDS = (16, 64, 128, 256, SMALL_STEP)
"""Tokens at which some path changes its configuration (the projections, by the tile that a few tokens fill)."""
STEP_SIZES = (1, *[bound + 1 for bound in STEP_BOUNDS])
"""One token count from each range between the bounds."""


def slug(name: str) -> str:
    """File name of a device: ``NVIDIA H200`` -> ``nvidia-h200``."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


@lru_cache
def device(name: str) -> Device:
    """The device's committed measurements, or defaults where there are none."""
    path = resources.files(__package__).joinpath("configs", slug(name) + ".json")
    if not path.is_file():
        return Device(name)
    return replace(read_device(path), name=name)


class _Launch(files.Schema, frozen=True):
    """A :class:`LaunchConfig` in a file, within what any GPU can run."""

    rows: Annotated[int, msgspec.Meta(ge=1, le=1024)]
    tokens: Annotated[int, msgspec.Meta(ge=1, le=1024)]
    num_warps: Annotated[int, msgspec.Meta(ge=1, le=32)]
    num_stages: Annotated[int, msgspec.Meta(ge=1, le=16)] = 3

    def __post_init__(self) -> None:
        for name in ("rows", "tokens", "num_warps"):
            if (value := getattr(self, name)) & (value - 1):
                raise ValueError(f"{name}: expected a power of two; got {value}")


class _Measurements(files.Schema, frozen=True):
    """A file of measurements."""

    name: str
    copy_gbps: files.Positive | None
    launch: dict[str, _Launch]


def read_device(path: Path | Traversable) -> Device:
    """Read what tuning wrote (:func:`preattn.tuning.save`).

    Raises:
        ValueError: the file cannot be read or is not in the schema; the message names it and the place.
    """
    found = files.read(path, _Measurements, most=1 << 20)
    launch = {path: LaunchConfig(**msgspec.structs.asdict(config)) for path, config in found.launch.items()}
    return Device(found.name, measured=True, copy_gbps=found.copy_gbps, launch=launch)


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


def current_device(index: int | None) -> Device:
    """What is known of a CUDA device index (None: the CPU), or is assumed of it."""
    return _assumed.get() or _cuda_device(index)


def launch_config(index: int | None, path: str, tokens: int) -> LaunchConfig:
    """Launch configuration of a kernel path on a CUDA device index (None: the CPU), for so many tokens."""
    return current_device(index).config(path, tokens)


def v4_query_path(*, interleaved: bool, norm: bool, in_place: bool) -> str:
    """Which kernel path a V4 query takes: the key of its launch configuration."""
    if in_place and not norm:
        return "in_place"
    if interleaved:
        return "copy"
    return "norm_rows" if norm else "rows"


def project_path(weight: WeightKind, *, norm: bool) -> str:
    """The same for a V4 projection; a head norm keeps whole heads in a tile."""
    path = "project" if weight == "bf16" else f"project_{weight}"
    return f"{path}_norm" if norm else path


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
        projection: V4 with a workspace: how ``wq_b`` is multiplied into it; with the kernel the rest of the prologue
            is part of that launch.
        copied: the bytes that the same step moves where a copy builds the query: what ``bytes`` has less of is not
            copied.
        workspace_bytes: size of the query workspace for so many tokens, which layers of a stream share; 0 without one.
    """

    form: Form
    agreement: Agreement
    reason: str
    tokens: int
    bytes: dict[str, int]
    expected_us: float | None
    absorb: Literal["bmm", "kernel"] | None = None
    projection: Projection | None = None
    copied: dict[str, int] = field(default_factory=dict)
    workspace_bytes: int = 0

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


def v4_project_bytes(tokens: int, heads: int, rank: int, weight: WeightKind, record: Record) -> dict[str, int]:
    """Bytes that a V4 projection with its prologue moves for ``tokens`` tokens, each counted once."""
    size = 2 if weight == "bf16" else 1
    scales = {"bf16": 0, "e4m3": heads * rank // 8, "mx": heads * 16 * rank}[weight]
    kv = v4_bytes(tokens, heads, 0, record)
    return {
        "weight": heads * 512 * rank * size + scales,
        "query latent read": tokens * rank * size,
        **kv,
        "query written": tokens * 2 * 512 * heads,
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
    workspace: bool | None = None,
    weight: WeightKind = "bf16",
) -> Plan:
    """Choose what a step of one layer's prologue runs.

    Args:
        geometry: the layer, sharded (:meth:`~preattn.geometry.Geometry.shard`).
        tokens: tokens of the step.
        backend: who reads the result (:mod:`preattn.backends`); the model's usual one when None.
        record: the KV record; the first that model and backend share when None.
        device_name: as ``torch.cuda.get_device_name`` says it.
        captured: the step runs inside a CUDA graph.
        workspace: the projection writes into a query workspace (:mod:`preattn.workspace`). False: into a query of its
            own, which a copy pads. None: DSA's absorb matmul has a packed buffer to fill, V4's query is padded.
        weight: V4: what ``wq_b`` is made of.

    Raises:
        ValueError: model, backend and record do not fit, or ``tokens`` is negative.
    """
    checks.integer("tokens", tokens, least=0)
    checks.instance("geometry", geometry, Geometry)
    checks.instance("device_name", device_name, str)
    checks.flag("captured", captured)
    checks.word("weight", weight, WEIGHT_KINDS)
    if weight != "bf16" and (geometry.family != "v4" or not workspace):
        raise ValueError(f"weight: expected bf16 but for V4 with a workspace; got {weight}")
    agreed = negotiate(geometry, backend or usual_backend(geometry), record=record)
    found = device(device_name)
    if geometry.family == "v4":
        plan = _choose_v4(geometry, agreed, tokens, found, captured, bool(workspace), weight)
    else:
        plan = _choose_dsa(geometry, agreed, tokens, found, workspace is not False)
    rate = found.copy_gbps
    return replace(plan, expected_us=plan.total_bytes / rate / 1e3 if rate else None)


FUSED_NORM_TOKENS = 16
"""Tokens up to which the projection kernel norms heads itself: a tile is then a whole head, which more tokens would not
fill a GPU with fast enough. Above, a launch after it norms them in place."""

PROJECT_KERNEL_TOKENS: dict[str, int] = {
    "project": 256,
    "project_e4m3": 128,
    "project_norm": 0,
    "project_e4m3_norm": 128,
}
"""Tokens up to which our kernel beats the library's matmul and the launch after it (H200), by kernel path."""


def library_multiplies(weight: WeightKind, layout: Layout, tokens: int, rank: int) -> bool:
    """Whether torch has a matmul that takes these operands and writes where attention reads.

    ``torch._scaled_mm`` takes 128 x 128 scales of the weight and column-major ones of 128 dims of a token, columns at
    multiples of 16 bytes, on Hopper. It reads the weight's scales in rows of whole fours: a checkpoint has them where
    the rank is a multiple of 512. It has no batched form, which a chunk-interleaved query would need.
    """
    if weight == "e4m3":
        return layout == "head_major" and tokens > 0 and tokens % 4 == 0 and rank % 512 == 0
    return weight == "bf16"


def projection(
    found: Device, weight: WeightKind, *, tokens: int, norm: bool = False, matmul: bool = True, kernel: bool = True
) -> tuple[Projection, str]:
    """Choose how a V4 projection runs, and say why.

    Args:
        found: the device.
        weight: what ``wq_b`` is made of.
        tokens: of the step.
        norm: heads are normed.
        matmul: the library takes these operands (:func:`library_multiplies`).
        kernel: our kernel does.
    """
    if not matmul:
        return Projection.KERNEL, "no library matmul takes these operands and writes where attention reads"
    if not kernel:
        return Projection.MATMUL, "the projection kernel takes ranks that are multiples of 64"
    if not found.measured:
        if weight == "bf16":
            return Projection.MATMUL, "the library's matmul by default: this device is not measured"
        return (
            Projection.KERNEL,
            "our kernel by default: this device is not measured; not all matmuls scale blocks",
        )
    if norm and FUSED_NORM_TOKENS < tokens <= PROJECT_KERNEL_TOKENS[project_path(weight, norm=norm)]:
        return (
            Projection.KERNEL,
            "our kernel multiplies the fastest for so few tokens; heads are normed by the next launch",
        )
    if tokens <= PROJECT_KERNEL_TOKENS[project_path(weight, norm=norm)]:
        return Projection.KERNEL, "one launch projects, finishes the query and stores KV: the fastest for so few tokens"
    return Projection.MATMUL, "the library's matmul is the fastest for so many tokens"


def usual_backend(geometry: Geometry) -> str:
    """The backend that a model's own serving code uses."""
    if geometry.family == "dsa":
        return "flashmla-sparse" if geometry.rope.dim else "flashinfer-sparse-trtllm"
    return "flashmla-v4" if geometry.query_norm else "flashmla-mega"


def _choose_v4(
    geometry: Geometry,
    agreed: Agreement,
    tokens: int,
    found: Device,
    captured: bool,
    workspace: bool,
    weight: WeightKind,
) -> Plan:
    heads, padded, kv_record = geometry.heads, agreed.padded_heads, find_record(agreed.record)
    fp8 = agreed.query_dtype == "e4m3"
    touched = agreed.norms or agreed.rotates
    change = "normed and rotated" if agreed.norms else "rotated"
    in_place = v4_bytes(tokens, heads, heads, kv_record, in_place=not agreed.norms)
    copy = v4_bytes(tokens, heads, padded, kv_record, fp8_query=fp8)
    kv_only = v4_bytes(tokens, heads, 0, kv_record)
    plan = Plan(Form.ONE_LAUNCH, agreed, "", tokens, copy, None, copied=copy)
    if workspace:
        plan = replace(plan, workspace_bytes=tokens * padded * 512 * (1 if fp8 else 2))
    if fp8 or not (workspace or padded == heads):
        if not found.measured:
            reason = "one launch by default: this device is not measured"
        elif captured:
            reason = "in a graph, one launch is the fastest form measured at every token count"
        else:
            reason = "one launch is the fastest form measured at every token count, and costs the host a launch less"
        return replace(plan, reason=reason)
    if not workspace:  # the projection is the caller's own
        if not touched:
            reason = f"attention takes {padded} heads as they are and rotates them itself: the query is left alone"
            return replace(plan, form=Form.KV_ONLY, reason=reason, bytes=kv_only)
        reason = f"attention takes {padded} heads, as the projection leaves them: they are read, {change} and written"
        reason += " in place"
        return replace(plan, reason=reason, bytes=in_place)
    layout: Layout = "chunk_interleaved" if agreed.form == "chunk_interleaved" else "head_major"
    rank = geometry.q_rank or 0
    projection_form, why = projection(
        found,
        weight,
        tokens=tokens,
        norm=agreed.norms,
        matmul=library_multiplies(weight, layout, tokens, rank),
        kernel=rank % 64 == 0,
    )
    if weight == "e4m3" and projection_form == Projection.MATMUL:
        why += ", where the latent's scales are column-major groups of 128; else our kernel runs"
    reason = f"the projection writes {heads} of {padded} heads where attention reads them: nothing is copied; {why}"
    if projection_form == Projection.KERNEL and not (agreed.norms and tokens > FUSED_NORM_TOKENS):
        return replace(plan, reason=reason, bytes=kv_only, projection=projection_form)
    if not touched:
        return replace(plan, form=Form.KV_ONLY, reason=reason, bytes=kv_only, projection=projection_form)
    reason += f"; they are read, {change} and written in place"
    return replace(plan, reason=reason, bytes=in_place, projection=projection_form)


ABSORB_KERNEL_TOKENS = 1024
"""Tokens from which :func:`preattn.dsa.absorb_query`'s e4m3 kernel was measured (H200) faster than ``torch.bmm`` and
the cast of :func:`preattn.dsa.query` with 16, 64 and 128 heads; with 16 heads it was slower up to 256 tokens."""


def _choose_dsa(geometry: Geometry, agreed: Agreement, tokens: int, found: Device, workspace: bool) -> Plan:
    rope_dim, indexer, heads = geometry.rope.dim, geometry.indexer, geometry.heads
    fp8, pair = agreed.query_dtype == "e4m3", agreed.form == "pair"
    absorb: Literal["bmm", "kernel"] = "bmm"
    if fp8 and found.measured and tokens >= ABSORB_KERNEL_TOKENS:
        absorb = "kernel"
    index_heads = indexer.heads or 0 if indexer else 0
    in_place = workspace or agreed.padded_heads == heads
    copies = not pair and (not in_place or (fp8 and absorb == "bmm"))
    if pair:
        reason = f"{agreed.backend.name} reads the latent and the rotated dims apart: nothing is packed"
    elif not in_place:
        reason = f"no workspace: the absorbed latent is copied into a new query of {agreed.padded_heads} heads"
    elif absorb == "kernel":
        reason = "the absorb kernel casts to e4m3 as it multiplies, straight into the packed query"
    elif fp8:
        reason = "bmm, then one pass casts and packs: the absorb kernel is not the faster for so few tokens"
    else:
        reason = "the absorb matmul fills the front of the packed query, RoPE its tail: nothing is concatenated"
    if not found.measured:
        reason += "; this device is not measured"

    norm = dsa_norm_rope_bytes(
        tokens,
        geometry.q_rank,
        find_record(agreed.record, 512 + rope_dim),
        index_record=find_record("index_fp8") if index_heads else None,
        top_k=(indexer.top_k or 0) if indexer else 0,
        rope_dim=rope_dim,
    )

    def with_query(*, copies: bool) -> dict[str, int]:
        query = dsa_query_bytes(
            tokens,
            heads,
            index_heads=index_heads,
            padded_heads=agreed.padded_heads,
            copies=copies,
            fp8_query=fp8,
            rope_dim=rope_dim,
        )
        both = dict(norm)
        tables = both.pop("RoPE table, slots, positions") + query.pop("RoPE table, positions")
        return both | {"RoPE tables, slots, positions": tables} | query

    size = tokens * agreed.padded_heads * (512 + rope_dim) * (1 if fp8 else 2)
    return Plan(
        Form.ONE_LAUNCH,
        agreed,
        reason,
        tokens,
        with_query(copies=copies or (fp8 and pair)),
        None,
        absorb,
        copied=with_query(copies=not pair or fp8),
        workspace_bytes=size if workspace and not pair else 0,
    )
