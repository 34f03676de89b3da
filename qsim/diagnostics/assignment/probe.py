"""Measuring sensitivities: a few passes for all layers, and for each layer those that its inputs need."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from qsim.diagnostics.assignment.choices import TENSORS
from qsim.diagnostics.assignment.costs import LayerSize, bits_of_tensor, size_of, tensor_of
from qsim.diagnostics.assignment.operands import LOCAL, ROLES, Operands, Recorded, curvatures, influences, recording, rounding_errors
from qsim.diagnostics.assignment.sensitivity import Sensitivities, Sensitivity
from qsim.diagnostics.gradients.borrowed import Borrowed, borrowed
from qsim.diagnostics.gradients.drawn import Gradients, Loss, MeasuredWeights, listed_batches, weights_of
from qsim.diagnostics.gradients.points import alone
from qsim.diagnostics.traces.calls import OperationCall
from qsim.diagnostics.traces.recording import TraceRecorder
from qsim.nn.examples import inputs_of
from qsim.nn.modules import FivePointModule
from qsim.random import streams
from qsim.recipes.five_point import FivePoint

#: How far the weights move, relative to their norm: far enough for float32, near enough for the gradients to change in proportion.
_REACH = 3e-3
#: Candidates by name, each the points of each layer.
Candidates = Mapping[str, Mapping[str, FivePoint]]
#: The points of the forward pass, whose errors change the loss.
FORWARD = ("act", "weight")


@contextmanager
def probing(
    owner: str, model: nn.Module, batches: Iterable[Any], loss: Loss | None, names: Iterable[str], seed: int
) -> Iterator[SensitivityProbe]:
    """Borrow a model to measure the sensitivities of some of its layers, which have points.

    Args:
        owner: The caller's name in errors.
        model: The model.
        batches: The batches.
        loss: The loss of the model and a batch; by default its own.
        names: The names of the layers.
        seed: The seed of the random directions and of stochastic rounding.
    """
    layers: dict[str, Any] = {name: model.get_submodule(name) for name in names}
    for name, layer in layers.items():
        if layer.weight.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"{owner}: {name} has weights of {layer.weight.dtype}, too coarse to move them a little: give float32 weights")
    weights = weights_of(owner, model)
    with borrowed(model, weights.layers, streams.stream("assign", seed)) as state:
        given = listed_batches(owner, batches)
        drawn = Gradients(owner, model, loss or partial(_own_loss, owner), given, weights, state)
        yield SensitivityProbe(owner, drawn, state, given, weights, layers, seed)


def _own_loss(owner: str, model: nn.Module, batch: Any) -> Tensor:
    """The loss that a model computes."""
    args, kwargs = inputs_of(batch)
    output = model(*args, **kwargs)
    found = output if isinstance(output, Tensor) else output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if not isinstance(found, Tensor) or found.numel() != 1:
        raise ValueError(f"{owner}: loss must be given: the model returns no scalar, and nothing with a loss")
    return found


class SensitivityProbe:
    """Passes of a borrowed model that measure sensitivities.

    Args:
        owner: The caller's name in errors.
        drawn: The source of gradients.
        state: The state of the borrowed model.
        batches: The batches.
        weights: The weights of the model's layers.
        layers: The layers to measure, by name.
        seed: The seed of the random directions.
    """

    def __init__(
        self,
        owner: str,
        drawn: Gradients,
        state: Borrowed,
        batches: Sequence[Any],
        weights: MeasuredWeights,
        layers: Mapping[str, FivePointModule],
        seed: int,
    ) -> None:
        self._owner, self._drawn, self._state, self._batches = owner, drawn, state, batches
        self._weights, self._layers, self._seed = weights, layers, seed
        # Errors are relative to the gradient of each weight, and averaged over weights; a weight without a gradient has none.
        norms = [rows.double().square().sum(1).mean().sqrt() for rows in drawn.reference]
        self._units = [float(torch.where(norm > 0, 1 / norm, 0.0)) / len(norms) ** 0.5 for norm in norms]

    @cached_property
    def sizes(self) -> dict[str, LayerSize]:
        """The size of each layer's work on a batch.

        Raises:
            ValueError: If a layer is never called in training, or its result has no gradient.
        """
        recorded = self._recorded(self._batches[0])
        missing = [name for name, calls in recorded.items() if not calls]
        if missing:
            raise ValueError(f"{self._owner}: no gradient reaches {', '.join(missing)} with these batches: exclude them")
        return {
            name: size_of(self._layers[name], [call.x for call in calls], [call.g for call in calls]) for name, calls in recorded.items()
        }

    def products_of_calls(self) -> list[str]:
        """The products that modules compute by functions of torch, by their names in a trace."""
        found = ProductTitles()
        with torch.no_grad(), TraceRecorder(self._drawn.model, found, self._seed).recording():
            self._drawn.loss(self._drawn.model, self._batches[0])
        self._state.forget()
        return list(found.titles)

    def measure(self, candidates: Candidates, probes: int) -> Sensitivities:
        """The sensitivities of all layers to each candidate."""
        predicted, loss, underflowed = self._predicted(candidates, probes)
        found = torch.zeros((len(self._layers), len(candidates), len(ROLES), 2), dtype=torch.float64)
        found[:, :, [ROLES.index(role) for role in LOCAL]] = predicted
        for j, points in enumerate(candidates.values()):
            for i, name in enumerate(self._layers):
                found[i, j, ROLES.index("act")] = self._measured({name: alone(points[name], "act")})
            for role in FORWARD:
                part = found[:, j, ROLES.index(role)]
                whole = float(self._measured({name: alone(own, role) for name, own in points.items()})[1])
                if whole > 0:
                    part *= whole / part[:, 1].sum()
        return self._sensitivities(candidates, found, loss, underflowed, probes)

    def _predicted(self, candidates: Candidates, probes: int) -> tuple[Tensor, Tensor, Tensor]:
        """The bias and the error of each layer, candidate and local role, to first order.

        Also the increase of the loss by forward roles, and the shares of elements that underflow by roles.
        """
        shape = len(self._batches), probes, len(self._layers), len(candidates)
        changes, squares = (torch.zeros((*shape, len(LOCAL)), dtype=torch.float64) for _ in range(2))
        loss, underflowed = (torch.zeros((*shape, len(roles)), dtype=torch.float64) for roles in (FORWARD, ROLES))
        for b, batch in enumerate(self._batches):
            reference = self._recorded(batch)
            for k in range(probes):
                direction = self._direction(k)
                tangents = self._tangents(batch, direction)
                self._state.set_streams([streams.stream("assign", b, k)] * len(self._weights.layers))
                for i, (name, layer) in enumerate(self._layers.items()):
                    points = [each[name] for each in candidates.values()]
                    for own, change in zip(reference[name], tangents[name], strict=True):
                        parts = self._of_call(layer, own, change, direction, points)
                        parts = *parts[:3], parts[3] / len(reference[name])
                        for whole, part in zip((changes, squares, loss, underflowed), parts, strict=True):
                            whole[b, k, i] += part.cpu()
        error, count = squares.mean((0, 1)), len(self._batches)
        # The product of the errors of two different batches: what they share is the mean error.
        shared = (changes.sum(0).square() - changes.square().sum(0)).mean(0) / (count * (count - 1))
        return torch.stack([shared.clamp(min=0).minimum(error), error], dim=-1), loss.mean((0, 1)), underflowed.mean((0, 1))

    def _of_call(
        self,
        layer: FivePointModule,
        operands: Operands,
        tangents: Operands,
        direction: Mapping[Tensor, Tensor],
        candidates: Sequence[FivePoint],
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """For each candidate and role, the change of gradients along a direction by the errors of a call, and the sum of its squares.

        The latter is its mean square if the errors of elements are independent. And for each forward role the increase of the loss, and for
        each role the share of elements that underflow.
        """
        weight: Any = layer.weight
        layer.points = FivePoint()
        derivatives = influences(layer, operands, tangents, direction.get(weight, torch.zeros_like(weight)))
        curvature = curvatures(layer, operands)
        changes, loss, underflowed = [], [], []
        before = {"act": operands.x, "weight": weight, "grad": operands.g}
        for points in candidates:
            errors = rounding_errors(layer, points, operands)
            zero = operands.x.new_zeros(1)
            underflowed.append([_underflowed(before[tensor_of(role)], errors.get(role, zero)) for role in ROLES])
            changes.append([errors.get(role, zero) * derivatives[role] for role in LOCAL])
            loss.append([(curvature[role] * errors.get(role, zero).square()).double().sum() / 2 for role in FORWARD])
        layer.points = FivePoint()
        sums, squares = ([[own(x.double()) for x in row] for row in changes] for own in (torch.sum, _squares))
        return _stacked(sums), _stacked(squares), _stacked(loss), _stacked(underflowed)

    def _measured(self, points: Mapping[str, FivePoint]) -> Tensor:
        """The bias and the error that the points of some layers make, measured."""
        if all(own.is_identity for own in points.values()):
            return torch.zeros(2, dtype=torch.float64)
        self._state.set_points([points.get(name.split(", ")[0], FivePoint()) for name in self._weights.names])
        total = [torch.zeros_like(rows[0], dtype=torch.float64) for rows in self._drawn.reference]
        error, count = torch.zeros((), dtype=torch.float64), len(self._batches)
        for b, batch in enumerate(self._batches):
            for whole, x, true, unit in zip(total, self._drawn.gradient(batch), self._drawn.reference, self._units, strict=True):
                off = (x.double() - true[b].double()) * unit
                whole += off
                error += off.square().sum().cpu()
        shared = _stacked([[whole.square().sum() for whole in total]]).sum().cpu()
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
            signs = torch.randint(2, weight.shape, generator=source, dtype=torch.int8).mul_(2).sub_(1)
            found[weight] = signs.to(weight.device, weight.dtype) * unit
        return found

    def _tangents(self, batch: Any, direction: Mapping[Tensor, Tensor]) -> Recorded:
        """The changes of all operands as the weights move along a direction."""
        before = {weight: weight.detach().clone() for weight in direction}
        moved = [(weight.detach(), v) for weight, v in direction.items() if v.any()]
        if not moved:
            raise ValueError(f"{self._owner}: the gradients of all weights are zero, infinite or NaN: check batches and loss")
        # A weight that is zero, as some begin, has no norm that others could be compared with.
        reach = _REACH * min((float(weight.norm()) or 1.0) / float(v.double().norm()) for weight, v in moved)
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

    def _sensitivities(self, candidates: Candidates, found: Tensor, loss: Tensor, underflowed: Tensor, probes: int) -> Sensitivities:
        """The records, from the numbers of each layer, candidate and role."""
        records = []
        for i, (name, size) in enumerate(self.sizes.items()):
            for j, (candidate, points) in enumerate(candidates.items()):
                for tensor in TENSORS:
                    roles = [k for k, role in enumerate(ROLES) if tensor_of(role) == tensor]
                    bias, error = found[i, j, roles].sum(0).tolist()
                    raised = float(loss[i, j, FORWARD.index(tensor)]) if tensor in FORWARD else 0.0
                    facts = 2 * size.elements(tensor), bits_of_tensor(points[name], tensor, size)
                    lost = float(underflowed[i, j, roles].max())
                    records.append(Sensitivity(name, tensor, candidate, *facts, bias, error - bias, raised, lost))
        return Sensitivities(tuple(records), len(self._batches), probes)


class ProductTitles:
    """A `TraceSink` that keeps the names of products outside layers, each once."""

    def __init__(self) -> None:
        self.titles: dict[str, None] = {}

    def called(self, call: OperationCall, inputs: Mapping[int, Tensor], outputs: Mapping[int, Tensor]) -> None:
        """Keep the name of a product."""
        if call.is_product and not call.operation.is_module:
            self.titles[replace(call.operation, call=1).title] = None

    def computed(self, owner: str, role: str, x: Tensor) -> None:
        """Ignored: nothing is differentiated."""


def _underflowed(x: Tensor, error: Tensor) -> Tensor:
    """The share of elements that rounding makes zero."""
    return ((x != 0) & (x + error == 0)).double().mean()


def _squares(x: Tensor) -> Tensor:
    return x.square().sum()


def _stacked(numbers: Sequence[Sequence[Tensor]]) -> Tensor:
    """A matrix of numbers."""
    return torch.stack([torch.stack(list(row)) for row in numbers])
