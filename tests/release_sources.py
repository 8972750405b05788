"""The source files of a published package, for tests that read and never import it."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


def sources(package: str, version: str, members: Iterable[str]) -> Path:
    """The folder with these members of a release's wheel, a file or ``folder/`` each; what it lacks is not there.

    Fetched once, into an ignored folder of the checkout. Skips, with the reason, where the wheel cannot be had.
    """
    found = _fetched(package, version, tuple(members))
    if isinstance(found, str):
        pytest.skip(f"the sources of {package} {version} cannot be had: {found}")
    return found


@cache
def _fetched(package: str, version: str, members: tuple[str, ...]) -> Path | str:
    """The folder, or the reason: pip is asked once a process, and not by every test of a machine without network."""
    script = fetcher()
    try:
        folder: Path = script.fetch(
            f"{package}=={version}", ROOT / ".cache" / "sources" / f"{package}-{version}", members
        )
    except script.Unavailable as reason:
        return str(reason)
    return folder


@cache
def fetcher() -> ModuleType:
    """``scripts/fetch_sources.py``."""
    spec = importlib.util.spec_from_file_location("fetch_sources", ROOT / "scripts" / "fetch_sources.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
