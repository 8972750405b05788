"""Every public function x every kind of bad argument: what is raised, what it says, and that nothing was touched.

The ops' rows are made, not listed: a good call of the registry, and for each of its arguments every way in which it can
be wrong. A message begins with the argument's name and says what was expected and what came. All memory of the call,
inputs too, is compared before and after, and the good call is made next.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect as python
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from preattn import dsa, formats, v4
from preattn.cases.base import Call, Case, as_bytes
from preattn.cases.dsa import AbsorbCase, DsaQueryCase, NormRopeCase
from preattn.cases.v4 import KvCase, PadCase, ProjectCase, V4Case
from preattn.dispatch import Backend, backend
from preattn.geometry import geometry
from preattn.layers import DsaPrologue, IndexerParts, V4Prologue
from preattn.policy import Projection
from preattn.workspace import QueryWorkspace

TOKENS = 4


@dataclass(frozen=True)
class ProductCase:
    """A use of :func:`preattn.v4.project_query`: a projection of the registry without its KV half."""

    of: ProjectCase

    @property
    def name(self) -> str:
        return self.of.name.replace("v4_project", "v4_product")

    def build(self, tokens: int, device: torch.device | str = "cpu", seed: int = 0) -> Call:
        call = self.of.build(tokens, device, seed)
        names = set(python.signature(v4.project_query).parameters)
        arguments = {name: value for name, value in call.arguments.items() if name in names}
        return Call(v4.project_query, arguments, {"out": call.memory["out"]}, call.moved)


CASES: tuple[Case, ...] = (
    V4Case(8, 64),
    V4Case(4, 8, record="v4_fp8", layout="head_major", norm=True, rope=True),
    V4Case(3, 4, record="fp8", layout="head_major", rope=True, fp8_query=True),
    PadCase(8, 64),
    KvCase("fp8"),
    DsaQueryCase(4, index_heads=4),
    DsaQueryCase(3, index_heads=2, form="pair", latent="transposed", fp8_query=True, index_pairing="interleaved"),
    DsaQueryCase(4, padded_heads=8, latent="contiguous", index_heads=0, rope_dim=0),
    AbsorbCase(2, nope=64, padded_heads=4),
    AbsorbCase(2, nope=64, fp8_query=False),
    NormRopeCase(rank=512, top_k=64),
    NormRopeCase(rank=512, record="fp8", index_record="index_fp8_ue8m0", top_k=64, return_kv=True),
    ProjectCase(2, 4, record="v4_fp8", norm=True, rope=True, rank=128),
    ProjectCase(1, 2, record="fp8", weight="mx", rope=True, rank=128),
    ProductCase(ProjectCase(2, 4, layout="chunk_interleaved", weight="e4m3", grouped=True, rank=128)),
    ProductCase(ProjectCase(1, 2, rank=64, form=Projection.MATMUL)),
)


GOOD: Backend | None = None if torch.cuda.is_available() else "reference"
"""Checks do not depend on who computes: on a CPU good calls go to the reference, which is quick."""


# -- tensors -------------------------------------------------------------------------------------------------------

FIRST = ("query", "q_pe", "q_nope", "q_latent", "x")
"""An op's first argument, which says how many tokens there are, and where."""
SCALES = ("query_scale", "query_scale_inv", "kv_scale")
ANYWHERE = ("slots", "index_slots", "positions", "index_weights", "x_scale", "weight_scale", *SCALES)
"""May begin at any element."""
ANY_STRIDES = ("x_scale", *SCALES)
FREE_ROWS = (*FIRST, "slots", "index_slots", "rope_table", "index_rope_table", "cache", "index_cache")
"""The number of rows is the caller's, or checked as a last dim."""
FREE_LAST = ("slots", "index_slots", "top_k")


def strided(tensor: Tensor, strides: list[int]) -> Tensor:
    """Zeros with other strides."""
    size = 1 + sum((count - 1) * stride for count, stride in zip(tensor.shape, strides, strict=True))
    raw = torch.zeros(size * tensor.element_size(), dtype=torch.uint8, device=tensor.device)
    return raw.view(tensor.dtype).as_strided(tuple(tensor.shape), strides)


def off_grid(tensor: Tensor) -> Tensor:
    """The same shape and strides, one element past a multiple of 16 bytes."""
    size = 2 + sum((count - 1) * stride for count, stride in zip(tensor.shape, tensor.stride(), strict=True))
    raw = torch.zeros(size * tensor.element_size(), dtype=torch.uint8, device=tensor.device)
    return raw.view(tensor.dtype).as_strided(tuple(tensor.shape), tensor.stride(), 1)


def second_elements(tensor: Tensor) -> Tensor:
    return strided(tensor, [2 * stride for stride in tensor.stride()])


def odd_rows(tensor: Tensor) -> Tensor:
    return strided(tensor, [*[stride + 1 for stride in tensor.stride()[:-1]], 1])


Change = Callable[[Tensor], object]
Applies = Callable[[str, Tensor], bool]

