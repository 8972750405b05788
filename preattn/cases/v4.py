"""Cases of the V4 / V4.1 prologue."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .. import formats, v4
from ..policy import Form, Layout, Projection, WeightKind, library_multiplies, v4_bytes, v4_project_bytes
from .base import Call, activations, poisoned, pool_and_slots, rope_table


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
        query = activations(tokens, self.heads, 512, dtype=self.dtype, seed=seed + 2, device=device)
        kv = activations(tokens, 512, dtype=self.dtype, seed=seed + 3, edges=True, device=device)
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
        record = formats.record(self.record, 512)
        parts = v4_bytes(
            tokens,
            self.heads,
            self.padded_heads,
            record,
            in_place=self.in_place and not self.norm,
            fp8_query=self.fp8_query,
        )
        return sum(parts.values())


@dataclass(frozen=True)
class PadCase:
    """A use of :func:`preattn.v4.pad_query`."""

    heads: int
    padded_heads: int
    layout: Layout = "chunk_interleaved"
    dtype: torch.dtype = torch.bfloat16

    @property
    def name(self) -> str:
        """For example ``v4_pad/chunk_interleaved/32of64``."""
        half = ["fp16"] if self.dtype == torch.float16 else []
        return "/".join(["v4_pad", self.layout, f"{self.heads}of{self.padded_heads}", *half])

    def build(self, tokens: int, device: torch.device | str = "cpu", seed: int = 0) -> Call:
        """See :class:`Case`."""
        out = poisoned(tokens, self.padded_heads, 512, dtype=self.dtype, device=device)
        arguments = {
            "query": activations(tokens, self.heads, 512, dtype=self.dtype, seed=seed, device=device),
            "padded_heads": self.padded_heads,
            "layout": self.layout,
            "out": out,
        }
        return Call(v4.pad_query, arguments, {"out": out}, self.moved(tokens))

    def moved(self, tokens: int) -> int:
        """Bytes a call moves."""
        return tokens * 1024 * (self.heads + self.padded_heads)


@dataclass(frozen=True)
class KvCase:
    """A use of :func:`preattn.v4.kv_insert` with its own norm."""

    record: str = "v41_mxfp8"
    weight_dtype: torch.dtype = torch.bfloat16

    @property
    def name(self) -> str:
        """For example ``v4_kv/v41_mxfp8/norm``."""
        weight = ["float32_weight"] if self.weight_dtype == torch.float32 else []
        return "/".join(["v4_kv", self.record, "norm", *weight])

    def build(self, tokens: int, device: torch.device | str = "cpu", seed: int = 0) -> Call:
        """See :class:`Case`."""
        call = V4Case(64, 0, record=self.record, layout="head_major").build(tokens, device, seed)
        names = ("kv", "cache", "slots", "positions", "rope_table", "record", "kv_scale")
        weight = activations(512, dtype=self.weight_dtype, seed=seed + 5, device=device)
        arguments = {name: call.arguments[name] for name in names}
        return Call(v4.kv_insert, {**arguments, "norm_weight": weight, "norm_eps": 1e-5}, call.memory, call.moved)


@dataclass(frozen=True)
class ProjectCase:
    """A use of :func:`preattn.v4.project_query_kv_insert`.

    Operands are small integers, their scales powers of two: every sum is exact in any order and in every matrix unit,
    so that all forms and configurations write the same bits.
    """

    heads: int
    padded_heads: int
    record: str = "v41_mxfp8"
    layout: Layout = "head_major"
    weight: WeightKind = "bf16"
    norm: bool = False
    rope: bool = False
    grouped: bool = False
    """Scales of 128 dims of a token, not of the whole token."""
    rank: int = 256
    form: Projection = Projection.KERNEL

    @property
    def name(self) -> str:
        """For example ``v4_project/kernel/head_major/2of4/v41_mxfp8/e4m3``."""
        flags = [word for word in ("norm", "rope", "grouped") if getattr(self, word)]
        rank = [] if self.rank == 256 else [f"rank{self.rank}"]
        heads = f"{self.heads}of{self.padded_heads}"
        return "/".join(["v4_project", self.form, self.layout, heads, self.record, self.weight, *flags, *rank])

    def build(self, tokens: int, device: torch.device | str = "cpu", seed: int = 0) -> Call:
        """See :class:`Case`."""
        step = V4Case(self.heads, 0, record=self.record, layout=self.layout).build(tokens, device, seed)
        names = ("kv", "cache", "slots", "positions", "rope_table", "record", "kv_scale")
        generator = torch.Generator().manual_seed(seed + 5)
        dtype = torch.bfloat16 if self.weight == "bf16" else torch.float8_e4m3fn
        rows = self.heads * v4.HEAD_DIM

        def integers(*shape: int) -> torch.Tensor:
            return torch.randint(-4, 5, shape, generator=generator).to(dtype).to(device)

        def powers(*shape: int) -> torch.Tensor:
            return (2.0 ** torch.randint(-2, 3, shape, generator=generator)).to(device)

        x_scale = weight_scale = None
        if self.weight != "bf16":  # a column of scales after the other, as matmul libraries take them
            x_scale = powers(self.rank // 128, tokens).t() if self.grouped else powers(tokens)
            down = self.rank // (128 if self.weight == "e4m3" else 32)
            weight_scale = powers(rows // 128, down) if self.weight == "e4m3" else formats.to_ue8m0(powers(rows, down))
        out = poisoned(tokens, self.padded_heads, v4.HEAD_DIM, dtype=torch.bfloat16, device=device)
        return Call(
            v4.project_query_kv_insert,
            {
                "x": integers(tokens, self.rank),
                "weight": integers(rows, self.rank),
                **{name: step.arguments[name] for name in names},
                "out": out,
                "query_rope": self.rope,
                "query_norm_eps": 1e-6 if self.norm else None,
                "layout": self.layout,
                "x_scale": x_scale,
                "weight_scale": weight_scale,
                "form": self._form(tokens),
            },
            {**step.memory, "out": out},
            self.moved(tokens),
        )

    def _form(self, tokens: int) -> Projection:
        """The case's form, where it takes so many tokens: torch scales blocks of multiples of 4."""
        takes = library_multiplies(self.weight, self.layout, tokens, self.rank)
        return self.form if takes else Projection.KERNEL

    def moved(self, tokens: int) -> int:
        """Bytes a call moves."""
        parts = v4_project_bytes(tokens, self.heads, self.rank, self.weight, formats.record(self.record, 512))
        return sum(parts.values())


