"""Results of other groups that emulation can test: rings, narrow sums, rollouts, stalled descents, and layer norms in MX formats."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from qsim.studies.choices import choice, require_increasing
from qsim.studies.study import Run, TrialStudy

#: The measurements.
RING, SUMS, ROLLOUT, DESCENT, STUDENT = "ring", "sums", "rollout", "descent", "student"
#: What a student rounds: nothing, its products, and the affine parameters of its layer norms as well.
FULL, PRODUCTS, ALL = "float32", "products", "products and layer norms"
_FORMAT = "mxfp8"


@dataclass(frozen=True)
class Settings:
    """The settings of the study."""

    ranks: tuple[int, ...] = choice((8, 16, 32, 64, 128, 256, 512), "ranks of a ring, from few to many")
    bits: tuple[int, ...] = choice((2, 3, 4, 5), "mantissa bits of narrow sums, from few to many")
    steps: int = choice(60, "updates of the GPT whose rollout is measured")
    descents: int = choice(4000, "steps of a descent")
    rates: tuple[float, ...] = choice((4.0, 16.0, 64.0), "learning rates of descents, from low to high")
    updates: int = choice(600, "updates of a student")
    rate: float = choice(0.01, "learning rate of a student")
    seeds: int = choice(8, "number of seeds")


class ReplicationsStudy(TrialStudy[Settings]):
    """Repeat five published results on a CPU."""

    name = "replications"
    question = "Do five results of other groups repeat in emulation?"
    source = (
        "Megatron-LM, issue 6199; Sakr et al., arXiv 1901.06588; Qi et al., arXiv 2510.26788; Chmiel et al., arXiv 2505.19115; "
        "Su et al., arXiv 2506.20752"
    )
    settings = Settings

    #: Few ranks and bits, few steps.
    quick_form = Settings(ranks=(8, 32), bits=(1, 2), steps=4, descents=60, rates=(64.0,), updates=10, seeds=2)

    def check(self, settings: Settings) -> None:
        """Ranks, bits and rates in order."""
        for name in ("ranks", "bits", "rates"):
            require_increasing(settings, name, 1 if name == "rates" else 2)

    def ways(self, settings: Settings, seed: int) -> Iterator[dict[str, Any]]:
        """Every measurement; values that do not apply are zero or empty."""
        unused = {"sizes": (), "rounds": "", "steps": 0, "rate": 0.0}
        yield {**unused, "what": RING, "sizes": settings.ranks}
        yield from ({**unused, "what": SUMS, "sizes": (bits,)} for bits in settings.bits)
        yield {**unused, "what": ROLLOUT, "steps": settings.steps}
        yield from ({**unused, "what": DESCENT, "steps": settings.descents, "rate": rate} for rate in settings.rates)
        for rounds in (FULL, PRODUCTS, ALL):
            yield {**unused, "what": STUDENT, "rounds": rounds, "steps": settings.updates, "rate": settings.rate}

    def work(self, run: Run) -> float:
        """Seconds, about."""
        per_step = {ROLLOUT: 0.13, DESCENT: 0.0015, STUDENT: 0.01 if run.rounds == FULL else 0.03}
        return float(0.5 + per_step.get(run.what, 0.0) * run.steps + (4e-4 * 64 * 4 ** run.sizes[0] if run.what == SUMS else 0.0))

    def measure(self, run: Run, device: torch.device) -> dict[str, Any]:
        """See the functions in `measurements`."""
        from qsim.studies.replications import measurements

        if run.what == RING:
            return measurements.ring(run.sizes, run.seed, device)
        if run.what == SUMS:
            return measurements.narrow_sums(run.sizes[0], run.seed, device)
        if run.what == ROLLOUT:
            return measurements.rollout(run.steps, run.seed, device)
        if run.what == DESCENT:
            return measurements.descent(run.rate, run.steps, run.seed, device)
        products, affine = "" if run.rounds == FULL else _FORMAT, _FORMAT if run.rounds == ALL else ""
        return measurements.student(products, affine, run.steps, run.rate, run.seed, device)
