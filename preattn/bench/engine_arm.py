"""One process of the proof inside vLLM: a small model, the engine around it, and what is asked of it.

Driven by :mod:`preattn.bench.engine`, and by :mod:`preattn.bench.document` for its engine.
"""

from __future__ import annotations

import cProfile
import functools
import json
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from . import engine_probe
from .engine_probe import Ranks

Run = dict[str, Any]
"""What an arm has found, as it stands in a file."""
LAYERS = 3
ANSWERED = (17, 300, 1500, 2600, 3500)
"""Prompt lengths whose answers are kept; the last two are longer than the indexer's top-k."""
SEQUENCES = 64
GRAPH_SIZES = (1, 2, 4, 8, 16, 32, 64)
FUNCTIONS = 60
"""Functions of a profile that are kept."""

_COMMON: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 1024,
    "intermediate_size": 1024,
    "moe_intermediate_size": 256,
    "num_hidden_layers": LAYERS,
    "first_k_dense_replace": LAYERS,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "max_position_embeddings": 131072,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
_V32_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 32.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
}


@dataclass(frozen=True)
class Model:
    """A small model: the library's class, heads of all ranks, and what its configuration adds to the common part."""

    library: str
    heads: int
    config: dict[str, Any]
    written: dict[str, Any]
    """What only the engine reads: written into the configuration file."""
    ranks: int = 1
    """Tensor-parallel ranks, a GPU each."""


_SHARED = {"index_topk_pattern": "FFS"}
"""The third layer of GLM-5 uses the second's top-k."""


def _v32(heads: int, ranks: int = 1) -> Model:
    return Model("DeepseekV32", heads, {"rope_parameters": _V32_ROPE}, {}, ranks)


MODELS = {
    "deepseek-v3.2-64": _v32(64),
    "deepseek-v3.2-16": _v32(16),
    "deepseek-v3.2-32": _v32(32),
    "deepseek-v3.2-128": _v32(128),
    "deepseek-v3.2-128-tp2": _v32(128, ranks=2),
    "glm-5": Model("GlmMoeDsa", 64, _SHARED, {"indexer_rope_interleave": True, **_SHARED}),
}
"""One rank with 64, 32 or 16 of V3.2's 128 heads runs the shapes of TP2, TP4 and TP8."""


@dataclass(frozen=True)
class Spec:
    """One process: which model in which arm, and what it does."""

    model: str
    arm: str
    graphs: bool
    folder: str
    result: str
    tokens: tuple[int, ...] = (17, 1024, 16384)
    steps: int = 1000
    profile: bool = True
    round: int = 1

    @property
    def name(self) -> str:
        """For example ``deepseek-v3.2-64/plugin/graphs``."""
        again = f"/{self.round}" if self.round > 1 else ""
        return f"{self.model}/{self.arm}/{'graphs' if self.graphs else 'eager'}{again}"


class Result:
    """What an arm has found, on disk after every step."""

    def __init__(self, spec: Spec) -> None:
        self._path = Path(spec.result)
        self.data: dict[str, Any] = {"name": spec.name, **asdict(spec), "complete": False}

    def put(self, **found: Any) -> None:
        """Add to it and write it."""
        self.data |= found
        temporary = self._path.with_suffix(".tmp")
        temporary.write_text(json.dumps(self.data))
        temporary.replace(self._path)


def make(model: Model, folder: Path) -> None:
    """Write a random checkpoint of a model."""
    import torch
    import transformers

    torch.manual_seed(0)
    heads = {"num_attention_heads": model.heads, "num_key_value_heads": model.heads}
    config = getattr(transformers, f"{model.library}Config")(**_COMMON, **heads, **model.config)
    network = getattr(transformers, f"{model.library}ForCausalLM")._from_config(config, dtype=torch.bfloat16)
    for name, parameter in network.named_parameters():
        if "embed" in name or "lm_head" in name:  # logits far enough apart for greedy tokens to mean something
            parameter.data.normal_(0, 1.0 if "embed" in name else 0.05)
    network.save_pretrained(folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | model.written))


def engine(
    folder: str,
    *,
    graphs: bool,
    longest: int,
    sequences: int = SEQUENCES,
    chunk: int | None = None,
    ranks: int = 1,
    **more: Any,
) -> Any:
    """An engine of a model in ``folder``: prompts up to ``longest`` tokens, ``chunk`` a step.

    It runs in this process; of several ranks each has a worker process of its own.
    """
    from vllm import LLM

    if graphs:
        more["compilation_config"] = {"cudagraph_capture_sizes": list(GRAPH_SIZES)}
    if ranks > 1:  # NCCL alone sums: the engine's own all-reduce wants peer access, which not every machine gives
        more |= {"tensor_parallel_size": ranks, "distributed_executor_backend": "mp", "disable_custom_all_reduce": True}
    return LLM(
        worker_extension_cls=f"{engine_probe.__name__}.{engine_probe.Probe.__name__}",
        model=folder,
        skip_tokenizer_init=True,
        dtype="bfloat16",
        kv_cache_dtype="fp8_ds_mla",
        enforce_eager=not graphs,
        max_model_len=max(4096, longest + 1024),
        max_num_seqs=sequences,
        max_num_batched_tokens=max(4096, chunk or longest),
        gpu_memory_utilization=0.5,
        enable_prefix_caching=False,
        seed=0,
        **more,
    )


