"""Options of measurements of layers: dtype, points and duration."""

from __future__ import annotations

from qsim import FivePoint, Quantizer, recipes
from qsim.cli.bench._options import BenchOption, BenchSettings, shared


def layer_options(seconds: str) -> dict[str, BenchOption]:
    """The options, with a duration of turns by default."""
    return shared(dtype=("bf16", "fp32"), format="e4m3", backward="stochastic", accumulate=None, recipe=None, seconds=seconds)


def points_of(chosen: BenchSettings) -> FivePoint:
    """The points of the layers: those of a recipe, or round-to-nearest forward, and the given rounding backward."""
    if chosen.recipe is not None:
        if chosen.accumulate is not None:
            raise ValueError("--accumulate: an option of the recipe, as in --recipe \"fp8_hybrid.with_(accumulate='h100_fp8')\"")
        return recipes.resolve(chosen.recipe, chosen.format).points
    forward = Quantizer(chosen.format)
    if chosen.backward == "same":
        return FivePoint(forward, forward, act_bwd="same", weight_bwd="same", grad=forward, accumulate=chosen.accumulate)
    backward = Quantizer(chosen.format, chosen.backward)
    return FivePoint(forward, forward, act_bwd=backward, weight_bwd=backward, grad=backward, accumulate=chosen.accumulate)
