"""Outliers: the quantiles, the two parts, their products and their gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import qsim
from qsim.points import LSQ, Outliers
from qsim.points.base import limited
from support.comparing import same_bits


def with_outliers(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Normal numbers, every fiftieth of which is a hundred times larger."""
    x = torch.randn(shape, dtype=dtype)
    x.view(-1)[::50] *= 100
    return x


@pytest.mark.parametrize("quantile", [0.97, 0.99, 0.999])
@pytest.mark.parametrize("shape", [(1000,), (17, 31), (1,), ()])
def test_clamps_to_two_elements_of_the_sorted_tensor(quantile: float, shape: tuple[int, ...]) -> None:
    x = with_outliers(*shape)
    clamped, rest = Outliers("e2m1", quantile).split(x)
    numbers = sorted(x.flatten().tolist())
    low, high = (numbers[min(int(part * len(numbers)), len(numbers) - 1)] for part in (1 - quantile, quantile))
    assert torch.equal(clamped, x.clamp(low, high))
    assert torch.equal(rest, x - x.clamp(low, high))
    assert (rest != 0).sum() <= 2 * (1 - quantile) * x.numel() + 1


def test_one_product_of_the_sum_is_two_products_of_the_parts() -> None:
    x, w = with_outliers(64, 40), torch.randn(40, 8, dtype=torch.float64)
    point = qsim.Quantizer("e2m1", scale=qsim.scaling.PerAxis(0))
    outliers = Outliers(point, quantile=0.97)
    clamped, rest = outliers.split(x)
    torch.testing.assert_close(outliers(x) @ w, point(clamped) @ w + rest @ w)
    assert (outliers(x) - x).norm() < (point(x) - x).norm() / 3


@pytest.mark.parametrize("ends", [(-1.0, 1.0), (torch.tensor(-1.0), torch.tensor(1.0))], ids=["numbers", "tensors"])
def test_the_gradient_of_clamping_passes_at_the_ends(ends: tuple[Any, Any]) -> None:
    """Whatever that of torch's own does, which changed with torch 2.14."""
    x = torch.tensor([-2.0, -1.0, 0.0, 1.0, 2.0, torch.nan], requires_grad=True)
    y = limited(x, *ends)
    y.sum().backward()
    assert same_bits(y, torch.tensor([-1.0, -1.0, 0.0, 1.0, 1.0, torch.nan]))
    assert x.grad.tolist() == [0.0, 1.0, 1.0, 1.0, 0.0, 1.0]  # type: ignore[union-attr]


def test_the_gradient_of_clamped_values_is_1_and_that_of_others_the_points() -> None:
    x, upstream = with_outliers(1000).requires_grad_(), torch.randn(1000, dtype=torch.float64)
    outliers = Outliers(LSQ("int4", step=0.01))
    outliers(x).backward(upstream)
    clamped, rest = outliers.split(x.detach())
    inside = clamped.clone().requires_grad_()
    LSQ("int4", step=0.01)(inside).backward(upstream)
    assert inside.grad is not None
    assert same_bits(x.grad, torch.where(rest == 0, inside.grad, upstream))  # type: ignore[arg-type]
    assert (x.grad == 0).any()  # type: ignore[union-attr]
    assert outliers.point.change.grad is not None  # type: ignore[attr-defined]


TAPER = lambda quantile, **given: Outliers(qsim.Quantizer("e2m1", **given), quantile)  # noqa: E731


def split_in_float64(x: Tensor, quantile: float) -> tuple[Tensor, Tensor]:
    """The part that is rounded to E2M1, and the rest, by the definition."""
    numbers, count = x.flatten().sort().values, x.numel()
    low, high = (numbers[min(math.floor(part * count), count - 1)] for part in (1 - quantile, quantile))
    clamped = x.clamp(low, high)
    levels = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
    levels = torch.cat([-levels.flip(0), levels])
    return levels[(clamped.unsqueeze(-1) - levels).abs().argmin(-1)], x - clamped


