"""Sensitivities compared with measurements of single layers, and assignments that keep their budget and leave no trace."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qsim
from qsim import FivePoint, Quantizer
from qsim.diagnostics import Assignment, Sensitivities, assign
from qsim.diagnostics.assignment.costs import LayerSize, charge
from qsim.nn.modules import FivePointModule
from qsim.nn.product.along import along
from support.emitted import tool

Batch = tuple[Tensor, Tensor]
BLOCK = qsim.Block("e2m1", 16, rule="ceil")
NOISY = Quantizer(BLOCK, "stochastic")


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def images() -> tuple[nn.Module, list[Batch]]:
    """A net with a convolution, normalization and a linear layer, and batches."""
    torch.manual_seed(0)
    layers = nn.Conv2d(2, 8, 3), nn.BatchNorm2d(8), nn.GELU(), nn.Flatten(), nn.Linear(128, 4)
    return nn.Sequential(*layers), [(torch.randn(16, 2, 6, 6), torch.randint(4, (16,))) for _ in range(3)]


def error_of(model: nn.Module, batches: list[Batch], layer: str, points: FivePoint, draws: int) -> float:
    """The mean squared error of gradients when one layer rounds, relative to each weight's, averaged over weights."""

    def gradients(model: nn.Module, batch: Batch) -> list[Tensor]:
        return list(torch.autograd.grad(loss(model, batch), [model[0].weight, model[4].weight]))

    true = [gradients(model, batch) for batch in batches]
    norms = [torch.stack([row[k].square().sum() for row in true]).mean() for k in range(2)]
    work = qsim.convert(copy.deepcopy(model), {layer: points})
    total = 0.0
    for _ in range(draws):
        with torch.no_grad():
            work[int(layer)].weight.mul_(1.0)  # a step, after which weights draw again
        found = (gradients(work, batch) for batch in batches)
        total += sum(
            float((g - h).square().sum() / norm)
            for gs, hs in zip(found, true, strict=True)
            for g, h, norm in zip(gs, hs, norms, strict=True)
        )
    return total / (2 * draws * len(batches))


SINGLE = {
    "grad": ("grad", FivePoint(grad=NOISY), 0.25),
    "act_bwd": ("act", FivePoint(act_bwd=NOISY), 0.25),
    "weight_bwd": ("weight", FivePoint(weight_bwd=NOISY), 0.25),
    "weight": ("weight", FivePoint(weight=BLOCK, weight_bwd=None), 0.5),
    "act": ("act", FivePoint(act=BLOCK, act_bwd=None), 0.3),
}


@pytest.fixture(scope="module")
def single() -> tuple[nn.Module, list[Batch], Sensitivities]:
    """The sensitivities to candidates that round one operand."""
    model, batches = images()
    candidates = {name: points for name, (_, points, _) in SINGLE.items()} | {"exact": FivePoint()}
    return model, batches, assign(model, batches, loss, budget=32.0, candidates=candidates, per="layer", probes=4).sensitivities


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", SINGLE)
def test_sensitivities_are_errors_of_single_layers(name: str, single: tuple[nn.Module, list[Batch], Sensitivities]) -> None:
    (model, batches, found), (tensor, points, tolerance) = single, SINGLE[name]
    draws = 4 if points.is_stochastic or points.weight_is_stochastic else 1
    for layer in ("0", "4"):
        measured = error_of(model, batches, layer, points, draws)
        assert found[layer, tensor, name].error == pytest.approx(measured, rel=tolerance)
        assert found[layer, tensor, "exact"].error < 1e-9


