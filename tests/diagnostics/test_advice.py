"""Advice of the monitor: it names what ruins a run, and its remedies work."""

from __future__ import annotations

import json
import math
import warnings
from array import array
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qsim
from qsim import FivePoint, Quantizer
from qsim.diagnostics import Advice, Counts, Monitor, Problem
from qsim.diagnostics.remedies import loss_scale_up
from qsim.scaling import PerBlock

#: The share of underflow that remedies promise.
TARGET = 0.1


@pytest.fixture
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def sampled(points: Any, loss_scale: float = 1.0, inputs: float = 1.0, batch: int = 256) -> Monitor:
    """A monitor with a sample of one step of a mean loss."""
    model = qsim.convert(network(), points)
    x, y = inputs * torch.randn(batch, 32), torch.randint(10, (batch,))
    with Monitor(model) as monitor:
        (loss_scale * nn.functional.cross_entropy(model(x), y)).backward()
        monitor.step()
    return monitor


def underflow(monitor: Monitor, layer: str, point: str) -> float:
    counts = monitor.samples[0][layer, point]
    return counts.underflowed / (counts.elements - counts.zero)


def problem(monitor: Monitor, point: str, outcome: str) -> Problem:
    return next(found for found in monitor.advice() if (found.point, found.outcome) == (point, outcome))


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("name", ["e4m3", "e4m0", "e3m2"])
def test_a_loss_scale_for_gradients_that_underflow(name: str) -> None:
    monitor = sampled(FivePoint(grad=name))
    worst = problem(monitor, "grad", "underflow")
    assert worst.share == underflow(monitor, worst.layer, "grad") > 0.5
    assert worst.loss_scale is not None
    scaled = sampled(FivePoint(grad=name), worst.loss_scale)
    assert underflow(scaled, worst.layer, "grad") < TARGET
    assert scaled.samples[0][worst.layer, "grad"].saturated == 0
    assert underflow(sampled(FivePoint(grad=name), worst.loss_scale / 8), worst.layer, "grad") > TARGET, "it is no larger than needed"
    assert f"a loss scale at least 2^{int(worst.loss_scale).bit_length() - 1} times larger (at most 2^" in str(worst)
    assert "scale='tensor'" in worst.remedies


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize(("point", "name"), [("grad", "e4m3"), ("grad", "e2m1"), ("weight", "e2m1"), ("act", "e3m0")])
def test_every_format_and_scale_that_is_advised_holds_the_numbers(point: str, name: str) -> None:
    inputs = 1e-3 if point == "act" else 1.0
    found = problem(sampled(FivePoint(**{"act_bwd": None, "weight_bwd": None, point: name}), inputs=inputs), point, "underflow")
    tried = 0
    for remedy in found.remedies:
        other = {"'e4m3'": "e4m3", "'e5m2'": "e5m2", "'bf16'": "bf16", "scale='tensor'": Quantizer(name, scale="tensor")}.get(remedy)
        if other is not None:
            tried += 1
            assert (
                underflow(sampled(FivePoint(**{"act_bwd": None, "weight_bwd": None, point: other}), inputs=inputs), found.layer, point)
                < TARGET
            )
    assert tried


@pytest.mark.usefixtures("quiet")
def test_activations_that_saturate() -> None:
    monitor = sampled(FivePoint(act="e2m1", act_bwd=None), inputs=1e3)
    found = problem(monitor, "act", "saturation")
    assert (found.layer, found.loss_scale) == ("0", None)
    assert found.share > 0.9
    assert found.ruins
    assert found.remedies[0] == "'e5m2'"
    assert not [other for other in sampled(FivePoint(act="e5m2", act_bwd=None), inputs=1e3).advice() if other.layer == "0"]


@pytest.mark.usefixtures("quiet")
def test_gradients_that_overflow_and_the_loss_scale_that_fits() -> None:
    found = problem(sampled(FivePoint(grad="e5m2"), 2.0**26), "grad", "overflow")
    assert found.loss_scale is not None
    assert found.loss_scale < 1
    assert not found.ruins, "a scaler of the loss skips the step"
    assert found.remedies[0] == f"a loss scale at least 2^{round(-math.log2(found.loss_scale))} times smaller"
    fixed = sampled(FivePoint(grad="e5m2"), 2.0**26 * found.loss_scale)
    assert fixed.samples[0][found.layer, "grad"].saturated == 0
    assert underflow(fixed, found.layer, "grad") < TARGET


