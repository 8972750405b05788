"""Search of launch configurations: candidates, times, and the file that keeps the winners.

A configuration changes speed and never bits (``tests`` runs the candidates), so the search looks at time
alone. One kernel path is one entry of ``configs/<device>.json``.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path

from . import policy
from .cases.base import Case
from .cases.v4 import V4Case
from .policy import Device, LaunchConfig

PATHS: dict[str, Case] = {
    "copy": V4Case(32, 64),
    "rows": V4Case(32, 64, layout="head_major", rope=True),
    "norm_rows": V4Case(64, 128, record="v4_fp8", layout="head_major", norm=True, rope=True),
    "in_place": V4Case(32, 64, layout="head_major", rope=True, in_place=True),
    "kv": V4Case(64, 0),
}
"""The case that stands for each kernel path."""


def candidates(path: str) -> Iterator[LaunchConfig]:
    """What is tried for a path: query rows x KV tokens x warps."""
    rows = (1,) if path == "kv" else (1, 2, 4, 8, 16, 32)
    tokens = (1, 2, 4, 8) if path == "kv" else (1, 2, 4)
    for row, token, warps in itertools.product(rows, tokens, (1, 2, 4, 8)):
        if row * 16 >= warps and token * 16 >= warps:  # a thread moves at least 16 bytes
            yield LaunchConfig(row, token, warps)


def search(path: str, tokens: int) -> list[tuple[float, LaunchConfig]]:
    """Time every candidate of a path on the current GPU with a cold L2: (microseconds, candidate), fastest first."""
    from .bench import timing

    call = PATHS[path].build(tokens, "cuda")

    def arm(config: LaunchConfig) -> object:
        with policy.assume(Device("candidate", launch={path: config})):
            return call.function(**call.arguments)

    tried = {str(config): config for config in candidates(path)}
    times = timing.cold({name: partial(arm, config) for name, config in tried.items()}, repeats=15)
    return sorted([(times[name].median_us, config) for name, config in tried.items()], key=lambda pair: pair[0])


def save(device: Device, folder: Path) -> Path:
    """Write a device's measurements as ``<folder>/<device>.json``."""
    path = folder / f"{policy.slug(device.name)}.json"
    launch = {name: asdict(config) for name, config in sorted(device.launch.items())}
    path.write_text(json.dumps({"name": device.name, "copy_gbps": device.copy_gbps, "launch": launch}, indent=2) + "\n")
    return path
