"""Cases of the DSA prologue."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from .. import dsa, formats
from ..dsa import INDEX_DIM, LATENT_DIM, ROPE_DIM, QueryForm
from ..policy import dsa_norm_rope_bytes, dsa_query_bytes
from ..reference.numerics import Pairing
from .base import CANARY, Call, activations, poisoned, pool_and_slots, rope_table

Source = Literal["in_place", "front", "contiguous", "transposed", "cast"]
"""Where the latent is: already in the front of the output (given as a view of it, or not given), in a tensor of
its own, in one with the heads outermost, as a batched matmul over heads leaves it, or in one that is e4m3."""

SOFTMAX_SCALE = 128**-0.5


@dataclass(frozen=True)
class DsaQueryCase:
    """A use of :func:`preattn.dsa.query`; ``index_heads=0`` is a layer without indexer."""

    heads: int
    index_heads: int = 32
    index_pairing: Pairing = "half_split"
    form: QueryForm = "packed"
    padded_heads: int | None = None
    latent: Source = "in_place"
    fp8_query: bool = False
    rope_dim: int = ROPE_DIM
    rope_output: Pairing = "interleaved"
    sliced: bool = True
    """``q_pe`` is the tail of [T, H, 192], and the indexer's tensors are columns of wider ones."""
    index_dtype: torch.dtype = torch.int64
    table_dtype: torch.dtype = torch.bfloat16
    weights_dtype: torch.dtype = torch.float32

    @property
    def name(self) -> str:
        """For example ``dsa_query/packed/16of16/32_half_split/in_place``."""
        padded = self.heads if self.padded_heads is None else self.padded_heads
        index = f"{self.index_heads}_{self.index_pairing}" if self.index_heads else "no_indexer"
        flags = [
            word
            for word, on in (
                ("fp8_query", self.fp8_query),
                ("no_rope", self.rope_dim == 0),
                ("half_split_output", self.rope_output == "half_split"),
                ("dense", not self.sliced),
                ("int32", self.index_dtype == torch.int32),
                ("float32_table", self.table_dtype == torch.float32),
                ("bf16_weights", self.weights_dtype == torch.bfloat16),
            )
            if on
        ]
        return "/".join(["dsa_query", self.form, f"{self.heads}of{padded}", index, self.latent, *flags])

    def build(self, tokens: int, device: torch.device | str = "cpu", seed: int = 0) -> Call:
        """See :class:`Case`."""
        heads, rope_dim = self.heads, self.rope_dim
        table = rope_table(dtype=self.table_dtype)
        generator = torch.Generator().manual_seed(seed)
        positions = torch.randint(len(table), (tokens,), generator=generator).to(self.index_dtype)
        q_pe = activations(
            tokens, heads, 128 + rope_dim, dtype=torch.bfloat16, seed=seed + 1, edges=True, device=device
        )
        q_pe = q_pe[..., 128:] if self.sliced else q_pe[..., 128:].contiguous()
        shape = (heads, tokens, LATENT_DIM) if self.latent == "transposed" else (tokens, heads, LATENT_DIM)
        rows = activations(*shape, dtype=torch.bfloat16, seed=seed + 2, edges=True, device=device)
        latent: Tensor | None = rows
        if self.latent == "transposed":
            latent = rows.transpose(0, 1)
        elif self.latent == "cast":
            latent = rows.to(torch.float8_e4m3fn)
        memory = {}
        out = None
        if self.form == "packed":
            padded = heads if self.padded_heads is None else self.padded_heads
            dtype = torch.float8_e4m3fn if self.fp8_query else torch.bfloat16
            out = poisoned(tokens, padded, LATENT_DIM + rope_dim, dtype=dtype, device=device)
            if self.copies or rope_dim:
                memory["out"] = out
            if not self.copies:
                out[:, heads:].view(torch.uint8).zero_()
                front = out[:, :heads, :LATENT_DIM]
                front.copy_(rows)
                latent = front if self.latent == "in_place" else None
        arguments: dict[str, Any] = {
            "q_pe": q_pe,
            "latent": latent,
            "positions": positions.to(device),
            "rope_table": table.to(device) if rope_dim else None,
            "form": self.form,
            "padded_heads": self.padded_heads,
            "query_scale": torch.tensor(0.37, device=device) if self.fp8_query else None,
            "rope_output": self.rope_output,
            "out": out,
        }
        if self.index_heads:
            extra = 64 if self.sliced else 0
            width = self.index_heads * INDEX_DIM + extra
            index_query = activations(tokens, width, dtype=torch.bfloat16, seed=seed + 3, edges=True, device=device)
            weights = activations(
                tokens, self.index_heads + extra, dtype=self.weights_dtype, seed=seed + 4, device=device
            )
            arguments |= {
                "index_query": index_query[:, extra:].unflatten(1, (self.index_heads, INDEX_DIM)),
                "index_weights": weights[:, extra:],
                "index_pairing": self.index_pairing,
                "index_rope_table": None if rope_dim else table.to(device),
                "softmax_scale": SOFTMAX_SCALE,
                "head_scale": self.index_heads**-0.5,
            }
        return Call(dsa.query, arguments, memory, self.moved(tokens))

    @property
    def copies(self) -> bool:
        """Whether the latent has to move."""
        if self.form == "pair":
            return self.fp8_query and self.latent != "cast"
        return self.latent not in ("in_place", "front")

    def moved(self, tokens: int) -> int:
        """Bytes a call moves."""
        parts = dsa_query_bytes(
            tokens,
            self.heads,
            index_heads=self.index_heads,
            padded_heads=self.padded_heads,
            copies=self.copies,
            fp8_query=self.fp8_query,
            rope_dim=self.rope_dim,
            table_bytes=self.table_dtype.itemsize,
        )
        return sum(parts.values())


