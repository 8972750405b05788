"""Hugging Face's models, tiny and random, with and without the patch: the same logits and tokens on the same path.

Every difference is 0.0, for V4 too; only ``head_norm=True`` has a bound, derived where it is tested.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import json
import logging
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="transformers is not installed: its models cannot be built here")

from transformers import AutoModelForCausalLM, DeepseekV4Config, DeepseekV32Config, GlmMoeDsaConfig, monkey_patching
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as v4
from transformers.models.deepseek_v32 import modeling_deepseek_v32 as v32
from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa as glm

from preattn import dispatch
from preattn.bench import timing
from preattn.bench import transformers as bench
from preattn.bench.results import read_transformers
from preattn.bench.run import CheckFailed
from preattn.integrations import transformers as integration

SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "moe_intermediate_size": 16,
    "num_attention_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "q_lora_rank": 24,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,  # logits far enough apart for tokens to mean something
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
DSA: dict[str, Any] = SMALL | {
    "intermediate_size": 48,
    "num_key_value_heads": 4,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 24,
    "index_topk": 6,  # of up to 30 tokens: the indexer decides
    "index_head_dim": 32,
    "index_n_heads": 2,
    "first_k_dense_replace": 1,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
CONFIGS: dict[str, Callable[[], Any]] = {
    "v32": lambda: DeepseekV32Config(**DSA, num_hidden_layers=2, rope_parameters=YARN | {"mscale_all_dim": 1.0}),
    "glm": lambda: GlmMoeDsaConfig(**DSA, num_hidden_layers=3, indexer_types=["full", "shared", "full"]),
    "v4": lambda: DeepseekV4Config(
        **SMALL,
        head_dim=64,
        partial_rotary_factor=0.25,
        num_hidden_layers=3,
        layer_types=["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
        mlp_layer_types=["moe"] * 3,
        compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        sliding_window=16,
        o_groups=2,
        o_lora_rank=16,
        index_n_heads=2,
        index_head_dim=32,
        index_topk=3,
        hc_mult=2,
        hc_sinkhorn_iters=3,
    ),
}
ATTENTION = {"v32": "DeepseekV32Attention", "glm": "GlmMoeDsaAttention", "v4": "DeepseekV4Attention"}
MODULES = {"v32": v32, "glm": glm, "v4": v4}
ROPE_CALLS = {"v32": 2 * 4, "glm": 4 + 2 + 4, "v4": 3 + (3 + 3) + (3 + 1)}
"""Calls of a prefill. DSA: query and key, indexer's query and key. V4: query, key, output back; a compressor's
entries, and its indexer's query and entries."""

PATHS = [
    pytest.param(family, attention, dtype, id=f"{family}-{attention}-{str(dtype).removeprefix('torch.')}")
    for family, attentions in (("v32", ("sdpa", "eager")), ("glm", ("sdpa", "eager")), ("v4", ("eager",)))
    for attention in attentions
    for dtype in (torch.float32, torch.bfloat16)
]


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No test leaves a patch behind."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # small tensors: more threads wait for each other
    yield
    torch.set_num_threads(threads)
    integration.unpatch()
    monkey_patching.clear_patch_mapping()


