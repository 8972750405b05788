"""The DSA model's ops under the engine's names and signatures: what they run, and what shadow mode compares."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ... import dsa, formats
from ...reference import dsa as reference
from . import report, shadow
from .layers import RECORDS, engine, in_buffer, layer_name, query_buffer, thread

# -- fused_norm_rope -------------------------------------------------------------------------------------------


def fused_norm_rope(
    positions: Tensor,
    q_c: Tensor,
    q_rms_norm_w: Tensor,
    q_rms_eps: float,
    kv_c: Tensor,
    kv_rms_norm_w: Tensor,
    kv_rms_eps: float,
    k_pe: Tensor,
    k_rope_cos_sin_cache: Tensor,
    index_k: Tensor | None,
    index_k_layer_norm_w: Tensor | None,
    index_k_layer_norm_bias: Tensor | None,
    index_k_layer_norm_eps: float,
    index_k_rope_cos_sin_cache: Tensor | None,
    topk_indices_buffer: Tensor,
    slot_mapping: Tensor | None = None,
    indexer_slot_mapping: Tensor | None = None,
    indexer_k_cache: Tensor | None = None,
    indexer_cache_shuffled: bool = False,
    mla_kv_cache: Tensor | None = None,
    mla_kv_cache_dtype: str = "auto",
    mla_k_scale: Tensor | None = None,
    has_indexer: bool = True,
    index_rope_interleave: bool = False,
    q_c_out: Tensor | None = None,
    kv_c_out: Tensor | None = None,
    k_pe_out: Tensor | None = None,
    index_k_out: Tensor | None = None,
    skip_scale: bool = False,
) -> Tensor:
    """The engine's function of this name: norms, RoPE of the keys, cache rows, and -1 into the top-k buffer."""
    call: dict[str, Any] = locals()
    reason = norm_rope_is_not_ours(call)
    if reason is not None:
        note("fused_norm_rope", reason)
        result: Tensor = engine.fused_norm_rope(**call)
        return result
    if report.tracing() and not thread.warming:
        stores = RECORDS[mla_kv_cache_dtype] if mla_kv_cache is not None else "nothing stored"
        report.count("fused_norm_rope", f"one launch, {stores}{', indexer' if has_indexer else ''}")
    if shadow.active() and not thread.warming:
        return _shadow_norm_rope(call)
    return _norm_rope(call)


def norm_rope_is_not_ours(call: dict[str, Any]) -> str | None:
    """Why a call is one that the library has no kernel for."""
    indexed = call["has_indexer"] and call["indexer_k_cache"] is not None
    if call["index_k_out"] is not None:
        return "the indexer key is to be returned (prefill context parallelism)"
    if call["indexer_cache_shuffled"]:
        return "a shuffled indexer cache"
    if call["has_indexer"] and indexed != (call["mla_kv_cache"] is not None):
        return "one of the caches is filled elsewhere"
    if call["mla_kv_cache"] is not None and call["mla_kv_cache_dtype"] not in RECORDS:
        return f"a cache of {call['mla_kv_cache_dtype']}"
    if (call["kv_c_out"] is None) != (call["k_pe_out"] is None):
        return "one of kv_c_out and k_pe_out is to be returned"
    if call["kv_c"].shape[-1] != dsa.LATENT_DIM or call["k_pe"].shape[-1] != dsa.ROPE_DIM:
        return f"a key of {call['kv_c'].shape[-1]} + {call['k_pe'].shape[-1]} dims"
    if call["q_c"].dtype != torch.bfloat16:
        return f"activations of {call['q_c'].dtype}"
    return None


def _norm_rope(call: dict[str, Any]) -> Tensor:
    positions, cache, slots = call["positions"], call["mla_kv_cache"], call["slot_mapping"]
    record = RECORDS.get(call["mla_kv_cache_dtype"], "bf16")
    index: dict[str, Any] = {}
    if call["has_indexer"]:
        index = {
            "index_key": call["index_k"],
            "index_weight": call["index_k_layer_norm_w"],
            "index_bias": call["index_k_layer_norm_bias"],
            "index_eps": call["index_k_layer_norm_eps"],
            "index_rope_table": call["index_k_rope_cos_sin_cache"],
            "index_pairing": _pairing(call),
            "top_k": call["topk_indices_buffer"],
        }
    if cache is None:
        slots = None
    elif call["has_indexer"]:
        index["index_cache"] = call["indexer_k_cache"]
        index["index_record"] = _index_record()
        index["index_slots"] = _clip(call["indexer_slot_mapping"], positions)
    return dsa.norm_rope_insert(
        call["q_c"],
        call["kv_c"],
        call["k_pe"],
        cache,
        _clip(slots, positions),
        positions,
        call["k_rope_cos_sin_cache"],
        record=record if cache is not None else "bf16",
        q_weight=call["q_rms_norm_w"],
        kv_weight=call["kv_rms_norm_w"],
        q_eps=call["q_rms_eps"],
        kv_eps=call["kv_rms_eps"],
        kv_scale=call["mla_k_scale"] if cache is not None and record == "fp8" else None,
        out=call["q_c_out"],
        kv_out=call["kv_c_out"],
        k_pe_out=call["k_pe_out"],
        **index,
    ).q_latent


