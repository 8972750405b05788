"""The arms of a case: ours, other forms of ours, engines' ops and libraries' matmuls, on the same memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from .. import dsa, tuning, v4, weights
from ..cases.base import Call, Case, rope_table
from ..cases.dsa import AbsorbCase, DsaQueryCase, NormRopeCase
from ..cases.v4 import KvCase, PadCase, ProjectCase, V4Case
from ..policy import Form, Projection, library_multiplies
from . import peers

Arm = Callable[[], Any]

LESS = ("plain_projection", "then_one_launch_unordered", "vllm_unordered", "then_one_launch_bf16", "vllm_bf16")
"""Arms that compute less than ours, or of other operands: there is nothing to compare."""


def storable(call: Call) -> Call:
    """Give every row a slot of its own: registry cases mix in slots outside the cache, where engines' ops write."""
    for slots_name, cache_name in (("slots", "cache"), ("index_slots", "index_cache")):
        slots, cache = call.arguments.get(slots_name), call.arguments.get(cache_name)
        if slots is None or cache is None:
            continue
        generator = torch.Generator().manual_seed(0)
        chosen = torch.randperm(cache.shape[0] * cache.shape[1], generator=generator)[: slots.shape[0]]
        call.arguments[slots_name] = chosen.to(slots.dtype).to(slots.device)
    return call


def _v4_arms(case: V4Case, call: Call, vllm: peers.Vllm | None) -> dict[str, Arm]:
    arguments = dict(call.arguments)
    if not case.in_place:
        arguments["out"] = None  # a fresh output, as an engine's op returns one
    arms: dict[str, Arm] = {"preattn": lambda: call.function(**arguments)}
    if case.padded_heads:
        arms["two_launches"] = lambda: call.function(**{**arguments, "form": Form.TWO_LAUNCHES})
    peer = peers.v4_query_kv(vllm, call) if vllm is not None else None
    if peer is not None and not case.in_place:
        arms["vllm"] = peer
    return arms


def _dsa_query_arms(call: Call, vllm: peers.Vllm | None) -> dict[str, Arm]:
    arguments = call.arguments
    arms: dict[str, Arm] = {"preattn": lambda: call.function(**arguments)}
    if vllm is not None:
        forms: dict[str, dict[str, bool]] = {"vllm": {}}
        if vllm.switches_pdl:
            forms["vllm_pdl"] = {"pdl": True}
        if arguments["query_scale"] is None and arguments["form"] == "packed":
            forms["vllm_cat"] = {"concatenate": True}
        for name, options in forms.items():
            if (peer := peers.dsa_query(vllm, call, **options)) is not None:
                arms[name] = peer
    return arms


def _absorb_arms(case: AbsorbCase, call: Call) -> dict[str, Arm]:
    """The whole main query: absorb and rotate in place, against a matmul, a fused pass and what packs its result."""
    a = call.arguments
    q_nope, w_uk, scale = a["q_nope"], a["w_uk"], a["query_scale"]
    out: torch.Tensor = a["out"]
    tokens = q_nope.shape[0]
    q_pe = torch.randn(tokens, case.heads, 64, device=out.device).bfloat16()
    table = rope_table(dtype=torch.bfloat16).to(out.device)
    positions = torch.arange(tokens, device=out.device) % len(table)

    def absorbed() -> torch.Tensor:
        dsa.absorb_query(q_nope, w_uk, query_scale=scale, out=out)
        dsa.query(q_pe, None, positions, table, query_scale=scale, out=out)
        return out

    def apart() -> torch.Tensor:
        latent = torch.bmm(q_nope.transpose(0, 1), w_uk).transpose(0, 1)
        query = dsa.query(q_pe, latent, positions, table, query_scale=scale).query
        assert query is not None
        return query

    return {"preattn": absorbed, "bmm_then_pack": apart}


def _norm_arms(call: Call, vllm: peers.Vllm | None) -> dict[str, Arm]:
    arms: dict[str, Arm] = {"preattn": lambda: call.function(**call.arguments).q_latent}
    if vllm is not None:
        for name, pdl in (("vllm", False), ("vllm_pdl", True)) if vllm.switches_pdl else (("vllm", False),):
            if (peer := peers.dsa_norm_rope(vllm, call, pdl=pdl)) is not None:
                arms[name] = peer
    return arms


