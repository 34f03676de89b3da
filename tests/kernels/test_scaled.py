"""The operators that round with scales: Triton compared with the reference, bit for bit, in randomly drawn settings."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import qsim
from qsim.functional.arguments import spelling
from qsim.scaling import NAMED, PerAxis, PerBlock, PerTensor, PerTile, Scaling
from qsim.transforms import Hadamard
from qsim_kernels.numbers.grid import Grid, Overflow, Rule, read
from qsim_kernels.numbers.scales import ElementRounding, Restore, read_scales
from qsim_kernels.ops.scaled import Implementation
from support.scaled_settings import LARGE, REFERENCE, SMALL, ScaledSetting, check, equal, setting
from support.side_by_side import DEVICE, dealt

from qsim_kernels.triton.device import tile_scales  # isort: skip
from qsim_kernels.triton.device.saturation import Clamp, clamp_of_tiles  # isort: skip
from qsim_kernels.triton.scaled import whole  # isort: skip

# The interpreter computes with NumPy, which warns about NaN and infinity.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

KERNELS = Implementation("qsim_kernels.triton.scaled.launch")

SCALE_FORMATS, SCALE_RULES = ["fp32", "e8m0", "e4m3", "e5m2", "e4m0", "int8"], ["fit", "ceil", "floor", "even", "ceil_log2"]


@pytest.mark.sampled(24)
@pytest.mark.parametrize("number", range(32 if DEVICE.type == "cpu" else 600))
def test_kernels_do_what_the_reference_does(number: int) -> None:
    check(KERNELS, DEVICE, setting(number, SMALL if DEVICE.type == "cpu" else LARGE))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("finite", [True, False])
@pytest.mark.parametrize("largest", [0, 50_000, -1])
def test_whole_tensors_of_which_each_program_reads_much(
    dtype: torch.dtype, finite: bool, largest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of large tensors; the last program's part ends within a block."""
    monkeypatch.setattr(whole, "_LARGE", whole._SMALL)
    x = torch.randn(3 * 2**15 + 5).to(dtype)
    x[largest], x[70_000] = 100.0, math.inf
    tiles, making = PerTensor().tiles(x.shape), PerTensor().spelling(qsim.format("e4m3"))
    expected = REFERENCE.scales_of_tiles(x, None, tiles, [], finite, *making)
    assert equal(x, expected, KERNELS.scales_of_tiles(x.to(DEVICE), None, tiles, [], finite, *making))


def test_tiles_that_do_not_fit_into_regions_are_read_several_times() -> None:
    spelt = spelling("e2m1", "nearest", "saturate")
    check(KERNELS, DEVICE, ScaledSetting(PerTile(3, 5, "e4m3"), torch.randn(7, 11), (), spelt, 0, torch.float32, Restore.NOTHING))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("fmt", "dim", "offset"), [("e2m1", -1, 0), ("e4m3", -1, 5), ("e4m3", 0, 0), ("e2m1", 0, 5)])
def test_last_random_bits_decide_where_the_first_do_not(fmt: str, dim: int, offset: int) -> None:
    # Between 1 and its neighbour, where the first 16 bits of an element's index add up to just below a step.
    spelt, shape, step = spelling(fmt, "stochastic", "saturate"), (64, 96), 2.0 ** -qsim.format(fmt).mantissa
    bits = qsim.random.random_bits(64 * 96, 32, seed=3**25, stream=77, offset=offset).view(shape)
    signs = torch.where(torch.arange(96) % 3 == 0, -1.0, 1.0)
    x = signs * (1 + step * ((0xFFFF - (bits >> 16)) * 2.0**-16 + 2.0**-17)).float()
    expected = signs * (1 + step * (bits & 0xFFFF >= 2**15))
    # The largest number of each block makes its scale 1.
    ends = (slice(None), slice(None, None, 32)) if dim == -1 else slice(None, None, 32)
    x[ends] = expected[ends] = qsim.format(fmt).max
    scaling, rounding = PerBlock(32, dim, "e8m0", "ceil"), (torch.tensor(3**25), spelt.grid, spelt.rule, 77, offset, torch.float32, 0)
    for ops, y in ((REFERENCE, x), (KERNELS, x.to(DEVICE))):
        tiles, making = scaling.tiles(shape), scaling.spelling(spelt.format)
        rounded, scales = ops.quantize_tiles(y, None, tiles, (), *making, *rounding)
        assert (scales == 1).all()
        assert torch.equal(rounded.cpu(), expected)
        assert torch.equal(ops.quantize_scaled(y, scales, None, tiles, (), *rounding).cpu(), expected)


