"""Products of operands with scales along the sum: the operator against exact arithmetic."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

import qsim
from qsim import FivePoint, Stochastic
from qsim.accumulators import NAMED, BlockScaled, Promoted, Rounded
from qsim.formats import BF16, E2M1, E4M3, E8M0, Format
from support.points import in_order
from support.sum_oracle import Draw, exact_block_scaled_sum, exact_scaled_sum, indices

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


@pytest.mark.sampled(3)
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


UNITS: dict[str, tuple[BlockScaled, Format, Format]] = {
    "b200_nvfp4": (BlockScaled(64, 35, 16, "e4m3", exact=True, operands=("e2m1",)), E2M1, E4M3),
    "b200_mxfp4": (BlockScaled(64, 35, 16, exact=True, operands=("e2m1",)), E2M1, E8M0),
    "b200_mxfp8": (BlockScaled(32, 25, 32, operands=("e4m3", "e5m2", "e3m2", "e2m3", "e2m1")), E4M3, E8M0),
    "narrow": (BlockScaled(6, 7, 2, "e4m3", exact=True), E4M3, E4M3),
}


@pytest.mark.parametrize("spread", [0.0, 2.0, 30.0])
@pytest.mark.parametrize("name", UNITS)
def test_scales_inside_a_unit(name: str, spread: float) -> None:
    how, element, scale = UNITS[name]
    assert name == "narrow" or NAMED[name] == how
    low = element.grid.exponent
    for seed, length in enumerate((1, how.group, 2 * how.block + how.group + 1)):
        draw = torch.Generator().manual_seed(seed)
        a, b = (qsim.quantize(torch.randn(count, length, generator=draw) * 4, element) for count in (2, 3))
        groups = -(-length // how.group)
        spreads = (torch.exp2((torch.randn(count, groups, generator=draw) * spread).clamp(-60, 60)) for count in (2, 3))
        p, q = (qsim.quantize(x * torch.rand(x.shape, generator=draw), scale) for x in spreads)
        given = (a, b.t(), p, q, (1, 1, 1, 1), None, how.spelled(element, element), 0, 0)
        found = torch.ops.qsim.accumulate_scaled(*given)
        expected = [
            [exact_block_scaled_sum(how, row, column, x, y, (low, low)) for column, y in zip(b.tolist(), q.tolist(), strict=True)]
            for row, x in zip(a.tolist(), p.tolist(), strict=True)
        ]
        assert found.tolist() == expected, length


def test_a_layer_gives_a_unit_its_scales() -> None:
    x, w, g = torch.randn(4, 6, 96), torch.randn(32, 96), torch.randn(4, 6, 32)
    for block in ("mxfp8", "mxfp4", "nvfp4"):
        unit, element, _ = UNITS[f"b200_{block}"]
        leaf = x.clone().requires_grad_()
        y = qsim.nn.functional.linear(leaf, w, points=in_order(*[block] * 5, accumulate=f"b200_{block}"))
        (grad,) = torch.autograd.grad(y, leaf, g)
        for found, one, other in ((y, x, w), (grad, g, w.t())):
            (a, p, outer), (b, q, other_outer) = (_encoded(t.reshape(-1, t.shape[-1]).contiguous(), block) for t in (one, other))
            each = 96 // p.shape[1] // unit.group if one is x else 32 // p.shape[1] // unit.group
            given = (a, b.t(), p, q, (1, each, 1, each), None, unit.spelled(element, element), 0, 0)
            sums = torch.ops.qsim.accumulate_scaled(*given)
            assert torch.equal(found.view(-1, found.shape[-1]), sums * outer * other_outer), block
    with pytest.raises(RuntimeError, match="chip='require': no chip is known to add like this accumulator"):
        qsim.nn.functional.linear(
            x, w, points=FivePoint("mxfp8", "mxfp8", accumulate=("b200_mxfp8", None, None), chip="require", act_bwd=None, weight_bwd=None)
        )


def _encoded(x: Tensor, name: str) -> tuple[Tensor, Tensor, Tensor | float]:
    """The elements of a matrix, the scales of its blocks along the rows, and that of the whole."""
    spec, (codes, scales, outer) = qsim.scaling.block_formats.resolve(name), qsim.encode(x, name)
    return qsim.decode(codes, spec.element), qsim.decode(scales, spec.scale), 1.0 if outer is None else outer


def test_the_operator_is_one_for_torch_and_refuses_scales_that_do_not_fit() -> None:
    how = SUMS["stochastic"].spelled(BF16, BF16)
    a, b, p, q = torch.randn(2, 7), torch.randn(7, 3), torch.rand(2, 3), torch.rand(3, 3)
    torch.library.opcheck(torch.ops.qsim.accumulate_scaled.default, (a, b, p, q, [1, 1, 1, 1], torch.tensor(1), how, 0, 0))
    with pytest.raises(ValueError, match=r"scales_a must be float32 of shape \(2, 3\), got float32 of shape \(2, 2\)"):
        torch.ops.qsim.accumulate_scaled(a, b, p[:, :2], q, [1, 1, 1, 1], torch.tensor(1), how, 0, 0)
    with pytest.raises(ValueError, match=r"scales_b must be float32 of shape \(3, 3\), got float32 of shape \(3, 1\)"):
        torch.ops.qsim.accumulate_scaled(a, b, p, q[:, :1], [1, 1, 1, 1], torch.tensor(1), how, 0, 0)
    for other in (b[:6], b.expand(2, 7, 3)):
        with pytest.raises(ValueError, match=r"accumulate_scaled: cannot multiply shapes \(2, 7\) and"):
            torch.ops.qsim.accumulate_scaled(a, other, p, q, [1, 1, 1, 1], torch.tensor(1), how, 0, 0)
    with pytest.raises(ValueError, match="scales enter a promoted or a block-scaled sum, got 'aligned"):
        torch.ops.qsim.accumulate_scaled(a, b, p, q, [1, 1, 1, 1], None, NAMED["h100_bf16"].spelled(BF16, BF16), 0, 0)
