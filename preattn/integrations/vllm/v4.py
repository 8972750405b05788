"""DeepSeek-V4 and V4.1 inside vLLM: our kernels behind the engine's own operators.

The models call operators of the namespace ``_C``. Their CUDA kernels are overridden in torch's dispatcher, so that
every caller, compiled or not, gets ours; :func:`restore` takes the override away. A layer that calls one of them hands
over its own query, which is finished where it lies (:mod:`.projection`).

An operator's first call with arguments of a new kind compiles that kind for small and large steps. The engine makes
such calls in its warm-up before it captures a graph. Short steps outside a graph are left to the engine's own operators
(:func:`.projection.left_to_engine`): such a call of ours returns ``NotImplemented``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ... import dispatch, formats, v4
from ...policy import STEP_SIZES
from . import projection, report, shadow
from .patching import Occupied, Patches

MODELS = ("vllm.models.deepseek_v4.attention", "vllm.models.deepseek_v41.attention")
NAMESPACE = "_C"
_library: torch.library.Library | None = None
_originals: dict[str, Any] = {}
_warm: set[tuple[Any, ...]] = set()


class NotCompiled(RuntimeError):
    """A kind of call that could not be compiled."""


def patch_model(module: ModuleType, patches: Patches) -> None:
    """Override the operators, once, whichever of the models is imported first, and two methods of its layer."""
    override("CUDA")
    projection.patch(module, patches)


def override(key: str) -> None:
    """Put our kernels behind the engine's operators.

    Args:
        key: the dispatch key, ``CUDA`` (``CPU`` in tests).

    Raises:
        Occupied: another library in this process overrides one of them.
        AttributeError: the engine has no such operator.
    """
    global _library
    if _library is not None:
        return
    engines = getattr(torch.ops, NAMESPACE)
    for name in OPS:
        getattr(engines, name)  # raises where the engine lacks it
        if f"{NAMESPACE}/{name}/{key}" in torch.library._impls:
            raise Occupied(f"{NAMESPACE}::{name} is overridden for {key} by another library in this process")
        _originals[name] = torch.library.get_kernel(f"{NAMESPACE}::{name}", key)
    _library = torch.library.Library(NAMESPACE, "IMPL")
    for name, ours in OPS.items():
        _library.impl(name, _kernel(name, ours), key, with_keyset=True, allow_override=True)


def restore() -> None:
    """Give the operators their own kernels back."""
    global _library
    if _library is not None:
        _library._destroy()
        _library = None
    _originals.clear()
    _warm.clear()


def _kernel(name: str, ours: Callable[..., Any]) -> Callable[..., Any]:
    own = _originals[name]

    def run(keys: torch.DispatchKeySet, *args: Any) -> Any:
        try:
            result = _shadowed(name, ours, keys, *args) if shadow.active() else ours(*args)
        except NotCompiled as failure:  # raised before anything is launched
            from . import plugin  # it imports this

            cause = failure.__cause__
            plugin.refuse(f"{type(cause).__name__} while compiling for {name}: {cause}", trace=True)
            result = NotImplemented
        if report.tracing():
            report.count(name, _plan(ours, args[0], result))
        return _engines(own, keys, args) if result is NotImplemented else result

    return run


def _engines(own: Any, keys: torch.DispatchKeySet, args: tuple[Any, ...]) -> Any:
    """The engine's own operator; its query's rows are compact, and the query buffer's are not."""
    query = args[0] if projection.thread.buffer is None else args[0].contiguous()
    return own.call_boxed(keys, query, *args[1:])


def _plan(ours: Callable[..., Any], query: Tensor, result: Any) -> str:
    """How a call ran, for the trace."""
    if result is NotImplemented:
        return "the engine's own"
    in_place = result is not None and result.numel() > 0 and result.data_ptr() == query.data_ptr()
    return ours.__name__.strip("_") + (", in place" if in_place else "")


# -- the operators, with the engine's signatures ---------------------------------------------------------------


