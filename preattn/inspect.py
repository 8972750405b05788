"""What a dumped page or cache holds, token by token: scales, magnitudes, saturated codes, NaNs, unwritten slots.

A dump is bytes and a :class:`~preattn.formats.Record`; nothing here knows one record from another. Files are
mapped, not read: a cache of many gigabytes costs its statistics.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Group
from rich.table import Table
from torch import Tensor

from . import formats
from .formats import Part, Record
from .golden import UNREADABLE, read_array

NO_EXPONENT = -32768
"""Stands for the exponent of a scale that has none (zero, negative, infinite, NaN), and of a column of zeros."""

CHUNK_BYTES = 16 << 20
ROWS = 32
"""Lines of the token table, unless all are asked for."""
PICTURE_ROWS = 512
"""Most lines of the picture; with more tokens, a line stands for several."""


@dataclass(frozen=True)
class Dump:
    """A file's bytes, [bytes] uint8, and how many an entry of its first dimension has (None: it has no other)."""

    data: Tensor
    first_stride: int | None


@dataclass(frozen=True)
class Inspection:
    """Statistics of N tokens, in slot order, by columns.

    A column is a block of dims that has one scale, or, in a part without scales, 64 dims (16 if 64 do not divide it).

    Attributes:
        record: what the pages hold.
        block_size: tokens per page.
        block_stride: bytes from page to page.
        offset: byte of page 0.
        fill: the byte of a slot that was never written.
        trailing_bytes: bytes at the end of the file that are not a whole page.
        written: [N] bool.
        exponent: [N, columns] int16: floor(log2) of the scale, or of the largest magnitude where there is no scale.
        absmax: [N] float32: the largest finite magnitude.
        saturated: [N, columns] int16: codes at the largest magnitude of their format.
        nan: [N, columns] int16: elements that are not finite; all of a block whose scale is not.
        zero: [N, columns] bool: every element is zero.
        odd_scales: [N] int16: scales that the format's rule cannot make.
    """

    record: Record
    block_size: int
    block_stride: int
    offset: int
    fill: int
    trailing_bytes: int
    written: Tensor
    exponent: Tensor
    absmax: Tensor
    saturated: Tensor
    nan: Tensor
    zero: Tensor
    odd_scales: Tensor

    @property
    def scaled_columns(self) -> int:
        """Columns with a scale of their own; they come first."""
        part = self.record.parts[0]
        return part.dims // part.scale.block if part.scale else 0

    @property
    def tokens(self) -> int:
        """Slots of the dump."""
        return self.written.shape[0]

    def token(self, slot: int) -> dict[str, Any]:
        """One written token's statistics, ready for JSON; None where there is no such value."""
        exponents = self.exponent[slot, : self.scaled_columns]
        known = exponents[exponents != NO_EXPONENT]
        return {
            "slot": slot,
            "block": slot // self.block_size,
            "offset": slot % self.block_size,
            "scale_exponent_min": int(known.min()) if known.numel() else None,
            "scale_exponent_max": int(known.max()) if known.numel() else None,
            "absmax": float(self.absmax[slot]),
            "saturated": int(self.saturated[slot].sum()),
            "nan": int(self.nan[slot].sum()),
            "zero_columns": int(self.zero[slot].sum()),
            "odd_scales": int(self.odd_scales[slot]),
        }

    def summary(self) -> dict[str, Any]:
        """Totals over the written tokens, ready for JSON."""
        written = self.written
        exponents = self.exponent[written][:, : self.scaled_columns]
        known = exponents[exponents != NO_EXPONENT]
        return {
            "record": self.record.name,
            "record_bytes": self.record.bytes,
            "pages": self.tokens // self.block_size,
            "block_size": self.block_size,
            "block_stride": self.block_stride,
            "offset": self.offset,
            "fill": self.fill,
            "trailing_bytes": self.trailing_bytes,
            "tokens": self.tokens,
            "written": int(written.sum()),
            "never_written": int((~written).sum()),
            "scale_exponent_min": int(known.min()) if known.numel() else None,
            "scale_exponent_max": int(known.max()) if known.numel() else None,
            "absmax": float(self.absmax[written].max()) if written.any() else None,
            "saturated": int(self.saturated[written].sum()),
            "nan": int(self.nan[written].sum()),
            "nan_slots": self.nan.sum(-1).nonzero().flatten()[:8].tolist(),
            "zero_columns": int(self.zero[written].sum()),
            "odd_scales": int(self.odd_scales[written].sum()),
            "odd_scale_slots": self.odd_scales.nonzero().flatten()[:8].tolist(),
        }