@pytest.mark.parametrize("names", [("act",), ("weight",), ("grad",), ("act", "weight"), ("act", "weight", "grad")], ids=str)
def test_a_layers_products_are_those_of_the_definition(names: tuple[str, ...]) -> None:
    x, w, g = with_outliers(32, 24), with_outliers(8, 24), with_outliers(32, 8)
    quantiles = dict(zip(("act", "weight", "grad"), (0.97, 0.95, 0.9), strict=True))
    points = qsim.FivePoint(**{name: TAPER(quantiles[name]) for name in names})
    leaves = [x.clone().requires_grad_(), w.clone().requires_grad_(), torch.zeros(8, dtype=torch.float64, requires_grad=True)]
    y = qsim.nn.functional.linear(*leaves, points=points)
    y.backward(g)
    a, b, u = (sum(split_in_float64(t, quantiles[name])) if name in names else t for name, t in (("act", x), ("weight", w), ("grad", g)))
    # The gradient is straight through where a value was rounded, and that of the rest where it was clamped: the same.
    for found, due in zip([y, *(leaf.grad for leaf in leaves)], [a @ b.t(), u @ b, u.t() @ a, g.sum(0)], strict=True):
        torch.testing.assert_close(found, due)


@pytest.mark.parametrize("name", ["act", "weight", "grad"])
def test_what_is_rounded_is_added_by_an_accumulator_and_the_rest_in_float32(name: str) -> None:
    x, w, g = with_outliers(16, 32).float(), torch.randn(8, 32), torch.randn(16, 8)
    if name == "grad":
        x, g = torch.randn(16, 32), with_outliers(16, 8).float()
    given = {"act": "e4m3", "weight": "e4m3", "grad": qsim.Quantizer("e5m2", overflow="saturate")}
    outliers = Outliers(given[name], 0.9)

    def results(points: qsim.FivePoint, *parts: Tensor) -> list[Tensor]:
        leaves = [part.clone().requires_grad_() for part in parts[:2]]
        y = qsim.nn.functional.linear(*leaves, points=points)
        return [y.detach(), *torch.autograd.grad(y, leaves, parts[2])]

    found = results(qsim.FivePoint(**{**given, name: outliers}, accumulate="h100_fp8"), x, w, g)
    parts = x, w, g
    place = ("act", "weight", "grad").index(name)
    clamped, rest = outliers.split(parts[place])
    one = results(qsim.FivePoint(**given, accumulate="h100_fp8"), *(clamped if i == place else t for i, t in enumerate(parts)))
    other = results(qsim.FivePoint(**{**given, name: None}), *(rest if i == place else t for i, t in enumerate(parts)))
    if name == "grad":
        assert same_bits(found[0], one[0])
    else:
        assert same_bits(found[0], one[0] + other[0])
    of_other = 1 if name == "weight" else 2
    assert same_bits(found[of_other], one[of_other] + other[of_other])


@pytest.mark.slow
def test_layers_compile_and_learn_the_step_of_what_is_rounded() -> None:
    points = qsim.FivePoint(Outliers(LSQ("int4", step=0.1), 0.9), Outliers("e2m1", 0.9), Outliers("e2m1", 0.9))
    layer, x = qsim.nn.Linear(16, 8, points=points), torch.randn(32, 16)

    def gradients(call: Callable[[Tensor], Tensor]) -> list[Tensor]:
        return list(torch.autograd.grad(call(x).square().sum(), list(layer.parameters())))

    due = gradients(layer)
    torch._dynamo.reset()
    assert all(map(same_bits, gradients(torch.compile(layer, fullgraph=True, backend="aot_eager")), due))
    assert [name for name, _ in layer.named_parameters()] == ["weight", "bias", "act_point.point.change"]
    assert due[2].item() != 0


