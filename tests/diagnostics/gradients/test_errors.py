"""`gradient_error` compared with theory, computed in fractions."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor, nn

import qsim
from qsim.diagnostics import Estimate, GradientError, GradientErrors, gradient_error
from support import exact_gradients as exact
from support.bounds import check_means

pytestmark = pytest.mark.usefixtures("plain_arithmetic")

COUNT, SEEDS = 6, 21
#: Onto the steps of `exact`.
STOCHASTIC, NEAREST = (qsim.Quantizer(qsim.Fixed(8, 2), rounding) for rounding in ("stochastic", "nearest"))
BACKWARD = qsim.FivePoint(act_bwd=STOCHASTIC, grad=STOCHASTIC)


def layer(points: qsim.FivePoint, generator: torch.Generator) -> nn.Linear:
    """A layer of 16ths."""
    made = nn.Linear(exact.INPUTS, exact.OUTPUTS, bias=False)
    with torch.no_grad():
        made.weight.copy_(exact.sixteenths(generator, *made.weight.shape))
    return qsim.convert(made, points)


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def repeated(model: nn.Module, loss: object, batches: list[tuple[Tensor, Tensor]], point: str) -> Tensor:
    """Bias, sampling and rounding at a point, from many seeds."""
    errors = [gradient_error(model, loss, batches, draws=3, seed=seed).of(point) for seed in range(SEEDS)]
    return torch.tensor([[e.bias.value, e.sampling.value, e.rounding.value] for e in errors], dtype=torch.float64)


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("point", "of_x", "of_c"), [("all", True, True), ("act_bwd", True, False), ("grad", False, True)])
def test_the_way_back_has_the_variance_of_lemma_3_and_no_bias(point: str, of_x: bool, of_c: bool, generator: torch.Generator) -> None:
    batches = exact.batches(COUNT, generator)
    pairs = [(exact.fractions(x), exact.fractions(c)) for x, c in batches]
    rounding = sum(exact.lemma_3(x, c, of_x, of_c) for x, c in pairs) / COUNT
    sampling = exact.variance_between([exact.product(c, x) for x, c in pairs])
    due = torch.tensor([0.0, float(sampling), float(rounding)], dtype=torch.float64)
    check_means(repeated(layer(BACKWARD, generator), exact.linear_loss, batches, point), due)


def test_weights_rounded_stochastically_are_drawn_again(generator: torch.Generator) -> None:
    batches = exact.batches(COUNT, generator)
    model = layer(qsim.FivePoint(weight=STOCHASTIC, weight_bwd=None), generator)
    inputs = [exact.product(exact.fractions(x), exact.fractions(x)) for x, _ in batches]
    weight = exact.fractions(model.weight)
    # The gradient is Ŵ XᵀX: an error of one element of Ŵ affects a row of it, times a row of XᵀX.
    of_rows = [sum(exact.variance_of_rounding(row[k]) for row in weight) for k in range(exact.INPUTS)]
    rounding = sum(of_rows[k] * exact.norm([own[k]]) for own in inputs for k in range(exact.INPUTS)) / COUNT
    sampling = exact.variance_between([exact.product(exact.transposed(weight), own) for own in inputs])
    due = torch.tensor([0.0, float(sampling), float(rounding)], dtype=torch.float64)
    check_means(repeated(model, exact.square_loss, batches, "weight"), due)


def test_weights_rounded_to_nearest_leave_a_bias_and_no_variance(generator: torch.Generator) -> None:
    batches = exact.batches(COUNT, generator)
    model = layer(qsim.FivePoint(weight=NEAREST, weight_bwd=None), generator)
    weight = exact.fractions(model.weight)
    rounded = exact.fractions(NEAREST(model.weight.detach()))
    inputs = [exact.product(exact.fractions(x), exact.fractions(x)) for x, _ in batches]
    means = [exact.product(exact.transposed(rounded), own) for own in inputs]
    offs = [exact.minus(mean, exact.product(exact.transposed(weight), own)) for mean, own in zip(means, inputs, strict=True)]
    found = gradient_error(model, exact.square_loss, batches, draws=2).of("weight")
    # Nothing is random here and everything is exact in float32, so the numbers equal the fractions.
    assert found.bias.value == pytest.approx(float(exact.mean_product(offs)), rel=1e-12)
    assert found.sampling.value == pytest.approx(float(exact.variance_between(means)), rel=1e-12)
    assert (found.rounding.value, found.rounding.low, found.rounding.high) == (0.0, 0.0, 0.0)


@pytest.mark.slow
def test_intervals_contain_the_result_of_many_batches(generator: torch.Generator) -> None:
    """The interval is for the distribution of batches, not for the given ones, so batches have to be drawn again."""
    model = layer(BACKWARD, generator)
    a_sixteenth = [exact.Fraction(k, 16) for k in range(-32, 33)]
    second = sum(a * a for a in a_sixteenth) / 65
    variance = sum(map(exact.variance_of_rounding, a_sixteenth)) / 65
    # Means of x and c are zero, so second moments multiply for each element and each sample.
    terms = exact.INPUTS * exact.OUTPUTS * exact.SAMPLES
    due = {"bias": 0.0, "sampling": float(second**2 * terms), "rounding": float((2 * second * variance + variance**2) * terms)}
    trials, covered = 50, dict.fromkeys(due, 0)
    for seed in range(trials):
        error = gradient_error(model, exact.linear_loss, exact.batches(10, generator), draws=2, seed=seed).of("all")
        for name, number in due.items():
            covered[name] += getattr(error, name).low <= number <= getattr(error, name).high
    # With a coverage of 0.92, fewer occur by chance less than once in 10 million times: exp(-50 * KL(0.62, 0.92)) by Chernoff's bound.
    assert min(covered.values()) >= 0.62 * trials, covered


def test_results_become_tables_json_and_figures(generator: torch.Generator) -> None:
    model = nn.Sequential(layer(BACKWARD, generator), nn.Linear(exact.OUTPUTS, exact.OUTPUTS))
    found = gradient_error(model, exact.linear_loss, exact.batches(3, generator), draws=2)
    assert isinstance(found, GradientErrors)
    assert [(e.layer, e.point) for e in found] == [
        (layer, point) for layer in ("0", "all weights") for point in ("none", "act_bwd", "grad", "all")
    ]
    rows = json.loads(json.dumps(found.rows()))
    assert rows[1]["rounding_low"] <= rows[1]["rounding"] == found.of("act_bwd", "0").rounding.value <= rows[1]["rounding_high"]
    assert (rows[1]["batches"], rows[1]["draws"], rows[1]["level"]) == (3, 2, 0.95)
    lines = str(found).splitlines()
    assert lines[0].split() == ["layer", "point", "|bias|²", "sampling", "rounding", "|gradient|²"]
    assert len(lines) == 1 + len(rows) + 1
    assert str(found.of("grad").rounding) in lines[7]
    with pytest.raises(KeyError, match="no layer '1': there are '0', 'all weights'"):
        found.of("grad", "1")


def test_a_table_can_begin_with_what_is_worst() -> None:
    def error(layer: str, bias: float, rounding: float, gradient: float) -> GradientError:
        return GradientError(layer, "grad", *(Estimate(x, x, x) for x in (bias, 1.0, rounding, gradient)))

    found = GradientErrors((error("a", 2.0, 1.0, 4.0), error("b", 1.0, 9.0, 1.0), error("c", 0.0, 3.0, 100.0)), 2, 2, 0.95)
    assert [e.layer for e in found.worst("bias")] == ["b", "a", "c"]
    assert [e.layer for e in found.worst("rounding")] == ["b", "a", "c"]
    assert [e.layer for e in found.worst("sampling")] == ["b", "a", "c"]
    assert [line.split()[0] for line in found.table("rounding", rows=2).splitlines()[1:-1]] == ["b", "a"]
    assert [line.split()[0] for line in str(found).splitlines()[1:-1]] == ["a", "b", "c"]
    with pytest.raises(ValueError, match="by: must be one of bias, sampling, rounding; got 'variance'"):
        found.table("variance")


def test_the_figure_shows_what_was_found(generator: torch.Generator) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    found = gradient_error(layer(BACKWARD, generator), exact.linear_loss, exact.batches(8, generator), draws=2)
    ax = found.plot()
    assert [tick.get_text() for tick in ax.get_xticklabels()] == ["none", "act\n_bwd", "grad", "all"]
    shown = {bars.get_label(): [bar.get_height() for bar in bars] for bars in ax.containers if hasattr(bars, "patches")}
    norm = found.of("none").gradient.value
    assert shown["variance of sampling"] == pytest.approx([e.sampling.value / norm for e in found if e.layer == "all weights"])
    assert len(shown["variance of rounding"]) == 3, "full precision has no rounding to show"
    assert ax.get_yscale() == "log"
    assert found.plot(ax, "(the model)") is ax
    matplotlib.pyplot.close(ax.figure)
