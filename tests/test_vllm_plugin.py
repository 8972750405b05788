"""The plug-in for vLLM on the CPU: when it acts and when it does not, and that a layer's results do not change.

The engine is the package of ``vllm_stub.py``, laid out in a folder, but for its loader, which is the release's own file
(skipped where that cannot be had), and for the last test, where the release's own kernels run in Triton's interpreter.
"""

from __future__ import annotations

import ast
import importlib
import logging
import math
import multiprocessing
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_vllm_contract import LOADER, path_of, sources
from torch import Tensor
from vllm_stub import lay_out

from preattn import dispatch, formats, v4
from preattn.cases.base import activations, rope_table
from preattn.integrations.vllm import (
    dsa,
    flashmla,
    layers,
    ops,
    patching,
    plugin,
    projection,
    register,
    report,
    shadow,
    summary,
    unregister,
    warm,
)
from preattn.integrations.vllm import dsa as plugin_dsa
from preattn.integrations.vllm import v4 as plugin_v4
from preattn.kernels.launch import Launch

TOKENS, MOST, RANK, INDEX_HEADS, BLOCK = 5, 12, 64, 8, 64
ENGINE = ("vllm",)


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A stub engine that can be imported, with nothing of another test left in the process."""
    if any(name == "vllm" for name in sys.modules):
        pytest.skip("an installed vLLM is imported already; these tests bring their own")
    for variable in ("PREATTN_DISABLE", "PREATTN_SHADOW", "PREATTN_TRACE", "VLLM_PLUGINS"):
        monkeypatch.delenv(variable, raising=False)
    lay_out(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    unregister()
    yield tmp_path
    unregister()
    layers.engine.__dict__.clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        del sys.modules[name]


def model() -> tuple[Any, Any, Any]:
    """The stub's modules: attention, kernels, backend."""
    names = (layers.ATTENTION, layers.KERNELS, layers.FLASHMLA)
    attention, kernels, backend = (importlib.import_module(name) for name in names)
    return attention, kernels, backend


def rows(*shape: int, seed: int) -> Tensor:
    return activations(*shape, dtype=torch.bfloat16, seed=seed, device="cpu")


def a_layer(heads: int = 16, *, jit_warmup: bool = False) -> Any:
    """A layer of the stub's model, its caches bound."""
    attention, _, _ = model()
    norm = SimpleNamespace(weight=torch.randn(128), bias=torch.randn(128), eps=1e-6)
    table = SimpleNamespace(cos_sin_cache=rope_table(64).bfloat16())
    index_cache = torch.full((2, BLOCK, 132), 0xA5, dtype=torch.uint8)
    weight = rows(RANK, heads * 192, seed=3)
    parts = {
        "num_local_heads": heads,
        "q_lora_rank": RANK,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "kv_cache_dtype": "fp8_ds_mla",
        "use_pcp": False,
        "skip_topk": False,
        "_index_rope_interleave": False,
        "_fp8_query": False,
        "_k_scale": torch.ones(()),
        "_k_scale_float": 1.0,
        "_q_scale": torch.ones(()),
        "topk_indices_buffer": torch.zeros(MOST, 16, dtype=torch.int32),
        "q_a_layernorm": SimpleNamespace(weight=rows(RANK, seed=4), variance_epsilon=1e-6),
        "kv_a_layernorm": SimpleNamespace(weight=rows(512, seed=5), variance_epsilon=1e-6),
        "rotary_emb": table,
        "indexer_rope_emb": table,
        "indexer": SimpleNamespace(
            head_dim=128,
            n_head=INDEX_HEADS,
            topk_tokens=16,
            k_norm=norm,
            k_cache=SimpleNamespace(kv_cache=index_cache, uses_shuffled_layout=False),
        ),
        "q_b_proj": lambda latent: latent @ weight,
        "W_UK_T": rows(heads, 128, 512, seed=6),
        "kv_cache": torch.tensor([]),
    }
    config = SimpleNamespace(kernel_config=SimpleNamespace(enable_jit_warmup=jit_warmup))
    layer = attention.DeepseekV32Attention(config, "model.layers.7.attn", parts)
    layer.bind_kv_cache(torch.full((2, BLOCK, 656), 0xA5, dtype=torch.uint8))
    return layer


def a_step(seed: int = 1, *, stores: bool = True) -> tuple[Tensor, Any]:
    latents = rows(TOKENS, RANK + 576, seed=seed)
    q_c, kv_c, k_pe = latents.split([RANK, 512, 64], -1)
    keys = rows(TOKENS, 128 + INDEX_HEADS, seed=seed + 1)
    slots = torch.tensor([3, 70, 41, -1, 9])
    step = SimpleNamespace(
        q_c=q_c,
        kv_c=kv_c,
        k_pe=k_pe,
        index_k=keys[:, :128],
        index_weights=keys[:, 128:],
        index_q=rows(TOKENS, INDEX_HEADS, 128, seed=seed + 2),
        slots=slots if stores else None,
    )
    return torch.tensor([0, 5, 17, 30, 63]), step


def outcome(layer: Any, *, stores: bool = True) -> list[Tensor]:
    """What a step leaves: attention's result, the indexer's query and weights, both caches, the top-k buffer."""
    result = layer(*a_step(stores=stores))
    return [
        result,
        layer.index_query.view(torch.uint8),
        layer.index_weights,
        layer.kv_cache,
        layer.indexer.k_cache.kv_cache,
        layer.topk_indices_buffer,
    ]


def plain(heads: int = 16, *, stores: bool = True) -> list[Tensor]:
    """The same of the engine as it is."""
    torch.manual_seed(0)
    return outcome(a_layer(heads), stores=stores)


# -- when it acts ----------------------------------------------------------------------------------------------


