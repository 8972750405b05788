"""What makes an eager call cheap on the host changes nothing else: remembered checks, the direct launch, look-ups."""

from __future__ import annotations

import gc
import itertools
import sys
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.compiler.compiler import CompiledKernel
from triton.knobs import runtime
from triton.runtime.driver import driver

from preattn import checks, dsa, policy, v4
from preattn.cases.base import Case
from preattn.cases.dsa import AbsorbCase, DsaQueryCase, NormRopeCase
from preattn.cases.v4 import KvCase, PadCase, ProjectCase, V4Case
from preattn.dispatch import Backend, backend
from preattn.kernels.launch import Kernel, Launch, Tile
from preattn.policy import Projection

CASES: tuple[Case, ...] = (
    V4Case(8, 16),
    V4Case(8, 16, record="fp8", layout="head_major", norm=True, rope=True, in_place=True),
    KvCase(),
    PadCase(8, 16),
    DsaQueryCase(8, index_heads=4),
    DsaQueryCase(8, padded_heads=16, latent="contiguous", fp8_query=True, index_heads=0),
    DsaQueryCase(8, form="pair", latent="contiguous"),
    NormRopeCase(return_kv=True),
    NormRopeCase(record="fp8", index_record=None),
    AbsorbCase(4),
    AbsorbCase(4, fp8_query=False),
    ProjectCase(2, 4, rope=True),
    ProjectCase(2, 4, layout="chunk_interleaved", form=Projection.MATMUL),
    ProjectCase(2, 4, weight="e4m3", record="v4_fp8", norm=True, grouped=True),
    ProjectCase(2, 4, weight="mx"),
)


# -- remembered checks --------------------------------------------------------------------------------------


def _outcome(check: Callable[..., Any], arguments: tuple[Any, ...]) -> object:
    try:
        return check(*arguments)
    except (TypeError, ValueError) as error:
        return type(error), str(error)


