"""DSA absorb: a head's query times its ``W_UK``, as e4m3 in the front of the packed row.

``launch_absorb`` multiplies a head's query by its ``W_UK``, rounds to bf16, scales and casts to e4m3: the bf16
latent never reaches memory. Bytes a (token, head) row: ``2 * nope + 512``.
"""

import triton
import triton.language as tl
from torch import Tensor

from ...policy import LaunchConfig
from ..device import dot, to_bf16, to_e4m3, upcast
from ..launch import Kernel, Launch
from .rows import UNALIGNED, quotient, units

# No scalar selects a variant by its value.
ABSORB_SCALARS = ["tokens", "stride_q", "stride_q_head", "stride_w_head", "stride_w", "stride_out"]


@triton.jit(do_not_specialize=ABSORB_SCALARS, do_not_specialize_on_alignment=UNALIGNED)
def _dsa_absorb_kernel(
    q_nope,
    w_uk,
    query_scale,
    out,
    tokens: "i32",
    stride_q: "i64",
    stride_q_head: "i64",
    stride_w_head: "i64",
    stride_w: "i64",
    stride_out: "i64",
    HEADS: tl.constexpr,
    NOPE: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
):
    """ROWS tokens x 512 latent dims of one head, COLUMNS at a time: the next columns load while these are cast."""
    pid = tl.program_id(0)
    head = (pid % HEADS).to(tl.int64)
    token = pid // HEADS * ROWS + tl.arange(0, ROWS)
    live = (token < tokens)[:, None]
    token = token.to(tl.int64)[:, None]
    depth, column = tl.arange(0, DEPTH), tl.arange(0, COLUMNS)[None, :]
    a = q_nope + head * (stride_q_head * 8) + token * (stride_q * 8) + depth[None, :]
    b = w_uk + head * (stride_w_head * 8) + (depth.to(tl.int64) * (stride_w * 8))[:, None] + column
    target = out.to(tl.pointer_type(tl.uint8)) + head * WIDTH + token * (stride_out * 16) + column
    scale = tl.load(query_scale)
    reciprocal = tl.div_rn(1.0, scale)
    if NOPE == DEPTH:
        query_tile = tl.load(a, mask=live, other=0.0)
    for start in tl.range(0, 512, COLUMNS, num_stages=STAGES):
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        if NOPE == DEPTH:
            total = dot(query_tile, tl.load(b + start), total)
        else:
            for d in tl.static_range(0, NOPE, DEPTH):
                part = tl.load(a + d, mask=live, other=0.0)
                total = dot(part, tl.load(b + start + d * (stride_w * 8)), total)
        code = to_e4m3(quotient(upcast(to_bf16(total)), scale, reciprocal))
        tl.store(target + start, code, mask=live)


absorb = Kernel(_dsa_absorb_kernel)


def launch_absorb(q_nope: Tensor, w_uk: Tensor, query_scale: Tensor, out: Tensor, *, config: LaunchConfig) -> Launch:
    """e4m3 of ``bf16(q_nope @ w_uk) / query_scale`` into the front of ``out``: ``config.rows`` tokens a program."""
    tokens, heads, nope = q_nope.shape
    rows, columns = max(config.rows, 16), max(config.tokens, 16)  # the least a matrix instruction takes
    return Launch(
        absorb,
        -(-tokens // rows) * heads,
        (q_nope, w_uk, query_scale, out),
        (tokens, units(q_nope), units(q_nope, 1), units(w_uk), units(w_uk, 1), units(out)),
        (heads, nope, out.shape[2], rows, columns, 128 if nope % 128 == 0 else 64, 3),
        config.num_warps,
    )
