"""Points that are callables and modules: values, gradients, parameters, and what sees them."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import qsim
from qsim import FivePoint, Quantizer
from qsim.nn import functional
from qsim.recipes import CallablePoint

X, W, B = (torch.randn(*shape, generator=torch.Generator().manual_seed(1)) for shape in ((8, 16), (4, 16), (4,)))


def e4m3(x: Tensor) -> Tensor:
    return qsim.quantize(x, "e4m3")


def e5m2(x: Tensor) -> Tensor:
    return qsim.quantize(x, "e5m2", overflow="nonfinite")


class Learned(nn.Module):
    """LSQ without its gradient scale: the step trains."""

    def __init__(self, step: float) -> None:
        super().__init__()
        self.step = nn.Parameter(torch.tensor(step))

    def forward(self, x: Tensor) -> Tensor:
        scaled = (x / self.step).clamp(-8, 7)
        return (scaled + (scaled.round() - scaled).detach()) * self.step


def results(points: object, x: Tensor = X) -> list[Tensor]:
    """A linear layer's result and gradients."""
    leaves = [t.clone().requires_grad_() for t in (x, W, B)]
    y = functional.linear(*leaves, points=points)  # type: ignore[arg-type]
    return [y.detach(), *torch.autograd.grad(y.sin().sum(), leaves)]


def of_module(module: nn.Module, call: Callable[[Tensor], Tensor] | None = None) -> list[Tensor]:
    x = X.clone().requires_grad_()
    y = (call or module)(x)
    return [y.detach(), *torch.autograd.grad(y.sin().sum(), [x, *module.parameters()])]


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def test_a_callable_that_rounds_to_a_format_is_the_format() -> None:
    assert equal(results(FivePoint(e4m3, e4m3, e5m2)), results(FivePoint("e4m3", "e4m3", "e5m2")))
    for name in ("act_bwd", "weight_bwd"):
        expected = FivePoint("e4m3", "e4m3", "e5m2", **{name: "e3m2"})  # type: ignore[arg-type]
        assert equal(results(FivePoint("e4m3", "e4m3", "e5m2", **{name: lambda x: qsim.quantize(x, "e3m2")})), results(expected))  # type: ignore[arg-type]
    assert equal(results(FivePoint(grad="e5m2", grad_w=e5m2)), results(FivePoint(grad="e5m2", grad_w="e5m2")))
    image, kernel = torch.randn(2, 3, 6, 6), torch.randn(4, 3, 3, 3)
    found, expected_y = (functional.conv2d(image, kernel, points=FivePoint(*points)) for points in ((e4m3, e4m3), ("e4m3", "e4m3")))
    assert torch.equal(found, expected_y)
    table = torch.randn(5, 3)
    assert torch.equal(functional.embedding(torch.tensor([1]), table, points=FivePoint(weight=e4m3)), e4m3(table)[[1]])


def test_noise_is_drawn_once_for_both_passes() -> None:
    def noise(x: Tensor) -> Tensor:
        return x + torch.randn_like(x)

    x, w = X.clone().requires_grad_(), torch.zeros(4, 16, requires_grad=True)
    torch.manual_seed(3)
    functional.linear(x, w, points=FivePoint(act=noise)).sum().backward()
    torch.manual_seed(3)
    assert torch.equal(w.grad, torch.ones(8, 4).t() @ noise(X))  # type: ignore[arg-type]


def test_gradients_are_chosen() -> None:
    inside = (X.abs() <= 0.5).float()
    straight, clipped, doubled = (
        results(FivePoint(act=CallablePoint(e4m3, *given)))[1]  # type: ignore[arg-type]
        for given in (("straight",), ("clipped", (-0.5, 0.5)), (lambda x, g: 2 * g,))
    )
    assert torch.equal(clipped, straight * inside)
    assert torch.equal(doubled, 2 * straight)
    with pytest.raises(ValueError, match=r"gradient='clipped' needs limits=\(low, high\)"):
        CallablePoint(e4m3, "clipped")
    with pytest.raises(ValueError, match="gradient must be 'straight', 'clipped', 'own' or a function, got 'ste'"):
        CallablePoint(e4m3, "ste")  # type: ignore[arg-type]


