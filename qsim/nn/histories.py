"""Histories for delayed scales: the largest magnitudes of the tensors at each point of a layer, or of products with a parameter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from qsim.functional.callables import CallablePoint
from qsim.functional.quantizer import Quantizer
from qsim.functional.tracing import refuse_scripting
from qsim.nn.record import known, record_of
from qsim.private import backward_pass
from qsim.random.shards import local
from qsim.recipes.five_point import POINTS, FivePoint
from qsim.scaling import Delayed
from qsim.scaling.base import Whole
from qsim_kernels.numbers import scales as numbers

#: The points of the forward pass; others see gradients, or operands of the backward pass.
_FORWARD = ("act", "weight", "forward_point")

_NOT_COMPILED = "compiled code cannot keep the history of delayed scales: call torch.compiler.disable on the layer"


class History:
    """The largest magnitudes at one point of a module, as a ring buffer. They are stored in two buffers of the module.

    When a backward pass calls a layer again, as activation checkpointing does, nothing is recorded, and the scale is that of the layer's
    last call. So the results are the same if a layer is called once between two backward passes, and otherwise those of the last call.

    Args:
        layer: The layer, or the module that has the parameter of a product.
        point: The point; after the name of the parameter, if it is not that of a layer.
        length: Number of magnitudes to remember.

    Attributes:
        has_recorded: Whether anything is recorded; kept on the host, because asking the device would mean waiting for it.
    """

    def __init__(self, layer: nn.Module, point: str, length: int) -> None:
        self.point, self.length = point, length
        self.has_recorded = False
        self._layer = layer
        self._last: Tensor | None = None
        device = next((parameter.device for parameter in layer.parameters(recurse=False)), None)
        layer.register_buffer(self.names[0], torch.zeros(length, dtype=torch.float32, device=device))
        layer.register_buffer(self.names[1], torch.zeros((), dtype=torch.int64, device=device))

    @property
    def names(self) -> tuple[str, str]:
        """The buffers: the magnitudes, 0 where not recorded yet, and the number of recorded ones."""
        return f"{self.point}_amaxes", f"{self.point}_recorded"

    def used(self, amaxes: Tensor) -> Tensor:
        """The largest magnitude that the scale follows from, given the tensor's own, which is recorded."""
        if torch.compiler.is_compiling():
            raise RuntimeError(_NOT_COMPILED)
        if self._last is not None and self.point.endswith(_FORWARD) and backward_pass() != -1:
            return self._last
        # Tensor-parallel plans turn buffers into distributed tensors, which every process holds whole.
        past, recorded = (local(self._layer.get_buffer(name)) for name in self.names)
        own, largest = amaxes.to(torch.float32), past.amax()
        # A non-finite magnitude makes its own tensor NaN, as with every scale that follows from a tensor.
        self._last = torch.where((largest > 0) & own.isfinite(), largest, own)
        if self._layer.training:
            # An infinity or a NaN would spoil the scales of `length` tensors.
            remembered = torch.where(own.isfinite(), own, 0).amax().view(1) if own.numel() else past.new_zeros(1)
            past.scatter_(0, (recorded % self.length).view(1), remembered)
            recorded.add_(1)
            self.has_recorded = True
        return self._last

    def last(self, amaxes: Tensor) -> Tensor:
        """The last result of `used`, for the tensor that was just scaled. Nothing is recorded."""
        return amaxes if self._last is None else self._last

    def check(self) -> None:
        """Raise an error if the history is empty."""
        if not self._layer.training and not self.has_recorded:
            raise RuntimeError(f"the delayed scale of {self.point} has no history yet: run a training step first, or load one")

    def mark(self) -> tuple[bool, Tensor | None]:
        """The state on the host, apart from the buffers, for `return_to`."""
        return self.has_recorded, self._last

    def return_to(self, mark: tuple[bool, Tensor | None]) -> None:
        """Discard everything recorded since a mark, after the buffers were restored."""
        self.has_recorded, self._last = mark

    def loaded(self, recorded: Tensor) -> None:
        """Update the host state from the buffers."""
        self.has_recorded, self._last = bool(local(recorded) > 0), None


