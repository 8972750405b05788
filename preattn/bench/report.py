"""The tables of the README and the documents, made from ``results``: no number in them is typed by hand.

``python -m preattn.bench.report`` writes them between ``<!-- results:NAME -->`` and ``<!-- /results -->``; with
``--check`` it writes nothing, and fails where they are not what the data gives. A table takes all its numbers
from one file, the newest that has any of them, so that every ratio is of one run.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from .. import policy
from ..geometry import geometry
from . import engine_tables, transformers, v4_layer
from .results import Clock, Header, Results, Row, read_all, read_parallel, read_transformers, read_v4_layer

NOTHING = "*Not measured yet.*"
ROOT = Path(__file__).parents[2]
DOCUMENTS = (ROOT / "README.md", ROOT / "docs" / "engine.md", ROOT / "docs" / "integrations.md")


# -- tables --------------------------------------------------------------------------------------------------

Key = Mapping[str, Any]
"""What distinguishes a line of a table: ``tokens``, and whatever the case's name and the key columns need."""


@dataclass(frozen=True)
class Source:
    """Which row of a file: the case's name with fields of the line's key in braces, and the arm."""

    case: str
    arm: str
    cache: Clock = "cold"

    def find(self, results: Results, key: Key) -> Row | None:
        """Look it up."""
        return results.find(self.case.format(**key), self.arm, key["tokens"], self.cache)


class Cell(Protocol):
    """What a column shows."""

    def text(self, results: Results, key: Key) -> str | None:
        """The text for a line, None where a row is missing."""
        ...


@dataclass(frozen=True)
class Time:
    """Median microseconds."""

    source: Source

    def text(self, results: Results, key: Key) -> str | None:
        """See :class:`Cell`."""
        row = self.source.find(results, key)
        return None if row is None else f"{row.median_us:,.1f}"


@dataclass(frozen=True)
class Ratio:
    """How many times ``fast`` fits into the fastest of ``slow``."""

    slow: tuple[Source, ...]
    fast: Source

    def text(self, results: Results, key: Key) -> str | None:
        """See :class:`Cell`."""
        slow = [row.median_us for source in self.slow if (row := source.find(results, key))]
        fast = self.fast.find(results, key)
        return None if not slow or fast is None else f"**{min(slow) / fast.median_us:.2f}×**"


@dataclass(frozen=True)
class Share:
    """Share of the copy rate measured in the same run."""

    source: Source

    def text(self, results: Results, key: Key) -> str | None:
        """See :class:`Cell`."""
        row = self.source.find(results, key)
        return None if row is None else f"{row.share_of_copy:.1%}"


@dataclass(frozen=True)
class Table:
    """One table: a marker's name, the key columns, the lines, the measured columns.

    A key column is a title and a format of the line's key.
    """

    name: str
    keys: tuple[tuple[str, str], ...]
    lines: tuple[Key, ...]
    columns: tuple[tuple[str, Cell], ...]

    def cells(self, results: Results) -> list[list[str | None]]:
        """The measured cells, line by line."""
        return [[cell.text(results, line) for _, cell in self.columns] for line in self.lines]


Columns = tuple[tuple[str, Cell], ...]


def _against(case: str, arms: Mapping[str, str], clock: Clock = "cold", ours: str = "one launch") -> Columns:
    """Times of arms (by title) and of ours, how many times ours fits into the fastest, our share of the copy rate.

    The share is left out where it says nothing: small steps in a warm L2, and host times.
    """
    others = {title: Source(case, arm, clock) for title, arm in arms.items()}
    our = Source(case, "preattn", clock)
    times = {title: Time(source) for title, source in (others | {ours: our}).items()}
    engines = tuple(source for source in others.values() if source.arm in ("vllm", "vllm_pdl")) or tuple(
        others.values()
    )
    columns: Columns = (*times.items(), (f"{next(iter(arms))} / {ours}", Ratio(engines, our)))
    return (*columns, ("of copy rate", Share(our))) if clock == "cold" else columns


def _copy_free(case: str, arms: Mapping[str, str], clock: Clock = "cold") -> Columns:
    """Times of projections alone and with what pads their result, of ours, and ours in plain projections."""
    others = {title: Source(case, arm, clock) for title, arm in arms.items()}
    ours = Source(case, "preattn", clock)
    plain, *padded = others.values()
    columns: Columns = tuple((title, Time(source)) for title, source in others.items())
    columns = (*columns, ("copy-free", Time(ours)), ("copy-free / plain", Ratio((ours,), plain)))
    return (*columns, ("padded / copy-free", Ratio(tuple(padded[:1]), ours)))


