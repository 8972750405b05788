"""Registration of ops with torch, and the way an eager call takes past the dispatcher.

Every op writes into given tensors and returns None, so its fake does nothing. ``torch.compile`` and tracing
modes see the registered op with its declared mutations. A plain eager call goes straight to the same Python
function: a trip through the dispatcher costs tens of microseconds, more than many of these kernels run.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

_LIBRARY = torch.library.Library("preattn", "DEF")


def define_op(schema: str, function: Callable[..., None]) -> Callable[..., None]:
    """Register ``function`` as ``preattn::<schema>`` and return the callable that public functions use."""

    def without_grad(*args: Any) -> None:
        """An op writes into given memory and is not differentiated, whatever its arguments say."""
        if _debug.get() and not holding():
            looked_at(*args)
        elif torch.is_grad_enabled():
            torch._C._set_grad_enabled(False)  # all that torch.no_grad() does, at a tenth of its host time
            try:
                function(*args)
            finally:
                torch._C._set_grad_enabled(True)
        else:
            function(*args)

    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, without_grad, "CompositeExplicitAutograd")
    torch.library.register_fake(f"preattn::{name}", lambda *args, **kwargs: None, lib=_LIBRARY)
    op = getattr(torch.ops.preattn, name).default
    names = [argument.name for argument in op._schema.arguments]
    written = {argument.name for argument in op._schema.arguments if argument.alias_info is not None}

    def looked_at(*args: Any) -> None:
        """The call as debug mode makes it."""
        from . import debugging

        arguments = dict(zip(names, args, strict=True))
        with torch.no_grad():
            debugging.before(arguments, written)
            function(*args)
            debugging.after(arguments)

    def call(*args: Any) -> None:
        if torch.compiler.is_compiling() or _get_current_dispatch_mode() is not None:
            op(*args)
        else:
            without_grad(*args)

    return call


Backend = Literal["reference", "triton"]
_backend: ContextVar[Backend | None] = ContextVar("preattn_backend", default=None)


@contextmanager
def backend(name: Backend | None) -> Iterator[None]:
    """Within this context, in this thread, run ops with the reference or with the kernels.

    Without it GPU tensors take the kernels and CPU tensors the reference (with ``TRITON_INTERPRET=1``: the
    kernels, in Triton's interpreter).

    Raises:
        ValueError: unknown name.
    """
    if name not in (None, "reference", "triton"):
        raise ValueError(f"backend: expected reference or triton; got {name!r}")
    token = _backend.set(name)
    try:
        yield
    finally:
        _backend.reset(token)


_debug: ContextVar[bool] = ContextVar("preattn_debug", default=os.environ.get("PREATTN_DEBUG", "0") == "1")


@contextmanager
def debug(on: bool = True) -> Iterator[None]:
    """Within this context, in this thread, look at the values of every call: debug mode.

    Slots have to be -1 or inside the cache, and distinct; positions inside the RoPE tables; inputs finite; and, after
    the call, the heads past a rank's own +0.0. Each call waits for the GPU. Its cost: ``docs/debugging.md``.

    ``PREATTN_DEBUG=1`` in the environment, read on import, turns it on for the process; ``debug(False)`` is then an
    exception from it.

    In the context a call raises, and names the first offender (argument, value and index):
        ValueError: an input; nothing was written.
        RuntimeError: the tail, after the call; or the stream is under graph capture.

    Raises:
        TypeError: ``on`` is no bool.
    """
    if not isinstance(on, bool):
        raise TypeError(f"on: expected a bool; got {type(on).__name__}")
    token = _debug.set(on)
    try:
        yield
    finally:
        _debug.reset(token)


_held: ContextVar[list[Any] | None] = ContextVar("preattn_held", default=None)


@contextmanager
def hold() -> Iterator[list[Any]]:
    """Within this context, in this thread, kernels are noted down in the yielded list instead of launched.

    Warm-up compiles what it finds there; static checks compile it for GPUs that are not present.
    """
    launches: list[Any] = []
    token = _held.set(launches)
    try:
        yield launches
    finally:
        _held.reset(token)


def holding() -> bool:
    """Whether :func:`hold` is active."""
    return _held.get() is not None


def held(launch: Any) -> bool:
    """Note a launch down if :func:`hold` is active."""
    launches = _held.get()
    if launches is None:
        return False
    launches.append(launch)
    return True


def interpreting() -> bool:
    """Whether kernels run on CPU tensors, in Triton's interpreter: Triton's own switch, fixed when it is imported."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1" and find_spec("triton") is not None


def use_kernels(tensor: Tensor) -> bool:
    """Whether an op on this tensor runs its Triton kernels.

    Raises:
        RuntimeError: :func:`backend` asks for what the tensor's device cannot run.
    """
    chosen = _backend.get()
    if chosen is None:
        return tensor.is_cuda or _held.get() is not None or interpreting()
    if chosen == "reference" and tensor.is_cuda:
        raise RuntimeError("the reference backend runs on CPU tensors; got a tensor on " + str(tensor.device))
    if chosen == "triton" and not (tensor.is_cuda or interpreting()):
        raise RuntimeError("the triton backend runs CPU tensors in Triton's interpreter only: set TRITON_INTERPRET=1")
    return chosen == "triton"
