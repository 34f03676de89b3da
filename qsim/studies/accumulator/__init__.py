"""Accumulators: the error of narrow sums against their length, and what it does to a GPT that trains in FP8."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from qsim import accumulators
from qsim.accumulators import Aligned, Promoted
from qsim.studies.accumulator.dot_products import EXACT, MEAN_ONE, NORMAL, POSITIVE, WANG, errors
from qsim.studies.choices import choice, require
from qsim.studies.study import Run, TrialStudy

#: The kinds of runs.
SUMS, TRAINING = "sums", "training"
#: Training with torch's own float32 sums, and without rounding.
SINGLE, UNROUNDED = "fp32 sums", "no rounding"
#: The accumulators of the papers: the H100's chain, its promotion every 128 products, 16-bit sums of products and of chunks of 64.
CHAIN, PROMOTED, NARROW, CHUNKED = "h100_fp8", "h100_fp8_promoted", "Rounded('e6m9')", "Rounded('e6m9', chunk=64)"
#: Sums in E4M3, which end at 448: an effect that the study must be able to see.
CONTROL = "Rounded('e4m3', overflow='saturate')"
#: The accumulators of trained models.
TRAINED = (CHAIN, PROMOTED, NARROW, CHUNKED, CONTROL)

#: The units whose sums of E4M3 products are measured: those with scales inside, and those of other numbers, are not.
_TAKING_E4M3 = tuple(name for name, known in accumulators.NAMED.items() if isinstance(known, (Aligned, Promoted)))


@dataclass(frozen=True)
class Settings:
    """The settings of the study."""

    units: tuple[str, ...] = choice(_TAKING_E4M3, "accumulators whose sums are measured, next to the papers'")
    lengths: tuple[int, ...] = choice((128, 512, 1024, 4096, 16384), "products in a sum, from few to many")
    repeats: int = choice(4, "seeds of the sums")
    data: str = choice("library", "library (the sources of Python's standard library), a text file, or a folder of text files")
    layers: int = choice(2, "blocks of the GPT")
    width: int = choice(32, "width of the GPT")
    heads: int = choice(2, "heads of its attention")
    context: int = choice(64, "length of sequences in bytes")
    batch: int = choice(16, "sequences per update; times their length, the products in the sums of weight gradients")
    steps: int = choice(30, "number of updates")
    rate: float = choice(5e-3, "peak learning rate")
    seeds: int = choice(6, "number of seeds of the training")


class AccumulatorStudy(TrialStudy[Settings]):
    """Measure sums of E4M3 products in every named unit and in 16-bit sums, and train a GPT in FP8 with them."""

    name = "accumulator"
    question = "How wide must a sum of FP8 products be, by itself and in training?"
    source = (
        "DeepSeek-AI, DeepSeek-V3 Technical Report, Section 3.3.2; Wang et al., Training Deep Neural Networks with 8-bit Floating Point "
        "Numbers, 2018; Sun et al., Hybrid 8-bit Floating Point Training and Inference, 2019"
    )
    settings = Settings
    shared = ("layers", "width", "heads", "context", "batch", "steps", "rate")

    #: One more unit, short sums, few steps.
    quick_form = Settings(units=("h100_bf16",), lengths=(128, 1024), repeats=2, width=16, context=16, batch=4, steps=2, seeds=2)

    #: A larger GPT with sums of 8192 products, for a GPU.
    #: After more steps, runs with the same seed differ by more than the quarter of a percent that is to be found.
    full_form = Settings(layers=4, width=128, heads=4, context=256, batch=32, steps=100, rate=2e-3, seeds=6)

    def check(self, settings: Settings) -> None:
        """Lengths in order, units that exist, and enough seeds."""
        rise = len(settings.lengths) > 1 and list(settings.lengths) == sorted(set(settings.lengths)) and settings.lengths[0] > 0
        require(settings, "lengths", rise, "be at least two, from few to many")
        require(settings, "heads", settings.heads > 0 and settings.width % settings.heads == 0, f"divide the width of {settings.width}")
        for name in settings.units:
            accumulators.resolve(name)
        for name in ("repeats", "seeds"):
            require(settings, name, getattr(settings, name) >= 2, "be at least 2, for an interval")

    def ways(self, settings: Settings, seed: int) -> Iterator[dict[str, Any]]:
        """Sums of every unit for each kind of operands, and a GPT for each accumulator of the papers."""
        narrow, every = (NARROW, WANG), (EXACT, *adders(settings))
        untrained = {**dict.fromkeys(self.shared, 0), "rate": 0.0, "lengths": tuple(settings.lengths)}
        for kind, names in ((NORMAL, every), (POSITIVE, every), (MEAN_ONE, narrow)) if seed < settings.repeats else ():
            yield from ({"what": SUMS, "operands": kind, "accumulate": name, **untrained} for name in names)
        for name in (SINGLE, UNROUNDED, *TRAINED) if seed < settings.seeds else ():
            yield {"what": TRAINING, "operands": settings.data, "accumulate": name, "lengths": ()}

    def seeds(self, settings: Settings) -> range:
        """The seeds of sums and of the training."""
        return range(max(settings.repeats, settings.seeds))

    def work(self, run: Run) -> float:
        """Return a cost proportional to products; emulated ones take longer."""
        if run.what == SUMS:
            return float(sum(run.lengths)) * 1024
        products = 36 * run.layers * run.width**2 * run.context * run.batch * run.steps
        return float(products * (0.02 if run.accumulate in (SINGLE, UNROUNDED) else 1.0) + 1e6)

    def measure(self, run: Run, device: torch.device) -> dict[str, Any]:
        """Errors of sums, or the loss on held-out text and errors of gradients."""
        if run.what == SUMS:
            return errors(run.operands, run.accumulate, run.lengths, run.seed, device)
        from qsim.studies.accumulator.training import outcome

        return outcome(run, device)


def adders(settings: Settings) -> list[str]:
    """The accumulators whose sums of E4M3 products are measured, each once."""
    return list(dict.fromkeys((CHAIN, PROMOTED, *settings.units, NARROW, CHUNKED, WANG)))