def _others(value: object) -> Iterator[object]:
    """Arguments that differ from one by one thing that a check can see."""
    if not isinstance(value, Tensor):
        yield from (None, 1, 1.0, True, False, -1, -1.0, "bf16", "head_major", float("nan"), ["a list"], torch.ones(1))
        return
    yield from (None, "a word", 1)
    for dtype in (torch.float32, torch.bfloat16, torch.uint8, torch.int32, torch.float8_e4m3fn):
        yield torch.empty_strided(value.shape, value.stride(), dtype=dtype)
    yield torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    for dim in range(value.dim()):
        for change in (-1, 1):
            sizes = list(value.shape)
            sizes[dim] = max(sizes[dim] + change, 0)
            yield torch.empty_strided(sizes, value.stride(), dtype=value.dtype)
            strides = list(value.stride())
            strides[dim] = max(strides[dim] + change, 0)
            yield torch.empty_strided(value.shape, strides, dtype=value.dtype)
    yield value.new_empty((*value.shape, 1))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_remembered_check_says_what_the_check_itself_says(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    call = case.build(3)
    seen: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
    for module in _modules():
        for name, check in vars(module).items():
            if name.startswith("_check") and hasattr(check, "__wrapped__"):

                def spy(*arguments: Any, check: Callable[..., Any] = check) -> Any:
                    seen.append((check, arguments))
                    return check(*arguments)

                monkeypatch.setattr(module, name, spy)
    call.function(**call.arguments)
    assert seen
    for check, arguments in seen:
        differ = 0
        for place, value in enumerate(arguments):
            for other in _others(value):
                changed = (*arguments[:place], other, *arguments[place + 1 :])
                expected = _outcome(check.__wrapped__, changed)  # type: ignore[attr-defined]
                for _ in range(2):
                    assert _outcome(check, changed) == expected
                    assert _outcome(check, arguments) == check(*arguments)
                differ += isinstance(expected, tuple) and expected[0] in (TypeError, ValueError)
        assert differ > len(arguments)


def _modules() -> list[Any]:
    names = ("v4.query_kv", "v4.project", "dsa.query", "dsa.norm_rope", "dsa.absorb")
    return [sys.modules[f"preattn.{name}"] for name in names]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_step_of_known_shapes_is_not_checked_again(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    call, again = case.build(3), case.build(3, seed=1)
    call.function(**call.arguments)

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("checked again")

    for name in ("tensor", "rows", "number", "slots"):
        monkeypatch.setattr(checks, name, fail)
    again.function(**again.arguments)
    with pytest.raises(AssertionError, match="checked again"):
        other = case.build(4)
        other.function(**other.arguments)


def test_pointers_are_checked_at_every_call() -> None:
    storage = torch.zeros(3 * 8 * 512 + 8, dtype=torch.bfloat16)
    good, shifted = storage[:-8].view(3, 8, 512), storage[4:-4].view(3, 8, 512)
    out = torch.zeros(3, 16, 512, dtype=torch.bfloat16)
    v4.pad_query(good, 16, out=out)
    with pytest.raises(ValueError, match="query: expected data at a multiple of 16 bytes"):
        v4.pad_query(shifted, 16, out=out)
    with pytest.raises(ValueError, match="out: expected memory apart from query"):
        v4.pad_query(out[:, :8], 16, out=out)
    v4.pad_query(out.clone()[:, :8], 16, out=out)
    with pytest.raises(ValueError, match="out: expected memory apart from query"):
        v4.pad_query(out[:, :8], 16, out=out)


def test_numbers_are_remembered_with_their_types() -> None:
    runs: list[object] = []

    @checks.remembered
    def check(value: object) -> str:
        runs.append(value)
        return type(value).__name__

    for value in (1, True, 1.0, "1", None, 1, True, 1.0, "1", None):
        assert check(value) == type(value).__name__
    assert len(runs) == 5


def test_what_fails_is_not_remembered_and_what_has_no_hash_is_checked() -> None:
    runs: list[object] = []

    @checks.remembered
    def check(value: object) -> None:
        runs.append(value)
        if value == "bad":
            raise ValueError("bad")

    for _ in range(2):
        with pytest.raises(ValueError, match="bad"):
            check("bad")
        check(["a list"])
    assert len(runs) == 4


def test_memory_of_checks_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "REMEMBERED", 3)
    runs: list[object] = []
    check = checks.remembered(runs.append)
    for value in (1, 2, 3, 3, 2, 1, 4, 4):
        check(value)
    assert runs == [1, 2, 3, 4]
    check(1)
    assert runs == [1, 2, 3, 4, 1]


def test_no_tensor_is_kept_alive() -> None:
    query = torch.zeros(5, 8, 512, dtype=torch.bfloat16)
    kept = weakref.ref(query)
    v4.pad_query(query, 16)
    del query
    gc.collect()
    assert kept() is None


def test_a_cleared_memory_between_look_up_and_use_is_no_error() -> None:
    """Threads share what is remembered; one may forget while another looks."""
    check = checks.remembered(lambda value: value % 7)
    checks_of = [lambda seed=seed: [check((seed * 31 + i) % 9000) for i in range(20000)] for seed in range(4)]
    with ThreadPoolExecutor(4) as pool:
        for seed, found in enumerate(pool.map(lambda work: work(), checks_of)):
            assert found == [(seed * 31 + i) % 9000 % 7 for i in range(20000)]


# -- address ranges -----------------------------------------------------------------------------------------


def test_disjoint_agrees_with_the_addresses_of_all_elements() -> None:
    storage = torch.zeros(200, dtype=torch.int16)
    views = [
        storage[start:].as_strided(sizes, strides)
        for start in (0, 1, 7, 40)
        for sizes, strides in (
            ((3, 4), (4, 1)),
            ((2, 3), (20, 2)),
            ((1, 5), (99, 1)),
            ((2, 2), (0, 1)),
            ((0, 4), (4, 1)),
        )
    ]
    for one, other in itertools.product(views, views):
        ranges = []
        for view in (one, other):
            offsets = [
                view.storage_offset() + sum(i * s for i, s in zip(index, view.stride(), strict=True))
                for index in itertools.product(*map(range, view.shape))
            ]
            ranges.append((min(offsets), max(offsets)) if offsets else None)
        a, b = ranges
        meet = a is not None and b is not None and a[0] <= b[1] and b[0] <= a[1]
        if meet:
            with pytest.raises(ValueError, match="one: expected memory apart from other"):
                checks.disjoint("one", one, "other", other)
        else:
            checks.disjoint("one", one, "other", other)


# -- launch configurations ----------------------------------------------------------------------------------


def test_launch_configurations_are_those_of_the_rule() -> None:
    default = policy.device(policy.DEFAULT_DEVICE)
    some, small = policy.LaunchConfig(2, 8, 1), policy.LaunchConfig(8, 2, 2)
    devices = (
        default,
        policy.Device("none"),
        policy.Device("some", launch={"kv": some, "copy@16": small, "rows": some, "rows@128": small, "new@256": small}),
    )
    paths = {path.partition("@")[0] for path in default.launch} | {"new", "unknown"}
    sizes = {0, 1, *policy.STEP_SIZES, *policy.STEP_BOUNDS, 100_000}
    for device, path, tokens in itertools.product(devices, sorted(paths), sorted(sizes)):
        expected = None
        for known in (device.launch, default.launch):
            names = [f"{path}@{bound}" for bound in policy.STEP_BOUNDS if tokens <= bound] + [path]
            expected = expected or next((known[name] for name in names if name in known), None)
        if expected is None:
            with pytest.raises(KeyError, match=path):
                device.config(path, tokens)
        else:
            assert device.config(path, tokens) == expected


# -- launch -------------------------------------------------------------------------------------------------


@dataclass
class Launcher:
    """Stands for the launcher of Triton's driver, the last thing in Python: keeps what it was called with."""

    calls: list[tuple[Any, ...]] = field(default_factory=list)

    def __call__(self, *arguments: Any) -> None:
        self.calls.append(arguments)


def _compiled(launcher: Launcher) -> Any:
    """Triton's own compiled kernel, of whatever version is installed, loaded as if a GPU were here."""
    kernel = object.__new__(CompiledKernel)
    for name, value in {
        "src": None,
        "name": "kernel",
        "metadata": None,
        "module": 1,
        "_module_pid": None,
        "function": 0xF00,
        "packed_metadata": (4, 1, 0),
        "_run": launcher,
    }.items():
        setattr(kernel, name, value)
    return kernel


class Driver:
    """Stands for Triton's driver of GPU 2, whose current stream is 0x57."""

    @staticmethod
    def get_current_device() -> int:
        return 2

    @staticmethod
    def get_current_stream(index: int) -> int:
        assert index == 2
        return 0x57


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch) -> Launch:
    monkeypatch.setattr(driver, "_active", Driver())
    monkeypatch.setattr(Kernel, "kernels", [])

    def a_kernel() -> None: ...

    tensors = (torch.zeros(4, 64), None, Tile(torch.zeros(8, 64), (16, 64)), torch.zeros(0))
    return Launch(Kernel(a_kernel), 7, tensors, (3, 0.5), (True, 512, "word"), 4)


