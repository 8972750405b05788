"""Shadow mode: every call also runs the engine's own op, on copies, and what both wrote is compared.

``PREATTN_SHADOW=1`` is for convincing oneself, not for serving: it waits for the GPU several times a call, copies
the pages that a step writes, and cannot work inside a CUDA graph, where it raises.

Bytes have to be equal. Three things may differ, and are counted apart:

- *Norm roundings.* The engine adds up a norm's mean square in another order, so that a value on a rounding boundary
  may fall to its other side, one bf16 value or one stored code away: :func:`most_norm_flips`.
- *Scale edges.* The engine takes the scale of an indexer query from a float32 logarithm, which is an integer too
  early just above a power of two; its scale is half of the exact one there, and the row saturates:
  :func:`most_scale_edges`.
- *Division edges.* The engine divides an e4m3 query by its scale with an approximate instruction. Each such code is
  held against the exact quotient: :func:`~preattn.differences.division_edges`.

The bound of the first two holds for the running total of an output, and a total that is past it makes its call a
mismatch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ... import formats
from ...differences import NORM_FLIPS, division_edges, neighbours
from ...formats import Record
from . import report

POISON = 0xA5
"""Every byte of a result that the engine's op is given; caches, the top-k buffer and queries start as they are."""

SCALE_EDGES = 2.0**-17
"""Largest share of rows whose scale the engine may take to be half of the exact one.

Its ``ceil(log2(s))`` of s just above 2**k is k where the float32 logarithm, off by at most one ulp (CUDA's bound of
``log2f``), comes out as k: where log2(s) - k is at most one ulp of a number below 32, 2**-19, so that s exceeds 2**k by
at most 2**-19 * ln 2 of it. The row's largest value is then as close above 1.75 * 2**j (448 is 1.75 * 2**8). A mantissa
at most twice as dense there as a uniform one lies there in at most 2 * 1.75 * ln 2 * 2**-19 < 2**-17 of the rows.
"""
SCALE_EDGE_FLOOR = 8
"""Rows that may come early: at that share, 8 in fewer than 2**14 rows happen once in 10**11 times."""


@dataclass
class Tally:
    """What the calls of one op, and one of its outputs, came to.

    Attributes:
        calls: comparisons made.
        mismatches: comparisons that found a difference that is none of the three below, or too many of those.
        elements: elements compared.
        norm_flips: elements that a norm's order of addition put on the other side of a rounding boundary.
        scale_edges: rows whose scale the engine takes to be half of the exact one.
        division_edges: codes that an approximate division puts beside the one of the exact quotient.
        first: the first mismatch: layer, element, both values.
    """

    calls: int = 0
    mismatches: int = 0
    elements: int = 0
    norm_flips: int = 0
    scale_edges: int = 0
    division_edges: int = 0
    first: str | None = None


_tallies: dict[tuple[str, str], Tally] = {}


@cache
def active() -> bool:
    """Whether shadow mode is on: ``PREATTN_SHADOW``, looked up once."""
    return report.asked("PREATTN_SHADOW")


def forget() -> None:
    """Forget all tallies, and look the environment up again."""
    active.cache_clear()
    _tallies.clear()


def refuse_capture() -> None:
    """Raise where the current stream is being captured.

    Raises:
        RuntimeError: it is.
    """
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "PREATTN_SHADOW=1 compares on the host, which a CUDA graph cannot do: run the engine with "
            "enforce_eager=True (--enforce-eager), or without PREATTN_SHADOW"
        )


def as_dict() -> dict[str, dict[str, Any]]:
    """The tallies, by ``op.output``."""
    return {f"{op}.{output}": asdict(tally) for (op, output), tally in sorted(_tallies.items())}