@pytest.mark.parametrize("back", ["same", None])
def test_a_module_trains_as_by_autograd(back: str | None) -> None:
    layer = qsim.convert(nn.Linear(16, 4), FivePoint(Learned(0.1), Learned(0.2), act_bwd=back, weight_bwd=back))  # type: ignore[arg-type]
    assert [name for name, _ in layer.named_parameters()] == ["weight", "bias", "act_point.step", "weight_point.step"]
    _, of_x, of_w, of_bias, of_act, of_weight = of_module(layer)
    x, w, act, weight = X.clone().requires_grad_(), layer.weight.detach().clone().requires_grad_(), Learned(0.1), Learned(0.2)
    y = F.linear(act(x), weight(w), layer.bias)
    if back == "same":
        expected = torch.autograd.grad(y.sin().sum(), [x, w, layer.bias, act.step, weight.step])
        assert equal([of_x, of_w, of_bias, of_act, of_weight], list(expected))
    else:  # the operands of the backward pass are not rounded
        g = y.detach().cos()
        passed = torch.autograd.grad(act(x), x, g @ w.detach())[0]
        assert torch.equal(of_x, passed)


def test_backward_modules_are_called() -> None:
    for name in ("act_bwd", "weight_bwd", "grad", "grad_w"):
        given = {"act": "e4m3", "weight": "e4m3", "grad": "e5m2", name: Learned(0.05)}
        by_quantizer = {**given, name: Quantizer("fp32")}
        assert not equal(results(FivePoint(**given)), results(FivePoint(**by_quantizer))), name


def test_output_and_bias_are_rounded() -> None:
    y, *gradients = results(FivePoint(output="e4m3", bias="e2m1"))
    assert torch.equal(y, e4m3(F.linear(X, W, qsim.quantize(B, "e2m1"))))
    g = y.cos()
    assert torch.equal(gradients[0], g @ W)
    assert torch.equal(results(FivePoint(output=e4m3, bias=lambda x: qsim.quantize(x, "e2m1")))[0], y)
    noisy = FivePoint(output=Quantizer("e2m1", "stochastic"))
    assert not torch.equal(results(noisy)[0], results(noisy)[0])
    with pytest.raises(ValueError, match="FivePoint: output: a transform cancels only in a product"):
        FivePoint(output=Quantizer("e4m3", transform=qsim.transforms.Hadamard(4)))


def test_requantized_rounds_what_was_rounded() -> None:
    block = Quantizer("mxfp4")
    x = X.clone().requires_grad_()
    w = W.clone().requires_grad_()
    g = torch.randn(8, 4)
    _, of_w = torch.autograd.grad(functional.linear(x, w, points=FivePoint(block, act_bwd="requantized")), [x, w], g)
    again = qsim.quantize(qsim.quantize(X, "mxfp4"), "e2m1", scale=qsim.scaling.PerBlock(32, 0, format="e8m0", rule="floor"))
    assert torch.equal(of_w, g.t() @ again)
    with pytest.raises(ValueError, match='grad="requantized" has no forward tensor to reuse'):
        FivePoint(grad="requantized")


def test_layers_have_their_own_modules() -> None:
    points = FivePoint(Learned(0.1), Learned(0.2))
    model = qsim.convert(nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4)), points)
    assert len({id(parameter) for parameter in model.parameters()}) == 8
    assert {"0.act_point.step", "2.weight_point.step"} < set(model.state_dict())
    expected = of_module(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other[0].points.act.function is other[0].act_point is not model[0].act_point
        assert equal(of_module(other), expected)
    state = {name: value + 0.01 for name, value in model.state_dict().items()}
    other = qsim.convert(nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4)), points)
    other.load_state_dict(state)
    model.load_state_dict(state)
    assert equal(of_module(other), of_module(model))
    assert not [name for name, _ in qsim.revert(model).named_parameters() if "point" in name]


