"""Products, points and operands to compare with `product_oracle`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from qsim import FivePoint, Fixed, Float, Int, Quantizer, Stochastic
from qsim.formats import Format
from qsim.nn.product.autograd import planned
from qsim.nn.product.bilinear import LinearProduct, MatmulProduct, Product
from qsim.nn.product.convolution import ConvolutionProduct
from qsim.nn.product.plans import ProductPlan, plan_for
from support.points import in_order
from support.product_oracle import written_out

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def noisy(fmt: str | Format, bits: int | None = None, **options: Any) -> Quantizer:
    """A point that rounds stochastically."""
    return Quantizer(fmt, Stochastic(bits), **options)


# Formats of up to 8 bits are kept as codes for the backward pass, the others are rounded again.
NARROW, WIDE = Float(4, 1), Float(5, 6)
POINTS = {
    **{
        name: FivePoint(**{"act_bwd": None, "weight_bwd": None, name: noisy(NARROW)})
        for name in ("act", "weight", "act_bwd", "weight_bwd", "grad")
    },
    "nearest": FivePoint("e4m3", "e4m3", act_bwd="e4m3", weight_bwd="e4m3", grad="e5m2"),
    "all": FivePoint(
        noisy("e4m3"), noisy("e2m1"), act_bwd=noisy("e3m2"), weight_bwd=noisy("int4"), grad=noisy("e5m2"), grad_w=noisy(NARROW)
    ),
    "wide": in_order(*[noisy(WIDE)] * 6),
    "narrow and wide": FivePoint(
        noisy("e4m3"), Fixed(12, 6), act_bwd=noisy(WIDE), weight_bwd=noisy("e4m3"), grad=noisy(Float(8, 7), 5), grad_w=noisy("e5m2")
    ),
    "same": FivePoint(noisy("e4m3"), noisy("e2m1"), act_bwd="same", weight_bwd="same", grad="e5m2"),
    "same, wide": FivePoint(noisy(WIDE), noisy(WIDE), act_bwd="same", weight_bwd="same"),
    "same as nothing": FivePoint(None, None, act_bwd="same", weight_bwd="same", grad=noisy("e5m2")),
    "grad_w": FivePoint(grad=noisy("e5m2"), grad_w=noisy(NARROW)),
    "grad_w, nearest": FivePoint(grad=noisy("e5m2"), grad_w=NARROW),
    "recipe": FivePoint(None, "e2m1", act_bwd=noisy(NARROW), weight_bwd="same", grad=noisy(NARROW)),
    "clipped": FivePoint(
        Quantizer("e2m1", clip_gradient=True), noisy(Int(3), clip_gradient=True), act_bwd=noisy("e4m3"), weight_bwd="same", grad="e5m2"
    ),
    "clipped at zero": FivePoint(Quantizer(Int(4, signed=False), clip_gradient=True), None, act_bwd="same"),
}


class ProductSetting(NamedTuple):
    """A product without its tensors."""

    points: FivePoint
    product: Product
    two_inputs: bool = False

    def plan(self, a: Tensor, w: Tensor, bias: Tensor | None = None) -> ProductPlan:
        """Its plan for some operands."""
        plan = plan_for(self.points, self.product, a, w, bias, two_inputs=self.two_inputs)
        assert plan is not None, "nothing is rounded"
        return plan


def five_point_product(a: Tensor, w: Tensor, bias: Tensor | None, setting: ProductSetting, stream: int = 0) -> Tensor:
    """A product of a configuration, whose operands are rounded forward and backward."""
    return planned(a, w, bias, setting.plan(a, w, bias), stream)


class ProductCase(NamedTuple):
    """A product, torch's own function for it, and operands."""

    product: Product
    own: Callable[..., Tensor]
    a: tuple[int, ...]
    w: tuple[int, ...]
    bias: int | None = None
    two_inputs: bool = False


def linear(*shape: int, bias: int | None = 6) -> ProductCase:
    return ProductCase(LinearProduct(), F.linear, shape, (6, shape[-1]), bias)


def matmul(a: tuple[int, ...], b: tuple[int, ...]) -> ProductCase:
    return ProductCase(MatmulProduct(), torch.matmul, a, b, two_inputs=True)


