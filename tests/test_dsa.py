"""The DSA ops beyond the registry: recorded bytes, aliasing, what a call must not do, numbers, and bad input."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from preattn import dsa, formats, golden
from preattn.cases.base import Call, activations, as_bytes, poisoned
from preattn.cases.dsa import AbsorbCase, DsaQueryCase, NormRopeCase
from preattn.policy import Device as PolicyDevice
from preattn.policy import LaunchConfig, assume
from preattn.reference import numerics

QUERY = DsaQueryCase(4, index_heads=4)
COPIED = DsaQueryCase(3, index_heads=3, index_pairing="interleaved", padded_heads=8, latent="transposed")
QUANTISED = DsaQueryCase(4, index_heads=0, latent="contiguous", fp8_query=True)
NORM = NormRopeCase(rank=512, top_k=64)
ABSORB = AbsorbCase(2, nope=64, padded_heads=4)
PATHS = ("dsa_query", "dsa_query_copy", "dsa_query_e4m3", "dsa_norm_rope", "dsa_absorb")

Case = DsaQueryCase | NormRopeCase | AbsorbCase


def named(case: Case) -> str:
    return case.name


def run(call: Call, **changes: Any) -> dict[str, torch.Tensor]:
    call.arguments.update(changes)
    return call.run()


def same(expected: dict[str, torch.Tensor], written: dict[str, torch.Tensor]) -> bool:
    return expected.keys() == written.keys() and all(torch.equal(expected[name], written[name]) for name in expected)


def stored(call: Call, cache: str = "cache", record: str = "record") -> torch.Tensor:
    """Encoded records at the slots inside a cache, in the order of their rows."""
    pages, slots = call.arguments[cache], call.arguments["slots"].cpu()
    inside = slots[(slots >= 0) & (slots < pages.shape[0] * pages.shape[1])]
    cpu = torch.empty_strided(pages.shape, pages.stride(), dtype=pages.dtype)
    cpu.copy_(pages)
    return formats.load(cpu, formats.record(call.arguments[record], 576), inside)


# -- recorded bytes --------------------------------------------------------------------------------------------


def test_recorded_bytes_but_for_three_norm_roundings() -> None:
    """The reference; test_golden holds the kernels against the same recordings."""
    flips = {}
    for case in golden.load(families=["dsa"]):
        comparison = case.compare(case.call().run("reference"))
        assert comparison.identical, f"{case.name}: {comparison}"
        if comparison.flips:
            flips[case.name] = comparison.flips
    assert flips == {"norm_rope.0": 2, "norm_rope.3": 1}


# -- one answer, whatever the configuration, batch or run ------------------------------------------------------


@pytest.mark.parametrize(
    "config", [LaunchConfig(1, 1, 1), LaunchConfig(2, 8, 2), LaunchConfig(16, 16, 8), LaunchConfig(32, 32, 4)]
)
@pytest.mark.parametrize("case", [QUERY, COPIED, QUANTISED, NORM, ABSORB], ids=named)
def test_a_launch_configuration_never_changes_bits(case: Case, config: LaunchConfig, device: str) -> None:
    expected = case.build(5).run("reference")
    with assume(PolicyDevice("test", launch=dict.fromkeys(PATHS, config))):
        assert same(expected, case.build(5, device).run("triton"))


@pytest.mark.parametrize("tokens", [1, 15, 16, 17])
def test_a_row_does_not_depend_on_its_batch(tokens: int, device: str) -> None:
    full, part = QUERY.build(33, device), QUERY.build(33, device)
    whole = full.function(**full.arguments)
    cut = {name: part.arguments[name][:tokens] for name in ("positions", "q_pe", "index_query", "index_weights", "out")}
    result = dsa.query(**{**part.arguments, **cut, "latent": None})
    for a, b in zip(whole, result, strict=True):
        assert (a is None and b is None) or torch.equal(as_bytes(a[:tokens]), as_bytes(b))
    full, part = NORM.build(33, device), NORM.build(33, device)
    names = ("q_latent", "kv_latent", "k_pe", "slots", "positions", "index_key", "out")
    cut = {name: part.arguments[name][:tokens] for name in names}
    run(full)
    run(part, **cut)
    count = int((cut["slots"] >= 0).sum())  # how many are inside the cache differs by a few: rows are compared below
    assert count
    assert torch.equal(as_bytes(full.arguments["out"][:tokens]), as_bytes(part.arguments["out"][:tokens]))
    for names_of in (("cache", "record"), ("index_cache", "index_record")):
        rows = stored(part, *names_of)
        assert torch.equal(rows, stored(full, *names_of)[: len(rows)])


@pytest.mark.parametrize("case", [COPIED, QUANTISED, NORM], ids=named)
def test_a_second_run_over_poisoned_output_gives_the_same_bits(case: Case, device: str) -> None:
    call = case.build(17, device)
    first = call.run()
    call.arguments["out"].view(torch.uint8).fill_(0xFF)
    assert same(first, call.run())


# -- aliasing and layouts --------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 9])
@pytest.mark.parametrize("fp8_query", [False, True])
def test_the_latent_may_lie_in_the_output(fp8_query: bool, tokens: int, device: str, seed: int) -> None:
    """One answer for the latent in place, in front without being named, and apart; padding in place is the caller's."""
    case = replace(QUERY, padded_heads=8, fp8_query=fp8_query)
    apart = replace(case, latent="cast" if fp8_query else "contiguous").build(tokens, device, seed).run()
    for latent in ("in_place", "front"):
        assert same(apart, replace(case, latent=latent).build(tokens, device, seed).run())
        call = replace(case, latent=latent).build(tokens, device, seed)
        tail = call.arguments["out"].view(torch.uint8)[:, 4:]
        tail.fill_(7)
        call.run()
        assert (tail == 7).all()


def test_in_place_moves_no_latent(device: str) -> None:
    """Bits that a copy would keep too, but through a buffer that changes between the calls."""
    call = QUERY.build(3, device)
    call.arguments["latent"].view(torch.int16).fill_(0x7FC1)  # a NaN with a payload
    result = call.function(**call.arguments)
    assert result.query is call.arguments["out"] and result.q_pe is None
    assert (result.query[..., :512].contiguous().view(torch.int16) == 0x7FC1).all()


