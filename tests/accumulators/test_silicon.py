"""Emulated matrix units compared with the chip's own, bit for bit: at least ten million results for each unit."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import qsim

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.usefixtures("hopper")]

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
DEVICE = torch.device("cuda")
LENGTHS = (16, 64, 256, 1024, 8192)
SPREADS = (0.0, 2.0, 4.0, 8.0)
#: Rows and columns: 20 products have more than ten million results.
ROWS, COLUMNS = 1024, 768

Multiply = Callable[[Tensor, Tensor], Tensor]


def fp8(fast: bool) -> Multiply:
    """The chip's product of FP8 matrices."""

    def multiply(a: Tensor, b: Tensor) -> Tensor:
        one = torch.ones((), device=a.device)
        return torch._scaled_mm(a, b.mT.contiguous().mT, one, one, out_dtype=torch.float32, use_fast_accum=fast)

    return multiply


def plain(a: Tensor, b: Tensor) -> Tensor:
    """The chip's product of 16-bit matrices, in float32."""
    return torch.mm(a, b, out_dtype=torch.float32)


def tf32(a: Tensor, b: Tensor) -> Tensor:
    """The chip's product of float32 matrices as TF32."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        return a @ b
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def values(shape: tuple[int, int], dtype: torch.dtype, spread: float, scale: float = 1.0) -> Tensor:
    """Normally distributed values whose exponents are spread by some binades."""
    x = torch.randn(shape, device=DEVICE) * torch.exp2(torch.randn(shape, device=DEVICE) * spread) * scale
    return x.clamp(-448, 448).to(dtype) if dtype.itemsize == 1 else x.to(dtype)


def differing(accumulator: str, multiply: Multiply, a: Tensor, b: Tensor, formats: str | None = None) -> int:
    """The number of results that differ; all NaN are alike."""
    found, wanted = qsim.matmul(a, b, accumulator, formats=formats, chip="never"), multiply(a, b)
    unlike = (found.view(torch.int32) != wanted.view(torch.int32)) & ~(found.isnan() & wanted.isnan())
    return int(unlike.sum())


@pytest.mark.parametrize(("accumulator", "fast"), [("h100_fp8", True), ("h100_fp8_promoted", False)])
@pytest.mark.parametrize(("of_a", "of_b"), [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)])
def test_fp8(accumulator: str, fast: bool, of_a: torch.dtype, of_b: torch.dtype) -> None:
    for length in LENGTHS:
        for spread in SPREADS:
            a, b = values((ROWS, length), of_a, spread), values((length, COLUMNS), of_b, spread)
            assert differing(accumulator, fp8(fast), a, b) == 0, (length, spread)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits(dtype: torch.dtype) -> None:
    accumulator = "h100_bf16" if dtype == torch.bfloat16 else "h100_fp16"
    for length in LENGTHS:
        for spread in SPREADS:
            a, b = values((ROWS, length), dtype, spread), values((length, COLUMNS), dtype, spread)
            assert differing(accumulator, plain, a, b) == 0, (length, spread)


@pytest.mark.parametrize("scale", [2.0**-9, 2.0**-14])
def test_fp8_subnormal_operands(scale: float) -> None:
    for of_a, of_b in ((E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)):
        a, b = values((ROWS, 256), of_a, 1.0, scale), values((256, COLUMNS), of_b, 1.0, scale)
        assert differing("h100_fp8", fp8(True), a, b) == 0
        assert differing("h100_fp8_promoted", fp8(False), a, b) == 0


def test_fp16_subnormal_operands_and_overflow() -> None:
    for scale in (2.0**-20, 2.0**-24, 2.0**12):
        a, b = values((ROWS, 256), torch.float16, 2.0, scale), values((256, COLUMNS), torch.float16, 2.0, scale)
        assert differing("h100_fp16", plain, a, b) == 0, scale


#: Scales of both operands, for subnormal operands, subnormal sums, sums that are truncated to zero, and overflow.
EXTREMES = ((2.0**-130, 2.0**40), (2.0**-70, 2.0**-64), (2.0**-100, 2.0**-48), (2.0**-75, 2.0**-75), (2.0**70, 2.0**55))


@pytest.mark.parametrize("length", [8, 16, 64, 256])
def test_bf16_at_the_ends_of_float32(length: int) -> None:
    for scale_a, scale_b in EXTREMES:
        a = values((ROWS, length), torch.bfloat16, 2.0, scale_a)
        b = values((length, COLUMNS), torch.bfloat16, 2.0, scale_b)
        assert differing("h100_bf16", plain, a, b) == 0, (scale_a, scale_b)


def half_zeros(shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Values of which half are zeros, the others spread over 120 powers of two, or over as many as the dtype has."""
    facts, to = torch.finfo(dtype), torch.float32
    low, high = max(-60.0, math.log2(facts.smallest_normal)), min(60.0, math.floor(math.log2(facts.max)) - 1.0)
    x = (1 + torch.rand(shape, device=DEVICE)) * torch.exp2(torch.empty(shape, device=DEVICE, dtype=to).uniform_(low, high).floor())
    signs = torch.randint(0, 2, shape, device=DEVICE) * 2 - 1
    x = (x * signs).to(dtype)
    return torch.where(torch.rand(shape, device=DEVICE) < 0.5, torch.zeros((), device=DEVICE, dtype=to), x.to(to)).to(dtype)


