"""The benchmark's own checks, with arms that lie."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from preattn.bench import run
from preattn.cases.base import Call
from preattn.cases.dsa import DsaQueryCase, NormRopeCase
from preattn.cases.v4 import V4Case

SMALL = {"pad": V4Case(4, 8), "query": DsaQueryCase(4, index_heads=2), "norm": NormRopeCase(rank=64, top_k=32)}


@pytest.fixture(autouse=True)
def on_this_machine(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """``check`` builds on the GPU; where there is none, in the interpreter."""
    for kind in (V4Case, DsaQueryCase, NormRopeCase):
        built = kind.build
        monkeypatch.setattr(
            kind,
            "build",
            lambda self, tokens, where="cpu", seed=0, built=built: built(
                self, tokens, device if where == "cuda" else where, seed
            ),
        )


def checked(name: str, lie: Any) -> None:
    case = SMALL[name]
    call = run.storable(case.build(3, "cuda"))
    arms = run.arms_of(case, call, None)
    run.check(case, call, {**arms, "liar": lambda: lie(call, arms["preattn"]())}, 3)


@pytest.mark.parametrize("name", SMALL)
def test_an_honest_arm_passes(name: str) -> None:
    checked(name, lambda call, result: result)


def _flip(tensor: torch.Tensor) -> torch.Tensor:
    changed = tensor.clone()
    changed.view(torch.uint8).view(-1)[-1] ^= 1
    return changed


def _touch(name: str) -> Any:
    def lie(call: Call, result: Any) -> Any:
        call.memory[name].view(-1)[5] += 1
        return result

    return lie


LIES: list[tuple[str, Any]] = [
    ("pad", lambda call, result: _flip(result)),
    ("pad", lambda call, result: torch.stack([result, result])),
    ("pad", _touch("pool")),
    ("query", lambda call, result: result._replace(query=_flip(result.query))),
    ("query", lambda call, result: result._replace(index_query=_flip(result.index_query))),
    ("query", lambda call, result: result._replace(index_weights=_flip(result.index_weights))),
    ("norm", lambda call, result: _flip(result)),
    ("norm", _touch("pool")),
    ("norm", _touch("index_pool")),
    ("norm", _touch("top_k")),
]


@pytest.mark.parametrize(("name", "lie"), LIES, ids=range(len(LIES)))
def test_a_lie_is_found(name: str, lie: Any) -> None:
    with pytest.raises(run.CheckFailed, match="liar"):
        checked(name, lie)


def test_another_order_of_a_sum_is_no_lie_for_an_engine() -> None:
    ours = torch.tensor([1.0, -3.0, 0.0]).bfloat16()
    step = torch.tensor([1.0078125, -3.0, 2.0**-17]).bfloat16()
    assert run._agrees(ours, step, normed=True) and not run._agrees(ours, step, normed=False)
    assert not run._agrees(ours, torch.tensor([1.02, -3.0, 0.0]).bfloat16(), normed=True)
    codes = torch.zeros(10_000, dtype=torch.uint8)
    flipped = codes.clone()
    flipped[:10] = 1
    assert run._agrees(codes, flipped, normed=True)
    flipped[:11] = 1
    assert not run._agrees(codes, flipped, normed=True)


@pytest.mark.parametrize("name", ["pad", "norm"])
def test_every_timed_row_has_a_slot_of_its_own(name: str) -> None:
    call = run.storable(SMALL[name].build(30))
    for slots_name, cache_name in (("slots", "cache"), ("index_slots", "index_cache")):
        slots, cache = call.arguments.get(slots_name), call.arguments.get(cache_name)
        if slots is not None and cache is not None:
            assert len(set(slots.tolist())) == len(slots)
            assert int(slots.min()) >= 0 and int(slots.max()) < cache.shape[0] * cache.shape[1]


def test_only_what_a_norm_decides_may_differ() -> None:
    norm, query = SMALL["norm"], V4Case(4, 8, record="v4_fp8", layout="head_major", norm=True, rope=True)
    assert [name for name in ("query", "pool", "top_k", "index_pool") if run._normed(norm, name)] == [
        "query",
        "pool",
        "index_pool",
    ]
    assert run._normed(query, "query") and not run._normed(query, "pool")
    assert not run._normed(SMALL["pad"], "query")


def _as_an_engine(case: DsaQueryCase, call: Call, *, concatenate: bool) -> tuple[torch.Tensor, ...]:
    """The rotated dims alone, or behind the latent, of live heads only: what an engine's op and its packing give."""
    ours = call.function(**call.arguments)
    rotated = ours.q_pe if case.form == "pair" else ours.query[:, : case.heads, 512:]
    latent = ours.query[:, : case.heads, :512]
    return (torch.cat([latent, rotated], -1) if concatenate else rotated, ours.index_query, ours.index_weights)


_IN_PLACE = DsaQueryCase(4, index_heads=2)
_PADDED = DsaQueryCase(4, index_heads=2, latent="transposed", padded_heads=8)
_PAIR = DsaQueryCase(4, index_heads=2, form="pair", latent="transposed")


@pytest.mark.parametrize(
    ("case", "concatenate"), [(_IN_PLACE, False), (_IN_PLACE, True), (_PADDED, False), (_PADDED, True), (_PAIR, False)]
)
def test_every_form_of_a_query_is_compared_with_what_an_engine_writes(case: DsaQueryCase, concatenate: bool) -> None:
    call = case.build(3, "cuda")
    arms = run.arms_of(case, call, None)

    def honest() -> tuple[torch.Tensor, ...]:
        return _as_an_engine(case, call, concatenate=concatenate)

    def liar() -> tuple[torch.Tensor, ...]:
        query, *rest = honest()
        return (_flip(query.contiguous()), *rest)

    run.check(case, call, {**arms, "vllm": honest}, 3)
    with pytest.raises(run.CheckFailed, match="query that vllm wrote"):
        run.check(case, call, {**arms, "vllm": liar}, 3)
