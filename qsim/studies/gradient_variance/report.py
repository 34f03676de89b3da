"""The report of the study `gradient-variance`: measured slopes and factors compared with those of the lemmas."""

from __future__ import annotations

from functools import partial

from qsim.studies.gradient_variance import GradientVariance, figures
from qsim.studies.gradient_variance.findings import Findings
from qsim.studies.report import Claim, Picture, Report, Table
from qsim.studies.statistics import Interval

#: How far measured slopes over the batch size, and factors per bit, may deviate from the lemmas.
SLOPE, FACTOR = 0.05, 0.3


class Writer:
    """Write the report.

    Args:
        study: The study.
        found: The findings from its runs.
    """

    def __init__(self, study: GradientVariance, found: Findings) -> None:
        self._study, self._found, self._settings = study, found, found.settings

    def report(self) -> Report:
        """The complete report."""
        parts: list[str | Table | Picture] = [self._setting(), self._bits(), self._slopes(), self._biases(), *self._pictures()]
        return Report(self._study, parts, self._claims(), self._meaning())

    def _setting(self) -> str:
        chosen = self._settings
        return (
            f"Nets for {chosen.data} are trained for {chosen.steps} steps of plain SGD, in full precision. Then the gradients of their "
            f"last layer are measured on {chosen.images} images in batches, drawn repeatedly; there are {chosen.seeds} seeds, each with "
            "its own net and order. The last layer is the case that the lemmas cover: one product, whose operands have rounding errors "
            "only, and a loss that is a mean over the batch. Both operands of a product round stochastically to the same mantissa. "
            "Formats have 7 exponent bits, so that all errors are relative and nothing underflows. The gradient of the layer's inputs "
            "is measured relative to its own square, so that the 1/b of the mean cancels. Weights are rounded in uniform steps, as in "
            "Lemma 1, the same in both passes. Intervals are 95 %, over seeds."
        )

    def _bits(self) -> Table:
        bits, found = self._settings.mantissas, self._found
        rows = []
        for more, fewer in zip(bits[:0:-1], bits[-2::-1], strict=True):
            factors = [f"{factor(fewer, more):.2f}" for factor in (found.factor, found.batch_factor)]
            rows.append([f"{more} to {fewer}", *factors, f"{found.product(fewer):+.1%}"])
        titles = ["bits", "variance of rounding ∇W", "batch, for the same total variance", "excess over the operands one at a time"]
        return Table(f"Factors for one mantissa bit less, batches of {found.batch}", titles, rows)

    def _slopes(self) -> Table:
        of_both = ("rounding", "inputs_gradient")
        rows = [[str(bits), *(f"{self._found.slope_in_batch(what, bits):.3f}" for what in of_both)] for bits in self._found.swept]
        return Table("Power of the batch size with which the variance of rounding scales", ["mantissa bits", "∇W", "∇A, relative"], rows)

    def _biases(self) -> Table:
        rows = []
        for fraction in self._settings.fractions:
            for rounding in ("nearest", "stochastic"):
                share = self._found.share_of_bound(fraction, rounding)
                relative = self._found.relative_bias(fraction, rounding)
                rows.append(
                    [f"2^-{fraction}", rounding, f"{relative:.2%}", f"{share:.2%}", f"{self._found.slope_of_bias(fraction, rounding):.3f}"]
                )
        return Table(
            "Bias of the gradient from rounded weights",
            ["step", "rounding", "relative to the gradient's norm", "relative to the bound B_W", "power of the batch size for its square"],
            rows,
        )

    def _pictures(self) -> list[Picture]:
        by_batch = "Variance of rounding against batch size. Bars: 95 % intervals over seeds. Dotted: the paper's prediction."
        by_bits = (
            f"Left: variance of rounding ∇W against mantissa bits, batches of {self._found.batch}. Right: bias of the gradient from "
            "rounded weights; dashed, the bounds of Lemma 1. Bars: 95 % intervals over seeds."
        )
        return [
            Picture("batch", by_batch, partial(figures.by_batch, self._found)),
            Picture("bits", by_bits, partial(figures.by_bits, self._found)),
        ]

    def _claims(self) -> list[Claim]:
        return [self._unbiased(), *self._falls(), *self._costs(), *self._stays(), self._batch_for_a_bit(), *self._of_weights()]

    def _unbiased(self) -> Claim:
        found = self._found.bias_beside_noise()
        return Claim(
            "Section 3.3, Lemma 2",
            "stochastic rounding in the backward pass leaves the gradient unbiased",
            f"squared bias relative to the variance of rounding: {found:+.1%}",
            True if 0 in found and found.high < 0.05 else False if found.low > 0 else None,
        )

    def _falls(self) -> list[Claim]:
        found = {bits: self._found.slope_in_batch("rounding", bits) for bits in self._found.swept}
        return [
            Claim(
                "Lemma 3",
                "the variance that rounding adds to ∇W falls as 1/b",
                f"{bits} mantissa bits: as b^{power:.3f}",
                _within(power, -1 - SLOPE, -1 + SLOPE),
            )
            for bits, power in found.items()
        ]

    def _costs(self) -> list[Claim]:
        bits = self._settings.mantissas
        on_average, last = self._found.factor(bits[0], bits[-1]), self._found.factor(bits[0], bits[1])
        return [
            Claim(
                "Lemma 3",
                "it grows 4 times for each mantissa bit that is removed",
                f"from {bits[-1]} to {bits[0]} bits: {on_average:.2f} times per bit on average",
                _within(on_average, 4 - FACTOR, 4 + FACTOR),
            ),
            Claim(
                "Lemma 3, the product of both errors",
                "4 times to leading order; with few bits the product of both operands' errors adds to it",
                f"from {bits[1]} to {bits[0]} bits: {last:.2f} times; the product adds {self._found.product(bits[0]):.1%}",
                _within(last, 4 - FACTOR, 4 + 2 * FACTOR),
            ),
        ]

    def _stays(self) -> list[Claim]:
        return [
            Claim(
                "Section 4.2",
                "the variance that rounding adds to ∇A does not depend on the batch size",
                f"{bits} mantissa bits, relative to ∇A: as b^{power:+.3f}",
                _within(power, -SLOPE, SLOPE),
            )
            for bits, power in ((bits, self._found.slope_in_batch("inputs_gradient", bits)) for bits in self._found.swept)
        ]

    def _batch_for_a_bit(self) -> Claim:
        bits = self._settings.mantissas
        found = self._found.batch_factor(bits[0], bits[1])
        return Claim(
            "Figure 4, Theorem 1",
            "a batch at most 4 times as large, often less, compensates for one bit less",
            f"from {bits[1]} to {bits[0]} bits, by the variance of sampling and rounding together: {found:.2f} times",
            True if found.high <= 4 else False if found.low > 4 else None,
        )

    def _of_weights(self) -> list[Claim]:
        claims = []
        for rounding, how, bound in (("nearest", "to nearest", "B_W = L √d Δ / 2"), ("stochastic", "stochastically", "B_W = L √d Δ")):
            worst = max(
                (self._found.share_of_bound(fraction, rounding) for fraction in self._settings.fractions), key=lambda found: found.high
            )
            claims.append(
                Claim(
                    "Lemma 1",
                    f"weights that are rounded {how} bias the gradient by at most {bound}",
                    f"at most {worst:.2%} of the bound",
                    True if worst.high <= 1 else False if worst.low > 1 else None,
                )
            )
        powers = {(f, r): self._found.slope_of_bias(f, r) for f in self._settings.fractions for r in ("nearest", "stochastic")}
        farthest = max(powers.values(), key=lambda found: abs(found.value))
        claims.append(
            Claim(
                "Section 4.1",
                "no batch size removes that bias",
                f"its square scales at most as b^{farthest:+.3f}",
                _within(farthest, -SLOPE, SLOPE),
            )
        )
        return claims

    def _meaning(self) -> str:
        bits, fraction = self._settings.mantissas, self._settings.fractions[len(self._settings.fractions) // 2]
        power = self._found.slope_in_batch("rounding", self._found.swept[-1]).value
        factor, bias = self._found.factor(bits[0], bits[-1]).value, self._found.relative_bias(fraction, "nearest").value
        return (
            f"Rounding in the backward pass adds noise, which larger batches average out: its variance in ∇W scales as b^{power:.2f}, "
            f"and grows {factor:.2f} times for each bit removed; rounding weights to nearest, in steps of 2^-{fraction}, adds "
            f"a bias of {bias:.0%} of the gradient at every batch size."
        )


def _within(found: Interval, low: float, high: float) -> bool | None:
    """Whether an interval is inside bounds; `None` if only a part of it is."""
    if low <= found.low and found.high <= high:
        return True
    return False if found.high < low or found.low > high else None