KINDS: dict[str, tuple[Change, type[Exception], Applies]] = {
    "a list": (lambda t: [1.0], TypeError, lambda name, t: True),
    "a number": (lambda t: 1.0, TypeError, lambda name, t: True),
    "float64": (lambda t: t.to(torch.float64), TypeError, lambda name, t: True),
    "complex": (
        lambda t: torch.zeros(t.shape, dtype=torch.complex64, device=t.device),
        TypeError,
        lambda name, t: True,
    ),
    "another rank": (lambda t: t[None], ValueError, lambda name, t: name not in SCALES),
    "two elements": (lambda t: t.new_ones(2), ValueError, lambda name, t: name in SCALES),
    "a short last dim": (
        lambda t: t[..., :-1],
        ValueError,
        lambda name, t: name not in (*SCALES, *FREE_LAST) and t.shape[-1] > 0,
    ),
    "a row less": (
        lambda t: t[:-1],
        ValueError,
        lambda name, t: name not in (*SCALES, *FREE_ROWS, "top_k"),  # top_k has rows to spare
    ),
    "too many": (
        lambda t: torch.zeros(TOKENS + 1, dtype=t.dtype, device=t.device),
        ValueError,
        lambda name, t: name in ("slots", "index_slots", "positions"),
    ),
    "another device": (lambda t: t.to("meta"), ValueError, lambda name, t: name not in FIRST),
    "every second element": (
        second_elements,
        ValueError,
        lambda name, t: name not in ANY_STRIDES and t.shape[-1] > 1,
    ),
    "rows off the grid": (
        odd_rows,
        ValueError,
        lambda name, t: t.dim() > 1 and name not in (*ANY_STRIDES, "index_weights") and t.shape[-1] > 0,
    ),
    "off the grid": (off_grid, ValueError, lambda name, t: name not in ANYWHERE and t.numel() > 0),
}


def _is_fine(case: Case, name: str, kind: str) -> bool:
    """V4's kernels read the table a value at a time; a KV row that comes first, or x, says how many there are."""
    table = isinstance(case, V4Case | KvCase | ProjectCase) and name == "rope_table" and kind == "off the grid"
    return (
        table
        or (name == "x" and kind == "a short last dim")
        or (isinstance(case, KvCase) and name == "kv" and kind in ("a row less", "another device"))
    )


@dataclass(frozen=True)
class Bad:
    """One bad argument of a good call."""

    case: Case
    name: str
    kind: str
    make: Callable[[Any], object]
    error: type[Exception]

    def __str__(self) -> str:
        return f"{self.case.name}-{self.name}-{self.kind}"


def bad_tensors() -> Iterator[Bad]:
    for case in CASES:
        for name, tensor in case.build(TOKENS).arguments.items():
            if not isinstance(tensor, Tensor):
                continue
            for kind, (change, error, applies) in KINDS.items():
                if applies(name, tensor) and not _is_fine(case, name, kind):
                    yield Bad(case, name, kind, change, error)


# -- everything else -----------------------------------------------------------------------------------------------

WORDS = ((3, ValueError), ("nonsense", ValueError), ([], ValueError))
NUMBERS = (("1e-6", TypeError), (True, TypeError), (float("nan"), ValueError), (float("inf"), ValueError))
COUNTS = (("64", TypeError), (64.0, TypeError), (True, TypeError), (-1, ValueError), (1, ValueError))
FLAGS = ((1, TypeError), ("yes", TypeError), (None, TypeError))
OTHERS: dict[str, tuple[tuple[object, type[Exception]], ...]] = {
    "record": (*WORDS, (None, ValueError), ("v41_nvfp4", ValueError)),
    "layout": (*WORDS, (None, ValueError)),
    "form": (*WORDS, (None, ValueError)),
    "rope_output": (*WORDS, (None, ValueError)),
    "index_pairing": WORDS,
    "index_record": (*WORDS, (None, ValueError), ("index_mxfp4", ValueError)),
    "query_rope": FLAGS,
    "return_kv": FLAGS,
    "padded_heads": COUNTS,
    "rope_dim": ((32, ValueError), ("64", ValueError), (None, ValueError)),
    **dict.fromkeys(("query_norm_eps", "norm_eps", "q_eps", "kv_eps", "index_eps"), (*NUMBERS, (-1.0, ValueError))),
    **dict.fromkeys(("softmax_scale", "head_scale"), (*NUMBERS, (None, TypeError))),
}


def bad_values() -> Iterator[Bad]:
    for case in CASES:
        call = case.build(TOKENS)
        for name in python.signature(call.function).parameters:
            given = call.arguments.get(name)
            for value, error in OTHERS.get(name, ()):
                if name == "index_pairing" and given is None:
                    continue  # without an indexer any pairing is one too many: see MISSING
                if name == "padded_heads" and call.arguments.get("form") == "pair":
                    continue
                if name == "form" and value is None and isinstance(case, ProjectCase | ProductCase):
                    continue  # what was measured faster
                if name == "rope_dim" and call.arguments.get("out") is not None:
                    continue
                yield Bad(case, name, repr(value), lambda _, value=value: value, error)


ROWS = [*bad_tensors(), *bad_values()]


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_a_bad_argument_is_named_and_nothing_is_written(row: Bad, device: str) -> None:
    call = row.case.build(TOKENS, device)
    before = snapshot(call)
    arguments = {**call.arguments, row.name: row.make(call.arguments.get(row.name))}
    with backend(GOOD), pytest.raises(row.error, match=rf"^{row.name}: expected .+; got .+"):
        call.function(**arguments)
    assert unchanged(before, call)
    the_next_call_works(row.case, device)


@cache
def right(case: Case) -> dict[str, Tensor]:
    return case.build(TOKENS).run("reference")


def the_next_call_works(case: Case, device: str) -> None:
    written = case.build(TOKENS, device).run(GOOD)
    assert all(torch.equal(written[name], bits) for name, bits in right(case).items())


def snapshot(call: Call) -> dict[str, Tensor]:
    tensors = {name: tensor for name, tensor in call.arguments.items() if isinstance(tensor, Tensor)}
    return {name: as_bytes(tensor) for name, tensor in {**tensors, **call.memory}.items()}


def unchanged(before: dict[str, Tensor], call: Call) -> bool:
    after = snapshot(call)
    return all(torch.equal(after[name], bits) for name, bits in before.items())


# -- arguments that do not go together -----------------------------------------------------------------------------

MAJOR = V4Case(4, 8, record="v4_fp8", layout="head_major", rope=True)
QUERY = DsaQueryCase(4, index_heads=4, padded_heads=8, latent="contiguous")
NORMS = NormRopeCase(rank=512, top_k=64)
ABSORB = AbsorbCase(2, nope=64, padded_heads=4)