@pytest.mark.parametrize("rope_dim", [0, 64])
@pytest.mark.parametrize("heads", [1, 5, 8, 63, 64])
def test_padding_heads_are_plus_zero_and_latents_keep_their_bits(
    heads: int, rope_dim: int, device: str, seed: int
) -> None:
    call = DsaQueryCase(heads, index_heads=0, padded_heads=64, latent="contiguous", rope_dim=rope_dim).build(2, device)
    bits = torch.randint(-(2**15), 2**15, (2, heads, 512), generator=torch.Generator().manual_seed(seed))
    latent = bits.to(torch.int16).view(torch.bfloat16).to(device)  # NaN payloads too
    table = call.arguments["rope_table"]
    if table is not None:
        table.neg_()  # signs that would leave -0.0 in a rotated zero
    run(call, latent=latent)
    out = call.arguments["out"].cpu().view(torch.int16)
    assert (out[:, heads:] == 0).all()
    assert torch.equal(out[:, :heads, :512], latent.cpu().view(torch.int16))


@pytest.mark.parametrize("index_pairing", ["interleaved", "half_split"])
@pytest.mark.parametrize("rope_output", ["interleaved", "half_split"])
def test_pairings_are_independent(rope_output: Any, index_pairing: Any, device: str) -> None:
    """Against the rotation written as complex numbers, in float64."""
    case = replace(QUERY, form="pair", latent="contiguous", rope_output=rope_output, index_pairing=index_pairing)
    call = replace(case, table_dtype=torch.float32).build(13, device)
    result = call.function(**call.arguments)
    table = call.arguments["rope_table"].cpu().double()[call.arguments["positions"].cpu()]
    turn = torch.complex(table[:, None, :32], table[:, None, 32:])
    q_pe = call.arguments["q_pe"].cpu().double()
    want = torch.view_as_real(torch.complex(q_pe[..., 0::2], q_pe[..., 1::2]) * turn)
    want = want.flatten(-2) if rope_output == "interleaved" else torch.cat(want.unbind(-1), -1)
    length = torch.hypot(q_pe[..., 0::2], q_pe[..., 1::2])
    length = length.repeat_interleave(2, -1) if rope_output == "interleaved" else torch.cat([length, length], -1)
    # bf16's half step, and where the two products cancel, three float32 roundings of them.
    assert ((result.q_pe.cpu().double() - want).abs() <= want.abs() * 2**-8 + length * 2**-22).all()
    x = call.arguments["index_query"].cpu().double()
    even, odd = (x[..., 0:64:2], x[..., 1:64:2]) if index_pairing == "interleaved" else (x[..., :32], x[..., 32:64])
    want = torch.view_as_real(torch.complex(even, odd) * turn)
    want = want.flatten(-2) if index_pairing == "interleaved" else torch.cat(want.unbind(-1), -1)
    want = torch.cat([want, x[..., 64:]], -1)
    weights = call.arguments["index_weights"].cpu().double() * case.index_heads**-0.5 * 128**-0.5
    got = formats.from_e4m3(result.index_query.cpu().view(torch.uint8)).double() * (
        result.index_weights.cpu().double() / weights
    ).unsqueeze(-1)
    # A code keeps three bits, or steps of 2**-9 of a scale that is at most amax / 224.
    bound = want.abs() * 2**-4 + want.abs().amax(-1, keepdim=True).clamp(min=1e-4) * 2**-9 / 224
    assert ((got - want).abs() <= bound * 1.001 + 1e-9).all()


@pytest.mark.parametrize("case", [QUERY, COPIED, QUANTISED], ids=named)
def test_slices_equal_dense_inputs_and_their_parents_stay(case: DsaQueryCase, device: str) -> None:
    call = case.build(9, device)
    names = [name for name in ("q_pe", "latent", "index_query", "index_weights") if name in call.arguments]
    parents = [call.arguments[name]._base for name in names if call.arguments[name]._base is not None]
    parents = [parent for parent in parents if parent is not call.arguments["out"]]
    before = [as_bytes(parent) for parent in parents]
    expected = call.run()
    assert parents and all(torch.equal(as_bytes(parent), bits) for parent, bits in zip(parents, before, strict=True))
    dense = case.build(9, device)
    fresh = [name for name in names if dense.arguments[name]._base is not dense.arguments["out"]]
    assert same(expected, run(dense, **{name: dense.arguments[name].contiguous() for name in fresh}))


def test_latents_are_columns_of_one_row(device: str) -> None:
    expected, call = NORM.build(9, device).run(), NORM.build(9, device)
    row = call.arguments["q_latent"]._base
    bits = as_bytes(row)
    assert row is call.arguments["k_pe"]._base and row.numel() == 9 * (512 + 576)
    assert same(expected, call.run()) and torch.equal(as_bytes(row), bits)
    dense = NORM.build(9, device)
    changes = {name: dense.arguments[name].contiguous() for name in ("q_latent", "kv_latent", "k_pe", "index_key")}
    assert same(expected, run(dense, **changes))
    separate = NORM.build(9, device)
    assert same(expected, run(separate, k_pe=separate.arguments["k_pe"].unsqueeze(1)))
    in_place = NORM.build(9, device)
    run(in_place, out=in_place.arguments["q_latent"])
    assert torch.equal(as_bytes(in_place.arguments["q_latent"]), expected["out"])


def test_returned_keys_keep_their_shape(device: str) -> None:
    call = replace(NORM, return_kv=True).build(5, device)
    flat = call.function(**call.arguments)
    tall = call.function(**{**call.arguments, "k_pe": call.arguments["k_pe"].unsqueeze(1)})
    assert flat.k_pe.shape == (5, 64) and tall.k_pe.shape == (5, 1, 64)
    assert torch.equal(as_bytes(flat.k_pe), as_bytes(tall.k_pe))
    assert flat.q_latent is call.arguments["out"] and flat.kv_latent.shape == (5, 512)


