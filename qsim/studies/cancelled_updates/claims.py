"""The claims that the study `cancelled-updates` grades, each with the quantity that tests it, the rule and what it could have found."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from qsim.studies.cancelled_updates import FULL, KAHAN, NEAREST, STOCHASTIC
from qsim.studies.cancelled_updates.findings import Findings
from qsim.studies.report import Claim
from qsim.studies.statistics import Interval, above, difference, exponential, in_points, mean, within

#: Accuracies that differ by at most this count as equal: about what the choice of a thousand test images changes.
_SAME = 0.01
_SIGN = "the sign of the interval"


def claims(found: Findings) -> list[Claim]:
    """All claims, in the order of the paper."""
    return [
        _late(found),
        _coarser(found),
        _carried(found),
        *(_loses_accuracy(found, name) for name in dict.fromkeys((found.settings.mixed, found.coarse))),
        *(_falls_behind(found, name) for name in dict.fromkeys((found.settings.mixed, found.coarse))),
        *(_matches(found, update) for update in (STOCHASTIC, KAHAN)),
        *(_follows(found, update) for update in (STOCHASTIC, KAHAN)),
        _memory_pays(found),
    ]


def _late(found: Findings) -> Claim:
    name = found.settings.mixed
    gain = difference(found.quarter(name, NEAREST, -1), found.quarter(name, NEAREST, 0))
    return Claim(
        "Section 3.1",
        "nearest rounding cancels updates above all in the late stage of training",
        f"{name}: {in_points(gain)} points from the first to the last quarter, to {mean(found.quarter(name, NEAREST, -1)).value:.1%}",
        above(gain),
        test="share of the updates that are cancelled, last quarter of the steps minus first",
        rule=_SIGN + ": the claim compares stages and names no share",
        power=f"{100 * gain.detects:.1f} points",
    )


def _coarser(found: Findings) -> Claim:
    names = found.settings.formats
    shares = {name: found.shares(name, NEAREST).mean(1).tolist() for name in names}
    steps = [difference(shares[coarse], shares[fine]) for fine, coarse in pairwise(names)]
    signs = [above(step) for step in steps]
    return Claim(
        "Theorem 1",
        "the lower the precision, the more updates are cancelled",
        "; ".join(f"{name} {np.mean(shares[name]):.1%}" for name in names),
        False if False in signs else None if None in signs else True,
        test="share of the updates that are cancelled over the whole training, each format minus the next finer one",
        rule="yes if all intervals are above zero, no if one is below: the theorem orders the formats",
        power=f"{100 * max(step.detects for step in steps):.1f} points",
    )


def _carried(found: Findings) -> Claim:
    name = found.settings.mixed
    lost = {update: found.shares(name, update, lost=True).mean(1).tolist() for update in (NEAREST, KAHAN)}
    fewer = difference(lost[NEAREST], lost[KAHAN])
    return Claim(
        "Section 3.2",
        "Kahan summation accumulates cancelled updates until they are large enough",
        f"{name}: {np.mean(lost[KAHAN]):.1%} of the updates are lost, with nearest {np.mean(lost[NEAREST]):.1%}; those lost are too small "
        "for the 16 bits of the compensation",
        above(fewer),
        test="share of the updates that are neither applied nor stored, nearest minus Kahan",
        rule=_SIGN + ": what is stored is applied later",
        power=f"{100 * fewer.detects:.1f} points",
    )


def _lost_accuracy(found: Findings, name: str) -> Interval:
    return difference(found.values("accuracy", FULL, NEAREST), found.values("accuracy", name, NEAREST))


def _loses_accuracy(found: Findings, name: str) -> Claim:
    lost = _lost_accuracy(found, name)
    return Claim(
        "Table 3",
        f"nearest rounding of updates loses validation accuracy: 1.2 to 6.7 % in bf16 (here: {name})",
        f"{in_points(lost)} points lost relative to {FULL}",
        above(lost),
        test="test accuracy of fp32 minus that of nearest, seed by seed",
        rule=_SIGN + ": how much is lost depends on the model and on the learning rate",
        power=f"{100 * lost.detects:.1f} points",
    )


def _behind(found: Findings, name: str, update: str) -> Interval:
    return difference(*(np.log(found.values("loss", *which)).tolist() for which in ((name, update), (FULL, NEAREST))))


def _falls_behind(found: Findings, name: str) -> Claim:
    behind = _behind(found, name, NEAREST)
    return Claim(
        "Figure 3",
        f"nearest rounding of updates falls behind 32-bit training on the training data (here: {name})",
        f"training loss {exponential(behind):.3g} times as high",
        above(behind),
        test="ratio of the training losses at the end",
        rule="yes if the interval is above 1, no if below: how far it falls behind depends on the model",
        power=f"a factor of {exponential(behind).detects:.2f}",
    )


def _matches(found: Findings, update: str) -> Claim:
    name = found.settings.mixed
    ahead = difference(found.values("accuracy", name, update), found.values("accuracy", FULL, NEAREST))
    lost = _lost_accuracy(found, name)
    # Nearest must not match by the same rule.
    margin = min(_SAME, lost.value / 2)
    return Claim(
        "Table 4",
        f"{name} with {update} updates matches 32-bit training in validation accuracy",
        f"{in_points(ahead)} points relative to {FULL}",
        within(ahead, -margin, margin) if above(lost) else None,
        test="test accuracy minus that of fp32, seed by seed",
        rule=f"yes if the interval is within {100 * _SAME:g} point, about what other test images would change, and within half "
        "of what nearest loses in the same task, so that a match could have failed; undecided if nearest loses nothing that shows",
        power=f"{100 * ahead.detects:.1f} points",
    )


def _follows(found: Findings, update: str) -> Claim:
    name = found.settings.mixed
    behind, nearest = _behind(found, name, update), _behind(found, name, NEAREST)
    # Half of nearest's excess, in logarithms.
    margin = nearest.value / 2
    return Claim(
        "Figure 4",
        f"{name} with {update} updates matches 32-bit training on the training data",
        f"training loss {exponential(behind):.3g} times as high; with nearest {exponential(nearest):.3g} times",
        within(behind, -margin, margin) if above(nearest) else None,
        test="ratio of the training losses at the end",
        rule="yes if the interval is closer to 1 than half-way to nearest, in logarithms: nearer to the match than to the failure",
        power=f"a factor of {exponential(behind).detects:.2f}",
    )


def _memory_pays(found: Findings) -> Claim:
    name = found.settings.mixed
    ahead = difference(found.values("accuracy", name, KAHAN), found.values("accuracy", name, STOCHASTIC))
    return Claim(
        "Figure 5",
        "with up to twice the memory of weights, Kahan updates instead of stochastic ones gain up to 0.04 %",
        f"{name}: {in_points(ahead)} points for {found.memory(found.layers) / found.memory(0):.2f} times the memory",
        above(ahead),
        test="test accuracy with Kahan updates minus that with stochastic ones",
        rule=_SIGN + ": any gain confirms it; these runs do not resolve 0.04 %",
        power=f"{100 * ahead.detects:.1f} points",
    )
