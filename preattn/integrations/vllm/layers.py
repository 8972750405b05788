"""What the plug-in knows of a DSA layer, and the query buffer that the layers of a microbatch share."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ... import dsa
from ...backends import Agreement, negotiate
from ...geometry import geometry

KERNELS = "vllm.models.deepseek_v32.common.kernels"
ATTENTION = "vllm.models.deepseek_v32.attention"
FLASHMLA = "vllm.v1.attention.backends.mla.flashmla_sparse"
WORKSPACE = "vllm.v1.worker.workspace"

BACKENDS = {
    "FLASHMLA_SPARSE": "flashmla-sparse",
    "FLASHINFER_MLA_SPARSE": "flashinfer-sparse-trtllm",
    "FLASHINFER_MLA_SPARSE_SM90": "flashinfer-sparse-sm90",
    "FLASH_ATTN_MLA_SPARSE": "flashattention-mla-sparse",
    "FLASH_ATTN_MLA_SPARSE_FA4": "flashattention4-mla-sparse",
}
"""The engine's names of attention backends, and ours."""

RECORDS = {
    "fp8_ds_mla": "dsa_fp8",
    "auto": "bf16",
    "bfloat16": "bf16",
    "fp8": "fp8",
    "fp8_e4m3": "fp8",
}
"""The engine's names of cache dtypes, and the records they are."""

engine = SimpleNamespace()
"""What the replaced names held."""


class Thread(threading.local):
    """The layer that this thread is in: each microbatch of the engine has a thread."""

    layer: Any = None
    packed = False
    """Within a call of the backend that reads the query buffer."""
    warming = False


thread = Thread()


@dataclass
class Layer:
    """What the plug-in keeps of an attention layer."""

    packs: str | None = None
    """Why the query is not packed; None where it is."""
    heads: int = 0
    padded_heads: int = 0
    max_tokens: int = 0
    registered: bool = False
    """The engine's JIT warm-up compiles what the layer launches."""


@contextmanager
def starting(what: str) -> Iterator[None]:
    """Something that the engine's start waits for: where it fails, the engine is put back as it was, and starts."""
    try:
        yield
    except Exception as error:
        from . import plugin  # it imports what imports this

        plugin.refuse(f"{type(error).__name__} {what}: {error}", trace=True)


def put_back() -> bool:
    """Whether the engine has been put back: what it was given before, its warm-up registry for one, it still has."""
    from . import plugin

    return plugin.refused()


def describe(layer: Any) -> Layer:
    """What the plug-in has to know of a layer, from its own attributes."""
    state, impl = Layer(), layer.impl
    agreed = _negotiated(layer)
    if isinstance(agreed, str):
        state.packs = agreed
    elif agreed.form == "pair":
        state.packs = f"{agreed.backend.name} reads the latent and the rotated dims apart"
    elif layer._fp8_query:
        state.packs = "it is e4m3, packed by fused_q itself"
    elif layer.attn_backend.get_name() != "FLASHMLA_SPARSE" or not hasattr(engine, "forward_mqa"):
        state.packs = f"{agreed.backend.name} takes it as the engine hands it over"
    elif layer.use_pcp or impl.dcp_world_size > 1:
        state.packs = "context parallelism gathers it first"
    elif impl.q_head_size != dsa.LATENT_DIM + dsa.ROPE_DIM:
        state.packs = f"its heads have {impl.q_head_size} dims"
    else:
        state.heads, state.padded_heads = layer.num_local_heads, agreed.padded_heads
        state.max_tokens = impl.workspace_specs[0][0][0]
    return state


def _negotiated(layer: Any) -> Agreement | str:
    """What the layer's backend reads, or why that is not known."""
    name, dtype = layer.attn_backend.get_name(), layer.kv_cache_dtype
    if name not in BACKENDS or dtype not in RECORDS:
        return f"{name} with a cache of {dtype} is not among those known"
    if (layer.kv_lora_rank, layer.qk_rope_head_dim) != (dsa.LATENT_DIM, dsa.ROPE_DIM):
        return f"a key has {layer.kv_lora_rank} + {layer.qk_rope_head_dim} dims"
    model = replace(
        geometry("glm-5" if layer._index_rope_interleave else "deepseek-v3.2"),
        heads=layer.num_local_heads,
        q_rank=layer.q_lora_rank,
        nope_dim=layer.qk_nope_head_dim,
        v_dim=layer.v_head_dim,
    )
    try:
        return negotiate(model, BACKENDS[name], record=RECORDS[dtype])
    except ValueError as refusal:
        return str(refusal)


def state_of(layer: Any) -> Layer | None:
    """What the plug-in keeps of a layer; None for one that it did not see being built."""
    found: Layer | None = None if layer is None else layer.__dict__.get("_preattn")
    return found


def layer_name() -> str:
    """The engine's name of the layer that this thread is in."""
    return "unknown" if thread.layer is None else str(thread.layer.layer_name)


def query_buffer(layer: Any) -> Tensor | None:
    """The query buffer of a layer's microbatch, [max tokens, padded heads, 576], or None where it is not packed."""
    state = state_of(layer)
    if state is None or state.packs is not None or getattr(layer, "hisparse_cache", None) is not None:
        return None
    shape = (state.max_tokens, state.padded_heads, dsa.LATENT_DIM + dsa.ROPE_DIM)
    return persistent(engine.workspace_manager(), state.heads, shape)


def persistent(manager: Any, heads: int, shape: tuple[int, int, int]) -> Tensor | None:
    """A workspace manager's zeroed bf16 buffer, of its microbatch and lane, for queries of so many heads.

    None where there is none yet and the manager makes no more: it is locked once graphs are captured, and a second
    microbatch may come later. Head counts have buffers of their own, or fewer heads would read what more have left.
    """
    try:
        found: Tensor = manager.get_persistent(("preattn query", heads, shape), shape, torch.bfloat16, zero_init=True)
    except AssertionError:
        return None
    return found


def in_buffer(latent: Tensor, layer: Any) -> Tensor | None:
    """The query buffer, where ``latent`` is what the absorb matmul has left in its front."""
    buffer = query_buffer(layer)
    if buffer is None or latent.data_ptr() != buffer.data_ptr() or latent.dtype != buffer.dtype:
        return None
    return buffer[: latent.shape[0]]
