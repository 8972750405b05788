#!/usr/bin/env python3
"""Fetch some source files of a published package, without the rest of it: what the contract tests read.

    scripts/fetch_sources.py vllm==0.33.0 .cache/sources/vllm-0.33.0 vllm/plugins/__init__.py vllm/models/deepseek_v32/

pip says where the package's wheel is, from its own configuration; of a wheel on a server that takes range requests
only the table of contents and the named members are read. Other wheels pip downloads. Members are paths inside the
wheel; one that ends in ``/`` is every Python file below it. What was asked for before is not asked for again. Exit
status 1: the package cannot be had, or lacks one of the members.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import unquote, urlsplit
from urllib.response import addinfourl

TIMEOUT = 60
READ_AHEAD = 1 << 18
"""Bytes of a range request at the least: a member's header and its data come in one, and a folder's files in few."""


class Unavailable(RuntimeError):
    """The package cannot be had; the message says why."""


class _NoRanges(Exception):
    """The server sends the whole file or nothing."""


class RangeFile(io.RawIOBase):
    """A file on a server, read by range requests."""

    def __init__(self, url: str) -> None:
        self._url, self._at, self._start, self._data = url, 0, 0, b""
        with self._request(0, 0) as answer:
            self.size = int(answer.headers["Content-Range"].rpartition("/")[2])

    def _request(self, first: int, last: int) -> addinfourl:
        request = urllib.request.Request(self._url, headers={"Range": f"bytes={first}-{last}"})
        answer: addinfourl = urllib.request.urlopen(request, timeout=TIMEOUT)
        if answer.status != 206:
            answer.close()
            raise _NoRanges(f"status {answer.status} to a range request")
        return answer

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self.size}[whence]
        return self._at

    def read(self, size: int = -1) -> bytes:
        end = self.size if size < 0 else min(self.size, self._at + size)
        if self._at >= end:
            return b""
        if not (self._start <= self._at and end <= self._start + len(self._data)):
            last = min(self.size, max(end, self._at + READ_AHEAD)) - 1
            with self._request(self._at, last) as answer:
                self._start, self._data = self._at, answer.read()
        found = self._data[self._at - self._start : end - self._start]
        self._at = end
        return found


def fetch(requirement: str, folder: Path, members: Iterable[str]) -> Path:
    """Have members of a package's wheel in a folder.

    Args:
        requirement: for example ``vllm==0.33.0``.
        folder: where the members go, at their paths inside the wheel.
        members: paths inside the wheel; one that ends in ``/`` is every Python file below it.

    Returns:
        The folder. What the wheel lacks is not in it: that a release moved a file is for the reader to say.

    Raises:
        Unavailable: pip does not find the package, or the network is down.
    """
    wanted = list(members)
    marker = folder / ".members"
    known = set(marker.read_text().splitlines()) if marker.is_file() else set()
    if missing := [member for member in wanted if member not in known]:
        try:
            _extract(_locate(requirement), requirement, folder, missing)
        except (OSError, zipfile.BadZipFile) as error:
            raise Unavailable(f"{requirement}: {error}") from error
        _write(marker, "".join(f"{member}\n" for member in sorted(known | set(missing))).encode())
    return folder


def _locate(requirement: str) -> str:
    """The address of the wheel that pip would install."""
    report = _pip("install", "--dry-run", "--no-deps", "--ignore-installed", "--report", "-", requirement)
    return str(json.loads(report)["install"][0]["download_info"]["url"])


def _pip(*arguments: str) -> str:
    patience = ("--retries", "1", "--timeout", "20")
    command = [sys.executable, "-m", "pip", "--quiet", *arguments, "--only-binary=:all:", *patience]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no output"]
        raise Unavailable(f"pip, asked for {arguments[-1]}: {lines[-1]}")
    return done.stdout


def _extract(url: str, requirement: str, folder: Path, members: list[str]) -> None:
    parts = urlsplit(url)
    if parts.scheme == "file":
        _unpack(Path(unquote(parts.path)), folder, members)
        return
    try:
        _unpack(RangeFile(url), folder, members)
    except (_NoRanges, urllib.error.HTTPError):
        with tempfile.TemporaryDirectory() as scratch:
            _pip("download", "--no-deps", "--dest", scratch, requirement)
            _unpack(next(Path(scratch).glob("*.whl")), folder, members)


def _unpack(wheel: Path | RangeFile, folder: Path, members: list[str]) -> None:
    with zipfile.ZipFile(wheel) as archive:
        folders = tuple(member for member in members if member.endswith("/"))
        for name in archive.namelist():
            below = name.endswith(".py") and name.startswith(folders)
            if below or (name in members and name not in folders):
                _write(folder / name, archive.read(name))


def _write(target: Path, data: bytes) -> None:
    """In one step: another process may be fetching, or reading, the same file."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=target.parent, delete=False) as scratch:
        scratch.write(data)
    os.replace(scratch.name, target)


def main(arguments: list[str]) -> int:
    """``REQUIREMENT FOLDER MEMBER...``"""
    if len(arguments) < 3:
        print(__doc__, file=sys.stderr)
        return 2
    requirement, folder, *members = arguments
    try:
        fetch(requirement, Path(folder), members)
    except Unavailable as reason:
        print(reason, file=sys.stderr)
        return 1
    gone = [member for member in members if not (Path(folder) / member).exists()]
    for member in gone:
        print(f"{requirement}: no {member} in the wheel", file=sys.stderr)
    return int(bool(gone))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