PROJECT = ProjectCase(2, 4, rope=True, rank=128)
E4M3 = ProductCase(ProjectCase(2, 4, weight="e4m3", grouped=True, rank=128))
MX_WEIGHT = ProductCase(ProjectCase(1, 2, weight="mx", rank=128))
SCATTERED = ProjectCase(2, 4, layout="chunk_interleaved", rank=128)

Changes = Callable[[dict[str, Any]], dict[str, Any]]


def keys(arguments: dict[str, Any], **changes: Change) -> dict[str, Any]:
    """Outputs for the normed latent and the rotated key, changed."""
    good = {"kv_out": torch.empty_like(arguments["kv_latent"]), "k_pe_out": torch.empty_like(arguments["k_pe"])}
    dense = {name: tensor.new_zeros(tensor.shape) for name, tensor in good.items()}
    return dense | {name: change(dense[name]) for name, change in changes.items()}


TOGETHER: list[tuple[str, Case, Changes, type[Exception], str]] = [
    (
        "fewer padded heads",
        MAJOR,
        lambda a: {"padded_heads": 3},
        ValueError,
        "padded_heads: expected 0 or at least the 4",
    ),
    ("other dtypes", MAJOR, lambda a: {"kv": a["kv"].half()}, TypeError, "kv: expected the query's dtype"),
    (
        "a norm, interleaved",
        V4Case(8, 64),
        lambda a: {"query_norm_eps": 1e-6},
        ValueError,
        "layout: expected head_major",
    ),
    (
        "a rotation, interleaved",
        V4Case(8, 64),
        lambda a: {"query_rope": True},
        ValueError,
        "layout: expected head_major",
    ),
    (
        "a needless scale",
        MAJOR,
        lambda a: {"kv_scale": torch.ones(1)},
        ValueError,
        "kv_scale: expected None for v4_fp8",
    ),
    ("no scale", KvCase("fp8"), lambda a: {"kv_scale": None}, ValueError, "kv_scale: expected a scale for fp8"),
    ("another record's cache", MAJOR, lambda a: {"record": "bf16"}, (TypeError, ValueError), "cache: expected"),
    ("out in kv", MAJOR, lambda a: {"kv": a["out"][:, 7]}, ValueError, "out: expected memory apart from kv"),
    (
        "out over the query",
        MAJOR,
        lambda a: {"query": a["out"][:, 1:5]},
        ValueError,
        "out: expected memory apart from query",
    ),
    (
        "kv in the cache",
        V4Case(4, 0, record="bf16", layout="head_major"),
        lambda a: {"padded_heads": 4, "kv": a["cache"][0, :TOKENS]},
        ValueError,
        "cache: expected memory apart from kv",
    ),
    (
        "overlapping rows",
        MAJOR,
        lambda a: {"out": a["out"][:1].expand(TOKENS, 8, 512)},
        ValueError,
        "out: expected rows that do not",
    ),
    (
        "overlapping pages",
        MAJOR,
        lambda a: {"cache": a["cache"][:1].expand(3, -1, -1)},
        ValueError,
        "cache: expected pages that do not",
    ),
    (
        "pages off the grid",
        V4Case(8, 64),
        lambda a: {"cache": a["cache"].as_strided((1, 64, 528), (33793, 528, 1))},
        ValueError,
        "cache: expected pages at multiples",
    ),
    (
        "gaps in a page",
        V4Case(8, 64),
        lambda a: {"cache": a["cache"].as_strided((1, 32, 528), (33792, 1056, 1))},
        ValueError,
        "cache: expected contiguous pages",
    ),
    (
        "no token a page",
        V4Case(8, 64),
        lambda a: {"cache": a["cache"][:, :0]},
        ValueError,
        "cache: expected at least 1 token",
    ),
    ("no heads", MAJOR, lambda a: {"query": a["query"][:, :0]}, ValueError, "query: expected at least 1 head"),
    (
        "padding to none",
        PadCase(8, 64),
        lambda a: {"padded_heads": 0},
        ValueError,
        "padded_heads: expected at least the 8",
    ),
    (
        "no latent and no out",
        QUERY,
        lambda a: {"latent": None, "out": None},
        ValueError,
        "latent: expected a tensor, or out",
    ),
    (
        "a padded pair",
        QUERY,
        lambda a: {"form": "pair", "out": None},
        ValueError,
        "padded_heads: expected None for the pair",
    ),
    (
        "a pair with out",
        QUERY,
        lambda a: {"form": "pair", "padded_heads": None},
        ValueError,
        "out: expected None for the pair",
    ),
    (
        "out over q_pe",
        QUERY,
        lambda a: {"q_pe": a["out"][:, :4, 512:]},
        ValueError,
        "out: expected memory apart from q_pe",
    ),
    (
        "out over the latent",
        QUERY,
        lambda a: {"latent": a["out"][:, 1:5, :512]},
        ValueError,
        "out: expected memory apart from latent",
    ),
    (
        "weights without an index query",
        QUERY,
        lambda a: {"index_query": None},
        ValueError,
        "index_weights: expected None without index_query",
    ),
    (
        "an index query without weights",
        QUERY,
        lambda a: {"index_weights": None},
        TypeError,
        "index_weights: expected a torch.Tensor",
    ),
    ("no pairing", QUERY, lambda a: {"index_pairing": None}, ValueError, "index_pairing: expected one of"),
    ("no table at all", QUERY, lambda a: {"rope_table": None}, TypeError, "rope_table: expected a torch.Tensor"),
    ("half a rotation", QUERY, lambda a: {"q_pe": a["q_pe"][..., :32]}, ValueError, "q_pe: expected last dim 64, or 0"),
    (
        "a narrow out",
        ABSORB,
        lambda a: {"out": a["out"][..., :496].contiguous()},
        ValueError,
        "out: expected at least 2 heads",
    ),
    ("heads that do not fit", ABSORB, lambda a: {"w_uk": a["w_uk"][:1]}, ValueError, "w_uk: expected shape"),
    ("an odd rest", ABSORB, lambda a: {"out": None, "rope_dim": 32}, ValueError, "rope_dim: expected 0 or 64"),
    ("a word for a rest", ABSORB, lambda a: {"out": None, "rope_dim": "64"}, ValueError, "rope_dim: expected 0 or 64"),
    ("slots without a cache", NORMS, lambda a: {"cache": None}, TypeError, "cache: expected a torch.Tensor"),
    (
        "slots without an index cache",
        NORMS,
        lambda a: {"index_cache": None},
        TypeError,
        "index_cache: expected a torch.Tensor",
    ),
    (
        "index slots of floats",
        NORMS,
        lambda a: {"index_slots": a["slots"].float()},
        TypeError,
        "index_slots: expected dtype",
    ),
    (
        "an index table of another width",
        QUERY,
        lambda a: {"index_rope_table": a["rope_table"][:, :32]},
        ValueError,
        "index_rope_table: expected shape",
    ),
    (
        "an index table of fp16",
        NORMS,
        lambda a: {"index_rope_table": a["rope_table"].half()},
        TypeError,
        "index_rope_table: expected dtype",
    ),
    (
        "an index table off the grid",
        NORMS,
        lambda a: {"index_rope_table": off_grid(a["rope_table"])},
        ValueError,
        "index_rope_table: expected data",
    ),
    ("half of the keys' outputs", NORMS, lambda a: {"kv_out": keys(a)["kv_out"]}, ValueError, "k_pe_out: expected"),
    ("the other half", NORMS, lambda a: {"k_pe_out": keys(a)["k_pe_out"]}, ValueError, "kv_out: expected"),
    (
        "a latent output of floats",
        NORMS,
        lambda a: keys(a, kv_out=lambda t: t.float()),
        TypeError,
        "kv_out: expected dtype",
    ),
    (
        "a short latent output",
        NORMS,
        lambda a: keys(a, kv_out=lambda t: t[:, :504]),
        ValueError,
        "kv_out: expected shape",
    ),
    (
        "an odd latent output",
        NORMS,
        lambda a: keys(a, kv_out=odd_rows),
        ValueError,
        "kv_out: expected strides",
    ),
    (
        "a latent output off the grid",
        NORMS,
        lambda a: keys(a, kv_out=off_grid),
        ValueError,
        "kv_out: expected data",
    ),
    (
        "a key output of another rank",
        NORMS,
        lambda a: keys(a, k_pe_out=lambda t: t[:, None]),
        ValueError,
        "k_pe_out: expected shape",
    ),
    (
        "a scattered key output",
        NORMS,
        lambda a: keys(a, k_pe_out=second_elements),
        ValueError,
        "k_pe_out: expected the last",
    ),
    (
        "a key output over the key",
        NORMS,
        lambda a: keys(a) | {"k_pe_out": a["k_pe"]},
        ValueError,
        "k_pe_out: expected memory apart from k_pe",
    ),
    (
        "index slots without a key",
        NORMS,
        lambda a: {"index_key": None, "index_slots": a["slots"]},
        ValueError,
        "index_slots: expected None without index_key",
    ),
    (
        "a weight without a key",
        NORMS,
        lambda a: {"index_key": None},
        ValueError,
        "index_weight: expected None without index_key",
    ),
    (
        "a key without a weight",
        NORMS,
        lambda a: {"index_weight": None},
        TypeError,
        "index_weight: expected a torch.Tensor",
    ),
    ("a key without a bias", NORMS, lambda a: {"index_bias": None}, TypeError, "index_bias: expected a torch.Tensor"),
    ("few top-k rows", NORMS, lambda a: {"top_k": a["top_k"][:3]}, ValueError, "top_k: expected at least 4 rows"),
    (
        "no RoPE dims in dsa_fp8",
        NORMS,
        lambda a: {"k_pe": a["k_pe"][:, :0]},
        ValueError,
        "record: expected bf16 or fp8",
    ),
    (
        "out over the latent's row",
        NORMS,
        lambda a: {
            "out": a["q_latent"].as_strided((TOKENS, 512), a["q_latent"].stride(), a["q_latent"].storage_offset() + 8)
        },
        ValueError,
        "out: expected memory apart from q_latent",
    ),
    (
        "half a head",
        PROJECT,
        lambda a: {"weight": a["weight"][:700]},
        ValueError,
        "weight: expected a positive multiple",
    ),
    (
        "a head more than out",
        PROJECT,
        lambda a: {"out": a["out"][:, :1]},
        ValueError,
        "out: expected at least the 2 heads",
    ),
    (
        "another rank",
        PROJECT,
        lambda a: {"weight": a["weight"][:, :64]},
        ValueError,
        "weight: expected shape [any, 128]",
    ),
    ("other operands", PROJECT, lambda a: {"weight": a["weight"].half()}, TypeError, "weight: expected dtype"),
    (
        "rows of x that overlap",
        PROJECT,
        lambda a: {"x": a["x"][:1].expand(TOKENS, -1)},
        ValueError,
        "x: expected rows that do not overlap",
    ),
    (
        "heads of out that overlap",
        PROJECT,
        lambda a: {"out": a["out"][:1].expand(TOKENS, 4, 512)},
        ValueError,
        "out: expected rows that do not overlap",
    ),
    ("scales of bf16", PROJECT, lambda a: {"x_scale": torch.ones(TOKENS)}, ValueError, "x_scale: expected None"),
    (
        "weight scales of bf16",
        PROJECT,
        lambda a: {"weight_scale": torch.ones(8, 1)},
        ValueError,
        "weight_scale: expected None",
    ),
    ("no scales of x", E4M3, lambda a: {"x_scale": None}, TypeError, "x_scale: expected a torch.Tensor"),
    (
        "no scales of a weight",
        E4M3,
        lambda a: {"weight_scale": None},
        TypeError,
        "weight_scale: expected a torch.Tensor",
    ),
    ("scales of no rank", E4M3, lambda a: {"x_scale": torch.tensor(1.0)}, ValueError, "x_scale: expected shape"),
    (
        "MX scales as blocks",
        MX_WEIGHT,
        lambda a: {"weight_scale": torch.ones(512, 4)},
        ValueError,
        "weight_scale: expected shape [4, 1] of torch.float32",
    ),
    (
        "half a block of rank",
        E4M3,
        lambda a: {"x": a["x"][:, :64], "weight": a["weight"][:, :64]},
        ValueError,
        "x: expected a rank that is a positive multiple of 128",
    ),
    (
        "a rank of no kernel",
        PROJECT,
        lambda a: {"x": a["x"][:, :96], "weight": a["weight"][:, :96]},
        ValueError,
        "form: expected a rank that is a multiple of 64 for kernel",
    ),
    (
        "a matmul of MX weights",
        MX_WEIGHT,
        lambda a: {"form": "matmul"},
        ValueError,
        "form: expected bf16 operands, or block-scaled",
    ),
    (
        "a norm, scattered",
        SCATTERED,
        lambda a: {"query_norm_eps": 1e-6},
        ValueError,
        "layout: expected head_major",
    ),
    ("a rotation, scattered", SCATTERED, lambda a: {"query_rope": True}, ValueError, "layout: expected head_major"),
    ("fp16 KV", PROJECT, lambda a: {"kv": a["kv"].half()}, TypeError, "kv: expected dtype torch.bfloat16"),
    (
        "out over x",
        PROJECT,
        lambda a: {"x": a["out"][:, 3, :128]},
        ValueError,
        "out: expected memory apart from x",
    ),
    (
        "out over the weight",
        ProjectCase(1, 4, rope=True, rank=512),
        lambda a: {"out": a["weight"][: 4 * TOKENS].view(TOKENS, 4, 512)},
        ValueError,
        "out: expected memory apart from weight",
    ),
    ("KV in out", PROJECT, lambda a: {"kv": a["out"][:, 3]}, ValueError, "out: expected memory apart from kv"),
]


