"""Argument checks. Each raises before anything is written and names the argument, what was expected, what came.

Only metadata is looked at: no check reads a tensor's values, so none synchronises with a GPU. Pointers are
checked inside the registered ops, at every call, where tensors are real (``torch.compile`` traces the public
functions with fake ones).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from operator import mul
from typing import TypeVar, TypeVarTuple

import torch
from torch import Tensor

Arguments = TypeVarTuple("Arguments")
Result = TypeVar("Result")

INDEX_DTYPES = (torch.int64, torch.int32)
TABLE_DTYPES = (torch.float32, torch.bfloat16)
ROPE_DIM = 64
"""Rotated dims of every model here: 32 cosines and 32 sines a table row."""


REMEMBERED = 4096
"""Combinations of arguments that a check remembers to have passed; it forgets all of them and starts anew past that."""


def remembered(check: Callable[[*Arguments], Result]) -> Callable[[*Arguments], Result]:
    """Run a check once for each combination of what it can see: of tensors dtype, device, shape and strides.

    An eager step repeats the same shapes layer after layer, and a look-up costs a fifth of the checks. The check may
    look at a tensor's metadata and at nothing else of it, and returns neither a tensor nor anything mutable. The key
    is made of every argument, numbers with their types (1 is no True), so none can be forgotten; what fails is not
    remembered, and is checked, and fails, again. Tracing runs the check itself.
    """
    passed: dict[tuple[object, ...], tuple[Result]] = {}

    @functools.wraps(check)
    def run(*arguments: *Arguments) -> Result:
        if torch.compiler.is_compiling():
            return check(*arguments)
        try:
            key = tuple(
                [
                    value
                    if value is None or type(value) is str
                    else (value.dtype, value.device, value.shape, value.stride())
                    if isinstance(value, Tensor)
                    else (type(value), value)
                    for value in arguments
                ]
            )
            known = passed.get(key)
        except (RuntimeError, TypeError):  # no strides, symbolic sizes, an argument without a hash: nothing to look up
            return check(*arguments)
        if known is not None:
            return known[0]
        result = check(*arguments)
        if len(passed) >= REMEMBERED:
            passed.clear()
        passed[key] = (result,)
        return result

    return run


def tensor(
    name: str,
    value: object,
    dtypes: Sequence[torch.dtype],
    shape: Sequence[int | None],
    device: torch.device | None = None,
) -> None:
    """Check type, dtype, rank, fixed dims (None: any size) and device.

    Raises:
        TypeError: not a tensor, or a dtype that is not among ``dtypes``.
        ValueError: shape or device.
    """
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor; got {type(value).__name__}")
    if value.dtype not in dtypes:
        raise TypeError(f"{name}: expected dtype {' or '.join(map(str, dtypes))}; got {value.dtype}")
    sizes = value.shape
    fits = len(sizes) == len(shape)
    if fits:
        for want, have in zip(shape, sizes, strict=True):
            if want is not None and want != have:
                fits = False
    if not fits:
        wanted = ", ".join(["any" if want is None else str(want) for want in shape])
        raise ValueError(f"{name}: expected shape [{wanted}]; got {list(sizes)}")
    if device is not None and value.device != device:
        raise ValueError(f"{name}: expected a tensor on {device}; got one on {value.device}")


def contiguous(name: str, value: Tensor) -> None:
    """Check that a tensor is contiguous."""
    if not value.is_contiguous():
        raise ValueError(f"{name}: expected a contiguous tensor; got strides {value.stride()}")


def rows(name: str, value: Tensor, *, inner: int = 1) -> None:
    """Check that the last ``inner`` dims are contiguous and every row starts at a multiple of 16 bytes from the first.

    Raises:
        ValueError: strides do not fit.
    """
    sizes, strides = value.shape, value.stride()
    outer = len(sizes) - inner
    expected = 1
    for dim in range(len(sizes) - 1, outer - 1, -1):
        if strides[dim] != expected and sizes[dim] > 1:
            raise ValueError(f"{name}: expected the last {inner} dim(s) contiguous; got strides {strides}")
        expected *= sizes[dim]
    unit = 16 // value.dtype.itemsize
    for dim in range(outer):
        if (strides[dim] % unit or strides[dim] < 0) and sizes[dim] > 1:
            raise ValueError(
                f"{name}: expected strides that are multiples of {unit} elements (16 bytes); got {strides}"
            )


def apart(name: str, value: Tensor) -> None:
    """Check that the rows of a tensor that is written, [T, heads, dims], do not overlap each other."""
    if value.shape[0] > 1 and value.stride(0) < value.shape[1] * value.shape[2]:
        raise ValueError(f"{name}: expected rows that do not overlap; got strides {value.stride()}")


def aligned(name: str, value: Tensor) -> None:
    """Check that a tensor's first element lies at a multiple of 16 bytes (reads the pointer: not for tracing)."""
    if value.data_ptr() % 16:
        raise ValueError(f"{name}: expected data at a multiple of 16 bytes; got address {value.data_ptr():#x}")


def all_aligned(named: Iterable[tuple[str, Tensor | None]]) -> None:
    """:func:`aligned` of every tensor that is there."""
    for name, value in named:
        if value is not None and value.data_ptr() % 16:
            aligned(name, value)


