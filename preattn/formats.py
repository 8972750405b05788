"""The stored records, as data: which bytes one token occupies in a paged KV or indexer cache.

A :class:`Record` lists the parts of a token (element codec, scale codec, where the bytes lie) and how
pages arrange them. Everything else here, the CPU encoder and decoder included, works from that data
alone, and the kernels take their constants from it.

Byte tables and rounding rules: ``docs/formats.md``. All multi-byte scalars are little-endian.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from . import checks

if sys.byteorder != "little":  # records are little-endian, and so is every GPU host we know of
    raise ImportError("preattn stores little-endian records and does not support a big-endian host")

Element = Literal["e4m3", "e2m1", "bf16"]
ScaleCode = Literal["ue8m0", "float32", "e4m3"]

E4M3_MAX = 448.0
E2M1_MAX = 6.0
E4M3_NAN = 0x7F
UE8M0_NAN = 0xFF
ALIGNMENT = 16
"""Bytes: pages and cache bases start at multiples of this, so that kernels can move 16 bytes at a time."""


@dataclass(frozen=True)
class Scale:
    """How the scale of a block of ``block`` dims follows from the block's largest finite magnitude.

    ``quotient = max(max(amax, amax_floor) / largest, quotient_floor)`` in float32, with ``largest`` the
    largest code value (448 or 6). ``ue8m0`` and ``float32`` scales are the smallest power of two that is
    not below the quotient; an ``e4m3`` scale is the quotient rounded to nearest, saturating.
    Scale ``s`` is stored at index ``order[s]`` of the record's scale array (identity when None), and
    ``repeat`` times over.
    """

    code: ScaleCode
    block: int
    offset: int
    amax_floor: float = 0.0
    quotient_floor: float = 0.0
    order: tuple[int, ...] | None = None
    repeat: int = 1

    @property
    def bytes(self) -> int:
        """Bytes of one scale, repeats counted."""
        return self.repeat * (4 if self.code == "float32" else 1)


@dataclass(frozen=True)
class Part:
    """``dims`` consecutive dims stored with one element codec from byte ``offset`` of the record on."""

    dims: int
    element: Element
    offset: int
    scale: Scale | None = None

    @property
    def largest(self) -> float:
        """The largest magnitude a code can hold (before its scale)."""
        return E2M1_MAX if self.element == "e2m1" else E4M3_MAX

    @property
    def bytes(self) -> int:
        """Bytes of the elements, scales not counted."""
        return {"e4m3": self.dims, "e2m1": self.dims // 2, "bf16": 2 * self.dims}[self.element]


@dataclass(frozen=True)
class Record:
    """One token's bytes in a cache.

    Attributes:
        name: how ops and the command line call it.
        bytes: bytes of one token.
        tail_bytes: 0 where a token's bytes are contiguous in its page (*token-interleaved*). Otherwise a
            page holds the first ``bytes - tail_bytes`` bytes of every token, then the last ``tail_bytes``
            of every token (*segregated*).
        parts: the dims in order.
        dtype: dtype of a cache view; ``uint8`` where no torch dtype describes the record.
    """

    name: str
    bytes: int
    parts: tuple[Part, ...]
    tail_bytes: int = 0
    dtype: torch.dtype = torch.uint8

    @property
    def dim(self) -> int:
        """Values in one record."""
        return sum(part.dims for part in self.parts)

    @property
    def body_bytes(self) -> int:
        """Bytes of a token in the page's first segment."""
        return self.bytes - self.tail_bytes

    @property
    def width(self) -> int:
        """Last dim of a cache view, in elements of ``dtype``."""
        return self.bytes // self.dtype.itemsize

    def page_bytes(self, block_size: int) -> int:
        """Bytes of a page of ``block_size`` tokens, padding not counted."""
        return block_size * self.bytes

    def address(self, offset: Tensor, block_size: int) -> Tensor:
        """Byte addresses, within its page, of every byte of the tokens at ``offset``: [..., bytes]."""
        byte = torch.arange(self.bytes, device=offset.device)
        body = offset[..., None] * self.body_bytes + byte
        tail = block_size * self.body_bytes + offset[..., None] * self.tail_bytes + byte - self.body_bytes
        return torch.where(byte < self.body_bytes, body, tail)


