"""The report of the study `learning-rate`: loss against learning rate, and correlations in time."""

from __future__ import annotations

import math
from itertools import takewhile

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from qsim.plot import figures
from qsim.studies.findings import Findings, Values
from qsim.studies.learners.gpt_training import MIXED, STOCHASTIC, described, variant
from qsim.studies.learners.text import VOCABULARY
from qsim.studies.learning_rate import TOY, TRAINING, Settings
from qsim.studies.report import Claim, Picture
from qsim.studies.statistics import Interval, above, below, difference, exponential, mean, positive
from qsim.text.tables import Table

#: The loss of uniform predictions; higher losses are clipped to it.
_NOTHING = math.log(VOCABULARY)


class Written(Findings[Settings]):
    """The results of a study, grouped by method and rate."""

    def begin(self) -> None:
        """Read the rates, and the loss of the baseline."""
        self.rates = self.settings.rates
        self.frequencies = float(self.over_seeds("frequencies", experiment=TRAINING)[0])

    def title(self) -> str:
        """The question, and the model if it is another one."""
        return f"{self.study.question} {variant(self.settings.size, VOCABULARY, self.settings.context)}".rstrip()

    def parts(self) -> list[str | Table | Picture]:
        """The setting, tables and figures."""
        chosen = self.settings
        text = self.text("setting", learner=described([chosen.size], VOCABULARY, chosen.context, chosen.data))
        return [text, *self._tables(), self.picture("loss", self._losses), self.picture("correlation", self._correlations)]

    def losses(self, method: str, rate: float) -> Values:
        """The validation loss of each seed."""
        return np.minimum(self.over_seeds("loss", experiment=TRAINING, method=method, rate=rate), _NOTHING)

    def grid(self, method: str) -> Values:
        """The same at all rates: rates × seeds."""
        return np.array([self.losses(method, rate) for rate in self.rates])

    def stable(self, method: str) -> float:
        """The largest rate up to which all seeds beat the unigram baseline; NaN if there is none."""
        stable = takewhile(lambda rate: max(self.losses(method, rate)) < self.frequencies, self.rates)
        return max(stable, default=math.nan)

    def best(self, method: str) -> Values:
        """The base-2 logarithm of the rate with the lowest loss for each seed, by a parabola through its neighbours."""
        return np.array([_lowest(np.log2(self.rates), losses) for losses in self.grid(method).T])

    def lowest(self, method: str) -> Values:
        """The lowest loss over all rates for each seed."""
        least: Values = self.grid(method).min(0)
        return least

    def correlations(self, method: str, rate: float, what: str) -> Values:
        """Correlations of gradients or updates with those of the step before, for each seed; NaN where training diverged."""
        return self.over_seeds(what, experiment=TRAINING, method=method, rate=rate)

    def toy(self, method: str, levels: float) -> Interval:
        """The correlation of Proposition 1."""
        found = self.seeded(experiment=TOY, method=method, rate=1 / levels)
        return mean([value for result in found for value in result["correlations"]])

    def _tables(self) -> list[Table]:
        methods = self.settings.methods
        rows = [[_power(rate), *(f"{positive(self.losses(method, rate)):.3f}" for method in methods)] for rate in self.rates]
        ends = [
            [method, self._stable_rate(method), f"2^{mean(self.best(method)):.2f}", f"{mean(self.lowest(method)):.3f}"]
            for method in methods
        ]
        return [
            Table.of("Validation loss", ["learning rate", *methods], rows),
            Table.of("Rates", ["method", "largest stable", "best, by a parabola", "loss at the best"], ends),
        ]

    def _stable_rate(self, method: str) -> str:
        found = self.stable(method)
        if math.isnan(found):
            return "none of these"
        return f"{_power(found)} or more" if found == self.rates[-1] else _power(found)

    def _losses(self) -> Figure:
        (figure,), (panel,) = figures.row(1, width=3.9, height=2.9)
        losses = {
            method: [mean(self.losses(method, rate)).clipped(0.0, _NOTHING) for rate in self.rates] for method in self.settings.methods
        }
        figures.bands(panel, self.rates, losses, times=1.05)
        panel.axhline(self.frequencies, label="unigram baseline", **figures.REFERENCE())
        self._rate_axis(panel)
        panel.set_ylabel("validation loss in nats")
        figures.legend(figure, panel, columns=3)
        return figure

    def _rate_axis(self, panel: Axes) -> None:
        panel.set_xscale("log", base=2)
        panel.set_xlabel("learning rate")
        if _power(self.rates[0]) == f"{self.rates[0]:g}":
            # They are no powers of two, and every other one has room for its name.
            panel.set_xticks(self.rates[::2], [f"{rate:g}" for rate in self.rates[::2]])
            panel.minorticks_off()

    def _correlations(self) -> list[Figure]:
        drawn, (left, right) = figures.row(2)
        levels = self.settings.levels
        fine = np.geomspace(levels[0], levels[-1], 100)
        for method, look in ((MIXED, figures.LOOKS[0]), (STOCHASTIC, figures.LOOKS[1])):
            left.plot(fine, [_formula(method, number) for number in fine], color=look.color)
            points = figures.Look(look.color, look.marker, "")
            figures.band(left, levels, [self.toy(method, number) for number in levels], points, method)
        left.set_xscale("log", base=2)
        left.set(xlabel="distance between levels / learning rate", ylabel="correlation in time", title="toy: with and without rounding")
        for method, look in zip(self.settings.methods, figures.LOOKS, strict=False):
            found = [mean(self.correlations(method, rate, "gradients")) for rate in self.rates]
            shown = [(rate, interval) for rate, interval in zip(self.rates, found, strict=True) if not math.isnan(interval.value)]
            figures.band(right, [rate for rate, _ in shown], [interval.clipped(-1.0, 1.0) for _, interval in shown], look, method)
        self._rate_axis(right)
        right.set(ylabel="cosine with the step before", title="training: gradients")
        figures.legends(drawn, (left, right), columns=3)
        return drawn

    def claims(self) -> list[Claim]:
        """All claims."""
        return [self._higher(), self._larger(), self._better_beyond(), self._lower(), *self._toys(), self._decorrelates()]

    def _inside(self) -> bool:
        """Whether both methods' lowest losses are inside of the grid of rates, for every seed."""
        ends = {math.log2(self.rates[0]), math.log2(self.rates[-1])}
        return not ends & {*self.best(STOCHASTIC), *self.best(MIXED)}

    def _higher(self) -> Claim:
        ahead = difference(self.best(STOCHASTIC), self.best(MIXED))
        agrees = above(ahead) if self._inside() else None
        return self.claim("higher", agrees, times=exponential(ahead * math.log(2)), least=2**ahead.detects)

    def _larger(self) -> Claim:
        stochastic, mixed = self.stable(STOCHASTIC), self.stable(MIXED)
        # Rates are a factor of two apart, so methods with the same largest stable rate may still differ by less.
        agrees = True if stochastic > mixed else False if stochastic < mixed else None
        return self.claim("larger", agrees, stochastic=self._stable_rate(STOCHASTIC), mixed=self._stable_rate(MIXED))

    def _better_beyond(self) -> Claim:
        beyond = [rate for rate in self.rates if math.log2(rate) > max(self.best(MIXED))] or [self.rates[-1]]
        ahead = difference(*(np.mean([self.losses(method, rate) for rate in beyond], 0) for method in (STOCHASTIC, MIXED)))
        return self.claim("better beyond", below(ahead), ahead=ahead, count=len(beyond))

    def _lower(self) -> Claim:
        ahead = difference(self.lowest(STOCHASTIC), self.lowest(MIXED))
        return self.claim("lower", below(ahead) if self._inside() else None, ahead=ahead, perplexity=math.expm1(ahead.detects))

    def _toys(self) -> list[Claim]:
        levels = self.settings.levels
        exact, rounded = self.toy(MIXED, levels[0]), {number: self.toy(STOCHASTIC, number) for number in levels}
        formula = _formula(MIXED, levels[0])
        reduced = all(_near(found, _formula(STOCHASTIC, number)) and found.high < exact.low for number, found in rounded.items())
        shown = [
            f"levels {number:g} gradients apart: {found:.4f}, formula {_formula(STOCHASTIC, number):.4f}"
            for number, found in rounded.items()
        ]
        return [
            self.claim("exact", _near(exact, formula), exact=exact, formula=formula),
            self.claim("rounded", reduced, shown="; ".join(shown), least=max(found.detects for found in rounded.values())),
        ]

    def _decorrelates(self) -> Claim:
        def falls(what: str) -> Interval:
            stochastic, mixed = (np.array([self.correlations(method, rate, what) for rate in self.rates]) for method in (STOCHASTIC, MIXED))
            # Seeds are independent, rates are not.
            kept = [float(np.mean(own)) for seed in (stochastic - mixed).T if len(own := seed[np.isfinite(seed)])]
            return mean(kept) if kept else Interval(math.nan, -math.inf, math.inf, math.inf)

        gradients = falls("gradients")
        return self.claim("decorrelates", below(gradients), gradients=gradients, updates=falls("updates"))

    def meaning(self) -> str:
        """The ratio of the best rates, and the largest stable ones."""
        ahead = difference(self.best(STOCHASTIC), self.best(MIXED))
        stochastic, mixed = self._stable_rate(STOCHASTIC), self._stable_rate(MIXED)
        return self.text(
            "meaning",
            word={True: "Higher ones", False: "Lower ones", None: "No difference shows"}[above(ahead)],
            ratio=Interval(*(2**number for number in (ahead.value, ahead.low, ahead.high))),
            least=2**ahead.detects,
            stable=f"{stochastic} with both"
            if stochastic == mixed
            else f"{stochastic} with stochastic rounding and {mixed} in mixed precision",
        )


def _formula(method: str, levels: float) -> float:
    """The correlation of Proposition 1; `docs/derivations.md` derives it."""
    rounding = levels - 1.5 if method == STOCHASTIC else 0.0
    return 0.25 / (0.5 + rounding)


def _near(found: Interval, expected: float) -> bool:
    """Whether an estimate is compatible with a number: within twice its interval, which chance exceeds about once in a thousand times."""
    return abs(found.value - expected) <= found.high - found.low


def _lowest(x: np.ndarray, y: np.ndarray) -> float:
    """The position of the minimum of a parabola through the least value and its neighbours; at an end, that end."""
    at = int(np.argmin(y))
    if at in (0, len(y) - 1):
        return float(x[at])
    left, middle, right = y[at - 1 : at + 2]
    bend = left - 2 * middle + right
    return float(x[at] + (x[at + 1] - x[at]) * (0.5 * (left - right) / bend if bend else 0.0))


def _power(rate: float) -> str:
    power = math.log2(rate)
    return f"2^{power:.0f}" if power == round(power) else f"{rate:g}"
