"""``project_query``, ``project_query_kv_insert``: ``wq_b`` straight into what attention reads; nothing is copied."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from .. import checks, policy, weights
from ..dispatch import define_op, holding, use_kernels
from ..policy import Layout, Projection, WeightKind
from ..reference import v4 as reference
from .query_kv import HEAD_DIM, RECORDS, _check_kv, _kv_insert_impl, _query_kv_insert_impl

_MX_SCALES = (torch.uint8, torch.float8_e8m0fnu)


def project_query(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    *,
    layout: Layout = "head_major",
    x_scale: Tensor | None = None,
    weight_scale: Tensor | None = None,
    form: str | None = None,
) -> Tensor:
    """The projection alone: ``x @ weight.T`` into the first H heads of ``out``.

    Args:
        x: [T, rank], rows at multiples of 16 bytes: bf16, or e4m3 with ``x_scale``.
        weight: ``wq_b``, [H * 512, rank], of the same dtype. Rows in checkpoint order, but for a bf16 weight and a
            chunk-interleaved ``out``: permuted by :func:`preattn.weights.interleave_query_rows`.
        out: [T, P >= H, 512] bf16, heads and dims contiguous, rows at multiples of 16 bytes. Its heads past H are not
            touched: a :class:`~preattn.workspace.QueryWorkspace` has zeros there.
        layout: ``head_major`` [T, P, 512], or ``chunk_interleaved``: the same storage read as [T, 32, P, 16].
        x_scale: float32, e4m3 only: [T], or [T, rank / 128] for scales of 128 dims of a token.
        weight_scale: e4m3 only: [H * 4, rank / 128] float32, a scale for 128 x 128 of the weight (DeepSeek's
            checkpoints); or [H * 512, rank / 32] UE8M0 (uint8 or float8_e8m0fnu), one for 32 of a row (OCP MX). A
            product of the two scales that overflows float32 is not finite.
        form: :class:`~preattn.policy.Projection`, or None: what was measured faster. ``matmul`` is the library's, and a
            bf16 query is that of the plain ``x @ weight.T`` to the bit. ``kernel`` is our own; e4m3 products are summed
            and scaled a block at a time in float32, so the query lies within a bf16 rounding, and what the
            matrix unit loses in a block, of the exact one.

    Returns:
        ``out``.

    Raises:
        TypeError: a dtype, or an argument that is not a tensor.
        ValueError: a shape, stride, alignment, device or combination that does not fit.
        RuntimeError: the launch is not compiled and the stream is under graph capture (see ``warmup``).
    """
    _check_project_query(x, weight, out, layout, x_scale, weight_scale, form)
    alone = (None, None, None, None, None, None)  # kv, cache, slots, positions, rope_table, record
    interleaved = layout == "chunk_interleaved"
    _project(x, weight, x_scale, _codes(weight_scale), out, *alone, interleaved, None, False, None, form)
    return out


def project_query_kv_insert(
    x: Tensor,
    weight: Tensor,
    kv: Tensor,
    cache: Tensor,
    slots: Tensor,
    positions: Tensor,
    rope_table: Tensor,
    out: Tensor,
    *,
    record: str,
    query_rope: bool,
    query_norm_eps: float | None = None,
    layout: Layout = "head_major",
    x_scale: Tensor | None = None,
    weight_scale: Tensor | None = None,
    kv_scale: Tensor | None = None,
    form: str | None = None,
) -> Tensor:
    """Projection, query and KV half of the prologue: the query latent and the KV latent to what attention reads.

    The result is that of :func:`project_query` and then :func:`~preattn.v4.query_kv_insert` in place, to the bit.
    ``kernel`` does it all in one launch, but for head norms of more than ``policy.FUSED_NORM_TOKENS`` tokens.

    Args are those of the two.

    Returns:
        ``out``.

    Raises:
        TypeError, ValueError, RuntimeError: as the two.
    """
    _check_project_query_kv_insert(
        x,
        weight,
        out,
        layout,
        x_scale,
        weight_scale,
        form,
        kv,
        cache,
        slots,
        positions,
        rope_table,
        record,
        query_rope,
        query_norm_eps,
        kv_scale,
    )
    _project(
        x,
        weight,
        x_scale,
        _codes(weight_scale),
        out,
        kv,
        cache,
        slots,
        positions,
        rope_table,
        record,
        layout == "chunk_interleaved",
        query_norm_eps,
        query_rope,
        kv_scale,
        form,
    )
    return out


# -- checks -------------------------------------------------------------------------------------------------


@checks.remembered
def _check_project_query(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    layout: Layout,
    x_scale: Tensor | None,
    weight_scale: Tensor | None,
    form: str | None,
) -> None:
    _check_projection(x, weight, out, layout, x_scale, weight_scale, form)


@checks.remembered
def _check_project_query_kv_insert(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    layout: Layout,
    x_scale: Tensor | None,
    weight_scale: Tensor | None,
    form: str | None,
    kv: Tensor,
    cache: Tensor,
    slots: Tensor,
    positions: Tensor,
    rope_table: Tensor,
    record: str,
    query_rope: bool,
    query_norm_eps: float | None,
    kv_scale: Tensor | None,
) -> None:
    _check_projection(x, weight, out, layout, x_scale, weight_scale, form)
    _check_kv(kv, cache, slots, positions, rope_table, record, kv_scale, x.shape[0], x.device)
    if kv.dtype != torch.bfloat16:
        raise TypeError(f"kv: expected dtype torch.bfloat16; got {kv.dtype}")
    checks.flag("query_rope", query_rope)
    if query_norm_eps is not None:
        checks.number("query_norm_eps", query_norm_eps, least=0)
    if layout == "chunk_interleaved" and (query_rope or query_norm_eps is not None):
        raise ValueError(
            "layout: expected head_major with query_rope or query_norm_eps; got chunk_interleaved, whose attention "
            "kernel norms and rotates the query itself"
        )


def _check_projection(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    layout: Layout,
    x_scale: Tensor | None,
    weight_scale: Tensor | None,
    form: str | None,
) -> None:
    """Check the operands, and that they can be multiplied in the form asked for."""
    checks.tensor("x", x, (torch.bfloat16, torch.float8_e4m3fn), (None, None))
    tokens, rank = x.shape
    checks.tensor("weight", weight, (x.dtype,), (None, rank), x.device)
    rows = weight.shape[0]
    if rows < HEAD_DIM or rows % HEAD_DIM:
        raise ValueError(f"weight: expected a positive multiple of 512 rows, 512 a head; got {rows}")
    for name, tensor in (("x", x), ("weight", weight)):
        checks.rows(name, tensor)
        if tensor.shape[0] > 1 and tensor.stride(0) < rank:
            raise ValueError(f"{name}: expected rows that do not overlap; got strides {tensor.stride()}")
    checks.tensor("out", out, (torch.bfloat16,), (tokens, None, HEAD_DIM), x.device)
    if out.shape[1] < rows // HEAD_DIM:
        raise ValueError(f"out: expected at least the {rows // HEAD_DIM} heads of weight; got {out.shape[1]}")
    checks.rows("out", out, inner=2)
    checks.apart("out", out)
    checks.word("layout", layout, policy.LAYOUTS)
    kind = _check_scales(x, weight, x_scale, weight_scale)
    if form is not None and form not in policy.PROJECTIONS:
        raise ValueError(f"form: expected one of {', '.join(policy.PROJECTIONS)} or None; got {form!r}")
    matmul, kernel = _forms(x, weight, out, x_scale, kind, interleaved=layout == "chunk_interleaved")
    if not matmul and not kernel:
        raise ValueError(
            f"x, weight, out: expected rows less than {checks.LIBRARY_STRIDE} elements apart where the rank "
            f"is not a multiple of 64; got {x.stride(0)}, {weight.stride(0)}, {out.stride(0)} at rank {x.shape[1]}"
        )
    if (form == Projection.MATMUL and not matmul) or (form == Projection.KERNEL and not kernel):
        needs = (
            "bf16 operands, or block-scaled e4m3 ones in head-major layout with a rank that is a multiple of 512, "
            "column-major x_scale [T, rank / 128] and T a multiple of 4, rows less than "
            f"{checks.LIBRARY_STRIDE} elements apart"
            if form == Projection.MATMUL
            else "a rank that is a multiple of 64"
        )
        raise ValueError(f"form: expected {needs} for {form}; got {kind} operands of rank {x.shape[1]}, {layout}")


def _check_scales(x: Tensor, weight: Tensor, x_scale: Tensor | None, weight_scale: Tensor | None) -> WeightKind:
    """Check the scales of e4m3 operands, and that bf16 has none."""
    (tokens, rank), device = x.shape, x.device
    if x.dtype == torch.bfloat16:
        for name, scale in (("x_scale", x_scale), ("weight_scale", weight_scale)):
            if scale is not None:
                raise ValueError(f"{name}: expected None for bf16 operands; got a tensor")
        return "bf16"
    if rank % 128 or not rank:
        raise ValueError(f"x: expected a rank that is a positive multiple of 128 in e4m3; got {rank}")
    if not isinstance(x_scale, Tensor):
        raise TypeError(f"x_scale: expected a torch.Tensor for e4m3 operands; got {type(x_scale).__name__}")
    grouped = x_scale.dim() == 2
    checks.tensor("x_scale", x_scale, (torch.float32,), (tokens, rank // 128) if grouped else (tokens,), device)
    return weight_kind(weight, weight_scale)


def weight_kind(weight: Tensor, weight_scale: object, name: str = "weight_scale") -> WeightKind:
    """What an e4m3 weight [rows, rank] is, by its scales.

    Raises:
        TypeError, ValueError: they are not those of :func:`project_query`; ``name`` is what the message calls them.
    """
    checks.tensor("weight", weight, (torch.float8_e4m3fn,), (None, None))
    rows, rank = weight.shape
    if rank % 128 or not rank:
        raise ValueError(f"weight: expected a rank that is a positive multiple of 128 in e4m3; got {rank}")
    if not isinstance(weight_scale, Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor for e4m3 operands; got {type(weight_scale).__name__}")
    checks.tensor(name, weight_scale, (torch.float32, *_MX_SCALES), (None, None), weight.device)
    checks.contiguous(name, weight_scale)
    kind = _kind(weight_scale)
    shape = (rows // 128, rank // 128) if kind == "e4m3" else (rows, rank // 32)
    if weight_scale.shape != shape:
        raise ValueError(
            f"{name}: expected shape {list(shape)} of {weight_scale.dtype}; got {list(weight_scale.shape)}"
        )
    return kind


def _forms(
    x: Tensor, weight: Tensor, out: Tensor, x_scale: Tensor | None, kind: WeightKind, *, interleaved: bool
) -> tuple[bool, bool]:
    """Whether the library's matmul takes these operands, and whether our kernel does."""
    tokens, rank = x.shape
    columns = x_scale is None or (x_scale.dim() == 2 and x_scale.stride() == (1, tokens))
    layout: Layout = "chunk_interleaved" if interleaved else "head_major"
    multiplies = columns and policy.library_multiplies(kind, layout, tokens, rank)
    near = all([checks.library_reaches(operand) for operand in (x, weight, out)])
    return multiplies and near, rank > 0 and rank % 64 == 0


