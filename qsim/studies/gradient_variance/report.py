"""The report of the study `gradient-variance`: measured slopes and factors compared with those of the lemmas."""

from __future__ import annotations

from functools import partial

from qsim.studies.gradient_variance import GradientVarianceStudy, figures
from qsim.studies.gradient_variance.claims import claims
from qsim.studies.gradient_variance.findings import Findings
from qsim.studies.learners.images import described
from qsim.studies.report import Picture, Report
from qsim.studies.statistics import confidence_text, describe_bars
from qsim.text.tables import Table


class ReportWriter:
    """Write the report.

    Args:
        study: The study.
        found: The findings from its runs.
    """

    def __init__(self, study: GradientVarianceStudy, found: Findings) -> None:
        self._study, self._found, self._settings = study, found, found.settings

    def report(self) -> Report:
        """The complete report."""
        parts: list[str | Table | Picture] = [
            self._setting(),
            *self._pictures(),
            self._bits(),
            self._unbiased(),
            self._slopes(),
            self._biases(),
        ]
        return Report(self._study, parts, claims(self._found), self._meaning())

    def _setting(self) -> str:
        chosen = self._settings
        return (
            f"{described(chosen.data)}, in {chosen.steps} steps of plain SGD, in full precision. Then the gradients of its "
            f"last layer are measured on {chosen.images} images in batches, drawn repeatedly; there are {chosen.seeds} seeds, each with "
            "its own net and order. The last layer is the case that the lemmas cover: one product, whose operands have rounding errors "
            "only, and a loss that is a mean over the batch. Both operands of a product round stochastically to the same mantissa. "
            "Formats have 7 exponent bits, so that all errors are relative and nothing underflows. The gradient of the layer's inputs "
            "is measured relative to its own square, so that the 1/b of the mean cancels. Weights are rounded in uniform steps, as in "
            f"Lemma 1, the same in both passes. Intervals are {confidence_text()}, over seeds."
        )

    def _bits(self) -> Table:
        bits, found = self._settings.mantissas, self._found
        rows = []
        for more, fewer in zip(bits[:0:-1], bits[-2::-1], strict=True):
            factors = [f"{factor(fewer, more):.2f}" for factor in (found.factor, found.batch_factor)]
            rows.append([f"{more} to {fewer}", *factors, f"{found.product(fewer):+.1%}"])
        titles = ["bits", "variance of rounding ∇W", "batch, for the same total variance", "excess over the operands one at a time"]
        return Table.of(f"Factors for one mantissa bit less, batches of {found.batch}", titles, rows)

    def _unbiased(self) -> Table:
        rows = [
            [str(bits), *(f"{self._found.squared_bias(bits, rounding):+.2%}" for rounding in ("stochastic", "nearest"))]
            for bits in self._settings.mantissas
        ]
        title = f"Squared bias of ∇W from the backward pass, relative to its squared norm, batches of {self._found.batch}"
        return Table.of(title, ["mantissa bits", "stochastic", "nearest"], rows)

    def _slopes(self) -> Table:
        of_both = ("rounding", "inputs_gradient")
        rows = [[str(bits), *(f"{self._found.slope_in_batch(what, bits):.3f}" for what in of_both)] for bits in self._found.swept]
        return Table.of("Power of the batch size with which the variance of rounding scales", ["mantissa bits", "∇W", "∇A, relative"], rows)

    def _biases(self) -> Table:
        rows = []
        for fraction in self._settings.fractions:
            for rounding in ("nearest", "stochastic"):
                share = self._found.share_of_bound(fraction, rounding)
                relative = self._found.relative_bias(fraction, rounding)
                rows.append(
                    [f"2^-{fraction}", rounding, f"{relative:.2%}", f"{share:.2%}", f"{self._found.slope_of_bias(fraction, rounding):.3f}"]
                )
        return Table.of(
            "Bias of the gradient from rounded weights",
            ["step", "rounding", "relative to the gradient's norm", "relative to the bound B_W", "power of the batch size for its square"],
            rows,
        )

    def _pictures(self) -> list[Picture]:
        by_batch = f"Variance of rounding against batch size. {describe_bars()} Dotted: the paper's prediction."
        by_bits = (
            f"First: variance of rounding ∇W against mantissa bits, batches of {self._found.batch}. Second: bias of the gradient from "
            f"rounded weights; dashed, the bounds of Lemma 1. {describe_bars()}"
        )
        return [
            Picture("batch", by_batch, partial(figures.by_batch, self._found)),
            Picture("bits", by_bits, partial(figures.by_bits, self._found)),
        ]

    def _meaning(self) -> str:
        bits, fraction = self._settings.mantissas, self._settings.fractions[len(self._settings.fractions) // 2]
        power = self._found.slope_in_batch("rounding", self._found.swept[-1]).value
        factor, bias = self._found.factor(bits[0], bits[-1]).value, self._found.relative_bias(fraction, "nearest").value
        return (
            "Stochastic rounding in the backward pass adds noise, which larger batches average out; rounding of weights adds a bias, which "
            f"they do not. The variance of the noise in ∇W scales with the batch size to the {power:.2f}, and grows {factor:.2f} times for "
            f"each mantissa bit that is removed. The bias is {bias:.0%} of the gradient at every batch size if weights are rounded to "
            f"nearest in steps of 2^-{fraction}."
        )
