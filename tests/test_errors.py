"""Every public function x every kind of bad argument: what is raised, what it says, and that nothing was touched.

The ops' rows are made, not listed: a good call of the registry, and for each of its arguments every way in which it can
be wrong. A message begins with the argument's name and says what was expected and what came. All memory of the call,
inputs too, is compared before and after, and the good call is made next.
"""

from __future__ import annotations

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
from preattn.cases.v4 import KvCase, PadCase, V4Case
from preattn.dispatch import Backend, backend
from preattn.geometry import geometry

TOKENS = 4

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
)


GOOD: Backend | None = None if torch.cuda.is_available() else "reference"
"""Checks do not depend on who computes: on a CPU good calls go to the reference, which is quick."""


# -- tensors -------------------------------------------------------------------------------------------------------

FIRST = ("query", "q_pe", "q_nope", "q_latent")
"""An op's first argument, which says how many tokens there are, and where."""
SCALES = ("query_scale", "query_scale_inv", "kv_scale")
ANYWHERE = ("slots", "index_slots", "positions", "index_weights", *SCALES)
"""May begin at any element."""
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
        lambda name, t: name not in SCALES and t.shape[-1] > 1,
    ),
    "rows off the grid": (
        odd_rows,
        ValueError,
        lambda name, t: t.dim() > 1 and name not in (*SCALES, "index_weights") and t.shape[-1] > 0,
    ),
    "off the grid": (off_grid, ValueError, lambda name, t: name not in ANYWHERE and t.numel() > 0),
}


def _is_fine(case: Case, name: str, kind: str) -> bool:
    """V4's kernels read the table a value at a time; where a KV row comes first, it says how many there are."""
    table = isinstance(case, V4Case | KvCase) and name == "rope_table" and kind == "off the grid"
    return table or (isinstance(case, KvCase) and name == "kv" and kind in ("a row less", "another device"))


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
]


@pytest.mark.parametrize(
    "function", [v4.query_kv_insert, v4.kv_insert, v4.pad_query, dsa.query, dsa.absorb_query, dsa.norm_rope_insert]
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
    function: str, good: dict[str, Any], bad: dict[str, tuple[tuple[object, type[Exception]], ...]]
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
    function: str, good: dict[str, Any], name: str, value: object, error: type[Exception]
) -> None:
    module, _, attribute = function.partition(".")
    call = getattr(importlib.import_module(f"preattn.{module}"), attribute)
    memory = {key: tensor.clone() for key, tensor in good.items() if isinstance(tensor, Tensor)}
    with pytest.raises(error, match=rf"^{name}: .*expected .+; got .+"):
        call(**{**good, name: value})
    assert all(torch.equal(good[key], before) for key, before in memory.items()), "something was written"
    call(**good)


@pytest.mark.parametrize(("tp", "error"), [*NOT_INTEGERS, (0, ValueError), (3, ValueError)])
def test_shards_that_do_not_divide(tp: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"^tp: expected .+; got .+"):
        V41.shard(tp)
