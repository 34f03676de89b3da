"""The function mode in which a converted model runs: it rounds the products that modules compute by functions of torch."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qsim.functional.bodies import body
from qsim.nn.calls.graphs import run_outside_the_mode
from qsim.nn.calls.running import PausedInLayers, as_if_running, running, without_inner_rounding
from qsim.nn.lineage import follow
from qsim.nn.registry import PRODUCTS, add_those_of_others
from qsim.private import grouped_mm
from qsim_kernels.ops.backend import leave_to_python


def know_others() -> None:
    """Round functions of other packages as well, if these are imported, and let compilers ask the mode about all functions.

    Dynamo asks modes about the functions that torch documents as overridable, and grouped products are none.
    """
    if grouped_mm is not None:
        _show_to_dynamo(grouped_mm)
    add_those_of_others()


def _show_to_dynamo(function: Any) -> None:
    documented = torch.overrides.get_overridable_functions()[torch]
    if function not in documented:
        documented.append(function)
    known = sys.modules.get("torch._dynamo.variables.torch")
    if known is not None:  # it has a copy
        known.get_overridable_functions().add(function)


#: Torch's own, for the sake of the calls inside.
_ATTENTION = body(F.multi_head_attention_forward)


class ProductCallsMode(PausedInLayers):
    """Round products, and follow what becomes of parameters."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Call a function of torch."""
        run_outside_the_mode()
        given = kwargs or {}
        tracer = running.tracer
        if tracer is not None and not tracer.is_inside:
            modules = list(running.modules)  # the call may be repeated after they have run
            return tracer.called(func, args, given, lambda *args, **kwargs: self._again(modules, func, types, args, kwargs))
        if func is Tensor.unflatten:
            func = torch.unflatten  # Dynamo cannot trace the method, which calls its parent's
        if running.is_rounding:
            return func(*args, **given)
        if func is F.multi_head_attention_forward:
            with self:
                return _ATTENTION(*args, **given)
        product = PRODUCTS.get(func)
        if product is not None:
            out = given.get("out")
            rounded = without_inner_rounding(product, *args, **{name: value for name, value in given.items() if name != "out"})
            if rounded is not None and (out is None or not rounded.requires_grad):  # torch raises an error
                result = rounded if out is None else _written(out, rounded)
                follow(func, args, given, result)
                return result
        result = func(*args, **given)
        follow(func, args, given, result)
        return result

    def _again(self, modules: list[nn.Module], func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function of torch as if some modules ran."""
        with as_if_running(modules):
            return self.__torch_function__(func, types, args, kwargs)


def _written(out: Tensor, result: Tensor) -> Tensor:
    """The tensor that a caller gives for a result, with the result."""
    return (out if out.shape == result.shape else out.resize_(result.shape)).copy_(result)


# Where Dynamo leaves code to Python, it compiles the method for one attribute of tensors, and takes that code for all others: let it only
# trace the method into the code that calls it.
leave_to_python(ProductCallsMode.__torch_function__, and_callees=False)
