"""What an engine may make differ: the codes of one on an H200, and what is no such difference."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from preattn import dsa, policy
from preattn.bench import run
from preattn.cases.base import Call
from preattn.cases.dsa import DsaQueryCase
from preattn.differences import DIVISION_ERROR, division_edges, neighbours
from preattn.dispatch import backend
from preattn.integrations.vllm import shadow, summary, unregister
from preattn.reference import dsa as reference

SCALE = float.fromhex("0x1.7ae148p-2")
SEEN = [
    # even and odd dim, cosine, sine; the dim it is about; our code and vLLM 0.33.0's (Triton 3.6, an H200)
    (("0x1.46p+0", "0x1.bcp-6", "0x1.6ap-3", "-0x1.f8p-1"), 1, 197, 198),
    (("-0x1.5p-2", "-0x1.9ep-8", "0x1.eap-1", "0x1.2ap-2"), 0, 181, 182),
]
"""Two of 101 million rotated values: 16,384 tokens of 32 and of 64 heads. None of 8, 16 and 128 heads differed."""


def _step(values: tuple[str, ...], device: str) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """A query of one token and head whose first pair and angles are these."""
    even, odd, cos, sin = (float.fromhex(value) for value in values)
    q_pe, table = torch.zeros(1, 1, 64), torch.zeros(1, 64)
    q_pe[0, 0, :2], table[0, 0], table[0, 32] = torch.tensor([even, odd]), cos, sin
    latent, scale = torch.zeros(1, 1, 512, dtype=torch.bfloat16), torch.tensor(SCALE)
    step = (q_pe.bfloat16(), latent, torch.zeros(1, dtype=torch.int64), table.bfloat16(), scale)
    return tuple(x.to(device) for x in step)  # type: ignore[return-value]


def _codes(*codes: int) -> Tensor:
    return torch.tensor(codes, dtype=torch.uint8).view(torch.float8_e4m3fn)


@pytest.mark.parametrize(("values", "dim", "ours", "engines"), SEEN)
def test_ours_is_the_exact_quotients_code_and_the_engines_beside_it(
    values: tuple[str, ...], dim: int, ours: int, engines: int, device: str
) -> None:
    q_pe, latent, positions, table, scale = _step(values, device)
    with backend("triton"), policy.assume(policy.device(policy.DEFAULT_DEVICE)):
        query = dsa.query(q_pe, latent, positions, table, query_scale=scale).query
    assert query is not None and int(query.view(torch.uint8)[0, 0, 512 + dim]) == ours
    exact = reference.query_quotient(*_step(values, "cpu"))[0, 0, 512 + dim]
    boundary = (_codes(ours).double() + _codes(engines).double()) / 2
    assert 2.0**-25 < (exact / boundary - 1).abs() < 2.0**-23, "within an ulp: to the nearest float32 it is no tie"
    assert division_edges(_codes(ours), _codes(engines), exact).all()


def test_a_code_further_off_or_of_another_quotient_is_no_division_edge() -> None:
    code, beside, two_off, opposite = _codes(60), _codes(61), _codes(62), _codes(60 | 0x80)
    boundary = (code.double() + beside.double()) / 2
    for quotient, engines, edge in (
        (boundary, beside, True),
        (boundary * (1 + DIVISION_ERROR), beside, True),
        (boundary * (1 - DIVISION_ERROR), beside, True),
        (boundary * (1 + 1.01 * DIVISION_ERROR), beside, False),
        (boundary * (1 - 1.01 * DIVISION_ERROR), beside, False),
        ((code.double() + two_off.double()) / 2, two_off, False),
        (boundary, opposite, False),
        (boundary, _codes(0x7F), False),
        (boundary, code, False),
    ):
        assert bool(division_edges(code, engines, quotient)) == edge, (quotient, engines)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_neighbours_are_one_step_apart_in_value(dtype: torch.dtype) -> None:
    bits = torch.int16 if dtype == torch.bfloat16 else torch.int8
    every = torch.arange(-(2 ** (8 * bits.itemsize - 1)), 2 ** (8 * bits.itemsize - 1)).to(bits).view(dtype)
    finite = torch.unique(every[every.float().isfinite()].double())
    there, back = finite[:-1].to(dtype), finite[1:].to(dtype)
    assert neighbours(there, back).all() and neighbours(back, there).all()
    assert not neighbours(finite[:-2].to(dtype), finite[2:].to(dtype)).any()
    assert not neighbours(every, every).any()
    assert not neighbours(torch.tensor([0.0]).to(dtype), torch.tensor([-0.0]).to(dtype)).any()


# -- who counts them -----------------------------------------------------------------------------------------------


def _beside(query: Tensor, dim: int, code: int) -> Tensor:
    """An e4m3 query in which the first token's first head has another code."""
    other = query.clone()
    other.view(torch.uint8)[0, 0, dim - 64] = code
    return other