def lines() -> Iterator[tuple[str, bool]]:
    """The tallies as lines, each with whether it is clean."""
    for (op, output), tally in sorted(_tallies.items()):
        line = f"{op}: {output}: {tally.calls} calls, {tally.mismatches} mismatches"
        if tally.norm_flips:
            line += (
                f"; norm roundings: {tally.norm_flips} of {tally.elements:,} elements, each one step "
                f"(at most {NORM_FLIPS:.2g} of them may)"
            )
        if tally.scale_edges:
            line += f"; scale edges: {tally.scale_edges} rows, the engine's scale half of the exact one"
        if tally.division_edges:
            line += f"; division edges: {tally.division_edges} codes, beside that of the exact quotient"
        if tally.first:
            line += f"; the first: {tally.first}"
        yield line, tally.mismatches == 0


# -- what may differ -------------------------------------------------------------------------------------------


def most_norm_flips(elements: int, width: int) -> int:
    """The norm roundings that may come up in so many elements of rows of ``width``.

    A share of :data:`~preattn.differences.NORM_FLIPS`, and one row. Two norms of a row differ in one factor, and values
    with equal mantissas (and weights) are at the same distance from a boundary: they flip together. A bf16 row has 128
    mantissas; where one flips it is 12 of 1,536 elements, and all of a row whose values have one magnitude. Rows that
    flip are rare, so that the share holds of many rows and not of the few rows of a call.
    """
    return math.ceil(NORM_FLIPS * elements) + width


def most_scale_edges(rows: int) -> int:
    """The scale edges that may come up in so many rows."""
    return math.ceil(SCALE_EDGES * rows) + SCALE_EDGE_FLOOR


# -- comparing -------------------------------------------------------------------------------------------------


