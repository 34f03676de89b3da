"""The report of the study `cancelled-updates`: shares of updates over time, and accuracy against memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

import qsim
from qsim.plot import figures
from qsim.studies.cancelled_updates import _HIDDEN, _WIDTH, FULL, KAHAN, NEAREST, STOCHASTIC, UPDATES, CancelledUpdatesStudy, net
from qsim.studies.cancelled_updates.claims import claims
from qsim.studies.cancelled_updates.findings import Findings
from qsim.studies.learners.images import DIGITS, described, images, variant
from qsim.studies.report import Picture, Report
from qsim.studies.statistics import confidence_text, describe_bars, mean, positive, proportion
from qsim.text.tables import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class ReportWriter:
    """Write the report.

    Args:
        study: The study.
        found: The findings from its runs.
    """

    def __init__(self, study: CancelledUpdatesStudy, found: Findings) -> None:
        self._study, self._found, self._settings = study, found, found.settings

    def report(self) -> Report:
        """The complete report."""
        title = f"{self._study.question} {variant(self._settings.data)}".rstrip()
        return Report(self._study, [self._setting(), *self._tables(), *self._pictures()], claims(self._found), self._meaning(), title)

    def _setting(self) -> str:
        chosen = self._settings
        carriers = ", ".join(f"{name} ({qsim.format(name).bits} bits)" for name in chosen.formats)
        return (
            f"{self._learner()}, in {chosen.steps} steps of SGD with momentum {chosen.momentum:g} and {chosen.batch} "
            f"images per step; the learning rate decays linearly from {chosen.rate:g} to zero; there are {chosen.seeds} seeds. Weights "
            f"are values of a format: {carriers}. Everything else, including what Kahan summation stores, is in the 16-bit dtype that "
            "holds it, and PyTorch's own operators compute. An update counts if it is not zero, and is cancelled if it leaves the "
            "weight unchanged. The part of it that Kahan summation stores is carried. Lost is what is neither applied nor carried on "
            "average: all that nearest cancels, and nothing of what stochastic rounding leaves, because its other steps make up for it. "
            "In the mixed nets, the last layers have Kahan updates; memory is that of weights and of what Kahan summation stores. Our "
            "source for Appendix D.3 lists what it measures, without its numbers; of that list, stochastic rounding combined with Kahan "
            f"summation of the same weight is left out. Intervals are {confidence_text()}, over seeds; those of shares and losses are "
            "computed in log odds and logarithms, so that they stay within bounds."
        )

    def _learner(self) -> str:
        """The net and the data."""
        if self._settings.data != DIGITS:
            return described(self._settings.data)
        data = images(DIGITS, torch.device("cpu"))
        size = sum(weight.numel() for weight in net(data).parameters())
        return (
            f"A net of {self._found.layers} layers ({_HIDDEN} hidden ones of {_WIDTH} units) with {size:,} parameters learns digits, "
            f"{len(data.y):,} training and {len(data.test_y):,} test images"
        )

    def _tables(self) -> list[Table]:
        rows = [
            [name, update, f"{proportion(self._found.quarter(name, update, 0)):.1%}",
             f"{proportion(self._found.quarter(name, update, -1)):.1%}", self._lost(name, update),
             f"{proportion(self._found.values('accuracy', name, update)):.1%}",
             f"{positive(self._found.values('loss', name, update)):.2g}"]
            for name in (FULL, *self._settings.formats) for update in (UPDATES if name != FULL else (NEAREST,))
        ]  # fmt: skip
        header = ["weights", "update", "cancelled, first quarter", "last quarter", "lost on average", "test accuracy", "training loss"]
        mixed = [self._mixture(count) for count in range(self._found.layers + 1)]
        return [
            Table.of("Cancelled updates", header, rows),
            Table.of(
                f"Mixtures of stochastic and Kahan updates, {self._settings.mixed}",
                ["layers with Kahan updates", "bytes per weight", "test accuracy", "training loss"],
                mixed,
            ),
        ]

    def _mixture(self, kahan_layers: int) -> list[str]:
        accuracy, loss = (self._found.values(what, self._settings.mixed, STOCHASTIC, kahan_layers) for what in ("accuracy", "loss"))
        return [str(kahan_layers), f"{self._found.memory(kahan_layers):.2f}", f"{proportion(accuracy):.1%}", f"{positive(loss):.2g}"]

    def _lost(self, format: str, update: str) -> str:
        return "none" if update == STOCHASTIC else f"{float(self._found.shares(format, update, lost=True).mean()):.1%}"

    def _pictures(self) -> list[Picture]:
        return [
            Picture(
                "shares",
                "Share of updates that are cancelled. Dashed: cancelled and not carried. Bands: range over seeds.",
                self._over_time,
            ),
            Picture(
                "accuracy",
                f"Test error and training loss by the format of the weights. {describe_bars()}",
                self._by_format,
            ),
            Picture(
                "memory",
                f"Figure 5: layer by layer from stochastic to Kahan updates. {describe_bars()}",
                self._frontier,
            ),
        ]

    def _over_time(self) -> list[Figure]:
        drawn, axes = figures.row(len(UPDATES), width=3.2, height=2.6)
        steps = self._found.steps()
        for panel, update in zip(axes, UPDATES, strict=True):
            for name, look in zip(self._settings.formats, figures.LOOKS, strict=False):
                shares = 100 * self._found.shares(name, update)
                panel.plot(steps, shares.mean(0), label=name.upper(), markevery=5, **look())
                panel.fill_between(steps, shares.min(0), shares.max(0), color=look.color, alpha=0.18, linewidth=0)
                if update == KAHAN:
                    panel.plot(steps, 100 * self._found.shares(name, update, lost=True).mean(0), **figures.Look(look.color, "").dashed()())
            panel.set_title(update)
            panel.set_xlabel("step")
            panel.set_ylim(0, 103)
            panel.set_ylabel("cancelled in % of updates")
            figures.label_ends(panel)
        return drawn

    def _by_format(self) -> list[Figure]:
        drawn, (left, right) = figures.row(2)
        place = np.arange(len(self._settings.formats))
        for shift, (update, look) in enumerate(zip(UPDATES, figures.LOOKS, strict=False)):
            beside = place + 0.08 * (shift - 1)
            wrong = [proportion([1 - value for value in self._found.values("accuracy", name, update)]) * 100
                     for name in self._settings.formats]  # fmt: skip
            figures.band(left, beside, wrong, look.alone(), update)
            figures.band(right, beside, [self._found.loss(name, update) for name in self._settings.formats], look.alone(), update)
        left.axhline(100 * (1 - mean(self._found.values("accuracy", FULL, NEAREST)).value), label=FULL, **figures.REFERENCE())
        right.axhline(self._found.loss(FULL, NEAREST).value, label=FULL, **figures.REFERENCE())
        for panel, label in ((left, "test error in %"), (right, "training loss")):
            panel.set_xticks(place, [name.upper() for name in self._settings.formats])
            panel.set_xlabel("format of the weights")
            panel.set_ylabel(label)
        for figure, panel in zip(drawn, (left, right), strict=True):
            panel.set_yscale("log")
            figures.plain_numbers(panel.yaxis)
            figures.legend(figure, panel, columns=2)
        return drawn

    def _frontier(self) -> list[Figure]:
        drawn, (left, right) = figures.row(2)
        name, counts = self._settings.mixed, range(self._found.layers + 1)
        memory = [self._found.memory(count) for count in counts]
        right_of = [proportion(self._found.values("accuracy", name, STOCHASTIC, count)) * 100 for count in counts]
        losses = [self._found.loss(name, STOCHASTIC, count) for count in counts]
        references = ((FULL, figures.REFERENCE()), (name, figures.REFERENCE(linestyle=(0, (5, 2)))))
        for panel, found, label in ((left, right_of, "test accuracy in %"), (right, losses, "training loss")):
            figures.band(panel, memory, found, figures.LOOKS[0], f"{name}, stochastic to Kahan")
            for own, look in references:
                accuracy = 100 * mean(self._found.values("accuracy", own, NEAREST)).value
                level = accuracy if panel is left else self._found.loss(own, NEAREST).value
                panel.axhline(level, label=FULL if own == FULL else f"{own}, nearest", **look)
            panel.set_xlabel("memory in bytes per weight")
            panel.set_ylabel(label)
        right.set_yscale("log")
        figures.plain_numbers(right.yaxis)
        for figure, panel in zip(drawn, (left, right), strict=True):
            figures.legend(figure, panel, columns=2)
        return drawn

    def _meaning(self) -> str:
        name = self._settings.mixed
        fine, coarse = (float(self._found.shares(which, NEAREST).mean()) for which in (name, self._found.coarse))
        full, nearest, stochastic, kahan = (
            mean(self._found.values("accuracy", *way)).value
            for way in ((FULL, NEAREST), (name, NEAREST), (name, STOCHASTIC), (name, KAHAN))
        )
        return (
            f"Round-to-nearest cancels {fine:.1%} of the updates of weights in {name.upper()}, and {coarse:.1%} in "
            f"{self._found.coarse.upper()}. In {name.upper()}, test accuracy is then {nearest:.1%} instead of {full:.1%} in full "
            f"precision; it is {stochastic:.1%} with stochastic updates and {kahan:.1%} with Kahan summation."
        )
