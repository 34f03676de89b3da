"""The base class of controls: the count of steps, and the layers of a model that are controlled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, distributed, nn

from qsim.formats.base import check_integer
from qsim.nn.modules import FivePointModule
from qsim.random import shards

if TYPE_CHECKING:
    from typing_extensions import Self

#: A layer with points.
Layer = FivePointModule


def agreed(numbers: Tensor) -> Tensor:
    """The sums of all processes' numbers, in a distributed run: on the model's device, as NCCL needs them."""
    if distributed.is_available() and distributed.is_initialized():
        distributed.all_reduce(numbers)
    return numbers


def weight_of(layer: Layer) -> nn.Parameter:
    """The weight of a layer."""
    return layer.get_parameter("weight")


class Control:
    """Base class of controls: a subclass defines `begin`, `advance`, and what it keeps between steps.

    Attributes:
        steps: Number of optimizer steps so far.

    Example:
        >>> import torch, qsim
        >>> class Largest(qsim.control.Control):  # prints the largest weight of each layer after every step
        ...     def begin(self, layers):
        ...         pass
        ...     def advance(self, layers):
        ...         print({name: layer.weight.abs().max().item() for name, layer in layers.items()})
        >>> model = qsim.convert(torch.nn.Sequential(torch.nn.Linear(2, 2)), "mxfp8")
        >>> _ = torch.nn.init.constant_(model[0].weight, 0.5)
        >>> Largest().start(model).step()
        {'0': 0.5}
    """

    def __init__(self) -> None:
        self.steps = 0
        self._layers: dict[str, Layer] | None = None
        self._loaded: Mapping[str, Any] | None = None

    def start(self, model: nn.Module) -> Self:
        """Bind the control to a converted model; after `load_state_dict`, continue where the saved run was.

        Args:
            model: The model.

        Returns:
            The control.

        Raises:
            TypeError: If it is not a module.
            ValueError: If the model has no layer that can be controlled, or a loaded state is that of another model.
        """
        owner = type(self).__name__
        if not isinstance(model, nn.Module):
            raise TypeError(f"{owner}: start takes a torch.nn.Module, got {type(model).__name__}")
        found = {name: module for name, module in model.named_modules() if isinstance(module, FivePointModule) and self.controls(module)}
        if not found:
            raise ValueError(f"{owner}: the model has no {self.needs}: convert it first, with qsim.convert")
        for name, layer in found.items():
            if shards.is_distributed(weight_of(layer)):
                raise ValueError(f"{owner}: {name}: its weight is a distributed tensor, and the control sees whole weights only")
        loaded, self._loaded = self._loaded, None
        if loaded is None:
            self.begin(found)
        else:
            unknown = [name for name in loaded["layers"] if name not in found]
            if unknown:
                raise ValueError(f"{owner}: the state has a layer {unknown[0]!r}, and the model has {', '.join(found)}")
            self.resume(found, loaded)
        self._layers = found
        return self

    def step(self) -> None:
        """Count a step of the optimizer, and act if it is time. Call it after the optimizer's `step`.

        Raises:
            RuntimeError: If the control has not been started.
        """
        if self._layers is None:
            raise RuntimeError(f"{type(self).__name__}: start it first, with control.start(model)")
        self.steps += 1
        self.advance(self._layers)

    #: The layers that are controlled, for errors.
    needs = "linear layer with points"

    def controls(self, layer: Layer) -> bool:
        """Whether a layer is controlled: a parametrized weight is computed, and cannot be set."""
        return isinstance(layer, nn.Linear) and "weight" in layer._parameters

    def begin(self, layers: dict[str, Layer]) -> None:
        """Begin a run."""
        raise NotImplementedError

    def advance(self, layers: dict[str, Layer]) -> None:
        """Act after a step."""
        raise NotImplementedError

    def resume(self, layers: dict[str, Layer], state: Mapping[str, Any]) -> None:
        """Continue a run from its state."""
        raise NotImplementedError

    def kept(self) -> dict[str, Any]:
        """Return the measurements of each layer, for the state."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """The number of steps, and what was measured in each layer."""
        return {"steps": self.steps, "layers": self.kept()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume from a state. Call it before `start`.

        Raises:
            ValueError: If it is not the state of a control.
        """
        if set(state_dict) != {"steps", "layers"}:
            raise ValueError(f"{type(self).__name__}: a state has steps and layers, got {', '.join(map(str, state_dict)) or 'nothing'}")
        self.steps = check_integer(type(self).__name__, "steps", state_dict["steps"], 0, 2**62)
        self._loaded = state_dict


def checked(controls: Sequence[Any]) -> Sequence[Control]:
    """Raise an error unless a callback's arguments are controls; return them."""
    for control in controls or [None]:
        if not isinstance(control, Control):
            raise TypeError(f"ControlCallback: give controls of qsim.control, such as OsciReset(), got {control!r}")
    return controls
