"""Kernels that choose scales in ways of their own: equal to plain torch, bit for bit, also where float32 cannot decide.

`best`: the better of two scales; `nested`: scales under those of groups; `eden`: scales corrected for the rounding below them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import qsim
from qsim.formats import E2M1, E4M3
from qsim.functional.arguments import spelling
from qsim.functional.scaled import numbers_of
from qsim.points import eden
from qsim.random import Noise
from qsim.scaling import PerBlock, PerRow, PerTile, Scaling
from qsim.transforms import Hadamard
from qsim_kernels.numbers.scales import Restore, ScaleRule, Scales, spell_scales
from qsim_kernels.ops.scaled import Implementation
from support.comparing import same_bits
from support.side_by_side import DEVICE

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

REFERENCE, KERNELS = Implementation("qsim_kernels.torch.scaling"), Implementation("qsim_kernels.triton.scaled.launch")
SCALES = spell_scales(Scales(int(ScaleRule.FIT), 0, E2M1.max, 1, E4M3.smallest, E4M3.grid))
BLOCKS, GROUPS = PerBlock(16), PerBlock(128)
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
Compare = Callable[..., Tensor]


def compare(name: str, x: Tensor, *given: Any) -> Tensor:
    """The result of an operator, which is the same by both implementations."""
    expected = getattr(REFERENCE, name)(x, *given)
    found = getattr(KERNELS, name)(*(each.to(DEVICE) if isinstance(each, Tensor) and each.dim() else each for each in (x, *given)))
    assert found.stride() == torch.empty_like(x).stride()
    assert same_bits(expected[~expected.isnan()], found.cpu()[~expected.isnan()])
    assert torch.equal(expected.isnan(), found.cpu().isnan())
    return expected  # type: ignore[no-any-return]


def noise(rounding: str, x: Tensor, offset: int) -> tuple[Any, ...]:
    """How elements are rounded, as operators take it."""
    spelt, seed = spelling("e2m1", rounding, "saturate"), torch.tensor(5) if rounding == "stochastic" else None
    return seed, spelt.grid, spelt.rule, 3, offset, x.dtype, int(Restore.ALL)


def by_best(
    x: Tensor, rounding: str = "stochastic", scaling: Scaling = BLOCKS, choice: Sequence[float] = (1.0, 256.0, 6.0, 4.0),
    *, turn: Any = (), flips: Tensor | None = None, offset: int = 8,
) -> Tensor:  # fmt: skip
    return compare("quantize_best", x, flips, numbers_of(scaling.tiles(x.shape)), turn, *SCALES, [*choice], *noise(rounding, x, offset))


def by_nested(
    x: Tensor,
    rounding: str = "stochastic",
    rule: Any = "ceil",
    groups: Scaling = GROUPS,
    *,
    turn: Any = (),
    flips: Tensor | None = None,
) -> Tensor:
    scaling = PerBlock(16, format="e4m3", rule=rule)
    making = turn, *scaling.spelling(qsim.format("e2m1")), numbers_of(groups.tiles(x.shape)), 6.0 * 448
    return compare("quantize_nested", x, flips, numbers_of(scaling.tiles(x.shape)), *making, *noise(rounding, x, 8))


def by_eden(x: Tensor, *, size: int = 32, turn: Any = (), flips: Tensor | None = None, offset: int = 8) -> Tensor:
    making = turn, *eden._MAKING, size, 255.99, spelling("e4m3", "stochastic", "saturate").rule
    _, *elements = noise("nearest", x, offset)
    return compare("quantize_eden", x, flips, numbers_of(PerBlock(16).tiles(x.shape)), *making, torch.tensor(5), *elements)


def rows(count: int, least: float = -6.0) -> Tensor:
    """Rows of many magnitudes, one of zeros."""
    torch.manual_seed(2)
    x = torch.randn(count, 256) * torch.logspace(least, 2, count)[:, None]
    x[1] = -0.0
    return x


FLIPS = 1.0 - 2.0 * (torch.arange(32) % 3 == 0)


@pytest.mark.parametrize(("quantize", "size"), [(by_best, 16), (by_nested, 16), (by_eden, 32)], ids=["best", "nested", "eden"])
def test_gradients_in_the_basis_of_a_transform_and_stored_transposed(quantize: Compare, size: int) -> None:
    largest = torch.full((1, 128), 3e38)
    near_the_largest = torch.cat([largest, largest.where(torch.arange(128) % 32 == 5, 1e30), largest / 10]).bfloat16()
    for x in (rows(6).bfloat16(), rows(24)[:, :64].bfloat16().T.contiguous().T, *near_the_largest.split(1)):
        quantize(x, flips=FLIPS[:size] if quantize is not by_best else None, turn=Hadamard(size).turn(x.shape))


def test_ties_of_scales_and_of_errors() -> None:
    """Few significant bits: scales fall halfway between two, blocks have no error under either candidate, or the same one."""
    torch.manual_seed(0)
    x = torch.randint(-12, 13, (64, 32)) / 2.0 ** torch.randint(0, 9, (64, 1))
    x[0], x[1, :16], x[2, 0] = 0.0, 0.25, 12.0
    assert (by_best(x.bfloat16(), "nearest") == x).all(1).any()


def test_where_float32_cannot_decide() -> None:
    """Random bits are those with which a slightly different correction would round another way."""
    torch.manual_seed(3)
    x = torch.randn(1, 32)
    groups = x.view(2, 16)
    amax = groups.abs().amax(1, keepdim=True)
    whole = amax.max() / 255.99 / eden._TARGET
    scales = qsim.quantize(amax / eden._TARGET / whole, "e4m3")
    quotients = (groups / (scales * whole)).double()
    corrected = scales[0] * (quotients.square().sum() / (quotients * qsim.quantize(quotients, "e2m1")).sum())
    below, above = (
        qsim.quantize((corrected * (1 + shift)).float().expand(2**18), "e4m3", "stochastic", seed=Noise(5, 3)) for shift in (-2e-6, 2e-6)
    )
    places = (below != above).nonzero()
    for place in places[:3]:
        by_eden(x, offset=int(place))
    assert len(places) > 2


def test_corrected_scales_need_a_seed() -> None:
    x = rows(2)
    making = (), *eden._MAKING, 32, 255.99, spelling("e4m3", "stochastic", "saturate").rule
    with pytest.raises(ValueError, match="stochastic rounding needs a seed"):
        torch.ops.qsim.quantize_eden(x, None, numbers_of(PerBlock(16).tiles(x.shape)), *making, *noise("nearest", x, 0))


def difficult(dtype: torch.dtype) -> list[Tensor]:
    infinite = rows(6)
    infinite[2, 3] = torch.inf
    cases = [rows(6), rows(6, -35.0), rows(6) * 1e-38, rows(6).clamp(-2, 2) * 2.0**100, infinite, rows(6)[:, :100], torch.zeros(2, 256)]
    return [x.to(dtype) for x in (*cases, rows(80).T.contiguous().T)]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scaling", [PerBlock(16), PerTile(16, 16), PerBlock(16, 0), PerBlock(8)], ids=str)
def test_best(dtype: torch.dtype, scaling: Scaling) -> None:
    for index, x in enumerate(difficult(dtype)):
        for rounding in ("nearest", "stochastic"):
            choice = [float(index % 2), (256.0, 448.0)[index // 2 % 2], *((6.0, 4.0) if index % 3 else (5.0, 6.0))]
            by_best(x, rounding, scaling, choice, offset=8 * index)
    by_best(x, "nearest", scaling, [1.0, 256.0, 6.0])
    if scaling == PerBlock(16):
        by_best(x, "nearest", turn=Hadamard(32).turn(x.shape))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nested(dtype: torch.dtype) -> None:
    for x in difficult(dtype):
        by_nested(x, "nearest", "fit")
        by_nested(x, "nearest", "fit", PerRow())
        by_nested(x, turn=Hadamard(16).turn(x.shape))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_eden(dtype: torch.dtype) -> None:
    for x in difficult(dtype):
        for size in (16, 32, 128):
            by_eden(x, size=size)
        by_eden(x, turn=Hadamard(32).turn(x.shape), offset=3)
        by_eden(x, flips=FLIPS[:16], turn=Hadamard(16).turn(x.shape))