@pytest.fixture
def rope_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes that our RoPE got."""
    calls: list[tuple[int, ...]] = []
    original = integration._rope

    def counted(x: Tensor, *arguments: Any) -> None:
        calls.append(tuple(x.shape))
        original(x, *arguments)

    monkeypatch.setattr(integration, "_rope", counted)
    return calls


def build(family: str, *, attention: str = "eager", dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    config = CONFIGS[family]()
    return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention).eval()


@functools.cache
def pair(
    family: str, *, attention: str = "eager", dtype: torch.dtype = torch.float32, head_norm: bool = False
) -> tuple[Any, Any]:
    """The same model, stock and patched. Tests that change it copy it."""
    options: dict[str, Any] = {"attention": attention, "dtype": dtype}
    stock = build(family, **options)
    with integration.patched(head_norm=head_norm) as patches:
        assert patches.untouched == {}
        patched = build(family, **options)
    kinds = {type(layer.self_attn) for layer in patched.model.layers}
    assert {kind.__module__ for kind in kinds} == {"preattn.integrations.transformers"}
    assert all(torch.equal(a, b) for a, b in zip(stock.parameters(), patched.parameters(), strict=True))
    return stock, patched


def prompt() -> tuple[Tensor, Tensor]:
    """Two prompts, one padded on the left, and their mask."""
    ids = torch.randint(2, 96, (2, 21), generator=torch.Generator().manual_seed(1))
    ids[0, :3] = 0
    return ids, (ids != 0).long()


def generate(model: Any, ids: Tensor, mask: Tensor, tokens: int) -> Any:
    return model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )


def difference(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    return float((a.double() - b.double()).abs().max())


# -- answers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "attention", "dtype"), PATHS)
def test_the_reference_changes_no_answer(
    family: str, attention: str, dtype: torch.dtype, rope_calls: list[tuple[int, ...]]
) -> None:
    stock, patched = pair(family, attention=attention, dtype=dtype)
    ids, mask = prompt()
    rope_calls.clear()  # a first patch checks the functions
    with torch.no_grad(), dispatch.backend("reference"):
        want, got = stock(ids, attention_mask=mask).logits, patched(ids, attention_mask=mask).logits
        assert want.float().std() > 0.5
        assert difference(want, got) == 0.0
        assert len(rope_calls) == ROPE_CALLS[family]
        decoded, ours = generate(stock, ids, mask, 8), generate(patched, ids, mask, 8)
    assert torch.equal(decoded.sequences, ours.sequences)
    assert [difference(a, b) for a, b in zip(decoded.logits, ours.logits, strict=True)] == [0.0] * 8
    assert len(rope_calls) > 8 * ROPE_CALLS[family] // 2  # most of them recur in each of 8 steps


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", CONFIGS)
def test_kernels_change_no_answer(family: str, dtype: torch.dtype, device: str, rope_calls: list[Any]) -> None:
    stock, patched = [copy.deepcopy(model).to(device) for model in pair(family, dtype=dtype)]
    ids, mask = [tensor.to(device) for tensor in prompt()]
    rope_calls.clear()
    with torch.no_grad(), dispatch.backend("triton"):
        decoded, ours = generate(stock, ids, mask, 2), generate(patched, ids, mask, 2)
    assert torch.equal(decoded.sequences, ours.sequences)
    assert [difference(a, b) for a, b in zip(decoded.logits, ours.logits, strict=True)] == [0.0] * 2
    assert len(rope_calls) > ROPE_CALLS[family]


@pytest.mark.parametrize("family", CONFIGS)
def test_a_prompt_in_two_pieces(family: str) -> None:
    """A cached prefix, then several tokens at once: masks and caches are the library's in both."""
    stock, patched = pair(family, dtype=torch.bfloat16)
    ids = prompt()[0][1:]
    results = []
    with torch.no_grad(), dispatch.backend("reference"):
        for model in (stock, patched):
            first = model(ids[:, :13], use_cache=True)
            name = "cache" if "cache" in first else "past_key_values"
            results.append(model(ids[:, 13:], **{name: first[name]}).logits)
    assert difference(*results) == 0.0


def test_shared_layers_and_parts() -> None:
    _, patched = pair("glm")
    attentions = [layer.self_attn for layer in patched.model.layers]
    assert [attention.indexer is None for attention in attentions] == [False, True, False]
    assert type(attentions[0].indexer).__module__ == "preattn.integrations.transformers"
    _, patched = pair("v4")
    sliding, sparse, heavy = [layer.self_attn for layer in patched.model.layers]
    assert (sliding.rope_layer_type, sparse.rope_layer_type, heavy.rope_layer_type) == ("main", "compress", "compress")
    parts = (sparse.compressor, sparse.compressor.indexer, heavy.compressor)
    assert {type(part).__module__ for part in parts} == {"preattn.integrations.transformers"}


