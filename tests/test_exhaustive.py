"""All 65,536 bf16 values through every path that scales them, and all codes, against an oracle of this file's own.

The oracle is numpy in float64, written from the tables of ``docs/formats.md``: code values from their bit fields, the
nearest code by comparing with midpoints, the scale by comparing with ``largest * 2**k``. It shares nothing with
``preattn.formats``. Kernels run on the GPU, or in Triton's interpreter in tiles large enough to be quick there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from preattn import dsa, formats, v4
from preattn.dispatch import Backend, backend
from preattn.kernels.device import index_rotate, rotate
from preattn.kernels.launch import OPTIONS
from preattn.policy import Device, LaunchConfig, assume
from preattn.reference import numerics

Floats = NDArray[np.float64]
Codes = NDArray[np.uint8]

BACKENDS: tuple[Backend, ...] = ("reference", "triton")

# -- the oracle ----------------------------------------------------------------------------------------------------


def code_values(exponent_bits: int, mantissa_bits: int, bias: int, count: int) -> Floats:
    """The first ``count`` non-negative values of a float format, from their bit fields."""
    code = np.arange(count)
    exponent, mantissa = code >> mantissa_bits, (code & ((1 << mantissa_bits) - 1)) / 2.0**mantissa_bits
    assert exponent.max() < 1 << exponent_bits
    return np.where(exponent == 0, mantissa * 2.0 ** (1 - bias), (1 + mantissa) * 2.0 ** (exponent - bias))


E4M3 = code_values(4, 3, 7, 127)  # 0 ... 448; code 127 is NaN
E2M1 = code_values(2, 1, 1, 8)  # 0 ... 6
assert E4M3[-1] == 448 and E4M3[1] == 2.0**-9
assert E2M1.tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def nearest(values: Floats, x: Floats) -> NDArray[np.int64]:
    """Index of the value nearest to ``|x|``: ties to the even index, the last value for what lies beyond it."""
    middle = (values[1:] + values[:-1]) / 2
    magnitude = np.where(np.isnan(x), 0.0, np.abs(x))
    index = np.searchsorted(middle, magnitude, side="left")  # middles below
    tie = (index < len(middle)) & (magnitude == middle[np.minimum(index, len(middle) - 1)])
    return index + (tie & (index % 2 == 1))


def e4m3(x: Floats) -> Codes:
    codes = nearest(E4M3, x) | np.signbit(x) * 0x80
    return np.where(np.isfinite(x), codes, 0x7F).astype(np.uint8)


def e2m1(x: Floats) -> Codes:
    return np.where(np.isnan(x), 0, nearest(E2M1, x) | np.signbit(x) * 8).astype(np.uint8)


def nibbles(codes: Codes) -> Codes:
    """[..., dims] to [..., dims / 2]: the even dim in the low half."""
    return codes[..., 0::2] | codes[..., 1::2] << 4


def float32(x: Floats) -> Floats:
    """Round to float32: of a float64 quotient or product of two float32, as a float32 operation would."""
    with np.errstate(over="ignore"):
        return x.astype(np.float32).astype(np.float64)


def largest_finite(blocks: Floats) -> Floats:
    return np.where(np.isfinite(blocks), np.abs(blocks), 0.0).max(-1)


EXPONENTS = np.arange(-60, 140)


def scale_exponent(amax: Floats, largest: float) -> NDArray[np.int64]:
    """The least k with ``largest * 2**k >= amax``: products by powers of two are exact, so no logarithm."""
    return EXPONENTS[np.searchsorted(largest * 2.0**EXPONENTS, amax, side="left")]


def power_of_two_blocks(
    x: Floats, block: int, largest: float, *, amax_floor: float = 0.0, exponent_floor: int = -60
) -> tuple[Floats, NDArray[np.int64]]:
    """``x`` over the scale of its block, and the scales' exponents."""
    blocks = x.reshape(*x.shape[:-1], -1, block)
    exponent = scale_exponent(np.maximum(largest_finite(blocks), amax_floor), largest)
    exponent = np.maximum(exponent, exponent_floor)
    return (blocks * 2.0 ** -exponent[..., None].astype(np.float64)).reshape(x.shape), exponent


FLOOR = float(np.float32(1e-4))


