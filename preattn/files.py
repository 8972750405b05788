"""JSON that the library reads: bounded in size, checked against a schema, and nothing but data.

A schema is a class of typed fields. Whatever a file has beyond it, lacks, or holds of another type or out of range is
a ValueError that names the file and the place; so is a file that is cut short, not JSON, or too large.
"""

from __future__ import annotations

import re
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec

MOST_BYTES = 64 << 20
"""Most bytes of a file."""

Positive = Annotated[float, msgspec.Meta(gt=0)]
"""A finite number above zero: JSON has no others, and what overflows float64 is refused."""
NotNegative = Annotated[float, msgspec.Meta(ge=0)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]


class Schema(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an object of a file has to be."""


T = TypeVar("T")


def read(path: Path | Traversable, kind: type[T], *, most: int = MOST_BYTES) -> T:
    """Read and check one file.

    Raises:
        ValueError: it cannot be read, has more than ``most`` bytes, or is not JSON of this kind.
    """
    try:
        with path.open("rb") as file:
            data = file.read(most + 1)
    except OSError as error:
        raise ValueError(f"{path}: {error}") from None
    if len(data) > most:
        raise ValueError(f"{path}: expected at most {most} bytes; got more")
    return parse(data, kind, str(path))


def parse(data: bytes, kind: type[T], where: str) -> T:
    """Check JSON that was read already; ``where`` it was begins the message.

    Raises:
        ValueError: it is not JSON of this kind.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ValueError(f"{where}: {_said(error)}") from None


def _said(error: Exception) -> str:
    """msgspec's message in the words of the others here: the place, what was expected, what came."""
    text, _, place = str(error).partition(" - at ")
    text = re.sub(r"^Object missing required field (.*)", r"expected a field \1; got none", text)
    text = re.sub(r"^Object contains unknown field (.*)", r"expected no other fields; got \1", text)
    text = re.sub(r"^Invalid enum value (.*)", r"expected one of its values; got \1", text)
    text = re.sub(r"^Expected (.*), got (.*)", r"expected \1; got \2", text)
    text = re.sub(r"^Expected ", "expected ", text)
    place = place.strip("`").removeprefix("$").removeprefix(".")
    return f"{place}: {text}" if place else text
