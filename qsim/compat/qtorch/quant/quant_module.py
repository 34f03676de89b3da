"""QPyTorch's module that rounds its input."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from qsim.compat.qtorch.number import Number
from qsim.compat.qtorch.quant.quant_function import quantizer
from qsim.rounding import Rounding

__all__ = ["Quantizer"]


class Quantizer(nn.Module):
    """Round values in the forward pass and gradients in the backward pass: `quantizer` as a module.

    Args:
        forward_number: See `quantizer`.
        backward_number: See `quantizer`.
        forward_rounding: See `quantizer`.
        backward_rounding: See `quantizer`.

    Example:
        >>> import torch
        >>> from qsim.compat.qtorch import FloatingPoint
        >>> from qsim.compat.qtorch.quant import Quantizer
        >>> model = torch.nn.Sequential(torch.nn.ReLU(), Quantizer(FloatingPoint(4, 3), FloatingPoint(5, 2), forward_rounding="nearest"))
        >>> model(torch.tensor([-1.0, 0.3]))
        tensor([0.0000, 0.3125])
    """

    def __init__(
        self,
        forward_number: Number | None = None,
        backward_number: Number | None = None,
        forward_rounding: str | Rounding = "stochastic",
        backward_rounding: str | Rounding = "stochastic",
    ) -> None:
        super().__init__()
        self._roundings = forward_rounding, backward_rounding
        self.quantize = quantizer(forward_number, backward_number, forward_rounding, backward_rounding)

    def forward(self, x: Tensor) -> Tensor:
        """The rounded input."""
        return self.quantize(x)

    def extra_repr(self) -> str:
        """The numbers and the roundings, forward and backward."""
        how: Any = self.quantize
        return ", ".join(map(repr, (how.forward_number, how.backward_number, *self._roundings)))
