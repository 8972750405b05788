"""A layer whose heads are spread over ranks: prologue, attention, output projection and all-reduce equal one rank's.

Each rank has its heads' rows of ``wq_b``, its groups' ``wo_a`` and its columns of ``wo_b``; the KV cache is every
rank's own and whole. Attention's outputs are equal to the bit, whatever the number of ranks, and so is what ``wo_a``
makes of them: a group's heads are never apart. What differs is where ``wo_b``'s sum is rounded to bf16.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from preattn import formats, weights
from preattn.cases.base import activations, as_bytes, rope_table
from preattn.dispatch import backend
from preattn.geometry import geometry
from preattn.layers import V4Prologue
from preattn.reference import numerics
from preattn.reference.attention import Selection, dequantised, mega_attention
from preattn.workspace import QueryWorkspace

TOKENS, OUTPUT_RANK = 4, 8
MODELS = {
    "flashmla-mega": dataclasses.replace(geometry("deepseek-v4.1-flash"), q_rank=32, hidden=48, output_groups=8),
    "flashmla-v4": dataclasses.replace(geometry("deepseek-v4-flash"), q_rank=32, hidden=48),
}
U = 2.0**-8
"""bf16 has 8 significant bits: rounding to nearest moves a value by less than U of itself."""


@pytest.fixture(autouse=True)
def on_the_reference() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # small tensors: more threads wait for each other
    with backend("reference"):
        yield
    torch.set_num_threads(threads)


class Shard(NamedTuple):
    """What a rank has after its own step."""

    partial: Tensor
    """[T, hidden] float64, its part of the output, not rounded."""
    attention: Tensor
    """[T, groups, 4096 + 128] bytes: what attention wrote, codes and scales."""
    cache: Tensor
    """Bytes of its KV cache."""


def exact(*shape: int, seed: int) -> Tensor:
    """Small integers times 2**-3, so that ``wq_b``'s sums are exact in any order."""
    return (torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(seed)) * 2.0**-3).bfloat16()


@functools.cache
def run_shard(name: str, tp: int, rank: int) -> Shard:
    """One rank's layer, up to the all-reduce."""
    whole = MODELS[name]
    shard = whole.shard(tp)
    assert whole.output_groups and shard.output_groups
    group = weights.GROUP_HEADS * weights.HEAD_DIM
    wq_b = exact(whole.heads * 512, whole.q_rank, seed=1)
    wo_a = activations(whole.output_groups, OUTPUT_RANK, group, dtype=torch.bfloat16, seed=2)
    wo_b = activations(whole.hidden, whole.output_groups * OUTPUT_RANK, dtype=torch.bfloat16, seed=3)
    sink = activations(whole.heads, dtype=torch.float32, seed=4)
    heads = slice(rank * shard.heads, (rank + 1) * shard.heads)
    groups = slice(rank * shard.output_groups, (rank + 1) * shard.output_groups)
    columns = slice(groups.start * OUTPUT_RANK, groups.stop * OUTPUT_RANK)

    record = formats.record(whole.records.window[0])
    pool = torch.zeros(2 * record.page_bytes(16), dtype=torch.uint8)
    layer = V4Prologue(
        geometry=shard,
        backend=name,
        wq_b=wq_b.unflatten(0, (whole.heads, 512))[heads].flatten(0, 1),
        cache=formats.cache_view(pool, record, block_size=16),
        rope_table=rope_table(32),
        max_tokens=TOKENS,
        workspace=QueryWorkspace(shard, name, TOKENS, device="cpu", debug=True),
    )
    positions, slots = torch.arange(TOKENS) + 7, torch.tensor([17, 3, 30, 8])
    query = layer.prepare(
        exact(TOKENS, whole.q_rank, seed=5),
        activations(TOKENS, 512, dtype=torch.bfloat16, seed=6),
        positions,
        slots,
    )
    window = torch.stack([torch.where(torch.arange(TOKENS) <= token, slots, -1) for token in range(TOKENS)])
    codes, scales = mega_attention(
        query,
        positions,
        rope_table(32),
        [Selection(layer.cache, record.name, window)],
        sink[heads],
        heads=shard.heads,
        layout="chunk_interleaved" if name == "flashmla-mega" else "head_major",
        softmax_scale=512**-0.5,
    )
    fused = torch.stack([weights.interleave_output_columns(one) for one in wo_a[groups]])
    products = dequantised(codes, scales)[:, :, None].double() * fused.double()
    latent = numerics.tree_sum(products).bfloat16().flatten(1)  # [T, groups * rank], a group at a time
    partial = numerics.tree_sum(latent[:, None].double() * wo_b[:, columns].double())
    return Shard(partial, torch.cat([codes.view(torch.uint8), scales], -1), as_bytes(pool))


