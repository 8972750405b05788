"""Projections of random operands, against exact sums; what they refuse.

The registry's cases hold all forms and configurations to the same bits, on operands whose sums are exact. Here they are
not, and the bound is derived.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from preattn import formats, policy, v4, weights
from preattn.cases.base import rope_table
from preattn.cases.v4 import ProjectCase
from preattn.dispatch import backend
from preattn.geometry import geometry
from preattn.layers import V4Prologue
from preattn.policy import Device, LaunchConfig, Layout, Projection
from preattn.reference.v4 import dequantised_weight
from preattn.workspace import QueryWorkspace, project_query

TOKENS, HEADS, PADDED, RANK = 19, 2, 4, 256
U = 2.0**-8
"""Half an ulp of bf16, relative."""


@dataclasses.dataclass
class Operands:
    """What is multiplied, and its exact product [T, H, 512] with the sum of the magnitudes that it is a sum of."""

    x: Tensor
    weight: Tensor
    scales: dict[str, Tensor]
    exact: Tensor
    bound: Tensor


def operands(kind: str, *, grouped: bool, seed: int, device: str) -> Operands:
    generator = torch.Generator().manual_seed(seed)
    x, weight = torch.randn(TOKENS, RANK, generator=generator), torch.randn(HEADS * 512, RANK, generator=generator)
    if kind == "bf16":
        x, weight, scales = x.bfloat16(), weight.bfloat16(), {}
        a, b = x.double(), weight.double()
    else:
        x, weight = (3 * x).to(torch.float8_e4m3fn), weight.to(torch.float8_e4m3fn)
        x_scale = torch.rand((TOKENS, RANK // 128) if grouped else (TOKENS,), generator=generator) + 0.5
        if kind == "e4m3":
            weight_scale = torch.rand(HEADS * 4, RANK // 128, generator=generator) + 0.5
        else:
            weight_scale = torch.randint(0, 255, (HEADS * 512, RANK // 32), generator=generator).to(torch.uint8)
            weight_scale = weight_scale // 16 + 119  # 2**-8 to 2**7
        scales = {"x_scale": x_scale, "weight_scale": weight_scale}
        wide = x_scale if grouped else x_scale[:, None].expand(-1, RANK // 128)
        a = x.double() * wide.double().repeat_interleave(128, 1)
        b = dequantised_weight(weight, weight_scale)
    # A matrix unit sums 16 or 32 products at a time: aligned to the largest, truncated 13 bits below its leading one,
    # the running sum among them (what is seen of Hopper's e4m3 units; those of bf16 and the interpreter keep more).
    # So each of 33 terms is off by at most 2**-13 of the largest, which the running sum does not exceed by more than
    # the magnitudes so far. Scaling and adding the blocks in float32, and rounding to bf16, come on top.
    products = (a[:, None] * b[None]).unflatten(-1, (-1, 32))
    magnitude = products.abs().sum(-1).cumsum(-1)
    units = (33 * 2.0**-13 * magnitude).sum(-1) if kind != "bf16" else 2.0**-20 * magnitude.sum(-1)
    exact = products.sum((-1, -2))
    bound = units + 2.0**-20 * magnitude[..., -1] + U * (exact.abs() + units)
    shape = (TOKENS, HEADS, 512)
    moved = {name: scale.to(device) for name, scale in scales.items()}
    return Operands(x.to(device), weight.to(device), moved, exact.reshape(shape), bound.reshape(shape))


def by_head(out: Tensor, layout: Layout) -> Tensor:
    """The live heads [T, H, 512] in head-major order."""
    if layout == "head_major":
        return out[:, :HEADS]
    return weights.as_chunks(out)[:, :, :HEADS].transpose(1, 2).flatten(2)


@pytest.mark.parametrize("config", [(16, 64, 4, 4), (64, 128, 4, 3)], ids=str)
@pytest.mark.parametrize("layout", ["head_major", "chunk_interleaved"])
@pytest.mark.parametrize(("kind", "grouped"), [("bf16", False), ("e4m3", True), ("e4m3", False), ("mx", False)])
def test_a_product_lies_within_the_bound(
    kind: policy.WeightKind, grouped: bool, layout: Layout, config: tuple[int, ...], device: str, seed: int
) -> None:
    given = operands(kind, grouped=grouped, seed=seed, device=device)
    interleaves = kind == "bf16" and layout == "chunk_interleaved"
    weight = weights.interleave_query_rows(given.weight) if interleaves else given.weight
    out = torch.full((TOKENS, PADDED, 512), 7.0, device=device).bfloat16()
    path = policy.project_path(kind, norm=False)
    with backend("triton"), policy.assume(Device("candidate", launch={path: LaunchConfig(*config)})):
        v4.project_query(given.x, weight, out, layout=layout, **given.scales, form="kernel")
    error = (by_head(out, layout).cpu().double() - given.exact).abs()
    assert bool((error <= given.bound).all())
    assert error.norm() <= 2.5e-3 * given.exact.norm()  # bf16 alone makes 1.7e-3 of it
    tail = out[:, HEADS:] if layout == "head_major" else weights.as_chunks(out)[:, :, HEADS:]
    assert bool((tail == 7).all())
    if device == "cpu":  # the specification, within one rounding
        other = torch.zeros_like(out)
        with backend("reference"):
            v4.project_query(given.x, weight, other, layout=layout, **given.scales)
        error = (by_head(other, layout).double() - given.exact).abs()
        assert bool((error <= U * given.exact.abs() + 2.0**-20 * given.bound).all()) or kind == "bf16"


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_every_e4m3_code_and_every_scale_is_multiplied_exactly(rows: int, device: str) -> None:
    """x is the identity: the product is the weight itself, every code of it under scales of every magnitude."""
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    codes = torch.where((codes & 0x7F) == 0x7F, 0, codes).to(torch.uint8)  # NaN codes would fill their row's sums
    weight = codes.roll(rows).repeat(512, 1)[:, :128].contiguous().view(torch.float8_e4m3fn)
    weight_scale = (torch.arange(512 * 4) % 200 + 20).reshape(512, 4).to(torch.uint8)
    x = torch.eye(128).to(torch.float8_e4m3fn)
    out = torch.zeros(128, 1, 512, dtype=torch.bfloat16, device=device)
    arguments = [tensor.to(device) for tensor in (x, weight, out)]
    scales = {"x_scale": torch.ones(128, device=device), "weight_scale": weight_scale.to(device)}
    with backend("triton"):
        v4.project_query(*arguments[:2], out, **scales, form="kernel")
    exact = dequantised_weight(weight, weight_scale).t().float()
    assert torch.equal(out[:, 0].cpu(), formats.to_bf16(exact))


def test_ue8m0_scales_at_the_ends(device: str) -> None:
    weight = torch.ones(512, 128).to(torch.float8_e4m3fn)
    weight_scale = torch.full((512, 4), 127, dtype=torch.uint8)
    weight_scale[0], weight_scale[1], weight_scale[2] = 0, 254, 255
    x = torch.zeros(16, 128)
    x[:, 0] = 1
    out = torch.zeros(16, 1, 512, dtype=torch.bfloat16, device=device)
    scales = {"x_scale": torch.ones(16, device=device), "weight_scale": weight_scale.to(device)}
    with backend("triton"):
        v4.project_query(x.to(torch.float8_e4m3fn).to(device), weight.to(device), out, **scales, form="kernel")
    assert out[:, 0, 0].tolist() == [2.0**-127] * 16 and out[:, 0, 1].tolist() == [2.0**127] * 16
    assert bool(out[:, 0, 2].isnan().all()) and bool((out[:, 0, 3:] == 1).all())


# -- layers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["e4m3", "mx"])
@pytest.mark.parametrize("name", ["flashmla-v4", "flashmla-mega"])
def test_a_layer_with_an_fp8_weight_is_the_one_with_its_values(name: str, kind: str, device: str) -> None:
    """The values are exact in bf16 here, so that both layers' queries and caches are the same bits."""
    base = geometry("deepseek-v4-flash" if name == "flashmla-v4" else "deepseek-v4.1-flash")
    model = dataclasses.replace(base.shard(8), q_rank=128)
    case = ProjectCase(model.heads, model.padded_heads, weight="e4m3" if kind == "e4m3" else "mx", rank=128)
    a = case.build(9, device).arguments
    weight = dequantised_weight(a["weight"].cpu(), a["weight_scale"].cpu()).bfloat16().to(device)
    latent = (a["x"].float() * a["x_scale"][:, None]).bfloat16()
    record = formats.record(model.records.window[0])
    queries, caches = [], []
    for wq_b, scale, x, x_scale in (
        (weight, None, latent, None),
        (a["weight"], a["weight_scale"], a["x"], a["x_scale"]),
    ):
        pool = torch.zeros(4 * record.page_bytes(64), dtype=torch.uint8, device=device)
        layer = V4Prologue(
            geometry=model,
            backend=name,
            wq_b=wq_b,
            wq_b_scale=scale,
            cache=formats.cache_view(pool, record, block_size=64),
            rope_table=rope_table(512).to(device),
            max_tokens=9,
            workspace=QueryWorkspace(model, name, 9, device=device, debug=True),
        )
        slots = torch.arange(9, device=device) * 5
        queries.append(layer.prepare(x, a["kv"], a["positions"], slots, x_scale).clone())
        caches.append(pool)
        assert layer.explain(9).projection is not None
    assert torch.equal(*queries) and torch.equal(*caches)


