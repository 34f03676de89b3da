"""What the study `gradient-variance` says: slopes and factors beside those of the lemmas."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from qsim.studies import _figures
from qsim.studies._report import Claim, Picture, Report, Table
from qsim.studies._statistics import Interval, mean, slope
from qsim.studies._study import Result
from qsim.studies.gradient_variance import BACKWARD, WEIGHTS, GradientVariance, Run, Settings, ends, middle, swept

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: How far from what the lemmas say a slope over the batch size, and a factor for a bit, may lie.
SLOPE, FACTOR = 0.05, 0.3


class Findings:
    """The results of a study, by what they belong to.

    Args:
        study: The study.
        settings: What was chosen.
        results: Of all runs.
    """

    def __init__(self, study: GradientVariance, settings: Settings, results: Sequence[Result[Run]]) -> None:
        self.study, self.settings = study, settings
        runs = ((result.run, result) for result in results)
        self._of = {(run.rounded, run.bits, run.rounding, run.batch, run.seed): result for run, result in runs}
        self._batch, self._swept, self._ends = middle(settings), swept(settings), ends(settings)

    def report(self) -> Report:
        """All of it."""
        parts = [self._setting(), self._bits(), self._slopes(), self._biases(), *self._pictures()]
        return Report(self.study, parts, self._claims(), self._meaning())

    def backward(self, what: str, mantissa: int, batch: int) -> list[float]:
        """One number of each seed, of the backward pass."""
        return [float(self._of[BACKWARD, mantissa, "stochastic", batch, seed][what]) for seed in range(self.settings.seeds)]

    def weights(self, what: str, fraction: int, rounding: str, batch: int) -> list[float]:
        """One number of each seed, of rounded weights."""
        return [float(self._of[WEIGHTS, fraction, rounding, batch, seed][what]) for seed in range(self.settings.seeds)]

    def slope_in_batch(self, what: str, mantissa: int) -> Interval:
        """The power of the batch size that a variance follows: least squares for each seed, then their mean."""
        batches = self.settings.batches
        columns = [self.backward(what, mantissa, batch) for batch in batches]
        if len(batches) == 2:
            reach = math.log(batches[1] / batches[0])
            return mean([math.log(last / first) / reach for first, last in zip(*columns, strict=True)])
        return mean([slope(batches, row).value for row in zip(*columns, strict=True)])

    def factor(self, fewer: int, more: int) -> Interval:
        """What one bit less multiplies the variance of rounding with, on average over the bits between two mantissas."""
        pairs = zip(*(self.backward("rounding", bits, self._batch) for bits in (fewer, more)), strict=True)
        return mean([(coarse / fine) ** (1 / (more - fewer)) for coarse, fine in pairs])

    def batch_factor(self, fewer: int, more: int) -> Interval:
        """How many times larger the batch must be with fewer bits, for gradients that vary as little in all."""
        totals = [
            [a + b for a, b in zip(*(self.backward(what, bits, self._batch) for what in ("rounding", "sampling")), strict=True)]
            for bits in (fewer, more)
        ]
        return mean([coarse / fine for coarse, fine in zip(*totals, strict=True)])

    def slope_of_bias(self, fraction: int, rounding: str) -> Interval:
        """The power of the batch size that the squared bias follows."""
        first, last = self._ends[0], self._ends[-1]
        pairs = zip(*(self.weights("squared_bias", fraction, rounding, batch) for batch in (first, last)), strict=True)
        return mean([math.log(b / a) / math.log(last / first) if a > 0 and b > 0 else math.nan for a, b in pairs])

    def share_of_bound(self, fraction: int, rounding: str) -> Interval:
        """The bias of rounded weights beside the bound."""
        bias, bound = (self.weights(what, fraction, rounding, self._batch) for what in ("squared_bias", "bound"))
        return mean([math.sqrt(max(square, 0.0)) / limit for square, limit in zip(bias, bound, strict=True)])

    def _setting(self) -> str:
        chosen = self.settings
        return (
            f"Nets for {chosen.data} are trained by {chosen.steps} steps of plain SGD, in full precision. Then the gradients of their last "
            f"layer are looked at, on {chosen.images} images in batches, drawn again and again; there are {chosen.seeds} seeds, each with a "
            "net and an order of its own. The last layer is the case that the lemmas are about: one product, whose operands' errors are "
            "those of rounding alone, and a loss that is a mean over the batch. Both operands of a product round stochastically to the same "
            "mantissa. Formats have 8 bits of exponent, so that all errors are relative and nothing underflows. The gradient of the layer's "
            "inputs is measured relative to its own square, so that the 1/b of the mean cancels. Weights are rounded in uniform steps, as "
            "Lemma 1 has it, the same in both passes. Intervals hold 95 %, over seeds."
        )

    def _bits(self) -> Table:
        rows = []
        bits = self.settings.mantissas
        for more, fewer in zip(bits[:0:-1], bits[-2::-1], strict=True):
            both, parts = (
                mean(self.backward("rounding", fewer, self._batch)),
                [mean(self.backward(f"rounding_of_{operand}", fewer, self._batch)) for operand in ("inputs", "gradients")],
            )
            product = both.value / (parts[0].value + parts[1].value) - 1
            cells = [f"{self.factor(fewer, more):.2f}", f"{self.batch_factor(fewer, more):.2f}", f"{product:+.1%}"]
            rows.append([f"{more} to {fewer}", *cells])
        return Table(
            f"What a bit less of mantissa multiplies, batches of {self._batch}",
            ["bits", "variance of rounding ∇W", "batch, for the same variance in all", "more than both operands alone"],
            rows,
        )

    def _slopes(self) -> Table:
        rows = [
            [str(bits), *(f"{self.slope_in_batch(what, bits):.3f}" for what in ("rounding", "inputs_gradient"))] for bits in self._swept
        ]
        return Table("Power of the batch size that the variance of rounding follows", ["bits of mantissa", "∇W", "∇A, relative"], rows)

    def _biases(self) -> Table:
        rows = []
        for fraction in self.settings.fractions:
            for rounding in ("nearest", "stochastic"):
                share = self.share_of_bound(fraction, rounding)
                relative = self._relative_bias(fraction, rounding)
                rows.append(
                    [f"2^-{fraction}", rounding, f"{relative:.2%}", f"{share:.2%}", f"{self.slope_of_bias(fraction, rounding):.3f}"]
                )
        return Table(
            "Bias of the gradient by rounded weights",
            ["step", "rounding", "beside the gradient's norm", "beside the bound B_W", "power of the batch size, squared"],
            rows,
        )

    def _relative_bias(self, fraction: int, rounding: str) -> Interval:
        squares = (self.weights(what, fraction, rounding, self._batch) for what in ("squared_bias", "squared_gradient"))
        return mean([math.sqrt(max(bias, 0.0) / gradient) for bias, gradient in zip(*squares, strict=True)])

    def _pictures(self) -> list[Picture]:
        return [
            Picture("batch", "Variance of rounding against batch size. Bars: 95 % over seeds. Dotted: what Lemma 3 says.", self._by_batch),
            Picture(
                "bits",
                f"Left: variance of rounding ∇W against mantissa bits, batches of {self._batch}; dotted, 4 times for each bit. Right: bias of "
                "the gradient by rounded weights; dashed, the bounds of Lemma 1. Bars: 95 % over seeds.",
                self._by_bits,
            ),
        ]

    def _by_batch(self) -> Figure:
        figure, axes = _figures.panels(1, 2)
        batches = self.settings.batches
        for panel, what, power in zip(axes, ("rounding", "inputs_gradient"), (-1, 0), strict=True):
            for bits, look in zip(self._swept, _figures.LOOKS, strict=False):
                found = [mean(self.backward(what, bits, batch)) for batch in batches]
                _figures.band(panel, batches, found, look, f"{bits} bits of mantissa")
                due = [found[0].value * (batch / batches[0]) ** power for batch in batches]
                panel.plot(batches, due, **_figures.REFERENCE())
            panel.set_xscale("log", base=2)
            panel.set_yscale("log")
            panel.set_xticks(batches, [str(batch) for batch in batches])
            panel.set_xlabel("batch size in images")
        axes[0].set_ylabel("variance of rounding ∇W")
        axes[1].set_ylabel("variance of rounding ∇A\n÷ its squared norm")
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
        return figure

    def _by_bits(self) -> Figure:
        figure, (left, right) = _figures.panels(1, 2)
        bits = self.settings.mantissas
        found = [mean(self.backward("rounding", own, self._batch)) for own in bits]
        _figures.band(left, bits, found, _figures.LOOKS[0])
        left.plot(bits, [found[0].value * 4.0 ** (bits[0] - own) for own in bits], **_figures.REFERENCE())
        left.set_xticks(bits)
        left.set_xlabel("mantissa in bits")
        left.set_ylabel("variance of rounding ∇W")
        steps = [2.0**-fraction for fraction in self.settings.fractions]
        for rounding, look in zip(("nearest", "stochastic"), _figures.LOOKS[1:], strict=False):
            norms = [
                [math.sqrt(max(x, 0.0)) for x in self.weights("squared_bias", own, rounding, self._batch)]
                for own in self.settings.fractions
            ]
            _figures.band(right, steps, [mean(own) for own in norms], look, rounding)
            bounds = [mean(self.weights("bound", own, rounding, self._batch)).value for own in self.settings.fractions]
            right.plot(steps, bounds, **look.dashed()(label=f"bound, {rounding}"))
        right.set_xscale("log", base=2)
        right.set_xlabel("step of the weights")
        right.set_ylabel("norm of the bias of ∇W")
        right.legend()
        for panel in (left, right):
            panel.set_yscale("log")
        return figure

    def _claims(self) -> list[Claim]:
        return [self._unbiased(), *self._falls(), *self._costs(), *self._stays(), self._batch_for_a_bit(), *self._of_weights()]

    def _unbiased(self) -> Claim:
        shares = [
            bias / (rounding + bias)
            for bits in self._swept
            for bias, rounding in zip(*(self.backward(what, bits, self._batch) for what in ("squared_bias", "rounding")), strict=True)
        ]
        found = mean(shares)
        return Claim(
            "Section 3.3, Lemma 2",
            "stochastic rounding on the way back leaves the gradient unbiased",
            f"squared bias beside the variance of rounding: {found:+.1%}",
            True if 0 in found and found.high < 0.05 else False if found.low > 0 else None,
        )

    def _falls(self) -> list[Claim]:
        found = {bits: self.slope_in_batch("rounding", bits) for bits in self._swept}
        return [
            Claim(
                "Lemma 3",
                "the variance that rounding adds to ∇W falls as 1/b",
                f"{bits} bits of mantissa: as b to the {power:.3f}",
                _within(power, -1 - SLOPE, -1 + SLOPE),
            )
            for bits, power in found.items()
        ]

    def _costs(self) -> list[Claim]:
        bits = self.settings.mantissas
        on_average, last = self.factor(bits[0], bits[-1]), self.factor(bits[0], bits[1])
        return [
            Claim(
                "Lemma 3",
                "it grows 4 times for each bit of mantissa that is taken away",
                f"from {bits[-1]} to {bits[0]} bits, each on average: {on_average:.2f} times",
                _within(on_average, 4 - FACTOR, 4 + FACTOR),
            ),
            Claim(
                "Lemma 3, the product of both errors",
                "4 times to leading order; with few bits the product of both operands' errors adds to it",
                f"from {bits[1]} to {bits[0]} bits: {last:.2f} times",
                _within(last, 4 - FACTOR, 4 + 2 * FACTOR),
            ),
        ]

    def _stays(self) -> list[Claim]:
        return [
            Claim(
                "Section 4.2",
                "the variance that rounding adds to ∇A does not depend on the batch size",
                f"{bits} bits of mantissa, relative to ∇A: as b to the {power:+.3f}",
                _within(power, -SLOPE, SLOPE),
            )
            for bits, power in ((bits, self.slope_in_batch("inputs_gradient", bits)) for bits in self._swept)
        ]

    def _batch_for_a_bit(self) -> Claim:
        bits = self.settings.mantissas
        found = self.batch_factor(bits[0], bits[1])
        return Claim(
            "Figure 4, Theorem 1",
            "a bit less is made up for by a batch at most 4 times as large, often less",
            f"from {bits[1]} to {bits[0]} bits, by the variance of sampling and rounding together: {found:.2f} times",
            True if found.high <= 4 else False if found.low > 4 else None,
        )

    def _of_weights(self) -> list[Claim]:
        claims = []
        for rounding, share in (("nearest", "half of 𝓛 √d Δ"), ("stochastic", "𝓛 √d Δ")):
            worst = max((self.share_of_bound(fraction, rounding) for fraction in self.settings.fractions), key=lambda found: found.high)
            claims.append(
                Claim(
                    "Lemma 1",
                    f"weights rounded {'to nearest' if rounding == 'nearest' else 'stochastically'} bias the gradient by no more than {share}",
                    f"at most {worst:.2%} of the bound",
                    True if worst.high <= 1 else False if worst.low > 1 else None,
                )
            )
        powers = {(f, r): self.slope_of_bias(f, r) for f in self.settings.fractions for r in ("nearest", "stochastic")}
        farthest = max(powers.values(), key=lambda found: abs(found.value))
        claims.append(
            Claim(
                "Section 4.1",
                "no batch removes that bias",
                f"its square follows b to the {farthest:+.3f} at most",
                _within(farthest, -SLOPE, SLOPE),
            )
        )
        return claims

    def _meaning(self) -> str:
        bits = self.settings.mantissas
        finest = self.settings.fractions[0]
        return (
            f"Rounding on the way back is noise, and a batch is what it averages over: it goes as b to the "
            f"{self.slope_in_batch('rounding', self._swept[-1]).value:.2f} and {self.factor(bits[0], bits[-1]).value:.2f} times up for each bit "
            f"that is taken away; rounding weights to steps of 2^-{finest} is a bias of "
            f"{self._relative_bias(finest, 'nearest').value:.0%} of the gradient, in batches of every size."
        )


def _within(found: Interval, low: float, high: float) -> bool | None:
    """Whether an interval lies inside of bounds; `None` if only a part of it does."""
    if low <= found.low and found.high <= high:
        return True
    return False if found.high < low or found.low > high else None
