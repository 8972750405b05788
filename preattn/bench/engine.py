"""The proof inside vLLM: the stock engine, the plug-in, and the plug-in in shadow mode, on small models of true shape.

    python -m preattn.bench.engine --output results/engine.json --models deepseek-v3.2-64
    python -m preattn.bench.engine --arms stock plugin --execution graphs --rounds 4 --add
    python -m preattn.bench.engine --report results/engine.json

Models are random, of a few dense layers, with the attention dimensions of the real ones; one is sharded over two ranks,
a GPU and a worker process each. Every arm is a process of its own and writes what it has as it goes, and the document
of all is written after each, so that a run that is cut short loses its last arm at most:

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
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from importlib.metadata import entry_points
from pathlib import Path

from .engine_arm import MODELS, SEQUENCES, Run, Spec
from .engine_tables import report

ARMS = ("stock", "plugin", "shadow")


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


if __name__ == "__main__":
    sys.exit(main())
