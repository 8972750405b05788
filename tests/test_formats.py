"""Records: sizes, addresses, encoders against hand-written bytes, bounds of the round trip, views of pools."""

from __future__ import annotations

import pytest
import torch

from preattn import formats

ALL = [formats.record(name, 576 if name in ("bf16", "fp8") else 512) for name in formats.RECORD_NAMES]
IDS = [record.name for record in ALL]


@pytest.mark.parametrize(
    ("name", "bytes", "dim", "tail"),
    [
        ("v41_mxfp8", 528, 512, 0),
        ("v4_fp8", 584, 512, 8),
        ("v41_nvfp4", 288, 512, 0),
        ("dsa_fp8", 656, 576, 0),
        ("dsa_nvfp4", 352, 576, 0),
        ("bf16", 1024, 512, 0),
        ("fp8", 512, 512, 0),
        ("index_fp8", 132, 128, 4),
        ("index_mxfp4", 68, 128, 4),
    ],
)
def test_sizes(name: str, bytes: int, dim: int, tail: int) -> None:
    record = formats.record(name)
    assert (record.bytes, record.dim, record.tail_bytes) == (bytes, dim, tail)


@pytest.mark.parametrize("record", ALL, ids=IDS)
def test_every_byte_of_a_page_belongs_to_one_token(record: formats.Record) -> None:
    addresses = record.address(torch.arange(7), 7).flatten()
    assert torch.equal(addresses.sort().values, torch.arange(7 * record.bytes))


@pytest.mark.parametrize("record", ALL, ids=IDS)
def test_parts_and_scales_do_not_overlap(record: formats.Record) -> None:
    owners = torch.zeros(record.bytes, dtype=torch.int)
    for part in record.parts:
        owners[part.offset : part.offset + part.bytes] += 1
        if part.scale is not None:
            count = part.dims // part.scale.block
            owners[part.scale.offset : part.scale.offset + count * part.scale.bytes] += 1
            if part.scale.order is not None:
                assert sorted(part.scale.order) == list(range(count))
    assert owners.max() == 1
    assert (owners == 0).sum() == (1 if record.name == "v4_fp8" else 0)  # its padding byte


def test_segregated_addresses() -> None:
    record = formats.record("v4_fp8")
    address = record.address(torch.tensor(3), 64)
    assert address[0] == 3 * 576 and address[575] == 3 * 576 + 575
    assert address[576] == 64 * 576 + 3 * 8 and address[583] == 64 * 576 + 3 * 8 + 7


def test_zero_rows_store_the_floor() -> None:
    zero = torch.zeros(1, 512)
    assert (formats.encode(formats.record("v41_mxfp8"), zero)[0, 512:] == 105).all()
    assert formats.encode(formats.record("v4_fp8"), zero)[0, 576:].tolist() == [105] * 7 + [0]
    dsa = formats.encode(formats.record("dsa_fp8"), torch.zeros(1, 576))
    assert (dsa[0, 512:528].view(torch.float32) == 2.0**-13).all()
    index = formats.encode(formats.record("index_fp8"), torch.zeros(1, 128))
    assert index[0, 128:].view(torch.float32) == 2.0**-22
    assert (formats.encode(formats.record("index_fp8_ue8m0"), torch.zeros(1, 128))[0, 128:] == 105).all()


def test_the_stored_scale_is_the_one_divided_by() -> None:
    # amax 250 needs scale 1 (250 / 448 rounded up), so the code of 250 is 256 unscaled: nearest e4m3 to 250.
    row = torch.zeros(1, 576)
    row[0, 0] = 250.0
    data = formats.encode(formats.record("dsa_fp8"), row)
    assert formats.scales(formats.record("dsa_fp8"), data)[0, 0] == 1.0
    assert formats.decode(formats.record("dsa_fp8"), data)[0, 0] == 256.0


