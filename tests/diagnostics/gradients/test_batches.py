"""Tests that `batch_for` finds the batch of Lemma 3, and the error that no batch size removes."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import qsim
from qsim.diagnostics import BatchFactors, batch_for
from support import exact_gradients as exact
from support.bounds import check_means

pytestmark = pytest.mark.usefixtures("plain_arithmetic")

#: Onto the steps of `exact`.
STOCHASTIC, NEAREST = (qsim.Quantizer(qsim.Fixed(8, 2), rounding) for rounding in ("stochastic", "nearest"))
BACKWARD = qsim.FivePoint(act_bwd=STOCHASTIC, grad=STOCHASTIC)


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


@pytest.fixture
def model(generator: torch.Generator) -> nn.Linear:
    """A layer of 16ths that does not round yet."""
    made = nn.Linear(exact.INPUTS, exact.OUTPUTS, bias=False)
    with torch.no_grad():
        made.weight.copy_(exact.sixteenths(generator, *made.weight.shape))
    return qsim.convert(made, qsim.FivePoint())


def stochastic(mantissa: int) -> qsim.FivePoint:
    """Both operands of ∇W rounded to a number of bits, with enough exponent bits for anything here."""
    spec = qsim.Quantizer(qsim.Float(8, mantissa), "stochastic")
    return qsim.FivePoint(act_bwd=spec, grad=spec)


def test_the_factor_is_the_ratio_of_variances(model: nn.Linear, generator: torch.Generator) -> None:
    batches = exact.batches(6, generator)
    pairs = [(exact.fractions(x), exact.fractions(c)) for x, c in batches]
    sampling = exact.variance_between([exact.product(c, x) for x, c in pairs])
    rounding = sum(exact.lemma_3(x, c, True, True) for x, c in pairs) / 6
    found = [batch_for(model, exact.linear_loss, batches, BACKWARD, draws=3, seed=seed) for seed in range(41)]
    # In full precision nothing is random: the denominator is known as a fraction, so that the ratio has no bias either.
    assert found[0][0].like.value == pytest.approx(float(sampling), rel=1e-12)
    measured = torch.tensor([[own.factor.value, own[0].rounding.value] for own in found], dtype=torch.float64)
    check_means(measured, torch.tensor([float((sampling + rounding) / sampling), float(rounding)], dtype=torch.float64))


def test_the_same_points_need_the_same_batch(model: nn.Linear, generator: torch.Generator) -> None:
    batches = exact.batches(4, generator)
    alike = batch_for(model, exact.linear_loss, batches, None, None)
    assert (alike.factor.value, alike.factor.low, alike.factor.high) == (1.0, 1.0, 1.0)
    nearest = qsim.FivePoint(act_bwd=NEAREST)
    same = batch_for(model, exact.linear_loss, batches, nearest, nearest)
    assert same.factor.value == 1.0


@pytest.mark.slow
def test_a_bit_costs_at_most_four_times_the_batch(generator: torch.Generator) -> None:
    # Batches are almost identical: only rounding varies, and a factor of 4 is almost reached. The positions of 2048 numbers between their
    # neighbours determine it to 1.5 %: each one's `p (1 - p)` varies by 45 % around 1/6, for both operands, in both variances.
    net = qsim.convert(nn.Linear(32, 32, bias=False), qsim.FivePoint())
    x, c = (torch.rand(64, 32, generator=generator) + 1 for _ in range(2))
    batches = [(x + 1e-6 * torch.randn(x.shape, generator=generator), c) for _ in range(8)]
    found = batch_for(net, exact.linear_loss, batches, stochastic(4), stochastic(5), draws=16)
    assert found.bound == 4.0
    assert abs(found.factor.value - 4) < 6 * 0.015 * 4
    assert found.factor.low < 4 < found.factor.high < 1.3 * found.factor.low
    assert batch_for(net, exact.linear_loss, batches[:3], stochastic(2), stochastic(5), draws=2).bound == 64.0
    assert batch_for(net, exact.linear_loss, batches[:3], stochastic(2), None, draws=2).bound is None


def test_rounding_of_weights_counts_as_bias_not_as_variance(model: nn.Linear, generator: torch.Generator) -> None:
    points = qsim.FivePoint(weight=STOCHASTIC, weight_bwd=None)
    batches = exact.batches(64, generator)
    found = batch_for(model, exact.square_loss, batches, points)
    of_all = found[-1]
    assert of_all.rounding.value == 0.0, "one rounding of the weights serves all samples and draws"
    assert of_all.bias.low > 0
    assert "no batch size removes the bias: " in str(found)
    exact_one = batch_for(model, exact.square_loss, batches, None)
    assert exact_one[-1].bias.value == 0.0
    assert "no bias found" in str(exact_one)


def test_a_recipe_spares_the_first_and_the_last_layer(generator: torch.Generator) -> None:
    net = qsim.convert(nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))), qsim.FivePoint())
    recipe = qsim.recipes.Recipe("middle", stochastic(1), first=1, last=1)
    batches = [torch.randn(8, 8, generator=generator) for _ in range(4)]
    found = batch_for(net, lambda model, x: model(x).square().mean(), batches, recipe)
    rounding = {factor.layer: factor.rounding.value for factor in found}
    assert rounding["2"] == 0.0
    assert rounding["1"] > 0
    assert rounding["0"] > 0, "its gradient comes through the layer that rounds"
    assert found.points == str(recipe)


def test_results_become_tables_and_json(model: nn.Linear, generator: torch.Generator) -> None:
    found = batch_for(model, exact.linear_loss, exact.batches(4, generator), stochastic(1), stochastic(2))
    assert isinstance(found, BatchFactors)
    rows = json.loads(json.dumps(found.rows()))
    assert [row["layer"] for row in rows] == ["(the model)", "all weights"]
    assert rows[1]["factor_low"] <= rows[1]["factor"] == found.factor.value <= rows[1]["factor_high"]
    assert rows[1]["bound"] == 4.0
    lines = str(found).splitlines()
    assert lines[0].startswith("layer        batch ×")
    assert lines[3] == "points: act_bwd=Float(8, 1) Stochastic(), grad=Float(8, 1) Stochastic()"
    assert lines[6] == "Theorem 1: at most 4 times, 4 for each mantissa bit, to leading order"


def test_gradients_that_do_not_vary_are_refused(model: nn.Linear, generator: torch.Generator) -> None:
    batches = exact.batches(1, generator) * 3
    with pytest.raises(ValueError, match=r"batch_for: the gradient of \(the model\) does not vary under like: batches must differ"):
        batch_for(model, exact.linear_loss, batches, BACKWARD)


def test_gradients_that_overflow_are_refused(model: nn.Linear, generator: torch.Generator) -> None:
    batches = [tuple(part * torch.inf for part in batch) for batch in exact.batches(3, generator)]
    with pytest.raises(ValueError, match=r"batch_for: the gradient of \(the model\) has infinities or NaN under points"):
        batch_for(model, exact.linear_loss, batches, BACKWARD)


def narrow(exponent: int, mantissa: int = 1, **options: object) -> qsim.FivePoint:
    return qsim.FivePoint(grad=qsim.Quantizer(qsim.Float(exponent, mantissa), "stochastic", **options))  # type: ignore[arg-type]


def test_a_factor_that_does_not_hold_is_refused(generator: torch.Generator) -> None:
    net = qsim.convert(nn.Sequential(nn.Linear(16, 8)), qsim.FivePoint()).eval()
    batches = [torch.randn(64, 16, generator=generator) for _ in range(4)]

    def mean(scale: float) -> object:
        return lambda model, x: scale * model(x).square().mean()

    with pytest.raises(ValueError, match=r"batch_for: under points, \S+ % of the gradients at grad of layer '0' underflow: a larger batch"):
        batch_for(net, mean(1e-3), batches, narrow(4))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"batch_for: under like, .* multiply the loss by \d+ or more, or give them a scale"):
        batch_for(net, mean(1e-3), batches, None, narrow(4))  # type: ignore[arg-type]
    falls = r"batch_for: under points, the rounding variance does not fall with the batch: .* \d(\.\d+)? times as large, instead of 0.5"
    with pytest.raises(ValueError, match=falls):
        batch_for(net, mean(4.0), batches, narrow(4))  # type: ignore[arg-type]
    assert batch_for(net, lambda model, x: model(x).square().sum() / 128, batches, narrow(4)).factor.value > 1, "a sum does not shrink"
    for points in (narrow(8), narrow(4, scale="tensor")):
        assert batch_for(net, mean(1e-3), batches, points).factor.value > 1  # type: ignore[arg-type]
    assert batch_for(net, mean(2.0**10), batches, narrow(4)).factor.value > 1  # type: ignore[arg-type]


def test_points_that_layers_cannot_have_are_refused(generator: torch.Generator) -> None:
    net = qsim.convert(nn.Sequential(nn.Linear(8, 8)), qsim.FivePoint())
    delayed = qsim.FivePoint(act=qsim.Quantizer("e4m3", scale=qsim.scaling.Delayed(4)), act_bwd=None)
    batches = [torch.randn(8, 8) for _ in range(3)]
    with pytest.raises(ValueError, match="act has a delayed scale, for which there is no history yet"):
        batch_for(net, lambda model, x: model(x).sum(), batches, delayed)
    with pytest.raises(TypeError, match=r"a FivePoint, a recipe, a Quantizer or a format, .* a dictionary of its points or None, got 3"):
        batch_for(net, lambda model, x: model(x).sum(), batches, 3)  # type: ignore[arg-type]
