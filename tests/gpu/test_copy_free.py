"""Query workspaces on a GPU: zero tails, captured graphs, layers of a stream in turn, the bits of a plain matmul."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from preattn import dsa, formats, policy, weights
from preattn.cases.base import rope_table
from preattn.geometry import Geometry, geometry
from preattn.layers import V4Prologue
from preattn.policy import WeightKind
from preattn.workspace import QueryWorkspace, project_query

MOST = 600
MODELS = {
    "flashmla-mega": dataclasses.replace(geometry("deepseek-v4.1-flash").shard(2), q_rank=1024),
    "flashmla-v4": geometry("deepseek-v4-flash").shard(4),
}


def layer(name: str, workspace: QueryWorkspace | None, *, seed: int = 0, kind: WeightKind = "bf16") -> V4Prologue:
    model = MODELS[name]
    generator = torch.Generator("cuda").manual_seed(seed)
    rows, rank = model.heads * 512, model.q_rank
    wq_b, scale = torch.randn(rows, rank, generator=generator, device="cuda").bfloat16(), None
    if kind == "e4m3":
        scale = torch.rand(rows // 128, rank // 128, generator=generator, device="cuda") + 0.5
    elif kind == "mx":
        scale = torch.randint(120, 130, (rows, rank // 32), generator=generator, device="cuda").to(torch.uint8)
    record = formats.record(model.records.window[0])
    pool = torch.zeros(16 * record.page_bytes(64), dtype=torch.uint8, device="cuda")
    return V4Prologue(
        geometry=model,
        backend=name,
        wq_b=wq_b if scale is None else wq_b.to(torch.float8_e4m3fn),
        wq_b_scale=scale,
        cache=formats.cache_view(pool, record, block_size=64),
        rope_table=rope_table(1024).cuda(),
        max_tokens=MOST,
        workspace=workspace,
    )


def workspace_of(name: str, *, debug: bool = True) -> QueryWorkspace:
    return QueryWorkspace(MODELS[name], name, MOST, debug=debug)


def step(model: Geometry, tokens: int, seed: int, kind: WeightKind = "bf16") -> tuple[Tensor | None, ...]:
    """q_latent, kv, positions, slots and q_scale of a step."""
    generator = torch.Generator("cuda").manual_seed(seed)
    latent = torch.randn(tokens, model.q_rank, generator=generator, device="cuda").bfloat16()
    kv = torch.randn(tokens, 512, generator=generator, device="cuda").bfloat16()
    order = torch.randperm(1024, generator=generator, device="cuda")
    index = (order[:tokens].clone(), order.flip(0)[:tokens].clone())
    if kind == "bf16":
        return latent, kv, *index, None
    scale = torch.rand(model.q_rank // 128, tokens, generator=generator, device="cuda") + 0.5
    return latent.to(torch.float8_e4m3fn), kv, *index, scale.t()


@pytest.mark.parametrize("kind", policy.WEIGHT_KINDS)
@pytest.mark.parametrize("name", MODELS)
def test_the_tail_stays_zero(name: str, kind: WeightKind) -> None:
    workspace = workspace_of(name)  # verified whenever it is read
    prologue = layer(name, workspace, kind=kind)
    for index, tokens in enumerate((1, 17, 64, 256, 257, MOST, 3, 0)):
        query = prologue.prepare(*step(prologue.geometry, tokens, index, kind))
        assert query.shape == (tokens, 64, 512)
        assert not tokens or query.data_ptr() == workspace.buffer.data_ptr()
    buffer = weights.as_chunks(workspace.buffer) if name == "flashmla-mega" else workspace.buffer[:, None]
    buffer[5, 0, -1, -1] = 1  # the last padding head of some token
    with pytest.raises(RuntimeError, match="of 9 tokens, left a padding head that is not"):
        prologue.prepare(*step(prologue.geometry, 9, 99, kind))


@pytest.mark.parametrize("tokens", [1, 8, 64, 256, 300])
@pytest.mark.parametrize("name", MODELS)
def test_a_step_is_the_padded_copy_to_the_bit(name: str, tokens: int) -> None:
    """With the library's matmul everywhere; with our kernel where it was seen, on an H200."""
    inputs = step(MODELS[name], tokens, 7)
    copied, free = layer(name, None), layer(name, workspace_of(name))
    expected, got = copied.prepare(*inputs), free.prepare(*inputs)
    assert torch.equal(copied.cache, free.cache)
    if torch.cuda.get_device_name() == "NVIDIA H200" or free.explain(tokens).projection == "matmul":
        assert torch.equal(expected.view(torch.int16), got.view(torch.int16))


