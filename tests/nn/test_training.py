"""Training of a small net on scikit-learn's digits: in FP8, stochastically with few bits, and where rounding to nearest fails."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import nn

import qsim
from qsim import FivePoint, Float, Quantizer
from support.digits import conv, digits

pytestmark = pytest.mark.slow

E4M0, E4M1 = Float(4, 0), Float(4, 1)
POINTS = {
    "native": FivePoint(),
    # FP8 as in hardware: E4M3 in the forward pass, E5M2 for gradients, everything rounded to nearest.
    "hybrid": FivePoint("e4m3", "e4m3", act_bwd="same", weight_bwd="same", grad="e5m2"),
    # Figure 3 of *Training with Fewer Bits*.
    "stochastic": FivePoint(None, E4M1, act_bwd=Quantizer(E4M1, "stochastic"), weight_bwd="same", grad=Quantizer(E4M1, "stochastic")),
    "E4M0 nearest": FivePoint(act_bwd=E4M0, grad=E4M0),
    "E4M0 stochastic": FivePoint(act_bwd=Quantizer(E4M0, "stochastic"), grad=Quantizer(E4M0, "stochastic")),
}


def train(points: str, seed: int, batch: int, steps: int) -> tuple[nn.Module, nn.Module]:
    """A net before and after training by SGD with momentum and a learning rate that decays to zero; the seed determines everything."""
    x, y, _, _ = digits()
    torch.manual_seed(seed)
    start, model = conv(), conv()
    model.load_state_dict(start.state_dict())
    qsim.convert(model, POINTS[points])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    for _ in range(steps):
        chosen = torch.randint(len(y), (batch,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[chosen]), y[chosen]).backward()
        optimizer.step()
        schedule.step()
    return start, model


def accuracy(model: nn.Module) -> float:
    """The share of test images that a net with its points classifies correctly."""
    _, _, x, y = digits()
    with torch.no_grad():
        return (model(x).argmax(1) == y).double().mean().item()


@cache
def accuracies(points: str, batch: int, steps: int, seeds: int) -> list[float]:
    """Accuracies in percent, one for each seed."""
    return [100 * accuracy(train(points, seed, batch, steps)[1]) for seed in range(seeds)]


# Percent of 899 test images, mean and standard deviation over seeds 0 to 11 (300 steps of 64 images); how far below native, seed by seed:
#
#   native         hybrid         below native    stochastic     below native
#   96.59 ± 0.54   96.52 ± 0.42   0.06 ± 0.42     95.90 ± 0.74   0.69 ± 0.79
#
# The test takes the mean over two seeds, which divides deviations by √2. 1.5 percent below native is (1.5 − 0.06) / 0.30 = 4.8 of them away
# from hybrid, and 3.5 percent (3.5 − 0.69) / 0.56 = 5.0 from stochastic. Another build of torch, whose sums differ in their last bits, is
# like another seed. Native nets are to reach 94 percent: 6.7 deviations away.
SEEDS = 2


@pytest.mark.parametrize(("points", "margin"), [("hybrid", 1.5), ("stochastic", 3.5)])
def test_reaches_native_accuracy(points: str, margin: float) -> None:
    native, found = (accuracies(chosen, 64, 300, SEEDS) for chosen in ("native", points))
    assert sum(native) / SEEDS > 94, native
    assert sum(found) / SEEDS > sum(native) / SEEDS - margin, (native, found)


# Percent again, over seeds 0 to 7 (200 steps of 256 images):
#
#   native         E4M0 nearest   E4M0 stochastic
#   95.98 ± 0.50   8.5 ± 3.0      90.95 ± 2.49
#
# With the mean of two seeds, 80 percent is (90.95 − 80) / 1.76 = 6 deviations below what stochastic rounding reaches. What nearest rounding
# leaves is chance, about ten percent; 30 is far beyond that.
def test_nearest_rounding_of_gradients_collapses_where_stochastic_rounding_trains() -> None:
    # The loss is a mean over 256 images: no gradient of an output exceeds 1/256, which is less than half of E4M0's smallest number. So all
    # of them are rounded to zero, and nothing has a gradient but the last layer's bias.
    assert E4M0.smallest / 2 > 1 / 256
    start, model = train("E4M0 nearest", 0, 256, 200)
    assert accuracy(model) < 0.3
    learned = [name for name, value in model.named_parameters() if not torch.equal(value, start.get_parameter(name))]
    assert learned == [name for name, _ in model.named_parameters()][-1:], "the last bias, whose gradient is not rounded"
    found = accuracies("E4M0 stochastic", 256, 200, 2)
    assert sum(found) / 2 > 80, found
