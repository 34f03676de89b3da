"""No two numbers share random bits: all draws of a step are recorded, of each kind of layer, call, point, sum, wire and optimizer.

Products of shards are in `tests/nn/sharded/test_product.py`, replicas of a study in `tests/studies/test_replicas.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qsim
from qsim import FivePoint, Quantizer, recipes
from qsim.accumulators import Promoted, Rounded
from qsim.distributed import AllReduce, simulate_all_reduce
from qsim.distributed.messages import ALGORITHMS
from qsim.nn.calls.attention import attention
from qsim.nn.product.sites import Site
from qsim.optim import Quantized
from qsim.points import PointModule
from qsim.random import Noise
from qsim.recipes.named import needs_format
from support.draws import drawing_operators, recorded, seeded_alike
from support.module_cases import CASES as MODULES, ModuleCase
from support.ready_points import RANDOM, READY


def noisy(fmt: Any, **options: Any) -> Quantizer:
    return Quantizer(fmt, "stochastic", **options)


#: A format for each point: a tensor that is rounded at two points shows whether both draw the same bits.
POINTS = FivePoint(
    noisy("e4m3"),
    noisy("e2m1"),
    noisy("e5m2"),
    act_bwd=noisy("e3m2"),
    weight_bwd=noisy("int4"),
    grad_w=noisy("e4m1"),
    output=noisy("e5m7"),
    bias=noisy("e3m4"),
)


def step(call: Callable[..., Any], *given: Tensor) -> None:
    """A forward and a backward pass."""
    y = call(*given)
    y.backward(torch.randn_like(y))


def random(*shape: int) -> Tensor:
    return torch.randn(shape).requires_grad_()


def layer_step(case: ModuleCase, points: FivePoint) -> None:
    step(lambda x: case.own(points)(x, **case.call), case.input())


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stack = nn.Parameter(torch.randn(2, 8, 5))

    def forward(self, x: Tensor) -> Tensor:
        product: Tensor = getattr(F, "grouped_mm", torch._grouped_mm)(x, self.stack, offs=torch.tensor([3, 7], dtype=torch.int32))
        return product


class Attention(nn.Module):
    """A module that calls attention as the models of Hugging Face do."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attention(self, query, key, value, None)[0]


class Mixture(nn.Module):
    """A net of a layer, torch's own attention, products of activations, and two layers with equal weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.attention, self.second, self.third = nn.Linear(8, 8), nn.MultiheadAttention(8, 2), nn.Linear(8, 8), nn.Linear(8, 8)
        self.third.load_state_dict(self.second.state_dict())

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.attention(*[self.first(x)] * 3, need_weights=False)
        y = self.second(y @ x.mT @ x)
        z: Tensor = self.third(y.sin())
        return z


def converted(model: nn.Module, points: FivePoint, calls: Any = "all") -> Callable[..., Any]:
    result: Callable[..., Any] = qsim.convert(model, points, calls=calls)
    return result


def gru(points: FivePoint) -> None:
    net = converted(nn.GRU(4, 3, num_layers=2), points)
    step(lambda x: net(x)[0], random(3, 2, 4))


LAYERS: dict[str, Callable[[FivePoint], None]] = {
    **{str(case): lambda points, case=case: layer_step(case, points) for case in MODULES if not case.name.endswith("3d")},  # type: ignore[misc]
    "a net": lambda points: step(converted(Mixture(), points), random(5, 8)),
    "GRU": gru,
    "experts": lambda points: step(converted(Experts(), points), random(7, 8)),
    "attention of transformers": lambda points: step(converted(Attention(), points), *(random(1, 2, 5, 4) for _ in range(3))),
    "bilinear": lambda points: step(converted(nn.Bilinear(3, 4, 2), points), random(5, 3), random(5, 4)),
}


def own_layers(points: FivePoint) -> None:
    """Three layers, two of which have equal weights."""
    net = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    net[4].load_state_dict(net[2].state_dict())
    step(converted(net, points), random(4, 6))


@pytest.mark.parametrize("name", LAYERS)
def test_layers(name: str) -> None:
    with recorded() as draws:
        LAYERS[name](POINTS)
    draws.check()


@pytest.mark.parametrize("call", [own_layers, LAYERS["attention of transformers"]], ids=["layers", "attention of transformers"])
def test_layers_that_are_seeded_alike(call: Callable[[FivePoint], None]) -> None:
    """Each product is seeded from the same state of torch's generator: only streams tell draws apart."""
    with seeded_alike(), recorded() as draws:
        call(replace(POINTS, output=None, bias=None))
    draws.check()


SUM = Rounded("e5m3", rounding="stochastic")
SUMS: dict[str, Any] = {
    "sequential": SUM,
    "product": Rounded("e5m3", rounding="stochastic", product="e5m4"),
    "pairwise": Rounded("e5m4", rounding="stochastic", order="pairwise"),
    "kahan": Rounded("e5m3", rounding="stochastic", order="kahan"),
    "promoted": Promoted(SUM, 3),
    "each": (SUM, Rounded("e5m4", rounding="stochastic"), Promoted(SUM, 4)),
}


