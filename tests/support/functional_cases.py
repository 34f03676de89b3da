"""Calls of the functions that are linear in two operands, and their oracle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import qsim
from qsim import FivePoint, Quantizer
from qsim.nn import functional

Shape = tuple[int, ...]


@dataclass(frozen=True)
class FunctionCase:
    """A call of a function that is linear in two operands.

    Attributes:
        function: Its name in torch and in qsim.
        shapes: The shapes of the operands, and of the bias if there is one.
        options: The other arguments.
    """

    function: str
    shapes: tuple[Shape, ...]
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def two_inputs(self) -> bool:
        """Whether the second operand is not a weight."""
        return self.function in ("matmul", "bmm")

    def torchs(self, *operands: Tensor) -> Tensor:
        """Torch's own result."""
        function = getattr(torch if self.two_inputs else F, self.function)
        return function(*operands, **self.options)  # type: ignore[no-any-return]

    def own(self, points: FivePoint | None, *operands: Tensor) -> Tensor:
        """The result with points."""
        return getattr(functional, self.function)(*operands, **self.options, points=points)  # type: ignore[no-any-return]

    def __str__(self) -> str:
        shapes = " ".join("x".join(map(str, shape)) or "()" for shape in self.shapes)
        return f"{self.function} {shapes} {' '.join(f'{name}={value}' for name, value in self.options.items())}".strip()


LINEAR = [FunctionCase("linear", ((*rows, 5), (3, 5), (3,))) for rows in ((), (4,), (2, 4), (2, 2, 3), (0,))]
LINEAR += [FunctionCase("linear", ((4, 5), (3, 5))), FunctionCase("linear", ((4, 1), (1, 1), (1,)))]

MATRICES = [
    ((5,), (5,)),
    ((5,), (5, 3)),
    ((4, 5), (5,)),
    ((4, 5), (5, 3)),
    ((2, 4, 5), (5, 3)),
    ((4, 5), (2, 5, 3)),
    ((2, 4, 5), (2, 5, 3)),
]
MATRICES += [((5,), (2, 5, 3)), ((2, 4, 5), (5,)), ((2, 1, 4, 5), (3, 5, 2)), ((1, 4, 5), (3, 5, 2)), ((2, 2, 2, 3, 4), (2, 4, 3))]
MATMUL = [FunctionCase("matmul", shapes) for shapes in MATRICES] + [FunctionCase("bmm", ((2, 4, 5), (2, 5, 3)))]

CONV = [
    FunctionCase("conv1d", ((2, 4, 9), (6, 4, 3), (6,))),
    FunctionCase("conv1d", ((4, 9), (6, 2, 4), (6,)), {"padding": "same", "groups": 2}),
    FunctionCase("conv1d", ((2, 4, 9), (6, 4, 4)), {"padding": "same", "dilation": 2}),
    FunctionCase("conv1d", ((2, 4, 9), (4, 1, 3), (4,)), {"padding": (2,), "stride": (2,), "groups": 4}),
    FunctionCase("conv2d", ((2, 4, 7, 6), (6, 4, 3, 2), (6,))),
    FunctionCase("conv2d", ((2, 4, 7, 6), (6, 4, 3, 2), (6,)), {"padding": (2, 1), "stride": (2, 1), "dilation": (1, 3)}),
    FunctionCase("conv2d", ((2, 4, 7, 6), (6, 4, 4, 3), (6,)), {"padding": "same"}),
    FunctionCase("conv2d", ((2, 4, 7, 6), (6, 4, 2, 4)), {"padding": "same", "dilation": (3, 1)}),
    FunctionCase("conv2d", ((2, 4, 7, 6), (6, 4, 3, 3), (6,)), {"padding": "valid", "stride": 2, "dilation": 2}),
    FunctionCase("conv2d", ((4, 7, 6), (6, 2, 3, 3), (6,)), {"padding": 1, "groups": 2}),
    FunctionCase("conv3d", ((2, 2, 4, 5, 4), (4, 2, 2, 3, 2), (4,)), {"padding": (1, 0, 1), "stride": (1, 2, 1)}),
    FunctionCase("conv3d", ((2, 4, 5, 4), (4, 1, 2, 3, 4)), {"padding": "same", "groups": 2}),
]
TRANSPOSED = [
    FunctionCase("conv_transpose1d", ((2, 4, 5), (4, 6, 3), (6,)), {"stride": 2, "output_padding": 1}),
    FunctionCase("conv_transpose1d", ((4, 5), (4, 3, 3), (6,)), {"padding": 1, "groups": 2}),
    FunctionCase("conv_transpose2d", ((2, 4, 5, 4), (4, 6, 3, 2)), {"stride": (2, 3), "padding": (1, 0), "output_padding": (1, 2)}),
    FunctionCase("conv_transpose2d", ((4, 5, 4), (4, 3, 3, 3), (6,)), {"dilation": (2, 1), "groups": 2}),
    FunctionCase("conv_transpose3d", ((2, 4, 3, 3, 2), (4, 2, 2, 3, 2), (4,)), {"stride": (2, 1, 2), "groups": 2}),
]
CASES = LINEAR + MATMUL + CONV + TRANSPOSED
cases = pytest.mark.parametrize("case", CASES, ids=str)

