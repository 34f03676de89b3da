"""Stochastic rounding is right on average: a test to copy into a suite of your own.

Run it with `pytest examples/test_unbiased.py`. It belongs to docs/guides/own-format.md, "A rounding". To test a rounding of yours, put it
into `ROUNDINGS`, or define a fixture `rounded` that gives it; formats and values are found by Hypothesis.

What is tested, for a number between two neighbours `low` and `high` of a format:

- every result is one of the two, and a number of the format stays what it is;
- the mean of many results is as close to the number as Bernstein's inequality lets the mean of independent, unbiased results be. The bound
  is such that all means of a run together are beyond theirs with a probability of no more than `ERROR_PROBABILITY`: a failure is a bias.
"""

import bisect
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

import qsim
from qsim import Fixed, Float
from qsim.formats import Format

ERROR_PROBABILITY = 1e-9
EXAMPLES, COPIES = 60, 20_000

#: Rounds every element to the format, with random bits determined by the seed.
Rounding = Callable[[Tensor, Format, int], Tensor]


def library(x: Tensor, fmt: Format, seed: int) -> Tensor:
    """The rounding of qsim."""
    return qsim.quantize(x, fmt, rounding="stochastic", seed=seed)


def own(x: Tensor, fmt: Format, seed: int) -> Tensor:
    """A rounding made from the neighbours and a coin."""
    low, high = (qsim.quantize(x, fmt, rounding=way).double() for way in ("down", "up"))
    coins = torch.rand(x.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return torch.where(coins * (high - low) < x.double() - low, high, low).to(x.dtype)


ROUNDINGS = [library, own]


@pytest.fixture(params=ROUNDINGS, ids=lambda rounding: rounding.__name__, scope="module")
def rounded(request: pytest.FixtureRequest) -> Rounding:
    """The rounding under test."""
    found: Rounding = request.param
    return found


FORMATS = st.one_of(
    st.builds(Float, st.integers(2, 5), st.integers(0, 4), subnormals=st.booleans()),
    st.integers(2, 8).flatmap(lambda bits: st.builds(Fixed, st.just(bits), st.integers(0, bits))),
)
SEEDS = st.integers(0, 2**63 - 1)


@st.composite
def places(draw: st.DrawFn) -> tuple[Format, float, float, float]:
    """A format, a float32 number in its range, and the number's neighbours: the number itself twice if it is in the format."""
    fmt = draw(FORMATS)
    values = fmt.values()
    i = draw(st.integers(0, len(values) - 2))
    way = draw(st.floats(0, 1))
    number = torch.tensor(values[i] + way * (values[i + 1] - values[i]), dtype=torch.float32).item()
    at = bisect.bisect_left(values, number)
    return fmt, number, values[at] if values[at] == number else values[at - 1], values[at]


def bernstein(variance: float, width: float) -> float:
    """A bound on the error of the mean of the copies: `P(|mean - x| > t) <= 2 exp(-n t² / (2 variance + 2/3 width t))`, solved for `t`."""
    log = math.log(2 * EXAMPLES * len(ROUNDINGS) / ERROR_PROBABILITY)
    return math.sqrt(2 * variance * log / COPIES) + 2 * width * log / (3 * COPIES)


@settings(max_examples=EXAMPLES, deadline=None, database=None)
@given(place=places(), seed=SEEDS)
def test_the_mean_is_the_number(rounded: Rounding, place: tuple[Format, float, float, float], seed: int) -> None:
    """The mean over many copies is the number, within the bound."""
    fmt, x, low, high = place
    results = rounded(torch.full((COPIES,), x), fmt, seed).double()
    assert set(results.unique().tolist()) <= {low, high}
    allowed = bernstein((x - low) * (high - x), high - low)
    # Random bits are finite: 32 of them cannot distinguish probabilities that differ by less than 2**-32.
    allowed += (high - low) * 2.0**-32
    assert abs(results.mean().item() - x) <= allowed, f"{x} in {fmt}: a mean of {results.mean().item()}, {allowed:.1e} are chance"


@settings(max_examples=EXAMPLES, deadline=None, database=None)
@given(place=places(), seed=SEEDS)
def test_a_seed_gives_the_same_again(rounded: Rounding, place: tuple[Format, float, float, float], seed: int) -> None:
    """The same seed gives the same results, whatever other numbers are in the tensor."""
    fmt, x, _, _ = place
    many = torch.full((1000,), x)
    assert torch.equal(rounded(many, fmt, seed), rounded(many.clone(), fmt, seed))
