"""Counts of outcomes for the elements rounded at one point of a layer, and at all points in one sample."""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qsim.text.columns import aligned
from qsim.text.percentages import percent
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
        layer: The layer's name in the model.
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
        lowest: The exponent of the first number of `histogram`.
        histogram: The number of finite magnitudes between each power of two and the next.
        signal: The sum of squares, in the units of the tensor, of elements that are finite before and after.
        noise: The sum of squared rounding errors there.

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
        """The counts of the operator `tally`, by names."""
        zero, nan = counts[tallies.ZERO], counts[tallies.NAN]
        # Field 0 counts numbers below all powers of two of the histogram.
        used = [field for field in _POWERS if counts[field]]
        first, last = (used[0], used[-1]) if used else (tallies.BIAS, tallies.BIAS - 1)
        return cls(
            layer=layer,
            point=point,
            quantizer=quantizer,
            range=range,
            elements=sum(counts[: tallies.FIELDS]),
            saturated=counts[tallies.SATURATED],
            underflowed=counts[tallies.UNDERFLOWED],
            exact=counts[tallies.EXACT],
            zero=zero,
            nan=nan,
            infinite=counts[tallies.SPECIAL] - nan,
            below=counts[0] - zero,
            lowest=first - tallies.BIAS,
            histogram=array("q", counts[first : last + 1]),
            signal=sums[tallies.SIGNAL],
            noise=sums[tallies.NOISE],
        )

    @property
    def shares(self) -> dict[str, float]:
        """The shares of all elements that saturated, underflowed to zero, are exact, are NaN."""
        return shares_of([self])

    @property
    def sqnr(self) -> float:
        """The ratio of signal to rounding errors in dB: infinite without errors, NaN without a signal."""
        return sqnr_of([self])

    @property
    def exponents(self) -> dict[int, int]:
        """The number of finite magnitudes in `[2**e, 2**(e + 1))`, for each `e` that has any."""
        return {exponent: count for exponent, count in enumerate(self.histogram, self.lowest) if count}

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain strings and numbers for JSON: `sqnr` is `None` if it is not finite."""
        plain = ("layer", "point", "quantizer", "elements", "saturated", "underflowed", "exact", "zero", "nan", "infinite", "below")
        found: dict[str, Any] = {name: getattr(self, name) for name in plain}
        found |= {"sqnr": self.sqnr if math.isfinite(self.sqnr) else None, "smallest": self.range[0], "largest": self.range[1]}
        return found | {"exponents": {str(exponent): count for exponent, count in self.exponents.items()}}

    def summary(self) -> dict[str, Any]:
        """The scalars to store: layer, point, elements, shares, that of zeros among them, and SQNR."""
        zero = self.zero / self.elements if self.elements else math.nan
        sqnr = self.sqnr if math.isfinite(self.sqnr) else None
        return {"layer": self.layer, "point": self.point, "elements": self.elements, **self.shares, "zero": zero, "sqnr": sqnr}


_POWERS = range(1, tallies.SPECIAL)

#: Outcomes reported as shares.
SHARES = ("saturated", "underflowed", "exact", "nan")


@dataclass(frozen=True)
class Sample:
    """The counts of one sampled step.

    Attributes:
        step: Its number, starting at 0.
        points: The counts, in the order of the model's layers.
        never_called: The names of layers with points that were not called in this step, or only in compiled code.

    Example:
        >>> import torch, qsim
        >>> model = qsim.convert(torch.nn.Sequential(torch.nn.Linear(2, 1)), qsim.FivePoint(act="e4m3", weight="e2m1"))
        >>> with qsim.diagnostics.Monitor(model) as monitor:
        ...     y = model(torch.tensor([[1.0, 500.0]]))
        ...     monitor.step()
        >>> sample = monitor.samples[0]
        >>> sample.step, [(counts.layer, counts.point) for counts in sample.points]
        (0, [('0', 'act'), ('0', 'weight')])
    """

    step: int
    points: tuple[Counts, ...]
    never_called: tuple[str, ...] = ()

    def __getitem__(self, place: tuple[str, str]) -> Counts:
        """The counts at a point of a layer."""
        if not isinstance(place, tuple) or len(place) != 2:
            raise TypeError(f"a sample is asked for a layer and a point, as in sample['0', 'act'], got {place!r}")
        for counts in self.points:
            if (counts.layer, counts.point) == place:
                return counts
        points = [counts.point for counts in self.points if counts.layer == place[0]]
        there = f"points that rounded there are {', '.join(points)}" if points else "no point of that layer rounded, or it does not exist"
        raise KeyError(f"nothing was rounded at {place[1]!r} of {place[0]!r} in step {self.step}: {there}")

    def to_dict(self) -> dict[str, Any]:
        """The sample as JSON values."""
        found = {"step": self.step, "points": [counts.to_dict() for counts in self.points]}
        return found | ({"never_called": list(self.never_called)} if self.never_called else {})

    def to_json(self) -> str:
        """The sample as one line of JSON."""
        return json.dumps(self.to_dict(), allow_nan=False)

    def summary(self) -> list[dict[str, Any]]:
        """A plain dictionary of scalars for each point, and one with a note for each layer that was never called."""
        absent = {"point": None, "elements": 0, "note": NEVER_CALLED}
        found = [{"step": self.step, **counts.summary()} for counts in self.points]
        return found + [{"step": self.step, "layer": layer, **absent} for layer in self.never_called]

    def worst(self, by: str) -> tuple[Counts, ...]:
        """The counts, starting with the largest loss: by `"sqnr"`, or by a share such as `"underflowed"`.

        Underflow is compared as a share of the numbers that are not zero: behind a ReLU half of the gradients are zero anyway.

        Raises:
            ValueError: If it is neither.
        """
        if by not in ("sqnr", *SHARES):
            raise ValueError(f"by: must be one of sqnr, {', '.join(SHARES)}; got {by!r}")
        if by == "sqnr":
            return tuple(sorted(self.points, key=lambda counts: math.inf if math.isnan(counts.sqnr) else counts.sqnr))
        if by == "underflowed":
            return tuple(sorted(self.points, key=lambda counts: -counts.underflowed / max(counts.elements - counts.zero, 1)))
        return tuple(sorted(self.points, key=lambda counts: -counts.shares[by] if counts.elements else 0.0))

    def table(self, by: str | None = None, rows: int | None = None) -> str:
        """The shares in per cent and SQNR, as a human-readable table. Zeros are exact; an all-zero gradient was lost before this point."""
        heading = ("layer", "point", "quantizer", "elements", "saturated", "underflowed", "exact", "zero", "NaN", "SQNR")
        points = (self.points if by is None else self.worst(by))[:rows]
        notes = [f"{NEVER_CALLED}: {', '.join(self.never_called)}"] if self.never_called else []
        return "\n".join([f"step {self.step}", aligned([heading, *map(_cells, points)], left=3), *notes])


def _cells(counts: Counts) -> tuple[str, ...]:
    of_all = {**counts.shares, "zero": counts.zero / (counts.elements or math.nan)}
    shares = [percent(of_all[name]) for name in ("saturated", "underflowed", "exact", "zero", "nan")]
    sqnr = "-" if math.isnan(counts.sqnr) else "no errors" if math.isinf(counts.sqnr) else f"{counts.sqnr:.1f} dB"
    return (counts.layer, counts.point, counts.quantizer, str(counts.elements), *shares, sqnr)


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


def by_place(samples: Iterable[Sample]) -> Mapping[tuple[str, str], list[tuple[int, Counts]]]:
    """The counts of each point of each layer over the steps."""
    found: dict[tuple[str, str], list[tuple[int, Counts]]] = {}
    for sample in samples:
        for counts in sample.points:
            found.setdefault((counts.layer, counts.point), []).append((sample.step, counts))
    return found