POINTS = {
    "float32 everywhere": FivePoint(act="fp32", weight="fp32", act_bwd="fp32", weight_bwd="fp32", grad="fp32"),
    "hybrid": FivePoint(act="e4m3", weight="e4m3", act_bwd="e4m3", weight_bwd="e4m3", grad="e5m2"),
    "the forward's tensors": FivePoint(act="e2m1", weight="e3m2", act_bwd="same", weight_bwd="same", grad="e5m2"),
    "all of their own": FivePoint(act="e2m1", weight="e3m2", act_bwd="int4", weight_bwd="e4m1", grad="e5m2", grad_w="fp16"),
    "gradient only": FivePoint(grad="e3m0"),
    "weight only": FivePoint(weight="e2m1", weight_bwd=None),
    "backward inputs only": FivePoint(act_bwd="e2m1"),
}

#: No product here sums more terms than this; each may be off by half a unit in the last of float32's 24 bits.
TERMS = 256


def operands(case: FunctionCase, device: torch.device, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Leaf tensors with a case's shapes."""
    return [torch.randn(shape, device=device).to(dtype).requires_grad_() for shape in case.shapes]


def rounded(x: Tensor, point: Quantizer | None) -> Tensor:
    """A tensor as rounded by a point, with `qsim.quantize`."""
    if point is None:
        return x.detach()
    return qsim.quantize(x.detach(), point.format, rounding=point.rounding, overflow=point.usual_overflow)


def results(function: Callable[..., Tensor], leaves: list[Tensor], upstream: Tensor | None = None) -> list[Tensor]:
    """A function's value and its gradients."""
    value = function(*leaves)
    upstream = torch.randn(value.shape, generator=torch.Generator().manual_seed(1)).to(value) if upstream is None else upstream
    return [value.detach(), *torch.autograd.grad(value, leaves, upstream.to(value))]


def oracle(
    case: FunctionCase, leaves: list[Tensor], upstream: Tensor, points: FivePoint, transform: Callable[[Tensor], Tensor]
) -> list[Tensor]:
    """Algorithms 1 and 2 by torch's own function and autograd, in float64; `transform` is applied to all inputs.

    The two products of the backward pass are the gradients of two other calls, each with the operand that is rounded for it.
    """
    weight = points.act if case.two_inputs else points.weight
    backward = {"act": points.act_bwd, "weight": points.act_bwd if case.two_inputs else points.weight_bwd}
    act_bwd, weight_bwd = (
        forward if point == "same" else point for forward, point in ((points.act, backward["act"]), (weight, backward["weight"]))
    )

    def wide(x: Tensor, point: Quantizer | None = None) -> Tensor:
        return transform(rounded(x, point).double())

    a, w, *bias = leaves
    biases = [wide(b).requires_grad_() for b in bias]
    value = case.torchs(wide(a, points.act), wide(w, weight), *biases)
    leaf_a, leaf_w = wide(a).requires_grad_(), wide(w).requires_grad_()
    (grad_a,) = torch.autograd.grad(case.torchs(leaf_a, wide(w, weight_bwd), *biases), leaf_a, wide(upstream, points.grad))
    (grad_w,) = torch.autograd.grad(case.torchs(wide(a, act_bwd), leaf_w, *biases), leaf_w, wide(upstream, points.grad_w or points.grad))
    return [value.detach(), grad_a, grad_w, *(torch.autograd.grad(value, biases, wide(upstream)) if biases else ())]


def check(case: FunctionCase, leaves: list[Tensor], points: FivePoint) -> None:
    """Compare a case with the oracle: results may differ by the error of summing in float32, bounded by the sum of magnitudes."""
    value = case.own(points, *leaves)
    upstream = torch.randn(value.shape).to(value)
    given = results(lambda *tensors: case.own(points, *tensors), leaves, upstream)
    expected = oracle(case, leaves, upstream, points, lambda x: x)
    magnitudes = oracle(case, leaves, upstream, points, torch.abs)
    for a, b, magnitude, leaf in zip(given, expected, magnitudes, [value, *leaves], strict=True):
        assert (a.shape, a.dtype) == (leaf.shape, leaf.dtype)
        half_unit = torch.finfo(a.dtype).eps / 2
        bound = magnitude * TERMS * 2.0**-24 + b.abs() * half_unit
        if a is given[0] and a.is_cuda and a.element_size() == 2 and "conv" in case.function:
            bound += magnitude * half_unit  # it is rounded before the bias is added, as in torch
        assert ((a.double() - b).abs() <= bound).all(), (a.double() - b).abs().max()
