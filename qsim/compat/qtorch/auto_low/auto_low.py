"""QPyTorch's functions that round the outputs of a model's layers."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from qsim.compat.qtorch.number import Number
from qsim.compat.qtorch.quant import Quantizer
from qsim.functional.arguments import check_model
from qsim.rounding import Rounding

__all__ = ["lower", "sequential_lower"]

#: The layer types, and the modules of torch.nn.modules that define them.
_HOMES = {
    "conv": ("conv", "fold"),
    "linear": ("linear",),
    "pool": ("pooling",),
    "pad": ("padding",),
    "activation": ("activation",),
    "normalization": ("batchnorm", "instancenorm", "normalization"),
    "dropout": ("dropout",),
    "loss": ("loss",),
}
# These compute nothing, or more than one tensor.
_LEFT_OUT = (nn.Identity, nn.MultiheadAttention)


def lower(
    model: nn.Module,
    layer_types: Iterable[str] = (),
    forward_number: Number | None = None,
    backward_number: Number | None = None,
    forward_rounding: str | Rounding = "stochastic",
    backward_rounding: str | Rounding = "stochastic",
) -> None:
    """Round the outputs of a model's layers in place: the model has the same modules and parameters as before.

    Args:
        model: The model.
        layer_types: Layer types: any of `"conv"`, `"linear"`, `"pool"`, `"pad"`, `"activation"`, `"normalization"`, `"dropout"`,
            `"loss"`. Only torch's own layers are rounded, not subclasses.
        forward_number: See `quantizer`.
        backward_number: See `quantizer`.
        forward_rounding: See `quantizer`.
        backward_rounding: See `quantizer`.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If a layer type does not exist.

    Example:
        >>> import torch
        >>> from qsim.compat.qtorch import FixedPoint
        >>> from qsim.compat.qtorch.auto_low import lower
        >>> model = torch.nn.Sequential(torch.nn.Tanh())
        >>> lower(model, ["activation"], forward_number=FixedPoint(4, 2), forward_rounding="nearest")
        >>> model(torch.tensor([0.3, 3.0]))
        tensor([0.2500, 1.0000])
    """
    check_model("lower", model)
    kinds = _kinds("lower", layer_types)
    behind = _Behind(Quantizer(forward_number, backward_number, forward_rounding, backward_rounding))
    for module in model.modules():
        if type(module) in kinds:
            module.register_forward_hook(behind)


def sequential_lower(
    model: nn.Module,
    layer_types: Iterable[str] = (),
    forward_number: Number | None = None,
    backward_number: Number | None = None,
    forward_rounding: str | Rounding = "stochastic",
    backward_rounding: str | Rounding = "stochastic",
) -> nn.Module:
    """A copy of a model in which layers are replaced by `Sequential(layer, Quantizer(…))`.

    Args:
        model: The model; it is not changed.
        layer_types: See `lower`.
        forward_number: See `quantizer`.
        backward_number: See `quantizer`.
        forward_rounding: See `quantizer`.
        backward_rounding: See `quantizer`.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If a layer type does not exist.

    Example:
        >>> import torch
        >>> from qsim.compat.qtorch import FixedPoint
        >>> from qsim.compat.qtorch.auto_low import sequential_lower
        >>> sequential_lower(torch.nn.Sequential(torch.nn.ReLU()), ["activation"], forward_number=FixedPoint(4, 2))
        Sequential(
          (0): Sequential(
            (0): ReLU()
            (1): Quantizer(FixedPoint(wl=4, fl=2, clamp=True, symmetric=False), None, 'stochastic', 'stochastic')
          )
        )
    """
    check_model("sequential_lower", model)
    kinds = _kinds("sequential_lower", layer_types)
    quantizer = Quantizer(forward_number, backward_number, forward_rounding, backward_rounding)
    copied = copy.deepcopy(model)
    if _stands_alone(copied, kinds):
        return nn.Sequential(copied, quantizer)
    # Find all layers before replacing any; a layer that is used in several places stays shared.
    found = [(parent, name, child) for parent in copied.modules() for name, child in parent._modules.items()]
    places = [(parent, name, child) for parent, name, child in found if child is not None and _stands_alone(child, kinds)]
    exchanged: dict[nn.Module, nn.Module] = {}
    for parent, name, child in places:
        parent._modules[name] = exchanged.setdefault(child, nn.Sequential(child, quantizer))
    return copied


class _Behind:
    """A hook that rounds a layer's output."""

    def __init__(self, quantizer: Quantizer) -> None:
        self.quantizer = quantizer

    def __call__(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        rounded: Tensor = self.quantizer(output)
        return rounded


def _stands_alone(module: nn.Module, kinds: set[type[nn.Module]]) -> bool:
    """Whether a module is a layer of one of the kinds, and no container."""
    return type(module) in kinds and not any(True for _ in module.children())


def _kinds(owner: str, layer_types: Iterable[str]) -> set[type[nn.Module]]:
    """The classes of some layer types."""
    if isinstance(layer_types, str):
        raise TypeError(f"{owner}: layer_types must be a list of names, got the text {layer_types!r}")
    homes: set[str] = set()
    for name in layer_types:
        if name not in _HOMES:
            raise ValueError(f"{owner}: layer_types must be of {', '.join(map(repr, _HOMES))}, got {name!r}")
        homes |= {f"torch.nn.modules.{home}" for home in _HOMES[name]}
    classes = [found for found in vars(nn).values() if isinstance(found, type) and issubclass(found, nn.Module)]
    return {found for found in classes if found.__module__ in homes and found not in _LEFT_OUT}