@pytest.mark.parametrize(
    "function",
    [
        v4.query_kv_insert,
        v4.kv_insert,
        v4.pad_query,
        v4.project_query,
        v4.project_query_kv_insert,
        dsa.query,
        dsa.absorb_query,
        dsa.norm_rope_insert,
    ],
)
def test_every_argument_of_every_op_is_among_the_rows(function: Callable[..., Any]) -> None:
    rows = {row.name for row in ROWS if row.case.build(1).function is function}
    rows |= {message.partition(":")[0] for _, case, _, _, message in TOGETHER if case.build(1).function is function}
    assert not set(python.signature(function).parameters) - rows


@pytest.mark.parametrize(("what", "case", "changes", "error", "message"), TOGETHER, ids=[row[0] for row in TOGETHER])
def test_arguments_that_do_not_fit_each_other(
    what: str, case: Case, changes: Changes, error: type[Exception], message: str, device: str
) -> None:
    call = case.build(TOKENS, device)
    before = snapshot(call)
    changed = changes(call.arguments)
    changed = {
        name: value.to(device) if name in SCALES and value is not None else value for name, value in changed.items()
    }
    with backend(GOOD), pytest.raises(error, match=f"^{re.escape(message)}.*; got .+"):
        call.function(**{**call.arguments, **changed})
    assert unchanged(before, call)
    the_next_call_works(case, device)


