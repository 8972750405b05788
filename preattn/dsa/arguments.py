"""What the DSA ops ask alike of their arguments: dims, dtypes, pairings, and the checks of what is rotated."""

from __future__ import annotations

from typing import get_args

import torch
from torch import Tensor

from .. import checks
from ..reference.numerics import Pairing

LATENT_DIM = 512
ROPE_DIM = checks.ROPE_DIM
INDEX_DIM = 128
WEIGHTS = (torch.bfloat16, torch.float32)
PAIRINGS: tuple[Pairing, ...] = get_args(Pairing)


def check_rotated(
    name: str, x: Tensor, positions: object, rope_table: object, tokens: int, device: torch.device
) -> None:
    """Check rows that are rotated (or have no dims), with positions and table."""
    if x.shape[-1] not in (0, ROPE_DIM):
        raise ValueError(f"{name}: expected last dim {ROPE_DIM}, or 0 without RoPE; got {list(x.shape)}")
    if x.shape[-1]:
        checks.rows(name, x)
    checks.positions(positions, tokens, device)
    if rope_table is not None or x.shape[-1]:
        checks.table("rope_table", rope_table, device)


def check_index_rope(
    pairing: object, index_rope_table: Tensor | None, rope_table: Tensor | None, device: torch.device
) -> None:
    """Check the indexer's pairing and its table, which is the main one where it has none of its own."""
    checks.word("index_pairing", pairing, PAIRINGS)
    table = rope_table if index_rope_table is None else index_rope_table
    if table is None:
        raise ValueError("index_rope_table: expected a tensor where rope_table is None; got None")
    if table is not rope_table:
        checks.table("index_rope_table", table, device)