def test_coverage_and_monitors_see_both_products() -> None:
    net = torch.nn.Sequential(qsim.nn.Linear(16, 8, points=qsim.FivePoint(TAPER(0.9, scale="tensor"), "e4m3", "e5m2")))
    x = torch.randn(32, 16)
    forward = [product.points for product in qsim.coverage(net, x) if product.direction == "forward"]
    assert forward == [("act=e2m1 tensor", "weight=e4m3"), ("weight=e4m3",)]
    with qsim.diagnostics.Monitor(net) as monitor:
        net(x).sum().backward()
        monitor.step()
    assert ("act", "Outliers") in {(counts.point, counts.quantizer) for counts in monitor.samples[0]}


def test_noise_of_the_rounded_part_is_drawn_at_every_call() -> None:
    x, w = torch.randn(16, 32), torch.randn(8, 32)
    points = qsim.FivePoint(Outliers(qsim.Quantizer("e2m1", "stochastic"), 0.9))
    one, other = (qsim.nn.functional.linear(x, w, points=points) for _ in range(2))
    assert not torch.equal(one, other)


def test_convolutions_groups_and_lookups_are_linear_in_their_parts() -> None:
    point = Outliers("e2m1", 0.9)
    points = qsim.FivePoint(weight=point)
    image, kernel, table = torch.randn(2, 3, 6, 6), torch.randn(4, 3, 3, 3), torch.randn(9, 4)
    due = torch.nn.functional.conv2d(image, point(kernel))
    torch.testing.assert_close(qsim.nn.functional.conv2d(image, kernel, points=points), due)
    indices = torch.tensor([1, 4])
    torch.testing.assert_close(qsim.nn.functional.embedding(indices, table, points=points), point(table)[indices])


def test_with_a_backward_point_of_its_own_one_product_takes_the_sum() -> None:
    x, w = torch.randn(16, 32), torch.randn(8, 32)
    point = Outliers("e2m1", 0.9)
    y = qsim.nn.functional.linear(x, w, points=qsim.FivePoint(point, act_bwd="e4m3"))
    assert same_bits(y, point(x) @ w.t())
    with pytest.raises(ValueError, match=r"h100_fp8 in the forward product: act \(Outliers\): the unit takes operands in e4m3"):
        qsim.nn.functional.linear(x, w, points=qsim.FivePoint(point, "e4m3", act_bwd="e4m3", accumulate="h100_fp8"))


def test_what_does_not_work_names_the_point() -> None:
    x, w = torch.randn(16, 32), torch.randn(8, 32)
    with pytest.raises(
        ValueError, match="grad: Outliers are added to products in float32, which no chip does: give chip='auto' or 'never'"
    ):
        qsim.FivePoint("e4m3", "e4m3", Outliers("e5m2"), accumulate="h100_fp8", chip="require")
    with pytest.raises(RuntimeError, match=r"layers with Outliers at grad do not support the transforms of torch\.func"):
        torch.func.grad(lambda x: qsim.nn.functional.linear(x, w, points=qsim.FivePoint(grad=Outliers("e5m2"))).sum())(x)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Outliers("e2m1", quantile=0.5), "Outliers: quantile must be greater than 0.5 and less than 1, got 0.5"),
        (lambda: Outliers("e2m1", quantile=1.0), "Outliers: quantile must be greater than 0.5 and less than 1, got 1.0"),
        (lambda: Outliers(None), "Outliers: a format or a qsim.Quantizer is needed, got None"),
        (lambda: Outliers("e2m1").split(torch.ones(2).int()), "Outliers: x must be float32"),
    ],
)
def test_errors_say_what_is_wrong(make: object, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        make()  # type: ignore[operator]


@pytest.mark.parametrize("name", ["act", "weight"])
def test_the_bias_is_added_once_to_a_product_in_two_parts(name: str) -> None:
    x, w, bias, points = torch.randn(16, 8), torch.randn(4, 8), 100 * torch.ones(4), qsim.FivePoint(**{name: Outliers("e4m3", 0.9)})
    found, without = (qsim.nn.functional.linear(x, w, added, points) for added in (bias, None))
    torch.testing.assert_close(found, without + bias)