_NVFP4_FLOOR = 2.0**-9  # the smallest positive e4m3

_FIXED = (
    Record(
        name="v41_mxfp8",  # DeepSeek-V4.1 window cache, also a compressed cache
        bytes=528,
        parts=(Part(512, "e4m3", 0, Scale("ue8m0", 32, 512, amax_floor=1e-4)),),
    ),
    Record(
        name="v4_fp8",  # DeepSeek-V4; byte 583 is padding and stored as zero
        bytes=584,
        parts=(Part(448, "e4m3", 0, Scale("ue8m0", 64, 576, amax_floor=1e-4)), Part(64, "bf16", 448)),
        tail_bytes=8,
    ),
    Record(
        name="v41_nvfp4",  # DeepSeek-V4.1 compressed cache
        bytes=288,
        parts=(Part(512, "e2m1", 0, Scale("e4m3", 16, 256, quotient_floor=_NVFP4_FLOOR)),),
    ),
    Record(
        name="dsa_fp8",  # DeepSeek-V3.2, GLM-5.x: "fp8_ds_mla"
        bytes=656,
        parts=(
            Part(512, "e4m3", 0, Scale("float32", 128, 512, quotient_floor=1e-4)),
            Part(64, "bf16", 528),
        ),
    ),
    Record(
        name="dsa_nvfp4",  # DeepSeek-V3.2: "nvfp4_ds_mla"
        bytes=352,
        parts=(
            Part(
                512,
                "e2m1",
                0,
                Scale(
                    "e4m3",
                    16,
                    320,
                    quotient_floor=_NVFP4_FLOOR,
                    order=tuple(8 * (s & 3) + (s >> 2) for s in range(32)),
                ),
            ),
            Part(64, "e4m3", 256),
        ),
    ),
    Record(
        name="index_fp8",  # indexer key
        bytes=132,
        parts=(Part(128, "e4m3", 0, Scale("float32", 128, 128, amax_floor=1e-4)),),
        tail_bytes=4,
    ),
    Record(
        name="index_fp8_ue8m0",  # the same for SM100 readers: the UE8M0 byte four times instead of a float32
        bytes=132,
        parts=(Part(128, "e4m3", 0, Scale("ue8m0", 128, 128, amax_floor=1e-4, repeat=4)),),
        tail_bytes=4,
    ),
    Record(
        name="index_mxfp4",  # indexer key
        bytes=68,
        parts=(Part(128, "e2m1", 0, Scale("ue8m0", 32, 64, amax_floor=1e-4)),),
        tail_bytes=4,
    ),
)

RECORDS: dict[str, Record] = {record.name: record for record in _FIXED}
"""The records whose size does not depend on the model, by name."""

RECORD_NAMES = (*RECORDS, "bf16", "fp8")

CACHE_DTYPES = (torch.uint8, torch.bfloat16, torch.float8_e4m3fn)


def record(name: str, dim: int = 512) -> Record:
    """Look a record up.

    Args:
        name: one of :data:`RECORD_NAMES`.
        dim: values per token, used by ``bf16`` and ``fp8`` only (512 for V4 / V4.1, 576 for DSA). An
            ``fp8`` record holds codes of ``value / scale``; its per-tensor scale lives outside the cache.

    Raises:
        TypeError: a ``dim`` that is not an int.
        ValueError: unknown name, or a ``dim`` that is not a positive multiple of 16.
    """
    checks.word("record", name, RECORD_NAMES)
    checks.integer("dim", dim)
    if name in RECORDS:
        return RECORDS[name]
    if dim <= 0 or dim % 16:
        raise ValueError(f"dim: expected a positive multiple of 16 for a {name} record; got {dim}")
    return _rows(name, dim)


@lru_cache
def _rows(name: str, dim: int) -> Record:
    if name == "bf16":
        return Record(name, 2 * dim, (Part(dim, "bf16", 0),), dtype=torch.bfloat16)
    return Record(name, dim, (Part(dim, "e4m3", 0),), dtype=torch.float8_e4m3fn)