def test_registering_imports_no_model_and_does_not_touch_cuda(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def initialise() -> None:
        raise AssertionError("CUDA is initialised")

    monkeypatch.setattr(torch.cuda, "_lazy_init", initialise)  # a machine without a GPU never is
    register()
    register()  # every process of the engine may do so several times
    loaded = [name for name in sys.modules if name.startswith("vllm.")]
    assert loaded == [] and not torch.cuda.is_initialized()
    assert sum(isinstance(finder, patching.AfterImport) for finder in sys.meta_path) == 1


@pytest.mark.parametrize("first", [True, False], ids=["before the model", "after the model"])
def test_both_modules_get_the_ops_whenever_the_model_is_imported(engine: Path, first: bool) -> None:
    if not first:
        model()
    register()
    attention, kernels, backend = model()
    for module in (attention, kernels):
        assert module.fused_norm_rope is ops.fused_norm_rope and module.fused_q is ops.fused_q
    assert attention.DeepseekV32Attention.forward is dsa.forward
    assert backend.FlashMLASparseImpl.forward_mqa is flashmla.forward_mqa
    assert attention.torch.bmm is ops.bmm and attention.torch.cat is torch.cat
    assert plugin.active()


def test_unregistering_puts_everything_back(engine: Path) -> None:
    attention, kernels, backend = model()
    owners = (attention, kernels, backend, attention.DeepseekV32Attention, backend.FlashMLASparseImpl)
    before = [dict(vars(owner)) for owner in owners]
    register()
    assert [dict(vars(owner)) for owner in owners] != before
    unregister()
    assert [dict(vars(owner)) for owner in owners] == before
    assert not any(isinstance(finder, patching.AfterImport) for finder in sys.meta_path)
    register()
    assert plugin.active()


def test_a_model_that_is_not_ours_runs_untouched(engine: Path) -> None:
    register()
    other = importlib.import_module("vllm.models.other")
    assert other.OtherAttention.__module__ == "vllm.models.other" and not plugin.active()


def untouched() -> bool:
    attention, kernels, _ = model()
    return (
        kernels.fused_q.__module__ == layers.KERNELS
        and attention.fused_norm_rope is kernels.fused_norm_rope
        and attention.torch is torch
        and not plugin.active()
    )


def test_the_environment_turns_it_off(
    engine: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PREATTN_DISABLE", "1")
    with caplog.at_level(logging.INFO):
        register()
        register()
    assert untouched() and [r.message for r in caplog.records] == ["preattn is not active: PREATTN_DISABLE is set"]


def test_another_version_is_left_alone(engine: Path, caplog: pytest.LogCaptureFixture) -> None:
    (engine / "vllm" / "__init__.py").write_text('__version__ = "0.34.1"\n')
    with caplog.at_level(logging.INFO):
        register()
    assert untouched()
    assert [r.message for r in caplog.records] == [
        "preattn is not active: it knows vLLM 0.33.0, and this is 0.34.1",
    ]


@pytest.mark.parametrize(
    ("capability", "message"),
    [(80, "compute capability 9.0 and newer, and this is 80"), (0, "for CUDA devices, and this platform is stub")],
)
def test_another_device_is_left_alone(
    engine: Path, caplog: pytest.LogCaptureFixture, capability: int, message: str
) -> None:
    importlib.import_module("vllm.platforms").current_platform.capability = capability
    with caplog.at_level(logging.INFO):
        register()
        assert untouched()
    assert [message in r.message for r in caplog.records] == [True]


def test_another_plug_in_that_holds_a_name_is_named(engine: Path, caplog: pytest.LogCaptureFixture) -> None:
    _, kernels, _ = model()

    def fused_q(*args: Any) -> None: ...

    kernels.fused_q = fused_q
    register()
    assert kernels.fused_q is fused_q and kernels.fused_norm_rope.__module__ == layers.KERNELS and not plugin.active()
    (line,) = [r.message for r in caplog.records]
    assert f"{layers.KERNELS}.fused_q is not {layers.KERNELS}'s own: {__name__}." in line and __file__ in line


@pytest.mark.parametrize("name", ["torch", "current_workspace_manager"])
def test_another_plug_in_that_holds_what_a_module_imported_is_named(
    engine: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    attention, _, backend = model()
    owner = attention if name == "torch" else backend
    setattr(owner, name, theirs := SimpleNamespace(__name__="theirs", __module__="another"))
    register()
    assert getattr(owner, name) is theirs and not plugin.active()
    (line,) = [r.message for r in caplog.records if r.levelno >= logging.WARNING]
    assert f"{owner.__name__}.{name} is not" in line and "another." in line


def test_a_layer_that_is_built_says_who_has_replaced_a_name_since(
    engine: Path, caplog: pytest.LogCaptureFixture
) -> None:
    register()
    attention, _, _ = model()
    attention.fused_q = len
    a_layer()
    a_layer()
    lines = [r.message for r in caplog.records if r.levelno == logging.WARNING]
    assert len(lines) == 1 and lines[0].startswith(f"preattn no longer holds {layers.ATTENTION}.fused_q, replaced by")


def test_another_plug_in_that_comes_later_is_named(engine: Path) -> None:
    register()
    attention, _, _ = model()
    attention.fused_q = len
    assert not plugin.active()
    (line,) = plugin.taken()
    assert line.startswith(f"{layers.ATTENTION}.fused_q, replaced by builtins.len")
    unregister()
    assert attention.fused_q is len  # theirs stays


def test_two_installations_are_named(
    engine: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("one", "two"):
        info = engine / name / f"preattn_{name}-1.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: preattn-{name}\nVersion: 1\n")
        (info / "entry_points.txt").write_text(
            f"[{plugin.GROUP}]\n{plugin.NAME} = preattn.integrations.vllm:register\n"
        )
        monkeypatch.syspath_prepend(str(engine / name))
    register()
    (line,) = [r.message for r in caplog.records]
    assert "times, in " in line and str(engine / "one") in line and str(engine / "two") in line
    assert f"{plugin.__file__} is used" in line


def test_an_exception_at_start_up_disables_it(engine: Path, caplog: pytest.LogCaptureFixture) -> None:
    _, _, backend = model()
    del backend.FlashMLASparseImpl.forward_mqa
    register()
    assert untouched()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and record.exc_info
    assert record.message.startswith(f"preattn is not active: AttributeError while patching {layers.FLASHMLA}")


def test_the_engines_own_loader_loads_it(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (sources() / path_of(LOADER)).read_text()
    (engine / "vllm" / "plugins").mkdir()
    (engine / "vllm" / "plugins" / "__init__.py").write_text(text)
    info = engine / "preattn-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: preattn\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[{plugin.GROUP}]\n{plugin.NAME} = preattn.integrations.vllm:register\n")
    loader = importlib.import_module("vllm.plugins")
    monkeypatch.setenv("VLLM_PLUGINS", "")
    loader.load_general_plugins()
    assert untouched()
    for name in (layers.ATTENTION, layers.KERNELS, layers.FLASHMLA):
        del sys.modules[name]
    monkeypatch.setenv("VLLM_PLUGINS", "other,preattn")
    loader.plugins_loaded = False
    loader.load_general_plugins()
    model()
    assert plugin.active()


def said() -> list[str]:
    """Every string of the plug-in's and the launcher's sources, a placeholder as ``...``."""
    found = []
    plug_in = Path(plugin.__file__).parent
    for path in [*plug_in.glob("*.py"), plug_in.parents[1] / "kernels" / "launch.py"]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [str(x.value) if isinstance(x, ast.Constant) else "..." for x in node.values]
                found.append("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(re.sub("%[sd]", "...", node.value))
    return found


def test_the_lines_that_the_document_explains_are_the_plug_ins() -> None:
    text = (Path(__file__).parents[1] / "docs" / "integrations.md").read_text()
    section = text.partition("### Troubleshooting")[2].partition("\n## ")[0]
    lines = re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE)
    assert len(lines) == 20
    for line in lines:
        fixed = re.sub(r"\b(NAME|MODULE|LAYER|N)\b|0\.33\.0|_C(?=::)|CUDA(?= by)|fused_norm_rope", "...", line)
        pattern = ".*".join(re.escape(part) for part in fixed.split("..."))
        assert any(re.search(pattern, string) for string in said()), line


# -- a layer's results -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stores", [True, False], ids=["step", "profiling run"])
@pytest.mark.parametrize("heads", [16, 64, 128])
def test_a_layer_gives_what_the_engine_gives(
    engine: Path, monkeypatch: pytest.MonkeyPatch, heads: int, stores: bool
) -> None:
    expected = plain(heads, stores=stores)
    monkeypatch.setenv("PREATTN_TRACE", "1")
    register()
    torch.manual_seed(0)
    layer = a_layer(heads)
    found = outcome(layer, stores=stores)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    padded = 64 if heads <= 64 else 128
    assert summary()["plans"] == {
        "forward_mqa": {f"the buffer as it is, {heads} of {padded} heads": 1},
        "fused_norm_rope": {f"one launch, {'dsa_fp8' if stores else 'nothing stored'}, indexer": 1},
        "fused_q": {f"in the buffer, {heads} of {padded} heads, indexer": 1},
    }
    buffer = layers.query_buffer(layer)
    assert layer.impl.concatenated == 0 and buffer is not None and buffer.shape == (MOST, padded, 576)
    assert not buffer[:, heads:].any() and buffer[:TOKENS, :heads].any()


def test_layers_use_one_buffer_in_turn(engine: Path) -> None:
    def results() -> tuple[list[Any], list[Tensor]]:
        """Of two layers, each with a step of its own: what one leaves in the buffer is wrong for the other."""
        torch.manual_seed(0)
        made = [a_layer(), a_layer()]
        return made, [layer(*a_step(seed)).clone() for layer, seed in zip(made, (1, 11), strict=True)]

    _, expected = results()
    register()
    (first, second), found = results()
    assert layers.query_buffer(first) is layers.query_buffer(second) is not None
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)) and not torch.equal(*found)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"use_pcp": True}, "context parallelism gathers it first"),
        ({"_fp8_query": True}, "it is e4m3, packed by fused_q itself"),
        ({"kv_cache_dtype": "nvfp4_ds_mla"}, "FLASHMLA_SPARSE with a cache of nvfp4_ds_mla is not among those known"),
        (
            {"attn_backend": "FLASH_ATTN_MLA_SPARSE", "kv_cache_dtype": "auto"},
            "reads the latent and the rotated dims apart",
        ),
        ({"attn_backend": "FLASHINFER_MLA_SPARSE", "kv_cache_dtype": "auto"}, "takes it as the engine hands it over"),
        ({"num_local_heads": 192}, "expected at most 128 heads a rank; got 192"),
    ],
)
def test_a_query_that_is_not_packed_says_why(engine: Path, change: dict[str, Any], reason: str) -> None:
    register()
    layer = a_layer()
    name = change.pop("attn_backend", None)
    if name is not None:
        layer.attn_backend = SimpleNamespace(get_name=lambda: name)
    layer.__dict__.update(change)
    assert reason in (layers.describe(layer).packs or "")