def _lines(tokens: Iterable[int], heads: Iterable[tuple[int, int]] = ((0, 0),), **more: str) -> tuple[Key, ...]:
    return tuple(
        {"tokens": count, "heads": live, "padded": padded, **more} for live, padded in heads for count in tokens
    )


_TOKENS = ("tokens", "{tokens:,}")
_HEADS = ("heads", "{heads} of {padded}")
_ALL_HEADS = ("heads", "{heads}")
_SMALL = (1, 8, 64, 256)

_PADDED = {"vLLM": "vllm", "two launches": "two_launches"}
_INTERLEAVED = "v4/chunk_interleaved/{heads}of{padded}/v41_mxfp8"
_ROTATED = "v4/head_major/{heads}of{padded}/v41_mxfp8/rope"
_IN_PLACE = Source(_ROTATED + "/in_place", "preattn")
_NORMED = "v4/head_major/{heads}of{padded}/v4_fp8/norm/rope"
_V4_STEPS = (512, 1024, 2048, 4096, 8192, 16384)
_SHARDS = ((8, 64), (16, 64), (20, 64), (24, 64), (40, 64), (48, 64), (64, 128))

_PDL = {"vLLM": "vllm", "vLLM, PDL on": "vllm_pdl"}
_QUERY = "dsa_query/packed/{heads}of{heads}/32_half_split/in_place"
_FP8_QUERY = "dsa_query/packed/{heads}of{heads}/32_half_split/transposed/fp8_query"
_ABSORBED = "dsa_absorb/{heads}of{heads}/128/fp8_query"
_NORMS = "dsa_norm_rope/2048/dsa_fp8/index_fp8_half_split"
_BF16_NORMS = "dsa_norm_rope/1536/bf16/index_fp8_half_split"
_PROJECT = "v4_project/kernel/{form}"
_PROJECT_ARMS = {
    "plain projection": "plain_projection",
    "and one launch of ours": "then_one_launch",
    "and vLLM's op": "vllm",
}
_PROJECT_LINES = (
    ("chunk_interleaved/32of64/v41_mxfp8/bf16/rank1280", "V4.1, interleaved"),
    ("chunk_interleaved/32of64/v41_mxfp8/bf16/rank1024", "the same, rank 1,024"),
    ("head_major/32of64/v41_mxfp8/bf16/rope/rank1024", "V4.1, head-major, rank 1,024"),
    ("head_major/16of64/v4_fp8/bf16/norm/rope/rank1024", "V4, 16 of 64, norm"),
)
_FP8_LINES = (
    ("head_major/32of64/v41_mxfp8/e4m3/rope/grouped/rank1024", "32 of 64, RoPE"),
    ("head_major/64of64/v4_fp8/e4m3/norm/rope/grouped/rank1024", "64 of 64, norm and RoPE"),
)
_FP8_PROJECT_ARMS = {"plain projection": "plain_projection", "and one launch of ours": "then_one_launch"}
_UNORDERED = {"plain projection": "plain_projection", "and one launch of ours*": "then_one_launch_unordered"}
_BF16_INSTEAD = {"plain bf16 projection": "plain_projection", "and one launch of ours": "then_one_launch_bf16"}
_CAT = Source(_QUERY, "vllm_cat")

