"""preattn inside SGLang: the plug-in ``preattn`` of its group ``sglang.srt.plugins``.

SGLang 0.5.23 stores and quantises most of a prologue by rules of its own; :data:`UNTOUCHED` names those functions and
the rule in which each differs. What is left computes what preattn computes, bit for bit, and is replaced
(:data:`HOOKS`): the query of DeepSeek-V4.1 layers, whose heads have no norm. It is rotated as it is copied into the
padded buffer (``fused_q_norm_rope`` without an epsilon), or in place (``fused_rope_inplace``, forwards).

Every process of the engine loads the plug-in. It registers hooks and returns; tensors, devices and kernels wait for the
first call. ``PREATTN_DISABLE=1`` turns it off, as ``SGLANG_PLUGINS`` without it does. ``PREATTN_TRACE=1`` counts calls
and what ran them, and prints the counts when the process ends. An SGLang or torch that is not supported leaves the
engine as it is and says why, once.

The registry logs a hook that it cannot apply and goes on; an engine would then serve without it and nobody would
notice. Here that is an error: once the hooks are applied each is looked for in the function it was meant for.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import logging
import os
import pkgutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from .. import policy, v4
from ..dispatch import hold
from ..weights import HEAD_DIM

VERSIONS = ("0.5.23",)
"""Releases of SGLang whose sources ``tests/test_sglang_contract.py`` was run against."""

_OPS = "sglang.kernels.ops"
_ROPE_DIM = 64
logger = logging.getLogger(__name__)


# -- the hooks: what the registry calls, with the function beneath as the first argument ------------------------------


def query_rope(
    own: Callable[..., None],
    q_input: Tensor,
    q_output: Tensor,
    eps: float | None,
    freqs_cis: Tensor,
    positions: Tensor,
) -> None:
    """``fused_q_norm_rope``: [T, H, 512] copied into the front of the padded buffer, the last 64 dims rotated."""
    why: str | None
    if eps is not None:
        why = "a head norm is rounded to bf16 before RoPE"
    elif q_output.dtype != torch.bfloat16:
        why = f"{q_output.dtype} output is cast from a query rounded to bf16"
    else:
        why = _refused(q_input, freqs_cis)
    if why is not None:
        _note("fused_q_norm_rope", why)
        own(q_input, q_output, eps, freqs_cis, positions)
        return
    _note("fused_q_norm_rope")
    _rotate(q_input, q_output, _rope_table(freqs_cis), positions)


def rope_in_place(
    own: Callable[..., None],
    q: Tensor,
    k: Tensor | None,
    freqs_cis: Tensor,
    positions: Tensor,
    inverse: bool = False,
) -> None:
    """``fused_rope_inplace``: the last 64 dims of [T, H, 512], given as a view of their own, rotated where they lie."""
    rows: Tensor | None = None
    why: str | None
    if inverse or k is not None:
        why = "an inverse rotation, or one of a key too"
    else:
        rows = _whole_heads(q)
        why = "not the last 64 dims of rows of 512" if rows is None else _refused(rows, freqs_cis)
    if rows is None or why is not None:
        _note("fused_rope_inplace", why)
        own(q, k, freqs_cis, positions, inverse)
        return
    _note("fused_rope_inplace")
    _rotate(rows, rows, _rope_table(freqs_cis), positions)


HOOKS: dict[str, Callable[..., None]] = {
    f"{_OPS}.attention.dsv4.norm_rope.fused_q_norm_rope": query_rope,
    f"{_OPS}.attention.dsv4.norm_rope.fused_rope_inplace": rope_in_place,
}
"""Target to hook. A hook has its target's parameters, after the function beneath."""

_INDEX_SCALE = "its scale is amax / 448 itself, preattn's the power of two above"
_SMALLEST = "a V4.1 block's smallest scale is 2**-13, preattn's 2**-22"