# -- reading -------------------------------------------------------------------------------------------------


def read(path: Path, key: str | None = None) -> Dump:
    """Map a ``.npy`` or ``.safetensors`` file, or read an array of an ``.npz`` one.

    Args:
        path: the file.
        key: which array; needed where the file holds several.

    Raises:
        ValueError: the file is not readable as what its name says, the key is not in it, or its values are
            Python objects.
    """
    if not path.is_file():
        raise ValueError(f"{path}: expected a file; got none")
    readers = {".npy": _read_npy, ".npz": _read_npz, ".safetensors": _read_safetensors}
    if path.suffix not in readers:
        raise ValueError(f"{path}: expected a file in {', '.join(readers)}; got {path.suffix or 'no suffix'}")
    try:
        array = readers[path.suffix](path, key)
    except (*UNREADABLE, MemoryError) as error:
        raise ValueError(f"{path}: {error or type(error).__name__}") from None
    if not array.size:
        raise ValueError(f"{path}: expected bytes; got an array of shape {list(array.shape)}")
    if not array.flags.c_contiguous:
        raise ValueError(f"{path}: expected an array in C order; got strides {array.strides}")
    flat = array.reshape(-1).view(np.uint8)
    return Dump(torch.from_numpy(flat), flat.size // array.shape[0] if array.ndim > 1 else None)


def _read_npy(path: Path, key: str | None) -> np.ndarray[Any, Any]:
    if key is not None:
        raise ValueError(f"key: expected none for an .npy file, which holds one array; got {key!r}")
    try:
        array: np.ndarray[Any, Any] = np.load(path, mmap_mode="c", allow_pickle=False)
    except Exception as error:  # numpy parses the header as Python: what a hostile one raises has no bound
        raise ValueError(f"expected an .npy array; got {str(error) or repr(error)}") from None
    return array


def _read_npz(path: Path, key: str | None) -> np.ndarray[Any, Any]:
    with zipfile.ZipFile(path) as archive:
        members = {member.filename.removesuffix(".npy"): member for member in archive.infolist()}
        if len(members) < len(archive.infolist()):
            raise ValueError("expected arrays of different names; got a name twice")
        return read_array(archive, members[_choose(key, list(members))])


def _read_safetensors(path: Path, key: str | None) -> np.ndarray[Any, Any]:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise ValueError("expected safetensors to be installed: pip install 'preattn[bench]'") from None
    try:
        with safe_open(path, framework="pt") as file:
            tensor: Tensor = file.get_tensor(_choose(key, list(file.keys())))
    except SafetensorError as error:
        raise ValueError(str(error)) from None
    shape = (*tensor.shape[:-1], tensor[..., :1].element_size() * tensor.shape[-1]) if tensor.dim() else (1,)
    raw: np.ndarray[Any, Any] = tensor.contiguous().flatten().view(torch.uint8).numpy()
    return raw.reshape(shape)


def _choose(key: str | None, names: list[str]) -> str:
    listed = ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")
    if key is None:
        if len(names) != 1:
            raise ValueError(f"key: expected one of {listed}; got none")
        return names[0]
    if key not in names:
        raise ValueError(f"key: expected one of {listed}; got {key!r}")
    return key


# -- statistics ----------------------------------------------------------------------------------------------


def inspect(
    dump: Dump, record: Record, *, block_size: int, block_stride: int | None = None, offset: int = 0, fill: int = 0xA5
) -> Inspection:
    """Decode every slot of a dump.

    Args:
        dump: from :func:`read`.
        record: what its pages hold.
        block_size: tokens per page.
        block_stride: bytes from page to page. None: an entry of the file's first dimension where it has more than
            one dimension and the entry holds a page, else the page without padding.
        offset: byte of page 0.
        fill: the byte of slots that were never written; a token all of whose bytes have this value counts as one.

    Raises:
        ValueError: not one page fits, or a size is out of range.
    """
    if block_size < 1:
        raise ValueError(f"block_size: expected at least 1; got {block_size}")
    if not 0 <= fill <= 255:
        raise ValueError(f"fill: expected a byte, 0 to 255; got {fill}")
    page = record.page_bytes(block_size)
    if block_stride is None:
        block_stride = dump.first_stride if dump.first_stride and dump.first_stride >= page else page
    if block_stride < page:
        raise ValueError(
            f"block_stride: expected at least {page} bytes for {block_size} {record.name} records; got {block_stride}"
        )
    size = dump.data.numel()
    if offset < 0 or size - offset < page:
        raise ValueError(
            f"offset: expected a page of {page} bytes ({block_size} {record.name} records) behind it; "
            f"got {offset} of {size} bytes"
        )
    blocks = (size - offset - page) // block_stride + 1
    pages = dump.data[offset:].as_strided((blocks, page), (min(block_stride, size), 1))
    address = record.address(torch.arange(block_size), block_size)
    step = max(1, CHUNK_BYTES // page)
    chunks = [
        _statistics(record, pages[at : at + step][:, address].flatten(0, 1), fill) for at in range(0, blocks, step)
    ]
    trailing = max(0, size - offset - blocks * block_stride)
    columns = [torch.cat(column) for column in zip(*chunks, strict=True)]
    return Inspection(record, block_size, block_stride, offset, fill, trailing, *columns)


def column_widths(record: Record) -> list[int]:
    """Dims of each column, in order."""
    return [width for part in record.parts for width in [_width(part)] * (part.dims // _width(part))]


def _width(part: Part) -> int:
    if part.scale:
        return part.scale.block
    return 64 if part.dims % 64 == 0 else 16


def _statistics(record: Record, data: Tensor, fill: int) -> tuple[Tensor, ...]:
    """The tensors of an :class:`Inspection`, in its order, for [N, record.bytes]."""
    written = (data != fill).any(-1)
    values = formats.decode(record, data)
    scale = formats.scales(record, data)
    exponent, saturated, nan, zero = [], [], [], []
    for part, code, value in zip(
        record.parts, formats.codes(record, data), values.split([part.dims for part in record.parts], -1), strict=True
    ):
        blocks = value.unflatten(-1, (-1, _width(part)))
        exponent.append(_exponent(scale if part.scale else blocks.abs().nan_to_num(0.0, 0.0).amax(-1)))
        largest = {"e4m3": (0x7F, 0x7E), "e2m1": (7, 7)}.get(part.element)
        at_largest = (code & largest[0] == largest[1]) if largest else torch.zeros_like(code, dtype=torch.bool)
        saturated.append(at_largest.unflatten(-1, (-1, _width(part))).sum(-1))
        nan.append((~blocks.isfinite()).sum(-1))
        zero.append((blocks == 0).all(-1))
    shown = written[:, None]
    finite = torch.where(values.isfinite(), values.abs(), 0.0)
    return (
        written,
        torch.where(shown, torch.cat(exponent, -1), NO_EXPONENT).to(torch.int16),
        torch.where(written, finite.amax(-1), 0.0),
        torch.where(shown, torch.cat(saturated, -1), 0).to(torch.int16),
        torch.where(shown, torch.cat(nan, -1), 0).to(torch.int16),
        shown & torch.cat(zero, -1),
        torch.where(written, _odd(record.parts[0], scale).sum(-1), 0).to(torch.int16),
    )


def _exponent(x: Tensor) -> Tensor:
    _, exponent = torch.frexp(x)
    return torch.where(x.isfinite() & (x > 0), exponent - 1, NO_EXPONENT)


def _odd(part: Part, scale: Tensor) -> Tensor:
    """Which scales the part's rule cannot make: below its floor, not a power of two, not finite."""
    rule = part.scale
    if rule is None:
        return torch.zeros_like(scale, dtype=torch.bool)
    floor = formats.block_scale(torch.zeros(rule.block), rule, part.largest)
    possible = scale.isfinite() & (scale >= floor)
    if rule.code != "e4m3":
        possible &= torch.frexp(scale)[0] == 0.5
    if part.element == "e2m1":  # its codes have no NaN: the scale carries it
        possible |= scale.isnan()
    return ~possible


# -- for people ------------------------------------------------------------------------------------------------


def report(inspection: Inspection, *, every: bool = False) -> Group:
    """A table of tokens (the first :data:`ROWS` lines unless ``every``) and a summary below it."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    scaled = inspection.scaled_columns > 0
    titles = ("slot", "page:offset", "scales", "absmax", "saturated", "NaN", "zero", "odd")
    for title in titles if scaled else (title for title in titles if title not in ("scales", "odd")):
        table.add_column(title, justify="right", no_wrap=True)
    lines = list(_lines(inspection)) if every else list(islice(_lines(inspection), ROWS + 1))
    for line in lines if every else lines[:ROWS]:
        table.add_row(*line)
    more = [] if every or len(lines) <= ROWS else ["... --all shows every token, --png a picture"]
    return Group(table, *more, "", _totals(inspection))


def _runs(written: Tensor) -> Iterator[tuple[bool, int, int]]:
    """(written, first slot, one past the last) of every run of like slots."""
    edges = (written[1:] != written[:-1]).nonzero().flatten() + 1
    bounds = [0, *edges.tolist(), written.shape[0]]
    for start, end in pairwise(bounds):
        yield bool(written[start]), start, end


def _lines(inspection: Inspection) -> Iterator[list[str]]:
    scaled = inspection.scaled_columns > 0
    for written, start, end in _runs(inspection.written):
        if not written:
            yield [f"{start}..{end - 1}" if end - start > 1 else str(start), "[dim]never written[/dim]"]
            continue
        for slot in range(start, end):
            token = inspection.token(slot)
            yield [
                str(slot),
                f"{token['block']}:{token['offset']}",
                *([_range(token)] if scaled else []),
                f"{token['absmax']:.4g}",
                _count(token["saturated"]),
                _count(token["nan"], "bold red"),
                _count(token["zero_columns"]),
                *([_count(token["odd_scales"], "bold red")] if scaled else []),
            ]


def _range(values: dict[str, Any]) -> str:
    low, high = values["scale_exponent_min"], values["scale_exponent_max"]
    if low is None:
        return "-"
    return f"2^{low}" if low == high else f"2^{low} .. 2^{high}"


def _count(value: int, style: str = "yellow") -> str:
    return f"[{style}]{value:,}[/{style}]" if value else "[dim]0[/dim]"


def _totals(inspection: Inspection) -> Table:
    total = inspection.summary()
    grid = Table.grid(padding=(0, 2))
    grid.add_row("record", f"{total['record']}, {total['record_bytes']} bytes a token")
    grid.add_row("pages", f"{total['pages']:,} of {total['block_size']} tokens, {total['block_stride']:,} bytes apart")
    never = f"{total['never_written']:,} never (all bytes {total['fill']:#04x})"
    grid.add_row("tokens", f"{total['written']:,} written, {never}")
    if total["written"]:
        if inspection.scaled_columns:
            grid.add_row("scales", _range(total))
            odd = f"{total['odd_scales']:,} that the format's rule cannot make{_slots(total['odd_scale_slots'])}"
            grid.add_row("odd scales", odd)
        grid.add_row("absmax", f"{total['absmax']:.6g}")
        grid.add_row("saturated", f"{total['saturated']:,} codes at the largest magnitude of their format")
        grid.add_row("NaN", f"{total['nan']:,} elements{_slots(total['nan_slots'])}")
        grid.add_row("zero", f"{total['zero_columns']:,} blocks")
    if total["trailing_bytes"]:
        grid.add_row("[yellow]left over[/yellow]", f"{total['trailing_bytes']:,} bytes at the end are no whole page")
    return grid


def _slots(slots: list[int]) -> str:
    return f" (slots {', '.join(map(str, slots))}{', ...' if len(slots) == 8 else ''})" if slots else ""


def picture(inspection: Inspection, path: Path, title: str) -> None:
    """Draw tokens x blocks as a PNG: scale exponents on the left, saturated codes and NaNs on the right.

    Raises:
        ValueError: matplotlib is not installed, or the file cannot be written.
    """
    try:
        from matplotlib.colors import ListedColormap
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
        from matplotlib.ticker import MaxNLocator
    except ImportError:
        raise ValueError("png: expected matplotlib to be installed: pip install 'preattn[bench]'") from None
    widths = column_widths(inspection.record)
    written, exponent, saturated, nan = _pooled(inspection, torch.tensor(widths))
    edges = [0, *torch.tensor(widths).cumsum(0).tolist()]
    slots = [min(line * -(-inspection.tokens // PICTURE_ROWS), inspection.tokens) for line in range(len(written) + 1)]

    figure = Figure(figsize=(11, 3.2 + min(7.0, max(1.6, 0.055 * written.shape[0]))), layout="constrained", dpi=110)
    left, right = figure.subplots(1, 2, sharey=True)
    never = np.where(written[:, None].numpy(), np.nan, 1.0).repeat(len(widths), 1)
    what = "scale exponent" if inspection.scaled_columns else "exponent of the largest magnitude"
    panels: tuple[tuple[Any, Tensor, str, str, dict[str, float]], ...] = (
        (left, exponent, "viridis", what, {}),
        (right, saturated, "YlOrBr", "saturated codes", {"vmin": 0.0}),
    )
    for axes, values, colours, label, limits in panels:
        masked = np.ma.masked_invalid(values.numpy())
        axes.set_facecolor("#f4f4f4")
        mesh = axes.pcolormesh(edges, slots, masked, cmap=colours, rasterized=True, **limits)
        axes.pcolormesh(edges, slots, np.ma.masked_invalid(never), cmap=ListedColormap(["#c9ced6"]), rasterized=True)
        if masked.count() and masked.min() == masked.max():  # one value: keep the bar from making up a range
            mesh.set_clim(float(masked.min()) - 0.5, float(masked.max()) + 0.5)
        if axes is right:
            mesh.set_clim(0.0, max(float(masked.max()) if masked.count() else 0.0, 1 / min(widths)))
            bad = np.ma.masked_equal(nan.numpy().astype(float), 0.0)
            axes.pcolormesh(edges, slots, bad, cmap=ListedColormap(["#d3008c"]), rasterized=True)
        ticks = MaxNLocator(nbins=6, integer=axes is left)
        bar = figure.colorbar(mesh, ax=axes, location="bottom", shrink=0.8, aspect=35, pad=0.02, ticks=ticks)
        bar.set_label(label + (", share of a block" if axes is right else ", base 2"))
        _decorate(axes, inspection, edges)
    left.set_ylabel("slot" if written.shape[0] == inspection.tokens else "slot (several a line)")
    left.invert_yaxis()
    total = inspection.summary()
    figure.suptitle(
        f"{title}\n{total['record']}: {total['written']:,} of {total['tokens']:,} slots written, "
        f"{total['pages']:,} pages of {total['block_size']}, {total['nan']:,} NaN",
        fontsize=11,
    )
    figure.legend(
        handles=[
            Patch(color="#c9ced6", label=f"never written (all bytes {inspection.fill:#04x})"),
            Patch(color="#f4f4f4", ec="#999999", label="no scale, or all zero"),
            Patch(color="#d3008c", label="NaN or Inf"),
        ],
        loc="outside lower center",
        ncols=3,
        frameon=False,
    )
    try:
        figure.savefig(path, format="png")
    except OSError as error:
        raise ValueError(f"png: {error}") from None


def _pooled(inspection: Inspection, widths: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """At most :data:`PICTURE_ROWS` lines: any written, largest exponent (NaN: none), saturated share, any NaN."""
    group = -(-inspection.tokens // PICTURE_ROWS)
    padding = -inspection.tokens % group
    written = torch.nn.functional.pad(inspection.written, (0, padding)).unflatten(0, (-1, group))
    fields = [
        torch.nn.functional.pad(field, (0, 0, 0, padding), value=value).unflatten(0, (-1, group))
        for field, value in ((inspection.exponent, NO_EXPONENT), (inspection.saturated, 0), (inspection.nan, 0))
    ]
    exponent = fields[0].amax(1).float()
    if inspection.scaled_columns:
        exponent[:, inspection.scaled_columns :] = NO_EXPONENT
    share = fields[1].sum(1) / (written.sum(1).clamp(min=1)[:, None] * widths)
    return written.any(1), torch.where(exponent == NO_EXPONENT, torch.nan, exponent), share, fields[2].sum(1) > 0


def _decorate(axes: Any, inspection: Inspection, edges: list[int]) -> None:
    """Page bounds, parts and their names, ticks at column bounds as far as there is room."""
    start = 0
    for part in inspection.record.parts:
        if start:
            axes.axvline(start, color="black", lw=0.8)
        top = axes.get_xaxis_transform()
        axes.text(start + part.dims / 2, 1.005, part.element, transform=top, ha="center", va="bottom", fontsize=8)
        start += part.dims
    pages = inspection.tokens // inspection.block_size
    if 1 < pages <= 16:
        for page in range(1, pages):
            axes.axhline(page * inspection.block_size, color="black", lw=0.5, ls=(0, (4, 4)))
    axes.set_xticks(edges[:: -(-(len(edges) - 1) // 8)])
    axes.set_xlabel("dim")
