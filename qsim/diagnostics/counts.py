"""Counts of outcomes for the elements rounded at one point of a layer, and at all points in one sample."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from qsim.text.records import Records, Values, plain
from qsim_kernels.numbers import tallies

#: The text before the first sample.
NO_SAMPLE = "no sample yet: a sample ends with its step, at monitor.step() or at the step of the optimizer given to Monitor"

#: The note on layers that did not run in a step.
NEVER_CALLED = "never called in this step, or only in compiled code"


@dataclass(frozen=True, slots=True)
class Counts:
    """Counts of outcomes for the elements rounded at one point of a layer.

    An element is the number that is rounded: after the transform and divided by its scale, if any. Each is one of five: NaN,
    saturated, underflowed, exact, or rounded to another number.

    Attributes:
        layer: Name of the layer in the model.
        point: `act`, `weight`, `act_bwd`, `weight_bwd`, `grad`, `grad_w`; of `qsim.nn.Quantize` `forward` or `backward`.
        quantizer: A short description of the quantizer.
        range: The smallest and the largest positive value of the format.
        elements: Number of elements.
        saturated: Beyond the format's largest or smallest value, in any overflow mode; includes all infinities.
        underflowed: Not zero before, and zero after.
        exact: Already values of the format, including zero.
        zero: Zeros.
        nan: NaN.
        infinite: Infinities.
        below: Magnitudes below 2**-126 that are not zero.
        lowest: Exponent of the first number of `histogram`.
        histogram: The number of finite magnitudes between each power of two and the next.
        signal: Sum of squares, in the units of the tensor, of elements that are finite before and after.
        noise: Sum of squared rounding errors there.

    Example:
        >>> import torch, qsim
        >>> model = qsim.convert(torch.nn.Sequential(torch.nn.Linear(2, 1)), qsim.FivePoint(act="e4m3"))
        >>> with qsim.diagnostics.Monitor(model) as monitor:
        ...     y = model(torch.tensor([[1.0, 500.0], [0.0, 1e-9]]))
        ...     monitor.step()
        >>> counts = monitor.samples[0]["0", "act"]
        >>> counts.elements, counts.saturated, counts.underflowed, counts.exact
        (4, 1, 1, 2)
    """

    layer: str
    point: str
    quantizer: str
    range: tuple[float, float]
    elements: int
    saturated: int
    underflowed: int
    exact: int
    zero: int
    nan: int
    infinite: int
    below: int
    lowest: int
    histogram: array[int]
    signal: float
    noise: float

    @classmethod
    def of(cls, layer: str, point: str, quantizer: str, range: tuple[float, float], counts: Sequence[int], sums: Sequence[float]) -> Counts:
        """Counts of the operator `tally`, by names."""
        # Field 0 counts numbers below all powers of two of the histogram.
        used = [field for field in _POWERS if counts[field]]
        first, last = (used[0], used[-1]) if used else (tallies.BIAS, tallies.BIAS - 1)
        numbers = {name: counts[field] for name, field in _OUTCOMES.items()}
        numbers |= {"infinite": counts[tallies.SPECIAL] - numbers["nan"], "below": counts[0] - numbers["zero"]}
        elements, histogram = sum(counts[: tallies.FIELDS]), array("q", counts[first : last + 1])
        signal, noise = sums[tallies.SIGNAL], sums[tallies.NOISE]
        lowest = first - tallies.BIAS
        return cls(layer, point, quantizer, range, elements, **numbers, lowest=lowest, histogram=histogram, signal=signal, noise=noise)

    @property
    def shares(self) -> dict[str, float]:
        """Shares of all elements that saturated, underflowed to zero, are exact, are NaN."""
        return shares_of([self])

    @property
    def sqnr(self) -> float:
        """The ratio of signal to rounding errors in dB: infinite without errors, NaN without a signal."""
        return sqnr_of([self])

    @property
    def exponents(self) -> dict[int, int]:
        """Number of finite magnitudes in `[2**e, 2**(e + 1))`, for each `e` that has any."""
        return {exponent: count for exponent, count in enumerate(self.histogram, self.lowest) if count}

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain strings and numbers for JSON: `sqnr` is `None` if it is not finite."""
        names = ("layer", "point", "quantizer", "elements", "saturated", "underflowed", "exact", "zero", "nan", "infinite", "below")
        found: dict[str, Any] = {name: getattr(self, name) for name in names}
        found |= {"sqnr": plain(self.sqnr), "smallest": self.range[0], "largest": self.range[1]}
        return found | {"exponents": {str(exponent): count for exponent, count in self.exponents.items()}}

    def summary(self) -> dict[str, Any]:
        """Scalars to store: layer, point, elements, shares, that of zeros among them, and SQNR."""
        facts = {name: getattr(self, name) for name in ("layer", "point", "elements")}
        return plain({**facts, **self.shares, "zero": _share_of("zero")(self), "sqnr": self.sqnr})  # type: ignore[no-any-return]


