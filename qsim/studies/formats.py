"""A grid of formats: how many bits, and which, a net needs if every rounding of its layers uses the same format."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

import qsim
from qsim import FivePoint, Quantizer, scaling
from qsim.plot import figures
from qsim.studies.choices import choice
from qsim.studies.findings import Findings, Values
from qsim.studies.learners import nets
from qsim.studies.learners.images import described
from qsim.studies.report import Claim, Picture, listed
from qsim.studies.statistics import Interval, above, below, difference, in_points, mean, proportion
from qsim.studies.study import Run, TrialStudy
from qsim.text.tables import Table

FULL = "fp32"
EXPONENT, MANTISSA = "exponent", "mantissa"
#: The formats of 8 bits that hardware has, and the loss of accuracy up to which they count as enough.
_EIGHT, _SAME = ("e4m3", "e5m2"), 0.01


@dataclass(frozen=True)
class Settings:
    """The settings of the study."""

    data: str = choice("digits", "digits, or a folder with Fashion-MNIST's or CIFAR-10's files")
    exponents: tuple[int, ...] = choice((1, 2, 3, 4, 5), "exponent bits")
    mantissas: tuple[int, ...] = choice((0, 1, 2, 3), "mantissa bits")
    roundings: tuple[str, ...] = choice(("stochastic", "nearest"), "roundings of the backward pass")
    batch: int = choice(64, "images per update")
    steps: int = choice(150, "number of updates")
    rate: float = choice(0.1, "constant learning rate of plain SGD")
    seeds: int = choice(3, "number of seeds")

    @property
    def formats(self) -> list[str]:
        """The names of the grid's formats."""
        return [f"e{exponent}m{mantissa}" for exponent in self.exponents for mantissa in self.mantissas]


def everywhere(format: str, rounding: str) -> FivePoint:
    """All five points with per-tensor scales; `rounding` is that of the backward pass, the forward pass rounds to nearest."""
    there, back = (Quantizer(format, how, scale=scaling.PerTensor()) for how in ("nearest", rounding))
    return FivePoint(there, there, act_bwd=back, weight_bwd=back, grad=back)


class FormatsStudy(TrialStudy[Settings]):
    """Train a net in every format of a grid."""

    name = "formats"
    question = "How many bits does a net need, and where: exponent or mantissa?"
    source = "no claim of a paper"
    settings = Settings
    shared = ("data", "batch", "steps", "rate")

    #: Four formats, few steps.
    quick_form = Settings(exponents=(2, 4), mantissas=(0, 2), steps=60, seeds=2)

    #: More steps, for a GPU.
    full_form = Settings(batch=128, steps=1500, seeds=5)

    def ways(self, settings: Settings, seed: int) -> Iterator[dict[str, str]]:
        """Full precision, and every format with every rounding."""
        yield {"format": FULL, "rounding": "nearest"}
        for name, rounding in product(settings.formats, settings.roundings):
            yield {"format": name, "rounding": rounding}

    def work(self, run: Run) -> float:
        """Return a cost: stochastic rounding takes longer."""
        return float(run.steps * (100 + run.batch) * (1.0 if run.format == FULL else 4.0 if run.rounding == "nearest" else 6.0))

    def measure(self, run: Run, device: torch.device) -> dict[str, Any]:
        """Train the net, and test it with its rounding."""
        points = None if run.format == FULL else everywhere(run.format, run.rounding)
        return nets.outcome(run, points, device)


