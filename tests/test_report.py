"""The README's tables from results: numbers, ratios of one run, what is missing, and what a bad file is told."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from preattn.bench import report, run
from preattn.bench.report import TABLES, Ratio, Share, Source, Table, Time
from preattn.bench.results import Header, Row, read, read_all

HEADER = {
    "device": "NVIDIA Abacus",
    "driver": "580.1",
    "torch": "2.13.0",
    "triton": "3.9.0",
    "python": "3.12.0",
    "preattn": "0.1.0",
    "commit": "0123456789abcdef",
    "date": "2026-11-30",
    "vllm": "0.33.0",
    "timer": "cupti",
    "copy_gbps": 4000.0,
    "memset_gbps": 3000.0,
}
OLD, ONE = Source("case/{heads}", "old"), Source("case/{heads}", "one")
TABLE = Table(
    "example",
    (("tokens", "{tokens:,}"), ("heads", "{heads}")),
    ({"tokens": 1024, "heads": 8}, {"tokens": 2048, "heads": 8}),
    (("old", Time(OLD)), ("one", Time(ONE)), ("ratio", Ratio((OLD,), ONE)), ("copy", Share(ONE))),
)
README = (
    "before\n<!-- results:example -->\nold text\n<!-- /results -->\nafter\n<!-- results:runs -->\n<!-- /results -->\n"
)


def row(arm: str, tokens: int, median: float, **changes: object) -> dict[str, Any]:
    return {
        "suite": "s",
        "case": "case/8",
        "arm": arm,
        "tokens": tokens,
        "heads": 8,
        "padded_heads": 64,
        "record": "v41_mxfp8",
        "cache": "cold",
        "median_us": median,
        "p10_us": median,
        "p90_us": median,
        "bytes": 10,
        "share_of_copy": 0.954,
        **changes,
    }


def write(folder: Path, rows: list[dict[str, Any]], name: str = "v4.json", **header: object) -> Path:
    path = folder / "nvidia-abacus" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"header": {**HEADER, **header}, "rows": rows}))
    return path


def filled(folder: Path) -> str:
    return report.fill([README], read_all(folder), [TABLE], {})[0]


def test_a_table(tmp_path: Path) -> None:
    write(tmp_path, [row("old", 1024, 100.0), row("one", 1024, 25.0), row("one", 2048, 5000.04)])
    assert filled(tmp_path) == (
        "before\n"
        "<!-- results:example -->\n"
        "| tokens | heads | old | one | ratio | copy |\n"
        "|---:|---:|---:|---:|---:|---:|\n"
        "| 1,024 | 8 | 100.0 | 25.0 | **4.00×** | 95.4% |\n"
        "| 2,048 | 8 | – | 5,000.0 | – | 95.4% |\n"
        "\n"
        "Median microseconds; NVIDIA Abacus, preattn 0123456789, 2026-11-30.\n"
        "<!-- /results -->\n"
        "after\n"
        "<!-- results:runs -->\n"
        "| run | GPU | driver | torch | Triton | vLLM | preattn | timer | copy, GB/s | memset, GB/s |\n"
        "|---|---|---|---|---|---|---|---|---|---|\n"
        "| v4.json, 2026-11-30 | NVIDIA Abacus | 580.1 | 2.13.0 | 3.9.0 | 0.33.0 | 0123456789 | cupti "
        "| 4,000 | 3,000 |\n"
        "<!-- /results -->\n"
    )


def test_filling_twice_changes_nothing(tmp_path: Path) -> None:
    write(tmp_path, [row("one", 1024, 25.0)])
    once = filled(tmp_path)
    assert report.fill([once], read_all(tmp_path), [TABLE], {}) == [once]


def test_columns_and_lines_without_numbers_are_left_out(tmp_path: Path) -> None:
    write(tmp_path, [row("one", 2048, 25.0), row("one", 1024, 9.0, cache="warm")], vllm=None)
    lines = filled(tmp_path).splitlines()[2:6]
    assert lines[:3] == ["| tokens | heads | one | copy |", "|---:|---:|---:|---:|", "| 2,048 | 8 | 25.0 | 95.4% |"]
    assert "| 3.9.0 | – | 0123456789 |" in filled(tmp_path)


def test_nothing_measured(tmp_path: Path) -> None:
    assert "<!-- results:example -->\n*Not measured yet.*\n<!-- /results -->" in filled(tmp_path)


def test_ratios_are_of_one_run(tmp_path: Path) -> None:
    write(tmp_path, [row("old", 1024, 100.0), row("one", 1024, 25.0)], "a.json", date="2026-01-01")
    write(tmp_path, [row("one", 1024, 20.0)], "b.json", date="2026-02-01")
    assert "| 1,024 | 8 | 20.0 | 95.4% |" in filled(tmp_path)
    write(tmp_path, [row("other", 1024, 20.0)], "c.json", date="2026-03-01")  # nothing for this table
    assert "| 1,024 | 8 | 20.0 | 95.4% |" in filled(tmp_path)


def test_every_device_has_its_table(tmp_path: Path) -> None:
    write(tmp_path, [row("one", 1024, 25.0)])
    other = tmp_path / "nvidia-other"
    other.mkdir()
    (other / "x.json").write_text(
        json.dumps({"header": {**HEADER, "device": "Other"}, "rows": [row("one", 1024, 9.0)]})
    )
    text = filled(tmp_path)
    assert text.index("; NVIDIA Abacus,") < text.index("| 9.0 |") < text.index("; Other,") < text.index("| Other |")


@pytest.mark.parametrize(
    ("text", "got"),
    [
        ("", "none"),
        (README.replace("example", "other"), "other, runs"),
        (README * 2, "example, example, runs, runs"),
        ("<!-- results:example -->\n", "none"),
    ],
)
def test_markers_that_do_not_fit(text: str, got: str) -> None:
    with pytest.raises(ValueError, match=f"^markers: expected results:example, runs; got {got}$"):
        report.fill([text], {}, [TABLE], {})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("", "Input data was truncated"),
        ("[" * 100000, "expected `object`; got `array`"),
        ("[]", "expected `object`; got `array`"),
        ({"header": HEADER}, "expected a field `rows`; got none"),
        ({"header": HEADER, "rows": {}}, "rows: expected `array`; got `object`"),
        ({"header": [], "rows": []}, "header: expected `object`; got `array`"),
        ({"header": {**HEADER, "more": 1}, "rows": []}, "header: expected no other fields; got `more`"),
        ({"header": {**HEADER, "copy_gbps": 0}, "rows": []}, "header.copy_gbps: expected `float` > 0.0"),
        ({"header": {**HEADER, "copy_gbps": float("nan")}, "rows": []}, "JSON is malformed"),
        ({"header": {**HEADER, "date": 5}, "rows": []}, "header.date: expected `str`; got `int`"),
        ({"header": HEADER, "rows": [7]}, "rows[0]: expected `object`; got `int`"),
        (
            {"header": HEADER, "rows": [row("one", 1, 1.0), row("one", 1, -1.0)]},
            "rows[1].median_us: expected `float` > 0.0",
        ),
        ({"header": HEADER, "rows": [row("one", True, 1.0)]}, "rows[0].tokens: expected `int`; got `bool`"),
        ({"header": HEADER, "rows": [row("one", -1, 1.0)]}, "rows[0].tokens: expected `int` >= 0"),
        ({"header": HEADER, "rows": [row("one", 1, True)]}, "rows[0].median_us: expected `float`; got `bool`"),
        (
            {"header": HEADER, "rows": [row("one", 1, 1.0, cache="hot")]},
            "rows[0].cache: expected one of its values; got 'hot'",
        ),
        ({"header": HEADER, "rows": [{"case": "x"}]}, "rows[0]: expected a field `suite`; got none"),
    ],
)
def test_files_that_are_no_results(tmp_path: Path, data: object, message: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    with pytest.raises(ValueError, match=f"^{re.escape(f'{path}: {message}')}"):
        read(path)


def test_large_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, [])
    monkeypatch.setattr("preattn.bench.results.FILE_BYTES", 100)
    with pytest.raises(ValueError, match=r"expected at most 100 bytes; got more$"):
        read(path)


def test_the_schema_is_what_bench_writes() -> None:
    source = Path(run.__file__).read_text()
    for kind in (Header, Row):
        for name in kind.__struct_fields__:
            assert f'"{name}":' in source, name


def test_tables_ask_for_cases_that_are_measured() -> None:
    measured = {
        (case.name, tokens, clock)
        for suite in run.SUITES
        for case in suite.cases
        for tokens in suite.tokens
        for clock in suite.clocks
    }
    for table in TABLES:
        for source in sources(table):
            for line in table.lines:
                assert (source.case.format(**line), line["tokens"], source.cache) in measured, (table.name, line)


def sources(table: Table) -> set[Source]:
    found = set()
    for _, cell in table.columns:
        for value in vars(cell).values():
            found |= set(value) if isinstance(value, tuple) else {value}
    return found


def test_a_ratio_is_to_the_fastest(tmp_path: Path) -> None:
    results = read(write(tmp_path, [row("old", 1024, 90.0), row("older", 1024, 60.0), row("one", 1024, 20.0)]))
    key = {"tokens": 1024, "heads": 8}
    assert Ratio((OLD, Source("case/{heads}", "older")), ONE).text(results, key) == "**3.00×**"
    assert Ratio((Source("case/{heads}", "none"),), ONE).text(results, key) is None


# -- the command ---------------------------------------------------------------------------------------------------


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    readme = tmp_path / "README.md"
    names = ["runs", *report.PICTURES, *(table.name for table in TABLES)]
    empty = "".join(f"<!-- results:{name} -->\n<!-- /results -->\n" for name in names)
    readme.write_text(empty)
    results = tmp_path / "results"
    results.mkdir()
    (line, *_), (_, cell) = TABLES[0].lines, TABLES[0].columns[2]
    assert isinstance(cell, Time)
    write(results, [row(cell.source.arm, line["tokens"], 16.7, case=cell.source.case.format(**line))])
    arguments = ["--results", str(results), "--documents", str(readme)]
    assert report.main([*arguments, "--check"]) == 1
    assert "run python -m preattn.bench.report" in capsys.readouterr().out
    assert readme.read_text() == empty
    assert report.main(arguments) == 0
    assert "16.7" in readme.read_text()
    assert report.main([*arguments, "--check"]) == 0
    readme.write_text("no markers")
    assert report.main(arguments) == 2
    assert "error: markers: expected" in capsys.readouterr().err


def test_the_picture_counts_what_plans_count() -> None:
    text = report.render_bytes()
    copied, free = (int(number.replace(",", "")) for number in re.findall(r"([\d,]+) bytes a token", text))
    assert copied == 32 * 1024 + 64 * 1024 + 1824 and free == 1824
    assert text.count("█") == 2 * text.count("░") > 30


def test_a_sharded_run_with_another_bit_is_no_result(tmp_path: Path) -> None:
    found = json.loads(report.PARALLEL.read_text())
    path = tmp_path / "tensor_parallel.json"
    path.write_text(json.dumps(found))
    assert report.render_tensor_parallel(path).count("\n| ") == len(found["results"])
    assert report.render_tensor_parallel(tmp_path / "none.json") == report.NOTHING
    for rank in found["results"][0]["ranks"]:
        rank["of_bound"] = 0.0  # no difference at all
    path.write_text(json.dumps(found))
    assert "| 0.00 |" in report.render_tensor_parallel(path)
    for name in ("query_equal", "cache_equal", "attention_equal", "within_bound", "output_equals_rank_0"):
        found["results"][1]["ranks"][1][name] = False
        path.write_text(json.dumps(found))
        with pytest.raises(ValueError, match="64 tokens"):
            report.render_tensor_parallel(path)
        found["results"][1]["ranks"][1][name] = True


def test_the_readme_is_what_the_results_give() -> None:
    assert report.main(["--check"]) == 0
