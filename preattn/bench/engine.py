"""The proof inside vLLM: the stock engine, the plug-in, and the plug-in in shadow mode, on small models of true shape.

    python -m preattn.bench.engine --output results/engine.json --models deepseek-v3.2-64
    python -m preattn.bench.engine --arms stock plugin --execution graphs --rounds 4 --add
    python -m preattn.bench.engine --report results/engine.json

Models are random, of a few dense layers, with the attention dimensions of the real ones. Every arm is a process of its
own and writes what it has as it goes, and the document of all is written after each, so that a run that is cut short
loses its last arm at most:

- ``stock`` and ``plugin``: answers, time to first token, time per output token, GPU time by kernel, GPU
  synchronisations and compilations once requests are served; eager and with CUDA graphs. In even rounds the plug-in
  goes first. A short prompt and a decode step wait for the host, so each arm also times two fixed pieces of host work:
  where those differ, the arms had different hosts.
- ``shadow``: eager, as many engine steps as asked for, every call beside the engine's own op.

The document keeps what tables need; logs, models and each arm's whole result stay in the scratch folder.

vLLM has to be importable. The plug-in need not be installed: its entry point is laid out beside the models.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from .engine_arm import MODELS, SEQUENCES, Spec

ARMS = ("stock", "plugin", "shadow")
Run = dict[str, Any]


def lay_out_entry_point(folder: Path) -> None:
    """What an installed package says of the plug-in, for a process that finds the package by its path alone."""
    info = folder / "preattn-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: preattn\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\npreattn = preattn.integrations.vllm:register\n")


def installed() -> bool:
    """Whether an installed package gives the entry point."""
    return any(point.name == "preattn" for point in entry_points(group="vllm.general_plugins"))


def variables(arm: str, scratch: Path) -> dict[str, str]:
    """The environment of an arm's process."""
    paths = [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")]
    if not installed():
        lay_out_entry_point(scratch / "entry_point")
        paths.insert(1, str(scratch / "entry_point"))
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([path for path in paths if path]),
        "VLLM_PLUGINS": "" if arm == "stock" else "preattn",
        "PREATTN_SHADOW": "1" if arm == "shadow" else "0",
        "PREATTN_TRACE": "1" if arm == "shadow" else "0",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_DEEP_GEMM_WARMUP": "skip",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
        "HF_HUB_OFFLINE": "1",
    }


def child(
    verb: str, argument: str, *, environment: dict[str, str], log: Path, limit: float, module: str = "engine_arm"
) -> str | None:
    """Run a verb of a module beside this one in a process of its own; the end of its output where it fails."""
    command = [sys.executable, "-m", f"{__package__}.{module}", verb, argument]
    with log.open("w") as output:
        try:
            subprocess.run(command, env=environment, stdout=output, stderr=output, check=True, timeout=limit)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            return f"{error}\n{log.read_text()[-4000:]}"
    return None


def specs(options: argparse.Namespace) -> Iterator[Spec]:
    """The processes to run: round by round, the plug-in first in even ones; then shadow mode."""
    forms = {"eager": (False,), "graphs": (True,), "both": (False, True)}[options.execution]
    timed = [arm for arm in options.arms if arm != "shadow"]
    for model in options.models:
        turns = [
            (arm, graphs, turn)
            for turn in range(1, 1 + options.rounds)
            for graphs in forms
            for arm in sorted(timed, key=ARMS.index, reverse=turn % 2 == 0)
        ]
        for arm, graphs, turn in [*turns, *[("shadow", False, 1) for arm in options.arms if arm == "shadow"]]:
            result = options.scratch / f"{model}-{arm}-{'graphs' if graphs else 'eager'}-{turn}.json"
            yield Spec(
                model,
                arm,
                graphs,
                str(options.scratch / model),
                str(result),
                tokens=tuple(options.tokens),
                steps=options.steps,
                profile=not options.no_profile,
                round=turn,
            )


