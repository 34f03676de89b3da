"""The papers' claims about training in BF16, and their verdicts in the study `llm`."""

from __future__ import annotations

from collections.abc import Sequence

from qsim.studies.learners.gpt_training import KAHAN, NEAREST, STOCHASTIC
from qsim.studies.llm import METHODS, MORE_BITS
from qsim.studies.llm.findings import SAME, Findings, excess_text
from qsim.studies.llm.training import O1, O2
from qsim.studies.report import Claim
from qsim.studies.statistics import Interval, above, below, within

#: Differences of speed up to this count as none, and up to this factor a method counts as marginally faster.
SAME_SPEED, MARGINALLY = 0.03, 1.1
_RATIO = "ratio of perplexities, each method at its best rate, seed by seed"
_TUNED = "the side of 1 on which the interval is, if both best rates are inside of the grid: at its edge a method is not tuned"


def claims(findings: Findings) -> list[Claim]:
    """Every claim about what was measured, with its verdict."""
    tuned = [_as_good(findings), _nearest_worse(findings), _kahan(findings)] if findings.of_perplexity else []
    costs = [*_speeds(findings), *_memories(findings)] if findings.of_cost else []
    return [*tuned, *costs, *([_no_difference(findings)] if findings.of_perplexity else [])]


def _as_good(findings: Findings) -> Claim:
    found = findings.beside(STOCHASTIC, O1)
    return Claim(
        "Table 2",
        "BF16 with stochastic updates slightly outperforms mixed precision: 14.07 to 14.45 with 350 million parameters, 10.05 to 10.11 "
        "with 6.7 billion",
        _compared(findings, STOCHASTIC, O1),
        below(found, 1.0) if findings.inside(STOCHASTIC, O1) else None,
        test=_RATIO,
        rule=_TUNED,
        power=_by(found),
    )


def _nearest_worse(findings: Findings) -> Claim:
    found = findings.beside(NEAREST, STOCHASTIC)
    return Claim(
        "Table 2",
        "it significantly outperforms BF16 with updates rounded to nearest: 14.07 to 16.38 with 350 million parameters, 10.05 to 11.64 "
        "with 6.7 billion",
        _compared(findings, NEAREST, STOCHASTIC),
        above(found, 1.0) if findings.inside(NEAREST, STOCHASTIC) else None,
        test=_RATIO,
        rule=_TUNED,
        power=_by(found),
    )


def _compared(findings: Findings, method: str, other: str) -> str:
    """One method relative to another: each at its best rate, which decides, and both at the same rate."""
    rates = findings.settings.rates if len(findings.settings.rates) > 1 else ()
    same = "".join(f"; both at {rate:g}: {excess_text(findings.beside_at(rate, method, other))}" for rate in rates)
    return f"relative to {METHODS[other]}, each at its best rate: {excess_text(findings.beside(method, other))}{same}"


def _kahan(findings: Findings) -> Claim:
    found = findings.beside(KAHAN, O1)
    return Claim(
        "Zamirai et al., Revisiting BFloat16 Training, Section 4",
        "BF16 with Kahan summation matches training with weights in FP32",
        f"relative to O1: {excess_text(found)}",
        _same([found], SAME) if findings.inside(KAHAN, O1) else None,
        test=_RATIO,
        rule=f"equal if the interval is within {SAME:.0%}, less than half of what the paper reports as an improvement, and both best "
        "rates are inside of the grid",
        power=_by(found),
    )


def _speeds(findings: Findings) -> list[Claim]:
    o1, o2, nearest = (findings.ratio(STOCHASTIC, other, "tokens_per_second") for other in (O1, O2, NEAREST))
    # Speed on a processor is reported, but decides nothing.
    cases = (
        ("Table 4", "faster than O1: 1.07 times with 350 million parameters, 1.54 times with 6.7 billion", o1, above(o1, 1.0),
         "yes if the interval is above 1: by how much depends on the model and the GPU"),
        ("Table 6", "marginally faster than O2: 1.03 to 1.06 times, 1.3 to 6.7 billion parameters", o2, within(o2, 1.0, MARGINALLY),
         f"yes if the interval is from 1 to {MARGINALLY:g}, a tenth, which is between this and the gains that it calls considerable"),
        ("Section 3", "practically no overhead: as fast as BF16 with updates rounded to nearest", nearest, _same([nearest], SAME_SPEED),
         f"equal if the interval is within {SAME_SPEED:.0%}, the smallest gain that the paper reports"),
    )  # fmt: skip
    where = "" if findings.on_gpu else ", on a processor"
    return [
        Claim(
            source,
            paper,
            f"{found:.3f} times{where}",
            verdict if findings.on_gpu else None,
            test="ratio of tokens per second, over seeds and rates",
            rule=rule,
            power=_by(found) if findings.on_gpu else "none: a processor has no BF16 units",
        )
        for source, paper, found, verdict, rule in cases
    ]


def _memories(findings: Findings) -> list[Claim]:
    papers = {
        O1: ("Table 5", "less memory than mixed precision: 186 GB to 234 with 350 million parameters, 208 to 298 with 770 million"),
        O2: ("Section 5.2", "the least memory of all, because all tensors are BF16: less than O2"),
    }
    told = {
        "test": "ratio of peak memory, over seeds and rates",
        "rule": "yes if the interval is below 1, no if above: by how much depends on the model",
    }
    claims = []
    for other, (source, paper) in papers.items():
        if not findings.on_gpu:
            claims.append(Claim(source, paper, "not measured on a processor", None, **told, power="none"))
            continue
        found = findings.ratio(STOCHASTIC, other, "peak_mib")
        claims.append(Claim(source, paper, f"{found:.3f} times", below(found, 1.0), **told, power=_by(found)))
    return claims


def _no_difference(findings: Findings) -> Claim:
    found = [findings.more_bits(*bits) for bits in MORE_BITS]
    told = "; ".join(
        f"moments {states.upper()}, gradients {gradients.upper()}: {excess_text(each)}"
        for (states, gradients), each in zip(MORE_BITS, found, strict=True)
    )
    return Claim(
        "Figure 4",
        "moments and gradients with more bits change virtually nothing under stochastic updates",
        told,
        _same(found, SAME),
        test="ratio of perplexities with the same seeds, at one rate",
        rule=f"equal if all intervals are within {SAME:.0%}, less than half of what the paper reports as an improvement",
        power=_by(max(found, key=lambda each: each.detects)),
    )


def _by(found: Interval) -> str:
    """The smallest deviation of a ratio from 1 that would have been found."""
    return f"{found.detects - 1:.1%}"


def _same(ratios: Sequence[Interval], share: float) -> bool | None:
    """Whether all ratios are 1, up to a tolerance."""
    low, high = 1 - share, 1 + share
    if any(ratio.high < low or ratio.low > high for ratio in ratios):
        return False
    return True if all(low <= ratio.low and ratio.high <= high for ratio in ratios) else None
