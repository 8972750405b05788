"""Where an engine's arithmetic is not ours: what may differ, by how much, and how often.

Bytes are to be equal, and are. Two steps of an engine's own are not determined by a format: the order in which a norm
adds up its squares, and a division that the compiler may approximate. An element that lies on a rounding boundary may
then fall to its other side.
"""

from __future__ import annotations

import torch
from torch import Tensor

NORM_FLIPS = 2.0**-11
"""Largest share of a norm's outputs that may be one bf16 ulp off, because the recorder summed in another order.

With u = 2**-24, the relative error of one float32 rounding: all terms of a sum of squares are positive, so
nothing cancels, and the sum is off by at most one u for each addition on a term's longest path and one for
the square. Ours is a tree (at most 11 levels for 2048 terms: 12 u); the recorder added up to 16 terms in a
lane, then across lanes and warps (24 u). Mean and epsilon add 2 u to each; the root halves the 40 u between
the two to 20. Roots and reciprocals: 2 u for ours, correctly rounded; 3 u for an approximate one. The
products with x and with a weight: 2 u each side, 4 in all. Together below 32 u = 2**-19.

One value's bf16 roundings differ where a rounding boundary lies between its two float32 values. These are at
most 2 * 2**-19 * 2**e apart in a binade whose bf16 values are 2**-7 * 2**e apart: never across two boundaries,
and across one in at most 2**-18 / 2**-7 = 2**-11 of all values. The recorded cases show one in 10**5.

RoPE keeps this: the common factor passes through a rotation, and what is left, a few u of the pair's length,
moves a result by more than an ulp only where it is shorter than 2**-14 of its pair.
"""

DIVISION_ERROR = 2.0**-22
"""Largest relative error of a Triton kernel's ``x / scale``: PTX's ``div.full.f32``, two units in the last place."""


def neighbours(a: Tensor, b: Tensor) -> Tensor:
    """Where two bf16 tensors, or two e4m3 ones, of one shape hold finite values one step apart."""
    bits, sign = (torch.int8, 0x7F) if a.dtype.itemsize == 1 else (torch.int16, 0x7FFF)
    ranks = []
    for x in (a, b):
        code = x.contiguous().view(bits).int()
        ranks.append(torch.where(code < 0, -(code & sign), code))
    return a.float().isfinite() & b.float().isfinite() & ((ranks[0] - ranks[1]).abs() == 1)


def one_rounding(ours: Tensor, engines: Tensor) -> bool:
    """Whether all bf16 values of a norm are at most a step apart, or, where RoPE cancels, its float32 rounding."""
    return bool(((engines - ours).abs_() <= ours.abs() * 2**-7 + 2**-16).all())


def division_edges(ours: Tensor, engines: Tensor, quotient: Tensor) -> Tensor:
    """Where an approximate division puts an e4m3 code beside ours.

    Args:
        ours: e4m3 of the correctly rounded ``x / scale``.
        engines: e4m3 of an engine's.
        quotient: the exact ``x / scale``, float64.

    Returns:
        Where the two are neighbours and the quotient is within :data:`DIVISION_ERROR` of the boundary between them.
    """
    boundary = (ours.double() + engines.double()) / 2
    return neighbours(ours, engines) & ((quotient - boundary).abs() <= DIVISION_ERROR * boundary.abs())
