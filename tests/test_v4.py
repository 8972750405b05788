"""The V4 ops beyond the registry: options, aliasing, what a call must not do, and bad input."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from preattn import formats, v4
from preattn.cases.base import Call, as_bytes, poisoned
from preattn.cases.v4 import V4Case
from preattn.policy import Device as PolicyDevice
from preattn.policy import Form, LaunchConfig, assume
from preattn.reference import numerics

MX = V4Case(8, 64)
HEAD_MAJOR = V4Case(8, 64, record="v4_fp8", layout="head_major", norm=True, rope=True)
FP8 = V4Case(4, 4, record="fp8", layout="head_major", rope=True, fp8_query=True)


def run(call: Call, **changes: Any) -> dict[str, torch.Tensor]:
    call.arguments.update(changes)
    return call.run()


def rows_of(call: Call) -> torch.Tensor:
    """Encoded records at the slots inside the cache."""
    cache, slots = call.arguments["cache"], call.arguments["slots"].cpu()
    inside = slots[(slots >= 0) & (slots < cache.shape[0] * cache.shape[1])]
    cpu = torch.empty_strided(cache.shape, cache.stride(), dtype=cache.dtype)
    cpu.copy_(cache)
    return formats.load(cpu, formats.record(call.arguments["record"], 512), inside)


# -- one answer, whatever the form, configuration, batch or run ------------------------------------------------


@pytest.mark.parametrize("case", [MX, HEAD_MAJOR], ids=lambda case: case.name)
def test_both_forms_give_the_same_bits(case: V4Case, device: str, seed: int) -> None:
    one = case.build(33, device, seed).run()
    two = run(case.build(33, device, seed), form=Form.TWO_LAUNCHES)
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize(
    "config", [LaunchConfig(1, 1, 1), LaunchConfig(2, 8, 2), LaunchConfig(16, 2, 8), LaunchConfig(32, 4, 4)]
)
@pytest.mark.parametrize(
    "case", [MX, HEAD_MAJOR, V4Case(20, 64, layout="head_major", rope=True, norm=True)], ids=lambda case: case.name
)
def test_a_launch_configuration_never_changes_bits(case: V4Case, config: LaunchConfig, device: str) -> None:
    expected = case.build(5).run("reference")
    every_path = {path: config for path in ("kv", "copy", "rows", "norm_rows", "in_place")}
    with assume(PolicyDevice("test", launch=every_path)):
        written = case.build(5, device).run("triton")
    assert all(torch.equal(expected[name], written[name]) for name in expected)


@pytest.mark.parametrize("tokens", [1, 7, 8, 9, 33])
@pytest.mark.parametrize("case", [MX, HEAD_MAJOR], ids=lambda case: case.name)
def test_a_row_does_not_depend_on_its_batch(case: V4Case, tokens: int, device: str) -> None:
    full = case.build(33, device)
    full.run()
    part = case.build(33, device)
    names = ("query", "kv", "positions", "slots")
    cut = {name: part.arguments[name][:tokens] for name in names}
    out = part.arguments["out"][:tokens]
    run(part, **cut, out=out)
    assert torch.equal(as_bytes(out), as_bytes(full.arguments["out"][:tokens]))
    assert torch.equal(rows_of(part), rows_of(full)[: len(rows_of(part))])


def test_a_second_run_over_poisoned_output_gives_the_same_bits(device: str) -> None:
    call = MX.build(17, device)
    first = call.run()
    call.arguments["out"].view(torch.uint8).fill_(0xFF)
    assert torch.equal(first["out"], call.run()["out"])


# -- padding ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["head_major", "chunk_interleaved"])
@pytest.mark.parametrize("heads", [1, 8, 16, 20, 24, 32, 40, 48, 63, 64])
def test_pad_query_moves_bits_and_zeroes_the_rest(heads: int, layout: Any, device: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(2**15), 2**15, (3, heads, 512), generator=generator).to(torch.int16)  # NaN payloads too
    query = bits.view(torch.bfloat16).to(device)
    out = v4.pad_query(query, 64, layout=layout).cpu()
    if layout == "chunk_interleaved":
        chunks = out.view(3, 32, 64 * 16)
        live, tail = chunks[..., : heads * 16].reshape(3, heads, 512), chunks[..., heads * 16 :]
    else:
        live, tail = out[:, :heads], out[:, heads:]
    assert torch.equal(live.contiguous().view(torch.int16), bits)
    assert (tail.contiguous().view(torch.int16) == 0).all()  # +0.0, not -0.0


def test_out_is_returned_and_may_have_wider_rows(device: str) -> None:
    call = MX.build(5, device)
    buffer = poisoned(5, 65, 512, dtype=torch.bfloat16, device=device)
    expected = MX.build(5, device).run()["out"]
    result = v4.query_kv_insert(**{**call.arguments, "out": buffer[:, :64]})
    assert result.data_ptr() == buffer.data_ptr()
    assert torch.equal(as_bytes(buffer[:, :64]), expected)
    assert (as_bytes(buffer[:, 64]) == 0xFF).all()


def test_without_out_a_new_tensor_comes(device: str) -> None:
    call = MX.build(5, device)
    expected = MX.build(5, device).run()["out"]
    result = v4.query_kv_insert(**{**call.arguments, "out": None})
    assert result.shape == (5, 64, 512) and result.is_contiguous()
    assert torch.equal(as_bytes(result), expected)


def test_padded_heads_defaults_to_the_heads(device: str) -> None:
    call = HEAD_MAJOR.build(3, device)
    result = v4.query_kv_insert(**{**call.arguments, "out": None, "padded_heads": None})
    assert result.shape == (3, 8, 512)
    assert torch.equal(as_bytes(result), as_bytes(HEAD_MAJOR.build(3, device).function(**call.arguments)[:, :8]))


def test_kv_only_as_a_form_is_no_padded_heads(device: str) -> None:
    call = MX.build(4, device)
    result = v4.query_kv_insert(**{**call.arguments, "out": None, "form": "kv_only"})
    assert result.shape == (4, 0, 512)
    assert torch.equal(as_bytes(call.memory["pool"]), MX.build(4, device).run()["pool"])


def test_in_place_with_one_token_whatever_its_token_stride(device: str) -> None:
    case = V4Case(8, 64, layout="head_major", rope=True, in_place=True)
    call, expected = case.build(1, device), case.build(1, device).run()["out"]
    run(call, query=call.arguments["out"].flatten()[: 8 * 512].view(1, 8, 512))
    assert torch.equal(as_bytes(call.memory["out"]), expected)


def test_gradients_stay_out(device: str) -> None:
    call = HEAD_MAJOR.build(3, device)
    call.arguments["query"].requires_grad_()
    result = v4.query_kv_insert(**{**call.arguments, "out": None})
    assert not result.requires_grad and not call.arguments["cache"].requires_grad


def test_scales_may_have_any_rank(device: str) -> None:
    call, expected = FP8.build(3, device), FP8.build(3, device).run()
    written = run(
        call,
        kv_scale=call.arguments["kv_scale"].view(1, 1, 1),
        query_scale_inv=call.arguments["query_scale_inv"].view(1, 1, 1, 1),
    )
    assert all(torch.equal(expected[name], written[name]) for name in expected)


def test_in_place_leaves_the_padding_alone(device: str) -> None:
    case = V4Case(32, 64, layout="head_major", rope=True, in_place=True)
    call = case.build(5, device)
    call.arguments["out"][:, 32:] = 7.0
    call.run()
    assert (call.arguments["out"][:, 32:] == 7.0).all()


# -- strided inputs --------------------------------------------------------------------------------------------


def test_inputs_may_be_slices_of_wider_rows(device: str) -> None:
    call, expected = HEAD_MAJOR.build(9, device), HEAD_MAJOR.build(9, device).run()
    wide_query = torch.randn(9, 10, 640, device=device).bfloat16()
    wide_query[:, 1:9, 64:576] = call.arguments["query"]
    wide_kv = torch.randn(9, 2112, device=device).bfloat16()
    wide_kv[:, 1536:2048] = call.arguments["kv"]
    before = as_bytes(wide_query), as_bytes(wide_kv)
    written = run(call, query=wide_query[:, 1:9, 64:576], kv=wide_kv[:, 1536:2048])
    assert all(torch.equal(expected[name], written[name]) for name in expected)
    assert torch.equal(as_bytes(wide_query), before[0]) and torch.equal(as_bytes(wide_kv), before[1])


def test_slots_and_positions_may_start_anywhere(device: str) -> None:
    call, expected = MX.build(9, device), MX.build(9, device).run()
    slots = torch.cat([torch.full((1,), -7, device=device), call.arguments["slots"]])
    positions = torch.cat([torch.full((3,), -7, device=device), call.arguments["positions"]])
    written = run(call, slots=slots[1:], positions=positions[3:])
    assert all(torch.equal(expected[name], written[name]) for name in expected)


# -- rows that are not stored ----------------------------------------------------------------------------------


def test_rows_without_a_slot_write_nothing_even_with_nan_and_wild_positions(device: str) -> None:
    call = MX.build(12, device)
    pool = call.memory["pool"].clone()
    slots = torch.tensor([-1, -2, 10**9, 2**31, 2**40 + 17, -(2**63), 2**63 - 1, call.arguments["cache"].shape[0] * 64])
    call.arguments["kv"].fill_(torch.nan)
    written = run(call, slots=slots.to(device), positions=torch.full((12,), 511, device=device))
    assert torch.equal(written["pool"], as_bytes(pool))
    wild = MX.build(12, device)
    wild.arguments["positions"][3] = 2**40  # its slot is -1, and nobody rotates its query
    assert torch.equal(wild.run()["pool"], MX.build(12, device).run()["pool"])


@pytest.mark.parametrize("case", [MX, HEAD_MAJOR], ids=lambda case: case.name)
def test_no_slots_at_all(case: V4Case, device: str) -> None:
    call, full = case.build(6, device), case.build(6, device).run()
    written = run(call, slots=call.arguments["slots"][:0])
    assert torch.equal(written["out"], full["out"])
    assert (written["pool"] == 0xA5).all()


def test_an_empty_cache_stores_nothing(device: str) -> None:
    call = MX.build(6, device)
    written = run(call, cache=call.arguments["cache"][:0])
    assert (written["pool"] == 0xA5).all()


# -- numbers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("record", ["v41_mxfp8", "v4_fp8"])
def test_nothing_but_its_own_block_feels_a_value_that_is_not_finite(record: str, device: str) -> None:
    case = V4Case(64, 0, record=record, layout="head_major")
    clean, dirty = case.build(3, device), case.build(3, device)
    clean.arguments["kv"][1, 40] = 0.0
    for value in (torch.nan, torch.inf, -torch.inf):
        dirty.arguments["kv"][1, 40] = value
        want, got = clean.run()["pool"], dirty.run()["pool"]
        differ = (want != got).nonzero()
        assert len(differ) == 1 and got[differ] == 0x7F


def test_rotation_keeps_the_sign_of_zero(device: str) -> None:
    """0 * cos - 0 * sin is -0.0 where cos and sin have the right signs: a subtraction from zero loses it."""
    case = V4Case(64, 0, record="bf16", layout="head_major")
    call = case.build(1, device)
    call.arguments["kv"].zero_()
    table = call.arguments["rope_table"]
    table[:, :32], table[:, 32:] = -0.5, 0.75
    call.run()
    tail = rows_of(call).view(torch.bfloat16)[0, 448:]
    assert tail[0::2].signbit().all() and not tail[1::2].signbit().any()


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("record", v4.RECORDS)
def test_a_fused_kv_norm_is_the_norm_before(record: str, weight_dtype: torch.dtype, device: str, seed: int) -> None:
    case = V4Case(64, 0, record=record, layout="head_major")
    fused, apart = case.build(13, device, seed), case.build(13, device, seed)
    weight = torch.rand(512, generator=torch.Generator().manual_seed(seed)).to(weight_dtype) + 0.5
    names = ("kv", "cache", "slots", "positions", "rope_table", "record", "kv_scale")
    arguments = [{name: call.arguments[name] for name in names} for call in (fused, apart)]
    normed = formats.to_bf16(numerics.rms_norm(apart.arguments["kv"].cpu(), 1e-5, weight))
    v4.kv_insert(**arguments[0], norm_weight=weight.to(device), norm_eps=1e-5)
    v4.kv_insert(**{**arguments[1], "kv": normed.to(device)})
    assert torch.equal(fused.memory["pool"].cpu(), apart.memory["pool"].cpu())


# -- bad input -------------------------------------------------------------------------------------------------


def _strided(shape: tuple[int, ...], stride: tuple[int, ...], device: str) -> torch.Tensor:
    return torch.zeros(1 << 20, dtype=torch.bfloat16, device=device).as_strided(shape, stride)


BAD: list[tuple[str, Any, type[Exception], str]] = [
    ("query", lambda d: None, TypeError, r"query: expected a torch\.Tensor; got NoneType"),
    ("query", lambda d: torch.zeros(4, 8, 512, device=d), TypeError, r"query: expected dtype .*; got torch\.float32"),
    (
        "query",
        lambda d: torch.zeros(4, 8, 256, device=d).bfloat16(),
        ValueError,
        r"query: expected shape \[any, any, 512\]; got \[4, 8, 256\]",
    ),
    (
        "query",
        lambda d: torch.zeros(4, 512, device=d).bfloat16(),
        ValueError,
        r"query: expected shape .*; got \[4, 512\]",
    ),
    (
        "query",
        lambda d: torch.zeros(4, 65, 512, device=d).bfloat16(),
        ValueError,
        "padded_heads: expected 0 or at least the 65 heads of query; got 64",
    ),
    (
        "query",
        lambda d: torch.zeros(4, 0, 512, device=d).bfloat16(),
        ValueError,
        "query: expected at least 1 head; got 0",
    ),
    ("query", lambda d: _strided((4, 8, 512), (8 * 516, 516, 1), d), ValueError, r"query: expected .*strides"),
    (
        "query",
        lambda d: _strided((4, 8, 512), (4100, 512, 1), d),
        ValueError,
        r"query: expected strides that are multiples of 8 elements",
    ),
    ("query", lambda d: _strided((4, 8, 512), (8192, 1024, 2), d), ValueError, r"query: expected the last"),
    (
        "query",
        lambda d: torch.zeros(1 + 4 * 8 * 512, device=d).bfloat16()[1:].view(4, 8, 512),
        ValueError,
        "query: expected data at a multiple of 16 bytes",
    ),
    (
        "query",
        lambda d: torch.zeros(4, 8, 512, device=d).half(),
        TypeError,
        r"kv: expected the query's dtype torch\.float16; got torch\.bfloat16",
    ),
    (
        "kv",
        lambda d: torch.zeros(3, 512, device=d).bfloat16(),
        ValueError,
        r"kv: expected shape \[4, 512\]; got \[3, 512\]",
    ),
    (
        "kv",
        lambda d: torch.zeros(4, 512, device="meta").bfloat16(),
        ValueError,
        "kv: expected a tensor on .*; got one on meta",
    ),
    ("kv", lambda d: _strided((4, 512), (516, 1), d), ValueError, "kv: expected strides"),
    ("cache", lambda d: torch.zeros(2, 64, 528, device=d), TypeError, "cache: expected dtype"),
    (
        "cache",
        lambda d: torch.zeros(2, 64, 584, device=d).byte(),
        ValueError,
        r"cache: expected \[num_blocks, block_size, 528\] for v41_mxfp8 records; got \(2, 64, 584\)",
    ),
    ("cache", lambda d: torch.zeros(2, 64 * 528, device=d).byte(), ValueError, "cache: expected shape"),
    (
        "cache",
        lambda d: torch.zeros(2, 64, 600, device=d).byte()[..., :528],
        ValueError,
        "cache: expected contiguous pages",
    ),
    (
        "cache",
        lambda d: torch.zeros(90000, device=d).byte().as_strided((2, 64, 528), (33800, 528, 1)),
        ValueError,
        "cache: expected pages at multiples of 16 bytes",
    ),
    (
        "cache",
        lambda d: torch.zeros(90000, device=d).byte().as_strided((2, 64, 528), (33776, 528, 1)),
        ValueError,
        "cache: expected pages that do not overlap",
    ),
    (
        "slots",
        lambda d: torch.zeros(5, device=d).long(),
        ValueError,
        "slots: expected at most 4 entries, one for each token; got 5",
    ),
    ("slots", lambda d: torch.zeros(4, device=d), TypeError, "slots: expected dtype"),
    ("slots", lambda d: torch.zeros(4, 2, device=d).long()[:, 0], ValueError, "slots: expected a contiguous tensor"),
    ("positions", lambda d: torch.zeros(3, device=d).long(), ValueError, r"positions: expected shape \[4\]; got \[3\]"),
    ("positions", lambda d: torch.zeros(4, device=d).short(), TypeError, "positions: expected dtype"),
    (
        "rope_table",
        lambda d: torch.zeros(9, 32, device=d),
        ValueError,
        r"rope_table: expected shape \[any, 64\]; got \[9, 32\]",
    ),
    (
        "rope_table",
        lambda d: torch.zeros(9, 64, device=d).half(),
        TypeError,
        "rope_table: expected dtype torch.float32 or torch.bfloat16; got torch.float16",
    ),
    ("record", lambda d: "dsa_fp8", ValueError, "record: expected one of v41_mxfp8, v4_fp8, bf16, fp8; got 'dsa_fp8'"),
    ("record", lambda d: "v4_fp8", ValueError, "cache: expected .* for v4_fp8 records"),
    ("query_rope", lambda d: True, ValueError, "layout: expected head_major with query_rope"),
    ("query_norm_eps", lambda d: 1e-6, ValueError, "layout: expected head_major with query_rope, query_norm_eps"),
    ("query_scale_inv", lambda d: torch.ones(1, device=d), ValueError, "layout: expected head_major with"),
    (
        "query_scale_inv",
        lambda d: 0.5,
        TypeError,
        "query_scale_inv: expected a torch.Tensor of one float32 element; got float",
    ),
    (
        "kv_scale",
        lambda d: torch.ones(1, device=d),
        ValueError,
        "kv_scale: expected None for v41_mxfp8 records; got a tensor",
    ),
    ("layout", lambda d: "heads", ValueError, "layout: expected one of head_major, chunk_interleaved; got 'heads'"),
    ("padded_heads", lambda d: 7, ValueError, "padded_heads: expected 0 or at least the 8 heads of query; got 7"),
    ("padded_heads", lambda d: 64.0, TypeError, "padded_heads: expected an int or None; got float"),
    ("padded_heads", lambda d: 128, ValueError, r"out: expected shape \[4, 128, 512\]; got \[4, 64, 512\]"),
    (
        "out",
        lambda d: torch.zeros(4, 64, 512, device=d),
        TypeError,
        r"out: expected dtype torch\.bfloat16; got torch\.float32",
    ),
    (
        "out",
        lambda d: torch.zeros(4, 512, 64, device=d).bfloat16().transpose(1, 2),
        ValueError,
        "out: expected the last",
    ),
    (
        "form",
        lambda d: "three_launches",
        ValueError,
        "form: expected one of one_launch, two_launches, kv_only; got 'three_launches'",
    ),
]


@pytest.mark.parametrize("row", BAD, ids=[f"{row[0]}-{index}" for index, row in enumerate(BAD)])
def test_bad_input_is_named_and_nothing_is_written(row: tuple[str, Any, type[Exception], str], device: str) -> None:
    name, value, error, message = row
    call = MX.build(4, device)
    memory = {key: as_bytes(tensor) for key, tensor in call.memory.items()}
    call.arguments[name] = value(device)
    with pytest.raises(error, match=message):
        call.function(**call.arguments)
    assert all(torch.equal(memory[key], as_bytes(tensor)) for key, tensor in call.memory.items())
    MX.build(4, device).run()  # the next call works


def test_overlap_that_is_not_in_place_is_refused(device: str) -> None:
    call = MX.build(4, device)
    out = call.arguments["out"]
    for layout, query in (("chunk_interleaved", out[:, :8]), ("head_major", out[:, 8:16])):
        with pytest.raises(ValueError, match=r"out: expected memory apart from query|query: expected"):
            v4.query_kv_insert(**{**call.arguments, "layout": layout, "query": query})
    with pytest.raises(ValueError, match="out: expected memory apart from query"):
        v4.pad_query(out[:, :8], 64, out=out)
    with pytest.raises(ValueError, match="padded_heads: expected at least the 8 heads"):
        v4.pad_query(out[:, :8], 0)


# -- torch -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [MX, HEAD_MAJOR, FP8], ids=lambda case: case.name)
def test_opcheck(case: V4Case, device: str) -> None:
    a = case.build(5, device).arguments
    arguments = (
        a["query"], a["kv"], a["cache"], a["slots"], a["positions"], a["rope_table"], a["out"], a["record"],
        a["layout"] == "chunk_interleaved", a["query_norm_eps"], a["query_rope"], a["query_scale_inv"], a["kv_scale"],
        False,
    )  # fmt: skip
    checks = ["test_faketensor", "test_autograd_registration", "test_aot_dispatch_dynamic"]
    if not case.fp8_query:  # test_schema compares outputs, which torch cannot do for float8
        checks.append("test_schema")
    torch.library.opcheck(torch.ops.preattn.v4_query_kv_insert.default, arguments, test_utils=checks)
    torch.library.opcheck(
        torch.ops.preattn.v4_kv_insert.default,
        (*arguments[1:6], a["record"], a["kv_scale"], None, 1e-6),
        test_utils=checks,
    )
    out = torch.empty(5, 64, 512, dtype=torch.bfloat16, device=device)
    torch.library.opcheck(torch.ops.preattn.v4_pad_query.default, (a["query"], out, True))


@pytest.mark.parametrize("case", [MX, HEAD_MAJOR], ids=lambda case: case.name)
def test_fullgraph_compile_equals_eager(case: V4Case, device: str) -> None:
    @torch.compile(fullgraph=True, backend="inductor" if device == "cuda" else "aot_eager")
    def step(arguments: dict[str, Any]) -> torch.Tensor:
        result = v4.query_kv_insert(**arguments)
        return result * 2

    expected, call = case.build(9, device), case.build(9, device)
    want = expected.function(**expected.arguments) * 2
    got = step({**call.arguments, "out": None})
    assert torch.equal(as_bytes(want), as_bytes(got))
    assert torch.equal(expected.memory["pool"].cpu(), call.memory["pool"].cpu())
