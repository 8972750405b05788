"""Compiling what a DSA layer launches, before a request waits for it: by the engine's own JIT warm-up where it runs."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ... import dispatch, dsa, formats
from ...policy import STEP_SIZES
from . import ops
from .layers import put_back, query_buffer, starting, state_of, thread


class JitWarmup:
    """A layer's variants, as the engine's JIT warm-up registry asks for kernels to compile: keys, then each key."""

    def get_warmup_keys(self, layer: Any) -> list[Any]:
        """One key for all layers that launch the same; the registry compiles a key once."""
        if not put_back():
            with starting(f"while looking at {layer.layer_name}"):
                return [_Key(layer, _kind(layer))]
        return []

    def compile(self, compile_key: Any) -> None:
        """Compile what a key's layer launches."""
        if put_back():  # what an earlier key failed at
            return
        with starting(f"while compiling for {compile_key.layer.layer_name}"):
            warm(compile_key.layer)

    def compile_many(self, compile_keys: Any) -> None:
        """Compile several keys."""
        for key in compile_keys:
            self.compile(key)


@dataclass(frozen=True, eq=False)
class _Key:
    layer: Any
    kind: tuple[Any, ...]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self.kind == other.kind

    def __hash__(self) -> int:
        return hash(self.kind)


JIT_WARMUP = JitWarmup()


def _kind(layer: Any) -> tuple[Any, ...]:
    """What selects the variants that a layer launches."""
    indexer = layer.indexer if not layer.skip_topk else None
    return (
        layer.num_local_heads,
        layer.q_lora_rank,
        layer.kv_cache_dtype,
        tuple(layer.kv_cache.shape[1:]),
        layer._index_rope_interleave,
        layer._fp8_query,
        None if indexer is None else (indexer.n_head, indexer.topk_tokens, tuple(indexer.k_cache.kv_cache.shape[1:])),
        None if (state := state_of(layer)) is None else (state.packs, state.padded_heads),
    )


def warm(layer: Any) -> int:
    """Compile every variant that a layer's steps launch, and return how many were not compiled yet.

    The layer's own calls are made with launches held back (see :mod:`preattn.warmup`): for steps of every
    size, with and without slots, with the query in the buffer, apart, and quantised where the layer quantises it.
    """
    outer, thread.layer, thread.warming = thread.layer, layer, True
    try:
        with dispatch.hold() as launches:
            most = layer.topk_indices_buffer.shape[0]
            for tokens in sorted({min(size, most) for size in STEP_SIZES}):
                _calls(layer, tokens)
    finally:
        thread.layer, thread.warming = outer, False
    device = layer.q_a_layernorm.weight.device
    return sum([launch.prepare(device) for launch in launches])


def _calls(layer: Any, tokens: int) -> None:
    device = layer.q_a_layernorm.weight.device
    indexer = layer.indexer if layer.indexer is not None and not layer.skip_topk else None

    def rows(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.zeros(1, *shape, dtype=dtype, device=device).expand(tokens, *shape)

    positions = torch.zeros(tokens, dtype=torch.int64, device=device)
    table, rank, heads = layer.rotary_emb.cos_sin_cache, layer.q_lora_rank, layer.num_local_heads
    latents: dict[str, Any] = {
        "positions": positions,
        "q_c": rows(rank),
        "q_rms_norm_w": layer.q_a_layernorm.weight,
        "q_rms_eps": layer.q_a_layernorm.variance_epsilon,
        "kv_c": rows(layer.kv_lora_rank),
        "kv_rms_norm_w": layer.kv_a_layernorm.weight,
        "kv_rms_eps": layer.kv_a_layernorm.variance_epsilon,
        "k_pe": rows(layer.qk_rope_head_dim),
        "k_rope_cos_sin_cache": table,
        "index_k": None,
        "index_k_layer_norm_w": None,
        "index_k_layer_norm_bias": None,
        "index_k_layer_norm_eps": 1e-6,
        "index_k_rope_cos_sin_cache": None,
        "topk_indices_buffer": layer.topk_indices_buffer,
        "has_indexer": indexer is not None,
        "index_rope_interleave": layer._index_rope_interleave,
        "mla_kv_cache_dtype": layer.kv_cache_dtype,
        "skip_scale": layer._k_scale_float == 1.0,
        "kv_c_out": torch.empty(tokens, layer.kv_lora_rank, dtype=torch.bfloat16, device=device),
        "k_pe_out": torch.empty(tokens, layer.qk_rope_head_dim, dtype=torch.bfloat16, device=device),
    }
    query: dict[str, Any] = {
        "positions": positions,
        "q_pe": rows(heads, layer.qk_rope_head_dim),
        "q_pe_cos_sin_cache": table,
        "index_q": None,
        "index_q_cos_sin_cache": None,
        "q_scale": layer._q_scale,
        "index_weights": None,
        "index_weights_softmax_scale": 0.0,
        "index_weights_head_scale": 0.0,
        "has_indexer": indexer is not None,
        "index_rope_interleave": layer._index_rope_interleave,
    }
    if indexer is not None:
        index_table = layer.indexer_rope_emb.cos_sin_cache
        latents |= {
            "index_k": rows(indexer.head_dim),
            "index_k_layer_norm_w": indexer.k_norm.weight,
            "index_k_layer_norm_bias": indexer.k_norm.bias,
            "index_k_layer_norm_eps": indexer.k_norm.eps,
            "index_k_rope_cos_sin_cache": index_table,
            "indexer_cache_shuffled": indexer.k_cache.uses_shuffled_layout,
        }
        query |= {
            "index_q": rows(indexer.n_head, indexer.head_dim),
            "index_q_cos_sin_cache": index_table,
            "index_weights": rows(indexer.n_head),
        }
    if ops.norm_rope_is_not_ours(_complete(latents)) is None:
        ops.fused_norm_rope(**latents)
        if layer.kv_cache.numel():
            cached = {"mla_kv_cache": layer.kv_cache, "slot_mapping": positions, "mla_k_scale": layer._k_scale}
            if indexer is not None:
                cached["indexer_k_cache"] = _index_cache(layer, indexer)
            ops.fused_norm_rope(**latents, **cached)
    buffer = query_buffer(layer)
    nope = rows(heads, layer.qk_nope_head_dim)
    latent = rows(heads, dsa.LATENT_DIM)
    ops.fused_q(**query, ql_nope=nope, quantize_mqa=False)
    if buffer is not None:
        ops.fused_q(**query, ql_nope=buffer[:tokens, :heads, : dsa.LATENT_DIM], quantize_mqa=False)
    if layer._fp8_query:
        ops.fused_q(**query, ql_nope=latent, quantize_mqa=True)


def _complete(call: dict[str, Any]) -> dict[str, Any]:
    """A call's arguments with the defaults of those that it leaves out."""
    bound = inspect.signature(ops.fused_norm_rope).bind(**call)
    bound.apply_defaults()
    return bound.arguments


def _index_cache(layer: Any, indexer: Any) -> Tensor:
    """The indexer's cache; while only the layer's is bound, one page of as many tokens."""
    cache: Tensor = indexer.k_cache.kv_cache
    if cache.numel():
        return cache
    record = dsa.INDEX_RECORDS["index_fp8"]
    block_size = layer.kv_cache.shape[1]
    pool = torch.zeros(record.page_bytes(block_size), dtype=torch.uint8, device=layer.kv_cache.device)
    return formats.cache_view(pool, record, block_size=block_size)
