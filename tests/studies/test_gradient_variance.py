"""The study `gradient-variance`: its numbers match the lemmas, computed independently, and its report says so."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qsim
from qsim import studies
from qsim.studies import gradient_variance as study
from qsim.studies.gradient_variance import GradientVarianceStudy, Run, Settings

pytestmark = pytest.mark.usefixtures("plain_arithmetic")
pytest.importorskip("sklearn")

CPU = torch.device("cpu")


def detached(found: tuple[nn.Linear, Tensor, Tensor]) -> tuple[nn.Linear, Tensor, Tensor]:
    """A layer that requires no gradients, and its inputs."""
    return found[0].requires_grad_(False), *found[1:]


def variance_of_rounding(x: Tensor, mantissa: int) -> Tensor:
    """The variance of stochastic rounding between two neighbours: the product of the distances to them."""
    fmt = qsim.Float(7, mantissa)
    wide = x.double()  # which represents the format
    low, high = (qsim.quantize(wide, fmt, rounding=rounding) for rounding in ("down", "up"))
    return (wide - low) * (high - wide)


def run_of(rounded: str, bits: int, rounding: str, *, images: int = 128, draws: int = 2, steps: int = 20) -> Run:
    common = {"data": "digits", "batch": 32, "seed": 0}
    return Run(**common, rounded=rounded, bits=bits, rounding=rounding, images=images, draws=draws, steps=steps)


@pytest.mark.slow
@pytest.mark.parametrize("mantissa", [0, 3])
def test_a_run_measures_what_lemma_3_computes(mantissa: int) -> None:
    run = run_of(study.BACKWARD, mantissa, "stochastic", draws=64)
    layer, inputs, labels = detached(study.last_layer(run, CPU))
    due = {"rounding": 0.0, "rounding_of_inputs": 0.0, "rounding_of_gradients": 0.0}
    for x, y in zip(inputs.split(32), labels.split(32), strict=True):
        gradient = (F.linear(x, layer.weight, layer.bias).softmax(-1) - F.one_hot(y, 10)).detach() / 32
        of_x, of_g = variance_of_rounding(x, mantissa).sum(1), variance_of_rounding(gradient, mantissa).sum(1)
        squares = x.double().square().sum(1), gradient.double().square().sum(1)
        parts = {"rounding_of_inputs": of_x @ squares[1], "rounding_of_gradients": of_g @ squares[0]}
        for name, part in (parts | {"rounding": sum(parts.values()) + of_x @ of_g}).items():
            due[name] += float(part) / 4
    found = GradientVarianceStudy().measure(run, CPU)
    # 4 × 63 differences of 640 elements, whose squares vary by some three times their mean. Were all elements one number, the mean would
    # be off by a fifth; it is off by a hundredth where 500 of them count. Ten times that.
    for name, number in due.items():
        assert found[name] == pytest.approx(number, rel=0.1), name
    assert abs(found["squared_bias"]) < 0.1 * found["rounding"]


def test_the_bound_of_lemma_1_holds_for_any_weights() -> None:
    run = run_of(study.WEIGHTS, 0, "nearest")
    layer, inputs, labels = detached(study.last_layer(run, CPU))
    # In float32 the last ratio below would exceed the bound, which it almost reaches.
    layer, inputs = layer.double(), inputs.double()
    # With steps of 1 the bound is that of a distance of `√d / 2`: the smoothness is this large.
    smoothness = study.bound_of_bias(layer.weight, inputs, run) / (0.5 * layer.weight.numel() ** 0.5)

    def gradient(weight: Tensor) -> Tensor:
        given = weight.detach().requires_grad_()
        (found,) = torch.autograd.grad(F.cross_entropy(F.linear(inputs, given, layer.bias.detach()), labels), given)
        return found

    ratios = []
    for size in (1e-3, 1e-2, 1e-1, 1.0, 10.0):
        for _ in range(5):
            moved = layer.weight + size * torch.randn_like(layer.weight)
            ratios.append(float((gradient(moved) - gradient(layer.weight)).norm() / (moved - layer.weight).norm()))
    # In the direction of the largest eigenvalue, with all images undecided between two classes, it is almost reached.
    vector = torch.linalg.eigh(inputs.T @ inputs).eigenvectors[:, -1]
    waver = torch.zeros_like(layer.weight)
    layer.bias.data = torch.tensor([50.0, 50.0, *[-50.0] * 8], dtype=torch.float64)
    off = torch.zeros_like(layer.weight)
    off[0], off[1] = 1e-3 * vector, -1e-3 * vector
    ratios.append(float((gradient(waver + off) - gradient(waver)).norm() / off.norm()))
    assert max(ratios) <= smoothness
    assert ratios[-1] > 0.95 * smoothness


@pytest.mark.slow
def test_the_reduced_study_agrees_with_the_lemmas(tmp_path: Path) -> None:
    report = studies.run("gradient-variance", form="quick", out=tmp_path)
    verdicts = {claim.paper: claim.agrees for claim in report.claims}
    # With three seeds an interval may exceed a tolerance, and the claim is undecided. None may be outside.
    assert all(claim.agrees is not False for claim in report.claims), verdicts
    assert verdicts["it grows 4 times for each mantissa bit that is removed"] is True
    assert verdicts["no batch size reduces that bias"] is True
    page = (tmp_path / "report.md").read_text()
    assert "| where | claim | measured here | smallest effect | agrees |" in page
    panels = {f"{name}-{panel}" for name in ("batch", "bits") for panel in (1, 2)}
    assert {path.stem for path in tmp_path.glob("*.svg")} == panels | {f"{panel}-dark" for panel in panels}


def test_runs_are_the_sizes_and_bits_that_were_chosen() -> None:
    settings = Settings(mantissas=(0, 1, 2), batches=(4, 8, 16), fractions=(3,), images=64, seeds=2)
    runs = GradientVarianceStudy().runs(settings)
    own = [run for run in runs if run.rounded == study.BACKWARD and run.seed == 1]
    backward = {(run.bits, run.batch): run.draws for run in own if run.rounding == "stochastic"}
    assert backward == {(0, 4): 2, (0, 8): 4, (0, 16): 8, (1, 4): 2, (1, 8): 4, (1, 16): 8, (2, 8): 4}
    # What nearest does in the backward pass shows that a bias would be found.
    assert {(run.bits, run.batch) for run in own if run.rounding == "nearest"} == {(0, 8), (1, 8), (2, 8)}
    assert {(run.rounding, run.batch) for run in runs if run.rounded == study.WEIGHTS} == {
        (rounding, batch) for rounding in ("nearest", "stochastic") for batch in (4, 8, 16)
    }


@pytest.mark.parametrize(
    ("change", "wording"),
    [
        ({"mantissas": (3,)}, r"mantissas: must be at least two, in increasing order; got 3"),
        ({"batches": (8, 4)}, r"batches: must be at least two, in increasing order; got 8,4"),
        ({"batches": (4, 6), "images": 24}, r"batches: must be multiples of the smallest; got 4,6"),
        ({"images": 256}, "images: must be a multiple of the largest batch and at least 3 of them, 128 each; got 256"),
        ({"draws": 1}, "draws: must be at least 2; got 1"),
        ({"seeds": 1}, "seeds: must be at least 2; got 1"),
    ],
)
def test_settings_without_information_raise_an_error(change: dict[str, Any], wording: str) -> None:
    with pytest.raises(ValueError, match=wording):
        GradientVarianceStudy().runs(replace(Settings(), **change))


def test_more_images_than_there_are_is_an_error() -> None:
    run = run_of(study.WEIGHTS, 3, "nearest", images=4096, steps=1)
    with pytest.raises(ValueError, match="images: digits has 898 training images, got 4096"):
        GradientVarianceStudy().measure(run, CPU)
