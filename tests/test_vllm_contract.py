"""What the plug-in for vLLM relies on, checked against the sources of a release: a release that moves something fails
here, with what moved.

The sources are parsed, never imported. ``tests/vllm_contract.json`` records names, signatures, call sites and a hash of
every function that is replaced, or whose inside the plug-in counts on. For another release:

    PREATTN_VLLM=0.34.0 python -m pytest tests/test_vllm_contract.py     # what moved
    PREATTN_VLLM=0.34.0 python tests/test_vllm_contract.py               # record it, once the plug-in follows
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import os
import sys
import textwrap
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import release_sources

from preattn.integrations.vllm import flashmla, layers, ops, plugin, projection, v4, warm

RECORD = Path(__file__).with_name("vllm_contract.json")
VERSION = os.environ.get("PREATTN_VLLM", plugin.VERSIONS[-1])

KERNELS, ATTENTION, FLASHMLA = layers.KERNELS, layers.ATTENTION, layers.FLASHMLA
MLA = "vllm.model_executor.layers.attention.mla_attention"
WORKSPACE = "vllm.v1.worker.workspace"
ENVS = "vllm.envs"
JIT_WARMUP = "vllm.model_executor.warmup.jit_warmup"
LOADER = "vllm.plugins"
V4, V41 = v4.MODELS
V4_LAYER = tuple(
    f"DeepseekV4Attention.{name}"
    for name in (
        "__init__",
        "_prepare_and_attn",
        "_sparse_indexer_and_attn",
        "_wq_b_proj",
        "_fused_qnorm_rope_kv_insert",
    )
)
V4_FLASHMLA, V41_FLASHMLA = (f"{module.removesuffix('.attention')}.nvidia.flashmla" for module in v4.MODELS)
V41_STEP = "vllm.models.deepseek_v41.nvidia.specialized_decode.attention.step"
V41_MEGA = "vllm.models.deepseek_v41.nvidia.flash_mla_mega_attn"
V4_SPARSE, V41_SPARSE = (f"{module.removesuffix('.attention')}.sparse_mla" for module in v4.MODELS)
LINEAR, FP8, GEMMS = projection.LINEAR, projection.FP8, projection.GEMMS
DEEP_GEMM, FLASHINFER, DEEP_GEMM_CALL = projection.DEEP_GEMM, projection.FLASHINFER, projection.DEEP_GEMM_CALL
BLOCK_SCALED = "vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel"
FP8_UTILS = "vllm.model_executor.layers.quantization.utils.fp8_utils"
STREAMS = "vllm.utils.multi_stream_utils"

FUNCTIONS: dict[str, tuple[str, ...]] = {
    KERNELS: ("fused_norm_rope", "fused_q", "_fused_norm_rope_kernel", "_fused_q_kernel"),
    ATTENTION: tuple(f"DeepseekV32Attention.{name}" for name in ("__init__", "forward", "_sparse_indexer_and_attn")),
    MLA: ("MLAAttention.bind_kv_cache",),
    FLASHMLA: tuple(
        f"FlashMLASparseImpl.{name}"
        for name in (
            "__init__",
            "forward_mqa",
            "_forward_bf16_kv",
            "_forward_fp8_kv_mixed_batch",
            "_forward_fp8_kv_separate_prefill_decode",
            "_bf16_flash_mla_kernel",
            "_fp8_flash_mla_kernel",
        )
    ),
    WORKSPACE: ("WorkspaceManager.get_persistent", "WorkspaceManager.get_simultaneous", "current_workspace_manager"),
    JIT_WARMUP: ("JitWarmupRegistry.register", "JitWarmupRegistry.warmup"),
    LOADER: ("load_plugins_by_group", "load_general_plugins"),
    V4: V4_LAYER,
    V41: V4_LAYER,
    **dict.fromkeys(
        (V4_FLASHMLA, V41_FLASHMLA),
        tuple(
            f"DeepseekV4FlashMLAAttention.{name}"
            for name in ("get_padded_num_q_heads", "forward_mqa", "_forward_decode", "_forward_prefill")
        ),
    ),
    V41_STEP: ("AttentionStep._prepare",),
    LINEAR: (
        "UnquantizedLinearMethod.__init__",
        "UnquantizedLinearMethod.apply",
        "ColumnParallelLinear.forward",
    ),
    GEMMS: ("default_unquantized_gemm", "dispatch_unquantized_gemm"),
    FP8: ("Fp8LinearMethod.__init__", "Fp8LinearMethod.apply"),
    BLOCK_SCALED: ("Fp8BlockScaledMMLinearKernel.__init__", "Fp8BlockScaledMMLinearKernel.apply_weights"),
    DEEP_GEMM: (
        "DeepGemmFp8BlockScaledMMKernel.__init__",
        "DeepGemmFp8BlockScaledMMKernel.apply_block_scaled_mm",
        "_fp8_gemm_nt_op",
    ),
    FLASHINFER: (
        "FlashInferFp8DeepGEMMDynamicBlockScaledKernel.apply_block_scaled_mm",
        "_dynamic_flashinfer_deepgemm_blockscale_gemm_impl",
    ),
    FP8_UTILS: ("per_token_group_quant_fp8",),
    DEEP_GEMM_CALL: ("fp8_gemm_nt",),
    STREAMS: ("execute_in_parallel", "maybe_execute_in_parallel"),
}
"""What is replaced, called, or counted on, by module."""

BACKEND_FILES = tuple(
    f"vllm/v1/attention/backends/mla/{name}.py"
    for name in ("flashmla_sparse", "flashinfer_mla_sparse", "flashinfer_mla_sparse_sm90", "flashattn_mla_sparse")
)


# -- reading sources -------------------------------------------------------------------------------------------


def path_of(module: str) -> str:
    """A module's file in the wheel."""
    return module.replace(".", "/") + ("/__init__.py" if module == LOADER else ".py")


