"""The verdicts of the study `accumulator`; `wording/accumulator.ini` has the claims, their tests and rules."""

from __future__ import annotations

from qsim.studies.accumulator import CHAIN, CHUNKED, CONTROL, NARROW, PROMOTED
from qsim.studies.accumulator.dot_products import MEAN_ONE, NORMAL, POSITIVE, WANG
from qsim.studies.accumulator.findings import LENGTH, SAME, SumFindings
from qsim.studies.report import Claim
from qsim.studies.statistics import above, below, mean

#: An error that grows by less than this factor from the shortest sums to the longest does not grow; one percent of error is small.
GROWN, SMALL = 2.0, 0.01
#: Where sums of numbers of mean one in 1-6-9 end, within this share.
END, NEAR_END = 4096.0, 0.05
#: Claims about training: source, claim, accumulator, and whether it is said to do harm.
_TRAINING = (
    ("DeepSeek-V3, Section 3.3.2", "the H100's chain constrains the accuracy of training", CHAIN, True),
    ("DeepSeek-V3, Section 3.3.2", "promotion every 128 products removes this: as with FP32 sums", PROMOTED, False),
    ("Wang et al. 2018", "training with sums in 1-6-9 loses accuracy", NARROW, True),
    ("Wang et al. 2018, Sun et al. 2019", "with chunks of 64, as with FP32 sums", CHUNKED, False),
)


def claims(found: SumFindings) -> list[Claim]:
    """Every claim, with its verdict."""
    return [_error_of_chain(found), _promotion(found), *_narrow_sums(found), *_claims_of_training(found)]


def _error_of_chain(found: SumFindings) -> Claim:
    normal, positive = (mean(found.sums("largest", kind, CHAIN, found.usual)) for kind in (NORMAL, POSITIVE))
    agrees = False if positive.high < 0.02 or normal.low > 0.02 else None
    return found.claim("chain", agrees, length=found.settings.lengths[found.usual], normal=normal, positive=positive)


def _promotion(found: SumFindings) -> Claim:
    promoted, chain = ([found.growth(kind, name) for kind in (NORMAL, POSITIVE)] for name in (PROMOTED, CHAIN))
    stops = all(each.high < GROWN for each in promoted) and all(each.low > GROWN for each in chain)
    agrees = True if stops else False if any(each.low > GROWN for each in promoted) else None
    least = max(each.high / each.value for each in promoted)
    return found.claim("promotion", agrees, promoted=promoted, chain=chain, least=least, grown=GROWN, last=found.settings.lengths[-1])


def _narrow_sums(found: SumFindings) -> list[Claim]:
    last = found.settings.lengths[-1]
    end, chunks = mean(found.sums("sum", MEAN_ONE, NARROW, -1)), mean(found.sums("error", MEAN_ONE, WANG, -1))
    ends = None if last < 2 * END else abs(end.value / END - 1) < NEAR_END
    return [
        found.claim("end", ends, last=last, end=end, near=NEAR_END),
        found.claim("chunks", below(chunks, SMALL), last=last, off=chunks, small=SMALL),
    ]


def _claims_of_training(found: SumFindings) -> list[Claim]:
    control = found.lost(CONTROL)
    claims = [found.claim("control", above(control, SAME), lost=control, same=SAME)]
    for source, paper, name, harm in _TRAINING:
        lost = found.lost(name)
        worse = True if lost.low > SAME else False if lost.high < SAME and found.longest >= LENGTH else None
        agrees = (worse is harm) if worse is not None and control.low > SAME else None
        claims.append(found.claim("training", agrees, source=source, paper=paper, lost=lost, same=SAME, length=LENGTH))
    return claims
