"""Debug mode: every op, every kind of offender. The first is named, with nothing written; a good call is as without."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import preattn
from preattn import debugging, dispatch, dsa, formats, v4, weights
from preattn.cases.base import Call, Case, as_bytes
from preattn.cases.dsa import AbsorbCase, DsaQueryCase, NormRopeCase
from preattn.cases.v4 import KvCase, PadCase, ProjectCase, V4Case
from preattn.dispatch import Backend, backend
from preattn.geometry import geometry
from preattn.warmup import warmup
from preattn.workspace import QueryWorkspace

TOKENS = 5
GOOD: Backend | None = None if torch.cuda.is_available() else "reference"

CASES: tuple[Case, ...] = (
    V4Case(8, 16),
    V4Case(3, 8, record="v4_fp8", layout="head_major", norm=True, rope=True, in_place=True),
    V4Case(3, 4, record="fp8", layout="head_major", rope=True, fp8_query=True, index_dtype=torch.int32),
    V4Case(4, 0, record="bf16", layout="head_major"),
    PadCase(8, 16),
    PadCase(3, 4, layout="head_major", dtype=torch.float16),
    KvCase("fp8"),
    ProjectCase(2, 4, weight="e4m3", rope=True, grouped=True),
    ProjectCase(2, 4, weight="mx", layout="chunk_interleaved"),
    ProjectCase(2, 4, norm=True),
    DsaQueryCase(4, padded_heads=8, index_heads=4),
    DsaQueryCase(4, padded_heads=8, latent="front", fp8_query=True, index_heads=0),
    DsaQueryCase(3, latent="contiguous", padded_heads=8, index_heads=0, rope_dim=0),
    DsaQueryCase(3, form="pair", latent="contiguous", fp8_query=True, index_heads=2),
    AbsorbCase(2, nope=64, padded_heads=4),
    AbsorbCase(2, nope=64, fp8_query=False),
    NormRopeCase(rank=512, top_k=64),
    NormRopeCase(rank=512, record="bf16", block_size=16, index_block_size=32, return_kv=True),
    NormRopeCase(rank=512, slots=False, index_record=None),
)


def good(case: Case, device: str) -> Call:
    """A call of the registry as debug mode wants it: slots inside the cache, zeros where attention reads padding."""
    call = case.build(TOKENS, device)
    for name in ("slots", "index_slots"):
        if isinstance(slots := call.arguments.get(name), Tensor):
            slots.copy_(torch.arange(len(slots)).flip(0))
            slots[1] = -1
    if (tail := padding(case, call)) is not None:
        tail.zero_()
    return call


def padding(case: Case, call: Call) -> Tensor | None:
    """The heads of a call's output past its own."""
    out, heads = call.arguments.get("out"), getattr(case, "heads", None)
    if out is None or heads is None:
        return None
    return weights.padding_heads(out, heads, interleaved=getattr(case, "layout", "") == "chunk_interleaved")


def snapshot(call: Call) -> dict[str, Tensor]:
    tensors = {name: value for name, value in call.arguments.items() if isinstance(value, Tensor)}
    return {name: as_bytes(value) for name, value in {**tensors, **call.memory}.items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(bits, other[name]) for name, bits in one.items())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_good_call_is_the_same_call(case: Case, device: str) -> None:
    plain = good(case, device).run(GOOD)
    with preattn.debug():
        assert same(plain, good(case, device).run(GOOD))


@pytest.mark.parametrize("case", [CASES[1], CASES[7], CASES[10], CASES[16]], ids=lambda case: case.name)
def test_a_good_call_of_the_kernels_is_too(case: Case, device: str) -> None:
    plain = good(case, device).run("triton")
    with preattn.debug():
        assert same(plain, good(case, device).run("triton"))


# -- offenders -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Offence:
    """A value put into one argument, and what is said of it."""

    case: Case
    name: str
    value: float
    index: tuple[int, ...]
    message: str

    def __str__(self) -> str:
        return f"{self.case.name}-{self.name}-{self.value}"


def put(tensor: Tensor, value: float, index: tuple[int, ...]) -> None:
    if value == value:
        tensor[index] = value
    elif tensor.dtype in (torch.float8_e4m3fn, torch.uint8):
        tensor.view(torch.uint8)[index] = 0x7F if tensor.dtype != torch.uint8 else 0xFF
    else:
        tensor[index] = value


