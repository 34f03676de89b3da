"""Running a model once, for the scales that a checkpoint stores for inputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from qsim.nn.restoring import Snapshot, generators_restored


def input_amaxes(model: nn.Module, layers: Mapping[str, nn.Module], example: Any) -> dict[str, Tensor]:
    """The largest magnitudes of the inputs of layers when the model runs in evaluation; nothing in the model changes.

    Args:
        model: The model.
        layers: The layers by name.
        example: A tuple of inputs, a dictionary of inputs by keyword, or one input.
    """
    args, kwargs = ((), example) if isinstance(example, Mapping) else (example if isinstance(example, tuple) else (example,), {})
    found: dict[str, Tensor] = {}

    def watch(name: str) -> Any:
        def note(_: nn.Module, inputs: tuple[Any, ...]) -> None:
            largest = inputs[0].detach().abs().amax()
            found[name] = torch.maximum(found[name], largest) if name in found else largest

        return note

    hooks = [layer.register_forward_pre_hook(watch(name)) for name, layer in layers.items()]
    training = {module: module.training for module in model.modules()}
    snapshot = Snapshot(model)
    try:
        with torch.no_grad(), generators_restored(model):
            model.eval()(*args, **kwargs)
    finally:
        snapshot.restore()
        for module, mode in training.items():
            module.training = mode
        for hook in hooks:
            hook.remove()
    return found
