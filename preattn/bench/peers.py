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
        return Vllm(ops, kernels, "0.33.0")
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
        return lambda: vllm.ops.fused_deepseek_v4_kv_rope_insert(a["kv"], pages, *step, block_size, None, mxfp8)
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