@pytest.mark.parametrize("heads", [2, 3])
def test_absorb_then_query_is_bmm_then_query(heads: int, device: str) -> None:
    for fp8_query in (False, True):
        absorbed = AbsorbCase(heads, nope=128, padded_heads=4, fp8_query=fp8_query).build(6, device)
        rest = DsaQueryCase(heads, index_heads=0, padded_heads=4, fp8_query=fp8_query, latent="front").build(6, device)
        scale = rest.arguments["query_scale"]
        out = rest.arguments["out"]
        result = dsa.absorb_query(**{**absorbed.arguments, "out": out, "query_scale": scale})
        assert result is out and (out[:, heads:].view(torch.uint8) == 0).all()
        rest.run()
        latent = torch.bmm(absorbed.arguments["q_nope"].transpose(0, 1), absorbed.arguments["w_uk"]).transpose(0, 1)
        apart = DsaQueryCase(heads, index_heads=0, padded_heads=4, fp8_query=fp8_query, latent="contiguous")
        assert torch.equal(as_bytes(out), run(apart.build(6, device), latent=latent)["out"])


def test_absorb_takes_w_uk_as_engines_keep_it_and_any_buffer(device: str) -> None:
    call = ABSORB.build(5, device)
    expected = call.run()["out"].view(5, 4, 576)[:, :2, :512]
    both = torch.zeros(2, 64 + 32, 512, device=device).bfloat16()  # W_UK and W_UV of a head side by side
    both[:, :64] = call.arguments["w_uk"]
    new = dsa.absorb_query(**{**call.arguments, "w_uk": both[:, :64], "out": None})
    assert new.shape == (5, 2, 576) and new.dtype == torch.float8_e4m3fn
    assert torch.equal(new[..., :512].cpu().view(torch.uint8), expected)
    bare = dsa.absorb_query(**{**call.arguments, "out": None, "rope_dim": 0})
    assert torch.equal(bare.cpu().view(torch.uint8), expected)


@pytest.mark.parametrize("nope", [128, 192])
def test_absorb_is_within_its_bound(nope: int, device: str, seed: int) -> None:
    q = activations(16, 2, nope, dtype=torch.bfloat16, seed=seed)
    w = activations(2, nope, 512, dtype=torch.bfloat16, seed=seed + 1) * nope**-0.5
    scale = torch.tensor(2.0**-6)
    got = dsa.absorb_query(q.to(device), w.to(device), query_scale=scale.to(device), rope_dim=0).cpu()
    exact = torch.bmm(q.transpose(0, 1).double(), w.double()).transpose(0, 1)
    slack = nope * 2.0**-23 * torch.bmm(q.transpose(0, 1).double().abs(), w.double().abs()).transpose(0, 1)
    codes = [
        formats.to_e4m3((exact + side).float().bfloat16().float() / scale) for side in (-slack, slack)
    ]  # rounding is monotonic: the code lies between those of the ends
    low, high = (formats.from_e4m3(code) for code in codes)
    value = formats.from_e4m3(got.view(torch.uint8))
    assert ((low <= value) & (value <= high)).all()
    assert (low == high).float().mean() > 0.9


# -- rows that are not stored ----------------------------------------------------------------------------------


def test_rows_without_a_slot_store_nothing_even_with_nan_and_wild_positions(device: str) -> None:
    call = NORM.build(12, device)
    capacity = call.arguments["cache"].shape[0] * 64
    slots = torch.tensor([-1, -2, 10**9, 2**31, 2**40 + 17, -(2**63), 2**63 - 1, capacity, capacity + 64, -(2**31)])
    before = {name: as_bytes(call.memory[name]) for name in ("pool", "index_pool")}
    for name in ("kv_latent", "k_pe", "index_key"):
        call.arguments[name].fill_(torch.nan)
    written = run(call, slots=slots.to(device), positions=torch.full((12,), 2**40, device=device))
    assert all(torch.equal(written[name], before[name]) for name in before)
    plain = NORM.build(12, device).run()
    assert torch.equal(written["out"], plain["out"]) and torch.equal(written["top_k"], plain["top_k"])


def test_no_slots_or_fewer_than_rows(device: str) -> None:
    plain = NORM.build(17, device).run()
    for change in ({"slots": None}, {"slots": None, "cache": None, "index_cache": None}):
        call = NORM.build(17, device)
        written = run(call, **change)
        assert (written["pool"] == 0xA5).all() and (written["index_pool"] == 0xA5).all()
        assert torch.equal(written["out"], plain["out"]) and torch.equal(written["top_k"], plain["top_k"])
    for count in (0, 9):
        call, full = NORM.build(17, device), NORM.build(17, device)
        full.arguments["slots"][count:] = -1
        assert same(full.run(), run(call, slots=call.arguments["slots"][:count]))
    empty = NORM.build(17, device)
    written = run(empty, cache=empty.arguments["cache"][:0], index_cache=empty.arguments["index_cache"][:0])
    assert (written["pool"] == 0xA5).all() and torch.equal(written["out"], plain["out"])


def test_keys_are_returned_on_every_row(device: str) -> None:
    case = replace(NORM, return_kv=True)
    free = replace(case, slots=False).build(17, device).run()
    written = case.build(17, device).run()
    assert torch.equal(free["result1"], written["result1"]) and torch.equal(free["result2"], written["result2"])


def test_the_indexer_may_have_slots_of_its_own(device: str) -> None:
    plain, call = NORM.build(9, device).run(), NORM.build(9, device)
    elsewhere = torch.full_like(call.arguments["slots"], -1)
    written = run(call, index_slots=elsewhere)
    assert (written["index_pool"] == 0xA5).all() and torch.equal(written["pool"], plain["pool"])


def test_slots_and_positions_may_start_anywhere(device: str) -> None:
    call, expected = NORM.build(9, device), NORM.build(9, device).run()
    slots = torch.cat([torch.full((1,), -7, device=device), call.arguments["slots"]])
    positions = torch.cat([torch.full((3,), -7, device=device), call.arguments["positions"]])
    assert same(expected, run(call, slots=slots[1:], positions=positions[3:]))


