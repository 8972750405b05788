"""What only a GPU shows: compilation, graphs, streams, sizes past 32 bits."""

from __future__ import annotations

import pytest
import torch
import triton

from preattn import formats, policy, tuning, v4
from preattn.cases import CASES
from preattn.cases.base import Case, as_bytes
from preattn.cases.v4 import V4Case
from preattn.kernels import launch

MX = V4Case(32, 64)


@pytest.mark.parametrize("tokens", [257, 1000])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_kernels_equal_the_reference_at_larger_sizes(case: Case, tokens: int) -> None:
    expected, written = case.build(tokens).run("reference"), case.build(tokens, "cuda").run()
    assert all(torch.equal(expected[name], written[name]) for name in expected)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_replay_with_other_inputs_equals_eager(case: Case) -> None:
    call = case.build(64, "cuda", seed=1)
    call.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        written = call.written(call.function(**call.arguments))
    junk = [torch.full((1 << 22,), torch.nan, device="cuda") for _ in range(8)]
    del junk
    fresh = case.build(64, "cuda", seed=2)
    for name, tensor in fresh.arguments.items():
        if isinstance(tensor, torch.Tensor):
            call.arguments[name].copy_(tensor)
    for name, tensor in case.build(64, "cuda", seed=2).memory.items():
        call.memory[name].copy_(tensor)
    graph.replay()
    torch.cuda.synchronize()
    expected = fresh.run()
    assert written.keys() == expected.keys()
    for name, tensor in written.items():
        assert torch.equal(as_bytes(tensor), expected[name]), name


def test_an_unwarmed_call_in_a_capture_says_to_warm_up() -> None:
    call = V4Case(13, 64, record="v4_fp8", layout="head_major", norm=True, rope=True).build(4, "cuda")
    torch.zeros(1, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match=r"call preattn\.warmup"), torch.cuda.graph(graph):
        call.function(**call.arguments)
    torch.cuda.synchronize()
    call.function(**call.arguments)


def test_triton_compiles_nothing_after_a_call_of_each_step_size() -> None:
    cases = (MX, V4Case(16, 64, record="v4_fp8", layout="head_major", norm=True, rope=True))
    for tokens in policy.STEP_SIZES:
        for case in cases:
            case.build(tokens, "cuda").run()
    compiled: list[str] = []
    triton.knobs.compilation.listener = lambda **event: compiled.append(str(event.get("src")))
    try:
        before = launch.compilations()
        for tokens in (1, 2, 15, 16, 17, 33, 257, 4096):
            for case in cases:
                case.build(tokens, "cuda").run()
    finally:
        triton.knobs.compilation.listener = None
    assert compiled == [] and launch.compilations() == before


def test_the_current_stream_is_used() -> None:
    call, expected = MX.build(512, "cuda"), MX.build(512, "cuda").run()
    stream = torch.cuda.Stream()
    query = call.arguments["query"].clone()
    call.arguments["query"].zero_()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        call.arguments["query"].copy_(query)
        call.function(**call.arguments)
    stream.synchronize()
    assert torch.equal(as_bytes(call.memory["out"]), expected["out"])


def test_no_call_synchronises() -> None:
    calls = [case.build(33, "cuda") for case in CASES]
    for call in calls:
        call.function(**call.arguments)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for call in calls:
            call.function(**call.arguments)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_offsets_past_32_bits() -> None:
    tokens = 32769  # 32769 * 128 * 512 elements: past 2**31
    query = torch.randn(tokens, 64, 512, device="cuda", dtype=torch.bfloat16)
    out = v4.pad_query(query, 128, layout="chunk_interleaved")
    last = v4.pad_query(query[-3:].clone(), 128, layout="chunk_interleaved")
    assert torch.equal(out[-3:], last)
    assert (out.view(tokens, 32, 2048)[..., 1024:] == 0).all()


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("record_name", ["v41_mxfp8", "v4_fp8"])
def test_pools_past_4_gib(record_name: str, index_dtype: torch.dtype) -> None:
    record = formats.record(record_name)
    blocks = (5 << 30) // record.page_bytes(64)
    pool = torch.full((blocks * record.page_bytes(64),), 0xA5, dtype=torch.uint8, device="cuda")
    cache = formats.cache_view(pool, record, block_size=64)
    capacity = blocks * 64
    slots = torch.tensor([0, capacity // 2 + 1, capacity - 1, capacity], device="cuda").to(index_dtype)
    kv = torch.randn(4, 512, device="cuda", dtype=torch.bfloat16)
    table, positions = torch.zeros(8, 64, device="cuda"), torch.arange(4, device="cuda").to(index_dtype)
    table[:, :32] = 1
    v4.kv_insert(kv, cache, slots, positions, table, record=record_name)
    expected = formats.encode(record, kv.cpu())
    for row in range(3):
        block, offset = divmod(int(slots[row]), 64)
        page = pool[block * record.page_bytes(64) : (block + 1) * record.page_bytes(64)].cpu()
        assert torch.equal(page[record.address(torch.tensor(offset), 64)], expected[row])
    assert sum(int(part.ne(0xA5).count_nonzero()) for part in pool.split(1 << 28)) <= 3 * record.bytes


@pytest.mark.parametrize("path", tuning.PATHS)
def test_no_candidate_configuration_changes_bits(path: str) -> None:
    case = tuning.PATHS[path]
    expected = case.build(33).run("reference")
    for config in tuning.CANDIDATES[path]:
        with policy.assume(policy.Device("candidate", launch={path: config})):
            written = case.build(33, "cuda").run()
        assert all(torch.equal(expected[name], written[name]) for name in expected), config


def test_reruns_and_batches_give_the_same_bits() -> None:
    full = MX.build(4096, "cuda")
    first = full.run()
    full.memory["out"].view(torch.uint8).fill_(0xFF)
    assert torch.equal(full.run()["out"], first["out"])
    for tokens in (1, 63, 64, 65, 256, 257):
        part = MX.build(4096, "cuda")
        arguments = {name: part.arguments[name][:tokens] for name in ("query", "kv", "positions", "slots")}
        out = v4.query_kv_insert(**{**part.arguments, **arguments, "out": None})
        assert torch.equal(as_bytes(out), as_bytes(full.memory["out"][:tokens]))
