"""What is measured inside the engine's workers, one for each tensor-parallel rank, and how an arm asks for it.

The engine adds :class:`Probe` to its workers (``worker_extension_cls``) and calls its methods by name in every rank: in
this process where there is one rank, in a process of its own for each where there are more.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
import statistics
import sys
import threading
import time
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

KERNELS, GAPS = 25, 8
"""Kernels of a profile that are kept, and times between them."""
COLLECTIVE = "ncclDevKernel"
"""How the names of NCCL's kernels begin."""
PROLOGUE = "vllm.models.deepseek_v32.attention", ("fused_norm_rope", "fused_q")
"""The module whose layers call the prologue, and by what names, whosever they are."""
CUTEDSL = "vllm.models.deepseek_v32.nvidia.ops.fused_q_cutedsl"
"""A module that the stock ``fused_q`` imports, and that does not import without CuTeDSL."""


class Probe:
    """What a worker answers. Names are long since the worker's own class has many."""

    def init_worker_extension(self) -> None:
        """The engine's hook, called of a worker that has its device and not yet its model."""
        if importlib.util.find_spec("cutlass") is None:
            _stand_in_for_cutedsl()

    def probe_begin(self, kind: str) -> None:
        """Begin to measure: one of :data:`KINDS`."""
        context = KINDS[kind]()
        _begun.append((context, context.__enter__()))

    def probe_end(self) -> dict[str, Any]:
        """End what was begun last, and return what it found."""
        context, found = _begun.pop()
        context.__exit__(None, None, None)
        return found

    def probe_state(self) -> dict[str, Any]:
        """Versions, our kernels compiled so far and, where plug-ins are loaded, whether all patches of ours hold."""
        from ..kernels import launch

        found = {"environment": environment(), "compiled": launch.compilations()}
        if os.environ.get("VLLM_PLUGINS") != "":  # unset, the engine loads all
            from ..integrations.vllm import plugin, summary

            found |= {"active": plugin.active(), **summary()}
        return found

    def probe_host(self) -> dict[str, float]:
        """:func:`host_speed`, here."""
        return host_speed()


