"""A DSA layer, on both sides of its ``q_b_proj``."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from .. import checks, dsa, formats, policy
from ..dsa import Latents, Query
from ..dsa.arguments import WEIGHTS
from ..geometry import Geometry
from .base import Prologue

_BF16 = (torch.bfloat16,)


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class IndexerParts:
    """The indexer's side of a DSA layer; heads, pairing and top-k are the geometry's.

    Attributes:
        weight: [128] bf16 or float32, of the key's LayerNorm;
        bias: likewise.
        cache: paged view of ``record``.
        record: ``index_fp8`` or ``index_fp8_ue8m0``.
        rope_table: the indexer's own; the layer's when None.
        eps: of the LayerNorm.
        softmax_scale: factor of the head weights,
        head_scale: and another.
    """

    weight: Tensor
    bias: Tensor
    cache: Tensor
    record: str = "index_fp8"
    rope_table: Tensor | None = None
    eps: float = 1e-6
    softmax_scale: float = 1.0
    head_scale: float = 1.0


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class DsaPrologue(Prologue):
    """A DSA layer (DeepSeek-V3.2, GLM-5.x): :meth:`norm_and_store`, the engine's own ``q_b_proj``, :meth:`prepare`.

    Attributes, besides those of :class:`~preattn.layers.base.Prologue`:
        w_uk: [H, nope, 512] bf16, absorbed into the query.
        q_weight: [rank] bf16 or float32, of the query latent's RMSNorm.
        kv_weight: [512] bf16 or float32, of the KV latent's.
        query_scale: one float32, for an e4m3 query (``fp8`` records, where the backend takes it).
        indexer: None for a layer that has none, or shares an earlier layer's top-k.
    """

    w_uk: Tensor
    q_weight: Tensor
    kv_weight: Tensor
    query_scale: Tensor | None = None
    indexer: IndexerParts | None = None
    _absorbs: bool = field(init=False)

    def __post_init__(self) -> None:
        checks.instance("geometry", self.geometry, Geometry)
        if self.indexer is None:  # said by the layer, so that plans do not count what it does not have
            object.__setattr__(self, "geometry", replace(self.geometry, indexer=None))
        self._settle("dsa", "query_scale")
        object.__setattr__(self, "_absorbs", self._fp8 and policy.device(self._device_name).measured)
        model, device, norms = self.geometry, self.cache.device, WEIGHTS
        checks.tensor(self._named("w_uk"), self.w_uk, _BF16, (model.heads, model.nope_dim, model.latent_dim), device)
        checks.tensor(self._named("q_weight"), self.q_weight, norms, (model.q_rank,), device)
        checks.tensor(self._named("kv_weight"), self.kv_weight, norms, (model.latent_dim,), device)
        if (parts := self.indexer) is None:
            return
        checks.instance(self._named("indexer"), parts, IndexerParts)
        if model.indexer is None or model.indexer.rope is None or model.indexer.rope.placement != "first":
            raise ValueError(f"{self._named('indexer')}: expected None: the model's indexer is not one of DSA's")
        if parts.record not in tuple(dsa.INDEX_RECORDS):
            choices = " or ".join(dsa.INDEX_RECORDS)
            raise ValueError(f"{self._named('indexer.record')}: expected {choices}; got {parts.record!r}")
        formats.check_cache(self._named("indexer.cache"), parts.cache, dsa.INDEX_RECORDS[parts.record])
        for name, tensor in (("indexer.weight", parts.weight), ("indexer.bias", parts.bias)):
            checks.tensor(self._named(name), tensor, norms, (dsa.INDEX_DIM,), device)
        if parts.rope_table is not None:
            checks.table(self._named("indexer.rope_table"), parts.rope_table, device)
        checks.number(self._named("indexer.eps"), parts.eps, least=0)
        checks.number(self._named("indexer.softmax_scale"), parts.softmax_scale)
        checks.number(self._named("indexer.head_scale"), parts.head_scale)

    def norm_and_store(
        self,
        q_latent: Tensor,
        kv_latent: Tensor,
        k_pe: Tensor,
        positions: Tensor,
        slots: Tensor | None,
        index_key: Tensor | None = None,
        top_k: Tensor | None = None,
    ) -> Latents:
        """First half of a step, in one launch: norms, RoPE of the keys, and what the caches store of them.

        Args:
            q_latent: [T, rank] bf16; this and the next two may be columns of one wider row.
            kv_latent: [T, 512] bf16.
            k_pe: [T, 64] or [T, 1, 64] bf16 ([T, 0] without RoPE).
            positions: [T] int32 or int64.
            slots: [S <= T] int32 or int64; None: nothing is stored.
            index_key: [T, 128] bf16 where the layer has an indexer, else None.
            top_k: [T or more, k] int32; its first T rows become -1. Only with an indexer.

        Returns:
            The normed query latent, for ``q_b_proj``; the other two are None.

        Raises:
            TypeError, ValueError, RuntimeError: as :func:`preattn.dsa.norm_rope_insert`; more than ``max_tokens``.
        """
        self._tokens("q_latent", q_latent, self.geometry.q_rank)
        index = self._index("index_key", index_key)
        if (parts := self.indexer) is not None:
            index |= {"index_weight": parts.weight, "index_bias": parts.bias, "index_eps": parts.eps}
            index |= {"index_cache": parts.cache, "index_record": parts.record}
        return dsa.norm_rope_insert(
            q_latent,
            kv_latent,
            k_pe,
            self.cache,
            slots,
            positions,
            self.rope_table,
            record=self.agreement.record,
            q_weight=self.q_weight,
            kv_weight=self.kv_weight,
            q_eps=self.geometry.eps,
            kv_eps=self.geometry.eps,
            kv_scale=self.kv_scale,
            top_k=top_k,
            **index,
        )

    def prepare(
        self, q: Tensor, positions: Tensor, index_query: Tensor | None = None, index_weights: Tensor | None = None
    ) -> Query:
        """Second half: absorb ``W_UK`` into the query's place, rotate what is left into its tail, quantise.

        An e4m3 query is absorbed and cast in one kernel where that was measured faster
        (``policy.ABSORB_KERNEL_TOKENS``), else by ``torch.bmm`` and a pass that casts and packs.

        Args:
            q: [T, H, nope + rope] bf16, what ``q_b_proj`` makes of the normed latent.
            positions: [T] int32 or int64.
            index_query: [T, index heads, 128] bf16 where the layer has an indexer, else None.
            index_weights: [T, index heads] float32 or bf16, likewise.

        Returns:
            Packed [T, P, 576], or the pair; with a workspace a view of it, valid until its next step.

        Raises:
            TypeError, ValueError, RuntimeError: as :func:`preattn.dsa.query`; more than ``max_tokens``.
        """
        model, pair = self.geometry, self.agreement.form == "pair"
        tokens = self._tokens("q", q, model.heads, model.head_dim)
        index = self._index("index_query", index_query)
        if self.indexer is not None:
            index |= {"softmax_scale": self.indexer.softmax_scale, "head_scale": self.indexer.head_scale}
        q_nope, q_pe = q.split([model.nope_dim, model.rope.dim], -1)
        cast = self.query_scale if self._absorbs and tokens >= policy.ABSORB_KERNEL_TOKENS else None
        out = None if self.workspace is None else self.workspace.whole(tokens)
        latent: Tensor | None = None
        if pair or not self._in_place or (self._fp8 and cast is None):
            latent = dsa.absorb_query(q_nope, self.w_uk, query_scale=cast, rope_dim=0)
        else:
            out = dsa.absorb_query(q_nope, self.w_uk, query_scale=cast, rope_dim=model.rope.dim, out=out)
        query = dsa.query(
            q_pe,
            latent,
            positions,
            self.rope_table,
            form="pair" if pair else "packed",
            padded_heads=None if pair else self.agreement.padded_heads,
            query_scale=self.query_scale,
            index_weights=index_weights,
            out=out,
            **index,
        )
        if self.workspace is not None:
            self.workspace.view(tokens)  # in debug mode: verified
        return query

    def _warmup_options(self) -> dict[str, Any]:
        options: dict[str, Any] = {"norm_dtype": self.q_weight.dtype}
        if self.indexer is not None:
            options |= {"index_record": self.indexer.record, "index_block_size": self.indexer.cache.shape[1]}
        return options

    def _index(self, argument: str, given: Tensor | None) -> dict[str, Any]:
        """What both ops are told of the indexer."""
        if (given is None) != (self.indexer is None):
            expected, got = ("a tensor: the layer has an", "None") if given is None else ("None without", "a tensor")
            raise ValueError(f"{self._named(argument)}: expected {expected} indexer; got {got}")
        if self.indexer is None:
            return {}
        assert self.geometry.indexer is not None and self.geometry.indexer.rope is not None
        pairing = self.geometry.indexer.rope.style
        return {argument: given, "index_pairing": pairing, "index_rope_table": self.indexer.rope_table}
