"""The ops that engines ship, called on a case's own inputs: an installed vLLM, or a folder of its parts.

The folder holds ``vllm_peer.py`` with ``load()`` returning the compiled op namespace and the Triton module.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..cases.base import Call


@dataclass(frozen=True)
class Vllm:
    """vLLM's compiled ops (``ops``) and Triton DSA kernels (``kernels``)."""

    ops: Any
    kernels: Any
    version: str
    switches_pdl: bool = False
    """Programmatic launch can be switched for a call; an installed engine decides for itself."""


def load(folder: Path | None) -> Vllm | None:
    """Load the peer from a folder, or from an installed vLLM; None where there is neither.

    Raises:
        FileNotFoundError: a folder was named and holds no ``vllm_peer.py``.
    """
    if folder is not None:
        if not (folder / "vllm_peer.py").is_file():
            raise FileNotFoundError(f"{folder / 'vllm_peer.py'}: no such file")
        sys.path.insert(0, str(folder))
        ops, kernels = importlib.import_module("vllm_peer").load()
        version = getattr(sys.modules["vllm_peer"], "VERSION", "0.33.0")  # of whose parts a folder without one is made
        return Vllm(ops, kernels, version, switches_pdl=True)
    try:
        vllm = importlib.import_module("vllm")
        importlib.import_module("vllm._custom_ops")
        kernels = importlib.import_module("vllm.models.deepseek_v32.common.kernels")
    except ImportError:
        return None
    return Vllm(torch.ops._C, kernels, vllm.__version__)


def _pages(cache: Tensor) -> Tensor:
    raw = cache.view(torch.uint8)
    return raw.as_strided((raw.shape[0], raw.shape[1] * raw.shape[2]), (raw.stride(0), 1))


def v4_query_kv(vllm: Vllm, call: Call) -> Callable[[], Tensor | None] | None:
    """vLLM's fused op on the inputs of a V4 call; None where it has none for them."""
    a = call.arguments
    query, cache, block_size = a["query"], a["cache"], a["cache"].shape[1]
    step = (a["slots"], a["positions"], a["rope_table"])
    norm, eps = a["query_norm_eps"] is not None, a["query_norm_eps"] or 1e-6
    if a["record"] not in ("v41_mxfp8", "v4_fp8") or a["slots"].dtype != torch.int64:
        return None
    pages, mxfp8 = _pages(cache), a["record"] == "v41_mxfp8"
    if a["padded_heads"] == 0:
        paged = cache.view(torch.uint8)
        return lambda: vllm.ops.fused_deepseek_v4_kv_rope_insert(a["kv"], paged, *step, block_size, None, mxfp8)
    return lambda: vllm.ops.fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert(
        query,
        a["kv"],
        pages,
        *step,
        a["padded_heads"],
        eps,
        block_size,
        norm,
        mxfp8,
        a["query_rope"],
        a["layout"] == "chunk_interleaved",
    )


def _pdl(enabled: bool) -> None:
    """Switch the stub platform's programmatic launch; an installed vLLM decides for itself."""
    platforms = sys.modules.get("vllm.platforms")
    if platforms is not None and hasattr(platforms, "PDL"):
        setattr(platforms, "PDL", enabled)  # noqa: B010  the stub's own name


def dsa_query(
    vllm: Vllm, call: Call, *, pdl: bool = False, concatenate: bool = False
) -> Callable[[], tuple[Tensor, ...]] | None:
    """vLLM's ``fused_q`` on the inputs of a DSA query call, and the concatenation that a packed query takes there.

    Returns (main query, indexer query, indexer weights); None where it has no such form.
    """
    a = call.arguments
    if a["q_pe"].shape[-1] != 64 or a["positions"].dtype != torch.int64 or a["rope_output"] != "interleaved":
        return None
    fp8 = a["query_scale"] is not None
    indexed = a["index_query"] is not None
    latent = a["latent"] if a["latent"] is not None else a["out"][:, : a["q_pe"].shape[1], :512]
    if latent.dtype != torch.bfloat16 or (indexed and a["index_weights"].dtype != torch.float32):
        return None
    scale = a["query_scale"] if fp8 else torch.ones(1, device=latent.device)
    table = a["rope_table"]
    dense_latent = latent.transpose(0, 1).contiguous().transpose(0, 1)  # as a batched matmul leaves it

    def run() -> tuple[Tensor, ...]:
        _pdl(pdl)
        index_query, weights, query = vllm.kernels.fused_q(
            a["positions"],
            a["q_pe"],
            table,
            a["index_query"],
            (a["index_rope_table"] if a["index_rope_table"] is not None else table) if indexed else None,
            dense_latent,
            scale,
            a["index_weights"],
            a.get("softmax_scale", 1.0),
            a.get("head_scale", 1.0),
            indexed,
            a.get("index_pairing") == "interleaved",
            fp8,
        )
        if concatenate:
            query = torch.cat((dense_latent, query), dim=-1)
        return (query, index_query, weights) if indexed else (query,)

    return run


_CACHE_DTYPES = {"bf16": "auto", "fp8": "fp8", "dsa_fp8": "fp8_ds_mla"}


def dsa_norm_rope(vllm: Vllm, call: Call, *, pdl: bool = False) -> Callable[[], Tensor] | None:
    """vLLM's ``fused_norm_rope`` on the inputs of a call; None where it has no such form."""
    a = call.arguments
    if a["k_pe"].shape[-1] != 64 or a["slots"] is None or a["slots"].dtype != torch.int64 or a["return_kv"]:
        return None
    indexed = a.get("index_key") is not None
    table = a["rope_table"]
    index_cache = a.get("index_cache")
    if index_cache is not None:
        index_cache = index_cache.view(torch.uint8)
    top_k = a.get("top_k")
    if top_k is None:
        top_k = torch.empty(1, 1, dtype=torch.int32, device=table.device)
    scale = a["kv_scale"] if a["kv_scale"] is not None else torch.ones(1, device=table.device)

    def run() -> Tensor:
        _pdl(pdl)
        return vllm.kernels.fused_norm_rope(  # type: ignore[no-any-return]
            a["positions"],
            a["q_latent"],
            a["q_weight"],
            a["q_eps"],
            a["kv_latent"],
            a["kv_weight"],
            a["kv_eps"],
            a["k_pe"],
            table,
            a.get("index_key"),
            a.get("index_weight"),
            a.get("index_bias"),
            a.get("index_eps", 1e-6),
            table if indexed else None,
            top_k,
            slot_mapping=a["slots"],
            indexer_k_cache=index_cache,
            mla_kv_cache=a["cache"],
            mla_kv_cache_dtype=_CACHE_DTYPES[a["record"]],
            mla_k_scale=scale,
            has_indexer=indexed,
            index_rope_interleave=a.get("index_pairing") == "interleaved",
        )

    return run
