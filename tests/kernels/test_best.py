"""The kernel that rounds under the better of two scales: equal to plain torch, bit for bit, also where float32 cannot decide."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from qsim.formats import E2M1, E4M3
from qsim.functional.arguments import spelling
from qsim.functional.scaled import numbers_of
from qsim.scaling import PerBlock, PerTile, Scaling
from qsim.transforms import Hadamard
from qsim_kernels.numbers.scales import Restore, ScaleRule, Scales, spell_scales
from qsim_kernels.ops.scaled import Implementation
from support.comparing import same_bits
from support.side_by_side import DEVICE

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

REFERENCE, KERNELS = Implementation("qsim_kernels.torch.scaling"), Implementation("qsim_kernels.triton.scaled.launch")
SCALES = spell_scales(Scales(int(ScaleRule.FIT), 0, E2M1.max, 1, E4M3.smallest, E4M3.grid))


def compare(x: Tensor, scaling: Scaling, rounding: str, choice: list[float], turn: Any = (), offset: int = 0) -> Tensor:
    """Both results, which are the same."""
    spelt, seed = spelling("e2m1", rounding, "saturate"), torch.tensor(5) if rounding == "stochastic" else None
    given = numbers_of(scaling.tiles(x.shape)), turn, *SCALES, choice, seed, spelt.grid, spelt.rule, 3, offset, x.dtype, int(Restore.ALL)
    expected, found = REFERENCE.quantize_best(x, None, *given), KERNELS.quantize_best(x.to(DEVICE), None, *given).cpu()
    assert same_bits(expected[~expected.isnan()], found[~expected.isnan()])
    assert torch.equal(expected.isnan(), found.isnan())
    return expected


def blocks(shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Blocks of many magnitudes."""
    torch.manual_seed(1)
    return (torch.randn(shape) * torch.logspace(-5, 1, shape[0])[:, None]).to(dtype)


def test_gradients_in_the_basis_of_a_transform() -> None:
    x = blocks((40, 48), torch.bfloat16)
    compare(x, PerBlock(16), "stochastic", [1.0, 256.0, 6.0, 4.0], Hadamard(16).turn(x.shape))


def test_stored_transposed() -> None:
    x = blocks((24, 32), torch.bfloat16).T.contiguous().T
    compare(x, PerBlock(16), "stochastic", [1.0, 256.0, 6.0, 4.0], Hadamard(16).turn(x.shape))


def test_ties_of_scales_and_of_errors() -> None:
    """Few significant bits: scales fall halfway between two, blocks have no error under either candidate, or the same one."""
    torch.manual_seed(0)
    x = torch.randint(-12, 13, (64, 32)) / 2.0 ** torch.randint(0, 9, (64, 1))
    x[0], x[1, :16], x[2, 0] = 0.0, 0.25, 12.0
    expected = compare(x.bfloat16(), PerBlock(16), "nearest", [1.0, 256.0, 6.0, 4.0])
    assert (expected == x).all(1).any()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("scaling", [PerBlock(16), PerTile(16, 16), PerBlock(16, 0), PerBlock(8)], ids=str)
def test_scales_errors_and_magnitudes(dtype: torch.dtype, scaling: Scaling) -> None:
    ordinary = blocks((48, 80), dtype)
    infinite = ordinary.clone()
    infinite[3, 3] = torch.inf
    cases = [ordinary, blocks((33, 50), dtype), infinite, torch.zeros_like(ordinary), ordinary * 1e-30, ordinary.clamp(-2, 2) * 2.0**100]
    for index, x in enumerate(cases):
        for rounding in ("nearest", "stochastic"):
            choice = [float(index % 2), (256.0, 448.0)[index // 2 % 2], *((6.0, 4.0) if index % 3 else (5.0, 6.0))]
            compare(x, scaling, rounding, choice, offset=8 * index)
    compare(ordinary, scaling, "nearest", [1.0, 256.0, 6.0])
    if scaling == PerBlock(16):
        compare(ordinary, scaling, "nearest", [1.0, 256.0, 6.0, 4.0], Hadamard(32).turn(ordinary.shape))