@pytest.mark.parametrize("tokens", [1, 64, 300])
@pytest.mark.parametrize("kind", policy.WEIGHT_KINDS)
@pytest.mark.parametrize("name", MODELS)
def test_a_captured_step_replays_with_other_inputs(name: str, kind: WeightKind, tokens: int) -> None:
    prologue = layer(name, workspace_of(name, debug=False), kind=kind)
    prologue.warmup()
    static = step(prologue.geometry, tokens, 1, kind)
    prologue.prepare(*static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        query = prologue.prepare(*static)
    junk = [torch.full((1 << 22,), torch.nan, device="cuda") for _ in range(8)]
    del junk
    for seed in (2, 3):
        inputs = step(prologue.geometry, tokens, seed, kind)
        for held, given in zip(static, inputs, strict=True):
            if held is not None:
                held.copy_(given)
        prologue.cache.zero_()
        graph.replay()
        torch.cuda.synchronize()
        replayed, stored = query.clone(), prologue.cache.clone()
        prologue.cache.zero_()
        assert torch.equal(replayed, prologue.prepare(*inputs)) and torch.equal(stored, prologue.cache)


@pytest.mark.parametrize("kind", policy.WEIGHT_KINDS)
@pytest.mark.parametrize("name", MODELS)
def test_layers_of_a_stream_share_a_workspace(name: str, kind: WeightKind) -> None:
    shared = workspace_of(name, debug=False)
    layers = [layer(name, shared, seed=seed, kind=kind) for seed in range(4)]
    own = [layer(name, workspace_of(name, debug=False), seed=seed, kind=kind) for seed in range(4)]
    inputs = step(MODELS[name], 200, 5, kind)
    stream, read = torch.cuda.Stream(), []
    with torch.cuda.stream(stream):
        for prologue in layers:
            read.append(prologue.prepare(*inputs).clone())  # attention's place
    stream.synchronize()
    for prologue, query in zip(own, read, strict=True):
        assert torch.equal(prologue.prepare(*inputs), query)
    assert not torch.equal(read[0], read[1])


def test_what_overlaps_the_workspace_is_refused() -> None:
    workspace = workspace_of("flashmla-mega")
    prologue = layer("flashmla-mega", workspace)
    latent, kv, positions, slots, _ = step(prologue.geometry, 4, 1)
    inside = workspace.buffer[:4].flatten(1)[:, : prologue.geometry.q_rank]
    with pytest.raises(ValueError, match="out: expected memory apart from x"):
        prologue.prepare(inside, kv, positions, slots)
    with pytest.raises(ValueError, match="out: expected memory apart from kv"):
        prologue.prepare(latent, workspace.buffer[:4, 0], positions, slots)


def test_a_packed_query_keeps_its_tail_through_graphs() -> None:
    shard = geometry("deepseek-v3.2").shard(8)
    workspace = QueryWorkspace(shard, "flashmla-sparse", 64)
    w_uk = torch.randn(16, 128, 512, device="cuda").bfloat16()
    q = torch.randn(64, 16, 192, device="cuda").bfloat16()
    positions, table = torch.arange(64, device="cuda"), rope_table(64, dtype=torch.bfloat16).cuda()

    def run() -> Tensor:
        project_query(q[..., :128], w_uk, workspace)
        return dsa.query(q[..., 128:], None, positions, table, padded_heads=64, out=workspace.whole(64)).query

    run()
    graph = torch.cuda.CUDAGraph()
    workspace.debug = False
    with torch.cuda.graph(graph):
        packed = run()
    q.copy_(torch.randn_like(q))
    graph.replay()
    torch.cuda.synchronize()
    workspace.verify("a replay")
    latent = torch.bmm(q[..., :128].transpose(0, 1), w_uk).transpose(0, 1)
    assert torch.equal(packed[:, :16, :512], latent)
    rotated = dsa.query(q[..., 128:], None, positions, table, form="pair").q_pe
    assert torch.equal(packed[:, :16, 512:], rotated)
