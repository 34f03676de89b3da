"""The random bits of optimizer steps."""

from __future__ import annotations

from typing import NamedTuple

from qsim.random import philox, streams
from qsim.random.noise import Noise


class StepNoise(NamedTuple):
    """The random bits of a step.

    Attributes:
        seed: The seed; `None` if nothing is drawn.
        step: The number of the step.
    """

    seed: int | None
    step: int

    def stream(self, role: str, number: int, evaluation: int = 0) -> int:
        """The stream of a role of a parameter, at one evaluation of a closure."""
        return streams.stream("Quantized", role, number, self.step, evaluation) if self.seed is not None else 0


def update_noise(seed: int, step: int, number: int) -> Noise:
    """Return the random bits with which an optimizer here rounds a new weight, for `qsim.fpu` or `qsim.quantize`.

    Args:
        seed: The optimizer's seed.
        step: Number of the step, starting at 1.
        number: The parameter's number in the optimizer, starting at 0.

    Example:
        >>> import torch, qsim
        >>> w = torch.nn.Parameter(torch.ones(5))
        >>> w.grad = torch.full((5,), 2.0**-9)
        >>> noise = qsim.optim.update_noise(seed=7, step=1, number=0)
        >>> with torch.no_grad(), qsim.fpu("bf16", "stochastic", seed=noise):
        ...     written_out = w - w.grad
        >>> qsim.optim.SGD([w], lr=1.0, format="bf16", update="stochastic", seed=7).step()
        >>> torch.equal(w, written_out)
        True
    """
    words = philox.philox4x32(_words(step) + _words(streams.stream("optimizer", number) & ~3), _words(seed))
    return Noise(_signed(words[0] | words[1] << 32), _signed(words[2] | words[3] << 32))


def _words(x: int) -> tuple[int, int]:
    return x & 0xFFFFFFFF, x >> 32 & 0xFFFFFFFF


def _signed(x: int) -> int:
    return x - 2**64 if x >= 2**63 else x
