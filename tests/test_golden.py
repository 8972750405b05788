"""The recorded calls on every backend of this machine, what counts as identical, and what a bad file is told."""

from __future__ import annotations

import io
import json
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from preattn import differences, formats, golden
from preattn.dispatch import Backend
from preattn.golden import RECORDED, GoldenCase
from preattn.reference import numerics

CASES = golden.load()
Arrays = dict[str, np.ndarray[Any, Any]]


def place(backend: Backend) -> str:
    return "cuda" if backend == "triton" and torch.cuda.is_available() else "cpu"


# -- the recorded bytes ------------------------------------------------------------------------------------------


FLIPS = {"v4.12": 5, "norm_rope.0": 2, "norm_rope.3": 1}
"""Elements that the recorder's order of summing rounded the other way, on the H200 that recorded them."""


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_recorded_bytes(case: GoldenCase, backend: Backend) -> None:
    comparison = case.compare(case.call(place(backend)).run(backend))
    assert comparison.identical, str(comparison)
    assert comparison.bytes > 0
    assert comparison.flips == FLIPS.get(case.name, 0)


def test_the_package_brings_both_families() -> None:
    assert [sum(case.family == family for case in CASES) for family in golden.FAMILIES] == [19, 12]


def test_calls_do_not_share_memory() -> None:
    case = CASES[0]
    first, second = case.call(), case.call()
    first.run("reference")
    assert case.compare({name: tensor.view(torch.uint8) for name, tensor in second.memory.items()}).differing


# -- comparison --------------------------------------------------------------------------------------------------


