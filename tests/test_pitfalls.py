"""How such ops have failed elsewhere, as kinds of input over every case of the registry.

Each kind changes where a call's tensors lie, or which rows have a slot, in a way that must not change one bit of its
result, and holds every byte that the op does not own. The plain call on the reference says what is right; the changed
call runs on the reference and on the kernels. What other files do for all cases is not done again: numbers in
``test_exhaustive``, random combinations in ``test_properties``, poisoned outputs in ``test_cases``.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import placing
import pytest
import torch
from placing import rehome, respread, same, set_slots, stored
from torch import Tensor

from preattn import checks, policy
from preattn.cases import CASES as ALL_CASES
from preattn.cases import Case
from preattn.cases.base import CANARY, Call, as_bytes
from preattn.cases.dsa import AbsorbCase, DsaQueryCase, NormRopeCase
from preattn.cases.v4 import KvCase, PadCase, ProjectCase, V4Case
from preattn.dispatch import Backend, backend
from preattn.kernels import dsa as _dsa  # noqa: F401  the kernels are then known
from preattn.kernels import v4 as _v4  # noqa: F401
from preattn.kernels.launch import Kernel
from preattn.policy import Device, LaunchConfig, Projection, assume

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter, at infinities and NaNs

TOKENS = 5
BLOCK = 16
STALE = 0x80
"""What a buffer holds from another call: a negative zero in e4m3."""


def smallest(cases: tuple[Case, ...]) -> list[Case]:
    """Of cases that differ in nothing but head counts, the one with the fewest."""
    found: dict[str, Case] = {}
    for case in sorted(cases, key=lambda case: getattr(case, "heads", 0)):
        found.setdefault(re.sub(r"\d+of\d+|\d+(?=_(half_split|interleaved))", "", case.name), case)
    return list(found.values())


CASES = [case for case in smallest(ALL_CASES) if not (isinstance(case, ProjectCase) and case.heads > 3)]
STORING = [case for case in CASES if case.build(1).arguments.get("slots") is not None]
STRIDED = [
    *[(case, True) for case in CASES],
    *[
        (case, False)
        for case in CASES
        if any(
            placing.inner_dims(call := case.build(1), name) < call.arguments[name].dim() - 1
            for name in placing.TOKEN_ROWS
            if name != "out" and isinstance(case.build(1).arguments.get(name), Tensor)
        )
    ],
]
"""With the tokens outermost in memory; with the heads outermost, where an argument has heads that are strided."""
STRIDED_IDS = [f"{case.name}-{'tokens' if first else 'heads'}_first" for case, first in STRIDED]
BACKENDS: tuple[Backend, ...] = ("reference", "triton")


def named(case: Case) -> str:
    return case.name


WIDE = Device("wide tiles", launch=dict.fromkeys(policy.device(policy.DEFAULT_DEVICE).launch, LaunchConfig(64, 64, 4)))
"""For the interpreter, whose time goes into the number of programs."""


@pytest.fixture(params=BACKENDS)
def place(request: pytest.FixtureRequest, device: str) -> Iterator[str]:
    """Where calls are made, on either backend in turn."""
    with backend(request.param), assume(WIDE) if device == "cpu" else nullcontext():
        yield "cpu" if request.param == "reference" else device


def plain(case: Case, tokens: int = TOKENS, **changes: Any) -> Call:
    """The call on the CPU, made by the reference; its memory holds what is right."""
    call = case.build(tokens)
    call.arguments.update(changes)
    return call


def expected(call: Call) -> dict[str, Tensor]:
    with backend("reference"):
        return placing.outputs(call)


# -- addressing ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", STORING, ids=named)
def test_records_go_where_the_page_stride_says(case: Case, place: str) -> None:
    """Padded pages of three layers in one pool, the middle one ours; first and last slot of a page and of the cache."""
    slots = torch.tensor([0, BLOCK - 1, BLOCK, 2 * BLOCK + 3, 4 * BLOCK - 1])
    dense, shared = plain(case), case.build(TOKENS, place)
    for call, pad, offset in ((dense, 0, 0), (shared, 9008, 4512)):
        pools = rehome(
            call, placing.canary(call.arguments["cache"].device), blocks=4, block_size=BLOCK, pad=pad, offset=offset
        )
        set_slots(call, slots.to(call.arguments["cache"].device))
    want = expected(dense)
    assert same(placing.outputs(shared), want)
    assert same(stored(shared, slots), stored(dense, slots))
    for name, pool in pools.items():
        rest = torch.ones(len(pool), dtype=torch.bool)
        rest[4512 + placing.addresses(shared, name, slots)] = False
        assert (pool.cpu()[rest] == CANARY).all()


@pytest.mark.parametrize(
    ("case", "index_dtype"),
    [*[(case, torch.int64) for case in STORING], *[(case, torch.int32) for case in STORING[::4]]],
    ids=lambda value: value.name if hasattr(value, "name") else str(value),
)
def test_a_slot_outside_the_cache_stores_nothing(case: Case, index_dtype: torch.dtype, place: str) -> None:
    """Whatever the row holds: a NaN there must not reach block 0, nor the last slot; its query is processed."""
    call = case.build(12, place)
    for name in placing.caches(call):  # behind our last page the pool goes on
        call.arguments[name] = call.arguments[name][:-1]
    capacities = {call.arguments[name].shape[0] * call.arguments[name].shape[1] for name in placing.caches(call)}
    most = max(capacities)
    outside = [most, most + BLOCK, -1, -2, -(2**31), 2**31 - 1]
    if index_dtype == torch.int64:
        outside += [2**31, 2**32, 2**32 + 1, 2**40 + 17, -(2**63), 2**63 - 1]
    want = expected(plain(case, 12))
    for name in ("kv", "index_key"):
        if name in call.arguments:
            call.arguments[name].fill_(torch.nan)
    set_slots(call, torch.tensor(outside).to(index_dtype).to(place))
    assert same(placing.outputs(call), want)
    for name in ("pool", "index_pool"):
        assert name not in call.memory or (call.memory[name] == CANARY).all()


REACH = 2**31
"""Elements past which a 32-bit offset wraps."""


def check_far(case: Case, call: Call) -> None:
    """Rows past 32 bits are reached, or refused where a library's matmul was asked for, which is not trusted there."""
    multiplies = call.arguments.get("form") == Projection.MATMUL
    if multiplies or (isinstance(case, AbsorbCase) and not case.fp8_query):
        with pytest.raises(ValueError, match=str(checks.LIBRARY_STRIDE)):
            placing.outputs(call)
    else:
        near = plain(case, 3)
        want = expected(near)
        assert same(placing.outputs(call), want)
        assert same(placing.records(call), placing.records(near))


