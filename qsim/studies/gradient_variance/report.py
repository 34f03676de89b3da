"""The report of the study `gradient-variance`: measured slopes and factors compared with those of the lemmas."""

from __future__ import annotations

from functools import partial
from itertools import product

from qsim.studies.gradient_variance import figures
from qsim.studies.gradient_variance.findings import VarianceFindings
from qsim.studies.learners.images import described
from qsim.studies.report import Picture
from qsim.text.tables import Table


class Written(VarianceFindings):
    """The report."""

    def parts(self) -> list[str | Table | Picture]:
        """The setting, figures and tables."""
        return [
            self.text("setting", learner=described(self.settings.data)),
            self.picture("batch", partial(figures.by_batch, self)),
            self.picture("bits", partial(figures.by_bits, self)),
            self._bits(),
            self._unbiased(),
            self._slopes(),
            self._biases(),
        ]

    def _bits(self) -> Table:
        bits = self.settings.mantissas
        rows = []
        for more, fewer in zip(bits[:0:-1], bits[-2::-1], strict=True):
            factors = [f"{factor(fewer, more):.2f}" for factor in (self.factor, self.batch_factor)]
            rows.append([f"{more} to {fewer}", *factors, f"{self.product(fewer):+.1%}"])
        titles = ["bits", "variance of rounding ∇W", "batch, for the same total variance", "excess over the operands one at a time"]
        return Table.of(f"Factors for one mantissa bit less, batches of {self.batch}", titles, rows)

    def _unbiased(self) -> Table:
        rows = [
            [str(bits), *(f"{self.squared_bias(bits, rounding):+.2%}" for rounding in ("stochastic", "nearest"))]
            for bits in self.settings.mantissas
        ]
        title = f"Squared bias of ∇W from the backward pass, relative to its squared norm, batches of {self.batch}"
        return Table.of(title, ["mantissa bits", "stochastic", "nearest"], rows)

    def _slopes(self) -> Table:
        of_both = ("rounding", "inputs_gradient")
        rows = [[str(bits), *(f"{self.slope_in_batch(what, bits):.3f}" for what in of_both)] for bits in self.swept]
        return Table.of("Power of the batch size with which the variance of rounding scales", ["mantissa bits", "∇W", "∇A, relative"], rows)

    def _biases(self) -> Table:
        rows = [
            [
                f"2^-{fraction}",
                rounding,
                f"{self.relative_bias(fraction, rounding):.2%}",
                f"{self.share_of_bound(fraction, rounding):.2%}",
                f"{self.slope_of_bias(fraction, rounding):.3f}",
            ]
            for fraction, rounding in product(self.settings.fractions, ("nearest", "stochastic"))
        ]
        return Table.of(
            "Bias of the gradient from rounded weights",
            ["step", "rounding", "relative to the gradient's norm", "relative to the bound B_W", "power of the batch size for its square"],
            rows,
        )

    def meaning(self) -> str:
        """The noise of the backward pass, and the bias of rounded weights."""
        bits, fraction = self.settings.mantissas, self.settings.fractions[len(self.settings.fractions) // 2]
        power = self.slope_in_batch("rounding", self.swept[-1]).value
        factor, bias = self.factor(bits[0], bits[-1]).value, self.relative_bias(fraction, "nearest").value
        return self.text("meaning", power=power, factor=factor, bias=bias, fraction=fraction)
