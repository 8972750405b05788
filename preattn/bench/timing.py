"""Times of GPU work: CUDA-graph replays, with a cold or a warm L2, against the copy rate of the same run.

A graph takes the host out of the picture. *Cold*: one call a replay, after a buffer larger than any L2 has
been overwritten. *Warm*: :data:`WARM_CALLS` calls in a row in one graph. With ``cupti-python`` installed,
cold times are the kernels' own durations as the GPU recorded them; CUDA events around the replay, the
fallback, add about a microsecond of launch latency to each.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

WARM_CALLS = 20
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


def cold(function: Callable[[], Any], repeats: int = 40) -> Times:
    """One call with nothing of its memory in the L2."""
    graph, _keep = capture(function)
    flush = _flush_buffer(torch.cuda.current_device())

    def replay() -> None:
        flush.fill_(1)
        graph.replay()

    for _ in range(3):
        replay()
    durations = _cupti_durations(replay, repeats)
    return Times.of(durations if durations is not None else _event_durations(flush, graph, repeats))


def warm(function: Callable[[], Any], repeats: int = 20) -> Times:
    """One call out of a row of them, launch gaps inside a graph included."""
    graph, _keep = capture(function, WARM_CALLS)
    for _ in range(3):
        graph.replay()
    return Times.of([t / WARM_CALLS for t in _event_durations(None, graph, repeats)])


def eager_host(function: Callable[[], Any], repeats: int = 300) -> Times:
    """Host time of one eager call, the GPU never waited for (small steps: the queue does not fill)."""
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
    return Times.of(samples)


def _event_durations(flush: torch.Tensor | None, graph: torch.cuda.CUDAGraph, repeats: int) -> list[float]:
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, end in pairs:
        if flush is not None:
            flush.fill_(1)
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) * 1e3 for start, end in pairs]


def timer_name() -> str:
    """What cold times are taken with: ``cupti`` or ``events``."""
    try:
        import cupti  # noqa: F401
    except ImportError:
        return "events"
    return "cupti"


def _cupti_durations(replay: Callable[[], None], repeats: int) -> list[float] | None:
    """GPU time from the first to the last kernel of each replay, the flush's left out; None without CUPTI."""
    if timer_name() == "events":
        return None
    from cupti import cupti

    spans: list[tuple[int, int, int, str]] = []

    def completed(activities: Any) -> None:
        for activity in activities:
            if activity.kind == cupti.ActivityKind.CONCURRENT_KERNEL:
                spans.append((activity.start, activity.end, activity.correlation_id, activity.name))

    def requested() -> tuple[int, int]:
        return 8 << 20, 0

    cupti.activity_register_callbacks(requested, completed)
    cupti.activity_enable(cupti.ActivityKind.CONCURRENT_KERNEL)
    try:
        for _ in range(repeats):
            replay()
        torch.cuda.synchronize()
        cupti.activity_flush_all(1)
    finally:
        cupti.activity_disable(cupti.ActivityKind.CONCURRENT_KERNEL)
    return _spans_between_fills(spans, repeats)


def _spans_between_fills(spans: list[tuple[int, int, int, str]], repeats: int) -> list[float] | None:
    groups: list[list[tuple[int, int]]] = []
    for start, end, _, name in sorted(spans):
        if "FillFunctor" in name:
            groups.append([])
        elif groups:
            groups[-1].append((start, end))
    if len(groups) != repeats or not all(groups):
        return None  # records were lost: events are the honest fallback
    return [(max(end for _, end in group) - group[0][0]) / 1e3 for group in groups]


def _eager(function: Callable[[], Any], repeats: int = 30) -> float:
    """Median microseconds of an eager call between events: for copies, whose graph nodes take a slower path."""
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    function()
    for start, end in pairs:
        start.record()
        function()
        end.record()
    torch.cuda.synchronize()
    return statistics.median([start.elapsed_time(end) * 1e3 for start, end in pairs])


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
