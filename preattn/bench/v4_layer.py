"""vLLM's attention layer of DeepSeek-V4 and V4.1, from latents to query and cache, with and without the plug-in.

    python -m preattn.bench.v4_layer --output results/v4_layer.json
    python -m preattn.bench.v4_layer --models v41 --weights e4m3 --heads 16 64

vLLM has to be importable. The layer is the engine's class and its ``wq_b`` the engine's linear, both made without their
constructors, which want a whole configuration; weights are random. What runs is the engine's own code: the projection
(``_wq_b_proj``), then norm, RoPE, padding and KV insert (``_fused_qnorm_rope_kv_insert``). Three arms:

- ``projection``: the engine's projection alone, which no arm can do without;
- ``vllm``: both methods as the engine has them;
- ``preattn``: both with the plug-in, as it patches them.

Everything is compared before it is timed, and a bit that differs where none may ends the run; V4's query norm adds up
in another order and may round as :data:`preattn.differences.NORM_FLIPS` says. Steps of :data:`TIMED_TOKENS` and more
are timed on the GPU: with the plug-in out, or in, each arm is captured, and then all are replayed in turns with a cold
L2. Of smaller steps the host's time for an eager call is taken, one arm after the other, with the engine's own methods
where the plug-in leaves the step to them. A captured step of :data:`REPLAYED_TOKENS` is also replayed on other inputs.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import formats
from ..cases.base import rope_table
from ..differences import one_rounding
from ..integrations.vllm import layers, patching, projection, shadow
from ..integrations.vllm import v4 as plugin_v4
from ..v4 import HEAD_DIM
from . import run, timing
from .results import V4Step, read_v4_layer

RANK = 1536
"""Dims of the query's latent."""
BLOCK_SIZE = 64
TIMED_TOKENS = 64
"""Tokens from which the GPU's time is taken; below, the host's."""
REPLAYED_TOKENS = 64
HOST_TOKENS = 32
TABLE_TOKENS = (64, 1024, 4096, 16384)
TOKENS = (1, 31, HOST_TOKENS, 257, *TABLE_TOKENS)
FP8_UTILS = "vllm.model_executor.layers.quantization.utils.fp8_utils"

Arms = Mapping[str, Callable[[], Tensor]]


def table(rows: Sequence[V4Step]) -> str:
    """A line for each model, weight and head count, in Markdown: microseconds, the engine's first.

    Then the host's for an eager step, and the largest number of the query's elements that differ, over all sizes.
    """
    sizes = " | ".join(f"{tokens:,} tokens" for tokens in TABLE_TOKENS)
    lines = [
        f"| model | wq_b | heads | {sizes} | host, {HOST_TOKENS} tokens | differing |",
        "|---|---|---:|" + "---:|" * len(TABLE_TOKENS) + "---:|---:|",
    ]
    for case in dict.fromkeys((row.model, row.weight, row.heads) for row in rows):
        mine = [row for row in rows if (row.model, row.weight, row.heads) == case]
        known = {row.tokens: row.us or row.host_us for row in mine}
        times = {tokens: f"{us['vllm']:,.1f} → {us['preattn']:,.1f}" for tokens, us in known.items()}
        cells = " | ".join(times.get(tokens, "–") for tokens in (*TABLE_TOKENS, HOST_TOKENS))
        most = max(row.differing for row in mine)
        model, weight, heads = case
        lines.append(f"| {model} | {weight} | {heads} | {cells} | {most or 'none'} |")
    return "\n".join(lines)


# -- the engine's layer ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Model:
    """A model's attention layer: where the engine defines it, who reads its query, what its cache holds."""

    name: str
    module: str
    backend: str
    record: str
    head_norm: bool
    """Norms the projected query, head by head."""


MODELS = {
    "v4": Model("deepseek-v4", plugin_v4.MODELS[0], projection.BACKENDS[0], "v4_fp8", head_norm=True),
    "v41": Model("deepseek-v4.1", plugin_v4.MODELS[1], projection.BACKENDS[1], "v41_mxfp8", head_norm=False),
}