# -- refusals --------------------------------------------------------------------------------------------------

_BF16, _E4M3 = ProjectCase(2, 4), ProjectCase(2, 4, weight="e4m3", grouped=True)
_MX = ProjectCase(2, 4, weight="mx")


def _as(dtype: torch.dtype):  # type: ignore[no-untyped-def]
    return lambda tensor: tensor.to(dtype)


@pytest.mark.parametrize(
    ("case", "name", "change", "error", "message"),
    [
        (_BF16, "x", _as(torch.float16), TypeError, "x: expected dtype torch.bfloat16 or torch.float8_e4m3fn; got"),
        (_BF16, "x", lambda x: None, TypeError, "x: expected a torch.Tensor; got NoneType"),
        (_BF16, "weight", _as(torch.float8_e4m3fn), TypeError, "weight: expected dtype torch.bfloat16; got"),
        (_BF16, "weight", lambda w: w[:500], ValueError, "weight: expected a positive multiple of 512 rows.*got 500"),
        (_BF16, "weight", lambda w: w[:1].expand(1024, 256), ValueError, "weight: expected rows that do not overlap"),
        (_BF16, "out", lambda o: o[:, :1], ValueError, "out: expected at least the 2 heads of weight; got 1"),
        (_BF16, "out", _as(torch.float16), TypeError, "out: expected dtype torch.bfloat16; got torch.float16"),
        (_BF16, "kv", _as(torch.float16), TypeError, "kv: expected dtype torch.bfloat16; got torch.float16"),
        (_BF16, "layout", lambda _: "rows", ValueError, "layout: expected one of head_major, chunk_interleaved; got"),
        (_BF16, "form", lambda _: "fast", ValueError, "form: expected one of matmul, kernel or None; got 'fast'"),
        (_BF16, "x_scale", lambda _: torch.ones(5), ValueError, "x_scale: expected None for bf16 operands; got a ten"),
        (_E4M3, "x_scale", lambda _: None, TypeError, "x_scale: expected a torch.Tensor for e4m3 operands; got None"),
        (_E4M3, "x_scale", lambda s: s[:, :1], ValueError, r"x_scale: expected shape \[5, 2\]; got \[5, 1\]"),
        (_E4M3, "weight_scale", lambda _: None, TypeError, "weight_scale: expected a torch.Tensor for e4m3 operands"),
        (_E4M3, "weight_scale", lambda s: s[:4].clone(), ValueError, r"weight_scale: expected shape \[8, 2\] of"),
        (_E4M3, "form", lambda _: "matmul", ValueError, "form: expected bf16 operands, or block-scaled.*for matmul"),
        (_MX, "weight_scale", lambda s: s[:, :4].clone(), ValueError, r"weight_scale: expected shape \[1024, 8\] of"),
        (_MX, "form", lambda _: "matmul", ValueError, "form: expected bf16 operands, or block-scaled.*got mx operands"),
        (_BF16, "query_rope", lambda _: 1, TypeError, "query_rope: expected a bool; got int"),
        (_BF16, "query_norm_eps", lambda _: -1.0, ValueError, "query_norm_eps: expected a finite number of at least 0"),
        (_BF16, "record", lambda _: "v9", ValueError, "record: expected one of .*; got 'v9'"),
    ],
)
def test_refusals(case, name, change, error, message, device) -> None:  # type: ignore[no-untyped-def]
    call = case.build(5, device)
    before = {key: tensor.clone() for key, tensor in call.memory.items()}
    call.arguments[name] = change(call.arguments[name])
    with pytest.raises(error, match=message):
        call.run()
    assert all(torch.equal(before[key].view(torch.uint8), call.memory[key].view(torch.uint8)) for key in before)


