"""Results on disk: ``results/<device>/*.json`` of the benchmark, and a layer sharded over GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from .. import files

Clock = Literal["cold", "warm", "host"]
FILE_BYTES = 64 << 20


class Header(files.Schema, frozen=True):
    """Where and with what a run was made; ``vllm`` is the version of the peer, None where there was none."""

    device: str
    driver: str
    torch: str
    triton: str
    python: str
    preattn: str
    commit: str
    date: str
    vllm: str | None
    timer: str
    copy_gbps: files.Positive
    memset_gbps: files.Positive


class Row(files.Schema, frozen=True):
    """One arm of one case: microseconds of a call, and the bytes it has to move, each counted once.

    ``padded_heads`` is None where the case does not ask for padding.
    """

    suite: str
    case: str
    arm: str
    tokens: files.Count
    heads: files.Count
    padded_heads: files.Count | None
    record: str
    cache: Clock
    median_us: files.Positive
    p10_us: files.Positive
    p90_us: files.Positive
    bytes: files.Count
    share_of_copy: files.Positive


@dataclass(frozen=True)
class Results:
    """One file of results."""

    path: Path
    header: Header
    rows: tuple[Row, ...]

    def find(self, case: str, arm: str, tokens: int, cache: Clock) -> Row | None:
        """The row of an arm, None where it was not measured. Sweeps time our arm again, beside other ones."""
        for row in self.rows:
            if not row.suite.startswith("sweep") and (row.case, row.arm, row.tokens, row.cache) == (
                case,
                arm,
                tokens,
                cache,
            ):
                return row
        return None


class _File(files.Schema, frozen=True):
    header: Header
    rows: tuple[Row, ...]


def read(path: Path) -> Results:
    """Read and check one file.

    Raises:
        ValueError: it is not JSON, or not in the schema of :class:`Header` and :class:`Row`.
    """
    found = files.read(path, _File, most=FILE_BYTES)
    return Results(path, found.header, found.rows)


def read_all(folder: Path) -> dict[str, list[Results]]:
    """Every file of ``<folder>/<device>/*.json``, by device folder, the newest first."""
    devices: dict[str, list[Results]] = {}
    for path in sorted(folder.glob("*/*.json")):
        devices.setdefault(path.parent.name, []).append(read(path))
    return {
        device: sorted(results, key=lambda results: results.header.date, reverse=True)
        for device, results in devices.items()
    }


class Times(files.Schema, frozen=True):
    """Microseconds of a replay."""

    median_us: files.Positive
    p10_us: files.Positive
    p90_us: files.Positive


class Rank(files.Schema, frozen=True):
    """A rank of a step beside one rank with all heads; ``of_bound``: the output's largest difference, of its bound."""

    rank: files.Count
    prologue_us: Times
    query_equal: bool
    cache_equal: bool
    attention_equal: bool
    within_bound: bool
    of_bound: files.NotNegative
    output_equals_rank_0: bool


class Step(files.Schema, frozen=True):
    """A step on every rank; attention was compared for ``attended`` of its tokens."""

    tokens: files.Count
    attended: files.Count
    alone_us: Times
    ranks: tuple[Rank, ...]


class Parallel(files.Schema, frozen=True):
    """A run of ``bench.tensor_parallel``."""

    header: dict[str, Any]
    results: tuple[Step, ...]


class Replaced(files.Schema, frozen=True):
    """A call of transformers' and ours on the same input.

    ``difference`` and ``rerun`` are the largest of their results and of the library's own two, of the largest
    magnitude; ``us`` are microseconds by arm, none where nothing was timed; ``tokens_equal``: greedy decoding's.
    """

    model: str
    what: str
    tokens: files.Count
    difference: files.NotNegative
    rerun: files.NotNegative
    us: dict[str, files.Positive]
    tokens_equal: bool | None = None


class Transformers(files.Schema, frozen=True):
    """A run of ``bench.transformers``."""

    header: dict[str, Any]
    rows: tuple[Replaced, ...]


def read_transformers(path: Path) -> Transformers:
    """Read and check what ``bench.transformers`` wrote.

    Raises:
        ValueError: it is not JSON, or not in the schema of :class:`Transformers`.
    """
    return files.read(path, Transformers, most=FILE_BYTES)


def read_parallel(path: Path) -> Parallel:
    """Read and check what ``bench.tensor_parallel`` wrote.

    Raises:
        ValueError: it is not JSON, or not in the schema of :class:`Parallel`.
    """
    return files.read(path, Parallel, most=FILE_BYTES)


class V4Step(files.Schema, frozen=True):
    """A step of a layer with the plug-in and without.

    Of ``elements`` of the query that were compared, ``differing`` differ; ``tail_zero``: its heads past the rank's are
    zeros; ``us`` are microseconds of the GPU by arm and ``host_us`` those of the host, none where nothing was timed;
    ``replay_equal``: a captured step's, replayed on other inputs, where there was one.
    """

    model: str
    weight: str
    heads: files.Count
    padded_heads: files.Count
    tokens: files.Count
    projection_equal: bool
    tail_zero: bool
    cache_equal: bool
    differing: files.Count
    elements: files.Count
    us: dict[str, files.Positive]
    host_us: dict[str, files.Positive]
    replay_equal: bool | None = None


class V4Layer(files.Schema, frozen=True):
    """A run of ``bench.v4_layer``; ``clock`` of the header says what ``us`` was taken with."""

    header: dict[str, Any]
    rows: tuple[V4Step, ...]


def read_v4_layer(path: Path) -> V4Layer:
    """Read and check what ``bench.v4_layer`` wrote.

    Raises:
        ValueError: it is not JSON, or not in the schema of :class:`V4Layer`.
    """
    return files.read(path, V4Layer, most=FILE_BYTES)
