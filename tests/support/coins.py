"""A study that takes no time: seeded coin tosses, for tests of the code that all studies share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from qsim.studies import Claim, Picture, Report, Result, Study, Table
from qsim.studies.choices import choice


@dataclass(frozen=True)
class Settings:
    seeds: int = choice(3, "how many coins")
    sides: tuple[str, ...] = choice(("heads", "tails"), "what to count")
    weight: float = choice(0.5, "of heads")


@dataclass(frozen=True)
class Toss:
    side: str
    weight: float
    seed: int


class Coins(Study[Settings, Toss]):
    """The study: how often a coin shows a side."""

    name, question, source = "coins", "Is the coin fair?", "a pocket"
    settings, run = Settings, Toss

    def full(self) -> Settings:
        return Settings(seeds=5)

    def runs(self, settings: Settings) -> Sequence[Toss]:
        return [Toss(side, settings.weight, seed) for seed in range(settings.seeds) for side in settings.sides]

    def work(self, run: Toss) -> float:
        return 1.0 + run.seed

    def measure(self, run: Toss, device: torch.device) -> dict[str, Any]:
        if run.weight < 0:
            raise ValueError("no coin is that light")
        heads = torch.rand(1000, generator=torch.Generator().manual_seed(run.seed)) < run.weight
        return {"share": (heads if run.side == "heads" else ~heads).double().mean().item(), "threads": torch.get_num_threads()}

    def report(self, settings: Settings, results: Sequence[Result[Toss]]) -> Report:
        rows = [[result.run.side, str(result.run.seed), f"{result['share']:.3f}"] for result in results]
        claim = Claim("the rim", "heads | tails", "both", True, test="the side that is up", rule="yes if it is up", power="a coin")
        return Report(
            self, ["Coins.", Table.of("Tosses", ["side", "seed", "share"], rows), Picture("tosses", "Shares.", _draw)], [claim], "Fair."
        )


def _draw() -> Any:
    from qsim.plot import figures

    figure, (axes,) = figures.panels()
    axes.plot([1, 2], [3, 4], **figures.LOOKS[0]())
    axes.set_xlabel("toss")
    axes.set_ylabel("share")
    return figure
