"""Repeated draws of gradients of a model's weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from qsim.diagnostics.gradients.borrowed import Borrowed
from qsim.diagnostics.gradients.points import in_use
from qsim.diagnostics.gradients.statistics import Moments, total_moments, weight_moments
from qsim.functional.arguments import check_model
from qsim.nn.calls.modules import RoundsCalls
from qsim.nn.converting.layers import layers as layers_of
from qsim.nn.modules import FivePointModule
from qsim.nn.record import points_of_module
from qsim.random import streams
from qsim.recipes.five_point import FivePoint

Loss = Callable[[Any, Any], Tensor]

#: If two gradients of one batch in full precision differ by more than this, relative to their norm, there is noise other than rounding's.
_SAME = 1e-4


@dataclass(frozen=True)
class MeasuredWeights:
    """The weights whose gradients are measured: matrices, tables and kernels of everything that a conversion rounds.

    Attributes:
        names: The name of each module that rounds.
        layers: These modules: layers with points, and modules that multiply by weights of their own, such as mixtures of experts.
        tensors: All their weights that require gradients, each once.
        owned: The name and the indices of the weights of each module that has any.
    """

    names: tuple[str, ...]
    layers: tuple[nn.Module, ...]
    tensors: tuple[Tensor, ...]
    owned: dict[str, tuple[int, ...]]

    def in_use(self, points: Sequence[FivePoint]) -> list[FivePoint]:
        """The points of each module, with the delayed scales of layers fixed at the values that their histories give."""
        both = zip(self.layers, points, strict=True)
        return [in_use(layer, layer.points, own) if isinstance(layer, FivePointModule) else own for layer, own in both]


def weights_of(owner: str, model: nn.Module) -> MeasuredWeights:
    """The weights of a converted model.

    Raises:
        TypeError: If it is not a model.
        ValueError: If no layer was converted, or none has a weight that requires a gradient.
    """
    check_model(owner, model)
    found = _rounding_modules(model)
    if not found:
        raise ValueError(f"{owner}: no layer of the model has points: call qsim.convert on it first")
    places: dict[Tensor, int] = {}
    owned = {}
    for title, layer in found:
        mine = [weight for weight in _parameters(layer) if weight.dim() > 1 and weight.requires_grad]
        if mine:
            owned[title] = tuple(places.setdefault(weight, len(places)) for weight in mine)
    if not places:
        raise ValueError(f"{owner}: no weight of a layer with points requires a gradient")
    return MeasuredWeights(tuple(title for title, _ in found), tuple(layer for _, layer in found), tuple(places), owned)


def _parameters(layer: nn.Module) -> Iterable[Tensor]:
    """The parameters that a module multiplies by; an embedding without points only looks up, as far as is known."""
    if isinstance(layer, FivePointModule):
        return layer.parameters()
    rounds = isinstance(layer, RoundsCalls) and not isinstance(layer, nn.Embedding)
    return layer.parameters(recurse=False) if rounds else []


def _rounding_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The names and modules of all that rounds: layers, in their order, and then modules without weights that multiply activations."""
    named: dict[nn.Module, str] = {layer.module: layer.title for layer in layers_of(model)}
    for name, module in model.named_modules():
        if not isinstance(module, FivePointModule):
            named.setdefault(module, name or "(the model)")
    return [(title, module) for module, title in named.items() if points_of_module(module) is not None]


