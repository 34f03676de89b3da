"""Products of operands with scales along the sum: the operator against exact arithmetic."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

import qsim
from qsim import Stochastic
from qsim.accumulators import NAMED, Promoted, Rounded
from qsim.formats import BF16, E4M3
from support.sum_oracle import Draw, exact_scaled_sum, indices

SEED, STREAM, OFFSET = 7, 3, 16
SUMS = {
    "h100_fp8": Promoted("h100_fp8", 32),
    "rounded": Promoted(Rounded("fp16"), 5),
    "stochastic": Promoted(Rounded("bf16", rounding=Stochastic(3)), 3),
}


def scaled(how: Promoted, a: Tensor, b: Tensor, p: Tensor, q: Tensor, shared: Sequence[int] = (1, 1, 1, 1)) -> Tensor:
    result: Tensor = torch.ops.qsim.accumulate_scaled(a, b, p, q, shared, torch.tensor(SEED), how.spelled(E4M3, E4M3), STREAM, OFFSET)
    return result


def operands(rows: int, length: int, every: int, spread: float, seed: int) -> tuple[Tensor, Tensor]:
    """E4M3 numbers, and finite scales with many bits whose exponents are spread."""
    draw = torch.Generator().manual_seed(seed)
    x = qsim.quantize(torch.randn(rows, length, generator=draw) * 16, E4M3)
    chains = -(-length // every)
    exponents = (torch.randn(rows, chains, generator=draw) * spread).clamp(-120, 120)
    return x, torch.rand(rows, chains, generator=draw) * torch.exp2(exponents)


@pytest.mark.parametrize("spread", [0.0, 8.0, 60.0])
@pytest.mark.parametrize("name", SUMS)
def test_scaled_sums_are_those_of_exact_arithmetic(name: str, spread: float) -> None:
    how = SUMS[name]
    for seed, length in enumerate((0, 1, how.every, 2 * how.every + 1, 4 * how.every)):
        (a, p), (b, q) = operands(2, length, how.every, spread, seed), operands(3, length, how.every, spread, seed + 100)
        found = scaled(how, a, b.t(), p, q)
        each, chains = indices(how.inner, how.every), range(p.shape[1])
        for i, row in enumerate(a.tolist()):
            for j, column in enumerate(b.tolist()):
                draws = [
                    Draw(SEED, STREAM, OFFSET + k * 6 * each + (i * 3 + j) * indices(how.inner, min(how.every, length - k * how.every)))
                    for k in chains
                ]
                expected = exact_scaled_sum(how, row, column, p[i].tolist(), q[j].tolist(), (-6, -6), draws)
                assert found[i, j].item() == expected or (math.isnan(expected) and found[i, j].isnan()), (length, i, j)


def test_a_scaled_sum_rounds_once() -> None:
    # 1 + 2**-24 is halfway to the next float32; the product's last bits decide. Rounded twice, the sum would be 1.
    scale = torch.tensor([[1.0, 2.0**-24 * (1 + 2.0**-23)]])
    found = scaled(Promoted(Rounded("fp32"), 1), torch.ones(1, 2), torch.ones(2, 1), scale, torch.ones(1, 2))
    assert found.item() == 1 + 2.0**-23
    # The product of two scales is rounded before: 1 + 2**-23 squared is not 1 + 2**-22 + 2**-46.
    square = torch.full((1, 1), 1 + 2.0**-23)
    found = scaled(Promoted(Rounded("fp32"), 1), torch.full((1, 1), 1 + 2.0**-3), torch.ones(1, 1), square, square)
    assert found.item() == torch.tensor((1 + 2.0**-3) * (1 + 2.0**-22)).item()


def test_scales_of_one_change_nothing() -> None:
    a, b = operands(4, 300, 128, 0.0, 1)[0].view(2, 2, 300), operands(6, 300, 128, 0.0, 2)[0].view(2, 3, 300).mT
    how = NAMED["h100_fp8_promoted"]
    assert isinstance(how, Promoted)
    ones = torch.ones(2, 2, 3), torch.ones(2, 3, 3)
    assert torch.equal(scaled(how, a, b, *ones), torch.ops.qsim.accumulate(a, b, None, how.spelled(E4M3, E4M3), 0, 0))


def test_neighbours_share_scales() -> None:
    how = Promoted("h100_fp8", 32)
    (a, p), (b, q) = operands(5, 200, 64, 1.0, 1), operands(7, 200, 32, 1.0, 2)
    each = p[::2].repeat_interleave(2, 0)[:5].repeat_interleave(2, 1)[:, :7], q[::3].repeat_interleave(3, 0)[:7]
    assert torch.equal(scaled(how, a, b.t(), p[::2], q[::3], [2, 2, 3, 1]), scaled(how, a, b.t(), *each))


def test_the_operator_is_one_for_torch_and_refuses_scales_that_do_not_fit() -> None:
    how = SUMS["stochastic"].spelled(BF16, BF16)
    a, b, p, q = torch.randn(2, 7), torch.randn(7, 3), torch.rand(2, 3), torch.rand(3, 3)
    torch.library.opcheck(torch.ops.qsim.accumulate_scaled.default, (a, b, p, q, [1, 1, 1, 1], torch.tensor(1), how, 0, 0))
    with pytest.raises(ValueError, match=r"scales_a must be float32 of shape \(2, 3\), got \(2, 2\)"):
        torch.ops.qsim.accumulate_scaled(a, b, p[:, :2], q, [1, 1, 1, 1], torch.tensor(1), how, 0, 0)
    with pytest.raises(ValueError, match=r"scales_b must be float32 of shape \(3, 3\), got \(3, 1\)"):
        torch.ops.qsim.accumulate_scaled(a, b, p, q[:, :1], [1, 1, 1, 1], torch.tensor(1), how, 0, 0)
    with pytest.raises(ValueError, match="scales enter a promoted sum, got 'aligned"):
        torch.ops.qsim.accumulate_scaled(a, b, p, q, [1, 1, 1, 1], None, NAMED["h100_bf16"].spelled(BF16, BF16), 0, 0)
