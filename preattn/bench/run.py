"""The benchmark: suites of cases, timed against engines' ops and the copy rate, written as JSON.

A suite is data. Every arm of a case is checked before it is timed: ours against the reference at
:data:`CHECKED_TOKENS` tokens, every other arm against ours at the timed size. A difference ends the run:
nothing is reported then.
"""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
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

from .. import dsa, tuning
from ..cases.base import CANARY, Call, Case
from ..cases.dsa import AbsorbCase, DsaQueryCase, NormRopeCase
from ..cases.v4 import KvCase, PadCase, ProjectCase, V4Case
from ..differences import division_edges, one_rounding
from ..policy import slug
from ..reference import dsa as reference
from . import peers, timing
from .arms import LESS, Arm, arms_of, storable
from .timing import Times

Clock = Literal["cold", "warm", "host"]

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
    sweep: str | None = None
    """A kernel path: the arms are its candidate launch configurations."""


_PAD = V4Case(32, 64)
_V4_NORM = V4Case(64, 128, record="v4_fp8", layout="head_major", norm=True, rope=True)
_V4_SHARD = V4Case(16, 64, record="v4_fp8", layout="head_major", norm=True, rope=True)
_ROTATE = V4Case(32, 64, layout="head_major", rope=True)
_IN_PLACE = V4Case(32, 64, layout="head_major", rope=True, in_place=True)
_SHARDS = ((8, 64), (16, 64), (20, 64), (24, 64), (40, 64), (48, 64), (64, 128))

_QUERIES = tuple([DsaQueryCase(heads) for heads in (8, 16, 32, 64, 128)])
_FP8_QUERIES = tuple([DsaQueryCase(heads, latent="transposed", fp8_query=True) for heads in (8, 16, 32, 64, 128)])
_OTHER_QUERIES = (
    DsaQueryCase(16, latent="transposed", padded_heads=64),
    DsaQueryCase(64, form="pair", latent="transposed"),
    DsaQueryCase(64, index_pairing="interleaved"),
)
_ABSORBED = (
    AbsorbCase(16),
    AbsorbCase(64),
    AbsorbCase(128),
    AbsorbCase(16, fp8_query=False),
    AbsorbCase(128, fp8_query=False),
)
_NORMS = (NormRopeCase(rank=2048), NormRopeCase(rank=1536, record="bf16"))

_PROJECTIONS = (
    ProjectCase(32, 64, layout="chunk_interleaved", rank=1024),
    ProjectCase(32, 64, layout="chunk_interleaved", rank=1280),
    ProjectCase(32, 64, rope=True, rank=1024),
    ProjectCase(16, 64, record="v4_fp8", norm=True, rope=True, rank=1024),
    ProjectCase(32, 64, layout="chunk_interleaved", weight="e4m3", grouped=True, rank=1024),
    ProjectCase(32, 64, weight="e4m3", rope=True, grouped=True, rank=1024),
    ProjectCase(64, 64, record="v4_fp8", weight="e4m3", norm=True, rope=True, grouped=True, rank=1024),
    ProjectCase(32, 64, weight="mx", rope=True, rank=1024),
)

