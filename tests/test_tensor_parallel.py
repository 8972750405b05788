"""A layer whose heads are spread over ranks: prologue, attention, output projection and all-reduce equal one rank's.

What a rank does, and how far outputs may be apart, is :mod:`preattn.bench.tensor_parallel`'s: here a small layer on the
reference, every rank in turn, and ranks in processes of their own.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from preattn.bench.tensor_parallel import Layer, Shard, all_reduced, output_bound
from preattn.bench.tensor_parallel import run_shard as run
from preattn.dispatch import backend
from preattn.geometry import geometry

TOKENS, OUTPUT_RANK = 4, 8
MODELS = {"flashmla-mega": "deepseek-v4.1-flash", "flashmla-v4": "deepseek-v4-flash"}


@pytest.fixture(autouse=True)
def on_the_reference() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # small tensors: more threads wait for each other
    with backend("reference"):
        yield
    torch.set_num_threads(threads)


@functools.cache
def layer(name: str) -> Layer:
    small = dataclasses.replace(geometry(MODELS[name]), q_rank=32, hidden=48)
    return Layer.random(small, name, output_rank=OUTPUT_RANK)


@functools.cache
def run_shard(name: str, tp: int, rank: int) -> Shard:
    return run(layer(name), tp, rank, TOKENS)


def assert_equals_one_rank(output: Tensor, name: str, partials: list[Tensor]) -> None:
    """``output`` is bf16, of the float32 all-reduce of the ranks' bf16 ``partials``."""
    whole = run_shard(name, 1, 0).partial
    bound = output_bound(whole, partials)
    assert bool(((output.double() - whole.bfloat16().double()).abs() <= bound).all())
    assert bound.max() < 0.1 * whole.abs().max()  # a head that went astray moves far more


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
    assert [group for shard in shards for group in shard.groups] == whole.groups
    assert len(set(whole.groups)) == len(whole.groups)  # a swapped group would show
    assert all(shard.cache == whole.cache for shard in shards)
    partials = [shard.partial for shard in shards]
    assert torch.equal(torch.stack(partials).sum(0), whole.partial)  # exact, as the bound takes it to be
    assert_equals_one_rank(reduced(partials), name, partials)


def _rank(rank: int, tp: int, folder: str) -> None:
    """One process: its shard of each model, and the all-reduce."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/init", rank=rank, world_size=tp)
    try:
        with backend("reference"):
            outputs = {name: all_reduced(run_shard(name, tp, rank).partial) for name in MODELS}
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
