"""Training of an image net with points on its layers, and its evaluation in full precision."""

from __future__ import annotations

import math
from typing import Any

import torch

import qsim
from qsim import FivePoint
from qsim.studies.learners.images import images
from qsim.studies.learners.training import Training, accuracy, full_precision, loss_on_test, squared_gradient, train

#: Loss scale per image: gradients of outputs are below it, well inside the range of formats with four exponent bits.
_IN_RANGE = 64.0


def in_range(format: str) -> float:
    """The factor per image for a mean loss that keeps gradients in the range of a format: those of outputs are below it.

    Example:
        >>> in_range("e4m0"), in_range("e3m0"), in_range("fp32")
        (64.0, 4.0, 64.0)
    """
    return min(_IN_RANGE, 2.0 ** math.floor(math.log2(qsim.format(format).max / 4)))


def outcome(
    data: str, points: FivePoint | None, how: Training, rate: float, seed: int, device: torch.device, looks: int = 10
) -> dict[str, Any]:
    """Train a net by plain SGD at a constant learning rate, as in the papers' theorems.

    Args:
        data: The name of the images; see `images`.
        points: The points of every layer; None: full precision.
        how: The steps, the batch size and the loss scale.
        rate: The learning rate.
        seed: The seed of weights, batches and random bits.
        device: The device to train on.
        looks: How often the true gradient is measured in the last quarter of the steps.

    Returns:
        For the final weights, evaluated in full precision: `accuracy` and `loss` on the test images; `squared_gradient` over all
        training images, averaged over the measurements. For the rounding net: `own_accuracy` and `own_loss` on the
        test images.
    """
    found = images(data, device)
    torch.manual_seed(seed)
    model, judge = found.net().to(device), found.net().to(device)
    if points is not None:
        qsim.convert(model, points)
    norms: list[float] = []

    def look(done: int) -> None:
        if done > 0.75 * how.steps:
            judge.load_state_dict(model.state_dict())
            norms.append(squared_gradient(judge, found))

    with full_precision(device):
        train(model, found, torch.optim.SGD(model.parameters(), lr=rate), how, seed, look, max(1, how.steps // (4 * looks)))
        judge.load_state_dict(model.state_dict())
        return {
            "accuracy": accuracy(judge, found),
            "loss": loss_on_test(judge, found),
            "own_accuracy": accuracy(model, found),
            "own_loss": loss_on_test(model, found),
            "squared_gradient": sum(norms) / len(norms),
        }
