"""One call of an operation, which can be repeated with other inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from qsim.diagnostics.traces.trace import Operation
from qsim.nn.calls.running import as_if_running
from qsim.nn.modules import FivePointModule
from qsim.nn.product import observers
from qsim.nn.record import ProductRounding, points_of_module, record_of
from qsim.nn.restoring import Snapshot
from qsim.private import storage_number
from qsim.recipes.five_point import FivePoint
from qsim_kernels.private import tree_leaves, tree_unflatten


@dataclass(frozen=True)
class CallResults:
    """The tensors that an operation computes.

    Attributes:
        outputs: Its outputs by their numbers.
        inputs: The gradients of its inputs, by the numbers of the inputs.
        parameters: The gradients of its parameters, by their names.
    """

    outputs: Mapping[int, Tensor]
    inputs: Mapping[int, Tensor]
    parameters: Mapping[str, Tensor]


@dataclass(frozen=True)
class OperationCall:
    """A call of an operation.

    Attributes:
        operation: The operation.
        compute: What computes it.
        leaves: The leaves of its arguments.
        spec: The structure of the arguments.
        places: The places of its inputs among the leaves, by their numbers among all tensors, of which parameters are no inputs.
        parameters: Its parameters by name.
        module: The layer, if it is one.
        reseed: Seeds torch's generators as before the call.
        before: The buffers and histories of the layer before the call.
        is_product: Whether it is a product that torch computes in float64, too.
        rounding: The modules at whose points a product outside layers is rounded.
    """

    operation: Operation
    compute: Callable[..., Any]
    leaves: Sequence[Any]
    spec: Any
    places: Mapping[int, int]
    parameters: Mapping[str, Tensor]
    module: nn.Module | None
    reseed: Callable[[], None]
    before: Snapshot | None
    is_product: bool = False
    rounding: tuple[nn.Module, ...] = ()

    def rounded_by(self, modules: Iterable[nn.Module]) -> OperationCall:
        """The same call, given the modules at whose points it is rounded."""
        points = ", ".join(repr(points_of_calls(module)) for module in modules)
        return replace(self, operation=replace(self.operation, points=points), rounding=tuple(modules))

    def run(self, leaves: Sequence[Any]) -> tuple[Any, Mapping[int, Tensor]]:
        """The result for other leaves, and the outputs among its tensors."""
        versions = [(x, x._version) for x in leaves if isinstance(x, Tensor) and not x.is_inference()]
        args, kwargs = tree_unflatten(list(leaves), self.spec)
        result = self.compute(*args, **kwargs)
        return result, self.outputs(result, [x for x, before in versions if x._version != before], leaves)

    def outputs(self, result: Any, changed: Sequence[Tensor] = (), leaves: Sequence[Any] = ()) -> Mapping[int, Tensor]:
        """The floating-point tensors that were computed: a layer's results, or those of a function that are no views of its arguments.

        Args:
            result: The result.
            changed: The arguments that were changed in place.
            leaves: All arguments.
        """
        found = [x for x in tree_leaves(result) if isinstance(x, Tensor) and x.is_floating_point()]
        if self.module is None:
            own = {_storage(x) for x in leaves if isinstance(x, Tensor)} - {_storage(x) for x in changed}
            found = [x for x in found if _storage(x) not in own] or [x for x in changed if x.is_floating_point()]
        return dict(enumerate(found))

    def repeated(
        self, inputs: Mapping[int, Tensor], upstream: Mapping[int, Tensor], dtype: torch.dtype | None = None
    ) -> CallResults | None:
        """The results for other inputs and gradients of the outputs, with the same random bits; `None` if their shapes do not fit.

        Args:
            inputs: The inputs by their numbers.
            upstream: The gradients of the outputs by their numbers; no gradients are computed without.
            dtype: Compute with inputs and parameters in this dtype, once they were rounded to their own.
        """
        leaves, fresh = list(self.leaves), dict[int, Tensor]()
        for number, place in self.places.items():
            own = leaves[place]
            given = inputs.get(number, own)  # a copy of a parameter is an input, and the parameter is none
            if given.shape != own.shape:
                return None
            x = _wide(given.to(own.device, own.dtype), dtype)
            fresh[number] = x.detach().requires_grad_(bool(upstream) and x.is_floating_point())
        # A function may take views of its parameters, so its gradients are those of the parameters themselves.
        parameters = {name: own if self.module is None else _wide(own, dtype) for name, own in self.parameters.items()}
        after = Snapshot(self.module) if self.module is not None else None
        if self.before is not None:
            self.before.restore()
        self.reseed()
        try:
            # Hooks of activation checkpointing would take what is saved here for tensors of the run, and modules that run round products.
            saving = torch.autograd.graph.saved_tensors_hooks(_unchanged, _unchanged)
            with torch.set_grad_enabled(bool(upstream)), saving, as_if_running([]):
                for number, x in fresh.items():
                    # A copy may be changed in place, which a tensor that requires a gradient may not.
                    leaves[self.places[number]] = x.clone()
                if dtype is None:
                    outputs = self.run(leaves)[1]
                elif self.module is None:
                    is_float = [isinstance(x, Tensor) and x.is_floating_point() for x in leaves]
                    outputs = self.run([x.to(dtype) if wide else x for x, wide in zip(leaves, is_float, strict=True)])[1]
                else:
                    args, kwargs = tree_unflatten(leaves, self.spec)
                    own = {name: parameters[self.names[name]] for name in self.names}
                    outputs = self.outputs(torch.func.functional_call(self.module, own, args, kwargs))
                return _differentiated(outputs, upstream, fresh, parameters)
        finally:
            if after is not None:
                after.restore()

    def exact(self, inputs: Mapping[int, Tensor], upstream: Mapping[int, Tensor]) -> CallResults | None:
        """The results with the call's own roundings of operands, but with sums in full precision; `None` if it has none.

        Products of torch are computed in float64, and layers with points without their accumulators.
        """
        modules = [self.module] if isinstance(self.module, FivePointModule) else self.rounding
        if not modules:
            return self.repeated(inputs, upstream, torch.float64) if self.is_product else None
        with sums_in_full_precision(modules):
            return self.repeated(inputs, upstream)

    def kept(self, inputs: Mapping[int, Tensor]) -> OperationCall:
        """The same call with copies of its inputs, which have no graph."""
        leaves = list(self.leaves)
        for number, place in self.places.items():
            leaves[place] = inputs[number]
        return replace(self, leaves=leaves)

    @property
    def names(self) -> Mapping[str, str]:
        """The names of a layer's parameters in the model, by their names in the layer."""
        assert self.module is not None
        known = {own: name for name, own in self.parameters.items()}
        return {name: known[own] for name, own in self.module.named_parameters() if own in known}


