"""The proof inside vLLM, as far as it runs without a GPU: processes and their environment, tables, verdicts."""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import sys
import time
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType

from preattn.bench import document, engine, engine_arm, engine_probe, engine_tables
from preattn.integrations.vllm import plugin
from preattn.kernels import launch

ROOT = Path(__file__).parents[1]


def options(**changed: Any) -> argparse.Namespace:
    given = {
        "models": ["deepseek-v3.2-16", "glm-5"],
        "arms": list(engine.ARMS),
        "execution": "both",
        "tokens": [17],
        "steps": 10,
        "rounds": 2,
        "no_profile": False,
        "scratch": Path("scratch"),
    }
    return argparse.Namespace(**{**given, **changed})


def test_the_arms_of_a_model_are_processes_of_their_own() -> None:
    names = [spec.name for spec in engine.specs(options(models=["glm-5"]))]
    timed = [
        f"glm-5/{arm}/{form}{turn}"
        for turn, order in (("", ("stock", "plugin")), ("/2", ("plugin", "stock")))
        for form in ("eager", "graphs")
        for arm in order
    ]
    assert names == [*timed, "glm-5/shadow/eager"]
    specs = list(engine.specs(options()))
    assert len({spec.result for spec in specs}) == len(specs)


def test_graphs_alone_alternate_who_goes_first() -> None:
    chosen = options(models=["glm-5"], arms=["plugin", "stock"], execution="graphs", rounds=3)
    names = [spec.name.removeprefix("glm-5/") for spec in engine.specs(chosen)]
    assert names == [
        *("stock/graphs", "plugin/graphs"),
        *("plugin/graphs/2", "stock/graphs/2"),
        *("stock/graphs/3", "plugin/graphs/3"),
    ]


def test_only_the_stock_arm_runs_without_the_plug_in(tmp_path: Path) -> None:
    stock, ours, shadow = (engine.variables(arm, tmp_path) for arm in engine.ARMS)
    assert (stock["VLLM_PLUGINS"], ours["VLLM_PLUGINS"], shadow["VLLM_PLUGINS"]) == ("", "preattn", "preattn")
    assert (stock["PREATTN_SHADOW"], ours["PREATTN_SHADOW"], shadow["PREATTN_SHADOW"]) == ("0", "0", "1")
    assert str(ROOT) in ours["PYTHONPATH"]
    assert all(found["VLLM_ALLREDUCE_USE_SYMM_MEM"] == "0" for found in (stock, ours, shadow)), "NCCL alone sums"


def test_the_entry_point_that_is_laid_out_is_found(tmp_path: Path) -> None:
    engine.lay_out_entry_point(tmp_path)
    (found,) = [point for d in distributions(path=[str(tmp_path)]) for point in d.entry_points]
    assert (found.group, found.name) == (plugin.GROUP, plugin.NAME)
    assert found.load() is plugin.register


