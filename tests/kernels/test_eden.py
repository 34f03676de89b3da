"""The kernel that rounds under corrected scales: equal to plain torch, bit for bit, also where float32 cannot decide."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import qsim
from qsim.functional.arguments import spelling
from qsim.functional.scaled import numbers_of
from qsim.points import eden
from qsim.random import Noise
from qsim.scaling import PerBlock
from qsim.transforms import Hadamard
from qsim_kernels.numbers.scales import Restore
from qsim_kernels.ops.scaled import Implementation
from support.comparing import same_bits
from support.side_by_side import DEVICE

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

REFERENCE, KERNELS = Implementation("qsim_kernels.torch.scaling"), Implementation("qsim_kernels.triton.scaled.launch")


def compare(x: Tensor, *, size: int = 32, flips: Tensor | None = None, turn: Any = (), offset: int = 8) -> None:
    """Both results are the same."""
    spelt, correction = spelling("e2m1", "nearest", "saturate"), spelling("e4m3", "stochastic", "saturate").rule
    given = numbers_of(PerBlock(16).tiles(x.shape)), turn, *eden._MAKING, size, 255.99, correction
    rounding = torch.tensor(5), spelt.grid, spelt.rule, 3, offset, x.dtype, int(Restore.ALL)
    expected = REFERENCE.quantize_eden(x, flips, *given, *rounding)
    found = KERNELS.quantize_eden(x.to(DEVICE), None if flips is None else flips.to(DEVICE), *given, *rounding)
    assert found.stride() == torch.empty_like(x).stride()
    found = found.cpu()
    assert same_bits(expected[~expected.isnan()], found[~expected.isnan()])
    assert torch.equal(expected.isnan(), found.isnan())


def rows(count: int, least: float = -6.0) -> Tensor:
    """Rows of many magnitudes, one of zeros."""
    torch.manual_seed(2)
    x = torch.randn(count, 256) * torch.logspace(least, 2, count)[:, None]
    x[1] = -0.0
    return x


FLIPS = 1.0 - 2.0 * (torch.arange(32) % 3 == 0)


def test_in_the_basis_of_a_transform() -> None:
    x = rows(6).bfloat16()
    compare(x, flips=FLIPS, turn=Hadamard(32).turn(x.shape))


def test_stored_transposed() -> None:
    x = rows(24)[:, :64].bfloat16().T.contiguous().T
    compare(x, flips=FLIPS, turn=Hadamard(32).turn(x.shape))


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
        compare(x, offset=int(place))
    assert len(places) > 2


def test_corrected_scales_need_a_seed() -> None:
    x = rows(2)
    spelt, correction = spelling("e2m1", "nearest", "saturate"), spelling("e4m3", "stochastic", "saturate").rule
    given = numbers_of(PerBlock(16).tiles(x.shape)), (), *eden._MAKING, 32, 255.99, correction
    with pytest.raises(ValueError, match="stochastic rounding needs a seed"):
        torch.ops.qsim.quantize_eden(x, None, *given, None, spelt.grid, spelt.rule, 0, 0, x.dtype, int(Restore.ALL))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_dtypes_groups_and_magnitudes(dtype: torch.dtype) -> None:
    infinite = rows(6)
    infinite[2, 3] = torch.inf
    for x in (rows(6), rows(6, -35.0), rows(6) * 1e-38, infinite, rows(6)[:, :100], torch.zeros(2, 256), rows(80).T.contiguous().T):
        for size in (16, 32, 128):
            compare(x.to(dtype), size=size)
        compare(x.to(dtype), turn=Hadamard(32).turn(x.shape), offset=3)
        compare(x.to(dtype), flips=FLIPS[:16], turn=Hadamard(16).turn(x.shape))
