"""`OptimLP` of `qsim.compat.qtorch`: compared with its steps written out, resumed, and in training."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qsim.compat.qtorch import BlockFloatingPoint, FixedPoint, FloatingPoint, Number
from qsim.compat.qtorch.auto_low import sequential_lower
from qsim.compat.qtorch.optim import OptimLP
from qsim.compat.qtorch.quant import Quantizer, float_quantize, quantizer
from support.ranks import NEEDS_GLOO, Ranks, ranks_of


def to_steps(bits: int) -> Callable[[Tensor], Tensor]:
    """A user-defined function."""
    return lambda x: torch.round(x * 2.0**bits) / 2.0**bits


def noisy(number: Number) -> Callable[[Tensor], Tensor]:
    return quantizer(forward_number=number, forward_rounding="stochastic")


def gradients(step: int) -> Tensor:
    return torch.randn(50, generator=torch.Generator().manual_seed(step))


def trained(optimizer: torch.optim.Optimizer, w: Tensor, steps: range) -> Tensor:
    for step in steps:
        w.grad = gradients(step).to(w.device)
        optimizer.step()
    return w.detach().clone()


def parameter() -> nn.Parameter:
    return nn.Parameter(torch.linspace(-1, 1, 50))


def sgd(w: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(w, lr=0.1, momentum=0.9, weight_decay=0.01)


def adam(w: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(w, lr=0.01)


@pytest.mark.parametrize("with_accumulator", [False, True])
def test_steps_of_sgd_written_out(with_accumulator: bool) -> None:
    weight, grad, momentum, accumulator = (to_steps(bits) for bits in (5, 7, 9, 12))
    w, due = parameter(), parameter().detach()
    optimizer = OptimLP(sgd([w]), weight, 4.0, grad, momentum, accumulator if with_accumulator else None)
    buffer, copied = torch.zeros(50), due.clone()
    for step in range(6):
        w.grad = gradients(step)
        assert optimizer.step() is None
        source = copied if with_accumulator else due
        g = grad(gradients(step) * 4.0)
        assert torch.equal(w.grad, g)
        g = g + 0.01 * source
        buffer = g.clone() if step == 0 else 0.9 * buffer + g
        source = source - 0.1 * buffer
        copied = accumulator(source) if with_accumulator else source
        due, buffer = weight(copied), momentum(buffer)
        torch.testing.assert_close(w.detach(), due, rtol=0, atol=2.0**-5 if step else 0)
        assert torch.equal(w.detach(), weight(w.detach()))
        # One of the two roundings may differ; after it they are compared again.
        with torch.no_grad():
            due, buffer = w.detach().clone(), optimizer.state[w]["momentum_buffer"].clone()
            copied = optimizer.weight_acc[w].clone() if with_accumulator else due
        assert torch.equal(buffer, momentum(buffer))
    assert (len(optimizer.weight_acc) == 1) == with_accumulator


def test_both_moments_of_adam_are_rounded_and_the_step_is_not() -> None:
    w = parameter()
    optimizer = OptimLP(adam([w]), momentum_quant=to_steps(14))
    trained(optimizer, w, range(3))
    state = optimizer.state[w]
    assert state["step"] == 3
    for name in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(state[name], to_steps(14)(state[name]))
        assert state[name].unique().numel() > 3


def test_gradients_are_scaled_with_a_function_that_rounds_them_alone() -> None:
    w, twin = parameter(), parameter()
    trained(OptimLP(sgd([w]), grad_scaling=3.0), w, range(2))
    assert torch.equal(w, trained(sgd([twin]), twin, range(2)))


def test_weights_without_a_gradient_are_rounded_too() -> None:
    w, other = parameter(), parameter()
    w.grad = gradients(0)
    OptimLP(sgd([w, other]), weight_quant=to_steps(2), momentum_quant=to_steps(2)).step()
    assert torch.equal(other, to_steps(2)(parameter().detach()))


def test_a_closure_is_called() -> None:
    w = parameter()
    optimizer = OptimLP(sgd([w]), weight_quant=to_steps(5))

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = w.square().sum()
        loss.backward()
        return loss

    losses = [optimizer.step(closure) for _ in range(5)]
    assert losses[-1] < losses[0] / 2
    assert losses[0] == parameter().square().sum()


ROLES = ("weight_quant", "grad_quant", "momentum_quant", "acc_quant")


def noisy_optimizer(w: Tensor, make: Callable[[Any], torch.optim.Optimizer]) -> OptimLP:
    formats = (FloatingPoint(4, 3), BlockFloatingPoint(6), FloatingPoint(5, 4), FixedPoint(16, 12))
    return OptimLP(make([w]), **{role: noisy(number) for role, number in zip(ROLES, formats, strict=True)})  # type: ignore[arg-type]


@pytest.mark.parametrize("make", [sgd, adam])
def test_a_run_is_reproducible_and_leaves_other_noise_alone(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        w = parameter()
        # The optimizer draws its seed when it is created; its steps draw nothing.
        optimizer = noisy_optimizer(w, make)
        before = torch.get_rng_state()
        runs.append(trained(optimizer, w, range(5)))
        assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])


def test_every_step_draws_again() -> None:
    x = torch.full((4096,), 1.0625)
    w = nn.Parameter(x.clone())
    optimizer = OptimLP(torch.optim.SGD([w], lr=0.1), weight_quant=noisy(FloatingPoint(4, 3)))
    seen = []
    for _ in range(3):
        with torch.no_grad():
            w.copy_(x)
        optimizer.step()
        seen.append(w.detach().clone())
    assert not torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[1], seen[2])


@pytest.mark.parametrize("make", [sgd, adam])
def test_a_run_that_is_resumed_goes_on_as_if_it_had_never_stopped(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    torch.manual_seed(1)
    w = parameter()
    whole = trained(noisy_optimizer(w, make), w, range(6))
    torch.manual_seed(1)
    w = parameter()
    first = noisy_optimizer(w, make)
    trained(first, w, range(3))
    file = io.BytesIO()
    torch.save((w.detach(), first.state_dict()), file)
    file.seek(0)
    torch.manual_seed(77)
    weights, saved = torch.load(file)
    resumed = nn.Parameter(weights)
    second = noisy_optimizer(resumed, make)
    second.load_state_dict(saved)
    assert torch.equal(trained(second, resumed, range(3, 6)), whole)
    assert torch.equal(trained(copy.deepcopy(first), w, range(0)), w)


two = ranks_of(2)


def _replica(device: torch.device) -> tuple[Tensor, Tensor]:
    w = nn.Parameter(torch.linspace(-1, 1, 50, device=device))
    return trained(noisy_optimizer(w, sgd), w, range(4)).cpu(), torch.rand(3)


def _drawn_by_functions(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Weights that a step rounds by a function that draws for itself, and what such functions give outside of a step."""
    torch.manual_seed(3)
    w = nn.Parameter(torch.linspace(-1, 1, 50, device=device))
    optimizer = OptimLP(sgd([w]), weight_quant=lambda x: float_quantize(x, 5, 2), acc_quant=to_steps(4))
    weights = trained(optimizer, w, range(2))
    torch.manual_seed(3)
    x = torch.full((64,), 1.1, device=device, requires_grad=True)
    y = quantizer(FloatingPoint(5, 2), FloatingPoint(5, 2))(x)
    y.backward(torch.full_like(y, 1.1))
    assert x.grad is not None
    return weights.cpu(), y.detach().cpu(), x.grad.cpu()


