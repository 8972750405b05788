"""What the plug-in says and counts: log lines, each reason once, and the tallies of this process's rank."""

from __future__ import annotations

import logging
import os
from collections import Counter
from functools import cache
from multiprocessing.util import Finalize
from typing import Any

logger = logging.getLogger("vllm.preattn")
"""Below the engine's logger, whose handlers and level it shares."""

_said: set[str] = set()
_plans: Counter[tuple[str, str]] = Counter()
_finalizer: Finalize | None = None
_rank: str | None = None


def asked(variable: str) -> bool:
    """Whether an environment variable is set to anything but nothing and ``0``."""
    return os.environ.get(variable, "") not in ("", "0")


@cache
def tracing() -> bool:
    """Whether calls are counted by plan: ``PREATTN_TRACE``, looked up once."""
    return asked("PREATTN_TRACE")


def once(message: str, *, level: int = logging.INFO) -> None:
    """Log a message the first time it comes up in this process."""
    if message not in _said:
        _said.add(message)
        logger.log(level, "%s", message)


def count(op: str, plan: str) -> None:
    """Count a call of an op under the plan that it ran."""
    _plans[op, plan] += 1
    at_exit()


def rank() -> str:
    """Which process of the engine this is: the rank in the default group, or the process id."""
    global _rank
    if _rank is None:
        import torch.distributed

        if torch.distributed.is_available() and torch.distributed.is_initialized():
            _rank = f"rank {torch.distributed.get_rank()}"
        else:
            _rank = f"rank {os.environ['RANK']}" if "RANK" in os.environ else f"process {os.getpid()}"
    return _rank


def at_exit() -> None:
    """See to it that :func:`say` runs when this process ends, in a worker that was forked too."""
    global _finalizer
    if _finalizer is None:
        rank()  # while the process group is there
        _finalizer = Finalize(None, say, exitpriority=100)


def plans() -> dict[str, dict[str, int]]:
    """Calls of each op under each plan."""
    found: dict[str, dict[str, int]] = {}
    for (op, plan), calls in sorted(_plans.items()):
        found.setdefault(op, {})[plan] = calls
    return found


def summary() -> dict[str, Any]:
    """The plans and the shadow tallies of this process."""
    from . import shadow

    return {"rank": rank(), "plans": plans(), "shadow": shadow.as_dict()}


def say() -> None:
    """Log the plans, where they were traced, and the shadow tallies."""
    from . import shadow

    if tracing():
        for op, found in plans().items():
            for plan, calls in found.items():
                logger.info("preattn trace, %s: %s: %s: %d calls", rank(), op, plan, calls)
    for line, clean in shadow.lines():
        logger.log(logging.INFO if clean else logging.ERROR, "preattn shadow, %s: %s", rank(), line)


def forget() -> None:
    """Drop every count, shadow mode's too, and what was said, and look the environment up again."""
    tracing.cache_clear()
    _said.clear()
    if _finalizer is not None:
        _finalizer.cancel()
    _begin()


def _begin() -> None:
    """Count from nothing: a forked process reports what it does itself, under its own name and at its own end."""
    global _finalizer, _rank
    from . import shadow

    _plans.clear()
    shadow.forget()
    _finalizer = _rank = None


os.register_at_fork(after_in_child=_begin)
