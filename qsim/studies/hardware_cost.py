"""The cost of a bit on both sides: what it costs in training, and what it saves in hardware."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from matplotlib.figure import Figure

import qsim
from qsim import FivePoint, rounding
from qsim.plot import figures
from qsim.silicon import Circuit
from qsim.silicon.graphs import routine, significand
from qsim.silicon.printers import systemverilog
from qsim.silicon.printers.routines import Routine
from qsim.silicon.synthesis import fpga
from qsim.studies import formats
from qsim.studies.choices import choice, require
from qsim.studies.findings import Findings, Values
from qsim.studies.learners import nets
from qsim.studies.learners.images import described
from qsim.studies.learners.training import Training
from qsim.studies.report import Claim, Picture
from qsim.studies.statistics import Interval, above, difference, positive, proportion
from qsim.studies.study import Run, TrialStudy
from qsim.text.tables import Table

FULL = formats.FULL
#: What a run measures: the cells of a rounding to a format, those of a significand's, the accuracy, or how much larger batches must be.
CELLS, SIGNIFICAND, ACCURACY, FACTOR = "cells", "significand", "accuracy", "batch factor"
#: The roundings that are synthesized; stochastic rounding with as many random bits as in the paper.
ROUNDINGS = ("nearest", "Stochastic(bits=6)")
#: The bits of a significand in E4M3, and those that are rounded away.
_KEPT, _DROPPED = 4, 6
#: The number of batches, and of draws per batch, over which variances are measured.
_BATCHES, _DRAWS = 16, 4
_PAPER = "Liu et al., Training with Fewer Bits, Section 6.2"


@dataclass(frozen=True)
class Settings:
    """The settings of the study."""

    data: str = choice("digits", "digits, or a folder with Fashion-MNIST's or CIFAR-10's files")
    formats: tuple[str, ...] = choice(
        ("e2m1", "e2m2", "e3m2", "e3m3", "e4m3", "e5m4", "e5m6", "e5m8", "fp16"),
        "formats, from narrow to wide; each has a width of its own",
    )
    source: str = choice("fp32", "the format of the numbers that hardware rounds")
    batch: int = choice(64, "images per update")
    steps: int = choice(150, "number of updates")
    rate: float = choice(0.1, "constant learning rate of plain SGD")
    seeds: int = choice(5, "number of seeds")


class HardwareCostStudy(TrialStudy[Settings]):
    """Synthesize the rounding to formats of 4 to 16 bits, and train nets in them."""

    name = "hardware-cost"
    question = "What does a bit cost in training, and what does it save in hardware?"
    source = _PAPER
    settings = Settings
    shared = ("data", "batch", "steps", "rate")

    #: Two formats, and a source whose circuits are synthesized in seconds.
    quick_form = Settings(formats=("e2m1", "e4m3"), source="bf16", steps=40, seeds=2)

    #: More seeds; a GPU is no faster on a net as small as this one.
    full_form = Settings(seeds=10)

    def check(self, settings: Settings) -> None:
        """Formats from narrow to wide."""
        bits = [qsim.format(name).bits for name in settings.formats]
        rise = len(bits) > 1 and bits == sorted(set(bits))
        require(settings, "formats", rise, "be at least two, from narrow to wide, each of another width")

    def ways(self, settings: Settings, seed: int) -> Iterator[dict[str, Any]]:
        """Every circuit once; full precision, and for every format the accuracy and the factor."""
        if seed == 0:
            untrained = {"data": "", "batch": 0, "steps": 0, "rate": 0.0}
            circuits = [(CELLS, name, settings.source) for name in settings.formats]
            circuits.append((SIGNIFICAND, f"{_KEPT + _DROPPED} to {_KEPT} bits", ""))
            for (what, name, source), rounding in product(circuits, ROUNDINGS):
                yield {"what": what, "format": name, "rounding": rounding, "source": source, **untrained}
        yield {"what": ACCURACY, "format": FULL, "rounding": "nearest", "source": ""}
        for name, what in product(settings.formats, (ACCURACY, FACTOR)):
            yield {"what": what, "format": name, "rounding": "stochastic", "source": ""}

    def work(self, run: Run) -> float:
        """Synthesis takes seconds, most of them for wide formats; a factor takes as long as a training of some hundred steps."""
        return {CELLS: 600.0, SIGNIFICAND: 200.0, FACTOR: 300.0}.get(run.what, float(run.steps))

    def measure(self, run: Run, device: torch.device) -> dict[str, Any]:
        """Synthesize a circuit with Yosys, or train the net and test it with its rounding."""
        if run.what == CELLS:
            return _cells(routine(Circuit(run.format, "encode", run.rounding, source=run.source)))
        if run.what == SIGNIFICAND:
            return _cells(significand(_KEPT, _DROPPED, rounding.resolve(run.rounding)))
        if run.what == FACTOR:
            return _factor(run, device)
        # As in the study `formats`: round-to-nearest in the forward pass, stochastic in the backward pass.
        points = None if run.format == FULL else formats.everywhere(run.format, run.rounding)
        return nets.outcome(run, points, device)


def _cells(circuit: Routine) -> dict[str, int]:
    """The cells of an FPGA for a circuit."""
    return fpga(systemverilog.module(circuit), circuit.name)._asdict()


def _factor(run: Run, device: torch.device) -> dict[str, Any]:
    """The factor by which the batch must grow for gradients to vary as in full precision, after a tenth of the training."""
    points, how = formats.everywhere(run.format, run.rounding), Training(run.steps // 10, run.batch)
    backward = FivePoint(act_bwd=points.act_bwd, grad=points.grad)
    factor = nets.batch_factor(run, backward, None, how, device, batches=_BATCHES, draws=_DRAWS)
    return {"factor": float(factor.value)}


class _Written(Findings[Settings]):
    def begin(self) -> None:
        self._step = {rounding: int(*self.over_seeds("luts", what=SIGNIFICAND, rounding=rounding)) for rounding in ROUNDINGS}

    def cells(self, name: str, how: str) -> int:
        """The lookup tables of a rounding to a format."""
        return int(*self.over_seeds("luts", what=CELLS, format=name, rounding=how))

    def accuracies(self, name: str) -> Values:
        """The accuracy of each seed."""
        return self.over_seeds("own_accuracy", what=ACCURACY, format=name)

    def lost(self, name: str) -> Interval:
        """The accuracy lost to a format."""
        return difference(self.accuracies(FULL), self.accuracies(name))

    def factor(self, name: str) -> Interval:
        """The factor by which the batch must grow."""
        return positive(self.over_seeds("factor", what=FACTOR, format=name))

    @property
    def ends(self) -> tuple[str, str]:
        """The narrowest and the widest format."""
        return self.settings.formats[0], self.settings.formats[-1]

    def parts(self) -> list[str | Table | Picture]:
        words = {"learner": described(self.settings.data), "kept": _KEPT, "dropped": _DROPPED}
        text = self.text("setting", full=proportion(self.accuracies(FULL)), **words)
        return [text, self.picture("bits", self._draw), self._table()]

    def _table(self) -> Table:
        rows = [
            [name, str(qsim.format(name).bits), f"{proportion(self.accuracies(name)):.1%}", f"{self.factor(name):.3f}",
             *(str(self.cells(name, how)) for how in ROUNDINGS)]
            for name in self.settings.formats
        ]  # fmt: skip
        header = ["format", "bits", "accuracy", "batch factor", "LUTs, nearest", "LUTs, stochastic"]
        return Table.of("Both costs of every format", header, rows)

    def _draw(self) -> Figure:
        figure, (accuracy, batch, luts) = figures.panels(3, 1, width=5.2, height=1.75, sharex=True)
        names, places = self.settings.formats, range(len(self.settings.formats))
        figures.band(accuracy, places, [self.lost(name).points for name in names], figures.LOOKS[0])
        accuracy.axhline(0, **figures.REFERENCE())
        accuracy.set_ylabel("points of\naccuracy lost")
        figures.band(batch, places, [self.factor(name) for name in names], figures.LOOKS[1])
        batch.axhline(1, **figures.REFERENCE())
        batch.set_ylabel("batch factor")
        for how, look in zip(ROUNDINGS, figures.LOOKS[2:], strict=False):
            luts.plot(places, [self.cells(name, how) for name in names], label=how.partition("(")[0].lower(), **look())
        luts.set_ylim(0)
        luts.set_ylabel("LUTs of\na rounding")
        luts.legend()
        luts.set_xticks(places, [f"{name.upper()}\n{qsim.format(name).bits} bits" for name in names])
        return figure

    def claims(self) -> list[Claim]:
        narrow, wide = self.ends
        nearest, stochastic = (self._step[how] for how in ROUNDINGS)
        factor, lost = self.factor(narrow), self.lost(narrow)
        cells = {how.partition("(")[0].lower(): [self.cells(name, how) for name in self.ends] for how in ROUNDINGS}
        saved = "; ".join(f"{few} and {many} LUTs, {how}" for how, (few, many) in cells.items())
        return [
            self.claim("six", None, stochastic=stochastic, nearest=nearest, bits=_KEPT + _DROPPED, kept=_KEPT),
            self.claim("hardware", all(few < many for few, many in cells.values()), narrow=narrow, wide=wide, saved=saved),
            self.claim("batches", above(factor, 1.0), narrow=narrow, factor=factor, least=factor.value / factor.low),
            self.claim("accuracy", above(lost), narrow=narrow, lost=lost),
        ]

    def meaning(self) -> str:
        narrow, wide = map(str.upper, self.ends)
        nearest, stochastic = ([self.cells(name, how) for name in self.ends] for how in ROUNDINGS)
        costs = {"lost": [*map(self.lost, self.ends)], "factor": [*map(self.factor, self.ends)]}
        return self.text("meaning", narrow=narrow, wide=wide, nearest=nearest, stochastic=stochastic, **costs)