class _Written(Findings[Settings]):
    def parts(self) -> list[str | Table | Picture]:
        full = proportion(self.accuracies(FULL, "nearest"))
        text = self.text("setting", learner=described(self.settings.data), full=full)
        return [text, self.picture("frontier", self._draw), *map(self._grid, self.settings.roundings), self._bits()]

    def accuracies(self, name: str, rounding: str) -> Values:
        """The accuracy of each seed."""
        return self.over_seeds("own_accuracy", format=name, rounding=rounding)

    def lost(self, name: str, rounding: str) -> Interval:
        """The accuracy lost to a format."""
        return difference(self.accuracies(FULL, "nearest"), self.accuracies(name, rounding))

    def bit(self, kind: str, bits: int, rounding: str) -> Interval | None:
        """The accuracy that one more bit of a kind gains, averaged over all formats of some width that the grid extends by it."""
        pairs = [
            (name, wider)
            for exponent in self.settings.exponents
            for mantissa in self.settings.mantissas
            if qsim.format(name := f"e{exponent}m{mantissa}").bits == bits
            and (wider := f"e{exponent + (kind == EXPONENT)}m{mantissa + (kind == MANTISSA)}") in self.settings.formats
        ]
        if not pairs:
            return None
        return mean(np.mean([self.accuracies(wider, rounding) - self.accuracies(name, rounding) for name, wider in pairs], 0))

    @property
    def widths(self) -> list[int]:
        """The widths of the grid's formats."""
        return sorted({qsim.format(name).bits for name in self.settings.formats})

    def _grid(self, rounding: str) -> Table:
        rows = []
        for exponent in self.settings.exponents:
            names = [f"e{exponent}m{mantissa}" for mantissa in self.settings.mantissas]
            rows.append([f"E{exponent}", *(f"{proportion(self.accuracies(name, rounding)):.1%}" for name in names)])
        return Table.of(f"Accuracy, {rounding}", ["exponent", *(f"M{mantissa}" for mantissa in self.settings.mantissas)], rows)

    def _bits(self) -> Table:
        columns = [(rounding, kind) for rounding in self.settings.roundings for kind in (EXPONENT, MANTISSA)]
        rows = [
            [f"{bits} to {bits + 1}", *(in_points(found) if (found := self.bit(kind, bits, how)) else "-" for how, kind in columns)]
            for bits in self.widths[:-1]
        ]
        header = ["bits", *(f"{kind} bit, {rounding}" for rounding, kind in columns)]
        return Table.of("Points of accuracy gained by one more bit, averaged over formats of a width", header, rows)

    def _draw(self) -> list[Figure]:
        drawn, axes = figures.row(len(self.settings.roundings), width=3.9)
        for panel, rounding in zip(axes, self.settings.roundings, strict=True):
            for place, (look, mantissa) in enumerate(zip(figures.LOOKS, self.settings.mantissas, strict=False)):
                names = [f"e{exponent}m{mantissa}" for exponent in self.settings.exponents]
                places = [qsim.format(name).bits + 0.1 * (place - 1.5) for name in names]
                label = f"M{mantissa}, E{self.settings.exponents[0]} to E{self.settings.exponents[-1]}"
                figures.band(panel, places, [self.lost(name, rounding).points for name in names], look, label)
            panel.axhline(0, **figures.REFERENCE())
            panel.set_yscale("symlog", linthresh=1.0)
            panel.set_ylim(-2, 100)
            panel.set_yticks([-1, 0, 1, 3, 10, 30, 90], ["−1", "0", "1", "3", "10", "30", "90"])
            panel.set_xticks(self.widths)
            panel.set(xlabel="bits of the format", ylabel="points of accuracy lost", title=f"backward pass: {rounding}")
        figures.legends(drawn, axes, columns=2)
        return drawn

    def claims(self) -> list[Claim]:
        known = [name for name in _EIGHT if name in self.settings.formats]
        return [
            *map(self._more_bits, self.settings.roundings),
            *(self._eight(name, rounding) for name in known for rounding in self.settings.roundings),
        ]

    def _more_bits(self, rounding: str) -> Claim:
        found = [each for bits in self.widths[:-1] for kind in (EXPONENT, MANTISSA) if (each := self.bit(kind, bits, rounding))]
        ends = [[name for name in self.settings.formats if qsim.format(name).bits == bits] for bits in (self.widths[-1], self.widths[0])]
        gain = difference(*(np.mean([self.accuracies(name, rounding) for name in names], 0) for names in ends))
        least = f"; the smallest gain of a bit: {in_points(min(found, key=lambda each: each.high))}" if found else ""
        return self.claim("more bits", above(gain), rounding=rounding, gain=gain, least=least, widest=self.widths[-1])

    def _eight(self, name: str, rounding: str) -> Claim:
        lost = self.lost(name, rounding)
        return self.claim("eight", below(lost, _SAME), name=name.upper(), rounding=rounding, lost=lost, same=100 * _SAME)

    def meaning(self) -> str:
        first = self.settings.roundings[0]
        eight = [name for name in _EIGHT if name in self.settings.formats]
        lost_by = listed([f"{in_points(self.lost(name, first))} points in {name.upper()}" for name in eight])
        parts = [f"FP8 loses {lost_by} of accuracy relative to full precision."] if eight else []
        for bits in self.widths[1:3]:
            gains = [(kind, self.bit(kind, bits, first)) for kind in (EXPONENT, MANTISSA)]
            shown = [f"{in_points(found)} points in the {kind}" for kind, found in gains if found]
            parts += [f"From {bits} bits, one more gains {listed(shown)}."] if shown else []
        lost = {name: self.lost(name, first).value for name in self.settings.formats}
        worst = max(lost, key=lambda name: lost[name])
        parts = parts or [f"{worst.upper()} loses most: {100 * lost[worst]:.1f} points of accuracy."]
        return f"{' '.join(parts)} (With {first} rounding in the backward pass; gains are averages over formats.)"
