"""Running a model once, for the scales that a checkpoint stores for inputs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from qsim.nn.examples import inputs_of
from qsim.nn.product import observers
from qsim.nn.product.sites import Site
from qsim.nn.restoring import Snapshot, generators_restored


class _Inputs(observers.Observer):
    """An observer of products with one parameter that records the largest magnitude of their inputs."""

    def __init__(self, note: Callable[[Tensor], None]) -> None:
        self._note = note

    def rounds(self, site: Site, x: Tensor, seed: Tensor | None, rounded: Tensor | None = None) -> None:
        """Record an input."""
        if site.name == "act":
            self._note(x if site.groups is None else x[: int(site.groups.ends[-1])])


def input_amaxes(model: nn.Module, layers: Mapping[str, nn.Module], parameters: Collection[str], example: Any) -> dict[str, Tensor]:
    """The largest magnitudes of the inputs of layers when the model runs in evaluation; nothing in the model changes.

    Args:
        model: The model.
        layers: The layers by name.
        parameters: The names of parameters by which modules multiply outside of layers; the inputs of these products count, too.
        example: A tuple of inputs, a dictionary of inputs by keyword, or one input.
    """
    args, kwargs = inputs_of(example)
    found: dict[str, Tensor] = {}

    def note(name: str, x: Tensor) -> None:
        if x.numel():
            largest = x.detach().abs().amax()
            found[name] = torch.maximum(found[name], largest) if name in found else largest

    def watch(name: str) -> Any:
        return lambda _, inputs: note(name, inputs[0])

    owners = {(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]): _Inputs(partial(note, name)) for name in parameters}
    hooks = [layer.register_forward_pre_hook(watch(name)) for name, layer in layers.items()]
    training = {module: module.training for module in model.modules()}
    snapshot = Snapshot(model)
    before = observers.watch_calls(lambda module, name: owners.get((module, name)))
    try:
        with torch.no_grad(), generators_restored(model):
            model.eval()(*args, **kwargs)
    finally:
        observers.watch_calls(before)
        snapshot.restore()
        for module, mode in training.items():
            module.training = mode
        for hook in hooks:
            hook.remove()
    return found
