"""The exact float32 arithmetic behind the ops, in plain torch.

Bit for bit what the kernels compute: one rounding per operation, fused multiply-adds only where spelled
out, sums in a fixed order. Everything takes and returns float32 unless it says otherwise.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ..formats import BF16_NAN, to_bf16

Pairing = Literal["interleaved", "half_split"]


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """``a * b + c`` with one rounding.

    The product of two float32 is exact in float64. The sum is rounded to odd there (Boldo & Melquiond,
    "Emulation of FMA and correctly rounded sums: proved algorithms using rounding to odd"), after which
    the second rounding, to float32, is the only one that shows.
    """
    product, c = a.double() * b.double(), c.double()
    total = product + c
    part = total - product
    error = (product - (total - part)) + (c - part)  # TwoSum: total + error is exact
    bits = total.view(torch.int64)
    toward = torch.where((error > 0) == (total > 0), 1, -1)  # one unit away from or toward zero
    inexact = (error != 0) & (bits & 1 == 0) & total.isfinite() & error.isfinite()
    return torch.where(inexact, (bits + toward).view(torch.float64), total).float()


def to_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """float32 -> an activation dtype, nearest even, NaNs made canonical."""
    if dtype == torch.bfloat16:
        return to_bf16(x)
    rounded = x.to(dtype)
    if dtype == torch.float16:
        return torch.where(x.isnan(), torch.tensor(BF16_NAN, dtype=torch.int16).view(torch.float16), rounded)
    return rounded


def tree_sum(x: Tensor) -> Tensor:
    """Sum over the last dim as a binary tree over neighbours: (x0 + x1) + (x2 + x3) + ...

    The tree is part of the specification: a sum then has the same bits in every launch configuration and
    on every device. A length that is not a power of two is padded with zeros, which changes nothing.
    """
    length = 1 << (x.shape[-1] - 1).bit_length()
    x = torch.nn.functional.pad(x, (0, length - x.shape[-1]))
    while x.shape[-1] > 1:
        x = x[..., 0::2] + x[..., 1::2]
    return x.squeeze(-1)


def reciprocal_sqrt(x: Tensor) -> Tensor:
    """``1 / sqrt(x)`` with both operations correctly rounded (torch's float32 CPU sqrt is not)."""
    return 1.0 / x.double().sqrt().float()


def rms_norm(x: Tensor, eps: float, weight: Tensor | None = None) -> Tensor:
    """RMSNorm over the last dim: ``x * (1 / sqrt(mean(x^2) + eps)) * weight``, not rounded to the input dtype."""
    x = x.float()
    inverse = reciprocal_sqrt(tree_sum(x * x) / x.shape[-1] + eps)
    x = x * inverse[..., None]
    return x if weight is None else x * weight.float()


def layer_norm(x: Tensor, eps: float, weight: Tensor, bias: Tensor) -> Tensor:
    """LayerNorm over the last dim, two passes, not rounded to the input dtype."""
    x = x.float()
    centred = x - (tree_sum(x) / x.shape[-1])[..., None]
    inverse = reciprocal_sqrt(tree_sum(centred * centred) / x.shape[-1] + eps)
    return centred * inverse[..., None] * weight.float() + bias.float()


def rope_rows(rope_table: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of each position: [T, 32] twice, exact upcasts of the table."""
    rows = rope_table[positions.long()].float()
    half = rows.shape[-1] // 2
    return rows[..., :half], rows[..., half:]


def _pairs(x: Tensor, pairing: Pairing) -> tuple[Tensor, Tensor]:
    half = x.shape[-1] // 2
    return (x[..., 0::2], x[..., 1::2]) if pairing == "interleaved" else (x[..., :half], x[..., half:])


def _unpair(a: Tensor, b: Tensor, pairing: Pairing) -> Tensor:
    return torch.stack([a, b], -1).flatten(-2) if pairing == "interleaved" else torch.cat([a, b], -1)


def rope(x: Tensor, cos: Tensor, sin: Tensor, output: Pairing = "interleaved") -> Tensor:
    """Rotate interleaved pairs of a main query or key: ``fma(e, cos, -(o*sin))``, ``fma(e, sin, o*cos)``.

    ``output`` is the order of the results: Hugging Face's models write them half-split.
    """
    even, odd = _pairs(x.float(), "interleaved")
    return _unpair(fma(even, cos, -(odd * sin)), fma(even, sin, odd * cos), output)


def index_rope(x: Tensor, cos: Tensor, sin: Tensor, pairing: Pairing) -> Tensor:
    """Rotate an indexer query or key: ``fma(a, cos, -(b*sin))``, ``fma(b, cos, a*sin)``."""
    a, b = _pairs(x.float(), pairing)
    return _unpair(fma(a, cos, -(b * sin)), fma(b, cos, a * sin), pairing)
