"""Seeds that are added until the verdicts are decided, with intervals that stay valid although the results decide when to stop."""

from __future__ import annotations

from dataclasses import dataclass

from qsim.studies.statistics import CONFIDENCE


@dataclass(frozen=True)
class Looks:
    """The numbers of seeds, fixed in advance, after which verdicts are looked at.

    Whoever looks repeatedly and stops at the first interval that decides finds effects that do not exist more often than one time in
    twenty. With `k` looks, each interval therefore has an error probability of 5 % / k: by the union bound, the probability that any of
    them misses the true value is at most 5 %, whatever the rule by which one stops.

    Attributes:
        seeds: The numbers, in increasing order; empty: one look, at as many seeds as the settings say.

    Example:
        >>> Looks.doubling(6, 20)
        Looks(seeds=(6, 12, 20))
        >>> f"{Looks.doubling(6, 20).confidence:.3f}"
        '0.983'
    """

    seeds: tuple[int, ...] = ()

    @classmethod
    def doubling(cls, first: int, most: int) -> Looks:
        """Looks at twice as many seeds each time, until the budget is spent.

        Raises:
            ValueError: If the budget is not larger than the first look.
        """
        if most <= first:
            raise ValueError(f"most seeds: must be above the {first} seeds of the first look; got {most}")
        found = [first]
        while found[-1] < most:
            found.append(min(2 * found[-1], most))
        return cls(tuple(found))

    @property
    def confidence(self) -> float:
        """The confidence of each interval."""
        return 1 - (1 - CONFIDENCE) / max(1, len(self.seeds))

    def described(self, seeds: int) -> str:
        """The rule, and the number of seeds after which it ended."""
        *others, last = map(str, self.seeds)
        return (
            f"Seeds were added until every claim was decided, at most {last}: the looks, fixed in advance, are at {', '.join(others)} and "
            f"{last} seeds, and it ended at {seeds}. Each interval has a confidence of {100 * self.confidence:.3g} %, so that with a "
            f"probability of at least {100 * CONFIDENCE:g} % the intervals of one quantity hold at all looks."
        )


ONE_LOOK = Looks()
