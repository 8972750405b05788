"""A layer's prologue is its functional ops, and attention cannot tell which way the query came.

Operands of matmuls are small integers times a power of two, so that every sum is exact and equality does not depend on
an order of additions. Everything runs on the reference but for the tests that name kernels.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from preattn import dsa, formats, policy, v4, weights
from preattn.cases.base import activations, as_bytes, rope_table
from preattn.dispatch import backend
from preattn.geometry import Geometry, geometry
from preattn.kernels import launch
from preattn.layers import DsaPrologue, IndexerParts, V4Prologue
from preattn.reference.attention import Selection, dequantised, mega_attention, sparse_mla
from preattn.workspace import QueryWorkspace

V41 = dataclasses.replace(geometry("deepseek-v4.1-flash"), q_rank=64)
V4 = dataclasses.replace(geometry("deepseek-v4-flash"), q_rank=48)
V32 = geometry("deepseek-v3.2")
assert V32.indexer is not None
V32 = dataclasses.replace(V32, q_rank=64, indexer=dataclasses.replace(V32.indexer, top_k=4))
TOKENS, MOST, BLOCK = 5, 7, 16
TABLE = rope_table(64)


@pytest.fixture(autouse=True)
def on_the_reference() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # small tensors: more threads wait for each other
    with backend("reference"):
        yield
    torch.set_num_threads(threads)


def exact(*shape: int, seed: int, device: str = "cpu") -> Tensor:
    integers = torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(seed))
    return (integers * 2.0**-3).bfloat16().to(device)


def rows(*shape: int, seed: int, device: str = "cpu") -> Tensor:
    return activations(*shape, dtype=torch.bfloat16, seed=seed, device=device)


def a_cache(record: str, dim: int = 512, device: str = "cpu") -> Tensor:
    found = formats.record(record, dim)
    pool = torch.full((2 * found.page_bytes(BLOCK),), 0xA5, dtype=torch.uint8, device=device)
    return formats.cache_view(pool, found, block_size=BLOCK)


def slots_of(seed: int) -> Tensor:
    return torch.randperm(2 * BLOCK, generator=torch.Generator().manual_seed(seed))[:TOKENS]


# -- V4 / V4.1 -------------------------------------------------------------------------------------------------


def v4_layer(
    model: Geometry, name: str, *, seed: int = 1, record: str | None = None, device: str = "cpu", **more: Any
) -> V4Prologue:
    scale = torch.tensor([0.37], device=device) if record == "fp8" else None
    return V4Prologue(
        geometry=model,
        backend=name,
        wq_b=exact(model.heads * 512, model.q_rank, seed=seed, device=device),
        cache=a_cache(record or ("v4_fp8" if model.query_norm else "v41_mxfp8"), device=device),
        rope_table=TABLE.to(device),
        max_tokens=MOST,
        record=record,
        kv_scale=scale,
        query_scale_inv=None if scale is None else 1 / scale,
        **more,
    )


def v4_step(model: Geometry, device: str = "cpu", seed: int = 2) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    step = (exact(TOKENS, model.q_rank, seed=seed), rows(TOKENS, 512, seed=seed + 1), torch.arange(TOKENS) + 9)
    return tuple(x.to(device) for x in (*step, slots_of(seed)))  # type: ignore[return-value]


def attention(layer: V4Prologue, query: Tensor, slots: Tensor, *, layout: policy.Layout | None = None) -> Tensor:
    """Mega attention over a causal window of 3 tokens and up to 4 selected compressed records, as bytes."""
    model = layer.geometry
    layout = layout or ("chunk_interleaved" if layer.agreement.form == "chunk_interleaved" else "head_major")
    window = torch.stack([torch.cat([slots.new_full((3,), -1), slots])[t + 1 : t + 4] for t in range(TOKENS)])
    compressed_record = "v41_nvfp4" if model.name.startswith("deepseek-v4.1") else "v4_fp8"
    compressed = a_cache(compressed_record)
    found = formats.record(compressed_record)
    formats.store(compressed, found, torch.arange(8), formats.encode(found, rows(8, 512, seed=11).float()))
    picked = torch.tensor([[1, 0, -1, 7], [2, 2, 3, -1], [-1, -1, -1, -1], [4, 5, 6, 7], [0, -1, 3, 1]])
    sink = torch.randn(model.heads, generator=torch.Generator().manual_seed(12))
    codes, scales = mega_attention(
        query,
        torch.arange(TOKENS) + 9,
        TABLE,
        [
            Selection(layer.cache, layer.agreement.record, window, layer.kv_scale),
            Selection(compressed, compressed_record, picked),
        ],
        sink,
        heads=model.heads,
        layout=layout,
        softmax_scale=512**-0.5,
        query_scale=None if layer.query_scale_inv is None else 1 / layer.query_scale_inv,
    )
    assert dequantised(codes, scales).isfinite().all() and (codes.float() != 0).float().mean() > 0.9
    return torch.cat([as_bytes(codes), as_bytes(scales)])


def plain_query(layer: V4Prologue, x: Tensor, kv: Tensor, positions: Tensor, slots: Tensor) -> Tensor:
    """The functional op on the plain projection, without padding: [T, H, 512]."""
    interleaved = layer.agreement.form == "chunk_interleaved"
    return v4.query_kv_insert(
        (x @ layer.weight.t()).unflatten(1, (-1, 512)),
        kv,
        layer.cache,
        slots,
        positions,
        TABLE,
        record=layer.agreement.record,
        query_rope=not interleaved,
        query_norm_eps=layer.geometry.eps if layer.geometry.query_norm else None,
        layout="chunk_interleaved" if interleaved else "head_major",
        query_scale_inv=layer.query_scale_inv,
        kv_scale=layer.kv_scale,
    )


V4_LAYERS = [
    *[(V41.shard(tp), "flashmla-mega", None) for tp in (1, 2, 4, 8)],
    (V4.shard(2), "flashmla-v4", None),
    (V4.shard(8), "flashmla-v4", None),
    (V4, "flashmla-v4", None),
    (V41.shard(4), "flashmla-v4", None),
    (V4.shard(8), "flashmla-v4", "fp8"),
    (V4, "flashmla-v4", "fp8"),
]


@pytest.mark.parametrize(
    ("model", "name", "record"), V4_LAYERS, ids=[f"{m.name}-tp{m.tp}-{n}-{r}" for m, n, r in V4_LAYERS]
)
def test_v4_attention_cannot_tell(model: Geometry, name: str, record: str | None) -> None:
    x, kv, positions, slots = v4_step(model)
    workspace = QueryWorkspace(model, name, MOST, device="cpu", record=record, debug=True)
    padded, fresh, plain = (v4_layer(model, name, record=record, **more) for more in ({"workspace": workspace}, {}, {}))
    query = padded.prepare(x, kv, positions, slots)
    assert query.data_ptr() == workspace.buffer.data_ptr()
    assert query.shape == (TOKENS, padded.agreement.padded_heads, 512)
    workspace.verify("the step")
    again = fresh.prepare(x, kv, positions, slots)
    unpadded = plain_query(plain, x, kv, positions, slots)
    assert again.dtype == query.dtype and torch.equal(as_bytes(again), as_bytes(query))
    assert torch.equal(as_bytes(padded.cache), as_bytes(plain.cache))
    assert torch.equal(as_bytes(fresh.cache), as_bytes(plain.cache))
    expected = attention(plain, unpadded, slots)
    assert torch.equal(attention(padded, query, slots), expected)
    assert torch.equal(attention(fresh, again, slots), expected)


@pytest.mark.parametrize(("model", "name"), [(V41.shard(4), "flashmla-mega"), (V4.shard(4), "flashmla-v4")])
def test_padding_heads_never_reach_the_output(model: Geometry, name: str) -> None:
    x, kv, positions, slots = v4_step(model)
    layer = v4_layer(model, name)
    query = layer.prepare(x, kv, positions, slots)
    expected = attention(layer, query, slots)
    tail = weights.as_chunks(query)[:, :, model.heads :] if name == "flashmla-mega" else query[:, model.heads :]
    assert tail.numel() and not tail.any()
    tail.fill_(torch.nan)
    assert torch.equal(attention(layer, query, slots), expected)
    live = weights.as_chunks(query)[1, 3, 2] if name == "flashmla-mega" else query[1, 2]
    live += 1  # and the live heads do
    assert not torch.equal(attention(layer, query, slots), expected)


def test_attention_rotates_as_the_prologue_does() -> None:
    model = V41.shard(2)
    x, kv, positions, slots = v4_step(model)
    outputs = []
    for name in ("flashmla-mega", "flashmla-v4"):
        layer = v4_layer(model, name, workspace=QueryWorkspace(model, name, MOST, device="cpu", record="v41_mxfp8"))
        outputs.append(attention(layer, layer.prepare(x, kv, positions, slots), slots))
    assert torch.equal(*outputs)


def test_mega_attention_writes_as_the_formula_says() -> None:
    """Against attention spelled out head by head: one record, whose value is the whole output, but for the sink."""
    model = V41.shard(4)
    x, kv, positions, slots = v4_step(model)
    layer = v4_layer(model, "flashmla-mega")
    query = layer.prepare(x, kv, positions, slots)
    own = Selection(layer.cache, "v41_mxfp8", slots[:, None])
    codes, scales = mega_attention(
        query, positions, TABLE, [own], None, heads=16, layout="chunk_interleaved", softmax_scale=1.0
    )
    record = formats.record("v41_mxfp8")
    value = formats.decode(record, formats.load(layer.cache, record, slots))
    cos, sin = TABLE[positions, :32].double(), TABLE[positions, 32:].double()
    even, odd = value[:, 448::2].double(), value[:, 449::2].double()
    value[:, 448::2], value[:, 449::2] = (even * cos + odd * sin).float(), (odd * cos - even * sin).float()
    output = dequantised(codes, scales)
    head, dim = torch.arange(8)[:, None], torch.arange(512)
    spread = output[:, :, (dim // 32) * 256 + head * 32 + dim % 32]  # [T, 2 groups, 8 heads, 512]
    wanted = value[:, None, None].expand_as(spread)
    # e4m3 under a scale of its block: half a step is 2**-4 of a value, or 2**-10 of the scale, at most amax / 224
    bound = wanted.abs() * 2.0**-4 + wanted.unflatten(-1, (16, 32)).abs().amax(-1).repeat_interleave(32, -1) * 2.0**-17
    assert ((spread - wanted).abs() <= bound).all()


@pytest.mark.parametrize(("model", "name"), [(V41.shard(2), "flashmla-mega"), (V4.shard(4), "flashmla-v4")])
def test_layers_share_a_workspace(model: Geometry, name: str) -> None:
    workspace = QueryWorkspace(model, name, MOST, device="cpu", debug=True)
    for seed in (21, 31, 41):
        x, kv, positions, slots = v4_step(model, seed=seed)
        sharing, alone = (v4_layer(model, name, seed=seed, workspace=w) for w in (workspace, None))
        query = sharing.prepare(x, kv, positions, slots)
        assert query.data_ptr() == workspace.buffer.data_ptr()
        expected = attention(alone, alone.prepare(x, kv, positions, slots), slots)
        assert torch.equal(attention(sharing, query, slots), expected)
    workspace.verify("three layers")


@pytest.mark.usefixtures("nothing_compiled")
@pytest.mark.parametrize(("model", "name"), [(V41.shard(8), "flashmla-mega"), (V4.shard(8), "flashmla-v4")])
def test_a_warm_v4_layer_compiles_nothing(model: Geometry, name: str, device: str) -> None:
    step = v4_step(model)
    reference = v4_layer(model, name)
    expected = reference.prepare(*step)
    with backend(None):
        for workspace in (None, QueryWorkspace(model, name, MOST, device=device, debug=True)):
            layer = v4_layer(model, name, device=device, workspace=workspace)
            layer.warmup()
            compiled = launch.compilations()
            query = layer.prepare(*v4_step(model, device))
            assert launch.compilations() == compiled
            assert torch.equal(as_bytes(query), as_bytes(expected))
            assert torch.equal(as_bytes(layer.cache), as_bytes(reference.cache))


# -- DSA -------------------------------------------------------------------------------------------------------

DSA_LAYERS = [
    (V32.shard(8), "flashmla-sparse", "dsa_fp8"),
    (V32.shard(2), "flashmla-sparse", "bf16"),
    (V32.shard(8), "flashinfer-sparse-sm90", "bf16"),
    (V32.shard(8), "flashinfer-sparse-trtllm", "fp8"),
    (V32.shard(8), "flashinfer-sparse-trtllm", "bf16"),
]
DSA_IDS = [f"{n}-tp{m.tp}-{r}" for m, n, r in DSA_LAYERS]


def dsa_layer(
    model: Geometry, name: str, record: str, *, seed: int = 1, indexer: bool = True, device: str = "cpu", **more: Any
) -> DsaPrologue:
    scale = torch.tensor([0.37], device=device) if record == "fp8" else None
    parts = IndexerParts(
        weight=torch.randn(128, generator=torch.Generator().manual_seed(seed + 3)).to(device),
        bias=torch.randn(128, generator=torch.Generator().manual_seed(seed + 4)).to(device),
        cache=a_cache("index_fp8", device=device),
        softmax_scale=128**-0.5,
        head_scale=0.125,
    )
    return DsaPrologue(
        geometry=model,
        backend=name,
        cache=a_cache(record, 576, device),
        rope_table=TABLE.bfloat16().to(device),
        max_tokens=MOST,
        record=record,
        kv_scale=scale,
        query_scale=scale,
        w_uk=exact(model.heads, model.nope_dim, 512, seed=seed, device=device),
        q_weight=rows(model.q_rank, seed=seed + 1, device=device),
        kv_weight=rows(512, seed=seed + 2, device=device),
        indexer=parts if indexer else None,
        **more,
    )


def run_dsa(layer: DsaPrologue, *, seed: int = 2) -> tuple[dsa.Latents, dsa.Query, Tensor, Tensor]:
    """Both halves of a step; with the top-k buffer and the slots."""
    model, device = layer.geometry, str(layer.cache.device)
    positions, slots = (torch.arange(TOKENS) + 9).to(device), slots_of(seed).to(device)
    row = rows(TOKENS, model.q_rank + 512 + 64, seed=seed, device=device)
    top_k = torch.zeros(TOKENS + 1, 4, dtype=torch.int32, device=device)
    index: dict[str, Tensor] = {}
    index_query: tuple[Tensor, ...] = ()
    if layer.indexer is not None:
        index = {"index_key": rows(TOKENS, 128, seed=seed + 1, device=device), "top_k": top_k}
        index_query = (
            rows(TOKENS, 64, 128, seed=seed + 2, device=device),
            rows(TOKENS, 64, seed=3, device=device).float(),
        )
    latents = layer.norm_and_store(*row.split([model.q_rank, 512, 64], -1), positions, slots, **index)
    q = exact(TOKENS, model.heads, model.head_dim, seed=seed + 3, device=device)
    return latents, layer.prepare(q, positions, *index_query), top_k, slots


def mla(layer: DsaPrologue, query: dsa.Query, slots: Tensor) -> Tensor:
    """Sparse MLA over a top-k of 4 with places left empty, as bytes."""
    assert query.query is not None
    places = torch.tensor([[0, -1, -1, -1], [1, 0, -1, -1], [0, 2, 1, -1], [3, 1, 0, 2], [4, 0, 3, 1]])
    picked = torch.where(places < 0, -1, slots[places])
    selection = Selection(layer.cache, layer.agreement.record, picked, layer.kv_scale)
    out = sparse_mla(
        query.query,
        query.q_pe,
        selection,
        heads=layer.geometry.heads,
        softmax_scale=192**-0.5,
        query_scale=layer.query_scale,
    )
    assert out.shape == (TOKENS, layer.geometry.heads, 512) and out.isfinite().all()
    return as_bytes(out)


def functional_dsa(layer: DsaPrologue, *, seed: int = 2) -> tuple[dsa.Latents, dsa.Query, Tensor, Tensor]:
    """The same step by the ops themselves: dense latent, no padding."""
    model, parts = layer.geometry, layer.indexer
    assert parts is not None
    positions, slots = torch.arange(TOKENS) + 9, slots_of(seed)
    row = rows(TOKENS, model.q_rank + 512 + 64, seed=seed)
    top_k = torch.zeros(TOKENS + 1, 4, dtype=torch.int32)
    latents = dsa.norm_rope_insert(
        *row.split([model.q_rank, 512, 64], -1),
        layer.cache,
        slots,
        positions,
        layer.rope_table,
        record=layer.agreement.record,
        q_weight=layer.q_weight,
        kv_weight=layer.kv_weight,
        kv_scale=layer.kv_scale,
        index_key=rows(TOKENS, 128, seed=seed + 1),
        index_weight=parts.weight,
        index_bias=parts.bias,
        index_cache=parts.cache,
        index_pairing="half_split",
        top_k=top_k,
    )
    q = exact(TOKENS, model.heads, model.head_dim, seed=seed + 3)
    query = dsa.query(
        q[..., 128:],
        torch.einsum("thn,hnd->thd", q[..., :128].float(), layer.w_uk.float()).bfloat16(),
        positions,
        layer.rope_table,
        form="pair" if layer.agreement.form == "pair" else "packed",
        query_scale=layer.query_scale,
        index_query=rows(TOKENS, 64, 128, seed=seed + 2),
        index_weights=rows(TOKENS, 64, seed=3).float(),
        index_pairing="half_split",
        softmax_scale=128**-0.5,
        head_scale=0.125,
    )
    return latents, query, top_k, slots


@pytest.mark.parametrize(
    ("model", "name", "record", "absorb_kernel"),
    [*[(*layer, False) for layer in DSA_LAYERS], (*DSA_LAYERS[3], True)],
    ids=[*DSA_IDS, f"{DSA_IDS[3]}-absorb_kernel"],
)
def test_dsa_attention_cannot_tell(
    model: Geometry, name: str, record: str, absorb_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    absorb, casts = dsa.absorb_query, set[bool]()

    def absorbed(*operands: Tensor, query_scale: Tensor | None = None, **options: Any) -> Tensor:
        casts.add(query_scale is not None)
        return absorb(*operands, query_scale=query_scale, **options)

    monkeypatch.setattr(dsa, "absorb_query", absorbed)
    if absorb_kernel:
        monkeypatch.setattr(policy, "ABSORB_KERNEL_TOKENS", TOKENS)
        monkeypatch.setattr(policy, "device", lambda name: policy.Device(name, measured=True))
    workspaces = [None]
    if name != "flashinfer-sparse-sm90":
        workspaces += [QueryWorkspace(model, name, MOST, device="cpu", record=record, debug=True)]
    plain = dsa_layer(model, name, record)
    latents, unpadded, top_k, slots = functional_dsa(plain)
    expected = mla(plain, unpadded, slots)
    for workspace in workspaces:
        layer = dsa_layer(model, name, record, workspace=workspace)
        got_latents, query, got_top_k, _ = run_dsa(layer)
        assert torch.equal(got_latents.q_latent, latents.q_latent) and torch.equal(got_top_k, top_k)
        assert query.query is not None and unpadded.query is not None
        assert query.query.shape[1] == layer.agreement.padded_heads
        live, tail = query.query.split([model.heads, query.query.shape[1] - model.heads], 1)
        assert torch.equal(as_bytes(live), as_bytes(unpadded.query)) and not as_bytes(tail).any()
        for mine, theirs in zip(query[1:], unpadded[1:], strict=True):
            assert (mine is None) == (theirs is None)
            assert mine is None or torch.equal(as_bytes(mine), as_bytes(theirs))  # type: ignore[arg-type]
        assert layer.indexer is not None and plain.indexer is not None
        assert torch.equal(as_bytes(layer.cache), as_bytes(plain.cache))
        assert torch.equal(as_bytes(layer.indexer.cache), as_bytes(plain.indexer.cache))
        assert torch.equal(mla(layer, query, slots), expected)
        if workspace is not None:
            assert query.query.data_ptr() == workspace.buffer.data_ptr()
            workspace.verify("the step")
        if tail.numel():
            tail.fill_(torch.nan)
            assert torch.equal(mla(layer, query, slots), expected)
    assert casts == {absorb_kernel}  # that kernel casts as it multiplies, and torch.bmm cannot


def test_packed_and_pair_attend_alike() -> None:
    outputs = []
    for name in ("flashmla-sparse", "flashinfer-sparse-sm90"):
        layer = dsa_layer(V32.shard(8), name, "bf16")
        _, query, _, slots = run_dsa(layer)
        outputs.append(mla(layer, query, slots))
    assert torch.equal(*outputs)


def test_dsa_layers_share_a_workspace_and_a_top_k() -> None:
    model, name = V32.shard(4), "flashmla-sparse"
    workspace = QueryWorkspace(model, name, MOST, device="cpu", debug=True)
    for seed, indexer in ((21, True), (31, False), (41, False)):
        sharing, alone = (
            dsa_layer(model, name, "dsa_fp8", seed=seed, indexer=indexer, workspace=w) for w in (workspace, None)
        )
        _, query, top_k, slots = run_dsa(sharing, seed=seed)
        _, other, _, _ = run_dsa(alone, seed=seed)
        assert (query.index_query is not None) == indexer and bool((top_k == -1).any()) == indexer
        assert torch.equal(mla(sharing, query, slots), mla(alone, other, slots))
    workspace.verify("three layers")


def test_a_layer_without_rope() -> None:
    model = dataclasses.replace(geometry("glm-5-next").shard(8), q_rank=64)
    layer = DsaPrologue(
        geometry=model,
        backend="flashinfer-sparse-trtllm",
        cache=a_cache("bf16"),
        rope_table=None,
        max_tokens=MOST,
        w_uk=exact(8, 256, 512, seed=1),
        q_weight=rows(64, seed=2),
        kv_weight=rows(512, seed=3),
    )
    positions, q = torch.arange(TOKENS), exact(TOKENS, 8, 256, seed=4)
    nothing = torch.empty(TOKENS, 0, dtype=torch.bfloat16)
    layer.norm_and_store(rows(TOKENS, 64, seed=5), rows(TOKENS, 512, seed=6), nothing, positions, slots_of(7))
    query = layer.prepare(q, positions)
    assert query.query is not None
    assert torch.equal(query.query, torch.einsum("thn,hnd->thd", q.float(), layer.w_uk.float()).bfloat16())


@pytest.mark.usefixtures("nothing_compiled")
@pytest.mark.parametrize(("model", "name", "record"), [DSA_LAYERS[0], DSA_LAYERS[3]], ids=[DSA_IDS[0], DSA_IDS[3]])
def test_a_warm_dsa_layer_compiles_nothing(model: Geometry, name: str, record: str, device: str) -> None:
    _, expected, _, _ = run_dsa(dsa_layer(model, name, record))
    with backend(None):
        workspace = QueryWorkspace(model, name, MOST, device=device, record=record, debug=True)
        layer = dsa_layer(model, name, record, device=device, workspace=workspace)
        layer.warmup()
        compiled = launch.compilations()
        _, query, _, _ = run_dsa(layer)
        assert launch.compilations() == compiled
    for mine, theirs in zip(query, expected, strict=True):
        assert (mine is None) == (theirs is None)
        assert mine is None or torch.equal(as_bytes(mine), as_bytes(theirs))  # type: ignore[arg-type]


# -- plans and refusals ----------------------------------------------------------------------------------------


def test_a_plan_says_what_is_copied() -> None:
    model, tokens = V41.shard(2), 4096
    workspace = QueryWorkspace(model, "flashmla-mega", MOST, device="cpu")
    free = v4_layer(model, "flashmla-mega", workspace=workspace).explain(tokens, device_name="NVIDIA H200")
    copied = v4_layer(model, "flashmla-mega").explain(tokens, device_name="NVIDIA H200")
    assert free.form == policy.Form.KV_ONLY and free.bytes["query written"] == 0
    assert "writes 32 of 64 heads where attention reads them: nothing is copied" in free.reason
    assert free.workspace_bytes == workspace.bytes and free.copied == copied.bytes == copied.copied
    assert copied.form == policy.Form.ONE_LAUNCH and copied.bytes["query written"] == tokens * 65536
    assert free.expected_us and copied.expected_us and free.expected_us < copied.expected_us / 10

    rotated = v4_layer(
        V41.shard(2), "flashmla-v4", workspace=QueryWorkspace(V41.shard(2), "flashmla-v4", MOST, device="cpu")
    ).explain(tokens)
    assert (
        rotated.reason.endswith("they are read, rotated and written in place")
        and rotated.bytes["query written"] == tokens * 32 * 128
    )
    whole = v4_layer(V4, "flashmla-v4").explain(tokens)
    assert "as the projection leaves them: they are read, normed and rotated and written in place" in whole.reason
    assert whole.bytes["query written"] == tokens * 64 * 1024 and whole.expected_us is None

    packed = dsa_layer(V32.shard(8), "flashmla-sparse", "dsa_fp8", indexer=False).explain(tokens)
    assert "copied into a new query of 64 heads" in packed.reason and packed.bytes["indexer query read"] == 0
    assert packed.bytes["query written"] == tokens * 64 * 1152
    sharing = dsa_layer(
        V32.shard(8),
        "flashmla-sparse",
        "dsa_fp8",
        workspace=QueryWorkspace(V32.shard(8), "flashmla-sparse", MOST, device="cpu"),
    ).explain(tokens)
    assert "nothing is concatenated" in sharing.reason and sharing.bytes["query written"] == tokens * 16 * 128


def changed(layer: Any, **changes: Any) -> Any:
    """Build a layer again with something else."""
    given = {f.name: getattr(layer, f.name) for f in dataclasses.fields(layer) if f.init}
    if isinstance(layer, V4Prologue):
        model = layer.geometry
        given["wq_b"] = exact(model.heads * 512, model.q_rank, seed=1)
    return type(layer)(**given | changes)


V41_WHO = r"deepseek-v4\.1-flash with flashmla-mega"
V32_WHO = r"deepseek-v3\.2 with flashmla-sparse"


@pytest.mark.parametrize(
    ("family", "changes", "error", "message"),
    [
        ("v4", {"geometry": V32}, ValueError, r"geometry: deepseek-v3\.2 with flashmla-mega: expected a v4 model"),
        ("v4", {"geometry": V4}, ValueError, r"backend: deepseek-v4-flash with flashmla-mega: expected one that takes"),
        ("v4", {"backend": "nothing"}, ValueError, "backend: expected one of .*got 'nothing'"),
        ("v4", {"record": "bf16"}, ValueError, f"record: {V41_WHO}: expected v41_mxfp8; got bf16"),
        ("v4", {"cache": a_cache("v4_fp8")}, ValueError, rf"cache: {V41_WHO}: expected \[num_blocks, .*, 528\]"),
        ("v4", {"rope_table": None}, TypeError, rf"rope_table: {V41_WHO}: expected a torch\.Tensor; got NoneType"),
        ("v4", {"rope_table": TABLE[:, :32]}, ValueError, rf"rope_table: {V41_WHO}: expected shape \[any, 64\]"),
        ("v4", {"kv_scale": torch.ones(1)}, ValueError, f"kv_scale: {V41_WHO}: expected None for v41_mxfp8 records"),
        ("v4", {"query_scale_inv": torch.ones(1)}, ValueError, f"query_scale_inv: {V41_WHO}: expected None for bf16"),
        ("v4", {"wq_b": exact(512, 64, seed=1)}, ValueError, rf"wq_b: {V41_WHO}: expected shape \[16384, 64\]"),
        ("v4", {"wq_b": torch.zeros(16384, 64)}, TypeError, rf"wq_b: {V41_WHO}: expected dtype torch\.bfloat16"),
        ("v4", {"max_tokens": 0}, ValueError, f"max_tokens: {V41_WHO}: expected at least 1; got 0"),
        (
            "v4",
            {"workspace": QueryWorkspace(V41.shard(4), "flashmla-mega", 9, device="cpu")},
            ValueError,
            f"workspace: {V41_WHO}: expected chunk_interleaved bf16, 32 of 64 heads of 512 dims, on cpu; got .* 16 of",
        ),
        (
            "v4",
            {"workspace": QueryWorkspace(V41.shard(2), "flashmla-mega", 2, device="cpu")},
            ValueError,
            f"workspace: {V41_WHO}: expected at least 7 tokens; got 2",
        ),
        (
            "dsa",
            {"geometry": V41},
            ValueError,
            r"geometry: deepseek-v4\.1-flash with .*: expected a dsa model; got a v4",
        ),
        (
            "dsa",
            {"backend": "flashmla-v4"},
            ValueError,
            "backend: .* with flashmla-v4: expected one for the dsa family",
        ),
        ("dsa", {"w_uk": exact(2, 128, 512, seed=1)}, ValueError, rf"w_uk: {V32_WHO}: expected shape \[16, 128, 512\]"),
        ("dsa", {"q_weight": rows(8, seed=1)}, ValueError, rf"q_weight: {V32_WHO}: expected shape \[64\]"),
        ("dsa", {"kv_weight": rows(8, seed=1)}, ValueError, rf"kv_weight: {V32_WHO}: expected shape \[512\]"),
        ("dsa", {"query_scale": torch.ones(1)}, ValueError, f"query_scale: {V32_WHO}: expected None for bf16 queries"),
        (
            "dsa",
            {"geometry": dataclasses.replace(V32.shard(8), indexer=None)},
            ValueError,
            f"indexer: {V32_WHO}: expected None",
        ),
        (
            "dsa",
            {"workspace": QueryWorkspace(V32.shard(4), "flashmla-sparse", 9, device="cpu")},
            ValueError,
            f"workspace: {V32_WHO}: expected packed bf16, 16 of 64 heads of 576 dims, on cpu; got packed bf16, 32",
        ),
    ],
)
def test_what_does_not_fit_is_refused_at_construction(
    family: str, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    layer = v4_layer(V41.shard(2), "flashmla-mega")
    other = dsa_layer(V32.shard(8), "flashmla-sparse", "dsa_fp8")
    with pytest.raises(error, match=message):
        changed(layer if family == "v4" else other, **changes)


def test_an_indexer_that_does_not_fit_is_refused() -> None:
    layer = dsa_layer(V32.shard(8), "flashmla-sparse", "dsa_fp8")
    assert layer.indexer is not None
    for changes, message in (
        ({"record": "index_mxfp4"}, r"indexer\.record: .* expected index_fp8 or index_fp8_ue8m0; got 'index_mxfp4'"),
        ({"weight": torch.ones(64)}, rf"indexer\.weight: {V32_WHO}: expected shape \[128\]; got \[64\]"),
        ({"cache": a_cache("dsa_fp8")}, rf"indexer\.cache: {V32_WHO}: expected \[num_blocks"),
    ):
        with pytest.raises(ValueError, match=message):
            changed(layer, indexer=dataclasses.replace(layer.indexer, **changes))


def test_a_step_that_does_not_fit_is_refused() -> None:
    model = V41.shard(2)
    x, kv, positions, slots = v4_step(model)
    layer = v4_layer(model, "flashmla-mega")
    with pytest.raises(ValueError, match=f"q_latent: {V41_WHO}: expected at most 7 tokens; got 8"):
        layer.prepare(exact(8, 64, seed=1), kv, positions, slots)
    with pytest.raises(ValueError, match=rf"q_latent: {V41_WHO}: expected shape \[any, 64\]; got \[5, 32\]"):
        layer.prepare(x[:, :32], kv, positions, slots)
    with pytest.raises(ValueError, match=r"kv: expected shape \[5, 512\]"):
        layer.prepare(x, kv[:3], positions, slots)
    with pytest.raises(dataclasses.FrozenInstanceError):
        layer.max_tokens = 3  # type: ignore[misc]
    for indexer, message in ((True, "expected a tensor: the layer has an indexer"), (False, "expected None without")):
        other = dsa_layer(V32.shard(8), "flashmla-sparse", "dsa_fp8", indexer=indexer)
        q, key = exact(TOKENS, 16, 192, seed=1), None if indexer else rows(TOKENS, 64, 128, seed=2)
        with pytest.raises(ValueError, match=f"index_query: {V32_WHO}: {message}"):
            other.prepare(q, positions, key)


def test_references_refuse() -> None:
    query = torch.zeros(1, 64, 512, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="heads: expected a multiple of 8, whole output groups; got 4"):
        mega_attention(query, slots_of(1)[:1], TABLE, [], None, heads=4, layout="head_major", softmax_scale=1.0)
    with pytest.raises(ValueError, match="heads: expected 1 to 64, the heads of query; got 65"):
        sparse_mla(query, None, Selection(query, "bf16", query), heads=65, softmax_scale=1.0)