def _call(case: DsaQueryCase, values: tuple[str, ...], where: str) -> Call:
    """A case's call whose first pair is one of those seen."""
    call = case.build(3, where)
    q_pe, _, _, table, scale = _step(values, where)
    call.arguments["q_pe"][0, 0, :2] = q_pe[0, 0, :2]
    call.arguments["positions"][0] = 5
    call.arguments["rope_table"][5, [0, 32]] = table[0, [0, 32]]
    call.arguments["query_scale"] = scale
    return call


@pytest.mark.parametrize(("values", "dim", "ours", "engines"), SEEN)
@pytest.mark.parametrize("apart", ["the code seen", "another step", "another element"])
def test_a_bench_takes_an_engines_division_and_nothing_else(
    values: tuple[str, ...],
    dim: int,
    ours: int,
    engines: int,
    apart: str,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = DsaQueryCase(2, index_heads=2, latent="transposed", fp8_query=True)
    built: Callable[..., Call] = DsaQueryCase.build
    monkeypatch.setattr(DsaQueryCase, "build", lambda self, tokens, where="cpu", seed=0: built(self, tokens, device))
    monkeypatch.setattr(run, "_expected", lambda case, tokens: {})
    call = _call(case, values, device)
    arms = run.arms_of(case, call, None)

    def engine() -> tuple[Tensor, ...]:
        result = call.function(**call.arguments)
        element, code = (dim + 2, engines) if apart == "another element" else (dim, engines + (apart == "another step"))
        return (_beside(result.query, element, code), result.index_query, result.index_weights)

    if apart == "the code seen":
        run.check(case, call, {**arms, "vllm": engine}, 3)
        with pytest.raises(run.CheckFailed, match="query that other wrote"):
            run.check(case, call, {**arms, "other": engine}, 3)
    else:
        with pytest.raises(run.CheckFailed, match="query that vllm wrote"):
            run.check(case, call, {**arms, "vllm": engine}, 3)


@pytest.mark.parametrize("mismatch", [False, True])
def test_shadow_mode_counts_an_engines_division(mismatch: bool) -> None:
    values, dim, code, engines = SEEN[0]
    case = DsaQueryCase(2, index_heads=0, latent="transposed", fp8_query=True)
    a = _call(case, values, "cpu").arguments
    with backend("reference"):
        ours = dsa.query(a["q_pe"], a["latent"], a["positions"], a["rope_table"], query_scale=a["query_scale"]).query
    assert ours is not None and int(ours.view(torch.uint8)[0, 0, dim - 64]) == code
    theirs = _beside(ours, dim, engines)
    if mismatch:
        theirs.view(torch.uint8)[2, 1, 7] ^= 1

    def quotient(rows: Tensor) -> Tensor:
        step = (a["q_pe"][rows], a["latent"][rows], a["positions"][rows])
        return reference.query_quotient(*step, a["rope_table"], a["query_scale"])

    unregister()
    try:
        shadow.compare("op", "main query", "L", ours, theirs, quotient=quotient)
        found = summary()["shadow"]["op.main query"]
        assert (found["mismatches"], found["division_edges"]) == (int(mismatch), 1)
        ((line, clean),) = shadow.lines()
        assert "division edges: 1 codes" in line and clean == (not mismatch)
        assert not mismatch or "element [2, 1, 7]" in found["first"]
    finally:
        unregister()