@pytest.mark.parametrize("family", CONFIGS)
def test_epsilons_are_those_of_the_modules(family: str) -> None:
    stock, patched = pair(family)
    ids, mask = prompt()
    with torch.no_grad(), dispatch.backend("reference"):
        before = stock(ids, attention_mask=mask).logits
        stock, patched = copy.deepcopy(stock), copy.deepcopy(patched)
        for model in (stock, patched):
            for module in model.modules():
                if hasattr(module, "variance_epsilon"):
                    module.variance_epsilon = 0.25
        want, got = stock(ids, attention_mask=mask).logits, patched(ids, attention_mask=mask).logits
    assert difference(want, got) == 0.0
    assert difference(want, before) > 0.01


@pytest.mark.parametrize("family", CONFIGS)
def test_gradients_are_the_librarys(family: str, rope_calls: list[Any]) -> None:
    stock, patched = copy.deepcopy(pair(family))
    ids, mask = prompt()
    rope_calls.clear()
    for model in (stock, patched):
        model(ids, attention_mask=mask, labels=ids).loss.backward()
    main = [shape for shape in rope_calls if shape[-1] == (64 if family == "v4" else 16) and 4 in shape[1:3]]
    assert main == []  # a main query always wants its gradient; an indexer runs without
    for (name, a), b in zip(stock.named_parameters(), patched.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        assert a.grad is None or torch.equal(a.grad, b.grad), name


# -- arithmetic ---------------------------------------------------------------------------------------------

BACKENDS = ["reference", "triton"]
FUNCTIONS = [
    pytest.param(v32.apply_rotary_pos_emb_interleave, id="main"),
    pytest.param(v32.apply_rotary_pos_emb, id="indexer"),
    pytest.param(glm.apply_rotary_pos_emb_interleave, id="glm"),
    pytest.param(v4.apply_rotary_pos_emb, id="v4"),
]


def refuse(*arguments: Any) -> Any:
    raise AssertionError("the library's function was called")


def ours(function: Callable[..., Any]) -> Callable[..., Any]:
    return integration._SUBSTITUTES[integration._parameters(function)](refuse)


def hard_rows(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Rows over the whole range of the dtype, with zeros of both signs and infinities among them."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-130, 120, shape, generator=generator)
    x = torch.randn(shape, generator=generator) * torch.exp2(exponents.float())
    x.view(-1)[::7] = torch.randn(x.view(-1)[::7].shape, generator=generator)
    x.view(-1)[:6] = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-40])
    return x.to(dtype)


def same(a: Tensor, b: Tensor) -> bool:
    """Equal bits, of zeros too; any NaN is any other."""
    a, b = a.cpu().float(), b.cpu().float()
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(
        torch.where(a.isnan(), 0, a).view(torch.int32), torch.where(b.isnan(), 0, b).view(torch.int32)
    )


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter, at infinities and NaNs
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("unsqueeze_dim", [1, 2])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_rope_gives_the_librarys_bits(
    function: FunctionType, unsqueeze_dim: int, dtype: torch.dtype, backend: str, device: str, seed: int
) -> None:
    device = device if backend == "triton" else "cpu"
    rows = hard_rows((2, 19, 3, 192), dtype, seed).to(device)
    rows = rows.transpose(1, 2) if unsqueeze_dim == 1 else rows
    angles = torch.randn((1, 19, 32), generator=torch.Generator().manual_seed(seed))
    cos, sin = [table.to(device, dtype) for table in (angles.cos(), angles.sin())]
    keys: tuple[Tensor, ...] = (rows,)
    if function is not v4.apply_rotary_pos_emb:
        cos, sin = torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)
        keys = (rows[..., 128:], rows[:, :1, :, 64:128] if unsqueeze_dim == 1 else rows[:, :, :1, 64:128])
    named = {"cos": cos, "sin": sin, "unsqueeze_dim": unsqueeze_dim}
    before = rows.clone()
    with dispatch.backend(backend):  # type: ignore[arg-type]
        want, got = function(*keys, **named), ours(function)(*keys, **named)
    for a, b in zip(want, got, strict=True) if isinstance(want, tuple) else [(want, got)]:
        assert (a.shape, a.dtype) == (b.shape, b.dtype) and b.is_contiguous()
        assert same(a, b)
    assert same(before, rows)
    assert same(want, got) if isinstance(want, Tensor) else type(got) is tuple


