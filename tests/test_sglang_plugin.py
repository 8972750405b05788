"""The plug-in for SGLang, without a GPU: what it registers, verifies and yields, and the bits that its hooks give.

Most tests run on a registry written for them, which behaves as SGLang 0.5.23's does in what matters here: it logs what
it cannot apply and goes on, wraps functions, and passes a wrapper on to modules that imported the function. Where
SGLang's sources are to be had, the same life runs on its own loader, registry and ``norm_rope`` module. On CPU tensors
the hooks run the reference, whose bits the kernels have.
"""

from __future__ import annotations

import functools
import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import logging
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from test_sglang_contract import sources
from torch import Tensor

from preattn.cases.base import activations, as_bytes
from preattn.dispatch import backend
from preattn.integrations import sglang as plugin
from preattn.reference import numerics

NORM_ROPE = "sglang.kernels.ops.attention.dsv4.norm_rope"
REGISTRY = "sglang.srt.plugins.hook_registry"
Q_ROPE, ROPE = f"{NORM_ROPE}.fused_q_norm_rope", f"{NORM_ROPE}.fused_rope_inplace"
TOKENS, HEADS, PADDED = 5, 3, 8


# -- an engine of a few functions -------------------------------------------------------------------------------------


class HookType(Enum):
    AROUND = "around"
    REPLACE = "replace"
    BEFORE = "before"


class Source(NamedTuple):
    plugin_name: str
    dist_name: str | None


def registry_like_sglangs() -> Any:
    """A class that registers, applies and, as SGLang's, logs a hook it cannot apply."""

    class HookRegistry:
        _hooks: ClassVar[defaultdict[str, list[Any]]] = defaultdict(list)
        _patched: ClassVar[set[str]] = set()

        @classmethod
        def register(cls, target: str, hook: Any, hook_type: Any, *, source: Source | None = None) -> None:
            cls._hooks[target].append((hook_type, hook, source))

        @classmethod
        def apply_hooks(cls) -> None:
            for target, hooks in cls._hooks.items():
                if target in cls._patched:
                    continue
                try:
                    cls.apply(target, hooks)
                    cls._patched.add(target)
                except Exception:
                    logging.getLogger(REGISTRY).exception("cannot apply %s", target)

        @classmethod
        def apply(cls, target: str, hooks: list[Any]) -> None:
            module_name, _, name = target.rpartition(".")
            module = importlib.import_module(module_name)
            original = wrapped = getattr(module, name)
            for kind, hook, _ in sorted(hooks, key=lambda entry: entry[0] is not HookType.REPLACE):
                wrapped = wrap(wrapped, hook, around=kind is not HookType.REPLACE)
            for other in list(sys.modules.values()):
                for attribute, value in list(vars(other).items()):
                    if value is original:
                        setattr(other, attribute, wrapped)

    return HookRegistry


def wrap(function: Any, hook: Any, *, around: bool) -> Any:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return hook(function, *args, **kwargs) if around else hook(*args, **kwargs)

    return wrapper


OWN = """
own_calls = []

def fused_q_norm_rope(q_input, q_output, eps, freqs_cis, positions):
    own_calls.append(("fused_q_norm_rope", eps))

def fused_rope_inplace(q, k, freqs_cis, positions, inverse=False):
    own_calls.append(("fused_rope_inplace", inverse))
"""


