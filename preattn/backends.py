"""What each attention backend reads, and whether a model and a backend fit: settled when a layer is built.

Backends differ in what a query is (one packed tensor, or the latent and the rotated dims apart), in the head
counts they are compiled for, and in the records they read. Handing over the wrong form shows at the first
request at best, so :func:`negotiate` refuses it before there is one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from . import checks
from .geometry import Family, Geometry

QueryForm = Literal["packed", "pair", "head_major", "chunk_interleaved"]
"""``packed`` [T, P, 576] and ``pair`` ([T, H, 512], [T, H, 64]) are DSA forms, the others V4 forms."""

QueryDtype = Literal["bf16", "e4m3"]


@dataclass(frozen=True)
class Backend:
    """An attention kernel, as far as a prologue sees it.

    Attributes:
        name: how :func:`negotiate` and the command line call it.
        family: whose prologue feeds it.
        forms: query forms it takes, the better one first (``packed`` and the V4 forms can be written in place).
        query_dtypes: of the query, the usual one first.
        head_counts: heads it is compiled for, ascending; empty: any count.
        records: of its cache (V4: of the window), the usual one first.
        compressed_records: of a V4 layer's compressed cache.
        rotates: it norms and rotates the query itself; the prologue must not.
    """

    name: str
    family: Family
    forms: tuple[QueryForm, ...]
    query_dtypes: tuple[QueryDtype, ...] = ("bf16",)
    head_counts: tuple[int, ...] = ()
    records: tuple[str, ...] = ()
    compressed_records: tuple[str, ...] = ()
    rotates: bool = False


BACKENDS: dict[str, Backend] = {
    backend.name: backend
    for backend in (
        Backend("flashmla-sparse", "dsa", ("packed", "pair"), head_counts=(64, 128), records=("dsa_fp8", "bf16")),
        Backend("flashinfer-sparse-trtllm", "dsa", ("packed",), ("bf16", "e4m3"), records=("bf16", "fp8")),
        Backend("flashinfer-sparse-sm90", "dsa", ("pair",), records=("bf16",)),
        Backend("flashattention-mla-sparse", "dsa", ("pair",), records=("bf16",)),
        Backend("flashattention4-mla-sparse", "dsa", ("packed", "pair"), records=("bf16",)),
        Backend(
            "flashmla-mega",
            "v4",
            ("chunk_interleaved",),
            head_counts=(64, 128),
            records=("v41_mxfp8",),
            compressed_records=("v41_mxfp8", "v41_nvfp4"),
            rotates=True,
        ),
        Backend(
            "flashmla-v4",
            "v4",
            ("head_major",),
            ("bf16", "e4m3"),
            head_counts=(64, 128),
            records=("v4_fp8", "v41_mxfp8", "bf16", "fp8"),
            compressed_records=("v4_fp8", "v41_mxfp8", "bf16", "fp8"),
        ),
    )
}


ROPE_RECORDS = ("dsa_fp8", "dsa_nvfp4")
"""DSA records that have a place for RoPE dims, and so none for a model without."""


@dataclass(frozen=True)
class Agreement:
    """What a layer's prologue hands to its backend.

    Attributes:
        backend: who reads it.
        form: of the query.
        query_dtype: of the query.
        padded_heads: heads of the query tensor; those past the rank's own are +0.0.
        record: of the cache (V4: of the window).
        compressed_record: of a V4 layer's compressed cache, None for DSA.
        norms: the prologue applies the head norm (V4 models that have one).
        rotates: the prologue applies RoPE to the query.
    """

    backend: Backend
    form: QueryForm
    query_dtype: QueryDtype
    padded_heads: int
    record: str
    compressed_record: str | None
    norms: bool
    rotates: bool


def backend(name: str) -> Backend:
    """Look a backend up.

    Raises:
        ValueError: unknown name; the message lists the known ones.
    """
    checks.instance("backend", name, str)
    found = BACKENDS.get(name.lower())
    if found is None:
        raise ValueError(f"backend: expected one of {', '.join(BACKENDS)}; got {name!r}")
    return found


def negotiate(
    geometry: Geometry,
    name: str,
    *,
    form: QueryForm | None = None,
    record: str | None = None,
    query_dtype: QueryDtype | None = None,
) -> Agreement:
    """Settle what the prologue of a layer writes for a backend.

    Args:
        geometry: the layer, sharded.
        name: the backend.
        form: insist on a query form; the backend's better one when None.
        record: insist on a record; when None the first of the backend's that the model has.
        query_dtype: insist on a dtype; when None e4m3 for an ``fp8`` record where the backend takes it, else bf16.

    Raises:
        ValueError: the two do not fit. The message names both and what would work.
    """
    checks.instance("geometry", geometry, Geometry)
    taker = backend(name)

    def refuse(what: str, expected: str, got: object, *, instead: str = "") -> ValueError:
        return ValueError(f"{what}: {geometry.name} with {taker.name}: expected {expected}; got {got}{instead}")

    if taker.family != geometry.family:
        fitting = ", ".join([other.name for other in BACKENDS.values() if other.family == geometry.family])
        raise refuse("backend", f"one for the {geometry.family} family ({fitting})", taker.name)
    if taker.rotates and geometry.query_norm:
        raise refuse("backend", "one that takes a normed query (flashmla-v4)", f"{taker.name}, which norms it itself")
    if form is not None and form not in taker.forms:
        others = [o.name for o in BACKENDS.values() if o.family == taker.family and form in o.forms]
        hint = f"; {form} works with {', '.join(others)}" if others else ""
        raise refuse("form", " or ".join(taker.forms), form, instead=hint)
    chosen = form or taker.forms[0]
    own = geometry.records.window if geometry.family == "v4" else geometry.records.latent
    if geometry.family == "dsa" and geometry.rope.dim == 0:
        own = tuple([candidate for candidate in own if candidate not in ROPE_RECORDS])
    fitting_records = [candidate for candidate in taker.records if candidate in own]
    if not fitting_records:
        raise refuse("record", f"one of {', '.join(taker.records)}", f"a model that stores {', '.join(own)}")
    if record is not None and record not in fitting_records:
        raise refuse("record", " or ".join(fitting_records), record)
    stored = record or fitting_records[0]
    usual: QueryDtype = "e4m3" if stored == "fp8" and "e4m3" in taker.query_dtypes else "bf16"
    dtype = query_dtype or usual
    if dtype not in taker.query_dtypes:
        raise refuse("query_dtype", " or ".join(taker.query_dtypes), dtype)
    padded = geometry.heads
    if taker.head_counts:
        counts = [count for count in taker.head_counts if count >= geometry.heads]
        if not counts:
            raise refuse("heads", f"at most {taker.head_counts[-1]} heads a rank", geometry.heads)
        padded = counts[0]
        if chosen == "pair" and padded != geometry.heads:
            raise refuse("form", f"packed, which pads {geometry.heads} heads to {padded}", "pair, which pads none")
    compressed = [candidate for candidate in taker.compressed_records if candidate in geometry.records.compressed]
    if geometry.records.compressed and not compressed:
        expected = f"a compressed cache of {' or '.join(taker.compressed_records)}"
        raise refuse("record", expected, ", ".join(geometry.records.compressed))
    rotates = not taker.rotates and geometry.rope.dim > 0
    return Agreement(
        backend=taker,
        form=chosen,
        query_dtype=dtype,
        padded_heads=padded,
        record=stored,
        compressed_record=compressed[0] if compressed else None,
        norms=geometry.query_norm and not taker.rotates,
        rotates=rotates,
    )
