"""The verdicts of the study `batch-size`; `wording/batch-size.ini` has the claims, their tests and rules."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from itertools import pairwise

import qsim
from qsim.studies.batch_size import FULL, IMAGES, IN_RANGE, PLAIN, SCALES, STEPS
from qsim.studies.batch_size.findings import NEAR_ZERO, BatchFindings
from qsim.studies.learners.examples import PRETRAINED, predictions
from qsim.studies.report import Claim
from qsim.studies.statistics import Interval, above, below, both, difference, exponential, in_points, mean, shared, within

#: Accuracies that differ by at most this count as equal: about what the choice of a thousand test images changes.
_SAME = 0.01
#: Factors of the batch between these are about a doubling: closer to one than to none or to two.
_DOUBLING = math.sqrt(2), 2 * math.sqrt(2)
#: A norm whose factor per doubling of the batch is above this does not fall: noise that a batch averages out would be halved.
_FLAT = 0.9


def claims(found: BatchFindings) -> list[Claim]:
    """All claims, in the order of the paper."""
    designs = [(design, scale) for design in found.settings.designs for scale in found.settings.scales]
    written = [scale for design, scale in designs if design == STEPS]
    fails = {scale: found.learnt(scale) for scale in found.settings.scales}
    return [
        *((_gains_share(found, scale) if design == IMAGES else _gains(found, design, scale)) for design, scale in designs),
        *(
            found.claim("fails", below(learnt, 0.5), scale=SCALES[scale], learnt=learnt, underflow=_underflow(found, scale))
            for scale, learnt in fails.items()
        ),
        *(_batch_for_a_bit(found, coarse, fine) for coarse, fine in pairwise(found.settings.formats)),
        *(_degradation(found, "nearest", design, scale) for design, scale in designs),
        *(_degradation(found, "stochastic", design, scale) for design, scale in designs),
        *(_degradation(found, rounding, STEPS, scale, relative=False) for rounding in ("nearest", "stochastic") for scale in written),
        *(_tables(found) if found.settings.model == PRETRAINED else []),
        *(_floor(found, scale) for scale in written if found.settings.weights != FULL),
        *([_accumulates(found)] if found.settings.micro_batches > 1 else []),
        *(_outperforms(found, scale) for scale in found.settings.scales),
    ]


def _underflow(found: BatchFindings, scale: str) -> str:
    """Why round-to-nearest must fail, if it must: gradients of logits are below one divided by the number of predictions in a batch."""
    smallest = qsim.format(found.coarse).smallest
    if scale != PLAIN or found.most * predictions(found.settings.model) * smallest < 2:
        return ""
    return found.text("underflows", smallest=smallest)


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
    factors = {scale: found.factor(coarse, fine, scale) for scale in found.settings.scales}
    # If gradients vary less in fewer bits, they were cut off; that says nothing about rounding.
    agrees = True if all(each.low >= 1 and each.high < 4 for each in factors.values()) else None
    if any(each.low > 4 for each in factors.values()):
        agrees = False
    shown = "; ".join(f"{SCALES[scale]}: {factor:.2f} times" for scale, factor in factors.items())
    detects = max(factor.detects for factor in factors.values())
    return found.claim("a bit", agrees, coarse=coarse, fine=fine, factors=shown, detects=detects)


def _degradation(found: BatchFindings, rounding: str, design: str, scale: str, *, relative: bool = True) -> Claim:
    """Whether the gradient grows with the batch with round-to-nearest, or falls with stochastic rounding."""
    nearest, how = rounding == "nearest", found.how(design, scale)
    name = rounding if relative else f"{rounding} as written"
    if nearest and not above(found.learnt(scale)):
        return found.claim(name, None, how=how, shown=found.text("untrained"), least="none: the net learns nothing", zero=NEAR_ZERO)
    slope = found.slope(rounding, scale, design, relative=relative)
    return _sloped(found, name, design, scale, slope, (above if nearest else below)(slope), zero=NEAR_ZERO)


def _floor(found: BatchFindings, scale: str) -> Claim:
    slope = found.slope("stochastic", scale, STEPS, relative=False)
    return _sloped(found, "floor", STEPS, scale, slope, above(slope, math.log(_FLAT)), flat=_FLAT)


def _sloped(found: BatchFindings, name: str, design: str, scale: str, slope: Interval, agrees: bool | None, **rule: float) -> Claim:
    """A claim about the factor of the gradient per doubling of the batch, which is undecided unless training has converged."""
    loss = found.highest_training_loss(design)
    converges = loss < NEAR_ZERO
    doubt = "" if converges else found.text("not measured") if math.isnan(loss) else found.text("not converged", loss=loss)
    shown = found.text("gradient", slope=exponential(slope), doubt=doubt)
    least = f"a factor of {exponential(slope).detects:.2f} per doubling{'' if converges else ', if training had converged'}"
    return found.claim(name, agrees if converges else None, how=found.how(design, scale), shown=shown, least=least, **rule)


def _tables(found: BatchFindings) -> list[Claim]:
    """Claims on fine-tuning, with the last of the loss scales, which keeps gradients in range."""
    chosen = found.settings
    scale, design = chosen.scales[-1], chosen.designs[0]
    table = "Table 1" if chosen.data == "sums" else "Table 3"
    gains = {name: mean(found.gain(name, "stochastic", scale, design)) for name in (*chosen.formats, FULL)}
    own = {name: gains[name] for name in chosen.formats}
    beyond = {name: found.beyond("stochastic", scale, design, format=name) for name in chosen.formats}
    rows = [
        found.claim("table", both(*map(above, own.values())), table=table, shown=_shown(gains), least=_least(own)),
        found.claim("table beyond", both(*map(above, beyond.values())), table=table, shown=_shown(beyond), least=_least(beyond)),
    ]
    if found.doubles and len(chosen.formats) > 1:
        factors = {(few, fine): found.makes_up(few, fine, scale, design) for few, fine in pairwise(chosen.formats)}
        least = max(factor.detects for factor in factors.values())
        shown = "; ".join(f"{few} is as good as {fine} with {_times(factor)}" for (few, fine), factor in factors.items())
        rows.append(found.claim("doubling", both(*map(_about_twice, factors.values())), shown=shown, full=gains[FULL], least=least))
    return rows


def _about_twice(factor: Interval) -> bool | None:
    """Whether a factor is about 2; None if less may do, because then twice the batch is more than enough, as in full precision."""
    low, high = _DOUBLING
    return True if within(factor, low, high) else False if factor.low > high else None


def _times(factor: Interval) -> str:
    return f"{factor:.2f} times the batch" if math.isfinite(factor.value) else "no batch here, because accuracy does not rise with it"


def _shown(found: Mapping[str, Interval]) -> str:
    return "; ".join(f"{name}: {in_points(each)}" for name, each in found.items())


def _least(found: Mapping[str, Interval]) -> float:
    return max(each.points.detects for each in found.values())


def _accumulates(found: BatchFindings) -> Claim:
    parts = (1, found.settings.micro_batches)
    whole, summed = (found.seeds("accuracy", found.coarse, "stochastic", found.most, IN_RANGE, micro_batches=count) for count in parts)
    ahead = difference(summed, whole)
    return found.claim("accumulates", within(ahead, -_SAME, _SAME), ahead=ahead, same=100 * _SAME)


def _outperforms(found: BatchFindings, scale: str) -> Claim:
    leads, underflow = found.leads(scale), ", where gradients underflow" * (scale == PLAIN)
    intervals = [mean(lead) for lead in leads]
    with shared(len(leads)):
        consistent = False if any(below(mean(lead)) for lead in leads) else None
    verdicts = Counter(map(above, intervals))
    return found.claim(
        "outperforms",
        all(map(above, intervals)) or consistent,
        scale=SCALES[scale],
        underflow=underflow,
        ahead=found.ahead(scale),
        cells=len(leads),
        of_stochastic=verdicts[True],
        of_nearest=verdicts[False],
        least=max(lead.points.detects for lead in intervals),
    )
