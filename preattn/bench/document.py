"""A long real document inside vLLM: prompt log-probabilities of the plug-in and of the stock engine.

    python -m preattn.bench.document --output results/document.json --book book.txt

The document is this project's own documentation and, to the length asked for, a book; its tokens are its bytes. Two
runs of the unchanged engine differ already (ties in the indexer's top-k, the order of atomic additions), so each arm
runs several times, and the plug-in has to be as close to the stock engine as the stock engine is to itself.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any

from . import engine_arm, engine_probe
from .engine import child, variables
from .engine_arm import MODELS

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "docs/formats.md")
LEAST, CHUNK = 30_000, 8192
SHIFT = 2
"""Byte b is token b + 2: the first two tokens begin and end a sequence."""


def document(tokens: int, book: Path | None) -> list[int]:
    """The document's tokens.

    Raises:
        ValueError: the texts are shorter than asked for.
    """
    paths = [ROOT / name for name in DOCUMENTS] + ([book] if book is not None else [])
    text = b"\n\n".join([path.read_bytes() for path in paths if path.is_file()])
    if len(text) < tokens:
        raise ValueError(f"book: expected {tokens} bytes of documentation and book; got {len(text)}")
    return [byte + SHIFT for byte in text[:tokens]]


def arm(argument: str) -> None:
    """Score the document several times in this process, and write each run's log-probabilities as it comes."""
    spec: dict[str, Any] = json.loads(argument)
    prompt = json.loads(Path(spec["document"]).read_text())
    llm = engine_arm.engine(spec["folder"], graphs=False, longest=len(prompt), sequences=1, chunk=CHUNK)
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
    runs: list[list[float]] = []
    for _ in range(spec["runs"]):
        (answer,) = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        scored = answer.prompt_logprobs[1:]
        runs.append([found[token].logprob for token, found in zip(prompt[1:], scored, strict=True)])
        found = {"environment": engine_probe.environment(), "runs": runs}
        Path(spec["result"]).write_text(json.dumps(found))


def apart(a: list[float], b: list[float]) -> dict[str, float]:
    """How far two runs are apart: per token, and in the document's mean."""
    differences = sorted([abs(x - y) for x, y in zip(a, b, strict=True)])
    return {
        "mean": statistics.fmean(differences),
        "99.9%": differences[math.ceil(0.999 * len(differences)) - 1],
        "most": differences[-1],
        "of the mean": abs(statistics.fmean(a) - statistics.fmean(b)),
    }


def compare(stock: list[list[float]], plugin: list[list[float]]) -> dict[str, Any]:
    """The spread of the stock engine, the plug-in's distance from it, and whether the one is within the other.

    Each distance is a median over pairs of runs, one of either arm; the spread is the largest over pairs of stock runs.
    """
    within = [apart(a, b) for a, b in itertools.combinations(stock, 2)]
    across = [apart(a, b) for a in stock for b in plugin]
    spread = {name: max([pair[name] for pair in within]) for name in within[0]}
    distance = {name: statistics.median([pair[name] for pair in across]) for name in across[0]}
    return {
        "tokens": len(stock[0]) + 1,
        "runs": {"stock": len(stock), "plugin": len(plugin)},
        "mean_logprob": {"stock": statistics.fmean(stock[0]), "plugin": statistics.fmean(plugin[0])},
        "stock_spread": spread,
        "plugin_distance": distance,
        "within": {name: distance[name] <= spread[name] for name in spread},
    }


def main(arguments: list[str] | None = None) -> int:
    """Run both arms, in processes of their own that alternate, and write the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("results/document.json"))
    parser.add_argument("--scratch", type=Path, default=Path("build/engine"))
    parser.add_argument("--model", choices=list(MODELS), default="deepseek-v3.2-64")
    parser.add_argument("--book", type=Path, help="a text in the public domain")
    parser.add_argument("--tokens", type=int, default=LEAST + 2000)
    parser.add_argument("--runs", type=int, default=3, help="of a process")
    parser.add_argument("--rounds", type=int, default=2, help="processes of each arm")
    parser.add_argument("--limit", type=float, default=200, help="seconds of one process")
    options = parser.parse_args(arguments)
    scratch = options.scratch.resolve()
    scratch.mkdir(parents=True, exist_ok=True)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    text = scratch / "document.json"
    text.write_text(json.dumps(document(options.tokens, options.book)))
    folder, environment = scratch / options.model, {}
    found: dict[str, list[list[float]]] = {"stock": [], "plugin": []}
    for turn, name in itertools.product(range(options.rounds), ("stock", "plugin")):
        result, given = scratch / f"document-{name}-{turn}.json", variables(name, scratch)
        log = result.with_suffix(".log")
        result.unlink(missing_ok=True)
        failure = None
        if not (folder / "config.json").is_file():
            failure = child("make", f"{options.model}={folder}", environment=given, log=log, limit=120)
        spec = {"folder": str(folder), "document": str(text), "result": str(result), "runs": options.runs}
        failure = failure or child(
            "arm", json.dumps(spec), environment=given, log=log, limit=options.limit, module="document"
        )
        if failure is not None:
            print(f"{name}: FAILED\n{failure[-1500:]}")
            return 1
        data = json.loads(result.read_text())
        found[name] += data["runs"]
        environment[name] = data["environment"]
    compared = {"model": options.model, "environment": environment, **compare(found["stock"], found["plugin"])}
    options.output.write_text(json.dumps(compared, indent=1) + "\n")
    print(json.dumps({key: compared[key] for key in ("tokens", "stock_spread", "plugin_distance", "within")}, indent=1))
    return 0 if all(compared["within"].values()) else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["arm"]:
        arm(sys.argv[2])
    else:
        sys.exit(main())