def package(monkeypatch: pytest.MonkeyPatch, name: str) -> ModuleType:
    """A module in ``sys.modules``, its parents too, until the test ends."""
    parent, _, last = name.rpartition(".")
    module = ModuleType(name)
    module.__path__ = []  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, name, module)
    if parent:
        if parent not in sys.modules:
            package(monkeypatch, parent)
        setattr(sys.modules[parent], last, module)
    return module


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if a supported SGLang were installed, on a torch with CUDA, and nothing had been said or counted yet."""
    versions = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: plugin.VERSIONS[0] if name == "sglang" else versions(name)
    )
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for name in ("PREATTN_DISABLE", "PREATTN_TRACE"):
        monkeypatch.delenv(name, raising=False)
    for cached in (plugin._say_once, plugin._warn_once, plugin._tracing):
        cached.cache_clear()
    plugin._calls.clear()
    before = set(sys.modules)
    with backend("reference"):
        yield
    for name in set(sys.modules) - before:
        if name.partition(".")[0] == "sglang":
            del sys.modules[name]


@pytest.fixture
def engine(installed: None, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A small SGLang: its registry, ``norm_rope``, and a model that imported one name from there."""
    registry = registry_like_sglangs()
    module = package(monkeypatch, REGISTRY)
    module.HookRegistry, module.HookType = registry, HookType  # type: ignore[attr-defined]
    own = package(monkeypatch, NORM_ROPE)
    exec(compile(OWN, NORM_ROPE, "exec"), vars(own))
    model = package(monkeypatch, "sglang.srt.models.deepseek_v4")
    model.fused_q_norm_rope = own.fused_q_norm_rope  # type: ignore[attr-defined]
    return SimpleNamespace(registry=registry, own=own, model=model)


class Step(NamedTuple):
    query: Tensor
    buffer: Tensor
    freqs_cis: Tensor
    positions: Tensor


def step(seed: int, *, tokens: int = TOKENS, dtype: torch.dtype = torch.int64) -> Step:
    angles = torch.rand(64, 32, generator=torch.Generator().manual_seed(seed)) * 700
    query = activations(tokens, HEADS, 512, dtype=torch.bfloat16, seed=seed + 1, device="cpu")
    buffer = torch.zeros(tokens, PADDED, 512, dtype=torch.bfloat16)
    positions = torch.randint(0, 64, (tokens,), generator=torch.Generator().manual_seed(seed + 2)).to(dtype)
    return Step(query, buffer, torch.polar(torch.ones_like(angles), angles), positions)


def rotated(query: Tensor, freqs_cis: Tensor, positions: Tensor) -> Tensor:
    """What SGLang's kernel gives: ``fma(e, cos, -(o*sin))`` and ``fma(e, sin, o*cos)``, as compiled for sm_90."""
    frequency = torch.view_as_real(freqs_cis[positions.long()])[:, None]
    cos, sin = frequency[..., 0], frequency[..., 1]
    even, odd = query[..., 448::2].float(), query[..., 449::2].float()
    result = query.clone()
    result[..., 448::2] = numerics.fma(even, cos.expand_as(even), -(odd * sin)).bfloat16()
    result[..., 449::2] = numerics.fma(even, sin.expand_as(even), odd * cos).bfloat16()
    return result


def start(engine: SimpleNamespace) -> None:
    plugin.register()
    engine.registry.apply_hooks()


# -- registration -----------------------------------------------------------------------------------------------------


def test_hooks_reach_the_functions_and_their_importers(engine: SimpleNamespace) -> None:
    own = engine.own.fused_q_norm_rope
    start(engine)
    assert engine.own.fused_q_norm_rope is not own and engine.model.fused_q_norm_rope is engine.own.fused_q_norm_rope
    assert engine.registry._patched == set(plugin.HOOKS)


def test_a_second_registration_changes_nothing(engine: SimpleNamespace) -> None:
    plugin.register()
    plugin.register()
    assert [len(hooks) for hooks in engine.registry._hooks.values()] == [1, 1]
    engine.registry.apply_hooks()
    hooked = engine.own.fused_q_norm_rope
    plugin.register()
    engine.registry.apply_hooks()
    assert engine.own.fused_q_norm_rope is hooked


def test_the_registry_gets_its_own_method_back(engine: SimpleNamespace) -> None:
    stock = engine.registry.__dict__["apply_hooks"]
    plugin.register()
    assert engine.registry.__dict__["apply_hooks"] is not stock
    engine.registry.apply_hooks()
    assert engine.registry.__dict__["apply_hooks"] is stock