@lru_cache
def _scales_blocks(index: int) -> bool:
    """Whether torch's matmul scales blocks on a CUDA device: its library does so on Hopper alone."""
    return torch.cuda.get_device_capability(index)[0] == 9


def _chosen(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    x_scale: Tensor | None,
    kind: WeightKind,
    form: str | None,
    *,
    interleaved: bool,
    norm: bool,
) -> Projection:
    """The form that runs: chosen in the op, where the device is real, and not when a call of it is traced.

    Raises:
        ValueError: ``form`` asks for what this device does not have.
    """
    scales = kind == "bf16" or not x.is_cuda or _scales_blocks(x.device.index)
    if form == Projection.MATMUL and not scales:
        raise ValueError(
            f"form: expected kernel for e4m3 operands on {torch.cuda.get_device_name(x.device)}; got {form}"
        )
    if form is not None:
        return Projection(form)
    matmul, kernel = _forms(x, weight, out, x_scale, kind, interleaved=interleaved)
    matmul = matmul and scales
    device = policy.current_device(x.device.index if x.is_cuda else None)
    return policy.projection(device, kind, tokens=x.shape[0], norm=norm, matmul=matmul, kernel=kernel)[0]


def _codes(weight_scale: Tensor | None) -> Tensor | None:
    """UE8M0 scales as uint8, which is what kernels and reference read."""
    if weight_scale is not None and weight_scale.dtype == torch.float8_e8m0fnu:
        return weight_scale.view(torch.uint8)
    return weight_scale


