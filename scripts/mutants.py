"""Break the library on purpose, a line at a time, and see that a test notices: ``python scripts/mutants.py``.

Every mutant is a small change of the text of one or two files: a mistake that such kernels have had in public, or could
have. It is made in a copy of the tree in a temporary folder, where a few chosen test files run until the first failure.
A change that the kernels and the reference share is one mutant with two edits: what catches it must come from outside
of both, a recorded byte or an oracle.

The table goes to ``docs/mutants.md``. Exit status: 0 where every mutant was caught, 1 where one survived, 2 where one
could not be judged: its text is not in the file (the code has moved on: mend the mutant), it does not import, or the
tests fail without it.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
COPIED = ("preattn", "tests", "docs", "results", "pyproject.toml", "README.md", "CONTRIBUTING.md")

FORMATS, NUMERICS, CHECKS = "preattn/formats.py", "preattn/reference/numerics.py", "preattn/checks.py"
DEVICE, KV, QUERY = "preattn/kernels/device.py", "preattn/kernels/v4/kv.py", "preattn/kernels/v4/query_kv.py"
DSA_QUERY, NORM, ROWS = (f"preattn/kernels/dsa/{name}.py" for name in ("query", "norm_rope", "rows"))
ABSORB = "preattn/kernels/dsa/absorb.py"
PROJECT, WORKSPACE, DEBUGGING = "preattn/kernels/v4/project.py", "preattn/workspace.py", "preattn/debugging.py"
REFERENCE_V4, REFERENCE_DSA = "preattn/reference/v4.py", "preattn/reference/dsa.py"

BYTES = ("tests/test_formats.py", "tests/test_exhaustive.py")
V4 = (
    "tests/test_cases.py -k v4 and 17 and not project",
    "tests/test_exhaustive.py -k v4",
    "tests/test_v4.py",
    "tests/test_pitfalls.py -k v4 and not project",
)
DSA = (
    "tests/test_cases.py -k dsa and 17",
    "tests/test_exhaustive.py -k dsa or index",
    "tests/test_dsa.py",
    "tests/test_pitfalls.py -k dsa",
)
KV_ROWS = ("tests/test_pitfalls.py -k v4_kv", *V4)
KV_NUMBERS = ("tests/test_exhaustive.py -k v4 and triton", *V4)
COPIES = ("tests/test_cases.py -k v4_pad and 17", "tests/test_pitfalls.py -k v4_pad", *V4)
HEADS = ("tests/test_cases.py -k head_major and 8of64 and 17", *V4)
DSA_ROWS = ("tests/test_pitfalls.py -k top1000", *DSA)
DSA_HEADS = ("tests/test_cases.py -k dsa_query and (5of or 7of) and 17", *DSA)
ABSORBED = ("tests/test_cases.py -k absorb and 17", *DSA)
PROJECTED = ("tests/test_cases.py -k v4_project and 17", "tests/test_properties.py -k project")
GOLDEN = ("tests/test_golden.py",)
DIFFERENCES = ("tests/test_differences.py",)
ROTATIONS = ("tests/test_exhaustive.py -k rotations", *GOLDEN)
FAR = ("tests/test_pitfalls.py -k 32_bits or narrow",)
ERRORS = ("tests/test_errors.py",)


@dataclass(frozen=True)
class Edit:
    """One change of one file; ``old`` occurs there exactly once, or ``times``."""

    file: str
    old: str
    new: str
    times: int = 1


@dataclass(frozen=True)
class Mutant:
    """A mistake: what it is, the change that makes it, and the tests that are asked (pytest arguments, in order)."""

    what: str
    edits: tuple[Edit, ...]
    tests: tuple[str, ...]

    @property
    def files(self) -> str:
        """The files it changes."""
        return ", ".join(dict.fromkeys(edit.file for edit in self.edits))


def mutant(what: str, tests: Sequence[str], *edits: tuple[str, str, str] | tuple[str, str, str, int]) -> Mutant:
    """A mutant from tuples."""
    return Mutant(what, tuple(Edit(*edit) for edit in edits), tuple(tests))


_BOUNDS = "stored = in_range & (slot >= 0) & (slot < capacity)"
_SLOT = "slot = tl.load(slots + token, mask=in_range, other=-1).to(tl.int64)"
_PAGE = "cache.to(tl.pointer_type(tl.uint8)) + block * (stride_block * 16)"
_NARROW_PAGE = "cache.to(tl.pointer_type(tl.uint8)) + (block * (stride_block * 16)).to(tl.int32)"

MUTANTS: tuple[Mutant, ...] = (
    # addressing
    mutant(
        "V4 pages lie block_size * record apart, whatever the stride",
        KV_ROWS,
        (KV, "cache.stride()[0] * cache.element_size() // 16", "cache[:1].numel() * cache.element_size() // 16"),
    ),
    mutant(
        "DSA pages lie block_size * record apart, whatever the stride",
        DSA_ROWS,
        (
            NORM,
            "            units(cache),\n",
            "            0 if cache is None else cache[:1].numel() * cache.element_size() // 16,\n",
        ),
    ),
    mutant(
        "indexer pages lie block_size * record apart, whatever the stride",
        DSA_ROWS,
        (
            NORM,
            "            units(index_cache),\n",
            "            0 if index_cache is None else index_cache[:1].numel() // 16,\n",
        ),
    ),
    mutant(
        "a cache view forgets its block stride",
        BYTES,
        (FORMATS, "page if block_stride is None else block_stride", "page"),
    ),
    mutant(
        "rows 2 GiB apart go to a library that does not reach them",
        FAR,
        (CHECKS, "return not any(apart)", "return True"),
    ),
    mutant(
        "a NaN that a bf16 record only copies keeps its payload",
        ("tests/test_static.py -k sm_90",),
        (KV, "quiet(to_bf16(x))", "to_bf16(x)"),
    ),
    mutant("V4: no upper bound on slots", KV_ROWS, (KV, _BOUNDS, "stored = in_range & (slot >= 0)")),
    mutant("DSA: no upper bound on slots", DSA_ROWS, (NORM, _BOUNDS, "stored = in_range & (slot >= 0)")),
    mutant("V4: no lower bound on slots", KV_ROWS, (KV, _BOUNDS, "stored = in_range & (slot < capacity)")),
    mutant(
        "DSA: negative slots below -1 are stored",
        DSA_ROWS,
        (NORM, _BOUNDS, "stored = in_range & (slot != -1) & (slot < capacity)"),
    ),
    mutant("V4: slots are narrowed before they are checked", KV_ROWS, (KV, _SLOT, _SLOT.replace("int64", "int32"))),
    mutant("DSA: slots are narrowed before they are checked", DSA_ROWS, (NORM, _SLOT, _SLOT.replace("int64", "int32"))),
    mutant(
        "DSA: the last page counts as outside",
        DSA_ROWS,
        (NORM, "cache.shape[0] * cache.shape[1]", "(cache.shape[0] - 1) * cache.shape[1]"),
    ),
    mutant("V4: page offsets in 32 bits", FAR, (KV, _PAGE, _NARROW_PAGE)),
    mutant("DSA: page offsets in 32 bits", FAR, (NORM, _PAGE, _NARROW_PAGE)),
    mutant(
        "V4: offsets of KV rows in 32 bits",
        FAR,
        (KV, "(token.to(tl.int64) * (stride_kv * 8))[:, None]", "(token * (stride_kv * 8)).to(tl.int32)[:, None]"),
    ),
    mutant(
        "interleaved: offsets of query rows in 32 bits",
        FAR,
        (
            QUERY,
            "(token * (stride_query * 8) + chunk * LIVE)[:, None]",
            "(token * (stride_query * 8) + chunk * LIVE).to(tl.int32)[:, None]",
        ),
    ),
    mutant(
        "interleaved: offsets of output rows in 32 bits",
        FAR,
        (
            QUERY,
            "(token * (stride_out * 8) + chunk * WIDTH)[:, None]",
            "(token * (stride_out * 8) + chunk * WIDTH).to(tl.int32)[:, None]",
        ),
    ),
    mutant(
        "DSA query: offsets of rotated rows in 32 bits",
        FAR,
        (
            DSA_QUERY,
            "source = q_pe + (token * (stride_pe * 8) + head * (stride_pe_head * 8))[:, None]",
            "source = q_pe + (token * (stride_pe * 8) + head * (stride_pe_head * 8)).to(tl.int32)[:, None]",
        ),
    ),
    mutant("a stride that is compiled as 32 bits", FAR, (NORM, 'stride_block: "i64"', 'stride_block: "i32"')),
    mutant(
        "segregated: scales follow each token's codes",
        BYTES,
        (
            FORMATS,
            "tail = block_size * self.body_bytes + offset[..., None]",
            "tail = self.body_bytes + offset[..., None]",
        ),
    ),
    # rows
    mutant(
        "V4: rows past the slots are stored too",
        KV_ROWS,
        (KV, "in_range = token < stored_tokens", "in_range = token < stored_tokens + 1"),
    ),
    mutant(
        "DSA: keys are returned for stored rows alone",
        DSA_ROWS,
        (NORM, "in_range = token < (tokens if RETURN else stored_tokens)", "in_range = token < stored_tokens"),
    ),
    mutant("DSA: the top-k buffer is not reset", DSA_ROWS, (NORM, "    if TOP_K > 0:\n", "    if TOP_K > 4096:\n")),
    mutant(
        "DSA: the whole top-k buffer is reset, kernel and reference",
        DSA_ROWS,
        (NORM, "mask=valid & (index < TOP_K))", "mask=(row >= 0) & (index < TOP_K))"),
        (REFERENCE_DSA, "top_k[:tokens] = -1", "top_k[:] = -1"),
    ),
    mutant(
        "interleaved: the mask of the last tile is dropped",
        COPIES,
        (QUERY, "mask=valid & (col < LIVE), other=0.0)", "mask=col < LIVE, other=0.0)"),
        (
            QUERY,
            "tl.store(target + col, value, mask=valid & (col < WIDTH))",
            "tl.store(target + col, value, mask=col < WIDTH)",
        ),
    ),
    mutant(
        "an indexer row takes the weight of the row before",
        DSA_HEADS,
        (
            DSA_QUERY,
            "index_weights + token * stride_weights + head",
            "index_weights + token * stride_weights + head * 0",
        ),
    ),
    # padding
    mutant(
        "interleaved: the padding tail is not written",
        COPIES,
        (QUERY, "mask=valid & (col < WIDTH))", "mask=valid & (col < LIVE))"),
    ),
    mutant(
        "head-major: dead heads are not written",
        HEADS,
        (
            QUERY,
            "        tl.store(target + dim, zero, mask=written)\n",
            "        tl.store(target + dim, zero, mask=copied)\n",
        ),
    ),
    mutant(
        "DSA query: padding heads get the rotation of zero, which may be -0.0",
        DSA_HEADS,
        (ROWS, "return tl.where(live, value, 0) if PADS else value", "return value"),
    ),
    mutant(
        "head-major in place: the heads past H are written",
        ("tests/test_v4.py -k in_place", *HEADS),
        (QUERY, "VISITED: tl.constexpr = HEADS if IN_PLACE else PADDED", "VISITED: tl.constexpr = PADDED"),
        (QUERY, "heads if in_place else padded)", "padded)"),
    ),
    mutant(
        "v4_fp8: the byte past the last scale is not zero",
        KV_NUMBERS,
        (KV, "tl.where(index < head_blocks, byte, 0)", "byte"),
    ),
    # RoPE
    mutant(
        "main RoPE fused in the indexer's order, kernel and reference",
        ROTATIONS,
        (DEVICE, "fma(even, sin, odd * cos)", "fma(odd, cos, even * sin)"),
        (NUMERICS, "fma(even, sin, odd * cos)", "fma(odd, cos, even * sin)"),
    ),
    mutant(
        "indexer RoPE fused in the main order, kernel and reference",
        ROTATIONS,
        (DEVICE, "fma(b, cos, a * sin)", "fma(a, sin, b * cos)"),
        (NUMERICS, "fma(b, cos, a * sin)", "fma(a, sin, b * cos)"),
    ),
    mutant(
        "main RoPE without fma",
        KV_NUMBERS,
        (DEVICE, "return fma(even, cos, negate(odd * sin)), ", "return even * cos - odd * sin, "),
    ),
    mutant(
        "sines and cosines swapped, kernel and reference",
        GOLDEN,
        (
            KV,
            "    sin = upcast(tl.load(at + 32, mask=stored, other=0.0))\n",
            "    sin = cos\n    cos = upcast(tl.load(at + 32, mask=stored, other=0.0))\n",
        ),
        (NUMERICS, "return rows[..., :half], rows[..., half:]", "return rows[..., half:], rows[..., :half]"),
    ),
    mutant(
        "the indexer's pairing follows a hard-coded one",
        DSA_HEADS,
        (DSA_QUERY, 'index_pairing == "interleaved"', 'index_pairing != ""'),
    ),
    mutant(
        "rotated in the first 64 dims, not the last",
        (*KV_NUMBERS, *GOLDEN),
        (
            REFERENCE_V4,
            "numerics.rope(x[:, -ROPE_DIMS:], cos, sin)], -1)",
            "numerics.rope(x[:, :ROPE_DIMS], cos, sin)], -1)",
        ),
    ),
    mutant("a negation that loses the sign of zero", KV_NUMBERS, (DEVICE, "return x * -1.0", "return 0.0 - x")),
    # numbers
    mutant(
        "dsa_fp8 takes V4's floor, kernel and reference",
        (*BYTES, *GOLDEN),
        (FORMATS, 'Scale("float32", 128, 512, quotient_floor=1e-4)', 'Scale("float32", 128, 512, amax_floor=1e-4)'),
        (NORM, "exponent = tl.maximum(scale_exponent(amax), 114)", "exponent = scale_exponent(amax)"),
    ),
    mutant(
        "index_fp8 takes the latent's floor",
        BYTES,
        (FORMATS, 'Scale("float32", 128, 128, amax_floor=1e-4)', 'Scale("float32", 128, 128, quotient_floor=1e-4)'),
    ),
    mutant(
        "V4: a floor of 1e-5",
        KV_NUMBERS,
        (KV, "tl.maximum(tl.max(finite_abs(x), axis=2), 1e-4)", "tl.maximum(tl.max(finite_abs(x), axis=2), 1e-5)"),
    ),
    mutant(
        "a scale one too large at 448 * 2**k",
        KV_NUMBERS,
        (DEVICE, "tl.int32, bitcast=True) + 0x1FFFFF) >> 23", "tl.int32, bitcast=True) + 0x200000) >> 23"),
    ),
    mutant(
        "ceil(log2) from a float32 logarithm, kernel and reference",
        BYTES,
        (
            FORMATS,
            "return torch.ldexp(torch.ones_like(x), exponent - (mantissa == 0.5).int())",
            "return torch.exp2(torch.ceil(torch.log2(x)))",
        ),
        (
            DEVICE,
            "return ((amax.to(tl.int32, bitcast=True) + 0x1FFFFF) >> 23) - 8",
            "return tl.ceil(tl.log2(amax / 448.0)).to(tl.int32) + 127",
        ),
    ),
    mutant(
        "quantised with the raw scale, stored the rounded one",
        BYTES,
        (
            FORMATS,
            "x = (blocks / scale[..., None]).flatten(-2)",
            "x = (blocks / (blocks.abs().amax(-1, True) / part.largest).clamp(min=1e-9)).flatten(-2)",
        ),
    ),
    mutant(
        "e4m3 saturates at the 240 of its other dialect, reference",
        BYTES,
        (
            FORMATS,
            "x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)",
            "x.clamp(-240.0, 240.0).to(torch.float8_e4m3fn)",
        ),
    ),
    mutant(
        "no clamp before e4m3, kernel",
        ("tests/test_device.py", *V4),
        (
            DEVICE,
            "tl.where(x == x, x, 0.0), -448.0), 448.0)\n        magnitude",
            "tl.where(x == x, x, 0.0), -4480.0), 4480.0)\n        magnitude",
        ),
    ),
    mutant(
        "an infinity saturates instead of being stored as NaN",
        BYTES,
        (FORMATS, "torch.where(x.isfinite(), codes, E4M3_NAN)", "codes"),
    ),
    mutant(
        "a NaN decides the scale of its block",
        KV_NUMBERS,
        (KV, "tl.max(finite_abs(x), axis=2)", "tl.max(tl.abs(x), axis=2)"),
    ),
    mutant("e2m1 ties go to odd", BYTES, (FORMATS, "(below % 2 == 1)", "(below % 2 == 0)")),
    mutant(
        "e2m1 nibbles the other way round",
        BYTES,
        (FORMATS, "return code[..., 0::2] | code[..., 1::2] << 4", "return code[..., 1::2] | code[..., 0::2] << 4"),
    ),
    mutant(
        "dsa_nvfp4 scales in their natural order",
        BYTES,
        (FORMATS, "tuple(8 * (s & 3) + (s >> 2) for s in range(32))", "tuple(range(32))"),
    ),
    mutant("nvfp4 without its floor", BYTES, (FORMATS, "_NVFP4_FLOOR = 2.0**-9", "_NVFP4_FLOOR = 2.0**-10")),
    mutant(
        "a power of two off by one in its UE8M0 byte",
        BYTES,
        (FORMATS, "(exponent + 126).clamp(0, 255)", "(exponent + 127).clamp(0, 255)"),
    ),
    mutant("the UE8M0 byte once, not four times", DSA_ROWS, (NORM, "exponent * 0x01010101", "exponent")),
    mutant(
        "V4 KV is not rounded to bf16 before it is quantised, kernel and reference",
        GOLDEN,
        (REFERENCE_V4, "rows = formats.to_bf16(rows) if kv_scale is None else", "rows = rows if kv_scale is None else"),
        (KV, "_block_codes(upcast(to_bf16(tail))", "_block_codes(tail"),
    ),
    mutant(
        "V4 divides by the scale instead of multiplying with its reciprocal",
        KV_NUMBERS,
        (REFERENCE_V4, "rows * (1.0 / kv_scale.reshape(()))", "rows / kv_scale.reshape(())"),
    ),
    mutant(
        "V4: the scale inverted",
        KV_NUMBERS,
        (KV, "scale_inv = tl.div_rn(1.0, upcast(tl.load(kv_scale)))", "scale_inv = upcast(tl.load(kv_scale))"),
    ),
    mutant(
        "DSA multiplies with a reciprocal instead of dividing",
        DSA_HEADS,
        (ROWS, "return tl.div_rn(poison(x), scale)", "return x * reciprocal"),
    ),
    mutant(
        "an engine's code may be beside ours wherever the quotient lies",
        DIFFERENCES,
        (
            "preattn/differences.py",
            " & ((quotient - boundary).abs() <= DIVISION_ERROR * boundary.abs())",
            "",
        ),
    ),
    mutant(
        "neighbours are counted in codes, whose order the sign turns round",
        DIFFERENCES,
        ("preattn/differences.py", "torch.where(code < 0, -(code & sign), code)", "code & (2 * sign + 1)"),
    ),
    mutant(
        "the index weight's factors in another order, kernel and reference",
        GOLDEN,
        (
            DSA_QUERY,
            "weight * power_of_two(exponent) * softmax_scale * head_scale",
            "weight * power_of_two(exponent) * (softmax_scale * head_scale)",
        ),
        (
            REFERENCE_DSA,
            "index_weights.float() * scale * softmax_scale * head_scale",
            "index_weights.float() * scale * (softmax_scale * head_scale)",
        ),
    ),
    mutant(
        "absorb: the product is not rounded to bf16",
        ABSORBED,
        (ABSORB, "quotient(upcast(to_bf16(total)), scale, reciprocal)", "quotient(total, scale, reciprocal)"),
    ),
    # norms
    mutant(
        "the head norm forgets its epsilon",
        ("tests/test_properties.py -k query_kv", *V4),
        (
            QUERY,
            "512.0) + norm_eps)[:, None]\n                x = x * inverse",
            "512.0))[:, None]\n                x = x * inverse",
        ),
    ),
    mutant(
        "the indexer's LayerNorm ignores its bias",
        DSA_ROWS,
        (NORM, "return x * upcast(tl.load(weight)) + upcast(tl.load(bias))", "return x * upcast(tl.load(weight))"),
    ),
    mutant(
        "sums in another order than the tree's",
        DSA_ROWS,
        (NUMERICS, "x = x[..., 0::2] + x[..., 1::2]", "x = x[..., : x.shape[-1] // 2] + x[..., x.shape[-1] // 2 :]"),
    ),
    mutant(
        "a reciprocal root rounded once, not twice",
        DSA_ROWS,
        (NUMERICS, "return 1.0 / x.double().sqrt().float()", "return (1.0 / x.double().sqrt()).float()"),
    ),
    mutant("a mean over the padded width", DSA_ROWS, (NORM, "RANK * 1.0", "WIDTH * 1.0")),
    # projections
    mutant(
        "projection: the rotated dims are stored unrotated too",
        PROJECTED,
        (
            PROJECT,
            "stored = stored & (column < tl.where(last, start + COLUMNS - 64, start + COLUMNS))[None, :]",
            "stored = stored & (column >= 0)[None, :]",
        ),
    ),
    mutant(
        "projection: a tile's block scale is that of another row",
        PROJECTED,
        (
            PROJECT,
            "start // SCALE_ROWS * (RANK // SCALE_DEPTH) + depth // SCALE_DEPTH",
            "start // SCALE_ROWS + depth // SCALE_DEPTH",
        ),
    ),
    mutant(
        "projection: a row's MX scale is that of another row",
        PROJECTED,
        (
            PROJECT,
            "column // SCALE_ROWS * (RANK // SCALE_DEPTH) + depth // SCALE_DEPTH",
            "column // SCALE_ROWS + depth // SCALE_DEPTH",
        ),
    ),
    mutant(
        "projection: a token's scales change with the weight's blocks",
        PROJECTED,
        (PROJECT, "depth // 128 * stride_x_group", "depth // SCALE_DEPTH * stride_x_group"),
    ),
    mutant(
        "projection: columns are scattered as if no head were padding",
        PROJECTED,
        (PROJECT, "column % 512 // 16 * WIDTH +", "column % 512 // 16 * LIVE +"),
    ),
    mutant(
        "projection: the tail is not rotated",
        PROJECTED,
        (PROJECT, "even, odd = rotate(even, odd, cos, sin)", "even, odd = even, odd"),
    ),
    mutant(
        "projection: the first head's tail alone is rotated",
        PROJECTED,
        (PROJECT, "last = start % 512 == 512 - COLUMNS", "last = start == 512 - COLUMNS"),
    ),
    mutant(
        "projection: KV batches are skipped",
        PROJECTED,
        (
            PROJECT,
            "tl.range(pid, tl.cdiv(stored_tokens, KV_TOKENS), kv_programs)",
            "tl.range(pid, tl.cdiv(stored_tokens, KV_TOKENS), kv_programs + 1)",
        ),
    ),
    mutant(
        "projection: a row past the last is stored",
        PROJECTED,
        (PROJECT, "in_range = token < tokens\n", "in_range = token < tokens + 1\n"),
    ),
    mutant(
        "a query workspace that does not start as zeros",
        ("tests/test_workspace.py",),
        (WORKSPACE, "self.buffer = torch.zeros(", "self.buffer = torch.ones("),
    ),
    mutant(
        "a query workspace that verifies some of its padding heads alone",
        ("tests/test_workspace.py",),
        (
            WORKSPACE,
            "weights.padding_heads(self.buffer, self.heads,",
            "weights.padding_heads(self.buffer, self.heads + 20,",
        ),
    ),
    mutant(
        "debug mode does not notice slots past the cache",
        ("tests/test_debug.py",),
        (DEBUGGING, "(slots < -1) | (slots >= capacity)", "slots < -1"),
    ),
    mutant(
        "debug mode looks after the call, not before",
        ("tests/test_debug.py",),
        (
            "preattn/dispatch.py",
            "            debugging.before(arguments, written)\n            function(*args)\n",
            "            function(*args)\n            debugging.before(arguments, written)\n",
        ),
    ),
    # contract
    mutant(
        "a mutation that the schema does not declare",
        ("tests/test_v4.py -k opcheck", *V4),
        (
            "preattn/v4/query_kv.py",
            "v4_pad_query(Tensor query, Tensor(a!) out,",
            "v4_pad_query(Tensor query, Tensor out,",
        ),
    ),
    mutant(
        "overlapping memory is not noticed",
        ERRORS,
        (
            CHECKS,
            "if (other_start - start < _extent(value)) if start <= other_start else "
            "(start - other_start < _extent(other)):",
            "if start == other_start:",
        ),
    ),
    mutant(
        "strides that no kernel can take pass",
        ERRORS,
        (CHECKS, "(strides[dim] % unit or strides[dim] < 0) and sizes[dim] > 1", "strides[dim] < 0 and sizes[dim] > 1"),
    ),
    mutant(
        "a pointer off the 16-byte grid passes",
        ERRORS,
        (CHECKS, "if value.data_ptr() % 16:", "if value.data_ptr() % 2:"),
    ),
    mutant(
        "more slots than rows pass",
        ERRORS,
        (CHECKS, "if value.shape[0] > tokens:", "if value.shape[0] > 2 * tokens + 9:"),
    ),
    mutant(
        "tensors of another device pass",
        ERRORS,
        (
            CHECKS,
            "if device is not None and value.device != device:",
            "if device is not None and value.device.type == device:",
        ),
    ),
    mutant(
        "a NaN epsilon passes",
        ERRORS,
        (CHECKS, 'finite = abs(value) < float("inf")', 'finite = abs(value) != float("inf")'),
    ),
    mutant(
        "pages that overlap pass",
        ERRORS,
        (FORMATS, "cache.shape[0] > 1 and cache.stride(0) < cache.shape[1] * cache.shape[2]", "cache.stride(0) < 0"),
    ),
)


# -- running -------------------------------------------------------------------------------------------------------


def copy_tree(folder: Path) -> None:
    """The files that tests need, without caches."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__", "gpu"))
        elif source.is_file():
            shutil.copy(source, folder / name)