@pytest.mark.parametrize("unit", ["bf16", "fp16", "tf32", "fp8"])
def test_zeros_beside_huge_operands(unit: str) -> None:
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "tf32": torch.float32, "fp8": E4M3}[unit]
    multiply, formats = {"fp8": fp8(True), "tf32": tf32}.get(unit, plain), "tf32" if unit == "tf32" else None
    compared = 0
    for length in LENGTHS:
        a, b = half_zeros((ROWS, length), dtype), half_zeros((length, COLUMNS), dtype)
        if unit == "tf32":
            a, b = qsim.quantize(a, "tf32"), qsim.quantize(b, "tf32")
        assert differing(f"h100_{unit}", multiply, a, b, formats) == 0, length
        compared += ROWS * COLUMNS
    assert compared > 3_000_000


@pytest.mark.parametrize("unit", ["bf16", "tf32"])
def test_one_zero_beside_one_huge_operand(unit: str) -> None:
    # MMA-Sim aligns 1 * 2**-25 with the exponent that 0 * 2**127 seems to have, and gives 0.
    dtype, multiply, formats = (torch.bfloat16, plain, None) if unit == "bf16" else (torch.float32, tf32, "tf32")
    a, b = torch.zeros(16, 16, device=DEVICE, dtype=dtype), torch.zeros(16, 16, device=DEVICE, dtype=dtype)
    a[:, 1], b[0], b[1] = 1.0, 2.0**127, 2.0**-25
    assert (multiply(a, b).float() == 2.0**-25).all()
    assert differing(f"h100_{unit}", multiply, a, b, formats) == 0


def with_specials(x: Tensor) -> Tensor:
    """Infinities and NaN among numbers, in the same dtype."""
    chance, wide = torch.rand(x.shape, device=DEVICE), x.to(torch.float32)
    wide[chance < 0.002], wide[chance > 0.998], wide[(chance > 0.5) & (chance < 0.501)] = torch.inf, -torch.inf, torch.nan
    return wide.to(x.dtype)


@pytest.mark.parametrize("dtype", [E5M2, torch.bfloat16, torch.float16])
def test_infinities_and_nan(dtype: torch.dtype) -> None:
    a, b = values((ROWS, 128), dtype, 2.0), values((128, COLUMNS), E4M3 if dtype == E5M2 else dtype, 2.0)
    accumulator, multiply = ("h100_fp8", fp8(True)) if dtype == E5M2 else ("h100_fp16" if dtype == torch.float16 else "h100_bf16", plain)
    assert differing(accumulator, multiply, with_specials(a), b) == 0


@pytest.mark.parametrize(("rows", "length", "columns"), [(4096, 768, 3072), (4096, 3072, 768), (768, 16384, 768), (4096, 1024, 4096)])
def test_shapes_of_layers_are_one_chain(rows: int, length: int, columns: int) -> None:
    a, b = values((rows, length), E4M3, 1.0), values((length, columns), E4M3, 1.0)
    assert differing("h100_fp8", fp8(True), a, b) == 0
    assert differing("h100_fp8_promoted", fp8(False), a, b) == 0


def in_tf32(shape: tuple[int, int], spread: float, scale: float = 1.0) -> Tensor:
    """Values that TF32 holds."""
    return qsim.quantize(values(shape, torch.float32, spread, scale), "tf32")


@pytest.mark.parametrize("length", [4, 8, 16, 24, 32, 256, 2048, 8192])
def test_tf32(length: int) -> None:
    for spread in SPREADS:
        assert differing("h100_tf32", tf32, in_tf32((2048, length), spread), in_tf32((length, 2048), spread), "tf32") == 0, spread


@pytest.mark.parametrize("length", [32, 256])
def test_tf32_at_the_ends_of_float32(length: int) -> None:
    for scale_a, scale_b in EXTREMES:
        a, b = in_tf32((2048, length), 2.0, scale_a), in_tf32((length, 2048), 2.0, scale_b)
        assert differing("h100_tf32", tf32, a, b, "tf32") == 0, (scale_a, scale_b)


def test_tf32_infinities_and_nan() -> None:
    a, b = with_specials(in_tf32((2048, 128), 2.0)), in_tf32((128, 2048), 2.0)
    assert differing("h100_tf32", tf32, a, b, "tf32") == 0
