"""The report of the study `accumulator`: errors of sums against their length, and a GPT's loss and gradients with each accumulator."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from qsim import figures
from qsim.studies.accumulator import (
    CHAIN,
    CHUNKED,
    CONTROL,
    NARROW,
    PROMOTED,
    SINGLE,
    TRAINED,
    UNROUNDED,
    Accumulator,
    Run,
    Settings,
    adders,
    sums_of,
    training_of,
)
from qsim.studies.accumulator.dot_products import EXACT, MEAN_ONE, NORMAL, POSITIVE, WANG
from qsim.studies.learners.text import VOCABULARY
from qsim.studies.report import Claim, Picture, Report, Table
from qsim.studies.result import Result
from qsim.studies.statistics import Interval, bars, difference, exponential, mean, percent

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: DeepSeek-V3, Section 3.3: differences of the loss below 0.25 % are within the randomness of training.
SAME = 0.0025
#: An error that grows by less than this factor from the shortest sums to the longest does not grow; one percent of error is small.
GROWN, SMALL = 2.0, 0.01
#: The length of sums in the paper's claims, and where sums of numbers of mean one in 1-6-9 end, within this share.
LENGTH, END, NEAR_END = 4096, 4096.0, 0.05
_DEEPSEEK, _WANG, _BOTH = "DeepSeek-V3, Section 3.3.2", "Wang et al. 2018", "Wang et al. 2018, Sun et al. 2019"
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
_DRAWN = (CHAIN, PROMOTED, NARROW, CHUNKED, WANG)


class Findings:
    """The results of the study.

    Args:
        study: The study.
        settings: Its settings.
        results: The results of all runs.
    """

    def __init__(self, study: Accumulator, settings: Settings, results: Sequence[Result[Run]]) -> None:
        self.study, self.settings = study, settings
        self._of = {result.run: result for result in results}
        #: The number of products in the longest sums of the training: those of weight gradients, over all tokens.
        self.longest = settings.batch * settings.context
        #: The index of the length that is closest to the papers'.
        self.usual = min(range(len(settings.lengths)), key=lambda at: abs(settings.lengths[at] - LENGTH))

    def report(self) -> Report:
        """The complete report."""
        text = self._about_sums(), self._about_training()
        title = "Rounding to FP8 costs more than an H100's narrow sums, unless all terms have one sign"
        return Report(
            self.study,
            [*text, self._sums(), self._trained(), *self._pictures()],
            self._claims(),
            self._meaning(),
            title if self._rounding_costs_more() else "",
        )

    def _rounding_costs_more(self) -> bool:
        chain, rounding = (
            {kind: mean(self.sums("error", kind, name, self.usual)) for kind in (NORMAL, POSITIVE)} for name in (CHAIN, EXACT)
        )
        return chain[NORMAL].high < rounding[NORMAL].low and chain[POSITIVE].low > rounding[POSITIVE].high

    def sums(self, what: str, operands: str, accumulate: str, at: int) -> list[float]:
        """A measured value of sums at one of the lengths, for each seed."""
        runs = [sums_of(self.settings, operands, accumulate, seed) for seed in range(self.settings.repeats)]
        return [float(self._of[run][what][at]) for run in runs]

    def growth(self, operands: str, accumulate: str) -> Interval:
        """The error of the longest sums relative to that of the shortest."""
        last, first = ([math.log(error) for error in self.sums("error", operands, accumulate, at)] for at in (-1, 0))
        return exponential(difference(last, first))

    def losses(self, accumulate: str) -> list[float]:
        """The loss for each seed; that of a diverged model is that of one that knows nothing."""
        runs = [training_of(self.settings, accumulate, seed) for seed in range(self.settings.seeds)]
        return [min(float(self._of[run]["loss"]), math.log(VOCABULARY)) for run in runs]

    def lost(self, accumulate: str) -> Interval:
        """The change of the loss against float32 sums with the same seed, as a share."""
        return mean([own / other - 1 for own, other in zip(self.losses(accumulate), self.losses(SINGLE), strict=True)])

    def gradients(self, accumulate: str) -> Interval:
        """The relative change of gradients against float32 sums."""
        runs = [training_of(self.settings, SINGLE, seed) for seed in range(self.settings.seeds)]
        return mean([float(self._of[run]["gradients"][accumulate]) for run in runs])

    def _about_sums(self) -> str:
        chosen = self.settings
        return (
            f"**Sums.** Products of {chosen.lengths[0]} to {chosen.lengths[-1]} pairs of E4M3 numbers, scaled so that the largest is 448: "
            "normal ones, whose signs cancel, and positive ones, uniform from zero. The error of a sum is its difference from the exact "
            "sum of the same products, in units of the root mean square of the exact sums. There are 1024 sums for each of "
            f"{chosen.repeats} seeds. Sums in 1-6-9 are also measured as in Wang et al., on numbers with mean one and standard deviation "
            "one."
        )

    def _about_training(self) -> str:
        chosen = self.settings
        data = "the sources of Python's standard library" if chosen.data == "library" else chosen.data
        return (
            f"**Training.** A GPT ({chosen.layers} blocks, width {chosen.width}, {chosen.heads} heads) learns {data}, byte by byte, in "
            f"{chosen.steps} updates of {chosen.batch} sequences of {chosen.context} bytes by AdamW, with a peak learning rate of "
            f"{chosen.rate:g}. All linear layers of its blocks take inputs, weights and gradients in E4M3 with per-tensor scales, and add "
            "all three products with the accumulator; the longest sums, those of weight gradients, have "
            f"{self.longest} products. There are {chosen.seeds} seeds; all accumulators begin with the same weights and "
            "see the same sequences. The change of a gradient includes roundings that come out otherwise behind a changed sum. Intervals "
            f"are {percent()}, over seeds."
        )

    def _sums(self) -> Table:
        names = [EXACT, *adders(self.settings)]
        lengths = (0, self.usual, len(self.settings.lengths) - 1)
        header = ["sum", *(f"{kind}, {self.settings.lengths[at]}" for kind in (NORMAL, POSITIVE) for at in lengths)]
        rows = [
            [_label(name), *(f"{mean(self.sums('error', kind, name, at)).value:.1e}" for kind in (NORMAL, POSITIVE) for at in lengths)]
            for name in names
        ]
        return Table("Error of sums of E4M3 products, by operands and number of products", header, rows)

    def _trained(self) -> Table:
        rows = [
            [_label(name), f"{mean(self.losses(name)):.4f}", _percent(self.lost(name)), f"{100 * self.gradients(name).value:.2g} %"]
            for name in (UNROUNDED, *TRAINED)
        ]
        header = ["sums", "loss", "relative to FP32 sums", "change of the trained model's gradient"]
        return Table("Training in FP8", header, [[_LABELS[SINGLE], f"{mean(self.losses(SINGLE)):.4f}", "-", "-"], *rows])

    def _pictures(self) -> list[Picture]:
        return [
            Picture(
                "errors",
                "Root mean square error of sums of E4M3 products, in units of the exact sums. First: normal operands. Second: positive "
                f"ones. Dotted: the error that rounding the operands to E4M3 causes by itself. {bars()}",
                self._draw_errors,
            ),
            Picture(
                "training",
                "First: loss on held-out text relative to FP32 sums with the same seed; grey: differences that count as none. Second: "
                "change of the trained model's gradient against FP32 sums; dotted: its change if nothing is rounded. Bars: "
                f"{percent()} intervals over seeds.",
                self._draw_training,
            ),
        ]

    def _draw_errors(self) -> Sequence[Figure]:
        drawn, panels = figures.row(2, width=4.8)
        lengths = self.settings.lengths
        for panel, operands in zip(panels, (NORMAL, POSITIVE), strict=True):
            for look, name in zip(figures.LOOKS, _DRAWN, strict=False):
                found = [_on_log_axis(mean(self.sums("error", operands, name, at))) for at in range(len(lengths))]
                figures.band(panel, lengths, found, look, _label(name))
            rounding = [mean(self.sums("error", operands, EXACT, at)).value for at in range(len(lengths))]
            panel.plot(lengths, rounding, label=_LABELS[EXACT], **figures.REFERENCE())
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
        gradient.axvline(100 * self.gradients(UNROUNDED).value, **figures.REFERENCE())
        for panel, of in ((loss, self.lost), (gradient, self.gradients)):
            for place, name in enumerate(TRAINED):
                found = of(name)
                bars = [[100 * (found.value - found.low)], [100 * (found.high - found.value)]]
                panel.errorbar([100 * found.value], [place], xerr=bars, capsize=2, elinewidth=0.9, **figures.LOOKS[0].alone()())
            panel.set_yticks(range(len(TRAINED)), [_label(name) for name in TRAINED])
            panel.invert_yaxis()
        loss.set_xscale("symlog", linthresh=0.5)
        loss.set_xlabel("loss relative to FP32 sums, in %")
        gradient.set_xscale("log")
        gradient.set_xlabel("change of the gradient, in %")
        for panel in (loss, gradient):
            panel.xaxis.set_major_formatter("{x:g}")
        return drawn

    def _claims(self) -> list[Claim]:
        return [self._error_of_chain(), self._promotion(), *self._narrow_sums(), *self._claims_of_training()]

    def _error_of_chain(self) -> Claim:
        normal, positive = (mean(self.sums("largest", kind, CHAIN, self.usual)) for kind in (NORMAL, POSITIVE))
        return Claim(
            _DEEPSEEK,
            "a product of two random matrices with K = 4096 has a maximum relative error of nearly 2 %",
            f"{self.settings.lengths[self.usual]} products: {_share(normal)} with normal operands, {_share(positive)} with positive ones",
            True if normal.high < 0.02 < positive.low else False if positive.high < 0.02 or normal.low > 0.02 else None,
            test="the largest error of 1024 sums in units of their root mean square",
            rule="2 % must be between normal and positive operands: the paper does not say which distribution its matrices have",
            power=f"{_least(normal)} and {_least(positive)} of the sums",
        )

    def _promotion(self) -> Claim:
        promoted, chain = ([self.growth(kind, name) for kind in (NORMAL, POSITIVE)] for name in (PROMOTED, CHAIN))
        stops = all(found.high < GROWN for found in promoted) and all(found.low > GROWN for found in chain)
        return Claim(
            _DEEPSEEK,
            "promotion every 128 products significantly improves precision",
            f"normal and positive: promoted {promoted[0]:.2g} and {promoted[1]:.2g} times, chain {chain[0]:.3g} and {chain[1]:.3g} times",
            True if stops else False if any(found.low > GROWN for found in promoted) else None,
            test=f"the growth of the error from {self.settings.lengths[0]} to {self.settings.lengths[-1]} products",
            rule=f"less than {GROWN:g} times with promotion and more without: an error that does not grow is that of 128 products",
            power=f"a growth of {max(found.high / found.value for found in promoted):.2f} times",
        )

    def _narrow_sums(self) -> list[Claim]:
        last = self.settings.lengths[-1]
        end, chunks = mean(self.sums("sum", MEAN_ONE, NARROW, -1)), mean(self.sums("error", MEAN_ONE, WANG, -1))
        return [
            Claim(
                _WANG,
                "a sum in 1-6-9 of numbers with mean one and standard deviation one stops growing at 4096",
                f"{last} numbers sum to {end:.0f}",
                None if last < 2 * END else abs(end.value / END - 1) < NEAR_END,
                test="the mean of such sums",
                rule=f"within {NEAR_END:.0%} of 4096, of numbers that sum to more than twice as much",
                power=f"{NEAR_END:.0%} of the sum",
            ),
            Claim(
                _WANG,
                "with chunks of 64 the sum follows the exact one",
                f"{last} numbers: off by {_share(chunks)}",
                True if chunks.high < SMALL else False if chunks.low > SMALL else None,
                test="the root mean square of errors; chunks and their sum are in 1-6-9",
                rule=f"below {SMALL:.0%}, half the error for which DeepSeek-V3 promotes",
                power=_least(chunks),
            ),
        ]

    def _claims_of_training(self) -> list[Claim]:
        control = self.lost(CONTROL)
        rows = (
            (_DEEPSEEK, "the H100's chain constrains the accuracy of training", CHAIN, True),
            (_DEEPSEEK, "promotion every 128 products removes this: as with FP32 sums", PROMOTED, False),
            (_WANG, "training with sums in 1-6-9 loses accuracy", NARROW, True),
            (_BOTH, "with chunks of 64, as with FP32 sums", CHUNKED, False),
        )
        test = "the loss on held-out text relative to FP32 sums with the same seed"
        claims = [
            Claim(
                "the study's own control",
                "sums that end at 448 train worse",
                f"loss {_percent(control)}",
                control.low > SAME,
                test=test,
                rule="otherwise nothing follows from the training",
                power=_least(control),
            )
        ]
        for source, paper, name, harm in rows:
            found = self.lost(name)
            worse = True if found.low > SAME else False if found.high < SAME and self.longest >= LENGTH else None
            decided = worse is not None and control.low > SAME
            rule = (
                f"worse if the interval is above {SAME:.2%}, and not worse if it is below, with sums of at least {LENGTH} products; "
                f"DeepSeek-V3 takes less for the randomness of training"
            )
            agrees = (worse is harm) if decided else None
            claims.append(Claim(source, paper, f"loss {_percent(found)}", agrees, test=test, rule=rule, power=_least(found)))
        return claims

    def _meaning(self) -> str:
        length, at = self.settings.lengths[self.usual], self.usual
        chain, promoted = (mean(self.sums("error", POSITIVE, name, at)).value for name in (CHAIN, PROMOTED))
        cancelling, rounding = (mean(self.sums("error", NORMAL, name, at)).value for name in (CHAIN, EXACT))
        return (
            f"Over {length} FP8 products an H100's chain loses {chain:.1%} of a sum of positive terms, and {promoted:.2%} if promoted "
            f"every 128; where signs cancel it is off by {cancelling:.2%}, and rounding the operands to E4M3 by {rounding:.1%}. In a "
            f"GPT with {self.settings.layers} blocks and sums of up to {self.longest} products, the chain changes gradients by "
            f"{self.gradients(CHAIN).value:.1%}, E4M3 by {self.gradients(UNROUNDED).value:.0%}, and the chain the loss by "
            f"{_percent(self.lost(CHAIN))}."
        )


def _label(name: str) -> str:
    return _LABELS.get(name, name)


def _on_log_axis(found: Interval) -> Interval:
    """An interval for a logarithmic axis."""
    return Interval(found.value, max(found.low, found.value / 10), found.high)


def _least(found: Interval) -> str:
    """The smallest effect that would have been found, in percent."""
    return f"{100 * found.detects:.2g} %"


def _share(found: Interval) -> str:
    return f"{100 * found.value:.2g} [{100 * found.low:.2g}, {100 * found.high:.2g}] %"


def _percent(found: Interval) -> str:
    return f"{Interval(100 * found.value, 100 * found.low, 100 * found.high):+.2f} %"
