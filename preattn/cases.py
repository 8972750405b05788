"""The registry of cases: one list that tests, bench, tuning and warm-up draw from.

A :class:`Case` describes one use of one op; :meth:`Case.build` makes a :class:`Call` of it, deterministic in
tokens and seed, with every byte the op may write poisoned first. Nothing is fast but untested, or tested
but never warmed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from . import formats, v4
from .dispatch import Backend, backend
from .policy import Form, Layout

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
        written = dict(self.memory)
        results = result if isinstance(result, tuple) else (result,)
        for index, tensor in enumerate(results):
            if isinstance(tensor, Tensor) and not any(tensor is known for known in written.values()):
                written[f"result{index}"] = tensor
        return {key: as_bytes(tensor) for key, tensor in written.items()}


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
    """A tensor's values as a flat uint8 CPU tensor."""
    flat = tensor.detach().cpu().contiguous().flatten()
    return flat.view(torch.uint8)


def poisoned(*shape: int, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """A new tensor of NaNs (0xFF bytes: NaN in bf16, fp16, float32 and e4m3; -1 in integers)."""
    itemsize = dtype.itemsize
    raw = torch.full((*shape[:-1], shape[-1] * itemsize), 0xFF, dtype=torch.uint8, device=device)
    return raw.view(dtype)


def activations(*shape: int, dtype: torch.dtype, seed: int, edges: bool = False) -> Tensor:
    """Normal values on the CPU; ``edges`` puts constants that quantisers trip over into the first rows."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator)
    if edges:
        for row, value in enumerate(EDGE_ROWS[: shape[0]]):
            x[row] = value
    return x.to(dtype)


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
    cache = formats.cache_view(
        pool, record, block_size=block_size, num_blocks=blocks, block_stride=stride, offset=256
    )
    generator = torch.Generator().manual_seed(seed)
    capacity = blocks * block_size
    slots = torch.randperm(capacity, generator=generator)[:tokens]
    outside = [-1, -2, capacity, -(2**63), 2**31, 2**40 + 17]
    if index_dtype == torch.int32:
        outside = [-1, -2, capacity, -(2**31), 2**31 - 1]
    for count, row in enumerate(range(3, tokens, 7)):
        slots[row] = outside[count % len(outside)]
    return pool, cache, slots.to(index_dtype).to(device)


@dataclass(frozen=True)
class V4Case:
    """A use of :func:`preattn.v4.query_kv_insert`; ``padded_heads=0`` is KV only."""

    heads: int
    padded_heads: int
    record: str = "v41_mxfp8"
    layout: Layout = "chunk_interleaved"
    norm: bool = False
    rope: bool = False
    in_place: bool = False
    fp8_query: bool = False
    form: Form = Form.ONE_LAUNCH
    block_size: int = 64
    page_padding: int = 0
    unstored: int = 0
    """Rows at the end of the step that have no slot at all."""
    dtype: torch.dtype = torch.bfloat16
    index_dtype: torch.dtype = torch.int64
    table_dtype: torch.dtype = torch.float32

    @property
    def name(self) -> str:
        """For example ``v4/chunk_interleaved/32of64/v41_mxfp8``."""
        flags = [
            word
            for word, on in (
                ("norm", self.norm),
                ("rope", self.rope),
                ("in_place", self.in_place),
                ("fp8_query", self.fp8_query),
                ("two_launches", self.form == Form.TWO_LAUNCHES),
                (f"page{self.block_size}+{self.page_padding}", self.block_size != 64 or self.page_padding > 0),
                (f"unstored{self.unstored}", self.unstored > 0),
                ("fp16", self.dtype == torch.float16),
                ("int32", self.index_dtype == torch.int32),
                ("bf16_table", self.table_dtype == torch.bfloat16),
            )
            if on
        ]
        return "/".join(["v4", self.layout, f"{self.heads}of{self.padded_heads}", self.record, *flags])

    def build(self, tokens: int, device: torch.device | str = "cpu", seed: int = 0) -> Call:
        """See :class:`Case`."""
        record = formats.record(self.record, 512)
        pool, cache, slots = pool_and_slots(
            record,
            tokens,
            block_size=self.block_size,
            page_padding=self.page_padding,
            seed=seed,
            device=device,
            index_dtype=self.index_dtype,
        )
        table = rope_table(dtype=self.table_dtype)
        generator = torch.Generator().manual_seed(seed + 1)
        positions = torch.randint(len(table), (tokens,), generator=generator).to(self.index_dtype)
        query = activations(tokens, self.heads, 512, dtype=self.dtype, seed=seed + 2).to(device)
        kv = activations(tokens, 512, dtype=self.dtype, seed=seed + 3, edges=True).to(device)
        memory = {"pool": pool}
        out = None
        if self.padded_heads:
            dtype = torch.float8_e4m3fn if self.fp8_query else self.dtype
            out = poisoned(tokens, self.padded_heads, 512, dtype=dtype, device=device)
            if self.in_place:
                out[:, self.heads :] = 0
                out[:, : self.heads] = query
                query = out[:, : self.heads]
            memory["out"] = out
        return Call(
            v4.query_kv_insert,
            {
                "query": query,
                "kv": kv,
                "cache": cache,
                "slots": slots[: max(0, tokens - self.unstored)],
                "positions": positions.to(device),
                "rope_table": table.to(device),
                "record": self.record,
                "query_rope": self.rope,
                "query_norm_eps": 1e-6 if self.norm else None,
                "padded_heads": self.padded_heads,
                "layout": self.layout,
                "query_scale_inv": torch.tensor([4.75], device=device) if self.fp8_query else None,
                "kv_scale": torch.tensor([0.37], device=device) if self.record == "fp8" else None,
                "out": out,
                "form": self.form,
            },
            memory,
            self.moved(tokens),
        )

    def moved(self, tokens: int) -> int:
        """Bytes a call moves."""
        from .policy import v4_bytes

        record = formats.record(self.record, 512)
        parts = v4_bytes(tokens, self.heads, self.padded_heads, record, in_place=self.in_place and not self.norm)
        return sum(parts.values())
