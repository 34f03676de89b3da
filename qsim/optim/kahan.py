"""Kahan summation of updates, as an option of optimizers."""

from __future__ import annotations

from dataclasses import dataclass

from qsim.rounding import NEAREST, Rounding, Stochastic
from qsim.text.parsing import read_call


@dataclass(frozen=True, init=False, repr=False)
class Kahan:
    """Kahan summation: what rounding adds to a weight is stored in a compensation, and taken off again in the next step.

    `update="kahan"` is `Kahan()`. With `Kahan("stochastic")` the weight itself is rounded stochastically, so that a single weight is right
    on average, too, and the compensation takes off the noise: *Revisiting BFloat16 Training*, appendix D.3.

    Args:
        rounding: How the sum is rounded: `"nearest"`, `"stochastic"` or a `qsim.Stochastic`.

    Example:
        >>> import torch, qsim
        >>> w = torch.nn.Parameter(torch.ones(1000, dtype=torch.bfloat16))
        >>> optimizer = qsim.optim.SGD([w], lr=2**-12, update=qsim.optim.Kahan("stochastic"), seed=0)
        >>> for _ in range(4):
        ...     w.grad = torch.ones_like(w)
        ...     optimizer.step()
        >>> compensation = optimizer.state[w]["compensation"]
        >>> torch.unique(w.float() - compensation.float())  # every weight with its compensation has moved by 4 * 2**-12
        tensor([0.9990], grad_fn=<Unique2Backward0>)
    """

    rounding: Rounding

    def __init__(self, rounding: str | Rounding = "nearest") -> None:
        found = {"nearest": NEAREST, "stochastic": Stochastic()}.get(rounding, rounding) if isinstance(rounding, str) else rounding
        if found != NEAREST and not isinstance(found, Stochastic):
            raise ValueError(f"Kahan: rounding must be 'nearest', 'stochastic' or a qsim.Stochastic(bits, correction), got {rounding!r}")
        object.__setattr__(self, "rounding", found)

    def __repr__(self) -> str:
        return f"Kahan({'' if self.rounding == NEAREST else repr(self.rounding)})"


def read(text: str) -> Kahan | None:
    """The summation that a text spells, `"kahan"` or a call such as `"Kahan(Stochastic(bits=8))"`; `None` if it spells none."""
    found = Kahan() if text == "kahan" else read_call(text, {"Kahan": Kahan, "Stochastic": Stochastic})
    return found if isinstance(found, Kahan) else None
