"""The leaderboard of recipes: errors of gradients against known ones, the mixture of experts, runs, verdicts, a recipe of one's own."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qsim import studies
from qsim.studies import recipes as study
from qsim.studies.learners.mixture import Mixture
from qsim.studies.recipes import BF16, EVERY, LANGUAGE, MIXTURE, TIME, TRAINING, RecipesStudy, Run, Settings, digest, recipe_of
from qsim.studies.recipes.report import Written
from qsim.studies.recipes.training import gradient_errors, training_of
from support.made_up import but

CPU = torch.device("cpu")


class Lopsided(nn.Module):
    """Logits whose gradient is off by a known factor, and noisy by a known one."""

    def __init__(self, factor: float, noise: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(256))
        self.weight.register_hook(lambda grad: grad * (factor + noise * torch.randn(())))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.weight.expand(*tokens.shape, 256)


@pytest.mark.slow
def test_errors_of_gradients_are_bias_and_variance() -> None:
    sequences = torch.randint(256, (4, 9), generator=torch.Generator().manual_seed(0))
    drawn: list[int] = []
    bias, variance = gradient_errors(Lopsided(1.0, 0.0), Lopsided(1.25, 0.0), sequences, 4, 0, lambda: drawn.append(1))
    assert (bias, variance, len(drawn)) == (pytest.approx(0.0625), 0.0, 4)
    # The variance of the factor is 0.01; its estimate from 400 draws has a standard deviation of a fourteenth of that.
    bias, variance = gradient_errors(Lopsided(1.0, 0.0), Lopsided(1.0, 0.1), sequences, 400, 0, lambda: None)
    assert variance == pytest.approx(0.01, rel=0.4)
    assert abs(bias) < 5 * 0.01 / 400


def test_a_mixture_is_the_sum_of_its_experts() -> None:
    torch.manual_seed(0)
    mixture = Mixture(8, experts=3, active=2)
    nn.init.normal_(mixture.expand)
    nn.init.normal_(mixture.contract)
    x = torch.randn(2, 5, 8)
    weights, chosen = mixture.router(x).softmax(-1).topk(2, -1)
    expected = torch.zeros_like(x)
    for row in torch.cartesian_prod(torch.arange(2), torch.arange(5)).tolist():
        for weight, expert in zip(weights[tuple(row)], chosen[tuple(row)].tolist(), strict=True):
            hidden = F.gelu(x[tuple(row)] @ mixture.expand[expert], approximate="tanh")
            expected[tuple(row)] += weight * (hidden @ mixture.contract[expert])
    torch.testing.assert_close(mixture(x), expected, rtol=0.05, atol=0.05)  # products are in bfloat16


def test_runs() -> None:
    runs = RecipesStudy().runs(Settings())
    assert len(runs) == 2 * (len(EVERY) + 1) * (5 + 1) == len(set(runs))
    assert len(EVERY) >= 10
    assert {run.what for run in RecipesStudy().runs(Settings(measures=(TRAINING,)))} == {TRAINING}
    assert RecipesStudy().timed(Settings())
    assert not RecipesStudy().timed(Settings(measures=(TRAINING,)))


def made_up(settings: Settings, gap: Callable[[Run], float]) -> Written:
    results = []
    for run in RecipesStudy().runs(settings):
        values = {"milliseconds": 2.0 if run.recipe == BF16 else 3.0}
        if run.what == TRAINING:
            noise = 1e-3 * run.seed
            values = {"loss": 2.0 + noise + gap(run), "gradients": [[10, 0.04, 0.01], [20, 0.09, -0.0]], "share": 0.9}
        results.append(studies.Result(run, values, 1.0, {"device": "NVIDIA H100" if run.recipe == "mxfp4" else "NVIDIA H200"}))
    return Written(RecipesStudy(), settings, results)


@pytest.mark.usefixtures("blank_figures")
def test_verdicts_and_the_table(tmp_path: Path) -> None:
    gaps = {BF16: 0.0, "mxfp8": 0.001, "mxfp4": 0.2, "nvfp4": 0.02}
    settings = Settings(recipes=("mxfp4", "mxfp8", "nvfp4"), models=(LANGUAGE,))

    def gap(run: Run) -> float:
        # The last one is as far off as the rule allows, give or take.
        return gaps[run.recipe] + (0.01 * (-1) ** run.seed if run.recipe == "nvfp4" else 1e-5 * run.seed)

    report = made_up(settings, gap).report()
    assert [(claim.paper.split()[0], claim.verdict) for claim in report.claims] == [
        ("mxfp8", "yes"),
        ("nvfp4", "undecided"),
        ("mxfp4", "no"),
    ]
    (table,) = (part for part in report.parts if isinstance(part, studies.Table))
    assert [row["recipe"] for row in table] == [BF16, "mxfp8", "nvfp4", "mxfp4"]
    assert table[1]["bias of gradients"] == "20 %, 30 %"
    assert table[1]["standard deviation"] == "10 %, 0 %"
    assert (table[0]["ms per step"], table[3]["ms per step"]) == ("2.0 (H200)", "3.0 (H100)")
    assert report.meaning.startswith(
        "1 of 3 comparisons with BF16 are undecided at 1% of its loss, 0.020 nats per byte. On the GPT, recipes add"
    )
    assert "98.3 %" in report.parts[0]  # 5 % shared by three recipes
    assert [path.name for path in report.write(tmp_path, "here")] == ["report.md", "leaderboard.svg"]
    assert "corrected for the number of recipes" in (tmp_path / "report.md").read_text()


def test_a_model_that_diverged_knows_nothing() -> None:
    found = made_up(Settings(recipes=("mxfp4",), models=(LANGUAGE,)), lambda run: math.inf if run.recipe != BF16 else 0.0)
    assert found.losses(LANGUAGE, "mxfp4").tolist() == [math.log(256)] * 5


def test_a_recipe_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_recipes.py").write_text("import qsim\ndef half():\n    return qsim.recipes.mxfp4('e4m3')\ndef none():\n    return 4\n")
    monkeypatch.chdir(tmp_path)
    assert recipe_of("my_recipes:half") == study.resolve("mxfp4('e4m3')")
    assert digest("my_recipes:half") == digest("mxfp4('e4m3')") != digest("mxfp4")
    for name, error in (
        ("my_recipes:none", "recipes: my_recipes:none must return a recipe or a FivePoint, got int"),
        ("my_recipes:other", "recipes: my_recipes:other: module 'my_recipes' has no attribute 'other'"),
        ("no_such_module:half", "recipes: no_such_module:half: No module named 'no_such_module'"),
    ):
        with pytest.raises(ValueError, match=error):
            recipe_of(name)


@pytest.mark.parametrize(
    ("chosen", "error"),
    [
        ({"models": ("bert",)}, "models: must be of gpt, mixture; got bert"),
        ({"measures": ()}, "measures: must be of training, time; got none"),
        ({"recipes": ("bf16",)}, "recipes: must be others than bf16, the reference; got bf16"),
        ({"recipes": ("mxfp99",)}, "unknown recipe 'mxfp99'"),
        ({"active": 5}, "active: must be from 1 to the 4 experts; got 5"),
        ({"looks": 0}, "looks: must be from 1 to the 40 steps; got 0"),
        ({"draws": 1}, "draws: must be at least 2; got 1"),
        ({"size": "huge"}, "size: must be one of tiny"),
    ],
)
def test_invalid_settings_raise_an_error(chosen: dict[str, object], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        RecipesStudy().runs(replace(Settings(), **chosen))  # type: ignore[arg-type]


@pytest.mark.slow
def test_the_quick_form(quick_study: Callable[..., studies.Plan]) -> None:
    plan = quick_study("recipes")
    results = {(result.run.what, result.run.model, result.run.recipe, result.run.seed): result for result in plan.results()}
    assert results[TIME, MIXTURE, "mxfp4", 0]["milliseconds"] > 0
    for model in (LANGUAGE, MIXTURE):
        reference, rounded = results[TRAINING, model, BF16, 0], results[TRAINING, model, "mxfp4", 0]
        assert [*map(tuple, reference["gradients"])] == [(6, 0.0, 0.0)]
        assert (reference["share"], rounded["share"]) == (0.0, pytest.approx(0.96, abs=0.02))
        assert rounded["gradients"][0][2] > 0  # stochastic
        assert rounded["loss"] != reference["loss"]


def test_gradients_without_scales_get_a_loss_scale() -> None:
    names = ("hfp8", "stochastic_backward('e4m3')", "nvfp4", "ms_eden", BF16)
    run = RecipesStudy().runs(RecipesStudy().quick())[0]
    assert [training_of(but(run, recipe=name)).loss_scale for name in names] == [1024, 1024, 1, 1, 1]


def test_a_loss_scale_changes_no_other_number() -> None:
    sequences = torch.randint(256, (4, 9), generator=torch.Generator().manual_seed(0))
    plain, scaled = (
        gradient_errors(Lopsided(1.0, 0.0), Lopsided(1.25, 0.5), sequences, 4, 0, lambda: None, scale) for scale in (1.0, 1024.0)
    )
    assert plain == scaled
