"""The presets against the published table, written out; shards; and what bad values are told."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from dataclasses import FrozenInstanceError, replace

import pytest

from preattn.geometry import PRESETS, Geometry, Indexer, Records, Rope, geometry

LAST_64 = Rope(64, "interleaved", "last")
DSA_RECORDS = Records(latent=("dsa_fp8", "bf16", "fp8", "dsa_nvfp4"), index=("index_fp8",))
V4_RECORDS = Records(window=("v4_fp8", "bf16", "fp8"), compressed=("v4_fp8", "bf16", "fp8"))
V41_RECORDS = Records(window=("v41_mxfp8",), compressed=("v41_mxfp8", "v41_nvfp4"))

# name: family, hidden, layers, heads, q_rank, nope, v, latent, RoPE, head, key, query norm, window, groups, eps, padded
TABLE = {
    "deepseek-v3.2": ("dsa", 7168, 61, 128, 1536, 128, 128, 512, 64, 192, 576, False, 0, 0, 1e-6, 128),
    "glm-5": ("dsa", 6144, 78, 64, 2048, 192, 256, 512, 64, 256, 576, False, 0, 0, 1e-5, 64),
    "glm-5-next": ("dsa", 4096, 45, 64, 1536, 256, None, 512, 0, 256, 512, False, 0, 0, 1e-5, 64),
    "deepseek-v4-flash": ("v4", 4096, 43, 64, 1024, 448, 512, 512, 64, 512, 512, True, 128, 8, 1e-6, 64),
    "deepseek-v4-pro": ("v4", 7168, None, 128, 1536, 448, 512, 512, 64, 512, 512, True, 128, 16, 1e-6, 128),
    "deepseek-v4.1-flash": ("v4", 5120, None, 64, 1280, 448, 512, 512, 64, 512, 512, False, None, None, 1e-6, 64),
}

INDEXERS = {
    "deepseek-v3.2": Indexer(heads=64, dim=128, top_k=2048, rope=Rope(64, "half_split", "first")),
    "glm-5": Indexer(heads=32, dim=128, top_k=2048, rope=Rope(64, "interleaved", "first"), shares_top_k=True),
    "glm-5-next": Indexer(heads=32, dim=128, pooled=True),
    "deepseek-v4-flash": Indexer(heads=64, dim=128, top_k=512, rope=LAST_64),
    "deepseek-v4-pro": None,
    "deepseek-v4.1-flash": Indexer(rope=LAST_64),
}

RECORDS = {
    "deepseek-v3.2": DSA_RECORDS,
    "glm-5": DSA_RECORDS,
    "glm-5-next": Records(latent=("bf16", "fp8"), index=("index_fp8",)),
    "deepseek-v4-flash": V4_RECORDS,
    "deepseek-v4-pro": V4_RECORDS,
    "deepseek-v4.1-flash": V41_RECORDS,
}


def test_presets_are_the_table() -> None:
    assert tuple(PRESETS) == tuple(TABLE)
    for name, model in PRESETS.items():
        assert model.name == name
        assert model.tp == 1


@pytest.mark.parametrize("name", TABLE)
def test_preset(name: str) -> None:
    model = geometry(name)
    assert (
        model.family,
        model.hidden,
        model.layers,
        model.heads,
        model.q_rank,
        model.nope_dim,
        model.v_dim,
        model.latent_dim,
        model.rope.dim,
        model.head_dim,
        model.key_dim,
        model.query_norm,
        model.window,
        model.output_groups,
        model.eps,
        model.padded_heads,
    ) == TABLE[name]
    assert (model.rope.style, model.rope.placement) == ("interleaved", "last")
    assert model.indexer == INDEXERS[name]
    assert model.records == RECORDS[name]
    assert model.padded_head_counts == (64, 128)


# name: (heads, output groups, padded heads) at tp 1, 2, 4, 8
SHARDS = {
    "deepseek-v3.2": ((128, 0, 128), (64, 0, 64), (32, 0, 64), (16, 0, 64)),
    "glm-5": ((64, 0, 64), (32, 0, 64), (16, 0, 64), (8, 0, 64)),
    "glm-5-next": ((64, 0, 64), (32, 0, 64), (16, 0, 64), (8, 0, 64)),
    "deepseek-v4-flash": ((64, 8, 64), (32, 4, 64), (16, 2, 64), (8, 1, 64)),
    "deepseek-v4-pro": ((128, 16, 128), (64, 8, 64), (32, 4, 64), (16, 2, 64)),
    "deepseek-v4.1-flash": ((64, None, 64), (32, None, 64), (16, None, 64), (8, None, 64)),
}


@pytest.mark.parametrize("step", range(4))
@pytest.mark.parametrize("name", SHARDS)
def test_shard_divides_heads_and_groups_only(name: str, step: int) -> None:
    tp = (1, 2, 4, 8)[step]
    whole, shard = geometry(name), geometry(name).shard(tp)
    heads, groups, padded = SHARDS[name][step]
    assert (shard.heads, shard.output_groups, shard.padded_heads, shard.tp) == (heads, groups, padded, tp)
    assert replace(shard, heads=whole.heads, output_groups=whole.output_groups, tp=1) == whole


@pytest.mark.parametrize("name", SHARDS)
def test_shards_compose(name: str) -> None:
    assert geometry(name).shard(2).shard(4) == geometry(name).shard(8)
    assert geometry(name).shard(1) == geometry(name)


@pytest.mark.parametrize(
    ("tp", "error", "message"),
    [
        (3, ValueError, "tp: expected a divisor of the 64 heads of deepseek-v4-flash; got 3"),
        (128, ValueError, "tp: expected a divisor of the 64 heads of deepseek-v4-flash; got 128"),
        (16, ValueError, "tp: expected a divisor of the 8 output groups of deepseek-v4-flash; got 16"),
        (0, ValueError, "tp: expected at least 1; got 0"),
        (-2, ValueError, "tp: expected at least 1; got -2"),
        (2.0, TypeError, "tp: expected an int; got 2.0"),
        ("2", TypeError, "tp: expected an int; got '2'"),
        (True, TypeError, "tp: expected an int; got True"),
        (None, TypeError, "tp: expected an int; got None"),
    ],
)
def test_shard_refuses(tp: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        geometry("deepseek-v4-flash").shard(tp)  # type: ignore[arg-type]


@pytest.mark.parametrize(("heads", "padded"), [(1, 64), (20, 64), (63, 64), (64, 64), (65, 128), (128, 128)])
def test_padded_heads_is_the_smallest_that_holds(heads: int, padded: int) -> None:
    assert replace(geometry("deepseek-v4.1-flash"), heads=heads).padded_heads == padded


def test_padded_heads_refuses_more_than_attention_takes() -> None:
    wide = replace(geometry("deepseek-v4.1-flash"), heads=129)
    message = "heads: expected at most 128, the largest head count attention takes; got 129"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        _ = wide.padded_heads
    assert replace(wide, padded_head_counts=(64, 128, 256)).padded_heads == 256


@pytest.mark.parametrize("name", ["DeepSeek-V4.1-Flash", "DEEPSEEK-V4.1-FLASH", "deepseek-v4.1-flash"])
def test_lookup_ignores_case(name: str) -> None:
    assert geometry(name) is PRESETS["deepseek-v4.1-flash"]


def test_lookup_lists_what_it_knows() -> None:
    message = (
        "name: expected one of deepseek-v3.2, glm-5, glm-5-next, deepseek-v4-flash, deepseek-v4-pro, "
        "deepseek-v4.1-flash; got 'deepseek-v5'"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        geometry("deepseek-v5")
    with pytest.raises(TypeError, match=r"^name: expected a str; got 4$"):
        geometry(4)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"family": "v5"}, ValueError, "family: expected one of v4, dsa; got 'v5'"),
        ({"hidden": 0}, ValueError, "hidden: expected at least 1; got 0"),
        ({"heads": 64.0}, TypeError, "heads: expected an int; got 64.0"),
        ({"q_rank": None}, TypeError, "q_rank: expected an int; got None"),
        ({"layers": 0}, ValueError, "layers: expected at least 1; got 0"),
        ({"window": -1}, ValueError, "window: expected at least 0; got -1"),
        ({"heads": 20}, ValueError, "output_groups: expected a divisor of the 20 heads; got 8"),
        ({"nope_dim": 512}, ValueError, "nope_dim: expected 448, what RoPE leaves of a V4 row; got 512"),
        ({"eps": 0.0}, ValueError, "eps: expected more than 0; got 0.0"),
        ({"eps": float("nan")}, ValueError, "eps: expected more than 0; got nan"),
        ({"padded_head_counts": ()}, ValueError, "padded_head_counts: expected ascending counts; got ()"),
        ({"padded_head_counts": (128, 64)}, ValueError, "padded_head_counts: expected ascending counts; got (128, 64)"),
    ],
)
def test_geometry_refuses(changes: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        replace(geometry("deepseek-v4-flash"), **changes)  # type: ignore[arg-type]


def test_rope_and_indexer_refuse() -> None:
    with pytest.raises(ValueError, match=r"^dim: expected an even number of RoPE dims; got 63$"):
        Rope(63)
    with pytest.raises(ValueError, match=r"^style: expected one of interleaved, half_split; got 'neox'$"):
        Rope(64, "neox")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^placement: expected one of first, last; got 'middle'$"):
        Rope(64, "interleaved", "middle")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^rope: expected at most the 32 dims of an indexer head; got 64$"):
        Indexer(heads=4, dim=32, rope=Rope(64))
    with pytest.raises(ValueError, match=r"^top_k: expected at least 1; got 0$"):
        Indexer(top_k=0)


def test_presets_are_frozen_and_hashable() -> None:
    model = geometry("glm-5")
    with pytest.raises(FrozenInstanceError):
        model.heads = 1  # type: ignore[misc]
    with pytest.raises(TypeError):
        PRESETS["glm-5"] = model  # type: ignore[index]
    assert len({hash(preset) for preset in PRESETS.values()}) == 6


def test_module_needs_the_standard_library_only() -> None:
    tree = ast.parse(inspect.getsource(inspect.getmodule(Geometry)))  # type: ignore[arg-type]
    froms = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    plain = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert {name.split(".")[0] for name in froms | plain} <= sys.stdlib_module_names
