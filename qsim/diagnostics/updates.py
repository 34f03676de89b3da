"""Outcomes of the updates of one parameter in one step, counted on its device."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from qsim.optim import Quantized
from qsim.random.shards import local
from qsim.text.records import Records, Values, plain

#: Momentum states of a parameter, by the names that torch's and qsim's optimizers use.
DIRECTIONS = ("momentum_buffer", "exp_avg")
#: What is counted, in the order of the fields.
COUNTED = ("elements", "updates", "cancelled", "carried")


@dataclass(frozen=True)
class Updates:
    """Outcomes of the updates of one parameter in one step.

    Attributes:
        parameter: Its name, or its number in the optimizer.
        step: Number of the step, starting at 0.
        elements: Number of its elements.
        updates: Number of elements whose exact update is not zero.
        cancelled: Number of these updates whose weight did not change.
        carried: Number of cancelled updates that are stored next to the weight: in Kahan's compensation, or in an accumulator.
        needed_rate: Learning rate at which half of the updates would change their weight with round-to-nearest; NaN if not known.
        is_unbiased: Whether weights are rounded stochastically, so that updates have the right mean although many are cancelled.

    Example:
        >>> from qsim.diagnostics import Updates
        >>> entry = Updates("0.weight", step=0, elements=8, updates=4, cancelled=2, carried=1)
        >>> entry.share, entry.lost
        (0.5, 0.25)
    """

    parameter: str
    step: int
    elements: int
    updates: int
    cancelled: int
    carried: int
    needed_rate: float = math.nan
    is_unbiased: bool = False

    @property
    def share(self) -> float:
        """Share of updates that were cancelled; NaN without updates."""
        return self.cancelled / self.updates if self.updates else math.nan

    @property
    def lost(self) -> float:
        """Share of updates that were cancelled and are not carried."""
        return (self.cancelled - self.carried) / self.updates if self.updates else math.nan

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain strings and numbers for JSON; a share without elements is `None`."""
        facts = {name: getattr(self, name) for name in ("parameter", "step", *COUNTED)}
        return facts | {"share": plain(self.share), "lost": plain(self.lost)}


@dataclass(frozen=True)
class UpdateCounts(Records[Updates]):
    """Outcomes of updates, by step and parameter; prints as a table, which ends with their sum.

    Example:
        >>> from qsim.diagnostics import UpdateCounts, Updates
        >>> print(UpdateCounts((Updates("0.weight", 0, 8, 4, 2, 1), Updates("0.bias", 0, 2, 2, 2, 0))))
        step 0
        parameter  elements  updates  cancelled  carried     lost
        0.weight          8        4    50.00 %  25.00 %  25.00 %
        0.bias            2        2      100 %      0 %    100 %
        all              10        6    66.67 %  16.67 %  50.00 %
    """

    COLUMNS: ClassVar[Values] = {
        **{name: name for name in ("parameter", "elements", "updates")},
        "cancelled": "share",
        "carried": lambda entry: entry.carried / (entry.updates or math.nan),
        "lost": "lost",
    }
    RIGHT: ClassVar[tuple[str, ...]] = tuple(COLUMNS)[1:]
    KEY: ClassVar[tuple[str, ...]] = ("parameter",)
    NAME: ClassVar[str] = "updates"
    LOSSES: ClassVar[Values] = {"cancelled": "share", "lost": "lost"}

    def _above(self) -> list[str]:
        steps = dict.fromkeys(str(entry.step) for entry in self)
        return [f"step {', '.join(steps)}"]

    def totals(self) -> list[Updates]:
        """The counts of all parameters together."""
        return [total_of(self)]


def total_of(entries: UpdateCounts) -> Updates:
    """The counts of some updates together, under the step of the last one."""
    return Updates("all", entries[-1].step, *(sum(getattr(entry, name) for entry in entries) for name in COUNTED))


@dataclass(frozen=True)
class Before:
    """The state before a step."""

    weight: Tensor
    kept: Tensor | None


def kept_beside(optimizer: torch.optim.Optimizer, parameter: Tensor) -> Tensor | None:
    """The tensor next to a weight that stores updates too small for the weight."""
    if isinstance(optimizer, Quantized):
        copy = optimizer.copies.get(parameter)
        if copy is not None:
            return copy
    kept = optimizer.state[parameter].get("compensation") if parameter in optimizer.state else None
    return kept if isinstance(kept, Tensor) else None


def counted(optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: Tensor, before: Before) -> Tensor:
    """The numbers of updates, cancelled updates and carried ones of a parameter, on its device."""
    moves = _moves(optimizer, group, parameter, before.weight)
    cancelled = moves & (local(parameter.detach()) == before.weight)
    kept, earlier = kept_beside(optimizer, parameter), before.kept
    if kept is not None and earlier is None:
        # The first step created it: a compensation of zeros, or a copy of the weight.
        earlier = before.weight if isinstance(optimizer, Quantized) else torch.zeros_like(before.weight)
    carried = torch.zeros_like(cancelled) if kept is None or earlier is None else cancelled & (local(kept.detach()) != earlier)
    return torch.stack([moves.sum(), cancelled.sum(), carried.sum()])


def _moves(optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: Tensor, weight: Tensor) -> Tensor:
    """Where the exact update of a parameter is not zero."""
    assert parameter.grad is not None
    gradient = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
    moves = local(gradient.detach()) != 0
    for name in DIRECTIONS:
        state = optimizer.state[parameter].get(name) if parameter in optimizer.state else None
        if isinstance(state, Tensor) and state.shape == parameter.shape:
            moves = moves | (local(state.detach()) != 0)
    moves = moves | (_is_not_zero(group.get("weight_decay", 0.0), weight) & (weight != 0))
    moves = moves & _is_not_zero(group.get("lr", 1.0), weight)
    # If a scaler has found infinities, the step changes nothing.
    found_inf = getattr(optimizer, "found_inf", None)
    return moves if found_inf is None else moves & ~_is_not_zero(found_inf, weight)


def _is_not_zero(number: float | Tensor, weight: Tensor) -> Tensor:
    """Whether a number is not zero, computed on the weight's device, where a tensor may already be."""
    if isinstance(number, Tensor):
        return number.to(weight.device, non_blocking=True) != 0
    return torch.full((), number != 0, device=weight.device)