# -- what is public besides ops ------------------------------------------------------------------------------------

MX = formats.record("v41_mxfp8")
V41 = geometry("deepseek-v4.1-flash").shard(2)


def pool() -> Tensor:
    return torch.full((8 * 528,), 0xA5, dtype=torch.uint8)


def view(**changes: Any) -> Tensor:
    return formats.cache_view(**{"pool": pool(), "record": MX, "block_size": 4, **changes})


def rows_of(
    function: str | Callable[..., object],
    good: dict[str, Any],
    bad: dict[str, tuple[tuple[object, type[Exception]], ...]],
) -> list[Any]:
    return [(function, good, name, value, error) for name, values in bad.items() for value, error in values]


NOT_INTEGERS = (("4", TypeError), (4.5, TypeError), (True, TypeError))
NOT_WORDS = ((3, TypeError), ([], TypeError))
DATA = torch.zeros(2, 528, dtype=torch.uint8)
INDICES = ((torch.zeros(2), TypeError), ([0, 1], TypeError), (torch.zeros(1, 2).long(), ValueError))
OTHER_CACHES = ((pool(), ValueError), (pool().view(2, 4, 528).float(), TypeError), ("a cache", TypeError))

API = [
    *rows_of(
        "formats.record",
        {"name": "bf16", "dim": 512},
        {"dim": (*NOT_INTEGERS, (0, ValueError), (-16, ValueError), (20, ValueError))},
    ),
    *rows_of(
        "formats.cache_view",
        {"pool": pool(), "record": MX, "block_size": 4},
        {
            "pool": ((None, TypeError), ([], TypeError), (pool()[::2], ValueError)),
            "record": (("v41_mxfp8", TypeError), (None, TypeError)),
            "block_size": (*NOT_INTEGERS, (None, TypeError), (0, ValueError), (-1, ValueError)),
            "num_blocks": (*NOT_INTEGERS, (-1, ValueError), (3, ValueError)),
            "block_stride": (*NOT_INTEGERS, (0, ValueError), (2112 - 16, ValueError), (2112 + 8, ValueError)),
            "offset": (*NOT_INTEGERS, (None, TypeError), (-16, ValueError), (8, ValueError), (1 << 40, ValueError)),
        },
    ),
    *rows_of(
        "formats.encode",
        {"record": MX, "values": torch.zeros(2, 512)},
        {
            "record": NOT_WORDS,
            "values": (
                (None, TypeError),
                ([0.0], TypeError),
                (torch.zeros(2, 512).double(), TypeError),
                (torch.zeros(2, 512).long(), TypeError),
                (torch.zeros(2, 511), ValueError),
                (torch.tensor(1.0), ValueError),
            ),
        },
    ),
    *rows_of(
        "formats.decode",
        {"record": MX, "data": DATA},
        {
            "record": NOT_WORDS,
            "data": (
                (None, TypeError),
                (DATA.float(), TypeError),
                (DATA[:, :500], ValueError),
                (DATA[0, 0], ValueError),
            ),
        },
    ),
    *rows_of(
        "formats.store",
        {"cache": view(), "record": MX, "slots": torch.arange(2), "data": DATA},
        {
            "cache": OTHER_CACHES,
            "slots": INDICES,
            "data": ((DATA.float(), TypeError), (DATA[:1], ValueError), (DATA[:, :5], ValueError), (None, TypeError)),
        },
    ),
    *rows_of(
        "formats.load",
        {"cache": view(), "record": MX, "slots": torch.arange(2)},
        {
            "cache": OTHER_CACHES,
            "slots": (*INDICES, (torch.tensor([0, 8]), ValueError), (torch.tensor([-1]), ValueError)),
        },
    ),
    *rows_of(
        "backends.negotiate",
        {"geometry": V41, "name": "flashmla-mega"},
        {
            "geometry": ((None, TypeError), ("deepseek-v4.1-flash", TypeError)),
            "form": (("packed", ValueError), ("nonsense", ValueError)),
            "record": (("bf16", ValueError), ("nonsense", ValueError)),
            "query_dtype": (("e4m3", ValueError), ("nonsense", ValueError)),
        },
    ),
    *rows_of(
        "policy.choose",
        {"geometry": V41, "tokens": 4},
        {
            "geometry": ((None, TypeError),),
            "tokens": (*NOT_INTEGERS, (-1, ValueError)),
            "backend": ((3, TypeError), ("nonsense", ValueError), ("flashmla-sparse", ValueError)),
            "record": (("nonsense", ValueError),),
            "device_name": NOT_WORDS,
            "captured": ((1, TypeError),),
        },
    ),
    *rows_of("geometry.geometry", {"name": "glm-5"}, {"name": ((3, TypeError), ("nonsense", ValueError))}),
    *rows_of(
        "geometry.Rope", {"dim": 64}, {"dim": (*NOT_INTEGERS, (-2, ValueError), (3, ValueError)), "style": WORDS[:2]}
    ),
    *rows_of(
        "geometry.Indexer", {"heads": 4}, {"heads": (*NOT_INTEGERS, (0, ValueError)), "top_k": ((0, ValueError),)}
    ),
]


