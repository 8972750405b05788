"""The FlashMLA sparse backend: it reads the query buffer as it is, and leaves its padded result where it is."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import report, shadow
from .layers import engine, in_buffer, thread


def forward_mqa(
    self: Any,
    q: Tensor | tuple[Tensor, Tensor],
    kv_c_and_k_pe_cache: Tensor,
    attn_metadata: Any,
    layer: Any,
) -> tuple[Tensor, Tensor | None]:
    """``FlashMLASparseImpl.forward_mqa``; a pair that lies in the query buffer is read as the buffer it is."""
    buffer = in_buffer(q[0], layer) if isinstance(q, tuple) else None
    if buffer is None:
        result: tuple[Tensor, Tensor | None] = engine.forward_mqa(self, q, kv_c_and_k_pe_cache, attn_metadata, layer)
        return result
    heads = q[0].shape[1]
    thread.packed = True
    try:
        padded, lse = engine.forward_mqa(self, buffer, kv_c_and_k_pe_cache, attn_metadata, layer)
    finally:
        thread.packed = False
    out = padded[:, :heads]
    if report.tracing():
        report.count("forward_mqa", f"the buffer as it is, {heads} of {buffer.shape[1]} heads")
    if shadow.active():
        shadow.refuse_capture()
        out = out.clone()  # the engine's own call uses the same workspace
        pair = (q[0].contiguous(), q[1].contiguous())
        theirs, _ = engine.forward_mqa(self, pair, kv_c_and_k_pe_cache, attn_metadata, layer)
        shadow.compare("forward_mqa", "attention", str(layer.layer_name), out, theirs)
    return out, lse


def current_workspace_manager() -> Any:
    """The backend's workspace manager; while it reads the query buffer, one that gives its result a single place."""
    manager = engine.workspace_manager()
    return _OneResult(manager) if thread.packed else manager


class _OneResult:
    """Gives the backend's padded result and its compact one the same memory.

    A query of all the heads that attention is compiled for has a result of as many: there is nothing to compact, and
    torch's copy of a tensor onto itself launches nothing. The views asked for end in (padded query, padded result,
    compact result) where the backend has both.
    """

    def __init__(self, manager: Any) -> None:
        self._manager = manager

    def get_simultaneous(self, *specs: tuple[tuple[int, ...], torch.dtype]) -> list[Tensor]:
        """The manager's views, the last but one twice."""
        views: list[Tensor] = self._manager.get_simultaneous(*specs)
        if len(views) >= 5:
            views[-1] = views[-2]
        return views