@pytest.mark.parametrize("backend", BACKENDS)
def test_ops_declare_what_they_write(backend: str, device: str) -> None:
    x, table = torch.randn(2, 4, 5, 64, device=device), torch.randn(2, 5, 8, device=device)
    if backend == "reference":
        x, table = x.cpu(), table.cpu()
    utils = ["test_schema", "test_faketensor"]
    rope = (x, table, table, torch.empty_like(x), 2, 16, "interleaved", "half_split", True)
    with dispatch.backend(backend):  # type: ignore[arg-type]
        torch.library.opcheck(torch.ops.preattn.torch_rope.default, rope, test_utils=utils)
        norm = (x, torch.empty_like(x), 1e-6)
        torch.library.opcheck(torch.ops.preattn.torch_head_norm.default, norm, test_utils=utils)


def test_v4_hands_attention_the_same_strides() -> None:
    """Attention sees what it saw, down to the layout of its query."""
    x, table = torch.randn(2, 5, 4, 64).transpose(1, 2), torch.randn(2, 5, 8)
    want, got = [f(x, table, table) for f in (v4.apply_rotary_pos_emb, ours(v4.apply_rotary_pos_emb))]
    assert want.stride() == got.stride()


def test_tables_of_two_layouts() -> None:
    """Cosines as the rotary module leaves them in 5.17, transposed, and sines that are not."""
    x, angles = torch.randn(2, 4, 5, 64), torch.randn(2, 8, 5).transpose(1, 2)
    arguments = (x, angles.cos(), angles.sin().contiguous())
    assert arguments[1].stride() != arguments[2].stride()
    assert torch.equal(v4.apply_rotary_pos_emb(*arguments), ours(v4.apply_rotary_pos_emb)(*arguments))


def test_what_is_not_taken_goes_to_the_library(rope_calls: list[Any]) -> None:
    substitute = integration._SUBSTITUTES[integration._parameters(v4.apply_rotary_pos_emb)](v4.apply_rotary_pos_emb)
    x, table = torch.randn(2, 4, 5, 64), torch.randn(2, 5, 8)
    odd_stride = torch.randn(2, 4, 5, 65)[..., :64]
    for rows, cos in (
        (x.double(), table.double()),
        (x.half(), table.half()),
        (x.bfloat16(), table),  # a table of another dtype
        (x.clone().requires_grad_(), table),
        (odd_stride, table),
        (x, table[..., :6]),  # 12 rotated dims
        (x.repeat(1, 1, 1, 2)[..., :72], table),  # 16 do not divide 72
    ):
        assert torch.equal(substitute(rows, cos, cos), v4.apply_rotary_pos_emb(rows, cos, cos))
    assert rope_calls == []
    substitute(x, table, table)
    assert rope_calls == [(2, 4, 5, 64)]


