"""`qsim.optim.Quantized` around schedule-free optimizers: `train()` and `eval()`, the weights of both modes, checkpoints in both."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qsim import Quantizer
from qsim.optim import Quantized
from support.comparing import same_bits
from support.distributed_models import alike
from support.optimizers import give_gradients, parameters, rounded
from support.refusing import refused

SEED = 77
NOISY = Quantizer("e4m3", "stochastic")
BETA = 0.9


class ScheduleFree(torch.optim.Optimizer):
    """Schedule-free gradient descent: in training a parameter is y, in evaluation the average x, and the state stores z."""

    def __init__(self, params: Any, lr: float = 0.25) -> None:
        super().__init__(params, {"lr": lr, "k": 0, "train_mode": False})

    @torch.no_grad()
    def _switch(self, training: bool, weight: float) -> None:
        for group in self.param_groups:
            for p in group["params"] if group["train_mode"] != training else []:
                if "z" in self.state[p]:
                    p.lerp_(self.state[p]["z"], weight)
            group["train_mode"] = training

    def eval(self) -> None:
        self._switch(False, 1 - 1 / BETA)

    def train(self) -> None:
        self._switch(True, 1 - BETA)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if not group["train_mode"]:
                raise RuntimeError("not in train mode")
            group["k"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    z = self.state[p].setdefault("z", p.detach().clone())
                    p.lerp_(z, 1 / group["k"]).add_(p.grad, alpha=group["lr"] * (BETA * (1 - 1 / group["k"]) - 1))
                    z.sub_(p.grad, alpha=group["lr"])


def real(name: str) -> Callable[..., torch.optim.Optimizer]:
    """An optimizer of the package `schedulefree`, created when needed."""

    def make(params: Any) -> torch.optim.Optimizer:
        made: torch.optim.Optimizer = getattr(pytest.importorskip("schedulefree"), name)(params, lr=0.25)
        return made

    return make


MAKERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "here": ScheduleFree,
    "SGDScheduleFree": real("SGDScheduleFree"),
    "AdamWScheduleFree": real("AdamWScheduleFree"),
}
every_maker = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
#: The rounding of weights; with an accumulator, the copies' format.
SETTINGS: dict[str, dict[str, Any]] = {
    "nearest": {"weight": "e4m3"},
    "stochastic": {"weight": NOISY},
    "toward zero": {"weight": Quantizer("e4m3", "toward_zero")},
    "accumulator": {"weight": "e4m3", "accumulator": "bf16"},
    "accumulator, stochastic": {"weight": NOISY, "accumulator": Quantizer("bf16", "stochastic")},
    "accumulator only": {"accumulator": "bf16"},
}
every_setting = pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS.keys())


def made(make: Callable[..., Any], **setting: Any) -> tuple[list[nn.Parameter], Any]:
    params = parameters()
    return params, Quantized(make(params), **setting, seed=SEED)


def steps(params: list[nn.Parameter], optimizer: Any, numbers: range) -> None:
    for number in numbers:
        give_gradients(params, number)
        optimizer.step()


def values(params: list[nn.Parameter]) -> list[Tensor]:
    return [p.detach().clone() for p in params]


@every_maker
@every_setting
def test_an_evaluation_changes_nothing_in_training(make: Any, setting: dict[str, Any]) -> None:
    """The formats are narrower than float32, so that weights are restored bit for bit."""
    found = []
    for evaluates in (False, True):
        params, optimizer = made(make, **setting)
        optimizer.train()
        for number in range(4):
            steps(params, optimizer, range(number, number + 1))
            before = values(params)
            if evaluates:
                optimizer.eval()
                assert not alike(values(params), before) or number == 0
                optimizer.train()
                assert alike(values(params), before)
        found.append(values(params))
    assert alike(*found)


@every_maker
def test_switching_twice_is_switching_once(make: Any) -> None:
    for setting in SETTINGS.values():
        params, optimizer = made(make, **setting)
        optimizer.train()
        steps(params, optimizer, range(3))
        for switch in (optimizer.train, optimizer.eval, optimizer.train):
            switch()
            before = values(params)
            switch()
            assert alike(values(params), before)


@pytest.mark.parametrize("name", ["here", "AdamWScheduleFree"])
@pytest.mark.parametrize("weight", ["e4m3", NOISY], ids=["nearest", "stochastic"])
def test_evaluated_weights_are_the_rounded_average(name: str, weight: Any) -> None:
    """With an accumulator in float32: the optimizer's own result from the same gradients, rounded with new noise."""
    params, optimizer = made(MAKERS[name], weight=weight, accumulator="fp32")
    others = parameters()
    alone: Any = MAKERS[name](others)
    for switch in ("train", "eval", "train", "eval"):
        getattr(optimizer, switch)()
        getattr(alone, switch)()
        if switch == "train":
            for number in range(3):
                steps(params, optimizer, range(number, number + 1))
                give_gradients(others, number)
                alone.step()
        assert alike(list(optimizer.copies.values()), values(others))
        role = {"train": "weight", "eval": "evaluation"}[switch]
        quantizer = weight if isinstance(weight, Quantizer) else Quantizer(weight)
        for number, (p, other) in enumerate(zip(params, others, strict=True)):
            assert same_bits(p, rounded(other, quantizer, SEED, optimizer.steps - 1, role, number))


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("name", ["here", "AdamWScheduleFree"])
@every_setting
def test_a_checkpoint_in_either_mode(name: str, setting: dict[str, Any], mode: str) -> None:
    """The run continues, bit for bit, as if it had never stopped."""
    params, optimizer = made(MAKERS[name], **setting)
    optimizer.train()
    steps(params, optimizer, range(3))
    getattr(optimizer, mode)()
    saved = pickle.loads(pickle.dumps((values(params), optimizer.state_dict())))
    again, resumed = made(MAKERS[name], **setting)
    with torch.no_grad():
        for p, value in zip(again, saved[0], strict=True):
            p.copy_(value)
    resumed.load_state_dict(saved[1])
    assert alike(values(again), values(params))
    for which, these in ((optimizer, params), (resumed, again)):
        which.train()
        steps(these, which, range(3, 5))
        which.eval()
    assert alike(values(again), values(params))


