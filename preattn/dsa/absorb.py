"""``absorb_query``: ``W_UK`` into the query, straight into the front of the packed buffer."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import checks, policy
from ..dispatch import define_op, use_kernels
from ..reference import dsa as reference
from .arguments import LATENT_DIM, ROPE_DIM


def absorb_query(
    q_nope: Tensor,
    w_uk: Tensor,
    *,
    query_scale: Tensor | None = None,
    rope_dim: int = ROPE_DIM,
    out: Tensor | None = None,
) -> Tensor:
    """Absorb ``W_UK`` into the query, straight into the front of the packed buffer that :func:`query` completes.

    bf16 is one ``torch.bmm`` whose result is the strided front of ``out``, bit-equal to the dense product. e4m3
    is one kernel that multiplies, rounds to bf16, divides by the scale and casts, so that the bf16 latent never
    reaches memory. It equals ``bmm`` and a cast up to the order in which float32 sums add: products of bf16 are
    exact, and each of fewer than ``nope`` additions, rounded or (as matrix units do) truncated, is off by at most
    2**-23 of the terms' magnitude, so that either sum lies within ``nope * 2**-23 * sum(|q| * |w|)`` of the exact one.
    A code may thus be another where rounding, to bf16 and then to e4m3, has a boundary within twice that distance.

    Args:
        q_nope: [T, H, nope] bf16, nope a multiple of 64, strides that are multiples of 16 bytes.
        w_uk: [H, nope, 512] bf16, last dim contiguous.
        query_scale: one positive float32 from 2**-64 to 2**64: write e4m3 of ``value / scale``. None: bf16.
        rope_dim: dims that a new ``out`` leaves free behind the latent.
        out: [T, P >= H, 512 or more] of the result's dtype, heads and dims contiguous and rows at multiples of
            16 bytes; only ``out[:, :H, :512]`` is written.

    Returns:
        ``out``, or a new [T, H, 512 + rope_dim] tensor.

    Raises:
        TypeError, ValueError, RuntimeError: as :func:`query`.
    """
    dtype = _check(q_nope, w_uk, query_scale, rope_dim, out)
    if out is None:
        out = q_nope.new_empty((*q_nope.shape[:2], LATENT_DIM + rope_dim), dtype=dtype)
    _absorb(q_nope, w_uk, query_scale, out)
    return out


@checks.remembered
def _check(q_nope: Tensor, w_uk: Tensor, query_scale: Tensor | None, rope_dim: int, out: Tensor | None) -> torch.dtype:
    """The result's dtype."""
    checks.tensor("q_nope", q_nope, (torch.bfloat16,), (None, None, None))
    tokens, heads, nope = q_nope.shape
    if heads < 1 or nope < 64 or nope % 64:
        raise ValueError(
            f"q_nope: expected at least 1 head of a positive multiple of 64 dims; got {list(q_nope.shape)}"
        )
    checks.rows("q_nope", q_nope)
    checks.tensor("w_uk", w_uk, (torch.bfloat16,), (heads, nope, LATENT_DIM), q_nope.device)
    checks.rows("w_uk", w_uk)
    if query_scale is not None:
        checks.scale("query_scale", query_scale, q_nope.device)
    dtype = torch.bfloat16 if query_scale is None else torch.float8_e4m3fn
    if out is None:
        if rope_dim not in (0, ROPE_DIM):
            raise ValueError(f"rope_dim: expected 0 or {ROPE_DIM}; got {rope_dim!r}")
    else:
        checks.tensor("out", out, (dtype,), (tokens, None, None), q_nope.device)
        if out.shape[1] < heads or out.shape[2] < LATENT_DIM or out.shape[2] % 16:
            raise ValueError(
                f"out: expected at least {heads} heads of at least {LATENT_DIM} dims (a multiple of 16); "
                f"got {list(out.shape)}"
            )
        checks.rows("out", out, inner=2)
        checks.apart("out", out)
    if query_scale is None:
        for name, operand in (("q_nope", q_nope), ("w_uk", w_uk), ("out", out)):
            if operand is not None and not checks.library_reaches(operand):
                raise ValueError(
                    f"{name}: expected strides below {checks.LIBRARY_STRIDE} elements in bf16, which torch.bmm "
                    f"multiplies; got {operand.stride()}"
                )
    return dtype


# -- registered op ------------------------------------------------------------------------------------------


def _absorb_impl(q_nope: Tensor, w_uk: Tensor, query_scale: Tensor | None, out: Tensor) -> None:
    checks.all_aligned((("q_nope", q_nope), ("w_uk", w_uk), ("out", out)))
    checks.disjoint("out", out, "q_nope", q_nope)
    if query_scale is None:
        front = out[:, : q_nope.shape[1], :LATENT_DIM]
        torch.bmm(q_nope.transpose(0, 1), w_uk, out=front.transpose(0, 1))
    elif not use_kernels(q_nope):
        reference.absorb_query(q_nope, w_uk, query_scale, out)
    else:
        from ..kernels import dsa as kernels

        config = policy.launch_config(q_nope.device.index, "dsa_absorb", q_nope.shape[0])
        kernels.launch_absorb(q_nope, w_uk, query_scale, out, config=config).run(q_nope.device)


_absorb = define_op(
    "dsa_absorb_query(Tensor q_nope, Tensor w_uk, Tensor? query_scale, Tensor(a!) out) -> ()", _absorb_impl
)
