"""Compile once, launch many times.

A :class:`Kernel` keeps the compiled variants of one Triton function, keyed by device, tensor dtypes and
constants and by nothing that changes from step to step: once a variant is compiled no call compiles it
again, whatever its token count, strides or pointers are. Launching a kept variant also costs less host
time than Triton's own dispatch, which derives a key from every argument of every call: the launcher that
Triton's dispatch ends in is called straight away, with addresses where it would ask tensors and the driver.

On CPU tensors the functions run in Triton's interpreter (``TRITON_INTERPRET=1``).
"""

from __future__ import annotations

import threading
from typing import Any, ClassVar, NamedTuple

import torch
import triton
from torch import Tensor
from triton.runtime.driver import driver
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

    @property
    def kind(self) -> tuple[torch.dtype, tuple[int, int]]:
        """What of it selects a variant."""
        return self.matrix.dtype, self.block

    def descriptor(self) -> TensorDescriptor:
        """What Triton takes."""
        rows, columns = self.matrix.shape
        stride = self.matrix.stride(0) if rows > 1 else columns  # a single row's may be anything
        return TensorDescriptor(self.matrix, [rows, columns], [stride, 1], list(self.block))

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
                with torch.cuda.device(index):
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
        dtypes = tuple(
            [
                None if tensor is None else tensor.kind if type(tensor) is Tile else tensor.dtype
                for tensor in self.tensors
            ]
        )
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
        if INTERPRETED:
            tensors = [tensor.descriptor() if type(tensor) is Tile else tensor for tensor in self.tensors]
            variant[(self.grid,)](*tensors, *self.scalars, *self.constants)
        elif torch.cuda.current_device() == device.index:
            self._start(variant, device.index)
        else:
            with torch.cuda.device(device.index):
                self._start(variant, device.index)

    def _start(self, variant: Any, index: int) -> None:
        """Launch a compiled variant on the current stream of the current device, as Triton's ``JITFunction.run`` does.

        A pointer is passed as a number: of a tensor Triton would ask for it and then look it up in the driver. Hooks
        (profilers set them) are told of the launch where there are any.
        """
        pointers = [
            None if tensor is None else tensor.descriptor() if type(tensor) is Tile else tensor.data_ptr()
            for tensor in self.tensors
        ]
        arguments = (*pointers, *self.scalars, *self.constants)
        stream = driver.active.get_current_stream(index)
        hooks = triton.knobs.runtime
        enter, leave, metadata = hooks.launch_enter_hook, hooks.launch_exit_hook, None
        if getattr(enter, "calls", enter) or getattr(leave, "calls", leave):
            metadata = variant.launch_metadata((self.grid, 1, 1), stream, *arguments)
        else:
            enter = leave = None
        variant.run(
            self.grid,
            1,
            1,
            stream,
            variant.function,
            variant.packed_metadata,
            metadata,
            enter,
            leave,
            *arguments,
        )


def _placeholder(kind: Any) -> Any:
    """The argument of a kind at compile time."""
    if kind is None:
        return None
    return Tile.pointer(*kind) if isinstance(kind, tuple) else Pointer(kind)


def compilations() -> int:
    """Variants compiled so far in this process, over all kernels."""
    return sum(len(kernel.variants) for kernel in Kernel.kernels)