# -- registered op ------------------------------------------------------------------------------------------


def _project_impl(
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor | None,
    weight_scale: Tensor | None,
    out: Tensor,
    kv: Tensor | None,
    cache: Tensor | None,
    slots: Tensor | None,
    positions: Tensor | None,
    rope_table: Tensor | None,
    record: str | None,
    interleaved: bool,
    norm_eps: float | None,
    rope: bool,
    kv_scale: Tensor | None,
    form: str | None,
) -> None:
    written = [("out", out)] if cache is None else [("out", out), ("cache", cache)]
    for name, tensor in (("x", x), ("weight", weight), *written):
        checks.aligned(name, tensor)
    for name, tensor in written:
        for other_name, other in (
            ("x", x),
            ("weight", weight),
            ("kv", kv),
            ("x_scale", x_scale),
            ("weight_scale", weight_scale),
        ):
            if other is not None:
                checks.disjoint(name, tensor, other_name, other)
    if cache is not None:
        checks.disjoint("cache", cache, "out", out)
    if kv is not None:
        checks.aligned("kv", kv)
    kind = _kind(weight_scale)
    chosen = _chosen(x, weight, out, x_scale, kind, form, interleaved=interleaved, norm=norm_eps is not None)
    kernel = chosen == Projection.KERNEL
    fused = kernel and (norm_eps is None or x.shape[0] <= policy.FUSED_NORM_TOKENS)
    if not use_kernels(x):
        reference.project(x, weight, x_scale, weight_scale, out, interleaved=interleaved)
    elif not kernel:
        _matmul(x, weight, x_scale, weight_scale, out, interleaved)
    elif x.shape[0]:
        from ..kernels import v4 as kernels

        norms = fused and norm_eps is not None
        path = policy.project_path(kind, norm=norms)
        kernels.launch_project(
            x,
            weight,
            x_scale,
            weight_scale,
            out,
            *((kv, cache, slots, positions, rope_table) if fused else (None, None, None, None, None)),
            record=RECORDS[record] if fused and record is not None else None,
            interleaved=interleaved,
            norm_eps=norm_eps if fused else None,
            rope=rope and fused,
            kv_scale=kv_scale if fused else None,
            config=policy.launch_config(x.device.index, path, x.shape[0]),
        ).run(x.device)
        if fused:
            return
    if kv is None or cache is None or slots is None or positions is None or rope_table is None or record is None:
        return
    step = (slots, positions, rope_table)
    if not rope and norm_eps is None:
        _kv_insert_impl(kv, cache, *step, record, kv_scale, None, 0.0)
    else:
        query = out[:, : weight.shape[0] // HEAD_DIM]
        _query_kv_insert_impl(query, kv, cache, *step, out, record, False, norm_eps, rope, None, kv_scale, False)


def _matmul(
    x: Tensor, weight: Tensor, x_scale: Tensor | None, weight_scale: Tensor | None, out: Tensor, interleaved: bool
) -> None:
    """The library's matmul; only its output's strides differ from those of a plain projection."""
    if holding():  # nothing of it is ours to compile
        return
    if x_scale is not None and not x.is_cuda:  # torch scales blocks on GPUs alone
        reference.project(x, weight, x_scale, weight_scale, out, interleaved=interleaved)
        return
    heads = weight.shape[0] // HEAD_DIM
    if interleaved:
        live = weights.as_chunks(out)[:, :, :heads].permute(1, 0, 2, 3).flatten(2)
        chunks = weights.query_chunks(weight)
        torch.bmm(x.expand(len(chunks), *x.shape), chunks.transpose(1, 2), out=live)
        return
    live = out[:, :heads].flatten(1)
    if x_scale is None or weight_scale is None:
        torch.mm(x, weight.t(), out=live)
    else:
        torch._scaled_mm(x, weight.t(), scale_a=x_scale, scale_b=weight_scale.t(), out_dtype=torch.bfloat16, out=live)


def _kind(weight_scale: Tensor | None) -> WeightKind:
    if weight_scale is None:
        return "bf16"
    return "e4m3" if weight_scale.dtype == torch.float32 else "mx"


_project = define_op(
    "v4_project_query_kv_insert(Tensor x, Tensor weight, Tensor? x_scale, Tensor? weight_scale, Tensor(a!) out, "
    "Tensor? kv, Tensor(b!)? cache, Tensor? slots, Tensor? positions, Tensor? rope_table, "
    "str? record, bool interleaved, float? norm_eps, bool rope, Tensor? kv_scale, str? form) -> ()",
    _project_impl,
)