def sources() -> Path:
    """The folder with the release's sources; skips, with the reason, where they cannot be had."""
    more = {path_of(module) for module in (V4_SPARSE, V41_SPARSE, V41_MEGA, ENVS)} | set(BACKEND_FILES)
    members = sorted({path_of(module) for module in FUNCTIONS} | more)
    return release_sources.sources("vllm", VERSION, members)


@cache
def source(module: str) -> tuple[str, ast.Module]:
    """A module's text and tree; nothing, where the release has no such file."""
    path = sources() / path_of(module)
    text = path.read_text() if path.is_file() else ""
    return text, ast.parse(text)


def find(module: str, name: str) -> ast.FunctionDef | None:
    """A function or method, or None where it is gone."""
    body: list[ast.stmt] = source(module)[1].body
    node: ast.stmt | None = None
    for part in name.split("."):
        node = next(
            (n for n in body if isinstance(n, ast.FunctionDef | ast.ClassDef) and n.name == part),
            None,
        )
        if node is None:
            return None
        body = node.body
    return node if isinstance(node, ast.FunctionDef) else None


def signature(node: ast.FunctionDef) -> list[str]:
    """Parameters with their defaults: ``name``, ``name=default``, ``*name``."""
    given = node.args
    positional = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(positional) - len(given.defaults)) + list(given.defaults)
    found = [_parameter(argument.arg, default) for argument, default in zip(positional, defaults, strict=True)]
    if given.vararg is not None:
        found.append(f"*{given.vararg.arg}")
    elif given.kwonlyargs:
        found.append("*")
    found += [_parameter(a.arg, default) for a, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)]
    return found + ([f"**{given.kwarg.arg}"] if given.kwarg is not None else [])


def _parameter(name: str, default: ast.expr | None) -> str:
    return name if default is None else f"{name}={ast.unparse(default)}"


def digest(module: str, node: ast.FunctionDef) -> str:
    """Hash of a function's source, less blank lines and lines of comment."""
    segment = textwrap.dedent(ast.get_source_segment(source(module)[0], node, padded=True) or "")
    lines = [line.rstrip() for line in segment.splitlines()]
    kept = [line for line in lines if line.strip() and not line.strip().startswith("#")]
    return hashlib.sha256("\n".join(kept).encode()).hexdigest()[:16]


def calls(module: str, name: str, called: str) -> list[ast.Call]:
    """The calls of ``called`` within a function."""
    node = find(module, name)
    found = [call for call in ast.walk(node) if isinstance(call, ast.Call)] if node is not None else []
    return [call for call in found if ast.unparse(call.func) == called]


def site(call: ast.Call) -> dict[str, Any]:
    """A call as data: how many arguments by position, the names of the others, and a hash of what is handed over."""
    return {
        "positional": len(call.args),
        "keywords": [keyword.arg for keyword in call.keywords],
        "arguments": hashlib.sha256(ast.unparse(call).encode()).hexdigest()[:16],
    }