@pytest.mark.parametrize(
    ("function", "good", "name", "value", "error"), API, ids=[f"{row[0]}-{row[2]}-{i}" for i, row in enumerate(API)]
)
def test_a_bad_argument_of_what_is_no_op(
    function: str | Callable[..., object], good: dict[str, Any], name: str, value: object, error: type[Exception]
) -> None:
    if isinstance(function, str):
        module, _, attribute = function.partition(".")
        function = getattr(importlib.import_module(f"preattn.{module}"), attribute)
    memory = {key: tensor.clone() for key, tensor in good.items() if isinstance(tensor, Tensor)}
    with pytest.raises(error, match=rf"^{name}: .*expected .+; got .+"):
        function(**{**good, name: value})
    assert all(torch.equal(good[key], before) for key, before in memory.items()), "something was written"
    function(**good)


@pytest.mark.parametrize(("tp", "error"), [*NOT_INTEGERS, (0, ValueError), (3, ValueError)])
def test_shards_that_do_not_divide(tp: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"^tp: expected .+; got .+"):
        V41.shard(tp)


# -- workspaces, layers, weights, warm-up --------------------------------------------------------------------------

SMALL = dataclasses.replace(geometry("deepseek-v4.1-flash").shard(8), q_rank=128)
DSA = geometry("deepseek-v3.2").shard(64)
POINT = torch.tensor(1.0)
TABLE = torch.zeros(16, 64)
NO_TENSORS = ((None, TypeError), ([1.0], TypeError), (1.0, TypeError), ("x", TypeError))


def like(tensor: Tensor) -> tuple[tuple[object, type[Exception]], ...]:
    """What is wrong where such a tensor is expected."""
    short = tensor[..., :-1]
    return (*NO_TENSORS, (tensor.double(), TypeError), (POINT.to(tensor.dtype), ValueError), (short, ValueError))


def zero_cache(record: formats.Record) -> Tensor:
    return formats.cache_view(torch.zeros(record.page_bytes(64), dtype=torch.uint8), record, block_size=64)