def _integers(*shape: int, seed: int, device: torch.device | str) -> Tensor:
    return (activations(*shape, dtype=torch.bfloat16, seed=seed, device=device) * 3).round()


@dataclass(frozen=True)
class AbsorbCase:
    """A use of :func:`preattn.dsa.absorb_query` on small integers, whose sums are exact in any order."""

    heads: int
    nope: int = 128
    padded_heads: int | None = None
    fp8_query: bool = True

    @property
    def name(self) -> str:
        """For example ``dsa_absorb/16of16/128/fp8_query``."""
        padded = self.heads if self.padded_heads is None else self.padded_heads
        return "/".join(
            ["dsa_absorb", f"{self.heads}of{padded}", str(self.nope), "fp8_query" if self.fp8_query else "bf16"]
        )

    def build(self, tokens: int, device: torch.device | str = "cpu", seed: int = 0) -> Call:
        """See :class:`Case`."""
        q = _integers(tokens, self.heads, self.nope + ROPE_DIM, seed=seed, device=device)
        w = _integers(self.heads, self.nope, LATENT_DIM, seed=seed + 1, device=device)
        padded = self.heads if self.padded_heads is None else self.padded_heads
        dtype = torch.float8_e4m3fn if self.fp8_query else torch.bfloat16
        out = poisoned(tokens, padded, LATENT_DIM + ROPE_DIM, dtype=dtype, device=device)
        return Call(
            dsa.absorb_query,
            {
                "q_nope": q[..., : self.nope],
                "w_uk": w,
                "query_scale": torch.tensor(2.7, device=device) if self.fp8_query else None,
                "out": out,
            },
            {"out": out},
            self.moved(tokens),
        )

    def moved(self, tokens: int) -> int:
        """Bytes a call moves."""
        row = 2 * self.nope + LATENT_DIM * (1 if self.fp8_query else 2)
        return self.heads * (tokens * row + 2 * self.nope * LATENT_DIM)