def apply(folder: Path, edits: Sequence[Edit]) -> str | None:
    """Make the edits; what is wrong where a text does not match."""
    for edit in edits:
        path = folder / edit.file
        text = path.read_text() if path.is_file() else ""
        if (found := text.count(edit.old)) != edit.times:
            return f"{edit.file} has {found} times, not {edit.times}: {edit.old.strip()!r}"
        path.write_text(text.replace(edit.old, edit.new))
    return None


@dataclass(frozen=True)
class Verdict:
    """``caught``: the test that failed. ``error``: why there is no verdict. Neither: it survived."""

    caught: str | None = None
    error: str | None = None


def judge(folder: Path, tests: Sequence[str], limit_s: int) -> Verdict:
    """Run tests in a copy of the tree until one fails."""
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    for test in tests:
        file, _, selected = test.partition(" -k ")
        command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", "-p", "no:cacheprovider", file]
        command += ["-k", selected] if selected else []
        try:
            result = subprocess.run(
                command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=limit_s
            )
        except subprocess.TimeoutExpired:
            return Verdict(caught=f"{file} (no end after {limit_s} s)")
        if result.returncode == 0:
            continue
        if result.returncode < 0:  # a wild access may end the process: Python says in which test
            died = re.search(r'/(tests/\S+)", line \d+ in (test_\w+)', result.stderr)
            where = f"{died[1]}::{died[2]}" if died else file
            return Verdict(caught=f"{where} (signal {-result.returncode})")
        found = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", result.stdout, re.M)
        if result.returncode == 1 and found:
            return Verdict(caught=found[1])
        return Verdict(error=(result.stdout + result.stderr)[-500:])
    return Verdict()


