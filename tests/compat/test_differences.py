"""Differences between the values that `qsim.compat.qtorch` and QPyTorch round to: one test per line of the table."""

from __future__ import annotations

import math

import pytest
import torch

import qsim
from qsim.compat.qtorch import BlockFloatingPoint, FixedPoint, FloatingPoint, Number
from qsim.compat.qtorch.quant import block_quantize, fixed_point_quantize, float_quantize
from support.bounds import check_share


def test_ties_go_to_even() -> None:
    ties = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, -2.5])
    even = [0.0, 2.0, 2.0, 0.0, -2.0, -2.0]
    assert fixed_point_quantize(ties, 8, 0, rounding="nearest").tolist() == even
    assert fixed_point_quantize(ties, 8, 0, clamp=False, rounding="nearest").tolist() == even
    assert block_quantize(torch.cat([ties, torch.tensor([7.0])]), 4, rounding="nearest").tolist() == [*even, 7.0]
    assert float_quantize(1 + ties / 8, 4, 3, rounding="nearest").tolist() == [1.0, 1.25, 1.25, 0.9375, 0.8125, 0.6875]


def test_nan_and_infinities_stay_what_they_are() -> None:
    x = torch.tensor([math.nan, math.inf, -math.inf, 3.3e38, -3.3e38])
    for exp, man in [(4, 3), (5, 2), (8, 7), (8, 23), (1, 1)]:
        largest = FloatingPoint(exp, man).format.max
        for rounding in ("nearest", "stochastic"):
            nan, *others = float_quantize(x, exp, man, rounding).tolist()
            assert math.isnan(nan)
            big = min(largest, torch.tensor(3.3e38).item())
            if man < 23 and exp == 8:
                assert others[:2] == [math.inf, -math.inf]
                assert math.isfinite(others[2])
            else:
                assert others == [math.inf, -math.inf, big, -big]
    assert fixed_point_quantize(x, 8, 4, rounding="nearest").tolist()[1:3] == [7.9375, -8.0]
    assert fixed_point_quantize(x, 8, 4, rounding="nearest").isnan().tolist() == [True, False, False, False, False]
    free = fixed_point_quantize(x, 8, 4, clamp=False, rounding="nearest")
    assert free.isnan().tolist() == [True, False, False, False, False]
    assert torch.equal(free[1:], x[1:])
    rows = block_quantize(torch.tensor([[math.inf, 1.0], [math.nan, 1.0], [3.0, 1.0]]), 8, 0)
    assert rows.isnan().tolist() == [[True, True], [True, True], [False, False]]


def test_subnormals_and_blocks_are_rounded_once() -> None:
    """Numbers just beyond a tie, which an addition in float32 turns into a tie."""
    assert float_quantize(torch.tensor([-0.014526366256177425]), 3, 10, "nearest").item() == -59 * 2.0**-12
    assert float_quantize(torch.tensor([0.07958979159593582]), 2, 10, "nearest").item() == 81 * 2.0**-10
    assert block_quantize(torch.tensor([-140.00086975097656, 4095.0]), 12, rounding="nearest")[0].item() == -140.0
    block = torch.tensor([8.999689102172852, 1000.0])
    assert block_quantize(block, 10, rounding="nearest")[0].item() == 8.0


def test_tiny_numbers_are_rounded_up_sometimes() -> None:
    number, count = FloatingPoint(5, 2), 2**18
    x = torch.full((count,), number.format.smallest / 1024)
    check_share(int((number.round(x) == number.format.smallest).sum()), count, 1 / 1024)


def test_negative_zeros_keep_their_sign() -> None:
    assert float_quantize(torch.tensor([-0.0, -1e-30]), 4, 3, "nearest").signbit().all()


@pytest.mark.parametrize("number", [FixedPoint(8, 4), FixedPoint(8, 4, clamp=False), FixedPoint(8, 4, symmetric=True), FloatingPoint(4, 3)])
def test_values_of_the_format_never_move(number: Number) -> None:
    values = torch.tensor(number.format.values()).repeat(100)
    assert torch.equal(number.round(values, "stochastic"), values)


def test_23_bits_of_mantissa_leave_float32_alone() -> None:
    x = torch.randn(1000) * 2.0 ** torch.arange(-100, 100).repeat(5)
    for rounding in ("nearest", "stochastic"):
        assert torch.equal(float_quantize(x, 8, 23, rounding), x)


def test_the_top_exponent() -> None:
    assert [FloatingPoint(*at).format.max for at in ((4, 3), (5, 2), (5, 10))] == [480.0, 114688.0, 131008.0]
    assert FloatingPoint(8, 7).format == qsim.format("bf16")
    x = torch.randn(10_000)
    assert torch.equal(float_quantize(x, 8, 7, "nearest"), x.bfloat16().float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("number", [FixedPoint(6, 4), FixedPoint(6, 4, clamp=False), BlockFloatingPoint(6), FloatingPoint(4, 3)], ids=repr)
def test_other_dtypes(number: Number, dtype: torch.dtype) -> None:
    x = torch.randn(50, 7).to(dtype).t()
    got = number.round(x, "nearest")
    assert (got.dtype, got.shape) == (dtype, x.shape)
    assert isinstance(number, BlockFloatingPoint) or got.stride() == x.stride()
    assert torch.equal(got.double(), number.round(x.double(), "nearest"))
    assert not torch.equal(got, x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_fixed_point_that_does_not_clamp_is_exact_at_any_size(dtype: torch.dtype) -> None:
    x = (torch.randn(4000) * 2.0 ** torch.arange(-10, 10).repeat(200)).to(dtype)
    got = fixed_point_quantize(x, 4, 3, clamp=False, rounding="nearest")
    assert torch.equal(got.double(), torch.round(x.double() * 8) / 8)
    drawn = fixed_point_quantize(x, 4, 3, clamp=False).double()
    assert torch.equal(drawn * 8, torch.round(drawn * 8))
    assert ((drawn - x.double()).abs() < 0.125).all()
