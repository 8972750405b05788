"""Hugging Face transformers: the attention prologue of V3.2, GLM-MoE-DSA and V4 in one kernel where it runs many.

``with patched(): model = AutoModelForCausalLM.from_pretrained(...)``, and the model's answers stay what they were, bit
for bit. That decides what is replaced:

* RoPE with its casts and copies: of the main query and key, of the indexer's and the compressors', and V4's rotation
  of the attention output back. The library's arithmetic is not that of vLLM, which :mod:`preattn.dsa` and
  :mod:`preattn.v4` reproduce: V3.2 and GLM round every product and sum to the model's dtype, V4 computes in float32
  without fused multiply-adds. Hence an op of its own, :func:`_rotate`.
* Not the RMSNorms, whose sums run in PyTorch's order, and not the caches, which hold what the library has them hold.
  They stay the model's own modules, with their own weights and epsilons.
* V4's head norm (every head's 512 dims, no weight) only where ``head_norm=True`` asks for it: its sum then runs in
  preattn's fixed order, and a result may be off by the bound in :func:`_head_norm`.

A replacement is a subclass that runs the library's own ``forward`` with one name bound to another function. What a
release passes to ``forward``, what it caches and how it masks (5.18 and 5.24 changed the two former) is therefore its
own. A class is replaced only while that name is what it was: the module's own function, with known parameters, which
gives the bits of ours on the spot. Otherwise it is left untouched, and the reason is said.

Tensors that our functions do not take (wanted gradients, another dtype, subclasses such as DTensor) go to the library's
function, call by call: the same bits. CPU tensors run the reference, GPU tensors a Triton kernel.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import CellType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor

from .. import checks
from ..dispatch import backend, define_op, use_kernels
from ..policy import LaunchConfig
from ..reference import numerics
from ..reference.numerics import Pairing

DTYPES = (torch.bfloat16, torch.float32)
ROPE_CONFIG = LaunchConfig(rows=16, num_warps=4)
NORM_CONFIG = LaunchConfig(rows=4, num_warps=4)

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Family:
    """One of the library's models: ``transformers.models.<module>.modeling_<module>``."""

    module: str
    attention: str
    functions: Mapping[str, str]
    """The attention class and the classes of its parts, each with the RoPE function that its ``forward`` calls."""
    head_norm: str | None = None
    """Class of the norm over a head's dims."""


FAMILIES = (
    Family(
        "deepseek_v32",
        "DeepseekV32Attention",
        {"DeepseekV32Attention": "apply_rotary_pos_emb_interleave", "DeepseekV32Indexer": "apply_rotary_pos_emb"},
    ),
    Family(
        "glm_moe_dsa",
        "GlmMoeDsaAttention",
        {
            "GlmMoeDsaAttention": "apply_rotary_pos_emb_interleave",
            "GlmMoeDsaIndexer": "apply_rotary_pos_emb_interleave",
        },
    ),
    Family(
        "deepseek_v4",
        "DeepseekV4Attention",
        {
            "DeepseekV4Attention": "apply_rotary_pos_emb",
            "DeepseekV4CSACompressor": "apply_rotary_pos_emb",
            "DeepseekV4HCACompressor": "apply_rotary_pos_emb",
            "DeepseekV4Indexer": "apply_rotary_pos_emb",
        },
        head_norm="DeepseekV4UnweightedRMSNorm",
    ),
)


# -- public -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Patches:
    """What :func:`patch` did."""

    patched: tuple[str, ...] = ()
    """The attention classes that models built from now on get replaced."""
    untouched: Mapping[str, str] = field(default_factory=dict)
    """The other ones, with the reason."""


