"""Steps of weights to a level, with updates smaller than the distance between levels: exact, and rounded stochastically.

Everything is in units of that distance. Step `t = 0, 1, …` adds `p[t] <= 1`. Exact weights have gone `k` levels after the first step at
which the sum of updates reaches `k`. A weight that is rounded stochastically is always on a level: an update of `p[t]` would take an
exact weight that fraction of the way to the next level, and rounding moves it there with this probability, or else leaves it,
independently of all other steps.

So, for the next level, the number of steps `T` is greater than `t` with probability `S(t) = (1 - p[0]) … (1 - p[t - 1])`, and its mean is
`E T = S(0) + S(1) + …`:

- Constant updates `p`: `S(t) = (1 - p)**t` and `E T = 1 / p`. Exact updates take as many steps if `1 / p` is an integer. Rounding costs
  nothing on average, but the standard deviation is `sqrt(1 - p) / p`: as large as the mean itself.
- Updates that decay to a floor `f` after `n` steps: `E T = S(0) + … + S(n - 1) + S(n) / f`. A weight that has not arrived by then, which
  has probability `S(n)`, needs `1 / f` more steps on average. If updates start at 1/2 and are halved at each step, the exact weight
  arrives after one step at the floor, but 29 % of the stochastic ones are late.
- Updates that decay to zero: the mean can be infinite. With `p[t] = 1 / (2 * (t + 1))`, exact weights arrive after 4 steps. But `S(t)` is
  `binomial(2 * t, t) / 4**t`, about `1 / sqrt(pi * t)`, whose sum diverges.

For `k` levels, let `q(t, j)` be the probability of having gone `j < k` levels after `t` steps: `q(t + 1, j)` is `q(t, j) * (1 - p[t]) +
q(t, j - 1) * p[t]`, `S(t)` is the sum over `j`, and the rest is as before. For constant updates `E T = k / p`. Up to a last step `h`, `E
min(T, h) = S(0) + … + S(h - 1)`, which is always finite and can be measured.
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
class Updates:
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
            >>> Updates(HALVED, 0.5, floor=0.125)(5).tolist()
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
        >>> exact_steps(Updates(HARMONIC, 0.5)(10), 1)
        4
    """
    there = np.cumsum(updates) >= levels - 1e-9
    return int(there.argmax()) + 1 if there.any() else 0


def late(updates: Array, levels: int) -> Array:
    """The probability that a stochastically rounded weight has not arrived after 0, 1, … steps, up to the number of updates.

    Example:
        >>> late(Updates(CONSTANT, 0.25)(3), 1).tolist()
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


def moments(late: Array) -> tuple[float, float]:
    """The mean and the variance of the number of steps, limited to `len(late) - 1`."""
    # The sum over t of P(T > t), and of (2 t + 1) P(T > t).
    mean = float(late[:-1].sum())
    return mean, float(((2 * np.arange(len(late) - 1) + 1) * late[:-1]).sum()) - mean**2