CALLS = (
    (ATTENTION, "DeepseekV32Attention.forward", "fused_norm_rope"),
    (ATTENTION, "DeepseekV32Attention.forward", "fused_q"),
    (ATTENTION, "DeepseekV32Attention.forward", "torch.bmm"),
    (ATTENTION, "DeepseekV32Attention._sparse_indexer_and_attn", "self.impl.forward_mqa"),
    *(
        (module, "DeepseekV4Attention._fused_qnorm_rope_kv_insert", f"torch.ops._C.{op}")
        for op in v4.OPS
        for module in (V4, V41)
    ),
    *(
        (module, f"{owner}._wq_b_proj" if called == "self.wq_b" else f"{owner}._prepare_and_attn", called)
        for module, owner in ((V4, "DeepseekV4Attention"), (V41, "DeepseekV4Attention"))
        for called in ("self.wq_b", "self._wq_b_proj", "self._fused_qnorm_rope_kv_insert")
    ),
    (V41_STEP, "AttentionStep._prepare", "attn._wq_b_proj"),
    (V41_STEP, "AttentionStep._prepare", "attn._fused_qnorm_rope_kv_insert"),
)
"""Call sites: in a function of a module, of a name."""


def contract() -> dict[str, Any]:
    """The release's side of the contract, as data."""
    functions = {}
    for module, names in FUNCTIONS.items():
        for name in names:
            node = find(module, name)
            functions[f"{module}:{name}"] = (
                None if node is None else {"signature": signature(node), "source": digest(module, node)}
            )
    sites = {
        f"{module}:{name} calls {called}": [site(call) for call in calls(module, name, called)]
        for module, name, called in CALLS
    }
    return {"version": VERSION, "functions": functions, "calls": sites}


@cache
def now() -> dict[str, Any]:
    return contract()


@cache
def recorded() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RECORD.read_text())
    return found


# -- the release against the record ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", [f"{module}:{name}" for module, names in FUNCTIONS.items() for name in names])
def test_a_function_is_where_and_what_it_was(name: str) -> None:
    found, then = now()["functions"][name], recorded()["functions"][name]
    assert found is not None, f"vLLM {VERSION} has no {name}"
    assert found["signature"] == then["signature"], f"the signature of {name} has changed"
    assert found["source"] == then["source"], f"the source of {name} has changed: read it, then record it"


@pytest.mark.parametrize("where", [f"{module}:{name} calls {called}" for module, name, called in CALLS])
def test_a_call_site_is_what_it_was(where: str) -> None:
    assert now()["calls"][where] == recorded()["calls"][where], f"{where} in another way than before"


def test_the_record_is_of_a_version_that_the_plugin_accepts() -> None:
    assert recorded()["version"] in plugin.VERSIONS


# -- the plug-in against the release ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (ops.fused_norm_rope, f"{KERNELS}:fused_norm_rope"),
        (ops.fused_q, f"{KERNELS}:fused_q"),
        (flashmla.forward_mqa, f"{FLASHMLA}:FlashMLASparseImpl.forward_mqa"),
    ],
)
def test_a_replacement_has_the_signature_of_what_it_replaces(ours: Any, theirs: str) -> None:
    parameters = [
        p.name if p.default is p.empty else f"{p.name}={p.default!r}"
        for p in inspect.signature(ours).parameters.values()
    ]
    assert parameters == recorded()["functions"][theirs]["signature"]


def test_the_model_imports_both_ops_by_name() -> None:
    imports = [n for n in source(ATTENTION)[1].body if isinstance(n, ast.ImportFrom) and n.module == KERNELS]
    names = {alias.name: alias.asname for node in imports for alias in node.names}
    assert names == {"fused_norm_rope": None, "fused_q": None}
    assert not any(isinstance(n, ast.ImportFrom) and n.module == "torch" for n in source(ATTENTION)[1].body)


def test_the_absorb_matmul_is_the_one_that_the_plugin_knows() -> None:
    (call,) = calls(ATTENTION, "DeepseekV32Attention.forward", "torch.bmm")
    assert len(call.args) == 2 and not call.keywords and ast.unparse(call.args[1]) == "self.W_UK_T"


def test_the_attention_class_inherits_what_the_plugin_binds() -> None:
    owner = next(n for n in source(ATTENTION)[1].body if isinstance(n, ast.ClassDef) and "Attention" in n.name)
    assert owner.name == "DeepseekV32Attention" and [ast.unparse(base) for base in owner.bases] == ["MLAAttention"]
    assert find(ATTENTION, "DeepseekV32Attention.bind_kv_cache") is None