TABLES = (
    Table(
        "upstream",
        (_TOKENS,),
        _lines(_V4_STEPS, [(32, 64)]),
        (
            *_against(_INTERLEAVED, _PADDED),
            ("vLLM, warm L2", Time(Source(_INTERLEAVED, "vllm", "warm"))),
            ("one launch, warm L2", Time(Source(_INTERLEAVED, "preattn", "warm"))),
        ),
    ),
    Table("shards", (_HEADS,), _lines([16384], _SHARDS), _against(_INTERLEAVED, _PADDED)),
    Table("graph", (_TOKENS,), _lines(_SMALL, [(32, 64)]), _against(_INTERLEAVED, _PADDED, "warm")),
    Table("graph_normed", (_TOKENS,), _lines(_SMALL, [(16, 64)]), _against(_NORMED, _PADDED, "warm")),
    Table(
        "rotated",
        (_TOKENS,),
        _lines((1024, 4096, 16384), [(32, 64)]),
        (
            *_against(_ROTATED, _PADDED),
            ("in place", Time(_IN_PLACE)),
            ("vLLM / in place", Ratio((Source(_ROTATED, "vllm"),), _IN_PLACE)),
        ),
    ),
    Table("normed", (_HEADS, _TOKENS), _lines((1024, 4096, 16384), [(16, 64), (64, 128)]), _against(_NORMED, _PADDED)),
    Table(
        "host",
        (("prologue", "{what}"),),
        (
            *_lines([16], case=_INTERLEAVED.format(heads=32, padded=64), what="V4.1, 32 of 64 heads, interleaved"),
            *_lines([16], case=_NORMED.format(heads=16, padded=64), what="V4, 16 of 64 heads, norm and RoPE"),
        ),
        _against("{case}", _PADDED, "host"),
    ),
    Table(
        "project",
        (("query", "{what}"), _TOKENS),
        tuple(line for form, what in _PROJECT_LINES for line in _lines((512, 1024, 4096, 16384), form=form, what=what)),
        _copy_free(_PROJECT, _PROJECT_ARMS),
    ),
    Table(
        "project_graph",
        (("query", "{what}"), _TOKENS),
        tuple(line for form, what in _PROJECT_LINES for line in _lines(_SMALL, form=form, what=what)),
        _copy_free(_PROJECT, _PROJECT_ARMS, "warm"),
    ),
    Table(
        "project_fp8",
        (("query", "{what}"), _TOKENS),
        tuple(
            line for form, what in _FP8_LINES for line in _lines((8, 64, 256, 1024, 8192, 16384), form=form, what=what)
        ),
        _copy_free(_PROJECT, _FP8_PROJECT_ARMS),
    ),
    Table(
        "project_fp8_interleaved",
        (_TOKENS,),
        _lines((8, 64, 256, 1024, 8192, 16384), form="chunk_interleaved/32of64/v41_mxfp8/e4m3/grouped/rank1024"),
        _copy_free(_PROJECT, _UNORDERED),
    ),
    Table(
        "project_mx",
        (_TOKENS,),
        _lines((1, 8, 64, 1024), form="head_major/32of64/v41_mxfp8/mx/rope/rank1024"),
        _copy_free(_PROJECT, _BF16_INSTEAD),
    ),
    Table(
        "dsa_query",
        (_ALL_HEADS, _TOKENS),
        _lines((64, 256, 1024, 4096, 16384, 65536), [(16, 16), (128, 128)]),
        (
            *_against(_QUERY, _PDL),
            ("vLLM and its concatenation", Time(_CAT)),
            ("that / one launch", Ratio((_CAT,), Source(_QUERY, "preattn"))),
        ),
    ),
    Table(
        "dsa_fp8_query",
        (_ALL_HEADS, _TOKENS),
        _lines((1024, 16384), [(16, 16), (128, 128)]),
        _against(_FP8_QUERY, _PDL),
    ),
    Table(
        "dsa_absorb",
        (_ALL_HEADS, _TOKENS),
        _lines((64, 256, 1024, 4096, 16384), [(16, 16), (64, 64), (128, 128)]),
        _against(_ABSORBED, {"bmm and pack": "bmm_then_pack"}, "cold", "absorbed")[:-1],
    ),
    Table(
        "dsa_norms",
        (("case", "{what}"), _TOKENS),
        (
            *_lines((64, 1024, 16384), case=_NORMS, what="rank 2048, 656-byte record"),
            *_lines((64, 1024, 16384), case=_BF16_NORMS, what="rank 1536, bf16 record"),
        ),
        _against("{case}", _PDL),
    ),
    Table("dsa_graph", (_ALL_HEADS, _TOKENS), _lines(_SMALL, [(16, 16), (128, 128)]), _against(_QUERY, _PDL, "warm")),
    Table("dsa_norms_graph", (_TOKENS,), _lines(_SMALL), _against(_NORMS, _PDL, "warm")),
    Table(
        "dsa_host",
        (("op", "{what}"),),
        (
            *_lines([16], case=_QUERY.format(heads=16), what="query, 16 heads"),
            *_lines([16], case=_NORMS, what="norms and inserts"),
        ),
        _against("{case}", _PDL, "host"),
    ),
)
"""Every table of the README. A new one is a line here and a pair of markers there."""


