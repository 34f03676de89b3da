"""Stochastic rounding: every decision, instead of means of samples.

The random integer R of each element is known from `qsim.random.random_bits`. So each rounding can be compared with the contract: from the
position p between its two neighbours, a value goes to the one of larger magnitude exactly when R + floor(p * 2**r) >= 2**r. Over all R
the probability is floor(p * 2**r) / 2**r, and if p is a multiple of 2**-r the mean of the results is the value itself.
"""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from typing import Literal

import pytest
import torch
from hypothesis import given, strategies as st

import qsim
from qsim import Stochastic
from qsim.formats import E2M1, E4M3, E5M2, E8M0, FP16, Fixed, Float, Format, holds
from qsim.random import Noise, random_bits
from support import inputs, oracle
from support.bounds import check_share, surprise
from support.catalogue import NAMED, VARIETY
from support.covering import dealt
from support.oracle_arrays import Bracket, explain, mismatches, numbers

Correction = bool | Literal["even"]

# Two neighbours: normal values, subnormal ones, zero and the smallest, across a binade, across the end of the subnormals.
INTERVALS = [
    (E4M3, 1.0, 1.125),
    (E4M3, 240.0, 256.0),
    (E4M3, 0.0, 2.0**-9),
    (E4M3, 2.0**-9, 2.0**-8),
    (E4M3, 7 * 2.0**-9, 2.0**-6),
    (E5M2, 3.0, 3.5),
    (E2M1, 4.0, 6.0),
    (E2M1, 0.0, 0.5),
    (Float(3, 0), 2.0, 4.0),
    (Float(4, 3, subnormals=False), 0.0, 2.0**-6),
    (Fixed(8, 4), 1.0, 1.0625),
    (qsim.Int(8), 126.0, 127.0),
    (FP16, 1.0, 1.0009765625),
    (E8M0, 4.0, 8.0),
]


def outcomes(x: float, fmt: Format, bits: int, correction: Correction = False) -> dict[int, float]:
    """The outcome for each R: round many copies of a value and group the results by the R of each copy."""
    count = 64 * 2**bits
    rounded = qsim.quantize(torch.full((count,), x, dtype=torch.float64), fmt, rounding=Stochastic(bits, correction), seed=7)
    used = random_bits(count, bits, seed=7)
    found: dict[int, float] = {}
    for random, result in zip(used.tolist(), rounded.tolist(), strict=True):
        assert found.setdefault(random, result) == result, f"R = {random} gave both {found[random]} and {result}"
    assert len(found) == 2**bits, "some R never came up: take more copies"
    return found


@pytest.mark.sampled(6)
@pytest.mark.parametrize("bits", [1, 2, 3, 6])
@pytest.mark.parametrize("correction", [False, True, "even"])
@pytest.mark.parametrize(("fmt", "low", "high"), INTERVALS)
def test_probability_is_exact(fmt: Format, low: float, high: float, bits: int, correction: Correction) -> None:
    for p in (0, 1 / 64, 1 / 4, 1 / 3, 2 / 5, 1 / 2, 3 / 4, 7 / 8, 127 / 128, 999 / 1000):
        x = low + p * (high - low)
        exact = (Fraction(x) - Fraction(low)) / (Fraction(high) - Fraction(low))
        due = oracle.steps(exact, bits, correction)
        for sign in (1, -1) if fmt.is_signed else (1,):
            results = outcomes(sign * x, fmt, bits, correction)
            assert set(results.values()) <= {sign * low, sign * high}
            ups = {random for random, result in results.items() if result == sign * high}
            assert len(ups) == due, f"P(hi) is {len(ups)}/{2**bits}, must be {due}/{2**bits}"
            assert ups == set(range(2**bits - due, 2**bits)), "the largest R round up"


@pytest.mark.sampled(12)
@pytest.mark.parametrize("bits", [1, 3, 6])
@pytest.mark.parametrize(("fmt", "low", "high"), INTERVALS)
def test_unbiased_where_the_bits_suffice(fmt: Format, low: float, high: float, bits: int) -> None:
    # E[Q(x)] = x, exactly: the mean over all R, in fractions.
    for k in range(2**bits + 1):
        x = low + k * 2.0**-bits * (high - low)
        for sign in (1, -1) if fmt.is_signed else (1,):
            results = outcomes(sign * x, fmt, bits)
            assert sum(map(Fraction, results.values())) / 2**bits == Fraction(sign * x)


