"""Borrowing a model for a measurement, and restoring it afterwards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from qsim.nn.histories import History, RemembersAmaxes
from qsim.nn.modules import FivePointModule
from qsim.recipes.five_point import FivePoint


class Borrowed:
    """The state to restore: buffers, the histories of delayed scales, points and streams."""

    def __init__(self, model: nn.Module, layers: Sequence[FivePointModule]) -> None:
        self._layers = [(layer, layer.points, layer.stream_source) for layer in layers]
        self._buffers = [
            (module, name, buffer, buffer.detach().clone())
            for module in model.modules()
            for name, buffer in module.named_buffers(recurse=False)
        ]
        self._histories = [(history, history.mark()) for history in _histories(model)]

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
        for module, name, buffer, content in self._buffers:
            if module._buffers[name] is not buffer:
                setattr(module, name, buffer)
            # Through `data`: the value is restored, so graphs that saved it need not be invalidated.
            buffer.data.copy_(content)
        for history, mark in self._histories:
            history.return_to(mark)

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
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers()) if tensor.device.type == "cuda"}
    with torch.random.fork_rng(devices=[device.index for device in devices]):
        # Only the CPU's generator: layers draw their seeds from it on every device.
        torch.default_generator.manual_seed(seed)
        state = Borrowed(model, layers)
        try:
            yield state
        finally:
            state.give_back()


def _histories(model: nn.Module) -> list[History]:
    return [history for module in model.modules() if isinstance(module, RemembersAmaxes) for history in module.histories.values()]
