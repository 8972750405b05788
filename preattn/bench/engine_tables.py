"""The tables of what :mod:`preattn.bench.engine` wrote, in Markdown."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from .engine_arm import SEQUENCES, Run

TIMED = ("stock", "plugin")
"""The arms whose times stand beside each other."""


def report(runs: list[Run]) -> str:
    """The tables of a document, in Markdown: the plug-in beside stock, where the GPU's time goes, shadow mode."""
    parts = []
    for model in dict.fromkeys(run["model"] for run in runs):
        for graphs in (False, True):
            arms = {
                arm: [r for r in runs if (r["model"], r["graphs"], r["arm"]) == (model, graphs, arm)] for arm in TIMED
            }
            if any(arms.values()):
                title = f"**{model}, {'CUDA graphs' if graphs else 'eager'}**, {_rounds(arms)}, {_commits(arms)}"
                parts += [f"{title}\n\n{_times(arms)}", *_profiles(arms)]
        parts += [_shadow(run) for run in runs if run["model"] == model and run["arm"] == "shadow"]
    parts.append("\n".join(dict.fromkeys(_where(run["environment"]) for run in runs if "environment" in run)))
    parts += [f"{run['name']} failed: {run['failure'].splitlines()[0]}" for run in runs if "failure" in run]
    return "\n\n".join(parts)