def test_only_the_first_rows_of_the_top_k_buffer_are_reset(device: str) -> None:
    call = NORM.build(5, device)
    buffer = torch.full((8, 128), 7, dtype=torch.int32, device=device)
    run(call, top_k=buffer[:, :64])
    assert (buffer[:5, :64] == -1).all() and (buffer[5:] == 7).all() and (buffer[:, 64:] == 7).all()


# -- numbers ---------------------------------------------------------------------------------------------------


def test_casting_divides_as_ieee_does(device: str, seed: int) -> None:
    """Every bf16 value, by scales that put quotients next to ties between codes."""
    bits = torch.arange(-(2**15), 2**15).to(torch.int16)
    latent = bits.view(torch.bfloat16).view(128, 1, 512)
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(6, generator=generator).bfloat16().float() + 0.5
    ties = torch.tensor([1.0625, 13.0, 0.001953125 * 1.5, 232.0, 0.14453125, 3.375])
    scales = torch.cat([x / ties, torch.tensor([1.0, 0.37, 2.0**-64, 2.0**63, 448.0])])
    q_pe = torch.zeros(128, 1, 0, dtype=torch.bfloat16, device=device)
    for scale in scales:
        result = dsa.query(
            q_pe,
            latent.to(device),
            torch.zeros(128, dtype=torch.int32, device=device),
            None,
            query_scale=scale.to(device),
        )
        want = formats.to_e4m3(latent.float() / scale)
        assert torch.equal(result.query.cpu().view(torch.uint8), want), f"scale {scale.item()!r}"


def test_index_scales_are_exact_next_to_powers_of_two(device: str) -> None:
    """448 * 2**k and its bf16 neighbours: a float32 logarithm rounds these to the wrong scale."""
    exact = 448.0 * 2.0 ** torch.arange(-24, 25)
    bits = exact.bfloat16().view(torch.int16)[:, None] + torch.tensor([-1, 0, 1], dtype=torch.int16)
    amax = bits.flatten().view(torch.bfloat16)
    query = torch.zeros(len(amax), 1, 128, dtype=torch.bfloat16)
    query[:, 0, 100] = amax
    step = {"positions": torch.zeros(len(amax), dtype=torch.int64, device=device), "rope_table": None}
    empty = torch.zeros(len(amax), 1, 0, dtype=torch.bfloat16, device=device)
    result = dsa.query(
        empty,
        empty.new_zeros(len(amax), 1, 512),
        **step,
        form="pair",
        index_query=query.to(device),
        index_weights=torch.ones(len(amax), 1, device=device),
        index_pairing="half_split",
        index_rope_table=torch.ones(1, 64, device=device),
    )
    scale = result.index_weights.cpu().squeeze(1)
    want = torch.tensor([2.0**k for k in range(-40, 40)])
    floor = max(448.0 * 2.0**-40, 1e-4)
    for value, got in zip(amax.float().clamp(min=floor), scale, strict=True):
        assert got == want[want * 448.0 >= value].min()


def test_the_two_floors(device: str) -> None:
    """An empty latent tile stores 2**-13, an empty indexer key (bias zero) ceil(log2(1e-4 / 448)) = -22."""
    call = NORM.build(1, device)
    for name in ("kv_latent", "index_key", "index_bias"):
        call.arguments[name].zero_()
    call.run()
    assert (formats.scales(formats.record("dsa_fp8"), stored(call)) == 2.0**-13).all()
    index = stored(call, "index_cache", "index_record")
    assert (formats.scales(formats.record("index_fp8"), index) == 2.0**-22).all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_nothing_but_its_own_row_feels_a_value_that_is_not_finite(value: float, device: str) -> None:
    clean, dirty = QUERY.build(3, device), QUERY.build(3, device)
    clean.arguments["index_query"][1, 2, 100] = 0.0
    dirty.arguments["index_query"][1, 2, 100] = value
    want, got = clean.run(), dirty.run()
    differ = (want["result2"] != got["result2"]).nonzero()
    assert len(differ) == 1 and got["result2"][differ] == 0x7F
    assert torch.equal(want["result3"], got["result3"]) and torch.equal(want["out"], got["out"])

    clean, dirty = QUANTISED.build(3, device), QUANTISED.build(3, device)
    dirty.arguments["latent"][1, 2, 7] = value
    want, got = clean.run(), dirty.run()
    differ = (want["out"] != got["out"]).nonzero()
    assert len(differ) == 1 and got["out"][differ] == 0x7F

    dirty, clean = NORM.build(3, device), NORM.build(3, device)
    dirty.arguments["slots"].copy_(torch.arange(3))
    clean.arguments["slots"].copy_(torch.arange(3))
    for name in ("q_latent", "kv_latent", "index_key"):
        dirty.arguments[name][1, 7] = value
    dirty.arguments["k_pe"][1, 7] = value
    clean.run()
    dirty.run()
    for record in (("cache", "record"), ("index_cache", "index_record")):
        a, b = stored(clean, *record), stored(dirty, *record)
        assert torch.equal(a[[0, 2]], b[[0, 2]])
    codes = stored(dirty)[1, :512]
    if value != value:  # a norm spreads a NaN over its row, and an infinity as zeros around a NaN
        assert (codes == 0x7F).all()
    else:
        assert codes[7] == 0x7F and (codes[:7] & 0x7F == 0).all() and (codes[8:] & 0x7F == 0).all()
    tail = stored(dirty)[1, 528:].view(torch.int16)
    assert [i for i in range(64) if tail[i] & 0x7F80 == 0x7F80] in ([6, 7], [6], [7])
    assert (stored(dirty, "index_cache", "index_record")[1, :128] == 0x7F).all()
    assert torch.equal(as_bytes(clean.arguments["out"][[0, 2]]), as_bytes(dirty.arguments["out"][[0, 2]]))