class Ranks:
    """The ranks of an engine, asked all at once."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    def state(self) -> list[dict[str, Any]]:
        """:meth:`Probe.probe_state` of each."""
        return self._ask("probe_state")

    def host(self) -> list[dict[str, float]]:
        """:func:`host_speed` of each, at the same time."""
        return self._ask("probe_host")

    def during(self, kind: str, run: Callable[[], Any]) -> list[dict[str, Any]]:
        """What each rank finds while ``run`` runs here, of one of :data:`KINDS`.

        It is ended where ``run`` raises, too; a rank that cannot begin is the engine's end.
        """
        self._ask("probe_begin", kind)
        try:
            run()
        finally:
            found = self._ask("probe_end")
        return found

    def _ask(self, method: str, *arguments: Any) -> list[Any]:
        answers: list[Any] = self._llm.collective_rpc(method, args=arguments)
        return answers


def environment() -> dict[str, Any]:
    """Device, driver and versions of this process."""
    import torch
    import triton
    import vllm

    import preattn

    from . import run

    return {
        "device": torch.cuda.get_device_name(),
        "driver": run.driver(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "vllm": vllm.__version__,
        "preattn": preattn.__version__,
        "commit": run.commit(),
        "plugins": os.environ.get("VLLM_PLUGINS"),
    }


@contextmanager
def watch() -> Iterator[dict[str, Any]]:
    """Within this context, count GPU synchronisations by who asked for them, and Triton compilations by kernel."""
    import torch
    from triton import knobs

    found: dict[str, Any] = {"synchronisations": {}, "of_ours": 0, "compilations": {}}
    compiled: Counter[str] = Counter()
    before = knobs.runtime.jit_post_compile_hook

    def note(*args: Any, **event: Any) -> Any:
        compiled[str(getattr(event.get("fn"), "name", event.get("repr", "?")))] += 1
        return before(*args, **event) if before is not None else None

    knobs.runtime.jit_post_compile_hook = note
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield found
    finally:
        torch.cuda.set_sync_debug_mode("default")
        knobs.runtime.jit_post_compile_hook = before
    callers = Counter(
        f"{inside(w.filename)}:{w.lineno}" for w in caught if "synchronizing CUDA operation" in str(w.message)
    )
    found["synchronisations"] = dict(callers.most_common())
    found["of_ours"] = sum([count for caller, count in callers.items() if caller.startswith("preattn/")])
    found["compilations"] = dict(compiled)


@contextmanager
def prologue_calls() -> Iterator[dict[str, float]]:
    """Within this context, count Python's calls of the prologue's functions, and the host's milliseconds in them.

    A replayed full graph calls none: there a plug-in cannot be what a decode step waits for.
    """
    module, names = importlib.import_module(PROLOGUE[0]), PROLOGUE[1]
    found = {"calls": 0, "ms": 0.0}

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **more)
            finally:
                found["ms"] += (time.perf_counter() - start) * 1e3
                found["calls"] += 1

        return call

    before = {name: getattr(module, name) for name in names}
    try:
        for name, function in before.items():
            setattr(module, name, timed(function))
        yield found
    finally:
        for name, function in before.items():
            setattr(module, name, function)


@contextmanager
def kernel_times() -> Iterator[dict[str, Any]]:
    """Within this context, the GPU's milliseconds, its kernels by time and where it was idle between them.

    As :func:`by_time` and :func:`between` have them.
    """
    import torch

    found: dict[str, Any] = {}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        yield found
    found |= by_time([(event.key, event.count, event.self_device_time_total / 1e3) for event in profile.key_averages()])
    on_gpu = [event for event in profile.events() if event.device_type.name == "CUDA"]
    found |= between([(event.name, event.time_range.start / 1e3, event.time_range.end / 1e3) for event in on_gpu])


def by_time(kernels: list[tuple[str, int, float]]) -> dict[str, Any]:
    """Kernels (name, calls, milliseconds) by time, with their sum.

    Collectives count as kernels but not towards the sum, for most of their time they wait for other ranks.
    """
    ordered = sorted([kernel for kernel in kernels if kernel[2] > 0], key=lambda kernel: -kernel[2])
    own = sum([ms for name, _, ms in ordered if not name.startswith(COLLECTIVE)])
    rows = [{"kernel": name[:120], "calls": calls, "ms": round(ms, 4)} for name, calls, ms in ordered[:KERNELS]]
    return {"gpu_ms": round(own, 3), "kernels": rows}


def between(kernels: list[tuple[str, float, float]]) -> dict[str, Any]:
    """What lies between kernels (name, start and end in milliseconds): no kernel of any stream runs then.

    A step whose kernels and idle time sum to less than it takes spends the rest before its first kernel and after its
    last.
    """
    gaps: list[dict[str, Any]] = []
    last, busy_until = "", math.inf
    for name, start, end in sorted(kernels, key=lambda kernel: kernel[1]):
        if start > busy_until:
            gaps.append({"after": last[:120], "before": name[:120], "ms": round(start - busy_until, 4)})
        if not last or end > busy_until:
            last, busy_until = name, end
    gaps.sort(key=lambda gap: -gap["ms"])
    return {"idle_ms": round(sum([gap["ms"] for gap in gaps]), 3), "gaps": gaps[:GAPS]}


KINDS: dict[str, Callable[[], AbstractContextManager[dict[str, Any]]]] = {
    "watch": watch,
    "prologue": prologue_calls,
    "kernels": kernel_times,
}
"""What a rank can measure while the engine runs."""
_begun: list[tuple[AbstractContextManager[dict[str, Any]], dict[str, Any]]] = []


def host_speed(repeats: int = 5) -> dict[str, float]:
    """Milliseconds of two fixed pieces of this process's host work, medians: a Python loop, and 1,000 tiny launches.

    Short prompts and decode steps wait for the host, whose speed differs between processes of one machine by more than
    the arms do: compare arms whose figures here are alike. ``..._cpu_ms`` is what this thread had of a processor: less
    than the whole where another thread holds the interpreter, or another process the processor; all of it where the
    processor is slow. ``threads`` of the process beside the cores it may use.
    """
    import torch

    def loop() -> None:
        total = 0
        for value in range(500_000):
            total += value & 3

    one = torch.zeros(1, device="cuda")

    def launches() -> None:
        for _ in range(1000):
            one.add_(1)

    found = {"threads": float(threading.active_count()), "cores": float(len(os.sched_getaffinity(0)))}
    for name, work in (("python", loop), ("launches", launches)):
        samples = []
        for _ in range(repeats):
            torch.cuda.synchronize()
            start, used = time.perf_counter(), time.thread_time()
            work()
            samples.append(((time.perf_counter() - start) * 1e3, (time.thread_time() - used) * 1e3))
        median = statistics.median_low([wall for wall, _ in samples])
        found[f"{name}_ms"] = round(median, 3)
        found[f"{name}_cpu_ms"] = round(dict(samples)[median], 3)
    return found


def inside(filename: str) -> str:
    """A file's path from its package on."""
    parts = Path(filename).parts
    for package in ("preattn", "vllm", "torch"):
        if package in parts:
            return "/".join(parts[len(parts) - 1 - parts[::-1].index(package) :])
    return parts[-1]


def _stand_in_for_cutedsl() -> None:
    """The stock ``fused_q`` imports a CuTeDSL module before it asks for the device; below SM100 it never uses it."""
    module = types.ModuleType(CUTEDSL)
    module.__dict__.update(fused_q_cutedsl=None, is_fused_q_cutedsl_supported=lambda *args, **kwargs: False)
    sys.modules[CUTEDSL] = module
