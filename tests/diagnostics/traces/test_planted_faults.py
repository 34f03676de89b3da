"""`compare` names the operation at which a fault was planted: twenty faults of ten kinds, in a small mixture of experts."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qsim
from qsim import FivePoint, Quantizer
from qsim.accumulators import Rounded
from qsim.nn.histories import histories_of
from qsim.scaling import Delayed, Given, PerTile
from qsim.transforms import Hadamard

WIDTH = 16


class RMSNorm(nn.Module):
    """A norm written by a user: functions of torch, and no layer of torch."""

    def __init__(self, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps, self.weight = eps, nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class Router(nn.Module):
    """Gates of experts; `low` computes them in bfloat16."""

    def __init__(self, low: bool = False) -> None:
        super().__init__()
        self.low, self.gate = low, nn.Linear(WIDTH, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        scores = F.linear(x.bfloat16(), self.gate.weight.bfloat16()).float() if self.low else F.linear(x, self.gate.weight)
        return scores.softmax(-1)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.inner, self.router = RMSNorm(), Router()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.first, self.second = nn.Dropout(0.1), nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.second(self.first(self.down(F.gelu(self.up(self.norm(x))))))
        gates = self.router(self.inner(x))
        return sum((gates[..., i, None] * expert(x) for i, expert in enumerate(self.experts)), torch.zeros(()))


TURN = Hadamard(8)
BIAS, COARSE = Quantizer("bf16"), Rounded("bf16")
POINTS = FivePoint(
    act=Quantizer("e4m3", scale="tensor"),
    weight=Quantizer("e4m3", scale=PerTile(1, 8)),
    grad=Quantizer("e5m2", "stochastic"),
    act_bwd=Quantizer("e4m3", "stochastic", scale="tensor"),
    bias=BIAS,
    accumulate=Rounded("fp32"),
)
TURNED = FivePoint(
    act=Quantizer("e4m3", transform=TURN), weight=Quantizer("e4m3", transform=TURN), grad="e5m2", act_bwd=None, weight_bwd=None
)
DELAYED = FivePoint(act=Quantizer("e4m3", scale=Delayed(4)), weight=Quantizer("e4m3", scale=Delayed(4)), grad="e5m2")


@cache
def net(points: FivePoint) -> Net:
    """A converted net that has taken a step, so that delayed scales have histories; `compare` leaves it unchanged."""
    torch.manual_seed(0)
    made = qsim.convert(Net(), points, exclude="router.*")
    made(torch.randn(4, WIDTH)).sum().backward()
    return made


def at(layer: str, **points: Any) -> Callable[[Net], None]:
    """A fault in the points of a layer."""

    def plant(faulty: Net) -> None:
        module: Any = faulty.get_submodule(layer)
        module.points = replace(module.points, **points)

    return plant


def in_weight(layer: str, change: Callable[[Tensor], Tensor]) -> Callable[[Net], None]:
    def plant(faulty: Net) -> None:
        weight: Any = faulty.get_submodule(layer).weight
        weight.data = change(weight.data)

    return plant


def with_block_transposed(weight: Tensor) -> Tensor:
    changed = weight.clone()
    changed[:8, :8] = weight[:8, :8].T
    return changed


def with_a_sign_lost(weight: Tensor) -> Tensor:
    """Weights that were stored in the Hadamard basis, and read without the sign of one element of each block."""
    signs = torch.ones(8)
    signs[3] = -1
    blocks = TURN(weight).unflatten(-1, (-1, 8)) * signs
    return TURN.inverse(blocks.flatten(-2))


def with_eps(name: str, eps: float) -> Callable[[Net], None]:
    def plant(faulty: Net) -> None:
        faulty.get_submodule(name).eps = eps  # type: ignore[assignment]

    return plant


def stale(layer: str, point: str) -> Callable[[Net], None]:
    """A largest magnitude of some steps ago, 64 times smaller than now."""

    def plant(faulty: Net) -> None:
        module: Any = faulty.get_submodule(layer)
        history = histories_of(module)[point]
        module.get_buffer(history.names[0]).div_(64)

    return plant


def exchanged(one: str, other: str) -> Callable[[Net], None]:
    def plant(faulty: Net) -> None:
        first, second = faulty.get_submodule(one), faulty.get_submodule(other)
        faulty.set_submodule(one, second)
        faulty.set_submodule(other, first)

    return plant


def low_gate(faulty: Net) -> None:
    faulty.router.low = True


def rounded_gate(faulty: Net) -> None:
    weight = faulty.router.gate.weight
    weight.data = qsim.quantize(weight.data, "e4m3")


FAULTS: dict[str, tuple[FivePoint, Callable[[Net], None], tuple[str, str, str], str]] = {
    "wrong scale, forward": (POINTS, at("up", act=Quantizer("e4m3", scale=Given(0.5))), ("up", "Linear", "output"), "settings"),
    "wrong scale, backward": (
        POINTS,
        at("down", act_bwd=Quantizer("e4m3", "stochastic", scale=Given(0.5))),
        ("down", "Linear", "weight.grad"),
        "settings",
    ),
    "transposed block, scales": (
        POINTS,
        at("down", weight=Quantizer("e4m3", scale=PerTile(8, 1))),
        ("down", "Linear", "output"),
        "settings",
    ),
    "transposed block, values": (POINTS, in_weight("up", with_block_transposed), ("up", "Linear", "output"), "state"),
    "missing Hadamard sign, all": (
        TURNED,
        at("up", **dict.fromkeys(("act", "weight"), Quantizer("e4m3", transform=Hadamard(8, random_signs=False)))),
        ("up", "Linear", "output"),
        "settings",
    ),
    "missing Hadamard sign, one": (TURNED, in_weight("down", with_a_sign_lost), ("down", "Linear", "output"), "state"),
    "nearest, not stochastic, for both products": (POINTS, at("up", grad="e5m2"), ("up", "Linear", "weight.grad"), "settings"),
    "nearest, not stochastic, for one product": (
        POINTS,
        at("experts.1", act_bwd=Quantizer("e4m3", scale="tensor")),
        ("experts.1", "Linear", "weight.grad"),
        "settings",
    ),
    "bf16 accumulation, forward": (
        POINTS,
        at("up", accumulate=(COARSE, Rounded("fp32"), Rounded("fp32"))),
        ("up", "Linear", "output"),
        "settings",
    ),
    "bf16 accumulation, backward": (
        POINTS,
        at("down", accumulate=(Rounded("fp32"), COARSE, Rounded("fp32"))),
        ("down", "Linear", "grad_input"),
        "settings",
    ),
    "wrong eps, of torch's layer": (POINTS, with_eps("norm", 1e-6), ("norm", "LayerNorm", "output"), "settings"),
    "wrong eps, of the user's layer": (POINTS, with_eps("inner", 1e-2), ("inner", "add", "output"), "settings"),
    "dropped bias rounding, up": (POINTS, at("up", bias=None), ("up", "Linear", "output"), "settings"),
    "dropped bias rounding, of an expert": (POINTS, at("experts.0", bias=None), ("experts.0", "Linear", "output"), "settings"),
    "router in low precision, computed": (POINTS, low_gate, ("router", "linear", "output"), "arithmetic"),
    "router in low precision, stored": (POINTS, rounded_gate, ("router", "linear", "output"), "state"),
    "stale amax of an input": (DELAYED, stale("down", "act"), ("down", "Linear", "output"), "state"),
    "stale amax of a weight": (DELAYED, stale("up", "weight"), ("up", "Linear", "output"), "state"),
    "swapped layers, of one kind": (POINTS, exchanged("experts.0", "experts.1"), ("experts.0", "Linear", "output"), "state"),
    "swapped layers, of two kinds": (POINTS, exchanged("first", "second"), ("first", "Tanh", "output"), "settings"),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", FAULTS)
def test_the_operation_with_the_fault_is_named(name: str) -> None:
    points, plant, place, cause = FAULTS[name]
    sound = net(points)
    faulty = copy.deepcopy(sound)
    plant(faulty)
    first = qsim.compare(sound, faulty, torch.randn(8, WIDTH)).first
    assert first is not None
    assert (first.layer, first.operation, first.tensor, first.cause) == (*place, cause)
    assert first.own == first.error > 0
    assert first.inherited == 0


def test_twenty_faults_of_ten_kinds() -> None:
    assert len(FAULTS) == 20
    assert len({name.partition(",")[0].partition(" of ")[0] for name in FAULTS}) == 10


@pytest.mark.parametrize("points", [POINTS, TURNED, DELAYED], ids=["stochastic", "transformed", "delayed"])
def test_without_a_fault_nothing_differs(points: FivePoint) -> None:
    sound = net(points)
    found = qsim.compare(sound, copy.deepcopy(sound), torch.randn(8, WIDTH))
    assert found.first is None
    assert {record.error for record in found} == {0.0}
    assert not found.only_a
    assert not found.only_b
