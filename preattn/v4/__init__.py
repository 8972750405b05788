"""The DeepSeek-V4 / V4.1 prologue: ``query_kv_insert``, ``kv_insert``, ``pad_query``; with its
projection, ``project_query_kv_insert``, ``project_query``.

Each public function validates, allocates what it returns and calls a registered op that writes into given
tensors. On CUDA tensors the op launches Triton kernels; on CPU tensors it runs the reference, or, where
``TRITON_INTERPRET=1`` is set, the same kernels in Triton's interpreter.
"""

from .project import project_query, project_query_kv_insert, weight_kind
from .query_kv import ACTIVATIONS, HEAD_DIM, RECORDS, kv_insert, pad_query, query_kv_insert

__all__ = [
    "ACTIVATIONS",
    "HEAD_DIM",
    "RECORDS",
    "kv_insert",
    "pad_query",
    "project_query",
    "project_query_kv_insert",
    "query_kv_insert",
    "weight_kind",
]
