"""`gradient_error` on all kinds of models and points, and its errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qsim
from qsim import random
from qsim.diagnostics import gradient_error
from qsim.diagnostics.gradients.points import alone

pytestmark = pytest.mark.usefixtures("plain_arithmetic")

SR = qsim.Quantizer("e4m2", "stochastic")
TURNED = qsim.Quantizer("e4m2", "stochastic", transform="Hadamard(16)")


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def dense(points: Any) -> nn.Module:
    return qsim.convert(nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32)), points)


def batches(*shape: int, count: int = 4) -> list[Tensor]:
    return [torch.randn(shape) for _ in range(count)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("recipe", ["fp8_hybrid", "fp8_blockwise", "hfp8", "mxfp8", "mxfp6", "mxfp4", "nvfp4", "int8"])
def test_recipes_with_scales(recipe: str) -> None:
    model = dense(qsim.recipes.resolve(recipe))
    found = gradient_error(model, loss, batches(32, 32), draws=2)
    error = found.of("all")
    assert error.bias.value > 0 or error.rounding.value > 0
    assert error.rounding.value + abs(error.bias.value) < error.gradient.value, "the gradient is still one"
    assert {row["layer"] for row in found.rows()} == {"0", "2", "4", "all weights"}


def test_delayed_scales_follow_from_the_history_as_it_is() -> None:
    spec = qsim.Quantizer("e4m3", scale=qsim.scaling.Delayed(4))
    model = dense(qsim.FivePoint(act=spec, weight=spec, act_bwd="same", weight_bwd="same", grad=spec))
    given = batches(32, 32)
    # Everything saturates beyond the scales of so small a history.
    loss(model, given[0] * 1e-3).backward()
    saturated = gradient_error(model, loss, given, draws=2)
    for _ in range(4):
        loss(model, given[0]).backward()
    for point in ("act", "act_bwd", "all"):
        assert gradient_error(model, loss, given, draws=2).of(point).bias.value < 0.05 * saturated.of(point).bias.value


@pytest.mark.parametrize(
    ("points", "name", "due"),
    [
        (qsim.FivePoint(act=SR, weight=SR, act_bwd="same", weight_bwd="same", grad=SR), "weight_bwd", qsim.FivePoint(weight_bwd=SR)),
        (qsim.FivePoint(act=SR, act_bwd="same", grad=SR), "act", qsim.FivePoint(act=SR, act_bwd=None)),
        (qsim.FivePoint(act=SR, act_bwd=SR, grad=SR), "grad", qsim.FivePoint(grad=SR)),
    ],
)
def test_a_point_alone(points: qsim.FivePoint, name: str, due: qsim.FivePoint) -> None:
    assert alone(points, name) == due


def test_a_gradient_of_one_product_alone() -> None:
    """The gradient of one product is rounded, and the other's is that of full precision."""
    points = qsim.FivePoint(grad=SR, grad_w=qsim.Quantizer("e4m0", "stochastic"))
    found = gradient_error(dense(points), loss, batches(32, 32))
    # The last layer's own gradient only comes from the second product, the first layer's from both.
    assert found.of("grad", "4").rounding.value == 0.0
    assert abs(found.of("grad", "4").bias.value) < 1e-12
    assert found.of("grad", "0").rounding.value > 0
    assert found.of("grad_w", "4").rounding.low > 0
    assert found.of("all", "4").rounding.low > 0


def test_operands_that_are_transformed_stay_so() -> None:
    points = qsim.FivePoint(act=TURNED, weight=TURNED, act_bwd=TURNED, weight_bwd=TURNED, grad=TURNED)
    for name in ("act", "weight", "act_bwd", "weight_bwd", "grad"):
        quantizers = alone(points, name)
        assert getattr(quantizers, name) == (TURNED.as_gradient() if name == "grad" else TURNED)
    found = gradient_error(dense(points), loss, batches(32, 32))
    for name in ("act_bwd", "weight_bwd", "grad"):
        error = found.of(name)
        assert error.rounding.low > 0
        # The squared error of the mean of 4 batches, each drawn 8 times, is a 32nd of the variance; a thousand elements make that certain.
        assert abs(error.bias.value) < error.rounding.value / 8