def _clip(slots: Tensor | None, positions: Tensor) -> Tensor | None:
    """Slots of this step's tokens: the engine may hand over a longer buffer."""
    return slots if slots is None or slots.shape[0] <= positions.shape[0] else slots[: positions.shape[0]]


def _pairing(call: dict[str, Any]) -> str:
    return "interleaved" if call["index_rope_interleave"] else "half_split"


def _index_record() -> str:
    return "index_fp8_ue8m0" if engine.mx_scales() else "index_fp8"


def _shadow_norm_rope(call: dict[str, Any]) -> Tensor:
    shadow.refuse_capture()
    tokens, layer, op = call["positions"].shape[0], layer_name(), "fused_norm_rope"
    theirs, pages = dict(call), dict[str, shadow.Pages]()
    top_k = call["topk_indices_buffer"][:tokens]
    theirs["topk_indices_buffer"] = top_k.clone()
    theirs["q_c_out"] = None
    for name in ("kv_c_out", "k_pe_out"):
        if call[name] is not None:
            theirs[name] = _poisoned(call[name])
    if call["mla_kv_cache"] is not None:
        record = formats.record(RECORDS[call["mla_kv_cache_dtype"]], dsa.LATENT_DIM + dsa.ROPE_DIM)
        pages["kv cache"] = shadow.Pages(call["mla_kv_cache"], call["slot_mapping"][:tokens], record)
        theirs["mla_kv_cache"] = pages["kv cache"].copy
        theirs["slot_mapping"] = pages["kv cache"].slots
        if call["has_indexer"]:
            slots = call["slot_mapping"] if call["indexer_slot_mapping"] is None else call["indexer_slot_mapping"]
            index_record = dsa.INDEX_RECORDS[_index_record()]
            pages["indexer cache"] = shadow.Pages(call["indexer_k_cache"], slots[:tokens], index_record)
            theirs["indexer_k_cache"] = pages["indexer cache"].copy
            theirs["indexer_slot_mapping"] = pages["indexer cache"].slots
    ours = _norm_rope(call)
    shadow.compare(op, "q latent", layer, ours, engine.fused_norm_rope(**theirs), norm=True)
    if call["has_indexer"]:
        shadow.compare(op, "top-k buffer", layer, top_k, theirs["topk_indices_buffer"])
    if call["kv_c_out"] is not None:
        shadow.compare(op, "kv latent", layer, call["kv_c_out"], theirs["kv_c_out"], norm=True)
        shadow.compare(op, "rotated key", layer, call["k_pe_out"], theirs["k_pe_out"])
    for name, copied in pages.items():
        copied.compare(op, name, layer, norm=True)
    return ours


def _poisoned(x: Tensor) -> Tensor:
    return torch.empty_like(x).view(torch.uint8).fill_(shadow.POISON).view(x.dtype)


# -- the query -------------------------------------------------------------------------------------------------


def bmm(*args: Any, **kwargs: Any) -> Tensor:
    """``torch.bmm``; the product with a layer's ``W_UK_T`` goes into the query buffer."""
    layer = thread.layer
    if len(args) == 2 and not kwargs and layer is not None and args[1] is layer.W_UK_T:
        buffer = query_buffer(layer)
        tokens = args[0].shape[1]
        if buffer is not None and tokens <= buffer.shape[0]:
            packed = dsa.absorb_query(args[0].transpose(0, 1), args[1], out=buffer[:tokens])
            front = packed[:, : args[0].shape[0], : dsa.LATENT_DIM]
            if shadow.active():
                shadow.refuse_capture()
                shadow.compare("absorb", "latent", layer_name(), front.transpose(0, 1), torch.bmm(*args))
            return front.transpose(0, 1)
    product: Tensor = torch.bmm(*args, **kwargs)
    return product