def main(arguments: list[str] | None = None) -> int:
    """Run the arms, write one document of their results, print its tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("results/engine.json"))
    parser.add_argument("--scratch", type=Path, default=Path("build/engine"), help="models, logs and partial results")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=["deepseek-v3.2-64"])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--execution", choices=("eager", "graphs", "both"), default="both")
    parser.add_argument("--tokens", nargs="+", type=int, default=[17, 1024, 16384], help="prompts whose TTFT is taken")
    parser.add_argument("--steps", type=int, default=1000, help="engine steps in shadow mode")
    parser.add_argument("--rounds", type=int, default=1, help="processes of each timed arm")
    parser.add_argument("--limit", type=float, default=240, help="seconds of one process")
    parser.add_argument("--no-profile", action="store_true")
    parser.add_argument("--add", action="store_true", help="keep the runs of the output file that are not run again")
    parser.add_argument("--collect", type=Path, metavar="SCRATCH", help="run nothing: write the document of these arms")
    parser.add_argument("--report", type=Path, metavar="FILE", help="run nothing: print the tables of a document")
    options = parser.parse_args(arguments)
    if options.report is not None:
        print(report(json.loads(options.report.read_text())["runs"]))
        return 0
    if options.collect is not None:
        collected = [json.loads(path.read_text()) for path in sorted(options.collect.glob("*.json"))]
        write(options.output, collected, keep=options.add)
        print(report(json.loads(options.output.read_text())["runs"]))
        return 0
    options.scratch = options.scratch.resolve()
    options.scratch.mkdir(parents=True, exist_ok=True)
    runs: list[Run] = []
    for spec in specs(options):
        environment = variables(spec.arm, options.scratch)
        log = Path(spec.result).with_suffix(".log")
        Path(spec.result).unlink(missing_ok=True)
        failure = None
        if not (Path(spec.folder) / "config.json").is_file():
            failure = child("make", spec.model + "=" + spec.folder, environment=environment, log=log, limit=120)
        if failure is None:
            failure = child("arm", json.dumps(asdict(spec)), environment=environment, log=log, limit=options.limit)
        path = Path(spec.result)
        found = json.loads(path.read_text()) if path.is_file() else {"name": spec.name, **asdict(spec)}
        runs.append(found if failure is None else found | {"failure": failure})
        write(options.output, runs, keep=options.add)
        print(f"{spec.name}: {'done' if failure is None else 'FAILED'} in {found.get('seconds', '?')} s", flush=True)
        if failure is not None:
            print(failure[-1500:], flush=True)
    print(report(json.loads(options.output.read_text())["runs"]))
    return 0 if all("failure" not in run for run in runs) else 1


# -- the document ----------------------------------------------------------------------------------------------


def write(path: Path, runs: list[Run], *, keep: bool = False) -> None:
    """Write the document of some arms; with ``keep``, beside those that the file holds under other names."""
    found = [compact(run, _stock_of(run, runs)) for run in runs]
    names = {run["name"] for run in found}
    kept = json.loads(path.read_text())["runs"] if keep and path.is_file() else []
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(run) for run in [*[run for run in kept if run["name"] not in names], *found]]
    listed = ",\n".join(lines)  # an arm a line
    path.write_text(f'{{"sequences": {SEQUENCES}, "runs": [\n{listed}\n]}}\n')


def compact(run: Run, stock: Run | None = None) -> Run:
    """What tables need of an arm: no path, and of the answers how they compare.

    Args:
        run: an arm's whole result.
        stock: the stock arm of the same model, execution and round, whose answers are compared.
    """
    short = {name: run[name] for name in ("name", "model", "arm", "graphs", "round")}
    for name in ("complete", "failure", "start_s", "seconds", "host", "active", "plans", "steps", "shadow"):
        if name in run and not (name == "steps" and run["arm"] != "shadow"):
            short[name] = run[name]
    if "environment" in run:
        short["environment"] = {name: value for name, value in run["environment"].items() if name != "plugins"}
    short["ttft"] = {tokens: _rounded(times) for tokens, times in run.get("ttft", {}).items()}
    if "tpot" in run:
        short["tpot"] = _rounded(run["tpot"])
    for part in ("profile_prefill", "profile_decode", "profile_host", "prologue", "decode"):
        if part in run:
            short[part] = run[part]
    short["compilations"] = {
        "ours_at_start": run.get("compiled_at_start"),
        "ours_later": run.get("compiled_later"),
        "first_requests": _total(run, "first_requests", "compilations"),
        "served": _total(run, "served", "compilations"),
    }
    short["synchronisations"] = {
        "served": _total(run, "served", "synchronisations"),
        "of_ours": run.get("served", {}).get("of_ours"),
    }
    if stock is not None and "tokens_answered" in run and "tokens_answered" in stock:
        same = [a == b for a, b in zip(run["tokens_answered"], stock["tokens_answered"], strict=True)]
        pairs = zip(run["logprobs"], stock["logprobs"], strict=True)
        apart = [abs(a[token] - b[token]) for a, b in pairs for token in a if token in b]
        short["answers"] = {"equal": sum(same), "of": len(same), "logprobs_apart": max(apart, default=None)}
    return short


def _rounded(times: dict[str, float]) -> dict[str, float]:
    return {name: round(times[name], 4) for name in ("ms", "least", "most") if name in times}


def _total(run: Run, part: str, kind: str) -> int | None:
    return sum(run[part][kind].values()) if part in run else None


def _stock_of(run: Run, runs: list[Run]) -> Run | None:
    """The stock arm that a plug-in arm is beside."""
    if run["arm"] != "plugin":
        return None
    same = ("model", "graphs", "round")
    return next((r for r in runs if r["arm"] == "stock" and all(r[name] == run[name] for name in same)), None)


# -- its tables ------------------------------------------------------------------------------------------------


def report(runs: list[Run]) -> str:
    """The tables of a document, in Markdown: the plug-in beside stock, where the GPU's time goes, shadow mode."""
    parts = []
    for model in dict.fromkeys(run["model"] for run in runs):
        for graphs in (False, True):
            arms = {
                arm: [r for r in runs if (r["model"], r["graphs"], r["arm"]) == (model, graphs, arm)]
                for arm in ("stock", "plugin")
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
    served, processes = [run for run in runs if run["arm"] in ARMS[:2] and run.get("complete")], set()
    for model, graphs in dict.fromkeys((run["model"], run["graphs"]) for run in served):
        arms = [[r for r in served if (r["model"], r["graphs"], r["arm"]) == (model, graphs, arm)] for arm in ARMS[:2]]
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


if __name__ == "__main__":
    sys.exit(main())