@pytest.mark.parametrize("worst", [3.0, math.inf])
def test_the_program_that_finishes_last_makes_the_scale_of_a_large_tensor(worst: float) -> None:
    x = torch.rand((1 << 16) + 77)
    x[-2:] = torch.tensor([-2.0, worst])
    tiles, making = [1, len(x), 1, len(x), 0], PerTensor().spelling(qsim.format("e4m3"))
    for finite in (True, False):
        expected = REFERENCE.scales_of_tiles(x, None, tiles, [], finite, *making)
        assert equal(x, expected, KERNELS.scales_of_tiles(x.to(DEVICE), None, tiles, [], finite, *making))


@pytest.mark.parametrize(("shape", "size", "worst"), [((80, 6), 16, 1.0), ((16, 4), 16, math.nan), ((2, 32, 2), 32, -3e38)])
def test_the_scale_of_transformed_columns(shape: tuple[int, ...], size: int, worst: float) -> None:
    """NaN is ignored or not, and sums of numbers near the largest do not overflow."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(size)).bfloat16()
    x.view(-1)[-1] = worst
    tiles, making = [1, x.numel(), 1, x.numel(), 0], PerTensor().spelling(qsim.format("e4m3"))
    turn = Hadamard(size, seed=1).turn(shape, len(shape) - 2)
    for finite in (True, False):
        expected = REFERENCE.scales_of_tiles(x, None, tiles, turn, finite, *making)
        assert equal(x, expected, KERNELS.scales_of_tiles(x.to(DEVICE), None, tiles, turn, finite, *making))


@pytest.mark.parametrize("size", [16, 32])
@pytest.mark.parametrize("dim", [-1, 0])
def test_blocks_of_a_transform_with_numbers_too_large_to_be_summed(dim: int, size: int) -> None:
    x = torch.randn(64, 96, generator=torch.Generator().manual_seed(size)).bfloat16()
    x[3, 5], x[40, 70], x[:, 33], x[50, 90] = math.inf, 3e38, -1.5e37, math.nan
    spelt, scaling = spelling("e2m1", "nearest", "saturate"), PerBlock(size, dim)
    rest = *scaling.spelling(spelt.format), None, spelt.grid, spelt.rule, 0, 0, torch.bfloat16, Restore.ALL
    tiles, turn = scaling.tiles(x.shape), Hadamard(size, seed=1).turn(x.shape, dim)
    expected, _ = REFERENCE.quantize_tiles(x, None, tiles, turn, *rest)
    found, _ = KERNELS.quantize_tiles(x.to(DEVICE), None, tiles, turn, *rest)
    assert equal(x, expected, found)


@pytest.mark.parametrize("scaling", [PerTensor(), PerAxis(0), PerAxis(-1), PerBlock(4), PerTile(2, 4)], ids=str)
def test_nothing_to_round(scaling: Scaling) -> None:
    spelt = spelling("e2m1", "nearest", "saturate")
    for shape in ((0, 3, 8), (3, 0, 8), (2, 0)):
        x = torch.empty(shape, device=DEVICE)
        tiles, making = scaling.tiles(x.shape), scaling.spelling(spelt.format)
        rounding = (None, spelt.grid, spelt.rule, 0, 0, torch.bfloat16, 0)
        values, scales = KERNELS.quantize_tiles(x, None, tiles, (), *making, *rounding)
        expected, due = REFERENCE.quantize_tiles(x.cpu(), None, tiles, (), *making, *rounding)
        assert (values.shape, values.dtype) == (expected.shape, torch.bfloat16)
        assert torch.equal(scales.cpu(), due)
        assert torch.equal(KERNELS.scales_of_tiles(x, None, tiles, (), True, *making).cpu(), due)
        assert KERNELS.quantize_scaled(x, torch.ones_like(scales), None, tiles, (), *rounding).shape == shape


def test_scales_of_tiles_as_torch_sees_them() -> None:
    making = PerBlock(4, -1, "e8m0", "floor").spelling(qsim.format("e4m3"))
    torch.library.opcheck(
        torch.ops.qsim.scales_of_tiles.default, (torch.randn(6, 8, device=DEVICE), None, [1, 8, 1, 4, 0], [], False, *making)
    )


@pytest.fixture
def one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute all scales in one block in the interpreter, whose time depends on blocks; the kernels' own blocks have 128 scales."""
    if DEVICE.type == "cuda":
        return
    monkeypatch.setattr(tile_scales, "_BLOCK", 2048)
    tile_scales._prepared.cache_clear()