def test_nvfp4_layout_and_ties() -> None:
    record = formats.record("v41_nvfp4")
    row = torch.zeros(1, 512)
    row[0, :16] = torch.tensor(
        [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5.0, -6.0]
    )
    data = formats.encode(record, row)[0]
    assert data[256] == formats.to_e4m3(torch.tensor(1.0))
    codes = [0, 2, 2, 4, 4, 6, 6, 7]  # 0, 1, 1, 2, 2, 4, 4, 6
    want = codes + [c | 8 for c in codes]
    assert data[:8].tolist() == [want[i] | want[i + 1] << 4 for i in range(0, 16, 2)]
    swizzled = formats.record("dsa_nvfp4")
    row = torch.zeros(1, 576)
    for s in range(32):
        row[0, 16 * s] = 6.0 * 2.0 ** (s % 8 - 4)
    data = formats.encode(swizzled, row)[0]
    for s in range(32):
        assert data[320 + 8 * (s & 3) + (s >> 2)] == formats.to_e4m3(torch.tensor(2.0 ** (s % 8 - 4)))


def test_all_e2m1_codes_and_midpoints() -> None:
    values = formats.from_e2m1(torch.arange(16, dtype=torch.uint8))
    assert values.tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
    assert torch.equal(formats.to_e2m1(values), torch.arange(16, dtype=torch.uint8))
    grid = values[:8]
    for low, high, mid in zip(range(7), range(1, 8), (grid[1:] + grid[:-1]) / 2, strict=True):
        even = low if low % 2 == 0 else high
        below, above = torch.nextafter(mid, torch.tensor(0.0)), torch.nextafter(mid, torch.tensor(9.0))
        assert formats.to_e2m1(torch.stack([below, mid, above])).tolist() == [low, even, high]
    assert formats.to_e2m1(torch.tensor([1e9, -1e9])).tolist() == [7, 15]


def test_all_ue8m0_and_e4m3_codes() -> None:
    byte = torch.arange(255, dtype=torch.uint8)
    assert torch.equal(formats.to_ue8m0(formats.from_ue8m0(byte)), byte)
    assert formats.from_ue8m0(torch.tensor(255, dtype=torch.uint8)).isnan()
    codes = torch.arange(256, dtype=torch.uint8)
    finite = codes[(codes & 0x7F) != 0x7F]
    assert torch.equal(formats.to_e4m3(formats.from_e4m3(finite)), finite)
    assert formats.to_e4m3(torch.tensor([449.0, -1e9, torch.inf, -torch.inf, torch.nan])).tolist() == [
        0x7E,
        0xFE,
        0x7F,
        0x7F,
        0x7F,
    ]


@pytest.mark.parametrize("record", ALL, ids=IDS)
def test_decoding_is_within_half_a_step_of_the_code(record: formats.Record, seed: int) -> None:
    """|decode(encode(x)) - x| is at most half the spacing of codes at the block's scale.

    The spacing of e4m3 is at most 2**-3 of the value and at least 2**-9 scales: half of it is max(|x| / 16,
    2**-10 scale). e2m1's widest gap is 2 scales (4 to 6): half is 1 scale; where an e4m3 scale rounds down
    by up to 1/16, amax saturates, by at most 6/16 of a scale more. bf16 has 8 significant bits: |x| / 256.
    """
    x = torch.randn(64, record.dim, generator=torch.Generator().manual_seed(seed)) * 3
    data = formats.encode(record, x)
    error = (formats.decode(record, data) - x).abs()
    start = 0
    for part in record.parts:
        dims = slice(start, start + part.dims)
        start += part.dims
        values = x[:, dims].abs()
        if part.element == "bf16":
            bound = values / 256
        else:
            scale = torch.ones(64, part.dims)
            if part.scale is not None:
                scale = formats.scales(record, data).repeat_interleave(part.scale.block, -1)
            bound = scale * (1 + 6 / 16) if part.element == "e2m1" else torch.maximum(values / 16, scale * 2.0**-10)
        assert (error[:, dims] <= bound).all()


@pytest.mark.parametrize("record", [r for r in ALL if r.parts[0].scale is not None], ids=lambda r: r.name)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_value_that_is_not_finite_reads_back_as_nan_and_stays_in_its_block(
    record: formats.Record, value: float
) -> None:
    part = record.parts[0]
    assert part.scale is not None
    row = torch.randn(1, record.dim, generator=torch.Generator().manual_seed(3))
    bad, zero = row.clone(), row.clone()
    bad[0, 5], zero[0, 5] = value, 0.0
    got, want = (formats.decode(record, formats.encode(record, x))[0] for x in (bad, zero))
    assert got[5].isnan()
    rest = torch.arange(record.dim) != 5 if part.element == "e4m3" else torch.arange(record.dim) >= part.scale.block
    assert torch.equal(got[rest], want[rest])


