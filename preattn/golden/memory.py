"""What recorded calls of both families are rebuilt from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import formats
from ..cases.base import CANARY, Call, as_bytes

GUARD = 256
"""Canary bytes before and behind every cache."""


class Recorded(NamedTuple):
    """A recorded case, ready to run: the call, what it has to write, and which of that went through a norm.

    ``expected`` has a tensor for each buffer or result of :meth:`Call.run`, or its SHA-256 in hex.
    """

    call: Call
    expected: dict[str, Tensor | str]
    norms: frozenset[str]


def guarded_cache(
    recorded: Tensor, record: formats.Record, block_size: int, fill: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Fresh memory for a recorded cache, with :data:`GUARD` canary bytes on both sides.

    Args:
        recorded: [blocks, ...] as it was after the call; its first stride is the page stride.
        record: what it holds.
        block_size: tokens per page.
        fill: what every element held before the call.

    Returns:
        The pool as bytes, the cache view of it, and the bytes that the pool has to hold after the call.
    """
    if recorded.dim() < 2 or not recorded.numel():
        raise ValueError(f"cache_out: expected pages; got shape {list(recorded.shape)}")
    if not isinstance(fill, int | float) or not 0 <= fill <= 255:
        raise ValueError(f"cache_fill: expected a number from 0 to 255; got {fill!r}")
    wanted = torch.nn.functional.pad(as_bytes(recorded), (GUARD, GUARD), value=CANARY).to(recorded.device)
    pool = torch.full_like(wanted, CANARY)
    pool[GUARD:-GUARD] = torch.full_like(recorded, fill).flatten().view(torch.uint8)
    stride = recorded[0].numel() * recorded.element_size()
    cache = formats.cache_view(
        pool, record, block_size=block_size, num_blocks=recorded.shape[0], block_stride=stride, offset=GUARD
    )
    return pool, cache, wanted


def check_positions(positions: Tensor, table: Tensor) -> None:
    """Raise where a position is not in the RoPE table: ops do not look at values."""
    least, most = (int(positions.min()), int(positions.max())) if positions.numel() else (0, 0)
    if least < 0 or most >= len(table):
        raise ValueError(f"positions: expected 0 to {len(table) - 1}; got {least} to {most}")


def whole(entry: Mapping[str, Any], key: str, least: int, most: int) -> int:
    """A whole number of a manifest's entry, checked."""
    value = entry[key]
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ValueError(f"{key}: expected {least} to {most}; got {value!r}")
    return value
