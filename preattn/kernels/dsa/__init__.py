"""The kernels of the DSA prologue: latents and keys to records, the query to what attention reads; one launch each."""

from .absorb import launch_absorb
from .norm_rope import launch_norm_rope
from .query import launch_query

__all__ = ["launch_absorb", "launch_norm_rope", "launch_query"]