def test_weights_are_drawn_again_where_the_shared_seed_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a distributed run, in which processes agree on it once."""
    monkeypatch.setattr(random, "shared_seed", lambda: 7)
    found = gradient_error(dense(qsim.FivePoint(weight=SR, weight_bwd=None)), loss, batches(32, 32), draws=3)
    assert found.of("weight").rounding.low > 0


def test_a_weight_that_two_layers_share_counts_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.out = nn.Embedding(10, 8), nn.Linear(8, 10, bias=False)
            self.out.weight = self.table.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.table(x))

    model = qsim.convert(Tied(), qsim.FivePoint(weight=SR, grad=SR, weight_bwd=None), embeddings=True)
    found = gradient_error(model, loss, [torch.randint(10, (16,)) for _ in range(4)], draws=2)
    one, other, together = (found.of("all", name).rounding.value for name in ("table", "out", "all weights"))
    assert one == other == together > 0


def test_attention_and_convolutions() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    attention = gradient_error(qsim.convert(layer, qsim.FivePoint(act_bwd=SR, grad=SR)), loss, batches(4, 5, 16), draws=2)
    assert attention.of("act_bwd", "self_attn").rounding.low > 0
    convolution = qsim.convert(nn.Sequential(nn.Conv2d(2, 4, 3)), qsim.FivePoint(act_bwd=SR, weight=SR, weight_bwd=None))
    assert gradient_error(convolution, loss, batches(8, 2, 6, 6), draws=2).of("act_bwd", "0").rounding.low > 0


def test_it_works_where_gradients_are_off_and_weights_are_frozen() -> None:
    model = dense(qsim.FivePoint(act_bwd=SR))
    model[0].weight.requires_grad_(False)
    with torch.no_grad():
        found = gradient_error(model, loss, batches(8, 32), draws=2)
    assert {error.layer for error in found} == {"2", "4", "all weights"}


def forgets(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean().detach()


@pytest.mark.parametrize(
    ("change", "kind", "wording"),
    [
        ({"model": nn.Linear}, TypeError, r"model must be a torch.nn.Module, got <class 'torch.nn"),
        ({"model": nn.Linear(32, 32)}, ValueError, r"no layer of the model has points: call qsim.convert on it first"),
        ({"model": qsim.convert(nn.Linear(32, 32), {"act": "e4m3"}).requires_grad_(False)}, ValueError, "no weight of a layer with points"),
        ({"model": nn.Sequential(dense({"act": "e4m3"}), nn.Dropout(0.5))}, ValueError, r"by noise other than rounding's: disable dropout"),
        (
            {"loss": lambda model, x: model(x)},
            ValueError,
            r"loss must return one differentiable number, got shape \(8, 32\), requires_grad=True",
        ),
        ({"loss": forgets}, ValueError, r"got shape \(\), requires_grad=False"),
        ({"loss": lambda model, x: 1.0}, ValueError, r"loss must return one differentiable number, got 1.0"),
        ({"batches": [torch.ones(8, 32)] * 2}, ValueError, "there must be 3 or more batches, to compute intervals, got 2"),
        ({"batches": [torch.ones(8, 32)] * 3 + [torch.ones(5, 32)]}, ValueError, "of one size, got 8 and, at index 3, 5: omit that"),
        ({"batches": [torch.ones(0, 32)] * 3}, ValueError, "batches must have samples, got batches of size 0"),
        ({"draws": 1}, ValueError, "draws must be 2 or more, to measure a variance, got 1"),
        ({"draws": 2.0}, TypeError, "draws must be an int, got 2.0"),
        ({"seed": "a"}, TypeError, "seed must be an int, got 'a'"),
        ({"level": 95}, ValueError, "level must be a probability between 0 and 1, got 95"),
    ],
)
def test_bad_input_raises_clear_errors(change: dict[str, Any], kind: type[Exception], wording: str) -> None:
    given: dict[str, Any] = {"model": dense({"act": "e4m3"}), "loss": loss, "batches": batches(8, 32)}
    with pytest.raises(kind, match=r"gradient_error: .*" + wording):
        gradient_error(**(given | change))


def test_sizes_of_batches_are_found_in_what_holds_them() -> None:
    model = dense({"act": "e4m3"})
    ways: list[Callable[[Tensor], Any]] = [lambda x: (x,), lambda x: {"x": x}, lambda x: [{"label": None, "x": (x,)}]]
    for way in ways:
        with pytest.raises(ValueError, match="batches must be of one size, got 8 and, at index 2, 4"):
            gradient_error(model, loss, [way(torch.ones(size, 32)) for size in (8, 8, 4)])
