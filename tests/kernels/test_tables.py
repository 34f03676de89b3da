"""Tables in every implementation, bit for bit: plain torch, Numba's loops, the Triton kernels, and Python's integers."""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

import pytest
import torch
from torch import Tensor

import qsim
from qsim.formats import Format, Log, Posit, Table, Takum
from qsim_kernels import numba as compiled, torch as reference
from qsim_kernels.arithmetic import rounding as definition
from qsim_kernels.numba.arguments import _way
from qsim_kernels.numbers.buckets import buckets_of
from qsim_kernels.numbers.carrier import SINGLE, rounding_bits, used_bits, variant_of
from qsim_kernels.numbers.encoding import Encoding
from qsim_kernels.numbers.grid import GridRounding, Rule, read, spell
from qsim_kernels.numbers.places import memory_of, places_of
from support import catalogue
from support.comparing import same_bits

FORMATS = [*catalogue.TABULATED, Table([-1, 1]), Table(range(-70, 90)), Posit(9, 0), Takum(11), Log(3, 0)]
ROUNDINGS = [*qsim.rounding.NAMED, qsim.Stochastic(1), qsim.Stochastic(11), qsim.Stochastic(20), qsim.Stochastic(32, correction=True)]
pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")


def numbers(fmt: Format, count: int = 1500) -> Tensor:
    """Values, numbers between and beyond them, and special ones."""
    torch.manual_seed(fmt.bits)
    values = torch.tensor(fmt.values())
    chosen = values[torch.randint(len(values), (count,))]
    between = chosen + (values[torch.randint(len(values), (count,))] - chosen) * torch.rand(count) ** 8
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-40, -1e-40, 3e38, -3e38, 0.5, -0.5])
    return torch.cat([special, values[:200], between, torch.randn(count) * fmt.max / 2, torch.randn(count) * 0.1])


def results(module: Any, x: Tensor, fmt: Format, rule: Rule) -> list[Tensor]:
    """Rounded values, codes, and their values."""
    seed = torch.tensor(7) if rule.draws else None
    values = torch.empty_like(x, dtype=torch.promote_types(x.dtype, torch.float32))
    module.quantize_into(values, x, GridRounding(fmt.grid, rule), (seed, 3, 16))
    codes = torch.empty_like(x, dtype=torch.uint8 if fmt.bits <= 8 else torch.int16)
    module.encode_into(codes, x, Encoding(fmt.grid, rule, fmt.coding), (seed, 3, 16), False)
    decoded = torch.empty_like(values)
    module.decode_into(decoded, codes, fmt.grid, fmt.coding)
    return [values, codes, decoded]


def compare(module: Any, fmt: Format, rounding: Any, overflow: str, dtype: torch.dtype) -> None:
    rule, x = qsim.rounding.resolve(rounding).rule(overflow), numbers(fmt).to(dtype)
    expected, found = results(reference, x, fmt, rule), results(module, x, fmt, rule)
    same = [torch.equal(a, b) if a.dtype in (torch.uint8, torch.int16) else same_bits(a, b) for a, b in zip(expected, found, strict=True)]
    assert same == [True] * 3, (rounding, overflow, dtype)
    is_number = ~expected[0].isnan()
    assert same_bits(expected[0][is_number], expected[2][is_number])


@pytest.mark.slow
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_compiled_loops(fmt: Format) -> None:
    for index, rounding in enumerate(ROUNDINGS):
        for turn, overflow in enumerate(("saturate", "nonfinite", "saturate_symmetric")):
            compare(compiled, fmt, rounding, overflow, (torch.float32, torch.bfloat16, torch.float64)[(index + turn) % 3])


@pytest.mark.slow
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_kernels(fmt: Format) -> None:
    from support.side_by_side import DEVICE, kernels

    if DEVICE.type == "cuda":
        pytest.skip("the digests compare a GPU's kernels")
    for index, rounding in enumerate(ROUNDINGS):
        for turn, overflow in enumerate(("saturate", "nonfinite", "saturate_symmetric")):
            if (index + turn) % 3 == FORMATS.index(fmt) % 3:
                compare(kernels, fmt, rounding, overflow, (torch.float32, torch.bfloat16, torch.float64)[index % 3])