def _project_arms(case: ProjectCase, call: Call, vllm: peers.Vllm | None) -> dict[str, Arm]:
    """Projection and prologue, against the plain projection, and against it and what pads its result.

    The plain projection is the fastest of the library's that computes the same. UE8M0 scales of 32 have none on GPUs
    without block-scaled matrix units: there one of bf16 operands, twice the bytes, stands for it.
    """
    a = call.arguments
    x, weight, out = a["x"], a["weight"], a["out"]
    tokens, rows = x.shape[0], weight.shape[0]
    tail = weights.as_chunks(out)[:, :, case.heads :] if case.layout == "chunk_interleaved" else out[:, case.heads :]
    tail.zero_()
    plain = torch.empty(tokens, rows, dtype=torch.bfloat16, device=x.device)
    if case.weight == "e4m3":
        scales = {"scale_a": a["x_scale"], "scale_b": a["weight_scale"].t()}

        def multiply() -> torch.Tensor:
            return torch._scaled_mm(x, weight.t(), **scales, out_dtype=torch.bfloat16, out=plain)
    else:
        factor, exact = x, weight
        if case.weight == "mx":
            factor, exact = (torch.randn(operand.shape, device=x.device).bfloat16() for operand in (x, weight))

        def multiply() -> torch.Tensor:
            return torch.mm(factor, exact.t(), out=plain)

    query = {name: a[name] for name in ("kv", "cache", "slots", "positions", "rope_table", "record", "kv_scale")}
    query |= {name: a[name] for name in ("query_rope", "query_norm_eps", "layout")}
    query |= {"query": plain.unflatten(1, (case.heads, v4.HEAD_DIM)), "padded_heads": case.padded_heads}

    def then(prologue: Arm) -> Arm:
        def run() -> Any:
            multiply()
            return prologue()

        return run

    chosen = {name: value for name, value in a.items() if name != "form"}
    arms: dict[str, Arm] = {"preattn": lambda: call.function(**chosen)}
    for form in Projection:
        if form == Projection.KERNEL or library_multiplies(case.weight, case.layout, tokens, case.rank):
            arms[form] = lambda form=form: call.function(**chosen, form=form)  # type: ignore[misc]
    if case.weight == "e4m3" and not library_multiplies("e4m3", "head_major", tokens, case.rank):
        return arms  # there is no plain projection
    arms["plain_projection"] = multiply
    arms["then_one_launch"] = then(lambda: v4.query_kv_insert(**query))
    peer = peers.v4_query_kv(vllm, replace(call, arguments=query)) if vllm is not None else None
    if peer is not None:
        arms["vllm"] = then(peer)
    suffix = "_bf16" if case.weight == "mx" else ""
    if case.weight == "e4m3" and case.layout == "chunk_interleaved":
        suffix = "_unordered"  # it lies in head-major order, which a transposition more would have to mend
    return {name + suffix if name in ("then_one_launch", "vllm") else name: arm for name, arm in arms.items()}


def _swept(path: str, call: Call) -> dict[str, Arm]:
    return {"preattn": lambda: call.function(**call.arguments), **tuning.arms(path, call)}


def arms_of(case: Case, call: Call, vllm: peers.Vllm | None, sweep: str | None = None) -> dict[str, Arm]:
    """The arms of a case by name, ``preattn`` first; of a sweep: the configurations of a kernel path."""
    if sweep is not None:
        return _swept(sweep, call)
    if isinstance(case, V4Case):
        return _v4_arms(case, call, vllm)
    if isinstance(case, PadCase | KvCase):
        arguments = {**call.arguments, "out": None} if isinstance(case, PadCase) else call.arguments
        return {"preattn": lambda: call.function(**arguments)}
    if isinstance(case, ProjectCase):
        return _project_arms(case, call, vllm)
    if isinstance(case, DsaQueryCase):
        return _dsa_query_arms(call, vllm)
    if isinstance(case, AbsorbCase):
        return _absorb_arms(case, call)
    if isinstance(case, NormRopeCase):
        return _norm_arms(call, vllm)
    raise TypeError(f"case: no arms are defined for {type(case).__name__}")