def mxfp8(x: Floats, block: int) -> tuple[Codes, Codes]:
    """Codes and UE8M0 bytes of ``v41_mxfp8``, ``v4_fp8``, ``index_fp8_ue8m0``."""
    scaled, exponent = power_of_two_blocks(x, block, 448.0, amax_floor=FLOOR)
    return e4m3(scaled), (exponent + 127).astype(np.uint8)


def mxfp4(x: Floats) -> tuple[Codes, Codes]:
    """Nibbles and UE8M0 bytes of ``index_mxfp4``; a block with what is not finite says so in its scale."""
    scaled, exponent = power_of_two_blocks(x, 32, 6.0, amax_floor=FLOOR)
    finite = np.isfinite(x.reshape(*x.shape[:-1], -1, 32)).all(-1)
    return nibbles(e2m1(scaled)), np.where(finite, exponent + 127, 0xFF).astype(np.uint8)


def nvfp4(x: Floats) -> tuple[Codes, Codes]:
    """Nibbles and e4m3 scales of ``v41_nvfp4`` and ``dsa_nvfp4``, in the order of their blocks."""
    blocks = x.reshape(*x.shape[:-1], -1, 16)
    code = nearest(E4M3, np.clip(float32(largest_finite(blocks) / 6), 2.0**-9, 448.0))
    scaled = float32(blocks / E4M3[code][..., None]).reshape(x.shape)
    return nibbles(e2m1(scaled)), np.where(np.isfinite(blocks).all(-1), code, 0x7F).astype(np.uint8)


def as_bytes(x: Floats, dtype: type) -> Codes:
    return np.ascontiguousarray(x.astype(dtype)).view(np.uint8)


# -- all values ----------------------------------------------------------------------------------------------------

BITS = np.arange(65536, dtype=np.uint32)


def bf16_values(bits: NDArray[np.uint32]) -> Floats:
    return (bits << np.uint32(16)).view(np.float32).astype(np.float64)


def arrangements(block: int) -> dict[str, Floats]:
    """Every bf16 value, [rows, block]: alone in its block; beside those next to it; among any others."""
    values = bf16_values(BITS)
    alone = np.zeros((65536, block))
    alone[np.arange(65536), np.arange(65536) % block] = values
    shuffled = np.random.default_rng(20261130).permutation(values)
    return {"alone": alone, "neighbours": values.reshape(-1, block), "shuffled": shuffled.reshape(-1, block)}


def rows_of(block: int, dims: int, name: str) -> Floats:
    return arrangements(block)[name].reshape(-1, dims)


ARRANGED = ("alone", "neighbours", "shuffled")


def bf16(x: Floats) -> Tensor:
    """The very bits: a NaN keeps its payload."""
    bits = x.astype(np.float32).view(np.uint32) >> np.uint32(16)
    return torch.from_numpy(bits.astype(np.uint16).view(np.int16)).view(torch.bfloat16)


def numpy(x: Tensor) -> Codes:
    found: Codes = x.detach().cpu().contiguous().view(torch.uint8).numpy()
    return found


def same(got: Codes, want: Codes, what: str) -> None:
    assert got.shape == want.shape, what
    wrong = np.argwhere(got != want)
    assert not len(wrong), f"{what}: {len(wrong)} bytes differ, first at {wrong[0]}: {got[tuple(wrong[0])]:#x}"


@contextmanager
def tiles(name: Backend, device: str) -> Iterator[None]:
    """A backend; in the interpreter with tiles of many rows, for the time goes into their number."""
    paths = ("kv", "rows", "dsa_query", "dsa_query_e4m3", "dsa_norm_rope")
    wide = Device("exhaustive", launch=dict.fromkeys(paths, LaunchConfig(256, 256, 4)))
    with backend(name), np.errstate(all="ignore"):
        if device == "cpu":
            with assume(wide):
                yield
        else:
            yield


def place(name: Backend, device: str) -> str:
    return "cpu" if name == "reference" else device


pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter, at infinities and NaNs


def identity_table(device: str) -> Tensor:
    """One position that rotates by nothing."""
    return torch.cat([torch.ones(1, 32), torch.zeros(1, 32)], 1).to(device)


