"""DGE against the derivative of its paper's function, and QuEST's grid and mask against its definition, written here in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.stats import norm
from torch import Tensor

import qsim
from qsim.points import DGE, LSQ, GaussianGrid, TrustMask
from support.comparing import same_bits

E2M1 = [-6.0, -4.0, -3.0, -2.0, -1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def smooth(x: np.ndarray, k: float) -> np.ndarray:
    """Equation 7 of arXiv 2501.17116 in every interval of E2M1: the differentiable function that stands in for rounding."""
    low = np.array([max(value for value in E2M1 if value <= number) for number in x])
    width = np.array([min(value for value in E2M1 if value > number) for number in x]) - low
    position = 2 * (x - low) / width - 1
    return low + width / 2 * (1 + np.sign(position) * np.abs(position) ** (1 / k))


@pytest.mark.parametrize("k", [2.0, 3.0, 5.0])
def test_dges_slope_is_that_of_the_papers_function(k: float) -> None:
    x = torch.linspace(-5.99, 5.99, 1201, dtype=torch.float64)
    # Differences are taken neither across the ends of intervals nor near their middles, where the slope has no bound.
    table = np.array(E2M1)
    special = np.concatenate([table, (table[1:] + table[:-1]) / 2])
    x = x[np.abs(x.numpy()[:, None] - special).min(1) > 1e-3].requires_grad_()
    point = DGE("e2m1", k=k, cap=1e9)
    point(x).sum().backward()
    numbers, step = x.detach().numpy(), 1e-7
    due = (smooth(numbers + step, k) - smooth(numbers - step, k)) / (2 * step)
    np.testing.assert_allclose(x.grad.numpy(), due, rtol=1e-3)  # type: ignore[union-attr]


def test_dge_rounds_as_its_quantizer_and_multiplies_the_gradient_by_the_capped_slope() -> None:
    x = torch.tensor([0.0, 0.25, 0.26, 5.0, 6.0, 7.0, -0.25, math.inf], requires_grad=True)
    upstream = torch.full((8,), 2.0)
    y = DGE("e2m1")(x)
    y.backward(upstream)
    assert same_bits(y, qsim.quantize(x, "e2m1"))
    # At values of the format 1/k, at most 3, and 1/k beyond the largest value.
    due = [0.2, 3.0, 0.2 * 0.04**-0.8, 3.0, 0.2, 0.2, 3.0, 0.2]
    torch.testing.assert_close(x.grad, 2 * torch.tensor(due), rtol=1e-4, atol=0)


def test_dge_scales_its_intervals() -> None:
    x = torch.randn(8, 16, dtype=torch.float64)
    x[:, 0] = 6.0
    scale = 2.0 ** torch.arange(-4, 4, dtype=torch.float64).view(-1, 1)
    plain, scaled = x.clone().requires_grad_(), (x * scale).requires_grad_()
    DGE("e2m1")(plain).sum().backward()
    DGE(qsim.Quantizer("e2m1", scale=qsim.scaling.PerAxis(0)))(scaled).sum().backward()
    torch.testing.assert_close(scaled.grad, plain.grad)
    assert len(plain.grad.unique()) > 50  # type: ignore[union-attr]


def test_dge_rounds_stochastically_with_the_same_slopes() -> None:
    x, other = (torch.linspace(-6, 6, 101).requires_grad_() for _ in range(2))
    y = DGE(qsim.Quantizer("e2m1", "stochastic"))(x, seed=1)
    y.sum().backward()
    DGE("e2m1")(other).sum().backward()
    assert same_bits(y, qsim.quantize(x, "e2m1", "stochastic", seed=1))
    assert same_bits(x.grad, other.grad)  # type: ignore[arg-type]


#: The ranges of QuEST's code, in units of the root mean square.
RANGES = {1: 0.7978845587140913, 2: 1.4935346200015913, 4: 2.513930578568423, 8: 3.884938678807525}


def quest(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """QuEST's projection and mask: arXiv 2502.05003, section 3, with the range of the least mean squared error."""
    spread, best = x.square().mean(-1, keepdim=True).sqrt(), RANGES[bits]
    step = 2 * best * spread / (2**bits - 1)
    clipped = x.clamp(-best * spread, best * spread)
    values = (torch.floor(clipped / step).clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) + 0.5) * step
    return values, (values - x).abs() <= step / 2 * (1 + 1e-9)


def mean_squared_error(bits: int, reach: float) -> float:
    """The error of a grid of `2**bits` levels in `[-reach, reach]` for a standard normal variable, by integration."""
    x = np.linspace(-9, 9, 20_001)
    step = 2 * reach / (2**bits - 1)
    levels = np.clip(np.floor(x / step), -(2 ** (bits - 1)), 2 ** (bits - 1) - 1) + 0.5
    return float(((levels * step - x) ** 2 * norm.pdf(x)).sum() * (x[1] - x[0]))


