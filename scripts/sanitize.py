"""The registry's cases under each tool of compute-sanitizer: ``python scripts/sanitize.py [TOOL...]``, on a GPU.

The tools watch one pass each, side by side, after a pass that only compiles. What they said goes to
``docs/sanitize.md``. Exit status: 0 where all were clean, 1 otherwise.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
import triton

from preattn.bench.run import commit
from preattn.cases import CASES

ROOT = Path(__file__).parents[1]
RUN = ROOT / "tests" / "gpu" / "run_cases.py"
TABLE = ROOT / "docs" / "sanitize.md"

TOOLS = {
    "memcheck": "accesses outside of allocations, or misaligned",
    "racecheck": "races within shared memory",
    "initcheck": "reads of memory that nothing has written",
    "synccheck": "barriers that not all threads reach",
}
WATCHES_ALLOCATIONS = ("memcheck", "initcheck")
CLEAN = {
    "COMPUTE-SANITIZER",
    "ERROR SUMMARY: 0 errors",
    "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)",
}
"""All that a tool says of a clean pass; one that cannot watch says why, and may end well all the same."""
COMPILERS = 12


@dataclass(frozen=True)
class Outcome:
    """How a tool's pass ended, and its own lines."""

    tool: str
    passed: bool
    seconds: float
    cases: str
    summary: str
    output: str


def environment(tool: str) -> dict[str, str]:
    """Without its allocator's cache, torch hands out memory that the tools see begin, end and be written."""
    path = os.pathsep.join([str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    uncached = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} if tool in WATCHES_ALLOCATIONS else {}
    return {**os.environ, "PYTHONPATH": path, **uncached}


def run_cases(*wrapper: str, tool: str = "", part: str = "0/1") -> subprocess.CompletedProcess[str]:
    """One pass in a process of its own, under a tool or alone."""
    command = [*wrapper, sys.executable, str(RUN), part]
    return subprocess.run(command, cwd=ROOT, env=environment(tool), capture_output=True, text=True, check=False)


def compile_all() -> None:
    """Fill the compiler's cache: under a tool that takes far longer.

    Raises:
        RuntimeError: a case fails without any tool.
    """
    with ThreadPoolExecutor(COMPILERS) as pool:
        for done in pool.map(lambda part: run_cases(part=f"{part}/{COMPILERS}"), range(COMPILERS)):
            if done.returncode:
                raise RuntimeError(done.stdout + done.stderr)


def watch(tool: str) -> Outcome:
    """One pass under a tool."""
    start = time.monotonic()
    done = run_cases("compute-sanitizer", "--tool", tool, "--error-exitcode", "1", tool=tool)
    output = done.stdout + done.stderr
    cases = re.findall(r"^(\d+) cases run on", output, re.MULTILINE)
    said = re.findall(r"^=========\s+(.*\S)", output, re.MULTILINE)
    summary = [line for line in said if "SUMMARY" in line]
    passed = done.returncode == 0 and cases == [str(len(CASES))] and bool(summary) and set(said) <= CLEAN
    return Outcome(
        tool, passed, time.monotonic() - start, cases[-1] if cases else "none", "; ".join(summary) or "none", output
    )


def markdown(outcomes: list[Outcome], version: str) -> str:
    """The page: where it ran, and a row for each tool."""
    rows = [
        f"| {outcome.tool} | {TOOLS[outcome.tool]} | {outcome.cases} | {outcome.summary} | {outcome.seconds:.0f} |"
        for outcome in outcomes
    ]
    lines = [
        "# compute-sanitizer over the registry",
        "",
        f"`make sanitize` at commit {commit()[:12]} on one {torch.cuda.get_device_name()}, torch {torch.__version__}, "
        f"Triton {triton.__version__}, {version}. Every case of the registry once, 17 tokens, compiled kernels.",
        "",
        "| tool | looks for | cases run | its summary | seconds |",
        "| --- | --- | --- | --- | --- |",
        *rows,
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run the tools named, or all."""
    tools = sys.argv[1:] or list(TOOLS)
    if unknown := set(tools) - set(TOOLS):
        print(f"no such tools: {', '.join(sorted(unknown))}; there are {', '.join(TOOLS)}")
        return 2
    said = subprocess.run(["compute-sanitizer", "--version"], capture_output=True, text=True, check=True).stdout
    version = "compute-sanitizer " + (re.findall(r"[Vv]ersion ([\d.]+)", said) or ["of unknown version"])[0]
    compile_all()
    with ThreadPoolExecutor(len(tools)) as pool:
        outcomes = list(pool.map(watch, tools))
    for outcome in outcomes:
        print(f"{outcome.tool}: {'clean' if outcome.passed else 'NOT CLEAN'}, {outcome.summary}")
        if not outcome.passed:
            print(outcome.output[-20_000:])
    if all([outcome.passed for outcome in outcomes]) and set(tools) == set(TOOLS):
        TABLE.write_text(markdown(outcomes, version))
    return 0 if all([outcome.passed for outcome in outcomes]) else 1


if __name__ == "__main__":
    sys.exit(main())
