"""The claims that the study `batch-size` grades, each with the quantity that tests it, the rule and what it could have found."""

from __future__ import annotations

from itertools import pairwise

from qsim.studies.batch_size import FULL, IMAGES, IN_RANGE, PLAIN
from qsim.studies.batch_size.findings import SCALES, Findings
from qsim.studies.report import Claim
from qsim.studies.statistics import Interval, above, below, difference, exponential, in_points, mean, within

#: Accuracies that differ by at most this count as equal: about what the choice of a thousand test images changes.
_SAME = 0.01


def claims(found: Findings) -> list[Claim]:
    """All claims, in the order of the paper."""
    designs = [(design, scale) for design in found.settings.designs for scale in SCALES]
    return [
        *(_gains(found, design, scale) for design, scale in designs),
        *(_fails(found, scale) for scale in SCALES),
        *(_batch_for_a_bit(found, coarse, fine) for coarse, fine in pairwise(found.settings.formats)),
        *(_nearest_gains_nothing(found, design, scale) for design, scale in designs),
        *(_falls(found, design, scale) for design, scale in designs),
        *([_accumulates(found)] if found.settings.micro_batches > 1 else []),
        *(_outperforms(found, scale) for scale in SCALES),
    ]


def _span(found: Findings) -> str:
    return f"{found.coarse}, {found.least} to {found.most} {found.unit}"


def _how(found: Findings, design: str, scale: str) -> str:
    return f"{found.equal[design]}, {SCALES[scale]}"


def _gains(found: Findings, design: str, scale: str) -> Claim:
    if design == IMAGES:
        return _gains_share(found, scale)
    own, full = (mean(found.gain(name, "stochastic", scale, design)) for name in (found.coarse, FULL))
    beyond = found.beyond("stochastic", scale, design)
    parts = above(own), above(beyond)
    return Claim(
        "Figure 1",
        f"stochastic rounding achieves higher accuracy with larger batches ({_how(found, design, scale)})",
        f"{_span(found)}: {in_points(own)} points, in full precision {in_points(full)}; {in_points(beyond)} beyond full precision",
        False if False in parts else None if None in parts else True,
        test="gain in accuracy from the smallest to the largest batch, on its own and minus that of full precision, which has a gain, too",
        rule="yes if both intervals are above 0, no if one is below: without the second, rounding has no part in the gain",
        power=f"{100 * own.detects:.1f} and {100 * beyond.detects:.1f} points",
    )


def _gains_share(found: Findings, scale: str) -> Claim:
    least, most = (found.shares("stochastic", batch, scale, IMAGES) for batch in (found.least, found.most))
    gain = difference(most, least)
    return Claim(
        "Figure 1",
        f"relative to full precision, stochastic rounding gains accuracy with larger batches ({_how(found, IMAGES, scale)})",
        f"{_span(found)}: from {mean(least).value:.1%} to {mean(most).value:.1%} of what full precision learns, {in_points(gain)} points",
        above(gain),
        test="accuracy, 0 % being that of guessing and 100 % that of full precision with the same batch: its gain from the smallest to the "
        "largest batch",
        rule="the sign of the interval: larger batches have fewer updates here and learn less in every precision, and a net that has "
        "learnt less has less to lose",
        power=f"{100 * gain.detects:.1f} points",
    )


def _fails(found: Findings, scale: str) -> Claim:
    learnt = found.learnt(scale)
    return Claim(
        "Figure 1",
        f"round-to-nearest fails to converge at the same precision ({SCALES[scale]})",
        f"{found.coarse}, {found.most} {found.unit}: it learns {learnt:.0%} of what full precision learns",
        below(learnt, 0.5),
        test="accuracy with the largest batch, 0 % being that of guessing and 100 % that of full precision",
        rule="yes if the interval is below 50 %, no if above: half-way between failure and success is the farthest from both",
        power=f"{100 * learnt.detects:.1f} % away from 50 %",
    )