def best_reach(bits: int) -> float:
    """The range of the least error, by ternary search."""
    low, high = 0.5, 5.0
    for _ in range(30):
        third = (high - low) / 3
        if mean_squared_error(bits, low + third) < mean_squared_error(bits, high - third):
            high -= third
        else:
            low += third
    return low


@pytest.mark.parametrize("bits", RANGES)
def test_quests_values_and_mask_are_those_of_the_paper(bits: int) -> None:
    x, upstream = torch.randn(50, 64, dtype=torch.float64), torch.randn(50, 64, dtype=torch.float64)
    x = (x * torch.logspace(-3, 3, 50, dtype=torch.float64).view(-1, 1)).requires_grad_()
    y = TrustMask.quest(bits)(x)
    y.backward(upstream)
    values, mask = quest(x.detach(), bits)
    torch.testing.assert_close(y, values)
    assert torch.equal(x.grad, upstream * mask)  # type: ignore[arg-type]
    assert bits == 8 or 0.3 < mask.double().mean() < 1


@pytest.mark.parametrize("bits", RANGES)
def test_quests_grid_has_almost_the_least_error_for_normal_values(bits: int) -> None:
    x = torch.randn(2000, 512, generator=torch.Generator().manual_seed(0))
    least = mean_squared_error(bits, best_reach(bits))
    assert mean_squared_error(bits, RANGES[bits]) < 1.002 * least
    # Root mean squares of 512 values deviate by 3 %, which costs a few per cent of the error at 8 bits.
    assert (GaussianGrid(bits)(x) - x).square().mean().item() == pytest.approx(least, rel=0.1)


def test_the_mask_is_of_any_point() -> None:
    x = torch.tensor([[0.3, 0.1, 5.0], [0.03, 0.01, 0.5]], requires_grad=True)
    y = TrustMask(lambda x: x.round(), trust=0.05)(x)
    y.sum().backward()
    assert torch.equal(y, x.detach().round())
    spread = x.detach().square().mean(-1, keepdim=True).sqrt()
    assert torch.equal(x.grad, ((x.detach().round() - x.detach()).abs() <= 0.05 * spread).float())  # type: ignore[arg-type]


def test_a_masked_modules_parameters_learn() -> None:
    point = TrustMask(LSQ("int4", step=0.25), trust=0.1)
    point(torch.randn(100)).sum().backward()
    assert [name for name, parameter in point.named_parameters() if parameter.grad is not None] == ["point.change"]


def test_gradients_are_masked_in_the_basis_of_a_transform_around_the_point() -> None:
    hadamard, point = qsim.transforms.Hadamard(16), TrustMask.quest(2)
    x, upstream = torch.randn(4, 16, dtype=torch.float64, requires_grad=True), torch.randn(4, 16, dtype=torch.float64)
    hadamard.inverse(point(hadamard(x))).backward(upstream)
    turned = hadamard(x.detach()).requires_grad_()
    point(turned).backward(hadamard(upstream))
    torch.testing.assert_close(x.grad, hadamard.inverse(turned.grad))  # type: ignore[arg-type]


def test_a_grid_of_zeros_is_zero() -> None:
    assert torch.equal(GaussianGrid(4)(torch.zeros(3)), torch.zeros(3))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DGE("e2m1", k=0), "DGE: k must be greater than 0"),
        (lambda: DGE("e2m1", cap=-1.0), "DGE: cap must be greater than 0"),
        (lambda: DGE(None), "DGE: a format or a qsim.Quantizer is needed, got None"),
        (lambda: DGE(qsim.Quantizer("e2m1", transform=qsim.transforms.Hadamard(16))), "DGE: apply Hadamard"),
        (lambda: GaussianGrid(9), "GaussianGrid: bits must be in 1…8, got 9"),
        (lambda: TrustMask("e2m1", trust=0.0), "TrustMask: trust must be greater than 0"),
        (lambda: TrustMask("e2m1", trust="half"), "TrustMask: trust must be a number, got 'half'"),
        (lambda: TrustMask("nothing", trust=1.0), "TrustMask: unknown format 'nothing'"),
    ],
)
def test_errors_say_what_is_wrong(make: object, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        make()  # type: ignore[operator]


def test_an_error_at_the_border_is_trusted() -> None:
    """The root mean square is 1, and all numbers here are exact."""
    for shift, gradient in ((0.25, 1.0), (0.25 + 2**-20, 0.0)):
        x = torch.tensor([1.0, -1.0, 1.0, 1.0], requires_grad=True)
        TrustMask(lambda x, shift=shift: x + shift, trust=0.25)(x).sum().backward()
        assert torch.equal(x.grad, torch.full((4,), gradient))  # type: ignore[arg-type]
