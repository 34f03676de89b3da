"""The report of the study `accumulator`: errors of sums against their length, and a GPT's loss and gradients with each accumulator."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from qsim.plot import figures
from qsim.studies.accumulator import CHAIN, CHUNKED, CONTROL, NARROW, PROMOTED, SINGLE, TRAINED, UNROUNDED, Settings, adders
from qsim.studies.accumulator.dot_products import EXACT, NORMAL, POSITIVE, WANG
from qsim.studies.accumulator.findings import LENGTH, SAME, SumFindings
from qsim.studies.learners.gpt import GPTSize, parameters
from qsim.studies.learners.text import VOCABULARY
from qsim.studies.report import Picture
from qsim.studies.statistics import mean, within
from qsim.text.tables import Table

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


class Written(SumFindings):
    """The report."""

    def parts(self) -> list[str | Table | Picture]:
        """The setting, tables and figures."""
        chosen = self.settings
        data = "the sources of Python's standard library" if chosen.data == "library" else chosen.data
        return [
            self.text("sums", last=chosen.lengths[-1]),
            self.text("training", data=data, size=parameters(_size(chosen), VOCABULARY, chosen.context)),
            self._sums(),
            self._trained(),
            self.picture("errors", self._draw_errors),
            self.picture("training", self._draw_training),
        ]

    def title(self) -> str:
        """The answer, if it is what the first runs found, and the model if it is another one."""
        own, usual = _size(self.settings), _size(type(self.settings)())
        variant = "" if own == usual else f". A GPT with {parameters(own, VOCABULARY, self.settings.context):,} parameters"
        chain, rounding = (
            {kind: mean(self.sums("error", kind, name, self.usual)) for kind in (NORMAL, POSITIVE)} for name in (CHAIN, EXACT)
        )
        costs_more = chain[NORMAL].high < rounding[NORMAL].low and chain[POSITIVE].low > rounding[POSITIVE].high
        return self.text("title", variant=variant) if costs_more else ""

    def _sums(self) -> Table:
        names = [EXACT, *adders(self.settings)]
        lengths = sorted({0, self.usual, len(self.settings.lengths) - 1})
        header = ["sum", *(f"{kind}, {self.settings.lengths[at]}" for kind in (NORMAL, POSITIVE) for at in lengths)]
        rows = [
            [_label(name), *(f"{mean(self.sums('error', kind, name, at)).value:.1e}" for kind in (NORMAL, POSITIVE) for at in lengths)]
            for name in names
        ]
        return Table.of("Error of sums of E4M3 products, by operands and number of products", header, rows)

    def _trained(self) -> Table:
        rows = []
        for name in (UNROUNDED, *TRAINED):
            change = f"{self.gradients(name).points.value:.1f} %"
            rows.append([_label(name), f"{mean(self.losses(name)):.4f}", f"{self.lost(name).points:+.2f} %", change])
        header = ["sums", "loss", "relative to FP32 sums", "change of the trained model's gradient"]
        return Table.of("Training in FP8", header, [[_LABELS[SINGLE], f"{mean(self.losses(SINGLE)):.4f}", "-", "-"], *rows])

    def _draw_errors(self) -> Sequence[Figure]:
        drawn, panels = figures.row(2, width=3.9)
        lengths = self.settings.lengths
        for panel, operands in zip(panels, (NORMAL, POSITIVE), strict=True):
            for look, (name, label) in zip(figures.LOOKS, _DRAWN.items(), strict=False):
                errors = [mean(self.sums("error", operands, name, at)) for at in range(len(lengths))]
                found = [error.clipped(error.value / 10) for error in errors]
                figures.band(panel, lengths, found, look, label)
            rounding = [mean(self.sums("error", operands, EXACT, at)).value for at in range(len(lengths))]
            panel.plot(lengths, rounding, label="operands only", **figures.REFERENCE())
            panel.set_xscale("log", base=2)
            panel.set_yscale("log")
            panel.set(xlabel="products in a sum", ylabel="relative error of a sum", title=f"{operands} operands")
        figures.share_y(panels)
        for panel in panels:
            figures.label_ends(panel)
        return drawn

    def _draw_training(self) -> Sequence[Figure]:
        drawn, (loss, gradient) = figures.row(2, width=4.2, height=2.4)
        loss.axvspan(-100 * SAME, 100 * SAME, color="#808080", alpha=0.25, linewidth=0)
        loss.axvline(0, **figures.REFERENCE())
        gradient.axvline(100 * self.gradients(UNROUNDED).value, **figures.REFERENCE())
        for panel, of in ((loss, self.lost), (gradient, self.gradients)):
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

    def meaning(self) -> str:
        """The error of an H100's sums, and its effect in training."""
        chain, promoted = (mean(self.sums("error", POSITIVE, name, self.usual)).value for name in (CHAIN, PROMOTED))
        cancelling, rounding = (mean(self.sums("error", NORMAL, name, self.usual)).value for name in (CHAIN, EXACT))
        lost = self.lost(CHAIN)
        return self.text(
            "meaning",
            length=self.settings.lengths[self.usual],
            chain=chain,
            promoted=promoted,
            cancelling=cancelling,
            rounding=rounding,
            effect={True: "makes no difference", False: "makes a difference", None: "shows no clear effect"}[within(lost, -SAME, SAME)],
            lost=lost,
            longer="" if self.longest >= LENGTH else " Longer sums were not trained with.",
        )


def _size(chosen: Settings) -> GPTSize:
    return GPTSize(chosen.layers, chosen.width, chosen.heads)


def _label(name: str) -> str:
    return _LABELS.get(name, name)
