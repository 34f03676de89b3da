"""Whose random bits `Quantized` takes."""

from __future__ import annotations

from typing import NamedTuple

from qsim import random


class Noise(NamedTuple):
    """Whose random bits a step takes.

    Attributes:
        seed: The seed; `None` if nothing is drawn.
        step: The number of the step.
    """

    seed: int | None
    step: int

    def stream(self, role: str, number: int, evaluation: int = 0) -> int:
        """The stream of what a parameter has in a role, at one of the evaluations of a closure."""
        return random.stream("Quantized", role, number, self.step, evaluation) if self.seed is not None else 0