class Prompts:
    """Random prompts, the same in every arm, and the ways of running them."""

    def __init__(self, llm: Any) -> None:
        from vllm import SamplingParams

        self._llm, self._sampling, self._random = llm, SamplingParams, random.Random(0)

    def of(self, tokens: int) -> dict[str, list[int]]:
        """A prompt of so many tokens."""
        return {"prompt_token_ids": [self._random.randrange(2, 4000) for _ in range(tokens)]}

    def run(self, prompts: list[Any], tokens: int, **more: Any) -> list[Any]:
        """Generate so many tokens for each, greedily."""
        sampling = self._sampling(max_tokens=tokens, temperature=0.0, ignore_eos=True, detokenize=False, **more)
        answers: list[Any] = self._llm.generate(prompts, sampling, use_tqdm=False)
        return answers

    def times(self, prompts: list[Any], tokens: int, repeats: int) -> list[float]:
        """Milliseconds of so many runs after one that is not counted."""
        samples = []
        for _ in range(repeats + 1):
            start = time.perf_counter()
            self.run(prompts, tokens)
            samples.append((time.perf_counter() - start) * 1e3)
        return samples[1:]


def step_times(engine: Any, run: Callable[[], Any]) -> list[tuple[float, float]]:
    """Milliseconds of each engine step of a run, and what the calling thread had of a processor meanwhile."""
    found, step = [], engine.step

    def timed() -> Any:
        start, used = time.perf_counter(), time.thread_time()
        outputs = step()
        found.append(((time.perf_counter() - start) * 1e3, (time.thread_time() - used) * 1e3))
        return outputs

    engine.step = timed
    try:
        run()
    finally:
        engine.step = step
    return found


def decode_steps(runs: list[list[tuple[float, float]]]) -> dict[str, float]:
    """Of the engine steps of some runs, those that only decode: medians and the spread.

    The first two may hold the prompts, and the last two no whole batch.
    """
    steps = [step for run in runs for step in run[2:-2]]
    wall = statistics.quantiles([wall for wall, _ in steps], n=10, method="inclusive")
    cpu = statistics.median([cpu for _, cpu in steps])
    return {
        name: round(value, 4) for name, value in zip(("p10", "ms", "p90", "cpu_ms"), (*wall[::4], cpu), strict=True)
    }


def function_times(run: Callable[[], Any]) -> dict[str, Any]:
    """Milliseconds that a run spends in Python functions, each without those it calls; the profiler slows them."""
    profile = cProfile.Profile()
    profile.runcall(run)
    rows: list[dict[str, Any]] = []
    for entry in profile.getstats():
        code = entry.code
        name = code if isinstance(code, str) else f"{engine_probe.inside(code.co_filename)}:{code.co_qualname}"
        rows.append({"function": name[:120], "calls": entry.callcount, "ms": round(entry.inlinetime * 1e3, 4)})
    rows.sort(key=lambda row: -row["ms"])
    return {"host_ms": round(sum([row["ms"] for row in rows]), 3), "functions": rows[:FUNCTIONS]}