def bf16_bits(*bits: int) -> torch.Tensor:
    return torch.tensor(bits, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def as_written(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"out": tensor.contiguous().view(torch.uint8).flatten()}


def test_a_changed_byte_is_found() -> None:
    call, expected, norms = CASES[0].recorded()
    written = call.run("reference")
    written["pool"][300] ^= 1
    comparison = golden.compare(expected, written, norms)
    want = int(written["pool"][300]) ^ 1
    assert (comparison.differing, comparison.identical) == (1, False)
    assert comparison.first == f"pool[300], expected 0x{want:02x}, got 0x{want ^ 1:02x}"


def test_a_changed_guard_is_found() -> None:
    call, expected, norms = CASES[0].recorded()
    written = call.run("reference")
    written["pool"][-1] = 0
    assert golden.compare(expected, written, norms).differing == 1


def test_a_changed_hash_counts_the_whole_output() -> None:
    call, expected, norms = CASES[0].recorded()
    assert isinstance(expected["out"], str)
    written = call.run("reference")
    written["out"][0] ^= 1
    comparison = golden.compare(expected, written, norms)
    assert comparison.differing == written["out"].numel()
    assert comparison.first is not None and comparison.first.startswith("SHA-256 of out: expected 34bd1a8e7b5927b9")


def test_an_output_that_was_not_written() -> None:
    with pytest.raises(ValueError, match=r"^written: expected out; got pool$"):
        golden.compare({"out": torch.zeros(1)}, {"pool": torch.zeros(1)})


def test_an_output_of_another_size() -> None:
    comparison = golden.compare({"out": torch.zeros(4)}, {"out": torch.zeros(8, dtype=torch.uint8)})
    assert (comparison.differing, comparison.first) == (16, "out: expected 16 bytes, got 8")


@pytest.mark.parametrize(
    ("want", "got", "flips"),
    [
        (0x3F80, 0x3F81, 1),
        (0x3F80, 0x3F7F, 1),  # across a binade
        (0x3FFF, 0x4000, 1),  # with a carry into the other byte
        (0xBF80, 0xBF81, 1),
        (0x0000, 0x0001, 1),
        (0x8001, 0x8000, 1),
        (0x3F80, 0x3F82, 0),
        (0x0000, 0x8000, 0),  # the sign of zero is no rounding
        (0x0001, 0x8001, 0),
        (0x7F7F, 0x7F80, 0),  # nor is an overflow
        (0x7FC0, 0x7FC1, 0),
        (0x3F80, 0xBF80, 0),
    ],
)
def test_what_a_norm_may_flip(want: int, got: int, flips: int) -> None:
    expected, written = {"out": bf16_bits(want)}, as_written(bf16_bits(got))
    allowed = golden.compare(expected, written, frozenset({"out"}))
    assert (allowed.flips, allowed.identical) == (flips, flips == 1)
    strict = golden.compare(expected, written)
    assert (strict.flips, strict.identical) == (0, False)


def test_a_norm_may_not_flip_many() -> None:
    expected = bf16_bits(*[0x3F80] * 4096)
    for count, identical in ((2, True), (3, False)):  # 4096 / 2048 = 2
        written = expected.clone()
        written[:count] = bf16_bits(0x3F81)
        comparison = golden.compare({"out": expected}, as_written(written), frozenset({"out"}))
        assert (comparison.identical, comparison.flips) == (identical, count if identical else 0)


def test_flips_do_not_hide_a_difference() -> None:
    expected = bf16_bits(*[0x3F80] * 4096)
    written = expected.clone()
    written[0], written[9] = bf16_bits(0x3F81), bf16_bits(0x4080)
    comparison = golden.compare({"out": expected}, as_written(written), frozenset({"out"}))
    assert (comparison.differing, comparison.flips, comparison.first) == (1, 1, "out[19], expected 0x3f, got 0x40")


@pytest.mark.parametrize("length", [512, 2048])
def test_the_bound_on_flips_holds_for_another_order(length: int) -> None:
    """16 terms in a lane, then across lanes: the order that the bound is derived for."""
    x = torch.randn(512, length, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    lanes = (x * x).unflatten(-1, (-1, 16)).unbind(-1)
    total = lanes[0]
    for term in lanes[1:]:
        total = total + term
    while total.shape[-1] > 1:
        total = total[..., : total.shape[-1] // 2] + total[..., total.shape[-1] // 2 :]
    other = formats.to_bf16(x * torch.rsqrt(total / length + 1e-6))
    ours = formats.to_bf16(numerics.rms_norm(x, 1e-6))
    comparison = golden.compare({"out": ours}, as_written(other), frozenset({"out"}))
    assert comparison.identical
    assert comparison.flips <= differences.NORM_FLIPS * ours.numel() / 8, "the bound is far from what happens"


# -- files -------------------------------------------------------------------------------------------------------


def recorded_arrays(*names: str) -> Arrays:
    """Raw arrays of some recorded V4 cases, with a manifest of them alone."""
    with np.load(RECORDED / "v4.npz") as file:
        manifest = json.loads(file["__meta__"].tobytes())["manifest"]
        arrays = {key: file[key] for key in file.files if key == "rope_table" or key.startswith(tuple(names))}
    return {**arrays, "__meta__": meta([entry for entry in manifest if entry["case"] in names])}


def meta(manifest: object) -> np.ndarray[Any, Any]:
    return np.frombuffer(json.dumps({"manifest": manifest}).encode(), np.uint8)


def write(folder: Path, arrays: Arrays) -> Path:
    np.savez_compressed(folder / "v4.npz", **arrays)  # type: ignore[arg-type]
    return folder


def edited(arrays: Arrays, **changes: object) -> Arrays:
    """The same, with entries of the only case changed (``...``: left out)."""
    (entry,) = json.loads(arrays["__meta__"].tobytes())["manifest"]
    entry = {key: value for key, value in (entry | changes).items() if value is not ...}
    return {**arrays, "__meta__": meta([entry])}


def test_a_folder_of_ones_own(tmp_path: Path) -> None:
    (case,) = golden.load(write(tmp_path, recorded_arrays("kvonly.0")))
    assert case.compare(case.call().run("reference")).identical


def test_no_folder(tmp_path: Path) -> None:
    message = f"{tmp_path / 'none'}: expected a folder with v4.npz or dsa.npz"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        golden.load(tmp_path / "none")
    with pytest.raises(ValueError, match=r"expected a folder with dsa\.npz$"):
        golden.load(write(tmp_path, recorded_arrays("kvonly.0")), ["dsa"])


@pytest.mark.parametrize("keep", [0, 3, 1000, -1, -200])
def test_a_truncated_file(tmp_path: Path, keep: int) -> None:
    path = write(tmp_path, recorded_arrays("kvonly.0")) / "v4.npz"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=rf"^{re.escape(str(path))}: "):
        golden.load(tmp_path)


def test_any_damaged_byte_is_refused_or_harmless(tmp_path: Path) -> None:
    path = write(tmp_path, recorded_arrays("kvonly.0")) / "v4.npz"
    intact = path.read_bytes()
    for at in range(0, len(intact), len(intact) // 60):
        path.write_bytes(intact[:at] + bytes([intact[at] ^ 0x55]) + intact[at + 1 :])
        try:
            cases = golden.load(tmp_path)
            assert all(case.compare(case.call().run("reference")).identical for case in cases)
        except ValueError as error:
            assert str(path) in str(error)


def npy(array: np.ndarray[Any, Any], *, pickled: bool = False) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=pickled)
    return file.getvalue()


def claimed(shape: tuple[int, ...], data: bytes) -> bytes:
    """An .npy member whose header claims a shape that its data does not have."""
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": "|u1", "fortran_order": False, "shape": shape})
    return file.getvalue() + data


@pytest.mark.parametrize(
    ("member", "message"),
    [
        (npy(np.array([{}], dtype=object), pickled=True), "expected numbers in C order; got object"),
        (npy(np.asfortranarray(np.zeros((2, 3)))), "expected numbers in C order; got float64"),
        (npy(np.zeros(3, np.float64)), "expected uint8, uint16, int32, int64, float32; got float64"),
        (npy(np.zeros(3, ">u2")), "expected uint8, uint16, int32, int64, float32; got >u2"),
        (npy(np.zeros(3, np.uint16)), "expected uint16 for :bf16 only; got uint16"),
        (claimed((1 << 40,), b"abc"), f"expected {1 << 40} bytes for shape [{1 << 40}]; got 3"),
        (claimed((2, -3), b"abcdef"), "expected an .npy array; got shape [2, -3]"),
        (claimed((-1, -6), b"abcdef"), "expected an .npy array; got shape [-1, -6]"),
        (claimed((2,), b"abc"), "expected 2 bytes for shape [2]; got 3"),
        (b"\x93NUMPY\x09\x00", "expected an .npy array; got"),
        (b"not an array", "expected an .npy array; got"),
        (b"", "expected an .npy array; got"),
    ],
)
def test_a_hostile_member(tmp_path: Path, member: bytes, message: str) -> None:
    with zipfile.ZipFile(tmp_path / "v4.npz", "w") as archive:
        archive.writestr("kvonly.0.kv.npy", member)
    with pytest.raises(ValueError, match=re.escape(f"v4.npz: kvonly.0.kv.npy: {message}")):
        golden.load(tmp_path)


def test_sizes_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, recorded_arrays("kvonly.0"))
    for name, limit, message in (
        ("MEMBERS", 3, r"expected at most 3 arrays of \d+ bytes in all; got 6 of \d+$"),
        ("FILE_BYTES", 1000, r"expected at most 4096 arrays of 1000 bytes in all; got 6 of \d+$"),
        ("MEMBER_BYTES", 1000, r"v4\.npz: \S+\.npy: expected at most 1000 bytes; got \d+$"),
    ):
        with monkeypatch.context() as patch, pytest.raises(ValueError, match=message):
            patch.setattr(golden, name, limit)
            golden.load(tmp_path)


def without(arrays: Arrays, key: str) -> Arrays:
    return {name: array for name, array in arrays.items() if name.partition(":")[0] != key}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda arrays: without(arrays, "__meta__"), r": expected __meta__, the manifest; got no such array$"),
        (lambda arrays: {**arrays, "__meta__": np.zeros(4, np.uint8)}, r": __meta__: JSON is malformed"),
        (lambda arrays: {**arrays, "__meta__": meta(7)}, r": __meta__: manifest: expected `array`; got `int`$"),
        (lambda arrays: {**arrays, "__meta__": meta([7])}, r": __meta__: manifest\[0\]: expected `object`; got `int`$"),
        (lambda arrays: edited(arrays, op=...), r": __meta__: manifest\[0\]: expected op, a string; got None$"),
        (lambda arrays: edited(arrays, op=3), r": __meta__: manifest\[0\]: expected op, a string; got 3$"),
        (lambda arrays: edited(arrays, record=["v5"]), r": __meta__: manifest\[0\]\[...\]: expected .*; got `array`$"),
        (
            lambda arrays: {**arrays, "__meta__": np.full(1 << 21, 32, np.uint8)},
            r": __meta__: expected at most 1048576 bytes; got 2097152$",
        ),
        (lambda arrays: edited(arrays, q_out_sha256="00"), r": v4\.8\.q_out: expected SHA-256 00; got 3644fa2d94cd"),
    ],
)
def test_a_file_that_is_not_in_the_format(tmp_path: Path, change: Callable[[Arrays], Arrays], message: str) -> None:
    with pytest.raises(ValueError, match=r"v4\.npz" + message):
        golden.load(write(tmp_path, change(recorded_arrays("v4.8"))))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda arrays: without(arrays, "v4.8.kv"), r"expected kv; got cache_out, "),
        (lambda arrays: without(arrays, "v4.8.cache_out"), r"expected cache_out; got kv, "),
        (lambda arrays: without(arrays, "rope_table"), r"expected rope_table; got "),
        (lambda arrays: edited(arrays, record=...), r"expected record; got "),
        (lambda arrays: edited(arrays, record="v5"), r"record: expected one of v41_mxfp8, .*; got 'v5'$"),
        (lambda arrays: edited(arrays, op="v5"), r"op: expected an op of the V4 prologue; got 'v5'$"),
        (lambda arrays: edited(arrays, block_size=0), r"block_size: expected 1 to 1048576; got 0$"),
        (lambda arrays: edited(arrays, block_size="64"), r"block_size: expected 1 to 1048576; got '64'$"),
        (lambda arrays: edited(arrays, block_size=65), r"block_stride: expected at least 37960 bytes for 65 v4_fp8"),
        (lambda arrays: edited(arrays, cache_fill=-1), r"cache_fill: expected a number from 0 to 255; got -1$"),
        (lambda arrays: edited(arrays, cache_fill="a"), r"cache_fill: expected a number from 0 to 255; got 'a'$"),
        (lambda arrays: edited(arrays, padded_heads=1 << 40), r"padded_heads: expected 0 to 1024; got 109951"),
        (lambda arrays: edited(arrays, padded_heads=True), r"padded_heads: expected 0 to 1024; got True$"),
        (
            lambda arrays: {**arrays, "v4.8.positions": np.full(17, 4096)},
            r"positions: expected 0 to 4095; got 4096 to 4096$",
        ),
        (
            lambda arrays: {**arrays, "v4.8.positions": np.full(17, -1)},
            r"positions: expected 0 to 4095; got -1 to -1$",
        ),
        (
            lambda arrays: {**arrays, "v4.8.cache_out": np.zeros(9, np.uint8)},
            r"cache_out: expected pages; got shape \[9\]$",
        ),
    ],
)
def test_a_case_that_does_not_fit(tmp_path: Path, change: Callable[[Arrays], Arrays], message: str) -> None:
    (case,) = golden.load(write(tmp_path, change(recorded_arrays("v4.8"))))
    with pytest.raises(ValueError, match=rf"^{re.escape(str(tmp_path))}/v4\.npz: v4\.8: {message}"):
        case.call()
