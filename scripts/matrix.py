"""Run a selection of the tests with the oldest and the newest torch and Triton: ``python scripts/matrix.py``.

A set of versions has a virtual environment of its own, which pip fills: what ``pyproject.toml`` depends on, at the
releases it names or at the highest that pip finds, and what tests need. It is kept for the next time. A torch of which
pip's settings know no CPU build comes as a CUDA build, gigabytes of it. On a machine with a GPU the kernels are
compiled and run there, elsewhere in Triton's interpreter. Without Triton and without a GPU the package has to import,
and to give the recorded bytes.

Prints a table. Exit status: 0 where everything passed, 1 where something failed, 2 where an environment could not be
had.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
TOOLS = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis")

ALONGSIDE = {"oldest": ("numpy<2.4",)}
"""Triton 3.6's interpreter takes the one element of an array as an int, which NumPy has refused from 2.4 on."""

SELECTIONS = {
    "formats": ("tests/test_formats.py",),
    "cases": ("tests/test_cases.py", "-k", "not 17"),
    "v4": ("tests/test_v4.py",),
    "dsa": ("tests/test_dsa.py",),
    "projections": ("tests/test_project.py",),
    "compiled": ("tests/test_static.py", "-k", "sm_90"),
}
"""What is run, as arguments of pytest."""

BARE = """
import importlib, pkgutil, sys
sys.modules["triton"] = None  # as if it were not installed
import preattn
for module in pkgutil.walk_packages(preattn.__path__, "preattn.", onerror=lambda name: None):
    if not module.name.startswith("preattn.kernels.") and not module.name.endswith(".__main__"):
        importlib.import_module(module.name)
from preattn.cli import main
sys.argv[1:] = ["check"]
main()
"""
"""Without Triton: every module but the kernels' imports, and the reference gives the recorded bytes."""


class Row(NamedTuple):
    """One line of the table."""

    what: str
    passed: int
    failed: int
    skipped: int
    seconds: float


class NotToBeHad(RuntimeError):
    """pip could not fill an environment; the message is the end of what it said."""


class Environment:
    """The virtual environment of one set of versions, and what is run in it."""

    def __init__(self, versions: str, folder: Path, workers: int) -> None:
        self.versions, self.folder, self.workers = versions, folder / versions, workers
        self.python = self.folder / "bin" / "python"

    def fill(self) -> None:
        """Build it, or bring it up to date."""
        if not self.python.exists():
            subprocess.run([sys.executable, "-m", "venv", "--clear", str(self.folder)], check=True)
        wanted = requirements(self.versions)
        print(f"{self.versions}: pip installs {' '.join(wanted)}", flush=True)
        pip = [str(self.python), "-m", "pip", "install", "--quiet", "--upgrade", "--only-binary=:all:", *wanted]
        done = subprocess.run(pip, capture_output=True, text=True)
        if done.returncode:
            raise NotToBeHad("\n".join(done.stderr.strip().splitlines()[-3:]))

    def about(self) -> str:
        """The versions that are in it, and where kernels run."""
        program = (
            "import platform, numpy, torch, triton; gpu = torch.cuda.is_available();"
            "print(f'torch {torch.__version__}, Triton {triton.__version__}, NumPy {numpy.__version__},'"
            "f' Python {platform.python_version()};', torch.cuda.get_device_name() if gpu else 'no GPU')"
        )
        done = subprocess.run([self.python, "-c", program], capture_output=True, text=True)
        if done.returncode:
            raise NotToBeHad("\n".join(done.stderr.strip().splitlines()[-3:]))
        return done.stdout.strip()

    def run(self, what: str) -> Row:
        """One selection of tests, or ``bare``."""
        start = time.perf_counter()
        if what == "bare":
            done = self._start(what, ["-c", BARE], CUDA_VISIBLE_DEVICES="")
            good = done.returncode == 0
            return Row(what, int(good), int(not good), 0, time.perf_counter() - start)
        report = self.folder / f"{what}.xml"
        report.unlink(missing_ok=True)
        options = ["-n", str(self.workers), "-p", "no:cacheprovider", "--junit-xml", str(report)]
        done = self._start(what, ["-m", "pytest", *options, *SELECTIONS[what]])
        seconds = time.perf_counter() - start
        if not report.is_file():  # pytest itself did not come to an end
            return Row(what, 0, 1, 0, seconds)
        suite = next(ElementTree.parse(report).iter("testsuite"))
        tests, failed, errors, skipped = (int(suite.get(key, 0)) for key in ("tests", "failures", "errors", "skipped"))
        bad = failed + errors
        return Row(what, tests - bad - skipped, max(bad, int(done.returncode != 0)), skipped, seconds)

    def _start(self, what: str, arguments: list[str], **environment: str) -> subprocess.CompletedProcess[bytes]:
        """Run Python there, on the checkout's package; what it says goes to a log, and to the screen if it failed."""
        log = self.folder / f"{what}.log"
        variables = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
        with log.open("wb") as file:
            command = [str(self.python), *arguments]
            done = subprocess.run(command, cwd=ROOT, env=variables, stdout=file, stderr=subprocess.STDOUT)
        if done.returncode:
            said = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
            print("\n".join(said[-12:]), f"\n{self.versions}, {what}: all of it is in {log}", flush=True)
        return done


def requirements(versions: str) -> list[str]:
    """What pip is asked for: the package's dependencies, ``oldest`` at their lower bounds, and what tests need."""
    depended: list[str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    if versions == "oldest":
        depended = [re.sub(r">=(\d+\.\d+)", r"==\1.*", one) for one in depended]
    return [*depended, *ALONGSIDE.get(versions, ()), *TOOLS]


def table(rows: list[tuple[str, Row]]) -> Iterator[str]:
    """The rows in Markdown."""
    yield "| versions | what | passed | failed | skipped | seconds |"
    yield "|---|---|---:|---:|---:|---:|"
    for versions, row in rows:
        yield f"| {versions} | {row.what} | {row.passed} | {row.failed} | {row.skipped} | {row.seconds:.0f} |"


def main() -> int:
    """Build, run, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("versions", nargs="?", choices=("oldest", "newest"), help="which set; by default both")
    every = ["bare", *SELECTIONS]
    parser.add_argument("--only", action="append", choices=every, help="one selection; may be given again")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "matrix", help="where environments are kept")
    parser.add_argument("--workers", type=int, default=1, help="processes of pytest")
    arguments = parser.parse_args()
    rows: list[tuple[str, Row]] = []
    heads: list[str] = []
    status = 0
    for versions in [arguments.versions] if arguments.versions else ["oldest", "newest"]:
        environment = Environment(versions, arguments.folder.resolve(), arguments.workers)
        try:
            environment.fill()
            heads.append(f"- {versions}: {environment.about()}")
        except NotToBeHad as reason:
            heads.append(f"- {versions}: not to be had here: {reason}")
            status = 2
            continue
        print(heads[-1], flush=True)
        for what in arguments.only or every:
            row = environment.run(what)
            print(f"  {what}: {row.passed} passed, {row.failed} failed, {row.skipped} skipped", flush=True)
            rows.append((versions, row))
    print("", *heads, "", *table(rows), sep="\n")
    return status or int(any(row.failed for _, row in rows))


if __name__ == "__main__":
    sys.exit(main())
