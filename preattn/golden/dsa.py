"""Recorded DSA calls as calls of our ops: what a manifest's entry says, in our arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .. import dsa, formats
from ..cases.base import CANARY, Call, poisoned
from ..policy import dsa_norm_rope_bytes, dsa_query_bytes
from .memory import Recorded, check_positions, guarded_cache

_RECORDS = {"auto": "bf16", "fp8": "fp8", "fp8_ds_mla": "dsa_fp8"}


def recorded(arrays: Mapping[str, Tensor], entry: Mapping[str, Any]) -> Recorded:
    """The call of a manifest's entry with fresh memory, and what it has to write; ``arrays`` lie on its device.

    Raises:
        ValueError: an op that is not of this family, or something that does not fit.
    """
    check_positions(arrays["positions"], arrays["rope_table"])
    if entry["op"] == "dsa_query":
        return _query(arrays, entry)
    if entry["op"] == "dsa_norm_rope_insert":
        return _norm_rope(arrays, entry)
    raise ValueError(f"op: expected an op of the DSA prologue; got {entry['op']!r}")


def _pairing(entry: Mapping[str, Any]) -> str:
    return "interleaved" if entry["index_interleave"] else "half_split"


def _query(arrays: Mapping[str, Tensor], entry: Mapping[str, Any]) -> Recorded:
    q_pe, quantised = arrays["q_pe"], bool(entry["fp8_query"])
    tokens, heads, rope_dim = q_pe.shape
    memory: dict[str, Tensor] = {}
    expected: dict[str, Tensor | str] = {}
    arguments: dict[str, Any] = {
        "q_pe": q_pe,
        "latent": arrays["ql_nope"],
        "positions": arrays["positions"],
        "rope_table": arrays["rope_table"],
    }
    if quantised:
        out = poisoned(tokens, heads, dsa.LATENT_DIM + rope_dim, dtype=torch.float8_e4m3fn, device=q_pe.device)
        memory["out"] = out
        arguments |= {"out": out, "query_scale": arrays["q_scale"]}
        expected["out"] = arrays["mqa_q"]
    else:
        arguments["form"] = "pair"
        expected["result1"] = arrays["mqa_q"]
    index_heads = 0
    if entry["has_indexer"]:
        index_heads = arrays["index_q"].shape[1]
        arguments |= {
            "index_query": arrays["index_q"],
            "index_weights": arrays["index_weights"],
            "index_pairing": _pairing(entry),
            "softmax_scale": float(entry["softmax_scale"]),
            "head_scale": float(entry["head_scale"]),
        }
        expected |= {"result2": arrays["index_q_out"], "result3": arrays["index_weights_out"]}
    moved = dsa_query_bytes(tokens, heads, index_heads=index_heads, copies=quantised, fp8_query=quantised)
    return Recorded(Call(dsa.query, arguments, memory, sum(moved.values())), expected, frozenset())


def _norm_rope(arrays: Mapping[str, Tensor], entry: Mapping[str, Any]) -> Recorded:
    name = _RECORDS.get(str(entry["record"]))
    if name is None:
        raise ValueError(f"record: expected one of {', '.join(_RECORDS)}; got {entry['record']!r}")
    row, rank = arrays["qkv"], arrays["q_weight"].shape[0]
    tokens, block_size, fill = row.shape[0], int(entry["block_size"]), entry["cache_fill"]
    record = formats.record(name, row.shape[1] - rank)
    # The recorder filled caches of bytes only: its bf16 cache was new, and zero.
    pool, cache, expected_pool = guarded_cache(
        arrays["kv_cache_out"], record, block_size, 0 if name == "bf16" else fill
    )
    out = poisoned(tokens, rank, dtype=torch.bfloat16, device=row.device)
    memory = {"pool": pool, "out": out}
    expected: dict[str, Tensor | str] = {
        "pool": expected_pool,
        "out": arrays["q_c_out"],
        "result1": arrays["kv_c_out"],
        "result2": arrays["k_pe_out"],
    }
    eps = float(entry["eps"])
    arguments: dict[str, Any] = {
        "q_latent": row[:, :rank],
        "kv_latent": row[:, rank : rank + dsa.LATENT_DIM],
        "k_pe": row[:, rank + dsa.LATENT_DIM :],
        "cache": cache,
        "slots": arrays["slots"],
        "positions": arrays["positions"],
        "rope_table": arrays["rope_table"],
        "record": name,
        "q_weight": arrays["q_weight"],
        "kv_weight": arrays["kv_weight"],
        "q_eps": eps,
        "kv_eps": eps,
        "kv_scale": arrays["k_scale"] if name == "fp8" else None,
        "return_kv": True,
        "out": out,
    }
    index_record, top_k = None, 0
    if entry["has_indexer"]:
        index_record, top_k = formats.record("index_fp8"), 2048
        index_pool, index_cache, expected_index = guarded_cache(
            arrays["index_cache_out"], index_record, block_size, fill
        )
        buffer = torch.full((tokens + 1, top_k), CANARY, dtype=torch.int32, device=row.device)
        filled = buffer.clone()
        filled[:tokens] = -int(arrays["topk_changed"])
        memory |= {"index_pool": index_pool, "top_k": buffer}
        expected |= {"index_pool": expected_index, "top_k": filled}
        arguments |= {
            "index_key": arrays["index_k"],
            "index_weight": arrays["ln_weight"],
            "index_bias": arrays["ln_bias"],
            "index_eps": eps,
            "index_cache": index_cache,
            "index_pairing": _pairing(entry),
            "top_k": buffer,
        }
    moved = dsa_norm_rope_bytes(tokens, rank, record, index_record=index_record, top_k=top_k, return_kv=True)
    call = Call(dsa.norm_rope_insert, arguments, memory, sum(moved.values()))
    return Recorded(call, expected, frozenset({"out", "result1"}))