@pytest.mark.parametrize(
    ("name", "way"),
    [("nf4", "compared_"), ("posit8", "bisected_1_"), ("takum8", "bisected_1_"), ("posit12", "bisected_")],
)
@pytest.mark.sampled(3)
@pytest.mark.parametrize("bits", [None, 9])
def test_positions_in_float32_give_way_to_exact_ones(name: str, way: str, bits: int | None) -> None:
    """So many numbers that some strips hold one whose position float32 does not decide, and some whose distances float32 lacks."""
    fmt, rule = qsim.format(name), qsim.Stochastic(bits).rule("saturate")
    assert _way(rounding_bits(fmt.grid, rule, False), rule)[1].startswith(way)
    values = torch.tensor(fmt.values())
    x = torch.cat([torch.rand(1 << 16) * 2.4 - 1.2, values.repeat(1 + 5000 // len(values)), torch.zeros(512), numbers(fmt)])
    expected, found = results(reference, x, fmt, rule)[0], results(compiled, x, fmt, rule)[0]
    assert same_bits(expected, found)


@pytest.mark.parametrize(
    ("fmt", "most"),
    [(Posit(8), 1), (Takum(8), 1), (qsim.formats.NF4, 1), (Table([-1, 1]), 1), pytest.param(Posit(16), 5, marks=pytest.mark.slow)],
    ids=str,
)
def test_buckets_leave_few_places(fmt: Format, most: int) -> None:
    """Every number finds its place; in tables of 8 bits a bucket has at most two."""
    rule = qsim.Stochastic().rule("saturate")
    buckets = buckets_of(fmt.grid.table, rule)
    firsts, starts, reach = [place.first for place in buckets.places], buckets.starts, 1 << buckets.steps
    assert (buckets.steps, len(starts)) == (most, 1 << 32 - buckets.width)
    for first in {place.first + near for place in places_of(fmt.grid.table, rule, SINGLE) for near in (-1, 0, 1)} - {SINGLE.sign - 1}:
        start = starts[len(starts) // 2 + (first >> buckets.width)]
        reached = start + sum(first >= key for key in firsts[start + 1 : start + reach])
        assert reached == bisect_right(firsts[:-reach], first, 1) - 1


@pytest.mark.parametrize(
    ("fmt", "fits"), [(Posit(8), True), (Takum(8), True), (qsim.formats.NF4, True), (Table([0, 1e-7, 1]), False)], ids=str
)
@pytest.mark.parametrize("correction", [True, "even"])
def test_kernels_count_distances_in_words_or_else_in_float64(fmt: Format, fits: bool, correction: Any) -> None:
    """Many numbers for few random bits: some are where the share of the way and the random bits just carry."""
    from support.side_by_side import DEVICE, kernels

    rule = qsim.Stochastic(9, correction).rule("saturate")
    assert buckets_of(fmt.grid.table, rule).fits_words == fits
    x, seed = torch.cat([numbers(fmt), torch.rand(5000) * 2.4 - 1.2]), torch.tensor(7)
    expected, found = (torch.empty_like(x, device=device) for device in ("cpu", DEVICE))
    reference.quantize_into(expected, x, GridRounding(fmt.grid, rule), (seed, 3, 16))
    kernels.quantize_into(found, x.to(DEVICE), GridRounding(fmt.grid, rule), (seed, 3, 16))
    assert same_bits(expected, found.cpu())


@pytest.mark.sampled(3)
@pytest.mark.parametrize("rounding", [*qsim.rounding.NAMED, qsim.Stochastic(5, correction=True), qsim.Stochastic(5, "even")], ids=str)
@pytest.mark.parametrize("overflow", ["saturate", "nonfinite"])
def test_pythons_integers_round_as_the_operators_do(rounding: Any, overflow: str) -> None:
    rule = qsim.rounding.resolve(rounding).rule(overflow)
    for fmt in catalogue.TABULATED:
        how, x = rounding_bits(fmt.grid, rule, wide=False), numbers(fmt, 40)
        grid = how._replace(table=memory_of(how.table, rule, how.carrier))
        words = reference.random_bits(reference.ElementNoise(7, 3, 16, x.numel(), x.device), 32).tolist()
        variant, used = variant_of(how, rule), used_bits(how.carrier, rule.bits, rule.correction)
        pairs = zip(x.view(torch.int32).tolist(), words, strict=True)
        found = [definition.round_bits(bits, definition.random_bits(word, used), grid, variant) for bits, word in pairs]
        assert same_bits(torch.tensor(found, dtype=torch.int32).view(torch.float32), results(reference, x, fmt, rule)[0]), fmt


def test_text() -> None:
    grid = qsim.Float(4, 3, specials="none").grid
    assert "table" not in spell(grid)
    assert read(type(grid), spell(grid)) == grid
    table = qsim.formats.Posit(8).grid
    assert spell(table).endswith(" table='posit(8,2)'")
    assert read(type(table), spell(table)) == table
    unknown = table._replace(table="unum(8)")
    with pytest.raises(
        ValueError, match="no table has the name 'unum': known are values, dynamic, log, posit, supernormal, takum; import qsim"
    ):
        variant_of(rounding_bits(unknown, qsim.rounding.NEAREST.rule("saturate"), False), qsim.rounding.NEAREST.rule("saturate"))
