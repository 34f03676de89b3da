"""Sensitivities: the effect of rounding each tensor of each layer on gradients and the loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from qsim.text.records import Records, Values


@dataclass(frozen=True)
class Sensitivity:
    """The effect of rounding one tensor of one layer to one candidate.

    Attributes:
        layer: The layer.
        point: The tensor, by its first point: `act`, `weight` or `grad`, each with the points of the backward pass that round it, too.
        candidate: The candidate's name.
        elements: The number of elements, in both products that take the tensor.
        bits: The candidate's bits per element, with those of scales.
        bias: The squared mean error that it makes in the gradients of all weights, each relative to the square of that gradient.
        variance: The variance of that error, over batches and draws.
        loss: The increase of the loss, to second order.
        underflowed: The share of elements that become zero; of two points that round the tensor, that of the worse one.

    Example:
        >>> from qsim.diagnostics import Sensitivity
        >>> Sensitivity("0", "act", "e2m1", elements=4096, bits=4.25, bias=0.25, variance=0.5, loss=0.0, underflowed=0.1).error
        0.75
    """

    layer: str
    point: str
    candidate: str
    elements: int
    bits: float
    bias: float
    variance: float
    loss: float
    underflowed: float

    @property
    def error(self) -> float:
        """The mean squared error of the gradients: bias and variance."""
        return self.bias + self.variance


def _short(name: str) -> Callable[[Sensitivity], str]:
    """A function that returns a number of a sensitivity as text."""
    return lambda record: f"{getattr(record, name):.1e}"


@dataclass(frozen=True)
class Sensitivities(Records[Sensitivity]):
    """The sensitivities of all layers, tensors and candidates; prints as a table.

    Attributes:
        records: The sensitivities.
        batches: The number of batches.
        probes: The number of random directions.

    Example:
        >>> from qsim.diagnostics import Sensitivities, Sensitivity
        >>> found = Sensitivities((Sensitivity("0", "act", "mxfp4", 4096, 4.25, 1e-4, 2e-3, 1e-5, 0.1),), batches=3, probes=4)
        >>> print(found)
        layer  point  candidate  bits    error     bias  variance     loss  underflowed
        0      act    mxfp4      4.25  2.1e-03  1.0e-04   2.0e-03  1.0e-05        10.0%
    """

    batches: int
    probes: int

    COLUMNS: ClassVar[Values] = {
        **{name: name for name in ("layer", "point", "candidate")},
        "bits": lambda record: f"{record.bits:g}",
        **{name: _short(name) for name in ("error", "bias", "variance", "loss")},
        "underflowed": lambda record: f"{record.underflowed:.1%}",
    }
    RIGHT: ClassVar[tuple[str, ...]] = tuple(COLUMNS)[3:]
    KEY: ClassVar[tuple[str, ...]] = ("layer", "point", "candidate")
    NAME: ClassVar[str] = "sensitivities"
    LOSSES: ClassVar[Values] = {name: name for name in ("error", "bias", "variance", "loss", "underflowed")}