def render(table: Table, devices: Mapping[str, Sequence[Results]]) -> str:
    """The table as Markdown, once for each device that has numbers for it."""
    parts = []
    for results in devices.values():
        for run in results:
            cells = table.cells(run)
            if any(cell is not None for line in cells for cell in line):
                parts.append(_markdown(table, cells, run.header))
                break
    return "\n\n".join(parts) or NOTHING


def _markdown(table: Table, cells: list[list[str | None]], header: Header) -> str:
    shown = [any(line[column] is not None for line in cells) for column in range(len(table.columns))]
    titles = [title for title, _ in table.keys]
    titles += [title for (title, _), show in zip(table.columns, shown, strict=True) if show]
    lines = ["| " + " | ".join(titles) + " |", "|" + "---:|" * len(titles)]
    for key, values in zip(table.lines, cells, strict=True):
        if all(value is None for value in values):
            continue
        keyed = [form.format(**key) for _, form in table.keys]
        keyed += [value or "–" for value, show in zip(values, shown, strict=True) if show]
        lines.append("| " + " | ".join(keyed) + " |")
    caption = f"Median microseconds; {header.device}, preattn {header.commit[:10]}, {header.date}."
    return "\n".join(lines) + "\n\n" + caption


def render_runs(devices: Mapping[str, Sequence[Results]]) -> str:
    """What every run was made with, as Markdown."""
    titles = ("run", "GPU", "driver", "torch", "Triton", "vLLM", "preattn", "timer", "copy, GB/s", "memset, GB/s")
    lines = ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]
    for run in (run for runs in devices.values() for run in runs):
        head = run.header
        cells = (
            f"{run.path.name}, {head.date}",
            head.device,
            head.driver,
            head.torch,
            head.triton,
            head.vllm or "–",
            head.commit[:10],
            head.timer,
            f"{head.copy_gbps:,.0f}",
            f"{head.memset_gbps:,.0f}",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) if len(lines) > 2 else NOTHING


def render_bytes() -> str:
    """What a V4.1 step moves behind its projection, before and without the copy, as a picture of characters."""
    shard = geometry("deepseek-v4.1-flash").shard(2)
    copied, free = (policy.choose(shard, tokens=8192, workspace=workspace) for workspace in (False, True))
    width = 64 / copied.total_bytes
    lines = []
    for title, plan in (("an engine's op, or a copy of ours", copied), ("the projection writes its place", free)):
        parts = {
            "query read": plan.bytes["query read"],
            "padded query written": plan.bytes["query written"],
            "KV": plan.total_bytes - plan.bytes["query read"] - plan.bytes["query written"],
        }
        bar = "".join(mark * round(parts[part] * width) for mark, part in zip("░█", parts, strict=False))
        lines.append(f"{title}: {plan.total_bytes // plan.tokens:,} bytes a token")
        lines.append("  " + bar + "▏")
        lines.append("  " + ", ".join(f"{part} {count // plan.tokens:,}" for part, count in parts.items()))
    return "```\n" + "\n".join(lines) + "\n```"


PARALLEL = ROOT / "results" / "tensor_parallel.json"


def render_tensor_parallel(path: Path = PARALLEL) -> str:
    """A layer sharded over GPUs beside one rank with all its heads, as ``bench.tensor_parallel`` measured it.

    Raises:
        ValueError: the file is not in the schema, or a comparison in it failed.
    """
    if not path.exists():
        return NOTHING
    found = read_parallel(path)
    lines = ["| tokens | one rank | slowest of the ranks | largest difference of the output, of its bound |"]
    lines.append("|---:|---:|---:|---:|")
    for step in found.results:
        for rank in step.ranks:
            equal = rank.query_equal and rank.cache_equal and rank.attention_equal and rank.output_equals_rank_0
            if not equal or not rank.within_bound:
                raise ValueError(f"{path}: expected equal bits on every rank; {step.tokens} tokens, {rank} differs")
        slowest = max([rank.prologue_us.median_us for rank in step.ranks])
        bound = max([rank.of_bound for rank in step.ranks])
        lines.append(f"| {step.tokens:,} | {step.alone_us.median_us:,.1f} | {slowest:,.1f} | {bound:.2f} |")
    head = found.header
    caption = (
        f"Median microseconds of projection and prologue; {head['model']}, {head['heads']} heads over "
        f"{head['world_size']} x {head['device']}, {head['backend']}, preattn {head['commit'][:10]}, {head['date']}."
    )
    return "\n".join(lines) + "\n\n" + caption


