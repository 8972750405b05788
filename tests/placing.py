"""The tensors of a registry call, put elsewhere: into wider rows, other pages, memory past 32 bits, fewer rows."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from preattn import formats
from preattn.cases.base import CANARY, Call, as_bytes

Allocate = Callable[[int], Tensor]
"""A uint8 tensor of so many bytes, its content a canary or unknown."""

TOKEN_ROWS = (
    *("query", "kv", "q_pe", "latent", "index_query", "index_weights", "q_latent", "kv_latent", "k_pe", "index_key"),
    *("q_nope", "x", "x_scale", "out", "top_k"),
)
"""Arguments with a row for each token and strides of their own (``top_k`` may have more rows)."""


def inner_dims(call: Call, name: str) -> int:
    """How many last dims an op wants contiguous in this argument."""
    if name == "query":
        return 2 if call.arguments["layout"] == "chunk_interleaved" else 1
    if name == "index_query":
        return 2
    if name == "x_scale":
        return call.arguments[name].dim()  # its layout is the matmul's
    return call.arguments[name].dim() - 1 if name == "out" else 1


def canary(device: torch.device | str) -> Allocate:
    """Memory that says where it was written."""
    return lambda size: torch.full((size,), CANARY, dtype=torch.uint8, device=device)


def untouched(size: int) -> Tensor:
    """Zeros that cost no memory until they are written: gigabytes of addresses for a few pages (Linux)."""
    no_reserve = 0x4000  # MAP_NORESERVE, which not every Python names
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
    return torch.frombuffer(mmap.mmap(-1, size, flags=flags), dtype=torch.uint8)


def spread(
    tensor: Tensor, inner: int, allocate: Allocate, *, tokens_first: bool = True, reach: int = 0
) -> tuple[Tensor, Tensor]:
    """The same values with gaps between rows: the view, and the memory it lies in.

    Args:
        tensor: what to place.
        inner: last dims that stay contiguous.
        allocate: where from.
        tokens_first: whether the first dim is the outermost in memory, as in a wider row, or the innermost, as a
            batched matmul over heads leaves it.
        reach: elements that the last row is about away from the first, at least.
    """
    unit = max(1, 16 // tensor.element_size())
    outer, shape = tensor.dim() - inner, tensor.shape
    strides = list(tensor.stride())
    step = 1
    for dim in range(tensor.dim() - 1, outer - 1, -1):
        strides[dim], step = step, step * shape[dim]
    order = list(range(outer))
    if tokens_first:
        order.reverse()
    for dim in order:
        step = -(-step // unit) * unit + 3 * unit
        if dim == order[-1] and shape[dim] > 1:
            # A stride itself stays below 2**31: the interpreter takes scalars that fit for 32 bits wide.
            step = max(step, min((reach // (shape[dim] - 1) // unit + 1) * unit, 2**31 - 4 * unit))
        strides[dim], step = step, step * shape[dim]
    start = 2 * unit
    last = sum((count - 1) * stride for count, stride in zip(shape, strides, strict=True)) if tensor.numel() else 0
    memory = allocate(-(-(start + last + 1 + 4 * unit) // unit) * unit * tensor.element_size())
    view = memory.view(tensor.dtype).as_strided(tuple(shape), strides, start)
    view.view(_integer(tensor)).copy_(tensor.view(_integer(tensor)))
    return view, memory


def _integer(tensor: Tensor) -> torch.dtype:
    """Copies of integers keep every bit of a NaN."""
    return {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]


def respread(call: Call, allocate: Allocate, **how: Any) -> dict[str, Tensor]:
    """Spread every argument that may be; what lay in ``out`` still does. The memories, by argument."""
    arguments, memories = call.arguments, {}
    aliases = {
        name: tensor
        for name in ("query", "latent")
        if _begins(tensor := arguments.get(name), arguments.get("out")) and tensor is not None
    }
    for name in TOKEN_ROWS:
        tensor = arguments.get(name)
        if not isinstance(tensor, Tensor) or name in aliases or inner_dims(call, name) == tensor.dim():
            continue
        own = {**how, "tokens_first": True} if name in ("out", "top_k") else how
        arguments[name], memories[name] = spread(tensor, inner_dims(call, name), allocate, **own)
        if name in call.memory:
            call.memory[name] = arguments[name]
    for name, tensor in aliases.items():
        arguments[name] = arguments["out"][:, : tensor.shape[1], : tensor.shape[2]]
    return memories


def _begins(tensor: object, out: object) -> bool:
    together = isinstance(tensor, Tensor) and isinstance(out, Tensor) and tensor.dtype == out.dtype
    return together and tensor.data_ptr() == out.data_ptr()  # type: ignore[attr-defined]


# -- caches --------------------------------------------------------------------------------------------------------


def caches(call: Call) -> dict[str, formats.Record]:
    """The caches of a call and what they hold."""
    arguments, found = call.arguments, {}
    if arguments.get("cache") is not None:
        width = arguments["cache"].shape[2] * arguments["cache"].element_size()
        name = arguments["record"]
        found["cache"] = next(r for d in (512, 576) if (r := formats.record(name, d)).bytes == width)
    if arguments.get("index_cache") is not None:
        found["index_cache"] = formats.record(arguments["index_record"])
    return found


def rehome(
    call: Call, allocate: Allocate, *, blocks: int, block_size: int = 64, pad: int = 0, offset: int = 0
) -> dict[str, Tensor]:
    """Give every cache pages in a pool of its own, ``pad`` bytes apart, the first at ``offset``; the pools."""
    pools = {}
    for name, record in caches(call).items():
        stride = -(-record.page_bytes(block_size) // 16) * 16 + pad
        pools[name] = allocate(offset + blocks * stride)
        view = formats.cache_view(
            pools[name], record, block_size=block_size, num_blocks=blocks, block_stride=stride, offset=offset
        )
        call.arguments[name] = view.view(call.arguments[name].dtype)
    call.memory = {name: tensor for name, tensor in call.memory.items() if name not in ("pool", "index_pool")}
    return pools


def stored(call: Call, slots: Tensor) -> dict[str, Tensor]:
    """The records at slots of every cache: [slots, bytes] each, on the CPU."""
    return {name: _load(call.arguments[name], record, slots) for name, record in caches(call).items()}


def _load(cache: Tensor, record: formats.Record, slots: Tensor) -> Tensor:
    size, item = cache.shape[1], cache.element_size()
    pages = cache.view(torch.uint8).as_strided((len(cache), size * record.bytes), (cache.stride(0) * item, 1))
    rows = [pages[slot // size].cpu()[record.address(torch.tensor(slot % size), size)] for slot in slots.tolist()]
    return torch.stack(rows) if rows else torch.zeros(0, record.bytes, dtype=torch.uint8)


def addresses(call: Call, name: str, slots: Tensor) -> Tensor:
    """Which bytes of a cache's pool its records at these slots take, counted from the cache's first."""
    cache, record = call.arguments[name], caches(call)[name]
    size, stride = cache.shape[1], cache.stride(0) * cache.element_size()
    slots = slots.cpu().long()
    return ((slots // size)[:, None] * stride + record.address(slots % size, size)).flatten()


def set_slots(call: Call, slots: Tensor) -> None:
    """Slots of both caches."""
    call.arguments["slots"] = slots
    if call.arguments.get("index_slots") is not None:
        call.arguments["index_slots"] = slots


# -- rows ----------------------------------------------------------------------------------------------------------


def rows(call: Call, first: int, last: int) -> None:
    """Keep rows ``first`` to ``last`` of a call."""
    for name in (*TOKEN_ROWS, "positions", "slots", "index_slots"):
        tensor = call.arguments.get(name)
        if isinstance(tensor, Tensor):
            call.arguments[name] = tensor[first:last]
            if name in call.memory:
                call.memory[name] = call.arguments[name]


def outputs(call: Call) -> dict[str, Tensor]:
    """Run, and give what was returned or written besides caches, [T, ...], by name."""
    written = call.written(call.function(**call.arguments))
    return {name: tensor for name, tensor in written.items() if name not in ("pool", "index_pool")}


@contextmanager
def poisoned_results(byte: int = 0xFF) -> Iterator[None]:
    """Within it, what an op makes for its results is full of one byte.

    New memory may be what another call has just given back: a result that nobody writes would look right.
    """
    new_empty = Tensor.new_empty

    def poisoned(tensor: Tensor, *shape: Any, **options: Any) -> Tensor:
        made = new_empty(tensor, *shape, **options)
        made.view(torch.uint8).fill_(byte)
        return made

    Tensor.new_empty = poisoned  # type: ignore[method-assign]
    try:
        yield
    finally:
        Tensor.new_empty = new_empty  # type: ignore[method-assign]


def records(call: Call) -> dict[str, Tensor]:
    """What rows with a slot have stored, in their order: [rows, bytes] of every cache, on the CPU."""
    found = {}
    for name, record in caches(call).items():
        slots = call.arguments.get("index_slots") if name == "index_cache" else None
        slots = call.arguments["slots"] if slots is None else slots
        if slots is not None:
            cache = call.arguments[name]
            inside = slots[(slots >= 0) & (slots < cache.shape[0] * cache.shape[1])].cpu()
            found[name] = _load(cache, record, inside)
    return found


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Whether tensors have the same names, dtypes, shapes and bits."""
    return a.keys() == b.keys() and all(
        a[name].shape == b[name].shape
        and a[name].dtype == b[name].dtype
        and torch.equal(as_bytes(a[name]), as_bytes(b[name]))
        for name in a
    )
