"""Layers whose products are summed by emulated accumulators: the same products written out, and what has no accumulators."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qsim
from qsim import FivePoint, Fixed, Quantizer, recipes, scaling
from qsim.accumulators import NAMED, Promoted, Rounded
from qsim.nn import functional

FP16 = Rounded("fp16")
EVERY = FivePoint("e4m3", "e4m3", act_bwd="same", weight_bwd="same", grad="e5m2", accumulate="h100_fp8_promoted")
EACH = FivePoint(
    "e4m3",
    "e4m3",
    act_bwd="e4m3",
    weight_bwd="e4m3",
    grad="e5m2",
    grad_w="e5m2",
    accumulate=("h100_fp8", FP16, Rounded("bf16", order="pairwise")),
)
SOME = FivePoint(grad="e5m2", accumulate=(None, "Rounded('bf16')", None))


def rounded(x: Tensor, point: Quantizer | str | None) -> Tensor:
    return qsim.quantize(x, point.format) if isinstance(point, Quantizer) else x


def product(a: Tensor, b: Tensor, points: FivePoint, index: int) -> Tensor:
    """A product of rounded operands; `index` is that of its accumulator."""
    how = points.sums[index]
    return a @ b if how is None else qsim.matmul(a, b, how)


def written_out(a: Tensor, w: Tensor, g: Tensor, points: FivePoint) -> tuple[Tensor, Tensor, Tensor]:
    """The result of a linear layer for rows of inputs, and its gradients."""
    g1 = rounded(g, points.grad)
    g2 = g1 if points.grad_w is None else rounded(g, points.grad_w)
    a_bwd, w_bwd = (getattr(points, name) for name in ("act_bwd", "weight_bwd"))
    backward_a = rounded(a, points.act if a_bwd == "same" else a_bwd)
    backward_w = rounded(w, points.weight if w_bwd == "same" else w_bwd)
    y = product(rounded(a, points.act), rounded(w, points.weight).t(), points, 0)
    return y, product(g1, backward_w, points, 1), product(g2.t(), backward_a, points, 2)


@pytest.mark.parametrize("points", [EVERY, EACH, SOME], ids=str)
@pytest.mark.parametrize("shape", [(5, 150), (2, 3, 150), (150,)])
def test_a_linear_layer_is_its_products_written_out(points: FivePoint, shape: tuple[int, ...]) -> None:
    a, w, bias = torch.randn(shape, requires_grad=True), torch.randn(6, 150, requires_grad=True), torch.randn(6, requires_grad=True)
    y = functional.linear(a, w, bias, points)
    g = torch.randn_like(y)
    found = torch.autograd.grad(y, (a, w, bias), g)
    rows, gradient = a.detach().reshape(-1, 150), g.reshape(-1, 6)
    result, grad_a, grad_w = written_out(rows, w.detach(), gradient, points)
    assert torch.equal(y.view(-1, 6), result + bias)
    assert torch.equal(found[0].reshape(-1, 150), grad_a)
    assert torch.equal(found[1], grad_w)
    assert torch.equal(found[2], gradient.sum(0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_results_are_rounded_once(dtype: torch.dtype) -> None:
    a, w, bias = torch.randn(40, 70).to(dtype), torch.randn(30, 70).to(dtype), torch.randn(30).to(dtype)
    unit = "h100_bf16" if dtype == torch.bfloat16 else "h100_fp16"
    points, total = FivePoint(accumulate=(unit, None, None)), qsim.matmul(a, w.t(), unit)
    for added, exact in ((None, total), (bias, total + bias.float())):
        y = functional.linear(a, w, added, points)
        assert y.dtype == dtype
        assert torch.equal(y, exact.to(dtype))
    assert not torch.equal(y, total.to(dtype) + bias), "the sum was rounded before"


@pytest.mark.parametrize("scale", [scaling.PerTensor(), scaling.PerTensor("e8m0", "ceil"), scaling.PerRow()], ids=str)
def test_scales_of_tensors_and_channels_multiply_the_sum(scale: scaling.Scaling) -> None:
    point = Quantizer("e4m3", scale=scale)
    points = FivePoint(point, point, act_bwd=point, weight_bwd=point, grad=point, accumulate="h100_fp8")
    a, w = torch.randn(5, 150) * 40, torch.randn(6, 150) / 7
    y = functional.linear(a, w, points=points)
    codes = [qsim.encode(x, "e4m3", scale=scale) for x in (a, w)]
    elements = [qsim.decode(code.codes, "e4m3") for code in codes]
    scales = [code.scales.view(-1) if code.scales.is_floating_point() else qsim.decode(code.scales, "e8m0").view(-1) for code in codes]
    total = qsim.matmul(elements[0], elements[1].t(), "h100_fp8", formats="e4m3")
    assert torch.allclose(y, total * scales[0].view(-1, 1) * scales[1], rtol=1e-6, atol=0)


def test_scales_of_blocks_are_part_of_the_operands() -> None:
    a, w = torch.randn(5, 96), torch.randn(6, 96)
    y = functional.linear(a, w, points=FivePoint("mxfp8", "mxfp8", accumulate=("h100_bf16", None, None), act_bwd=None, weight_bwd=None))
    assert torch.equal(y, qsim.matmul(qsim.quantize(a, "mxfp8"), qsim.quantize(w, "mxfp8").t(), "h100_bf16"))
    with pytest.raises(
        ValueError,
        match="h100_fp8 in the forward product: act times its blocks' scales: the unit takes operands in e4m3 or e5m2, got e8m3ieee",
    ):
        functional.linear(a, w, points=FivePoint("mxfp8", "mxfp8", accumulate=("h100_fp8", None, None), act_bwd=None, weight_bwd=None))


@pytest.mark.parametrize(
    ("a_shape", "b_shape"), [((4, 40), (40, 3)), ((2, 3, 4, 40), (3, 40, 5)), ((2, 4, 40), (40, 3)), ((4, 40), (2, 40, 3)), ((40,), (40,))]
)
def test_matmul_sums_each_product(a_shape: tuple[int, ...], b_shape: tuple[int, ...]) -> None:
    points = FivePoint(
        "e4m3", None, act_bwd="same", weight_bwd=None, grad="e4m3", accumulate=(Rounded("bf16"), Rounded("fp16"), "h100_fp8")
    )
    a, b = torch.randn(a_shape, requires_grad=True), torch.randn(b_shape, requires_grad=True)
    y = functional.matmul(a, b, points)
    g = torch.randn_like(y)
    grad_a, grad_b = torch.autograd.grad(y, (a, b), g)
    qa, qb, qg = (qsim.quantize(x.detach(), "e4m3") for x in (a, b, g))
    left, right = (qa.unsqueeze(0) if qa.dim() == 1 else qa), (qb.unsqueeze(1) if qb.dim() == 1 else qb)
    gradient = qg.view(1, 1) if qg.dim() == 0 else qg
    first, second, third = points.sums
    assert first is not None
    assert second is not None
    assert third is not None
    assert torch.equal(y.view(gradient.shape), qsim.matmul(left, right, first))
    assert torch.equal(grad_a, qsim.matmul(gradient, right.mT, second).sum_to_size(left.shape).view(a_shape))
    if right.dim() == 2:  # one sum over all rows
        rows, gradients = left.reshape(-1, left.shape[-1]), gradient.reshape(-1, gradient.shape[-1])
        assert torch.equal(grad_b, qsim.matmul(rows.t(), gradients, third).view(b_shape))
    else:
        assert torch.equal(grad_b, qsim.matmul(left.mT, gradient, third).sum_to_size(b_shape))


def test_operands_of_different_formats_keep_their_order() -> None:
    # Smallest numbers of E4M3 and E5M2 count with different exponents, whichever is on the left.
    x, g = torch.full((1, 1), 2.0**-9, requires_grad=True), torch.full((1, 1), 2.0**-16)
    unit = "Aligned(4, 3, operands=('e5m2', 'e4m3'))"
    wide = {order: qsim.matmul(*pair, unit, formats=formats).item() for order, pair, formats in (
        ("left", (g, x.detach()), ("e5m2", "e4m3")), ("right", (x.detach(), g), ("e4m3", "e5m2"))
    )}  # fmt: skip
    points = FivePoint("e4m3", "e4m3", act_bwd="e4m3", weight_bwd="e4m3", grad="e5m2", accumulate=unit)
    w = torch.full((1, 1), 2.0**-9, requires_grad=True)
    for function in (functional.linear, functional.matmul):
        y = function(x, w, points=points)
        assert [grad.item() for grad in torch.autograd.grad(y, (x, w), g)] == [wide["left"], wide["right"]]


def test_stochastic_sums_draw_anew_and_repeat_with_the_seed() -> None:
    points = FivePoint(accumulate=Rounded("bf16", rounding="stochastic"))
    a, w = torch.rand(6, 200, requires_grad=True), torch.rand(6, 200, requires_grad=True)

    def step() -> list[Tensor]:
        y = functional.linear(a, w, points=points)
        return [y.detach(), *torch.autograd.grad(y, (a, w), torch.ones_like(y) / 3)]

    torch.manual_seed(1)
    one, two = step(), step()
    torch.manual_seed(1)
    again = step()
    assert all(torch.equal(x, y) for x, y in zip(one, again, strict=True))
    assert not any(torch.equal(x, y) for x, y in zip(one, two, strict=True))


def test_attention_and_models_take_accumulators() -> None:
    model = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    x = torch.randn(2, 5, 16)
    plain = qsim.convert(copy.deepcopy(model), FivePoint("e4m3", "e4m3", act_bwd="e4m3", weight_bwd="e4m3", grad="e4m3"))(x)
    narrow = qsim.convert(
        copy.deepcopy(model), FivePoint("e4m3", "e4m3", act_bwd="e4m3", weight_bwd="e4m3", grad="e4m3", accumulate="Rounded('e5m3')")
    )(x)
    wide = qsim.convert(
        copy.deepcopy(model), FivePoint("e4m3", "e4m3", act_bwd="e4m3", weight_bwd="e4m3", grad="e4m3", accumulate=Rounded("fp32"))
    )(x)
    assert 0.01 < (plain - narrow).abs().max() < 3
    assert torch.allclose(plain, wide, atol=0.3)
    assert (plain - wide).abs().max() < (plain - narrow).abs().max()


def test_recipes_take_accumulators() -> None:
    for name, make in recipes.NAMED.items():
        needs = name in ("stochastic_backward", "weight_only", "nearest_everywhere")
        recipe = make(*(["e4m3"] if needs else [])).with_(accumulate=FP16, chip="never")
        assert (recipe.points.accumulate, recipe.points.chip) == (FP16, "never")
        assert qsim.recipes.Recipe.from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe
        assert "sums: Rounded('fp16'); chip: never" in recipe.describe()
    recipe = recipes.resolve("fp8_hybrid.with_(accumulate='h100_fp8_promoted')")
    assert "chip" not in json.dumps(recipe.to_dict())
    model = qsim.convert(nn.Sequential(nn.Linear(40, 8), nn.ReLU(), nn.Linear(8, 2)), recipe)
    assert "accumulate=h100_fp8_promoted" in str(qsim.nn.conversion(model))
    loss = model(torch.randn(4, 40)).square().sum()
    loss.backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in model.parameters())


# Values


def test_one_accumulator_is_three_alike() -> None:
    assert FivePoint(accumulate=(FP16, "Rounded('fp16')", FP16)) == FivePoint(accumulate=FP16)
    assert FivePoint(accumulate=(None, None, None)) == FivePoint()
    assert FivePoint(accumulate=FP16).sums == (FP16, FP16, FP16)
    assert FivePoint.from_dict({"accumulate": ["h100_bf16", None, None]}).sums == (NAMED["h100_bf16"], None, None)
    assert str(FivePoint(accumulate=("b200_bf16", None, FP16))) == "accumulate=(b200_bf16, None, Rounded('fp16'))"
    assert eval(repr(FivePoint(accumulate="h100_fp8_promoted")), {"FivePoint": FivePoint, "Promoted": Promoted}) == FivePoint(
        accumulate="h100_fp8_promoted"
    )


def test_points_of_older_versions_have_torchs_sums() -> None:
    state = FivePoint(act="e4m3", act_bwd=None).__getstate__()
    del state["accumulate"]
    points = FivePoint.__new__(FivePoint)
    points.__setstate__(state)
    assert points == FivePoint(act="e4m3", act_bwd=None)


# Errors


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FivePoint(accumulate="h100"), "FivePoint: accumulate: unknown accumulator 'h100': did you mean 'h100_fp8'?"),
        (lambda: FivePoint(accumulate=3), "FivePoint: accumulate must be an accumulator, or three: for the forward product, "),  # type: ignore[arg-type]
        (lambda: FivePoint(accumulate=(FP16, FP16)), "FivePoint: accumulate must be an accumulator, or three: "),
        (lambda: FivePoint(accumulate=(FP16, 3, None)), "FivePoint: accumulate: an accumulator must be a name or one of"),  # type: ignore[arg-type]
        (
            lambda: FivePoint("bf16", accumulate="h100_fp8", act_bwd=None),
            "FivePoint: act: h100_fp8: the unit takes operands in e4m3 or e5m2, got bf16",
        ),
        (
            lambda: FivePoint(grad="e6m3", accumulate=(None, "a100_fp16", None)),
            "FivePoint: grad: a100_fp16: the unit takes operands in fp16",
        ),
        (lambda: FivePoint.from_dict({"sums": "h100_fp8"}), "FivePoint has no point 'sums'"),
    ],
)
def test_accumulators_that_points_cannot_have(make: Callable[[], Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError)) as error:
        make()
    assert message in str(error.value)


X = torch.randn(2, 32)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: functional.linear(X, X, points=FivePoint("e4m3", "e4m3", accumulate="h100_fp8", act_bwd=None, weight_bwd=None)),
            "h100_fp8 in the product for the input's gradient: grad: the unit takes operands in e4m3 or e5m2, got fp32; round it there, or "
            "give three accumulators, with None for this product",
        ),
        (
            lambda: functional.linear(X.double(), X.double(), points=FivePoint(act="e4m3", accumulate=FP16, act_bwd=None)),
            "Rounded('fp16') in the forward product: operands must be numbers that float32 holds, and weight is float64, not rounded",
        ),
        (
            lambda: functional.linear(
                X.double(), X.double(), points=FivePoint(Fixed(32, 16), "e4m3", accumulate=FP16, act_bwd=None, weight_bwd=None)
            ),
            "operands must be numbers that float32 holds, got Fixed(32, 16)",
        ),
    ],
)
def test_operations_without_accumulators(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


# In use


@pytest.mark.slow
@pytest.mark.parametrize("points", [EVERY, FivePoint("mxfp8", "mxfp8", accumulate=FP16, act_bwd=None, weight_bwd=None)], ids=str)
def test_compiled_layers_have_the_same_bits(points: FivePoint) -> None:
    layer = qsim.nn.Linear(64, 5, points=points)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(4, 64, requires_grad=True)
    results = [module(x) for module in (layer, compiled)]
    assert torch.equal(*results)
    gradients = [torch.autograd.grad(y.square().sum(), (x, layer.weight)) for y in results]
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))
