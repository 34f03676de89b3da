"""Steps of weights to a level, with updates smaller than the distance between levels: exact, and rounded stochastically.

Everything is in units of that distance, and step `t = 0, 1, …` adds `p[t] <= 1`. A weight that is rounded stochastically goes to the next
level with probability `p[t]`, independently of all other steps; `docs/derivations.md` derives the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

CONSTANT, HALVED, HARMONIC, LINEAR = "constant", "halved", "harmonic", "linear"
#: Updates are multiples of this. Float32 adds such numbers to a level of bfloat16 exactly.
_GRAIN = 2.0**-16


@dataclass(frozen=True)
class UpdateSchedule:
    """Updates of a weight at each step, in units of the distance between levels.

    Attributes:
        kind: `CONSTANT`; `HALVED` at each step; `HARMONIC`, the first one by the number of the step; or `LINEAR` down to zero.
        first: The first update.
        floor: The smallest update.
        length: The step at which linear updates would reach zero.
    """

    kind: str
    first: float
    floor: float = 0.0
    length: int = 0

    def __call__(self, steps: int) -> Array:
        """The updates of the first steps.

        Example:
            >>> UpdateSchedule(HALVED, 0.5, floor=0.125)(5).tolist()
            [0.5, 0.25, 0.125, 0.125, 0.125]
        """
        step = np.arange(steps, dtype=np.float64)
        decays: dict[str, Callable[[], Array]] = {
            CONSTANT: lambda: np.ones(steps),
            HALVED: lambda: 0.5**step,
            HARMONIC: lambda: 1 / (1 + step),
            LINEAR: lambda: 1 - step / self.length,
        }
        found: Array = np.round(np.maximum(self.first * decays[self.kind](), self.floor) / _GRAIN) * _GRAIN
        return found


def exact_steps(updates: Array, levels: int) -> int:
    """The number of steps that exact weights take; 0 if they do not arrive.

    Example:
        >>> exact_steps(UpdateSchedule(HARMONIC, 0.5)(10), 1)
        4
    """
    there = np.cumsum(updates) >= levels - 1e-9
    return int(there.argmax()) + 1 if there.any() else 0


def late(updates: Array, levels: int) -> Array:
    """The probability that a stochastically rounded weight has not arrived after 0, 1, … steps, up to the number of updates.

    Example:
        >>> late(UpdateSchedule(CONSTANT, 0.25)(3), 1).tolist()
        [1.0, 0.75, 0.5625, 0.421875]
    """
    gone = np.zeros(levels)
    gone[0] = 1.0
    found = [1.0]
    for update in updates:
        onward = gone * update
        gone -= onward
        gone[1:] += onward[:-1]
        found.append(float(gone.sum()))
    return np.array(found)


def step_moments(late: Array) -> tuple[float, float]:
    """The mean and the variance of the number of steps, limited to `len(late) - 1`."""
    # The sum over t of P(T > t), and of (2 t + 1) P(T > t).
    mean = float(late[:-1].sum())
    return mean, float(((2 * np.arange(len(late) - 1) + 1) * late[:-1]).sum()) - mean**2
