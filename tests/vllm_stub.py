"""A package called ``vllm`` for machines where the real one does not import: the names, signatures and order of calls
that ``tests/vllm_contract.json`` records, with small CPU bodies of our own.

:func:`lay_out` writes it into a folder, from where the tests import it. The models are DeepSeek-V3.2's attention layer
from its latents to what attention returns (attention itself is a sum over a head's dims), and DeepSeek-V4's from its
latents to the query that attention is handed, with the linears whose weights decide how that is projected.
"""

from __future__ import annotations

from pathlib import Path

FILES = {
    "vllm/__init__.py": '__version__ = "0.33.0"\n',
    "vllm/envs.py": """
import os

def __getattr__(name):
    if name == "VLLM_PLUGINS":
        value = os.environ.get(name)
        return None if value is None else value.split(",")
    if name == "VLLM_BATCH_INVARIANT":
        return os.environ.get(name, "0") == "1"
    raise AttributeError(name)
""",
    "vllm/platforms.py": """
class Platform:
    device_name = "stub"
    capability = 90

    def is_cuda(self):
        return self.capability > 0

    def has_device_capability(self, least):
        return self.capability >= least

    def get_device_capability(self):
        return self.capability

current_platform = Platform()
""",
    "vllm/v1/worker/workspace.py": """
import torch

class Manager:
    def __init__(self):
        self.persistent, self.shared = {}, torch.zeros(1 << 24, dtype=torch.uint8)

    def get_persistent(self, key, shape, dtype, *, zero_init=False):
        return self.persistent.setdefault(key, torch.zeros(shape, dtype=dtype))

    def get_simultaneous(self, *specs):
        views, at = [], 0
        for shape, dtype in specs:
            size = torch.Size(shape).numel() * dtype.itemsize
            views.append(self.shared[at : at + size].view(dtype).reshape(shape))
            at += -(-size // 256) * 256
        return views

manager = Manager()

def current_workspace_manager():
    return manager
""",
    "vllm/model_executor/warmup/jit_warmup.py": """
from contextvars import ContextVar

class JitWarmupRegistry:
    _active = ContextVar("registry", default=None)

    def __init__(self):
        self.kernels = []

    @classmethod
    def register(cls, kernel, *args):
        cls._active.get().kernels.append((kernel, args))

    def warmup(self):
        keys = {}
        for kernel, args in self.kernels:
            keys.setdefault(kernel, {}).update(dict.fromkeys(kernel.get_warmup_keys(*args)))
        for kernel, found in keys.items():
            kernel.compile_many(found)
        return {kernel: len(found) for kernel, found in keys.items()}
""",
    "vllm/models/deepseek_v32/common/kernels.py": """
import torch
from preattn import dsa

wrong = None  # what a test wants an op to get wrong

def mqa_logits_use_mx_scales():
    return False

def fused_norm_rope(
    positions, q_c, q_rms_norm_w, q_rms_eps, kv_c, kv_rms_norm_w, kv_rms_eps, k_pe, k_rope_cos_sin_cache, index_k,
    index_k_layer_norm_w, index_k_layer_norm_bias, index_k_layer_norm_eps, index_k_rope_cos_sin_cache,
    topk_indices_buffer, slot_mapping=None, indexer_slot_mapping=None, indexer_k_cache=None,
    indexer_cache_shuffled=False, mla_kv_cache=None, mla_kv_cache_dtype="auto", mla_k_scale=None, has_indexer=True,
    index_rope_interleave=False, q_c_out=None, kv_c_out=None, k_pe_out=None, index_k_out=None, skip_scale=False,
):
    if wrong == "raises":
        raise RuntimeError("the engine's own")
    index = {}
    if has_indexer:
        index = dict(
            index_key=index_k, index_weight=index_k_layer_norm_w, index_bias=index_k_layer_norm_bias,
            index_eps=index_k_layer_norm_eps, index_rope_table=index_k_rope_cos_sin_cache,
            index_pairing="interleaved" if index_rope_interleave else "half_split", top_k=topk_indices_buffer,
            index_cache=indexer_k_cache,
        )
    q, kv, pe = dsa.norm_rope_insert(
        q_c, kv_c, k_pe, mla_kv_cache, slot_mapping if mla_kv_cache is not None else None, positions,
        k_rope_cos_sin_cache, record="dsa_fp8", q_weight=q_rms_norm_w, kv_weight=kv_rms_norm_w, q_eps=q_rms_eps,
        kv_eps=kv_rms_eps, return_kv=True, **index,
    )
    if kv_c_out is not None:
        kv_c_out.copy_(kv)
        k_pe_out.copy_(pe)
    if wrong == "step":
        q.view(torch.int16)[0, 3] += 1
    if wrong == "latent":
        q[1, 5] += 1
    if wrong == "code":
        mla_kv_cache[0, int(slot_mapping[2]) % mla_kv_cache.shape[1], 9] ^= 1
    if wrong == "stray":
        mla_kv_cache[0, 40, 600] += 1
    return q

def fused_q(
    positions, q_pe, q_pe_cos_sin_cache, index_q, index_q_cos_sin_cache, ql_nope, q_scale, index_weights,
    index_weights_softmax_scale, index_weights_head_scale, has_indexer=True, index_rope_interleave=False,
    quantize_mqa=True,
):
    index = {}
    if has_indexer:
        index = dict(
            index_query=index_q, index_weights=index_weights, index_rope_table=index_q_cos_sin_cache,
            index_pairing="interleaved" if index_rope_interleave else "half_split",
            softmax_scale=index_weights_softmax_scale, head_scale=index_weights_head_scale,
        )
    done = dsa.query(
        q_pe, ql_nope, positions, q_pe_cos_sin_cache, form="packed" if quantize_mqa else "pair",
        query_scale=q_scale if quantize_mqa else None, **index,
    )
    if wrong == "query":
        done.q_pe[0, 1, 2] += 1
    return done.index_query, done.index_weights, done.query if quantize_mqa else done.q_pe
""",
    "vllm/v1/attention/backends/mla/flashmla_sparse.py": """
import torch
from vllm.v1.worker.workspace import current_workspace_manager

class FlashMLASparseBackend:
    @staticmethod
    def get_name():
        return "FLASHMLA_SPARSE"

class FlashMLASparseImpl:
    dcp_world_size, q_head_size = 1, 576

    def __init__(self, heads, most):
        self.padded = -(-heads // 64) * 64
        self.workspace_specs = [
            ((most, heads, 576), torch.bfloat16),
            ((8, 576), torch.bfloat16),
            ((most, self.padded, 576), torch.bfloat16),
            ((most, self.padded, 512), torch.bfloat16),
            ((most, heads, 512), torch.bfloat16),
        ]
        self.concatenated = 0

    def forward_mqa(self, q, kv_c_and_k_pe_cache, attn_metadata, layer):
        if isinstance(q, tuple):
            self.concatenated += 1
            pair, (q, *_) = q, current_workspace_manager().get_simultaneous(*self.workspace_specs)
            q = q[: len(pair[0])]
            torch.cat(pair, -1, out=q)
        heads = q.shape[1]
        _, _, padded, padded_out, compact_out = current_workspace_manager().get_simultaneous(*self.workspace_specs)
        if heads < self.padded:
            padded = padded[: len(q)]
            padded.zero_()
            padded[:, :heads] = q
            q = padded
        out = padded_out[: len(q)]
        out.copy_(q[..., :512] + q[..., 512:].sum(-1, keepdim=True))
        compact_out[: len(q)].copy_(out[:, :heads])
        return compact_out[: len(q)], None
""",
    "vllm/models/deepseek_v32/attention.py": """
import torch
from vllm.models.deepseek_v32.common.kernels import fused_norm_rope, fused_q
from vllm.v1.attention.backends.mla.flashmla_sparse import FlashMLASparseBackend, FlashMLASparseImpl

class MLAAttention(torch.nn.Module):
    def bind_kv_cache(self, kv_cache):
        self.kv_cache = kv_cache

class DeepseekV32Attention(MLAAttention):
    def __init__(self, vllm_config, layer_name, parts):
        super().__init__()
        self._vllm_config, self.layer_name, self.attn_backend = vllm_config, layer_name, FlashMLASparseBackend
        self.__dict__.update(parts)
        self.impl = FlashMLASparseImpl(self.num_local_heads, self.topk_indices_buffer.shape[0])

    def forward(self, positions, step):
        store = step.slots is not None
        kv_c_out, k_pe_out = torch.empty_like(step.kv_c), torch.empty_like(step.k_pe)
        q_c = fused_norm_rope(
            positions, step.q_c, self.q_a_layernorm.weight, self.q_a_layernorm.variance_epsilon, step.kv_c,
            self.kv_a_layernorm.weight, self.kv_a_layernorm.variance_epsilon, step.k_pe,
            self.rotary_emb.cos_sin_cache, step.index_k, self.indexer.k_norm.weight, self.indexer.k_norm.bias,
            self.indexer.k_norm.eps, self.indexer_rope_emb.cos_sin_cache, self.topk_indices_buffer,
            slot_mapping=step.slots, indexer_slot_mapping=step.slots,
            indexer_k_cache=self.indexer.k_cache.kv_cache if store else None,
            indexer_cache_shuffled=self.indexer.k_cache.uses_shuffled_layout,
            mla_kv_cache=self.kv_cache if store else None, mla_kv_cache_dtype=self.kv_cache_dtype,
            mla_k_scale=self._k_scale if store else None, skip_scale=True, has_indexer=True,
            index_rope_interleave=self._index_rope_interleave, kv_c_out=kv_c_out, k_pe_out=k_pe_out,
        )
        q = self.q_b_proj(q_c).view(-1, self.num_local_heads, 192)
        q_nope, q_pe = q.split([128, 64], dim=-1)
        ql_nope = torch.bmm(q_nope.transpose(0, 1), self.W_UK_T).transpose(0, 1)
        self.index_query, self.index_weights, mqa_q = fused_q(
            positions, q_pe, self.rotary_emb.cos_sin_cache, step.index_q, self.indexer_rope_emb.cos_sin_cache, ql_nope,
            self._q_scale, step.index_weights, 0.5, 0.25, has_indexer=True,
            index_rope_interleave=self._index_rope_interleave, quantize_mqa=False,
        )
        out, _ = self.impl.forward_mqa((ql_nope, mqa_q), self.kv_cache, None, self)
        return out.clone()
""",
    "vllm/model_executor/layers/utils.py": """
import torch

def default_unquantized_gemm(layer, x, weight, bias=None):
    return torch.nn.functional.linear(x, weight, bias)
""",
    "vllm/model_executor/layers/linear.py": """
import torch
from vllm.model_executor.layers.utils import default_unquantized_gemm

class UnquantizedLinearMethod:
    def __init__(self):
        self._gemm_impl = default_unquantized_gemm

    def apply(self, layer, x, bias=None):
        return self._gemm_impl(layer, x, layer.weight, bias)

class ColumnParallelLinear(torch.nn.Module):
    def __init__(self, weight, quant_method=None):
        super().__init__()
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        self.register_parameter("bias", None)
        self.return_bias, self.gather_output, self.tp_size = False, False, 1
        self.quant_method = quant_method or UnquantizedLinearMethod()

    def forward(self, input_):
        return self.quant_method.apply(self, input_, self.bias)
""",
    "vllm/model_executor/layers/quantization/utils/fp8_utils.py": """
import torch

def per_token_group_quant_fp8(x, group_size, column_major_scales=False, use_ue8m0=None):
    groups = x.float().unflatten(1, (-1, group_size))
    scales = groups.abs().amax(-1).clamp(min=1e-10) / 448
    codes = (groups / scales[..., None]).flatten(1).to(torch.float8_e4m3fn)
    return codes, scales.t().contiguous().t() if column_major_scales else scales
""",
    "vllm/utils/deep_gemm.py": """
import torch

def fp8_gemm_nt(latent, weight, output, is_deep_gemm_e8m0_used=True):
    (codes, scales), (rows, blocks) = latent, weight
    a = (codes.float().unflatten(1, (-1, 128)) * scales[..., None]).flatten(1)
    b = rows.float() * blocks.repeat_interleave(128, 0).repeat_interleave(128, 1)
    output.copy_((a @ b.t()).bfloat16())
""",
    "vllm/model_executor/layers/quantization/fp8.py": """
class Fp8LinearMethod:
    block_quant, weight_block_size = True, [128, 128]

    def __init__(self, kernel):
        self.fp8_linear = kernel

    def apply(self, layer, x, bias=None):
        return self.fp8_linear.apply_weights(layer, x, bias)
""",
    "vllm/model_executor/kernels/linear/scaled_mm/deep_gemm.py": """
import torch
from vllm.model_executor.layers.quantization.utils.fp8_utils import per_token_group_quant_fp8
from vllm.utils.deep_gemm import fp8_gemm_nt

class DeepGemmFp8BlockScaledMMKernel:
    use_deep_gemm_e8m0, use_triton = False, False

    def quant_fp8(self, x, scale=None, scale_ub=None, use_triton=False):
        return per_token_group_quant_fp8(x, 128, column_major_scales=True)

    def apply_weights(self, layer, x, bias=None):
        output = torch.empty(x.shape[0], layer.weight.shape[0], dtype=torch.bfloat16)
        fp8_gemm_nt(self.quant_fp8(x), (layer.weight, layer.weight_scale_inv), output, is_deep_gemm_e8m0_used=False)
        return output
""",
    "vllm/model_executor/kernels/linear/scaled_mm/flashinfer.py": """
from types import SimpleNamespace
from vllm.model_executor.layers.quantization.utils.fp8_utils import per_token_group_quant_fp8
from .deep_gemm import DeepGemmFp8BlockScaledMMKernel, fp8_gemm_nt

class FlashInferFp8DeepGEMMDynamicBlockScaledKernel:
    def __init__(self):
        self.fallback, self.weight_group_shape = DeepGemmFp8BlockScaledMMKernel(), SimpleNamespace(col=128)

    def apply_weights(self, layer, x, bias=None):
        return self.fallback.apply_weights(layer, x if len(x) >= 32 else x * 1.0, bias)
""",
    "vllm/models/deepseek_v4/attention.py": """
import torch

class DeepseekV4Attention(torch.nn.Module):
    mxfp8 = False

    def __init__(self, prefix, backend_cls, wq_b, heads, padded_heads, most, cache, cos_sin_cache):
        super().__init__()
        self.prefix, self.backend_cls, self.wq_b = prefix, backend_cls, wq_b
        self.n_local_heads, self.padded_heads, self.head_dim = heads, padded_heads, 512
        self.q_lora_rank, self.max_num_batched_tokens = wq_b.weight.shape[1], most
        self.kv_cache_torch_dtype, self.cache, self.cos_sin_cache, self.eps = cache.dtype, cache, cos_sin_cache, 1e-6

    def forward(self, qr, kv, positions, slots):
        q = self._wq_b_proj(qr, None).view(-1, self.n_local_heads, self.head_dim)
        return self._fused_qnorm_rope_kv_insert(q, kv, positions, slots)

    def _wq_b_proj(self, qr, qr_scale=None):
        return self.wq_b(qr)

    def _fused_qnorm_rope_kv_insert(self, q, kv, positions, attn_metadata):
        if attn_metadata is None:
            return torch.nn.functional.pad(q, (0, 0, 0, self.padded_heads - self.n_local_heads), value=0.0)
        return torch.ops.preattn_test_C.fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert(
            q, kv, self.cache, attn_metadata, positions, self.cos_sin_cache, self.padded_heads, self.eps, 64,
            not self.mxfp8, self.mxfp8,
        )
""",
    "vllm/models/other.py": "class OtherAttention: ...\n",
}


def lay_out(folder: Path) -> None:
    """Write the package."""
    for name, text in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.lstrip("\n"))
        for parent in path.parents:
            if parent == folder:
                break
            if not (parent / "__init__.py").exists() and (parent.with_suffix(".py").exists() is False):
                (parent / "__init__.py").write_text("")
