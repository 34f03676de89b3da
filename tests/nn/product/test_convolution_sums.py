"""Convolutions with accumulators: each sum written out, forward and in both gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product as pairs

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import qsim
from qsim import FivePoint, Quantizer, scaling
from qsim.nn import functional

#: The order counts in all three: blocks of 32 products, a narrow sum, and chains of five products.
POINTS = FivePoint(
    "e4m3",
    "e4m3",
    act_bwd="same",
    weight_bwd="same",
    grad="e5m2",
    accumulate=("h100_fp8", "Rounded('bf16')", "Promoted(Rounded('fp16'), 5)"),
)
Options = dict[str, int]
CASES: list[Options] = [
    {"stride": 1, "padding": 0, "dilation": 1, "groups": 1},
    {"stride": 2, "padding": 1, "dilation": 1, "groups": 2},
    {"stride": 3, "padding": 2, "dilation": 2, "groups": 1},
    {"stride": 1, "padding": 4, "dilation": 1, "groups": 1},
]


def places(size: int, options: Options, kernel: int) -> Iterator[tuple[int, int, int]]:
    """The element of an image that a position of a result sees through an element of the kernel, in one dimension."""
    count = (size + 2 * options["padding"] - options["dilation"] * (kernel - 1) - 1) // options["stride"] + 1
    for position, element in pairs(range(count), range(kernel)):
        seen = position * options["stride"] + element * options["dilation"] - options["padding"]
        if 0 <= seen < size:
            yield position, element, seen


def written_out(x: Tensor, w: Tensor, g: Tensor, options: Options) -> tuple[Tensor, Tensor, Tensor]:
    """A convolution in two dimensions and its gradients, from matrices that are filled element by element."""
    groups, (samples, _, height, width), (out, few, tall, wide) = options["groups"], x.shape, w.shape
    down, along = g.shape[2:]
    many = out // groups
    y, grad_x, grad_w = torch.zeros_like(g), torch.zeros_like(x), torch.zeros_like(w)
    forward, backward, weight = POINTS.sums
    assert forward is not None
    assert backward is not None
    assert weight is not None
    rows, columns = list(places(height, options, tall)), list(places(width, options, wide))
    for group in range(groups):
        own_x, own_g = x[:, group * few : (group + 1) * few], g[:, group * many : (group + 1) * many]
        own_w = w[group * many : (group + 1) * many]
        windows = torch.zeros(samples, down, along, tall, wide, few)
        upstream = torch.zeros(samples, height, width, tall, wide, many)
        for (i, k, r), (j, m, c) in pairs(rows, columns):
            windows[:, i, j, k, m] = own_x[:, :, r, c]
            upstream[:, r, c, k, m] = own_g[:, :, i, j]
        left, kernels = windows.flatten(3).flatten(0, 2), own_w.permute(2, 3, 1, 0).flatten(0, 2)
        result = qsim.matmul(left, kernels, forward)
        y[:, group * many : (group + 1) * many] = result.view(samples, down, along, many).movedim(-1, 1)
        found = qsim.matmul(upstream.flatten(3).flatten(0, 2), own_w.permute(2, 3, 0, 1).flatten(0, 2), backward)
        grad_x[:, group * few : (group + 1) * few] = found.view(samples, height, width, few).movedim(-1, 1)
        gradient = qsim.matmul(own_g.movedim(1, -1).flatten(0, 2).t(), left, weight)
        grad_w[group * many : (group + 1) * many] = gradient.view(many, tall, wide, few).movedim(-1, 1)
    return y, grad_x, grad_w


@pytest.mark.parametrize("options", CASES, ids=str)
def test_a_convolution_is_its_sums_written_out(options: Options) -> None:
    x, w = torch.randn(2, 6, 7, 6, requires_grad=True), torch.randn(4, 6 // options["groups"], 3, 2, requires_grad=True)
    bias = torch.randn(4)
    y = functional.conv2d(x, w, bias, points=POINTS, **options)
    g = torch.randn_like(y)
    grad_x, grad_w = torch.autograd.grad(y, (x, w), g)
    qx, qw, qg = (qsim.quantize(t.detach(), name) for t, name in ((x, "e4m3"), (w, "e4m3"), (g, "e5m2")))
    result, of_x, of_w = written_out(qx, qw, qg, options)
    assert torch.equal(y, result + bias.view(-1, 1, 1))
    assert torch.equal(grad_x, of_x)
    assert torch.equal(grad_w, of_w)


@pytest.mark.parametrize("options", [*CASES[1:3], {"stride": 1, "padding": 0, "dilation": 2, "groups": 1, "output_padding": 1}], ids=str)
def test_a_transposed_convolution_is_a_convolution_the_other_way_round(options: Options) -> None:
    points = FivePoint(
        "e4m3", "e4m3", act_bwd="same", weight_bwd="same", grad="e4m3", accumulate=(POINTS.sums[1], POINTS.sums[0], POINTS.sums[2])
    )
    x, w = torch.randn(2, 4, 5, 4, requires_grad=True), torch.randn(4, 6 // options["groups"], 3, 2, requires_grad=True)
    y = functional.conv_transpose2d(x, w, points=points, **options)
    g = torch.randn_like(y)
    grad_x, grad_w = torch.autograd.grad(y, (x, w), g)
    qx, qw, qg = (qsim.quantize(t.detach(), "e4m3") for t in (x, w, g))
    # The images of the convolution are the results here; further rows of its results, which these also see, are not there.
    due = F.pad(qx, (0, 1, 0, 1)) if "output_padding" in options else qx
    _, result, of_w = written_out(qg, qw, due, options)
    of_x, _, _ = written_out(qg, qw, due, options)
    assert torch.equal(y, result)
    assert torch.equal(grad_x, of_x[:, :, :5, :4])
    assert "output_padding" in options or torch.equal(grad_w, of_w)


LAYERS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], int]] = {
    "conv1d": (functional.conv1d, F.conv1d, 1),
    "conv3d": (functional.conv3d, F.conv3d, 3),
    "conv_transpose1d": (functional.conv_transpose1d, F.conv_transpose1d, 1),
    "conv_transpose3d": (functional.conv_transpose3d, F.conv_transpose3d, 3),
}


@pytest.mark.parametrize("name", LAYERS)
def test_other_dimensions_are_close_to_torch(name: str) -> None:
    function, own, dims = LAYERS[name]
    x, w = torch.randn(2, 4, *(5, 4, 6)[:dims]), torch.randn(4, 2, *(3, 2, 2)[:dims])
    options = {"stride": 2, "padding": 1, "groups": 2 if "transpose" not in name else 1}
    tensors = [(t.requires_grad_(), t.detach().double().requires_grad_()) for t in (x, w)]
    y, expected = (f(*(t[i] for t in tensors), **options, **more) for i, (f, more) in enumerate(
        ((function, {"points": FivePoint(accumulate="Rounded('fp32')")}), (own, {}))
    ))  # fmt: skip
    g = torch.randn_like(expected)
    found = [y, *torch.autograd.grad(y, [t[0] for t in tensors], g.float())]
    for one, other in zip(found, [expected, *torch.autograd.grad(expected, [t[1] for t in tensors], g)], strict=True):
        assert torch.allclose(one.double(), other, atol=1e-4)


def test_scales_and_half_precision_follow_the_sum() -> None:
    point = Quantizer("e4m3", scale=scaling.PerAxis(0, format="e8m0", rule="ceil"))
    x, w, bias = torch.randn(2, 6, 5).bfloat16(), torch.randn(4, 6, 3).bfloat16(), torch.randn(4).bfloat16()
    y = functional.conv1d(x, w, bias, points=FivePoint(point, point, accumulate=("h100_fp8", None, None), act_bwd=None, weight_bwd=None))
    codes = [qsim.encode(t, "e4m3", scale=point.scale) for t in (x, w)]
    (left, of_x), (right, of_w) = ((qsim.decode(c.codes, "e4m3"), qsim.decode(c.scales, "e8m0").view(-1)) for c in codes)
    sums = functional.conv1d(
        left, right, points=FivePoint("e4m3", "e4m3", accumulate=("h100_fp8", None, None), act_bwd=None, weight_bwd=None)
    )
    assert torch.equal(y, (sums * of_x.view(-1, 1, 1) * of_w.view(-1, 1) + bias.view(-1, 1)).bfloat16())
