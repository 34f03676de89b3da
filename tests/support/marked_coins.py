"""Coins whose runs leave a mark when they begin; one of them waits to be killed when it is first begun."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from qsim.studies import Report, Result, Study
from qsim.studies.choices import choice


@dataclass(frozen=True)
class MarkedSettings:
    folder: str = choice("", "where runs leave their marks")
    seeds: int = choice(8, "how many coins")
    waits: int = choice(2, "the coin that waits")


@dataclass(frozen=True)
class MarkedToss:
    folder: str
    seed: int
    waits: bool


class MarkedCoins(Study[MarkedSettings, MarkedToss]):
    """The study: a mark is a file with the name of the run, the attempt and the process."""

    name, question, source = "marked-coins", "Which coins are tossed?", "a pocket"
    settings, run = MarkedSettings, MarkedToss

    def runs(self, settings: MarkedSettings) -> Sequence[MarkedToss]:
        return [MarkedToss(settings.folder, seed, seed == settings.waits) for seed in range(settings.seeds)]

    def measure(self, run: MarkedToss, device: torch.device) -> dict[str, Any]:
        attempt = len(marks(Path(run.folder), run.seed))
        (Path(run.folder) / f"{run.seed}-{attempt}-{os.getpid()}").touch()
        while run.waits and not attempt:
            time.sleep(0.05)
        return {"seed": run.seed}

    def report(self, settings: MarkedSettings, results: Sequence[Result[MarkedToss]]) -> Report:
        return Report(self, [], [], " ".join(str(result["seed"]) for result in results))


def marks(folder: Path, seed: int) -> list[int]:
    """The processes that began a run."""
    return [int(path.name.split("-")[2]) for path in sorted(folder.glob(f"{seed}-*"))]