_V41_SHARDS = ((8, 64), (16, 64), (20, 64), (24, 64), (32, 64), (40, 64), (48, 64), (64, 128))

QUERY_CASES: tuple[V4Case, ...] = (
    *[V4Case(heads, padded) for heads, padded in _V41_SHARDS],
    V4Case(32, 64, form=Form.TWO_LAUNCHES),
    V4Case(64, 0),
    V4Case(32, 64, unstored=5),
    V4Case(16, 64, block_size=16, page_padding=64),
    V4Case(32, 64, dtype=torch.float16),
    V4Case(8, 64, index_dtype=torch.int32),
    V4Case(64, 128, record="v4_fp8", layout="head_major", norm=True, rope=True),
    V4Case(16, 64, record="v4_fp8", layout="head_major", norm=True, rope=True),
    V4Case(64, 64, record="v4_fp8", layout="head_major", norm=True, rope=True, in_place=True),
    V4Case(8, 64, record="v4_fp8", layout="head_major", norm=True, rope=True, form=Form.TWO_LAUNCHES),
    V4Case(8, 64, record="v4_fp8", layout="head_major", rope=True, page_padding=576, unstored=5),
    V4Case(8, 64, record="v4_fp8", layout="head_major", norm=True, rope=True, dtype=torch.float16),
    V4Case(32, 64, layout="head_major", rope=True),
    V4Case(32, 64, layout="head_major", rope=True, in_place=True),
    V4Case(20, 64, layout="head_major", norm=True, rope=True, table_dtype=torch.bfloat16),
    V4Case(24, 64, layout="head_major", norm=True),
    V4Case(16, 64, layout="head_major"),
    V4Case(4, 4, record="bf16", layout="head_major", norm=True, rope=True),
    V4Case(5, 8, record="bf16", layout="head_major", rope=True, index_dtype=torch.int32),
    V4Case(4, 4, record="fp8", layout="head_major", norm=True, rope=True, fp8_query=True),
    V4Case(3, 8, record="fp8", layout="head_major", rope=True, fp8_query=True),
    V4Case(64, 0, record="v4_fp8", layout="head_major"),
    V4Case(64, 0, record="bf16", layout="head_major"),
    V4Case(64, 0, record="fp8", layout="head_major"),
)

PAD_CASES: tuple[PadCase, ...] = (
    *[PadCase(heads, padded) for heads, padded in _V41_SHARDS],
    PadCase(24, 64, layout="head_major"),
    PadCase(32, 64, dtype=torch.float16),
)

KV_CASES: tuple[KvCase, ...] = (
    KvCase(),
    KvCase("v4_fp8", torch.float32),
    KvCase("bf16"),
    KvCase("fp8", torch.float32),
)

PROJECT_CASES: tuple[ProjectCase, ...] = (
    ProjectCase(2, 4, rope=True),
    ProjectCase(3, 8, record="v4_fp8", norm=True, rope=True, rank=192),
    ProjectCase(8, 64, layout="chunk_interleaved"),
    ProjectCase(5, 8, record="bf16", layout="chunk_interleaved"),
    ProjectCase(2, 4, weight="e4m3", rope=True, grouped=True),
    ProjectCase(2, 2, record="v4_fp8", weight="e4m3", norm=True, rope=True),
    ProjectCase(8, 64, layout="chunk_interleaved", weight="e4m3", grouped=True, rank=384),
    ProjectCase(2, 4, record="fp8", weight="mx", rope=True),
    ProjectCase(1, 4, weight="mx", norm=True, grouped=True),
    ProjectCase(3, 8, layout="chunk_interleaved", weight="mx"),
    ProjectCase(2, 4, rope=True, form=Projection.MATMUL),
    ProjectCase(2, 4, weight="e4m3", rope=True, grouped=True, rank=512, form=Projection.MATMUL),
    ProjectCase(2, 4, record="v4_fp8", norm=True, rope=True, form=Projection.MATMUL),
    ProjectCase(8, 64, layout="chunk_interleaved", form=Projection.MATMUL),
)
