"""The kernels of the V4 / V4.1 prologue: KV rows to records, the query to what attention reads, alone or projected."""

from .kv import launch_kv
from .project import launch_project
from .query_kv import launch_pad, launch_query_kv

__all__ = ["launch_kv", "launch_pad", "launch_project", "launch_query_kv"]
