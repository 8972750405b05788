"""What the README and the documents say is so: the example runs, commands print what is shown, links lead somewhere."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from typer.testing import CliRunner

from preattn import cli, formats

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
FORMATS = (ROOT / "docs" / "formats.md").read_text()
DOCUMENTS = (
    "README.md",
    "CONTRIBUTING.md",
    "docs/formats.md",
    "docs/integrations.md",
    "docs/engine.md",
    "docs/debugging.md",
    "docs/mutants.md",
    "docs/nightly.md",
    "docs/sanitize.md",
)


def blocks(language: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    return [text for name, text in found if name == language]


def test_the_example_runs() -> None:
    example, _ = blocks("python")
    assert len(ast.parse(example).body) - 2 <= 10, "imports aside"
    check = (
        "\nassert out.shape == (5, 64, 512)"
        "\nassert torch.equal(out.view(5, 32, 64, 16)[:, :, :32], query.view(5, 32, 32, 16))"
        "\nassert not out.view(5, 32, 64, 16)[:, :, 32:].view(torch.int16).any()"
        "\nassert cache.view(-1, 528).any(-1).nonzero().flatten().tolist() == [7, 64, 65, 66]"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", example + check], check=True, env=env)


def test_the_copy_free_example_runs() -> None:
    _, example = blocks("python")
    before = """
import dataclasses, torch
from preattn import cache_view, record
from preattn.cases.base import rope_table
from preattn.geometry import geometry
from preattn.layers import V4Prologue
from preattn.workspace import QueryWorkspace
shard = dataclasses.replace(geometry("deepseek-v4.1-flash").shard(2), q_rank=64)
wq_b, table = torch.randn(32 * 512, 64).bfloat16(), rope_table(64)
cache = cache_view(torch.zeros(1 << 20, dtype=torch.uint8), record("v41_mxfp8"), block_size=64)
q_latent, kv = torch.randn(3, 64).bfloat16(), torch.randn(3, 512).bfloat16()
positions, slots = torch.arange(3), torch.arange(3)
"""
    example = example.replace('"flashmla-mega", max_tokens=16384)', '"flashmla-mega", max_tokens=16384, device="cpu")')
    check = "\nassert query.shape == (3, 64, 512) and cache.any()"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, "-c", before + example + check], check=False, env=env, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert "nothing is copied" in result.stdout


COMMANDS = [block.removeprefix("$ preattn ") for block in blocks("") if block.startswith("$ preattn ")]


def masked(line: str) -> str:
    """A line without what differs between machines and runs: measured numbers and trailing blanks."""
    return re.sub(r"[\d.,]+ (s|us|GB/s)\b", r"# \1", line).rstrip()


@pytest.mark.parametrize("block", COMMANDS, ids=lambda block: block.split()[0])
def test_commands_print_what_is_shown(block: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    command, _, shown = block.partition("\n")
    result = CliRunner().invoke(cli.app, shlex.split(command))
    assert result.exit_code == 0, result.output
    printed = "\n".join(masked(line) for line in result.stdout.splitlines())
    at = 0
    for part in "\n".join(masked(line) for line in shown.splitlines()).split("...\n"):
        found = printed.find(part.rstrip("\n"), at)
        assert found >= 0, f"not printed after character {at}:\n{part}\nbut:\n{printed}"
        at = found + len(part.rstrip("\n"))


def test_three_commands_are_shown() -> None:
    assert [command.split()[0] for command in COMMANDS] == ["explain", "check", "inspect"]


def test_every_verb_is_mentioned() -> None:
    for command in cli.app.registered_commands:
        assert command.callback is not None
        assert f"preattn {command.callback.__name__}" in README


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_lead_somewhere(name: str) -> None:
    path = ROOT / name
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", path.read_text()):
        if target != "results":  # made by a run of the benchmark
            assert (path.parent / target).exists(), f"{name}: {target}"


def test_the_layout_is_the_layout() -> None:
    (layout,) = (block for block in blocks("") if block.startswith("preattn/\n"))
    for line in layout.splitlines()[1:]:
        for path in re.split(r" {3,}", line.strip())[0].split():
            assert (ROOT / "preattn" / path).exists(), path


def test_the_support_table_names_ops_that_exist() -> None:
    names = re.findall(r"^\| `(v4|dsa)\.(\w+)`", README, re.MULTILINE)
    assert len(names) >= 3
    for module, function in names:
        assert callable(getattr(import_module(f"preattn.{module}"), function))


def test_the_table_of_records_is_formats() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| (\S+) \|", FORMATS, re.MULTILINE))
    for name, bytes_ in rows.items():
        size = formats.record(name, 512).bytes
        assert size == {"2·D": 1024, "D": 512}.get(bytes_) or size == int(bytes_), name
    assert set(formats.RECORD_NAMES) <= set(rows)


@pytest.mark.parametrize("name", formats.RECORDS)
def test_the_diagrams_end_where_records_end(name: str) -> None:
    record = formats.RECORDS[name]
    (diagrams,) = (block for block in blocks("") if block.startswith("v41_mxfp8 "))
    parts = [part for part in diagrams.split("\n\n") if part.startswith(name + " ")]
    if not parts:
        assert f"`{name}`" in README
        return
    numbers = [int(number) for line in parts[0].splitlines()[1::2] for number in line.split()]
    assert numbers[-1] == record.tail_bytes if record.tail_bytes else numbers[-1] == record.bytes
    offsets = {part.offset for part in record.parts}
    assert offsets <= set(numbers)
