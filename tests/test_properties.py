"""Properties of random calls: kernels equal the reference to the bit, and no byte changes that an op does not own.

Every tensor of a call lies somewhere in a poisoned buffer, with strides of its own. A call is made once with each
backend over the same memory; whole buffers are compared afterwards, inputs among them.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from torch import Tensor

from preattn import dsa, formats, policy, v4
from preattn.dispatch import Backend, backend
from preattn.weights import as_chunks

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run on CPU tensors in Triton's interpreter only"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # of the interpreter, at infinities and NaNs
]

EXAMPLES = int(os.environ.get("PREATTN_EXAMPLES", "0"))  # a longer search: this many of each property
SEED = int(os.environ.get("PREATTN_SEED", "20261130"))
POISON = 0xA5

BF16, FP16, FP32, E4M3 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
EDGE_BITS = {  # zeros, subnormals, the least normals, ones and 448 and neighbours, the largest
    BF16: (0x0000, 0x8000, 0x0001, 0x807F, 0x0080, 0x8081, 0x3F7F, 0x3F80, 0x3F81, 0x43E0, 0x43E1, 0x7F7F, 0xFF7F),
    FP16: (0x0000, 0x8000, 0x0001, 0x83FF, 0x0400, 0x3BFF, 0x3C00, 0x3C01, 0x5F00, 0x5F01, 0x7BFF, 0xFBFF),
}
NON_FINITE_BITS = {
    BF16: (0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0xFFFF, 0xFFC1),
    FP16: (0x7C00, 0xFC00, 0x7E00, 0x7C01, 0xFFFF, 0xFE01),
}


def examples(count: int) -> Callable[[Any], Any]:
    """A property with so many examples, the same ones in every run."""
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]
    options = settings(
        max_examples=EXAMPLES or count,
        phases=(Phase.generate,),  # an example is small already, and shrinking takes longer than all of them
        deadline=None,
        database=None,
        suppress_health_check=checks,
    )
    return lambda function: seed(SEED)(options(function))


class Memory:
    """The buffers of one call, and which of their bytes the call may write."""

    def __init__(self, number: int) -> None:
        self.random = random.Random(number)
        self.generator = torch.Generator().manual_seed(number)
        self.buffers: list[Tensor] = []
        self.owned: list[Tensor] = []

    def maybe(self, chance: float = 0.5) -> bool:
        return self.random.random() < chance

    def buffer(self, size: int) -> tuple[Tensor, Tensor]:
        """A poisoned buffer and the mask of what of it may be written."""
        buffer, owned = torch.full((size,), POISON, dtype=torch.uint8), torch.zeros(size, dtype=torch.bool)
        self.buffers.append(buffer)
        self.owned.append(owned)
        return buffer, owned

    def tensor(
        self, *shape: int, dtype: torch.dtype, inner: int = 1, unit: int = 16, written: bool = False, gap: bool = True
    ) -> Tensor:
        """A tensor with ``inner`` contiguous last dims; the outer ones are strided, in any order.

        It begins at a multiple of ``unit`` bytes, and so does each of its rows where there are gaps.
        """
        size = dtype.itemsize
        strides, reach = [0] * len(shape), size
        for dim in range(len(shape) - 1, len(shape) - 1 - inner, -1):
            strides[dim], reach = reach // size, reach * shape[dim]
        outer = list(range(len(shape) - inner - 1, -1, -1))
        if gap and not written:
            self.random.shuffle(outer)
        for dim in outer:
            reach = max(reach, size)
            if gap:
                reach = -(-reach // unit) * unit + unit * self.random.choice((0, 0, 1, 5))
            strides[dim], reach = reach // size, reach * shape[dim]
        start = 64 + unit * self.random.randrange(5)
        start += -start % size
        last = sum([max(0, count - 1) * stride for count, stride in zip(shape, strides, strict=True)])
        buffer, _ = self.buffer(-(-(start + (last + 1) * size + 64) // 16) * 16)
        view = buffer.view(dtype).as_strided(shape, strides, start // size)
        if written:
            self.own(view)
        return view

    def own(self, view: Tensor) -> None:
        """The call may write this view of the newest buffer, and nothing else there."""
        size, owned = view.dtype.itemsize, self.owned[-1].zero_()
        strides = [stride * size for stride in view.stride()]
        if view.numel():
            owned.as_strided((*view.shape, size), (*strides, 1), view.storage_offset() * size).fill_(True)

    def rows(
        self, *shape: int, dtype: torch.dtype, inner: int = 1, non_finite: bool = True, gap: bool = True
    ) -> Tensor:
        """An input: normal rows, rows of one magnitude, of edges, of any bits; some with a NaN or an infinity."""
        view = self.tensor(*shape, dtype=dtype, inner=inner)
        count = 1
        for length in shape[:-1]:
            count *= length
        values = torch.empty(count, shape[-1], dtype=dtype)
        for row in values:
            row.copy_(self._row(shape[-1], dtype))
        view.copy_(values.view(shape).view(torch.int16).view(dtype))
        return view

    def _row(self, length: int, dtype: torch.dtype) -> Tensor:
        kind = self.random.choice(("normal", "normal", "scaled", "edges", "bits", "steps"))
        x = torch.randn(length, generator=self.generator)
        if kind == "scaled":
            x = x * 2.0 ** self.random.randrange(-40, 40)
        elif kind == "steps":  # 448 * 2**k and its neighbours
            around = torch.randint(-1, 2, (length,), generator=self.generator)
            value = torch.full((length,), 448.0 * 2.0 ** self.random.randrange(-24, 8)).to(dtype).view(torch.int16)
            return (value + around.to(torch.int16)).view(dtype)
        row = x.to(dtype)
        bits = row.view(torch.int16)
        if kind == "bits":
            bits = torch.randint(-(2**15), 2**15, (length,), generator=self.generator, dtype=torch.int16)
            row = bits.view(dtype).nan_to_num(0.0, 1.0, -1.0)
        elif kind == "edges":
            edges = torch.tensor(EDGE_BITS[dtype], dtype=torch.int32).to(torch.int16)
            row = edges[torch.randint(len(edges), (length,), generator=self.generator)].view(dtype)
        if length and self.maybe(0.15):
            row = row.clone()
            wanted = torch.tensor([self.random.choice(NON_FINITE_BITS[dtype])], dtype=torch.int32).to(torch.int16)
            row.view(torch.int16)[self.random.randrange(length)] = wanted[0]
        return row

    def weight(self, length: int, dtype: torch.dtype) -> Tensor:
        view = self.tensor(length, dtype=dtype)
        view.copy_(torch.randn(length, generator=self.generator))
        return view

    def scale(self, low: int, high: int) -> Tensor:
        """One float32 of any rank, at any multiple of 4 bytes."""
        odd = 3.0 * 2.0 ** self.random.randrange(low, high - 1)
        value = self.random.choice((1.0, 0.37, 1.75, 2.0 - 2.0**-23, 2.0**low, 2.0**high, odd))
        view = self.tensor(*[1] * self.random.randrange(3), dtype=FP32, inner=0, unit=4)
        return view.fill_(value)

    def table(self, dtype: torch.dtype, unit: int) -> Tensor:
        """A RoPE table of 1 to 40 positions."""
        length = self.random.choice((1, 2, 40))
        view = self.tensor(length, 64, dtype=dtype, inner=2, unit=unit, gap=False)
        angle = torch.rand(length, 32, generator=self.generator) * 7
        view.copy_(torch.cat([angle.cos(), angle.sin()], -1))
        return view

    def positions(self, tokens: int, table: Tensor, dtype: torch.dtype) -> Tensor:
        view = self.tensor(tokens, dtype=dtype, unit=dtype.itemsize, gap=False)
        return view.copy_(torch.randint(len(table), (tokens,), generator=self.generator))

    def paged(self, record: formats.Record, tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """A cache in a pool, and slots, distinct or outside it; their bytes are owned."""
        block_size = self.random.choice((1, 2, 3, 4, 16, 60, 64, 256))
        blocks = self.random.choice((0, 1, 2, 3)) + -(-tokens // block_size)
        stride = -(-record.page_bytes(block_size) // 16) * 16 + self.random.choice((0, 0, 16, 576))
        offset = 16 * self.random.randrange(8)
        pool, owned = self.buffer(offset + blocks * stride + 16 * self.random.randrange(4))
        cache = formats.cache_view(
            pool, record, block_size=block_size, num_blocks=blocks, block_stride=stride, offset=offset
        )
        if self.maybe(0.3):
            cache = formats.cache_view(
                pool,
                formats.Record(record.name, record.bytes, record.parts, record.tail_bytes),
                block_size=block_size,
                num_blocks=blocks,
                block_stride=stride,
                offset=offset,
            )
        capacity = blocks * block_size
        count = self.random.choice((tokens, tokens, self.random.randrange(tokens + 1)))
        slots = torch.randperm(max(capacity, count), generator=self.generator)[:count]
        outside = [-1, -2, capacity, capacity + block_size, 2**31 - 1, -(2**31)]
        if dtype == torch.int64:
            outside += [2**31, 2**32, 2**40 + 17, -(2**63), 2**63 - 1]
        for row in range(count):
            if self.maybe(0.25):
                slots[row] = self.random.choice(outside)
        for slot in slots.tolist():
            if 0 <= slot < capacity:
                page, place = offset + slot // block_size * stride, slot % block_size
                owned[page + place * record.body_bytes :][: record.body_bytes] = True
                owned[page + block_size * record.body_bytes + place * record.tail_bytes :][: record.tail_bytes] = True
        view = self.tensor(count, dtype=dtype, unit=dtype.itemsize, gap=False)
        return cache, view.copy_(slots)

    def run(self, name: Backend, function: Callable[..., Any], arguments: dict[str, Any]) -> list[Tensor]:
        """Make the call; what it returned and every buffer, as bytes. The buffers are then as they were."""
        before = [buffer.clone() for buffer in self.buffers]
        with backend(name):
            result = function(**arguments)
        results = result if isinstance(result, tuple) else (result,)
        after = [r.contiguous().flatten().view(torch.uint8).clone() for r in results if isinstance(r, Tensor)]
        after += [buffer.clone() for buffer in self.buffers]
        for buffer, old in zip(self.buffers, before, strict=True):
            buffer.copy_(old)
        return after

    def check(self, function: Callable[..., Any], **arguments: Any) -> None:
        """Call with both backends; compare bytes, and hold changes against what is owned."""
        reference = self.run("reference", function, arguments)
        kernels = self.run("triton", function, arguments)
        for index, (want, got) in enumerate(zip(reference, kernels, strict=True)):
            assert torch.equal(want, got), f"{index}: {(want != got).nonzero().flatten()[:8].tolist()}"
        for before, owned, after in zip(self.buffers, self.owned, kernels[-len(self.buffers) :], strict=True):
            assert not ((before != after) & ~owned).any(), "a byte changed that the op does not own"


NUMBERS = st.integers(0, 2**32 - 1)
TOKENS = st.sampled_from((0, 1, 2, 3, 5, 17))
HEADS = st.sampled_from((1, 2, 3, 4, 5, 8))
DTYPES = st.sampled_from((BF16, FP16))
INDEX = st.sampled_from((torch.int64, torch.int32))
TABLES = st.sampled_from((FP32, BF16))
PAIRINGS = st.sampled_from(("interleaved", "half_split"))
FLAG = st.booleans()
PROJECTED = st.sampled_from((0, 1, 3, 17, 40, 70))  # both orders of the product; KV programs with more than one batch
PADDING = st.integers(0, 3)


@examples(60)
@given(NUMBERS, TOKENS, HEADS, st.data())
def test_v4_query_kv_insert(number: int, tokens: int, heads: int, data: st.DataObject) -> None:
    memory = Memory(number)
    dtype, layout = data.draw(DTYPES), data.draw(st.sampled_from(policy.LAYOUTS))
    record = data.draw(st.sampled_from(list(v4.RECORDS)))
    padded = data.draw(st.sampled_from((None, 0, heads, heads + 1, 2 * heads, 16)))
    major = layout == "head_major"
    quantise = major and data.draw(FLAG)
    in_place = major and not quantise and padded != 0 and data.draw(FLAG)
    cache, slots = memory.paged(v4.RECORDS[record], tokens, data.draw(INDEX))
    table = memory.table(data.draw(TABLES), 2 if memory.maybe() else 16)
    rows = heads if padded is None else padded
    query = memory.rows(tokens, heads, 512, dtype=dtype, inner=1 if major else 2)
    out = None
    if in_place:
        out = memory.tensor(tokens, rows, 512, dtype=dtype, inner=2, written=True)
        out.zero_()
        out[:, :heads] = query
        query = out[:, :heads]
        memory.own(query)
    elif data.draw(FLAG):
        out = memory.tensor(tokens, rows, 512, dtype=E4M3 if quantise else dtype, inner=2, written=True)
    memory.check(
        v4.query_kv_insert,
        query=query,
        kv=memory.rows(tokens, 512, dtype=dtype),
        cache=cache,
        slots=slots,
        positions=memory.positions(tokens, table, data.draw(INDEX)),
        rope_table=table,
        record=record,
        query_rope=major and data.draw(FLAG),
        query_norm_eps=data.draw(st.sampled_from((None, 1e-6, 1e-5, 0.0))) if major else None,
        padded_heads=padded,
        layout=layout,
        query_scale_inv=memory.scale(-30, 30) if quantise else None,
        kv_scale=memory.scale(-100, 100) if record == "fp8" else None,
        out=out,
        form=data.draw(st.sampled_from(("one_launch", "two_launches"))),
    )


@examples(60)
@given(NUMBERS, TOKENS, st.data())
def test_v4_kv_insert(number: int, tokens: int, data: st.DataObject) -> None:
    memory = Memory(number)
    record, dtype = data.draw(st.sampled_from(list(v4.RECORDS))), data.draw(DTYPES)
    cache, slots = memory.paged(v4.RECORDS[record], tokens, data.draw(INDEX))
    table = memory.table(data.draw(TABLES), 2 if memory.maybe() else 16)
    weight = data.draw(st.sampled_from((None, BF16, FP16, FP32)))
    memory.check(
        v4.kv_insert,
        kv=memory.rows(tokens, 512, dtype=dtype),
        cache=cache,
        slots=slots,
        positions=memory.positions(tokens, table, data.draw(INDEX)),
        rope_table=table,
        record=record,
        kv_scale=memory.scale(-100, 100) if record == "fp8" else None,
        norm_weight=None if weight is None else memory.weight(512, weight),
        norm_eps=data.draw(st.sampled_from((1e-6, 1e-5, 0.0))),
    )


@examples(30)
@given(NUMBERS, TOKENS, HEADS, st.data())
def test_v4_pad_query(number: int, tokens: int, heads: int, data: st.DataObject) -> None:
    memory = Memory(number)
    dtype, layout = data.draw(DTYPES), data.draw(st.sampled_from(policy.LAYOUTS))
    padded = heads + data.draw(st.integers(0, 9))
    query = memory.rows(tokens, heads, 512, dtype=dtype, inner=1 if layout == "head_major" else 2)
    out = memory.tensor(tokens, padded, 512, dtype=dtype, inner=2, written=True) if data.draw(FLAG) else None
    memory.check(v4.pad_query, query=query, padded_heads=padded, layout=layout, out=out)


def projection(memory: Memory, tokens: int, heads: int, data: st.DataObject) -> dict[str, Any]:
    """Operands of a projection whose sums are exact in any order: small integers, scales that are powers of two."""

    def integers(view: Tensor) -> Tensor:
        return view.copy_(torch.randint(-4, 5, view.shape, generator=memory.generator))

    def exponents(view: Tensor) -> Tensor:
        return view.copy_(torch.randint(-2, 3, view.shape, generator=memory.generator))

    kind, layout = data.draw(st.sampled_from(("bf16", "e4m3", "mx"))), data.draw(st.sampled_from(policy.LAYOUTS))
    rank, padded = data.draw(st.sampled_from((64, 128) if kind == "bf16" else (128,))), heads + data.draw(PADDING)
    dtype, rows = BF16 if kind == "bf16" else E4M3, heads * 512
    operands: dict[str, Any] = {
        "x": integers(memory.tensor(tokens, rank, dtype=dtype)),
        "weight": integers(memory.tensor(rows, rank, dtype=dtype)),
        "layout": layout,
        "form": data.draw(st.sampled_from(("kernel", "kernel", "kernel", "matmul"))) if kind == "bf16" else "kernel",
    }
    if kind != "bf16":
        shape = (tokens, rank // 128) if data.draw(FLAG) else (tokens,)
        operands["x_scale"] = exponents(memory.tensor(*shape, dtype=FP32, inner=0, unit=4)).exp2_()
        if kind == "e4m3":
            scale = memory.tensor(rows // 128, rank // 128, dtype=FP32, inner=2, unit=4, gap=False)
            operands["weight_scale"] = exponents(scale).exp2_()
        else:
            codes = memory.tensor(rows, rank // 32, dtype=torch.uint8, inner=2, unit=1, gap=False)
            operands["weight_scale"] = codes.random_(125, 130, generator=memory.generator)
    out = memory.tensor(tokens, padded, 512, dtype=BF16, inner=2, written=True)
    memory.own(as_chunks(out)[:, :, :heads] if layout == "chunk_interleaved" else out[:, :heads])
    return {**operands, "out": out}


@examples(40)
@given(NUMBERS, PROJECTED, st.sampled_from((1, 2, 3)), st.data())
def test_v4_project_query(number: int, tokens: int, heads: int, data: st.DataObject) -> None:
    memory = Memory(number)
    memory.check(v4.project_query, **projection(memory, tokens, heads, data))


@examples(40)
@given(NUMBERS, PROJECTED, st.sampled_from((1, 2, 3)), st.data())
def test_v4_project_query_kv_insert(number: int, tokens: int, heads: int, data: st.DataObject) -> None:
    memory = Memory(number)
    operands = projection(memory, tokens, heads, data)
    major, record = operands["layout"] == "head_major", data.draw(st.sampled_from(list(v4.RECORDS)))
    cache, slots = memory.paged(v4.RECORDS[record], tokens, data.draw(INDEX))
    table = memory.table(data.draw(TABLES), 2 if memory.maybe() else 16)
    memory.check(
        v4.project_query_kv_insert,
        **operands,
        kv=memory.rows(tokens, 512, dtype=BF16),
        cache=cache,
        slots=slots,
        positions=memory.positions(tokens, table, data.draw(INDEX)),
        rope_table=table,
        record=record,
        query_rope=major and data.draw(FLAG),
        query_norm_eps=data.draw(st.sampled_from((None, 1e-6, 0.0))) if major else None,
        kv_scale=memory.scale(-100, 100) if record == "fp8" else None,
    )


@examples(60)
@given(NUMBERS, TOKENS, HEADS, st.data())
def test_dsa_query(number: int, tokens: int, heads: int, data: st.DataObject) -> None:
    memory = Memory(number)
    rope_dim = data.draw(st.sampled_from((64, 64, 64, 0)))
    form, quantise = data.draw(st.sampled_from(("packed", "pair"))), data.draw(FLAG)
    dtype = E4M3 if quantise else BF16
    where = data.draw(st.sampled_from(("apart", "cast", "front", "none")))
    padded = data.draw(st.sampled_from((None, heads, heads + 1, 16))) if form == "packed" else None
    rows = heads if padded is None else padded
    latent: Tensor | None = memory.rows(tokens, heads, 512, dtype=BF16)
    if where == "cast" and quantise:
        latent = latent.clamp(-448, 448).to(E4M3)
    out = None
    if form == "packed" and (where in ("front", "none") or data.draw(FLAG)):
        out = memory.tensor(tokens, rows, 512 + rope_dim, dtype=dtype, inner=2, written=True)
        if where in ("front", "none"):
            memory.own(out[:, :heads, 512:])
            latent = out[:, :heads, :512] if where == "front" else None
    table = memory.table(data.draw(TABLES), 16) if rope_dim else None
    index_heads = data.draw(st.sampled_from((0, 1, 3, 4, 16)))
    index_table = memory.table(data.draw(TABLES), 16) if index_heads and (table is None or data.draw(FLAG)) else None
    shorter = min([t for t in (table, index_table) if t is not None], key=len, default=torch.zeros(9, 64))
    indexer: dict[str, Any] = {}
    if index_heads:
        weights = memory.tensor(tokens, index_heads, dtype=data.draw(TABLES), unit=4)
        indexer = {
            "index_query": memory.rows(tokens, index_heads, 128, dtype=BF16, inner=2),
            "index_weights": weights.copy_(torch.randn(tokens, index_heads, generator=memory.generator)),
            "index_pairing": data.draw(PAIRINGS),
            "index_rope_table": index_table,
            "softmax_scale": 128**-0.5,
            "head_scale": index_heads**-0.5,
        }
    memory.check(
        dsa.query,
        q_pe=memory.rows(tokens, heads, rope_dim, dtype=BF16),
        latent=latent,
        positions=memory.positions(tokens, shorter, data.draw(INDEX)),
        rope_table=table,
        form=form,
        padded_heads=padded,
        query_scale=memory.scale(-64, 64) if quantise else None,
        rope_output=data.draw(PAIRINGS),
        out=out,
        **indexer,
    )


@examples(20)
@given(NUMBERS, st.sampled_from((0, 1, 3, 17)), st.sampled_from((1, 2, 3)), st.data())
def test_dsa_absorb_query(number: int, tokens: int, heads: int, data: st.DataObject) -> None:
    """On small integers, whose sums are exact in any order."""
    memory = Memory(number)
    nope, quantise = data.draw(st.sampled_from((64, 128, 192))), data.draw(FLAG)
    q_nope, w_uk = memory.tensor(tokens, heads, nope, dtype=BF16), memory.tensor(heads, nope, 512, dtype=BF16)
    for view in (q_nope, w_uk):
        view.copy_(torch.randint(-4, 5, view.shape, generator=memory.generator))
    padded, width = heads + data.draw(st.integers(0, 2)), data.draw(st.sampled_from((512, 576, 1024)))
    out = memory.tensor(tokens, padded, width, dtype=E4M3 if quantise else BF16, inner=2, written=True)
    memory.own(out[:, :heads, :512])
    scale = memory.scale(-8, 8) if quantise else None
    memory.check(dsa.absorb_query, q_nope=q_nope, w_uk=w_uk, query_scale=scale, out=out)


@examples(60)
@given(NUMBERS, TOKENS, st.data())
def test_dsa_norm_rope_insert(number: int, tokens: int, data: st.DataObject) -> None:
    memory = Memory(number)
    rope_dim = data.draw(st.sampled_from((64, 64, 64, 0)))
    records = dsa.RECORDS if rope_dim else dsa.NO_ROPE_RECORDS
    record, rank = data.draw(st.sampled_from(list(records))), data.draw(st.sampled_from((8, 24, 64, 1536)))
    weights = data.draw(st.sampled_from((BF16, FP32)))
    cache = slots = None
    if data.draw(st.sampled_from((True, True, True, False))):
        cache, slots = memory.paged(records[record], tokens, data.draw(INDEX))
    table = memory.table(data.draw(TABLES), 16) if rope_dim else None
    q_latent = memory.rows(tokens, rank, dtype=BF16)
    out = data.draw(st.sampled_from((None, "in place", "apart")))
    if out == "in place":
        memory.own(q_latent)
        target: Tensor | None = q_latent
    else:
        target = None if out is None else memory.tensor(tokens, rank, dtype=BF16, written=True)
    indexer: dict[str, Any] = {}
    index_table = None
    if data.draw(st.sampled_from((True, True, False))):
        index_record = data.draw(st.sampled_from(list(dsa.INDEX_RECORDS)))
        if table is None or data.draw(FLAG):
            index_table = memory.table(data.draw(TABLES), 16)
        index_cache, index_slots = memory.paged(dsa.INDEX_RECORDS[index_record], tokens, data.draw(INDEX))
        if slots is None:
            for owned in memory.owned[-2:]:
                owned.zero_()
        indexer = {
            "index_key": memory.rows(tokens, 128, dtype=BF16),
            "index_weight": memory.weight(128, data.draw(st.sampled_from((BF16, FP32)))),
            "index_bias": memory.weight(128, data.draw(st.sampled_from((BF16, FP32)))),
            "index_cache": index_cache,
            "index_record": index_record,
            "index_slots": index_slots,
            "index_pairing": data.draw(PAIRINGS),
            "index_rope_table": index_table,
            "index_eps": data.draw(st.sampled_from((1e-6, 1e-5))),
        }
        if data.draw(FLAG):
            width, extra = data.draw(st.sampled_from((1, 4, 20, 64, 100))), data.draw(st.integers(0, 2))
            top_k = memory.tensor(tokens + extra, width, dtype=torch.int32, written=True)
            memory.own(top_k[:tokens])
            indexer["top_k"] = top_k
    shorter = min([t for t in (table, index_table) if t is not None], key=len, default=torch.zeros(9, 64))
    k_pe = memory.rows(tokens, rope_dim, dtype=BF16)
    memory.check(
        dsa.norm_rope_insert,
        q_latent=q_latent,
        kv_latent=memory.rows(tokens, 512, dtype=BF16),
        k_pe=k_pe.unsqueeze(1) if data.draw(FLAG) else k_pe,
        cache=cache,
        slots=slots,
        positions=memory.positions(tokens, shorter, data.draw(INDEX)),
        rope_table=table,
        record=record,
        q_weight=memory.weight(rank, weights),
        kv_weight=memory.weight(512, weights),
        q_eps=data.draw(st.sampled_from((1e-6, 1e-5, 0.0))),
        kv_scale=memory.scale(-64, 64) if record == "fp8" else None,
        return_kv=data.draw(FLAG),
        rope_output=data.draw(PAIRINGS),
        out=target,
        **indexer,
    )