def test_rotation_keeps_the_sign_of_zero(device: str) -> None:
    call = replace(QUERY, index_heads=0, table_dtype=torch.float32).build(1, device)
    call.arguments["q_pe"].zero_()
    table = call.arguments["rope_table"]
    table[:, :32], table[:, 32:] = -0.5, 0.75
    call.run()
    tail = call.arguments["out"].cpu()[..., 512:]
    assert tail[..., 0::2].signbit().all() and not tail[..., 1::2].signbit().any()


def test_weights_in_bf16_and_float32_are_the_same_numbers(device: str) -> None:
    call, other = NORM.build(9, device), NORM.build(9, device)
    names = ("q_weight", "kv_weight", "index_weight", "index_bias")
    bf16 = {name: call.arguments[name].bfloat16() for name in names}
    one = run(call, **bf16)
    two = run(other, **{name: weight.float() for name, weight in bf16.items()})
    assert same(one, two)
    biased = NORM.build(9, device)
    three = run(biased, **{**bf16, "index_bias": bf16["index_bias"] + 1})
    assert not torch.equal(one["index_pool"], three["index_pool"])


def test_norms_are_close_to_float64(device: str) -> None:
    call = replace(NORM, rank=1536, return_kv=True).build(17, device)
    result = call.function(**call.arguments)
    for name, weight, eps, got in (
        ("q_latent", "q_weight", "q_eps", result.q_latent),
        ("kv_latent", "kv_weight", "kv_eps", result.kv_latent),
    ):
        x = call.arguments[name].cpu().double()
        want = x / (x.square().mean(-1, keepdim=True) + call.arguments[eps]).sqrt()
        want = want * call.arguments[weight].cpu().double()
        assert torch.allclose(got.cpu().double(), want, rtol=2**-8, atol=0)


def test_softmax_and_head_scale_multiply_in_order(device: str) -> None:
    call = QUERY.build(5, device)
    result = dsa.query(**{**call.arguments, "softmax_scale": 0.1, "head_scale": 0.7})
    plain = dsa.query(**{**call.arguments, "softmax_scale": 1.0, "head_scale": 1.0})
    assert torch.equal(result.index_weights, plain.index_weights * 0.1 * 0.7)
    assert torch.equal(result.index_query.view(torch.uint8), plain.index_query.view(torch.uint8))


def test_the_index_query_is_the_index_key_without_a_norm(device: str) -> None:
    """The indexer's codes for a query are those its cache would store for the same values as a key."""
    call = replace(QUERY, table_dtype=torch.float32).build(7, device)
    result = call.function(**call.arguments)
    a = call.arguments
    cos, sin = numerics.rope_rows(a["rope_table"].cpu(), a["positions"].cpu())
    x = a["index_query"].cpu().float()
    head = numerics.index_rope(x[..., :64], cos[:, None], sin[:, None], "half_split")
    data = formats.encode(formats.record("index_fp8"), torch.cat([head, x[..., 64:]], -1))
    assert torch.equal(result.index_query.cpu().view(torch.uint8), data[..., :128])


# -- bad input -------------------------------------------------------------------------------------------------


def _strided(shape: tuple[int, ...], stride: tuple[int, ...], device: str) -> torch.Tensor:
    return torch.zeros(1 << 18, dtype=torch.bfloat16, device=device).as_strided(shape, stride)


def _bf16(*shape: int) -> Any:
    return lambda device: torch.zeros(*shape, dtype=torch.bfloat16, device=device)


def _value(value: object) -> Any:
    return lambda device: value


Bad = tuple[Case, dict[str, Any], type[Exception], str]

PAIR = replace(QUERY, form="pair", latent="contiguous")
APART = replace(QUERY, latent="contiguous")

