"""Borrowing a model for a measurement, and restoring it afterwards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import nn

from qsim.diagnostics.gradients.points import in_use as points_in_use
from qsim.nn.calls.settings import call_points, own_matrices
from qsim.nn.modules import FivePointModule
from qsim.nn.record import ProductRounding, record_of
from qsim.nn.restoring import Snapshot, generators_restored
from qsim.recipes.five_point import FivePoint


class _BorrowedLayer:
    """A layer with points."""

    def __init__(self, module: FivePointModule) -> None:
        self._module, self._points, self._source = module, module.points, module.stream_source

    def set_points(self, points: FivePoint) -> None:
        self._module.points = points

    def set_stream(self, number: int) -> None:
        self._module.stream_source = self._source
        self._module.stream ^= number

    def give_back(self) -> None:
        self._module.points, self._module.stream_source = self._points, self._source


class _BorrowedCalls:
    """A module whose own products are rounded, such as the experts of a mixture."""

    def __init__(self, module: nn.Module, given: ProductRounding) -> None:
        self._module, self._given = module, given

    def set_points(self, points: FivePoint) -> None:
        delayed = own_matrices(self._module) if points.is_delayed else []
        in_use: dict[str, tuple[FivePoint, FivePoint | None]] = {
            name: (points, points_in_use(self._module, self._given.points, points, f"{name}_")) for name in delayed
        }
        record_of(self._module).calls = replace(self._given, points=points, in_use=in_use)

    def set_stream(self, number: int) -> None:
        source, current = self._given.source, record_of(self._module).calls
        assert current is not None
        if number:
            source = source ^ number if isinstance(source, int) else source._replace(name=f"{source.name}.{number}")
        record_of(self._module).calls = replace(current, source=source)

    def give_back(self) -> None:
        record_of(self._module).calls = self._given


class Borrowed:
    """The state to restore: buffers, the histories of delayed scales, points and streams."""

    def __init__(self, model: nn.Module, modules: Sequence[nn.Module]) -> None:
        self._modules = [_borrow(module) for module in modules]
        self._snapshot = Snapshot(model)

    def set_points(self, points: Sequence[FivePoint]) -> None:
        """Give each module points."""
        for module, own in zip(self._modules, points, strict=True):
            module.set_points(own)

    def set_streams(self, numbers: Sequence[int]) -> None:
        """Make each module draw the bits of its weights again: these depend on the weights themselves and on a number of the module."""
        for module, number in zip(self._modules, numbers, strict=True):
            module.set_stream(number)

    def forget(self) -> None:
        """Undo the effects of a pass on normalization layers and delayed scales."""
        self._snapshot.restore()

    def give_back(self) -> None:
        """Restore everything."""
        for module in self._modules:
            module.give_back()
        self.forget()


def _borrow(module: nn.Module) -> _BorrowedLayer | _BorrowedCalls:
    if isinstance(module, FivePointModule):
        return _BorrowedLayer(module)
    given = call_points(module)
    assert given is not None, "not a module that rounds"
    return _BorrowedCalls(module, given)


@contextmanager
def borrowed(model: nn.Module, modules: Sequence[nn.Module], seed: int) -> Iterator[Borrowed]:
    """Borrow a model; it and torch's generators are restored afterwards, also after errors.

    Args:
        model: The model.
        modules: The modules that get other points.
        seed: The seed of torch's own generator meanwhile.
    """
    with generators_restored(model):
        # Only the CPU's generator: layers draw their seeds from it on every device.
        torch.default_generator.manual_seed(seed)
        state = Borrowed(model, modules)
        try:
            yield state
        finally:
            state.give_back()
