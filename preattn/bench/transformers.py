"""Hugging Face's attention layers of true dimensions, with and without the patch, on the current GPU in bf16.

    python -m preattn.bench.transformers --output results/transformers.json

For each model: its RoPE functions and head norm on a layer's own shapes (captured graphs, cold L2), the forward of an
attention layer, and a two-layer model's greedy tokens. Everything is compared before it is timed, and a difference
where the integration promises none ends the run. Weights are random.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..integrations import transformers as integration
from . import run, timing
from .results import Replaced, read_transformers

REPEATS = 20
PROMPT, NEW_TOKENS = 300, 32
SMALL: dict[str, Any] = {
    "vocab_size": 4096,
    "moe_intermediate_size": 256,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 131072,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
DENSE: dict[str, Any] = SMALL | {"intermediate_size": 1024, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 2}


@dataclass(frozen=True)
class Model:
    """A model of true attention dimensions and small everything else (the library's defaults are the true ones)."""

    name: str
    config: str
    options: dict[str, Any]
    attention: str
    layer: int
    """The attention layer that is timed."""
    head_norm: bool = False


_GLM = DENSE | {"num_hidden_layers": 2, "indexer_types": ["full", "shared"]}
_V4 = SMALL | {
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "compressed_sparse_attention"],
    "mlp_layer_types": ["moe", "moe"],
}
MODELS = (
    Model("deepseek-v3.2", "DeepseekV32Config", DENSE | {"num_hidden_layers": 2}, "sdpa", 0),
    Model("glm-5", "GlmMoeDsaConfig", _GLM, "sdpa", 0),
    Model("deepseek-v4-flash", "DeepseekV4Config", _V4, "eager", 1),  # eager is all it has
    Model("deepseek-v4-flash, head norm", "DeepseekV4Config", _V4, "eager", 1, head_norm=True),
)


def build(model: Model, device: str) -> Any:
    """The model with seeded random weights."""
    transformers = importlib.import_module("transformers")
    config = getattr(transformers, model.config)(**model.options)
    torch.manual_seed(0)
    with torch.device(device):  # the weights of one layer are some hundred million normal values
        built = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation=model.attention
        )
    return built.eval()


def layer_call(built: Any, model: Model, tokens: int) -> Callable[[], Tensor]:
    """A prefill of one attention layer, without a cache, on seeded activations."""
    attention = built.model.layers[model.layer].self_attn
    device = next(attention.parameters()).device
    generator = torch.Generator(device).manual_seed(1)
    hidden = torch.randn((1, tokens, built.config.hidden_size), generator=generator, device=device).bfloat16()
    positions = torch.arange(tokens, device=device)[None]
    least = torch.finfo(torch.bfloat16).min
    mask = torch.full((tokens, tokens), least, device=device, dtype=torch.bfloat16).triu(1)[None, None]
    rotary = built.model.rotary_emb
    if "deepseek_v4" in type(rotary).__module__:
        tables: Any = {name: rotary(hidden, positions, layer_type=name) for name in ("main", "compress")}
    else:
        tables = rotary(hidden, positions)
    arguments = {"position_embeddings": tables, "attention_mask": mask, "position_ids": positions}
    return lambda: attention(hidden, **arguments)[0]


def parts(model: Model, built: Any, tokens: int) -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
    """What is replaced, on the layer's shapes: name to the library's call and ours."""
    config, device = built.config, built.device
    attention = built.model.layers[model.layer].self_attn
    module = importlib.import_module(type(built).__module__)
    generator = torch.Generator(device).manual_seed(2)

    def rows(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).bfloat16()

    def both(name: str, *arguments: Any) -> tuple[Callable[[], Any], Callable[[], Any]]:
        function = getattr(module, name)
        substitute = integration._SUBSTITUTES[integration._parameters(function)](integration._refuse)
        return lambda: function(*arguments), lambda: substitute(*arguments)

    heads = config.num_attention_heads
    angles = torch.randn((1, tokens, 32), generator=generator, device=device)
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    if model.config == "DeepseekV4Config":
        query = rows(1, tokens, heads, config.head_dim).transpose(1, 2)
        index = rows(1, tokens, config.index_n_heads, config.index_head_dim).transpose(1, 2)
        found = {
            "query": both("apply_rotary_pos_emb", query, cos, sin),
            "index query": both("apply_rotary_pos_emb", index, cos, sin),
        }
        if model.head_norm:
            norm = module.DeepseekV4UnweightedRMSNorm(eps=config.rms_norm_eps)
            found["head norm"] = (lambda: norm(query), lambda: integration._head_norm(query, config.rms_norm_eps))
        return found
    width = attention.qk_head_dim
    query = rows(1, tokens, heads, width).transpose(1, 2)[..., width - 64 :]
    key = rows(1, 1, tokens, config.kv_lora_rank + 64)[..., config.kv_lora_rank :]
    index = rows(1, tokens, config.index_n_heads, config.index_head_dim)[..., :64]
    index_key = rows(1, tokens, 1, config.index_head_dim)[..., :64]
    cos, sin = torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)
    indexer = "apply_rotary_pos_emb" if model.config == "DeepseekV32Config" else "apply_rotary_pos_emb_interleave"
    position_ids = () if indexer == "apply_rotary_pos_emb" else (None,)
    return {
        "query and key": both("apply_rotary_pos_emb_interleave", query, key, cos, sin),
        "index query and key": both(indexer, index, index_key, cos, sin, *position_ids, 2),
    }