def patch(*, head_norm: bool = False) -> Patches:
    """Replace the attention classes of V3.2, GLM-MoE-DSA and V4 in the models that are built from now on.

    These are models of ``from_pretrained`` and ``from_config``, and those built within the library's own
    ``apply_patches``. Existing models stay what they are, here and in :func:`unpatch`. Where that mechanism fails
    (before transformers 5.20, without torchvision) the classes are replaced in their modules instead.

    Args:
        head_norm: replace V4's head norm too, which may change low bits of its result.

    Returns:
        The classes that are patched now, and why others are not: the release lacks or changed them, or they are patched
        already, by whom. A reason is also logged as a warning, once.

    Raises:
        ImportError: transformers is not installed.
        TypeError: an argument.
    """
    checks.flag("head_norm", head_norm)
    importlib.import_module("transformers")
    patched, untouched = [], {}
    for family in FAMILIES:
        try:
            _register(family, head_norm)
            patched.append(family.attention)
        except _Unfit as unfit:
            untouched[family.attention] = str(unfit)
            _warn_once(f"{family.attention} is left untouched: {unfit}")
    if patched:
        _apply(patched)
    return Patches(tuple(patched), untouched)


def unpatch() -> tuple[str, ...]:
    """Undo :func:`patch` for the models that are built from now on; returns the classes that were patched.

    A class that a failed construction left replaced in the library's modules is put back.
    """
    return _unregister([family.attention for family in FAMILIES])


@contextmanager
def patched(*, head_norm: bool = False) -> Iterator[Patches]:
    """:func:`patch` within this context. Classes that were patched before stay so after it."""
    patches = patch(head_norm=head_norm)
    try:
        yield patches
    finally:
        _unregister(patches.patched)


# -- classes ------------------------------------------------------------------------------------------------


class _Unfit(Exception):
    """Why a class cannot be replaced."""


class _Replacement(type):
    """Metaclass of the replacements.

    The library makes a model class record attention weights of the replacement, for good. So an instance of the
    original counts as one of the replacement, and models that are not patched keep recording.
    """

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, cls.__bases__[0])


@functools.cache
def _warn_once(message: str) -> None:
    _log.warning("%s", message)


def _register(family: Family, head_norm: bool) -> None:
    """Check a family and register its replacement; raises ``_Unfit``."""
    head_norm = head_norm and family.head_norm is not None
    try:
        module = importlib.import_module(f"transformers.models.{family.module}.modeling_{family.module}")
        library = importlib.import_module("transformers.monkey_patching")
    except ModuleNotFoundError as missing:
        raise _Unfit(f"this release of transformers has no {missing.name}") from None
    for pattern, replacement in library.get_patch_mapping().items():
        if _matches(pattern, family.attention):
            raise _Unfit(f"{pattern!r} is patched already, with {_full_name(replacement)}")
    for name, function in family.functions.items():
        _check_class(module, name, function)
    if head_norm and family.head_norm:
        _check_head_norm(module, family.head_norm)
    library.register_patch_mapping({family.attention: _replacements(family.module, head_norm)[family.attention]})


def _apply(names: Iterable[str]) -> None:
    """See that the library can apply what is registered; where it cannot, put the replacements into its modules.

    To replace a class the library lists every module of its own, and in releases before 5.20 that imports what needs
    torchvision: without it no model can be built while a mapping is registered, anybody's.
    """
    library = sys.modules["transformers.monkey_patching"]
    try:
        with library.apply_patches():
            pass
    except Exception as error:
        mapping = library.get_patch_mapping()
        for name in names:
            library.unregister_patch_mapping([name])
            setattr(sys.modules[mapping[name].__bases__[0].__module__], name, mapping[name])
        _warn_once(f"transformers cannot apply a patch mapping here, so classes are replaced in their modules: {error}")


def _unregister(names: Iterable[str]) -> tuple[str, ...]:
    library = sys.modules.get("transformers.monkey_patching")
    if library is None:
        return ()
    mapping = library.get_patch_mapping()
    undone = {name for name in names if isinstance(mapping.get(name), _Replacement)}
    library.unregister_patch_mapping(list(undone))
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] == "transformers":
            for name in names:
                left = vars(module).get(name)
                if isinstance(left, _Replacement):
                    setattr(module, name, left.__bases__[0])
                    undone.add(name)
    return tuple([name for name in names if name in undone])


