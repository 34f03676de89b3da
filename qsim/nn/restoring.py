"""Running a model without leaving a trace: its buffers, the histories of delayed scales, and torch's generators are restored."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from qsim.nn.histories import History, RemembersAmaxes, histories_of


class Snapshot:
    """The buffers and histories of a model, as they were when the snapshot was taken."""

    def __init__(self, model: nn.Module) -> None:
        self._buffers = [
            (module, name, buffer, buffer.detach().clone())
            for module in model.modules()
            for name, buffer in module.named_buffers(recurse=False)
        ]
        self._histories = [(history, history.mark()) for history in _histories(model)]

    def restore(self) -> None:
        """Undo the effects of a pass on normalization layers and delayed scales."""
        for module, name, buffer, content in self._buffers:
            if module._buffers[name] is not buffer:
                setattr(module, name, buffer)
            # Through `data`: the value is restored, so graphs that saved it need not be invalidated.
            buffer.data.copy_(content)
        for history, mark in self._histories:
            history.return_to(mark)


@contextmanager
def generators_restored(model: nn.Module) -> Iterator[None]:
    """Restore torch's generators afterwards: that of the CPU, and those of the devices that the model is on."""
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers()) if tensor.device.type == "cuda"}
    with torch.random.fork_rng(devices=[device.index for device in devices]):
        yield


def _histories(model: nn.Module) -> list[History]:
    return [history for module in model.modules() if isinstance(module, RemembersAmaxes) for history in histories_of(module).values()]
