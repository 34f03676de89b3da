"""Comparing two runs: two models, a model and a trace, or two traces."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from qsim.diagnostics.traces.calls import OperationCall
from qsim.diagnostics.traces.comparing import Comparer
from qsim.diagnostics.traces.comparison import RunComparison
from qsim.diagnostics.traces.run import MakesOptimizer, StepLoss, TracedStep, TraceWriter, same_streams, stepped
from qsim.diagnostics.traces.trace import Trace
from qsim.formats.base import check_flag

#: A model, a trace, or the file or folder of one.
Run = nn.Module | Trace | str | os.PathLike[str]


def compare(
    a: Run,
    b: Run,
    batch: Any = None,
    loss: StepLoss | None = None,
    *,
    optimizer: MakesOptimizer | None = None,
    backward: bool = True,
    seed: int = 0,
    tolerance: float = 0.0,
) -> RunComparison:
    """Compare each tensor of two runs of a training step, and name the first that differs.

    Runs are models, or traces that `qsim.diagnostics.trace` has recorded, on this machine or another: a float32 model and its conversion,
    two recipes, two accumulators, a checkpoint before and after, a CPU and a GPU. Operations are matched by the names of modules and
    functions; a class derived from a layer of torch, which may compute anything, counts as the functions that it calls, so it matches no
    layer of the other run. Every operation of run b is repeated with run a's inputs and gradients, which splits a difference into what
    arises there and what is inherited; products are also repeated with exact sums, which splits what arises into roundings of operands and
    accumulation. The parts are norms, so they need not add up. Both runs draw the same random bits. Models are unchanged afterwards.

    Models that do not fit into memory together: record one with `qsim.diagnostics.trace(…, folder=…)`, and compare the folder with the
    other, whose tensors are compared one by one. A recorded run is given first, since only run b is repeated; the sums of a recorded run
    then count as exact, unless both runs have equal settings.

    Args:
        a: A model, a trace, or the path of one.
        b: The other run.
        batch: The inputs, as `qsim.diagnostics.trace` takes them. Not needed for two traces.
        loss: `loss(model, batch)`, a scalar. By default the `.loss` that a model returns, or the sum of its outputs.
        optimizer: Makes an optimizer of a list of parameters, which takes one step.
        backward: Whether gradients are compared.
        seed: The seed of all random bits.
        tolerance: Relative error up to which tensors count as equal.

    Raises:
        FileError: If a file is no trace.
        TypeError: If a run is something else, or a model has no batch.
        ValueError: If nothing can be compared because the runs share no operation; and as `qsim.diagnostics.trace`.

    Example:
        >>> import copy, torch, qsim
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))
        >>> narrow = qsim.convert(copy.deepcopy(model), qsim.FivePoint(grad="e5m2"), exclude="2")
        >>> found = qsim.compare(model, narrow, torch.ones(3, 16))
        >>> found.first.title, found.first.cause
        ('weight.grad of 0 (Linear)', 'settings')
    """
    check_flag("compare", "backward", backward)
    for name, run in (("a", a), ("b", b)):
        if not isinstance(run, (nn.Module, Trace, str, os.PathLike)):
            raise TypeError(f"compare: {name} must be a model, a Trace or the path of one, got {run!r}")
        if isinstance(run, nn.Module) and batch is None:
            raise TypeError(f"compare: {name} is a model, so batch must be given")
    if not isinstance(tolerance, (int, float)) or not tolerance >= 0:
        raise ValueError(f"compare: tolerance must be a number that is not negative, got {tolerance!r}")
    options = (batch, loss, optimizer, backward, seed)
    # Errors in the arguments of either run come before any work.
    steps = {run: TracedStep("compare", run, *options) for run in (a, b) if isinstance(run, nn.Module)}
    reference, calls = (a, {}) if isinstance(a, Trace) else _recorded(steps[a]) if isinstance(a, nn.Module) else (Trace.load(a), {})
    comparer = Comparer(reference, steps[b].state() if isinstance(b, nn.Module) else {}, calls)
    if isinstance(b, nn.Module):
        comparer.updated = None if optimizer is None else _updated(reference, b, optimizer, seed)
        with same_streams(a, seed) if isinstance(a, nn.Module) else same_streams(b, seed):
            steps[b].run(comparer)
    else:
        _read(comparer, b if isinstance(b, Trace) else Trace.load(b))
    if not comparer.differences:
        examples = ", ".join(map(repr, list(reference.operations)[:3])), ", ".join(map(repr, comparer.only_b[:3]))
        raise ValueError(f"compare: the runs share no operation: a has {examples[0]} …, b has {examples[1]} …")
    return RunComparison(tuple(comparer.differences), tolerance, *comparer.only())


class _Keeper(TraceWriter):
    """Keeps a trace, and the calls that can be repeated after the run."""

    def __init__(self, kept: Trace) -> None:
        super().__init__(kept)
        self.calls: dict[str, OperationCall] = {}

    def called(self, call: OperationCall, inputs: Mapping[int, Tensor], outputs: Mapping[int, Tensor]) -> None:
        super().called(call, inputs, outputs)
        if call.is_product:
            self.calls[call.operation.title] = call.kept(inputs)


def _recorded(step: TracedStep) -> tuple[Trace, Mapping[str, OperationCall]]:
    """The trace of a step in memory, and its calls."""
    keeper = _Keeper(Trace({}, [], step.state()))
    step.run(keeper)
    return keeper.trace, keeper.calls


def _updated(reference: Trace, model: nn.Module, optimizer: MakesOptimizer, seed: int) -> Any:
    """A function that computes a model's updated parameters from a trace's gradients, where those before are equal."""
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters() if parameter.requires_grad}

    def computed() -> dict[str, Tensor]:
        if any(f"{name}/updated" not in reference.tensors for name in before):
            return {}
        parameters = {name: nn.Parameter(x) for name, x in before.items()}
        for name, parameter in parameters.items():
            gradient = reference.tensors.get(f"{name}/grad")
            parameter.grad = None if gradient is None else gradient.to(parameter.device, parameter.dtype)
        with torch.enable_grad():
            stepped("compare", optimizer, list(parameters.values()), seed)
        return {name: parameter.detach() for name, parameter in parameters.items()}

    return computed


def _read(comparer: Comparer, other: Trace) -> None:
    """Compare the tensors of a trace in its order, or in the reference's, if another program has written it."""
    comparer.state = other.state
    order = other.order or [name for name in comparer.reference.order if name in other.tensors] or sorted(other.tensors)
    for operation in other.operations.values():
        comparer.recorded(other, operation)
    for name in order:
        owner, _, role = name.rpartition("/")
        comparer.computed(owner, role, other.tensors[name])
