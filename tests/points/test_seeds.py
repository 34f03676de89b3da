"""Ready-made points in a layer draw from the layer's seed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import qsim
from qsim import FivePoint, Quantizer, points, recipes

STOCHASTIC = Quantizer("e2m1", "stochastic")


def layer(at: Any) -> qsim.nn.Linear:
    """A layer with points whose weights are the same every time."""
    found = qsim.nn.Linear(32, 32, points=at)
    torch.nn.init.constant_(found.weight, 0.3)
    return found


def gradients(rounded: qsim.nn.Linear) -> Tensor:
    """The gradient of the input, after torch's generator is seeded."""
    along = torch.rand(16, 32, generator=torch.Generator().manual_seed(2))
    torch.manual_seed(1)
    x = torch.full((16, 32), 0.7).requires_grad_()
    (rounded(x) * along).sum().backward()
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize("recipe", [recipes.quartet2(), recipes.tetrajet2(), recipes.four_over_six()], ids=lambda recipe: recipe.name)
def test_a_layer_draws_one_seed(recipe: recipes.Recipe) -> None:
    rounded = layer(recipe.points)
    torch.manual_seed(1)
    torch.randint(2**62, ())
    due = torch.get_rng_state()
    gradients(rounded)
    assert torch.equal(torch.get_rng_state(), due)


DRAWING = [
    points.StochasticScales("nvfp4"),
    points.Rotated(STOCHASTIC, qsim.transforms.Hadamard(16)),
    points.Channels("e4m3", STOCHASTIC, [0]),
]


@pytest.mark.parametrize("point", DRAWING, ids=lambda point: type(point).__name__)
def test_a_layer_repeats_and_others_differ(point: points.PointModule) -> None:
    at = FivePoint(grad=point)
    rounded = layer(at)
    assert torch.equal(gradients(rounded), gradients(rounded))
    assert not torch.equal(gradients(rounded), gradients(layer(at)))


class OwnNoise(points.PointModule):
    """A point whose `rounded` takes no seed."""

    gradient = "straight"

    def __init__(self) -> None:
        super().__init__()
        self.quantizer = STOCHASTIC

    def rounded(self, x: Tensor) -> Tensor:
        return self.quantizer(x)


def test_what_takes_no_seed_draws_its_own() -> None:
    assert not OwnNoise().is_stochastic
    assert points.DGE(STOCHASTIC).is_stochastic
    assert not points.DGE("e2m1").is_stochastic
    assert gradients(layer(FivePoint(grad=OwnNoise()))).isfinite().all()
