"""The function mode in which a converted model runs: it rounds the products that modules compute by functions of torch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch.nn import functional as F

from qsim.functional.bodies import body
from qsim.nn import functional
from qsim.nn.calls import products, recurrent
from qsim.nn.calls.einsum import einsum, inner, tensordot
from qsim.nn.calls.running import PausedInLayers, running, without_inner_rounding
from qsim.nn.calls.weights import follow

_CONVOLUTIONS = ("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")

#: The names of the operands of products, and of sums with one.
_OPERANDS = {"matmul": ("input", "other"), "mm": ("input", "mat2"), "bmm": ("input", "mat2"), "mv": ("input", "vec")}
_SUMMANDS = {"addmm": ("input", "mat1", "mat2"), "baddbmm": ("input", "batch1", "batch2"), "addmv": ("input", "mat", "vec")}


def _by_name(product: Callable[..., Any], names: tuple[str, ...]) -> Callable[..., Any]:
    """A product whose operands may also be given by their names in a function of torch."""

    def of_operands(*args: Any, **kwargs: Any) -> Any:
        operands = [*args, *[kwargs[name] for name in names[len(args) :] if name in kwargs]]
        return product(*operands, **{name: value for name, value in kwargs.items() if name not in names})

    return of_operands


#: The functions that are rounded.
PRODUCTS: dict[Any, Callable[..., Any]] = {
    F.linear: products.linear,
    **{getattr(space, name): _by_name(products.matmul, own) for space in (torch, Tensor) for name, own in _OPERANDS.items()},
    Tensor.__matmul__: products.matmul,
    torch.linalg.matmul: products.matmul,
    **{getattr(space, name): _by_name(products.add_product, own) for space in (torch, Tensor) for name, own in _SUMMANDS.items()},
    torch.einsum: einsum,
    torch.tensordot: tensordot,
    **{space.inner: _by_name(inner, ("input", "other")) for space in (torch, Tensor)},
    torch._grouped_mm: products.grouped,
    F.bilinear: products.bilinear_form,
    F.scaled_dot_product_attention: products.attention,
    **{getattr(F, name): products.convolution(getattr(functional, name)) for name in _CONVOLUTIONS},
}
for name, step in recurrent.STEPS.items():
    PRODUCTS[getattr(torch, name)] = partial(recurrent.layer, step)
    PRODUCTS[getattr(torch, f"{name}_cell")] = partial(recurrent.cell, step)
if hasattr(F, "grouped_mm"):
    PRODUCTS[F.grouped_mm] = products.grouped


def know_others() -> None:
    """Round functions of other packages as well, if these are imported, and let compilers ask the mode about all functions.

    Dynamo asks modes about the functions that torch documents as overridable, and grouped products are none.
    """
    _show_to_dynamo(torch._grouped_mm)
    grouped = getattr(torch.ops.transformers, "grouped_mm_fallback", None)
    if grouped is not None:
        PRODUCTS.update(dict.fromkeys((grouped, grouped.default), products.grouped))


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
        given = kwargs or {}
        if func is Tensor.unflatten:
            func = torch.unflatten  # Dynamo cannot trace the method, which calls its parent's
        if running.is_rounding:
            return func(*args, **given)
        if func is F.multi_head_attention_forward:
            with self:
                return _ATTENTION(*args, **given)
        product = PRODUCTS.get(func)
        if product is not None and given.get("out") is None:
            rounded = without_inner_rounding(product, *args, **{name: value for name, value in given.items() if name != "out"})
            if rounded is not None:
                return rounded
        result = func(*args, **given)
        follow(args, given, result)
        return result


# Where Dynamo leaves code to Python, it compiles the method for one attribute of tensors, and takes that code for all others: let it only
# trace the method into the code that calls it.
set_code_exec_strategy(ProductCallsMode.__torch_function__.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.DEFAULT))
