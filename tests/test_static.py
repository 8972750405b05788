"""Every launch of the registry compiles for every architecture without spills, and moves 16 bytes at a time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TARGETS = ("sm_90", "sm_100", "sm_120", "gfx942", "gfx950")


@pytest.fixture(scope="module")
def reports() -> list[dict[str, Any]]:
    """Compiled in a process of its own: here the kernels may be in the interpreter."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    script = Path(__file__).parent / "static_compile.py"
    result = subprocess.run(
        [sys.executable, str(script), *TARGETS], env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_every_target_compiles_without_spills(reports: list[dict[str, Any]]) -> None:
    assert {row["target"] for row in reports} == set(TARGETS)
    for row in reports:
        spilled = row.get("local", 0) + row.get("stack", 0) + row.get("vgpr_spill_count", 0)
        assert spilled == 0, row


def test_rows_move_in_128_bit_accesses(reports: list[dict[str, Any]]) -> None:
    """Query and latent rows are loaded, and query rows and codes stored, 16 bytes a thread."""
    rows = [row for row in reports if "accesses" in row]
    assert rows
    for row in rows:
        assert row["accesses"].get("ld128", 0) > 0 and row["accesses"].get("st128", 0) > 0, row
        narrow = sum(count for width, count in row["accesses"].items() if width in ("st8", "st16"))
        assert narrow <= 3, row  # scale bytes, and the 64 rotated codes of a token