def turned(x: Floats) -> Floats:
    """What that rotation makes of pairs: the values, but an infinity or NaN reaches its partner, and zeros add up."""
    even, odd = x[..., 0::2], x[..., 1::2]
    with np.errstate(invalid="ignore"):
        return np.stack([even * 1.0 + -(odd * 0.0), even * 0.0 + odd * 1.0], -1).reshape(x.shape)


# -- V4 and V4.1 ---------------------------------------------------------------------------------------------------


def v4_stored(x: Floats, record: str, name: Backend, device: str, scale: float | None = None) -> tuple[Codes, Codes]:
    """Store rows of 512 and read the pages back: first segment and second, [rows, bytes] each."""
    device = place(name, device)
    found = v4.RECORDS[record]
    pages = -(-len(x) // 64)
    pool = torch.full((pages * found.page_bytes(64),), 0xA5, dtype=torch.uint8, device=device)
    with tiles(name, device):
        v4.kv_insert(
            bf16(x).to(device),
            formats.cache_view(pool, found, block_size=64),
            torch.arange(len(x), device=device),
            torch.zeros(len(x), dtype=torch.int64, device=device),
            identity_table(device),
            record=record,
            kv_scale=None if scale is None else torch.tensor(scale, device=device),
        )
    raw = numpy(pool).reshape(pages, -1)
    tail = {"v4_fp8": 8}.get(record, 0)
    body = found.bytes - tail
    first, second = raw[:, : 64 * body], raw[:, 64 * body :]
    return first.reshape(-1, body)[: len(x)], second.reshape(64 * pages, tail)[: len(x)]


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("arranged", ARRANGED)
def test_v41_mxfp8(arranged: str, name: Backend, device: str) -> None:
    x = rows_of(32, 512, arranged)
    stored, _ = v4_stored(x, "v41_mxfp8", name, device)
    codes, scales = mxfp8(np.concatenate([x[:, :448], turned(x[:, 448:])], 1), 32)
    same(stored, np.concatenate([codes, scales], 1), arranged)
    if arranged == "alone":  # from the floor's to the largest number's, every scale was seen
        assert set(scales.flatten().tolist()) == set(range(105, int(scales.max()) + 1)) and scales.max() == 247


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("arranged", ARRANGED)
def test_v4_fp8(arranged: str, name: Backend, device: str) -> None:
    """The quantised 448 dims see every value here, the 64 bf16 ones those of a run of their own."""
    blocks = arrangements(64)[arranged]
    head = np.concatenate([blocks, np.zeros((-len(blocks) % 7, 64))]).reshape(-1, 448)
    x = np.concatenate([head, np.zeros((len(head), 64))], 1)
    body, tail = v4_stored(x, "v4_fp8", name, device)
    codes, scales = mxfp8(head, 64)
    same(body[:, :448], codes, arranged)
    same(tail, np.pad(scales, ((0, 0), (0, 1))), arranged)
    rotated = np.concatenate([np.zeros((1024, 448)), bf16_values(BITS).reshape(1024, 64)], 1)
    body, _ = v4_stored(rotated, "v4_fp8", name, device)
    want = turned(rotated[:, 448:])
    bits = want.astype(np.float32).view(np.uint32) >> 16  # exact: turned values are values
    same(body[:, 448:], np.where(np.isnan(want), 0x7FFF, bits).astype(np.uint16).view(np.uint8), "rotated")


PER_TENSOR = (1.0, 0.37, 1.75, 2.0 - 2.0**-23, 2.0**-20, 2.0**20)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("scale", PER_TENSOR)
def test_v4_fp8_per_tensor(scale: float, name: Backend, device: str) -> None:
    """KV: e4m3 of the float32 product with the float32 reciprocal. Query: of the product with the scale given."""
    x = bf16_values(BITS).reshape(128, 512)
    given = float(np.float32(scale))
    values = np.concatenate([x[:, :448], turned(x[:, 448:])], 1)
    with np.errstate(invalid="ignore", over="ignore"):
        inverse = float(np.float32(1.0 / given))
        want_kv, want_query = e4m3(float32(values * inverse)), e4m3(float32(values * given))
    stored, _ = v4_stored(x, "fp8", name, device, given)
    same(stored, want_kv, "kv")
    where = place(name, device)
    found = v4.RECORDS["bf16"]
    with tiles(name, where):
        query = v4.query_kv_insert(
            bf16(x)[:, None].to(where),
            torch.zeros(128, 512, dtype=torch.bfloat16, device=where),
            formats.cache_view(torch.zeros(4096, dtype=torch.uint8, device=where), found, block_size=4),
            torch.zeros(0, dtype=torch.int64, device=where),
            torch.zeros(128, dtype=torch.int64, device=where),
            identity_table(where),
            record="bf16",
            query_rope=True,
            query_scale_inv=torch.tensor(given, device=where),
        )
    same(numpy(query)[:, 0], want_query, "query")


# -- DSA -----------------------------------------------------------------------------------------------------------


def dsa_stored(
    weight: Tensor, name: Backend, device: str, *, record: str, k_pe: Tensor | None = None, scale: float | None = None
) -> Codes:
    """A row of ones through its RMSNorm is its weight: so a weight is a row of any values. [dsa record bytes]."""
    device = place(name, device)
    found = dsa.RECORDS[record]
    pool = torch.full((found.page_bytes(16),), 0xA5, dtype=torch.uint8, device=device)
    k_pe = torch.zeros(1, 64, dtype=torch.bfloat16) if k_pe is None else k_pe
    one = torch.ones(1, 8, dtype=torch.bfloat16, device=device)
    with tiles(name, device):
        dsa.norm_rope_insert(
            one,
            torch.ones(1, 512, dtype=torch.bfloat16, device=device),
            k_pe.to(device),
            formats.cache_view(pool, found, block_size=16),
            torch.tensor([5], device=device),
            torch.zeros(1, dtype=torch.int64, device=device),
            identity_table(device),
            record=record,
            q_weight=one[0],
            kv_weight=weight.to(device),
            kv_eps=0.0,
            kv_scale=None if scale is None else torch.tensor(scale, device=device),
        )
    raw = numpy(pool).reshape(16, -1)
    assert (np.delete(raw, 5, 0) == 0xA5).all()
    return raw[5]


def dsa_fp8(x: Floats) -> tuple[Codes, Codes]:
    """Codes and float32 scales of rows of 512. The floor is of the quotient: 2**-13 is the least power above 1e-4."""
    scaled, exponent = power_of_two_blocks(x, 128, 448.0, exponent_floor=-13)
    return e4m3(scaled), as_bytes(2.0**exponent, np.float32)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("arranged", ["neighbours", "shuffled"])
def test_dsa_fp8(arranged: str, name: Backend, device: str) -> None:
    for x in rows_of(128, 512, arranged):
        codes, scales = dsa_fp8(x)
        stored = dsa_stored(bf16(x), name, device, record="dsa_fp8")
        same(stored[:528], np.concatenate([codes, scales]), arranged)


@pytest.mark.parametrize("name", BACKENDS)
def test_dsa_fp8_next_to_every_power_of_two(name: Backend, device: str) -> None:
    """Float32 rows: 448 * 2**k and its two neighbours, each the largest of a tile. A float32 log2 fails here."""
    exact = (448.0 * 2.0 ** np.arange(-16, 119)).astype(np.float32)
    near = np.concatenate([np.nextafter(exact, np.float32(0)), exact, np.nextafter(exact, np.float32(np.inf))])
    tiles_of = np.zeros((-(-len(near) // 4) * 4, 128))
    tiles_of[: len(near), 77] = near.astype(np.float64)
    for x in tiles_of.reshape(-1, 512):
        codes, scales = dsa_fp8(x)
        stored = dsa_stored(torch.from_numpy(x.astype(np.float32)), name, device, record="dsa_fp8")
        same(stored[:528], np.concatenate([codes, scales]), "tile")


def test_dsa_fp8_alone() -> None:
    x = rows_of(128, 512, "alone")
    codes, scales = dsa_fp8(x)
    data = formats.encode(formats.record("dsa_fp8"), torch.nn.functional.pad(bf16(x), (0, 64))).numpy()
    same(data[:, :528], np.concatenate([codes, scales.reshape(len(x), 16)], 1), "alone")


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("scale", [1.0, 0.37, 2.0 - 2.0**-23, 2.0**-20])
def test_dsa_fp8_per_tensor(scale: float, name: Backend, device: str) -> None:
    """e4m3 of the float32 quotient: of the query's latent and rotated dims, and of the key's (its latent's: the same
    cast, of every eighth row)."""
    where, given = place(name, device), float(np.float32(scale))
    x = bf16_values(BITS)
    with np.errstate(invalid="ignore", over="ignore"):
        latent, rotated = float32(x / given).reshape(128, 1, 512), float32(turned(x) / given).reshape(128, 8, 64)
    step = (torch.zeros(128, dtype=torch.int64, device=where), identity_table(where))
    scale_tensor = torch.tensor(given, device=where)
    with tiles(name, where):
        empty = torch.zeros(128, 1, 0, dtype=torch.bfloat16, device=where)
        packed = dsa.query(empty, bf16(x).view(128, 1, 512).to(where), step[0], None, query_scale=scale_tensor)
        zero = torch.zeros(128, 8, 512, dtype=torch.bfloat16, device=where)
        q_pe = bf16(x).view(128, 8, 64).to(where)
        pair = dsa.query(q_pe, zero, *step, form="pair", query_scale=scale_tensor)
    assert packed.query is not None and pair.q_pe is not None
    same(numpy(packed.query), e4m3(latent), "latent")
    same(numpy(pair.q_pe), e4m3(rotated), "rotated")
    for row in range(0, 128, 8):
        values = bf16(x).view(128, 512)[row]
        stored = dsa_stored(values, name, device, record="fp8", k_pe=values[None, :64], scale=given)
        same(stored[:512], e4m3(latent[row, 0]), "key's latent")
        same(stored[512:], e4m3(rotated[row, 0]), "key's rotated dims")


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("arranged", ARRANGED)
def test_index_query(arranged: str, name: Backend, device: str) -> None:
    """The codes of ``index_fp8``, and its scale in the head weights, which are powers of two here."""
    x = rows_of(128, 128, arranged).reshape(-1, 8, 128)
    where, tokens = place(name, device), len(x)
    with tiles(name, where):
        found = dsa.query(
            torch.zeros(tokens, 1, 0, dtype=torch.bfloat16, device=where),
            torch.zeros(1, 1, 512, dtype=torch.bfloat16, device=where).expand(tokens, 1, 512),
            torch.zeros(tokens, dtype=torch.int64, device=where),
            None,
            form="pair",
            index_query=bf16(x).to(where),
            index_weights=torch.full((1, 8), -2.0, device=where).expand(tokens, 8),
            index_pairing="interleaved",
            index_rope_table=identity_table(where),
            softmax_scale=0.25,
            head_scale=0.5,
        )
    even, odd = x[..., 0:64:2], x[..., 1:64:2]
    with np.errstate(invalid="ignore"):  # the indexer's second line: fma(odd, cos, even * sin)
        head = np.stack([even * 1.0 + -(odd * 0.0), odd * 1.0 + even * 0.0], -1).reshape(tokens, 8, 64)
    scaled, exponent = power_of_two_blocks(np.concatenate([head, x[..., 64:]], -1), 128, 448.0, amax_floor=FLOOR)
    assert found.index_query is not None and found.index_weights is not None
    same(numpy(found.index_query), e4m3(scaled), arranged)
    want = -0.25 * 2.0 ** exponent[..., 0]
    assert np.array_equal(found.index_weights.cpu().numpy(), want.astype(np.float32))


INDEX_ROWS = 512
"""Calls that all values of bf16 need, as 128 biases each."""


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("record", list(dsa.INDEX_RECORDS))
def test_index_key(record: str, name: Backend, device: str) -> None:
    """A constant row through its LayerNorm is its bias: so a bias is a row of any values."""
    where, found = place(name, device), dsa.INDEX_RECORDS[record]
    pool = torch.full((found.page_bytes(INDEX_ROWS),), 0xA5, dtype=torch.uint8, device=where)
    cache = formats.cache_view(pool, found, block_size=INDEX_ROWS)
    one = torch.ones(1, 8, dtype=torch.bfloat16, device=where)
    latent = torch.zeros(1, 512, dtype=torch.bfloat16, device=where)
    nothing = formats.cache_view(latent, dsa.NO_ROPE_RECORDS["bf16"], block_size=1, num_blocks=0)
    x = np.random.default_rng(5).permutation(bf16_values(BITS)).reshape(INDEX_ROWS, 128)
    with tiles(name, where):
        for row, bias in enumerate(bf16(x).to(where)):
            dsa.norm_rope_insert(
                one,
                latent,
                latent[:, :0],
                nothing,
                torch.tensor([row], device=where),
                torch.zeros(1, dtype=torch.int64, device=where),
                None,
                record="bf16",
                q_weight=one[0],
                kv_weight=latent[0],
                index_key=torch.full((1, 128), 3.0, dtype=torch.bfloat16, device=where),
                index_weight=torch.ones(128, device=where),
                index_bias=bias,
                index_cache=cache,
                index_record=record,
                index_pairing="interleaved",
                index_rope_table=identity_table(where),
            )
    normed = 0.0 + x  # the centred row is zero, and loses the sign of a zero bias
    even, odd = normed[:, 0:64:2], normed[:, 1:64:2]
    with np.errstate(invalid="ignore"):
        head = np.stack([even * 1.0 + -(odd * 0.0), odd * 1.0 + even * 0.0], -1).reshape(INDEX_ROWS, 64)
    scaled, exponent = power_of_two_blocks(np.concatenate([head, normed[:, 64:]], 1), 128, 448.0, amax_floor=FLOOR)
    raw = numpy(pool)
    same(raw[: INDEX_ROWS * 128].reshape(-1, 128), e4m3(scaled), record)
    byte = np.repeat((exponent + 127).astype(np.uint8), 4, 1)
    want = as_bytes(2.0**exponent, np.float32) if record == "index_fp8" else byte
    same(raw[INDEX_ROWS * 128 :].reshape(-1, 4), want, record)


# -- RoPE ----------------------------------------------------------------------------------------------------------


def rounded(exact: Fraction) -> float:
    """The nearest float32, ties to even."""
    near = np.float32(float(exact))
    around = (near, np.nextafter(near, np.float32(np.inf)), np.nextafter(near, np.float32(-np.inf)))
    return float(min(around, key=lambda x: (abs(Fraction(float(x)) - exact), int(x.view(np.uint32)) & 1)))


def rotated_pair(a: float, b: float, cos: float, sin: float, *, indexer: bool) -> tuple[float, float]:
    """``fma(a, cos, -(b*sin))``, then ``fma(a, sin, b*cos)``, or the indexer's ``fma(b, cos, a*sin)``; exactly."""

    def fma(x: float, y: float, z: float) -> float:
        return rounded(Fraction(x) * Fraction(y) + Fraction(z))

    def product(x: float, y: float) -> float:
        return rounded(Fraction(x) * Fraction(y))

    first = fma(a, cos, -product(b, sin))
    return first, fma(b, cos, product(a, sin)) if indexer else fma(a, sin, product(b, cos))


@triton.jit
def _rotations(a_pointer, b_pointer, cos_pointer, sin_pointer, out, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    a, b = tl.load(a_pointer + at), tl.load(b_pointer + at)
    cos, sin = tl.load(cos_pointer + at), tl.load(sin_pointer + at)
    first, second = rotate(a, b, cos, sin)
    tl.store(out + at, first)
    tl.store(out + COUNT + at, second)
    first, second = index_rotate(a, b, cos, sin)
    tl.store(out + 2 * COUNT + at, first)
    tl.store(out + 3 * COUNT + at, second)


def test_rotations_round_in_the_order_that_is_written(device: str) -> None:
    """In float32, before anything coarser hides it: the wrong order of fma changes one stored byte in thousands."""
    count = 1024
    generator = torch.Generator().manual_seed(7)
    a, b = (torch.randn(count, generator=generator).bfloat16().float() for _ in range(2))
    angle = torch.rand(count, generator=generator) * 7
    cos, sin = angle.cos(), angle.sin()
    pairs = list(zip(a.tolist(), b.tolist(), cos.tolist(), sin.tolist(), strict=True))
    main, index = ([rotated_pair(*pair, indexer=kind) for pair in pairs] for kind in (False, True))
    want = torch.tensor([[x for x, _ in main], [y for _, y in main], [x for x, _ in index], [y for _, y in index]])
    assert (want[1] != want[3]).float().mean() > 0.1  # the orders do differ
    out = torch.zeros(4, count, device=device)
    _rotations[(1,)](*(x.to(device) for x in (a, b, cos, sin)), out, COUNT=count, **OPTIONS)
    assert torch.equal(out.cpu(), want)
    both = torch.stack([a, b], -1)
    reference = [numerics.rope(both, cos[:, None], sin[:, None]).T]
    reference += [numerics.index_rope(both, cos[:, None], sin[:, None], "interleaved").T]
    assert torch.equal(torch.cat(reference), want)


# -- records that the CPU encoder alone writes ---------------------------------------------------------------------


@pytest.mark.parametrize("arranged", ARRANGED)
def test_index_mxfp4(arranged: str) -> None:
    x = rows_of(32, 128, arranged)
    data = formats.encode(formats.record("index_mxfp4"), bf16(x)).numpy()
    same(data, np.concatenate(mxfp4(x), 1), arranged)


@pytest.mark.parametrize("arranged", ARRANGED)
def test_nvfp4(arranged: str) -> None:
    x = rows_of(16, 512, arranged)
    codes, scales = nvfp4(x)
    data = formats.encode(formats.record("v41_nvfp4"), bf16(x)).numpy()
    same(data, np.concatenate([codes, scales], 1), arranged)
    rope = bf16_values(BITS).reshape(1024, 64)[np.arange(len(x)) % 1024]
    data = formats.encode(formats.record("dsa_nvfp4"), bf16(np.concatenate([x, rope], 1))).numpy()
    swizzled = np.zeros_like(scales)
    for s in range(32):
        swizzled[:, 8 * (s % 4) + s // 4] = scales[:, s]
    same(data, np.concatenate([codes, e4m3(rope), swizzled], 1), arranged)


# -- codes ---------------------------------------------------------------------------------------------------------


def test_every_e4m3_code_and_tie() -> None:
    codes = np.arange(256, dtype=np.uint8)
    values = formats.from_e4m3(torch.from_numpy(codes)).double().numpy()
    want = np.concatenate([E4M3, [np.nan], -E4M3, [np.nan]])
    assert np.array_equal(values, want, equal_nan=True) and np.array_equal(np.signbit(values[:127]), np.zeros(127))
    assert np.signbit(values[128:255]).all()
    middle = ((E4M3[1:] + E4M3[:-1]) / 2).astype(np.float32)
    near = np.concatenate([np.nextafter(middle, np.float32(0)), middle, np.nextafter(middle, np.float32(1e9))])
    near = np.concatenate([near, [448.0, 464.0, 480.0, 1e30], bf16_values(BITS)]).astype(np.float32)
    near = np.concatenate([near, -near])
    same(formats.to_e4m3(torch.from_numpy(near)).numpy(), e4m3(near.astype(np.float64)), "e4m3")


def test_every_ue8m0_code() -> None:
    byte = np.arange(256, dtype=np.uint8)
    values = formats.from_ue8m0(torch.from_numpy(byte)).double().numpy()
    assert np.array_equal(values, np.concatenate([2.0 ** (np.arange(255) - 127.0), [np.nan]]), equal_nan=True)
    assert np.array_equal(formats.to_ue8m0(torch.from_numpy(values[:255].astype(np.float32))).numpy(), byte[:255])


@pytest.mark.parametrize("record", ["v41_nvfp4", "index_mxfp4"])
def test_every_e2m1_tie_at_every_scale(record: str) -> None:
    """Midpoints and their float32 neighbours, under every scale that a block can have, beside the 6 that makes it."""
    middle = ((E2M1[1:] + E2M1[:-1]) / 2).astype(np.float32)
    near = [np.nextafter(middle, np.float32(0)), middle, np.nextafter(middle, np.float32(9))]
    units = np.concatenate([*near, *[-x for x in near], E2M1, -E2M1])  # 58 values
    found = formats.record(record)
    part = found.parts[0]
    assert part.scale is not None
    block = part.scale.block
    units = np.pad(units, (0, -len(units) % (block - 1))).reshape(-1, block - 1)
    units = np.concatenate([units, np.full((len(units), 1), 6.0)], 1)
    scales = E4M3[1:] if record == "v41_nvfp4" else 2.0 ** np.arange(-15, 126)
    x = (units[None] * scales[:, None, None]).astype(np.float32).astype(np.float64)
    rows = np.pad(x.reshape(-1), (0, -x.size % found.dim)).reshape(-1, found.dim)
    data = formats.encode(found, torch.from_numpy(rows.astype(np.float32))).numpy()
    same(data, np.concatenate((nvfp4 if record == "v41_nvfp4" else mxfp4)(rows), 1), record)
    want = {int(code) for code in range(1, 127)} if record == "v41_nvfp4" else set(range(112, 253))
    assert set(data[:, part.scale.offset :].flatten().tolist()) >= want


# -- bounds --------------------------------------------------------------------------------------------------------


def half_gap(values: Floats, x: Floats) -> Floats:
    """Half the distance between the codes' values on both sides of ``|x|``; past the last, the way back to it."""
    magnitude = np.abs(x)
    above = np.clip(np.searchsorted(values, magnitude, side="left"), 1, len(values) - 1)
    return np.where(magnitude > values[-1], magnitude - values[-1], (values[above] - values[above - 1]) / 2)


RECORDS = [formats.record(name) for name in formats.RECORDS]


@pytest.mark.parametrize("arranged", ARRANGED)
@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.name)
def test_the_way_there_and_back_is_bounded(record: formats.Record, arranged: str) -> None:
    """|decode(encode(x)) - x| for every finite bf16 x, in units of the scale s that was stored.

    A code is the nearest to x / s, so the error is at most half the gap between the codes around it:
      e4m3: max(|x / s| * 2**-4, 2**-10) * s, for a gap is 2**-3 of the power of two below, or 2**-9;
      e2m1: s / 4 up to 2 s, s / 2 up to 4 s, s up to 6 s.
    Power-of-two scales are not below amax / largest: nothing saturates. An e4m3 scale is: it is amax / 6 rounded, at
    most 2**-4 of it (or 2**-10) too small, and the largest elements then fall short by 6 * max(amax / 96, 2**-10);
    from amax 2688 = 6 * 448 on by whatever they exceed it. Where the quotient is rounded to float32 first (scales that
    are no powers of two), half an ulp of it, 2**-24, comes on top. The product of code and scale is exact, but it may
    leave float32's range: next to bf16's largest number a code stands for 2**128, and reads back as infinity.
    """
    part = record.parts[0]
    rule = part.scale
    assert rule is not None
    x = arrangements(rule.block)[arranged]
    x = np.where(np.isfinite(x), x, 0.0)
    x = np.pad(x.reshape(-1), (0, -x.size % part.dims)).reshape(-1, part.dims)
    rows = torch.zeros(len(x), record.dim)
    rows[:, : part.dims] = torch.from_numpy(x.astype(np.float32))
    data = formats.encode(record, rows)
    back = formats.decode(record, data)[:, : part.dims].double().numpy()
    s = formats.scales(record, data).double().numpy().repeat(rule.block, 1)
    values = E2M1 if part.element == "e2m1" else E4M3
    beyond = values[nearest(values, x / s)] * s >= 2.0**128
    assert np.array_equal(beyond, np.isinf(back)) and (np.abs(x[beyond]) >= 224 * 2.0**120).all()
    error = np.abs(np.where(beyond, x, back) - x)
    slack = 1 + 2.0**-23 if rule.code == "e4m3" else 1.0
    assert (error <= half_gap(values, x / s) * s * slack).all()
    amax = np.abs(x.reshape(len(x), -1, rule.block)).max(-1).repeat(rule.block, 1)
    if rule.code == "e4m3":
        short = np.maximum(6 * np.maximum(amax / 96, 2.0**-10), amax - 6 * 448)
        bound = np.maximum(s, short)
    elif part.element == "e2m1":
        bound = s
    else:
        bound = np.maximum(np.abs(x) * 2.0**-4, s * 2.0**-10)
        assert (error <= np.maximum(amax * 2.0**-4, FLOOR * 2.0**-10 if rule.amax_floor else 2.0**-23)).all()
    assert (error <= bound * slack).all()