def offences() -> Iterator[Offence]:
    for case in CASES:
        call = good(case, "cpu")
        arguments = {name: value for name, value in call.arguments.items() if isinstance(value, Tensor)}
        for name, cache_name in (("slots", "cache"), ("index_slots", "index_cache")):
            if (slots := arguments.get(name)) is None:
                continue
            capacity = arguments[cache_name].shape[0] * arguments[cache_name].shape[1]
            expected = f"{name}: expected -1, or 0 to {capacity - 1} in {cache_name}; got "
            yield Offence(case, name, -2, (2,), f"{expected}-2 at (2,)")
            yield Offence(case, name, capacity, (3,), f"{expected}{capacity} at (3,)")
            yield Offence(case, name, torch.iinfo(slots.dtype).max, (0,), expected)
            again = f"{name}: expected distinct slots; got {int(slots[2])} at (4,), which is that of (2,) too"
            yield Offence(case, name, int(slots[2]), (4,), again)
        table = arguments.get("rope_table", arguments.get("index_rope_table"))
        if "positions" in arguments and table is not None:
            for value in (-1, len(table)):
                message = f"positions: expected 0 to {len(table) - 1}, rows of "
                yield Offence(case, "positions", value, (3,), message)
        for name, tensor in arguments.items():
            read = name not in ("out", "cache", "index_cache", "top_k")
            read = read and not (name == "query" and arguments.get("out") is None)  # KV only
            if read and (tensor.is_floating_point() or name == "weight_scale") and tensor.numel():
                last = tuple(size - 1 for size in tensor.shape)
                spelled = "255" if tensor.dtype == torch.uint8 else "nan"
                message = f"{name}: expected finite values; got {spelled}" + f" at {last}"
                yield Offence(case, name, float("nan"), last, message)
                if tensor.dtype in (torch.bfloat16, torch.float32):
                    yield Offence(case, name, float("inf"), last, message.replace("nan", "inf"))
        if case == CASES[11]:  # the latent is there
            yield Offence(case, "out", float("nan"), (1, 2, 3), "out: expected finite values; got nan at (1, 2, 3)")


@pytest.mark.parametrize("offence", list(offences()), ids=str)
def test_the_first_offender_is_named_and_nothing_is_written(offence: Offence, device: str) -> None:
    call = good(offence.case, device)
    put(call.arguments[offence.name], offence.value, offence.index)
    before = snapshot(call)
    with preattn.debug(), backend(GOOD), pytest.raises(ValueError, match=f"^{re.escape(offence.message)}"):
        call.function(**call.arguments)
    assert same(before, snapshot(call))


IN_PLACE = [CASES[index] for index in (1, 7, 8, 10, 11, 14)]


@pytest.mark.parametrize("case", IN_PLACE, ids=lambda case: case.name)
def test_a_tail_that_is_not_zero_is_found_after_the_call(case: Case, device: str) -> None:
    call, expected = good(case, device), good(case, device)
    expected.run(GOOD)
    for each in (call, expected):
        tail = padding(case, each)
        assert tail is not None
        index = tuple(size - 1 for size in tail.shape)
        tail.view(torch.uint8)[(*index[:-1], tail.view(torch.uint8).shape[-1] - 1)] = 0x80  # -0.0: any bit counts
    out = call.arguments["out"]
    place = (TOKENS - 1, 31, out.shape[1] - 1, 15) if tail.dim() == 4 else tuple(size - 1 for size in out.shape)
    message = rf"^out: expected \+0\.0 in the heads past the first {case.heads}; got .* {re.escape(str(place))}$"  # type: ignore[attr-defined]
    with preattn.debug(), backend(GOOD), pytest.raises(RuntimeError, match=message):
        call.function(**call.arguments)
    assert same(snapshot(expected), snapshot(call)), "the step itself is done"


def test_of_two_offenders_the_first_is_named() -> None:
    call = good(CASES[6], "cpu")
    call.arguments["kv"][2, 7] = torch.nan
    call.arguments["kv"][1, 300] = torch.inf
    with preattn.debug(), backend(GOOD), pytest.raises(ValueError, match=r"^kv: .*; got inf at \(1, 300\)"):
        call.function(**call.arguments)
    call.arguments["slots"][3] = 999
    with preattn.debug(), backend(GOOD), pytest.raises(ValueError, match=r"^slots: .*; got 999 at \(3,\)"):
        call.function(**call.arguments)


def test_skipped_slots_may_repeat() -> None:
    call = good(CASES[6], "cpu")
    call.arguments["slots"].fill_(-1)
    with preattn.debug(), backend(GOOD):
        call.function(**call.arguments)


# -- when it is on -------------------------------------------------------------------------------------------------


def bad() -> Call:
    call = good(CASES[6], "cpu")
    call.arguments["slots"][3] = 999
    return call


