"""DeepSeek-V3.2 and GLM-5.x inside vLLM: what takes the place of the model's own prologue.

Three things are replaced. ``fused_norm_rope`` and ``fused_q`` become :func:`preattn.dsa.norm_rope_insert` and
:func:`preattn.dsa.query`. The matmul between them, ``q_nope @ W_UK_T``, writes into the front of one query buffer that
has the heads attention is compiled for, ``fused_q`` rotates its tail, and the FlashMLA sparse backend reads that buffer
as it is: no concatenation, no padding, and no copy of a padded result. Any other backend is handed what it expects,
the pair or the packed e4m3 query.

The buffer is the workspace manager's: one for each microbatch and lane, made and zeroed at its first step, which for
the first microbatch is the engine's profiling run, so that it is in the memory plan. Its layers use it in turn.

What a replaced name does not cover runs the engine's own code, and the trace says why.
"""

from __future__ import annotations

import functools
import logging
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from . import flashmla, ops, report, warm
from .layers import ATTENTION, FLASHMLA, KERNELS, WORKSPACE, describe, engine, starting, state_of, thread
from .patching import Occupied, Patches, whence


def patch_kernels(module: ModuleType, patches: Patches) -> None:
    """Replace both ops where they are defined."""
    engine.fused_norm_rope = patches.replace(module, "fused_norm_rope", ops.fused_norm_rope, defined_in=KERNELS)
    engine.fused_q = patches.replace(module, "fused_q", ops.fused_q, defined_in=KERNELS)
    engine.mx_scales = functools.cache(module.mqa_logits_use_mx_scales)


def patch_attention(module: ModuleType, patches: Patches) -> None:
    """Replace both ops where the model imported them, its absorb matmul, and what a layer does first and last."""
    for name in ("fused_norm_rope", "fused_q"):
        ours, theirs = getattr(ops, name), getattr(engine, name)
        patches.replace(module, name, ours, defined_in=KERNELS, instead_of=theirs)
    held = patches.replace(module, "torch", _Torch())
    if held is not torch:  # a replacement of somebody else's, which ours would hide
        raise Occupied(f"{ATTENTION}.torch is not torch: {whence(held)} replaced it")
    owner = module.DeepseekV32Attention
    engine.init = patches.replace(owner, "__init__", init, defined_in=ATTENTION)
    engine.forward = patches.replace(owner, "forward", forward, defined_in=ATTENTION)
    engine.bind_kv_cache = patches.replace(owner, "bind_kv_cache", bind_kv_cache)


def patch_flashmla(module: ModuleType, patches: Patches) -> None:
    """Let the backend read the query buffer, and leave its padded result where it is."""
    owner = module.FlashMLASparseImpl
    engine.forward_mqa = patches.replace(owner, "forward_mqa", flashmla.forward_mqa, defined_in=FLASHMLA)
    engine.workspace_manager = patches.replace(
        module, "current_workspace_manager", flashmla.current_workspace_manager, defined_in=WORKSPACE
    )


class _Torch(ModuleType):
    """``torch`` as the attention module sees it: with a ``bmm`` that knows the absorb matmul.

    The module calls ``torch.bmm`` in the middle of a method; its global name is the one place to reach it.
    """

    def __init__(self) -> None:
        super().__init__("torch")
        self.__dict__.update(torch.__dict__)
        self.bmm = ops.bmm

    def __getattr__(self, name: str) -> Any:  # what torch itself makes on demand
        return getattr(torch, name)


def init(self: Any, *args: Any, **kwargs: Any) -> None:
    """``DeepseekV32Attention.__init__``; then settle what the layer's query looks like, and have it warmed up."""
    engine.init(self, *args, **kwargs)
    with starting(f"while looking at {self.layer_name}"):
        from . import plugin  # it imports this

        for name in plugin.taken():
            report.once(f"preattn no longer holds {name}", level=logging.WARNING)
        state = describe(self)
        self.__dict__["_preattn"] = state
        if state.packs is not None:
            report.once(f"preattn: the query of {self.layer_name} is not packed: {state.packs}")
        from vllm.model_executor.warmup.jit_warmup import JitWarmupRegistry

        if self._vllm_config.kernel_config.enable_jit_warmup and JitWarmupRegistry._active.get() is not None:
            JitWarmupRegistry.register(warm.JIT_WARMUP, self)
            state.registered = True


def forward(self: Any, positions: Tensor, hidden_states: Tensor) -> Tensor:
    """``DeepseekV32Attention.forward``, with the layer known to what it calls."""
    outer, thread.layer = thread.layer, self
    try:
        result: Tensor = engine.forward(self, positions, hidden_states)
        return result
    finally:
        thread.layer = outer


def bind_kv_cache(self: Any, kv_cache: Tensor) -> None:
    """``bind_kv_cache``; then compile for this cache, unless the engine's own warm-up will."""
    engine.bind_kv_cache(self, kv_cache)
    state = state_of(self)
    if state is None or state.registered:
        return
    with starting(f"while compiling for {self.layer_name}"):
        compiled = warm.warm(self)
        if compiled:
            report.logger.info("preattn, %s: %d variants compiled for %s", report.rank(), compiled, self.layer_name)
