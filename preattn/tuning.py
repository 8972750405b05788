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
from .cases.v4 import V4Case
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
}
"""The case that stands for each kernel path."""

LARGE_TOKENS = 16384
SMALL_TOKENS = 64


def _product(rows: tuple[int, ...], tokens: tuple[int, ...], warps: tuple[int, ...]) -> tuple[LaunchConfig, ...]:
    return tuple([LaunchConfig(r, t, w) for r in rows for t in tokens for w in warps])


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
}
"""What is tried for each path: rows x tokens x warps, twelve or more."""


def arms(path: str, call: Call) -> dict[str, Callable[[], Any]]:
    """The call under each candidate of a path, by ``rows x tokens x warps``."""

    def run(config: LaunchConfig) -> Any:
        with policy.assume(Device("candidate", launch={path: config})):
            return call.function(**call.arguments)

    return {f"{c.rows}x{c.tokens}x{c.num_warps}": partial(run, c) for c in CANDIDATES[path]}


def search(path: str, tokens: int) -> list[tuple[float, LaunchConfig]]:
    """Time every candidate of a path on the current GPU with a cold L2: (microseconds, candidate), fastest first."""
    from .bench import timing

    times = timing.cold(arms(path, PATHS[path].build(tokens, "cuda")), repeats=15)
    found = zip([t.median_us for t in times.values()], CANDIDATES[path], strict=True)
    return sorted(found, key=lambda pair: pair[0])


def tune(device: Device, report: Callable[[str, float, LaunchConfig], None]) -> Device:
    """Search every path at a large and a small step; the device with its winners. ``report`` hears of each."""
    launch = dict(device.launch)
    for path in PATHS:
        for key, tokens in ((path, LARGE_TOKENS), (f"{path}_small", SMALL_TOKENS)):
            assert (tokens <= SMALL_STEP) == key.endswith("_small")
            microseconds, launch[key] = search(path, tokens)[0]
            report(key, microseconds, launch[key])
    return replace(device, measured=True, launch=launch)


def save(device: Device, folder: Path) -> Path:
    """Write a device's measurements as ``<folder>/<device>.json``."""
    path = folder / f"{policy.slug(device.name)}.json"
    launch = {name: asdict(config) for name, config in sorted(device.launch.items())}
    path.write_text(json.dumps({"name": device.name, "copy_gbps": device.copy_gbps, "launch": launch}, indent=2) + "\n")
    return path