SUITES: tuple[Suite, ...] = (
    Suite("pad", "v4", (_PAD,), (512, 1024, 2048, 4096, 8192, 16384), ("cold", "warm")),
    Suite("shards", "v4", tuple([V4Case(heads, padded) for heads, padded in _SHARDS]), (4096, 16384)),
    Suite("head_major", "v4", (_ROTATE, _IN_PLACE, _V4_SHARD, _V4_NORM), (1024, 4096, 16384)),
    Suite("pad_alone", "v4", tuple([PadCase(heads, padded) for heads, padded in _SHARDS]), (16384,)),
    Suite("kv_norm", "v4", (KvCase(), KvCase("v4_fp8")), (1024, 16384)),
    Suite("kv_only", "v4", (V4Case(64, 0), V4Case(64, 0, record="v4_fp8", layout="head_major")), (1024, 16384)),
    Suite("graph", "v4", (_PAD, _V4_SHARD, V4Case(64, 0)), (1, 8, 64, 256), ("warm",)),
    Suite("sweep_copy", "v4", (tuning.PATHS["copy"],), (16384,), sweep="copy"),
    Suite("sweep_norm_rows", "v4", (tuning.PATHS["norm_rows"],), (16384,), sweep="norm_rows"),
    Suite("sweep_dsa_query", "dsa", (tuning.PATHS["dsa_query"],), (16384,), sweep="dsa_query"),
    Suite("project", "projection", _PROJECTIONS, (512, 1024, 4096, 8192, 16384)),
    Suite("project_graph", "projection", _PROJECTIONS, (1, 8, 64, 256), ("warm", "cold")),
    Suite("project_host", "projection", _PROJECTIONS[:1], (16,), ("host",)),
    Suite("dsa_query", "dsa", _QUERIES, (64, 256, 1024, 4096, 16384, 65536)),
    Suite("dsa_fp8_query", "dsa", _FP8_QUERIES, (64, 1024, 16384)),
    Suite("dsa_other_queries", "dsa", _OTHER_QUERIES, (1024, 16384)),
    Suite("dsa_absorb", "dsa", _ABSORBED, (1, 64, 256, 1024, 4096, 16384)),
    Suite("dsa_norm_rope", "dsa", _NORMS, (64, 1024, 16384, 65536)),
    Suite("dsa_graph", "dsa", (DsaQueryCase(16), DsaQueryCase(128), _NORMS[0]), (1, 8, 64, 256), ("warm",)),
    Suite("dsa_host", "dsa", (DsaQueryCase(16), _NORMS[0]), (16,), ("host",)),
    Suite("host", "v4", (_PAD, _V4_SHARD), (16,), ("host",)),
)


def check(case: Case, call: Call, arms: dict[str, Arm], tokens: int) -> None:
    """Compare ours with the reference, and every arm with ours.

    Raises:
        CheckFailed: bytes differ (an engine's: by more than :mod:`preattn.differences` explains).
    """
    small = min(tokens, CHECKED_TOKENS)
    expected, written = _expected(case, small), case.build(small, "cuda").run()
    for name, want in expected.items():
        if not torch.equal(want, written[name]):
            raise CheckFailed(f"{case.name}, {small} tokens: {name} differs from the reference")
    before = {name: tensor.clone() for name, tensor in call.memory.items()}
    shared = {name: tensor for name, tensor in call.memory.items() if name != "out"}
    seen: dict[str, dict[str, torch.Tensor]] = {}
    for arm, function in arms.items():
        if arm in LESS:
            continue
        for name, tensor in call.memory.items():  # an op in place starts from the same bytes in every arm
            tensor.copy_(before[name])
        result = function()
        returned = _results(result, getattr(case, "heads", 0))
        seen[arm] = {name: tensor.clone() for name, tensor in shared.items()} | returned
        _spoil(result, call)
    ours = seen["preattn"]
    for arm, results in seen.items():
        if not results or not results.keys() <= ours.keys():
            raise CheckFailed(f"{case.name}, {tokens} tokens: {arm} wrote {sorted(results)}, we {sorted(ours)}")
        for name, tensor in results.items():
            engines = arm.startswith("vllm")
            if _agrees(ours[name], tensor, normed=engines and _normed(case, name)):
                continue
            if not (engines and _divided(case, call, name, ours[name], tensor)):
                raise CheckFailed(f"{case.name}, {tokens} tokens: the {name} that {arm} wrote differs from ours")


_checked: dict[tuple[str, int], dict[str, torch.Tensor]] = {}
"""What the last case has to write: a suite asks for it at one size after another, mostly checked at the same."""


def _expected(case: Case, tokens: int) -> dict[str, torch.Tensor]:
    key = (case.name, tokens)
    if key not in _checked:
        _checked.clear()
        _checked[key] = case.build(tokens).run("reference")
    return _checked[key]


def _normed(case: Case, name: str) -> bool:
    """Whether a norm decides what an arm wrote under ``name``: another order of its sum may show there alone."""
    if isinstance(case, NormRopeCase):
        return name != "top_k"
    return name == "query" and bool(getattr(case, "norm", False))


