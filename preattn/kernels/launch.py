"""Compile once, launch many times.

A :class:`Kernel` keeps the compiled variants of one Triton function, keyed by device, tensor dtypes and
constants and by nothing that changes from step to step: once a variant is compiled no call compiles it
again, whatever its token count, strides or pointers are. Launching a kept variant also costs less host
time than Triton's own dispatch, which derives a key from every argument of every call.

On CPU tensors the functions run in Triton's interpreter (``TRITON_INTERPRET=1``).
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any, ClassVar, NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..dispatch import held

INTERPRETED = triton.knobs.runtime.interpret
OPTIONS = {"enable_fp_fusion": False}
"""Compiler options of every kernel: multiplies and adds stay apart unless a kernel says ``fma``."""


class Pointer:
    """Stands for a tensor at compile time: 16-byte aligned, of any size (offsets stay 64-bit)."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    @staticmethod
    def data_ptr() -> int:
        return 0

    @staticmethod
    def ptr_range() -> int:
        return 2**62


class Tile(NamedTuple):
    """A matrix that a kernel loads a block at a time, by the GPU's copy engine where it has one; zero past its rows.

    Rows are contiguous and start at multiples of 16 bytes; at least one row.
    """

    matrix: Tensor
    block: tuple[int, int]

    @property
    def dtype(self) -> torch.dtype:
        """The matrix's."""
        return self.matrix.dtype

    def descriptor(self) -> TensorDescriptor:
        """What Triton takes."""
        return TensorDescriptor(self.matrix, list(self.matrix.shape), list(self.matrix.stride()), list(self.block))

    @staticmethod
    def pointer(dtype: torch.dtype, block: tuple[int, int]) -> TensorDescriptor:
        """Stands for a tile at compile time."""
        return TensorDescriptor(Pointer(dtype), [block[0], block[1]], [block[1], 1], list(block))


class Kernel:
    """One Triton function with its compiled variants.

    The function's tensor parameters come first, then its runtime scalars (annotated with their width, so
    that their values never select a variant), then its constexprs.
    """

    kernels: ClassVar[list[Kernel]] = []
    """Every kernel of the library, in order of definition."""

    def __init__(self, function: Any) -> None:
        self.function = function
        self.name = function.__name__.strip("_")
        self.variants: dict[Any, Any] = {}
        self._lock = threading.Lock()
        Kernel.kernels.append(self)

    def compile(self, key: Any, scalars: tuple[int | float, ...]) -> Any:
        """Compile and load the variant of ``key`` and keep it.

        Raises:
            RuntimeError: the current stream is being captured into a graph.
        """
        index, num_warps, constants, dtypes = key
        with self._lock:
            if key in self.variants:
                return self.variants[key]
            if INTERPRETED:
                variant = self.function
            elif torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    f"{self.name} is not compiled for {dtypes}, {constants}, and a stream under CUDA graph "
                    "capture may not compile: call preattn.warmup(...) with this geometry, record and these dtypes and "
                    "options first"
                )
            else:
                with _on(index):
                    pointers = [_placeholder(dtype) for dtype in dtypes]
                    variant = self.function.warmup(
                        *pointers, *scalars, *constants, grid=(1,), num_warps=num_warps, **OPTIONS
                    )
                    variant[(1, 1, 1)]  # loads the module, which a capturing stream may not do
            self.variants[key] = variant
            return variant


class Launch(NamedTuple):
    """One kernel call, complete: what to run, on what, in which variant."""

    kernel: Kernel
    grid: int
    tensors: tuple[Tensor | Tile | None, ...]
    scalars: tuple[int | float, ...]
    constants: tuple[Any, ...]
    num_warps: int

    def _variant(self, device: torch.device) -> Any:
        dtypes = tuple([_kind(tensor) for tensor in self.tensors])
        key = (device.index, self.num_warps, self.constants, dtypes)
        variant = self.kernel.variants.get(key)
        return self.kernel.compile(key, self.scalars) if variant is None else variant

    def prepare(self, device: torch.device) -> bool:
        """Compile and load the variant unless that is done; returns whether it was not."""
        known = len(self.kernel.variants)
        self._variant(device)
        return len(self.kernel.variants) > known

    def run(self, device: torch.device) -> None:
        """Launch on the current stream of ``device``; within :func:`preattn.dispatch.hold`, note down instead.

        Raises:
            RuntimeError: the variant is not compiled and the stream is being captured into a graph.
        """
        if self.grid == 0 or held(self):
            return
        variant = self._variant(device)
        tensors = [tensor.descriptor() if type(tensor) is Tile else tensor for tensor in self.tensors]
        if INTERPRETED:
            variant[(self.grid,)](*tensors, *self.scalars, *self.constants)
            return
        with _on(device.index):
            variant[(self.grid, 1, 1)](*tensors, *self.scalars, *self.constants)


def _kind(tensor: Tensor | Tile | None) -> Any:
    """What of an argument selects a variant."""
    if tensor is None:
        return None
    return (tensor.dtype, tensor.block) if type(tensor) is Tile else tensor.dtype


def _placeholder(kind: Any) -> Any:
    """The argument of a kind at compile time."""
    if kind is None:
        return None
    return Tile.pointer(*kind) if isinstance(kind, tuple) else Pointer(kind)


_NOTHING = contextlib.nullcontext()


def _on(index: int) -> contextlib.AbstractContextManager[Any]:
    """Make a device current, at no cost where it already is."""
    return _NOTHING if torch.cuda.current_device() == index else torch.cuda.device(index)


def compilations() -> int:
    """Variants compiled so far in this process, over all kernels."""
    return sum(len(kernel.variants) for kernel in Kernel.kernels)
