"""Tests that operators compute scales, codes and Hadamard transforms as the arithmetic defines them, and so do faster ways."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import qsim
from qsim_kernels import arithmetic, torch as reference
from qsim_kernels.meanings import python, torch as meaning
from qsim_kernels.numbers.carrier import DOUBLE, SINGLE, Carrier, counts_wide, grid_bits
from qsim_kernels.numbers.encoding import Encoding, coding_bits
from qsim_kernels.numbers.grid import Coding, Grid, Rule, read
from qsim_kernels.numbers.scales import ScaleRule, Scales, Turn, rounding_of_scales, scale_numbers, variant_of_scales
from qsim_kernels.torch import scaling
from qsim_kernels.torch.hadamard import bounded, hadamard, signs_of
from support import catalogue, inputs
from support.comparing import same_bits

#: Compiled kernels take a GPU's tensors, and Triton's interpreter a CPU's.
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ALL_16_BITS = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
MAGNITUDES = ALL_16_BITS[: 1 << 15]
FORMATS = [*catalogue.NAMED, *catalogue.VARIETY]
GRIDS = {name: read(Grid, qsim.format(name).spelling[0]) for name in ("e8m0", "e4m3", "e5m2", "fp32", "e2m1")}


#: Those that draw are compared in `tests/scaling/test_drawn_scales.py`.
RULES = [rule for rule in ScaleRule if not rounding_of_scales(rule).draws]


def rule_of_scales(rule: ScaleRule, element: str, grid: str, margin: int = 0) -> Scales:
    """A way to make scales."""
    elements, values = GRIDS[element], GRIDS[grid]
    return Scales(int(rule), margin, elements.max, elements.mantissa, max(values.least, 2.0**-127), values)


SETTINGS = [
    *(rule_of_scales(rule, element, "e8m0", margin) for rule in RULES for element, margin in (("e2m1", 0), ("e4m3", 1))),
    *(rule_of_scales(rule, "e2m1", "e4m3") for rule in (ScaleRule.FIT, ScaleRule.CEIL)),
    rule_of_scales(ScaleRule.CEIL, "e2m1", "e5m2"),
    rule_of_scales(ScaleRule.FIT, "e4m3", "fp32"),
]


def bits_of(x: Tensor) -> list[int]:
    """The bits of numbers, as Python's integers."""
    return x.contiguous().view(-1).view(torch.int64 if x.dtype == torch.float64 else torch.int32).tolist()  # type: ignore[no-any-return]


def defined(amaxes: Tensor, scales: Scales, whole: float | None = None) -> Tensor:
    """Scales as the arithmetic on tensors says."""
    largest = amaxes.double() if whole is None else amaxes.double() / torch.tensor(whole).double()
    made = meaning.scales(DOUBLE).scale_of(
        largest.view(torch.int64), None, scale_numbers(scales), scales.rule, variant_of_scales(scales.rule)
    )
    return made.view(torch.float64).float()  # type: ignore[no-any-return]


def test_pythons_integers_make_the_scales_of_the_operators() -> None:
    amaxes = torch.cat([MAGNITUDES[::150], torch.tensor([0.0, torch.inf, torch.nan])])
    scale_of = python.functions(arithmetic.scales, DOUBLE).scale_of
    for scales in SETTINGS:
        made = [scale_of(bits, 0, scale_numbers(scales), scales.rule, variant_of_scales(scales.rule)) for bits in bits_of(amaxes.double())]
        found = torch.empty_like(amaxes)
        scaling.scales_into(found, amaxes, None, scales)
        assert same_bits(torch.tensor(made).view(torch.float64).float(), found), scales


def test_torch_makes_the_scales_of_the_definition() -> None:
    """Those with the values of float32 by a conversion."""
    for scales in SETTINGS:
        found = torch.empty_like(MAGNITUDES)
        scaling.scales_into(found, MAGNITUDES, None, scales)
        assert same_bits(found, defined(MAGNITUDES, scales)), scales


@pytest.mark.parametrize("whole", [None, 0.37, 3e-30, 1e25])
def test_loops_make_the_scales_of_the_definition(whole: float | None) -> None:
    loops = pytest.importorskip("qsim_kernels.numba.scaling", reason="needs numba")
    for scales in SETTINGS:
        found = torch.empty_like(MAGNITUDES)
        loops.scales_into(found, MAGNITUDES, None if whole is None else torch.tensor(whole), scales)
        assert same_bits(found, defined(MAGNITUDES, scales, whole)), scales