def _results(result: Any, heads: int) -> dict[str, torch.Tensor]:
    """What an arm returned, under names that all arms of a case share; padding heads, which not all have, left out."""
    if isinstance(result, dsa.Query):
        apart = result.q_pe is not None  # the pair: its latent is the input itself
        result = (result.q_pe if apart else result.query, result.index_query, result.index_weights)
    if isinstance(result, tuple):
        query = result[0][:, :heads]
        named = {"rotated query": query[..., -64:].clone()}
        if query.shape[-1] > 64:
            named["query"] = query.clone()
        outputs = enumerate(result[1:])
        return named | {f"indexer output {i}": tensor.clone() for i, tensor in outputs if tensor is not None}
    if isinstance(result, torch.Tensor) and result.numel():
        return {"query": result.clone()}
    return {}


def _spoil(result: Any, call: Call) -> None:
    """Overwrite what an arm returned in memory of its own: the next arm may be given it, and leave it as it is."""
    given = [x for x in (*call.arguments.values(), *call.memory.values()) if isinstance(x, torch.Tensor)]
    kept = {x.untyped_storage().data_ptr() for x in given}
    for tensor in result if isinstance(result, tuple) else (result,):
        if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in kept:
            torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage()).fill_(CANARY)


def _agrees(ours: torch.Tensor, theirs: torch.Tensor, *, normed: bool) -> bool:
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return False
    if not normed:
        return torch.equal(ours.contiguous().view(torch.uint8), theirs.contiguous().view(torch.uint8))
    if ours.dtype == torch.uint8:  # codes of normed values: rounding may flip one in some thousands
        return int((ours != theirs).count_nonzero()) <= 1e-3 * ours.numel()
    return one_rounding(ours, theirs)


def _divided(case: Case, call: Call, name: str, ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Whether an engine's approximate division is all that makes an e4m3 query differ from ours."""
    queries = isinstance(case, DsaQueryCase) and case.fp8_query and name in ("query", "rotated query")
    if not queries or (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
        return False
    wrong = ours.view(torch.uint8) != theirs.view(torch.uint8)
    rows, a = wrong.flatten(1).any(-1).nonzero().flatten(), call.arguments
    exact = reference.query_quotient(
        *(a["q_pe"][rows].cpu(), a["latent"][rows].cpu(), a["positions"][rows].cpu()),
        *(a["rope_table"].cpu(), a["query_scale"].cpu()),
        rope_output=a["rope_output"],
    )
    edges = division_edges(ours[rows].cpu(), theirs[rows].cpu(), exact[..., -ours.shape[-1] :])
    return bool((edges | ~wrong[rows].cpu()).all())


def _randomise(call: Call) -> None:
    """Normal operands for the clock: matrix units run faster on the small integers that all arms multiply exactly."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    for name in ("x", "weight"):
        operand = call.arguments[name]
        for rows in operand.split(4096):
            rows.copy_(torch.randn(rows.shape, device="cuda", generator=generator))


def measure(suite: Suite, vllm: peers.Vllm | None, wanted: tuple[str, ...] | None) -> Iterator[dict[str, Any]]:
    """Check and time every arm of a suite; yields result rows."""
    copy = timing.copy_rate(torch.cuda.current_device())
    for case in suite.cases:
        for tokens in suite.tokens:
            call = storable(case.build(tokens, "cuda"))
            arms = {
                name: arm
                for name, arm in arms_of(case, call, vllm, suite.sweep).items()
                if wanted is None or name in wanted or name == "preattn"
            }
            check(case, call, arms, tokens)
            if isinstance(case, ProjectCase):
                _randomise(call)
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
    index = torch.cuda.current_device()
    return {
        "device": torch.cuda.get_device_name(index),
        "driver": driver(),
        "torch": torch.__version__,
        "triton": importlib.metadata.version("triton"),
        "python": platform.python_version(),
        "preattn": preattn.__version__,
        "commit": commit(),
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


def commit() -> str:
    """Of the checkout; a copy without history is told by PREATTN_COMMIT."""
    return os.environ.get("PREATTN_COMMIT") or _run("git", "rev-parse", "HEAD")


def driver() -> str:
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

    A run of some suites or arms, or a quick one, goes into a folder ``partial`` there: it does not replace results.

    ``report`` is called with each row as it comes.

    Raises:
        RuntimeError: there is no CUDA GPU.
        CheckFailed: an arm's bytes are wrong; no file is written.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("bench times CUDA graphs and needs a CUDA GPU; this machine has none")
    vllm = peers.load(options.peers)
    head = header(vllm)
    complete = not (options.suites or options.arms or options.quick)
    folder = options.output / slug(head["device"]) / ("" if complete else "partial")
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