def add(how: str) -> None:
    """Sums of layers, of groups, of a lookup's gradient, under scales, and by themselves."""
    points = FivePoint("e4m3", "e2m1", "e5m2", accumulate=SUMS[how])
    step(qsim.nn.Linear(7, 5, points=points), random(4, 7))
    step(qsim.nn.Conv1d(3, 4, 3, points=points), random(2, 3, 7))
    step(converted(Experts(), points), random(7, 8))
    table = qsim.nn.Embedding(7, 4, points=FivePoint(weight=noisy("e2m1"), accumulate=SUMS[how]))
    step(table, torch.tensor([[1, 2, 1], [1, 1, 2]]))
    blocks = Quantizer("e4m3", scale=qsim.scaling.PerBlock(4))
    step(qsim.nn.Linear(8, 8, points=FivePoint(blocks, blocks, blocks, accumulate=Promoted(SUM, 4))), random(8, 8))
    qsim.matmul(torch.randn(3, 5), torch.randn(5, 4), points.sums[0])


@pytest.mark.parametrize("how", SUMS)
def test_sums(how: str) -> None:
    with recorded() as draws:
        add(how)
    draws.check()


#: Each way in which elements are rounded under scales, and the ready-made points that draw.
POINTS_WITH_SCALES = {
    "blocks": noisy(qsim.Block("e2m1", 4, "e4m3", "fit")),
    "nested blocks": noisy("nvfp4"),
    "tiles": noisy("e4m3", scale=qsim.scaling.PerTile(2, 4)),
    "rows": noisy("e4m3", scale="row"),
    "tensor": noisy("e4m3", scale="tensor"),
    "transform": noisy(qsim.Block("e2m1", 4, "e4m3", "fit"), transform="Hadamard(4)"),
    # Of Noise's, torch's generator has all; of each block of IF4, one of two candidates remains, both rounded with the same bits.
    **{name: READY[name]() for name in RANDOM if name not in ("Noise", "IF4, stochastic")},
}


def at_each_point(point: Any) -> None:
    """A point in layers, and by itself."""
    points = FivePoint(point, point, point, act_bwd=point, weight_bwd=point, grad_w=point)
    step(qsim.nn.Linear(32, 32, points=points), random(32, 32))
    step(converted(Experts(), points), random(7, 8))
    point(torch.randn(32, 32))
    point(torch.randn(32, 32), seed=Noise(3, stream=4))


@pytest.mark.parametrize("name", POINTS_WITH_SCALES)
def test_points(name: str) -> None:
    with recorded() as draws:
        at_each_point(POINTS_WITH_SCALES[name])
    draws.check()


def test_each_product_draws_signs_of_its_own() -> None:
    point = READY["Rotated, redrawn"]()
    with recorded() as draws:
        step(qsim.nn.Linear(32, 32, points=FivePoint(point, point, point, act_bwd=point, weight_bwd=point)), random(32, 32))
    assert len({stream for (_, stream, _), use in draws.uses.items() if use.number == 0.5}) == 3


def train_by(name: str) -> None:
    points = recipes.resolve(name).points
    step(converted(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)), points), random(32, 32))
    step(converted(nn.Linear(32, 32), points).bfloat16(), torch.randn(32, 32).bfloat16())  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", [name for name, make in recipes.NAMED.items() if not needs_format(make)])
def test_recipes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Site, "looks_ahead", lambda *_: True)  # as a GPU does
    with recorded() as draws:
        train_by(name)
    draws.check(may_be_empty=True)


def call() -> None:
    """Calls outside of layers: twice, of pieces of a larger tensor, and of streams of a seed."""
    x = torch.randn(40)
    for _ in range(2):
        qsim.quantize(x, "e4m3", "stochastic")
        qsim.encode(x + 1, "e4m3", "stochastic")
        qsim.quantize_(x, "e5m6", "stochastic")
        qsim.quantize(x + 2, "e2m1", "stochastic", out=torch.empty(40))
    for start in (0, 7, 16):
        qsim.quantize(x[start : start + 7], "e2m1", "stochastic", seed=Noise(0, offset=start))
        qsim.quantize(x[start : start + 9], "e2m1", "stochastic", seed=Noise(0, stream=start + 1))
    for noise in ({}, {"seed": 9}):
        with qsim.fpu("bf16", "stochastic", **noise):
            ((x * x.sin()).exp() + 1).sum()


def test_calls() -> None:
    with recorded() as draws:
        call()
    draws.check()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("sums", [None, noisy("e5m6")], ids=["messages", "messages and sums"])
def test_wires(algorithm: Any, sums: Quantizer | None) -> None:
    how = AllReduce(algorithm, wire=noisy("e5m3"), sums=sums)
    with recorded() as draws:
        simulate_all_reduce([torch.randn(24) for _ in range(8)], how, seed=3)
    draws.check()


