"""Advice about rounding that ruins a run: the worst points of a sampled step, what happens there, and remedies computed from the counts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from qsim.diagnostics.counts import NO_SAMPLE, Counts, Sample
from qsim.diagnostics.remedies import loss_scale_down, loss_scale_up, remedies, underflow_share
from qsim.diagnostics.updates import Updates
from qsim.functional.quantizer import GRADIENTS, Quantizer
from qsim.text.percentages import percent
from qsim.text.records import Records, Values

#: Underflow is reported from the first share of the numbers that are not zero if SQNR is below `NOISY` dB, and always from the second; it
#: is warned about from the second if SQNR is below `RUINED` dB.
UNDERFLOW, MOST_UNDERFLOW = 0.5, 0.9
NOISY, RUINED = 6.0, 3.0
#: From this share of lost updates, they are reported; and warned about.
LOST, RUINED_LOST = 0.9, 0.99


@dataclass(frozen=True)
class Problem:
    """A point at which rounding loses too much, or an optimizer whose updates are lost.

    Attributes:
        layer: Name of the layer or of the parameter.
        point: Point of the layer; `update` for a parameter.
        outcome: `NaN`, `overflow`, `underflow`, `saturation` or `cancelled`.
        share: Share of numbers with that outcome: for `underflow` of those that are not zero, for `cancelled` of the updates.
        remedies: What helps, each enough by itself.
        loss_scale: The factor for the loss: the smallest one that helps if it is above 1, else the largest one; `None` if none helps.
        learning_rate: Learning rate at which half of the updates would change their weight, if it is known.
        ruins: Whether the monitor warns about it.

    Example:
        >>> from qsim.diagnostics import Problem
        >>> print(Problem("6", "grad", "underflow", 0.98, ("'e5m2'", "scale='tensor'")))
        layer 6, grad: 98.00 % underflow; 'e5m2' or scale='tensor'
    """

    layer: str
    point: str
    outcome: str
    share: float
    remedies: tuple[str, ...]
    loss_scale: float | None = None
    learning_rate: float | None = None
    ruins: bool = False

    def __str__(self) -> str:
        """One line."""
        verbs = {"NaN": "are NaN", "cancelled": "of the updates change no weight", "saturation": "saturate"}
        place = self.layer if self.point == "update" else f"layer {self.layer}, {self.point}" if self.layer else self.point
        *first, last = self.remedies
        remedy = f"{', '.join(first)} or {last}" if first else last
        return f"{place}: {percent(self.share)} {verbs.get(self.outcome, self.outcome)}; {remedy}"


@dataclass(frozen=True)
class Advice(Records[Problem]):
    """The problems of one sampled step, the worst first; false if there are none.

    Attributes:
        records: The problems.
        step: Sampled step; `None` if there is none.

    Example:
        >>> import torch, qsim
        >>> model = qsim.convert(torch.nn.Sequential(torch.nn.Linear(2, 1)), qsim.FivePoint(grad="e4m3"))
        >>> with qsim.diagnostics.Monitor(model) as monitor:
        ...     (model(torch.ones(8, 2)).sum() / 8).backward()
        ...     monitor.step()
        >>> bool(monitor.advice()), monitor.advice().rows()
        (False, [])
    """

    step: int | None

    COLUMNS: ClassVar[Values] = {"problem": str}
    HAS_TITLES: ClassVar[bool] = False
    NAME: ClassVar[str] = "problems"
    LOSSES: ClassVar[Values] = {"share": "share"}

    def _above(self) -> list[str]:
        return [NO_SAMPLE if self.step is None else f"step {self.step}" if self else f"step {self.step}: nothing to advise"]

    def aggregates(self) -> dict[str, Any]:
        """Number of problems."""
        return {"problems": len(self)}


def advice(sample: Sample, quantizer: Callable[[Counts], Quantizer | None], updates: Sequence[Updates]) -> Advice:
    """The advice for a sample.

    Args:
        sample: The sample.
        quantizer: The quantizer at a point, `None` if it is a function or a module, or not known any more.
        updates: The counts of updates in that step that are rounded to nearest.
    """
    problems = [problem for counts in sample for problem in _of_point(counts, quantizer(counts))]
    if not any(problem.outcome == "overflow" for problem in problems):
        problems += _first_nan(sample)
    problems += _of_updates(updates)
    order = {"NaN": 0, "overflow": 1}
    return Advice(tuple(sorted(problems, key=lambda problem: (order.get(problem.outcome, 2), -problem.share))), sample.step)


def _of_point(counts: Counts, quantizer: Quantizer | None) -> Iterable[Problem]:
    lost, sqnr = underflow_share(counts), counts.sqnr
    if lost >= MOST_UNDERFLOW or (lost >= UNDERFLOW and not sqnr >= NOISY):
        factor = None if quantizer is None else loss_scale_up(counts, quantizer)
        helps = ("a point with values nearer to zero",) if quantizer is None else remedies(counts, quantizer, factor)
        ruins = lost >= MOST_UNDERFLOW and not sqnr >= RUINED
        yield Problem(counts.layer, counts.point, "underflow", lost, helps, factor, ruins=ruins)
    if quantizer is None:
        return
    # An infinity was infinite before: it is the consequence of an overflow elsewhere.
    beyond = counts.saturated - counts.infinite
    overflows = quantizer.scale is None and quantizer.usual_overflow == "nonfinite"
    if beyond > 0 and (not sqnr >= NOISY or (overflows and counts.point in GRADIENTS)):
        factor = loss_scale_down(counts, quantizer)
        outcome, share = "overflow" if overflows else "saturation", beyond / counts.elements
        ruins = not overflows and sqnr < RUINED
        yield Problem(counts.layer, counts.point, outcome, share, remedies(counts, quantizer, factor), factor, ruins=ruins)


def _first_nan(points: Sequence[Counts]) -> list[Problem]:
    """The first point in the order of computation that has NaN: weights, then forward, then backward from the last layer."""
    forward = [counts for counts in points if counts.nan and counts.point not in GRADIENTS]
    backward = [counts for counts in reversed(points) if counts.nan and counts.point in GRADIENTS]
    weights = [counts for counts in forward if counts.point.startswith("weight")]
    for counts in [*weights, *forward, *backward][:1]:
        of_weight = counts in weights
        remedy = "a checkpoint from before it, and a smaller loss scale from there on" if of_weight else "check what the layer receives"
        return [Problem(counts.layer, counts.point, "NaN", counts.nan / counts.elements, (remedy,), ruins=of_weight)]
    return []


def _of_updates(updates: Sequence[Updates]) -> Iterable[Problem]:
    """One problem if the updates of all parameters are lost; otherwise one for each parameter whose updates are."""
    total, lost = sum(entry.updates for entry in updates), sum(entry.cancelled - entry.carried for entry in updates)
    if total and lost / total >= LOST:
        rates = sorted(entry.needed_rate for entry in updates if not math.isnan(entry.needed_rate))
        yield _cancelled("all weights", lost / total, rates[len(rates) // 2] if rates else math.nan, ruins=lost / total >= RUINED_LOST)
        return
    for entry in updates:
        if entry.lost >= LOST:
            yield _cancelled(entry.parameter, entry.lost, entry.needed_rate, ruins=False)


def _cancelled(name: str, share: float, rate: float, ruins: bool) -> Problem:
    known = math.isfinite(rate)
    remedy = ["update='stochastic'", "update='kahan'", *([f"a learning rate of at least {rate:.2g}"] if known else [])]
    return Problem(name, "update", "cancelled", share, tuple(remedy), learning_rate=rate if known else None, ruins=ruins)