def test_the_backend_takes_its_workspace_manager_by_a_global_name() -> None:
    imports = [n for n in source(FLASHMLA)[1].body if isinstance(n, ast.ImportFrom) and n.module == WORKSPACE]
    assert [alias.name for node in imports for alias in node.names] == ["current_workspace_manager"]


def test_the_workspace_views_end_in_the_padded_and_the_compact_result() -> None:
    """What lets both results share their memory: the last two views, taken by position."""
    node = find(FLASHMLA, "FlashMLASparseImpl._forward_fp8_kv_separate_prefill_decode")
    assert node is not None
    targets = [
        ast.unparse(n.targets[0])
        for n in ast.walk(node)
        if isinstance(n, ast.Assign) and "get_simultaneous" in ast.unparse(n.value)
    ]
    assert "_, prefill_bf16_workspace, *_, padded_out, compact_out" in [target.strip("()") for target in targets]
    specs = find(FLASHMLA, "FlashMLASparseImpl.__init__")
    assert specs is not None
    extended = [ast.unparse(n) for n in ast.walk(specs) if isinstance(n, ast.Call) and "specs.extend" in ast.unparse(n)]
    assert len(extended) == 1 and "padded_prefill_query_heads, self.kv_lora_rank" in extended[0]


def test_the_warmup_registry_asks_for_what_ours_answers() -> None:
    node = find(JIT_WARMUP, "JitWarmupRegistry.warmup")
    assert node is not None
    asked = {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute) and ast.unparse(n.value) == "kernel"}
    of_triton_kernels = {"supports_parallel_compile"}  # asked of its own kind of kernel alone
    assert asked - {"__class__"} - of_triton_kernels <= {
        name for name in dir(warm.JIT_WARMUP) if not name.startswith("_")
    }
    assert "_active: ContextVar" in source(JIT_WARMUP)[0]


def test_the_loader_reads_the_group_that_the_plugin_registers_in() -> None:
    assert f'DEFAULT_PLUGINS_GROUP = "{plugin.GROUP}"' in source(LOADER)[0]


@pytest.mark.parametrize("name", layers.BACKENDS)
def test_a_backend_still_has_its_name(name: str) -> None:
    texts = [(sources() / file).read_text() for file in BACKEND_FILES]
    assert any(f'return "{name}"' in text for text in texts), f"no backend of vLLM {VERSION} is called {name}"


@pytest.mark.parametrize("name", v4.OPS)
def test_a_v4_operator_is_called_with_no_more_than_ours_takes(name: str) -> None:
    most = len(inspect.signature(v4.OPS[name]).parameters)
    sites = [found for key, where in recorded()["calls"].items() if key.endswith(f".{name}") for found in where]
    assert all(found["positional"] <= most and not found["keywords"] for found in sites)


# -- V4's query where it lies ----------------------------------------------------------------------------------


@pytest.mark.parametrize("module", [V4, V41])
def test_the_methods_that_the_plugin_replaces_take_what_ours_take(module: str) -> None:
    assert recorded()["functions"][f"{module}:DeepseekV4Attention._wq_b_proj"]["signature"] == [
        "self",
        "qr",
        "qr_scale=None",
    ]
    finish = recorded()["functions"][f"{module}:DeepseekV4Attention._fused_qnorm_rope_kv_insert"]
    assert finish["signature"] == ["self", "q", "kv", "positions", "attn_metadata"]


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (V4, "DeepseekV4Attention._prepare_and_attn.project_query_and_cache_kv"),
        (V41, "DeepseekV4Attention._prepare_and_attn.project_query_and_cache_kv"),
        (V41_STEP, "AttentionStep._prepare"),
    ],
)
def test_nobody_reads_a_projected_query_after_its_operator(module: str, name: str) -> None:
    """What lets the operator work in place: ``q`` is bound anew, or returned, in the statement that hands it over."""
    node = find(module, name)
    assert node is not None
    handed = [n for n in ast.walk(node) if isinstance(n, ast.Call) and "_fused_qnorm" in ast.unparse(n.func)]
    assert len(handed) == 1 and ast.unparse(handed[0].args[0]) == "q"
    statement = next(n for n in ast.walk(node) if isinstance(n, ast.Assign | ast.Return) and n.value is handed[0])
    assert isinstance(statement, ast.Return) or [ast.unparse(target) for target in statement.targets] == ["q"]


