"""Hugging Face's Conv1D, a linear layer with a transposed weight, with points; imported only if a model has one."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import pytorch_utils

from qsim.nn import functional
from qsim.nn.modules import FivePointModule


class Conv1D(FivePointModule, pytorch_utils.Conv1D):  # type: ignore[misc]
    """`transformers.pytorch_utils.Conv1D` rounded at five points."""

    def __repr__(self) -> str:
        """The `repr` of the layer without points, with the points added."""
        return f"{super().__repr__()[:-1]}, points=({self.points}))"

    def forward(self, x: Tensor) -> Tensor:
        """The rounded product."""
        module: Any = self
        if self.points.is_identity:
            return super().forward(x)  # type: ignore[no-any-return]
        points, stream = self.in_use
        return functional.linear(x, module.weight.t(), module.bias, points, stream=stream)