@functools.cache
def _replacements(module_name: str, head_norm: bool) -> dict[str, type]:
    """The replacements of a family's classes, by name. Models in use keep theirs, so there is one set a process."""
    (family,) = [family for family in FAMILIES if family.module == module_name]
    module = importlib.import_module(f"transformers.models.{module_name}.modeling_{module_name}")
    replacements: dict[str, type] = {}
    originals: dict[type, type] = {}

    def replace(name: str, namespace: dict[str, Any]) -> None:
        original = _original(module, name)
        suffix = _HEAD_NORM if head_norm else ""
        namespace |= {"__module__": __name__, "__qualname__": name + suffix, "__doc__": original.__doc__}
        replacements[name] = originals[original] = _Replacement(name, (original,), namespace)

    for name, function_name in family.functions.items():
        function = getattr(module, function_name)
        substitute = _SUBSTITUTES[_parameters(function)](function)
        namespace: dict[str, Any] = {"forward": _rebind(_original(module, name).forward, function_name, substitute)}
        if name == family.attention:
            namespace["__init__"] = _build_with(_original(module, name).__init__, originals)
        replace(name, namespace)
    if head_norm and family.head_norm:
        replace(family.head_norm, {"forward": _head_norm_forward(_original(module, family.head_norm))})
    return replacements


def _original(module: ModuleType, name: str) -> Any:
    """The library's class, also while the module holds ours in its place."""
    found = getattr(module, name)
    return found.__bases__[0] if isinstance(found, _Replacement) else found


_HEAD_NORM = "WithHeadNorm"


