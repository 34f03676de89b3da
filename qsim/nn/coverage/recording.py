"""A dispatch mode that records the products of a program as they are computed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from qsim.nn.converting.layers import layers, target
from qsim.nn.converting.table import reason_left
from qsim.nn.coverage.counting import multiplier, multiply_adds, products_of
from qsim.nn.coverage.paths import Paths, recorded_node, running_node, running_operation
from qsim.nn.coverage.report import CountedProduct, Coverage
from qsim.nn.lineage import Origins
from qsim.nn.product.observers import Observer
from qsim.nn.product.sites import Site
from qsim_kernels.private import tree_leaves

#: Namespaces of operators whose products are known.
_KNOWN = ("aten", "prim", "prims", "qsim", "higher_order")


class Recorder(TorchDispatchMode, Observer):
    """Records products, and observes which of them have rounded operands: it is an `Observer` of all layers."""

    supports_higher_order_operators = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.paths = Paths(model)
        self._layers, self._reasons = layers(model), _reasons(model)
        self._origins = Origins(model)
        self._announced: tuple[tuple[Site, Site], ...] = ()
        # The calls and multiply-adds of products that are counted together.
        self._found: dict[CountedProduct, tuple[int, int]] = {}
        self._opaque: dict[str, None] = {}
        self._multiplied: set[str | None] = set()
        # By autograd's numbers: where an operation was called, and why its product was not rounded.
        self._recorded_in: dict[int, str] = {}
        self._recorded_why: dict[int, str] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Run an operator, and record it if it multiplies."""
        given = dict(kwargs or {})
        operator = getattr(func, "overloadpacket", func)
        if hasattr(func, "overloadpacket") and torch.is_inference_mode_enabled():  # otherwise torch has decomposed it already
            with self:
                result = func.decompose(*args, **given)
            if result is not NotImplemented:
                return result
        result = func(*args, **given)
        # Backward passes are recorded, too, if their results are differentiated again.
        self._recorded_in.setdefault(recorded_node(), self._path(self.paths.is_backward))
        count = multiply_adds(operator, args, given, result)
        if count is not None:
            announced, self._announced = self._announced or (None,), ()
            by = multiplier(operator, args, given)
            for multiplied, sites in zip(products_of(operator, args, len(announced)), announced, strict=True):
                self._record(operator, multiplied, count // len(announced), by, sites)
        elif _may_multiply(func, args):
            self._opaque[str(operator).replace(".", "::")] = None
        if hasattr(func, "overloadpacket"):
            self._origins.follow(func, args, given, result)
        return result

    def _record(self, operator: Any, multiplied: list[Tensor], count: int, by: str, sites: tuple[Site, Site] | None) -> None:
        """Record a product, with the sites that were announced for it, if any."""
        is_backward = self.paths.is_backward if sites is None else sites[0].name.startswith("grad")
        path = self._path(is_backward)
        name = str(operator).rpartition(".")[2]
        points = tuple(f"{site.name}={site.description}" for site in sites or () if site.rounds)
        if sites is not None:
            missing = [site.name for site in sites if not site.rounds]
            reason = f"no quantizer at {', '.join(missing)}" if missing else ""
        else:
            known_reason = self._recorded_why.get(running_node()) if is_backward else self._reasons.get(path)
            reason = known_reason or self._reason_of_call(name, multiplied)
        self._recorded_why.setdefault(recorded_node(), reason)
        if sites is not None:
            self._multiplied |= set(map(self._origins.name, multiplied))
        shapes = tuple(tuple(x.shape) for x in multiplied)
        product = CountedProduct(path, "backward" if is_backward else "forward", name, shapes, 0, 0, points, reason, by)
        calls, total = self._found.get(product, (0, 0))
        self._found[product] = calls + 1, total + count

    def _path(self, is_backward: bool) -> str:
        """The module that called the running operator, or the one whose gradient it computes."""
        return self._recorded_in.get(running_node(), "") if is_backward else self.paths.current

    def _reason_of_call(self, name: str, multiplied: list[Tensor]) -> str:
        """Why a product outside of layers was not rounded."""
        origin = next(filter(None, map(self._origins.name, multiplied)), None)
        if origin is not None:
            return f"not a layer: {name} on {origin}"
        operation = running_operation()
        return "product of two activations" + (f" in the gradient of {operation}" if operation else "")

    def result(self) -> Coverage:
        """The products recorded so far."""
        never = (layer.title for layer in self._layers if reason_left(layer) is None and not self._has_run(layer.module))
        products = (replace(product, calls=calls, multiply_adds=count) for product, (calls, count) in self._found.items())
        return Coverage(tuple(products), tuple(never), tuple(self._opaque))

    def _has_run(self, module: nn.Module) -> bool:
        """Whether a layer was called, or another module has rounded a product with its weight."""
        return module in self.paths.called or any(self._origins.name(own) in self._multiplied for own in module.parameters(recurse=False))

    def multiplies(self, *products: tuple[Site, Site]) -> None:
        """Remember the sites of the next products."""
        self._announced = products


#: Words in the names of torch's operators that multiply. Some of these, as for sparse or 8-bit matrices, have no formula.
_MULTIPLYING = {"mm", "addmm", "convolution", "conv", "linear", "attention", "encoder"}


def _may_multiply(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether an operator without a formula may multiply: one of another package's, or one of torch's whose name says so."""
    if func.namespace in _KNOWN:
        name = func.name().partition(".")[0].rpartition(":")[2]
        return not _MULTIPLYING.isdisjoint(name.split("_"))
    return sum(isinstance(x, Tensor) and x.is_floating_point() for x in tree_leaves(args)) > 1


def _reasons(model: nn.Module) -> dict[str, str]:
    """Return why layers round nothing, by their paths. Products of other modules have other reasons."""
    found: dict[str, str] = {}
    known = layers(model)
    has_points = any(reason_left(layer) is None for layer in known)
    for layer in known:
        reason = reason_left(layer)
        is_layer = target(layer.module) is not None or layer.obstacle.startswith("convert does not know")
        if reason is not None and is_layer:
            found |= dict.fromkeys(layer.names, f"left alone: {reason}" if has_points else "no layer with points")
    return found
