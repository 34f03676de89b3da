"""A leaderboard of recipes: what each costs a language model and a mixture of experts, in loss, in gradients and in time."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from qsim import FivePoint
from qsim.recipes import NAMED, Recipe
from qsim.recipes.named import needs_format, resolve
from qsim.studies.choices import choice, imported, require, require_among
from qsim.studies.learners.gpt import size
from qsim.studies.study import Run, TrialStudy

#: The reference: products in bfloat16, and nothing else rounded.
BF16 = "bf16"
LANGUAGE, MIXTURE = "gpt", "mixture"
MODELS = (LANGUAGE, MIXTURE)

#: The factor of the loss where a recipe rounds gradients without scales.
LOSS_SCALE = 2.0**10
#: The kinds of runs: a model that is trained, and steps that are timed, which must not share a GPU.
TRAINING, TIME = "training", "time"
MEASURES = (TRAINING, TIME)
#: Every recipe that needs no format.
EVERY = tuple(name for name, make in NAMED.items() if not needs_format(make))


@dataclass(frozen=True)
class Settings:
    """The settings of the study."""

    data: str = choice("library", "library (the sources of Python's standard library), a text file, or a folder of text files")
    recipes: tuple[str, ...] = choice(EVERY, "recipes: names, calls such as nvfp4.with_(last=4), or MODULE:FUNCTION for one of your own")
    models: tuple[str, ...] = choice(MODELS, "models: gpt, mixture (of experts), or both")
    size: str = choice("tiny", "size of both: tiny, mini, or GPT-2's small or medium")
    experts: int = choice(4, "experts in each block of the mixture")
    active: int = choice(2, "experts of a token")
    context: int = choice(32, "length of sequences in bytes")
    batch: int = choice(8, "sequences per update")
    steps: int = choice(40, "number of updates")
    rate: float = choice(4e-3, "peak learning rate of AdamW")
    looks: int = choice(2, "how often gradients are compared with those in full precision, at equal distances")
    draws: int = choice(4, "draws per gradient")
    timed: int = choice(10, "updates that are timed")
    seeds: int = choice(5, "number of seeds")
    measures: tuple[str, ...] = choice(MEASURES, "training; time, in runs that must not share a GPU; or both")


class RecipesStudy(TrialStudy[Settings]):
    """Train a GPT and a mixture of experts in BF16 and in every recipe, on the same data from the same weights."""

    name = "recipes"
    question = "What does each recipe cost a language model?"
    source = "no claim of a paper; the recipes name theirs"
    settings = Settings
    shared = ("data", "size", "experts", "active", "context", "batch", "steps", "rate", "looks", "draws")

    #: Two recipes, few steps.
    quick_form = Settings(recipes=("fp8_hybrid", "mxfp4"), context=16, batch=4, steps=6, looks=1, draws=2, timed=2, seeds=2)

    #: GPT-2 small's blocks, for a GPU.
    full_form = Settings(size="small", experts=8, context=256, batch=16, steps=250, rate=6e-4, looks=3, draws=4, timed=20)

    def timed(self, settings: Settings) -> bool:
        """Whether steps are timed."""
        return TIME in settings.measures

    def check(self, settings: Settings) -> None:
        """Models, recipes and steps that fit one another."""
        size(settings.size)
        require_among(settings, "models", MODELS)
        require_among(settings, "measures", MEASURES)
        require(settings, "recipes", settings.recipes and BF16 not in settings.recipes, f"be others than {BF16}, the reference")
        require(settings, "active", 1 <= settings.active <= settings.experts, f"be from 1 to the {settings.experts} experts")
        require(settings, "looks", 1 <= settings.looks <= settings.steps, f"be from 1 to the {settings.steps} steps")
        for name in ("draws", "timed"):
            require(settings, name, getattr(settings, name) >= 2, "be at least 2")

    def ways(self, settings: Settings, seed: int) -> Iterator[dict[str, Any]]:
        """Every recipe and BF16 on every model, with a digest of the recipe, so that a changed one is another run; timed once."""
        untrained = {"what": TIME, "steps": settings.timed, "looks": 0, "draws": 0}
        for model, name in product(settings.models, (BF16, *settings.recipes)):
            way = {"model": model, "recipe": name, "points": digest(name)}
            if TRAINING in settings.measures:
                yield {"what": TRAINING, **way}
            if TIME in settings.measures and seed == 0:
                yield {**way, **untrained}

    def work(self, run: Run) -> float:
        """Updates, and the gradients that are compared."""
        passes = run.steps + run.looks * (run.draws + 1)
        return float(passes * (1 if run.recipe == BF16 else 3) * (2 if run.model == MIXTURE else 1))

    def measure(self, run: Run, device: torch.device) -> dict[str, Any]:
        """The loss on the held-out text and the errors of gradients; or the time of a step."""
        from qsim.studies.recipes.training import timing, trained

        return trained(run, device) if run.what == TRAINING else timing(run, device)


def recipe_of(name: str) -> Recipe | FivePoint:
    """A recipe by its name, the call that creates it, or the function of a module that returns it.

    Raises:
        ValueError: If there is none.

    Example:
        >>> recipe_of("nvfp4.with_(last=4)").last
        4
    """
    if ":" not in name:
        return resolve(name)
    made = imported("recipes", name)()
    if not isinstance(made, Recipe | FivePoint):
        raise ValueError(f"recipes: {name} must return a recipe or a FivePoint, got {type(made).__name__}")
    return made


def digest(name: str) -> str:
    """A digest of what a recipe rounds: results of another definition are not used again."""
    if name == BF16:
        return ""
    return hashlib.sha256(json.dumps(recipe_of(name).to_dict(), sort_keys=True).encode()).hexdigest()[:12]