@pytest.mark.parametrize("whole", [None, 0.37, 3e-30, 1e25])
def test_faster_kernels_make_the_scales_of_the_definition(whole: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Powers of two without a division, ratios in float32, and all others."""
    kernels = pytest.importorskip("qsim_kernels.triton.device.tile_scales")
    if DEVICE.type == "cpu":
        # Triton's interpreter is faster with a few large blocks.
        monkeypatch.setattr(kernels, "_BLOCK", 1 << 15)
    kernels._prepared.cache_clear()
    for scales in SETTINGS:
        found = torch.empty_like(MAGNITUDES, device=DEVICE)
        kernels.scales_into(found, MAGNITUDES.to(DEVICE), None if whole is None else torch.tensor(whole, device=DEVICE), scales)
        assert same_bits(found.cpu(), defined(MAGNITUDES, scales, whole)), scales
    kernels._prepared.cache_clear()


@pytest.mark.parametrize("whole", [1.0, 0.37, 1.2e-38, 1e-40, 7e-21, 3e19, 1e35])
def test_kernels_make_the_scales_of_magnitudes_next_to_where_they_change(whole: float) -> None:
    """Values of the scales' grid and their middles, times `M` and the scale of the whole tensor, and their neighbours."""
    kernels = pytest.importorskip("qsim_kernels.triton.device.tile_scales")
    values = torch.tensor([value for value in qsim.format("e4m3").values() if value >= 0], dtype=torch.float64)
    values = torch.cat([values, (values[1:] + values[:-1]) / 2])
    ends = (values * 6 * torch.tensor(whole).double()).float().view(torch.int32)[:, None] + torch.arange(-3, 4, dtype=torch.int32)
    amaxes = ends.clamp_min(0).view(-1).view(torch.float32)
    for rule in (ScaleRule.FIT, ScaleRule.CEIL):
        scales, found = rule_of_scales(rule, "e2m1", "e4m3"), torch.empty_like(amaxes, device=DEVICE)
        kernels.scales_into(found, amaxes.to(DEVICE), torch.tensor(whole, device=DEVICE), scales)
        assert same_bits(found.cpu(), defined(amaxes, scales, whole)), rule


def _of_bits(function: Callable[..., Any], carrier: Carrier, *tensors: Tensor | int) -> Tensor:
    """A function of the definition, applied to tensors' bits."""
    word = torch.int32 if carrier == SINGLE else torch.int64
    result = function(*(x if isinstance(x, int) else x.view(word) for x in tensors))
    return result.view(torch.float32 if carrier == SINGLE else torch.float64)  # type: ignore[no-any-return]


def _one_nan(x: Tensor) -> Tensor:
    return torch.where(x.isnan(), torch.nan, x)


def test_torch_clamps_where_the_definition_compares_bits() -> None:
    """Saturated products, scales under one of the whole tensor, and values before a transform."""
    elements = meaning.scales(SINGLE)
    largest = SINGLE.pattern(torch.finfo(torch.float16).max)
    assert same_bits(
        _one_nan(scaling.saturated(ALL_16_BITS, torch.float16)), _one_nan(_of_bits(elements.saturated, SINGLE, ALL_16_BITS, largest))
    )
    whole = torch.tensor(3.7)
    assert same_bits(
        _one_nan(scaling.under_whole(MAGNITUDES, whole)),
        _one_nan(_of_bits(elements.under_whole, SINGLE, MAGNITUDES, whole.expand(MAGNITUDES.shape).contiguous())),
    )
    limited = python.functions(arithmetic.hadamard, SINGLE).limited
    end = SINGLE.pattern(torch.finfo(torch.float32).max / 16)
    found = [limited(bits, end) for bits in bits_of(ALL_16_BITS)]
    assert same_bits(
        _one_nan(torch.tensor(found, dtype=torch.int32).view(torch.float32)), _one_nan(bounded(ALL_16_BITS, torch.float32, 16))
    )


@pytest.mark.parametrize("carrier", [SINGLE, DOUBLE], ids=["float32", "float64"])
def test_elements_under_scales_are_the_same_in_python_and_torch(carrier: Carrier) -> None:
    x = torch.cat([inputs.spread_patterns(400, torch.float32, seed=1), torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan])])
    x = x if carrier == SINGLE else x.double()
    tiny = torch.full_like(x, 1e-30)
    quotients, tensors, integers = x * tiny, meaning.scales(carrier), python.functions(arithmetic.scales, carrier)
    largest = carrier.pattern(448.0)
    for function, arguments in (
        ("kept_from_zero", (quotients, x)), ("saturated", (x, largest)), ("to_bfloat16", (x, largest)), ("under_whole", (x.abs(), tiny)),
        ("inverse", (torch.where(x == 0, 1, x.abs()),)),
    ):  # fmt: skip
        rows = zip(*(itertools.repeat(given) if isinstance(given, int) else bits_of(given) for given in arguments), strict=False)
        found = torch.tensor([getattr(integers, function)(*row) for row in rows], dtype=torch.int64)
        result = found.to(torch.int32).view(torch.float32) if carrier == SINGLE else found.view(torch.float64)
        assert same_bits(_one_nan(result), _one_nan(_of_bits(getattr(tensors, function), carrier, *arguments))), function


