"""The verdicts of the study `gradient-variance`; `wording/gradient-variance.ini` has the claims, their tests and rules."""

from __future__ import annotations

import math

from qsim.studies.gradient_variance.findings import VarianceFindings
from qsim.studies.report import Claim
from qsim.studies.statistics import Interval, above, within

#: How far a power may deviate from the lemmas'.
_OFF = 0.1
#: A squared bias below this share of that of nearest counts as none.
_SMALL = 0.1


def claims(found: VarianceFindings) -> list[Claim]:
    """All claims, in the order of the paper."""
    powers = {what: {bits: found.slope_in_batch(what, bits) for bits in found.swept} for what in ("rounding", "inputs_gradient")}
    return [
        *_biases(found),
        *_of_weights(found),
        *(_power(found, "falls", power, -1, bits=bits) for bits, power in powers["rounding"].items()),
        *_costs(found),
        *(_power(found, "stays", power, 0, bits=bits) for bits, power in powers["inputs_gradient"].items()),
        _batch_for_a_bit(found),
    ]


def _biases(found: VarianceFindings) -> list[Claim]:
    stochastic, nearest = (found.squared_bias(found.fewest, rounding) for rounding in ("stochastic", "nearest"))
    margin, agrees = _SMALL * nearest.value, None
    if above(nearest):
        agrees = within(stochastic, -margin, margin) if 0 in stochastic else False
    return [
        found.claim("biased", above(nearest), bias=nearest, least=_norm(nearest)),
        found.claim("unbiased", agrees, stochastic=stochastic, nearest=nearest, small=_SMALL, least=_norm(stochastic)),
    ]


def _norm(squared: Interval) -> float:
    """The smallest bias that shows, in percent of the gradient's norm, from the smallest square that does."""
    return 100 * math.sqrt(squared.detects)


def _power(found: VarianceFindings, name: str, power: Interval, expected: float, **values: int) -> Claim:
    batches = found.settings.batches
    change = (batches[-1] / batches[0]) ** _OFF
    agrees = within(power, expected - _OFF, expected + _OFF)
    return found.claim(name, agrees, power=power, change=change, bit=math.log(change, 4), **values)


def _costs(found: VarianceFindings) -> list[Claim]:
    first, second, *_ = bits = found.settings.mantissas
    on_average, last = found.bits(first, bits[-1]), found.bits(first, second)
    averaged = {"last": bits[-1], "factor": found.factor(first, bits[-1]), "found_bits": on_average}
    of_last = {"factor": found.factor(first, second), "product": found.product(first), "found_bits": last}
    return [
        found.claim("grows", within(on_average, 1 - _OFF, 1 + _OFF), **averaged),
        found.claim("last bit", within(last, 1 - _OFF, 1 + _OFF), **of_last),
    ]


def _batch_for_a_bit(found: VarianceFindings) -> Claim:
    factor = found.batch_factor(*found.settings.mantissas[:2])
    return found.claim("a bit", True if factor.high <= 4 else False if factor.low > 4 else None, factor=factor)


def _of_weights(found: VarianceFindings) -> list[Claim]:
    drawn = []
    for rounding, how, bound in (("nearest", "to nearest", "B_W = L √d Δ / 2"), ("stochastic", "stochastically", "B_W = L √d Δ")):
        worst = max((found.share_of_bound(fraction, rounding) for fraction in found.settings.fractions), key=lambda share: share.high)
        agrees = True if worst.high <= 1 else False if worst.low > 1 else None
        drawn.append(found.claim("bound", agrees, how=how, bound=bound, worst=worst))
    powers = [found.slope_of_bias(f, r) for f in found.settings.fractions for r in ("nearest", "stochastic")]
    return [*drawn, _power(found, "no batch", max(powers, key=lambda power: abs(power.value)), 0)]
