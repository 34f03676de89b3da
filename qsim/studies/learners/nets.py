"""Training of a net with points on its layers, and its evaluation in full precision."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qsim
from qsim import FivePoint
from qsim.diagnostics.gradients.batches import measured_factors
from qsim.studies.learners.examples import OWN, PRETRAINED, examples, optimizer
from qsim.studies.learners.training import Training, accuracy, full_precision, mean_loss, squared_gradient, train
from qsim.studies.study import Run

#: Loss scale per prediction: gradients of outputs are below it, well inside the range of formats with four exponent bits.
_IN_RANGE = 64.0
#: That of a model which was trained before: inside of it, gradients are many times as large as those of its outputs.
_TRAINED_BEFORE = 1.0


def in_range(format: str, model: str = OWN) -> float:
    """The factor per prediction for a mean loss that keeps a model's gradients in the range of a format: those of outputs are below it.

    Example:
        >>> in_range("e4m0"), in_range("e3m0"), in_range("fp32")
        (64.0, 4.0, 64.0)
    """
    return min(_TRAINED_BEFORE if model == PRETRAINED else _IN_RANGE, 2.0 ** math.floor(math.log2(qsim.format(format).max / 4)))


def outcome(run: Run, points: FivePoint | None, device: torch.device, how: Training | None = None) -> dict[str, Any]:
    """Train a net at a constant learning rate, images by plain SGD as in the papers' theorems.

    Args:
        run: The names of the data and, if it is not the data's own, of the model (see `examples`), the learning rate, and the seed of
            weights, batches and random bits. If it has `looks`, the true gradient is measured so often in the last quarter of the steps;
            once: at its end.
        points: The points of every layer; None: full precision.
        device: The device to train on.
        how: The training; by default, the run's steps and batch size.

    Returns:
        For the final weights, evaluated in full precision: `accuracy` and `loss` on the test data; with looks, `squared_gradient`
        over all training data, averaged over the measurements, and `training_loss` at the end. For the rounding net: `own_accuracy` and
        `own_loss` on the test data.
        And `guessing`, the share of the most frequent target in the test data.
    """
    how, model, looks = how or Training(run.steps, run.batch), vars(run).get("model", OWN), vars(run).get("looks", 0)
    found = examples(run.data, model, device)
    torch.manual_seed(run.seed)
    net, judge = found.net().to(device), found.net().to(device)
    if points is not None:
        qsim.convert(net, points)
    norms: list[float] = []

    def look(done: int) -> None:
        if done > 0.75 * how.steps:
            judge.load_state_dict(net.state_dict())
            norms.append(squared_gradient(judge, found))

    with full_precision(device):
        every = max(1, how.steps // (4 * looks)) if looks else 0
        train(net, found, optimizer(model, net, run.rate), how, run.seed, look, every)
        judge.load_state_dict(net.state_dict())
        return {
            "accuracy": accuracy(judge, found),
            "loss": mean_loss(judge, found.test_x, found.test_y),
            "own_accuracy": accuracy(net, found),
            "own_loss": mean_loss(net, found.test_x, found.test_y),
            "guessing": float((found.test_y == found.test_y.flatten().mode().values).double().mean()),
            **({"squared_gradient": sum(norms) / len(norms), "training_loss": mean_loss(judge, found.x, found.y)} if looks else {}),
        }


def batch_factor(
    run: Run, points: FivePoint | None, like: FivePoint | None, how: Training, device: torch.device, *, batches: int, draws: int
) -> Any:
    """The factor by which the batch must grow for gradients to vary as little with some points as with others, after some training.

    Args:
        run: The data, the model, the learning rate and the seed; see `outcome`.
        points: The points.
        like: Those that they are compared with; None: full precision.
        how: The training before the measurement, in full precision, and the size of batches and the loss scale.
        device: The device to compute on.
        batches: The number of batches over which variances are measured.
        draws: The number of draws per batch.

    Returns:
        The factor, with its interval.
    """
    model = vars(run).get("model", OWN)
    found = examples(run.data, model, device)
    torch.manual_seed(run.seed)
    net = found.net().to(device)
    with full_precision(device):
        train(net, found, optimizer(model, net, run.rate), how, run.seed)
        order = torch.Generator().manual_seed(run.seed + 1)
        chosen = [torch.randint(len(found.y), (how.batch,), generator=order).to(device) for _ in range(batches)]

        def loss(net: nn.Module, batch: Tensor) -> Tensor:
            return F.cross_entropy(net(found.x[batch]), found.y[batch]) * how.loss_scale

        qsim.convert(net, FivePoint())
        return measured_factors(net, loss, chosen, points, like, draws, run.seed).factor
