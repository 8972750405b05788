# ruff: noqa: F811  fixtures of another file are arguments
"""vLLM's V4 layer with and without the plug-in, on the CPU: the stub engine, small steps, and clocks that only run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import test_vllm_plugin as stub
import torch
from test_vllm_plugin import engine, operators  # noqa: F401

from preattn.bench import timing, v4_layer
from preattn.bench.run import CheckFailed
from preattn.integrations.vllm import projection, summary
from preattn.integrations.vllm import v4 as plugin_v4

ATTENTION = """
import torch
class DeepseekV4Attention(torch.nn.Module):
    def _wq_b_proj(self, qr, qr_scale=None):
        return self.wq_b(qr)
    def _fused_qnorm_rope_kv_insert(self, q, kv, positions, attn_metadata):
        step, cache = attn_metadata[self.swa_cache_layer.prefix], self.swa_cache_layer.kv_cache
        return torch.ops.preattn_test_C.fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert(
            q, kv, cache.view(len(cache), -1), step.slot_mapping, positions, self.rotary_emb.cos_sin_cache,
            self.padded_heads, self.eps, step.block_size, not self.kv_mxfp8, self.kv_mxfp8,
        )
"""
RAN: list[tuple[str, bool]] = []  # arms that a clock has run, each with whether the operators were overridden then


def clock(arms: v4_layer.Arms) -> dict[str, timing.Times]:
    for name, arm in arms.items():
        arm()
        RAN.append((name, plugin_v4._library is not None))
    return dict.fromkeys(arms, timing.Times(2.0, 1.0, 3.0))


def capture(arm: Callable[[], torch.Tensor]) -> tuple[Any, torch.Tensor]:
    kept = arm().clone()
    return SimpleNamespace(replay=lambda: kept.copy_(arm())), kept


@pytest.fixture
def bench(engine: Path, operators: Any, monkeypatch: Any) -> Iterator[Callable[..., list[dict[str, Any]]]]:
    """Runs a small case; both models' modules hold the same layer."""
    for module in plugin_v4.MODELS:
        path = engine / (module.replace(".", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(ATTENTION)
    for name, value in {"RANK": 256, "TIMED_TOKENS": 4, "REPLAYED_TOKENS": 5}.items():
        monkeypatch.setattr(v4_layer, name, value)
    for name, function in {"cold": clock, "host": clock, "capture": capture}.items():
        monkeypatch.setattr(timing, name, function)
    monkeypatch.setattr(v4_layer.Case, "padded_heads", 8)
    monkeypatch.setenv("PREATTN_TRACE", "1")
    RAN.clear()

    def measure(model: str = "v41", weight: str = "bf16", heads: int = 4) -> list[dict[str, Any]]:
        return v4_layer.measure(v4_layer.Case(v4_layer.MODELS[model], weight, heads), (3, 5), device="cpu")

    with torch.no_grad():
        yield measure
    assert plugin_v4._library is None, "the engine was not put back"


@pytest.mark.parametrize("heads", [4, 8])
@pytest.mark.parametrize("weight", ["bf16", "e4m3"])
@pytest.mark.parametrize("model", list(v4_layer.MODELS))
def test_equal_bits_give_rows(bench: Any, tmp_path: Path, model: str, weight: str, heads: int) -> None:
    rows = bench(model, weight, heads)
    assert RAN == [("projection", False), ("vllm", False), ("preattn", True)] * 2
    assert "quant_insert, in place" in summary()["plans"][next(iter(plugin_v4.OPS))]
    assert any("in the buffer" in plan for plan in summary()["plans"]["wq_b"]) == (heads == 4)
    (path := tmp_path / "v4_layer.json").write_text(json.dumps({"header": {}, "rows": rows}))
    small, large = v4_layer.read_v4_layer(path).rows
    assert (small.tokens, set(small.host_us), small.us, small.replay_equal) == (3, set(large.us), {}, None)
    assert (large.tokens, set(large.us), large.host_us, large.replay_equal) == (5, {n for n, _ in RAN}, {}, True)
    assert small.elements == 3 * 8 * 512 and (small.differing, large.differing) == (0, 0)


FAR, MANY = "elements of the query are more than a rounding apart", "1 elements of the query differ, and at most 0 may"
PLANTED = (("query", "v41", MANY), ("query", "v4", FAR), ("cache", "v4", "the cache differs"))


@pytest.mark.parametrize(("mark", "model", "message"), PLANTED)
def test_a_planted_difference_ends_the_run(bench: Any, monkeypatch: Any, mark: str, model: str, message: str) -> None:
    monkeypatch.setattr(stub, "MARK", mark)
    with pytest.raises(CheckFailed, match=f"4 heads, 3 tokens: {message}"):
        bench(model)


def test_what_the_plug_in_leaves_to_the_engine_is_compared_all_the_same(bench: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(projection, "EAGER_TOKENS", 8)
    assert [row["differing"] for row in bench()] == [0, 0]
    plans = summary()["plans"][next(iter(plugin_v4.OPS))]
    assert set(plans) == {"quant_insert, in place", "the engine's own"}, "timed as it is served"
    monkeypatch.setattr(stub, "MARK", "query")
    with pytest.raises(CheckFailed, match=MANY):
        bench()


def test_a_wrong_replay_a_wrong_writer_and_none_end_the_run(bench: Any, monkeypatch: Any) -> None:
    def write(linear: Any, latent: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(linear(latent)).view(torch.int16)[0, 0] ^= 1
        out.as_strided(out.shape, out.stride(), out.shape[1])[0, 0] = 1.0

    monkeypatch.setattr(timing, "capture", lambda arm: (SimpleNamespace(replay=lambda: None), arm().clone()))
    with pytest.raises(CheckFailed, match="a captured step differs, replayed on other inputs"):
        bench()
    monkeypatch.setattr(projection, "_unquantised", lambda *_: projection.Writer("wrong", write))
    with pytest.raises(CheckFailed, match="the projection differs; heads past the rank's are written"):
        bench()
    monkeypatch.setattr(projection, "_unquantised", lambda *_: "a reason")
    with pytest.raises(CheckFailed, match="wq_b does not write where attention reads: a reason"):
        bench()


def test_the_committed_run() -> None:
    found = v4_layer.read_v4_layer(Path(__file__).parents[1] / "results" / "v4_layer.json")
    lines = v4_layer.table(found.rows).splitlines()
    sizes = "64 tokens | 1,024 tokens | 4,096 tokens | 16,384 tokens | host, 32 tokens"
    assert lines[0] == f"| model | wq_b | heads | {sizes} | differing |"
    assert len(lines) == 2 + len({(row.model, row.weight, row.heads) for row in found.rows})
    assert found.header["clock"] and all(row.differing < row.elements for row in found.rows)