def test_an_arm_that_fails_is_reported_with_the_end_of_its_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "vllm.py").write_text("raise ImportError('planted')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "broken"))
    (tmp_path / "glm-5").mkdir()
    (tmp_path / "glm-5" / "config.json").write_text("{}")
    output = tmp_path / "engine.json"
    arguments = ["--output", str(output), "--scratch", str(tmp_path), "--models", "glm-5", "--arms", "stock"]
    assert engine.main([*arguments, "--execution", "eager", "--tokens", "17"]) == 1
    (run,) = json.loads(output.read_text())["runs"]
    assert run["name"] == "glm-5/stock/eager" and run["complete"] is False
    assert "ImportError: planted" in run["failure"]
    assert "glm-5/stock/eager: FAILED" in capsys.readouterr().out


def a_run(arm: str, ms: float, *, turn: int = 1) -> dict[str, Any]:
    spec = engine_arm.Spec("glm-5", arm, False, "/scratch/glm-5", "/scratch/r.json", round=turn)
    watched = {"synchronisations": {"vllm/a.py:1": 3}, "of_ours": 0, "compilations": {}}
    kernels = [
        {"kernel": "void ns::attention<64>(int)", "calls": 3, "ms": 20.0},
        {"kernel": f"_{arm}_kernel", "calls": 3, "ms": ms / 10},
        {"kernel": "tiny", "calls": 1, "ms": 0.01},
    ]
    return {
        "name": spec.name,
        **vars(spec),
        "environment": {
            "device": "GPU",
            "driver": "1",
            "torch": "2",
            "triton": "3",
            "vllm": "4",
            "commit": "abc",
            "plugins": arm,
        },
        "ttft": {"16384": {"ms": ms, "least": ms - 1, "most": ms + 1}},
        "tpot": {"sequences": 64, "ms": ms / 10, "least": ms / 10, "most": ms / 10},
        "host": {"python_ms": 9.0, "launches_ms": 4.0},
        "prologue": {"prefill_ms": ms / 100, "decode_calls": 0},
        "decode": {"p10": ms / 20, "ms": ms / 10, "p90": ms / 5, "cpu_ms": ms / 30},
        "profile_host": {
            "host_ms": ms,
            "functions": [
                {"function": "vllm/a.py:schedule", "calls": 9, "ms": ms / 2},
                {"function": "vllm/a.py:seldom", "calls": 1, "ms": ms / 200},
            ],
        },
        "profile_prefill": {"gpu_ms": ms - 1, "kernels": kernels},
        "served": watched,
        "first_requests": {**watched, "compilations": {"a": 2}},
        "tokens_answered": [[1, 2], [3]],
        "logprobs": [{"1": -1.0}, {"3": -2.0 - ms / 1000}],
        "compiled_later": 0,
        "complete": True,
    }


def a_shadow() -> dict[str, Any]:
    tally = {"calls": 9, "mismatches": 1, "elements": 4096, "norm_flips": 2, "scale_edges": 3, "division_edges": 4}
    tally["first"] = "layer 3"
    return {**a_run("shadow", 1), "steps": 1000, "shadow": {"fused_q.main query": tally}}


def test_the_document_gives_its_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "new" / "engine.json"
    runs = [a_run(arm, ms, turn=turn) for turn in (1, 2) for arm, ms in (("stock", 58.0 + turn), ("plugin", 45.0))]
    engine.write(path, [*runs, a_shadow()])
    assert "/scratch" not in path.read_text() and "tokens_answered" not in path.read_text()
    assert engine.main(["--report", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    for line in (
        "**glm-5, eager**, 2 processes of each, preattn abc",
        "| TTFT, 16,384 tokens | 59.50 (58.00 to 61.00) | 45.00 (44.00 to 46.00) | 0.756 |",
        "| TPOT, 64 sequences | 5.95 (5.90 to 6.00) | 4.50 | 0.756 |",
        "| GPU time, longest prompt | 58.50 (58.00 to 59.00) | 44.00 | 0.752 |",
        "| host within the prologue's calls, 1,024 tokens | 0.59 (0.59 to 0.60) | 0.45 | 0.756 |",
        "| the prologue's calls in 8 decode steps | 0 | 0 | |",
        "| host, a Python loop | 9.00 | 9.00 | 1.000 |",
        "| GPU synchronisations while serving | 3 | 3 | |",
        "| of these, asked for by preattn | 0 | 0 | |",
        "| kernels compiled by the first requests | 2 | 2 | |",
        "| of preattn's, after start | 0 | 0 | |",
        "| glm-5/plugin/eager | | 2 of 2 greedy answers equal, first log-probabilities at most 0.014 apart | |",
        "| `attention` | 20.00 | 20.00 |",
        "| `_stock_kernel` | 5.90 |  |",
        "| host ms, short prompts and 32 decode steps, profiled | stock | preattn |",
        "| `vllm/a.py:schedule` | 29.50 | 22.50 |",
        "| an engine step of these, 10 to 90% of them | 5.95 (2.95 to 12.00) | 4.50 (2.25 to 9.00) | 0.756 |",
        "**glm-5, shadow mode**, 1,000 engine steps, preattn abc",
        "| fused_q.main query | 9 | 4,096 | 1 | 2 | 3 | 4 |",
        "fused_q.main query: layer 3",
        "GPU; driver 1, torch 2, triton 3, vllm 4, commit abc",
    ):
        assert line in lines, line
    assert not any("tiny" in line or "seldom" in line for line in lines)


def test_the_overview_has_a_line_for_what_both_arms_served() -> None:
    runs = [a_run("stock", 60.0), a_run("plugin", 45.0), a_shadow(), {**a_run("stock", 1.0), "graphs": True}]
    unfinished = {**a_run("plugin", 1.0), "graphs": True, "complete": False}
    lines = engine_tables.overview([*runs, unfinished]).splitlines()
    assert lines[2:] == [
        "| glm-5 | eager | 60.00 | 45.00 | 0.750 | 0.746 | 6.00 | 4.50 |",
        "",
        "Milliseconds, processes of each arm: 1; GPU, vLLM 4, preattn abc.",
    ]
    for run in runs[:2]:
        del run["profile_prefill"]
    assert "| 0.750 | – | 6.00 |" in engine_tables.overview(runs)
    other = {**runs[0], "tpot": {"ms": 7.0, "least": 5.5, "most": 9.0}}
    assert "| 6.50 (5.50 to 9.00) | 4.50 |" in engine_tables.overview([other, *runs])


def test_runs_are_added_to_a_document_and_replace_those_of_their_name(tmp_path: Path) -> None:
    path = tmp_path / "engine.json"
    engine.write(path, [a_run("stock", 60.0), a_run("plugin", 45.0)])
    engine.write(path, [a_run("plugin", 40.0), a_shadow()], keep=True)
    runs = json.loads(path.read_text())["runs"]
    assert [(run["name"], run["tpot"]["ms"]) for run in runs] == [
        ("glm-5/stock/eager", 6.0),
        ("glm-5/plugin/eager", 4.0),
        ("glm-5/shadow/eager", 0.1),
    ]
    engine.write(path, [a_shadow()])
    assert len(json.loads(path.read_text())["runs"]) == 1


def test_arms_of_another_run_are_collected_and_an_unpaired_one_is_called_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cut = {**a_run("plugin", 45.0), "failure": "TimeoutExpired\nmore"}
    for part in ("tpot", "served", "profile_prefill"):
        del cut[part]
    (tmp_path / "scratch").mkdir()
    (tmp_path / "scratch" / "a.json").write_text(json.dumps(cut))
    output = tmp_path / "engine.json"
    assert engine.main(["--collect", str(tmp_path / "scratch"), "--output", str(output)]) == 0
    said = capsys.readouterr().out
    assert "**glm-5, eager**, unpaired" in said
    assert "| TTFT, 16,384 tokens | not run | 45.00 (44.00 to 46.00) |  |" in said
    assert "| kernels compiled while serving | not run | not run | |" in said
    assert "glm-5/plugin/eager failed: TimeoutExpired" in said and "TPOT" not in said


def test_the_prologues_calls_are_counted_and_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def fused_q(x: int, *, fails: bool = False) -> int:
        if fails:
            raise RuntimeError("a step's own")
        time.sleep(0.002)
        return x + 1

    module = types.SimpleNamespace(fused_norm_rope=fused_q, fused_q=fused_q)
    monkeypatch.setitem(sys.modules, engine_probe.PROLOGUE[0], module)
    with engine_probe.prologue_calls() as found:
        assert [module.fused_q(1), module.fused_norm_rope(2)] == [2, 3]
    assert found["calls"] == 2 and found["ms"] >= 4, "milliseconds"
    with pytest.raises(RuntimeError, match="a step's own"), engine_probe.prologue_calls():
        module.fused_q(1, fails=True)
    assert module.fused_q is fused_q and module.fused_norm_rope is fused_q
    with engine_probe.prologue_calls() as found:
        pass
    assert found == {"calls": 0, "ms": 0.0}


class Engine:
    """Ranks in one process, each with a stack of its own as a process would have."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
        self._stacks: list[list[Any]] = [[] for _ in range(ranks)]
        self._monkeypatch = monkeypatch

    def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        answers = []
        for stack in self._stacks:
            self._monkeypatch.setattr(engine_probe, "_begun", stack)
            answers.append(getattr(engine_probe.Probe(), method)(*args))
        return answers


def test_each_rank_is_asked_and_all_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = iter(range(1, 10))

    @contextmanager
    def counting() -> Iterator[dict[str, Any]]:
        found: dict[str, Any] = {"synchronisations": {}, "compilations": {}, "of_ours": 0}
        yield found
        found["synchronisations"] = {"vllm/a.py:1": next(counts)}
        found["compilations"] = {"_kernel": 1}

    monkeypatch.setitem(engine_probe.KINDS, "watch", counting)
    ranks, ran = engine_probe.Ranks(Engine(monkeypatch, 2)), []
    found = ranks.during("watch", lambda: ran.append(1))
    assert ran == [1] and [rank["synchronisations"] for rank in found] == [{"vllm/a.py:1": 1}, {"vllm/a.py:1": 2}]
    counted = {"synchronisations": {"vllm/a.py:1": 3}, "compilations": {"_kernel": 2}, "of_ours": 0}
    assert engine_arm.together(found) == counted
    with pytest.raises(ZeroDivisionError):
        ranks.during("watch", lambda: 1 // 0)
    assert next(counts) == 5, "what was begun has been ended, in both ranks"
    assert engine_arm.by_rank([{"a": 1}]) == {"a": 1}
    assert engine_arm.by_rank([{"a": 1}, {"a": 2}]) == {"rank 0: a": 1, "rank 1: a": 2}


def test_a_collective_is_a_kernel_but_no_time_of_the_ranks_own() -> None:
    found = engine_probe.by_time([("a", 2, 1.0), ("ncclDevKernel_AllReduce", 1, 9.0), ("b", 1, 0.5), ("none", 1, 0.0)])
    assert found["gpu_ms"] == 1.5
    assert [row["kernel"] for row in found["kernels"]] == ["ncclDevKernel_AllReduce", "a", "b"]
    many = engine_probe.by_time([(f"kernel {n}", 1, 1.0) for n in range(30)])
    assert many["gpu_ms"] == 30.0 and len(many["kernels"]) == engine_probe.KERNELS, "the sum is of all"


def test_a_rank_says_what_it_has_compiled_and_whether_its_patches_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_probe, "environment", lambda: {"device": "GPU"})
    monkeypatch.setattr(launch, "compilations", lambda: 7)
    monkeypatch.setattr(plugin, "active", lambda: False)
    monkeypatch.setenv("VLLM_PLUGINS", "")
    assert engine_probe.Probe().probe_state() == {"environment": {"device": "GPU"}, "compiled": 7}
    for plugins in ("preattn", None):
        monkeypatch.delenv("VLLM_PLUGINS") if plugins is None else monkeypatch.setenv("VLLM_PLUGINS", plugins)
        found = engine_probe.Probe().probe_state()
        assert found["compiled"] == 7 and found["active"] is False and {"rank", "plans", "shadow"} <= set(found)


def test_what_is_begun_last_ends_first(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def named(name: str) -> Iterator[dict[str, Any]]:
        yield {"name": name}

    for name in ("watch", "prologue"):
        monkeypatch.setitem(engine_probe.KINDS, name, functools.partial(named, name))
    ranks, inner = engine_probe.Ranks(Engine(monkeypatch, 2)), []
    outer = ranks.during("watch", lambda: inner.extend(ranks.during("prologue", lambda: None)))
    assert (outer, inner) == ([{"name": "watch"}] * 2, [{"name": "prologue"}] * 2)


def test_a_watch_says_who_waits_for_the_gpu_and_what_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton import knobs

    modes: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    before = knobs.runtime.jit_post_compile_hook
    with pytest.raises(RuntimeError, match="a step's own"), engine_probe.watch():
        raise RuntimeError("a step's own")
    assert modes == ["warn", "default"] and knobs.runtime.jit_post_compile_hook is before
    with engine_probe.watch() as found:
        seen: dict[Any, Any] = {}  # as a module's own, by which a warning is shown once
        for file, line in (("/x/vllm/a.py", 3), ("/x/vllm/a.py", 3), ("/y/preattn/v4/b.py", 7)):
            warnings.warn_explicit("called a synchronizing CUDA operation", UserWarning, file, line, registry=seen)
        warnings.warn_explicit("something else", UserWarning, "/x/vllm/a.py", 4)
        hook: Any = knobs.runtime.jit_post_compile_hook
        hook(fn=types.SimpleNamespace(name="_kernel"))
    assert found["synchronisations"] == {"vllm/a.py:3": 2, "preattn/v4/b.py:7": 1}
    assert (found["of_ours"], found["compilations"]) == (1, {"_kernel": 1})


def test_a_profile_of_the_gpu_is_in_milliseconds(monkeypatch: pytest.MonkeyPatch) -> None:
    sums = [types.SimpleNamespace(key="a", count=2, self_device_time_total=1500.0)]
    times = (
        (DeviceType.CUDA, "a", 0.0, 1000.0),
        (DeviceType.CPU, "launch", 1000.0, 1400.0),
        (DeviceType.CUDA, "a", 1500.0, 2000.0),
    )
    events = [
        types.SimpleNamespace(device_type=kind, name=name, time_range=types.SimpleNamespace(start=start, end=end))
        for kind, name, start, end in times
    ]
    profile = types.SimpleNamespace(key_averages=lambda: sums, events=lambda: events)
    monkeypatch.setattr(torch.profiler, "profile", lambda activities: nullcontext(profile))
    with engine_probe.kernel_times() as found:
        pass
    assert (found["gpu_ms"], found["kernels"]) == (1.5, [{"kernel": "a", "calls": 2, "ms": 1.5}])
    assert (found["idle_ms"], found["gaps"]) == (0.5, [{"after": "a", "before": "a", "ms": 0.5}])


def test_a_gpu_is_idle_where_no_stream_has_a_kernel() -> None:
    """The second stream's kernel covers one gap of the first and ends within the other."""
    first = [("a", 0.0, 1.0), ("b", 2.0, 3.0), ("c", 5.0, 6.0)]
    found = engine_probe.between([*first, ("other", 0.5, 2.5), ("other", 2.9, 3.5)])
    assert found == {"idle_ms": 1.5, "gaps": [{"after": "other", "before": "c", "ms": 1.5}]}
    assert engine_probe.between(first)["gaps"] == [
        {"after": "b", "before": "c", "ms": 2.0},
        {"after": "a", "before": "b", "ms": 1.0},
    ]
    many = [(str(n), 2.0 * n, 2.0 * n + 1) for n in range(20)]
    assert (
        engine_probe.between(many)["idle_ms"] == 19.0 and len(engine_probe.between(many)["gaps"]) == engine_probe.GAPS
    )
    assert engine_probe.between([]) == {"idle_ms": 0, "gaps": []}


def test_a_host_that_waits_has_no_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: types.SimpleNamespace(add_=lambda _: time.sleep(5e-5)))
    found = engine_probe.Probe().probe_host()
    assert found["launches_ms"] >= 50 and found["launches_cpu_ms"] < found["launches_ms"] / 2
    assert found["python_cpu_ms"] > 0 and found["cores"] >= 1 and found["threads"] >= 1


@pytest.mark.parametrize("missing", [True, False])
def test_a_worker_without_cutedsl_gets_a_stand_in(monkeypatch: pytest.MonkeyPatch, missing: bool) -> None:
    assert engine_probe.CUTEDSL not in sys.modules, "importing the bench leaves the engine's modules alone"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if missing else object())
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    engine_probe.Probe().init_worker_extension()
    found = sys.modules.get(engine_probe.CUTEDSL)
    assert (found is not None) == missing
    assert found is None or found.is_fused_q_cutedsl_supported(1, quantize_mqa=True) is False


class Served:
    """``vllm.LLM`` of two ranks that answers at once: tokens are counted in place of kernels, calls and time."""

    built: dict[str, Any]

    def __init__(self, **options: Any) -> None:
        Served.built = options
        self.llm_engine = types.SimpleNamespace(step=lambda: time.sleep(1e-5))
        self.tokens, self.begun, self.requests = 0, list[tuple[str, int]](), 0

    def generate(self, prompts: list[Any], sampling: dict[str, Any], use_tqdm: bool) -> list[Any]:
        for _ in range(sampling["max_tokens"]):
            self.llm_engine.step()
        self.tokens += sampling["max_tokens"]
        self.requests += len(prompts)
        answer = types.SimpleNamespace(token_ids=[5], logprobs=[{5: types.SimpleNamespace(logprob=-1.0)}])
        return [types.SimpleNamespace(outputs=[answer]) for _ in prompts]

    def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        if method == "probe_begin":
            self.begun.append((args[0], self.tokens))
            return [None, None]
        if method == "probe_host":
            return [{"python_ms": 1.0}, {"python_ms": 2.0}]
        if method == "probe_state":
            tally = {"calls": engine_arm.LAYERS * self.tokens}
            return [
                {
                    "environment": {"rank": rank},
                    "compiled": 8 + rank * self.requests,
                    "active": rank == 0,
                    "plans": {"fused_q": {"packed": rank}},
                    "shadow": {"fused_norm_rope.q latent": tally},
                }
                for rank in range(2)
            ]
        assert method == "probe_end"
        kind, before = self.begun.pop()
        tokens = self.tokens - before
        found = {
            "watch": lambda rank: {"synchronisations": {"a": rank}, "of_ours": rank, "compilations": {"k": tokens}},
            "prologue": lambda rank: {"calls": tokens + rank, "ms": 1.0 + rank},
            "kernels": lambda rank: {"gpu_ms": tokens * (1.0 + rank), "kernels": []},
        }[kind]
        return [found(rank) for rank in range(2)]


@pytest.fixture
def an_arm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], dict[str, Any]]:
    """Runs an arm of two ranks, and gives its result."""
    monkeypatch.setitem(sys.modules, "vllm", types.SimpleNamespace(LLM=Served, SamplingParams=dict))

    def run(arm: str) -> dict[str, Any]:
        path = tmp_path / "r.json"
        spec = engine_arm.Spec("deepseek-v3.2-128-tp2", arm, True, "", str(path), tokens=(17, 40), steps=700)
        engine_arm.arm(spec)
        found: dict[str, Any] = json.loads(path.read_text())
        assert found["complete"]
        return found

    return run