# -- V4's head norm -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("width", [64, 512])
def test_head_norm_keeps_its_bound(width: int, dtype: torch.dtype, device: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = (torch.randn((2, 9, 3, width), generator=generator) * 3).to(dtype).transpose(1, 2)
    x[0, 0, 0], x[0, 0, 1] = 0, 1e-20
    norm = v4.DeepseekV4UnweightedRMSNorm(eps=1e-5)
    want = norm(x)
    with dispatch.backend("reference"):
        got = integration._head_norm(x, 1e-5)
    assert got.stride() == want.stride()
    assert (
        (got.double() - want.double()).abs() <= integration.head_norm_bound(width, dtype) * want.double().abs()
    ).all()
    with dispatch.backend("triton"):
        kernel = integration._head_norm(x.to(device), 1e-5)
    assert kernel.stride() == got.stride() and same(kernel, got)


def test_head_norm_keeps_the_logits_within_what_its_bound_allows() -> None:
    """First order: a logit moves by at most the sum over q of |q dlogit/dq| times the relative bound of q.

    The gradient is the stock model's. What else differs are float32 roundings behind the moved values (2**-24 each);
    the norm's bound, worst case over orders of a sum of 64, is some 40 of those for every q.
    """
    stock, patched = pair("v4", head_norm=True)
    ids = prompt()[0][1:]
    queries: list[Tensor] = []

    def keep(module: Any, inputs: Any, query: Tensor) -> None:
        query.retain_grad()
        queries.append(query)

    hooks = [layer.self_attn.q_b_norm.register_forward_hook(keep) for layer in stock.model.layers]
    logits = stock(ids).logits
    with torch.no_grad(), dispatch.backend("reference"):
        moved = (patched(ids).logits - logits).abs()
    bound = integration.head_norm_bound(64, torch.float32)
    assert moved.max() > 0  # a norm of ours did run
    for index in moved.flatten().topk(8).indices.tolist():
        for query in queries:
            query.grad = None
        logits.flatten()[index].backward(retain_graph=True)
        with torch.no_grad():
            allowed = sum(float((q * q.grad).abs().sum()) for q in queries if q.grad is not None) * bound
        assert allowed < 0.05
        assert float(moved.flatten()[index]) <= allowed
    for hook in hooks:
        hook.remove()
    with torch.no_grad(), dispatch.backend("reference"):
        assert torch.equal(stock.generate(ids, max_new_tokens=6), patched.generate(ids, max_new_tokens=6))


# -- patching -----------------------------------------------------------------------------------------------


def test_patch_and_unpatch() -> None:
    before = build("v32")
    patches = integration.patch()
    assert patches == integration.Patches(tuple(ATTENTION.values()), {})
    during = build("v32")
    assert integration.unpatch() == tuple(ATTENTION.values())
    assert integration.unpatch() == ()
    after = build("v32")
    for model, replaced in ((before, False), (during, True), (after, False)):
        kind = type(model.model.layers[0].self_attn)
        assert (kind is v32.DeepseekV32Attention) != replaced
        assert kind.__name__ == "DeepseekV32Attention" and issubclass(kind, v32.DeepseekV32Attention)
    assert monkey_patching.get_patch_mapping() == {}


def test_nested_contexts_leave_what_was_there() -> None:
    with integration.patched() as outer:
        with integration.patched() as inner:
            assert inner.patched == ()
            assert set(inner.untouched) == set(outer.patched)
            for name, reason in inner.untouched.items():
                assert "already" in reason and f"preattn.integrations.transformers.{name}" in reason
        assert type(build("glm").model.layers[0].self_attn).__module__ == integration.__name__
    assert type(build("glm").model.layers[0].self_attn) is glm.GlmMoeDsaAttention


def test_a_context_ends_with_an_exception() -> None:
    with pytest.raises(KeyError), integration.patched():
        raise KeyError
    assert monkey_patching.get_patch_mapping() == {}


@pytest.mark.parametrize("pattern", ["GlmMoeDsaAttention", "^Glm.*Attention$"])
def test_another_librarys_mapping_is_named(pattern: str) -> None:
    other = type("FastAttention", (torch.nn.Module,), {"__module__": "fastlib.attention"})
    monkey_patching.register_patch_mapping({pattern: other, "[": other})
    patches = integration.patch()
    assert patches.patched == (ATTENTION["v32"], ATTENTION["v4"])
    assert patches.untouched == {
        ATTENTION["glm"]: f"'{pattern}' is patched already, with fastlib.attention.FastAttention"
    }
    integration.unpatch()
    assert set(monkey_patching.get_patch_mapping()) == {pattern, "["}  # theirs stay


def foreign(function: Any, name: str = "fastlib.rope") -> FunctionType:
    """A function as if from another library."""
    scope = {**function.__globals__, "__name__": name}
    return FunctionType(function.__code__, scope, function.__name__, None, function.__closure__)


def _decorated(module: Any) -> Any:
    forward = module.DeepseekV32Attention.forward

    @functools.wraps(forward)
    def wrapper(*arguments: Any, **named: Any) -> Any:
        return forward(*arguments, **named)

    return wrapper


def _in_module(source: str, name: str) -> Any:
    """A function as if V3.2's module had been released with it."""
    scope = dict(vars(v32))
    exec(source, scope)
    return scope[name]


ROPE = "apply_rotary_pos_emb_interleave"
CHANGES: dict[str, tuple[tuple[str, ...], Callable[[], Any], str]] = {
    "another library's function": (
        (ROPE,),
        lambda: foreign(v32.apply_rotary_pos_emb_interleave),
        "patched already, by f",
    ),
    "no function any more": ((ROPE,), lambda: None, f"{ROPE} is no function but None"),
    "other parameters": (
        (ROPE,),
        lambda: _in_module(f"def {ROPE}(q, k, table): pass", ROPE),
        f"{ROPE} has other parameters: q, k, table",
    ),
    "other arithmetic": (
        ("apply_rotary_pos_emb",),
        lambda: _in_module(
            "def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):\n"
            "    cos, sin = cos.unsqueeze(unsqueeze_dim).float(), sin.unsqueeze(unsqueeze_dim).float()\n"
            "    return tuple(((x * cos) + (rotate_half(x) * sin)).to(x.dtype) for x in (q, k))",
            "apply_rotary_pos_emb",
        ),
        "apply_rotary_pos_emb computes something else than preattn does",
    ),
    "another library's forward": (
        ("DeepseekV32Attention", "forward"),
        lambda: foreign(v32.DeepseekV32Attention.forward),
        "already, by fastlib.rope.",
    ),
    "another library's decorator": (
        ("DeepseekV32Attention", "forward"),
        lambda: _decorated(v32),
        f"forward is wrapped already, by {__name__}._decorated.<locals>.wrapper",
    ),
    "a forward without RoPE": (
        ("DeepseekV32Indexer", "forward"),
        lambda: _in_module("def forward(self, x): return x", "forward"),
        "DeepseekV32Indexer.forward does not call apply_rotary_pos_emb",
    ),
    "another class": (
        ("DeepseekV32Indexer",),
        lambda: type("Fast", (torch.nn.Module,), {"__module__": "fastlib"}),
        "DeepseekV32Indexer is replaced already, by fastlib.Fast",
    ),
    "no class": (("DeepseekV32Indexer",), lambda: None, "has no DeepseekV32Indexer"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changed_is_left_untouched_and_said_once(
    change: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path, make, reason = CHANGES[change]
    owner: Any = v32
    for name in path[:-1]:
        owner = getattr(owner, name)
    monkeypatch.setattr(owner, path[-1], make())
    integration._warn_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            with integration.patched() as patches:
                assert patches.patched == (ATTENTION["glm"], ATTENTION["v4"])
    assert reason in patches.untouched[ATTENTION["v32"]]
    said = [record.getMessage() for record in caplog.records if "cannot apply" not in record.getMessage()]
    assert said == [f"{ATTENTION['v32']} is left untouched: {patches.untouched[ATTENTION['v32']]}"]


def test_a_release_without_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers.models.glm_moe_dsa.modeling_glm_moe_dsa", None)
    untouched = integration.patch().untouched
    assert list(untouched) == [ATTENTION["glm"]]
    assert "this release of transformers has no transformers.models.glm_moe_dsa" in untouched[ATTENTION["glm"]]


def test_a_release_that_cannot_apply_a_mapping(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> Any:
        raise ModuleNotFoundError("No module named 'torchvision'")

    monkeypatch.setattr(monkey_patching, "apply_patches", broken)
    integration._warn_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert integration.patch().patched == tuple(ATTENTION.values())
    (record,) = caplog.records
    assert record.getMessage().endswith("replaced in their modules: No module named 'torchvision'")
    assert monkey_patching.get_patch_mapping() == {}
    assert type(build("v32").model.layers[0].self_attn) is integration.DeepseekV32Attention
    assert "replaced already, by preattn" in integration.patch().untouched[ATTENTION["v4"]]
    assert integration.unpatch() == tuple(ATTENTION.values())
    assert type(build("v32").model.layers[0].self_attn).__module__ == v32.__name__


def test_unpatch_puts_back_what_a_failed_construction_left() -> None:
    original = v32.DeepseekV32Attention
    integration.patch()
    broken = CONFIGS["v32"]()
    broken.hidden_act = "no such function"
    with pytest.raises(KeyError):
        AutoModelForCausalLM.from_config(broken)
    integration.unpatch()
    assert v32.DeepseekV32Attention is original


@pytest.mark.parametrize("family", CONFIGS)
def test_attention_weights_are_recorded_before_and_after(family: str) -> None:
    stock, patched = pair(family)
    ids = prompt()[0][1:]
    with torch.no_grad():
        weights = [model(ids, output_attentions=True).attentions for model in (stock, patched, build(family))]
    assert len({len(each) for each in weights}) == 1 and len(weights[0]) == len(stock.model.layers)
    assert all(torch.equal(a, b) for a, b in zip(weights[0], weights[1], strict=True))


@pytest.mark.parametrize("head_norm", [False, True])
def test_copies_and_pickles_stay_patched(head_norm: bool) -> None:
    attention = pair("v4", head_norm=head_norm)[1].model.layers[1].self_attn
    for copied in (copy.deepcopy(attention), pickle.loads(pickle.dumps(attention))):
        assert type(copied) is type(attention)
        assert type(copied.compressor.indexer) is type(attention.compressor.indexer)
        assert type(copied.q_b_norm) is type(attention.q_b_norm)
    assert (type(attention.q_b_norm) is v4.DeepseekV4UnweightedRMSNorm) != head_norm


def test_the_compiler_sees_our_op() -> None:
    stock, patched = [model.model.layers[0].self_attn for model in pair("v32", dtype=torch.bfloat16)]
    targets: list[Any] = []

    def keep(graph: Any, inputs: Any) -> Any:
        targets.extend(node.target for node in graph.graph.nodes)
        return graph

    hidden, table = torch.randn(1, 5, 32).bfloat16(), torch.randn(1, 5, 16).bfloat16()
    mask = torch.zeros(1, 1, 5, 5, dtype=torch.bfloat16)
    with torch.no_grad(), dispatch.backend("reference"):
        want = stock(hidden, (table, table), mask)[0]

        def layer(hidden: Tensor) -> Tensor:  # the attention is inlined into what is compiled, as in a model
            return patched(hidden, (table, table), mask)[0]

        got = torch.compile(layer, backend=keep, fullgraph=True)(hidden)
    assert torch.equal(want, got)
    assert targets.count(torch.ops.preattn.torch_rope.default) == 4


@pytest.mark.parametrize("index", range(len(bench.MODELS)))
def test_the_bench_compares_before_it_times(index: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, with small layers and no clock."""
    model = bench.MODELS[index]
    small = {"hidden_size": 32, "num_attention_heads": 4, "q_lora_rank": 24, "index_n_heads": 2, "vocab_size": 4096}
    small |= {"o_groups": 2, "o_lora_rank": 16} if "v4" in model.name else {"num_key_value_heads": 4, "v_head_dim": 16}
    model = dataclasses.replace(model, options=model.options | small)
    monkeypatch.setattr(bench.timing, "cold", lambda arms: dict.fromkeys(arms, timing.Times(2.0, 1.0, 3.0)))
    monkeypatch.setattr(bench, "eager", lambda arms: dict.fromkeys(arms, 1.0))
    monkeypatch.setattr(bench, "PROMPT", 9)
    monkeypatch.setattr(bench, "NEW_TOKENS", 2)
    with torch.no_grad(), dispatch.backend("reference"):
        rows = bench.measure(model, (7,), device="cpu")
        exact = [row for row in rows if not model.head_norm or "query" in row["what"]]
        assert exact and {row["difference"] for row in exact} == {0.0}
        path = tmp_path / "transformers.json"
        path.write_text(json.dumps({"header": {}, "rows": rows}))
        lines = bench.table(read_transformers(path).rows).splitlines()
        assert len(lines) == len(rows) + 2 and lines[-1].endswith("; greedy tokens equal |")
        monkeypatch.setattr(integration, "patched", lambda head_norm: contextlib.nullcontext(integration.Patches()))
        with pytest.raises(CheckFailed, match="not patched"):
            bench.measure(model, (7,), device="cpu")


def test_bad_arguments_and_lazy_imports() -> None:
    with pytest.raises(TypeError, match="head_norm: expected a bool; got int"):
        integration.patch(head_norm=1)  # type: ignore[arg-type]
    with pytest.raises(AttributeError, match="no attribute 'DeepseekV5Attention'"):
        integration.DeepseekV5Attention  # noqa: B018
    code = "import sys, preattn.integrations.transformers as t; t.unpatch(); sys.exit('transformers' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
