"""vLLM's own DSA kernels beside ours, both in Triton's interpreter on the CPU; run by ``test_vllm_plugin.py``.

The interpreter truncates where a GPU rounds to bf16, and its e4m3 is off likewise: those two conversions are torch's
here. It fuses no multiply-add either, so what RoPE leaves may be one step apart in rare elements: the seed has none.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import numpy as np
import torch
import triton.language as tl
import triton.runtime.interpreter as interpreter

from preattn.integrations.vllm import dsa, layers, patching, shadow

_convert = interpreter._convert_float


def convert(values: Any, source: Any, target: Any, rounding: Any) -> Any:
    if source == tl.float32 and target in (tl.bfloat16, tl.float8e4nv):
        exact = torch.from_numpy(np.ascontiguousarray(values).view(np.float32))
        if target == tl.bfloat16:
            return exact.bfloat16().view(torch.int16).numpy().view(np.uint16)
        return exact.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    return _convert(values, source, target, rounding)


interpreter._convert_float = convert
WIDTHS = {"fp8_ds_mla": (656, torch.uint8), "auto": (576, torch.bfloat16), "fp8": (576, torch.uint8)}


def step(
    kernels: Any, tokens: int, rank: int, *, interleaved: bool, indexer: bool, dtype: str, stores: bool, quantised: bool
) -> None:
    """One layer's two calls, on views as the model makes them."""
    heads, index_heads = 4, 8
    q_c, kv_c, k_pe = torch.randn(tokens, rank + 576).bfloat16().split([rank, 512, 64], -1)
    keys = torch.randn(tokens, 128 + index_heads).bfloat16()
    width, kind = WIDTHS[dtype]
    cache = torch.zeros(6, 64, width, dtype=kind)
    index_cache = torch.full((6, 64, 132), 0xA5, dtype=torch.uint8)
    table, positions = torch.randn(256, 64).bfloat16(), torch.randint(0, 256, (tokens,))
    slots = torch.randperm(6 * 64)[:tokens].clone()
    slots[tokens // 2] = -1
    kernels.fused_norm_rope(
        positions,
        q_c,
        torch.randn(rank).bfloat16(),
        1e-6,
        kv_c,
        torch.randn(512).bfloat16(),
        1e-6,
        k_pe,
        table,
        keys[:, :128] if indexer else None,
        torch.randn(128) if indexer else None,
        torch.randn(128) if indexer else None,
        1e-6,
        table if indexer else None,
        torch.zeros(tokens + 5, 2048, dtype=torch.int32),
        slot_mapping=slots if stores else None,
        indexer_slot_mapping=slots if indexer and stores else None,
        indexer_k_cache=index_cache if indexer and stores else None,
        mla_kv_cache=cache if stores else None,
        mla_kv_cache_dtype=dtype,
        mla_k_scale=torch.tensor(0.5 if dtype == "fp8" else 1.0) if stores else None,
        skip_scale=dtype != "fp8",
        has_indexer=indexer,
        index_rope_interleave=interleaved,
        kv_c_out=torch.empty(tokens, 512, dtype=torch.bfloat16),
        k_pe_out=torch.empty(tokens, 64, dtype=torch.bfloat16),
    )
    query = torch.randn(tokens, heads, 192).bfloat16()
    latent = torch.randn(heads, tokens, 512).bfloat16().transpose(0, 1)
    kernels.fused_q(
        positions,
        query[..., 128:],
        table,
        torch.randn(tokens, index_heads, 128).bfloat16() if indexer else None,
        table if indexer else None,
        latent if quantised else query[..., :128],
        torch.tensor(0.37),
        keys[:, 128:] if indexer else None,
        0.1,
        0.5,
        has_indexer=indexer,
        index_rope_interleave=interleaved,
        quantize_mqa=quantised,
    )


def main() -> int:
    kernels = importlib.import_module(layers.KERNELS)
    dsa.patch_kernels(kernels, patching.Patches())
    torch.manual_seed(0)
    common = {"indexer": True, "stores": True, "quantised": False}
    for rank, interleaved, dtype, more in (
        (1536, False, "fp8_ds_mla", {}),
        (2048, True, "fp8_ds_mla", {"indexer": False}),
        (256, True, "auto", {}),
        (256, False, "fp8", {"quantised": True}),
        (256, False, "fp8_ds_mla", {"stores": False}),
    ):
        step(kernels, 3, rank, interleaved=interleaved, dtype=dtype, **{**common, **more})
    for line, _ in shadow.lines():
        print(line)
    lines = list(shadow.lines())
    return 0 if len(lines) == 9 and all(clean for _, clean in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
