"""Tests of the arithmetic that all implementations share, and of faster ways to the same results, for all inputs of 16 bits."""

from __future__ import annotations

import itertools
from collections import Counter
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

import qsim
from qsim.formats import Format
from qsim_kernels import arithmetic, numba as compiled, torch as reference
from qsim_kernels.arithmetic import rounding as definition
from qsim_kernels.meanings import python, torch as meaning
from qsim_kernels.numba.arguments import _rounds_in_floats
from qsim_kernels.numbers.carrier import DOUBLE, GridBits, rounding_bits, used_bits, variant_of
from qsim_kernels.numbers.grid import Grid, GridRounding, Rule, read
from qsim_kernels.torch.rounding import nearest_by_addition, rounds_by_addition
from support import catalogue, inputs, oracle
from support.comparing import same_bits
from support.side_by_side import DEVICE, LARGEST_BLOCK

ALL_16_BITS = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
FORMATS = [*catalogue.NAMED, *catalogue.VARIETY]
SPECIAL = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan])
STOCHASTIC = [qsim.Stochastic(32), qsim.Stochastic(7), qsim.Stochastic(16, correction=True), qsim.Stochastic(5, correction="even")]


def numbers_of(fmt: Format, rounding: Any, overflow: str) -> tuple[Grid, Rule, GridBits]:
    """The grid and the rule of a rounding, and the grid in float32's bits if these will do."""
    spelling = fmt.spelling[0], qsim.rounding.resolve(rounding).spelling[overflow]
    grid, rule = read(Grid, spelling[0]), read(Rule, spelling[1])
    return grid, rule, rounding_bits(grid, rule, wide=False)


def defined(x: Tensor, how: GridBits, rule: Rule, words: Tensor) -> Tensor:
    """Float32 numbers, rounded as the arithmetic on tensors says."""
    functions = meaning.rounding(how.carrier)
    drawn = functions.random_bits(words, used_bits(how.carrier, rule.bits, rule.correction))
    bits: Tensor = functions.round_bits(x.view(torch.int32), drawn, how, variant_of(how, rule))
    return bits.view(torch.float32)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("rounding", [*qsim.rounding.NAMED], ids=str)
@pytest.mark.parametrize("overflow", oracle.OVERFLOWS)
def test_pythons_integers_round_as_the_operators_do(rounding: str, overflow: str) -> None:
    for fmt in FORMATS:
        _, rule, how = numbers_of(fmt, rounding, overflow)
        if how.carrier == DOUBLE:
            continue
        x = torch.cat(
            [inputs.spread_patterns(90, torch.float32, seed=fmt.bits), torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan])]
        )
        words = reference.random_bits(reference.ElementNoise(5, 7, 0, x.numel(), x.device), 32)
        variant, used = variant_of(how, rule), used_bits(how.carrier, rule.bits, rule.correction)
        pairs = zip(x.view(torch.int32).tolist(), words.tolist(), strict=True)
        found = [definition.round_bits(bits, definition.random_bits(word, used), how, variant) for bits, word in pairs]
        seed = {"seed": qsim.random.Noise(5, 7)} if rule.draws else {}
        expected = qsim.quantize(x, fmt, rounding=rounding, overflow=overflow, dtype=torch.float64, **seed).float()  # type: ignore[call-overload]
        result = torch.tensor(found, dtype=torch.int32).view(torch.float32)
        assert same_bits(result, expected), fmt


@pytest.mark.parametrize("overflow", oracle.OVERFLOWS)
def test_additions_round_to_nearest_in_torch(overflow: str) -> None:
    tried = 0
    for fmt in FORMATS:
        _, rule, how = numbers_of(fmt, "nearest", overflow)
        if how.carrier == DOUBLE or not rounds_by_addition(how, rule):
            continue
        tried += 1
        found = nearest_by_addition(ALL_16_BITS.view(torch.int32), how, rule).view(torch.float32)
        assert same_bits(found, defined(ALL_16_BITS, how, rule, torch.zeros(1 << 16, dtype=torch.int64))), fmt
    assert tried > 10