def __getattr__(name: str) -> type:
    """The replacements by name, for pickle."""
    plain = name.removesuffix(_HEAD_NORM)
    for family in FAMILIES:
        if plain in family.functions or plain == family.head_norm:
            return _replacements(family.module, plain != name)[plain]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _build_with(build: Callable[..., None], replacements: Mapping[type, type]) -> Callable[..., None]:
    """An ``__init__`` that builds the module and has its parts run as their replacements."""

    @functools.wraps(build)
    def __init__(self: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        for part in self.modules():
            if type(part) in replacements:
                part.__class__ = replacements[type(part)]

    return __init__


def _rebind(function: FunctionType, name: str, substitute: Callable[..., Any]) -> FunctionType:
    """A copy of a function, and of the decorators around it, that finds ``substitute`` where it looks ``name`` up."""
    inner = function.__dict__.get("__wrapped__")
    scope, closure, attributes = function.__globals__, function.__closure__, dict(function.__dict__)
    if inner is None:
        # A scope of its own: by a module's name torch.compile would guard what that module holds, not what this does.
        scope = {key: value for key, value in scope.items() if key != "__name__"} | {name: substitute}
    else:
        attributes["__wrapped__"] = rebound = _rebind(inner, name, substitute)
        closure = tuple([CellType(rebound) if c.cell_contents is inner else c for c in closure or ()])
    copy = FunctionType(function.__code__, scope, function.__name__, function.__defaults__, closure)
    functools.update_wrapper(copy, function, updated=())
    copy.__dict__.update(attributes)
    copy.__kwdefaults__ = function.__kwdefaults__
    if inner is None:
        del copy.__wrapped__  # type: ignore[attr-defined]
    return copy


# -- checks of what the library has -------------------------------------------------------------------------


def _full_name(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"


def _matches(pattern: str, name: str) -> bool:
    """The library's rule: a key is a class name or a regular expression to be found in one."""
    try:
        return pattern == name or re.search(pattern, name) is not None
    except re.error:
        return False


def _check_class(module: ModuleType, name: str, function_name: str) -> None:
    """Check that a class's ``forward`` is the module's own and calls a function that does what ours does."""
    original = getattr(module, name, None)
    if original is None:
        raise _Unfit(f"{module.__name__} has no {name}")
    if original.__module__ != module.__name__:
        raise _Unfit(f"{name} is replaced already, by {_full_name(original)}")
    forward = _own(module, f"{name}.forward", original.forward)
    if function_name not in forward.__code__.co_names:
        raise _Unfit(f"{name}.forward does not call {function_name}")
    function = getattr(module, function_name, None)
    _own(module, function_name, function)
    assert function is not None
    _check_bits(function_name, function)


def _own(module: ModuleType, name: str, function: Any) -> FunctionType:
    """The innermost function, checked to be the module's and to wear no decorators but the library's and torch's."""
    while True:
        if not isinstance(function, FunctionType):
            raise _Unfit(f"{name} is no function but {function!r}")
        scope = function.__globals__.get("__name__", "?")
        inner = function.__dict__.get("__wrapped__")
        if inner is None:
            if scope != module.__name__:
                raise _Unfit(f"{name} is patched already, by {scope}.{function.__qualname__}")
            return function
        if scope.partition(".")[0] not in ("torch", "transformers"):
            raise _Unfit(f"{name} is wrapped already, by {scope}.{function.__code__.co_qualname}")
        if not any(cell.cell_contents is inner for cell in function.__closure__ or ()):
            raise _Unfit(f"{name} is wrapped by {scope}, which does not keep it in its closure")
        function = inner


@functools.cache
def _check_bits(name: str, function: Callable[..., Any]) -> None:
    """Check parameters of a RoPE function, and its result against ours on small strided tensors."""
    parameters = _parameters(function)
    if parameters not in _SUBSTITUTES:
        raise _Unfit(f"{name} has other parameters: {', '.join(parameters)}")
    generator = torch.Generator("cpu").manual_seed(0)
    for dtype in DTYPES:
        x, cos = [
            torch.randn(shape, generator=generator, device="cpu").to(dtype) for shape in ((2, 5, 3, 48), (2, 5, 16))
        ]
        cos[..., 8:] = cos[..., :8]
        for unsqueeze_dim in (1, 2):
            rows = x.transpose(1, 2) if unsqueeze_dim == 1 else x
            if parameters[0] == "x":
                arguments = [rows, cos[..., :8], cos[..., :8].square(), unsqueeze_dim]
            else:
                arguments = [rows[..., 32:], rows[..., 16:32], cos, cos.square(), unsqueeze_dim]
            named = dict(zip([p for p in parameters if p != "position_ids"], arguments, strict=True))
            with torch.no_grad(), backend("reference"):
                theirs, ours = function(**named), _SUBSTITUTES[parameters](_refuse)(**named)
            for one, other in zip(*[(r,) if isinstance(r, Tensor) else r for r in (theirs, ours)], strict=True):
                if one.dtype != dtype or not torch.equal(one, other):
                    raise _Unfit(f"{name} computes something else than preattn does")


def _refuse(*arguments: Any) -> Any:
    raise AssertionError("our function passed a test input on")


def _check_head_norm(module: ModuleType, name: str) -> None:
    """Check that a norm takes rows and an epsilon, and gives what :func:`_head_norm` gives within its bound."""
    original = getattr(module, name, None)
    if original is None or original.__module__ != module.__name__:
        raise _Unfit(f"{name} is not the library's class: {original!r}")
    _own(module, f"{name}.forward", original.forward)
    if list(inspect.signature(original.forward).parameters) != ["self", "x"]:
        raise _Unfit(f"{name}.forward has other parameters: {inspect.signature(original.forward)}")
    norm = original(eps=1e-3)
    if _epsilon(norm) != 1e-3:
        raise _Unfit(f"{name} keeps its epsilon elsewhere than expected")
    x = torch.randn((2, 3, 4, 64), generator=torch.Generator("cpu").manual_seed(0), device="cpu")
    with backend("reference"):
        theirs, ours = original.forward(norm, x), _head_norm(x, 1e-3)
    if not bool(((theirs - ours).abs() <= head_norm_bound(64, torch.float32) * theirs.abs()).all()):
        raise _Unfit(f"{name} computes something else than preattn does")


# -- functions in the library's place -----------------------------------------------------------------------


def _pairs_to_halves(library: Callable[..., Any]) -> Callable[..., Any]:
    """Interleaved pairs are read, half-split ones written: V3.2's and GLM's query and key, GLM's indexer."""

    @functools.wraps(library)
    def apply_rotary_pos_emb_interleave(
        q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Any = None, unsqueeze_dim: int = 1
    ) -> Any:
        if _takes(q, cos, sin, unsqueeze_dim, q.shape[-1]) and _takes(k, cos, sin, unsqueeze_dim, k.shape[-1]):
            rotated = [
                _rotate(x, cos, sin, unsqueeze_dim, x.shape[-1], "interleaved", "half_split", True) for x in (q, k)
            ]
            return tuple(rotated)
        return library(q, k, cos, sin, position_ids, unsqueeze_dim)

    return apply_rotary_pos_emb_interleave


def _halves(library: Callable[..., Any]) -> Callable[..., Any]:
    """Half-split pairs, read and written: V3.2's indexer."""

    @functools.wraps(library)
    def apply_rotary_pos_emb(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
        if _takes(q, cos, sin, unsqueeze_dim, q.shape[-1]) and _takes(k, cos, sin, unsqueeze_dim, k.shape[-1]):
            rotated = [
                _rotate(x, cos, sin, unsqueeze_dim, x.shape[-1], "half_split", "half_split", True) for x in (q, k)
            ]
            return tuple(rotated)
        return library(q, k, cos, sin, unsqueeze_dim)

    return apply_rotary_pos_emb


def _trailing_pairs(library: Callable[..., Any]) -> Callable[..., Any]:
    """Interleaved pairs of the last dims, in float32: everything of V4."""

    @functools.wraps(library)
    def apply_rotary_pos_emb(x: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
        rotated = 2 * cos.shape[-1]
        if _takes(x, cos, sin, unsqueeze_dim, rotated):
            return _rotate(x, cos, sin, unsqueeze_dim, rotated, "interleaved", "interleaved", False)
        return library(x, cos, sin, unsqueeze_dim)

    return apply_rotary_pos_emb


_SUBSTITUTES: Mapping[tuple[str, ...], Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    ("q", "k", "cos", "sin", "position_ids", "unsqueeze_dim"): _pairs_to_halves,
    ("q", "k", "cos", "sin", "unsqueeze_dim"): _halves,
    ("x", "cos", "sin", "unsqueeze_dim"): _trailing_pairs,
}
"""By the parameters of the library's function. :func:`_check_bits` tells whether the function is the one meant."""


def _parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)


def _head_norm_forward(original: Any) -> Callable[..., Any]:
    """``forward`` of a head norm."""

    @functools.wraps(original.forward)
    def forward(self: torch.nn.Module, x: Tensor) -> Any:
        if _takes_rows(x) and x.shape[-1] & (x.shape[-1] - 1) == 0:
            return _head_norm(x, _epsilon(self))
        return original.forward(self, x)

    return forward


def _epsilon(norm: torch.nn.Module) -> Any:
    """A norm's epsilon: ``variance_epsilon`` of those with a weight, ``eps`` of V4's without."""
    return getattr(norm, "variance_epsilon", getattr(norm, "eps", None))


# -- arithmetic ---------------------------------------------------------------------------------------------


def _takes_rows(x: Tensor) -> bool:
    """Whether our functions take these rows: [batch, any, any, width], rows at multiples of 16 bytes, no gradient."""
    unit = 16 // x.dtype.itemsize
    return (
        x.dtype in DTYPES
        and type(x) in (Tensor, torch.nn.Parameter)
        and x.dim() == 4
        and x.device.type in ("cpu", "cuda")
        and not (x.requires_grad and torch.is_grad_enabled())
        and x.stride(3) == 1
        and all(x.shape[dim] == 1 or x.stride(dim) % unit == 0 for dim in range(3))
    )


def _takes(x: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int, rotated: int) -> bool:
    """Whether :func:`_rotate` takes these arguments."""
    return (
        _takes_rows(x)
        and unsqueeze_dim in (1, 2)
        and rotated >= 16 // x.dtype.itemsize
        and rotated & (rotated - 1) == 0
        and x.shape[3] % rotated == 0
        and all(table.dtype == x.dtype and table.device == x.device and table.dim() == 3 for table in (cos, sin))
        and cos.shape == sin.shape
        and cos.shape[0] in (1, x.shape[0])
        and cos.shape[1] == x.shape[3 - unsqueeze_dim]
        and cos.shape[2] >= rotated // 2
    )


def _rotate(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    unsqueeze_dim: int,
    rotated: int,
    read: Pairing,
    write: Pairing,
    rounds_products: bool,
) -> Tensor:
    """Rotate the last ``rotated`` dims of rows, as the library's separate operations do; arguments as ``_takes`` says.

    Args:
        x: [batch, heads, tokens, width] bf16 or float32; [batch, tokens, heads, width] with ``unsqueeze_dim`` 2.
        cos: [batch or 1, tokens, at least rotated / 2] of the dtype of ``x``; the first rotated / 2 are read.
        sin: the same.
        unsqueeze_dim: where the heads are, the library's name for it.
        rotated: a power of two that divides the width; the other dims are copied.
        read: the pairs of ``x``.
        write: the pairs of the result.
        rounds_products: ``a' = a*cos - b*sin`` and ``b' = b*cos + a*sin`` with every product and sum rounded to the
            dtype of ``x``; else they are float32, and only the results are rounded.

    Returns:
        A new contiguous tensor of the shape of ``x``.
    """
    out = x.new_empty(x.shape)
    if cos.stride() != sin.stride():
        cos, sin = cos.contiguous(), sin.contiguous()
    _rope(x, cos, sin, out, 3 - unsqueeze_dim, rotated, read, write, rounds_products)
    return out


def _rope_impl(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    out: Tensor,
    token_dim: int,
    rotated: int,
    read: Pairing,
    write: Pairing,
    rounds_products: bool,
) -> None:
    if use_kernels(x):
        from ..kernels.torch_rope import launch_torch_rope

        checks.aligned("x", x)
        launch_torch_rope(x, cos, sin, out, token_dim, rotated, read, write, rounds_products, config=ROPE_CONFIG).run(
            x.device
        )
        return
    compute = x.dtype if rounds_products else torch.float32
    cos, sin = [table[..., : rotated // 2].to(compute).unsqueeze(3 - token_dim) for table in (cos, sin)]
    kept = x.shape[3] - rotated
    rows = x[..., kept:].to(compute)
    a, b = (rows[..., 0::2], rows[..., 1::2]) if read == "interleaved" else rows.chunk(2, -1)
    results = (a * cos - b * sin, b * cos + a * sin)
    out[..., :kept] = x[..., :kept]
    out[..., kept:] = torch.stack(results, -1).flatten(-2) if write == "interleaved" else torch.cat(results, -1)


_rope = define_op(
    "torch_rope(Tensor x, Tensor cos, Tensor sin, Tensor(a!) out, int token_dim, int rotated, str read, str write, "
    "bool rounds_products) -> ()",
    _rope_impl,
)


def _head_norm(x: Tensor, eps: float) -> Tensor:
    """``x * (1 / sqrt(mean(x^2) + eps))`` over the last dim, the scale rounded to the dtype of ``x`` first.

    The mean is a float32 sum in preattn's fixed order, where the library's is in PyTorch's. Results differ by at most
    :func:`head_norm_bound` of their size.

    Args:
        x: [batch, any, any, power of two] bf16 or float32, as ``_takes_rows`` says.
        eps: of the norm.

    Returns:
        A new tensor of the shape of ``x`` and, where its rows are dense, its strides.
    """
    out = torch.empty_like(x)
    _norm(x, out, eps)
    return out


def head_norm_bound(width: int, dtype: torch.dtype) -> float:
    """Largest difference of two head norms of a row, as a fraction of the result, to first order; no subnormals.

    With u = 2**-24: a sum of squares in any order is off by at most (width - 1) u, as a tree by log2(width) u; the
    squares, the mean and the added epsilon round once each, twice over for two sides: 6 u. The root halves that. Its
    own error is at most 2 u here (two roundings) and 4 u there (two ulps, what CUDA states for ``rsqrt``). The scale
    and the result are then rounded on both sides: 4 v, v = 2**-8 for bf16; in float32 the scale needs no rounding.
    """
    u, v = 2.0**-24, 2.0**-8
    levels = (width - 1).bit_length()
    return ((width - 1 + levels + 6) / 2 + 6) * u + (4 * v if dtype == torch.bfloat16 else 2 * u)


def _norm_impl(x: Tensor, out: Tensor, eps: float) -> None:
    if use_kernels(x):
        from ..kernels.torch_rope import launch_torch_head_norm

        checks.aligned("x", x)
        launch_torch_head_norm(x, out, eps, config=NORM_CONFIG).run(x.device)
        return
    rows = x.float()
    scale = numerics.reciprocal_sqrt(numerics.tree_sum(rows * rows) / x.shape[-1] + eps)
    out.copy_(x * scale.to(x.dtype)[..., None])


_norm = define_op("torch_head_norm(Tensor x, Tensor(a!) out, float eps) -> ()", _norm_impl)
