"""10,000 rounds of a mixed schedule on two streams: no bit differs at the end from what one call of each op writes."""

from __future__ import annotations

import random
import time

import pytest
import torch
from torch import Tensor

from preattn.cases.base import Call, Case
from preattn.cases.dsa import AbsorbCase, DsaQueryCase, NormRopeCase
from preattn.cases.v4 import KvCase, PadCase, ProjectCase, V4Case
from preattn.policy import Form, Projection

pytestmark = pytest.mark.gpu

ROUNDS, COMPARED = 10_000, 500
"""Rounds, and how many between comparisons; a round is one call on either stream."""
LIMIT_S, LIMIT_BYTES = 60.0, 1 << 30

CASES: tuple[Case, ...] = (
    V4Case(32, 64),
    V4Case(16, 64, record="v4_fp8", layout="head_major", norm=True, rope=True),
    V4Case(3, 8, record="fp8", layout="head_major", rope=True, fp8_query=True, form=Form.TWO_LAUNCHES),
    PadCase(24, 64),
    KvCase("v4_fp8"),
    ProjectCase(2, 4, weight="e4m3", rope=True, grouped=True),
    ProjectCase(2, 4, record="v4_fp8", norm=True, rope=True),
    ProjectCase(8, 64, layout="chunk_interleaved", form=Projection.MATMUL),
    DsaQueryCase(16, padded_heads=64, latent="contiguous"),
    DsaQueryCase(16, latent="contiguous", fp8_query=True, index_pairing="interleaved"),
    AbsorbCase(4),
    NormRopeCase(),
    NormRopeCase(record="bf16", index_record=None, return_kv=True),
)
SIZES = (1, 17, 64, 257)


class Work:
    """A call of one stream, and what it leaves when it is made alone."""

    def __init__(self, case: Case, tokens: int, seed: int) -> None:
        self.name = f"{case.name}, {tokens} tokens"
        self.call: Call = case.build(tokens, "cuda", seed)
        self.before = {name: tensor.clone() for name, tensor in self.call.memory.items()}
        self.run()
        self.alone = [tensor.clone() for tensor in self.written()]

    def run(self) -> None:
        """From the memory before, on the current stream: what an earlier round wrote is no help."""
        for name, tensor in self.call.memory.items():
            tensor.copy_(self.before[name])
        result = self.call.function(**self.call.arguments)
        self.results = result if isinstance(result, tuple) else (result,)

    def written(self) -> list[Tensor]:
        """All that the last call may have written, and returned."""
        return [*self.call.memory.values(), *[tensor for tensor in self.results if isinstance(tensor, Tensor)]]

    def differs(self) -> Tensor:
        """One bool on the GPU: whether a byte is another than after the call alone."""
        pairs = zip(self.alone, self.written(), strict=True)
        return torch.stack([(one.view(torch.uint8) != other.view(torch.uint8)).any() for one, other in pairs]).any()


def test_a_mixed_schedule_on_two_streams_writes_the_same_bits() -> None:
    shuffled = random.Random(20261130)
    streams = (torch.cuda.Stream(), torch.cuda.Stream())
    works = [[Work(case, tokens, side) for case in CASES for tokens in SIZES] for side in range(2)]
    torch.cuda.synchronize()
    held, start = torch.cuda.memory_allocated(), time.monotonic()
    torch.cuda.reset_peak_memory_stats()
    for rounds in range(COMPARED, ROUNDS + 1, COMPARED):
        made: list[set[int]] = [set(), set()]
        for _ in range(COMPARED):
            for side, stream in enumerate(streams):
                chosen = shuffled.randrange(len(works[side]))
                made[side].add(chosen)
                with torch.cuda.stream(stream):
                    works[side][chosen].run()
        torch.cuda.synchronize()
        for side, chosen_ones in enumerate(made):
            done = [works[side][index] for index in sorted(chosen_ones)]
            wrong = torch.stack([work.differs() for work in done]).nonzero().flatten().tolist()
            assert not wrong, f"within {rounds} rounds, stream {side}: {[done[index].name for index in wrong]}"
    assert torch.cuda.max_memory_allocated() - held < LIMIT_BYTES
    assert time.monotonic() - start < LIMIT_S
