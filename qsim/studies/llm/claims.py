"""The verdicts of the study `llm`; `wording/llm.ini` has the claims, their tests and rules."""

from __future__ import annotations

from collections.abc import Sequence

from qsim.studies.learners.gpt_training import KAHAN, NEAREST, STOCHASTIC
from qsim.studies.llm import MEMORY, METHODS, MORE_BITS, TIME, saves
from qsim.studies.llm.findings import SAME, LanguageFindings, excess_text
from qsim.studies.llm.training import O1, O2
from qsim.studies.report import Claim
from qsim.studies.statistics import Interval, above, below, both, within

#: Differences of speed up to this count as none, and up to this factor a method counts as marginally faster.
SAME_SPEED, MARGINALLY = 0.03, 1.1


def claims(found: LanguageFindings) -> list[Claim]:
    """Every claim about what was measured, with its verdict."""
    costs = [*_speeds(found), *_memories(found)] if found.of_cost else []
    if not found.of_perplexity:
        return costs
    stochastic, nearest = (found.beside(*pair) for pair in ((STOCHASTIC, O1), (NEAREST, STOCHASTIC)))
    outperforms = below(stochastic, 1.0) if found.inside(STOCHASTIC, O1) else None
    worse = above(nearest, 1.0) if found.inside(NEAREST, STOCHASTIC) else None
    return [
        found.claim("as good", outperforms, shown=_compared(found, STOCHASTIC, O1), least=_by(stochastic)),
        found.claim("nearest worse", worse, shown=_compared(found, NEAREST, STOCHASTIC), least=_by(nearest)),
        *([_kahan(found)] if KAHAN in found.settings.methods else []),
        *(_equal(found, what) for what in (TIME, MEMORY) if saves(found.settings, what) != 1),
        *costs,
        *([_no_difference(found)] if found.of_bits else []),
    ]


def _kahan(found: LanguageFindings) -> Claim:
    kahan = found.beside(KAHAN, O1)
    matches = _same([kahan], SAME) if found.inside(KAHAN, O1) else None
    return found.claim("kahan", matches, shown=excess_text(kahan), least=_by(kahan), same=SAME)


def _equal(found: LanguageFindings, what: str) -> Claim:
    ratio, more = found.equal(what), saves(found.settings, what)
    return found.claim(f"equal {what}", below(ratio, 1.0), shown=excess_text(ratio), more=more, least=_by(ratio))


def _compared(found: LanguageFindings, method: str, other: str) -> str:
    """One method relative to another: each at its best rate, which decides, and both at the same rate."""
    rates = found.settings.rates if len(found.settings.rates) > 1 and not found.settings.tuned else ()
    same = "".join(f"; both at {rate:g}: {excess_text(found.beside_at(rate, method, other))}" for rate in rates)
    return f"relative to {METHODS[other]}, each at its best rate: {excess_text(found.beside(method, other))}{same}"


def _speeds(found: LanguageFindings) -> list[Claim]:
    o1, o2, nearest = (found.ratio(STOCHASTIC, other, "tokens_per_second") for other in (O1, O2, NEAREST))
    cases = {
        "faster than o1": (o1, above(o1, 1.0)),
        "faster than o2": (o2, within(o2, 1.0, MARGINALLY)),
        "as fast as nearest": (nearest, _same([nearest], SAME_SPEED)),
    }
    # Speed on a processor is reported, but decides nothing.
    where = "" if found.on_gpu else ", on a processor"
    rules = {"marginally": MARGINALLY, "same_speed": SAME_SPEED, "where": where}
    return [
        found.claim(
            name,
            verdict if found.on_gpu else None,
            times=times,
            least=f"{_by(times):.1%}" if found.on_gpu else "none: a processor has no BF16 units",
            **rules,
        )
        for name, (times, verdict) in cases.items()
    ]


def _memories(found: LanguageFindings) -> list[Claim]:
    names = {O1: "less than o1", O2: "less than o2"}
    if not found.on_gpu:
        return [found.claim(name, None, shown="not measured on a processor", least="none") for name in names.values()]
    ratios = {name: found.ratio(STOCHASTIC, other, "peak_mib") for other, name in names.items()}
    return [found.claim(name, below(ratio, 1.0), shown=f"{ratio:.3f} times", least=f"{_by(ratio):.1%}") for name, ratio in ratios.items()]


def _no_difference(found: LanguageFindings) -> Claim:
    ratios = {bits: found.more_bits(*bits) for bits in MORE_BITS}
    shown = [
        f"moments {states.upper()}, gradients {gradients.upper()}: {excess_text(ratios[states, gradients])}" for states, gradients in ratios
    ]
    least = max(map(_by, ratios.values()))
    return found.claim("more bits", _same([*ratios.values()], SAME), shown="; ".join(shown), least=least, same=SAME)


def _by(ratio: Interval) -> float:
    """The smallest deviation of a ratio from 1 that would have been found."""
    return ratio.detects - 1


def _same(ratios: Sequence[Interval], share: float) -> bool | None:
    """Whether all ratios are 1, up to a tolerance."""
    return both(*(within(ratio, 1 - share, 1 + share) for ratio in ratios))
