"""The report of the study `gradient-variance`: measured slopes and factors compared with those of the lemmas."""

from __future__ import annotations

from itertools import product

import numpy as np
from matplotlib.figure import Figure

from qsim.plot import figures
from qsim.studies.gradient_variance.findings import VarianceFindings
from qsim.studies.learners.images import described
from qsim.studies.report import Picture
from qsim.studies.statistics import geometric, mean
from qsim.text.tables import Table


class Written(VarianceFindings):
    """The report."""

    def parts(self) -> list[str | Table | Picture]:
        """The setting, figures and tables."""
        return [
            self.text("setting", learner=described(self.settings.data)),
            self.picture("batch", self._by_batch),
            self.picture("bits", self._by_bits),
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

    def _by_batch(self) -> list[Figure]:
        """The variances of both gradients against the batch size, and the lemmas' predictions."""
        drawn, axes = figures.row(2)
        batches = self.settings.batches
        for panel, what, power in zip(axes, ("rounding", "inputs_gradient"), (-1, 0), strict=True):
            for bits, look in zip(self.swept, figures.LOOKS, strict=False):
                points = [geometric(self.backward(what, bits, batch)) for batch in batches]
                figures.band(panel, batches, points, look, f"mantissa of {bits} bits")
                due = [points[0].value * (batch / batches[0]) ** power for batch in batches]
                panel.plot(batches, due, **figures.REFERENCE(label="1/b, and constant" if bits == self.swept[-1] else None))
            figures.doubling_axis(panel, batches)
            panel.set(yscale="log", xlabel="batch size in images")
        axes[0].set_ylabel("variance of rounding ∇W")
        axes[1].set_ylabel("variance of rounding ∇A\n÷ its squared norm")
        figures.legends(drawn, axes, columns=2)
        return drawn

    def _by_bits(self) -> list[Figure]:
        """The variance against bits, and the bias of rounded weights against their step."""
        drawn, (left, right) = figures.row(2)
        bits, fractions = self.settings.mantissas, self.settings.fractions
        points = [geometric(self.backward("rounding", own)) for own in bits]
        figures.band(left, bits, points, figures.LOOKS[0], "measured")
        left.plot(bits, [points[0].value * 4.0 ** (bits[0] - own) for own in bits], **figures.REFERENCE(label="4 times per bit"))
        left.set_xticks(bits)
        left.set(xlabel="mantissa bits", ylabel="variance of rounding ∇W", yscale="log")
        steps = [2.0**-fraction for fraction in fractions]
        for rounding, look in zip(("nearest", "stochastic"), figures.LOOKS[1:], strict=False):
            norms = [geometric(np.maximum(self.weights("squared_bias", own, rounding), 1e-30) ** 0.5) for own in fractions]
            figures.band(right, steps, norms, look, rounding)
            bounds = [mean(self.weights("bound", own, rounding)).value for own in fractions]
            right.plot(steps, bounds, **look.dashed()(label=f"bound, {rounding}"))
        right.set_xscale("log", base=2)
        right.set(xlabel="step of the weights", ylabel="norm of the bias of ∇W", yscale="log")
        figures.legends(drawn, (left, right), columns=2)
        return drawn

    def meaning(self) -> str:
        """The noise of the backward pass, and the bias of rounded weights."""
        bits, fraction = self.settings.mantissas, self.settings.fractions[len(self.settings.fractions) // 2]
        power = self.slope_in_batch("rounding", self.swept[-1]).value
        factor, bias = self.factor(bits[0], bits[-1]).value, self.relative_bias(fraction, "nearest").value
        return self.text("meaning", power=power, factor=factor, bias=bias, fraction=fraction)
