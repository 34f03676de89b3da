"""Statements of *Training with Fewer Bits* about the five points, tested on the layers: Equation 6, Lemmas 1 and 3."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

import qsim
from qsim import FivePoint, Fixed, Float, Quantizer
from qsim.formats import Format
from qsim.nn.product.tensors import WEIGHT
from qsim.random import Noise, seeds
from support.bounds import check_means, surprise_of_mean


def noisy(fmt: str | Format) -> Quantizer:
    return Quantizer(fmt, "stochastic")


# Equation 6.


class Attention(nn.Module):
    """Self-attention, two of whose products have no weight."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x, x, need_weights=False)[0]  # type: ignore[no-any-return]


class Net(NamedTuple):
    """Layers with points and non-linear ones between them, and the shape of one sample."""

    make: Callable[[], nn.Module]
    sample: tuple[int, ...]


NETS = {
    "mlp": Net(lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 4)), (6,)),
    "conv": Net(
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3), nn.GELU(), nn.MaxPool2d(2), nn.ConvTranspose2d(4, 3, 2), nn.SiLU(), nn.Flatten(), nn.Linear(27, 4)
        ),
        (2, 6, 6),
    ),
    "attention": Net(lambda: nn.Sequential(nn.Linear(5, 8), Attention(), nn.GELU(), nn.Linear(8, 4)), (3, 5)),
}
WEIGHTS = Float(4, 2)
NARROW = Float(4, 1)
SAMPLES, COPIES, GROUPS = 4, 256, 65


def gradients(net: nn.Module, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The output of a net, and the gradient of all its parameters as one row."""
    y = net(x)
    loss = (y - target).square().sum() / 2
    return y.detach(), torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(net.parameters()))])


def problem(net: Net) -> tuple[nn.Module, Tensor, Tensor]:
    """A net, samples and targets, in float64, so that only the points round."""
    model = net.make().double()
    x = torch.randn(SAMPLES, *net.sample, dtype=torch.float64)
    return model, x, model(x).detach() + torch.randn_like(model(x))


def at_rounded_weights(model: nn.Module, points: FivePoint) -> nn.Module:
    """The same net in full precision, with its weights replaced by their rounded values."""
    assert points.weight is not None
    full = qsim.revert(copy.deepcopy(model))
    with torch.no_grad():
        for name, weight in full.named_parameters():
            if weight.dim() > 1:
                layer = model.get_submodule(name.rpartition(".")[0])
                seed = seeds.weight_seed(weight, getattr(layer, "stream", 0))
                weight.copy_(points.weight(weight, seed=Noise(seed, WEIGHT)))
                assert not torch.equal(weight, model.get_parameter(name)), "the weights must move"
    return full


@pytest.mark.parametrize(
    ("net", "weight"),
    [
        pytest.param("mlp", "nearest", marks=pytest.mark.slow),
        ("mlp", "stochastic"),
        pytest.param("conv", "nearest", marks=pytest.mark.slow),
        pytest.param("attention", "nearest", marks=pytest.mark.slow),
    ],
)
def test_equation_6(net: str, weight: str) -> None:
    """The stochastic backward pass is unbiased: its mean is the full-precision gradient at the quantized weights.

    No input is rounded forward and the weights are rounded once, so every draw sees the same forward values. The derivatives of all layers
    without points follow from these: going back, a gradient only meets maps that are linear in it and the same in all draws. So
    rounding it without bias leaves it without bias from layer to layer, and as A is rounded with other random bits than ∇A, the mean of
    their product is the product of their means. With rounding to nearest, nothing cancels.

    Means of 256 draws are all but normal. `check_means` compares the mean of 65 such with Student's distribution, entry by entry, and fails
    for no reason once in a billion runs, for all entries together.
    """
    points = FivePoint(None, Quantizer(WEIGHTS, weight), act_bwd=noisy(NARROW), weight_bwd="same", grad=noisy(NARROW))
    model, x, target = problem(NETS[net])
    qsim.convert(model, points)
    y, exact = gradients(at_rounded_weights(model, points), x, target)

    # A group is one pass over many copies of the samples, each element with its own random bits: its gradient is the mean of as many draws.
    many, targets = x.repeat(COPIES, *[1] * (x.dim() - 1)), target.repeat(COPIES, *[1] * (target.dim() - 1))
    groups = []
    for _ in range(GROUPS):
        out, summed = gradients(model, many, targets)
        torch.testing.assert_close(out, y.repeat(COPIES, *[1] * (y.dim() - 1)), rtol=1e-12, atol=1e-12)
        groups.append(summed / COPIES)
    draws = torch.stack(groups)
    check_means(draws, exact)
    standard_error = draws.std(0).norm() / math.sqrt(GROUPS)
    assert (draws.mean(0) - exact).norm() < 3 * standard_error < 0.01 * exact.norm()

    qsim.convert(model, FivePoint(None, Quantizer(WEIGHTS, weight), act_bwd=NARROW, weight_bwd="same", grad=NARROW))
    _, nearest = gradients(model, x, target)
    assert (nearest - exact).norm() > 20 * standard_error


# Lemma 3.

BATCHES = [2**k for k in range(3, 11)]
WIDTHS = range(9)
INPUTS, HIDDEN, OUTPUTS = 16, 24, 8


class Errors(NamedTuple):
    """Mean squared rounding errors in the gradients of two layers' weights, and in the batch size times the gradient of the input."""

    first: float
    second: float
    a: float


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(INPUTS, HIDDEN, bias=False), nn.Tanh(), nn.Linear(HIDDEN, OUTPUTS, bias=False)).double()


