"""The report of the study `recipes`: a table and a figure of every recipe, and whether each trains as well as BF16."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from matplotlib.figure import Figure

from qsim import FivePoint, Quantizer
from qsim.plot import figures
from qsim.studies.findings import Findings, Values
from qsim.studies.learners.gpt_training import described
from qsim.studies.learners.text import VOCABULARY
from qsim.studies.recipes import BF16, LOSS_SCALE, MIXTURE, TIME, TRAINING, Settings, recipe_of
from qsim.studies.report import Claim, Picture, Report, listed
from qsim.studies.statistics import CONFIDENCE, Interval, below, confidence, confidence_text, difference, mean, positive
from qsim.text.tables import Table

#: The share of BF16's loss that a recipe may add and still count as equal.
_TOLERANCE = 0.01


class Written(Findings[Settings]):
    """The results of the study, by recipe and model."""

    @property
    def _level(self) -> float:
        """The confidence of each interval, with which all of one model's hold together with the usual one."""
        return 1 - (1 - CONFIDENCE) / len(self.settings.recipes)

    @property
    def percent(self) -> str:
        """The confidence as text."""
        with confidence(self._level):
            return confidence_text()

    def report(self) -> Report:
        """The complete report, with wider intervals."""
        note = "Intervals are corrected for the number of recipes: with a probability of at least 95 %, all intervals of one model hold."
        with confidence(self._level):
            return replace(super().report(), note=note)

    def losses(self, model: str, recipe: str) -> Values:
        """The loss of each seed; that of a model that diverged is the one of a model that knows nothing."""
        return np.minimum(self.over_seeds("loss", what=TRAINING, model=model, recipe=recipe), math.log(VOCABULARY))

    def gap(self, model: str, recipe: str) -> Interval:
        """The loss that a recipe adds to that of BF16, seed by seed."""
        return difference(self.losses(model, recipe), self.losses(model, BF16))

    def bias(self, model: str, recipe: str, look: int = -1) -> Interval:
        """The bias of the gradient relative to its norm; estimates of a square that are below zero count as zero."""
        return positive(np.sqrt(np.maximum(0.0, self._errors(model, recipe)[:, look, 1])))

    def spread(self, model: str, recipe: str, look: int = -1) -> Interval:
        """The standard deviation of the gradient relative to its norm."""
        return positive(np.sqrt(self._errors(model, recipe)[:, look, 2]))

    def _errors(self, model: str, recipe: str) -> Values:
        """Steps, squared biases and variances: seeds × looks × 3."""
        return np.array([result["gradients"] for result in self.seeded(what=TRAINING, model=model, recipe=recipe)])

    def title(self) -> str:
        """The question, and the size if it is another one."""
        return "" if self.settings.size == "tiny" else f"{self.study.question} At the size of GPT-2 {self.settings.size}"

    def parts(self) -> list[str | Table | Picture]:
        """The setting, the figure and a table for each model."""
        trains, chosen = TRAINING in self.settings.measures, self.settings
        text = [self.text("setting", models=self._models(), scale=LOSS_SCALE), self.text("add", example=chosen.recipes[0])]
        return [*text, *([self.picture("leaderboard", self._draw)] if trains else []), *map(self._table, chosen.models)]

    def _models(self) -> str:
        """Name the models that are trained, as the beginning of a sentence."""
        chosen = self.settings
        gpt = described([chosen.size], VOCABULARY, chosen.context, chosen.data)
        experts = f"{chosen.experts} experts per block, {chosen.active} for each byte"
        if MIXTURE not in chosen.models:
            return gpt
        if len(chosen.models) > 1:
            return f"{gpt}, and so does the same with {experts},"
        return f"A GPT of size {chosen.size} with {experts},{gpt[gpt.index(' learns') :]}"

    def _table(self, model: str) -> Table:
        looks = self.settings.looks
        columns: dict[str, Callable[[str], str]] = {"bits": _bits}
        if TRAINING in self.settings.measures:
            columns |= {
                "rounded": lambda recipe: f"{self.over_seeds('share', what=TRAINING, model=model, recipe=recipe)[0]:.0%}",
                "loss": lambda recipe: f"{mean(self.losses(model, recipe)).value:.4f}",
                "added to BF16's": lambda recipe: "-" if recipe == BF16 else f"{self.gap(model, recipe):+.4f}",
                "bias of gradients": lambda recipe: _looks([self.bias(model, recipe, look) for look in range(looks)]),
                "standard deviation": lambda recipe: _looks([self.spread(model, recipe, look) for look in range(looks)]),
            }
        if TIME in self.settings.measures:
            columns |= {"ms per step": lambda recipe: self._time(model, recipe)}
        rows = [[recipe, *(cell(recipe) for cell in columns.values())] for recipe in (BF16, *self._ranked(model))]
        return Table.of(f"Recipes on the {_name(model)}", ["recipe", *columns], rows)

    def _time(self, model: str, recipe: str) -> str:
        """The time of a step, with the device if not all were measured on one."""
        (own,) = self.seeded(what=TIME, model=model, recipe=recipe)
        devices = {result.machine["device"] for result in self.results if result.run.what == TIME}
        return f"{own['milliseconds']:.1f}" + (f" ({own.machine['device'].removeprefix('NVIDIA ')})" if len(devices) > 1 else "")

    def _ranked(self, model: str) -> Sequence[str]:
        """The recipes, from the smallest gap to the largest."""
        if TRAINING not in self.settings.measures:
            return self.settings.recipes
        return sorted(self.settings.recipes, key=lambda recipe: self.gap(model, recipe).value)

    def _draw(self) -> list[Figure]:
        with confidence(self._level):
            return [self._panel(model) for model in self.settings.models]

    def _panel(self, model: str) -> Figure:
        recipes = self._ranked(model)
        figure, (loss, gradient) = figures.panels(2, 1, width=5.2, height=2.4, sharex=True)
        places = range(len(recipes))
        figures.band(loss, places, [self.gap(model, recipe) for recipe in recipes], figures.LOOKS[0].alone())
        for level in (0, _TOLERANCE * mean(self.losses(model, BF16)).value):
            loss.axhline(level, **figures.REFERENCE(linestyle=(0, (5, 2)) if level else (0, (1, 1.5))))
        loss.set(ylabel="added to the loss\nin nats per byte", title=_name(model))
        for aside, look, of, label in ((-0.1, 1, self.bias, "bias"), (0.1, 2, self.spread, "standard deviation")):
            at = [place + aside for place in places]
            figures.band(gradient, at, [of(model, recipe) for recipe in recipes], figures.LOOKS[look].alone(), label)
        gradient.set_xticks(places, recipes, rotation=40, ha="right")
        gradient.set_yscale("symlog", linthresh=0.01)
        gradient.set_yticks([0, 0.01, 0.1, 1], ["0", "1 %", "10 %", "100 %"])
        gradient.set(ylabel="error of the gradient\n÷ its norm", ylim=(-0.003, None))
        figures.legend(figure, gradient, columns=2)
        return figure

    def claims(self) -> list[Claim]:
        """Whether each recipe trains each model as well as BF16."""
        if TRAINING not in self.settings.measures:
            return []
        return [self._as_good(model, recipe) for model in self.settings.models for recipe in self._ranked(model)]

    def _as_good(self, model: str, recipe: str) -> Claim:
        gap, reference = self.gap(model, recipe), mean(self.losses(model, BF16)).value
        words = {"recipe": recipe, "model": _name(model), "reference": reference, "tolerance": _TOLERANCE}
        return self.claim("as good", below(gap, _TOLERANCE * reference), gap=gap, **words)

    def meaning(self) -> str:
        """Count the comparisons that are decided, and name what separates the recipes."""
        if TRAINING not in self.settings.measures:
            return f"Times of {listed(self.settings.recipes)}."
        gaps = [self.gap(model, recipe).detects for model in self.settings.models for recipe in self.settings.recipes]
        verdicts = [claim.agrees for claim in self.claims()]
        nats = _TOLERANCE * mean(self.losses(self.settings.models[0], BF16)).value
        counts = {"undecided": verdicts.count(None), "count": len(verdicts), "tolerance": _TOLERANCE, "nats": nats}
        model = self.settings.models[0]
        by_bias = sorted((self.bias(model, recipe).value, recipe) for recipe in self.settings.recipes)
        (smallest, closest), (largest, farthest) = by_bias[0], by_bias[-1]
        ends = "; ".join(map(self._ends, self.settings.models))
        return self.text(
            "meaning", **counts, ends=ends[0].upper() + ends[1:], weakest=min(gaps), strongest=max(gaps), model=_name(model),
            smallest=smallest, closest=closest, largest=largest, farthest=farthest,
        )  # fmt: skip

    def _ends(self, model: str) -> str:
        """The recipes that add least and most to the loss of a model."""
        ranked = self._ranked(model)
        best, worst = ranked[0], ranked[-1]
        least, most = (self.gap(model, recipe).value for recipe in (best, worst))
        reference = mean(self.losses(model, BF16)).value
        return self.text("ends", model=_name(model), best=best, worst=worst, least=least, most=most, reference=reference)


def _name(model: str) -> str:
    return "mixture of experts" if model == MIXTURE else "GPT"


def _bits(recipe: str) -> str:
    """The bits of inputs, weights and gradients, without scales."""
    if recipe == BF16:
        return "16, 16, 16"
    found = recipe_of(recipe)
    points = found if isinstance(found, FivePoint) else found.points
    used = (points.used[name] for name in ("act", "weight", "grad"))
    return ", ".join(str(point.format.bits) if isinstance(point, Quantizer) else "-" for point in used)


def _looks(found: Sequence[Interval]) -> str:
    return ", ".join(f"{100 * each.value:.2g} %" for each in found)