def test_bf16_parts_store_one_nan_and_keep_bits_that_are_bf16_already() -> None:
    record = formats.record("dsa_fp8")
    row = torch.zeros(1, 576)
    row[0, 520:523] = torch.tensor([torch.nan, -torch.nan, torch.inf])
    stored = formats.encode(record, row)[0, 528:].view(torch.int16)
    assert stored[8:11].tolist() == [0x7FFF, 0x7FFF, 0x7F80]
    payload = torch.tensor([0x7FC1, -63], dtype=torch.int16).view(torch.bfloat16)
    assert torch.equal(formats.to_bf16(payload).view(torch.int16), payload.view(torch.int16))


def test_store_and_load_are_inverse_and_skip(seed: int) -> None:
    for record in ALL:
        pool = torch.full((4096 + 3 * (record.page_bytes(4) + 64),), 0xA5, dtype=torch.uint8)
        stride = -(-record.page_bytes(4) // 16) * 16 + 16
        cache = formats.cache_view(pool, record, block_size=4, num_blocks=2, block_stride=stride, offset=32)
        data = torch.randint(256, (5, record.bytes), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
        data[data == 0xA5] = 0  # every byte that is written shows
        formats.store(cache, record, torch.tensor([7, -1, 0, 8, 3]), data)
        assert torch.equal(formats.load(cache, record, torch.tensor([7, 0, 3])), data[[0, 2, 4]])
        assert (pool != 0xA5).sum() == 3 * record.bytes
        assert (pool[:32] == 0xA5).all()


def test_cache_view_of_a_shared_pool() -> None:
    record = formats.record("v41_mxfp8")
    pool = torch.zeros(10 * 40000, dtype=torch.uint8)
    view = formats.cache_view(pool, record, block_size=64, block_stride=40000, offset=1600)
    assert view.shape == (10, 64, 528) and view.stride() == (40000, 528, 1) and view.storage_offset() == 1600
    bf16 = formats.cache_view(pool, formats.record("bf16"), block_size=2, num_blocks=3, block_stride=4096)
    assert bf16.dtype == torch.bfloat16 and bf16.shape == (3, 2, 512) and bf16.stride() == (2048, 512, 1)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"block_size": 0}, ValueError, "block_size: expected at least 1; got 0"),
        ({"block_stride": 33000}, ValueError, "block_stride: expected at least 33792 bytes"),
        ({"block_stride": 33800}, ValueError, "block_stride: expected a multiple of 16 bytes; got 33800"),
        ({"offset": 8}, ValueError, "offset: expected page 0 at a multiple of 16 bytes"),
        ({"offset": -16}, ValueError, "offset: expected"),
        ({"num_blocks": 3}, ValueError, "num_blocks: expected 0 to 2 pages"),
        ({"block_size": 129}, ValueError, "pool: expected at least 68112 bytes for a page of 129 v41_mxfp8 records"),
        ({"offset": 33808}, ValueError, "pool: expected at least 67600 bytes .*; got 67584"),
    ],
)
def test_cache_view_refuses(arguments: dict[str, int], error: type[Exception], message: str) -> None:
    pool = torch.zeros(2 * 33792, dtype=torch.uint8)
    with pytest.raises(error, match=message):
        formats.cache_view(pool, formats.record("v41_mxfp8"), **{"block_size": 64, **arguments})


def test_a_pool_without_a_page_is_asked_for_explicitly() -> None:
    record = formats.record("v41_mxfp8")
    assert formats.cache_view(torch.zeros(0, dtype=torch.uint8), record, block_size=64, num_blocks=0).shape[0] == 0


def test_lookup_errors() -> None:
    with pytest.raises(ValueError, match=r"record: expected one of v41_mxfp8.*got 'fp7'"):
        formats.record("fp7")
    with pytest.raises(ValueError, match=r"record: expected one of v41_mxfp8.*got a Record$"):
        formats.record(formats.record("bf16"))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="dim: expected a positive multiple of 16"):
        formats.record("bf16", 20)
    with pytest.raises(TypeError, match=r"pool: expected a torch\.Tensor; got list"):
        formats.cache_view([], formats.record("bf16"), block_size=1)  # type: ignore[arg-type]