UNTOUCHED: dict[str, str] = {
    f"{_OPS}.attention.dsa.indexer_q.fused_q_indexer_rope_first_quant": _INDEX_SCALE,
    f"{_OPS}.attention.dsa.indexer_k.fused_k_indexer_norm_rope_store": _INDEX_SCALE,
    f"{_OPS}.attention.dsa.indexer_k.fused_k_indexer_norm_rope": "it returns the key in bf16, as no op of preattn does",
    f"{_OPS}.kvcache.dsa_fused_store_index_cache.fused_store_index_k_cache": _INDEX_SCALE,
    f"{_OPS}.quantization.dsa_quant_k_cache.quantize_k_cache_separate": (
        "the scales of its 656-byte record are amax / 448, not powers of two, and taken from a latent rounded to bf16"
    ),
    f"{_OPS}.attention.utils.concat_mla_absorb_q_general": (
        "its query is rotated already, by a call of its own; preattn rotates as it packs"
    ),
    f"{_OPS}.attention.utils.mla_quantize_and_rope_for_fp8": "FlashInfer's kernel, whose roundings are its own",
    f"{_OPS}.attention.dsv4.norm_rope.fused_q_indexer_rope_hadamard_quant": "it applies a Hadamard transform",
    f"{_OPS}.attention.dsv4.norm_rope.fused_q_indexer_rope_hadamard_fp4_quant": "it applies a Hadamard transform",
    f"{_OPS}.attention.dsv4.norm_rope.fused_k_norm_rope_flashmla": (
        f"V4 rows are quantised unrounded, preattn's rounded to bf16; {_SMALLEST}"
    ),
    f"{_OPS}.attention.dsv4.norm_rope.fused_norm_rope_inplace": "it leaves the row in bf16, as no op of preattn does",
    f"{_OPS}.attention.dsv4.attn.fused_store_cache": f"its rows are rotated already or have a table each; {_SMALLEST}",
    f"{_OPS}.attention.dsv4.kv_norm_rope_store.fused_k_norm_rope_uniform_fp8": (
        "rows are rounded to bf16 before e4m3, preattn's are not"
    ),
    "sglang.srt.layers.attention.deepseek_v4_mega_backend.pack_query": (
        "it interleaves a head-major query; preattn pads one that wq_b's permuted rows interleaved"
    ),
}
"""Prologue functions of SGLang 0.5.23 that stay as they are, and why."""


# -- what the hooks run -----------------------------------------------------------------------------------------------


def _refused(query: Tensor, freqs_cis: Tensor) -> str | None:
    """Why a call stays with SGLang's own function; None where preattn's op takes it."""
    if query.dtype != torch.bfloat16 or query.dim() != 3 or query.shape[2] != HEAD_DIM:
        return f"expected a bf16 query of 512 dims; got {query.dtype} {list(query.shape)}"
    if freqs_cis.dtype != torch.complex64 or freqs_cis.dim() != 2 or freqs_cis.shape[1] != _ROPE_DIM // 2:
        return f"expected complex64 frequencies [any, 32]; got {freqs_cis.dtype} {list(freqs_cis.shape)}"
    return _device_refused(query.device)


@functools.cache
def _device_refused(device: torch.device) -> str | None:
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (9, 0):
        return "preattn is compiled for sm_90 and later"
    return None


def _whole_heads(tail: Tensor) -> Tensor | None:
    """The [T, H, 512] rows whose last 64 dims ``tail`` is a view of; None where it is not such a view.

    The op reads and writes those 64 dims alone, so that nothing outside of ``tail`` is touched.
    """
    front = HEAD_DIM - _ROPE_DIM
    if tail.dim() != 3 or tail.shape[2] != _ROPE_DIM or tail.stride()[1:] != (HEAD_DIM, 1):
        return None
    if tail.storage_offset() < front or tail.stride(0) % 8 or tail.data_ptr() % 16:
        return None
    size = (tail.shape[0], tail.shape[1], HEAD_DIM)
    return tail.as_strided(size, tail.stride(), tail.storage_offset() - front)


_tables = WeakIdKeyDictionary()


def _rope_table(freqs_cis: Tensor) -> Tensor:
    """preattn's table, 32 cosines and then 32 sines a position, of SGLang's [positions, 32] complex64.

    Made once for each tensor of frequencies (layers share them) and kept as long as it lives: 256 bytes a position.

    Raises:
        RuntimeError: the first call comes under graph capture, whose memory pool is not a place to keep a table.
    """
    table: Tensor | None = _tables.get(freqs_cis)
    if table is None:
        if freqs_cis.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "freqs_cis: expected frequencies seen in a call before graph capture; got new ones under capture: "
                "run the model once before it is captured, or set PREATTN_DISABLE=1"
            )
        table = torch.view_as_real(freqs_cis).transpose(1, 2).flatten(1)
        if table.is_cuda:  # once: layers on other streams will read it
            torch.cuda.current_stream(table.device).synchronize()
        _tables[freqs_cis] = table
        logger.info("preattn: RoPE table of %.1f MiB beside SGLang's", table.nbytes / 2**20)
    return table


