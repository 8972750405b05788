"""V4 without the query's copy: ``wq_b`` writes where attention reads, and the operator works where its query lies.

The engine projects into a tensor of the rank's heads; its operator reads that tensor and writes a second one, of the
heads that attention takes. Nobody reads the first again. So two methods of a layer are replaced:

- ``_wq_b_proj``: where attention takes more heads than the rank has, the layer's own matmul writes into the front of a
  query buffer of that many heads. It is the engine's call, with another row stride of its result.
- ``_fused_qnorm_rope_kv_insert``: the query it is handed is the layer's own, so that the operator it calls finishes
  that query in place: in the buffer, or, where the rank has all the heads, in whatever the projection left.

The buffer is the workspace manager's: one for each microbatch and lane, made and zeroed at its first step, which for
the first microbatch is the engine's profiling run. Its layers use it in turn: projection, operator and attention of a
layer are on one stream, and attention only reads the query, so that the next layer overwrites what nobody needs any
more.

A layer whose ``wq_b`` is multiplied by something that allocates its own result keeps the engine's projection and the
operator that copies. A short step outside a CUDA graph keeps both of the engine's (:func:`left_to_engine`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ...policy import SMALL_STEP
from ...v4 import HEAD_DIM
from . import report, shadow
from .layers import WORKSPACE, persistent
from .patching import Patches

BACKENDS = ("FLASHMLA_SPARSE_DSV4", "FLASHMLA_SPARSE_DSV41")
"""The engine's names of the backends that pad a query and are known to do nothing but read it."""

LINEAR = "vllm.model_executor.layers.linear"
FP8 = "vllm.model_executor.layers.quantization.fp8"
GEMMS = "vllm.model_executor.layers.utils"
DEEP_GEMM = "vllm.model_executor.kernels.linear.scaled_mm.deep_gemm"
FLASHINFER = "vllm.model_executor.kernels.linear.scaled_mm.flashinfer"
DEEP_GEMM_CALL = "vllm.utils.deep_gemm"

EAGER_TOKENS = SMALL_STEP
"""Tokens of the longest step that is left to the engine where no graph holds it.

A choice between what was measured (H200, ``results/v4_layer.json``): projection and operator together, ours take the
host 47 to 180 us more, and save the GPU 5 to 16 us at 257 tokens and 15 to 43 us at 1,024.
"""
FLASHINFER_TOKENS = 32
"""Tokens from which the kernel that chooses between FlashInfer and DeepGEMM takes DeepGEMM."""


@dataclass(frozen=True)
class Writer:
    """How a layer's ``wq_b`` is multiplied into a tensor that is given.

    Attributes:
        kind: what the weight is and what multiplies it, for the trace.
        write: ``write(linear, latent, out)``: the engine's own product of [T, rank] into [T, H * 512], strided rows.
        least: tokens of the smallest step that the engine multiplies this way.
    """

    kind: str
    write: Callable[[Any, Tensor, Tensor], None]
    least: int = 1


class Thread(threading.local):
    """The layer whose operator this thread calls.

    Attributes:
        layer: that layer.
        query: the query it hands over, which is its own.
        buffer: the query buffer, where the last projection has written into it.
    """

    layer: Any = None
    query: Tensor | None = None
    buffer: Tensor | None = None


thread = Thread()


def patch(module: ModuleType, patches: Patches) -> None:
    """Replace both methods of a model's attention layer."""
    owner, engine = module.DeepseekV4Attention, SimpleNamespace()

    def _wq_b_proj(self: Any, qr: Any, qr_scale: Tensor | None = None) -> Tensor:
        return project(engine.project, self, qr, qr_scale)

    def _fused_qnorm_rope_kv_insert(self: Any, q: Tensor, kv: Tensor, positions: Tensor, attn_metadata: Any) -> Tensor:
        outer = thread.layer, thread.query
        thread.layer, thread.query = self, q
        try:
            finished: Tensor = engine.finish(self, q, kv, positions, attn_metadata)
            return finished
        finally:
            thread.layer, thread.query = outer
            thread.buffer = None

    for name, method in (("project", _wq_b_proj), ("finish", _fused_qnorm_rope_kv_insert)):
        own = patches.replace(owner, method.__name__, method, defined_in=module.__name__)
        setattr(engine, name, own)


def left_to_engine(step: Tensor) -> bool:
    """Whether a step of ``step.shape[0]`` tokens runs the engine's own projection and operators.

    A short step waits for the host, where an operator in Python costs more than a compiled one and the copy is small.
    In a graph the host does not count. Shadow mode compares ours at every size, and where the engine promises bits that
    do not depend on the batch, they must not depend on its length either (V4's norm may round otherwise).
    """
    return (
        step.shape[0] <= EAGER_TOKENS
        and not (step.is_cuda and torch.cuda.is_current_stream_capturing())
        and not shadow.active()
        and not import_module("vllm.envs").VLLM_BATCH_INVARIANT
    )