@dataclass(frozen=True, init=False, repr=False, eq=False)
class Recorded(Whole):
    """A delayed scale with its history, or one that repeats the scale of its last tensor."""

    history: History
    repeats: bool

    def __init__(self, scaling: Delayed | Recorded, history: History, *, repeats: bool = False) -> None:
        super().__init__(scaling.format, scaling.rule, scaling.margin)
        object.__setattr__(self, "history", history)
        object.__setattr__(self, "repeats", repeats)

    def tiles(self, shape: Sequence[int]) -> numbers.TileSizes:  # noqa: D102 (documented above)
        self.history.check()
        return super().tiles(shape)

    @property
    def is_recorded(self) -> bool:  # noqa: D102 (documented above)
        return True

    def used(self, amaxes: Tensor) -> Tensor:  # noqa: D102 (documented above)
        return self.history.last(amaxes) if self.repeats else self.history.used(amaxes)

    @property
    def repeated(self) -> Recorded:  # noqa: D102 (documented above)
        return Recorded(self, self.history, repeats=True)


class RemembersAmaxes(nn.Module):
    """A module that keeps a history for each of its points with a delayed scale."""

    def __prepare_scriptable__(self) -> NoReturn:
        """Called by torch.jit.script before it compiles a module."""
        refuse_scripting(type(self).__name__, has_points=True)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RemembersAmaxes:
        """Move histories along with the layer, but keep their dtype when the layer's changes; those on the meta device start empty."""
        own = {id(self.get_buffer(name)) for history in histories_of(self).values() for name in history.names}

        def moved(x: Tensor) -> Tensor:
            found = fn(x)
            if id(x) not in own:
                return found
            if x.is_meta and not found.is_meta:  # `to_empty` does not initialize memory
                return torch.zeros_like(found, dtype=x.dtype)
            return x.to(found.device) if found.dtype != x.dtype else found

        super()._apply(moved if own else fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *rest)
        for history in histories_of(self).values():
            recorded = state_dict.get(prefix + history.names[1])
            if recorded is not None:
                history.loaded(recorded)


def histories_of(module: nn.Module) -> dict[str, History]:
    """The history of each point of a module that has one.

    Functions, because a module whose calls are rounded has its own methods, which may have any names.
    """
    return known(module).histories


def keep_histories(module: nn.Module, points: Mapping[str, Any]) -> None:
    """Create a history for each point with a delayed scale that lacks one of its length, and drop all others."""
    if torch.compiler.is_compiling():
        raise RuntimeError(_NOT_COMPILED)
    had = histories_of(module)
    wanted = {name: point.scale.history for name, point in points.items() if _is_delayed(point)}
    for name, history in had.items():
        if wanted.get(name) != history.length:
            for buffer in history.names:
                delattr(module, buffer)
    kept = {name: history for name, history in had.items() if wanted.get(name) == history.length}
    found = {name: kept.get(name) or History(module, name, length) for name, length in wanted.items()}
    if found or had:
        record_of(module).histories = found


def keep_modules(module: nn.Module, points: FivePoint | None) -> None:
    """Make the modules in points parts of a module, named after their point and on the device of its parameters; drop all others."""
    wanted = {} if points is None else modules_in(points)
    for name in (f"{name}_point" for name in POINTS):
        if name in module._modules and name not in wanted:
            del module._modules[name]
    for name, part in wanted.items():
        if module._modules.get(name) is not part:
            device = next((weight.device for weight in module.parameters(recurse=False) if not weight.is_meta), None)
            module.add_module(name, part.to(device))


def modules_in(points: FivePoint) -> dict[str, nn.Module]:
    """The modules in points, by the names that they have in a layer."""
    given = {name: getattr(points, name) for name in POINTS}
    return {f"{name}_point": point.module for name, point in given.items() if isinstance(point, CallablePoint) and point.module is not None}


def with_history(module: nn.Module, name: str, point: Quantizer) -> Quantizer:
    """A point with its history, if it has one."""
    if not isinstance(point.scale, Delayed):
        return point
    histories = histories_of(module)
    if name not in histories:
        raise ValueError(f"{name} has a delayed scale, for which there is no history yet: recreate the module with it")
    return replace(point, scale=Recorded(point.scale, histories[name]))


def with_histories(module: nn.Module, points: FivePoint, prefix: str = "") -> FivePoint:
    """Points with their histories, whose names have a prefix if they are not a layer's own."""
    chosen = [name for name in POINTS if prefix + name in histories_of(module)]
    found: dict[str, Any] = {name: with_history(module, prefix + name, getattr(points, name)) for name in chosen}
    return replace(points, **found)


def _is_delayed(point: object) -> bool:
    return isinstance(point, Quantizer) and isinstance(point.scale, Delayed)
