"""What rounding each tensor of each layer to each candidate does to gradients and to the loss, from a few passes for all of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from qsim.diagnostics.assignment.choices import TENSORS
from qsim.diagnostics.assignment.costs import LayerSize, bits_of_tensor, tensor_of
from qsim.diagnostics.assignment.operands import Operands, Recorded, influences, products, recording, rounding_errors
from qsim.diagnostics.gradients.borrowed import Borrowed
from qsim.diagnostics.gradients.drawn import Gradients, MeasuredWeights
from qsim.diagnostics.gradients.points import alone
from qsim.nn.converting.layers import is_conv1d
from qsim.nn.modules import FivePointModule
from qsim.random import streams
from qsim.recipes.five_point import FivePoint
from qsim.text.records import Records, Values

#: How far the weights move, relative to their norm: far enough for float32, near enough for the gradients to change in proportion.
_REACH = 3e-3


@dataclass(frozen=True)
class Sensitivity:
    """What rounding one tensor of one layer to one candidate does.

    Attributes:
        layer: The layer.
        point: The tensor, by its first point: `act`, `weight` or `grad`, each with the points of the backward pass that round it, too.
        candidate: The candidate's name.
        bits: Its bits per element, with those of scales.
        bias: The squared mean error that it makes in the gradients of all weights, each relative to the square of that gradient.
        variance: The variance of that error, over batches and draws.
        loss: The increase of the loss, to second order.
    """

    layer: str
    point: str
    candidate: str
    bits: float
    bias: float
    variance: float
    loss: float

    @property
    def error(self) -> float:
        """The mean squared error of the gradients: bias and variance."""
        return self.bias + self.variance


@dataclass(frozen=True)
class Sensitivities(Records[Sensitivity]):
    """The sensitivities of all layers, tensors and candidates; prints as a table.

    Attributes:
        records: The sensitivities.
        batches: The number of batches.
        probes: The number of random directions.

    Example:
        >>> from qsim.diagnostics import Sensitivities, Sensitivity
        >>> found = Sensitivities((Sensitivity("0", "act", "mxfp4", 4.25, 1e-4, 2e-3, 1e-5),), batches=3, probes=4)
        >>> print(found)
        layer  point  candidate  bits    error     bias  variance     loss
        0      act    mxfp4      4.25  2.1e-03  1.0e-04   2.0e-03  1.0e-05
    """

    batches: int
    probes: int

    COLUMNS: ClassVar[Values] = {
        **{name: name for name in ("layer", "point", "candidate")},
        "bits": lambda record: f"{record.bits:g}",
        **{name: (lambda record, name=name: f"{getattr(record, name):.1e}") for name in ("error", "bias", "variance", "loss")},
    }
    RIGHT: ClassVar[tuple[str, ...]] = tuple(COLUMNS)[3:]
    KEY: ClassVar[tuple[str, ...]] = ("layer", "point", "candidate")
    NAME: ClassVar[str] = "sensitivities"
    LOSSES: ClassVar[Values] = {name: name for name in ("error", "bias", "variance", "loss")}


class SensitivityProbe:
    """Passes of a borrowed model that measure sensitivities.

    Args:
        drawn: The source of gradients.
        state: The state of the borrowed model.
        weights: The weights of the model's layers.
        layers: The layers to measure, by name.
        seed: The seed of the random directions.
    """

    def __init__(
        self, drawn: Gradients, state: Borrowed, weights: MeasuredWeights, layers: Mapping[str, FivePointModule], seed: int
    ) -> None:
        self._drawn, self._state, self._weights, self._layers, self._seed = drawn, state, weights, layers, seed
        # Errors are relative to the gradient of each weight, and averaged over weights; a weight without a gradient has none.
        norms = [rows.double().square().sum(1).mean().sqrt() for rows in drawn.reference]
        self._units = [float(torch.where(norm > 0, 1 / norm, 0.0)) / len(norms) ** 0.5 for norm in norms]
        self.sizes: dict[str, LayerSize] = {}

    def measure(self, candidates: Mapping[str, FivePoint], batches: Sequence[Any], probes: int) -> Sensitivities:
        """The sensitivities of all layers to each candidate."""
        shape = (len(batches), probes, len(self._layers), len(candidates), len(TENSORS), len(_Parts._fields))
        found = torch.zeros(shape, dtype=torch.float64)
        for b, batch in enumerate(batches):
            reference = self._recorded(batch)
            self.sizes = self.sizes or {name: size_of(self._layers[name], calls) for name, calls in reference.items()}
            for k in range(probes):
                direction = self._direction(k)
                tangents = self._tangents(batch, direction)
                self._state.set_streams([streams.stream("assign", b, k)] * len(self._weights.layers))
                for i, (name, layer) in enumerate(self._layers.items()):
                    found[b, k, i] = self._of_layer(layer, reference[name], tangents[name], direction, candidates)
        predicted = _bias_and_error(found)
        for i, name in enumerate(self._layers):
            for j, points in enumerate(candidates.values()):
                predicted[i, j, TENSORS.index("act")] += self._of_inputs(name, points, batches)
        return self._sensitivities(candidates, predicted, found[..., -1].mean((0, 1)), len(batches), probes)

    def _of_inputs(self, name: str, points: FivePoint, batches: Sequence[Any]) -> Tensor:
        """The bias and the error that rounding the inputs of one layer makes forward, measured: they are neither small nor independent.

        Rounding to nearest makes the many small elements behind an activation function zero, which changes all of them alike.
        """
        own = alone(points, "act")
        if own.is_identity:
            return torch.zeros(2, dtype=torch.float64)
        self._state.set_points([own if title == name else FivePoint() for title in self._weights.names])
        total = [torch.zeros_like(rows[0], dtype=torch.float64) for rows in self._drawn.reference]
        error, count = torch.zeros((), dtype=torch.float64), len(batches)
        for b, batch in enumerate(batches):
            for whole, x, rows, unit in zip(total, self._drawn.gradient(batch), self._drawn.reference, self._units, strict=True):
                off = (x.double() - rows[b].double()) * unit
                whole += off
                error += off.square().sum().cpu()
        shared = sum((whole.square().sum().cpu() for whole in total), torch.zeros((), dtype=torch.float64))
        return torch.stack([((shared - error) / (count * (count - 1))).clamp(min=0).minimum(error / count), error / count])

    def _recorded(self, batch: Any) -> Recorded:
        """The operands of all layers, which round nothing."""
        self._state.set_points([FivePoint()] * len(self._weights.layers))
        with recording(self._layers) as found:
            self._drawn.gradient(batch)
        return found

    def _direction(self, number: int) -> dict[Tensor, Tensor]:
        """Random signs for each weight, in the units of errors."""
        found = {}
        for k, (weight, unit) in enumerate(zip(self._weights.tensors, self._units, strict=True)):
            source = torch.Generator().manual_seed(streams.stream("assign", self._seed, number, k) & (2**63 - 1))
            signs = torch.randint(2, weight.shape, generator=source).mul_(2).sub_(1)
            found[weight] = signs.to(weight.device, weight.dtype) * unit
        return found

    def _tangents(self, batch: Any, direction: Mapping[Tensor, Tensor]) -> Recorded:
        """The changes of all operands as the weights move along a direction."""
        before = {weight: weight.detach().clone() for weight in direction}
        reach = _REACH * min(float(weight.detach().norm() / v.norm()) for weight, v in direction.items() if v.any())
        ends = []
        try:
            for distance in (reach, -reach):
                for weight, v in direction.items():
                    weight.data.copy_(before[weight] + distance * v)
                ends.append(self._recorded(batch))
        finally:
            for weight, own in before.items():
                weight.data.copy_(own)
        return {
            name: [
                Operands((one.x - other.x) / (2 * reach), (one.g - other.g) / (2 * reach))
                for one, other in zip(calls, ends[1][name], strict=True)
            ]
            for name, calls in ends[0].items()
        }

    def _of_layer(
        self,
        layer: FivePointModule,
        operands: Sequence[Operands],
        tangents: Sequence[Operands],
        direction: Mapping[Tensor, Tensor],
        candidates: Mapping[str, FivePoint],
    ) -> Tensor:
        """The parts of the sensitivity of each candidate and tensor, summed over the calls of a layer."""
        weight: Any = layer.weight
        total = torch.zeros((len(candidates), len(TENSORS), len(_Parts._fields)), dtype=torch.float64)
        for own, change in zip(operands, tangents, strict=True):
            layer.points = FivePoint()
            derivatives = influences(layer, own, change, direction.get(weight, torch.zeros_like(weight)))
            curvature = curvatures(layer, own)
            for i, points in enumerate(candidates.values()):
                errors = rounding_errors(layer, points, own)
                parts = [_Parts.of(tensor, errors, derivatives, curvature) for tensor in TENSORS]
                total[i] += torch.stack([torch.stack(part) for part in parts]).cpu()
        layer.points = FivePoint()
        return total

    def _sensitivities(self, candidates: Mapping[str, FivePoint], found: Tensor, loss: Tensor, batches: int, probes: int) -> Sensitivities:
        """The records, from the bias and the error of each layer, candidate and tensor, and the loss."""
        records = []
        for i, name in enumerate(self._layers):
            for j, (candidate, points) in enumerate(candidates.items()):
                for t, tensor in enumerate(TENSORS):
                    bias, error = found[i, j, t].tolist()
                    bits = bits_of_tensor(points, tensor, self.sizes[name])
                    records.append(Sensitivity(name, tensor, candidate, bits, bias, error - bias, float(loss[i, j, t])))
        return Sensitivities(tuple(records), batches, probes)


def _bias_and_error(found: Tensor) -> Tensor:
    """The bias and the mean squared error of each layer, candidate and tensor, from the parts of all batches and probes."""
    along, apart, _ = found.unbind(-1)
    error, count = apart.mean((0, 1)), len(found)
    # The product of the errors of two different batches: what they share is the mean error.
    shared = (along.sum(0).square() - along.square().sum(0)).mean(0) / (count * (count - 1))
    return torch.stack([shared.clamp(min=0).minimum(error), error], dim=-1)


class _Parts(NamedTuple):
    """What one draw of a tensor's errors gives.

    Attributes:
        along: The change of the gradients along the direction.
        apart: The sum of its squares over elements: its mean square, if the errors of elements are not correlated.
        loss: The increase of the loss.
    """

    along: Tensor
    apart: Tensor
    loss: Tensor

    @classmethod
    def of(cls, tensor: str, errors: Mapping[str, Tensor], derivatives: Mapping[str, Tensor], curvature: Mapping[str, Tensor]) -> _Parts:
        """The parts for a tensor, given the errors at all points; those of inputs in the forward pass are measured."""
        changes = [(error * derivatives[role]).double() for role, error in errors.items() if tensor_of(role) == tensor and role != "act"]
        zero = next(iter(derivatives.values())).new_zeros((), dtype=torch.float64)
        is_raised = tensor in curvature and tensor in errors
        loss = (curvature[tensor] * errors[tensor].square()).sum().double() / 2 if is_raised else zero
        return cls(sum((own.sum() for own in changes), zero), sum((own.square().sum() for own in changes), zero), loss)


def curvatures(layer: FivePointModule, operands: Operands) -> dict[str, Tensor]:
    """The second derivatives of the loss by each element of the input and the weight: those of the Fisher information.

    Each row of the input counts as a sample of its own, as a token or an image does.
    """
    weight: Any = layer.weight
    samples = operands.x.shape[0] if weight.dim() > 2 else operands.x.shape[:-1].numel()
    of_input = products(layer, operands.x, weight, operands.g).grad_x
    of_weight = products(layer, operands.x.square(), weight, operands.g.square()).grad_w
    return {"act": samples * of_input.square(), "weight": samples * of_weight}


def size_of(layer: FivePointModule, calls: Sequence[Operands]) -> LayerSize:
    """The size of a layer's work, over all its calls."""
    weight: Any = layer.weight
    shapes = {"weight": tuple(weight.shape)}
    for name, tensors in (("act", [call.x for call in calls]), ("grad", [call.g for call in calls])):
        shapes[name] = (sum(x.shape[0] for x in tensors), *tensors[0].shape[1:])
    # Each element of the side that the weight's first dimension belongs to takes part in as many products as the other dimensions have.
    side = "act" if getattr(layer, "transposed", is_conv1d(layer)) else "grad"
    work = math.prod(shapes[side]) * (weight.numel() // weight.shape[0])
    return LayerSize(shapes, work, 8 * weight.itemsize)