def bf16(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


WORKSPACE = QueryWorkspace(SMALL, "flashmla-mega", 4, device="cpu")
PACKED = QueryWorkspace(DSA, "flashmla-sparse", 4, device="cpu")
INDEXER = IndexerParts(weight=torch.ones(128), bias=torch.zeros(128), cache=zero_cache(formats.record("index_fp8")))
LAYER: dict[str, Any] = {
    "geometry": SMALL,
    "backend": "flashmla-mega",
    "cache": zero_cache(MX),
    "rope_table": TABLE,
    "max_tokens": 4,
    "wq_b": bf16(4096, 128),
}
FP8_LAYER: dict[str, Any] = LAYER | {
    "wq_b": torch.zeros(4096, 128, dtype=torch.float8_e4m3fn),
    "wq_b_scale": torch.ones(32, 1),
    "workspace": WORKSPACE,
}
DSA_LAYER: dict[str, Any] = {
    "geometry": DSA,
    "backend": "flashmla-sparse",
    "cache": zero_cache(formats.record("dsa_fp8", 576)),
    "rope_table": TABLE,
    "max_tokens": 4,
    "w_uk": bf16(2, 128, 512),
    "q_weight": bf16(1536),
    "kv_weight": bf16(512),
    "indexer": INDEXER,
}
CACHES = (*NO_TENSORS, (pool(), ValueError), (torch.zeros(2, 4, 528), TypeError), (POINT.byte(), ValueError))
TABLES = (*like(TABLE)[1:], (torch.zeros(16, 128)[:, ::2], ValueError))
SHARED: dict[str, tuple[tuple[object, type[Exception]], ...]] = {
    "geometry": ((None, TypeError), ("deepseek-v4.1-flash", TypeError)),
    "backend": ((3, TypeError), (None, TypeError), ("nonsense", ValueError)),
    "cache": CACHES,
    "rope_table": (*TABLES, (None, TypeError)),
    "max_tokens": (*NOT_INTEGERS, (None, TypeError), (0, ValueError), (-1, ValueError)),
    "workspace": (("a workspace", TypeError), (4, TypeError)),
    "record": (("nonsense", ValueError), (3, ValueError), ([], ValueError)),
    "kv_scale": ((torch.ones(1), ValueError), (3, ValueError)),
}
INDEX = ((torch.zeros(4), TypeError), ([0, 1], TypeError), (torch.tensor(1), ValueError))
STEP: dict[str, Any] = {
    "q_latent": bf16(4, 128),
    "kv": bf16(4, 512),
    "positions": torch.arange(4),
    "slots": torch.arange(4),
}
FP8_STEP: dict[str, Any] = STEP | {"q_latent": STEP["q_latent"].to(torch.float8_e4m3fn), "q_scale": torch.ones(4)}
FIRST_HALF: dict[str, Any] = {
    "q_latent": bf16(4, 1536),
    "kv_latent": bf16(4, 512),
    "k_pe": bf16(4, 64),
    "positions": torch.arange(4),
    "slots": torch.arange(4),
    "index_key": bf16(4, 128),
    "top_k": torch.zeros(4, 64, dtype=torch.int32),
}
SECOND_HALF: dict[str, Any] = {
    "q": bf16(4, 2, 192),
    "positions": torch.arange(4),
    "index_query": bf16(4, 64, 128),
    "index_weights": torch.ones(4, 64),
}
DTYPE_NAMES = (("bf16", TypeError), (3, TypeError), (torch.float64, TypeError))
TOKEN_COUNTS = (*NOT_INTEGERS, (None, TypeError), (-1, ValueError), (5, ValueError))
PRODUCT: dict[str, Any] = {"x": bf16(4, 128), "weight": bf16(4096, 128), "workspace": WORKSPACE}
ABSORBED: dict[str, Any] = {"x": bf16(4, 2, 128), "weight": bf16(2, 128, 512), "workspace": PACKED}

LAYERS = [
    *rows_of(
        "workspace.QueryWorkspace",
        {"geometry": SMALL, "backend": "flashmla-mega", "max_tokens": 4, "device": "cpu"},
        {
            **{name: SHARED[name] for name in ("geometry", "backend", "max_tokens", "record")},
            "device": ((3, TypeError), (None, TypeError), ("nonsense", ValueError)),
            "debug": FLAGS,
        },
    ),
    *rows_of(WORKSPACE.view, {"tokens": 4}, {"tokens": TOKEN_COUNTS}),
    *rows_of(WORKSPACE.whole, {"tokens": 4}, {"tokens": TOKEN_COUNTS}),
    *rows_of(WORKSPACE.live, {"tokens": 4}, {"tokens": TOKEN_COUNTS}),
    *rows_of(
        "workspace.project_query",
        PRODUCT,
        {
            "x": (*like(PRODUCT["x"])[:-1], (bf16(4), ValueError), (bf16(5, 128), ValueError)),
            "weight": (*like(PRODUCT["weight"]), (bf16(512, 128), ValueError), (bf16(4096), ValueError)),
            "workspace": ((None, TypeError), ("a workspace", TypeError), (PRODUCT["x"], TypeError)),
            "x_scale": ((torch.ones(4), ValueError), (POINT, ValueError)),
            "weight_scale": ((torch.ones(32, 1), ValueError),),
        },
    ),
    *rows_of(
        "workspace.project_query",
        ABSORBED,
        {"x": (*NO_TENSORS, (POINT.bfloat16(), ValueError), (bf16(4, 128), ValueError), (bf16(5, 2, 128), ValueError))},
    ),
    *rows_of(
        "layers.V4Prologue",
        LAYER,
        {**SHARED, "wq_b": like(LAYER["wq_b"]), "query_scale_inv": ((torch.ones(1), ValueError),)},
    ),
    *rows_of(
        "layers.V4Prologue",
        FP8_LAYER,
        {
            "wq_b": like(FP8_LAYER["wq_b"]),
            "wq_b_scale": (*like(FP8_LAYER["wq_b_scale"])[1:], (torch.ones(31, 1), ValueError)),
            "workspace": (
                ("a workspace", TypeError),
                (PACKED, ValueError),
                (QueryWorkspace(SMALL, "flashmla-mega", 3, device="cpu"), ValueError),
            ),
        },
    ),
    *rows_of(
        V4Prologue(**LAYER).prepare,
        STEP,
        {
            "q_latent": (*like(STEP["q_latent"]), (bf16(5, 128), ValueError)),
            "kv": like(STEP["kv"]),
            "positions": INDEX,
            "slots": (*INDEX, (None, TypeError)),
            "q_scale": ((torch.ones(4), ValueError), (1.0, ValueError)),
        },
    ),
    *rows_of(
        V4Prologue(**FP8_LAYER).prepare,
        FP8_STEP,
        {"q_latent": like(FP8_STEP["q_latent"]), "q_scale": ((None, ValueError),)},
    ),
    *rows_of(V4Prologue(**LAYER).explain, {"tokens": 4}, {"tokens": (*NOT_INTEGERS, (-1, ValueError))}),
    *rows_of(V4Prologue(**LAYER).warmup, {}, {"index_dtype": DTYPE_NAMES}),
    *rows_of(
        "layers.DsaPrologue",
        DSA_LAYER,
        {
            **SHARED,
            **{name: like(DSA_LAYER[name]) for name in ("w_uk", "q_weight", "kv_weight")},
            "indexer": (("an indexer", TypeError), (DSA, TypeError)),
            "query_scale": ((torch.ones(1), ValueError),),
        },
    ),
    *rows_of(
        DsaPrologue(**DSA_LAYER).norm_and_store,
        FIRST_HALF,
        {
            "q_latent": (*like(FIRST_HALF["q_latent"]), (bf16(5, 1536), ValueError)),
            **{name: like(FIRST_HALF[name]) for name in ("kv_latent", "k_pe")},
            "positions": INDEX,
            "slots": INDEX,
            "index_key": (*like(FIRST_HALF["index_key"])[1:], (None, ValueError)),
            "top_k": (([1], TypeError), (POINT, TypeError), (torch.zeros(3, 64).int(), ValueError)),
        },
    ),
    *rows_of(
        DsaPrologue(**DSA_LAYER).prepare,
        SECOND_HALF,
        {
            "q": (*like(SECOND_HALF["q"]), (bf16(5, 2, 192), ValueError)),
            "positions": INDEX,
            "index_query": (*like(SECOND_HALF["index_query"])[1:], (None, ValueError)),
            "index_weights": like(SECOND_HALF["index_weights"]),
        },
    ),
    *rows_of(
        "warmup.warmup",
        {"geometry": SMALL, "device": "cpu"},
        {
            "geometry": ((None, TypeError), ("deepseek-v4.1-flash", TypeError)),
            "record": (*WORDS, ("dsa_fp8", ValueError)),
            "block_size": (*NOT_INTEGERS, (0, ValueError), (-64, ValueError)),
            "index_block_size": (*NOT_INTEGERS, (0, ValueError)),
            "layout": WORDS,
            "padded_heads": (*NOT_INTEGERS, (7, ValueError), (0, ValueError)),
            **dict.fromkeys(("dtype", "index_dtype", "norm_dtype", "index_norm_dtype"), DTYPE_NAMES),
            **dict.fromkeys(("index_weights_dtype", "positions_dtype", "table_dtype"), DTYPE_NAMES),
            "index_record": (*WORDS, ("index_mxfp4", ValueError)),
            "rope_output": WORDS,
            "weight": WORDS,
            "device": ((3, TypeError), ("nonsense", ValueError)),
            "progress": ((3, TypeError),),
        },
    ),
    *rows_of(
        "v4.weight_kind",
        {"weight": FP8_LAYER["wq_b"], "weight_scale": FP8_LAYER["wq_b_scale"]},
        {
            "weight": like(FP8_LAYER["wq_b"]),
            "weight_scale": (*like(FP8_LAYER["wq_b_scale"]), (torch.ones(32, 2)[:, ::2], ValueError)),
        },
    ),
    *[
        row
        for function, name, good, bad in (
            ("interleave_query_rows", "weight", (512, 4), (500, 4)),
            ("deinterleave_query_rows", "weight", (512, 4), (500, 4)),
            ("query_chunks", "weight", (512, 4), (500, 4)),
            ("interleave_query_scales", "scales", (4, 4), (6, 4)),
            ("interleave_output_columns", "weight", (4, 4096), (4, 512)),
            ("deinterleave_output_columns", "weight", (4, 4096), (4, 512)),
            ("interleave_output_scales", "scales", (1, 32), (1, 4)),
            ("as_chunks", "query", (2, 3, 512), (2, 512)),
        )
        for row in rows_of(
            f"weights.{function}",
            {name: torch.zeros(good)},
            {name: (*NO_TENSORS, (POINT, ValueError), (torch.zeros(bad), ValueError))},
        )
    ],
]


def title(function: str | Callable[..., object]) -> str:
    return function if isinstance(function, str) else function.__qualname__


@pytest.mark.parametrize(
    ("function", "good", "name", "value", "error"),
    LAYERS,
    ids=[f"{title(row[0])}-{row[2]}-{i}" for i, row in enumerate(LAYERS)],
)
def test_a_bad_argument_of_a_layer(
    function: str | Callable[..., object],
    good: dict[str, Any],
    name: str,
    value: object,
    error: type[Exception],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")  # CPU tensors go to the reference; its warm-up compiles nothing
    with backend("reference"):
        test_a_bad_argument_of_what_is_no_op(function, good, name, value, error)


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        *[("weight", value, error) for value, error in like(INDEXER.weight)],
        *[("bias", value, error) for value, error in like(INDEXER.bias)],
        *[("cache", value, error) for value, error in CACHES],
        *[("record", value, error) for value, error in (*WORDS, (None, ValueError))],
        *[("rope_table", value, error) for value, error in TABLES],
        *[("eps", value, error) for value, error in (*NUMBERS, (-1.0, ValueError))],
        *[(name, value, error) for value, error in NUMBERS for name in ("softmax_scale", "head_scale")],
    ],
)
def test_a_bad_part_of_an_indexer(name: str, value: object, error: type[Exception]) -> None:
    parts = dataclasses.replace(INDEXER, **{name: value})  # type: ignore[arg-type]
    with pytest.raises(error, match=rf"^indexer\.{name}: deepseek-v3.2 with flashmla-sparse: expected .+; got .+"):
        DsaPrologue(**{**DSA_LAYER, "indexer": parts})