def points_of_calls(module: nn.Module) -> FivePoint:
    """The points of a module's products: of attention its own, of others those of their calls."""
    return points_of_module(module) or FivePoint()


@contextmanager
def noted_roundings() -> Iterator[list[nn.Module]]:
    """Note the modules at whose points products outside layers are rounded meanwhile."""
    found: list[nn.Module] = []

    def note(module: nn.Module, name: str) -> observers.Observer | None:
        if module not in found and not points_of_calls(module).is_identity:
            found.append(module)
        return None if watching is None else watching(module, name)

    watching = observers.watch_calls(note)
    try:
        yield found
    finally:
        observers.watch_calls(watching)


@contextmanager
def sums_in_full_precision(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Let the products of modules have no accumulators meanwhile."""
    before = [(record, record.layer, record.calls) for record in map(record_of, modules)]
    try:
        for record, layer, calls in before:
            record.layer, record.calls = map(_without_accumulators, (layer, calls))
        yield
    finally:
        for record, layer, calls in before:
            record.layer, record.calls = layer, calls


def _without_accumulators(rounding: ProductRounding | None) -> ProductRounding | None:
    return rounding and replace(rounding, points=replace(rounding.points, accumulate=None, chip="auto"), in_use={})


def _unchanged(x: Tensor) -> Tensor:
    return x


def _wide(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    return x if dtype is None or not x.is_floating_point() else x.detach().to(dtype).requires_grad_(x.requires_grad)


def _storage(x: Tensor) -> int:
    return storage_number(x) if x.layout == torch.strided else id(x)


def _differentiated(
    outputs: Mapping[int, Tensor], upstream: Mapping[int, Tensor], inputs: Mapping[int, Tensor], parameters: Mapping[str, Tensor]
) -> CallResults | None:
    """The results, with gradients where there are upstream gradients."""
    plain = {number: x.detach() for number, x in outputs.items()}
    if any(number not in outputs or outputs[number].shape != g.shape for number, g in upstream.items()):
        return None
    pairs = [(outputs[number], g.to(outputs[number])) for number, g in upstream.items() if outputs[number].requires_grad]
    wanted = {("", number): x for number, x in inputs.items() if x.requires_grad}
    wanted |= {(name, 0): x for name, x in parameters.items() if x.requires_grad}
    if not pairs or not wanted:
        return CallResults(plain, {}, {})
    found = torch.autograd.grad([x for x, _ in pairs], list(wanted.values()), [g for _, g in pairs], allow_unused=True)
    given = {key: g.detach() for key, g in zip(wanted, found, strict=True) if g is not None}
    return CallResults(plain, {n: g for (name, n), g in given.items() if not name}, {name: g for (name, _), g in given.items() if name})
