"""``scripts/fetch_sources.py``, on a wheel of our own: from a folder, from a server with range requests and without."""

from __future__ import annotations

import functools
import re
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import release_sources

REQUIREMENT = "engine-of-tests==1.0"
TEXTS = {
    "engine/__init__.py": "",
    "engine/models/a.py": "a = 1\n",
    "engine/models/deep/b.py": "b = 2\n",
    "engine/models/weights.bin": "0" * 1_000_000,
    "engine/kernel.cuh": "// cuda\n",
}
MEMBERS = ["engine/models/", "engine/kernel.cuh", "engine/gone.py", "engine/gone/"]
FETCHED = {"engine/models/a.py", "engine/models/deep/b.py", "engine/kernel.cuh"}

script = release_sources.fetcher()


class Server(SimpleHTTPRequestHandler):
    """A folder's files, whole, and a list of them; parts of files where ``ranges``, and counts their bytes."""

    ranges = True
    in_parts = 0

    def do_GET(self) -> None:
        path = Path(self.translate_path(self.path))
        if not path.is_file():
            super().do_GET()
            return
        data = path.read_bytes()
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if self.ranges and asked:
            first, last = int(asked[1]), min(int(asked[2]), len(data) - 1)
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(data)}")
            data = data[first : last + 1]
            type(self).in_parts += len(data)
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None: ...


@contextmanager
def serving(folder: Path, *, ranges: bool) -> Iterator[tuple[str, type[Server]]]:
    """A server of this folder on this machine, and its address."""
    handler = type("Handler", (Server,), {"ranges": ranges})
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(handler, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/", handler
        server.shutdown()


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with one wheel, and pip's settings such that it knows of no other."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    about = "engine_of_tests-1.0.dist-info"
    metadata = {
        f"{about}/METADATA": "Metadata-Version: 2.1\nName: engine-of-tests\nVersion: 1.0\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{about}/RECORD": "",
    }
    with zipfile.ZipFile(folder / "engine_of_tests-1.0-py3-none-any.whl", "w") as wheel:
        wheel.mkdir("engine/models")
        for name, text in {**TEXTS, **metadata}.items():
            wheel.writestr(name, text)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    return folder


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} - {".members"}


@pytest.mark.parametrize("source", ["folder", "server with ranges", "server without ranges"])
def test_members_and_nothing_else(source: str, wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "sources"
    with serving(wheels, ranges=source == "server with ranges") as (address, handler):
        if source != "folder":
            monkeypatch.setenv("PIP_FIND_LINKS", address)
        monkeypatch.setattr(script, "READ_AHEAD", 1 << 10)
        assert script.fetch(REQUIREMENT, target, MEMBERS) == target
        assert (handler.in_parts > 0) == (source == "server with ranges")
        assert handler.in_parts < 20_000
    assert files(target) == FETCHED
    assert all((target / name).read_text() == TEXTS[name] for name in FETCHED)


def test_what_was_asked_for_is_not_asked_for_again(
    wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "sources"
    script.fetch(REQUIREMENT, target, MEMBERS[:2])
    monkeypatch.setattr(script, "_pip", lambda *_: pytest.fail("pip was asked"))
    script.fetch(REQUIREMENT, target, MEMBERS[:2])
    with pytest.raises(pytest.fail.Exception, match="pip was asked"):
        script.fetch(REQUIREMENT, target, MEMBERS)


def test_a_package_that_is_not_to_be_had_is_named(wheels: Path, tmp_path: Path) -> None:
    with pytest.raises(script.Unavailable, match=r"engine-of-tests==2\.0"):
        script.fetch("engine-of-tests==2.0", tmp_path / "sources", MEMBERS)
    assert not (tmp_path / "sources").exists()


def test_a_server_that_does_not_answer_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "_locate", lambda requirement: "http://127.0.0.1:9/engine.whl")
    with pytest.raises(script.Unavailable, match=rf"{REQUIREMENT}: .*refused"):
        script.fetch(REQUIREMENT, tmp_path / "sources", MEMBERS)


def test_a_test_that_needs_it_skips_with_the_reason(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(script, "_locate", lambda requirement: (asked.append(requirement), script._pip("x"))[1])
    for _ in range(2):
        with pytest.raises(pytest.skip.Exception, match=r"sources of engine-of-tests 2\.0 cannot be had: pip"):
            release_sources.sources("engine-of-tests", "2.0", ["engine/models/"])
    assert asked == ["engine-of-tests==2.0"]


def test_the_command_names_what_the_wheel_lacks(
    wheels: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert script.main([REQUIREMENT, str(tmp_path / "sources"), *MEMBERS[:2]]) == 0
    assert script.main([REQUIREMENT, str(tmp_path / "sources"), *MEMBERS]) == 1
    said = capsys.readouterr().err.splitlines()
    assert said == [f"{REQUIREMENT}: no engine/gone.py in the wheel", f"{REQUIREMENT}: no engine/gone/ in the wheel"]
    assert script.main(["engine-of-tests==2.0", str(tmp_path / "none"), *MEMBERS]) == 1
    assert "engine-of-tests==2.0" in capsys.readouterr().err
    assert script.main([REQUIREMENT]) == 2