def test_an_unpacked_query_is_the_pair(engine: Path) -> None:
    expected = plain()
    register()
    torch.manual_seed(0)
    layer = a_layer()
    layers.state_of(layer).packs = "a test says so"  # type: ignore[union-attr]
    found = outcome(layer)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert layer.impl.concatenated == 1 and layers.query_buffer(layer) is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"index_k_out": torch.empty(0)}, "the indexer key is to be returned"),
        ({"indexer_cache_shuffled": True}, "a shuffled indexer cache"),
        ({"mla_kv_cache_dtype": "nvfp4_ds_mla"}, "a cache of nvfp4_ds_mla"),
        ({"indexer_k_cache": None}, "one of the caches is filled elsewhere"),
        ({"k_pe_out": None}, "one of kv_c_out and k_pe_out is to be returned"),
    ],
)
def test_what_the_library_does_not_cover_runs_the_engines_own(
    engine: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, change: dict[str, Any], reason: str
) -> None:
    monkeypatch.setenv("PREATTN_TRACE", "1")
    register()
    _, kernels, _ = model()
    kernels.wrong = "raises"
    positions, step = a_step()
    layer = a_layer()
    call = {
        "positions": positions,
        "q_c": step.q_c,
        "q_rms_norm_w": layer.q_a_layernorm.weight,
        "q_rms_eps": 1e-6,
        "kv_c": step.kv_c,
        "kv_rms_norm_w": layer.kv_a_layernorm.weight,
        "kv_rms_eps": 1e-6,
        "k_pe": step.k_pe,
        "k_rope_cos_sin_cache": layer.rotary_emb.cos_sin_cache,
        "index_k": step.index_k,
        "index_k_layer_norm_w": layer.indexer.k_norm.weight,
        "index_k_layer_norm_bias": layer.indexer.k_norm.bias,
        "index_k_layer_norm_eps": 1e-6,
        "index_k_rope_cos_sin_cache": layer.rotary_emb.cos_sin_cache,
        "topk_indices_buffer": layer.topk_indices_buffer,
        "slot_mapping": step.slots,
        "indexer_k_cache": layer.indexer.k_cache.kv_cache,
        "mla_kv_cache": layer.kv_cache,
        "mla_kv_cache_dtype": "fp8_ds_mla",
        "kv_c_out": torch.empty(TOKENS, 512, dtype=torch.bfloat16),
        "k_pe_out": torch.empty(TOKENS, 64, dtype=torch.bfloat16),
    }
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            with pytest.raises(RuntimeError, match="the engine's own"):
                kernels.fused_norm_rope(**{**call, **change})
    assert sum(reason in r.message for r in caplog.records) == 1
    (plan,) = summary()["plans"]["fused_norm_rope"].items()
    assert reason in plan[0] and plan[1] == 2


def test_slots_longer_than_the_step_are_cut(engine: Path) -> None:
    register()
    layer, (positions, step) = a_layer(), a_step()
    step.slots = torch.cat([step.slots, torch.tensor([100, 101])])
    layer(positions, step)
    untouched_rows = formats.load(layer.kv_cache, formats.record("dsa_fp8"), torch.tensor([100, 101]))
    assert (untouched_rows == 0xA5).all()


def test_an_exception_in_a_step_is_the_steps(engine: Path) -> None:
    register()
    layer, (positions, step) = a_layer(), a_step()
    step.kv_c = step.kv_c[:, :128]
    with pytest.raises((ValueError, RuntimeError)):
        layer(positions, step)
    assert layers.thread.layer is None and not layers.thread.packed


# -- warm-up ---------------------------------------------------------------------------------------------------


