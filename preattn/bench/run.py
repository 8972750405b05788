"""The benchmark: suites of cases, timed against engines' ops and the copy rate, written as JSON.

A suite is data. Every arm of a case is checked before it is timed: ours against the reference at
:data:`CHECKED_TOKENS` tokens, every other arm against ours at the timed size. A difference ends the run:
nothing is reported then.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import platform
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

import preattn

from ..cases.base import Call, Case
from ..cases.v4 import V4Case
from ..policy import Form, slug
from . import peers, timing
from .timing import Times

Clock = Literal["cold", "warm", "host"]
Arm = Callable[[], Any]

CHECKED_TOKENS = 257
CLOCKS: dict[Clock, Callable[[dict[str, Arm]], dict[str, Times]]] = {
    "cold": timing.cold,
    "warm": timing.warm,
    "host": timing.host,
}


class CheckFailed(Exception):
    """An arm's bytes are not what they should be."""


@dataclass(frozen=True)
class Suite:
    """Cases x token counts x clocks; the arms follow from the case."""

    name: str
    family: str
    cases: tuple[Case, ...]
    tokens: tuple[int, ...]
    clocks: tuple[Clock, ...] = ("cold",)


_PAD = V4Case(32, 64)
_V4_NORM = V4Case(64, 128, record="v4_fp8", layout="head_major", norm=True, rope=True)
_V4_SHARD = V4Case(16, 64, record="v4_fp8", layout="head_major", norm=True, rope=True)
_ROTATE = V4Case(32, 64, layout="head_major", rope=True)
_IN_PLACE = V4Case(32, 64, layout="head_major", rope=True, in_place=True)
_SHARDS = ((8, 64), (16, 64), (20, 64), (24, 64), (40, 64), (48, 64), (64, 128))

SUITES: tuple[Suite, ...] = (
    Suite("pad", "v4", (_PAD,), (512, 1024, 2048, 4096, 8192, 16384), ("cold", "warm")),
    Suite("shards", "v4", tuple([V4Case(heads, padded) for heads, padded in _SHARDS]), (4096, 16384)),
    Suite("head_major", "v4", (_ROTATE, _IN_PLACE, _V4_SHARD, _V4_NORM), (1024, 4096, 16384)),
    Suite("kv_only", "v4", (V4Case(64, 0), V4Case(64, 0, record="v4_fp8", layout="head_major")), (1024, 16384)),
    Suite("graph", "v4", (_PAD, _V4_SHARD, V4Case(64, 0)), (1, 8, 64, 256), ("warm",)),
    Suite("host", "v4", (_PAD, _V4_SHARD), (16,), ("host",)),
)


def storable(call: Call) -> Call:
    """Give every row a slot of its own: registry cases mix in slots outside the cache, where engines' ops write."""
    slots, cache = call.arguments["slots"], call.arguments["cache"]
    generator = torch.Generator().manual_seed(0)
    chosen = torch.randperm(cache.shape[0] * cache.shape[1], generator=generator)[: slots.shape[0]]
    call.arguments["slots"] = chosen.to(slots.dtype).to(slots.device)
    return call


def _v4_arms(case: V4Case, call: Call, vllm: peers.Vllm | None) -> dict[str, Arm]:
    arguments = dict(call.arguments)
    if not case.in_place:
        arguments["out"] = None  # a fresh output, as an engine's op returns one
    arms: dict[str, Arm] = {"preattn": lambda: call.function(**arguments)}
    if case.padded_heads:
        arms["two_launches"] = lambda: call.function(**{**arguments, "form": Form.TWO_LAUNCHES})
    peer = peers.v4_query_kv(vllm, call) if vllm is not None else None
    if peer is not None and not case.in_place:
        arms["vllm"] = peer
    return arms


def arms_of(case: Case, call: Call, vllm: peers.Vllm | None) -> dict[str, Arm]:
    """The arms of a case by name; ``preattn`` first."""
    if isinstance(case, V4Case):
        return _v4_arms(case, call, vllm)
    raise TypeError(f"case: no arms are defined for {type(case).__name__}")


