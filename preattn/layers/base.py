"""What a layer object of either family is built from, and the checks of it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from .. import checks, formats, policy
from ..backends import Agreement, negotiate
from ..geometry import Family, Geometry
from ..policy import Layout, Plan, WeightKind
from ..warmup import warmup
from ..workspace import QueryWorkspace


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Prologue:
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
    _weight_kind: WeightKind = field(init=False, default="bf16")

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
        checks.instance("geometry", self.geometry, Geometry)
        checks.instance(self._named("cache"), self.cache, Tensor)
        model, device = self.geometry, self.cache.device
        if model.family != family:
            raise ValueError(f"{self._named('geometry')}: expected a {family} model; got a {model.family} model")
        agreed = negotiate(model, self.backend, record=self.record)
        object.__setattr__(self, "agreement", agreed)
        formats.check_cache(self._named("cache"), self.cache, formats.record(agreed.record, model.key_dim))
        if self.rope_table is not None or model.rope.dim:
            checks.table(self._named("rope_table"), self.rope_table, device)
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
        checks.integer(self._named("max_tokens"), self.max_tokens, least=1)
        if self.workspace is not None:
            checks.instance(self._named("workspace"), self.workspace, QueryWorkspace)
            theirs, buffer = self.workspace.agreement, self.workspace.buffer
            dims = model.latent_dim + (model.rope.dim if model.family == "dsa" else 0)
            of = f"{model.heads} of {agreed.padded_heads} heads of {dims} dims"
            want = f"{agreed.form} {agreed.query_dtype}, {of}, on {device}"
            of = f"{self.workspace.heads} of {theirs.padded_heads} heads of {buffer.shape[2]} dims"
            have = f"{theirs.form} {theirs.query_dtype}, {of}, "
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