# -- element and scale codes ---------------------------------------------------------------------------


BF16_NAN = 0x7FFF
"""Bits of a bf16 NaN that was computed (what NVIDIA's own conversion produces)."""


def to_bf16(x: Tensor) -> Tensor:
    """To bf16, nearest even, every NaN as :data:`BF16_NAN`; what is bf16 already keeps its bits."""
    if x.dtype == torch.bfloat16:
        return x
    nan = torch.tensor(BF16_NAN, dtype=torch.int16, device=x.device).view(torch.bfloat16)
    return torch.where(x.isnan(), nan, x.to(torch.bfloat16))


def to_e4m3(x: Tensor) -> Tensor:
    """float32 -> e4m3 codes (uint8): nearest even, finite values saturate at 448, the rest become NaN (0x7F)."""
    codes = x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.where(x.isfinite(), codes, E4M3_NAN)


def from_e4m3(codes: Tensor) -> Tensor:
    """e4m3 codes (uint8) -> float32."""
    return codes.contiguous().view(torch.float8_e4m3fn).float()


_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_E2M1_MIDPOINTS = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])


def to_e2m1(x: Tensor) -> Tensor:
    """float32 -> e2m1 codes (uint8, 0..15): nearest even, saturating at 6. e2m1 has no NaN: NaN becomes 0."""
    magnitude = x.abs().nan_to_num(nan=0.0)
    below = torch.bucketize(magnitude, _E2M1_MIDPOINTS)  # ties counted below
    tie = (below < 7) & (magnitude == _E2M1_MIDPOINTS[below.clamp(max=6)])
    code = (below + (tie & (below % 2 == 1))).to(torch.uint8)
    return code | (x.signbit() & ~x.isnan()).to(torch.uint8) << 3


def from_e2m1(codes: Tensor) -> Tensor:
    """e2m1 codes (uint8, low four bits) -> float32."""
    magnitude = _E2M1[(codes & 7).long()]
    return torch.where((codes & 8).bool(), -magnitude, magnitude)


def to_ue8m0(scale: Tensor) -> Tensor:
    """float32 powers of two -> UE8M0 bytes (exponent + 127, clamped to 0..255)."""
    exponent = torch.frexp(scale).exponent  # scale = m * 2**exponent, m in [0.5, 1)
    return (exponent + 126).clamp(0, 255).to(torch.uint8)


def from_ue8m0(byte: Tensor) -> Tensor:
    """UE8M0 bytes -> float32; 255 is NaN."""
    value = torch.ldexp(torch.ones_like(byte, dtype=torch.float32), byte.int() - 127)
    return torch.where(byte == UE8M0_NAN, torch.nan, value)


def ceil_power_of_two(x: Tensor) -> Tensor:
    """The smallest power of two not below ``x`` (float32, positive, finite), exactly: no logarithm."""
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp(torch.ones_like(x), exponent - (mantissa == 0.5).int())


def block_scale(blocks: Tensor, scale: Scale, largest: float) -> Tensor:
    """The float32 scale of each block: [..., block] -> [...], non-finite elements left out of the maximum."""
    amax = torch.where(blocks.isfinite(), blocks.abs(), 0.0).amax(-1)
    quotient = (amax.clamp(min=scale.amax_floor) / largest).clamp(min=scale.quotient_floor)
    if scale.code == "e4m3":
        return from_e4m3(to_e4m3(quotient))
    return ceil_power_of_two(quotient)


# -- encode and decode -----------------------------------------------------------------------------------


def _check_rows(name: str, value: object, dtypes: tuple[torch.dtype, ...]) -> None:
    """Check a tensor of some dtype that has a last dim."""
    checks.instance(name, value, Tensor)
    assert isinstance(value, Tensor)
    checks.tensor(name, value, dtypes, (None,) * max(1, value.dim()))


def _scale_index(scale: Scale, count: int) -> Tensor:
    return torch.tensor(scale.order) if scale.order else torch.arange(count)