@dataclass(frozen=True)
class NormRopeCase:
    """A use of :func:`preattn.dsa.norm_rope_insert`; ``index_record=None`` is a layer without indexer."""

    rank: int = 1536
    record: str = "dsa_fp8"
    index_record: str | None = "index_fp8"
    index_pairing: Pairing = "half_split"
    rope_dim: int = ROPE_DIM
    rope_output: Pairing = "interleaved"
    top_k: int = 2048
    slots: bool = True
    unstored: int = 0
    """Rows at the end of the step that have no slot at all."""
    return_kv: bool = False
    block_size: int = 64
    page_padding: int = 0
    index_block_size: int = 64
    weights_dtype: torch.dtype = torch.bfloat16
    index_dtype: torch.dtype = torch.int64
    table_dtype: torch.dtype = torch.bfloat16

    @property
    def name(self) -> str:
        """For example ``dsa_norm_rope/1536/dsa_fp8/index_fp8_half_split``."""
        index = f"{self.index_record}_{self.index_pairing}" if self.index_record else "no_indexer"
        flags = [
            word
            for word, on in (
                ("no_rope", self.rope_dim == 0),
                ("half_split_output", self.rope_output == "half_split"),
                (f"top{self.top_k}", self.top_k != 2048),
                ("no_slots", not self.slots),
                (f"unstored{self.unstored}", self.unstored > 0),
                ("return_kv", self.return_kv),
                (f"page{self.block_size}+{self.page_padding}", self.block_size != 64 or self.page_padding > 0),
                (f"index_page{self.index_block_size}", self.index_block_size != 64),
                ("float32_weights", self.weights_dtype == torch.float32),
                ("int32", self.index_dtype == torch.int32),
                ("float32_table", self.table_dtype == torch.float32),
            )
            if on
        ]
        return "/".join(["dsa_norm_rope", str(self.rank), self.record, index, *flags])

    def build(self, tokens: int, device: torch.device | str = "cpu", seed: int = 0) -> Call:
        """See :class:`Case`."""
        rank, kv_dim = self.rank, LATENT_DIM + self.rope_dim
        record = formats.record(self.record, kv_dim)
        table = rope_table(dtype=self.table_dtype)
        generator = torch.Generator().manual_seed(seed)
        positions = torch.randint(len(table), (tokens,), generator=generator).to(self.index_dtype)
        row = activations(tokens, rank + kv_dim, dtype=torch.bfloat16, seed=seed + 1, edges=True, device=device)
        out = poisoned(tokens, rank, dtype=torch.bfloat16, device=device)
        memory = {"out": out}
        arguments: dict[str, Any] = {
            "q_latent": row[:, :rank],
            "kv_latent": row[:, rank : rank + LATENT_DIM],
            "k_pe": row[:, rank + LATENT_DIM :],
            "cache": None,
            "slots": None,
            "positions": positions.to(device),
            "rope_table": table.to(device) if self.rope_dim else None,
            "record": self.record,
            "q_weight": _weight(rank, self.weights_dtype, seed + 2).to(device),
            "kv_weight": _weight(LATENT_DIM, self.weights_dtype, seed + 3).to(device),
            "q_eps": 1e-6,
            "kv_eps": 1e-5,
            "kv_scale": torch.tensor(0.37, device=device) if self.record == "fp8" else None,
            "return_kv": self.return_kv,
            "rope_output": self.rope_output,
            "out": out,
        }
        stored = max(0, tokens - self.unstored)
        if self.slots:
            pool, arguments["cache"], slots = self._pool(record, self.block_size, tokens, seed + 4, device)
            arguments["slots"] = slots[:stored]
            memory["pool"] = pool
        if self.index_record:
            top_k = torch.full((tokens + 3, self.top_k), CANARY, dtype=torch.int32, device=device)
            memory["top_k"] = top_k
            wide = activations(tokens, INDEX_DIM + 32, dtype=torch.bfloat16, seed=seed + 5, edges=True, device=device)
            arguments |= {
                "index_key": wide[:, :INDEX_DIM],
                "index_weight": _weight(INDEX_DIM, torch.float32, seed + 6).to(device),
                "index_bias": activations(INDEX_DIM, dtype=torch.float32, seed=seed + 7).to(device),
                "index_eps": 1e-6,
                "index_record": self.index_record,
                "index_pairing": self.index_pairing,
                "index_rope_table": None if self.rope_dim else table.to(device),
                "top_k": top_k,
            }
            if self.slots:
                pool, arguments["index_cache"], slots = self._pool(
                    formats.record(self.index_record), self.index_block_size, tokens, seed + 4, device
                )
                memory["index_pool"] = pool
                if self.index_block_size != self.block_size:
                    arguments["index_slots"] = slots[:stored]
        return Call(dsa.norm_rope_insert, arguments, memory, self.moved(tokens))

    def _pool(
        self, record: formats.Record, block_size: int, tokens: int, seed: int, device: torch.device | str
    ) -> tuple[Tensor, Tensor, Tensor]:
        return pool_and_slots(
            record,
            tokens,
            block_size=block_size,
            page_padding=self.page_padding,
            seed=seed,
            device=device,
            index_dtype=self.index_dtype,
        )

    def moved(self, tokens: int) -> int:
        """Bytes a call moves."""
        parts = dsa_norm_rope_bytes(
            tokens,
            self.rank,
            formats.record(self.record, LATENT_DIM + self.rope_dim) if self.slots else None,
            index_record=formats.record(self.index_record) if self.index_record and self.slots else None,
            top_k=self.top_k if self.index_record else 0,
            rope_dim=self.rope_dim,
            return_kv=self.return_kv,
            table_bytes=self.table_dtype.itemsize,
        )
        return sum(parts.values())