BAD: list[Bad] = [
    (QUERY, {"q_pe": _value(None)}, TypeError, r"q_pe: expected a torch\.Tensor; got NoneType"),
    (
        QUERY,
        {"q_pe": lambda d: torch.zeros(4, 4, 64, device=d)},
        TypeError,
        r"q_pe: expected dtype torch\.bfloat16; got torch\.float32",
    ),
    (QUERY, {"q_pe": _bf16(4, 64)}, ValueError, r"q_pe: expected shape \[any, any, any\]; got \[4, 64\]"),
    (QUERY, {"q_pe": _bf16(4, 4, 32)}, ValueError, r"q_pe: expected last dim 64, or 0 without RoPE; got \[4, 4, 32\]"),
    (QUERY, {"q_pe": _bf16(4, 0, 64)}, ValueError, "q_pe: expected at least 1 head; got 0"),
    (
        QUERY,
        {"q_pe": lambda d: _strided((4, 4, 64), (4 * 68, 68, 1), d)},
        ValueError,
        r"q_pe: expected strides that are multiples of 8 elements",
    ),
    (QUERY, {"q_pe": lambda d: _strided((4, 4, 64), (1024, 128, 2), d)}, ValueError, "q_pe: expected the last 1 dim"),
    (
        QUERY,
        {"q_pe": lambda d: torch.zeros(1025, device=d).bfloat16()[1:].view(4, 4, 64)},
        ValueError,
        "q_pe: expected data at a multiple of 16 bytes",
    ),
    (QUERY, {"latent": _bf16(4, 3, 512)}, ValueError, r"latent: expected shape \[4, 4, 512\]; got \[4, 3, 512\]"),
    (
        QUERY,
        {"latent": lambda d: torch.zeros(4, 4, 512, device=d).half()},
        TypeError,
        r"latent: expected dtype torch\.bfloat16; got torch\.float16",
    ),
    (
        QUERY,
        {"latent": lambda d: torch.zeros(4, 4, 512, device=d).to(torch.float8_e4m3fn)},
        TypeError,
        r"latent: expected dtype torch\.bfloat16; got torch\.float8",
    ),
    (
        QUERY,
        {"latent": lambda d: torch.zeros(4, 4, 512, device="meta").bfloat16()},
        ValueError,
        "latent: expected a tensor on .*; got one on meta",
    ),
    (
        APART,
        {"latent": _value(None), "out": _value(None)},
        ValueError,
        "latent: expected a tensor, or out with the latent in its front; got None for both",
    ),
    (PAIR, {"padded_heads": _value(64)}, ValueError, "padded_heads: expected None for the pair; got a value"),
    (PAIR, {"out": _bf16(4, 4, 576)}, ValueError, "out: expected None for the pair; got a value"),
    (
        QUERY,
        {"positions": lambda d: torch.zeros(3, device=d).long()},
        ValueError,
        r"positions: expected shape \[4\]; got \[3\]",
    ),
    (
        QUERY,
        {"positions": lambda d: torch.zeros(4, device=d)},
        TypeError,
        "positions: expected dtype torch.int64 or torch.int32",
    ),
    (
        QUERY,
        {"positions": lambda d: torch.zeros(4, 2, device=d).long()[:, 0]},
        ValueError,
        "positions: expected a contiguous tensor",
    ),
    (QUERY, {"rope_table": _value(None)}, TypeError, "rope_table: expected a torch.Tensor; got NoneType"),
    (
        QUERY,
        {"rope_table": lambda d: torch.zeros(9, 128, device=d)},
        ValueError,
        r"rope_table: expected shape \[any, 64\]; got \[9, 128\]",
    ),
    (
        QUERY,
        {"rope_table": lambda d: torch.zeros(9, 64, device=d).half()},
        TypeError,
        "rope_table: expected dtype torch.float32 or torch.bfloat16; got torch.float16",
    ),
    (
        QUERY,
        {"rope_table": lambda d: torch.zeros(577, device=d)[1:].view(9, 64)},
        ValueError,
        "rope_table: expected data at a multiple of 16 bytes",
    ),
    (QUERY, {"form": _value("packed_pair")}, ValueError, "form: expected one of packed, pair; got 'packed_pair'"),
    (
        QUERY,
        {"rope_output": _value("neox")},
        ValueError,
        "rope_output: expected one of interleaved, half_split; got 'neox'",
    ),
    (QUERY, {"padded_heads": _value(3)}, ValueError, "padded_heads: expected at least the 4 heads of q_pe; got 3"),
    (QUERY, {"padded_heads": _value(64.0)}, TypeError, "padded_heads: expected an int or None; got float"),
    (QUERY, {"padded_heads": _value(64)}, ValueError, r"out: expected shape \[4, 64, 576\]; got \[4, 4, 576\]"),
    (
        QUERY,
        {"query_scale": _value(0.5)},
        TypeError,
        "query_scale: expected a torch.Tensor of one float32 element; got float",
    ),
    (
        QUERY,
        {"query_scale": lambda d: torch.ones(2, device=d)},
        ValueError,
        r"query_scale: expected one element; got shape \[2\]",
    ),
    (
        QUERY,
        {"query_scale": lambda d: torch.ones(1, device=d)},
        TypeError,
        r"out: expected dtype torch\.float8_e4m3fn; got torch\.bfloat16",
    ),
    (
        QUERY,
        {"out": lambda d: torch.zeros(4, 576, 4, device=d).bfloat16().transpose(1, 2)},
        ValueError,
        "out: expected the last 2 dim",
    ),
    (
        QUERY,
        {"index_query": _bf16(4, 4, 64)},
        ValueError,
        r"index_query: expected shape \[4, any, 128\]; got \[4, 4, 64\]",
    ),
    (QUERY, {"index_query": _bf16(4, 0, 128)}, ValueError, "index_query: expected at least 1 head; got 0"),
    (QUERY, {"index_query": _bf16(4, 3, 128)}, ValueError, r"index_weights: expected shape \[4, 3\]; got \[4, 4\]"),
    (
        QUERY,
        {"index_query": lambda d: _strided((4, 4, 128), (1024, 256, 1), d)},
        ValueError,
        "index_query: expected the last 2 dim",
    ),
    (
        QUERY,
        {"index_query": _value(None)},
        ValueError,
        "index_weights: expected None without index_query; got a Tensor",
    ),
    (QUERY, {"index_weights": _value(None)}, TypeError, "index_weights: expected a torch.Tensor; got NoneType"),
    (
        QUERY,
        {"index_weights": lambda d: torch.zeros(4, 4, device=d).half()},
        TypeError,
        "index_weights: expected dtype",
    ),
    (
        QUERY,
        {"index_weights": lambda d: torch.zeros(4, 4, device=d).t()},
        ValueError,
        "index_weights: expected the last dim contiguous",
    ),
    (
        QUERY,
        {"index_pairing": _value(None)},
        ValueError,
        "index_pairing: expected one of interleaved, half_split; got None",
    ),
    (
        replace(QUERY, rope_dim=0),
        {"index_rope_table": _value(None)},
        ValueError,
        "index_rope_table: expected a tensor where rope_table is None; got None",
    ),
    (
        QUERY,
        {"index_rope_table": lambda d: torch.zeros(9, 32, device=d)},
        ValueError,
        r"index_rope_table: expected shape \[any, 64\]",
    ),
    (
        ABSORB,
        {"q_nope": _bf16(4, 2, 65)},
        ValueError,
        r"q_nope: expected at least 1 head of a positive multiple of 64 dims; got \[4, 2, 65\]",
    ),
    (ABSORB, {"q_nope": _bf16(4, 2, 128)}, ValueError, r"w_uk: expected shape \[2, 128, 512\]; got \[2, 64, 512\]"),
    (ABSORB, {"q_nope": lambda d: _strided((4, 2, 64), (132, 66, 1), d)}, ValueError, "q_nope: expected strides"),
    (
        ABSORB,
        {"w_uk": lambda d: torch.zeros(2, 512, 64, device=d).bfloat16().transpose(1, 2)},
        ValueError,
        "w_uk: expected the last 1 dim",
    ),
    (
        ABSORB,
        {"query_scale": _value(None)},
        TypeError,
        r"out: expected dtype torch\.bfloat16; got torch\.float8_e4m3fn",
    ),
    (
        ABSORB,
        {"out": lambda d: torch.zeros(4, 1, 576, device=d).to(torch.float8_e4m3fn)},
        ValueError,
        r"out: expected at least 2 heads of at least 512 dims .*; got \[4, 1, 576\]",
    ),
    (
        ABSORB,
        {"out": lambda d: torch.zeros(3, 2, 576, device=d).to(torch.float8_e4m3fn)},
        ValueError,
        r"out: expected shape \[4, any, any\]; got \[3, 2, 576\]",
    ),
    (ABSORB, {"out": _value(None), "rope_dim": _value(32)}, ValueError, "rope_dim: expected 0 or 64; got 32"),
    (NORM, {"q_latent": _bf16(4, 513)}, ValueError, "q_latent: expected strides|q_latent: expected a rank"),
    (NORM, {"q_latent": _bf16(4, 2, 512)}, ValueError, r"q_latent: expected shape \[any, any\]"),
    (
        NORM,
        {"q_latent": lambda d: torch.zeros(4, 512, device=d).half()},
        TypeError,
        "q_latent: expected dtype torch.bfloat16",
    ),
    (NORM, {"kv_latent": _bf16(4, 576)}, ValueError, r"kv_latent: expected shape \[4, 512\]; got \[4, 576\]"),
    (NORM, {"k_pe": _bf16(4, 32)}, ValueError, r"k_pe: expected last dim 64, or 0 without RoPE; got \[4, 32\]"),
    (NORM, {"k_pe": _bf16(4, 2, 64)}, ValueError, r"k_pe: expected shape \[4, 1, any\]; got \[4, 2, 64\]"),
    (NORM, {"k_pe": _bf16(4, 0)}, ValueError, "record: expected bf16 or fp8 for a k_pe without dims; got 'dsa_fp8'"),
    (NORM, {"record": _value("v4_fp8")}, ValueError, "record: expected one of dsa_fp8, bf16, fp8; got 'v4_fp8'"),
    (NORM, {"record": _value("bf16")}, ValueError, r"cache: expected .* for bf16 records|kv_scale"),
    (NORM, {"record": _value("fp8")}, (ValueError, TypeError), r"cache: expected .* for fp8 records"),
    (NORM, {"cache": _value(None)}, TypeError, r"cache: expected a torch\.Tensor; got NoneType"),
    (
        NORM,
        {"cache": lambda d: torch.zeros(2, 64, 660, device=d).byte()[..., :656]},
        ValueError,
        "cache: expected contiguous pages",
    ),
    (
        NORM,
        {"slots": lambda d: torch.zeros(5, device=d).long()},
        ValueError,
        "slots: expected at most 4 entries, one for each token; got 5",
    ),
    (NORM, {"slots": lambda d: torch.zeros(4, device=d)}, TypeError, "slots: expected dtype"),
    (NORM, {"q_weight": _bf16(256)}, ValueError, r"q_weight: expected shape \[512\]; got \[256\]"),
    (
        NORM,
        {"q_weight": lambda d: torch.zeros(513, device=d)[1:]},
        ValueError,
        "q_weight: expected data at a multiple of 16 bytes",
    ),
    (
        NORM,
        {"kv_weight": lambda d: torch.zeros(512, device=d).half()},
        TypeError,
        "kv_weight: expected dtype torch.bfloat16 or torch.float32",
    ),
    (
        NORM,
        {"kv_scale": lambda d: torch.ones(1, device=d)},
        ValueError,
        "kv_scale: expected None for dsa_fp8 records; got a tensor",
    ),
    (NORM, {"index_key": _value(None)}, ValueError, "index_weight: expected None without index_key; got a Tensor"),
    (NORM, {"index_key": _bf16(4, 64)}, ValueError, r"index_key: expected shape \[4, 128\]; got \[4, 64\]"),
    (NORM, {"index_bias": _value(None)}, TypeError, "index_bias: expected a torch.Tensor; got NoneType"),
    (NORM, {"index_cache": _value(None)}, TypeError, "index_cache: expected a torch.Tensor; got NoneType"),
    (
        NORM,
        {"index_cache": lambda d: torch.zeros(2, 64, 128, device=d).byte()},
        ValueError,
        r"index_cache: expected \[num_blocks, block_size, 132\] for index_fp8 records",
    ),
    (
        NORM,
        {"index_record": _value("index_mxfp4")},
        ValueError,
        "index_record: expected one of index_fp8, index_fp8_ue8m0; got 'index_mxfp4'",
    ),
    (
        NORM,
        {"index_pairing": _value("gptj")},
        ValueError,
        "index_pairing: expected one of interleaved, half_split; got 'gptj'",
    ),
    (
        NORM,
        {"index_slots": lambda d: torch.zeros(5, device=d).long()},
        ValueError,
        "index_slots: expected at most 4 entries",
    ),
    (
        NORM,
        {"top_k": lambda d: torch.zeros(3, 64, device=d).int()},
        ValueError,
        r"top_k: expected at least 4 rows of at least 1; got \[3, 64\]",
    ),
    (
        NORM,
        {"top_k": lambda d: torch.zeros(4, 64, device=d).long()},
        TypeError,
        r"top_k: expected dtype torch\.int32; got torch\.int64",
    ),
    (
        NORM,
        {"top_k": lambda d: torch.zeros(4, 66, device=d).int()[:, :64]},
        ValueError,
        "top_k: expected strides that are multiples of 4 elements",
    ),
    (
        replace(NORM, index_record=None),
        {"top_k": lambda d: torch.zeros(4, 64, device=d).int()},
        ValueError,
        "top_k: expected None without index_key; got a Tensor",
    ),
    (NORM, {"out": _bf16(4, 256)}, ValueError, r"out: expected shape \[4, 512\]; got \[4, 256\]"),
]


