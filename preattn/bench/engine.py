"""The proof inside vLLM: the stock engine, the plug-in, and the plug-in in shadow mode, on small models of true shape.

    python -m preattn.bench.engine --output results/engine.json --models deepseek-v3.2-64

Models are random, of a few dense layers, with the attention dimensions of the real ones. Every arm is a process of its
own and writes what it has as it goes, so that a run that is cut short loses its last arm at most:

- ``stock`` and ``plugin``: answers, time to first token, time per output token, GPU time by kernel, GPU
  synchronisations and compilations once requests are served; eager and with CUDA graphs.
- ``shadow``: eager, as many engine steps as asked for, every call beside the engine's own op.

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
from typing import Any

from .engine_arm import MODELS, SEQUENCES, Spec

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
    """The processes to run, in an order in which the first are worth most."""
    forms = {"eager": (False,), "graphs": (True,), "both": (False, True)}[options.execution]
    for model in options.models:
        folder = str(options.scratch / model)
        for arm_name in options.arms:
            for graphs in (False,) if arm_name == "shadow" else forms:
                for turn in range(1, 1 + (options.rounds if arm_name != "shadow" else 1)):
                    result = options.scratch / f"{model}-{arm_name}-{'graphs' if graphs else 'eager'}-{turn}.json"
                    yield Spec(
                        model,
                        arm_name,
                        graphs,
                        folder,
                        str(result),
                        tokens=tuple(options.tokens),
                        steps=options.steps,
                        profile=not options.no_profile and not graphs,
                        round=turn,
                    )


def main(arguments: list[str] | None = None) -> int:
    """Run the arms, write their results into one file, print a table."""
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
    options = parser.parse_args(arguments)
    options.scratch = options.scratch.resolve()
    options.scratch.mkdir(parents=True, exist_ok=True)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    runs: list[dict[str, Any]] = []
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
        options.output.write_text(json.dumps({"runs": runs}, indent=1) + "\n")
        print(f"{spec.name}: {'done' if failure is None else 'FAILED'} in {found.get('seconds', '?')} s", flush=True)
        if failure is not None:
            print(failure[-1500:], flush=True)
    print(table(runs))
    return 0 if all("failure" not in run for run in runs) else 1


def table(runs: list[dict[str, Any]]) -> str:
    """Plug-in against stock, and what shadow mode found, in a few lines."""
    lines = []
    for run in runs:
        if run["arm"] == "shadow" and "shadow" in run:
            lines.append(f"{run['name']}: {run['steps']} engine steps")
            for output, tally in run["shadow"].items():
                flips = (
                    f", {tally['norm_flips']} norm roundings of {tally['elements']:,}" if tally["norm_flips"] else ""
                )
                first = f"; {tally['first']}" if tally["first"] else ""
                lines.append(f"  {output}: {tally['calls']} calls, {tally['mismatches']} mismatches{flips}{first}")
        if run["arm"] != "plugin":
            continue
        pair = (run["model"], run["graphs"], run["round"])
        stock = next((r for r in runs if r["arm"] == "stock" and (r["model"], r["graphs"], r["round"]) == pair), None)
        if stock is not None:
            lines += _against(run, stock)
    return "\n".join(lines)


def _against(run: dict[str, Any], stock: dict[str, Any]) -> Iterator[str]:
    def ratio(ours: float, theirs: float) -> str:
        return f"{theirs:.2f} -> {ours:.2f} ms ({ours / theirs:.3f}x)"

    yield f"{run['name']} against stock"
    for tokens, theirs in stock.get("ttft", {}).items():
        if tokens in run.get("ttft", {}):
            yield f"  TTFT of {tokens} tokens: {ratio(run['ttft'][tokens]['ms'], theirs['ms'])}"
    if "tpot" in run and "tpot" in stock:
        yield f"  TPOT at {SEQUENCES} sequences: {ratio(run['tpot']['ms'], stock['tpot']['ms'])}"
    for part in ("profile_prefill", "profile_decode"):
        if part in run and part in stock:
            yield f"  GPU time, {part.removeprefix('profile_')}: {ratio(run[part]['gpu_ms'], stock[part]['gpu_ms'])}"
    if "served" in run and "served" in stock:
        ours, theirs = (sum(r["served"]["synchronisations"].values()) for r in (run, stock))
        yield f"  synchronisations: {theirs} -> {ours}, {run['served']['of_ours']} of ours"
        ours, theirs = (sum(r["served"]["compilations"].values()) for r in (run, stock))
        yield f"  compilations while serving: {theirs} -> {ours}; of ours after start: {run.get('compiled_later')}"
    if "tokens_answered" in run and "tokens_answered" in stock:
        same = [a == b for a, b in zip(run["tokens_answered"], stock["tokens_answered"], strict=True)]
        pairs = zip(run["logprobs"], stock["logprobs"], strict=True)
        apart = max([abs(a[token] - b[token]) for a, b in pairs for token in a if token in b], default=float("nan"))
        yield f"  greedy answers equal: {sum(same)} of {len(same)}; first logprobs apart by at most {apart:.3g}"


if __name__ == "__main__":
    sys.exit(main())