@NEEDS_GLOO
def test_ranks_that_are_seeded_alike_share_the_noise_of_steps_alone(two: Ranks) -> None:
    (w, y, g), (other_w, other_y, other_g) = two(_drawn_by_functions)
    assert torch.equal(w, other_w)
    # 64 coins that fall up in four cases of ten: two ranks throw the same ones with a probability of 0.52**64.
    assert not torch.equal(y, other_y)
    assert not torch.equal(g, other_g)


@NEEDS_GLOO
def test_replicas_that_are_seeded_differently_stay_alike(two: Ranks) -> None:
    (first, drawn), (second, drawn_there) = two(_replica)
    assert torch.equal(first, second)
    assert not torch.equal(drawn, drawn_there)


def test_schedulers_and_new_groups() -> None:
    w, other = parameter(), parameter()
    optimizer = OptimLP(sgd([w]), weight_quant=to_steps(4), acc_quant=to_steps(10))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)
    trained(optimizer, w, range(1))
    schedule.step()
    assert optimizer.optim.param_groups[0]["lr"] == 0.05
    optimizer.add_param_group({"params": [other], "lr": 0.2})
    other.grad = gradients(9)
    trained(optimizer, w, range(1))
    assert len(optimizer.weight_acc) == 2
    assert torch.equal(other, to_steps(4)(optimizer.weight_acc[other]))