def test_modules_go_where_the_layer_is(device: torch.device) -> None:
    layer = qsim.convert(nn.Linear(16, 4).to(device), FivePoint(Learned(0.5), None, None))
    assert layer.act_point.step.device == layer.weight.device
    assert layer(X.to(device)).shape == (8, 4)


def test_learned_steps_train() -> None:
    layer = qsim.convert(nn.Linear(16, 4), FivePoint(Learned(0.5), Learned(0.5)))
    optimizer = torch.optim.Adam(layer.parameters(), 1e-2)
    losses = []
    for _ in range(200):
        optimizer.zero_grad()
        loss = (layer(X) - X[:, :4]).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 4
    assert layer.act_point.step.item() != 0.5


@pytest.mark.slow
@pytest.mark.parametrize(
    "points",
    [FivePoint(Learned(0.1), Learned(0.2)), FivePoint(e4m3, e4m3, e5m2), FivePoint("e4m3", "e4m3", "e5m2", output=e4m3, bias="bf16")],
    ids=["module", "callables", "around"],
)
def test_compiled_checkpointed_and_transformed_code_gives_the_same_bits(points: FivePoint) -> None:
    model = qsim.convert(nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4)), points)
    expected = of_module(model)
    torch._dynamo.reset()
    assert equal(of_module(model, torch.compile(model, fullgraph=True, backend="aot_eager")), expected)
    torch._dynamo.reset()
    x = X.clone().requires_grad_()
    checkpoint(model, x, use_reentrant=False).sin().sum().backward()
    assert torch.equal(x.grad, expected[1])  # type: ignore[arg-type]
    assert torch.equal(torch.func.grad(lambda x: model(x).sin().sum())(X), expected[1])


def test_reports_show_callables() -> None:
    model = qsim.convert(nn.Sequential(nn.Linear(16, 4)), FivePoint(e4m3, Learned(0.1), e5m2, output="e4m3"))
    assert str(model[0].points) == "act=e4m3, weight=Learned, grad=e5m2, output=e4m3"
    found = qsim.coverage(model, X)
    assert (found.share, {product.module for product in found}) == (1.0, {"0"})
    with qsim.diagnostics.Monitor(model, 1) as monitor:
        model(X).sum().backward()
        monitor.step()
    labels = {(counts.point, counts.quantizer) for counts in monitor.samples[0]}
    assert {("act", "e4m3"), ("weight", "Learned"), ("grad", "e5m2"), ("output", "e4m3")} <= labels


