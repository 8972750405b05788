"""The registry of cases: one list that tests, bench, tuning and warm-up draw from.

A :class:`Case` describes one use of one op; ``case.build(tokens)`` makes a :class:`Call` of it, deterministic
in tokens and seed, with every byte the op may write poisoned first. Nothing is fast but untested, or tested
but never warmed.
"""

from __future__ import annotations

from . import dsa, v4
from .base import CANARY, Call, Case

__all__ = ["CANARY", "CASES", "Call", "Case"]

CASES: tuple[Case, ...] = (
    *v4.QUERY_CASES,
    *v4.PAD_CASES,
    *v4.KV_CASES,
    *v4.PROJECT_CASES,
    *dsa.QUERY_CASES,
    *dsa.ABSORB_CASES,
    *dsa.NORM_ROPE_CASES,
)