@dataclass(frozen=True)
class Case:
    """A rank's layer: its model, how ``wq_b`` is stored (``bf16``, or ``e4m3`` with 128 x 128 scales), its heads."""

    model: Model
    weight: str
    heads: int

    @property
    def padded_heads(self) -> int:
        """Heads that attention takes."""
        return 64 if self.heads <= 64 else 128

    @property
    def name(self) -> str:
        """For messages."""
        return f"{self.model.name}, {self.weight}, {self.heads} heads"


class Step(NamedTuple):
    """A step's inputs: latents [T, rank] and [T, 512] bf16, positions and slots [T] int64."""

    latent: Tensor
    kv: Tensor
    positions: Tensor
    slots: Tensor


def random_step(tokens: int, most: int, *, seed: int, device: str) -> Step:
    """Seeded inputs for a cache of ``most`` slots and as many positions."""
    generator = torch.Generator(device).manual_seed(seed)

    def rows(width: int) -> Tensor:
        return torch.randn((tokens, width), generator=generator, device=device).bfloat16()

    positions = torch.randint(0, most, (tokens,), generator=generator, device=device)
    slots = torch.randperm(most, generator=generator, device=device)[:tokens].contiguous()
    return Step(rows(RANK), rows(HEAD_DIM), positions, slots)


