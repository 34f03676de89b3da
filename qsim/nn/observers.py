"""Where somebody may look on while a layer rounds: `qsim.diagnostics.Monitor` does.

Nobody does, usually, and then a layer asks once for each product and finds `None`. Compiled code does not even ask.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from qsim.random import WHOLE, Place

if TYPE_CHECKING:
    from qsim.nn.scaled_operands import Point
    from qsim.quantizer import Quantizer


class Observer(Protocol):
    """Somebody who looks at the points of one layer. Whatever rounds tells what it is given, before or after it has used it itself.

    Nothing that an observer does may draw random numbers, change what it sees, or wait for the device.
    """

    def measured(self, x: Tensor, point: Quantizer, seed: Tensor | None, stream: int, place: Place = WHOLE) -> Any:
        """Takes note of a tensor that is rounded without scales, for a point that may come to be used later."""

    def used(self, name: str, measured: Any) -> None:
        """What was noted was used at a point."""

    def rounds(self, name: str, x: Tensor, point: Quantizer, seed: Tensor | None, stream: int, place: Place = WHOLE) -> None:
        """A tensor is rounded at a point without scales, and used."""

    def rounds_scaled(self, name: str, x: Tensor, point: Point, seed: Tensor | None, stream: int, place: Place = WHOLE) -> None:
        """A tensor is rounded at a point that has a scale or a transform, and used."""


_current: Observer | None = None


def current() -> Observer | None:
    """Who looks at the layer that runs now."""
    return None if torch.compiler.is_compiling() else _current


def exchange(observer: Observer | None) -> Observer | None:
    """Lets somebody else look on, or nobody; gives who did before."""
    global _current
    before, _current = _current, observer
    return before