@pytest.mark.parametrize("recipe", ["fp8_hybrid", "mxfp8", "mxfp6", "mxfp4", "nvfp4"])
def test_recipes_with_scales_need_no_advice(recipe: str, recwarn: pytest.WarningsRecorder) -> None:
    advice = sampled(recipe).advice()
    assert (bool(advice), advice.rows(), str(advice)) == (False, [], "step 0: nothing to advise")
    assert not [entry for entry in recwarn if "Monitor" in str(entry.message)]


def test_the_first_step_that_is_ruined_warns_once_at_the_callers_line(recwarn: pytest.WarningsRecorder) -> None:
    model = qsim.convert(network(), FivePoint(grad="e2m1"))
    with Monitor(model, every=1) as monitor:
        for _ in range(3):
            model(torch.randn(64, 32)).mean().backward()
            monitor.step()
    (entry,) = [entry for entry in recwarn if str(entry.message).startswith("Monitor")]
    assert str(entry.message).startswith("Monitor: step 0: layer 4, grad: 100 % underflow; a loss scale at least 2^")
    assert "\n" not in str(entry.message)
    assert str(entry.message).endswith("monitor.advice() lists 1 in all")
    assert entry.filename == __file__


@pytest.mark.usefixtures("quiet")
def test_rows_and_steps() -> None:
    monitor = sampled(FivePoint(weight="e2m1", grad="e2m1", weight_bwd=None))
    advice = monitor.advice(0)
    assert json.loads(json.dumps(advice.rows(), allow_nan=False)) == advice.rows()
    assert [row["share"] for row in advice.rows()] == sorted((row["share"] for row in advice.rows()), reverse=True)
    assert str(advice).splitlines()[0] == "step 0"
    with pytest.raises(ValueError, match=r"step 7 was not sampled; sampled were 0"):
        monitor.advice(7)
    with Monitor(qsim.convert(network(), "mxfp8")) as empty:
        assert (empty.advice(), bool(empty.advice())) == (Advice((), None), False)
        assert str(empty.advice()).startswith("no sample yet")


@pytest.mark.usefixtures("quiet")
def test_nan_is_reported_where_it_enters() -> None:
    model = qsim.convert(
        network(), FivePoint(act="e4m3", weight="e4m3", grad=Quantizer("e5m2", scale=PerBlock(32)), act_bwd=None, weight_bwd=None)
    )
    with torch.no_grad():
        model[2].weight[0, 0] = float("nan")
    with Monitor(model) as monitor:
        model(torch.randn(8, 32)).mean().backward()
        with pytest.warns(UserWarning, match=r"Monitor: step 0: layer 2, weight: 0.02 % are NaN; a checkpoint"):
            monitor.step()
    assert [(row["layer"], row["outcome"]) for row in monitor.advice().rows()] == [("2", "NaN")]


def test_ranking_by_underflow_ignores_numbers_that_are_zero_anyway() -> None:
    model = qsim.convert(nn.Sequential(nn.Identity(), nn.Linear(8, 8), nn.Linear(8, 8)), FivePoint(act="e4m3", act_bwd=None))
    with torch.no_grad():
        for layer in model[1:]:
            layer.weight.copy_(torch.eye(8))
            layer.bias.zero_()
    first = torch.tensor([[1e-9, 1e-9, 1e-9, 0, 0, 0, 0, 0]])
    model[1].register_forward_hook(lambda *_: torch.tensor([[1e-9] * 5 + [1.0] * 3]))
    with Monitor(model) as monitor:
        model(first.requires_grad_())
        with pytest.warns(UserWarning, match="layer 1, act: 100 % underflow; 'bf16' or scale='tensor'"):
            monitor.step()
    assert [counts.layer for counts in monitor.samples[0].worst("underflowed")] == ["1", "2"]
    assert monitor.table(by="underflowed", rows=1).splitlines()[2].startswith("1 ")


