"""Following a run: layers by hooks, functions of torch by a function mode, and gradients by hooks of tensors."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from qsim.diagnostics.traces.calls import OperationCall, noted_roundings
from qsim.diagnostics.traces.trace import Operation
from qsim.nn.calls.running import running
from qsim.nn.converting.layers import target
from qsim.nn.coverage.paths import Paths
from qsim.nn.lineage import base_of_view
from qsim.nn.modules import FivePointModule
from qsim.nn.registry import PRODUCTS
from qsim.nn.restoring import Snapshot
from qsim.private import backward_pass
from qsim.random import streams
from qsim_kernels.private import tree_flatten, tree_unflatten

_QUERIES = {"__get__", "__len__", "__iter__", "__format__", "__repr__", "__contains__", "__bool__", "size", "dim", "stride", "numel"}
_QUERIES |= {"is_floating_point", "is_contiguous", "register_hook", "requires_grad_", "retain_grad", "item", "tolist", "numpy", "data_ptr"}
_VIEWS = {"view", "view_as", "reshape", "reshape_as", "flatten", "unflatten", "permute", "transpose", "t", "swapaxes", "movedim"}
_VIEWS |= {"squeeze", "unsqueeze", "expand", "expand_as", "broadcast_to", "broadcast_tensors", "narrow", "select"}
_VIEWS |= {"chunk", "unsafe_chunk", "split", "unbind", "detach", "detach_"}
_COPIES = {"clone", "contiguous", "cpu", "cuda", "copy_", "set_", "__set__", "__deepcopy__"}
_FILLS = {"zeros", "ones", "empty", "full", "zeros_like", "ones_like", "empty_like", "full_like", "zero_", "fill_"}
#: Functions that compute no numbers: they move them, or make tensors without content.
_MOVES = frozenset(_QUERIES | _VIEWS | _COPIES | _FILLS)
#: Products that torch does not compute in float64.
_NOT_IN_FLOAT64 = frozenset(["grouped_mm", "_grouped_mm"])
#: Operators of Python that write to their first operand.
_WRITES = frozenset(["__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__", "__imod__", "__ifloordiv__"])
#: Containers of torch, whose parts are operations of their own.
_CONTAINERS = ("torch.nn.modules.container", "torch.nn.modules.transformer")


class TraceSink(Protocol):
    """A receiver of what happens in a run, in causal order."""

    def called(self, call: OperationCall, inputs: Mapping[int, Tensor], outputs: Mapping[int, Tensor]) -> None:
        """Receive a call with its inputs as they were before it."""

    def computed(self, owner: str, role: str, x: Tensor) -> None:
        """Receive a gradient of an operation or a parameter, or an updated parameter."""


class TraceRecorder(TorchFunctionMode):
    """A recorder that reports a model's operations to a sink.

    Each operation draws random bits from a seed that follows from its title, so that two runs draw the same although one draws more.

    Args:
        model: The model.
        sink: Receives the operations.
        seed: The seed of all random bits.
    """

    def __init__(self, model: nn.Module, sink: TraceSink, seed: int) -> None:
        super().__init__()
        self.is_inside = False
        self._sink, self._seed = sink, seed
        self._paths = Paths(model)
        self._parameters: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
        self._on_cuda = any(parameter.is_cuda for parameter in self._parameters)
        self._calls: Counter[tuple[str, str]] = Counter()
        self._open: list[tuple[nn.Module, OperationCall | str, dict[int, Tensor]]] = []
        self._titles: dict[tuple[int, str], str] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the operations that run meanwhile."""
        handles = []
        for module in self._paths.names:
            if is_layer(module):
                handles += [
                    module.register_forward_pre_hook(self._enter, with_kwargs=True),
                    module.register_forward_hook(self._leave, with_kwargs=True, always_call=True),
                ]
        before, running.tracer = running.tracer, self
        self._reseed("")
        try:
            with self._paths.followed(), self:
                yield
        finally:
            running.tracer = before
            for handle in handles:
                handle.remove()

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Record nothing meanwhile."""
        before, self.is_inside = self.is_inside, True
        try:
            yield
        finally:
            self.is_inside = before

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Call a function of torch."""
        return self.called(func, args, kwargs or {}, func)

    def called(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], compute: Callable[..., Any]) -> Any:
        """Record a call of a function, unless it computes no numbers."""
        name = getattr(function, "__name__", "")
        if self.is_inside:
            return compute(*args, **kwargs)
        with self.quiet():
            if not name or name in _MOVES or name.startswith("new_"):
                return compute(*args, **kwargs)
            if _is_recomputed():
                again = self._begin_again(name)
                result = compute(*args, **kwargs)
                self._end_again(again)
                return result
            # Gradients of what a function changes in place belong to what is there afterwards.
            changes = kwargs.get("inplace") is True or "out" in kwargs or name in _WRITES or (name.endswith("_") and name[-2] != "_")
            call, inputs, leaves = self._begin(name, args, kwargs, compute, None, watches=not changes)
            with noted_roundings() as rounding:
                result, outputs = call.run(leaves)
            is_product = function in PRODUCTS and name not in _NOT_IN_FLOAT64
            self._end(replace(call.rounded_by(rounding), is_product=is_product), inputs, outputs)
        return result

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        if self.is_inside:
            return None
        self.is_inside = True
        if _is_recomputed():
            self._open.append((module, self._begin_again(type(module).__name__), {}))
            return None
        call, inputs, leaves = self._begin(
            type(module).__name__, args, kwargs, module, module, watches=not getattr(module, "inplace", False)
        )
        self._open.append((module, replace(call, is_product=target(module) is not None), inputs))
        given: tuple[Any, Any] = tree_unflatten(leaves, call.spec)
        return given

    def _leave(self, module: nn.Module, args: object, kwargs: object, result: Any) -> None:
        if not self._open or self._open[-1][0] is not module:
            return
        _, call, inputs = self._open.pop()
        if isinstance(call, str):
            self._end_again(call)
        elif result is not None:  # otherwise the layer has raised an error
            self._end(call, inputs, call.outputs(result))
        self.is_inside = False

    def _begin_again(self, name: str) -> str:
        """Seed a call that activation checkpointing repeats as the first time, and return its title; empty if it is not known.

        Checkpointing restores the state of torch's generator, which shows after which operation the call came.
        """
        title = self._titles.get((torch.initial_seed(), name), "")
        if title:
            self._reseed(title)
        return title

    def _end_again(self, title: str) -> None:
        if title:
            self._reseed(title, "after")

    def _begin(
        self, name: str, args: Any, kwargs: Any, compute: Callable[..., Any], module: nn.Module | None, *, watches: bool
    ) -> tuple[OperationCall, dict[int, Tensor], list[Any]]:
        """The call of an operation that begins, its inputs, and the arguments whose gradients are watched."""
        leaves, spec = tree_flatten((args, kwargs))
        layer = self._paths.names[module] if module is not None else self._paths.current
        self._calls[layer, name if module is None else ""] += 1
        parameters = self._parameters_of(module, leaves)
        tensors = [place for place, x in enumerate(leaves) if isinstance(x, Tensor)]
        places = {number: place for number, place in enumerate(tensors) if self._parameter(leaves[place]) is None}
        settings = repr(module) if module is not None else _settings(leaves)
        state = [*parameters, *([f"{layer}.{own}".lstrip(".") for own, _ in module.named_buffers()] if module is not None else [])]
        number = self._calls[layer, name if module is None else ""]
        points = repr(module.points) if isinstance(module, FivePointModule) else ""
        operation = Operation(layer, name, number, settings, points, tuple(state), module is not None)
        self._titles[torch.initial_seed(), name] = operation.title
        reseed = partial(self._reseed, operation.title)
        before = Snapshot(module) if module is not None else None
        call = OperationCall(operation, compute, leaves, spec, places, parameters, module, reseed, before)
        inputs = {number: leaves[place].detach().clone() for number, place in places.items()}
        watched = list(leaves)
        if watches and torch.is_grad_enabled():
            for number, place in places.items():
                if leaves[place].requires_grad:
                    watched[place] = leaves[place].view_as(leaves[place])  # its gradient is this operation's share only
                    self._watch(watched[place], operation.title, f"grad_input.{number}")
        reseed()
        return call, inputs, watched

    def _end(self, call: OperationCall, inputs: dict[int, Tensor], outputs: Mapping[int, Tensor]) -> None:
        """Report a call."""
        if not outputs or not (call.places or call.parameters):
            self._calls[call.operation.layer, call.operation.name if call.module is None else ""] -= 1
            return
        for number, x in outputs.items():
            if x.grad_fn is not None:
                self._watch_result(x, call.operation.title, f"grad_output.{number}")
        self._sink.called(call, inputs, {number: x.detach() for number, x in outputs.items()})
        self._reseed(call.operation.title, "after")

    def _watch(self, x: Tensor, owner: str, role: str) -> None:
        def report(gradient: Tensor) -> None:
            self._sink.computed(owner, role, gradient.detach())

        x.register_hook(report)

    def _watch_result(self, x: Tensor, owner: str, role: str) -> None:
        """Report the gradient of a result, which may be changed in place later: then hooks of the tensor would be lost, and its node stays.

        The node of a view does not; but layers return whole views of what they have computed.
        """
        base = x._base
        computed = base if base is not None and base.grad_fn is not None and base.numel() == x.numel() and x.is_contiguous() else x
        place, shape = computed.output_nr, x.shape

        def report(gradients: tuple[Tensor | None, ...]) -> None:
            gradient = gradients[place]
            if gradient is not None:
                self._sink.computed(owner, role, gradient.detach().reshape(shape))

        assert computed.grad_fn is not None
        computed.grad_fn.register_prehook(report)

    @contextmanager
    def watching_parameters(self) -> Iterator[None]:
        """Report the gradient of each parameter meanwhile: that of all operations that use it together."""
        trained = [(parameter, name) for parameter, name in self._parameters.items() if parameter.requires_grad]
        handles = [parameter.register_hook(partial(self._of_parameter, name)) for parameter, name in trained]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _of_parameter(self, name: str, gradient: Tensor) -> None:
        self._sink.computed(name, "grad", gradient.detach())

    def _parameter(self, x: Tensor) -> Tensor | None:
        """The parameter that a tensor is, or whose view it is."""
        base = base_of_view(x)
        return base if base in self._parameters else None

    def _parameters_of(self, module: nn.Module | None, leaves: list[Any]) -> dict[str, Tensor]:
        if module is not None:
            return {self._parameters[own]: own for own in module.parameters() if own in self._parameters}
        found = (self._parameter(x) for x in leaves if isinstance(x, Tensor))
        return {self._parameters[own]: own for own in found if own is not None}

    def _reseed(self, *names: str) -> None:
        number = streams.stream("trace", self._seed, *names)
        torch.default_generator.manual_seed(number)
        if self._on_cuda:
            torch.cuda.manual_seed_all(number)


def _is_recomputed() -> bool:
    """Whether a backward pass runs, in which activation checkpointing computes something once more."""
    running_pass: int = backward_pass()
    return running_pass != -1


def is_layer(module: nn.Module) -> bool:
    """Whether a module is one operation: a layer of torch or of qsim, or one that `convert` would replace."""
    if target(module) is not None:
        return True
    home = type(module).__module__
    return home.startswith(("torch.nn.modules.", "qsim.nn.", "qsim.points.")) and not home.startswith(_CONTAINERS)


def checksum(x: Tensor) -> str:
    """A checksum of a tensor's bits, the same in every program."""
    raw = x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy() if x.numel() else b""
    return hashlib.blake2b(bytes(str(x.dtype), "ascii") + bytes(str(tuple(x.shape)), "ascii") + bytes(raw), digest_size=8).hexdigest()


def _settings(leaves: list[Any]) -> str:
    """The arguments of a function that are no tensors."""
    return ", ".join(str(x) for x in leaves if not isinstance(x, Tensor))