def codings() -> Iterator[tuple[Any, Any, Any, Grid, Coding]]:
    """Formats with their codes, in the carrier's bits."""
    for fmt in FORMATS:
        grid, coding = read(Grid, fmt.spelling[0]), read(Coding, fmt.spelling[1])
        how = grid_bits(grid, wide=counts_wide(grid, coding))
        yield fmt, how, coding_bits(grid, coding, how), grid, coding


def test_pythons_integers_encode_and_decode_as_the_operators_do() -> None:
    for fmt, how, (numbers, variant), grid, coding in codings():
        functions = python.functions(arithmetic.codes, how.carrier)
        mask, width = (1 << coding.bits) - 1, how.carrier.last + 1
        codes = torch.randint(0, 1 << coding.bits, (60,), generator=torch.Generator().manual_seed(coding.bits))
        codes = torch.cat([codes, torch.tensor([0, 1, mask, mask >> 1, (mask >> 1) + 1])])
        values = torch.empty(codes.shape, dtype=torch.float64)
        reference.decode_into(values, codes, grid, coding)
        wrapped = [(code + (1 << width - 1)) % (1 << width) - (1 << width - 1) for code in codes.tolist()]
        found = torch.tensor([functions.value_of(code, numbers, variant) for code in wrapped], dtype=torch.int64)
        found = found if how.carrier == DOUBLE else found.to(torch.int32)
        assert same_bits(_one_nan(found.view(torch.float64 if how.carrier == DOUBLE else torch.float32).double()), _one_nan(values)), fmt
        # Some codes stand for numbers that are no values: -128 in symmetric INT8, and -0 where there is none.
        kept = values[(values != 0) & (qsim.quantize(values, fmt, overflow="nonfinite") == values)]
        given = kept if how.carrier == DOUBLE else kept.float()
        encoded = [functions.code_of(bits, numbers, variant) & mask for bits in bits_of(given)]
        assert encoded == (qsim.encode(kept, fmt, overflow="nonfinite").long() & mask).tolist(), fmt


@pytest.mark.parametrize("name", ["e4m3", "e5m2", "e2m1", "int8", "uint4", "e4m3fnuz", "e3m0"])
def test_faster_kernels_encode_and_decode_as_the_definition(name: str) -> None:
    """Multiplications by powers of two, in place of shifts by different numbers of bits."""
    kernels = pytest.importorskip("qsim_kernels.triton.quantize.launch")
    spelling = qsim.format(name).spelling
    grid, coding = read(Grid, spelling[0]), read(Coding, spelling[1])
    rule = read(Rule, qsim.rounding.resolve("nearest").spelling["saturate"])
    found, expected = (torch.empty(ALL_16_BITS.shape, dtype=torch.uint8, device=place) for place in (DEVICE, "cpu"))
    # Triton's interpreter is faster with few large blocks.
    block = 1 << 15 if DEVICE.type == "cpu" else None
    x = ALL_16_BITS[~ALL_16_BITS.isnan()] if coding.nan < 0 else ALL_16_BITS
    found, expected = found[: len(x)], expected[: len(x)]
    kernels.encode_into(found, x.to(DEVICE), Encoding(grid, rule, coding), (None, 0, 0), False, block)
    reference.encode_into(expected, x, Encoding(grid, rule, coding), (None, 0, 0), False)
    assert torch.equal(found.cpu(), expected)
    codes = torch.arange(1 << coding.bits).to(torch.uint8)
    values, values_expected = torch.empty(codes.shape, device=DEVICE), torch.empty(codes.shape)
    kernels.decode_into(values, codes.to(DEVICE), grid, coding)
    reference.decode_into(values_expected, codes, grid, coding)
    assert same_bits(values.cpu(), values_expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1, 2, 16, 64])
def test_pythons_integers_transform_as_the_operators_do(size: int, dtype: torch.dtype) -> None:
    carrier = SINGLE if dtype == torch.float32 else DOUBLE
    x = torch.randn(3, size, dtype=dtype, generator=torch.Generator().manual_seed(size)) * torch.finfo(dtype).max / 4
    x[2, -1] = torch.inf
    turn = Turn(size, size, 1, 5)
    functions = python.functions(arithmetic.hadamard, carrier)
    flips = [bit for number in range(-(-size // 4)) for bit in functions.flips(number, turn.signs)][:size]
    assert [1 - 2 * bit for bit in flips] == list(signs_of(turn))
    signs = [carrier.sign * bit for bit in flips]
    largest, factor = carrier.pattern(torch.finfo(dtype).max / size), torch.tensor(size**-0.5, dtype=dtype)
    rows = [functions.transformed(bits_of(row), signs, largest, carrier.pattern(factor.item())) for row in x]
    found = torch.tensor(rows, dtype=torch.int64)
    found = found.view(torch.float64) if carrier == DOUBLE else found.to(torch.int32).view(torch.float32)
    assert same_bits(_one_nan(found), _one_nan(hadamard(x, turn)))