def convolution(
    dims: int, stride: int = 1, padding: int = 0, dilation: int = 1, output_padding: int = 0, groups: int = 1, transposed: bool = False
) -> ProductCase:
    four = tuple((number,) * dims for number in (stride, padding, dilation, output_padding))
    names = {False: (F.conv1d, F.conv2d, F.conv3d), True: (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)}
    function = names[transposed][dims - 1]
    options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    options |= {"output_padding": output_padding} if transposed else {}
    channels = (4, 6 // groups) if transposed else (6, 4 // groups)
    return ProductCase(
        ConvolutionProduct(*four, groups, transposed),
        lambda a, w, b=None: function(a, w, b, **options),
        (3, 4, 8, 7, 6)[: 2 + dims],
        (*channels, *(3,) * dims),
        6,
    )


CASES = {
    "linear, one row": linear(7),
    "linear": linear(5, 7),
    "linear, three dimensions": linear(3, 5, 7),
    "linear, four dimensions": linear(2, 3, 5, 7),
    "linear, no bias": linear(3, 5, 7, bias=None),
    "linear, no rows": linear(0, 7),
    "linear, no rows of three dimensions": linear(2, 0, 7),
    "linear, no columns": linear(4, 0),
    "matmul": matmul((4, 5), (5, 3)),
    "matmul, batches": matmul((2, 4, 5), (2, 5, 3)),
    "matmul, one right": matmul((2, 4, 5), (5, 3)),
    "matmul, one left": matmul((4, 5), (2, 5, 3)),
    "matmul, broadcast": matmul((3, 1, 4, 5), (2, 5, 6)),
    "matmul, no batch": matmul((0, 4, 5), (5, 3)),
    **{f"conv{dims}d": convolution(dims) for dims in (1, 2, 3)},
    "conv1d, everything": convolution(1, 2, 1, 2, groups=2),
    "conv2d, everything": convolution(2, 2, 1, 2, groups=2),
    "conv3d, stride, padding": convolution(3, 2, 1),
    "conv2d, no bias": convolution(2)._replace(bias=None),
    "conv2d, no batch": convolution(2)._replace(a=(0, 4, 8, 7)),
    **{f"transposed {dims}d": convolution(dims, 2, 1, 1, 1, transposed=True) for dims in (1, 2, 3)},
    "transposed 2d, groups, dilation": convolution(2, 1, 0, 2, groups=2, transposed=True),
}


def operands(case: ProductCase, dtype: torch.dtype, device: torch.device, scale: float = 3.0) -> tuple[Tensor, ...]:
    """The operands of a case that require gradients, including the bias if it has one."""
    shapes = [case.a, case.w] + ([(case.bias,)] if case.bias else [])
    return tuple((torch.randn(shape) * scale).to(device, dtype).requires_grad_() for shape in shapes)


def run(case: ProductCase, points: FivePoint, given: tuple[Tensor, ...], g: Tensor | None = None, stream: int = 0) -> list[Tensor]:
    """The result and the gradients of the operands."""
    a, w, *bias = given
    y = five_point_product(a, w, bias[0] if bias else None, ProductSetting(points, case.product, case.two_inputs), stream)
    g = gradient(y) if g is None else g
    return [y, *torch.autograd.grad(y, given, g)]


def gradient(y: Tensor) -> Tensor:
    """A gradient of a result: the same at every call."""
    return torch.randn(y.shape, generator=torch.Generator().manual_seed(3)).to(y)


def bias_is_apart(case: ProductCase, result: Tensor) -> bool:
    """Whether torch rounds to 16 bits before it adds the bias."""
    return isinstance(case.product, ConvolutionProduct) and result.is_cuda and result.element_size() == 2


def check(case: ProductCase, points: FivePoint, given: tuple[Tensor, ...], g: Tensor | None = None) -> None:
    """Compare the product with the one written out, with the tolerances of float32 sums and of the dtype of the result."""
    torch.manual_seed(5)
    actual = run(case, points, given, g, stream=77)
    g = gradient(actual[0]) if g is None else g
    dim = -1 if isinstance(case.product, LinearProduct) else 1
    expected = written_out(case.own, case.two_inputs, points, given, g, dim, 5, 77)
    for name, found, like, due in zip(("y", "a", "w", "bias"), actual, (actual[0], *given), expected, strict=False):
        assert (found.dtype, found.shape) == (like.dtype, due.exact.shape), name
        facts = torch.finfo(found.dtype)
        # By default torch may sum in 16 bits on CPUs; on GPUs its convolutions round to 16 bits before adding the bias.
        accumulation = 8 * facts.eps if due.own and found.element_size() == 2 else 1e-6
        if name == "y" and bias_is_apart(case, found):
            accumulation = facts.eps
        bound = accumulation * due.size + facts.eps * due.exact.abs() + facts.smallest_normal * facts.eps
        error = (found.double() - due.exact).abs()
        assert (error <= bound).all(), f"{name} is off by {error.max():.3g}, {(error / bound).max():.3g} times what it may"