def difference(want: Any, got: Any) -> float:
    """Largest difference of two results, over their largest magnitude; raises where shapes or dtypes differ."""
    if not isinstance(want, Tensor):
        return max([difference(a, b) for a, b in zip(want, got, strict=True)])
    if (want.shape, want.dtype) != (got.shape, got.dtype):
        raise run.CheckFailed(f"{tuple(want.shape)} {want.dtype} against {tuple(got.shape)} {got.dtype}")
    return float((want.double() - got.double()).abs().max() / want.double().abs().max().clamp(min=1e-30))


def eager(arms: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Median microseconds of eager calls between events, the arms taking turns."""
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in arms}
    for repeat in range(REPEATS + 3):
        for name, call in arms.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            call()
            end.record()
            if repeat >= 3:  # the first calls compile and fill caches
                events[name].append((start, end))
    torch.cuda.synchronize()
    return {name: statistics.median([s.elapsed_time(e) * 1e3 for s, e in pairs]) for name, pairs in events.items()}


def measure(model: Model, tokens: tuple[int, ...], device: str = "cuda") -> list[dict[str, Any]]:
    """Compare and time one model.

    Raises:
        run.CheckFailed: a difference where none may be.
    """
    stock = build(model, device)
    with integration.patched(head_norm=model.head_norm) as patches:
        ours = build(model, device)
    if type(ours.model.layers[0].self_attn) is type(stock.model.layers[0].self_attn):
        raise run.CheckFailed(f"{model.name}: not patched: {dict(patches.untouched)}")
    rows: list[dict[str, Any]] = []

    def record(what: str, count: int, results: list[Any], allowed: float, us: dict[str, float]) -> None:
        """``results``: the library's, ours, the library's once more: what differs by itself is not our doing."""
        off, spread = difference(results[0], results[1]), difference(results[0], results[2])
        if not off <= max(allowed, spread):
            raise run.CheckFailed(f"{model.name}, {what}, {count} tokens: off by {off}, allowed {allowed}")
        row = {"model": model.name, "what": what, "tokens": count, "difference": off, "rerun": spread, "us": us}
        rows.append(row)

    bound = integration.head_norm_bound(512, torch.bfloat16)
    # A head norm may move a query by its bound, and with it what attends to what: there is no bound on a layer.
    free = float("inf") if model.head_norm else 0.0
    for count in tokens:
        for what, (theirs, mine) in parts(model, ours, count).items():
            results = [theirs(), mine(), theirs()]
            times = timing.cold({"transformers": theirs, "preattn": mine})
            us = {name: arm.median_us for name, arm in times.items()}
            record(what, count, results, bound if what == "head norm" else 0.0, us)
        theirs, mine = layer_call(stock, model, count), layer_call(ours, model, count)
        results = [theirs(), mine(), theirs()]
        record("layer", count, results, free, eager({"transformers": theirs, "preattn": mine}))
        torch.cuda.empty_cache()
    ids = torch.randint(2, 4096, (2, PROMPT), generator=torch.Generator().manual_seed(3)).to(device)
    answers = [
        built.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        for built in (stock, ours, stock)
    ]
    record("logits", PROMPT + NEW_TOKENS, [answer.logits for answer in answers], free, {})
    rows[-1]["tokens_equal"] = bool(torch.equal(answers[0].sequences, answers[1].sequences))
    return rows


def table(rows: Sequence[Replaced]) -> str:
    """A line for each model and what was replaced in it, or run whole, in Markdown: microseconds, the library's first.

    The last column is the largest difference over all sizes; in parentheses the library's own from run to run.
    """
    counts = sorted({row.tokens for row in rows if row.us})
    sizes = " | ".join(f"{count:,} token{'s' if count > 1 else ''}" for count in counts)
    lines = [f"| model | what | {sizes} | difference |", f"|---|---|{'---:|' * len(counts)}---|"]
    for model, what in dict.fromkeys((row.model, row.what) for row in rows):
        mine = [row for row in rows if (row.model, row.what) == (model, what)]
        times = {row.tokens: f"{row.us['transformers']:,.1f} → {row.us['preattn']:,.1f}" for row in mine if row.us}
        off, rerun = max(row.difference for row in mine), max(row.rerun for row in mine)
        said = f"{off:.2g}" if off else "none"
        said += f" ({rerun:.2g})" if rerun else ""
        for row in mine:
            if row.tokens_equal is not None:
                said += f"; greedy tokens {'equal' if row.tokens_equal else 'differ'}"
        lines.append(f"| {model} | {what} | {' | '.join(times.get(count, '–') for count in counts)} | {said} |")
    return "\n".join(lines)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=Path, default=Path("results/transformers.json"))
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 64, 1024, 4096])
    parser.add_argument("--models", nargs="+", choices=[model.name for model in MODELS])
    options = parser.parse_args()
    header = run.header(None) | {"transformers": importlib.import_module("transformers").__version__}
    rows: list[dict[str, Any]] = []
    with torch.no_grad():
        for model in MODELS:
            if options.models is None or model.name in options.models:
                rows += measure(model, tuple(options.tokens))
                options.output.parent.mkdir(parents=True, exist_ok=True)
                options.output.write_text(json.dumps({"header": header, "rows": rows}, indent=1) + "\n")
                torch.cuda.empty_cache()
    print(table(read_transformers(options.output).rows))


if __name__ == "__main__":
    main()
