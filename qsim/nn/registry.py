"""The functions of torch that multiply or look up rows, with all that qsim knows of each.

Three rooms read this table: `calls` rounds the functions where modules call them, `converting` gives points to the layers of torch that
call them, and `coverage` counts the operators that compute them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qsim.nn import functional
from qsim.nn.calls import einsum, products, recurrent
from qsim.nn.coverage import formulas

#: Takes the arguments of a function of torch; returns `None` if none of its products is rounded.
Product = Callable[..., Any]


@dataclass(frozen=True)
class Adapter:
    """A function of torch, in all its forms.

    Attributes:
        rounded: The function with points.
        functions: Its Python functions, methods and operators.
        layers: Torch's classes of layers that call it; those with points have the same names.
        formulas: The multiply-adds of operators that compute it or its gradients, given their arguments. Torch's FLOP counter has others.
    """

    rounded: Product
    functions: tuple[Any, ...]
    layers: tuple[type[nn.Module], ...] = ()
    formulas: Mapping[str, formulas.Formula] = field(default_factory=dict)


def _forms(name: str) -> Iterator[Any]:
    """The functions and methods of torch with a name, and the operators in all their forms but those with `out=`."""
    for space in (torch, Tensor, F, torch.linalg):
        if hasattr(space, name):
            yield getattr(space, name)
    packet = getattr(torch.ops.aten, name, None)
    if packet is not None:
        yield packet
        yield from (getattr(packet, form) for form in packet.overloads() if "out" not in form.split("_"))


def _adapter(
    name: str, rounded: Product, *layers: type[nn.Module], operators: Mapping[str, formulas.Formula] = MappingProxyType({})
) -> Adapter:
    """The adapter of a name in torch, with the formulas of operators."""
    return Adapter(rounded, tuple(_forms(name)), layers, {f"aten::{own}": count for own, count in operators.items()})


def _by_name(product: Product, *names: str) -> Product:
    """A product whose operands may also be given by their names in a function of torch, or in its operator."""

    def of_operands(*args: Any, **kwargs: Any) -> Any:
        given = {("input" if name == "self" else name): value for name, value in kwargs.items()}
        operands = [*args, *[given.pop(name) for name in names[len(args) :] if name in given]]
        return product(*operands, **given)

    return of_operands


def _in_place(product: Product) -> Product:
    """A sum with a product that is written to its first argument."""

    def written(input: Tensor, *args: Any, **kwargs: Any) -> Tensor | None:
        found = product(input, *args, **kwargs)
        return None if found is None else input.copy_(found)

    return written


#: The names of the operands of matrix products, and of sums with one.
_OPERANDS = {
    "mm": ("input", "mat2"),
    "bmm": ("input", "mat2"),
    "mv": ("input", "vec"),
    "dot": ("input", "tensor"),
    "vdot": ("input", "other"),
}
_SUMMANDS = {
    "addmm": ("input", "mat1", "mat2"),
    "baddbmm": ("input", "batch1", "batch2"),
    "addbmm": ("input", "batch1", "batch2"),
    "addmv": ("input", "mat", "vec"),
}
_SUMS = {name: _by_name(products.add_batches if name == "addbmm" else products.add_product, *own) for name, own in _SUMMANDS.items()}
_CONVOLUTIONS = {
    "conv1d": nn.Conv1d,
    "conv2d": nn.Conv2d,
    "conv3d": nn.Conv3d,
    "conv_transpose1d": nn.ConvTranspose1d,
    "conv_transpose2d": nn.ConvTranspose2d,
    "conv_transpose3d": nn.ConvTranspose3d,
}
_STEPS: dict[str, formulas.Formula] = {
    "mkldnn_rnn_layer": formulas.recurrent,
    "mkldnn_rnn_layer_backward": formulas.twice(formulas.recurrent),
}
_STEPS |= {"_cudnn_rnn": formulas.recurrent, "_cudnn_rnn_backward": formulas.twice(formulas.recurrent)}
_SCORES: Mapping[str, formulas.Formula] = {
    "_scaled_dot_product_flash_attention_for_cpu": formulas.attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": formulas.attention_backward,
}

#: By their names in torch.
REGISTRY: dict[str, Adapter] = {
    "linear": _adapter("linear", products.linear, nn.Linear, operators={"_addmm_activation": formulas.added}),
    **{name: _adapter(name, _by_name(products.matmul, *own), operators={name: formulas.matmul}) for name, own in _OPERANDS.items()},
    "matmul": _adapter("matmul", _by_name(products.matmul, "input", "other")),
    "__matmul__": _adapter("__matmul__", products.matmul),
    "__rmatmul__": _adapter("__rmatmul__", products.reflected_matmul),
    **{name: _adapter(name, rounded, operators={name: formulas.added}) for name, rounded in _SUMS.items()},
    **{f"{name}_": _adapter(f"{name}_", _in_place(rounded)) for name, rounded in _SUMS.items()},
    "inner": _adapter("inner", _by_name(einsum.inner, "input", "other")),
    "tensordot": _adapter("tensordot", _by_name(einsum.tensordot, "input", "other", "dims_self", "dims_other")),
    "einsum": _adapter("einsum", einsum.einsum),
    "bilinear": _adapter("bilinear", products.bilinear_form, operators={"_trilinear": formulas.trilinear}),
    **{
        name: _adapter(name, partial(products.convolution, getattr(functional, name)), layer, operators={"conv_tbc": formulas.conv_tbc})
        for name, layer in _CONVOLUTIONS.items()
    },
    "convolution": _adapter("convolution", products.any_convolution, operators={"convolution_backward": formulas.convolution_backward}),
    "scaled_dot_product_attention": _adapter("scaled_dot_product_attention", products.attention, nn.MultiheadAttention, operators=_SCORES),
    # The operator takes the table first.
    "embedding": Adapter(products.embedding, (F.embedding,), (nn.Embedding,)),
    "grouped_mm": _adapter("grouped_mm", products.grouped),
    "_grouped_mm": _adapter("_grouped_mm", products.grouped, operators={"_grouped_mm": formulas.grouped}),
    "linear_cross_entropy": _adapter("linear_cross_entropy", products.linear_cross_entropy),
    **{name: _adapter(name, partial(recurrent.layer, step), operators=_STEPS) for name, step in recurrent.STEPS.items()},
    **{f"{name}_cell": _adapter(f"{name}_cell", partial(recurrent.cell, step)) for name, step in recurrent.STEPS.items()},
}

#: The functions that are rounded.
PRODUCTS: dict[Any, Product] = {function: adapter.rounded for adapter in REGISTRY.values() for function in adapter.functions}
#: The layers that have a class with points.
LAYERS = tuple(layer for adapter in REGISTRY.values() for layer in adapter.layers)
#: The multiply-adds of operators that torch's FLOP counter does not count, or not as they are: torch's, and qsim's own.
FORMULAS: dict[str, formulas.Formula] = {
    **{name: count for adapter in REGISTRY.values() for name, count in adapter.formulas.items()},
    **formulas.OWN,
}


def add_those_of_others() -> None:
    """Add the functions of other packages that are imported."""
    grouped = getattr(torch.ops.transformers, "grouped_mm_fallback", None)
    if grouped is not None:
        PRODUCTS.update(dict.fromkeys((grouped, grouped.default), products.grouped))
