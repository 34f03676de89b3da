"""One training step of a model that is recorded, and leaves no trace in the model."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from qsim.checkpoints.folders import check_empty
from qsim.diagnostics.traces.calls import OperationCall
from qsim.diagnostics.traces.recording import TraceRecorder, TraceSink, checksum
from qsim.diagnostics.traces.stores import TensorFolder
from qsim.diagnostics.traces.trace import Operation, Trace
from qsim.formats.base import check_flag
from qsim.functional.bodies import body
from qsim.nn.coverage.run import check_plain, summands
from qsim.nn.examples import inputs_of
from qsim.nn.modules import FivePointModule
from qsim.nn.record import ProductRounding, known, record_of
from qsim.nn.restoring import Snapshot, generators_restored
from qsim.random import streams

#: Torch's own, in which the recorder's mode sees what activation checkpointing repeats.
_grad = body(torch.autograd.grad)
#: A function of a model and a batch that returns a scalar, as `gradient_error` takes it.
StepLoss = Callable[[Any, Any], Tensor]
#: A function that makes an optimizer of parameters.
MakesOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def trace(
    model: nn.Module,
    batch: Any,
    loss: StepLoss | None = None,
    *,
    optimizer: MakesOptimizer | None = None,
    backward: bool = True,
    seed: int = 0,
    folder: str | os.PathLike[str] | None = None,
) -> Trace:
    """Record each operation of one training step of a model, with its inputs, its outputs and their gradients, in causal order.

    An operation is a layer of torch or qsim, or a function of torch that another module calls. Its random bits follow from `seed` and its
    name: two runs draw the same noise and the same dropout, also where one of them rounds more, and layers have the same streams. The
    model, its buffers, gradients and torch's generators are unchanged afterwards. Reentrant checkpointing does not work with a backward
    pass.

    Args:
        model: The model, converted or not.
        batch: Its inputs: a tuple of them, a dictionary of inputs by keyword, or one input; with `loss`, anything that `loss` takes.
        loss: `loss(model, batch)`, a scalar. By default the `.loss` that the model returns, or the sum of its outputs.
        optimizer: Makes an optimizer of a list of parameters, which takes one step: `lambda parameters: qsim.optim.AdamW(parameters)`.
        backward: Whether gradients are computed.
        seed: The seed of all random bits.
        folder: An empty folder to keep the tensors in, rather than in memory: `Trace.load` reads it.

    Raises:
        FileExistsError: If the folder is not empty.
        TypeError: If `model` is not a module, or `optimizer` makes something else.
        ValueError: If the model is compiled, wrapped for data parallelism or lazy, if there is no loss, or an optimizer without gradients.

    Example:
        >>> import torch, qsim
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(), torch.nn.Linear(8, 2))
        >>> found = qsim.diagnostics.trace(model, torch.ones(3, 4), optimizer=lambda given: torch.optim.SGD(given, lr=0.1))
        >>> list(found.operations)
        ['0', '1', '2', ':sum']
        >>> found.order[-2:]
        ['2.weight/updated', '2.bias/updated']
        >>> torch.allclose(found.tensors["2.bias/updated"], model[2].bias - 0.1 * found.tensors["2.bias/grad"])
        True
    """
    check_flag("trace", "backward", backward)
    if folder is not None:
        check_empty("trace", Path(folder))
    step = TracedStep("trace", model, batch, loss, optimizer, backward, seed)
    found = Trace({}, [], step.state(), {} if folder is None else TensorFolder(Path(folder)))
    step.run(TraceWriter(found))
    found.close()
    return found


class TracedStep:
    """A training step to record.

    Args:
        owner: The function that records it, for errors.
        model: The model.
        batch: The batch.
        loss: The loss, if it is not the model's own.
        optimizer: Makes the optimizer, if there is one.
        backward: Whether gradients are computed.
        seed: The seed of all random bits.
    """

    def __init__(
        self, owner: str, model: nn.Module, batch: Any, loss: StepLoss | None, optimizer: MakesOptimizer | None, backward: bool, seed: int
    ) -> None:
        check_plain(owner, model)
        if optimizer is not None and not backward:
            raise ValueError(f"{owner}: optimizer needs gradients: leave out backward=False")
        self.model, self.seed = model, seed
        self._owner, self._batch, self._loss, self._optimizer, self._backward = owner, batch, loss, optimizer, backward

    def state(self) -> dict[str, str]:
        """A checksum of each parameter and buffer."""
        return {name: checksum(x) for name, x in (*self.model.named_parameters(), *self.model.named_buffers())}

    def run(self, sink: TraceSink) -> None:
        """Take the step, report it to a sink, and restore the model."""
        self.recorder = recorder = TraceRecorder(self.model, sink, self.seed)
        snapshot = Snapshot(self.model)
        try:
            with generators_restored(self.model), same_streams(self.model, self.seed), torch.set_grad_enabled(self._backward):
                with recorder.recording():
                    sums = self._sums()
                    gradients = self._gradients(recorder, sums) if self._backward else []
                if self._optimizer is not None:
                    self._update(sink, gradients)
        finally:
            snapshot.restore()

    def _sums(self) -> list[Tensor]:
        if self._loss is not None:
            value = self._loss(self.model, self._batch)
            if not isinstance(value, Tensor) or value.numel() != 1 or (self._backward and not value.requires_grad):
                raise ValueError(f"{self._owner}: loss must return one differentiable number, got {value!r}")
            return [value]
        args, kwargs = inputs_of(self._batch)
        output = self.model(*args, **kwargs)
        return summands(self._owner, output) if self._backward else []

    def _gradients(self, recorder: TraceRecorder, sums: list[Tensor]) -> list[Tensor | None]:
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        with recorder.watching_parameters():
            return list(_grad(sums, trained, allow_unused=True)) if trained else []

    def _update(self, sink: TraceSink, gradients: list[Tensor | None]) -> None:
        trained = [(name, parameter) for name, parameter in self.model.named_parameters() if parameter.requires_grad]
        with torch.no_grad():
            kept = [(parameter, parameter.grad, parameter.detach().clone()) for _, parameter in trained]
            try:
                for (_, parameter), gradient in zip(trained, gradients, strict=True):
                    parameter.grad = gradient
                stepped(self._owner, self._optimizer, [parameter for _, parameter in trained], self.seed)
                for name, parameter in trained:
                    sink.computed(name, "updated", parameter.detach())
            finally:
                for parameter, gradient, before in kept:
                    parameter.grad = gradient
                    parameter.data.copy_(before)


def stepped(owner: str, optimizer: MakesOptimizer | None, parameters: list[nn.Parameter], seed: int) -> None:
    """Take one step of a new optimizer.

    Raises:
        TypeError: If it is not an optimizer.
    """
    assert optimizer is not None
    torch.default_generator.manual_seed(streams.stream("trace", seed, "", "update"))
    made = optimizer(parameters)
    if not isinstance(made, torch.optim.Optimizer):
        raise TypeError(f"{owner}: optimizer must be a function that makes a torch.optim.Optimizer of parameters, got {made!r}")
    made.step()


@contextmanager
def same_streams(model: nn.Module, seed: int) -> Iterator[None]:
    """Give all roundings of weights streams that follow from the names of modules, and restore theirs."""
    kept = []
    for name, module in model.named_modules():
        record = known(module)
        if record.layer is None and record.calls is None:
            continue
        kept.append((module, record.layer, record.calls))
        number = streams.stream("trace", seed, name)
        if isinstance(module, FivePointModule):
            module.stream_source = number
        if record.calls is not None:
            record_of(module).calls = ProductRounding(record.calls.points, number, record.calls.of_activations)
    try:
        yield
    finally:
        for module, layer, calls in kept:
            record_of(module).layer, record_of(module).calls = layer, calls


class TraceWriter:
    """A recorder that keeps what a run reports in a trace.

    Args:
        kept: The trace.
    """

    def __init__(self, kept: Trace) -> None:
        self.trace = kept

    def called(self, call: OperationCall, inputs: Mapping[int, Tensor], outputs: Mapping[int, Tensor]) -> None:
        """Keep a call with its inputs and outputs."""
        title = call.operation.title
        operations: dict[str, Operation] = self.trace.operations  # type: ignore[assignment]
        operations[title] = call.operation
        for number, x in inputs.items():
            self.trace.tensors[f"{title}/input.{number}"] = x
        for number, x in outputs.items():
            self.computed(title, f"output.{number}", x)

    def computed(self, owner: str, role: str, x: Tensor) -> None:
        """Keep a tensor; gradients of outputs are no results of their own."""
        name = f"{owner}/{role}"
        self.trace.tensors[name] = x.clone()
        if not role.startswith("grad_output"):
            self.trace.order.append(name)
