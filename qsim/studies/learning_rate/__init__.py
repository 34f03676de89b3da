"""Learning rates at which training is stable, in mixed precision and in BF16 with stochastic rounding; Proposition 1, measured.

Proposition 1 is about weights whose gradient is `X + Y`: `X` is the same at every step, `Y` is drawn again. Stochastic rounding reduces
the correlation of their gradients in time, by a formula that `docs/derivations.md` derives.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

import qsim
from qsim.studies.choices import choice, require
from qsim.studies.learners.gpt import SIZES
from qsim.studies.learners.gpt_training import MIXED, STOCHASTIC, GPTTraining, begin, train_gpt, validation_loss
from qsim.studies.learners.text import LIBRARY, VOCABULARY, Text, text
from qsim.studies.learning_rate.correlations import Correlations
from qsim.studies.study import Run, TrialStudy

TRAINING, TOY = "training", "toy"
#: The number of groups of weights over which the toy's correlation is computed, each separately.
_GROUPS = 16


@dataclass(frozen=True)
class Settings:
    """The settings of the study."""

    data: str = choice(LIBRARY, "library, or a file or folder of text")
    size: str = choice("tiny", f"size of the GPT: {', '.join(SIZES)}")
    methods: tuple[str, ...] = choice((MIXED, STOCHASTIC), "of mixed, stochastic, kahan, nearest")
    lowest: float = choice(2.0**-10, "lowest learning rate")
    highest: float = choice(2.0**-1, "highest learning rate; those between are powers of two times the lowest")
    steps: int = choice(150, "number of updates")
    batch: int = choice(8, "sequences per update")
    context: int = choice(32, "length of sequences")
    clip: float = choice(1.0, "largest norm of all gradients; 0: no clipping")
    validation: int = choice(256, "number of held-out sequences")
    levels: tuple[float, ...] = choice((4.0, 16.0, 64.0), "distance between levels in the toy, divided by the learning rate")
    weights: int = choice(1 << 18, "number of weights in the toy")
    seeds: int = choice(6, "number of seeds")

    @property
    def rates(self) -> list[float]:
        """The learning rates, in factors of two."""
        found = [self.lowest]
        while 2 * found[-1] <= self.highest:
            found.append(2 * found[-1])
        return found


class LearningRateStudy(TrialStudy[Settings]):
    """Train a small transformer at learning rates that double until it learns nothing."""

    name = "learning-rate"
    question = "Does stochastic rounding tolerate higher learning rates than mixed precision?"
    source = "Ozkara et al., Stochastic Rounding for LLM Training, Table 3, Proposition 1"
    settings = Settings

    #: Three rates, few steps.
    quick_form = Settings(lowest=2.0**-8, highest=2.0**-6, steps=30, validation=32, levels=(4.0, 16.0), weights=1 << 16, seeds=1)

    #: GPT-2 small.
    full_form = Settings(size="small", lowest=2.0**-12, highest=2.0**-8, steps=250, context=1024, validation=64)

    def check(self, settings: Settings) -> None:
        """Methods, rates and levels that can be compared."""
        require(settings, "methods", {MIXED, STOCHASTIC} <= set(settings.methods), "contain mixed and stochastic")
        if not 0 < settings.lowest <= settings.highest:
            raise ValueError(f"lowest, highest: must be two rates, the lower one first; got {settings.lowest:g}, {settings.highest:g}")
        require(settings, "levels", settings.levels and min(settings.levels) >= 2, "be at least 2, the largest update")

    def ways(self, settings: Settings, seed: int) -> Iterator[dict[str, Any]]:
        """Every method at every rate; the toy, whose rate is in units of the distance between levels, with exact and stochastic updates."""
        trained = {name: getattr(settings, name) for name in ("steps", "data", "size", "batch", "context", "clip", "validation")}
        for method, rate in product(settings.methods, settings.rates):
            yield {"experiment": TRAINING, "method": method, "rate": rate, **trained, "weights": 0}
        yield from (toy(settings, method, levels) for method, levels in product((MIXED, STOCHASTIC), settings.levels))

    def work(self, run: Run) -> float:
        """On small models, optimizers in plain torch take most of the time."""
        if run.experiment == TOY:
            return float(run.weights / 2000)
        return float(run.steps * (1 if run.method == MIXED else 4))

    def measure(self, run: Run, device: torch.device) -> dict[str, Any]:
        """Train and validate; in the last half, compare gradients and updates with those of the step before."""
        if run.experiment == TOY:
            return {"correlations": toy_correlations(run, device)}
        words = text(run.data, run.context, device)
        how = GPTTraining(run.size, run.method, run.rate, run.steps, run.batch, run.context, run.clip, run.seed)
        model, optimizer = begin(how, device)
        watch = Correlations(model, run.steps // 2)
        losses: list[Tensor] = []

        def look(step: int, loss: Tensor) -> None:
            watch(step)
            losses.append(loss)

        train_gpt(how, model, optimizer, words, look)
        every = max(1, run.steps // 50)
        return {
            "loss": validation_loss(how, model, words, run.validation),
            "frequencies": frequencies_loss(words),
            "curve": torch.stack(losses)[every - 1 :: every].tolist(),
            **watch.means(),
        }


def toy(settings: Settings, method: str, levels: float) -> dict[str, Any]:
    """The values of runs of Proposition 1's toy."""
    unused = {"data": "", "size": "", "batch": 0, "context": 0, "clip": 0.0, "validation": 0}
    return {"experiment": TOY, "method": method, "rate": 1 / levels, "steps": 2, **unused, "weights": settings.weights}


def frequencies_loss(words: Text) -> float:
    """The loss of the unigram baseline on the held-out text: predictions from byte frequencies only."""
    learnt, held = (torch.bincount(part, minlength=VOCABULARY).double() for part in words.tokens.tensor_split((words.held_out,)))
    learnt += 1
    return float(-(held / held.sum() * (learnt / learnt.sum()).log()).sum())


def toy_correlations(run: Run, device: torch.device) -> list[float]:
    """Correlations of gradients and of updates over two consecutive steps in the toy, for groups of weights.

    A weight's gradient is `X + Y`, both 0 or 1 at random: `X` is the same in both steps and `Y` is not. The effect of a step is the change
    of the weight divided by the learning rate: the gradient itself plus the rounding error.
    """
    draw = torch.Generator().manual_seed(run.seed)
    lasting, *passing = (torch.randint(2, (run.weights,), generator=draw).float().to(device) for _ in range(3))
    start = torch.full((run.weights,), 1.5, device=device)
    weights = nn.Parameter(start.bfloat16() if run.method == STOCHASTIC else start)
    update = "stochastic" if run.method == STOCHASTIC else "nearest"
    optimizer = qsim.optim.SGD([weights], lr=run.rate * 2.0**-7, update=update, seed=run.seed)
    done = []
    for other in passing:
        before = weights.detach().double()
        weights.grad = (lasting + other).to(weights.dtype)
        optimizer.step()
        done.append(before - weights.detach().double())
    pairs = torch.stack(done, 1).chunk(_GROUPS)
    return [float(torch.corrcoef(pair.T)[0, 1]) for pair in pairs]