STATES = {"state": "e5m2", "state_rounding": "stochastic"}
ROUNDED = {"weight": noisy("e5m6"), "grad": noisy("e4m3"), "state": noisy("e5m2")}
OPTIMIZERS: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "AdamW": lambda params: qsim.optim.AdamW(params, update="stochastic", format="e5m6", **STATES),
    "AMSGrad": lambda params: qsim.optim.Adam(params, update="stochastic", format="e5m6", amsgrad=True, **STATES),
    "SGD": lambda params: qsim.optim.SGD(params, 0.1, momentum=0.9, update="Kahan('stochastic')", format="e5m6", **STATES),
    "Quantized": lambda params: Quantized(torch.optim.AdamW(params, 0.1), **ROUNDED),
    "Quantized, copies": lambda params: Quantized(torch.optim.SGD(params, 0.1, momentum=0.9), accumulator=noisy("e5m7"), **ROUNDED),
    "Quantized, blocks": lambda params: Quantized(torch.optim.Adam(params, 0.1), state=noisy("mxfp8")),
}


def update(name: str) -> None:
    """Two steps of two optimizers, each of two parameters."""
    several = [OPTIMIZERS[name]([nn.Parameter(qsim.quantize(torch.randn(3, 8), "e5m6")) for _ in range(2)]) for _ in range(2)]
    for optimizer in several * 2:
        for param in optimizer.param_groups[0]["params"]:
            param.grad = torch.randn(3, 8)
        optimizer.step()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name: str) -> None:
    with recorded() as draws:
        update(name)
    draws.check()


def test_key_value_cache() -> None:
    pytest.importorskip("transformers")
    cache = qsim.nn.KVCache(noisy("e4m3"), noisy("e4m3"))
    with recorded() as draws:
        for layer in (0, 1, 0):
            cache.update(torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3, 4), layer)
    draws.check()


#: Operators that eager code does not call on a CPU, or that draw nothing themselves.
ELSEWHERE = {
    "encode_transpose": "codes for a GPU's own products",
    "encode_with_transpose": "codes for a GPU's own products",
    "quantize_fused": "compiled code",
    "quantize_scaled_fused": "compiled code",
    "of_stream": "makes a seed",
}


def test_these_are_all_operators_that_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new operator with a seed needs a test above, and a line here."""
    monkeypatch.setattr(Site, "looks_ahead", lambda *_: True)
    with recorded() as draws:
        LAYERS["a net"](POINTS)
        add("sequential")
        for point in POINTS_WITH_SCALES.values():
            at_each_point(point)
        for name in ("nvfp4", "tetrajet2"):
            train_by(name)
        call()
        update("AdamW")
    assert drawing_operators() - draws.drew == set(ELSEWHERE)


def test_a_draw_that_is_not_recorded_raises_an_error() -> None:
    with recorded(), pytest.raises(AssertionError, match="a function draws random bits that are not recorded"):
        qsim.random.random_bits(4, 6, seed=1)


def test_numbers_that_share_bits_are_reported() -> None:
    x = torch.randn(40)
    with recorded() as draws:
        qsim.quantize(x, "e2m1", "stochastic", seed=1)
        qsim.quantize(x, "e2m1", "stochastic", seed=1)
        qsim.quantize(x, "e2m1", "stochastic", seed=Noise(1, offset=40))
        draws.check()
        qsim.quantize(x[:1], "e2m1", "stochastic", seed=Noise(1, offset=39))
    with pytest.raises(AssertionError, match=r"1 random integers are shared, the first by quantize of .* and quantize of"):
        draws.check()


class Seen(PointModule):
    """Rounds numbers, all of which are half-way between two, and keeps the results."""

    gradient = "straight"

    def __init__(self) -> None:
        super().__init__()
        self.quantizer, self.values = noisy("e2m1"), torch.empty(0)

    def rounded(self, x: Tensor, **noise: Any) -> Tensor:
        self.values = self.quantizer(torch.full_like(x, 1.25), **noise)
        return self.values


def test_equal_numbers_are_rounded_independently_at_the_points_of_a_layer() -> None:
    points = FivePoint(Seen(), Seen(), Seen(), act_bwd=Seen(), weight_bwd=Seen(), grad_w=Seen())
    layer = qsim.nn.Linear(64, 64, bias=False, points=points)
    step(layer, random(64, 64))
    seen = [point.values for point in layer.modules() if isinstance(point, Seen)]
    assert [x.shape for x in seen] == [(64, 64)] * 6
    for one, other in itertools.combinations(seen, 2):
        # Half of 4096 pairs with independent bits agree; five standard deviations, 0.039, have a probability of 6e-7.
        assert abs(float((one == other).double().mean()) - 0.5) < 0.039


def test_equal_sums_are_rounded_independently_in_the_products_of_a_layer() -> None:
    layer = qsim.nn.Linear(32, 32, bias=False, points=FivePoint(accumulate=Rounded("bf16", rounding="stochastic")))
    nn.init.constant_(layer.weight, 1.7)
    x = torch.full((32, 32), 1.7, requires_grad=True)
    y = layer(x)
    sums = [y, *torch.autograd.grad(y, [x, layer.weight], torch.full_like(y, 1.7))]
    for one, other in itertools.combinations(sums, 2):
        # Of sums with the same bits, all are equal; the others have a standard deviation of several times the distance of values.
        assert float((one == other).double().mean()) < 0.5
