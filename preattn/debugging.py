"""Debug mode: the values of a call, which no check of :mod:`preattn.checks` reads, and the zero tail it leaves.

:func:`preattn.debug` turns it on, or ``PREATTN_DEBUG=1``. Every registered op then comes through here, by the names of
its schema. It waits for the GPU, and reads every input once: see ``docs/debugging.md``.
"""

from __future__ import annotations

from collections.abc import Container, Mapping

import torch
from torch import Tensor

from . import weights

_PAGED = (("slots", "cache"), ("index_slots", "index_cache"))
_TABLES = ("rope_table", "index_rope_table")
_QUERIES = ("query", "q_pe", "q_nope")


def before(arguments: Mapping[str, object], written: Container[str]) -> None:
    """Check what an op is about to read.

    Args:
        arguments: of the registered op, by name.
        written: names of those that it writes.

    Raises:
        ValueError: the first offender: a slot, a position, a value that is not finite.
        RuntimeError: the stream is under graph capture.
    """
    refuse_capture()
    for slots_name, cache_name in _PAGED:
        slots, cache = arguments.get(slots_name), arguments.get(cache_name)
        if isinstance(slots, Tensor) and isinstance(cache, Tensor):
            _check_slots(slots_name, slots, cache_name, cache)
    positions = arguments.get("positions")
    for name in _TABLES:
        table = arguments.get(name)
        if isinstance(table, Tensor) and isinstance(positions, Tensor):
            _check_positions(positions, name, len(table))
    for name, value in arguments.items():
        if isinstance(value, Tensor) and name not in written:
            _check_finite(name, value)
    q_pe, out = arguments.get("q_pe"), arguments.get("out")
    if arguments.get("latent") is None and isinstance(q_pe, Tensor) and isinstance(out, Tensor):
        _check_finite("out", out[:, : q_pe.shape[1], : weights.HEAD_DIM])  # the latent, there already


def after(arguments: Mapping[str, object]) -> None:
    """Wait for an op, and check that the heads of its query past the rank's own are +0.0.

    Raises:
        RuntimeError: they are not; the message names the first element.
    """
    out, heads = arguments.get("out"), _live_heads(arguments)
    if any([isinstance(value, Tensor) and value.is_cuda for value in arguments.values()]):
        torch.cuda.synchronize()
    if not isinstance(out, Tensor) or heads is None:
        return
    tail = weights.padding_heads(out, heads, interleaved=arguments.get("interleaved") is True)
    if (first := first_written(tail)) is not None:
        place = (*first[:-2], first[-2] + heads, first[-1])
        order = "(token, chunk, head, dim)" if len(place) == 4 else "(token, head, dim)"
        raise RuntimeError(
            f"out: expected +0.0 in the heads past the first {heads}; got {tail[first].item()} at {order} {place}"
        )


def refuse_capture() -> None:
    """Raise under graph capture, where nothing can be read.

    Raises:
        RuntimeError: the current stream is under graph capture.
    """
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "debug: expected a stream outside graph capture, since debug mode waits for the GPU; got one under capture"
        )


def first_written(tail: Tensor) -> tuple[int, ...] | None:
    """Index of the first element that is not +0.0, of a tensor whose last dim is contiguous; None: there is none."""
    if not tail.numel():
        return None
    index = _first(tail.view(torch.uint8) != 0)
    return None if index is None else (*index[:-1], index[-1] // tail.element_size())


def _first(found: Tensor) -> tuple[int, ...] | None:
    """Index of the first true element."""
    return tuple(found.nonzero()[0].tolist()) if bool(found.any()) else None


def _live_heads(arguments: Mapping[str, object]) -> int | None:
    for name in _QUERIES:
        if isinstance(query := arguments.get(name), Tensor):
            return query.shape[1]
    weight = arguments.get("weight")
    return weight.shape[0] // weights.HEAD_DIM if isinstance(weight, Tensor) else None


def _check_slots(name: str, slots: Tensor, cache_name: str, cache: Tensor) -> None:
    capacity = cache.shape[0] * cache.shape[1]
    slots = slots.long()
    if (first := _first((slots < -1) | (slots >= capacity))) is not None:
        raise ValueError(
            f"{name}: expected -1, or 0 to {capacity - 1} in {cache_name}; got {int(slots[first])} at {first}"
        )
    ordered, order = slots.sort(stable=True)
    again = order[1:][(ordered[1:] == ordered[:-1]) & (ordered[1:] >= 0)]
    if again.numel():
        row = int(again.min())
        earlier = int((slots == slots[row]).nonzero()[0])
        raise ValueError(
            f"{name}: expected distinct slots; got {int(slots[row])} at {(row,)}, which is that of {(earlier,)} too"
        )


def _check_positions(positions: Tensor, table_name: str, length: int) -> None:
    if (first := _first((positions < 0) | (positions >= length))) is not None:
        raise ValueError(
            f"positions: expected 0 to {length - 1}, rows of {table_name}; got {int(positions[first])} at {first}"
        )


def _check_finite(name: str, value: Tensor) -> None:
    if value.dtype == torch.uint8:  # UE8M0
        wrong = value == 0xFF
    elif value.dtype == torch.float8_e4m3fn:
        wrong = (value.view(torch.uint8) & 0x7F) == 0x7F
    elif value.is_floating_point():
        wrong = ~value.isfinite()
    else:
        return
    if (first := _first(wrong)) is not None:
        raise ValueError(f"{name}: expected finite values; got {value[first].item()} at {first}")
