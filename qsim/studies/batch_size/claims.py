"""The verdicts of the study `batch-size`; `wording/batch-size.ini` has the claims, their tests and rules."""

from __future__ import annotations

from itertools import pairwise

from qsim.studies.batch_size import FULL, IMAGES, IN_RANGE, PLAIN
from qsim.studies.batch_size.findings import SCALES, BatchFindings
from qsim.studies.report import Claim
from qsim.studies.statistics import above, below, both, difference, exponential, mean, within

#: Accuracies that differ by at most this count as equal: about what the choice of a thousand test images changes.
_SAME = 0.01


def claims(found: BatchFindings) -> list[Claim]:
    """All claims, in the order of the paper."""
    designs = [(design, scale) for design in found.settings.designs for scale in SCALES]
    return [
        *((_gains_share(found, scale) if design == IMAGES else _gains(found, design, scale)) for design, scale in designs),
        *(found.claim("fails", below(found.learnt(scale), 0.5), scale=SCALES[scale], learnt=found.learnt(scale)) for scale in SCALES),
        *(_batch_for_a_bit(found, coarse, fine) for coarse, fine in pairwise(found.settings.formats)),
        *(_degradation(found, "nearest", design, scale) for design, scale in designs),
        *(_degradation(found, "stochastic", design, scale) for design, scale in designs),
        *([_accumulates(found)] if found.settings.micro_batches > 1 else []),
        *(_outperforms(found, scale) for scale in SCALES),
    ]


def _gains(found: BatchFindings, design: str, scale: str) -> Claim:
    own, full = (mean(found.gain(name, "stochastic", scale, design)) for name in (found.coarse, FULL))
    beyond = found.beyond("stochastic", scale, design)
    return found.claim("gains", both(above(own), above(beyond)), how=found.how(design, scale), own=own, full=full, beyond=beyond)


def _gains_share(found: BatchFindings, scale: str) -> Claim:
    least, most = (found.shares("stochastic", batch, scale, IMAGES) for batch in (found.least, found.most))
    gain = difference(most, least)
    ends = {"least": mean(least).value, "most": mean(most).value}
    return found.claim("gains share", above(gain), how=found.how(IMAGES, scale), gain=gain, **ends)


def _batch_for_a_bit(found: BatchFindings, coarse: str, fine: str) -> Claim:
    factors = {scale: found.factor(coarse, fine, scale) for scale in SCALES}
    # If gradients vary less in fewer bits, they were cut off; that says nothing about rounding.
    agrees = True if all(each.low >= 1 and each.high < 4 for each in factors.values()) else None
    if any(each.low > 4 for each in factors.values()):
        agrees = False
    shown = "; ".join(f"{SCALES[scale]}: {factor:.2f} times" for scale, factor in factors.items())
    detects = max(factor.detects for factor in factors.values())
    return found.claim("a bit", agrees, coarse=coarse, fine=fine, factors=shown, detects=detects)


def _degradation(found: BatchFindings, rounding: str, design: str, scale: str) -> Claim:
    """Whether the gradient grows with the batch with round-to-nearest, or falls with stochastic rounding."""
    nearest, how = rounding == "nearest", found.how(design, scale)
    if nearest and not above(found.learnt(scale)):
        return found.claim(rounding, None, how=how, shown=found.text("untrained"), least="none: the net learns nothing")
    slope, converges = found.slope(rounding, scale, design), found.converges(design)
    doubt = "" if converges else "; in full precision, the norm does not follow the test loss"
    shown = found.text("gradient", slope=exponential(slope), doubt=doubt)
    least = f"a factor of {exponential(slope).detects:.2f} per doubling{'' if converges else ', if the norm followed the loss'}"
    agrees = (above if nearest else below)(slope) if converges else None
    return found.claim(rounding, agrees, how=how, shown=shown, least=least)


def _accumulates(found: BatchFindings) -> Claim:
    parts = (1, found.settings.micro_batches)
    whole, summed = (found.seeds("accuracy", found.coarse, "stochastic", found.most, IN_RANGE, micro_batches=count) for count in parts)
    ahead = difference(summed, whole)
    return found.claim("accumulates", within(ahead, -_SAME, _SAME), ahead=ahead, same=100 * _SAME)


def _outperforms(found: BatchFindings, scale: str) -> Claim:
    ahead, underflow = found.ahead(scale), ", where gradients underflow" * (scale == PLAIN)
    return found.claim("outperforms", above(ahead), ahead=ahead, scale=SCALES[scale], underflow=underflow)