ON_CPU = pytest.mark.skipif(
    torch.cuda.is_available() or sys.platform != "linux",
    reason="addresses without memory behind them are a CPU's, and Linux's; tests/gpu/test_large.py has the GPU's",
)


@ON_CPU
@pytest.mark.parametrize("case", CASES, ids=named)
def test_rows_past_32_bits(case: Case, place: str) -> None:
    """Tokens far apart. Heads far apart the interpreter cannot show: it takes a scalar that fits for 32 bits wide."""
    call = case.build(3, place)
    respread(call, placing.untouched, reach=REACH)
    check_far(case, call)


@ON_CPU
@pytest.mark.parametrize("pad", [0, 2**30], ids=["dense", "shared"])
@pytest.mark.parametrize("case", STORING, ids=named)
def test_pages_past_32_bits(case: Case, pad: int, place: str) -> None:
    """9 GiB of small pages, or pages 1 GiB apart: the first slot past each power of two, and the last."""
    found = list(placing.caches(case.build(1)).values())
    blocks = 6 if pad else (9 << 30) // (BLOCK * min(record.bytes for record in found))
    capacity = blocks * BLOCK
    wraps = [0, *[2**31 // record.bytes + 1 for record in found], capacity // 2 + 1, capacity - 1][:TOKENS]
    slots = torch.tensor([slot % capacity for slot in wraps])
    if len(set(slots.tolist())) < len(slots):
        slots = torch.arange(TOKENS) * BLOCK + torch.arange(TOKENS)
    far, near = case.build(TOKENS, place), plain(case)
    rehome(far, placing.untouched, blocks=blocks, block_size=BLOCK, pad=pad)
    rehome(near, placing.canary("cpu"), blocks=TOKENS, block_size=BLOCK)
    set_slots(far, slots)
    close = torch.arange(len(slots)) * BLOCK + slots % BLOCK
    set_slots(near, close)
    want = expected(near)
    assert same(placing.outputs(far), want)
    assert same(stored(far, slots), stored(near, close))


def test_no_stride_or_capacity_is_narrow() -> None:
    """What the interpreter cannot show: the widths that kernels are compiled with."""
    seen = 0
    for kernel in Kernel.kernels:
        for name, parameter in inspect.signature(kernel.function.fn).parameters.items():
            if name.startswith("stride_") or name.endswith("capacity"):
                seen += 1
                assert parameter.annotation == "i64", f"{kernel.name}: {name}"
    assert seen > 30


# -- strided inputs ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("case", "tokens_first"), STRIDED, ids=STRIDED_IDS)
def test_rows_of_wider_ones_equal_dense_rows(case: Case, tokens_first: bool, place: str) -> None:
    """Every argument that has strides, in memory of its own with gaps that stay as they were."""
    call, dense = case.build(TOKENS, place), plain(case)
    want = expected(dense)
    memories = respread(call, placing.canary(place), tokens_first=tokens_first)
    before = {name: as_bytes(memory) for name, memory in memories.items()}
    assert same(placing.outputs(call), want)
    assert same(placing.records(call), placing.records(dense))
    for name, memory in memories.items():
        view = call.arguments[name]
        mask = torch.ones(memory.numel() // view.element_size(), dtype=torch.bool)
        if name in ("out", "top_k", *call.memory):
            mask.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(False)
        mask = mask.repeat_interleave(view.element_size())
        assert torch.equal(as_bytes(memory)[mask], before[name][mask]), name


@pytest.mark.parametrize("case", CASES, ids=named)
def test_index_types_and_tables_are_the_same_numbers(case: Case, place: str) -> None:
    """int32 or int64 slots and positions; a bf16 table and its exact upcast."""
    call, other = case.build(TOKENS, place), plain(case)
    for name, tensor in call.arguments.items():
        if not isinstance(tensor, Tensor):
            continue
        if name in ("positions", "slots", "index_slots"):
            inside = tensor.clamp(-(2**31), 2**31 - 1)
            call.arguments[name] = inside.to(torch.int32 if tensor.dtype == torch.int64 else torch.int64)
        elif name in ("rope_table", "index_rope_table"):
            call.arguments[name] = tensor.bfloat16().float() if tensor.dtype == torch.float32 else tensor.float()
            other.arguments[name] = tensor.cpu().bfloat16()
    want = expected(other)
    assert same(placing.outputs(call), want)
    for name in ("pool", "index_pool"):
        assert name not in call.memory or torch.equal(call.memory[name].cpu(), other.memory[name])


# -- padding -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", STORING, ids=named)
def test_only_owned_rows_are_stored(case: Case, place: str) -> None:
    """Decode-context parallelism: -1 scattered over the slots, and fewer slots than rows. All else is as ever."""
    full, call = plain(case, 9), case.build(9, place)
    slots = full.arguments["slots"]
    count = min(len(slots), 7)
    owned = slots[:count].clone()
    owned[::2] = -1
    want = expected(full)
    set_slots(call, owned.to(place))
    assert same(placing.outputs(call), want)
    kept = slots.clone()
    kept[:count:2], kept[count:] = -1, -1
    only = plain(case, 9, slots=kept)
    if only.arguments.get("index_slots") is not None:
        only.arguments["index_slots"] = kept
    expected(only)
    for name in ("pool", "index_pool"):
        assert name not in call.memory or torch.equal(call.memory[name].cpu(), only.memory[name])


@pytest.mark.parametrize("case", STORING, ids=named)
def test_no_slots_at_all(case: Case, place: str) -> None:
    call = case.build(TOKENS, place)
    want = expected(plain(case))
    set_slots(call, call.arguments["slots"][:0])
    assert same(placing.outputs(call), want)
    for name in ("pool", "index_pool"):
        assert name not in call.memory or (call.memory[name] == CANARY).all()


def _in_place(call: Call) -> bool:
    """Whether what is read lies in what is written, or some of that is left alone."""
    if "counters" in call.arguments:
        return True
    out, query = call.arguments.get("out"), call.arguments.get("query")
    front = isinstance(out, Tensor) and "q_pe" in call.arguments and call.arguments.get("latent") is None
    latent = call.arguments.get("latent")
    inputs = [tensor for tensor in (query, latent) if isinstance(tensor, Tensor)]
    return front or any(isinstance(out, Tensor) and tensor.data_ptr() == out.data_ptr() for tensor in inputs)


@pytest.mark.parametrize("case", [case for case in CASES if not _in_place(case.build(1))], ids=named)
def test_a_buffer_that_is_used_again_is_written_whole(case: Case, place: str) -> None:
    """Padding heads too are +0.0 on every call, not only where the buffer was new; a workspace's stay as they are."""
    call = case.build(TOKENS, place)
    want = {name: tensor.clone() for name, tensor in placing.outputs(call).items()}
    for name, tensor in call.memory.items():
        if name not in ("pool", "index_pool"):
            tensor.view(torch.uint8).fill_(STALE)
    again = placing.outputs(call)
    if "top_k" in want:
        want["top_k"][:TOKENS] = -1
        want["top_k"][TOKENS:].contiguous().view(torch.uint8).fill_(STALE)
    if isinstance(case, AbsorbCase):  # writes live heads' latents alone
        want["out"][:, case.heads :].view(torch.uint8).fill_(STALE)
        want["out"][..., 512:].view(torch.uint8).fill_(STALE)
    if isinstance(case, ProjectCase):  # writes live heads alone
        out = want["out"]
        heads = out.view(TOKENS, 32, -1, 16) if case.layout == "chunk_interleaved" else out
        heads[..., case.heads :, :].view(torch.uint8).fill_(STALE)
    assert same(again, want)


# -- RoPE, rows and heads ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=named)
def test_a_row_alone_gives_the_same_bits(case: Case, place: str) -> None:
    row = TOKENS - 1
    call, whole = case.build(TOKENS, place), plain(case)
    want = {name: tensor[row : row + 1] for name, tensor in expected(whole).items()}
    placing.rows(call, row, row + 1)
    assert same(placing.outputs(call), want)
    assert same(placing.records(call), {name: rows[-1:] for name, rows in placing.records(whole).items()})


HEADS = [case for case in CASES if isinstance(case, V4Case | DsaQueryCase) and getattr(case, "padded_heads", 1) != 0]


@pytest.mark.parametrize("case", HEADS, ids=named)
def test_a_head_among_many_equals_the_one_head_call(case: Any, place: str) -> None:
    """Several heads a program, a partial rotation: the head's other dims keep their bits as well."""
    want = expected(plain(case, 2))
    for head in sorted({0, case.heads - 1}):
        call = case.build(2, place)
        arguments = call.arguments
        if isinstance(case, V4Case):
            interleaved = case.layout == "chunk_interleaved"
            shape = (2, 32, case.heads, 16) if interleaved else (2, 1, case.heads, 512)
            query = arguments["query"].reshape(shape)[:, :, head].reshape(2, 1, 512)
            result = call.function(**{**arguments, "query": query, "padded_heads": 1, "out": None})
            whole = want["out"].view(2, shape[1], -1, shape[3])[:, :, head].reshape(2, 1, 512)
            assert torch.equal(as_bytes(result), as_bytes(whole))
            continue
        latent = arguments["latent"]
        if latent is None:
            latent = arguments["out"][:, : case.heads, :512]
        changes = {"q_pe": arguments["q_pe"][:, head : head + 1], "latent": latent[:, head : head + 1], "out": None}
        result = call.function(**{**arguments, **changes, "padded_heads": None})
        if case.form == "packed":
            assert torch.equal(
                as_bytes(result.query), as_bytes(want.get("out", want.get("result0"))[:, head : head + 1])
            )
        else:
            assert torch.equal(as_bytes(result.q_pe), as_bytes(want["result1"][:, head : head + 1]))


ROTATING = [case for case in CASES if case.build(1).arguments.get("rope_table") is not None]


@pytest.mark.parametrize("case", ROTATING, ids=named)
def test_there_is_one_rotation_or_none(case: Any, place: str) -> None:
    """By nothing, the result is that of a table whose rows do not differ; positions then say nothing."""
    still = torch.cat([torch.ones(512, 32), torch.zeros(512, 32)], 1)
    call, other = case.build(TOKENS, place), plain(case, rope_table=still[:1])
    call.arguments["rope_table"] = still.to(place)
    other.arguments["positions"] = torch.zeros_like(other.arguments["positions"])
    want = expected(other)
    assert same(placing.outputs(call), want)
    if isinstance(case, V4Case) and case.padded_heads and not (case.norm or case.fp8_query):
        query = case.build(TOKENS).arguments["query"]
        heads = (
            want["out"].view(TOKENS, 32, -1, 16)[:, :, : case.heads].flatten(2)
            if case.layout != "head_major"
            else want["out"][:, : case.heads]
        )
        assert torch.equal(as_bytes(heads.float() + 0.0), as_bytes(query.reshape(heads.shape).float() + 0.0))
    if (
        isinstance(case, DsaQueryCase)
        and not case.fp8_query
        and case.form == "packed"
        and case.rope_output == "interleaved"
    ):
        tail = want["out"][:, : case.heads, 512:]
        assert torch.equal(tail.float() + 0.0, case.build(TOKENS).arguments["q_pe"].float() + 0.0)
    quarter = torch.cat([torch.zeros(512, 32), torch.ones(512, 32)], 1)  # (a, b) becomes (-b, a): once, not twice
    call, given = case.build(TOKENS, place), case.build(TOKENS).arguments
    call.arguments["rope_table"] = quarter.to(place)
    if call.arguments.get("slots") is not None:
        set_slots(call, torch.arange(TOKENS, device=place))
    got = placing.outputs(call)
    if isinstance(case, NormRopeCase) and case.return_kv and case.rope_dim and case.rope_output == "interleaved":
        assert same_numbers(got["result2"], turned(given["k_pe"]))
    if isinstance(case, V4Case) and case.padded_heads and case.rope and not (case.norm or case.fp8_query):
        assert same_numbers(got["out"][:, : case.heads, 448:], turned(given["query"][..., 448:]))
    if isinstance(case, V4Case) and case.record == "bf16":
        rows = placing.records(call)["cache"].view(torch.bfloat16)
        assert same_numbers(rows[:, 448:], turned(given["kv"][:, 448:]))
    if isinstance(case, DsaQueryCase) and not case.fp8_query and case.rope_output == "interleaved":
        rotated = got["result1"] if case.form == "pair" else got["out"][:, : case.heads, 512:]
        assert same_numbers(rotated, turned(given["q_pe"]))


def turned(x: Tensor) -> Tensor:
    """Each pair by a quarter turn."""
    return torch.stack([-x[..., 1::2], x[..., 0::2]], -1).flatten(-2)


def same_numbers(a: Tensor, b: Tensor) -> bool:
    """A product with zero, added, may have changed the sign of a zero."""
    return torch.equal(a.cpu().float(), b.float())


# -- compiled ------------------------------------------------------------------------------------------------------

GRAPHS = [
    V4Case(8, 16),
    V4Case(3, 4, record="v4_fp8", layout="head_major", norm=True, rope=True),
    KvCase("v4_fp8"),
    PadCase(3, 8),
    ProjectCase(2, 4, rope=True),
    ProjectCase(2, 4, layout="chunk_interleaved", form=Projection.MATMUL),
    ProjectCase(2, 4, weight="e4m3", grouped=True),
    DsaQueryCase(3, padded_heads=8, latent="contiguous"),
    DsaQueryCase(3, form="pair", latent="contiguous", fp8_query=True),
    AbsorbCase(3),
    AbsorbCase(3, fp8_query=False),
    NormRopeCase(return_kv=True),
]


@pytest.mark.parametrize("case", GRAPHS, ids=named)
def test_steps_of_any_size_are_one_graph(case: Case, device: str) -> None:
    """Symbolic sizes and strides pass every check, whole, and the bits are those of an eager call."""
    torch._dynamo.reset()
    step = torch.compile(case.build(2).function, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (3, 17, 1):
        call, compiled = case.build(tokens, device), case.build(tokens, device)
        compiled.function = step
        assert same(placing.outputs(compiled), placing.outputs(call)), tokens
        for name, tensor in call.memory.items():
            assert torch.equal(as_bytes(tensor), as_bytes(compiled.memory[name])), (tokens, name)