def _quant_insert(
    q_in: Tensor,
    kv: Tensor,
    k_cache: Tensor,
    slot_mapping: Tensor,
    position_ids: Tensor,
    cos_sin_cache: Tensor,
    q_head_padded: int,
    eps: float,
    cache_block_size: int,
    apply_q_norm: bool = True,
    kv_mxfp8: bool = False,
    apply_q_rope: bool = True,
    is_q_interleaved: bool = False,
) -> Any:
    owned = not is_q_interleaved and projection.owned(q_in)
    return _query_kv(
        q_in,
        kv,
        _paged(k_cache, "v41_mxfp8" if kv_mxfp8 else "v4_fp8", cache_block_size),
        slot_mapping,
        position_ids,
        cos_sin_cache,
        record="v41_mxfp8" if kv_mxfp8 else "v4_fp8",
        query_rope=apply_q_rope and not is_q_interleaved,
        query_norm_eps=eps if apply_q_norm and not is_q_interleaved else None,
        padded_heads=q_head_padded,
        layout="chunk_interleaved" if is_q_interleaved else "head_major",
        out=projection.place(q_in, q_head_padded) if owned else None,
        owned=owned,
    )


def _bf16_insert(
    q: Tensor,
    kv: Tensor,
    k_cache: Tensor,
    slot_mapping: Tensor,
    position_ids: Tensor,
    cos_sin_cache: Tensor,
    eps: float,
    cache_block_size: int,
    apply_q_norm: bool = True,
) -> Any:
    norm = eps if apply_q_norm else None
    step = (slot_mapping, position_ids, cos_sin_cache)
    return _written(_query_kv(q, kv, k_cache, *step, record="bf16", query_rope=True, query_norm_eps=norm, out=q))


def _fp8_insert(
    q: Tensor,
    kv: Tensor,
    q_fp8: Tensor,
    k_cache: Tensor,
    slot_mapping: Tensor,
    position_ids: Tensor,
    cos_sin_cache: Tensor,
    fp8_scale: Tensor,
    q_fp8_scale_inv: Tensor,
    eps: float,
    cache_block_size: int,
    apply_q_norm: bool = True,
) -> Any:
    return _written(
        _query_kv(
            q,
            kv,
            k_cache,
            slot_mapping,
            position_ids,
            cos_sin_cache,
            record="fp8",
            query_rope=True,
            query_norm_eps=eps if apply_q_norm else None,
            query_scale_inv=q_fp8_scale_inv,
            kv_scale=fp8_scale,
            out=q_fp8,
        )
    )


def _kv_insert(
    kv: Tensor,
    k_cache: Tensor,
    slot_mapping: Tensor,
    position_ids: Tensor,
    cos_sin_cache: Tensor,
    cache_block_size: int,
    fp8_scale: Tensor | None = None,
    kv_mxfp8: bool = False,
) -> Any:
    record = _record(k_cache, kv_mxfp8)
    cache = _paged(k_cache, record, cache_block_size)
    options: dict[str, Any] = {"record": record, "kv_scale": fp8_scale if record == "fp8" else None}
    step = (_clip(slot_mapping, kv), position_ids)
    kind = ("kv", kv.dtype, cache.shape[1], record, *[x.dtype for x in (*step, cos_sin_cache)])

    def held(tokens: int) -> None:
        v4.kv_insert(_rows(kv, tokens), cache, _rows(step[0], tokens), _rows(step[1], tokens), cos_sin_cache, **options)

    _compile(kind, held)
    if projection.left_to_engine(kv):
        return NotImplemented
    return v4.kv_insert(kv, cache, *step, cos_sin_cache, **options)


OPS: dict[str, Callable[..., Any]] = {
    "fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert": _quant_insert,
    "fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_bf16_insert": _bf16_insert,
    "fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_fp8_insert": _fp8_insert,
    "fused_deepseek_v4_kv_rope_insert": _kv_insert,
}
"""The engine's operators, and what stands in for each."""


# -- what they share -------------------------------------------------------------------------------------------