@pytest.mark.parametrize("module", [V4, V41])
def test_projection_operator_and_attention_are_on_one_stream(module: str) -> None:
    """The projection is the part of a parallel section that stays on the current stream."""
    found = [
        call
        for runner in ("execute_in_parallel", "maybe_execute_in_parallel")
        for call in calls(module, "DeepseekV4Attention._prepare_and_attn", runner)
        if "project_query_and_cache_kv" in ast.unparse(call)
    ]
    assert found and all(ast.unparse(call.args[0]) == "project_query_and_cache_kv" for call in found)
    for runner in ("execute_in_parallel", "maybe_execute_in_parallel"):
        node = find(STREAMS, runner)
        assert node is not None
        aside = [n for n in ast.walk(node) if isinstance(n, ast.With) and "stream" in ast.unparse(n.items[0])]
        assert aside and not any(f"{node.args.args[0].arg}()" in ast.unparse(n) for n in aside)


@pytest.mark.parametrize("module", [V4_FLASHMLA, V41_FLASHMLA])
def test_the_backend_only_reads_its_query(module: str) -> None:
    """It is sliced, viewed and handed to the attention kernels: never written, and never kept."""
    for name in FUNCTIONS[V4_FLASHMLA][1:]:
        node = find(module, f"DeepseekV4FlashMLAAttention.{name.rpartition('.')[2]}")
        assert node is not None
        targets = [t for n in ast.walk(node) if isinstance(n, ast.Assign | ast.AugAssign) for t in _targets(n)]
        assert not [t for t in targets if t.startswith(("q[", "q.", "self.")) and not t.startswith("self_")]
        methods = {
            n.func.attr
            for n in ast.walk(node)
            if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and ast.unparse(n.func.value) == "q"
        }
        assert methods <= {"unsqueeze", "view"}


def _targets(node: ast.Assign | ast.AugAssign) -> list[str]:
    return [ast.unparse(t) for t in (node.targets if isinstance(node, ast.Assign) else [node.target])]


@pytest.mark.parametrize(("module", "name"), list(zip((V4_SPARSE, V41_SPARSE), projection.BACKENDS, strict=True)))
def test_a_v4_backend_still_has_its_name(module: str, name: str) -> None:
    assert f'return "{name}"' in source(module)[0]


def test_mega_attentions_query_is_of_mx_weights() -> None:
    """Why no chunk-interleaved projection is built: its weight is permuted at load with scales for 32 of a row."""
    assert "permute_on_load(self.wq_b.weight_scale, q_perm, dim=0)" in source(V41_MEGA)[0]


@pytest.mark.parametrize("module", [V4, V41, V4_FLASHMLA, V41_FLASHMLA])
def test_no_v4_layer_is_compiled(module: str) -> None:
    """The replaced methods ask which thread they are in, which a compiled graph would not."""
    assert "support_torch_compile" not in source(module)[0]


@pytest.mark.parametrize("module", [V4, V41])
def test_a_v4_layer_leaves_the_graph_in_a_mixed_step(module: str) -> None:
    """Why its short steps are not ours: the eager break holds the projection and the operator."""
    node = find(module, "DeepseekV4Attention._prepare_and_attn_eager")
    assert node is not None and "eager_break_during_capture" in {ast.unparse(d) for d in node.decorator_list}
    node = find(module, "DeepseekV4Attention._prepare_and_attn")
    assert node is not None and "self._wq_b_proj(" in ast.unparse(node)


def test_what_the_projection_looks_at_is_called_that() -> None:
    assert "self._gemm_impl = dispatch_unquantized_gemm(" in source(LINEAR)[0]
    for module, name in ((DEEP_GEMM, "DeepGemmFp8BlockScaledMMKernel"), (FLASHINFER, "FlashInferFp8DeepGEMMDynamic")):
        assert f"class {name}" in source(module)[0]
    node = find(FLASHINFER, "_dynamic_flashinfer_deepgemm_blockscale_gemm_impl")
    assert node is not None and f"condition = input.shape[0] < {projection.FLASHINFER_TOKENS}" in ast.unparse(node)
    assert 'layer.register_parameter("weight_scale_inv", scale)' in source(FP8)[0]
    assert "VLLM_BATCH_INVARIANT: bool" in source(ENVS)[0]
    assert "max_num_batched_tokens" in source(V4)[0] and "max_num_batched_tokens" in source(V41)[0]


if __name__ == "__main__":
    RECORD.write_text(json.dumps(contract(), indent=1) + "\n")
    print(f"{RECORD}: vLLM {VERSION}", file=sys.stderr)
