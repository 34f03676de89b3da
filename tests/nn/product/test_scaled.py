"""Layers with scales, compared with products written out: operands rounded group by group, multiplied in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

import qsim
from qsim import FivePoint, Quantizer
from qsim.nn import functional
from qsim.nn.product.observers import Observer, hold
from qsim.nn.product.sites import Site
from qsim.scaling import PerBlock, PerRow, PerTensor, PerTile, Scaling
from support.points import in_order

POINTS = ("act", "weight", "act_bwd", "weight_bwd", "grad", "grad_w")
SCALES = {"tensor": PerTensor, "channel": lambda **how: PerRow(**how), "blocks": lambda **how: PerBlock(4, **how)}
SCALES |= {"tiles": lambda **how: PerTile(2, 3, **how), "square": lambda **how: PerTile(3, 3, **how)}


@dataclass(frozen=True)
class Lies:
    """The dimensions of an operand over which its product sums or does not sum, and those that a matrix has as rows."""

    summed: int
    kept: int
    is_image: bool = False


def groups(shape: torch.Size, scale: Scaling, lies: Lies) -> list[Tensor]:
    """The indices of the elements that share a scale."""
    index = torch.arange(shape.numel()).view(shape)
    if isinstance(scale, PerTensor):
        return [index.flatten()]
    fibres = index.movedim(lies.summed, -1).reshape(-1, shape[lies.summed])
    if isinstance(scale, PerBlock):
        return [part for fibre in fibres for part in fibre.split(scale.size)]
    if isinstance(scale, PerRow):
        return list(index.movedim(lies.kept, 0).flatten(1)) if lies.is_image else list(fibres)
    assert isinstance(scale, PerTile)
    matrices = [index.flatten(1)] if lies.is_image else list(index.reshape(-1, *shape[-2:]))
    return [part.flatten() for m in matrices for rows in m.split(scale.height) for part in rows.split(scale.width, 1)]


def rounded(x: Tensor, point: Quantizer | None, lies: Lies) -> Tensor:
    """An operand, rounded group by group, in float64."""
    x = x.detach()
    if point is None or point.scale is None:
        return x.double() if point is None else point(x).double()
    found = torch.empty(x.numel(), dtype=torch.float64)
    for group in groups(x.shape, point.scale, lies):
        own = x.flatten()[group]
        found[group] = qsim.quantize(own, point.format, scale=PerTensor(point.scale.format, point.scale.rule)).double()
    return found.view(x.shape)


@dataclass(frozen=True)
class Case:
    """An operation.

    Attributes:
        function: The operation with points.
        plain: The operation in float64.
        shapes: The shapes of its operands.
        lies: The dimensions of the six operands, in the order of `POINTS`.
        merges: Whether the first operand and the result are treated as rows.
    """

    name: str
    function: Callable[..., Tensor]
    plain: Callable[[Tensor, Tensor], Tensor]
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    lies: tuple[Lies, ...]
    merges: bool = False
    two_inputs: bool = False

    def __str__(self) -> str:
        return self.name


def _conv(groups: int = 1) -> Case:
    numbers: dict[str, Any] = {"padding": (1, 0), "stride": (1, 2), "groups": groups}
    lies = (Lies(1, 0, True), Lies(1, 0, True), Lies(0, 1, True), Lies(0, 1, True), Lies(1, 0, True), Lies(0, 1, True))
    shapes = ((5, 6, 5, 4), (4, 6 // groups, 2, 3))
    return Case(
        f"conv2d groups={groups}",
        lambda x, w, points: functional.conv2d(x, w, **numbers, points=points),
        lambda x, w: F.conv2d(x, w, **numbers),
        shapes,
        lies,
    )


_TRANSPOSED: dict[str, Any] = {"padding": (1, 0), "stride": (1, 2)}
# act, weight, act_bwd, weight_bwd, grad, grad_w
CASES = [
    Case(
        "linear",
        lambda x, w, points: functional.linear(x, w, points=points),
        F.linear,
        ((3, 5, 11), (7, 11)),
        (Lies(1, 0), Lies(1, 0), Lies(0, 1), Lies(0, 1), Lies(1, 0), Lies(0, 1)),
        merges=True,
    ),
    Case(
        "matmul",
        lambda a, b, points: functional.matmul(a, b, points),
        torch.matmul,
        ((2, 5, 11), (2, 11, 6)),
        (Lies(2, 1), Lies(1, 2), Lies(1, 2), Lies(2, 1), Lies(2, 1), Lies(1, 2)),
        two_inputs=True,
    ),
    Case(
        "matmul of one second operand",
        lambda a, b, points: functional.matmul(a, b, points),
        torch.matmul,
        ((3, 5, 11), (11, 6)),
        (Lies(1, 0), Lies(0, 1), Lies(0, 1), Lies(1, 0), Lies(1, 0), Lies(0, 1)),
        merges=True,
        two_inputs=True,
    ),
    Case(
        "matmul broadcast",
        lambda a, b, points: functional.matmul(a, b, points),
        torch.matmul,
        ((2, 1, 5, 7), (3, 7, 6)),
        (Lies(-1, -2), Lies(-2, -1), Lies(-2, -1), Lies(-1, -2), Lies(-1, -2), Lies(-2, -1)),
        two_inputs=True,
    ),
    _conv(),
    Case(
        "conv_transpose2d",
        lambda x, w, points: functional.conv_transpose2d(x, w, **_TRANSPOSED, points=points),
        lambda x, w: F.conv_transpose2d(x, w, **_TRANSPOSED),
        ((5, 6, 4, 3), (6, 4, 2, 3)),
        (Lies(1, 0, True), Lies(0, 1, True), Lies(0, 1, True), Lies(1, 0, True), Lies(1, 0, True), Lies(0, 1, True)),
    ),
]


def numbers(*shape: int) -> Tensor:
    """Integers with outliers along every dimension, so that no two directions have the same scales."""
    x = torch.randint(-6, 7, shape).float()
    for dim in range(len(shape)):
        sizes = [-1 if i == dim else 1 for i in range(len(shape))]
        x = x * 2.0 ** torch.randint(0, 3, (shape[dim],)).view(sizes)
    return x


def oracle(case: Case, a: Tensor, w: Tensor, g: Tensor, points: FivePoint) -> list[Tensor]:
    """The result and both gradients from torch's own function and autograd in float64."""
    act, weight, act_bwd, weight_bwd, grad, grad_w = case.lies

    def of(x: Tensor, point: Any, forward: Quantizer | None, lies: Lies, forward_lies: Lies, merged: bool) -> Tensor:
        seen = x.reshape(-1, x.shape[-1]) if merged and case.merges else x
        found = rounded(seen, forward, forward_lies) if point == "same" else rounded(seen, point, lies)
        return found.view(x.shape)

    second, second_bwd = (points.act, points.act_bwd) if case.two_inputs else (points.weight, points.weight_bwd)
    value = case.plain(of(a, points.act, None, act, act, True), of(w, second, None, weight, weight, False))
    leaf_a, leaf_w = a.detach().double().requires_grad_(), w.detach().double().requires_grad_()
    upstream_a = of(g, points.grad, None, grad, grad, True)
    upstream_w = of(g, points.grad_w or points.grad, None, grad_w, grad_w, True)
    by_w, by_a = of(w, second_bwd, second, weight_bwd, weight, False), of(a, points.act_bwd, points.act, act_bwd, act, True)
    (grad_a,) = torch.autograd.grad(case.plain(leaf_a, by_w), leaf_a, upstream_a)
    (grad_b,) = torch.autograd.grad(case.plain(by_a, leaf_w), leaf_w, upstream_w)
    return [value, grad_a, grad_b]


