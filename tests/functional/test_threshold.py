"""Definition 1 of *Training with Fewer Bits*, compared with fractions."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, strategies as st

import qsim
from qsim.random import random_bits
from support.inputs import BITS, DTYPES, nans, specials


def definition(x: float, step: float, threshold: float) -> float:
    """Definition 1, literally."""
    if step == 0:
        return x
    part = Fraction(x) / Fraction(step)
    lower = math.floor(part)
    return float((lower if part - lower < Fraction(threshold) else lower + 1) * Fraction(step))


@given(
    st.integers(-(2**12), 2**12),
    st.integers(-6, 6),
    st.integers(0, 64),
    st.sampled_from(DTYPES),
)
def test_definition(units: int, exponent: int, sixtyfourths: int, dtype: torch.dtype) -> None:
    # Steps of a power of two, so that the quotient is exact in every dtype.
    x = torch.tensor(units / 16, dtype=dtype)
    step, threshold = 2.0**exponent, sixtyfourths / 64
    expected = torch.tensor(definition(x.item(), step, threshold), dtype=torch.float64).to(dtype)
    for given_step in (step, torch.tensor(step), torch.tensor(step, dtype=torch.float64)):
        for given_threshold in (threshold, torch.tensor(threshold)):
            got = qsim.functional.threshold_quantize(x, given_step, given_threshold)
            assert (got.dtype, got.shape) == (dtype, x.shape)
            assert got == expected


@pytest.mark.parametrize("dtype", DTYPES)
def test_quotient_is_not_rounded_to_a_narrow_dtype(dtype: torch.dtype) -> None:
    # 100 / 1.5 is 66.67, which bfloat16 rounds to 66.5: a remainder below the threshold instead of above it.
    assert qsim.functional.threshold_quantize(torch.tensor(100.0, dtype=dtype), 1.5, 0.6).item() == 100.5


def test_one_half_is_nearest_with_ties_up() -> None:
    x = torch.arange(-64, 65) / 16
    assert torch.equal(qsim.functional.threshold_quantize(x, 0.25, 0.5), qsim.quantize(x, qsim.Fixed(8, 2), rounding="nearest_up"))


def test_random_threshold_is_stochastic_rounding() -> None:
    # A value goes up if its remainder reaches 1 - R / 2**r: exactly if R + floor(p * 2**r) reaches 2**r.
    x = torch.full((4096,), 1 + 5 / 16)
    used = random_bits(x.numel(), 4, seed=3)
    got = qsim.functional.threshold_quantize(x, 1.0, 1 - used / 16)
    assert torch.equal(got, qsim.quantize(x, qsim.Int(8), rounding=qsim.Stochastic(4), seed=3))
    assert set(got.tolist()) == {1.0, 2.0}


def test_a_step_for_every_element() -> None:
    x = torch.tensor([[1.3, 1.3, 1.3], [-2.6, -2.6, math.nan]])
    got = qsim.functional.threshold_quantize(x, torch.tensor([0.0, 1.0, 0.5]), torch.tensor([[0.5], [0.75]]))
    assert got[0].tolist() == [x[0, 0].item(), 1.0, 1.5]
    assert got[1, :2].tolist() == [x[1, 0].item(), -3.0]
    assert got[1, 2].isnan()


@pytest.mark.parametrize("step", [0, 0.0, 1e-60, torch.tensor(0.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_step_zero_is_the_identity(step: float | torch.Tensor, dtype: torch.dtype) -> None:
    # So is a step that is zero in the dtype of the quotient: the result must not be 0 / 0.
    x = specials(dtype)
    x = x[~x.isnan()]
    got = qsim.functional.threshold_quantize(x, step, 0.5)
    assert torch.equal(got.view(BITS[dtype]), x.view(BITS[dtype]))
    assert got.data_ptr() != x.data_ptr()
    assert qsim.functional.threshold_quantize(nans(dtype), step, 0.5).isnan().all()


@pytest.mark.parametrize(
    ("dtype", "value", "step"), [(torch.float32, 3e38, 1e-3), (torch.bfloat16, 3e38, 0.5), (torch.float64, 1e308, 1e-9)]
)
def test_far_beyond_the_precision_nothing_moves(dtype: torch.dtype, value: float, step: float) -> None:
    # The quotient can be infinite if x is not; every such x is a multiple of the step within its dtype's precision.
    x = torch.tensor([value, -value, math.inf, -math.inf], dtype=dtype)
    for threshold in (0.0, 0.5, 1.0):
        assert torch.equal(qsim.functional.threshold_quantize(x, step, threshold), x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradient_passes_straight_through(dtype: torch.dtype) -> None:
    x = torch.tensor([1.3, -2.6, 3e4, 0.0, math.inf, -math.inf, math.nan], dtype=dtype, requires_grad=True)
    upstream = torch.arange(7, dtype=dtype)
    got = qsim.functional.threshold_quantize(x, 0.5, 0.5)
    assert got[:2].tolist() == [1.5, -2.5]
    assert got[4:6].tolist() == [math.inf, -math.inf]
    assert got[6].isnan()
    (gradient,) = torch.autograd.grad(got, x, upstream)
    assert torch.equal(gradient, upstream)
