"""Every rank's shard of a layer in turn on one GPU, summed: what one rank with all heads makes."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch

from preattn.bench.tensor_parallel import Layer, Shard, compare, passed, run_shard
from preattn.geometry import geometry

MODELS = {"flashmla-mega": "deepseek-v4.1-flash", "flashmla-v4": "deepseek-v4-flash"}
TOKENS = (1, 70)
"""A step that our projection kernel takes, and one that the library's matmul takes where heads are normed."""
DEVICE = "cuda"


@functools.cache
def layer(name: str) -> Layer:
    small = dataclasses.replace(geometry(MODELS[name]), q_rank=128, hidden=48)
    return Layer.random(small, name, output_rank=8)


@functools.cache
def whole(name: str, tokens: int) -> Shard:
    return run_shard(layer(name), 1, 0, tokens, device=DEVICE)


def summed(shards: list[Shard]) -> torch.Tensor:
    """What an all-reduce in float32 makes of their bf16 outputs."""
    partials = torch.stack([shard.partial.bfloat16().float() for shard in shards])
    return partials.to(DEVICE).sum(0).bfloat16().cpu()


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("tp", [2, 4, 8])
@pytest.mark.parametrize("name", MODELS)
def test_the_shards_sum_to_one_rank(name: str, tp: int, tokens: int) -> None:
    shards = [run_shard(layer(name), tp, rank, tokens, device=DEVICE) for rank in range(tp)]
    for row in compare(whole(name, tokens), shards, [summed(shards)] * tp):
        assert passed(row), row


def test_a_shard_in_another_place_is_found() -> None:
    name, tokens = "flashmla-mega", 1
    shards = [run_shard(layer(name), 2, rank, tokens, device=DEVICE) for rank in (1, 0)]
    rows = compare(whole(name, tokens), shards, [summed(shards)] * 2)
    assert not any([passed(row) for row in rows])
