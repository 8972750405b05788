"""The plug-in for vLLM: entry point ``preattn`` of the group ``vllm.general_plugins``.

The engine calls :func:`register` in each of its processes. Nothing is imported or patched until the engine imports
the module of a model that has a prologue of ours; other models run untouched. In the environment:

- ``VLLM_PLUGINS``: the engine's own list of plug-ins to load.
- ``PREATTN_DISABLE=1``: leave the engine as it is.
- ``PREATTN_SHADOW=1``: run the engine's own ops beside ours and compare (:mod:`.shadow`; needs ``enforce_eager``).
- ``PREATTN_TRACE=1``: count the calls of each op by the plan they ran, and say so at exit.
"""

from __future__ import annotations

from .plugin import register, unregister
from .report import summary

__all__ = ["register", "summary", "unregister"]