def compare(
    op: str,
    output: str,
    layer: str,
    ours: Tensor,
    engines: Tensor,
    *,
    norm: bool = False,
    edges: Tensor | None = None,
    quotient: Callable[[Tensor], Tensor] | None = None,
) -> None:
    """Compare two tensors byte for byte.

    Args:
        op: the op they come from.
        output: which of its outputs they are.
        layer: the layer, for the message.
        ours: what ours wrote.
        engines: what the engine's wrote.
        norm: bf16 or e4m3 values one step apart are norm roundings.
        edges: the scale edges among the rows, of the shape of ``ours`` or without its last dim.
        quotient: what the e4m3 codes of some tokens are rounded from, exactly: their indices to float64 on the CPU.
    """
    tally = _tally(op, output, ours.numel())
    if ours.shape != engines.shape or ours.dtype != engines.dtype:
        have, want = (f"{x.dtype} {list(x.shape)}" for x in (ours, engines))
        _mismatch(tally, f"layer {layer}: ours is {have}, the engine's {want}")
        return
    a, b = _bytes(ours), _bytes(engines)
    if torch.equal(a, b):
        return
    wrong, past = (a != b).any(-1), ""
    if norm:
        flipped = wrong & neighbours(ours, engines)
        wrong, past = _settle(tally, wrong, flipped, int(flipped.sum()), ours.shape[-1])
    if edges is not None:
        tally.scale_edges += int(edges.sum())
        most = most_scale_edges(tally.elements * edges.numel() // ours.numel())
        if tally.scale_edges <= most:
            wrong &= ~(edges if edges.dim() == wrong.dim() else edges[..., None])
        else:
            past = f"; {tally.scale_edges} scale edges so far, and at most {most} may be"
    if quotient is not None:
        rows = wrong.flatten(1).any(-1).nonzero().flatten()
        beside = division_edges(ours[rows].cpu(), engines[rows].cpu(), quotient(rows)).to(wrong.device)
        tally.division_edges += int((wrong[rows] & beside).sum())
        wrong[rows] &= ~beside
    if wrong.any():
        at = tuple(wrong.nonzero()[0].tolist())
        values = f"ours {ours[at].float().item():.9g}, the engine's {engines[at].float().item():.9g}"
        many = f"; {int(wrong.sum())} elements of the call{past}"
        _mismatch(tally, f"layer {layer}, element {list(at)} of {list(ours.shape)}: {values}{many}")


def compare_index_query(op: str, layer: str, ours: tuple[Tensor, Tensor], engines: tuple[Tensor, Tensor]) -> None:
    """Compare the indexer's query with its weights: codes [T, H, 128] e4m3, and [T, H] float32 that hold the scales."""
    edges = None
    alike = all(a.shape == b.shape and a.dtype == b.dtype for a, b in zip(ours, engines, strict=True))
    if alike and not torch.equal(_bytes(ours[0]), _bytes(engines[0])):
        edges = _scale_edges(ours, engines)
    for output, mine, other in zip(("indexer query", "indexer weights"), ours, engines, strict=True):
        compare(op, output, layer, mine, other, edges=edges)


def _scale_edges(ours: tuple[Tensor, Tensor], engines: tuple[Tensor, Tensor]) -> Tensor:
    """[T, H]: where the engine's scale is half of ours, and all else follows from that.

    Ours is the exact one if the largest value is above 448 of the engine's steps: their largest code is then
    saturated, 448, and ours 224. Halving is exact but for the codes that become subnormal, whose steps are 2**-9: twice
    our code and theirs are equal, or 2**-9 apart. The weight is exactly twice theirs.
    """
    codes = [x.float() for x in (ours[0], engines[0])]
    largest = [x.abs().amax(-1) for x in codes]
    halved = ((2 * codes[0] - codes[1]).abs() <= 2.0**-9).all(-1)
    return (largest[0] == 224) & (largest[1] == 448) & halved & (ours[1] == 2 * engines[1])


class Pages:
    """The pages of a paged cache that some slots lie in: as they are now, and a copy for the engine's op to write.

    Whole pages are compared, so that a byte that no slot names and somebody wrote shows too.
    """

    def __init__(self, cache: Tensor, slots: Tensor, record: Record) -> None:
        """Copy the pages.

        Args:
            cache: [num_blocks, block_size, width].
            slots: [S] slots; those outside the cache are given to nobody.
            record: what the cache holds.
        """
        self._cache, self._record, block_size = cache, record, cache.shape[1]
        inside = (slots >= 0) & (slots < cache.shape[0] * block_size)
        blocks, inverse = torch.unique(slots[inside] // block_size, return_inverse=True)
        self._blocks = blocks
        self.copy = self._now()
        self.slots = torch.full_like(slots, -1)
        self.slots[inside] = (inverse * block_size + slots[inside] % block_size).to(slots.dtype)

    def _now(self) -> Tensor:
        return self._cache.view(torch.uint8)[self._blocks].view(self._cache.dtype)

    def compare(self, op: str, output: str, layer: str, *, norm: bool = False) -> None:
        """Compare what the cache holds now with the copy; ``norm``: what it decides may be one code apart."""
        ours, engines = self._now(), self.copy
        tally = _tally(op, output, len(self.slots) * self._record.dim)
        if torch.equal(_bytes(ours), _bytes(engines)):
            return
        every = torch.arange(ours.shape[0] * ours.shape[1], device=ours.device)
        a, b = (formats.load(pages, self._record, every) for pages in (ours, engines))
        rows = (a != b).any(-1).nonzero().flatten()
        a, b, where = a[rows].cpu(), b[rows].cpu(), rows.cpu()
        wrong, past = a != b, ""
        if norm:
            named = torch.isin(where, self.slots.cpu())
            explained, flips = _explained(self._record, a, b)
            explained &= named[:, None]
            wrong, past = _settle(tally, wrong, explained, flips, self._record.dim)
        if wrong.any():
            row, byte = wrong.nonzero()[0].tolist()
            block_size = self._cache.shape[1]
            slot = int(self._blocks[int(where[row]) // block_size]) * block_size + int(where[row]) % block_size
            values = f"ours 0x{int(a[row, byte]):02x}, the engine's 0x{int(b[row, byte]):02x}"
            many = f"; {int(wrong.sum())} bytes of {int(wrong.any(-1).sum())} records of the call{past}"
            at = f"layer {layer}, slot {slot}, byte {byte} of its {self._record.name} record"
            _mismatch(tally, f"{at}: {values}{many}")


def _tally(op: str, output: str, elements: int) -> Tally:
    report.at_exit()
    tally = _tallies.setdefault((op, output), Tally())
    tally.calls += 1
    tally.elements += elements
    return tally


def _mismatch(tally: Tally, what: str) -> None:
    tally.mismatches += 1
    if tally.first is None:
        tally.first = what
        report.logger.error("preattn shadow, %s: %s", report.rank(), what)


def _settle(tally: Tally, wrong: Tensor, explained: Tensor, flips: int, width: int) -> tuple[Tensor, str]:
    """Count what a norm explains: what it leaves, and what to say where the count is past what a norm can do."""
    tally.norm_flips += flips
    most = most_norm_flips(tally.elements, width)
    if tally.norm_flips > most:
        return wrong, f"; {tally.norm_flips} norm roundings so far, and at most {most} may be"
    return wrong & ~explained, ""


def _bytes(x: Tensor) -> Tensor:
    """[..., itemsize] bytes of each element."""
    return x.contiguous().unsqueeze(-1).view(torch.uint8)


def _explained(record: Record, a: Tensor, b: Tensor) -> tuple[Tensor, int]:
    """Bytes of two sets of records that a norm's order of addition may have made differ, and how many flips they are.

    The first part of a record comes from a norm, all else is exact. A value on a boundary of its codes is one code
    away; one on a boundary of the scale, a power of two, has another scale, and its block's codes are those of the same
    values on a grid twice as coarse: no further apart than a step of the coarser grid. That is one flip.
    """
    explained = torch.zeros_like(a, dtype=torch.bool)
    part = record.parts[0]
    body = slice(part.offset, part.offset + part.bytes)
    if part.element == "bf16":
        x, y = (rows[:, body].contiguous().view(torch.bfloat16) for rows in (a, b))
        flipped = neighbours(x, y)
        if len(record.parts) == 1:
            flipped[:, 512:] = False  # a DSA row's RoPE dims
        explained[:, body] = flipped.repeat_interleave(2, -1)
        return explained, int(flipped.sum())
    codes = [formats.from_e4m3(rows[:, body]) for rows in (a, b)]
    if part.scale is None:
        near = (codes[0] - codes[1]).abs() <= torch.maximum(_spacing(codes[0]), _spacing(codes[1]))
        flipped = near & (codes[0] != codes[1])
        flipped[:, 512:] = False
        explained[:, body] = flipped
        return explained, int(flipped.sum())
    scales = [formats.scales(record, rows) for rows in (a, b)]
    block = part.scale.block
    wide = [scale.repeat_interleave(block, -1) for scale in scales]
    step = torch.maximum(_spacing(codes[0]) * wide[0], _spacing(codes[1]) * wide[1])
    near = (codes[0] * wide[0] - codes[1] * wide[1]).abs() <= step
    ratio = scales[0] / scales[1]
    shifted = (ratio == 2) | (ratio == 0.5)
    fits = near.unflatten(-1, (-1, block)).all(-1) & (shifted | (ratio == 1))
    explained[:, body] = fits.repeat_interleave(block, -1)
    size = part.scale.bytes
    explained[:, part.scale.offset : part.scale.offset + scales[0].shape[-1] * size] = (
        fits & shifted
    ).repeat_interleave(size, -1)
    own = (codes[0] != codes[1]).unflatten(-1, (-1, block)) & ~shifted[..., None]
    return explained, int((own & fits[..., None]).sum()) + int((fits & shifted).sum())


def _spacing(codes: Tensor) -> Tensor:
    """The distance to the next larger e4m3 value: 2**-3 of the binade, subnormals 2**-9."""
    _, exponent = torch.frexp(codes.abs().clamp(min=2.0**-6))
    return torch.ldexp(torch.ones_like(codes), exponent - 4)
