"""Recorded calls of the engines' own ops: their inputs, and every byte they wrote.

A folder holds ``v4.npz`` and ``dsa.npz``. An array ``CASE.NAME:bf16`` is bf16 viewed as uint16, e4m3 is viewed
as uint8, ``rope_table`` is shared, and ``__meta__`` is JSON in uint8 whose ``manifest`` lists the cases. Where
an output is large its SHA-256 stands for it. The package brings one such folder, ``preattn/recorded``.

A file is data and nothing more: no pickles, sizes bounded, and what does not fit is a ValueError that names the
file and the key.
"""

from __future__ import annotations

import hashlib
import lzma
import math
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import files
from ..cases.base import Call, as_bytes
from ..differences import NORM_FLIPS, neighbours
from . import dsa, v4
from .memory import Recorded

RECORDED = Path(__file__).parents[1] / "recorded"
"""The folder that comes with the package."""

FAMILIES = ("v4", "dsa")

MEMBERS = 4096
"""Most arrays of a file."""
MEMBER_BYTES = 256 << 20
"""Most bytes of an array."""
MANIFEST_BYTES = 1 << 20
"""Most bytes of a manifest."""
FILE_BYTES = 1 << 30
"""Most bytes of all arrays of a file, uncompressed."""

_DTYPES = tuple(np.dtype(name) for name in ("uint8", "uint16", "int32", "int64", "float32"))
_UNFITTING = (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RuntimeError)
UNREADABLE = (
    OSError,
    EOFError,
    MemoryError,
    RuntimeError,
    NotImplementedError,
    ValueError,
    lzma.LZMAError,
    zipfile.BadZipFile,
    zlib.error,
)


@dataclass(frozen=True)
class Comparison:
    """What a call wrote against what was recorded.

    Attributes:
        bytes: bytes compared.
        differing: bytes that differ; all of an output whose SHA-256 does.
        flips: elements of norm outputs one bf16 ulp off, where :data:`~preattn.differences.NORM_FLIPS` allows them;
            not in ``differing``.
        norm_elements: elements that may flip.
        first: where the first difference is, and what it is.
    """

    bytes: int
    differing: int
    flips: int
    norm_elements: int
    first: str | None

    @property
    def identical(self) -> bool:
        """Whether every byte is as recorded, allowed flips aside."""
        return self.differing == 0

    def __str__(self) -> str:
        if not self.identical:
            return f"{self.differing:,} bytes differ, the first: {self.first}"
        if not self.flips:
            return "identical"
        return f"identical but for {self.flips} norm rounding{'s' * (self.flips > 1)} in {self.norm_elements:,}"


@dataclass(frozen=True)
class GoldenCase:
    """One recorded call.

    Attributes:
        name: as the manifest calls it.
        family: ``v4`` or ``dsa``; also the file's name.
        op: as the manifest calls it.
        path: the file.
        entry: its line of the manifest.
        arrays: its arrays and the shared ``rope_table``, bf16 where they stand for bf16.
    """

    name: str
    family: str
    op: str
    path: Path
    entry: Mapping[str, Any]
    arrays: Mapping[str, Tensor]

    def recorded(self, device: torch.device | str = "cpu") -> Recorded:
        """The call with fresh memory on a device, and what it has to write.

        Raises:
            ValueError: the file lacks something that the case needs, or it does not fit.
        """
        arrays = _Named({key: array.to(device) for key, array in self.arrays.items()})
        try:
            return _ADAPTERS[self.family](arrays, _Named(self.entry))
        except _UNFITTING as error:
            raise ValueError(f"{self.path}: {self.name}: {error}") from error

    def call(self, device: torch.device | str = "cpu") -> Call:
        """The call alone; see :meth:`recorded`."""
        return self.recorded(device).call

    def compare(self, written: Mapping[str, Tensor]) -> Comparison:
        """Compare what :meth:`Call.run` returned, byte by byte."""
        _, expected, norms = self.recorded()
        return compare(expected, written, norms)


def load(folder: Path | None = None, families: Sequence[str] = FAMILIES) -> list[GoldenCase]:
    """Read the recorded cases of a folder (None: the package's own), in the order of the manifests.

    Raises:
        ValueError: there is no file, or one is damaged, too large, or not in the format.
    """
    folder = RECORDED if folder is None else folder
    paths = [path for family in families if (path := folder / f"{family}.npz").is_file()]
    if not paths:
        raise ValueError(f"{folder}: expected a folder with {' or '.join(f'{family}.npz' for family in families)}")
    return [case for path in paths for case in _read_cases(path)]


def compare(
    expected: Mapping[str, Tensor | str], written: Mapping[str, Tensor], norms: frozenset[str] = frozenset()
) -> Comparison:
    """Compare written bytes with expected ones; outputs among ``norms`` may flip within :data:`NORM_FLIPS`.

    Raises:
        ValueError: an expected output was not written.
    """
    count = differing = flips = norm_elements = 0
    first = None
    for name, want in expected.items():
        if name not in written:
            raise ValueError(f"written: expected {name}; got {', '.join(written)}")
        got = written[name]
        count += got.numel()
        if isinstance(want, str):
            digest = hashlib.sha256(got.numpy().tobytes()).hexdigest()
            if digest != want:
                differing += got.numel()
                first = first or f"SHA-256 of {name}: expected {want[:16]}, got {digest[:16]}"
            continue
        flat = as_bytes(want)
        if got.numel() != flat.numel():
            differing += max(got.numel(), flat.numel())
            first = first or f"{name}: expected {flat.numel()} bytes, got {got.numel()}"
            continue
        wrong = got != flat
        if name in norms and want.dtype == torch.bfloat16:
            norm_elements += want.numel()
            flipped = neighbours(got.view(torch.bfloat16), flat.view(torch.bfloat16))
            allowed = int(flipped.sum())
            if allowed <= math.ceil(NORM_FLIPS * want.numel()):
                flips += allowed
                wrong &= ~flipped.repeat_interleave(2)
        if wrong.any():
            at = int(wrong.nonzero()[0, 0])
            differing += int(wrong.sum())
            first = first or f"{name}[{at}], expected 0x{int(flat[at]):02x}, got 0x{int(got[at]):02x}"
    return Comparison(count, differing, flips, norm_elements, first)


