"""The functions of torch that multiply, with what rounds them: Python functions, methods, and the operators behind both."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from qsim.nn import functional
from qsim.nn.calls import products, recurrent
from qsim.nn.calls.einsum import einsum, inner, tensordot

#: Takes the arguments of a function of torch; returns `None` if none of its products is rounded.
Product = Callable[..., Any]

#: The names of the operands of products, and of sums with one.
_OPERANDS = {
    "matmul": ("input", "other"),
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
_CONVOLUTIONS = ("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")


def _by_name(product: Product, names: tuple[str, ...]) -> Product:
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


def _transposed_matmul(input: Tensor, other: Tensor) -> Tensor | None:
    return products.matmul(other, input)


def _tensordot_by_dimensions(input: Tensor, other: Tensor, dims_self: Sequence[int], dims_other: Sequence[int]) -> Tensor | None:
    return tensordot(input, other, (dims_self, dims_other))


#: By the names of torch's functions.
_NAMED: dict[str, Product] = {
    **{name: _by_name(products.matmul, own) for name, own in _OPERANDS.items()},
    **{name: _by_name(products.add_batches if name == "addbmm" else products.add_product, own) for name, own in _SUMMANDS.items()},
    **{name: products.convolution(getattr(functional, name)) for name in _CONVOLUTIONS},
    "inner": _by_name(inner, ("input", "other")),
    "einsum": einsum,
    "bilinear": products.bilinear_form,
    "linear": products.linear,
    "scaled_dot_product_attention": products.attention,
    "convolution": products.any_convolution,
    "_grouped_mm": products.grouped,
    "grouped_mm": products.grouped,
    "linear_cross_entropy": products.linear_cross_entropy,
    **{name: partial(recurrent.layer, step) for name, step in recurrent.STEPS.items()},
    **{f"{name}_cell": partial(recurrent.cell, step) for name, step in recurrent.STEPS.items()},
}
_NAMED |= {f"{name}_": _in_place(_NAMED[name]) for name in _SUMMANDS}


def _operators(name: str) -> Iterator[Any]:
    """Torch's operator of a name in all its forms but those with `out=`, if there is one."""
    packet = getattr(torch.ops.aten, name, None)
    if packet is not None:
        yield packet
        yield from (getattr(packet, form) for form in packet.overloads() if "out" not in form.split("_"))


#: The functions that are rounded.
PRODUCTS: dict[Any, Product] = {
    **{getattr(space, name): product for space in (torch, Tensor, F) for name, product in _NAMED.items() if hasattr(space, name)},
    **{operator: product for name, product in _NAMED.items() for operator in _operators(name)},
    Tensor.__matmul__: products.matmul,
    Tensor.__rmatmul__: _transposed_matmul,
    torch.linalg.matmul: _NAMED["matmul"],
    torch.tensordot: tensordot,
    **dict.fromkeys(_operators("tensordot"), _tensordot_by_dimensions),
}


def add_those_of_others() -> None:
    """Add the functions of other packages that are imported."""
    grouped = getattr(torch.ops.transformers, "grouped_mm_fallback", None)
    if grouped is not None:
        PRODUCTS.update(dict.fromkeys((grouped, grouped.default), products.grouped))
