"""Attention prologues for DeepSeek's sparse-attention models: from the projections to what attention reads."""

from . import v4
from .formats import Record, cache_view, record
from .geometry import Geometry
from .policy import Form, LaunchConfig, Plan, choose
from .warmup import warmup

__version__ = "0.1.0"

__all__ = [
    "Form",
    "Geometry",
    "LaunchConfig",
    "Plan",
    "Record",
    "cache_view",
    "choose",
    "record",
    "v4",
    "warmup",
]
