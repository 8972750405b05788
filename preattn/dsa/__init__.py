"""The DSA prologue (DeepSeek-V3.2, GLM-5.x): ``norm_rope_insert``, ``absorb_query``, ``query``.

In a layer's order: norm the latents and store the keys; (outside: ``q_b_proj``;) absorb ``W_UK`` into the
query, straight into the packed buffer; rotate what is left of the query into that buffer's tail and quantise
the indexer's query.

Each public function validates, allocates what it returns and calls a registered op that writes into given
tensors. On CUDA tensors the op launches Triton kernels; on CPU tensors it runs the reference, or, where
``TRITON_INTERPRET=1`` is set, the same kernels in Triton's interpreter.
"""

from .absorb import absorb_query
from .arguments import INDEX_DIM, LATENT_DIM, ROPE_DIM
from .norm_rope import INDEX_RECORDS, NO_ROPE_RECORDS, RECORDS, Latents, norm_rope_insert
from .query import Query, QueryForm, query

__all__ = [
    "INDEX_DIM",
    "INDEX_RECORDS",
    "LATENT_DIM",
    "NO_ROPE_RECORDS",
    "RECORDS",
    "ROPE_DIM",
    "Latents",
    "Query",
    "QueryForm",
    "absorb_query",
    "norm_rope_insert",
    "query",
]