ENGINE = ROOT / "results" / "engine.json"


def render_engine(path: Path = ENGINE) -> str:
    """The engine with and without the plug-in, as ``bench.engine`` measured it."""
    return engine_tables.overview(json.loads(path.read_text())["runs"]) if path.exists() else NOTHING


def render_engine_tables(path: Path = ENGINE) -> str:
    """All that ``bench.engine`` measured: times, where the GPU's went, shadow mode."""
    return engine_tables.report(json.loads(path.read_text())["runs"]) if path.exists() else NOTHING


TRANSFORMERS = ROOT / "results" / "transformers.json"


def render_transformers(path: Path = TRANSFORMERS) -> str:
    """Hugging Face's layers with and without the patch, as ``bench.transformers`` measured them."""
    if not path.exists():
        return NOTHING
    found = read_transformers(path)
    caption = _caption("the library's", found.header, f"transformers {found.header['transformers']}")
    return f"{transformers.table(found.rows)}\n\n{caption}"


V4_LAYER = ROOT / "results" / "v4_layer.json"


def render_v4_layer(path: Path = V4_LAYER) -> str:
    """vLLM's V4 layers from latents to query and cache, as ``bench.v4_layer`` measured them."""
    if not path.exists():
        return NOTHING
    found = read_v4_layer(path)
    caption = _caption("the engine's", found.header, f"vLLM {found.header['vllm']}, {found.header['clock']}")
    return f"{v4_layer.table(found.rows)}\n\n{caption}"


def _caption(theirs: str, head: Mapping[str, Any], more: str) -> str:
    """Under a table whose cells are ``theirs → ours``."""
    where = f"{head['device']}, driver {head['driver']}, torch {head['torch']}, Triton {head['triton']}"
    return f"Median microseconds, {theirs} → ours; {where}, {more}, preattn {head['commit'][:10]}, {head['date']}."


_MARKED = re.compile(r"(<!-- results:(?P<name>[\w-]+) -->\n).*?(<!-- /results -->)", re.DOTALL)


PICTURES: Mapping[str, Callable[[], str]] = {
    "bytes": render_bytes,
    "tensor_parallel": render_tensor_parallel,
    "engine": render_engine,
    "engine_tables": render_engine_tables,
    "transformers": render_transformers,
    "v4_layer": render_v4_layer,
}
"""What is not a table of arms: drawn of the plans, or of runs of several GPUs and of engines."""


def fill(
    texts: Sequence[str],
    devices: Mapping[str, Sequence[Results]],
    tables: Sequence[Table] = TABLES,
    pictures: Mapping[str, Callable[[], str]] = PICTURES,
) -> list[str]:
    """The texts with every marked place filled: the tables', the pictures' and ``runs``.

    Raises:
        ValueError: a marker names no table, or a table has not one marker in all texts together.
    """
    known = {table.name: render(table, devices) for table in tables} | {"runs": render_runs(devices)}
    known |= {name: draw() for name, draw in pictures.items()}
    found = [match["name"] for text in texts for match in _MARKED.finditer(text)]
    if sorted(found) != sorted(known):
        raise ValueError(
            f"markers: expected results:{', '.join(sorted(known))}; got {', '.join(sorted(found)) or 'none'}"
        )
    return [_MARKED.sub(lambda match: f"{match[1]}{known[match['name']]}\n{match[3]}", text) for text in texts]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m preattn.bench.report", description="Fill the documents' tables.")
    parser.add_argument("--results", type=Path, default=ROOT / "results", metavar="FOLDER")
    parser.add_argument("--documents", type=Path, nargs="+", default=DOCUMENTS, metavar="FILE")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the tables are out of date")
    options = parser.parse_args(arguments)
    try:
        texts = [path.read_text() for path in options.documents]
        filled = fill(texts, read_all(options.results))
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    stale = [path for path, old, new in zip(options.documents, texts, filled, strict=True) if old != new]
    if options.check:
        for path in stale:
            print(f"{path}: not what {options.results} gives: run python -m preattn.bench.report")
        return int(bool(stale))
    for path, text in zip(options.documents, filled, strict=True):
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