def is_on() -> bool:
    call = bad()
    try:
        with backend(GOOD):
            call.function(**call.arguments)
    except ValueError:
        return True
    return False


def test_it_is_on_within_its_context_and_thread() -> None:
    assert not is_on()
    with preattn.debug():
        assert is_on()
        with preattn.debug(False):
            assert not is_on()
        assert is_on()
        with ThreadPoolExecutor(1) as pool:
            assert not pool.submit(is_on).result()
    assert not is_on()
    with pytest.raises(TypeError, match="on: expected a bool; got int"), preattn.debug(1):  # type: ignore[arg-type]
        pass


@pytest.mark.parametrize(("value", "expected"), [("1", "True True"), ("0", "False False")])
def test_the_environment_turns_it_on_in_every_thread(value: str, expected: str) -> None:
    program = (
        "from concurrent.futures import ThreadPoolExecutor\nfrom preattn.dispatch import _debug\n"
        "print(_debug.get(), ThreadPoolExecutor(1).submit(_debug.get).result())"
    )
    environment = {**os.environ, "PREATTN_DEBUG": value}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == expected


def test_off_nothing_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(debugging, "before", lambda *arguments: pytest.fail("looked at"))
    monkeypatch.setattr(debugging, "after", lambda *arguments: pytest.fail("looked at"))
    assert not is_on()


def test_warm_up_is_not_looked_at(device: str) -> None:
    """Its rows share one slot, and nothing runs."""
    with preattn.debug(), dispatch.hold() as launches:
        call = good(CASES[0], device)
        call.arguments["slots"].zero_()
        call.function(**call.arguments)
        assert launches
    with preattn.debug():
        warmup(geometry("deepseek-v4.1-flash").shard(8), device=device)


def test_under_graph_capture_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("is_initialized", "is_current_stream_capturing"):
        monkeypatch.setattr(torch.cuda, name, lambda: True)
    call = good(CASES[6], "cpu")
    before = snapshot(call)
    with preattn.debug(), backend(GOOD), pytest.raises(RuntimeError, match=r"^debug: expected .+ capture, .+; got one"):
        call.function(**call.arguments)
    assert same(before, snapshot(call))
    workspace = QueryWorkspace(geometry("deepseek-v4.1-flash").shard(2), "flashmla-mega", 2, device="cpu", debug=True)
    with pytest.raises(RuntimeError, match=r"^debug: expected .+ capture, .+; got one"):
        workspace.view(1)


def test_a_compiled_call_is_looked_at_when_it_runs() -> None:
    call = bad()

    def step(kv: Tensor, cache: Tensor, slots: Tensor, positions: Tensor, table: Tensor) -> None:
        v4.kv_insert(kv, cache, slots, positions, table, record="bf16")

    record = formats.record("bf16", 512)
    cache = torch.zeros(1, 64, record.bytes, dtype=torch.uint8)
    arguments = [call.arguments[name] for name in ("kv", "slots", "positions", "rope_table")]
    with preattn.debug(), backend(GOOD):
        compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
        with pytest.raises(ValueError, match=r"^slots: expected -1, or 0 to 63 in cache; got 999 at \(3,\)"):
            compiled(arguments[0], cache, *arguments[1:])
    assert not cache.any()


# -- repeated slots ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["reference", "triton"])
@pytest.mark.parametrize("case", [KvCase("bf16"), NormRopeCase(rank=512, record="bf16", top_k=64)], ids=["v4", "dsa"])
def test_repeated_slots_touch_no_other_row_and_the_reference_keeps_the_last(
    case: Case, name: Backend, device: str
) -> None:
    """Outside the contract: a GPU's programs store in no order, and the record may be of both rows in part."""
    if name == "reference" and device == "cuda":
        pytest.skip("the reference runs on CPU tensors")
    call, last = good(case, device), good(case, device)
    call.arguments["slots"].copy_(torch.tensor([7, 3, 7, 5, 7]))
    last.arguments["slots"].copy_(torch.tensor([-1, 3, -1, 5, 7]))
    stored, expected = call.run(name), last.run(name)
    if name == "reference":
        assert same(expected, stored)
        return
    cache = call.arguments["cache"]
    slot = dsa.RECORDS["bf16"].bytes if case.name.startswith("dsa") else v4.RECORDS["bf16"].bytes
    start = cache.storage_offset() * cache.element_size() + 7 * slot
    differ = (stored["pool"] != expected["pool"]).nonzero().flatten()
    assert bool(((differ >= start) & (differ < start + slot)).all())
