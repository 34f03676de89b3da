"""Lemmas 1 to 3 measured: how the error of a layer's gradients depends on the batch size and the bits."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qsim
from qsim import FivePoint, Fixed, Float, Quantizer
from qsim.diagnostics import gradient_error
from qsim.diagnostics.gradients.batches import measured_factors
from qsim.studies.choices import choice, require, require_increasing
from qsim.studies.learners.images import images
from qsim.studies.learners.training import Training, full_precision, train
from qsim.studies.study import Run, TrialStudy

#: Which tensors are rounded: the operands of the backward products, or the weights in both passes.
BACKWARD, WEIGHTS = "backward", "weights"
#: Enough exponent bits to make all errors relative, as in the analysis: nothing underflows, and float32 holds all values.
_EXPONENT = 7
#: Bits of a weight above its step: enough for all weights.
_WHOLE = 8


@dataclass(frozen=True)
class Settings:
    """The settings of the study."""

    data: str = choice("digits", "digits, or a folder with Fashion-MNIST's or CIFAR-10's files")
    mantissas: tuple[int, ...] = choice((0, 1, 2, 3, 4, 5), "mantissa bits of the backward pass's operands")
    batches: tuple[int, ...] = choice((4, 8, 16, 32, 64, 128), "images per batch, in increasing order")
    fractions: tuple[int, ...] = choice((2, 4, 6), "fractional bits of rounded weights")
    images: int = choice(512, "number of images; a multiple of the largest batch, and at least 3 times as many")
    draws: int = choice(2, "draws per batch of the smallest size; larger batches get proportionally more")
    steps: int = choice(50, "updates of the net before the measurement")
    seeds: int = choice(4, "number of seeds")


def points_of(run: Run) -> FivePoint:
    """The points of the layer."""
    if run.rounded == WEIGHTS:
        return FivePoint(weight=Quantizer(Fixed(_WHOLE + run.bits, run.bits), run.rounding), weight_bwd="same")
    spec = Quantizer(Float(_EXPONENT, run.bits, specials="none"), run.rounding)
    return FivePoint(act_bwd=spec, grad=spec)


class GradientVarianceStudy(TrialStudy[Settings]):
    """Measure bias and variance of the last layer's gradients."""

    name = "gradient-variance"
    question = "How does the error of gradients depend on the batch size and the bits of precision?"
    source = "Liu et al., Training with Fewer Bits, Lemmas 1 to 3, Theorem 1, Figure 4"
    settings = Settings
    shared = ("data", "images", "steps")
    #: The net may be new.
    counts = ("batches",)

    #: Two batch sizes and two bits.
    quick_form = Settings(mantissas=(0, 1, 2), batches=(4, 64), fractions=(3, 5), images=256, draws=2, seeds=3)

    #: More of everything; a GPU is no faster on a layer as small as this one.
    full_form = Settings(mantissas=tuple(range(8)), batches=(2, 4, 8, 16, 32, 64, 128), fractions=(1, 2, 3, 4, 5, 6, 7), draws=4, seeds=10)

    def check(self, settings: Settings) -> None:
        """Everything from which slopes and factors are computed."""
        for name in ("mantissas", "batches"):
            require_increasing(settings, name)
        largest, smallest = settings.batches[-1], settings.batches[0]
        fits = settings.images % largest == 0 and settings.images >= 3 * largest
        require(settings, "images", fits, f"be a multiple of the largest batch and at least 3 of them, {largest} each")
        require(settings, "batches", not any(batch % smallest for batch in settings.batches), "be multiples of the smallest")
        for name in ("draws", "seeds"):
            require(settings, name, getattr(settings, name) >= 2, "be at least 2")

    def ways(self, settings: Settings, seed: int) -> Iterator[dict[str, Any]]:
        """All bits at the middle batch size, with both roundings; all batch sizes with the fewest and the middle bits; weights at three."""
        for mantissa in settings.mantissas:
            backward = {"rounded": BACKWARD, "bits": mantissa}
            for batch in settings.batches if mantissa in swept(settings) else (middle(settings),):
                # Equally many gradients at every size: the time is the same, and so is the precision.
                draws = settings.draws * batch // settings.batches[0]
                yield {**backward, "rounding": "stochastic", "batch": batch, "draws": draws}
            yield {**backward, "rounding": "nearest", "batch": middle(settings), "draws": 2}
        for fraction, rounding, batch in product(settings.fractions, ("nearest", "stochastic"), ends(settings)):
            yield {"rounded": WEIGHTS, "bits": fraction, "rounding": rounding, "batch": batch, "draws": 2}

    def work(self, run: Run) -> float:
        """Passes through the layer, and the training before them."""
        passes = run.images // run.batch * run.draws
        return float(200 + passes * (4 if run.rounded == BACKWARD else 2) * (1 + run.batch / 200))

    def measure(self, run: Run, device: torch.device) -> dict[str, Any]:
        """Train a net briefly, and measure the gradients of its last layer."""
        with full_precision(device):
            layer, inputs, labels = last_layer(run, device)
            count = run.images // run.batch
            batches = list(zip(inputs.split(run.batch)[:count], labels.split(run.batch)[:count], strict=True))
            qsim.convert(layer, points_of(run))
            if run.rounded == BACKWARD:
                return _of_backward(layer, batches, run)
            return _of_weights(layer, batches, run) | {"bound": bound_of_bias(layer.weight, inputs, run)}