_POWERS = range(1, tallies.SPECIAL)
#: The fields of outcomes.
_OUTCOMES = {name: getattr(tallies, name.upper()) for name in ("saturated", "underflowed", "exact", "zero", "nan")}

#: Outcomes reported as shares.
SHARES = ("saturated", "underflowed", "exact", "nan")


def _share_of(name: str) -> Callable[[Counts], float]:
    """A function that returns the share of the elements that a count is of."""
    return lambda counts: getattr(counts, name) / (counts.elements or math.nan)


@dataclass(frozen=True)
class Sample(Records[Counts]):
    """Counts of one sampled step, in the order of the model's layers; prints as a table.

    Attributes:
        records: The counts.
        step: Number of the step, starting at 0.
        never_called: Names of layers with points that were not called in this step, or only in compiled code.

    Example:
        >>> import torch, qsim
        >>> model = qsim.convert(torch.nn.Sequential(torch.nn.Linear(2, 1)), qsim.FivePoint(act="e4m3", weight="e2m1"))
        >>> with qsim.diagnostics.Monitor(model) as monitor:
        ...     y = model(torch.tensor([[1.0, 500.0]]))
        ...     monitor.step()
        >>> sample = monitor.samples[0]
        >>> sample.step, [(counts.layer, counts.point) for counts in sample], sample["0", "act"].saturated
        (0, [('0', 'act'), ('0', 'weight')], 1)
    """

    step: int
    never_called: tuple[str, ...] = ()

    COLUMNS: ClassVar[Values] = {
        **{name: name for name in ("layer", "point", "quantizer", "elements")},
        **{name: _share_of(name) for name in ("saturated", "underflowed", "exact", "zero")},
        "NaN": _share_of("nan"),
        "SQNR": lambda counts: "-" if math.isnan(counts.sqnr) else "no errors" if math.isinf(counts.sqnr) else f"{counts.sqnr:.1f} dB",
    }
    RIGHT: ClassVar[tuple[str, ...]] = tuple(COLUMNS)[3:]
    NAME: ClassVar[str] = "points"
    #: Underflow is compared as a share of the numbers that are not zero: behind a ReLU half of the gradients are zero anyway.
    LOSSES: ClassVar[Values] = {
        "sqnr": lambda counts: -counts.sqnr,
        **{name: _share_of(name) for name in SHARES},
        "underflowed": lambda counts: counts.underflowed / max(counts.elements - counts.zero, 1),
    }

    def _above(self) -> list[str]:
        return [f"step {self.step}"]

    def _below(self) -> list[str]:
        return [f"{NEVER_CALLED}: {', '.join(self.never_called)}"] if self.never_called else []

    def rows(self) -> list[dict[str, Any]]:
        """A plain dictionary of scalars for each point, and one with a note for each layer that was never called."""
        absent = {"point": None, "elements": 0, "note": NEVER_CALLED}
        return super().rows() + [{"step": self.step, "layer": layer, **absent} for layer in self.never_called]

    def by_point(self) -> dict[str, Sample]:
        """Counts of all layers at each point."""
        return {point: self.filter(point=point) for point in dict.fromkeys(counts.point for counts in self)}

    def aggregates(self) -> dict[str, Any]:
        """For each point, the shares and SQNR of all layers together, and the values of the worst layer."""
        numbers: dict[str, float] = {}
        for point, counts in self.by_point().items():
            together = shares_of(counts) | {"sqnr": sqnr_of(counts)}
            worst = {name: max(each.shares[name] for each in counts) for name in ("saturated", "underflowed", "nan")}
            worst["sqnr"] = min((each.sqnr for each in counts if math.isfinite(each.sqnr)), default=math.nan)
            numbers |= {f"all layers/{point}/{name}": number for name, number in together.items()}
            numbers |= {f"worst layer/{point}/{name}": number for name, number in worst.items()}
        return numbers


def shares_of(points: Sequence[Counts]) -> dict[str, float]:
    """The shares of some points together."""
    whole = sum(counts.elements for counts in points) or math.nan
    return {name: sum(getattr(counts, name) for counts in points) / whole for name in SHARES}


def sqnr_of(points: Sequence[Counts]) -> float:
    """The ratio of signal to rounding errors of some points together, in dB."""
    signal, noise = sum(counts.signal for counts in points), sum(counts.noise for counts in points)
    if not signal > 0:
        return math.nan
    return 10 * math.log10(signal / noise) if noise > 0 else math.inf