def _weight(dims: int, dtype: torch.dtype, seed: int) -> Tensor:
    return (torch.rand(dims, generator=torch.Generator().manual_seed(seed)) + 0.5).to(dtype)


QUERY_CASES: tuple[DsaQueryCase, ...] = (
    DsaQueryCase(8),
    DsaQueryCase(16),
    DsaQueryCase(128, index_heads=64),
    DsaQueryCase(64, index_pairing="interleaved"),
    DsaQueryCase(5, index_heads=3, index_pairing="interleaved"),
    DsaQueryCase(5, padded_heads=8, latent="contiguous", index_heads=3),
    DsaQueryCase(16, index_heads=0),
    DsaQueryCase(16, index_pairing="interleaved", rope_output="half_split", table_dtype=torch.float32),
    DsaQueryCase(16, rope_output="half_split", latent="contiguous", sliced=False),
    DsaQueryCase(16, latent="front", index_dtype=torch.int32),
    DsaQueryCase(32, padded_heads=64, table_dtype=torch.float32),
    DsaQueryCase(16, padded_heads=64, latent="transposed", index_heads=0),
    DsaQueryCase(8, latent="contiguous", weights_dtype=torch.bfloat16),
    DsaQueryCase(16, latent="transposed", table_dtype=torch.float32, index_pairing="interleaved"),
    DsaQueryCase(16, latent="contiguous", fp8_query=True),
    DsaQueryCase(5, padded_heads=64, latent="transposed", fp8_query=True, index_heads=0),
    DsaQueryCase(16, fp8_query=True, rope_output="half_split", index_pairing="interleaved"),
    DsaQueryCase(8, latent="front", fp8_query=True, index_heads=0),
    DsaQueryCase(5, padded_heads=8, latent="cast", fp8_query=True, index_heads=0),
    DsaQueryCase(16, form="pair", latent="transposed"),
    DsaQueryCase(16, form="pair", latent="contiguous", fp8_query=True, index_pairing="interleaved"),
    DsaQueryCase(8, form="pair", latent="cast", fp8_query=True, index_heads=0),
    DsaQueryCase(7, form="pair", latent="contiguous", index_heads=0, rope_output="half_split"),
    DsaQueryCase(16, rope_dim=0),
    DsaQueryCase(8, rope_dim=0, latent="contiguous", padded_heads=64, index_heads=0),
    DsaQueryCase(8, rope_dim=0, latent="contiguous", fp8_query=True),
    DsaQueryCase(8, rope_dim=0, form="pair", latent="contiguous"),
)

ABSORB_CASES: tuple[AbsorbCase, ...] = (
    AbsorbCase(4),
    AbsorbCase(3, nope=192, padded_heads=8),
    AbsorbCase(2, nope=256),
    AbsorbCase(4, fp8_query=False),
)

NORM_ROPE_CASES: tuple[NormRopeCase, ...] = (
    NormRopeCase(),
    NormRopeCase(rank=2048, index_pairing="interleaved"),
    NormRopeCase(rank=2048, index_record=None),
    NormRopeCase(record="bf16"),
    NormRopeCase(record="fp8", index_pairing="interleaved", table_dtype=torch.float32),
    NormRopeCase(index_record="index_fp8_ue8m0", weights_dtype=torch.float32),
    NormRopeCase(return_kv=True, unstored=5),
    NormRopeCase(record="bf16", return_kv=True, rope_output="half_split", index_record=None),
    NormRopeCase(record="fp8", rope_output="half_split", index_dtype=torch.int32, unstored=5),
    NormRopeCase(slots=False),
    NormRopeCase(slots=False, return_kv=True, index_record=None),
    NormRopeCase(block_size=16, page_padding=64, index_block_size=32),
    NormRopeCase(record="bf16", rope_dim=0, index_record=None),
    NormRopeCase(record="fp8", rope_dim=0, return_kv=True),
    NormRopeCase(rank=1000, top_k=1000),
)

CASES = (*QUERY_CASES, *ABSORB_CASES, *NORM_ROPE_CASES)
