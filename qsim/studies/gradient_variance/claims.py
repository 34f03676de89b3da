"""The claims that the study `gradient-variance` grades, each with the quantity that tests it, the rule and what it could have found."""

from __future__ import annotations

import math

from qsim.studies.gradient_variance.findings import Findings
from qsim.studies.report import Claim
from qsim.studies.statistics import Interval, above, within

#: How far a power may deviate from the lemmas'.
_OFF = 0.1
#: A squared bias below this share of that of nearest counts as none.
_SMALL = 0.1
_POWER = "yes if the interval is within 0.1 of it: over the measured batch sizes that is a factor of {:.2g}, {:.2g} of one bit"
_BITS = "yes if the interval is within a tenth of one bit: formats differ by whole bits, so that less changes no choice"


def claims(found: Findings) -> list[Claim]:
    """All claims, in the order of the paper."""
    return [_biased(found), _unbiased(found), *_of_weights(found), *_falls(found), *_costs(found), *_stays(found), _batch_for_a_bit(found)]


def _biased(found: Findings) -> Claim:
    bits = found.swept[0]
    bias = found.squared_bias(bits, "nearest")
    return Claim(
        "Section 3.1, Equation 4",
        "deterministic rounding biases the gradient",
        f"{bits} mantissa bits: a squared bias of {bias:.2%} of the squared gradient",
        above(bias),
        test="squared norm of the mean difference from the exact gradient, over batches, relative to the squared gradient",
        rule="the sign of the interval: the estimate is unbiased, so that it is below zero as often as above if there is no bias",
        power=_norm(bias),
    )


def _unbiased(found: Findings) -> Claim:
    bits = found.swept[0]
    stochastic, nearest = (found.squared_bias(bits, rounding) for rounding in ("stochastic", "nearest"))
    margin, agrees = _SMALL * nearest.value, None
    if above(nearest):
        agrees = within(stochastic, -margin, margin) if 0 in stochastic else False
    return Claim(
        "Section 3.3, Equation 6",
        "stochastic rounding in the backward pass leaves the gradient unbiased",
        f"{bits} mantissa bits: {stochastic:+.2%} of the squared gradient, with nearest {nearest:.2%}",
        agrees,
        test="the same for stochastic rounding",
        rule=f"yes if its interval contains zero and nothing beyond {_SMALL:.0%} of the bias of nearest, so that a bias of that size "
        "would have been found; no if it excludes zero",
        power=_norm(stochastic),
    )


def _norm(squared: Interval) -> str:
    """The smallest bias that shows, relative to the gradient, from the smallest square that does."""
    return f"a bias of {100 * math.sqrt(squared.detects):.1f} % of the gradient's norm"


def _rule(found: Findings) -> str:
    batches = found.settings.batches
    change = (batches[-1] / batches[0]) ** _OFF
    return _POWER.format(change, math.log(change, 4))


def _falls(found: Findings) -> list[Claim]:
    powers = {bits: found.slope_in_batch("rounding", bits) for bits in found.swept}
    return [
        Claim(
            "Lemma 3",
            "the variance that rounding adds to ∇W falls as 1/b",
            f"{bits} mantissa bits: as b^{power:.3f}",
            within(power, -1 - _OFF, -1 + _OFF),
            test="power of the batch size with which the variance over draws scales",
            rule=_rule(found),
            power=f"{power.detects:.3f} in the power",
        )
        for bits, power in powers.items()
    ]


def _costs(found: Findings) -> list[Claim]:
    bits = found.settings.mantissas
    on_average, last = found.bits(bits[0], bits[-1]), found.bits(bits[0], bits[1])
    factor = found.factor(bits[0], bits[1])
    return [
        Claim(
            "Lemma 3",
            "it grows 4 times for each mantissa bit that is removed",
            f"from {bits[-1]} to {bits[0]} bits: {found.factor(bits[0], bits[-1]):.2f} times per bit",
            within(on_average, 1 - _OFF, 1 + _OFF),
            test="ratio of the variances, as a logarithm to base 4: 1 for each bit",
            rule=_BITS,
            power=f"{on_average.detects:.3f} bits per bit",
        ),
        Claim(
            "Lemma 3, Equation 16",
            "4 times also for the last bit, where the product of both operands' errors adds to it",
            f"from {bits[1]} to {bits[0]} bits: {factor:.2f} times; the product adds {found.product(bits[0]):.1%}",
            within(last, 1 - _OFF, 1 + _OFF),
            test="the same, from one mantissa bit to none",
            rule=_BITS,
            power=f"{last.detects:.3f} bits",
        ),
    ]


def _stays(found: Findings) -> list[Claim]:
    return [
        Claim(
            "Section 4.2",
            "the variance that rounding adds to ∇A is independent of the batch size",
            f"{bits} mantissa bits: as b^{power:+.3f}",
            within(power, -_OFF, _OFF),
            test="power of the batch size with which the variance of ∇A scales, relative to its square, where the 1/b of the mean cancels",
            rule=_rule(found),
            power=f"{power.detects:.3f} in the power",
        )
        for bits, power in ((bits, found.slope_in_batch("inputs_gradient", bits)) for bits in found.swept)
    ]


def _batch_for_a_bit(found: Findings) -> Claim:
    bits = found.settings.mantissas
    factor = found.batch_factor(bits[0], bits[1])
    return Claim(
        "Figure 4",
        "a batch at most 4 times as large guarantees the same variance with one bit less",
        f"from {bits[1]} to {bits[0]} bits: {factor:.2f} times",
        True if factor.high <= 4 else False if factor.low > 4 else None,
        test="ratio of the variances of sampling and rounding together",
        rule="yes if the interval is below 4, the claimed limit: an example can break a guarantee, but not prove it",
        power=f"{factor.detects:.2f} in the factor",
    )


def _of_weights(found: Findings) -> list[Claim]:
    drawn = []
    for rounding, how, bound in (("nearest", "to nearest", "B_W = L √d Δ / 2"), ("stochastic", "stochastically", "B_W = L √d Δ")):
        worst = max((found.share_of_bound(fraction, rounding) for fraction in found.settings.fractions), key=lambda share: share.high)
        drawn.append(
            Claim(
                "Lemma 1",
                f"weights that are rounded {how} bias the gradient by at most {bound}",
                f"at most {worst:.2%} of the bound",
                True if worst.high <= 1 else False if worst.low > 1 else None,
                test="norm of the gradient's bias, relative to the bound with the smoothness of this layer",
                rule="no if it is above the bound, yes if not: a bound can be broken but not confirmed, and this one is far off here",
                power="any excess over the bound",
            )
        )
    powers = [found.slope_of_bias(f, r) for f in found.settings.fractions for r in ("nearest", "stochastic")]
    farthest = max(powers, key=lambda power: abs(power.value))
    removed = Claim(
        "Section 4.1",
        "no batch size reduces that bias",
        f"its square scales at most as b^{farthest:+.3f}",
        within(farthest, -_OFF, _OFF),
        test="power of the batch size with which the squared bias scales, the largest of all steps and roundings",
        rule=_rule(found),
        power=f"{farthest.detects:.3f} in the power",
    )
    return [*drawn, removed]