def run(mutant: Mutant, limit_s: int) -> Verdict:
    """Copy, change, test."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as name:
        folder = Path(name)
        copy_tree(folder)
        if wrong := apply(folder, mutant.edits):
            return Verdict(error=wrong)
        return judge(folder, mutant.tests, limit_s)


def table(verdicts: Sequence[tuple[Mutant, Verdict]], commit: str) -> str:
    """The Markdown page."""
    lines = [
        "# Mutants",
        "",
        "Each line is a mistake made on purpose by [`scripts/mutants.py`](../scripts/mutants.py), and the first test "
        "that failed because of it.",
        "",
        f"{sum(verdict.caught is not None for _, verdict in verdicts)} of {len(verdicts)} caught, in one run at commit "
        f"{commit}.",
        "",
        "| mutant | file | caught by |",
        "|---|---|---|",
    ]
    for mutant, verdict in verdicts:
        files = mutant.files.replace("preattn/", "")
        test = (verdict.caught or "**no test**").removeprefix("tests/").partition("[")[0]
        lines.append(f"| {mutant.what} | `{files.replace(', ', '`, `')}` | `{test}` |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(description="Break the library on purpose and see that a test notices.")
    parser.add_argument("--only", metavar="WORDS", help="mutants with these words in their description")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "mutants.md", help="the table (not with --only)")
    parser.add_argument("--limit", type=int, default=600, metavar="SECONDS", help="of one test file")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time")
    parser.add_argument("--no-baseline", action="store_true", help="do not run the tests without a mutant first")
    options = parser.parse_args()
    chosen = [mutant for mutant in MUTANTS if options.only is None or options.only in mutant.what]
    names = [mutant.what for mutant in MUTANTS]
    assert len(names) == len(set(names)), "descriptions are unique"
    if not options.no_baseline:
        every = tuple(dict.fromkeys(test for mutant in chosen for test in mutant.tests))
        verdict = run(Mutant("none", (), every), options.limit)
        if verdict.caught or verdict.error:
            print(f"without a mutant: {verdict.caught or verdict.error}", file=sys.stderr)
            return 2

    def tried(mutant: Mutant) -> Verdict:
        start = time.monotonic()
        verdict = run(mutant, options.limit)
        said = f"caught by {verdict.caught}" if verdict.caught else f"ERROR {verdict.error}"
        said = said if verdict.caught or verdict.error else "SURVIVED"
        print(f"{time.monotonic() - start:5.0f} s  {mutant.what}: {said}", flush=True)
        return verdict

    with ThreadPoolExecutor(options.jobs) as pool:
        verdicts = list(zip(chosen, pool.map(tried, chosen), strict=True))
    if options.only is None:
        git = ("git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD")
        commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip() or "unknown"
        options.out.write_text(table(verdicts, commit))
    if any(verdict.error for _, verdict in verdicts):
        return 2
    return int(any(verdict.caught is None for _, verdict in verdicts))


if __name__ == "__main__":
    sys.exit(main())