# -- the projection --------------------------------------------------------------------------------------------


def project(own: Callable[..., Tensor], layer: Any, qr: Any, qr_scale: Tensor | None) -> Tensor:
    """``_wq_b_proj``: [T, H * 512], in the front of the query buffer where the layer's weights allow that."""
    thread.buffer = None
    found, heads = _target(layer, qr, qr_scale), layer.n_local_heads
    if isinstance(found, str):
        if report.tracing():
            report.count("wq_b", f"{layer.prefix}: the engine's own: {found}")
        return own(layer, qr, qr_scale)
    writer, buffer = found
    live = buffer[: qr.shape[0], :heads].flatten(1)
    writer.write(layer.wq_b, qr, live)
    if report.tracing():
        report.count("wq_b", f"{layer.prefix}: in the buffer, {heads} of {buffer.shape[1]} heads, {writer.kind}")
    if shadow.active():
        shadow.refuse_capture()
        shadow.compare("wq_b", "query", layer.prefix, live, own(layer, qr, qr_scale))
    thread.buffer = buffer
    return live


def _target(layer: Any, qr: Any, qr_scale: Tensor | None) -> tuple[Writer, Tensor] | str:
    """What multiplies a step's latent, and into which query buffer; or why the engine's own projection does."""
    writer = writer_of(layer)
    if isinstance(writer, str):
        return writer
    reason = _unfit(layer, writer, qr, qr_scale)
    if reason is not None:
        return reason
    buffer = query_buffer(layer)  # also where it is not used: a capture, which may come next, may not make one
    if buffer is None:
        return "no buffer for this microbatch"
    if left_to_engine(qr):
        return f"no graph, and at most {EAGER_TOKENS} tokens"
    return writer, buffer


def writer_of(layer: Any) -> Writer | str:
    """How a layer's ``wq_b`` is written into the buffer, or why it is not; settled at the layer's first step.

    That is in the engine's profiling run: weights are loaded then, and adapters in place. A linear that is exchanged
    later is looked at again.
    """
    linear = layer.wq_b
    known: tuple[Any, Writer | str] | None = layer.__dict__.get("_preattn_writer")
    if known is not None and known[0] is linear:
        return known[1]
    found = _padded(layer) or _writer(linear, (layer.n_local_heads * HEAD_DIM, layer.q_lora_rank))
    layer.__dict__["_preattn_writer"] = (linear, found)
    if isinstance(found, str):
        report.once(f"preattn: wq_b is not written into a query buffer: {found}")
    return found


def _padded(layer: Any) -> str | None:
    """Why a layer's query has no buffer to be written into, whatever its weights are."""
    backend, dtype = layer.backend_cls.get_name(), layer.kv_cache_torch_dtype
    if layer.n_local_heads == layer.padded_heads:
        return "attention takes the rank's heads as they are, and the operator works in place"
    if backend not in BACKENDS:
        return f"{backend} is not among the backends known to only read its query"
    if layer.head_dim != HEAD_DIM:
        return f"its heads have {layer.head_dim} dims"
    if dtype != torch.uint8:
        return f"a cache of {dtype}, whose operators pad no query"
    return None


def _writer(linear: Any, shape: tuple[int, int]) -> Writer | str:
    """How the engine multiplies by a linear's weight, where that can be into a given tensor."""
    if _type(linear) != f"{LINEAR}.ColumnParallelLinear":
        return f"it is a {type(linear).__name__}"
    if linear.bias is not None or linear.return_bias or (linear.gather_output and linear.tp_size > 1):
        return "it does more than multiply: a bias, or a gather"
    if linear._forward_hooks or linear._forward_pre_hooks or "forward" in vars(linear):
        return "something else hooks its forward"
    weight, method = getattr(linear, "weight", None), linear.quant_method
    if not isinstance(weight, Tensor):  # AWQ, GPTQ and packed formats keep theirs under other names
        return f"its weight is quantised by {type(method).__name__}"
    if weight.shape != shape or weight.stride() != (shape[1], 1):
        return f"a weight of shape {list(weight.shape)} and strides {list(weight.stride())}"
    if _type(method) == f"{LINEAR}.UnquantizedLinearMethod":
        return _unquantised(method, weight)
    if _type(method) == f"{FP8}.Fp8LinearMethod":
        return _block_scaled(linear, method)
    return f"its weight is quantised by {type(method).__name__}"


