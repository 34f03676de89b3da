"""Borrowing a model for a measurement, and restoring it afterwards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from qsim.nn.modules import FivePointModule
from qsim.nn.restoring import Snapshot, generators_restored
from qsim.recipes.five_point import FivePoint


class Borrowed:
    """The state to restore: buffers, the histories of delayed scales, points and streams."""

    def __init__(self, model: nn.Module, layers: Sequence[FivePointModule]) -> None:
        self._layers = [(layer, layer.points, layer.stream_source) for layer in layers]
        self._snapshot = Snapshot(model)

    def set_points(self, points: Sequence[FivePoint]) -> None:
        """Give each layer points."""
        for (layer, _, _), own in zip(self._layers, points, strict=True):
            layer.points = own

    def set_streams(self, numbers: Sequence[int]) -> None:
        """Make each layer draw the bits of its weight again: these depend on the weight itself and on a number of the layer."""
        for (layer, _, source), number in zip(self._layers, numbers, strict=True):
            layer.stream_source = source
            layer.stream ^= number

    def forget(self) -> None:
        """Undo the effects of a pass on normalization layers and delayed scales."""
        self._snapshot.restore()

    def give_back(self) -> None:
        """Restore everything."""
        for layer, points, source in self._layers:
            layer.points, layer.stream_source = points, source
        self.forget()


@contextmanager
def borrowed(model: nn.Module, layers: Sequence[FivePointModule], seed: int) -> Iterator[Borrowed]:
    """Borrow a model; it and torch's generators are restored afterwards, also after errors.

    Args:
        model: The model.
        layers: The layers that get other points.
        seed: The seed of torch's own generator meanwhile.
    """
    with generators_restored(model):
        # Only the CPU's generator: layers draw their seeds from it on every device.
        torch.default_generator.manual_seed(seed)
        state = Borrowed(model, layers)
        try:
            yield state
        finally:
            state.give_back()
