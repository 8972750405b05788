"""Kinds of ``test_pitfalls`` that take memory: pools past 4 GiB, rows past 2**31 elements, more than 65,535 tokens.

Up to some 60 GiB a test, freed after each.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator

import placing
import pytest
import torch
from placing import rehome, respread, same, set_slots, stored
from test_pitfalls import CASES, REACH, STORING, STRIDED, STRIDED_IDS, check_far, expected, named, plain
from torch import Tensor

from preattn.cases import Case
from preattn.cases.base import CANARY, as_bytes
from preattn.cases.dsa import AbsorbCase
from preattn.cases.v4 import ProjectCase
from preattn.policy import Projection

pytestmark = pytest.mark.gpu

TOKENS = 65536 + 17
LAST = 17
LIBRARY = (
    ProjectCase(64, 64, form=Projection.MATMUL, rope=True),
    ProjectCase(64, 64, layout="chunk_interleaved", form=Projection.MATMUL),
    AbsorbCase(64, fp8_query=False),
)
"""Results of a library's matmul of more than 2**31 elements."""
BLOCK = 64


@pytest.fixture(autouse=True)
def freed() -> Iterator[None]:
    """Give memory back, so that tests run in any order beside others."""
    yield
    gc.collect()
    torch.cuda.empty_cache()


@pytest.mark.parametrize("case", [*CASES, *LIBRARY], ids=named)
def test_more_tokens_than_16_bits_count(case: Case) -> None:
    """The last rows of 65,553 are what they are alone, and lie where they should."""
    call, part = case.build(TOKENS, "cuda"), case.build(TOKENS, "cuda")
    placing.rows(part, TOKENS - LAST, TOKENS)
    few, whole = placing.outputs(part), placing.outputs(call)
    for name, tensor in few.items():
        if name != "counters":
            assert torch.equal(as_bytes(whole[name][TOKENS - LAST : TOKENS]), as_bytes(tensor)), name
    for name in placing.caches(call):
        slots = part.arguments.get("index_slots") if name == "index_cache" else None
        slots = part.arguments["slots"] if slots is None else slots
        cache = call.arguments[name]
        inside = slots[(slots >= 0) & (slots < cache.shape[0] * cache.shape[1])].cpu()
        assert torch.equal(stored(call, inside)[name], stored(part, inside)[name]), name


@pytest.mark.parametrize("index_dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("case", STORING, ids=named)
def test_pools_past_4_gib(case: Case, index_dtype: torch.dtype) -> None:
    """The slots around both 32-bit wraps of every record, and the last; every other byte stays."""
    sizes = [record.bytes for record in placing.caches(case.build(1)).values()]
    blocks = (5 << 30) // (BLOCK * min(sizes))
    wraps = {wrap // size + side for size in sizes for wrap in (2**31, 2**32) for side in (0, 1)}
    slots = torch.tensor([0, *sorted(wraps), blocks * BLOCK - 1])
    tokens = len(slots)
    far, near = case.build(tokens, "cuda"), plain(case, tokens)
    pools = rehome(far, placing.canary("cuda"), blocks=blocks, block_size=BLOCK)
    rehome(near, placing.canary("cpu"), blocks=tokens, block_size=BLOCK)
    close = torch.arange(tokens) * BLOCK + slots % BLOCK
    set_slots(far, slots.to(index_dtype).cuda())
    set_slots(near, close.to(index_dtype))
    want = expected(near)
    assert same(placing.outputs(far), want)
    assert same(stored(far, slots), stored(near, close))
    for name, pool in pools.items():
        changed = sum(int((part != CANARY).sum()) for part in pool.split(1 << 28))
        assert changed <= tokens * placing.caches(far)[name].bytes


def _uninitialised(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, device="cuda")


@pytest.mark.parametrize(("case", "tokens_first"), STRIDED, ids=STRIDED_IDS)
def test_rows_past_32_bits(case: Case, tokens_first: bool) -> None:
    """Tokens, or heads, so far apart that the last one's offset needs more than 32 bits."""
    call = case.build(3, "cuda")
    respread(call, _uninitialised, tokens_first=tokens_first, reach=REACH)
    check_far(case, call)
