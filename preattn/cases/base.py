"""What a case is, and what the families' cases are built from."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from .. import formats
from ..dispatch import Backend, backend

CANARY = 0xA5
"""Fill byte of every cache before a call."""

EDGE_ROWS = (0.0, 1e-6, 448.0, 450.0, 1.0, 2.0, 0.5, -1792.0, 3e4, 2.0**-14, -(2.0**-20))


@dataclass
class Call:
    """One call of a public op, with its memory.

    Attributes:
        function: the public op.
        arguments: its keyword arguments.
        memory: every buffer the call may write, whole (pools with their padding), by name.
        moved: bytes the call has to move, each counted once.
    """

    function: Callable[..., Any]
    arguments: dict[str, Any]
    memory: dict[str, Tensor]
    moved: int

    def run(self, name: Backend | None = None) -> dict[str, Tensor]:
        """Run the op (with one backend, if named) and return what it may have written, as bytes on the CPU."""
        with backend(name):
            result = self.function(**self.arguments)
        return {key: as_bytes(tensor) for key, tensor in self.written(result).items()}

    def written(self, result: Any) -> dict[str, Tensor]:
        """What a run may have written, by name: the call's memory, and what of the op's ``result`` is not in it."""
        written = dict(self.memory)
        for index, tensor in enumerate(result if isinstance(result, tuple) else (result,)):
            if isinstance(tensor, Tensor) and not any(tensor is known for known in written.values()):
                written[f"result{index}"] = tensor
        return written


class Case(Protocol):
    """One use of one op."""

    @property
    def name(self) -> str:
        """Unique in the registry."""
        ...

    def build(self, tokens: int, device: torch.device | str = "cpu", seed: int = 0) -> Call:
        """Make its memory on a device; the same values for the same tokens and seed everywhere."""
        ...


def as_bytes(tensor: Tensor) -> Tensor:
    """A copy of a tensor's values, as a flat uint8 CPU tensor."""
    flat = tensor.detach().to("cpu", copy=True).contiguous().flatten()
    return flat.view(torch.uint8)


def poisoned(*shape: int, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """A new tensor of NaNs (0xFF bytes: NaN in bf16, fp16, float32 and e4m3; -1 in integers)."""
    itemsize = dtype.itemsize
    raw = torch.full((*shape[:-1], shape[-1] * itemsize), 0xFF, dtype=torch.uint8, device=device)
    return raw.view(dtype)


def activations(
    *shape: int, dtype: torch.dtype, seed: int, edges: bool = False, device: torch.device | str = "cpu"
) -> Tensor:
    """Normal values; ``edges`` puts constants that quantisers trip over into the first rows.

    Values repeat after some four million, so that large tensors are made where they are needed.
    """
    count = math.prod(shape)
    period = (1 << 22) + 8 * 512 + 1  # no multiple of a row: rows differ
    base = torch.randn(min(count, period), generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)
    x = base.repeat(-(-count // period))[:count] if count > period else base
    x = x.reshape(shape)
    if edges:
        for row, value in enumerate(EDGE_ROWS[: shape[0]]):
            x[row] = value
    return x


def rope_table(positions: int = 512, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """[positions, 64]: 32 cosines and 32 sines at the usual base of 10000."""
    inverse = 10000.0 ** (-torch.arange(32, dtype=torch.float64) / 32)
    angle = torch.arange(positions, dtype=torch.float64)[:, None] * inverse
    return torch.cat([angle.cos(), angle.sin()], -1).to(dtype)


def pool_and_slots(
    record: formats.Record,
    tokens: int,
    *,
    block_size: int,
    page_padding: int,
    seed: int,
    device: torch.device | str,
    index_dtype: torch.dtype = torch.int64,
) -> tuple[Tensor, Tensor, Tensor]:
    """A canary-filled pool, its cache view and distinct slots, some of them outside the cache.

    The pool begins with 256 bytes that are not the cache's. Every seventh row from the fourth on gets a slot
    that must be skipped: -1, -2, one past the end, the smallest int64, 2**31 or 2**40 + 17.
    """
    blocks = max(1, -(-tokens // block_size)) + 1
    stride = -(-record.page_bytes(block_size) // 16) * 16 + page_padding
    pool = torch.full((256 + blocks * stride,), CANARY, dtype=torch.uint8, device=device)
    cache = formats.cache_view(pool, record, block_size=block_size, num_blocks=blocks, block_stride=stride, offset=256)
    generator = torch.Generator().manual_seed(seed)
    capacity = blocks * block_size
    slots = torch.randperm(capacity, generator=generator)[:tokens]
    outside = [-1, -2, capacity, -(2**63), 2**31, 2**40 + 17]
    if index_dtype == torch.int32:
        outside = [-1, -2, capacity, -(2**31), 2**31 - 1]
    for count, row in enumerate(range(3, tokens, 7)):
        slots[row] = outside[count % len(outside)]
    return pool, cache, slots.to(index_dtype).to(device)