def quantization_errors(model: nn.Module, mantissas: Sequence[int], batch: int, draws: int) -> list[Errors]:
    """The errors of two layers, the loss averaged over the batch, in the mean over samples and random bits; for each width.

    Eight bits of exponent: averaging divides the gradients by the batch, which then changes only their exponents. All widths see the same
    samples, and random bits that are the same too.
    """
    formats = [noisy(Float(8, mantissa)) for mantissa in mantissas]
    models = [qsim.convert(copy.deepcopy(model), FivePoint(act_bwd=fmt, grad=fmt)) for fmt in formats]
    squares = torch.zeros(len(models), 3, dtype=torch.float64)
    for draw in range(draws):
        torch.manual_seed(draw)
        x = torch.randn(batch, INPUTS, dtype=torch.float64, requires_grad=True)
        target = torch.randn(batch, OUTPUTS, dtype=torch.float64)

        def of(net: nn.Module, x: Tensor = x, target: Tensor = target, draw: int = draw) -> list[Tensor]:
            torch.manual_seed(draw)
            loss = (net(x) - target).square().sum(1).mean()
            first, second, a = torch.autograd.grad(loss, [*net.parameters(), x])
            return [first, second, a * batch]

        exact = of(model)
        squares += torch.tensor([[(own - due).square().mean() for own, due in zip(of(net), exact, strict=True)] for net in models])
    return [Errors(*row) for row in (squares / draws).tolist()]


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """The slope of the straight line that fits the logarithms of y best."""
    a, b = torch.tensor(x, dtype=torch.float64), torch.tensor(y, dtype=torch.float64).log2()
    a, b = a - a.mean(), b - b.mean()
    return float((a * b).sum() / a.square().sum())


@pytest.mark.slow
def test_lemma_3_batch_size() -> None:
    """The error that rounding makes in ∇W has a variance that falls as 1/b; that of ∇A, sample by sample, is the same for every b.

    ∇W is a mean over samples, each rounded with random bits of its own, so that errors cancel. ∇A has one row for each sample. The paper
    speaks of gradients of a sample's own loss; where the loss is a mean over b samples, these are b times what the layer sees.
    """
    model = two_layers()
    found = [quantization_errors(model, [2], batch, draws=48)[0] for batch in BATCHES]
    first, second, a = (slope([math.log2(b) for b in BATCHES], errors) for errors in zip(*found, strict=True))
    # Over 12 seeds, slopes varied by less than 0.01 around these.
    assert abs(first + 1) < 0.1
    assert abs(second + 1) < 0.1
    assert abs(a) < 0.1


@pytest.mark.slow
def test_lemma_3_mantissa() -> None:
    """Each mantissa bit less quadruples the variance, in ∇W and in ∇A: it is proportional to the square of the step."""
    found = quantization_errors(two_layers(), WIDTHS, batch=32, draws=96)
    for errors in zip(*found, strict=True):
        # Over 6 seeds, slopes were −1.986 to −2.002, and ratios 3.80 to 4.17: limits are twice as far.
        assert abs(slope(WIDTHS, errors) + 2) < 0.03
        for wide, narrow in zip(errors[1:], errors, strict=False):
            assert 3.6 < narrow / wide < 4.4