@pytest.mark.parametrize("bits", [2, 4])
def test_bias_of_few_bits(bits: int) -> None:
    # Without correction the mean is too small by less than 2**-r of a step; with it, it is off by at most half of that, either way.
    for p in (0.01, 0.1, 0.3, 0.45, 0.77, 0.99):
        x = 1.0 + p * 0.5
        plain = sum(map(Fraction, outcomes(x, E2M1, bits).values())) / 2**bits - Fraction(x)
        corrected = sum(map(Fraction, outcomes(x, E2M1, bits, correction=True).values())) / 2**bits - Fraction(x)
        assert -Fraction(1, 2**bits) / 2 < plain <= 0
        assert abs(corrected) <= Fraction(1, 2 ** (bits + 1)) / 2


@pytest.mark.sampled(24)
@pytest.mark.parametrize("dtype", inputs.DTYPES)
@pytest.mark.parametrize("fmt", [*NAMED, *VARIETY], ids=repr)
def test_every_decision_follows_from_its_bits(fmt: Format, dtype: torch.dtype) -> None:
    x = inputs.edges(fmt, dtype, count=200)
    x = torch.cat([x, x, x])
    target = next(wide for wide in (dtype, torch.float32, torch.float64) if holds(wide, fmt))
    bracket = Bracket(fmt, numbers(x))
    settings = [*itertools.product((False, True, "even"), oracle.OVERFLOWS, (None, 1, 4, 8, 15, 16, 17, 24, 32))]
    # Two dtypes in a row cover every setting.
    for correction, overflow, bits in dealt(settings, [*NAMED, *VARIETY].index(fmt) + inputs.DTYPES.index(dtype), 2):
        how, width = Stochastic(bits, correction), bits or 32
        used = random_bits(x.numel(), width, seed=5, stream=3, offset=11).numpy()
        got = qsim.quantize(x, fmt, rounding=how, overflow=overflow, seed=Noise(5, 3, 11), dtype=target)
        expected = bracket.round("stochastic", overflow, used, width, correction)
        where = mismatches(got, expected)
        assert not len(where), f"{fmt!r}, {how}, {overflow}, {dtype}: R = {used[where[:5]]}, {explain(x, got, expected, where)}"


@given(
    st.floats(allow_nan=False),
    st.sampled_from([*NAMED, *VARIETY]),
    st.integers(1, 32),
    st.sampled_from([False, True, "even"]),
    st.integers(-(2**63), 2**63 - 1),
    st.integers(0, 2**40),
)
def test_any_number_any_seed(x: float, fmt: Format, bits: int, correction: Correction, seed: int, offset: int) -> None:
    (used,) = random_bits(1, bits, seed=seed, offset=offset).tolist()
    got = qsim.quantize(
        torch.tensor(x, dtype=torch.float64), fmt, rounding=Stochastic(bits, correction), seed=Noise(seed, offset=offset)
    ).item()
    expected = oracle.round_exact(x, fmt, "stochastic", "saturate", used, bits, correction)
    assert (got, math.copysign(1, got)) == (expected, math.copysign(1, expected))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("fmt", [E2M1, E4M3], ids=repr)
def test_values_far_below_a_step_go_up_as_often_as_they_should(fmt: Format, dtype: torch.dtype) -> None:
    # 16 random bits would never round any of these up.
    count = 2**20
    bits = random_bits(count, 32, seed=3)
    for exponent in (17, 18, 20):
        x = torch.tensor(fmt.smallest * 2.0**-exponent, dtype=dtype)
        if x == 0:
            continue  # float16 does not hold it
        ups = qsim.quantize(x.expand(count), fmt, rounding="stochastic", seed=3) == fmt.smallest
        assert torch.equal(ups, bits >= 2**32 - 2 ** (32 - exponent))
        check_share(int(ups.sum()), count, 2.0**-exponent)


@pytest.mark.parametrize("count", [2000, 2001])
def test_the_bound_bounds(count: int) -> None:
    # Compared with the exact tail of the binomial distribution, in fractions.
    for successes in (1100, 1150, 1200):
        tail = sum(math.comb(count, k) for k in range(successes, count + 1)) / 2**count
        assert tail <= surprise(successes, count, 0.5) / 2 < tail * 100