def test_the_engines_warmup_registry_compiles_a_kind_of_layer_once(
    engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register()
    registry = importlib.import_module("vllm.model_executor.warmup.jit_warmup").JitWarmupRegistry
    active = registry()
    token = registry._active.set(active)
    seen: list[Any] = []
    monkeypatch.setattr(warm, "warm", lambda layer: seen.append(layer) or 0)
    layers_made = [a_layer(jit_warmup=True) for _ in range(3)] + [a_layer(64, jit_warmup=True)]
    registry._active.reset(token)
    assert seen == []  # binding a cache leaves it to the registry
    assert active.warmup() == {warm.JIT_WARMUP: 2}
    assert seen == [layers_made[0], layers_made[3]]


def test_without_the_registry_a_layer_is_warmed_when_its_cache_is_bound(
    engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register()
    model()
    seen: list[Any] = []
    monkeypatch.setattr(warm, "warm", lambda layer: seen.append(layer) or 0)
    layer = a_layer()
    assert seen == [layer]


def test_warmup_asks_for_every_variant_that_a_layer_launches(engine: Path) -> None:
    """The variants of steps, of profiling runs and of prefills that other attention takes, held back and compared."""
    register()
    layer = a_layer()
    with dispatch.hold() as warmed:
        layers.thread.layer, layers.thread.warming = layer, True
        for tokens in (1, MOST):
            warm._calls(layer, tokens)
        layers.thread.layer, layers.thread.warming = None, False
    with dispatch.hold() as launched:
        for stores in (True, False):
            layer(*a_step(stores=stores))
        layers.state_of(layer).packs = "a test says so"  # type: ignore[union-attr]
        layer(*a_step())

    def variants(launches: list[Any]) -> set[Any]:
        return {
            (x.kernel.name, x.constants, x.num_warps, tuple(None if t is None else t.dtype for t in x.tensors))
            for x in launches
        }

    assert variants(launched) and variants(launched) <= variants(warmed)


OTHER_LAYERS: dict[str, dict[str, Any]] = {
    "shares top-k": {"skip_topk": True},
    "has no indexer": {"indexer": None, "skip_topk": True},
    "e4m3 query": {"_fp8_query": True},
    "e4m3 cache": {"kv_cache_dtype": "fp8", "kv_cache": torch.zeros(2, BLOCK, 576, dtype=torch.uint8)},
    "unknown cache": {"kv_cache_dtype": "nvfp4"},
    "interleaved indexer": {"_index_rope_interleave": True},
}


@pytest.mark.parametrize("kind", OTHER_LAYERS)
def test_layers_of_every_kind_are_warmed(
    engine: Path, kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    prepared: list[str] = []
    monkeypatch.setattr(Launch, "prepare", lambda launch, device: prepared.append(launch.kernel.name) or False)
    register()
    layer = a_layer()
    for name, value in OTHER_LAYERS[kind].items():
        setattr(layer, name, value)
    with dispatch.hold() as held:
        warm.warm(layer)
    assert held == [] and plugin.active()  # warm() holds launches itself
    assert {"dsa_norm_rope_kernel", "dsa_query_kernel"} <= set(prepared)
    layer.bind_kv_cache(layer.kv_cache)
    assert plugin.active(), caplog.text


@pytest.mark.parametrize("when", ["looking at", "compiling for"])
def test_a_failure_while_the_engine_starts_puts_it_back(
    engine: Path, when: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(layer: Any) -> Any:
        raise KeyError("a name that moved")

    register()
    attention, _, _ = model()
    name = "describe" if when == "looking at" else "warm"
    with monkeypatch.context() as broken:
        broken.setattr(plugin_dsa if name == "describe" else warm, name, fails)
        layer = a_layer()
    assert not plugin.active() and layer.kv_cache.numel()
    assert f"preattn is not active: KeyError while {when} model.layers.7.attn: 'a name that moved'" in caplog.text
    assert attention.DeepseekV32Attention.forward.__module__ == layers.ATTENTION
    a_layer()  # and stays so
    assert not plugin.active()


@pytest.fixture
def registry(engine: Path) -> Iterator[Any]:
    """The engine's warm-up registry, collecting."""
    kind = importlib.import_module("vllm.model_executor.warmup.jit_warmup").JitWarmupRegistry
    found = kind()
    token = kind._active.set(found)
    yield found
    kind._active.reset(token)


def test_an_engine_that_was_put_back_is_not_compiled_for(registry: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    register()
    a_layer(jit_warmup=True)
    plugin.refuse("a test says so")
    seen: list[Any] = []
    monkeypatch.setattr(warm, "warm", seen.append)
    registry.warmup()
    warm.JIT_WARMUP.compile(SimpleNamespace(layer=None))
    assert seen == []


def test_a_layer_that_has_no_kind_puts_the_engine_back(registry: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(layer: Any) -> Any:
        raise AttributeError("a name that moved")

    register()
    a_layer(jit_warmup=True)
    monkeypatch.setattr(warm, "_kind", fails)
    registry.warmup()
    assert not plugin.active()


# -- shadow mode -----------------------------------------------------------------------------------------------


def shadowed(monkeypatch: pytest.MonkeyPatch, wrong: str | None = None, heads: int = 16) -> dict[str, Any]:
    monkeypatch.setenv("PREATTN_SHADOW", "1")
    register()
    _, kernels, _ = model()
    layer = a_layer(heads)
    kernels.wrong = wrong
    layer(*a_step())
    found: dict[str, Any] = summary()["shadow"]
    return found


def test_shadow_mode_finds_nothing_where_nothing_differs(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tallies = shadowed(monkeypatch)
    assert set(tallies) == {
        "absorb.latent",
        "forward_mqa.attention",
        *(f"fused_norm_rope.{x}" for x in ("q latent", "kv latent", "rotated key", "top-k buffer")),
        *(f"fused_norm_rope.{x}" for x in ("kv cache", "indexer cache")),
        *(f"fused_q.{x}" for x in ("indexer query", "indexer weights", "main query", "padding heads")),
    }
    assert all(t["calls"] == 1 and t["mismatches"] == 0 for t in tallies.values())
    assert all(t["norm_flips"] == 0 and t["scale_edges"] == 0 for t in tallies.values())
    assert all(clean for _, clean in shadow.lines())


def test_shadow_mode_changes_nothing(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = plain()
    monkeypatch.setenv("PREATTN_SHADOW", "1")
    register()
    torch.manual_seed(0)
    found = outcome(a_layer())
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("wrong", "output", "what"),
    [
        ("latent", "fused_norm_rope.q latent", "layer model.layers.7.attn, element [1, 5] of [5, 64]: ours "),
        ("query", "fused_q.main query", "layer model.layers.7.attn, element [0, 1, 2] of [5, 16, 64]: ours "),
        (
            "stray",
            "fused_norm_rope.kv cache",
            "layer model.layers.7.attn, slot 40, byte 600 of its dsa_fp8 record: ours 0xa5",
        ),
    ],
)
def test_shadow_mode_names_the_first_difference(
    engine: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, wrong: str, output: str, what: str
) -> None:
    tallies = shadowed(monkeypatch, wrong)
    assert tallies[output]["mismatches"] == 1 and what in tallies[output]["first"]
    assert sum(t["mismatches"] for t in tallies.values()) == 1
    with caplog.at_level(logging.INFO):
        report.say()
    assert any(r.levelno == logging.ERROR and what in r.message for r in caplog.records)


@pytest.mark.parametrize(("wrong", "output"), [("step", "q latent"), ("code", "kv cache")])
def test_a_norms_rounding_is_counted_apart(
    engine: Path, monkeypatch: pytest.MonkeyPatch, wrong: str, output: str
) -> None:
    tally = shadowed(monkeypatch, wrong)[f"fused_norm_rope.{output}"]
    assert (tally["mismatches"], tally["norm_flips"]) == (0, 1) and tally["first"] is None
    (line,) = [line for line, _ in shadow.lines() if f": {output}: " in line]
    assert "norm roundings: 1 of " in line


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No tallies of another test, and none left."""
    unregister()
    yield
    unregister()


def tally(output: str) -> dict[str, Any]:
    found: dict[str, Any] = summary()["shadow"][f"op.{output}"]
    return found


def test_norm_roundings_come_in_groups_and_the_bound_is_of_all_calls(fresh: None) -> None:
    """Equal mantissas flip together: a dozen in one row of a small call is more than the share, and a norm's doing."""
    ours = rows(8, 1536, seed=1)
    engines = ours.clone()
    engines.view(torch.int16)[1, ::128] += 1
    assert math.ceil(shadow.NORM_FLIPS * ours.numel()) < 12
    shadow.compare("op", "q latent", "L", ours, engines, norm=True)
    assert (tally("q latent")["mismatches"], tally("q latent")["norm_flips"]) == (0, 12)
    for _ in range(200):
        shadow.compare("op", "q latent", "L", ours, ours, norm=True)
    assert tally("q latent")["mismatches"] == 0


def test_more_norm_roundings_than_a_norm_makes_are_a_mismatch(fresh: None) -> None:
    """Every element one step off, row by row: the first row may be a norm's, the second is not."""
    ours = rows(1, 512, seed=1)
    engines = ours.clone()
    engines.view(torch.int16)[:] += 1
    for mismatches in (0, 1, 2):
        shadow.compare("op", "kv latent", "L", ours, engines, norm=True)
        assert tally("kv latent")["mismatches"] == mismatches
    most = shadow.most_norm_flips(1024, 512)
    assert tally("kv latent")["norm_flips"] == 3 * 512, "counted, whatever comes of it"
    assert (
        f"512 elements of the call; 1024 norm roundings so far, and at most {most} may be"
        in (tally("kv latent")["first"])
    )


def test_a_flip_of_two_steps_is_a_mismatch_among_others_of_one(fresh: None) -> None:
    ours = rows(8, 512, seed=1)
    engines = ours.clone()
    engines.view(torch.int16)[2, 141:145] += 1
    engines.view(torch.int16)[3, 7] += 2
    shadow.compare("op", "kv latent", "L", ours, engines, norm=True)
    assert (tally("kv latent")["mismatches"], tally("kv latent")["norm_flips"]) == (1, 4)
    assert "element [3, 7] of [8, 512]" in tally("kv latent")["first"]


def _pages(codes: int) -> tuple[shadow.Pages, Tensor]:
    """Eight records in a cache, and a copy of its page in which so many codes of one are a step away."""
    record = formats.record("dsa_fp8")
    cache = torch.zeros(2, BLOCK, record.bytes, dtype=torch.uint8)
    slots = torch.arange(60, 68)
    values = rows(8, record.dim, seed=1).float()
    values[:, 0], values[:, 54:58] = 400.0, -32.0  # a scale of 1; codes 0xe0, and the engine's 0xe1
    formats.store(cache, record, slots, formats.encode(record, values))
    pages = shadow.Pages(cache, slots, record)
    pages.copy[0, 62, 54 : 54 + codes] ^= 1
    return pages, cache


def test_the_codes_of_a_norm_flip_in_groups_too(fresh: None) -> None:
    """Four codes of 512 with one mantissa, in a call of eight records whose share would be three."""
    pages, cache = _pages(4)
    before = cache.clone()
    assert math.ceil(shadow.NORM_FLIPS * 8 * 576) < 4
    pages.compare("op", "kv cache", "L", norm=True)
    assert (tally("kv cache")["mismatches"], tally("kv cache")["norm_flips"]) == (0, 4)
    assert torch.equal(cache, before)


def test_a_code_that_no_norm_decides_is_a_mismatch(fresh: None) -> None:
    pages, _ = _pages(1)
    pages.compare("op", "kv cache", "L")
    assert "slot 62, byte 54 of its dsa_fp8 record" in tally("kv cache")["first"]
    assert tally("kv cache")["first"].endswith("; 1 bytes of 1 records of the call")


def _index_query(edge: float = 448 * (1 + 2**-20)) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """An indexer query and its weights, and the same with one row's scale half of ours."""
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(3, 4, 128, generator=generator)
    values[1, 2] *= 2.0 ** -torch.arange(128).remainder(16)  # subnormal codes among them
    values[1, 2, 5] = edge
    exact = formats.ceil_power_of_two(values.abs().amax(-1) / 448)
    early = exact.clone()
    early[1, 2] /= 2
    weights = torch.randn(3, 4, generator=generator)

    def quantised(scale: Tensor) -> tuple[Tensor, Tensor]:
        codes = (values / scale[..., None]).clamp(-448, 448).to(torch.float8_e4m3fn)
        return codes, weights * scale

    return quantised(exact), quantised(early)


def test_a_scale_that_a_float32_logarithm_halves_is_a_class_of_its_own(
    fresh: None, caplog: pytest.LogCaptureFixture
) -> None:
    ours, engines = _index_query()
    apart = 2 * ours[0].float() != engines[0].float()
    assert apart[1, 2].any(), "no code is subnormal in ours and odd in theirs"
    with caplog.at_level(logging.INFO):
        shadow.compare_index_query("op", "L", ours, engines)
        report.say()
    for output in ("indexer query", "indexer weights"):
        found = tally(output)
        assert (found["mismatches"], found["norm_flips"], found["scale_edges"]) == (0, 0, 1)
        assert any(f"op: {output}: 1 calls, 0 mismatches; scale edges: 1 rows" in r.message for r in caplog.records)


@pytest.mark.parametrize("wrong", ["weight", "weight alone", "code", "not saturated", "quarter", "ours half"])
def test_what_is_no_scale_edge_is_a_mismatch(fresh: None, wrong: str) -> None:
    ours, engines = _index_query(460.0 if wrong == "not saturated" else 448 * (1 + 2**-20))
    if wrong == "weight":
        engines[1][1, 2] *= 1 + 2**-20
    if wrong == "weight alone":
        engines = (ours[0], engines[1])
    if wrong == "code":
        engines[0].view(torch.uint8)[1, 2, 16] ^= 1  # a normal code
    if wrong == "not saturated":
        engines[0].view(torch.uint8)[1, 2, 5] -= 1
    if wrong == "quarter":
        engines[1][1, 2] /= 2
    if wrong == "ours half":
        ours, engines = engines, ours
    shadow.compare_index_query("op", "L", ours, engines)
    assert tally("indexer weights")["mismatches"] == 1
    assert tally("indexer query")["mismatches"] == (wrong != "weight alone")
    assert tally("indexer query")["scale_edges"] == tally("indexer weights")["scale_edges"] == 0


def test_a_float32_logarithm_is_early_no_further_than_the_bound_says() -> None:
    powers = torch.arange(-22, 32, dtype=torch.float64)
    early, bound = torch.zeros_like(powers), math.log(2) * 2.0**-19
    for ulps in range(1, 64):
        above = (torch.exp2(powers) * (1 + ulps * 2.0**-23)).float()
        wrong = above.log2().ceil().double() == powers
        assert not (wrong & (ulps * 2.0**-23 > bound)).any()
        early += wrong
    assert early.max() >= 2, "no logarithm was early"
    assert 2 * 1.75 * bound <= shadow.SCALE_EDGES


def test_more_scale_edges_than_a_logarithm_makes_are_a_mismatch(fresh: None) -> None:
    ours, engines = _index_query()
    most = shadow.most_scale_edges(3 * 4 * (shadow.SCALE_EDGE_FLOOR + 2))
    for _ in range(most + 1):
        shadow.compare_index_query("op", "L", ours, engines)
    for output in ("indexer query", "indexer weights"):
        assert (tally(output)["mismatches"], tally(output)["scale_edges"]) == (1, most + 1)
        assert f"{most + 1} scale edges so far, and at most {most} may be" in tally(output)["first"]


def test_shadow_mode_refuses_a_captured_graph(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="enforce_eager=True"):
        shadowed(monkeypatch)


def _records(record: formats.Record, values: Tensor) -> Tensor:
    return formats.encode(record, values)


def test_a_scale_that_a_norm_moves_is_one_rounding() -> None:
    """A block whose maximum lies on a power of two: another scale, the same values on a coarser grid."""
    record = formats.record("dsa_fp8")
    values = torch.linspace(-200, 200, 576)[None].clone()
    values[0, 130] = 448.0
    moved = values.clone()
    moved[0, 130] = 448.0 * (1 + 2**-20)
    a, b = _records(record, values), _records(record, moved)
    assert (a != b).sum() > 64
    explained, flips = shadow._explained(record, a, b)
    assert flips == 1 and not ((a != b) & ~explained).any()
    b[0, 7] ^= 0x10  # two binades away: nothing explains that
    explained, _ = shadow._explained(record, a, b)
    assert ((a != b) & ~explained).any()


# -- V4 --------------------------------------------------------------------------------------------------------


def marked(*args: Any) -> Tensor:
    """The first operator as the engine's own: it may be wrong in a query's element, or in a byte of the cache."""
    result = plugin_v4._quant_insert(*args)
    if MARK == "query":
        result[1, 2, 3] += 1
    if MARK == "cache":
        args[2][0, 7] ^= 1
    return result


MARK: str | None = None


ENGINES: list[str] = []
"""The engine's own operators, as they ran."""


def engines_own(name: str, ours: Callable[..., Any]) -> Callable[..., Any]:
    """Ours as the engine's own operator, which takes steps of every size."""

    def run(*args: Any) -> Any:
        ENGINES.append(name)
        before, projection.EAGER_TOKENS = projection.EAGER_TOKENS, 0
        try:
            return ours(*args)
        finally:
            projection.EAGER_TOKENS = before

    return run


@pytest.fixture
def operators(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """The engine's four operators on the CPU; the first puts a mark where it ran."""
    monkeypatch.setattr(plugin_v4, "NAMESPACE", "preattn_test_C")
    monkeypatch.setattr(projection, "EAGER_TOKENS", 0)  # steps of a test are short
    step = "Tensor slot_mapping, Tensor position_ids, Tensor cos_sin_cache"
    schemas = {
        "fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert": f"(Tensor q_in, Tensor kv, Tensor(a!) k_cache, {step}, "
        "int q_head_padded, float eps, int cache_block_size, bool apply_q_norm=True, bool kv_mxfp8=False, "
        "bool apply_q_rope=True, bool is_q_interleaved=False) -> Tensor",
        "fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_bf16_insert": f"(Tensor(a!) q, Tensor kv, Tensor(b!) k_cache, "
        f"{step}, float eps, int cache_block_size, bool apply_q_norm=True) -> ()",
        "fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_fp8_insert": f"(Tensor q, Tensor kv, Tensor(a!) q_fp8, "
        f"Tensor(b!) k_cache, {step}, Tensor fp8_scale, Tensor q_fp8_scale_inv, float eps, int cache_block_size, "
        "bool apply_q_norm=True) -> ()",
        "fused_deepseek_v4_kv_rope_insert": f"(Tensor kv, Tensor(a!) k_cache, {step}, int cache_block_size, "
        "Tensor? fp8_scale=None, bool kv_mxfp8=False) -> ()",
    }
    library = torch.library.Library("preattn_test_C", "FRAGMENT")
    for name, schema in schemas.items():
        library.define(name + schema)
        own = plugin_v4.OPS[name] if name != next(iter(schemas)) else marked
        library.impl(name, engines_own(name, own), "CPU")
        torch.library._impls.discard(f"preattn_test_C/{name}/CPU")  # the engine's are compiled, unknown to Python
    yield lambda name: getattr(torch.ops.preattn_test_C, name)
    plugin_v4.restore()
    library._destroy()
    unregister()


def _v4_step() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    slots, positions = torch.tensor([3, -1, 65]), torch.tensor([0, 7, 30])
    return rows(3, 8, 512, seed=1), rows(3, 512, seed=2), slots, positions, rope_table(64)


@pytest.mark.parametrize("mxfp8", [False, True])
def test_an_overridden_operator_is_ours_and_comes_back(
    operators: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, mxfp8: bool
) -> None:
    op = operators("fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert")
    record = formats.record("v41_mxfp8" if mxfp8 else "v4_fp8")
    query, kv, *step = _v4_step()
    pool = torch.full((2, 64 * record.bytes + 64), 0xA5, dtype=torch.uint8)
    expected = pool.clone()
    view = formats.cache_view(expected, record, block_size=64, block_stride=pool.stride(0))
    norm = None if mxfp8 else 1e-6
    wanted = v4.query_kv_insert(
        query, kv, view, *step, record=record.name, query_rope=True, query_norm_eps=norm, padded_heads=64
    )
    plugin_v4.override("CPU")
    plugin_v4.override("CPU")
    found = op(query, kv, pool, *step, 64, 1e-6, 64, not mxfp8, mxfp8)
    assert torch.equal(found, wanted) and torch.equal(pool, expected)
    monkeypatch.setitem(globals(), "MARK", "query")
    assert torch.equal(op(query, kv, pool, *step, 64, 1e-6, 64, not mxfp8, mxfp8), wanted)
    plugin_v4.restore()
    assert not torch.equal(op(query, kv, pool, *step, 64, 1e-6, 64, not mxfp8, mxfp8), wanted)


@pytest.mark.parametrize("wrong", [None, "query", "cache"])
def test_shadow_mode_compares_an_operator_with_the_engines(
    operators: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, wrong: str | None
) -> None:
    monkeypatch.setenv("PREATTN_SHADOW", "1")
    unregister()
    monkeypatch.setitem(globals(), "MARK", wrong)
    query, kv, *step = _v4_step()
    pool = torch.full((2, 64 * 584), 0xA5, dtype=torch.uint8)
    plugin_v4.override("CPU")
    name = "fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert"
    operators(name)(query, kv, pool, *step, 64, 1e-6, 64)
    operators("fused_deepseek_v4_kv_rope_insert")(kv, torch.zeros(2, 64, 584, dtype=torch.uint8), *step, 64)
    tallies = summary()["shadow"]
    found = {key.rpartition(".")[2] for key, tally in tallies.items() if tally["mismatches"]}
    assert found == {None: set(), "query": {"query"}, "cache": {"kv cache"}}[wrong]
    assert len(tallies) == 3 and all(tally["calls"] == 1 for tally in tallies.values())


def test_the_interleaved_and_the_plain_row_operators(operators: Callable[[str], Any]) -> None:
    query, kv, *step = _v4_step()
    plugin_v4.override("CPU")
    pages = torch.zeros(2, 64 * 528, dtype=torch.uint8)
    name = "fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert"
    found = operators(name)(query, kv, pages, *step, 64, 1e-6, 64, False, True, False, True)
    assert torch.equal(found, v4.pad_query(query, 64, layout="chunk_interleaved"))
    none = operators(name)(query, kv, pages, *step, 0, 1e-6, 64, False, True, False, True)
    assert none.shape == (3, 0, 512)

    cache = torch.zeros(2, 64, 512, dtype=torch.bfloat16)
    mine, expected = query.clone(), query.clone()
    operators("fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_bf16_insert")(mine, kv, cache, *step, 1e-6, 64)
    want = torch.zeros_like(cache)
    v4.query_kv_insert(expected, kv, want, *step, record="bf16", query_rope=True, query_norm_eps=1e-6, out=expected)
    assert torch.equal(mine, expected) and torch.equal(cache, want)

    scale, inverse = torch.tensor([0.5]), torch.tensor([2.0])
    codes, out = torch.zeros(2, 64, 512, dtype=torch.float8_e4m3fn), torch.empty(3, 8, 512, dtype=torch.float8_e4m3fn)
    fp8 = operators("fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_fp8_insert")
    fp8(query, kv, out, codes, *step, scale, inverse, 1e-6, 64, False)
    want = torch.zeros_like(codes)
    wanted = v4.query_kv_insert(
        query, kv, want, *step, record="fp8", query_rope=True, query_scale_inv=inverse, kv_scale=scale
    )
    assert torch.equal(out.view(torch.uint8), wanted.view(torch.uint8))
    assert torch.equal(codes.view(torch.uint8), want.view(torch.uint8))

    records = torch.zeros(2, 64, 584, dtype=torch.uint8)
    operators("fused_deepseek_v4_kv_rope_insert")(kv, records, *step, 64)
    want = torch.zeros_like(records)
    v4.kv_insert(kv, want, *step, record="v4_fp8")
    assert torch.equal(records, want) and records.any()


def test_an_operator_that_another_library_overrides_is_left_to_it(operators: Callable[[str], Any]) -> None:
    name = "fused_deepseek_v4_kv_rope_insert"
    other = torch.library.Library("preattn_test_C", "IMPL")
    other.impl(name, lambda *args: None, "CPU", allow_override=True)
    with pytest.raises(patching.Occupied, match=f"{name} is overridden for CPU by another library"):
        plugin_v4.override("CPU")
    other._destroy()


# -- V4 without the query's copy -------------------------------------------------------------------------------

V4_MODEL = plugin_v4.MODELS[0]
V4_RANK, V4_MOST = 256, 48


def v4_linear(kind: str, heads: int) -> Any:
    """A ``wq_b`` of the stub: bf16, or e4m3 with 128 x 128 scales and the kernel that multiplies it."""
    linears = importlib.import_module(projection.LINEAR)
    weight = rows(heads * 512, V4_RANK, seed=7)
    if kind == "bf16":
        return linears.ColumnParallelLinear(weight)
    kernels = {
        "deep_gemm": (projection.DEEP_GEMM, "DeepGemmFp8BlockScaledMMKernel"),
        "flashinfer": (projection.FLASHINFER, "FlashInferFp8DeepGEMMDynamicBlockScaledKernel"),
    }
    module, name = kernels[kind]
    method = importlib.import_module(projection.FP8).Fp8LinearMethod(getattr(importlib.import_module(module), name)())
    linear = linears.ColumnParallelLinear(weight.to(torch.float8_e4m3fn), method)
    linear.weight_scale_inv = torch.rand(heads * 4, V4_RANK // 128) + 0.5
    return linear


def v4_layer(kind: str = "bf16", heads: int = 4, padded: int = 16, *, mxfp8: bool = False, index: int = 0) -> Any:
    torch.manual_seed(3)
    backend = SimpleNamespace(get_name=lambda: "FLASHMLA_SPARSE_DSV41" if mxfp8 else "FLASHMLA_SPARSE_DSV4")
    pool = torch.full((2, 64 * (528 if mxfp8 else 584)), 0xA5, dtype=torch.uint8)
    linear, name = v4_linear(kind, heads), f"model.layers.{index}.attn"
    attention = importlib.import_module(V4_MODEL).DeepseekV4Attention
    layer = attention(name, backend, linear, heads, padded, V4_MOST, pool, rope_table(64))
    layer.mxfp8 = mxfp8
    return layer


def v4_inputs(tokens: int = 3, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    slots = torch.arange(tokens) * 2 + 3
    slots[tokens // 2] = -1
    latents = rows(tokens, V4_RANK, seed=20 + seed), rows(tokens, 512, seed=30 + seed)
    return *latents, torch.arange(tokens) % 60, slots


def query_buffer() -> Tensor | None:
    """The buffer that the plug-in has asked the workspace manager for."""
    persistent = importlib.import_module(layers.WORKSPACE).manager.persistent
    return next(iter(persistent.values()), None)


@pytest.fixture
def v4_engine(engine: Path, operators: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    """The stub with V4's operators; called, it switches the plug-in on, tracing."""
    monkeypatch.setenv("PREATTN_TRACE", "1")
    importlib.import_module(V4_MODEL)

    def switch_on() -> None:
        unregister()
        plugin_v4.override("CPU")
        register()
        assert plugin.active()

    return switch_on


@torch.no_grad()
@pytest.mark.parametrize("mxfp8", [False, True], ids=["V4", "V4.1"])
@pytest.mark.parametrize("kind", ["bf16", "deep_gemm", "flashinfer"])
@pytest.mark.parametrize("tokens", [1, 33])
def test_a_v4_layer_gives_the_same_bytes_without_the_copy(
    v4_engine: Callable[[], Any], kind: str, tokens: int, mxfp8: bool
) -> None:
    inputs = v4_inputs(tokens)
    layer = v4_layer(kind, mxfp8=mxfp8)
    expected = layer(*inputs)
    stored = layer.cache.clone()
    v4_engine()
    layer = v4_layer(kind, mxfp8=mxfp8)
    found = layer(*inputs)
    assert torch.equal(found, expected) and found.shape == expected.shape and found.is_contiguous()
    assert torch.equal(layer.cache, stored)
    buffer, (op,) = query_buffer(), summary()["plans"]["fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert"]
    (plan,) = summary()["plans"]["wq_b"]
    if kind == "flashinfer" and tokens < projection.FLASHINFER_TOKENS:
        assert buffer is None and op == "quant_insert"
        assert plan == "model.layers.0.attn: the engine's own: fewer than 32 tokens"
    else:
        assert buffer is not None and found.data_ptr() == buffer.data_ptr() and op == "quant_insert, in place"
        assert not buffer[:, 4:].any() and not torch.signbit(buffer[:, 4:]).any()
        assert plan.startswith("model.layers.0.attn: in the buffer, 4 of 16 heads, ")


@pytest.mark.parametrize(
    ("tokens", "on_gpu", "variable", "expected"),
    [
        (3, False, None, True),
        (4, False, None, True),
        (5, False, None, False),
        (3, True, None, False),
        (3, False, "PREATTN_SHADOW", False),
        (3, False, "VLLM_BATCH_INVARIANT", False),
    ],
)
def test_a_short_step_in_no_graph_is_left_to_the_engine(
    engine: Path, monkeypatch: pytest.MonkeyPatch, tokens: int, on_gpu: bool, variable: str | None, expected: bool
) -> None:
    """On a GPU, as it is here, the stream is being captured."""
    monkeypatch.setattr(projection, "EAGER_TOKENS", 4)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    if variable is not None:
        monkeypatch.setenv(variable, "1")
        unregister()
    step: Any = SimpleNamespace(shape=(tokens, 8, 512), is_cuda=on_gpu)
    assert projection.left_to_engine(step) is expected


@torch.no_grad()
@pytest.mark.parametrize("heads", [4, 16])
def test_a_short_v4_step_runs_the_engines_own_and_finds_all_made_for_a_graph(
    v4_engine: Callable[[], Any], monkeypatch: pytest.MonkeyPatch, heads: int
) -> None:
    name = "fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert"
    expected = [v4_layer(heads=heads)(*v4_inputs(tokens)) for tokens in (3, 5)]
    v4_engine()
    monkeypatch.setattr(projection, "EAGER_TOKENS", 4)
    monkeypatch.setitem(globals(), "MARK", "query")  # where the engine's own operator runs
    layer = v4_layer(heads=heads)
    short = layer(*v4_inputs(3))
    assert (short != expected[0]).nonzero().tolist() == [[1, 2, 3]]
    assert summary()["plans"][name] == {"the engine's own": 1}
    (kind,) = plugin_v4._warm
    if heads == 4:
        buffer = query_buffer()
        assert buffer is not None and not buffer.any(), "a capture that comes next may not make it"
        assert summary()["plans"]["wq_b"] == {
            "model.layers.0.attn: the engine's own: no graph, and at most 4 tokens": 1
        }
    assert torch.equal(layer(*v4_inputs(5)), expected[1])
    assert plugin_v4._warm == {kind}, "compiled at the short step already"


def test_short_steps_of_every_operator_are_the_engines(
    engine: Path, operators: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    query, kv, *step = _v4_step()
    pages, records = torch.zeros(2, 64 * 584, dtype=torch.uint8), torch.zeros(2, 64, 584, dtype=torch.uint8)
    plain, codes = torch.zeros(2, 64, 512).bfloat16(), torch.zeros(2, 64, 512).to(torch.float8_e4m3fn)
    scale, out = torch.tensor([1.0]), torch.empty(3, 8, 512, dtype=torch.float8_e4m3fn)
    arguments: list[tuple[Any, ...]] = [
        (query, kv, pages, *step, 64, 1e-6, 64),
        (query.clone(), kv, plain, *step, 1e-6, 64),
        (query, kv, out, codes, *step, scale, scale, 1e-6, 64),
        (kv, records, *step, 64),
    ]
    plugin_v4.override("CPU")
    for longest, expected in ((2, []), (3, list(plugin_v4.OPS))):
        monkeypatch.setattr(projection, "EAGER_TOKENS", longest)
        ENGINES.clear()
        for name, args in zip(plugin_v4.OPS, arguments, strict=True):
            assert (operators(name)(*args) is None) == (name != next(iter(plugin_v4.OPS)))
        assert [*ENGINES] == expected


@torch.no_grad()
def test_v4_layers_use_one_buffer_in_turn_and_a_shorter_step_leaves_no_trace(v4_engine: Callable[[], Any]) -> None:
    steps = [v4_inputs(tokens, seed) for seed, tokens in enumerate((33, 3, 17))]
    expected = [v4_layer(index=index)(*step).clone() for index, step in enumerate(steps)]
    v4_engine()
    layers_ = [v4_layer(index=index) for index in range(len(steps))]
    addresses = set()
    for layer, step, wanted in zip(layers_, steps, expected, strict=True):
        found = layer(*step)
        addresses.add(found.data_ptr())
        assert torch.equal(found, wanted)
    assert len(addresses) == 1 and len(summary()["plans"]["wq_b"]) == 3


@torch.no_grad()
@pytest.mark.parametrize("mxfp8", [False, True], ids=["V4", "V4.1"])
def test_a_rank_with_all_the_heads_is_finished_where_the_projection_left_it(
    v4_engine: Callable[[], Any], mxfp8: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever the weight is: only the operator has to know whose query it is."""
    inputs = v4_inputs()
    expected = v4_layer("deep_gemm", 4, 4, mxfp8=mxfp8)(*inputs)
    with caplog.at_level(logging.INFO):
        v4_engine()
        layer = v4_layer("deep_gemm", 4, 4, mxfp8=mxfp8)
        layer.wq_b.quant_method.__class__ = type("MarlinMethod", (type(layer.wq_b.quant_method),), {})
        projected: list[Tensor] = []
        layer.wq_b.register_forward_hook(lambda *call: projected.append(call[2]))
        found = layer(*inputs)
    assert torch.equal(found, expected) and found.data_ptr() == projected[0].data_ptr() and query_buffer() is None
    assert list(summary()["plans"]["fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert"]) == ["quant_insert, in place"]
    assert "attention takes the rank's heads as they are" in caplog.text


@torch.no_grad()
def test_the_profiling_run_makes_the_buffer(v4_engine: Callable[[], Any]) -> None:
    qr, kv, positions, _ = v4_inputs(V4_MOST)
    expected = v4_layer()(qr, kv, positions, None)
    v4_engine()
    found, buffer = v4_layer()(qr, kv, positions, None), query_buffer()
    assert torch.equal(found, expected) and buffer is not None and buffer.shape == (V4_MOST, 16, 512)
    assert found.data_ptr() != buffer.data_ptr()  # padded by the engine: there is no operator in this run


@pytest.mark.parametrize("within", [False, True], ids=["outside any layer", "while a layer's is at hand"])
def test_a_query_of_somebody_else_is_not_touched(
    v4_engine: Callable[[], Any], monkeypatch: pytest.MonkeyPatch, within: bool
) -> None:
    """A speculator calls the operator by itself, with a query of its own that it may read again."""
    v4_engine()
    if within:
        monkeypatch.setattr(projection.thread, "query", rows(3, 8, 512, seed=9))
    query, kv, *step = _v4_step()
    before, op = query.clone(), torch.ops.preattn_test_C.fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert
    found = op(query, kv, torch.zeros(2, 64 * 584, dtype=torch.uint8), *step, 8, 1e-6, 64)
    assert torch.equal(query, before) and found.data_ptr() != query.data_ptr()


@torch.no_grad()
def test_both_kinds_of_step_are_compiled_at_the_first(
    v4_engine: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of few tokens go through the engine's projection: their operator copies, and must not compile later."""
    v4_engine()
    compiled: list[Any] = []
    monkeypatch.setattr(plugin_v4, "_compile", lambda kind, call: compiled.append((kind, call)))
    layer = v4_layer("flashinfer")
    layer(*v4_inputs(33))
    layer(*v4_inputs(3))
    (first, call), (second, _) = compiled
    assert first == second
    with dispatch.hold() as launches:
        call(2)
    outs = [{x.data_ptr() for x in launch.tensors if x is not None and x.shape[0] == 2} for launch in launches]
    assert len(outs) == 2, "a copying launch, and one in place"
    assert len(outs[1]) < len(outs[0]), "in place, the query and the output are one"


@torch.no_grad()
def test_a_projection_in_some_kernels_scratch_is_copied(v4_engine: Callable[[], Any]) -> None:
    """Its next call may overwrite that before attention has read it."""
    inputs = v4_inputs()
    expected = v4_layer(padded=4)(*inputs)
    v4_engine()
    layer, scratch = v4_layer(padded=4), torch.zeros(V4_MOST, 4 * 512).bfloat16()
    layer.wq_b.quant_method._gemm_impl = lambda linear, x, weight, bias=None: torch.mm(
        x, weight.t(), out=scratch[: len(x)]
    )
    found = layer(*inputs)
    assert torch.equal(found, expected) and found.data_ptr() != scratch.data_ptr()


@torch.no_grad()
def test_a_query_that_did_not_come_from_the_projection_is_not_taken_for_the_buffers(
    v4_engine: Callable[[], Any],
) -> None:
    """What a projection has noted is forgotten with its operator; a specialised decode step projects by itself."""
    v4_engine()
    layer, (qr, kv, positions, slots) = v4_layer(), v4_inputs()
    layer(qr, kv, positions, slots)
    buffer = query_buffer()
    assert buffer is not None and projection.thread.buffer is None and projection.thread.query is None
    stray = buffer[:3, :4].clone()
    found = layer._fused_qnorm_rope_kv_insert(stray, kv, positions, slots)
    assert found.data_ptr() not in (buffer.data_ptr(), stray.data_ptr())


def _change(path: str, value: Any) -> Callable[[Any], None]:
    def change(layer: Any) -> None:
        *parts, last = path.split(".")
        for part in parts:
            layer = getattr(layer, part)
        setattr(layer, last, value)

    return change


def _adapter(layer: Any) -> None:
    layer.wq_b.__class__ = type("ColumnParallelLinearWithLoRA", (type(layer.wq_b),), {})


def _quantised(layer: Any) -> None:
    layer.wq_b.quant_method.__class__ = type("ModelOptLinearMethod", (type(layer.wq_b.quant_method),), {})


def _another_kernel(layer: Any) -> None:
    kernel = layer.wq_b.quant_method.fp8_linear
    kernel.__class__ = type("CutlassFp8BlockScaledMMKernel", (type(kernel),), {})


@torch.no_grad()
@pytest.mark.parametrize(
    ("kind", "change", "reason"),
    [
        ("bf16", _adapter, "it is a ColumnParallelLinearWithLoRA"),
        ("bf16", _change("wq_b.bias", torch.nn.Parameter(torch.zeros(4 * 512).bfloat16())), "a bias, or a gather"),
        ("bf16", lambda layer: layer.wq_b.register_forward_hook(lambda *call: None), "something else hooks"),
        ("bf16", _change("wq_b.quant_method._gemm_impl", lambda layer, x, w, b=None: x @ w.t()), "is not torch's"),
        ("bf16", _quantised, "quantised by ModelOptLinearMethod"),
        ("bf16", _change("backend_cls.get_name", lambda: "FLASHINFER_MLA_SPARSE_DSV4"), "FLASHINFER_MLA_SPARSE_DSV4"),
        ("bf16", _change("kv_cache_torch_dtype", torch.bfloat16), "a cache of torch.bfloat16"),
        ("bf16", _change("max_num_batched_tokens", 2), "more tokens than the engine batches"),
        ("bf16", _change("q_lora_rank", 128), "a weight of shape [2048, 256]"),
        ("deep_gemm", _another_kernel, "CutlassFp8BlockScaledMMKernel allocates its result"),
        ("deep_gemm", _change("wq_b.quant_method.weight_block_size", [1, 128]), "a scale for 128 x 128"),
        ("deep_gemm", _change("wq_b.input_scale", torch.ones(1)), "a scale of the checkpoint's"),
    ],
)
def test_a_v4_layer_that_cannot_write_into_the_buffer_says_why(
    v4_engine: Callable[[], Any], kind: str, change: Callable[[Any], None], reason: str
) -> None:
    inputs = v4_inputs()
    expected = v4_layer(kind)(*inputs)
    v4_engine()
    layer = v4_layer(kind)
    change(layer)
    found = layer(*inputs)
    assert torch.equal(found, expected) and query_buffer() is None
    (plan,) = summary()["plans"]["wq_b"]
    assert plan.startswith("model.layers.0.attn: the engine's own: ") and reason in plan


@torch.no_grad()
def test_a_latent_that_is_quantised_already_is_the_engines(v4_engine: Callable[[], Any]) -> None:
    v4_engine()
    layer = v4_layer()
    seen: list[Any] = []

    def own(*call: Any) -> Tensor:
        seen.append(call)
        return torch.zeros(1)

    latent, scale = object(), torch.ones(1)
    projection.project(own, layer, latent, None)
    projection.project(own, layer, torch.zeros(3, V4_RANK, dtype=torch.float8_e4m3fn), scale)
    assert seen[0][1] is latent and seen[1][2] is scale and query_buffer() is None
    (plan,) = summary()["plans"]["wq_b"]
    assert plan == "model.layers.0.attn: the engine's own: the latent is quantised already"


@torch.no_grad()
def test_a_linear_that_is_exchanged_is_looked_at_again(v4_engine: Callable[[], Any]) -> None:
    v4_engine()
    layer, inputs = v4_layer(), v4_inputs()
    layer(*inputs)
    _adapter(layer)
    layer.wq_b = type(layer.wq_b)(layer.wq_b.weight.data)
    layer(*inputs)
    assert [plan.partition(": ")[2][:12] for plan in summary()["plans"]["wq_b"]] == ["in the buffe", "the engine's"]


@torch.no_grad()
def test_batch_invariance_keeps_its_own_matmul(v4_engine: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    v4_engine()
    assert projection.writer_of(v4_layer()) == "its matmul is not torch's"
    always = projection.writer_of(v4_layer("flashinfer"))
    assert isinstance(always, projection.Writer) and always.least == 1


@torch.no_grad()
def test_unregistering_gives_a_v4_layer_its_methods_back(v4_engine: Callable[[], Any]) -> None:
    owner = importlib.import_module(V4_MODEL).DeepseekV4Attention
    own = owner._wq_b_proj, owner._fused_qnorm_rope_kv_insert
    v4_engine()
    assert owner._wq_b_proj is not own[0] and owner._fused_qnorm_rope_kv_insert is not own[1]
    unregister()
    assert (owner._wq_b_proj, owner._fused_qnorm_rope_kv_insert) == own


def test_another_plug_in_that_holds_a_v4_method_is_named(
    engine: Path, operators: Callable[[str], Any], caplog: pytest.LogCaptureFixture
) -> None:
    owner = importlib.import_module(V4_MODEL).DeepseekV4Attention
    owner._wq_b_proj = lambda self, qr, qr_scale=None: self.wq_b(qr)
    plugin_v4.override("CPU")
    register()
    assert "DeepseekV4Attention._wq_b_proj is not" in caplog.text and not plugin.active()


@torch.no_grad()
@pytest.mark.parametrize("wrong", [None, "projection", "tail", "query"])
def test_shadow_mode_compares_both_halves(
    v4_engine: Callable[[], Any], monkeypatch: pytest.MonkeyPatch, wrong: str | None
) -> None:
    """The projection beside the engine's, byte for byte, and the operator on a copy of what the projection left."""
    monkeypatch.setenv("PREATTN_SHADOW", "1")
    v4_engine()
    layer, inputs = v4_layer(mxfp8=True), v4_inputs()
    layer(*inputs)
    if wrong == "projection":
        writer = projection.writer_of(layer)
        assert isinstance(writer, projection.Writer)

        def nearly(linear: Any, latent: Tensor, out: Tensor) -> None:
            writer.write(linear, latent, out)
            out.view(torch.int16)[1, 700] += 1

        layer.__dict__["_preattn_writer"] = (layer.wq_b, projection.Writer("bf16", nearly))
    if wrong == "tail":
        buffer = query_buffer()
        assert buffer is not None
        buffer[2, 9, 3] = 1.0
    monkeypatch.setitem(globals(), "MARK", "query" if wrong == "query" else None)
    layer(*inputs)
    tallies = summary()["shadow"]
    assert {name.partition(".")[2]: t["calls"] for name, t in tallies.items()} == {"query": 2, "kv cache": 2}
    bad = {name: tally["first"] for name, tally in tallies.items() if tally["mismatches"]}
    op = "fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert.query"
    where = {"projection": ("wq_b.query", "[1, 700]"), "tail": (op, "[2, 9, 3]"), "query": (op, "[1, 2, 3]")}
    if wrong is None:
        assert not bad
    else:
        ((name, first),) = bad.items()
        assert name == where[wrong][0] and f"layer model.layers.0.attn, element {where[wrong][1]}" in first


@torch.no_grad()
def test_a_weight_under_another_name_is_the_engines_own(v4_engine: Callable[[], Any]) -> None:
    """AWQ, GPTQ and packed checkpoints."""

    class AWQLinearMethod:
        def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
            return torch.nn.functional.linear(x, layer.qweight)

    inputs = v4_inputs()
    expected = v4_layer()(*inputs)
    v4_engine()
    layer = v4_layer()
    layer.wq_b.qweight = torch.nn.Parameter(layer.wq_b.weight.data, requires_grad=False)
    del layer.wq_b.weight
    layer.wq_b.quant_method = AWQLinearMethod()
    assert torch.equal(layer(*inputs), expected)
    assert projection.writer_of(layer) == "its weight is quantised by AWQLinearMethod"


@torch.no_grad()
def test_what_cannot_be_compiled_puts_the_engine_back(
    v4_engine: Callable[[], Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    inputs = v4_inputs()
    expected = v4_layer()(*inputs)
    v4_engine()
    layer, prepare, failed = v4_layer(), Launch.prepare, []

    def fails(launch: Launch, device: torch.device) -> bool:
        if not failed:  # the stub's own operator is ours under another name
            failed.append(launch)
            raise RuntimeError("no compiler")
        return prepare(launch, device)

    monkeypatch.setattr(Launch, "prepare", fails)
    plugin_v4._warm.clear()
    assert torch.equal(layer(*inputs), expected) and failed and not plugin.active()
    assert "preattn is not active: RuntimeError while compiling for fused_deepseek_v4" in caplog.text
    assert torch.equal(layer(*inputs), expected)


@torch.no_grad()
def test_layers_of_other_head_counts_have_buffers_of_their_own(v4_engine: Callable[[], Any]) -> None:
    """Of one padded size: a draft's, say. The padding of the one is no padding of the other."""
    many, few = v4_inputs(5, 0), v4_inputs(5, 1)
    expected = v4_layer(heads=4)(*few).clone()
    v4_engine()
    v4_layer(heads=8)(*many)
    assert torch.equal(v4_layer(heads=4)(*few), expected)


@torch.no_grad()
def test_a_locked_workspace_leaves_the_engines_own_query(
    v4_engine: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second microbatch after graphs were captured."""

    def locked(*_: Any, **__: Any) -> Any:
        raise AssertionError("Workspace is locked")

    inputs = v4_inputs()
    expected = v4_layer()(*inputs)
    v4_engine()
    manager = importlib.import_module(layers.WORKSPACE).current_workspace_manager()
    monkeypatch.setattr(manager, "get_persistent", locked)
    layer = v4_layer()
    assert torch.equal(layer(*inputs), expected)
    with pytest.raises(AssertionError):
        manager.get_persistent()


# -- the release's own kernels ---------------------------------------------------------------------------------


def test_the_releases_own_kernels_agree_in_the_interpreter(tmp_path: Path) -> None:
    """Both sides in Triton's interpreter, through the shadow comparison: strided views, both pairings, every record."""
    pytest.importorskip("triton")
    kernels = (sources() / path_of(layers.KERNELS)).read_text()
    lay_out(tmp_path)
    (tmp_path / path_of(layers.KERNELS)).write_text(kernels)
    more = {
        "vllm/triton_utils.py": "import triton\nimport triton.language as tl\n",
        "vllm/utils/deep_gemm.py": "def mqa_logits_use_mx_scales():\n    return False\n",
        "vllm/v1/attention/ops/common.py": "def pack_ue8m0_x4(scale):\n    raise NotImplementedError\n",
        "vllm/v1/kv_cache_interface.py": "def is_quantized_kv_cache(dtype):\n    return dtype.startswith('fp8')\n",
        "vllm/platforms.py": textwrap.dedent("""
            import torch

            class Platform:
                fp8_dtype = staticmethod(lambda: torch.float8_e4m3fn)
                is_cuda = is_arch_support_pdl = staticmethod(lambda: False)

            current_platform = Platform()
        """),
    }
    for name, text in more.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    paths = [str(Path(__file__).parents[1]), str(tmp_path), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([path for path in paths if path]),
        "TRITON_INTERPRET": "1",
        "PREATTN_SHADOW": "1",
    }
    script = Path(__file__).with_name("vllm_interpreted.py")
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


# -- workers ---------------------------------------------------------------------------------------------------


def _worker(log: str) -> None:
    """What a process of the engine does: it counts, and ends."""
    logging.basicConfig(filename=log, level=logging.INFO, force=True)
    report.count("fused_q", "packed")
    shadow.compare("fused_q", "main query", "layer 3", torch.zeros(1, 2), torch.ones(1, 2))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_worker_says_at_exit_what_it_has_counted_itself(
    fresh: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.setenv("PREATTN_TRACE", "1")
    monkeypatch.delenv("RANK", raising=False)
    report.tracing.cache_clear()
    report.count("fused_q", "the parent's")
    worker = multiprocessing.get_context(method).Process(target=_worker, args=(str(tmp_path / "log"),))
    worker.start()
    worker.join(60)
    assert worker.exitcode == 0
    lines = (tmp_path / "log").read_text().splitlines()
    name = f"process {worker.pid}"
    assert f"INFO:vllm.preattn:preattn trace, {name}: fused_q: packed: 1 calls" in lines
    assert any(f"shadow, {name}: fused_q: main query: 1 calls, 1 mismatches" in line for line in lines)
    assert not any("the parent's" in line for line in lines)
