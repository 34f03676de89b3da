"""One call of an operation, which can be repeated with other inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_leaves, tree_unflatten

from qsim.diagnostics.traces.trace import Operation
from qsim.nn.modules import FivePointModule
from qsim.nn.restoring import Snapshot


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
        is_product: Whether it is a product.
    """

    operation: Operation
    compute: Callable[..., Any]
    leaves: Sequence[Any]
    spec: TreeSpec
    places: Mapping[int, int]
    parameters: Mapping[str, Tensor]
    module: nn.Module | None
    reseed: Callable[[], None]
    before: Snapshot | None
    is_product: bool = False

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
        parameters = {name: _wide(own, dtype) for name, own in self.parameters.items()}
        after = Snapshot(self.module) if self.module is not None else None
        if self.before is not None:
            self.before.restore()
        self.reseed()
        try:
            # Hooks of activation checkpointing would take what is saved here for tensors of the run.
            with torch.set_grad_enabled(bool(upstream)), torch.autograd.graph.saved_tensors_hooks(_unchanged, _unchanged):
                for number, x in fresh.items():
                    # A copy may be changed in place, which a tensor that requires a gradient may not.
                    leaves[self.places[number]] = x.clone()
                if dtype is None:
                    outputs = self.run(leaves)[1]
                elif self.module is None:
                    outputs = self.run([_wide(x, dtype) if isinstance(x, Tensor) else x for x in leaves])[1]
                else:
                    args, kwargs = tree_unflatten(leaves, self.spec)
                    own = {name: parameters[self.names[name]] for name in self.names}
                    outputs = self.outputs(torch.func.functional_call(self.module, own, args, kwargs))
                return _differentiated(outputs, upstream, fresh, parameters)
        finally:
            if after is not None:
                after.restore()

    def exact(self, inputs: Mapping[int, Tensor], upstream: Mapping[int, Tensor]) -> CallResults | None:
        """The results with the call's own roundings of operands, but with sums in full precision; `None` if it is not a product.

        Products of torch are computed in float64, and layers with points without their accumulators.
        """
        if not isinstance(self.module, FivePointModule):
            return self.repeated(inputs, upstream, torch.float64) if self.is_product else None
        points = self.module.points
        self.module.points = replace(points, accumulate=None, chip="auto")
        try:
            return self.repeated(inputs, upstream)
        finally:
            self.module.points = points

    def kept(self, inputs: Mapping[int, Tensor]) -> OperationCall:
        """The same call without a graph, with copies of its inputs."""
        leaves = [x.detach() if isinstance(x, Tensor) and not isinstance(x, nn.Parameter) else x for x in self.leaves]
        for number, place in self.places.items():
            leaves[place] = inputs[number]
        return replace(self, leaves=leaves)

    @property
    def names(self) -> Mapping[str, str]:
        """The names of a layer's parameters in the model, by their names in the layer."""
        assert self.module is not None
        known = {own: name for name, own in self.parameters.items()}
        return {name: known[own] for name, own in self.module.named_parameters() if own in known}


def _unchanged(x: Tensor) -> Tensor:
    return x


def _wide(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    return x if dtype is None or not x.is_floating_point() else x.detach().to(dtype).requires_grad_(x.requires_grad)


def _storage(x: Tensor) -> int:
    return x.untyped_storage()._cdata if x.layout == torch.strided else id(x)


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