def test_what_overlaps_or_does_not_fit_is_refused(device: str) -> None:
    call = ProjectCase(2, 4, rank=48).build(5, device)
    with pytest.raises(ValueError, match="form: expected a rank that is a multiple of 64 for kernel"):
        call.run()
    call = _BF16.build(5, device)
    call.arguments |= {"layout": "chunk_interleaved", "query_rope": True}
    with pytest.raises(ValueError, match="layout: expected head_major with query_rope or query_norm_eps"):
        call.run()
    call = _BF16.build(5, device)
    call.arguments["x"] = call.arguments["out"].flatten(1)[:, :256]
    with pytest.raises(ValueError, match="out: expected memory apart from x"):
        call.run()
    workspace = QueryWorkspace(geometry("deepseek-v4.1-flash").shard(8), "flashmla-mega", 9, device=device)
    with pytest.raises(ValueError, match="weight: expected 4096 rows for 8 heads; got 1024"):
        project_query(_BF16.build(5, device).arguments["x"], _BF16.build(5, device).arguments["weight"], workspace)


def test_what_is_measured_decides_the_form() -> None:
    h200, other = policy.device("NVIDIA H200"), Device("other")
    assert policy.projection(h200, "bf16", tokens=256)[0] == Projection.KERNEL
    assert policy.projection(h200, "bf16", tokens=257)[0] == Projection.MATMUL
    assert policy.projection(h200, "bf16", tokens=1, norm=True)[0] == Projection.MATMUL
    for tokens, form, said in (
        (16, Projection.KERNEL, "one launch"),
        (17, Projection.KERNEL, "normed by the next launch"),
        (128, Projection.KERNEL, "normed by the next launch"),
        (129, Projection.MATMUL, "library"),
    ):
        chosen, reason = policy.projection(h200, "e4m3", tokens=tokens, norm=True)
        assert chosen == form and said in reason
    assert policy.projection(other, "bf16", tokens=1)[0] == Projection.MATMUL
    assert policy.projection(
        h200, "mx", tokens=9000, matmul=policy.library_multiplies("mx", "head_major", 9000, 1024)
    ) == (
        Projection.KERNEL,
        "no library matmul takes these operands and writes where attention reads",
    )
    takes = policy.library_multiplies
    assert not takes("e4m3", "chunk_interleaved", 8, 1024) and not takes("e4m3", "head_major", 9, 1024)
    assert takes("e4m3", "head_major", 8, 1536) and not takes("e4m3", "head_major", 8, 1280)  # V4.1's rank
    assert policy.projection(other, "e4m3", tokens=512)[0] == Projection.KERNEL


def test_a_choice_is_not_traced(device: str) -> None:
    """``torch.compile`` takes the default form, which is chosen in the op."""
    call = dataclasses.replace(_BF16, rope=True).build(5, device)
    arguments = {**call.arguments, "form": None}
    eager = call.run()["out"]
    call.memory["out"].zero_()

    def step(x: Tensor) -> Tensor:
        return v4.project_query_kv_insert(**{**arguments, "x": x})

    torch.compile(step, fullgraph=True, backend="aot_eager")(arguments["x"])
    heads = call.memory["out"][:, :HEADS].contiguous().view(torch.uint8).cpu().flatten()
    expected = eager.view(5, PADDED, 1024)[:, :HEADS].flatten()
    assert torch.equal(heads, expected)