@pytest.mark.parametrize("overflow", oracle.OVERFLOWS)
@pytest.mark.parametrize("rounding", ["nearest", *STOCHASTIC[:2]], ids=str)
def test_loops_in_floats_round_as_the_others(rounding: Any, overflow: str) -> None:
    words = reference.random_bits(reference.ElementNoise(5, 7, 3, 1 << 16, torch.device("cpu")), 32)
    tried: Counter[tuple[bool, bool]] = Counter()
    for fmt in [*FORMATS, qsim.formats.P3109(8, 4), qsim.formats.P3109(8, 4, signed=False), qsim.formats.P3109(6, 3, domain="finite")]:
        grid, rule, how = numbers_of(fmt, rounding, overflow)
        if how.carrier == DOUBLE or not _rounds_in_floats(how, rule):
            continue
        tried[how.signed, how.negative_zero] += 1
        found = torch.empty_like(ALL_16_BITS)
        compiled.quantize_into(found, ALL_16_BITS, GridRounding(grid, rule), (torch.tensor(5), 7, 3))
        assert same_bits(found, defined(ALL_16_BITS, how, rule, words)), fmt
    assert tried[True, True] >= 10
    assert tried[True, False] > 1
    assert tried[False, False] > 1 or overflow == "nonfinite"


@pytest.mark.sampled(6)
@pytest.mark.parametrize("rounding", ["nearest", "toward_zero", "up", "down", *STOCHASTIC], ids=str)
@pytest.mark.parametrize("overflow", oracle.OVERFLOWS)
def test_faster_kernels_round_as_the_arithmetic_does(rounding: Any, overflow: str) -> None:
    words = reference.random_bits(reference.ElementNoise(5, 7, 0, 1 << 16, torch.device("cpu")), 32)
    kernels = pytest.importorskip("qsim_kernels.triton.quantize.launch")
    for fmt in map(qsim.format, ("e4m3", "e5m2", "e2m1", "int8", "e3m0")):
        grid, rule, how = numbers_of(fmt, rounding, overflow)
        found = torch.empty_like(ALL_16_BITS, device=DEVICE)
        kernels.quantize_into(found, ALL_16_BITS.to(DEVICE), GridRounding(grid, rule), (torch.tensor(5), 7, 0), LARGEST_BLOCK)
        assert same_bits(found.cpu(), defined(ALL_16_BITS, how, rule, words)), fmt


def test_faster_sums_of_random_bits_and_shares_in_torch() -> None:
    """`reaches` by a product of floats, and as it is defined."""
    for fmt, wide in itertools.product(map(qsim.format, ("e4m3", "e2m1", "e5m2")), (False, True)):
        grid, rule, _ = numbers_of(fmt, "stochastic", "saturate")
        how = rounding_bits(grid, rule, wide)
        x = torch.linspace(0, grid.least, 999)[:-1]
        bits = x.double().view(torch.int64) if wide else x.view(torch.int32)
        words = reference.random_bits(reference.ElementNoise(5, 7, 0, x.numel(), x.device), 32) << how.carrier.drawn - 32
        found = meaning.rounding(how.carrier).reaches(bits, words, how)
        shares = [int(value / grid.least * (1 << how.carrier.drawn)) for value in x.tolist()]
        assert found.tolist() == [-(share + word >> how.carrier.drawn) for share, word in zip(shares, words.tolist(), strict=True)]


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("name", ["e4m3", "e2m1", "Float(7, 3, bias=91)", "Float(6, 2, bias=90)"])
def test_shares_are_exact_however_small_a_number_is(name: str, wide: bool) -> None:
    """Each power of two below the smallest value, and the number before it, carries with no fewer random bits than its share needs."""
    grid, rule, _ = numbers_of(qsim.format(name), "stochastic", "saturate")
    how = rounding_bits(grid, rule, wide)
    reaches = python.functions(arithmetic.rounding, how.carrier).reaches
    whole, binade = 1 << how.carrier.drawn, 1 << how.carrier.mantissa
    powers = range(how.least % binade + binade, how.least, binade * max(1, how.least // binade // 200))
    for bits in (how.least - 1, *(power - less for power in powers for less in (0, 1))):
        share = int(Fraction(how.carrier.value(bits)) / Fraction(grid.least) * whole)
        assert not reaches(bits, whole - share - 1, how), hex(bits)
        assert share == 0 or reaches(bits, whole - share, how), hex(bits)
