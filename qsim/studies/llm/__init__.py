"""Language models in BF16: the cost of rounded updates in perplexity, and their savings in time and memory over mixed precision."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, ClassVar

import torch

from qsim.studies.choices import choice, require, require_among
from qsim.studies.learners.gpt import SIZES, size
from qsim.studies.learners.gpt_training import KAHAN, NEAREST, STOCHASTIC
from qsim.studies.learners.text import VOCABULARY
from qsim.studies.llm.training import BF16, FP32, O1, O2, outcome
from qsim.studies.study import Run, TrialStudy

#: The methods, and their names in the report.
METHODS = {
    STOCHASTIC: "BF16 + stochastic",
    KAHAN: "BF16 + Kahan",
    NEAREST: "BF16",
    O1: "mixed, O1",
    O2: "mixed, O2",
}
#: What is measured of a training.
PERPLEXITY, BITS, COST = "perplexity", "bits", "cost"
MEASURES = (PERPLEXITY, BITS, COST)
#: What stochastic updates also get more of, as much as they save relative to O1: updates in equal time, sequences in equal memory.
TIME, MEMORY = "time", "memory"
#: Dtypes with more bits for states and gradients, under stochastic updates.
MORE_BITS = ((BF16, FP32), (FP32, BF16), (FP32, FP32))


@dataclass(frozen=True)
class Settings:
    """The settings of the study."""

    data: str = choice(
        "library", "library (the sources of Python's standard library), packages (installed ones), a text file, or a folder of text files"
    )
    size: tuple[str, ...] = choice(
        ("tiny",), f"sizes of the GPT, in increasing order; costs are measured of each, perplexity of one: {', '.join(SIZES)}"
    )
    vocabulary: int = choice(VOCABULARY, "vocabulary of the model; more than the text's tokens only make costs realistic")
    tokens: int = choice(VOCABULARY, "tokens of the text: 256 are its bytes, more are pairs learnt from it")
    context: int = choice(64, "length of sequences in tokens")
    batch: int = choice(8, "sequences per update")
    micro_batches: int = choice(2, "number of parts over which gradients are accumulated")
    steps: int = choice(150, "number of updates")
    rates: tuple[float, ...] = choice((1e-3, 2e-3, 4e-3), "peak learning rates, in increasing order; more bits are tried at the middle one")
    methods: tuple[str, ...] = choice(tuple(METHODS), f"methods: {', '.join(METHODS)}")
    tuned: tuple[str, ...] = choice((), "method=rate for each method: only the first seed then has all rates, and is not judged")
    faster: float = choice(1.0, "also give stochastic updates this many times the updates, for equal time")
    larger: float = choice(1.0, "also give stochastic updates this many times the batch, for equal memory")
    seeds: int = choice(3, "number of judged seeds")
    measures: tuple[str, ...] = choice(
        MEASURES,
        "perplexity; bits, more of them for moments and gradients; cost, which is speed and memory, in runs that must not share a GPU",
    )

    @property
    def rate_of(self) -> dict[str, float]:
        """The tuned rate of each method, if rates were tuned before."""
        return {method: float(rate) for method, _, rate in (each.partition("=") for each in self.tuned)}

    @property
    def judged(self) -> range:
        """The seeds that are judged: not that on which rates were tuned."""
        first = 1 if self.tuned else 0
        return range(first, first + self.seeds)

    @property
    def middle(self) -> float:
        """The rate at which more bits are tried."""
        return self.rate_of.get(STOCHASTIC, self.rates[len(self.rates) // 2])


class LLMStudy(TrialStudy[Settings]):
    """Train a GPT in BF16 and in mixed precision.

    If time and memory are measured, runs must not overlap: nothing else should run on the GPU.
    """

    name = "llm"
    question = "Does a language model train as well in pure BF16 as in mixed precision, and how much cheaper?"
    source = "Ozkara et al., Stochastic Rounding for LLM Training, Tables 2 to 6, Figure 4"
    settings = Settings
    # Results of earlier versions do not have these.
    added: ClassVar[dict[str, Any]] = {"timed": True, "tokens": VOCABULARY}

    #: Few steps at one rate.
    quick_form = Settings(context=32, batch=4, steps=10, rates=(2e-3,), seeds=2)

    #: GPT-2 small, for a GPU, with nanoGPT's vocabulary, on which the memory and time of a real model depend.
    #: After 150 steps such a model knows little more than the frequency of byte pairs, and differences between seeds are luck. The rates
    #: are to contain the best one of every method.
    full_form = Settings(size=("small",), vocabulary=50304, context=1024, batch=16, steps=500, rates=(6e-4, 1.2e-3, 2.4e-3))

    def timed(self, settings: Settings) -> bool:
        """Whether the cost is measured."""
        return COST in settings.measures

    def check(self, settings: Settings) -> None:
        """Sizes, methods and measures that fit one another."""
        for name in settings.size:
            size(name)
        several = {*settings.measures} == {COST} or len(settings.size) == 1
        require(settings, "size", settings.size and several, "be one, unless only costs are measured")
        require_among(settings, "measures", MEASURES)
        require_among(settings, "methods", [*METHODS])
        require(settings, "tokens", settings.tokens >= VOCABULARY, f"be at least {VOCABULARY}, the number of bytes")
        require(settings, "vocabulary", settings.vocabulary >= settings.tokens, f"be at least {settings.tokens}, the number of tokens")
        compared = COST not in settings.measures or {*settings.methods} == {*METHODS}
        require(settings, "methods", compared, f"be all of {', '.join(METHODS)} if cost is measured")
        if settings.tuned:
            named = {*settings.rate_of} == {*settings.methods} and {*settings.rate_of.values()} <= {*settings.rates}
            require(settings, "tuned", named, "name each method with one of the rates")
        divides = settings.micro_batches >= 1 and settings.batch % settings.micro_batches == 0
        require(settings, "micro_batches", divides, f"divide the batch of {settings.batch} sequences")
        require(settings, "steps", settings.steps >= 2, "be at least 2, because the first is not timed")

    def ways(self, settings: Settings, seed: int) -> Iterator[dict[str, Any]]:
        """Every method at every rate; for perplexity, at the middle one also more bits for states and gradients.

        The first seed tunes rates, if rates were not tuned before. Methods take turns, so that a GPU that slows down affects all of them.
        """
        judged, tuned = seed in settings.judged, settings.rate_of
        for rate, name, method in product(settings.rates, settings.size, settings.methods):
            if not judged or rate == tuned.get(method, rate):
                yield made(settings, method, rate, size=name)
        if judged:
            for bits in MORE_BITS if BITS in settings.measures else ():
                yield made(settings, STOCHASTIC, settings.middle, *bits)
            yield from (equal(settings, what) for what in (TIME, MEMORY) if saves(settings, what) != 1)

    def seeds(self, settings: Settings) -> range:
        """Those that are judged, and the one that tunes rates."""
        return range(settings.judged.stop)

    def work(self, run: Run) -> float:
        """Return the number of tokens, equal for all methods, so that they keep taking turns."""
        return float(run.steps * run.batch * run.context)

    def measure(self, run: Run, device: torch.device) -> dict[str, Any]:
        """The loss on the held-out text, tokens per second, and memory."""
        return outcome(run, device)


def made(settings: Settings, method: str, rate: float, states: str = "", gradients: str = "", size: str = "") -> dict[str, Any]:
    """The values of runs: with a method's own states and gradients, and the first size, unless others are named."""
    bits = FP32 if method in (O1, O2) else BF16
    common = {name: getattr(settings, name) for name in ("data", "vocabulary", "tokens", "context", "batch", "micro_batches", "steps")}
    way = {"method": method, "rate": rate, "states": states or bits, "gradients": gradients or bits}
    return {**common, **way, "size": size or settings.size[0], "timed": COST in settings.measures}


def saves(settings: Settings, what: str) -> float:
    """By how much stochastic updates are cheaper than O1."""
    return settings.faster if what == TIME else settings.larger


def equal(settings: Settings, what: str) -> dict[str, Any]:
    """The values of runs with stochastic updates that get more of what they save."""
    way, more = made(settings, STOCHASTIC, settings.middle), saves(settings, what)
    if what == TIME:
        return {**way, "steps": round(way["steps"] * more)}
    return {**way, "batch": round(way["batch"] * more), "micro_batches": 1}
