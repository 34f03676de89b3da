"""Replicas whose weight updates round with shared or with independent noise, simulated in one process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import qsim
from qsim.studies.choices import choice, require, require_increasing
from qsim.studies.findings import Findings, Values
from qsim.studies.learners.gpt_training import BETAS
from qsim.studies.learners.images import DIGITS, Images, described, images
from qsim.studies.learners.training import mean_loss
from qsim.studies.report import Claim
from qsim.studies.statistics import Interval, above, below, geometric, mean, ratio
from qsim.studies.study import Run, TrialStudy
from qsim.text.tables import Table

SHARED, INDEPENDENT = "shared", "independent"
#: The steps at which distances are measured, and the factor between losses that is a divergence.
_LOOKS, _DIVERGED = 16, 2.0


@dataclass(frozen=True)
class Settings:
    """The settings of the study."""

    replicas: tuple[int, ...] = choice((2, 8), "numbers of replicas, from few to many")
    rates: tuple[float, ...] = choice((2.0**-11, 2.0**-9, 2.0**-3), "constant learning rates of AdamW, from low to high")
    batch: int = choice(64, "images per update, of all replicas together")
    steps: int = choice(240, "number of updates")
    seeds: int = choice(8, "number of seeds")


class ReplicasStudy(TrialStudy[Settings]):
    """Train replicas that average their gradients and round their own weights."""

    name = "replicas"
    question = "Do replicas need the same random bits?"
    source = "Ozkara et al., Stochastic Rounding for LLM Training, Algorithm 1, Section 5.2"
    settings = Settings
    shared = ("batch", "steps")

    #: Few replicas and steps.
    quick_form = Settings(replicas=(2, 3), rates=(2.0**-9, 2.0**-7), batch=24, steps=32, seeds=2)

    def check(self, settings: Settings) -> None:
        """Several replicas and rates, and enough steps."""
        for name in ("replicas", "rates"):
            require_increasing(settings, name)
        require(settings, "replicas", settings.replicas[0] > 1, "be from 2")
        require(settings, "steps", settings.steps >= _LOOKS, f"be at least {_LOOKS}, at which distances are measured")

    def ways(self, settings: Settings, seed: int) -> Iterator[dict[str, Any]]:
        """Every number of replicas at every rate, with both kinds of noise."""
        for noise, count, rate in product((SHARED, INDEPENDENT), settings.replicas, settings.rates):
            yield {"noise": noise, "replicas": count, "rate": rate}

    def work(self, run: Run) -> float:
        """A constant per step of a replica."""
        return float(run.steps * run.replicas)

    def measure(self, run: Run, device: torch.device) -> dict[str, Any]:
        """Train, and test the replicas and the mean of their weights."""
        found = images(DIGITS, device)
        own = replace(found, x=found.x.bfloat16(), test_x=found.test_x.bfloat16())
        torch.manual_seed(run.seed)
        first = found.net().to(device, torch.bfloat16)
        nets = [deepcopy(first) for _ in range(run.replicas)]
        ranks = range(run.replicas) if run.noise == INDEPENDENT else [0] * run.replicas
        optimizers = [
            qsim.optim.AdamW(net.parameters(), run.rate, BETAS, seed=(run.seed << 8) + rank) for net, rank in zip(nets, ranks, strict=True)
        ]
        start, order = _weights([first])[0], torch.Generator().manual_seed(run.seed)
        apart, moved = [], []
        for step in range(1, run.steps + 1):
            _receive_mean_gradients(nets, own, torch.randint(len(found.y), (run.batch,), generator=order).to(device))
            for optimizer in optimizers:
                optimizer.step()
            if step * _LOOKS // run.steps > (step - 1) * _LOOKS // run.steps:
                weights = _weights(nets)
                apart.append(float((weights - weights.mean(0)).square().sum(1).mean().sqrt()))
                moved.append(float((weights.mean(0) - start).norm()))
        average = found.net().to(device)
        vector_to_parameters(_weights(nets).mean(0).float(), average.parameters())
        losses = [mean_loss(net, own.test_x, own.test_y) for net in nets]
        return {"loss": float(np.mean(losses)), "average": mean_loss(average, found.test_x, found.test_y), "apart": apart, "moved": moved}


def _receive_mean_gradients(nets: Sequence[nn.Module], found: Images, chosen: Tensor) -> None:
    """Give all replicas the mean of their gradients, each of its own part of the batch."""
    parts = []
    for net, part in zip(nets, chosen.tensor_split(len(nets)), strict=True):
        loss = F.cross_entropy(net(found.x[part]).float(), found.y[part], reduction="sum") / len(chosen)
        parts.append(iter(torch.autograd.grad(loss, list(net.parameters()))))
    for weights in zip(*(net.parameters() for net in nets), strict=True):
        total = torch.stack([next(part) for part in parts]).float().sum(0).bfloat16()
        for weight in weights:
            weight.grad = total


def _weights(nets: Sequence[nn.Module]) -> Tensor:
    return torch.stack([parameters_to_vector(net.parameters()).detach().double() for net in nets])


class _Written(Findings[Settings]):
    def losses(self, noise: str, replicas: int, rate: float, what: str = "loss") -> Values:
        """The loss of each seed."""
        return self.over_seeds(what, noise=noise, replicas=replicas, rate=rate)

    def more(self, replicas: int, rate: float) -> Values:
        """The loss with independent noise relative to shared noise, for each seed."""
        return self.losses(INDEPENDENT, replicas, rate) / self.losses(SHARED, replicas, rate)

    def times(self, replicas: int, rate: float) -> Interval:
        """The same, over seeds."""
        return geometric(self.more(replicas, rate))

    def apart(self, replicas: int, rate: float) -> Values:
        """The distance of replicas from their mean with independent noise: seeds × looks."""
        return np.array([found["apart"] for found in self.seeded(noise=INDEPENDENT, replicas=replicas, rate=rate)])

    def parts(self) -> list[str | Table]:
        rows = []
        for rate, count in product(self.settings.rates, self.settings.replicas):
            shared, own = (f"{geometric(self.losses(noise, count, rate)):.3f}" for noise in (SHARED, INDEPENDENT))
            independent = self.seeded(noise=INDEPENDENT, replicas=count, rate=rate)
            away = mean([found["apart"][-1] / found["moved"][-1] for found in independent])
            rows.append([f"{rate:.2g}", str(count), shared, own, f"{self.times(count, rate):.3f}", f"{away:.2%}"])
        header = ["rate", "replicas", "loss, shared", "loss, independent", "ratio", "apart, of the way"]
        text = self.text("setting", learner=described(DIGITS))
        return [text, Table.of("Test loss, and distance of independent replicas", header, rows)]

    def claims(self) -> list[Claim]:
        low, high, least, most = self.settings.rates[0], self.settings.rates[-1], self.settings.replicas[0], self.settings.replicas[-1]
        together = [max(result["apart"]) for result in self.results if result.run.noise == SHARED]
        apart = self.apart(most, low)
        growth = ratio(apart[:, -1], apart[:, _LOOKS // 4 - 1])
        small, large = self.times(most, low), self.times(most, high)
        more = ratio(self.more(most, low), self.more(least, low))
        average = ratio(*(self.losses(INDEPENDENT, most, low, what) for what in ("average", "loss")))
        common = {"rate": low, "count": most}
        return [
            self.claim("identical", not any(together), count=len(together), differ=np.count_nonzero(together)),
            self.claim("drift", above(growth, 1), growth=growth, **common),
            self.claim("small rate", above(small, 1), times=small, **common),
            self.claim("large rate", above(large, _DIVERGED), times=large, rate=high, count=most),
            self.claim("more replicas", above(more, 1), times=more, least=least, **common),
            self.claim("average", below(average, 1), times=average, **common),
        ]

    def meaning(self) -> str:
        count, rates = self.settings.replicas[-1], self.settings.rates
        low, high = (self.times(count, rate) for rate in (rates[0], rates[-1]))
        return self.text("meaning", count=count, low=low, high=high, last=rates[-1])
