"""The verdicts of the study `llm`; `wording/llm.ini` has the claims, their tests and rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
    cases: dict[str, tuple[str, Callable[[Interval], bool | None]]] = {
        "faster than o1": (O1, lambda times: above(times, 1.0)),
        "faster than o2": (O2, lambda times: within(times, 1.0, MARGINALLY)),
        "as fast as nearest": (NEAREST, lambda times: _same([times], SAME_SPEED)),
    }
    claims = [_cost(found, name, "tokens_per_second", other, judged) for name, (other, judged) in cases.items()]
    if not found.several or not found.on_gpu:
        return claims
    grows, (first, *_, last) = found.grows(), found.settings.size
    # Their kernels differ in the rounding only, so a difference of speed is one between runs.
    control = {size: found.ratio(STOCHASTIC, NEAREST, "tokens_per_second", size) for size in (first, last)}
    holds = _same([*control.values()], SAME_SPEED)
    doubt = "" if holds else found.text("control fails", shown="; ".join(f"{size}: {times:.3f} times" for size, times in control.items()))
    words = {"times": grows, "first": first, "last": last, "doubt": doubt, "same_speed": SAME_SPEED, "least": f"{_by(grows):.1%}"}
    return [*claims, found.claim("gain grows", above(grows, 1.0) if holds else None, **words)]


def _memories(found: LanguageFindings) -> list[Claim]:
    return [_cost(found, f"less than {other}", "peak_mib", other, lambda times: below(times, 1.0)) for other in (O1, O2)]


def _cost(found: LanguageFindings, name: str, what: str, other: str, judged: Callable[[Interval], bool | None]) -> Claim:
    """A claim about the cost of stochastic updates relative to another method, with every size of the model."""
    rules = {"marginally": MARGINALLY, "same_speed": SAME_SPEED}
    if what == "peak_mib" and not found.on_gpu:
        return found.claim(name, None, shown="not measured on a processor", least="none", **rules)
    ratios = {size: found.ratio(STOCHASTIC, other, what, size) for size in found.settings.size}
    shown = "; ".join(f"{f'{size}: ' if found.several else ''}{times:.3f} times" for size, times in ratios.items())
    if not found.on_gpu:
        # Speed on a processor is reported, but decides nothing.
        return found.claim(name, None, shown=f"{shown}, on a processor", least="none: a processor has no BF16 units", **rules)
    least = f"{max(map(_by, ratios.values())):.1%}"
    return found.claim(name, both(*map(judged, ratios.values())), shown=shown, least=least, **rules)


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