def _batch_for_a_bit(found: Findings, coarse: str, fine: str) -> Claim:
    factors = {scale: found.factor(coarse, fine, scale) for scale in SCALES}
    # If gradients vary less in fewer bits, they were cut off; that says nothing about rounding.
    agrees = True if all(each.low >= 1 and each.high < 4 for each in factors.values()) else None
    if any(each.low > 4 for each in factors.values()):
        agrees = False
    return Claim(
        "Figure 4",
        f"a batch at most 4 times as large guarantees the same variance with one bit less ({fine} to {coarse})",
        "; ".join(f"{SCALES[scale]}: {factor:.2f} times" for scale, factor in factors.items()),
        agrees,
        test="ratio of the variances of gradients, of sampling and rounding together, in batches of one size",
        rule="yes if both intervals are below 4, the claimed limit, and not below 1, which only truncated gradients reach: an example "
        "can break a guarantee, but not prove it",
        power=f"a factor of {max(factor.detects for factor in factors.values()):.2f}",
    )


def _nearest_gains_nothing(found: Findings, design: str, scale: str) -> Claim:
    slope, learns = found.slope("nearest", scale, design), above(found.learnt(scale)) is True
    decides = learns and found.converges(design)
    untrained = f"with {found.most} {found.unit} the net learns nothing, and its gradient is that of untrained weights"
    return Claim(
        "Figure 5a, Section 5",
        f"the degradation by round-to-nearest does not benefit from larger batches ({_how(found, design, scale)})",
        _factor_of_gradient(found, slope, design) if learns else untrained,
        above(slope) if decides else None,
        test="squared norm of the true gradient at the end, divided by that of full precision: its factor per doubling of the batch",
        rule="yes if the interval is above 1, no if it is below: one that contains 1 excludes neither a benefit nor harm; undecided if "
        "in full precision the norm does not follow the test loss, because then it does not show convergence",
        power=f"a factor of {exponential(slope).detects:.2f} per doubling" if decides else "none",
    )


def _falls(found: Findings, design: str, scale: str) -> Claim:
    slope, decides = found.slope("stochastic", scale, design), found.converges(design)
    return Claim(
        "Figure 5b, Section 5",
        f"larger batches mitigate the degradation by stochastic rounding ({_how(found, design, scale)})",
        _factor_of_gradient(found, slope, design),
        below(slope) if decides else None,
        test="the same, for stochastic rounding",
        rule="yes if the interval is below 1, no if it is above: relative to full precision, whose gradient changes with the batch, too; "
        "undecided under the same condition",
        power=f"a factor of {exponential(slope).detects:.2f} per doubling" if decides else "none",
    )


def _factor_of_gradient(found: Findings, slope: Interval, design: str) -> str:
    doubt = "" if found.converges(design) else "; in full precision, the norm does not follow the test loss"
    return f"{_span(found)}: {exponential(slope):.3f} times for every doubling of the batch{doubt}"


def _accumulates(found: Findings) -> Claim:
    parts = found.settings.micro_batches
    whole, summed = (found.seeds("accuracy", found.coarse, "stochastic", found.most, IN_RANGE, micro_batches=count) for count in (1, parts))
    ahead = difference(summed, whole)
    return Claim(
        "Section 6.1",
        "gradients accumulated over 4 to 8 micro-batches emulate a larger batch",
        f"{found.coarse}, {found.most} {found.unit} in {parts} parts: {in_points(ahead)} points relative to one part",
        within(ahead, -_SAME, _SAME),
        test=f"difference of accuracy, the loss of each {found.unit[:-1]} scaled alike",
        rule=f"equal if the interval is within {100 * _SAME:g} point: about as much as other test {found.unit} would change",
        power=f"{100 * ahead.detects:.1f} points",
    )


def _outperforms(found: Findings, scale: str) -> Claim:
    ahead = found.ahead(scale)
    return Claim(
        "Section 7",
        f"stochastic rounding consistently outperforms round-to-nearest, particularly under aggressive quantization ({SCALES[scale]})",
        f"{found.coarse}, {found.most} {found.unit}: {in_points(ahead)} points ahead of nearest",
        above(ahead),
        test="difference of accuracy in the coarsest format with the largest batch" + (", where gradients underflow" * (scale == PLAIN)),
        rule="the sign of the interval: any lead is one",
        power=f"{100 * ahead.detects:.1f} points",
    )