def fused_q(
    positions: Tensor,
    q_pe: Tensor,
    q_pe_cos_sin_cache: Tensor,
    index_q: Tensor | None,
    index_q_cos_sin_cache: Tensor | None,
    ql_nope: Tensor,
    q_scale: Tensor,
    index_weights: Tensor | None,
    index_weights_softmax_scale: float,
    index_weights_head_scale: float,
    has_indexer: bool = True,
    index_rope_interleave: bool = False,
    quantize_mqa: bool = True,
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """The engine's function of this name: the indexer's query and weights, and the main query.

    A bf16 main query is its rotated dims alone, which lie in the query buffer where ``ql_nope`` does.
    """
    call: dict[str, Any] = locals()
    reason = _query_is_not_ours(call)
    if reason is not None:
        note("fused_q", reason)
        result: tuple[Tensor, Tensor, Tensor] = engine.fused_q(**call)
        return result
    ours = _query(call)
    if shadow.active() and not thread.warming:
        _shadow_query(call, ours)
    return ours


def _query_is_not_ours(call: dict[str, Any]) -> str | None:
    if call["q_pe"].shape[-1] != dsa.ROPE_DIM:
        return f"{call['q_pe'].shape[-1]} rotated dims"
    if call["quantize_mqa"] and call["ql_nope"].shape[-1] != dsa.LATENT_DIM:
        return f"a latent of {call['ql_nope'].shape[-1]} dims"
    if call["has_indexer"] and call["index_q"].shape[-1] != dsa.INDEX_DIM:
        return f"an indexer of {call['index_q'].shape[-1]} dims"
    if call["q_pe"].dtype != torch.bfloat16:
        return f"activations of {call['q_pe'].dtype}"
    return None


def _query(call: dict[str, Any]) -> tuple[Tensor | None, Tensor | None, Tensor]:
    q_pe, latent = call["q_pe"], call["ql_nope"]
    index: dict[str, Any] = {}
    if call["has_indexer"]:
        index = {
            "index_query": call["index_q"],
            "index_weights": call["index_weights"],
            "index_pairing": _pairing(call),
            "index_rope_table": call["index_q_cos_sin_cache"],
            "softmax_scale": call["index_weights_softmax_scale"],
            "head_scale": call["index_weights_head_scale"],
        }
    step = (call["positions"], call["q_pe_cos_sin_cache"])
    if call["quantize_mqa"]:
        plan, done = "packed e4m3", dsa.query(q_pe, latent, *step, query_scale=call["q_scale"], **index)
        main = done.query
    elif (buffer := in_buffer(latent, thread.layer)) is not None:
        plan = f"in the buffer, {q_pe.shape[1]} of {buffer.shape[1]} heads"
        done = dsa.query(q_pe, None, *step, padded_heads=buffer.shape[1], out=buffer, **index)
        main = buffer[:, : q_pe.shape[1], dsa.LATENT_DIM :]
    else:
        plan, done = "rotated dims alone", dsa.query(q_pe, None, *step, form="pair", **index)
        main = done.q_pe
    if report.tracing() and not thread.warming:
        report.count("fused_q", plan + (", indexer" if call["has_indexer"] else ""))
    assert main is not None
    return done.index_query, done.index_weights, main


def _shadow_query(call: dict[str, Any], ours: tuple[Tensor | None, Tensor | None, Tensor]) -> None:
    shadow.refuse_capture()
    layer = layer_name()
    theirs = engine.fused_q(**call)
    index_query, index_weights, main = ours
    if index_query is not None and index_weights is not None:
        shadow.compare_index_query("fused_q", layer, (index_query, index_weights), theirs[:2])
    if main is not None:
        quotient = functools.partial(_quotient, call) if call["quantize_mqa"] else None
        shadow.compare("fused_q", "main query", layer, main, theirs[2], quotient=quotient)
    buffer = in_buffer(call["ql_nope"], thread.layer)
    if buffer is not None and buffer.shape[1] > (heads := call["q_pe"].shape[1]):
        tail = buffer[:, heads:]
        shadow.compare("fused_q", "padding heads", layer, tail, torch.zeros_like(tail))


def _quotient(call: dict[str, Any], tokens: Tensor) -> Tensor:
    """What the e4m3 main queries of some tokens are rounded from."""
    q_pe, latent, positions = call["q_pe"][tokens], call["ql_nope"][tokens], call["positions"][tokens]
    table, scale = call["q_pe_cos_sin_cache"], call["q_scale"]
    return reference.query_quotient(q_pe.cpu(), latent.cpu(), positions.cpu(), table.cpu(), scale.cpu())


def note(op: str, reason: str) -> None:
    report.once(f"preattn: {op} runs the engine's own code: {reason}")
    if report.tracing():
        report.count(op, f"the engine's own: {reason}")
