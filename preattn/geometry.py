"""Models as frozen data: what an attention prologue has to know of a model, whole or as one tensor-parallel shard.

Two conventions hold for every field. **None: not known to us**; the caller fills it in with `dataclasses.replace`.
**Zero, or an empty tuple: the model has none.** A `*_dim` counts scalars, other integers count what they name; bytes
belong to the records (`formats`). The source of a field is the name it has in a model's `config.json`.

>>> geometry("deepseek-v4.1-flash").shard(2).heads
32
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Literal, get_args

__all__ = ["PRESETS", "Family", "Geometry", "Indexer", "Placement", "Records", "Rope", "RopeStyle", "geometry"]

Family = Literal["v4", "dsa"]
"""`v4`: one 512-wide row is key and value, RoPE inside it. `dsa`: an absorbed latent, with RoPE dims beside it."""

RopeStyle = Literal["interleaved", "half_split"]
"""What RoPE pairs: dims (2i, 2i + 1), as GPT-J does, or (i, i + dim / 2), as NeoX does."""

Placement = Literal["first", "last"]
"""Which end of a head RoPE turns."""


def _check_int(argument: str, value: object, *, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{argument}: expected an int; got {value!r}")
    if value < least:
        raise ValueError(f"{argument}: expected at least {least}; got {value}")


def _check_choice(argument: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{argument}: expected one of {', '.join(choices)}; got {value!r}")


@dataclass(frozen=True, slots=True)
class Rope:
    """Which dims of a head turn with the position, and in which pairs."""

    dim: int
    """Dims that turn (`qk_rope_head_dim`); 0: no RoPE."""
    style: RopeStyle = "interleaved"
    placement: Placement = "last"

    def __post_init__(self) -> None:
        _check_int("dim", self.dim, least=0)
        if self.dim % 2:
            raise ValueError(f"dim: expected an even number of RoPE dims; got {self.dim}")
        _check_choice("style", self.style, get_args(RopeStyle))
        _check_choice("placement", self.placement, get_args(Placement))


@dataclass(frozen=True, slots=True, kw_only=True)
class Indexer:
    """The small attention that picks which tokens the main one reads. Tensor parallelism replicates it."""

    heads: int | None = None
    """Query heads (`index_n_heads`)."""
    dim: int | None = None
    """Dims of a query head and of the one key (`index_head_dim`)."""
    top_k: int | None = None
    """Tokens picked for each query (`index_topk`)."""
    rope: Rope | None = None
    """Its RoPE: neither style nor placement follows from the main one."""
    pooled: bool = False
    """Keys stand for pooled tokens."""
    shares_top_k: bool = False
    """Some layers have no indexer and reuse the top-k of an earlier layer."""

    def __post_init__(self) -> None:
        for name in ("heads", "dim", "top_k"):
            if (value := getattr(self, name)) is not None:
                _check_int(name, value, least=1)
        if self.rope and self.dim and self.rope.dim > self.dim:
            raise ValueError(f"rope: expected at most the {self.dim} dims of an indexer head; got {self.rope.dim}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Records:
    """Names of KV records (`formats`) that fit each cache of a layer, the usual one first."""

    window: tuple[str, ...] = ()
    """V4: the last `window` tokens, each as itself."""
    compressed: tuple[str, ...] = ()
    """V4: tokens before the window, several to a record."""
    latent: tuple[str, ...] = ()
    """DSA: the latent and its RoPE key."""
    index: tuple[str, ...] = ()
    """The indexer's keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """One attention layer of a model, as one tensor-parallel rank sees it; `tp=1` is the whole model."""

    name: str
    """The preset's name, also after `shard` and `dataclasses.replace`."""
    family: Family
    """Which of the two prologues the layer has."""
    hidden: int
    """Dims of the residual stream (`hidden_size`)."""
    layers: int | None = None
    """Layers of the model (`num_hidden_layers`)."""
    heads: int
    """Query heads of this rank (`num_attention_heads` / tp)."""
    q_rank: int
    """Dims of the query latent (`q_lora_rank`)."""
    nope_dim: int
    """Dims of a query head that do not turn (`qk_nope_head_dim`)."""
    v_dim: int | None = None
    """Dims of a value head after attention (`v_head_dim`; V4 reads the KV row itself as value)."""
    latent_dim: int = 512
    """Dims of the KV latent (`kv_lora_rank`); on V4 the whole KV row (`head_dim`), RoPE dims included."""
    rope: Rope = Rope(64)
    """RoPE of the query and of the key (`qk_rope_head_dim`)."""
    query_norm: bool = False
    """The prologue normalises each query head: RMSNorm without weight, before RoPE."""
    indexer: Indexer | None = None
    window: int | None = 0
    """Tokens of the sliding window (`sliding_window`)."""
    output_groups: int | None = 0
    """Groups of heads of this rank that share one output projection `wo_a` (`o_groups` / tp)."""
    eps: float = 1e-6
    """Epsilon of the norms (`rms_norm_eps`). Checkpoints differ: what the layer says goes before this."""
    records: Records = Records()
    padded_head_counts: tuple[int, ...] = (64, 128)
    """The head counts that attention is compiled for, ascending."""
    tp: int = 1
    """Tensor-parallel ranks that the heads are divided by."""

    def __post_init__(self) -> None:
        _check_choice("family", self.family, get_args(Family))
        for name in ("hidden", "heads", "q_rank", "nope_dim", "latent_dim", "tp"):
            _check_int(name, getattr(self, name), least=1)
        for name, least in (("layers", 1), ("v_dim", 1), ("window", 0), ("output_groups", 0)):
            if (value := getattr(self, name)) is not None:
                _check_int(name, value, least=least)
        if not self.eps > 0:
            raise ValueError(f"eps: expected more than 0; got {self.eps!r}")
        if self.output_groups and self.heads % self.output_groups:
            raise ValueError(f"output_groups: expected a divisor of the {self.heads} heads; got {self.output_groups}")
        if self.family == "v4" and self.head_dim != self.latent_dim:
            unturned = self.latent_dim - self.rope.dim
            raise ValueError(f"nope_dim: expected {unturned}, what RoPE leaves of a V4 row; got {self.nope_dim}")
        if not self.padded_head_counts or list(self.padded_head_counts) != sorted(set(self.padded_head_counts)):
            raise ValueError(f"padded_head_counts: expected ascending counts; got {self.padded_head_counts!r}")

    @property
    def head_dim(self) -> int:
        """Dims of a query head as its projection (`wq_b`, `q_b_proj`) writes it."""
        return self.nope_dim + self.rope.dim

    @property
    def key_dim(self) -> int:
        """Dims of a key, and of a query head, as attention reads them: 512 on V4, latent + RoPE (576) on DSA."""
        return self.latent_dim if self.family == "v4" else self.latent_dim + self.rope.dim

    @property
    def padded_heads(self) -> int:
        """The smallest head count attention takes that holds this rank's heads."""
        for count in self.padded_head_counts:
            if count >= self.heads:
                return count
        most = self.padded_head_counts[-1]
        raise ValueError(f"heads: expected at most {most}, the largest head count attention takes; got {self.heads}")

    def shard(self, tp: int) -> Geometry:
        """What one of `tp` ranks holds: heads and output groups divided, all else replicated.

        A shard can be divided again: `shard(2).shard(4)` is `shard(8)`.
        """
        _check_int("tp", tp, least=1)
        for count, what in ((self.heads, "heads"), (self.output_groups or 0, "output groups")):
            if count % tp:
                raise ValueError(f"tp: expected a divisor of the {count} {what} of {self.name}; got {tp}")
        groups = self.output_groups and self.output_groups // tp
        return replace(self, heads=self.heads // tp, output_groups=groups, tp=self.tp * tp)


_DSA_RECORDS = Records(latent=("dsa_fp8", "bf16", "fp8", "dsa_nvfp4"), index=("index_fp8",))
_V4_RECORDS = Records(window=("v4_fp8", "bf16", "fp8"), compressed=("v4_fp8", "bf16", "fp8"))
_V41_RECORDS = Records(window=("v41_mxfp8",), compressed=("v41_mxfp8", "v41_nvfp4"))

_dsa = partial(Geometry, family="dsa", records=_DSA_RECORDS)
_v4 = partial(Geometry, family="v4", nope_dim=448, v_dim=512)

_MODELS = (
    _dsa(
        name="deepseek-v3.2",
        hidden=7168,
        layers=61,
        heads=128,
        q_rank=1536,
        nope_dim=128,
        v_dim=128,
        indexer=Indexer(heads=64, dim=128, top_k=2048, rope=Rope(64, "half_split", "first")),
    ),
    _dsa(
        name="glm-5",
        hidden=6144,
        layers=78,
        heads=64,
        q_rank=2048,
        nope_dim=192,
        v_dim=256,
        indexer=Indexer(heads=32, dim=128, top_k=2048, rope=Rope(64, "interleaved", "first"), shares_top_k=True),
        eps=1e-5,
    ),
    _dsa(
        name="glm-5-next",
        hidden=4096,
        layers=45,
        heads=64,
        q_rank=1536,
        nope_dim=256,
        rope=Rope(0),
        indexer=Indexer(heads=32, dim=128, pooled=True),
        eps=1e-5,
        records=Records(latent=("bf16", "fp8"), index=("index_fp8",)),  # rows of 512: the others hold RoPE dims
    ),
    _v4(
        name="deepseek-v4-flash",
        hidden=4096,
        layers=43,
        heads=64,
        q_rank=1024,
        query_norm=True,
        indexer=Indexer(heads=64, dim=128, top_k=512, rope=Rope(64, "interleaved", "last")),
        window=128,
        output_groups=8,
        records=_V4_RECORDS,
    ),
    _v4(
        name="deepseek-v4-pro",
        hidden=7168,
        heads=128,
        q_rank=1536,
        query_norm=True,
        window=128,
        output_groups=16,
        records=_V4_RECORDS,
    ),
    _v4(
        name="deepseek-v4.1-flash",
        hidden=5120,
        heads=64,
        q_rank=1280,
        indexer=Indexer(rope=Rope(64, "interleaved", "last")),
        window=None,
        output_groups=None,
        records=_V41_RECORDS,
    ),
)

PRESETS: Mapping[str, Geometry] = MappingProxyType({model.name: model for model in _MODELS})
"""The models known by name, whole (`tp=1`)."""


def geometry(name: str) -> Geometry:
    """The preset called `name`, in upper or lower case."""
    if not isinstance(name, str):
        raise TypeError(f"name: expected a str; got {name!r}")
    if (preset := PRESETS.get(name.lower())) is None:
        raise ValueError(f"name: expected one of {', '.join(PRESETS)}; got {name!r}")
    return preset