def losses(optimizer: Any, steps: int = 3, **options: Any) -> tuple[Monitor, float]:
    """A monitor of a model whose optimizer takes steps, and the share of weights that the last one changes."""
    model = qsim.convert(network(), FivePoint(act="e4m3", act_bwd=None))
    made = optimizer(model.parameters(), **options)
    x, y = torch.randn(64, 32), torch.randint(10, (64,))
    changed = 0.0
    with Monitor(model, every=1, optimizer=made) as monitor:
        for _ in range(steps):
            made.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            before = [p.detach().clone() for p in model.parameters()]
            made.step()
            moved = [(p != old).float().mean().item() for p, old in zip(model.parameters(), before, strict=True)]
            changed = sum(moved) / len(moved)
    return monitor, changed


@pytest.mark.parametrize("optimizer", [qsim.optim.AdamW, qsim.optim.SGD])
def test_updates_that_are_all_cancelled(optimizer: Any) -> None:
    with pytest.warns(UserWarning, match=r"Monitor: step [12]: all weights: \S+ % of the updates change no weight; update='stochastic'"):
        monitor, changed = losses(optimizer, lr=1e-4, format="e4m3", update="nearest")
    assert changed < 0.02
    (found,) = monitor.advice()
    assert (found.layer, found.point, found.outcome, found.loss_scale) == ("all weights", "update", "cancelled", None)
    assert found.learning_rate is not None
    assert found.learning_rate > 1e-3
    assert f"a learning rate of at least {found.learning_rate:.2g}" in str(found)
    assert losses(optimizer, lr=found.learning_rate, format="e4m3", update="nearest")[1] > 0.25
    for update in ("stochastic", "kahan"):
        assert not losses(optimizer, lr=1e-4, format="e4m3", update=update)[0].advice()


def test_updates_of_torchs_optimizers(recwarn: pytest.WarningsRecorder) -> None:
    assert not losses(torch.optim.AdamW, lr=1e-3)[0].advice()
    assert not losses(torch.optim.SGD, lr=1e-2, momentum=0.9)[0].advice()

    def rounded(parameters: Any) -> torch.optim.Optimizer:
        return qsim.optim.Quantized(torch.optim.SGD(parameters, lr=1e-4), weight="e4m3")

    assert not [entry for entry in recwarn if "Monitor" in str(entry.message)]
    with pytest.warns(UserWarning, match="all weights: "):
        (found,) = losses(rounded)[0].advice()
    assert found.learning_rate is not None


def test_gradients_that_are_zero_behind_a_relu_do_not_hide_underflow() -> None:
    class Halved(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * (torch.arange(x.shape[-1]) % 4 == 0)

    torch.manual_seed(0)
    model = qsim.convert(nn.Sequential(nn.Linear(32, 64), Halved()), FivePoint(grad="e4m3"))
    with Monitor(model) as monitor:
        (model(torch.randn(64, 32)).square().mean() * 1e-3).backward()
        with pytest.warns(UserWarning, match="layer 0, grad: 100 % underflow"):
            monitor.step()
    assert monitor.samples[0]["0", "grad"].shares["underflowed"] < 0.3


@pytest.mark.usefixtures("quiet")
def test_underflow_at_functions_is_reported() -> None:
    found = problem(sampled(FivePoint(act=torch.zeros_like)), "act", "underflow")
    assert (found.share, found.remedies, found.ruins) == (1.0, ("a point with values nearer to zero",), True)


@pytest.mark.parametrize("recipe", ["quest", "fp4_dge"])
def test_points_with_gradients_of_their_own_are_compared_with_what_they_round(recipe: str) -> None:
    found = [counts.sqnr for counts in sampled(recipe).samples[0] if counts.point in ("act", "weight")]
    assert found
    assert all(10 < sqnr < 30 for sqnr in found)


def test_a_loss_scale_leaves_the_largest_gradient_in_the_range() -> None:
    """E4M3 reaches from 2^-9 to 448: gradients up to 2 leave room for 2^7, which must bring nine tenths of them into the range."""
    for least, scale in ((-16, 2.0**7), (-17, None)):
        histogram = array("q", [50, *[0] * (-1 - least), 50])
        facts = {"elements": 100, "saturated": 0, "underflowed": 50, "exact": 0, "zero": 0, "nan": 0, "infinite": 0, "below": 0}
        counts = Counts("0", "grad", "e4m3", (2.0**-9, 448.0), **facts, lowest=least, histogram=histogram, signal=1.0, noise=1.0)
        assert loss_scale_up(counts, Quantizer("e4m3")) == scale