def test_an_engine_is_built_of_a_models_ranks_and_with_the_probe(an_arm: Callable[[str], dict[str, Any]]) -> None:
    an_arm("stock")
    built = Served.built
    module, _, name = built["worker_extension_cls"].rpartition(".")
    assert getattr(importlib.import_module(module), name) is engine_probe.Probe
    assert built["tensor_parallel_size"] == 2 and built["disable_custom_all_reduce"] and not built["enforce_eager"]
    engine_arm.engine("", graphs=False, longest=17)
    assert "tensor_parallel_size" not in Served.built and Served.built["enforce_eager"]


def test_counts_are_of_all_ranks_and_times_of_the_first(an_arm: Callable[[str], dict[str, Any]]) -> None:
    found = an_arm("plugin")
    assert found["first_requests"] == {"synchronisations": {"a": 1}, "of_ours": 1, "compilations": {"k": 2 * 32}}
    assert found["served"]["compilations"] == {"k": 2 * 16}
    assert found["compiled_at_start"] == 16 and found["compiled_later"] > 0, "the second rank's count too"
    assert found["active"] is False, "in one rank it is not"
    assert found["plans"] == {"rank 0: fused_q": {"packed": 0}, "rank 1: fused_q": {"packed": 1}}
    assert found["host"] == {"python_ms": 1.0} and found["environment"] == {"rank": 0}
    assert found["prologue"] == {"prefill_ms": 1.0, "decode_calls": 8}
    assert found["profile_prefill"]["gpu_ms"] == 1.0 and found["profile_decode"]["step_ms"] == 1.0
    assert found["tokens_answered"] == [[5]] * 5 and found["logprobs"] == [{"5": -1.0}] * 5


