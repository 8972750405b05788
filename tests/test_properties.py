"""Properties of random calls: kernels equal the reference to the bit, and no byte changes that an op does not own.

Every tensor of a call lies somewhere in a poisoned buffer, with strides of its own. A call is made once with each
backend, over copies of the same memory: on the CPU, and where kernels run. Whole buffers are compared afterwards,
inputs among them.

In the interpreter every choice of an example is hypothesis's. On a GPU that would compile a kernel for nearly every
example, so the choices that kernels are compiled for come from a few variants of each property; all others, and every
value, stride, offset, slot and position, stay free.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from functools import cache
from itertools import count
from typing import Any

import placing
import pytest
import torch
from conftest import DEVICE, SEARCH
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from torch import Tensor

from preattn import dsa, formats, policy, v4
from preattn.cases.base import as_bytes
from preattn.dispatch import Backend, backend, use_kernels
from preattn.weights import as_chunks

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter, at infinities and NaNs

Choose = Callable[[Sequence[Any]], Any]

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


@cache
def order(name: str, turn: int, variants: int) -> list[int]:
    """Which option each variant of a property takes when it chooses for the so-many-th time."""
    numbers = list(range(variants))
    random.Random(f"{name}/{turn}").shuffle(numbers)
    return numbers


def structure(name: str, variant: int, variants: int) -> Choose:
    """The choices of one variant of a property: the same ones in every example of it.

    All variants together take every option equally often, but at choices that only some of them have.
    """
    turns = count()
    return lambda options: options[order(name, next(turns), variants)[variant] % len(options)]


PROPERTIES: list[str] = []
"""The names of all, in order of definition."""


def examples(few: int) -> Callable[[Callable[[Memory], None]], Callable[..., None]]:
    """A property of so many random calls, or of its share of a longer search; the same ones in every run."""

    def decorate(holds: Callable[[Memory], None]) -> Callable[..., None]:
        name = holds.__name__.removeprefix("test_")
        PROPERTIES.append(name)

        @pytest.mark.parametrize("part", range(SEARCH.parts))
        def run(part: int, record_property: Callable[[str, object], None]) -> None:
            done = {"property": name, "examples": 0, "bytes": 0, "seconds": 0.0}
            variants = range(SEARCH.variants)[part :: SEARCH.parts]  # parts do not compile each other's

            @seed(SEARCH.seed + part)
            @settings(
                max_examples=SEARCH.share(few, len(PROPERTIES)),
                phases=(Phase.generate,),  # an example is small already, and shrinking takes longer than all of them
                deadline=None,
                database=None,
                suppress_health_check=[
                    HealthCheck.too_slow,
                    HealthCheck.data_too_large,
                    HealthCheck.large_base_example,
                ],
            )
            @given(NUMBERS, st.data())
            def call(number: int, data: st.DataObject) -> None:
                def draw(options: Sequence[Any]) -> Any:
                    return data.draw(st.sampled_from(options))

                pick = structure(name, draw(variants), SEARCH.variants) if variants else draw
                memory = Memory(number, draw, pick)
                holds(memory)
                done["examples"] += 1
                done["bytes"] += memory.compared

            start = time.perf_counter()
            try:
                call()
            finally:
                done["seconds"] = time.perf_counter() - start
                record_property("random calls", done)

        run.__name__, run.__doc__ = holds.__name__, holds.__doc__
        return run

    return decorate


def moved(value: Any, homes: dict[int, Tensor], device: str) -> Any:
    """An argument elsewhere: a tensor is the same view of its buffer's copy (``homes``: by the buffer's address).

    One that lies in no buffer is copied, with its strides; what is no tensor stays as it is.
    """
    if not isinstance(value, Tensor):
        return value
    home = homes.get(value.untyped_storage().data_ptr())
    if home is None:
        return value.to(device, copy=True)
    return home.view(value.dtype).as_strided(value.shape, value.stride(), value.storage_offset())


class Memory:
    """The buffers of one call, and which of their bytes the call may write.

    Attributes:
        draw: one of some options, freely.
        pick: one of some options that kernels are compiled for.
        compared: bytes that :meth:`check` has compared.
    """

    def __init__(self, number: int, draw: Choose, pick: Choose) -> None:
        self.draw, self.pick = draw, pick
        self.random = random.Random(number)
        self.generator = torch.Generator().manual_seed(number)
        self.buffers: list[Tensor] = []
        self.owned: list[Tensor] = []
        self.compared = 0

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
        block_size = self.pick((1, 2, 3, 4, 16, 60, 64, 256))
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
        """Make the call on copies of all buffers; what it returned and every copy, as bytes on the CPU."""
        device = DEVICE if name == "triton" else "cpu"
        copies = [buffer.to(device, copy=True) for buffer in self.buffers]
        homes = {old.untyped_storage().data_ptr(): new for old, new in zip(self.buffers, copies, strict=True)}
        with backend(name), placing.poisoned_results(0x5A if name == "triton" else 0xA5):
            result = function(**{key: moved(value, homes, device) for key, value in arguments.items()})
        results = result if isinstance(result, tuple) else (result,)
        return [as_bytes(tensor) for tensor in (*results, *copies) if isinstance(tensor, Tensor)]

    def check(self, function: Callable[..., Any], **arguments: Any) -> None:
        """Call with both backends; compare bytes, and hold changes against what is owned."""
        reference = self.run("reference", function, arguments)
        kernels = self.run("triton", function, arguments)
        for index, (want, got) in enumerate(zip(reference, kernels, strict=True)):
            assert torch.equal(want, got), f"{index}: {(want != got).nonzero().flatten()[:8].tolist()}"
            self.compared += want.numel()
        for before, owned, after in zip(self.buffers, self.owned, kernels[-len(self.buffers) :], strict=True):
            assert not ((before != after) & ~owned).any(), "a byte changed that the op does not own"


NUMBERS = st.integers(0, 2**32 - 1)
TOKENS = (0, 1, 2, 3, 5, 17)
HEADS = (1, 2, 3, 4, 5, 8)
DTYPES = (BF16, FP16)
INDEX = (torch.int64, torch.int32)
TABLES = (FP32, BF16)
PAIRINGS = ("interleaved", "half_split")
FLAG = (False, True)
PROJECTED = (0, 1, 3, 17, 40, 70)  # both orders of the product; KV programs with more than one batch


@examples(60)
def test_v4_query_kv_insert(memory: Memory) -> None:
    tokens, heads = memory.draw(TOKENS), memory.pick(HEADS)
    dtype, layout = memory.pick(DTYPES), memory.pick(policy.LAYOUTS)
    record = memory.pick(list(v4.RECORDS))
    padded = memory.pick((None, 0, heads, heads + 1, 2 * heads, 16))
    major = layout == "head_major"
    quantise = major and memory.pick(FLAG)
    in_place = major and not quantise and padded != 0 and memory.pick(FLAG)
    cache, slots = memory.paged(v4.RECORDS[record], tokens, memory.pick(INDEX))
    table = memory.table(memory.pick(TABLES), 2 if memory.maybe() else 16)
    rows = heads if padded is None else padded
    query = memory.rows(tokens, heads, 512, dtype=dtype, inner=1 if major else 2)
    out = None
    if in_place:
        out = memory.tensor(tokens, rows, 512, dtype=dtype, inner=2, written=True)
        out.zero_()
        out[:, :heads] = query
        query = out[:, :heads]
        memory.own(query)
    elif memory.draw(FLAG):
        out = memory.tensor(tokens, rows, 512, dtype=E4M3 if quantise else dtype, inner=2, written=True)
    memory.check(
        v4.query_kv_insert,
        query=query,
        kv=memory.rows(tokens, 512, dtype=dtype),
        cache=cache,
        slots=slots,
        positions=memory.positions(tokens, table, memory.pick(INDEX)),
        rope_table=table,
        record=record,
        query_rope=major and memory.pick(FLAG),
        query_norm_eps=memory.pick((None, 1e-6, 1e-5, 0.0)) if major else None,
        padded_heads=padded,
        layout=layout,
        query_scale_inv=memory.scale(-30, 30) if quantise else None,
        kv_scale=memory.scale(-100, 100) if record == "fp8" else None,
        out=out,
        form=memory.pick(("one_launch", "two_launches")),
    )


@examples(60)
def test_v4_kv_insert(memory: Memory) -> None:
    tokens = memory.draw(TOKENS)
    record, dtype = memory.pick(list(v4.RECORDS)), memory.pick(DTYPES)
    cache, slots = memory.paged(v4.RECORDS[record], tokens, memory.pick(INDEX))
    table = memory.table(memory.pick(TABLES), 2 if memory.maybe() else 16)
    weight = memory.pick((None, BF16, FP16, FP32))
    memory.check(
        v4.kv_insert,
        kv=memory.rows(tokens, 512, dtype=dtype),
        cache=cache,
        slots=slots,
        positions=memory.positions(tokens, table, memory.pick(INDEX)),
        rope_table=table,
        record=record,
        kv_scale=memory.scale(-100, 100) if record == "fp8" else None,
        norm_weight=None if weight is None else memory.weight(512, weight),
        norm_eps=memory.draw((1e-6, 1e-5, 0.0)),
    )


@examples(30)
def test_v4_pad_query(memory: Memory) -> None:
    tokens, heads = memory.draw(TOKENS), memory.pick(HEADS)
    dtype, layout = memory.pick(DTYPES), memory.pick(policy.LAYOUTS)
    padded = heads + memory.pick(range(10))
    query = memory.rows(tokens, heads, 512, dtype=dtype, inner=1 if layout == "head_major" else 2)
    out = memory.tensor(tokens, padded, 512, dtype=dtype, inner=2, written=True) if memory.draw(FLAG) else None
    memory.check(v4.pad_query, query=query, padded_heads=padded, layout=layout, out=out)


def projection(memory: Memory, tokens: int, heads: int) -> dict[str, Any]:
    """Operands of a projection whose sums are exact in any order: small integers, scales that are powers of two."""

    def integers(view: Tensor) -> Tensor:
        return view.copy_(torch.randint(-4, 5, view.shape, generator=memory.generator))

    def exponents(view: Tensor) -> Tensor:
        return view.copy_(torch.randint(-2, 3, view.shape, generator=memory.generator))

    kind, layout = memory.pick(("bf16", "e4m3", "mx")), memory.pick(policy.LAYOUTS)
    rank, padded = memory.pick((64, 128) if kind == "bf16" else (128,)), heads + memory.pick(range(4))
    dtype, rows = BF16 if kind == "bf16" else E4M3, heads * 512
    operands: dict[str, Any] = {
        "x": integers(memory.tensor(tokens, rank, dtype=dtype)),
        "weight": integers(memory.tensor(rows, rank, dtype=dtype)),
        "layout": layout,
        "form": memory.pick(("kernel", "kernel", "kernel", "matmul")) if kind == "bf16" else "kernel",
    }
    if kind != "bf16":
        shape = (tokens, rank // 128) if memory.pick(FLAG) else (tokens,)
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
def test_v4_project_query(memory: Memory) -> None:
    tokens, heads = memory.draw(PROJECTED), memory.pick((1, 2, 3))
    memory.check(v4.project_query, **projection(memory, tokens, heads))


@examples(40)
def test_v4_project_query_kv_insert(memory: Memory) -> None:
    tokens, heads = memory.draw(PROJECTED), memory.pick((1, 2, 3))
    operands = projection(memory, tokens, heads)
    major, record = operands["layout"] == "head_major", memory.pick(list(v4.RECORDS))
    cache, slots = memory.paged(v4.RECORDS[record], tokens, memory.pick(INDEX))
    table = memory.table(memory.pick(TABLES), 2 if memory.maybe() else 16)
    memory.check(
        v4.project_query_kv_insert,
        **operands,
        kv=memory.rows(tokens, 512, dtype=BF16),
        cache=cache,
        slots=slots,
        positions=memory.positions(tokens, table, memory.pick(INDEX)),
        rope_table=table,
        record=record,
        query_rope=major and memory.pick(FLAG),
        query_norm_eps=memory.pick((None, 1e-6, 0.0)) if major else None,
        kv_scale=memory.scale(-100, 100) if record == "fp8" else None,
    )


@examples(60)
def test_dsa_query(memory: Memory) -> None:
    tokens, heads = memory.draw(TOKENS), memory.pick(HEADS)
    rope_dim = memory.pick((64, 64, 64, 0))
    form, quantise = memory.pick(("packed", "pair")), memory.pick(FLAG)
    dtype = E4M3 if quantise else BF16
    where = memory.pick(("apart", "cast", "front", "none"))
    padded = memory.pick((None, heads, heads + 1, 16)) if form == "packed" else None
    rows = heads if padded is None else padded
    latent: Tensor | None = memory.rows(tokens, heads, 512, dtype=BF16)
    if where == "cast" and quantise:
        latent = latent.clamp(-448, 448).to(E4M3)
    out = None
    if form == "packed" and (where in ("front", "none") or memory.pick(FLAG)):
        out = memory.tensor(tokens, rows, 512 + rope_dim, dtype=dtype, inner=2, written=True)
        if where in ("front", "none"):
            memory.own(out[:, :heads, 512:])
            latent = out[:, :heads, :512] if where == "front" else None
    table = memory.table(memory.pick(TABLES), 16) if rope_dim else None
    index_heads = memory.pick((0, 1, 3, 4, 16))
    index_table = None
    if index_heads and (table is None or memory.pick(FLAG)):
        index_table = memory.table(memory.pick(TABLES), 16)
    shorter = min([t for t in (table, index_table) if t is not None], key=len, default=torch.zeros(9, 64))
    indexer: dict[str, Any] = {}
    if index_heads:
        weights = memory.tensor(tokens, index_heads, dtype=memory.pick(TABLES), unit=4)
        indexer = {
            "index_query": memory.rows(tokens, index_heads, 128, dtype=BF16, inner=2),
            "index_weights": weights.copy_(torch.randn(tokens, index_heads, generator=memory.generator)),
            "index_pairing": memory.pick(PAIRINGS),
            "index_rope_table": index_table,
            "softmax_scale": 128**-0.5,
            "head_scale": index_heads**-0.5,
        }
    memory.check(
        dsa.query,
        q_pe=memory.rows(tokens, heads, rope_dim, dtype=BF16),
        latent=latent,
        positions=memory.positions(tokens, shorter, memory.pick(INDEX)),
        rope_table=table,
        form=form,
        padded_heads=padded,
        query_scale=memory.scale(-64, 64) if quantise else None,
        rope_output=memory.pick(PAIRINGS),
        out=out,
        **indexer,
    )


@examples(20)
def test_dsa_absorb_query(memory: Memory) -> None:
    """On small integers, whose sums are exact in any order."""
    tokens, heads = memory.draw((0, 1, 3, 17)), memory.pick((1, 2, 3))
    nope, quantise = memory.pick((64, 128, 192)), memory.pick(FLAG)
    q_nope, w_uk = memory.tensor(tokens, heads, nope, dtype=BF16), memory.tensor(heads, nope, 512, dtype=BF16)
    for view in (q_nope, w_uk):
        view.copy_(torch.randint(-4, 5, view.shape, generator=memory.generator))
    padded, width = heads + memory.draw(range(3)), memory.pick((512, 576, 1024))
    out = memory.tensor(tokens, padded, width, dtype=E4M3 if quantise else BF16, inner=2, written=True)
    memory.own(out[:, :heads, :512])
    scale = memory.scale(-8, 8) if quantise else None
    memory.check(dsa.absorb_query, q_nope=q_nope, w_uk=w_uk, query_scale=scale, out=out)


@examples(60)
def test_dsa_norm_rope_insert(memory: Memory) -> None:
    tokens = memory.draw(TOKENS)
    rope_dim = memory.pick((64, 64, 64, 0))
    records = dsa.RECORDS if rope_dim else dsa.NO_ROPE_RECORDS
    record, rank = memory.pick(list(records)), memory.pick((8, 24, 64, 1536))
    weights = memory.pick((BF16, FP32))
    cache = slots = None
    if memory.pick((True, True, True, False)):
        cache, slots = memory.paged(records[record], tokens, memory.pick(INDEX))
    table = memory.table(memory.pick(TABLES), 16) if rope_dim else None
    q_latent = memory.rows(tokens, rank, dtype=BF16)
    out = memory.pick((None, "in place", "apart"))
    if out == "in place":
        memory.own(q_latent)
        target: Tensor | None = q_latent
    else:
        target = None if out is None else memory.tensor(tokens, rank, dtype=BF16, written=True)
    indexer: dict[str, Any] = {}
    index_table = None
    if memory.pick((True, True, False)):
        index_record = memory.pick(list(dsa.INDEX_RECORDS))
        if table is None or memory.pick(FLAG):
            index_table = memory.table(memory.pick(TABLES), 16)
        index_cache, index_slots = memory.paged(dsa.INDEX_RECORDS[index_record], tokens, memory.pick(INDEX))
        if slots is None:
            for owned in memory.owned[-2:]:
                owned.zero_()
        indexer = {
            "index_key": memory.rows(tokens, 128, dtype=BF16),
            "index_weight": memory.weight(128, memory.pick((BF16, FP32))),
            "index_bias": memory.weight(128, memory.pick((BF16, FP32))),
            "index_cache": index_cache,
            "index_record": index_record,
            "index_slots": index_slots,
            "index_pairing": memory.pick(PAIRINGS),
            "index_rope_table": index_table,
            "index_eps": memory.draw((1e-6, 1e-5)),
        }
        if memory.pick(FLAG):
            width, extra = memory.pick((1, 4, 20, 64, 100)), memory.draw(range(3))
            top_k = memory.tensor(tokens + extra, width, dtype=torch.int32, written=True)
            memory.own(top_k[:tokens])
            indexer["top_k"] = top_k
    shorter = min([t for t in (table, index_table) if t is not None], key=len, default=torch.zeros(9, 64))
    k_pe = memory.rows(tokens, rope_dim, dtype=BF16)
    memory.check(
        dsa.norm_rope_insert,
        q_latent=q_latent,
        kv_latent=memory.rows(tokens, 512, dtype=BF16),
        k_pe=k_pe.unsqueeze(1) if memory.draw(FLAG) else k_pe,
        cache=cache,
        slots=slots,
        positions=memory.positions(tokens, shorter, memory.pick(INDEX)),
        rope_table=table,
        record=record,
        q_weight=memory.weight(rank, weights),
        kv_weight=memory.weight(512, weights),
        q_eps=memory.draw((1e-6, 1e-5, 0.0)),
        kv_scale=memory.scale(-64, 64) if record == "fp8" else None,
        return_kv=memory.pick(FLAG),
        rope_output=memory.pick(PAIRINGS),
        out=target,
        **indexer,
    )


# -- the harness itself -------------------------------------------------------------------------------------


def calm() -> Memory:
    """Memory without hypothesis."""
    choose = random.Random(7).choice
    return Memory(7, choose, choose)


def test_arguments_move_as_they_lie() -> None:
    """What kernels get are the same views of one copy of each buffer, on their device."""
    memory, seen = calm(), {}
    cache, slots = memory.paged(v4.RECORDS["v4_fp8"], 5, torch.int32)
    out = memory.tensor(3, 4, 512, dtype=E4M3, inner=2, written=True)
    arguments = {
        "query": memory.rows(5, 3, 512, dtype=FP16),
        "rope_table": memory.table(BF16, 2),
        "scale": memory.scale(-3, 3),
        "cache": cache,
        "slots": slots,
        "nothing": memory.rows(0, 3, 512, dtype=BF16),
        "in_no_buffer": torch.arange(12.0).view(3, 4).t(),
        "front": out[:, :2, :64],
        "out": out,
    }
    memory.run("triton", lambda **moved: seen.update(moved), {**arguments, "record": "v4_fp8", "weight": None})
    assert seen.pop("record") == "v4_fp8" and seen.pop("weight") is None
    for name, old in arguments.items():
        new = seen[name]
        assert new.device.type == DEVICE, name
        assert (new.dtype, new.shape, new.stride()) == (old.dtype, old.shape, old.stride()), name
        assert new.storage_offset() == old.storage_offset() and new.data_ptr() % 16 == old.data_ptr() % 16, name
        assert new.untyped_storage().data_ptr() != old.untyped_storage().data_ptr(), name
        assert torch.equal(as_bytes(new), as_bytes(old)), name
    assert seen["front"].data_ptr() == seen["out"].data_ptr()


def spoils_result(x: Tensor, out: Tensor) -> None:
    out.copy_(x)
    if use_kernels(x):
        out[1, 3] += 1


def spoils_input(x: Tensor, out: Tensor) -> None:
    out.copy_(x)
    if use_kernels(x):
        x[1, 3] += 1


def writes_a_gap(x: Tensor, out: Tensor) -> None:
    out.copy_(x)
    out.as_strided((1,), (1,), out.storage_offset() + out.stride(0) * len(out)).zero_()


@pytest.mark.parametrize("op", [spoils_result, spoils_input, writes_a_gap])
def test_a_wrong_byte_fails(op: Callable[..., None]) -> None:
    """In the result, in an input, and outside of what is owned even where both backends write it."""
    memory = calm()
    x, out = memory.rows(3, 16, dtype=BF16, non_finite=False), memory.tensor(3, 16, dtype=BF16, written=True)
    with pytest.raises(AssertionError, match="does not own" if op is writes_a_gap else r"^\d"):
        memory.check(op, x=x, out=out)
    memory.check(lambda x, out: out.copy_(x), x=x, out=out)
    assert memory.compared


def test_variants_take_every_option() -> None:
    """Of a choice of 8, each of 24 variants has one, the same in every example, and each option has 3 of them."""
    for _ in range(2):
        chosen = [structure("any", variant, 24)(range(8)) for variant in range(24)]
        assert sorted(chosen) == sorted(3 * list(range(8)))
