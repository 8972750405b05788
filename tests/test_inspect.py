"""What ``inspect`` says of dumps whose content is known, for every record, and what wrong input is told."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file
from torch import Tensor

from preattn import formats, inspect
from preattn.formats import RECORD_NAMES, Record
from preattn.golden import RECORDED
from preattn.inspect import Dump, Inspection

FILL = 0xA5
BLOCK_SIZE = 16
STRIDE_PADDING = 32


def values(record: Record, tokens: int, seed: int = 0) -> Tensor:
    return torch.randn(tokens, record.dim, generator=torch.Generator().manual_seed(seed))


def dumped(record: Record, x: Tensor, slots: list[int], blocks: int = 3) -> tuple[Tensor, int]:
    """A pool filled with FILL, some tokens stored, and its page stride."""
    stride = -(-record.page_bytes(BLOCK_SIZE) // 16) * 16 + STRIDE_PADDING
    pool = torch.full((blocks * stride,), FILL, dtype=torch.uint8)
    cache = formats.cache_view(pool, record, block_size=BLOCK_SIZE, num_blocks=blocks, block_stride=stride)
    formats.store(cache, record, torch.tensor(slots, dtype=torch.int64), formats.encode(record, x))
    return pool, stride


def inspected(record: Record, x: Tensor, slots: list[int]) -> Inspection:
    pool, stride = dumped(record, x, slots)
    return inspect.inspect(Dump(pool, None), record, block_size=BLOCK_SIZE, block_stride=stride, fill=FILL)


def shown(inspection: Inspection, *, every: bool = False, width: int = 80) -> str:
    console = Console(width=width, no_color=True)
    with console.capture() as capture:
        console.print(inspect.report(inspection, every=every))
    return capture.get()


# -- statistics ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RECORD_NAMES)
def test_every_record(name: str) -> None:
    record = formats.record(name, 512)
    x = values(record, 5)
    slots = [0, 15, 16, 37, 47]
    found = inspected(record, x, slots)
    decoded = formats.decode(record, formats.encode(record, x))
    assert found.written.nonzero().flatten().tolist() == slots
    assert found.tokens == 48
    torch.testing.assert_close(found.absmax[slots], decoded.abs().amax(-1), rtol=0, atol=0)
    assert found.absmax[1] == 0
    assert found.exponent.shape == found.nan.shape == (48, len(inspect.column_widths(record)))
    assert sum(inspect.column_widths(record)) == record.dim
    summary = found.summary()
    assert (summary["written"], summary["never_written"], summary["nan"], summary["odd_scales"]) == (5, 43, 0, 0)
    scales = formats.scales(record, formats.encode(record, x))
    if scales.numel():
        exponents = torch.frexp(scales)[1] - 1
        assert (summary["scale_exponent_min"], summary["scale_exponent_max"]) == (exponents.min(), exponents.max())
    else:
        assert summary["scale_exponent_min"] is None
    json.dumps([summary, *(found.token(slot) for slot in slots)])
    assert shown(found)


def test_a_chunk_at_a_time_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    record = formats.record("v4_fp8")
    x, slots = values(record, 5), [0, 15, 16, 37, 47]
    whole = inspected(record, x, slots)
    monkeypatch.setattr(inspect, "CHUNK_BYTES", 1)
    parts = inspected(record, x, slots)
    for name in ("written", "exponent", "absmax", "saturated", "nan", "zero", "odd_scales"):
        assert torch.equal(getattr(whole, name), getattr(parts, name)), name


def test_what_a_block_holds() -> None:
    record = formats.record("v41_mxfp8")
    x = torch.full((1, 512), 1.0)
    x[0, :32] = 0.0  # a zero block: the scale is the floor's
    x[0, 32:64] = torch.tensor([448.0] * 3 + [1.0] * 29)  # three codes at 448 with scale 1
    x[0, 64] = float("nan")
    found = inspected(record, x, [5])
    assert found.zero[5].nonzero().flatten().tolist() == [0]
    assert found.exponent[5, :3].tolist() == [-22, 0, -8]
    assert found.saturated[5, 1] == 3
    assert found.nan[5].tolist() == [0, 0, 1, *[0] * 13]
    assert found.token(5) == {
        "slot": 5,
        "block": 0,
        "offset": 5,
        "scale_exponent_min": -22,
        "scale_exponent_max": 0,
        "absmax": 448.0,
        "saturated": 3,
        "nan": 1,
        "zero_columns": 1,
        "odd_scales": 0,
    }
    assert found.summary()["nan_slots"] == [5]


@pytest.mark.parametrize(
    ("name", "at", "data", "odd"),
    [
        ("v41_mxfp8", 512, b"\xff", 1),  # NaN
        ("v41_mxfp8", 512, b"\x00", 1),  # below what a zero block stores
        ("v41_mxfp8", 512, bytes([105]), 0),  # what a zero block stores
        ("dsa_fp8", 512, struct.pack("<f", 0.75), 1),  # no power of two
        ("dsa_fp8", 512, struct.pack("<f", -1.0), 1),
        ("dsa_fp8", 512, struct.pack("<f", float("inf")), 1),
        ("dsa_fp8", 512, struct.pack("<f", 2.0**-13), 0),
        ("v41_nvfp4", 256, b"\x7f", 0),  # how e2m1 blocks say NaN
        ("v41_nvfp4", 256, b"\x00", 1),
        ("v41_nvfp4", 256, b"\x01", 0),
        ("index_fp8_ue8m0", 128, b"\x00\x00\x00\x00", 1),
    ],
)
def test_scales_that_no_rule_makes(name: str, at: int, data: bytes, odd: int) -> None:
    record = formats.record(name)
    encoded = formats.encode(record, values(record, 1))
    encoded[0, at : at + len(data)] = torch.tensor(list(data), dtype=torch.uint8)
    pool = torch.full((record.page_bytes(4) + 8,), FILL, dtype=torch.uint8)
    pool[record.address(torch.tensor(2), 4)] = encoded[0]
    found = inspect.inspect(Dump(pool, None), record, block_size=4, fill=FILL)
    assert found.odd_scales.tolist() == [0, 0, odd, 0]
    assert found.trailing_bytes == 8


def test_a_nan_scale_makes_every_value_of_its_block_nan() -> None:
    record = formats.record("v41_nvfp4")
    x = values(record, 1)
    x[0, 17] = float("inf")
    found = inspected(record, x, [3])
    assert found.nan[3].tolist() == [0, 16, *[0] * 30]
    assert found.exponent[3, 1] == inspect.NO_EXPONENT


def test_fill_zero_and_fill_byte() -> None:
    record = formats.record("bf16", 512)
    data = torch.zeros(4 * 1024, dtype=torch.uint8)
    data[1024:1026] = 1
    assert inspect.inspect(Dump(data, None), record, block_size=4, fill=0).written.tolist() == [
        False,
        True,
        False,
        False,
    ]
    assert inspect.inspect(Dump(data, None), record, block_size=4, fill=FILL).written.all()


# -- the table ----------------------------------------------------------------------------------------------------


def test_table_folds_unwritten_slots_and_long_dumps() -> None:
    record = formats.record("v41_mxfp8")
    few = shown(inspected(record, values(record, 2), [3, 20]))
    assert re.findall(r"^ *(\S+)  never written", few, re.M) == ["0..2", "4..19", "21..47"]
    assert re.search(r"^ +20 +1:4 +2\^-\d", few, re.M)
    assert "2 written, 46 never (all bytes 0xa5)" in few
    assert "--all" not in few
    many = inspected(record, values(record, 40), list(range(40)))
    short, long = shown(many), shown(many, every=True)
    assert "... --all shows every token" in short
    assert "..." not in long and len(long.splitlines()) == len(short.splitlines()) + 8
    assert all(len(line) <= 80 for line in long.splitlines())


# -- files --------------------------------------------------------------------------------------------------------


@pytest.fixture
def record() -> Record:
    return formats.record("v41_mxfp8")


def save(folder: Path, suffix: str, pool: Tensor) -> Path:
    path = folder / f"cache{suffix}"
    if suffix == ".npy":
        np.save(path, pool.numpy())
    elif suffix == ".npz":
        np.savez(path, cache=pool.numpy())
    else:
        save_file({"cache": pool}, path)
    return path


@pytest.mark.parametrize("suffix", [".npy", ".npz", ".safetensors"])
def test_files(tmp_path: Path, suffix: str, record: Record) -> None:
    pool, stride = dumped(record, values(record, 3), [1, 2, 40])
    dump = inspect.read(save(tmp_path, suffix, pool.view(3, stride)), None if suffix == ".npy" else "cache")
    assert dump.first_stride == stride
    assert torch.equal(dump.data, pool)
    found = inspect.inspect(dump, record, block_size=BLOCK_SIZE, fill=FILL)  # the stride is the file's
    assert found.block_stride == stride
    assert found.written.nonzero().flatten().tolist() == [1, 2, 40]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int64])
def test_safetensors_of_any_dtype_are_bytes(tmp_path: Path, dtype: torch.dtype) -> None:
    x = torch.arange(6 * 8, dtype=torch.uint8).view(6, 8)
    save_file({"cache": x.view(dtype)}, tmp_path / "x.safetensors")
    dump = inspect.read(tmp_path / "x.safetensors")
    assert torch.equal(dump.data, x.flatten())
    assert dump.first_stride == 8


def test_reading_does_not_write(tmp_path: Path, record: Record) -> None:
    path = save(tmp_path, ".npy", torch.zeros(record.page_bytes(2), dtype=torch.uint8))
    before = path.read_bytes()
    inspect.read(path).data.fill_(1)
    assert path.read_bytes() == before


def test_a_recorded_cache() -> None:
    dump = inspect.read(RECORDED / "v4.npz", "v4.9.cache_out")
    found = inspect.inspect(dump, formats.record("v4_fp8"), block_size=64, fill=FILL)
    assert found.block_stride == 37952
    summary = found.summary()
    assert (summary["pages"], summary["written"], summary["odd_scales"], summary["nan"]) == (3, 16, 0, 0)
    assert (summary["scale_exponent_min"], summary["scale_exponent_max"], summary["absmax"]) == (-22, 7, 42240.0)


def broken(folder: Path, name: str, data: bytes) -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    ("name", "data", "key", "message"),
    [
        ("x.npy", b"", None, ""),
        ("x.npy", b"\x93NUMPY\x01\x00", None, ""),
        ("x.npz", b"PK", None, "File is not a zip file"),
        ("x.safetensors", b"\xff" * 16, None, ""),
        ("x.safetensors", struct.pack("<Q", 1 << 60) + b"{}", None, ""),
        ("x.bin", b"abc", None, "expected a file in .npy, .npz, .safetensors; got .bin"),
        ("x", b"abc", None, "expected a file in .npy, .npz, .safetensors; got no suffix"),
    ],
)
def test_broken_files(tmp_path: Path, name: str, data: bytes, key: str | None, message: str) -> None:
    path = broken(tmp_path, name, data)
    with pytest.raises(ValueError, match=re.escape(f"{path}: {message}")):
        inspect.read(path, key)


def test_files_with_several_arrays(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", a=np.zeros(3), b=np.zeros(3))
    for key, got in ((None, "none"), ("c", "'c'")):
        with pytest.raises(ValueError, match=re.escape(f"x.npz: key: expected one of a, b; got {got}")):
            inspect.read(tmp_path / "x.npz", key)
    np.save(tmp_path / "x.npy", np.zeros(3))
    with pytest.raises(ValueError, match=r"key: expected none for an \.npy file, which holds one array; got 'a'"):
        inspect.read(tmp_path / "x.npy", "a")


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.array([{}], dtype=object), ""),
        (np.zeros((0, 4)), "expected bytes; got an array of shape [0, 4]"),
        (np.asfortranarray(np.zeros((3, 4))), "expected an array in C order; got strides (8, 24)"),
    ],
)
def test_arrays_that_are_no_dump(tmp_path: Path, array: np.ndarray[Any, Any], message: str) -> None:
    np.save(tmp_path / "x.npy", array, allow_pickle=True)
    with pytest.raises(ValueError, match=re.escape(f"x.npy: {message}")):
        inspect.read(tmp_path / "x.npy")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 0}, "block_size: expected at least 1; got 0"),
        (
            {"block_size": 3},
            "offset: expected a page of 1584 bytes (3 v41_mxfp8 records) behind it; got 0 of 1056 bytes",
        ),
        ({"offset": 1}, "offset: expected a page of 1056 bytes (2 v41_mxfp8 records) behind it; got 1 of 1056 bytes"),
        ({"offset": -1}, "offset: expected a page of 1056 bytes (2 v41_mxfp8 records) behind it; got -1 of 1056 bytes"),
        ({"block_stride": 1000}, "block_stride: expected at least 1056 bytes for 2 v41_mxfp8 records; got 1000"),
        ({"fill": 256}, "fill: expected a byte, 0 to 255; got 256"),
    ],
)
def test_sizes_that_do_not_fit(record: Record, options: dict[str, int], message: str) -> None:
    dump = Dump(torch.zeros(1056, dtype=torch.uint8), None)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        inspect.inspect(dump, record, **{"block_size": 2, **options})  # type: ignore[arg-type]


# -- the picture ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["v41_mxfp8", "v4_fp8", "bf16", "index_mxfp4"])
@pytest.mark.parametrize("tokens", [0, 1, 48])
def test_picture(tmp_path: Path, name: str, tokens: int) -> None:
    record = formats.record(name, 512)
    x = values(record, tokens)
    x[:1, 3] = float("nan")
    path = tmp_path / "picture.png"
    inspect.picture(inspected(record, x, list(range(tokens))), path, "a title")
    assert path.read_bytes().startswith(b"\x89PNG\r\n")


def test_picture_of_a_long_dump(tmp_path: Path, record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspect, "PICTURE_ROWS", 5)
    x = values(record, 40)
    x[39, 500] = float("inf")
    found = inspected(record, x, list(range(40)))
    written, exponent, share, nan = inspect._pooled(found, torch.tensor(inspect.column_widths(record)))
    assert written.tolist() == [True, True, True, True, False]
    assert nan.nonzero().tolist() == [[3, 15]]
    assert exponent[4].isnan().all() and share[4].eq(0).all()
    assert torch.equal(exponent[0], found.exponent[:10].amax(0).float())
    inspect.picture(found, tmp_path / "picture.png", "several tokens a line")


def test_a_picture_that_cannot_be_written(tmp_path: Path, record: Record) -> None:
    with pytest.raises(ValueError, match=r"^png: .*No such file"):
        inspect.picture(inspected(record, values(record, 1), [0]), tmp_path / "none" / "x.png", "")
