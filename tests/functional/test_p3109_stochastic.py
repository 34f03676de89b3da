"""The three stochastic roundings of P3109, from the inequalities of draft 4.0 in fractions: all bfloat16 numbers, on every backend.

With `nu` the position between the neighbours and `R` an integer of `N` random bits, a number goes to the neighbour of larger magnitude if

    StochasticA: floor(nu * 2**N) + R >= 2**N
    StochasticB: floor(nu * 2**(N + 1)) + 2 * R + 1 >= 2**(N + 1)
    StochasticC: nu * 2**N, rounded to nearest with ties to even, + R >= 2**N
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

import qsim
from qsim import Stochastic
from qsim.formats import E4M3, Format, Table
from qsim.silicon import Circuit
from qsim_kernels import numba as compiled, torch as reference
from qsim_kernels.numbers.grid import Grid, GridRounding, Rule, read
from support import emitted, oracle
from support.bounds import check_share
from support.comparing import same_bits

NUMBERS = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
BITS = (1, 3, 8, 31, 32)


def is_away_in_a(nu: Fraction, R: int, N: int) -> bool:  # noqa: N803 (the draft's letters)
    return math.floor(nu * 2**N) + R >= 2**N


def is_away_in_b(nu: Fraction, R: int, N: int) -> bool:  # noqa: N803
    return math.floor(nu * 2 ** (N + 1)) + 2 * R + 1 >= 2 ** (N + 1)


def is_away_in_c(nu: Fraction, R: int, N: int) -> bool:  # noqa: N803
    return round(nu * 2**N) + R >= 2**N


MODES: dict[str, tuple[Callable[[Fraction, int, int], bool], bool | str]] = {
    "A": (is_away_in_a, False),
    "B": (is_away_in_b, True),
    "C": (is_away_in_c, "even"),
}


@cache
def positions() -> list[tuple[int, Fraction]]:
    """The code below each number's magnitude, and the position behind it; those of infinities and NaN are far beyond the largest."""
    far = Fraction(2) ** 128
    values = [abs(Fraction(x)) if math.isfinite(x) else far for x in NUMBERS[: 1 << 15].tolist()]
    lows = [oracle.neighbours(E4M3, value)[0] for value in values]
    ends = [(oracle.magnitude(E4M3, low), oracle.magnitude(E4M3, low + 1)) for low in lows]
    return [(low, (value - start) / (end - start)) for low, value, (start, end) in zip(lows, values, ends, strict=True)]


def due(mode: str, random: Tensor, count: int) -> Tensor:
    """The values that all numbers go to, saturated."""
    is_away, top = MODES[mode][0], oracle.top(E4M3)
    codes = [low + (nu > 0 and is_away(nu, R, count)) for (low, nu), R in zip(positions() * 2, random.tolist(), strict=True)]
    result = torch.tensor([float(oracle.magnitude(E4M3, min(code, top))) for code in codes]).copysign(NUMBERS)
    return torch.where(NUMBERS.isnan(), torch.nan, result)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("mode", MODES)
def test_all_numbers_go_where_the_draft_says(mode: str, bits: int) -> None:
    from support.side_by_side import DEVICE, LARGEST_BLOCK, kernels

    how = Stochastic(bits, MODES[mode][1])  # type: ignore[arg-type]
    rounding = GridRounding(read(Grid, E4M3.spelling[0]), read(Rule, how.spelling["saturate"]))
    noise = (torch.tensor(5), 7, 3)
    expected = due(mode, qsim.random.random_bits(len(NUMBERS), bits, seed=5, stream=7, offset=3), bits)
    in_torch, in_loops, in_kernels = (torch.empty_like(NUMBERS, device=device) for device in ("cpu", "cpu", DEVICE))
    reference.quantize_into(in_torch, NUMBERS, rounding, noise)
    compiled.quantize_into(in_loops, NUMBERS, rounding, noise)
    kernels.quantize_into(in_kernels, NUMBERS.to(DEVICE), rounding, noise, LARGEST_BLOCK)
    for found in (in_torch, in_loops, in_kernels.cpu()):
        same = (found == expected) & (found.signbit() == expected.signbit()) | (found.isnan() & expected.isnan())
        assert same.all(), NUMBERS[~same][:5]
    assert same_bits(in_torch, in_loops)
    assert same_bits(in_torch, in_kernels.cpu())


@pytest.mark.parametrize("fmt", [E4M3, Table([-1.0, 0.0, 1.0])], ids=["e4m3", "table"])
def test_what_is_behind_the_random_bits_decides_ties(fmt: Format) -> None:
    """Half of the last of 16 bits of the smallest value is a tie next to zero; the number after it goes up with the largest integer."""
    from support.side_by_side import DEVICE, LARGEST_BLOCK, kernels

    tie = torch.tensor(fmt.smallest * 2.0**-17)
    rounding = GridRounding(read(Grid, fmt.spelling[0]), read(Rule, Stochastic(16, "even").spelling["saturate"]))
    largest = qsim.random.random_bits(1 << 18, 16, seed=3) == 0xFFFF
    assert largest.any()
    for x, due in ((tie, torch.zeros(1 << 18)), (tie.nextafter(torch.tensor(1.0)), largest * fmt.smallest)):
        given = x.expand(1 << 18).contiguous()
        in_torch, in_loops, in_kernels = (torch.empty_like(given, device=device) for device in ("cpu", "cpu", DEVICE))
        reference.quantize_into(in_torch, given, rounding, (torch.tensor(3), 0, 0))
        compiled.quantize_into(in_loops, given, rounding, (torch.tensor(3), 0, 0))
        kernels.quantize_into(in_kernels, given.to(DEVICE), rounding, (torch.tensor(3), 0, 0), LARGEST_BLOCK)
        for found in (in_torch, in_loops, in_kernels.cpu()):
            assert torch.equal(found, due)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("mode", MODES)
def test_emitted_c_goes_where_the_draft_says(mode: str, bits: int, tmp_path: Path) -> None:
    circuit = Circuit(E4M3, "round", Stochastic(bits, MODES[mode][1]))  # type: ignore[arg-type]
    random = qsim.random.random_bits(len(NUMBERS), bits, seed=5)
    (found,) = emitted.c_results([circuit], NUMBERS.view(torch.int32).long() & 0xFFFFFFFF, random, tmp_path, "gcc", ["-std=c99"])
    values = torch.as_tensor(found, dtype=torch.int64).to(torch.int32).view(torch.float32)
    assert torch.equal(values.nan_to_num(-7.0), due(mode, random, bits).nan_to_num(-7.0))


def test_corrections_differ_at_ties() -> None:
    """Two bits at five eighths of the way: two, three and two of four random integers lead on; at seven eighths three, four and four."""
    found = {how: [Stochastic(2, how).steps(Fraction(k, 8)) for k in (5, 7)] for how in (False, True, "even")}  # type: ignore[arg-type]
    assert found == {False: [2, 3], True: [3, 4], "even": [2, 4]}


@pytest.mark.parametrize(("mode", "share"), [("A", 0.5), ("B", 0.75), ("C", 0.5)])
def test_shares_of_a_tie(mode: str, share: float) -> None:
    """Many copies of a number at five eighths of the way with two random bits, which are either sign's alike."""
    x = torch.full((1 << 16,), 1 + 5 / 64)
    for sign in (1, -1):
        rounded = qsim.quantize(sign * x, "e4m3", rounding=Stochastic(2, MODES[mode][1]), seed=11)  # type: ignore[arg-type]
        check_share(int((rounded.abs() > 1).sum()), len(x), share)