def _unquantised(method: Any, weight: Tensor) -> Writer | str:
    own = (getattr(method._gemm_impl, "__module__", None), getattr(method._gemm_impl, "__name__", None))
    if own != (GEMMS, "default_unquantized_gemm") or import_module("vllm.envs").VLLM_BATCH_INVARIANT:
        return "its matmul is not torch's"
    if weight.dtype != torch.bfloat16:
        return f"a weight of {weight.dtype}"

    def write(linear: Any, latent: Tensor, out: Tensor) -> None:
        torch.mm(latent, linear.weight.t(), out=out)

    return Writer("bf16", write)


def _block_scaled(linear: Any, method: Any) -> Writer | str:
    """An e4m3 weight with 128 x 128 scales: DeepGEMM writes into a given tensor, whose rows may have any stride."""
    kernel, least = method.fp8_linear, 1
    if not method.block_quant or list(method.weight_block_size) != [128, 128]:
        return "its e4m3 weight does not have a scale for 128 x 128"
    if getattr(linear, "input_scale", None) is not None:
        return "its latent has a scale of the checkpoint's"
    quantise: Callable[[Tensor], tuple[Tensor, Tensor]]
    if _type(kernel) == f"{DEEP_GEMM}.DeepGemmFp8BlockScaledMMKernel":
        e8m0 = kernel.use_deep_gemm_e8m0

        def quantise(latent: Tensor) -> tuple[Tensor, Tensor]:
            codes, scales = kernel.quant_fp8(latent, None, None, use_triton=kernel.use_triton)
            return codes, scales

    elif _type(kernel) == f"{FLASHINFER}.FlashInferFp8DeepGEMMDynamicBlockScaledKernel":
        e8m0, group = kernel.fallback.use_deep_gemm_e8m0, kernel.weight_group_shape.col
        by_group = import_module(FLASHINFER).per_token_group_quant_fp8
        if not import_module("vllm.envs").VLLM_BATCH_INVARIANT:
            least = FLASHINFER_TOKENS

        def quantise(latent: Tensor) -> tuple[Tensor, Tensor]:
            codes, scales = by_group(latent, group_size=group, column_major_scales=True, use_ue8m0=e8m0)
            return codes, scales

    else:
        return f"{type(kernel).__name__} allocates its result"
    multiply = import_module(DEEP_GEMM_CALL).fp8_gemm_nt

    def write(linear: Any, latent: Tensor, out: Tensor) -> None:
        weight = (linear.weight, linear.weight_scale_inv)
        multiply(quantise(latent), weight, out, is_deep_gemm_e8m0_used=e8m0)

    return Writer("e4m3 by DeepGEMM", write, least)


def _unfit(layer: Any, writer: Writer, qr: Any, qr_scale: Tensor | None) -> str | None:
    """Why a step's latent is not for the writer."""
    if not isinstance(qr, Tensor) or qr_scale is not None:
        return "the latent is quantised already"
    if qr.dtype != torch.bfloat16 or qr.dim() != 2 or not qr.is_contiguous() or qr.device != layer.wq_b.weight.device:
        return f"a latent of {qr.dtype}, shape {list(qr.shape)}, strides {list(qr.stride())}, on {qr.device}"
    if qr.shape[0] < writer.least:
        return f"fewer than {writer.least} tokens"
    if qr.shape[0] > layer.max_num_batched_tokens:
        return "more tokens than the engine batches"
    return None


def _type(thing: object) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


# -- the operator ----------------------------------------------------------------------------------------------


def query_buffer(layer: Any) -> Tensor | None:
    """The query buffer of a layer's microbatch, [max tokens, padded heads, 512]: zeros past the rank's heads."""
    shape = (layer.max_num_batched_tokens, layer.padded_heads, HEAD_DIM)
    return persistent(import_module(WORKSPACE).current_workspace_manager(), layer.n_local_heads, shape)


def owned(query: Tensor) -> bool:
    """Whether an operator's query is the calling layer's own, which nobody reads after the operator."""
    own = thread.query
    return own is not None and own.data_ptr() == query.data_ptr() and own.shape == query.shape and query.numel() > 0


def place(query: Tensor, padded_heads: int) -> Tensor | None:
    """Where an operator finishes a query that its layer owns, [T, P, 512]; None where it has to write another."""
    tokens, heads, _ = query.shape
    if heads == padded_heads:
        alone = query.untyped_storage().nbytes() == query.numel() * query.element_size()  # no scratch of a kernel's
        return query if alone and query.is_contiguous() else None
    buffer = thread.buffer
    if buffer is None or query.data_ptr() != buffer.data_ptr() or buffer.shape[1] != padded_heads:
        return None
    return buffer[:tokens]


def layer_name() -> str:
    """The engine's name of the layer whose operator this thread calls."""
    return "of this call" if thread.layer is None else str(thread.layer.prefix)
