"""Counting the weight updates that rounding cancels: Appendix D.3 of *Revisiting BFloat16 Training*."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import count
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from qsim.diagnostics.async_copy import HostCopy, is_capturing
from qsim.diagnostics.collecting import aside
from qsim.diagnostics.learning_rates import is_unbiased, needed_rate
from qsim.diagnostics.updates import Before, UpdateCounts, Updates, counted, kept_beside, total_of
from qsim.formats.base import check_integer
from qsim.random.shards import local
from qsim.text.files import write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def cancelled_updates(optimizer: torch.optim.Optimizer, every: int = 1, *, model: nn.Module | None = None) -> CancelledUpdates:
    """Count, in every `every`-th step of an optimizer, the updates that leave their weight unchanged.

    An update counts if the exact update is not zero: if the learning rate is not, and the gradient, the momentum (`momentum_buffer`,
    `exp_avg`), or the weight to decay is not. It is cancelled if the step leaves the weight's value unchanged. The loss depends on how
    weights are updated. With round-to-nearest, a cancelled update is lost. With stochastic rounding, it is lost in this step, and the mean
    over many is right. With Kahan summation or an `accumulator`, it is `carried` if the compensation or the copy has changed.

    Works with `qsim.optim`'s optimizers, with `Quantized`, and with torch's own; for others it uses the gradient, the weight decay and
    states of those two names. In a sampled step the weights are stored twice. Nothing waits for the device until counts are read; steps
    that are captured in a CUDA graph are not counted.

    Args:
        optimizer: The optimizer.
        every: The sampling interval in steps; the first step is sampled.
        model: The source of parameter names; otherwise they have the names that the optimizer was given, or their numbers.

    Raises:
        TypeError: If `optimizer` is not an optimizer.

    Example:
        >>> import torch, qsim
        >>> w = torch.nn.Parameter(torch.tensor([1.0, 1.0, 2.0**-9], dtype=torch.bfloat16))
        >>> optimizer = qsim.optim.SGD([w], lr=2**-10, update="nearest")
        >>> with qsim.diagnostics.cancelled_updates(optimizer) as cancelled:
        ...     w.grad = torch.tensor([1.0, 0.0, 1.0], dtype=torch.bfloat16)
        ...     optimizer.step()
        >>> cancelled.shares
        {'0': [(0, 0.5)]}
    """
    return CancelledUpdates(optimizer, every, model)


class CancelledUpdates:
    """The counts of `cancelled_updates` so far.

    Example:
        >>> import torch, qsim
        >>> w = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
        >>> cancelled = qsim.diagnostics.cancelled_updates(qsim.optim.SGD([w], lr=2**-10, update="nearest"))
        >>> cancelled.shares
        {}
        >>> cancelled.close()
    """

    def __init__(self, optimizer: torch.optim.Optimizer, every: int = 1, model: nn.Module | None = None) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"cancelled_updates: optimizer must be a torch.optim.Optimizer, got {optimizer!r}")
        self.every = check_integer("cancelled_updates", "every", every, 1, 2**62)
        self._optimizer, self._steps = optimizer, 0
        self._names: dict[Tensor, str] = {} if model is None else {parameter: name for name, parameter in model.named_parameters()}
        self._before: dict[Tensor, Before] = {}
        self._pending: list[tuple[int, list[tuple[list[tuple[str, int, bool]], HostCopy]]]] = []
        self._found: list[Updates] = []
        self._handles = [optimizer.register_step_pre_hook(self._begin), optimizer.register_step_post_hook(self._end)]

    @aside()
    def _begin(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._before.clear()
        if self._steps % self.every or is_capturing():
            return
        for parameter in _parameters(optimizer):
            kept = kept_beside(optimizer, parameter)
            weight = local(parameter.detach()).clone()
            self._before[parameter] = Before(weight, None if kept is None else local(kept.detach()).clone())

    @aside()
    def _end(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if is_capturing():
            return
        if self._before:
            self._count(optimizer)
            self._before.clear()
        self._steps += 1

    def _count(self, optimizer: torch.optim.Optimizer) -> None:
        names = _names(optimizer) | self._names
        facts: dict[torch.device, list[tuple[str, int, bool]]] = {}
        counts: dict[torch.device, list[Tensor]] = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                # A parameter without a gradient is left alone; one may have come with a closure.
                before = self._before.get(parameter)
                if parameter.grad is not None and before is not None:
                    # One copy to the host has the bits of the rate, too.
                    rate = needed_rate(optimizer, group, parameter, before.weight).view(torch.int32).view(1)
                    row = torch.cat([counted(optimizer, group, parameter, before), rate.long()])
                    counts.setdefault(row.device, []).append(row)
                    facts.setdefault(row.device, []).append((names[parameter], before.weight.numel(), is_unbiased(optimizer, group)))
        self._pending.append((self._steps, [(facts[device], HostCopy(torch.stack(rows))) for device, rows in counts.items()]))
        self._arrive(wait=False)

    def _arrive(self, wait: bool) -> None:
        while self._pending and (wait or all(copy.is_here for _, copy in self._pending[0][1])):
            step, parts = self._pending.pop(0)
            for facts, copy in parts:
                rows = copy.read()
                rates = rows[:, 3].int().view(torch.float32).tolist()
                for (name, elements, unbiased), (updates, cancelled, carried, _), rate in zip(facts, rows.tolist(), rates, strict=True):
                    self._found.append(Updates(name, step, elements, updates, cancelled, carried, rate, unbiased))

    def in_step(self, step: int) -> tuple[Updates, ...]:
        """The counts of one step that have arrived from the device."""
        return tuple(entry for entry in self._found if entry.step == step)

    @property
    def updates(self) -> UpdateCounts:
        """All counts so far, by step and parameter; this waits for the device."""
        self._arrive(wait=True)
        return UpdateCounts(tuple(self._found))

    @property
    def shares(self) -> Mapping[str, list[tuple[int, float]]]:
        """The sampled steps and the share of cancelled updates, for each parameter."""
        shares: dict[str, list[tuple[int, float]]] = {}
        for entry in self.updates:
            shares.setdefault(entry.parameter, []).append((entry.step, entry.share))
        return shares

    @property
    def totals(self) -> list[Updates]:
        """Counts of all parameters together, for each sampled step."""
        updates = self.updates
        return [total_of(updates.filter(step=step)) for step in dict.fromkeys(entry.step for entry in updates)]

    def table(self, by: str | None = None, rows: int | None = None) -> str:
        """Shares of the last sampled step, as a human-readable table; see `UpdateCounts.table`."""
        updates = self.updates
        return updates.filter(step=updates[-1].step).table(by, rows) if updates else "no step yet"

    def __str__(self) -> str:
        return self.table()

    def write(self, path: str) -> None:
        """Write all counts to a file, one JSON line each. The file is replaced atomically."""
        write_whole(path, "".join(f"{json.dumps(row, allow_nan=False)}\n" for row in self.updates.rows()))

    def plot(self) -> Figure:
        """Draw the share of updates that are cancelled over the steps, for each parameter and for all."""
        from qsim.diagnostics.plots import cancelled

        return cancelled(self.shares, [(entry.step, entry.share) for entry in self.totals])

    def close(self) -> None:
        """Stop counting and remove all hooks from the optimizer. The counts stay."""
        for handle in self._handles:
            handle.remove()
        self._before.clear()
        self._arrive(wait=True)

    def __enter__(self) -> CancelledUpdates:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _names(optimizer: torch.optim.Optimizer) -> dict[Tensor, str]:
    """The names that an optimizer was given for its parameters, or their numbers."""
    numbers = count()
    pairs = (zip(group["params"], group.get("param_names", numbers), strict=False) for group in optimizer.param_groups)
    return {parameter: str(name) for group in pairs for parameter, name in group}


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
