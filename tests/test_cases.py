"""Every case of the registry: the kernels equal the reference to the bit, and touch nothing else.

A call's memory is poisoned first and compared whole, so a byte that should have been written and was not,
or the reverse, is a difference like any other.
"""

from __future__ import annotations

from collections.abc import Iterator

import placing
import pytest
import torch

from preattn.cases import CASES, Case

TOKENS = (0, 1, 17)
POISON = 0xFF


@pytest.fixture(autouse=True)
def results_are_poisoned_too() -> Iterator[None]:
    with placing.poisoned_results(POISON):
        yield


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_kernels_equal_the_reference(case: Case, tokens: int, device: str, seed: int) -> None:
    expected = case.build(tokens, seed=seed).run("reference")
    written = case.build(tokens, device, seed=seed).run("triton")
    assert expected.keys() == written.keys()
    for name, want in expected.items():
        assert torch.equal(want, written[name]), f"{(want != written[name]).sum()} of {want.numel()} bytes of {name}"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_call_writes_something_and_counts_its_bytes(case: Case) -> None:
    before = case.build(9)
    untouched = {name: tensor.clone() for name, tensor in before.memory.items()}
    written = before.run("reference")
    changed = [name for name, tensor in before.memory.items() if not _same_bits(tensor, untouched[name])]
    assert changed == list(before.memory)
    assert written and all((bits != POISON).any() for bits in written.values() if bits.numel())
    assert before.moved > 0


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def test_names_are_unique() -> None:
    names = [case.name for case in CASES]
    assert len(names) == len(set(names))