class Gradients:
    """Draws of gradients from a borrowed model.

    Args:
        owner: The name of the caller in errors.
        model: The model.
        loss: A function that returns a batch's loss, a scalar.
        batches: The batches.
        weights: The weights whose gradients are drawn.
        state: The state of the borrowed model.
    """

    def __init__(self, owner: str, model: nn.Module, loss: Loss, batches: Sequence[Any], weights: MeasuredWeights, state: Borrowed) -> None:
        self._owner, self.model, self.loss, self._batches = owner, model, loss, batches
        self._weights, self._state = weights, state
        self._passes = 0
        self.reference = self._in_full_precision()

    def moments(self, points: Sequence[FivePoint], draws: int, redraw_weights: bool, smaller: int = 1) -> Moments:
        """The moments of each layer's weights, as rows, followed by those of all weights.

        Args:
            points: The points of each layer, as `in_use` returns them.
            draws: The number of draws of each batch's gradient.
            redraw_weights: Whether weights are rounded again for each draw, or once for all.
            smaller: The number that the loss is divided by.
        """
        self._state.set_points(points)
        means = [torch.empty_like(reference) for reference in self.reference]
        spreads = torch.zeros(len(means), len(self._batches), dtype=torch.float64)
        for i, batch in enumerate(self._batches):
            found = [_Spread() for _ in means]
            for _ in range(draws):
                for spread, gradient in zip(found, self.gradient(batch, smaller, redraw_weights=redraw_weights), strict=True):
                    spread.add(gradient)
            for k, spread in enumerate(found):
                means[k][i] = spread.mean
                spreads[k, i] = spread.variance
        return self._by_layer(means, spreads)

    def first(self, points: Sequence[FivePoint]) -> None:
        """One pass of the first batch, for observers."""
        self._state.set_points(points)
        self.gradient(self._batches[0])

    def is_mean(self) -> bool:
        """Whether the loss is a mean over the samples of a batch, rather than a sum; taken for granted if batches cannot be halved."""
        size = _size(self._batches[0])
        if size is None or size < 2:
            return True
        self._state.set_points([FivePoint()] * len(self._weights.layers))
        try:
            both = [self.gradient(_part(self._batches[0], size, part)) for part in (slice(size // 2), slice(size // 2, None))]
        except (RuntimeError, ValueError, IndexError):
            return True  # the model or the loss is for batches of one size
        halves = torch.cat([(one + other).double() for one, other in zip(*both, strict=True)])
        whole = torch.cat([rows[0].double() for rows in self.reference])
        # The whole is the sum of both halves, or half of it.
        return float(whole @ halves) < 0.75 * float(halves @ halves)

    def full_precision(self) -> Moments:
        """The same for gradients in full precision."""
        return self._by_layer(self.reference, torch.zeros(len(self.reference), len(self._batches), dtype=torch.float64))

    def squared_norms(self) -> Moments:
        """Moments whose bias is the full-precision gradient itself."""
        zeros = [torch.zeros_like(rows) for rows in self.reference]
        return self._by_layer(self.reference, torch.zeros(len(zeros), len(self._batches), dtype=torch.float64), zeros)

    def _by_layer(self, means: Sequence[Tensor], spreads: Tensor, reference: Sequence[Tensor] | None = None) -> Moments:
        rows = zip(means, spreads, self.reference if reference is None else reference, strict=True)
        of_weights = [Moments(*(part.cpu() for part in weight_moments(mean, spread.to(mean.device), base))) for mean, spread, base in rows]
        of_layers = [total_moments([of_weights[k] for k in own]) for own in self._weights.owned.values()]
        return Moments(*(torch.stack(column) for column in zip(*of_layers, total_moments(of_weights), strict=True)))

    def _in_full_precision(self) -> list[Tensor]:
        self._state.set_points([FivePoint()] * len(self._weights.layers))
        rows = [self.gradient(batch) for batch in self._batches]
        again = self.gradient(self._batches[0])
        apart = sum(float((one - other).double().square().sum()) for one, other in zip(rows[0], again, strict=True))
        if apart > _SAME**2 * sum(float(one.double().square().sum()) for one in again):
            what = "the loss of a batch in full precision differs from call to call, by noise other than rounding's"
            raise ValueError(f"{self._owner}: {what}: disable dropout with model.eval() or p=0, and draw no random numbers in loss")
        return [torch.stack(column) for column in zip(*rows, strict=True)]

    def gradient(self, batch: Any, smaller: int = 1, *, redraw_weights: bool = False) -> list[Tensor]:
        """One gradient of each weight, flat, in float32 or a wider dtype."""
        self._passes += redraw_weights
        number = streams.stream("diagnostics", self._passes) if redraw_weights else 0
        self._state.set_streams([number] * len(self._weights.layers))
        try:
            with torch.enable_grad():
                value = self.loss(self.model, batch)
                self._check(value)
                value = value if smaller == 1 else value / smaller
                found = torch.autograd.grad(value, self._weights.tensors, allow_unused=True, materialize_grads=True)
        finally:
            self._state.forget()
        return [x.detach().flatten().to(torch.promote_types(x.dtype, torch.float32)) for x in found]

    def _check(self, value: object) -> None:
        if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
            got = f"shape {tuple(value.shape)}, requires_grad={value.requires_grad}" if isinstance(value, Tensor) else repr(value)
            raise ValueError(f"{self._owner}: loss must return one differentiable number, got {got}")


class _Spread:
    """Running mean and variance of vectors (Welford)."""

    def __init__(self) -> None:
        self._count = 0
        self._squares: Tensor | float = 0.0
        self.mean: Tensor = torch.zeros(())

    def add(self, x: Tensor) -> None:
        wide = x.double()
        self._count += 1
        if self._count == 1:
            self.mean = wide
            return
        before = wide - self.mean
        self.mean = self.mean + before / self._count
        self._squares = self._squares + torch.dot(before, wide - self.mean)

    @property
    def variance(self) -> Tensor | float:
        return self._squares / (self._count - 1) if self._count > 1 else 0.0


def check_arguments(owner: str, draws: int, seed: int, level: float) -> None:
    """Raise an error for numbers too small for a measurement."""
    for name, number in (("draws", draws), ("seed", seed)):
        if isinstance(number, bool) or not isinstance(number, int):
            raise TypeError(f"{owner}: {name} must be an int, got {number!r}")
    if draws < 2:
        raise ValueError(f"{owner}: draws must be 2 or more, to measure a variance, got {draws}")
    if not isinstance(level, float) or not 0 < level < 1:
        raise ValueError(f"{owner}: level must be a probability between 0 and 1, got {level!r}")


def listed_batches(owner: str, batches: Iterable[Any]) -> list[Any]:
    """All batches.

    Raises:
        ValueError: If they are too few, differ in size, or are empty.
    """
    found = list(batches)
    if len(found) < 3:
        raise ValueError(f"{owner}: there must be 3 or more batches, to compute intervals, got {len(found)}")
    sizes = [_size(batch) for batch in found]
    for number, size in enumerate(sizes):
        if size != sizes[0]:
            raise ValueError(f"{owner}: batches must be of one size, got {sizes[0]} and, at index {number}, {size}: omit that one")
    if sizes[0] == 0:
        raise ValueError(f"{owner}: batches must have samples, got batches of size 0")
    return found


def _part(batch: Any, size: int, part: slice) -> Any:
    """A batch with a part of all tensors that have its size."""
    if isinstance(batch, Tensor):
        return batch[part] if batch.dim() and len(batch) == size else batch
    if type(batch) is dict:
        return {name: _part(value, size, part) for name, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        parts = [_part(value, size, part) for value in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return batch


def _size(batch: Any) -> int | None:
    """The length of the first tensor in a batch, if there is one."""
    if isinstance(batch, Tensor):
        return len(batch) if batch.dim() else None
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (tuple, list)) else ()
    return next((size for size in map(_size, parts) if size is not None), None)