def _extent(value: Tensor) -> int:
    """Bytes from a tensor's first element to the end of its last."""
    if value.is_contiguous():
        return value.numel() * value.element_size()
    strides = value.stride()
    last: int = sum(map(mul, strides, value.shape)) - sum(strides)
    return (last + 1) * value.element_size()


def disjoint(name: str, value: Tensor, other_name: str, other: Tensor) -> None:
    """Check that two tensors' address ranges do not meet (reads pointers: not for tracing)."""
    if not value.numel() or not other.numel():
        return
    start, other_start = value.data_ptr(), other.data_ptr()
    if (other_start - start < _extent(value)) if start <= other_start else (start - other_start < _extent(other)):
        raise ValueError(f"{name}: expected memory apart from {other_name}; got {name} overlapping it")


LIBRARY_STRIDE = 2**30
"""Elements between rows, or heads, from which cuBLAS is not trusted: bf16 ones 2 GiB apart fault (CUDA 13.0)."""


def library_reaches(operand: Tensor) -> bool:
    """Whether a library's matmul can be trusted with an operand's strides; our kernels reach all."""
    apart = [
        size > 1 and stride >= LIBRARY_STRIDE for size, stride in zip(operand.shape, operand.stride(), strict=True)
    ]
    return not any(apart)


def number(name: str, value: object, *, least: float | None = None) -> None:
    """Check a finite int or float of at least ``least``."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"{name}: expected a number; got {type(value).__name__}")
    finite = abs(value) < float("inf")  # false for NaN too, and unlike math.isfinite traceable
    if not finite or (least is not None and value < least):
        bound = "" if least is None else f" of at least {least}"
        raise ValueError(f"{name}: expected a finite number{bound}; got {value}")


def integer(name: str, value: object, *, least: int | None = None) -> None:
    """Check an int of at least ``least``."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name}: expected an int; got {type(value).__name__}")
    if least is not None and value < least:
        raise ValueError(f"{name}: expected at least {least}; got {value}")


def instance(name: str, value: object, kind: type) -> None:
    """Check an instance of a class."""
    if not isinstance(value, kind):
        raise TypeError(f"{name}: expected a {kind.__name__}; got {type(value).__name__}")


def dtype(name: str, value: object, choices: Sequence[torch.dtype]) -> None:
    """Check a dtype that is one of some."""
    if value not in choices:
        raise TypeError(f"{name}: expected {' or '.join(map(str, choices))}; got {value!r}")


def device(name: str, value: object) -> torch.device:
    """Check a device, or the name of one, and return it.

    Raises:
        TypeError: neither.
        ValueError: no device has that name, or it is a GPU's and there is none.
    """
    if not isinstance(value, str | torch.device):
        raise TypeError(f"{name}: expected a torch.device or its name; got {type(value).__name__}")
    try:
        found = torch.device(value)
    except RuntimeError as error:
        raise ValueError(f"{name}: expected the name of a device; got {value!r}") from error
    if found.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"{name}: expected a device that this machine has, as cpu; got {found}, and no CUDA GPU is here"
        )
    return found


def word(name: str, value: object, words: Iterable[str]) -> None:
    """Check that a value is one of some words.

    Raises:
        ValueError: it is not.
    """
    if not isinstance(value, str) or value not in words:
        got = repr(value) if value is None or isinstance(value, str | int | float) else f"a {type(value).__name__}"
        raise ValueError(f"{name}: expected one of {', '.join(words)}; got {got}")


def flag(name: str, value: object) -> None:
    """Check a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}: expected a bool; got {type(value).__name__}")


def scale(name: str, value: object, device: torch.device) -> None:
    """Check a per-tensor scale: one float32 element on the device, of any rank."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor of one float32 element; got {type(value).__name__}")
    if value.dtype != torch.float32:
        raise TypeError(f"{name}: expected dtype torch.float32; got {value.dtype}")
    if value.numel() != 1:
        raise ValueError(f"{name}: expected one element; got shape {list(value.shape)}")
    if value.device != device:
        raise ValueError(f"{name}: expected a tensor on {device}; got one on {value.device}")


def kv_scale(value: object, record: str, device: torch.device) -> None:
    """Check that there is a scale for ``fp8`` records, and none for others."""
    if (value is None) == (record == "fp8"):
        expected = "a scale for fp8 records" if record == "fp8" else f"None for {record} records"
        raise ValueError(f"kv_scale: expected {expected}; got {'None' if value is None else 'a tensor'}")
    if value is not None:
        scale("kv_scale", value, device)


def slots(name: str, value: object, tokens: int, device: torch.device) -> None:
    """Check slots: [<= T] int32 or int64, contiguous."""
    tensor(name, value, INDEX_DTYPES, (None,), device)
    assert isinstance(value, Tensor)
    if value.shape[0] > tokens:
        raise ValueError(f"{name}: expected at most {tokens} entries, one for each token; got {value.shape[0]}")
    contiguous(name, value)


def positions(value: object, tokens: int, device: torch.device) -> None:
    """Check positions: [T] int32 or int64, contiguous."""
    tensor("positions", value, INDEX_DTYPES, (tokens,), device)
    assert isinstance(value, Tensor)
    contiguous("positions", value)


def table(name: str, value: object, device: torch.device) -> None:
    """Check a RoPE table: [any, 64] float32 or bf16, contiguous."""
    tensor(name, value, TABLE_DTYPES, (None, ROPE_DIM), device)
    assert isinstance(value, Tensor)
    contiguous(name, value)