@functools.cache
def _no_kv(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """A KV row, a cache and no slots: the op's other half, which has nothing to do here."""
    row, page = torch.zeros(2, 1, HEAD_DIM, dtype=torch.bfloat16, device=device)
    return row, page[None], torch.zeros(0, dtype=torch.int64, device=device)


def _rotate(query: Tensor, out: Tensor, rope_table: Tensor, positions: Tensor) -> None:
    """Rotate the last 64 dims of [T, H, 512] into ``out``, of the same shape; in place where it is ``query``."""
    if query.is_cuda:
        _compile(query.device, query.shape[1], query is out, positions.dtype)
    _query_half(query, out, rope_table, positions)


def _query_half(query: Tensor, out: Tensor, rope_table: Tensor, positions: Tensor) -> None:
    kv, cache, slots = _no_kv(query.device)
    v4.query_kv_insert(
        query,
        kv.expand(query.shape[0], -1),
        cache,
        slots,
        positions,
        rope_table,
        record="bf16",
        query_rope=True,
        out=out,
    )


@functools.cache
def _compile(device: torch.device, heads: int, in_place: bool, positions_dtype: torch.dtype) -> None:
    """On the first call of a kind, which engines make before they serve, compile it for steps of every size."""
    table = torch.zeros(1, _ROPE_DIM, device=device)
    with hold() as launches:
        for tokens in policy.STEP_SIZES:
            query, out = torch.empty(2, tokens, heads, HEAD_DIM, dtype=torch.bfloat16, device=device)
            positions = torch.zeros(tokens, dtype=positions_dtype, device=device)
            _query_half(out if in_place else query, out, table, positions)
    for launch in launches:
        launch.prepare(device)


# -- switches, and what is said ---------------------------------------------------------------------------------------


def _switched_on(name: str) -> bool:
    return os.environ.get(name, "0") not in ("", "0")


_calls: Counter[str] = Counter()


def _note(function: str, why: str | None = None) -> None:
    """Say once why a call stays with SGLang's own function (None: it does not); count calls under PREATTN_TRACE."""
    if why is not None:
        _say_once(f"{function} runs SGLang's own kernel: {why}")
    if _tracing():
        _calls[f"{function}: {'preattn' if why is None else f'own kernel, {why}'}"] += 1


@functools.cache
def _say_once(message: str) -> None:
    logger.info("preattn: %s", message)


@functools.cache
def _tracing() -> bool:
    """Whether calls are counted; the first to ask has the counts printed at the process's end."""
    if not _switched_on("PREATTN_TRACE"):
        return False
    atexit.register(_print_calls)
    return True


def _print_calls() -> None:
    for call, count in sorted(_calls.items()):
        print(f"preattn [{os.getpid()}] {count} x {call}", file=sys.stderr)


# -- registration -----------------------------------------------------------------------------------------------------


def register() -> None:
    """Entry point: register the hooks with SGLang's registry, to be applied and then verified.

    Calling it again changes nothing. Where it does not apply, the engine is left as it is and the reason logged.

    Raises:
        ImportError: a supported SGLang without its hook registry; SGLang logs it and goes on without the plug-in.
    """
    if _switched_on("PREATTN_DISABLE"):
        return
    reason = _unsupported()
    if reason is not None:
        _warn_once(f"SGLang is left as it is: {reason}")
        return
    # By name: SGLang is no dependency, and its types are not known where this file is checked.
    hooks = importlib.import_module("sglang.srt.plugins.hook_registry")
    registry = hooks.HookRegistry
    added = [target for target, hook in HOOKS.items() if _position(registry, target, hook) is None]
    if not added:
        return
    for target in added:
        registry.register(target, HOOKS[target], hooks.HookType.AROUND)
    _verify_when_applied(registry, around=hooks.HookType.AROUND, replace=hooks.HookType.REPLACE)
    left = "; ".join(f"{target.rpartition('.')[2]}: {why}" for target, why in UNTOUCHED.items())
    _say_once(f"these keep SGLang's own kernels, whose bits are not preattn's: {left}")


def _unsupported() -> str | None:
    try:
        version = metadata.version("sglang")
    except metadata.PackageNotFoundError:
        return "no installed distribution says which version it is"
    if version.partition("+")[0] not in VERSIONS:
        return f"version {version} is not among those checked, {', '.join(VERSIONS)}"
    if torch.version.cuda is None:
        return "its hooks are for NVIDIA GPUs, and this torch is built without CUDA"
    return None


@functools.cache
def _warn_once(message: str) -> None:
    logger.warning("preattn: %s", message)


def _position(registry: Any, target: str, hook: object) -> int | None:
    """Where in its target's list of (type, hook, source) a hook stands."""
    return next((at for at, entry in enumerate(registry._hooks.get(target, ())) if entry[1] is hook), None)


def _verify_when_applied(registry: Any, *, around: object, replace: object) -> None:
    """Have the next ``apply_hooks`` look for conflicts before, and for every hook after.

    ``load_plugins`` logs what a plug-in raises and goes on, but calls ``apply_hooks``, when all plug-ins have
    registered theirs, unprotected: an error raised there ends the process, as it should.
    """
    stock = registry.__dict__["apply_hooks"]

    def apply_hooks(cls: Any) -> None:
        if registry.__dict__["apply_hooks"] is verified:
            registry.apply_hooks = stock
        originals = {target: _resolve(target) for target in HOOKS}
        for target, function in originals.items():
            _yield_to_others(cls, target, function, around=around, replace=replace)
        stock.__get__(None, cls)()
        inactive = [
            problem
            for target, function in originals.items()
            if _position(cls, target, HOOKS[target]) is not None
            for problem in _inactive(target, function)
        ]
        if inactive:
            raise RuntimeError(
                f"preattn: hooks are not active in SGLang: {'; '.join(inactive)}. Its registry logs the cause as an "
                "error and goes on. PREATTN_DISABLE=1 serves without preattn."
            )

    verified = classmethod(apply_hooks)
    registry.apply_hooks = verified


def _resolve(target: str) -> Any:
    try:
        return pkgutil.resolve_name(target)
    except (ImportError, AttributeError) as error:
        raise RuntimeError(
            f"preattn: hooks are not active in SGLang: {target} is not there ({error}). PREATTN_DISABLE=1 serves "
            "without preattn."
        ) from error


def _yield_to_others(registry: Any, target: str, function: Any, *, around: object, replace: object) -> None:
    """Name whoever else holds a target, and withdraw the hook where the other's function would not run as it expects.

    That is: a function that is in the target's place already (patched past the registry), one that replaces the
    target, and one that was around it first, a second copy of this plug-in for one. A hook that goes around the target
    later goes around this one, and is only named.
    """
    entries = registry._hooks[target]
    mine = _position(registry, target, HOOKS[target])
    assert mine is not None
    others = [(at, kind, _who(hook, source)) for at, (kind, hook, source) in enumerate(entries) if at != mine]
    first = [who for at, kind, who in others if kind is replace or (kind is around and at < mine)]
    made = f"{function.__globals__['__name__']}.{function.__code__.co_qualname}"  # a wrapper may bear another's name
    if made != target:
        first.append(f"{made}, which is in its place already")
    if first:
        del entries[mine]
        _warn_once(f"{target} is left to {' and '.join(first)}")
    elif others:
        _warn_once(f"{target} is hooked by {' and '.join(who for _, _, who in others)} too")


def _who(hook: Any, source: Any) -> str:
    """A hook by its plug-in and function."""
    name = f"{hook.__module__}.{getattr(hook, '__qualname__', repr(hook))}"
    return name if source is None else f"plug-in {source.plugin_name} of {source.dist_name} ({name})"


def _inactive(target: str, function: Any) -> Iterator[str]:
    """What is wrong with an applied hook: it is not in its target, or a module still calls the function beneath."""
    if not _wraps(_resolve(target), HOOKS[target]):
        yield f"{target} does not call {HOOKS[target].__qualname__}"
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "sglang":
            for attribute, value in list(vars(module).items()):
                if value is function:
                    yield f"{name}.{attribute} is still the function beneath"


def _wraps(function: Any, hook: object) -> bool:
    """Whether a hook is in the chain of wrappers that the registry made of a function."""
    while function is not None:
        if any(cell.cell_contents is hook for cell in getattr(function, "__closure__", None) or ()):
            return True
        function = getattr(function, "__wrapped__", None)
    return False