def test_bias_and_variance() -> None:
    """A weight that is rounded to nearest has the same error in all batches; rounding a gradient stochastically has no bias."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 1))
    batches = [(torch.randn(1024, 16), torch.zeros(1024, 1)) for _ in range(3)]

    def squared(model: nn.Module, batch: Batch) -> Tensor:
        return (model(batch[0]) - batch[0].sum(1, keepdim=True)).square().mean()

    points = FivePoint(weight="e2m1", weight_bwd=None, grad=Quantizer("e5m1", "stochastic"))
    found = assign(model, batches, squared, budget=32.0, candidates={"rounded": points, "exact": "fp32"}, probes=12).sensitivities
    weight, grad = found["0", "weight", "rounded"], found["0", "grad", "rounded"]
    # The gradient is twice the distance from the optimum, and so is its error.
    own = model[0].weight.detach()
    error = float((qsim.quantize(own, "e2m1") - own).square().sum() / (own - 1).square().sum())
    assert weight.error == pytest.approx(error, rel=0.1)
    assert weight.bias > 10 * weight.variance
    assert grad.variance > grad.bias
    assert weight.loss > grad.loss == 0


def blocks(element: str) -> FivePoint:
    block = qsim.Block(element, 8, rule="ceil")
    noisy = Quantizer(block, "stochastic")
    return FivePoint(block, block, noisy, act_bwd=noisy, weight_bwd=noisy)


def small() -> tuple[nn.Module, list[Batch]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8))
    return model, [(torch.randn(32, 32), torch.randint(8, (32,))) for _ in range(3)]


CANDIDATES = ["e2m1", "e4m3", "bf16"]


@pytest.fixture(scope="module")
def assigned() -> tuple[nn.Module, list[Batch], Assignment]:
    model, batches = small()
    candidates = {name: blocks(name) for name in ("e2m1", "e2m2", "e2m3")}
    return model, batches, assign(model, batches, loss, budget="e2m2", candidates=candidates, probes=2)


def test_an_assignment_is_better_than_one_candidate_of_the_same_cost(assigned: tuple[nn.Module, list[Batch], Assignment]) -> None:
    _, _, found = assigned
    uniform = {own.candidate: own for own in found.uniform}
    assert found.budget == uniform["e2m2"].spent == 6
    assert found.spent <= 6
    assert found.error < uniform["e2m2"].error
    assert found.error == pytest.approx(sum(record.error for record in found))
    assert found.spent == pytest.approx(sum(own.bits * own.elements for own in found) / sum(own.elements for own in found))
    assert [option.cost for option in found.frontier] == sorted(option.cost for option in found.frontier)
    assert "not assigned" not in str(found)


def test_a_recipe_converts_also_from_json(assigned: tuple[nn.Module, list[Batch], Assignment]) -> None:
    model, _, found = assigned
    converted = qsim.convert(copy.deepcopy(model), json.loads(json.dumps(found.recipe)))
    for name, choice in found.points:
        assert converted.get_submodule(name).points == choice.points
        chosen = {record.point: record.candidate for record in found if record.layer == name}
        assert tuple(chosen.values()) == choice.names


def test_results_are_records(assigned: tuple[nn.Module, list[Batch], Assignment]) -> None:
    _, _, found = assigned
    assert found["0", "act"] is found[0]
    assert found.sensitivities.worst("error")[0].candidate == "e2m1"
    assert len(found.rows()) == 9
    assert json.loads(found.to_json())["budget"] == 6
    assert found.plot().get_ylabel() == "squared error of gradients"


def test_the_model_is_unchanged_and_the_result_repeats() -> None:
    model, batches = images()
    qsim.convert(model, "e4m3", include="0")
    before, points, state = copy.deepcopy(model.state_dict()), model[0].points, torch.get_rng_state()
    first, again = (assign(model, batches, loss, budget=6.0, candidates=CANDIDATES, probes=1) for _ in range(2))
    assert first == again
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert model[0].points is points
    assert not isinstance(model[4], FivePointModule)
    assert model[4].weight.grad is None


def test_one_candidate_for_each_layer_and_transforms_that_do_not_mix() -> None:
    model, batches = small()
    turned = Quantizer(BLOCK, "stochastic", transform=qsim.transforms.Hadamard(16))
    plain = FivePoint("e4m3", "e4m3", "e4m3", act_bwd="e4m3", weight_bwd="e4m3")
    candidates = {"turned": FivePoint(BLOCK, BLOCK, turned, act_bwd=turned, weight_bwd=turned), "plain": plain}
    for per in ("layer", "point"):
        found = assign(model, batches, loss, budget=6.0, candidates=candidates, per=per, search="greedy", exclude="4", probes=1)
        assert {len(set(choice.names)) for _, choice in found.points} == {1}
        assert sorted(found.recipe) == ["0", "2"]
        assert found.left == ("4",)


def test_time_follows_the_wider_operand(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batches = small()
    found = assign(model, batches, loss, budget=0.5, candidates=CANDIDATES, cost="time", probes=1)
    assert [own.spent for own in found.uniform] == [0.25, 0.5, 1.0]
    assert found.spent <= 0.5
    size = LayerSize({"act": (4, 8), "weight": (6, 8), "grad": (4, 6)}, along("...mk,nk->mn"), 192, 32)
    assert charge("time", FivePoint("e2m1", "bf16", "e4m3"), size) == (192 * (1 + 1 + 0.5), 576)
    costs = {4: 10.0, 8: 40.0, 16: 100.0}
    monkeypatch.setitem(charge.__globals__, "luts_of", lambda a, b, sums: costs[max(a.bits, b.bits)])  # Yosys takes a minute for a pair
    found = assign(model, batches, loss, budget=40.0, candidates=CANDIDATES, cost="luts", probes=1)
    assert [own.spent for own in found.uniform] == [10, 40, 100]
    assert found.spent <= 40


@pytest.mark.slow
def test_lookup_tables_are_those_that_yosys_counts() -> None:
    from qsim.accumulators import Rounded
    from qsim.diagnostics.assignment.costs import luts_of
    from qsim.silicon import Dot, cost

    tool("yosys")
    sums = Rounded("e5m2")
    assert luts_of(qsim.format("e2m1"), qsim.format("e2m1"), sums) == cost(Dot(sums, "e2m1")).fpga.luts


def test_a_shared_layer_and_a_loss_of_the_model() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shared = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.shared(torch.tanh(self.shared(x))).square().mean()

    found = assign(Twice(), [torch.randn(16, 8) for _ in range(3)], budget=8.0, candidates=CANDIDATES, probes=1)
    assert found["shared", "act"].elements == 2 * 2 * 16 * 8


class Attends(nn.Module):
    """Layers that are assigned, and products that are not: of attention, of a parameter, and of a tied table."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.query = nn.Embedding(9, 8), nn.Linear(8, 8)
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True)
        self.matrix = nn.Parameter(torch.randn(8, 8) / 3)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.query(self.table(ids))
        x = F.scaled_dot_product_attention(x, x, x)
        x = self.attend(x, x, x)[0] @ self.matrix @ self.matrix
        return F.cross_entropy(F.linear(x, self.table.weight).flatten(0, 1), ids.flatten())