def test_errors() -> None:
    w = parameter()
    for call, kind, words in [
        (lambda: OptimLP(torch.optim.RMSprop([w])), TypeError, r"optim must be torch.optim.SGD or Adam, got RMSprop; qsim.optim.Quantized"),
        (lambda: OptimLP(sgd([w]), weight_quant="e4m3"), TypeError, r"weight_quant must be a function of a tensor, .* got 'e4m3'"),  # type: ignore[arg-type]
        (lambda: OptimLP(sgd([w]), grad_scaling="2"), TypeError, r"grad_scaling must be a number, got '2'"),  # type: ignore[arg-type]
        (lambda: OptimLP(sgd([w]), grad_scaling=0.0), ValueError, r"grad_scaling must be positive and finite, got 0\.0"),
    ]:
        with pytest.raises(kind, match=words):
            call()
    optimizer = OptimLP(sgd([w]), acc_quant=to_steps(4))
    trained(optimizer, w, range(1))
    saved = optimizer.state_dict()
    with pytest.raises(ValueError, match="has accumulators, and acc_quant is None"):
        OptimLP(sgd([parameter()])).load_state_dict(saved)
    with pytest.raises(ValueError, match=r"accumulator of parameter 0 must have shape \(3,\), the state_dict has \(50,\)"):
        OptimLP(sgd([nn.Parameter(torch.ones(3))]), acc_quant=to_steps(4)).load_state_dict(saved)


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    load_digits = pytest.importorskip("sklearn.datasets").load_digits
    pixels, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    x, y = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8)[order] / 16, torch.tensor(labels)[order]
    return x[:900], y[:900], x[900:], y[900:]


class SmallVGG(nn.Module):
    """Like the models of QPyTorch's examples: a quantizer after each block, none after the last layer."""

    def __init__(self, quant: Callable[[], nn.Module]) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, after in ((1, 8), (8, 16)):
            layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(inplace=True), quant(), nn.MaxPool2d(2)]
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(nn.Linear(64, 32), nn.ReLU(True), quant(), nn.Linear(32, 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).flatten(1))  # type: ignore[no-any-return]


NUMBERS = {
    "float": dict.fromkeys(("weight", "grad", "momentum", "activate", "error"), FloatingPoint(5, 3)),
    "block": dict.fromkeys(("weight", "grad", "momentum", "activate", "error"), BlockFloatingPoint(8, 0)),
    "fixed": {
        "weight": FixedPoint(8, 6),
        "grad": FixedPoint(12, 11),
        "momentum": FixedPoint(14, 11),
        "activate": FixedPoint(8, 4),
        "error": FixedPoint(16, 15),
    },
}


@pytest.mark.slow
@pytest.mark.usefixtures("plain_arithmetic")
@pytest.mark.parametrize(("kind", "automatic"), [("float", False), ("fixed", False), ("block", True)])
def test_the_examples_loop_learns_digits(kind: str, automatic: bool) -> None:
    """QPyTorch's example: weights, gradients, momentum, activations and errors in low precision, the weights updated in 16 bits."""
    x, y, test_x, test_y = digits()
    numbers = NUMBERS[kind]
    torch.manual_seed(0)
    if automatic:
        model = sequential_lower(SmallVGG(nn.Identity), ["conv", "linear"], numbers["activate"], numbers["error"])
        model.classifier[-1] = model.classifier[-1][0]  # type: ignore[index,operator]
    else:
        model = SmallVGG(lambda: Quantizer(numbers["activate"], numbers["error"], "stochastic", "stochastic"))
    optimizer = OptimLP(
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4),
        weight_quant=noisy(numbers["weight"]),
        grad_scaling=1.0,
        grad_quant=noisy(numbers["grad"]),
        momentum_quant=noisy(numbers["momentum"]),
        acc_quant=noisy(FixedPoint(16, 12)),
    )
    for step in range(120):
        chosen = torch.randint(len(y), (64,))
        for group in optimizer.param_groups:
            group["lr"] = 0.05 * (1 - step / 120)
        optimizer.zero_grad()
        F.cross_entropy(model(x[chosen]), y[chosen]).backward()
        optimizer.step()
    for p in model.parameters():
        assert torch.equal(p, numbers["weight"].round(p.detach(), "nearest"))
    model.eval()
    with torch.no_grad():
        accuracy = (model(test_x).argmax(1) == test_y).double().mean().item()
    assert accuracy > 0.9, accuracy