def results(case: Case, a: Tensor, w: Tensor, g: Tensor, points: FivePoint) -> list[Tensor]:
    value = case.function(a, w, points)
    return [value.detach(), *torch.autograd.grad(value, (a, w), g)]


def leaves(case: Case, make: Callable[..., Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    a, w = (make(*shape).requires_grad_() for shape in case.shapes)
    return a, w, make(*case.plain(a, w).shape)


def single(name: str, point: Quantizer) -> FivePoint:
    """One point, or all points."""
    if name == "all":
        return in_order(*[point] * 5)
    return FivePoint(**{"act_bwd": None, "weight_bwd": None, name: point}, **({"grad": "fp32"} if name == "grad_w" else {}))


def singles() -> list[tuple[Case, str, str]]:
    """Every operation with every point by itself, and every scale with every point; not all three combined."""
    kinds = list(SCALES)
    return [(case, kinds[(i + j) % len(kinds)], name) for i, case in enumerate(CASES) for j, name in enumerate(POINTS)]


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("case", "kind", "name"), [*singles(), *((case, kind, "all") for case in CASES for kind in SCALES)], ids=str)
def test_products_of_exact_numbers_are_exact(case: Case, kind: str, name: str) -> None:
    points = single(name, Quantizer("e2m1", scale=SCALES[kind](format="e8m0", rule="ceil")))
    a, w, g = leaves(case, numbers)
    for found, expected in zip(results(case, a, w, g, points), oracle(case, a, w, g, points), strict=True):
        assert torch.equal(found.double(), expected), (found - expected).abs().max()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", ["tensor", "blocks", "tiles"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_other_scales_come_out_within_the_error_of_the_sum(case: Case, kind: str) -> None:
    points = in_order(*[Quantizer("e4m3", scale=SCALES[kind]())] * 5)
    a, w, g = leaves(case, lambda *shape: torch.randn(shape).exp())
    for found, expected in zip(results(case, a, w, g, points), oracle(case, a, w, g, points), strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5 * float(expected.abs().mean()))


@pytest.mark.parametrize("kind", ["tensor", "square"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_forwards_tensors_are_reused(case: Case, kind: str) -> None:
    point = Quantizer("e2m1", scale=SCALES[kind](format="e8m0", rule="ceil"))
    points = FivePoint(point, point, act_bwd="same", weight_bwd="same", grad=point)
    a, w, g = leaves(case, numbers)
    for found, expected in zip(results(case, a, w, g, points), oracle(case, a, w, g, points), strict=True):
        assert torch.equal(found.double(), expected)


@pytest.mark.parametrize("case", [CASES[0], CASES[4]], ids=str)
def test_two_levels(case: Case) -> None:
    """Blocks of NVFP4 by `qsim.quantize` of operands transposed so that the summed dimension comes last."""
    points = in_order(*["nvfp4"] * 5)
    a, w, g = leaves(case, lambda *shape: torch.randn(shape).exp())

    def of(x: Tensor, number: int) -> Tensor:
        seen = x.detach().reshape(-1, x.shape[-1]) if case.merges else x.detach()
        lies = case.lies[number].summed
        return qsim.quantize(seen.movedim(lies, -1), "nvfp4").movedim(-1, lies).reshape(x.shape).double()

    value = case.plain(of(a, 0), of(w, 1))
    leaf_a, leaf_w = a.detach().double().requires_grad_(), w.detach().double().requires_grad_()
    (grad_a,) = torch.autograd.grad(case.plain(leaf_a, of(w, 3)), leaf_a, of(g, 4))
    (grad_w,) = torch.autograd.grad(case.plain(of(a, 2), leaf_w), leaf_w, of(g, 5))
    for found, expected in zip(results(case, a, w, g, points), [value, grad_a, grad_w], strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5 * float(expected.abs().mean()))


@pytest.mark.parametrize("name", ["forward", "both"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_transforms_cancel(case: Case, name: str) -> None:
    wide = Quantizer("fp32", transform=qsim.transforms.Hadamard(4))
    points = FivePoint(wide, wide, act_bwd=None, weight_bwd=None) if name == "forward" else in_order(*[wide] * 5)
    a, w, g = leaves(case, lambda *shape: torch.randn(shape))
    for found, expected in zip(results(case, a, w, g, points), oracle(case, a, w, g, FivePoint()), strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def test_transforms_are_those_of_the_quantizer() -> None:
    """A layer multiplies what a quantizer returns for its operands, random bits included."""
    point = Quantizer("nvfp4", transform=qsim.transforms.Hadamard(8))
    x, w = torch.randn(6, 40), torch.randn(5, 40)
    found = functional.linear(x, w, points=FivePoint(point, point, act_bwd=None, weight_bwd=None))
    torch.testing.assert_close(found, point(x) @ point(w).t(), rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("kind", ["tensor", "blocks"])
def test_groups_of_channels(kind: str) -> None:
    case = _conv(groups=2)
    points = in_order(*[Quantizer("e2m1", scale=SCALES[kind](format="e8m0", rule="ceil"))] * 5)
    a, w, g = leaves(case, numbers)
    for found, expected in zip(results(case, a, w, g, points), oracle(case, a, w, g, points), strict=True):
        assert torch.equal(found.double(), expected)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("kind", "dtype"), [("tensor", torch.bfloat16), ("channel", torch.float16), ("blocks", torch.float64)])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_results_have_the_operands_dtype_and_are_rounded_once(case: Case, kind: str, dtype: torch.dtype) -> None:
    points = in_order(*[Quantizer("e2m1", scale=SCALES[kind](format="e8m0", rule="ceil"))] * 5)
    a, w, g = leaves(case, lambda *shape: torch.randint(-6, 7, shape).to(dtype))
    for found, expected in zip(results(case, a, w, g, points), oracle(case, a, w, g, points), strict=True):
        assert found.dtype == dtype
        assert torch.equal(found, expected.to(dtype))


def test_float64_keeps_its_bits() -> None:
    """Scales are float32 even then, but the numbers multiplied by them are not rounded to it."""
    x, w = torch.randn(4, 8, dtype=torch.float64), torch.randn(3, 8, dtype=torch.float64)
    blocks = Quantizer("e4m3", scale=PerBlock(4))
    exact = functional.linear(x, w, points=FivePoint(blocks, blocks, act_bwd=None, weight_bwd=None))
    torch.testing.assert_close(exact, F.linear(blocks(x), blocks(w)), rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_bias_is_added_to_the_scaled_result(case: Case) -> None:
    if case.two_inputs:
        pytest.skip("no bias")
    points = in_order(*[Quantizer("e2m1", scale=PerRow(format="e8m0", rule="ceil"))] * 5)
    a, w, g = leaves(case, numbers)
    bias = torch.randn(g.shape[1] if a.dim() == 4 else g.shape[-1]).requires_grad_()
    function = {"linear": functional.linear, "conv2d groups=1": functional.conv2d}.get(case.name, functional.conv_transpose2d)
    y, without = function(a, w, bias, points=points), function(a, w, points=points)
    assert torch.equal(y, without + (bias.view(-1, 1, 1) if a.dim() == 4 else bias))
    upstream = torch.randint(-8, 9, y.shape).float()
    (gradient,) = torch.autograd.grad(y, bias, upstream)
    assert torch.equal(gradient, upstream.sum([0, 2, 3] if a.dim() == 4 else [0, 1]))


def test_gradients_are_rounded_once_per_product_if_scales_have_directions() -> None:
    """With stochastic rounding two roundings draw different bits: those of the product that has its own."""
    x, w = torch.eye(6).requires_grad_(), torch.eye(6).requires_grad_()
    g = torch.randn(6, 6)
    for scale, alike in ((PerTensor(), True), (PerTile(2, 2), True), (PerBlock(2), False), (PerRow(), False)):
        points = FivePoint(grad=Quantizer("e2m1", "stochastic", scale=scale))
        torch.manual_seed(0)
        y = functional.linear(x, w, points=points)
        grad_x, grad_w = torch.autograd.grad(y, (x, w), g)
        assert torch.equal(grad_x, grad_w.t()) == alike, scale


def gradients(layer: qsim.nn.Linear, x: Tensor, g: Tensor) -> tuple[dict[str, Tensor], int]:
    """The gradients that are needed, and how often the backward pass rounds the result's gradient for both products at once."""
    y, needed = layer(x), {name: each for name, each in (("x", x), *layer.named_parameters()) if each.requires_grad}
    with profile(activities=[ProfilerActivity.CPU]) as run:
        found = torch.autograd.grad(y, [*needed.values()], g)
    return dict(zip(needed, found, strict=True)), sum(event.name == "qsim::quantize_both_ways" for event in run.events())


def test_a_gradient_in_blocks_along_both_dimensions_is_read_once(device: torch.device) -> None:
    """With the bits that each product gets where the other is not needed."""
    layer = qsim.nn.Linear(40, 96, points=qsim.recipes.mxfp8().points, device=device)
    x, g = torch.randn(2, 35, 40, device=device).exp(), torch.randn(2, 35, 96, device=device).exp()
    of_weight, alone = gradients(layer, x, g)
    both, together = gradients(layer, x.requires_grad_(), g)
    of_input, without = gradients(layer.requires_grad_(False), x, g)
    assert (alone, together, without) == (0, 1, 0)
    assert both.keys() == of_weight.keys() | of_input.keys()
    assert all(torch.equal(both[name], each) for name, each in (of_weight | of_input).items())


def test_observers_see_both_roundings_of_one_read() -> None:
    seen: list[tuple[str, int]] = []

    class Sees(Observer):
        def rounds(self, site: Site, x: Tensor, seed: Tensor | None, rounded: Tensor | None = None) -> None:
            seen.append((site.name, 0 if site.along is None else site.along.summed))

    with hold(Sees()):
        qsim.nn.Linear(64, 32, points=FivePoint(grad="mxfp8"))(torch.randn(32, 64).requires_grad_()).sum().backward()
    assert seen == [("grad", -1), ("grad", -2)]


TURNED = Quantizer("mxfp8", transform=qsim.transforms.Hadamard(32))


@pytest.mark.parametrize(
    "points",
    [
        FivePoint(grad=Quantizer("mxfp8", "stochastic")),
        FivePoint(act_bwd=TURNED, weight_bwd=TURNED, grad=TURNED),
        FivePoint(grad="mxfp8", grad_w="mxfp6"),
        FivePoint(grad="nvfp4"),
        FivePoint(grad=Quantizer("e4m3", scale=PerRow())),
        FivePoint(*["mxfp8"] * 2, act_bwd="mxfp8", weight_bwd="mxfp8", grad="mxfp8", accumulate="b200_mxfp8"),
    ],
    ids=str,
)
def test_other_gradients_are_rounded_product_by_product(points: FivePoint) -> None:
    assert gradients(qsim.nn.Linear(64, 32, points=points), torch.randn(32, 64).requires_grad_(), torch.randn(32, 32))[1] == 0


def test_a_table_is_scaled_along_its_rows() -> None:
    table, index = torch.randn(7, 40).exp().requires_grad_(), torch.tensor([[1, 3], [3, 6]])
    points = FivePoint(weight="mxfp4", grad=Quantizer("e4m3", scale=PerRow()), weight_bwd=None)
    y = functional.embedding(index, table, points=points)
    assert torch.equal(y, qsim.quantize(table.detach(), "mxfp4")[index])
    g = torch.randn(2, 2, 40).exp()
    (gradient,) = torch.autograd.grad(y, table, g)
    rows = qsim.quantize(g.view(4, 40), "e4m3", scale=PerRow())
    assert torch.equal(gradient, torch.zeros(7, 40).index_add(0, index.flatten(), rows))


def test_gradients_that_pass_through_are_scaled_both_ways() -> None:
    layer = qsim.nn.Quantize(forward="mxfp4", backward="nvfp4")
    x, g = torch.randn(5, 40).exp().requires_grad_(), torch.randn(5, 40).exp()
    y = layer(x)
    assert torch.equal(y, qsim.quantize(x.detach(), "mxfp4"))
    assert torch.equal(torch.autograd.grad(y, x, g)[0], qsim.quantize(g, "nvfp4"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fmt", "transform", "backend"), [("mxfp8", None, "aot_eager"), ("nvfp4", qsim.transforms.Hadamard(16), "inductor")]
)
def test_compiled_code_gives_the_same_bits(fmt: str, transform: qsim.transforms.Hadamard | None, backend: str) -> None:
    point = Quantizer(fmt, transform=transform)
    layer = qsim.nn.Linear(48, 20, points=in_order(*[point] * 5))
    # The gradient of the bias sums unrounded numbers: integers, so that the order does not matter.
    x, g = torch.randn(3, 7, 48, requires_grad=True), torch.randint(-99, 100, (3, 7, 20)).float()
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    found = [compiled(x), *torch.autograd.grad(compiled(x), [x, *layer.parameters()], g)]
    wanted = [layer(x), *torch.autograd.grad(layer(x), [x, *layer.parameters()], g)]
    assert all(map(torch.equal, found, wanted))


@pytest.mark.slow
@pytest.mark.parametrize("scale", [PerRow(), PerBlock(32, format="e8m0")], ids=["channel", "blocks"])
def test_compiled_code_of_any_size(scale: Scaling) -> None:
    layer = qsim.nn.Linear(48, 20, bias=False, points=in_order(*[Quantizer("e4m3", scale=scale)] * 5))
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (3, 5, 9):
        x, g = torch.randn(rows, 7, 48, requires_grad=True), torch.randn(rows, 7, 20)
        found, wanted = ([y, *torch.autograd.grad(y, [x, layer.weight], g)] for y in (compiled(x), layer(x)))
        assert all(map(torch.equal, found, wanted))


def test_layers_whose_gradient_is_not_asked_for() -> None:
    layer = qsim.nn.Linear(32, 8, points=in_order(*["mxfp8"] * 5))
    layer.weight.requires_grad_(False)
    x = torch.randn(4, 32, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad is not None
    assert layer.weight.grad is None
    with torch.no_grad():
        assert not layer(x).requires_grad
    empty = torch.randn(0, 32, requires_grad=True)
    layer(empty).sum().backward()
    assert empty.grad is not None
    assert empty.grad.shape == (0, 32)
