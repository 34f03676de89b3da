"""The verdicts of the study `cancelled-updates`; `wording/cancelled-updates.ini` has the claims, their tests and rules."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from qsim.studies.cancelled_updates import BOTH, FULL, KAHAN, NEAREST, STOCHASTIC
from qsim.studies.cancelled_updates.findings import UpdateFindings
from qsim.studies.report import Claim
from qsim.studies.statistics import Interval, above, both, difference, exponential, mean, within

#: Accuracies that differ by at most this count as equal: about what the choice of a thousand test images changes.
_SAME = 0.01


def claims(found: UpdateFindings) -> list[Claim]:
    """All claims, in the order of the paper."""
    names = dict.fromkeys((found.settings.mixed, found.coarse))
    lost = {name: _lost(found, name) for name in names}
    behind = {name: _behind(found, name, NEAREST) for name in names}
    cures = found.settings.updates[1:]
    return [
        _late(found),
        *([_coarser(found)] if len(found.settings.formats) > 1 else []),
        _carried(found),
        *(found.claim("loses accuracy", above(lost[name]), name=name, lost=lost[name]) for name in names),
        *(found.claim("falls behind", above(behind[name]), name=name, times=exponential(behind[name])) for name in names),
        *([_grows(found)] if found.settings.curve else []),
        *(_matches(found, update) for update in cures),
        *(_follows(found, update) for update in cures),
        _memory_pays(found),
        *(_computes(found, unit) for unit in found.settings.units),
    ]


def _late(found: UpdateFindings) -> Claim:
    first, last = (found.quarter(found.settings.mixed, NEAREST, which) for which in (0, -1))
    gain = difference(last, first)
    return found.claim("late", above(gain), gain=gain, last=mean(last).value)


def _coarser(found: UpdateFindings) -> Claim:
    shares = {name: found.shares(name, NEAREST).mean(1) for name in found.settings.formats}
    steps = [difference(shares[coarse], shares[fine]) for fine, coarse in pairwise(shares)]
    shown = "; ".join(f"{name} {np.mean(share):.1%}" for name, share in shares.items())
    return found.claim("coarser", both(*map(above, steps)), shares=shown, detects=100 * max(step.detects for step in steps))


def _carried(found: UpdateFindings) -> Claim:
    nearest, kahan = (found.shares(found.settings.mixed, update, lost=True).mean(1) for update in (NEAREST, KAHAN))
    fewer = difference(nearest, kahan)
    return found.claim("carried", above(fewer), fewer=fewer, kahan=np.mean(kahan), nearest=np.mean(nearest))


def _lost(found: UpdateFindings, name: str) -> Interval:
    return difference(found.of("accuracy", FULL, NEAREST), found.of("accuracy", name, NEAREST))


def _behind(found: UpdateFindings, name: str, update: str) -> Interval:
    return difference(np.log(found.of("loss", name, update)), np.log(found.of("loss", FULL, NEAREST)))


def _grows(found: UpdateFindings) -> Claim:
    nearest, full = (np.log(found.curve(name, NEAREST)[:, :, 1]) for name in (found.settings.mixed, FULL))
    quarter = nearest.shape[1] // 4
    early, late = ((nearest - full)[:, part].mean(1) for part in (slice(quarter), slice(-quarter, None)))
    growth = difference(late, early)
    return found.claim("grows", above(growth), early=exponential(mean(early)), late=exponential(mean(late)), growth=exponential(growth))


def _source(paper: str, update: str) -> str:
    """Where a cure is claimed; the appendix only lists both cures of one weight, without numbers."""
    return "Appendix D.3, both on one weight" if update == BOTH else paper


def _matches(found: UpdateFindings, update: str) -> Claim:
    ahead = difference(found.of("accuracy", found.settings.mixed, update), found.of("accuracy", FULL, NEAREST))
    return found.claim("matches", _same(found, ahead), source=_source("Table 4", update), update=update, ahead=ahead, same=100 * _SAME)


def _computes(found: UpdateFindings, unit: str) -> Claim:
    ahead = difference(found.in_unit(unit), found.of("accuracy", FULL, NEAREST))
    return found.claim("computes", _same(found, ahead), name=unit, ahead=ahead, same=100 * _SAME)


def _same(found: UpdateFindings, ahead: Interval) -> bool | None:
    """Whether a difference of accuracies is none; undecided if nearest loses nothing that shows, because it must not match by this rule."""
    lost = _lost(found, found.settings.mixed)
    margin = min(_SAME, lost.value / 2)
    return within(ahead, -margin, margin) if above(lost) else None


def _follows(found: UpdateFindings, update: str) -> Claim:
    behind, nearest = (_behind(found, found.settings.mixed, each) for each in (update, NEAREST))
    # Half of nearest's excess, in logarithms.
    margin = nearest.value / 2
    agrees = within(behind, -margin, margin) if above(nearest) else None
    return found.claim(
        "follows", agrees, source=_source("Figure 4", update), update=update, times=exponential(behind), nearest=exponential(nearest)
    )


def _memory_pays(found: UpdateFindings) -> Claim:
    ahead = difference(*(found.of("accuracy", found.settings.mixed, update) for update in (KAHAN, STOCHASTIC)))
    return found.claim("memory pays", above(ahead), ahead=ahead, memory=found.memory(found.layers) / found.memory(0))