@pytest.mark.parametrize(
    ("case", "changes", "error", "message"), BAD, ids=[f"{'-'.join(row[1])}-{i}" for i, row in enumerate(BAD)]
)
def test_bad_input_is_named_and_nothing_is_written(
    case: Case, changes: dict[str, Any], error: type[Exception], message: str, device: str
) -> None:
    call = case.build(4, device)
    memory = {name: as_bytes(tensor) for name, tensor in call.memory.items()}
    call.arguments.update({name: make(device) for name, make in changes.items()})
    with pytest.raises(error, match=f"^(?:{message})"):
        call.function(**call.arguments)
    assert all(torch.equal(memory[name], as_bytes(tensor)) for name, tensor in call.memory.items())


def test_overlap_that_is_not_in_place_is_refused(device: str) -> None:
    call = replace(QUERY, padded_heads=8).build(4, device)
    out = call.arguments["out"]
    with pytest.raises(ValueError, match="out: expected memory apart from latent"):
        dsa.query(**{**call.arguments, "latent": out[:, 4:, :512]})
    with pytest.raises(ValueError, match="out: expected memory apart from q_pe"):
        dsa.query(**{**call.arguments, "q_pe": out[:, :4, 512:]})
    call = NORM.build(4, device)
    row = torch.zeros(4, 1024, dtype=torch.bfloat16, device=device)
    with pytest.raises(ValueError, match="out: expected memory apart from q_latent"):
        dsa.norm_rope_insert(**{**call.arguments, "q_latent": row[:, :512], "out": row[:, 8:520]})
    call = ABSORB.build(4, device)
    raw = torch.zeros(4 * 4 * 576, dtype=torch.uint8, device=device)
    with pytest.raises(ValueError, match="out: expected memory apart from q_nope"):
        dsa.absorb_query(
            **{
                **call.arguments,
                "q_nope": raw.view(torch.bfloat16)[:512].view(4, 2, 64),
                "out": raw.view(torch.float8_e4m3fn).view(4, 4, 576),
            }
        )