def build(case: Case, most: int, device: str) -> Any:
    """The engine's layer with seeded random weights, for steps of at most ``most`` tokens, a multiple of 64."""
    attention: Any = import_module(case.model.module).DeepseekV4Attention
    kind: Any = type("Layer", (attention,), {"accepts_unnormed_unroped_query": False})
    kind.__abstractmethods__ = frozenset()  # attention and the output projection are not run
    record = formats.record(case.model.record)
    cache = torch.zeros((most // BLOCK_SIZE, BLOCK_SIZE, record.bytes), dtype=torch.uint8, device=device)
    attributes = {
        "prefix": case.name,
        "wq_b": _linear(case, device),
        "n_local_heads": case.heads,
        "padded_heads": case.padded_heads,
        "head_dim": HEAD_DIM,
        "q_lora_rank": RANK,
        "max_num_batched_tokens": most,
        "eps": 1e-6,
        "kv_cache_torch_dtype": torch.uint8,
        "kv_mxfp8": case.model.record == "v41_mxfp8",
        "use_pcp": False,
        "backend_cls": SimpleNamespace(get_name=lambda: case.model.backend),
        "rotary_emb": SimpleNamespace(cos_sin_cache=rope_table(most).to(device)),
        "swa_cache_layer": SimpleNamespace(prefix="swa", kv_cache=cache),
    }
    return _made(kind, attributes)


def _linear(case: Case, device: str) -> Any:
    """The engine's linear for ``wq_b``, multiplied by torch or by DeepGEMM."""
    linears = import_module(projection.LINEAR)
    generator = torch.Generator(device).manual_seed(0)
    shape = (case.heads * HEAD_DIM, RANK)
    weight = torch.randn(shape, generator=generator, device=device)
    attributes: dict[str, Any] = {
        "bias": None,
        "skip_bias_add": False,
        "return_bias": False,
        "gather_output": False,
        "tp_size": 1,
    }
    if case.weight == "bf16":
        attributes["quant_method"] = linears.UnquantizedLinearMethod()
        attributes["weight"] = _parameter((weight * 0.03).bfloat16())
    else:
        scales = torch.rand([size // 128 for size in shape], generator=generator, device=device)
        attributes["quant_method"] = _block_scaled()
        attributes["weight"] = _parameter(weight.to(torch.float8_e4m3fn))
        attributes["weight_scale_inv"] = _parameter(scales * 0.02 + 0.01)
    return _made(linears.ColumnParallelLinear, attributes)


def _block_scaled() -> Any:
    """The engine's method of a block-scaled weight by DeepGEMM, whose scales are float32 here."""
    quantise = import_module(FP8_UTILS).per_token_group_quant_fp8

    def quant_fp8(x: Tensor, scale: Any = None, scale_ub: Any = None, use_triton: bool = False) -> Any:
        return quantise(x, 128, column_major_scales=True, use_ue8m0=False)

    kernel = {
        "config": SimpleNamespace(out_dtype=torch.bfloat16),
        "quant_fp8": quant_fp8,
        "use_deep_gemm_e8m0": False,
        "use_triton": False,
    }
    method = {
        "fp8_linear": _made(import_module(projection.DEEP_GEMM).DeepGemmFp8BlockScaledMMKernel, kernel),
        "block_quant": True,
        "weight_block_size": [128, 128],
        "use_marlin": False,
    }
    return _made(import_module(projection.FP8).Fp8LinearMethod, method)


def _made(kind: Any, attributes: Mapping[str, Any]) -> Any:
    """An object of an engine's class without its constructor."""
    found = object.__new__(kind)
    if isinstance(found, torch.nn.Module):
        torch.nn.Module.__init__(found)
    for name, value in attributes.items():
        setattr(found, name, value)
    return found


def _parameter(x: Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(x, requires_grad=False)


# -- the arms --------------------------------------------------------------------------------------------------


class Switch:
    """The plug-in on a model's attention module: in or out, and whatever it is already costs nothing."""

    def __init__(self, module: ModuleType, key: str) -> None:
        """``key``: the dispatch key of the operators that are overridden."""
        self._module, self._key, self._patches = module, key, patching.Patches()

    def turn(self, *, on: bool) -> None:
        """Patch the model as the plug-in does, or put it back."""
        if on and not self._patches:
            projection.patch(self._module, self._patches)
            plugin_v4.override(self._key)
        elif not on and self._patches:
            self._patches.restore()
            plugin_v4.restore()


def project(layer: Any, step: Step) -> Tensor:
    """The projected query, [T, H * 512]."""
    query: Tensor = layer._wq_b_proj(step.latent, None)
    return query


def prologue(layer: Any, step: Step) -> Tensor:
    """The query that attention is handed, [T, padded heads, 512]; stores the step's KV."""
    query = project(layer, step).view(-1, layer.n_local_heads, HEAD_DIM)
    metadata = {"swa": SimpleNamespace(slot_mapping=step.slots, block_size=BLOCK_SIZE)}
    finished: Tensor = layer._fused_qnorm_rope_kv_insert(query, step.kv, step.positions, metadata)
    return finished


def arms_of(layer: Any, step: Step, switch: Switch) -> dict[str, Callable[[], Tensor]]:
    """The arms of a step; each sees to it that the plug-in is in or out."""

    def arm(function: Callable[[Any, Step], Tensor], on: bool) -> Callable[[], Tensor]:
        def call() -> Tensor:
            switch.turn(on=on)
            return function(layer, step)

        return call

    return {"projection": arm(project, False), "vllm": arm(prologue, False), "preattn": arm(prologue, True)}


@contextmanager
def ours_at_every_size() -> Iterator[None]:
    """Within this context no step is left to the engine, so that what is compared is ours."""
    before, projection.EAGER_TOKENS = projection.EAGER_TOKENS, 0
    try:
        yield
    finally:
        projection.EAGER_TOKENS = before


# -- comparing and timing --------------------------------------------------------------------------------------


def compare(case: Case, layer: Any, step: Step, arms: Arms) -> dict[str, Any]:
    """What a step's arms leave, beside each other: the compared part of a row.

    Raises:
        run.CheckFailed: a difference where none may be.
    """
    cache, results, projected = layer.swa_cache_layer.kv_cache, [], []
    for arm in ("vllm", "preattn"):
        cache.fill_(shadow.POISON)
        results.append((arms[arm]().clone(), cache.clone()))
        projected.append(project(layer, step).clone())  # the plug-in still in, or out
    (theirs, stored), (ours, stored_by_us) = results
    if (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
        raise run.CheckFailed(f"{case.name}: {list(ours.shape)} {ours.dtype} against {list(theirs.shape)}")
    differ = _bits(ours) != _bits(theirs)
    row: dict[str, Any] = {
        "model": case.model.name,
        "weight": case.weight,
        "heads": case.heads,
        "padded_heads": case.padded_heads,
        "tokens": len(step.latent),
        "projection_equal": torch.equal(_bits(projected[0]), _bits(projected[1])),
        "tail_zero": not bool(_bits(ours[:, case.heads :].contiguous()).any()),
        "cache_equal": torch.equal(stored, stored_by_us),
        "differing": int(differ.count_nonzero()),
        "elements": ours.numel(),
    }
    most = shadow.most_norm_flips(ours.numel(), HEAD_DIM) if case.model.head_norm else 0
    fine = {
        "the projection differs": row["projection_equal"],
        "heads past the rank's are written": row["tail_zero"],
        "the cache differs": row["cache_equal"],
        f"{row['differing']} elements of the query differ, and at most {most} may": row["differing"] <= most,
        "elements of the query are more than a rounding apart": one_rounding(
            ours[differ].float(), theirs[differ].float()
        ),
    }
    if not all(fine.values()):
        wrong = "; ".join([what for what, holds in fine.items() if not holds])
        raise run.CheckFailed(f"{case.name}, {row['tokens']} tokens: {wrong}")
    return row


def replays(layer: Any, step: Step, other: Step, arm: Callable[[], Tensor]) -> bool:
    """Whether a captured step gives, replayed on the inputs of another, what an eager call gives; changes ``step``."""
    graph, kept = timing.capture(arm)
    for mine, its in zip(step, other, strict=True):
        mine.copy_(its)
    cache = layer.swa_cache_layer.kv_cache.fill_(shadow.POISON)
    graph.replay()
    query, stored = kept.clone(), cache.clone()
    cache.fill_(shadow.POISON)
    return torch.equal(_bits(query), _bits(arm())) and torch.equal(stored, cache)


def measure(case: Case, tokens: Sequence[int], device: str = "cuda") -> list[dict[str, Any]]:
    """Compare and time one layer.

    Raises:
        run.CheckFailed: a difference where none may be, or a layer whose query the plug-in copies.
    """
    most = -(-max(tokens) // BLOCK_SIZE) * BLOCK_SIZE
    layer, rows = build(case, most, device), []
    writer = projection.writer_of(layer)
    if isinstance(writer, str) and case.heads < case.padded_heads:
        raise run.CheckFailed(f"{case.name}: wq_b does not write where attention reads: {writer}")
    switch = Switch(import_module(case.model.module), device.upper())
    try:
        for count in tokens:
            step = random_step(count, most, seed=count, device=device)
            arms = arms_of(layer, step, switch)
            with ours_at_every_size():
                row = compare(case, layer, step, arms)
            on_gpu = count >= TIMED_TOKENS
            times = timing.cold(arms) if on_gpu else timing.host(arms)
            us = {name: round(arm.median_us, 3) for name, arm in times.items()}
            row |= {"us": us if on_gpu else {}, "host_us": {} if on_gpu else us}
            if count == REPLAYED_TOKENS:
                other = random_step(count, most, seed=count + 1, device=device)
                with ours_at_every_size():
                    row["replay_equal"] = replays(layer, step, other, arms["preattn"])
                if not row["replay_equal"]:
                    raise run.CheckFailed(f"{case.name}: a captured step differs, replayed on other inputs")
            rows.append(row)
    finally:
        switch.turn(on=False)
    return rows


def _bits(x: Tensor) -> Tensor:
    return x.view(torch.int16)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=Path, default=Path("results/v4_layer.json"))
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--weights", nargs="+", choices=("bf16", "e4m3"), default=["bf16", "e4m3"])
    parser.add_argument("--heads", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    options = parser.parse_args()
    import_module("vllm._custom_ops")  # its compiled operators
    import_module(layers.WORKSPACE).init_workspace_manager(torch.device("cuda"))
    clock = f"{timing.timer_name()}, captured graphs, cold L2"
    header = run.header(None) | {"vllm": import_module("vllm").__version__, "clock": clock}
    rows: list[dict[str, Any]] = []
    with torch.inference_mode():
        for name, weight, heads in itertools.product(options.models, options.weights, options.heads):
            case = Case(MODELS[name], weight, heads)
            rows += measure(case, options.tokens)
            options.output.parent.mkdir(parents=True, exist_ok=True)
            options.output.write_text(json.dumps({"header": header, "rows": rows}, indent=1) + "\n")
            print(f"{case.name}: done", flush=True)
            torch.cuda.empty_cache()
    print(table(read_v4_layer(options.output).rows))


if __name__ == "__main__":
    main()