@every_maker
def test_nothing_is_rounded_before_the_first_step(make: Any) -> None:
    for setting in SETTINGS.values():
        params, optimizer = made(make, **setting)
        before = values(params)
        for switch in (optimizer.train, optimizer.eval, optimizer.train):
            switch()
            assert alike(values(params), before)
        assert not optimizer.copies


@every_maker
def test_gradients_and_states_alone(make: Any) -> None:
    """If no weight is rounded, the optimizer switches the parameters themselves, and states are left alone."""
    params, optimizer = made(make, grad="e5m2", state="bf16")
    optimizer.train()
    steps(params, optimizer, range(3))
    states = {p: copy.deepcopy(state) for p, state in optimizer.state.items()}
    others = values(params)
    optimizer.eval()
    average = [y.lerp_(states[p]["z"], 1 - 1 / BETA) for p, y in zip(params, others, strict=True)]
    assert alike(values(params), average)
    assert all(same_bits(x, optimizer.state[p][name]) for p in params for name, x in states[p].items() if isinstance(x, Tensor))
    assert not optimizer.copies


def test_evaluation_has_noise_of_its_own() -> None:
    w = nn.Parameter(torch.full((4096,), 1.0))
    optimizer: Any = Quantized(ScheduleFree([w], lr=0.0), weight=NOISY, accumulator="fp32", seed=SEED)
    optimizer.train()
    w.grad = torch.zeros_like(w)
    with torch.no_grad():
        w.fill_(1.0625)
    optimizer.step()
    trained = w.detach() > 1.0625
    optimizer.eval()
    evaluated = w.detach() > 1.0625
    counts = [int((trained == a).logical_and(evaluated == b).sum()) for a, b in itertools.product((False, True), repeat=2)]
    assert all(abs(count - 1024) < 6 * (4096 * 3 / 16) ** 0.5 for count in counts)


def test_optimizers_without_modes_have_none_here() -> None:
    optimizer = Quantized(torch.optim.SGD(parameters(), 0.1), weight="e4m3")
    for name in ("train", "eval"):
        assert not hasattr(optimizer, name)
        with refused(AttributeError, f"Quantized: SGD has no {name}()", "schedule-free optimizers"):
            getattr(optimizer, name)


def test_a_step_in_evaluation_mode() -> None:
    params, optimizer = made(ScheduleFree, weight="e4m3", grad="e5m2")
    optimizer.train()
    steps(params, optimizer, range(1))
    optimizer.eval()
    give_gradients(params, 2)
    before = [*values(params), *(p.grad for p in params if p.grad is not None)]
    kept = [x.clone() for x in before]
    with refused(RuntimeError, "Quantized: step() in evaluation mode", "train()"):
        optimizer.step()
    assert alike(before, kept)
    optimizer.train()
    optimizer.step()


def test_checkpoints_of_evaluation_that_would_be_lost() -> None:
    params, optimizer = made(ScheduleFree, weight="e4m3")
    optimizer.train()
    steps(params, optimizer, range(2))
    optimizer.eval()
    saved = optimizer.state_dict()
    for setting in ({"weight": "e4m3", "accumulator": "fp32"}, {"grad": "e4m3"}):
        _, other = made(ScheduleFree, **setting)
        with refused(ValueError, "saved in evaluation mode", "call train() before saving", "accumulator="):
            other.load_state_dict(saved)
    saved["state"][0]["quantized_unrounded"] = torch.ones(2)
    with refused(ValueError, "Quantized: the unrounded weight of parameter 0 must be a tensor of shape"):
        optimizer.load_state_dict(saved)
