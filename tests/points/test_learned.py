"""LSQ and PACT against the equations of their papers, written here in float64, and trained."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import qsim
from qsim.points import LSQ, PACT
from support.comparing import same_bits
from support.digits import digits

#: Formats and the values that the papers' `round` chooses from.
INTEGERS = {
    "int4": range(-8, 8),
    "uint4": range(16),
    "int2": range(-2, 2),
    "int8": range(-128, 128),
}
E2M1 = [sign * value for value in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0) for sign in (-1, 1)]
LEVELS = {**{name: [float(i) for i in values] for name, values in INTEGERS.items()}, "e2m1": sorted(E2M1)}


def nearest(x: Tensor, levels: list[float]) -> Tensor:
    """The nearest level of each element; random numbers are not halfway between two."""
    table = torch.tensor(levels, dtype=torch.float64)
    return table[(x.unsqueeze(-1) - table).abs().argmin(-1)]


def test_the_symmetric_overflow_leaves_the_lowest_integer_out() -> None:
    x = torch.linspace(-3, 3, 61, dtype=torch.float64)
    points = [LSQ(qsim.Quantizer("int4", overflow="saturate_symmetric"), 0.25), LSQ(qsim.Int(4, symmetric=True), 0.25)]
    grads = []
    for point in points:
        point(x).square().sum().backward()
        grads.append(point.change.grad)
    assert same_bits(points[0](x), points[1](x))
    assert points[0](x).min() == -1.75
    assert same_bits(*grads)  # type: ignore[arg-type]


def lsq(v: Tensor, s: float, levels: list[float]) -> tuple[Tensor, Tensor, Tensor]:
    """Equations 1 to 3 and 5 of arXiv 1902.08153: the values, and their derivatives by `v` and by `s`."""
    q_n, q_p = -min(levels), max(levels)
    inside = (-q_n < v / s) & (v / s < q_p)
    by_s = torch.where(inside, nearest(v / s, levels) - v / s, torch.where(v > 0, q_p, -q_n))
    return nearest((v / s).clamp(-q_n, q_p), levels) * s, inside.double(), by_s


@pytest.mark.parametrize("name", LEVELS)
@pytest.mark.parametrize("step", [0.031, 0.4, 0.5])
def test_lsqs_values_and_gradients_are_those_of_the_paper(name: str, step: float) -> None:
    x = torch.randn(40, 30, dtype=torch.float64)
    x[0, :2] = step * torch.tensor([min(LEVELS[name]), max(LEVELS[name])])  # the ends of the range are not inside
    x.requires_grad_()
    upstream = torch.randn(40, 30, dtype=torch.float64)
    point = LSQ(name, step).double()
    point.initial.fill_(step)
    y = point(x)
    y.backward(upstream)
    values, by_x, by_s = lsq(x.detach(), step, LEVELS[name])
    assert point.change.grad is not None
    torch.testing.assert_close(y, values)
    torch.testing.assert_close(x.grad, upstream * by_x)
    torch.testing.assert_close(point.change.grad, ((upstream * by_s).sum() / math.sqrt(1200 * max(LEVELS[name]))).view(1))


def test_lsqs_channels_have_the_gradients_of_separate_steps() -> None:
    x, upstream = torch.randn(2, 5, 7, dtype=torch.float64, requires_grad=True), torch.randn(2, 5, 7, dtype=torch.float64)
    whole = LSQ("int4", channels=5, dim=1).double()
    whole(x).backward(upstream)
    assert whole.change.grad is not None
    for i in range(5):
        part = LSQ("int4").double()
        mine = x.detach()[:, i].clone().requires_grad_()
        y = part(mine)
        y.backward(upstream[:, i])
        torch.testing.assert_close(part.initial, whole.initial[i : i + 1])
        torch.testing.assert_close(part.change.grad, whole.change.grad[i : i + 1])
        torch.testing.assert_close(y, whole(x)[:, i])
        assert x.grad is not None
        torch.testing.assert_close(mine.grad, x.grad[:, i])


def test_lsqs_step_starts_as_in_the_paper_and_at_the_first_tensor_only() -> None:
    x, point = torch.randn(1000), LSQ("int4")
    assert point.step.item() == 0
    point(x)
    assert point.step.item() == pytest.approx(2 * x.abs().mean().item() / math.sqrt(7))
    before = point.step.clone()
    point(10 * x)
    assert same_bits(point.step, before)
    loaded = LSQ("int4")
    loaded.load_state_dict(point.state_dict())
    loaded(10 * x)
    assert same_bits(loaded.step, before)
    point.reset_parameters()
    point(10 * x)
    assert point.step.item() == pytest.approx(10 * before.item())


def test_lsqs_step_is_1_after_zeros_and_unset_after_an_empty_tensor() -> None:
    point = LSQ("int4")
    point(torch.empty(0, 3))
    assert point.step.item() == 0
    point(torch.zeros(3))
    assert point.step.item() == 1


@pytest.mark.parametrize("step", [0.0, -1.0])
def test_lsq_recovers_from_a_step_that_is_not_positive(step: float) -> None:
    point = LSQ("int4", step=1.0)
    with torch.no_grad():
        point.change.fill_(step - 1)
    x = torch.tensor([0.5, -0.5, 0.0])
    y = point(x)
    assert y.isfinite().all()
    y.sub(x).square().sum().backward()
    assert point.change.grad is not None
    assert point.change.grad.item() < 0  # gradient descent makes the step larger


def test_small_updates_of_a_bfloat16_step_count() -> None:
    point = LSQ("int4", step=0.25).bfloat16()
    with torch.no_grad():
        point.change.add_(2.0**-14)
    assert point.step.item() == 0.25 + 2.0**-14
    assert point(torch.ones(1)).item() == 4 * (0.25 + 2.0**-14)


def test_lsq_rounds_as_its_quantizer() -> None:
    x, step = torch.rand(1000) * 3 - 1.5, 0.25
    for rounding in ("down", "toward_zero", "stochastic"):
        point = LSQ(qsim.Quantizer("int4", rounding), step)
        assert same_bits(point(x, seed=3), qsim.quantize(x / step, "int4", rounding, seed=3) * step)


def test_lsqs_stochastic_rounding_draws_from_torchs_generator() -> None:
    x, point = torch.full((1000,), 0.375), LSQ(qsim.Quantizer("int4", "stochastic"), 0.25)
    first, second = point(x), point(x)
    assert not torch.equal(first, second)
    assert set(first.tolist()) == {0.25, 0.5}
    generators = [torch.Generator().manual_seed(1) for _ in range(2)]
    assert same_bits(*(point(x, generator=generator) for generator in generators))


def pact(x: Tensor, alpha: float, levels: list[float]) -> tuple[Tensor, Tensor, Tensor]:
    """Equations 1 to 3 of arXiv 1805.06085, and their mirror image for signed levels: values, and derivatives by `x` and by `alpha`."""
    low = -alpha if min(levels) < 0 else 0.0
    scale = alpha / max(levels)
    values = nearest(x.clamp(low, alpha) / scale, levels) * scale
    by_alpha = (x >= alpha).double() - ((x <= low).double() if low else 0.0)
    return values, ((x > low) & (x < alpha)).double(), by_alpha


@pytest.mark.parametrize("name", LEVELS)
def test_pacts_values_and_gradients_are_those_of_the_paper(name: str) -> None:
    x = torch.randn(40, 30, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn(40, 30, dtype=torch.float64)
    point = PACT(name, alpha=1.25).double()
    y = point(x)
    y.backward(upstream)
    values, by_x, by_alpha = pact(x.detach(), 1.25, LEVELS[name])
    torch.testing.assert_close(y, values)
    torch.testing.assert_close(x.grad, upstream * by_x)
    torch.testing.assert_close(point.alpha.grad, (upstream * by_alpha).sum().view(1))
    assert 0 < by_alpha.abs().sum() < 1200


def test_pact_learns_a_range_that_fits() -> None:
    x, point = torch.rand(4000) * 2, PACT("uint4", alpha=0.5)
    optimizer = torch.optim.SGD([point.alpha], 0.5)
    for _ in range(100):
        optimizer.zero_grad()
        (point(x) - x).square().mean().backward()
        optimizer.step()
    assert 1.8 < point.alpha.item() < 2.0


def test_pact_compiles_with_dynamic_shapes() -> None:
    x, point = torch.randn(6, 8, requires_grad=True), PACT("uint4", alpha=0.5)
    compiled = torch.compile(point, fullgraph=True, dynamic=True, backend="eager")
    gradients = [torch.autograd.grad(call(x).sum(), (x, point.alpha)) for call in (compiled, point)]
    assert all(map(torch.equal, *gradients))


def accuracy(net: nn.Module) -> float:
    """The accuracy in percent after training on digits."""
    x, y, x_test, y_test = digits()
    steps = [parameter for name, parameter in net.named_parameters() if name.endswith("change")]
    others = [parameter for name, parameter in net.named_parameters() if not name.endswith("change")]
    # Adam moves a parameter by about the learning rate, whatever its gradient's size, and steps are much smaller than weights.
    optimizer = torch.optim.Adam([{"params": others, "lr": 5e-3}, {"params": steps, "lr": 2e-4}])
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    batches = torch.Generator().manual_seed(0)
    for _ in range(20):
        for batch in torch.randperm(len(y), generator=batches).split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x.flatten(1)[batch]), y[batch]).backward()
            optimizer.step()
        schedule.step()
    with torch.no_grad():
        return (net(x_test.flatten(1)).argmax(1) == y_test).double().mean().item() * 100


def digits_net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))


@pytest.mark.slow
def test_digits_train_with_four_bits_as_in_float32() -> None:
    exact = accuracy(digits_net(0))
    net = qsim.convert(digits_net(0), qsim.FivePoint(act=LSQ("uint4"), weight=LSQ("int4")))
    learned = accuracy(net)
    # Over seeds 0 to 5: 95.7 to 96.1 % in float32, and from 0.6 points more to 0.2 points less in four bits.
    assert exact > 95
    assert learned > exact - 1
    changes = [parameter for name, parameter in net.named_parameters() if name.endswith("_point.change")]
    assert len(changes) == 4
    assert all(change.abs().item() > 0 for change in changes)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LSQ("mxfp4"), "LSQ: LSQ computes its own scale; give a quantizer without one, got scale=PerBlock"),
        (
            lambda: LSQ(qsim.Quantizer("int4", overflow="nonfinite")),
            "LSQ: values beyond the range become its ends: leave overflow='nonfinite'",
        ),
        (lambda: LSQ(None), "LSQ: a format or a qsim.Quantizer is needed, got None"),
        (lambda: LSQ("e9z"), "LSQ: unknown format 'e9z'"),
        (lambda: LSQ(qsim.Quantizer("int4", clip_gradient=True)), "LSQ: clip_gradient=True contradicts the gradient of LSQ"),
        (lambda: LSQ(qsim.Quantizer("int4", transform=qsim.transforms.Hadamard(4))), r"LSQ: apply Hadamard\(.*\) before the point"),
        (lambda: LSQ(qsim.Int(1)), r"LSQ: the format needs a positive value; the largest of Int\(1\) is 0"),
        (lambda: LSQ("int4", step=0.0), "LSQ: step must be greater than 0 and less than inf, got 0.0"),
        (lambda: LSQ("int4", step=True), "LSQ: step must be a number, got True"),
        (lambda: LSQ("int4", channels=0), "LSQ: channels must be in 1…"),
        (lambda: LSQ("int4", channels=3)(torch.ones(4, 3)), r"LSQ: 3 channels along dimension 0 do not fit a tensor of shape \(4, 3\)"),
        (lambda: LSQ("int4", channels=3, dim=2)(torch.ones(4, 3)), "LSQ: 3 channels along dimension 2 do not fit"),
        (lambda: LSQ("int4")(torch.ones(3, dtype=torch.int64)), "LSQ: x must be float32, bfloat16, float16 or float64"),
        (lambda: PACT("uint4", alpha=-1.0), "PACT: alpha must be greater than 0"),
        (lambda: PACT("mxfp8"), "PACT: PACT computes its own scale"),
    ],
)
def test_errors_say_what_is_wrong(make: object, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        make()  # type: ignore[operator]