def encode(record: Record, values: Tensor) -> Tensor:
    """Encode values on the CPU.

    Args:
        record: the format.
        values: [..., record.dim] float32 or bf16; for parts without a scale of their own (``fp8``, the
            RoPE part of ``dsa_nvfp4``) already divided by the per-tensor scale.

    Returns:
        [..., record.bytes] uint8, in record order (:func:`store` spreads them over a page).

    Non-finite values: see ``docs/formats.md``, "NaN and Inf".

    Raises:
        TypeError: not a record, or not a tensor of float32 or bf16.
        ValueError: last dim is not ``record.dim``.
    """
    checks.instance("record", record, Record)
    _check_rows("values", values, (torch.float32, torch.bfloat16))
    if values.shape[-1] != record.dim:
        raise ValueError(f"values: expected last dim {record.dim} for {record.name}; got {tuple(values.shape)}")
    out = torch.zeros(*values.shape[:-1], record.bytes, dtype=torch.uint8)
    for part, part_values in zip(record.parts, values.split([p.dims for p in record.parts], -1), strict=True):
        out[..., part.offset : part.offset + part.bytes] = _encode_part(part, part_values, out)
    return out


def _encode_part(part: Part, values: Tensor, out: Tensor) -> Tensor:
    """Element bytes of one part; its scales are written into ``out``."""
    if part.element == "bf16":
        return to_bf16(values).contiguous().view(torch.uint8)
    x = values.float()
    if part.scale is not None:
        rule = part.scale
        blocks = x.unflatten(-1, (-1, rule.block))
        scale = block_scale(blocks, rule, part.largest)
        x = (blocks / scale[..., None]).flatten(-2)
        if part.element == "e2m1":  # no NaN among its codes: the scale carries it
            scale = torch.where(blocks.isfinite().all(-1), scale, torch.nan)
        _scale_slice(out, part)[..., _scale_index(rule, scale.shape[-1]), :] = _scale_bytes(rule, scale)
    if part.element == "e4m3":
        return to_e4m3(x)
    code = to_e2m1(x)
    return code[..., 0::2] | code[..., 1::2] << 4


def _scale_bytes(rule: Scale, scale: Tensor) -> Tensor:
    code: Tensor
    if rule.code == "float32":
        code = scale.contiguous().view(torch.uint8).unflatten(-1, (-1, 4))
    elif rule.code == "ue8m0":
        code = torch.where(scale.isnan(), UE8M0_NAN, to_ue8m0(scale))[..., None]
    else:
        code = to_e4m3(scale)[..., None]
    return code.repeat(*[1] * (code.dim() - 1), rule.repeat)


def _scale_slice(data: Tensor, part: Part) -> Tensor:
    """View of a record's scale bytes: [..., scales, bytes per scale]."""
    rule = part.scale
    assert rule is not None
    count = part.dims // rule.block
    scales: Tensor = data[..., rule.offset : rule.offset + count * rule.bytes].unflatten(-1, (count, rule.bytes))
    return scales