# -- files ---------------------------------------------------------------------------------------------------


class _Named(dict[str, Any]):
    """A dict that says which key is missing."""

    def __missing__(self, key: str) -> Any:
        raise ValueError(f"expected {key}; got {', '.join(sorted(self))}")


class _Manifest(files.Schema, frozen=True):
    """``__meta__``: the cases, flat objects whose fields depend on the op; where and from which seed they come."""

    manifest: list[dict[str, str | int | float | bool | None]]
    source: str = ""
    seed: str | int = ""


def _read_cases(path: Path) -> list[GoldenCase]:
    arrays = _read_arrays(path)
    meta = arrays.pop("__meta__", None)
    if meta is None:
        raise ValueError(f"{path}: expected __meta__, the manifest; got no such array")
    if meta.numel() > MANIFEST_BYTES:
        raise ValueError(f"{path}: __meta__: expected at most {MANIFEST_BYTES} bytes; got {meta.numel()}")
    manifest = files.parse(meta.numpy().tobytes(), _Manifest, f"{path}: __meta__").manifest
    shared = {key: array for key, array in arrays.items() if key == "rope_table"}
    cases = []
    for index, entry in enumerate(manifest):
        name, op = (_word(entry, key, f"{path}: __meta__: manifest[{index}]") for key in ("case", "op"))
        own = {key.removeprefix(name + "."): value for key, value in arrays.items() if key.startswith(name + ".")}
        _check_digest(path, name, own.get("q_out"), entry.get("q_out_sha256"))
        cases.append(GoldenCase(name, path.stem, op, path, entry, {**shared, **own}))
    return cases


def _word(entry: Mapping[str, Any], key: str, where: str) -> str:
    word = entry.get(key)
    if not isinstance(word, str):
        raise ValueError(f"{where}: expected {key}, a string; got {word!r}")
    return word


def _check_digest(path: Path, name: str, output: Tensor | None, digest: object) -> None:
    if output is not None and digest is not None and _sha256(output) != digest:
        raise ValueError(f"{path}: {name}.q_out: expected SHA-256 {digest}; got {_sha256(output)}")


def _sha256(tensor: Tensor) -> str:
    return hashlib.sha256(as_bytes(tensor).numpy().tobytes()).hexdigest()


def _read_arrays(path: Path) -> dict[str, Tensor]:
    """Every array of an .npz file, by its name without ``:bf16``."""
    arrays = {}
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            total = sum(member.file_size for member in members)
            if len(members) > MEMBERS or total > FILE_BYTES:
                raise ValueError(
                    f"expected at most {MEMBERS} arrays of {FILE_BYTES} bytes in all; got {len(members)} of {total}"
                )
            for member in members:
                name, _, view = member.filename.removesuffix(".npy").partition(":")
                array = read_array(archive, member)
                if array.dtype not in _DTYPES:
                    raise ValueError(f"{member.filename}: expected {', '.join(map(str, _DTYPES))}; got {array.dtype}")
                if (view == "bf16") != (array.dtype == np.uint16) or view not in ("", "bf16"):
                    raise ValueError(f"{member.filename}: expected uint16 for :bf16 only; got {array.dtype}")
                if name in arrays:
                    raise ValueError(f"{member.filename}: expected one array of this name; got another")
                tensor = torch.from_numpy(array)
                arrays[name] = tensor.view(torch.bfloat16) if view else tensor
    except UNREADABLE as error:
        raise ValueError(f"{path}: {error or type(error).__name__}") from None
    return arrays


def read_array(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> np.ndarray[Any, Any]:
    """One member; its header is held against its size before anything is allocated."""
    if member.file_size > MEMBER_BYTES:
        raise ValueError(f"{member.filename}: expected at most {MEMBER_BYTES} bytes; got {member.file_size}")
    with archive.open(member) as file:
        try:
            version = np.lib.format.read_magic(file)
            read_header = {
                (1, 0): np.lib.format.read_array_header_1_0,
                (2, 0): np.lib.format.read_array_header_2_0,
            }[version]
            shape, fortran, dtype = read_header(file)
            if any(size < 0 for size in shape):
                raise ValueError(f"shape {list(shape)}")
        except Exception as error:  # numpy parses the header as Python: what a hostile one raises has no bound
            raise ValueError(f"{member.filename}: expected an .npy array; got {str(error) or repr(error)}") from None
        if dtype.hasobject or fortran:
            raise ValueError(f"{member.filename}: expected numbers in C order; got {dtype}")
        size = math.prod(shape) * dtype.itemsize
        data = file.read(MEMBER_BYTES + 1)
    if len(data) != size:
        raise ValueError(f"{member.filename}: expected {size} bytes for shape {list(shape)}; got {len(data)}")
    return np.frombuffer(data, dtype).reshape(shape).copy()


_ADAPTERS: dict[str, Callable[[Mapping[str, Tensor], Mapping[str, Any]], Recorded]] = {
    "v4": v4.recorded,
    "dsa": dsa.recorded,
}
