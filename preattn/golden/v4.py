"""Recorded V4 calls as calls of our ops: what a manifest's entry says, in our arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .. import formats, policy, v4
from ..cases.base import Call, poisoned
from .memory import Recorded, check_positions, guarded_cache, whole

_RECORDS = {"v4_query_kv_bf16": "bf16", "v4_query_kv_fp8": "fp8"}
_MOST_HEADS = 1024


def recorded(arrays: Mapping[str, Tensor], entry: Mapping[str, Any]) -> Recorded:
    """The call of a manifest's entry with fresh memory, and what it has to write; ``arrays`` lie on its device.

    Raises:
        ValueError: an op that is not of this family, or something that does not fit.
    """
    op = entry["op"]
    if op not in ("v4_query_kv", "kv_insert", *_RECORDS):
        raise ValueError(f"op: expected an op of the V4 prologue; got {op!r}")
    record = formats.record(str(_RECORDS.get(op) or entry["record"]), v4.HEAD_DIM)
    pool, cache, expected_pool = guarded_cache(
        arrays["cache_out"], record, whole(entry, "block_size", 1, 1 << 20), entry["cache_fill"]
    )
    kv, positions, table = arrays["kv"], arrays["positions"], arrays["rope_table"]
    check_positions(positions, table)
    arguments: dict[str, Any] = {
        "kv": kv,
        "cache": cache,
        "slots": arrays["slots"],
        "positions": positions,
        "rope_table": table,
        "record": record.name,
        "kv_scale": arrays.get("kv_scale"),
    }
    memory = {"pool": pool}
    expected: dict[str, Tensor | str] = {"pool": expected_pool}
    if op == "kv_insert":
        return Recorded(Call(v4.kv_insert, arguments, memory, _moved(kv, 0, 0, record)), expected, frozenset())
    query = arrays["q"]
    padded = whole(entry, "padded_heads", 0, _MOST_HEADS) if "padded_heads" in entry else query.shape[1]
    scale_inv = arrays.get("q_scale_inv")
    out = None
    if padded:
        dtype = query.dtype if scale_inv is None else torch.float8_e4m3fn
        out = poisoned(query.shape[0], padded, v4.HEAD_DIM, dtype=dtype, device=query.device)
        memory["out"] = out
        expected["out"] = arrays["q_out"] if "q_out" in arrays else entry["q_out_sha256"]
    norm = bool(entry["q_norm"])
    arguments |= {
        "query": query,
        "query_rope": bool(entry.get("q_rope", True)),
        "query_norm_eps": float(entry["eps"]) if norm else None,
        "padded_heads": padded,
        "layout": "chunk_interleaved" if entry.get("interleaved") else "head_major",
        "query_scale_inv": scale_inv,
        "out": out,
    }
    moved = _moved(kv, query.shape[1], padded, record)
    return Recorded(
        Call(v4.query_kv_insert, arguments, memory, moved), expected, frozenset({"out"} if norm and padded else ())
    )


def _moved(kv: Tensor, heads: int, padded: int, record: formats.Record) -> int:
    return sum(policy.v4_bytes(kv.shape[0], heads, padded, record).values())
