"""The device functions on their whole domain, or on all of it that rounds."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from preattn import formats
from preattn.kernels import device as functions
from preattn.kernels.launch import OPTIONS
from preattn.reference import numerics


@triton.jit
def _casts(x_pointer, bf16_pointer, e4m3_pointer, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_pointer + at)
    tl.store(bf16_pointer + at, functions.to_bf16(x))
    tl.store(e4m3_pointer + at, functions.to_e4m3(x))


@triton.jit
def _scales(amax_pointer, exponent_pointer, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(exponent_pointer + at, functions.scale_exponent(tl.load(amax_pointer + at)))


@triton.jit
def _fma(a_pointer, b_pointer, c_pointer, out_pointer, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a, b, c = tl.load(a_pointer + at), tl.load(b_pointer + at), tl.load(c_pointer + at)
    tl.store(out_pointer + at, functions.fma(a, b, c))


@triton.jit
def _sums(x_pointer, sum_pointer, inverse_pointer, ROWS: tl.constexpr, LENGTH: tl.constexpr):
    row = tl.arange(0, ROWS)
    x = tl.load(x_pointer + row[:, None] * LENGTH + tl.arange(0, LENGTH)[None, :])
    total = functions.tree_sum(x, ROWS, LENGTH)
    tl.store(sum_pointer + row, total)
    tl.store(inverse_pointer + row, functions.reciprocal_sqrt(tl.abs(total)))


def _every_bf16() -> torch.Tensor:
    return (torch.arange(65536, dtype=torch.int32) << 16).view(torch.float32)


def _neighbours(values: torch.Tensor) -> torch.Tensor:
    """Each value, the floats just below and above it, and their negatives."""
    bits = values.view(torch.int32)
    near = torch.cat([bits - 1, bits, bits + 1]).view(torch.float32)
    return torch.cat([near, -near])


def _hard_floats() -> torch.Tensor:
    """All bf16 values; every tie between bf16 or e4m3 neighbours with the floats beside it; random bits."""
    upper = torch.arange(0x7F7F, dtype=torch.int32) << 16
    bf16_ties = (upper + 0x8000).view(torch.float32)
    codes = formats.from_e4m3(torch.arange(0x7F, dtype=torch.uint8))
    e4m3_ties = torch.cat([(codes[1:] + codes[:-1]) / 2, codes[1:], torch.tensor([448.0, 464.0, 480.0])])
    generator = torch.Generator().manual_seed(0)
    noise = torch.randint(-(2**31), 2**31, (65536,), generator=generator).to(torch.int32).view(torch.float32)
    return torch.cat([_every_bf16(), _neighbours(bf16_ties), _neighbours(e4m3_ties), noise])


def _run(kernel: object, grid: int, *arguments: object, **constants: int) -> None:
    kernel[(grid,)](*arguments, **constants, **OPTIONS)  # type: ignore[index]


def test_casts_round_like_torch(device: str) -> None:
    x = _hard_floats()
    block = 4096
    x = torch.nn.functional.pad(x, (0, -len(x) % block))
    bf16 = torch.zeros(len(x), dtype=torch.bfloat16, device=device)
    e4m3 = torch.zeros(len(x), dtype=torch.uint8, device=device)
    _run(_casts, len(x) // block, x.to(device), bf16, e4m3, BLOCK=block)
    assert torch.equal(bf16.cpu().view(torch.int16), formats.to_bf16(x).view(torch.int16))
    assert torch.equal(e4m3.cpu(), formats.to_e4m3(x))


@triton.jit
def _upcasts(x_pointer, out_pointer, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_pointer + at, functions.upcast(tl.load(x_pointer + at)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_half_upcasts_exactly(device: str, dtype: torch.dtype) -> None:
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    out = torch.zeros(65536, device=device)
    _run(_upcasts, 16, x.to(device), out, BLOCK=4096)
    finite = x.isfinite()
    assert torch.equal(out.cpu()[finite].view(torch.int32), x.float()[finite].view(torch.int32))
    assert torch.equal(out.cpu().isnan(), x.isnan())


def test_scale_exponents_are_exact_around_every_power_of_two(device: str) -> None:
    amax = torch.cat([448.0 * 2.0 ** torch.arange(-22, 119), 2.0 ** torch.arange(-13, 127.0), torch.tensor([1e-4])])
    amax = _neighbours(amax)[: 3 * len(amax)].clamp(min=1e-4)
    padded = torch.nn.functional.pad(amax, (0, -len(amax) % 1024), value=1.0)
    exponent = torch.zeros(len(padded), dtype=torch.int32, device=device)
    _run(_scales, len(padded) // 1024, padded.to(device), exponent, BLOCK=1024)
    quotient = padded.double() / 448
    _, want = torch.frexp(quotient)  # 2**want is the power of two above the quotient, or twice it
    want = torch.where(torch.ldexp(torch.ones_like(quotient), want - 1) == quotient, want - 1, want)
    assert torch.equal(exponent.cpu(), want.int() + 127)
    assert torch.equal(formats.ceil_power_of_two(padded / 448), torch.ldexp(torch.ones_like(padded), want))


def test_fma_rounds_once(device: str) -> None:
    generator = torch.Generator().manual_seed(1)
    a, b = torch.randn(8192, generator=generator), torch.randn(8192, generator=generator)
    c = -(a * b) * (1 + torch.randint(-3, 4, (8192,), generator=generator) * 2.0**-23)  # heavy cancellation
    c[::2] = torch.randn(4096, generator=generator)
    out = torch.zeros(8192, device=device)
    _run(_fma, 8, a.to(device), b.to(device), c.to(device), out, BLOCK=1024)
    assert torch.equal(out.cpu(), numerics.fma(a, b, c))
    assert not torch.equal(out.cpu(), a * b + c)  # two roundings would show


def test_reference_fma_where_float64_rounds_twice() -> None:
    # 17173 * 62525 = 2**30 + 1: the product is 2**-24 + 2**-54, and float64 loses the last bit beside 1,
    # leaving a tie that would round down.
    assert numerics.fma(torch.tensor(17173.0), torch.tensor(62525 * 2.0**-54), torch.tensor(1.0)) == 1 + 2.0**-23
    assert numerics.fma(torch.tensor(-17173.0), torch.tensor(62525 * 2.0**-54), torch.tensor(-1.0)) == -1 - 2.0**-23
    below = numerics.fma(torch.tensor(2.0**-12), torch.tensor(2.0**-12), torch.tensor(1.0))
    assert below == 1.0  # a true tie goes to even
    assert numerics.fma(torch.tensor(-0.0), torch.tensor(1.0), torch.tensor(-0.0)).signbit()
    assert numerics.fma(torch.tensor(torch.inf), torch.tensor(0.0), torch.tensor(1.0)).isnan()


@pytest.mark.parametrize("length", [32, 128, 512, 2048])
def test_sums_are_a_fixed_tree(device: str, length: int) -> None:
    x = torch.randn(8, length, generator=torch.Generator().manual_seed(length)) * 100
    total, inverse = torch.zeros(8, device=device), torch.zeros(8, device=device)
    _run(_sums, 1, x.to(device), total, inverse, ROWS=8, LENGTH=length)
    want = numerics.tree_sum(x)
    assert torch.equal(total.cpu(), want)
    assert torch.equal(inverse.cpu(), numerics.reciprocal_sqrt(want.abs()))
    assert torch.allclose(want.double(), x.double().sum(-1), rtol=0, atol=length * 100 * 2**-22)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="warps exist on a GPU only")
@pytest.mark.parametrize("num_warps", [1, 2, 4, 8])
def test_sums_do_not_depend_on_warps(num_warps: int) -> None:
    x = torch.randn(8, 512, generator=torch.Generator().manual_seed(0)) * 100
    total, inverse = torch.zeros(8, device="cuda"), torch.zeros(8, device="cuda")
    _sums[(1,)](x.cuda(), total, inverse, ROWS=8, LENGTH=512, num_warps=num_warps, **OPTIONS)
    assert torch.equal(total.cpu(), numerics.tree_sum(x))
