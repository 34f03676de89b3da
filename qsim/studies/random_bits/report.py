"""The report of the study `random-bits`: the bias of the rounding, and the loss that few random bits add in training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from qsim.plot import figures
from qsim.studies.learners.images import described, variant
from qsim.studies.random_bits import BACKWARD, BIAS, SAMPLES, UPDATE, RandomBitsStudy, Run, Settings
from qsim.studies.report import Claim, Picture, Report, listed
from qsim.studies.result import Result
from qsim.studies.statistics import Interval, above, confidence_text, describe_bars, difference, mean, positive, within
from qsim.text.tables import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: The bits of the paper's hardware, and the share of what the fewest bits cost up to which a loss counts as none.
_SIX, _SHARE = 6, 0.1
_WAYS = ((False, "truncated"), (True, "corrected"))
_OF_CONTRACT = "this library's contract"


class Findings:
    """The results of a study, grouped by the place of the rounding, its format and its bits."""

    def __init__(self, study: RandomBitsStudy, settings: Settings, results: Sequence[Result[Run]]) -> None:
        self.study, self.settings = study, settings
        self._of = {(r.run.what, r.run.format, r.run.bits, r.run.correction, r.run.seed): r for r in results}
        self.places = [*((BACKWARD, name) for name in settings.formats), (UPDATE, settings.weights)]
        self.least = settings.bits[0]
        self.six = min(settings.bits, key=lambda bits: abs(bits - _SIX))

    def report(self) -> Report:
        """The complete report."""
        pictures = [
            Picture("loss", f"Test loss added by few random bits. {describe_bars()}", self._draw_loss),
            Picture("bias", f"Mean error of one rounding, in gaps between neighbours. {describe_bars()}", self._draw_bias),
        ]
        parts: list[str | Table | Picture] = [*pictures, self._setting(), *(self._losses(*place) for place in self.places), self._biases()]
        title = f"{self.study.question} {variant(self.settings.data)}".rstrip()
        return Report(self.study, parts, self._claims(), self._meaning(), title)

    def bias(self, bits: int, *, correction: bool) -> Interval:
        """The mean error, in units of the gap."""
        name = self.settings.formats[0]
        return mean([float(self._of[BIAS, name, bits, correction, seed]["bias"]) for seed in range(self.settings.seeds)])

    def losses(self, what: str, name: str, bits: int, *, correction: bool) -> list[float]:
        """Test loss of each seed."""
        return [float(self._of[what, name, bits, correction, seed]["loss"]) for seed in range(self.settings.seeds)]

    def added(self, what: str, name: str, bits: int, *, correction: bool) -> Interval:
        """The test loss that few random bits add to that with 32."""
        return difference(self.losses(what, name, bits, correction=correction), self.losses(what, name, 32, correction=False))

    def enough(self, what: str, name: str, bits: int, *, correction: bool) -> bool | None:
        """Whether a number of bits adds no loss, on the scale of what the fewest bits add; None if these add none either."""
        if not self.can_fail(what, name):
            return None
        margin = _SHARE * self.added(what, name, self.least, correction=False).value
        return within(self.added(what, name, bits, correction=correction), -margin, margin)

    def can_fail(self, what: str, name: str) -> bool:
        """Whether the fewest bits, truncated, add a loss that shows."""
        return above(self.added(what, name, self.least, correction=False)) is True

    def _setting(self) -> str:
        chosen = self.settings
        return (
            "With r random bits the probability of rounding up is truncated to a multiple of 2^-r, so that numbers between two neighbours "
            "lose 2^-(r+1) of their gap on average; with correction, it is rounded to the nearest multiple, and they lose nothing. Both "
            f"are measured on {SAMPLES:,} numbers per seed. {described(chosen.data)}, in {chosen.steps} steps of plain SGD with "
            f"{chosen.batch} images each. Either the backward pass rounds inputs and gradients, at a learning rate of {chosen.rate:g}, "
            f"with a loss scale that keeps them in range; or weights are values of {chosen.weights.upper()} and only their update rounds, "
            f"at a rate of {chosen.update_rate:g}: updates are then small parts of the gap, and those below 2^-r of it never change a "
            f"weight. There are {chosen.seeds} seeds; loss is compared with that of 32 bits, seed by seed. Intervals are "
            f"{confidence_text()}. The paper estimates the cost of a six-bit generator in hardware and claims nothing about accuracy, so "
            "the verdicts on it answer this "
            "study's question."
        )

    def _losses(self, what: str, name: str) -> Table:
        rows = []
        for bits in self.settings.bits:
            cells = [str(bits)]
            for correction, _ in _WAYS:
                cells += [
                    f"{positive(self.losses(what, name, bits, correction=correction)):.3f}",
                    f"{self.added(what, name, bits, correction=correction):+.3f}",
                ]
            rows.append(cells)
        rows.append(["32", f"{positive(self.losses(what, name, 32, correction=False)):.3f}", "-", "the same", "-"])
        return Table.of(
            f"Test loss, {_where(what, name)}", ["random bits", "truncated", "truncation adds", "corrected", "correction adds"], rows
        )

    def _biases(self) -> Table:
        rows = [
            [
                str(bits),
                f"{-(0.5 ** (bits + 1)):.3g}",
                f"{self.bias(bits, correction=False):.3g}",
                f"{self.bias(bits, correction=True):.1e}",
            ]
            for bits in self.settings.bits
        ]
        return Table.of("Mean error in units of the gap", ["random bits", "truncated, in theory", "truncated", "corrected"], rows)

    def _draw_bias(self) -> Figure:
        (figure,), (axes,) = figures.row(1)
        bits = self.settings.bits
        for look, (correction, label) in zip(figures.LOOKS, _WAYS, strict=False):
            figures.band(axes, bits, [self.bias(count, correction=correction) for count in bits], look, label)
        axes.plot(bits, [-(0.5 ** (count + 1)) for count in bits], label=r"$-2^{-(r+1)}$", **figures.REFERENCE())
        axes.set_yscale("symlog", linthresh=1e-3)
        axes.set_xticks(bits)
        axes.set_xlabel("random bits r")
        axes.set_ylabel("mean error in gaps")
        figures.legend(figure, axes, columns=3)
        return figure

    def _draw_loss(self) -> list[Figure]:
        bits = self.settings.bits
        drawn, axes = figures.row(len(self.places))
        for figure, panel, (what, name) in zip(drawn, axes, self.places, strict=True):
            for place, (look, (correction, label)) in enumerate(zip(figures.LOOKS, _WAYS, strict=False)):
                found = [self.added(what, name, count, correction=correction) for count in bits]
                figures.band(panel, [count * 1.05**place for count in bits], found, look, label)
            panel.axhline(0, **figures.REFERENCE())
            panel.set_xscale("log", base=2)
            panel.set_xticks(bits, [str(count) for count in bits])
            panel.minorticks_off()
            panel.set_xlabel("random bits")
            panel.set_ylabel("test loss added to that of 32 bits")
            panel.set_title(_where(what, name))
            figures.legend(figure, panel, columns=2)
        return drawn

    def _claims(self) -> list[Claim]:
        ways = [(*place, correction) for place in self.places for correction in (False, True)]
        return [*(self._six_are_enough(*way) for way in ways), self._truncated(), self._corrected()]

    def _six_are_enough(self, what: str, name: str, correction: bool) -> Claim:
        fewest, found = self.added(what, name, self.least, correction=False), self.added(what, name, self.six, correction=correction)
        few = f"{self.least} truncated bit"
        scale = f", {found.detects / fewest.value:.0%} of what {few} adds" if self.can_fail(what, name) else f"; {few} adds none that shows"
        return Claim(
            "question of this study",
            f"{self.six} random bits, {dict(_WAYS)[correction]}, are enough for {_where(what, name)}",
            f"{found:+.4f} added to the test loss; {few} adds {fewest:+.4f}",
            self.enough(what, name, self.six, correction=correction),
            test="test loss added to that of 32 random bits, seed by seed",
            rule=f"yes if the interval is within a tenth of what {few} adds, no if it is beyond: this is the scale of the cost of few "
            f"bits; undecided if {few} adds no loss that shows, because then nothing can fail",
            power=f"{found.detects:.4f} in loss{scale}",
        )

    def _truncated(self) -> Claim:
        bias = self.bias(self.least, correction=False)
        return Claim(
            _OF_CONTRACT,
            "truncated to r bits, a number loses 2^-(r+1) gaps on average",
            f"{self.least} random bit(s): {bias:.4f}",
            abs(bias.value + 0.5 ** (self.least + 1)) < 1e-3,
            test="mean error over numbers anywhere between two neighbours",
            rule="yes if it is within 0.001 of that: a million errors below one gap have a mean within it, at five standard deviations",
            power="0.001 gaps",
        )

    def _corrected(self) -> Claim:
        bias = self.bias(self.least, correction=True)
        return Claim(
            _OF_CONTRACT,
            "with correction, it loses nothing on average",
            f"{self.least} random bit(s): {bias:.1e}",
            abs(bias.value) < 1e-3,
            test="the same",
            rule="the same, around zero",
            power="0.001 gaps",
        )

    def _meaning(self) -> str:
        few = f"{self.least} truncated bit"
        shows = [place for place in self.places if self.can_fail(*place)]
        unharmed = listed([_where(*place) for place in self.places if place not in shows])
        sentences = [f"For {unharmed}, even {few} adds no test loss that shows."] if unharmed else []
        if shows:
            needs = {place: [self._fewest(*place, correction) for correction, _ in _WAYS] for place in shows}
            truncated, corrected = (self._number(max(found, key=_none_last)) for found in zip(*needs.values(), strict=True))
            where = " in all cases tried" if len(shows) > 1 else f" for {_where(*shows[0])}"
            each = listed([f"{' or '.join(map(self._number, found))} for {_where(*place)}" for place, found in needs.items()])
            sentences = [
                f"{truncated} random bits are enough{where} if probabilities are truncated, and {corrected} if they are rounded to the "
                "nearest multiple (corrected).",
                *([f"Truncated or corrected, it takes {each}."] if len(shows) > 1 else []),
                *sentences,
                f"Enough means at most a tenth of the test loss that {few} adds.",
            ]
        return " ".join(sentences)

    def _number(self, bits: int | None) -> str:
        return str(bits) if bits else f"more than {self.settings.bits[-1]}"

    def _fewest(self, what: str, name: str, correction: bool) -> int | None:
        """The fewest random bits that are enough; None if none that were tried are."""
        return min((bits for bits in self.settings.bits if self.enough(what, name, bits, correction=correction)), default=None)


def _none_last(bits: int | None) -> float:
    return float("inf") if bits is None else bits


def _where(what: str, name: str) -> str:
    return f"backward passes in {name.upper()}" if what == BACKWARD else f"updates of {name.upper()} weights"
