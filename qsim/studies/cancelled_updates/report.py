"""The report of the study `cancelled-updates`: shares of updates over time, and accuracy against memory."""

from __future__ import annotations

import numpy as np
import torch
from matplotlib.figure import Figure

import qsim
from qsim.plot import figures
from qsim.studies.cancelled_updates import _HIDDEN, _WIDTH, BOTH, FULL, KAHAN, NEAREST, STOCHASTIC, net
from qsim.studies.cancelled_updates.findings import UpdateFindings
from qsim.studies.learners.examples import OWN
from qsim.studies.learners.images import DIGITS, described, images, variant
from qsim.studies.report import Picture, listed
from qsim.studies.statistics import mean, positive, proportion
from qsim.text.tables import Table


class Written(UpdateFindings):
    """The report."""

    def title(self) -> str:
        """The question, and the data if they are other ones."""
        return f"{self.study.question} {variant(self.settings.data, self.settings.model)}".rstrip()

    def parts(self) -> list[str | Table | Picture]:
        """The setting, tables and figures."""
        chosen = self.settings
        said = [
            *(["left out"] if BOTH not in chosen.updates else []),
            *(["computed"] if chosen.units else []),
            *(["arithmetic"] if chosen.arithmetic == "format" else []),
        ]
        remarks = "".join(f" {self.text(name, units=listed(chosen.units))}" for name in said)
        carriers = ", ".join(f"{name} ({qsim.format(name).bits} bits)" for name in self.settings.formats)
        return [
            self.text("setting", learner=self._learner(), carriers=carriers, remarks=remarks),
            *self._tables(),
            self.picture("shares", self._over_time),
            *([self.picture("curves", self._curves)] if chosen.curve else []),
            self.picture("accuracy", self._by_format),
            *([self.picture("memory", self._frontier)] if self.layers > 1 else []),
        ]

    def _learner(self) -> str:
        """The net and the data."""
        if self.settings.data != DIGITS or self.settings.model != OWN:
            return described(self.settings.data, self.settings.model)
        data = images(DIGITS, torch.device("cpu"))
        size = sum(weight.numel() for weight in net(data).parameters())
        return self.text("learner", hidden=_HIDDEN, width=_WIDTH, size=size, train=len(data.y), test=len(data.test_y))

    def _tables(self) -> list[Table]:
        rows = [
            [name, update, f"{proportion(self.quarter(name, update, 0)):.1%}",
             f"{proportion(self.quarter(name, update, -1)):.1%}", self._lost(name, update),
             f"{proportion(self.of('accuracy', name, update)):.1%}",
             f"{positive(self.of('loss', name, update)):.2g}"]
            for name in (FULL, *self.settings.formats) for update in (self.settings.updates if name != FULL else (NEAREST,))
        ]  # fmt: skip
        header = ["weights", "update", "cancelled, first quarter", "last quarter", "lost on average", "test accuracy", "training loss"]
        mixed = [self._mixture(count) for count in range(self.layers + 1)]
        return [
            Table.of("Cancelled updates", header, rows),
            Table.of(
                f"Mixtures of stochastic and Kahan updates, {self.settings.mixed}",
                ["layers with Kahan updates", "bytes per weight", "test accuracy", "training loss"],
                mixed,
            ),
        ]

    def _mixture(self, kahan_layers: int) -> list[str]:
        accuracy, loss = (self.of(what, self.settings.mixed, STOCHASTIC, kahan_layers) for what in ("accuracy", "loss"))
        count = str(kahan_layers) if kahan_layers < self.layers else "all"
        return [count, f"{self.memory(kahan_layers):.2f}", f"{proportion(accuracy):.1%}", f"{positive(loss):.2g}"]

    def _lost(self, format: str, update: str) -> str:
        return "none" if update == STOCHASTIC else f"{float(self.shares(format, update, lost=True).mean()):.1%}"

    def _over_time(self) -> list[Figure]:
        drawn, axes = figures.row(len(self.settings.updates), width=3.2, height=2.6)
        steps = self.steps()
        for panel, update in zip(axes, self.settings.updates, strict=True):
            for name, look in zip(self.settings.formats, figures.LOOKS, strict=False):
                shares = 100 * self.shares(name, update)
                panel.plot(steps, shares.mean(0), label=name.upper(), markevery=5, **look())
                panel.fill_between(steps, shares.min(0), shares.max(0), color=look.color, alpha=0.18, linewidth=0)
                if update in (KAHAN, BOTH):
                    panel.plot(steps, 100 * self.shares(name, update, lost=True).mean(0), **figures.Look(look.color, "").dashed()())
            panel.set(title=update, xlabel="step", ylim=(0, 103), ylabel="cancelled in % of updates")
            figures.label_ends(panel)
        return drawn

    def _by_format(self) -> list[Figure]:
        drawn, (left, right) = figures.row(2)
        place = np.arange(len(self.settings.formats))
        for shift, (update, look) in enumerate(zip(self.settings.updates, figures.LOOKS, strict=False)):
            beside = place + 0.08 * (shift - 1)
            wrong = [proportion(1 - self.of("accuracy", name, update)) * 100 for name in self.settings.formats]
            figures.band(left, beside, wrong, look.alone(), update)
            figures.band(right, beside, [self.loss(name, update) for name in self.settings.formats], look.alone(), update)
        left.axhline(100 * (1 - mean(self.of("accuracy", FULL, NEAREST)).value), label=FULL, **figures.REFERENCE())
        right.axhline(self.loss(FULL, NEAREST).value, label=FULL, **figures.REFERENCE())
        for panel, label in ((left, "test error in %"), (right, "training loss")):
            panel.set_xticks(place, [name.upper() for name in self.settings.formats])
            panel.set(xlabel="format of the weights", ylabel=label, yscale="log")
            figures.plain_numbers(panel.yaxis)
        figures.legends(drawn, (left, right), columns=2)
        return drawn

    def _curves(self) -> list[Figure]:
        drawn, (left, right) = figures.row(2)
        name = self.settings.mixed
        ways: dict[str, tuple[str, ...]] = {FULL: (FULL, NEAREST), **{update: (name, update) for update in self.settings.updates}}
        ways |= {f"{unit}, 32-bit weights": (FULL, NEAREST, unit) for unit in self.settings.units}
        for (label, way), look in zip(ways.items(), figures.LOOKS, strict=False):
            steps, losses, accuracies = self.curve(*way).mean(0).T
            left.plot(steps, losses, label=label, **look())
            right.plot(steps, 100 * (1 - accuracies), label=label, **look())
        for panel, label in ((left, "loss of training batches"), (right, "test error in %")):
            panel.set(xlabel="step", ylabel=label, yscale="log")
            figures.plain_numbers(panel.yaxis)
        figures.legends(drawn, (left, right), columns=2)
        return drawn

    def _frontier(self) -> list[Figure]:
        drawn, (left, right) = figures.row(2)
        name, counts = self.settings.mixed, range(self.layers + 1)
        memory = [self.memory(count) for count in counts]
        right_of = [proportion(self.of("accuracy", name, STOCHASTIC, count)) * 100 for count in counts]
        losses = [self.loss(name, STOCHASTIC, count) for count in counts]
        references = ((FULL, figures.REFERENCE()), (name, figures.REFERENCE(linestyle=(0, (5, 2)))))
        for panel, found, label in ((left, right_of, "test accuracy in %"), (right, losses, "training loss")):
            figures.band(panel, memory, found, figures.LOOKS[0], f"{name}, stochastic to Kahan")
            for own, look in references:
                accuracy = 100 * mean(self.of("accuracy", own, NEAREST)).value
                level = accuracy if panel is left else self.loss(own, NEAREST).value
                panel.axhline(level, label=FULL if own == FULL else f"{own}, nearest", **look)
            panel.set(xlabel="memory in bytes per weight", ylabel=label)
        right.set_yscale("log")
        figures.plain_numbers(right.yaxis)
        figures.legends(drawn, (left, right), columns=2)
        return drawn

    def meaning(self) -> str:
        """The shares of cancelled updates, and accuracies."""
        name = self.settings.mixed
        fine, coarse = (float(self.shares(which, NEAREST).mean()) for which in (name, self.coarse))
        ways = {"full": (FULL, NEAREST), "nearest": (name, NEAREST), "stochastic": (name, STOCHASTIC), "kahan": (name, KAHAN)}
        accuracies = {key: mean(self.of("accuracy", *way)).value for key, way in ways.items()}
        coarser = "" if self.coarse == name else self.text("coarser", coarse=coarse, coarsest=self.coarse.upper())
        return self.text("meaning", fine=fine, coarser=coarser, name=name.upper(), **accuracies)
