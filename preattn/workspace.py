"""Query buffers in attention's layout, and projections that write into them: the copy that does not happen.

Padding, interleaving and packing move a query several times over. A matmul can write the final layout by itself: only
its output strides differ. What it does not write, the heads past the rank's own, is zeroed once, when the buffer is
made, and never after.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import checks, debugging, dsa, v4, weights
from .backends import Agreement, QueryForm, negotiate
from .geometry import Geometry
from .policy import Layout


class QueryWorkspace:
    """One query buffer of a layer geometry, shared by the layers of a stream in order.

    A layer's query is overwritten by the next layer's: a caller that keeps several alive makes several workspaces.
    The address is stable, so that captured graphs may use it.

    Attributes:
        agreement: what is written for whom (:func:`preattn.backends.negotiate`).
        heads: the rank's own heads; those past them are +0.0.
        buffer: [max_tokens, padded heads, width]; width is 512, or 512 and the RoPE dims for a packed query.
    """

    def __init__(
        self,
        geometry: Geometry,
        backend: str,
        max_tokens: int,
        *,
        device: torch.device | str = "cuda",
        record: str | None = None,
        debug: bool = False,
    ) -> None:
        """Allocate and zero the buffer.

        Args:
            geometry: the layer, sharded.
            backend: who reads the query.
            max_tokens: the most tokens of a step.
            device: where.
            record: the KV record, where it decides the query's dtype (DSA ``fp8``).
            debug: verify, with a GPU synchronisation a step, that the tail is still zero.

        Raises:
            TypeError: an argument of another type.
            ValueError: model and backend do not fit, the backend takes the pair, ``max_tokens`` is below 1, or there is
                no such device.
        """
        checks.integer("max_tokens", max_tokens, least=1)
        checks.flag("debug", debug)
        device = checks.device("device", device)
        agreement = negotiate(geometry, backend, record=record)
        if agreement.form == "pair":
            raise ValueError(
                f"backend: {geometry.name} with {backend}: expected one that takes a packed query; got {backend}, "
                "which reads the latent and the rotated dims apart: there is nothing to pad or pack"
            )
        width = geometry.latent_dim + (geometry.rope.dim if geometry.family == "dsa" else 0)
        dtype = torch.bfloat16 if agreement.query_dtype == "bf16" else torch.float8_e4m3fn
        self.agreement: Agreement = agreement
        self.heads = geometry.heads
        self.debug = debug
        self._steps = 0
        self.buffer = torch.zeros(max_tokens, agreement.padded_heads, width, dtype=dtype, device=device)

    @property
    def form(self) -> QueryForm:
        """Layout of the buffer."""
        return self.agreement.form

    @property
    def bytes(self) -> int:
        """Bytes the buffer takes."""
        return self.buffer.numel() * self.buffer.element_size()

    def view(self, tokens: int) -> Tensor:
        """What attention reads: [tokens, padded heads, width], contiguous. In debug mode the tail is verified first.

        Raises:
            TypeError: ``tokens`` is no int.
            ValueError: ``tokens`` is negative or more than the workspace has.
            RuntimeError: debug mode, and something wrote into the tail; or the stream is under graph capture.
        """
        buffer = self.whole(tokens)
        if self.debug:
            self._steps += 1
            self.verify(f"step {self._steps}, of {tokens} tokens,")
        return buffer

    def whole(self, tokens: int) -> Tensor:
        """The buffer of a step, to be written: as :meth:`view`, without its verification."""
        checks.integer("tokens", tokens)
        if not 0 <= tokens <= self.buffer.shape[0]:
            raise ValueError(f"tokens: expected 0 to {self.buffer.shape[0]}; got {tokens}")
        return self.buffer[:tokens]

    def live(self, tokens: int) -> Tensor:
        """What a projection writes, as a strided view of the buffer.

        ``chunk_interleaved``: [32, tokens, H * 16]; ``head_major``: [tokens, H * 512]; ``packed``: [tokens, H, 512].

        Raises:
            ValueError: ``tokens`` is negative or more than the workspace has.
        """
        buffer, heads = self.whole(tokens), self.heads
        if self.form == "chunk_interleaved":
            return weights.as_chunks(buffer)[:, :, :heads].permute(1, 0, 2, 3).flatten(2)
        if self.form == "head_major":
            return buffer[:, :heads].flatten(1)
        return buffer[:, :heads, :512]

    def verify(self, step: str) -> None:
        """Check that the tail is still +0.0 (reads the GPU).

        Raises:
            RuntimeError: it is not; the message names the step and the first element. Or the stream is under graph
                capture.
        """
        debugging.refuse_capture()
        tail = weights.padding_heads(self.buffer, self.heads, interleaved=self.form == "chunk_interleaved")
        if (first := debugging.first_written(tail)) is not None:
            raise RuntimeError(
                f"{self.form} query workspace: {step} left a padding head that is not +0.0; first at {first} "
                f"of the tail {tuple(tail.shape)}"
            )


def project_query(
    x: Tensor,
    weight: Tensor,
    workspace: QueryWorkspace,
    *,
    x_scale: Tensor | None = None,
    weight_scale: Tensor | None = None,
) -> Tensor:
    """Project into a workspace: one matmul, and no copy after it.

    Args:
        x: V4 family: the (normed) query latent [T, rank]. DSA: ``q_nope`` [T, H, nope].
        weight: V4 family: ``wq_b`` as :func:`preattn.v4.project_query` takes it for the workspace's form. DSA: ``W_UK``
            [H, nope, 512].
        workspace: where the query goes; its dtype must be bf16 (an e4m3 packed query needs a scale:
            :func:`preattn.dsa.absorb_query`).
        x_scale: V4 family, for e4m3 operands: see there.
        weight_scale: likewise.

    Returns:
        ``workspace.view(T)``.

    Raises:
        TypeError: a dtype that does not fit.
        ValueError: a shape that does not fit, or more tokens than the workspace has.
    """
    checks.instance("workspace", workspace, QueryWorkspace)
    if workspace.buffer.dtype != torch.bfloat16:
        raise TypeError(f"workspace: expected dtype torch.bfloat16; got {workspace.buffer.dtype}")
    if not isinstance(x, Tensor):
        raise TypeError(f"x: expected a torch.Tensor; got {type(x).__name__}")
    dims, most = 3 if workspace.form == "packed" else 2, workspace.buffer.shape[0]
    if x.dim() != dims or x.shape[0] > most:
        raise ValueError(f"x: expected {dims} dims, and at most {most} tokens; got shape {list(x.shape)}")
    tokens = x.shape[0]
    out = workspace.whole(tokens)
    if workspace.form == "packed":
        for name, scale in (("x_scale", x_scale), ("weight_scale", weight_scale)):
            if scale is not None:
                raise ValueError(f"{name}: expected None for a packed query; got a tensor")
        dsa.absorb_query(x, weight, out=out)
    else:
        rows = workspace.heads * v4.HEAD_DIM
        if isinstance(weight, Tensor) and weight.dim() == 2 and weight.shape[0] != rows:
            raise ValueError(f"weight: expected {rows} rows for {workspace.heads} heads; got {weight.shape[0]}")
        layout: Layout = "chunk_interleaved" if workspace.form == "chunk_interleaved" else "head_major"
        v4.project_query(x, weight, out, layout=layout, x_scale=x_scale, weight_scale=weight_scale)
    return workspace.view(tokens)
