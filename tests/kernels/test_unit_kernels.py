"""`TwoStep` and `BlockScaled` sums in Triton kernels (interpreted without a GPU) and in Numba loops, bit for bit the reference."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import qsim
from qsim.accumulators import NAMED, Accumulator, BlockScaled, TwoStep
from qsim.formats import E4M3, E4M3FNUZ, E5M2, Format, format as resolve_format
from qsim_kernels.numbers.sums import BlockScaledSum, Sum
from qsim_kernels.ops.backend import HAS_NUMBA
from qsim_kernels.torch import sums as reference

pytest.importorskip("triton")
from qsim_kernels.triton.accumulate import launch as kernels
from support import interpreter

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
#: The interpreter's time grows with tiles.
TILE = None if DEVICE.type == "cuda" else kernels.ResultTile(8, 8, 1)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes with NumPy, which warns of NaN and infinity


@pytest.fixture(autouse=True)
def _fast() -> None:
    interpreter.speed_up()


def by_kernels(a: Tensor, b: Tensor, how: Sum, scales: tuple[Tensor, Tensor] | None = None, tile: Any = TILE) -> Tensor:
    out = torch.full((*a.shape[:-1], b.shape[-1]), 77.0, device=DEVICE)
    own = None if scales is None else (scales[0].to(DEVICE), scales[1].to(DEVICE))
    kernels.accumulate_into(out, a.to(DEVICE), b.to(DEVICE), how, (None, 0, 0), own, tile)
    return out.cpu()


def by_reference(a: Tensor, b: Tensor, how: Sum, scales: tuple[Tensor, Tensor] | None = None) -> Tensor:
    out = torch.full((*a.shape[:-1], b.shape[-1]), 55.0)
    reference.accumulate_into(out, a, b, how, (None, 0, 0), scales)
    return out


def by_loops(a: Tensor, b: Tensor, how: Sum, scales: tuple[Tensor, Tensor] | None = None) -> Tensor:
    from qsim_kernels.numba import sums as loops

    out = torch.full((*a.shape[:-1], b.shape[-1]), 33.0)
    loops.accumulate_into(out, a, b, how, (None, 0, 0), scales)
    return out


def compare(a: Tensor, b: Tensor, how: Sum, scales: tuple[Tensor, Tensor] | None = None) -> None:
    """Assert that all implementations that this machine has agree."""
    wanted = by_reference(a, b, how, scales)
    assert_same_bits(by_kernels(a, b, how, scales), wanted)
    if HAS_NUMBA:
        assert_same_bits(by_loops(a, b, how, scales), wanted)


def assert_same_bits(found: Tensor, wanted: Tensor) -> None:
    differing = found.view(torch.int32) != wanted.view(torch.int32)
    assert not differing.any(), (int(differing.sum()), found[differing][:4].tolist(), wanted[differing][:4].tolist())


def numbers(shape: tuple[int, ...], fmt: Format, spread: float, special: float = 0.0) -> Tensor:
    """Values of a format with exponents spread by some binades, zeros of both signs, and, if it has them, infinities and NaN."""
    x = torch.randn(shape) * torch.exp2(torch.randn(shape) * spread)
    chance = torch.rand(shape)
    x[chance < 0.05], x[(chance > 0.05) & (chance < 0.1)] = 0.0, -0.0
    x = qsim.quantize(x, fmt, overflow="saturate")
    if fmt.has_inf:
        x[(chance > 0.5) & (chance < 0.5 + special)], x[(chance > 0.6) & (chance < 0.6 + special)] = torch.inf, -torch.inf
    if fmt.has_nan:
        x[(chance > 0.4) & (chance < 0.4 + special)] = torch.nan
    return x


#: Accumulators and formats of their operands. Of sums in two steps: with and without products beyond 2**128, and subnormal operands.
SUMS: dict[str, tuple[Accumulator, str]] = {
    "cdna3_bf16": (NAMED["cdna3_bf16"], "bf16"),
    "cdna3_fp16": (NAMED["cdna3_fp16"], "fp16"),
    "cdna3_tf32": (NAMED["cdna3_tf32"], "tf32"),
    "cdna3_fp8": (NAMED["cdna3_fp8"], "e4m3fnuz"),
    "one product": (TwoStep(1, 24, 31), "fp32"),
    "one product, apart": (TwoStep(1, 3, 2, apart=True), "bf16"),
    "odd block, apart": (TwoStep(5, 9, 12, apart=True), "bf16"),
    "wide": (TwoStep(6, 40, 40), "fp32"),
    "b200_mxfp8": (NAMED["b200_mxfp8"], "e4m3"),
    "b200_nvfp4": (NAMED["b200_nvfp4"], "e2m1"),
    "short, in float32": (BlockScaled(6, 13, 3), "bf16"),
}


@pytest.mark.sampled(12)
@pytest.mark.parametrize(("spread", "special"), [(0.0, 0.0), (3.0, 0.02), (50.0, 0.003)])
@pytest.mark.parametrize("name", SUMS)
def test_sums_of_units(name: str, spread: float, special: float) -> None:
    accumulator, operand = SUMS[name]
    fmt = resolve_format(operand)
    how = accumulator.sum_of(fmt, fmt)
    length = 2 * how.block + 3 if isinstance(how, BlockScaledSum) else 19
    a, b = numbers((7, length), fmt, spread, special), numbers((length, 6), fmt, spread, special)
    compare(a, b, how)


@pytest.mark.parametrize("apart", [False, True])
def test_infinite_products_of_finite_operands(apart: bool) -> None:
    """Products of 2**128 or more are infinite, even if others would cancel them, and negative results that underflow are -0."""
    bf16 = resolve_format("bf16")
    how = TwoStep(4, 24, 31, apart=apart).sum_of(bf16, bf16)
    huge, least = 2.0**64, 2.0**-133
    rows = [
        [huge, -huge, 1, 1],
        [huge, huge, 0, 0],
        [huge * 0.996, huge * 0.5, huge * 0.5, 1],
        [-huge, 1, 1, 1],
        [-least, 0, 0, 0],
        [least, -least, 0.0, -0.0],
        [0.0, 0.0, -0.0, 0.0],
    ]
    columns = [[huge, huge, huge, huge], [huge, huge, -huge, huge], [least, least, least, -least], [1e-8, -1e-8, 1, -1]]
    a, b = torch.tensor(rows).bfloat16(), torch.tensor(columns).t().bfloat16()
    found, wanted = by_kernels(a, b, how), by_reference(a, b, how)
    assert_same_bits(found, wanted)
    assert found[0, 0].isnan()
    assert (found[1, 0].item(), found[3, 0].item()) == (math.inf, -math.inf)


#: Units with scales, and formats of operands and scales.
SCALED: dict[str, tuple[BlockScaled, Format, str]] = {
    "mxfp8": (BlockScaled(32, 25, 32), E4M3, "e8m0"),
    "groups of three": (BlockScaled(6, 20, 3, "e5m2"), E5M2, "e5m2"),
    "wide": (BlockScaled(16, 13, 4), resolve_format("bf16"), "e8m0"),
    "nvfp4": (BlockScaled(64, 35, 16, "e4m3", exact=True), resolve_format("e2m1"), "e4m3"),
    "mxfp4": (BlockScaled(64, 35, 16, exact=True), resolve_format("e2m1"), "e8m0"),
    "exact groups of three": (BlockScaled(6, 9, 3, "e5m2", exact=True), E4M3, "e5m2"),
    "exact groups of 32": (BlockScaled(32, 20, 32, exact=True), E4M3FNUZ, "e8m0"),
}


def scales(count: int, groups: int, fmt: str, spread: float, special: float, batch: tuple[int, ...] = ()) -> Tensor:
    return numbers((*batch, count, groups), resolve_format(fmt), spread, special).abs()


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("spread", "special", "batch"), [(0.0, 0.0, ()), (2.0, 0.02, (2,)), (40.0, 0.01, ())])
@pytest.mark.parametrize("name", SCALED)
def test_sums_with_scales(name: str, spread: float, special: float, batch: tuple[int, ...]) -> None:
    accumulator, fmt, scale = SCALED[name]
    how = accumulator.sum_of(fmt, fmt)
    length = 2 * accumulator.block + accumulator.group + 1
    groups = -(-length // accumulator.group)
    a, b = numbers((*batch, 5, length), fmt, 1.0, special / 9), numbers((*batch, 3, length), fmt, 1.0, special / 9).mT
    given = scales(5, groups, scale, spread, special, batch), scales(3, groups, scale, spread, special, batch)
    compare(a, b, how, given)


@pytest.mark.slow
def test_many_matrices_have_their_own_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches are cut where a grid has no room for more matrices."""
    monkeypatch.setattr(kernels, "_MOST_BATCHES", 2)
    for name in ("mxfp8", "nvfp4"):
        accumulator, fmt, scale = SCALED[name]
        how = accumulator.sum_of(fmt, fmt)
        a, b = numbers((3, 2, 70), fmt, 1.0), numbers((3, 70, 2), fmt, 1.0)
        groups = -(-70 // accumulator.group)
        given = scales(2, groups, scale, 1.0, 0.0, (3,)), scales(2, groups, scale, 1.0, 0.0, (3,))
        assert_same_bits(by_kernels(a, b, how, given), by_reference(a, b, how, given))


@pytest.mark.sampled(12)
@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "cdna3_fp8"])
def test_several_tiles(name: str) -> None:
    """A tile per program, of the size that suits the device, and results beyond the last whole one."""
    rows, columns, tile = (3, 5, kernels.ResultTile(2, 4, 1)) if TILE else (130, 150, None)
    accumulator, fmt, scale = SCALED.get(name, (NAMED["cdna3_fp8"], E4M3FNUZ, ""))
    how = accumulator.sum_of(fmt, fmt)
    a, b, given = numbers((2, rows, 70), fmt, 2.0), numbers((2, 70, columns), fmt, 2.0), None
    if isinstance(accumulator, BlockScaled):
        groups = -(-70 // accumulator.group)
        given = scales(rows, groups, scale, 2.0, 0.0, (2,)), scales(columns, groups, scale, 2.0, 0.0, (2,))
    assert_same_bits(by_kernels(a, b, how, given, tile), by_reference(a, b, how, given))


# The operators on a GPU and on a CPU, at the sizes of several tiles.


@pytest.fixture
def _only_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    in_plain_torch = reference.accumulate_into

    def refuse_on_gpus(out: Tensor, *arguments: Any) -> None:
        assert not out.is_cuda, "this ran in plain torch"
        in_plain_torch(out, *arguments)

    monkeypatch.setattr(reference, "accumulate_into", refuse_on_gpus)


def _bits_of(fn: Any, *arguments: Any) -> list[Tensor]:
    """The same operator on the GPU and on the CPU."""
    moved = [x.cuda() if isinstance(x, Tensor) else x for x in arguments]
    return [fn(*moved).cpu(), fn(*arguments)]


@pytest.mark.gpu
@pytest.mark.usefixtures("_only_kernels")
@pytest.mark.parametrize("name", [name for name, unit in NAMED.items() if isinstance(unit, (TwoStep, BlockScaled))])
def test_units_on_a_gpu(name: str) -> None:
    unit = NAMED[name]
    assert unit.taken is not None
    for fmt in unit.taken:
        a, b = numbers((2, 130, 333), fmt, 2.0, 1e-5), numbers((2, 333, 150), fmt, 2.0, 1e-5)
        assert_same_bits(*_bits_of(torch.ops.qsim.accumulate, a, b, None, unit.spelled(fmt, fmt), 0, 0))


@pytest.mark.gpu
@pytest.mark.usefixtures("_only_kernels")
@pytest.mark.parametrize("name", SCALED)
def test_scales_on_a_gpu(name: str) -> None:
    accumulator, fmt, scale = SCALED[name]
    groups = -(-333 // accumulator.group)
    a, b = numbers((2, 130, 333), fmt, 1.0, 1e-5), numbers((2, 333, 150), fmt, 1.0, 1e-5)
    given = scales(65, groups, scale, 3.0, 1e-4, (2,)), scales(150, groups, scale, 3.0, 1e-4, (2,))
    how = accumulator.spelled(fmt, fmt)
    assert_same_bits(*_bits_of(torch.ops.qsim.accumulate_scaled, a, b, *given, [2, 1, 1, 1], None, how, 0, 0))
