"""Files that the library reads, damaged and hostile ones: data and nothing more, bounded, checked, a clear error.

Four kinds: tuned configurations, results, recorded calls, dumps. Each is cut at many lengths, and changed at many
bytes; what is not refused reads as it did. What only one kind can do wrong is beside its own tests.
"""

from __future__ import annotations

import ast
import io
import json
import pickle
import re
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from preattn import files, formats, golden, inspect, policy, tuning
from preattn.bench import results as disk
from preattn.policy import Device, LaunchConfig

PACKAGE = Path(policy.__file__).parent
H200 = PACKAGE / "configs" / "nvidia-h200.json"

Read = Callable[[Path], object]

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # numpy's, at an absurd shape


# -- one good file of each kind --------------------------------------------------------------------------------------


def configuration(folder: Path) -> Path:
    return tuning.save(Device("NVIDIA Abacus", True, 4000.0, {"kv": LaunchConfig(1, 2, 4)}), folder)


def results(folder: Path) -> Path:
    header = dict.fromkeys(disk.Header.__struct_fields__, "x") | {"copy_gbps": 4000.0, "memset_gbps": 3000.0}
    row = dict.fromkeys(disk.Row.__struct_fields__, "x") | {
        "cache": "cold",
        "tokens": 1,
        "heads": 8,
        "bytes": 9,
    }
    row |= {"padded_heads": None, "median_us": 1.5, "p10_us": 1.0, "p90_us": 2.0, "share_of_copy": 0.5}
    path = folder / "results.json"
    path.write_text(json.dumps({"header": header, "rows": [row, row]}))
    return path


def recorded(folder: Path) -> Path:
    with np.load(golden.RECORDED / "v4.npz") as file:
        manifest = json.loads(file["__meta__"].tobytes())["manifest"]
        (entry,) = [entry for entry in manifest if entry["case"] == "kvonly.0"]
        arrays = {key: file[key] for key in file.files if key == "rope_table" or key.startswith("kvonly.0")}
    meta = np.frombuffer(json.dumps({"manifest": [entry]}).encode(), np.uint8)
    np.savez_compressed(folder / "v4.npz", __meta__=meta, **arrays)
    return folder / "v4.npz"