def check(case: Case, call: Call, arms: dict[str, Arm], tokens: int) -> None:
    """Compare ours with the reference and every arm with ours.

    Raises:
        CheckFailed: bytes differ (for an engine's head norm: by more than one bf16 step).
    """
    small = min(tokens, CHECKED_TOKENS)
    expected, written = case.build(small).run("reference"), case.build(small, "cuda").run()
    for name, want in expected.items():
        if not torch.equal(want, written[name]):
            raise CheckFailed(f"{case.name}, {small} tokens: {name} differs from the reference")
    pool = call.memory["pool"]
    seen: dict[str, tuple[torch.Tensor, torch.Tensor | None]] = {}
    for arm, function in arms.items():
        pool.fill_(0xA5)
        result = function()
        seen[arm] = (pool.clone(), result if isinstance(result, torch.Tensor) else None)
    ours_pool, ours = seen["preattn"]
    for arm, (arm_pool, result) in seen.items():
        if not torch.equal(ours_pool, arm_pool):
            raise CheckFailed(f"{case.name}, {tokens} tokens: the cache that {arm} wrote differs from ours")
        if ours is None or result is None or not result.numel():
            continue
        if arm == "vllm" and getattr(case, "norm", False):
            # Another order of the norm's sum: one bf16 step, and where RoPE cancels, its float32 rounding.
            same = bool(((result - ours).abs_() <= ours.abs() * 2**-7 + 2**-16).all())
        else:
            same = torch.equal(result.view(torch.int16), ours.view(torch.int16))
        if not same:
            raise CheckFailed(f"{case.name}, {tokens} tokens: the query that {arm} wrote differs from ours")


def measure(suite: Suite, vllm: peers.Vllm | None, wanted: tuple[str, ...] | None) -> Iterator[dict[str, Any]]:
    """Check and time every arm of a suite; yields result rows."""
    copy = timing.copy_rate(torch.cuda.current_device())
    for case in suite.cases:
        for tokens in suite.tokens:
            call = storable(case.build(tokens, "cuda"))
            arms = {
                name: arm
                for name, arm in arms_of(case, call, vllm).items()
                if wanted is None or name in wanted or name == "preattn"
            }
            check(case, call, arms, tokens)
            for clock in suite.clocks:
                for name, times in CLOCKS[clock](arms).items():
                    rate = call.moved / times.median_us / 1e3
                    yield {
                        "suite": suite.name,
                        "case": case.name,
                        "arm": name,
                        "tokens": tokens,
                        "heads": getattr(case, "heads", 0),
                        "padded_heads": getattr(case, "padded_heads", 0),
                        "record": getattr(case, "record", ""),
                        "cache": clock,
                        "median_us": round(times.median_us, 3),
                        "p10_us": round(times.p10_us, 3),
                        "p90_us": round(times.p90_us, 3),
                        "bytes": call.moved,
                        "share_of_copy": round(rate / copy, 4),
                    }
            del call, arms
            torch.cuda.empty_cache()


def header(vllm: peers.Vllm | None) -> dict[str, Any]:
    """What the figures were taken with."""
    import triton

    index = torch.cuda.current_device()
    return {
        "device": torch.cuda.get_device_name(index),
        "driver": _driver(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "preattn": preattn.__version__,
        "commit": os.environ.get("PREATTN_COMMIT") or _commit(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "vllm": vllm.version if vllm is not None else None,
        "timer": timing.timer_name(),
        "copy_gbps": round(timing.copy_rate(index), 1),
        "memset_gbps": round(timing.memset_rate(index), 1),
    }


def _run(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _commit() -> str:
    return _run("git", "rev-parse", "HEAD")


def _driver() -> str:
    return _run("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()[0]


@dataclass(frozen=True)
class Options:
    """What to run: all suites and arms by default."""

    output: Path = Path("results")
    peers: Path | None = None
    family: str | None = None
    suites: tuple[str, ...] | None = None
    arms: tuple[str, ...] | None = None
    quick: bool = False


def main(options: Options, report: Callable[[dict[str, Any]], None] = lambda row: None) -> Path:
    """Run suites and write ``<output>/<device>/<family>.json`` (one file a family).

    ``report`` is called with each row as it comes.

    Raises:
        RuntimeError: there is no CUDA GPU.
        CheckFailed: an arm's bytes are wrong; no file is written.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("bench times CUDA graphs and needs a CUDA GPU; this machine has none")
    vllm = peers.load(options.peers)
    head = header(vllm)
    folder = options.output / slug(head["device"])
    folder.mkdir(parents=True, exist_ok=True)
    rows: dict[str, list[dict[str, Any]]] = {}
    for suite in SUITES:
        if options.family not in (None, suite.family) or (options.suites and suite.name not in options.suites):
            continue
        if options.quick:
            suite = dataclasses.replace(suite, tokens=suite.tokens[-1:], clocks=suite.clocks[:1])
        for row in measure(suite, vllm, options.arms):
            report(row)
            rows.setdefault(suite.family, []).append(row)
    for family, family_rows in rows.items():
        lines = ",\n    ".join(json.dumps(row) for row in family_rows)
        text = f'{{\n  "header": {json.dumps(head, indent=2)},\n  "rows": [\n    {lines}\n  ]\n}}\n'
        (folder / f"{family}.json").write_text(text)
    return folder
