"""Fallback: layers whose roundings lose too much get a wider format."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from qsim.control.base import Control, Layer, agreed
from qsim.diagnostics.counts import Counts
from qsim.diagnostics.monitor import Monitor
from qsim.formats.base import check_integer
from qsim.points.base import check_number
from qsim.recipes.five_point import FivePoint
from qsim.recipes.points_of import PointsLike, points_of
from qsim.text.warning import warn


@dataclass(frozen=True)
class Switch:
    """A layer that was switched, and the measurement that was out of bounds.

    Attributes:
        step: The step that was measured.
        layer: The layer's name.
        reason: The point, what was measured there, and the bound.

    Example:
        >>> import qsim
        >>> print(qsim.control.Switch(3, "blocks.0.up", "grad: 3.1 dB, less than 6 dB"))
        step 3: blocks.0.up: grad: 3.1 dB, less than 6 dB
    """

    step: int
    layer: str
    reason: str

    def __str__(self) -> str:
        """A line for a log."""
        return f"step {self.step}: {self.layer}: {self.reason}"


class Fallback(Control):
    """Switch layers to a wider format by what their roundings lose, and log each switch.

    Every so many steps, a step is measured as `qsim.diagnostics.Monitor` does it, backward pass included. A layer that has a point with a
    lower ratio of signal to rounding errors, or a larger share of numbers that became zero, than the bounds allow gets the wider points for
    the rest of the run. A warning says which layer, where and why.

    Measured are linear layers with points that are quantizers; those that are modules are not counted. In a distributed run, what one
    process finds counts for all. A measured step must run eagerly, and not under another monitor.

    Args:
        wider: The points of layers that were switched: a recipe, a format or a `FivePoint`; `None` for full precision.
        sqnr: The smallest ratio of signal to rounding errors, in decibels; `None` for no bound.
        underflow: The largest share of elements that are not zero before rounding and zero after; `None` for no bound.
        every: Steps from one measured step to the next. The first step is measured.

    Attributes:
        switches: All switches so far, in order.

    Example:
        >>> import torch, qsim
        >>> model = qsim.convert(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)), qsim.FivePoint(act="e4m3"))
        >>> control = qsim.control.Fallback(None, underflow=0.2).start(model)
        >>> with torch.no_grad():
        ...     model[0].weight *= 1e-5
        ...     model[0].bias *= 1e-5
        >>> _ = model(torch.ones(4, 8))  # the second layer's inputs are too small for E4M3
        >>> control.step()  # and it warns
        >>> [str(switch) for switch in control.switches]
        ['step 1: 1: act: 100 % underflowed, more than 20 %']
        >>> model[1].points.act is None
        True
    """

    needs = "points"

    def __init__(self, wider: PointsLike, *, sqnr: float | None = None, underflow: float | None = None, every: int = 100) -> None:
        super().__init__()
        if sqnr is None and underflow is None:
            raise ValueError("Fallback: give a bound, sqnr= in decibels or underflow= as a share")
        self.wider = points_of(wider) or FivePoint()
        self.sqnr = None if sqnr is None else check_number("Fallback", "sqnr", sqnr, -math.inf, math.inf)
        self.underflow = None if underflow is None else check_number("Fallback", "underflow", underflow, 0.0, 1.0)
        self.every = check_integer("Fallback", "every", every, 1, 2**31)
        self.switches: list[Switch] = []
        self._monitor: Monitor | None = None

    def begin(self, layers: dict[str, Layer]) -> None:  # noqa: D102 (documented above)
        self._measure(layers)

    def advance(self, layers: dict[str, Layer]) -> None:  # noqa: D102 (documented above)
        monitor, self._monitor = self._monitor, None
        if monitor is not None:
            monitor.step()
            monitor.close()
            reasons = {counts.layer: reason for sample in monitor.samples for counts in sample if (reason := self._reason(counts))}
            self._switch(layers, reasons)
        if self.steps % self.every == 0:
            self._measure(layers)

    def resume(self, layers: dict[str, Layer], state: Mapping[str, Any]) -> None:  # noqa: D102 (documented above)
        self.switches = [Switch(step, name, reason) for name, (step, reason) in state["layers"].items()]
        for switch in self.switches:
            self._widen(layers[switch.layer])
        self._measure(layers)

    def kept(self) -> dict[str, Any]:  # noqa: D102 (documented above)
        return {switch.layer: (switch.step, switch.reason) for switch in self.switches}

    def _measure(self, layers: dict[str, Layer]) -> None:
        """Measure the next step, if it is one of those that are measured, and any layer is left."""
        narrow = nn.ModuleDict()
        switched = {switch.layer for switch in self.switches}
        for number, (name, layer) in enumerate(layers.items()):
            if name not in switched:
                narrow.add_module(str(number), layer)
        self._names = {str(number): name for number, name in enumerate(layers)}
        if len(narrow) and self.steps % self.every == 0:
            self._monitor = Monitor(narrow, every=2**31)

    def _reason(self, counts: Counts) -> str:
        """Describe the measurement at a point that is out of bounds; empty if none is."""
        underflowed = counts.shares["underflowed"]
        if self.underflow is not None and underflowed > self.underflow:
            return f"{counts.point}: {underflowed:.0%} underflowed, more than {self.underflow:.0%}".replace("%", " %")
        if self.sqnr is not None and counts.sqnr < self.sqnr:
            return f"{counts.point}: {counts.sqnr:.1f} dB, less than {self.sqnr:g} dB"
        return ""

    def _switch(self, layers: dict[str, Layer], reasons: dict[str, str]) -> None:
        found = {self._names[number]: reason for number, reason in reasons.items()}
        anywhere = agreed(torch.tensor([name in found for name in layers], dtype=torch.float32))
        for name, is_wanted in zip(layers, anywhere.tolist(), strict=True):
            if is_wanted:
                switch = Switch(self.steps, name, found.get(name, "measured by another process"))
                self.switches.append(switch)
                self._widen(layers[name])
                warn(f"Fallback: {switch}. It has wider points from now on: {self.wider}")

    def _widen(self, layer: Layer) -> None:
        layer.points = self.wider.with_own_modules()
        layer.remember()