def dump(suffix: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        path, data = folder / f"dump{suffix}", np.arange(4 * 528, dtype=np.uint8).reshape(2, -1)
        if suffix == ".npy":
            np.save(path, data)
        elif suffix == ".npz":
            np.savez(path, cache=data)
        else:
            save_file({"cache": torch.from_numpy(data)}, path)
        return path

    return make


def read_recorded(path: Path) -> object:
    return [case.compare(case.call().run("reference")) for case in golden.load(path.parent)]


def read_dump(path: Path) -> object:
    found = inspect.read(path)
    return inspect.inspect(found, formats.record("v41_mxfp8"), block_size=2).summary()


KINDS: dict[str, tuple[Callable[[Path], Path], Read]] = {
    "configuration": (configuration, policy.read_device),
    "results": (results, disk.read),
    "recorded": (recorded, read_recorded),
    ".npy": (dump(".npy"), read_dump),
    ".npz": (dump(".npz"), read_dump),
    ".safetensors": (dump(".safetensors"), read_dump),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def refused(path: Path, read: Read) -> str | None:
    """The message of the ValueError that names the file, None where it was read. Anything else is a failure."""
    try:
        read(path)
    except ValueError as error:
        assert str(path) in str(error) or path.name in str(error), f"which file? {error}"
        assert str(error).removeprefix(str(path)).strip(": "), "what is wrong?"
        return str(error)
    return None


@every_kind
def test_a_good_file_is_read(kind: str, tmp_path: Path) -> None:
    make, read = KINDS[kind]
    assert read(make(tmp_path))


@every_kind
def test_a_file_cut_short_is_refused(kind: str, tmp_path: Path) -> None:
    make, read = KINDS[kind]
    path = make(tmp_path)
    whole = path.read_bytes()
    for length in sorted({*range(0, len(whole), max(1, len(whole) // 40)), 1, 8, 10, len(whole) - 1}):
        if kind in ("configuration", "results") and not whole[length:].strip():
            continue  # a newline less
        path.write_bytes(whole[:length])
        message = refused(path, read)
        assert message is not None, f"cut at {length} of {len(whole)}"


@every_kind
def test_a_changed_byte_is_refused_or_reads_as_other_data(kind: str, tmp_path: Path) -> None:
    """Never another error, nor a hang; what carries a checksum never reads as something else."""
    make, read = KINDS[kind]
    path = make(tmp_path)
    whole, right = path.read_bytes(), read(path)
    for at in sorted({*range(0, len(whole), max(1, len(whole) // 60)), *range(min(len(whole), 130))}):
        for flip in (0x01, 0x80):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ flip]) + whole[at + 1 :])
            if refused(path, read) is None and kind == "recorded":
                assert read(path) == right or at < 130  # names of members are not under a checksum


@every_kind
@pytest.mark.parametrize("noise", ["nothing", "zeros", "random", "a pickle", "text", "a deep nest"])
def test_something_else_is_refused(kind: str, noise: str, tmp_path: Path) -> None:
    make, read = KINDS[kind]
    path = make(tmp_path)
    bomb = b"cos\nsystem\n(S'touch %s'\ntR." % str(tmp_path / "owned").encode()
    path.write_bytes(
        {
            "nothing": b"",
            "zeros": bytes(4096),
            "random": np.random.default_rng(1).bytes(4096),
            "a pickle": bomb,
            "text": b"hello",
            "a deep nest": b"[" * 200_000,
        }[noise]
    )
    assert refused(path, read) is not None
    assert not (tmp_path / "owned").exists()


@every_kind
def test_what_is_no_file_is_refused(kind: str, tmp_path: Path) -> None:
    make, read = KINDS[kind]
    path = make(tmp_path)
    path.unlink()
    with pytest.raises(ValueError, match=r"expected|No such file"):
        read(path)
    path.mkdir()
    with pytest.raises(ValueError, match=r"expected|Is a directory"):
        read(path)


# -- no pickle, anywhere -------------------------------------------------------------------------------------------


def test_nothing_is_ever_unpickled() -> None:
    """By name: no module of the package can load a pickle, run text, or let numpy or torch do it."""
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = {alias.name for alias in node.names} | {getattr(node, "module", None)}
                assert not names & {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}, path
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func)
            assert called not in ("eval", "exec", "torch.load", "pickle.load", "yaml.load"), f"{path}: {called}"
            if called in ("np.load", "numpy.load"):
                allowed = {word.arg: ast.unparse(word.value) for word in node.keywords}
                assert allowed.get("allow_pickle") == "False", f"{path}:{node.lineno}"


@pytest.mark.parametrize("suffix", [".npy", ".npz"])
def test_an_array_of_objects_is_refused_unopened(suffix: str, tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "owned",)

    file = io.BytesIO()
    np.save(file, np.array([Bomb()], dtype=object), allow_pickle=True)
    path = tmp_path / f"x{suffix}"
    if suffix == ".npy":
        path.write_bytes(file.getvalue())
    else:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("cache.npy", file.getvalue())
    assert refused(path, read_dump) is not None
    assert not (tmp_path / "owned").exists()
    pickle.loads(pickle.dumps(Bomb()))  # it would have
    assert (tmp_path / "owned").exists()


# -- sizes ---------------------------------------------------------------------------------------------------------


def npy(shape: tuple[int, ...], data: bytes = b"", descr: str = "|u1") -> bytes:
    """An array whose header claims a shape."""
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": descr, "fortran_order": False, "shape": shape})
    return file.getvalue() + data


def header(tensors: dict[str, Any]) -> bytes:
    """A .safetensors file with no data behind its header."""
    text = json.dumps(tensors).encode()
    return struct.pack("<Q", len(text)) + text


@pytest.mark.parametrize(
    ("suffix", "member"),
    [
        (".npy", npy((1 << 40,), b"abc")),
        (".npy", npy((1 << 62, 1 << 62), b"abc")),
        (".npy", npy((-1,), b"abc")),
        (".npy", npy((4,), bytes(4), "|O")),
        (".npy", b"\x93NUMPY\x02\x00" + struct.pack("<I", 0xFFFFFFF0)),
        (".npz", npy((1 << 40,), b"abc")),
        (".npz", npy((1 << 62, 1 << 62), b"abc")),
        (".npz", b"\x93NUMPY\x02\x00" + struct.pack("<I", 0xFFFFFFF0)),
        (".safetensors", struct.pack("<Q", 1 << 62) + b"{}"),
        (".safetensors", header({"cache": {"dtype": "U8", "shape": [1 << 40], "data_offsets": [0, 1 << 40]}})),
        (".safetensors", header({"cache": {"dtype": "U8", "shape": [4], "data_offsets": [4, 0]}})),
    ],
)
def test_a_claimed_size_allocates_nothing(suffix: str, member: bytes, tmp_path: Path) -> None:
    path = tmp_path / f"x{suffix}"
    path.write_bytes(member)
    if suffix == ".npz":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("cache.npy", member)
    assert refused(path, read_dump) is not None


def test_an_archive_that_swells_is_refused(tmp_path: Path) -> None:
    """A few hundred kilobytes that would be more than the bound of an array."""
    with zipfile.ZipFile(tmp_path / "v4.npz", "w", zipfile.ZIP_DEFLATED) as archive, archive.open("x.npy", "w") as file:
        file.write(npy((golden.MEMBER_BYTES + 1,)))
        for _ in range(golden.MEMBER_BYTES // (1 << 22) + 1):
            file.write(bytes(1 << 22))
    for path, read in ((tmp_path / "v4.npz", read_recorded), (tmp_path / "v4.npz", read_dump)):
        assert f"expected at most {golden.MEMBER_BYTES} bytes" in str(refused(path, read))


def test_an_array_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    path = recorded(tmp_path)
    with pytest.warns(UserWarning, match="Duplicate name"), zipfile.ZipFile(path, "a") as archive:
        archive.writestr("kvonly.0.slots.npy", npy((2,), b"ab"))
    assert "expected one array of this name; got another" in str(refused(path, read_recorded))
    assert "expected arrays of different names" in str(refused(path, read_dump))


@pytest.mark.parametrize(("kind", "most"), [("configuration", 1 << 20), ("results", disk.FILE_BYTES)])
def test_json_is_bounded_before_it_is_parsed(kind: str, most: int, tmp_path: Path) -> None:
    make, read = KINDS[kind]
    path = make(tmp_path)
    text = path.read_bytes()
    with path.open("r+b") as file:
        file.seek(most)
        file.write(b" ")
    assert f"expected at most {most} bytes; got more" in str(refused(path, read))
    path.write_bytes(text + b" " * (1000))
    assert refused(path, read) is None


# -- the schema of a configuration ---------------------------------------------------------------------------------


def changed(folder: Path, **changes: object) -> Path:
    """A configuration with fields (``launch.kv.rows`` as ``rows``) changed; ``...``: left out."""
    path = configuration(folder)
    data = json.loads(path.read_text())
    for name, value in changes.items():
        place = data if name in ("name", "copy_gbps", "launch", "more") else data["launch"]["kv"]
        place[name] = value
        if value is ...:
            del place[name]
    path.write_text(json.dumps(data))
    return path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": 3}, "launch[...]: rows: expected a power of two; got 3"),
        ({"rows": 0}, "launch[...].rows: expected `int` >= 1"),
        ({"rows": 1 << 30}, "launch[...].rows: expected `int` <= 1024"),
        ({"rows": 1 << 70}, "launch[...].rows: expected `int` <= 1024"),
        ({"rows": 4.0}, "launch[...].rows: expected `int`; got `float`"),
        ({"rows": 4.5}, "launch[...].rows: expected `int`; got `float`"),
        ({"tokens": True}, "launch[...].tokens: expected `int`; got `bool`"),
        ({"tokens": "4"}, "launch[...].tokens: expected `int`; got `str`"),
        ({"num_warps": 64}, "launch[...].num_warps: expected `int` <= 32"),
        ({"num_warps": ...}, "launch[...]: expected a field `num_warps`; got none"),
        ({"num_cats": 1}, "launch[...]: expected no other fields; got `num_cats`"),
        ({"copy_gbps": -1}, "copy_gbps: expected `float` > 0.0"),
        ({"copy_gbps": None}, None),
        ({"launch": []}, "launch: expected `object`; got `array`"),
        ({"launch": {"kv": [1, 2, 4]}}, "launch[...]: expected `object`; got `array`"),
        ({"name": 3}, "name: expected `str`; got `int`"),
        ({"more": 3}, "expected no other fields; got `more`"),
    ],
)
def test_a_configuration_out_of_range(changes: dict[str, object], message: str | None, tmp_path: Path) -> None:
    path = changed(tmp_path, **changes)
    if message is None:
        assert policy.read_device(path).copy_gbps is None
        return
    with pytest.raises(ValueError, match=f"^{re.escape(f'{path}: {message}')}"):
        policy.read_device(path)


def test_the_committed_configuration_is_in_the_schema() -> None:
    found = policy.read_device(H200)
    assert found.name == "NVIDIA H200" and found == policy.device("NVIDIA H200") and len(found.launch) > 10


def test_messages_that_name_no_place_are_left_alone() -> None:
    with pytest.raises(ValueError, match=r"^here: expected `int`; got `str`$"):
        files.parse(b'"x"', int, "here")
