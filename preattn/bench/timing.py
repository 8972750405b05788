"""Times of GPU work: CUDA-graph replays, with a cold or a warm L2, against the copy rate of the same run.

A graph takes the host out of the picture. *Cold*: one call a replay, after a buffer larger than any L2 has
been overwritten, all arms taking turns. *Warm*: :data:`WARM_CALLS` calls in a row in one graph. With
``cupti-python`` installed, cold times are the kernels' own durations as the GPU recorded them; CUDA events
around the replay, the fallback, add about a microsecond of launch latency to each.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

WARM_CALLS = 20
WAKE_SECONDS = 0.15
"""A GPU that idled while the CPU computed a reference runs the first milliseconds about 10% slower."""
FLUSH_BYTES = 256 << 20
"""Larger than any current L2 (50 MB on an H200, 126 MB on a B200)."""


@dataclass(frozen=True)
class Times:
    """Microseconds of one call: median, 10th and 90th percentile."""

    median_us: float
    p10_us: float
    p90_us: float

    @classmethod
    def of(cls, samples: list[float]) -> Times:
        """Summarise samples in microseconds."""
        deciles = statistics.quantiles(samples, n=10, method="inclusive")
        return cls(statistics.median(samples), deciles[0], deciles[-1])


@lru_cache
def _flush_buffer(device: int) -> torch.Tensor:
    return torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)


def capture(function: Callable[[], Any], calls: int = 1) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Run once on a side stream (compiling what has to be), then capture ``calls`` calls; keeps the last result."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            result = function()
    return graph, result


def cold(arms: Mapping[str, Callable[[], Any]], repeats: int = 40) -> dict[str, Times]:
    """One call of each arm with nothing of its memory in the L2, the arms taking turns."""
    graphs = {name: capture(function)[0] for name, function in arms.items()}
    return _together(graphs, repeats, flush=_flush_buffer(torch.cuda.current_device()))


def warm(arms: Mapping[str, Callable[[], Any]], repeats: int = 20) -> dict[str, Times]:
    """One call of each arm out of a row of them, launch gaps inside a graph included."""
    graphs = {name: capture(function, WARM_CALLS)[0] for name, function in arms.items()}
    rows = _together(graphs, repeats, flush=None)
    return {
        name: Times(t.median_us / WARM_CALLS, t.p10_us / WARM_CALLS, t.p90_us / WARM_CALLS) for name, t in rows.items()
    }


def _together(graphs: Mapping[str, torch.cuda.CUDAGraph], repeats: int, flush: torch.Tensor | None) -> dict[str, Times]:
    """Replay graphs in turns, so that all see the same clocks, after waking the GPU from its idle ones."""
    busy = _flush_buffer(torch.cuda.current_device())
    deadline = time.perf_counter() + WAKE_SECONDS
    while time.perf_counter() < deadline:
        for graph in graphs.values():
            graph.replay()
        for _ in range(20):  # some milliseconds of full load, however short the graphs are
            busy.fill_(1)
        torch.cuda.synchronize()
    pairs: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in graphs}
    with _kernel_records() as records:
        for _ in range(repeats):
            for name, graph in graphs.items():
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                if flush is not None:
                    flush.fill_(1)
                start.record()
                graph.replay()
                end.record()
                pairs[name].append((start, end))
        torch.cuda.synchronize()
    if flush is not None and (spans := _spans_between_fills(records, repeats * len(graphs))) is not None:
        return {name: Times.of(spans[index :: len(graphs)]) for index, name in enumerate(graphs)}
    return {name: Times.of([s.elapsed_time(e) * 1e3 for s, e in timed]) for name, timed in pairs.items()}


def host(arms: Mapping[str, Callable[[], Any]], repeats: int = 300) -> dict[str, Times]:
    """Host time of one eager call of each arm, the GPU never waited for (small steps: the queue does not fill)."""
    result = {}
    for name, function in arms.items():
        for _ in range(20):
            function()
        torch.cuda.synchronize()
        samples = []
        for index in range(repeats):
            start = time.perf_counter()
            function()
            samples.append((time.perf_counter() - start) * 1e6)
            if index % 50 == 49:
                torch.cuda.synchronize()
        torch.cuda.synchronize()
        result[name] = Times.of(samples)
    return result


@lru_cache
def timer_name() -> str:
    """What cold times are taken with: ``cupti`` or ``events``."""
    try:
        from cupti import cupti  # noqa: F401
    except ImportError:
        return "events"
    return "cupti"


Span = tuple[int, int, str]
"""A kernel's start and end in nanoseconds, and its name."""


@contextmanager
def _kernel_records() -> Iterator[list[Span]]:
    """The kernels that run within the context, once it has ended; none without CUPTI."""
    spans: list[Span] = []
    if timer_name() == "events":
        yield spans
        return
    from cupti import cupti

    def completed(activities: Any) -> None:
        spans.extend([(activity.start, activity.end, activity.name) for activity in activities])

    cupti.activity_register_callbacks(lambda: (8 << 20, 0), completed)
    cupti.activity_enable(cupti.ActivityKind.CONCURRENT_KERNEL)
    try:
        yield spans
        cupti.activity_flush_all(1)
    finally:
        cupti.activity_disable(cupti.ActivityKind.CONCURRENT_KERNEL)


def _spans_between_fills(spans: list[Span], groups: int) -> list[float] | None:
    """Microseconds from the first to the last kernel after each flush; None where records are missing."""
    found: list[list[tuple[int, int]]] = []
    for start, end, name in sorted(spans):
        if "FillFunctor" in name:
            found.append([])
        elif found:
            found[-1].append((start, end))
    if len(found) != groups or not all(found):
        return None  # events are the honest fallback
    return [(max(end for _, end in group) - group[0][0]) / 1e3 for group in found]


def _eager(function: Callable[[], Any], repeats: int = 30) -> float:
    """Median microseconds of an eager call between events: for copies, whose graph nodes take a slower path."""
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    function()
    for start, end in pairs:
        start.record()
        function()
        end.record()
    torch.cuda.synchronize()
    return Times.of([start.elapsed_time(end) * 1e3 for start, end in pairs]).median_us


@lru_cache
def copy_rate(device: int) -> float:
    """GB/s (read + written) of a 1 GiB device copy."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    source.random_(0, 256)
    return 2 * source.numel() / _eager(lambda: target.copy_(source)) / 1e3


@lru_cache
def memset_rate(device: int) -> float:
    """GB/s written by a 1 GiB fill."""
    target = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    return target.numel() / _eager(lambda: target.zero_()) / 1e3