@pytest.mark.parametrize("is_converted", [False, True], ids=["plain", "converted"])
def test_what_is_left_out_has_names(is_converted: bool) -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(Attends())
    if is_converted:
        qsim.convert(model, "e4m3", calls="all", embeddings=True)
    ids = [torch.randint(9, (2, 4)) for _ in range(3)]
    found = assign(model, ids, budget=6.0, candidates=CANDIDATES, probes=1)
    assert found.left == ("0.table", "0.attend", "0:scaled_dot_product_attention", "0:matmul", "0:linear")
    assert list(found.recipe) == ["0.query"]
    assert str(found).endswith("not assigned: " + ", ".join(found.left))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": 3.0}, r"budget of 3 bits per element is below the cheapest candidates, which cost 4$"),
        ({"budget": "mxfp4"}, r"budget must be a positive number or the name of a candidate, got 'mxfp4'"),
        ({"budget": 0.0}, r"budget must be a positive number"),
        ({"candidates": ["e2m1"]}, r"there must be 2 or more candidates"),
        ({"candidates": "e2m1"}, r"candidates must be several formats"),
        ({"candidates": ["e2m1", "e2m1"]}, r"two candidates are named 'e2m1'"),
        ({"candidates": ["e2m1", Quantizer("e4m3", scale=qsim.scaling.Delayed(4))]}, r"has delayed scales"),
        ({"candidates": {"a": "e2m1", "b": FivePoint(act=torch.sign)}}, r"'b' has the callable sign at act"),
        ({"cost": "joules"}, r"cost must be 'bits', 'time', 'luts', got 'joules'"),
        ({"per": "model"}, r"per must be"),
        ({"search": "random"}, r"search must be"),
        ({"include": "9"}, r"include pattern '9' matches no layer"),
        ({"exclude": ["0", "2", "4"]}, r"no linear layer or convolution to assign"),
        ({"loss": None}, r"loss must be given: the model returns no scalar"),
    ],
)
def test_errors(options: dict[str, Any], message: str) -> None:
    model, batches = small()
    given = {"loss": loss, "budget": 6.0, "candidates": CANDIDATES, "probes": 1} | options
    if given["loss"] is None:
        batches = [batch[0] for batch in batches]
    with pytest.raises((TypeError, ValueError), match=message):
        assign(model, batches, **given)
    assert not any(isinstance(layer, FivePointModule) for layer in model)


def test_errors_of_models() -> None:
    model, batches = small()
    with pytest.raises(ValueError, match=r"weights of torch.bfloat16, too coarse"):
        assign(model.bfloat16(), batches, loss, budget=6.0, candidates=CANDIDATES)
    with pytest.raises(ValueError, match=r"noise other than rounding's"):
        assign(nn.Sequential(nn.Linear(32, 8), nn.Dropout()), batches, loss, budget=6.0, candidates=CANDIDATES)
    unused = nn.ModuleDict({"used": nn.Linear(32, 8), "unused": nn.Linear(32, 8)})
    with pytest.raises(ValueError, match=r"no gradient reaches unused"):
        assign(unused, batches, lambda model, batch: loss(model["used"], batch), budget=6.0, candidates=CANDIDATES)


@pytest.mark.parametrize(
    ("factor", "candidates", "message"),
    [
        (float("nan"), CANDIDATES, "gradients of all weights are zero, infinite or NaN"),
        (0.0, CANDIDATES, "gradients of all weights are zero, infinite or NaN"),
        (
            1e6,
            {"narrow": FivePoint(grad=Quantizer("e5m2", overflow="nonfinite")), "bf16": "bf16"},
            "narrow makes gradients infinite or NaN in 0",
        ),
    ],
)
def test_gradients_without_a_size_are_refused(factor: float, candidates: Any, message: str) -> None:
    torch.manual_seed(0)
    model, batches = nn.Sequential(nn.Linear(8, 2)), [torch.randn(4, 8) for _ in range(3)]
    with pytest.raises(ValueError, match=message):
        assign(model, batches, lambda model, x: factor * model(x).sum(), budget=99.0, candidates=candidates, probes=1)


def test_a_layer_whose_weights_are_zero() -> None:
    model, batches = small()
    nn.init.zeros_(model[-1].weight)
    assert assign(model, batches, loss, budget=6.0, candidates=CANDIDATES, probes=1).spent <= 6.0
