"""Language models in BF16: what rounding the updates costs in perplexity, and what it saves in time and memory beside mixed precision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from qsim.gpt import size
from qsim.studies.choices import choice
from qsim.studies.learners.gpt_training import KAHAN, NEAREST, STOCHASTIC
from qsim.studies.learners.text import VOCABULARY
from qsim.studies.llm.training import BF16, FP32, O1, O2, Run, outcome
from qsim.studies.report import Report
from qsim.studies.result import Result
from qsim.studies.study import Study

#: The methods, and what the report calls them.
METHODS = {
    STOCHASTIC: "BF16 + stochastic",
    KAHAN: "BF16 + Kahan",
    NEAREST: "BF16",
    O1: "mixed, O1",
    O2: "mixed, O2",
}
#: States and gradients in more bits, under stochastic updates.
MORE_BITS = ((BF16, FP32), (FP32, BF16), (FP32, FP32))


@dataclass(frozen=True)
class Settings:
    """What may be chosen."""

    data: str = choice("library", "library: the sources of Python's own; or a text file, or a folder of such")
    size: str = choice("tiny", "of the GPT: tiny, mini, or GPT-2's small or medium")
    vocabulary: int = choice(
        VOCABULARY, "tokens of the model; a text has 256, the bytes, and more only cost what they cost in other models"
    )
    context: int = choice(64, "length of sequences in bytes")
    batch: int = choice(8, "sequences of an update")
    micro_batches: int = choice(2, "in how many parts their gradient is summed up")
    steps: int = choice(150, "updates")
    rates: tuple[float, ...] = choice((1e-3, 2e-3), "largest learning rates; the last is the one at which more bits are tried")
    seeds: int = choice(3, "how many")


class LLM(Study[Settings, Run]):
    """Trains a GPT in BF16 and in mixed precision.

    Time and memory are measured, so that one run must follow the other: leave `--workers` at one for each GPU, and let nothing else run
    there.
    """

    name = "llm"
    question = "Does a language model train in BF16 alone as well as in mixed precision, and how much cheaper?"
    source = "Ozkara et al., Stochastic Rounding for LLM Training, Tables 2 to 6, Figure 4"
    settings = Settings
    run = Run

    def quick(self) -> Settings:
        """Few steps at one rate."""
        return Settings(context=32, batch=4, steps=10, rates=(2e-3,), seeds=2)

    def full(self) -> Settings:
        """GPT-2 small, for a GPU: as many tokens as nanoGPT has, for what memory and time a real model takes depends on them too.

        After 150 steps such a model knows how often bytes follow each other and little else, and which seed learns more by then is luck.
        """
        return Settings(size="small", vocabulary=50304, context=1024, batch=16, steps=500, rates=(3e-4, 6e-4))

    def runs(self, settings: Settings) -> Sequence[Run]:
        """Every method at every rate; at the last one also more bits for states and gradients."""
        _check(settings)
        found = []
        # Methods take turns, so that a GPU that gets slower does so for all of them.
        for seed in range(settings.seeds):
            for rate in settings.rates:
                for method in METHODS:
                    bits = FP32 if method in (O1, O2) else BF16
                    found.append(run_of(settings, method, rate, seed, bits, bits))
            found += [run_of(settings, STOCHASTIC, settings.rates[-1], seed, *bits) for bits in MORE_BITS]
        return found

    def work(self, run: Run) -> float:
        """By the token, for all methods alike, so that they keep their turns."""
        return run.steps * run.batch * run.context

    def measure(self, run: Run, device: torch.device) -> dict[str, Any]:
        """The loss on the held-out text, tokens a second, memory."""
        return outcome(run, device)

    def report(self, settings: Settings, results: Sequence[Result[Run]]) -> Report:
        """Perplexity, time and memory of the methods, and what more bits change."""
        from qsim.studies.llm.report import Findings

        return Findings(self, settings, results).report()


def run_of(settings: Settings, method: str, rate: float, seed: int, states: str, gradients: str) -> Run:
    """One of the runs that settings ask for."""
    return Run(
        settings.data,
        settings.size,
        settings.vocabulary,
        settings.context,
        method,
        states,
        gradients,
        settings.batch,
        settings.micro_batches,
        settings.steps,
        rate,
        seed,
    )


def _check(settings: Settings) -> None:
    size(settings.size)
    if settings.vocabulary < VOCABULARY:
        raise ValueError(f"vocabulary: must be at least {VOCABULARY}, for a text's tokens are its bytes; got {settings.vocabulary}")
    if settings.micro_batches < 1 or settings.batch % settings.micro_batches:
        raise ValueError(f"micro_batches: must divide the batch of {settings.batch} sequences; got {settings.micro_batches}")
    if settings.steps < 2:
        raise ValueError(f"steps: must be at least 2, for the first is not timed; got {settings.steps}")
