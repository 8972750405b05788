"""A V4 / V4.1 layer, from its query latent on."""

from __future__ import annotations

from dataclasses import InitVar, dataclass, field
from typing import Any

import torch
from torch import Tensor

from .. import checks, v4, weights
from .base import Prologue


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class V4Prologue(Prologue):
    """A V4 / V4.1 layer from its query latent on: ``wq_b``, what attention wants done to the query, KV insert.

    Attributes, besides those of :class:`~preattn.layers.base.Prologue`:
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
        checks.rows(self._named("wq_b"), wq_b)
        checks.aligned(self._named("wq_b"), wq_b)
        if wq_b_scale is not None:
            if self.workspace is None or self._fp8:
                what = "a workspace" if self.workspace is None else "a bf16 query"
                got = "None" if self.workspace is None else "an e4m3 one"
                raise ValueError(f"{self._named('wq_b_scale')}: expected {what} with an e4m3 weight; got {got}")
            object.__setattr__(self, "_weight_kind", v4.weight_kind(wq_b, wq_b_scale, name=self._named("wq_b_scale")))
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
        if (q_scale is None) != (self.weight_scale is None):
            expected, got = (
                ("None with a bf16", "a tensor") if q_scale is not None else ("a tensor with an e4m3", "None")
            )
            raise ValueError(f"{self._named('q_scale')}: expected {expected} weight; got {got}")
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
        written = v4.query_kv_insert(
            query,
            **step,
            **change,
            padded_heads=agreed.padded_heads,
            query_scale_inv=self.query_scale_inv,
            out=query if in_place else None if self.workspace is None else self.workspace.whole(tokens),
        )
        return written if self.workspace is None else self.workspace.view(tokens)

    @property
    def _interleaved(self) -> bool:
        return self.agreement.form == "chunk_interleaved"

    def _warmup_options(self) -> dict[str, Any]:
        return {"weight": self._weight_kind} if self.workspace is not None and not self._fp8 else {}