def test_disabled_it_registers_nothing(engine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREATTN_DISABLE", "1")
    start(engine)
    assert not engine.registry._hooks and "fused_q_norm_rope" in engine.own.fused_q_norm_rope.__qualname__
    monkeypatch.setenv("PREATTN_DISABLE", "0")
    start(engine)
    assert len(engine.registry._hooks) == 2


@pytest.mark.parametrize(
    ("version", "cuda", "reason"),
    [
        ("0.5.24", "13.0", "version 0.5.24 is not among those checked, 0.5.23"),
        (None, "13.0", "no installed distribution says which version it is"),
        ("0.5.23+cu130", None, "this torch is built without CUDA"),
    ],
)
def test_what_is_not_supported_is_left_alone_and_said_once(
    engine: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    version: str | None,
    cuda: str | None,
    reason: str,
) -> None:
    def installed_version(name: str) -> str:
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", installed_version)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    plugin.register()
    plugin.register()
    assert not engine.registry._hooks
    assert len(caplog.records) == 1 and reason in caplog.records[0].message


def test_what_keeps_its_own_kernel_is_said_once(engine: SimpleNamespace, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger=plugin.__name__):
        start(engine)
        plugin.register()
    assert len(caplog.records) == 1
    for target, why in plugin.UNTOUCHED.items():
        assert f"{target.rpartition('.')[2]}: {why}" in caplog.text


def test_importing_and_registering_leave_cuda_alone() -> None:
    program = """
import sys, torch
def refuse(*args, **kwargs): raise SystemExit("CUDA was initialised")
torch.cuda._lazy_init = torch.cuda.is_available = torch.cuda.device_count = refuse
from preattn.integrations import sglang
sglang.register()
print(sorted(name for name in sys.modules if name.partition(".")[0] in ("sglang", "triton", "vllm")))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout == "[]\n", done.stdout + done.stderr


# -- an inactive hook is an error -------------------------------------------------------------------------------------


def test_a_target_that_is_gone_is_an_error(engine: SimpleNamespace) -> None:
    plugin.register()
    del engine.own.fused_rope_inplace
    with pytest.raises(RuntimeError, match=r"not active in SGLang: .*fused_rope_inplace is not there.*PREATTN_DISABLE"):
        engine.registry.apply_hooks()


def test_a_hook_that_the_registry_could_not_apply_is_an_error(
    engine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(target: str, hooks: list[Any]) -> None:
        raise OSError("disk on fire")

    plugin.register()
    monkeypatch.setattr(engine.registry, "apply", fails)
    with pytest.raises(
        RuntimeError, match=r"fused_q_norm_rope does not call query_rope; .*fused_rope_inplace does not"
    ):
        engine.registry.apply_hooks()


def test_an_importer_that_was_passed_over_is_an_error(engine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    def forgets(target: str, hooks: list[Any]) -> None:
        module, _, name = target.rpartition(".")
        setattr(sys.modules[module], name, wrap(getattr(sys.modules[module], name), hooks[0][1], around=True))

    plugin.register()
    monkeypatch.setattr(engine.registry, "apply", forgets)
    with pytest.raises(
        RuntimeError, match=r"sglang.srt.models.deepseek_v4.fused_q_norm_rope is still the function ben"
    ):
        engine.registry.apply_hooks()


# -- others on the same target ----------------------------------------------------------------------------------------


def theirs(own: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    own(*args, **kwargs)


def replacement(*args: Any, **kwargs: Any) -> None:
    return None


THEM = Source("rival", "rival-kernels")


@pytest.mark.parametrize(
    ("kind", "hook", "first"),
    [(HookType.AROUND, theirs, True), (HookType.REPLACE, replacement, True), (HookType.REPLACE, replacement, False)],
)
def test_a_target_is_left_to_a_plugin_that_holds_it(
    engine: SimpleNamespace, caplog: pytest.LogCaptureFixture, kind: HookType, hook: Any, first: bool
) -> None:
    if first:
        engine.registry.register(Q_ROPE, hook, kind, source=THEM)
    plugin.register()
    if not first:
        engine.registry.register(Q_ROPE, hook, kind, source=THEM)
    engine.registry.apply_hooks()
    assert f"{Q_ROPE} is left to plug-in rival of rival-kernels (" in caplog.text and hook.__name__ in caplog.text
    assert not plugin._wraps(engine.own.fused_q_norm_rope, plugin.query_rope)
    assert plugin._wraps(engine.own.fused_rope_inplace, plugin.rope_in_place)


def test_a_hook_that_comes_around_later_is_named(engine: SimpleNamespace, caplog: pytest.LogCaptureFixture) -> None:
    plugin.register()
    engine.registry.register(ROPE, theirs, HookType.AROUND, source=THEM)
    engine.registry.apply_hooks()
    assert f"{ROPE} is hooked by plug-in rival of rival-kernels" in caplog.text and "too" in caplog.text
    assert plugin._wraps(engine.own.fused_rope_inplace, plugin.rope_in_place)


def test_a_function_patched_past_the_registry_is_named(
    engine: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    engine.own.fused_rope_inplace = wrap(engine.own.fused_rope_inplace, theirs, around=True)
    start(engine)
    assert f"{ROPE} is left to {__name__}.wrap.<locals>.wrapper" in caplog.text
    assert not plugin._wraps(engine.own.fused_rope_inplace, plugin.rope_in_place)


def test_a_second_copy_stands_back_and_the_first_stays(
    engine: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    spec = importlib.util.find_spec(plugin.__name__)
    assert spec is not None and spec.loader is not None
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    plugin.register()
    copy.register()
    engine.registry.apply_hooks()
    assert caplog.text.count(f"is left to {plugin.__name__}.") == 2
    assert plugin._wraps(engine.own.fused_q_norm_rope, plugin.query_rope)
    assert not plugin._wraps(engine.own.fused_q_norm_rope, copy.query_rope)


# -- the bits ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("positions_dtype", [torch.int64, torch.int32])
def test_the_padded_query_has_the_bits_of_the_engines_kernel(
    engine: SimpleNamespace, seed: int, positions_dtype: torch.dtype
) -> None:
    start(engine)
    x = step(seed, dtype=positions_dtype)
    x.query[0, 0, :4] = torch.tensor([0x7F81, -1, -128, 1], dtype=torch.int16).view(torch.bfloat16)  # bits that move
    engine.model.fused_q_norm_rope(x.query, x.buffer[:, :HEADS], None, x.freqs_cis, x.positions)
    assert torch.equal(as_bytes(x.buffer[:, :HEADS]), as_bytes(rotated(x.query, x.freqs_cis, x.positions)))
    assert not as_bytes(x.buffer[:, HEADS:]).any()
    assert engine.own.own_calls == []


def test_the_unpadded_query_has_them_in_place(engine: SimpleNamespace, seed: int) -> None:
    start(engine)
    x = step(seed)
    expected = rotated(x.query, x.freqs_cis, x.positions)
    engine.own.fused_rope_inplace(x.query[..., -64:], None, x.freqs_cis, positions=x.positions)
    assert torch.equal(as_bytes(x.query), as_bytes(expected))
    assert engine.own.own_calls == []


def test_no_tokens(engine: SimpleNamespace) -> None:
    start(engine)
    x = step(1, tokens=0)
    engine.own.fused_q_norm_rope(x.query, x.buffer[:, :HEADS], None, x.freqs_cis, x.positions)
    engine.own.fused_rope_inplace(x.query[..., -64:], None, x.freqs_cis, x.positions)


def test_layers_share_a_table_for_as_long_as_their_frequencies_live(engine: SimpleNamespace) -> None:
    x = step(3)
    table = plugin._rope_table(x.freqs_cis)
    assert plugin._rope_table(x.freqs_cis) is table and table.shape == (64, 64) and table.is_contiguous()
    assert torch.equal(table, torch.cat([x.freqs_cis.real, x.freqs_cis.imag], -1))
    known = len(plugin._tables)
    del x
    assert len(plugin._tables) == known - 1


OWN_CASES: dict[str, tuple[Callable[[ModuleType, Step], None], tuple[str, object], str]] = {
    "head norm": (
        lambda own, x: own.fused_q_norm_rope(x.query, x.buffer[:, :HEADS], 1e-6, x.freqs_cis, x.positions),
        ("fused_q_norm_rope", 1e-6),
        "a head norm is rounded to bf16 before RoPE",
    ),
    "e4m3 output": (
        lambda own, x: own.fused_q_norm_rope(x.query, x.query.to(torch.float8_e4m3fn), None, x.freqs_cis, x.positions),
        ("fused_q_norm_rope", None),
        "torch.float8_e4m3fn output is cast from a query rounded to bf16",
    ),
    "other dims": (
        lambda own, x: own.fused_q_norm_rope(
            x.query[..., :256], x.buffer[:, :HEADS, :256], None, x.freqs_cis, x.positions
        ),
        ("fused_q_norm_rope", None),
        "expected a bf16 query of 512 dims; got torch.bfloat16 [5, 3, 256]",
    ),
    "inverse": (
        lambda own, x: own.fused_rope_inplace(x.query[..., -64:], None, x.freqs_cis, x.positions, inverse=True),
        ("fused_rope_inplace", True),
        "an inverse rotation, or one of a key too",
    ),
    "a key": (
        lambda own, x: own.fused_rope_inplace(x.query[..., -64:], x.query[:, :1, -64:], x.freqs_cis, x.positions),
        ("fused_rope_inplace", False),
        "an inverse rotation, or one of a key too",
    ),
    "not a tail": (
        lambda own, x: own.fused_rope_inplace(x.query[..., :64], None, x.freqs_cis, x.positions),
        ("fused_rope_inplace", False),
        "not the last 64 dims of rows of 512",
    ),
    "other frequencies": (
        lambda own, x: own.fused_rope_inplace(x.query[..., -64:], None, x.freqs_cis[:, :16], x.positions),
        ("fused_rope_inplace", False),
        "expected complex64 frequencies [any, 32]; got torch.complex64 [64, 16]",
    ),
}


@pytest.mark.parametrize("case", OWN_CASES)
def test_what_preattn_would_give_other_bits_for_stays_with_the_engine(
    engine: SimpleNamespace, caplog: pytest.LogCaptureFixture, case: str
) -> None:
    call, expected, why = OWN_CASES[case]
    start(engine)
    x = step(5)
    before = x.query.clone()
    with caplog.at_level(logging.INFO, logger=plugin.__name__):
        call(engine.own, x)
        call(engine.own, x)
    assert engine.own.own_calls == [expected] * 2
    assert torch.equal(as_bytes(x.query), as_bytes(before)) and not as_bytes(x.buffer).any()
    assert caplog.text.count(f"{expected[0]} runs SGLang's own kernel: {why}") == 1


def test_a_bad_argument_is_raised_in_the_step(engine: SimpleNamespace) -> None:
    start(engine)
    x = step(7)
    with pytest.raises(ValueError, match=r"positions: expected shape \[5\]; got \[4\]"):
        engine.own.fused_q_norm_rope(x.query, x.buffer[:, :HEADS], None, x.freqs_cis, x.positions[:4])


def test_calls_are_counted_on_request(
    engine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    registered: list[Callable[[], None]] = []
    monkeypatch.setattr(plugin.atexit, "register", registered.append)
    start(engine)
    x = step(9)
    engine.own.fused_rope_inplace(x.query[..., -64:], None, x.freqs_cis, x.positions)
    assert not registered and not plugin._calls

    plugin._tracing.cache_clear()
    monkeypatch.setenv("PREATTN_TRACE", "1")
    for eps in (None, None, 1e-6):
        engine.own.fused_q_norm_rope(x.query, x.buffer[:, :HEADS], eps, x.freqs_cis, x.positions)
    registered[0]()
    lines = capsys.readouterr().err.splitlines()
    assert len(registered) == 1 and len(lines) == 2
    assert lines[0].endswith("1 x fused_q_norm_rope: own kernel, a head norm is rounded to bf16 before RoPE")
    assert lines[1].endswith("2 x fused_q_norm_rope: preattn")


# -- SGLang's own loader, registry and module -------------------------------------------------------------------------


@pytest.fixture
def real(installed: None, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """SGLang's own files, in packages whose ``__init__`` is not run, for they import the whole engine.

    Stand-ins: what builds and loads CUDA code, and what asks for the platform.
    """
    root = sources()
    for name in ("sglang", "sglang.srt", "sglang.kernels", "sglang.kernels.ops", "sglang.kernels.ops.attention"):
        package(monkeypatch, name).__path__ = [str(root.joinpath(*name.split(".")))]  # type: ignore[attr-defined]
    dsv4 = package(monkeypatch, NORM_ROPE.rpartition(".")[0])
    dsv4.__path__ = [str(root.joinpath(*dsv4.__name__.split(".")))]  # type: ignore[attr-defined]
    jit = package(monkeypatch, "sglang.kernels.jit.utils")
    vars(jit).update(cache_once=functools.cache, is_arch_support_pdl=bool, load_jit=None, make_cpp_args=None)
    platform = package(monkeypatch, "sglang.srt.utils")
    vars(platform).update(is_hip=bool, is_xpu=bool)

    point = importlib.metadata.EntryPoint("preattn", f"{plugin.__name__}:register", "sglang.srt.plugins")
    loader = importlib.import_module("sglang.srt.plugins")
    monkeypatch.setattr(loader, "entry_points", lambda group: [point] if group == point.group else [])
    own = importlib.import_module(NORM_ROPE)
    dsv4.fused_q_norm_rope = own.fused_q_norm_rope  # type: ignore[attr-defined]
    return SimpleNamespace(loader=loader, own=own, importer=dsv4, registry=loader.HookRegistry)


def test_sglangs_loader_brings_the_hooks_in(real: SimpleNamespace, seed: int) -> None:
    real.loader.load_plugins()
    real.loader.load_plugins()
    assert real.registry._patched == set(plugin.HOOKS)
    assert [source.plugin_name for _, _, source in real.registry._hooks[Q_ROPE]] == ["preattn"]
    x = step(seed)
    expected = rotated(x.query, x.freqs_cis, x.positions)
    real.importer.fused_q_norm_rope(x.query, x.buffer[:, :HEADS], None, x.freqs_cis, x.positions)
    assert torch.equal(as_bytes(x.buffer[:, :HEADS]), as_bytes(expected))
    real.own.fused_rope_inplace(x.query[..., -64:], None, x.freqs_cis, positions=x.positions)
    assert torch.equal(as_bytes(x.query), as_bytes(expected))


def test_sglangs_loader_does_not_swallow_an_inactive_hook(real: SimpleNamespace) -> None:
    del real.own.fused_rope_inplace
    with pytest.raises(RuntimeError, match="fused_rope_inplace is not there"):
        real.loader.load_plugins()


def test_sglangs_loader_skips_it_where_it_is_not_listed(real: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_PLUGINS", "another")
    real.loader.load_plugins()
    assert not real.registry._hooks


def test_sglangs_registry_names_a_rival(real: SimpleNamespace, caplog: pytest.LogCaptureFixture) -> None:
    kinds = importlib.import_module(REGISTRY).HookType
    source = importlib.import_module(REGISTRY).HookSource("rival", "rival-kernels")
    real.registry.register(Q_ROPE, theirs, kinds.AROUND, source=source)
    real.loader.load_plugins()
    assert f"{Q_ROPE} is left to plug-in rival of rival-kernels" in caplog.text
    assert not plugin._wraps(real.own.fused_q_norm_rope, plugin.query_rope)
    assert plugin._wraps(real.own.fused_rope_inplace, plugin.rope_in_place)
