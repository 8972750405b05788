"""After warm-up no call compiles, whatever its token count is."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from preattn import formats, v4
from preattn.cases.dsa import DsaQueryCase, NormRopeCase
from preattn.cases.v4 import ProjectCase
from preattn.geometry import geometry
from preattn.kernels import launch
from preattn.policy import Layout, WeightKind
from preattn.warmup import warmup

TOKENS = (1, 2, 15, 16, 17, 33, 257, 4096)


pytestmark = pytest.mark.usefixtures("nothing_compiled")


def _calls(name: str, tp: int, record_name: str, tokens: int, device: str) -> None:
    shard = geometry(name).shard(tp)
    record = formats.record(record_name)
    pool = torch.zeros(6 * record.page_bytes(64), dtype=torch.uint8, device=device)
    cache = formats.cache_view(pool, record, block_size=64)
    query = torch.zeros(tokens, shard.heads, 512, dtype=torch.bfloat16, device=device)
    index = torch.arange(tokens, device=device)
    rotates = shard.query_norm
    v4.query_kv_insert(
        query,
        query[:, 0],
        cache,
        index,
        index,
        torch.zeros(512, 64, device=device),
        record=record_name,
        query_rope=rotates,
        query_norm_eps=1e-6 if rotates else None,
        padded_heads=shard.padded_heads,
        layout="head_major" if rotates else "chunk_interleaved",
    )


@pytest.mark.parametrize(
    ("name", "tp", "record"), [("deepseek-v4.1-flash", 4, "v41_mxfp8"), ("deepseek-v4-flash", 8, "v4_fp8")]
)
def test_no_call_compiles_after_warmup(name: str, tp: int, record: str, device: str) -> None:
    seen: list[tuple[int, int]] = []
    shard = geometry(name).shard(tp)
    warmup(shard, record, device=device, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] == len(seen) > 3
    compiled = launch.compilations()
    for tokens in TOKENS if device == "cuda" else TOKENS[:5]:
        _calls(name, tp, record, tokens, device)
    assert launch.compilations() == compiled
    assert warmup(shard, record, device=device) == 0


@pytest.mark.parametrize(("name", "weight"), [("deepseek-v4-flash", "bf16"), ("deepseek-v4.1-flash", "e4m3")])
def test_no_projection_compiles_after_warmup(name: str, weight: WeightKind, device: str) -> None:
    shard = dataclasses.replace(geometry(name).shard(8), q_rank=128)
    layout: Layout = "head_major" if shard.query_norm else "chunk_interleaved"
    record = shard.records.window[0]
    warmup(shard, weight=weight, device=device)
    compiled = launch.compilations()
    for tokens in (1, 5, 40, 200, 300, 2048) if device == "cuda" else (1, 3):
        for grouped in {False, weight != "bf16"}:
            case = ProjectCase(
                shard.heads,
                shard.padded_heads,
                record=record,
                layout=layout,
                weight=weight,
                norm=shard.query_norm,
                rope=shard.query_norm,
                grouped=grouped,
                rank=128,
            )
            call = case.build(tokens, device)
            call.function(**{**call.arguments, "form": None})
    assert launch.compilations() == compiled


def test_what_was_not_warmed_is_noticed(device: str) -> None:
    warmup(geometry("deepseek-v4.1-flash").shard(8), "v41_mxfp8", device=device)
    compiled = launch.compilations()
    _calls("deepseek-v4-flash", 4, "bf16", 1, device)
    assert launch.compilations() == compiled + 1


@pytest.mark.parametrize(("name", "tp", "record"), [("deepseek-v3.2", 8, "dsa_fp8"), ("glm-5", 8, "fp8")])
def test_no_dsa_call_compiles_after_warmup(name: str, tp: int, record: str, device: str) -> None:
    shard = geometry(name).shard(tp)
    indexer = shard.indexer
    assert indexer is not None and indexer.heads is not None and indexer.rope is not None
    warmup(shard, record, device=device)
    compiled = launch.compilations()
    query = DsaQueryCase(shard.heads, index_heads=indexer.heads, index_pairing=indexer.rope.style, padded_heads=64)
    norm = NormRopeCase(rank=shard.q_rank, record=record, index_pairing=indexer.rope.style)
    for tokens in TOKENS if device == "cuda" else (1, 3):
        for case in (query, norm):
            case.build(tokens, device).run()
    assert launch.compilations() == compiled


def test_options_of_a_deployment_are_warmed_too(device: str) -> None:
    shard = geometry("deepseek-v3.2").shard(8)
    warmup(
        shard,
        "bf16",
        block_size=16,
        norm_dtype=torch.float32,
        index_record="index_fp8_ue8m0",
        index_block_size=64,
        index_weights_dtype=torch.bfloat16,
        rope_output="half_split",
        index_dtype=torch.int32,
        table_dtype=torch.float32,
        device=device,
    )
    compiled = launch.compilations()
    NormRopeCase(
        record="bf16",
        block_size=16,
        index_block_size=64,
        index_record="index_fp8_ue8m0",
        rope_output="half_split",
        weights_dtype=torch.float32,
        index_dtype=torch.int32,
        table_dtype=torch.float32,
    ).build(3, device).run()
    for fp8_query in (False, True):
        DsaQueryCase(
            16,
            index_heads=64,
            padded_heads=64,
            latent="transposed",
            fp8_query=fp8_query,
            rope_output="half_split",
            weights_dtype=torch.bfloat16,
            index_dtype=torch.int32,
            table_dtype=torch.float32,
        ).build(3, device).run()
    assert launch.compilations() == compiled


@pytest.mark.parametrize("name", ["deepseek-v4-pro", "glm-5-next"])
def test_every_preset_warms_by_default(name: str, device: str) -> None:
    warmup(geometry(name).shard(8), device=device)