def test_a_shadow_arm_goes_on_until_its_steps_and_keeps_every_ranks_tallies(
    an_arm: Callable[[str], dict[str, Any]],
) -> None:
    found = an_arm("shadow")
    assert 700 <= found["steps"] < 700 + 64
    calls = engine_arm.LAYERS * found["steps"]
    assert found["shadow"] == {f"rank {rank}: fused_norm_rope.q latent": {"calls": calls} for rank in range(2)}


def test_engine_steps_are_timed_one_by_one_and_the_step_put_back() -> None:
    engine = types.SimpleNamespace(step=lambda: time.sleep(0.002))
    step = engine.step
    runs = [engine_arm.step_times(engine, lambda: [engine.step() for _ in range(9)]) for _ in range(2)]
    assert [len(run) for run in runs] == [9, 9] and engine.step is step
    with pytest.raises(ZeroDivisionError):
        engine_arm.step_times(engine, lambda: 1 // 0)
    assert engine.step is step
    found = engine_arm.decode_steps(runs)
    assert 2 <= found["p10"] <= found["ms"] <= found["p90"] and found["cpu_ms"] < 1, "asleep, it has no processor"
    ends = [(100.0, 1.0)] * 2
    assert engine_arm.decode_steps([[*ends, (1.0, 0.5), (2.0, 0.5), (3.0, 0.5), *ends]])["ms"] == 2.0


def _spin() -> int:
    total = 0
    for value in range(50_000):
        total += value & 3
    return total


def test_a_profile_of_the_host_names_who_spends_the_time() -> None:
    found = engine_arm.function_times(lambda: [_spin() for _ in range(4)])
    first = found["functions"][0]
    assert first["function"] == "test_vllm_bench.py:_spin" and first["calls"] == 4
    assert found["host_ms"] >= first["ms"] > found["host_ms"] / 2


def test_a_result_is_on_disk_after_every_step(tmp_path: Path) -> None:
    spec = engine_arm.Spec("glm-5", "stock", True, "", str(tmp_path / "r.json"), tokens=(17,))
    result = engine_arm.Result(spec)
    result.put(ttft={"17": 1.0})
    result.put(tpot=2.0)
    found = json.loads((tmp_path / "r.json").read_text())
    assert (found["name"], found["ttft"], found["tpot"]) == ("glm-5/stock/graphs", {"17": 1.0}, 2.0)
    assert found["complete"] is False


def test_the_document_is_long_enough_and_says_when_not(tmp_path: Path) -> None:
    book = tmp_path / "book.txt"
    book.write_bytes(b"a" * 40_000)
    length = sum(len((ROOT / name).read_bytes()) for name in document.DOCUMENTS) + 1000
    tokens = document.document(length, book)
    assert len(tokens) == length and tokens[-1] == ord("a") + document.SHIFT and min(tokens) >= document.SHIFT
    assert len(document.document(document.LEAST, None)) == document.LEAST
    with pytest.raises(ValueError, match=r"book: expected 900000 bytes of documentation and book; got \d+"):
        document.document(900_000, book)


@pytest.mark.parametrize(("shift", "within"), [(0.005, True), (0.5, False)])
def test_the_plug_in_is_held_to_the_stock_engines_own_spread(shift: float, within: bool) -> None:
    stock = [[-1.0, -2.0, -3.0], [-1.01, -2.0, -3.02], [-1.0, -2.01, -3.0]]
    ours = [[value - shift for value in run] for run in stock]
    verdict = document.compare(stock, ours)["within"]
    assert all(verdict.values()) is within