@pytest.mark.sampled(3)
@pytest.mark.usefixtures("one_block")
@pytest.mark.parametrize("rule", SCALE_RULES)
@pytest.mark.parametrize("format", SCALE_FORMATS)
def test_scales_of_all_magnitudes(format: str, rule: Any) -> None:
    # Every exponent (some, for the interpreter), midpoints between two E4M3 scales with their neighbours, zero and non-finite numbers.
    steps = torch.arange(8, 17) * 2.0 ** torch.arange(-149, 124, 13 if DEVICE.type == "cpu" else 1).unsqueeze(1)
    middles = torch.cat([steps, (steps[:, 1:] + steps[:, :-1]) / 2], 1).flatten().float() * 6
    bits = middles.view(torch.int32)
    near = torch.cat([bits - 1, bits, bits + 1]).view(torch.float32).abs()
    amaxes = torch.cat([near, torch.tensor([0.0, math.inf, math.nan, 2.0**-149, 3e38])])
    settings = [(element, under) for under in (None, 1.0, 1.0000001, 3.1e-30, 2.0**-149, 7e25) for element in ("e2m1", "e4m3")]
    for element, number in dealt(settings, SCALE_FORMATS.index(format) + SCALE_RULES.index(rule), 3):
        under = None if number is None else torch.tensor(number)
        making = PerBlock(16, format=format, rule=rule).spelling(qsim.format(element))
        expected = REFERENCE.scales(amaxes, under, *making)
        found = KERNELS.scales(amaxes.to(DEVICE), None if under is None else under.to(DEVICE), *making)
        assert equal(amaxes, expected, found), (element, under)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(5, 7), (3, 1100), (48, 64), (2, 3, 16)])
def test_products_times_scales(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    product, rows, columns = torch.randn(shape), torch.rand(shape[-2], 1), torch.rand(1, shape[-1])
    product.view(-1)[0] = math.nan
    one, tiny = torch.tensor(0.3), torch.tensor(2.0**-120)
    products = ([], [one], [one, tiny], [rows], [rows, columns], [columns, one], [one, columns.flatten()], [rows, columns, one])
    biases = (None, torch.randn(shape[-1]), torch.randn(shape[-1]).bfloat16(), torch.randn(shape[-1]).double())
    for number, factors in enumerate(products):
        for bias in dealt(biases, number + shape[-1] + dtype.itemsize + (dtype == torch.float16), 4):
            expected = REFERENCE.rescaled(product, factors, bias, dtype)
            there = [factor.to(DEVICE) for factor in factors], None if bias is None else bias.to(DEVICE)
            assert equal(product, expected, KERNELS.rescaled(product.to(DEVICE), *there, dtype))


@pytest.mark.parametrize(
    ("format", "dtype", "target", "due"),
    [
        ("mxfp8", torch.bfloat16, torch.bfloat16, Clamp.NEVER),
        ("mxfp6", torch.float16, torch.float16, Clamp.NEVER),
        ("mxfp4", torch.float32, torch.bfloat16, Clamp.NEVER),
        ("mxfp4", torch.bfloat16, torch.float16, Clamp.ALWAYS),
        ("mxint8", torch.bfloat16, torch.bfloat16, Clamp.ALWAYS),
        ("fp8_1x128", torch.float16, torch.float16, Clamp.ALWAYS),
        ("fp8_1x128", torch.float16, torch.bfloat16, Clamp.ALWAYS),
        ("nvfp4", torch.bfloat16, torch.bfloat16, Clamp.BY_TENSOR),
    ],
)
def test_kernels_clamp_only_where_a_product_can_overflow(format: str, dtype: torch.dtype, target: torch.dtype, due: Clamp) -> None:
    block = NAMED[format]
    spelt, how = spelling(block.element, "nearest", "saturate"), block.along(-1).spelling(block.element)
    elements = ElementRounding(read(Grid, spelt.grid), read(Rule, spelt.rule), Restore.ALL)
    assert clamp_of_tiles(read_scales(*how), elements, block.outer is not None, dtype, target) == due
    outward = elements.rule._replace(overflow=Overflow.NONFINITE)
    for without in (elements._replace(restore=Restore.NOTHING), elements._replace(rule=outward)):
        assert clamp_of_tiles(read_scales(*how), without, block.outer is not None, dtype, target) == Clamp.NEVER