def middle(settings: Settings) -> int:
    """The batch size at which numbers of bits are compared."""
    return settings.batches[len(settings.batches) // 2]


def swept(settings: Settings) -> tuple[int, ...]:
    """The mantissas that are measured at all batch sizes."""
    return tuple(sorted({settings.mantissas[0], settings.mantissas[len(settings.mantissas) // 2]}))


def ends(settings: Settings) -> tuple[int, ...]:
    """The batch sizes at which weights are rounded."""
    return tuple(sorted({settings.batches[0], middle(settings), settings.batches[-1]}))


def last_layer(run: Run, device: torch.device) -> tuple[nn.Linear, Tensor, Tensor]:
    """The last layer of a net after some updates, and its inputs for images in an order that depends on the seed, with their labels."""
    data = images(run.data, device)
    torch.manual_seed(run.seed)
    net = data.net().to(device)
    train(net, data, torch.optim.SGD(net.parameters(), lr=0.1), Training(run.steps, 32), run.seed)
    layer = [module for module in net.modules() if isinstance(module, nn.Linear)][-1]
    order = torch.randperm(len(data.y), generator=torch.Generator().manual_seed(run.seed))[: run.images].to(device)
    if len(order) < run.images:
        raise ValueError(f"images: {run.data} has {len(order)} training images, got {run.images}")
    seen: list[Tensor] = []
    hook = layer.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    with torch.no_grad():
        net(data.x[order])
    hook.remove()
    return layer, seen[0], data.y[order]


def loss(layer: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The mean over a batch, normalized like the sums of the lemmas."""
    x, y = batch
    return F.cross_entropy(layer(x), y)


def bound_of_bias(weight: Tensor, inputs: Tensor, run: Run) -> float:
    """`B_W` of Lemma 1.

    The loss is convex in the last layer's weight: its second derivative is the mean of `(diag(p) - p pᵀ) ⊗ x xᵀ`, and no eigenvalue of the
    first factor is above 1/2. So half the largest eigenvalue of the mean of `x xᵀ` is a smoothness constant.
    """
    second = inputs.double().T @ inputs.double() / len(inputs)
    smoothness = 0.5 * float(torch.linalg.eigvalsh(second)[-1])
    step = 2.0**-run.bits
    return float(smoothness * math.sqrt(weight.numel()) * step * (0.5 if run.rounding == "nearest" else 1.0))


def _of_backward(layer: nn.Linear, batches: list[tuple[Tensor, Tensor]], run: Run) -> dict[str, Any]:
    found = gradient_error(layer, loss, batches, run.draws, seed=run.seed)
    both = found.of("all")
    return {
        "rounding": both.rounding.value,
        "rounding_of_inputs": found.of("act_bwd").rounding.value,
        "rounding_of_gradients": found.of("grad").rounding.value,
        "sampling": both.sampling.value,
        "squared_bias": both.bias.value,
        "squared_gradient": both.gradient.value,
        "inputs_gradient": _of_inputs(layer, batches, run),
    }


def _of_inputs(layer: nn.Linear, batches: list[tuple[Tensor, Tensor]], run: Run) -> float:
    """The variance of `∇A = Q(∇A_out) Q(W)`, relative to the square of `∇A`, so that the 1/b of the loss cancels."""
    spec = Quantizer(Float(_EXPONENT, run.bits, specials="none"), run.rounding)
    points, plain = FivePoint(weight_bwd=spec, grad=spec), FivePoint()
    spread, square = 0.0, 0.0
    with torch.random.fork_rng(devices=[layer.weight.device] if layer.weight.is_cuda else []):
        for k, (x, y) in enumerate(batches):
            drawn = []
            for j in range(run.draws):
                # The noise of weights is drawn again, too: its seed is derived from this one.
                torch.manual_seed(qsim.random.stream("gradient of inputs", run.seed, k, j))
                drawn.append(_gradient_of_input(layer, x, y, points))
            spread += float(torch.stack(drawn).double().var(0).sum())
            square += float(_gradient_of_input(layer, x, y, plain).double().square().sum())
    return spread / square


def _gradient_of_input(layer: nn.Linear, x: Tensor, y: Tensor, points: FivePoint) -> Tensor:
    given = x.detach().requires_grad_()
    out = qsim.nn.functional.linear(given, layer.weight, layer.bias, points)
    return torch.autograd.grad(F.cross_entropy(out, y), given)[0]


def _of_weights(layer: nn.Linear, batches: list[tuple[Tensor, Tensor]], run: Run) -> dict[str, Any]:
    found = measured_factors(layer, loss, batches, points_of(run), None, run.draws, run.seed)[-1]
    return {"squared_bias": found.bias.value, "sampling": found.sampling.value, "squared_gradient": found.gradient.value}