@pytest.mark.parametrize(
    "fmt", [NARROW, *(pytest.param(fmt, marks=pytest.mark.slow) for fmt in (qsim.format("e4m3"), Fixed(8, 4)))], ids=repr
)
def test_lemma_3_value(fmt: Format) -> None:
    """The variance is not only proportional to the paper's expression but equal to it: Equations 30 and 31, element by element.

    Rounding x stochastically between neighbours has the variance (high - x)(x - low). For samples k, ∇W is a mean of products of Â and Ĝ,
    and the errors of its two factors are independent of one another. Lemma 3's bound puts the step for its root.
    """
    batch, draws = 16, 201
    a, w, g = (torch.randn(*shape, dtype=torch.float64) for shape in ((batch, 20), (12, 20), (batch, 12)))
    a.requires_grad_()
    w.requires_grad_()
    points = FivePoint(act_bwd=noisy(fmt), grad=noisy(fmt))
    squares = []
    for _ in range(draws):
        grad_a, grad_w = torch.autograd.grad(qsim.nn.functional.linear(a, w, points=points), [a, w], g)
        squares.append(torch.stack([((grad_w - g.T @ a) / batch).square().mean(), (grad_a - g @ w).square().mean()]))

    low, high = ([qsim.quantize(x.detach(), fmt, rounding=side) for x in (a, g)] for side in ("down", "up"))
    of_a, of_g = ((up - x.detach()) * (x.detach() - down) for x, down, up in zip((a, g), low, high, strict=True))

    def lemma(of_a: Tensor, of_g: Tensor) -> Tensor:
        return (of_g.T @ a.square() + g.square().T @ of_a + of_g.T @ of_a).mean() / batch**2

    found = torch.stack(squares).detach()
    check_means(found, torch.stack([lemma(of_a, of_g), (of_g @ w.square()).mean()]).detach())
    assert found[:, 0].mean() < lemma(*((up - down).square() for down, up in zip(low, high, strict=True)))


# Lemma 1.

ROWS = 1000
SMOOTH: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], float]] = {
    "squares": (lambda z, target: (z - target).square() / 2, 1.0),
    "logistic": (lambda z, target: nn.functional.softplus(-z * target.sign()), 0.25),
}


def bias_of_weights(w: Tensor, x: Tensor, loss: str, fraction: int, rounding: str) -> Tensor:
    """For each row of weights, a problem of its own: how far rounding moves the gradient, as a share of Lemma 1's bound.

    The loss is the mean over samples of a function of x·w whose second derivative is at most the `curvature`: so the gradient's Lipschitz
    constant is that times the largest eigenvalue of xᵀx / b.
    """
    function, curvature = SMOOTH[loss]
    target = torch.randn(len(x), len(w), dtype=torch.float64)
    w = w.clone().requires_grad_()
    points = FivePoint(weight=Quantizer(Fixed(16, fraction), rounding), weight_bwd="same")
    rounded, exact = (
        torch.autograd.grad(function(qsim.nn.functional.linear(x, w, points=chosen), target).mean(0).sum(), w)[0]
        for chosen in (points, FivePoint())
    )
    smoothness = curvature * torch.linalg.eigvalsh(x.T @ x / len(x)).max()
    bound = smoothness * math.sqrt(w.shape[1]) * 2.0**-fraction * (0.5 if rounding == "nearest" else 1.0)
    return (rounded - exact).norm(dim=1) / bound


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("loss", SMOOTH)
def test_lemma_1(loss: str, rounding: str) -> None:
    """Rounded weights change the gradient by at most L√dΔ if they are rounded stochastically, and by half of that with nearest.

    No weight moves by more than a step, or half of one; the loss is L-smooth.
    """
    for fraction in (1, 4, 9):
        for inputs in (1, 8, 40):
            x = torch.randn(64, inputs, dtype=torch.float64)
            share = bias_of_weights(torch.randn(ROWS, inputs, dtype=torch.float64), x, loss, fraction, rounding)
            assert share.max() <= 1
            assert share.median() > 0.01


def test_lemma_1_is_sharp() -> None:
    """With weights just below the middle of a step and inputs that add up their errors, nearest rounding reaches its bound.

    Stochastic rounding goes beyond that, where two weights at a quarter of a step both go up: its own bound must be the larger one.
    """
    ones = torch.ones(4, 8, dtype=torch.float64)
    share = bias_of_weights(torch.full((ROWS, 8), 0.5 - 1e-6, dtype=torch.float64), ones, "squares", 0, "nearest")
    assert (share > 0.999).all()
    assert (share <= 1).all()
    share = bias_of_weights(torch.full((ROWS, 2), 0.25, dtype=torch.float64), ones[:, :2], "squares", 0, "stochastic")
    assert share.max() == pytest.approx(0.75)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("degrees", [2, 10, 64, 200])
def test_the_bound_of_means_bounds(degrees: int) -> None:
    # Compared with Student's density, summed up.
    t = torch.linspace(0, 400, 2**21, dtype=torch.float64)
    constant = math.exp(math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)) / math.sqrt(degrees * math.pi)
    for at in (3.0, 6.0, 9.0):
        beyond = t[t >= at]
        tail = 2 * torch.trapezoid(constant * (1 + beyond * beyond / degrees) ** (-(degrees + 1) / 2), beyond).item()
        assert tail <= surprise_of_mean(at, degrees) < 2 * tail