def assert_equals_one_rank(output: Tensor, name: str, partials: list[Tensor]) -> None:
    """``output`` is bf16, of the float32 all-reduce of the ranks' bf16 ``partials``.

    S is the exact sum of the partials P, and every rounding to bf16 moves a value by at most U of itself. One rank's
    output is off S by U * abs(S). Of several, the addends are off by U * abs(P) each; n - 1 additions in float32 by
    2**-24 of what they add, at most (1 + U) * sum(abs(P)) each; and the last rounding by U of a sum that is
    at most abs(S) and these errors. What this file's float64 sums are off by, 2**-50 of sum(abs(P)), is far less than
    the 2**-24 that is one addition too many below.
    """
    expected = run_shard(name, 1, 0).partial
    magnitude = torch.stack(partials).abs().sum(0)
    before = U * magnitude + len(partials) * 2.0**-24 * (1 + U) * magnitude
    bound = U * expected.abs() + before + U * (expected.abs() + before)
    assert bool(((output.double() - expected.bfloat16().double()).abs() <= bound).all())
    assert bound.max() < 0.1 * expected.abs().max()  # a head that went astray moves far more


def reduced(partials: list[Tensor]) -> Tensor:
    total = torch.zeros_like(partials[0], dtype=torch.float32)
    for partial in partials:
        total += partial.bfloat16().float()
    return total.bfloat16()


@pytest.mark.parametrize("tp", [2, 4, 8])
@pytest.mark.parametrize("name", MODELS)
def test_every_rank_in_turn(name: str, tp: int) -> None:
    whole = run_shard(name, 1, 0)
    shards = [run_shard(name, tp, rank) for rank in range(tp)]
    assert torch.equal(torch.cat([shard.attention for shard in shards], 1), whole.attention)
    assert all(torch.equal(shard.cache, whole.cache) for shard in shards)
    partials = [shard.partial for shard in shards]
    assert_equals_one_rank(reduced(partials), name, partials)
    swapped = torch.cat([shard.attention for shard in shards[::-1]], 1)
    assert not torch.equal(swapped, whole.attention)


def _rank(rank: int, tp: int, folder: str) -> None:
    """One process: its shard of each model, and the all-reduce."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/init", rank=rank, world_size=tp)
    try:
        outputs = {}
        with backend("reference"):
            for name in MODELS:
                total = run_shard(name, tp, rank).partial.bfloat16().float()
                dist.all_reduce(total)
                outputs[name] = total.bfloat16()
        torch.save(outputs, Path(folder) / f"rank{rank}.pt")
    finally:
        dist.destroy_process_group()


@pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch has no gloo")
@pytest.mark.parametrize("tp", [2, 4])
def test_ranks_in_processes_of_their_own(tp: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    mp.spawn(_rank, args=(tp, str(tmp_path)), nprocs=tp)
    outputs = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(tp)]
    for name in MODELS:
        assert all(torch.equal(output[name], outputs[0][name]) for output in outputs)
        partials = [run_shard(name, tp, rank).partial for rank in range(tp)]
        assert_equals_one_rank(outputs[0][name], name, partials)