def test_all_points_from_one_rounding_and_by_name() -> None:
    everywhere = FivePoint("e4m3", "e4m3", "e4m3")
    for given in ("e4m3", Quantizer("e4m3"), qsim.format("e4m3"), torch.float8_e4m3fn):
        assert equal(results(given), results(everywhere))
        assert qsim.convert(nn.Linear(2, 2), given).points == everywhere
    assert equal(results("hfp8"), results(qsim.recipes.hfp8().points))
    image, kernel = torch.randn(1, 2, 5, 5), torch.randn(2, 2, 3, 3)
    assert torch.equal(functional.conv2d(image, kernel, points="hfp8"), functional.conv2d(image, kernel, points=qsim.recipes.hfp8().points))


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (
            lambda: results(FivePoint(act=lambda x: x[0])),
            TypeError,
            r"act: <lambda> must return a floating-point tensor of shape \(8, 16\)",
        ),
        (lambda: results(FivePoint(grad=lambda x: None)), TypeError, "grad: <lambda> must return a floating-point tensor .*, got None"),
        (lambda: FivePoint(act=e4m3).to_dict(), ValueError, "FivePoint: act is the callable e4m3, which plain values cannot express"),
        (
            lambda: FivePoint(e4m3, Quantizer("e4m3", transform=qsim.transforms.Hadamard(4))),
            ValueError,
            "weight is transformed .*, and act, its partner in a product, has no quantizer with the same transform",
        ),
        (
            lambda: results(FivePoint(e4m3, "e4m3", accumulate=("h100_fp8", None, None))),
            ValueError,
            r"act \(e4m3\): the unit takes operands in e4m3 or e5m2",
        ),
        (
            lambda: qsim.export(qsim.convert(nn.Sequential(nn.Linear(16, 16)), FivePoint(weight=e4m3)), "nowhere"),
            ValueError,
            "its point weight is the callable e4m3, whose results no layout can express",
        ),
        (
            lambda: qsim.export(qsim.convert(nn.Sequential(nn.Linear(16, 16)), FivePoint(e4m3, "e4m3")), "nowhere"),
            ValueError,
            "its point act is the callable e4m3, which no layout can express",
        ),
    ],
)
def test_errors_name_the_callable(call: Callable[[], Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call()


def test_functions_that_change_their_argument_raise_an_error() -> None:
    """It may be a weight or what another layer reads, too."""

    def limited(x: Tensor) -> Tensor:
        return x.clamp_(-0.1, 0.1)

    for point in ("act", "weight", "bias", "act_bwd", "grad"):
        layer = qsim.convert(nn.Linear(8, 4), FivePoint(**{point: limited}))
        with pytest.raises(TypeError, match=f"{point}: limited changed the tensor that it was given"):
            layer(torch.ones(2, 8, requires_grad=True)).square().sum().backward()
    with torch.inference_mode():
        assert torch.isfinite(qsim.convert(nn.Linear(8, 4), FivePoint(act=torch.sign))(torch.ones(2, 8))).all()


class Rows(qsim.points.PointModule):
    """Rounds each row under its own scale."""

    gradient = "straight"
    is_directed = True

    def rounded(self, x: Tensor, **noise: Any) -> Tensor:
        return qsim.points.surrogate(x, qsim.quantize(x.detach(), "e2m1", scale="row"))


class RowsByAutograd(Rows):
    """The same, differentiated by autograd."""

    gradient = "own"


def test_directed_points_follow_the_sum_of_each_product() -> None:
    rows = Quantizer("e2m1", scale="row")
    for straight, quantizer in zip(results(FivePoint(Rows(), Rows(), Rows())), results(FivePoint(rows, rows, rows)), strict=True):
        torch.testing.assert_close(straight, quantizer)


def test_directed_gradients_are_rounded_for_each_product_whatever_their_own_gradient() -> None:
    """Nothing is differentiated through the rounding of a gradient."""
    assert equal(results(FivePoint(grad=RowsByAutograd())), results(FivePoint(grad=Rows())))
    for own, quantizer in zip(
        results(FivePoint(grad=RowsByAutograd())), results(FivePoint(grad=Quantizer("e2m1", scale="row"))), strict=True
    ):
        torch.testing.assert_close(own, quantizer)


def test_directed_points_with_their_own_gradient_are_multiplied_in_both_passes() -> None:
    x, g = X.clone().requires_grad_(), torch.randn(8, 4)
    w = W.clone().requires_grad_()
    (of_w,) = torch.autograd.grad(functional.linear(x, w, points=FivePoint(act=RowsByAutograd())), w, g)
    torch.testing.assert_close(of_w, g.T @ Rows()(X))
    (again,) = torch.autograd.grad(functional.linear(x, w, points=FivePoint(act=RowsByAutograd(), act_bwd=Rows())), w, g)
    torch.testing.assert_close(again, g.T @ Rows()(X.T).T)


def test_a_directed_class_says_which_gradient_it_has() -> None:
    with pytest.raises(TypeError, match=r"^Blocks: is_directed = True needs a gradient: with 'straight' a layer rounds a tensor again"):

        class Blocks(qsim.points.PointModule):
            is_directed = True

    class Derived(Rows):
        is_directed = True

    assert Derived.gradient == "straight"
