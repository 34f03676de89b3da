"""The verdicts of the study `stagnation`; `wording/stagnation.ini` has the claims, their tests and rules."""

from __future__ import annotations

import numpy as np

from qsim.studies.report import Claim
from qsim.studies.stagnation.findings import DescentFindings
from qsim.studies.stagnation.least_squares import COMPUTE, EXACT, KAHAN, NEAREST, STOCHASTIC
from qsim.studies.statistics import Interval, above, below, geometric, mean

_NAMES = {
    EXACT: ("Section 3.1", "without rounding"),
    COMPUTE: ("Section 3.1", "with nearest rounding only in the forward and backward passes"),
    STOCHASTIC: ("Section 3.2", "with stochastic updates"),
    KAHAN: ("Section 3.2", "with Kahan updates"),
}
#: A magnitude.
_TEN = 10


def claims(found: DescentFindings) -> list[Claim]:
    """All claims."""
    return [_above(found), _tight(found), *(_past(found, method) for method in _NAMES), _single_sample(found), _worse(found),
            _theorem_2(found), *_figure_2(found)]  # fmt: skip


def _rare(count: int) -> float:
    """The largest share of failures with which none of so many fails once in twenty times: three by their number."""
    return 3 / count


def _above(found: DescentFindings) -> Claim:
    curves = [found.whole(NEAREST, rate) for rate in found.settings.rates] + [found.single(NEAREST)]
    lowest = min(float((each.lowest / each.printed).min()) for each in curves)
    count = sum(len(each.lowest) for each in curves)
    return found.claim("above", lowest >= 1, count=count, lowest=lowest, rare=_rare(count))


def _tight(found: DescentFindings) -> Claim:
    curves = [found.lone(rate) for rate in found.settings.rates]
    lowest, held = (min(float((each.lowest / getattr(each, name)).min()) for each in curves) for name in ("printed", "holding"))
    closer = np.concatenate([each.lowest < each.printed for each in curves])
    return found.claim("tight", lowest >= 1, closer=closer.mean(), lowest=lowest, held=held, rare=_rare(len(closer)))


def _past(found: DescentFindings, method: str) -> Claim:
    curves, (where, name) = [found.whole(method, rate) for rate in found.settings.rates], _NAMES[method]
    worst = max(float((each.final / each.printed).max()) for each in curves)
    return found.claim("past", worst < 1, where=where, name=name, worst=worst, rare=_rare(sum(len(each.final) for each in curves)))


def _single_sample(found: DescentFindings) -> Claim:
    stochastic, nearest = found.single(STOCHASTIC), found.single(NEAREST)
    ratio = mean(stochastic.final / nearest.final)
    return found.claim("single sample", below(ratio, 1.0), ratio=ratio, median=np.median(stochastic.final / stochastic.printed))


def _worse(found: DescentFindings) -> Claim:
    logs = np.log([found.whole(NEAREST, rate).final for rate in found.settings.rates])
    power = mean(np.polyfit(np.log(found.settings.rates), logs, 1)[0])
    return found.claim("smaller rate", below(power), power=power)


def _theorem_2(found: DescentFindings) -> Claim:
    curves = [found.whole(COMPUTE, rate) for rate in found.settings.rates] + [found.single(COMPUTE)]
    worst = max((mean(row) for each in curves for row in each.beside_theorem_2()), key=lambda interval: interval.value)
    return found.claim("theorem 2", True if worst.high <= 1 else False if worst.low > 1 else None, worst=worst)


def _figure_2(found: DescentFindings) -> list[Claim]:
    def beside(method: str) -> Interval:
        exact, other = (found.single(name, found.settings.noise).losses[-1] for name in (EXACT, method))
        return geometric(other / exact)

    nearest, compute = beside(NEAREST), beside(COMPUTE)
    closer = below(compute, 1 + (nearest.low - 1) / _TEN)
    return [found.claim("saturates", above(nearest, _TEN), nearest=nearest), found.claim("closer", closer, compute=compute)]