def overview(runs: list[Run]) -> str:
    """One line for each model and execution that both arms have served: the longest prompt, a decode step.

    TPOT waits for the host, which differs between processes by more than the arms do, and so stands there with its
    spread.
    """
    lines = [
        "| model | execution | TTFT | preattn | ratio | GPU time, ratio | TPOT, least to most | preattn |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    served, processes = [run for run in runs if run["arm"] in TIMED and run.get("complete")], set()
    for model, graphs in dict.fromkeys((run["model"], run["graphs"]) for run in served):
        arms = [[r for r in served if (r["model"], r["graphs"], r["arm"]) == (model, graphs, arm)] for arm in TIMED]
        if all(arms):
            processes |= {len(found) for found in arms}
            ttft, gpu = (_compared(arms, value) for value in (_longest, _gpu_ms))
            tpot = " | ".join(_spread([run["tpot"] for run in found]) for found in arms)
            lines.append(
                f"| {model} | {'CUDA graphs' if graphs else 'eager'} | {ttft} | {gpu.rpartition('| ')[2]} | {tpot} |"
            )
    commits = ", ".join(dict.fromkeys(run["environment"]["commit"][:10] for run in served))
    where = dict.fromkeys(f"{run['environment']['device']}, vLLM {run['environment']['vllm']}" for run in served)
    each = " to ".join(map(str, sorted({min(processes, default=0), max(processes, default=0)})))
    return "\n".join(lines) + f"\n\nMilliseconds, processes of each arm: {each}; {'; '.join(where)}, preattn {commits}."


def _compared(arms: list[list[Run]], value: Callable[[Run], float | None]) -> str:
    """Both arms' medians and their ratio, as cells; dashes where one of them has none."""
    known = [[found for run in runs if (found := value(run)) is not None] for runs in arms]
    if not all(known):
        return "– | – | –"
    stock, ours = (statistics.median(times) for times in known)
    return f"{stock:.2f} | {ours:.2f} | {ours / stock:.3f}"


def _longest(run: Run) -> float:
    return float(run["ttft"][max(run["ttft"], key=int)]["ms"])


def _gpu_ms(run: Run) -> float | None:
    return float(run["profile_prefill"]["gpu_ms"]) if "profile_prefill" in run else None


def _rounds(arms: dict[str, list[Run]]) -> str:
    counts = {len(found) for found in arms.values()}
    return f"{max(counts)} process{'es' if max(counts) > 1 else ''} of each" if len(counts) == 1 else "unpaired"


def _commits(arms: dict[str, list[Run]]) -> str:
    """Which preattn the arms ran beside, or as."""
    every = [run["environment"]["commit"][:10] for found in arms.values() for run in found if "environment" in run]
    return f"preattn {', '.join(dict.fromkeys(every))}"


def _where(environment: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {environment[name]}" for name in ("driver", "torch", "triton", "vllm", "commit"))
    return f"{environment['device']}; {versions}"


def _times(arms: dict[str, list[Run]]) -> str:
    """Milliseconds of both arms: the median process's median, and the least and most of all."""
    every = [run for found in arms.values() for run in found]
    tokens = dict.fromkeys(tokens for run in every for tokens in run["ttft"])
    rows: list[tuple[str, Callable[[Run], dict[str, float] | None]]] = [
        (f"TTFT, {int(count):,} tokens", lambda run, count=count: run["ttft"].get(count))  # type: ignore[misc]
        for count in tokens
    ]
    rows += [
        (f"TPOT, {SEQUENCES} sequences", lambda run: run.get("tpot")),
        ("an engine step of these, 10 to 90% of them", _step),
        ("the thread's share of a processor in it", lambda run: _alone(run, "decode", "cpu_ms")),
        ("GPU time, longest prompt", lambda run: _alone(run, "profile_prefill", "gpu_ms")),
        ("GPU idle between its kernels, longest prompt", lambda run: _alone(run, "profile_prefill", "idle_ms")),
        ("GPU time, decode step", lambda run: _alone(run, "profile_decode", "step_ms")),
        ("host within the prologue's calls, 1,024 tokens", lambda run: _alone(run, "prologue", "prefill_ms")),
        ("host, a Python loop", lambda run: _alone(run, "host", "python_ms")),
        ("of it with a processor", lambda run: _alone(run, "host", "python_cpu_ms")),
        ("host, 1,000 launches", lambda run: _alone(run, "host", "launches_ms")),
    ]
    lines = ["| ms | stock | preattn | preattn / stock |", "|---|---:|---:|---:|"]
    for name, value in rows:
        found = {arm: [times for run in runs if (times := value(run))] for arm, runs in arms.items()}
        if not any(found.values()):
            continue
        cells = [_spread(times) for times in found.values()]
        both = [statistics.median([t["ms"] for t in times]) for times in found.values() if times]
        lines.append(f"| {name} | {' | '.join(cells)} | {f'{both[1] / both[0]:.3f}' if len(both) == 2 else ''} |")
    counts: list[tuple[str, str, str]] = [
        ("the prologue's calls in 8 decode steps", "prologue", "decode_calls"),
        ("GPU synchronisations while serving", "synchronisations", "served"),
        ("of these, asked for by preattn", "synchronisations", "of_ours"),
        ("kernels compiled by the first requests", "compilations", "first_requests"),
        ("kernels compiled while serving", "compilations", "served"),
        ("of preattn's, after start", "compilations", "ours_later"),
    ]
    for name, part, kind in counts:
        cells = [_counts(run.get(part, {}).get(kind) for run in runs) for runs in arms.values()]
        lines.append(f"| {name} | {' | '.join(cells)} | |")
    for run in arms["plugin"]:
        if "answers" in run:
            said = "{equal} of {of} greedy answers equal, first log-probabilities at most {logprobs_apart:.3g} apart"
            lines.append(f"| {run['name']} | | {said.format(**run['answers'])} | |")
    return "\n".join(lines)


def _alone(run: Run, part: str, name: str) -> dict[str, float] | None:
    value = run.get(part, {}).get(name)
    return None if value is None else {"ms": value}


def _step(run: Run) -> dict[str, float] | None:
    found = run.get("decode")
    return None if found is None else {"ms": found["ms"], "least": found["p10"], "most": found["p90"]}


def _spread(times: list[dict[str, float]]) -> str:
    if not times:
        return "not run"
    median = statistics.median([t["ms"] for t in times])
    least, most = (edge([t.get(name, t["ms"]) for t in times]) for edge, name in ((min, "least"), (max, "most")))
    return f"{median:.2f}" if least == most else f"{median:.2f} ({least:.2f} to {most:.2f})"


def _counts(values: Iterable[int | None]) -> str:
    known = sorted({value for value in values if value is not None})
    return " to ".join(dict.fromkeys([str(known[0]), str(known[-1])])) if known else "not run"


@dataclass(frozen=True)
class _Profile:
    """A profile's table: the part of a run that it shows, and the least share of the total that a row has to have."""

    part: str
    title: str
    rows: str = "kernels"
    total: str = "gpu_ms"
    least: float = 0.005

    def name(self, row: dict[str, Any]) -> str:
        return _kernel(row["kernel"]) if self.rows == "kernels" else _function(row["function"])


_PROFILES = (
    _Profile("profile_prefill", "GPU ms, longest prompt"),
    _Profile("profile_decode", "GPU ms, short prompts and 8 decode steps"),
    _Profile("profile_host", "host ms, short prompts and 32 decode steps, profiled", "functions", "host_ms", 0.01),
)


def _profiles(arms: dict[str, list[Run]]) -> Iterator[str]:
    """Where the GPU's time goes, and the host's, of the first process of each arm that was profiled."""
    for kind in _PROFILES:
        found = {arm: next((run[kind.part] for run in runs if kind.part in run), None) for arm, runs in arms.items()}
        if None in found.values():
            continue
        times: dict[str, dict[str, float]] = {}
        for arm, profile in found.items():
            assert profile is not None
            for row in profile[kind.rows]:
                times.setdefault(kind.name(row), dict.fromkeys(arms, 0.0))[arm] += row["ms"]
        lines = [f"| {kind.title} | stock | preattn |", "|---|---:|---:|"]
        shown = kind.least * max(profile[kind.total] for profile in found.values() if profile is not None)
        for name, mine in sorted(times.items(), key=lambda item: -max(item[1].values())):
            if max(mine.values()) >= shown:
                lines.append(f"| `{name}` | {' | '.join(f'{ms:.2f}' if ms else '' for ms in mine.values())} |")
        yield "\n".join(lines)


def _function(name: str) -> str:
    """A Python function without where its package lies, and without an address, which is another in every process."""
    return re.sub(r" at 0x[0-9a-f]+|^.*(?=\btriton/)", "", name)


def _kernel(name: str) -> str:
    """A kernel's name without its return type, namespaces, template arguments and parameters."""
    name = re.sub(r"^std::enable_if<.*::type ", "", name)
    if name.startswith(("Memcpy", "Memset")):
        return name
    return re.split(r"[<(]", name.removeprefix("void "))[0].rpartition("::")[2]


def _shadow(run: Run) -> str:
    """The tallies of a shadow arm."""
    lines = [
        f"**{run['model']}, shadow mode**, {run.get('steps', 0):,} engine steps, {_commits({'shadow': [run]})}",
        "",
        "| output | calls | elements | mismatches | norm roundings | scale edges | division edges |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for output, tally in run.get("shadow", {}).items():
        kinds = ("calls", "elements", "mismatches", "norm_flips", "scale_edges", "division_edges")
        counts = [tally.get(kind, 0) for kind in kinds]
        lines.append(f"| {output} | {' | '.join(f'{count:,}' for count in counts)} |")
    firsts = [f"{output}: {t['first']}" for output, t in run.get("shadow", {}).items() if t["first"]]
    return "\n".join([*lines, *([""] if firsts else []), *firsts])