def _same(mine: tuple[Any, ...], theirs: tuple[Any, ...]) -> None:
    """Equal but for a tensor, which the one passes by its address."""
    assert len(mine) == len(theirs)
    for one, other in zip(mine, theirs, strict=True):
        if isinstance(other, Tensor):
            assert one == other.data_ptr() and type(one) is int
        else:
            assert type(one) is type(other) and one == other


def test_the_launcher_gets_what_tritons_own_runner_gives_it(launch: Launch) -> None:
    mine, theirs = Launcher(), Launcher()
    launch._start(_compiled(mine), 2)
    tensors = [tensor.descriptor() if isinstance(tensor, Tile) else tensor for tensor in launch.tensors]
    _compiled(theirs)[(launch.grid, 1, 1)](*tensors, *launch.scalars, *launch.constants)
    assert len(mine.calls) == len(theirs.calls) == 1
    assert mine.calls[0][:9] == (7, 1, 1, 0x57, 0xF00, (4, 1, 0), None, None, None)
    assert theirs.calls[0][:6] == mine.calls[0][:6]
    _same(mine.calls[0][9:], theirs.calls[0][9:])


@pytest.mark.parametrize("which", ["launch_enter_hook", "launch_exit_hook"])
@pytest.mark.parametrize("chained", [True, False])
def test_hooks_are_told_as_by_tritons_own_runner(
    which: str, chained: bool, launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hook(metadata: Any) -> None: ...

    if chained:
        monkeypatch.setattr(getattr(runtime, which), "calls", [hook])
    else:
        monkeypatch.setattr(runtime, which, hook)
    mine, theirs = Launcher(), Launcher()
    launch._start(_compiled(mine), 2)
    tensors = [tensor.descriptor() if isinstance(tensor, Tile) else tensor for tensor in launch.tensors]
    _compiled(theirs)[(launch.grid, 1, 1)](*tensors, *launch.scalars, *launch.constants)
    told, expected = mine.calls[0][6:9], theirs.calls[0][6:9]
    assert told[0].get() == expected[0].get() == {"name": "kernel", "function": 0xF00, "stream": 0x57}
    assert told[1:] == expected[1:] == (runtime.launch_enter_hook, runtime.launch_exit_hook)


def test_no_hook_at_all(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "launch_enter_hook", None)
    monkeypatch.setattr(runtime, "launch_exit_hook", None)
    mine = Launcher()
    launch._start(_compiled(mine), 2)
    assert mine.calls[0][6:9] == (None, None, None)


@pytest.mark.parametrize("current", [2, 0])
def test_the_tensors_device_is_made_current(current: int, launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[int] = []

    class On:
        def __init__(self, index: int) -> None:
            entered.append(index)

        def __enter__(self) -> None: ...

        def __exit__(self, *_: object) -> None: ...

    mine = Launcher()
    monkeypatch.setattr("preattn.kernels.launch.INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setattr(torch.cuda, "device", On)
    monkeypatch.setattr(Launch, "_variant", lambda self, device: _compiled(mine))
    launch.run(torch.device("cuda", 2))
    assert entered == ([] if current == 2 else [2]) and len(mine.calls) == 1


@pytest.mark.parametrize("name", ["reference", "triton"])
def test_a_key_with_a_head_of_its_own_keeps_its_shape(name: Backend, device: str) -> None:
    """[T, 1, 64] keys go through the op as they are, for no view need be made of them."""
    if name == "reference" and device == "cuda":
        pytest.skip("the reference runs on CPU tensors")
    case = NormRopeCase(return_kv=True, record="bf16", index_record=None)
    flat, apart = case.build(3, device), case.build(3, device)
    arguments = apart.arguments | {"k_pe": apart.arguments["k_pe"].unsqueeze(1)}
    if arguments.get("k_pe_out") is not None:
        arguments["k_pe_out"] = arguments["k_pe_out"].unsqueeze(1)
    with backend(name):
        expected, found = flat.function(**flat.arguments), dsa.norm_rope_insert(**arguments)
    assert found.k_pe is not None and found.k_pe.shape == (3, 1, 64)
    assert torch.equal(found.k_pe.squeeze(1), expected.k_pe)
    assert torch.equal(found.kv_latent, expected.kv_latent)
    assert torch.equal(apart.memory["pool"], flat.memory["pool"])
