"""One object per layer prologue, built once: all that a step needs besides its own tensors, and the way it runs.

Model, backend, record, cache and workspace are settled when a layer is built, and what does not fit is refused there.
A step then projects into what attention reads, and touches what has to change:

- With a workspace the projection writes its padded, interleaved or packed place; nothing is copied. Layers of a stream
  share one, in order: a query is read before the next layer's step.
- Without one the projection is a plain matmul, and one launch moves its result into a new padded tensor. Where
  attention takes the rank's heads as they are, there is nothing to move either. The bits are the same.

Epsilons are the geometry's: ``dataclasses.replace`` it where a checkpoint says otherwise.
"""

from __future__ import annotations

from dataclasses import InitVar, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from . import checks, dsa, formats, policy, v4, weights
from .backends import Agreement, negotiate
from .dsa import Latents, Query
from .dsa.arguments import WEIGHTS
from .geometry import Family, Geometry
from .policy import Layout, Plan, WeightKind
from .warmup import warmup
from .workspace import QueryWorkspace

_BF16 = (torch.bfloat16,)


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class _Prologue:
    """What the prologues of both families are built from.

    Attributes:
        geometry: the layer, sharded.
        backend: who reads the query (:mod:`preattn.backends`).
        cache: paged view of the record (V4: of the window), as :func:`preattn.formats.cache_view` makes it.
        rope_table: [max_position, 64] float32 or bf16: 32 cosines, 32 sines; None for a model without RoPE.
        max_tokens: the most tokens of a step.
        workspace: where queries go, made for the same geometry and backend; None: a new tensor each step.
        record: of ``cache``; when None the first that model and backend share.
        kv_scale: one float32, for an ``fp8`` record.
        agreement: what the backend is handed, settled at construction.

    Raises:
        TypeError, ValueError: something does not fit; the message names model and backend.
    """

    geometry: Geometry
    backend: str
    cache: Tensor
    rope_table: Tensor | None
    max_tokens: int
    workspace: QueryWorkspace | None = None
    record: str | None = None
    kv_scale: Tensor | None = None
    agreement: Agreement = field(init=False)

    def warmup(
        self, *, index_dtype: torch.dtype = torch.int64, index_weights_dtype: torch.dtype = torch.float32
    ) -> int:
        """Compile what a step launches; see :func:`preattn.warmup.warmup`.

        Args:
            index_dtype: of slots and positions.
            index_weights_dtype: DSA: of the indexer's head weights. Its LayerNorm is taken to be float32.

        Returns:
            How many variants were compiled.
        """
        form = self.agreement.form
        layout: Layout | None = form if form == "head_major" or form == "chunk_interleaved" else None
        return warmup(
            self.geometry,
            self.agreement.record,
            block_size=self.cache.shape[1],
            layout=layout,
            padded_heads=self.agreement.padded_heads,
            index_dtype=index_dtype,
            table_dtype=None if self.rope_table is None else self.rope_table.dtype,
            index_weights_dtype=index_weights_dtype,
            device=self.cache.device,
            **self._warmup_options(),
        )

    def _warmup_options(self) -> dict[str, Any]:
        return {}

    def explain(self, tokens: int, *, device_name: str | None = None, captured: bool = False) -> Plan:
        """What a step of so many tokens runs besides its matmuls, why, and the bytes it moves.

        Args:
            tokens: of the step.
            device_name: as ``torch.cuda.get_device_name`` says it; the layer's own device when None.
            captured: the step runs inside a CUDA graph.
        """
        device_name = device_name or self._device_name
        plan = policy.choose(
            self.geometry,
            tokens=tokens,
            backend=self.backend,
            record=self.agreement.record,
            device_name=device_name,
            captured=captured,
            workspace=self.workspace is not None,
            weight=self._weight_kind,
        )
        return plan if self.workspace is None else replace(plan, workspace_bytes=self.workspace.bytes)

    @property
    def _weight_kind(self) -> WeightKind:
        return "bf16"

    @property
    def _device_name(self) -> str:
        return torch.cuda.get_device_name(self.cache.device) if self.cache.is_cuda else "cpu"

    @property
    def _fp8(self) -> bool:
        return self.agreement.query_dtype == "e4m3"

    @property
    def _in_place(self) -> bool:
        """Whether a projection of the query's dtype can land where attention reads it."""
        return self.workspace is not None or self.agreement.padded_heads == self.geometry.heads

    def _named(self, argument: str) -> str:
        return f"{argument}: {self.geometry.name} with {self.backend}"

    def _settle(self, family: Family, query_scale: str) -> None:
        """Negotiate, and check what the families share."""
        model, device = self.geometry, self.cache.device
        if model.family != family:
            raise ValueError(f"{self._named('geometry')}: expected a {family} model; got a {model.family} model")
        agreed = negotiate(model, self.backend, record=self.record)
        object.__setattr__(self, "agreement", agreed)
        formats.check_cache(self._named("cache"), self.cache, formats.record(agreed.record, model.key_dim))
        if self.rope_table is not None or model.rope.dim:
            checks.tensor(self._named("rope_table"), self.rope_table, checks.TABLE_DTYPES, (None, 64), device)
        for name, needed, what in (
            ("kv_scale", agreed.record == "fp8", f"{agreed.record} records"),
            (query_scale, self._fp8, f"{agreed.query_dtype} queries"),
        ):
            scale: Tensor | None = getattr(self, name)
            if (scale is not None) != needed:
                expected, got = ("a scale", "None") if needed else ("None", "a tensor")
                raise ValueError(f"{self._named(name)}: expected {expected} for {what}; got {got}")
            if scale is not None:
                checks.scale(self._named(name), scale, device)
        if self.max_tokens < 1:
            raise ValueError(f"{self._named('max_tokens')}: expected at least 1; got {self.max_tokens}")
        if self.workspace is not None:
            theirs, buffer = self.workspace.agreement, self.workspace.buffer
            want = f"{agreed.form} {agreed.query_dtype}, {model.heads} of {agreed.padded_heads} heads, on {device}"
            have = f"{theirs.form} {theirs.query_dtype}, {self.workspace.heads} of {theirs.padded_heads} heads, "
            if want != have + f"on {buffer.device}":
                raise ValueError(f"{self._named('workspace')}: expected {want}; got {have}on {buffer.device}")
            if len(buffer) < self.max_tokens:
                expected = f"at least {self.max_tokens} tokens"
                raise ValueError(f"{self._named('workspace')}: expected {expected}; got {len(buffer)}")

    def _tokens(self, argument: str, x: Tensor, *dims: int, dtype: torch.dtype = torch.bfloat16) -> int:
        """Check the first tensor of a step, and count."""
        checks.tensor(self._named(argument), x, (dtype,), (None, *dims), self.cache.device)
        if x.shape[0] > self.max_tokens:
            raise ValueError(f"{self._named(argument)}: expected at most {self.max_tokens} tokens; got {x.shape[0]}")
        return x.shape[0]


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class V4Prologue(_Prologue):
    """A V4 / V4.1 layer from its query latent on: ``wq_b``, what attention wants done to the query, KV insert.

    Attributes, besides those of ``_Prologue``:
        wq_b: [H * 512, rank], the rank's heads in standard order: bf16, or e4m3 with ``wq_b_scale``; not kept. e4m3
            needs a workspace.
        wq_b_scale: [H * 4, rank / 128] float32, one for 128 x 128; or [H * 512, rank / 32] UE8M0, one for 32 of a row.
        weight: ``wq_b`` as the query form needs it: permuted, once, where it is bf16 and that is chunk-interleaved.
        weight_scale: ``wq_b_scale``.
        query_scale_inv: one float32, for an e4m3 query (``fp8`` records).
    """

    wq_b: InitVar[Tensor]
    wq_b_scale: InitVar[Tensor | None] = None
    weight: Tensor = field(init=False)
    weight_scale: Tensor | None = field(init=False)
    query_scale_inv: Tensor | None = None

    def __post_init__(self, wq_b: Tensor, wq_b_scale: Tensor | None) -> None:
        self._settle("v4", "query_scale_inv")
        shape = (self.geometry.heads * weights.HEAD_DIM, self.geometry.q_rank)
        dtype = torch.bfloat16 if wq_b_scale is None else torch.float8_e4m3fn
        checks.tensor(self._named("wq_b"), wq_b, (dtype,), shape, self.cache.device)
        if wq_b_scale is not None:
            if self.workspace is None or self._fp8:
                what = "a workspace" if self.workspace is None else "a bf16 query"
                got = "None" if self.workspace is None else "an e4m3 one"
                raise ValueError(f"{self._named('wq_b_scale')}: expected {what} with an e4m3 weight; got {got}")
            v4.weight_kind(wq_b, wq_b_scale, name=self._named("wq_b_scale"))
        permute = self._interleaved and wq_b_scale is None
        object.__setattr__(self, "weight", weights.interleave_query_rows(wq_b) if permute else wq_b)
        object.__setattr__(self, "weight_scale", wq_b_scale)

    def prepare(
        self, q_latent: Tensor, kv: Tensor, positions: Tensor, slots: Tensor, q_scale: Tensor | None = None
    ) -> Tensor:
        """Run a step: store the KV rows, and return the query.

        Args:
            q_latent: [T, rank], normed: bf16, or with an e4m3 weight e4m3.
            kv: [T, 512] bf16, normed, not rotated.
            positions: [T] int32 or int64.
            slots: [S <= T] int32 or int64; see :func:`preattn.v4.query_kv_insert`.
            q_scale: float32 [T] or [T, rank / 128], for an e4m3 latent: see :func:`preattn.v4.project_query`.

        Returns:
            [T, P, 512] in the backend's layout, bf16 or e4m3; with a workspace a view of it, valid until its next step.

        Raises:
            TypeError, ValueError, RuntimeError: as :func:`preattn.v4.query_kv_insert`; more than ``max_tokens``.
        """
        model, agreed = self.geometry, self.agreement
        tokens = self._tokens("q_latent", q_latent, model.q_rank, dtype=self.weight.dtype)
        assert self.rope_table is not None
        step: dict[str, Any] = {
            "kv": kv,
            "cache": self.cache,
            "slots": slots,
            "positions": positions,
            "rope_table": self.rope_table,
            "record": agreed.record,
            "kv_scale": self.kv_scale,
        }
        change: dict[str, Any] = {
            "query_rope": agreed.rotates,
            "query_norm_eps": model.eps if agreed.norms else None,
            "layout": "chunk_interleaved" if self._interleaved else "head_major",
        }
        if self.workspace is not None and not self._fp8:
            scales: dict[str, Any] = {"x_scale": q_scale, "weight_scale": self.weight_scale}
            out = self.workspace.whole(tokens)
            v4.project_query_kv_insert(q_latent, self.weight, **step, **change, **scales, out=out)
            return self.workspace.view(tokens)
        query: Tensor = torch.mm(q_latent, self.weight.t()).unflatten(1, (model.heads, weights.HEAD_DIM))
        in_place = self.workspace is None and self._in_place and not self._fp8
        if in_place and self._interleaved:  # already as attention reads it, which norms and rotates it itself
            v4.kv_insert(**step)
            return query
        return v4.query_kv_insert(
            query,
            **step,
            **change,
            padded_heads=agreed.padded_heads,
            query_scale_inv=self.query_scale_inv,
            out=query if in_place else None if self.workspace is None else self.workspace.view(tokens),
        )

    @property
    def _interleaved(self) -> bool:
        return self.agreement.form == "chunk_interleaved"

    def _warmup_options(self) -> dict[str, Any]:
        return {"weight": self._weight_kind} if self.workspace is not None and not self._fp8 else {}

    @property
    def _weight_kind(self) -> WeightKind:
        if self.weight_scale is None:
            return "bf16"
        return "e4m3" if self.weight_scale.dtype == torch.float32 else "mx"


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
class DsaPrologue(_Prologue):
    """A DSA layer (DeepSeek-V3.2, GLM-5.x): :meth:`norm_and_store`, the engine's own ``q_b_proj``, :meth:`prepare`.

    Attributes, besides those of ``_Prologue``:
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
        if model.indexer is None or model.indexer.rope is None or model.indexer.rope.placement != "first":
            raise ValueError(f"{self._named('indexer')}: expected None: the model's indexer is not one of DSA's")
        if parts.record not in dsa.INDEX_RECORDS:
            choices = " or ".join(dsa.INDEX_RECORDS)
            raise ValueError(f"{self._named('indexer.record')}: expected {choices}; got {parts.record!r}")
        formats.check_cache(self._named("indexer.cache"), parts.cache, dsa.INDEX_RECORDS[parts.record])
        for name, tensor in (("indexer.weight", parts.weight), ("indexer.bias", parts.bias)):
            checks.tensor(self._named(name), tensor, norms, (dsa.INDEX_DIM,), device)

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
        out = None if self.workspace is None else self.workspace.view(tokens)
        latent: Tensor | None = None
        if pair or not self._in_place or (self._fp8 and cast is None):
            latent = dsa.absorb_query(q_nope, self.w_uk, query_scale=cast, rope_dim=0)
        else:
            out = dsa.absorb_query(q_nope, self.w_uk, query_scale=cast, rope_dim=model.rope.dim, out=out)
        return dsa.query(
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
