"""The report of the study `accumulator`: errors of sums against their length, and a GPT's loss and gradients with each accumulator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from qsim.plot import figures
from qsim.studies.accumulator import CHAIN, CHUNKED, CONTROL, NARROW, PROMOTED, SINGLE, TRAINED, UNROUNDED, AccumulatorStudy, adders
from qsim.studies.accumulator.claims import claims
from qsim.studies.accumulator.dot_products import EXACT, NORMAL, POSITIVE, WANG
from qsim.studies.accumulator.findings import LENGTH, SAME, Findings, percent_text
from qsim.studies.learners.gpt import GPTSize, parameters
from qsim.studies.learners.text import VOCABULARY
from qsim.studies.report import Picture, Report
from qsim.studies.statistics import Interval, confidence_text, describe_bars, mean, within
from qsim.text.tables import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LABELS = {
    EXACT: "operands rounded, sums exact",
    CHAIN: "H100 FP8",
    PROMOTED: "H100 FP8, promoted every 128",
    NARROW: "1-6-9, every product",
    CHUNKED: "1-6-9, every 64 products",
    WANG: "1-6-9, chunks of 64 and their sum",
    CONTROL: "E4M3, ends at 448 (control)",
    UNROUNDED: "no rounding",
    SINGLE: "FP32 sums",
}
#: The sums that are drawn, and short names at the ends of their curves, so that the text is not small on a phone.
_DRAWN = {CHAIN: "H100", PROMOTED: "H100, promoted", NARROW: "1-6-9", CHUNKED: "1-6-9, every 64", WANG: "1-6-9, chunks"}


class ReportWriter:
    """Write the report.

    Args:
        study: The study.
        found: The findings from its runs.
    """

    def __init__(self, study: AccumulatorStudy, found: Findings) -> None:
        self._study, self._found, self._settings = study, found, found.settings

    def report(self) -> Report:
        """The complete report."""
        text = self._about_sums(), self._about_training()
        title = "Rounding to FP8 costs more than an H100's narrow sums, unless all terms have one sign" + self._variant()
        return Report(
            self._study,
            [*text, self._sums(), self._trained(), *self._pictures()],
            claims(self._found),
            self._meaning(),
            title if self._rounding_costs_more() else "",
        )

    def _variant(self) -> str:
        """The model, for the title; empty for that of the default settings."""
        own, usual = (GPTSize(chosen.layers, chosen.width, chosen.heads) for chosen in (self._settings, type(self._settings)()))
        return "" if own == usual else f". A GPT with {parameters(own, VOCABULARY, self._settings.context):,} parameters"

    def _rounding_costs_more(self) -> bool:
        chain, rounding = (
            {kind: mean(self._found.sums("error", kind, name, self._found.usual)) for kind in (NORMAL, POSITIVE)} for name in (CHAIN, EXACT)
        )
        return chain[NORMAL].high < rounding[NORMAL].low and chain[POSITIVE].low > rounding[POSITIVE].high

    def _about_sums(self) -> str:
        chosen = self._settings
        return (
            f"**Sums.** Products of {chosen.lengths[0]} to {chosen.lengths[-1]} pairs of E4M3 numbers, scaled so that the largest is 448: "
            "normal ones, whose signs cancel, and positive ones, uniform from zero. The error of a sum is its difference from the exact "
            "sum of the same products, in units of the root mean square of the exact sums. There are 1024 sums for each of "
            f"{chosen.repeats} seeds. Sums in 1-6-9 are also measured as in Wang et al., on numbers with mean one and standard deviation "
            "one."
        )

    def _about_training(self) -> str:
        chosen = self._settings
        data = "the sources of Python's standard library" if chosen.data == "library" else chosen.data
        size = parameters(GPTSize(chosen.layers, chosen.width, chosen.heads), VOCABULARY, chosen.context)
        return (
            f"**Training.** A GPT ({chosen.layers} blocks, width {chosen.width}, {chosen.heads} heads; {size:,} parameters) learns "
            f"{data}, byte by byte, in {chosen.steps} updates of {chosen.batch} sequences of {chosen.context} bytes by AdamW, with a "
            f"peak learning rate of {chosen.rate:g}. All linear layers of its blocks take inputs, weights and gradients in E4M3 with "
            "per-tensor scales, and add all three products with the accumulator; the longest sums, those of weight gradients, have "
            f"{self._found.longest} products. There are {chosen.seeds} seeds; all accumulators begin with the same weights and see the "
            "same sequences. The change of a gradient includes roundings that come out otherwise behind a changed sum. Intervals are "
            f"{confidence_text()}, over seeds."
        )

    def _sums(self) -> Table:
        names = [EXACT, *adders(self._settings)]
        lengths = sorted({0, self._found.usual, len(self._settings.lengths) - 1})
        header = ["sum", *(f"{kind}, {self._settings.lengths[at]}" for kind in (NORMAL, POSITIVE) for at in lengths)]
        rows = [
            [
                _label(name),
                *(f"{mean(self._found.sums('error', kind, name, at)).value:.1e}" for kind in (NORMAL, POSITIVE) for at in lengths),
            ]
            for name in names
        ]
        return Table.of("Error of sums of E4M3 products, by operands and number of products", header, rows)

    def _trained(self) -> Table:
        rows = [
            [
                _label(name),
                f"{mean(self._found.losses(name)):.4f}",
                percent_text(self._found.lost(name)),
                f"{100 * self._found.gradients(name).value:.1f} %",
            ]
            for name in (UNROUNDED, *TRAINED)
        ]
        header = ["sums", "loss", "relative to FP32 sums", "change of the trained model's gradient"]
        return Table.of("Training in FP8", header, [[_LABELS[SINGLE], f"{mean(self._found.losses(SINGLE)):.4f}", "-", "-"], *rows])

    def _pictures(self) -> list[Picture]:
        return [
            Picture(
                "errors",
                "Root mean square error of sums of E4M3 products, in units of the exact sums. First: normal operands. Second: positive "
                f"ones. Dotted: the error that rounding the operands to E4M3 causes by itself. {describe_bars()}",
                self._draw_errors,
            ),
            Picture(
                "training",
                "First: loss on held-out text relative to FP32 sums with the same seed; grey: differences that count as none. Second: "
                "change of the trained model's gradient against FP32 sums; dotted: its change if nothing is rounded. Bars: "
                f"{confidence_text()} intervals over seeds.",
                self._draw_training,
            ),
        ]

    def _draw_errors(self) -> Sequence[Figure]:
        drawn, panels = figures.row(2, width=3.9)
        lengths = self._settings.lengths
        for panel, operands in zip(panels, (NORMAL, POSITIVE), strict=True):
            for look, (name, label) in zip(figures.LOOKS, _DRAWN.items(), strict=False):
                found = [_on_log_axis(mean(self._found.sums("error", operands, name, at))) for at in range(len(lengths))]
                figures.band(panel, lengths, found, look, label)
            rounding = [mean(self._found.sums("error", operands, EXACT, at)).value for at in range(len(lengths))]
            panel.plot(lengths, rounding, label="operands only", **figures.REFERENCE())
            panel.set_xscale("log", base=2)
            panel.set_yscale("log")
            panel.set_xlabel("products in a sum")
            panel.set_ylabel("relative error of a sum")
            panel.set_title(f"{operands} operands")
        figures.share_y(panels)
        for panel in panels:
            figures.label_ends(panel)
        return drawn

    def _draw_training(self) -> Sequence[Figure]:
        drawn, (loss, gradient) = figures.row(2, width=4.2, height=2.4)
        loss.axvspan(-100 * SAME, 100 * SAME, color="#808080", alpha=0.25, linewidth=0)
        loss.axvline(0, **figures.REFERENCE())
        gradient.axvline(100 * self._found.gradients(UNROUNDED).value, **figures.REFERENCE())
        for panel, of in ((loss, self._found.lost), (gradient, self._found.gradients)):
            for place, name in enumerate(TRAINED):
                found = of(name)
                errors = [[100 * (found.value - found.low)], [100 * (found.high - found.value)]]
                panel.errorbar([100 * found.value], [place], xerr=errors, capsize=2, elinewidth=0.9, **figures.LOOKS[0].alone()())
            panel.set_yticks(range(len(TRAINED)), [_label(name) for name in TRAINED])
            panel.invert_yaxis()
        loss.set_xscale("symlog", linthresh=1)
        loss.set_xlabel("loss relative to FP32 sums, in %")
        gradient.set_xscale("log")
        gradient.set_xlabel("change of the gradient, in %")
        for panel in (loss, gradient):
            panel.xaxis.set_major_formatter("{x:g}")
        return drawn

    def _meaning(self) -> str:
        length, at, longest = self._settings.lengths[self._found.usual], self._found.usual, self._found.longest
        chain, promoted = (mean(self._found.sums("error", POSITIVE, name, at)).value for name in (CHAIN, PROMOTED))
        cancelling, rounding = (mean(self._found.sums("error", NORMAL, name, at)).value for name in (CHAIN, EXACT))
        lost = self._found.lost(CHAIN)
        effect = {True: "makes no difference", False: "makes a difference", None: "shows no clear effect"}[within(lost, -SAME, SAME)]
        longer = "" if longest >= LENGTH else " Longer sums were not trained with."
        return (
            f"Where signs cancel, an H100's sums of {length} FP8 products are off by {cancelling:.2%}, and rounding the operands to E4M3 "
            f"changes them by {rounding:.1%}. Where all terms are positive, its sums lose {chain:.1%}, or {promoted:.2%} if they are "
            f"promoted to FP32 every 128 products. For a GPT with sums of up to {longest} products this {effect}: its loss changes by "
            f"{percent_text(lost)} relative to FP32 sums.{longer}"
        )


def _label(name: str) -> str:
    return _LABELS.get(name, name)


def _on_log_axis(found: Interval) -> Interval:
    """An interval for a logarithmic axis."""
    return Interval(found.value, max(found.low, found.value / 10), found.high)
