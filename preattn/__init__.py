"""Attention prologues for DeepSeek's sparse-attention models: from the projections to what attention reads."""

from . import dsa, v4
from .backends import negotiate
from .dispatch import debug
from .formats import Record, cache_view, record
from .geometry import Geometry
from .layers import DsaPrologue, IndexerParts, V4Prologue
from .policy import Form, LaunchConfig, Plan, choose
from .warmup import warmup
from .workspace import QueryWorkspace, project_query

__version__ = "0.1.0"

__all__ = [
    "DsaPrologue",
    "Form",
    "Geometry",
    "IndexerParts",
    "LaunchConfig",
    "Plan",
    "QueryWorkspace",
    "Record",
    "V4Prologue",
    "cache_view",
    "choose",
    "debug",
    "dsa",
    "negotiate",
    "project_query",
    "record",
    "v4",
    "warmup",
]