def scales(record: Record, data: Tensor) -> Tensor:
    """The block scales of encoded records as float32: [..., record.bytes] -> [..., scales] (none: last dim 0)."""
    part = record.parts[0]
    rule = part.scale
    if rule is None:
        return torch.empty(*data.shape[:-1], 0)
    code = _scale_slice(data, part)[..., _scale_index(rule, part.dims // rule.block), :]
    if rule.code == "float32":
        return code.contiguous().view(torch.float32).squeeze(-1)
    return from_ue8m0(code[..., 0]) if rule.code == "ue8m0" else from_e4m3(code[..., 0])


def codes(record: Record, data: Tensor) -> tuple[Tensor, ...]:
    """The element codes of every part: e4m3 as uint8, e2m1 as uint8 0..15, bf16 as bf16."""
    result = []
    for part in record.parts:
        raw = data[..., part.offset : part.offset + part.bytes]
        if part.element == "bf16":
            result.append(raw.contiguous().view(torch.bfloat16))
        elif part.element == "e2m1":
            result.append(torch.stack([raw & 15, raw >> 4], -1).flatten(-2))
        else:
            result.append(raw)
    return tuple(result)


def decode(record: Record, data: Tensor) -> Tensor:
    """Decode on the CPU: [..., record.bytes] uint8 in record order -> [..., record.dim] float32.

    Raises:
        TypeError: not a record, or not a tensor of uint8.
        ValueError: last dim is not ``record.bytes``.
    """
    checks.instance("record", record, Record)
    _check_rows("data", data, (torch.uint8,))
    if data.shape[-1] != record.bytes:
        raise ValueError(f"data: expected last dim {record.bytes} for {record.name}; got {tuple(data.shape)}")
    values = []
    for part, code in zip(record.parts, codes(record, data), strict=True):
        if part.element == "bf16":
            values.append(code.float())
            continue
        x = from_e4m3(code) if part.element == "e4m3" else from_e2m1(code)
        if part.scale is not None:
            x = (x.unflatten(-1, (-1, part.scale.block)) * scales(record, data)[..., None]).flatten(-2)
        values.append(x)
    return torch.cat(values, -1)


# -- pages -------------------------------------------------------------------------------------------------


def cache_view(
    pool: Tensor,
    record: Record,
    *,
    block_size: int,
    num_blocks: int | None = None,
    block_stride: int | None = None,
    offset: int = 0,
) -> Tensor:
    """A paged view of a memory pool, in the form every op takes its caches.

    Args:
        pool: contiguous tensor of any dtype.
        record: what a page holds.
        block_size: tokens per page.
        num_blocks: pages; as many as fit when None, and at least one.
        block_stride: bytes from one page to the next; ``block_size * record.bytes`` when None. Larger where
            pages are padded or shared by several layers.
        offset: byte of the pool at which page 0 starts.

    Returns:
        [num_blocks, block_size, record.width] of ``record.dtype`` with ``stride(0) = block_stride`` (in
        elements). Segregated records have no contiguous tokens: index such a page with
        :meth:`Record.address`, or use :func:`load` and :func:`store`.

    Raises:
        TypeError: ``pool`` is not a tensor, ``record`` not a record, or a size not an int.
        ValueError: a page does not fit its stride or the pool, or a size is not a multiple of 16 bytes.
    """
    if not isinstance(pool, Tensor):
        raise TypeError(f"pool: expected a torch.Tensor; got {type(pool).__name__}")
    if not pool.is_contiguous():
        raise ValueError("pool: expected a contiguous tensor; got strides " + str(pool.stride()))
    checks.instance("record", record, Record)
    checks.integer("block_size", block_size, least=1)
    checks.integer("offset", offset)
    for name, size in (("num_blocks", num_blocks), ("block_stride", block_stride)):
        if size is not None:
            checks.integer(name, size)
    page = record.page_bytes(block_size)
    stride = page if block_stride is None else block_stride
    flat = pool.flatten().view(torch.uint8)
    if stride < page:
        raise ValueError(
            f"block_stride: expected at least {page} bytes for {block_size} {record.name} records; got {stride}"
        )
    if stride % ALIGNMENT:
        raise ValueError(f"block_stride: expected a multiple of {ALIGNMENT} bytes; got {stride}")
    if offset < 0 or (pool.data_ptr() + offset) % ALIGNMENT:
        raise ValueError(f"offset: expected page 0 at a multiple of {ALIGNMENT} bytes in memory; got {offset}")
    if offset > flat.numel():
        raise ValueError(f"offset: expected page 0 within a pool of {flat.numel()} bytes; got {offset}")
    fits = max(0, (flat.numel() - offset - page) // stride + 1) if flat.numel() - offset >= page else 0
    if num_blocks is None and not fits:
        raise ValueError(
            f"pool: expected at least {offset + page} bytes for a page of {block_size} {record.name} records; "
            f"got {flat.numel()}"
        )
    blocks = fits if num_blocks is None else num_blocks
    if blocks > fits or blocks < 0:
        raise ValueError(f"num_blocks: expected 0 to {fits} pages in a pool of {flat.numel()} bytes; got {blocks}")
    return flat[offset:].as_strided((blocks, block_size, record.bytes), (stride, record.bytes, 1)).view(record.dtype)


def check_cache(name: str, cache: Tensor, record: Record) -> None:
    """Raise unless ``cache`` is a paged view of ``record`` as :func:`cache_view` makes it (any stride(0)).

    Metadata alone is looked at, so that it can be traced; ops check the pointer too.

    Raises:
        TypeError: dtype is neither the record's nor uint8.
        ValueError: rank, width, inner strides or alignment do not fit.
    """
    checks.instance(name, cache, Tensor)
    checks.instance("record", record, Record)
    if cache.dtype not in (record.dtype, torch.uint8):
        dtypes = " or ".join(dict.fromkeys(map(str, (record.dtype, torch.uint8))))
        raise TypeError(f"{name}: expected {dtypes} for {record.name} records; got {cache.dtype}")
    itemsize = cache.dtype.itemsize
    if cache.dim() != 3 or cache.shape[2] * itemsize != record.bytes:
        raise ValueError(
            f"{name}: expected [num_blocks, block_size, {record.bytes // itemsize}] for {record.name} records; "
            f"got {tuple(cache.shape)}"
        )
    if cache.shape[1] < 1:
        raise ValueError(f"{name}: expected at least 1 token per page; got {tuple(cache.shape)}")
    if cache.stride(2) != 1 or (cache.shape[1] > 1 and cache.stride(1) != cache.shape[2]):
        raise ValueError(f"{name}: expected contiguous pages; got strides {cache.stride()}")
    if cache.shape[0] > 1 and cache.stride(0) < cache.shape[1] * cache.shape[2]:
        raise ValueError(f"{name}: expected pages that do not overlap; got strides {cache.stride()}")
    if cache.stride(0) * itemsize % ALIGNMENT:
        raise ValueError(
            f"{name}: expected pages at multiples of {ALIGNMENT} bytes; got a page stride of "
            f"{cache.stride(0) * itemsize} bytes"
        )


def _pages(cache: Tensor) -> Tensor:
    """[num_blocks, page bytes] uint8 view of a cache."""
    item = cache.dtype.itemsize
    size = (cache.shape[0], cache.shape[1] * cache.shape[2])
    return (
        cache.as_strided(size, (cache.stride(0), 1)).view(torch.uint8)
        if item > 1
        else (cache.view(torch.uint8).as_strided(size, (cache.stride(0), 1)))
    )


def store(cache: Tensor, record: Record, slots: Tensor, data: Tensor) -> None:
    """Write encoded records into their pages, in row order (a repeated slot keeps its last row).

    Args:
        cache: as :func:`cache_view` makes it; written in place.
        slots: [N] integer; rows whose slot lies outside the cache are skipped.
        data: [N, record.bytes] uint8.

    Raises:
        TypeError, ValueError: a dtype or shape that does not fit.
    """
    check_cache("cache", cache, record)
    checks.tensor("slots", slots, checks.INDEX_DTYPES, (None,))
    checks.tensor("data", data, (torch.uint8,), (slots.shape[0], record.bytes))
    pages, block_size = _pages(cache), cache.shape[1]
    slot = slots.long()
    for row in ((slot >= 0) & (slot < cache.shape[0] * block_size)).nonzero().flatten().tolist():
        block, offset = divmod(int(slot[row]), block_size)
        pages[block, record.address(torch.tensor(offset), block_size)] = data[row]


def load(cache: Tensor, record: Record, slots: Tensor) -> Tensor:
    """Read encoded records: [N] slots inside the cache -> [N, record.bytes] uint8.

    Raises:
        TypeError, ValueError: a dtype or shape that does not fit, or a slot outside the cache.
    """
    check_cache("cache", cache, record)
    checks.tensor("slots", slots, checks.INDEX_DTYPES, (None,))
    outside = (slots < 0) | (slots >= cache.shape[0] * cache.shape[1])
    if outside.any():
        last, first = cache.shape[0] * cache.shape[1] - 1, int(slots[outside][0])
        raise ValueError(f"slots: expected 0 to {last}; got {first}")
    pages, block_size = _pages(cache), cache.shape[1]
    slot = slots.long()
    block = slot.div(block_size, rounding_mode="floor")
    return pages[block[:, None], record.address(slot % block_size, block_size)]
