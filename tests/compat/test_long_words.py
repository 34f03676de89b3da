"""Words that are longer than float32's mantissa, in fixed point and in blocks."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from qsim.compat.qtorch import FixedPoint
from qsim.compat.qtorch.quant import block_quantize, fixed_point_quantize, quantizer
from support.bounds import check_share


def in_exact_words(x: Tensor, wl: int, fl: int, low: float, high: float) -> Tensor:
    """Round float32 to nearest in float64, where the division by a power of two is exact."""
    return (torch.round(x.double() * 2.0**fl) * 2.0**-fl).clamp(low, high).float()


def test_long_words_round_to_their_steps_and_to_limits_in_float32() -> None:
    """QPyTorch's limits; its values are compared in `test_installed.py`."""
    scale = 2.0 ** torch.arange(-24, 24).repeat(50)
    x = torch.cat([torch.randn(2400) * scale, torch.tensor([40000.0, -40000.0, 32767.998, 8388609.0, math.inf, -math.inf, math.nan])])
    for wl, fl, symmetric, top in [(26, 10, False, 2.0**15), (32, 16, False, 2.0**15), (32, 16, True, 2.0**15), (200, 20, True, math.inf)]:
        leaf = x.clone().requires_grad_()
        got = fixed_point_quantize(leaf, wl, fl, True, symmetric, "nearest")
        assert torch.equal(got[:-1], in_exact_words(x, wl, fl, -top, top)[:-1])
        assert got[-1].isnan()
        got.backward(x)
        assert leaf.grad is not None
        assert torch.equal(leaf.grad[:-3], x[:-3])
    assert torch.equal(fixed_point_quantize(x[:-1].double(), 40, 16, rounding="nearest").abs().max(), torch.tensor(2.0**23).double())
    assert FixedPoint(40, 16).limits(torch.float64) == (-(2.0**23), 2.0**23 - 2.0**-16)
    quant = quantizer(FixedPoint(32, 16), forward_rounding="nearest", clamping_grad_zero=True)
    leaf = torch.tensor([0.3, 32768.0, 32772.0], requires_grad=True)
    quant(leaf).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [1.0, 1.0, 0.0]


def test_long_words_in_blocks_are_rounded_once() -> None:
    """Steps of `2**(e + 2 - wl)` in a block whose largest magnitude has exponent `e`; QPyTorch shifts by negative numbers of bits there."""
    x = torch.randn(6, 400) * 2.0 ** torch.randint(-40, 1, (6, 400))
    x[4] *= 2.0**126
    x[5] *= 2.0**-100
    for wl, dim in ((26, -1), (26, 0), (30, 1), (60, 0), (256, 0)):
        leaf = x.clone().requires_grad_()
        got = block_quantize(leaf, wl, dim, "nearest")
        largest = x.double().abs().amax([d for d in (0, 1) if d != dim], keepdim=True)
        steps = 2.0 ** (torch.floor(torch.log2(largest)) + 2 - wl)
        assert torch.equal(got.double(), torch.round(x.double() / steps) * steps)
        drawn = block_quantize(x, wl, dim).double()
        assert ((drawn - x.double()).abs() < steps).all()
        got.backward(x)
        assert leaf.grad is not None
        assert torch.equal(leaf.grad, x)
    x[0, 0], x[1, 0], x[2] = math.nan, math.inf, 0.0
    got = block_quantize(x, 26, 0, "nearest")
    assert got.isnan().all(1).tolist() == [True, True, False, False, False, False]
    assert got[2].eq(0).all()
    assert block_quantize(torch.tensor([1.9999999999, 2.0**-40], dtype=torch.float64), 33, rounding="nearest").tolist() == [
        2 - 2.0**-31,
        0.0,
    ]
    assert block_quantize(torch.ones(3, 0), 26, 0).shape == (3, 0)


def test_long_words_are_unbiased() -> None:
    x, count = 0.25 + 2.0**-24, 2**16
    ones = torch.full((count,), x)
    check_share(int((fixed_point_quantize(ones, 40, 23) > x).sum()), count, 0.5)
    block = torch.cat([ones * 2.0**-2, torch.tensor([1.5])])
    check_share(int((block_quantize(block, 27)[:-1] > x * 2.0**-2).sum()), count, 0.5)
