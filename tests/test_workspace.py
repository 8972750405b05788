"""Zero-tailed query buffers, the weight permutations, and projections that write where attention reads.

Operands are small integers, so that every sum is exact and equality does not depend on an order of additions.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from preattn import dsa, v4, weights
from preattn.geometry import geometry
from preattn.workspace import QueryWorkspace, project_query

V41 = dataclasses.replace(geometry("deepseek-v4.1-flash"), q_rank=64)
V4 = geometry("deepseek-v4-flash")
V32 = geometry("deepseek-v3.2")


def integers(*shape: int, seed: int) -> torch.Tensor:
    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


# -- permutations ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [1, 8, 20, 64])
def test_query_rows_go_where_the_formula_says(heads: int) -> None:
    standard = torch.arange(heads * 512)
    fused = weights.interleave_query_rows(standard[:, None])[:, 0]
    h, d = standard // 512, standard % 512
    assert torch.equal(fused[(d // 16) * (heads * 16) + h * 16 + d % 16], standard)
    assert torch.equal(weights.deinterleave_query_rows(fused[:, None])[:, 0], standard)


def test_output_columns_go_where_the_formula_says() -> None:
    standard = torch.arange(8 * 512)
    fused = weights.interleave_output_columns(standard[None])[0]
    h, d = standard // 512, standard % 512
    assert torch.equal(fused[(d // 32 * 8 + h) * 32 + d % 32], standard)
    assert torch.equal(weights.deinterleave_output_columns(fused[None])[0], standard)


def test_block_scales_stay_with_their_rows_and_columns(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-8, 9, (3 * 512, 256), generator=generator).float()
    scales = 2.0 ** torch.randint(-3, 4, (12, 2), generator=generator)
    whole = codes * scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
    fused = weights.interleave_query_rows(codes)
    fused_scales = weights.interleave_query_scales(scales).repeat_interleave(16, 0).repeat_interleave(128, 1)
    assert torch.equal(fused * fused_scales, weights.interleave_query_rows(whole))

    codes = torch.randint(-8, 9, (128, 4096), generator=generator).float()
    scales = 2.0 ** torch.randint(-3, 4, (1, 32), generator=generator)
    whole = codes * scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
    fused_scales = weights.interleave_output_scales(scales).repeat_interleave(128, 0).repeat_interleave(32, 1)
    assert torch.equal(
        weights.interleave_output_columns(codes) * fused_scales, weights.interleave_output_columns(whole)
    )


@pytest.mark.parametrize(
    ("function", "shape", "message"),
    [
        (weights.interleave_query_rows, (500, 8), "weight: expected a positive multiple of 512 rows.*got 500"),
        (weights.interleave_query_scales, (6, 8), "scales: expected a positive multiple of 4 rows.*got 6"),
        (weights.interleave_output_columns, (8, 512), "weight: expected 4096 columns, 8 heads of 512; got 512"),
        (weights.interleave_output_scales, (8, 4), "scales: expected 32 columns"),
        (weights.as_chunks, (2, 3, 500), r"query: expected \[T, P, 512\]"),
    ],
)
def test_permutations_refuse(function, shape, message) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=message):
        function(torch.zeros(shape))


# -- projections -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_an_interleaved_projection_is_the_padded_copy(tp: int) -> None:
    shard = V41.shard(tp)
    workspace = QueryWorkspace(shard, "flashmla-mega", 9, device="cpu", debug=True)
    x, weight = integers(5, 64, seed=1), weights.interleave_query_rows(integers(shard.heads * 512, 64, seed=2))
    query = project_query(x, weight, workspace)
    plain = (x @ weight.t()).view(5, shard.heads, 512)
    assert torch.equal(query, v4.pad_query(plain, 64, layout="chunk_interleaved"))
    assert query.data_ptr() == workspace.buffer.data_ptr() == workspace.live(5).data_ptr()
    standard = (x @ weights.deinterleave_query_rows(weight).t()).view(5, shard.heads, 512)
    by_head = weights.as_chunks(query)[:, :, : shard.heads].transpose(1, 2).flatten(2)
    assert torch.equal(by_head, standard)


def test_a_head_major_projection_is_the_padded_copy() -> None:
    shard = V4.shard(4)
    workspace = QueryWorkspace(shard, "flashmla-v4", 9, device="cpu", debug=True)
    x, weight = integers(5, 48, seed=1), integers(shard.heads * 512, 48, seed=2)
    query = project_query(x, weight, workspace)
    assert torch.equal(query, v4.pad_query((x @ weight.t()).view(5, shard.heads, 512), 64))


def test_a_packed_projection_leaves_the_tail_to_the_query_op() -> None:
    shard = V32.shard(8)
    workspace = QueryWorkspace(shard, "flashmla-sparse", 9, device="cpu", debug=True)
    q_nope, w_uk = integers(5, 16, 128, seed=1), integers(16, 128, 512, seed=2)
    packed = project_query(q_nope, w_uk, workspace)
    latent = torch.einsum("thn,hnd->thd", q_nope.float(), w_uk.float()).bfloat16()
    assert packed.shape == (5, 64, 576)
    assert torch.equal(packed[:, :16, :512], latent) and torch.equal(workspace.live(5), latent)
    q_pe, positions, table = integers(5, 16, 64, seed=3), torch.arange(5), torch.zeros(8, 64)
    table[:, :32] = 1.0
    query = dsa.query(q_pe, None, positions, table, padded_heads=64, out=packed).query
    assert query is packed and torch.equal(packed[:, :16, 512:], q_pe)
    workspace.verify("the step")


def test_layers_share_a_workspace_in_order() -> None:
    workspace = QueryWorkspace(V41.shard(2), "flashmla-mega", 9, device="cpu")
    first, second = (weights.interleave_query_rows(integers(32 * 512, 64, seed=seed)) for seed in (1, 2))
    x = integers(7, 64, seed=3)
    one = project_query(x, first, workspace).clone()
    two = project_query(x[:4], second, workspace)
    assert two.data_ptr() == workspace.buffer.data_ptr()
    assert not torch.equal(one[:4], two) and torch.equal(one[4:], workspace.buffer[4:7])


def test_a_touched_tail_is_found_and_named() -> None:
    workspace = QueryWorkspace(V41.shard(2), "flashmla-mega", 9, device="cpu", debug=True)
    workspace.view(9)
    weights.as_chunks(workspace.buffer)[3, 7, 40, 5] = -0.0  # any bit counts
    with pytest.raises(RuntimeError, match=r"step 2, of 2 tokens, left a padding head .* first at \(3, 7, 8, 5\)"):
        workspace.view(2)
    quiet = QueryWorkspace(V41.shard(2), "flashmla-mega", 9, device="cpu")
    weights.as_chunks(quiet.buffer)[3, 7, 40, 5] = 1.0
    quiet.view(2)  # without debug nothing is read


def test_sizes_and_refusals() -> None:
    workspace = QueryWorkspace(V32.shard(8), "flashmla-sparse", 100, device="cpu")
    assert workspace.bytes == 100 * 64 * 576 * 2
    with pytest.raises(
        ValueError, match=r"backend: deepseek-v3\.2 with flashinfer-sparse-sm90: expected one that takes"
    ):
        QueryWorkspace(V32, "flashinfer-sparse-sm90", 4, device="cpu")
    with pytest.raises(ValueError, match="max_tokens: expected at least 1; got 0"):
        QueryWorkspace(V32, "flashmla-sparse", 0, device="cpu")
    with pytest.raises(ValueError, match="tokens: expected 0 to 100; got 101"):
        workspace.view(101)
    x = integers(4, 64, seed=1)
    interleaved = QueryWorkspace(V41.shard(2), "flashmla-mega", 9, device="cpu")
    with pytest.raises(ValueError, match=r"weight: expected shape \[any, 64\]; got \[16384, 32\]"):
        project_query(x, integers(16384, 32, seed=1), interleaved)
    with pytest.raises(TypeError, match=r"x: expected dtype .* or torch\.float8_e4m3fn; got torch\.float32"):
        project_query(x.float(), integers(16384, 64, seed=1), interleaved)
    fp8 = QueryWorkspace(V32, "flashinfer-sparse-trtllm", 4, device="cpu", record="fp8")
    with pytest.raises(TypeError, match=r"workspace: expected dtype torch\.bfloat16; got torch\.float8_e4m3fn"):
        project_query(x, x, fp8)


def test_a_gpu_that_is_not_there_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="device: expected a device that this machine has, as cpu; got cuda, and no"):
        QueryWorkspace(V41.shard(2), "flashmla-mega", 9)