def _query_kv(
    query: Tensor,
    kv: Tensor,
    cache: Tensor,
    slots: Tensor,
    positions: Tensor,
    table: Tensor,
    *,
    out: Tensor | None = None,
    owned: bool = False,
    **options: Any,
) -> Any:
    """:func:`preattn.v4.query_kv_insert`, compiled for small and large steps where its kind is new.

    ``NotImplemented``, and nothing is written, where the step is the engine's.

    A step of a query that its layer owns may be in place and the next one not (:attr:`.projection.Writer.least`): both
    are compiled at the first of either.
    """
    step = (_clip(slots, query), positions)
    in_place = out is query and not owned
    kind = (
        "query",
        *[x.dtype for x in (query, kv, *step, table)],
        query.shape[1],
        cache.shape[1],
        "owned" if owned else in_place,
        None if owned or out is None else out.dtype,
        *[value for value in options.values() if not isinstance(value, Tensor)],  # of a record always the same options
    )

    def held(tokens: int) -> None:
        into = None if owned or out is None else out.new_empty(tokens, *out.shape[1:])
        rows = into if in_place and into is not None else _rows(query, tokens)
        where = (_rows(step[0], tokens), _rows(step[1], tokens))
        v4.query_kv_insert(rows, _rows(kv, tokens), cache, *where, table, out=into, **options)
        if owned:
            into = query.new_empty(tokens, options["padded_heads"], v4.HEAD_DIM)
            v4.query_kv_insert(into[:, : query.shape[1]], _rows(kv, tokens), cache, *where, table, out=into, **options)

    _compile(kind, held)
    if projection.left_to_engine(query):
        return NotImplemented
    return v4.query_kv_insert(query, kv, cache, *step, table, out=out, **options)


def _written(result: Any) -> Any:
    """What an operator returns that writes into its arguments: nothing, where it has run."""
    return NotImplemented if result is NotImplemented else None


def _compile(kind: tuple[Any, ...], call: Callable[[int], None]) -> None:
    """Compile a new kind of call, for steps of every size: ``call`` makes it with launches held back."""
    if kind in _warm:
        return
    try:
        with dispatch.hold() as launches:
            for tokens in STEP_SIZES:
                call(tokens)
        for launch in launches:
            launch.prepare(next(x.device for x in launch.tensors if x is not None))
    except Exception as error:
        raise NotCompiled from error
    _warm.add(kind)


def _rows(x: Tensor, tokens: int) -> Tensor:
    """One row of zeros for every token, in the form of ``x``."""
    return x.new_zeros(1, *x.shape[1:]).expand(tokens, *x.shape[1:]) if x.dim() > 1 else x.new_zeros(tokens)


def _clip(slots: Tensor, tokens: Tensor) -> Tensor:
    """Slots of this step's tokens: the engine may hand over a longer buffer."""
    return slots if slots.shape[0] <= tokens.shape[0] else slots[: tokens.shape[0]]


def _record(cache: Tensor, mxfp8: bool) -> str:
    if cache.dtype == torch.uint8:
        return "v41_mxfp8" if mxfp8 else "v4_fp8"
    return "bf16" if cache.dtype == torch.bfloat16 else "fp8"


def _paged(cache: Tensor, record: str, block_size: int) -> Tensor:
    """[num_blocks, block_size, width] of a cache that the engine hands over as [num_blocks, page bytes]."""
    if record in ("bf16", "fp8"):
        return cache
    width = formats.record(record).bytes
    return cache.as_strided((cache.shape[0], block_size, width), (cache.stride(0), width, 1))


def _shadowed(name: str, ours: Callable[..., Any], keys: torch.DispatchKeySet, *args: Any) -> Any:
    """Run both, the engine's own on copies, and compare."""
    shadow.refuse_capture()
    bound = inspect.signature(ours).bind(*args)
    bound.apply_defaults()
    call = bound.arguments
    record = _record(call["k_cache"], call.get("kv_mxfp8", False))
    cache = _paged(call["k_cache"], record, call["cache_block_size"])
    tokens = call["kv"]
    pages = shadow.Pages(cache, _clip(call["slot_mapping"], tokens), formats.record(record))
    theirs = {**call, "slot_mapping": pages.slots}
    theirs["k_cache"] = pages.copy if call["k_cache"].dim() == 3 else pages.copy.flatten(1)
    for mutated in ("q_in", "q", "q_fp8"):  # an input that is only read is copied too, which does no harm
        if mutated in call:
            theirs[mutated] = call[mutated].clone(memory_format=torch.contiguous_format)
    layer, result = projection.layer_name(), ours(*args)
    expected = _originals[name].call_boxed(keys, *theirs.values())
    norm = bool(call.get("apply_q_norm", False)) and not call.get("is_q_interleaved", False)
    written = "q_fp8" if "q_fp8" in call else "q"
    if result is not None:
        shadow.compare(name, "query", layer, result, expected, norm=norm)
    elif written in call:
        shadow.compare(name, "query", layer, call[written], theirs[written], norm=norm)
    pages.compare(name, "kv cache", layer)
    return result
