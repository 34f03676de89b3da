"""The figures of the study `gradient-variance`."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure

from qsim.plot import figures
from qsim.studies.gradient_variance.findings import VarianceFindings
from qsim.studies.statistics import geometric, mean


def by_batch(found: VarianceFindings) -> list[Figure]:
    """The variances of both gradients against the batch size, and the lemmas' predictions."""
    drawn, axes = figures.row(2)
    batches = found.settings.batches
    for panel, what, power in zip(axes, ("rounding", "inputs_gradient"), (-1, 0), strict=True):
        for bits, look in zip(found.swept, figures.LOOKS, strict=False):
            points = [geometric(found.backward(what, bits, batch)) for batch in batches]
            figures.band(panel, batches, points, look, f"mantissa of {bits} bits")
            due = [points[0].value * (batch / batches[0]) ** power for batch in batches]
            panel.plot(batches, due, **figures.REFERENCE(label="1/b, and constant" if bits == found.swept[-1] else None))
        figures.doubling_axis(panel, batches)
        panel.set(yscale="log", xlabel="batch size in images")
    axes[0].set_ylabel("variance of rounding ∇W")
    axes[1].set_ylabel("variance of rounding ∇A\n÷ its squared norm")
    figures.legends(drawn, axes, columns=2)
    return drawn


def by_bits(found: VarianceFindings) -> list[Figure]:
    """The variance against bits, and the bias of rounded weights against their step."""
    drawn, (left, right) = figures.row(2)
    bits, fractions = found.settings.mantissas, found.settings.fractions
    points = [geometric(found.backward("rounding", own)) for own in bits]
    figures.band(left, bits, points, figures.LOOKS[0], "measured")
    left.plot(bits, [points[0].value * 4.0 ** (bits[0] - own) for own in bits], **figures.REFERENCE(label="4 times per bit"))
    left.set_xticks(bits)
    left.set(xlabel="mantissa bits", ylabel="variance of rounding ∇W", yscale="log")
    steps = [2.0**-fraction for fraction in fractions]
    for rounding, look in zip(("nearest", "stochastic"), figures.LOOKS[1:], strict=False):
        norms = [geometric(np.maximum(found.weights("squared_bias", own, rounding), 1e-30) ** 0.5) for own in fractions]
        figures.band(right, steps, norms, look, rounding)
        bounds = [mean(found.weights("bound", own, rounding)).value for own in fractions]
        right.plot(steps, bounds, **look.dashed()(label=f"bound, {rounding}"))
    right.set_xscale("log", base=2)
    right.set(xlabel="step of the weights", ylabel="norm of the bias of ∇W", yscale="log")
    figures.legends(drawn, (left, right), columns=2)
    return drawn