# -- torch -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [COPIED, PAIR, QUANTISED], ids=named)
def test_opcheck_query(case: DsaQueryCase, device: str) -> None:
    a = case.build(3, device).arguments
    heads = case.index_heads
    empty = [poisoned(3, heads, 128, dtype=torch.float8_e4m3fn, device=device), torch.zeros(3, heads, device=device)]
    pair = case.form == "pair"
    arguments = (
        a["q_pe"], None if pair else a["latent"], a["positions"], a["rope_table"], a.get("index_query"),
        a.get("index_weights"), a["rope_table"] if heads else None, a["query_scale"], a["out"],
        torch.zeros(3, case.heads, 64, device=device).bfloat16() if pair else None, *(empty if heads else (None, None)),
        a["rope_output"], a.get("index_pairing", "half_split"), 0.5, 0.25,
    )  # fmt: skip
    checks = ["test_faketensor", "test_autograd_registration", "test_aot_dispatch_dynamic"]
    torch.library.opcheck(torch.ops.preattn.dsa_query.default, arguments, test_utils=checks)
    if not heads and not case.fp8_query:  # test_schema compares outputs, which torch cannot do for float8
        torch.library.opcheck(torch.ops.preattn.dsa_query.default, arguments, test_utils="test_schema")


def test_opcheck_absorb_and_norm_rope(device: str) -> None:
    checks = ["test_faketensor", "test_autograd_registration", "test_aot_dispatch_dynamic"]
    for fp8_query in (False, True):
        a = replace(ABSORB, fp8_query=fp8_query).build(3, device).arguments
        utils = checks if fp8_query else [*checks, "test_schema"]
        arguments: tuple[Any, ...] = (a["q_nope"], a["w_uk"], a["query_scale"], a["out"])
        torch.library.opcheck(torch.ops.preattn.dsa_absorb_query.default, arguments, test_utils=utils)
    a = NORM.build(3, device).arguments
    names = (
        "q_latent kv_latent k_pe cache slots positions rope_table q_weight kv_weight kv_scale index_key index_weight "
        "index_bias index_cache slots rope_table top_k out"
    )
    returned = torch.zeros(3, 512, device=device).bfloat16(), torch.zeros(3, 64, device=device).bfloat16()
    options = ("dsa_fp8", "index_fp8", 1e-6, 1e-6, 1e-6, "interleaved", "half_split")
    arguments = (*[a[name] for name in names.split()], *returned, *options)
    torch.library.opcheck(
        torch.ops.preattn.dsa_norm_rope_insert.default, arguments, test_utils=[*checks, "test_schema"]
    )


@pytest.mark.parametrize("case", [QUERY, COPIED, QUANTISED, NORM, replace(ABSORB, fp8_query=False)], ids=named)
def test_fullgraph_compile_equals_eager(case: Case, device: str) -> None:
    call = case.build(9, device)
    results = call.function(**call.arguments)
    compiled = torch.compile(call.function, fullgraph=True, backend="inductor" if device == "cuda" else "aot_eager")
    again = case.build(9, device)
    got = compiled(**again.arguments)
    pairs = zip(results, got, strict=True) if isinstance(results, tuple) else [(results, got)]
    for want, have in pairs:
        assert (want is None and have is None) or torch.equal(as_bytes(want), as_bytes(have))
    for name, tensor in call.memory.items():
        assert torch.equal(as_bytes(tensor), as_bytes(again.memory[name])), name


def test_an_all_ones_scale_divides_like_the_reference(device: str) -> None:
    """One residual decides here: an fma that rounds twice gives another code."""
    arguments = {
        "q_pe": torch.zeros(1, 1, 64, dtype=torch.bfloat16, device=device),
        "latent": torch.full((1, 1, 512), 2.0**-9, dtype=torch.bfloat16, device=device),
        "positions": torch.zeros(1, dtype=torch.int64, device=device),
        "rope_table": torch.zeros(1, 64, device=device),
        "query_scale": torch.tensor(2.0 - 2.0**-23, device=device),
    }
    query = dsa.query(**arguments).query
    assert query is not None
    assert (query.view(torch.uint8)[..., :512] == 1).all()


def test_parameters_are_weights_like_others(device: str) -> None:
    q = torch.ones(2, 3, 64, dtype=torch.bfloat16, device=device)
    weight = torch.nn.Parameter(torch.ones(3, 64, 512, dtype=torch.bfloat16, device=device))
    out = dsa.absorb_query(q, weight)
    assert not out.requires_grad and (out[..., :512] == 64).all()
