"""Without a GPU the kernels run in Triton's interpreter, which has to be chosen before they are imported.

``test_properties`` searches longer when the environment says so, and what such a search did can be kept in a file.
"""

from __future__ import annotations

import os
import platform
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

GPU = torch.cuda.is_available()
if not GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")

DEVICE = "cuda" if GPU else "cpu"

SEED = 20261103
"""One with which the few examples of a plain run meet every token count at least twice in every property."""


@dataclass(frozen=True)
class Search:
    """How far ``test_properties`` searches.

    Attributes:
        examples: at least so many over all properties, the same number of each; 0: a few of each, as they say.
        seed: of the first part of each property; the next part has the next.
        parts: tests that a property is split into, for processes to share.
        variants: sets of choices a property has of what kernels are compiled for; 0: all of them.
        counts: the file that gets the table of what ran, if any.
    """

    examples: int
    seed: int
    parts: int
    variants: int
    counts: str | None

    def share(self, few: int, properties: int) -> int:
        """Examples of one part of one of so many properties."""
        return -(-(self.examples or few * properties) // (properties * self.parts))


def _search() -> Search:
    def number(name: str, default: int, least: int = 0) -> int:
        value = int(os.environ.get(f"PREATTN_{name}") or default)
        if value < least:
            raise ValueError(f"PREATTN_{name}: expected at least {least}; got {value}")
        return value

    examples, parts = number("EXAMPLES", 0), number("PARTS", 1, 1)
    variants = number("VARIANTS", 0 if not GPU else 24 if examples else 4)
    if 0 < variants < parts:
        raise ValueError(f"PREATTN_VARIANTS: expected 0, or one for each of {parts} parts; got {variants}")
    return Search(examples, number("SEED", SEED), parts, variants, os.environ.get("PREATTN_COUNTS"))


SEARCH = _search()


@pytest.fixture
def device() -> str:
    """Where kernels run here: the GPU, or the CPU in Triton's interpreter."""
    return DEVICE


@pytest.fixture
def nothing_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernel has a variant: those that other tests of this process have compiled would hide what warm-up forgets."""
    from preattn.kernels import dsa, v4  # noqa: F401  the kernels are then known
    from preattn.kernels.launch import Kernel

    for kernel in Kernel.kernels:
        monkeypatch.setattr(kernel, "variants", {})


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A seed of the test's own name: the same in every run, another in every test."""
    return zlib.crc32(request.node.nodeid.encode()) % 2**31


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests under tests/gpu run only where a GPU is."""
    for item in items:
        if "gpu" in item.path.parts and not GPU:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU, and this machine has none"))


def pytest_configure(config: pytest.Config) -> None:
    """The process that sees every report, which no worker of pytest-xdist does, keeps the counts."""
    if SEARCH.counts and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Counts(Path(SEARCH.counts)))


@dataclass
class Counts:
    """Collects what the properties record of themselves, and writes it as a table."""

    path: Path
    start: float = field(default_factory=time.perf_counter)
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)
    lost: set[str] = field(default_factory=set)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        done = dict(report.user_properties).get("random calls")
        if report.when != "call" or not isinstance(done, dict):
            if report.failed:  # a worker that crashed, a test of the harness
                self.lost.add(report.nodeid)
            return
        row = self.rows.setdefault(done["property"], {"examples": 0, "bytes": 0, "seconds": 0.0, "failed": 0})
        for key in ("examples", "bytes", "seconds"):
            row[key] += done[key]
        row["failed"] += report.failed

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.rows and not session.config.option.keyword:  # a choice of properties is no search of all
            self.path.write_text("\n".join(self.lines()) + "\n")

    def lines(self) -> Iterator[str]:
        from preattn.bench.run import commit

        name = torch.cuda.get_device_name() if GPU else "CPU, Triton's interpreter"
        kinds = f"{SEARCH.variants} variants" if SEARCH.variants else "any number of variants"
        versions = f"torch {torch.__version__}, Triton {version('triton')}, Python {platform.python_version()}"
        seconds = time.perf_counter() - self.start
        yield "# Random calls"
        yield ""
        yield "Written by `make nightly` ([tests/test_properties.py](../tests/test_properties.py)). An example is one"
        yield "call of an op on random values, strides, offsets, slots and positions: what it returns and every buffer"
        yield "of the call, inputs and the bytes around them too, equal the reference's to the bit, and no byte changed"
        yield "that the op does not own. Counted are examples that passed; seconds are those of all processes together."
        yield ""
        yield f"- {name}; {versions}, hypothesis {version('hypothesis')}"
        yield f"- commit {commit()}"
        yield f"- of each property {kinds}, in {SEARCH.parts} part(s); seed {SEARCH.seed}; {seconds:.0f} s in all"
        yield ""
        if self.lost:
            yield f"- failed, and said nothing of what had run: {', '.join(sorted(self.lost))}"
            yield ""
        yield "| property | examples | bytes compared | seconds | failed parts |"
        yield "|---|---:|---:|---:|---:|"
        total = {key: sum(row[key] for row in self.rows.values()) for key in ("examples", "bytes", "seconds", "failed")}
        for title, row in (*sorted(self.rows.items()), ("**total**", total)):
            yield f"| {title} | {row['examples']:,} | {row['bytes']:,} | {row['seconds']:.0f} | {row['failed']} |"