def serve(spec: Spec, result: Result, llm: Any) -> None:
    """The stock and the plug-in arm. Where there are several ranks, calls, kernels and host are the first one's."""
    prompts, ranks = Prompts(llm), Ranks(llm)

    def answer() -> None:
        answers = prompts.run([prompts.of(tokens) for tokens in ANSWERED], 32, logprobs=5)
        first = [answer.outputs[0].logprobs[0] for answer in answers]
        result.put(
            tokens_answered=[list(answer.outputs[0].token_ids) for answer in answers],
            logprobs=[{str(token): value.logprob for token, value in found.items()} for found in first],
        )

    result.put(first_requests=together(ranks.during("watch", answer)))
    ttft = {}
    for tokens in spec.tokens:
        samples = prompts.times([prompts.of(tokens)], 1, repeats=7)
        ttft[str(tokens)] = {"ms": statistics.median(samples), "least": min(samples), "most": max(samples)}
        result.put(ttft=ttft)
    result.put(host=ranks.host()[0])
    short = [prompts.of(64) for _ in range(SEQUENCES)]
    one, many = prompts.times(short, 1, repeats=5), prompts.times(short, 65, repeats=5)
    steps = [(run - statistics.median(one)) / 64 for run in many]
    result.put(tpot={"sequences": SEQUENCES, "ms": statistics.median(steps), "least": min(steps), "most": max(steps)})
    decoding = functools.partial(prompts.run, short, 65)
    result.put(decode=decode_steps([step_times(llm.llm_engine, decoding) for _ in range(5)]))

    def first(kind: str, run: list[Any], tokens: int) -> dict[str, Any]:
        return ranks.during(kind, functools.partial(prompts.run, run, tokens))[0]

    medium = [prompts.of(1024)]
    prefills = [first("prologue", medium, 1) for _ in range(5)]
    prompted, decoded = (first("prologue", short, count) for count in (1, 9))
    result.put(
        prologue={
            "prefill_ms": round(statistics.median([prefill["ms"] for prefill in prefills]), 4),
            "decode_calls": decoded["calls"] - prompted["calls"],
        }
    )
    mixed = [prompts.of(tokens) for tokens in (*ANSWERED, *spec.tokens)]
    prompts.run(mixed, 16)
    result.put(served=together(ranks.during("watch", functools.partial(prompts.run, mixed, 16))))
    if spec.profile:
        result.put(profile_prefill=first("kernels", [prompts.of(max(spec.tokens))], 1))
        one_token, decode = (first("kernels", short, count) for count in (1, 9))
        step = (decode["gpu_ms"] - one_token["gpu_ms"]) / 8
        result.put(profile_decode={**decode, "step_ms": round(step, 4)})
        result.put(profile_host=function_times(functools.partial(prompts.run, short, 33)))


def shadow(spec: Spec, result: Result, llm: Any) -> None:
    """The shadow arm: prompts of every length, then decoding in groups, until there were enough engine steps."""
    prompts, ranks = Prompts(llm), Ranks(llm)

    def steps() -> int:
        """Steps so far; the tallies are written."""
        found = ranks.state()
        calls = found[0]["shadow"].get("fused_norm_rope.q latent", {"calls": 0})["calls"]
        result.put(shadow=by_rank([state["shadow"] for state in found]))
        return int(calls) // LAYERS

    started = steps()
    for tokens in (*ANSWERED, *spec.tokens):
        prompts.run([prompts.of(tokens)], 4)
        result.put(steps=steps() - started)
    prompts.run([prompts.of(tokens) for tokens in (*ANSWERED, *spec.tokens)], 32)
    while (done := steps() - started) < spec.steps:
        group = (64, 1, 8, 33)[done // 64 % 4]
        prompts.run([prompts.of(length) for length in range(40, 40 + group)], 64)
        result.put(steps=steps() - started)


def together(found: list[dict[str, Any]]) -> dict[str, Any]:
    """What :func:`engine_probe.watch` counted, over all ranks."""
    kinds = ("synchronisations", "compilations")
    counts = {kind: dict(sum((Counter(rank[kind]) for rank in found), Counter[str]())) for kind in kinds}
    return {**counts, "of_ours": sum(rank["of_ours"] for rank in found)}


def by_rank(found: list[dict[str, Any]]) -> dict[str, Any]:
    """What is counted by name, with the rank in front of the name where there are several."""
    if len(found) == 1:
        return found[0]
    return {f"rank {rank}: {name}": value for rank, counted in enumerate(found) for name, value in counted.items()}


def arm(spec: Spec) -> None:
    """Run one arm in this process."""
    result = Result(spec)
    result.put()
    start = time.perf_counter()
    model = MODELS[spec.model]
    llm = engine(spec.folder, graphs=spec.graphs, longest=max(spec.tokens), ranks=model.ranks)
    ranks = Ranks(llm)
    before = ranks.state()
    compiled = sum(rank["compiled"] for rank in before)
    took = round(time.perf_counter() - start, 1)
    result.put(environment=before[0]["environment"], start_s=took, compiled_at_start=compiled)
    (shadow if spec.arm == "shadow" else serve)(spec, result, llm)
    after = ranks.state()
    result.put(compiled_later=sum(rank["compiled"] for rank in after) - compiled)
    if spec.arm != "stock":
        result.put(active=all(rank["active"] for rank in after), plans=by_rank([rank["plans"] for rank in after]))
    result.put(complete=True, seconds=round(time.perf_counter() - start, 1))


def main(arguments: list[str]) -> None:
    """``make MODEL=FOLDER``, or ``arm SPEC`` with a :class:`Spec` as JSON."""
    verb, argument = arguments
    if verb == "make":
        name, _, folder = argument.partition("=")
        make(MODELS[name], Path(folder))
    else:
        given = json.loads(argument)
        arm(Spec(**{**given, "tokens": tuple(given["tokens"])}))


if __name__ == "__main__":
    main(sys.argv[1:])
