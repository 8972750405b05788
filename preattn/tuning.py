"""Search of launch configurations: what is tried for each kernel path, its times, and the file that keeps the winners.

A configuration changes speed and never bits (``tests`` runs every candidate on a GPU), so the search looks at time
alone. One kernel path is one entry of ``configs/<device>.json``, with another for
small steps.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from . import policy
from .cases.base import Call, Case
from .cases.dsa import AbsorbCase, DsaQueryCase, NormRopeCase
from .cases.v4 import ProjectCase, V4Case
from .policy import SMALL_STEP, Device, LaunchConfig

PATHS: dict[str, Case] = {
    "kv": V4Case(64, 0),
    "copy": V4Case(32, 64),
    "rows": V4Case(32, 64, layout="head_major", rope=True),
    "norm_rows": V4Case(64, 128, record="v4_fp8", layout="head_major", norm=True, rope=True),
    "in_place": V4Case(32, 64, layout="head_major", rope=True, in_place=True),
    "dsa_query": DsaQueryCase(128),
    "dsa_query_copy": DsaQueryCase(16, latent="transposed", padded_heads=64),
    "dsa_query_e4m3": DsaQueryCase(128, latent="transposed", fp8_query=True),
    "dsa_norm_rope": NormRopeCase(rank=2048),
    "dsa_absorb": AbsorbCase(16),
    "project": ProjectCase(32, 64, rope=True, rank=1024),
    "project_e4m3": ProjectCase(32, 64, layout="chunk_interleaved", weight="e4m3", grouped=True, rank=1024),
    "project_mx": ProjectCase(32, 64, rope=True, weight="mx", rank=1024),
}
"""The case that stands for each kernel path."""

STEPS = {"": 16384, f"@{SMALL_STEP}": 64}
"""Tokens at which the configurations of a path are searched: of large steps, and up to a bound."""
PROJECTION_STEPS = {"": 8192, "@256": 256, "@128": 64, "@16": 8}
"""The same for projections, whose tiles a few tokens do not fill."""


def steps(path: str) -> dict[str, int]:
    """Tokens at which each configuration of a path is searched, by the suffix of its key."""
    return PROJECTION_STEPS if path.startswith("project") else STEPS


def _product(
    rows: tuple[int, ...], tokens: tuple[int, ...], warps: tuple[int, ...], stages: tuple[int, ...] = (3,)
) -> tuple[LaunchConfig, ...]:
    return tuple([LaunchConfig(r, t, w, s) for r in rows for t in tokens for w in warps for s in stages])


_HEAD_ROWS = _product((2, 4, 8), (2, 4), (1, 2, 4))
_DSA_ROWS = (*_product((16, 32), (16, 32), (2, 4)), *_product((8, 64), (8, 64), (4,)))
CANDIDATES: dict[str, tuple[LaunchConfig, ...]] = {
    "kv": _product((1,), (1, 2, 4, 8), (1, 2, 4)),
    "copy": _product((1, 2, 4), (2, 4), (1, 2, 4)),
    "rows": _HEAD_ROWS,
    "norm_rows": _HEAD_ROWS,
    "in_place": _product((8, 16, 32), (1, 2), (1, 2)),
    "dsa_query": _DSA_ROWS,
    "dsa_query_copy": _product((4, 8, 16), (16, 32), (2, 4)),
    "dsa_query_e4m3": _product((4, 8, 16), (16, 32), (2, 4)),
    "dsa_norm_rope": _product((1, 2, 4), (1, 2), (4, 8)),
    "dsa_absorb": _product((64, 128, 256), (64, 128), (4, 8)),
    "project": (
        *_product((16,), (64, 128), (4,), (4, 6)),
        *_product((64, 128), (128,), (4,), (3, 4)),
        *_product((64, 128), (128, 256), (8,), (3, 4)),
    ),
    "project_e4m3": (
        *_product((16, 32), (64, 128), (4,), (4, 6)),
        *_product((64,), (64, 128), (4,), (3, 4)),
        *_product((128,), (64, 128), (8,), (3,)),
    ),
    "project_mx": (*_product((16, 32), (64, 128), (4,), (6, 8)), *_product((64,), (64, 128), (4,), (4, 6))),
}
"""What is tried for each path: rows x tokens x warps x stages, twelve or more."""


def arms(path: str, call: Call) -> dict[str, Callable[[], Any]]:
    """The call under each candidate of a path, by ``rows x tokens x warps x stages``."""

    def run(config: LaunchConfig) -> Any:
        with policy.assume(Device("candidate", launch={path: config})):
            return call.function(**call.arguments)

    return {f"{c.rows}x{c.tokens}x{c.num_warps}x{c.num_stages}": partial(run, c) for c in CANDIDATES[path]}


def search(path: str, tokens: int) -> list[tuple[float, LaunchConfig]]:
    """Time every candidate of a path on the current GPU with a cold L2: (microseconds, candidate), fastest first."""
    from .bench import timing

    times = timing.cold(arms(path, PATHS[path].build(tokens, "cuda")), repeats=15)
    found = zip([t.median_us for t in times.values()], CANDIDATES[path], strict=True)
    return sorted(found, key=lambda pair: pair[0])


def tune(device: Device, report: Callable[[str, float, LaunchConfig], None]) -> Device:
    """Search every path at a step of each size; the device with its winners. ``report`` hears of each."""
    launch = dict(device.launch)
    for path in PATHS:
        for suffix, tokens in steps(path).items():
            microseconds, launch[path + suffix] = search(path, tokens)[0]
            report(path + suffix, microseconds, launch[path + suffix])
    return replace(device, measured=True, launch=launch)


def save(device: Device, folder: Path) -> Path:
    """Write a device's measurements as ``<folder>/<device>.json``."""
    path = folder / f"{policy.slug(device.name)}.json"
    launch = {name: asdict(config) for name, config in sorted(device.launch.items())}
    path.write_text(json.dumps({"name": device.name, "copy_gbps": device.copy_gbps, "launch": launch}, indent=2) + "\n")
    return path
