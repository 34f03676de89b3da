"""The papers' claims about narrow sums, and their verdicts in the study `accumulator`."""

from __future__ import annotations

from qsim.studies.accumulator import CHAIN, CHUNKED, CONTROL, NARROW, PROMOTED
from qsim.studies.accumulator.dot_products import MEAN_ONE, NORMAL, POSITIVE, WANG
from qsim.studies.accumulator.findings import LENGTH, SAME, Findings, percent_text
from qsim.studies.report import Claim
from qsim.studies.statistics import Interval, above, mean

#: An error that grows by less than this factor from the shortest sums to the longest does not grow; one percent of error is small.
GROWN, SMALL = 2.0, 0.01
#: Where sums of numbers of mean one in 1-6-9 end, within this share.
END, NEAR_END = 4096.0, 0.05
_DEEPSEEK, _WANG, _BOTH = "DeepSeek-V3, Section 3.3.2", "Wang et al. 2018", "Wang et al. 2018, Sun et al. 2019"


def claims(findings: Findings) -> list[Claim]:
    """Every claim, with its verdict."""
    return [_error_of_chain(findings), _promotion(findings), *_narrow_sums(findings), *_claims_of_training(findings)]


def _error_of_chain(findings: Findings) -> Claim:
    length = findings.settings.lengths[findings.usual]
    normal, positive = (mean(findings.sums("largest", kind, CHAIN, findings.usual)) for kind in (NORMAL, POSITIVE))
    return Claim(
        _DEEPSEEK,
        "a product of two random matrices with K = 4096 has a maximum relative error of nearly 2 %",
        f"{length} products: {_share(normal)} with normal operands, {_share(positive)} with positive ones",
        False if positive.high < 0.02 or normal.low > 0.02 else None,
        test="the largest error of 1024 sums in units of their root mean square",
        rule="no if 2 % is not between normal and positive operands; never yes, because the paper does not say which distribution its "
        "matrices have",
        power=f"{_least(normal)} and {_least(positive)} of the sums",
    )


def _promotion(findings: Findings) -> Claim:
    promoted, chain = ([findings.growth(kind, name) for kind in (NORMAL, POSITIVE)] for name in (PROMOTED, CHAIN))
    stops = all(found.high < GROWN for found in promoted) and all(found.low > GROWN for found in chain)
    return Claim(
        _DEEPSEEK,
        "promotion every 128 products significantly improves precision",
        f"normal and positive: promoted {promoted[0]:.2f} and {promoted[1]:.2f} times, chain {chain[0]:.1f} and {chain[1]:.0f} times",
        True if stops else False if any(found.low > GROWN for found in promoted) else None,
        test=f"the growth of the error from {findings.settings.lengths[0]} to {findings.settings.lengths[-1]} products",
        rule=f"less than {GROWN:g} times with promotion and more without: an error that does not grow is that of 128 products",
        power=f"a growth of {max(found.high / found.value for found in promoted):.2f} times",
    )


def _narrow_sums(findings: Findings) -> list[Claim]:
    last = findings.settings.lengths[-1]
    end, chunks = mean(findings.sums("sum", MEAN_ONE, NARROW, -1)), mean(findings.sums("error", MEAN_ONE, WANG, -1))
    return [
        Claim(
            _WANG,
            "a sum in 1-6-9 of numbers with mean one and standard deviation one stops growing at 4096",
            f"{last} numbers sum to {end:.0f}",
            None if last < 2 * END else abs(end.value / END - 1) < NEAR_END,
            test="the mean of such sums",
            rule=f"within {NEAR_END:.0%} of 4096, of numbers that sum to more than twice as much",
            power=f"{NEAR_END:.0%} of the sum",
        ),
        Claim(
            _WANG,
            "with chunks of 64 the sum follows the exact one",
            f"{last} numbers: off by {_share(chunks)}",
            True if chunks.high < SMALL else False if chunks.low > SMALL else None,
            test="the root mean square of errors; chunks and their sum are in 1-6-9",
            rule=f"below {SMALL:.0%}, half the error for which DeepSeek-V3 promotes",
            power=_least(chunks),
        ),
    ]


def _claims_of_training(findings: Findings) -> list[Claim]:
    control = findings.lost(CONTROL)
    rows = (
        (_DEEPSEEK, "the H100's chain constrains the accuracy of training", CHAIN, True),
        (_DEEPSEEK, "promotion every 128 products removes this: as with FP32 sums", PROMOTED, False),
        (_WANG, "training with sums in 1-6-9 loses accuracy", NARROW, True),
        (_BOTH, "with chunks of 64, as with FP32 sums", CHUNKED, False),
    )
    test = "the loss on held-out text relative to FP32 sums with the same seed"
    claims = [
        Claim(
            "the study's own control",
            "sums that end at 448 train worse",
            f"loss {percent_text(control)}",
            above(control, SAME),
            test=test,
            rule=f"yes if the interval is above {SAME:.2%}, no if it is below; if not yes, nothing follows from the training",
            power=_least(control),
        )
    ]
    for source, paper, name, harm in rows:
        found = findings.lost(name)
        worse = True if found.low > SAME else False if found.high < SAME and findings.longest >= LENGTH else None
        decided = worse is not None and control.low > SAME
        rule = (
            f"worse if the interval is above {SAME:.2%}, and not worse if it is below, with sums of at least {LENGTH} products; "
            f"DeepSeek-V3 takes less for the randomness of training"
        )
        agrees = (worse is harm) if decided else None
        claims.append(Claim(source, paper, f"loss {percent_text(found)}", agrees, test=test, rule=rule, power=_least(found)))
    return claims


def _least(found: Interval) -> str:
    """The smallest effect that would have been found, in percent."""
    return f"{100 * found.detects:.2g} %"


def _share(found: Interval) -> str:
    return f"{found * 100:.2f} %"
