"""The claims that the study `stagnation` grades, each with the quantity that tests it, the rule and what it could have found."""

from __future__ import annotations

import numpy as np

from qsim.studies.report import Claim
from qsim.studies.stagnation.findings import Findings, geometric
from qsim.studies.stagnation.least_squares import COMPUTE, EXACT, KAHAN, NEAREST, STOCHASTIC
from qsim.studies.statistics import Interval, above, below, mean

_NAMES = {
    EXACT: "without rounding",
    COMPUTE: "with nearest rounding only in the forward and backward passes",
    STOCHASTIC: "with stochastic updates",
    KAHAN: "with Kahan updates",
}
_WHERE = {EXACT: "Section 3.1", COMPUTE: "Section 3.1", STOCHASTIC: "Section 3.2", KAHAN: "Section 3.2"}
#: A magnitude.
_TEN = 10


def claims(found: Findings) -> list[Claim]:
    """All claims."""
    return [_above(found), _tight(found), *(_past(found, method) for method in _NAMES), _single_sample(found), _worse(found),
            _theorem_2(found), *_figure_2(found)]  # fmt: skip


def _rare(count: int) -> str:
    """The largest share of failures with which none of so many fails once in twenty times: three by their number."""
    return f"failures in more than {3 / count:.1%} of descents"


def _above(found: Findings) -> Claim:
    curves = [found.whole(NEAREST, rate) for rate in found.settings.rates] + [found.single(NEAREST)]
    lowest = min(float((each.lowest / each.printed).min()) for each in curves)
    count = sum(len(each.lowest) for each in curves)
    return Claim(
        "Theorem 1",
        "weights that are rounded to nearest never come closer to the optimum than the bound",
        f"{found.settings.dimensions} dimensions: of {count} descents, the closest came within {lowest:.3g} times the bound",
        lowest >= 1,
        test="the smallest distance from the optimum at any step, in units of the published bound",
        rule="yes if no descent is below 1: the theorem is about every descent",
        power=_rare(count),
    )


def _tight(found: Findings) -> Claim:
    curves = [found.lone(rate) for rate in found.settings.rates]
    lowest, held = (min(float((each.lowest / getattr(each, name)).min()) for each in curves) for name in ("printed", "holding"))
    closer = np.concatenate([each.lowest < each.printed for each in curves])
    return Claim(
        "Theorem 1",
        "the same, for a single weight, where the bound is tight",
        f"{closer.mean():.0%} of the descents come closer, down to {lowest:.3g} times the bound; to {held:.3g} times the one that holds "
        "(see Derivations)",
        lowest >= 1,
        test="the same, in one dimension",
        rule="the same",
        power=_rare(len(closer)),
    )


def _past(found: Findings, method: str) -> Claim:
    curves = [found.whole(method, rate) for rate in found.settings.rates]
    worst = max(float((each.final / each.printed).max()) for each in curves)
    return Claim(
        _WHERE[method],
        f"{_NAMES[method]}, weights approach the optimum beyond where nearest rounding stops",
        f"gradient of all samples: the descent that ends farthest is at {worst:.2g} times the bound of Theorem 1",
        worst < 1,
        test="the distance at the end, in units of the bound that holds back nearest rounding",
        rule="yes if all descents end below 1",
        power=_rare(sum(len(each.final) for each in curves)),
    )


def _single_sample(found: Findings) -> Claim:
    stochastic, nearest = found.single(STOCHASTIC), found.single(NEAREST)
    ratio = mean((stochastic.final / nearest.final).tolist())
    return Claim(
        "Section 3.2",
        "with stochastic updates progress continues where nearest rounding halts, also with one sample per step",
        f"at {ratio:.3g} of the distance of nearest, which is a median of {np.median(stochastic.final / stochastic.printed):.2g} times "
        "the bound: disagreeing samples keep weights moving among the levels next to the optimum",
        below(ratio, 1.0),
        test="the distance at the end, relative to that of nearest on the same problem",
        rule="yes if the interval is below 1, where nearest halts",
        power=f"a distance {ratio.detects:.0%} smaller",
    )


def _worse(found: Findings) -> Claim:
    logs = np.log([found.whole(NEAREST, rate).final for rate in found.settings.rates])
    power = mean(np.polyfit(np.log(found.settings.rates), logs, 1)[0].tolist())
    return Claim(
        "Section 3.1",
        "the smaller the learning rate, the farther from the optimum nearest rounding stops",
        f"as the rate to the power {power:.2f}",
        below(power),
        test="the power of the learning rate with which the distance at the end scales, problem by problem",
        rule="the sign of the interval: the power is below zero if smaller rates stop farther away",
        power=f"{power.detects:.2f} in the power",
    )


def _theorem_2(found: Findings) -> Claim:
    curves = [found.whole(COMPUTE, rate) for rate in found.settings.rates] + [found.single(COMPUTE)]
    worst = max((mean(row.tolist()) for each in curves for row in each.beside_theorem_2()), key=lambda interval: interval.value)
    return Claim(
        "Theorem 2",
        "with nearest rounding only in the forward and backward passes, the mean squared distance stays below a bound that goes to 0",
        f"at most {worst:.4f} times the bound, at any step",
        True if worst.high <= 1 else False if worst.low > 1 else None,
        test="the squared distance in units of the bound, mean over problems, the largest of all steps",
        rule="no if the interval is above 1, yes if it is below: the bound is close where nothing has converged yet",
        power=f"an excess of {100 * worst.detects:.2g} %",
    )


def _figure_2(found: Findings) -> list[Claim]:
    def beside(method: str) -> Interval:
        exact, other = (found.single(name, found.settings.noise).losses[-1] for name in (EXACT, method))
        return geometric(other / exact)

    nearest, compute = beside(NEAREST), beside(COMPUTE)
    return [
        Claim(
            "Figure 2",
            "the loss with weights rounded to nearest saturates magnitudes above the one without rounding",
            f"{nearest:.3g} times as high at the end",
            above(nearest, _TEN),
            test="the training loss at the end, relative to that without rounding, with noise in the labels",
            rule="yes if the interval is above 10, one magnitude",
            power=f"a factor of {nearest.detects:.2f}",
        ),
        Claim(
            "Figure 2",
            "with nearest rounding only in the forward and backward passes, it saturates much closer",
            f"{compute:.5f} times as high at the end",
            below(compute, 1 + (nearest.low - 1) / _TEN),
            test="the same",
            rule="yes if its excess is below a tenth, one magnitude, of that of weights rounded to nearest",
            power=f"a factor of {compute.detects:.5f}",
        ),
    ]
