"""One process of the proof inside vLLM: a small model, the engine around it, and what is asked of it.

Driven by :mod:`preattn.bench.engine`, and by :mod:`preattn.bench.document` for its engine.
"""

from __future__ import annotations

import cProfile
import functools
import importlib.util
import json
import os
import random
import statistics
import sys
import threading
import time
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

LAYERS = 3
ANSWERED = (17, 300, 1500, 2600, 3500)
"""Prompt lengths whose answers are kept; the last two are longer than the indexer's top-k."""
SEQUENCES = 64
GRAPH_SIZES = (1, 2, 4, 8, 16, 32, 64)
KERNELS, FUNCTIONS = 25, 60
"""Rows of a profile that are kept."""

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
    """A small model: the library's class, heads, and what its configuration adds to the common part."""

    library: str
    heads: int
    config: dict[str, Any]
    written: dict[str, Any]
    """What only the engine reads: written into the configuration file."""


_SHARED = {"index_topk_pattern": "FFS"}
"""The third layer of GLM-5 uses the second's top-k."""


def _v32(heads: int) -> Model:
    return Model("DeepseekV32", heads, {"rope_parameters": _V32_ROPE}, {})


MODELS = {
    "deepseek-v3.2-64": _v32(64),
    "deepseek-v3.2-16": _v32(16),
    "deepseek-v3.2-32": _v32(32),
    "deepseek-v3.2-128": _v32(128),
    "glm-5": Model("GlmMoeDsa", 64, _SHARED, {"indexer_rope_interleave": True, **_SHARED}),
}
"""Heads are a tensor-parallel rank's: 64, 32 and 16 of 128 are TP2, TP4 and TP8."""


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
    folder: str, *, graphs: bool, longest: int, sequences: int = SEQUENCES, chunk: int | None = None, **more: Any
) -> Any:
    """An engine in this process, of a model in ``folder``: prompts up to ``longest`` tokens, ``chunk`` a step."""
    if importlib.util.find_spec("cutlass") is None:
        _stand_in_for_cutedsl()
    from vllm import LLM

    if graphs:
        more["compilation_config"] = {"cudagraph_capture_sizes": list(GRAPH_SIZES)}
    return LLM(
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


def _stand_in_for_cutedsl() -> None:
    """The stock ``fused_q`` imports a CuTeDSL module before it asks for the device; below SM100 it never uses it."""
    name = "vllm.models.deepseek_v32.nvidia.ops.fused_q_cutedsl"
    module = types.ModuleType(name)
    module.__dict__.update(fused_q_cutedsl=None, is_fused_q_cutedsl_supported=lambda *args, **kwargs: False)
    sys.modules[name] = module


def environment() -> dict[str, Any]:
    """Device, driver and versions of an arm's process."""
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
        f"{_inside(w.filename)}:{w.lineno}" for w in caught if "synchronizing CUDA operation" in str(w.message)
    )
    found["synchronisations"] = dict(callers.most_common())
    found["of_ours"] = sum([count for caller, count in callers.items() if caller.startswith("preattn/")])
    found["compilations"] = dict(compiled)


def _inside(filename: str) -> str:
    """A file's path from its package on."""
    parts = Path(filename).parts
    for package in ("preattn", "vllm", "torch"):
        if package in parts:
            return "/".join(parts[len(parts) - 1 - parts[::-1].index(package) :])
    return parts[-1]


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


PROLOGUE = "vllm.models.deepseek_v32.attention", ("fused_norm_rope", "fused_q")
"""The module whose layers call the prologue, and by what names, whosever they are."""


def prologue_calls(run: Callable[[], Any]) -> dict[str, float]:
    """How often a run calls the prologue's functions in Python, and the host's milliseconds inside of them.

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
        run()
    finally:
        for name, function in before.items():
            setattr(module, name, function)
    return found


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
        name = code if isinstance(code, str) else f"{_inside(code.co_filename)}:{code.co_qualname}"
        rows.append({"function": name[:120], "calls": entry.callcount, "ms": round(entry.inlinetime * 1e3, 4)})
    rows.sort(key=lambda row: -row["ms"])
    return {"host_ms": round(sum([row["ms"] for row in rows]), 3), "functions": rows[:FUNCTIONS]}


def kernel_times(run: Callable[[], Any]) -> dict[str, Any]:
    """GPU milliseconds of a run, and its kernels by time."""
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
    rows = [
        {"kernel": event.key[:120], "calls": event.count, "ms": round(event.self_device_time_total / 1e3, 4)}
        for event in profile.key_averages()
        if event.self_device_time_total > 0
    ]
    rows.sort(key=lambda row: -row["ms"])
    return {"gpu_ms": round(sum([row["ms"] for row in rows]), 3), "kernels": rows[:KERNELS]}


def serve(spec: Spec, result: Result, llm: Any) -> None:
    """The stock and the plug-in arm."""
    prompts = Prompts(llm)
    with watch() as first:
        answers = prompts.run([prompts.of(tokens) for tokens in ANSWERED], 32, logprobs=5)
    result.put(
        tokens_answered=[list(answer.outputs[0].token_ids) for answer in answers],
        logprobs=[
            {str(token): value.logprob for token, value in answer.outputs[0].logprobs[0].items()} for answer in answers
        ],
        first_requests=first,
    )
    ttft = {}
    for tokens in spec.tokens:
        samples = prompts.times([prompts.of(tokens)], 1, repeats=7)
        ttft[str(tokens)] = {"ms": statistics.median(samples), "least": min(samples), "most": max(samples)}
        result.put(ttft=ttft)
    result.put(host=host_speed())
    short = [prompts.of(64) for _ in range(SEQUENCES)]
    one, many = prompts.times(short, 1, repeats=5), prompts.times(short, 65, repeats=5)
    steps = [(run - statistics.median(one)) / 64 for run in many]
    result.put(tpot={"sequences": SEQUENCES, "ms": statistics.median(steps), "least": min(steps), "most": max(steps)})
    decoding = functools.partial(prompts.run, short, 65)
    result.put(decode=decode_steps([step_times(llm.llm_engine, decoding) for _ in range(5)]))
    medium = [prompts.of(1024)]
    prefills = [prologue_calls(functools.partial(prompts.run, medium, 1)) for _ in range(5)]
    prompted, decoded = (prologue_calls(functools.partial(prompts.run, short, count)) for count in (1, 9))
    result.put(
        prologue={
            "prefill_ms": round(statistics.median([prefill["ms"] for prefill in prefills]), 4),
            "decode_calls": decoded["calls"] - prompted["calls"],
        }
    )
    mixed = [prompts.of(tokens) for tokens in (*ANSWERED, *spec.tokens)]
    prompts.run(mixed, 16)
    with watch() as served:
        prompts.run(mixed, 16)
    result.put(served=served)
    if spec.profile:
        longest = [prompts.of(max(spec.tokens))]
        result.put(profile_prefill=kernel_times(lambda: prompts.run(longest, 1)))
        one_token, decode = (kernel_times(functools.partial(prompts.run, short, count)) for count in (1, 9))
        step = (decode["gpu_ms"] - one_token["gpu_ms"]) / 8
        result.put(profile_decode={**decode, "step_ms": round(step, 4)})
        result.put(profile_host=function_times(functools.partial(prompts.run, short, 33)))


def shadow(spec: Spec, result: Result, llm: Any) -> None:
    """The shadow arm: prompts of every length, then decoding in groups, until there were enough engine steps."""
    from preattn.integrations.vllm import summary

    prompts = Prompts(llm)

    def steps() -> int:
        tally = summary()["shadow"].get("fused_norm_rope.q latent", {"calls": 0})
        return int(tally["calls"]) // LAYERS

    started = steps()
    for tokens in (*ANSWERED, *spec.tokens):
        prompts.run([prompts.of(tokens)], 4)
        result.put(steps=steps() - started, shadow=summary()["shadow"])
    prompts.run([prompts.of(tokens) for tokens in (*ANSWERED, *spec.tokens)], 32)
    while (done := steps() - started) < spec.steps:
        group = (64, 1, 8, 33)[done // 64 % 4]
        prompts.run([prompts.of(length) for length in range(40, 40 + group)], 64)
        result.put(steps=steps() - started, shadow=summary()["shadow"])
    result.put(steps=steps() - started, shadow=summary()["shadow"], plans=summary()["plans"])


def arm(spec: Spec) -> None:
    """Run one arm in this process."""
    result = Result(spec)
    result.put()
    start = time.perf_counter()
    llm = engine(spec.folder, graphs=spec.graphs, longest=max(spec.tokens))
    from preattn.kernels import launch

    compiled = launch.compilations()
    result.put(environment=environment(), start_s=round(time.perf_counter() - start, 1), compiled_at_start=compiled)
    (shadow if spec.arm == "shadow" else serve)(spec, result, llm)
    result.put(compiled_later=launch.compilations() - compiled)
    if spec.arm != "stock":
        from preattn.integrations.vllm import plugin, summary

        result.put(active=plugin.active(), plans=summary()["plans"])
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
